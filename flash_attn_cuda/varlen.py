"""The public functions of packed sequences, (total, heads, head_dim)."""

from __future__ import annotations

from types import ModuleType
from typing import Any, cast

import torch
from torch import Tensor
from torch._C import _is_any_autocast_enabled

from . import build_info
from .arguments import (
    UNLIMITED,
    Options,
    Result,
    WindowSize,
    cast_for_autocast,
    default_scale,
    is_plain_cuda_call,
    make_options,
    needs_padding,
    pad_head_dim,
    rows_bound,
    seqlen_bound,
)
from .checks import (
    MAX_INT32,
    check_alibi_slopes,
    check_packed,
    check_sink,
    check_softmax_scale,
    check_tensor,
    refuse_forward_gradients,
)
from .length_checks import (
    VARLEN_NAMES,
    Lengths,
    VarlenNames,
    check_batch_invariant,
    check_num_splits,
    check_varlen_contents,
    check_varlen_inputs,
)
from .masked import Masks, attend_masked_varlen
from .op_support import is_functorch_active
from .private import _flash_attn_varlen_forward
from .varlen_ops import VarlenForwardCall

_KVPACKED_NAMES = VarlenNames(k="kv[:, 0]", v="kv[:, 1]")
_QKVPACKED_NAMES = VarlenNames(
    *("qkv[:, 0]", "qkv[:, 1]", "qkv[:, 2]", "cu_seqlens", "cu_seqlens"),
    *("max_seqlen", "max_seqlen", "total", "total"),
)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int | Tensor | None,
    max_seqlen_k: int | Tensor | None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = UNLIMITED,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
    *,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    num_splits: int = 0,
    batch_invariant: bool = False,
    attn_mask: Tensor | None = None,
    block_mask: Any = None,
    block_size: tuple[int, int] | None = None,
    sink: Tensor | None = None,
) -> Result:
    """flash_attn_func of sequences of different lengths, packed one behind the other.

    Options that are not listed are those of flash_attn_func; seqlen_q and seqlen_k in their
    description are the lengths of each sequence. Zero-length sequences and an empty batch are
    valid. Nothing waits for the device.

    Args:
        q: (total_q, heads_q, head_dim).
        k: (total_k, heads_k, head_dim), or with a block_table (num_pages, page_size, heads_k,
            head_dim), of any page_size.
        v: as k, with head_dim_v.
        cu_seqlens_q: (batch + 1,), int32, on q's device: sequence b is rows cu_seqlens_q[b] up to
            cu_seqlens_q[b + 1]; starts at 0, does not decrease, ends within total_q. Rows behind
            the last sequence have out 0, softmax_lse -inf and gradient 0.
        cu_seqlens_k: the same of k and v. With a block_table only the lengths count, and None will
            do if seqused_k is given.
        max_seqlen_q: an upper bound of the lengths: an integer, a 0-d tensor, which is not read, or
            None. On CUDA results are right whatever it is: it helps to choose a kernel, and shapes
            S_dmask.
        max_seqlen_k: the same of k and v. With batch_invariant it bounds how often keys are split:
            less memory, and for a sequence that is longer after all other bits.
        block_table: (batch, max_pages), int32: key j of sequence b is row j % page_size of page
            block_table[b, j // page_size]. The backward of such a call is not implemented.
        seqused_q: (batch,), int32: only the first so many queries of a sequence attend. The rows
            behind them have out 0 and softmax_lse -inf.
        seqused_k: (batch,), int32: only the first so many keys of a sequence are there, leftpad_k
            included.
        leftpad_k: (batch,), int32: rows before the first key of a sequence.
        num_splits: parts that the keys of a sequence are divided into, at most, to occupy the
            device in a forward without a backward; 0 chooses.
        batch_invariant: split keys at fixed lengths, so that a sequence's results are the same bits
            whatever else is in the batch; num_splits is not used then.
        attn_mask: as in flash_attn_func, where seqlen_q and seqlen_k are max_seqlen_q and
            max_seqlen_k, which must be integers; (i, j) is about query i and key j of a sequence,
            of those that attend and are there. With a mask, or a sink without a block_table, keys
            are not split, which is batch-invariant.
        block_mask: likewise. The lengths of a BlockSparsity or a BlockMask are upper bounds of
            those of sequences, and at least max_seqlen_q and max_seqlen_k where those are integers.
        sink: as in flash_attn_func; with a block_table, without a gradient.

    Returns:
        out (total_q, heads_q, head_dim_v), or (out, softmax_lse (heads_q, total_q), S_dmask); with
        dropout S_dmask is (batch, heads_q, max_seqlen_q, max_seqlen_k), where total_q, total_k
        stand in for bounds that are no integers.

    Raises:
        As flash_attn_func; ValueError for a negative max_seqlen. On the CPU, ValueError as well for
        lengths and indices that are wrong, and an integer max_seqlen below the longest sequence.
        On CUDA those are clamped or skipped, so that nothing outside the tensors is touched, and
        reported by check_device_errors, or by the call itself with FLASH_ATTN_CUDA_CHECK=1.
        NotImplementedError: there is a block_table, and dropout_p > 0 or there is an attn_mask or
            block_mask; from the backward, there was a block_table.
    """
    options = make_options(
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic
    )
    if type(num_splits) is not int or batch_invariant is not False:
        check_num_splits(num_splits)
        check_batch_invariant(batch_invariant)
    if block_table is not None:
        refuse_forward_gradients(q=q, k=k, v=v, sink=sink)
        if options.dropout_p > 0.0:
            raise NotImplementedError(f"dropout_p: must be 0 with a block_table, got {dropout_p}")
    if not (attn_mask is None and block_mask is None and block_size is None and sink is None):
        masks = Masks(attn_mask, block_mask, block_size, sink)
        if block_table is None:
            check_num_splits(num_splits)
            return attend_masked_varlen(
                *(q, k, v, (cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k)),
                *((seqused_q, seqused_k, leftpad_k), options, masks, return_attn_probs),
            )
        options = options._replace(sink=masks.sink_over_pages(q))
    given = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    used = (seqused_q, seqused_k, leftpad_k, block_table)
    splits = (num_splits, batch_invariant)
    return _attend(q, k, v, given, used, options, return_attn_probs, splits, VARLEN_NAMES)


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | Tensor | None,
    max_seqlen_k: int | Tensor | None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = UNLIMITED,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """flash_attn_varlen_func with kv (total_k, 2, heads_k, head_dim) for keys and values.

    The gradient of kv is made in one piece. Everything else, errors included, is as in
    flash_attn_varlen_func.
    """
    options = make_options(
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic
    )
    check_packed("kv", kv, "(total_k, 2, heads_k, head_dim)", 2)
    k, v = kv.unbind(1)
    given = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return _attend(q, k, v, given, _ALL, options, return_attn_probs, _AUTOMATIC, _KVPACKED_NAMES)


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int | Tensor | None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = UNLIMITED,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """flash_attn_varlen_func with qkv (total, 3, heads, head_dim) for all three.

    Queries and keys have the same number of heads. The gradient of qkv is made in one piece.
    Everything else, errors included, is as in flash_attn_varlen_func.
    """
    options = make_options(
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic
    )
    check_packed("qkv", qkv, "(total, 3, heads, head_dim)", 3)
    q, k, v = qkv.unbind(1)
    given = (cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)
    return _attend(q, k, v, given, _ALL, options, return_attn_probs, _AUTOMATIC, _QKVPACKED_NAMES)


_ALL = (None, None, None, None)  # seqused_q, seqused_k, leftpad_k, block_table
_AUTOMATIC = (0, False)  # num_splits, batch_invariant


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    given: tuple[Any, Any, Any, Any],
    used: tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None],
    options: Options,
    return_attn_probs: bool,
    splits: tuple[int, bool],
    names: VarlenNames,
) -> Result:
    check_tensor(names.q, q)
    check_tensor(names.k, k)
    cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k = given
    lengths = Lengths(
        cu_seqlens_q,
        cu_seqlens_k,
        seqlen_bound(names.max_seqlen_q, max_seqlen_q, rows_bound(q)),
        seqlen_bound(names.max_seqlen_k, max_seqlen_k, rows_bound(k, used[3])),
        *used,
    )
    wants_s_dmask = return_attn_probs and options.dropout_p > 0.0
    if (
        not wants_s_dmask
        and is_plain_cuda_call(
            *(q, k, v, options.alibi_slopes, options.sink, cu_seqlens_q, cu_seqlens_k), *used
        )
        and not (_is_split(lengths, splits) and _needs_gradient(q, k, v, options.sink))
    ):
        out, softmax_lse = _attend_by_extension(q, k, v, lengths, options, splits, names)
        if return_attn_probs:
            return out, softmax_lse, q.new_empty((0,), dtype=out.dtype)
        return out
    out, softmax_lse, s_dmask = _attend_by_operator(
        q, k, v, lengths, options, wants_s_dmask, splits, names
    )
    return (out, softmax_lse, s_dmask) if return_attn_probs else out


def _is_split(lengths: Lengths, splits: tuple[int, bool]) -> bool:
    """Whether the call is for the forward that reads pages and splits keys."""
    num_splits, batch_invariant = splits
    return lengths.block_table is not None or num_splits not in (0, 1) or batch_invariant


def _needs_gradient(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def _attend_by_extension(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Lengths,
    options: Options,
    splits: tuple[int, bool],
    names: VarlenNames,
) -> tuple[Tensor, Tensor]:
    """The fast path: the extension checks its inputs, so only a rejected call is checked here."""
    if _is_any_autocast_enabled():
        q, k, v = cast_for_autocast(q, k, v)
    call = _call_split if _is_split(lengths, splits) else _call_attention
    try:
        scale = default_scale(q, options.softmax_scale)
        if not needs_padding(q, v):
            return call(q, k, v, lengths, options, scale, splits)
        padded = (pad_head_dim(q), pad_head_dim(k), pad_head_dim(v))
        out, softmax_lse = call(*padded, lengths, options, scale, splits)
        return out[..., : v.shape[-1]], softmax_lse
    except Exception as error:
        _check(q, k, v, lengths, options, splits, names)
        build_info.require_cuda(q.device, error)
        raise


def _call_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Lengths,
    options: Options,
    scale: float,
    splits: tuple[int, bool],
) -> tuple[Tensor, Tensor]:
    out, softmax_lse, _ = cast(ModuleType, build_info.extension).attention_full(
        *(q, k, v, lengths.cu_seqlens_q, lengths.cu_seqlens_k),
        *(lengths.seqused_q, lengths.seqused_k, lengths.leftpad_k),
        *(min(lengths.max_seqlen_q, MAX_INT32), min(lengths.max_seqlen_k, MAX_INT32)),
        *(options.dropout_p, scale, options.causal),
        *(min(options.window_left, MAX_INT32), min(options.window_right, MAX_INT32)),
        *(options.softcap, options.alibi_slopes, options.deterministic),
    )
    return out, softmax_lse


def _call_split(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Lengths,
    options: Options,
    scale: float,
    splits: tuple[int, bool],
) -> tuple[Tensor, Tensor]:
    refuse_forward_gradients(q=q, k=k, v=v)
    return VarlenForwardCall(
        *(q, k, v, lengths.cu_seqlens_q, lengths.cu_seqlens_k),
        **_operator_options(lengths, options, scale, splits),
    ).on_cuda()[:2]


def _operator_options(
    lengths: Lengths, options: Options, scale: float, splits: tuple[int, bool]
) -> dict[str, Any]:
    """What the operator takes behind cu_seqlens, but return_softmax."""
    return {
        "max_seqlen_q": lengths.max_seqlen_q,
        "max_seqlen_k": lengths.max_seqlen_k,
        "dropout_p": options.dropout_p,
        "softmax_scale": scale,
        "causal": options.causal,
        "window_size_left": options.window_left,
        "window_size_right": options.window_right,
        "softcap": options.softcap,
        "alibi_slopes": options.alibi_slopes,
        "block_table": lengths.block_table,
        "leftpad_k": lengths.leftpad_k,
        "seqused_k": lengths.seqused_k,
        "num_splits": splits[0],
        "seqused_q": lengths.seqused_q,
        "batch_invariant": splits[1],
        "deterministic": options.deterministic,
        "sink": options.sink,
    }


def _attend_by_operator(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Lengths,
    options: Options,
    wants_s_dmask: bool,
    splits: tuple[int, bool],
    names: VarlenNames,
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = cast_for_autocast(q, k, v)
    _check(q, k, v, lengths, options, splits, names)
    scale = default_scale(q, options.softmax_scale)
    head_dim_v = v.shape[-1]
    is_padded = q.is_cuda and needs_padding(q, v)
    if is_padded:
        q, k, v = pad_head_dim(q), pad_head_dim(k), pad_head_dim(v)
    try:
        out, softmax_lse, s_dmask, _ = _flash_attn_varlen_forward(
            *(q, k, v, lengths.cu_seqlens_q, lengths.cu_seqlens_k),
            **_operator_options(lengths, options, scale, splits),
            return_softmax=wants_s_dmask,
        )
    except ValueError:
        # Of contents, for which the operator has names of its own.
        if q.device.type == "cpu" and not is_functorch_active():
            check_varlen_contents(q, k, lengths, names)
        raise
    return out[..., :head_dim_v] if is_padded else out, softmax_lse, s_dmask


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Lengths,
    options: Options,
    splits: tuple[int, bool],
    names: VarlenNames,
) -> None:
    check_softmax_scale(options.softmax_scale)
    check_varlen_inputs(q, k, v, lengths, names)
    check_alibi_slopes(options.alibi_slopes, lengths.batch(), q)
    check_num_splits(splits[0])
    check_sink(options.sink, q)
