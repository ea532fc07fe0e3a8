"""Rows of tensors between ranks: functional collectives of torch.distributed, which torch.compile
traces and which run beside kernels until somebody reads what they bring.

Every rank must make the same exchanges in the same order, also where it sends and receives no row.
A compiler, which sees one rank, makes one of two exchanges that look alike to it, and moves into a
forward what does not read the gradients. So to a compiler rows are made by an operator that tells
every exchange of a pass from the others, and in a backward takes a gradient of the results.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed._functional_collectives as collectives
from torch import Tensor
from torch.compiler import is_compiling
from torch.distributed import ProcessGroup

from .steps import Exchange, Rows

_ops = torch.ops.flash_attn_cuda
# By its name of torch 2.14, which warns of the other.
_all_gather = getattr(collectives, "all_gather_single", None) or collectives.all_gather_tensor


@dataclass(frozen=True, eq=False)
class Turn:
    """Which exchange of a pass it is. after: in a backward, results and their gradients."""

    number: int
    after: Sequence[Tensor] = ()


def send(exchange: Exchange, tensors: Sequence[Tensor], group: ProcessGroup, turn: Turn) -> Tensor:
    """What the ranks sent, one rank behind the other, of tensors (rows, heads, D) that each has,
    such as k and v: (rows, heads, sum of D).
    """
    sent = rows_to_send(tensors, exchange.rows, turn)
    return collectives.all_to_all_single(sent, list(exchange.received), list(exchange.sent), group)


def rows_to_send(tensors: Sequence[Tensor], rows: Sequence[Rows], turn: Turn) -> Tensor:
    """These rows of the tensors, which are (rows, heads, D), side by side."""
    if not is_compiling():
        return _side_by_side(tensors, rows)
    bounds = [bound for of_part in rows for bound in of_part]
    sent: Tensor = _ops.rows_to_send(list(tensors), bounds, turn.number, list(turn.after))
    return sent


def _side_by_side(tensors: Sequence[Tensor], rows: Sequence[Rows]) -> Tensor:
    widths = [x.shape[-1] for x in tensors]
    total = sum(end - begin for begin, end in rows)
    sent = tensors[0].new_empty((total, tensors[0].shape[1], sum(widths)))
    row = 0
    for begin, end in rows:
        to = sent[row : row + end - begin].split(widths, -1)
        for columns, x in zip(to, tensors, strict=True):
            columns.copy_(x[begin:end])
        row += end - begin
    return sent


def _rows_to_send(
    tensors: Sequence[Tensor], bounds: Sequence[int], number: int, after: Sequence[Tensor]
) -> Tensor:
    """bounds: where each part begins and ends. The last two are for a compiler to see."""
    return _side_by_side(tensors, list(zip(bounds[::2], bounds[1::2], strict=True)))


torch.library.custom_op(
    "flash_attn_cuda::rows_to_send",
    _rows_to_send,
    mutates_args=(),
    schema="(Tensor[] tensors, int[] bounds, int number, Tensor[] after) -> Tensor",
).register_fake(_rows_to_send)


def of_all_ranks(x: Tensor, group: ProcessGroup) -> Tensor:
    """x of every rank, one behind the other."""
    return arrived(_all_gather(x, 0, group))


def arrived(x: Tensor) -> Tensor:
    """What a transfer brings; kernels from here on wait for it, the host does not."""
    return collectives.wait_tensor(x)


def send_back(exchange: Exchange, x: Tensor, group: ProcessGroup, turn: Turn) -> Tensor:
    """What the ranks have for the rows that `send` gave them, of x as `send` returned it."""
    x = x.contiguous() if x.shape[0] > 0 else rows_to_send([x], [], turn)
    return collectives.all_to_all_single(x, list(exchange.sent), list(exchange.received), group)


def add_back(exchange: Exchange, came: Tensor, total: Tensor, first_row: int = 0) -> None:
    """Adds what `send_back` brings to the rows that were sent, in the order of the ranks.
    first_row: the shard's row that total begins with.
    """
    came = arrived(came)
    row = 0
    for begin, end in exchange.rows:
        total[begin - first_row : end - first_row] += came[row : row + end - begin]
        row += end - begin


def all_to_all(x: Tensor, group: ProcessGroup) -> Tensor:
    """x (ranks, ...): entry r goes to rank r, and comes from there, once it has `arrived`."""
    sizes = [1] * x.shape[0]
    return collectives.all_to_all_single(x.contiguous(), sizes, sizes, group)


def reordered(x: Tensor, order: Tensor | None) -> Tensor:
    """These rows; None: as they are."""
    return x if order is None else x.index_select(0, order)
