"""Attention's speed as a share of what the same card sustains in one large matrix product.

    python -m benchmarks.suites.limits --json limits.json
    python -m benchmarks.suites.limits --quick

Both are held to the same power, so each case and the product, of square matrices of the case's
dtype and normal data, take turns of 100 ms in one process. Cases are the grid's long ones, without
a mask: D = 128 and 256 forward, D = 128 backward.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import torch

from benchmarks.core.feature_tables import (
    Column,
    Row,
    Target,
    number,
    quotient,
    ratio,
    timing_of,
)
from benchmarks.core.metrics import Pass, operations
from benchmarks.core.row_programs import fill, new_document, one_by_one, status_of
from benchmarks.core.runner import Call, Subject, make_calls, make_input_sets, measure
from benchmarks.core.turns import Protocol, add_options, protocol_of
from benchmarks.peers.backends import BACKENDS, is_cuda
from tests.cases.attention import BENCHMARK_HIDDEN, BENCHMARK_TOKENS, AttentionCase

SCHEMA = 1
BENCHMARK = "limits"
OURS, PRODUCT = "ours", "matmul"

# Pass, head dim, sequence lengths, and the share that is wanted.
FORWARD_SHARE, BACKWARD_SHARE = Target("over_matmul", 0.95), Target("over_matmul", 0.82)
CELLS = (
    (Pass.forward, 128, (4096, 8192, 16_384), FORWARD_SHARE),
    (Pass.forward, 256, (4096, 8192, 16_384), FORWARD_SHARE),
    (Pass.backward, 128, (8192, 16_384), BACKWARD_SHARE),
)

COLUMNS = (
    Column("problem", "group"),
    Column("what", "what"),
    Column("ms", "median_ms", number(4)),
    Column("TFLOP/s", "tflops", number(4)),
    Column("/ matmul", "over_matmul", ratio),
)


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true", help="the shortest sequences alone")
    parser.add_argument("--tokens", type=int, default=BENCHMARK_TOKENS, help="batch times seqlen")
    parser.add_argument("--hidden", type=int, default=BENCHMARK_HIDDEN, help="heads times head dim")
    parser.add_argument("--size", type=int, default=8192, help="rows and columns of a matrix")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add_options(parser)
    return parser.parse_args(arguments)


def problems(options: argparse.Namespace) -> list[tuple[AttentionCase, Pass, Target]]:
    return [
        (case_of(seqlen, head_dim, options), which, target)
        for which, head_dim, seqlens, target in CELLS
        for seqlen in (seqlens[:1] if options.quick else seqlens)
    ]


def case_of(seqlen: int, head_dim: int, options: argparse.Namespace) -> AttentionCase:
    heads = max(1, options.hidden // head_dim)
    return AttentionCase(
        batch=max(1, options.tokens // seqlen),
        seqlen_q=min(seqlen, options.tokens),
        seqlen_k=min(seqlen, options.tokens),
        num_heads_q=heads,
        num_heads_k=heads,
        head_dim=head_dim,
        device=options.device,
    )


def products(case: AttentionCase, size: int) -> list[Call]:
    generator = torch.Generator(case.device).manual_seed(0)
    left, right = (
        torch.empty(size, size, dtype=case.dtype, device=case.device).normal_(generator=generator)
        for _ in range(2)
    )
    return [partial(torch.mm, left, right)]


def measure_problem(
    case: AttentionCase, which: Pass, target: Target, size: int, protocol: Protocol
) -> Iterator[Row]:
    ours = partial(make_calls, BACKENDS[OURS], case, which, make_input_sets(case))
    subjects = [Subject(OURS, ours), Subject(PRODUCT, partial(products, case, size))]
    counts = {OURS: operations(case, which), PRODUCT: 2 * size**3}
    measured = measure(
        subjects, records=which is Pass.backward, on_cuda=is_cuda(case), protocol=protocol
    )
    speeds = {
        subject.name: measurement.timing
        and counts[subject.name] / measurement.timing.median_ms / 1e9
        for subject, measurement in zip(subjects, measured, strict=True)
    }
    for subject, measurement in zip(subjects, measured, strict=True):
        is_ours = subject.name == OURS
        row: Row = {
            "name": f"{case} {which.value} {subject.name}",
            "group": f"{case} {which.value}",
            "pass": which.value,
            "head_dim": case.head_dim,
            "seqlen": case.seqlen_q,
            "what": subject.name,
            "size": None if is_ours else size,
            **timing_of(measurement),
            "tflops": speeds[subject.name],
            "over_matmul": quotient(speeds[OURS], speeds[PRODUCT]) if is_ours else None,
        }
        row["targets"] = [target.judge(row)] if is_ours else []
        yield row


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    program = "python -m benchmarks.suites.limits"
    document = new_document(BENCHMARK, SCHEMA, program, arguments, options)
    measures = {
        f"{case} {which.value}": partial(
            measure_problem, case, which, target, options.size, protocol_of(options)
        )
        for case, which, target in problems(options)
    }
    return status_of(fill(document, one_by_one(measures), COLUMNS, options.json))


if __name__ == "__main__":
    sys.exit(main())
