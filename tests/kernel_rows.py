"""What tests ask of a row of the kernel table."""

from __future__ import annotations

from build_tools.kernel_row import ForwardRow, KernelRow


def most_seqlen(row: KernelRow) -> tuple[int, int]:
    """Under a right bound and without; of a row that serves any call, more than there can be."""
    most = (row.most_causal_seqlen, row.most_full_seqlen) if isinstance(row, ForwardRow) else ()
    return most if any(most) else (1 << 31, 1 << 31)
