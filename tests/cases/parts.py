"""Attention of packed documents in parts: queries and keys of every document are cut, a call with
an origin is made of each pair of parts, and the results are put together again.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from flash_attn_cuda.call.fields import AttentionCall, Incoming
from flash_attn_cuda.call.tensors import lse_dtype
from flash_attn_cuda.operators.derivatives import run_gradients_operator, run_operator
from tests.cases.operators import incoming_of


@dataclass(frozen=True)
class Documents:
    """Lengths, and where all documents are cut: at the same positions, those beyond a document
    aside.
    """

    lengths_q: tuple[int, ...]
    lengths_k: tuple[int, ...]
    cuts_q: tuple[int, ...]
    cuts_k: tuple[int, ...]

    def parts(self) -> Iterator[tuple[list[range], list[range]]]:
        """Queries and keys of every document, within it, for each pair of parts."""
        for of_q in _pieces(self.lengths_q, self.cuts_q):
            for of_k in _pieces(self.lengths_k, self.cuts_k):
                yield of_q, of_k


@dataclass(frozen=True)
class Inputs:
    """Packed tensors of some documents, and the gradients of their results."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    dlse: Tensor

    @classmethod
    def random(
        cls,
        documents: Documents,
        heads: tuple[int, int] = (4, 2),
        head_dim: int = 16,
        dtype: torch.dtype = torch.float64,
        device: str = "cpu",
        head_dim_v: int | None = None,
        seed: int = 0,
    ) -> Inputs:
        total_q, total_k = sum(documents.lengths_q), sum(documents.lengths_k)
        columns_v = head_dim if head_dim_v is None else head_dim_v
        made = torch.Generator().manual_seed(seed)

        def normal(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.randn(shape, generator=made, dtype=torch.float64).to(device, dtype)

        return cls(
            q=normal(total_q, heads[0], head_dim),
            k=normal(total_k, heads[1], head_dim),
            v=normal(total_k, heads[1], columns_v),
            dout=normal(total_q, heads[0], columns_v),
            dlse=normal(heads[0], total_q, dtype=lse_dtype(dtype)),
        )

    def exact(self) -> Inputs:
        """The same numbers in fp64 on the CPU."""
        return Inputs(**{name: x.cpu().double() for name, x in vars(self).items()})


NAMES = ("out", "lse", "dq", "dk", "dv")


@dataclass
class Results:
    out: Tensor
    lse: Tensor
    gradients: list[Tensor] = field(default_factory=list)  # dq, dk, dv

    def named(self) -> dict[str, Tensor]:
        return dict(zip(NAMES, (self.out, self.lse, *self.gradients), strict=True))


def run_whole(documents: Documents, inputs: Inputs, **options: Any) -> tuple[Results, Tensor]:
    """(results, rng_state) of one call."""
    call = AttentionCall(
        **vars_of(inputs),
        **lengths_of([range(x) for x in documents.lengths_q], "q", inputs.q),
        **lengths_of([range(x) for x in documents.lengths_k], "k", inputs.q),
        **options,
    )
    found = run_operator(call)
    incoming = incoming_of(found, inputs.dout, inputs.dlse)
    gradients = list(run_gradients_operator(call, incoming)[:3])
    return Results(found.out, found.softmax_lse, gradients), found.rng_state


def run_parts(
    documents: Documents, inputs: Inputs, rng_state: Tensor | None, **options: Any
) -> Results:
    """The same by parts, which have fp32 results (fp64 of fp64 inputs) and are summed in fp64."""
    rows_q, rows_k = inputs.q.shape[0], inputs.k.shape[0]
    found = Results(
        out=torch.zeros_like(inputs.dout, dtype=torch.float64),
        lse=torch.full_like(inputs.dlse, -torch.inf, dtype=torch.float64),
    )
    parts = list(documents.parts())
    for of_q, of_k in parts:
        call, index_q, _ = part_call(documents, inputs, of_q, of_k, rng_state, **options)
        out, lse, *_ = run_operator(call)
        assert out.dtype == lse.dtype
        _merge(found, index_q, out.double(), lse.double())
    out, lse = found.out.to(inputs.q.dtype), found.lse.to(inputs.dlse.dtype)
    sums = [
        torch.zeros((rows, *x.shape[1:]), dtype=torch.float64, device=x.device)
        for rows, x in ((rows_q, inputs.q), (rows_k, inputs.k), (rows_k, inputs.v))
    ]
    for of_q, of_k in parts:
        call, index_q, index_k = part_call(documents, inputs, of_q, of_k, rng_state, **options)
        incoming = Incoming(
            inputs.dout[index_q], inputs.dlse[:, index_q], out[index_q], lse[:, index_q], rng_state
        )
        gradients = run_gradients_operator(call, incoming)[:3]
        for total, index, x in zip(sums, (index_q, index_k, index_k), gradients, strict=True):
            assert x.dtype == lse.dtype
            total[index] += x
    return replace(found, gradients=sums)


def worse_than(found: Results, yardstick: Results, exact: Results) -> list[str]:
    """What of `found` is further from the exact results than twice the yardstick is, which one call
    in 16 bits gave, but for a rounding of the largest number.
    """
    problems = []
    for name, x in found.named().items():
        y, z = yardstick.named()[name], exact.named()[name]
        if x.numel() == 0:
            continue
        keyless = z == -torch.inf
        if not torch.equal(x.cpu() == -torch.inf, keyless):
            problems.append(f"{name}: -inf is not exactly where no key is visible")
            continue
        error, allowed = (
            (a.cpu().double() - z).masked_fill(keyless, 0.0).abs().max().item() for a in (x, y)
        )
        largest = z.masked_fill(keyless, 0.0).abs().max().item()
        eps = 2.0**-18 if name == "lse" else torch.finfo(y.dtype).eps / 2
        allowed = 2.0 * allowed + eps * (largest + (name == "lse"))
        if not error <= allowed:  # NaN is worse
            problems.append(f"{name}: off by {error}, {allowed} are allowed")
    return problems


def part_call(
    documents: Documents,
    inputs: Inputs,
    of_q: list[range],
    of_k: list[range],
    rng_state: Tensor | None = None,
    **options: Any,
) -> tuple[AttentionCall, Tensor, Tensor]:
    """The call of a pair of parts, and the rows of the packed tensors that it reads."""
    index_q = _rows(documents.lengths_q, of_q, inputs.q)
    index_k = _rows(documents.lengths_k, of_k, inputs.q)
    heads = inputs.q.shape[1]
    lengths = zip(documents.lengths_q, documents.lengths_k, strict=True)
    rows = [
        [b * heads, q.start, k.start, seqlen_k - seqlen_q + q.start - k.start]
        for b, ((seqlen_q, seqlen_k), q, k) in enumerate(zip(lengths, of_q, of_k, strict=True))
    ]
    call = AttentionCall(
        q=inputs.q[index_q],
        k=inputs.k[index_k],
        v=inputs.v[index_k],
        **lengths_of(of_q, "q", inputs.q),
        **lengths_of(of_k, "k", inputs.q),
        origin=torch.tensor(rows, dtype=torch.int32, device=inputs.q.device).view(-1, 4),
        rng_state=rng_state,
        **{"fp32_results": True, **options},
    )
    return call, index_q, index_k


def vars_of(inputs: Inputs) -> dict[str, Tensor]:
    return {"q": inputs.q, "k": inputs.k, "v": inputs.v}


def lengths_of(pieces: list[range], which: str, like: Tensor) -> dict[str, Any]:
    """cu_seqlens and max_seqlen of queries or keys."""
    lengths = [len(x) for x in pieces]
    starts = torch.tensor([0, *lengths], device=like.device).cumsum(0, dtype=torch.int32)
    return {f"cu_seqlens_{which}": starts, f"max_seqlen_{which}": max(lengths, default=0)}


def _pieces(lengths: tuple[int, ...], cuts: tuple[int, ...]) -> list[list[range]]:
    pairs = list(itertools.pairwise((0, *cuts, max(lengths))))
    return [[range(begin, max(begin, min(end, x))) for x in lengths] for begin, end in pairs]


def _rows(lengths: tuple[int, ...], pieces: list[range], like: Tensor) -> Tensor:
    first, rows = 0, []
    for length, piece in zip(lengths, pieces, strict=True):
        rows += [first + x for x in piece]
        first += length
    return torch.tensor(rows, dtype=torch.int64, device=like.device)


def _merge(found: Results, rows: Tensor, out: Tensor, lse: Tensor) -> None:
    before = found.lse[:, rows]
    both = torch.logaddexp(before, lse)
    finite = both.masked_fill(both == -torch.inf, 0.0)
    old, new = ((x - finite).exp().T[..., None] for x in (before, lse))
    found.out[rows] = found.out[rows] * old + out * new
    found.lse[:, rows] = both
