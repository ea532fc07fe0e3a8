"""What masks, biases and block masks must satisfy: of operators, and of the public functions.

As tensors.py: errors name argument, rule and value.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import rules
from .fields import ARGUMENTS, NAMES, OVER_PAIRS, AttentionCall, Names, sizes_of
from .functorch import is_mapped
from .interpret import check_holds, check_rules
from .pieces import PIECE
from .rules import tiles_of
from .tensors import as_index, check_device, check_dtype, check_place, check_tensor

LIST_BLOCKS = (1, 8, 16, 32, 64, 128)  # keys that an entry of key_lists stands for
LIST_QUERIES = (1, 64, 128)  # that have a list together


class PairExtent(NamedTuple):
    """The pairs of queries and keys of a call, which tensors over them must fit."""

    batch: int
    heads_q: int
    seqlen_q: int  # of packed sequences a bound, as seqlen_k
    seqlen_k: int
    is_packed: bool


class Size(NamedTuple):
    """The sizes that a dimension may have."""

    size: int
    or_one: bool
    or_more: bool

    def allows(self, given: int) -> bool:
        # Not `in`: where a compiler traces, that takes a symbol for another number than its value.
        if self.or_one and given == 1:
            return True
        return given >= self.size if self.or_more else given == self.size

    def __str__(self) -> str:
        or_more = " or more" if self.or_more else ""
        return f"{self.size}{or_more}" + (" or 1" if self.or_one and self.size != 1 else "")


def check_over_pairs(call: AttentionCall, extent: PairExtent, names: Names = NAMES) -> None:
    """Raise unless lists, bits and bias have the shapes that the declaration says, and are of one
    mask. Contents are never checked: whoever reads them drops what is out of range.
    """
    check_rules(rules.OF_LISTS, names, call)
    dtypes = {"int32": (torch.int32,), "q or fp32": (call.q.dtype, torch.float32)}
    for name in OVER_PAIRS:
        tensor, said = getattr(call, name), ARGUMENTS[name]
        if tensor is not None:
            check_place(name, tensor, dtypes[said.dtype], call.q)
            is_by_distance = call.bias_by_distance and said.by_distance != ""
            shape = said.by_distance if is_by_distance else said.shape
            _check_sizes(name, tensor, _sizes(shape, extent))
    if call.block_rows is not None:
        _check_one_mask(call.block_rows, call.block_columns)
    check_holds(rules.OF_PAIRS, names, call)


def _sizes(shape: str, extent: PairExtent) -> list[Size]:
    tiles_q, tiles_k = tiles_of(extent.seqlen_q), tiles_of(extent.seqlen_k)
    sizes: dict[Any, int] = {"B": extent.batch, "Hq": extent.heads_q}
    sizes |= {"Sq": extent.seqlen_q, "Sk": extent.seqlen_k, "Tq": tiles_q, "Tk": tiles_k}
    sizes |= {"2 + Tq": 2 + tiles_q, "2 + Tk": 2 + tiles_k, "4 * Tk": 4 * tiles_k}
    sizes |= {"Sq + Sk": extent.seqlen_q + extent.seqlen_k}
    return [
        Size(x, or_one=False, or_more=False)
        if isinstance(x, int)
        else Size(sizes[x.rstrip("?")], x.endswith("?"), extent.is_packed and index > 1)
        for index, x in enumerate(sizes_of(shape))
    ]


def _check_sizes(name: str, tensor: Tensor, sizes: list[Size]) -> None:
    if tensor.dim() != len(sizes) or not all(
        wanted.allows(given) for given, wanted in zip(tensor.shape, sizes, strict=True)
    ):
        shape = ", ".join(map(str, sizes))
        raise ValueError(f"{name}: must have shape ({shape}), got {tuple(tensor.shape)}")


def _check_one_mask(rows: Tensor, columns: Any) -> None:
    """Those of packed sequences may be larger, and then both are."""
    tiles_q, tiles_k = rows.shape[2], rows.shape[3] - 2
    expected = (*rows.shape[:2], tiles_k, tiles_q + 2)
    if tuple(columns.shape) != expected:
        raise ValueError(
            f"block_columns: must have shape {expected} as block_rows has {tuple(rows.shape)}, "
            f"got {tuple(columns.shape)}"
        )


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
        Size(most, or_one=True, or_more=False).allows(size)
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


def check_key_lists(key_lists: Tensor, block: Any, queries: Any) -> None:
    """Raise unless lists are int32 and of blocks and for queries of these numbers."""
    check_dtype("key_lists", key_lists.dtype, (torch.int32,))
    for name, number, allowed in (
        ("key_list_block", block, LIST_BLOCKS),
        ("key_list_queries", queries, LIST_QUERIES),
    ):
        if as_index(name, number) not in allowed:
            raise ValueError(f"{name}: must be one of {allowed}, got {number}")


def check_sparsity(sparsity: Any, name: str, extent: PairExtent, q: Tensor) -> None:
    """Raise unless a BlockSparsity is one of the pairs; `name`: what it was made of."""
    check_device(name, sparsity, q)
    for what, size, most in (
        ("batch", sparsity.batch, extent.batch),
        ("heads", sparsity.heads, extent.heads_q),
    ):
        if not Size(most, or_one=True, or_more=False).allows(size):
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
