"""Calls of merge_, compared with fp64."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from flash_attn_cuda.context_parallel.merge import merge_

Operands = tuple[Tensor, Tensor, Tensor, Tensor]  # out, softmax_lse, part, part_lse
GUARD = 3  # rows before and behind those that are merged


@dataclass(frozen=True)
class MergeCase:
    """result: the dtype of what is written instead of out; None: out itself."""

    rows: int
    heads: int
    head_dim: int
    result: torch.dtype | None
    device: str

    def __str__(self) -> str:
        result = "in-place" if self.result is None else str(self.result).removeprefix("torch.")
        return f"{self.rows}x{self.heads}x{self.head_dim}-{result}"

    def make(self) -> Operands:
        """Views of larger tensors; of some rows one has no key, or neither."""
        generator = torch.Generator().manual_seed(self.rows)
        rows = self.rows + 2 * GUARD

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(self.device)

        outs = [random(rows, self.heads, self.head_dim) for _ in range(2)]
        lses = [4.0 * random(self.heads, rows) for _ in range(2)]
        for out, lse, every in zip(outs, lses, (3, 2), strict=True):
            lse[:, ::every] = -torch.inf
            out[::every] = 0.0
        mine = slice(GUARD, GUARD + self.rows)
        return outs[0][mine], lses[0][:, mine], outs[1][mine], lses[1][:, mine]

    def run(self, operands: Operands) -> tuple[Tensor, Tensor]:
        out, lse, part, part_lse = operands
        result = None if self.result is None else torch.empty_like(out, dtype=self.result)
        merge_(out, lse, part, part_lse, result)
        return (out if result is None else result), lse

    def problems(self) -> list[str]:
        operands = self.make()
        whole = operands[0]._base
        assert whole is not None
        before = whole.clone()
        out, lse, part, part_lse = (x.double().clone() for x in operands)
        total = torch.logaddexp(lse, part_lse)
        shares = ((x - total).exp().nan_to_num(0.0).t()[..., None] for x in (lse, part_lse))
        expected = sum(share * x for share, x in zip(shares, (out, part), strict=True))
        found, found_lse = self.run(operands)
        rounding = 2.0**-20 if self.result is None else torch.finfo(self.result).eps
        problems = []
        for name, x, y, rtol in (
            ("out", found, expected, rounding),
            ("softmax_lse", found_lse, total, 2.0**-20),
        ):
            if not torch.allclose(x.double(), y, rtol=rtol, atol=2.0**-19):
                problems.append(f"{name}: off by {(x.double() - y).abs().max()}")
        for rows in (slice(0, GUARD), slice(GUARD + self.rows, None)):
            if not torch.equal(whole[rows], before[rows]):
                problems.append("rows around out were written")
        return problems


def merge_cases(device: str) -> Iterator[MergeCase]:
    sizes = product((1, 17, 300), (1, 3), (8, 64, 72, 128, 256))
    for index, (rows, heads, head_dim) in enumerate(sizes):
        result = (None, torch.bfloat16, torch.float16)[index % 3]
        yield MergeCase(rows, heads, head_dim, result, device)
