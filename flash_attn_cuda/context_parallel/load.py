"""What a plan gives ranks to do and to fetch, and in which pieces it is best fetched."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from .plan import Band, Plan

# Heads travel in groups, each beside the work on those before. A group costs the end of a call, in
# which multiprocessors idle; WORTH_GROUPS seconds of work bear that. A transfer may take EXPOSED of
# the work beside nothing, of a backward twice that. A forward waits for one head if the others come
# while it is at work on that one, over links of a SLOWER_LINKth of BANDWIDTH as well.
WORTH_GROUPS = 4e-3
EXPOSED, SLOWER_LINK = 0.01, 4
RATE, BANDWIDTH = 600e12, 300e9  # FLOP/s, and bytes/s to a GPU: of an H100 over NVLink

HeadGroups = tuple[int, ...]  # of so many heads of keys each


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

    def head_groups(self, heads: Heads, *, backward: bool) -> HeadGroups:
        """In which groups heads of keys travel to each rank: so that little is waited for, and in
        few. A backward waits for the first group and for what the last one sends back.
        """
        seconds = self.pairs * 2 * heads.columns * heads.q / RATE
        transfer = self.travelling * heads.k * heads.columns * heads.itemsize / BANDWIDTH
        least = 2 * EXPOSED if backward else EXPOSED
        if heads.k == 1 or seconds < WORTH_GROUPS or transfer < least * seconds:
            return (heads.k,)
        if not backward and transfer * (heads.k - 1) * SLOWER_LINK < seconds:
            return (1, heads.k - 1)
        return even_groups(heads.k, 2 if transfer / 2 < 2 * EXPOSED * seconds else 4)


def even_groups(heads_k: int, count: int) -> HeadGroups:
    """As many groups, or one for each head, as even as they can be."""
    count = min(count, heads_k)
    return tuple(heads_k // count + (x < heads_k % count) for x in range(count))
