"""FlashAttention-3's attention over a cache; flash_attention_3.py says what its options are."""

from __future__ import annotations

import torch
from torch import Tensor

from ..call.tensors import E4M3, check_like, check_tensor
from ..call.window import UNLIMITED, WindowSize, window_bounds
from ..functions.kvcache import flash_attn_with_kvcache as _with_kvcache
from ..functions.rotary import apply_rotary_emb
from .sequences import (
    REFUSALS,
    is_e4m3,
    packed_keys,
    refuse_fp8,
    refuse_given,
    renamed,
    scales_of,
    splits_of,
    with_no_partials,
)

__all__ = ["flash_attn_with_kvcache"]

_NAMES = {"block_table": "page_table"}


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    qv: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | Tensor | None = None,
    rotary_seqlens: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = UNLIMITED,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Tensor | None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor, Tensor, Tensor]:
    """Attention of new queries over a cache, to which k and v are appended. For inference.

    Args:
        page_table: flash_attn_cuda.flash_attn_with_kvcache's block_table.
        k, v: (batch, seqlen_new, heads_k, head_dim), also where cu_seqlens_q says that queries are
            packed, or packed with cu_seqlens_k_new. Of fp16 or bf16 over a cache of float8_e4m3fn
            too, which they are quantized into, or of its numbers, which are appended as they are.
        rotary_seqlens: (batch,), int32: rotations of a sequence start at this position instead of
            cache_seqlens; of no use without rotary_cos. q and k then are rotated before the call
            and not in it, and positions that rotary_cos does not reach are not reported on CUDA.
            Not with q of float8_e4m3fn.

    Returns:
        out like q, but with v_cache's head_dim, or with return_softmax_lse (out, softmax_lse, and
        two empty tensors): softmax_lse (batch, heads_q, seqlen_q) or (heads_q, total_q); in
        FlashAttention-3 the others hold partial results of keys that were split.

    Raises:
        As flash_attn_cuda.flash_attn_with_kvcache, and the module's.
    """
    refuse_fp8(E4M3, q=q, k_cache=k_cache, v_cache=v_cache, k=k, v=v)
    if k is not None and v is not None and cu_seqlens_q is not None and cu_seqlens_k_new is None:
        k, v, cu_seqlens_k_new, _ = packed_keys(k, v, cu_seqlens_q)
    if k is not None and rotary_seqlens is not None and rotary_cos is not None:
        if is_e4m3(q) or is_e4m3(k):
            refuse_given(f"q or k is of {E4M3}", rotary_seqlens=rotary_seqlens)
        left, right = window_bounds(window_size)
        batch = q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
        if rotary_seqlens is not None:
            check_like("rotary_seqlens", rotary_seqlens, (batch,), torch.int32, q)
        tables = (rotary_cos, rotary_sin, bool(rotary_interleaved))
        in_order = causal or left >= 0 or right >= 0
        q = _rotated(q, tables, rotary_seqlens, cu_seqlens_q, in_order)
        k = _rotated(k, tables, rotary_seqlens, cu_seqlens_k_new, True)
        rotary_cos = rotary_sin = None
    descales = (q_descale, k_descale, v_descale)
    scales = scales_of((q, k_cache, v_cache), descales, ignores_others=False)
    try:
        out, softmax_lse = _with_kvcache(
            *(q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, cache_seqlens),
            cache_batch_idx=cache_batch_idx,
            cache_leftpad=cache_leftpad,
            block_table=page_table,
            softmax_scale=softmax_scale,
            causal=causal,
            window_size=window_size,
            softcap=softcap,
            rotary_interleaved=rotary_interleaved,
            num_splits=splits_of(num_splits),
            return_softmax_lse=True,
            cu_seqlens_q=cu_seqlens_q,
            max_seqlen_q=max_seqlen_q,
            cu_seqlens_k_new=cu_seqlens_k_new,
            attention_chunk=attention_chunk,
            qv=qv,
            **scales,
        )
    except REFUSALS as error:
        raise renamed(error, _NAMES) from error
    return with_no_partials(out, softmax_lse) if return_softmax_lse else out


def _rotated(
    x: Tensor,
    tables: tuple[Tensor, Tensor | None, bool],
    positions: Tensor,
    cu_seqlens: Tensor | None,
    in_order: bool,
) -> Tensor:
    """x rotated from its sequences' positions (batch,) on, or all of a sequence at its position."""
    cos, sin, interleaved = tables
    check_tensor("rotary_cos", cos)
    check_tensor("rotary_sin", sin)
    assert sin is not None
    shape = x.shape
    if not in_order:
        if cu_seqlens is None:  # rows become heads, which stand at one position
            x = x.reshape(shape[0], 1, shape[1] * shape[2], shape[3])
        else:  # rows become sequences
            row = torch.arange(shape[0], device=x.device, dtype=cu_seqlens.dtype)
            sequence = torch.searchsorted(cu_seqlens, row, right=True) - 1
            inside = sequence < cu_seqlens.shape[0] - 1
            padded = torch.cat([positions, positions.new_zeros(1)])
            positions = torch.where(inside, padded[sequence], 0)
            x, cu_seqlens = x.unsqueeze(1), None
    try:
        x = apply_rotary_emb(x, cos, sin, interleaved, False, positions, cu_seqlens)
    except ValueError as error:
        raise ValueError(f"rotary_seqlens: {error}") from error
    return x.reshape(shape)
