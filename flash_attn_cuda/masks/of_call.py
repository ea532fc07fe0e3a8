"""Lists of blocks of keys that each query of a call sees: as the call has them, and as a mask."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..call.checks import extent_of
from ..call.fields import AttentionCall
from .entries import tell_strange_entries_of
from .sparsity import BlockSparsity, sparsity_of_lists


def lists_without_repeats(key_lists: Tensor) -> Tensor:
    """The lists (..., n), ascending, with -1 for entries that stand twice, but for one."""
    ordered = key_lists.sort(-1).values
    last = ordered[..., 1:]
    return torch.cat([ordered[..., :1], last.masked_fill(last == ordered[..., :-1], -1)], -1)


def mask_of_lists(
    call: AttentionCall, key_lists: Tensor, block: int, queries: int, seqlens: tuple[int, int]
) -> BlockSparsity:
    """What lists show in a call whose sequences have at most so many queries and keys. Entries that
    are no blocks are told.
    """
    tell_strange_entries_of(call, key_lists, block)
    if call.is_packed():
        key_lists = _by_sequence(key_lists, call.cu_seqlens_q, seqlens[0])
    made = sparsity_of_lists(key_lists, (queries, block), *seqlens)
    group = call.heads_q() // call.heads_k()
    if group == 1 or made.heads == 1:
        return made
    rows, columns = (x.repeat_interleave(group, 1) for x in (made.rows, made.columns))
    bits = None if made.bits is None else made.bits.repeat_interleave(group, 1)
    return BlockSparsity(*seqlens, rows, columns, bits)


def by_mask(call: AttentionCall) -> AttentionCall:
    """The call with a mask instead of lists of blocks, if it has those."""
    if not call.lists_blocks():
        return call
    assert call.key_lists is not None
    extent = extent_of(call)
    seqlens = extent.seqlen_q, extent.seqlen_k
    made = mask_of_lists(call, call.key_lists, call.key_list_block, 1, seqlens)
    masks: dict[str, Any] = {
        "block_rows": made.rows,
        "block_columns": made.columns,
        "mask_bits": made.bits,
    }
    return replace(call, key_lists=None, key_list_block=1, **masks)


def _by_sequence(lists: Tensor, cu_seqlens_q: Any, seqlen_q: int) -> Tensor:
    """Lists (total_q, H, n) of packed queries as (batch, seqlen_q, H, n). Behind a sequence's own
    come others', whose queries are not there.
    """
    if lists.shape[0] == 0:
        lists = lists.new_full((1, *lists.shape[1:]), -1)
    row = cu_seqlens_q[:-1, None] + torch.arange(seqlen_q, device=lists.device)
    return lists[row.clamp(0, lists.shape[0] - 1)]
