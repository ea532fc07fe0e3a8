"""Measures anew what README quotes of one GPU: files of benchmarks/results, by name.

    python -m benchmarks.core.figures --list
    python -m benchmarks.core.figures --device h200 decode short masks
    python -m benchmarks.core.figures --device h200 --seconds 570 forward backward

Each is a program of its own, with a file for what it printed; what does not end within --seconds,
which all share, is interrupted, and most programs then write what they have. Commands in the
results name benchmarks/results in DIRECTORY's place, as that is where good ones are to be put. Exit
status 1 where one failed or was not reached.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.core.documents import json_text

ROOT = Path(__file__).resolve().parents[2]
RESULTS = "benchmarks/results"

GRID = "grid --backends ours sdpa_flash sdpa_cudnn fa3 --baseline sdpa_cudnn"
THREE = "grid --backends ours sdpa_flash sdpa_cudnn --baseline sdpa_cudnn"
IMAGES = "--masks full --shape 256,128,128,16,16,64 --shape 256,197,197,12,12,64"
LONGER_IMAGES = "--shape 128,257,257,12,12,64 --shape 32,577,577,12,12,64"
# Grouped heads, and head dims that the grid has not, causal.
SHAPES = (
    "--masks causal --shape 4,4096,4096,32,8,128 --shape 4,4096,4096,32,1,128 "
    "--shape 4,4096,4096,16,16,96 --shape 4,4096,4096,16,16,192 --shape 4,4096,4096,16,16,192x128"
)
# Heads that share keys, of 16,384 tokens: (query heads, key heads, head dim).
SHARED_HEADS = ((32, 1, 128), (32, 2, 128), (32, 4, 128), (64, 1, 64), (64, 4, 64), (64, 8, 64))
SHARED = " ".join(
    f"--shape {16384 // s},{s},{s},{q},{k},{d}"
    for q, k, d in SHARED_HEADS
    for s in (1024, 2048, 4096, 8192, 16384)
)
WIDE = "--shape 1,8192,8192,8,2,512 --shape 1,8192,8192,8,8,512 --budget-ms 800"
SM80 = {"FLASH_ATTN_CUDA_CAPABILITY_LIMIT": "80"}


@dataclass(frozen=True)
class Figure:
    """A result file without its device's name, and the program that makes it."""

    file: str
    command: str
    variables: dict[str, str] = field(default_factory=dict)


FIGURES: dict[str, tuple[Figure, ...]] = {
    "forward": (Figure("forward_sm90", f"{GRID} --passes forward"),),
    "backward": (Figure("backward_sm90", f"{GRID} --passes backward"),),
    # One peer alone: beside several, clocks differ by contender.
    "fa3": (Figure("fa3_sm90", "grid --backends ours fa3 --baseline fa3 --turn-ms 300"),),
    "short": (
        Figure("forward_sm90_short", f"{THREE} --passes forward {IMAGES} {LONGER_IMAGES}"),
        Figure("backward_sm90_short", f"{THREE} --passes backward {IMAGES}"),
    ),
    "shapes": (
        Figure("forward_sm90_shapes", f"{GRID} --passes forward {SHAPES}"),
        Figure("backward_sm90_shapes", f"{GRID} --passes backward {SHAPES}"),
    ),
    "shared": (
        Figure(
            "backward_sm90_shared_heads",
            "grid --backends ours fa3 --baseline fa3 --passes backward --masks causal " + SHARED,
        ),
    ),
    "fp16": (
        Figure(
            "forward_sm90_fp16",
            f"{THREE} --passes forward --head-dims 128 --dtype fp16 --seqlens 1024 4096 16384",
        ),
    ),
    "features": (Figure("sm90_features", "features features"),),
    "joules": (
        Figure(
            "sm90_joules",
            "grid --backends ours fa3 --baseline fa3 --head-dims 128 --seqlens 8192 "
            "--masks causal full --joules",
        ),
    ),
    "limits": (Figure("sm90_limits", "limits"),),
    "varlen": (Figure("sm90_varlen", "features varlen"),),
    "decode": (Figure("decode", "features decode"),),
    "prefill": (Figure("sm90_prefill", "features prefill"),),
    "latent": (Figure("latent", "features latent"),),
    "masks": (Figure("masks", "masks --parts density,document,bias,sink"),),
    "lists": (Figure("lists", "masks --parts lists"),),
    "rotary": (Figure("rotary", "rotary --tokens 16384"),),
    # Two contenders alone: of three the one in the middle never follows itself.
    "sdpa": (
        Figure(
            "sdpa",
            "grid --backends ours sdpa_ours --baseline ours --head-dims 128 --masks causal "
            "--seqlens 1024 4096 16384 --budget-ms 1600",
        ),
    ),
    "host": (
        Figure(
            "host_overhead",
            "host_overhead --backends ours ours_varlen ours_cache sdpa_ours sdpa_flash sdpa_cudnn",
        ),
    ),
    "sm80": (Figure("sm80", "grid --seqlens 1024 4096 16384", SM80),),
    "wide": (
        Figure("wide_heads", f"grid --backends ours ffpa sdpa_efficient --baseline ffpa {WIDE}"),
        Figure(
            "wide_heads_sm80",
            "grid --backends ours sdpa_efficient --baseline sdpa_efficient "
            "--shape 1,8192,8192,8,8,512",
            SM80,
        ),
    ),
    "accuracy": (
        Figure("accuracy", "accuracy"),
        Figure("accuracy_sm80", "accuracy --without sdpa_flash sdpa_cudnn fa3", SM80),
    ),
    "rounding": (Figure("rounding", "features rounding"),),
    "key bias": (Figure("key_bias", "key_bias"),),
    "second order": (Figure("second_order", "second_order"),),
    "fp8 cache": (Figure("fp8_cache", "fp8_cache"),),
    "gemma": (Figure("gemma", "gemma --rounds 2 --attentions ours flex+sdpa-repeated"),),
    "train": (
        Figure(
            "train_350m",
            "train --rounds 2 --attentions ours sdpa-ours sdpa-cudnn sdpa-flash",
        ),
    ),
}


def with_variables(figure: Figure, command: str | None = None) -> str:
    """Its command, or this one, behind the variables that it runs with."""
    variables = (f"{name}={value}" for name, value in figure.variables.items())
    return " ".join((*variables, command or figure.command))


def run(figure: Figure, device: str, out: Path, seconds: float) -> int | None:
    """Its exit status; None where it was interrupted."""
    suite, *options = shlex.split(figure.command)
    name = f"{device}_{figure.file}"
    path = out / f"{name}.json"
    command = [sys.executable, "-m", f"benchmarks.suites.{suite}", *options, "--json", str(path)]
    with (out / f"{name}.log").open("w") as log:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, **figure.variables},
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            status: int | None = process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            status = None
    if path.is_file():
        document = json.loads(path.read_text().replace(f"{out}/", f"{RESULTS}/"))
        document["command"] = with_variables(figure, document["command"])
        path.write_text(json_text(document))
    return status


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    # No name at all is all of them, and to argparse an empty list that choices must have.
    parser.add_argument("names", nargs="*", choices=[[], *FIGURES], metavar="NAME")
    parser.add_argument("--list", action="store_true", help="names, files and commands")
    parser.add_argument("--device", default="gpu", help="what files begin with, such as h200")
    parser.add_argument("--out", type=Path, default=ROOT / "build/figures", metavar="DIRECTORY")
    parser.add_argument("--seconds", type=float, default=3600.0, help="for all of them")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if options.list:
        for name, figures in FIGURES.items():
            for figure in figures:
                print(f"{name:10} {options.device}_{figure.file}.json: {with_variables(figure)}")
        return 0
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    failed = False
    for name in options.names or FIGURES:
        for figure in FIGURES[name]:
            left = options.seconds - (time.monotonic() - started)
            status = run(figure, options.device, out, left) if left > 0.0 else None
            failed |= status != 0
            ended = "interrupted or not reached" if status is None else f"status {status}"
            taken = time.monotonic() - started
            print(f"{figure.file}: {ended}, {taken:.0f} s from the start", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
