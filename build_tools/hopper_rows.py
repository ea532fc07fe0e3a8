"""Which rows a Hopper GPU runs, whatever the call: all but those for GPUs of less shared memory.

A Hopper GPU has the shared memory of every row, and which sm80 kernel a call gets there is decided
by the order of the table alone (csrc/host/select_instance.cpp): a row runs nothing if an earlier
one of its family covers all that it covers. A build for Hopper alone is without such rows, and one
for other GPUs too compiles them for those others (archs.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from build_tools.kernel_row import Family, Feature, ForwardRow, KernelRow, Mask

WITHOUT_FP32_RESULTS = Feature.block_sparse | Feature.bias  # can_write_fp32 in flash_attn/config.h


def needed(table: Sequence[KernelRow]) -> frozenset[KernelRow]:
    """Of a table in the order of selection the rows that some call finds first on a Hopper GPU."""
    return frozenset(
        row
        for position, row in enumerate(table)
        if not any(takes_all_calls_of(earlier, row) for earlier in table[:position])
    )


def takes_all_calls_of(earlier: KernelRow, row: KernelRow) -> bool:
    """Whether a row that is tried before another serves every call that the other could, where
    there is shared memory for both. sm90 rows are not asked for tensors that do not suit them, and
    among themselves differ in more than is compared here: they count as needed.
    """
    return (
        earlier.family is row.family is Family.sm80
        and earlier.kernel is row.kernel
        and earlier.dtype is row.dtype
        and (earlier.mask is Mask.windowed or row.mask is Mask.full)
        and earlier.head_dim >= row.head_dim
        and earlier.value_dim >= row.value_dim
        and row.features in earlier.features
        and not (earlier.features ^ row.features) & Feature.e4m3_kv
        and (_writes_fp32(earlier) or not _writes_fp32(row))
        and _is_for_any_length(earlier)
    )


def _writes_fp32(row: KernelRow) -> bool:
    return not row.features & WITHOUT_FP32_RESULTS


def _is_for_any_length(row: KernelRow) -> bool:
    return not (isinstance(row, ForwardRow) and (row.most_causal_seqlen or row.most_full_seqlen))
