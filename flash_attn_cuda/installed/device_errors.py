"""What kernels found wrong in the contents of lengths and indices on a device.

The host does not see those contents without waiting for the device. Kernels clamp or skip a bad
entry, so that nothing outside a tensor is touched, and leave a record of the first one on the
device (csrc/flash_attn/device_errors.h). With FLASH_ATTN_CUDA_CHECK=1 in the environment every call
waits for its kernels and raises what they found; without, check_device_errors does so when asked.
"""

from __future__ import annotations

import torch

from . import build_info

_RULES = {
    "cu_seqlens_q": "must start at 0, not decrease and end within the rows of q",
    "cu_seqlens_k": "must start at 0, not decrease and end within the rows of k",
    "seqused_q": "must be from 0 to the sequence's length",
    "seqused_k": "must be from 0 to what the sequence or its cache holds",
    "leftpad_k": "must be from 0 to the sequence's length",
    "cache_batch_idx": "must be a batch entry of the cache",
    "block_table": "must be a page of the pool",
    "append_capacity": "cache_seqlens plus the new keys must fit the cache",
    "cu_seqlens_k_new": "must start at 0, not decrease and end within the rows of the new keys",
    "origin": "must have multiples of 16, from 0 to 2^30, as first_q and first_k",
    "key_lists": "must be a key of the sequence, or a block of its keys, or -1",
    "tree_mask": "must have a column for every query of a sequence",
    "rotary_position": "must be below the rows of rotary_cos",
}


def check_device_errors(device: torch.device | str | int | None = None) -> None:
    """Wait for `device` and raise if a kernel met a bad length or index since the last call.

    Args:
        device: a CUDA device, or None for the current one. Without a CUDA device, and for the CPU,
            where contents are checked in the call itself, there is nothing to find.

    Raises:
        ValueError: names the argument, the rule, the value and its index. The record is cleared,
            so the next call reports what came after.
    """
    index = _cuda_index(device)
    if index is None or build_info.extension is None:
        return
    found = build_info.extension.device_errors(index)
    if found is not None:
        raise ValueError(describe(*found))


def describe(check: str, index: int, value: int, limit: int) -> str:
    """The error's words: argument, rule, value, and the entry where it was found."""
    rule = _RULES.get(check, "must be in range")
    return f"{check}: {rule}, got {value} at index {index} (limit {limit})"


def _cuda_index(device: torch.device | str | int | None) -> int | None:
    """The index of a CUDA device; None where there is none."""
    if isinstance(device, int):
        return device
    given = torch.device("cuda" if device is None else device)
    if given.type != "cuda" or not torch.cuda.is_available():
        return None
    return torch.cuda.current_device() if given.index is None else given.index
