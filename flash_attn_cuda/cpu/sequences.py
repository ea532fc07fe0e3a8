"""The sequences of a call, each as a dense call of a batch of one.

Packed, sequence b has the rows from cu_seqlens[b] to cu_seqlens[b + 1]; of queries the first
seqused_q[b] attend, and its keys are those from leftpad_k[b] to seqused_k[b]. Over a cache it lies
in entry cache_batch_idx[b], b by default, and has new keys behind those too. With a block_table its
keys are in the pages that its entry of that names. With lists of keys, every query and key head is
a sequence of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor

from ..call.fields import OVER_PAIRS, AttentionCall
from ..call.fp8 import to_e4m3, token_scales
from ..call.tensors import E4M3

Index = Any  # what takes a part of a tensor, one sequence as a batch of one


@dataclass(frozen=True, eq=False)
class Sequence:
    """A call of sequences of one length, and where it lies in the call that it is a part of."""

    call: AttentionCall
    entry: slice  # of what has an entry a sequence
    queries: Index  # of what is like q
    rows: Index  # of what is like softmax_lse
    keys: Index  # of what is like k; new tensors where that is in pages


def sequences_of(call: AttentionCall) -> Iterator[Sequence]:
    """The sequences that have a query: without one there is nothing to compute. New keys are in
    the cache already.
    """
    every = slice(None)
    if not (call.is_packed() or call.over_cache):
        yield Sequence(call, every, every, every, every)
        return
    bounds, used_q = _numbers(call.cu_seqlens_q), _numbers(call.seqused_q)
    leftpad, bounds_new = _numbers(call.leftpad_k), _numbers(call.cu_seqlens_k_new)
    for index, used in enumerate(_used_keys(call)):
        queries = rows = _part(index, bounds, None if used_q is None else used_q[index])
        if bounds is not None:
            rows = (None, every, queries[1])
        q = call.q[queries]
        if q.shape[1] == 0:
            continue
        new = 0 if call.k_new is None else call.k_new[_part(index, bounds_new)].shape[1]
        keys = _keys(call, index, 0 if leftpad is None else leftpad[index], used + new)
        q = _rotated(q, call, used, runs=call.is_windowed())
        if call.is_fp8():
            q = _times_scale(q, call, index)
        k, v = (_rows(call, name, index, keys) for name in "kv")
        if call.qv is not None:  # one product of both
            rope = k
            q, k = torch.cat([q, call.qv[queries]], -1), torch.cat([k, v], -1)
            if call.values_include_rope:
                v = torch.cat([v, rope], -1)
        alone = _alone(call, index, queries, q, k, v)
        found = Sequence(alone, slice(index, index + 1), queries, rows, keys)
        if call.key_lists is None:
            yield found
        else:
            yield from _of_lists(found, call.key_lists[queries], is_packed=bounds is not None)


def _of_lists(whole: Sequence, lists: Tensor, *, is_packed: bool) -> Iterator[Sequence]:
    """Each query of a sequence (a batch of one) and each key head with the keys that its list
    (1, Sq, Hk, n) names, as often as it does, and that the query sees.
    """
    call = whole.call
    (seqlen_q, heads_q), (seqlen_k, heads_k) = call.q.shape[1:3], call.k.shape[1:3]
    left, right = call.window()
    group = heads_q // heads_k
    anywhere: dict[str, Any] = {"key_lists": None, "origin": None, "causal": False}
    anywhere |= {"window_size_left": -1, "window_size_right": -1}
    for query, head in product(range(seqlen_q), range(heads_k)):
        entries, centre = lists[0, query, head].long(), query + seqlen_k - seqlen_q
        is_seen = entries >= max(0, centre - left if left >= 0 else 0)
        if right >= 0:
            is_seen &= entries <= centre + right
        row, heads = slice(query, query + 1), slice(head * group, (head + 1) * group)
        k, v = (x[:, entries[is_seen], head : head + 1] for x in (call.k, call.v))
        sink = None if call.sink is None else call.sink[heads]
        part = replace(call, q=call.q[:, row, heads], k=k, v=v, sink=sink, **anywhere)
        entry: Index = whole.entry
        if is_packed:
            first = whole.queries[1].start + query
            entry, row = None, slice(first, first + 1)
        yield Sequence(part, whole.entry, (entry, row, heads), (entry, heads, row), keys=None)


def append(call: AttentionCall) -> None:
    """Writes new keys and values into the cache. All of them are there before a sequence is read:
    sequences may share an entry, and see what the others appended.
    """
    if call.k_new is None or call.v_new is None:
        return
    bounds = _numbers(call.cu_seqlens_k_new)
    for index, used in enumerate(_used_keys(call)):
        new = _part(index, bounds)
        k = _rotated(call.k_new[new], call, used, runs=True)
        keys = _keys(call, index, used, used + k.shape[1])
        for name, x in (("k", k), ("v", call.v_new[new])):
            if getattr(call, name).dtype == E4M3:
                _store_e4m3(call, name, x, index, keys)
            else:
                getattr(call, name)[keys] = x


def _scales(call: AttentionCall, name: str, index: int, keys: Index) -> Tensor:
    """The scales of rows of k or v of e4m3, broadcastable to (1, S, Hk, D)."""
    scales = getattr(call, f"{name}_descale")
    if scales.dim() == 4:  # of groups of columns
        of_groups = _picked(scales, keys).to(torch.float32)
        return of_groups.repeat_interleave(call.head_dim_v() // of_groups.shape[-1], -1)
    if scales.dim() == 3:
        return scales[keys][..., None]
    return (scales if scales.dim() == 1 else scales[index])[:, None]


def _rows(call: AttentionCall, name: str, index: int, keys: Index) -> Tensor:
    """Rows of k or v, (1, S, Hk, D): those of e4m3 in the dtype of the computation."""
    x: Tensor = getattr(call, name)
    if x.dtype != E4M3:
        return x[keys]
    return _picked(x, keys).to(call.lse_dtype()) * _scales(call, name, index, keys)


def _picked(x: Tensor, keys: Index) -> Tensor:
    """x[keys], which torch has of no numbers of 8 bits."""
    return x[keys] if x.itemsize > 1 else x.view(torch.uint8)[keys].view(x.dtype)


def _put(x: Tensor, keys: Index, rows: Tensor) -> None:
    """x[keys] = rows."""
    if x.itemsize > 1:
        x[keys] = rows
    else:
        x.view(torch.uint8)[keys] = rows.view(torch.uint8)


def _store_e4m3(call: AttentionCall, name: str, x: Tensor, index: int, keys: Index) -> None:
    if call.quantizes_tokens:
        scales = getattr(call, f"{name}_descale")
        groups = scales.shape[3:]
        of_groups = x.unflatten(-1, (*groups, -1)) if groups else x
        _put(scales, keys, token_scales(of_groups, scales.dtype))
    if x.dtype != E4M3:
        x = to_e4m3(x, _scales(call, name, index, keys))
    _put(getattr(call, name), keys, x)


def _times_scale(q: Tensor, call: AttentionCall, index: int) -> Tensor:
    """q (1, S, Hq, D), of which heads of one key head share a scale, in the dtype of the
    computation.
    """
    scales = call.q_descale
    if scales is None:
        return q
    group = call.q.shape[-2] // call.k.shape[-2]
    of_heads = (scales if scales.dim() == 1 else scales[index]).repeat_interleave(group)
    return q.to(call.lse_dtype()) * of_heads[:, None]


def of_entry(x: Any, entry: slice) -> Any:
    """The part of x (B|1, ...) that is of some entries of the batch: a view."""
    return x if x is None or x.shape[0] == 1 else x[entry]


def _alone(
    call: AttentionCall, index: int, queries: Index, q: Tensor, k: Tensor, v: Tensor
) -> AttentionCall:
    """Sequence `index` of a call, of which these are queries, where they lie, and keys."""
    entry, slopes = slice(index, index + 1), call.alibi_slopes
    if call.origin is None:
        origin = torch.tensor([[index * q.shape[2], 0, 0, k.shape[1] - q.shape[1]]])
    else:
        origin = call.origin[entry]
    if slopes is not None and slopes.dim() == 2:
        slopes = slopes[entry]
    pairs: dict[str, Any] = {name: of_entry(getattr(call, name), entry) for name in OVER_PAIRS}
    dense: dict[str, Any] = {"cu_seqlens_q": None, "block_table": None, "over_cache": False}
    dense["qv"] = None
    dense["tree_mask"] = None if call.tree_mask is None else call.tree_mask[queries]
    return replace(call, q=q, k=k, v=v, origin=origin, alibi_slopes=slopes, **pairs, **dense)


def _numbers(x: Tensor | None) -> list[int] | None:
    return None if x is None else x.tolist()


def _used_keys(call: AttentionCall) -> list[int]:
    """Rows of each sequence that hold keys, left padding included, new ones not."""
    if call.seqused_k is not None:
        return call.seqused_k.tolist()
    if call.over_cache:
        return [call.capacity() if call.seqlen_k is None else call.seqlen_k] * call.batch()
    assert call.cu_seqlens_k is not None  # checked
    return call.cu_seqlens_k.diff().tolist()


def _part(index: int, bounds: list[int] | None, used: int | None = None) -> Index:
    """An entry, or its first `used` rows, of what is packed with these bounds."""
    if bounds is None:
        return slice(index, index + 1)
    begin = bounds[index]
    return None, slice(begin, bounds[index + 1] if used is None else begin + used)


def _keys(call: AttentionCall, index: int, begin: int, end: int) -> Index:
    """Rows begin to end of a sequence's keys."""
    entry = index if call.cache_batch_idx is None else int(call.cache_batch_idx[index])
    if call.block_table is not None:
        positions, page_size = torch.arange(begin, end), call.k.shape[1]
        pages = call.block_table[entry][positions // page_size].long()
        return pages[None], (positions % page_size)[None]
    if call.over_cache:
        return slice(entry, entry + 1), slice(begin, end)
    assert call.cu_seqlens_k is not None  # checked
    first = int(call.cu_seqlens_k[index])
    return None, slice(first + begin, first + end)


def _rotated(x: Tensor, call: AttentionCall, first: int, *, runs: bool) -> Tensor:
    """Rotary embedding (Su et al., "RoFormer", 2021) of x (1, S, H, D) in its first columns.

    Row t stands at position first + t if it runs, else at `first`. x itself without tables.
    """
    cos, sin = call.rotary_cos, call.rotary_sin
    if cos is None or sin is None or x.shape[1] == 0:
        return x
    rows = slice(first, first + x.shape[1]) if runs else slice(first, first + 1)
    dtype = call.lse_dtype()
    cos_rows, sin_rows = (table[rows, None].to(dtype) for table in (cos, sin))
    half, interleaved = cos.shape[1], call.rotary_interleaved
    result = x.to(dtype, copy=True)
    turned = result[..., : 2 * half]
    pairs = turned.unflatten(-1, (half, 2) if interleaved else (2, half))
    along = -1 if interleaved else -2
    real, imaginary = (part.clone() for part in pairs.unbind(along))
    pairs.select(along, 0).copy_(real * cos_rows - imaginary * sin_rows)
    pairs.select(along, 1).copy_(real * sin_rows + imaginary * cos_rows)
    return result.to(x.dtype)
