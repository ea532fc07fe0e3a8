"""How time is taken: in turns of 100 ms of calls, back to back, in the order A B C C B A.

Attention kernels run a GPU at its power limit, where the clock gives way. Turns as short as a few
calls would share one clock, set by what all contenders draw on average: the hungriest of them is
flattered, by up to a tenth, and the leanest is punished. A turn of 100 ms runs at the clock that
its own contender leaves, as a training run does. (benchmarks/README.md)

Before the first turn all contenders run for a second, so that the first ones too find a GPU that is
at work and not one that comes from rest. A turn starts with a lead-in that is not counted, in which
clock and power follow the change of contenders. The order cancels a drift that is linear in time.
What a turn gives is its time over its calls; a contender's figure is the median of its turns.

Calls that take less device time than the host needs to issue them cannot fill a turn: they are
timed in short stretches, each issued while the device is kept busy by a sleep, and summed. So their
figure holds no wait for the host, nor is it one at the power limit; nor would a program's be. What
is compared with such calls is timed in the same way: while the device sleeps its clock rises.
"""

from __future__ import annotations

import argparse
import gc
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any

import torch

Call = Callable[[], object]

PROTOCOL, VERSION = "long turns", 4

TURN_MS = 100.0
LEAD_IN = 0.25  # of a turn's length, and not counted
WARM_UP_MS = 1000.0  # of all contenders in turns, before the first that counts
MIN_ROUNDS, MAX_ROUNDS = 4, 100  # a turn of each in a round; even numbers
BUDGET_MS = MIN_ROUNDS * TURN_MS
JOULES_TURN_MS, JOULES_ROUNDS = 1000.0, 2  # the energy counter is coarse

# The device must take longer for a call than the host, or the host's time is measured.
HOST_MARGIN = 1.5
FIRST_CALLS = 3  # of which the first estimate is made
MAX_CALLS_PER_STRETCH = 32  # of several launches each; a stream queues 1,024
MIN_ESTIMATE_MS = 1e-4
MAX_HOST_MS = 1.0  # per call: beyond it the call waits for the device itself
SLEEP_MARGIN, MIN_SLEEP_MS = 2.0, 1.0
SLEEP_CYCLES_PER_MS = 2_000_000  # near the clock of current data-centre GPUs


@dataclass(frozen=True)
class Protocol:
    """How long is measured, and whether energy is measured too."""

    turn_ms: float = TURN_MS
    budget_ms: float = BUDGET_MS  # for each contender; at least four turns are taken
    joules: bool = False
    warm_up_ms: float = WARM_UP_MS

    def facts(self) -> dict[str, Any]:
        """What results say about how they were made."""
        return {
            "name": PROTOCOL,
            "version": VERSION,
            "order": "A B B A",
            "turn_ms": self.turn_ms,
            "lead_in_ms": self.turn_ms * LEAD_IN,
            "warm_up_ms": self.warm_up_ms,
            "joules_turn_ms": JOULES_TURN_MS if self.joules else None,
        }


def describe_protocol(facts: dict[str, Any]) -> str:
    """Of a document's protocol."""
    return f"turns of {facts['turn_ms']:g} ms"


def add_options(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--turn-ms",
        type=positive,
        default=TURN_MS,
        help="length of a turn; shorter ones share a clock (default: %(default)g)",
    )
    parser.add_argument(
        "--budget-ms",
        type=float,
        default=BUDGET_MS,
        help=f"all turns of a figure, at least {MIN_ROUNDS} (default: %(default)g)",
    )


def positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a positive number, got {text!r}")
    return value


def protocol_of(options: argparse.Namespace) -> Protocol:
    return Protocol(options.turn_ms, options.budget_ms, getattr(options, "joules", False))


# Contenders


@dataclass(frozen=True)
class Subject:
    """Something to time. `prepare` sets it up and makes one call per input set, to be used in turn;
    `scope` makes the context that its calls need.
    """

    name: str
    prepare: Callable[[], Sequence[Call]]
    scope: Callable[[], AbstractContextManager] = nullcontext


@dataclass
class Contender:
    """A subject that is set up, and what is known of the time of its calls."""

    subject: Subject
    calls: Sequence[Call]
    peak_bytes: int | None = None
    estimate_ms: float = MIN_ESTIMATE_MS  # of a call
    host_ms: float = MAX_HOST_MS  # to issue a call
    is_short: bool = False  # whether the host may take longer than the device
    rotation: Iterator[Call] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.rotation = cycle(self.calls)

    def issue(self, count: int) -> None:
        """Calls on consecutive input sets, also from one turn to the next: none of a call's data is
        left in the L2 cache.
        """
        for _ in range(count):
            next(self.rotation)()

    def calls_in(self, milliseconds: float) -> int:
        return max(1, math.ceil(milliseconds / self.estimate_ms))


def estimate(contender: Contender, turn_ms: float, on_cuda: bool) -> None:
    """How long a call takes, the device and the host. The first look is rough, and raises the clock
    of an idle device for the second.
    """
    count = FIRST_CALLS
    for _ in range(2):
        estimate_ms, contender.host_ms = (time_on_cuda if on_cuda else time_here)(contender, count)
        contender.estimate_ms = max(estimate_ms, MIN_ESTIMATE_MS)
        count = min(MAX_CALLS_PER_STRETCH, contender.calls_in(turn_ms * LEAD_IN))
    contender.is_short = contender.estimate_ms < HOST_MARGIN * contender.host_ms


def time_alike(contenders: Sequence[Contender]) -> None:
    """All are short where one is."""
    any_is_short = any(each.is_short for each in contenders)
    for each in contenders:
        each.is_short = any_is_short


def time_here(contender: Contender, count: int) -> tuple[float, float]:
    """Milliseconds of a call, none of which a device takes."""
    begin = time.perf_counter()
    contender.issue(count)
    return (time.perf_counter() - begin) * 1e3 / count, 0.0


def time_on_cuda(contender: Contender, count: int) -> tuple[float, float]:
    """Milliseconds of a call, the device's and the host's."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    first, last = issue_stretch(contender, count, sleeps=True)
    host_ms = (time.perf_counter() - begin) * 1e3 / count
    torch.cuda.synchronize()
    return first.elapsed_time(last) / count, min(MAX_HOST_MS, host_ms)


# Turns


@dataclass(frozen=True)
class Turn:
    """What was counted, between two readings of the host's clock."""

    milliseconds: float  # per call
    begin: float  # seconds of time.perf_counter
    end: float
    is_continuous: bool = True  # calls back to back: power is that of the calls


def even(count: int) -> int:
    """The least even number of at least `count`."""
    return -(-count // 2) * 2


def order_of_turns(contenders: int, rounds: int) -> Iterator[int]:
    """A B C, C B A, ...: each once a round."""
    for index in range(rounds):
        forth = range(contenders)
        yield from reversed(forth) if index % 2 else forth


def rounds_for(contenders: Sequence[Contender], protocol: Protocol) -> int:
    """As many as fill the budget, an even number."""
    round_ms = sum(max(protocol.turn_ms, each.estimate_ms) for each in contenders)
    wanted = math.ceil(protocol.budget_ms * len(contenders) / round_ms) if contenders else 0
    return even(min(MAX_ROUNDS, max(MIN_ROUNDS, wanted)))


def warm_up(contenders: Sequence[Contender], protocol: Protocol, on_cuda: bool) -> None:
    """Has all contenders run, uncounted, so that no turn is of a GPU that comes from rest."""
    round_ms = sum(max(protocol.turn_ms, each.estimate_ms) for each in contenders)
    rounds = math.ceil(protocol.warm_up_ms / round_ms) if contenders else 0
    take_turns(contenders, rounds, protocol.turn_ms, on_cuda)


def take_turns(
    contenders: Sequence[Contender], rounds: int, turn_ms: float, on_cuda: bool
) -> list[list[Turn]]:
    """One list per contender, a turn of each round."""
    turns: list[list[Turn]] = [[] for _ in contenders]
    gc.collect()
    gc.disable()  # a collection inside a turn would be taken for the subject's own time
    try:
        for index in order_of_turns(len(contenders), rounds):
            contender = contenders[index]
            with contender.subject.scope():
                turn = (turn_on_cuda if on_cuda else turn_here)(contender, turn_ms)
            turns[index].append(turn)
            # The next one's length follows the clock that this one had.
            contender.estimate_ms = max(turn.milliseconds, MIN_ESTIMATE_MS)
    finally:
        gc.enable()
    return turns


def turn_here(contender: Contender, turn_ms: float) -> Turn:
    contender.issue(contender.calls_in(turn_ms * LEAD_IN))
    count = contender.calls_in(turn_ms)
    begin = time.perf_counter()
    contender.issue(count)
    end = time.perf_counter()
    return Turn((end - begin) * 1e3 / count, begin, end)


def turn_on_cuda(contender: Contender, turn_ms: float) -> Turn:
    """During the lead-in the host gets ahead of the device, until the launch queue is full."""
    a_call_ms = max(contender.estimate_ms, contender.host_ms)
    contender.issue(max(1, math.ceil(turn_ms * LEAD_IN / a_call_ms)))
    if contender.is_short:
        count, stretches = plan_stretches(contender, turn_ms)
        events = [issue_stretch(contender, count, sleeps=True) for _ in range(stretches)]
    else:
        count = contender.calls_in(turn_ms)
        events = [issue_stretch(contender, count, sleeps=False)]
    torch.cuda.synchronize()
    end = time.perf_counter()
    counted_ms = sum(first.elapsed_time(last) for first, last in events)
    whole_ms = events[0][0].elapsed_time(events[-1][1])
    return Turn(
        counted_ms / (count * len(events)),
        begin=end - whole_ms * 1e-3,
        end=end,
        is_continuous=not contender.is_short,
    )


def plan_stretches(contender: Contender, turn_ms: float) -> tuple[int, int]:
    """Calls of a stretch, and how many with their sleeps fill a turn."""
    count = min(MAX_CALLS_PER_STRETCH, contender.calls_in(turn_ms))
    stretch_ms = sleep_before(contender, count) + count * contender.estimate_ms
    return count, max(1, math.ceil(turn_ms / stretch_ms))


def sleep_before(contender: Contender, count: int) -> float:
    """Milliseconds in which the host surely issues as many calls."""
    return max(MIN_SLEEP_MS, SLEEP_MARGIN * count * contender.host_ms)


def issue_stretch(
    contender: Contender, count: int, *, sleeps: bool
) -> tuple[torch.cuda.Event, torch.cuda.Event]:
    """Calls between two events; with `sleeps` they are all issued before the first one starts."""
    if sleeps:
        torch.cuda._sleep(int(sleep_before(contender, count) * SLEEP_CYCLES_PER_MS))
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    contender.issue(count)
    last.record()
    return first, last
