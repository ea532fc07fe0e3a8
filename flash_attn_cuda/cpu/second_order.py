"""Derivatives of attention in a direction (tangents tq, tk, tv of q, k, v, tbias, tsink), and the
gradient of those: what forward mode and a second backward need.

With S the scores and P the probabilities, T is the tangent of S: softmax_scale * (tq k^T + q tk^T),
times the derivative of the scores by the products, plus tbias. mu = rowsum(P * T) is that of lse.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..call.fields import AttentionCall, Gradients, Incoming, Tangents
from .dense import has_lists_within_a_group, telling_lse
from .philox import keep_scale
from .tiles import DEFAULT_TILING, Block, Lanes, Problem, Tiling


def attention_jvp(
    call: AttentionCall,
    incoming: Incoming,
    tangents: Tangents,
    tiling: Tiling = DEFAULT_TILING,
) -> None:
    """Writes tangents.tout (B, Sq, Hq, Dv) and tangents.tlse (B, Hq, Sq): the derivatives of
    `incoming`'s out and softmax_lse, which attention_forward made.

    tout = (P * T) v + P tv - mu * out, dropout multiplying P by its mask. A query that sees no key
    has 0.
    """
    call, tangents = _with_keys_of_its_own(call, tangents)
    assert tangents.tout is not None and tangents.tlse is not None
    problem = Problem.of(call, tiling)
    for lanes in problem.lanes():
        for m_block in problem.query_blocks():
            rows = _Rows.of(problem, lanes, m_block, incoming, tangents)
            mu = rows.tangent_of_sink()
            tout_tile = mu.new_zeros((*mu.shape[:2], call.v.shape[-1]))
            for n_block in problem.key_blocks_seen_by(lanes, m_block):
                tile = _Tile.of(rows, n_block)
                weighted = tile.tangent * tile.probs
                mu = mu + weighted.sum(-1, keepdim=True)
                kept = tile.keep_in_place(tile.probs)
                tout_tile.baddbmm_(tile.keep_in_place(weighted), lanes.key_tile(call.v, n_block))
                if tangents.tv is not None:
                    tout_tile.baddbmm_(kept, lanes.key_tile(tangents.tv, n_block))
            tout_tile -= mu * lanes.query_tile(incoming.out, m_block)
            lanes.store_queries(tangents.tout, m_block, tout_tile)
            lanes.store_rows(tangents.tlse, m_block, mu)


def attention_hvp(
    call: AttentionCall,
    incoming: Incoming,
    tangents: Tangents,
    found: Gradients,
    tiling: Tiling = DEFAULT_TILING,
) -> None:
    """Gradients of <dout, tout> + <dlse, tlse> by q, k, v and the bias, where tout and tlse are
    attention_jvp's for these tangents: the Hessian of <dout, out> + <dlse, lse> times the tangents.

    With dP = dout v^T, dS = P * (dP - softmax_d) as in attention_backward and beta = rowsum(dout *
    tout), the derivative of dS is dS' = P * (dout tv^T + (T - mu) * (dP - softmax_d) - beta);
    dq = softmax_scale * (dS' k + dS tk), dk likewise, dv = (P * (T - mu))^T dout. A softcap adds
    dS * T times its second derivative. Writes dq, dk, dv and adds to dbias, where it is given.
    """
    if has_lists_within_a_group(call):
        heads_k, group = call.k.shape[2], call.q.shape[2] // call.k.shape[2]
        alone, their_tangents = _with_keys_of_its_own(call, tangents)
        dk, dv = (x.new_empty(x.shape, dtype=call.lse_dtype()) for x in (alone.k, alone.v))
        attention_hvp(alone, incoming, their_tangents, found._replace(dk=dk, dv=dv), tiling)
        for target, of_heads in ((found.dk, dk), (found.dv, dv)):
            target.copy_(of_heads.unflatten(2, (heads_k, group)).sum(3))
        return
    problem, softmax_scale = Problem.of(call, tiling, by_columns=True), call.scale()
    for lanes in problem.lanes():
        rows_of = {
            m_block: _Rows.of(problem, lanes, m_block, incoming, tangents)
            for m_block in problem.query_blocks()
        }
        dq_tiles = {m_block: torch.zeros_like(rows.q) for m_block, rows in rows_of.items()}
        for n_block in problem.key_blocks():
            k_tile, v_tile = (lanes.key_tile(x, n_block) for x in (call.k, call.v))
            dk_tile, dv_tile = torch.zeros_like(k_tile), torch.zeros_like(v_tile)
            for m_block in problem.query_blocks_that_see(lanes, n_block):
                rows = rows_of[m_block]
                tile = _Tile.of(rows, n_block)
                dout_tile, row_d, mu, beta = rows.of_second_order()
                moved = tile.tangent - mu
                dv_tile.baddbmm_(tile.keep_in_place(tile.probs * moved).mT, dout_tile)
                slack = tile.keep_in_place(torch.bmm(dout_tile, v_tile.mT)).sub_(row_d)
                dscores = tile.probs * slack
                moved.mul_(slack).sub_(beta)
                if tangents.tv is not None:
                    tv_tile = lanes.key_tile(tangents.tv, n_block)
                    moved.add_(tile.keep_in_place(torch.bmm(dout_tile, tv_tile.mT)))
                second = moved.mul_(tile.probs)
                if found.dbias is not None:
                    problem.add_bias_gradient(found.dbias, second, lanes, m_block, n_block)
                if tile.slope is not None and tile.curvature is not None:
                    second = second * tile.slope + dscores * tile.curvature
                    dscores = dscores * tile.slope
                dq_tiles[m_block].baddbmm_(second, k_tile)
                dk_tile.baddbmm_(second.mT, rows.q)
                if tangents.tk is not None:
                    dq_tiles[m_block].baddbmm_(dscores, lanes.key_tile(tangents.tk, n_block))
                if rows.tq is not None:
                    dk_tile.baddbmm_(dscores.mT, rows.tq)
            lanes.store_keys(found.dk, n_block, dk_tile)
            lanes.store_keys(found.dv, n_block, dv_tile)
        for m_block, dq_tile in dq_tiles.items():
            lanes.store_queries(found.dq, m_block, dq_tile.mul_(softmax_scale))


def hvp_of_sink(call: AttentionCall, incoming: Incoming, tangents: Tangents) -> Tensor | None:
    """attention_hvp's gradient by the call's sink (Hq,): the sum over rows of exp(sink - lse) *
    ((tsink - tlse) * -softmax_d - rowsum(dout * tout)).
    """
    if call.sink is None:
        return None
    assert tangents.tout is not None and tangents.tlse is not None
    dtype = call.lse_dtype()
    lse, tlse = incoming.softmax_lse, tangents.tlse
    dout = torch.zeros_like(incoming.out) if incoming.dout is None else incoming.dout
    row_d, beta = (
        (dout.to(dtype) * x.to(dtype)).sum(-1).transpose(-1, -2)
        for x in (incoming.out, tangents.tout)
    )
    if incoming.dlse is not None:
        row_d = row_d - incoming.dlse
    share = (call.sink.to(dtype)[:, None] - lse).exp()
    tsink = 0.0 if tangents.tsink is None else tangents.tsink.to(dtype)[:, None]
    of_rows = share * ((tlse - tsink) * row_d - beta)
    # Rows that are no query's may hold anything.
    of_rows = of_rows.masked_fill(lse == -torch.inf, 0.0)
    return of_rows.sum(1 if of_rows.dim() == 2 else (0, 2)).to(call.sink.dtype)


@dataclass(frozen=True, eq=False)
class _Rows:
    """A block of queries; tiles are (lanes, group * block_m, ...) in the compute dtype."""

    problem: Problem
    lanes: Lanes
    block: Block
    incoming: Incoming
    tangents: Tangents
    q: Tensor  # times softmax_scale
    tq: Tensor | None  # likewise
    lse: Tensor

    @classmethod
    def of(
        cls,
        problem: Problem,
        lanes: Lanes,
        block: Block,
        incoming: Incoming,
        tangents: Tangents,
    ) -> _Rows:
        call = problem.call
        q, scale = lanes.query_tile(call.q, block), call.scale()
        tq = None if tangents.tq is None else lanes.query_tile(tangents.tq, block) * scale
        lse = telling_lse(lanes.row_tile(incoming.softmax_lse, block))
        return cls(problem, lanes, block, incoming, tangents, q * scale, tq, lse)

    def tangent_of_sink(self) -> Tensor:
        """What the sink's tangent adds to that of lse."""
        call, tsink = self.problem.call, self.tangents.tsink
        if call.sink is None or tsink is None:
            return torch.zeros_like(self.lse)
        by_head = self.incoming.softmax_lse[self.lanes.batches, self.lanes.heads_q]
        lse = by_head[..., self.block.start : self.block.stop]
        of_heads = (x[self.lanes.heads_q, None].to(self.problem.dtype) for x in (call.sink, tsink))
        sink, tangent = of_heads
        share = (sink - lse).exp().masked_fill(lse == -torch.inf, 0.0)
        return (share * tangent).reshape(self.lse.shape)

    def of_second_order(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """dout, and (lanes, rows, 1) each softmax_d, mu and beta; 0 where no key is visible."""
        lanes, incoming, tangents = self.lanes, self.incoming, self.tangents
        assert tangents.tout is not None and tangents.tlse is not None
        out, tout = (lanes.query_tile(x, self.block) for x in (incoming.out, tangents.tout))
        dout = torch.zeros_like(out)
        if incoming.dout is not None:
            dout = lanes.query_tile(incoming.dout, self.block)
        row_d = (dout * out).sum(-1, keepdim=True)
        if incoming.dlse is not None:
            row_d -= lanes.row_tile(incoming.dlse, self.block)
        beta = (dout * tout).sum(-1, keepdim=True)
        mu = lanes.row_tile(tangents.tlse, self.block)
        return dout, row_d, mu, beta


@dataclass(frozen=True, eq=False)
class _Tile:
    """Queries and keys that meet, (lanes, group * block_m, block_n) each."""

    probs: Tensor
    tangent: Tensor  # of the scores; finite where the probability is 0
    slope: Tensor | None  # derivative of the scores by the products, None for 1
    curvature: Tensor | None  # that of the slope in the tangents' direction
    dropped: Tensor | None
    keep_scale: float

    @classmethod
    def of(cls, rows: _Rows, n_block: Block) -> _Tile:
        problem, lanes, tangents = rows.problem, rows.lanes, rows.tangents
        call = problem.call
        k_tile = lanes.key_tile(call.k, n_block)
        scores = torch.bmm(rows.q, k_tile.mT)
        capped = problem.modify(scores, lanes, rows.block, n_block)
        tangent, slope, curvature = torch.zeros_like(scores), None, None
        if rows.tq is not None:
            tangent.baddbmm_(rows.tq, k_tile.mT)
        if tangents.tk is not None:
            tangent.baddbmm_(rows.q, lanes.key_tile(tangents.tk, n_block).mT)
        if capped is not None:
            slope = 1.0 - capped * capped
            curvature = capped.mul_(slope).mul_(-2.0 / call.softcap).mul_(tangent)
            tangent.mul_(slope)
        if tangents.tbias is not None:
            problem.add_bias(tangents.tbias, tangent, lanes, rows.block, n_block)
        probs = scores.sub_(rows.lse).exp_()
        # A bias of -inf may have any tangent.
        tangent.masked_fill_(probs == 0.0, 0.0)
        dropped = problem.dropped(lanes, rows.block, n_block)
        scale = keep_scale(call.dropout_p)
        return cls(probs, tangent, slope, curvature, dropped, scale)

    def keep_in_place(self, x: Tensor) -> Tensor:
        """x times dropout's mask."""
        return (
            x if self.dropped is None else x.masked_fill_(self.dropped, 0.0).mul_(self.keep_scale)
        )


def _with_keys_of_its_own(
    call: AttentionCall, tangents: Tangents
) -> tuple[AttentionCall, Tangents]:
    """The call with keys for each query head where heads that share them visit other tiles."""
    if not has_lists_within_a_group(call):
        return call, tangents
    group = call.q.shape[2] // call.k.shape[2]

    def repeated(x: Tensor | None) -> Tensor | None:
        return None if x is None else x.repeat_interleave(group, 2)

    k, v = (x.repeat_interleave(group, 2) for x in (call.k, call.v))
    tk, tv = repeated(tangents.tk), repeated(tangents.tv)
    return replace(call, k=k, v=v), replace(tangents, tk=tk, tv=tv)
