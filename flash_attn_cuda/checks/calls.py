"""What a whole attention call must satisfy, whichever backend runs it: its form on every device,
and on the CPU the contents of its lengths and indices, which on CUDA kernels check themselves
(device_errors.py).

The rules of single arguments are in tensors.py, lengths.py and masks.py.
"""

from __future__ import annotations

from typing import Any

import torch

from ..call import ARRAYS, CACHE_NAMES, NAMES, AttentionCall, Incoming, Names
from .lengths import (
    MAX_ROWS_WITH_ORIGIN,
    check_block_table,
    check_bound,
    check_cu_seqlens,
    check_cu_seqlens_contents,
    check_max_seqlen,
    check_num_splits,
    check_origin_contents,
    check_pages,
    check_range,
    check_sm_margin,
)
from .masks import PairExtent, check_bias, check_lists
from .tensors import (
    CACHE_LAYOUT,
    DENSE_LAYOUT,
    PACKED_LAYOUT,
    PAGED_LAYOUT,
    check_alibi_slopes,
    check_cuda_head_dims,
    check_device_and_dtype,
    check_dropout_p,
    check_like,
    check_qkv,
    check_rng_state,
    check_softcap,
    check_softmax_scale,
    check_tensor,
    output_shape,
    refuse_gradients,
)


def names_of(call: AttentionCall) -> Names:
    """What errors call the arguments where nobody says otherwise."""
    return CACHE_NAMES if call.over_cache else NAMES


def check_call(call: AttentionCall, names: Names | None = None, *, is_padded: bool = True) -> None:
    """Raise unless some backend runs the call: TypeError, ValueError or NotImplementedError.

    `is_padded`: head dims are what CUDA kernels read, not what a public function pads.
    """
    names = names_of(call) if names is None else names
    _check_tensors(call, names)
    batch = call.batch()
    check_softmax_scale(call.softmax_scale)
    check_dropout_p(call.dropout_p)
    check_softcap(call.softcap)
    check_alibi_slopes(call.alibi_slopes, batch, call.q)
    if call.rng_state is not None:
        check_rng_state(call.rng_state, call.dropout_p, call.q)
    check_num_splits(call.num_splits)
    check_sm_margin(call.sm_margin)
    if call.over_cache:
        _check_cache(call, batch)
    check_masks(call)
    if is_padded and not call.over_cache:
        check_cuda_head_dims(call.q, call.v)
    _check_refused(call)


def _check_tensors(call: AttentionCall, names: Names) -> None:
    """q, k, v and the lengths have the form of one call."""
    q, k = call.q, call.k
    is_packed, is_paged = call.is_packed(), call.block_table is not None
    k_layout = PACKED_LAYOUT if is_packed else DENSE_LAYOUT
    k_layout = CACHE_LAYOUT if call.over_cache else k_layout
    k_layout = PAGED_LAYOUT if is_paged else k_layout
    q_layout = PACKED_LAYOUT if is_packed else DENSE_LAYOUT
    check_qkv(q, k, call.v, (names.q, names.k, names.v), q_layout, k_layout)
    if is_packed:
        check_cu_seqlens(names.cu_seqlens_q, call.cu_seqlens_q, q)
        check_max_seqlen(names.max_seqlen_q, call.max_seqlen_q)
    batch = call.batch()
    rows = None if call.cache_batch_idx is not None else batch
    if call.over_cache:
        _check_entries(call, rows)
    elif is_packed:
        _check_packed_keys(call, names, batch)
    else:
        _check_one_length(call, names)
    _check_arrays(call, names, batch)
    check_block_table(call.block_table, rows, k, q, names.k)


def _check_arrays(call: AttentionCall, names: Names, batch: int) -> None:
    """Arrays whose shape and dtype the declaration says."""
    sizes: dict[Any, int] = {"B": batch, "Hq": call.q.shape[-2]}
    dtypes = {"int32": torch.int32, "int64": torch.int64, "lse": call.lse_dtype()}
    for name, symbols, dtype in ARRAYS:
        array: Any = getattr(call, name)
        if array is not None:
            shape: list[Any] = []
            for symbol in symbols:
                shape.append(sizes.get(symbol, symbol))
            check_like(getattr(names, name, name), array, shape, dtypes[dtype], call.q)


def _check_packed_keys(call: AttentionCall, names: Names, batch: int) -> None:
    check_max_seqlen(names.max_seqlen_k, call.max_seqlen_k)
    if call.cu_seqlens_k is None and call.block_table is not None and call.seqused_k is not None:
        return
    entries = check_cu_seqlens(names.cu_seqlens_k, call.cu_seqlens_k, call.q)
    if entries != batch + 1:
        raise ValueError(
            f"{names.cu_seqlens_k}: must have as many entries as {names.cu_seqlens_q} "
            f"({batch + 1}), got {entries}"
        )


def _check_one_length(call: AttentionCall, names: Names) -> None:
    if call.k.shape[0] != call.q.shape[0]:
        raise ValueError(
            f"{names.k}: batch must be that of {names.q} ({call.q.shape[0]}), got {call.k.shape[0]}"
        )
    for name in ("cu_seqlens_k", "seqused_q", "seqused_k", "leftpad_k", "block_table"):
        if getattr(call, name) is not None:
            raise ValueError(f"{name}: must be None without cu_seqlens_q, got a tensor")
    for name, x in (("max_seqlen_q", call.q), ("max_seqlen_k", call.k)):
        if getattr(call, name) not in (0, x.shape[1]):
            raise ValueError(
                f"{name}: must be the length of {name[-1]} ({x.shape[1]}) without cu_seqlens_q, "
                f"got {getattr(call, name)}"
            )


def _check_entries(call: AttentionCall, rows: int | None) -> None:
    for name, cache in (("k_cache", call.k), ("v_cache", call.v)):
        if cache.is_cuda and cache.stride(-1) != 1:
            raise ValueError(
                f"{name}: must be contiguous in its last dimension, got stride {cache.stride(-1)}"
            )
    if call.block_table is None and rows is not None and call.k.shape[0] != rows:
        raise ValueError(
            f"k_cache: batch must be that of q ({rows}) without cache_batch_idx, "
            f"got {call.k.shape[0]}"
        )


def _check_cache(call: AttentionCall, batch: int) -> None:
    _check_new_keys(call, batch)
    _check_rotary(call)
    if isinstance(call.seqlen_k, int):
        capacity = call.capacity()
        new = call.k_new.shape[1] if call.k_new is not None and call.k_new.dim() == 4 else 0
        if call.seqlen_k < 0 or call.seqlen_k + new > capacity:
            raise ValueError(
                f"cache_seqlens: must be from 0 to {capacity - new}, for {new} new keys and a "
                f"cache of {capacity}, got {call.seqlen_k}"
            )


def _check_new_keys(call: AttentionCall, batch: int) -> None:
    q, k, v = call.q, call.k_new, call.v_new
    if (k is None) != (v is None):
        missing, given = ("k", "v") if k is None else ("v", "k")
        raise ValueError(f"{missing}: must be given with {given}, got None")
    if k is None or v is None:
        if call.cu_seqlens_k_new is not None:
            raise ValueError("cu_seqlens_k_new: must be None without k")
        return
    if call.seqused_k is None and call.seqlen_k is None:
        raise ValueError("cache_seqlens: must be given with k, got None")
    is_packed = call.cu_seqlens_k_new is not None
    layout = PACKED_LAYOUT if is_packed else DENSE_LAYOUT
    for name, tensor, cache in (("k", k, call.k), ("v", v, call.v)):
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
        check_like("cu_seqlens_k_new", call.cu_seqlens_k_new, (batch + 1,), torch.int32, q)
    elif k.shape[0] != batch:
        raise ValueError(f"k: batch must be that of q ({batch}), got {k.shape[0]}")
    elif isinstance(k.shape[1], int) and k.shape[1] > call.capacity():
        raise ValueError(
            f"k: must fit the cache, which holds {call.capacity()} rows of a sequence, "
            f"got {k.shape[1]}"
        )


def _check_rotary(call: AttentionCall) -> None:
    cos, sin, q = call.rotary_cos, call.rotary_sin, call.q
    if (cos is None) != (sin is None):
        missing, given = ("cos", "sin") if cos is None else ("sin", "cos")
        raise ValueError(f"rotary_{missing}: must be given with rotary_{given}, got None")
    if cos is None or sin is None:
        return
    if call.k_new is None:
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


def check_out(call: AttentionCall) -> None:
    """Raise unless the results of a call of tensors can be written into its out."""
    out = call.out
    refuse_gradients("as results are written into it", out=out)
    check_like("out", out, output_shape(call.q, call.v), call.result_dtype(), call.q)
    assert out is not None
    if out.shape[-1] > 1 and out.stride(-1) != 1:
        raise ValueError(
            f"out: must be contiguous in its last dimension, got stride {out.stride(-1)}"
        )


def extent_of(call: AttentionCall) -> PairExtent:
    """The pairs of queries and keys that masks and biases of a call are about."""
    if call.is_packed():
        seqlens = (call.max_seqlen_q, call.max_seqlen_k)
    else:
        seqlens = (call.q.shape[1], call.k.shape[1])
    return PairExtent(call.batch(), call.q.shape[-2], *seqlens, call.is_packed())


def check_masks(call: AttentionCall) -> None:
    """Raise unless lists, bits and bias are of the call's pairs."""
    extent = extent_of(call)
    check_lists(call.block_rows, call.block_columns, call.mask_bits, extent, call.q)
    check_bias("bias", call.bias, extent, call.q)


def _check_refused(call: AttentionCall) -> None:
    """What fits together, and no backend does."""
    if call.wants_s_dmask() and call.has_masks():
        raise NotImplementedError(
            "return_softmax: must be False where there is dropout and a mask or a bias, got True "
            f"and dropout_p {call.dropout_p}"
        )
    if call.origin is not None:
        _check_origin(call)
    if call.fp32_results and (call.has_masks() or call.reads_in_place()):
        what = "a mask or a bias" if call.has_masks() else "a block_table"
        raise NotImplementedError(f"fp32_results: must be False with {what}, got True")
    if not call.reads_in_place():
        return
    if call.dropout_p > 0.0:
        raise NotImplementedError(f"dropout_p: must be 0 with a block_table, got {call.dropout_p}")
    if call.has_masks():
        raise NotImplementedError("attn_mask: must be None with a block_table")


def _check_origin(call: AttentionCall) -> None:
    if not call.is_packed():
        raise ValueError("origin: must be None without cu_seqlens_q, got a tensor")
    refused = {
        "a block_table": call.block_table is not None,
        "a cache": call.over_cache,
        "a mask or a bias": call.has_masks(),
        "return_softmax": call.wants_s_dmask(),
    }
    for what, is_there in refused.items():
        if is_there:
            raise NotImplementedError(f"origin: must be None with {what}, got a tensor")
    rows = max(call.q.shape[0], call.k.shape[0])
    if rows > MAX_ROWS_WITH_ORIGIN:
        raise ValueError(
            f"origin: must be None for more than {MAX_ROWS_WITH_ORIGIN} rows, got {rows}"
        )


def check_gradients(call: AttentionCall, wants_dbias: bool) -> None:
    """Raise for a forward that has no backward."""
    if call.deterministic and call.has_masks():
        what = "a block mask" if call.block_rows is not None else "a floating attn_mask"
        raise NotImplementedError(f"deterministic: must be False with {what}, got True")
    if wants_dbias and call.softcap > 0.0:
        raise NotImplementedError(
            f"attn_mask: has no gradient with softcap, got a softcap of {call.softcap}"
        )


def check_incoming(call: AttentionCall, incoming: Incoming) -> None:
    """Raise unless `incoming` has results of this call, which is checked, and their gradients."""
    q, out_shape, rows = call.q, output_shape(call.q, call.v), call.lse_shape()
    if call.reads_in_place():
        raise NotImplementedError(
            "block_table: must be None in a call whose gradients are wanted, as must be a cache"
        )
    check_gradients(call, incoming.wants_dbias)
    if incoming.wants_dbias and call.bias is None:
        raise ValueError("wants_dbias: must be False without a bias, got True")
    if incoming.dout is not None:
        check_like("dout", incoming.dout, out_shape, q.dtype, q)
    check_like("out", incoming.out, out_shape, q.dtype, q)
    check_like("softmax_lse", incoming.softmax_lse, rows, call.lse_dtype(), q)
    if incoming.dlse is not None:
        check_like("dlse", incoming.dlse, rows, call.lse_dtype(), q)
    check_rng_state(incoming.rng_state, call.dropout_p, q)
    if incoming.accumulate and not call.fp32_results:
        raise ValueError("accumulate: must be False without fp32_results, got True")
    for name, like in (("dq", q), ("dk", call.k), ("dv", call.v)):
        target: Any = getattr(incoming, name)
        if target is not None:
            check_like(name, target, like.shape, call.result_dtype(), q)
        elif incoming.accumulate:
            raise ValueError(f"{name}: must be given with accumulate, got None")


# -- contents, on the CPU ------------------------------------------------------------------------


def check_contents(call: AttentionCall, names: Names | None = None) -> None:
    """Raise unless the contents of the lengths and indices of a call on the CPU lie within its
    tensors.
    """
    if call.over_cache:
        _check_cache_contents(call)
    elif call.is_packed():
        _check_packed_contents(call, NAMES if names is None else names)


def _check_packed_contents(call: AttentionCall, names: Names) -> None:
    """Raise unless the contents of the lengths, tensors on the CPU, lie within q, k and v."""
    q, k = call.q, call.k
    used_q = check_cu_seqlens_contents(
        names.cu_seqlens_q, call.cu_seqlens_q, q.shape[0], names.total_q
    )
    if call.seqused_q is not None:
        check_range("seqused_q", call.seqused_q, 0, used_q)
        used_q = call.seqused_q
    check_bound(names.max_seqlen_q, call.max_seqlen_q, used_q)

    table = call.block_table
    if table is None:
        used_k = check_cu_seqlens_contents(
            names.cu_seqlens_k, call.cu_seqlens_k, k.shape[0], names.total_k
        )
        if call.seqused_k is not None:
            check_range("seqused_k", call.seqused_k, 0, used_k)
            used_k = call.seqused_k
    else:
        capacity = table.shape[1] * k.shape[1]
        if call.seqused_k is not None:
            name, used_k = "seqused_k", call.seqused_k
        else:
            name = names.cu_seqlens_k
            used_k = check_cu_seqlens_contents(name, call.cu_seqlens_k, None, "")
        check_range(name, used_k, 0, capacity, "a sequence's length")
    check_bound(names.max_seqlen_k, call.max_seqlen_k, used_k)
    if call.leftpad_k is not None:
        check_range("leftpad_k", call.leftpad_k, 0, used_k)
    if table is not None:
        check_pages(table, call.leftpad_k, used_k, k.shape[:2])
    if call.origin is not None and call.dropout_p > 0.0:
        check_origin_contents(call.origin)


def _check_cache_contents(call: AttentionCall) -> None:
    """Raise unless the contents of the lengths and indices, on the CPU, lie within the cache."""
    q, k_cache, table = call.q, call.k, call.block_table
    batch, capacity = call.batch(), call.capacity()
    used = call.seqused_k
    if call.seqlen_k is not None:
        used = torch.full((batch,), call.seqlen_k, device="cpu")
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
    if call.k_new is not None:
        new = new + call.k_new.shape[1]
        if call.cu_seqlens_k_new is not None:
            total, name = call.k_new.shape[0], "cu_seqlens_k_new"
            new = check_cu_seqlens_contents(name, call.cu_seqlens_k_new, total, "total_k_new")
        check_range("cache_seqlens", used + new, 0, capacity, "with the new keys, the length")
    if call.leftpad_k is not None:
        check_range("cache_leftpad", call.leftpad_k, 0, used + new)
    rows = k_cache.shape[0] if table is None else table.shape[0]
    if call.cache_batch_idx is not None:
        check_range("cache_batch_idx", call.cache_batch_idx, 0, rows - 1)
    if table is not None:
        if call.cache_batch_idx is not None:
            table = table[call.cache_batch_idx.long()]
        check_pages(table, call.leftpad_k, used + new, k_cache.shape[:2])
    if call.rotary_cos is not None:
        rotated = torch.maximum(new, queries if call.is_windowed() else queries.clamp(max=1))
        last = (used + rotated - 1).masked_fill(rotated == 0, 0)
        limit = call.rotary_cos.shape[0] - 1
        if limit < 0:
            if rotated.any():
                raise ValueError("rotary_cos: must have a row for every position, got no rows")
            return
        what = "the last position that a rotation needs"
        check_range("rotary_cos", last, 0, limit, f"{what}, cache_seqlens plus new rows less 1,")
