"""Parts of the reference: what a call computes, its result, and the rules of its scores."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

WindowBounds = tuple[int | None, int | None]
NO_WINDOW: WindowBounds = (-1, -1)

# Scores of one chunk: 256 MiB in fp64, and autograd keeps about five such tensors.
MAX_SCORES_PER_CHUNK = 1 << 25


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
    mask: Tensor | None = None  # (B|1, Hq|1, Sq|1, Sk) booleans, True visible
    bias: Tensor | None = None  # (B|1, Hq|1, Sq|1, Sk), added to the scores; -inf hides
    sink: Tensor | None = None  # (Hq,): exp(sink) joins the softmax's denominator

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
        mask, bias = (
            None if x is None else of_sequence(x, index, seqlen_q, seqlen_k)
            for x in (self.mask, self.bias)
        )
        return replace(self, alibi_slopes=slopes, keep_mask=keep, mask=mask, bias=bias)


PLAIN = AttentionOptions()


def with_qv(q: Tensor, k: Tensor, v: Tensor, qv: Tensor | None) -> tuple[Tensor, Tensor]:
    """Queries and keys whose product is q k^T + qv v^T."""
    if qv is None:
        return q, k
    return torch.cat([q, qv.to(q.dtype)], -1), torch.cat([k, v.to(k.dtype)], -1)


def bias_of_lists(lists: Tensor, seqlen_k: int, group: int) -> Tensor:
    """What makes a key (1, Hk * group, Sq, Sk) count as often as it stands in its query's list, of
    lists (Sq, Hk, n): added to a score, the logarithm of that number. Entries that are no key of
    the sequence do not count.
    """
    times = torch.zeros((*lists.shape[:2], seqlen_k + 1), dtype=torch.float64, device=lists.device)
    keys = torch.where((lists >= 0) & (lists < seqlen_k), lists, seqlen_k).long()
    times.scatter_add_(-1, keys, torch.ones_like(keys, dtype=times.dtype))
    return times[..., :seqlen_k].log().transpose(0, 1).repeat_interleave(group, 0)[None]


def of_sequence(x: Tensor, index: int, seqlen_q: int, seqlen_k: int) -> Tensor:
    """The part of x (B|1, Hq|1, Sq|1, Sk) that is of one sequence of these lengths: a view."""
    batch = slice(index, index + 1) if x.shape[0] > 1 else slice(0, 1)
    rows = slice(0, seqlen_q) if x.shape[2] > 1 else slice(0, 1)
    return x[batch, :, rows, :seqlen_k]


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
    noise: dict[str, float] = field(default_factory=dict)

    def tensors(self) -> dict[str, Tensor]:
        """The tensors there are, by name."""
        names = ("out", "lse", "dq", "dk", "dv", "dbias", "dsink")
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


@dataclass
class Rules:
    """What becomes of a score, for all lanes and queries or for some of them."""

    scale: float
    softcap: float
    visible: Tensor  # (1, 1, Sq, Sk), or with a mask or a bias (L, G, Sq, Sk)
    distance: Tensor | None  # (Sq, Sk), as ALiBi counts it; None without ALiBi
    slopes: Tensor | None  # (L, G)
    keep: Tensor | None  # (L, G, Sq, Sk)
    keep_scale: float
    bias: Tensor | None  # (L, G, Sq, Sk); 0 where it was -inf
    sink: Tensor | None  # (L, G)

    @classmethod
    def of(cls, options: AttentionOptions, lanes: Lanes) -> Rules:
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

        def by_lane(x: Tensor) -> Tensor:
            pairs = (lanes.batch, lanes.heads_k * group, seqlen_q, seqlen_k)
            return x.to(device).expand(pairs).reshape(count, group, seqlen_q, seqlen_k)

        visible = visible_keys(
            seqlen_q, seqlen_k, causal=options.causal, window=options.window, device=device
        )[None, None]
        if options.mask is not None:
            visible = visible & by_lane(options.mask)
        bias, sink = options.bias, options.sink
        if bias is not None:
            bias = by_lane(bias)
            visible = visible & (bias != -torch.inf)
            bias = bias.masked_fill(bias == -torch.inf, 0.0)
        if sink is not None:
            sink = sink.to(device).expand(lanes.batch, -1).reshape(count, group)
        return cls(
            scale=options.scale(head_dim),
            softcap=options.softcap,
            visible=visible,
            distance=distance,
            slopes=slopes,
            keep=keep,
            keep_scale=options.keep_scale(),
            bias=bias,
            sink=sink,
        )

    def part(self, lanes: slice, rows: slice = slice(None)) -> Rules:
        return replace(
            self,
            visible=self.visible[lanes if len(self.visible) > 1 else slice(None), :, rows],
            distance=None if self.distance is None else self.distance[rows],
            slopes=None if self.slopes is None else self.slopes[lanes],
            keep=None if self.keep is None else self.keep[lanes, :, rows],
            bias=None if self.bias is None else self.bias[lanes, :, rows],
            sink=None if self.sink is None else self.sink[lanes],
        )

    def with_leaves(self, dtype: torch.dtype) -> Rules:
        """The same with a bias and a sink to differentiate by."""
        bias, sink = (
            None if x is None else x.detach().to(dtype, copy=True).requires_grad_()
            for x in (self.bias, self.sink)
        )
        return replace(self, bias=bias, sink=sink)

    def largest_modifier(self) -> float:
        """The largest magnitude that softcap's tanh, a row's least ALiBi bias or the bias reaches:
        fp32 rounds the scores that matter at about this size. The tanh counts in full because it
        may be computed as 1 - 2 / (1 + exp(2 x)).
        """
        largest = max(0.0, self.softcap)
        if self.slopes is not None and self.visible.any():
            visible = self.visible.flatten(0, 1).any(0)  # (Sq, Sk): to some head
            seen = visible[visible.any(-1)]
            rows = self.distance[visible.any(-1)].double()
            nearest = rows.masked_fill(~seen, torch.inf).amin(-1).max().item()
            furthest = rows.masked_fill(~seen, -torch.inf).amax().item()
            steepest, least = self.slopes.max().item(), self.slopes.min().item()
            largest += max(0.0, steepest * nearest, -least * furthest)
        if self.bias is not None:
            largest += self.bias.masked_fill(~self.visible, 0.0).abs().max().item()
        return largest


@dataclass
class Lanes:
    """Inputs with batch and key heads as one dimension L, G query heads for each."""

    batch: int
    heads_k: int
    q: Tensor  # (L, G, Sq, D)
    k: Tensor  # (L, Sk, D)
    v: Tensor  # (L, Sk, Dv)

    @classmethod
    def of(cls, q: Tensor, k: Tensor, v: Tensor) -> Lanes:
        batch, seqlen_q, heads_q, head_dim = q.shape
        seqlen_k, heads_k = k.shape[1:3]
        lanes = batch * heads_k
        return cls(
            batch=batch,
            heads_k=heads_k,
            q=q.transpose(1, 2).reshape(lanes, heads_q // heads_k, seqlen_q, head_dim),
            k=k.transpose(1, 2).reshape(lanes, seqlen_k, head_dim),
            v=v.transpose(1, 2).reshape(lanes, seqlen_k, v.shape[-1]),
        )

    def output_lanes(self, x: Tensor) -> Tensor:
        """(B, Sq, Hq, Dv) -> (L, G, Sq, Dv)."""
        return x.transpose(1, 2).reshape(*self.q.shape[:-1], self.v.shape[-1])

    def zero_outputs(self) -> Tensor:
        """(L, G, Sq, Dv) in the dtype of q."""
        return self.q.new_zeros(*self.q.shape[:-1], self.v.shape[-1])

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
