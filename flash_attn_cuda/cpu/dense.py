"""Attention of sequences of one length, and its gradients."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..checks.tensors import lse_dtype, output_shape, round_up_seqlen
from .tiles import DEFAULT_TILING, AttentionOptions, Problem, Tiling


def attention_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    options: AttentionOptions,
    tiling: Tiling = DEFAULT_TILING,
) -> tuple[Tensor, Tensor]:
    """Attention of q (B, Sq, Hq, D) over k (B, Sk, Hk, D) and v (B, Sk, Hk, Dv); FlashAttention-2,
    Algorithm 1.

    Returns out (B, Sq, Hq, Dv) in the options' dtype and lse (B, Hq, Sq), the natural logarithm of
    the softmax's denominator, in fp32 (fp64 for fp64 inputs). A query that sees no key gets out 0
    and lse -inf, or its sink where there is one. Dropout takes part in out alone.
    """
    if _has_lists_within_a_group(q, k, options):
        k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], 2) for x in (k, v))
    problem = Problem.of(q, k, options, tiling)
    out = torch.empty(output_shape(q, v), dtype=options.result_dtype(q), device=q.device)
    lse = torch.empty(problem.lse_shape, dtype=problem.dtype, device=q.device)
    for lanes in problem.lanes():
        for m_block in problem.query_blocks():
            q_tile = lanes.query_tile(q, m_block) * options.softmax_scale
            row_max = q_tile.new_full((*q_tile.shape[:2], 1), -math.inf)
            row_sum = torch.zeros_like(row_max)
            if (sink := problem.sink_tile(lanes, m_block)) is not None:
                row_max, row_sum = sink, torch.ones_like(row_sum)
            out_tile = q_tile.new_zeros((*q_tile.shape[:-1], v.shape[-1]))
            for n_block in problem.key_blocks_seen_by(lanes, m_block):
                scores = torch.bmm(q_tile, lanes.key_tile(k, n_block).mT)
                problem.modify(scores, lanes, m_block, n_block)
                new_max = torch.maximum(row_max, scores.amax(-1, keepdim=True))
                # A row that has seen no key has maximum -inf, and -inf - -inf is no number.
                finite_max = new_max.masked_fill(new_max == -math.inf, 0.0)
                probs = scores.sub_(finite_max).exp_()
                rescale = torch.exp(row_max - finite_max)
                row_sum.mul_(rescale).add_(probs.sum(-1, keepdim=True))
                dropped = problem.dropped(lanes, m_block, n_block)
                if dropped is not None:
                    probs.masked_fill_(dropped, 0.0)
                out_tile.mul_(rescale).baddbmm_(probs, lanes.key_tile(v, n_block))
                row_max = new_max
            divisor = row_sum.masked_fill(row_sum == 0.0, 1.0) / options.keep_scale
            lanes.store_queries(out, m_block, out_tile.div_(divisor))
            lanes.store_rows(lse, m_block, row_max + row_sum.log())
    return out, lse


def attention_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    options: AttentionOptions,
    dlse: Tensor | None = None,
    tiling: Tiling = DEFAULT_TILING,
    dbias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of attention_forward; FlashAttention-2, Algorithm 2, and dlse (B, Hq, Sq).

    With S the scaled products and P the probabilities, dS = P * (dP - softmax_d) where softmax_d =
    rowsum(dO * O) - dLSE, times 1 - tanh^2 under a softcap; dropout multiplies dP, and P where it
    makes dV, by its mask. Returns dq, dk, dv in the shapes of q, k, v and the options' dtype, and
    softmax_d (B, Hq, Sq rounded up to 128; zero beyond Sq) in lse's dtype. dk and dv are summed
    over the query heads of their group in the compute dtype. The bias's gradient, dS before the
    softcap's factor, is added to dbias (B|1, Hq|1, Sq|1, Sk), of the compute dtype, where that is
    given.
    """
    if _has_lists_within_a_group(q, k, options):
        heads_k, group = k.shape[2], q.shape[2] // k.shape[2]
        wide_k, wide_v = (x.to(lse_dtype(q.dtype)).repeat_interleave(group, 2) for x in (k, v))
        dq, dk, dv, softmax_d = attention_backward(
            dout, q, wide_k, wide_v, out, lse, options, dlse, tiling, dbias
        )
        dtype = options.result_dtype(k)
        dk, dv = (x.unflatten(2, (heads_k, group)).sum(3).to(dtype) for x in (dk, dv))
        return dq, dk, dv, softmax_d
    problem = Problem.of(q, k, options, tiling)
    dq, dk, dv = (
        torch.empty(x.shape, dtype=options.result_dtype(x), device=x.device) for x in (q, k, v)
    )
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
            dq_tiles[m_block] = dout_tile.new_zeros((*dout_tile.shape[:-1], q.shape[-1]))

        for n_block in problem.key_blocks():
            k_tile, v_tile = lanes.key_tile(k, n_block), lanes.key_tile(v, n_block)
            dk_tile = torch.zeros(k_tile.shape, dtype=k_tile.dtype, device=k_tile.device)
            dv_tile = torch.zeros(v_tile.shape, dtype=v_tile.dtype, device=v_tile.device)
            for m_block in problem.query_blocks_that_see(lanes, n_block):
                q_tile = lanes.query_tile(q, m_block) * options.softmax_scale
                dout_tile = lanes.query_tile(dout, m_block)
                scores = torch.bmm(q_tile, k_tile.mT)
                slope = problem.modify(scores, lanes, m_block, n_block)
                probs = scores.sub_(_telling_lse(lanes.row_tile(lse, m_block))).exp_()
                dprobs = torch.bmm(dout_tile, v_tile.mT)
                dropped = problem.dropped(lanes, m_block, n_block)
                if dropped is None:
                    dv_tile.baddbmm_(probs.mT, dout_tile)
                else:
                    kept = probs.masked_fill(dropped, 0.0)
                    dv_tile.baddbmm_(kept.mT, dout_tile, alpha=options.keep_scale)
                    dprobs.masked_fill_(dropped, 0.0).mul_(options.keep_scale)
                dscores = dprobs.sub_(lanes.row_tile(softmax_d, m_block)).mul_(probs)
                if dbias is not None:
                    problem.add_bias_gradient(dbias, dscores, lanes, m_block, n_block)
                if slope is not None:
                    dscores.mul_(slope)
                dq_tiles[m_block].baddbmm_(dscores, k_tile)
                dk_tile.baddbmm_(dscores.mT, q_tile)
            lanes.store_keys(dk, n_block, dk_tile)
            lanes.store_keys(dv, n_block, dv_tile)

        for m_block, dq_tile in dq_tiles.items():
            lanes.store_queries(dq, m_block, dq_tile.mul_(options.softmax_scale))
    return dq, dk, dv, softmax_d


def probabilities(
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    options: AttentionOptions,
    tiling: Tiling = DEFAULT_TILING,
) -> Tensor:
    """The probabilities (B, Hq, Sq, Sk) of attention_forward, which returned `lse`, in q's dtype.

    0 where the mask hides a key; where dropout takes one away its sign is flipped, so that a
    probability of 0 becomes -0. For inspection: memory is O(Sq * Sk).
    """
    problem = Problem.of(q, k, options, tiling)
    probs = torch.zeros((*problem.lse_shape, problem.seqlen_k), dtype=q.dtype, device=q.device)
    for lanes in problem.lanes():
        for m_block in problem.query_blocks():
            q_tile = lanes.query_tile(q, m_block) * options.softmax_scale
            for n_block in problem.key_blocks():
                scores = torch.bmm(q_tile, lanes.key_tile(k, n_block).mT)
                problem.modify(scores, lanes, m_block, n_block)
                tile = scores.sub_(_telling_lse(lanes.row_tile(lse, m_block))).exp_()
                dropped = problem.dropped(lanes, m_block, n_block)
                if dropped is not None:
                    tile = torch.where(dropped, -tile, tile)
                lanes.store_scores(probs, m_block, n_block, tile)
    return probs


def _has_lists_within_a_group(q: Tensor, k: Tensor, options: AttentionOptions) -> bool:
    """Whether query heads of one key head visit different tiles. Each then gets keys of its own:
    what a list leaves out is not read, whatever it holds.
    """
    visibility = options.visibility
    return visibility is not None and visibility.differs_by_head and q.shape[2] != k.shape[2]


def _telling_lse(lse: Tensor) -> Tensor:
    """lse with +inf, which makes every probability 0, for rows that see no key, and for those whose
    own is so large that neighbouring numbers are 2 apart and say nothing of a probability.
    """
    return lse.masked_fill(lse.abs() > 2.0 / torch.finfo(lse.dtype).eps, math.inf)
