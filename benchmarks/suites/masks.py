"""Speed of masks in blocks, document masks, biases, sinks and lists of blocks, with the targets of
each.

    python -m benchmarks.suites.masks --out masks.json              # all parts
    python -m benchmarks.suites.masks --quick --parts density,sink  # fewer cases
    python -m benchmarks.suites.masks --parts density --head-dims 64 128

density: masks in 128 x 128 blocks, against dense attention and torch's FlexAttention, compiled once
    for each pass and head dim; results are compared with its.
document: packed documents in one sequence with a mask, against flash_attn_varlen_func.
bias: a bias with a gradient, against torch's memory-efficient kernels.
distance: a relative_bias with a gradient, against FlexAttention and a bias over pairs.
sink: against the same call without.
lists: 16 blocks of 64 keys for each query and key head, against full causal attention, the mask
    that they stand for and flash-linear-attention's parallel_nsa.

bf16, random normal data, medians of turns of 100 ms; what is compared is timed in one process, and
ratios are medians over its rounds, so that a change of clocks between them does not count.
Backward is timed alone, without the forward. `python -m benchmarks.core.report masks.json
--markdown` prints the table of a saved run.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path

import torch

from benchmarks.core.feature_tables import Row, timing_of
from benchmarks.core.metrics import Pass
from benchmarks.core.row_programs import fill, new_document, one_by_one, status_of
from benchmarks.core.runner import Call, Status, Subject, make_call
from benchmarks.core.runner import measure as measure_in_turns
from benchmarks.core.turns import Protocol, add_options, protocol_of
from benchmarks.suites.mask_entrants import PARTS, Entrant, MaskGroup
from benchmarks.suites.mask_tables import COLUMNS, add_check, add_ratios, compare, is_wrong, short

SCHEMA = 1
BENCHMARK = "masks"


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", "--json", type=Path, help="where the results go")
    parser.add_argument("--quick", action="store_true", help="few cases")
    parser.add_argument(
        "--parts",
        type=parse_parts,
        default=list(PARTS),
        help=f"some of {','.join(PARTS)} (default: all)",
    )
    parser.add_argument("--head-dims", nargs="+", type=int, help="instead of those of a part")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add_options(parser)
    return parser.parse_args(arguments)


def parse_parts(text: str) -> list[str]:
    parts = text.split(",")
    for part in parts:
        if part not in PARTS:
            raise argparse.ArgumentTypeError(f"must be some of {','.join(PARTS)}, got {part!r}")
    return parts


def groups(options: argparse.Namespace) -> list[MaskGroup]:
    head_dims = options.head_dims and tuple(options.head_dims)
    return [
        group
        for part in options.parts
        for group in PARTS[part][0](options.device, options.quick, head_dims)
    ]


def measure_group(group: MaskGroup, protocol: Protocol) -> list[Row]:
    """Rows of both passes, and what was computed compared where two entrants compute the same."""
    entrants = {entrant.name: entrant for entrant in PARTS[group.part][1](group)}
    rows = {which: measure_pass(group, which, entrants.values(), protocol) for which in Pass}
    for name, entrant in entrants.items():
        both = (rows[Pass.backward][each]["status"] for each in (name, entrant.twin) if each)
        if entrant.twin and all(status == Status.ok.value for status in both):
            for which, check in compare(entrant, entrants[entrant.twin]).items():
                add_check(rows[which][name], check)
    return [row for of_pass in rows.values() for row in of_pass.values()]


def measure_pass(
    group: MaskGroup, which: Pass, entrants: Iterable[Entrant], protocol: Protocol
) -> dict[str, Row]:
    timed = [entrant for entrant in entrants if which in entrant.passes]
    subjects = [Subject(e.name, partial(calls_of, e, which), e.scope) for e in timed]
    measured = measure_in_turns(
        subjects, records=which is Pass.backward, on_cuda=group.on_cuda, protocol=protocol
    )
    rows = {}
    for entrant, measurement in zip(timed, measured, strict=True):
        timing = measurement.timing
        rows[entrant.name] = {
            "name": f"{group} {which.value} {entrant.name}",
            "group": str(group),
            "part": group.part,
            "case": str(group.case),
            "head_dim": group.case.head_dim,
            "seqlen": group.seqlen,
            "mask": group.mask,
            "density": group.density,
            "pass": which.value,
            "what": entrant.name,
            **timing_of(measurement),
            "peak_bytes": measurement.peak_bytes,
            "tflops": timing and timing.teraflops(group.case, which) * entrant.density,
        }
    timings = {e.name: m.timing for e, m in zip(timed, measured, strict=True)}
    add_ratios(rows, timed, timings)
    return rows


def calls_of(entrant: Entrant, which: Pass) -> list[Call]:
    return [make_call(entrant.prepare(), which, *entrant.inputs, entrant.dout)]


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    program = "python -m benchmarks.suites.masks"
    document = new_document(BENCHMARK, SCHEMA, program, arguments, options)
    protocol = protocol_of(options)
    problems = {str(group): partial(measure_group, group, protocol) for group in groups(options)}
    rows = fill(document, one_by_one(problems), COLUMNS, options.out, shown=short)
    return status_of(rows, wrong_results=[row["name"] for row in rows if is_wrong(row)])


if __name__ == "__main__":
    sys.exit(main())
