"""How a benchmark measures: whose turn it is, with which inputs, what is timed and for how long."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest
import torch
from cpu_harness import one_thread  # noqa: F401

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

import runner
from backends import BACKENDS, Unsupported
from benchmark_cases import SMALL, sdpa_like
from metrics import Pass
from runner import Status, interleave, make_input_sets, rounds_of_a_cycle, run_case

pytestmark = pytest.mark.usefixtures("one_thread")


def test_backends_take_turns_and_share_every_place():
    order = list(interleave(3, 6))
    rounds = [[turn for index, turn in order if index == r] for r in range(6)]
    assert all(sorted(turns) == [0, 1, 2] for turns in rounds)
    for place in range(3):
        assert Counter(turns[place] for turns in rounds) == {0: 2, 1: 2, 2: 2}


@pytest.mark.parametrize("contenders", range(1, 8))
def test_each_backend_comes_behind_each_other_one(contenders: int) -> None:
    rounds = rounds_of_a_cycle(contenders)
    turns = [turn for _, turn in interleave(contenders, rounds)]
    places = range(len(turns) - 1)
    behind = Counter((turns[i], turns[i + 1]) for i in places if (i + 1) % contenders != 0)
    assert len(behind) == contenders * (contenders - 1)
    assert len(set(behind.values())) <= 1


def test_samples_of_two_backends_alternate(monkeypatch):
    monkeypatch.setattr(runner, "MAX_ROUNDS", 4)
    taken = []
    original = runner.take_sample

    def spy(contender, start, on_cuda):
        taken.append(contender.subject.name)
        return original(contender, start, on_cuda)

    monkeypatch.setattr(runner, "take_sample", spy)
    attend = BACKENDS["sdpa_math"].prepare(SMALL)
    pair = [sdpa_like("a", attend), sdpa_like("b", attend)]
    results = run_case(SMALL, Pass.forward, pair, make_input_sets(SMALL), budget_ms=1e6)
    assert taken == ["a", "b"] + ["a", "b", "b", "a"] * 2  # one estimate each, then the rounds
    assert [result.timing.samples for result in results] == [4, 4]


def test_backward_is_timed_without_the_forward():
    forwards = 0
    sdpa = BACKENDS["sdpa_math"].prepare(SMALL)

    def attend(q, k, v):
        nonlocal forwards
        forwards += 1
        return sdpa(q, k, v)

    inputs = make_input_sets(SMALL)
    (result,) = run_case(SMALL, Pass.backward, [sdpa_like("a", attend)], inputs, budget_ms=1.0)
    assert result.status is Status.ok and result.timing.samples >= runner.MIN_ROUNDS
    assert forwards == len(inputs)


def test_forward_is_timed_without_recording_a_graph():
    recorded = []
    sdpa = BACKENDS["sdpa_math"].prepare(SMALL)

    def attend(q, k, v):
        out = sdpa(q, k, v)
        recorded.append(out.requires_grad)
        return out

    run_case(SMALL, Pass.forward, [sdpa_like("a", attend)], make_input_sets(SMALL), budget_ms=1.0)
    assert recorded and not any(recorded)


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (Unsupported("no such thing"), Status.unsupported),
        (NotImplementedError("later"), Status.unsupported),
        (RuntimeError("No available kernel. Aborting execution."), Status.unsupported),
        (torch.OutOfMemoryError("too large"), Status.out_of_memory),
        (ValueError("a defect"), Status.failed),
    ],
)
def test_a_backend_that_cannot_run_is_a_row_with_a_reason(error, status):
    def refuse(q, k, v):
        raise error

    pair = [sdpa_like("refuses", refuse), BACKENDS["sdpa_math"]]
    refused, fine = run_case(SMALL, Pass.forward, pair, make_input_sets(SMALL), budget_ms=1.0)
    assert (refused.status, refused.timing) == (status, None)
    assert refused.reason == str(error)
    assert fine.status is Status.ok


def test_a_lost_device_ends_the_benchmark(monkeypatch):
    """Whatever came behind would be wrong."""

    class Lost(RuntimeError):
        pass

    def lose(q, k, v):
        raise Lost("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(runner, "LOST_DEVICE", (Lost,))
    pair = [sdpa_like("loses", lose), BACKENDS["sdpa_math"]]
    with pytest.raises(Lost):
        run_case(SMALL, Pass.forward, pair, make_input_sets(SMALL), budget_ms=1.0)


def contender_of(calls, **fields) -> runner.Contender:
    return runner.Contender(runner.Subject("a", lambda: calls), calls, **fields)


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_is_collected_during_a_sample(fails):
    collecting = []

    def call():
        collecting.append(gc.isenabled())
        if fails:
            raise RuntimeError

    contender = contender_of([call], estimate_ms=1.0)
    with pytest.raises(RuntimeError) if fails else nullcontext():
        runner.collect_samples([contender], on_cuda=False, budget_ms=1.0)
    assert collecting and not any(collecting)
    assert gc.isenabled()


@pytest.mark.parametrize(
    ("contenders", "estimate_ms", "budget_ms", "rounds"),
    [
        (1, 1.0, 8.0, 8),
        (2, 1.0, 8.0, 8),
        (3, 1.0, 8.0, 12),  # whole cycles of six
        (1, 1.0, 0.0, runner.MIN_ROUNDS + 1),
        (1, 1e-3, 1e3, runner.MAX_ROUNDS),
    ],
)
def test_how_many_rounds_there_are(contenders, estimate_ms, budget_ms, rounds):
    those = [contender_of([lambda: None], estimate_ms=estimate_ms) for _ in range(contenders)]
    samples = runner.collect_samples(those, on_cuda=False, budget_ms=budget_ms)
    assert [len(of_one) for of_one in samples] == [rounds] * contenders
    assert runner.collect_samples([], on_cuda=False, budget_ms=1.0) == []


def test_calls_take_turns_with_their_inputs():
    """Also from one sample to the next, so that none finds its data in the cache."""
    taken = []
    calls = [partial(taken.append, index) for index in range(3)]
    contender = contender_of(calls, calls_per_sample=2, estimate_ms=1.0)
    runner.collect_samples([contender], on_cuda=False, budget_ms=12.0)
    assert taken == [0, 1, 2] * (len(taken) // 3) and len(taken) == 12


@pytest.mark.parametrize(
    ("milliseconds", "calls"), [(0.0, 20), (0.1, 5), (0.3, 2), (0.5, 1), (30.0, 1)]
)
def test_a_sample_is_long_enough_for_the_clock(monkeypatch, milliseconds, calls):
    sample = runner.Sample(1, 0.0, milliseconds * 1e-3)
    monkeypatch.setattr(runner, "take_sample", lambda *_, **__: sample)
    contender = contender_of([lambda: None])
    runner.estimate(contender, on_cuda=False)
    assert contender.calls_per_sample == calls and contender.estimate_ms > 0.0
    assert contender.host_ms == runner.MIN_HOST_MS


@pytest.mark.parametrize(("estimate_ms", "sleeps"), [(0.19, True), (0.21, False)])
def test_the_device_is_kept_busy_before_short_calls(monkeypatch, estimate_ms, sleeps):
    """Before the first event, so that the host's time is no part of the sample."""
    order = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            order.append("event")

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: order.append(cycles))
    call = partial(order.append, "call")
    contender = contender_of([call], calls_per_sample=2, estimate_ms=estimate_ms, host_ms=0.1)
    runner.take_sample(contender, start=0, on_cuda=True)
    wait = [int(2 * 0.1 * runner.SLEEP_CYCLES_PER_MS)] if sleeps else []
    assert order == [*wait, "event", "call", "call", "event"]
