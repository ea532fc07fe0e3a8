"""Brings the pinned CUTLASS headers to third_party/cutlass/include; a script and a module."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

VERSION = "4.2.0.0"
REQUIREMENT = f"nvidia-cutlass=={VERSION}"
SHA256 = "f9599ada45c7bcb6bf53f7d3f0a7d154183e53451c01bfa59eecd37dd4a693f6"
HEADERS_IN_WHEEL = "cutlass_library/source/include/"
INCLUDE_DIR = Path(__file__).resolve().parent / "include"


class FetchError(RuntimeError):
    """The headers could not be fetched, or are not the pinned ones."""


def download(folder: Path) -> Path:
    """The wheel, by this Python's pip, without its dependencies: only headers are wanted."""
    # -I: inside pip's build isolation, PYTHONPATH hides the pip that this Python has.
    pip = [sys.executable, "-I", "-m", "pip", "--disable-pip-version-check"]
    options = ["--no-deps", "--only-binary=:all:", "--dest", str(folder)]
    command = [*pip, "download", *options, REQUIREMENT]
    result = subprocess.run(command, capture_output=True, text=True)
    wheels = list(folder.glob("*.whl"))
    if result.returncode or len(wheels) != 1:
        raise FetchError(
            f"pip could not download {REQUIREMENT}; CUTLASS_PATH can name the include folder of a "
            f"CUTLASS checkout instead.\n{result.stderr.strip()}"
        )
    return wheels[0]


def check_hash(wheel: Path) -> None:
    """Raises FetchError unless ``wheel`` is the pinned file, byte for byte."""
    actual = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if actual != SHA256:
        raise FetchError(f"{wheel.name}: expected sha256 {SHA256}, got {actual}")


def is_there(include_dir: Path) -> bool:
    return (include_dir / "cutlass/version.h").is_file()


def unpack(wheel: Path, include_dir: Path) -> None:
    """Puts the wheel's headers at ``include_dir`` in one rename: they are absent or complete."""
    include_dir.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=include_dir.parent, prefix=".unpack-") as scratch:
        with zipfile.ZipFile(wheel) as archive:
            headers = [name for name in archive.namelist() if name.startswith(HEADERS_IN_WHEEL)]
            archive.extractall(scratch, headers)
        try:
            os.rename(Path(scratch) / HEADERS_IN_WHEEL, include_dir)
        except OSError as error:
            # Otherwise another build was first, with the same headers.
            if not is_there(include_dir):
                raise FetchError(
                    f"{include_dir} is there without cutlass/version.h: remove it, so that the "
                    "headers can take its place"
                ) from error


def fetch(include_dir: Path = INCLUDE_DIR) -> Path:
    """The folder with the pinned headers, downloaded and checked when it is not there yet."""
    if not is_there(include_dir):
        with tempfile.TemporaryDirectory() as scratch:
            wheel = download(Path(scratch))
            check_hash(wheel)
            unpack(wheel, include_dir)
    return include_dir


if __name__ == "__main__":
    print(fetch())
