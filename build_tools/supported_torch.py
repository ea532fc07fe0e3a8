"""The releases of torch that the package is for: setup.py and wheels take their bounds here."""

from __future__ import annotations

import re

from build_tools.toolchain import ToolchainError

OLDEST = (2, 10)
NEWEST_TRIED = (2, 14)  # newer ones are not refused


def requirement() -> str:
    """What a package without extension, or not built yet, requires."""
    return f"torch>={OLDEST[0]}.{OLDEST[1]}"


def release_of(version: str) -> tuple[int, int]:
    """``"2.14.1+cu130"`` to (2, 14). Raises ValueError for what does not begin like that."""
    found = re.match(r"(\d+)\.(\d+)", version)
    if not found:
        raise ValueError(f"torch: expected a version such as 2.14.1+cu130, got {version!r}")
    return int(found[1]), int(found[2])


def _range() -> str:
    oldest, newest = (".".join(map(str, release)) for release in (OLDEST, NEWEST_TRIED))
    return f"{oldest} to {newest}"


def check(version: str) -> None:
    """Raises ToolchainError for a torch that is older than the oldest."""
    if release_of(version) < OLDEST:
        raise ToolchainError(
            f"torch {version} is older than what flash_attn_cuda is for: {_range()} work, "
            "so pip install --upgrade torch"
        )


def advice(version: str) -> str | None:
    """What to say where something fails with a torch that is newer than those that were tried."""
    if release_of(version) <= NEWEST_TRIED:
        return None
    newest = ".".join(map(str, NEWEST_TRIED))
    return (
        f"torch {version} is newer than what flash_attn_cuda was tried with: {_range()} work, "
        f"so pip install 'torch=={newest}.*'"
    )
