"""The pairs of a torch and a Python that wheels are for, and the Pythons of this machine."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from build_tools.compile import torch_versions

VARIABLE = "WHEELS"
PYTHONS = range(10, 15)  # 3.10 to 3.14, which pyproject.toml declares
ENTRY = re.compile(r"torch==(\d+\.\d+)(\.\d+)? cp3(\d+)")


@dataclass(frozen=True)
class Pair:
    torch: str  # a minor release, such as "2.14"
    python: int  # the minor release of Python 3
    patch: str = ""  # of torch, such as ".1"; the newest

    def __str__(self) -> str:
        return f"torch=={self.torch}{self.patch} cp3{self.python}"

    @property
    def requirement(self) -> str:
        return f"torch=={self.torch}{self.patch or '.*'}"


def parse(text: str) -> list[Pair]:
    """``"torch==2.14 cp312; torch==2.15 cp314"``. Raises ValueError, naming the entry."""
    pairs = []
    for entry in filter(None, map(str.strip, text.split(";"))):
        found = ENTRY.fullmatch(entry)
        if not found:
            raise ValueError(f"{VARIABLE}: expected entries as torch==2.14 cp312, got {entry!r}")
        pairs.append(Pair(found[1], int(found[3]), found[2] or ""))
    return pairs


def of_all_supported() -> list[Pair]:
    major, oldest = torch_versions.OLDEST
    minors = range(oldest, torch_versions.NEWEST_TRIED[1] + 1)
    return [Pair(f"{major}.{minor}", python) for minor in minors for python in PYTHONS]


def _candidates(name: str) -> Iterator[str]:
    folders = sorted(Path.home().glob(f".pyenv/versions/{name.removeprefix('python')}.*/bin"))
    yield from filter(None, [shutil.which(name), *(str(folder / name) for folder in folders)])


def find_python(minor: int) -> str | None:
    """A Python 3 of this minor release that runs: on PATH, else of pyenv's."""
    command = ["-c", "import ensurepip, sys; print(sys.version_info[1])"]
    for path in _candidates(f"python3.{minor}"):
        result = subprocess.run([path, *command], capture_output=True, text=True)
        if result.stdout.strip() == str(minor):
            return path
    return None


def wanted() -> list[Pair]:
    """Those that WHEELS names, else all. Raises ValueError as ``parse``."""
    return parse(os.environ.get(VARIABLE, "")) or of_all_supported()
