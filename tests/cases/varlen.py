"""Attention problems of packed sequences. Whatever lies outside the sequences holds NaN."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from tests.cases.layouts import Features, feature, head_dims_text

Lengths = tuple[int, ...] | None


@dataclass(frozen=True)
class VarlenInputs:
    """q (total_q, Hq, D), dout (total_q, Hq, Dv), k (total_k, Hk, D), v (total_k, Hk, Dv), dlse
    (Hq, total_q) in fp32; lengths in int32, (B + 1) or (B).

    With a block_table (B, max_pages) k and v are pages (num_pages, page_size, Hk, D or Dv).
    """

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    dlse: Tensor
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    seqused_q: Tensor | None = None
    seqused_k: Tensor | None = None
    leftpad_k: Tensor | None = None
    alibi_slopes: Tensor | None = None  # (H,) or (B, H)

    def lengths(self) -> dict[str, Tensor | None]:
        """By the names of the arguments of varlen functions and references."""
        names = ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k", "leftpad_k")
        return {name: getattr(self, name) for name in names}


def nan_behind(x: Tensor, rows: int, dim: int = 0) -> Tensor:
    """x with `rows` more of NaN."""
    shape = (*x.shape[:dim], rows, *x.shape[dim + 1 :])
    return torch.cat([x, x.new_full(shape, torch.nan)], dim)


def in_longer_buffers(inputs: VarlenInputs, rows_q: int, rows_k: int) -> VarlenInputs:
    return replace(
        inputs,
        q=nan_behind(inputs.q, rows_q),
        dout=nan_behind(inputs.dout, rows_q),
        dlse=nan_behind(inputs.dlse, rows_q, 1),
        k=nan_behind(inputs.k, rows_k),
        v=nan_behind(inputs.v, rows_k),
    )


@dataclass(frozen=True)
class VarlenCase(Features):
    """One call over packed sequences. Lengths in tokens, one entry a sequence."""

    lengths_q: tuple[int, ...] = (64, 17, 128)
    lengths_k: Lengths = None  # None: lengths_q
    # seqused_q, seqused_k, leftpad_k
    used_q: Lengths = feature(None, lambda x: f"used_q{_shortly(x.used_q)}")
    used_k: Lengths = feature(None, lambda x: f"used_k{_shortly(x.used_k)}")
    leftpad: Lengths = feature(None, lambda x: f"leftpad{_shortly(x.leftpad)}")
    num_heads_q: int = 4
    num_heads_k: int = 4
    head_dim: int = 64
    head_dim_v: int | None = None  # None: head_dim

    def __post_init__(self) -> None:
        for name in ("lengths_k", "used_q", "used_k", "leftpad"):
            values = getattr(self, name)
            if values is not None and len(values) != self.batch:
                raise ValueError(f"{name}: must have {self.batch} entries, got {len(values)}")

    def __str__(self) -> str:
        parts = [
            f"b{self.batch}",
            f"q{_shortly(self.lengths_q)}k{_shortly(self.keys)}",
            f"h{self.num_heads_q}/{self.num_heads_k}",
            head_dims_text(self.head_dim, self.value_dim),
            *self.feature_parts(),
        ]
        return "-".join(parts)

    @property
    def batch(self) -> int:
        return len(self.lengths_q)

    @property
    def keys(self) -> tuple[int, ...]:
        return self.lengths_q if self.lengths_k is None else self.lengths_k

    @property
    def value_dim(self) -> int:
        return self.head_dim if self.head_dim_v is None else self.head_dim_v

    @property
    def total_q(self) -> int:
        return sum(self.lengths_q)

    @property
    def total_k(self) -> int:
        return sum(self.keys)

    @property
    def max_seqlen_q(self) -> int:
        return max(self.lengths_q, default=0)

    @property
    def max_seqlen_k(self) -> int:
        return max(self.keys, default=0)

    def make_inputs(self, seed: int = 0) -> VarlenInputs:
        """Standard normal values, the same for the same seed and device type. Rows that belong to
        no sequence, beyond seqused or in the left padding, are NaN in every tensor.
        """
        generator = torch.Generator(self.device).manual_seed(seed)
        query, out = ((self.total_q, self.num_heads_q, d) for d in (self.head_dim, self.value_dim))
        key, value = ((self.total_k, self.num_heads_k, d) for d in (self.head_dim, self.value_dim))

        def normal(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
            return torch.randn(shape, dtype=dtype, device=self.device, generator=generator)

        q, k, v, dout = (normal(shape, self.dtype) for shape in (query, key, value, out))
        dlse_dtype = torch.float64 if self.dtype == torch.float64 else torch.float32
        dlse = normal((self.num_heads_q, self.total_q), dlse_dtype)
        slopes = self.make_slopes(self.batch, self.num_heads_q, generator)

        outside_q = self._outside(self.lengths_q, None, self.used_q)
        outside_k = self._outside(self.keys, self.leftpad, self.used_k)
        for x in (q, dout, dlse.T):
            x[outside_q] = torch.nan
        for x in (k, v):
            x[outside_k] = torch.nan
        return VarlenInputs(
            q=q,
            k=k,
            v=v,
            dout=dout,
            dlse=dlse,
            cu_seqlens_q=self._integers((0, *accumulate(self.lengths_q))),
            cu_seqlens_k=self._integers((0, *accumulate(self.keys))),
            seqused_q=self._integers(self.used_q),
            seqused_k=self._integers(self.used_k),
            leftpad_k=self._integers(self.leftpad),
            alibi_slopes=slopes,
        )

    def _outside(
        self,
        lengths: tuple[int, ...],
        begins: Lengths,
        ends: Lengths,
    ) -> Tensor:
        """(total,) booleans: rows that attend to nothing and that nothing attends to."""
        outside = torch.ones(sum(lengths), dtype=torch.bool)
        start = 0
        for index, length in enumerate(lengths):
            begin = 0 if begins is None else begins[index]
            end = length if ends is None else ends[index]
            outside[start + begin : start + end] = False
            start += length
        return outside.to(self.device)

    def _integers(self, values: Lengths) -> Tensor | None:
        if values is None:
            return None
        return torch.tensor(values, dtype=torch.int32, device=self.device)


def _shortly(values: tuple[int, ...]) -> str:
    """Few lengths in full, many by their number and extremes."""
    if len(values) <= 4:
        return "+".join(map(str, values))
    return f"{min(values)}..{max(values)}({sum(values)})"
