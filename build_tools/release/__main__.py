"""``python -m build_tools.release wheels``, ``hub`` or ``release``; make has them as targets.

release makes all that dist/ is to hold, for the version of flash_attn_cuda/__init__.py: wheels, the
hub's folder, the sdist, the notes of CHANGELOG.md and the sums. Each has been tried.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from build_tools.build_extension import BACKEND_VARIABLE
from build_tools.compile import torch_versions
from build_tools.compile.toolchain import REPO
from build_tools.install import pip_install
from build_tools.release import hub, index, pairs, wheels

CHECK = ["-m", "flash_attn_cuda"]


def notes_of(version: str, changelog: str) -> str:
    """The section of a version. Raises ValueError where there is none that has a date."""
    found = re.search(rf"^## \[{re.escape(version)}\](.*)\n((?:(?!## ).*\n?)*)", changelog, re.M)
    heading = f"## [{version}] - YYYY-MM-DD"
    if not found or not re.fullmatch(r" - \d{4}-\d\d-\d\d", found[1]):
        raise ValueError(f"CHANGELOG.md: expected {heading}, got {found and found[0][:40]!r}")
    return found[2].strip() + "\n"


def make_sdist() -> Path:
    """Into dist/, installed without kernels where nothing else of this package is, and tried."""
    command = ["-m", "build", "--no-isolation", "--sdist", "--outdir", str(index.DIST)]
    wheels.run([sys.executable, *command])
    path = index.DIST / f"flash_attn_cuda-{torch_versions.package_version()}.tar.gz"
    with tempfile.TemporaryDirectory() as folder:
        options = ["--no-deps", "--no-build-isolation", "--target", folder, str(path)]
        wheels.run([*pip_install(sys.executable), *options], REPO, {BACKEND_VARIABLE: "cpu"})
        wheels.run([sys.executable, *CHECK], Path(folder))
    return path


def make_wheels() -> None:
    """Raises RuntimeError where a wheel failed that can be had here."""
    if not wheels.make_all(pairs.wanted()):
        raise RuntimeError("not every wheel was built and passed")


def release() -> None:
    version = torch_versions.package_version()
    notes = notes_of(version, (REPO / "CHANGELOG.md").read_text())
    make_wheels()
    for path in (*index.DIST.glob("*.whl"), *index.DIST.glob("*.tar.gz")):
        path.unlink()
    make_sdist()
    hub.write()
    (index.DIST / "NOTES.md").write_text(notes)
    print(index.write_sums())


COMMANDS = {"wheels": make_wheels, "hub": hub.write, "release": release}


def main(arguments: Sequence[str]) -> int:
    program = "python -m build_tools.release"
    parser = argparse.ArgumentParser(prog=program, description=__doc__)
    parser.add_argument("what", choices=COMMANDS)
    try:
        COMMANDS[parser.parse_args(arguments).what]()
    except (ValueError, RuntimeError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
