"""FlashAttention-3's module flash_attn_interface: its names, parameters, order, defaults, results.

The signatures are those of hopper/flash_attn_interface.py in Dao-AILab/flash-attention (commit
01afd16). Options that are not described here are those of this package's functions of the same
name. What all of them share:

- window_size: (left, right) as flash_attn_cuda.flash_attn_func's: any negative number or None for
  unlimited, each side on its own, 0 for nothing beyond the diagonal; bounds beyond a sequence hide
  nothing, and causal sets right to 0. In get_scheduler_metadata it is not read.
- pack_gqa, sm_margin, num_splits and scheduler_metadata choose how a call is scheduled there. They
  are accepted; num_splits counts where this package splits keys, over pages and caches.
- k and v may be of float8_e4m3fn, and with them q, for inference, with head dims that are multiples
  of 16. q_descale, k_descale and v_descale are fp32 (batch, heads_k), with any strides, (heads_k,),
  one number, in a tensor or not, and of a cache one for every token; None is 1, as there. q may be
  of fp16 or bf16, and out then is; of q of float8_e4m3fn out is bf16. A scale of another tensor is
  a ValueError.
- qv goes with a softmax_scale, whose default is not there: a ValueError.
- NotImplementedError, by name: other dtypes of FP8.
- return_attn_probs and return_softmax_lse return softmax_lse, through which gradients flow as they
  do not in FlashAttention-3, and no probabilities.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..call.tensors import E4M3, check_packed, check_tensor
from ..call.window import UNLIMITED, WindowSize
from ..functions.dense import flash_attn_qkvpacked_func as _qkvpacked
from ..functions.kvcache import flash_attn_combine
from .flash_attention_3_kvcache import flash_attn_with_kvcache
from .flash_attention_3_private import _flash_attn_backward, _flash_attn_forward
from .names import refused_names
from .sequences import (
    attend_sequences,
    is_e4m3,
    no_scheduler_metadata,
    refuse_fp8,
    scales_of,
    splits_of,
)

__all__ = [
    "_flash_attn_backward",
    "_flash_attn_forward",
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "get_scheduler_metadata",
]

__getattr__ = refused_names(
    "flash_attn_interface",
    {
        "FlashAttnFunc": "call flash_attn_func",
        "FlashAttnQKVPackedFunc": "call flash_attn_qkvpacked_func",
        "FlashAttnVarlenFunc": "call flash_attn_varlen_func",
        "flash_attn_3_gpu": "call this module's functions",
    },
)


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: WindowSize = UNLIMITED,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of q (batch, seqlen_q, heads_q, head_dim) over k, v (batch, seqlen_k, heads_k,
    head_dim or head_dim_v).

    Returns out (batch, seqlen_q, heads_q, head_dim_v), or with return_attn_probs (out, softmax_lse
    (batch, heads_q, seqlen_q)). Errors as flash_attn_cuda.flash_attn_func, and the module's.
    """
    refuse_fp8(E4M3, q=q, k=k, v=v)
    out, softmax_lse = attend_sequences(
        *(q, k, v, None, None, None, None),
        names={},
        **scales_of((q, k, v), (q_descale, k_descale, v_descale), ignores_others=False),
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        deterministic=deterministic,
        attention_chunk=attention_chunk,
        qv=qv,
    )
    return (out, softmax_lse) if return_attn_probs else out


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: WindowSize = UNLIMITED,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    deterministic: bool = False,
    num_heads_q: int | None = None,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """flash_attn_func of one tensor, whose gradient is in one piece.

    qkv is (batch, seqlen, 3, heads, head_dim), or with num_heads_q (batch, seqlen, num_heads_q + 2
    * heads_k, head_dim): first the heads of queries, then those of keys, then those of values.

    Raises ValueError too where num_heads_q does not divide four dimensions so.
    """
    refuse_fp8(E4M3, qkv=qkv)
    check_tensor("qkv", qkv)
    options: dict[str, Any] = {
        "softmax_scale": softmax_scale,
        "causal": causal,
        "window_size": window_size,
        "softcap": softcap,
        "deterministic": deterministic,
    }
    scales = {"q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale}
    is_fp8 = is_e4m3(qkv)
    if not is_fp8:
        scales_of((qkv, qkv, qkv), (q_descale, k_descale, v_descale), ignores_others=False)
    if qkv.dim() == 4 or attention_chunk != 0 or is_fp8:
        if qkv.dim() != 4:
            check_packed("qkv", qkv, "(batch, seqlen, 3, heads, head_dim)", 3)
        is_split = qkv.dim() == 4
        q, k, v = qkv.split(_heads_of(qkv, num_heads_q), dim=2) if is_split else qkv.unbind(2)
        options |= {"return_attn_probs": return_attn_probs, "attention_chunk": attention_chunk}
        options |= scales
        return flash_attn_func(q, k, v, **options)
    results = _qkvpacked(qkv, return_attn_probs=True, **options)
    return (results[0], results[1]) if return_attn_probs else results[0]


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int | Tensor | None,
    max_seqlen_k: int | Tensor | None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: WindowSize = UNLIMITED,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """flash_attn_func of packed sequences: q (total_q, heads_q, head_dim), k, v (total_k, ...).

    cu_seqlens_q or cu_seqlens_k may be None, as may be both: q, or k and v, then are (batch,
    seqlen, heads, head_dim), of which seqused_q and seqused_k say how many rows are used.

    Returns out in q's layout, or with return_attn_probs (out, softmax_lse), softmax_lse (heads_q,
    total_q) or (batch, heads_q, seqlen_q). Errors as flash_attn_cuda.flash_attn_varlen_func, and
    the module's.
    """
    refuse_fp8(E4M3, q=q, k=k, v=v)
    out, softmax_lse = attend_sequences(
        *(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k),
        **scales_of((q, k, v), (q_descale, k_descale, v_descale), ignores_others=False),
        seqused_q=seqused_q,
        seqused_k=seqused_k,
        num_splits=splits_of(num_splits),
        names={},
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        deterministic=deterministic,
        attention_chunk=attention_chunk,
        qv=qv,
    )
    return (out, softmax_lse) if return_attn_probs else out


def get_scheduler_metadata(
    batch_size: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    num_heads_q: int,
    num_heads_kv: int,
    headdim: int,
    cache_seqlens: Tensor,
    qkv_dtype: torch.dtype = torch.bfloat16,
    headdim_v: int | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_size: int | None = None,
    max_seqlen_k_new: int = 0,
    causal: bool = False,
    window_size: WindowSize = UNLIMITED,
    attention_chunk: int = 0,
    has_softcap: bool = False,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> Tensor:
    """An empty int32 tensor on the device of cache_seqlens, for flash_attn_with_kvcache's
    scheduler_metadata: this package plans in the call itself. Nothing else is read.
    """
    return no_scheduler_metadata(cache_seqlens)


def _heads_of(qkv: Tensor, num_heads_q: int | None) -> list[int]:
    """Heads of q, k and v that lie one behind the other in four dimensions."""
    heads = qkv.shape[2]
    if num_heads_q is None or num_heads_q < 1 or heads <= num_heads_q or (heads - num_heads_q) % 2:
        raise ValueError(
            "num_heads_q: must leave an even number of the heads of a qkv of four dimensions "
            f"({heads}), got {num_heads_q}"
        )
    heads_k = (heads - num_heads_q) // 2
    return [num_heads_q, heads_k, heads_k]
