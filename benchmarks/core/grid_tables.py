"""Ratios of grid.py's results, and their tables."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.core.markdown import markdown_table
from benchmarks.core.metrics import geometric_mean
from benchmarks.core.turns import describe_protocol

OURS = "ours"
Row = dict[str, Any]


def add_ratios(rows: Sequence[Row], baseline: str) -> None:
    """Sets each row's ratio: the baseline's time over its own, above 1 is faster."""
    times = {
        (row["case"], row["pass"]): row["median_ms"] for row in rows if row["backend"] == baseline
    }
    for row in rows:
        reference = times.get((row["case"], row["pass"]))
        if reference is not None and row["median_ms"] is not None:
            row["ratio"] = reference / row["median_ms"]


def summarise(rows: Sequence[Row], baseline: str) -> list[Row]:
    """Geometric mean and minimum of the ratios, for each pass and backend but the baseline."""
    groups: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in rows:
        if row["ratio"] is not None and row["backend"] != baseline:
            groups[row["pass"], row["backend"]].append(row)
    summary = []
    for (which, backend), members in groups.items():
        slowest = min(members, key=lambda row: row["ratio"])
        summary.append(
            {
                "pass": which,
                "backend": backend,
                "baseline": baseline,
                "cells": len(members),
                "geomean_ratio": geometric_mean(row["ratio"] for row in members),
                "minimum_ratio": slowest["ratio"],
                "minimum_case": slowest["case"],
            }
        )
    return summary


def against_peers(document: Row) -> list[Row]:
    """The summary of ours over each other backend, whatever the baseline."""
    rows = document["results"]
    summary = []
    for peer in dict.fromkeys(row["backend"] for row in rows if row["backend"] != OURS):
        pair = [row | {"ratio": None} for row in rows if row["backend"] in (OURS, peer)]
        add_ratios(pair, peer)
        summary += summarise(pair, peer)
    return summary


def summary_lines(document: Row) -> list[str]:
    """Every backend over the baseline, then ours over its other peers."""
    others = (e for e in against_peers(document) if e["baseline"] != document["baseline"])
    return [
        f"{entry['pass']}: {entry['backend']} / {entry['baseline']} geomean "
        f"{entry['geomean_ratio']:.3f}, minimum {entry['minimum_ratio']:.3f} "
        f"({entry['minimum_case']}), {entry['cells']} cells"
        for entry in (*document["summary"], *others)
    ]


def head_dims_of(row: Row) -> str:
    """128, or 192x128 where values have another head dim."""
    of_values = row["head_dim_v"]
    return (
        f"{row['head_dim']}" if of_values == row["head_dim"] else f"{row['head_dim']}x{of_values}"
    )


def table_rows(document: Row) -> tuple[list[int], dict[tuple, dict[int, Row]]]:
    """Sequence lengths, and rows by length for each (pass, dtype, head dims, mask, backend)."""
    lines: dict[tuple, dict[int, Row]] = defaultdict(dict)
    for row in document["results"]:
        if row["tflops"] is not None:
            mask = "causal" if row["causal"] else "full"
            key = (row["pass"], row["dtype"], head_dims_of(row), mask, row["backend"])
            lines[key][row["seqlen_q"]] = row
    lengths = sorted({length for values in lines.values() for length in values})

    def place(key: tuple) -> tuple:
        head_dims = tuple(map(int, key[2].split("x")))
        return key[0] != "forward", key[1], head_dims, key[3] != "full"

    keys = sorted(lines, key=place)
    return lengths, {key: lines[key] for key in keys}


def markdown(document: Row) -> str:
    """Speed by sequence length, one line per pass, head dim, mask and backend."""
    lengths, lines = table_rows(document)
    header = ["pass", "dtype", "D", "mask", "backend", *(f"S = {length}" for length in lengths)]
    body = [
        [*map(str, key), *(speed_and_power(rows.get(length)) for length in lengths)]
        for key, rows in lines.items()
    ]
    facts = document["environment"]
    origin = (
        f"TFLOP/s (SM clock, power) on {facts['device']}, "
        f"{describe_protocol(document['protocol'])}, torch {facts['torch']}, commit "
        f"{(facts['commit'] or 'unknown')[:12]}: `{document['command']}`"
    )
    summary = "\n".join(f"- {line}" for line in summary_lines(document))
    return f"{markdown_table(header, body, header[:5])}\n\n{origin}\n\n{summary}\n"


def speed_and_power(row: Row | None) -> str:
    """574 (1530 MHz, 690 W), the latter where they were read."""
    power = ", ".join(power_texts(row or {}))
    return speed(row) + (f" ({power})" if power else "")


def power_texts(row: Row) -> Iterator[str]:
    """Of what was read: the SM clock, mean power and the energy of a call."""
    for key, show in (
        ("sm_clock_mhz", "{:.0f} MHz"),
        ("watts", "{:.0f} W"),
        ("joules_per_call", "{:.3g} J"),
    ):
        if row.get(key) is not None:
            yield show.format(row[key])


def ratio_table(document: Row, peers: Sequence[str] | None = None) -> str:
    """Our TFLOP/s and, after strokes, the ratios to the peers, or to the baseline: a line per pass,
    head dim and mask.
    """
    lengths, lines = table_rows(document)
    header = ["pass", "D", "mask", *(f"S = {length}" for length in lengths)]
    body = []
    for (*problem, backend), ours in lines.items():
        if backend != OURS:
            continue
        which, _dtype, head_dims, mask = problem
        theirs = [lines.get((*problem, peer), {}) for peer in peers or [document["baseline"]]]
        cells = [
            speed_and_ratios(ours.get(length), [rows.get(length) for rows in theirs])
            for length in lengths
        ]
        body.append([which, head_dims, mask, *cells])
    return markdown_table(header, body, header[:3])


def speed_and_ratios(ours: Row | None, peers: Sequence[Row | None]) -> str:
    """574 / 1.16 / 0.98, with - for a peer that could not run where another could."""
    if ours is None or not any(peers):
        return speed(ours)
    ratios = [f"{ours['tflops'] / peer['tflops']:.2f}" if peer else "-" for peer in peers]
    return " / ".join([speed(ours), *ratios])


def peer_table(document: Row) -> str:
    """Ours over every peer: geometric mean of the cells, and the lowest of them."""
    header = ["pass", "ours over", "cells", "geomean", "lowest", "where"]
    body = [
        [
            *(entry["pass"], entry["baseline"], str(entry["cells"])),
            *(f"{entry['geomean_ratio']:.2f}", f"{entry['minimum_ratio']:.2f}"),
            entry["minimum_case"],
        ]
        for entry in against_peers(document)
    ]
    return markdown_table(header, body, ("pass", "ours over", "where"))


def speed(row: Row | None) -> str:
    return "" if row is None else three_digits(row["tflops"])


def three_digits(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
