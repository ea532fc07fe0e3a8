"""The public functions of packed sequences, (total, heads, head_dim)."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..call.fields import NAMES, Names, describe, options_of
from ..call.fp8 import add_scales
from ..call.lengths import check_splits
from ..call.tensors import (
    E4M3,
    NO_BACKWARD,
    check_packed,
    check_tensor,
    refuse_forward_gradients,
    refuse_gradients,
)
from ..call.window import UNLIMITED, WindowSize
from .arguments import Result, add_lists, add_tree, of_lse_dtype, packed_lengths
from .attend import attend, returned
from .chunks import attend_in_chunks, check_chunk
from .given_masks import Masks, add_masks, given_lists
from .relative_bias import add_relative_bias

_KVPACKED_NAMES = Names(k="kv[:, 0]", v="kv[:, 1]")
_QKVPACKED_NAMES = Names(
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
    attention_chunk: int = 0,
    out: Tensor | None = None,
    qv: Tensor | None = None,
    q_descale: float | Tensor | None = None,
    k_descale: float | Tensor | None = None,
    v_descale: float | Tensor | None = None,
    keep_rounding: bool = True,
    relative_bias: Tensor | None = None,
    key_lists: Tensor | None = None,
    key_list_block: int = 1,
    key_list_queries: int = 1,
    values_include_rope: bool = False,
    tree_mask: Tensor | None = None,
    return_max_logits: bool = False,
    fp8_products: bool = False,
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
            of those that attend and are there, with a block_table whatever its page. With a mask
            keys are not split but in pages, for few queries.
        block_mask: likewise. The lengths of a BlockSparsity or a BlockMask are upper bounds of
            those of sequences, and at least max_seqlen_q and max_seqlen_k where those are integers.
        sink: as in flash_attn_func; with a block_table, without a gradient.
        attention_chunk: as in flash_attn_func, and not with a block_table.
        out: (total_q, heads_q, head_dim_v), of the result's dtype and on q's device, contiguous in
            its last dimension, to write the result into; it must not overlap an input. For
            inference. None for a new tensor.
        qv: (total_q, heads_q, head_dim_v), of q's dtype, as in flash_attn_with_kvcache: scores are
            softmax_scale * (q k^T + qv v^T), softmax_scale is given, and there is no backward. v
            alone may be of float8_e4m3fn then, with its v_descale.
        k_descale: k and v may both be of float8_e4m3fn (Micikevicius et al., "FP8 Formats for Deep
            Learning", 2022), with head dims that are multiples of 16, for inference. Then this is
            given, and k is times it: a number, fp32 of one element, (heads_k,), (batch, heads_k)
            or, with a block_table, (num_pages, page_size, heads_k), with any strides.
        v_descale: the same of v.
        q_descale: as in flash_attn_with_kvcache, where q is of float8_e4m3fn.
        fp8_products: as in flash_attn_with_kvcache.
        keep_rounding: as in flash_attn_func.
        key_lists: (total_q, heads_k, n), int32: the keys that a query sees, as in flash_attn_func,
            and with a qv as in flash_attn_with_kvcache. Without one max_seqlen_q and max_seqlen_k
            must be integers.
        key_list_block: as in flash_attn_func; with a qv 1.
        key_list_queries: 1.
        relative_bias: as in flash_attn_func, with a block_table as in flash_attn_with_kvcache. Else
            its memory grows with max_seqlen_q + max_seqlen_k, and with batch unless cu_seqlens_k is
            cu_seqlens_q.
        values_include_rope: as in flash_attn_with_kvcache.
        tree_mask: (total_q, n), bool, as in flash_attn_with_kvcache; there is no backward.
        return_max_logits: as in flash_attn_func, and not with a block_table, a qv or k of FP8.

    Returns:
        out (total_q, heads_q, head_dim_v), `out` itself where it was given, or (out, softmax_lse
        (heads_q, total_q), S_dmask); with dropout S_dmask is (batch, heads_q, max_seqlen_q,
        max_seqlen_k), where total_q, total_k stand in for bounds that are no integers.

    Raises:
        As flash_attn_func; ValueError for a negative max_seqlen, for a qv without a softmax_scale,
        and for a tree_mask with causal or a right window. On the CPU, ValueError as well for
        lengths and indices that are wrong, and an integer max_seqlen below the longest sequence. On
        CUDA those are clamped or skipped, so that nothing outside the tensors is touched, and
        reported by check_device_errors, or by the call itself with FLASH_ATTN_CUDA_CHECK=1.
        NotImplementedError: there is a block_table, and dropout_p > 0 or there is a block_mask;
            from the backward, there was a block_table or k was of float8_e4m3fn; there is an out,
            and it or an input requires grad while gradients are enabled; k is of float8_e4m3fn, and
            an input has a forward-mode gradient, or there is dropout, an attn_mask or a block_mask;
            there is a qv or a tree_mask, and an input requires grad while gradients are enabled or
            has a forward-mode gradient, or there is dropout, an attn_mask or a block_mask; there is
            a qv, and there are alibi_slopes, or k is of float8_e4m3fn; there is a tree_mask and an
            attention_chunk; there are key_lists with a qv and an attention_chunk, a tree_mask or a
            key_list_block that is not 1, or a key_list_queries that is not 1.
    """
    options = options_of(
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic
    )
    if type(num_splits) is not int or batch_invariant is not False:
        num_splits = check_splits(num_splits, batch_invariant)
    given = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    call = describe(
        q=q,
        k=k,
        v=v,
        seqused_q=seqused_q,
        seqused_k=seqused_k,
        leftpad_k=leftpad_k,
        block_table=block_table,
        num_splits=num_splits,
        batch_invariant=batch_invariant,
        **packed_lengths(q, k, given, block_table=block_table),
        **options,
    )
    if not (
        q_descale is k_descale is v_descale is None
        and E4M3 not in (q.dtype, k.dtype, getattr(v, "dtype", None))
    ):
        check_tensor("v", v)
        scales = (q_descale, k_descale, v_descale)
        add_scales(call, NAMES, *scales, out=out, fp8_products=fp8_products)
        refuse_forward_gradients(sink=sink)
    if return_max_logits:
        call.return_max_logits = True
    has_lists = key_lists is not None or not key_list_block == key_list_queries == 1
    has_masks = not (attn_mask is block_mask is block_size is None)
    if has_masks or sink is not None or has_lists:
        call.sink = of_lse_dtype("sink", sink, call.q)
        lists = None
        if has_lists and qv is None:
            lists = given_lists(key_lists, key_list_block, key_list_queries)
        masks = Masks(attn_mask, block_mask, block_size, lists)
        if masks.are_given():
            is_alone = relative_bias is None and attention_chunk == 0
            add_masks(call, masks, (max_seqlen_q, max_seqlen_k), is_alone=is_alone)
    if relative_bias is not None:
        add_relative_bias(call, relative_bias)
    if qv is not None:
        call.qv = qv
        refuse_gradients(f"as attention with qv {NO_BACKWARD}", q=q, k=k, v=v, qv=qv, sink=sink)
    if tree_mask is not None:
        add_tree(call, tree_mask, max_seqlen_q)
        refuse_gradients(f"as attention with tree_mask {NO_BACKWARD}", q=q, k=k, v=v, sink=sink)
    if values_include_rope:
        call.values_include_rope = True
    if has_lists and qv is not None:
        add_lists(call, key_lists, key_list_block, key_list_queries)
    if not keep_rounding:
        call.saves_memory = True
    if out is not None:
        check_tensor("v", v)
        call.out = out
    if attention_chunk != 0:
        results = attend_in_chunks(call, check_chunk(attention_chunk), return_attn_probs)
        return returned(results, return_attn_probs, return_max_logits)
    return attend(call, return_attn_probs)


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
    *,
    keep_rounding: bool = True,
    return_max_logits: bool = False,
) -> Result:
    """flash_attn_varlen_func with kv (total_k, 2, heads_k, head_dim) for keys and values.

    The gradient of kv is made in one piece. Everything else, errors included, is as in
    flash_attn_varlen_func.
    """
    options = options_of(
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic
    )
    check_packed("kv", kv, "(total_k, 2, heads_k, head_dim)", 2)
    k, v = kv.unbind(1)
    given = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    call = describe(q=q, k=k, v=v, **packed_lengths(q, k, given, _KVPACKED_NAMES), **options)
    if not keep_rounding:
        call.saves_memory = True
    if return_max_logits:
        call.return_max_logits = True
    return attend(call, return_attn_probs, _KVPACKED_NAMES)


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
    *,
    keep_rounding: bool = True,
    return_max_logits: bool = False,
) -> Result:
    """flash_attn_varlen_func with qkv (total, 3, heads, head_dim) for all three.

    Queries and keys have the same number of heads. The gradient of qkv is made in one piece.
    Everything else, errors included, is as in flash_attn_varlen_func.
    """
    options = options_of(
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic
    )
    check_packed("qkv", qkv, "(total, 3, heads, head_dim)", 3)
    q, k, v = qkv.unbind(1)
    given = (cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)
    call = describe(q=q, k=k, v=v, **packed_lengths(q, k, given, _QKVPACKED_NAMES), **options)
    if not keep_rounding:
        call.saves_memory = True
    if return_max_logits:
        call.return_max_logits = True
    return attend(call, return_attn_probs, _QKVPACKED_NAMES)
