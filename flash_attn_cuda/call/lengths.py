"""Lengths and indices of packed sequences and caches: their form, and on the CPU their contents.

The form (type, dtype, shape, device) is checked on every device. Contents are checked where the
host holds them, on the CPU; on CUDA kernels do it (installed/device_errors.py).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .tensors import as_index

MOST_BOUND_WITH_ORIGIN = 2**29 - 1  # of a window; larger ones are none
MOST_FIRST = 2**30
ORIGIN_STEP = 16  # queries and keys that dropout decides about together


def check_splits(num_splits: Any, batch_invariant: Any = False) -> int:
    """Raise unless num_splits is an integer, which is returned, and batch_invariant is a bool."""
    if isinstance(num_splits, Tensor):  # an index too, but might have to be waited for
        raise TypeError(f"num_splits: must be an integer, got {type(num_splits).__name__}")
    splits = as_index("num_splits", num_splits)
    if not isinstance(batch_invariant, bool):
        kind = type(batch_invariant).__name__
        raise TypeError(f"batch_invariant: must be a bool, got {kind}")
    return splits


# -- contents, on the CPU ------------------------------------------------------------------------


def check_cu_seqlens_contents(
    name: str, cu_seqlens: Any, total: int | None, total_name: str
) -> Tensor:
    """Raise unless the entries start at 0, do not decrease and end within total; returns lengths.

    Rows behind the last sequence are nobody's: buffers of CUDA graphs are longer than a batch.
    """
    first = int(cu_seqlens[0])
    if first != 0:
        raise ValueError(f"{name}: must start at 0, got {first} at index 0")
    lengths = cu_seqlens.long().diff()
    if (index := _first_true(lengths < 0)) is not None:
        raise ValueError(
            f"{name}: must not decrease, got {int(cu_seqlens[index + 1])} at index {index + 1} "
            f"after {int(cu_seqlens[index])}"
        )
    last = int(cu_seqlens[-1])
    if total is not None and last > total:
        raise ValueError(
            f"{name}: must end within {total_name} ({total}), "
            f"got {last} at index {len(cu_seqlens) - 1}"
        )
    return lengths


def check_range(
    name: str, values: Tensor, low: int, high: Tensor | int, what: str | None = None
) -> None:
    """Raise unless low <= value <= high for every entry."""
    index = _first_true((values < low) | (values > high))
    if index is not None:
        bound = high if isinstance(high, int) else int(high[index])
        entry = f"{name}: {what}" if what else f"{name}:"
        raise ValueError(
            f"{entry} must be from {low} to {bound}, got {int(values[index])} at index {index}"
        )


def check_origin_contents(origin: Any) -> None:
    """Raise unless dropout can count from the places that an origin says."""
    places = origin[:, 1:3]
    is_place = (places >= 0) & (places <= MOST_FIRST) & (places % ORIGIN_STEP == 0)
    if (found := _first_true(~is_place.flatten())) is not None:
        index, which = divmod(found, 2)
        raise ValueError(
            f"origin: must have multiples of {ORIGIN_STEP}, from 0 to {MOST_FIRST}, as first_q and "
            f"first_k, got {int(places[index, which])} at index {index}"
        )


def check_bound(name: str, bound: int, lengths: Tensor) -> None:
    """Raise if a length exceeds its bound."""
    index = _first_true(lengths > bound)
    if index is not None:
        raise ValueError(
            f"{name}: must be at least the longest sequence, got {bound} for "
            f"{int(lengths[index])} rows of sequence {index}"
        )


def check_pages(
    table: Tensor, leftpad: Tensor | None, used: Tensor, pool: torch.Size | tuple[int, int]
) -> None:
    """Raise unless every entry of a block table that holds rows [leftpad, used) is a page of the
    pool (num_pages, page_size). Entries beyond may be anything.
    """
    num_pages, page_size = pool
    begin = torch.arange(table.shape[1]) * page_size
    needed = begin < used[:, None]
    if leftpad is not None:
        needed &= (begin + page_size > leftpad[:, None]) & (leftpad < used)[:, None]
    bad = needed & ((table < 0) | (table >= num_pages))
    where = _first_true(bad.flatten())
    if where is not None:
        row, page = divmod(where, table.shape[1])
        raise ValueError(
            f"block_table: must be a page of the pool, from 0 to {num_pages - 1}, "
            f"got {int(table[row, page])} at index ({row}, {page})"
        )


def _first_true(x: Tensor) -> int | None:
    """The index of the first true entry of one dimension, or None."""
    found = x.nonzero()
    return int(found[0, 0]) if found.numel() > 0 else None
