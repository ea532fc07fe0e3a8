"""Attention over a (batch, seqlen) layout whose rows hold padding, or several sequences each.

The sequences are described to flash_attn_varlen_func where they lie, by cu_seqlens over the
flattened batch and seqused: nothing is gathered and nothing waits for the GPU. Only rows whose real
tokens are not contiguous are sorted first, real tokens to the front, in their order.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..functions.interface import (
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
)


@dataclass(frozen=True)
class Sequences:
    """Where the sequences lie in q (batch, seqlen_q, ...) and k (batch, seqlen_k, ...)."""

    cu_seqlens_q: Tensor  # int32, into the flattened (batch * seqlen_q)
    cu_seqlens_k: Tensor  # int32, into the flattened (batch * seqlen_k)
    seqused_q: Tensor | None = None  # int32, one per sequence; None: all of it
    seqused_k: Tensor | None = None
    order_q: Tensor | None = None  # (batch, seqlen_q) int64: sort the rows so first
    order_k: Tensor | None = None  # (batch, seqlen_k) int64
    max_seqlens: tuple[int | Tensor | None, int | Tensor | None] | None = None  # default: seqlens
    # First real key and one past the last, (batch,) int32, where a row is a single range of keys
    # and its last query belongs to its last key: what flash_attn_with_kvcache can take.
    key_range: tuple[Tensor, Tensor] | None = None

    @classmethod
    def packed(cls, segments: Tensor, *, at_most: bool = False) -> Sequences:
        """Sequences are the runs of equal numbers in `segments` (batch, seqlen); 0 is padding.

        Waits for the GPU to count them; with `at_most` it describes as many sequences as there are
        tokens instead, the last ones empty.
        """
        flat = segments.flatten()
        starts = torch.ones_like(flat, dtype=torch.bool)
        starts[1:] = flat[1:] != flat[:-1]
        starts.view(segments.shape)[:, 0] = True  # no sequence goes on into the next row
        if at_most:
            number = starts.cumsum(0) - 1
            wanted = torch.arange(flat.numel() + 1, device=flat.device)
            cu_seqlens = torch.searchsorted(number, wanted).to(torch.int32)
        else:
            cu_seqlens = pad(starts.nonzero().flatten(), (0, 1), value=flat.numel()).int()
        lengths = cu_seqlens.diff()
        first = cu_seqlens[:-1].long().clamp_max(max(flat.numel() - 1, 0))
        used = torch.where(flat[first] == 0, 0, lengths) if flat.numel() > 0 else lengths
        return cls(cu_seqlens, cu_seqlens, used, used)

    @classmethod
    def ranges(cls, real_q: Tensor, real_k: Tensor, *, ends: bool) -> Sequences:
        """One sequence per row, whose real tokens are contiguous in both masks (batch, seqlen).

        `ends`: the last column of real_q is true in every row, and belongs to the last real key.
        """
        cu_seqlens_q, used_q, _ = _describe_ranges(real_q)
        cu_seqlens_k, used_k, key_range = _describe_ranges(real_k)
        return cls(
            cu_seqlens_q, cu_seqlens_k, used_q, used_k, key_range=key_range if ends else None
        )

    @classmethod
    def scattered(cls, real_q: Tensor, real_k: Tensor) -> Sequences:
        """One sequence per row, whose real tokens may be anywhere in it."""
        return cls(
            _multiples(real_q),
            _multiples(real_k),
            real_q.sum(1, dtype=torch.int32),
            real_k.sum(1, dtype=torch.int32),
            _real_first(real_q),
            _real_first(real_k),
        )

    def attend(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        """Attention within each sequence, (batch, seqlen_q, heads, head_dim); 0 at padding.

        `options` are those of flash_attn_varlen_func.
        """
        if self.key_range is not None and is_decoding(q, k, v, **options):
            return self._attend_to_cache(q, k, v, **options)
        if options.get("relative_bias") is not None:
            return self._attend_by_distance(q, k, v, **options)
        return self._attend_packed(q, k, v, **options)

    def _attend_by_distance(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        """Of real tokens alone, where padded ones would be further apart, and without sorting."""
        of = self
        if not options["causal"]:
            of = replace(
                self,
                cu_seqlens_q=self.cu_seqlens_k,
                seqused_q=self.seqused_k,
                order_q=self.order_k,
            )
        if of.order_q is None:
            return of._attend_packed(q, k, v, **options)
        return cast(Tensor, flash_attn_func(q, k, v, attn_mask=of._pairs(), **options))

    def _attend_packed(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        q, k, v = _sort(q, self.order_q), _sort(k, self.order_k), _sort(v, self.order_k)
        max_seqlen_q, max_seqlen_k = self.max_seqlens or (q.shape[1], k.shape[1])
        packed = flash_attn_varlen_func(
            *(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)),
            *(self.cu_seqlens_q, self.cu_seqlens_k),
            max_seqlen_q=max_seqlen_q,
            max_seqlen_k=max_seqlen_k,
            seqused_q=self.seqused_q,
            seqused_k=self.seqused_k,
            **options,
        )
        out = cast(Tensor, packed).unflatten(0, q.shape[:2])
        return out if self.order_q is None else _sort(out, self.order_q.argsort(1))

    def _pairs(self) -> Tensor:
        """(batch, 1, seqlen_q, seqlen_k): those of real tokens, of sequences that are scattered."""
        of_queries, of_keys = (
            order.argsort(1) < used[:, None]
            for order, used in ((self.order_q, self.seqused_q), (self.order_k, self.seqused_k))
            if order is not None and used is not None
        )
        return (of_queries[:, :, None] & of_keys[:, None])[:, None]

    def _attend_to_cache(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        assert self.key_range is not None
        first, end = self.key_range
        options = for_decoding(options)
        out = flash_attn_with_kvcache(q, k, v, cache_seqlens=end, cache_leftpad=first, **options)
        return cast(Tensor, out)


def is_decoding(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    dropout_p: float = 0.0,
    sink: Tensor | None = None,
    relative_bias: Tensor | None = None,
    **_: Any,
) -> bool:
    """Whether q continues the sequences of k and wants no gradients, as in generation, and nothing
    that flash_attn_with_kvcache lacks.
    """
    if relative_bias is not None:
        return False
    needs_gradient = torch.is_grad_enabled() and any(
        x is not None and x.requires_grad for x in (q, k, v, sink)
    )
    return causal and dropout_p == 0.0 and not needs_gradient and q.shape[1] < k.shape[1]


def for_decoding(options: dict[str, Any]) -> dict[str, Any]:
    """Options of flash_attn_varlen_func without those that only training has."""
    training = ("dropout_p", "deterministic", "relative_bias")
    return {name: value for name, value in options.items() if name not in training}


def is_contiguous(real: Tensor) -> Tensor:
    """A 0-d bool: whether the real tokens of each row of the mask (batch, seqlen) are one run."""
    starts = pad(real, (1, 0))[:, :-1] < real
    return (starts.sum(1) <= 1).all()


def _describe_ranges(real: Tensor) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
    """(cu_seqlens, seqused, (first, end)) of a mask whose rows are one range each.

    The padding in front of a range is a sequence of its own, of which nothing is used.
    """
    count = real.sum(1, dtype=torch.int32)
    first = real.int().argmax(1).int() if real.shape[1] > 0 else count
    row = _multiples(real)
    cu_seqlens = torch.cat([torch.stack([row[:-1], row[:-1] + first], 1).flatten(), row[-1:]])
    used = torch.stack([torch.zeros_like(count), count], 1).flatten()
    return cu_seqlens, used, (first, first + count)


def _multiples(real: Tensor) -> Tensor:
    """cu_seqlens of rows of full length."""
    batch, seqlen = real.shape
    return torch.arange(batch + 1, dtype=torch.int32, device=real.device) * seqlen


def _real_first(real: Tensor) -> Tensor:
    return (~real).to(torch.uint8).argsort(dim=1, stable=True)


def _sort(x: Tensor, order: Tensor | None) -> Tensor:
    return x if order is None else x.take_along_dim(order[:, :, None, None], 1)
