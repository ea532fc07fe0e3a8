"""Parts of the reference: a call's tensors, and those of options, by lane."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import torch
from torch import Tensor

from tests.reference.options import AttentionOptions, distances

# Scores of one chunk: 256 MiB in fp64, and autograd keeps about five such tensors.
MAX_SCORES_PER_CHUNK = 1 << 25
Named = TypeVar("Named")


def told_apart(of: type[Named], given: dict[str, Any]) -> tuple[Named, dict[str, Any]]:
    """The dataclass of its fields among those given, and the others."""
    own = {x.name: given[x.name] for x in fields(of) if x.name in given}
    return of(**own), {name: x for name, x in given.items() if name not in own}


def with_qv(q: Tensor, k: Tensor, v: Tensor, qv: Tensor | None) -> tuple[Tensor, Tensor]:
    """Queries and keys whose product is q k^T + qv v^T."""
    if qv is None:
        return q, k
    return torch.cat([q, qv.to(q.dtype)], -1), torch.cat([k, v.to(k.dtype)], -1)


def bias_of_lists(lists: Tensor, seqlen_k: int, group: int) -> Tensor:
    """What makes a key (1, Hk * group, Sq, Sk) count as often as it stands in its query's list, of
    lists (Sq, Hk, n): added to a score, the logarithm of that number. Entries that are no key of
    the sequence do not count.
    """
    times = torch.zeros((*lists.shape[:2], seqlen_k + 1), dtype=torch.float64, device=lists.device)
    keys = torch.where((lists >= 0) & (lists < seqlen_k), lists, seqlen_k).long()
    times.scatter_add_(-1, keys, torch.ones_like(keys, dtype=times.dtype))
    return times[..., :seqlen_k].log().transpose(0, 1).repeat_interleave(group, 0)[None]


def mask_of_tree(tree: Tensor, seqlen_k: int) -> Tensor:
    """What of its keys (1, 1, Sq, Sk) a query sees: all before the last Sq, and of these the ones
    that its row of a tree mask (Sq, n) has.
    """
    seqlen_q = len(tree)
    mask = tree.new_ones(seqlen_q, seqlen_q + seqlen_k)
    mask[:, seqlen_k:] = tree[:, :seqlen_q]
    return mask[None, None, :, seqlen_q:]


@dataclass
class Lanes:
    """Inputs with batch and key heads as one dimension L, G query heads for each."""

    batch: int
    heads_k: int
    q: Tensor  # (L, G, Sq, D)
    k: Tensor  # (L, Sk, D)
    v: Tensor  # (L, Sk, Dv)

    @classmethod
    def of(cls, q: Tensor, k: Tensor, v: Tensor) -> Lanes:
        batch, seqlen_q, heads_q, head_dim = q.shape
        seqlen_k, heads_k = k.shape[1:3]
        lanes = batch * heads_k
        return cls(
            batch=batch,
            heads_k=heads_k,
            q=q.transpose(1, 2).reshape(lanes, heads_q // heads_k, seqlen_q, head_dim),
            k=k.transpose(1, 2).reshape(lanes, seqlen_k, head_dim),
            v=v.transpose(1, 2).reshape(lanes, seqlen_k, v.shape[-1]),
        )

    def options(self, given: AttentionOptions) -> AttentionOptions:
        """With tensors of (L, G) or (L, G, Sq, Sk)."""

        def by_lane(*rest: int) -> Callable[[Tensor], Tensor]:
            heads = (self.batch, self.heads_k * self.q.shape[1])
            of = (*self.q.shape[:2], *rest)
            return lambda x: x.to(self.q.device).expand(*heads, *rest).reshape(of)

        return given.checked().each(by_lane(), by_lane(self.q.shape[2], self.k.shape[1]))

    def distances(self) -> Tensor:
        return distances(self.q.shape[2], self.k.shape[1], self.q.device)

    def output_lanes(self, x: Tensor | None) -> Tensor | None:
        """(B, Sq, Hq, Dv) -> (L, G, Sq, Dv)."""
        if x is None:
            return None
        return x.transpose(1, 2).reshape(*self.q.shape[:-1], self.v.shape[-1])

    def zero_outputs(self) -> Tensor:
        """(L, G, Sq, Dv) in the dtype of q."""
        return self.q.new_zeros(*self.q.shape[:-1], self.v.shape[-1])

    def row_lanes(self, x: Tensor | None) -> Tensor | None:
        """(B, Hq, Sq) -> (L, G, Sq)."""
        return None if x is None else x.reshape(self.q.shape[:-1])

    def chunks(self) -> Iterator[slice]:
        """Slices of L whose scores stay within MAX_SCORES_PER_CHUNK where one lane does."""
        lanes, group, seqlen_q = self.q.shape[:3]
        size = max(1, MAX_SCORES_PER_CHUNK // max(1, group * seqlen_q * self.k.shape[1]))
        return (slice(begin, begin + size) for begin in range(0, lanes, size))

    def query_chunks(self) -> Iterator[slice]:
        """Slices of Sq that bring the scores of a single lane within the limit."""
        group, seqlen_q = self.q.shape[1:3]
        size = max(1, MAX_SCORES_PER_CHUNK // max(1, group * self.k.shape[1]))
        return (slice(begin, begin + size) for begin in range(0, seqlen_q, size))
