"""A discrete-event simulation of ranks with two CUDA streams each, one for kernels and one for
transfers, as torch.distributed uses them with NCCL.

A rank has a program: what its host asks for, in order. Work runs on the stream of kernels. A
transfer that is started waits for all work asked for before it, for the transfers before it and
until its peers have come to theirs; work behind a Wait waits for the transfer that it names. The
host is ahead of the device.
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple


class Work(NamedTuple):
    seconds: float
    is_attention: bool


class Start(NamedTuple):
    """seconds: once all peers have come to it, what this rank sends and gets takes so long. A rank
    is a peer of its peers.
    """

    number: int
    seconds: float
    peers: frozenset[int] = frozenset()


class Wait(NamedTuple):
    number: int


Program = Sequence[Work | Start | Wait]


@dataclass
class Times:
    """Of one rank, in seconds; exposed: its kernels wait for transfers."""

    end: float = 0.0
    attention: float = 0.0
    other_work: float = 0.0
    exposed: float = 0.0


@dataclass
class _Rank:
    program: Program
    times: Times = field(default_factory=Times)
    next: int = 0
    began_waiting: float = 0.0
    work: Work | None = None
    left: float = 0.0  # of the work, in seconds at full speed
    since: float = 0.0  # when `left` was true
    version: int = 0  # of the work's end; older events of it are void
    queue: deque[Start] = field(default_factory=deque)
    entered: Start | None = None
    arrived: set[int] = field(default_factory=set)


class _Simulation:
    def __init__(self, programs: Sequence[Program], slowdown: float) -> None:
        self.ranks = [_Rank(program) for program in programs]
        self.slowdown = slowdown
        self.events: list[tuple[float, int, int, int | None]] = []  # None: a transfer's end
        self.order = count()
        self.now = 0.0
        self.present: defaultdict[int, set[int]] = defaultdict(set)  # by number of the transfer
        self.absent: dict[tuple[int, int], int] = {}  # peers that a rank in a transfer waits for

    def run(self) -> list[Times]:
        for index in range(len(self.ranks)):
            self.advance(index)
        while self.events:
            self.now, _, index, version = heapq.heappop(self.events)
            rank = self.ranks[index]
            if version is None:
                self.finish_transfer(index)
            elif version == rank.version and rank.work is not None:
                rank.work, rank.began_waiting = None, self.now
                self.advance(index)
        for index, rank in enumerate(self.ranks):
            if rank.next < len(rank.program) or rank.entered or rank.queue:
                raise ValueError(f"programs: rank {index} waits for what nobody sends")
        return [rank.times for rank in self.ranks]

    def advance(self, index: int) -> None:
        """The stream of kernels from where it stands to the next that takes time."""
        rank = self.ranks[index]
        while rank.next < len(rank.program):
            step = rank.program[rank.next]
            if isinstance(step, Work):
                rank.next += 1
                rank.work, rank.left, rank.since = step, step.seconds, self.now
                self.post_work(index)
                return
            if isinstance(step, Wait):
                if step.number not in rank.arrived:
                    return
                rank.times.exposed += self.now - rank.began_waiting
            else:
                rank.queue.append(step)
                self.enter(index)
            rank.next += 1
            rank.began_waiting = self.now
        rank.times.end = max(rank.times.end, self.now)

    def post_work(self, index: int) -> None:
        rank = self.ranks[index]
        rank.version += 1
        speed = 1.0 - self.slowdown if rank.entered else 1.0
        self.post(self.now + rank.left / speed, index, rank.version)

    def post(self, time: float, index: int, version: int | None) -> None:
        heapq.heappush(self.events, (time, next(self.order), index, version))

    def account(self, index: int) -> None:
        """The work up to now, before its speed changes."""
        rank = self.ranks[index]
        if rank.work is not None:
            speed = 1.0 - self.slowdown if rank.entered else 1.0
            rank.left = max(0.0, rank.left - (self.now - rank.since) * speed)
            rank.since = self.now

    def enter(self, index: int) -> None:
        rank = self.ranks[index]
        if rank.entered is not None or not rank.queue:
            return
        self.account(index)
        rank.entered = transfer = rank.queue.popleft()
        if rank.work is not None:
            self.post_work(index)
        present = self.present[transfer.number]
        present.add(index)
        self.absent[transfer.number, index] = len(transfer.peers - present)
        if self.absent[transfer.number, index] == 0:
            self.post(self.now + transfer.seconds, index, None)
        for peer in transfer.peers & present:
            self.absent[transfer.number, peer] -= 1
            if self.absent[transfer.number, peer] == 0:
                entered = self.ranks[peer].entered
                assert entered is not None and entered.number == transfer.number
                self.post(self.now + entered.seconds, peer, None)

    def finish_transfer(self, index: int) -> None:
        rank = self.ranks[index]
        assert rank.entered is not None
        self.account(index)
        rank.arrived.add(rank.entered.number)
        rank.entered = None
        rank.times.end = self.now
        if rank.work is not None:
            self.post_work(index)
        self.enter(index)
        if rank.work is None:
            self.advance(index)


def simulate(programs: Sequence[Program], *, slowdown: float = 0.0) -> list[Times]:
    """slowdown: the share of their speed that kernels lose while a transfer of their rank runs."""
    if not 0.0 <= slowdown < 1.0:
        raise ValueError(f"slowdown: must be at least 0 and below 1, got {slowdown}")
    times = _Simulation(programs, slowdown).run()
    for found, program in zip(times, programs, strict=True):
        for step in program:
            if isinstance(step, Work) and step.is_attention:
                found.attention += step.seconds
            elif isinstance(step, Work):
                found.other_work += step.seconds
    return times
