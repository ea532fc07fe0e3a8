"""The dense part of the reference (see __init__.py): attention in fp64, gradients by autograd."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tests.reference.parts import PLAIN, AttentionOptions, AttentionResult, Lanes, Rules

# What fp32 may do to a dot product, relative to the norms of its vectors: a few last places.
FP32_DOT_NOISE = 2.0**-22


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    options: AttentionOptions = PLAIN,
    compute_dtype: torch.dtype = torch.float64,
    **features: Any,
) -> tuple[Tensor, Tensor]:
    """(out, lse) in `compute_dtype`, differentiable in q, k, v, bias and sink through both.

    `features` override fields of `options`, here and below.
    """
    batch, seqlen_q, heads_q, _ = q.shape
    lanes = Lanes.of(q.to(compute_dtype), k.to(compute_dtype), v.to(compute_dtype))
    rules = Rules.of(replace(options, **features), lanes)
    outs, lses = [], []
    for chunk in lanes.chunks():
        out, lse = _attend(lanes.q[chunk], lanes.k[chunk], lanes.v[chunk], rules.part(chunk))
        outs.append(out)
        lses.append(lse)
    if not outs:
        out = lanes.zero_outputs().view(batch, seqlen_q, heads_q, v.shape[-1])
        return out, lanes.q.new_zeros(batch, heads_q, seqlen_q)
    out = torch.cat(outs).view(batch, heads_q, seqlen_q, v.shape[-1]).transpose(1, 2)
    return out, torch.cat(lses).view(batch, heads_q, seqlen_q)


def attention_with_gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    dlse: Tensor | None = None,
    *,
    options: AttentionOptions = PLAIN,
    compute_dtype: torch.dtype = torch.float64,
    **features: Any,
) -> AttentionResult:
    """Forward and backward in `compute_dtype`, in chunks of heads and queries so that long
    sequences fit.

    dout has the shape of out, dlse that of lse; dlse None means that nothing uses lse.

    The result's `noise` estimates what rounding dot products to fp32 does to lse and gradients. For
    the latter it matters where dS = P * (dP - D + dlse) cancels: with one visible key dP equals D,
    so dq is 0 in exact arithmetic and fp32 dust in any kernel. An error of dP - D acts like a
    change of dlse, so its effect is one more gradient of lse.
    """
    lanes = Lanes.of(q, k, v)
    rules = Rules.of(replace(options, **features), lanes)
    dout_lanes, dlse_lanes = lanes.output_lanes(dout), lanes.row_lanes(dlse)
    sums = _Sums.of(lanes, rules, compute_dtype)
    noise = _Sums.of(lanes, rules, compute_dtype)
    for chunk in lanes.chunks():
        k_leaf, v_leaf = (x[chunk].to(compute_dtype).requires_grad_() for x in (lanes.k, lanes.v))
        for rows in lanes.query_chunks():
            at = (chunk, slice(None), rows)
            q_leaf = lanes.q[at].to(compute_dtype).requires_grad_()
            part = rules.part(chunk, rows).with_leaves(compute_dtype)
            out, lse = _attend(q_leaf, k_leaf, v_leaf, part)
            outputs, incoming = [out], [dout_lanes[at].to(compute_dtype)]
            if dlse_lanes is not None:
                outputs.append(lse)
                incoming.append(dlse_lanes[at].to(compute_dtype))
            leaves = (q_leaf, k_leaf, v_leaf, part.bias, part.sink)
            sums.out[at], sums.lse[at] = out.detach(), lse.detach()
            sums.add(at, outputs, leaves, incoming)
            row_error = 2 * FP32_DOT_NOISE * incoming[0].norm(dim=-1) * sums.out[at].norm(dim=-1)
            if rules.keep is not None or rules.sink is not None:
                # D is made of out as it was stored. What rounding did to it shows where dP - D
                # cancels; otherwise out is then a row of v, which was stored already.
                row_error += torch.finfo(q.dtype).eps * (incoming[0] * sums.out[at]).norm(dim=-1)
            noise.add(at, [lse], leaves, [row_error])
    result = sums.result(lanes, replace(options, **features))
    if q.numel() > 0 and k.numel() > 0:
        longest_q, longest_k = (x.norm(dim=-1, dtype=torch.float64).max() for x in (q, k))
        result.noise = noise.largest() | {
            "lse": FP32_DOT_NOISE
            * (abs(rules.scale) * (longest_q * longest_k).item() + rules.largest_modifier()),
        }
    return result


def low_precision(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    dlse: Tensor | None = None,
    *,
    options: AttentionOptions = PLAIN,
    **features: Any,
) -> AttentionResult:
    """The same mathematics naively in the dtype of the inputs: scores, probabilities and gradients
    all rounded to it.

    Its distance to the fp64 result is what the dtype costs without any care, hence the yardstick of
    tolerance.py. The scale goes to the keys before the product, so that large scores in fp16
    overflow no sooner than they must.
    """
    lanes = Lanes.of(q, k, v)
    rules = Rules.of(replace(options, **features), lanes)
    dout_lanes, dlse_lanes = lanes.output_lanes(dout), lanes.row_lanes(dlse)
    sums = _Sums.of(lanes, rules, q.dtype)
    for chunk in lanes.chunks():
        q_leaf, k_leaf, v_leaf = (
            x[chunk].clone().requires_grad_() for x in (lanes.q, lanes.k, lanes.v)
        )
        part = replace(rules.part(chunk).with_leaves(q.dtype), scale=1.0)
        out, lse = _attend(q_leaf, k_leaf * rules.scale, v_leaf, part)
        outputs, incoming = [out], [dout_lanes[chunk]]
        if dlse_lanes is not None:
            outputs.append(lse)
            incoming.append(dlse_lanes[chunk].to(q.dtype))
        at = (chunk, slice(None), slice(None))
        sums.out[at], sums.lse[at] = out.detach(), lse.detach()
        sums.add(at, outputs, (q_leaf, k_leaf, v_leaf, part.bias, part.sink), incoming)
    return sums.result(lanes, replace(options, **features))


def _attend(q: Tensor, k: Tensor, v: Tensor, rules: Rules) -> tuple[Tensor, Tensor]:
    """q (L, G, Sq, D), k (L, Sk, D), v (L, Sk, Dv) -> out (L, G, Sq, Dv), lse (L, G, Sq)."""
    keyless = ~rules.visible.any(-1)  # (1, 1, Sq) or (L, G, Sq)
    # Rows whose denominator is 0: without a key, and without a sink.
    closed = keyless if rules.sink is None else keyless & (rules.sink == -torch.inf)[..., None]
    if k.shape[1] == 0:
        nothing = k.sum() + v.sum()  # 0, and it keeps the result differentiable in k and v
        empty = torch.full_like(q[..., 0], -torch.inf)
        lse = empty if rules.sink is None else empty.zero_() + rules.sink[..., None]
        zero = q.sum(-1) * 0.0 + nothing
        return zero[..., None].expand(*zero.shape, v.shape[-1]), lse + zero
    scores = torch.einsum("lgmd,lnd->lgmn", q, k)
    if rules.scale != 1.0:
        scores = scores * rules.scale
    if rules.softcap > 0.0:
        scores = rules.softcap * torch.tanh(scores / rules.softcap)
    row_shift = None
    if rules.slopes is not None:
        # A large bias that a whole row shares does not matter to its softmax. Taken out before the
        # scores are rounded to their dtype, it cannot make the naive computation a bad yardstick.
        slope = -rules.slopes[..., None, None].double() * rules.distance
        seen = slope.masked_fill(~rules.visible, -torch.inf).amax(-1, keepdim=True)
        row_shift = seen.masked_fill(keyless[..., None], 0.0)
        scores = scores + (slope - row_shift).to(scores.dtype)
    if rules.bias is not None:
        scores = scores + rules.bias
    # A row of -inf alone has no softmax; such rows keep their scores and are cleared afterwards,
    # gradients included.
    scores = scores.masked_fill(~rules.visible & ~closed[..., None], -torch.inf)
    if rules.sink is not None:
        sink = rules.sink[..., None, None].expand(*scores.shape[:-1], 1)
        if row_shift is not None:
            sink = (sink - row_shift).to(scores.dtype)
        scores = torch.cat([scores, sink], -1)
    lse = torch.logsumexp(scores, -1)
    if row_shift is not None:
        lse = lse + row_shift[..., 0].to(lse.dtype)
    lse = lse.masked_fill(closed, -torch.inf)
    probs = torch.softmax(scores, -1).masked_fill(closed[..., None], 0.0)[..., : k.shape[1]]
    if rules.keep is not None:
        probs = probs.masked_fill(~rules.keep, 0.0) * rules.keep_scale
    return torch.einsum("lgmn,lnd->lgmd", probs, v), lse


@dataclass
class _Sums:
    """Results of all lanes, to be filled chunk by chunk."""

    out: Tensor  # (L, G, Sq, Dv)
    lse: Tensor  # (L, G, Sq)
    dq: Tensor  # (L, G, Sq, D)
    dk: Tensor  # (L, Sk, D)
    dv: Tensor  # (L, Sk, Dv)
    dbias: Tensor | None  # (L, G, Sq, Sk)
    dsink: Tensor | None  # (L, G)

    @classmethod
    def of(cls, lanes: Lanes, rules: Rules, dtype: torch.dtype) -> _Sums:
        def zeros(like: Tensor | None) -> Any:
            return None if like is None else torch.zeros_like(like, dtype=dtype)

        return cls(
            out=zeros(lanes.zero_outputs()),
            lse=torch.full_like(lanes.q[..., 0], -torch.inf, dtype=dtype),
            dq=zeros(lanes.q),
            dk=zeros(lanes.k),
            dv=zeros(lanes.v),
            dbias=zeros(rules.bias),
            dsink=zeros(rules.sink),
        )

    def add(self, at: Any, outputs: Any, leaves: Any, incoming: Any) -> None:
        """Add the gradients of leaves (q, k, v, bias, sink) of a chunk `at` (lanes, all, rows)."""
        targets = (self.dq[at], self.dk[at[0]], self.dv[at[0]])
        targets += (
            None if self.dbias is None else self.dbias[at],
            None if self.dsink is None else self.dsink[at[0]],
        )
        pairs = [(x, y) for x, y in zip(targets, leaves, strict=True) if y is not None]
        gradients = torch.autograd.grad(
            outputs, [y for _, y in pairs], incoming, retain_graph=True, allow_unused=True
        )
        for (target, _), gradient in zip(pairs, gradients, strict=True):
            if gradient is not None:
                target += gradient

    def largest(self) -> dict[str, float]:
        """The largest magnitude of every gradient."""
        gradients = {name: getattr(self, name) for name in ("dq", "dk", "dv", "dbias", "dsink")}
        return {
            name: x.abs().max().item()
            for name, x in gradients.items()
            if x is not None and x.numel() > 0
        }

    def result(self, lanes: Lanes, options: AttentionOptions) -> AttentionResult:
        """In the shapes of AttentionResult."""
        group, seqlen_q = lanes.q.shape[1:3]
        heads_q = lanes.heads_k * group
        queries = (lanes.batch, heads_q, seqlen_q)
        keys = (lanes.batch, lanes.heads_k, lanes.k.shape[1])

        def by_token(x: Tensor, rows: tuple[int, int, int]) -> Tensor:
            return x.view(*rows, x.shape[-1]).transpose(1, 2)

        dbias, dsink = self.dbias, self.dsink
        if dbias is not None:
            pairs = (*queries, keys[2])
            dbias = dbias.view(pairs).sum_to_size(options.bias.shape)
        if dsink is not None:
            dsink = dsink.view(lanes.batch, heads_q).sum(0)
        return AttentionResult(
            out=by_token(self.out, queries),
            lse=self.lse.view(queries),
            dq=by_token(self.dq, queries),
            dk=by_token(self.dk, keys),
            dv=by_token(self.dv, keys),
            dbias=dbias,
            dsink=dsink,
        )
