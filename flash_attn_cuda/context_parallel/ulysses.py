"""Ulysses: attention of all rows of a rank's share of the heads, a group of heads at a time.

All groups are asked for before any attention, and what one gives goes back before the next is
attended to: transfers run beside the work on other groups, but for the first group's way here and
the last one's way back. A group has one key head or more and their query heads, neighbours in the
whole. What is sent is free again once its group has come.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from ..call import Tangents
from .attention import (
    OfWhole,
    Work,
    attend_to_keys,
    gathered_jvp,
    gradient_of_sink,
    head_slices,
    write_gradients_of_rows,
)
from .groups import rank_of
from .head_exchange import (
    Across,
    InFlight,
    all_rows,
    of_each_rank,
    own_rows,
    send_heads,
    send_rows,
    side_by_side,
)


class Kept(NamedTuple):
    """What derivatives read of a group: all rows of its heads."""

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    softmax_lse: Tensor


@dataclass(frozen=True, eq=False)
class HeadGroup:
    """Heads that travel together. work: on this rank's; whole: those among all query heads; q, k:
    the group among a rank's.
    """

    across: Across
    work: Work
    whole: slice
    q: slice
    k: slice

    def send_q(self, x: Tensor) -> InFlight:
        """Of (rows, heads, dim) of all query heads."""
        return send_heads([of_each_rank(x, self.across.ranks)[:, :, self.q]], self.across)

    def send_qkv(self, q: Tensor, k: Tensor, v: Tensor) -> InFlight:
        heads_of = ((q, self.q), (k, self.k), (v, self.k))
        by_rank = [of_each_rank(x, self.across.ranks)[:, :, heads] for x, heads in heads_of]
        return send_heads(by_rank, self.across)

    def send_lse(self, softmax_lse: Tensor) -> InFlight:
        """Of (heads, rows) of all query heads."""
        return self.send_q(by_row(softmax_lse))

    def all_rows(self, coming: InFlight) -> tuple[Tensor, ...]:
        return all_rows(coming, self.across)

    def all_rows_of_lse(self, coming: InFlight) -> Tensor:
        (rows,) = all_rows(coming, self.across)
        return by_head(rows)

    def send_back(self, x: Tensor) -> InFlight:
        """Of (all rows, heads, dim)."""
        return send_rows(x.flatten(1), ((x.shape[1], x.shape[2]),), self.across)


def by_row(softmax_lse: Tensor) -> Tensor:
    """(heads, rows) as (rows, heads, 1)."""
    return softmax_lse.t()[..., None]


def by_head(rows: Tensor) -> Tensor:
    return rows[..., 0].t()


def head_groups_of(work: Work, heads_q: int) -> list[HeadGroup]:
    """heads_q: of a rank."""
    across = work.across
    assert across is not None
    first = heads_q * rank_of(across.group)
    groups = []
    for of_q, of_k in head_slices(heads_q, work.head_groups[0]):
        whole = slice(first + of_q.start, first + of_q.stop)
        settings = dict(work.settings)
        if settings["alibi_slopes"] is not None:
            settings["alibi_slopes"] = settings["alibi_slopes"][..., whole]
        of_group = replace(work, across=None, settings=settings, first_head=whole.start)
        groups.append(HeadGroup(across, of_group, whole, of_q, of_k))
    return groups


def heads_of_rank(kept: Sequence[Kept]) -> int:
    return sum(x.q.shape[1] for x in kept)


def exchanged_forward(
    work: Work, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None
) -> tuple[list[Tensor], list[Kept]]:
    """([out] or [out, softmax_lse] of this rank's rows, what is kept of each group)."""
    assert work.across is not None
    groups = head_groups_of(work, q.shape[1] // work.across.ranks)
    coming = [group.send_qkv(q, k, v) for group in groups]
    kept: list[Kept] = []
    going: list[InFlight] = []
    going_lse: list[InFlight] = []
    for group in groups:
        of_q, of_k, of_v = group.all_rows(coming.pop(0))
        of_sink = None if sink is None else sink[group.whole]
        out, softmax_lse = attend_to_keys(group.work, of_q, of_k, of_v, of_sink)
        kept.append(Kept(of_q, of_k, of_v, out, softmax_lse))
        going.append(group.send_back(out))
        if work.returns_lse:
            going_lse.append(group.send_back(by_row(softmax_lse)))
    return results_of(going, going_lse), kept


def results_of(going: Sequence[InFlight], going_lse: Sequence[InFlight]) -> list[Tensor]:
    """[out] or [out, softmax_lse], or their tangents, of this rank's rows."""
    found = [*own_rows(going)]
    if going_lse:
        (rows_of_lse,) = own_rows(going_lse)
        # A view that a Function returns could not be written in place.
        found.append(by_head(rows_of_lse).clone(memory_format=torch.contiguous_format))
    return found


def exchanged_backward(
    work: Work,
    kept: Sequence[Kept],
    sink: Tensor | None,
    dout: Tensor | None,
    dlse: Tensor | None,
) -> tuple[Tensor | None, ...]:
    """(dq, dk, dv, dsink) of this rank's rows; sink: where its gradient is wanted."""
    groups = head_groups_of(work, heads_of_rank(kept))
    if dout is None:
        dout = zeros_of_own_rows(work, [x.out for x in kept])
    coming, coming_lse = [], []
    for group in groups:
        coming.append(group.send_q(dout))
        if dlse is not None:
            coming_lse.append(group.send_lse(dlse))
    dsink = None if sink is None else torch.zeros_like(sink)
    going: list[InFlight] = []
    for group, (q, k, v, out, softmax_lse) in zip(groups, kept, strict=True):
        (dout_of_group,) = group.all_rows(coming.pop(0))
        dlse_of_group = group.all_rows_of_lse(coming_lse.pop(0)) if coming_lse else None
        rng_state = group.work.settings["rng_state"]
        incoming = OfWhole(dout_of_group, dlse_of_group, out, softmax_lse, rng_state)
        room, gradients = side_by_side((q, k, v))
        write_gradients_of_rows(group.work, q, k, v, incoming, gradients)
        shapes = tuple((x.shape[1], x.shape[2]) for x in gradients)
        going.append(send_rows(room, shapes, group.across))
        if sink is not None and dsink is not None:
            dsink[group.whole] = gradient_of_sink(q, k, v, sink[group.whole], incoming)
    return *own_rows(going), dsink


def exchanged_jvp(
    work: Work, kept: Sequence[Kept], sink: Tensor | None, direction: Tangents
) -> tuple[list[Tensor], list[Kept]]:
    """([tout] or [tout, tlse] of this rank's rows, tangents of what is kept). Zeros travel where
    the rank has no tangents: others may have some.
    """
    groups = head_groups_of(work, heads_of_rank(kept))
    tangents = [
        zeros_of_own_rows(work, [x[number] for x in kept]) if t is None else t
        for number, t in enumerate((direction.tq, direction.tk, direction.tv))
    ]
    tsink = direction.tsink
    coming = [group.send_qkv(*tangents) for group in groups]
    of_kept: list[Kept] = []
    going: list[InFlight] = []
    going_lse: list[InFlight] = []
    for group, (q, k, v, out, softmax_lse) in zip(groups, kept, strict=True):
        tq, tk, tv = group.all_rows(coming.pop(0))
        of_tsink = None if tsink is None else tsink[group.whole]
        tout, tlse = gathered_jvp(
            group.work,
            *(q, k, v),
            None if sink is None else sink[group.whole],
            OfWhole(None, None, out, softmax_lse, group.work.settings["rng_state"]),
            Tangents(tq=tq, tk=tk, tv=tv, tsink=of_tsink),
        )
        of_kept.append(Kept(tq, tk, tv, tout, tlse))
        going.append(group.send_back(tout))
        if work.returns_lse:
            going_lse.append(group.send_back(by_row(tlse)))
    return results_of(going, going_lse), of_kept


def zeros_of_own_rows(work: Work, of_groups: Sequence[Tensor]) -> Tensor:
    """Of this rank's rows of all heads, where groups have all rows of its heads."""
    assert work.across is not None
    ranks, first = work.across.ranks, of_groups[0]
    heads = ranks * sum(x.shape[1] for x in of_groups)
    return first.new_zeros((first.shape[0] // ranks, heads, first.shape[2]))
