"""Prints the rows of the kernel table: python -m build_tools.print_table."""

from __future__ import annotations

import sys

from build_tools import generate_units
from build_tools.kernel_table import ALL_ROWS
from flash_attn_cuda import build_info


def table_text() -> str:
    """All rows as ``python -m flash_attn_cuda --table`` prints those of a build."""
    records = (generate_units.row_record(row) for row in ALL_ROWS)
    return build_info.table_text([build_info.compiled_row(record) for record in records])


if __name__ == "__main__":
    sys.stdout.write(table_text() + "\n")


if __name__ == "__main__":
    sys.stdout.write(table_text() + "\n")
