"""Small problems for masks.py, and what stands in for FlexAttention on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch.nn.functional as F
from torch import Tensor

from benchmarks.core import turns
from benchmarks.suites import feature_cost, mask_entrants
from benchmarks.suites.mask_blocks import BLOCK, flex_block_mask


def make_tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every part with small groups."""
    for name, value in {
        "HEADS": 2,
        "DENSITY_SEQLEN": 4 * BLOCK,
        "DENSITIES": (1.0, 0.5),
        "DOCUMENTS": 3,
        "MEAN_DOCUMENT": 100,
        "BIAS_SEQLEN": 150,
        "SINK_SEQLENS": (32, 64),
        "HEAD_DIMS": (16, 32),
    }.items():
        monkeypatch.setattr(mask_entrants, name, value)
    monkeypatch.setattr(turns, "MIN_ROUNDS", 2)
    monkeypatch.setattr(feature_cost, "TOKENS", 64)
    monkeypatch.setattr(feature_cost, "HIDDEN", 64)


def replace_flex(monkeypatch: pytest.MonkeyPatch, attend: Callable[..., Tensor]) -> None:
    """FlexAttention has no backward on the CPU: `attend` takes q, k, v and block_mask instead."""

    def prepare(case, blocks):
        return partial(attend, block_mask=flex_block_mask(blocks))

    monkeypatch.setattr(mask_entrants, "flex_in_blocks", prepare)


def dense_in_blocks(q: Tensor, k: Tensor, v: Tensor, block_mask) -> Tensor:
    """(B, H, S, D); what FlexAttention makes of full blocks."""
    blocks = block_mask.to_dense().bool()
    pairs = blocks.repeat_interleave(BLOCK, -2).repeat_interleave(BLOCK, -1)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=pairs)
