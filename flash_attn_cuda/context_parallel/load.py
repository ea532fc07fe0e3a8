"""What a plan gives ranks to do and to fetch, and in how many pieces it is best fetched."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from .plan import Band, Plan

# Heads travel in groups, each beside the work on the one before, until no more than EXPOSED of the
# time is a wait for the first; groups cost launches, which WORTH_GROUPS seconds of work bear.
EXPOSED, WORTH_GROUPS = 0.02, 4e-3
RATE, BANDWIDTH = 600e12, 300e9  # FLOP/s, and bytes/s to a GPU: of an H100 over NVLink


class Heads(NamedTuple):
    """Of queries and of keys; columns: of a key and its value, of itemsize bytes each."""

    q: int
    k: int
    columns: int
    itemsize: int


@dataclass(frozen=True)
class Load:
    """What a plan gives a rank, more or less; the same on every rank. pairs: that are visible.
    travelling: rows of keys from others, if every query saw all of its sequence.
    """

    pairs: float
    travelling: float

    @classmethod
    def of(cls, plan: Plan, band: Band) -> Load:
        ranks = range(len(plan.ranks))
        pairs = sum(plan.pairs_of(rank, band) for rank in ranks)
        return cls(pairs / len(ranks), plan.travelling / len(ranks))

    def head_groups(self, heads: Heads) -> int:
        """In how many groups heads of keys travel to each rank."""
        seconds = self.pairs * 2 * heads.columns * heads.q / RATE
        if seconds < WORTH_GROUPS:
            return 1
        transfer = self.travelling * heads.k * heads.columns * heads.itemsize / BANDWIDTH
        fit = [x for x in (1, 2, 3, 4) if heads.k % x == 0]
        return next((x for x in fit if transfer / x < EXPOSED * seconds), fit[-1])
