"""The page that pip reads of a folder of wheels (PEP 503), and the sums of a release's files."""

from __future__ import annotations

import hashlib
from html import escape
from pathlib import Path
from urllib.parse import quote

from build_tools.compile.toolchain import REPO

DIST = REPO / "dist"
PROJECT = "flash-attn-cuda"
PAGE = "<!DOCTYPE html>\n<title>{title}</title>\n{links}\n"


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def wheels_of(dist: Path = DIST) -> list[Path]:
    return sorted(dist.glob(f"simple/*/{PROJECT}/*.whl"))


def folder_for(cuda_major: str, dist: Path = DIST) -> Path:
    """The wheels of a CUDA; at once what ``--find-links`` reads and a project of an index."""
    return dist / "simple" / f"cu{cuda_major}" / PROJECT


def _write_page(folder: Path, links: dict[str, str]) -> None:
    lines = (f'<a href="{escape(url)}">{escape(text)}</a><br>' for text, url in links.items())
    page = PAGE.format(title=folder.name, links="\n".join(lines))
    (folder / "index.html").write_text(page)


def write_pages(dist: Path = DIST) -> None:
    """A page for each folder of wheels and for what leads there; ``+`` has to be escaped."""
    for project in sorted(dist.glob(f"simple/*/{PROJECT}")):
        wheels = sorted(project.glob("*.whl"))
        _write_page(project, {x.name: f"{quote(x.name)}#sha256={sha256(x)}" for x in wheels})
        _write_page(project.parent, {PROJECT: f"{PROJECT}/"})
    _write_page(dist / "simple", {x.name: f"{x.name}/" for x in sorted(dist.glob("simple/cu*"))})


def write_sums(dist: Path = DIST) -> Path:
    """SHA256SUMS of all that dist holds, as ``sha256sum --check`` reads it."""
    sums = dist / "SHA256SUMS"
    files = (path for path in sorted(dist.rglob("*")) if path.is_file() and path != sums)
    sums.write_text("".join(f"{sha256(path)}  {path.relative_to(dist)}\n" for path in files))
    return sums
