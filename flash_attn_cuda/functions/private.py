"""FlashAttention-2's private functions, which others build on: its names, arguments and order.

Context parallelism, for one, calls them by keyword. They go through operators/attention.py.
window_size_left and window_size_right are integers, each negative for unlimited, otherwise as
flash_attn_func's window_size.
"""

from __future__ import annotations

from typing import TypeAlias

from torch import Tensor

from ..call.fields import DIFFERENTIABLE, TENSORS, AttentionCall, Incoming
from ..call.tensors import check_no_gradient, refuse_forward_gradients
from ..operators.attention import run_backward_operator
from ..operators.derivatives import run_operator
from ..operators.support import arguments_of, check_vmap_randomness
from .arguments import packed_lengths

# out, softmax_lse, S_dmask, rng_state
Forward: TypeAlias = "tuple[Tensor, Tensor, Tensor | None, Tensor | None]"


def _flash_attn_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    return_softmax: bool,
    deterministic: bool = False,
) -> Forward:
    """FlashAttention-2's private forward, on q (B, Sq, Hq, D), k (B, Sk, Hk, D), v (B, Sk, Hk, Dv).

    Returns (out, softmax_lse, S_dmask, rng_state): out (B, Sq, Hq, Dv); softmax_lse (B, Hq, Sq),
    the natural logarithm, fp32 (fp64 for fp64 inputs); rng_state, (seed, offset) of the dropout,
    int64, and S_dmask (B, Hq, Sq, Sk) if return_softmax, both empty without dropout. On CUDA D and
    Dv must be multiples of 8. Errors as flash_attn_func. Unlike FlashAttention-2's, it is
    differentiable in q, k, v; `deterministic`, of its backward, is an addition.
    """
    call = AttentionCall(
        *(q, k, v, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap),
        alibi_slopes=alibi_slopes,
        deterministic=deterministic,
        return_softmax=return_softmax,
    )
    return _run(call)


def _flash_attn_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None = None,
    dlse: Tensor | None = None,
) -> Tensor:
    """FlashAttention-2's private backward: writes dq, dk, dv (None: not wanted).

    Returns softmax_d (B, Hq, Sq rounded up to 128), rowsum(dout * out) - dlse in softmax_lse's
    dtype, zero beyond Sq. `dlse` (B, Hq, Sq), the gradient of softmax_lse, is an addition to
    FlashAttention-2's arguments. rng_state is the forward's, and of no use without dropout.
    """
    call = AttentionCall(
        *(q, k, v, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap),
        alibi_slopes=alibi_slopes,
        deterministic=deterministic,
    )
    incoming = Incoming(dout, dlse, out, softmax_lse, rng_state, dq=dq, dk=dk, dv=dv)
    return _run_backward(call, incoming)


def _flash_attn_varlen_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int | Tensor | None,
    max_seqlen_k: int | Tensor | None,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    return_softmax: bool = False,
    block_table: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    seqused_k: Tensor | None = None,
    zero_tensors: bool = False,
    num_splits: int = 0,
    seqused_q: Tensor | None = None,
    batch_invariant: bool = False,
    deterministic: bool = False,
    sink: Tensor | None = None,
) -> Forward:
    """FlashAttention-2's private forward of packed sequences, q (total_q, Hq, D).

    Arguments as flash_attn_varlen_func; those behind num_splits are additions, and zero_tensors has
    no effect, as all rows are written. Returns (out, softmax_lse (Hq, total_q), S_dmask (B, Hq,
    max_seqlen_q, max_seqlen_k), rng_state), the last two empty without dropout. On CUDA D must be a
    multiple of 8. Differentiable in q, k, v and sink (Hq,), fp32, but not with a block_table, which
    refuses in the backward.
    """
    given = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    call = AttentionCall(
        *(q, k, v, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap),
        alibi_slopes=alibi_slopes,
        sink=sink,
        deterministic=deterministic,
        seqused_q=seqused_q,
        seqused_k=seqused_k,
        leftpad_k=leftpad_k,
        block_table=block_table,
        return_softmax=return_softmax,
        num_splits=num_splits,
        batch_invariant=batch_invariant,
        **packed_lengths(q, k, given, block_table=block_table),
    )
    return _run(call)


def _flash_attn_varlen_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | Tensor | None,
    max_seqlen_k: int | Tensor | None,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None = None,
    zero_tensors: bool = False,
    dlse: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    leftpad_k: Tensor | None = None,
) -> Tensor:
    """FlashAttention-2's private backward of packed sequences: writes dq, dk, dv (None: not
    wanted), every row.

    Returns softmax_d (Hq, total_q), rowsum(dout * out) - dlse. Those behind zero_tensors, which has
    no effect, are additions: dlse (Hq, total_q), the gradient of softmax_lse, and what the forward
    was given.
    """
    given = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    call = AttentionCall(
        *(q, k, v, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap),
        alibi_slopes=alibi_slopes,
        deterministic=deterministic,
        seqused_q=seqused_q,
        seqused_k=seqused_k,
        leftpad_k=leftpad_k,
        **packed_lengths(q, k, given),
    )
    incoming = Incoming(dout, dlse, out, softmax_lse, rng_state, dq=dq, dk=dk, dv=dv)
    return _run_backward(call, incoming)


def _run(call: AttentionCall) -> Forward:
    if call.alibi_slopes is not None:
        check_no_gradient("alibi_slopes", call.alibi_slopes)
    refuse_forward_gradients(**vars(call))
    check_vmap_randomness(call.dropout_p, *arguments_of(call, TENSORS))
    results = run_operator(call)
    return results.out, results.softmax_lse, results.S_dmask, results.rng_state


def _run_backward(call: AttentionCall, incoming: Incoming) -> Tensor:
    given = {name: getattr(call, name) for name in DIFFERENTIABLE}
    refuse_forward_gradients(**given, dout=incoming.dout, dlse=incoming.dlse)
    return run_backward_operator(call, incoming)
