"""Trains a small GPT on real text with flash_attn_cuda and checks it against torch's attention.

    python examples/train_gpt.py                    # CPython's own manual, sizes for this machine
    python examples/train_gpt.py --text book.txt --preset small --steps 2000
    python examples/train_gpt.py --compare-curves   # trains with torch's attention too, same seeds
    python examples/train_gpt.py --context-parallel 2   # sequences over 2 GPUs, or CPU processes
    torchrun --nproc-per-node 8 examples/train_gpt.py --context-parallel 4   # and 2 of data

Writes model.pt (generate.py reads it), losses.csv, sample.txt and, with matplotlib, loss.png into
the folder --out.
Exits with status 1 when the loss or a gradient of one training step, or a loss curve, disagrees
with torch's scaled_dot_product_attention beyond rounding.
"""

from __future__ import annotations

import argparse
import csv
import math
import os
import sys
from contextlib import ExitStack, redirect_stdout
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path

# Read when torch loads. Threads that spin while they wait make the many small operations of the CPU
# model ten times slower as soon as anything else wants a core.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from agreement import CurveAgreement, StepAgreement, compare_curves, compare_step
from model import ATTENTIONS, GPT, save_model
from processes import SCHEMES, Ranks, ShardedCorpus, is_started, start_processes, world_size
from training import PRESETS, Corpus, Curve, Preset, autocast, manual_text, train

from flash_attn_cuda import cuda_unavailable_reason

DEFAULT_SECONDS = 120.0
SAMPLE_BYTES = 400
# Of a batch, and of each sequence: the reference in higher precision takes the memory.
COMPARED_SEQUENCES, COMPARED_TOKENS = 2, 2048


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--text", type=Path, help="text to train on; default: CPython's manual")
    parser.add_argument(
        "--preset", choices=PRESETS, help="model size; default: small on CUDA, tiny on the CPU"
    )
    parser.add_argument("--steps", type=positive_int, help="training steps; default: the preset's")
    parser.add_argument(
        "--seconds",
        type=float,
        default=DEFAULT_SECONDS,
        help="time limit for training; not applied to --compare-curves (default: %(default)g)",
    )
    parser.add_argument("--seqlen", type=positive_int, help="bytes of context")
    parser.add_argument("--batch-size", type=positive_int, help="sequences per step")
    parser.add_argument("--attention", choices=ATTENTIONS, default="ours")
    parser.add_argument(
        "--compare-curves",
        action="store_true",
        help="train with ours, SDPA and SDPA's math path from the same seeds; compare the losses",
    )
    parser.add_argument("--compile", action="store_true", help="torch.compile the model")
    parser.add_argument(
        "--context-parallel",
        type=positive_int,
        default=1,
        metavar="N",
        help="ranks that share the tokens of each sequence; more ranks share the sequences of a "
        "batch. Without torchrun N processes are started here (default: %(default)d)",
    )
    parser.add_argument(
        "--cp-scheme",
        choices=SCHEMES,
        default="auto",
        help="how queries meet keys of other ranks (default: %(default)s)",
    )
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("build/demo"), help="%(default)s")
    return parser.parse_args(arguments)


def positive_int(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def choose_device(wish: str, doing: str = "training") -> torch.device:
    """CUDA where it works; says in one line when the CPU is taken instead."""
    if wish == "cpu":
        print(f"{doing} on the CPU backend of flash_attn_cuda, as asked")
        return torch.device("cpu")
    reason = cuda_unavailable_reason()
    if reason is None:
        print(f"{doing} on {torch.cuda.get_device_name()}")
        return torch.device("cuda")
    if wish == "cuda":
        raise SystemExit(f"--device cuda: {reason}")
    print(f"{doing} on the CPU backend of flash_attn_cuda: {reason}")
    return torch.device("cpu")


def choose_preset(options: argparse.Namespace, device: torch.device) -> Preset:
    preset = PRESETS[options.preset or ("small" if device.type == "cuda" else "tiny")]
    return Preset(
        model=replace(preset.model, seqlen=options.seqlen or preset.model.seqlen),
        batch_size=options.batch_size or preset.batch_size,
        steps=options.steps or preset.steps,
        learning_rate=preset.learning_rate,
    )


def check_ranks(options: argparse.Namespace, preset: Preset, ranks: int) -> None:
    """Exits with the argument that does not fit so many processes."""
    context, heads = options.context_parallel, preset.model.heads
    if ranks % context:
        raise SystemExit(
            f"--context-parallel: must divide the {ranks} processes of torchrun, got {context}"
        )
    if options.attention != "ours":
        raise SystemExit(
            f"--attention: must be ours where processes train together, got {options.attention}"
        )
    if options.compare_curves:
        raise SystemExit("--compare-curves: must not be given where processes train together")
    if preset.model.seqlen % (2 * context):
        raise SystemExit(
            f"--seqlen: must be a multiple of {2 * context}, two parts for each of "
            f"--context-parallel {context}, got {preset.model.seqlen}"
        )
    if preset.batch_size % (ranks // context):
        raise SystemExit(
            f"--batch-size: must be a multiple of the {ranks // context} data ranks, "
            f"got {preset.batch_size}"
        )
    if options.cp_scheme == "ulysses" and heads % context:
        raise SystemExit(
            f"--cp-scheme: ulysses takes a --context-parallel that divides the {heads} heads, "
            f"got {context}"
        )


def compared_tokens(seqlen: int, context: int) -> int:
    """Of a sequence: COMPARED_TOKENS at most, and as many as so many ranks can share."""
    multiple = 2 * context
    return min(seqlen, max(1, COMPARED_TOKENS // multiple) * multiple)


def new_model(preset: Preset, attention: str, device: torch.device, seed: int) -> GPT:
    """The same weights for the same seed, on every device and for every attention."""
    torch.manual_seed(seed)
    return GPT(preset.model, ATTENTIONS[attention]).to(device)


def save_curves(curves: dict[str, Curve], folder: Path) -> Path:
    """Writes losses.csv and, where matplotlib is installed, loss.png, whose path is returned, or
    that of the former.
    """
    table = folder / "losses.csv"
    with table.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["step", *curves])
        rows = zip_longest(*(curve.train for curve in curves.values()))
        writer.writerows((step, *losses) for step, losses in enumerate(rows, start=1))

    try:
        import matplotlib
    except ImportError:
        print("no loss.png: matplotlib is not installed")
        return table
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    for name, curve in curves.items():
        (line,) = axes.plot(range(1, len(curve.train) + 1), curve.train, lw=0.8, label=name)
        steps, losses = zip(*curve.validation, strict=True)
        axes.plot(steps, losses, "o--", color=line.get_color(), label=f"{name}, validation")
    axes.set(xlabel="step", ylabel="loss (nats per byte)", title="GPT on text, loss curve")
    axes.grid(alpha=0.3)
    axes.legend()
    path = folder / "loss.png"
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path


def save_sample(model: GPT, device: torch.device, seed: int, folder: Path) -> str:
    with autocast(device):
        sample = model.generate(b"\n\nThe ", SAMPLE_BYTES, seed=seed).decode(errors="replace")
    (folder / "sample.txt").write_text(sample)
    return sample.strip()


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    if world_size() == options.context_parallel == 1:
        return run(options, choose_device(options.device), None)
    if is_started():
        return run_together(options)
    device = choose_device(options.device)
    count = options.context_parallel
    if device.type == "cuda" and torch.cuda.device_count() < count:
        raise SystemExit(
            f"--context-parallel: must be at most the {torch.cuda.device_count()} GPUs, or with "
            f"--device cpu, got {count}"
        )
    check_ranks(options, choose_preset(options, device), count)
    return start_processes(main, sys.argv[1:] if arguments is None else arguments, count)


def run_together(options: argparse.Namespace) -> int:
    """What each of the started processes does."""
    with ExitStack() as stack:
        if os.environ["RANK"] != "0":
            stack.enter_context(redirect_stdout(stack.enter_context(open(os.devnull, "w"))))
        device = choose_device(options.device)
        check_ranks(options, choose_preset(options, device), world_size())
        ranks = stack.enter_context(
            Ranks.joined(options.context_parallel, options.cp_scheme, device)
        )
        print(f"{ranks}, scheme {options.cp_scheme}")
        return run(options, device, ranks)


def run(options: argparse.Namespace, device: torch.device, ranks: Ranks | None) -> int:
    preset = choose_preset(options, device)
    options.out.mkdir(parents=True, exist_ok=True)
    text = options.text.read_bytes() if options.text else manual_text()
    sizes = preset.model.seqlen, preset.batch_size
    corpus = (
        Corpus(text, *sizes, device)
        if ranks is None
        else ShardedCorpus(text, *sizes, device, ranks)
    )
    names = ["ours", "sdpa", "sdpa-math"] if options.compare_curves else [options.attention]
    seconds = math.inf if options.compare_curves else options.seconds

    model = new_model(preset, names[0], device, options.seed)
    size = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    print(
        f"{size:.1f} M parameters, head dim {preset.model.head_dim}, {len(text) / 1e6:.2f} MB of "
        f"text, {preset.batch_size} x {preset.model.seqlen} bytes a step"
    )
    curves: dict[str, Curve] = {}
    for name in names:
        if name != names[0]:
            model = new_model(preset, name, device, options.seed)
        with model.using(ATTENTIONS[name] if ranks is None else ranks.attention):
            curves[name] = train(
                model,
                corpus,
                preset,
                title=name,
                seed=options.seed + 1,
                seconds=seconds,
                compiler=torch.compile if options.compile else None,
                ranks=ranks,
            )
        report(name, curves[name])

    if ranks is None or ranks.is_first:
        save_model(model, options.out / "model.pt")
        curve = save_curves(curves, options.out)
        print(f"sample: {save_sample(model, device, options.seed, options.out)}")
        print(f"loss curve: {curve}")

    tokens, targets = next(corpus.whole_batches("train", seed=options.seed + 2))
    sequences = COMPARED_SEQUENCES * (1 if ranks is None else ranks.data_ranks)
    length = compared_tokens(preset.model.seqlen, options.context_parallel)
    compared = slice(sequences), slice(length)
    agreements: list[StepAgreement | CurveAgreement] = [
        compare_step(model, tokens[compared], targets[compared], ranks)
    ]
    if options.compare_curves:
        agreements.append(compare_curves(*(curves[name] for name in names)))
    for agreement in agreements:
        print(agreement)
    return 0 if all(agreement.agrees for agreement in agreements) else 1


def report(name: str, curve: Curve) -> None:
    used_cuda = torch.cuda.is_initialized()
    peak = f", {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB" if used_cuda else ""
    print(
        f"{name}: {len(curve.train)} steps in {curve.seconds:.1f} s, "
        f"{curve.tokens / curve.seconds:,.0f} tokens/s{peak}; loss {curve.train[0]:.3f} -> "
        f"{curve.train[-1]:.3f}, validation {curve.validation[-1][1]:.3f} nats per byte"
    )


if __name__ == "__main__":
    sys.exit(main())
