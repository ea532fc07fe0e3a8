"""Builds the extension ``flash_attn_cuda._C`` from the binding's few .cpp and the kernel library.

setup.py calls ``build`` for the Python it runs under. ``python -m build_tools.build_extension``
does the same by hand, and with ``--python-include`` for another Python with the same torch. No
CUTLASS header is read here: a new torch or Python repeats this half minute and leaves the kernels
alone.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from build_tools import build_kernels, ninja_build, toolchain
from build_tools.generate_units import write_if_changed
from build_tools.toolchain import REPO, Nvcc, ToolchainError

MODULE = "_C"
BACKEND_VARIABLE = "FLASH_ATTN_CUDA_BACKEND"
CHOICE_NAME = "_install.json"  # in the installed package; flash_attn_cuda/build_info.py reads it


class Backend(Enum):
    """What gets installed beside the Python code."""

    cuda = "cuda"  # the extension
    cpu = "cpu"  # nothing: the package computes with torch operations


@dataclass(frozen=True)
class Choice:
    backend: Backend
    reason: str


def choose_backend() -> Choice:
    """Whether this machine can build the extension, and the reason in words when it cannot.

    Raises ToolchainError when it could but for something the user would want to mend: torch or
    ninja missing beside an nvcc, an nvcc that is too old, or a torch for another CUDA major; with
    FLASH_ATTN_CUDA_BACKEND=cuda whenever it cannot. Raises ValueError for an unknown value of that.
    """
    wanted = os.environ.get(BACKEND_VARIABLE) or "auto"
    if wanted not in ("auto", "cpu", "cuda"):
        raise ValueError(f"{BACKEND_VARIABLE}: expected auto, cpu or cuda, got {wanted!r}")
    if wanted == "cpu":
        return Choice(Backend.cpu, f"{BACKEND_VARIABLE}=cpu")
    choice = _possible_backend()
    if wanted == "cuda" and choice.backend is Backend.cpu:
        raise ToolchainError(f"{BACKEND_VARIABLE}=cuda cannot be had: {choice.reason}")
    return choice


def _possible_backend() -> Choice:
    nvcc = toolchain.find_nvcc()
    if nvcc is None:
        return Choice(Backend.cpu, f"there is no nvcc in {toolchain.NVCC_PLACES}")
    if not toolchain.make_torch_importable():
        raise ToolchainError(
            f"{sys.prefix} has no torch, and the extension is compiled for the torch it will run "
            "with. Install torch first; where a tool builds in an environment of its own and does "
            "not find it, build with --no-build-isolation (python -m build: --no-isolation). Or "
            f"set {BACKEND_VARIABLE}=cpu for a package without extension."
        )
    import torch

    if torch.version.cuda is None:
        return Choice(Backend.cpu, f"torch {torch.__version__} was built without CUDA")
    toolchain.check_nvcc_version(nvcc)
    toolchain.check_torch_matches(torch.version.cuda, nvcc)
    toolchain.find_ninja()
    return Choice(Backend.cuda, f"{nvcc.path} {nvcc.version}, torch {torch.__version__}")


def record_choice(choice: Choice, package: Path) -> None:
    """Leaves in ``package`` what was chosen and why, for the installed package to tell."""
    record = {"backend": choice.backend.value, "reason": choice.reason}
    write_if_changed(package / CHOICE_NAME, json.dumps(record))


def announcement(choice: Choice) -> str:
    """The one line that says what the user gets."""
    match choice.backend:
        case Backend.cuda:
            return f"flash_attn_cuda: building the CUDA extension ({choice.reason})"
        case Backend.cpu:
            return f"flash_attn_cuda: installing with the CPU backend only, because {choice.reason}"


def _own_python_includes() -> tuple[Path, ...]:
    paths = (sysconfig.get_path("include"), sysconfig.get_path("platinclude"))
    return tuple(Path(path) for path in dict.fromkeys(paths))


@dataclass(frozen=True)
class TargetPython:
    """The Python that will import the extension; by default the one that runs this."""

    includes: tuple[Path, ...] = field(default_factory=_own_python_includes)
    suffix: str = field(default_factory=lambda: str(sysconfig.get_config_var("EXT_SUFFIX")))

    @property
    def tag(self) -> str:
        return self.suffix.strip(".").split(".")[0]


def _torch_folder() -> Path:
    """Where torch lies; torch.utils.cpp_extension would tell, but warns of GPUs it misses."""
    import torch

    return Path(torch.__file__).parent


def _compile_flags(target: TargetPython, nvcc: Nvcc) -> list[str]:
    import torch

    torch_include = _torch_folder() / "include"
    torch_includes = (torch_include, torch_include / "torch/csrc/api/include")
    external = (*torch_includes, *target.includes, *nvcc.include_dirs)
    return [
        *build_kernels.CXX_FLAGS,
        "-fvisibility=hidden",  # pybind11's own types must not clash with another extension's
        f"-DTORCH_EXTENSION_NAME={MODULE}",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}",
        f"-I{REPO / 'csrc'}",
        *(part for folder in external for part in ("-isystem", str(folder))),
    ]


def _cuda_runtime(nvcc: Nvcc) -> Path:
    """The runtime library that torch loads: pip's beside torch, else the toolkit's."""
    folders = sorted(_torch_folder().parent.glob("nvidia/*/lib"))
    folders += [include.parent / name for include in nvcc.include_dirs for name in ("lib64", "lib")]
    for folder in folders:
        for library in sorted(folder.glob(f"libcudart.so.{nvcc.major}*")):
            return library
    raise ToolchainError(f"no libcudart.so.{nvcc.major} in {', '.join(map(str, folders))}")


def _link_command(archive: Path, nvcc: Nvcc) -> str:
    # torch_cuda registers the CUDA parts of torch by being loaded, though no symbol asks for it.
    libraries = [
        f"-L{_torch_folder() / 'lib'}",
        "-Wl,--no-as-needed",
        *(f"-ltorch{part}" for part in ("", "_cpu", "_cuda", "_python")),
        *("-lc10", "-lc10_cuda"),
    ]
    inputs = shlex.join([str(archive), str(_cuda_runtime(nvcc)), *libraries])
    compiler = shlex.quote(toolchain.host_compiler())
    return f"{compiler} -shared -o $out.new $in {inputs} -Wl,--exclude-libs,ALL"


def build(other: TargetPython | None = None) -> Path:
    """Builds what is out of date of the kernels and the extension; returns the extension's path.

    For the Python that runs this, in build/extension, or for an ``other`` in a folder of its own.
    """
    nvcc = toolchain.find_nvcc()
    if nvcc is None or not toolchain.make_torch_importable():
        raise ToolchainError("the extension needs nvcc and torch")
    options = build_kernels.BuildOptions()
    archive = build_kernels.build(options)
    folder = REPO / (f"build/extension-{other.tag}" if other else "build/extension")
    target = other or TargetPython()
    compiler = (toolchain.host_compiler(), *_compile_flags(target, nvcc))
    compiles = [
        ninja_build.Compile(source, folder / f"{source.stem}.o", compiler)
        for source in sorted((REPO / "csrc/torch_binding").glob("*.cpp"))
    ]
    extension = folder / f"{MODULE}{target.suffix}"
    link = ninja_build.Link(extension, _link_command(archive, nvcc), inputs=(archive,))
    with ninja_build.locked(folder):
        ninja_build.build(folder, compiles, link, options.jobs)
    return extension


def main(arguments: Sequence[str]) -> int:
    program = "python -m build_tools.build_extension"
    parser = argparse.ArgumentParser(prog=program, description=__doc__)
    parser.add_argument(
        "--python-include", type=Path, action="append", help="folder of another Python's headers"
    )
    parser.add_argument("--soabi", help="that Python's, such as cpython-312-x86_64-linux-gnu")
    parser.add_argument("--out", type=Path, help="folder to put the extension in")
    given = parser.parse_args(arguments)
    if (given.python_include is None) != (given.soabi is None):
        parser.error("--python-include and --soabi go together")
    try:
        choice = choose_backend()
        print(announcement(choice), flush=True)
        if choice.backend is Backend.cpu:
            return 0
        other = None
        if given.soabi:
            other = TargetPython(tuple(given.python_include), f".{given.soabi}.so")
        extension = build(other)
        if given.out:
            given.out.mkdir(parents=True, exist_ok=True)
            extension = Path(shutil.copy2(extension, given.out))
        print(f"flash_attn_cuda: {extension}")
    except (ValueError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
