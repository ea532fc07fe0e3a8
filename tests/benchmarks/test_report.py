"""What grid.py leaves behind and report.py makes of it, on the CPU."""

from __future__ import annotations

import csv
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.core import documents, feature_tables, grid_tables, report
from benchmarks.suites import grid as bench
from flash_attn_cuda import build_info
from tests.benchmarks.cases import RESULT_FILES, TINY_GRID, needs_results
from tests.cases.cpu_harness import one_thread  # noqa: F401

pytestmark = pytest.mark.usefixtures("one_thread")

ROOT = Path(__file__).resolve().parents[2]


def make_row(case: str, which: str, backend: str, median_ms: float | None) -> grid_tables.Row:
    return {"case": case, "pass": which, "backend": backend, "median_ms": median_ms, "ratio": None}


def test_ratios_and_their_summary():
    rows = [
        make_row("x", "forward", "base", 2.0),
        make_row("x", "forward", "ours", 1.0),
        make_row("y", "forward", "base", 1.0),
        make_row("y", "forward", "ours", 2.0),
        make_row("y", "backward", "ours", 2.0),  # the baseline has no such cell
        make_row("z", "forward", "base", 3.0),
        make_row("z", "forward", "ours", None),  # did not run
    ]
    grid_tables.add_ratios(rows, "base")
    assert [row["ratio"] for row in rows] == [1.0, 2.0, 1.0, 0.5, None, 1.0, None]
    (entry,) = grid_tables.summarise(rows, "base")
    assert (entry["pass"], entry["backend"], entry["cells"]) == ("forward", "ours", 2)
    assert entry["geomean_ratio"] == pytest.approx(1.0)
    assert (entry["minimum_ratio"], entry["minimum_case"]) == (0.5, "y")


@pytest.fixture(scope="module")
def outputs(tmp_path_factory) -> Path:
    """A folder with everything that a small run of the command line writes."""
    folder = tmp_path_factory.mktemp("bench")
    arguments = [*TINY_GRID, "--backends", "ours", "sdpa_math", "sdpa_cudnn", "--refcheck"]
    arguments += ["--baseline", "sdpa_math", "--json", str(folder / "r.json")]
    arguments += ["--csv", str(folder / "r.csv")]
    assert bench.main(arguments) == 0
    return folder


def test_json_has_everything_a_reader_needs(outputs):
    document = json.loads((outputs / "r.json").read_text())
    assert document["schema"] == report.SCHEMA
    assert document["baseline"] == "sdpa_math"
    assert document["command"].startswith("python -m benchmarks.suites.grid --device cpu")
    facts = document["environment"]
    assert facts["torch"] == torch.__version__
    assert {"device", "driver", "commit", "cuda", "date", "flash_attn_cuda"} <= facts.keys()
    protocol = document["protocol"]
    assert (protocol["name"], protocol["version"]) == ("long turns", 4)
    assert (protocol["turn_ms"], protocol["joules_turn_ms"]) == (0.2, None)

    rows = document["results"]
    assert len(rows) == 2 * 2 * 2 * 3  # lengths, masks, passes, backends
    assert len({frozenset(row) for row in rows}) == 1
    for row in rows:
        assert row["sm_clock_mhz"] is row["watts"] is row["joules_per_call"] is None  # of a CPU
        if row["backend"] == "sdpa_cudnn":
            assert row["status"] == "unsupported" and row["reason"] and row["median_ms"] is None
        else:
            assert row["status"] == "ok" and row["check"]["passes"]
            assert row["tflops"] > 0 and row["low_ms"] <= row["median_ms"] <= row["high_ms"]
    assert {(entry["pass"], entry["backend"]) for entry in document["summary"]} == {
        ("forward", "ours"),
        ("backward", "ours"),
    }


@pytest.mark.parametrize(("status", "changes"), [(None, None), ("", False), (" M x.py", True)])
def test_sources_that_git_knows_nothing_of(monkeypatch, status, changes):
    """Their changes are unknown, which is not the same as none."""

    def output(*command: str) -> str | None:
        return status if "status" in command else None

    monkeypatch.setattr(documents, "command_output", output)
    monkeypatch.setenv(documents.COMMIT_VARIABLE, "abc")
    facts = documents.environment("cpu")
    assert facts["commit"] == "abc" and facts["uncommitted_changes"] is changes


def test_the_build_is_recorded_without_its_list_of_kernels(monkeypatch):
    record = {"archs": ["90a"], "nvcc": "13.0.88", "instances": [{}, {}]}
    monkeypatch.setattr(build_info, "build_record", lambda: record)
    assert documents.build_facts() == {"archs": ["90a"], "nvcc": "13.0.88", "kernels": 2}
    monkeypatch.setattr(build_info, "build_record", dict)  # without the extension
    assert documents.build_facts() is None


def test_csv_repeats_the_rows(outputs):
    rows = json.loads((outputs / "r.json").read_text())["results"]
    with (outputs / "r.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == len(rows)
    assert [float(line["median_ms"] or math.nan) for line in lines] == pytest.approx(
        [row["median_ms"] or math.nan for row in rows], nan_ok=True
    )
    assert {line["check"] for line in lines} == {"True", ""}


def test_report_prints_a_table_from_saved_results(outputs, capsys):
    assert report.main([str(outputs / "r.json"), "--markdown"]) == 0
    text = capsys.readouterr().out
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert lines[0] == "| pass | dtype | D | mask | backend | S = 16 | S = 32 |"
    assert lines[2].startswith("| forward | fp32 | 16 | full | ours |")
    assert len(lines) == 2 + 2 * 2 * 2
    assert "ours / sdpa_math geomean" in text


def test_report_prints_ratios_to_the_baseline(outputs, capsys):
    assert report.main([str(outputs / "r.json"), "--ratios"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "| pass | D | mask | S = 16 | S = 32 |"
    assert len(lines) == 2 + 2 * 2
    rows = json.loads((outputs / "r.json").read_text())["results"]
    wanted = ("ours", "backward", True, 32)
    (ours,) = (
        row
        for row in rows
        if (row["backend"], row["pass"], row["causal"], row["seqlen_q"]) == wanted
    )
    (line,) = (line for line in lines if line.startswith("| backward | 16 | causal |"))
    assert line.endswith(f"{grid_tables.three_digits(ours['tflops'])} / {ours['ratio']:.2f} |")


def test_json_has_a_line_for_each_fact_and_row():
    document = {
        "command": "c",
        "facts": {"a": [1, 2]},
        "results": [{"x": 1.5}, {"x": None}],
        "no": [],
    }
    text = documents.json_text(document)
    assert json.loads(text) == document
    assert text.splitlines()[3:7] == [' "results": [', '  {"x": 1.5},', '  {"x": null}', " ],"]
    assert text.count("\n") == 9


@needs_results
@pytest.mark.parametrize("path", RESULT_FILES, ids=lambda path: path.stem)
def test_result_files_are_as_programs_write_them(path):
    document = json.loads(path.read_text())
    assert document["schema"] == report.SCHEMA
    assert path.read_text() == documents.json_text(document)


# Whose programs print them, and which no table here is made of.
OWN_TABLES = ("host_", "train_", "gemma")
PRINTED = [path for path in RESULT_FILES if not any(name in path.name for name in OWN_TABLES)]


@needs_results
@pytest.mark.parametrize("path", PRINTED, ids=lambda path: path.stem)
def test_report_prints_every_result_file(path, capsys):
    assert report.main([str(path), "--markdown"]) == 0
    assert capsys.readouterr().out.count("\n") > 3


def test_report_draws_the_saved_results(outputs, tmp_path):
    pytest.importorskip("matplotlib")
    assert report.main([str(outputs / "r.json"), "--plot", str(tmp_path / "r.png")]) == 0
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")


def test_report_refuses_another_schema(tmp_path):
    (tmp_path / "old.json").write_text('{"schema": 0}')
    with pytest.raises(SystemExit, match="schema must be 1, got 0"):
        report.main([str(tmp_path / "old.json")])


def test_energy_is_asked_for_and_may_be_unknown(tmp_path):
    path = tmp_path / "r.json"
    cell = ["--seqlens", "16", "--masks", "full", "--passes", "forward", "--backends", "ours"]
    assert bench.main([*TINY_GRID, *cell, "--joules", "--json", str(path)]) == 0
    document = json.loads(path.read_text())
    assert document["protocol"]["joules_turn_ms"] == 1000.0
    assert [row["joules_per_call"] for row in document["results"]] == [None]


# Power


def powered_row(
    backend: str, tflops: float | None, seqlen: int = 512, **changes
) -> grid_tables.Row:
    """A row as grid.py writes it, as far as tables read it."""
    return {
        **{"case": f"S{seqlen}", "pass": "forward", "dtype": "bf16", "head_dim": 128},
        **{"head_dim_v": 128, "causal": True, "backend": backend, "seqlen_q": seqlen},
        "tflops": tflops,
        "median_ms": tflops and 1e3 / tflops,
        **{"sm_clock_mhz": None, "watts": None, "joules_per_call": None, "ratio": None},
        **changes,
    }


@pytest.fixture
def powered() -> grid_tables.Row:
    """A document with two peers; one has no figure of the second length."""
    rows = [
        powered_row("ours", 500.0, sm_clock_mhz=1530.0, watts=689.6, joules_per_call=1.2345),
        powered_row("sdpa_cudnn", 400.0),
        powered_row("fa3", 625.0),
        powered_row("ours", 600.0, seqlen=1024, sm_clock_mhz=1545.0),
        powered_row("sdpa_cudnn", None, seqlen=1024),
        powered_row("fa3", 480.0, seqlen=1024),
    ]
    grid_tables.add_ratios(rows, "sdpa_cudnn")
    return {
        "command": "c",
        "protocol": {"name": "long turns", "version": 3, "turn_ms": 100.0},
        "baseline": "sdpa_cudnn",
        "environment": {"device": "d", "torch": "t", "commit": None},
        "summary": grid_tables.summarise(rows, "sdpa_cudnn"),
        "results": rows,
    }


def test_clock_and_watts_stand_beside_the_speed(powered):
    ours, cudnn, _ = (line for line in grid_tables.markdown(powered).splitlines()[2:5])
    assert ours.endswith("| ours | 500 (1530 MHz, 690 W, 1.23 J) | 600 (1545 MHz) |")
    assert cudnn.endswith("| sdpa_cudnn | 400 |  |")
    assert "on d, turns of 100 ms, torch t" in grid_tables.markdown(powered)


def test_ratios_to_several_peers(powered):
    assert grid_tables.ratio_table(powered).splitlines()[2:] == [
        "| forward | 128 | causal | 500 / 1.25 | 600 |"
    ]
    assert grid_tables.ratio_table(powered, ["fa3", "sdpa_cudnn"]).splitlines()[2:] == [
        "| forward | 128 | causal | 500 / 0.80 / 1.25 | 600 / 1.25 / - |"
    ]


def test_the_summary_is_of_every_peer(powered):
    assert grid_tables.peer_table(powered).splitlines()[2:] == [
        "| forward | sdpa_cudnn | 1 | 1.25 | 1.25 | S512 |",
        "| forward | fa3 | 2 | 1.00 | 0.80 | S512 |",
    ]
    lines = grid_tables.summary_lines(powered)
    assert [line.partition(" geomean")[0] for line in lines] == [
        "forward: ours / sdpa_cudnn",
        "forward: fa3 / sdpa_cudnn",
        "forward: ours / fa3",
    ]


def test_report_prints_ratios_and_peers(powered, tmp_path, capsys):
    path = tmp_path / "r.json"
    path.write_text(json.dumps(powered | {"schema": report.SCHEMA}))
    assert report.main([str(path), "--ratios", "--against", "fa3", "--peers"]) == 0
    text = capsys.readouterr().out
    assert "500 / 0.80 |" in text and "| forward | fa3 | 2 | 1.00 | 0.80 | S512 |" in text


def test_a_document_without_times_names_no_turns():
    document = {
        "command": "c",
        "environment": {"device": "d", "torch": "t", "commit": "a" * 40},
        "results": [],
    }
    assert feature_tables.facts(document) == "d, torch t, commit aaaaaaaaaaaa: `c`"
    timed = document | {"protocol": {"turn_ms": 300.0}}
    assert feature_tables.facts(timed).startswith("d, turns of 300 ms, torch t")


PROGRAMS = (
    *("suites.grid", "suites.features", "suites.host_overhead", "suites.limits", "suites.masks"),
    *("core.figures", "core.performance", "core.report", "suites.rotary"),
)
ALL_HELP = """
import runpy, sys, traceback
for name in sys.argv[1:]:
    sys.argv = [name, "--help"]
    print("== benchmarks." + name, flush=True)
    try:
        runpy.run_module("benchmarks." + name, run_name="__main__")
    except SystemExit as end:
        print("status", end.code)
    except Exception:
        traceback.print_exc(file=sys.stdout)
"""


@pytest.fixture(scope="module")
def help_texts():
    """What each program prints, all in one process, which starts where nothing is on the path."""
    environment = {name: x for name, x in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-c", ALL_HELP, *PROGRAMS]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    _, *texts = done.stdout.split("== benchmarks.")
    return dict(text.split("\n", 1) for text in texts)


@pytest.mark.parametrize("program", PROGRAMS)
def test_programs_find_their_modules(program, help_texts):
    text = help_texts[program]
    assert text.startswith("usage: ") and text.endswith("status 0\n"), text
