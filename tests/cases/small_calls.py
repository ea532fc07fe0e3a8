"""One small causal call in fp64: its inputs, ours, and the reference's."""

from __future__ import annotations

import torch
from torch import Tensor

from flash_attn_cuda import flash_attn_func
from tests.reference import attention


def tensors(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float64) -> list[Tensor]:
    return [torch.randn(shape, dtype=dtype) for shape in shapes]


def make_inputs() -> list[Tensor]:
    """q (2, 5, 4, 8), k and v (2, 6, 2, 8)."""
    return tensors((2, 5, 4, 8), (2, 6, 2, 8), (2, 6, 2, 8))


def attend(*x: Tensor) -> tuple[Tensor, Tensor]:
    return flash_attn_func(*x, causal=True, return_attn_probs=True)[:2]


def expected(*x: Tensor) -> tuple[Tensor, Tensor]:
    return attention(*x, causal=True)
