"""What rotary.py measures and prints, on the CPU."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks.core import report
from benchmarks.suites import rotary as rotary_speed
from tests.benchmarks.cases import BRIEF_OPTIONS
from tests.cases.cpu_harness import one_thread  # noqa: F401

pytestmark = pytest.mark.usefixtures("one_thread")

TINY = ["--device", "cpu", "--head-dims", "8", "--tokens", "16", *BRIEF_OPTIONS]


@pytest.fixture
def no_compiler(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)


def test_rows_of_a_run(no_compiler, tmp_path, capsys):
    path = tmp_path / "rotary.json"
    assert rotary_speed.main([*TINY, "--quick", "--json", str(path)]) == 0
    document = json.loads(path.read_text())
    assert document["command"].startswith("python -m benchmarks.suites.rotary --device cpu")
    rows = document["results"]
    whats = ["ours", "torch operators", "torch.compile", "copy"]
    assert [row["what"] for row in rows] == whats * 3
    assert [row["pass"] for row in rows[::4]] == ["forward", "in place", "backward"]
    x_bytes = 16 * 32 * 8 * 2
    for row in rows:
        is_copy = row["what"] == "copy"
        assert row["status"] == "ok", row["reason"]
        assert row["bytes"] == 2 * x_bytes + (0 if is_copy else 16 * 8 * 2)
        speed = row["bytes"] / row["microseconds"] / 1e3
        assert row["gigabytes_per_second"] == pytest.approx(speed)
        assert (row["over_copy"] is None) == is_copy
        assert len(row["targets"]) == (row["what"] == "ours")
    assert "torch operators" in capsys.readouterr().out
    report.main([str(path), "--markdown"])
    assert "| S16 H32 d8 | backward | copy |" in capsys.readouterr().out


def test_what_is_compared_computes_the_same(no_compiler):
    for interleaved in (False, True):
        group = rotary_speed.RotaryGroup(16, 8, interleaved, "cpu")
        (x,) = group.input_sets()
        for which in rotary_speed.PASSES:
            inplace = which == "in place"
            results = []
            for rotate in rotary_speed.rotations(group, inplace).values():
                inputs = [x.clone()]
                (call,) = rotary_speed.calls_of(rotate, which, inputs, False)
                made = call()
                results.append(made[0] if which == "backward" else made)
                assert torch.equal(inputs[0], results[-1]) == inplace
            assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


def test_groups():
    options = rotary_speed.parse_arguments(["--device", "cpu"])
    assert len(rotary_speed.groups(options)) == 12
    options = rotary_speed.parse_arguments(["--device", "cpu", "--quick"])
    assert [group.head_dim for group in rotary_speed.groups(options)] == [64, 128, 256]
