"""The dense part of the reference (see __init__.py): attention in fp64, gradients by autograd."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tests.reference.options import OVER, PLAIN, AttentionOptions, AttentionResult, attend
from tests.reference.parts import Lanes

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
    options, distance = lanes.options(replace(options, **features)), lanes.distances()
    outs, lses = [], []
    for chunk in lanes.chunks():
        tensors = lanes.q[chunk], lanes.k[chunk], lanes.v[chunk]
        out, lse, _ = attend(*tensors, _part(options, chunk), distance)
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
    dout: Tensor | None = None,
    dlse: Tensor | None = None,
    *,
    options: AttentionOptions = PLAIN,
    compute_dtype: torch.dtype = torch.float64,
    **features: Any,
) -> AttentionResult:
    """Forward and backward in `compute_dtype`, in chunks of heads and queries so that long
    sequences fit.

    dout has the shape of out, dlse that of lse; dlse None means that nothing uses lse, dout None
    that there is no backward.

    The result's `noise` estimates what rounding dot products to fp32 does to lse and gradients. For
    the latter it matters where dS = P * (dP - D + dlse) cancels: with one visible key dP equals D,
    so dq is 0 in exact arithmetic and fp32 dust in any kernel. An error of dP - D acts like a
    change of dlse, so its effect is one more gradient of lse.
    """
    lanes, given = Lanes.of(q, k, v), replace(options, **features)
    options, distance = lanes.options(given), lanes.distances()
    dout_lanes, dlse_lanes = lanes.output_lanes(dout), lanes.row_lanes(dlse)
    has_backward = dout_lanes is not None
    sums = _Sums.of(lanes, options, compute_dtype, has_backward)
    noise = _Sums.of(lanes, options, compute_dtype, True) if has_backward else None
    for chunk in lanes.chunks():
        k_leaf, v_leaf = (
            x[chunk].to(compute_dtype).requires_grad_(has_backward) for x in (lanes.k, lanes.v)
        )
        for rows in lanes.query_chunks():
            at = (chunk, slice(None), rows)
            q_leaf = lanes.q[at].to(compute_dtype).requires_grad_(has_backward)
            part = _part(options, chunk, rows).with_leaves(compute_dtype, has_backward)
            out, lse, largest = attend(q_leaf, k_leaf, v_leaf, part, distance[rows])
            sums.out[at], sums.lse[at] = out.detach(), lse.detach()
            sums.max_logits[chunk] = sums.max_logits[chunk].maximum(largest)
            if dout_lanes is None or noise is None:
                continue
            outputs, incoming = [out], [dout_lanes[at].to(compute_dtype)]
            if dlse_lanes is not None:
                outputs.append(lse)
                incoming.append(dlse_lanes[at].to(compute_dtype))
            leaves = {"q": q_leaf, "k": k_leaf, "v": v_leaf, **part.leaves()}
            sums.add(at, outputs, leaves, incoming)
            row_error = 2 * FP32_DOT_NOISE * incoming[0].norm(dim=-1) * sums.out[at].norm(dim=-1)
            if options.dropout_p > 0.0 or options.sink is not None:
                # D is made of out as it was stored. What rounding did to it shows where dP - D
                # cancels; otherwise out is then a row of v, which was stored already.
                row_error += torch.finfo(q.dtype).eps * (incoming[0] * sums.out[at]).norm(dim=-1)
            noise.add(at, [lse], leaves, [row_error])
    result = sums.result(lanes, given)
    if q.numel() > 0 and k.numel() > 0:
        longest_q, longest_k = (x.norm(dim=-1, dtype=torch.float64).max() for x in (q, k))
        largest = abs(options.scale(q.shape[-1])) * (longest_q * longest_k).item()
        largest += options.largest_modifier(distance)
        result.noise = noise.largest() if noise else {}
        result.noise |= dict.fromkeys(("lse", "max_logits"), FP32_DOT_NOISE * largest)
    return result


def low_precision(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor | None = None,
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
    lanes, given = Lanes.of(q, k, v), replace(options, **features)
    options, distance = lanes.options(given), lanes.distances()
    dout_lanes, dlse_lanes = lanes.output_lanes(dout), lanes.row_lanes(dlse)
    has_backward = dout_lanes is not None
    sums = _Sums.of(lanes, options, q.dtype, has_backward)
    for chunk in lanes.chunks():
        q_leaf, k_leaf, v_leaf = (
            x[chunk].detach().requires_grad_(has_backward) for x in (lanes.q, lanes.k, lanes.v)
        )
        part = _part(options, chunk).with_leaves(q.dtype, has_backward)
        part = replace(part, softmax_scale=1.0)
        scaled = k_leaf * options.scale(q.shape[-1])
        out, lse, _ = attend(q_leaf, scaled, v_leaf, part, distance)
        at = (chunk, slice(None), slice(None))
        sums.out[at], sums.lse[at] = out.detach(), lse.detach()
        if dout_lanes is None:
            continue
        outputs, incoming = [out], [dout_lanes[chunk]]
        if dlse_lanes is not None:
            outputs.append(lse)
            incoming.append(dlse_lanes[chunk].to(q.dtype))
        sums.add(at, outputs, {"q": q_leaf, "k": k_leaf, "v": v_leaf, **part.leaves()}, incoming)
    return sums.result(lanes, given)


def _part(options: AttentionOptions, lanes: slice, rows: slice = slice(None)) -> AttentionOptions:
    """Of options by lane, those of some lanes and queries."""
    return options.each(lambda x: x[lanes], lambda x: x[lanes, :, rows])


@dataclass
class _Sums:
    """Results of all lanes, to be filled chunk by chunk."""

    out: Tensor  # (L, G, Sq, Dv)
    lse: Tensor  # (L, G, Sq)
    max_logits: Tensor  # (L, G)
    # Of q (L, G, Sq, D), k (L, Sk, D), v (L, Sk, Dv) and options by lane.
    gradients: dict[str, Tensor]

    @classmethod
    def of(
        cls, lanes: Lanes, options: AttentionOptions, dtype: torch.dtype, has_backward: bool
    ) -> _Sums:
        leaves = {"q": lanes.q, "k": lanes.k, "v": lanes.v, **options.leaves()}
        if not has_backward:
            leaves = {}
        return cls(
            out=lanes.zero_outputs().to(dtype),
            lse=torch.full_like(lanes.q[..., 0], -torch.inf, dtype=dtype),
            max_logits=lanes.q.new_full(lanes.q.shape[:2], -torch.inf, dtype=dtype),
            gradients={name: torch.zeros_like(x, dtype=dtype) for name, x in leaves.items()},
        )

    def add(self, at: Any, outputs: Any, leaves: dict[str, Tensor], incoming: Any) -> None:
        """Add the gradients of leaves of a chunk `at` (lanes, all, rows)."""
        found = torch.autograd.grad(
            outputs, list(leaves.values()), incoming, retain_graph=True, allow_unused=True
        )
        for name, gradient in zip(leaves, found, strict=True):
            if gradient is not None:
                has_rows = name == "q" or OVER.get(name) == "pairs"
                self.gradients[name][at if has_rows else at[0]] += gradient

    def largest(self) -> dict[str, float]:
        """The largest magnitude of every gradient."""
        there = {name: x for name, x in self.gradients.items() if x.numel() > 0}
        return {f"d{name}": x.abs().max().item() for name, x in there.items()}

    def result(self, lanes: Lanes, given: AttentionOptions) -> AttentionResult:
        """In the shapes of AttentionResult."""
        group, seqlen_q = lanes.q.shape[1:3]
        heads = (lanes.batch, lanes.heads_k * group)
        pairs = (*heads, seqlen_q, lanes.k.shape[1])
        made = {}
        for name, x in self.gradients.items():
            if name in OVER:
                expanded = x.view(pairs if OVER[name] == "pairs" else heads)
                made[f"d{name}"] = expanded.sum_to_size(getattr(given, name).shape)
            else:
                rows = pairs[:3] if name == "q" else (lanes.batch, lanes.heads_k, pairs[3])
                made[f"d{name}"] = x.view(*rows, x.shape[-1]).transpose(1, 2)
        out = self.out.view(*pairs[:3], self.out.shape[-1]).transpose(1, 2)
        made["max_logits"] = self.max_logits.view(heads)
        return AttentionResult(out=out, lse=self.lse.view(pairs[:3]), **made)
