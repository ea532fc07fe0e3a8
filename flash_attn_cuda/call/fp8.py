"""Keys and values of FP8 (float8_e4m3fn, "e4m3"): their scales, and how numbers become it.

A number of e4m3 times its scale, a descale in FlashAttention-3's words, is the key or value. e4m3
has 3 bits of mantissa, magnitudes from 2^-9 to 448, NaN and no infinity (Micikevicius et al., "FP8
Formats for Deep Learning", 2022).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import rules
from .fields import NAMES, AttentionCall, Names
from .interpret import check_holds
from .tensors import (
    CPU_DTYPES,
    CUDA_DTYPES,
    E4M3,
    E8M0,
    as_number,
    check_dtype,
    check_tensor,
    refuse_forward_gradients,
    refuse_gradients,
)

MAX_E4M3 = 448.0
LEAST_POWER = 2.0**-13  # of scales of e8m0, as FlashMLA makes them
TOKEN = "token"
_MODES = (TOKEN, "head")


def quantize_kv(k: Tensor, v: Tensor, mode: str = TOKEN) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Keys and values as float8_e4m3fn and the scales that flash_attn_with_kvcache and
    flash_attn_varlen_func take with them: of a cache that is there already. An append quantizes
    new ones itself.

    A scale is the largest finite magnitude of what shares it, over 448, the largest number of e4m3
    (Micikevicius et al., "FP8 Formats for Deep Learning", 2022, section 3.1); 1 where that is 0. A
    number is divided by it in fp32 (fp64 of fp64) and rounded to the nearest, ties to even. What is
    beyond 448, infinities included, becomes 448 of its sign; NaN stays NaN. Without gradients.

    Args:
        k: (batch, seqlen, heads_k, head_dim), pages (num_pages, page_size, heads_k, head_dim), or
            packed (total, heads_k, head_dim); fp16, bf16, fp32 or fp64. head_dim is a multiple of
            16.
        v: as k, with head_dim_v.
        mode: "token": a scale for every token and head, the more exact. "head": for every head of a
            batch entry, or of all packed tokens; pages have no such scales.

    Returns:
        (k_e4m3, v_e4m3, k_descale, v_descale). Scales are fp32: with "token" of k's shape without
        head_dim; with "head" (batch, heads_k), or packed (heads_k,). Packed sequences without a
        block_table have no scales per token in flash_attn_varlen_func.

    Raises:
        TypeError, ValueError: naming the argument. NotImplementedError: k or v requires grad while
        gradients are enabled, or carries a forward-mode gradient.
    """
    refuse_gradients("as numbers that are rounded have none", k=k, v=v)
    if mode not in _MODES:
        raise ValueError(f"mode: must be 'token' or 'head', got {mode!r}")
    for name, x in (("k", k), ("v", v)):
        check_tensor(name, x)
        check_dtype(name, x.dtype, CPU_DTYPES)
        if x.dim() not in (3, 4):
            raise ValueError(
                f"{name}: must have shape (batch, seqlen, heads, head_dim) or (total, heads, "
                f"head_dim), got {tuple(x.shape)}"
            )
    check_holds(rules.OF_E4M3 + rules.OF_VALUES, NAMES, AttentionCall(k, k, v))
    made = []
    for x in (k, v):
        scale = token_scales(x) if mode == TOKEN else _head_scales(x)
        of_rows = scale if mode == TOKEN else scale.unsqueeze(-2)
        made.append((to_e4m3(x, of_rows[..., None]), scale))
    (k_e4m3, k_descale), (v_e4m3, v_descale) = made
    return k_e4m3, v_e4m3, k_descale, v_descale


def to_e4m3(x: Tensor, scale: Tensor) -> Tensor:
    """x / scale, rounded to the nearest even and saturated; 0 where the scale is 0."""
    wide = x if x.dtype == torch.float64 else x.float()
    scale = scale.float()
    # torch's own conversion makes NaN of what is too large.
    quotient = (wide / scale).masked_fill(scale == 0.0, 0.0).clamp(-MAX_E4M3, MAX_E4M3)
    if quotient.dtype == torch.float64:  # which torch rounds to fp32 before it rounds to e4m3
        exponent = quotient.view(torch.int64) & 0x7FF0000000000000  # alone: a power of two
        step = exponent.view(torch.float64).clamp(min=2.0**-6) / 8.0
        quotient = (quotient / step).round() * step
    return quotient.to(E4M3)


def token_scales(x: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Scales of x's rows, of its shape without the last dimension: fp32, or of e8m0 the next power
    of two.
    """
    largest = _finite_magnitudes(x).amax(-1)
    return _powers_of(largest) if dtype == E8M0 else _scales_of(largest)


def _head_scales(x: Tensor) -> Tensor:
    """(batch, heads) of x (batch, seqlen, heads, head_dim), (heads,) of (total, heads, ...)."""
    if x.shape[-3] == 0:
        return x.new_ones((*x.shape[:-3], x.shape[-2]), dtype=torch.float32)
    return _scales_of(_finite_magnitudes(x).amax((-3, -1)))


def _finite_magnitudes(x: Tensor) -> Tensor:
    return x.abs().masked_fill(~x.isfinite(), 0.0)


def _scales_of(largest: Tensor) -> Tensor:
    scale = _quotient(largest)
    return scale.masked_fill(scale == 0.0, 1.0)


def _powers_of(largest: Tensor) -> Tensor:
    """The same of e8m0: the next powers of two, from the least on."""
    bits = _quotient(largest).clamp(min=LEAST_POWER).view(torch.int32)
    return ((bits + 0x7FFFFF) >> 23).to(torch.uint8).view(E8M0)


def _quotient(largest: Tensor) -> Tensor:
    # By a tensor: by a number, torch multiplies with its reciprocal on CUDA, which rounds twice.
    return largest.float() / torch.full_like(largest, MAX_E4M3, dtype=torch.float32)


def add_scales(
    call: AttentionCall,
    names: Names,
    q_descale: Any,
    k_descale: Any,
    v_descale: Any,
    quantize: Any = None,
    out: Any = None,
    *,
    fp8_products: bool = False,
) -> None:
    """Gives a call over e4m3 its scales, and q of e4m3 a dtype of products, that of `out` where it
    has one: every number of e4m3 is one of that. With fp8_products q stays as it is, and its
    backend chooses. What only shapes tell, checks do.
    """
    if quantize is not None and (not isinstance(quantize, str) or quantize != TOKEN):
        raise ValueError(f"quantize: must be None or 'token', got {quantize!r}")
    tensors = {names.q: call.q, names.k: call.k, names.v: call.v}
    scales = {"q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale}
    refuse_forward_gradients(**tensors, **scales)
    _check_given(call, names, scales)
    if call.q.dtype is E4M3:
        dtype = getattr(out, "dtype", None)
        if fp8_products:
            call.out_is_half = dtype is torch.float16
        else:
            call.q = call.q.to(dtype if dtype in CUDA_DTYPES else torch.bfloat16)
    heads_k = call.k.shape[-2] if call.k.dim() > 1 else 1
    for name, scale in scales.items():
        if scale is not None:
            setattr(call, name, _as_tensor(name, scale, heads_k, call.q))
    if quantize is not None:
        call.quantizes_tokens = True


def _check_given(call: AttentionCall, names: Names, scales: dict[str, Any]) -> None:
    """Raise for what a call of products does not show: bytes, and a q of e4m3 or its scale."""
    if call.q.dtype is E4M3 and call.k.dtype is not E4M3:
        raise TypeError(f"{names.q}: must be of {E4M3} only where {names.k} is, got {call.k.dtype}")
    of = {"q_descale": names.q, "k_descale": names.k, "v_descale": names.v}
    for (name, scale), tensor in zip(scales.items(), (call.q, call.k, call.v), strict=True):
        check_tensor(of[name], tensor)
        if scale is not None and tensor.dtype is torch.uint8:
            raise TypeError(
                f"{of[name]}: must be of {E4M3} where {name} is given, as .view({E4M3}) is, "
                f"got {tensor.dtype}"
            )
    scale, dtype = scales["q_descale"], call.q.dtype
    if scale is None and dtype is E4M3:
        raise ValueError(f"q_descale: must be given where {names.q} is of {E4M3}, got None")
    if scale is not None and dtype is not E4M3:
        raise ValueError(
            f"q_descale: must be None where {names.q} is not of {E4M3} but of {dtype}, "
            f"got {'a tensor' if isinstance(scale, Tensor) else repr(scale)}"
        )


def _is_of_all(scale: Tensor) -> bool:
    """Whether it is one number, as checkpoints hold it; a scale for every token is no such."""
    return scale.dim() < 3 and scale.numel() == 1


def _as_tensor(name: str, scale: Any, heads_k: int, q: Tensor) -> Tensor:
    if isinstance(scale, Tensor):
        is_wanted = scale.requires_grad and torch.is_grad_enabled()
        if isinstance(scale, torch.nn.Parameter) and not is_wanted:
            scale = scale.detach()
        return scale.reshape(1).expand(heads_k) if _is_of_all(scale) else scale
    number = as_number(name, scale, "a number or a tensor")
    return torch.full((1,), number, dtype=torch.float32, device=q.device).expand(heads_k)
