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

from ..checks.tensors import lse_dtype
from ..masks.lists import TILE
from .philox import keep_mask, keep_scale
from .visibility import Part, Visibility, broadcast_part

_MOST_SHIFT = 1 << 30


@dataclass(frozen=True)
class Origin:
    """Where a sequence lies in a longer one, a row of AttentionCall.origin (call.py)."""

    stream: int
    first_q: int
    first_k: int
    shift: int

    @classmethod
    def of_row(cls, row: Tensor) -> Origin:
        stream, first_q, first_k, shift = row.tolist()
        return cls(stream, first_q, first_k, min(max(shift, -_MOST_SHIFT), _MOST_SHIFT))


@dataclass(frozen=True, eq=False)
class AttentionOptions:
    """What an attention call computes besides its tensors.

    Of packed sequences, per-sequence options are those of sequence `first_sequence` and following.
    """

    softmax_scale: float
    window: tuple[int, int] = (-1, -1)  # (left, right), -1: unbounded; causal is right = 0
    softcap: float = 0.0  # <= 0: off
    alibi_slopes: Tensor | None = None  # (Hq,) or (B, Hq), fp32
    dropout_p: float = 0.0
    rng_state: Tensor | None = None  # (seed, offset), int64; needed when dropout_p > 0
    visibility: Visibility | None = None  # the pairs that a sparse mask leaves
    bias: Tensor | None = None  # (B|1, Hq|1, Sq|1, Sk), added to the scores
    sink: Tensor | None = None  # (Hq,): exp(sink) joins the softmax's denominator
    first_sequence: int = 0  # which sequence of the call the first batch entry is
    origin: Origin | None = None  # of the call's sequence, if it is one in a longer one
    fp32_results: bool = False  # out, dq, dk and dv are of the compute dtype

    def __post_init__(self) -> None:
        if self.dropout_p > 0.0 and self.rng_state is None:
            raise ValueError("rng_state: must be given when dropout_p > 0, got None")

    def result_dtype(self, x: Tensor) -> torch.dtype:
        """Of what is computed from inputs like x."""
        return lse_dtype(x.dtype) if self.fp32_results else x.dtype

    @property
    def is_masked(self) -> bool:
        """Whether there is a window, causal included, however wide."""
        return max(self.window) >= 0

    def part(self, lanes: Lanes) -> Part:
        """The sequences of the call and the query heads of some lanes."""
        first = self.first_sequence
        return slice(first + lanes.batches.start, first + lanes.batches.stop), lanes.heads_q

    @property
    def keep_scale(self) -> float:
        """What kept probabilities are multiplied by."""
        return keep_scale(self.dropout_p) if self.dropout_p > 0.0 else 1.0


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
    """Sizes, options and tiling of one call."""

    batch: int
    seqlen_q: int
    seqlen_k: int
    heads_q: int
    heads_k: int
    options: AttentionOptions
    dtype: torch.dtype
    device: torch.device
    block_m: int
    block_n: int
    lanes_per_tile: int

    @classmethod
    def of(cls, q: Tensor, k: Tensor, options: AttentionOptions, tiling: Tiling) -> Problem:
        batch, seqlen_q, heads_q, head_dim = q.shape
        _, seqlen_k, heads_k, _ = k.shape
        group = heads_q // heads_k
        # The blocks of a sparse mask are its tiles: which of them meet is what its lists say.
        most_m, most_n = (
            x if options.visibility is None else min(x, TILE)
            for x in (tiling.block_m, tiling.block_n)
        )
        block_n = max(1, min(most_n, seqlen_k))
        block_m = max(1, min(most_m, seqlen_q, tiling.max_scores // (group * block_n)))
        lanes = min(
            tiling.max_scores // (group * block_m * block_n),
            tiling.max_dq // (group * max(1, seqlen_q) * head_dim),
        )
        return cls(
            batch=batch,
            seqlen_q=seqlen_q,
            seqlen_k=seqlen_k,
            heads_q=heads_q,
            heads_k=heads_k,
            options=options,
            dtype=lse_dtype(q.dtype),
            device=q.device,
            block_m=block_m,
            block_n=block_n,
            lanes_per_tile=max(1, lanes),
        )

    @property
    def lse_shape(self) -> tuple[int, int, int]:
        return self.batch, self.heads_q, self.seqlen_q

    @property
    def shift(self) -> int:
        """Query i stands at key i + shift: the diagonal ends in the bottom right corner, unless an
        origin has it elsewhere.
        """
        origin = self.options.origin
        return self.seqlen_k - self.seqlen_q if origin is None else origin.shift

    # -- which blocks meet -----------------------------------------------------------------------

    def lanes(self) -> Iterator[Lanes]:
        """Whole batches where they fit a tile, else key heads of one batch; under a sparse mask
        only such as share their lists.
        """
        batches_per_tile = max(1, self.lanes_per_tile // self.heads_k)
        heads_per_tile = min(self.heads_k, self.lanes_per_tile)
        visibility = self.options.visibility
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
        left, right = self.options.window
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
        left, right = self.options.window
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
        visibility = self.options.visibility
        return visibility is None or visibility.has_visit(
            self.options.part(lanes), m_block.positions(), n_block.positions()
        )

    # -- scores of a pair of blocks --------------------------------------------------------------

    def modify(self, scores: Tensor, lanes: Lanes, m_block: Block, n_block: Block) -> Tensor | None:
        """Turn products softmax_scale * q k^T (lanes, group * block_m, block_n) into scores, in
        place: softcap, ALiBi, the bias, and -inf for keys that a query does not see.

        Returns the derivative of the scores by the products, None for 1.
        """
        slope = None
        if self.options.softcap > 0.0:
            capped = scores.div_(self.options.softcap).tanh_()
            slope = 1.0 - capped * capped
            scores.mul_(self.options.softcap)
        if self.options.alibi_slopes is not None:
            self._add_alibi(self.options.alibi_slopes, scores, lanes, m_block, n_block)
        by_head = self._by_head(scores, lanes)
        if self.options.bias is not None:
            by_head += self.bias_tile(self.options.bias, lanes, m_block, n_block)
        if self._hides_any(m_block, n_block):
            by_head.masked_fill_(self._hidden(m_block, n_block), -math.inf)
        if self.options.visibility is not None:
            part, blocks = self.options.part(lanes), (m_block.positions(), n_block.positions())
            by_head.masked_fill_(self.options.visibility.hidden(part, *blocks), -math.inf)
        return slope

    def bias_tile(self, bias: Tensor, lanes: Lanes, m_block: Block, n_block: Block) -> Tensor:
        """The part of a tensor (B|1, Hq|1, Sq|1, Sk) that belongs to a tile: a view."""
        rows = slice(m_block.start, m_block.stop) if bias.shape[2] > 1 else slice(0, 1)
        return bias[broadcast_part(bias, self.options.part(lanes))][
            ..., rows, n_block.start : n_block.stop
        ]

    def add_bias_gradient(
        self, dbias: Tensor, dscores: Tensor, lanes: Lanes, m_block: Block, n_block: Block
    ) -> None:
        """Sum a tile's dscores (lanes, group * block_m, block_n) into the bias's gradient."""
        target = self.bias_tile(dbias, lanes, m_block, n_block)
        target += self._by_head(dscores, lanes).sum_to_size(target.shape)

    def sink_tile(self, lanes: Lanes, m_block: Block) -> Tensor | None:
        """(lanes, group * block_m, 1): the sink of every row; None without."""
        if self.options.sink is None:
            return None
        batches = lanes.batches.stop - lanes.batches.start
        sink = self.options.sink[lanes.heads_q].to(self.dtype)
        return (
            sink[:, None]
            .expand(batches, -1, len(m_block))
            .reshape(-1, lanes.group * len(m_block), 1)
        )

    def _by_head(self, tile: Tensor, lanes: Lanes) -> Tensor:
        """(lanes, group * block_m, block_n) as (batches, heads_q, block_m, block_n)."""
        heads = lanes.heads_q.stop - lanes.heads_q.start
        batches = lanes.batches.stop - lanes.batches.start
        rows = tile.shape[0] * tile.shape[1] // (batches * heads)
        return tile.view(batches, heads, rows, tile.shape[-1])

    def dropped(self, lanes: Lanes, m_block: Block, n_block: Block) -> Tensor | None:
        """(lanes, group * block_m, block_n) booleans: what dropout takes away; None without."""
        options = self.options
        if options.dropout_p <= 0.0 or options.rng_state is None:
            return None
        sequences, heads = options.part(lanes)
        batch, origin = range(sequences.start, sequences.stop), options.origin
        if origin is None:
            origin = Origin(stream=0, first_q=0, first_k=0, shift=self.shift)
        else:
            batch = range(1)
        keep = keep_mask(
            options.rng_state,
            options.dropout_p,
            batch=batch,
            heads=range(origin.stream + heads.start, origin.stream + heads.stop),
            num_heads=self.heads_q,
            rows=m_block.positions(origin.first_q),
            cols=n_block.positions(origin.first_k),
        )
        return keep.logical_not_().view(-1, lanes.group * len(m_block), len(n_block))

    def _add_alibi(
        self, slopes: Tensor, scores: Tensor, lanes: Lanes, m_block: Block, n_block: Block
    ) -> None:
        if slopes.dim() == 2:
            of_lanes = slopes[self.options.part(lanes)]
        else:
            batches = lanes.batches.stop - lanes.batches.start
            of_lanes = slopes[lanes.heads_q].expand(batches, -1)
        distance = self._distance(m_block, n_block).abs().to(self.dtype)
        bias = of_lanes.to(self.dtype).reshape(-1, 1, 1) * distance
        scores.sub_(bias.view(scores.shape))

    def _distance(self, m_block: Block, n_block: Block) -> Tensor:
        """(block_m, block_n) integers: j - (i + shift)."""
        queries = torch.arange(m_block.start, m_block.stop, device=self.device) + self.shift
        return torch.arange(n_block.start, n_block.stop, device=self.device) - queries[:, None]

    def _hides_any(self, m_block: Block, n_block: Block) -> bool:
        """Whether some query of the one block does not see some key of the other."""
        left, right = self.options.window
        furthest_right = n_block.stop - 1 - (m_block.start + self.shift)
        furthest_left = m_block.stop - 1 + self.shift - n_block.start
        return 0 <= right < furthest_right or 0 <= left < furthest_left

    def _hidden(self, m_block: Block, n_block: Block) -> Tensor:
        """(block_m, block_n) booleans: keys that queries do not see."""
        left, right = self.options.window
        distance = self._distance(m_block, n_block)
        hidden = torch.zeros_like(distance, dtype=torch.bool)
        if left >= 0:
            hidden |= distance < -left
        if right >= 0:
            hidden |= distance > right
        return hidden
