"""Attention problems by name: what tests check and benchmarks time.

A case says everything about a call but the values of its tensors; `make_inputs` draws those from a
seed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.cases.kvcache import KvCacheCase, KvCacheInputs
from tests.cases.layouts import (
    DTYPE_NAMES,
    Alibi,
    Features,
    Layout,
    arrange,
    feature,
    head_dims_text,
)
from tests.cases.varlen import VarlenCase, VarlenInputs

__all__ = [
    "ALL_HEAD_DIMS",
    "BENCHMARK_HEAD_DIMS",
    "BENCHMARK_SEQLENS",
    "BUCKET_HEAD_DIMS",
    "DTYPE_NAMES",
    "FURTHER_BENCHMARK_HEAD_DIMS",
    "HEAD_RATIOS",
    "LONG_SEQLENS",
    "ODD_SEQLENS",
    "Alibi",
    "AttentionCase",
    "AttentionInputs",
    "Features",
    "KvCacheCase",
    "KvCacheInputs",
    "Layout",
    "VarlenCase",
    "VarlenInputs",
    "arrange",
    "benchmark_cases",
]


@dataclass(frozen=True)
class AttentionInputs:
    """q (B, Sq, Hq, D), k (B, Sk, Hk, D), v (B, Sk, Hk, Dv), dout (B, Sq, Hq, Dv), dlse (B, Hq, Sq)
    in fp32, slopes in fp32.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    dlse: Tensor
    alibi_slopes: Tensor | None = None  # (H,) or (B, H)


@dataclass(frozen=True)
class AttentionCase(Features):
    """One attention problem with sequences of one length, in tokens."""

    batch: int = 2
    seqlen_q: int = 128
    seqlen_k: int = 128
    num_heads_q: int = 4
    num_heads_k: int = 4
    head_dim: int = 64
    head_dim_v: int | None = None  # None: head_dim
    layout: Layout = feature(Layout.contiguous, "{0.layout.value}".format)

    def __post_init__(self) -> None:
        if self.num_heads_k < 1 or self.num_heads_q % self.num_heads_k != 0:
            raise ValueError(
                f"num_heads_k must divide num_heads_q={self.num_heads_q}; got {self.num_heads_k}"
            )

    def __str__(self) -> str:
        parts = [
            f"b{self.batch}",
            f"q{self.seqlen_q}k{self.seqlen_k}",
            f"h{self.num_heads_q}/{self.num_heads_k}",
            head_dims_text(self.head_dim, self.value_dim),
            *self.feature_parts(),
        ]
        return "-".join(parts)

    @property
    def value_dim(self) -> int:
        return self.head_dim if self.head_dim_v is None else self.head_dim_v

    @property
    def query_shape(self) -> tuple[int, int, int, int]:
        return self.batch, self.seqlen_q, self.num_heads_q, self.head_dim

    @property
    def key_shape(self) -> tuple[int, int, int, int]:
        return self.batch, self.seqlen_k, self.num_heads_k, self.head_dim

    def make_inputs(self, seed: int = 0) -> AttentionInputs:
        """Standard normal values, the same for the same seed and device type, in memory of this
        case's layout.
        """
        generator = torch.Generator(self.device).manual_seed(seed)

        def normal(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.randn(shape, dtype=dtype, device=self.device, generator=generator)

        q, k, v, dout = (
            arrange(normal(*shape, dtype=self.dtype), self.layout)
            for shape in (
                self.query_shape,
                self.key_shape,
                (*self.key_shape[:-1], self.value_dim),
                (*self.query_shape[:-1], self.value_dim),
            )
        )
        rows = (self.batch, self.num_heads_q, self.seqlen_q)
        dlse_dtype = torch.float64 if self.dtype == torch.float64 else torch.float32
        dlse = normal(*rows, dtype=dlse_dtype)
        slopes = self.make_slopes(self.batch, self.num_heads_q, generator)
        return AttentionInputs(q=q, k=k, v=v, dout=dout, dlse=dlse, alibi_slopes=slopes)

    def visible_pairs(self) -> int:
        """(query, key) pairs of one head that the mask leaves."""
        left, right = self.window
        right = 0 if self.causal else right
        diagonal = torch.arange(self.seqlen_q) + self.seqlen_k - self.seqlen_q
        first = (diagonal - left).clamp_min(0) if left >= 0 else torch.zeros_like(diagonal)
        last = diagonal + right if right >= 0 else torch.full_like(diagonal, self.seqlen_k)
        last = last.clamp_max(self.seqlen_k - 1)
        return int((last - first + 1).clamp_min(0).sum())

    def forward_flops(self) -> int:
        """Multiplications and additions of the two products of the forward, on visible pairs."""
        return self._flops(of_keys=1, of_values=1)

    def backward_flops(self) -> int:
        """Of the five products of a backward that recomputes the scores."""
        return self._flops(of_keys=3, of_values=2)

    def _flops(self, *, of_keys: int, of_values: int) -> int:
        """Of products over columns of queries and keys, and over those of values."""
        columns = of_keys * self.head_dim + of_values * self.value_dim
        return 2 * self.batch * self.num_heads_q * self.visible_pairs() * columns

    def forward_bytes(self) -> int:
        """Least traffic to memory: q, k, v read, out and lse written, once each."""
        lse = self.batch * self.num_heads_q * self.seqlen_q * 4
        return self._tensor_bytes(1) + lse

    def backward_bytes(self) -> int:
        """Least traffic to memory: q, k, v, out, dout, lse read, dq, dk, dv written, once each."""
        lse = self.batch * self.num_heads_q * self.seqlen_q * 4
        return self._tensor_bytes(2) + lse

    def _tensor_bytes(self, times: int) -> int:
        """Of q, k, v and out, each so many times."""
        query_rows = self.batch * self.seqlen_q * self.num_heads_q
        key_rows = self.batch * self.seqlen_k * self.num_heads_k
        columns = self.head_dim + self.value_dim
        return times * (query_rows + key_rows) * columns * self.dtype.itemsize


# The head dims with rows of their own in the kernel table, every other one that needs no padding,
# and three that do or that other libraries' tests name: 59 and 111 are padded in Python.
BUCKET_HEAD_DIMS = (32, 64, 96, 128, 192, 256, 512)
ALL_HEAD_DIMS = (*range(8, 257, 8), 59, 111)

# On and around the tile edges 16, 32, 64 and 128, and lengths with nothing in common with them.
ODD_SEQLENS = (1, 2, 3, 8, 17, 33, 64, 65, 113, 127, 128, 129, 200, 255, 257, 300)

# Lengths up to 4,224 = 33 * 128: many tiles, ragged ends, much longer on either side.
LONG_SEQLENS = (
    (1, 4224),
    (3, 799),
    (64, 2048),
    (113, 1023),
    (1023, 1024),
    (1024, 1023),
    (2048, 2049),
    (1799, 511),
    (4224, 3),
    (4224, 4224),
)

# (num_heads_q, num_heads_k): multi-head, grouped, multi-query, and group sizes that are no power of
# two.
HEAD_RATIOS = ((1, 1), (3, 3), (2, 1), (6, 2), (6, 1), (9, 3), (12, 4), (16, 1), (32, 2))

# The benchmark grid of the FlashAttention papers: 16k tokens a call, hidden size 2048.
BENCHMARK_TOKENS = 16_384
BENCHMARK_HIDDEN = 2048
BENCHMARK_SEQLENS = (512, 1024, 2048, 4096, 8192, 16_384)
BENCHMARK_HEAD_DIMS = (64, 128, 256)
FURTHER_BENCHMARK_HEAD_DIMS = (32, 96, 192)


def benchmark_cases(
    head_dims: tuple[int, ...] = BENCHMARK_HEAD_DIMS,
    seqlens: tuple[int, ...] = BENCHMARK_SEQLENS,
    dtype: torch.dtype = torch.bfloat16,
    device: str = "cuda",
) -> Iterator[AttentionCase]:
    """Every head dim and length, full and causal, 16k tokens and hidden size 2048 each."""
    for head_dim in head_dims:
        heads = BENCHMARK_HIDDEN // head_dim
        for causal in (False, True):
            for seqlen in seqlens:
                yield AttentionCase(
                    batch=max(1, BENCHMARK_TOKENS // seqlen),
                    seqlen_q=seqlen,
                    seqlen_k=seqlen,
                    num_heads_q=heads,
                    num_heads_k=heads,
                    head_dim=head_dim,
                    dtype=dtype,
                    causal=causal,
                    device=device,
                )
