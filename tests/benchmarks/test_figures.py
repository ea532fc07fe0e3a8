"""The programs that make what README quotes: their options exist, and how they end is told."""

from __future__ import annotations

import importlib
import json
import shlex
from pathlib import Path

import pytest

from benchmarks.core import figures
from benchmarks.core.figures import FIGURES, Figure
from tests.benchmarks.cases import needs_results

EVERY = [figure for of_name in FIGURES.values() for figure in of_name]


@pytest.mark.parametrize("figure", EVERY, ids=lambda figure: figure.file)
def test_options_are_those_of_the_programs(figure: Figure) -> None:
    suite, *options = shlex.split(figure.command)
    module = importlib.import_module(f"benchmarks.suites.{suite}")
    parse = getattr(module, "parse_arguments", None)
    if parse is None:  # it parses in main
        source = Path(module.__file__ or "").read_text()
        assert all(f'"{x}"' in source for x in (*options, "--json") if x.startswith("--"))
    else:
        parse([*options, "--json", "r.json"])


def test_files_are_of_one_figure_each() -> None:
    files = [figure.file for figure in EVERY]
    assert len(set(files)) == len(files)


@needs_results
@pytest.mark.parametrize("figure", EVERY, ids=lambda figure: figure.file)
def test_results_are_described(figure: Figure) -> None:
    described = (figures.ROOT / figures.RESULTS / "README.md").read_text()
    assert f"00_{figure.file}.json`" in described


def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    (tmp_path / "benchmarks/suites").mkdir(parents=True)
    (tmp_path / "benchmarks/suites/program.py").write_text(text)
    monkeypatch.setattr(figures, "ROOT", tmp_path)
    monkeypatch.setattr(figures, "FIGURES", {"one": (Figure("first", "program --fast"),)})


WRITES = """
import json, pathlib, sys
pathlib.Path(sys.argv[-1]).write_text(json.dumps({"command": " ".join(sys.argv[1:])}))
"""


def test_a_result_names_the_folder_of_results(tmp_path, monkeypatch, capsys) -> None:
    stand_in(tmp_path, monkeypatch, WRITES)
    out = tmp_path / "out"
    assert figures.main(["--device", "h200", "--out", str(out), "one"]) == 0
    command = json.loads((out / "h200_first.json").read_text())["command"]
    assert command == "--fast --json benchmarks/results/h200_first.json"
    assert "first: status 0" in capsys.readouterr().out


def test_a_result_names_the_variables_of_its_program(tmp_path, monkeypatch, capsys) -> None:
    stand_in(tmp_path, monkeypatch, WRITES)
    limited = Figure("first", "program", {"LIMIT": "80"})
    monkeypatch.setattr(figures, "FIGURES", {"one": (limited,)})
    assert figures.main(["--out", str(tmp_path / "out")]) == 0
    command = json.loads((tmp_path / "out/gpu_first.json").read_text())["command"]
    assert command == "LIMIT=80 --json benchmarks/results/gpu_first.json"
    assert figures.main(["--list"]) == 0
    assert "gpu_first.json: LIMIT=80 program\n" in capsys.readouterr().out


def test_what_fails_and_what_takes_too_long(tmp_path, monkeypatch, capsys) -> None:
    stand_in(tmp_path, monkeypatch, "import sys; sys.exit(3)")
    assert figures.main(["--out", str(tmp_path / "out"), "one"]) == 1
    assert "first: status 3" in capsys.readouterr().out
    late = WRITES.replace("import json", "import time, json") + "time.sleep(60)"
    (tmp_path / "benchmarks/suites/program.py").write_text(late)
    assert figures.main(["--seconds", "3", "--out", str(tmp_path / "out"), "one"]) == 1
    assert "first: interrupted or not reached" in capsys.readouterr().out
    assert (tmp_path / "out/gpu_first.json").is_file()
    assert figures.main(["--seconds", "0", "--out", str(tmp_path / "out"), "one"]) == 1


def test_the_list(capsys) -> None:
    assert figures.main(["--list", "--device", "h100"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(EVERY) and "h100_forward_sm90.json: grid" in lines[0]
    with pytest.raises(SystemExit):
        figures.main(["nothing of the kind"])
