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
    all_very_negative,
    one_key_takes_all,
    constant,
)
