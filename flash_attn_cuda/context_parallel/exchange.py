"""Rows of tensors between ranks: functional collectives of torch.distributed, which torch.compile
traces and which run beside kernels until somebody reads what they bring.

Every rank must make the same exchanges in the same order, also where it sends and receives no row.
A compiler, which sees one rank, makes one of two exchanges that look alike to it, leaves out those
that bring nothing that is read, and moves into a forward what does not read the gradients. So to a
compiler every exchange has a number of its own, in a backward reads a gradient of the results, and
is read by the next one or by the results of its pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from weakref import WeakKeyDictionary

import torch
import torch.distributed._functional_collectives as collectives
from torch import Tensor
from torch._guards import TracingContext
from torch.compiler import is_compiling
from torch.distributed import ProcessGroup

from ..operators.support import PACKAGE, ops
from .steps import Exchange, Rows

# By its name of torch 2.14, which warns of the other.
_all_gather = getattr(collectives, "all_gather_single", None) or collectives.all_gather_tensor
_attentions: WeakKeyDictionary[TracingContext, count[int]] = WeakKeyDictionary()


@torch.compiler.assume_constant_result
def number_in_graph() -> int:
    """Of an attention that is traced, among those of its graph: a process that has compiled others
    before makes the same graph, which a cache then has.
    """
    context = TracingContext.try_get()
    return 0 if context is None else next(_attentions.setdefault(context, count()))


@dataclass(eq=False)
class Exchanges:
    """Those of one pass of an attention, whose number_in_graph it is. after: in a backward, results
    and their gradients. unread: what has come and is not read yet, as far as a compiler knows.
    """

    group: ProcessGroup | None
    attention: int
    after: Sequence[Tensor] = ()
    unread: list[Tensor] = field(default_factory=list)
    _count: int = 0

    def send(self, exchange: Exchange, tensors: Sequence[Tensor]) -> Tensor:
        """What the ranks sent, one rank behind the other, of tensors (rows, heads, D) that each
        has, such as k and v: (rows, heads, sum of D), once it has `arrived`.
        """
        sent = self._rows_to_send(tensors, exchange.rows)
        return self._all_to_all(sent, exchange.received, exchange.sent)

    def send_back(self, exchange: Exchange, x: Tensor) -> Tensor:
        """What the ranks have for the rows that `send` gave them, of x as `send` returned it."""
        x = x.contiguous() if x.shape[0] > 0 else self._rows_to_send([x], [])
        return self._all_to_all(x, exchange.sent, exchange.received)

    def _all_to_all(self, x: Tensor, received: Sequence[int], sent: Sequence[int]) -> Tensor:
        assert self.group is not None
        return collectives.all_to_all_single(x, list(received), list(sent), self.group)

    def _rows_to_send(self, tensors: Sequence[Tensor], rows: Sequence[Rows]) -> Tensor:
        """These rows of the tensors, which are (rows, heads, D), side by side."""
        if not is_compiling():
            return _side_by_side(tensors, rows)
        bounds = [bound for of_part in rows for bound in of_part]
        after = [*self.after, *self.unread]
        self.unread, self._count = [], self._count + 1
        sent: Tensor = ops.rows_to_send(list(tensors), bounds, self.attention, self._count, after)
        return sent

    def arrived(self, x: Tensor) -> Tensor:
        """What `send` brings; kernels from here on wait for it, the host does not."""
        x = arrived(x)
        if is_compiling():
            self.unread.append(x)
        return x

    def add_back(self, exchange: Exchange, came: Tensor, total: Tensor, first_row: int = 0) -> None:
        """Adds what `send_back` brings to the rows that were sent, in the order of the ranks.
        first_row: the shard's row that total begins with.
        """
        came = self.arrived(came)
        row = 0
        for begin, end in exchange.rows:
            total[begin - first_row : end - first_row] += came[row : row + end - begin]
            row += end - begin

    def largest(self, x: Tensor) -> Tensor:
        """The largest of all ranks, element by element."""
        return (
            x if self.group is None else self.arrived(collectives.all_reduce(x, "max", self.group))
        )

    def end_with(self, *results: Tensor) -> None:
        """Whoever reads one of these results of the pass reads all that has come."""
        if self.unread:
            ops.end_exchanges(list(results), self.unread)


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
    tensors: Sequence[Tensor],
    bounds: Sequence[int],
    attention: int,
    number: int,
    after: Sequence[Tensor],
) -> Tensor:
    """bounds: where each part begins and ends. The last three are for a compiler to see."""
    return _side_by_side(tensors, list(zip(bounds[::2], bounds[1::2], strict=True)))


def _end_exchanges(results: Sequence[Tensor], came: Sequence[Tensor]) -> None:
    """To a compiler, writes the results by what has come."""


torch.library.custom_op(
    f"{PACKAGE}::rows_to_send",
    _rows_to_send,
    mutates_args=(),
    schema="(Tensor[] tensors, int[] bounds, int attention, int number, Tensor[] after) -> Tensor",
).register_fake(_rows_to_send)
torch.library.custom_op(
    f"{PACKAGE}::end_exchanges",
    _end_exchanges,
    mutates_args=("results",),
    schema="(Tensor(a!)[] results, Tensor[] came) -> ()",
).register_fake(_end_exchanges)


def of_all_ranks(x: Tensor, group: ProcessGroup) -> Tensor:
    """x of every rank, one behind the other."""
    return arrived(_all_gather(x, 0, group))


def arrived(x: Tensor) -> Tensor:
    """What a transfer brings; kernels from here on wait for it, the host does not."""
    return collectives.wait_tensor(x)


def all_to_all(x: Tensor, group: ProcessGroup) -> Tensor:
    """x (ranks, ...): entry r goes to rank r, and comes from there, once it has `arrived`."""
    sizes = [1] * x.shape[0]
    return collectives.all_to_all_single(x.contiguous(), sizes, sizes, group)


def reordered(x: Tensor, order: Tensor | None) -> Tensor:
    """These rows; None: as they are."""
    return x if order is None else x.index_select(0, order)
