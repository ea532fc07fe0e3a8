"""Which rank has which tokens: index arithmetic alone, the same on every rank.

A plan cuts sequences into pieces and gives each rank some of them. Cut evenly in 2 N parts, of
which rank r has parts r and 2 N - 1 - r, a causal sequence gives every rank the same work (the
"zigzag" of Zhu, ring-flash-attention, 2024). Packed documents are better off whole: one that lies
on one rank is not sent anywhere. So of a batch of documents only the longest are cut, each over no
more ranks than it takes to give all ranks about as many visible pairs and the same number of rows.
"""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, islice


@dataclass(frozen=True)
class Band:
    """Token i sees tokens i - left up to i + right of its sequence; None: without end."""

    left: int | None = None
    right: int | None = None

    @classmethod
    def of(cls, causal: bool, window_size: Sequence[int | None] = (-1, -1)) -> Band:
        """As causal and window_size of flash_attn_func say it: causal is a right end of 0."""
        left, right = (None if x is None or x < 0 else int(x) for x in window_size)
        return cls(left, 0 if causal else right)

    def keys_of(self, begin: int, end: int, length: int) -> tuple[int, int]:
        """What any of tokens [begin, end) of a sequence sees."""
        first = 0 if self.left is None else max(0, begin - self.left)
        last = length if self.right is None else min(length, end + self.right)
        return first, last

    def is_full(self, queries: tuple[int, int], keys: tuple[int, int]) -> bool:
        """Whether each of these sees all of those."""
        return (self.left is None or keys[0] >= queries[1] - 1 - self.left) and (
            self.right is None or keys[1] - 1 <= queries[0] + self.right
        )

    def pairs(self, begin: int, end: int, length: int) -> int:
        """Pairs that tokens [begin, end) are the queries of."""
        return sum(self._seen_before(x, length) * sign for x, sign in ((end, 1), (begin, -1)))

    def _seen_before(self, end: int, length: int) -> int:
        """Pairs of the first `end` tokens: keys up to each one's last without those before."""
        to_last = end * length
        if self.right is not None:
            ends_inside = min(end, max(0, length - self.right))
            to_last -= sum_below(length - self.right - ends_inside, length - self.right)
        before = 0 if self.left is None else sum_below(0, max(0, end - self.left))
        return to_last - before


def sum_below(first: int, end: int) -> int:
    """first + ... + (end - 1)."""
    return (end * (end - 1) - first * (first - 1)) // 2


@dataclass(frozen=True, order=True)
class Piece:
    """Tokens [begin, end) of a sequence."""

    sequence: int
    begin: int
    end: int

    def __len__(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True)
class Plan:
    """The rows of each rank are its pieces, one behind the other, and then padding up to `rows`.

    Args:
        lengths: tokens of each sequence.
        ranks: pieces of each rank, of which no two touch, in the order of its rows.
        rows: of each rank's shard.
    """

    lengths: tuple[int, ...]
    ranks: tuple[tuple[Piece, ...], ...]
    rows: int

    @classmethod
    def contiguous(cls, lengths: Sequence[int], ranks: int) -> Plan:
        """Every sequence in as many equal parts as there are ranks, in order."""
        return cls._of_equal_parts(lengths, [[rank] for rank in range(ranks)], ranks)

    @classmethod
    def zigzag(cls, lengths: Sequence[int], ranks: int) -> Plan:
        """Every sequence in 2 N equal parts, of which rank r has r and 2 N - 1 - r."""
        parts = [[rank, 2 * ranks - 1 - rank] for rank in range(ranks)]
        return cls._of_equal_parts(lengths, parts, 2 * ranks)

    @classmethod
    def in_order(cls, lengths: Sequence[int], ranks: int, *, multiple: int = 1) -> Plan:
        """Documents one behind the other, cut where a rank has its share of the rows: inside a
        document at a multiple of this.
        """
        bounds = [0, *accumulate(lengths)]
        rows = -(-bounds[-1] // ranks)

        def cut(row: int, index: int) -> int:
            """The token of the document that the row begins with."""
            token = max(0, row - bounds[index])
            return lengths[index] if token >= lengths[index] else token // multiple * multiple

        pieces = [
            [
                Piece(index, cut(rank * rows, index), cut((rank + 1) * rows, index))
                for index in range(len(lengths))
            ]
            for rank in range(ranks)
        ]
        return cls.of_pieces(lengths, pieces, rows)

    @classmethod
    def _of_equal_parts(cls, lengths: Sequence[int], parts: list[list[int]], count: int) -> Plan:
        for index, length in enumerate(lengths):
            if length % count:
                raise ValueError(
                    f"lengths: must be multiples of {count} for {len(parts)} ranks that have the "
                    f"same share of every sequence, got {length} of sequence {index}"
                )
        pieces = [
            [
                Piece(index, length // count * part, length // count * (part + 1))
                for index, length in enumerate(lengths)
                for part in mine
            ]
            for mine in parts
        ]
        return cls.of_pieces(lengths, pieces)

    @classmethod
    def balanced(
        cls,
        lengths: Sequence[int],
        ranks: int,
        band: Band,
        *,
        multiple: int = 1,
        tolerance: float = 0.02,
    ) -> Plan:
        """Documents whole, or cut over as few ranks as it takes to leave none with more than 1 +
        tolerance times the mean of the visible pairs: of the plans tried the first that does, from
        the one whose keys travel least on, or else the most even one.

        multiple: a document is cut at multiples of this alone. Dropout takes 16.
        """
        pairs = [band.pairs(0, length, length) for length in lengths]
        tried = dict.fromkeys(map(tuple, ranks_to_try(lengths, pairs, ranks)))

        def travel(counts: tuple[int, ...]) -> int:
            return sum((count - 1) * length for count, length in zip(counts, lengths, strict=True))

        rows = round_up(-(-sum(lengths) // ranks), multiple)
        found: list[tuple[float, Plan]] = []
        while not found:
            for ranks_of_each in sorted(tried, key=travel):
                plan = place(lengths, ranks, band, ranks_of_each, multiple, rows)
                if plan is None:
                    continue
                found.append((plan.imbalance(band), plan))
                if found[-1][0] <= 1 + tolerance:
                    return plan
            rows += multiple
        return min(found, key=lambda x: x[0])[1]

    @classmethod
    def of_pieces(
        cls,
        lengths: Sequence[int],
        pieces: Sequence[Sequence[Piece]],
        rows: int = 0,
        *,
        whole_first: bool = False,
    ) -> Plan:
        """Any pieces, as many rows as the largest rank has, or more. A rank has them in ascending
        order; whole_first: whole sequences, and then the others, so that calls over either find
        their queries side by side.
        """

        def order(piece: Piece) -> tuple[bool, Piece]:
            return whole_first and len(piece) < lengths[piece.sequence], piece

        ranks = tuple(tuple(sorted(join(mine), key=order)) for mine in pieces)
        most = max(sum(map(len, mine)) for mine in ranks)
        return cls(tuple(lengths), ranks, max(rows, most))

    @cached_property
    def total(self) -> int:
        return sum(self.lengths)

    @cached_property
    def first_rows(self) -> tuple[int, ...]:
        """Of every sequence, where all are packed one behind the other."""
        return (0, *accumulate(self.lengths))[:-1]

    def is_whole(self, piece: Piece) -> bool:
        """Whether it is all of its sequence, whose queries then meet no other rank's keys."""
        return len(piece) == self.lengths[piece.sequence]

    @cached_property
    def travelling(self) -> int:
        """Rows of keys that all ranks fetch together, if every query saw all of its sequence."""
        owners = Counter(x for mine in self.ranks for x in {piece.sequence for piece in mine})
        return sum((count - 1) * self.lengths[sequence] for sequence, count in owners.items())

    @cached_property
    def multiple(self) -> int:
        """16, 8, 4, 2 or 1: the most that all cuts are multiples of."""
        cuts = [piece.begin for mine in self.ranks for piece in mine]
        return next(x for x in (16, 8, 4, 2, 1) if all(cut % x == 0 for cut in cuts))

    def used_rows(self, rank: int) -> int:
        """Of the rank's shard, without padding."""
        return sum(map(len, self.ranks[rank]))

    def placed(self, rank: int) -> Iterator[tuple[int, Piece]]:
        """The rank's pieces and the row that each begins at."""
        row = 0
        for piece in self.ranks[rank]:
            yield row, piece
            row += len(piece)

    def rows_of(self, rank: int) -> list[int]:
        """Of each row of the rank, the row of the packed whole; -1: padding."""
        rows = [
            self.first_rows[piece.sequence] + i
            for piece in self.ranks[rank]
            for i in range(piece.begin, piece.end)
        ]
        return rows + [-1] * (self.rows - len(rows))

    def positions_of(self, rank: int) -> list[int]:
        """Of each row its place in its sequence, which rotary embeddings take; 0 of padding."""
        rows = [i for piece in self.ranks[rank] for i in range(piece.begin, piece.end)]
        return rows + [0] * (self.rows - len(rows))

    def pairs_of(self, rank: int, band: Band) -> int:
        """Visible pairs of the rank's queries."""
        mine = self.ranks[rank]
        return sum(band.pairs(x.begin, x.end, self.lengths[x.sequence]) for x in mine)

    def imbalance(self, band: Band) -> float:
        """The most pairs of a rank over their mean."""
        pairs = [self.pairs_of(rank, band) for rank in range(len(self.ranks))]
        return max(pairs) * len(pairs) / sum(pairs) if any(pairs) else 1.0

    def joined(self, ranks_of_one: int) -> Plan:
        """The plan of groups of so many neighbouring ranks, each with the pieces and as many rows
        as all of them.
        """
        groups = range(0, len(self.ranks), ranks_of_one)
        pieces = [
            [piece for mine in self.ranks[first : first + ranks_of_one] for piece in mine]
            for first in groups
        ]
        return Plan.of_pieces(self.lengths, pieces, self.rows * ranks_of_one, whole_first=True)


def join(pieces: Sequence[Piece]) -> Iterator[Piece]:
    """In ascending order, those that touch as one, without the empty ones."""
    last: Piece | None = None
    for piece in sorted(x for x in pieces if len(x) > 0):
        if last is not None and (last.sequence, last.end) == (piece.sequence, piece.begin):
            last = Piece(last.sequence, last.begin, piece.end)
            continue
        if last is not None:
            yield last
        last = piece
    if last is not None:
        yield last


def ranks_to_try(lengths: Sequence[int], pairs: Sequence[int], ranks: int) -> Iterator[list[int]]:
    """Over how many ranks each document is cut, 1: not at all. So that none has more than a share
    of a rank's pairs from one of them, all, 0.7 of it, half, ...; and the longest over all ranks.
    """
    mean = sum(pairs) / ranks
    yield [1] * len(lengths)
    for halvings in range(11):
        most = mean / 2 ** (halvings / 2)
        yield [min(ranks, max(1, math.ceil(x / most))) if x else 1 for x in pairs]
    longest_first = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    for count in (1, 2, 4, len(lengths)):
        chosen = set(longest_first[:count])
        yield [ranks if index in chosen else 1 for index in range(len(lengths))]


def place(
    lengths: Sequence[int],
    ranks: int,
    band: Band,
    ranks_of_each: Sequence[int],
    multiple: int,
    rows: int,
) -> Plan | None:
    """The longest document first, to the ranks of fewest pairs: one that is cut in zigzag over so
    many that have room, one that is not to one that has room for all of it; what fits nowhere is
    cut by the room that is left. None: shards of so many rows do not take them.
    """
    shards = Shards(ranks, rows)

    def give(rank: int, index: int, begin: int, end: int) -> None:
        shards.give(rank, Piece(index, begin, end), band.pairs(begin, end, lengths[index]))

    def share_out(index: int) -> bool:
        """Whether so many ranks, or more, have room."""
        for count in range(ranks_of_each[index], ranks + 1):
            units, rest = divmod(lengths[index], multiple)
            share = -(-units // count) * multiple + rest  # the most that zigzag_parts gives
            chosen = list(islice(shards.with_room(share), count))
            if len(chosen) == count:
                begin = 0
                for rank, taken in zigzag_parts(lengths[index], chosen, multiple):
                    give(rank, index, begin, begin + taken)
                    begin += taken
                return True
        return False

    def fill(index: int) -> bool:
        """Whole, or by the room that is left."""
        begin, length = 0, lengths[index]
        while begin < length:
            rank, taken = next(shards.with_room(length - begin), None), length - begin
            if rank is None:
                rank = max(range(ranks), key=lambda x: shards.room[x])
                taken = shards.room[rank] // multiple * multiple
                if taken == 0:
                    return False
            give(rank, index, begin, begin + taken)
            begin += taken
        return True

    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        if ranks_of_each[index] > 1 and share_out(index):
            continue
        if not fill(index):
            return None
    return Plan.of_pieces(lengths, shards.pieces, rows, whole_first=True)


class Shards:
    """What ranks have got so far, and the room and the order that they are in by it."""

    def __init__(self, ranks: int, rows: int) -> None:
        self.pieces: list[list[Piece]] = [[] for _ in range(ranks)]
        self.room = [rows] * ranks
        self._pairs = [0] * ranks
        self._order = [(0, -rows, rank) for rank in range(ranks)]

    def give(self, rank: int, piece: Piece, pairs: int) -> None:
        self.pieces[rank].append(piece)
        place = bisect_left(self._order, (self._pairs[rank], -self.room[rank], rank))
        del self._order[place]
        self.room[rank] -= len(piece)
        self._pairs[rank] += pairs
        insort(self._order, (self._pairs[rank], -self.room[rank], rank))

    def with_room(self, rows: int) -> Iterator[int]:
        """Ranks that have room for so many, those of fewest pairs first."""
        return (rank for _, room, rank in self._order if -room >= rows)


def zigzag_parts(length: int, ranks: Sequence[int], multiple: int) -> Iterator[tuple[int, int]]:
    """(rank, tokens) from the beginning to the end: the first ranks have no fewer than others, and
    the first of them what is no multiple.
    """
    units, rest = divmod(length, multiple)
    each, extra = divmod(units, len(ranks))
    shares = [each + (place < extra) for place in range(len(ranks))]
    for rank, share in zip(ranks, shares, strict=True):
        yield rank, share // 2 * multiple
    for place in reversed(range(len(ranks))):
        yield ranks[place], (shares[place] - shares[place] // 2) * multiple + rest * (place == 0)


def round_up(x: int, multiple: int) -> int:
    return -(-x // multiple) * multiple


# -- rows of shards --------------------------------------------------------------------------------


def equal_plan(lengths: Sequence[int], ranks: int) -> Plan:
    """Of sequences of one length."""
    if lengths and lengths[0] % (2 * ranks):
        raise ValueError(
            f"seqlen: must be a multiple of {2 * ranks}, two parts for each of {ranks} ranks, "
            f"got {lengths[0]}"
        )
    return Plan.zigzag(lengths, ranks)


def plan_pads(plan: Plan) -> bool:
    return any(plan.rows > sum(map(len, mine)) for mine in plan.ranks)


def places_in_shards(plan: Plan) -> list[int]:
    """Of each row of the packed whole, the row of all shards one behind the other."""
    places = [0] * plan.total
    for rank in range(len(plan.ranks)):
        for row, origin in enumerate(plan.rows_of(rank)):
            if origin >= 0:
                places[origin] = rank * plan.rows + row
    return places


def rows_of_joined(plan: Plan, inside: Plan, rank: int) -> tuple[list[int], list[int]]:
    """Of a group of ranks whose shards lie one behind the other: (of each row of the joined plan
    its row there, of each row there its row in the joined plan). Padding is padding there.
    """
    members = len(plan.ranks) // len(inside.ranks)
    shards = range(rank * members, (rank + 1) * members)
    there = [row for member in shards for row in plan.rows_of(member)]
    padding = (place for place, row in enumerate(there) if row < 0)
    place_of = {row: place for place, row in enumerate(there) if row >= 0}
    order = [place_of[row] if row >= 0 else next(padding) for row in inside.rows_of(rank)]
    places = [0] * len(order)
    for row, place in enumerate(order):
        places[place] = row
    return order, places


def hash_of(plan: Plan) -> str:
    return hashlib.sha256(repr(plan).encode()).hexdigest()[:16]
