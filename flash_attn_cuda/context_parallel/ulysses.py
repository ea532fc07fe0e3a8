"""Ulysses: a rank gets all rows of its share of the heads, and gives the others their rows of the
results (Jacobs et al., "DeepSpeed Ulysses", 2023, section 3.1). What goes the same way at the same
time travels side by side, in one collective.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.distributed import ProcessGroup

from .exchange import all_to_all, reordered
from .transforms import in_forward_mode


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


class AllRows(torch.autograd.Function):
    """all_rows, a linear function, whose adjoint is own_rows."""

    @staticmethod
    def forward(across: Across, *tensors: Tensor) -> tuple[Tensor, ...]:
        return all_rows(tensors, across)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.across = inputs[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        if is_compiling():
            return None, *own_rows(gradients, ctx.across)
        return None, *give_own_rows(ctx.across, *gradients)


class OwnRows(torch.autograd.Function):
    """own_rows, a linear function, whose adjoint is all_rows."""

    @staticmethod
    def forward(across: Across, *tensors: Tensor) -> tuple[Tensor, ...]:
        return own_rows(tensors, across)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.across = inputs[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        if is_compiling():
            return None, *all_rows(gradients, ctx.across)
        return None, *give_all_rows(ctx.across, *gradients)


class DualAllRows(AllRows):
    """AllRows with forward mode, which torch.compile does not trace."""

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: Tensor) -> Any:
        return give_all_rows(ctx.across, *tangents)


class DualOwnRows(OwnRows):
    """OwnRows likewise."""

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: Tensor) -> Any:
        return give_own_rows(ctx.across, *tangents)


def give_all_rows(across: Across, *tensors: Tensor) -> tuple[Tensor, ...]:
    """all_rows, differentiable in the modes that are there."""
    function = DualAllRows if in_forward_mode() else AllRows
    found: tuple[Tensor, ...] = function.apply(across, *tensors)
    return found


def give_own_rows(across: Across, *tensors: Tensor) -> tuple[Tensor, ...]:
    """own_rows, likewise."""
    function = DualOwnRows if in_forward_mode() else OwnRows
    found: tuple[Tensor, ...] = function.apply(across, *tensors)
    return found


def all_rows(tensors: Sequence[Tensor], across: Across) -> tuple[Tensor, ...]:
    """Of (rows, heads, dim) of each rank, all rows of this rank's heads, (ranks * rows, heads /
    ranks, dim), in the order of the joined plan.
    """
    by_rank = [of_each_rank(x, across.ranks) for x in tensors]
    shapes = [x.shape[2:] for x in by_rank]
    widths = [heads * dim for heads, dim in shapes]
    sent = by_rank[0].new_empty((*by_rank[0].shape[:2], sum(widths)))
    for columns, x, shape in zip(sent.split(widths, -1), by_rank, shapes, strict=True):
        copy(columns.unflatten(-1, shape), x)
    rows = reordered(all_to_all(sent, across.group).flatten(0, 1), across.order)
    columns_of = zip(rows.split(widths, -1), shapes, strict=True)
    return tuple(columns.unflatten(-1, shape) for columns, shape in columns_of)


def own_rows(tensors: Sequence[Tensor], across: Across) -> tuple[Tensor, ...]:
    """The way back: this rank's rows of all heads."""
    flat = [x.flatten(1) for x in tensors]
    rows = reordered(flat[0] if len(flat) == 1 else torch.cat(flat, 1), across.places)
    came = all_to_all(rows.unflatten(0, (across.ranks, -1)), across.group)
    found = []
    for columns, x in zip(came.split([x.shape[1] for x in flat], -1), tensors, strict=True):
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
