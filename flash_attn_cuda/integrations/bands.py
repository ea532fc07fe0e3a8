"""Bands of keys that need not hold the diagonal, on kernels whose windows do.

With shift = seqlen_k - seqlen_q, a window of the kernels has for query i the keys from i + shift -
left to i + shift + right, neither of them negative. A band has those from i + shift + first to i +
shift + last, of any signs, and is a window of shorter sequences:

- last < 0: nobody sees the last -last keys. Without them shift is that much smaller, and right 0.
- first > 0: the last `first` queries see no key. Without them shift is that much larger, and left
  0.
- first > last: nobody sees anything, which is a call without queries.

Lengths are what every kernel has, forward and backward, dense, packed and over pages, with masks
and sinks: what is left counts from a sequence's first query and key as before. AttentionCall.origin
says such shifts too, but of packed sequences alone, without pages, masks and biases.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..call.fields import AttentionCall
from ..call.tensors import MAX_INT32
from ..call.window import UNLIMITED, WindowSize
from ..functions.arguments import rows_bound


class Hidden(NamedTuple):
    """The last rows of every sequence that are not there for a kernel; all, where these are more
    than it has.
    """

    queries: int = 0  # which see no key
    keys: int = 0  # which no query sees


class Band(NamedTuple):
    """Keys from i + seqlen_k - seqlen_q + first to the same + last for query i; None: no end."""

    first: int | None
    last: int | None

    def as_window(self) -> tuple[bool, WindowSize, Hidden]:
        """(causal, window_size) of what Hidden leaves."""
        first, last = _within_int32(self.first), _within_int32(self.last)
        if first is not None and last is not None and first > last:
            return False, UNLIMITED, Hidden(queries=MAX_INT32)
        if first is not None and first > 0:
            right = None if last is None else last - first
            return *_window(0, right), Hidden(queries=first)
        if last is not None and last < 0:
            left = None if first is None else last - first
            return *_window(left, 0), Hidden(keys=-last)
        return *_window(None if first is None else -first, last), Hidden()


def _within_int32(end: int | None) -> int | None:
    """The same band: no sequence is longer."""
    return None if end is None else max(-MAX_INT32, min(end, MAX_INT32))


def _window(left: int | None, right: int | None) -> tuple[bool, WindowSize]:
    causal = right == 0
    is_plain = left is None and (causal or right is None)
    return causal, UNLIMITED if is_plain else (left, right)


# -- sequences of one length -----------------------------------------------------------------------


def cut_rows(hidden: Hidden, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Views of q (B, Sq, ...), k and v (B, Sk, ...) without the hidden rows."""
    queries, keys = q.shape[1] - hidden.queries, k.shape[1] - hidden.keys
    return q[:, : max(queries, 0)], k[:, : max(keys, 0)], v[:, : max(keys, 0)]


def with_hidden_rows(
    out: Tensor, softmax_lse: Tensor, seqlen_q: int, sink: Tensor | None
) -> tuple[Tensor, Tensor]:
    """out (B, Sq, Hq, Dv) and softmax_lse (B, Hq, Sq) with rows of no key up to seqlen_q."""
    missing = seqlen_q - out.shape[1]
    if missing == 0:
        return out, softmax_lse
    of_no_key = -torch.inf if sink is None else sink.to(softmax_lse.dtype)[:, None]
    empty = softmax_lse.new_zeros((*softmax_lse.shape[:2], missing)) + of_no_key
    return pad(out, (0, 0, 0, 0, 0, missing)), torch.cat((softmax_lse, empty), 2)


# -- packed sequences ------------------------------------------------------------------------------


def cut_lengths(hidden: Hidden, call: AttentionCall) -> tuple[Tensor | None, Tensor | None]:
    """(seqused_q, seqused_k) of this packed call without the hidden rows."""
    assert call.cu_seqlens_q is not None
    seqused_q, seqused_k = call.seqused_q, call.seqused_k
    if hidden.queries:
        seqused_q = _without(hidden.queries, seqused_q, call.cu_seqlens_q.diff())
    if hidden.keys:
        if call.cu_seqlens_k is not None:
            rows = call.cu_seqlens_k.diff()
        else:
            assert seqused_k is not None
            rows = torch.full_like(seqused_k, rows_bound(call.k, call.block_table))
        seqused_k = _without(hidden.keys, seqused_k, rows)
    return seqused_q, seqused_k


def _without(hidden: int, used: Tensor | None, rows: Tensor) -> Tensor:
    """What is used less the hidden rows; a length that is wrong stays it, for what reports it."""
    if used is None:
        return (rows - hidden).clamp(min=0)
    is_right = (used >= 0) & (used <= rows)
    return torch.where(is_right, (used - hidden).clamp(min=0), used)


def with_sink(softmax_lse: Tensor, sink: Tensor, call: AttentionCall, seqused_q: Tensor) -> Tensor:
    """softmax_lse (Hq, total_q) of the call with the sink in the rows of queries that it has, and
    that are beyond seqused_q.
    """
    bounds, batch = call.cu_seqlens_q, call.batch()
    assert bounds is not None
    if batch == 0:
        return softmax_lse
    row = torch.arange(softmax_lse.shape[1], device=bounds.device, dtype=bounds.dtype)
    owner = torch.searchsorted(bounds[1:], row, right=True)
    is_hidden = owner < batch
    owner = owner.clamp(max=batch - 1)
    place = row - bounds[owner]
    is_hidden &= place >= seqused_q[owner]
    if call.seqused_q is not None:
        is_hidden &= place < call.seqused_q[owner]
    return torch.where(is_hidden, sink.to(softmax_lse.dtype)[:, None], softmax_lse)
