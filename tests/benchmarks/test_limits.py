"""What limit_speed.py measures and prints, on the CPU."""

from __future__ import annotations

import json

import pytest

from benchmarks.core import report
from benchmarks.suites import limits as limit_speed
from tests.benchmarks.cases import BRIEF_OPTIONS
from tests.cases.cpu_harness import one_thread  # noqa: F401

pytestmark = pytest.mark.usefixtures("one_thread")

TINY = ["--device", "cpu", "--tokens", "16", "--hidden", "256", "--size", "32", *BRIEF_OPTIONS]


def test_each_problem_has_a_share_of_the_product(tmp_path, capsys):
    path = tmp_path / "limits.json"
    assert limit_speed.main([*TINY, "--quick", "--json", str(path)]) == 0
    document = json.loads(path.read_text())
    assert document["command"].startswith("python -m benchmarks.suites.limits --device cpu")
    ours, products = document["results"][::2], document["results"][1::2]
    assert [(row["pass"], row["head_dim"]) for row in ours] == [
        ("forward", 128),
        ("forward", 256),
        ("backward", 128),
    ]
    for attention, product in zip(ours, products, strict=True):
        assert product["what"] == "matmul" and product["targets"] == []
        assert product["tflops"] == pytest.approx(2 * 32**3 / product["median_ms"] / 1e9)
        share = attention["tflops"] / product["tflops"]
        assert attention["over_matmul"] == pytest.approx(share)
        (target,) = attention["targets"]
        assert target["met"] == (share >= target["limit"])
    assert "/ matmul" in capsys.readouterr().out
    assert report.main([str(path), "--markdown"]) == 0
    assert "| matmul |" in capsys.readouterr().out


def test_problems_are_the_long_ones_of_the_grid():
    options = limit_speed.parse_arguments(["--device", "cpu"])
    shapes = [
        (which.value, case.batch, case.seqlen_q, case.num_heads_q, case.head_dim, target.limit)
        for case, which, target in limit_speed.problems(options)
    ]
    assert shapes == [
        ("forward", 4, 4096, 16, 128, 0.95),
        ("forward", 2, 8192, 16, 128, 0.95),
        ("forward", 1, 16_384, 16, 128, 0.95),
        ("forward", 4, 4096, 8, 256, 0.95),
        ("forward", 2, 8192, 8, 256, 0.95),
        ("forward", 1, 16_384, 8, 256, 0.95),
        ("backward", 2, 8192, 16, 128, 0.82),
        ("backward", 1, 16_384, 16, 128, 0.82),
    ]
