"""Softmax over parts of the keys: Dao, "FlashAttention-2", 2023, section 3.1.1, between calls."""

from __future__ import annotations

import torch
from torch import Tensor

from ..call.rounding import rounded
from ..call.tensors import lse_dtype
from ..functions.arguments import is_plain_cuda_call
from ..installed import build_info


def merge_(
    out: Tensor,
    softmax_lse: Tensor,
    part: Tensor,
    part_lse: Tensor,
    result: Tensor | None = None,
    rounding: Tensor | None = None,
) -> None:
    """Adds attention over other keys: out and part (rows, heads, dim), lse (heads, rows).

    -inf is the lse of a row that has seen no key. In place, but where a result, of another dtype,
    is given: it is written instead of out, whose contents are not to be read then, as is, where it
    is given, what rounding to that dtype takes from it.
    """
    if takes_kernel(out, part, part_lse):
        assert build_info.extension is not None
        build_info.extension.merge(out, softmax_lse, part, part_lse, result, rounding)
        return
    total = torch.logaddexp(softmax_lse, part_lse)
    out.mul_(weight(softmax_lse, total)).addcmul_(part, weight(part_lse, total))
    softmax_lse.copy_(total)
    if result is not None:
        round_into(out, result, rounding)


def round_into(exact: Tensor, result: Tensor, rounding: Tensor | None) -> None:
    """Writes the result and, where there is room for it, what rounding takes from it."""
    if rounding is None:
        result.copy_(exact)
    else:
        nearest, taken = rounded(exact, result.dtype)
        result.copy_(nearest)
        rounding.copy_(taken)


def takes_kernel(out: Tensor, part: Tensor, part_lse: Tensor) -> bool:
    """One kernel instead of torch's operators, which a compiler makes one of itself."""
    return out.shape[-1] % 8 == 0 and is_plain_cuda_call(out, part, part_lse)


def add_sink_(out: Tensor, softmax_lse: Tensor, sink: Tensor) -> None:
    """A key of score sink (heads,) and value 0, in the softmax of rows that see any other."""
    total = torch.logaddexp(softmax_lse, sink.to(softmax_lse.dtype)[:, None])
    total.masked_fill_(softmax_lse == -torch.inf, -torch.inf)
    out.mul_(weight(softmax_lse, total))
    softmax_lse.copy_(total)


def weight(softmax_lse: Tensor, total: Tensor) -> Tensor:
    """(rows, heads, 1): the share of a part in the whole."""
    share = (softmax_lse - total).exp().masked_fill(total == -torch.inf, 0.0)
    return share.t()[..., None]


def room_for_max_logits(sequences: int | None, q: Tensor) -> Tensor:
    """(sequences, heads) of no score, where they are returned; else empty."""
    shape = (0,) if sequences is None else (sequences, q.shape[1])
    return q.new_full(shape, -torch.inf, dtype=lse_dtype(q.dtype))


def raise_to_largest(max_logits: Tensor, sequences: Tensor, found: Tensor | None) -> None:
    """found: (sequences of a call, heads), where they are returned; sequences: which they are."""
    if found is not None and found.dim() > 1:
        max_logits.scatter_reduce_(0, sequences[:, None].expand_as(found), found, "amax")
