"""The dense part of the reference (see reference.py): attention in fp64, gradients by autograd."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

WindowBounds = tuple[int | None, int | None]
NO_WINDOW: WindowBounds = (-1, -1)

# Scores of one chunk: 256 MiB in fp64, and autograd keeps about five such tensors.
MAX_SCORES_PER_CHUNK = 1 << 25

# What fp32 may do to a dot product, relative to the norms of its vectors: a few last places.
FP32_DOT_NOISE = 2.0**-22


@dataclass(frozen=True, eq=False)
class AttentionOptions:
    """What an attention call computes besides its tensors; field names are also keyword arguments
    of the functions below.
    """

    softmax_scale: float | None = None  # None: D ** -0.5
    causal: bool = False
    window: WindowBounds = NO_WINDOW
    softcap: float = 0.0  # <= 0: off
    alibi_slopes: Tensor | None = None  # (H,) or (B, H)
    dropout_p: float = 0.0
    keep_mask: Tensor | None = None  # (B, Hq, Sq, Sk) booleans; needed when dropout_p > 0

    def scale(self, head_dim: int) -> float:
        return head_dim**-0.5 if self.softmax_scale is None else self.softmax_scale

    def keep_scale(self) -> float:
        """What kept probabilities are multiplied by: dropout_p counts in steps of 2^-16."""
        dropped = min(int(self.dropout_p * 65_536 + 0.5), 65_535)
        return 65_536 / (65_536 - dropped)

    def of_sequence(self, index: int, seqlen_q: int, seqlen_k: int) -> AttentionOptions:
        """The options of one sequence of these lengths, alone in a batch."""
        slopes, keep = self.alibi_slopes, self.keep_mask
        if slopes is not None and slopes.dim() == 2:
            slopes = slopes[index]
        if keep is not None:
            keep = keep[index : index + 1, :, :seqlen_q, :seqlen_k]
        return replace(self, alibi_slopes=slopes, keep_mask=keep)


PLAIN = AttentionOptions()


@dataclass
class AttentionResult:
    """What one attention call computes. Gradients are None after a forward alone.

    Shapes of a dense call; of packed sequences they are (total_q, Hq, D), (Hq, total_q) and
    (total_k, Hk, D). `noise` estimates what fp32 rounding may do to a tensor, by its name.
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


def distances(seqlen_q: int, seqlen_k: int, device: torch.device | str = "cpu") -> Tensor:
    """(Sq, Sk) integers: how far key j stands behind query i, j - (i + Sk - Sq)."""
    queries = torch.arange(seqlen_q, device=device)[:, None] + seqlen_k - seqlen_q
    return torch.arange(seqlen_k, device=device) - queries


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
    distance = distances(seqlen_q, seqlen_k, device)
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
    options: AttentionOptions = PLAIN,
    compute_dtype: torch.dtype = torch.float64,
    **features: Any,
) -> tuple[Tensor, Tensor]:
    """(out, lse) in `compute_dtype`, differentiable in q, k and v through both.

    `features` override fields of `options`, here and below.
    """
    batch, seqlen_q, heads_q, head_dim = q.shape
    lanes = _Lanes.of(q.to(compute_dtype), k.to(compute_dtype), v.to(compute_dtype))
    rules = _Rules.of(replace(options, **features), lanes)
    outs, lses = [], []
    for chunk in lanes.chunks():
        out, lse = _attend(lanes.q[chunk], lanes.k[chunk], lanes.v[chunk], rules.part(chunk))
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
    options: AttentionOptions = PLAIN,
    compute_dtype: torch.dtype = torch.float64,
    **features: Any,
) -> AttentionResult:
    """Forward and backward in `compute_dtype`, in chunks of heads and queries so that long
    sequences fit.

    dout has the shape of q, dlse that of lse; dlse None means that nothing uses lse.

    The result's `noise` estimates what rounding dot products to fp32 does to lse, dq and dk. For
    the gradients it matters where dS = P * (dP - D + dlse) cancels: with one visible key dP equals
    D, so dq is 0 in exact arithmetic and fp32 dust in any kernel. An error of dP - D acts like a
    change of dlse, so its effect is one more gradient of lse.
    """
    lanes = _Lanes.of(q, k, v)
    rules = _Rules.of(replace(options, **features), lanes)
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
            chunk_out, chunk_lse = _attend(q_leaf, k_leaf, v_leaf, rules.part(chunk, rows))
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
            if rules.keep is not None:
                # D is made of out as it was stored. What rounding did to it shows where dP - D
                # cancels; without dropout out is then a row of v, which was stored already.
                row_error += torch.finfo(q.dtype).eps * (incoming[0] * out[at]).norm(dim=-1)
            dq_noise[at], noise = torch.autograd.grad(chunk_lse, leaves[:2], row_error)
            dk_noise[chunk] += noise
    result = lanes.result(out, lse, dq, dk, dv)
    if q.numel() > 0 and k.numel() > 0:
        longest_q, longest_k = (x.norm(dim=-1, dtype=torch.float64).max() for x in (q, k))
        result.noise = {
            "lse": FP32_DOT_NOISE
            * (abs(rules.scale) * (longest_q * longest_k).item() + rules.largest_modifier()),
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
    options: AttentionOptions = PLAIN,
    **features: Any,
) -> AttentionResult:
    """The same mathematics naively in the dtype of the inputs: scores, probabilities and gradients
    all rounded to it.

    Its distance to the fp64 result is what the dtype costs without any care, hence the yardstick of
    tolerance.py. The scale goes to the keys before the product, so that large scores in fp16
    overflow no sooner than they must.
    """
    lanes = _Lanes.of(q, k, v)
    rules = _Rules.of(replace(options, **features), lanes)
    dout_lanes, dlse_lanes = lanes.query_lanes(dout), lanes.row_lanes(dlse)
    out, dq, dk, dv = (torch.zeros_like(x) for x in (lanes.q, lanes.q, lanes.k, lanes.v))
    lse = lanes.q.new_zeros(lanes.q.shape[:-1])
    for chunk in lanes.chunks():
        leaves = [x[chunk].clone().requires_grad_() for x in (lanes.q, lanes.k, lanes.v)]
        q_leaf, k_leaf, v_leaf = leaves
        part = replace(rules.part(chunk), scale=1.0)
        chunk_out, chunk_lse = _attend(q_leaf, k_leaf * rules.scale, v_leaf, part)
        outputs, incoming = [chunk_out], [dout_lanes[chunk]]
        if dlse_lanes is not None:
            outputs.append(chunk_lse)
            incoming.append(dlse_lanes[chunk].to(q.dtype))
        grads = torch.autograd.grad(outputs, leaves, incoming)
        out[chunk], lse[chunk] = chunk_out.detach(), chunk_lse.detach()
        dq[chunk], dk[chunk], dv[chunk] = grads
    return lanes.result(out, lse, dq, dk, dv)


def _attend(q: Tensor, k: Tensor, v: Tensor, rules: _Rules) -> tuple[Tensor, Tensor]:
    """q (L, G, Sq, D), k, v (L, Sk, D) -> out like q, lse (L, G, Sq)."""
    if k.shape[1] == 0:
        nothing = k.sum() + v.sum()  # 0, and it keeps the result differentiable in k and v
        return q * 0.0 + nothing, q.sum(-1) * 0.0 - torch.inf + nothing
    keyless = ~rules.visible.any(-1)  # (Sq,)
    scores = torch.einsum("lgmd,lnd->lgmn", q, k)
    if rules.scale != 1.0:
        scores = scores * rules.scale
    if rules.softcap > 0.0:
        scores = rules.softcap * torch.tanh(scores / rules.softcap)
    row_shift = None
    if rules.slopes is not None:
        # A large bias that a whole row shares does not matter to its softmax. Taken out before the
        # scores are rounded to their dtype, it cannot make the naive computation a bad yardstick.
        bias = -rules.slopes[..., None, None].double() * rules.distance
        seen = bias.masked_fill(~rules.visible, -torch.inf).amax(-1, keepdim=True)
        row_shift = seen.masked_fill(keyless[:, None], 0.0)
        scores = scores + (bias - row_shift).to(scores.dtype)
    # A row of -inf alone has no softmax; such rows keep their scores and are cleared afterwards,
    # gradients included.
    scores = scores.masked_fill(~rules.visible & ~keyless[:, None], -torch.inf)
    lse = torch.logsumexp(scores, -1)
    if row_shift is not None:
        lse = lse + row_shift[..., 0].to(lse.dtype)
    lse = lse.masked_fill(keyless, -torch.inf)
    probs = torch.softmax(scores, -1).masked_fill(keyless[:, None], 0.0)
    if rules.keep is not None:
        probs = probs.masked_fill(~rules.keep, 0.0) * rules.keep_scale
    return torch.einsum("lgmn,lnd->lgmd", probs, v), lse


@dataclass
class _Rules:
    """What becomes of a score, for all lanes and queries or for some of them."""

    scale: float
    softcap: float
    visible: Tensor  # (Sq, Sk)
    distance: Tensor | None  # (Sq, Sk), as ALiBi counts it; None without ALiBi
    slopes: Tensor | None  # (L, G)
    keep: Tensor | None  # (L, G, Sq, Sk)
    keep_scale: float

    @classmethod
    def of(cls, options: AttentionOptions, lanes: _Lanes) -> _Rules:
        (count, group, seqlen_q, head_dim), seqlen_k = lanes.q.shape, lanes.k.shape[1]
        device = lanes.q.device
        slopes, keep, distance = options.alibi_slopes, None, None
        if slopes is not None:
            heads = (lanes.batch, lanes.heads_k * group)
            slopes = slopes.to(device).expand(heads).reshape(count, group)
            distance = distances(seqlen_q, seqlen_k, device).abs()
        if options.dropout_p > 0.0:
            if options.keep_mask is None:
                raise ValueError("keep_mask: must be given when dropout_p > 0, got None")
            keep = options.keep_mask.to(device).reshape(count, group, seqlen_q, seqlen_k)
        return cls(
            scale=options.scale(head_dim),
            softcap=options.softcap,
            visible=visible_keys(
                seqlen_q, seqlen_k, causal=options.causal, window=options.window, device=device
            ),
            distance=distance,
            slopes=slopes,
            keep=keep,
            keep_scale=options.keep_scale(),
        )

    def part(self, lanes: slice, rows: slice = slice(None)) -> _Rules:
        return replace(
            self,
            visible=self.visible[rows],
            distance=None if self.distance is None else self.distance[rows],
            slopes=None if self.slopes is None else self.slopes[lanes],
            keep=None if self.keep is None else self.keep[lanes, :, rows],
        )

    def largest_modifier(self) -> float:
        """The largest magnitude that softcap's tanh or a row's least ALiBi bias reaches: fp32
        rounds the scores that matter at about this size. The tanh counts in full because it may be
        computed as 1 - 2 / (1 + exp(2 x)).
        """
        largest = max(0.0, self.softcap)
        if self.slopes is not None and self.visible.any():
            seen = self.visible[self.visible.any(-1)]
            rows = self.distance[self.visible.any(-1)].double()
            nearest = rows.masked_fill(~seen, torch.inf).amin(-1).max().item()
            furthest = rows.masked_fill(~seen, -torch.inf).amax().item()
            steepest, least = self.slopes.max().item(), self.slopes.min().item()
            largest += max(0.0, steepest * nearest, -least * furthest)
        return largest


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
