"""What a benchmark times, and what becomes of what cannot run."""

from __future__ import annotations

import pytest
import torch

from benchmarks.core import runner, turns
from benchmarks.core.metrics import Pass
from benchmarks.core.runner import Status, make_input_sets, run_case
from benchmarks.peers.backends import BACKENDS, Unsupported
from tests.benchmarks.cases import BRIEF, SMALL, sdpa_like
from tests.cases.cpu_harness import one_thread  # noqa: F401

pytestmark = pytest.mark.usefixtures("one_thread")


def test_turns_of_two_backends_are_a_b_b_a(monkeypatch):
    taken = []
    original = turns.turn_here

    def spy(contender, turn_ms):
        taken.append(contender.subject.name)
        return original(contender, turn_ms)

    monkeypatch.setattr(turns, "turn_here", spy)
    attend = BACKENDS["sdpa_math"].prepare(SMALL)
    pair = [sdpa_like("a", attend), sdpa_like("b", attend)]
    results = run_case(SMALL, Pass.forward, pair, make_input_sets(SMALL), BRIEF)
    assert taken == ["a", "b", "b", "a"] * 2
    assert [result.timing.samples for result in results] == [4, 4]


def test_backward_is_timed_without_the_forward():
    forwards = 0
    sdpa = BACKENDS["sdpa_math"].prepare(SMALL)

    def attend(q, k, v):
        nonlocal forwards
        forwards += 1
        return sdpa(q, k, v)

    inputs = make_input_sets(SMALL)
    (result,) = run_case(SMALL, Pass.backward, [sdpa_like("a", attend)], inputs, BRIEF)
    assert result.status is Status.ok and result.timing.samples == turns.MIN_ROUNDS
    assert forwards == len(inputs)


def test_forward_is_timed_without_recording_a_graph():
    recorded = []
    sdpa = BACKENDS["sdpa_math"].prepare(SMALL)

    def attend(q, k, v):
        out = sdpa(q, k, v)
        recorded.append(out.requires_grad)
        return out

    run_case(SMALL, Pass.forward, [sdpa_like("a", attend)], make_input_sets(SMALL), BRIEF)
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
    refused, fine = run_case(SMALL, Pass.forward, pair, make_input_sets(SMALL), BRIEF)
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
        run_case(SMALL, Pass.forward, pair, make_input_sets(SMALL), BRIEF)
