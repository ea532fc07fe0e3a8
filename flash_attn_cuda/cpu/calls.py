"""An AttentionCall by the CPU backend. The calls are checked, contents of lengths included."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from .. import cpu
from ..call import AttentionCall, Gradients, Incoming, Results
from ..checks.lengths import MOST_BOUND_WITH_ORIGIN


def forward_on_cpu(call: AttentionCall, rng_state: Tensor) -> Results:
    """With the random numbers of rng_state."""
    options = _options(call, rng_state, by_columns=False)
    q, k, v = call.q, call.k, call.v
    s_dmask = q.new_empty((0,))
    with torch.autocast("cpu", enabled=False):
        if call.over_cache:
            return Results(*_over_cache(call, options), s_dmask, rng_state)
        if not call.is_packed():
            out, softmax_lse = cpu.attention_forward(q, k, v, options)
            if call.wants_s_dmask():
                s_dmask = cpu.probabilities(q, k, softmax_lse, options)
            return Results(out, softmax_lse, s_dmask, rng_state)
        lengths = _lengths(call) | {"block_table": call.block_table}
        out, softmax_lse = cpu.varlen_forward(
            q, k, v, options=options, origin=call.origin, **lengths
        )
        if call.wants_s_dmask():
            s_dmask = cpu.varlen_probabilities(
                *(q, k, softmax_lse),
                max_seqlen_q=call.max_seqlen_q,
                max_seqlen_k=call.max_seqlen_k,
                options=options,
                **lengths,
            )
        return Results(out, softmax_lse, s_dmask, rng_state)


def backward_on_cpu(call: AttentionCall, incoming: Incoming) -> Gradients:
    """dbias is empty where it is not wanted."""
    options = _options(call, incoming.rng_state, by_columns=True)
    dtype = call.lse_dtype()
    sums = None
    if incoming.wants_dbias and call.bias is not None:
        sums = call.q.new_zeros(tuple(call.bias.shape), dtype=dtype)
    dout = torch.zeros_like(incoming.out) if incoming.dout is None else incoming.dout
    tensors = (dout, call.q, call.k, call.v, incoming.out, incoming.softmax_lse)
    given: dict[str, Any] = {"options": options, "dlse": incoming.dlse, "dbias": sums}
    with torch.autocast("cpu", enabled=False):
        if call.is_packed():
            given |= _lengths(call) | {"origin": call.origin}
            found = cpu.varlen_backward(*tensors, **given)
        else:
            found = cpu.attention_backward(*tensors, **given)
        dq, dk, dv, softmax_d = found
        of_bias = call.q.dtype if call.bias is None else call.bias.dtype
        dbias = call.q.new_empty((0,), dtype=of_bias) if sums is None else sums.to(of_bias)
        dsink = _sink_gradient(call, incoming, softmax_d)
        return Gradients(dq, dk, dv, softmax_d, dbias, dsink)


def _sink_gradient(call: AttentionCall, incoming: Incoming, softmax_d: Tensor) -> Tensor:
    """(heads_q,): the sum over queries of exp(sink - lse) * (dlse - rowsum(dout * out)), which is
    -softmax_d; rows that are no query's have lse -inf.
    """
    if call.sink is None:
        return call.q.new_empty((0,), dtype=call.lse_dtype())
    lse = incoming.softmax_lse
    of_rows = torch.exp(call.sink[:, None] - lse) * softmax_d[..., : lse.shape[-1]]
    of_rows = of_rows.masked_fill(lse == -torch.inf, 0.0)
    return -(of_rows.sum(-1) if call.is_packed() else of_rows.sum((0, 2)))


def _options(
    call: AttentionCall, rng_state: Tensor | None, *, by_columns: bool
) -> cpu.AttentionOptions:
    visibility = None
    if by_columns and call.block_columns is not None:
        visibility = cpu.Visibility.of_columns(call.block_columns, call.mask_bits)
    elif call.block_rows is not None:
        visibility = cpu.Visibility.of_rows(call.block_rows, call.mask_bits)
    right = 0 if call.causal else call.window_size_right
    left, right = max(call.window_size_left, -1), max(right, -1)
    if call.origin is not None:
        left, right = (-1 if x > MOST_BOUND_WITH_ORIGIN else x for x in (left, right))
    return cpu.AttentionOptions(
        softmax_scale=call.scale(),
        window=(left, right),
        softcap=max(call.softcap, 0.0),
        alibi_slopes=call.alibi_slopes,
        dropout_p=call.dropout_p,
        rng_state=rng_state if call.dropout_p > 0.0 else None,
        fp32_results=call.fp32_results,
        visibility=visibility,
        bias=call.bias,
        sink=call.sink,
    )


def _lengths(call: AttentionCall) -> dict[str, Any]:
    starts_of_keys = call.cu_seqlens_k
    if starts_of_keys is None:  # of pages, where nothing but differences counts
        assert call.seqused_k is not None  # checked
        starts_of_keys = pad(call.seqused_k.cumsum(0, dtype=torch.int32), (1, 0))
    names = ("cu_seqlens_q", "seqused_q", "seqused_k", "leftpad_k")
    return {"cu_seqlens_k": starts_of_keys, **{name: getattr(call, name) for name in names}}


def _over_cache(call: AttentionCall, options: cpu.AttentionOptions) -> tuple[Tensor, Tensor]:
    return cpu.kvcache_forward(
        *(call.q, call.k, call.v, call.k_new, call.v_new, options),
        rotary_cos=call.rotary_cos,
        rotary_sin=call.rotary_sin,
        rotary_interleaved=call.rotary_interleaved,
        cache_seqlens=call.seqused_k if call.seqlen_k is None else call.seqlen_k,
        cache_batch_idx=call.cache_batch_idx,
        cache_leftpad=call.leftpad_k,
        block_table=call.block_table,
        cu_seqlens_q=call.cu_seqlens_q,
        cu_seqlens_k_new=call.cu_seqlens_k_new,
    )
