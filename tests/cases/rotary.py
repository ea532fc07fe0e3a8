"""Calls of apply_rotary_emb: inputs, in memory of any layout, and what they compute in fp64."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flash_attn_cuda.functions.rotary import apply_rotary_emb
from tests.cases.attention import DTYPE_NAMES
from tests.reference.kvcache import rotate

POSITIONS = 40  # rows of the tables


@dataclass(frozen=True)
class RotaryCase:
    """Sequences of one length or, packed, of these lengths, behind a row of none and before one."""

    dtype: torch.dtype = torch.bfloat16
    table_dtype: torch.dtype | None = None  # None: dtype
    lengths: tuple[int, ...] = (7, 7)
    packed: bool = False
    num_heads: int = 5
    head_dim: int = 64
    rotary_dim: int | None = None  # None: head_dim, or one less
    interleaved: bool = False
    offsets: int | tuple[int, ...] = 0
    index_dtype: torch.dtype = torch.int32
    layout: str = "contiguous"  # or heads, columns or odd: see arranged
    device: str = "cpu"

    def __str__(self) -> str:
        changed = [DTYPE_NAMES.get(self.dtype, "fp32"), f"d{self.head_dim}"]
        lengths = self.lengths if self.packed else f"{len(self.lengths)}x{self.lengths[0]}"
        changed += [f"r{self.turning}", f"h{self.num_heads}", f"S{lengths}", self.layout]
        changed += ["packed"] * self.packed + ["interleaved"] * self.interleaved
        changed += [f"at{self.offsets}", f"tables {self.table_dtype}".replace("torch.", "")]
        return " ".join(changed)

    @property
    def turning(self) -> int:
        return self.head_dim // 2 * 2 if self.rotary_dim is None else self.rotary_dim

    @property
    def starts(self) -> list[int]:
        """cu_seqlens: row 0 is in no sequence, nor is the last one."""
        return [1 + sum(self.lengths[:index]) for index in range(len(self.lengths) + 1)]

    def positions(self) -> Tensor:
        """Of each row of x, (batch, seqlen) or (total,); -1 where it is in no sequence."""
        offsets = self.offsets
        each = offsets if isinstance(offsets, tuple) else (offsets,) * len(self.lengths)
        rows = [offset + torch.arange(x) for offset, x in zip(each, self.lengths, strict=True)]
        if not self.packed:
            return torch.stack(rows)
        outside = torch.full((1,), -1)
        return torch.cat([outside, *rows, outside])

    def make_x(self, seed: int = 0) -> Tensor:
        """On the CPU, NaN where a row is in no sequence."""
        generator = torch.Generator().manual_seed(seed)
        shape = (*self.positions().shape, self.num_heads, self.head_dim)
        x = torch.randn(shape, generator=generator).to(self.dtype)
        x[self.positions() < 0] = torch.nan
        return x

    def make_tables(self, seed: int = 0) -> tuple[Tensor, Tensor]:
        """Cosines and sines on the CPU."""
        generator = torch.Generator().manual_seed(seed + 1)
        angles = torch.randn(POSITIONS, self.turning // 2, generator=generator)
        dtype = self.table_dtype or self.dtype
        return angles.cos().to(dtype), angles.sin().to(dtype)

    def arguments(self) -> dict[str, Any]:
        """What apply_rotary_emb takes beside x and the tables."""

        def indices(values: Any) -> Tensor:
            return torch.tensor(values, dtype=self.index_dtype, device=self.device)

        given: dict[str, Any] = {"interleaved": self.interleaved, "seqlen_offsets": self.offsets}
        if isinstance(self.offsets, tuple):
            given["seqlen_offsets"] = indices(self.offsets)
        if self.packed:
            given["cu_seqlens"] = indices(self.starts)
        return given

    def expected(self, x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
        """In fp64, of tensors on one device."""
        positions = self.positions().flatten().to(x.device)
        rows = x.double().flatten(0, -3)
        known = (positions >= 0) & (positions < POSITIONS)
        cos, sin = (table.double() for table in tables)
        rows[known] = rotate(rows[known], cos, sin, positions[known], self.interleaved)
        return rows.view(x.shape)

    def run(self, x: Tensor, tables: tuple[Tensor, Tensor], inplace: bool = False) -> Tensor:
        return apply_rotary_emb(x, *tables, inplace=inplace, **self.arguments())


def arranged(x: Tensor, layout: str) -> Tensor:
    """x in memory of its own. heads: between other heads and columns, on 16-byte boundaries; odd:
    on none; columns: neighbours are apart. NaN is between.
    """
    if layout == "contiguous":
        return x.clone()
    before, behind, step = {"heads": (8, 8, 1), "odd": (1, 2, 1), "columns": (0, 0, 2)}[layout]
    *rows, heads, columns = x.shape
    shape = (*rows, heads + 2, before + columns * step + behind)
    buffer = torch.full(shape, torch.nan, dtype=x.dtype, device=x.device)
    inside = buffer[..., 1:-1, before : before + columns * step : step]
    return inside.copy_(x)


def rounding(expected: Tensor, dtype: torch.dtype) -> Tensor:
    """How far a result in `dtype` may be from the exact one: fp32 arithmetic, then one rounding."""
    largest = expected.nan_to_num(0.0).abs().max() if expected.numel() else 0.0
    return torch.finfo(dtype).eps / 2 * expected.abs() * 1.01 + 2.0**-22 * largest


def difference(actual: Tensor, expected: Tensor) -> str | None:
    """What is wrong with a result, or None."""
    if actual.shape != expected.shape:
        return f"shape {tuple(actual.shape)}"
    off = (actual.double() - expected).abs() - rounding(expected, actual.dtype)
    wrong = (off > 0.0) | (actual.isnan() != expected.isnan())
    return f"{int(wrong.sum())} elements, off by {float(off[wrong].max())}" if wrong.any() else None


def rotary_cases(device: str) -> Iterator[RotaryCase]:
    """Every dtype, with and without vectors, all ways to say where a sequence begins, rows that
    several CTAs or threads share, and nothing at all.
    """
    dtypes = (torch.bfloat16, torch.float16, torch.float32)
    for dtype in dtypes:
        for interleaved in (False, True):
            common: dict[str, Any] = {"dtype": dtype, "interleaved": interleaved, "device": device}
            for table_dtype in dtypes:
                yield RotaryCase(**common, table_dtype=table_dtype, offsets=3)
            yield RotaryCase(**common, head_dim=128, num_heads=32, offsets=(0, 33))
            yield RotaryCase(**common, head_dim=256, num_heads=40, lengths=(3, 3))
            yield RotaryCase(**common, head_dim=96, rotary_dim=32, lengths=(1,), num_heads=1)
            yield RotaryCase(**common, head_dim=80, rotary_dim=40, table_dtype=torch.float32)
            yield RotaryCase(**common, head_dim=64, rotary_dim=0)
            for head_dim, rotary_dim in (
                (1, 0),
                (2, 2),
                (7, 6),
                (59, 20),
                (111, 110),
                (2100, 2050),
            ):
                yield RotaryCase(**common, head_dim=head_dim, rotary_dim=rotary_dim, num_heads=3)
            for layout in ("heads", "odd", "columns"):
                yield RotaryCase(**common, layout=layout)
                yield RotaryCase(**common, layout=layout, rotary_dim=16, offsets=(5, 0))
            packed = {**common, "packed": True, "lengths": (5, 0, 1, 12), "num_heads": 9}
            yield RotaryCase(**packed)
            yield RotaryCase(**packed, offsets=2, index_dtype=torch.int64, head_dim=128)
            yield RotaryCase(**packed, offsets=(0, 7, 39, 28), head_dim=59, rotary_dim=32)
            wide: dict[str, Any] = {"index_dtype": torch.int64, "layout": "heads"}
            yield RotaryCase(**packed, **wide, offsets=(9, 7, 3, 20), rotary_dim=32)
    for lengths in ((), (0, 0)):
        yield RotaryCase(lengths=lengths or (0,), device=device)
        yield RotaryCase(lengths=lengths, packed=True, device=device)
    yield RotaryCase(num_heads=0, device=device)
    yield RotaryCase(lengths=(1,) * 700, num_heads=1, head_dim=16, device=device)
