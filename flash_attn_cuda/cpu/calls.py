"""An AttentionCall by the CPU backend. The calls are checked, contents of lengths included."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from ..call.fields import (
    AttentionCall,
    Gradients,
    Incoming,
    Results,
    Tangents,
    forms_of_results,
)
from ..call.rounding import is_known, rounded, unrounded
from ..masks.of_call import by_mask
from .dense import attention_backward, attention_forward, probabilities
from .second_order import attention_hvp, attention_jvp, hvp_of_sink
from .sequences import Sequence, append, of_entry, sequences_of
from .tiles import DEFAULT_TILING, Tiling, sink_gradient


def forward_on_cpu(
    call: AttentionCall, rng_state: Tensor, tiling: Tiling = DEFAULT_TILING
) -> Results:
    """Computes the call with the random numbers of rng_state. Rows of q that are no sequence's get
    out 0 and softmax_lse -inf.
    """
    if call.multiplies_fp8():  # in 16 bits and more, here
        call = replace(call, q=call.q.to(call.dtype()))
    call, q = replace(by_mask(call), rng_state=rng_state), call.q
    keeps = call.returns_rounding()
    dtype = call.lse_dtype() if keeps else call.result_dtype()
    out = q.new_zeros(call.out_shape(), dtype=dtype)
    softmax_lse = q.new_full(call.lse_shape(), -math.inf, dtype=call.lse_dtype())
    s_dmask = q.new_zeros(call.s_dmask_shape())
    of_heads, dtype_of_logits = forms_of_results(call)["max_logits"]
    max_logits = q.new_full(of_heads, -math.inf, dtype=dtype_of_logits)
    with torch.autocast("cpu", enabled=False):
        append(call)
        for each in sequences_of(call):
            lse = softmax_lse[each.rows]
            largest = max_logits[each.entry] if call.return_max_logits else None
            attention_forward(each.call, out[each.queries], lse, tiling, largest)
            if call.wants_s_dmask():
                seqlen_q, seqlen_k = each.call.q.shape[1], each.call.k.shape[1]
                probs = s_dmask[each.entry, :, :seqlen_q, :seqlen_k]
                probabilities(each.call, lse, probs, tiling)
    out, rounding = rounded(out, q.dtype) if keeps else (out, q.new_empty((0,), dtype=torch.int8))
    return Results(out, softmax_lse, s_dmask, rng_state, rounding, max_logits)


def jvp_on_cpu(
    call: AttentionCall,
    incoming: Incoming,
    tangents: Tangents,
    tiling: Tiling = DEFAULT_TILING,
) -> tuple[Tensor, Tensor, Tensor]:
    """(tout, tlse, tout_rounding). Rows that are no sequence's get 0."""
    keeps = is_known(incoming.out_rounding)
    incoming = _with_exact_out(incoming)
    tout = torch.zeros_like(incoming.out, memory_format=torch.contiguous_format)
    tlse = torch.zeros_like(incoming.softmax_lse, memory_format=torch.contiguous_format)
    made = replace(tangents, tout=tout, tlse=tlse)
    with torch.autocast("cpu", enabled=False):
        for each in sequences_of(replace(call, rng_state=incoming.rng_state)):
            attention_jvp(each.call, _incoming_of(incoming, each), _tangents_of(made, each), tiling)
    rounding = tout.new_empty((0,), dtype=torch.int8)
    if keeps:
        tout, rounding = rounded(tout, call.q.dtype)
    return tout, tlse, rounding


def hvp_on_cpu(
    call: AttentionCall,
    incoming: Incoming,
    tangents: Tangents,
    tiling: Tiling = DEFAULT_TILING,
) -> Gradients:
    """As backward_on_cpu, of <dout, tout> + <dlse, tlse>."""
    incoming = _with_exact_out(incoming)
    if tangents.tout is not None:
        tangents = replace(tangents, tout=unrounded(tangents.tout, tangents.tout_rounding))
    dq, dk, dv = (x.new_zeros(x.shape) for x in (call.q, call.k, call.v))
    dbias = None
    if incoming.wants_dbias and call.bias is not None:
        dbias = call.q.new_zeros(call.bias.shape, dtype=call.lse_dtype())
    with torch.autocast("cpu", enabled=False):
        for each in sequences_of(replace(call, rng_state=incoming.rng_state)):
            parts = Gradients(
                *(dq[each.queries], dk[each.keys], dv[each.keys]),
                softmax_d=None,
                dbias=of_entry(dbias, each.entry),
                dsink=None,
            )
            of_sequence = _incoming_of(incoming, each), _tangents_of(tangents, each)
            attention_hvp(each.call, *of_sequence, parts, tiling)
        dsink = hvp_of_sink(call, incoming, tangents)
    if dbias is not None and call.bias is not None:
        dbias = dbias.to(call.bias.dtype)
    return Gradients(dq, dk, dv, None, dbias, dsink)


def _incoming_of(incoming: Incoming, each: Sequence) -> Incoming:
    """A sequence's part."""
    return Incoming(
        None if incoming.dout is None else incoming.dout[each.queries],
        None if incoming.dlse is None else incoming.dlse[each.rows],
        incoming.out[each.queries],
        incoming.softmax_lse[each.rows],
        rng_state=None,
    )


def _with_exact_out(incoming: Incoming) -> Incoming:
    """With what is known of its rounding."""
    return replace(incoming, out=unrounded(incoming.out, incoming.out_rounding))


def _tangents_of(tangents: Tangents, each: Sequence) -> Tangents:
    """A sequence's part: views, where each.keys is no list of pages."""
    places = {"tq": each.queries, "tk": each.keys, "tv": each.keys}
    places |= {"tout": each.queries, "tlse": each.rows}
    parts = {
        name: None if (x := getattr(tangents, name)) is None else x[place]
        for name, place in places.items()
    }
    return Tangents(**parts, tbias=of_entry(tangents.tbias, each.entry), tsink=tangents.tsink)


def backward_on_cpu(
    call: AttentionCall, incoming: Incoming, tiling: Tiling = DEFAULT_TILING
) -> Gradients:
    """A gradient that is not wanted, or whose argument the call lacks, is None. Rows that are no
    sequence's get 0.
    """
    q, given = call.q, replace(by_mask(call), rng_state=incoming.rng_state)
    dq, dk, dv = (x.new_zeros(x.shape, dtype=call.result_dtype()) for x in (q, call.k, call.v))
    softmax_d = q.new_zeros(call.softmax_d_shape(), dtype=call.lse_dtype())
    dbias = None
    if incoming.wants_dbias and call.bias is not None:
        dbias = q.new_zeros(call.bias.shape, dtype=call.lse_dtype())
    if incoming.dout is None:
        incoming = replace(incoming, dout=torch.zeros_like(incoming.out))
    incoming = _with_exact_out(incoming)
    with torch.autocast("cpu", enabled=False):
        for each in sequences_of(given):
            parts = Gradients(
                *(dq[each.queries], dk[each.keys], dv[each.keys], softmax_d[each.rows]),
                dbias=of_entry(dbias, each.entry),
                dsink=None,
            )
            attention_backward(each.call, _incoming_of(incoming, each), parts, tiling)
        dsink = sink_gradient(call, incoming.softmax_lse, softmax_d)
    if dbias is not None and call.bias is not None:
        dbias = dbias.to(call.bias.dtype)
    return Gradients(dq, dk, dv, softmax_d, dbias, dsink)
