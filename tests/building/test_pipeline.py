"""The build at work: compiles, what ptxas says of them, the backend, tools and headers that it
takes, and what is refused.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import venv
import zipfile
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

pytest.importorskip("ninja")  # build_tools writes ninja files with the ninja package

from build_tools import build_extension, build_kernels, install
from build_tools.build_extension import Backend
from build_tools.compile import archs, ninja_build, toolchain, torch_versions
from build_tools.compile.toolchain import Nvcc, ToolchainError
from build_tools.report import resource_report, spill_allowances
from kernel_table.all_rows import ALL_ROWS
from tests.building.kernel_rows import ROW
from tests.building.project_tree import cutlass_headers
from third_party.cutlass import fetch

REPO = Path(__file__).resolve().parents[2]
NVCC = Nvcc(Path("/toolkit/bin/nvcc"), "13.0.88", ())


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (build_extension.BACKEND_VARIABLE, archs.VARIABLE, "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)


# ptxas's report

PTXAS = """\
ptxas info    : 11 bytes gmem
ptxas info    : Compiling entry function '_ZN4sm8014forward_kernelI\
28fwd_sm80_bf16_hd128_windowedEEvv' for 'sm_90'
ptxas info    : Function properties for _ZN4sm8014forward_kernelI28fwd_sm80_bf16_hd128_windowedEEvv
    32 bytes stack frame, 28 bytes spill stores, 36 bytes spill loads
ptxas info    : Function properties for _Z6helperv
    64 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 32 bytes cumulative stack size
ptxas info    : Compile time = 604.861 ms
ptxas info    : Compiling entry function '_Z17preprocess_kernelv' for 'sm_80'
ptxas info    : Function properties for _Z17preprocess_kernelv
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 30 registers, used 0 barriers, 4096+16 bytes smem, 400 bytes cmem[0]
"""


def test_ptxas_report_is_read() -> None:
    main, helper = resource_report.parse_ptxas(PTXAS)
    assert (main.arch, main.registers, main.stack, main.spill) == ("sm_90", 255, 32, 36)
    assert main.static_smem == 0
    assert main.is_main_kernel
    assert main.instance(["fwd_sm80_bf16_hd128_full", ROW.name]) == ROW.name
    assert (helper.arch, helper.registers, helper.spill) == ("sm_80", 30, 0)
    assert helper.static_smem == 4096
    assert helper.instance([ROW.name]) is None
    with pytest.raises(ValueError, match="cannot read ptxas"):
        resource_report.parse_ptxas(PTXAS.replace("Used 30 registers", "Used many registers"))


SERIALIZED = "(C7512) Potential Performance Loss: wgmma.mma_async instructions are serialized"


@pytest.mark.parametrize(
    ("log", "allowed", "error"),
    [
        (PTXAS, 36, None),
        (PTXAS, 35, f"{ROW.name} (sm_90) spills 36 bytes; 35 allowed"),
        (PTXAS, 0, f"{ROW.name} (sm_90) spills 36 bytes; 0 allowed"),
        (f"ptxas info    : {SERIALIZED}\n{PTXAS}", 36, f"error: {SERIALIZED}"),
        (None, 0, f"{ROW.name}: ptxas reported no kernel"),
    ],
    ids=["allowed", "more", "none-allowed", "serialized", "no-kernel"],
)
def test_what_fails_the_report(tmp_path, monkeypatch, capsys, log, allowed, error) -> None:
    monkeypatch.setattr(resource_report, "dynamic_smem", lambda build_dir: {ROW.name: 1000})
    monkeypatch.setattr(spill_allowances, "load", lambda: {ROW.name: allowed})
    (tmp_path / "unit.o.log").write_text(log or "")
    logs = [] if log is None else [str(tmp_path / "unit.o.log")]
    manifest = {"logs": logs, "rows": [ROW.name]}
    (tmp_path / build_kernels.MANIFEST_NAME).write_text(json.dumps(manifest))
    assert resource_report.main(["--build-dir", str(tmp_path)]) == (0 if error is None else 1)
    output = capsys.readouterr()
    assert (error or "") in output.err and bool(output.err) is (error is not None)
    if log is not None:
        line = r"forward_kernel.*sm_90\s+255\s+36\s+32\s+1000$"
        assert re.search(line, output.out, re.MULTILINE)


def test_what_a_build_spills_can_be_accepted(tmp_path) -> None:
    """Of its own rows; others keep what they have, and what is no row of the table goes."""
    file = tmp_path / "allowances.json"
    file.write_text(json.dumps({"another": 8, "gone": 4, ROW.name: 500}))
    spills = resource_report.spills_of(resource_report.parse_ptxas(PTXAS), [ROW.name])
    assert spills == {ROW.name: 36}
    spill_allowances.accept(spills, [ROW.name, "another"], file)
    assert spill_allowances.load(file) == {"another": 8, ROW.name: 36}
    spill_allowances.accept({ROW.name: 0}, [ROW.name, "another"], file)
    assert spill_allowances.load(file) == {"another": 8}
    assert set(spill_allowances.load()) <= {row.name for row in ALL_ROWS}


def test_an_auxiliary_kernel_may_not_spill() -> None:
    _, helper = resource_report.parse_ptxas(PTXAS)
    spilling = replace(helper, spill_stores=8)
    assert resource_report.excess_spills([spilling], {ROW.name: 100}) == [
        "_Z17preprocess_kernelv (sm_80) spills 8 bytes; 0 allowed"
    ]


# Kernels and binding


def test_a_new_torch_is_named_where_the_binding_does_not_compile(monkeypatch, tmp_path) -> None:
    """Not where kernels do not."""
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch_versions, "NEWEST_TRIED", (2, 14))

    def build_plan(plan: build_kernels.Plan, of_archive: list[ninja_build.Product]) -> None:
        raise ninja_build.BuildError(Path("build.ninja"), 1)

    monkeypatch.setattr(build_kernels, "build_plan", build_plan)
    plan = build_kernels.Plan(build_kernels.BuildOptions(build_dir=tmp_path), (), None)
    compiles = [ninja_build.Compile(tmp_path / "unit.cpp", tmp_path / "unit.o", ())]
    extension = ninja_build.Product(tmp_path, compiles, ninja_build.Link(tmp_path / "x", ""))
    monkeypatch.setattr(torch, "__version__", "2.14.0")
    with pytest.raises(ninja_build.BuildError):
        build_extension.build_both(plan, extension)
    monkeypatch.setattr(torch, "__version__", "2.16.0")
    with pytest.raises(ToolchainError, match=r"does not compile: torch 2\.16\.0 is newer"):
        build_extension.build_both(plan, extension)
    compiles[0].object.touch()
    with pytest.raises(ninja_build.BuildError):
        build_extension.build_both(plan, extension)


def test_the_binding_stands_before_the_kernels_of_one_build(monkeypatch, tmp_path) -> None:
    """A torch that it does not fit shows in seconds."""
    pytest.importorskip("torch")
    plan = build_kernels.Plan(build_kernels.BuildOptions(build_dir=tmp_path / "kernels"), (), None)
    monkeypatch.setattr(build_kernels, "plan_without_device_code", lambda major: plan)
    monkeypatch.setattr(build_extension, "REPO", tmp_path)
    monkeypatch.setattr(build_extension, "_link_command", lambda archive, headers: "link")
    monkeypatch.setattr(build_kernels, "closing_line", lambda plan, cost: "")
    monkeypatch.setattr(ninja_build, "total_cost", lambda compiles: None)
    built: list[ninja_build.Product] = []
    monkeypatch.setattr(ninja_build, "build", lambda products, jobs: built.extend(products))
    path = build_extension.build(Backend.binding)
    assert [product.link.target for product in built] == [path, plan.archive]
    assert built[0].link.inputs == (plan.archive,)
    assert all(job.source.name.startswith("binding_") for job in built[0].compiles)


# The backend


@pytest.mark.parametrize(
    ("asked", "nvcc", "cuda", "expected"),
    [
        ("", NVCC, "13.1", (Backend.cuda, "nvcc 13.0.88")),
        ("cuda", NVCC, "13.0", (Backend.cuda, "")),
        ("cpu", NVCC, "13.0", (Backend.cpu, "FLASH_ATTN_CUDA_BACKEND=cpu")),
        ("", None, "13.0", (Backend.cpu, "there is no nvcc in ")),
        ("", NVCC, None, (Backend.cpu, "without CUDA")),
        ("", NVCC, "12.8", r"^torch was built for CUDA 12\.8 but /toolkit/bin/nvcc is CUDA 13\.0"),
        ("", Nvcc(Path("/toolkit/bin/nvcc"), "11.8.89", ()), "11.8",
         r"nvcc 12\.0 or newer, and /toolkit.* is 11\.8\.89"),
        ("cuda", None, "13.0", "BACKEND=cuda cannot be had: there is no nvcc in"),
        ("cuda", NVCC, None, "was built without CUDA"),
        ("binding", NVCC, None, r"binding cannot be had: torch .* without CUDA"),
        ("gpu", NVCC, "13.0", "expected one of auto, cuda, cpu, binding, got 'gpu'"),
    ],
)  # fmt: skip
def test_the_backend_is_chosen_by_nvcc_and_torch(monkeypatch, asked, nvcc, cuda, expected) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setenv(build_extension.BACKEND_VARIABLE, asked)
    monkeypatch.setattr(toolchain, "find_nvcc", lambda: nvcc)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    if isinstance(expected, str):
        with pytest.raises((ToolchainError, ValueError), match=expected):
            build_extension.choose_backend()
        return
    choice = build_extension.choose_backend()
    assert choice.backend is expected[0] and expected[1] in choice.reason
    line = build_extension.announcement(choice)
    assert ("CPU backend only" in line) is (choice.backend is Backend.cpu) and "\n" not in line


@pytest.mark.parametrize(
    ("cuda", "words"),
    [("13.0", "or with pip install '.[nvcc13]', then"), ("12.8", "or with nvcc of CUDA 12")],
)
def test_a_gpu_without_nvcc_is_told_what_gives_kernels(monkeypatch, cuda: str, words: str) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.delenv(build_extension.BACKEND_VARIABLE, raising=False)
    monkeypatch.setattr(toolchain, "find_nvcc", lambda: None)
    monkeypatch.setattr(archs, "usable_capabilities", lambda: [90])
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch, "__version__", "2.14.1")
    reason = build_extension.choose_backend().reason
    python = f"cp3{sys.version_info[1]}"
    version = torch_versions.package_version()
    wheel = f"{version}+torch2.14.cu{cuda.replace('.', '')}-{python}-{python}-*.whl"
    assert f"flash_attn_cuda-{wheel}, {words}" in reason


def test_the_extension_without_kernels(monkeypatch, tmp_path) -> None:
    """It needs headers of torch's CUDA, of nvcc or of pip's packages, and no nvcc."""
    torch = pytest.importorskip("torch")
    monkeypatch.setenv(build_extension.BACKEND_VARIABLE, "binding")
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    nvcc = replace(NVCC, include_dirs=(tmp_path / "toolkit",))
    monkeypatch.setattr(toolchain, "find_nvcc", lambda: nvcc)
    runtime, crt = (tmp_path / f"nvidia/cuda_{name}" for name in ("runtime", "nvcc"))
    monkeypatch.setattr(toolchain, "_pip_cuda_roots", lambda: [crt, runtime])
    (runtime / "include").mkdir(parents=True)
    (runtime / "include/cuda_runtime_api.h").write_text("#define CUDART_VERSION 12080\n")
    with pytest.raises(ToolchainError, match=r"no headers of CUDA 12: pip install 'nvidia-cuda-nv"):
        build_extension.choose_backend()
    (crt / "include/crt").mkdir(parents=True)
    (crt / "include/crt/host_defines.h").touch()
    assert build_extension.choose_backend().backend is Backend.binding
    assert toolchain.cuda_headers(12) == (runtime / "include", crt / "include")
    assert toolchain.cuda_headers(13) == (tmp_path / "toolkit",)


def test_torchs_outside_of_the_range(monkeypatch) -> None:
    """An older one is refused at once; a newer one is tried, and where that fails, it is named."""
    assert torch_versions.OLDEST < torch_versions.NEWEST_TRIED
    torch_versions.check("2.14.1+cu130")
    monkeypatch.setattr(torch_versions, "OLDEST", (2, 8))
    monkeypatch.setattr(torch_versions, "NEWEST_TRIED", (2, 14))
    torch_versions.check("2.8.0")
    assert torch_versions.requirement() == "torch>=2.8"
    with pytest.raises(ToolchainError, match=r"torch 2\.7\.1.* is older .*: 2\.8 to 2\.14 work"):
        torch_versions.check("2.7.1+cu126")
    assert torch_versions.advice("2.14.3+cu132") is None
    assert "pip install 'torch==2.14.*'" in str(torch_versions.advice("3.0.0.dev20270101"))


@pytest.mark.parametrize(
    ("goal", "gpus", "variables", "expected"),
    [
        ("demo", [], {}, "cpu"),
        ("test", [], {}, "binding"),
        ("demo", [90], {}, "auto"),
        ("test", [80, 90], {}, "auto"),
        ("demo", [], {"FLASH_ATTN_CUDA_ARCHS": "90"}, "auto"),  # for a GPU that is elsewhere
        ("test", [], {"FLASH_ATTN_CUDA_BACKEND": "cpu"}, "cpu"),
        ("demo", [90], {"FLASH_ATTN_CUDA_BACKEND": "cuda"}, "cuda"),
        ("test", [], {"TORCH_CUDA_ARCH_LIST": "9.0"}, "binding"),  # images set it for no reason
    ],
)
def test_what_the_makefile_installs(monkeypatch, capsys, goal, gpus, variables, expected) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(archs, "usable_capabilities", lambda: gpus)
    monkeypatch.setattr(install, "has_headers", lambda: True)
    assert install.wanted_backend(install.Goal(goal)) == expected
    lines = capsys.readouterr().out.splitlines()
    has_choice = gpus or any(name.startswith("FLASH") for name in variables)
    assert len(lines) == (0 if has_choice else 1)
    assert has_choice or f"FLASH_ATTN_CUDA_ARCHS=90 make {goal}" in lines[0]


def test_tests_without_cuda_headers_take_the_cpu_backend(monkeypatch) -> None:
    """Of a torch without CUDA, and where pip cannot bring what torch's packages lack."""
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.version, "cuda", None)
    assert install.backend_without_a_gpu(install.Goal.test) is Backend.cpu
    monkeypatch.setattr(torch.version, "cuda", "11.8")
    monkeypatch.setattr(toolchain, "find_nvcc", lambda: None)
    monkeypatch.setattr(toolchain, "_pip_cuda_roots", lambda: [])
    asked: list[str] = []

    def run(command: list[str], status: int) -> subprocess.CompletedProcess[str]:
        asked.append(command[-1])
        return subprocess.CompletedProcess(command, status)

    for status, backend in ((0, Backend.binding), (1, Backend.cpu)):
        monkeypatch.setattr(install.subprocess, "run", partial(run, status=status))
        assert install.backend_without_a_gpu(install.Goal.test) is backend
    assert asked == ["nvidia-cuda-crt==11.*"] * 2
    assert install.backend_without_a_gpu(install.Goal.demo) is Backend.cpu


def test_a_missing_torch_is_refused_with_what_helps(monkeypatch) -> None:
    monkeypatch.setattr(toolchain, "find_nvcc", lambda: NVCC)
    monkeypatch.setattr(toolchain, "make_torch_importable", lambda: False)
    with pytest.raises(ToolchainError, match=r"has no torch.*--no-build-isolation"):
        build_extension.choose_backend()


def test_torch_is_found_where_a_pth_file_names_it(tmp_path) -> None:
    """As under pip's isolation: a folder first on PYTHONPATH takes the environment off sys.path."""
    environment, elsewhere, isolation = (tmp_path / name for name in ("env", "lib", "isolation"))
    venv.create(environment, with_pip=False)
    (elsewhere / "torch").mkdir(parents=True)
    (elsewhere / "torch/__init__.py").write_text("import beside_torch\n")
    (elsewhere / "beside_torch.py").touch()
    packages = next(environment.glob("lib/python*/site-packages"))
    (packages / "elsewhere.pth").write_text(f"{elsewhere}\n")
    isolation.mkdir()
    hide = f"import sys\nsys.path[:] = [p for p in sys.path if p not in {[str(elsewhere)]}]\n"
    (isolation / "sitecustomize.py").write_text(hide)
    script = (
        "import importlib.util\n"
        "assert importlib.util.find_spec('torch') is None\n"
        "from build_tools.compile import toolchain\n"
        "assert toolchain.make_torch_importable()\n"
        "import torch\n"
    )
    variables = {**os.environ, "PYTHONPATH": f"{isolation}{os.pathsep}{REPO}"}
    subprocess.run([environment / "bin/python", "-c", script], env=variables, check=True)


# Tools


def test_ninja_is_found_on_path_where_its_package_does_not_know(tmp_path, monkeypatch) -> None:
    import ninja

    of_package, on_path = (tmp_path / name / "ninja" for name in ("package", "path"))
    for program in (of_package, on_path):
        program.parent.mkdir()
        program.write_text("#!/bin/sh\n")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", str(on_path.parent))
    monkeypatch.setattr(ninja, "BIN_DIR", str(of_package.parent))
    assert toolchain.find_ninja() == str(of_package)
    monkeypatch.setattr(ninja, "BIN_DIR", "")  # so it is under pip's build isolation
    assert toolchain.find_ninja() == str(on_path)
    on_path.unlink()
    with pytest.raises(ToolchainError, match="the program ninja is not installed: pip install"):
        toolchain.find_ninja()


def test_ninja_is_needed_for_the_extension_alone() -> None:
    script = (
        "import sys\n"
        "sys.modules['ninja'] = None\n"  # an import of it fails
        "from build_tools import build_extension; from build_tools.compile import toolchain\n"
        "assert build_extension.choose_backend().backend.value == 'cpu'\n"
        "try:\n"
        "    toolchain.find_ninja()\n"
        "except toolchain.ToolchainError as error:\n"
        "    print(error)\n"
    )
    variables = {**os.environ, build_extension.BACKEND_VARIABLE: "cpu"}
    result = subprocess.run(
        [sys.executable, "-c", script],
        cwd=REPO, env=variables, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert "ninja is not installed: pip install 'setuptools>=77.0.3' 'ninja>=1.11'" in result.stdout


@pytest.mark.parametrize(
    ("nvcc", "message"),
    [
        (None, "error: .*CUDA_HOME.*PATH.*pip"),
        (Nvcc(Path("nvcc"), "11.8.89", ()), r"nvcc 12\.0 or newer"),
    ],
)
def test_kernels_without_an_nvcc_that_suits_are_an_error(
    monkeypatch, capsys, nvcc, message
) -> None:
    toolchain.check_nvcc_version(Nvcc(Path("nvcc"), "12.0.76", ()))
    monkeypatch.setattr(toolchain, "find_nvcc", lambda: nvcc)
    assert build_kernels.main([]) == 1
    assert re.search(message, capsys.readouterr().err)


NVCC_TEXT = "#!/bin/sh\necho 'Cuda compilation tools, release 13.0, V13.0.88'\n"


def fake_nvcc(root: Path, text: str = NVCC_TEXT) -> Path:
    """An executable bin/nvcc with this text, of a toolkit in ``root``."""
    nvcc = root / "bin/nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text(text)
    nvcc.chmod(0o755)
    return nvcc


def test_nvcc_of_pips_packages_is_found_with_their_headers(tmp_path, monkeypatch) -> None:
    root = tmp_path / "nvidia/cu13"
    nvcc = fake_nvcc(root)
    (root / "include").mkdir()
    (root / "include/cuda_runtime.h").touch()
    monkeypatch.setattr(toolchain, "target_site_packages", lambda: [tmp_path])
    monkeypatch.setattr(toolchain, "SYSTEM_NVCC", tmp_path / "absent")
    monkeypatch.setattr(toolchain.shutil, "which", lambda name: None)
    found = toolchain.find_nvcc.__wrapped__()
    assert found == Nvcc(nvcc, "13.0.88", (root / "include",))
    assert found.major == 13


@pytest.mark.parametrize("variable", ["CUDA_HOME", "CUDA_PATH"])
def test_a_toolkit_that_is_named(tmp_path, monkeypatch, capsys, variable) -> None:
    """One that is not there is passed over, with a word; one whose nvcc does not run is refused."""
    on_path = fake_nvcc(tmp_path / "other")
    monkeypatch.setattr(toolchain.shutil, "which", lambda name: str(on_path))
    monkeypatch.setenv(variable, str(tmp_path / "absent"))
    found = toolchain.find_nvcc.__wrapped__()
    assert found is not None and found.path == on_path
    assert f"{variable}: expected the folder" in capsys.readouterr().err
    nvcc = fake_nvcc(tmp_path / "broken", "not a program")
    monkeypatch.setenv(variable, str(tmp_path / "broken"))
    with pytest.raises(ToolchainError, match=f"{variable}: {nvcc} cannot be run"):
        toolchain.find_nvcc.__wrapped__()


def test_an_nvcc_that_cannot_be_run_is_passed_over(tmp_path, monkeypatch) -> None:
    broken = fake_nvcc(tmp_path, "not a program")
    monkeypatch.setattr(toolchain, "target_site_packages", lambda: [])
    monkeypatch.setattr(toolchain, "SYSTEM_NVCC", tmp_path / "absent")
    monkeypatch.setattr(toolchain.shutil, "which", lambda name: str(broken))
    assert toolchain.find_nvcc.__wrapped__() is None


def test_every_package_is_installed() -> None:
    """Setuptools takes the list as it is: a folder that is not on it is missing from a wheel."""
    listed = re.search(r"^packages = \[(.*?)\]", (REPO / "pyproject.toml").read_text(), re.M | re.S)
    assert listed is not None
    packages = (REPO / "flash_attn_cuda").rglob("__init__.py")
    names = [".".join(path.parent.relative_to(REPO).parts) for path in packages]
    assert sorted(re.findall(r'"([\w.]+)"', listed[1])) == sorted(names)


# CUTLASS


@pytest.fixture
def wheel(tmp_path, monkeypatch) -> Path:
    """Of which alone the headers are wanted; the pinned one."""
    path = tmp_path / "nvidia_cutlass.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(fetch.HEADERS_IN_WHEEL + "cutlass/version.h", "#define X\n")
        archive.writestr("cutlass_library/generator.py", "import os\n")
    monkeypatch.setattr(fetch, "SHA256", fetch.hashlib.sha256(path.read_bytes()).hexdigest())
    return path


def test_a_tampered_wheel_is_refused_and_nothing_is_unpacked(wheel, tmp_path, monkeypatch) -> None:
    with wheel.open("ab") as file:
        file.write(b"more")
    monkeypatch.setattr(fetch, "download", lambda folder: wheel)
    include = tmp_path / "include"
    with pytest.raises(
        fetch.FetchError, match=f"expected sha256 {fetch.SHA256}, got [0-9a-f]{{64}}"
    ):
        fetch.fetch(include)
    assert not include.exists()


def test_the_pinned_wheel_is_unpacked_once(wheel, tmp_path, monkeypatch) -> None:
    downloads = []
    monkeypatch.setattr(fetch, "download", lambda folder: downloads.append(folder) or wheel)
    include = tmp_path / "third_party/include"
    assert fetch.fetch(include) == include
    assert fetch.fetch(include) == include
    assert len(downloads) == 1
    fetch.unpack(wheel, include)  # after another build did
    names = [path.relative_to(include).as_posix() for path in include.rglob("*") if path.is_file()]
    assert names == ["cutlass/version.h"]
    assert list(include.parent.iterdir()) == [include]


def test_headers_that_are_not_all_there_are_fetched(wheel, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(fetch, "download", lambda folder: wheel)
    include = tmp_path / "include"
    include.mkdir()
    fetch.fetch(include)
    assert (include / "cutlass/version.h").is_file()
    (include / "cutlass/version.h").rename(include / "something_else.h")
    with pytest.raises(fetch.FetchError, match=r"without cutlass/version\.h: remove it"):
        fetch.fetch(include)


def test_cutlass_path_must_hold_headers_of_the_pinned_version(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("CUTLASS_PATH", str(tmp_path))
    with pytest.raises(ToolchainError, match="CUTLASS_PATH"):
        toolchain.find_cutlass()
    cutlass_headers(tmp_path, "4.2.7")
    assert toolchain.find_cutlass() == tmp_path
    for version in ("4.3.0", "3.2.0"):
        cutlass_headers(tmp_path, version)
        with pytest.raises(ToolchainError, match=f"PATH: expected CUTLASS 4.2, got {version}"):
            toolchain.find_cutlass()
    (tmp_path / "cutlass/version.h").write_text("#pragma once\n")
    with pytest.raises(ToolchainError, match=r"version\.h names no CUTLASS version"):
        toolchain.find_cutlass()
