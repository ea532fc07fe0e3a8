"""Ulysses: a rank gets all rows of its share of the heads, and gives the others their rows of the
results (Jacobs et al., "DeepSpeed Ulysses", 2023, section 3.1).

What belongs together travels side by side, in one collective. Heads go in groups, all asked for at
once: the work on one runs beside the transfers of the next one's inputs and of the last one's
results.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from .attention import OfWhole, Work, attend, gradients, head_slices
from .exchange import arrived, exchange_equal, in_order
from .load import HeadGroups

# (rows, heads, dim) of all heads, and which of each rank's share.
Heads = Sequence[tuple[Tensor, slice]]


@dataclass(frozen=True, eq=False)
class Across:
    """The ranks that heads are shared out to. order: of each row of their joined plan, its row
    where their shards lie one behind the other; places: the way back; None: as they are.
    head_groups: in which a rank's heads of keys travel.
    """

    group: ProcessGroup
    ranks: int
    order: Tensor | None
    places: Tensor | None
    head_groups: HeadGroups


def by_rank(x: Tensor, heads: slice, ranks: int) -> Tensor:
    """A view of these heads of each rank's share, (ranks, rows, heads, dim)."""
    return x.unflatten(1, (ranks, -1))[:, :, heads].transpose(0, 1)


def all_rows(asked: Sequence[Heads], across: Across) -> Iterator[list[Tensor]]:
    """All ranks' rows of this rank's heads, (rows, heads, dim), in the order of the joined plan:
    what is asked for together at a time, all of it asked for before the first is waited for.
    """
    coming = []
    for heads in asked:
        sent = [by_rank(x, of_x, across.ranks) for x, of_x in heads]
        columns = torch.cat([x.flatten(2) for x in sent], -1)
        coming.append(([x.shape[2:] for x in sent], exchange_equal(columns, across.group)))
    while coming:
        shapes, came = coming.pop(0)
        rows = in_order(arrived(came).flatten(0, 1), across.order)
        columns_of = rows.split([heads * dim for heads, dim in shapes], 1)
        yield [x.unflatten(1, shape) for x, shape in zip(columns_of, shapes, strict=True)]


def give_rows(found: Sequence[Tensor], across: Across) -> Tensor:
    """Sends all ranks their rows of (rows, heads, dim) in the order of the joined plan."""
    flat = [x.flatten(1) for x in found]
    rows = in_order(flat[0] if len(flat) == 1 else torch.cat(flat, 1), across.places)
    return exchange_equal(rows.unflatten(0, (across.ranks, -1)), across.group)


def take_rows(came: Tensor, into: Heads, across: Across) -> None:
    """Writes what give_rows brings."""
    targets = [by_rank(x, of_x, across.ranks) for x, of_x in into]
    columns_of = arrived(came).split([x.shape[2] * x.shape[3] for x in targets], -1)
    for target, columns in zip(targets, columns_of, strict=True):
        target.copy_(columns.unflatten(-1, target.shape[2:]))


def room_for(groups: Sequence[Tensor], across: Across) -> Tensor:
    """This rank's rows of all heads, of tensors like these."""
    rows, _, dim = groups[0].shape
    heads = across.ranks * sum(x.shape[1] for x in groups)
    return groups[0].new_empty((rows // across.ranks, heads, dim))


class UlyssesAttention(torch.autograd.Function):
    """(out, softmax_lse) of a rank's rows, q (rows, heads_q, D), by a work and with a sink of the
    heads that it gets; softmax_lse (heads_q, rows) is None unless it is asked for.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sink: Tensor | None,
        work: Work,
        across: Across,
        return_lse: bool,
    ) -> Any:
        heads = q.shape[1] // across.ranks
        groups = list(head_slices(heads, across.head_groups))
        asked = [((q, of_q), (k, of_k), (v, of_k)) for of_q, of_k in groups]
        kept, going = [], []
        for (of_q, _), (qs, ks, vs) in zip(groups, all_rows(asked, across), strict=True):
            sink_of_group = None if sink is None else sink[of_q]
            found, lse = attend(work.of_heads(of_q), qs, ks, vs, sink_of_group)
            going.append(give_rows([found], across))
            kept.append((qs, ks, vs, found, lse))
        softmax_lse = None
        if return_lse:
            lse = torch.cat([x[-1] for x in kept]).t()[..., None]
            by_row = room_for([lse], across)
            take_rows(give_rows([lse], across), [(by_row, slice(0, heads))], across)
            softmax_lse = by_row[..., 0].t()
        out = room_for([x[3] for x in kept], across)
        for (of_q, _), came in zip(groups, going, strict=True):
            take_rows(came, [(out, of_q)], across)
        ctx.work, ctx.across = work, across
        ctx.save_for_backward(sink, *(x for group in kept for x in group))
        ctx.set_materialize_grads(False)
        return out, softmax_lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> Any:
        if dout is None and dlse is None:
            return (None,) * 7
        sink, *saved = ctx.saved_tensors
        sink = sink if ctx.needs_input_grad[3] else None
        work, across = ctx.work, ctx.across
        kept = [saved[first : first + 5] for first in range(0, len(saved), 5)]
        heads = sum(q.shape[1] for q, *_ in kept)
        groups = list(head_slices(heads, across.head_groups))
        if dout is None:
            dout = torch.zeros_like(room_for([x[3] for x in kept], across))
        asked: list[Heads] = [[(dout, of_q)] for of_q, _ in groups]
        if dlse is not None:
            asked.insert(0, [(dlse.t()[..., None], slice(0, heads))])
        coming = all_rows(asked, across)
        dlse = None if dlse is None else next(coming)[0][..., 0].t()
        going, dsinks = [], []
        for (of_q, _), (qs, ks, vs, found, lse), (given,) in zip(groups, kept, coming, strict=True):
            sink_of_group = None if sink is None else sink[of_q]
            dlse_of_group = None if dlse is None else dlse[of_q]
            incoming = OfWhole(given, dlse_of_group, found, lse, work.rng_state)
            *parts, dsink = gradients(work.of_heads(of_q), qs, ks, vs, sink_of_group, incoming)
            going.append(give_rows(parts, across))
            dsinks += [] if dsink is None else [dsink]
        dq, dk, dv = (room_for(x, across) for x in zip(*(x[:3] for x in kept), strict=True))
        for (of_q, of_k), came in zip(groups, going, strict=True):
            take_rows(came, [(dq, of_q), (dk, of_k), (dv, of_k)], across)
        return dq, dk, dv, torch.cat(dsinks) if dsinks else None, None, None, None
