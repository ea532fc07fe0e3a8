"""Rows of a latent cache in FP8: a token's latent numbers of e4m3, their scales and its rotary
columns in 16 bits, all in one row of bytes, or the scales behind the rows of a page.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .fp8 import to_e4m3, token_scales
from .tensors import (
    CPU_DTYPES,
    CUDA_DTYPES,
    E4M3,
    E8M0,
    check_device,
    check_dtype,
    check_tensor,
    refuse_gradients,
)

_BYTES = (torch.uint8, torch.int8, E4M3)
_STORED = "as numbers that are rounded have none"


@dataclass(frozen=True)
class LatentFormat:
    """Where the parts of a row are, in bytes, and how many columns they have. The default is
    DeepSeek V3.2's row of 656 bytes: 512 latent numbers, a scale for each 128 of them, 64 rotary
    columns. LatentFormat.DEEPSEEK_V4 has 584 bytes a token: 448 latent numbers and 64 rotary
    columns, and behind the rows of a page 8 bytes of each, a power of two for 64 numbers each.
    """

    DEEPSEEK_V4: ClassVar[LatentFormat]

    latent_dim: int = 512
    rotary_dim: int = 64
    group: int = 128  # latent columns that share a scale
    scale_dtype: torch.dtype = torch.float32  # or float8_e8m0fnu, powers of two
    latent_offset: int = 0
    scale_offset: int = 512
    rotary_offset: int = 528
    row_bytes: int = 656  # of a token
    # Those of them that lie behind the rows of a page, where scale_offset counts; 0: none.
    page_scale_bytes: int = 0


V32_ROWS = LatentFormat()
LatentFormat.DEEPSEEK_V4 = LatentFormat(
    *(448, 64, 64, E8M0),
    scale_offset=0,
    rotary_offset=448,
    row_bytes=584,
    page_scale_bytes=8,
)


def latent_views(
    cache: Tensor, row_format: LatentFormat = V32_ROWS, dtype: torch.dtype = torch.bfloat16
) -> tuple[Tensor, Tensor, Tensor]:
    """What flash_attn_with_kvcache takes of a cache of such rows, without a copy.

    Args:
        cache: (num_pages, page_size, row_bytes), (batch_cache, capacity, row_bytes), or of either
            (.., heads_k, row_bytes); uint8, int8 or float8_e4m3fn. Rows may lie anywhere at
            multiples of 16 bytes. With page_scale_bytes a page, or entry, is contiguous.
        row_format: what a row is.
        dtype: of the rotary columns, that of queries: bf16 or fp16.

    Returns:
        (k_cache, v_cache, v_descale): (.., heads_k, rotary_dim) of `dtype`, (.., heads_k,
        latent_dim) of float8_e4m3fn, (.., heads_k, latent_dim / group) of scale_dtype.

    Raises:
        TypeError, ValueError: naming the argument.
    """
    check_tensor("cache", cache)
    check_dtype("cache", cache.dtype, _BYTES)
    check_dtype("dtype", dtype, CUDA_DTYPES)
    if cache.dim() not in (3, 4) or cache.shape[-1] != row_format.row_bytes:
        raise ValueError(
            f"cache: must have shape (num_pages, page_size, {row_format.row_bytes}) or (num_pages, "
            f"page_size, heads_k, {row_format.row_bytes}), got {tuple(cache.shape)}"
        )
    rows = cache.unsqueeze(2) if cache.dim() == 3 else cache
    if row_format.page_scale_bytes == 0:
        return _parts(rows, row_format, dtype)
    if not rows[:1].is_contiguous():
        raise ValueError(
            f"cache: pages must be contiguous, as scales lie behind their rows, got shape "
            f"{tuple(cache.shape)} and strides {cache.stride()}"
        )
    k, v, v_descale = _parts(rows.flatten(1, 2), row_format, dtype)
    page = rows.shape[1:3]
    return k.unflatten(1, page), v.unflatten(1, page), v_descale.unflatten(1, page)


def quantize_latent(latent: Tensor, rotary: Tensor, row_format: LatentFormat = V32_ROWS) -> Tensor:
    """Rows of bytes of a latent cache that is there already; an append makes those of new tokens
    itself. Scales and numbers are made as in quantize_kv, a scale for each group of a token's
    columns. Of float8_e8m0fnu it is the next power of two, at least 2^-13. Without gradients.

    Args:
        latent: (.., latent_dim), with page_scale_bytes (.., page_size, latent_dim): fp16, bf16,
            fp32 or fp64.
        rotary: (.., rotary_dim) with the same dimensions before: fp16 or bf16, kept as it is.
        row_format: what a row is.

    Returns:
        (.., row_bytes), uint8; bytes of no part are 0.

    Raises:
        TypeError, ValueError: naming the argument. NotImplementedError: latent or rotary requires
        grad while gradients are enabled, or carries a forward-mode gradient; scale_dtype is neither
        fp32 nor float8_e8m0fnu.
    """
    refuse_gradients(_STORED, latent=latent, rotary=rotary)
    check_tensor("latent", latent)
    check_tensor("rotary", rotary)
    check_dtype("latent", latent.dtype, CPU_DTYPES)
    check_dtype("rotary", rotary.dtype, CUDA_DTYPES)
    check_device("rotary", rotary, latent, "latent")
    if row_format.scale_dtype not in (torch.float32, E8M0):
        raise NotImplementedError(
            f"row_format: scale_dtype must be torch.float32 or {E8M0}, got {row_format.scale_dtype}"
        )
    least_dims = 1 if row_format.page_scale_bytes == 0 else 2
    if latent.dim() < least_dims or latent.shape[-1] != row_format.latent_dim:
        raise ValueError(
            f"latent: last dimension must be {row_format.latent_dim}, got {tuple(latent.shape)}"
        )
    wanted = (*latent.shape[:-1], row_format.rotary_dim)
    if tuple(rotary.shape) != wanted:
        raise ValueError(f"rotary: must have shape {wanted}, got {tuple(rotary.shape)}")
    groups = latent.unflatten(-1, (-1, row_format.group))
    scale = token_scales(groups, row_format.scale_dtype)
    rows = latent.new_zeros((*wanted[:-1], row_format.row_bytes), dtype=torch.uint8)
    k, v, v_descale = _parts(rows, row_format, rotary.dtype)
    k.copy_(rotary)
    v_descale.copy_(scale)
    v.view(torch.uint8).copy_(to_e4m3(groups, scale[..., None]).flatten(-2).view(torch.uint8))
    return rows


def _parts(
    rows: Tensor, row_format: LatentFormat, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Rotary columns, latent numbers and scales as views of rows of bytes (.., row_bytes), with
    page_scale_bytes of contiguous pages (.., page_size, row_bytes).
    """

    def part(rows: Tensor, offset: int, count: int, of: torch.dtype) -> Tensor:
        return rows[..., offset : offset + count * of.itemsize].view(of)

    of_scales = rows
    if row_format.page_scale_bytes > 0:
        tokens, page = rows.shape[-2], rows.flatten(-2)
        sizes = row_format.row_bytes - row_format.page_scale_bytes, row_format.page_scale_bytes
        parts = page.split([tokens * size for size in sizes], -1)
        rows, of_scales = (
            x.unflatten(-1, (tokens, size)) for x, size in zip(parts, sizes, strict=True)
        )
    scales = row_format.latent_dim // row_format.group
    return (
        part(rows, row_format.rotary_offset, row_format.rotary_dim, dtype),
        part(rows, row_format.latent_offset, row_format.latent_dim, E4M3),
        part(of_scales, row_format.scale_offset, scales, row_format.scale_dtype),
    )
