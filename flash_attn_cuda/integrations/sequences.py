"""What functions with another package's signature share: refusals by name, and the layouts of
sequences that FlashAttention-3 and 4 take, each made into what flash_attn_varlen_func takes.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor

from ..call.checks import check_call
from ..call.fields import AttentionCall
from ..call.rules import DENSE
from ..call.tensors import E4M3, check_tensor
from ..functions.arguments import cast_for_autocast, packed_lengths, rows_bound
from ..functions.dense import flash_attn_func
from ..functions.varlen import flash_attn_varlen_func
from .bands import Hidden, cut_lengths, cut_rows, with_hidden_rows, with_sink

NOTHING = Hidden()
SCALES = ("q_descale", "k_descale", "v_descale")
REFUSALS = (TypeError, ValueError, NotImplementedError)  # what this package's checks raise


def refuse_given(reason: str, **arguments: Any) -> None:
    """Raise NotImplementedError for the first of these arguments that is not None."""
    for name, value in arguments.items():
        if value is not None:
            raise NotImplementedError(
                f"{name}: must be None, as {reason}, got {type(value).__name__}"
            )


def refuse_fp8(*allowed: torch.dtype, **tensors: Any) -> None:
    """Raise NotImplementedError for the first of these tensors that holds floats of 8 bits, of a
    dtype that is not allowed.
    """
    for name, tensor in tensors.items():
        if isinstance(tensor, Tensor):
            dtype = tensor.dtype
            if dtype.is_floating_point and dtype.itemsize == 1 and dtype not in allowed:
                others = f" other than {' and '.join(map(str, allowed))}" if allowed else ""
                raise NotImplementedError(
                    f"{name}: must not be of FP8{others}, which is not implemented, got {dtype}"
                )


def scales_of(
    tensors: tuple[Any, Any, Any], descales: tuple[Any, Any, Any], *, ignores_others: bool
) -> dict[str, Any]:
    """Arguments of this package for q, k and v that may be of e4m3 and the scales that
    FlashAttention-3 and vLLM have for them. None is 1 of what is of e4m3. `ignores_others`: scales
    of other dtypes are dropped, not a ValueError. Those of bytes stay: the call refuses the bytes.
    """
    made: dict[str, Any] = {}
    for name, x, scale in zip(SCALES, tensors, descales, strict=True):
        is_fp8 = is_e4m3(x)
        if is_fp8 or (isinstance(x, Tensor) and x.dtype == torch.uint8 and scale is not None):
            made[name] = 1.0 if scale is None else scale
        elif scale is not None and not ignores_others:
            of = f"the tensor that it scales is not of {E4M3}"
            raise ValueError(f"{name}: must be None where {of}, got {type(scale).__name__}")
    return made


def is_e4m3(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dtype == E4M3


def no_scheduler_metadata(cache_seqlens: Tensor) -> Tensor:
    """What stands for the plan of a call, which this package makes in the call itself: an empty
    int32 tensor on the device of cache_seqlens, for callers that keep, slice or copy it.
    """
    check_tensor("cache_seqlens", cache_seqlens)
    return cache_seqlens.new_empty((0,), dtype=torch.int32)


def with_no_partials(out: Tensor, softmax_lse: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """With two empty tensors where FlashAttention-3 has partial results of keys that were split."""
    nothing = out.new_empty((0,), dtype=torch.float32)
    return out, softmax_lse, nothing, nothing.clone()


def splits_of(num_splits: int) -> int:
    """num_splits as this package has it: where others say zero or less to have it chosen, 0."""
    return num_splits if num_splits > 0 else 0


def renamed(error: Exception, names: dict[str, str]) -> Exception:
    """An error of this package's functions, where the caller knows arguments by other names."""
    message = str(error)
    for ours, theirs in names.items():
        message = re.sub(rf"\b{ours}\b", theirs, message)
    return type(error)(message) if type(error) in REFUSALS else error


def packed(name: str, x: Tensor) -> tuple[Tensor, Tensor, int]:
    """(rows (B * S, heads, D), cu_seqlens (B + 1,), S) of x (B, S, heads, D)."""
    check_tensor(name, x)
    if x.dim() != 4:
        raise ValueError(
            f"{name}: must have 4 dimensions {DENSE} where no cu_seqlens describes it, "
            f"got shape {tuple(x.shape)}"
        )
    batch, seqlen = x.shape[:2]
    cu_seqlens = torch.arange(batch + 1, dtype=torch.int32, device=x.device) * seqlen
    return x.flatten(0, 1), cu_seqlens, seqlen


def packed_beside(name: str, x: Tensor, other_name: str, other: Tensor) -> Tensor:
    """packed's rows of x, of which there is one for each of `other`, in the same places."""
    check_tensor(name, x)
    if x.shape[:-1] != other.shape[:-1]:
        raise ValueError(
            f"{name}: must have the shape of {other_name} but for the last dimension, "
            f"{tuple(other.shape)}, got {tuple(x.shape)}"
        )
    return packed(name, x)[0]


def packed_keys(k: Tensor, v: Tensor, cu_seqlens_q: Any) -> tuple[Tensor, Tensor, Tensor, int]:
    """(k, v, cu_seqlens, seqlen) of k and v of the sequences of cu_seqlens_q."""
    rows, cu_seqlens, seqlen = packed("k", k)
    values = packed_beside("v", v, "k", k)
    check_tensor("cu_seqlens_q", cu_seqlens_q)
    batch = cu_seqlens_q.shape[0] - 1 if cu_seqlens_q.dim() == 1 else k.shape[0]
    if k.shape[0] != batch:
        raise ValueError(f"k: batch must be that of q ({batch}), got {k.shape[0]}")
    return rows, values, cu_seqlens, seqlen


def attend_sequences(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int | Tensor | None,
    max_seqlen_k: int | Tensor | None,
    *,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int = 0,
    qv: Tensor | None = None,
    out: Tensor | None = None,
    names: dict[str, str],
    wants_lse: bool = True,
    hidden: Hidden = NOTHING,
    **options: Any,
) -> tuple[Tensor, Any]:
    """flash_attn_varlen_func, also of sequences that are not packed.

    Args:
        q: (total_q, heads_q, head_dim), or without cu_seqlens_q (batch, seqlen_q, heads_q,
            head_dim).
        k: (total_k, heads_k, head_dim), without cu_seqlens_k (batch, seqlen_k, heads_k, head_dim),
            or with a block_table its pages.
        v: as k.
        max_seqlen_q, max_seqlen_k: of use for what is packed.
        seqused_k: None with a block_table and no cu_seqlens_k: all rows of a sequence's pages.
        qv: in q's layout.
        out: with cu_seqlens_q alone.
        names: what the caller calls arguments of this package, for errors.
        wants_lse: with dropout softmax_lse costs a matrix of probabilities.
        hidden: rows at the end of every sequence that the call is to be without; their queries have
            the results of those that see no key. Not with an out or without wants_lse.
        options: those of flash_attn_func and flash_attn_varlen_func, of e4m3 the scales too.

    Returns:
        (out, softmax_lse): out in q's layout, softmax_lse (heads_q, total_q) or (batch, heads_q,
        seqlen_q), or None where it is not wanted.
    """
    lengths = (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, block_table)
    has_scales = any(name in options for name in SCALES)
    if out is qv is None and all(x is None for x in lengths) and not has_scales:
        try:
            if hidden == NOTHING:
                return _pair(flash_attn_func(q, k, v, return_attn_probs=wants_lse, **options))
            if options.get("block_mask") is None:  # whose lengths are those of the tensors
                return _without_rows(hidden, q, k, v, **options)
        except REFUSALS as error:
            raise renamed(error, names) from error
    batch_and_seqlen = None
    if cu_seqlens_q is None:
        queries, cu_seqlens_q, max_seqlen_q = packed("q", q)
        batch_and_seqlen = q.shape[:2]
        qv = None if qv is None else packed_beside("qv", qv, "q", q)
        q = queries
    if block_table is None and cu_seqlens_k is None:
        k, v, cu_seqlens_k, max_seqlen_k = packed_keys(k, v, cu_seqlens_q)
    elif block_table is not None and cu_seqlens_k is None and seqused_k is None:
        check_tensor("k", k)
        check_tensor("cu_seqlens_q", cu_seqlens_q)
        rows = rows_bound(k, block_table)  # 0 for what is refused below
        seqused_k = torch.full_like(cu_seqlens_q[1:], rows)
    packed_call = (q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    options |= {"block_table": block_table, "seqused_q": seqused_q, "seqused_k": seqused_k}
    options |= {"num_splits": num_splits, "out": out, "return_attn_probs": wants_lse, "qv": qv}
    try:
        if hidden == NOTHING:
            found, softmax_lse = _pair(flash_attn_varlen_func(*packed_call, **options))
        else:
            found, softmax_lse = _without_used_rows(hidden, *packed_call, **options)
    except REFUSALS as error:
        raise renamed(error, names) from error
    if batch_and_seqlen is not None:
        found = found.unflatten(0, batch_and_seqlen)
        if softmax_lse is not None:
            softmax_lse = softmax_lse.unflatten(1, batch_and_seqlen).transpose(0, 1).contiguous()
    return found, softmax_lse


def _without_rows(
    hidden: Hidden, q: Tensor, k: Tensor, v: Tensor, **options: Any
) -> tuple[Tensor, Tensor]:
    """(out, softmax_lse) of flash_attn_func without rows of q, k and v, which are as given."""
    q, k, v = cast_for_autocast(q, k, v)
    check_call(AttentionCall(q, k, v), is_padded=False)  # not what is left of them
    rows = cut_rows(hidden, q, k, v)
    out, softmax_lse, _ = flash_attn_func(*rows, return_attn_probs=True, **options)
    return with_hidden_rows(out, softmax_lse, q.shape[1], options.get("sink"))


def _without_used_rows(
    hidden: Hidden, q: Tensor, k: Tensor, v: Tensor, *lengths: Any, **options: Any
) -> tuple[Tensor, Tensor]:
    """(out, softmax_lse) of flash_attn_varlen_func without rows of the sequences of q, k and v."""
    q, k, v = cast_for_autocast(q, k, v)
    table = options["block_table"]
    used = {"seqused_q": options["seqused_q"], "seqused_k": options["seqused_k"]}
    call = AttentionCall(
        q, k, v, block_table=table, **used, **packed_lengths(q, k, lengths, block_table=table)
    )
    check_call(call, is_padded=False)  # not what is left of it
    seqused_q, seqused_k = cut_lengths(hidden, call)
    options |= {"seqused_q": seqused_q, "seqused_k": seqused_k}
    out, softmax_lse, _ = flash_attn_varlen_func(q, k, v, *lengths, **options)
    sink = options.get("sink")
    if sink is not None and hidden.queries and seqused_q is not None:
        softmax_lse = with_sink(softmax_lse, sink, call, seqused_q)
    return out, softmax_lse


def _pair(results: Any) -> tuple[Tensor, Any]:
    """(out, softmax_lse), the latter None where out is all that was returned."""
    return (results[0], results[1]) if isinstance(results, tuple) else (results, None)
