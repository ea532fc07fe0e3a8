"""Rows of masks.py: ratios, comparisons of results, and the table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.core.feature_tables import Column, Row, number
from benchmarks.core.metrics import Pass, Timing
from benchmarks.core.runner import Status
from benchmarks.peers.backends import TensorOrder
from benchmarks.suites.mask_entrants import Entrant

TILE_ROWS = 128
# Several times what rounding to bf16 explains; one block of 128 too few is 0.09.
TOLERANCE = 0.02


def three_decimals(value: float) -> str:
    return f"{value:.3f}"


COLUMNS = (
    Column("problem", "group"),
    Column("pass", "pass"),
    Column("what", "what"),
    Column("ms", "median_ms", number(4)),
    Column("TFLOP/s", "tflops", number(3)),
    Column("ref. ms", "reference_ms", number(4)),
    Column("/ ref.", "time_ratio", three_decimals),
    Column("torch ms", "peer_ms", number(4)),
    Column("torch /", "speedup", three_decimals),
    Column("error", "error", lambda value: f"{value:.1e}"),
)


def add_ratios(
    rows: dict[str, Row], entrants: Sequence[Entrant], timings: dict[str, Timing | None]
) -> None:
    """Of times, to those of the reference and of the peer, and what the targets say."""

    def time_over(above: str | None, below: str | None) -> float | None:
        numerator, denominator = timings.get(above or ""), timings.get(below or "")
        return numerator.over(denominator) if numerator and denominator else None

    for entrant in entrants:
        row = rows[entrant.name]
        for figure, name in (("reference_ms", entrant.reference), ("peer_ms", entrant.peer)):
            row[figure] = rows[name]["median_ms"] if name else None
        row["reference"], row["peer"] = entrant.reference, entrant.peer
        row["time_ratio"] = time_over(entrant.name, entrant.reference)
        row["speedup"] = time_over(entrant.peer, entrant.name)
        row["targets"] = [target.judge(row) for target in entrant.targets]
        row["check"] = row["error"] = None


def add_check(row: Row, check: dict[str, Any]) -> None:
    row["check"], row["error"] = check, max(check["errors"].values())


def short(document: Row) -> Row:
    """With the rows that are compared with others, or could not be measured."""
    shown = [
        row
        for row in document["results"]
        if row["reference"] or row["peer"] or row["status"] != Status.ok.value
    ]
    return document | {"results": shown}


# -- results ---------------------------------------------------------------------------------------


def compare(entrant: Entrant, twin: Entrant) -> dict[Pass, dict[str, Any]]:
    """What each pass made: {"passes": ..., "twin": ..., "errors": {tensor: ...}}."""
    actual, expected = results(entrant), results(twin)
    errors = {name: worst_tile(actual[name], expected[name]) for name in actual}
    gradients = {name: error for name, error in errors.items() if name != "out"}
    return {
        which: {
            "passes": max(of_pass.values()) <= TOLERANCE,
            "twin": twin.name,
            "errors": of_pass,
        }
        for which, of_pass in ((Pass.forward, {"out": errors["out"]}), (Pass.backward, gradients))
    }


def results(entrant: Entrant) -> dict[str, Tensor]:
    """out and the gradients as (tokens, heads, ...)."""
    attend = entrant.prepare()
    with entrant.scope(), torch.enable_grad():
        out = attend(*entrant.inputs)
        gradients = torch.autograd.grad(out, entrant.inputs, entrant.dout)
    made = dict(zip(("out", "dq", "dk", "dv"), (out.detach(), *gradients[:3]), strict=True))
    made = {name: by_token(x, entrant.order) for name, x in made.items()}
    if len(gradients) == 4:
        dbias = gradients[3]
        if dbias.dim() == 2:  # (heads, distances), of which the last are sums of many
            made["dbias"] = dbias[None]
        else:
            made["dbias"] = by_token(dbias, TensorOrder.heads_first)
    return made


def by_token(x: Tensor, order: TensorOrder) -> Tensor:
    if x.dim() == 3:  # packed
        return x
    return (x.transpose(1, 2) if order is TensorOrder.heads_first else x).flatten(0, 1)


def worst_tile(actual: Tensor, expected: Tensor) -> float:
    """The largest relative difference, in the 2-norm, of 128 tokens of a head; NaN is infinite."""
    worst = []
    for a, e in zip(actual.split(TILE_ROWS), expected.split(TILE_ROWS), strict=True):
        difference = (a.float() - e.float()).square().sum((0, 2))
        worst.append((difference / e.float().square().sum((0, 2)).clamp_min(1e-30)).max())
    return torch.stack(worst).max().sqrt().nan_to_num(nan=math.inf).item()


def is_wrong(row: Row) -> bool:
    return row["check"] is not None and not row["check"]["passes"]
