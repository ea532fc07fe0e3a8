"""How time is taken: in what order, how long a turn is, and what of it is counted."""

from __future__ import annotations

import argparse
import gc
from collections import Counter
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch

from benchmarks.core import turns
from benchmarks.core.metrics import Timing
from benchmarks.core.turns import Contender, Protocol, Subject


def contender_of(calls: Any, **fields: Any) -> Contender:
    return Contender(Subject("a", lambda: calls), calls, **fields)


class Clock:
    """A host's clock that calls move on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seconds = 0.0
        monkeypatch.setattr(turns.time, "perf_counter", lambda: self.seconds)

    def call_of(self, milliseconds: float) -> Any:
        def call() -> None:
            self.seconds += milliseconds * 1e-3

        return call


@pytest.fixture
def clock(monkeypatch) -> Clock:
    return Clock(monkeypatch)


# Order


@pytest.mark.parametrize("contenders", [1, 2, 4, 7])
def test_turns_go_forth_and_back(contenders: int) -> None:
    """So that a linear drift meets all contenders alike."""
    order = list(turns.order_of_turns(contenders, 4))
    forth = list(range(contenders))
    assert order == [*forth, *reversed(forth)] * 2
    places = [[place for place, who in enumerate(order) if who == c] for c in forth]
    assert len({sum(of_one) for of_one in places}) == 1


@pytest.mark.parametrize(
    ("contenders", "estimate_ms", "turn_ms", "budget_ms", "rounds"),
    [
        (4, 1.0, 100.0, 0.0, turns.MIN_ROUNDS),
        (1, 1.0, 100.0, 450.0, 6),  # an even number
        (3, 1.0, 100.0, 800.0, 8),
        (2, 200.0, 100.0, 1600.0, 8),  # a call is longer than a turn
        (1, 1e-3, 0.1, 1e3, turns.MAX_ROUNDS),
        (0, 1.0, 100.0, 400.0, turns.MIN_ROUNDS),
    ],
)
def test_how_many_rounds_there_are(contenders, estimate_ms, turn_ms, budget_ms, rounds) -> None:
    those = [contender_of([lambda: None], estimate_ms=estimate_ms) for _ in range(contenders)]
    assert turns.rounds_for(those, Protocol(turn_ms, budget_ms)) == rounds


def test_all_contenders_run_for_a_second_before(clock: Clock) -> None:
    calls: Counter[str] = Counter()

    def counted(name: str) -> Any:
        run = clock.call_of(1.0)
        return lambda: (calls.update([name]), run())

    those = [contender_of([counted(name)], estimate_ms=1.0) for name in "ab"]
    turns.warm_up(those, Protocol(turn_ms=100.0), on_cuda=False)
    assert clock.seconds >= 1.0 and min(calls["a"], calls["b"]) >= 500
    turns.warm_up([], Protocol(), on_cuda=False)


def test_the_figure_is_the_median_and_ratios_are_of_rounds(clock: Clock) -> None:
    """A clock that falls from round to round moves no ratio."""
    factors, pace = iter([1.0, 1.0, 1.1, 1.1, 1.2, 1.2, 9.0, 9.0]), [1.0]

    @contextmanager
    def slower() -> Any:
        pace[0] = next(factors)
        yield

    def contender(milliseconds: float) -> Contender:
        call = lambda: clock.call_of(milliseconds * pace[0])()  # noqa: E731
        return Contender(Subject("a", lambda: [call], slower), [call], estimate_ms=1.0)

    taken = turns.take_turns([contender(1.0), contender(2.0)], 4, 10.0, on_cuda=False)
    begins = [[turn.begin for turn in of_one] for of_one in taken]
    assert begins[0][0] < begins[1][0] < begins[1][1] < begins[0][1] < begins[0][2]
    one, other = (Timing.of([turn.milliseconds for turn in of_one]) for of_one in taken)
    assert one.median_ms == pytest.approx(1.15) and other.median_ms == pytest.approx(2.3)
    assert other.over(one) == pytest.approx(2.0)


# A turn


def test_a_turn_has_a_lead_in_that_is_not_counted(clock: Clock) -> None:
    durations: list[float] = []

    def call() -> None:
        durations.append(3.0 if len(durations) < 5 else 1.0)  # of a low clock, at first
        clock.seconds += durations[-1] * 1e-3

    turn = turns.turn_here(contender_of([call], estimate_ms=1.0), turn_ms=20.0)
    assert len(durations) == 5 + 20
    assert turn.milliseconds == pytest.approx(1.0)
    assert (turn.begin, turn.end) == (pytest.approx(15e-3), pytest.approx(35e-3))


def test_the_next_turn_follows_the_clock_of_the_last(clock: Clock) -> None:
    """An estimate at an idle device's clock would leave turns too long or too short."""
    (taken,) = turns.take_turns(
        [contender_of([clock.call_of(2.0)], estimate_ms=1.0)], 3, 100.0, on_cuda=False
    )
    lengths = [turn.end - turn.begin for turn in taken]
    assert lengths == [pytest.approx(0.2), pytest.approx(0.1), pytest.approx(0.1)]
    long = turns.turn_here(contender_of([clock.call_of(300.0)], estimate_ms=300.0), turn_ms=100.0)
    assert long.milliseconds == pytest.approx(300.0)  # a call at least


def test_calls_take_turns_with_their_inputs() -> None:
    """Also from one turn to the next, so that none finds its data in the cache."""
    taken: list[int] = []
    contender = contender_of([partial(taken.append, index) for index in range(3)])
    for _ in range(3):
        contender.issue(4)
    assert taken == [0, 1, 2] * 4


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_is_collected_during_a_turn(fails: bool) -> None:
    collecting = []

    def call() -> None:
        collecting.append(gc.isenabled())
        if fails:
            raise RuntimeError

    with pytest.raises(RuntimeError) if fails else nullcontext():
        turns.take_turns([contender_of([call], estimate_ms=1.0)], 2, 1.0, on_cuda=False)
    assert collecting and not any(collecting) and gc.isenabled()


def test_calls_are_estimated_before_their_first_turn(clock: Clock) -> None:
    durations = iter([9.0] * turns.FIRST_CALLS + [0.5] * 1000)
    contender = contender_of([lambda: clock.call_of(next(durations))()])
    turns.estimate(contender, turn_ms=100.0, on_cuda=False)
    assert contender.estimate_ms == pytest.approx(0.5) and not contender.is_short
    nothing = contender_of([lambda: None])
    turns.estimate(nothing, turn_ms=100.0, on_cuda=False)
    assert nothing.estimate_ms == turns.MIN_ESTIMATE_MS


# On a GPU


class Device:
    """Stands for a CUDA stream: what is issued waits for what was issued before."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
        self.clock, self.free_at = clock, 0.0
        self.order: list[str] = []
        device = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self) -> None:
                device.order.append("event")
                self.at = max(device.free_at, clock.seconds)

            def elapsed_time(self, end: Any) -> float:
                return (end.at - self.at) * 1e3

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "_sleep", self._sleep)
        monkeypatch.setattr(torch.cuda, "synchronize", self.synchronize)

    def _sleep(self, cycles: int) -> None:
        self.order.append("sleep")
        self._run(cycles / turns.SLEEP_CYCLES_PER_MS)

    def synchronize(self) -> None:
        self.clock.seconds = max(self.clock.seconds, self.free_at)

    def _run(self, milliseconds: float) -> None:
        self.free_at = max(self.free_at, self.clock.seconds) + milliseconds * 1e-3

    def call_of(self, device_ms: float, host_ms: float) -> Any:
        def call() -> None:
            self.order.append("call")
            self.clock.seconds += host_ms * 1e-3
            self._run(device_ms)

        return call

    def contender(self, device_ms: float, host_ms: float) -> Contender:
        """Estimated."""
        contender = contender_of([self.call_of(device_ms, host_ms)])
        turns.estimate(contender, turn_ms=100.0, on_cuda=True)
        self.order.clear()
        return contender


@pytest.fixture
def device(monkeypatch, clock: Clock) -> Device:
    return Device(monkeypatch, clock)


def test_long_calls_are_one_stretch_back_to_back(device: Device) -> None:
    contender = device.contender(1.0, 0.01)
    assert contender.estimate_ms == pytest.approx(1.0) and not contender.is_short
    turn = turns.turn_on_cuda(contender, turn_ms=100.0)
    counts = Counter(device.order)
    assert (counts["sleep"], counts["event"]) == (0, 2)
    assert device.order.index("event") in (25, 26)  # calls of the lead-in
    assert turn.milliseconds == pytest.approx(1.0) and turn.is_continuous
    assert turn.end - turn.begin == pytest.approx(0.1, rel=0.02)


def test_what_is_compared_with_short_calls_is_timed_as_they_are(device: Device) -> None:
    """Short are calls that the host may not keep up with."""
    those = [device.contender(ms, 0.009) for ms in (0.014, 0.011)]
    assert [each.is_short for each in those] == [False, True]
    turns.time_alike(those[:1])
    assert not those[0].is_short
    turns.time_alike(those)
    taken = turns.take_turns(those, 4, 10.0, on_cuda=True)
    assert [[x.is_continuous for x in each] for each in taken] == [[False] * 4] * 2
    assert [each[0].milliseconds for each in taken] == [pytest.approx(x) for x in (0.014, 0.011)]


def test_short_calls_are_issued_while_the_device_sleeps(device: Device) -> None:
    """Few at a time: a launch queue that is full would stop the host before the last."""
    turn = turns.turn_on_cuda(device.contender(0.01, 0.05), turn_ms=100.0)
    assert turn.milliseconds == pytest.approx(0.01) and not turn.is_continuous
    lead_in = device.order.index("sleep")
    assert lead_in * 0.05 == pytest.approx(25.0, rel=0.1)  # the host's milliseconds
    behind_lead_in = device.order[lead_in:]
    stretch = ["sleep", "event", *["call"] * turns.MAX_CALLS_PER_STRETCH, "event"]
    count = len(behind_lead_in) // len(stretch)
    assert count > 1 and behind_lead_in == stretch * count
    assert turn.end - turn.begin == pytest.approx(0.1, rel=0.1)


@pytest.mark.parametrize(("host_ms", "sleep_ms"), [(0.001, 1.0), (0.4, 8.0), (3.0, 20.0)])
def test_the_device_sleeps_while_the_host_issues_calls(device: Device, host_ms, sleep_ms) -> None:
    """Twice the host's time, within bounds: a call may wait for the device itself."""
    contender = device.contender(0.0005, host_ms)
    assert contender.is_short and contender.host_ms <= turns.MAX_HOST_MS
    assert turns.sleep_before(contender, 10) == pytest.approx(sleep_ms)


def test_the_protocol_is_an_option() -> None:
    parser = argparse.ArgumentParser()
    turns.add_options(parser)
    default = turns.protocol_of(parser.parse_args([]))
    assert default == Protocol(turn_ms=100.0, budget_ms=400.0, joules=False)
    facts = turns.protocol_of(parser.parse_args(["--turn-ms", "250"])).facts()
    assert (facts["turn_ms"], facts["lead_in_ms"], facts["order"]) == (250.0, 62.5, "A B B A")
    assert turns.describe_protocol(facts) == "turns of 250 ms"
