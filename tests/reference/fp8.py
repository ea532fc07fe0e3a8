"""The reference for keys and values of FP8 (e4m3): what its numbers are, how they are rounded to
and scaled, and attention over a cache of them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from tests.reference.kvcache import CacheTensors, kvcache_reference, rotate_exactly
from tests.reference.options import PLAIN, AttentionOptions, AttentionResult
from tests.reference.parts import told_apart
from tests.reference.varlen import places_of

LARGEST = 448.0


def numbers() -> Tensor:
    """The 127 finite numbers of e4m3 that are not negative, in the order of their bytes, fp64: 4
    bits of exponent with a bias of 7, 3 of mantissa, subnormals below 2^-6.
    """
    exponent, mantissa = torch.arange(127).div(8, rounding_mode="floor"), torch.arange(127) % 8
    normal = torch.exp2(exponent.double() - 7) * (1 + mantissa.double() / 8)
    return torch.where(exponent == 0, mantissa.double() * 2.0**-9, normal)


@lru_cache
def _numbers_on(device: torch.device) -> tuple[Tensor, Tensor]:
    """The middles between numbers(), and the numbers of all 256 bytes."""
    table = numbers()
    half = torch.cat([table, torch.tensor([torch.nan], dtype=torch.float64)])
    return ((table[1:] + table[:-1]) / 2).to(device), torch.cat([half, -half]).to(device)


def to_bytes(x: Tensor) -> Tensor:
    """The bytes (uint8) of the numbers nearest to x, of which the even one in a tie; saturated. NaN
    is 0x7f of its sign.
    """
    middles, _ = _numbers_on(x.device)
    magnitude = x.double().abs().nan_to_num(0.0, posinf=LARGEST)
    below = torch.searchsorted(middles, magnitude.contiguous(), right=False)
    in_tie = (below < 126) & (middles[below.clamp(max=125)] == magnitude)
    code = torch.where(in_tie & (below % 2 == 1), below + 1, below)
    code = torch.where(x.isnan(), 127, code)
    return (code + 128 * torch.signbit(x)).to(torch.uint8)


def from_bytes(code: Tensor) -> Tensor:
    """Their numbers in fp64."""
    return _numbers_on(code.device)[1][code.int()]


def scaled_down(x: Tensor, scale: Tensor) -> Tensor:
    """x / scale in fp32, of fp64 in that, as it is rounded to e4m3; 0 where the scale is 0."""
    wide = x if x.dtype == torch.float64 else x.float()
    return torch.where(scale == 0.0, torch.zeros_like(scale), wide / scale)


def divided(x: Tensor, number: float) -> Tensor:
    """x / number, rounded once: on CUDA torch multiplies with the reciprocal of a Python number."""
    return x / torch.full_like(x, number)


def token_scales(x: Tensor) -> Tensor:
    """fp32 scales of rows: the largest finite magnitude of each over 448, 1 where that is 0."""
    largest = torch.where(x.isfinite(), x.abs(), torch.zeros_like(x)).amax(-1).float()
    return torch.where(largest == 0.0, torch.ones_like(largest), divided(largest, LARGEST))


def token_powers(x: Tensor) -> Tensor:
    """The same of e8m0, in fp32: the next power of two, at least 2^-13."""
    largest = torch.where(x.isfinite(), x.abs(), torch.zeros_like(x)).amax(-1).float()
    return torch.exp2(divided(largest, LARGEST).double().clamp(min=2.0**-13).log2().ceil()).float()


def to_powers(scale: Tensor) -> Tensor:
    """The bytes of e8m0 of powers of two, and of NaN."""
    return torch.where(scale.isnan(), 255, 127 + scale.double().log2()).to(torch.uint8)


def from_powers(code: Tensor) -> Tensor:
    """Their numbers in fp32."""
    return torch.exp2(code.double() - 127).masked_fill(code == 255, torch.nan).float()


@dataclass
class Fp8CacheResult:
    """expected, in fp64, and naive, in the dtype of q over caches dequantized to it, of
    kvcache_reference; what caches, of e4m3 as bytes, and scales, as fp32, hold afterwards; and the
    rows of k_cache's first two dimensions that were written.
    """

    expected: AttentionResult
    naive: AttentionResult
    k_cache: Tensor
    v_cache: Tensor
    k_descale: Tensor | None
    v_descale: Tensor
    appended: Tensor


def fp8_cache_reference(
    *,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    values_include_rope: bool = False,
    quantize: str | None = None,
    rotary_interleaved: bool = True,
    written: tuple[Tensor, Tensor, Tensor | None, Tensor] | None = None,
    options: AttentionOptions = PLAIN,
    attends: bool = True,
    **others: Any,
) -> Fp8CacheResult:
    """What flash_attn_with_kvcache computes over caches of e4m3; changes none of its arguments.

    Scales are (Hk,), (B, Hk), or one for each row of k_cache without its last dimension. With qv,
    k_cache is of q's dtype, without a scale, and rows of v_cache may have several scales, of as
    many columns each, or bytes of e8m0. values_include_rope: k's columns are values behind v's. q
    is of the dtype of products. New keys are rotated and rounded to their dtype, then quantized.
    `written`: caches and scales that are attended to instead of those that the reference writes,
    where a rotation in fp32 may have come out one number off. Without `attends` expected and naive
    stay empty. Other arguments are kvcache_reference's.
    """
    tensors, features = told_apart(CacheTensors, others)
    options = replace(options, **features)
    q, device = tensors.q, tensors.q.device
    tables = (tensors.rotary_cos, tensors.rotary_sin)
    caches = {"k": _stored(tensors.k_cache).clone(), "v": _stored(tensors.v_cache).clone()}
    are_powers = v_descale is not None and v_descale.dtype == torch.float8_e8m0fnu
    if v_descale is not None and are_powers:
        v_descale = from_powers(v_descale.view(torch.uint8))
    given_scales = {"k": k_descale, "v": v_descale}
    scales = {name: x.clone() for name, x in given_scales.items() if x is not None}
    appended = torch.zeros(tensors.k_cache.shape[:2], dtype=torch.bool, device=device)
    places, exact_q = [], torch.empty_like(q, dtype=torch.float64)
    sequences = list(tensors.sequences())
    lengths = [sequence.used + len(sequence.new_k) for sequence in sequences]
    longest = max(lengths, default=0)
    for sequence in sequences:
        new_k, new_v = sequence.new_k, sequence.new_v
        positions = sequence.used + torch.arange(len(new_k), device=device)
        places.append(_places(tensors, sequence.entry, longest))
        turned = rotate_exactly(new_k, *tables, positions, rotary_interleaved)
        where = tuple(x[sequence.used : lengths[sequence.index]] for x in places[-1])
        for name, new in (("k", turned), ("v", new_v)):
            if name not in scales:
                caches[name][where] = new
                continue
            if quantize == "token":
                groups = scales[name].shape[3:]
                of_groups = new.unflatten(-1, (*groups, -1)) if groups else new
                scales[name][where] = (token_powers if are_powers else token_scales)(of_groups)
            scale = _scale_of(scales[name], sequence.index, where, new.shape[-1])
            caches[name][where] = to_bytes(scaled_down(new, scale))
        appended[where] = True
        queries = q[sequence.queries].flatten(0, -3)
        positions = torch.full((len(queries),), sequence.used, device=device)
        if options.moves_with_queries or tensors.tree_mask is not None:
            positions += torch.arange(len(positions), device=device)
        own = rotate_exactly(queries, *tables, positions, rotary_interleaved).double()
        if q_descale is not None:
            of_heads = q_descale if q_descale.dim() == 1 else q_descale[sequence.index]
            group = q.shape[-2] // len(of_heads)
            own *= of_heads.double().repeat_interleave(group)[:, None]
        exact_q[sequence.queries] = own.view(q[sequence.queries].shape)

    # Every sequence has an entry of its own, as its scales may differ from those of others.
    dense = {}
    read, times = caches, scales
    if written is not None:
        read = {name: _stored(x) for name, x in zip("kv", written[:2], strict=True)}
        times = {name: x for name, x in zip("kv", written[2:], strict=True) if x is not None}
    for name, cache in read.items():
        parts = [cache.new_zeros(0, longest, *cache.shape[2:]).double()]
        for index, place in enumerate(places):
            part = cache[place]
            if name in times:
                scale = _scale_of(times[name], index, place, part.shape[-1])
                part = from_bytes(part) * scale.double()
            parts.append(part[None].double())
        dense[name] = torch.cat(parts)
    done = ("k", "v", "cu_seqlens_k_new", "rotary_cos", "rotary_sin")
    given = vars(tensors) | dict.fromkeys((*done, "cache_batch_idx", "block_table"))
    if values_include_rope:  # one product of all columns
        assert tensors.qv is not None
        exact_q = torch.cat([exact_q, tensors.qv.double()], -1)
        dense["k"], dense["v"] = (
            torch.cat([dense[x], dense[y]], -1) for x, y in (("k", "v"), ("v", "k"))
        )
        given["qv"] = None
    given |= {"q": exact_q, "k_cache": dense["k"], "v_cache": dense["v"], "options": options}
    given["cache_seqlens"] = torch.tensor(lengths, dtype=torch.int32, device=device)
    half = {name: given[name].to(q.dtype) for name in ("q", "k_cache", "v_cache")}
    wanted = (["expected"], ["naive"]) if attends else ([], [])
    expected = kvcache_reference(**given, wanted=wanted[0]).expected
    naive = kvcache_reference(**given | half, wanted=wanted[1]).naive
    return Fp8CacheResult(
        expected, naive, caches["k"], caches["v"], scales.get("k"), scales["v"], appended
    )


def _stored(x: Tensor) -> Tensor:
    """A cache, of e4m3 as bytes."""
    return x.view(torch.uint8) if x.dtype == torch.float8_e4m3fn else x


def _places(tensors: CacheTensors, entry: int, longest: int) -> tuple[Tensor, Tensor]:
    """First two indices into the cache of a sequence's first rows. Table entries that are no page
    become page 0: nothing of it is used.
    """
    rows = torch.arange(longest, device=tensors.q.device)
    page, row = places_of(rows, entry, tensors.k_cache.shape[1], tensors.block_table)
    return page.clamp(min=0), row


def _scale_of(scales: Tensor, index: int, where: tuple[Tensor, Tensor], columns: int) -> Tensor:
    """Broadcastable to (rows, Hk, columns)."""
    if scales.dim() == 4:
        return scales[where].repeat_interleave(columns // scales.shape[3], -1)
    if scales.dim() == 3:
        return scales[where][..., None]
    return (scales if scales.dim() == 1 else scales[index])[:, None]
