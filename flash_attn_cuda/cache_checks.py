"""What the arguments of attention over a KV cache must satisfy: their form, and on the CPU their
contents (length_checks.py says the same of packed sequences).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .checks import (
    DENSE_LAYOUT,
    PACKED_LAYOUT,
    PAGED_LAYOUT,
    check_device_and_dtype,
    check_qkv,
    check_sink,
    check_tensor,
)
from .length_checks import (
    check_block_table,
    check_bound,
    check_cu_seqlens,
    check_cu_seqlens_contents,
    check_max_seqlen,
    check_num_splits,
    check_optional,
    check_pages,
    check_range,
)

CACHE_LAYOUT = "(batch_cache, capacity, heads, head_dim)"
NAMES = ("q", "k_cache", "v_cache")


@dataclass(frozen=True)
class CacheArguments:
    """Arguments of the cache operators, in the order of flash_attn_with_kvcache.

    cache_seqlens, a tensor, and seqlen_k, one number for every sequence, exclude each other.
    """

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    k: Tensor | None
    v: Tensor | None
    rotary_cos: Tensor | None
    rotary_sin: Tensor | None
    cache_seqlens: Tensor | None
    cache_batch_idx: Tensor | None
    cache_leftpad: Tensor | None
    block_table: Tensor | None
    softmax_scale: float
    causal: bool
    window_size_left: int
    window_size_right: int
    softcap: float
    rotary_interleaved: bool
    alibi_slopes: Tensor | None
    num_splits: int
    cu_seqlens_q: Tensor | None
    max_seqlen_q: int
    cu_seqlens_k_new: Tensor | None
    batch_invariant: bool
    seqlen_k: int | None
    sink: Tensor | None = None

    @property
    def batch(self) -> int:
        """Sequences of a call."""
        return self.q.shape[0] if self.cu_seqlens_q is None else self.cu_seqlens_q.shape[0] - 1

    @property
    def capacity(self) -> int:
        """Rows that the cache has for one sequence."""
        rows = self.k_cache.shape[1]
        return rows if self.block_table is None else self.block_table.shape[1] * rows


def check_cache_inputs(call: CacheArguments) -> None:
    """Raise unless the arguments have the form of one call."""
    q, k_cache = call.q, call.k_cache
    is_paged = call.block_table is not None
    q_layout = DENSE_LAYOUT if call.cu_seqlens_q is None else PACKED_LAYOUT
    k_layout = PAGED_LAYOUT if is_paged else CACHE_LAYOUT
    check_qkv(q, k_cache, call.v_cache, NAMES, q_layout, k_layout)
    for name, cache in (("k_cache", k_cache), ("v_cache", call.v_cache)):
        if cache.is_cuda and cache.stride(-1) != 1:
            raise ValueError(
                f"{name}: must be contiguous in its last dimension, got stride {cache.stride(-1)}"
            )
    if call.cu_seqlens_q is not None:
        check_cu_seqlens("cu_seqlens_q", call.cu_seqlens_q, q)
        check_max_seqlen("max_seqlen_q", call.max_seqlen_q)
    batch = call.batch
    rows = None if call.cache_batch_idx is not None else batch
    if not is_paged and rows is not None and k_cache.shape[0] != batch:
        raise ValueError(
            f"k_cache: batch must be that of q ({batch}) without cache_batch_idx, "
            f"got {k_cache.shape[0]}"
        )
    check_optional("cache_seqlens", call.cache_seqlens, (batch,), q)
    check_optional("cache_batch_idx", call.cache_batch_idx, (batch,), q)
    check_optional("cache_leftpad", call.cache_leftpad, (batch,), q)
    check_block_table(call.block_table, rows, k_cache, q, "k_cache")
    check_num_splits(call.num_splits)
    check_sink(call.sink, q)
    _check_new_keys(call, batch)
    _check_rotary(call)
    if isinstance(call.seqlen_k, int):
        capacity = call.capacity
        new = call.k.shape[1] if call.k is not None and call.k.dim() == 4 else 0
        if call.seqlen_k < 0 or call.seqlen_k + new > capacity:
            raise ValueError(
                f"cache_seqlens: must be from 0 to {capacity - new}, for {new} new keys and a "
                f"cache of {capacity}, got {call.seqlen_k}"
            )


def _check_new_keys(call: CacheArguments, batch: int) -> None:
    q, k, v = call.q, call.k, call.v
    if (k is None) != (v is None):
        missing, given = ("k", "v") if k is None else ("v", "k")
        raise ValueError(f"{missing}: must be given with {given}, got None")
    if k is None or v is None:
        if call.cu_seqlens_k_new is not None:
            raise ValueError("cu_seqlens_k_new: must be None without k")
        return
    if call.cache_seqlens is None and call.seqlen_k is None:
        raise ValueError("cache_seqlens: must be given with k, got None")
    is_packed = call.cu_seqlens_k_new is not None
    layout = PACKED_LAYOUT if is_packed else DENSE_LAYOUT
    for name, tensor, cache in (("k", k, call.k_cache), ("v", v, call.v_cache)):
        heads, head_dim = cache.shape[-2:]
        check_tensor(name, tensor)
        check_device_and_dtype(name, tensor, q)
        dims = layout.count(",") + 1
        if tensor.dim() != dims or tensor.shape[-2] != heads or tensor.shape[-1] != head_dim:
            raise ValueError(
                f"{name}: must have shape {layout} with the heads and head_dim of {name}_cache "
                f"({heads}, {head_dim}), got {tuple(tensor.shape)}"
            )
    if v.shape[:-1] != k.shape[:-1]:
        raise ValueError(
            f"v: must have the shape of k but for the last dimension, {tuple(k.shape)}, "
            f"got {tuple(v.shape)}"
        )
    if is_packed:
        check_cu_seqlens("cu_seqlens_k_new", call.cu_seqlens_k_new, q)
        check_optional("cu_seqlens_k_new", call.cu_seqlens_k_new, (batch + 1,), q)
    elif k.shape[0] != batch:
        raise ValueError(f"k: batch must be that of q ({batch}), got {k.shape[0]}")
    elif isinstance(k.shape[1], int) and k.shape[1] > call.capacity:
        raise ValueError(
            f"k: must fit the cache, which holds {call.capacity} rows of a sequence, "
            f"got {k.shape[1]}"
        )


def _check_rotary(call: CacheArguments) -> None:
    cos, sin, q = call.rotary_cos, call.rotary_sin, call.q
    if (cos is None) != (sin is None):
        missing, given = ("cos", "sin") if cos is None else ("sin", "cos")
        raise ValueError(f"rotary_{missing}: must be given with rotary_{given}, got None")
    if cos is None or sin is None:
        return
    if call.k is None:
        raise ValueError("rotary_cos: must be None without k: a rotation is one of new keys")
    for name, table in (("rotary_cos", cos), ("rotary_sin", sin)):
        check_tensor(name, table)
        check_device_and_dtype(name, table, q)
        if table.dim() != 2 or not 2 <= 2 * table.shape[1] <= q.shape[-1]:
            raise ValueError(
                f"{name}: must have shape (seqlen_rotary, rotary_dim / 2), with rotary_dim from 2 "
                f"to head_dim ({q.shape[-1]}), got {tuple(table.shape)}"
            )
    if sin.shape != cos.shape:
        raise ValueError(
            f"rotary_sin: must have the shape of rotary_cos, {tuple(cos.shape)}, "
            f"got {tuple(sin.shape)}"
        )


# -- contents, on the CPU ------------------------------------------------------------------------


def check_cache_contents(call: CacheArguments, used: Tensor | None) -> None:
    """Raise unless the contents of the lengths and indices, on the CPU, lie within the cache.

    `used` is cache_seqlens as a tensor (batch,), or None for the whole capacity.
    """
    q, k_cache, table = call.q, call.k_cache, call.block_table
    batch, capacity = call.batch, call.capacity
    queries = torch.full((batch,), q.shape[1], device="cpu")
    if call.cu_seqlens_q is not None:
        queries = check_cu_seqlens_contents(
            "cu_seqlens_q", call.cu_seqlens_q, q.shape[0], "total_q"
        )
        check_bound("max_seqlen_q", call.max_seqlen_q, queries)
    if used is None:
        used = torch.full((batch,), capacity, device="cpu")
    check_range("cache_seqlens", used, 0, capacity)
    new = torch.zeros_like(used)
    if call.k is not None:
        new = new + call.k.shape[1]
        if call.cu_seqlens_k_new is not None:
            total, name = call.k.shape[0], "cu_seqlens_k_new"
            new = check_cu_seqlens_contents(name, call.cu_seqlens_k_new, total, "total_k_new")
        check_range("cache_seqlens", used + new, 0, capacity, "with the new keys, the length")
    if call.cache_leftpad is not None:
        check_range("cache_leftpad", call.cache_leftpad, 0, used + new)
    rows = k_cache.shape[0] if table is None else table.shape[0]
    if call.cache_batch_idx is not None:
        check_range("cache_batch_idx", call.cache_batch_idx, 0, rows - 1)
    if table is not None:
        if call.cache_batch_idx is not None:
            table = table[call.cache_batch_idx.long()]
        check_pages(table, call.cache_leftpad, used + new, k_cache.shape[:2])
    if call.rotary_cos is not None:
        in_order = call.causal or call.window_size_left >= 0 or call.window_size_right >= 0
        rotated = torch.maximum(new, queries if in_order else queries.clamp(max=1))
        last = (used + rotated - 1).masked_fill(rotated == 0, 0)
        limit = call.rotary_cos.shape[0] - 1
        if limit < 0:
            if rotated.any():
                raise ValueError("rotary_cos: must have a row for every position, got no rows")
            return
        what = "the last position that a rotation needs"
        check_range("rotary_cos", last, 0, limit, f"{what}, cache_seqlens plus new rows less 1,")
