"""Training speed of a model with Gemma 4's layers on one attention or another, end to end.

    python -m benchmarks.suites.gemma --json gemma.json     # 8,192 bytes of context
    python -m benchmarks.suites.gemma --attentions ours flex+sdpa flex+ours ours+sdpa

Five layers of head dim 256 with a window are followed by a global one of head dim 512, which turns
a quarter of its columns by their position. Both are causal, have grouped heads and no softmax scale
but their gains. The MLP, the training loop and the turns are those of benchmarks/suites/train.py.

An attention is a name, or two for the two kinds of layers, as in flex+sdpa:

    ours            flash_attn_cuda
    sdpa            torch's, with the kernel that torch picks and enable_gqa
    sdpa-repeated   the same, with key heads repeated before: more of torch's kernels take that
    flex            torch's FlexAttention, compiled, with a mask in blocks; on CUDA alone

torch's best is the fastest row without ours.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# It makes examples/ known.
from benchmarks.peers.backends import compiled_flex_attention
from benchmarks.suites.train import (
    measure,
    parse_options,
    report,
    run,
    with_options,
)

from model import GPT, MLP, Attention, GPTConfig, normalise, rotary_tables, rotate  # isort: skip
from training import Preset  # isort: skip


@dataclass(frozen=True)
class Kind:
    """What layers of a kind have in common; all of them have GemmaConfig.heads query heads."""

    heads_k: int
    head_dim: int
    window: int | None  # keys that a query sees, its own included; None: all before it
    rotary_base: float
    rotary_part: float = 1.0  # of the columns


@dataclass(frozen=True)
class GemmaConfig(GPTConfig):
    """`period` layers are sliding ones and, as the last, a global one."""

    sliding: Kind = Kind(4, 256, 1024, 10_000.0)
    whole: Kind = Kind(2, 512, None, 1_000_000.0, 0.25)
    period: int = 6

    def kind(self, layer: int) -> Kind:
        return self.sliding if (layer + 1) % self.period else self.whole


PRESETS = {
    # 0.56 billion parameters.
    "12-layers": Preset(GemmaConfig(layers=12, width=2048, heads=8, seqlen=8192), 1, 19, 3e-4),
    "tiny": Preset(
        GemmaConfig(
            *(6, 32, 4, 64),
            sliding=replace(GemmaConfig.sliding, heads_k=2, head_dim=16, window=16),
            whole=replace(GemmaConfig.whole, heads_k=1, head_dim=32),
        ),
        *(2, 3, 6e-3),
    ),
}


# Attentions


def our_attention(kind: Kind, seqlen: int, device: torch.device) -> Attention:
    from flash_attn_cuda import flash_attn_func

    window = (-1 if kind.window is None else kind.window - 1, -1)
    return partial(flash_attn_func, causal=True, softmax_scale=1.0, window_size=window)


def sdpa_attention(
    kind: Kind, seqlen: int, device: torch.device, *, repeats: bool = False
) -> Attention:
    mask = None
    if kind.window is not None:
        pairs = torch.ones(seqlen, seqlen, dtype=torch.bool, device=device)
        mask = pairs.tril() & pairs.triu(1 - kind.window)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if repeats:
            k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        options: dict[str, Any] = {"is_causal": True} if mask is None else {"attn_mask": mask}
        options["enable_gqa"] = not repeats
        return F.scaled_dot_product_attention(q, k, v, scale=1.0, **options).transpose(1, 2)

    return attend


def flex_attention(kind: Kind, seqlen: int, device: torch.device) -> Attention:
    mask = flex_mask(kind.window, seqlen, device)
    attention = compiled_flex_attention()

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return attention(q, k, v, block_mask=mask, scale=1.0, enable_gqa=True).transpose(1, 2)

    return attend


@cache  # a new function would be compiled anew
def flex_mask(window: int | None, seqlen: int, device: torch.device) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    def is_visible(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        is_causal = key <= query
        return is_causal if window is None else is_causal & (query - key < window)

    return create_block_mask(is_visible, None, None, seqlen, seqlen, device=device)


ATTENTIONS: dict[str, Callable[[Kind, int, torch.device], Attention]] = {
    "ours": our_attention,
    "sdpa": sdpa_attention,
    "sdpa-repeated": partial(sdpa_attention, repeats=True),
    "flex": flex_attention,
}


# The model


class SelfAttention(nn.Module):
    def __init__(self, config: GemmaConfig, kind: Kind, attention: Attention) -> None:
        super().__init__()
        self.attention, self.head_dim = attention, kind.head_dim
        self.heads = (config.heads, kind.heads_k, kind.heads_k)
        self.qkv = nn.Linear(config.width, sum(self.heads) * kind.head_dim, bias=False)
        self.project = nn.Linear(config.heads * kind.head_dim, config.width, bias=False)
        self.gains = nn.Parameter(torch.ones(2, kind.head_dim))  # of queries and keys

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (-1, self.head_dim)).split(self.heads, dim=-2)
        q, k = (
            rotate(normalise(t) * gain, cos, sin).to(v.dtype)
            for t, gain in zip((q, k), self.gains, strict=True)
        )
        return self.project(self.attention(q, k, normalise(v).to(v.dtype)).flatten(2))


class Block(nn.Module):
    def __init__(self, config: GemmaConfig, kind: Kind, attention: Attention) -> None:
        super().__init__()
        self.attention = SelfAttention(config, kind, attention)
        self.mlp = MLP(config)
        cos, sin = rotary_tables(config.seqlen, kind.head_dim, kind.rotary_base)
        first_still = round(kind.rotary_part * cos.shape[-1])
        cos[..., first_still:], sin[..., first_still:] = 1.0, 0.0
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(normalise(x), self.cos, self.sin)
        return x + self.mlp(normalise(x))


class Gemma(GPT):
    """The example's GPT with other layers; `attentions`: of sliding and of global layers."""

    def __init__(self, config: GemmaConfig, attentions: dict[Kind, Attention]) -> None:
        nn.Module.__init__(self)
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.width)
        kinds = [config.kind(layer) for layer in range(config.layers)]
        self.blocks = nn.ModuleList(Block(config, kind, attentions[kind]) for kind in kinds)
        self.initialise()
        for block in self.blocks:
            nn.init.constant_(block.attention.gains, block.attention.head_dim**-0.25)

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        x = normalise(self.embedding(tokens))
        for block in self.blocks:
            x = block(x)
        return F.linear(normalise(x), self.embedding.weight)


def new_gemma(config: GemmaConfig, attention: str, device: torch.device) -> Gemma:
    kinds = (config.sliding, config.whole)
    attentions = {
        kind: ATTENTIONS[name](kind, config.seqlen, device)
        for kind, name in zip(kinds, names_of(attention), strict=True)
    }
    with device:  # where half a billion weights take no time
        return Gemma(config, attentions)


# The program


def names_of(attention: str) -> tuple[str, str]:
    """Of an option's value: the attention of sliding layers, and that of global ones."""
    sliding, plus, whole = attention.partition("+")
    return sliding, whole if plus else sliding


def attention_name(text: str) -> str:
    if not set(names_of(text)) <= set(ATTENTIONS):
        raise argparse.ArgumentTypeError(
            f"must be one or two of {', '.join(ATTENTIONS)}, joined by +, got {text!r}"
        )
    return text


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", choices=PRESETS, default="12-layers")
    parser.add_argument(
        "--attentions",
        nargs="+",
        type=attention_name,
        default=["ours", "flex+sdpa", "flex+sdpa-repeated", "sdpa", "sdpa-repeated"],
    )
    return parse_options(parser, arguments, batch_size=1)


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    device = torch.device(options.device)
    if device.type != "cuda" and any("flex" in names_of(name) for name in options.attentions):
        raise SystemExit("--attentions: flex trains on CUDA devices only")

    def run_gemma(preset: Preset, attention: str) -> Any:
        return run(partial(new_gemma, preset.model, attention, device), preset, device, attention)

    preset = with_options(PRESETS[options.preset], options)
    rows = measure(options.attentions, preset, options.rounds, run_gemma)
    report("gemma", options, arguments, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
