"""The public functions of serving: attention over a KV cache, and sums of partial results."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..call.fields import CACHE_NAMES, describe, options_of
from ..call.fp8 import add_scales
from ..call.lengths import check_splits
from ..call.tensors import (
    E4M3,
    NO_BACKWARD,
    as_index,
    check_tensor,
    refuse_forward_gradients,
    refuse_gradients,
)
from ..call.window import UNLIMITED, WindowSize
from ..operators.combine import run_combine, run_combine_out
from .arguments import add_lists, add_tree, of_lse_dtype, seqlen_bound
from .attend import results_of
from .chunks import attend_over_cache_in_chunks, check_chunk
from .given_masks import add_mask_in_place, integer_bound
from .relative_bias import add_relative_bias


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = UNLIMITED,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    cu_seqlens_q: Tensor | None = None,
    max_seqlen_q: int | Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    batch_invariant: bool = False,
    sink: Tensor | None = None,
    attention_chunk: int = 0,
    out: Tensor | None = None,
    qv: Tensor | None = None,
    q_descale: float | Tensor | None = None,
    k_descale: float | Tensor | None = None,
    v_descale: float | Tensor | None = None,
    quantize: str | None = None,
    key_lists: Tensor | None = None,
    key_list_block: int = 1,
    values_include_rope: bool = False,
    tree_mask: Tensor | None = None,
    attn_mask: Tensor | None = None,
    relative_bias: Tensor | None = None,
    fp8_products: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of new queries over a cache of keys and values, to which k and v are appended.

    For inference: there is no backward. Options that are not listed are those of flash_attn_func,
    where seqlen_k is the number of keys of a sequence, appended ones included and left padding
    excluded, and key 0 the first one behind the padding. Nothing waits for the device. All tensors
    have q's device; q, caches, k, v and rotary tables one dtype; index tensors are int32. Both
    caches may be of float8_e4m3fn instead (Micikevicius et al., "FP8 Formats for Deep Learning",
    2022), with head dims that are multiples of 16.

    Args:
        q: (batch, seqlen_q, heads_q, head_dim), or with cu_seqlens_q (total_q, heads_q, head_dim).
            No head_dim costs a copy of the cache.
        k_cache: (batch_cache, capacity, heads_k, head_dim), or with a block_table (num_pages,
            page_size, heads_k, head_dim), of any page_size. Written in place if k is given.
        v_cache: as k_cache, with head_dim_v.
        k: (batch, seqlen_new, heads_k, head_dim): appended at row cache_seqlens of each sequence.
            With cu_seqlens_q or cu_seqlens_k_new, (total_new, heads_k, head_dim). k and v of
            float8_e4m3fn are numbers of caches of that, whose scales they are times: they are
            appended as they are, without rotary_cos and quantize.
        v: as k, with head_dim_v.
        rotary_cos: (seqlen_rotary, rotary_dim / 2): rotates the first rotary_dim elements of k, at
            positions cache_seqlens, cache_seqlens + 1, ..., and of q, at the same positions if
            causal, windowed or with a tree_mask, all at cache_seqlens otherwise (Su et al.,
            "RoFormer", 2021, section 3.2.2). Only with k.
        rotary_sin: as rotary_cos.
        cache_seqlens: (batch,), or an integer for all: rows of the cache that are filled, before
            appending, left padding included. None, without k, for the whole capacity.
        cache_batch_idx: (batch,): the entry of the cache, or row of block_table, of each sequence.
            Appending to one entry twice leaves either's keys.
        cache_leftpad: (batch,): rows of the cache before a sequence's first key.
        block_table: (batch, max_pages): row r of sequence b is row r % page_size of page
            block_table[b, r // page_size].
        rotary_interleaved: rotate elements (0, 1), (2, 3), ... rather than (0, rotary_dim / 2),
            (1, rotary_dim / 2 + 1), ...
        num_splits: parts that the keys of a sequence are divided into, at most, to occupy the
            device; 0 chooses.
        return_softmax_lse: also return softmax_lse.
        cu_seqlens_q: (batch + 1,): sequences of queries are packed, as in flash_attn_varlen_func.
        max_seqlen_q: an upper bound of their lengths: an integer, a 0-d tensor, which is not read,
            or None. On CUDA results are right whatever it is: it helps to choose a kernel.
        cu_seqlens_k_new: (batch + 1,), the same of k and v; None for cu_seqlens_q.
        batch_invariant: split keys at fixed lengths, so that a sequence's results are the same bits
            whatever the batch and the capacity; num_splits is not used then.
        sink: (heads_q,), fp32, fp16 or bf16: exp(sink) joins the denominator of every softmax of
            the head, and so softmax_lse.
        attention_chunk: as in flash_attn_func; keys count from the first behind the padding.
        out: like q, but with head_dim_v, contiguous in its last dimension, to write the result
            into; it must not overlap an input. None for a new tensor.
        qv: (batch, seqlen_q, heads_q, head_dim_v), or packed as q, and of its dtype: scores are
            softmax_scale * (q k^T + qv v^T), as of multi-head latent attention that has absorbed
            its projections (DeepSeek-AI, "DeepSeek-V2", 2024, section 2.1). q and k then are the
            rotary columns, on CUDA at most 64, v_cache is the latent, and both may be views of one
            cache, cache[..., 512:] and cache[..., :512], which nobody copies. softmax_scale is
            given with it: the model's, of the head dim that it has without absorption. v_cache
            alone may be of float8_e4m3fn then, as in rows of bytes (latent_views).
        k_descale: what the numbers of a k_cache of float8_e4m3fn are times, which such a cache must
            have: a number, or fp32 of one element, (heads_k,), (batch, heads_k), or a scale for
            every token, (batch_cache, capacity, heads_k) or (num_pages, page_size, heads_k), with
            any strides. New keys, once rotated, are divided by it, rounded to the nearest even and
            saturated at +-448; NaN stays NaN, and a scale of 0 stores 0. Unused rows may hold
            anything.
        v_descale: the same of v_cache. With a qv also a scale for each group of 64, 128, 256 or 512
            columns of a token, in a fourth dimension, which may be of float8_e8m0fnu, powers of
            two.
        q_descale: a number, (heads_k,) or (batch, heads_k): q may be of float8_e4m3fn where caches
            are, and is times this. Then it is converted, exactly, to out's dtype if out is of fp16
            or bf16, else to bf16, which out, k, v and rotary tables have as well.
        fp8_products: q of float8_e4m3fn may be multiplied as it is, and probabilities rounded to
            it, by kernels for more than 64 rows of queries and heads that share a key head, on GPUs
            of compute capability 9.0, of scales that are no tokens' (docs/fp8.md). Other calls
            convert it. For prefill.
        quantize: "token": every new (token, head) of k and v gets a scale of its own, its largest
            finite magnitude over 448, or 1 where that is 0. It is written into k_descale and
            v_descale, which are tensors with a scale for every token. Groups of columns get theirs
            likewise, of float8_e8m0fnu the next power of two, at least 2^-13; keys in 16 bits get
            none.
        key_lists: (batch, seqlen_q, heads_k, n), or packed (total_q, heads_k, n), with any strides:
            the keys that the query heads of a key head see, by their positions in the query's
            sequence, from 0 to seqlen_k - 1, in any order; negative for none. Lengths, causal and
            window hide keys of lists as well. A key that stands twice counts twice. A query whose
            list names none has out 0 and softmax_lse -inf, or its sink. For a call with a qv.
        key_list_block: keys that an entry stands for: 1.
        values_include_rope: the columns of k_cache are values too, behind those of v_cache, as of
            LatentFormat.DEEPSEEK_V4: out has head_dim_v + head_dim of them, at most 512. For a
            v_cache alone of float8_e4m3fn: where both are in 16 bits, one cache is k_cache and
            v_cache, without a qv.
        tree_mask: (batch, seqlen_q, seqlen_q), bool, or packed (total_q, n) with a row for every
            query and n at least max_seqlen_q, with any strides: the last seqlen_q keys of a
            sequence are its queries' own, of which query i sees key j where tree_mask[b, i, j] is
            True, packed at query i's row and column j. It sees all keys before them that the window
            leaves. Where seqlen_k < seqlen_q the first own keys do not exist. For speculative
            decoding of trees (Miao et al., "SpecInfer", 2024), whose tokens' depths are no rows:
            a caller rotates by them itself. Without causal and a right window.
        attn_mask: as in flash_attn_func, of 2 to 4 dimensions that broadcast to (batch, heads_q,
            seqlen_q, seqlen_k), where seqlen_q is max_seqlen_q, an integer then, of packed
            queries, and seqlen_k the capacity, or cache_seqlens and seqlen_new together where that
            is an integer: column j is that of a sequence's key j, whatever its page.
        relative_bias: (heads_q, 2 * reach + 1), as in flash_attn_func, without a gradient. Kernels
            read it as it is, of every sequence by its own lengths.

    Returns:
        out like q, but with head_dim_v, `out` itself where it was given, or (out, softmax_lse),
        softmax_lse (batch, heads_q, seqlen_q) or (heads_q, total_q) in fp32.

    Raises:
        As flash_attn_varlen_func, wrong lengths and indices included; keys beyond the capacity are
        not written. ValueError: there is a qv and no softmax_scale, or a tree_mask and causal or a
        right window. NotImplementedError: there is an attn_mask or a relative_bias, and an
        attention_chunk, a qv, a tree_mask, a cache of float8_e4m3fn or both; relative_bias requires
        grad while gradients are enabled; a tensor carries a forward-mode gradient, or with k or qv
        requires grad while gradients are enabled; from the backward, without those; with a qv there
        are alibi_slopes, or k_cache is of float8_e4m3fn; there are key_lists without a qv or with
        an attention_chunk or a tree_mask, a tree_mask and an attention_chunk, or a key_list_block
        that is not 1.
    """
    tensors = (q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, sink, qv, attn_mask)
    _refuse_gradients(k is not None, *tensors, q_descale, k_descale, v_descale)
    if type(num_splits) is not int or batch_invariant is not False:
        num_splits = check_splits(num_splits, batch_invariant)
    options = options_of(0.0, softmax_scale, causal, window_size, softcap, alibi_slopes, False)
    for name, tensor in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache)):
        check_tensor(name, tensor)
    used, seqlen_k = _cache_lengths(cache_seqlens)
    if k is not None and cu_seqlens_k_new is None:
        cu_seqlens_k_new = cu_seqlens_q
    most = 0  # of no use without cu_seqlens_q
    if max_seqlen_q is not None or cu_seqlens_q is not None:
        bound = seqlen_bound("max_seqlen_q", max_seqlen_q, q)
        most = 0 if cu_seqlens_q is None else bound
    call = describe(
        q=q,
        k=k_cache,
        v=v_cache,
        cu_seqlens_q=cu_seqlens_q,
        max_seqlen_q=most,
        seqused_k=used,
        leftpad_k=cache_leftpad,
        block_table=block_table,
        num_splits=num_splits,
        batch_invariant=batch_invariant,
        over_cache=True,
        cache_batch_idx=cache_batch_idx,
        seqlen_k=seqlen_k,
        k_new=k,
        v_new=v,
        cu_seqlens_k_new=cu_seqlens_k_new,
        rotary_cos=rotary_cos,
        rotary_sin=rotary_sin,
        rotary_interleaved=bool(rotary_interleaved),
        **options,
    )
    if not (
        q_descale is k_descale is v_descale is quantize is None
        and E4M3 not in (q.dtype, k_cache.dtype, v_cache.dtype)
    ):
        scales = (q_descale, k_descale, v_descale)
        add_scales(call, CACHE_NAMES, *scales, quantize, out, fp8_products=fp8_products)
    if sink is not None:
        call.sink = of_lse_dtype("sink", sink, call.q)
    if qv is not None:
        call.qv = qv
    if values_include_rope:
        call.values_include_rope = True
    if key_lists is not None or key_list_block != 1:
        add_lists(call, key_lists, key_list_block)
    if tree_mask is not None:
        add_tree(call, tree_mask, max_seqlen_q)
    if attn_mask is not None:
        if call.is_packed():
            call.max_seqlen_q = integer_bound("max_seqlen_q", max_seqlen_q, "attn_mask")
        add_mask_in_place(call, attn_mask)
    if relative_bias is not None:
        add_relative_bias(call, relative_bias)
    if out is not None:
        call.out = out
    if attention_chunk != 0:
        results = attend_over_cache_in_chunks(call, check_chunk(attention_chunk))
    else:
        results = results_of(call)
    return (results.out, results.softmax_lse) if return_softmax_lse else results.out


def flash_attn_combine(
    out_partial: Tensor,
    lse_partial: Tensor,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """One result from those of any number of disjoint parts of the keys.

    With lse = log(sum of exp(lse_partial)) over the parts, out is the sum of exp(lse_partial - lse)
    * out_partial. Parts where lse_partial is -inf do not count, whatever their out_partial holds.
    Without gradients.

    Args:
        out_partial: (splits, batch, seqlen, heads, head_dim), fp32 (fp64 too on the CPU).
        lse_partial: (splits, batch, seqlen, heads), of the same dtype.
        out: (batch, seqlen, heads, head_dim) to write into; None for a new tensor.
        out_dtype: dtype of a new one: fp32, fp16 or bf16; None for out_partial's.

    Returns:
        (out, softmax_lse), softmax_lse (batch, seqlen, heads) as in FlashAttention-3: of the shape
        of a part's lse_partial, not of the attention functions' softmax_lse.

    Raises:
        TypeError, ValueError: naming the argument. NotImplementedError: a partial result requires
        grad while gradients are enabled, or carries a forward-mode gradient.
    """
    reason = "as a sum of partial results has no backward"
    refuse_gradients(reason, out_partial=out_partial, lse_partial=lse_partial, out=out)
    check_tensor("out_partial", out_partial)
    check_tensor("lse_partial", lse_partial)
    if out_dtype is not None and not isinstance(out_dtype, torch.dtype):
        kind = type(out_dtype).__name__
        raise TypeError(f"out_dtype: must be a torch.dtype or None, got {kind}")
    if out is None:
        return run_combine(out_partial, lse_partial, out_dtype)
    check_tensor("out", out)
    if out_dtype is not None and out_dtype != out.dtype:
        raise TypeError(f"out_dtype: must be the dtype of out ({out.dtype}), got {out_dtype}")
    softmax_lse = run_combine_out(out_partial, lse_partial, out)
    return out, softmax_lse


def _cache_lengths(cache_seqlens: Any) -> tuple[Tensor | None, int | None]:
    """(a tensor or None, one number for every sequence or None)."""
    if cache_seqlens is None or isinstance(cache_seqlens, Tensor):
        return cache_seqlens, None
    return None, as_index("cache_seqlens", cache_seqlens, "an integer or a tensor")


def _refuse_gradients(appends: bool, *tensors: Any) -> None:
    """Of what is read alone, the backward refuses."""
    names = (
        *("q", "k_cache", "v_cache", "k", "v", "rotary_cos", "rotary_sin", "sink", "qv"),
        "attn_mask",
        *("q_descale", "k_descale", "v_descale"),
    )
    given = dict(zip(names, tensors, strict=True))
    if appends:
        refuse_gradients(f"as an append to a cache {NO_BACKWARD}", **given)
    elif given["qv"] is not None:
        refuse_gradients(f"as attention with qv {NO_BACKWARD}", **given)
    else:
        refuse_forward_gradients(**given)
