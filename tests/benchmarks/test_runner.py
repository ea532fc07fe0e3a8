"""The work of a case, statistics of times, and what becomes of what cannot run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks.core import runner, turns
from benchmarks.core.lengths import log_normal_lengths
from benchmarks.core.metrics import (
    Pass,
    Timing,
    geometric_mean,
    least_traffic,
    operations,
    quantile,
)
from benchmarks.core.runner import Status, make_input_sets, run_case
from benchmarks.peers.backends import BACKENDS, Unsupported
from tests.benchmarks.cases import BRIEF, SMALL, sdpa_like
from tests.cases.attention import AttentionCase, VarlenCase

# Statistics


def test_quantiles_and_means() -> None:
    assert [quantile([4.0, 1.0, 3.0, 2.0], x) for x in (0.0, 0.5, 1.0)] == [1.0, 2.5, 4.0]
    assert (quantile([7.0], 0.25), quantile([0.0, 10.0], 0.25)) == (7.0, 2.5)
    assert geometric_mean([2.0, 8.0]) == pytest.approx(4.0)
    for function in (geometric_mean, lambda values: quantile(values, 0.5)):
        with pytest.raises(ValueError, match="values must hold at least one number"):
            function([])


def test_times_are_medians_and_ratios_of_rounds() -> None:
    timing = Timing.of([1.0, 1.0, 1.0, 1.0, 1000.0])
    assert (timing.median_ms, timing.low_ms, timing.high_ms, timing.samples) == (1.0, 1.0, 1.0, 5)
    other = Timing.of([2.0, 2.0, 1.0, 1.0])
    one_change_apart = Timing.of([2.2, 1.1, 1.1, 1.1])  # the quotient of the medians is 0.73
    assert one_change_apart.over(other) == pytest.approx(1.1)
    assert one_change_apart.divided_by(2).over(other) == pytest.approx(0.55)
    with pytest.raises(ValueError, match="zip"):
        Timing.of([1.0]).over(other)


# Work


def test_operations_of_a_square() -> None:
    """The papers' convention, and with values of another head dim."""
    case = AttentionCase(1, 64, 64, 3, 3, 192, head_dim_v=128)
    assert operations(case, Pass.forward) == 2 * 64 * 64 * 3 * (192 + 128)
    assert operations(case, Pass.backward) == 2 * 64 * 64 * 3 * (3 * 192 + 2 * 128)
    causal = operations(replace(case, causal=True), Pass.forward)
    assert causal == 2 * (64 * 65 // 2) * 3 * (192 + 128)
    assert least_traffic(case, Pass.forward) == 2 * 64 * 3 * (192 + 128) * 2 + 64 * 3 * 4
    timing = Timing.of([1.0])
    assert timing.teraflops(case, Pass.forward) == operations(case, Pass.forward) / 1e9
    traffic = least_traffic(case, Pass.backward)
    assert timing.gigabytes_per_second(case, Pass.backward) == pytest.approx(traffic / 1e6)


@pytest.mark.parametrize(
    ("case", "pairs"),
    [
        (VarlenCase((1, 7, 0), lengths_k=(3, 7, 2)), 1 * 3 + 7 * 7),
        (VarlenCase((1, 7, 0), lengths_k=(3, 7, 2), causal=True), 3 + 7 * 8 // 2),
        (VarlenCase((9,), used_q=(4,), used_k=(6,), leftpad=(2,)), 4 * 4),
        (AttentionCase(1, 64, 64, 2, 1, 8, window=(9, 0)), sum(min(i + 1, 10) for i in range(64))),
    ],
    ids=["packed", "causal", "used rows", "window"],
)
def test_operations_of_visible_pairs(case: Any, pairs: int) -> None:
    case = replace(case, num_heads_q=2, num_heads_k=1, head_dim=8)
    assert operations(case, Pass.forward) == 4 * pairs * 2 * 8
    assert operations(case, Pass.backward) == 10 * pairs * 2 * 8


@pytest.mark.parametrize(("count", "mean"), [(128, 256), (8, 4096), (1, 7)])
def test_log_normal_lengths_keep_the_mean(count: int, mean: int) -> None:
    lengths = log_normal_lengths(count, mean)
    assert (len(lengths), sum(lengths)) == (count, count * mean) and min(lengths) >= 1
    if count == 128:
        assert max(lengths) > 5 * 256 and list(lengths) != sorted(lengths)
        assert sorted(lengths)[63] == pytest.approx(256 * 2.718**-0.5, rel=0.1)  # the median
    with pytest.raises(ValueError, match="mean: must leave at least one token to each of 64"):
        log_normal_lengths(64, 1)


# What is timed


def test_turns_of_two_backends_are_a_b_b_a(monkeypatch) -> None:
    taken = []
    original = turns.turn_here

    def spy(contender: Any, turn_ms: float) -> Any:
        taken.append(contender.subject.name)
        return original(contender, turn_ms)

    monkeypatch.setattr(turns, "turn_here", spy)
    attend = BACKENDS["sdpa_math"].prepare(SMALL)
    pair = [sdpa_like("a", attend), sdpa_like("b", attend)]
    results = run_case(SMALL, Pass.forward, pair, make_input_sets(SMALL), BRIEF)
    assert taken == ["a", "b", "b", "a"] * 2
    assert [result.timing.samples for result in results] == [4, 4]


def test_passes_are_timed_alone() -> None:
    """The backward without the forward, the forward without recording a graph."""
    recorded: list[bool] = []
    sdpa = BACKENDS["sdpa_math"].prepare(SMALL)

    def attend(*tensors: torch.Tensor) -> torch.Tensor:
        out = sdpa(*tensors)
        recorded.append(out.requires_grad)
        return out

    inputs = make_input_sets(SMALL)
    (result,) = run_case(SMALL, Pass.backward, [sdpa_like("a", attend)], inputs, BRIEF)
    assert result.status is Status.ok and recorded == [True] * len(inputs)
    recorded.clear()
    run_case(SMALL, Pass.forward, [sdpa_like("a", attend)], inputs, BRIEF)
    assert recorded and not any(recorded)


# What cannot run


class Lost(RuntimeError):
    pass


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (Unsupported("no such thing"), Status.unsupported),
        (NotImplementedError("later"), Status.unsupported),
        (RuntimeError("No available kernel. Aborting execution."), Status.unsupported),
        (torch.OutOfMemoryError("too large"), Status.out_of_memory),
        (ValueError("a defect"), Status.failed),
        (Lost("CUDA error: an illegal memory access was encountered"), None),
    ],
)
def test_a_backend_that_cannot_run_is_a_row_with_a_reason(error, status, monkeypatch) -> None:
    """A lost device ends the benchmark: whatever came behind would be wrong."""

    def refuse(*_: torch.Tensor) -> torch.Tensor:
        raise error

    monkeypatch.setattr(runner, "LOST_DEVICE", (Lost,))
    pair = [sdpa_like("refuses", refuse), BACKENDS["sdpa_math"]]
    arguments = (SMALL, Pass.forward, pair, make_input_sets(SMALL), BRIEF)
    if status is None:
        with pytest.raises(Lost):
            run_case(*arguments)
        return
    refused, fine = run_case(*arguments)
    assert (refused.status, refused.reason, refused.timing) == (status, str(error), None)
    assert fine.status is Status.ok
