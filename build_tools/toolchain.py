"""Finding nvcc, its headers, torch and CUTLASS, wherever they came from."""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import shutil
import site
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SYSTEM_NVCC = Path("/usr/local/cuda/bin/nvcc")
NVCC_PLACES = "CUDA_HOME, on PATH, in /usr/local/cuda or among pip's nvidia packages"
REPO = Path(__file__).resolve().parent.parent


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


def target_site_packages() -> list[Path]:
    """Where this Python's packages lie, also when pip's build isolation took them off sys.path."""
    own = (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))
    folders = dict.fromkeys((*own, site.getusersitepackages()))
    return [folder for folder in map(Path, folders) if folder.is_dir()]


def make_torch_importable() -> bool:
    """Whether ``import torch`` finds the torch that the extension will run with.

    An isolated build must not bring a torch of its own: the extension would be compiled for that
    one. pip isolates with the target environment's interpreter, so that environment's packages can
    be added back, last so that the build requirements go first.
    """
    if importlib.util.find_spec("torch") is None:
        folders = [folder for folder in target_site_packages() if (folder / "torch").is_dir()]
        sys.path += map(str, folders[:1])
    return importlib.util.find_spec("torch") is not None


def _pip_cuda_roots() -> list[Path]:
    """Folders of pip's CUDA parts: nvidia/cu13 for CUDA 13, one folder a component before that."""
    packages = [folder / "nvidia" for folder in target_site_packages()]
    folders = (folder for package in packages if package.is_dir() for folder in package.iterdir())
    return sorted(folder for folder in folders if re.match(r"cu\d+$|cuda_", folder.name))


def _nvcc_candidates() -> Iterator[Path]:
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if root := os.environ.get(variable):
            yield Path(root) / "bin/nvcc"
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
    """The first nvcc of CUDA_HOME, PATH, /usr/local/cuda and pip's packages that runs, or None."""
    for path in _nvcc_candidates():
        if not os.access(path, os.X_OK):
            continue
        output = subprocess.run([path, "--version"], capture_output=True, text=True).stdout
        if version := re.search(r"release \d+\.\d+, V([\d.]+)", output):
            root = _toolkit_root(path)
            folders = [root / "include", *sorted(root.glob("targets/*/include"))]
            if not any(map(_has_runtime_headers, folders)):
                folders += [pip_root / "include" for pip_root in _pip_cuda_roots()]
            real = root / "bin/nvcc"  # ccache identifies a compiler by its file, so not the script
            includes = dict.fromkeys(folder.resolve() for folder in folders if folder.is_dir())
            return Nvcc(real if real.is_file() else path, version[1], tuple(includes))
    return None


def check_torch_matches(torch_cuda: str, nvcc: Nvcc) -> None:
    """Raises ToolchainError when torch and nvcc differ in CUDA major: they need one runtime."""
    if int(torch_cuda.split(".")[0]) != nvcc.major:
        raise ToolchainError(
            f"torch was built for CUDA {torch_cuda} but {nvcc.path} is CUDA {nvcc.version}: "
            f"the majors must be equal. Install a torch for CUDA {nvcc.major}, or point CUDA_HOME "
            f"at a CUDA {torch_cuda} toolkit."
        )


def find_cutlass() -> Path:
    """The CUTLASS headers: CUTLASS_PATH, else third_party/cutlass/include, fetched if missing."""
    if given := os.environ.get("CUTLASS_PATH"):
        if not (Path(given) / "cutlass/version.h").is_file():
            raise ToolchainError(f"CUTLASS_PATH: no cutlass/version.h under {given}")
        return Path(given).resolve()
    from third_party.cutlass.fetch import fetch

    return fetch()


def cutlass_version(include_dir: Path) -> str:
    text = (include_dir / "cutlass/version.h").read_text()
    parts = dict(re.findall(r"#define CUTLASS_(MAJOR|MINOR|PATCH)\s+(\d+)", text))
    return ".".join(parts[name] for name in ("MAJOR", "MINOR", "PATCH"))


def host_compiler() -> str:
    return os.environ.get("CXX", "g++")


def nvcc_host_compiler_flags() -> list[str]:
    """nvcc finds g++ by itself; CXX overrides it here as it does for host code."""
    return [f"-ccbin={os.environ['CXX']}"] if "CXX" in os.environ else []
