"""The specification in code: attention computed the obvious way in fp64, gradients by autograd.

Conventions of the whole package:
  - q (B, Sq, Hq, D), k and v (B, Sk, Hk, D), Hq a multiple of Hk; query head h reads key head h //
    (Hq / Hk).
  - scores = softmax_scale * q k^T; softmax_scale None means D ** -0.5.
  - Key j is visible to query i iff  i + Sk - Sq - left <= j <= i + Sk - Sq + right: both ends
    inclusive, aligned to the bottom right corner. A negative or None bound is no bound. causal sets
    right to 0.
  - lse (B, Hq, Sq) is the natural logarithm of the sum of exp(score) over visible keys.
  - A query without a visible key has out 0 and lse -inf, and no gradient flows through it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

WindowBounds = tuple[int | None, int | None]
NO_WINDOW: WindowBounds = (-1, -1)

# Scores of one chunk: 256 MiB in fp64, and autograd keeps about five such tensors.
MAX_SCORES_PER_CHUNK = 1 << 25

# What fp32 may do to a dot product, relative to the norms of its vectors: a few last places.
FP32_DOT_NOISE = 2.0**-22


@dataclass
class AttentionResult:
    """What one attention call computes. Gradients are None after a forward alone.

    `noise` estimates what fp32 rounding may do to a tensor, by the tensor's name.
    """

    out: Tensor  # (B, Sq, Hq, D)
    lse: Tensor  # (B, Hq, Sq)
    dq: Tensor | None = None  # (B, Sq, Hq, D)
    dk: Tensor | None = None  # (B, Sk, Hk, D)
    dv: Tensor | None = None  # (B, Sk, Hk, D)
    noise: dict[str, float] = field(default_factory=dict)

    def tensors(self) -> dict[str, Tensor]:
        """The tensors there are, by name."""
        names = ("out", "lse", "dq", "dk", "dv")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}

    def to(self, device: torch.device | str) -> AttentionResult:
        return AttentionResult(**{name: x.to(device) for name, x in self.tensors().items()})


def visible_keys(
    seqlen_q: int,
    seqlen_k: int,
    *,
    causal: bool = False,
    window: WindowBounds = NO_WINDOW,
    device: torch.device | str = "cpu",
) -> Tensor:
    """(Sq, Sk) booleans: may query i see key j."""
    left, right = (None if bound is None or bound < 0 else bound for bound in window)
    if causal:
        right = 0
    distance = torch.arange(seqlen_k, device=device) - (
        torch.arange(seqlen_q, device=device)[:, None] + seqlen_k - seqlen_q
    )
    visible = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device=device)
    if left is not None:
        visible &= distance >= -left
    if right is not None:
        visible &= distance <= right
    return visible


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window: WindowBounds = NO_WINDOW,
    compute_dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """(out, lse) in `compute_dtype`, differentiable in q, k and v through both."""
    batch, seqlen_q, heads_q, head_dim = q.shape
    lanes = _Lanes.of(q.to(compute_dtype), k.to(compute_dtype), v.to(compute_dtype))
    visible = visible_keys(seqlen_q, k.shape[1], causal=causal, window=window, device=q.device)
    scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
    outs, lses = [], []
    for chunk in lanes.chunks():
        out, lse = _attend(lanes.q[chunk], lanes.k[chunk], lanes.v[chunk], scale, visible)
        outs.append(out)
        lses.append(lse)
    if not outs:
        return torch.zeros_like(lanes.q).view(q.shape), lanes.q.new_zeros(batch, heads_q, seqlen_q)
    out = torch.cat(outs).view(batch, heads_q, seqlen_q, head_dim).transpose(1, 2)
    return out, torch.cat(lses).view(batch, heads_q, seqlen_q)


def attention_with_gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    dlse: Tensor | None = None,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window: WindowBounds = NO_WINDOW,
    compute_dtype: torch.dtype = torch.float64,
) -> AttentionResult:
    """Forward and backward in `compute_dtype`, in chunks of heads and queries so that long
    sequences fit.

    dout has the shape of q, dlse that of lse; dlse None means that nothing uses lse.

    The result's `noise` estimates what rounding dot products to fp32 does to lse, dq and dk. For
    the gradients it matters where dS = P * (dP - D + dlse) cancels: with one visible key dP equals
    D, so dq is 0 in exact arithmetic and fp32 dust in any kernel. An error of dP - D acts like a
    change of dlse, so its effect is one more gradient of lse.
    """
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    visible = visible_keys(q.shape[1], k.shape[1], causal=causal, window=window, device=q.device)
    lanes = _Lanes.of(q, k, v)
    dout_lanes, dlse_lanes = lanes.query_lanes(dout), lanes.row_lanes(dlse)
    out, dq = (torch.zeros(lanes.q.shape, dtype=compute_dtype, device=q.device) for _ in range(2))
    dk, dv = (torch.zeros(lanes.k.shape, dtype=compute_dtype, device=q.device) for _ in range(2))
    lse = torch.full(lanes.q.shape[:-1], -torch.inf, dtype=compute_dtype, device=q.device)
    dq_noise, dk_noise = torch.zeros_like(dq), torch.zeros_like(dk)

    for chunk in lanes.chunks():
        k_leaf, v_leaf = (x[chunk].to(compute_dtype).requires_grad_() for x in (lanes.k, lanes.v))
        for rows in lanes.query_chunks():
            at = (chunk, slice(None), rows)
            q_leaf = lanes.q[at].to(compute_dtype).requires_grad_()
            chunk_out, chunk_lse = _attend(q_leaf, k_leaf, v_leaf, scale, visible[rows])
            outputs, incoming = [chunk_out], [dout_lanes[at].to(compute_dtype)]
            if dlse_lanes is not None:
                outputs.append(chunk_lse)
                incoming.append(dlse_lanes[at].to(compute_dtype))
            leaves = (q_leaf, k_leaf, v_leaf)
            grads = torch.autograd.grad(outputs, leaves, incoming, retain_graph=True)
            out[at], lse[at] = chunk_out.detach(), chunk_lse.detach()
            dq[at] = grads[0]
            dk[chunk] += grads[1]
            dv[chunk] += grads[2]
            row_error = 2 * FP32_DOT_NOISE * incoming[0].norm(dim=-1) * out[at].norm(dim=-1)
            dq_noise[at], noise = torch.autograd.grad(chunk_lse, leaves[:2], row_error)
            dk_noise[chunk] += noise
    result = lanes.result(out, lse, dq, dk, dv)
    if q.numel() > 0 and k.numel() > 0:
        longest_q, longest_k = (x.norm(dim=-1, dtype=torch.float64).max() for x in (q, k))
        result.noise = {
            "lse": FP32_DOT_NOISE * abs(scale) * (longest_q * longest_k).item(),
            "dq": dq_noise.abs().max().item(),
            "dk": dk_noise.abs().max().item(),
        }
    return result


def low_precision(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    dlse: Tensor | None = None,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window: WindowBounds = NO_WINDOW,
) -> AttentionResult:
    """The same mathematics naively in the dtype of the inputs: scores, probabilities and gradients
    all rounded to it.

    Its distance to the fp64 result is what the dtype costs without any care, hence the yardstick of
    tolerance.py. The scale goes to the keys before the product, so that large scores in fp16
    overflow no sooner than they must.
    """
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    visible = visible_keys(q.shape[1], k.shape[1], causal=causal, window=window, device=q.device)
    lanes = _Lanes.of(q, k, v)
    dout_lanes, dlse_lanes = lanes.query_lanes(dout), lanes.row_lanes(dlse)
    out, dq, dk, dv = (torch.zeros_like(x) for x in (lanes.q, lanes.q, lanes.k, lanes.v))
    lse = lanes.q.new_zeros(lanes.q.shape[:-1])
    for chunk in lanes.chunks():
        leaves = [x[chunk].clone().requires_grad_() for x in (lanes.q, lanes.k, lanes.v)]
        q_leaf, k_leaf, v_leaf = leaves
        chunk_out, chunk_lse = _attend(q_leaf, k_leaf * scale, v_leaf, 1.0, visible)
        outputs, incoming = [chunk_out], [dout_lanes[chunk]]
        if dlse_lanes is not None:
            outputs.append(chunk_lse)
            incoming.append(dlse_lanes[chunk].to(q.dtype))
        grads = torch.autograd.grad(outputs, leaves, incoming)
        out[chunk], lse[chunk] = chunk_out.detach(), chunk_lse.detach()
        dq[chunk], dk[chunk], dv[chunk] = grads
    return lanes.result(out, lse, dq, dk, dv)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, scale: float, visible: Tensor
) -> tuple[Tensor, Tensor]:
    """q (L, G, Sq, D), k, v (L, Sk, D), visible (Sq, Sk) -> out like q, lse (L, G, Sq)."""
    if k.shape[1] == 0:
        nothing = k.sum() + v.sum()  # 0, and it keeps the result differentiable in k and v
        return q * 0.0 + nothing, q.sum(-1) * 0.0 - torch.inf + nothing
    keyless = ~visible.any(-1)  # (Sq,)
    scores = torch.einsum("lgmd,lnd->lgmn", q, k)
    if scale != 1.0:
        scores = scores * scale
    # A row of -inf alone has no softmax; such rows keep their scores and are cleared afterwards,
    # gradients included.
    scores = scores.masked_fill(~visible & ~keyless[:, None], -torch.inf)
    lse = torch.logsumexp(scores, -1).masked_fill(keyless, -torch.inf)
    probs = torch.softmax(scores, -1).masked_fill(keyless[:, None], 0.0)
    return torch.einsum("lgmn,lnd->lgmd", probs, v), lse


@dataclass
class _Lanes:
    """Inputs with batch and key heads as one dimension L, G query heads for each."""

    batch: int
    heads_k: int
    q: Tensor  # (L, G, Sq, D)
    k: Tensor  # (L, Sk, D)
    v: Tensor  # (L, Sk, D)

    @classmethod
    def of(cls, q: Tensor, k: Tensor, v: Tensor) -> _Lanes:
        batch, seqlen_q, heads_q, head_dim = q.shape
        seqlen_k, heads_k = k.shape[1:3]
        lanes = batch * heads_k
        return cls(
            batch=batch,
            heads_k=heads_k,
            q=q.transpose(1, 2).reshape(lanes, heads_q // heads_k, seqlen_q, head_dim),
            k=k.transpose(1, 2).reshape(lanes, seqlen_k, head_dim),
            v=v.transpose(1, 2).reshape(lanes, seqlen_k, head_dim),
        )

    def query_lanes(self, x: Tensor) -> Tensor:
        """(B, Sq, Hq, D) -> (L, G, Sq, D)."""
        return x.transpose(1, 2).reshape(self.q.shape)

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

    def result(
        self, out: Tensor, lse: Tensor, dq: Tensor, dk: Tensor, dv: Tensor
    ) -> AttentionResult:
        """Back to the shapes of AttentionResult."""
        group, seqlen_q, head_dim = self.q.shape[1:]
        queries = (self.batch, self.heads_k * group, seqlen_q, head_dim)
        keys = (self.batch, self.heads_k, self.k.shape[1], head_dim)
        return AttentionResult(
            out=out.view(queries).transpose(1, 2),
            lse=lse.view(queries[:-1]),
            dq=dq.view(queries).transpose(1, 2),
            dk=dk.view(keys).transpose(1, 2),
            dv=dv.view(keys).transpose(1, 2),
        )
