"""Trains a small GPT with native sparse attention beside one with full attention, on the same text.

    python examples/sparse.py                 # CPython's own manual, sizes for this machine
    python examples/sparse.py --preset small --steps 500

Every query attends to three things: all keys, compressed (blocks become one key each), the few
blocks that it gives most of that attention to, and the last keys; a gate weighs the results (Yuan
et al., "Native Sparse Attention", 2025). The middle one is `key_lists`.
Exits with status 1 when results or gradients of the three differ from plain torch's beyond
rounding, or the loss is worse than full attention's by more than --tolerance.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from dataclasses import dataclass

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as in train_gpt.py

import torch
from agreement import WIDER
from model import GPT, GPTConfig, normalise, rotate
from torch import Tensor, nn
from train_gpt import choose_device, choose_preset, positive_int
from training import PRESETS, Corpus, autocast, manual_text, train

from flash_attn_cuda import flash_attn_func, masks

QUERY_HEADS_PER_KEY_HEAD = 2


@dataclass(frozen=True)
class Sizes:
    """In keys, but for top_k."""

    block: int  # of a list's entry
    top_k: int  # blocks of a query
    window: int
    compressed: int  # that a compressed key stands for
    stride: int  # from one to the next

    @classmethod
    def of(cls, seqlen: int) -> Sizes:
        block = 64 if seqlen >= 1024 else 16
        top_k = max(3, seqlen // block // 4)
        return cls(block, top_k, 2 * block, compressed=block // 2, stride=block // 4)

    def sees_compressed(self, seqlen: int, count: int, device: torch.device) -> Tensor:
        """(seqlen, count): a query sees what stands for no key behind it."""
        last = torch.arange(count, device=device) * self.stride + self.compressed - 1
        return last <= torch.arange(seqlen, device=device)[:, None]


@dataclass(frozen=True)
class Branches:
    """What three attentions have in common: q (B, S, Hq, D), k and v (B, S, Hk, D), compressed ones
    (B, C, Hk, D), and the blocks that queries chose.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    k_compressed: Tensor
    v_compressed: Tensor
    lists: Tensor
    sizes: Sizes

    def ours(self) -> tuple[Tensor, Tensor, Tensor]:
        sizes, seqlen, count = self.sizes, self.q.shape[1], self.k_compressed.shape[1]
        visible = sizes.sees_compressed(seqlen, count, self.q.device)
        keys, chosen = (self.q, self.k, self.v), {"key_list_block": sizes.block}
        return (
            flash_attn_func(self.q, self.k_compressed, self.v_compressed, attn_mask=visible),
            flash_attn_func(*keys, causal=True, key_lists=self.lists, **chosen),
            flash_attn_func(*keys, causal=True, window_size=(sizes.window - 1, 0)),
        )

    def plain(self) -> tuple[Tensor, Tensor, Tensor]:
        """The same by matrix products, over masks of all pairs."""
        sizes, seqlen, count = self.sizes, self.q.shape[1], self.k_compressed.shape[1]
        place = torch.arange(seqlen, device=self.q.device)
        distance = place[:, None] - place
        block = (place // sizes.block).view(1, 1, 1, -1, 1)
        chosen = (self.lists[:, :, :, None] == block).any(-1).transpose(1, 2)  # (B, Hk, S, S)
        group = self.q.shape[2] // self.k.shape[2]
        chosen = chosen.repeat_interleave(group, 1) & (distance >= 0)
        compressed = self.k_compressed, self.v_compressed
        visible = sizes.sees_compressed(seqlen, count, self.q.device)
        return (
            _plain(self.q, *compressed, visible),
            _plain(self.q, self.k, self.v, chosen),
            _plain(self.q, self.k, self.v, (distance >= 0) & (distance < sizes.window)),
        )


def _plain(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * q.shape[-1] ** -0.5
    weights = scores.masked_fill(~visible, -math.inf).softmax(-1).nan_to_num(0.0)
    return torch.einsum("bhij,bjhd->bihd", weights, v)


class SparseAttention(nn.Module):
    """In the place of model.SelfAttention."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads, self.head_dim = config.heads, config.head_dim
        self.sizes = Sizes.of(config.seqlen)
        key_heads = max(1, config.heads // QUERY_HEADS_PER_KEY_HEAD)
        columns = (config.heads + 2 * key_heads) * config.head_dim
        self.parts = [config.heads, key_heads, key_heads]
        self.qkv = nn.Linear(config.width, columns, bias=False)
        self.gate = nn.Linear(config.width, 3 * config.heads)
        self.project = nn.Linear(config.width, config.width, bias=False)
        # Of keys and of values: weights of the places in a block, of which the mean is the start.
        self.compression = nn.Parameter(
            torch.full((2, self.sizes.compressed, config.head_dim), 1.0 / self.sizes.compressed)
        )
        nn.init.normal_(self.qkv.weight, std=config.width**-0.5)
        nn.init.normal_(self.project.weight, std=0.5 * (2 * config.layers * config.width) ** -0.5)
        nn.init.zeros_(self.gate.weight)
        nn.init.zeros_(self.gate.bias)

    def compress(self, x: Tensor, weights: Tensor) -> Tensor:
        """(B, S, H, D) -> (B, C, H, D)."""
        blocks = x.unfold(1, self.sizes.compressed, self.sizes.stride)  # (B, C, H, D, places)
        return torch.einsum("bchdp,pd->bchd", blocks, weights.to(x.dtype))

    def branches(self, x: Tensor, cos: Tensor, sin: Tensor) -> Branches:
        q, k, v = self.qkv(x).unflatten(-1, (-1, self.head_dim)).split(self.parts, -2)
        q, k = (rotate(normalise(t), cos, sin).to(v.dtype) for t in (q, k))
        k_compressed, v_compressed = map(self.compress, (k, v), self.compression)
        lists = masks.nsa_key_lists(
            q,
            k_compressed,
            k.shape[1],
            key_list_block=self.sizes.block,
            top_k=self.sizes.top_k,
            compression_block=self.sizes.compressed,
            compression_stride=self.sizes.stride,
        )
        return Branches(q, k, v, k_compressed, v_compressed, lists, self.sizes)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        gates = 2 * self.gate(x).sigmoid().unflatten(-1, (self.heads, 3)) / 3
        results = self.branches(x, cos, sin).ours()
        out = sum(gates[..., i, None] * result for i, result in enumerate(results))
        return self.project(out.flatten(2).to(x.dtype))


def sparse_gpt(config: GPTConfig) -> GPT:
    model = GPT(config)
    for block in model.blocks:
        block.attention = SparseAttention(config)
    return model


def largest_error(branches: Branches) -> float:
    """Of results and gradients of the three attentions, against plain ones in higher precision:
    relative, in the 2-norm.
    """
    names = ("q", "k", "v", "k_compressed", "v_compressed")
    wide = WIDER[branches.q.dtype]

    def with_gradients(dtype: torch.dtype, how: str) -> list[Tensor]:
        leaves = {n: getattr(branches, n).detach().to(dtype).requires_grad_() for n in names}
        of = Branches(**leaves, lists=branches.lists, sizes=branches.sizes)
        results = getattr(of, how)()
        torch.manual_seed(0)
        weights = torch.randn(results[0].shape).to(results[0])
        total = sum((x * weights).float().sum() for x in results)
        return [*results, *torch.autograd.grad(total, list(leaves.values()))]

    pairs = zip(
        with_gradients(branches.q.dtype, "ours"), with_gradients(wide, "plain"), strict=True
    )
    return max(((a.to(wide) - b).norm() / b.norm()).item() for a, b in pairs)


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", choices=PRESETS, help="as in train_gpt.py")
    parser.add_argument("--steps", type=positive_int, help="training steps; default: the preset's")
    parser.add_argument("--seqlen", type=positive_int, help="bytes of context")
    parser.add_argument("--batch-size", type=positive_int, help="sequences per step")
    parser.add_argument("--tolerance", type=float, default=0.1, help="nats per byte, %(default)g")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    device = choose_device(options.device)
    preset = choose_preset(options, device)
    seqlen = preset.model.seqlen
    sizes = Sizes.of(seqlen)
    if seqlen < sizes.block:
        raise SystemExit(f"--seqlen: must be at least {sizes.block}, got {seqlen}")
    corpus = Corpus(manual_text(), seqlen, preset.batch_size, device)
    losses = {}
    for name, make in (("full", GPT), ("sparse", sparse_gpt)):
        torch.manual_seed(options.seed)
        model = make(preset.model).to(device)
        curve = train(model, corpus, preset, title=name, seed=options.seed + 1)
        losses[name] = curve.validation[-1][1]
    tokens, _ = next(corpus.whole_batches("validation", options.seed))
    with torch.no_grad(), autocast(device):
        x = normalise(normalise(model.embedding(tokens)))
        branches = model.blocks[0].attention.branches(x, model.cos[:seqlen], model.sin[:seqlen])
    error = largest_error(branches)
    most = sizes.top_k * sizes.block + sizes.window
    print(
        f"a query attends to {most} of {seqlen} keys at most, a compressed one for {sizes.stride}"
    )
    told = ", ".join(f"{name} {loss:.3f}" for name, loss in losses.items())
    print(f"validation, nats per byte: {told}")
    print(f"results and gradients differ from plain torch's by {error:.1e}")
    is_close = error < (3e-2 if device.type == "cuda" else 1e-4)
    return int(not (is_close and losses["sparse"] < losses["full"] + options.tolerance))


if __name__ == "__main__":
    sys.exit(main())
