"""Result files, the tables and figures made of them, and the programs that make them anew."""

from __future__ import annotations

import csv
import importlib
import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.core import (
    documents,
    feature_tables,
    figures,
    grid_tables,
    performance,
    performance_tables,
    report,
    result_files,
)
from benchmarks.core.feature_tables import Column, Target
from benchmarks.core.figures import FIGURES, Figure
from benchmarks.core.performance_tables import TEXTS
from tests.benchmarks.cases import RESULT_FILES, needs_results

EVERY = [figure for of_name in FIGURES.values() for figure in of_name]

# -- the files that are here -----------------------------------------------------------------------

# Whose programs print them, and which no table here is made of.
OWN_TABLES = ("host_", "train_", "gemma")


@needs_results
@pytest.mark.parametrize("path", RESULT_FILES, ids=lambda path: path.stem)
def test_result_files_are_read(path: Path, capsys) -> None:
    """They are as programs write them, and the report prints them."""
    document = json.loads(path.read_text())
    assert document["schema"] == report.SCHEMA
    assert path.read_text() == documents.json_text(document)
    if not any(name in path.name for name in OWN_TABLES):
        assert report.main([str(path), "--markdown"]) == 0
        assert capsys.readouterr().out.count("\n") > 3


@needs_results
def test_texts_and_figures_are_what_the_results_give() -> None:
    texts = [(performance.ROOT / file).read_text() for file in performance.FILES]
    assert performance.stale() == [], "run python -m benchmarks.core.performance"
    assert all(
        text.count("<!-- generated: ") == len(performance.BLOCK.findall(text)) for text in texts
    )
    shown = [name for text in texts for name in performance.BLOCK.findall(text)]
    assert sorted(shown) == sorted(TEXTS)  # each once
    assert performance.figures()
    assert all(path.stat().st_size < 60_000 for path in performance.figures())


@needs_results
def test_a_figure_is_the_same_each_time(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    drawn = []
    for name in ("first", "second"):
        path = tmp_path / name / "speed_h200.svg"
        path.parent.mkdir()
        assert performance.main(["--figure", str(path)]) == 0 and performance.shows_results(path)
        drawn.append(path.read_text())
    assert drawn[0] == drawn[1] and "forward, D = 64" in drawn[0]


# -- texts between markers -------------------------------------------------------------------------

TEXT = "a\n<!-- generated: one -->\n<!-- end -->\nb\n<!-- generated: two -->\nx\n<!-- end -->\nc\n"
WRITTEN = (
    "a\n<!-- generated: one -->\n\n|1|\n\n<!-- end -->\nb\n"
    "<!-- generated: two -->\n\n|2|\n\n<!-- end -->\nc\n"
)


def test_tables_are_written_between_their_markers(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(performance, "TEXTS", {"one": lambda: "|1|", "two": lambda: "|2|"})
    monkeypatch.setattr(performance, "ROOT", tmp_path)
    monkeypatch.setattr(performance, "FILES", ("a.md", "b.md"))
    old, new = tmp_path / "a.md", tmp_path / "b.md"
    old.write_text(TEXT)
    new.write_text(WRITTEN)
    assert performance.main(["--check"]) == 1
    assert capsys.readouterr().out == "a.md: not what the results give\n"
    assert old.read_text() == TEXT
    assert performance.main([]) == 0 and capsys.readouterr().out == "a.md: written\n"
    assert old.read_text() == new.read_text() == WRITTEN
    assert performance.main(["--check"]) == 0 and capsys.readouterr().out == ""
    new.write_text("<!-- generated: three -->\n<!-- end -->\n")
    with pytest.raises(SystemExit, match="expected one of one, two, got 'three'"):
        performance.main([])


def test_a_source_is_file_commit_and_unusual_turns(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(result_files, "RESULTS", tmp_path)
    result_files.load.cache_clear()
    for name, turn_ms in {"h200_one": 100.0, "h200_two": 300.0}.items():
        facts = {"environment": {"commit": "0123456789"}, "protocol": {"turn_ms": turn_ms}}
        (tmp_path / f"{name}.json").write_text(json.dumps(facts))
    assert result_files.source("h200_one", "h200_two") == (
        "`h200_one.json` (0123456), `h200_two.json` (0123456, turns of 300 ms)."
    )
    with pytest.raises(KeyError, match="two"):  # a result of no suite is not passed over
        performance_tables.files()
    result_files.load.cache_clear()


# -- what was measured, with what ------------------------------------------------------------------


@pytest.mark.parametrize(("status", "changes"), [(None, None), ("", False), (" M x.py", True)])
def test_sources_that_git_knows_nothing_of(monkeypatch, status, changes) -> None:
    """Their changes are unknown, which is not the same as none."""

    def output(*command: str) -> str | None:
        return status if "status" in command else None

    monkeypatch.setattr(documents, "command_output", output)
    monkeypatch.setenv(documents.COMMIT_VARIABLE, "abc")
    facts = documents.environment("cpu")
    assert facts["torch"] == torch.__version__
    assert facts["commit"] == "abc" and facts["uncommitted_changes"] is changes


# -- tables of rows --------------------------------------------------------------------------------


def test_targets_are_judged_and_shown() -> None:
    row = {"what": "x", "rate": 0.5, "none": None, "status": "ok", "reason": None, "name": "x"}
    assert Target("rate", 0.5).judge(row)["met"] is True
    assert Target("rate", 0.4, at_least=False).judge(row)["met"] is False
    assert Target("none", 0.9).judge(row)["met"] is None
    row["targets"] = [Target("rate", 0.8).judge(row)]
    refused = row | {"rate": None, "targets": [], "status": "failed", "reason": "why"}
    columns = (Column("what", "what"), Column("rate", "rate", feature_tables.ratio))
    document: dict[str, Any] = {
        "command": "c",
        "environment": {"device": "d", "torch": "t", "commit": "a" * 40},
        "results": [row, refused],
    }
    text = feature_tables.markdown(document, columns)
    rows = [[x.strip() for x in line.split("|")[1:-1]] for line in text.splitlines()[2:4]]
    assert rows == [["x", "**0.50 (>= 0.80)**"], ["x", "failed: why"]]
    assert "targets met: 0 of 1\n  x: rate 0.5, target at least 0.8" in text
    assert "d, torch t, commit aaaaaaaaaaaa: `c`" in text
    timed = document | {"protocol": {"turn_ms": 300.0}}
    assert feature_tables.facts(timed).startswith("d, turns of 300 ms, torch t")


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


@pytest.fixture
def of_grid(tmp_path: Path) -> Path:
    """Of ours and two peers; one has no figure of the second length."""

    def row(backend: str, tflops: float | None, seqlen: int, **changes: Any) -> dict[str, Any]:
        return {
            **{"case": f"S{seqlen}", "pass": "forward", "dtype": "bf16", "head_dim": 192},
            **{"head_dim_v": 128, "causal": True, "backend": backend, "seqlen_q": seqlen},
            **{"tflops": tflops, "median_ms": tflops and 1e3 / tflops, "check": None},
            **{"sm_clock_mhz": None, "watts": None, "joules_per_call": None, "ratio": None},
            **changes,
        }

    power = {"sm_clock_mhz": 1530.0, "watts": 689.6, "joules_per_call": 1.2345}
    rows = [
        row("ours", 500.0, 512, **power, check={"passes": True}),
        row("sdpa_cudnn", 400.0, 512),
        row("fa3", 625.0, 512),
        row("ours", 600.0, 1024, sm_clock_mhz=1545.0),
        row("sdpa_cudnn", None, 1024),
        row("fa3", 480.0, 1024),
    ]
    grid_tables.add_ratios(rows, "sdpa_cudnn")
    document = {
        "schema": report.SCHEMA,
        "command": "c",
        "protocol": {"turn_ms": 100.0},
        "baseline": "sdpa_cudnn",
        "environment": {"device": "d", "torch": "t", "commit": None},
        "summary": grid_tables.summarise(rows, "sdpa_cudnn"),
        "results": rows,
    }
    path = tmp_path / "r.json"
    path.write_text(json.dumps(document))
    return path


def test_tables_of_the_grid(of_grid: Path, capsys) -> None:
    def printed(*options: str) -> list[str]:
        assert report.main([str(of_grid), *options]) == 0
        return capsys.readouterr().out.splitlines()

    speeds = printed("--markdown")
    assert cells(speeds[0])[-2:] == ["S = 512", "S = 1024"]
    problem = ["forward", "bf16", "192x128", "causal"]
    assert cells(speeds[2]) == [
        *(*problem, "ours", "500 (1530 MHz, 690 W, 1.23 J)", "600 (1545 MHz)")
    ]
    assert cells(speeds[3]) == [*problem, "sdpa_cudnn", "400", ""]
    assert any("on d, turns of 100 ms, torch t" in line for line in speeds)
    problem.remove("bf16")
    assert cells(printed("--ratios")[2]) == [*problem, "500 / 1.25", "600"]
    several = printed("--ratios", "--against", "fa3", "sdpa_cudnn")
    assert cells(several[2]) == [*problem, "500 / 0.80 / 1.25", "600 / 1.25 / -"]
    assert [cells(line) for line in printed("--peers")[2:]] == [
        ["forward", "sdpa_cudnn", "1", "1.25", "1.25", "S512"],
        ["forward", "fa3", "2", "1.00", "0.80", "S512"],
    ]
    names = [line.partition(" geomean")[0] for line in printed()]
    assert names == [
        f"forward: {x}" for x in ("ours / sdpa_cudnn", "fa3 / sdpa_cudnn", "ours / fa3")
    ]


def test_csv_and_plot_of_the_grid(of_grid: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    table, plot = tmp_path / "r.csv", tmp_path / "r.png"
    assert report.main([str(of_grid), "--csv", str(table), "--plot", str(plot)]) == 0
    with table.open() as file:
        lines = list(csv.DictReader(file))
    assert [line["tflops"] for line in lines] == ["500.0", "400.0", "625.0", "600.0", "", "480.0"]
    assert [line["ratio"] for line in lines[:2]] == ["1.25", "1.0"]
    assert {line["check"] for line in lines} == {"True", ""}
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_what_the_report_refuses(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    path.write_text('{"schema": 0}')
    with pytest.raises(SystemExit, match="schema must be 1, got 0"):
        report.main([str(path)])
    path.write_text('{"schema": 1, "benchmark": "decode"}')
    with pytest.raises(SystemExit, match="--ratios are for results of"):
        report.main([str(path), "--ratios"])


# -- measuring anew --------------------------------------------------------------------------------


def test_the_programs_that_make_result_files(capsys) -> None:
    """Their options exist, and each file is of one of them."""
    for figure in EVERY:
        suite, *options = shlex.split(figure.command)
        module = importlib.import_module(f"benchmarks.suites.{suite}")
        parse = getattr(module, "parse_arguments", None)
        if parse is None:  # it parses in main
            source = Path(module.__file__ or "").read_text()
            assert all(f'"{x}"' in source for x in (*options, "--json") if x.startswith("--"))
        else:
            parse([*options, "--json", "r.json"])
    assert len({figure.file for figure in EVERY}) == len(EVERY)
    assert figures.main(["--list", "--device", "h100"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(EVERY) and "h100_forward_sm90.json: grid" in lines[0]
    assert any("FLASH_ATTN_CUDA_CAPABILITY_LIMIT=80 grid" in line for line in lines)


PROGRAM = """
import json, pathlib, sys, time
pathlib.Path(sys.argv[-1]).write_text(json.dumps({"command": " ".join(sys.argv[1:])}))
if "--late" in sys.argv:
    time.sleep(60)
sys.exit(3 if "--fail" in sys.argv else 0)
"""


def test_what_ends_well_fails_or_takes_too_long(tmp_path: Path, monkeypatch, capsys) -> None:
    """Programs are plain scripts here. A result names the folder of results, and the variables of
    its program.
    """
    made = {
        "well": (Figure("well", "program", {"LIMIT": "80"}),),
        "ill": (Figure("ill", "program --fail"),),
        "late": (Figure("late", "program --late"),),
    }
    (tmp_path / "benchmarks/suites").mkdir(parents=True)
    (tmp_path / "benchmarks/suites/program.py").write_text(PROGRAM)
    monkeypatch.setattr(figures, "ROOT", tmp_path)
    monkeypatch.setattr(figures, "FIGURES", made)
    out = tmp_path / "out"
    options = ["--device", "h200", "--out", str(out)]
    assert figures.main([*options, "well"]) == 0
    assert figures.main([*options, "ill"]) == 1
    assert figures.main([*options, "--seconds", "3", "late"]) == 1
    printed = capsys.readouterr().out
    assert "well: status 0" in printed and "ill: status 3" in printed
    assert "late: interrupted or not reached" in printed
    commands = {x: json.loads((out / f"h200_{x}.json").read_text())["command"] for x in made}
    assert commands["well"] == "LIMIT=80 --json benchmarks/results/h200_well.json"
    assert commands["late"] == "--late --json benchmarks/results/h200_late.json"
    assert figures.main([*options, "--seconds", "0", "well"]) == 1
