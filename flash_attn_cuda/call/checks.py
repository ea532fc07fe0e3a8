"""What a whole attention call must satisfy, whichever backend runs it: its form on every device,
and on the CPU the contents of its lengths and indices, which on CUDA kernels check themselves
(installed/device_errors.py).

Which arguments go together, rules.py says; the rules of single ones are in tensors.py, lengths.py
and masks.py.
"""

from __future__ import annotations

from typing import Any

import torch

from . import lengths, masks, rules, tensors
from .fields import (
    ARGUMENTS,
    ARRAYS,
    CACHE_NAMES,
    INCOMING_ARRAYS,
    NAMES,
    RANGES,
    TANGENTS,
    TARGETS,
    Argument,
    AttentionCall,
    Incoming,
    Names,
    Tangents,
)
from .interpret import check_holds, check_in_range, check_rules, first_broken, layout_of
from .rounding import is_known
from .tensors import E4M3, E8M0


def names_of(call: AttentionCall) -> Names:
    """What errors call the arguments where nobody says otherwise."""
    return CACHE_NAMES if call.over_cache else NAMES


def check_call(call: AttentionCall, names: Names | None = None, *, is_padded: bool = True) -> None:
    """Raise unless some backend runs the call: TypeError, ValueError or NotImplementedError.

    `is_padded`: head dims are what CUDA kernels read, not what a public function pads.
    """
    names = names_of(call) if names is None else names
    check_numbers(call, names)
    _check_tensors(call, names)
    if call.rng_state is not None:
        tensors.check_rng_state(call.rng_state, call.dropout_p, call.q)
    if call.over_cache:
        _check_new_keys(call)
        _check_length_of_all(call)
    masks.check_over_pairs(call, extent_of(call), names)
    if is_padded and call.q.is_cuda:
        check_holds(rules.OF_CUDA, names, call)


def check_numbers(call: AttentionCall, names: Names = NAMES) -> None:
    """Raise unless the numbers of a call are some that kernels compute with."""
    if call.softmax_scale is not None:
        tensors.check_number("softmax_scale", call.softmax_scale, "None or a number")
    tensors.check_number("dropout_p", call.dropout_p)
    tensors.check_number("softcap", call.softcap)
    lengths.check_splits(call.num_splits)
    check_sm_margin(call.sm_margin)
    for name in RANGES:
        check_in_range(getattr(names, name, name), getattr(call, name), ARGUMENTS[name])


def check_sm_margin(sm_margin: Any) -> None:
    """Raise unless sm_margin is a number of multiprocessors."""
    if isinstance(sm_margin, bool) or not isinstance(sm_margin, int):
        raise TypeError(f"sm_margin: must be an integer, got {type(sm_margin).__name__}")
    check_in_range("sm_margin", sm_margin, ARGUMENTS["sm_margin"])


def _check_tensors(call: AttentionCall, names: Names) -> None:
    """q, k, v, the lengths and other arrays have the form of one call."""
    q = call.q
    for name in ("q", "k", "v"):
        known, x = getattr(names, name), getattr(call, name)
        may_be_e4m3 = not call.is_of_one_length()
        tensors.check_data(known, x, layout_of(name, call), (E4M3,) if may_be_e4m3 else ())
        tensors.check_device(known, x, q, names.q)
    check_holds(rules.OF_TENSORS + rules.OF_VALUES, names, call)
    if call.has_fp8_values():
        check_holds(rules.OF_E4M3, names, call)
    check_rules(rules.OF_CALL, names, call)
    if call.is_packed():
        tensors.check_place(names.cu_seqlens_q, call.cu_seqlens_q, torch.int32, q, names.q)
    check_holds(rules.OF_BOUNDS, names, call)
    check_holds(rules.OF_BATCH, names, call)
    _check_arrays(call, names)
    check_holds(rules.OF_ARRAYS, names, call)
    if call.quantizes_tokens:
        for name in ("k_descale", "v_descale"):
            if (scale := getattr(call, name)) is not None:
                tensors.check_may_be_written(name, scale)


def _check_arrays(call: AttentionCall, names: Names) -> None:
    """Arrays whose shape and dtype the declaration says."""
    batch = call.batch()
    sizes: dict[Any, int] = {
        "B": batch,
        "1 + B": 1 + batch,
        "Hq": call.q.shape[-2],
        "Hk": call.k.shape[-2],
    }
    dtypes = {"int32": torch.int32, "int64": torch.int64, "fp32": torch.float32, "e8m0": E8M0}
    dtypes |= {"q": call.dtype(), "lse": call.lse_dtype(), "bool": torch.bool}
    dtypes["new"] = E4M3 if call.appends_fp8() else call.dtype()
    for name, shapes, dtype in ARRAYS:
        array: Any = getattr(call, name)
        if array is not None:
            known = getattr(names, name, name)
            allowed = tuple([dtypes[each] for each in dtype.split(" or ")])
            tensors.check_place(known, array, allowed, call.q, names.q)
            if shapes != (("...",),):
                tensors.check_shapes(known, array, _in_numbers(shapes, sizes, call, array))


def _in_numbers(
    shapes: Any, sizes: dict[Any, int], call: AttentionCall, array: torch.Tensor
) -> list[tuple[int, ...]]:
    """Without those of tokens, unless k is a cache or pages."""
    made: list[tuple[int, ...]] = []
    for shape in shapes:
        if shape == ("groups",):
            if call.reads_in_place() and call.is_fp8_latent() and array.dim() == 4:
                made.append((*call.k.shape[:-1], array.shape[-1]))
        elif shape != ("tokens",):
            made.append(tuple([sizes.get(symbol, symbol) for symbol in shape]))
        elif call.reads_in_place():
            made.append(tuple(call.k.shape[:-1]))
    return made


def _check_length_of_all(call: AttentionCall) -> None:
    """Raise unless the one length of all sequences of a cache, and new keys, fit it."""
    if not isinstance(call.seqlen_k, int):
        return
    capacity = call.capacity()
    new = call.k_new.shape[1] if call.k_new is not None and call.k_new.dim() == 4 else 0
    if call.seqlen_k < 0 or call.seqlen_k + new > capacity:
        raise ValueError(
            f"cache_seqlens: must be from 0 to {capacity - new}, for {new} new keys and a "
            f"cache of {capacity}, got {call.seqlen_k}"
        )


def _check_new_keys(call: AttentionCall) -> None:
    k, v, bounds = call.k_new, call.v_new, call.cu_seqlens_k_new
    if k is None or v is None:
        return
    rows = (call.batch(), k.shape[1]) if bounds is None else k.shape[:1]
    tensors.check_shapes("k", k, [(*rows, call.heads_k(), call.head_dim())])
    tensors.check_shapes("v", v, [(*rows, call.heads_k(), call.head_dim_v())])
    for name, cache in (("k_cache", call.k), ("v_cache", call.v)):
        tensors.check_may_be_written(name, cache)
    if bounds is None and isinstance(k.shape[1], int) and k.shape[1] > call.capacity():
        raise ValueError(
            f"k: must fit the cache, which holds {call.capacity()} rows of a sequence, "
            f"got {k.shape[1]}"
        )


def check_out(call: AttentionCall) -> None:
    """Raise unless the results of a call of tensors can be written into its out."""
    out: Any = call.out
    tensors.refuse_gradients("as results are written into it", out=out)
    tensors.check_like("out", out, call.out_shape(), call.result_dtype(), call.q)
    if out.shape[-1] > 1:
        tensors.check_contiguous_rows("out", out)
    tensors.check_may_be_written("out", out)


def extent_of(call: AttentionCall) -> masks.PairExtent:
    """The pairs of queries and keys that masks and biases of a call are about."""
    is_packed = call.is_packed()
    seqlen_q = call.max_seqlen_q if is_packed else call.q.shape[1]
    if call.over_cache:
        seqlen_k = call.capacity()
        if call.seqlen_k is not None and call.cu_seqlens_k_new is None:
            seqlen_k = call.seqlen_k + (0 if call.k_new is None else call.k_new.shape[1])
    else:
        seqlen_k = call.max_seqlen_k if is_packed else call.k.shape[1]
    return masks.PairExtent(call.batch(), call.q.shape[-2], seqlen_q, seqlen_k, is_packed)


def check_return_attn_probs(call: AttentionCall) -> None:
    """Raise for a public call with dropout whose S_dmask no backend makes."""
    if call.has_masks() or call.sink is not None:
        raise NotImplementedError(
            "return_attn_probs: must be False where there is dropout and an attn_mask, a "
            f"block_mask or a sink, got True and dropout_p {call.dropout_p}"
        )


def missing_backward(call: AttentionCall) -> str | None:
    """Why the backward of a call refuses to run, or None."""
    broken = first_broken(rules.OF_BACKWARD, names_of(call), call)
    return None if broken is None else broken[1]


def check_incoming(call: AttentionCall, incoming: Incoming) -> None:
    """Raise unless `incoming` has results of this call, which is checked, and their gradients."""
    if (reason := missing_backward(call)) is not None:
        raise NotImplementedError(reason)
    check_rules(rules.OF_INCOMING, NAMES, incoming, call)
    tensors.check_rng_state(incoming.rng_state, call.dropout_p, call.q)
    _check_likenesses(incoming, INCOMING_ARRAYS, call)
    for name in TARGETS:
        if (target := getattr(incoming, name)) is not None:
            tensors.check_may_be_written(name, target)


def check_tangents(call: AttentionCall, tangents: Tangents) -> None:
    """Raise unless each tangent is like what it is of, in this call, which is checked."""
    check_rules(rules.OF_DIRECTION, names_of(call), call)
    check_rules(rules.OF_TANGENTS, NAMES, tangents, call)
    _check_likenesses(tangents, TANGENTS, call)


def _check_likenesses(described: Any, declared: dict[str, Argument], call: AttentionCall) -> None:
    """Arrays whose shape and dtype are those of something in the call or its results."""
    shapes = {"out": call.out_shape(), "lse": call.lse_shape()}
    dtypes = {"q": call.dtype(), "lse": call.lse_dtype(), "results": call.result_dtype()}
    dtypes["int8"] = torch.int8
    for name, said in declared.items():
        array: Any = getattr(described, name)
        is_missing = array is None and not said.is_needed
        if is_missing or (said.dtype == "int8" and not is_known(array)):
            continue
        like: Any = getattr(call, said.shape, None)
        shape = shapes.get(said.shape) or like.shape
        dtype = dtypes.get(said.dtype) or like.dtype
        tensors.check_like(name, array, shape, dtype, call.q)


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
    q, k, table = call.q, call.k, call.block_table
    used_q = lengths.check_cu_seqlens_contents(
        names.cu_seqlens_q, call.cu_seqlens_q, q.shape[0], names.total_q
    )
    if call.seqused_q is not None:
        lengths.check_range("seqused_q", call.seqused_q, 0, used_q)
        used_q = call.seqused_q
    _check_tree(call, used_q)
    lengths.check_bound(names.max_seqlen_q, call.max_seqlen_q, used_q)

    name, used_k = "seqused_k", call.seqused_k
    if table is None or used_k is None:
        total = k.shape[0] if table is None else None
        rows = lengths.check_cu_seqlens_contents(
            names.cu_seqlens_k, call.cu_seqlens_k, total, names.total_k
        )
        if used_k is None:
            name, used_k = names.cu_seqlens_k, rows
        else:
            lengths.check_range(name, used_k, 0, rows)
    if table is not None:
        lengths.check_range(name, used_k, 0, table.shape[1] * k.shape[1], "a sequence's length")
    lengths.check_bound(names.max_seqlen_k, call.max_seqlen_k, used_k)
    if call.leftpad_k is not None:
        lengths.check_range("leftpad_k", call.leftpad_k, 0, used_k)
    _check_lists(call, used_q, used_k)
    if table is not None:
        lengths.check_pages(table, call.leftpad_k, used_k, k.shape[:2])
    if call.origin is not None and call.dropout_p > 0.0:
        lengths.check_origin_contents(call.origin)


def _check_tree(call: AttentionCall, queries: torch.Tensor) -> None:
    """Raise unless a tree mask has a column for each of a packed sequence's queries."""
    if call.tree_mask is not None:
        columns = call.tree_mask.shape[1]
        lengths.check_range("tree_mask", queries, 0, columns, "the queries of a sequence")


def _check_lists(call: AttentionCall, queries: torch.Tensor, used: torch.Tensor) -> None:
    """Raise unless entries of the lists of queries that attend are keys, or none."""
    if call.key_lists is None or call.lists_blocks():
        return
    keys = used if call.leftpad_k is None else used - call.leftpad_k
    bounds = call.cu_seqlens_q
    for index, (count, seqlen_k) in enumerate(zip(queries.tolist(), keys.tolist(), strict=True)):
        first = 0 if bounds is None else int(bounds[index])
        lists = call.key_lists[index] if bounds is None else call.key_lists
        most = int(lists[first : first + count].amax()) if lists.numel() > 0 and count > 0 else -1
        if most >= seqlen_k:
            raise ValueError(
                f"key_lists: must be below the sequence's number of keys, {seqlen_k}, got {most} "
                f"in sequence {index}"
            )


def _check_cache_contents(call: AttentionCall) -> None:
    q, k_cache, table, capacity = call.q, call.k, call.block_table, call.capacity()

    def of_all(rows: int) -> torch.Tensor:
        return torch.full((call.batch(),), rows, device="cpu")

    if call.cu_seqlens_q is None:
        queries = of_all(q.shape[1])
    else:
        bounds = ("cu_seqlens_q", call.cu_seqlens_q, q.shape[0], "total_q")
        queries = lengths.check_cu_seqlens_contents(*bounds)
        _check_tree(call, queries)
        lengths.check_bound("max_seqlen_q", call.max_seqlen_q, queries)
    used = call.seqused_k
    if used is None or call.seqlen_k is not None:
        used = of_all(capacity if call.seqlen_k is None else call.seqlen_k)
    lengths.check_range("cache_seqlens", used, 0, capacity)
    new = torch.zeros_like(used)
    if call.k_new is not None:
        new = new + call.k_new.shape[1]
        if call.cu_seqlens_k_new is not None:
            total, name = call.k_new.shape[0], "cu_seqlens_k_new"
            new = lengths.check_cu_seqlens_contents(
                name, call.cu_seqlens_k_new, total, "total_k_new"
            )
        lengths.check_range(
            "cache_seqlens", used + new, 0, capacity, "with the new keys, the length"
        )
    if call.leftpad_k is not None:
        lengths.check_range("cache_leftpad", call.leftpad_k, 0, used + new)
    _check_lists(call, queries, used + new)
    rows = k_cache.shape[0] if table is None else table.shape[0]
    if call.cache_batch_idx is not None:
        lengths.check_range("cache_batch_idx", call.cache_batch_idx, 0, rows - 1)
    if table is not None:
        if call.cache_batch_idx is not None:
            table = table[call.cache_batch_idx.long()]
        lengths.check_pages(table, call.leftpad_k, used + new, k_cache.shape[:2])
    if call.rotary_cos is None:
        return
    rotated = torch.maximum(new, queries if call.is_windowed() else queries.clamp(max=1))
    last = (used + rotated - 1).masked_fill(rotated == 0, 0)
    limit = call.rotary_cos.shape[0] - 1
    if limit >= 0:
        what = "the last position that a rotation needs, cache_seqlens plus new rows less 1,"
        lengths.check_range("rotary_cos", last, 0, limit, what)
    elif rotated.any():
        raise ValueError("rotary_cos: must have a row for every position, got no rows")
