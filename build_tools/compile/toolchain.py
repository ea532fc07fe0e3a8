"""Finding nvcc, its headers, torch and CUTLASS, wherever they came from."""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SYSTEM_NVCC = Path("/usr/local/cuda/bin/nvcc")
OLDEST_NVCC = (12, 0)  # the first with C++20, which the kernels are written in
NVCC_PLACES = "CUDA_HOME, on PATH, in /usr/local/cuda or among pip's nvidia packages"
REPO = Path(__file__).resolve().parents[2]


class ToolchainError(RuntimeError):
    """A compiler or library that is missing or does not fit the others."""


@dataclass(frozen=True)
class Nvcc:
    """A CUDA compiler, its version, and the include folders that host code needs."""

    path: Path
    version: str
    include_dirs: tuple[Path, ...]

    @property
    def major(self) -> int:
        return int(self.version.split(".")[0])


@functools.cache
def target_site_packages() -> list[Path]:
    """Where this Python's packages lie, also when pip's build isolation took them off sys.path.

    Asked of this Python itself, without the variables that pip isolates by: it then sees what .pth
    files name, and the base Python's packages where a virtual environment shows those.
    """
    isolating = ("PYTHONPATH", "PYTHONNOUSERSITE")
    variables = {name: value for name, value in os.environ.items() if name not in isolating}
    command = [sys.executable, "-c", "import sys; print(*sys.path[1:], sep='\\n')"]
    listing = subprocess.run(command, env=variables, capture_output=True, text=True).stdout
    own = (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))
    folders = dict.fromkeys((*own, *listing.splitlines()))
    return [folder for folder in map(Path, folders) if folder.is_dir()]


def make_torch_importable() -> bool:
    """Whether ``import torch`` finds the torch that the extension will run with.

    An isolated build must not bring a torch of its own: the extension would be compiled for that
    one. pip isolates with the target environment's interpreter, so that environment's packages can
    be added back, last so that the build requirements go first. All of them: what torch itself
    imports may lie in another folder.
    """
    if importlib.util.find_spec("torch") is None:
        folders = list(map(str, target_site_packages()))
        if any(Path(folder, "torch").is_dir() for folder in folders):
            sys.path += [folder for folder in folders if folder not in sys.path]
    return importlib.util.find_spec("torch") is not None


def _pip_cuda_roots() -> list[Path]:
    """Folders of pip's CUDA parts: nvidia/cu13 for CUDA 13, one folder a component before that."""
    packages = [folder / "nvidia" for folder in target_site_packages()]
    folders = (folder for package in packages if package.is_dir() for folder in package.iterdir())
    return sorted(folder for folder in folders if re.match(r"cu\d+$|cuda_", folder.name))


@functools.cache
def _nvcc_version(path: Path) -> str | None:
    """The version of the nvcc at ``path``; None where there is none that runs."""
    try:
        result = subprocess.run(
            [path, "--version"], capture_output=True, text=True, errors="replace"
        )
    except OSError:
        return None
    version = re.search(r"release \d+\.\d+, V([\d.]+)", result.stdout)
    return version[1] if version else None


def _nvcc_of_variable(variable: str, root: str) -> Path:
    """Where the toolkit that a variable names has its nvcc. A runtime's toolkit lacks it, and some
    images name one that they do not have.
    """
    if not Path(root).is_dir():
        message = f"{variable}: expected the folder of a CUDA toolkit, got {root!r}: passed over"
        print(f"flash_attn_cuda: {message}", file=sys.stderr)
    path = Path(root) / "bin/nvcc"
    if path.exists() and _nvcc_version(path) is None:
        raise ToolchainError(f"{variable}: {path} cannot be run, or is no nvcc")
    return path


def _nvcc_candidates() -> Iterator[Path]:
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if root := os.environ.get(variable):
            yield _nvcc_of_variable(variable, root)
    if on_path := shutil.which("nvcc"):
        yield Path(on_path)
    yield SYSTEM_NVCC
    yield from (root / "bin/nvcc" for root in _pip_cuda_roots())


def _toolkit_root(nvcc: Path) -> Path:
    """The toolkit behind ``nvcc``; asked of it, as the one on PATH may be a script for another."""
    command = [str(nvcc), "--dryrun", "-E", "-x", "cu", "/dev/null"]
    dry_run = subprocess.run(command, capture_output=True, text=True)
    top = re.search(r"^#\$ TOP=(.+)$", dry_run.stderr, flags=re.MULTILINE)
    return Path(top[1].strip()).resolve() if top else nvcc.resolve().parent.parent


def _has_runtime_headers(folder: Path) -> bool:
    return (folder / "cuda_runtime.h").is_file()


@functools.cache
def find_nvcc() -> Nvcc | None:
    """The first nvcc of CUDA_HOME, PATH, /usr/local/cuda and pip's packages that runs, or None.

    Raises ToolchainError where CUDA_HOME or CUDA_PATH has an nvcc that cannot run.
    """
    for path in _nvcc_candidates():
        if version := _nvcc_version(path):
            root = _toolkit_root(path)
            folders = [root / "include", *sorted(root.glob("targets/*/include"))]
            if not any(map(_has_runtime_headers, folders)):
                folders += [pip_root / "include" for pip_root in _pip_cuda_roots()]
            real = root / "bin/nvcc"  # ccache identifies a compiler by its file, so not the script
            includes = dict.fromkeys(folder.resolve() for folder in folders if folder.is_dir())
            return Nvcc(real if real.is_file() else path, version, tuple(includes))
    return None


def headers_package(cuda_major: int) -> str:
    """What pip has to install for the headers that torch's CUDA packages lack (crt/)."""
    return "nvidia-cuda-nvcc-cu12" if cuda_major == 12 else f"nvidia-cuda-crt=={cuda_major}.*"


def _runtime_major(folder: Path) -> int | None:
    header = folder / "cuda_runtime_api.h"
    found = (
        re.search(r"#define CUDART_VERSION\s+(\d+)", header.read_text())
        if header.is_file()
        else None
    )
    return int(found[1]) // 1000 if found else None


def cuda_headers(cuda_major: int) -> tuple[Path, ...]:
    """Folders with the CUDA runtime's headers of this major: those of nvcc, else pip's.

    Raises ToolchainError, saying what to install, where there are none.
    """
    nvcc = find_nvcc()
    if nvcc is not None and nvcc.major == cuda_major:
        return nvcc.include_dirs
    pip_folders = [root / "include" for root in _pip_cuda_roots()]
    runtime = [folder for folder in pip_folders if _runtime_major(folder) == cuda_major]
    crt = [folder for folder in pip_folders if (folder / "crt/host_defines.h").is_file()]
    if not runtime or not crt:
        raise ToolchainError(
            f"there are no headers of CUDA {cuda_major}: pip install "
            f"'{headers_package(cuda_major)}', or point CUDA_HOME at a toolkit of it"
        )
    return tuple(dict.fromkeys([*runtime, *crt]))


def check_nvcc_version(nvcc: Nvcc) -> None:
    """Raises ToolchainError when nvcc is older than the kernels need."""
    if tuple(map(int, nvcc.version.split(".")[:2])) < OLDEST_NVCC:
        oldest = ".".join(map(str, OLDEST_NVCC))
        raise ToolchainError(
            f"the kernels need nvcc {oldest} or newer, and {nvcc.path} is {nvcc.version}: "
            "point CUDA_HOME at a newer toolkit"
        )


def nvcc_capabilities(nvcc: Nvcc) -> set[int]:
    """The compute capabilities that nvcc can compile for, such as 80 and 90."""
    command = [str(nvcc.path), "--list-gpu-arch"]
    listing = subprocess.run(command, capture_output=True, text=True).stdout
    return {int(number) for number in re.findall(r"^compute_(\d+)\s*$", listing, re.MULTILINE)}


def check_torch_matches(torch_cuda: str, nvcc: Nvcc) -> None:
    """Raises ToolchainError when torch and nvcc differ in CUDA major: they need one runtime."""
    if int(torch_cuda.split(".")[0]) != nvcc.major:
        raise ToolchainError(
            f"torch was built for CUDA {torch_cuda} but {nvcc.path} is CUDA {nvcc.version}: "
            f"the majors must be equal. Install a torch for CUDA {nvcc.major}, or point CUDA_HOME "
            f"at a CUDA {torch_cuda} toolkit."
        )


def find_cutlass() -> Path:
    """The CUTLASS headers: CUTLASS_PATH, else third_party/cutlass/include, fetched if missing.

    Those of CUTLASS_PATH must be of the pinned version, but for the patch.
    """
    from third_party.cutlass.fetch import VERSION, fetch

    given = os.environ.get("CUTLASS_PATH")
    if not given:
        return fetch()
    if not (Path(given) / "cutlass/version.h").is_file():
        raise ToolchainError(f"CUTLASS_PATH: no cutlass/version.h under {given}")
    found, pinned = cutlass_version(Path(given)), VERSION.split(".")[:2]
    if found.split(".")[:2] != pinned:
        raise ToolchainError(
            f"CUTLASS_PATH: expected CUTLASS {'.'.join(pinned)}, got {found} under {given}"
        )
    return Path(given).resolve()


def cutlass_version(include_dir: Path) -> str:
    header = include_dir / "cutlass/version.h"
    parts = dict(re.findall(r"#define CUTLASS_(MAJOR|MINOR|PATCH)\s+(\d+)", header.read_text()))
    if len(parts) < 3:
        raise ToolchainError(f"{header} names no CUTLASS version")
    return ".".join(parts[name] for name in ("MAJOR", "MINOR", "PATCH"))


def find_ninja() -> str:
    """The ninja of the ninja package; ToolchainError, saying what to install, where there is none.

    The package does not find its own program under pip's build isolation, which has it on PATH.
    """
    missing = "is not installed: pip install 'setuptools>=77.0.3' 'ninja>=1.11' brings what builds"
    try:
        from ninja import BIN_DIR
    except ImportError:
        raise ToolchainError(f"ninja {missing}") from None
    path = shutil.which("ninja", path=BIN_DIR) or shutil.which("ninja")
    if path is None:
        raise ToolchainError(f"the program ninja {missing}")
    return path


def host_compiler() -> str:
    return os.environ.get("CXX") or "g++"


def nvcc_host_compiler_flags() -> list[str]:
    """nvcc finds g++ by itself; CXX overrides it here as it does for host code."""
    return [f"-ccbin={compiler}"] if (compiler := os.environ.get("CXX")) else []
