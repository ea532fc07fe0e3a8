"""The public functions of sequences of one length, (batch, seqlen, heads, head_dim)."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..call.fields import NAMES, Names, describe, options_of
from ..call.tensors import check_packed, check_tensor
from ..call.window import UNLIMITED, WindowSize, is_unlimited
from .arguments import Result, of_lse_dtype
from .attend import attend, attend_plainly, returned
from .chunks import attend_in_chunks, check_chunk
from .given_masks import Masks, add_masks, given_lists
from .relative_bias import add_relative_bias

_KVPACKED_NAMES = Names(k="kv[:, :, 0]", v="kv[:, :, 1]")
_QKVPACKED_NAMES = Names("qkv[:, :, 0]", "qkv[:, :, 1]", "qkv[:, :, 2]")


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = UNLIMITED,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    attn_mask: Tensor | None = None,
    block_mask: Any = None,
    block_size: tuple[int, int] | None = None,
    sink: Tensor | None = None,
    attention_chunk: int = 0,
    keep_rounding: bool = True,
    relative_bias: Tensor | None = None,
    key_lists: Tensor | None = None,
    key_list_block: int = 1,
    key_list_queries: int = 1,
    return_max_logits: bool = False,
) -> Result:
    """Attention of queries over keys and values: Dao, "FlashAttention-2" (2023), section 3.1.

    Sequences of q and k, v may differ in length. Fewer key heads than query heads is grouped-query
    (or, with one, multi-query) attention: query head h reads key head h // (heads_q / heads_k).
    The score of query i and key j is softmax_scale * q_i k_j; then softcap is applied, then ALiBi,
    then a bias, then masks: a key that any of them hides is hidden.

    Args:
        q: (batch, seqlen_q, heads_q, head_dim), head_dim from 1 to 512. fp16 or bf16 on CUDA; also
            fp32 and fp64 on the CPU. Any strides. On CUDA, tensors whose rows do not start on
            16-byte boundaries, and a head_dim that is not a multiple of 8, cost a copy.
        k: (batch, seqlen_k, heads_k, head_dim); heads_k divides heads_q.
        v: (batch, seqlen_k, heads_k, head_dim_v), head_dim_v from 1 to 512, mostly that of q and k.
        dropout_p: probability in [0, 1), to 2 ** -16, of dropping an attention weight; the others
            are scaled so that the expectation stays. This and the other numbers may be of Python's
            or numpy's types, or 0-d tensors on the CPU (in a full graph of torch.compile Python's
            alone). Random numbers come from torch's default generator of the device; the mask is a
            function of the call's (seed, offset), batch, head, row and column alone.
        softmax_scale: factor of the scores before the softmax, any number that is finite in fp32;
            None for head_dim ** -0.5.
        causal: query i sees key j only if j <= i + seqlen_k - seqlen_q (bottom right alignment).
        window_size: (left, right): query i sees key j only if
            i + seqlen_k - seqlen_q - left <= j <= i + seqlen_k - seqlen_q + right. Negative (any
            number, not -1 alone) or None for unlimited, each side on its own; 0 for nothing beyond
            the diagonal; a bound that reaches beyond every key hides nothing, however large.
            causal sets right to 0, whatever it was. A tensor of two integers will do, or one for a
            bound; on CUDA reading it waits for the device.
        softcap: scores become softcap * tanh(score / softcap); zero or negative for off.
        alibi_slopes: (heads_q,) or (batch, heads_q), fp32, without a gradient: scores become
            score - slope * |i + seqlen_k - seqlen_q - j| (Press et al., "ALiBi", 2022).
        deterministic: bitwise repeatable gradients, at some cost. The forward always repeats.
        return_attn_probs: also return softmax_lse and S_dmask, for tests.
        attn_mask: broadcasts to (batch, heads_q, seqlen_q, seqlen_k) in all but its last dimension,
            which is seqlen_k. Boolean: True is visible; the tiles in which nothing is are left out.
            Floating, of q's dtype or fp32: a bias that is added to the scores, differentiable.
        block_mask: the same sparsity prepared beforehand: a BlockSparsity, a BlockMask of torch's
            flex_attention, which is converted in every call, or booleans (batch or 1, heads_q or 1,
            blocks of queries, blocks of keys), True visible. Not with a boolean attn_mask.
        block_size: (queries, keys) of a block, multiples of 64, of a block_mask of booleans.
        sink: (heads_q,), fp32, fp16 or bf16: exp(sink) joins the denominator of every softmax of
            the head, and so softmax_lse. Differentiable.
        attention_chunk: query i sees the keys alone that are in its chunk of so many, those from
            p - p % attention_chunk on where p is i + seqlen_k - seqlen_q; 0 for none.
            Dropout counts rows and columns of chunks, unless there is a mask or a bias.
        keep_rounding: keep for the backward what rounding to 16 bits takes from out, a byte for
            each of its numbers. Without it the gradient of q is off where keys and values have a
            mean, as FlashAttention-2's is (docs/numerics.md).
        relative_bias: (heads_q, 2 * reach + 1), of q's dtype or fp32, differentiable: scores become
            score + relative_bias[h, reach + d], where d is j - i - (seqlen_k - seqlen_q), or
            -reach or reach where it is beyond those. t5_relative_bias makes that of T5 models. Its
            memory grows with seqlen_q + seqlen_k. Not with a floating attn_mask.
        key_lists: (batch, lists, heads_k, n), int32, with any strides: the blocks of keys that the
            queries of a list see, those of all query heads that share the key head. Entry e stands
            for keys e * key_list_block to (e + 1) * key_list_block - 1; -1 for none. An entry
            that stands twice counts once. Others are no block of keys: on the CPU a ValueError, on
            CUDA skipped and reported by check_device_errors, but not where a compiled call makes a
            mask of them. Kernels on CUDA read lists of single
            queries (docs/masks.md#lists-of-each-query); of others each call makes a mask
            (BlockSparsity.from_key_lists). With another mask a query sees what both show.
        key_list_block: 1, 8, 16, 32, 64 or 128.
        key_list_queries: 1, 64 or 128: queries that have a list together, the last one's fewer.
        return_max_logits: also return max_logits, for QK-clip (Kimi Team, "Kimi K2", 2025).

    Returns:
        out (batch, seqlen_q, heads_q, head_dim_v) in q's dtype, or (out, softmax_lse, S_dmask):
        softmax_lse (batch, heads_q, seqlen_q) is the natural logarithm of the softmax's
        denominator, in fp32 (fp64 for fp64 inputs). S_dmask is empty without dropout; with it,
        (batch, heads_q, seqlen_q, seqlen_k) in q's dtype, it holds the probabilities before
        dropout, negated where they are dropped.
        With return_max_logits, max_logits (batch, heads_q) comes last, of softmax_lse's dtype and
        without a gradient: the largest score of each head that is in a softmax, -inf where none
        is; a sink is no score.
        A query that sees no key has out 0, softmax_lse -inf (with a sink, that) and no gradient.
        Differentiable twice in q, k and v through out and softmax_lse, in reverse and forward mode
        (docs/second_order.md). Under torch.autocast the inputs are cast to its dtype first.

    Raises:
        TypeError: an argument is not of the type or dtype required.
        ValueError: shapes, devices or numbers do not fit.
        NotImplementedError: alibi_slopes requires grad; a third derivative is asked for, or a
            forward-mode one of a forward-mode one, or by torch.vmap a randomness that dropout does
            not have; with a mask, a bias or a sink, S_dmask is.
        RuntimeError: the tensors are on a CUDA device that this installation cannot run on.
    """
    options = (
        *(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic),
    )
    if (
        attn_mask is None
        and block_mask is None
        and block_size is None
        and sink is relative_bias is key_lists is None
        and key_list_block == key_list_queries == 1
        and attention_chunk == 0
    ):
        wanted = return_attn_probs, return_max_logits
        return _attend(q, k, v, options, wanted, keep_rounding, NAMES)
    check_tensor("q", q)
    call = describe(q=q, k=k, v=v, **options_of(*options))
    if not keep_rounding:
        call.saves_memory = True
    if return_max_logits:
        call.return_max_logits = True
    lists = given_lists(key_lists, key_list_block, key_list_queries)
    masks = Masks(attn_mask, block_mask, block_size, lists)
    if sink is not None:
        call.sink = of_lse_dtype("sink", sink, q)
    if masks.are_given():
        is_alone = relative_bias is None and attention_chunk == 0
        add_masks(call, masks, (None, None), is_alone=is_alone)
    if relative_bias is not None:
        add_relative_bias(call, relative_bias)
    if attention_chunk != 0:
        results = attend_in_chunks(call, check_chunk(attention_chunk), return_attn_probs)
        return returned(results, return_attn_probs, return_max_logits)
    return attend(call, return_attn_probs)


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
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
    """flash_attn_func with kv (batch, seqlen_k, 2, heads_k, head_dim) for keys and values.

    The gradient of kv is made in one piece, without adding two padded halves. Everything else,
    errors included, is as in flash_attn_func.
    """
    options = (
        *(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic),
    )
    check_packed("kv", kv, "(batch, seqlen_k, 2, heads_k, head_dim)", 2)
    k, v = kv.unbind(2)
    wanted = return_attn_probs, return_max_logits
    return _attend(q, k, v, options, wanted, keep_rounding, _KVPACKED_NAMES)


def flash_attn_qkvpacked_func(
    qkv: Tensor,
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
    """flash_attn_func with qkv (batch, seqlen, 3, heads, head_dim) for all three.

    Queries and keys have the same number of heads. The gradient of qkv is made in one piece.
    Everything else, errors included, is as in flash_attn_func.
    """
    options = (
        *(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic),
    )
    check_packed("qkv", qkv, "(batch, seqlen, 3, heads, head_dim)", 3)
    q, k, v = qkv.unbind(2)
    wanted = return_attn_probs, return_max_logits
    return _attend(q, k, v, options, wanted, keep_rounding, _QKVPACKED_NAMES)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    options: tuple[Any, ...],
    wanted: tuple[bool, bool],
    keep_rounding: bool,
    names: Names,
) -> Result:
    """A call of nothing but these, whose host time counts most where it is full or causal.
    wanted: return_attn_probs and return_max_logits.
    """
    return_attn_probs, return_max_logits = wanted
    dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic = options
    if (
        is_unlimited(window_size)
        and type(dropout_p) is type(softcap) is float
        and not (dropout_p or softcap or deterministic)
        and alibi_slopes is None
        and (softmax_scale is None or type(softmax_scale) is float)
        and keep_rounding
        and not return_max_logits
    ):
        results = attend_plainly(q, k, v, softmax_scale, bool(causal), return_attn_probs, names)
        if results is not None:
            out, softmax_lse = results
            return out if softmax_lse is None else (out, softmax_lse, out.new_empty((0,)))
    call = describe(q=q, k=k, v=v, **options_of(*options))
    if not keep_rounding:
        call.saves_memory = True
    if return_max_logits:
        call.return_max_logits = True
    return attend(call, return_attn_probs, names)
