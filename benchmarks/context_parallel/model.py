"""What context parallelism costs on machines that are not at hand: a simulation of every rank.

python -m benchmarks.context_parallel.model                      # 2 to 4,096 ranks, 8 a node
python -m benchmarks.context_parallel.model --ranks 8 --gpus-per-node 1    # over InfiniBand alone
python -m benchmarks.context_parallel.model --ranks 8 64 --documents 4096 --rows 65536
python -m benchmarks.context_parallel.model --ranks 1024 --group 64        # groups, data parallel
python -m benchmarks.context_parallel.model --fit measured.json  # simulated beside measured

Plans, rows that travel, parts and the order of calls are the package's own; constants of the
machine are options. Efficiency is a rank's share of the visible pairs at the full rate, over the
simulated time; exposed is the time in which kernels wait for transfers; the formula is that of
closed_form.py.

--fit takes the JSON of speed.py, or rows as its "results": scheme, ranks, pass,
milliseconds; tokens of all ranks; mean_length of documents, or null; single_milliseconds, of the
whole on one GPU, from which the rate of attention is then taken, or null.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from pathlib import Path
from statistics import median

from benchmarks.context_parallel.closed_form import closed_form
from benchmarks.context_parallel.programs import (
    CAUSAL,
    PASSES,
    SCHEMES,
    Constants,
    Heads,
    Problem,
    operations_of_pair,
    run,
)
from benchmarks.core.documents import environment, write_outputs
from benchmarks.core.feature_tables import Column, Row, number, print_document, quotient, ratio
from benchmarks.core.lengths import log_normal_lengths
from benchmarks.core.markdown import markdown_table
from benchmarks.core.runner import Status
from flash_attn_cuda.context_parallel import Band

SCHEMA = 1
BENCHMARK = "context parallel model"
FIT = "context parallel model, measured"
DOCUMENT_ROWS = 65_536  # of a rank

COLUMNS = (
    Column("problem", "group"),
    Column("scheme", "scheme"),
    Column("pass", "pass"),
    Column("ms", "milliseconds", number(4)),
    Column("share ms", "share_milliseconds", number(4)),
    Column("efficiency", "efficiency", ratio),
    Column("exposed ms", "exposed_milliseconds", number(3)),
    Column("copies ms", "copy_milliseconds", number(3)),
    Column("MB a rank", "megabytes", number(4)),
    Column("formula ms", "formula_milliseconds", number(4)),
)
FIT_COLUMNS = (
    *COLUMNS[:3],
    Column("measured ms", "measured_milliseconds", number(4)),
    Column("simulated ms", "milliseconds", number(4)),
    Column("simulated / measured", "over_measured", ratio),
    Column("efficiency measured", "measured_efficiency", ratio),
    Column("simulated", "efficiency", ratio),
)


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", "--json", type=Path, help="where the results go")
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 8, 64, 1024, 4096])
    parser.add_argument("--group", type=int, help="the most ranks of a context; others repeat it")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--seqlen", nargs="+", type=int, help="tokens of a group (default: 1M)")
    length.add_argument("--rows", nargs="+", type=int, help="tokens of a rank")
    parser.add_argument("--documents", nargs="+", type=int, metavar="MEAN", help="log-normal")
    parser.add_argument("--schemes", nargs="+", choices=SCHEMES, default=list(SCHEMES))
    parser.add_argument("--heads-q", type=int, default=Heads.q)
    parser.add_argument("--heads-k", type=int, default=Heads.k)
    parser.add_argument("--head-dim", type=int, default=Heads.dim)
    parser.add_argument("--full", action="store_true", help="without a causal mask")
    parser.add_argument("--fold-above", type=int, default=64, help="ranks: beyond, simulate three")
    parser.add_argument("--summary", action="store_true", help="efficiencies alone, in Markdown")
    parser.add_argument("--fit", type=Path, help="JSON of measured times to compare with")
    constants = parser.add_argument_group("constants of the machine, assumed unless given")
    for constant in fields(Constants):
        name = f"--{constant.name.replace('_', '-')}"
        constants.add_argument(name, type=type(constant.default), default=constant.default)
    options = parser.parse_args(arguments)
    if options.documents and max(options.ranks) > 64 and (options.group or 4096) > 64:
        parser.error("--documents: must be over at most 64 ranks, or groups of that size")
    return options


def constants_of(options: argparse.Namespace) -> Constants:
    return Constants(**{x.name: getattr(options, x.name) for x in fields(Constants)})


def problems(options: argparse.Namespace) -> Iterator[tuple[str, Problem]]:
    """(name, problem); those whose lengths do not divide are left out."""
    heads = Heads(options.heads_q, options.heads_k, options.head_dim)
    band = Band() if options.full else CAUSAL
    for world in options.ranks:
        ranks = min(world, options.group or world)
        where = f"{world} ranks" + (f" in groups of {ranks}" if ranks < world else "")
        if options.documents and not (options.seqlen or options.rows):
            totals = [DOCUMENT_ROWS * ranks]
        else:
            totals = [x * ranks for x in options.rows or ()] or options.seqlen or [1 << 20]
        for total in totals:
            for mean in options.documents or ():
                lengths = document_lengths(total, mean)
                yield f"{where}, S {total} in {mean}", Problem(lengths, ranks, True, heads, band)
            if not options.documents and total % (2 * ranks) == 0:
                yield f"{where}, S {total}", Problem((total,), ranks, False, heads, band)


def document_lengths(total: int, mean: int) -> tuple[int, ...]:
    return log_normal_lengths(max(1, total // mean), mean)


def row_of(
    name: str, problem: Problem, scheme: str, which: str, constants: Constants, fold_above: int
) -> Row:
    row: Row = {
        "name": f"{name} {scheme} {which}",
        "group": name,
        "ranks": problem.ranks,
        "tokens": sum(problem.lengths),
        "documents": len(problem.lengths) if problem.documents else None,
        "scheme": scheme,
        "pass": which,
        "status": Status.ok.value,
        "reason": None,
        "targets": [],
    }
    try:
        outcome = run(problem, scheme, which, constants, fold_above=fold_above)
    except ValueError as error:
        return row | {"status": Status.unsupported.value, "reason": str(error)}
    times, share = outcome.slowest, problem.share_seconds(constants, which)
    formula = None if problem.documents else closed_form(problem, scheme, which, constants)
    return row | {
        "milliseconds": times.end * 1e3,
        "share_milliseconds": share * 1e3,
        "efficiency": share / times.end,
        "exposed_milliseconds": times.exposed * 1e3,
        "copy_milliseconds": times.other_work * 1e3,
        "megabytes": outcome.most_bytes / 1e6,
        "formula_milliseconds": formula and formula * 1e3,
    }


def is_another(problem: Problem, scheme: str, constants: Constants) -> bool:
    """Whether ulysses+ring is ulysses alone, or a ring alone."""
    size = problem.ulysses_size(scheme, constants)
    return scheme == "ulysses+ring" and size in (1, problem.ranks)


def simulated_rows(options: argparse.Namespace) -> Iterator[Row]:
    constants = constants_of(options)
    for name, problem in problems(options):
        print(name, file=sys.stderr, flush=True)
        for scheme in options.schemes:
            if not is_another(problem, scheme, constants):
                for which in PASSES:
                    yield row_of(name, problem, scheme, which, constants, options.fold_above)


# -- measured times --------------------------------------------------------------------------------


def measured_rows(path: Path) -> list[Row]:
    found = json.loads(path.read_text())
    rows = found["results"] if isinstance(found, dict) else found
    return [x for x in rows if x.get("milliseconds") is not None and x["scheme"] in SCHEMES]


def fitted_rows(options: argparse.Namespace) -> Iterator[Row]:
    assert options.fit is not None
    band = Band() if options.full else CAUSAL
    for measured in measured_rows(options.fit):
        ranks, which = measured["ranks"], measured["pass"]
        heads = Heads(
            measured.get("heads_q", options.heads_q),
            measured.get("heads_k", options.heads_k),
            measured.get("head_dim", options.head_dim),
        )
        mean, total = measured["mean_length"], measured["tokens"]
        if mean is None:
            name = f"{ranks} ranks, S {total}"
            problem = Problem((total,), ranks, False, heads, band)
        else:
            name = f"{ranks} ranks, S {total} in {mean}"
            problem = Problem(document_lengths(total, mean), ranks, True, heads, band)
        constants, single = constants_of(options), measured.get("single_milliseconds")
        if single is not None:
            tflops = problem.pairs * operations_of_pair(heads, which) / single / 1e9
            constants = replace(constants, **{f"{which}_tflops": tflops})
        row = row_of(name, problem, measured["scheme"], which, constants, options.fold_above)
        yield row | {
            "measured_milliseconds": measured["milliseconds"],
            "over_measured": quotient(row.get("milliseconds"), measured["milliseconds"]),
            "measured_efficiency": quotient(single, ranks * measured["milliseconds"]),
        }


def agreement(rows: Sequence[Row]) -> str:
    ratios = [x["over_measured"] for x in rows if x["over_measured"] is not None]
    if not ratios:
        return "nothing to compare"
    spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
    return f"simulated / measured: median {median(ratios):.2f}, {spread}, of {len(ratios)}"


# -- what is shown ---------------------------------------------------------------------------------


def summary(rows: Sequence[Row]) -> str:
    """A line for each problem, a column for each scheme: efficiency forward / backward."""
    groups = list(dict.fromkeys(row["group"] for row in rows))
    schemes = list(dict.fromkeys(row["scheme"] for row in rows))
    by_key = {(x["group"], x["scheme"], x["pass"]): x for x in rows}

    def cell(group: str, scheme: str) -> str:
        found = (by_key.get((group, scheme, x), {}).get("efficiency") for x in PASSES)
        shown = ["-" if efficiency is None else ratio(efficiency) for efficiency in found]
        return shown[0] if set(shown) == {"-"} else " / ".join(shown)

    lines = []
    for group in groups:
        some = [by_key[key] for key in by_key if key[0] == group and "efficiency" in by_key[key]]
        shares = {x["pass"]: x["share_milliseconds"] for x in some}
        share = " / ".join(number(3)(shares[x]) for x in PASSES if x in shares)
        lines.append([group, share, *(cell(group, scheme) for scheme in schemes)])
    return markdown_table(["problem", "share ms", *schemes], lines)


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    command = ["python", "-m", "benchmarks.context_parallel.model", *(arguments or sys.argv[1:])]
    rows = list(simulated_rows(options) if options.fit is None else fitted_rows(options))
    document = {
        "schema": SCHEMA,
        "benchmark": BENCHMARK if options.fit is None else FIT,
        "command": shlex.join(command),
        "simulated": vars(constants_of(options)),
        "environment": environment("cpu"),
        "results": rows,
    }
    write_outputs(document, json_path=options.out, csv_path=None, plot_path=None)
    if options.summary:
        print(summary(rows))
    else:
        print_document(document, COLUMNS if options.fit is None else FIT_COLUMNS)
    if options.fit is not None:
        print(agreement(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
