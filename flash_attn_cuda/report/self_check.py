"""A quick check of an installation: attention and its gradients against plain fp64 attention.

For people; the test suite is what shows that the kernels are right.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from ..call.tensors import lse_dtype
from ..functions.interface import flash_attn_func, flash_attn_with_kvcache
from ..installed.build_info import CompiledRow, compiled_rows

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
SOFTCAP = 2.0


class Kind(Enum):
    """What is called, and with which options."""

    plain = "plain"
    features = "softcap and ALiBi"
    decode = "KV cache"  # one query per sequence, without a backward


@dataclass(frozen=True)
class Check:
    """One call to make; the sizes are odd so that tiles end ragged."""

    device: str
    dtype: str
    head_dim: int
    head_dim_v: int
    causal: bool
    kind: Kind
    backward: bool

    def __str__(self) -> str:
        mask = "causal" if self.causal else "full"
        what = "forward and backward" if self.backward else "forward"
        kind = "" if self.kind is Kind.plain else f", {self.kind.value}"
        head_dims = f"{self.head_dim:3}"
        if self.head_dim_v != self.head_dim:
            head_dims += f"/{self.head_dim_v}"
        return f"{self.device:5} {self.dtype} head_dim {head_dims} {mask:6} {what}{kind}"


def checks(device: str) -> Iterator[Check]:
    """What to check on "cpu", or on "cuda": one call for every kind of compiled forward kernel."""
    if device == "cpu":
        for dtype in DTYPES:
            for causal in (False, True):
                yield Check(device, dtype, 40, 40, causal, Kind.plain, backward=True)
            yield Check(device, dtype, 40, 24, True, Kind.plain, backward=True)
            yield Check(device, dtype, 40, 40, True, Kind.features, backward=True)
            yield Check(device, dtype, 40, 40, True, Kind.decode, backward=False)
        return
    forwards = [row for row in compiled_rows() if row.pass_name == "forward"]
    yield from dict.fromkeys(_check_of(row) for row in forwards)


def _check_of(row: CompiledRow) -> Check:
    kind = Kind.features if "softcap" in row.features else Kind.plain
    if row.kind == "decode":
        kind = Kind.decode
    backward = any(_is_backward_of(other, row) for other in compiled_rows())
    return Check(
        device="cuda",
        dtype=row.dtype,
        head_dim=row.head_dim,
        head_dim_v=row.head_dim_v,
        causal=row.mask == "windowed",
        kind=kind,
        backward=backward and kind is not Kind.decode,
    )


def _is_backward_of(row: CompiledRow, forward: CompiledRow) -> bool:
    return (
        row.pass_name == "backward"
        and row.dtype == forward.dtype
        and row.head_dim >= forward.head_dim
        and row.head_dim_v >= forward.head_dim_v
        and row.mask in (forward.mask, "windowed")
        and ("softcap" in row.features or "softcap" not in forward.features)
    )


def run(check: Check) -> float:
    """The largest error of out, lse and the gradients, as a fraction of what is allowed."""
    dtype = DTYPES[check.dtype]
    seqlen_q = 1 if check.kind is Kind.decode else SEQLEN_Q
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype)

    q = normal(BATCH, seqlen_q, HEADS_Q, check.head_dim)
    k = normal(BATCH, SEQLEN_K, HEADS_K, check.head_dim)
    v = normal(BATCH, SEQLEN_K, HEADS_K, check.head_dim_v)
    dout, dlse = normal(*q.shape[:-1], check.head_dim_v), normal(BATCH, HEADS_Q, seqlen_q)
    slopes = 2.0 ** -torch.arange(1.0, HEADS_Q + 1.0)  # Press et al., "ALiBi", 2022, section 3

    def leaves(device: str, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        copies = (x.to(device, dtype, copy=True).requires_grad_(check.backward) for x in (q, k, v))
        return next(copies), next(copies), next(copies)

    inputs, exact_inputs = leaves(check.device, dtype), leaves("cpu", torch.float64)
    with_features = check.kind is Kind.features
    out, lse = _attend(check, *inputs, slopes.to(check.device))
    exact = plain_attention(
        *exact_inputs,
        causal=check.causal,
        softcap=SOFTCAP if with_features else 0.0,
        slopes=slopes.double() if with_features else None,
    )

    pairs = list(zip((out, lse), exact, strict=True))
    if check.backward:
        incoming = (dout.to(out), dlse.to(lse))
        gradients = torch.autograd.grad((out, lse), inputs, incoming)
        exact_gradients = torch.autograd.grad(exact, exact_inputs, (dout.double(), dlse.double()))
        pairs += zip(gradients, exact_gradients, strict=True)
    return max(_error(actual, expected, dtype) for actual, expected in pairs)


def _attend(check: Check, q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> tuple[Tensor, Tensor]:
    """(out, lse) of the call to check."""
    if check.kind is Kind.decode:
        result = flash_attn_with_kvcache(q, k, v, causal=check.causal, return_softmax_lse=True)
        return result[0], result[1]
    options: dict[str, Any] = {"causal": check.causal, "return_attn_probs": True}
    if check.kind is Kind.features:
        options |= {"softcap": SOFTCAP, "alibi_slopes": slopes}
    out, lse, _ = flash_attn_func(q, k, v, **options)
    return out, lse


def plain_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    softcap: float = 0.0,
    slopes: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(out, lse) with all scores in memory, in the dtype of q (B, Sq, Hq, D), k and v."""
    group = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(group, dim=2) for x in (k, v))
    scores = torch.einsum("bmhd,bnhd->bhmn", q, k) * q.shape[-1] ** -0.5
    if softcap > 0.0:
        scores = softcap * torch.tanh(scores / softcap)
    rows = torch.arange(q.shape[1], device=q.device)[:, None] + k.shape[1] - q.shape[1]
    distance = torch.arange(k.shape[1], device=q.device) - rows
    if slopes is not None:
        scores = scores - slopes[:, None, None] * distance.abs()
    if causal:
        scores = scores.masked_fill(distance > 0, -math.inf)
    return torch.einsum("bhmn,bnhd->bmhd", scores.softmax(-1), v), scores.logsumexp(-1)


def _error(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> float:
    error = (actual.detach().cpu().double() - expected.detach()).abs().max().item()
    relative = DTYPE_EPSILONS * torch.finfo(dtype).eps
    relative += SUM_EPSILONS * torch.finfo(lse_dtype(dtype)).eps
    return math.inf if math.isnan(error) else error / (relative * expected.abs().max().item())
