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

from ..checks import lse_dtype
from ..philox import keep_mask, keep_scale


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
    first_sequence: int = 0  # which sequence of the call the first batch entry is

    def __post_init__(self) -> None:
        if self.dropout_p > 0.0 and self.rng_state is None:
            raise ValueError("rng_state: must be given when dropout_p > 0, got None")

    @property
    def is_masked(self) -> bool:
        """Whether there is a window, causal included, however wide."""
        return max(self.window) >= 0

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

    def positions(self) -> range:
        return range(self.start, self.stop)


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
        block_n = max(1, min(tiling.block_n, seqlen_k))
        block_m = max(1, min(tiling.block_m, seqlen_q, tiling.max_scores // (group * block_n)))
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
        """Query i stands at key i + shift: the diagonal ends in the bottom right corner."""
        return self.seqlen_k - self.seqlen_q

    # -- which blocks meet -----------------------------------------------------------------------

    def lanes(self) -> Iterator[Lanes]:
        """Whole batches where they fit a tile, else key heads of one batch."""
        batches_per_tile = max(1, self.lanes_per_tile // self.heads_k)
        heads_per_tile = min(self.heads_k, self.lanes_per_tile)
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

    def key_blocks_seen_by(self, m_block: Block) -> Iterator[Block]:
        """Those of key_blocks() with a key that some query of the block sees, up to the last such
        key.
        """
        left, right = self.options.window
        start, stop = 0, self.seqlen_k
        if left >= 0:
            start = max(0, m_block.start + self.shift - left)
        if right >= 0:
            stop = min(stop, m_block.stop + self.shift + right)
        return _blocks(start, stop, self.block_n)

    def query_blocks_that_see(self, n_block: Block) -> Iterator[Block]:
        """Those of query_blocks() with a query that sees some key of the block."""
        left, right = self.options.window
        start, stop = 0, self.seqlen_q
        if right >= 0:
            start = max(0, n_block.start - self.shift - right)
        if left >= 0:
            stop = min(stop, n_block.stop - self.shift + left)
        for block in _blocks(start, stop, self.block_m):
            yield Block(block.start, min(block.start + self.block_m, self.seqlen_q))

    # -- scores of a pair of blocks --------------------------------------------------------------

    def modify(self, scores: Tensor, lanes: Lanes, m_block: Block, n_block: Block) -> Tensor | None:
        """Turn products softmax_scale * q k^T (lanes, group * block_m, block_n) into scores, in
        place: softcap, ALiBi, and -inf for keys that a query does not see.

        Returns the derivative of the scores by the products, None for 1.
        """
        slope = None
        if self.options.softcap > 0.0:
            capped = scores.div_(self.options.softcap).tanh_()
            slope = 1.0 - capped * capped
            scores.mul_(self.options.softcap)
        if self.options.alibi_slopes is not None:
            self._add_alibi(self.options.alibi_slopes, scores, lanes, m_block, n_block)
        if self._hides_any(m_block, n_block):
            hidden = self._hidden(m_block, n_block)
            scores.view(-1, *hidden.shape).masked_fill_(hidden, -math.inf)
        return slope

    def dropped(self, lanes: Lanes, m_block: Block, n_block: Block) -> Tensor | None:
        """(lanes, group * block_m, block_n) booleans: what dropout takes away; None without."""
        options = self.options
        if options.dropout_p <= 0.0 or options.rng_state is None:
            return None
        first = options.first_sequence
        keep = keep_mask(
            options.rng_state,
            options.dropout_p,
            batch=range(first + lanes.batches.start, first + lanes.batches.stop),
            heads=range(lanes.heads_q.start, lanes.heads_q.stop),
            num_heads=self.heads_q,
            rows=m_block.positions(),
            cols=n_block.positions(),
        )
        return keep.logical_not_().view(-1, lanes.group * len(m_block), len(n_block))

    def _add_alibi(
        self, slopes: Tensor, scores: Tensor, lanes: Lanes, m_block: Block, n_block: Block
    ) -> None:
        if slopes.dim() == 2:
            first = self.options.first_sequence
            of_lanes = slopes[first + lanes.batches.start : first + lanes.batches.stop]
            of_lanes = of_lanes[:, lanes.heads_q]
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
