"""FlashMLA's module flash_mla: its names, parameters, order, defaults, results.

The signatures are those of flash_mla/flash_mla_interface.py in deepseek-ai/FlashMLA (commit
02fe0d0). Indices beyond the rows that there are count as -1 here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..call.latent import V32_ROWS, LatentFormat, latent_views
from ..call.tensors import CUDA_DTYPES, check_dtype, check_shapes, check_tensor
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

_NOT_ROTARY = 8  # columns of zeros for queries without rotary ones
_GATHERED_NUMBERS = 1 << 24  # of keys whose scores torch computes: 64 MiB, and 32 MiB before
_OURS = {"v_cache": "k_cache", "qv": "q", "key_lists": "indices"}
_OF_FP8 = " with is_fp8_kvcache"
_ROWS_OF = {576: V32_ROWS, 512: LatentFormat.DEEPSEEK_V4}  # by the head_dim of queries


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
            strides but that of its columns. With is_fp8_kvcache rows of bytes
            (flash_attn_cuda.latent_views), of uint8, int8 or float8_e4m3fn: (num_pages, page_size,
            heads_k, 656) for a head_dim of 576, 584 for one of 512, DeepSeek V4's.
        block_table: (batch, max_pages), int32; not read with indices.
        cache_seqlens: (batch,), int32; not read with indices.
        head_dim_v: up to head_dim: columns that are values.
        tile_scheduler_metadata, num_splits: not read.
        softmax_scale: None for head_dim ** -0.5, as there. A model's is that of the head dim that
            it has without absorption.
        indices: (batch, seqlen_q, topk), int32: the keys that a query sees: index i is row i %
            page_size of page i // page_size, whoever's it is; -1 is none.
        attn_sink: (heads_q,), fp32, with indices: out is multiplied by exp(lse) / (exp(lse) +
            exp(attn_sink)). softmax_lse does not have it.
        topk_length: (batch,), with indices: how many of a sequence's lists count.

    Returns:
        out (batch, seqlen_q, heads_q, head_dim_v), softmax_lse (batch, heads_q, seqlen_q) in fp32,
        +inf of a query that sees no key, as there.

    Raises:
        As flash_attn_cuda.flash_attn_with_kvcache. ValueError: head_dim_v is not from 1 to
        head_dim, or with is_fp8_kvcache not 512, or head_dim then neither 576 nor 512; there are
        indices, and causal. NotImplementedError: extra_k_cache, extra_indices_in_kvcache or
        extra_topk_length; attn_sink or topk_length without indices.
    """
    refuse_given(
        "keys are chosen from one cache",
        extra_k_cache=extra_k_cache,
        extra_indices_in_kvcache=extra_indices_in_kvcache,
        extra_topk_length=extra_topk_length,
    )
    given: dict[str, Any] = {"q": q, "k_cache": k_cache}
    if indices is None:
        refuse_given("there are no indices", attn_sink=attn_sink, topk_length=topk_length)
        given |= {"block_table": block_table, "cache_seqlens": cache_seqlens}
    for name, tensor in given.items():
        check_tensor(name, tensor)
    head_dim = q.shape[-1]
    _check_value_dim("head_dim_v", head_dim_v, q)
    scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
    if indices is not None:
        if causal:
            raise ValueError("causal: must be False with indices, got True")
        lists = indices, topk_length, attn_sink
        return _over_pages(q, k_cache, head_dim_v, scale, is_fp8_kvcache, *lists)
    if is_fp8_kvcache:
        given = _of_bytes(q, k_cache, head_dim_v)
    elif head_dim_v < head_dim:
        queries, keys = (x[..., head_dim_v:] for x in (q, k_cache))
        latent = k_cache[..., :head_dim_v]
        given = {"q": queries, "k_cache": keys, "v_cache": latent, "qv": q[..., :head_dim_v]}
    else:  # a value is its key
        given = {"q": q, "k_cache": k_cache, "v_cache": k_cache[..., :head_dim_v]}
    try:
        out, lse = flash_attn_with_kvcache(
            **given,
            cache_seqlens=cache_seqlens,
            block_table=block_table,
            softmax_scale=scale,
            causal=causal,
            return_softmax_lse=True,
        )
    except REFUSALS as error:
        raise renamed(error, _OURS) from error
    return out, _of_flash_mla(lse)


def _of_bytes(q: Tensor, k_cache: Tensor, head_dim_v: int) -> dict[str, Any]:
    """Queries, keys and values of a call over rows of bytes."""
    check_dtype("q", q.dtype, CUDA_DTYPES, _OF_FP8)
    if q.shape[-1] not in _ROWS_OF:
        raise ValueError(f"q: last dimension must be 576 or 512{_OF_FP8}, got {q.shape[-1]}")
    if head_dim_v != 512:
        raise ValueError(f"head_dim_v: must be 512{_OF_FP8}, got {head_dim_v}")
    rows = _ROWS_OF[q.shape[-1]]
    try:
        keys, values, v_descale = latent_views(k_cache, rows, q.dtype)
    except REFUSALS as error:
        raise renamed(error, {"cache": "k_cache"}) from error
    return {
        "q": q[..., rows.latent_dim :],
        "k_cache": keys,
        "v_cache": values,
        "qv": q[..., : rows.latent_dim],
        "v_descale": v_descale,
        "values_include_rope": rows.latent_dim < head_dim_v,
    }


def flash_mla_sparse_fwd(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    sm_scale: float,
    d_v: int = 512,
    attn_sink: Tensor | None = None,
    topk_length: Tensor | None = None,
    indexer_topk: int = 0,
    *,
    return_max_logits: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Attention of every query over the rows of kv that its list names.

    Args:
        q: (seqlen_q, heads_q, head_dim), of fp16 or bf16.
        kv: (seqlen_kv, heads_k, head_dim), whose first d_v columns are values as well.
        indices: (seqlen_q, heads_k, topk), int32. What is no row of kv is none.
        sm_scale: of the scores.
        d_v: up to head_dim.
        attn_sink: (heads_q,), fp32: as in flash_mla_with_kvcache.
        topk_length: (seqlen_q,): how many of a query's list count.
        indexer_topk: 0.
        return_max_logits: not in FlashMLA, whose kernel has them anyhow. Here torch computes the
            scores once more, with 128 MiB of memory or what one query's keys take.

    Returns:
        out (seqlen_q, heads_q, d_v), max_logits, lse (seqlen_q, heads_q) in fp32, +inf of a query
        that sees no key. max_logits, None unless asked for: the largest score of each row,
        (seqlen_q, heads_q) in fp32, without the sink, -inf of a query that sees no key.

    Raises:
        As flash_attn_cuda.flash_attn_with_kvcache. ValueError: d_v is not from 1 to head_dim.
        NotImplementedError: indexer_topk is not 0.
    """
    if indexer_topk != 0:
        raise NotImplementedError(
            f"indexer_topk: must be 0, as there is one log-sum-exp, got {indexer_topk}"
        )
    _check_dims(3, q=q, kv=kv, indices=indices)
    _check_value_dim("d_v", d_v, q)
    lists = _lists(indices, kv.shape[0], topk_length, q.shape[0])
    try:
        out, lse = _over_lists(q, kv[None], None, lists, d_v, sm_scale)
    except REFUSALS as error:
        names = {"k_cache": "kv", "v_cache": "kv", "softmax_scale": "sm_scale"}
        raise renamed(error, _OURS | names) from error
    lse = lse.transpose(0, 1)
    largest = _largest_scores(q, kv, lists, sm_scale) if return_max_logits else None
    return _with_sink(out, lse, attn_sink), largest, _of_flash_mla(lse)


def _over_pages(
    q: Tensor,
    k_cache: Tensor,
    head_dim_v: int,
    scale: float,
    is_fp8: bool,
    indices: Tensor,
    topk_length: Any,
    attn_sink: Any,
) -> tuple[Tensor, Tensor]:
    """flash_mla_with_kvcache with indices: its queries as those of one sequence, the pool."""
    _check_dims(4, q=q, k_cache=k_cache)
    check_tensor("indices", indices)
    shape = q.shape[:2]
    check_shapes("indices", indices, [(*shape, indices.shape[-1])])
    are_whole = is_fp8 and _ROWS_OF.get(q.shape[-1], V32_ROWS).page_scale_bytes > 0
    pool, table = _as_one_sequence(k_cache, may_join=not are_whole)
    lists = _lists(indices, k_cache.shape[0] * k_cache.shape[1], topk_length, shape[0])
    lists = lists[:, :, None].flatten(0, 1)
    try:
        out, lse = _over_lists(q.flatten(0, 1), pool, table, lists, head_dim_v, scale, is_fp8)
    except REFUSALS as error:
        raise renamed(error, _OURS) from error
    out, lse = out.unflatten(0, shape), lse.unflatten(1, shape).transpose(0, 1)
    return _with_sink(out, lse.transpose(1, 2), attn_sink), _of_flash_mla(lse)


def _check_dims(dims: int, **tensors: Any) -> None:
    for name, tensor in tensors.items():
        check_tensor(name, tensor)
        if tensor.dim() != dims:
            shape = tuple(tensor.shape)
            raise ValueError(f"{name}: must have {dims} dimensions, got shape {shape}")


def _check_value_dim(name: str, value: int, q: Tensor) -> None:
    if not 1 <= value <= q.shape[-1]:
        raise ValueError(f"{name}: must be from 1 to {q.shape[-1]}, q's head_dim, got {value}")


def _lists(indices: Tensor, rows: int, topk_length: Any, count: int) -> Tensor:
    """Indices (count, ., topk) as lists of one sequence of so many rows; topk_length (count,): how
    many of them there are.
    """
    is_none = indices >= rows
    if topk_length is not None:
        check_tensor("topk_length", topk_length)
        check_shapes("topk_length", topk_length, [(count,)])
        place = torch.arange(indices.shape[-1], device=indices.device)
        is_none = is_none | (place >= topk_length[:, None, None])
    return indices.masked_fill(is_none, -1)


def _as_one_sequence(pages: Tensor, may_join: bool) -> tuple[Tensor, Tensor | None]:
    """(num_pages, page_size, ...) as one cache entry of all rows, or what lists its pages."""
    count, size = pages.shape[:2]
    if may_join and (count <= 1 or size <= 1 or pages.stride(0) == size * pages.stride(1)):
        return pages.flatten(0, 1)[None], None
    return pages, torch.arange(count, dtype=torch.int32, device=pages.device)[None]


def _over_lists(
    q: Tensor,
    keys: Tensor,
    block_table: Tensor | None,
    lists: Tensor,
    head_dim_v: int,
    softmax_scale: float,
    is_fp8: bool = False,
) -> tuple[Tensor, Tensor]:
    """(out, softmax_lse (heads_q, queries)) of queries (queries, heads_q, head_dim) of one
    sequence, each with its lists (queries, heads_k, n).
    """
    q = q[None]
    if is_fp8:
        given = _of_bytes(q, keys, head_dim_v)
    else:
        if head_dim_v < q.shape[-1]:
            rotary, of_keys = (x[..., head_dim_v:] for x in (q, keys))
        else:  # the product of nothing, which takes a few columns
            rotary = q.new_zeros((*q.shape[:-1], min(_NOT_ROTARY, head_dim_v)))
            of_keys = keys[..., : rotary.shape[-1]]
        given = {"q": rotary, "k_cache": of_keys, "v_cache": keys[..., :head_dim_v]}
        given["qv"] = q[..., :head_dim_v]
    out, lse = flash_attn_with_kvcache(
        **given,
        block_table=block_table,
        softmax_scale=softmax_scale,
        return_softmax_lse=True,
        key_lists=lists[None],
    )
    return out[0], lse[0]


@torch.no_grad()
def _largest_scores(q: Tensor, kv: Tensor, lists: Tensor, softmax_scale: float) -> Tensor:
    """fp32 (queries, heads_q), of the rows of kv that lists (queries, heads_k, n) name; they are
    gathered for some queries at a time.
    """
    heads_k, keys_per_list = lists.shape[1:]
    if len(kv) == 0 or keys_per_list == 0:
        return q.new_full(q.shape[:2], -math.inf, dtype=torch.float32)
    some = max(1, _GATHERED_NUMBERS // (heads_k * keys_per_list * kv.shape[-1]))
    head = torch.arange(heads_k, device=kv.device)[:, None]
    largest = []
    for queries, own in zip(q.split(some), lists.split(some), strict=True):
        keys = kv[own.clamp(min=0).long(), head].float()  # (queries, heads_k, n, head_dim)
        of_heads = queries.float().unflatten(1, (heads_k, -1))
        with torch.autocast(q.device.type, enabled=False):
            scores = (of_heads @ keys.transpose(-1, -2)) * softmax_scale
        scores = scores.masked_fill(own[:, :, None] < 0, -math.inf)
        largest.append(scores.amax(-1).flatten(1))
    return torch.cat(largest)


def _with_sink(out: Tensor, lse: Tensor, sink: Any) -> Tensor:
    """out (..., heads, head_dim_v) where a sink takes its share of the softmax; lse (..., heads)
    is without it.
    """
    if sink is None:
        return out
    check_tensor("attn_sink", sink)
    check_shapes("attn_sink", sink, [(out.shape[-2],)])
    share = torch.sigmoid(lse - sink)
    return out.mul_(share.masked_fill(lse == -math.inf, 0.0)[..., None])


def _of_flash_mla(lse: Tensor) -> Tensor:
    return lse.masked_fill(lse == -math.inf, math.inf)
