"""Random choices that are the same on every device and need no generator."""

from __future__ import annotations

import torch
from torch import Tensor


def random_choice(candidates: Tensor, count: int, seed: int) -> Tensor:
    """`count` of the candidates in each row, or all if there are fewer: bool (..., n)."""
    n = candidates.shape[-1]
    draws = _random_bits(candidates.numel(), seed, candidates.device).view(candidates.shape) >> 33
    # Unequal in a row, so that no device breaks a tie in its own way.
    draws = (draws & 0x7FFFFFFF) * n + torch.arange(n, device=candidates.device)
    draws = draws.masked_fill(~candidates, -1)
    least = draws.topk(min(count, n)).values[..., -1:]
    return candidates & (draws >= least)


def _random_bits(count: int, seed: int, device: torch.device) -> Tensor:
    """64 random bits each, int64 (count,): SplitMix64 (Steele, Lea, Flood, "Fast Splittable
    Pseudorandom Number Generators", 2014, section 3), the same on every device.
    """

    def signed(value: int) -> int:
        return (value + (1 << 63)) % (1 << 64) - (1 << 63)

    def mixed(x: Tensor, shift: int) -> Tensor:  # >> of a negative number brings in ones
        return x ^ ((x >> shift) & ((1 << (64 - shift)) - 1))

    x = torch.arange(1, count + 1, device=device) * signed(0x9E3779B97F4A7C15) + signed(seed)
    x = mixed(x, 30) * signed(0xBF58476D1CE4E5B9)
    x = mixed(x, 27) * signed(0x94D049BB133111EB)
    return mixed(x, 31)
