"""What the error of dq does to training: the example's GPT with biases of keys and values.

    python -m benchmarks.suites.key_bias --json key_bias.json
    python -m benchmarks.suites.key_bias --means 0,0 16,1 --steps 500

Biases are learned. They begin so many standard deviations long, those of keys in the columns that
rotary positions turn least, as where models have learned them. Shown are relative errors of one
step's gradients by weights, against the same step in fp32, of the first weights for all --means.
For the last of them a model is trained on each attention, from the same weights on the same
batches, and gradients are compared again at the weights that fp32 attention reached. Attentions are
accuracy.py's and fp32, torch's plain operations, whose run the losses are held against: what that
of maths differs by is what another rounding does.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean

import torch
from torch import Tensor, nn

from benchmarks.core.feature_tables import Column, Row
from benchmarks.core.row_programs import fill, new_document, status_of
from benchmarks.core.runner import Status
from benchmarks.peers.backends import Backend
from benchmarks.suites.accuracy import CONTENDERS, OTHER_KERNELS, Means, find_contenders, rounded
from benchmarks.suites.train import with_options  # it makes examples/ known
from tests.cases.attention import AttentionCase

from agreement import WIDER  # isort: skip
from model import GPT, Attention, GPTConfig, SelfAttention, normalise, rotate, sdpa_math  # isort: skip
from training import PRESETS, Corpus, Curve, Preset, autocast, manual_text, train  # isort: skip

SCHEMA = 1
BENCHMARK = "key_bias"
EXACT = "fp32"
COMPARED_SEQUENCES = 2
LAST_STEPS = 20  # whose mean is the loss at the end
WEIGHTS = ("wq", "wk", "wv", "key bias", "value bias", "attention.project", "mlp", "embedding")


def short(figure: float) -> str:
    return f"{figure:.1e}"


COLUMNS = (
    Column("means", "group"),
    Column("what", "what"),
    *(Column(name, name, short) for name in WEIGHTS),
    Column("loss", "loss", lambda loss: f"{loss:.4f}"),
    Column("from fp32's", "loss_difference", short),
)


# The model


class BiasedAttention(SelfAttention):
    def __init__(self, config: GPTConfig, attention: Attention) -> None:
        super().__init__(config, attention)
        self.biases = nn.Parameter(torch.empty(2, config.heads, config.head_dim))  # of k and v

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, self.shape).unbind(-2)
        key_bias, value_bias = self.biases
        turned = (rotate(t, cos, sin) for t in (normalise(q), normalise(k) + key_bias))
        tensors = (t.to(v.dtype) for t in (*turned, v + value_bias))
        return self.project(self.attention(*tensors).flatten(2))


class BiasedGPT(GPT):
    def __init__(self, config: GPTConfig, attention: Attention, means: Means) -> None:
        super().__init__(config, attention)
        for block in self.blocks:
            block.attention = BiasedAttention(config, attention)
        self.initialise()
        turned_least = torch.arange(config.head_dim) % (config.head_dim // 2)
        directions = torch.randn(config.layers, 2, config.heads, config.head_dim)
        directions[:, 0] *= turned_least >= 3 * config.head_dim // 8
        directions *= config.head_dim**0.5 / directions.norm(dim=-1, keepdim=True)
        directions *= torch.tensor(means)[:, None, None]
        for block, biases in zip(self.blocks, directions, strict=True):
            block.attention.biases.data.copy_(biases)


def new_model(preset: Preset, means: Means, device: torch.device) -> BiasedGPT:
    torch.manual_seed(0)
    return BiasedGPT(preset.model, sdpa_math, means).to(device)


# Attentions


def exact_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with torch.autocast(q.device.type, enabled=False):
        return sdpa_math(q.float(), k.float(), v.float()).to(q.dtype)


def attention_of(backend: Backend, preset: Preset, device: torch.device) -> Attention:
    config = preset.model
    sizes = (preset.batch_size, config.seqlen, config.seqlen, config.heads, config.heads)
    attend = backend.prepare(
        AttentionCase(*sizes, config.head_dim, causal=True, device=device.type)
    )

    def attention(*tensors: Tensor) -> Tensor:
        with backend.scope():
            return backend.view(attend(*map(backend.view, tensors)))

    return attention


# Gradients


def by_weights(model: BiasedGPT, loss: Tensor) -> dict[str, list[Tensor]]:
    """Gradients of all layers, by WEIGHTS."""
    found: dict[str, list[Tensor]] = defaultdict(list)
    names, parameters = zip(*model.named_parameters(), strict=True)
    for name, gradient in zip(names, torch.autograd.grad(loss, parameters), strict=True):
        if name.endswith("qkv.weight"):
            of_heads = gradient.unflatten(0, model.blocks[0].attention.shape)
            parts = dict(zip(("wq", "wk", "wv"), of_heads.unbind(1), strict=True))
        elif name.endswith("biases"):
            parts = dict(zip(("key bias", "value bias"), gradient, strict=True))
        else:
            parts = {weights: gradient for weights in WEIGHTS if weights in name}
        for weights, part in parts.items():
            found[weights].append(part)
    return found


class GradientErrors:
    """Of one step of a model, against the same step in higher precision."""

    def __init__(self, model: BiasedGPT, tokens: Tensor, targets: Tensor) -> None:
        self.model, self.tokens, self.targets = model, tokens, targets
        self.device = tokens.device
        dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        exact_model = copy.deepcopy(model).to(WIDER[dtype])
        self.exact = by_weights(exact_model, exact_model.loss(tokens, targets))

    def of(self, attention: Attention) -> dict[str, float]:
        with autocast(self.device), self.model.using(attention):
            loss = self.model.loss(self.tokens, self.targets)
        found = by_weights(self.model, loss)
        return {
            weights: rounded(distance(found[weights], self.exact[weights])) for weights in WEIGHTS
        }


def distance(found: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    """|found - exact| / |exact|, 2-norms over all of them."""
    pairs = zip(found, exact, strict=True)
    difference = torch.stack([(x.double() - y).norm() for x, y in pairs]).norm()
    return (difference / torch.stack([x.double().norm() for x in exact]).norm()).item()


# The program


def parse_means(text: str) -> Means:
    try:
        of_keys, of_values = map(int, text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"must be two integers, got {text!r}") from error
    return of_keys, of_values


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--preset", choices=PRESETS, default="small")
    parser.add_argument("--seqlen", type=int, default=1024, help="bytes of context")
    parser.add_argument("--batch-size", type=int, default=16, help="sequences per step")
    parser.add_argument("--steps", type=int, default=200, help="of a run (default: %(default)s)")
    parser.add_argument(
        "--means", nargs="+", type=parse_means, default=[(0, 0), (1, 1), (4, 1)], metavar="K,V"
    )
    parser.add_argument("--without", nargs="+", choices=CONTENDERS, default=[], metavar="NAME")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args(arguments)


def measure_all(
    preset: Preset, pairs: Sequence[Means], attentions: dict[str, Attention], device: torch.device
) -> Iterator[list[Row]]:
    corpus = Corpus(manual_text(), preset.model.seqlen, preset.batch_size, device)
    tokens, targets = (x[:COMPARED_SEQUENCES] for x in next(corpus.whole_batches("train", seed=2)))
    for means in pairs:
        errors = GradientErrors(new_model(preset, means, device), tokens, targets)
        group = "{}, {}".format(*means)
        yield [row_of(group, name, errors.of(attend)) for name, attend in attentions.items()]
    model, exact = trained(preset, means, corpus, device, EXACT, attentions[EXACT])
    errors = GradientErrors(model, tokens, targets)
    group += f" after {preset.steps} steps"
    for name, attend in attentions.items():
        curve = exact
        if name != EXACT:
            _, curve = trained(preset, means, corpus, device, name, attend)
        yield [row_of(group, name, errors.of(attend)) | losses(curve, exact)]


def trained(
    preset: Preset,
    means: Means,
    corpus: Corpus,
    device: torch.device,
    name: str,
    attention: Attention,
) -> tuple[BiasedGPT, Curve]:
    model = new_model(preset, means, device)
    with model.using(attention):
        return model, train(model, corpus, preset, title=name, seed=1)


def row_of(group: str, name: str, errors: dict[str, float]) -> Row:
    return {
        "name": f"{group} {name}",
        "group": group,
        "what": name,
        "status": Status.ok.value,
        "reason": None,
        "targets": [],
        **errors,
    }


def losses(curve: Curve, exact: Curve) -> Row:
    """loss_difference: the mean of what all steps differ by."""
    differences = (abs(x - y) for x, y in zip(curve.train, exact.train, strict=True))
    return {
        "loss": fmean(curve.train[-LAST_STEPS:]),
        "loss_difference": fmean(differences),
        "validation_loss": curve.validation[-1][1],
        "seconds": rounded(curve.seconds),
        "train_losses": [round(loss, 4) for loss in curve.train[9::10]],
    }


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    device = torch.device(options.device)
    preset = with_options(PRESETS[options.preset], options)
    program = "python -m benchmarks.suites.key_bias"
    document = new_document(BENCHMARK, SCHEMA, program, arguments, options)
    missing = document["missing"] = {}
    attentions: dict[str, Attention] = {EXACT: exact_attention}
    for backend in find_contenders(
        options.device, [*options.without, *OTHER_KERNELS], missing.__setitem__
    ):
        attentions[backend.name] = attention_of(backend, preset, device)
    for name, reason in missing.items():
        print(f"without {name}: {reason}", file=sys.stderr)
    rows = measure_all(preset, options.means, attentions, device)
    return status_of(fill(document, rows, COLUMNS, options.json))


if __name__ == "__main__":
    sys.exit(main())
