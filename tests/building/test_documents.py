"""Links between documents lead somewhere, and the list of kernels is that of the kernel table."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from build_tools.generate import kernel_docs
from kernel_table.row import Dtype
from tests.building.kernel_rows import DROPOUT_ROW, ROW, SHORT_ROW, SM90_ROW

REPO = Path(__file__).resolve().parents[2]
RESULTS = REPO / "benchmarks/results"
DOCUMENTS = [
    path
    for folder in (REPO, REPO / "docs", REPO / "benchmarks", RESULTS)
    for path in sorted(folder.glob("*.md"))
]
FOLDERS = "benchmarks build_tools csrc examples flash_attn_cuda kernel_table tests"
SOURCES = [
    path
    for folder in FOLDERS.split()
    for suffix in ("py", "h", "cpp", "cu")
    for path in sorted((REPO / folder).rglob(f"*.{suffix}"))
]
LINK = re.compile(r"\]\(([^):]+)\)")
MENTION = re.compile(r"\b(?:docs|benchmarks)/[\w/]+\.md(?:#[\w-]+)?")


def anchors(document: Path) -> set[str]:
    """As GitHub makes them of headings, and those that a document names itself."""
    text = document.read_text()
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    slugs = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
    return slugs | set(re.findall(r'<a id="([\w-]+)">', text))


def missing(path: Path, text: str, pattern: re.Pattern[str], root: Path) -> Iterator[str]:
    """What a file links to and is not there; an sdist has no results."""
    for link in pattern.findall(text):
        name, _, anchor = link.partition("#")
        target = (root / name).resolve() if name else path
        if RESULTS in (target, *target.parents) and not RESULTS.exists():
            continue
        if not target.exists() or (anchor and anchor not in anchors(target)):
            yield link


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(REPO)))
def test_links_of_a_document_lead_somewhere(path: Path) -> None:
    assert not list(missing(path, path.read_text(), LINK, path.parent))


def test_documents_that_sources_name_exist() -> None:
    found = {path.name: list(missing(path, path.read_text(), MENTION, REPO)) for path in SOURCES}
    assert not {name: links for name, links in found.items() if links}


def test_the_list_of_kernels_is_that_of_the_table() -> None:
    assert kernel_docs.main(["--check"]) == 0, "run python -m build_tools.generate.kernel_docs"
    assert len(kernel_docs.BLOCK.findall(kernel_docs.DOCUMENT.read_text())) == 1


def test_rows_that_differ_in_dtype_head_dim_and_shared_memory_share_a_line() -> None:
    long = replace(SM90_ROW, variant="long", least_keys_full=2048, least_keys_windowed=1024)
    wide = replace(SM90_ROW, head_dim=192, head_dim_v=128)
    of_others = replace(long, head_dim=256, least_keys_full=512, least_keys_windowed=512)
    fp16 = replace(SM90_ROW, dtype=Dtype.fp16)
    of_small_gpus = replace(DROPOUT_ROW, head_dim=256, variant="dropout_smem99k")
    rows = [SHORT_ROW, ROW, long, of_others, SM90_ROW, fp16, wide, DROPOUT_ROW, of_small_gpus]
    assert kernel_docs.table(rows).split("\n")[2:] == [
        "|`sm90/forward`|`short`|128| |up to 0 full, 1,000 masked|",
        "| |`long`|128, 256| |128: from 2,048 full, 1,024 masked; 256: from 512|",
        "| |`plain`|128, 192/128| | |",
        "| |`dropout`|128; smem99k: 256|dropout| |",
        "|`sm80/forward`|`plain`|128| | |",
    ]


def test_check_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = kernel_docs.DOCUMENT.read_text()
    stale = tmp_path / "kernels.md"
    stale.write_text(kernel_docs.BLOCK.sub("old", text))
    monkeypatch.setattr(kernel_docs, "DOCUMENT", stale)
    assert kernel_docs.main(["--check"]) == 1
    assert stale.read_text() != text
    assert kernel_docs.main([]) == 0
    assert stale.read_text() == text
