"""What a plan gives ranks to do and to fetch, and in which pieces it is best fetched."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from .plan import Band, Plan

# Heads travel in groups, each beside the work on others. A group costs the end of a call, in
# which multiprocessors idle; WORTH_GROUPS seconds of work bear that. A transfer may take EXPOSED of
# the work beside nothing, of a backward twice that. A forward waits for one head if the others come
# while it is at work on that one, over links of a SLOWER_LINKth of BANDWIDTH as well.
WORTH_GROUPS = 4e-3
EXPOSED, SLOWER_LINK = 0.01, 4
RATE, BANDWIDTH = 600e12, 300e9  # FLOP/s, and bytes/s to a GPU: of an H100 over NVLink
# By ulysses a group costs CALL seconds and half the work on a mean tile, of TILE_ROWS queries of a
# head on one of MULTIPROCESSORS; a host asks for less than LEAST_WORK seconds of it too late.
MOST_GROUPS, CALL, LEAST_WORK = 4, 50e-6, 300e-6
TILE_ROWS, MULTIPROCESSORS = 128, 132

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
    travelling: rows of keys from others, if every query saw all of its sequence. rows: its own.
    """

    pairs: float
    travelling: float
    rows: int

    @classmethod
    def of(cls, plan: Plan, band: Band) -> Load:
        ranks = range(len(plan.ranks))
        pairs = sum(plan.pairs_of(rank, band) for rank in ranks)
        return cls(pairs / len(ranks), plan.travelling / len(ranks), plan.rows)

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

    def exchanged_groups(self, heads: Heads, ranks: int) -> HeadGroups:
        """In which groups heads of a rank's keys travel by ulysses, where the load is that of the
        ranks' joined plan: those of the least time in a forward. The backward has the same bytes
        beside more work.
        """
        share = heads_of_rank(heads.k, ranks)
        work = self.pairs * 2 * heads.columns * (heads.q / ranks) / RATE
        bytes_of_head = self.rows / ranks * heads.columns * heads.itemsize * (ranks - 1) / ranks
        there = bytes_of_head * (heads.q / 2 + share * ranks) / BANDWIDTH
        back = bytes_of_head * heads.q / 2 / BANDWIDTH
        tiles = max(1.0, self.rows / TILE_ROWS * (heads.q / ranks) / MULTIPROCESSORS)
        of_group = CALL + work / tiles / 2

        def seconds(count: int) -> float:
            return exchanged_seconds(there, work, back, count) + count * of_group

        most = max(1, min(share, MOST_GROUPS, int(work / LEAST_WORK)))
        counts = (x for x in range(1, most + 1) if share % x == 0)
        return even_groups(share, min(counts, key=seconds))


def heads_of_rank(heads_k: int, ranks: int) -> int:
    """Of keys, by ulysses: where they are fewer than ranks each rank has one of them."""
    return max(1, heads_k // ranks)


def exchanged_seconds(there: float, work: float, back: float, groups: int) -> float:
    """Of a forward or a backward by ulysses, in even groups: each travels there, is worked on and
    travels back, one after the other in each of the three. Ways back begin when all are there.
    """
    first = (there + work) / groups
    worked = max(there / groups + work, there + work / groups)
    return max(worked + back / groups, max(there, first) + back)


def even_groups(heads_k: int, count: int) -> HeadGroups:
    """As many groups, or one for each head, as even as they can be."""
    count = min(count, heads_k)
    return tuple(heads_k // count + (x < heads_k % count) for x in range(count))
