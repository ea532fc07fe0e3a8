"""The files in benchmarks/results, and figures of them as cells of a table in Markdown."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path

from benchmarks.core.grid_tables import Row
from benchmarks.core.markdown import markdown_table
from benchmarks.core.metrics import geometric_mean
from benchmarks.core.turns import TURN_MS, describe_protocol

RESULTS = Path(__file__).resolve().parents[1] / "results"

CARDS = {"h200": "H200", "h100": "H100"}
PASSES = ("forward", "backward")


def all_files() -> list[Path]:
    return sorted(RESULTS.glob("h*.*"))


@cache
def load(name: str) -> Row:
    return json.loads((RESULTS / f"{name}.json").read_text())


def rows_of(name: str, which: str | None = None, **wanted: object) -> list[Row]:
    """The rows of a pass, or of both, that have these values."""
    rows = [row for row in load(name)["results"] if which in (None, row.get("pass"))]
    return [row for row in rows if all(row[key] == value for key, value in wanted.items())]


def only(name: str, **wanted: object) -> Row:
    (row,) = rows_of(name, **wanted)
    return row


def commit_of(name: str) -> str:
    return load(name)["environment"]["commit"][:7]


def source(*names: str) -> str:
    """A line under a table: its files, their commits, and turns of another length than most."""
    return f"{', '.join(map(with_origin, names))}."


def with_origin(name: str) -> str:
    protocol = load(name).get("protocol", {"turn_ms": TURN_MS})
    turns = "" if protocol["turn_ms"] == TURN_MS else f", {describe_protocol(protocol)}"
    return f"`{name}.json` ({commit_of(name)}{turns})"


# -- cells and tables ------------------------------------------------------------------------------


def ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def ratios(values: Iterable[float | None], between: str = ", ") -> str:
    """0.91, 0.92; nothing where there is none at all."""
    texts = [ratio(value) for value in values]
    return between.join(texts) if any(texts) else ""


def mean_and_lowest(values: Iterable[float]) -> str:
    """1.11 (0.97): the geometric mean and the lowest."""
    values = list(values)
    return f"{geometric_mean(values):.2f} ({min(values):.2f})" if values else ""


def least_to_most(values: Iterable[float], digits: int = 2) -> str:
    values = list(values)
    return f"{min(values):.{digits}f} to {max(values):.{digits}f}"


def table(header: Sequence[str], lines: Iterable[Sequence[str]], *names: str) -> str:
    """Markdown, and the line that says which files it is of."""
    return f"{markdown_table(header, lines)}\n\n{source(*names)}"


def of_cards(suite: str) -> list[str]:
    return [f"{card}_{suite}" for card in CARDS]


def thousands(length: int) -> str:
    return f"{length // 1024}k" if length % 1024 == 0 else str(length)
