"""Folders that tests of the build make."""

from __future__ import annotations

from pathlib import Path


def cutlass_headers(folder: Path, version: str = "4.2.0") -> Path:
    """A folder that says that it has the headers of this version of CUTLASS."""
    (folder / "cutlass").mkdir(parents=True, exist_ok=True)
    parts = zip(("MAJOR", "MINOR", "PATCH"), version.split("."), strict=True)
    text = "".join(f"#define CUTLASS_{part} {number}\n" for part, number in parts)
    (folder / "cutlass/version.h").write_text(text)
    return folder
