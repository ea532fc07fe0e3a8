"""The reference for attention over a KV cache: append, rotate, gather, attend."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tests.reference.dense import attention_with_gradients, low_precision
from tests.reference.options import PLAIN, AttentionOptions, AttentionResult, distances
from tests.reference.parts import bias_of_lists, mask_of_tree, told_apart, with_qv
from tests.reference.varlen import dense_keys, places_of


@dataclass(frozen=True)
class CacheTensors:
    """The tensors of a call, by the argument names of flash_attn_with_kvcache.

    q is (B, Sq, Hq, D), or (total_q, Hq, D) with cu_seqlens_q, and k, v likewise; k_cache and
    v_cache are (entries, capacity, Hk, D), or with block_table pages (num_pages, page_size, Hk, D);
    those of values may have another head dim.
    """

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    k: Tensor | None = None
    v: Tensor | None = None
    rotary_cos: Tensor | None = None
    rotary_sin: Tensor | None = None
    cache_seqlens: Any = None  # int32 or a number; None: the capacity
    cache_batch_idx: Tensor | None = None
    cache_leftpad: Tensor | None = None
    block_table: Tensor | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k_new: Tensor | None = None
    qv: Tensor | None = None
    key_lists: Tensor | None = None
    tree_mask: Tensor | None = None
    attn_mask: Tensor | None = None
    relative_bias: Tensor | None = None

    @property
    def batch(self) -> int:
        return len(self.q) if self.cu_seqlens_q is None else len(self.cu_seqlens_q) - 1

    @property
    def capacity(self) -> int:
        pages = 1 if self.block_table is None else self.block_table.shape[1]
        return self.k_cache.shape[1] * pages

    def sequences(self) -> Iterator[_Sequence]:
        empty = tuple(x.new_zeros(0, *x.shape[2:]) for x in (self.k_cache, self.v_cache))
        batch = self.batch

        def values(of: int | Tensor | None, default: list[int]) -> list[int]:
            if isinstance(of, Tensor):
                found: list[int] = of.tolist()
                return found
            return default if of is None else [of] * batch

        starts = values(self.cu_seqlens_q, [])
        starts_new = values(self.cu_seqlens_k_new, starts)
        entries = values(self.cache_batch_idx, list(range(batch)))
        used = values(self.cache_seqlens, [self.capacity] * batch)
        leftpads = values(self.cache_leftpad, [0] * batch)
        for index in range(batch):
            queries, rows = slice(index, index + 1), (slice(index, index + 1), slice(None))
            if starts:
                queries = slice(*starts[index : index + 2])
                rows = (slice(None), queries)
            new_k, new_v = empty
            if self.k is not None and self.v is not None:
                at = slice(*starts_new[index : index + 2]) if starts_new else index
                new_k, new_v = self.k[at], self.v[at]
            yield _Sequence(
                index=index,
                queries=queries,
                rows=rows,
                new_k=new_k,
                new_v=new_v,
                entry=entries[index],
                used=used[index],
                leftpad=leftpads[index],
            )


@dataclass
class KvCacheResult:
    """out (B, Sq, Hq, Dv) and lse (B, Hq, Sq), or (total_q, Hq, Dv) and (Hq, total_q) of packed
    queries, in fp64 and naively, and what the caches hold afterwards.

    What is rotated counts as rounded to its dtype, as the cache stores it and products take it.
    """

    expected: AttentionResult
    naive: AttentionResult  # in the dtype of q: the yardstick of tolerance.py
    k_cache: Tensor  # like the argument; appended rows rotated in fp64, then rounded
    v_cache: Tensor
    appended: Tensor  # booleans like the first two dimensions of k_cache: rows that were written


def rotate(
    x: Tensor, cos: Tensor | None, sin: Tensor | None, positions: Tensor, interleaved: bool
) -> Tensor:
    """Rotary embedding of x (S, H, D) at `positions` (S) in x's dtype; Su et al., "RoFormer", 2021.

    cos and sin are (seqlen_rotary, rotary_dim / 2), or None for no rotation. The first rotary_dim
    columns turn in pairs: neighbours if `interleaved`, else one of each half.
    """
    if cos is None or sin is None:
        return x
    cos, sin = (table.to(x.dtype)[positions][:, None] for table in (cos, sin))
    half = cos.shape[-1]
    turned, rest = x[..., : 2 * half], x[..., 2 * half :]
    first, second = (
        (turned[..., ::2], turned[..., 1::2])
        if interleaved
        else (turned[..., :half], turned[..., half:])
    )
    pair = (first * cos - second * sin, first * sin + second * cos)
    turned = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
    return torch.cat([turned, rest], -1)


def rotate_exactly(x: Tensor, cos: Tensor | None, *others: Any) -> Tensor:
    """rotate in fp64, rounded to x's dtype."""
    return x if cos is None else rotate(x.double(), cos, *others).to(x.dtype)


def kvcache_reference(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    rotary_interleaved: bool = True,
    options: AttentionOptions = PLAIN,
    wanted: Collection[str] = ("expected", "naive"),
    **others: Any,
) -> KvCacheResult:
    """What flash_attn_with_kvcache computes; changes none of its arguments, of which `others`
    are CacheTensors, and fields of `options`. Of results that are not `wanted` rows stay empty.

    Sequence b has its keys in batch entry (or row of block_table) cache_batch_idx[b], b by default,
    from row cache_leftpad[b] to cache_seqlens[b] (default: the capacity). k and v are appended
    there: (B, Snew, Hk, D), or packed like q by cu_seqlens_k_new, by default cu_seqlens_q. Rotary
    positions are absolute rows of the cache: those of the new keys, and for queries those from
    cache_seqlens[b] on if there is a mask or a tree, else all cache_seqlens[b].
    """
    given = {"q": q, "k_cache": k_cache, "v_cache": v_cache, **others}
    tensors, features = told_apart(CacheTensors, given)
    options = replace(options, **features)
    if (given_mask := tensors.attn_mask) is not None:
        is_bool = given_mask.dtype == torch.bool
        options = replace(options, **{"mask" if is_bool else "bias": given_mask})
    tables, block_table = (tensors.rotary_cos, tensors.rotary_sin), tensors.block_table
    qv, key_lists, tree_mask = tensors.qv, tensors.key_lists, tensors.tree_mask
    result = KvCacheResult(
        expected=_empty(q, v_cache, torch.float64),
        naive=_empty(q, v_cache, q.dtype),
        k_cache=k_cache if tensors.k is None else k_cache.clone(),
        v_cache=v_cache if tensors.v is None else v_cache.clone(),
        appended=torch.zeros(k_cache.shape[:2], dtype=torch.bool, device=k_cache.device),
    )
    for sequence in tensors.sequences():
        begin, used = sequence.leftpad, sequence.used
        queries = q[sequence.queries]
        if queries.dim() == 4:
            queries = queries[0]
        new_k, new_v = sequence.new_k, sequence.new_v
        appended_at = used + torch.arange(len(new_k), device=q.device)
        queries_at = torch.full((len(queries),), used, device=q.device)
        if options.moves_with_queries or tree_mask is not None:
            queries_at += torch.arange(len(queries), device=q.device)

        exact = [
            rotate_exactly(x, *tables, positions, rotary_interleaved)
            for x, positions in ((queries, queries_at), (new_k, appended_at))
        ]
        if len(new_k) > 0:
            places = places_of(appended_at, sequence.entry, k_cache.shape[1], block_table)
            result.k_cache[places], result.v_cache[places] = exact[1], new_v
            result.appended[places] = True

        seqlen_k = used + len(new_k) - begin
        part = options.of_sequence(sequence.index, len(queries), seqlen_k)
        if tree_mask is not None:
            tree = tree_mask[sequence.queries].reshape(len(queries), tree_mask.shape[-1])
            part = replace(part, mask=mask_of_tree(tree, seqlen_k))
        if (of_distance := tensors.relative_bias) is not None:
            reach = of_distance.shape[1] // 2
            places = distances(len(queries), seqlen_k, q.device).clamp(-reach, reach) + reach
            part = replace(part, bias=of_distance[None, :, places])
        if key_lists is not None:
            lists = key_lists[sequence.queries].reshape(len(queries), *key_lists.shape[-2:])
            bias = bias_of_lists(lists, seqlen_k, q.shape[-2] // lists.shape[1])
            part = replace(part, bias=bias)
            nowhere = (bias[0] == -torch.inf).flatten(0, 1).all(0)
        old = [dense_keys(x, sequence.entry, begin, used, block_table) for x in (k_cache, v_cache)]
        values = torch.cat([old[1], new_v])[None]
        if key_lists is not None:
            values = values.masked_fill(nowhere[:, None, None], 0.0)
        shape = (1, *queries.shape[:-1], values.shape[-1])
        queries_of_values = None if qv is None else qv[sequence.queries].reshape(shape)
        naive = [
            rotate(x, *tables, positions, rotary_interleaved)
            for x, positions in ((queries, queries_at), (new_k, appended_at))
        ]
        for name, run, (turned, new) in (
            ("expected", attention_with_gradients, exact),
            ("naive", low_precision, naive),
        ):
            if name not in wanted:
                continue
            target = getattr(result, name)
            keys = torch.cat([old[0], new])[None]
            if key_lists is not None:
                keys = keys.masked_fill(nowhere[:, None, None], 0.0)
            products = with_qv(turned[None], keys, values, queries_of_values)
            attended = run(*products, values, options=part)
            target.out[sequence.queries] = attended.out.view(target.out[sequence.queries].shape)
            target.lse[sequence.rows] = attended.lse.view(target.lse[sequence.rows].shape)
            for of, value in attended.noise.items():
                target.noise[of] = max(target.noise.get(of, 0.0), value)
            if tables[0] is not None and turned.numel() > 0 and keys.numel() > 0:
                # Rotated in fp32, an element near the middle of two numbers may round to the other.
                other = torch.finfo(q.dtype).eps * turned.abs().max() * keys.abs().max()
                noise = abs(part.scale(q.shape[-1])) * other.item()
                target.noise["lse"] = max(target.noise.get("lse", 0.0), noise)
    return result


@dataclass
class _Sequence:
    index: int
    queries: slice  # along the first dimension of q
    rows: tuple[slice, slice]  # along the first two dimensions of lse
    new_k: Tensor  # (Snew, Hk, D)
    new_v: Tensor  # (Snew, Hk, Dv)
    entry: int  # batch entry of the cache or row of the block table
    used: int  # rows of the cache before the append
    leftpad: int


def _empty(q: Tensor, v: Tensor, dtype: torch.dtype) -> AttentionResult:
    out = q.new_zeros(*q.shape[:-1], v.shape[-1], dtype=dtype)
    lse = torch.full_like(out[..., 0].transpose(-1, -2), -torch.inf)
    return AttentionResult(out=out, lse=lse)
