"""Backwards that add to given dq, dk and dv: calls, and what is wrong with the sums.

``python -m tests.cases.accumulate`` prints that of all of them, with status 1 if there is any.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import cycle
from typing import Any

import torch
from torch import Tensor

from flash_attn_cuda.call.fields import AttentionCall
from flash_attn_cuda.operators.attention import run_backward_operator
from flash_attn_cuda.operators.derivatives import run_gradients_operator, run_operator
from tests.cases.attention import Alibi, VarlenCase
from tests.cases.operators import incoming_of

NAMES = ("dq", "dk", "dv")
HEAD_DIMS = ((64, 64), (128, 128), (256, 256), (512, 512), (192, 128), (96, 96), (72, 72), (32, 32))
# Where a target lies: by itself; dk and dv as they travel between ranks; where no kernel writes.
PLACES = ("contiguous", "side by side", "odd stride")
PATTERN = 77.0


@dataclass(frozen=True)
class SumCase:
    """A call of sequences of these lengths, by default of one length, and its targets."""

    what: str
    lengths_q: tuple[int, ...]
    lengths_k: tuple[int, ...]
    heads: tuple[int, int] = (4, 2)
    options: dict[str, Any] = field(default_factory=dict)  # of an AttentionCall
    packed: bool = False
    used: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]] | None = None  # q, k, left of k
    head_dims: tuple[int, int] = (64, 64)
    dtype: torch.dtype = torch.bfloat16
    place: str = PLACES[0]
    device: str = "cuda"

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        dims = "x".join(map(str, self.head_dims))
        return f"{self.what}, d {dims}, {dtype}, {self.place}"

    def row(self) -> VarlenCase:
        """A case that runs the same rows of the build."""
        given = {x: self.options[x] for x in ("softcap", "dropout_p") if x in self.options}
        return VarlenCase(
            lengths_q=(8,),
            head_dim=self.head_dims[0],
            head_dim_v=self.head_dims[1],
            dtype=self.dtype,
            device=self.device,
            causal=True,
            alibi=Alibi.per_head if self.options.get("alibi") else None,
            deterministic=self.options.get("deterministic", False),
            **given,
        )

    def call(self, generator: torch.Generator) -> AttentionCall:
        def normal(lengths: tuple[int, ...], heads: int, columns: int) -> Tensor:
            rows = (sum(lengths),) if self.packed else (len(lengths), max(lengths))
            x = torch.randn((*rows, heads, columns), generator=generator, dtype=torch.float32)
            return x.to(self.device, self.dtype)

        options = dict(self.options)
        if options.pop("alibi", False):
            options["alibi_slopes"] = torch.linspace(0.5, 0.01, self.heads[0], device=self.device)
        if self.packed:
            options |= self.of_sequences()
        return AttentionCall(
            normal(self.lengths_q, self.heads[0], self.head_dims[0]),
            normal(self.lengths_k, self.heads[1], self.head_dims[0]),
            normal(self.lengths_k, self.heads[1], self.head_dims[1]),
            **options,
        )

    def of_sequences(self) -> dict[str, Any]:
        def int32(numbers: Any) -> Tensor:
            return torch.tensor(numbers, dtype=torch.int32, device=self.device)

        def starts(lengths: tuple[int, ...]) -> Tensor:
            return int32((0, *lengths)).cumsum(0, dtype=torch.int32)

        found = {
            "cu_seqlens_q": starts(self.lengths_q),
            "cu_seqlens_k": starts(self.lengths_k),
            "max_seqlen_q": max(self.lengths_q),
            "max_seqlen_k": max(self.lengths_k),
        }
        if self.used is not None:
            names = ("seqused_q", "seqused_k", "leftpad_k")
            found |= {name: int32(x) for name, x in zip(names, self.used, strict=True)}
        return found

    def targets(self, generator: torch.Generator, call: AttentionCall) -> list[Target]:
        """Of dq, dk and dv, each in a buffer with a row more, and by place with columns more."""

        def buffer(x: Tensor, columns: int) -> Tensor:
            *batch, rows, heads, _ = x.shape
            return torch.full((*batch, rows + 1, heads, columns), PATTERN, device=self.device)

        of_q, of_k, of_v = (x.shape[-1] for x in (call.q, call.k, call.v))
        if self.place == "side by side":
            both = buffer(call.k, of_k + of_v)
            return [
                Target(buffer(call.q, of_q + 8), slice(8, None), generator),
                Target(both, slice(0, of_k), generator),
                Target(both, slice(of_k, None), generator),
            ]
        more = 1 if self.place == "odd stride" else 0
        return [
            Target(buffer(x, x.shape[-1] + more), slice(0, x.shape[-1]), generator)
            for x in (call.q, call.k, call.v)
        ]

    def problems(self, seed: int = 0) -> list[str]:
        """What of the sums is not what was there and the gradients in fp32, or changed around."""
        generator = torch.Generator().manual_seed(seed)
        call = self.call(generator)
        if call.dropout_p > 0.0:
            call = replace(call, rng_state=torch.tensor([12, 34], device=self.device))
        results = run_operator(call)
        dout = torch.randn(results.out.shape, generator=generator).to(results.out)
        incoming = incoming_of(results, dout)
        call = replace(call, fp32_results=True)
        gradients = run_gradients_operator(call, incoming)[:3]
        targets = self.targets(generator, call)
        given = {name: target.inside for name, target in zip(NAMES, targets, strict=True)}
        run_backward_operator(call, replace(incoming, **given, accumulate=True))
        found = []
        for name, target, gradient in zip(NAMES, targets, gradients, strict=True):
            # Without a fixed order dq comes out another way every time.
            is_exact = call.deterministic or name != "dq" or self.device == "cpu"
            found += [f"{name}: {x}" for x in target.problems(gradient, is_exact)]
        return found


class Target:
    """Numbers to be added to, all rows but the last and these columns of a buffer that two of them
    may share.
    """

    def __init__(self, buffer: Tensor, columns: slice, generator: torch.Generator) -> None:
        self.inside = buffer[..., :-1, :, columns]
        self.inside.copy_(torch.randn(self.inside.shape, generator=generator))
        self.before = self.inside.clone()
        self.last_row = buffer[..., -1, :, :]

    def problems(self, gradient: Tensor, is_exact: bool) -> Iterator[str]:
        expected = self.before + gradient
        largest = float(gradient.abs().max()) if gradient.numel() else 0.0
        tolerance = 0.0 if is_exact else 1e-5 * (1.0 + largest)
        off = (self.inside - expected).abs()
        if not bool((off <= tolerance).all()):  # NaN is worse
            yield f"off by {float(off.max())}, {tolerance} is allowed"
        if not bool((self.last_row == PATTERN).all()):
            yield "the row behind it was written"


LENGTHS = {"lengths_q": (300, 0, 517, 33), "lengths_k": (400, 20, 517, 33), "packed": True}
WHATS: tuple[dict[str, Any], ...] = (
    # Ways of dq (plan_backward.cpp): direct, converted, in sweeps, finished.
    {"what": "one key tile", "lengths_q": (300,) * 2, "lengths_k": (60,) * 2},
    {"what": "some key tiles", "lengths_q": (301,) * 2, "lengths_k": (457,) * 2,
     "options": {"causal": True}},
    {"what": "sweeps", "lengths_q": (70,) * 2, "lengths_k": (300,) * 2, "heads": (66, 66)},
    {"what": "long", "lengths_q": (4000,), "lengths_k": (4000,), "heads": (8, 8),
     "options": {"causal": True}},
    {"what": "fixed order", "lengths_q": (301,) * 2, "lengths_k": (457,) * 2,
     "options": {"causal": True, "deterministic": True}},
    # dk and dv of several CTAs.
    {"what": "split heads", "lengths_q": (2000,), "lengths_k": (100,), "heads": (16, 1)},
    {"what": "shared tiles", "lengths_q": (400,), "lengths_k": (800,), "heads": (40, 20)},
    # What nobody computes.
    {"what": "queries without keys", "lengths_q": (300,) * 2, "lengths_k": (60,) * 2,
     "options": {"causal": True}},
    {"what": "keys without queries", "lengths_q": (64,) * 2, "lengths_k": (600,) * 2,
     "options": {"window_size_left": 20, "window_size_right": 0}},
    {"what": "no queries", "lengths_q": (0,) * 2, "lengths_k": (70,) * 2},
    {"what": "no keys", "lengths_q": (70,) * 2, "lengths_k": (0,) * 2},
    {"what": "packed", **LENGTHS, "options": {"causal": True}},
    {"what": "packed, in sweeps", "lengths_q": (200, 0, 250, 33) * 4,
     "lengths_k": (200, 70, 250, 33) * 4, "heads": (132, 132), "packed": True,
     "options": {"causal": True}},
    {"what": "packed, partly used", **LENGTHS,
     "used": ((200, 0, 517, 5), (300, 20, 400, 33), (50, 3, 0, 30))},
    {"what": "features", **LENGTHS, "options": {"alibi": True, "softcap": 3.0, "dropout_p": 0.2,
     "window_size_left": 150}},
)  # fmt: skip


def sum_cases(device: str = "cuda") -> Iterator[SumCase]:
    """All of them at every head dim, types and places of targets by turns."""
    turns = zip(cycle((torch.bfloat16, torch.float16)), cycle(PLACES))
    for head_dims in HEAD_DIMS:
        for what in WHATS:
            dtype, place = next(turns)
            yield SumCase(**what, head_dims=head_dims, dtype=dtype, place=place, device=device)


def main() -> int:
    found = {str(case): case.problems() for case in sum_cases()}
    wrong = [f"{name}: {'; '.join(x)}" for name, x in found.items() if x]
    print(*wrong, f"{len(found)} cases", sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
