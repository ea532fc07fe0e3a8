"""Generates tokens with multi-head latent attention (DeepSeek-AI, "DeepSeek-V2", 2024, 2.1): the
prompts without absorption, of head dims (192, 128), and then token by token, absorbed, over a paged
cache of 512 latent and 64 rotary columns a token: once over all keys, and once over lists of some
(DeepSeek-AI, "DeepSeek-V3.2", 2025), which here are the first and the last ones.

    python examples/latent.py
    python examples/latent.py --heads 128 --layers 4 --steps 100 --keys 64

Weights are random. The logits of every step are compared with those of plain torch on the whole
sequence; the exit status is 1 where they are further apart than rounding explains.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from model import normalise
from torch import Tensor, nn
from train_gpt import choose_device, positive_int

from flash_attn_cuda import flash_attn_func, flash_attn_with_kvcache
from flash_attn_cuda.rotary import apply_rotary_emb

NOPE, ROPE, VALUE, LATENT = 128, 64, 128, 512  # columns of a head, and of a token's cache
SCALE = (NOPE + ROPE) ** -0.5
PAGE_SIZE = 64
VOCABULARY = 1000
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # (q, k, v), causal
TOLERANCE = {"cpu": 1e-4, "cuda": 5e-2}  # of the largest logit: fp32 and bf16


@dataclass
class Cache:
    """Pages of one layer, and what stands in them."""

    pages: Tensor  # (num_pages, page_size, 1, LATENT + ROPE)
    block_table: Tensor  # (batch, pages of a sequence)
    filled: Tensor  # (batch,)

    @classmethod
    def empty(cls, batch: int, capacity: int, like: Tensor) -> Cache:
        count = math.ceil(capacity / PAGE_SIZE)
        order = torch.randperm(batch * count, device=like.device).int()
        pages = like.new_zeros(batch * count, PAGE_SIZE, 1, LATENT + ROPE)
        filled = torch.zeros(batch, dtype=torch.int32, device=like.device)
        return cls(pages, order.view(batch, count), filled)

    def write(self, rows: Tensor) -> None:
        """rows: (batch, seqlen, LATENT + ROPE), the first ones of every sequence."""
        positions = torch.arange(rows.shape[1], device=rows.device)
        pages = self.block_table[:, positions // PAGE_SIZE].long()
        self.pages[pages, positions % PAGE_SIZE, 0] = rows
        self.filled += rows.shape[1]


class LatentAttention(nn.Module):
    """A token's keys and values of all heads are products of one latent row."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.queries = nn.Linear(width, heads * (NOPE + ROPE), bias=False)
        self.down = nn.Linear(width, LATENT + ROPE, bias=False)
        self.up_keys = nn.Parameter(torch.randn(heads, LATENT, NOPE) * LATENT**-0.5)
        self.up_values = nn.Parameter(torch.randn(heads, LATENT, VALUE) * LATENT**-0.5)
        self.project = nn.Linear(heads * VALUE, width, bias=False)
        nn.init.normal_(self.project.weight, std=4.0 * width**-0.5)  # so that attention has its say

    def split(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q of a head, its rotary columns, latent rows, and theirs, not rotated."""
        q, q_rope = self.queries(x).unflatten(-1, (self.heads, -1)).split((NOPE, ROPE), -1)
        latent, k_rope = self.down(x).split((LATENT, ROPE), -1)
        return q, q_rope, normalise(latent), k_rope[..., None, :]

    def whole(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        attend: Callable[..., Tensor],
        cache: Cache | None,
    ) -> Tensor:
        """Attention of whole sequences, with keys and values made of latent rows."""
        q, q_rope, latent, k_rope = self.split(x)
        q_rope, k_rope = (apply_rotary_emb(y, cos, sin) for y in (q_rope, k_rope))
        k = torch.einsum("bsc,hcd->bshd", latent, self.up_keys)
        v = torch.einsum("bsc,hcd->bshd", latent, self.up_values)
        if cache is not None:
            cache.write(torch.cat([latent, k_rope[..., 0, :]], -1))
        q = torch.cat([q, q_rope], -1)
        k = torch.cat([k, k_rope.expand_as(q_rope)], -1)
        return self.project(attend(q, k, v).flatten(2))

    def step(self, x: Tensor, cos: Tensor, sin: Tensor, cache: Cache, keys: int) -> Tensor:
        """The next token: queries and outputs go through what would make keys and values. keys:
        that its list names, 0 for all.
        """
        q, q_rope, latent, k_rope = self.split(x)
        out = flash_attn_with_kvcache(
            q_rope,
            cache.pages[..., LATENT:],
            cache.pages[..., :LATENT],
            k=k_rope,
            v=latent[..., None, :],
            rotary_cos=cos,
            rotary_sin=sin,
            rotary_interleaved=False,
            qv=torch.einsum("bshd,hcd->bshc", q, self.up_keys),
            cache_seqlens=cache.filled,
            block_table=cache.block_table,
            softmax_scale=SCALE,
            causal=True,
            key_lists=listed_keys(cache.filled, keys) if keys > 0 else None,
        )
        cache.filled += 1
        return self.project(torch.einsum("bshc,hcd->bshd", out, self.up_values).flatten(2))


def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return flash_attn_func(q, k, v, softmax_scale=SCALE, causal=True)


def parts_of_list(keys: int) -> tuple[int, int]:
    """How many of the first and of the last keys a list names."""
    return keys // 4, keys - keys // 4


def listed_keys(position: Tensor, keys: int) -> Tensor:
    """(batch, 1, 1, keys), int32, of queries at these positions; no key twice, -1 for none."""
    first, last = (torch.arange(n, device=position.device) for n in parts_of_list(keys))
    recent = position[:, None] - last
    recent = recent.masked_fill(recent < len(first), -1)
    first = first.where(first <= position[:, None], -1)
    return torch.cat([first, recent], -1)[:, None, None].int()


def plain(q: Tensor, k: Tensor, v: Tensor, prompt: int, keys: int) -> Tensor:
    """Rows behind the prompt see what their lists name, all keys if there are none."""
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k).float() * SCALE
    column = torch.arange(q.shape[1], device=q.device)
    row = column[:, None]
    hidden = column > row
    if keys > 0:
        first, last = parts_of_list(keys)
        hidden |= (row >= prompt) & (column >= first) & (row - column >= last)
    weights = scores.masked_fill(hidden, -math.inf).softmax(-1).to(v.dtype)
    return torch.einsum("bhqk,bkhd->bqhd", weights, v)


class Model(nn.Module):
    def __init__(self, layers: int, width: int, heads: int, capacity: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.layers = nn.ModuleList(LatentAttention(width, heads) for _ in range(layers))
        frequencies = 1e4 ** -torch.linspace(0, 1, ROPE // 2)
        angles = torch.arange(capacity)[:, None] * frequencies
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def logits(self, x: Tensor) -> Tensor:
        return self.head(normalise(x[:, -1]))

    def whole(self, tokens: Tensor, attend: Attend, caches: list[Cache] | None = None) -> Tensor:
        x = self.embedding(tokens)
        for layer, cache in zip(self.layers, caches or [None] * len(self.layers), strict=True):
            x = x + layer.whole(normalise(x), self.cos, self.sin, attend, cache)
        return self.logits(x)

    def step(self, tokens: Tensor, caches: list[Cache], keys: int) -> Tensor:
        x = self.embedding(tokens)
        for layer, cache in zip(self.layers, caches, strict=True):
            x = x + layer.step(normalise(x), self.cos, self.sin, cache, keys)
        return self.logits(x)


@torch.no_grad()
def generate(model: Model, prompts: Tensor, steps: int, keys: int) -> tuple[Tensor, float]:
    """The most likely tokens, and how far their logits are from plain torch's, of the largest."""
    capacity = prompts.shape[1] + steps
    attend = partial(plain, prompt=prompts.shape[1], keys=keys)
    caches = [Cache.empty(len(prompts), capacity, model.embedding.weight) for _ in model.layers]
    tokens, worst = prompts, 0.0
    logits = model.whole(tokens, ours, caches)
    for _ in range(steps):
        exact = model.whole(tokens, attend)
        worst = max(worst, ((logits - exact).abs().max() / exact.abs().max()).item())
        chosen = logits.argmax(-1, keepdim=True)
        tokens = torch.cat([tokens, chosen], -1)
        logits = model.step(chosen, caches, keys)
    return tokens, worst


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    sizes = {"heads": 16, "layers": 2, "width": 512, "batch": 4, "steps": 20, "keys": 32}
    for name, value in sizes.items():
        parser.add_argument(f"--{name}", type=positive_int, default=value, help="%(default)s")
    parser.add_argument("--prompt-length", type=positive_int, default=100, help="%(default)s")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    device = choose_device(options.device)
    torch.manual_seed(0)
    capacity = options.prompt_length + options.steps
    model = Model(options.layers, options.width, options.heads, capacity)
    model = model.to(device, torch.float32 if device.type == "cpu" else torch.bfloat16)
    shape = (options.batch, options.prompt_length)
    prompts = torch.randint(VOCABULARY, shape, device=device)
    held = 2 * options.heads * (NOPE + ROPE) / (LATENT + ROPE)
    print(f"a token's cache is {held:.0f} times smaller than keys and values of all heads")
    is_close = True
    for keys in (0, options.keys):
        tokens, worst = generate(model, prompts, options.steps, keys)
        is_close &= worst < TOLERANCE[device.type]
        seen = f"lists of {keys} keys" if keys > 0 else "all keys"
        print(f"{options.steps} tokens of {options.batch} sequences, over {seen}, such as")
        print(f"  {tokens[0, -5:].tolist()}: logits differ from plain torch's by {worst:.1e}")
    return int(not is_close)


if __name__ == "__main__":
    sys.exit(main())
