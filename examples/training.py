"""The training loop of the example: corpus, optimiser, schedule, progress, and the curve left."""

from __future__ import annotations

import math
import pydoc_data.topics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from model import GPT, GPTConfig
from torch import Tensor

if TYPE_CHECKING:
    from processes import Ranks

VALIDATION_BATCHES = 8
MIN_VALIDATION_INTERVAL = 20  # steps
WARMUP_STEPS = 40
FINAL_LEARNING_RATE = 0.1  # of the highest


@dataclass(frozen=True)
class Preset:
    model: GPTConfig
    batch_size: int
    steps: int
    learning_rate: float

    @property
    def tokens_per_step(self) -> int:
        return self.batch_size * self.model.seqlen


PRESETS = {
    # About one CPU-minute: 0.8 million parameters, head dim 32.
    "tiny": Preset(GPTConfig(layers=4, width=128, heads=4, seqlen=128), 8, 500, 6e-3),
    # Seconds on a data-centre GPU: 25 million parameters, head dim 64. More steps learn the default
    # text by heart: the training loss falls on while the validation loss rises.
    "small": Preset(GPTConfig(layers=8, width=512, heads=8, seqlen=1024), 16, 250, 1e-3),
    # 300 million parameters, head dim 128: for a longer --text and for throughput.
    "350m": Preset(GPTConfig(layers=24, width=1024, heads=8, seqlen=2048), 8, 300, 3e-4),
}


@dataclass
class Curve:
    """What one training run left behind; losses in nats per byte."""

    train: list[float] = field(default_factory=list)
    validation: list[tuple[int, float]] = field(default_factory=list)  # (step, loss)
    seconds: float = 0.0
    tokens: int = 0


class Corpus:
    """Text as bytes on one device. The last tenth is for validation; batches are random windows."""

    def __init__(self, text: bytes, seqlen: int, batch_size: int, device: torch.device) -> None:
        shortest = 20 * (seqlen + 1)
        if len(text) < shortest:
            raise ValueError(
                f"text must hold at least {shortest} bytes for seqlen {seqlen}, got {len(text)}"
            )
        data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long().to(device)
        split = len(text) * 9 // 10
        self.splits = {"train": data[:split], "validation": data[split:]}
        self.seqlen, self.batch_size = seqlen, batch_size

    def batches(self, split: str, seed: int) -> Iterator[tuple[Tensor, ...]]:
        """Endless arguments of a model's loss."""
        return self.whole_batches(split, seed)

    def whole_batches(self, split: str, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Endless (tokens, targets), each (batch_size, seqlen): a function of the seed alone."""
        data = self.splits[split]
        generator = torch.Generator().manual_seed(seed)
        window = torch.arange(self.seqlen + 1, device=data.device)
        shape, last_start = (self.batch_size, 1), len(data) - self.seqlen
        while True:
            start = torch.randint(last_start, shape, generator=generator).to(data.device)
            rows = data[start + window]
            yield rows[:, :-1], rows[:, 1:]


def manual_text() -> bytes:
    """The manual behind `help()`: half a megabyte of English and Python in every CPython."""
    topics = pydoc_data.topics.topics
    return "\n\n".join(topics[name] for name in sorted(topics)).encode()


def autocast(device: torch.device) -> AbstractContextManager:
    """bf16 matrix products over fp32 weights on CUDA, plain fp32 on the CPU."""
    return torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else nullcontext()


def device_of(model: GPT) -> torch.device:
    return model.embedding.weight.device


@torch.no_grad()
def validation_loss(model: GPT, corpus: Corpus, ranks: Ranks | None = None) -> float:
    batches = corpus.batches("validation", seed=2)
    with autocast(device_of(model)):
        losses = [model.loss(*next(batches)) for _ in range(VALIDATION_BATCHES)]
    loss = torch.stack(losses).mean()
    return (loss if ranks is None else ranks.mean(loss)).item()


def learning_rate_factor(step: int, steps: int, time_used: float) -> float:
    """Warm-up, then linear decay until the steps or the time (0 to 1) end, whichever is first."""
    warmup = min(1.0, (step + 1) / min(WARMUP_STEPS, steps))
    progress = min(1.0, max(step / steps, time_used))
    return warmup * (1.0 - (1.0 - FINAL_LEARNING_RATE) * progress)


def train(
    model: GPT,
    corpus: Corpus,
    preset: Preset,
    *,
    title: str,
    seed: int,
    seconds: float = math.inf,
    compiler: Callable[[Callable], Callable] | None = None,
    ranks: Ranks | None = None,
) -> Curve:
    """Trains `model` for `preset.steps` steps, or fewer when `seconds` pass first.

    Without a time limit the run is a function of the weights, the corpus and the seed. `compiler`
    (torch.compile) is applied to the loss function. With ranks every one of them calls this, with
    a corpus of its parts; losses and tokens are those of all ranks.
    """
    device = device_of(model)
    is_cuda = device.type == "cuda"
    optimizer = torch.optim.AdamW(
        model.parameters(), betas=(0.9, 0.95), weight_decay=0.1, fused=is_cuda
    )
    loss_function: Callable[..., Tensor] = compiler(model.loss) if compiler else model.loss
    if ranks is not None:
        loss_function = ranks.averaging(model, loss_function)
    batches = corpus.batches("train", seed)
    read_every = 10 if is_cuda else 1  # reading a loss waits for the GPU
    validate_every = max(MIN_VALIDATION_INTERVAL, preset.steps // 5)
    curve, unread, start = Curve(), [], time.perf_counter()
    time_used = 0.0

    with progress_bar(title, preset.steps) as show:
        for step in range(1, preset.steps + 1):
            if math.isfinite(seconds) and (ranks is None or (step - 1) % read_every == 0):
                time_used = (time.perf_counter() - start) / seconds
                time_used = time_used if ranks is None else ranks.of_first(time_used)
            if time_used >= 1.0 and step > 1:
                show.stopped(step - 1, seconds)
                break
            factor = learning_rate_factor(step - 1, preset.steps, time_used)
            optimizer.param_groups[0]["lr"] = preset.learning_rate * factor
            with autocast(device):
                loss = loss_function(*next(batches))
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()

            curve.tokens += preset.tokens_per_step
            unread.append(loss.detach())
            if step % read_every == 0 or step == preset.steps:
                curve.train += read(unread, ranks)
                unread.clear()
                show.step(step, curve.train[-1], curve.tokens / (time.perf_counter() - start))
            if step % validate_every == 0:
                curve.validation.append((step, validation_loss(model, corpus, ranks)))

    curve.train += read(unread, ranks)
    curve.seconds = time.perf_counter() - start
    if not curve.validation or curve.validation[-1][0] != len(curve.train):
        curve.validation.append((len(curve.train), validation_loss(model, corpus, ranks)))
    return curve


def read(losses: list[Tensor], ranks: Ranks | None) -> list[float]:
    """Waits for the device."""
    if not losses:
        return []
    values = torch.stack(losses)
    return (values if ranks is None else ranks.mean(values)).tolist()


class LineProgress:
    """Ten lines per run, for logs and where rich is not installed."""

    def __init__(self, title: str, steps: int) -> None:
        self.title, self.steps, self.next_step = title, steps, 1

    def step(self, step: int, loss: float, tokens_per_second: float) -> None:
        if step >= self.next_step:
            self.next_step = min(self.steps, step + max(1, self.steps // 10))
            print(f"{self.title}  step {step}/{self.steps}  {numbers(loss, tokens_per_second)}")

    def stopped(self, step: int, seconds: float) -> None:
        print(f"{self.title}  stopped at step {step}: {seconds:g} s are over")


class BarProgress:
    """A progress bar on a terminal."""

    def __init__(self, title: str, steps: int, bar) -> None:
        self.bar, self.task = bar, bar.add_task(title, total=steps, numbers="")

    def step(self, step: int, loss: float, tokens_per_second: float) -> None:
        self.bar.update(self.task, completed=step, numbers=numbers(loss, tokens_per_second))

    def stopped(self, step: int, seconds: float) -> None:
        self.bar.update(self.task, total=step)
        self.bar.console.print(f"stopped at step {step}: {seconds:g} s are over")


def numbers(loss: float, tokens_per_second: float) -> str:
    return f"loss {loss:.3f}  {tokens_per_second:,.0f} tokens/s"


@contextmanager
def progress_bar(title: str, steps: int) -> Iterator[LineProgress | BarProgress]:
    try:
        from rich import progress
    except ImportError:
        progress = None
    if progress is None or not sys.stdout.isatty():
        yield LineProgress(title, steps)
        return
    columns = (
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TextColumn("{task.fields[numbers]}"),
        progress.TimeRemainingColumn(),
    )
    with progress.Progress(*columns) as bar:
        yield BarProgress(title, steps, bar)
