"""Rows of tensors between ranks: functional collectives of torch.distributed, which torch.compile
traces and which run beside kernels until somebody reads what they bring.
"""

from __future__ import annotations

import torch.distributed._functional_collectives as collectives
from torch import Tensor
from torch.distributed import ProcessGroup

from .steps import Exchange

# By its name of torch 2.14, which warns of the other.
_all_gather = getattr(collectives, "all_gather_single", None) or collectives.all_gather_tensor


def send(exchange: Exchange, k: Tensor, v: Tensor, group: ProcessGroup) -> Tensor:
    """What the ranks sent, one rank behind the other, of k (rows, heads, D) and v (rows, heads, Dv)
    that each has: (rows, heads, D + Dv).
    """
    columns = k.shape[-1]
    sent = k.new_empty((sum(exchange.sent), k.shape[1], columns + v.shape[-1]))
    row = 0
    for begin, end in exchange.rows:
        to = sent[row : row + end - begin]
        to[..., :columns] = k[begin:end]
        to[..., columns:] = v[begin:end]
        row += end - begin
    return collectives.all_to_all_single(sent, list(exchange.received), list(exchange.sent), group)


def of_all_ranks(x: Tensor, group: ProcessGroup) -> Tensor:
    """x of every rank, one behind the other."""
    return arrived(_all_gather(x, 0, group))


def arrived(x: Tensor) -> Tensor:
    """What `send` or `send_back` brings; kernels from here on wait for it, the host does not."""
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
    """x (ranks, ...): entry r goes to rank r, and comes from there."""
    sizes = [1] * x.shape[0]
    return arrived(collectives.all_to_all_single(x.contiguous(), sizes, sizes, group))


def reordered(x: Tensor, order: Tensor | None) -> Tensor:
    """These rows; None: as they are."""
    return x if order is None else x.index_select(0, order)
