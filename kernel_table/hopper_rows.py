"""Which rows a Hopper GPU runs, and which of them a build for Hopper alone has.

A Hopper GPU has the shared memory of every row, and which sm80 kernel a call gets there is decided
by the order of the table alone (csrc/host/select_instance.cpp). A row runs nothing if an earlier
one of its family covers all that it covers: builds for other GPUs too compile such rows for those
others (build_tools/compile/archs.py).

What the sm80 family serves on a Hopper GPU at all is what TMA cannot address and rare mixes. So a
build for Hopper alone is also without the rows that another one stands for, which has their tile
and more features, but for the plain backward (docs/kernels.md has what it costs). A build for other
GPUs too has all of them, and calls find the row with fewer features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kernel_table.row import Family, Feature, ForwardRow, KernelRow, Mask, Pass

_OF_CALLS_OF_THEIR_OWN = Feature.e4m3_kv | Feature.latent | Feature.key_lists


def found(table: Sequence[KernelRow]) -> frozenset[KernelRow]:
    """Of a table in the order of selection the rows that some call finds first on a Hopper GPU."""
    return frozenset(
        row
        for position, row in enumerate(table)
        if not any(takes_all_calls_of(earlier, row) for earlier in table[:position])
    )


def needed(table: Sequence[KernelRow]) -> frozenset[KernelRow]:
    """Of those the rows that a build for Hopper alone has: each call finds one of them first."""
    rows = found(table)
    return frozenset(row for row in rows if not any(stands_for(other, row) for other in rows))


def stands_for(other: KernelRow, row: KernelRow) -> bool:
    """Whether another row serves every call of a row in the same tiles: it has more features, and
    differs in nothing else.
    """
    is_plain_backward = row.kernel_pass is Pass.backward and not row.variant
    return (
        not is_plain_backward
        and takes_all_calls_of(other, row)
        and other.features != row.features
        and replace(row, features=other.features, variant=other.variant) == other
    )


def takes_all_calls_of(other: KernelRow, row: KernelRow) -> bool:
    """Whether a row serves every call that another could, where there is shared memory for both.
    sm90 rows are not asked for tensors that do not suit them, and among themselves differ in more
    than is compared here: they count as needed.
    """
    return (
        other.family is row.family is Family.sm80
        and other.kernel is row.kernel
        and other.dtype is row.dtype
        and (other.mask is Mask.windowed or row.mask is Mask.full)
        and other.head_dim >= row.head_dim
        and other.value_dim >= row.value_dim
        and row.features in other.features
        and not (other.features ^ row.features) & _OF_CALLS_OF_THEIR_OWN
        and (other.writes_fp32 or not row.writes_fp32)
        and _is_for_any_length(other)
    )


def _is_for_any_length(row: KernelRow) -> bool:
    return not (isinstance(row, ForwardRow) and (row.most_causal_seqlen or row.most_full_seqlen))
