"""Ulysses: attention of all rows of a rank's share of the heads. What it reads has come before it
begins, and what it gives goes back when it has ended: heads in groups, sent beside the attention to
others, gave nothing (benchmarks/results/experiments.md).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..call.fields import Tangents
from .attention import (
    OfWhole,
    Work,
    attend_to_keys,
    gathered_jvp,
    gradient_of_sink,
    write_gradients_of_rows,
)
from .exchange import of_all_ranks
from .groups import rank_of
from .head_exchange import Across, all_rows, own_rows, side_by_side


class Kept(NamedTuple):
    """What derivatives read: all rows of this rank's heads."""

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    softmax_lse: Tensor
    out_rounding: Any  # a tensor, of tangents None


def on_own_heads(work: Work, heads_q: int) -> tuple[Across, Work, slice]:
    """(who shares out the heads, the work on this rank's, which of all query heads those are).
    heads_q: of a rank.
    """
    across = work.across
    assert across is not None
    first = heads_q * rank_of(across.group)
    heads = slice(first, first + heads_q)
    settings = dict(work.settings)
    if settings["alibi_slopes"] is not None:
        settings["alibi_slopes"] = settings["alibi_slopes"][..., heads]
    return across, replace(work, across=None, settings=settings, first_head=first), heads


def exchanged_forward(
    work: Work, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None
) -> tuple[tuple[Tensor, ...], Kept, Tensor]:
    """((out,) or (out, softmax_lse) of this rank's rows, what is kept, max_logits of all heads)."""
    assert work.across is not None
    across, own, heads = on_own_heads(work, q.shape[1] // work.across.ranks)
    q, k, v = all_rows((q, k, v), across)
    found = attend_to_keys(own, q, k, v, None if sink is None else sink[heads])
    largest = found.max_logits
    if work.sequences is not None:
        by_rank = of_all_ranks(largest, across.group).unflatten(0, (across.ranks, work.sequences))
        largest = by_rank.transpose(0, 1).flatten(1)
    results = own_results(work, across, found.out, found.softmax_lse)
    return results, Kept(q, k, v, *found[:-1]), largest


def own_results(work: Work, across: Across, out: Tensor, softmax_lse: Tensor) -> tuple[Tensor, ...]:
    """(out,) or (out, softmax_lse), or their tangents, of this rank's rows."""
    results = own_rows(out.flatten(1), (out,), across)
    if not work.returns_lse:
        return results
    rows = by_row(softmax_lse)
    (rows_of_lse,) = own_rows(rows.flatten(1), (rows,), across)
    # A view that a Function returns could not be written in place.
    return *results, by_head(rows_of_lse).clone(memory_format=torch.contiguous_format)


def by_row(softmax_lse: Tensor) -> Tensor:
    """(heads, rows) as (rows, heads, 1)."""
    return softmax_lse.t()[..., None]


def by_head(rows: Tensor) -> Tensor:
    return rows[..., 0].t()


def exchanged_backward(
    work: Work,
    kept: Kept,
    sink: Tensor | None,
    dout: Tensor | None,
    dlse: Tensor | None,
) -> tuple[Tensor | None, ...]:
    """(dq, dk, dv, dsink) of this rank's rows; sink: where its gradient is wanted. Zeros travel
    where this rank's loss leaves a result out: those of others may not.
    """
    q, k, v, out, softmax_lse, rounding = kept
    across, own, heads = on_own_heads(work, q.shape[1])
    (dout,) = all_rows((or_zeros(dout, out, across),), across)
    if work.returns_lse:
        of_rows = or_zeros(None if dlse is None else by_row(dlse), by_row(softmax_lse), across)
        dlse = by_head(*all_rows((of_rows,), across))
    incoming = OfWhole(dout, dlse, out, softmax_lse, own.settings["rng_state"], rounding)
    room, gradients = side_by_side((q, k, v))
    write_gradients_of_rows(own, q, k, v, incoming, gradients)
    dsink = None
    if sink is not None:
        dsink = torch.zeros_like(sink)
        dsink[heads] = gradient_of_sink(q, k, v, sink[heads], incoming)
    return *own_rows(room, gradients, across), dsink


def exchanged_jvp(
    work: Work, kept: Kept, sink: Tensor | None, direction: Tangents
) -> tuple[tuple[Tensor, ...], Kept]:
    """((tout,) or (tout, tlse) of this rank's rows, tangents of what is kept). Zeros travel where
    the rank has no tangents: others may have some.
    """
    q, k, v, out, softmax_lse, rounding = kept
    across, own, heads = on_own_heads(work, q.shape[1])
    given = ((direction.tq, q), (direction.tk, k), (direction.tv, v))
    tq, tk, tv = all_rows([or_zeros(t, x, across) for t, x in given], across)
    tsink = direction.tsink
    tout, tlse = gathered_jvp(
        own,
        *(q, k, v),
        None if sink is None else sink[heads],
        OfWhole(None, None, out, softmax_lse, own.settings["rng_state"], rounding),
        Tangents(tq=tq, tk=tk, tv=tv, tsink=None if tsink is None else tsink[heads]),
    )
    return own_results(work, across, tout, tlse), Kept(tq, tk, tv, tout, tlse, None)


def or_zeros(x: Tensor | None, like: Tensor, across: Across) -> Tensor:
    """x, of this rank's rows of all heads, or zeros; `like` has all rows of this rank's heads."""
    if x is not None:
        return x
    rows, heads, dim = like.shape
    return like.new_zeros((rows // across.ranks, across.ranks * heads, dim))
