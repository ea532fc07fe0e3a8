"""The reference for keys and values of FP8 (e4m3): what its numbers are, how they are rounded to
and scaled, and attention over a cache of them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tests.reference.kvcache import kvcache_reference, rotate
from tests.reference.parts import PLAIN, AttentionOptions, AttentionResult

LARGEST = 448.0


def numbers() -> Tensor:
    """The 127 finite numbers of e4m3 that are not negative, in the order of their bytes, fp64: 4
    bits of exponent with a bias of 7, 3 of mantissa, subnormals below 2^-6.
    """
    exponent, mantissa = torch.arange(127).div(8, rounding_mode="floor"), torch.arange(127) % 8
    normal = torch.exp2(exponent.double() - 7) * (1 + mantissa.double() / 8)
    return torch.where(exponent == 0, mantissa.double() * 2.0**-9, normal)


def to_bytes(x: Tensor) -> Tensor:
    """The bytes (uint8) of the numbers nearest to x, of which the even one in a tie; saturated. NaN
    is 0x7f of its sign.
    """
    table = numbers().to(x.device)
    middles = (table[1:] + table[:-1]) / 2
    magnitude = x.double().abs().nan_to_num(0.0, posinf=LARGEST)
    below = torch.searchsorted(middles, magnitude.contiguous(), right=False)
    in_tie = (below < 126) & (middles[below.clamp(max=125)] == magnitude)
    code = torch.where(in_tie & (below % 2 == 1), below + 1, below)
    code = torch.where(x.isnan(), 127, code)
    return (code + 128 * torch.signbit(x)).to(torch.uint8)


def from_bytes(code: Tensor) -> Tensor:
    """Their numbers in fp64."""
    table = torch.cat([numbers(), torch.tensor([torch.nan], dtype=torch.float64)]).to(code.device)
    magnitude = table[code.long() & 127]
    return torch.where(code > 127, -magnitude, magnitude)


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


@dataclass
class Fp8CacheResult:
    """expected, in fp64, and naive, in the dtype of q over caches dequantized to it, of
    kvcache_reference; what caches, of e4m3 as bytes, and scales hold afterwards; and the rows of
    k_cache's first two dimensions that were written.
    """

    expected: AttentionResult
    naive: AttentionResult
    k_cache: Tensor
    v_cache: Tensor
    k_descale: Tensor | None
    v_descale: Tensor
    appended: Tensor


def fp8_cache_reference(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    *,
    q_descale: Tensor | None = None,
    qv: Tensor | None = None,
    key_lists: Tensor | None = None,
    quantize: str | None = None,
    rotary_interleaved: bool = True,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    written: tuple[Tensor, Tensor, Tensor | None, Tensor] | None = None,
    options: AttentionOptions = PLAIN,
    **features: Any,
) -> Fp8CacheResult:
    """What flash_attn_with_kvcache computes over caches of e4m3; changes none of its arguments.

    Scales are (Hk,), (B, Hk), or one for each row of k_cache without its last dimension. With qv,
    k_cache is of q's dtype, without a scale, and rows of v_cache may have several scales, of as
    many columns each. q is of the dtype of products. New keys are rotated and rounded to their
    dtype, then quantized. `written`: caches and scales that are attended to instead of those that
    the reference writes, where a rotation in fp32 may have come out one number off. Other arguments
    are kvcache_reference's.
    """
    options = replace(options, **features)
    rows = k_cache.shape[1]
    batch = q.shape[0] if cu_seqlens_q is None else len(cu_seqlens_q) - 1
    capacity = rows * (1 if block_table is None else block_table.shape[1])
    used = [capacity] * batch if cache_seqlens is None else cache_seqlens.tolist()
    entries = list(range(batch)) if cache_batch_idx is None else cache_batch_idx.tolist()
    tables = (rotary_cos, rotary_sin)
    caches = {name: _stored(x).clone() for name, x in (("k", k_cache), ("v", v_cache))}
    given_scales = {"k": k_descale, "v": v_descale}
    scales = {name: x.clone() for name, x in given_scales.items() if x is not None}
    appended = torch.zeros(k_cache.shape[:2], dtype=torch.bool, device=q.device)
    places = [_places(range(capacity), e, rows, block_table, q.device) for e in entries]

    def of_sequence(index: int, bounds: Tensor | None) -> Any:
        return index if bounds is None else slice(*bounds[index : index + 2].tolist())

    new_bounds = cu_seqlens_q if cu_seqlens_k_new is None else cu_seqlens_k_new
    lengths = list(used)
    for index in range(batch if k is not None and v is not None else 0):
        at = of_sequence(index, new_bounds)
        steps = torch.arange(len(k[at]), device=q.device)
        positions = used[index] + steps
        turned = rotate(k[at].double(), *tables, positions, rotary_interleaved).to(k.dtype)
        where = tuple(x[positions] for x in places[index])
        for name, new in (("k", turned), ("v", v[at])):
            if name not in scales:
                caches[name][where] = new
                continue
            if quantize == "token":
                groups = scales[name].shape[3:]
                of_groups = new.unflatten(-1, (*groups, -1)) if groups else new
                scales[name][where] = token_scales(of_groups)
            scale = _scale_of(scales[name], index, where, new.shape[-1])
            caches[name][where] = to_bytes(scaled_down(new, scale))
        appended[where] = True
        lengths[index] += len(steps)

    turned_q = torch.empty_like(q)
    masked = options.causal or any(bound is not None and bound >= 0 for bound in options.window)
    exact_q = torch.empty_like(q, dtype=torch.float64)
    for index in range(batch):
        at = of_sequence(index, cu_seqlens_q)
        positions = torch.full((len(q[at]),), used[index], device=q.device)
        if masked:
            positions += torch.arange(len(positions), device=q.device)
        turned_q[at] = rotate(q[at].double(), *tables, positions, rotary_interleaved).to(q.dtype)
        exact_q[at] = turned_q[at].double()
        if q_descale is not None:
            of_heads = q_descale if q_descale.dim() == 1 else q_descale[index]
            group = q.shape[-2] // len(of_heads)
            exact_q[at] *= of_heads.double().repeat_interleave(group)[:, None]

    # Every sequence has an entry of its own, as its scales may differ from those of others.
    dense = {}
    read, times = caches, scales
    if written is not None:
        read = {name: _stored(x) for name, x in zip("kv", written[:2], strict=True)}
        times = {name: x for name, x in zip("kv", written[2:], strict=True) if x is not None}
    for name, cache in read.items():
        parts = [cache.new_zeros(0, capacity, *cache.shape[2:]).double()]
        for index in range(batch):
            part = cache[places[index]]
            if name in times:
                scale = _scale_of(times[name], index, places[index], part.shape[-1])
                part = from_bytes(part) * scale.double()
            parts.append(part[None].double())
        dense[name] = torch.cat(parts)
    lengths_now = torch.tensor(lengths, dtype=torch.int32, device=q.device)
    given = {"cache_seqlens": lengths_now, "cache_leftpad": cache_leftpad}
    given |= {"cu_seqlens_q": cu_seqlens_q, "options": options, "qv": qv}
    given["key_lists"] = key_lists
    expected = kvcache_reference(exact_q, dense["k"], dense["v"], **given).expected
    half = (x.to(q.dtype) for x in (exact_q, dense["k"], dense["v"]))
    naive = kvcache_reference(*half, **given).naive
    return Fp8CacheResult(
        expected, naive, caches["k"], caches["v"], scales.get("k"), scales["v"], appended
    )


def _stored(x: Tensor) -> Tensor:
    """A cache, of e4m3 as bytes."""
    return x.view(torch.uint8) if x.dtype == torch.float8_e4m3fn else x


def _places(
    positions: range, entry: int, rows: int, block_table: Tensor | None, device: Any
) -> tuple[Tensor, Tensor]:
    """First two indices into the cache of a sequence's rows. Table entries that are no page become
    page 0: nothing of it is used.
    """
    row = torch.arange(len(positions), device=device)
    if block_table is None:
        return torch.full_like(row, entry), row
    pages = block_table[entry].long()
    return pages[row // rows].clamp(min=0), row % rows


def _scale_of(scales: Tensor, index: int, where: tuple[Tensor, Tensor], columns: int) -> Tensor:
    """Broadcastable to (rows, Hk, columns)."""
    if scales.dim() == 4:
        return scales[where].repeat_interleave(columns // scales.shape[3], -1)
    if scales.dim() == 3:
        return scales[where][..., None]
    return (scales if scales.dim() == 1 else scales[index])[:, None]
