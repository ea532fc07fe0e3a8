"""Tiles of the CPU backend: which blocks meet, what they hold, what becomes of their scores.

A tile packs batch and key heads into one leading dimension ("lanes"), and the query heads that
share a key head into rows, so that K and V are never expanded: scores are (lanes, group * block_m,
block_n).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..call.fields import AttentionCall
from ..call.lengths import MOST_BOUND_WITH_ORIGIN
from ..call.rules import TILE
from .philox import keep_mask
from .visibility import Part, Visibility, broadcast_part

_MOST_SHIFT = 1 << 30


@dataclass(frozen=True)
class Origin:
    """Where a call's first sequence lies in a longer one: a row of AttentionCall.origin."""

    stream: int
    first_q: int
    first_k: int
    shift: int

    @classmethod
    def of(cls, call: AttentionCall) -> Origin:
        if call.origin is None:
            return cls(0, 0, 0, call.k.shape[1] - call.q.shape[1])
        stream, first_q, first_k, shift = call.origin[0].tolist()
        return cls(stream, first_q, first_k, min(max(shift, -_MOST_SHIFT), _MOST_SHIFT))


@dataclass(frozen=True)
class Tiling:
    """Upper bounds of a tile of more than one lane. Results depend on it by rounding alone."""

    block_m: int = 256  # queries
    block_n: int = 256  # keys
    max_scores: int = 1 << 19  # elements of a score tile over all its lanes: 2 MiB in fp32
    max_dq: int = 1 << 23  # elements of the backward's dq accumulator, likewise: 32 MiB in fp32


DEFAULT_TILING = Tiling()


@dataclass(frozen=True)
class Block:
    """Positions start <= i < stop of a sequence."""

    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def positions(self, first: int = 0) -> range:
        return range(first + self.start, first + self.stop)


def _blocks(start: int, stop: int, size: int) -> Iterator[Block]:
    """From the multiple of `size` at or below start on."""
    for begin in range(start // size * size, stop, size):
        yield Block(begin, min(begin + size, stop))


@dataclass(frozen=True)
class Lanes:
    """Some batches and some key heads: what one tile computes at a time."""

    batches: slice
    heads_k: slice
    heads_q: slice
    group: int  # query heads per key head
    dtype: torch.dtype

    @property
    def part(self) -> Part:
        return self.batches, self.heads_q

    def query_tile(self, x: Tensor, block: Block) -> Tensor:
        """(B, Sq, Hq, D) -> (lanes, group * block_m, D)."""
        tile = x[self.batches, block.start : block.stop, self.heads_q].transpose(1, 2)
        return tile.to(self.dtype).reshape(-1, self.group * len(block), x.shape[-1])

    def row_tile(self, x: Tensor, block: Block) -> Tensor:
        """(B, Hq, Sq) -> (lanes, group * block_m, 1)."""
        tile = x[self.batches, self.heads_q, block.start : block.stop]
        return tile.reshape(-1, self.group * len(block), 1)

    def key_tile(self, x: Tensor, block: Block) -> Tensor:
        """(B, Sk, Hk, D) -> (lanes, block_n, D)."""
        tile = x[self.batches, block.start : block.stop, self.heads_k].transpose(1, 2)
        return tile.to(self.dtype).flatten(0, 1)

    def store_queries(self, x: Tensor, block: Block, tile: Tensor) -> None:
        target = x[self.batches, block.start : block.stop, self.heads_q].transpose(1, 2)
        target.copy_(tile.view(target.shape))

    def store_rows(self, x: Tensor, block: Block, tile: Tensor) -> None:
        target = x[self.batches, self.heads_q, block.start : block.stop]
        target.copy_(tile.view(target.shape))

    def store_keys(self, x: Tensor, block: Block, tile: Tensor) -> None:
        target = x[self.batches, block.start : block.stop, self.heads_k].transpose(1, 2)
        target.copy_(tile.view(target.shape))

    def store_scores(self, x: Tensor, m_block: Block, n_block: Block, tile: Tensor) -> None:
        """(lanes, group * block_m, block_n) into x (B, Hq, Sq, Sk)."""
        target = x[self.batches, self.heads_q, m_block.start : m_block.stop]
        target = target[..., n_block.start : n_block.stop]
        target.copy_(tile.view(target.shape))


@dataclass(frozen=True, eq=False)
class Problem:
    """A call of sequences of one length, its sizes and its tiles."""

    call: AttentionCall
    batch: int
    seqlen_q: int
    seqlen_k: int
    heads_q: int
    heads_k: int
    window: tuple[int, int]  # (left, right), -1: unbounded; causal is right = 0
    origin: Origin
    visibility: Visibility | None  # the pairs that a sparse mask leaves
    dtype: torch.dtype
    block_m: int
    block_n: int
    lanes_per_tile: int

    @classmethod
    def of(cls, call: AttentionCall, tiling: Tiling, *, by_columns: bool = False) -> Problem:
        """by_columns: a sparse mask is read as the backward does."""
        batch, seqlen_q, heads_q, head_dim = call.q.shape
        _, seqlen_k, heads_k, _ = call.k.shape
        group = heads_q // heads_k
        visibility = None
        if (lists := call.block_columns if by_columns else call.block_rows) is not None:
            make = Visibility.of_columns if by_columns else Visibility.of_rows
            visibility = make(lists, call.mask_bits)
        # The blocks of a sparse mask are its tiles: which of them meet is what its lists say.
        most_m, most_n = (
            x if visibility is None else min(x, TILE) for x in (tiling.block_m, tiling.block_n)
        )
        block_n = max(1, min(most_n, seqlen_k))
        block_m = max(1, min(most_m, seqlen_q, tiling.max_scores // (group * block_n)))
        lanes = min(
            tiling.max_scores // (group * block_m * block_n),
            tiling.max_dq // (group * max(1, seqlen_q) * head_dim),
        )
        left, right = (-1 if x > MOST_BOUND_WITH_ORIGIN else x for x in call.window())
        return cls(
            call=call,
            batch=batch,
            seqlen_q=seqlen_q,
            seqlen_k=seqlen_k,
            heads_q=heads_q,
            heads_k=heads_k,
            window=(left, right),
            origin=Origin.of(call),
            visibility=visibility,
            dtype=call.lse_dtype(),
            block_m=block_m,
            block_n=block_n,
            lanes_per_tile=max(1, lanes),
        )

    @property
    def shift(self) -> int:
        """Query i stands at key i + shift: the diagonal ends in the bottom right corner, unless an
        origin has it elsewhere.
        """
        return self.origin.shift

    # -- which blocks meet -----------------------------------------------------------------------

    def lanes(self) -> Iterator[Lanes]:
        """Whole batches where they fit a tile, else key heads of one batch; under a sparse mask
        only such as share their lists.
        """
        batches_per_tile = max(1, self.lanes_per_tile // self.heads_k)
        heads_per_tile = min(self.heads_k, self.lanes_per_tile)
        visibility = self.visibility
        if visibility is not None and visibility.differs_by_sequence:
            batches_per_tile = 1
        if visibility is not None and visibility.differs_by_head:
            heads_per_tile = 1
        group = self.heads_q // self.heads_k
        for batches in _blocks(0, self.batch, batches_per_tile):
            for heads in _blocks(0, self.heads_k, heads_per_tile):
                yield Lanes(
                    batches=slice(batches.start, batches.stop),
                    heads_k=slice(heads.start, heads.stop),
                    heads_q=slice(heads.start * group, heads.stop * group),
                    group=group,
                    dtype=self.dtype,
                )

    def query_blocks(self) -> Iterator[Block]:
        return _blocks(0, self.seqlen_q, self.block_m)

    def key_blocks(self) -> Iterator[Block]:
        return _blocks(0, self.seqlen_k, self.block_n)

    def key_blocks_seen_by(self, lanes: Lanes, m_block: Block) -> Iterator[Block]:
        """Those of key_blocks() with a key that some query of the block sees, up to the last such
        key; under a sparse mask, of the blocks that it has m_block visit.
        """
        left, right = self.window
        start, stop = 0, self.seqlen_k
        if left >= 0:
            start = max(0, m_block.start + self.shift - left)
        if right >= 0:
            stop = min(stop, m_block.stop + self.shift + right)
        for block in _blocks(start, stop, self.block_n):
            if self._has_visit(lanes, m_block, block):
                yield block

    def query_blocks_that_see(self, lanes: Lanes, n_block: Block) -> Iterator[Block]:
        """Those of query_blocks() with a query that sees some key of the block."""
        left, right = self.window
        start, stop = 0, self.seqlen_q
        if right >= 0:
            start = max(0, n_block.start - self.shift - right)
        if left >= 0:
            stop = min(stop, n_block.stop - self.shift + left)
        for block in _blocks(start, stop, self.block_m):
            block = Block(block.start, min(block.start + self.block_m, self.seqlen_q))
            if self._has_visit(lanes, block, n_block):
                yield block

    def _has_visit(self, lanes: Lanes, m_block: Block, n_block: Block) -> bool:
        visibility = self.visibility
        return visibility is None or visibility.has_visit(
            lanes.part, m_block.positions(), n_block.positions()
        )

    # -- scores of a pair of blocks --------------------------------------------------------------

    def modify(self, scores: Tensor, lanes: Lanes, m_block: Block, n_block: Block) -> Tensor | None:
        """Turn products softmax_scale * q k^T (lanes, group * block_m, block_n) into scores, in
        place: softcap, ALiBi, the bias, and -inf for keys that a query does not see.

        Returns capped = tanh(product / softcap), None without: the derivative of the scores by the
        products is 1 - capped^2.
        """
        call, capped = self.call, None
        if call.softcap > 0.0:
            capped = scores.div_(call.softcap).tanh_().clone()
            scores.mul_(call.softcap)
        if call.alibi_slopes is not None:
            self._add_alibi(call.alibi_slopes, scores, lanes, m_block, n_block)
        by_head = self._by_head(scores, lanes)
        if call.bias is not None:
            self.add_bias(call.bias, scores, lanes, m_block, n_block)
        if call.relative_bias is not None:
            reach = call.relative_bias.shape[1] // 2
            place = self._distance(m_block, n_block).clamp(-reach, reach) + reach
            by_head += call.relative_bias[lanes.heads_q][:, place]
        if self._hides_any(m_block, n_block):
            by_head.masked_fill_(self._hidden(m_block, n_block), -math.inf)
        if call.tree_mask is not None:
            hidden = self._hidden_by_tree(call.tree_mask[0], m_block, n_block)
            by_head.masked_fill_(hidden, -math.inf)
        if self.visibility is not None:
            blocks = m_block.positions(), n_block.positions()
            by_head.masked_fill_(self.visibility.hidden(lanes.part, *blocks), -math.inf)
        return capped

    def add_bias(
        self, bias: Tensor, scores: Tensor, lanes: Lanes, m_block: Block, n_block: Block
    ) -> None:
        """Add a tile's part of a tensor (B|1, Hq|1, Sq|1, Sk) to scores, in place."""
        by_head = self._by_head(scores, lanes)
        part = bias[broadcast_part(bias, lanes.part)]
        if self.call.bias_by_distance:
            by_head += part[..., 0, self._place_by_distance(m_block, n_block)]
        else:
            by_head += _pairs_of(part, m_block, n_block)

    def add_bias_gradient(
        self, dbias: Tensor, dscores: Tensor, lanes: Lanes, m_block: Block, n_block: Block
    ) -> None:
        """Sum a tile's dscores (lanes, group * block_m, block_n) into the bias's gradient."""
        part, by_head = dbias[broadcast_part(dbias, lanes.part)], self._by_head(dscores, lanes)
        if self.call.bias_by_distance:
            place = self._place_by_distance(m_block, n_block)
            by_head = by_head.sum_to_size(*part.shape[:2], *by_head.shape[2:])
            part[..., 0, :].index_add_(-1, place.flatten(), by_head.flatten(-2))
        else:
            target = _pairs_of(part, m_block, n_block)
            target += by_head.sum_to_size(target.shape)

    def _place_by_distance(self, m_block: Block, n_block: Block) -> Tensor:
        """(block_m, block_n): where a bias by distance has the pairs of a tile."""
        call = self.call  # of packed sequences, one of them
        first = call.max_seqlen_q or call.q.shape[1]
        return self._distance(m_block, n_block) + self.shift + first

    def empty_softmax(self, q_tile: Tensor, lanes: Lanes, m_block: Block) -> tuple[Tensor, Tensor]:
        """(maxima, sums of exponentials) of rows that have met no key, (lanes, group * block_m, 1):
        the sink of its head is in every row's softmax.
        """
        row_sum = q_tile.new_zeros((*q_tile.shape[:2], 1))
        if self.call.sink is None:
            return row_sum - math.inf, row_sum
        batches = lanes.batches.stop - lanes.batches.start
        sink = self.call.sink[lanes.heads_q, None].to(self.dtype)
        return sink.expand(batches, -1, len(m_block)).reshape(row_sum.shape), row_sum + 1.0

    def raise_to_largest(self, max_logits: Tensor, scores: Tensor, lanes: Lanes) -> None:
        """max_logits (B, Hq), in place."""
        part = max_logits[lanes.part]
        part.copy_(part.maximum(self._by_head(scores, lanes).amax((2, 3))))

    def _by_head(self, tile: Tensor, lanes: Lanes) -> Tensor:
        """(lanes, group * block_m, block_n) as (batches, heads_q, block_m, block_n)."""
        heads = lanes.heads_q.stop - lanes.heads_q.start
        batches = lanes.batches.stop - lanes.batches.start
        rows = tile.shape[0] * tile.shape[1] // (batches * heads)
        return tile.view(batches, heads, rows, tile.shape[-1])

    def dropped(self, lanes: Lanes, m_block: Block, n_block: Block) -> Tensor | None:
        """(lanes, group * block_m, block_n) booleans: what dropout takes away; None without."""
        if self.call.dropout_p == 0.0:
            return None
        assert self.call.rng_state is not None
        first_head = self.origin.stream + lanes.heads_q.start
        keep = keep_mask(
            self.call.rng_state,
            self.call.dropout_p,
            batch=range(lanes.batches.start, lanes.batches.stop),
            heads=range(first_head, self.origin.stream + lanes.heads_q.stop),
            num_heads=self.heads_q,
            rows=m_block.positions(self.origin.first_q),
            cols=n_block.positions(self.origin.first_k),
        )
        return keep.logical_not_().view(-1, lanes.group * len(m_block), len(n_block))

    def _add_alibi(
        self, slopes: Tensor, scores: Tensor, lanes: Lanes, m_block: Block, n_block: Block
    ) -> None:
        if slopes.dim() == 2:
            of_lanes = slopes[lanes.part]
        else:
            batches = lanes.batches.stop - lanes.batches.start
            of_lanes = slopes[lanes.heads_q].expand(batches, -1)
        distance = self._distance(m_block, n_block).abs().to(self.dtype)
        bias = of_lanes.to(self.dtype).reshape(-1, 1, 1) * distance
        scores.sub_(bias.view(scores.shape))

    def _distance(self, m_block: Block, n_block: Block) -> Tensor:
        """(block_m, block_n) integers: j - (i + shift)."""
        device = self.call.q.device
        queries = torch.arange(m_block.start, m_block.stop, device=device) + self.shift
        return torch.arange(n_block.start, n_block.stop, device=device) - queries[:, None]

    def _hides_any(self, m_block: Block, n_block: Block) -> bool:
        """Whether some query of the one block does not see some key of the other."""
        left, right = self.window
        furthest_right = n_block.stop - 1 - (m_block.start + self.shift)
        furthest_left = m_block.stop - 1 + self.shift - n_block.start
        return 0 <= right < furthest_right or 0 <= left < furthest_left

    def _hidden(self, m_block: Block, n_block: Block) -> Tensor:
        """(block_m, block_n) booleans: keys that queries do not see."""
        left, right = self.window
        distance = self._distance(m_block, n_block)
        hidden = torch.zeros_like(distance, dtype=torch.bool)
        if left >= 0:
            hidden |= distance < -left
        if right >= 0:
            hidden |= distance > right
        return hidden

    def _hidden_by_tree(self, tree: Tensor, m_block: Block, n_block: Block) -> Tensor:
        """(block_m, block_n) booleans: own keys that queries do not see, of a mask (Sq, n)."""
        own = torch.arange(n_block.start, n_block.stop, device=tree.device) - self.shift
        return (own >= 0) & ~tree[m_block.start : m_block.stop, own.clamp(min=0)]


def _pairs_of(x: Tensor, m_block: Block, n_block: Block) -> Tensor:
    """The part of a tensor (.., Sq|1, Sk) that belongs to a tile: a view."""
    rows = slice(m_block.start, m_block.stop) if x.shape[2] > 1 else slice(0, 1)
    return x[..., rows, n_block.start : n_block.stop]


def sink_gradient(call: AttentionCall, softmax_lse: Tensor, softmax_d: Tensor) -> Tensor | None:
    """Like the call's sink (heads,), if it has one: the sum over rows of exp(sink - lse) * (dlse -
    rowsum(dout * out)), which is -softmax_d. softmax_lse is ([batch,] heads, rows), and -inf of
    rows that are no query's; softmax_d may have more rows.
    """
    if call.sink is None:
        return None
    share = (call.sink.to(softmax_lse.dtype)[:, None] - softmax_lse).exp()
    of_rows = share.masked_fill(softmax_lse == -math.inf, 0.0)
    of_rows = of_rows * softmax_d[..., : softmax_lse.shape[-1]]
    return -of_rows.sum(1 if of_rows.dim() == 2 else (0, 2)).to(call.sink.dtype)
