"""Rows of features.py: how they are made, judged by their targets, and shown."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.core.markdown import markdown_table
from benchmarks.core.metrics import Timing
from benchmarks.core.runner import Measurement, Status
from benchmarks.core.turns import describe_protocol

Row = dict[str, Any]

LOG_WIDTH = 150  # characters of a table that does not go to a terminal


@dataclass(frozen=True)
class Target:
    """What a figure of a row should reach: at least `limit`, or at most."""

    figure: str
    limit: float
    at_least: bool = True

    def judge(self, row: Row) -> Row:
        """As an entry of row["targets"]; `met` is None where there is no figure."""
        value = row[self.figure]
        met = None
        if value is not None:
            met = value >= self.limit if self.at_least else value <= self.limit
        return {"figure": self.figure, "limit": self.limit, "at_least": self.at_least, "met": met}


@dataclass(frozen=True)
class Column:
    header: str
    key: str
    show: Callable[[Any], str] = str


def timing_of(measurement: Measurement, timing: Timing | None = None) -> Row:
    """The part of a row that every benchmark has; `timing` instead of the measurement's own."""
    timing = timing or measurement.timing
    return {
        "status": measurement.status.value,
        "reason": measurement.reason,
        "median_ms": timing and timing.median_ms,
        "low_ms": timing and timing.low_ms,
        "high_ms": timing and timing.high_ms,
        "samples": timing and timing.samples,
        "sm_clock_mhz": measurement.power.sm_clock_mhz,
        "watts": measurement.power.watts,
    }


def quotient(value: float | None, reference: float | None) -> float | None:
    """value / reference where both were measured."""
    return None if value is None or reference is None else value / reference


def number(digits: int) -> Callable[[float], str]:
    """Shows this many digits, all of those before the point."""

    def show(value: float) -> str:
        before = len(str(int(abs(value))))
        return f"{value:.{max(0, digits - before)}f}"

    return show


def ratio(value: float) -> str:
    return f"{value:.2f}"


# Rendering

SPEEDS = ("tflops", "terabytes_per_second")
POWER_COLUMNS = (Column("MHz", "sm_clock_mhz", number(4)), Column("W", "watts", number(3)))


def with_power(columns: Sequence[Column], rows: Sequence[Row]) -> list[Column]:
    """With clock and power beside the speed, where any row has them."""
    read = [column for column in POWER_COLUMNS if any(row.get(column.key) for row in rows)]
    wide = []
    for column in columns:
        wide += [column, *read] if column.key in SPEEDS else [column]
    return wide


@dataclass(frozen=True)
class Cell:
    text: str
    met: bool | None = None  # whether the figure reaches its target, if it has one


def cells_of(row: Row, columns: Sequence[Column]) -> list[Cell]:
    targets = {target["figure"]: target for target in row["targets"]}
    cells = []
    for column in columns:
        value, target = row.get(column.key), targets.get(column.key)
        text = "" if value is None else column.show(value)
        if target is not None:
            sign = ">=" if target["at_least"] else "<="
            text = f"{text or '-'} ({sign} {column.show(target['limit'])})"
        cells.append(Cell(text, target and target["met"]))
    if row["status"] != Status.ok.value:
        cells[-1] = Cell(f"{row['status']}: {row['reason']}")
    return cells


def facts(document: Row) -> str:
    environment = document["environment"]
    of_run = (
        environment["device"],
        *how_made(document),
        f"torch {environment['torch']}",
        f"commit {(environment['commit'] or 'unknown')[:12]}",
    )
    return f"{', '.join(of_run)}: `{document['command']}`"


def how_made(document: Row) -> Iterator[str]:
    """How times were taken or simulated; nothing of a document without times."""
    if "simulated" in document:
        constants = (f"{name} {value:g}" for name, value in document["simulated"].items())
        yield f"simulated with {', '.join(constants)}"
    elif "protocol" in document:
        yield describe_protocol(document["protocol"])


def target_lines(document: Row) -> Iterator[str]:
    """How many targets were met, and each that was not."""
    judged = [(row, target) for row in document["results"] for target in row["targets"]]
    if "simulated" in document:
        return
    met = sum(1 for _, target in judged if target["met"])
    yield f"targets met: {met} of {len(judged)}"
    for row, target in judged:
        if not target["met"]:
            value = row[target["figure"]]
            text = "not measured" if value is None else f"{value:.3g}"
            limit = f"{'at least' if target['at_least'] else 'at most'} {target['limit']:.3g}"
            yield f"  {row['name']}: {target['figure']} {text}, target {limit}"


def markdown(document: Row, columns: Sequence[Column]) -> str:
    """A table with figures below their target in bold."""
    columns = with_power(columns, document["results"])
    lines = (
        [f"**{x.text}**" if x.met is False else x.text for x in cells_of(row, columns)]
        for row in document["results"]
    )
    words = [column.header for column in columns if column.show is str]
    table = markdown_table([column.header for column in columns], lines, words)
    return "\n".join([table, "", facts(document), "", *target_lines(document)])


def print_document(document: Row, columns: Sequence[Column]) -> None:
    """To the terminal, coloured where rich is installed."""
    try:
        from rich.box import SIMPLE_HEAD
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        print(markdown(document, columns))
        return
    columns = with_power(columns, document["results"])
    table = Table(title=document["benchmark"], box=SIMPLE_HEAD)
    for column in columns:
        table.add_column(column.header, justify="left" if column.show is str else "right")
    group = None
    for row in document["results"]:
        if group not in (None, row["group"]):
            table.add_section()
        group = row["group"]
        table.add_row(*(painted(cell) for cell in cells_of(row, columns)))
    console = Console()
    if not console.is_terminal:
        console = Console(width=LOG_WIDTH)
    console.print(table)
    console.print(facts(document), highlight=False, markup=False)
    for line in target_lines(document):
        console.print(line, highlight=False, markup=False)


def painted(cell: Cell) -> Any:
    from rich.text import Text

    styles = {None: "", True: "green", False: "bold red"}
    return Text(cell.text, style=styles[cell.met])


def failures(rows: Iterable[Row]) -> list[str]:
    """Names of rows that raised an error which is no statement about what is supported."""
    return [row["name"] for row in rows if row["status"] == Status.failed.value]
