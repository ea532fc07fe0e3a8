"""The kernel table: every attention kernel this package compiles, and all that is decided for it.

One entry for each family, pass and head dim: tile, stages, warps, registers and paths, then the
variants that it comes in and where they differ. csrc/flash_attn/config.h says what each field
means; kernels and planning read them from the row and decide nothing by a head dim of their own.
``python -m build_tools.report.print_table`` prints the rows that come of it.

Of the rows that cover a request the first one runs: see ``in_order`` below.
"""

from __future__ import annotations

from typing import Any

from kernel_table.row import BackwardRow, Entry, Family, Feature, ForwardRow, KernelRow, Kind
from kernel_table.sm80 import (
    SM80_BACKWARD,
    SM80_DECODE,
    SM80_FORWARD,
    SM80_HVP,
    SM80_JVP,
    SM80_LISTED_BACKWARD,
)
from kernel_table.sm90 import SM90_BACKWARD, SM90_FORWARD, SM90_JVP, SM90_LATENT

ENTRIES: tuple[Entry, ...] = (
    *SM90_FORWARD,
    *SM90_LATENT,
    *SM80_FORWARD,
    *SM80_DECODE,
    *SM90_BACKWARD,
    *SM80_BACKWARD,
    *SM80_LISTED_BACKWARD,
    *SM90_JVP,
    *SM80_JVP,
    *SM80_HVP,
)


def in_order(entries: tuple[Entry, ...], row_type: type[Any]) -> tuple[Any, ...]:
    """The rows of a pass as selection tries them: those of sm90 first, which are the faster ones
    where they run, and of a family those for lists and a bias last, so that no other call runs
    their code. Else as in the entries: smaller head dims, of values too, before larger ones, and
    the variants of each as they stand there.
    """

    def place(row: KernelRow) -> tuple[bool, bool, bool, bool]:
        is_decode = isinstance(row, ForwardRow) and row.kind is Kind.decode
        has_lists = Feature.block_sparse in row.features
        return (
            row.family is not Family.sm90,
            Feature.bias in row.features and not has_lists,
            has_lists,
            is_decode,
        )

    rows = [row for each in entries for row in each.rows() if isinstance(row, row_type)]
    return tuple(sorted(rows, key=place))


FORWARD_ROWS: tuple[ForwardRow, ...] = in_order(ENTRIES, ForwardRow)
BACKWARD_ROWS: tuple[BackwardRow, ...] = in_order(ENTRIES, BackwardRow)
ALL_ROWS: tuple[KernelRow, ...] = (*FORWARD_ROWS, *BACKWARD_ROWS)
