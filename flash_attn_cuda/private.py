"""FlashAttention-2's private functions, which others build on: its names, arguments and order.

Context parallelism, for one, calls them by keyword. They go through the operators of ops.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .checks import packed_sequences_not_implemented
from .ops import Tensors4, forward_for_transforms, is_functorch_active

_ops = torch.ops.flash_attn_cuda


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
) -> Tensors4:
    """FlashAttention-2's private forward, on q (B, Sq, Hq, D) and k, v (B, Sk, Hk, D).

    Returns (out, softmax_lse, S_dmask, rng_state): out (B, Sq, Hq, D); softmax_lse (B, Hq, Sq), the
    natural logarithm, fp32 (fp64 for fp64 inputs); S_dmask and rng_state, which are empty without
    dropout. On CUDA D must be a multiple of 8. Errors as flash_attn_func. Unlike
    FlashAttention-2's, it is differentiable in q, k, v.
    """
    op = forward_for_transforms if is_functorch_active() else _ops._flash_attn_forward
    return op(
        *(q, k, v, dropout_p, softmax_scale, causal, window_size_left, window_size_right),
        *(softcap, alibi_slopes, return_softmax),
    )


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
    dtype. `dlse` (B, Hq, Sq), the gradient of softmax_lse, is an addition to FlashAttention-2's
    arguments. rng_state is of no use without dropout.
    """
    return _ops._flash_attn_backward(
        *(dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal),
        *(window_size_left, window_size_right, softcap, alibi_slopes, deterministic),
        *(rng_state, dlse),
    )


def _flash_attn_varlen_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
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
) -> Tensors4:
    """FlashAttention-2's private forward of packed sequences; raises NotImplementedError."""
    raise packed_sequences_not_implemented("cu_seqlens_q")


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
    max_seqlen_q: int,
    max_seqlen_k: int,
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
) -> Tensor:
    """FlashAttention-2's private backward of packed sequences; raises NotImplementedError."""
    raise packed_sequences_not_implemented("cu_seqlens_q")
