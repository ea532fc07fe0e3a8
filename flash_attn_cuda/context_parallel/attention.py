"""Attention of one rank's queries over the keys of all ranks: forward, backward, and the derivative
in a direction. derivatives.py makes them autograd's.

all_gather: every rank gets all keys that it sees, some heads at a time, and each query meets all
its keys in one call, so that results are those of one GPU. ring: the keys of one rank after the
other, each with a part of the softmax, which merge.py joins: less memory, more calls. Either way a
transfer is asked for before the kernels that do not need it. The backward fetches keys again rather
than keep them, and reads the whole softmax's out and lse, so that its parts only have to be added.
The derivative in a direction fetches them again too, with their tangents.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.distributed import ProcessGroup

from ..call.fields import AttentionCall, Incoming, Tangents
from ..call.rounding import unrounded
from ..call.tensors import lse_dtype
from ..cpu.tiles import sink_gradient
from ..functions.arguments import is_plain_cuda_call
from ..operators.derivatives import run_gradients_operator, run_jvp_operator, run_operator
from ..operators.support import call_extension
from . import steps
from .exchange import Exchanges, reordered
from .head_exchange import Across
from .load import HeadGroups, even_groups
from .merge import add_sink_, merge_, raise_to_largest, room_for_max_logits, round_into
from .schedule import DeviceCall, Hop, Schedule
from .steps import Exchange


@dataclass(eq=False)
class Work:
    """One attention of a rank. scheme: its name; settings: fields of all its AttentionCalls;
    first_head: the first of q's heads in the whole; head_groups: the groups in which heads of keys
    travel between ranks that gather them, of the forward and of the backward; across: ranks that
    share out the heads; returns_lse: whether rows of it travel back to them; number: where it is
    traced, the number_in_graph; keeps_rounding: for a backward, what rounding takes from out;
    sequences: of how many max_logits are returned; None: they are not.
    """

    scheme: str
    schedule: Schedule
    settings: dict[str, Any]
    group: ProcessGroup | None
    head_groups: tuple[HeadGroups, HeadGroups]
    first_head: int = 0
    across: Across | None = None
    returns_lse: bool = True
    number: int = 0
    keeps_rounding: bool = False
    sequences: int | None = None

    def given(self, alibi_slopes: Tensor | None, rng_state: Tensor | None) -> Work:
        """With these among the settings."""
        tensors = {"alibi_slopes": alibi_slopes, "rng_state": rng_state}
        return replace(self, settings=self.settings | tensors)

    def over(
        self, call: DeviceCall, q: Tensor, k: Tensor, v: Tensor, heads: slice
    ) -> AttentionCall:
        """The call over these rows; heads: which of the work's query heads q holds."""
        packed, settings = call.packed, dict(self.settings)
        if not packed.is_masked:
            settings |= {"window_size_left": -1, "window_size_right": -1}
        slopes = settings.get("alibi_slopes")
        if slopes is not None:
            slopes = slopes[..., heads]
            if slopes.dim() == 2:
                slopes = slopes.index_select(0, call.sequences)
            settings["alibi_slopes"] = slopes
        origin = call.origin
        first_head = self.first_head + heads.start
        if origin is not None and first_head:
            origin = origin.clone()
            origin[:, 0] += first_head
        return AttentionCall(
            q,
            k,
            v,
            cu_seqlens_q=call.cu_seqlens_q,
            cu_seqlens_k=call.cu_seqlens_k,
            max_seqlen_q=packed.max_seqlen_q,
            max_seqlen_k=packed.max_seqlen_k,
            origin=origin,
            **settings,
        )


def head_slices(heads_q: int, groups: HeadGroups) -> Iterator[tuple[slice, slice]]:
    """(query heads, key heads) of each group."""
    of_each, first = heads_q // sum(groups), 0
    for end in accumulate(groups):
        yield slice(of_each * first, of_each * end), slice(first, end)
        first = end


class Found(NamedTuple):
    """Of all the rank's rows and heads."""

    out: Tensor
    softmax_lse: Tensor
    out_rounding: Tensor  # empty where it is not kept
    max_logits: Tensor  # (sequences, heads) of all ranks; empty where they are not returned


def room_for_rounding(work: Work, out: Tensor) -> Tensor:
    """Like out, in a dtype of 16 bits, where what rounding takes from it is kept; else empty."""
    keeps = work.keeps_rounding and out.dtype != lse_dtype(out.dtype)
    return out.new_empty(out.shape if keeps else (0,), dtype=torch.int8)


@dataclass(frozen=True, eq=False)
class OfWhole:
    """What the rank's derivatives are given, of all its rows and heads."""

    dout: Tensor | None
    dlse: Tensor | None
    out: Tensor
    softmax_lse: Tensor
    rng_state: Tensor | None
    out_rounding: Tensor  # empty: out alone is known

    def of_results(self) -> list[Tensor]:
        """Results, which a checkpoint computes again first, and the gradients of a backward."""
        return [x for x in (self.out, self.dout, self.dlse) if x is not None]

    def of_rows(self, rows: slice, heads: slice) -> Incoming:
        """The same for a call over some of them."""
        return Incoming(
            None if self.dout is None else self.dout[rows, heads],
            None if self.dlse is None else self.dlse[heads, rows].contiguous(),
            self.out[rows, heads],
            self.softmax_lse[heads, rows].contiguous(),
            self.rng_state,
            out_rounding=self.out_rounding[rows, heads] if self.out_rounding.dim() > 1 else None,
        )


def attend_to_keys(work: Work, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None) -> Found:
    """Of q over the keys of all ranks that keys travel between."""
    run = merged_forward if work.schedule.merges else gathered_forward
    exchanges = Exchanges(work.group, work.number)
    rng_state = work.settings.get("rng_state")
    if rng_state is not None and is_compiling():
        exchanges.unread.append(rng_state)  # comes from the first rank, also where nothing is drawn
    found: Found = run(work, exchanges, q, k, v, sink)
    if work.sequences is not None:
        found = found._replace(max_logits=exchanges.largest(found.max_logits))
        exchanges.end_with(found.max_logits)
    exchanges.end_with(found.out, found.softmax_lse)
    return found


def gradients_of_rows(
    work: Work, q: Tensor, k: Tensor, v: Tensor, incoming: OfWhole
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv)."""
    if work.schedule.merges:
        return merged_backward(work, q, k, v, incoming)
    found = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    gathered_backward(work, q, k, v, incoming, found)
    return found


def write_gradients_of_rows(
    work: Work, q: Tensor, k: Tensor, v: Tensor, incoming: OfWhole, into: Sequence[Tensor]
) -> None:
    """The same into given tensors."""
    if not work.schedule.merges:
        gathered_backward(work, q, k, v, incoming, into)
        return
    for target, gradient in zip(into, merged_backward(work, q, k, v, incoming), strict=True):
        target.copy_(gradient)


def gradient_of_sink(q: Tensor, k: Tensor, v: Tensor, sink: Tensor, incoming: OfWhole) -> Tensor:
    assert incoming.dout is not None
    softmax_lse, dlse = incoming.softmax_lse, incoming.dlse
    out = unrounded(incoming.out, incoming.out_rounding)
    softmax_d = (incoming.dout.to(softmax_lse.dtype) * out).sum(-1).t()
    softmax_d = softmax_d if dlse is None else softmax_d - dlse
    found = sink_gradient(AttentionCall(q, k, v, sink=sink), softmax_lse, softmax_d)
    assert found is not None
    return found


def rows_of(x: Tensor, rows: steps.Rows) -> Tensor:
    return x[rows[0] : rows[1]]


# -- all at once -----------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Arrival:
    """Keys and values of some heads, their tangents where those travel too, and the hop whose calls
    they are for.
    """

    hop: Hop
    heads_q: slice
    heads_k: slice
    k: Tensor
    v: Tensor
    tk: Tensor | None = None
    tv: Tensor | None = None


def arrivals(
    work: Work,
    exchanges: Exchanges,
    heads_q: int,
    k: Tensor,
    v: Tensor,
    tk: Tensor | None = None,
    tv: Tensor | None = None,
) -> Iterator[Arrival]:
    """The rank's own keys, first, or in a backward last, and those of all ranks, a group of heads
    at a time. Tangents travel where they are given.

    All groups are asked for before any work: a rank that has much of it would otherwise hold up
    what others wait for.
    """
    here = [x for x in work.schedule.hops if x.exchange is None]
    others = [x for x in work.schedule.hops if x.exchange is not None]
    backward = len(exchanges.after) > 0
    groups = list(head_slices(heads_q, work.head_groups[backward])) if others else []
    sent = [x for x in (k, v, tk, tv) if x is not None]
    widths = [x.shape[-1] for x in sent]
    coming: list[tuple[Hop, tuple[slice, slice], Tensor]] = []
    for hop in others:
        assert hop.exchange is not None
        for heads in groups:
            came = exchanges.send(hop.exchange, [x[:, heads[1]] for x in sent])
            coming.append((hop, heads, came))

    def owned() -> Iterator[Arrival]:
        for hop in here:
            yield Arrival(hop, slice(0, heads_q), slice(0, k.shape[1]), k, v, tk, tv)

    if not backward:
        yield from owned()
    while coming:
        hop, heads, came = coming.pop(0)
        columns = reordered(exchanges.arrived(came), hop.arrival)
        del came
        yield Arrival(hop, *heads, *columns.split(widths, -1))
    if backward:
        yield from owned()


def gathered_forward(
    work: Work, exchanges: Exchanges, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None
) -> Found:
    rows, used = work.schedule.rows, work.schedule.used_rows
    out = q.new_empty((rows, q.shape[1], v.shape[-1]))
    softmax_lse = q.new_empty((q.shape[1], rows), dtype=lse_dtype(q.dtype))
    rounding, max_logits = room_for_rounding(work, out), room_for_max_logits(work.sequences, q)
    out[used:] = 0.0
    rounding[used:] = 0
    softmax_lse[:, used:] = -torch.inf
    for keys in arrivals(work, exchanges, q.shape[1], k, v):
        heads = keys.heads_q
        sink_of_heads = None if sink is None else sink[heads]
        for call in keys.hop.calls:
            of_q, of_k = slice(*call.packed.q), slice(*call.packed.k)
            rows_of_call = work.over(call, q[of_q, heads], keys.k[of_k], keys.v[of_k], heads)
            rows_of_call.return_max_logits = work.sequences is not None
            largest = attend_into(
                replace(rows_of_call, sink=sink_of_heads),
                out[of_q, heads],
                softmax_lse[heads, of_q],
                rounding[of_q, heads] if rounding.dim() > 1 else None,
            )
            raise_to_largest(max_logits[..., heads], call.sequences, largest)
    return Found(out, softmax_lse, rounding, max_logits)


def attend_into(
    call: AttentionCall, out: Tensor, softmax_lse: Tensor, rounding: Tensor | None
) -> Tensor | None:
    """The call's max_logits."""
    call.keeps_rounding = rounding is not None
    if is_plain_cuda_call(call.q, call.k, call.v):
        found = call_extension("forward", out.device, replace(call, out=out))
    else:
        found = run_operator(call)
        out.copy_(found.out)
    softmax_lse.copy_(found.softmax_lse)
    if rounding is not None:
        rounding.copy_(found.out_rounding)
    return found.max_logits


def gathered_backward(
    work: Work, q: Tensor, k: Tensor, v: Tensor, incoming: OfWhole, into: Sequence[Tensor]
) -> None:
    """Writes dq, dk and dv."""
    dtype = incoming.softmax_lse.dtype
    dq, dk, dv = into
    for gradient in (dq, dk, dv):
        gradient[work.schedule.used_rows :] = 0.0
    going: list[tuple[Exchange, slice, Tensor]] = []
    # The rank's own keys last: meanwhile gradients of the others go back.
    exchanges = Exchanges(work.group, work.number, incoming.of_results())
    for keys in arrivals(work, exchanges, q.shape[1], k, v):
        hop, heads = keys.hop, keys.heads_q
        # What others see of the keys they add to, in fp32, before it is rounded.
        dkv = None if hop.exchange is None else side_by_side(keys.k, keys.v, dtype)
        of_k_and_v = (dk, dv) if dkv is None else split_like(dkv, k, v)
        for call in hop.calls:
            of_q, of_k = slice(*call.packed.q), slice(*call.packed.k)
            rows_of_call = work.over(call, q[of_q, heads], keys.k[of_k], keys.v[of_k], heads)
            gradients_into(
                replace(rows_of_call, fp32_results=dkv is not None),
                incoming.of_rows(of_q, heads),
                dq[of_q, heads],
                *(x[of_k] for x in of_k_and_v),
            )
        if dkv is None:
            continue
        assert hop.exchange is not None
        back = reordered(dkv, hop.departure)
        for rows, places in hop.again:
            rows_of(back, rows).add_(rows_of(dkv, places))
        going.append((hop.exchange, keys.heads_k, exchanges.send_back(hop.exchange, back)))
    if going:
        finish_cut_rows(work.schedule.cut_rows, exchanges, going, dk, dv, dtype)
    exchanges.end_with(dq, dk, dv)


def gradients_into(
    call: AttentionCall,
    incoming: Incoming,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    *,
    accumulate: bool = False,
) -> None:
    """Writes them, rounded where one is of another dtype than the call's results, or adds to them,
    where all are of that dtype.
    """
    targets = {"dq": dq, "dk": dk, "dv": dv}
    written: dict[str, Any] = {}
    if is_plain_cuda_call(call.q, call.k, call.v):
        written = {name: x for name, x in targets.items() if x.dtype == call.result_dtype()}
        given = replace(incoming, **written, accumulate=accumulate)
        found = call_extension("backward", dq.device, call, given)
    else:
        found = run_gradients_operator(call, incoming)
    for name, target in targets.items():
        if name in written:
            continue
        gradient = getattr(found, name)
        if accumulate:
            target.add_(gradient)
        else:
            target.copy_(gradient)


def finish_cut_rows(
    rows: Sequence[steps.Rows],
    exchanges: Exchanges,
    going: Sequence[tuple[Exchange, slice, Tensor]],
    dk: Tensor,
    dv: Tensor,
    dtype: torch.dtype,
) -> None:
    """Writes these rows of dk and dv: the sums of what comes from all ranks."""
    begin, end = (rows[0][0], rows[-1][1]) if rows else (0, 0)
    sums = side_by_side(dk[begin:end], dv[begin:end], dtype).zero_()
    for exchange, heads, came in going:
        exchanges.add_back(exchange, came, sums[:, heads], first_row=begin)
    for first, last in rows:
        for gradient, total in zip((dk, dv), split_like(sums, dk, dv), strict=True):
            gradient[first:last] = total[first - begin : last - begin]


def side_by_side(k: Tensor, v: Tensor, dtype: torch.dtype) -> Tensor:
    """Room for the columns of both, as gradients travel."""
    return k.new_empty((*k.shape[:2], k.shape[-1] + v.shape[-1]), dtype=dtype)


def split_like(x: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    first, second = x.split((k.shape[-1], v.shape[-1]), -1)
    return first, second


def gathered_jvp(
    work: Work,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink: Tensor | None,
    of_forward: OfWhole,
    direction: Tangents,
) -> tuple[Tensor, Tensor]:
    """(tout, tlse): each call has all keys of its queries, and so the whole of their tangents."""
    tout, tlse = (torch.zeros_like(x) for x in (of_forward.out, of_forward.softmax_lse))
    tq, tk, tv, tsink = direction.tq, direction.tk, direction.tv, direction.tsink
    if any(hop.exchange is not None for hop in work.schedule.hops):
        # Other ranks may have tangents where this one has none.
        tk, tv = (torch.zeros_like(x) if t is None else t for x, t in ((k, tk), (v, tv)))
    exchanges = Exchanges(work.group, work.number)
    for keys in arrivals(work, exchanges, q.shape[1], k, v, tk, tv):
        heads = keys.heads_q
        for call in keys.hop.calls:
            of_q, of_k = slice(*call.packed.q), slice(*call.packed.k)
            rows_of_call = work.over(call, q[of_q, heads], keys.k[of_k], keys.v[of_k], heads)
            of_call = run_jvp_operator(
                replace(rows_of_call, sink=None if sink is None else sink[heads]),
                of_forward.of_rows(of_q, heads),
                Tangents(
                    tq=None if tq is None else tq[of_q, heads],
                    tk=None if keys.tk is None else keys.tk[of_k],
                    tv=None if keys.tv is None else keys.tv[of_k],
                    tsink=None if tsink is None else tsink[heads],
                ),
            )
            tout[of_q, heads], tlse[heads, of_q] = of_call[:2]
    return tout, tlse


# -- hop by hop ------------------------------------------------------------------------------------


def hops_with_keys(
    work: Work, exchanges: Exchanges, k: Tensor, v: Tensor
) -> Iterator[tuple[Hop, Tensor, Tensor]]:
    """Each hop and its keys, the rank's own first, those of the next on their way."""
    own, *hops = work.schedule.hops
    coming: list[Tensor] = []

    def ask(number: int) -> None:
        exchange = hops[number].exchange
        assert exchange is not None
        coming.append(exchanges.send(exchange, (k, v)))

    if hops:
        ask(0)
    yield own, k, v
    for number, hop in enumerate(hops):
        if number + 1 < len(hops):
            ask(number + 1)
        yield hop, *split_like(exchanges.arrived(coming.pop(0)), k, v)


def merged_forward(
    work: Work, exchanges: Exchanges, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None
) -> Found:
    every = slice(0, q.shape[1])
    merged: tuple[Tensor, Tensor] | None = None
    narrow: Tensor | None = None  # out in q's dtype, as far as the last call has finished it
    rounding = q.new_empty((0,), dtype=torch.int8)  # and what that took from it
    max_logits = room_for_max_logits(work.sequences, q)
    finished = slice(0, 0)
    for call, keys, values, is_last in calls_with_keys(work, exchanges, k, v):
        rows = slice(*call.packed.q)
        call_of_rows = work.over(call, q[rows], keys, values, every)
        call_of_rows.return_max_logits = work.sequences is not None
        found = run_operator(replace(call_of_rows, fp32_results=True))
        part, part_lse = found.out, found.softmax_lse
        raise_to_largest(max_logits, call.sequences, found.max_logits)
        if merged is None:
            merged = (
                whole_of(part, rows, q.shape[0], 0, 0.0),
                whole_of(part_lse, rows, q.shape[0], 1, -torch.inf),
            )
            continue
        out, softmax_lse = merged
        if is_last and sink is None and q.dtype != out.dtype:
            narrow = torch.empty_like(out, dtype=q.dtype)
            rounding = room_for_rounding(work, narrow)
            finished = rows
        into = None if narrow is None else narrow[rows]
        taken = rounding[rows] if rounding.dim() > 1 else None
        merge_(out[rows], softmax_lse[:, rows], part, part_lse, into, taken)
    if merged is None:
        out = q.new_zeros((*q.shape[:2], v.shape[-1]))
        unseen = torch.full(
            (q.shape[1], q.shape[0]), -torch.inf, dtype=lse_dtype(q.dtype), device=q.device
        )
        return Found(out, unseen, room_for_rounding(work, out).zero_(), max_logits)
    out, softmax_lse = merged
    if sink is not None:
        add_sink_(out, softmax_lse, sink)
    if narrow is None:
        narrow = torch.empty_like(out, dtype=q.dtype)
        rounding = room_for_rounding(work, narrow)
    for others in (slice(0, finished.start), slice(finished.stop, q.shape[0])):
        round_into(out[others], narrow[others], rounding[others] if rounding.dim() > 1 else None)
    return Found(narrow, softmax_lse, rounding, max_logits)


def calls_with_keys(
    work: Work, exchanges: Exchanges, k: Tensor, v: Tensor
) -> Iterator[tuple[DeviceCall, Tensor, Tensor, bool]]:
    """(call, its keys, its values, whether it is the last one) of all hops."""
    left = sum(len(hop.calls) for hop in work.schedule.hops)
    for hop, keys, values in hops_with_keys(work, exchanges, k, v):
        for call in hop.calls:
            left -= 1
            yield call, rows_of(keys, call.packed.k), rows_of(values, call.packed.k), left == 0


def whole_of(part: Tensor, rows: slice, total: int, dim: int, value: float) -> Tensor:
    """`total` rows, those of the part and around them `value`; the part itself where it is all."""
    if part.shape[dim] == total:
        return part
    shape = list(part.shape)
    shape[dim] = total
    whole = part.new_full(shape, value)
    whole.narrow(dim, rows.start, part.shape[dim]).copy_(part)
    return whole


def merged_backward(
    work: Work, q: Tensor, k: Tensor, v: Tensor, incoming: OfWhole
) -> tuple[Tensor, Tensor, Tensor]:
    """Where there are others' keys and an even number of heads has them, half of the heads meet
    the rank's own keys while the first of the others' are on their way, and the other half while
    the last gradients are on their way back.
    """
    dtype, (own, *others) = incoming.softmax_lse.dtype, work.schedule.hops
    heads_q, heads_k = q.shape[1], k.shape[1]
    halves = 2 if others and heads_k % 2 == 0 else 1
    first, *last = head_slices(heads_q, even_groups(heads_k, halves))
    every = slice(0, heads_q), slice(0, heads_k)
    dq = torch.empty_like(q, dtype=dtype)
    dkv = side_by_side(k, v, dtype)
    writes = begins_with_all_rows(own.calls, q.shape[0], k.shape[0])
    added_to = last if writes else [every]
    for of_q, of_k in added_to:
        dq[:, of_q] = 0.0
        dkv[:, of_k] = 0.0
    going: list[tuple[Exchange, Tensor]] = []
    exchanges = Exchanges(work.group, work.number, incoming.of_results())
    for hop, keys, values in hops_with_keys(work, exchanges, k, v):
        if hop.exchange is None:
            add_gradients(work, hop, first, q, keys, values, incoming, dq, dkv, writes=writes)
            continue
        given = side_by_side(keys, values, dtype).zero_()
        add_gradients(work, hop, every, q, keys, values, incoming, dq, given)
        going.append((hop.exchange, exchanges.send_back(hop.exchange, given)))
    for heads in last:
        add_gradients(work, own, heads, q, k, v, incoming, dq, dkv)
    for exchange, came in going:
        exchanges.add_back(exchange, came, dkv)
    exchanges.end_with(dq, dkv)
    dk, dv = split_like(dkv, k, v)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def add_gradients(
    work: Work,
    hop: Hop,
    heads: tuple[slice, slice],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    incoming: OfWhole,
    dq: Tensor,
    dkv: Tensor,
    *,
    writes: bool = False,
) -> None:
    """Adds to dq and dkv, columns of dk and dv side by side, what the hop's calls give for these
    heads of queries and keys. writes: the first call finds nothing there.
    """
    heads_q, heads_k = heads
    for number, call in enumerate(hop.calls):
        of_q, of_k = slice(*call.packed.q), slice(*call.packed.k)
        rows_of_call = work.over(
            call, q[of_q, heads_q], k[of_k, heads_k], v[of_k, heads_k], heads_q
        )
        gradients_into(
            replace(rows_of_call, fp32_results=True),
            incoming.of_rows(of_q, heads_q),
            dq[of_q, heads_q],
            *split_like(dkv[of_k, heads_k], k, v),
            accumulate=number > 0 or not writes,
        )


def begins_with_all_rows(calls: Sequence[DeviceCall], rows_q: int, rows_k: int) -> bool:
    """Whether the first call is of all queries and keys."""
    places = [(call.packed.q, call.packed.k) for call in calls[:1]]
    return places == [((0, rows_q), (0, rows_k))]
