"""Packed sequences: every one is a dense call on its own rows.

q is (total_q, Hq, D), k (total_k, Hk, D), v (total_k, Hk, Dv), lse (Hq, total_q). Sequence b has
the rows from cu_seqlens[b] to cu_seqlens[b + 1]; of queries the first seqused_q[b] attend, and its
keys are those from leftpad_k[b] to seqused_k[b]. With a block_table (B, max_pages), k and v are the
pages (num_pages, page_size, Hk, D or Dv) that it names, and cu_seqlens_k gives lengths alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..checks.tensors import lse_dtype, output_shape
from .dense import attention_backward, attention_forward, probabilities
from .tiles import AttentionOptions, Origin

Rows = slice | tuple[Tensor, Tensor]  # an index into packed keys, or into pages


@dataclass(frozen=True)
class _Sequence:
    """Where a sequence that is not empty lies."""

    index: int
    queries: slice
    keys: Rows


def varlen_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    options: AttentionOptions,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    block_table: Tensor | None = None,
    origin: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """dense.attention_forward of every sequence: out (total_q, Hq, Dv) and lse (Hq, total_q).

    Rows of q that are no sequence's get out 0 and lse -inf. origin (B, 4): AttentionCall's.
    """
    out = torch.zeros(output_shape(q, v), dtype=options.result_dtype(q), device=q.device)
    lse = torch.full((q.shape[1], q.shape[0]), -math.inf, dtype=lse_dtype(q.dtype), device=q.device)
    lengths = (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, leftpad_k)
    for sequence in _sequences(*lengths, block_table, page_size=k.shape[1]):
        rows = sequence.queries
        out_rows, lse_rows = attention_forward(
            q[None, rows],
            k[sequence.keys][None],
            v[sequence.keys][None],
            _options_of(options, sequence, origin),
        )
        out[rows], lse[:, rows] = out_rows[0], lse_rows[0]
    return out, lse


def varlen_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    options: AttentionOptions,
    dlse: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    dbias: Tensor | None = None,
    origin: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dense.attention_backward of every sequence: dq, dk, dv like q, k, v and softmax_d (Hq,
    total_q). Rows that are no sequence's get 0. Each adds to dbias where that is given.
    """
    dq, dk, dv = (
        torch.zeros(x.shape, dtype=options.result_dtype(x), device=x.device) for x in (q, k, v)
    )
    softmax_d = torch.zeros(lse.shape, dtype=lse.dtype, device=lse.device)
    for sequence in _sequences(cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, leftpad_k):
        rows, keys = sequence.queries, sequence.keys
        gradients = attention_backward(
            dout[None, rows],
            q[None, rows],
            k[None, keys],
            v[None, keys],
            out[None, rows],
            lse[None, :, rows],
            _options_of(options, sequence, origin),
            None if dlse is None else dlse[None, :, rows],
            dbias=dbias,
        )
        dq[rows], dk[keys], dv[keys] = (x[0] for x in gradients[:3])
        softmax_d[:, rows] = gradients[3][0, :, : rows.stop - rows.start]
    return dq, dk, dv, softmax_d


def varlen_probabilities(
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    options: AttentionOptions,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    block_table: Tensor | None = None,
) -> Tensor:
    """dense.probabilities of every sequence, in the first rows and columns of its part of (B, Hq,
    max_seqlen_q, max_seqlen_k); 0 beyond.
    """
    batch = cu_seqlens_q.shape[0] - 1
    shape = (batch, q.shape[1], max_seqlen_q, max_seqlen_k)
    probs = torch.zeros(shape, dtype=q.dtype, device=q.device)
    lengths = (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, leftpad_k)
    for sequence in _sequences(*lengths, block_table, page_size=k.shape[1]):
        rows = sequence.queries
        of_sequence = probabilities(
            q[None, rows],
            k[sequence.keys][None],
            lse[None, :, rows],
            _options_of(options, sequence, None),
        )
        seqlen_q, seqlen_k = of_sequence.shape[2:]
        probs[sequence.index, :, :seqlen_q, :seqlen_k] = of_sequence[0]
    return probs


def _options_of(
    options: AttentionOptions, sequence: _Sequence, origins: Tensor | None
) -> AttentionOptions:
    origin = None if origins is None else Origin.of_row(origins[sequence.index])
    return replace(options, first_sequence=sequence.index, origin=origin)


def page_rows(pages: Tensor, page_size: int, begin: int, end: int) -> tuple[Tensor, Tensor]:
    """An index into pages (num_pages, page_size, ...): a sequence's rows begin to end, where
    `pages` is its row of the block table.
    """
    positions = torch.arange(begin, end, device=pages.device)
    return pages[positions // page_size].long(), positions % page_size


def _sequences(
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    seqused_q: Tensor | None,
    seqused_k: Tensor | None,
    leftpad_k: Tensor | None,
    block_table: Tensor | None = None,
    page_size: int = 0,
) -> Iterator[_Sequence]:
    """Those with a query: without one there is nothing to compute."""
    starts_q, starts_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    used_q, used_k, leftpad = (
        None if x is None else x.tolist() for x in (seqused_q, seqused_k, leftpad_k)
    )
    for index in range(len(starts_q) - 1):
        start_q, start_k = starts_q[index], starts_k[index]
        count_q = starts_q[index + 1] - start_q if used_q is None else used_q[index]
        end = starts_k[index + 1] - start_k if used_k is None else used_k[index]
        begin = 0 if leftpad is None else leftpad[index]
        if count_q == 0:
            continue
        keys: Rows = slice(start_k + begin, start_k + end)
        if block_table is not None:
            keys = page_rows(block_table[index], page_size, begin, end)
        yield _Sequence(index, slice(start_q, start_q + count_q), keys)
