"""What README and docs say of speed is what the files in benchmarks/results give."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.core import performance, performance_tables, result_files
from benchmarks.core.performance_tables import TEXTS
from benchmarks.core.result_files import CARDS
from tests.benchmarks.cases import needs_results


@needs_results
@pytest.mark.parametrize("file", performance.FILES)
def test_a_text_is_what_the_results_give(file: str) -> None:
    text = (performance.ROOT / file).read_text()
    assert text.count("<!-- generated: ") == len(performance.BLOCK.findall(text)) > 0
    assert text == performance.written(text), "run python -m benchmarks.core.performance"


@needs_results
@pytest.mark.parametrize("figure", performance.figures(), ids=lambda path: path.stem)
def test_a_figure_shows_the_results(figure: Path) -> None:
    command = f"run python -m benchmarks.core.performance --figure docs/{figure.name}"
    assert performance.shows_results(figure), command
    assert figure.stat().st_size < 60_000


@needs_results
@pytest.mark.parametrize("name", TEXTS)
def test_a_table_is_shown_once(name: str) -> None:
    texts = ((performance.ROOT / file).read_text() for file in performance.FILES)
    assert sum(performance.BLOCK.findall(text).count(name) for text in texts) == 1


@needs_results
@pytest.mark.parametrize("card", CARDS)
def test_a_figure_is_the_same_each_time(card: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    paths = [tmp_path / name / f"speed_{card}.svg" for name in ("first", "second")]
    for path in paths:
        path.parent.mkdir()
        assert performance.main(["--figure", str(path)]) == 0
    first, second = (path.read_text() for path in paths)
    assert first == second and performance.shows_results(paths[0])
    assert "fill: #ffffff" in first and "forward, D = 64" in first


@pytest.mark.parametrize("name", ["speed", "power_h200", "speed_a100"])
def test_a_figure_is_named_by_what_it_shows_and_its_card(name: str) -> None:
    with pytest.raises(SystemExit, match="such as speed_h200"):
        performance.main(["--figure", f"docs/{name}.svg"])


TEXT = (
    "a\n<!-- generated: one -->\n<!-- end -->\nb\n<!-- generated: two -->\nold\n<!-- end -->\nc\n"
)
WRITTEN = (
    "a\n<!-- generated: one -->\n\n|1|\n\n<!-- end -->\nb\n"
    "<!-- generated: two -->\n\n|2|\n\n<!-- end -->\nc\n"
)


@pytest.fixture
def texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Two files, of which one is as it should be."""
    made = {"one": lambda: "|1|", "two": lambda: "|2|"}
    monkeypatch.setattr(performance, "TEXTS", made)
    monkeypatch.setattr(performance, "ROOT", tmp_path)
    monkeypatch.setattr(performance, "FILES", ("a.md", "b.md"))
    paths = [tmp_path / "a.md", tmp_path / "b.md"]
    for path, text in zip(paths, (TEXT, WRITTEN), strict=True):
        path.write_text(text)
    return paths


def test_tables_are_written_between_their_markers(texts: list[Path], capsys) -> None:
    assert performance.main([]) == 0
    assert capsys.readouterr().out == "a.md: written\n"
    assert [path.read_text() for path in texts] == [WRITTEN, WRITTEN]
    assert performance.main([]) == 0 and capsys.readouterr().out == ""


def test_check_writes_nothing_and_names_the_file(texts: list[Path], capsys) -> None:
    assert performance.main(["--check"]) == 1
    assert capsys.readouterr().out == "a.md: not what the results give\n"
    assert texts[0].read_text() == TEXT
    texts[0].write_text(WRITTEN)
    assert performance.main(["--check"]) == 0


def test_a_table_that_does_not_exist_is_refused(texts: list[Path]) -> None:
    texts[1].write_text("<!-- generated: three -->\n<!-- end -->\n")
    with pytest.raises(SystemExit, match="expected one of one, two, got 'three'"):
        performance.main([])


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of results, and tables that read it."""
    monkeypatch.setattr(result_files, "RESULTS", tmp_path)
    result_files.load.cache_clear()
    yield tmp_path
    result_files.load.cache_clear()


DOCUMENT = '{"environment": {"commit": "0123456789"}, "protocol": {"turn_ms": %s}, "results": []}'


def test_a_source_is_file_commit_and_unusual_turns(results: Path) -> None:
    (results / "h200_one.json").write_text(DOCUMENT % 100.0)
    (results / "h200_two.json").write_text(DOCUMENT % 300.0)
    assert result_files.source("h200_one", "h200_two") == (
        "`h200_one.json` (0123456), `h200_two.json` (0123456, turns of 300 ms)."
    )


def test_a_result_of_no_suite_is_not_passed_over(results: Path) -> None:
    (results / "h200_new.json").write_text(DOCUMENT % 100.0)
    with pytest.raises(KeyError, match="new"):
        performance_tables.files()


def test_figures_in_cells() -> None:
    assert result_files.ratios([0.914, None, 1.0]) == "0.91, , 1.00"
    assert result_files.ratios([None, None]) == ""
    assert result_files.mean_and_lowest([1.0, 4.0]) == "2.00 (1.00)"
    assert result_files.least_to_most([0.51, 0.25], 1) == "0.2 to 0.5"
    assert [result_files.thousands(x) for x in (197, 512, 4096)] == ["197", "512", "4k"]
    assert result_files.compact([["a", ""], ["b", "c"]]) == "|a| |\n|b|c|"
