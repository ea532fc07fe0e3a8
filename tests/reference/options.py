"""What a call computes and what it returns: all that the reference knows of each option."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

WindowBounds = tuple[int | None, int | None]
NO_WINDOW: WindowBounds = (-1, -1)


def over(what: str, *, has_gradient: bool = False) -> Any:
    """An option that is a tensor over "heads" or "pairs" of queries and keys, in any shape that
    expands to (B, Hq) or (B, Hq, Sq, Sk).
    """
    return field(default=None, metadata={"over": what, "has_gradient": has_gradient})


@dataclass(frozen=True, eq=False)
class AttentionOptions:
    """Field names are also keyword arguments of the reference's functions."""

    softmax_scale: float | None = None  # None: D ** -0.5
    causal: bool = False
    window: WindowBounds = NO_WINDOW
    softcap: float = 0.0  # <= 0: off
    alibi_slopes: Tensor | None = over("heads")  # (H,) or (B, H)
    dropout_p: float = 0.0
    keep_mask: Tensor | None = over("pairs")  # booleans; needed when dropout_p > 0
    mask: Tensor | None = over("pairs")  # booleans, True visible
    bias: Tensor | None = over("pairs", has_gradient=True)  # added to the scores; -inf hides
    # (Hq,): exp(sink) joins the softmax's denominator
    sink: Tensor | None = over("heads", has_gradient=True)

    def scale(self, head_dim: int) -> float:
        return head_dim**-0.5 if self.softmax_scale is None else self.softmax_scale

    def keep_scale(self) -> float:
        """What kept probabilities are multiplied by: dropout_p counts in steps of 2^-16."""
        dropped = min(int(self.dropout_p * 65_536 + 0.5), 65_535)
        return 65_536 / (65_536 - dropped)

    @property
    def moves_with_queries(self) -> bool:
        """Whether what a query sees depends on where it stands."""
        return self.causal or any(bound is not None and bound >= 0 for bound in self.window)

    def visible(self, distance: Tensor) -> Tensor:
        """(1, 1, Sq, Sk) booleans, or (L, G, Sq, Sk) with a mask of lanes."""
        within = _within(distance, self.causal, self.window)[None, None]
        return within if self.mask is None else within & self.mask

    def tensors(self) -> dict[str, Tensor]:
        """The tensors there are, by name."""
        every = {name: getattr(self, name) for name in OVER}
        return {name: x for name, x in every.items() if x is not None}

    def leaves(self) -> dict[str, Tensor]:
        """Those that have a gradient."""
        return {name: x for name, x in self.tensors().items() if name in WITH_GRADIENT}

    def each(
        self, of_heads: Callable[[Tensor], Tensor], of_pairs: Callable[[Tensor], Tensor]
    ) -> AttentionOptions:
        """The options with what becomes of their tensors."""
        by = {"heads": of_heads, "pairs": of_pairs}
        return replace(self, **{name: by[OVER[name]](x) for name, x in self.tensors().items()})

    def of_sequence(self, index: int, seqlen_q: int, seqlen_k: int) -> AttentionOptions:
        """The options of one sequence of these lengths, alone in a batch: views."""

        def of_pairs(x: Tensor) -> Tensor:
            batch = slice(index, index + 1) if x.shape[0] > 1 else slice(0, 1)
            rows = slice(0, seqlen_q) if x.shape[2] > 1 else slice(0, 1)
            return x[batch, :, rows, :seqlen_k]

        return self.each(lambda x: x[index] if x.dim() == 2 else x, of_pairs)

    def with_leaves(self, dtype: torch.dtype, requires_grad: bool) -> AttentionOptions:
        """The same in that dtype, to be differentiated by."""
        copies = {name: x.detach().to(dtype, copy=True) for name, x in self.leaves().items()}
        return replace(self, **{n: x.requires_grad_(requires_grad) for n, x in copies.items()})

    def checked(self) -> AttentionOptions:
        """The same with a mask where a bias hides keys."""
        if self.dropout_p > 0.0 and self.keep_mask is None:
            raise ValueError("keep_mask: must be given when dropout_p > 0, got None")
        if self.bias is None:
            return self
        hidden = self.bias == -torch.inf
        mask = ~hidden if self.mask is None else self.mask.to(hidden.device) & ~hidden
        return replace(self, bias=self.bias.masked_fill(hidden, 0.0), mask=mask)

    def largest_modifier(self, distance: Tensor) -> float:
        """The largest magnitude that softcap's tanh, a row's least ALiBi bias or the bias reaches:
        fp32 rounds the scores that matter at about this size. The tanh counts in full because it
        may be computed as 1 - 2 / (1 + exp(2 x)).
        """
        largest = max(0.0, self.softcap)
        every, slopes = self.visible(distance), self.alibi_slopes
        if slopes is not None and every.any():
            visible = every.flatten(0, 1).any(0)  # (Sq, Sk): to some head
            seen = visible[visible.any(-1)]
            rows = distance.abs()[visible.any(-1)].double()
            nearest = rows.masked_fill(~seen, torch.inf).amin(-1).max().item()
            furthest = rows.masked_fill(~seen, -torch.inf).amax().item()
            steepest, least = slopes.max().item(), slopes.min().item()
            largest += max(0.0, steepest * nearest, -least * furthest)
        if self.bias is not None:
            largest += self.bias.masked_fill(~every, 0.0).abs().max().item()
        return largest


PLAIN = AttentionOptions()
# What options that are tensors are over, and which have a gradient.
OVER = {x.name: x.metadata["over"] for x in fields(AttentionOptions) if x.metadata}
WITH_GRADIENT = [x.name for x in fields(AttentionOptions) if x.metadata.get("has_gradient")]


@dataclass
class AttentionResult:
    """What one attention call computes. Gradients are None after a forward alone.

    Shapes of a dense call; of packed sequences they are (total_q, Hq, D), (Hq, total_q) and
    (total_k, Hk, D). `noise` estimates what fp32 rounding may do to a tensor, by its name.
    """

    out: Tensor  # (B, Sq, Hq, Dv)
    lse: Tensor  # (B, Hq, Sq)
    dq: Tensor | None = None  # (B, Sq, Hq, D)
    dk: Tensor | None = None  # (B, Sk, Hk, D)
    dv: Tensor | None = None  # (B, Sk, Hk, Dv)
    dbias: Tensor | None = None  # like the bias
    dsink: Tensor | None = None  # (Hq,)
    max_logits: Tensor | None = None  # (B, Hq)
    noise: dict[str, float] = field(default_factory=dict)

    def tensors(self) -> dict[str, Tensor]:
        """The tensors there are, by name."""
        every = {x.name: getattr(self, x.name) for x in fields(self) if x.name != "noise"}
        return {name: x for name, x in every.items() if x is not None}

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
    return _within(distances(seqlen_q, seqlen_k, device), causal, window)


def _within(distance: Tensor, causal: bool, window: WindowBounds) -> Tensor:
    left, right = (None if bound is None or bound < 0 else bound for bound in window)
    if causal:
        right = 0
    visible = torch.ones_like(distance, dtype=torch.bool)
    if left is not None:
        visible &= distance >= -left
    if right is not None:
        visible &= distance <= right
    return visible


def attend(
    q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions, distance: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """q (L, G, Sq, D), k (L, Sk, D), v (L, Sk, Dv) -> out (L, G, Sq, Dv), lse (L, G, Sq), and the
    largest visible score (L, G), -inf of none.
    """
    visible, sink = options.visible(distance), options.sink
    hidden, keyless = ~visible, ~visible.any(-1)  # (1, 1, Sq) or (L, G, Sq)
    # Rows whose denominator is 0: without a key, and without a sink.
    closed = keyless if sink is None else keyless & (sink == -torch.inf)[..., None]
    if k.shape[1] == 0:
        nothing = k.sum() + v.sum()  # 0, and it keeps the result differentiable in k and v
        empty = torch.full_like(q[..., 0], -torch.inf)
        lse = empty if sink is None else empty.zero_() + sink[..., None]
        zero = q.sum(-1) * 0.0 + nothing
        largest = q.new_full(q.shape[:2], -torch.inf)
        return zero[..., None].expand(*zero.shape, v.shape[-1]), lse + zero, largest
    scores = _product("lgmd,lnd->lgmn", q, k)
    scale = options.scale(q.shape[-1])
    if scale != 1.0:
        scores = scores * scale
    if options.softcap > 0.0:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    row_shift = None
    if options.alibi_slopes is not None:
        # A large bias that a whole row shares does not matter to its softmax. Taken out before the
        # scores are rounded to their dtype, it cannot make the naive computation a bad yardstick.
        slope = -options.alibi_slopes[..., None, None].double() * distance.abs()
        seen = slope.masked_fill(hidden, -torch.inf).amax(-1, keepdim=True)
        row_shift = seen.masked_fill(keyless[..., None], 0.0)
        scores = scores + (slope - row_shift).to(scores.dtype)
    if options.bias is not None:
        scores = scores + options.bias
    seen = scores.detach().masked_fill(hidden, -torch.inf)
    largest = q.new_full(q.shape[:2], -torch.inf)
    if q.shape[2] > 0:
        largest = (seen if row_shift is None else seen + row_shift).amax((-2, -1)).to(scores.dtype)
    # A row of -inf alone has no softmax; such rows keep their scores and are cleared afterwards,
    # gradients included.
    scores = scores.masked_fill(hidden & ~closed[..., None], -torch.inf)
    if sink is not None:
        column = sink[..., None, None].expand(*scores.shape[:-1], 1)
        if row_shift is not None:
            column = (column - row_shift).to(scores.dtype)
        scores = torch.cat([scores, column], -1)
    lse = torch.logsumexp(scores, -1)
    if row_shift is not None:
        lse = lse + row_shift[..., 0].to(lse.dtype)
    lse = lse.masked_fill(closed, -torch.inf)
    probs = torch.softmax(scores, -1).masked_fill(closed[..., None], 0.0)[..., : k.shape[1]]
    if options.dropout_p > 0.0:
        probs = probs.masked_fill(~options.keep_mask, 0.0) * options.keep_scale()
    return _product("lgmn,lnd->lgmd", probs, v), lse, largest


def _product(equation: str, x: Tensor, y: Tensor) -> Tensor:
    """Sums of fp16 are in fp32 and then rounded, as on GPUs. The CPU takes ten times as long for
    products of fp16 as for those of fp32.
    """
    if x.is_cuda or x.dtype != torch.float16:
        return torch.einsum(equation, x, y)
    return torch.einsum(equation, x.float(), y.float()).to(x.dtype)
