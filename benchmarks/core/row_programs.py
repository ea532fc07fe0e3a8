"""What programs do whose results are rows in groups: features, masks, rotary embedding, limits."""

from __future__ import annotations

import argparse
import gc
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import torch

from benchmarks.core.documents import environment, write_outputs
from benchmarks.core.feature_tables import Column, Row, failures, print_document
from benchmarks.core.turns import protocol_of


def new_document(
    benchmark: str,
    schema: int,
    program: str,
    arguments: Sequence[str] | None,
    options: argparse.Namespace,
) -> Row:
    """Without rows. program: how it is started, by words; arguments: None for the process's.
    Options without a length of turns are of a program that takes no time.
    """
    timed = hasattr(options, "turn_ms")
    return {
        "schema": schema,
        "benchmark": benchmark,
        "command": shlex.join([*program.split(), *(arguments or sys.argv[1:])]),
        **({"protocol": protocol_of(options).facts()} if timed else {}),
        "environment": environment(options.device),
        "results": [],
    }


def one_by_one(problems: dict[str, Callable[[], Iterable[Row]]]) -> Iterator[list[Row]]:
    """The rows of one problem after another; its name is told before, and memory given back."""
    for index, (name, measure) in enumerate(problems.items(), start=1):
        print(f"[{index}/{len(problems)}] {name}", file=sys.stderr, flush=True)
        yield list(measure())
        gc.collect()
        torch.cuda.empty_cache()  # of which there is none without CUDA


def fill(
    document: Row,
    groups: Iterable[Iterable[Row]],
    columns: Sequence[Column],
    path: Path | None,
    *,
    complete: Callable[[list[Row]], object] | None = None,
    shown: Callable[[Row], Row] = lambda document: document,
) -> list[Row]:
    """Measures one group after another and returns the rows. After each the document is written,
    so that what was measured before an error, or before somebody's patience ends, is not lost.

    Args:
        path: where to; None: nowhere.
        complete: adds figures to rows that need others.
        shown: the document as the table shows it.
    """
    rows = document["results"]
    try:
        for group in groups:
            rows += group
            if complete is not None:
                complete(rows)
            write_outputs(document, json_path=path, csv_path=None, plot_path=None)
    finally:
        print_document(shown(document), columns)
    return rows


def status_of(rows: Sequence[Row], **problems: Sequence[str]) -> int:
    """The exit status, after rows that failed and other problems are named. problems: names of
    rows by what is wrong with them.
    """
    problems = {"failed": failures(rows), **problems}
    for problem, names in problems.items():
        if names:
            print(f"{problem.replace('_', ' ')}: {'; '.join(names)}", file=sys.stderr)
    return 1 if any(problems.values()) else 0
