"""Trains a diffusion transformer that draws images in one step, by derivatives in forward mode.

    python examples/consistency.py                  # sizes for this machine
    python examples/consistency.py --compare        # first both attentions on the same steps
    python examples/consistency.py --image-size 128 --batch-size 4 --steps 20   # 4,096 tokens

Images are coloured shapes that the example draws itself. The objective is MeanFlow's (Geng et al.,
2025): torch.func.jvp through the whole network, attention included, gives the derivative along the
path from noise to image, and the loss is differentiated in reverse mode. Writes a grid of images
drawn in one step to --picture. Exits with status 1 where --compare finds that the loss or a
gradient disagrees with torch's scaled_dot_product_attention beyond rounding.
"""

from __future__ import annotations

import argparse
import copy
import os
import struct
import sys
import time
import zlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path

# Read when torch loads: see train_gpt.py.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from agreement import WIDER, Step, StepAgreement, judge
from diffusion import (
    ATTENTIONS,
    CHANNELS,
    Batch,
    DiffusionConfig,
    DiffusionTransformer,
    adaptive_loss,
    draw_times,
    squared_errors,
)
from shapes import KINDS, NUMBERS, draw
from torch import Tensor
from train_gpt import choose_device, positive_int
from training import learning_rate_factor, progress_bar

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# The reference in higher precision and separate matrix products take the memory.
COMPARED_STEPS, COMPARED_IMAGES = 5, 4
WARM_UP_STEPS = 3  # that are not timed
SAMPLES = 8  # of each kind
PICTURE_SIDE = 64  # least pixels of an image's side in the picture


@dataclass(frozen=True)
class DiffusionPreset:
    model: DiffusionConfig
    batch_size: int
    steps: int
    learning_rate: float


PRESETS = {
    # Some CPU-minutes: 0.5 million parameters, head dim 32, 36 tokens.
    "tiny": DiffusionPreset(DiffusionConfig(3, 96, 3, 12, 2, len(KINDS)), 32, 1500, 2e-3),
    # Minutes on a data-centre GPU: 21 million parameters, head dim 64, 256 tokens.
    "small": DiffusionPreset(DiffusionConfig(8, 384, 6, 32, 2, len(KINDS)), 256, 4000, 1e-3),
}


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--preset", choices=PRESETS, help="model size; default: small on CUDA, tiny on the CPU"
    )
    parser.add_argument("--steps", type=positive_int, help="training steps; default: the preset's")
    parser.add_argument("--batch-size", type=positive_int, help="images per step")
    parser.add_argument("--image-size", type=positive_int, help="pixels of an image's side")
    parser.add_argument(
        "--patch-size", type=positive_int, help="pixels of a token's side (default: 2)"
    )
    parser.add_argument("--attention", choices=ATTENTIONS, default="flash")
    parser.add_argument(
        "--compare",
        action="store_true",
        help=f"before training, {COMPARED_STEPS} steps with flash and math from the same weights: "
        "prints both losses and how they differ",
    )
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    parser.add_argument(
        "--cuda-graph",
        action="store_true",
        help="capture a step once and replay it: the host takes longer over a step in forward mode "
        "than the GPU",
    )
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        help="of matrix products and attention, over fp32 weights; default: bf16 on CUDA, fp32 on "
        "the CPU. Attention by flash has bf16 alone on CUDA",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--picture", type=png_path, default="build/demo/samples.png", help="default: %(default)s"
    )
    return parser.parse_args(arguments)


def png_path(text: str) -> Path:
    if (path := Path(text)).suffix.lower() != ".png":
        raise argparse.ArgumentTypeError(f"must end in .png, got {text}")
    return path


def choose_preset(options: argparse.Namespace, device: torch.device) -> DiffusionPreset:
    preset = PRESETS[options.preset or ("small" if device.type == "cuda" else "tiny")]
    model = replace(
        preset.model,
        image_size=options.image_size or preset.model.image_size,
        patch_size=options.patch_size or preset.model.patch_size,
    )
    if model.image_size % model.patch_size:
        raise SystemExit(
            f"--image-size: must be a multiple of --patch-size {model.patch_size}, "
            f"got {model.image_size}"
        )
    return replace(
        preset,
        model=model,
        batch_size=options.batch_size or preset.batch_size,
        steps=options.steps or preset.steps,
    )


def choose_dtype(options: argparse.Namespace, device: torch.device) -> torch.dtype:
    name = options.dtype or ("bf16" if device.type == "cuda" else "fp32")
    if (
        name == "fp32"
        and device.type == "cuda"
        and (options.attention == "flash" or options.compare)
    ):
        raise SystemExit("--dtype: must be bf16 for attention by flash on CUDA, got fp32")
    return DTYPES[name]


def trainer_class(options: argparse.Namespace, device: torch.device) -> type[Trainer]:
    if options.cuda_graph and device.type != "cuda":
        raise SystemExit(f"--cuda-graph: must be with --device cuda, got {device.type}")
    return CapturedTrainer if options.cuda_graph else Trainer


def autocast(device: torch.device, dtype: torch.dtype) -> AbstractContextManager:
    """Matrix products and attention in this dtype."""
    return nullcontext() if dtype == torch.float32 else torch.autocast(device.type, dtype)


def batches(preset: DiffusionPreset, device: torch.device, seed: int) -> Iterator[Batch]:
    """Endless: a function of the sizes, the device and the seed."""
    generator = torch.Generator(device).manual_seed(seed)
    count, size = preset.batch_size, preset.model.image_size
    while True:
        kinds = torch.randint(len(KINDS), (count,), generator=generator, device=device)
        numbers = torch.rand(count, NUMBERS, generator=generator, device=device)
        images = draw(kinds, numbers, size)
        noise = torch.randn(images.shape, generator=generator, device=device)
        yield Batch(images, kinds, noise, *draw_times(count, generator))


def new_model(
    preset: DiffusionPreset, attention: str, device: torch.device, seed: int
) -> DiffusionTransformer:
    """The same weights for the same seed, on every device and for every attention."""
    torch.manual_seed(seed)
    return DiffusionTransformer(preset.model, ATTENTIONS[attention]).to(device)


class Trainer:
    """Steps of one model. All are on a schedule of the preset's number of them."""

    def __init__(
        self, model: DiffusionTransformer, preset: DiffusionPreset, dtype: torch.dtype
    ) -> None:
        self.model, self.preset, self.dtype = model, preset, dtype
        self.device = model.embed.weight.device
        is_cuda = self.device.type == "cuda"
        self.learning_rate = torch.zeros((), device=self.device)
        self.optimizer = torch.optim.AdamW(
            model.parameters(),
            lr=self.learning_rate,
            betas=(0.9, 0.95),
            weight_decay=0.0,
            fused=is_cuda,
            capturable=is_cuda,
        )
        self.step_number = 0

    def step(self, batch: Batch) -> Tensor:
        """The mean squared error before the step, on the device."""
        factor = learning_rate_factor(self.step_number, self.preset.steps, 0.0)
        self.learning_rate.fill_(self.preset.learning_rate * factor)
        error = self.update(batch)
        self.step_number += 1
        return error

    def update(self, batch: Batch) -> Tensor:
        """What a step does on the device."""
        with autocast(self.device, self.dtype):
            errors = squared_errors(self.model, batch)
        self.optimizer.zero_grad()
        adaptive_loss(errors).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return errors.detach().mean()


class CapturedTrainer(Trainer):
    """Captures a step in a CUDA graph and replays it, on CUDA alone."""

    EAGER_STEPS = 2  # first ones: libraries make their handles, and the optimizer its state
    graph: torch.cuda.CUDAGraph | None = None

    def update(self, batch: Batch) -> Tensor:
        if self.step_number < self.EAGER_STEPS:
            return self.update_beside(batch)
        if self.graph is None:
            self.batch, self.graph = Batch(*(x.clone() for x in batch)), torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.error = super().update(self.batch)
        for captured, given in zip(self.batch, batch, strict=True):
            captured.copy_(given)
        self.graph.replay()
        return self.error.clone()

    def update_beside(self, batch: Batch) -> Tensor:
        """On a stream of its own, as what is captured later needs."""
        stream, current = torch.cuda.Stream(), torch.cuda.current_stream()
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            error = super().update(batch)
        current.wait_stream(stream)
        return error


@dataclass
class DiffusionCurve:
    """What a training run left behind. losses: mean squared errors, of each step before it;
    step_seconds: of a step, as a mean over those that are timed.
    """

    losses: list[float] = field(default_factory=list)
    step_seconds: float = 0.0


def train(
    trainer: Trainer, data: Iterator[Batch], *, title: str, tokens_per_step: int
) -> DiffusionCurve:
    """All the preset's steps."""
    steps, device = trainer.preset.steps, trainer.device
    warm_up = min(WARM_UP_STEPS, steps - 1)
    read_every = 10 if device.type == "cuda" else 1  # reading a loss waits for the GPU
    curve, unread = DiffusionCurve(), []
    start = time.perf_counter()
    with progress_bar(title, steps) as show:
        for step, batch in enumerate(islice(data, steps), start=1):
            unread.append(trainer.step(batch))
            if step % read_every == 0 or step in (steps, warm_up):
                curve.losses += torch.stack(unread).tolist()
                unread.clear()
                if step == warm_up:
                    start = time.perf_counter()
                    continue
                timed = step - warm_up if step > warm_up else step
                curve.step_seconds = (time.perf_counter() - start) / timed
                show.step(step, curve.losses[-1], tokens_per_step / curve.step_seconds)
    return curve


# -- both attentions -----------------------------------------------------------------------------


def compare(
    trainer: Trainer, data: Iterator[Batch], count: int = COMPARED_STEPS
) -> list[StepAgreement]:
    """Of the first steps, each from the weights that the one before has left: prints both losses
    and how they, and gradients, differ.
    """
    found = []
    for number, batch in enumerate(islice(data, count), start=1):
        agreement = compare_step(trainer.model, batch.part(COMPARED_IMAGES), trainer.dtype)
        print(
            f"step {number}: loss flash {agreement.loss_ours:.7f}, math {agreement.loss_sdpa:.7f}, "
            f"relative difference {agreement.loss_difference:.1e}; gradients differ by at most "
            f"{agreement.gradient_difference:.1e} ({agreement.worst_parameter}; from "
            f"{agreement.reference}: flash {agreement.error_ours:.1e}, math "
            f"{agreement.error_sdpa:.1e})"
        )
        found.append(agreement)
        trainer.step(batch)
    verdict = "agree" if all(x.agrees for x in found) else "DISAGREE beyond rounding"
    print(f"{len(found)} steps of flash and math {verdict}")
    return found


def compare_step(model: DiffusionTransformer, batch: Batch, dtype: torch.dtype) -> StepAgreement:
    """Loss and gradients with both attentions, held against math in WIDER precision."""
    wider = WIDER[dtype]
    exact, in_wider = copy.deepcopy(model).to(wider), batch.to(wider)
    steps = [step_gradients(model, name, batch, dtype) for name in ("flash", "math")]
    return judge(*steps, step_gradients(exact, "math", in_wider, torch.float32), dtype)


def step_gradients(
    model: DiffusionTransformer, attention: str, batch: Batch, autocast_dtype: torch.dtype
) -> Step:
    """The mean squared error, and the gradient of what is minimised by every parameter."""
    names, parameters = zip(*model.named_parameters(), strict=True)
    with model.using(ATTENTIONS[attention]), autocast(batch.images.device, autocast_dtype):
        errors = squared_errors(model, batch)
    gradients = torch.autograd.grad(adaptive_loss(errors), parameters)
    return errors.double().mean().item(), dict(zip(names, gradients, strict=True))


# -- what it draws -------------------------------------------------------------------------------


def sample(model: DiffusionTransformer, dtype: torch.dtype, seed: int) -> Tensor:
    """(kinds, SAMPLES, 3, image_size, image_size), drawn in one step each."""
    config, device = model.config, model.embed.weight.device
    generator = torch.Generator(device).manual_seed(seed)
    kinds = torch.arange(config.kinds, device=device).repeat_interleave(SAMPLES)
    shape = (len(kinds), CHANNELS, config.image_size, config.image_size)
    noise = torch.randn(shape, generator=generator, device=device)
    with autocast(device, dtype):
        return model.sample(noise, kinds).unflatten(0, (config.kinds, SAMPLES))


def save_picture(images: Tensor, path: Path) -> None:
    """Images (rows, columns, 3, H, W) in [-1, 1] as a grid."""
    larger = max(1, PICTURE_SIDE // images.shape[-1])
    framed = torch.nn.functional.pad(images.float().clamp(-1, 1), (1, 1, 1, 1), value=1.0)
    grid = framed.permute(0, 3, 1, 4, 2).flatten(2, 3).flatten(0, 1)
    grid = grid.repeat_interleave(larger, 0).repeat_interleave(larger, 1)
    path.write_bytes(png((grid * 127.5 + 127.5).to(torch.uint8)))


def png(pixels: Tensor) -> bytes:
    """The file of pixels (H, W, 3) uint8."""

    def part(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    height, width, _ = pixels.shape
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)  # 8 bits of red, green and blue
    rows = torch.nn.functional.pad(pixels.flatten(1), (1, 0))  # each begins with its filter, none
    data = zlib.compress(bytes(rows.flatten().tolist()))
    parts = part(b"IHDR", header), part(b"IDAT", data), part(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    device = choose_device(options.device)
    preset, dtype = choose_preset(options, device), choose_dtype(options, device)
    trainer = trainer_class(options, device)
    options.picture.parent.mkdir(parents=True, exist_ok=True)
    model = new_model(preset, options.attention, device, options.seed)
    size = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    print(
        f"{size:.1f} M parameters, head dim {preset.model.head_dim}, {preset.batch_size} x "
        f"{preset.model.seqlen:,} tokens a step, {str(dtype).removeprefix('torch.')}"
    )
    agrees = True
    if options.compare:
        compared = new_model(preset, options.attention, device, options.seed)
        first = batches(preset, device, options.seed + 1)
        agrees = all(x.agrees for x in compare(Trainer(compared, preset, dtype), first))

    tokens = preset.batch_size * preset.model.seqlen
    last = max(1, preset.steps // 10)
    curve = train(
        trainer(model, preset, dtype),
        batches(preset, device, options.seed + 1),
        title=options.attention,
        tokens_per_step=tokens,
    )
    peak = f", {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB" if device.type == "cuda" else ""
    print(
        f"{options.attention}: {len(curve.losses)} steps, {curve.step_seconds * 1e3:.1f} ms per "
        f"step, {tokens / curve.step_seconds:,.0f} tokens/s{peak}; loss {curve.losses[0]:.3f} -> "
        f"{sum(curve.losses[-last:]) / last:.3f}, mean of the last {last}"
    )
    save_picture(sample(model, dtype, options.seed + 2), options.picture)
    print(f"images drawn in one step, a row of each kind ({', '.join(KINDS)}): {options.picture}")
    return 0 if agrees else 1


if __name__ == "__main__":
    sys.exit(main())
