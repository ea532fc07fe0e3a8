"""Training speed of the example's GPT with one attention or another, end to end.

    python -m benchmarks.suites.train --json train.json     # preset 350m, 8,192 bytes of context
    python -m benchmarks.suites.train --preset small --seqlen 1024 --batch-size 16

Each run trains a new model from the same weights on the same batches (examples/train_gpt.py), after
one of a few steps that nobody counts; attentions take turns, A B B A. A run takes seconds, so that
its clock is the one that its own power leaves (benchmarks/README.md). Its tokens per second are of
all its steps, which have to be fewer than those after which the example validates first. The losses
show that all of them train alike.
"""

from __future__ import annotations

import argparse
import gc
import shlex
import statistics
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2] / "examples"))

import torch
from model import ATTENTIONS, GPT
from train_gpt import new_model
from training import (
    MIN_VALIDATION_INTERVAL,
    PRESETS,
    Corpus,
    Curve,
    Preset,
    manual_text,
    train,
)

from benchmarks.core.documents import environment, write_outputs
from benchmarks.core.turns import order_of_turns
from benchmarks.peers.backends import our_operators

SCHEMA = 1
WARMUP_STEPS = 4
SHOWN_LOSSES = 5
SDPA_OURS = "sdpa-ours"  # the model calls SDPA, whose flash backend is this package


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", choices=PRESETS, default="350m")
    parser.add_argument(
        "--attentions",
        nargs="+",
        choices=[*ATTENTIONS, SDPA_OURS],
        default=["ours", "sdpa-flash", "sdpa-cudnn"],
    )
    return parse_options(parser, arguments, batch_size=2)


def parse_options(
    parser: argparse.ArgumentParser, arguments: list[str] | None, batch_size: int
) -> argparse.Namespace:
    """The parser's options and those of every benchmark that trains, checked."""
    parser.add_argument("--seqlen", type=int, default=8192, help="bytes of context")
    parser.add_argument("--batch-size", type=int, default=batch_size, help="sequences per step")
    parser.add_argument("--steps", type=int, default=19, help="of a run (default: %(default)s)")
    parser.add_argument(
        "--rounds", type=int, default=4, help="runs of each attention (default: %(default)s)"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    if not 0 < options.steps < MIN_VALIDATION_INTERVAL:
        parser.error(
            f"--steps must be from 1 to {MIN_VALIDATION_INTERVAL - 1}, so that no validation is "
            f"timed, got {options.steps}"
        )
    return options


def with_options(preset: Preset, options: argparse.Namespace) -> Preset:
    return replace(
        preset,
        model=replace(preset.model, seqlen=options.seqlen),
        batch_size=options.batch_size,
        steps=options.steps,
    )


def run(
    make_model: Callable[[], GPT], preset: Preset, device: torch.device, title: str
) -> tuple[Curve, float]:
    """The curve of a new model's training, and the most GiB that were allocated meanwhile."""
    is_cuda = device.type == "cuda"
    corpus = Corpus(manual_text(), preset.model.seqlen, preset.batch_size, device)
    torch.manual_seed(0)
    model = make_model()
    if is_cuda:
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
    curve = train(model, corpus, preset, title=title, seed=1)
    peak = torch.cuda.max_memory_allocated(device) / 2**30 if is_cuda else 0.0
    del model
    gc.collect()
    return curve, peak


def run_gpt(preset: Preset, device: torch.device, attention: str) -> tuple[Curve, float]:
    is_ours = attention == SDPA_OURS
    make_model = partial(new_model, preset, "sdpa" if is_ours else attention, device, seed=0)
    with our_operators() if is_ours else nullcontext():
        return run(make_model, preset, device, attention)


def measure(
    attentions: Sequence[str],
    preset: Preset,
    rounds: int,
    run: Callable[[Preset, str], tuple[Curve, float]],
) -> list[dict[str, Any]]:
    """A row for each attention; `run` trains a new model on one for the preset's steps."""
    rows: dict[str, dict[str, Any]] = {}
    for attention in attentions:
        run(replace(preset, steps=WARMUP_STEPS), attention)
        rows[attention] = {"attention": attention, "tokens_per_second": []}
    for index in order_of_turns(len(attentions), rounds):
        row = rows[attentions[index]]
        curve, peak = run(preset, row["attention"])
        row["tokens_per_second"].append(round(curve.tokens / curve.seconds))
        row["peak_gib"] = round(peak, 2)
        row["train_losses"] = [round(loss, 4) for loss in curve.train]
        row["validation_loss"] = round(curve.validation[-1][1], 4)
    return list(rows.values())


def print_rows(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        losses = row["train_losses"]
        shown = losses[:: max(1, len(losses) // SHOWN_LOSSES)]
        print(
            f"{row['attention']:>12}: {statistics.median(row['tokens_per_second']):,.0f} tokens/s, "
            f"{row['peak_gib']} GiB, losses {', '.join(map(str, shown))}"
        )


def report(
    name: str, options: argparse.Namespace, arguments: list[str] | None, rows: list[dict[str, Any]]
) -> None:
    """Writes and prints the results of the suite `name`."""
    command = [
        *("python", "-m", f"benchmarks.suites.{name}"),
        *(sys.argv[1:] if arguments is None else arguments),
    ]
    document = {
        "schema": SCHEMA,
        "benchmark": name,
        "command": shlex.join(command),
        "environment": environment(options.device),
        "results": rows,
    }
    write_outputs(document, json_path=options.json, csv_path=None, plot_path=None)
    print_rows(rows)


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    preset = with_options(PRESETS[options.preset], options)
    device = torch.device(options.device)
    rows = measure(
        options.attentions,
        preset,
        options.rounds,
        lambda preset, attention: run_gpt(preset, device, attention),
    )
    report("train", options, arguments, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
