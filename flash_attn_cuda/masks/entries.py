"""Entries of key_lists that name no block of keys. They are skipped, and told unless they are -1:
by an error on the CPU, and on CUDA by check_device_errors, as kernels tell those that they meet.
"""

from __future__ import annotations

from types import ModuleType
from typing import NamedTuple, cast

import torch
from torch import Tensor

from ..call.fields import AttentionCall
from ..call.functorch import is_watched
from ..installed import build_info


class ListedRows(NamedTuple):
    """Whose lists they are: of rows (rows,), or of as many of each sequence, numbers of all."""

    keys: Tensor | int  # of the sequence
    sequence: Tensor | None = None  # None: each has as many rows
    attends: Tensor | None = None  # None: all do


def tell_strange_entries_of(call: AttentionCall, key_lists: Tensor, block: int) -> None:
    """Those of a call's sequences."""
    if not is_watched():
        packed = call.is_packed() and call.q.shape[0] > 0
        rows = _rows_of_packed(call) if packed else ListedRows(call.k.shape[1])
        tell_strange_entries(key_lists, block, rows)


def _rows_of_packed(call: AttentionCall) -> ListedRows:
    """What lengths say may be wrong, and is told elsewhere."""
    starts, device = call.cu_seqlens_q, call.q.device
    assert starts is not None and call.cu_seqlens_k is not None
    if starts.shape[0] == 1:  # no sequences
        return ListedRows(0, attends=torch.zeros(call.q.shape[0], dtype=torch.bool, device=device))
    queries = starts.diff() if call.seqused_q is None else call.seqused_q
    keys = call.cu_seqlens_k.diff() if call.seqused_k is None else call.seqused_k
    if call.leftpad_k is not None:
        keys = keys - call.leftpad_k
    row = torch.arange(call.q.shape[0], dtype=starts.dtype, device=device)
    found = torch.searchsorted(starts, row, right=True) - 1
    sequence = found.clamp(0, queries.shape[0] - 1)
    place = row - starts.index_select(0, sequence)
    attends = (place >= 0) & (place < queries.index_select(0, sequence))
    return ListedRows(keys.index_select(0, sequence), sequence, attends)


def tell_strange_entries(key_lists: Tensor, block: int, rows: ListedRows) -> None:
    """Raises for lists (..., heads, n) on the CPU, and notes an error on CUDA, without waiting.
    Compilers, transforms and modes of torch see nothing of it.
    """
    lists = key_lists.detach()
    if is_watched() or type(lists) is not Tensor or lists.is_meta or lists.numel() == 0:
        return
    lists_per_sequence, entries_per_row = lists.shape[-3], lists.shape[-2:].numel()
    lists = lists.reshape(-1, entries_per_row)
    blocks = torch.as_tensor(rows.keys, device=lists.device).add(block - 1).div(
        block, rounding_mode="floor"
    ).expand(lists.shape[0])  # fmt: skip
    is_strange = (lists < -1) | (lists >= blocks[:, None])
    if rows.attends is not None:
        is_strange &= rows.attends[:, None]
    first = is_strange.flatten().to(torch.uint8).argmax()
    row = first // entries_per_row
    sequence = row // lists_per_sequence if rows.sequence is None else rows.sequence.take(row)
    told = (is_strange.any(), sequence, lists.take(first), blocks.take(row) - 1)
    found = torch.stack([x.to(torch.int32) for x in told])
    if lists.is_cuda:
        if build_info.extension is not None:
            cast(ModuleType, build_info.extension).note_key_lists(found)
        return
    is_bad, index, entry, last = found.tolist()
    if is_bad:
        raise ValueError(
            f"key_lists: must be -1 or a block of the sequence's keys, of which {block} make one, "
            f"up to {last}, got {entry} in sequence {index}"
        )
