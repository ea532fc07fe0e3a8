"""Attention benchmark: cases x backends x passes, medians of turns of 100 ms on random data.

    python -m benchmarks.suites.grid  # the papers' grid, ours and FA2
    python -m benchmarks.suites.grid --backends ours sdpa_cudnn --head-dims 128
    python -m benchmarks.suites.grid --head-dims 192x128  # of queries and keys x of values
    python -m benchmarks.suites.grid --shape 4,1024,4096,32,8,128 --masks causal --refcheck
    python -m benchmarks.suites.grid --joules  # energy of a call too, 3 s a figure
    python -m benchmarks.suites.grid --json results.json --csv results.csv --plot results.png

The grid holds the tokens of a call and the hidden size constant (16,384 and 2,048). Backward is
timed alone, without the forward. A ratio is the baseline's time over a backend's: above 1 is
faster. How time, clock, power and energy are taken: benchmarks/README.md. Host time of small calls:
benchmarks/suites/host_overhead.py.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.core.documents import make_document, row_of, write_outputs
from benchmarks.core.grid_tables import (
    Row,
    power_texts,
    summary_lines,
)
from benchmarks.core.metrics import Pass
from benchmarks.core.runner import Result, Status, make_input_sets, run_case
from benchmarks.core.turns import add_options, protocol_of
from benchmarks.peers.backends import BACKENDS
from tests.cases.attention import (
    BENCHMARK_HEAD_DIMS,
    BENCHMARK_HIDDEN,
    BENCHMARK_SEQLENS,
    BENCHMARK_TOKENS,
    DTYPE_NAMES,
    AttentionCase,
    benchmark_cases,
)

DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
MASKS = {"full": False, "causal": True}


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="backends:\n"
        + "\n".join(f"  {b.name:15} {b.description}" for b in BACKENDS.values()),
    )
    what = parser.add_argument_group("what is measured")
    what.add_argument(
        "--backends", nargs="+", choices=BACKENDS, default=["ours", "sdpa_flash"], metavar="NAME"
    )
    what.add_argument("--baseline", choices=BACKENDS, default="sdpa_flash", metavar="NAME")
    what.add_argument("--passes", nargs="+", choices=[p.value for p in Pass], default=list(Pass))
    what.add_argument("--masks", nargs="+", choices=MASKS, default=list(MASKS))
    what.add_argument("--dtype", choices=DTYPES, default="bf16")
    what.add_argument(
        "--head-dims",
        nargs="+",
        type=parse_head_dims,
        default=[(head_dim, None) for head_dim in BENCHMARK_HEAD_DIMS],
        metavar="D[xDv]",
    )
    what.add_argument("--seqlens", nargs="+", type=int, default=BENCHMARK_SEQLENS)
    what.add_argument("--tokens", type=int, default=BENCHMARK_TOKENS, help="batch times seqlen")
    what.add_argument("--hidden", type=int, default=BENCHMARK_HIDDEN, help="heads times head dim")
    what.add_argument(
        "--shape",
        action="append",
        type=parse_shape,
        metavar="B,Sq,Sk,Hq,Hk,D[xDv]",
        help="measure these shapes instead of the grid; may be repeated",
    )
    how = parser.add_argument_group("how")
    how.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add_options(how)
    how.add_argument(
        "--joules", action="store_true", help="energy of a call, by NVML, in turns of a second"
    )
    how.add_argument("--refcheck", action="store_true", help="compare results with fp64 attention")
    out = parser.add_argument_group("output")
    out.add_argument("--json", type=Path)
    out.add_argument("--csv", type=Path)
    out.add_argument("--plot", type=Path)
    return parser.parse_args(arguments)


HeadDims = tuple[int, int | None]  # of queries and keys; of values where it is another


def parse_head_dims(text: str) -> HeadDims:
    try:
        head_dim, *rest = map(int, text.split("x"))
        (value_dim,) = rest or [None]
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"must be D or DxDv: {error}") from None
    return head_dim, value_dim


def parse_shape(text: str) -> AttentionCase:
    names = ("batch", "seqlen_q", "seqlen_k", "num_heads_q", "num_heads_k")
    *sizes, head_dims = text.split(",")
    try:
        shape = dict(zip(names, map(int, sizes), strict=True))
        head_dim, value_dim = parse_head_dims(head_dims)
        return AttentionCase(**shape, head_dim=head_dim, head_dim_v=value_dim)
    except (ValueError, argparse.ArgumentTypeError) as error:
        raise argparse.ArgumentTypeError(
            f"must be six integers B,Sq,Sk,Hq,Hk,D, or DxDv for D: {error}"
        ) from None


def cases_of(options: argparse.Namespace) -> Iterator[AttentionCase]:
    dtype, masks = DTYPES[options.dtype], [MASKS[name] for name in options.masks]
    if options.shape:
        for shape in options.shape:
            for causal in masks:
                yield replace(shape, dtype=dtype, device=options.device, causal=causal)
        return
    grid = (
        replace(case, head_dim_v=value_dim)
        for head_dim, value_dim in options.head_dims
        for case in benchmark_cases((head_dim,), tuple(options.seqlens), dtype, options.device)
    )
    for case in grid:
        if case.causal in masks:
            heads = max(1, options.hidden // case.head_dim)
            batch = max(1, options.tokens // case.seqlen_q)
            yield replace(case, batch=batch, num_heads_q=heads, num_heads_k=heads)


def measure(case: AttentionCase, options: argparse.Namespace) -> Iterator[Result]:
    """All passes and backends of one case, on the same inputs."""
    backends = [BACKENDS[name] for name in options.backends]
    protocol = protocol_of(options)
    inputs = make_input_sets(case)
    checker = None
    if options.refcheck:
        from benchmarks.core.refcheck import ReferenceCheck

        checker = ReferenceCheck(case, inputs[0])
    for which in map(Pass, options.passes):
        for result in run_case(case, which, backends, inputs, protocol):
            if checker is None or result.status is not Status.ok:
                yield result
            else:
                yield replace(result, check=checker.check(BACKENDS[result.backend], which))


def describe(row: Row) -> str:
    if row["status"] != Status.ok.value:
        return f"{row['backend']} {row['status']} ({row['reason']})"
    speed = f"{row['backend']} {row['median_ms']:.4g} ms {row['tflops']:.4g} TFLOP/s"
    text = " ".join([speed, *power_texts(row)])
    if row["check"] is not None:
        text += " ok" if row["check"]["passes"] else " WRONG"
    return text


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    cases = list(cases_of(options))
    rows: list[Row] = []
    try:
        for index, case in enumerate(cases, start=1):
            results = [row_of(result) for result in measure(case, options)]
            for which in unique_passes(results):
                cells = "; ".join(describe(row) for row in results if row["pass"] == which)
                print(f"[{index}/{len(cases)}] {case} {which}: {cells}", flush=True)
            rows += results
    finally:  # what was measured before an interruption is not lost with it
        if rows:
            write_results(rows, options, arguments)
    wrong = sum(1 for row in rows if row["check"] is not None and not row["check"]["passes"])
    if wrong:
        print(f"{wrong} results differ from the reference beyond rounding", file=sys.stderr)
    return 1 if wrong else 0


def write_results(
    rows: list[Row], options: argparse.Namespace, arguments: list[str] | None
) -> None:
    command = shlex.join(["python", "-m", "benchmarks.suites.grid", *(arguments or sys.argv[1:])])
    document = make_document(rows, options.baseline, options.device, command, protocol_of(options))
    write_outputs(document, json_path=options.json, csv_path=options.csv, plot_path=options.plot)
    print("\n".join(summary_lines(document)))


def unique_passes(rows: list[Row]) -> list[str]:
    return list(dict.fromkeys(row["pass"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
