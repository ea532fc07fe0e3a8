"""Builds the extension ``flash_attn_cuda._C`` from the binding's few .cpp and the kernel library.

setup.py calls ``build`` for the Python it runs under. ``python -m build_tools.build_extension``
does the same by hand, and with ``--python-include`` for another Python with the same torch. No
CUTLASS header is read here: a new torch or Python repeats this half minute and leaves the kernels
alone. One ninja compiles both, the binding first, as a torch that it does not fit shows there.
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

from build_tools import build_kernels
from build_tools.compile import archs, ninja_build, toolchain, torch_versions
from build_tools.compile.jobs import write_if_changed
from build_tools.compile.toolchain import REPO, ToolchainError
from build_tools.generate import call_rules, call_structs

MODULE = "_C"
BACKEND_VARIABLE = "FLASH_ATTN_CUDA_BACKEND"
# In the installed package; flash_attn_cuda/installed/build_info.py reads it.
CHOICE_NAME = "_install.json"
# Sources that take long, or whose definitions others must not see, by the unit that compiles them.
# binding_calls compiles the others.
OWN_UNITS = {
    "binding_module": ("aten_operators", "module"),
    "binding_operators": ("autograd", "errors", "explain"),
    "binding_glibc": ("old_glibc",),
}


class Backend(Enum):
    """What gets installed beside the Python code."""

    cuda = "cuda"  # the extension
    cpu = "cpu"  # nothing: the package computes with torch operations
    binding = "binding"  # the extension without kernels, for tests on a machine without a GPU


@dataclass(frozen=True)
class Choice:
    backend: Backend
    reason: str


def choose_backend() -> Choice:
    """Whether this machine can build the extension, and the reason in words when it cannot.

    Raises ToolchainError when it could but for something the user would want to mend: torch or
    ninja missing beside an nvcc, an nvcc that is too old, a torch that is too old or for another
    CUDA major; with FLASH_ATTN_CUDA_BACKEND=cuda or binding whenever it cannot. Raises ValueError
    for an unknown value of that.
    """
    wanted = os.environ.get(BACKEND_VARIABLE) or "auto"
    names = ("auto", *(backend.value for backend in Backend))
    if wanted not in names:
        raise ValueError(f"{BACKEND_VARIABLE}: expected one of {', '.join(names)}, got {wanted!r}")
    if wanted == "cpu":
        return Choice(Backend.cpu, f"{BACKEND_VARIABLE}=cpu")
    choice = _binding() if wanted == "binding" else _cuda_or_cpu()
    if wanted != "auto" and choice.backend is Backend.cpu:
        raise ToolchainError(f"{BACKEND_VARIABLE}={wanted} cannot be had: {choice.reason}")
    return choice


def _torch_version() -> str:
    """That of the torch to build for. Raises ToolchainError where it is missing or too old."""
    if not toolchain.make_torch_importable():
        raise ToolchainError(
            f"{sys.prefix} has no torch, and the extension is compiled for the torch it will run "
            "with. Install torch first; where a tool builds in an environment of its own and does "
            "not find it, build with --no-build-isolation (python -m build: --no-isolation). Or "
            f"set {BACKEND_VARIABLE}=cpu for a package without extension."
        )
    import torch

    torch_versions.check(str(torch.__version__))
    return str(torch.__version__)


def _instead_of_nvcc() -> str:
    """What would give kernels to a machine that has a GPU and a torch for it; else nothing."""
    if not toolchain.make_torch_importable() or not archs.usable_capabilities():
        return ""
    torch = torch_versions.present_torch()
    if torch.cuda is None:
        return ""
    major, python = torch.cuda.split(".")[0], f"cp3{sys.version_info[1]}"
    version = f"{torch_versions.package_version()}+{torch.local_version}"
    wheel = f"flash_attn_cuda-{version}-{python}-{python}-*.whl"
    nvcc = "pip install '.[nvcc13]', then this again" if major == "13" else f"nvcc of CUDA {major}"
    return f"; kernels for the GPU here come with {wheel}, or with {nvcc}"


def _cuda_or_cpu() -> Choice:
    nvcc = toolchain.find_nvcc()
    if nvcc is None:
        reason = f"there is no nvcc in {toolchain.NVCC_PLACES}{_instead_of_nvcc()}"
        return Choice(Backend.cpu, reason)
    version = _torch_version()
    import torch

    if torch.version.cuda is None:
        return Choice(Backend.cpu, f"torch {version} was built without CUDA")
    toolchain.check_nvcc_version(nvcc)
    toolchain.check_torch_matches(torch.version.cuda, nvcc)
    toolchain.find_ninja()
    return Choice(Backend.cuda, f"{nvcc.path} {nvcc.version}, torch {version}")


def _binding() -> Choice:
    version = _torch_version()
    import torch

    if torch.version.cuda is None:
        return Choice(Backend.cpu, f"torch {version} was built without CUDA")
    toolchain.cuda_headers(_cuda_major())
    toolchain.find_ninja()
    return Choice(Backend.binding, f"torch {version}")


def _cuda_major() -> int:
    """Of the torch to build for."""
    import torch

    return int(str(torch.version.cuda).split(".")[0])


def record_choice(choice: Choice, package: Path) -> None:
    """Leaves in ``package`` what was chosen and why, for the installed package to tell."""
    record = {"backend": choice.backend.value, "reason": choice.reason}
    write_if_changed(package / CHOICE_NAME, json.dumps(record))


def announcement(choice: Choice) -> str:
    """The one line that says what the user gets."""
    match choice.backend:
        case Backend.cuda:
            return f"flash_attn_cuda: building the CUDA extension ({choice.reason})"
        case Backend.binding:
            return f"flash_attn_cuda: building the extension without kernels ({choice.reason})"
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


def _compile_flags(target: TargetPython, headers: tuple[Path, ...], generated: Path) -> list[str]:
    import torch

    torch_include = _torch_folder() / "include"
    torch_includes = (torch_include, torch_include / "torch/csrc/api/include")
    external = (*torch_includes, *target.includes, *headers)
    return [
        *build_kernels.CXX_FLAGS,
        "-fvisibility=hidden",  # pybind11's own types must not clash with another extension's
        f"-DTORCH_EXTENSION_NAME={MODULE}",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}",
        f"-I{REPO / 'csrc'}",
        f"-I{generated}",
        *(part for folder in external for part in ("-isystem", str(folder))),
    ]


def _cuda_runtime(headers: tuple[Path, ...]) -> Path:
    """The runtime library that torch loads: pip's beside torch, else the toolkit's."""
    folders = sorted(_torch_folder().parent.glob("nvidia/*/lib"))
    folders += [include.parent / name for include in headers for name in ("lib64", "lib")]
    for folder in folders:
        for library in sorted(folder.glob(f"libcudart.so.{_cuda_major()}*")):
            return library
    raise ToolchainError(f"no libcudart.so.{_cuda_major()} in {', '.join(map(str, folders))}")


def _link_command(archive: Path, headers: tuple[Path, ...]) -> str:
    # torch_cuda registers the CUDA parts of torch by being loaded, though no symbol asks for it.
    libraries = [
        f"-L{_torch_folder() / 'lib'}",
        "-Wl,--no-as-needed",
        *(f"-ltorch{part}" for part in ("", "_cpu", "_cuda", "_python")),
        *("-lc10", "-lc10_cuda"),
    ]
    inputs = shlex.join([str(archive), str(_cuda_runtime(headers)), *libraries])
    compiler = shlex.quote(toolchain.host_compiler())
    return f"{compiler} -shared -o $out.new $in {inputs} -Wl,--exclude-libs,ALL"


def _extension_folder(target: TargetPython, backend: Backend) -> Path:
    """One for each Python and torch, so that each keeps its objects."""
    import torch

    return REPO / f"build/extension-{backend.value}-{target.tag}-torch{torch.__version__}"


def _units() -> dict[str, str]:
    """What is compiled, by name: sources that include those of the binding. torch's headers are
    most of a compile, so that few compiles of many sources cost less than half of one for each.
    """
    sources = {path.stem for path in (REPO / "csrc/torch_binding").glob("*.cpp")}
    calls = sources.difference(*OWN_UNITS.values())
    units = {**OWN_UNITS, "binding_calls": tuple(sorted(calls))}
    return {
        name: "".join(f'#include "torch_binding/{source}.cpp"\n' for source in stems)
        for name, stems in units.items()
    }


def build_both(plan: build_kernels.Plan, extension: ninja_build.Product) -> None:
    """The kernels and the extension. Says of a torch that was never tried that it may be the cause
    where the binding does not compile.
    """
    import torch

    try:
        build_kernels.build_plan(plan, [extension])
    except ninja_build.BuildError as error:
        advice = torch_versions.advice(str(torch.__version__))
        if advice and not extension.is_compiled():
            raise ToolchainError(f"the binding does not compile: {advice} ({error})") from error
        raise


def build(backend: Backend = Backend.cuda, other: TargetPython | None = None) -> Path:
    """Builds what is out of date of the binding, the kernels and the extension, and returns the
    extension's path. For the Python that runs this, or for an ``other``.
    """
    if not toolchain.make_torch_importable():
        raise ToolchainError("the extension needs torch")
    if backend is Backend.cuda:
        plan = build_kernels.make_plan(build_kernels.BuildOptions())
    else:
        plan = build_kernels.plan_without_device_code(_cuda_major())
    target = other or TargetPython()
    folder = _extension_folder(target, backend)
    generated = folder / "generated"
    compiler = (toolchain.host_compiler(), *_compile_flags(target, plan.cuda_headers, generated))
    units = {generated / f"{name}.cpp": text for name, text in _units().items()}
    compiles = [ninja_build.Compile(unit, folder / f"{unit.stem}.o", compiler) for unit in units]
    extension = folder / f"{MODULE}{target.suffix}"
    link = ninja_build.Link(
        extension, _link_command(plan.archive, plan.cuda_headers), inputs=(plan.archive,)
    )
    with ninja_build.locked(folder):
        call_structs.write(generated)
        call_rules.write(generated)
        for unit, text in units.items():
            write_if_changed(unit, text)
        build_both(plan, ninja_build.Product(folder, compiles, link))
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
        extension = build(choice.backend, other)
        if given.out:
            given.out.mkdir(parents=True, exist_ok=True)
            extension = Path(shutil.copy2(extension, given.out))
        print(f"flash_attn_cuda: {extension}")
    except (ValueError, RuntimeError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
