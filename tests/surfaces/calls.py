"""What the tests of other packages' functions share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import reference
from tests.cases.harness import DEVICE

DEVICES = ["cpu", pytest.param(DEVICE, marks=pytest.mark.gpu)]
ON_EVERY_DEVICE = pytest.mark.parametrize("device", DEVICES)


def int32(device: str, *values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def normal(device: str, *shape: int) -> Tensor:
    """In fp64 on the CPU, in bf16 on GPUs."""
    dtype = torch.float64 if device == "cpu" else torch.bfloat16
    return torch.randn(shape).to(device, dtype)


def dense(device: str, seqlen_q: int = 7, seqlen_k: int = 9, batch: int = 2) -> list[Tensor]:
    """q (B, Sq, 4, 16), k (B, Sk, 2, 16) and v (B, Sk, 2, 24)."""
    shapes = ((seqlen_q, 4, 16), (seqlen_k, 2, 16), (seqlen_k, 2, 24))
    return [normal(device, batch, *shape) for shape in shapes]


def assert_near(actual: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    """To what fp64 on the CPU and bf16 on GPUs leave of results around 1."""
    for x, y in zip(actual, expected, strict=True):
        limit = 1e-10 if actual[0].dtype == torch.float64 else 0.03
        torch.testing.assert_close(x.double(), y.double(), rtol=limit, atol=limit)


def assert_same(actual: Any, expected: Any) -> None:
    """The same bits, in as many tensors."""
    actual, expected = (x if isinstance(x, tuple) else (x,) for x in (actual, expected))
    assert len(actual) == len(expected)
    for x, y in zip(actual, expected, strict=True):
        assert x.shape == y.shape and x.dtype == y.dtype and torch.equal(x, y)


def assert_compiles(function: Callable[..., Any], *tensors: Tensor) -> None:
    """In a full graph, with the same results. What is compiled of the graph's operators is the
    matter of their own tests.
    """
    torch.compiler.reset()
    compiled = torch.compile(function, fullgraph=True, backend="eager")
    assert_same(compiled(*tensors), function(*tensors))


def expected_of(
    q: Tensor, k: Tensor, v: Tensor, lengths: list[tuple[int, int]], **features: Any
) -> tuple[Tensor, Tensor]:
    """The reference's (out, lse) of q (B, Sq, Hq, D), k, v (B, Sk, ...), of whose rows sequence b
    uses lengths[b]; other rows of queries have out 0 and lse -inf.
    """
    out = torch.zeros(*q.shape[:-1], v.shape[-1], dtype=torch.float64, device=q.device)
    lse = torch.full((q.shape[0], q.shape[2], q.shape[1]), -torch.inf, device=q.device).double()
    options = reference.AttentionOptions(**features)
    for b, (used_q, used_k) in enumerate(lengths):
        rows = (q[b : b + 1, :used_q], k[b : b + 1, :used_k], v[b : b + 1, :used_k])
        part = options.of_sequence(b, used_q, used_k)
        out[b : b + 1, :used_q], lse[b : b + 1, :, :used_q] = reference.attention(
            *rows, options=part
        )
    return out, lse
