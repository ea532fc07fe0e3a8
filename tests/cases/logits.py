"""Queries and keys whose scores are hard on an online softmax, of given ones' shapes."""

from __future__ import annotations

import torch
from torch import Tensor


def spread_logits(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    return q * 8, k * 8


def rising_maximum(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Every later key block has larger scores, so that each of them rescales what came before."""
    slope = torch.linspace(-4, 4, k.shape[1], device=k.device).to(k.dtype)
    return q.abs(), k.abs() * slope[:, None, None]


def falling_maximum(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    q, k = rising_maximum(q, k)
    return q, k.flip(1)


def steep_steps(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """From the last keys to the first, scores rise by little, much and more than fp32 can follow:
    so in a third of the rows, in another not at all, and in the third by a hundredth of it.
    """
    rises = torch.tensor([0.0, 6.0, 9.0, 30.0, 200.0, 1.0, 0.0, 500.0, -20.0, 12.0])
    levels = rises.to(k.device).cumsum(0)
    from_the_end = torch.arange(k.shape[1] - 1, -1, -1, device=k.device)
    shares = torch.tensor([1.0, 0.0, 0.01], device=q.device)
    q, k = q / 4, k / 4
    of_keys = levels[(from_the_end // 31).clamp(max=len(rises) - 1)] * q.shape[3] ** 0.5 / 8
    q[..., 0] = (8 * shares[torch.arange(q.shape[1], device=q.device) % 3, None]).to(q.dtype)
    k[..., 0] = of_keys[:, None].to(k.dtype)
    return q, k


def all_very_negative(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    return q.abs() * 16, -k.abs() * 16


def one_key_takes_all(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    k = k.clone()
    k[:, 5] = k[:, 5].sign() * 60
    return q, k


def constant(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    return torch.full_like(q, 3.0), torch.full_like(k, -2.0)


ALL = (
    spread_logits,
    rising_maximum,
    falling_maximum,
    steep_steps,
    all_very_negative,
    one_key_takes_all,
    constant,
)
