"""What a rank does under a plan: hops of keys and the calls over them, their lengths and orders on
the device. steps.py has the arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import steps
from .plan import Band, Plan
from .steps import Exchange, PackedCall, Part


@dataclass(frozen=True)
class Sight:
    """What of a call's options a schedule depends on."""

    band: Band
    has_dropout: bool = False
    has_alibi: bool = False

    @property
    def keeps_places(self) -> bool:
        """Whether scores depend on where queries and keys lie, beyond what a mask hides."""
        return self.has_alibi or self.has_dropout


@dataclass(frozen=True, eq=False)
class DeviceCall:
    """A packed call with its lengths on the device."""

    packed: PackedCall
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    origin: Tensor | None  # None: each sequence stands for itself
    sequences: Tensor  # which of the plan's each is

    @classmethod
    def of(cls, parts: list[Part], heads: int, sight: Sight, device: torch.device) -> DeviceCall:
        packed = PackedCall.of(parts, heads)
        depends_on_alignment = packed.is_masked or sight.has_alibi
        places_count = sight.has_dropout or (depends_on_alignment and not packed.is_aligned)

        def int32(numbers: Any) -> Tensor:
            return on_device(numbers, device, torch.int32)

        return cls(
            packed,
            int32(packed.cu_seqlens_q),
            int32(packed.cu_seqlens_k),
            int32(packed.origin) if places_count else None,
            on_device(packed.sequences, device),
        )


@dataclass(frozen=True, eq=False)
class Hop:
    """Keys that come together, and the calls over them.

    arrival: rows of what comes in the order of the calls' keys; None: as it comes. departure: the
    first place there of each row that came, and again: (rows that came, places) of what is there
    more than once.
    """

    exchange: Exchange | None  # None: the rank's own keys
    calls: tuple[DeviceCall, ...]
    arrival: Tensor | None = None
    departure: Tensor | None = None
    again: tuple[tuple[steps.Rows, steps.Rows], ...] = ()


@dataclass(frozen=True, eq=False)
class Schedule:
    """What a rank does under a plan. used_rows: of its shard, without padding; cut_rows: of
    gathering, those of sequences that other ranks have parts of.
    """

    rows: int
    used_rows: int
    hops: tuple[Hop, ...]
    merges: bool
    cut_rows: tuple[steps.Rows, ...] = ()


def gathering(plan: Plan, rank: int, heads: int, sight: Sight, device: torch.device) -> Schedule:
    """Sequences that the rank has whole, and then the others, whose keys come all at once. heads:
    of queries in the whole, which dropout counts.
    """

    def calls_of(parts: list[Part]) -> tuple[DeviceCall, ...]:
        calls = steps.without_gaps(parts)
        return tuple(DeviceCall.of(x, heads, sight, device) for x in calls)

    hops = []
    if whole := steps.whole_parts(plan, rank, sight.band):
        hops.append(Hop(None, calls_of(whole)))
    if plan.travelling:
        exchange, order, parts = steps.gather(
            plan, rank, sight.band, keeps_places=sight.keeps_places
        )
        arrival, departure = order_on_device(order, device), None
        again: list[tuple[steps.Rows, steps.Rows]] = []
        if arrival is not None:
            first, again = steps.way_back(order, sum(exchange.received))
            departure = on_device(first, device)
        hops.append(Hop(exchange, calls_of(parts), arrival, departure, tuple(again)))
    cut = steps.cut_rows(plan, rank)
    return Schedule(plan.rows, plan.used_rows(rank), tuple(hops), merges=False, cut_rows=cut)


def ringing(plan: Plan, rank: int, heads: int, sight: Sight, device: torch.device) -> Schedule:
    """The rank's own keys, and then those of the ranks before it, one after the other."""
    hops = []
    for distance in range(len(plan.ranks)):
        if distance > 0 and steps.is_hop_empty(plan, distance, sight.band):
            continue
        exchange: Exchange | None = None
        keys = [steps.Held(*x) for x in plan.placed(rank)]
        if distance > 0:
            exchange, keys = steps.hop(plan, rank, distance, sight.band)
        parts = steps.hop_parts(plan, rank, sight.band, keys)
        calls = steps.calls_of(parts, keeps_places=sight.keeps_places)
        made = tuple(DeviceCall.of(x, heads, sight, device) for x in calls)
        hops.append(Hop(exchange, made))
    return Schedule(plan.rows, plan.used_rows(rank), tuple(hops), merges=True)


def order_on_device(order: list[int], device: torch.device) -> Tensor | None:
    """None: as they are, as far as they go."""
    return None if order == list(range(len(order))) else on_device(order, device)


def on_device(numbers: Any, device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.tensor(numbers, dtype=dtype, device=device)
