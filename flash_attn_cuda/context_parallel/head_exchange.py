"""Heads for rows: a rank gets all rows of its share of the heads, and gives the others their rows
of the results (Jacobs et al., "DeepSpeed Ulysses", 2023, section 3.1). Tensors of one dtype that go
the same way travel side by side, in one collective.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.distributed import ProcessGroup

from .exchange import all_to_all, arrived, reordered


@dataclass(frozen=True, eq=False)
class Across:
    """The ranks that share out the heads. order: of each row of their joined plan, its row where
    their shards lie one behind the other; places: the way back; None: as they are.
    """

    group: ProcessGroup
    ranks: int
    order: Tensor | None
    places: Tensor | None


def check_heads(heads_q: int, heads_k: int, ranks: int) -> None:
    """Raises where ranks cannot share them out, each rank with one of keys at least."""
    if heads_q % ranks or (heads_k % ranks and ranks % heads_k):
        raise ValueError(
            f"heads: ulysses over {ranks} ranks takes a multiple of them of query heads and a "
            f"multiple or a divisor of key heads, got {heads_q} and {heads_k}"
        )


def all_rows(tensors: Sequence[Tensor], across: Across) -> tuple[Tensor, ...]:
    """Of (rows, heads, dim) that each rank has, all rows of this rank's heads, (ranks * rows, heads
    / ranks, dim), in the order of the joined plan.
    """
    by_rank = [of_each_rank(x, across.ranks) for x in tensors]
    shapes = [x.shape[2:] for x in by_rank]
    widths = [heads * dim for heads, dim in shapes]
    sent = by_rank[0].new_empty((*by_rank[0].shape[:2], sum(widths)))
    for columns, x, shape in zip(sent.split(widths, -1), by_rank, shapes, strict=True):
        copy(columns.unflatten(-1, shape), x)
    came = arrived(all_to_all(sent, across.group))
    columns_of = reordered(came.flatten(0, 1), across.order).split(widths, -1)
    return tuple(x.unflatten(-1, shape) for x, shape in zip(columns_of, shapes, strict=True))


def side_by_side(tensors: Sequence[Tensor]) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Room for columns of all of these, (rows, width), and its views of the shape of each."""
    widths = [x.shape[1] * x.shape[2] for x in tensors]
    room = tensors[0].new_empty((tensors[0].shape[0], sum(widths)))
    columns_of = zip(room.split(widths, 1), tensors, strict=True)
    return room, tuple(columns.unflatten(1, x.shape[1:]) for columns, x in columns_of)


def own_rows(joined: Tensor, tensors: Sequence[Tensor], across: Across) -> tuple[Tensor, ...]:
    """The way back: of these tensors, (ranks * rows, heads, dim), which lie side by side in
    `joined`, this rank's rows of all heads, (rows, ranks * heads, dim).
    """
    rows = reordered(joined, across.places).unflatten(0, (across.ranks, -1))
    came = arrived(all_to_all(rows, across.group))
    widths = [x.shape[1] * x.shape[2] for x in tensors]
    found = []
    for columns, x in zip(came.split(widths, -1), tensors, strict=True):
        _, heads, dim = x.shape
        found.append(x.new_empty((came.shape[1], across.ranks * heads, dim)))
        copy(of_each_rank(found[-1], across.ranks), columns.unflatten(-1, (heads, dim)))
    return tuple(found)


def of_each_rank(x: Tensor, ranks: int) -> Tensor:
    """(rows, heads, dim) as (ranks, rows, heads / ranks, dim), a view."""
    return x.unflatten(1, (ranks, -1)).transpose(0, 1)


def copy(into: Tensor, x: Tensor) -> None:
    """Eight bytes at a time where that can be: where rows are not side by side torch copies item by
    item, on CUDA at half the speed.
    """
    if not is_compiling() and is_of_words(into) and is_of_words(x):
        into, x = into.view(torch.int64), x.view(torch.int64)
    into.copy_(x)


def is_of_words(x: Tensor) -> bool:
    """Whether it can be viewed as int64: all rows begin and end between words."""
    steps = (*x.stride()[:-1], x.storage_offset(), x.shape[-1])
    is_even = all(step * x.element_size() % 8 == 0 for step in steps)
    return is_even and x.stride(-1) == 1 and x.data_ptr() % 8 == 0
