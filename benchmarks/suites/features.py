"""Speed of packed sequences, of features, of decoding, of prefill and of latent attention, with the
targets of each, and what keeping the rounding of O costs.

    python -m benchmarks.suites.features varlen --json varlen.json  # packed against dense and torch
    python -m benchmarks.suites.features features  # dropout, softcap, ALiBi, ...
    python -m benchmarks.suites.features decode --quick  # KV cache in CUDA graphs
    python -m benchmarks.suites.features prefill  # chunks of queries over a cache
    python -m benchmarks.suites.features trees  # tree_mask beside causal
    python -m benchmarks.suites.features rounding  # keep_rounding in calls that are recorded
    python -m benchmarks.suites.features latent  # absorbed latent attention beside FlashAttention-3

bf16, random normal data, medians of turns of 100 ms; what is compared is timed in one process.
Backward is timed alone, without the forward.
`benchmarks.core.report results.json --markdown` prints the table of a saved run.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch

from benchmarks.core.feature_tables import Row
from benchmarks.core.row_programs import fill, new_document, one_by_one, status_of
from benchmarks.core.turns import add_options, protocol_of
from benchmarks.suites import decode as decode_speed
from benchmarks.suites import feature_cost, rounding_cost
from benchmarks.suites import latent as latent_speed
from benchmarks.suites import prefill as prefill_speed
from benchmarks.suites import trees as tree_speed
from benchmarks.suites import varlen as varlen_speed

SCHEMA = 1
BENCHMARKS = {
    "varlen": varlen_speed,
    "features": feature_cost,
    "decode": decode_speed,
    "prefill": prefill_speed,
    "trees": tree_speed,
    "rounding": rounding_cost,
    "latent": latent_speed,
}


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("benchmark", choices=BENCHMARKS)
    parser.add_argument("--quick", action="store_true", help="few cases")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add_options(parser)
    parser.add_argument("--json", type=Path)
    return parser.parse_args(arguments)


def measure(options: argparse.Namespace) -> Iterator[list[Row]]:
    """The rows of one group after another."""
    module, protocol = BENCHMARKS[options.benchmark], protocol_of(options)
    if module is decode_speed:
        yield [decode_speed.measure_copy(options.device, protocol)]
    groups = module.groups(options.device, options.quick)
    yield from one_by_one(
        {str(group): partial(module.measure_group, group, protocol) for group in groups}
    )


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    module = BENCHMARKS[options.benchmark]
    program = "python -m benchmarks.suites.features"
    document = new_document(options.benchmark, SCHEMA, program, arguments, options)
    complete = decode_speed.add_copy_shares if module is decode_speed else None
    rows = fill(document, measure(options), module.COLUMNS, options.json, complete=complete)
    return status_of(rows)


if __name__ == "__main__":
    sys.exit(main())
