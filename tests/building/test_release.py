"""build_tools/release: pairs, pip's page, the notes of a version, what is made again."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from build_tools.release import hub, index, pairs, wheels
from build_tools.release.__main__ import notes_of
from build_tools.release.pairs import Pair
from tests.building import project_tree

CHANGELOG = (
    "# Changelog\n\n## [0.2.0] - 2026-12-01\n\n- New.\n\n## [0.1.0] - unreleased\n\n- Old.\n"
)


def test_pairs_are_read_and_what_is_none_is_named() -> None:
    assert pairs.parse("torch==2.14 cp312; torch==2.15.1 cp314;") == [
        Pair("2.14", 12),
        Pair("2.15", 14, ".1"),
    ]
    assert [Pair("2.14", 12).requirement, Pair("2.15", 14, ".1").requirement] == [
        "torch==2.14.*",
        "torch==2.15.1",
    ]
    with pytest.raises(
        ValueError, match=r"^WHEELS: expected entries as .*, got 'torch 2.14 cp312'"
    ):
        pairs.parse("torch==2.14 cp312; torch 2.14 cp312")


def test_pip_takes_a_wheel_from_the_page(tmp_path: Path) -> None:
    """Its name has a plus sign, and the page the sum that pip compares."""
    folder = index.folder_for("13", tmp_path)
    folder.mkdir(parents=True)
    name = "flash_attn_cuda-0.1.0+torch2.14.cu130"
    wheel = project_tree.empty_wheel(folder, name)
    index.write_pages(tmp_path)
    page = str(folder / "index.html")
    options = ["--no-index", "--no-deps", "--find-links", page, "--dest", str(tmp_path / "got")]
    command = [sys.executable, "-m", "pip", "download", "--quiet", *options, "flash-attn-cuda"]
    subprocess.run(command, check=True)
    assert (tmp_path / "got" / wheel.name).is_file()
    sums = index.write_sums(tmp_path).read_text()
    assert f"{index.sha256(wheel)}  {wheel.relative_to(tmp_path)}\n" in sums


def test_a_wheel_of_other_sources_is_made_again(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr(wheels, "WORK", tmp_path)
    monkeypatch.setattr(wheels, "REPO", tmp_path)
    pair, wheel = Pair("2.14", 12), tmp_path / "a.whl"
    assert not wheels.is_done(pair, "sources")
    record = {"sources": "sources", "wheel": wheel.name}
    wheels.record_of(pair).write_text(json.dumps(record))
    assert not wheels.is_done(pair, "sources")
    wheel.touch()
    assert wheels.is_done(pair, "sources") and not wheels.is_done(pair, "others")


def test_notes_are_those_of_a_version_that_has_a_date() -> None:
    assert notes_of("0.2.0", CHANGELOG) == "- New.\n"
    for version in ("0.1.0", "0.3.0"):
        with pytest.raises(ValueError, match=rf"expected ## \[{version}\] - YYYY-MM-DD, got "):
            notes_of(version, CHANGELOG)


def test_a_variant_has_the_name_that_kernels_looks_for() -> None:
    kernels = pytest.importorskip("kernels.variants")
    name = hub.variant_of("0.1.0+torch2.14.cu130")
    assert kernels.parse_variant(name).variant_str == name
    assert hub.variant_of("0.1.0") == "torch-cpu"
