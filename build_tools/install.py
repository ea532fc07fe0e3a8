"""Installs the package for ``make demo`` and ``make test``: what this machine can run, no more.

With a GPU both build the extension for it. Without one the demo takes the CPU backend, and the
tests the extension without kernels, which they import. FLASH_ATTN_CUDA_BACKEND, or a list of
architectures, decides otherwise.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from enum import Enum

from build_tools import archs, build_extension, supported_torch, toolchain
from build_tools.build_extension import BACKEND_VARIABLE, Backend
from build_tools.toolchain import REPO, ToolchainError

PIP = (sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check")


class Goal(Enum):
    """What the package is installed for; the name of an extra of pyproject.toml."""

    demo = "demo"
    test = "test"


def has_headers() -> bool:
    """Whether the extension without kernels can be compiled here. The CUDA headers that torch's own
    packages lack are installed for it.
    """
    toolchain.make_torch_importable()
    import torch

    if torch.version.cuda is None:
        return False
    major = supported_torch.release_of(str(torch.version.cuda))[0]
    try:
        toolchain.cuda_headers(major)
    except ToolchainError:
        return subprocess.run([*PIP, toolchain.headers_package(major)]).returncode == 0
    return True


def backend_without_a_gpu(goal: Goal) -> Backend:
    return Backend.binding if goal is Goal.test and has_headers() else Backend.cpu


def wanted_backend(goal: Goal) -> str:
    """The value for FLASH_ATTN_CUDA_BACKEND."""
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
    os.environ[BACKEND_VARIABLE] = wanted_backend(goal)
    choice = build_extension.choose_backend()
    print(build_extension.announcement(choice), flush=True)
    if choice.backend is not Backend.cpu:
        build_extension.build(choice.backend)
    package = f".[{goal.value}]"
    subprocess.run([*PIP, "--no-build-isolation", "--editable", package], cwd=REPO, check=True)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m build_tools.install", description=__doc__)
    parser.add_argument("goal", choices=[goal.value for goal in Goal])
    goal = Goal(parser.parse_args(arguments).goal)
    try:
        install(goal)
    except (ValueError, RuntimeError, OSError, subprocess.CalledProcessError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
