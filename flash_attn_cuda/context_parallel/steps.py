"""What each rank sends, receives and computes under a plan: index arithmetic alone.

An exchange says which rows of keys travel between which ranks; a call, which rows of the rank's
queries meet which of the keys that it then has. Every rank derives both for all ranks from the
plan, so that nobody has to ask.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from .plan import Band, Piece, Plan

Rows = tuple[int, int]  # begin, end


@dataclass(frozen=True)
class Held:
    """A piece of a sequence's keys, and the row of a buffer that it begins at."""

    row: int
    piece: Piece


@dataclass(frozen=True)
class Exchange:
    """One collective: rank r sends sent[s] to rank s, in that order, and gets rows from each.

    rows: of this rank's shard that are sent, of all ranks one behind the other. sent, received: how
    many rows to and from each rank.
    """

    rows: tuple[Rows, ...]
    sent: tuple[int, ...]
    received: tuple[int, ...]

    @classmethod
    def of(cls, sent: Iterable[tuple[Rows, ...]], received: Iterable[int]) -> Exchange:
        """sent: of each rank, rows of this rank's shard."""
        by_rank = tuple(sent)
        return cls(
            tuple(rows for to_one in by_rank for rows in to_one),
            tuple(sum(map(length, to_one)) for to_one in by_rank),
            tuple(received),
        )


@dataclass(frozen=True)
class Part:
    """Queries that meet keys, rows of the rank's queries and of its keys.

    shift: query i of these sees key j if i + shift - left <= j <= i + shift + right. first_q and
    first_k: their places in the sequence.
    """

    sequence: int
    q: Rows
    k: Rows
    first_q: int
    first_k: int
    is_masked: bool

    @property
    def shift(self) -> int:
        return self.first_q - self.first_k

    @property
    def is_aligned(self) -> bool:
        """Whether the last query sees the last key and no more, as in a call of its own."""
        return self.shift == length(self.k) - length(self.q)


def length(rows: Rows) -> int:
    return rows[1] - rows[0]


def seen_keys(plan: Plan, rank: int, band: Band, cut_alone: bool) -> list[Piece]:
    """What the rank's queries see of every sequence; ranges may overlap.
    cut_alone: without sequences that the rank has whole.
    """
    seen = []
    for piece in plan.ranks[rank]:
        if cut_alone and plan.is_whole(piece):
            continue
        first, end = band.keys_of(piece.begin, piece.end, plan.lengths[piece.sequence])
        seen.append(Piece(piece.sequence, first, max(first, end)))
    return seen


def united(pieces: Iterable[Piece], multiple: int = 1) -> list[Piece]:
    """Each token once, in ascending order; beginnings are rounded down to `multiple`."""
    result: list[Piece] = []
    for piece in sorted(x for x in pieces if len(x) > 0):
        begin = piece.begin // multiple * multiple
        if result and result[-1].sequence == piece.sequence and begin <= result[-1].end:
            last = result.pop()
            piece = Piece(last.sequence, last.begin, max(last.end, piece.end))
        else:
            piece = Piece(piece.sequence, begin, piece.end)
        result.append(piece)
    return result


def overlaps(plan: Plan, rank: int, wanted: Sequence[Piece]) -> Iterator[Held]:
    """Of the wanted tokens those that the rank has, and the rows of its shard that they are."""
    for row, piece in plan.placed(rank):
        for want in wanted:
            begin, end = max(piece.begin, want.begin), min(piece.end, want.end)
            if want.sequence == piece.sequence and begin < end:
                yield Held(row + begin - piece.begin, Piece(piece.sequence, begin, end))


def wanted_of(
    plan: Plan, source: int, rank: int, band: Band, *, cut_alone: bool = False
) -> list[Held]:
    """What the rank sees of the source's keys, by rows of the source."""
    seen = united(seen_keys(plan, rank, band, cut_alone), plan.multiple)
    return list(overlaps(plan, source, seen))


# -- all at once: every query meets all its keys in one call --------------------------------------


def gather(
    plan: Plan, rank: int, band: Band, *, keeps_places: bool
) -> tuple[Exchange, list[int], list[Part]]:
    """Of sequences that are cut: (the exchange of keys, rows of what it brings in the order of the
    parts, the parts, in which every query is once). A rank's own keys come with the others; those
    that several parts see are there for each, so that one call has room for all parts.
    """
    ranks = range(len(plan.ranks))
    sent = tuple(rows_of(wanted_of(plan, rank, other, band, cut_alone=True)) for other in ranks)
    received = []
    arrived: dict[int, list[Held]] = {}
    row = 0
    for source in ranks:
        begin = row
        for held in wanted_of(plan, source, rank, band, cut_alone=True):
            insort(arrived.setdefault(held.piece.sequence, []), Held(row, held.piece), key=piece_of)
            row += len(held.piece)
        received.append(row - begin)
    order: list[int] = []
    parts = gathered_parts(plan, rank, band, keeps_places=keeps_places)
    for part in parts:
        seen = part.first_k, part.first_k + length(part.k)
        for held in arrived[part.sequence]:
            first, end = max(seen[0], held.piece.begin), min(seen[1], held.piece.end)
            order.extend(
                range(held.row + first - held.piece.begin, held.row + end - held.piece.begin)
            )
    return Exchange.of(sent, received), order, parts


def piece_of(held: Held) -> Piece:
    return held.piece


def gathered_parts(plan: Plan, rank: int, band: Band, *, keeps_places: bool) -> list[Part]:
    """The rank's pieces of sequences that are cut, each with the keys that it sees, itself at
    least, behind those of the one before. Pieces that see all of the same keys are one part, where
    nothing depends on places: a call that is masked for one of its parts looks at those of all.
    """
    parts: list[Part] = []
    for row, piece in plan.placed(rank):
        if plan.is_whole(piece):
            continue
        first, end = band.keys_of(piece.begin, piece.end, plan.lengths[piece.sequence])
        first = first // plan.multiple * plan.multiple
        begin = parts[-1].k[1] if parts else 0
        is_masked = not band.is_full((piece.begin, piece.end), (first, end))
        rows, keys = (row, row + len(piece)), (begin, begin + end - first)
        parts.append(Part(piece.sequence, rows, keys, piece.begin, first, is_masked))
    if keeps_places or any(part.is_masked for part in parts):
        return parts
    joined: list[Part] = []
    row = 0
    for part in parts:
        last = joined[-1] if joined else None
        if last is not None and can_join(last, part):
            joined[-1] = replace(last, q=(last.q[0], part.q[1]))
            continue
        joined.append(replace(part, k=(row, row + length(part.k))))
        row += length(part.k)
    return joined


def can_join(part: Part, after: Part) -> bool:
    """Whether both see the same keys, and the queries touch."""
    return (
        part.sequence == after.sequence
        and part.q[1] == after.q[0]
        and (part.first_k, length(part.k)) == (after.first_k, length(after.k))
    )


def way_back(order: Sequence[int], count: int) -> tuple[list[int], list[tuple[Rows, Rows]]]:
    """Of `count` rows that came: (the first place in `order` of each, and of those that have more,
    the others: rows, places).
    """
    first = [-1] * count
    others: list[tuple[Rows, Rows]] = []
    for place, row in enumerate(order):
        if first[row] < 0:
            first[row] = place
        elif others and (others[-1][0][1], others[-1][1][1]) == (row, place):
            (row_begin, _), (place_begin, _) = others.pop()
            others.append(((row_begin, row + 1), (place_begin, place + 1)))
        else:
            others.append(((row, row + 1), (place, place + 1)))
    return first, others


def rows_of(held: Iterable[Held]) -> tuple[Rows, ...]:
    """Neighbours as one."""
    result: list[Rows] = []
    for x in held:
        begin, end = x.row, x.row + len(x.piece)
        if result and result[-1][1] == begin:
            begin = result.pop()[0]
        result.append((begin, end))
    return tuple(result)


def in_order(arrived: Sequence[Held]) -> list[Held]:
    """Behind each other, neighbours as one."""
    result: list[Held] = []
    row = 0
    for piece in (x.piece for x in arrived):
        last = result[-1] if result else None
        if (
            last is not None
            and (last.piece.sequence, last.piece.end) == (piece.sequence, piece.begin)
            and last.row + len(last.piece) == row
        ):
            whole = Piece(piece.sequence, last.piece.begin, piece.end)
            result[-1] = Held(last.row, whole)
        else:
            result.append(Held(row, piece))
        row += len(piece)
    return result


def whole_parts(plan: Plan, rank: int, band: Band) -> list[Part]:
    """Sequences that the rank has whole, by rows of its shard."""
    return [
        Part(
            sequence=piece.sequence,
            q=(row, row + len(piece)),
            k=(row, row + len(piece)),
            first_q=0,
            first_k=0,
            is_masked=not band.is_full((0, len(piece)), (0, len(piece))),
        )
        for row, piece in plan.placed(rank)
        if plan.is_whole(piece)
    ]


def without_gaps(parts: Iterable[Part]) -> list[list[Part]]:
    """Parts in calls whose rows of queries touch: a call writes all rows from its first to its last
    query.
    """
    calls: list[list[Part]] = []
    for part in sorted(parts, key=lambda x: x.q):
        if calls and calls[-1][-1].q[1] == part.q[0]:
            calls[-1].append(part)
        else:
            calls.append([part])
    return calls


def cut_rows(plan: Plan, rank: int) -> tuple[Rows, ...]:
    """Of the rank's shard, those of sequences that are cut."""
    return rows_of(Held(*x) for x in plan.placed(rank) if not plan.is_whole(x[1]))


# -- hop by hop: queries meet the keys of one rank after the other --------------------------------


def hop(plan: Plan, rank: int, distance: int, band: Band) -> tuple[Exchange, list[Held]]:
    """Keys of the rank so many before this one: (the exchange, what lies where in what it brings).

    They come from their owner itself, and no more of them than somebody sees.
    """
    ranks = len(plan.ranks)
    source, target = (rank - distance) % ranks, (rank + distance) % ranks
    sent = rows_of(wanted_of(plan, rank, target, band))
    arrived = in_order(wanted_of(plan, source, rank, band))
    count = sum(len(x.piece) for x in arrived)
    return (
        Exchange.of(
            (sent if other == target else () for other in range(ranks)),
            (count if other == source else 0 for other in range(ranks)),
        ),
        arrived,
    )


def is_hop_empty(plan: Plan, distance: int, band: Band) -> bool:
    """Whether nobody sees anything of the rank so many before."""
    ranks = len(plan.ranks)
    return not any(wanted_of(plan, (x - distance) % ranks, x, band) for x in range(ranks))


def hop_parts(plan: Plan, rank: int, band: Band, keys: Sequence[Held]) -> list[Part]:
    """Pairs of the rank's pieces and these keys, without queries and keys at their ends that take
    no part.
    """
    step = plan.multiple
    parts = []
    for row, piece in plan.placed(rank):
        whole = plan.lengths[piece.sequence]
        first, end = band.keys_of(piece.begin, piece.end, whole)
        for held in keys:
            mine = held.piece
            if mine.sequence != piece.sequence:
                continue
            k_begin = max(mine.begin, first // step * step)
            k_end = min(mine.end, end)
            q_begin, q_end = piece.begin, piece.end
            if band.right is not None:
                q_begin = max(q_begin, (k_begin - band.right) // step * step)
            if band.left is not None:
                q_end = min(q_end, k_end + band.left)
            if k_begin >= k_end or q_begin >= q_end:
                continue
            q_row, k_row = row + q_begin - piece.begin, held.row + k_begin - mine.begin
            parts.append(
                Part(
                    sequence=piece.sequence,
                    q=(q_row, q_row + q_end - q_begin),
                    k=(k_row, k_row + k_end - k_begin),
                    first_q=q_begin,
                    first_k=k_begin,
                    is_masked=not band.is_full((q_begin, q_end), (k_begin, k_end)),
                )
            )
    return parts


# -- calls -----------------------------------------------------------------------------------------


def calls_of(parts: Sequence[Part], *, keeps_places: bool) -> list[list[Part]]:
    """Parts in as few calls as their order allows: rows of queries and of keys ascend in a call and
    none is in two of its parts. Parts that see all of each other are calls of their own, without a
    mask, and neighbours among them are one, unless scores depend on places (`keeps_places`).
    """
    masked = [x for x in parts if x.is_masked]
    full = [x for x in parts if not x.is_masked]
    if not keeps_places:
        full = widened(widened(full, "q", "k"), "k", "q")
    return [*packed(masked), *packed(full)]


def widened(parts: Iterable[Part], by: str, same: str) -> list[Part]:
    """Parts with the `same` rows whose rows `by` touch, as one."""
    result: list[Part] = []
    for part in sorted(parts, key=lambda x: (getattr(x, same), getattr(x, by))):
        begin, end = getattr(part, by)
        if result and getattr(result[-1], same) == getattr(part, same):
            first, last = getattr(result[-1], by)
            if last == begin:
                part = result.pop()
                rows = (first, end)
                part = replace(part, q=rows) if by == "q" else replace(part, k=rows)
        result.append(part)
    return result


def packed(parts: Sequence[Part]) -> list[list[Part]]:
    calls: list[list[Part]] = []
    for part in sorted(parts, key=lambda x: (x.q, x.k)):
        for call in calls:
            if call[-1].q[1] <= part.q[0] and call[-1].k[1] <= part.k[0]:
                call.append(part)
                break
        else:
            calls.append([part])
    return calls


@dataclass(frozen=True)
class PackedCall:
    """A packed call over rows q of the queries and k of the keys.

    cu_seqlens_q, cu_seqlens_k: counted from their first rows; rows between parts are sequences
    without keys or without queries. origin: (stream, first_q, first_k, shift) of each sequence,
    the stream that of head 0 of `heads` heads.
    """

    q: Rows
    k: Rows
    cu_seqlens_q: tuple[int, ...]
    cu_seqlens_k: tuple[int, ...]
    max_seqlen_q: int
    max_seqlen_k: int
    origin: tuple[tuple[int, int, int, int], ...]
    sequences: tuple[int, ...]
    is_masked: bool
    is_aligned: bool

    @classmethod
    def of(cls, parts: Sequence[Part], heads: int) -> PackedCall:
        cu_q, cu_k = [parts[0].q[0]], [parts[0].k[0]]
        origin: list[tuple[int, int, int, int]] = []
        sequences: list[int] = []

        def add(q_end: int, k_end: int, sequence: int, place: tuple[int, int, int]) -> None:
            cu_q.append(q_end)
            cu_k.append(k_end)
            origin.append((sequence * heads, *place))
            sequences.append(sequence)

        for part in parts:
            if part.q[0] > cu_q[-1]:
                add(part.q[0], cu_k[-1], 0, (0, 0, 0))
            if part.k[0] > cu_k[-1]:
                add(cu_q[-1], part.k[0], 0, (0, 0, 0))
            add(part.q[1], part.k[1], part.sequence, (part.first_q, part.first_k, part.shift))
        return cls(
            q=(cu_q[0], cu_q[-1]),
            k=(cu_k[0], cu_k[-1]),
            cu_seqlens_q=tuple(x - cu_q[0] for x in cu_q),
            cu_seqlens_k=tuple(x - cu_k[0] for x in cu_k),
            max_seqlen_q=max(map(length, pairwise(cu_q))),
            max_seqlen_k=max(map(length, pairwise(cu_k))),
            origin=tuple(origin),
            sequences=tuple(sequences),
            is_masked=any(x.is_masked for x in parts),
            is_aligned=all(x.is_aligned for x in parts),
        )
