"""A quick check of an installation: attention and its gradients against plain fp64 attention.

For people; the test suite is what shows that the kernels are right.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .build_info import CompiledRow, compiled_rows
from .checks import lse_dtype
from .interface import flash_attn_func

DTYPES = {
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp32": torch.float32,
    "fp64": torch.float64,
}
# Allowed error relative to the largest value: roundings to the dtype, and those of the sums.
DTYPE_EPSILONS = 4.0
SUM_EPSILONS = 64.0

BATCH, SEQLEN_Q, SEQLEN_K, HEADS_Q, HEADS_K = 2, 190, 301, 4, 2


@dataclass(frozen=True)
class Check:
    """One call to make; the sizes are odd so that tiles end ragged."""

    device: str
    dtype: str
    head_dim: int
    causal: bool
    backward: bool

    def __str__(self) -> str:
        mask = "causal" if self.causal else "full"
        what = "forward and backward" if self.backward else "forward"
        return f"{self.device:5} {self.dtype} head_dim {self.head_dim:3} {mask:6} {what}"


def checks(device: str) -> Iterator[Check]:
    """What to check on "cpu", or on "cuda": one call for every compiled forward kernel."""
    if device == "cpu":
        for dtype in DTYPES:
            for causal in (False, True):
                yield Check(device, dtype, head_dim=40, causal=causal, backward=True)
        return
    for row in compiled_rows():
        if row.pass_name == "forward":
            backward = any(_is_backward_of(other, row) for other in compiled_rows())
            yield Check(device, row.dtype, row.head_dim, row.mask == "windowed", backward)


def _is_backward_of(row: CompiledRow, forward: CompiledRow) -> bool:
    return (
        row.pass_name == "backward"
        and row.dtype == forward.dtype
        and row.head_dim >= forward.head_dim
        and row.mask in (forward.mask, "windowed")
    )


def run(check: Check) -> float:
    """The largest error of out, lse and the gradients, as a fraction of what is allowed."""
    dtype = DTYPES[check.dtype]
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype)

    q = normal(BATCH, SEQLEN_Q, HEADS_Q, check.head_dim)
    k = normal(BATCH, SEQLEN_K, HEADS_K, check.head_dim)
    v = normal(BATCH, SEQLEN_K, HEADS_K, check.head_dim)
    dout, dlse = normal(*q.shape), normal(BATCH, HEADS_Q, SEQLEN_Q)

    def leaves(device: str, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        copies = (x.to(device, dtype, copy=True).requires_grad_(check.backward) for x in (q, k, v))
        return next(copies), next(copies), next(copies)

    inputs, exact_inputs = leaves(check.device, dtype), leaves("cpu", torch.float64)
    out, lse, _ = flash_attn_func(*inputs, causal=check.causal, return_attn_probs=True)
    exact = plain_attention(*exact_inputs, causal=check.causal)

    pairs = list(zip((out, lse), exact, strict=True))
    if check.backward:
        incoming = (dout.to(out), dlse.to(lse))
        gradients = torch.autograd.grad((out, lse), inputs, incoming)
        exact_gradients = torch.autograd.grad(exact, exact_inputs, (dout.double(), dlse.double()))
        pairs += zip(gradients, exact_gradients, strict=True)
    return max(_error(actual, expected, dtype) for actual, expected in pairs)


def plain_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """(out, lse) with all scores in memory, in the dtype of q (B, Sq, Hq, D), k and v."""
    group = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(group, dim=2) for x in (k, v))
    scores = torch.einsum("bmhd,bnhd->bhmn", q, k) * q.shape[-1] ** -0.5
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device)
        scores = scores.masked_fill(hidden.triu(k.shape[1] - q.shape[1] + 1), -math.inf)
    return torch.einsum("bhmn,bnhd->bmhd", scores.softmax(-1), v), scores.logsumexp(-1)


def _error(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> float:
    error = (actual.detach().cpu().double() - expected.detach()).abs().max().item()
    relative = DTYPE_EPSILONS * torch.finfo(dtype).eps
    relative += SUM_EPSILONS * torch.finfo(lse_dtype(dtype)).eps
    return math.inf if math.isnan(error) else error / (relative * expected.abs().max().item())
