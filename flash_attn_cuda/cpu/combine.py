"""The attention over all keys from those over disjoint parts of them."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def combine(
    out_partial: Tensor, lse_partial: Tensor, out_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """out_partial is (splits, B, S, H, D), normalised within its part, and lse_partial (splits, B,
    S, H). Returns out (B, S, H, D) in `out_dtype` and lse (B, S, H). A part whose lse is -inf does
    not count, whatever its out holds; a row without any other has out 0 and lse -inf.
    """
    if lse_partial.shape[0] == 0:
        out = torch.zeros(out_partial.shape[1:], dtype=out_dtype, device=out_partial.device)
        return out, lse_partial.new_full(lse_partial.shape[1:], -math.inf)
    lse = torch.logsumexp(lse_partial, 0)
    weights = torch.exp(lse_partial - lse.masked_fill(lse == -math.inf, 0.0))[..., None]
    parts = out_partial.masked_fill(lse_partial[..., None] == -math.inf, 0.0)
    return (parts * weights).sum(0).to(out_dtype), lse
