"""The public functions: FlashAttention-2's names, parameters and semantics, on CUDA and CPU.

The maths is that of Dao et al., "FlashAttention" (2022, section 3.1) and Dao, "FlashAttention-2"
(2023, section 3.1): for every batch and head, softmax(softmax_scale * q k^T + mask) v, without
storing the scores. Where the tensors are plain and nothing is watching (no compiler, no torch mode,
no functorch transform), CUDA calls go straight to the extension, whose autograd is in C++;
everything else goes through the operators of ops.py.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor
from torch._C import (
    _are_functorch_transforms_active,
    _is_any_autocast_enabled,
    _len_torch_dispatch_stack,
    _len_torch_function_stack,
)
from torch.compiler import is_compiling
from torch.nn.functional import pad

from . import build_info
from .checks import (
    QKV_NAMES,
    Names,
    causal_from_window,
    check_attention_inputs,
    check_packed,
    packed_sequences_not_implemented,
    refuse_later_arguments,
)
from .private import (
    _flash_attn_backward,
    _flash_attn_forward,
    _flash_attn_varlen_backward,
    _flash_attn_varlen_forward,
)

__all__ = [
    "_flash_attn_backward",
    "_flash_attn_forward",
    "_flash_attn_varlen_backward",
    "_flash_attn_varlen_forward",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]

WindowSize: TypeAlias = "tuple[int, int] | list[int] | Tensor"
Result: TypeAlias = "Tensor | tuple[Tensor, Tensor, Tensor]"

UNLIMITED = (-1, -1)  # the window_size that hides nothing

_KVPACKED_NAMES: Names = ("q", "kv[:, :, 0]", "kv[:, :, 1]")
_QKVPACKED_NAMES: Names = ("qkv[:, :, 0]", "qkv[:, :, 1]", "qkv[:, :, 2]")


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
) -> Result:
    """Attention of queries over keys and values: Dao, "FlashAttention-2" (2023), section 3.1.

    Sequences of q and k, v may differ in length. Fewer key heads than query heads is grouped-query
    (or, with one, multi-query) attention: query head h reads key head h // (heads_q / heads_k).

    Args:
        q: (batch, seqlen_q, heads_q, head_dim), head_dim from 1 to 256. fp16 or bf16 on CUDA; also
            fp32 and fp64 on the CPU. Any strides. On CUDA, tensors whose rows do not start on
            16-byte boundaries, and a head_dim that is not a multiple of 8, cost a copy.
        k: (batch, seqlen_k, heads_k, head_dim); heads_k divides heads_q.
        v: (batch, seqlen_k, heads_k, head_dim).
        dropout_p: probability of dropping an attention weight; only 0.0 is implemented.
        softmax_scale: factor of the scores before the softmax, any number that is finite in fp32;
            None for head_dim ** -0.5.
        causal: query i sees key j only if j <= i + seqlen_k - seqlen_q (bottom right alignment).
        window_size: (left, right): query i sees key j only if
            i + seqlen_k - seqlen_q - left <= j <= i + seqlen_k - seqlen_q + right. Negative for
            unlimited. Only (-1, -1), and (-1, 0), which is causal, are implemented.
        softcap: scores become softcap * tanh(score / softcap); only 0.0, off, is implemented.
        alibi_slopes: (heads_q,) or (batch, heads_q), fp32; only None is implemented.
        deterministic: bitwise repeatable backward; only False is implemented.
        return_attn_probs: also return softmax_lse and S_dmask.

    Returns:
        out (batch, seqlen_q, heads_q, head_dim) in q's dtype, or (out, softmax_lse, S_dmask):
        softmax_lse (batch, heads_q, seqlen_q) is the natural logarithm of the softmax's
        denominator, in fp32 (fp64 for fp64 inputs), and S_dmask is empty without dropout.
        A query that sees no key has out 0, softmax_lse -inf and no gradient.
        Differentiable, once, in q, k and v through out and softmax_lse. Under torch.autocast the
        inputs are cast to its dtype first.

    Raises:
        TypeError: an argument is not of the type or dtype required.
        ValueError: shapes, devices or head_dim do not fit, or softmax_scale is not finite.
        NotImplementedError: an argument asks for something that is not implemented.
        RuntimeError: the tensors are on a CUDA device that this installation cannot run on.
    """
    causal = _fold_mask(causal, window_size, dropout_p, softcap, alibi_slopes, deterministic)
    return _attend(q, k, v, softmax_scale, causal, return_attn_probs, QKV_NAMES)


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
) -> Result:
    """flash_attn_func with kv (batch, seqlen_k, 2, heads_k, head_dim) for keys and values.

    The gradient of kv is made in one piece, without adding two padded halves. Everything else,
    errors included, is as in flash_attn_func.
    """
    causal = _fold_mask(causal, window_size, dropout_p, softcap, alibi_slopes, deterministic)
    check_packed("kv", kv, "(batch, seqlen_k, 2, heads_k, head_dim)", 2)
    k, v = kv.unbind(2)
    return _attend(q, k, v, softmax_scale, causal, return_attn_probs, _KVPACKED_NAMES)


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
) -> Result:
    """flash_attn_func with qkv (batch, seqlen, 3, heads, head_dim) for all three.

    Queries and keys have the same number of heads. The gradient of qkv is made in one piece.
    Everything else, errors included, is as in flash_attn_func.
    """
    causal = _fold_mask(causal, window_size, dropout_p, softcap, alibi_slopes, deterministic)
    check_packed("qkv", qkv, "(batch, seqlen, 3, heads, head_dim)", 3)
    q, k, v = qkv.unbind(2)
    return _attend(q, k, v, softmax_scale, causal, return_attn_probs, _QKVPACKED_NAMES)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = UNLIMITED,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Result:
    """Packed sequences, q (total_q, heads_q, head_dim): raises NotImplementedError."""
    raise packed_sequences_not_implemented("cu_seqlens_q")


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = UNLIMITED,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """Packed sequences, kv (total_k, 2, heads_k, head_dim): raises NotImplementedError."""
    raise packed_sequences_not_implemented("cu_seqlens_q")


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = UNLIMITED,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """Packed sequences, qkv (total, 3, heads, head_dim): raises NotImplementedError."""
    raise packed_sequences_not_implemented("cu_seqlens")


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
) -> Tensor | tuple[Tensor, Tensor]:
    """A KV cache, k_cache (batch, capacity, heads_k, head_dim): raises NotImplementedError."""
    raise NotImplementedError(
        "k_cache: attention over a KV cache is not implemented yet; "
        "flash_attn_func takes the valid part of a cache"
    )


def _fold_mask(
    causal: bool,
    window_size: WindowSize,
    dropout_p: float,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
) -> bool:
    """Refuse what is not implemented; returns whether the mask is causal."""
    if dropout_p or softcap or alibi_slopes is not None or deterministic:
        refuse_later_arguments(dropout_p, softcap, alibi_slopes, deterministic)
    return bool(causal) if window_size is UNLIMITED else causal_from_window(causal, window_size)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None,
    causal: bool,
    return_attn_probs: bool,
    names: Names,
) -> Result:
    if not is_compiling() and _is_plain_cuda_call(q, k, v):
        out, softmax_lse = _attend_by_extension(q, k, v, softmax_scale, causal, names)
        if return_attn_probs:
            return out, softmax_lse, q.new_empty((0,), dtype=out.dtype)
        return out
    out, softmax_lse, s_dmask = _attend_by_operator(q, k, v, softmax_scale, causal, names)
    return (out, softmax_lse, s_dmask) if return_attn_probs else out


def _is_plain_cuda_call(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether nothing but eager autograd would see an operator: half a microsecond."""
    return (
        build_info.extension is not None
        and type(q) is Tensor
        and type(k) is Tensor
        and type(v) is Tensor
        and q.is_cuda
        and _len_torch_dispatch_stack() == 0
        and _len_torch_function_stack() == 0
        and not _are_functorch_transforms_active()
    )


def _attend_by_extension(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None, causal: bool, names: Names
) -> tuple[Tensor, Tensor]:
    """The fast path: the extension checks its inputs, so only a rejected call is checked here."""
    if _is_any_autocast_enabled():
        q, k, v = _cast_for_autocast(q, k, v)
    attention = cast(ModuleType, build_info.extension).attention
    try:
        head_dim = q.shape[-1]
        if head_dim % 8 == 0:
            return attention(q, k, v, softmax_scale, causal)
        scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
        padded = [_pad_head_dim(x) for x in (q, k, v)]
        out, softmax_lse = attention(*padded, scale, causal)
        return out[..., :head_dim], softmax_lse
    except Exception as error:
        check_attention_inputs(q, k, v, softmax_scale, names)
        build_info.require_cuda(q.device, error)
        raise


def _attend_by_operator(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None, causal: bool, names: Names
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = _cast_for_autocast(q, k, v)
    check_attention_inputs(q, k, v, softmax_scale, names)
    head_dim = q.shape[-1]
    scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
    needs_padding = q.is_cuda and head_dim % 8 != 0
    if needs_padding:
        q, k, v = _pad_head_dim(q), _pad_head_dim(k), _pad_head_dim(v)
    out, softmax_lse, s_dmask, _ = _flash_attn_forward(
        *(q, k, v), 0.0, scale, causal, *UNLIMITED, 0.0, None, return_softmax=False
    )
    return out[..., :head_dim] if needs_padding else out, softmax_lse, s_dmask


def _pad_head_dim(x: Tensor) -> Tensor:
    """Zeros to a multiple of 8: they add nothing to a score, and their outputs are cut off."""
    return pad(x, (0, -x.shape[-1] % 8))


def _cast_for_autocast(*tensors: Any) -> tuple[Any, ...]:
    """To torch.autocast's dtype, except fp64, as it does for torch's own attention."""
    return tuple(_cast_one(x) if isinstance(x, Tensor) else x for x in tensors)


def _cast_one(x: Tensor) -> Tensor:
    device = x.device.type
    if device not in ("cuda", "cpu") or not torch.is_autocast_enabled(device):
        return x
    if not x.is_floating_point() or x.dtype == torch.float64:
        return x
    return x.to(torch.get_autocast_dtype(device))
