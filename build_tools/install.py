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


def backend_without_a_gpu(goal: Goal) -> Backend:
    return Backend.cpu if goal is Goal.demo else Backend.binding


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


def bring_headers() -> None:
    """The CUDA headers that the extension without kernels is compiled with, where they are
    missing: torch's own packages have most of them.
    """
    toolchain.make_torch_importable()
    import torch

    if torch.version.cuda is None:
        return
    major = supported_torch.release_of(str(torch.version.cuda))[0]
    try:
        toolchain.cuda_headers(major)
    except ToolchainError:
        subprocess.run([*PIP, toolchain.headers_package(major)], check=True)


def install(goal: Goal) -> None:
    """Builds first, in sight, as pip hides what a build prints; it then finds all up to date."""
    os.environ[BACKEND_VARIABLE] = wanted_backend(goal)
    if os.environ[BACKEND_VARIABLE] == Backend.binding.value:
        bring_headers()
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
