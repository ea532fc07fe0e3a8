"""Attention over a KV cache, and the combination of results over parts of the keys."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..checks.tensors import lse_dtype, output_shape
from .dense import attention_forward
from .tiles import AttentionOptions
from .varlen import page_rows


def kvcache_forward(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    options: AttentionOptions,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    rotary_interleaved: bool = True,
    cache_seqlens: Tensor | int | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Append k, v to the caches, in place, and attend q to what they then hold.

    Caches are (entries, capacity, Hk, D), or with block_table (entries, max_pages) pages
    (num_pages, page_size, Hk, D), or of values Dv. Sequence b lies in entry cache_batch_idx[b], b
    by default; its keys are the rows from cache_leftpad[b] to cache_seqlens[b], None for the
    capacity, and those appended behind. q is (B, Sq, Hq, D), k (B, Snew, Hk, D) and v (B, Snew, Hk,
    Dv), or packed with cu_seqlens_q and
    cu_seqlens_k_new, by default the same. Rotary tables are (seqlen_rotary, rotary_dim / 2) at
    least as long as positions in the cache; new keys stand where they are written, queries from
    cache_seqlens[b] on under a mask, else all at cache_seqlens[b].

    Returns out, like q but with Dv, and lse (B, Hq, Sq), packed (Hq, total_q).
    """
    out = torch.empty(output_shape(q, v_cache), dtype=q.dtype, device=q.device)
    is_packed = cu_seqlens_q is not None
    if is_packed:
        out.zero_()  # rows that are no sequence's
    rows_shape = (q.shape[1], q.shape[0]) if is_packed else (q.shape[0], q.shape[2], q.shape[1])
    lse = torch.full(rows_shape, -math.inf, dtype=lse_dtype(q.dtype), device=q.device)

    calls = list(
        _sequences(
            _Cache(k_cache, v_cache, block_table),
            *(q, k, v, cache_seqlens, cache_batch_idx, cache_leftpad),
            *(cu_seqlens_q, cu_seqlens_k_new),
        )
    )
    tables = (rotary_cos, rotary_sin, rotary_interleaved)
    if k is not None and v is not None:
        # All of them first: sequences may share an entry, and see what the others appended.
        for call in calls:
            call.append(k[call.new], v[call.new], *tables)
    for call in calls:
        queries = _rotate(q[call.queries], call.used, options.is_masked, *tables)
        keys, values = call.keys_and_values()
        out_rows, lse_rows = attention_forward(
            queries[None], keys[None], values[None], replace(options, first_sequence=call.index)
        )
        out[call.queries] = out_rows[0]
        if is_packed:
            lse[:, call.queries] = lse_rows[0]
        else:
            lse[call.index] = lse_rows[0]
    return out, lse


def combine(
    out_partial: Tensor, lse_partial: Tensor, out_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The attention over all keys from those over disjoint parts of them.

    out_partial is (splits, B, S, H, D), normalised within its part, and lse_partial (splits, B, S,
    H). Returns out (B, S, H, D) in `out_dtype` and lse (B, S, H). A part whose lse is -inf does not
    count, whatever its out holds; a row without any other has out 0 and lse -inf.
    """
    if lse_partial.shape[0] == 0:
        out = torch.zeros(out_partial.shape[1:], dtype=out_dtype, device=out_partial.device)
        return out, lse_partial.new_full(lse_partial.shape[1:], -math.inf)
    lse = torch.logsumexp(lse_partial, 0)
    weights = torch.exp(lse_partial - lse.masked_fill(lse == -math.inf, 0.0))[..., None]
    parts = out_partial.masked_fill(lse_partial[..., None] == -math.inf, 0.0)
    return (parts * weights).sum(0).to(out_dtype), lse


@dataclass(frozen=True)
class _Cache:
    k: Tensor
    v: Tensor
    block_table: Tensor | None

    @property
    def capacity(self) -> int:
        """Rows of one sequence."""
        pages = 1 if self.block_table is None else self.block_table.shape[1]
        return pages * self.k.shape[1]

    def place(self, entry: int, begin: int, end: int) -> tuple[Tensor | int, Tensor | slice]:
        """First two indices into the caches of an entry's rows begin to end."""
        if self.block_table is None:
            return entry, slice(begin, end)
        return page_rows(self.block_table[entry], self.k.shape[1], begin, end)


@dataclass(frozen=True)
class _Sequence:
    """One sequence of a call."""

    cache: _Cache
    index: int
    queries: int | slice  # along the first dimension of q
    new: int | slice  # along the first dimension of k and v
    entry: int
    leftpad: int
    used: int  # rows before the append
    num_new: int

    def append(
        self, k: Tensor, v: Tensor, cos: Tensor | None, sin: Tensor | None, interleaved: bool
    ) -> None:
        """Write k and v (Snew, Hk, D) behind the rows in use, k rotated to its positions."""
        place = self.cache.place(self.entry, self.used, self.used + self.num_new)
        self.cache.k[place] = _rotate(k, self.used, True, cos, sin, interleaved)
        self.cache.v[place] = v

    def keys_and_values(self) -> tuple[Tensor, Tensor]:
        place = self.cache.place(self.entry, self.leftpad, self.used + self.num_new)
        return self.cache.k[place], self.cache.v[place]


def _sequences(
    cache: _Cache,
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    cache_seqlens: Tensor | int | None,
    cache_batch_idx: Tensor | None,
    cache_leftpad: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k_new: Tensor | None,
) -> Iterator[_Sequence]:
    starts_q = None if cu_seqlens_q is None else cu_seqlens_q.tolist()
    starts_new = starts_q if cu_seqlens_k_new is None else cu_seqlens_k_new.tolist()
    batch = q.shape[0] if starts_q is None else len(starts_q) - 1
    if isinstance(cache_seqlens, Tensor):
        used = cache_seqlens.tolist()
    else:
        used = [cache.capacity if cache_seqlens is None else cache_seqlens] * batch
    entries = range(batch) if cache_batch_idx is None else cache_batch_idx.tolist()
    leftpads = [0] * batch if cache_leftpad is None else cache_leftpad.tolist()
    for index in range(batch):
        queries: int | slice = index
        new: int | slice = index
        num_new = 0
        if starts_q is not None:
            queries = slice(starts_q[index], starts_q[index + 1])
        if k is not None:
            num_new = k.shape[1]
            if starts_new is not None:
                new = slice(starts_new[index], starts_new[index + 1])
                num_new = new.stop - new.start
        yield _Sequence(
            cache=cache,
            index=index,
            queries=queries,
            new=new,
            entry=entries[index],
            leftpad=leftpads[index],
            used=used[index],
            num_new=num_new,
        )


def _rotate(
    x: Tensor,
    first: int,
    is_running: bool,
    cos: Tensor | None,
    sin: Tensor | None,
    interleaved: bool,
) -> Tensor:
    """Rotary embedding (Su et al., "RoFormer", 2021) of x (S, H, D) in its first columns.

    Row t stands at position first + t if `is_running`, else at `first`. x itself without tables.
    """
    if cos is None or sin is None or x.shape[0] == 0:
        return x
    rows = slice(first, first + x.shape[0]) if is_running else slice(first, first + 1)
    dtype = lse_dtype(x.dtype)
    cos_rows, sin_rows = (table[rows, None].to(dtype) for table in (cos, sin))
    half = cos.shape[1]
    result = x.to(dtype, copy=True)
    turned = result[..., : 2 * half]
    pairs = turned.unflatten(-1, (half, 2) if interleaved else (2, half))
    along = -1 if interleaved else -2
    real, imaginary = (part.clone() for part in pairs.unbind(along))
    pairs.select(along, 0).copy_(real * cos_rows - imaginary * sin_rows)
    pairs.select(along, 1).copy_(real * sin_rows + imaginary * cos_rows)
    return result.to(x.dtype)
