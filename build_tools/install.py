"""What make does before it runs anything: choose a Python, ready it, install the package.

``choose`` prints the Python to install into: the active one if it has torch, else that of .venv.
``environment PYTHON [TORCH]`` readies it for building, and makes .venv where that is missing.
``demo`` and ``test`` install what this machine can run, no more: with a GPU both build the
extension for it. Without one the demo takes the CPU backend, and the tests the extension without
kernels, which they import. FLASH_ATTN_CUDA_BACKEND, or a list of architectures, decides otherwise.

The first two run before anything is installed, as a file: standard library only.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from enum import Enum
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from build_tools.build_extension import Backend

REPO = Path(__file__).resolve().parent.parent
OLDEST_PYTHON = (3, 10)
ENVIRONMENT = ".venv"
NEEDED_TO_BUILD = ("setuptools>=77.0.3", "ninja>=1.11")


def pip_install(python: str) -> list[str]:
    return [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]


def chosen_python() -> str:
    """The active Python if it has torch and pip may install there, else that of .venv."""
    # Debian and others mark the system's Python so: pip refuses to install there (PEP 668).
    marker = Path(sysconfig.get_path("stdlib")) / "EXTERNALLY-MANAGED"
    in_environment = sys.prefix != sys.base_prefix
    usable = find_spec("torch") is not None and (in_environment or not marker.exists())
    return sys.executable if usable else f"{ENVIRONMENT}/bin/python"


def has_torch(python: str) -> bool:
    return subprocess.run([python, "-c", "import torch"], stderr=subprocess.DEVNULL).returncode == 0


def make_environment() -> None:
    """.venv of the Python that runs this."""
    if sys.version_info < OLDEST_PYTHON:
        found, oldest = (".".join(map(str, x)) for x in (sys.version_info[:2], OLDEST_PYTHON))
        raise RuntimeError(
            f"python3 is Python {found}, flash_attn_cuda needs {oldest} or newer: make .venv with "
            f"one, as in python{oldest} -m venv .venv"
        )
    # A system Python that pip must not touch may have a torch: the environment then uses that one.
    options = ["--system-site-packages"] if find_spec("torch") is not None else []
    made = subprocess.run([sys.executable, "-m", "venv", *options, ENVIRONMENT], cwd=REPO)
    if made.returncode:
        shutil.rmtree(REPO / ENVIRONMENT, ignore_errors=True)
        raise RuntimeError(
            "python3 cannot make a virtual environment; on Debian: apt-get install python3-venv"
        )


def ready(python: str, torch: str) -> None:
    """Installs what a build needs: does nothing when all of it is there."""
    if python.startswith(f"{ENVIRONMENT}/") and not (REPO / python).exists():
        make_environment()
    if not has_torch(python):
        print(f"installing {torch}, a download of up to a few gigabytes", file=sys.stderr)
    # In one call, so that torch's own bounds on setuptools hold.
    subprocess.run([*pip_install(python), *NEEDED_TO_BUILD, torch], cwd=REPO, check=True)


class Goal(Enum):
    """What the package is installed for; the name of an extra of pyproject.toml."""

    demo = "demo"
    test = "test"


def has_headers() -> bool:
    """Whether the extension without kernels can be compiled here. The CUDA headers that torch's own
    packages lack are installed for it.
    """
    from build_tools.compile import toolchain, torch_versions

    toolchain.make_torch_importable()
    import torch

    if torch.version.cuda is None:
        return False
    major = torch_versions.release_of(str(torch.version.cuda))[0]
    try:
        toolchain.cuda_headers(major)
    except toolchain.ToolchainError:
        command = [*pip_install(sys.executable), toolchain.headers_package(major)]
        return subprocess.run(command).returncode == 0
    return True


def backend_without_a_gpu(goal: Goal) -> Backend:
    from build_tools.build_extension import Backend

    return Backend.binding if goal is Goal.test and has_headers() else Backend.cpu


def wanted_backend(goal: Goal) -> str:
    """The value for FLASH_ATTN_CUDA_BACKEND."""
    from build_tools.build_extension import BACKEND_VARIABLE, Backend
    from build_tools.compile import archs

    if given := os.environ.get(BACKEND_VARIABLE):
        return given
    if os.environ.get(archs.VARIABLE) or archs.usable_capabilities():
        return "auto"
    backend = backend_without_a_gpu(goal)
    what = "the CPU backend" if backend is Backend.cpu else "the extension without kernels"
    print(
        f"flash_attn_cuda: no GPU of compute capability {archs.MINIMUM / 10} or newer here, so "
        f"this installs {what}; for a GPU that is elsewhere: {archs.VARIABLE}=90 make {goal.value}",
        flush=True,
    )
    return backend.value


def install(goal: Goal) -> None:
    """Builds first, in sight, as pip hides what a build prints; it then finds all up to date."""
    from build_tools import build_extension
    from build_tools.build_extension import BACKEND_VARIABLE, Backend

    os.environ[BACKEND_VARIABLE] = wanted_backend(goal)
    choice = build_extension.choose_backend()
    print(build_extension.announcement(choice), flush=True)
    if choice.backend is not Backend.cpu:
        build_extension.build(choice.backend)
    package = f".[{goal.value}]"
    command = [*pip_install(sys.executable), "--no-build-isolation", "--editable", package]
    subprocess.run(command, cwd=REPO, check=True)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m build_tools.install",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("choose")
    environment = commands.add_parser("environment")
    environment.add_argument("python")
    environment.add_argument("torch", nargs="?", default="torch", help="a requirement")
    for goal in Goal:
        commands.add_parser(goal.value)
    given = parser.parse_args(arguments)
    try:
        match given.command:
            case "choose":
                print(chosen_python())
            case "environment":
                ready(given.python, given.torch)
            case goal:
                install(Goal(goal))
    except subprocess.CalledProcessError as error:
        print(f"error: {' '.join(error.cmd)}: status {error.returncode}", file=sys.stderr)
        return 1
    except (ValueError, RuntimeError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
