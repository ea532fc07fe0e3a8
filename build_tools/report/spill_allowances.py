"""Bytes that kernels may spill, by row of the kernel table; a row that is not named may not.

``python -m build_tools.report.resource_report --accept`` writes the file, of a build that holds
them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

FILE = Path(__file__).with_name("spill_allowances.json")


def load(file: Path = FILE) -> dict[str, int]:
    return json.loads(file.read_text())


def accept(measured: Mapping[str, int], rows: Iterable[str], file: Path = FILE) -> None:
    """Allows what was measured of some rows. The others of the table keep what they have, and what
    is no row of it goes.
    """
    allowed = {**load(file), **measured}
    kept = {name: allowed[name] for name in sorted(rows) if allowed.get(name)}
    file.write_text(json.dumps(kept, indent=1) + "\n")
