"""What rounding to 16 bits takes from an attention's result, kept for its backward in eight bits.

A backward subtracts D = rowsum(dO * O) from every row of dP. What O's rounding takes from D, the
common part of the keys multiplies in dQ. Eight bits more of O leave 2^-8 of that
(docs/numerics.md#what-rounding-takes-from-o).

Bits of floats of one sign differ by as many units in the last place as lie between them. Kept is
the distance from the rounded number's bits to the exact one's, in fp32, rounded to its upper eight
bits, as csrc/shared/out_rounding.h has it.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Bits of fp32's mantissa that a dtype lacks.
_DROPPED = {torch.bfloat16: 16, torch.float16: 13}


def rounded(exact: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(`exact` of fp32 in a dtype of 16 bits, int8: what that took from it)."""
    result, dropped = exact.to(dtype), _DROPPED[dtype]
    shift, half = dropped - 8, 1 << (dropped - 1)
    distance = exact.view(torch.int32) - result.float().view(torch.int32) + (1 << (shift - 1))
    # A tie may have gone either way, and fp16 has numbers of fewer bits.
    return result, (distance.clamp_(-half, half - 1) >> shift).to(torch.int8)


def is_known(kept: Tensor | None) -> bool:
    """Operators take what is None, and return what is empty, where nothing was kept."""
    return kept is not None and kept.shape != (0,)


def unrounded(result: Tensor, kept: Tensor | None) -> Tensor:
    """A result in fp32, of which `kept` is known, None or empty if nothing is; others as it is."""
    if kept is None or not is_known(kept) or result.dtype not in _DROPPED:
        return result
    shift = _DROPPED[result.dtype] - 8
    bits = result.float().view(torch.int32) + (kept.int() << shift)
    return bits.view(torch.float32)
