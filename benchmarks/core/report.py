"""Benchmark results as JSON, CSV, text, Markdown and a plot.

python -m benchmarks.core.report results.json --markdown  # all backends, with clock and watts
python -m benchmarks.core.report results.json --ratios  # ours and its ratio: the README's table
python -m benchmarks.core.report results.json --ratios --against sdpa_cudnn sdpa_flash fa3
python -m benchmarks.core.report results.json --peers  # mean and lowest ratio to every peer
python -m benchmarks.core.report results.json --csv results.csv --plot results.png
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from benchmarks.context_parallel import errors as context_parallel_errors
from benchmarks.context_parallel import model as context_parallel_model
from benchmarks.context_parallel import speed as context_parallel_speed
from benchmarks.core import feature_tables
from benchmarks.core.documents import SCHEMA, write_outputs
from benchmarks.core.grid_tables import Row, markdown, peer_table, ratio_table, summary_lines
from benchmarks.suites import accuracy, key_bias, mask_tables
from benchmarks.suites import fp8_cache as fp8_cache_speed
from benchmarks.suites import limits as limit_speed
from benchmarks.suites import rotary as rotary_speed
from benchmarks.suites import second_order as second_order_speed
from benchmarks.suites.features import BENCHMARKS

OTHERS = {
    accuracy.BENCHMARK: accuracy.COLUMNS,
    key_bias.BENCHMARK: key_bias.COLUMNS,
    rotary_speed.BENCHMARK: rotary_speed.COLUMNS,
    limit_speed.BENCHMARK: limit_speed.COLUMNS,
    second_order_speed.BENCHMARK: second_order_speed.COLUMNS,
    fp8_cache_speed.BENCHMARK: fp8_cache_speed.COLUMNS,
    context_parallel_speed.BENCHMARK: context_parallel_speed.COLUMNS,
    context_parallel_errors.BENCHMARK: context_parallel_errors.COLUMNS,
    context_parallel_model.BENCHMARK: context_parallel_model.COLUMNS,
    context_parallel_model.FIT: context_parallel_model.FIT_COLUMNS,
}


def show_features(document: Row, *, as_markdown: bool) -> None:
    name = document["benchmark"]
    if name in BENCHMARKS:
        columns = BENCHMARKS[name].COLUMNS
    elif name in OTHERS:
        columns = OTHERS[name]
    else:
        document, columns = mask_tables.short(document), mask_tables.COLUMNS
    if as_markdown:
        print(feature_tables.markdown(document, columns))
    else:
        feature_tables.print_document(document, columns)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", type=Path, help="JSON of grid.py or another benchmark")
    parser.add_argument("--markdown", action="store_true", help="print tables in Markdown")
    parser.add_argument("--ratios", action="store_true", help="the same of ours over the baseline")
    parser.add_argument(
        "--against", nargs="+", metavar="NAME", help="for --ratios: these peers, not the baseline"
    )
    parser.add_argument(
        "--peers", action="store_true", help="ours over every peer, in Markdown: mean and lowest"
    )
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args(arguments)
    document = json.loads(options.results.read_text())
    if document.get("schema") != SCHEMA:
        found = document.get("schema")
        raise SystemExit(f"{options.results}: schema must be {SCHEMA}, got {found}")
    if "benchmark" in document:  # not written by grid.py
        if options.csv or options.plot or options.ratios or options.peers:
            what = "--csv, --plot, --peers and --ratios are for results of grid.py"
            raise SystemExit(f"{options.results}: {what}")
        show_features(document, as_markdown=options.markdown)
        return 0
    write_outputs(document, json_path=None, csv_path=options.csv, plot_path=options.plot)
    if options.ratios:
        print(ratio_table(document, options.against))
    if options.peers:
        print(peer_table(document))
    if not options.ratios and not options.peers:
        print(markdown(document) if options.markdown else "\n".join(summary_lines(document)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
