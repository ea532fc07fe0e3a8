"""Masks and biases as callers give them, made into what an AttentionCall has: lists and bits of a
BlockSparsity, a bias in four dimensions.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from ..call.checks import check_call, extent_of
from ..call.fields import AttentionCall
from ..call.masks import PairExtent, check_attn_mask, check_blocks, check_sparsity
from ..masks.sparsity import BlockSparsity
from ..operators.dtensor_import import is_dtensor
from .arguments import cast_for_autocast, seqlen_bound


class Masks(NamedTuple):
    """What attends beyond windows, as a caller gave it."""

    attn_mask: Tensor | None
    block_mask: Any
    block_size: Any

    def are_given(self) -> bool:
        return not (self.attn_mask is None and self.block_mask is None and self.block_size is None)

    def is_dense_mask(self) -> bool:  # no property: torch 2.10 does not compile those of a tuple
        return isinstance(self.attn_mask, Tensor) and self.attn_mask.dtype == torch.bool


def add_masks(call: AttentionCall, masks: Masks, max_seqlens: tuple[Any, Any]) -> None:
    """Sets lists, bits and bias of a call, whose other arguments are checked first, and the bounds
    of packed sequences, which may be those of the mask.
    """
    if call.block_table is not None:
        for name in Masks._fields:
            if getattr(masks, name) is not None:
                raise NotImplementedError(f"{name}: must be None with a block_table")
    call.q, call.k, call.v = cast_for_autocast(call.q, call.k, call.v)
    sparsity = _given_sparsity(masks)
    if call.is_packed():
        most_q, most_k = (
            (None, None) if sparsity is None else (sparsity.seqlen_q, sparsity.seqlen_k)
        )
        call.max_seqlen_q = _bound("max_seqlen_q", max_seqlens[0], masks, most_q, call.q)
        call.max_seqlen_k = _bound("max_seqlen_k", max_seqlens[1], masks, most_k, call.k)
    check_call(call, is_padded=False)
    extent = extent_of(call)
    sparsity = _checked_sparsity(masks, sparsity, extent, call.q)
    if sparsity is not None:
        call.block_rows, call.block_columns = sparsity.rows, sparsity.columns
        call.mask_bits = sparsity.bits
        _as_shards(call, masks)
    if not masks.is_dense_mask():
        call.bias = _bias_of(masks.attn_mask, extent, call.q)


def _given_sparsity(masks: Masks) -> BlockSparsity | None:
    """A block_mask that knows its lengths, which are not checked; None for others."""
    block_mask = masks.block_mask
    if block_mask is not None and masks.is_dense_mask():
        raise ValueError(
            "attn_mask, block_mask: must not both be masks, got a bool attn_mask and a block_mask"
        )
    if isinstance(block_mask, Tensor):
        return None
    if masks.block_size is not None:
        raise ValueError(
            f"block_size: must be None without a block_mask of booleans, got {masks.block_size!r}"
        )
    if block_mask is None or isinstance(block_mask, BlockSparsity):
        return block_mask
    if hasattr(block_mask, "kv_num_blocks"):
        return BlockSparsity.from_block_mask(block_mask)
    raise TypeError(
        "block_mask: must be a BlockSparsity, a BlockMask of torch or a bool tensor, "
        f"got {type(block_mask).__name__}"
    )


def _checked_sparsity(
    masks: Masks, given: BlockSparsity | None, extent: PairExtent, q: Tensor
) -> BlockSparsity | None:
    """The mask of a call, whatever it was given as."""
    if given is None and isinstance(masks.block_mask, Tensor):
        check_blocks(masks.block_mask, masks.block_size, extent, q)
        size = tuple(masks.block_size)
        given = BlockSparsity.from_blocks(
            _local("block_mask", masks.block_mask),
            (size[0], size[1]),
            extent.seqlen_q,
            extent.seqlen_k,
        )
    if masks.is_dense_mask():
        check_attn_mask(masks.attn_mask, extent, q)
        assert masks.attn_mask is not None
        mask = _local("attn_mask", masks.attn_mask)
        return BlockSparsity.from_mask(mask, seqlen_q=extent.seqlen_q)
    if given is not None:
        check_sparsity(given, "block_mask", extent, q)
    return given


def _local(name: str, mask: Tensor) -> Tensor:
    """A mask of booleans, of a DTensor this rank's shard."""
    if not is_dtensor(mask):
        return mask
    from ..operators.dtensor_shards import local_mask

    return local_mask(name, cast(Any, mask))


def _as_shards(call: AttentionCall, masks: Masks) -> None:
    """What was made of a DTensor's shard is a DTensor again."""
    mask: Any = masks.attn_mask if masks.is_dense_mask() else masks.block_mask
    if is_dtensor(mask):
        from ..operators.dtensor_shards import like_mask

        for name in ("block_rows", "block_columns", "mask_bits"):
            setattr(call, name, like_mask(mask, getattr(call, name)))


def _bias_of(attn_mask: Any, extent: PairExtent, q: Tensor) -> Tensor | None:
    """A floating attn_mask in four dimensions."""
    if attn_mask is None:
        return None
    if isinstance(attn_mask, Tensor) and attn_mask.dtype != torch.float32:
        (attn_mask,) = cast_for_autocast(attn_mask)
    check_attn_mask(attn_mask, extent, q)
    return attn_mask[(None,) * (4 - attn_mask.dim())]


def _bound(name: str, max_seqlen: Any, masks: Masks, of_mask: int | None, x: Tensor) -> int:
    """A bound of the lengths: an integer that was given, else what the mask was made for."""
    if max_seqlen is None or isinstance(max_seqlen, Tensor):
        for mask in ("attn_mask", "block_mask"):
            if isinstance(getattr(masks, mask), Tensor):
                kind = type(max_seqlen).__name__
                raise TypeError(f"{name}: must be an integer with a tensor {mask}, got {kind}")
        if of_mask is not None:
            return of_mask
    return seqlen_bound(name, max_seqlen, x)
