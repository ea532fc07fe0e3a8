"""Prints the rows of the kernel table: python -m build_tools.report.print_table."""

from __future__ import annotations

import sys

from build_tools.generate import kernel_units
from flash_attn_cuda.installed import build_info
from kernel_table.all_rows import ALL_ROWS


def table_text() -> str:
    """All rows as ``python -m flash_attn_cuda --table`` prints those of a build."""
    records = (kernel_units.row_record(row) for row in ALL_ROWS)
    return build_info.table_text([build_info.compiled_row(record) for record in records])


if __name__ == "__main__":
    sys.stdout.write(table_text() + "\n")
