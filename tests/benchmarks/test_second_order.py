"""What second_order.py measures and prints, on the CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks.suites import second_order
from tests.benchmarks.cases import BRIEF_OPTIONS
from tests.cases.cpu_harness import one_thread  # noqa: F401

pytestmark = pytest.mark.usefixtures("one_thread")

SHAPE = ["--head-dims", "8", "--seqlens", "32", "--tokens", "64", "--width", "16"]
TINY = ["--device", "cpu", *SHAPE, *BRIEF_OPTIONS]


def test_rows_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "second_order.json"
    without = ["--without", second_order.TRITON]
    assert second_order.main([*TINY, *without, "--json", str(path)]) == 0
    rows = json.loads(path.read_text())["results"]
    wanted = [("jvp", "ours"), ("jvp", "math"), ("hvp", "ours"), ("hvp", "attention_hvp")]
    assert [(row["pass"], row["what"]) for row in rows] == [*wanted, ("hvp", "math")] * 2
    for row in rows:
        assert row["status"] == "ok", row["reason"]
        pairs = 32 * 33 / 2 if row["causal"] else 32**2
        products = second_order.PRODUCTS.get((row["pass"], row["what"]))
        if products is None:
            assert row["tflops"] is None
        else:
            flops = products * 2 * 8 * 2 * 2 * pairs
            assert row["tflops"] == pytest.approx(flops / row["milliseconds"] / 1e9)
    assert "attention_hvp" in capsys.readouterr().out


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("which", ["jvp", "hvp"])
def test_what_is_compared_computes_the_same(which: str, causal: bool) -> None:
    group = second_order.Group(32, 8, causal, "cpu", tokens=64, width=16, dtype=torch.float64)
    inputs = group.input_sets()
    made = []
    for what in second_order.ENTRANTS[which]:
        if what != second_order.TRITON:
            (call,) = second_order.calls_of(group, which, what, inputs)
            found = call()
            made.append([found] if torch.is_tensor(found) else list(found)[:3])
    for others in made[1:]:
        for x, y in zip(made[0], others, strict=True):
            y = y if x.shape == y.shape else y.transpose(1, 2)
            torch.testing.assert_close(x, y)


def test_a_peer_that_is_missing_is_a_row_with_a_reason() -> None:
    group = second_order.Group(32, 8, False, "cpu", tokens=64, width=16)
    with pytest.raises(second_order.Unsupported, match="jvp_flash_attention is not installed"):
        second_order.calls_of(group, "jvp", second_order.TRITON, group.input_sets())
