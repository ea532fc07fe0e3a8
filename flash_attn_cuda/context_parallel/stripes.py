"""Stripes: token i on rank i mod N, and the exchange of rows between them and the shards of a plan.

Pieces of a plan are runs of tokens, and of stripes each token would be one. So rows of stripes are
first exchanged for those of a plan, and results go back the same way: as ulysses does it, each rank
sends all but one share of its rows, and gets as many.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed._functional_collectives as collectives
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn.functional import pad

from .plan import Plan
from .transforms import dual_names, refuse_forward_mode


@dataclass(frozen=True, eq=False)
class Stripes:
    """One rank's exchange of rows. order: rows of the rank's stripe by the rank they go to, sizes
    that many to each; places: where among what comes each row of the shard is, arriving that many
    from each.
    """

    rows: int  # of the plan's shard
    order: Tensor
    sizes: list[int]
    places: Tensor
    arriving: list[int]

    def to_shard(self, x: Tensor, group: ProcessGroup) -> Tensor:
        """(rows of the plan, ...) of x (rows of the stripe, ...); padding is zero."""
        came = exchanged(x.index_select(0, self.order), self.sizes, self.arriving, group)
        shard = came.index_select(0, self.places)
        missing = self.rows - shard.shape[0]
        return pad(shard, (0, 0) * (x.dim() - 1) + (0, missing)) if missing else shard

    def to_stripe(self, x: Tensor, group: ProcessGroup) -> Tensor:
        """The way back, without the padding."""
        sent = x.index_select(0, self.places.argsort())
        came = exchanged(sent, self.arriving, self.sizes, group)
        return came.index_select(0, self.order.argsort())


@torch.compiler.disable
def stripes_of(plan: Plan, rank: int, device: torch.device) -> Stripes:
    """Of a plan whose sequences all have a multiple of the ranks, so that the stripes of one end
    where those of the next begin: row g of the packed whole is row g // ranks of rank g mod ranks.
    """
    ranks = len(plan.ranks)
    orders, sizes = [], []
    for other in range(ranks):
        rows = rows_held(plan, other)
        orders.append(rows[rows % ranks == rank] // ranks)
        sizes.append(orders[-1].numel())
    sources = rows_held(plan, rank) % ranks
    places = sources.argsort(stable=True).argsort()
    arriving = [int((sources == other).sum()) for other in range(ranks)]
    return Stripes(plan.rows, torch.cat(orders).to(device), sizes, places.to(device), arriving)


def rows_held(plan: Plan, rank: int) -> Tensor:
    """Of each row of the rank's shard but the padding, the row of the packed whole."""
    rows = [
        torch.arange(piece.begin, piece.end) + plan.first_rows[piece.sequence]
        for piece in plan.ranks[rank]
    ]
    return torch.cat([torch.empty(0, dtype=torch.int64), *rows])


def exchanged(x: Tensor, sent: list[int], received: list[int], group: ProcessGroup) -> Tensor:
    """Differentiable, in reverse mode: `sent` rows of x to each rank, `received` from each."""
    refuse_forward_mode("ring", dual_names(x=x))
    came = collectives.all_to_all_single_autograd(x.contiguous(), received, sent, group)
    return collectives.wait_tensor(came)
