"""Benchmark results as JSON, CSV, text, Markdown and a plot.

python benchmarks/report.py results.json --markdown      # all backends
python benchmarks/report.py results.json --ratios        # ours and its ratio: the README's table
python benchmarks/report.py results.json --csv results.csv --plot results.png
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import platform
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "tests"))

import torch  # noqa: E402
from cases import DTYPE_NAMES  # noqa: E402
from metrics import geometric_mean  # noqa: E402
from runner import Result  # noqa: E402

SCHEMA = 1
OURS = "ours"
Row = dict[str, Any]


def row_of(result: Result) -> Row:
    """One result as flat values, the same keys whether it has figures or not."""
    case, timing, which = result.case, result.timing, result.which
    return {
        "case": str(case),
        "batch": case.batch,
        "seqlen_q": case.seqlen_q,
        "seqlen_k": case.seqlen_k,
        "num_heads_q": case.num_heads_q,
        "num_heads_k": case.num_heads_k,
        "head_dim": case.head_dim,
        "head_dim_v": case.value_dim,
        "dtype": DTYPE_NAMES[case.dtype],
        "causal": case.causal,
        "pass": which.value,
        "backend": result.backend,
        "status": result.status.value,
        "reason": result.reason,
        "median_ms": timing and timing.median_ms,
        "low_ms": timing and timing.low_ms,
        "high_ms": timing and timing.high_ms,
        "samples": timing and timing.samples,
        "tflops": timing and timing.teraflops(case, which),
        "gbps": timing and timing.gigabytes_per_second(case, which),
        "peak_bytes": result.peak_bytes,
        "ratio": None,
        "check": result.check,
    }


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


# Names the commit where the sources are a copy without their repository.
COMMIT_VARIABLE = "FLASH_ATTN_CUDA_COMMIT"


def environment(device: str) -> Row:
    """What the figures depend on besides the code under test. uncommitted_changes is None where git
    cannot say, as in a copy of the sources without their repository.
    """
    changes = command_output("git", "-C", str(ROOT), "status", "--porcelain", "-uno")
    facts: Row = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "commit": os.environ.get(COMMIT_VARIABLE)
        or command_output("git", "-C", str(ROOT), "rev-parse", "HEAD"),
        "uncommitted_changes": None if changes is None else bool(changes),
        "flash_attn_cuda": package_version("flash_attn_cuda"),
        "build": build_facts(),
        "triton": package_version("triton"),
    }
    if torch.device(device).type != "cuda":
        return facts | {"device": platform.processor() or platform.machine(), "driver": None}
    properties = torch.cuda.get_device_properties(device)
    query = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    driver = command_output(*query)
    return facts | {
        "device": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "driver": driver.splitlines()[0] if driver else None,
        "cudnn": torch.backends.cudnn.version(),
    }


def command_output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def package_version(name: str) -> str | None:
    try:
        return __import__(name).__version__
    except ImportError:
        return None


def build_facts() -> Row | None:
    """What the installed extension was built from, archs and nvcc among it; None without one."""
    try:
        from flash_attn_cuda import build_info
    except ImportError:
        return None
    record = build_info.build_record()
    if not record:
        return None
    facts = {key: value for key, value in record.items() if key != "instances"}
    return facts | {"kernels": len(record["instances"])}


def make_document(rows: Sequence[Row], baseline: str, device: str, command: str) -> Row:
    """Everything a run leaves behind; `rows` get their ratios."""
    add_ratios(rows, baseline)
    return {
        "schema": SCHEMA,
        "command": command,
        "baseline": baseline,
        "environment": environment(device),
        "summary": summarise(rows, baseline),
        "results": list(rows),
    }


def write_csv(document: Row, path: Path) -> None:
    rows = [row | {"check": row["check"] and row["check"]["passes"]} for row in document["results"]]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]) if rows else [])
        writer.writeheader()
        writer.writerows(rows)


def summary_lines(document: Row) -> list[str]:
    return [
        f"{entry['pass']}: {entry['backend']} / {entry['baseline']} geomean "
        f"{entry['geomean_ratio']:.3f}, minimum {entry['minimum_ratio']:.3f} "
        f"({entry['minimum_case']}), {entry['cells']} cells"
        for entry in document["summary"]
    ]


def head_dims_of(row: Row) -> str:
    """128, or 192x128 where values have another head dim."""
    of_values = row.get("head_dim_v", row["head_dim"])  # older results have one
    return (
        f"{row['head_dim']}" if of_values == row["head_dim"] else f"{row['head_dim']}x{of_values}"
    )


def table_rows(document: Row) -> tuple[list[int], dict[tuple, dict[int, float]]]:
    """Sequence lengths, and TFLOP/s by length for each (pass, dtype, head dims, mask, backend)."""
    lines: dict[tuple, dict[int, float]] = defaultdict(dict)
    for row in document["results"]:
        if row["tflops"] is not None:
            mask = "causal" if row["causal"] else "full"
            key = (row["pass"], row["dtype"], head_dims_of(row), mask, row["backend"])
            lines[key][row["seqlen_q"]] = row["tflops"]
    lengths = sorted({length for values in lines.values() for length in values})

    def place(key: tuple) -> tuple:
        head_dims = tuple(map(int, key[2].split("x")))
        return key[0] != "forward", key[1], head_dims, key[3] != "full"

    keys = sorted(lines, key=place)
    return lengths, {key: lines[key] for key in keys}


def markdown(document: Row) -> str:
    """TFLOP/s by sequence length, one line per pass, head dim, mask and backend."""
    lengths, lines = table_rows(document)
    header = ["pass", "dtype", "D", "mask", "backend", *(f"S = {length}" for length in lengths)]
    rules = ["---"] * 5 + ["---:"] * len(lengths)
    body = [
        [*map(str, key), *(three_digits(values.get(length)) for length in lengths)]
        for key, values in lines.items()
    ]
    facts = document["environment"]
    table = "\n".join(f"| {' | '.join(cells)} |" for cells in (header, rules, *body))
    origin = (
        f"TFLOP/s on {facts['device']}, torch {facts['torch']}, commit "
        f"{(facts['commit'] or 'unknown')[:12]}: `{document['command']}`"
    )
    summary = "\n".join(f"- {line}" for line in summary_lines(document))
    return f"{table}\n\n{origin}\n\n{summary}\n"


def ratio_table(document: Row) -> str:
    """Our TFLOP/s, a stroke and the ratio to the baseline, a line per pass, head dim and mask."""
    lengths, lines = table_rows(document)
    header = ["pass", "D", "mask", *(f"S = {length}" for length in lengths)]
    body = []
    for (which, dtype, head_dims, mask, backend), ours in lines.items():
        if backend != OURS:
            continue
        baseline = lines.get((which, dtype, head_dims, mask, document["baseline"]), {})
        cells = [
            f"{three_digits(ours[length])} / {ours[length] / baseline[length]:.2f}"
            if length in ours and length in baseline
            else three_digits(ours.get(length))
            for length in lengths
        ]
        body.append([which, head_dims, mask, *cells])
    rows = (header, ["---"] * len(header), *body)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)


def three_digits(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def plot(document: Row, path: Path) -> None:
    """TFLOP/s over sequence length: a row of panels per pass, a panel per head dim and mask."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    _, lines = table_rows(document)
    passes = unique(key[0] for key in lines)
    kinds = unique(key[1:4] for key in lines)
    backends = unique(key[4] for key in lines)
    figure, grid = pyplot.subplots(
        len(passes) or 1,
        len(kinds) or 1,
        figsize=(3.2 * max(2, len(kinds)), 3.0 * max(1, len(passes))),
        squeeze=False,
        layout="constrained",
    )
    for which, axes_row in zip(passes, grid, strict=False):
        for (dtype, head_dims, mask), axes in zip(kinds, axes_row, strict=False):
            for color, backend in enumerate(backends):
                values = lines.get((which, dtype, head_dims, mask, backend), {})
                lengths = sorted(values)
                speeds = [values[length] for length in lengths]
                axes.plot(lengths, speeds, "o-", color=f"C{color}", ms=3, label=backend)
            axes.set_xscale("log", base=2)
            axes.set_ylim(bottom=0)
            axes.set_title(f"{which} {dtype} d{head_dims} {mask}", fontsize=9)
            axes.grid(alpha=0.3)
        axes_row[0].set_ylabel("TFLOP/s")
    grid[0][0].legend(fontsize=8)
    figure.supxlabel(f"sequence length; {document['environment']['device']}", fontsize=9)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def unique(values: Iterable) -> list:
    return list(dict.fromkeys(values))


def write_outputs(
    document: Row, *, json_path: Path | None, csv_path: Path | None, plot_path: Path | None
) -> None:
    for path in (json_path, csv_path, plot_path):
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
    if json_path is not None:
        json_path.write_text(json.dumps(document, indent=1) + "\n")
    if csv_path is not None:
        write_csv(document, csv_path)
    if plot_path is not None:
        plot(document, plot_path)


def show_features(document: Row, *, as_markdown: bool) -> None:
    import feature_tables
    import mask_tables
    from features import BENCHMARKS

    if document["benchmark"] in BENCHMARKS:
        columns = BENCHMARKS[document["benchmark"]].COLUMNS
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
    parser.add_argument("results", type=Path, help="JSON of bench.py, features.py or mask_speed.py")
    parser.add_argument("--markdown", action="store_true", help="print tables in Markdown")
    parser.add_argument("--ratios", action="store_true", help="the same of ours over the baseline")
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args(arguments)
    document = json.loads(options.results.read_text())
    if document.get("schema") != SCHEMA:
        found = document.get("schema")
        raise SystemExit(f"{options.results}: schema must be {SCHEMA}, got {found}")
    if "benchmark" in document:  # written by features.py or mask_speed.py
        if options.csv or options.plot or options.ratios:
            what = "--csv, --plot and --ratios are for results of bench.py"
            raise SystemExit(f"{options.results}: {what}")
        show_features(document, as_markdown=options.markdown)
        return 0
    write_outputs(document, json_path=None, csv_path=options.csv, plot_path=options.plot)
    if options.ratios:
        print(ratio_table(document))
    else:
        print(markdown(document) if options.markdown else "\n".join(summary_lines(document)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
