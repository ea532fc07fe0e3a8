"""The releases of torch that the package is for, and what a wheel says of its torch.

The extension runs with the torch minor and the CUDA that it was compiled for. Its wheel says so, as
``0.1.0+torch2.15.cu132`` that requires ``torch==2.15.*``, so that pip refuses another minor, or
brings the right one, before an import fails. Which CUDA a torch has no requirement can say: that is
found at import. A wheel without extension and an sdist have the plain version and take any
supported torch.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from build_tools.compile.toolchain import REPO, ToolchainError

if TYPE_CHECKING:
    from setuptools import Distribution

OLDEST = (2, 10)
NEWEST_TRIED = (2, 15)  # newer ones are not refused
BEFORE_RELEASE = re.compile(r"[\d.]*\d(a|b|rc|\.dev)\d")


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


@dataclass(frozen=True)
class TorchBuild:
    """A torch to compile for, by its ``__version__`` and its ``version.cuda``."""

    version: str
    cuda: str | None

    @property
    def local_version(self) -> str:
        """What stands behind the plus sign of the wheel's version, such as ``torch2.15.cu132``."""
        major, minor = release_of(self.version)
        cuda = f".cu{self.cuda.replace('.', '')}" if self.cuda else ""
        return f"torch{major}.{minor}{cuda}"

    @property
    def requirement(self) -> str:
        """The torch that runs the extension, such as ``torch==2.15.*``.

        ``2.16.*`` would leave out every pre-release of 2.16, with the one that was compiled for.
        """
        major, minor = release_of(self.version)
        if BEFORE_RELEASE.match(self.version):
            return f"torch>={major}.{minor}.dev0,<{major}.{minor + 1}"
        return f"torch=={major}.{minor}.*"


def present_torch() -> TorchBuild:
    import torch

    return TorchBuild(torch.__version__, torch.version.cuda)


def package_version() -> str:
    """That of flash_attn_cuda/__init__.py, read without an import, which needs torch."""
    text = (REPO / "flash_attn_cuda/__init__.py").read_text()
    return re.findall(r'^__version__ = "(.+)"$', text, re.MULTILINE)[0]


def is_unpacked_sdist(tree: Path) -> bool:
    return (tree / "PKG-INFO").is_file()


def bind_to_torch(distribution: Distribution, torch: TorchBuild, tree: Path = REPO) -> bool:
    """Names the distribution for ``torch`` and requires that; False where it does already.

    What is built of an sdist keeps the sdist's version: pip and PEP 643 take the version from its
    file name, and pip would turn down a wheel that has another. It requires the one torch as well.
    """
    requirements = [torch.requirement]
    if distribution.install_requires == requirements:
        return False
    distribution.install_requires = distribution.metadata.install_requires = requirements
    if not is_unpacked_sdist(tree):
        distribution.metadata.version = f"{distribution.get_version()}+{torch.local_version}"
    return True
