"""Rows of tensors between ranks: functional collectives of torch.distributed, which torch.compile
traces and which run beside kernels until somebody reads what they bring.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed._functional_collectives as collectives
from torch import Tensor
from torch.distributed import ProcessGroup

from .steps import Exchange

# By its name of torch 2.14, which warns of the other.
_all_gather = getattr(collectives, "all_gather_single", None) or collectives.all_gather_tensor


def send(exchange: Exchange, tensors: Sequence[Tensor], group: ProcessGroup) -> Tensor:
    """What the ranks sent, one rank behind the other, of tensors (rows, heads, D) that each has,
    such as k and v: (rows, heads, sum of D).
    """
    widths = [x.shape[-1] for x in tensors]
    first = tensors[0]
    sent = first.new_empty((sum(exchange.sent), first.shape[1], sum(widths)))
    row = 0
    for begin, end in exchange.rows:
        to = sent[row : row + end - begin].split(widths, -1)
        for columns, x in zip(to, tensors, strict=True):
            columns.copy_(x[begin:end])
        row += end - begin
    return collectives.all_to_all_single(sent, list(exchange.received), list(exchange.sent), group)


def of_all_ranks(x: Tensor, group: ProcessGroup) -> Tensor:
    """x of every rank, one behind the other."""
    return arrived(_all_gather(x, 0, group))


def arrived(x: Tensor) -> Tensor:
    """What a transfer brings; kernels from here on wait for it, the host does not."""
    return collectives.wait_tensor(x)


def send_back(exchange: Exchange, x: Tensor, group: ProcessGroup) -> Tensor:
    """What the ranks have for the rows that `send` gave them, of x as `send` returned it."""
    return collectives.all_to_all_single(
        x.contiguous(), list(exchange.sent), list(exchange.received), group
    )


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
