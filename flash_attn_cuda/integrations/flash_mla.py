"""FlashMLA's module flash_mla: its names, parameters, order, defaults, results.

The signatures are those of flash_mla/flash_mla_interface.py in deepseek-ai/FlashMLA (commit
02fe0d0). Its attention of chosen keys, and caches of FP8, are a NotImplementedError that names the
argument.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NoReturn

from torch import Tensor

from ..call.tensors import check_tensor
from ..functions.kvcache import flash_attn_with_kvcache
from .names import refused_names
from .sequences import REFUSALS, refuse_given, renamed

__all__ = [
    "FlashMLASchedMeta",
    "flash_mla_sparse_fwd",
    "flash_mla_with_kvcache",
    "get_mla_metadata",
]

_DENSE = "call flash_attn_cuda.{}"
__getattr__ = refused_names(
    "flash_mla",
    {
        name: _DENSE.format(name)
        for name in (
            "flash_attn_varlen_func",
            "flash_attn_varlen_kvpacked_func",
            "flash_attn_varlen_qkvpacked_func",
        )
    },
)

_CHOSEN = "keys chosen by indices are not implemented"


@dataclass
class FlashMLASchedMeta:
    """What FlashMLA keeps of its plan: this package plans in the call itself."""

    have_initialized: bool = False
    config: Any = None
    tile_scheduler_metadata: Tensor | None = None
    num_splits: Tensor | None = None


def get_mla_metadata(*args: Any, **kwargs: Any) -> tuple[FlashMLASchedMeta, None]:
    """(an empty FlashMLASchedMeta, None), whatever the arguments."""
    return FlashMLASchedMeta(), None


def flash_mla_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    block_table: Tensor | None,
    cache_seqlens: Tensor | None,
    head_dim_v: int,
    tile_scheduler_metadata: Any,
    num_splits: Any = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    is_fp8_kvcache: bool = False,
    indices: Tensor | None = None,
    attn_sink: Tensor | None = None,
    extra_k_cache: Tensor | None = None,
    extra_indices_in_kvcache: Tensor | None = None,
    topk_length: Tensor | None = None,
    extra_topk_length: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """flash_attn_cuda.flash_attn_with_kvcache of queries and pages whose first head_dim_v columns
    are latent, and the others, if there are any, rotary. The pages are read where they lie.

    Args:
        q: (batch, seqlen_q, heads_q, head_dim), of fp16 or bf16.
        k_cache: (num_pages, page_size, heads_k, head_dim), of q's dtype and any page_size, with any
            strides but that of its columns.
        block_table: (batch, max_pages), int32.
        cache_seqlens: (batch,), int32.
        head_dim_v: up to head_dim: columns that are values.
        tile_scheduler_metadata, num_splits: not read.
        softmax_scale: None for head_dim ** -0.5, as there. A model's is that of the head dim that
            it has without absorption.

    Returns:
        out (batch, seqlen_q, heads_q, head_dim_v), softmax_lse (batch, heads_q, seqlen_q) in fp32,
        +inf of a query that sees no key, as there.

    Raises:
        As flash_attn_cuda.flash_attn_with_kvcache. ValueError: head_dim_v is not from 1 to
        head_dim. NotImplementedError: is_fp8_kvcache; indices, attn_sink and what follows them,
        which there are of chosen keys alone.
    """
    if is_fp8_kvcache:
        raise NotImplementedError(
            "is_fp8_kvcache: must be False, as caches of FP8 are not implemented, got True"
        )
    refuse_given(
        _CHOSEN,
        indices=indices,
        attn_sink=attn_sink,
        extra_k_cache=extra_k_cache,
        extra_indices_in_kvcache=extra_indices_in_kvcache,
        topk_length=topk_length,
        extra_topk_length=extra_topk_length,
    )
    given = {"q": q, "k_cache": k_cache, "block_table": block_table}
    for name, tensor in (given | {"cache_seqlens": cache_seqlens}).items():
        check_tensor(name, tensor)
    head_dim = q.shape[-1]
    if not 1 <= head_dim_v <= head_dim:
        raise ValueError(
            f"head_dim_v: must be from 1 to {head_dim}, q's head_dim, got {head_dim_v}"
        )
    # Where nothing is rotary, a value is its key.
    has_rotary = head_dim_v < head_dim
    queries, keys = (x[..., head_dim_v if has_rotary else 0 :] for x in (q, k_cache))
    try:
        out, softmax_lse = flash_attn_with_kvcache(
            queries,
            keys,
            k_cache[..., :head_dim_v],
            qv=q[..., :head_dim_v] if has_rotary else None,
            cache_seqlens=cache_seqlens,
            block_table=block_table,
            softmax_scale=head_dim**-0.5 if softmax_scale is None else softmax_scale,
            causal=causal,
            return_softmax_lse=True,
        )
    except REFUSALS as error:
        raise renamed(error, {"v_cache": "k_cache", "qv": "q"}) from error
    return out, softmax_lse.masked_fill(softmax_lse == -math.inf, math.inf)


def flash_mla_sparse_fwd(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    sm_scale: float,
    d_v: int = 512,
    attn_sink: Tensor | None = None,
    topk_length: Tensor | None = None,
    indexer_topk: int = 0,
) -> NoReturn:
    """Attention of q (seqlen_q, heads_q, head_dim) over the rows of kv that indices (seqlen_q,
    heads_k, topk) name: NotImplementedError.
    """
    raise NotImplementedError(f"indices: {_CHOSEN}")
