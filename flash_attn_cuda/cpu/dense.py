"""Attention of sequences of one length, and its gradients."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from ..call.fields import AttentionCall, Gradients, Incoming
from .philox import keep_scale
from .tiles import DEFAULT_TILING, Problem, Tiling


def attention_forward(
    call: AttentionCall,
    out: Tensor,
    lse: Tensor,
    tiling: Tiling = DEFAULT_TILING,
    max_logits: Tensor | None = None,
) -> None:
    """Attention of q (B, Sq, Hq, D) over k (B, Sk, Hk, D) and v (B, Sk, Hk, Dv); FlashAttention-2,
    Algorithm 1.

    Writes out (B, Sq, Hq, Dv) and lse (B, Hq, Sq), the natural logarithm of the softmax's
    denominator, in fp32 (fp64 for fp64 inputs). A query that sees no key gets out 0 and lse -inf,
    unless something else is in its softmax. Dropout takes part in out alone. max_logits (B, Hq) is
    raised to the largest score of every head.
    """
    if has_lists_within_a_group(call):
        group = call.q.shape[2] // call.k.shape[2]
        k, v = (x.repeat_interleave(group, 2) for x in (call.k, call.v))
        call = replace(call, k=k, v=v)
    problem, softmax_scale = Problem.of(call, tiling), call.scale()
    for lanes in problem.lanes():
        for m_block in problem.query_blocks():
            q_tile = lanes.query_tile(call.q, m_block) * softmax_scale
            row_max, row_sum = problem.empty_softmax(q_tile, lanes, m_block)
            out_tile = q_tile.new_zeros((*q_tile.shape[:-1], call.v.shape[-1]))
            for n_block in problem.key_blocks_seen_by(lanes, m_block):
                scores = torch.bmm(q_tile, lanes.key_tile(call.k, n_block).mT)
                problem.modify(scores, lanes, m_block, n_block)
                if max_logits is not None:
                    problem.raise_to_largest(max_logits, scores, lanes)
                new_max = torch.maximum(row_max, scores.amax(-1, keepdim=True))
                # A row that has seen no key has maximum -inf, and -inf - -inf is no number.
                finite_max = new_max.masked_fill(new_max == -math.inf, 0.0)
                probs = scores.sub_(finite_max).exp_()
                rescale = torch.exp(row_max - finite_max)
                row_sum.mul_(rescale).add_(probs.sum(-1, keepdim=True))
                dropped = problem.dropped(lanes, m_block, n_block)
                if dropped is not None:
                    probs.masked_fill_(dropped, 0.0)
                out_tile.mul_(rescale).baddbmm_(probs, lanes.key_tile(call.v, n_block))
                row_max = new_max
            divisor = row_sum.masked_fill(row_sum == 0.0, 1.0) / keep_scale(call.dropout_p)
            lanes.store_queries(out, m_block, out_tile.div_(divisor))
            lanes.store_rows(lse, m_block, row_max + row_sum.log())


def attention_backward(
    call: AttentionCall, incoming: Incoming, found: Gradients, tiling: Tiling = DEFAULT_TILING
) -> None:
    """Gradients of attention_forward; FlashAttention-2, Algorithm 2, and dlse (B, Hq, Sq).

    With S the scaled products and P the probabilities, dS = P * (dP - softmax_d) where softmax_d =
    rowsum(dO * O) - dLSE, times the derivative of the scores by S; dropout multiplies dP, and P
    where it makes dV, by its mask. Writes dq, dk, dv in the shapes of q, k, v and softmax_d (B, Hq,
    Sq or more) in lse's dtype. dk and dv are summed over the query heads of their group in the
    compute dtype. The bias's gradient, dS before that derivative, is added to dbias (B|1, Hq|1,
    Sq|1, Sk), of the compute dtype, where that is given.
    """
    if has_lists_within_a_group(call):
        heads_k, group = call.k.shape[2], call.q.shape[2] // call.k.shape[2]
        k, v = (x.to(call.lse_dtype()).repeat_interleave(group, 2) for x in (call.k, call.v))
        wide = found._replace(dk=torch.empty_like(k), dv=torch.empty_like(v))
        attention_backward(replace(call, k=k, v=v), incoming, wide, tiling)
        for target, of_heads in ((found.dk, wide.dk), (found.dv, wide.dv)):
            target.copy_(of_heads.unflatten(2, (heads_k, group)).sum(3))
        return
    dout, softmax_d = incoming.dout, found.softmax_d
    assert dout is not None and softmax_d is not None
    problem, softmax_scale = Problem.of(call, tiling, by_columns=True), call.scale()
    for lanes in problem.lanes():
        dq_tiles = {}
        for m_block in problem.query_blocks():
            dout_tile = lanes.query_tile(dout, m_block)
            row_d = (dout_tile * lanes.query_tile(incoming.out, m_block)).sum(-1, keepdim=True)
            if incoming.dlse is not None:
                row_d -= lanes.row_tile(incoming.dlse, m_block)
            # A query without a visible key has no gradient, whatever arrives through its lse.
            lse = lanes.row_tile(incoming.softmax_lse, m_block)
            lanes.store_rows(softmax_d, m_block, row_d.masked_fill_(lse == -math.inf, 0.0))
            dq_tiles[m_block] = dout_tile.new_zeros((*dout_tile.shape[:-1], call.q.shape[-1]))

        for n_block in problem.key_blocks():
            k_tile, v_tile = lanes.key_tile(call.k, n_block), lanes.key_tile(call.v, n_block)
            dk_tile = torch.zeros(k_tile.shape, dtype=k_tile.dtype, device=k_tile.device)
            dv_tile = torch.zeros(v_tile.shape, dtype=v_tile.dtype, device=v_tile.device)
            for m_block in problem.query_blocks_that_see(lanes, n_block):
                q_tile = lanes.query_tile(call.q, m_block) * softmax_scale
                dout_tile = lanes.query_tile(dout, m_block)
                scores = torch.bmm(q_tile, k_tile.mT)
                capped = problem.modify(scores, lanes, m_block, n_block)
                lse = lanes.row_tile(incoming.softmax_lse, m_block)
                probs = scores.sub_(telling_lse(lse)).exp_()
                dprobs = torch.bmm(dout_tile, v_tile.mT)
                dropped = problem.dropped(lanes, m_block, n_block)
                if dropped is None:
                    dv_tile.baddbmm_(probs.mT, dout_tile)
                else:
                    kept, factor = probs.masked_fill(dropped, 0.0), keep_scale(call.dropout_p)
                    dv_tile.baddbmm_(kept.mT, dout_tile, alpha=factor)
                    dprobs.masked_fill_(dropped, 0.0).mul_(factor)
                dscores = dprobs.sub_(lanes.row_tile(softmax_d, m_block)).mul_(probs)
                if found.dbias is not None:
                    problem.add_bias_gradient(found.dbias, dscores, lanes, m_block, n_block)
                if capped is not None:
                    dscores.mul_(1.0 - capped * capped)
                dq_tiles[m_block].baddbmm_(dscores, k_tile)
                dk_tile.baddbmm_(dscores.mT, q_tile)
            lanes.store_keys(found.dk, n_block, dk_tile)
            lanes.store_keys(found.dv, n_block, dv_tile)

        for m_block, dq_tile in dq_tiles.items():
            lanes.store_queries(found.dq, m_block, dq_tile.mul_(softmax_scale))


def probabilities(
    call: AttentionCall, lse: Tensor, probs: Tensor, tiling: Tiling = DEFAULT_TILING
) -> None:
    """Writes the probabilities (B, Hq, Sq, Sk) of attention_forward, which returned `lse`.

    0 where the mask hides a key; where dropout takes one away its sign is flipped, so that a
    probability of 0 becomes -0. For inspection: memory is O(Sq * Sk).
    """
    problem = Problem.of(call, tiling)
    for lanes in problem.lanes():
        for m_block in problem.query_blocks():
            q_tile = lanes.query_tile(call.q, m_block) * call.scale()
            for n_block in problem.key_blocks():
                scores = torch.bmm(q_tile, lanes.key_tile(call.k, n_block).mT)
                problem.modify(scores, lanes, m_block, n_block)
                tile = scores.sub_(telling_lse(lanes.row_tile(lse, m_block))).exp_()
                dropped = problem.dropped(lanes, m_block, n_block)
                if dropped is not None:
                    tile = torch.where(dropped, -tile, tile)
                lanes.store_scores(probs, m_block, n_block, tile)


def has_lists_within_a_group(call: AttentionCall) -> bool:
    """Whether query heads of one key head visit different tiles. Each then gets keys of its own:
    what a list leaves out is not read, whatever it holds.
    """
    lists = call.block_columns if call.block_rows is None else call.block_rows
    return lists is not None and lists.shape[1] > 1 and call.q.shape[2] != call.k.shape[2]


def telling_lse(lse: Tensor) -> Tensor:
    """lse with +inf, which makes every probability 0, for rows that see no key, and for those whose
    own is so large that neighbouring numbers are 2 apart and say nothing of a probability.
    """
    return lse.masked_fill(lse.abs() > 2.0 / torch.finfo(lse.dtype).eps, math.inf)
