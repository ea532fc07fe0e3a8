"""Masks and biases as callers give them, made into what an AttentionCall has: lists and bits of a
BlockSparsity, a bias in four dimensions.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from ..call.checks import check_call, extent_of
from ..call.fields import AttentionCall
from ..call.masks import (
    PairExtent,
    check_attn_mask,
    check_blocks,
    check_key_lists,
    check_sparsity,
)
from ..call.tensors import as_index, check_place
from ..masks.lists import intersection
from ..masks.of_call import lists_without_repeats, mask_of_lists
from ..masks.sparsity import BlockSparsity, sparsity_of_pieces
from ..operators.dtensor_import import is_dtensor
from .arguments import cast_for_autocast, seqlen_bound
from .attend import may_be_differentiated

# Of calls whose lists kernels read (kernel_table/sm80.py). A query's heads fit a tile of the
# backward, of at least 32 rows, which has 64 or 32 keys of one block: of few most would be hidden.
_MOST_HEAD_DIM_OF_LISTS = 256
_MOST_HEADS_OF_LISTS = 32
_LEAST_BLOCK_OF_BACKWARD = 16


class KeyLists(NamedTuple):
    """Lists of blocks of keys, as a caller gave them."""

    lists: Any
    block: Any
    queries: Any


class Masks(NamedTuple):
    """What attends beyond windows, as a caller gave it."""

    attn_mask: Tensor | None
    block_mask: Any
    block_size: Any
    key_lists: KeyLists | None = None

    def are_given(self) -> bool:
        return not (self.attn_mask is self.block_mask is self.block_size is self.key_lists is None)

    def is_dense_mask(self) -> bool:  # no property: torch 2.10 does not compile those of a tuple
        return isinstance(self.attn_mask, Tensor) and self.attn_mask.dtype == torch.bool


def given_lists(key_lists: Any, block: Any, queries: Any) -> KeyLists | None:
    """Raises where there are no lists but numbers for them."""
    if key_lists is not None:
        return KeyLists(key_lists, block, queries)
    for name, number in (("key_list_block", block), ("key_list_queries", queries)):
        if number != 1:
            raise ValueError(f"key_lists: must be given with a {name} of {number}, got None")
    return None


def add_masks(
    call: AttentionCall, masks: Masks, max_seqlens: tuple[Any, Any], *, is_alone: bool
) -> None:
    """Sets lists, bits and bias of a call, whose other arguments are checked first, and the bounds
    of packed sequences, which may be those of the mask. is_alone: nothing that is added to the call
    later is over pairs.
    """
    if call.block_table is not None:
        for name in ("block_mask", "block_size", "key_lists"):
            if getattr(masks, name) is not None:
                raise NotImplementedError(f"{name}: must be None with a block_table")
        call.max_seqlen_q = _bound("max_seqlen_q", max_seqlens[0], masks, None, call.q)
        call.max_seqlen_k = _bound("max_seqlen_k", max_seqlens[1], masks, None, call.k)
        add_mask_in_place(call, masks.attn_mask)
        return
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
    if masks.key_lists is not None:
        is_alone = is_alone and masks.attn_mask is None
        sparsity = _with_lists(call, masks.key_lists, extent, sparsity, is_alone)
    if sparsity is not None:
        call.block_rows, call.block_columns = sparsity.rows, sparsity.columns
        call.mask_bits = sparsity.bits
        _as_shards(call, masks)
    if not masks.is_dense_mask():
        call.bias = _bias_of(masks.attn_mask, extent, call.q)


def add_mask_in_place(call: AttentionCall, attn_mask: Any) -> None:
    """Sets the bias of a call over a cache or pages, whose other arguments are checked first: of a
    bool mask, which is one bias a call, -inf where it hides.
    """
    if not call.over_cache:
        call.q, call.k, call.v = cast_for_autocast(call.q, call.k, call.v)
    check_call(call, is_padded=False)
    bias = _bias_of(attn_mask, extent_of(call), call.q)
    if bias is not None and bias.dtype == torch.bool:
        shown = torch.zeros((), dtype=call.q.dtype, device=bias.device)
        bias = torch.where(bias, shown, -torch.inf)
    call.bias = bias


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


def _with_lists(
    call: AttentionCall,
    given: KeyLists,
    extent: PairExtent,
    other: BlockSparsity | None,
    is_alone: bool,
) -> BlockSparsity | None:
    """What lists show, and another mask if there is one, whose lengths are the call's or, of packed
    sequences, more. None where the call has the lists themselves.
    """
    lists, heads_k = given.lists, call.heads_k()
    seqlen_q, seqlen_k = extent.seqlen_q, extent.seqlen_k
    if other is not None:
        seqlen_q, seqlen_k = other.seqlen_q, other.seqlen_k
    check_place("key_lists", lists, torch.int32, call.q)
    check_key_lists(lists, given.block, given.queries)
    if is_dtensor(lists) or is_dtensor(call.q):
        raise NotImplementedError("key_lists: must be no DTensor, nor q one, without a qv")
    if extent.is_packed and given.queries != 1:
        raise NotImplementedError(
            f"key_list_queries: must be 1 with cu_seqlens_q, got {given.queries}"
        )
    of_queries: tuple[int, ...] = (extent.batch, -(-seqlen_q // given.queries))
    if extent.is_packed:
        of_queries = (call.q.shape[0],)
    if tuple(lists.shape[:-1]) != (*of_queries, heads_k):
        shape = ", ".join(map(str, (*of_queries, heads_k, "n")))
        raise ValueError(
            f"key_lists: must have shape ({shape}), a list for {given.queries} of q's queries and "
            f"every head of k, got {tuple(lists.shape)}"
        )
    if other is None and is_alone and _have_kernels(call, lists, given):
        call.key_lists, call.key_list_block = lists_without_repeats(lists), int(given.block)
        return None
    made = mask_of_lists(call, lists, given.block, given.queries, (seqlen_q, seqlen_k))
    if other is None:
        return made
    pieces, bits = intersection((made.pieces(), made.bits), (other.pieces(), other.bits))
    bits = None if bits is None else bits.contiguous()
    return sparsity_of_pieces(pieces, bits, seqlen_q, seqlen_k)


def _have_kernels(call: AttentionCall, lists: Tensor, given: KeyLists) -> bool:
    """Whether kernels of a call with nothing else over pairs read lists as they are. Others read a
    mask.
    """
    rows, most = call.k.shape[:-2].numel(), torch.iinfo(torch.int32).max
    return (
        call.q.is_cuda
        and given.queries == 1
        and (given.block >= _LEAST_BLOCK_OF_BACKWARD or not may_be_differentiated(call))
        and call.dropout_p == 0.0
        and not (call.return_max_logits or call.has_fp8_values())
        and call.alibi_slopes is call.leftpad_k is None
        and max(call.head_dim(), call.head_dim_v()) <= _MOST_HEAD_DIM_OF_LISTS
        and call.heads_q() // call.heads_k() <= _MOST_HEADS_OF_LISTS
        and max(lists.numel(), rows * call.heads_k()) < most
    )


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
    """An attn_mask in four dimensions, a floating one of q's dtype or fp32."""
    if attn_mask is None:
        return None
    if isinstance(attn_mask, Tensor) and attn_mask.dtype not in (torch.float32, torch.bool):
        (attn_mask,) = cast_for_autocast(attn_mask)
    check_attn_mask(attn_mask, extent, q)
    return attn_mask[(None,) * (4 - attn_mask.dim())]


def integer_bound(name: str, max_seqlen: Any, of: str) -> int:
    """An integer max_seqlen, which the shape of a tensor `of` pairs has to fit."""
    if max_seqlen is None or isinstance(max_seqlen, Tensor):
        kind = type(max_seqlen).__name__
        raise TypeError(f"{name}: must be an integer with a tensor {of}, got {kind}")
    return as_index(name, max_seqlen)


def _bound(name: str, max_seqlen: Any, masks: Masks, of_mask: int | None, x: Tensor) -> int:
    """A bound of the lengths: an integer that was given, else what the mask was made for."""
    if max_seqlen is None or isinstance(max_seqlen, Tensor):
        for mask in ("attn_mask", "block_mask", "key_lists"):
            if isinstance(getattr(masks, mask), (Tensor, KeyLists)):
                integer_bound(name, max_seqlen, mask)
        if of_mask is not None:
            return of_mask
    return seqlen_bound(name, max_seqlen, x)
