"""What each feature costs: speed with it over speed of the same call without, and torch's dropout.

Speeds count operations on visible pairs, so that of a window is relative to the work it leaves.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from benchmarks.core.feature_tables import Column, Row, Target, number, quotient, ratio, timing_of
from benchmarks.core.metrics import Pass
from benchmarks.core.runner import Measurement, Subject, make_calls, make_input_sets, measure
from benchmarks.core.turns import Protocol
from benchmarks.peers.backends import BACKENDS, is_cuda
from tests.cases.attention import Alibi, AttentionCase

TOKENS = 16_384
HIDDEN = 2048
HEAD_DIMS = (64, 128)
WIDE_HEAD_DIM = 256  # of which only a fixed order is timed, in the backward
SEQLEN, LONG_SEQLEN = 4096, 8192
WINDOW = 1024
DROPOUT_P = 0.1

# Dropout may take a fifth of the speed, a score modifier or a window 15 % more time for its work.
KEEPS_80_PERCENT = Target("over_plain", 0.8)
TAKES_15_PERCENT = Target("over_plain", 1 / 1.15)
KEEPS_75_PERCENT = Target("over_plain", 0.75)
TAKES_1_PERCENT = Target("over_plain", 1 / 1.01)

TIMED_COLUMNS = (  # of a timed_row
    Column("D", "head_dim"),
    Column("S", "seqlen"),
    Column("mask", "mask"),
    Column("pass", "pass"),
    Column("what", "what"),
    Column("ms", "median_ms", number(4)),
)
COLUMNS = (
    *TIMED_COLUMNS,
    Column("TFLOP/s", "tflops", number(3)),
    Column("/ plain", "over_plain", ratio),
    Column("more time, %", "more_time_percent", lambda value: f"{value:+.1f}"),
    Column("/ torch", "over_torch", ratio),
)


@dataclass(frozen=True)
class Variant:
    """A backend's call with a feature; `changes` to the plain case make its case."""

    name: str
    changes: dict[str, Any]
    target: Target | None = None
    backend: str = "ours"
    plain: str = "plain"  # the variant that it is compared with
    peer: str | None = None  # torch's variant of the same call


@dataclass(frozen=True)
class FeatureGroup:
    """Variants of one plain case, on the same data."""

    plain: AttentionCase
    variants: tuple[Variant, ...]
    passes: tuple[Pass, ...] = tuple(Pass)

    def __str__(self) -> str:
        mask = "causal" if self.plain.causal else "full"
        return f"d{self.plain.head_dim} S{self.plain.seqlen_q} {mask}"


PLAIN = Variant("plain", {}, peer="torch")
DETERMINISTIC = Variant("deterministic", {"deterministic": True}, KEEPS_75_PERCENT)


def variants(causal: bool) -> tuple[Variant, ...]:
    """All features. The window of full attention reaches as far ahead as back."""
    dropout = {"dropout_p": DROPOUT_P}
    window = (WINDOW, 0) if causal else (WINDOW, WINDOW)
    return (
        PLAIN,
        Variant("dropout 0.1", dropout, KEEPS_80_PERCENT, peer="torch dropout 0.1"),
        Variant("softcap 50", {"softcap": 50.0}, TAKES_15_PERCENT),
        Variant("ALiBi", {"alibi": Alibi.per_head}, TAKES_15_PERCENT),
        Variant("window {},{}".format(*window), {"window": window}, TAKES_15_PERCENT),
        DETERMINISTIC,
        Variant("max_logits", {"max_logits": True}, TAKES_1_PERCENT),
        Variant("torch", {}, backend="sdpa_flash", plain="torch"),
        Variant("torch dropout 0.1", dropout, backend="sdpa_flash", plain="torch"),
    )


def groups(device: str = "cuda", quick: bool = False) -> list[FeatureGroup]:
    head_dims, masks = (HEAD_DIMS[1:], (True,)) if quick else (HEAD_DIMS, (False, True))
    grid = [(head_dim, causal) for head_dim in head_dims for causal in masks]
    result = [FeatureGroup(plain_case(SEQLEN, *cell, device), variants(cell[1])) for cell in grid]
    if not quick:
        wide = [(WIDE_HEAD_DIM, causal) for causal in masks]
        in_order = [(SEQLEN, *cell) for cell in wide]
        in_order += [(LONG_SEQLEN, *cell) for cell in (*grid, *wide)]
        result += [
            FeatureGroup(plain_case(*cell, device), (PLAIN, DETERMINISTIC), (Pass.backward,))
            for cell in in_order
        ]
    return result


def plain_case(seqlen: int, head_dim: int, causal: bool, device: str) -> AttentionCase:
    return AttentionCase(
        batch=TOKENS // seqlen,
        seqlen_q=seqlen,
        seqlen_k=seqlen,
        num_heads_q=HIDDEN // head_dim,
        num_heads_k=HIDDEN // head_dim,
        head_dim=head_dim,
        causal=causal,
        device=device,
    )


def measure_group(group: FeatureGroup, protocol: Protocol) -> Iterator[Row]:
    inputs = make_input_sets(group.plain)
    for which in group.passes:
        of_other_pass = {Pass.forward: "deterministic", Pass.backward: "max_logits"}[which]
        timed = [x for x in group.variants if of_other_pass not in x.changes]
        cases = [replace(group.plain, **variant.changes) for variant in timed]
        subjects = []
        for variant, case in zip(timed, cases, strict=True):
            backend = BACKENDS[variant.backend]
            prepare = partial(make_calls, backend, case, which, inputs)
            subjects.append(Subject(variant.name, prepare, backend.scope))
        measured = measure(
            subjects,
            records=which is Pass.backward,
            on_cuda=is_cuda(group.plain),
            protocol=protocol,
        )
        rows = {}
        for variant, case, measurement in zip(timed, cases, measured, strict=True):
            timing = measurement.timing
            rows[variant.name] = {
                **timed_row(str(group), case, which, variant.name, measurement),
                "peak_bytes": measurement.peak_bytes,
                "tflops": timing and timing.teraflops(case, which),
            }
        add_ratios(rows, timed)
        yield from rows.values()


def timed_row(
    group: str, case: AttentionCase, which: Pass, what: str, measurement: Measurement
) -> Row:
    return {
        "name": f"{group} {which.value} {what}",
        "group": f"{group} {which.value}",
        "case": str(case),
        "head_dim": case.head_dim,
        "seqlen": case.seqlen_q,
        "mask": "causal" if case.causal else "full",
        "pass": which.value,
        "what": what,
        **timing_of(measurement),
    }


def add_ratios(rows: dict[str, Row], timed: list[Variant]) -> None:
    """Of speeds: over the plain variant's and over that of torch's same call, if it was timed."""
    for variant in timed:
        row, peer = rows[variant.name], rows.get(variant.peer or "")
        is_plain = variant.plain == variant.name
        over_plain = None if is_plain else quotient(row["tflops"], rows[variant.plain]["tflops"])
        row["over_plain"] = over_plain
        row["more_time_percent"] = None if over_plain is None else 100 * (1 / over_plain - 1)
        row["over_torch"] = peer and quotient(row["tflops"], peer["tflops"])
        row["targets"] = [] if variant.target is None else [variant.target.judge(row)]
