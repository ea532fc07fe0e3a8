"""The reference for packed sequences (see __init__.py): every sequence on its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tests.reference.dense import attention, attention_with_gradients, low_precision
from tests.reference.options import PLAIN, AttentionOptions, AttentionResult
from tests.reference.parts import told_apart


@dataclass(frozen=True)
class Lengths:
    """Of packed sequences."""

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    seqused_q: Tensor | None = None
    seqused_k: Tensor | None = None
    leftpad_k: Tensor | None = None

    def sequences(self) -> Iterator[tuple[int, slice, slice]]:
        """The index of each, its queries and its keys, as rows of the packed tensors."""
        starts_q, starts_k = self.cu_seqlens_q.tolist(), self.cu_seqlens_k.tolist()
        for index in range(len(starts_q) - 1):
            begin_q, end_q = starts_q[index : index + 2]
            begin_k, end_k = starts_k[index : index + 2]
            if self.seqused_q is not None:
                end_q = begin_q + int(self.seqused_q[index])
            if self.seqused_k is not None:
                end_k = begin_k + int(self.seqused_k[index])
            if self.leftpad_k is not None:
                begin_k += int(self.leftpad_k[index])
            yield index, slice(begin_q, end_q), slice(begin_k, end_k)


def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    options: AttentionOptions = PLAIN,
    compute_dtype: torch.dtype = torch.float64,
    **others: Any,
) -> tuple[Tensor, Tensor]:
    """(out, lse) of dense.attention of every sequence, differentiable in what that is. `others` are
    Lengths, and fields of `options`, here and below.
    """
    lengths, features = told_apart(Lengths, others)
    options = replace(options, **features)
    total_q, heads_q, _ = q.shape
    outs: list[Tensor] = []
    lses: list[Tensor] = []
    row = 0

    def skip_to(end: int) -> None:
        """Rows of no sequence."""
        outs.append(q.new_zeros(end - row, heads_q, v.shape[-1], dtype=compute_dtype))
        lses.append(q.new_full((heads_q, end - row), -torch.inf, dtype=compute_dtype))

    for index, at_q, at_k in lengths.sequences():
        skip_to(at_q.start)
        part = options.of_sequence(index, at_q.stop - at_q.start, at_k.stop - at_k.start)
        tensors = q[None, at_q], k[None, at_k], v[None, at_k]
        out, lse = attention(*tensors, options=part, compute_dtype=compute_dtype)
        outs.append(out[0])
        lses.append(lse[0])
        row = at_q.stop
    skip_to(total_q)
    return torch.cat(outs), torch.cat(lses, 1)


def varlen_attention_with_gradients(
    *tensors: Tensor | None, compute_dtype: torch.dtype = torch.float64, **others: Any
) -> AttentionResult:
    """dense.attention_with_gradients of every sequence, of q, k, v, dout and dlse, which is
    (Hq, total_q).

    options.keep_mask is (B, Hq, longest Sq, longest Sk) or larger. Tensors of the result have the
    shapes of dout, q, k, v and (Hq, total_q).
    """

    def run(*tensors: Any, options: AttentionOptions) -> AttentionResult:
        return attention_with_gradients(*tensors, options=options, compute_dtype=compute_dtype)

    return _each(run, compute_dtype, *tensors, **others)


def varlen_low_precision(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, dlse: Tensor | None, **others: Any
) -> AttentionResult:
    """dense.low_precision of every sequence."""
    return _each(low_precision, q.dtype, q, k, v, dout, dlse, **others)


def _each(
    run: Callable[..., AttentionResult],
    dtype: torch.dtype,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    *,
    options: AttentionOptions = PLAIN,
    **others: Any,
) -> AttentionResult:
    lengths, features = told_apart(Lengths, others)
    options = replace(options, **features)
    out, dq, dk, dv = (torch.zeros_like(x, dtype=dtype) for x in (dout, q, k, v))
    lse = torch.full((q.shape[1], q.shape[0]), -torch.inf, dtype=dtype, device=q.device)
    sums = {name: torch.zeros_like(x, dtype=dtype) for name, x in options.leaves().items()}
    batch = lengths.cu_seqlens_q.shape[0] - 1
    max_logits = torch.full((batch, q.shape[1]), -torch.inf, dtype=dtype, device=q.device)
    noise: dict[str, float] = {}
    for index, at_q, at_k in lengths.sequences():
        of = (index, at_q.stop - at_q.start, at_k.stop - at_k.start)
        result = run(
            q[None, at_q],
            k[None, at_k],
            v[None, at_k],
            dout[None, at_q],
            None if dlse is None else dlse[None, :, at_q],
            options=options.of_sequence(*of),
        )
        out[at_q], lse[:, at_q], dq[at_q] = result.out[0], result.lse[0], result.dq[0]
        dk[at_k], dv[at_k] = result.dk[0], result.dv[0]
        max_logits[index] = result.max_logits[0]
        for name, x in replace(options, **sums).of_sequence(*of).leaves().items():
            x.add_(getattr(result, f"d{name}"))
        for name, value in result.noise.items():
            noise[name] = max(noise.get(name, 0.0), value)
    gradients = {"dq": dq, "dk": dk, "dv": dv, **{f"d{name}": x for name, x in sums.items()}}
    return AttentionResult(out=out, lse=lse, **gradients, max_logits=max_logits, noise=noise)


def dense_keys(
    cache: Tensor, entry: int, begin: int, end: int, block_table: Tensor | None = None
) -> Tensor:
    """Rows begin to end of sequence `entry` as a new (end - begin, Hk, D).

    `entry` is a batch entry of `cache` (B, capacity, Hk, D) or, with `block_table` (B, max_pages),
    a row of the table, and `cache` the pages (num_pages, page_size, Hk, D).
    """
    if block_table is None:
        return cache[entry, begin:end].clone()
    positions = torch.arange(begin, end, device=cache.device)
    return cache[places_of(positions, entry, cache.shape[1], block_table)]


def places_of(
    positions: Tensor, entry: int, page_size: int, block_table: Tensor | None
) -> tuple[Tensor, Tensor]:
    """First two indices into a cache, as dense_keys has it, of those rows of sequence `entry`."""
    if block_table is None:
        return torch.full_like(positions, entry), positions
    pages = block_table[entry][positions // page_size]
    return pages.to(positions.dtype), positions % page_size
