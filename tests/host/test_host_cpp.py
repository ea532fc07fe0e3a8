"""The C++ tests of planning and index maths in tests/host: compiled and run without a GPU."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from build_tools.compile import toolchain

ROOT = Path(__file__).resolve().parents[2]
HOST_SOURCES = ROOT / "csrc/host"
TESTS = ROOT / "tests/host"

# Signed overflow and its like trap, which needs no sanitizer library. Compiles take longer than the
# programs run.
FLAGS = (
    *("-std=c++20", "-O0", "-Wall", "-Wextra", "-Werror", "-pthread"),
    *("-fsanitize=undefined", "-fsanitize-undefined-trap-on-error"),
    *(f"-I{ROOT / 'csrc'}", f"-I{TESTS}"),
)

PLANNING = ("select_instance", "plan_steps", "tensor_map")
PLAN_FORWARD = (*PLANNING, "choose_forward", "plan_forward")
PLAN_BACKWARD = (*PLANNING, "choose_backward", "plan_backward")
PLAN_BOTH = (*PLAN_FORWARD, "choose_backward", "plan_backward")

# What each test program is linked with: sources of csrc/host.
PROGRAMS = {
    "test_index_maths": (),
    "test_sequence": (),
    "test_block_lists": (),
    "test_e4m3_quotient": (),
    "test_exact_sum": (),
    "test_tile_order": ("plan_steps",),
    "test_dropout": (),
    "test_select_instance": ("select_instance",),
}
# Those with a CUDA runtime of the test's own: only its headers are needed.
CUDA_PROGRAMS = {
    "test_out_rounding": (),
    "test_tensor_map": ("tensor_map",),
    "test_plan_forward": PLAN_FORWARD,
    "test_plan_decode": PLAN_FORWARD,
    "test_plan_latent": PLAN_BOTH,
    "test_plan_packed": PLAN_BOTH,
    "test_plan_backward": PLAN_BACKWARD,
    "test_plan_backward_sm90": PLAN_BOTH,
    "test_plan_long": PLAN_BOTH,
    "test_plan_masked": PLAN_BOTH,
    "test_plan_tangents": PLAN_BOTH,
    "test_turns": PLAN_BACKWARD,
    "test_run": (*PLAN_BOTH, "run_forward", "run_backward"),
    "test_device_info": ("device_info",),
    "test_device_limits": ("device_info",),
}


@pytest.fixture(scope="session")
def compiler() -> str:
    path = shutil.which(toolchain.host_compiler())
    if path is None:
        pytest.skip(f"no C++ compiler: {toolchain.host_compiler()} is not on the path")
    return path


@pytest.fixture(scope="session")
def objects(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where objects that several programs share are kept."""
    return tmp_path_factory.mktemp("host_objects")


def _run(*command: str | Path) -> str:
    finished = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    text = finished.stdout + finished.stderr
    assert finished.returncode == 0, f"{command[0]} ended with {finished.returncode}\n{text}"
    return text


def _compile(compiler: str, source: Path, folder: Path, *flags: str) -> Path:
    target = folder / f"{source.stem}.o"
    if not target.exists():
        _run(compiler, *FLAGS, *flags, "-c", source, "-o", target)
    return target


def _build_and_run(
    compiler: str, objects: Path, name: str, sources: tuple[str, ...], *flags: str
) -> str:
    files = [TESTS / f"{name}.cpp", TESTS / "main.cpp"]
    files += [HOST_SOURCES / f"{source}.cpp" for source in sources]
    program = objects / name
    compiled = [_compile(compiler, file, objects, *flags) for file in files]
    _run(compiler, *FLAGS, *compiled, "-o", program)
    return _run(program)


@pytest.mark.parametrize("name", PROGRAMS)
def test_program(name: str, compiler: str, objects: Path) -> None:
    assert "0 failed checks" in _build_and_run(compiler, objects, name, PROGRAMS[name])


@pytest.mark.parametrize("name", CUDA_PROGRAMS)
def test_program_with_cuda_headers(name: str, compiler: str, objects: Path) -> None:
    nvcc = toolchain.find_nvcc()
    if nvcc is None:
        pytest.skip(f"no CUDA runtime headers: there is no nvcc in {toolchain.NVCC_PLACES}")
    flags = [part for folder in nvcc.include_dirs for part in ("-isystem", str(folder))]
    text = _build_and_run(compiler, objects, name, CUDA_PROGRAMS[name], *flags)
    assert "0 failed checks" in text


def test_every_source_is_covered() -> None:
    """A new file of csrc/host or tests/host has to find its place here."""
    programs = {**PROGRAMS, **CUDA_PROGRAMS}
    linked = {source for sources in programs.values() for source in sources}
    assert linked == {path.stem for path in HOST_SOURCES.glob("*.cpp")}
    assert set(programs) == {path.stem for path in TESTS.glob("test_*.cpp")}
