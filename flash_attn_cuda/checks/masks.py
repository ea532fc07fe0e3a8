"""What masks, biases and block masks must satisfy: of operators, and of the public functions.

As tensors.py: errors name argument, rule and value.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..masks.lists import PIECE, tiles_of
from ..operators.support import is_mapped
from .tensors import check_device, check_pair, check_place, check_tensor


class PairExtent(NamedTuple):
    """The pairs of queries and keys of a call, which tensors over them must fit."""

    batch: int
    heads_q: int
    seqlen_q: int  # of packed sequences a bound, as seqlen_k
    seqlen_k: int
    is_packed: bool


def check_lists(rows: Any, columns: Any, bits: Any, extent: PairExtent, q: Tensor) -> None:
    """Raise unless these are the lists and bits of one mask over the pairs, or all None.

    Contents are never checked: whoever reads them drops what is out of range.
    """
    check_pair("block_rows", rows, "block_columns", columns)
    if rows is None:
        if bits is not None:
            raise ValueError("mask_bits: must be None without block_rows, got a tensor")
        return
    tiles_q, tiles_k = tiles_of(extent.seqlen_q), tiles_of(extent.seqlen_k)
    _check_list("block_rows", rows, (tiles_q, tiles_k + 2), extent, q)
    given_q, given_k = rows.shape[2], rows.shape[3] - 2
    expected = (*rows.shape[:2], given_k, given_q + 2)
    _check_list("block_columns", columns, (tiles_k, tiles_q + 2), extent, q)
    if tuple(columns.shape) != expected:
        raise ValueError(
            f"block_columns: must have shape {expected} as block_rows has {tuple(rows.shape)}, "
            f"got {tuple(columns.shape)}"
        )
    if bits is not None:
        _check_list("mask_bits", bits, (extent.seqlen_q, 4 * tiles_k), extent, q)
        if bits.shape[3] != 4 * given_k or tiles_of(bits.shape[2]) != given_q:
            raise ValueError(
                f"mask_bits: must have the rows and words of {given_q} x {given_k} tiles, "
                f"got shape {tuple(bits.shape)}"
            )


def check_bias(name: str, bias: Any, extent: PairExtent, q: Tensor) -> None:
    """Raise unless bias is None or (B|1, Hq|1, Sq|1, Sk), of packed sequences or larger, and of q's
    dtype or fp32.
    """
    if bias is None:
        return
    check_tensor(name, bias)
    check_device(name, bias, q)
    if bias.dtype not in (q.dtype, torch.float32):
        allowed = " or ".join(dict.fromkeys((str(q.dtype), str(torch.float32))))
        raise TypeError(f"{name}: dtype must be {allowed}, got {bias.dtype}")
    fits = bias.dim() == 4 and _is_shared_or(bias, extent)
    fits = fits and (bias.shape[2] == 1 or _fits(bias.shape[2], extent.seqlen_q, extent.is_packed))
    if not (fits and _fits(bias.shape[3], extent.seqlen_k, extent.is_packed)):
        raise ValueError(
            f"{name}: must have shape ({extent.batch} or 1, {extent.heads_q} or 1, "
            f"{extent.seqlen_q} or 1, {extent.seqlen_k}), got {tuple(bias.shape)}"
        )


def _check_list(
    name: str, tensor: Any, last: tuple[int, int], extent: PairExtent, q: Tensor
) -> None:
    check_place(name, tensor, torch.int32, q)
    if not (
        tensor.dim() == 4
        and _is_shared_or(tensor, extent)
        and all(
            _fits(size, wanted, extent.is_packed)
            for size, wanted in zip(tensor.shape[2:], last, strict=True)
        )
    ):
        or_more = " or more" if extent.is_packed else ""
        raise ValueError(
            f"{name}: must have shape ({extent.batch} or 1, {extent.heads_q} or 1, "
            f"{last[0]}{or_more}, {last[1]}{or_more}), got {tuple(tensor.shape)}"
        )


def _is_shared_or(tensor: Tensor, extent: PairExtent) -> bool:
    """Whether batch and heads are those of the call, or 1 for all of them."""
    batch, heads = tensor.shape[:2]
    return _is_one_or(batch, extent.batch) and _is_one_or(heads, extent.heads_q)


def _is_one_or(size: int, wanted: int) -> bool:
    """Not `in`: where a compiler traces, that takes a symbol for another number than its value."""
    return size == 1 or size == wanted


def _fits(size: int, wanted: int, or_more: bool) -> bool:
    return size >= wanted if or_more else size == wanted


# -- the public functions ------------------------------------------------------------------------


def check_attn_mask(attn_mask: Any, extent: PairExtent, q: Tensor) -> None:
    """Raise unless attn_mask is bool or floating and broadcasts over the pairs' batch, heads and
    rows.
    """
    check_tensor("attn_mask", attn_mask)
    check_device("attn_mask", attn_mask, q)
    if attn_mask.dtype not in (torch.bool, q.dtype, torch.float32):
        allowed = ", ".join(dict.fromkeys(map(str, (torch.bool, q.dtype, torch.float32))))
        raise TypeError(f"attn_mask: dtype must be one of {allowed}, got {attn_mask.dtype}")
    if attn_mask.dtype == torch.bool and is_mapped(attn_mask):
        raise NotImplementedError(
            "attn_mask: under torch.vmap must be floating or one mask for all entries, got bool "
            f"ones of shape {tuple(attn_mask.shape)} for each entry"
        )
    wanted = (extent.batch, extent.heads_q, extent.seqlen_q)
    shape = tuple(attn_mask.shape)
    fits = 2 <= len(shape) <= 4 and shape[-1] == extent.seqlen_k
    if not fits or not all(
        _is_one_or(size, most)
        for size, most in zip(reversed(shape[:-1]), reversed(wanted), strict=False)
    ):
        raise ValueError(
            f"attn_mask: must have 2 to 4 dimensions that broadcast to (batch, heads_q, seqlen_q) "
            f"{wanted} and end in seqlen_k {extent.seqlen_k}, got shape {shape}"
        )


def check_blocks(block_mask: Tensor, block_size: Any, extent: PairExtent, q: Tensor) -> None:
    """Raise unless block_mask is bool with a value for every block of block_size."""
    check_place("block_mask", block_mask, torch.bool, q)
    check_block_size(block_size)
    wanted = tuple(
        -(-seqlen // size)
        for seqlen, size in zip((extent.seqlen_q, extent.seqlen_k), block_size, strict=True)
    )
    shape = tuple(block_mask.shape)
    if not 2 <= len(shape) <= 4 or shape[-2:] != wanted:
        raise ValueError(
            f"block_mask: must have 2 to 4 dimensions that end in {wanted}, the blocks of "
            f"{tuple(block_size)} of {extent.seqlen_q} queries and {extent.seqlen_k} keys, "
            f"got shape {shape}"
        )


def check_block_size(block_size: Any) -> None:
    """Raise unless block_size is two multiples of 64."""
    if block_size is None:
        raise ValueError("block_size: must be given with a block_mask of booleans, got None")
    if not isinstance(block_size, (tuple, list)) or len(block_size) != 2:
        raise TypeError(f"block_size: must be two integers, got {block_size!r}")
    for size in block_size:
        if isinstance(size, bool) or not isinstance(size, int):
            raise TypeError(f"block_size: must be two integers, got {block_size!r}")
        if size < 1 or size % PIECE != 0:
            raise ValueError(f"block_size: must be positive multiples of {PIECE}, got {block_size}")


def check_sparsity(sparsity: Any, name: str, extent: PairExtent, q: Tensor) -> None:
    """Raise unless a BlockSparsity is one of the pairs; `name`: what it was made of."""
    check_device(name, sparsity, q)
    for what, size, most in (
        ("batch", sparsity.batch, extent.batch),
        ("heads", sparsity.heads, extent.heads_q),
    ):
        if not _is_one_or(size, most):
            raise ValueError(f"{name}: {what} must be 1 or that of q ({most}), got {size}")
    for what, bound, size, wanted in (
        ("queries", "max_seqlen_q", sparsity.seqlen_q, extent.seqlen_q),
        ("keys", "max_seqlen_k", sparsity.seqlen_k, extent.seqlen_k),
    ):
        if extent.is_packed and size < wanted:
            raise ValueError(f"{name}: must have at least {bound} ({wanted}) {what}, got {size}")
        if not extent.is_packed and size != wanted:
            raise ValueError(
                f"{name}: must have as many {what} as {what[0]} ({wanted}), got {size}"
            )
