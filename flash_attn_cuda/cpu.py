"""The CPU backend: FlashAttention-2 in torch operations.

Forward is Algorithm 1 and backward Algorithm 2 of Dao, "FlashAttention-2: Faster Attention with
Better Parallelism and Work Partitioning" (2023): tiles of queries against tiles of keys, online
softmax with an output that is normalised once at the end, and a backward that recomputes the
probabilities from the log-sum-exp. Extra memory is O(seqlen * head_dim).

Layout inside: a tile packs batch and key heads into one leading dimension ("lanes"), and the query
heads that share a key head into rows, so that K and V are never expanded: scores are (lanes, group
* block_m, block_n). Everything is computed in fp64 for fp64 inputs and in fp32 otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .checks import lse_dtype


@dataclass(frozen=True)
class Tiling:
    """Upper bounds of a tile of more than one lane. Results depend on it by rounding alone."""

    block_m: int = 256  # queries
    block_n: int = 256  # keys
    max_scores: int = 1 << 19  # elements of a score tile over all its lanes: 2 MiB in fp32
    max_dq: int = 1 << 23  # elements of the backward's dq accumulator, likewise: 32 MiB in fp32


DEFAULT_TILING = Tiling()


def round_up_seqlen(seqlen: int) -> int:
    """Rows per head of softmax_d, as the CUDA backward returns it: a multiple of 128."""
    return (seqlen + 127) // 128 * 128


def attention_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float,
    causal: bool,
    tiling: Tiling = DEFAULT_TILING,
) -> tuple[Tensor, Tensor]:
    """Attention of q (B, Sq, Hq, D) over k, v (B, Sk, Hk, D); FlashAttention-2, Algorithm 1.

    Returns out (B, Sq, Hq, D) in the input dtype and lse (B, Hq, Sq), the natural logarithm of the
    softmax's denominator, in fp32 (fp64 for fp64 inputs). A query that sees no key gets out 0 and
    lse -inf. The inputs must satisfy checks.check_attention_inputs.
    """
    problem = _Problem.of(q, k, causal, tiling)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(problem.lse_shape, dtype=problem.dtype, device=q.device)
    for lanes in problem.lanes():
        for m_block in problem.query_blocks():
            q_tile = lanes.query_tile(q, m_block) * softmax_scale
            row_max = q_tile.new_full((*q_tile.shape[:2], 1), -math.inf)
            row_sum = torch.zeros_like(row_max)
            out_tile = torch.zeros_like(q_tile)
            for n_block in problem.key_blocks_seen_by(m_block):
                scores = torch.bmm(q_tile, lanes.key_tile(k, n_block).mT)
                problem.hide(scores, m_block, n_block)
                new_max = torch.maximum(row_max, scores.amax(-1, keepdim=True))
                # A row that has seen no key has maximum -inf, and -inf - -inf is no number.
                finite_max = new_max.masked_fill(new_max == -math.inf, 0.0)
                probs = scores.sub_(finite_max).exp_()
                rescale = torch.exp(row_max - finite_max)
                row_sum.mul_(rescale).add_(probs.sum(-1, keepdim=True))
                out_tile.mul_(rescale).baddbmm_(probs, lanes.key_tile(v, n_block))
                row_max = new_max
            no_key = row_sum == 0.0
            lanes.store_queries(out, m_block, out_tile.div_(row_sum.masked_fill(no_key, 1.0)))
            lanes.store_rows(lse, m_block, row_max + row_sum.log())
    return out, lse


def attention_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    softmax_scale: float,
    causal: bool,
    dlse: Tensor | None = None,
    tiling: Tiling = DEFAULT_TILING,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of attention_forward; FlashAttention-2, Algorithm 2, and dlse (B, Hq, Sq).

    With S the scaled scores and P the probabilities, dS = P * (dP - softmax_d) where softmax_d =
    rowsum(dO * O) - dLSE. Returns dq, dk, dv in the shapes and dtype of q, k, v, and softmax_d (B,
    Hq, Sq rounded up to 128; zero beyond Sq) in lse's dtype. dk and dv are summed over the query
    heads of their group in the compute dtype.
    """
    problem = _Problem.of(q, k, causal, tiling)
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    batch, heads_q, seqlen_q = problem.lse_shape
    softmax_d = torch.zeros(
        (batch, heads_q, round_up_seqlen(seqlen_q)), dtype=problem.dtype, device=q.device
    )
    for lanes in problem.lanes():
        dq_tiles = {}
        for m_block in problem.query_blocks():
            dout_tile = lanes.query_tile(dout, m_block)
            row_d = (dout_tile * lanes.query_tile(out, m_block)).sum(-1, keepdim=True)
            if dlse is not None:
                row_d -= lanes.row_tile(dlse, m_block)
            # A query without a visible key has no gradient, whatever arrives through its lse.
            row_d.masked_fill_(lanes.row_tile(lse, m_block) == -math.inf, 0.0)
            lanes.store_rows(softmax_d, m_block, row_d)
            dq_tiles[m_block] = torch.zeros_like(dout_tile)

        for n_block in problem.key_blocks():
            k_tile, v_tile = lanes.key_tile(k, n_block), lanes.key_tile(v, n_block)
            dk_tile = torch.zeros(k_tile.shape, dtype=k_tile.dtype, device=k_tile.device)
            dv_tile = torch.zeros_like(dk_tile)
            for m_block in problem.query_blocks_that_see(n_block):
                q_tile = lanes.query_tile(q, m_block) * softmax_scale
                dout_tile = lanes.query_tile(dout, m_block)
                row_lse = lanes.row_tile(lse, m_block)
                row_lse = row_lse.masked_fill(
                    row_lse == -math.inf, math.inf
                )  # probabilities become 0
                scores = torch.bmm(q_tile, k_tile.mT)
                problem.hide(scores, m_block, n_block)
                probs = scores.sub_(row_lse).exp_()
                dv_tile.baddbmm_(probs.mT, dout_tile)
                dprobs = torch.bmm(dout_tile, v_tile.mT)
                dscores = dprobs.sub_(lanes.row_tile(softmax_d, m_block)).mul_(probs)
                dq_tiles[m_block].baddbmm_(dscores, k_tile)
                dk_tile.baddbmm_(dscores.mT, q_tile)
            lanes.store_keys(dk, n_block, dk_tile)
            lanes.store_keys(dv, n_block, dv_tile)

        for m_block, dq_tile in dq_tiles.items():
            lanes.store_queries(dq, m_block, dq_tile.mul_(softmax_scale))
    return dq, dk, dv, softmax_d


@dataclass(frozen=True)
class _Block:
    """Positions start <= i < stop of a sequence."""

    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


def _blocks(start: int, stop: int, size: int) -> Iterator[_Block]:
    for begin in range(start, stop, size):
        yield _Block(begin, min(begin + size, stop))


@dataclass(frozen=True)
class _Lanes:
    """Some batches and some key heads: what one tile computes at a time."""

    batches: slice
    heads_k: slice
    heads_q: slice
    group: int  # query heads per key head
    dtype: torch.dtype

    def query_tile(self, x: Tensor, block: _Block) -> Tensor:
        """(B, Sq, Hq, D) -> (lanes, group * block_m, D)."""
        tile = x[self.batches, block.start : block.stop, self.heads_q].transpose(1, 2)
        return tile.to(self.dtype).reshape(-1, self.group * len(block), x.shape[-1])

    def row_tile(self, x: Tensor, block: _Block) -> Tensor:
        """(B, Hq, Sq) -> (lanes, group * block_m, 1)."""
        tile = x[self.batches, self.heads_q, block.start : block.stop]
        return tile.reshape(-1, self.group * len(block), 1)

    def key_tile(self, x: Tensor, block: _Block) -> Tensor:
        """(B, Sk, Hk, D) -> (lanes, block_n, D)."""
        tile = x[self.batches, block.start : block.stop, self.heads_k].transpose(1, 2)
        return tile.to(self.dtype).flatten(0, 1)

    def store_queries(self, x: Tensor, block: _Block, tile: Tensor) -> None:
        target = x[self.batches, block.start : block.stop, self.heads_q].transpose(1, 2)
        target.copy_(tile.view(target.shape))

    def store_rows(self, x: Tensor, block: _Block, tile: Tensor) -> None:
        target = x[self.batches, self.heads_q, block.start : block.stop]
        target.copy_(tile.view(target.shape))

    def store_keys(self, x: Tensor, block: _Block, tile: Tensor) -> None:
        target = x[self.batches, block.start : block.stop, self.heads_k].transpose(1, 2)
        target.copy_(tile.view(target.shape))


@dataclass(frozen=True)
class _Problem:
    """Sizes, mask and tiling of one call: which blocks there are and which of them meet."""

    batch: int
    seqlen_q: int
    seqlen_k: int
    heads_q: int
    heads_k: int
    causal: bool
    dtype: torch.dtype
    device: torch.device
    block_m: int
    block_n: int
    lanes_per_tile: int

    @classmethod
    def of(cls, q: Tensor, k: Tensor, causal: bool, tiling: Tiling) -> _Problem:
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
            causal=causal,
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
        """Query i may see keys up to i + shift: the diagonal ends in the bottom right corner."""
        return self.seqlen_k - self.seqlen_q

    def lanes(self) -> Iterator[_Lanes]:
        """Whole batches where they fit a tile, else key heads of one batch."""
        batches_per_tile = max(1, self.lanes_per_tile // self.heads_k)
        heads_per_tile = min(self.heads_k, self.lanes_per_tile)
        group = self.heads_q // self.heads_k
        for batches in _blocks(0, self.batch, batches_per_tile):
            for heads in _blocks(0, self.heads_k, heads_per_tile):
                yield _Lanes(
                    batches=slice(batches.start, batches.stop),
                    heads_k=slice(heads.start, heads.stop),
                    heads_q=slice(heads.start * group, heads.stop * group),
                    group=group,
                    dtype=self.dtype,
                )

    def query_blocks(self) -> Iterator[_Block]:
        return _blocks(0, self.seqlen_q, self.block_m)

    def key_blocks(self) -> Iterator[_Block]:
        return _blocks(0, self.seqlen_k, self.block_n)

    def key_blocks_seen_by(self, m_block: _Block) -> Iterator[_Block]:
        """Key blocks with a key that some query of the block sees."""
        stop = min(self.seqlen_k, m_block.stop + self.shift) if self.causal else self.seqlen_k
        return _blocks(0, stop, self.block_n)

    def query_blocks_that_see(self, n_block: _Block) -> Iterator[_Block]:
        """Those of query_blocks() with a query that sees some key of the block."""
        first = max(0, n_block.start - self.shift) // self.block_m if self.causal else 0
        return _blocks(first * self.block_m, self.seqlen_q, self.block_m)

    def hide(self, scores: Tensor, m_block: _Block, n_block: _Block) -> None:
        """Set the scores (lanes, group * block_m, block_n) of invisible keys to -inf, in place."""
        if not self.causal or n_block.stop - 1 <= m_block.start + self.shift:
            return
        queries = torch.arange(m_block.start, m_block.stop, device=self.device)
        keys = torch.arange(n_block.start, n_block.stop, device=self.device)
        hidden = keys > queries[:, None] + self.shift
        scores.view(-1, len(m_block), len(n_block)).masked_fill_(hidden, -math.inf)
