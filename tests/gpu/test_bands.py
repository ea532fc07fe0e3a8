"""Bands that need not hold the diagonal (integrations/bands.py) by kernels of every kind, in every
layout of FlashAttention-4's functions, forward and backward.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flash_attn_cuda import check_device_errors
from flash_attn_cuda.integrations.flash_attention_4 import flash_attn_varlen_func
from tests.cases.bands import LAYOUTS, BandCase, Lengths
from tests.cases.harness import DEVICE, scaled
from tests.cases.pairwise import pairwise
from tests.reference.tolerance import assert_close

pytestmark = pytest.mark.gpu

# Each bound alone and both, on either side, empty, within a tile, over tiles, and beyond all keys.
BANDS: tuple[dict[str, Any], ...] = (
    {"window": (None, -1)},
    {"window": (None, -70)},
    {"window": (None, -1000)},
    {"window": (-1, None)},
    {"window": (-130, None)},
    {"window": (-1000, None)},
    {"window": (90, -20)},
    {"window": (300, -129)},
    {"window": (-20, 90)},
    {"window": (-129, 300)},
    {"window": (-9, 3)},
    {"window": (5, -5)},
    {"window": (40, -7), "causal": True},
    {"window": (2**40, -64)},
)
ONE: tuple[Lengths, ...] = (((201, 70),) * 2, ((70, 201),) * 2, ((257, 257),), ((1, 150),) * 3)
MANY: tuple[Lengths, ...] = (
    ((70, 33), (0, 5), (1, 140), (130, 130)),
    ((300, 517), (257, 129)),
    ((33, 400), (12, 0), (600, 64)),
)
SETTINGS: dict[str, tuple[Any, ...]] = {
    "band": BANDS,
    "head_dims": ((64, None), (128, None), (256, None), (96, None), (192, 128), (40, None)),
    "heads": ((4, 4), (6, 2), (4, 1)),
    "dtype": (torch.bfloat16, torch.float16),
    "softcap": (0.0, 4.0),
    "has_sink": (False, True),
    "deterministic": (False, True),
}


def cases_of(layouts: tuple[str, ...], lengths: tuple[Lengths, ...], seed: int) -> list[BandCase]:
    axes = {"layout": layouts, "lengths": lengths, **SETTINGS}
    made = []
    for choice in pairwise(axes, seed):
        (head_dim, head_dim_v), band = choice.pop("head_dims"), choice.pop("band")
        heads = {"head_dim": head_dim, "head_dim_v": head_dim_v}
        made.append(BandCase(**choice, **band, **heads, device=DEVICE))
    return made


def check(case: BandCase, seed: int = 0) -> None:
    """Against the reference under a mask of the visible pairs."""
    reason = case.missing_row()
    if reason is not None:
        pytest.skip(reason)
    rows = case.rows(seed)
    assert_close(case.run(rows), *case.reference(rows))


@pytest.mark.parametrize("case", cases_of(("dense",), ONE, 0), ids=str)
def test_sequences_of_one_length(case: BandCase) -> None:
    check(case)


@pytest.mark.parametrize("case", cases_of(("packed", "used", "origin"), MANY, 1), ids=str)
def test_sequences_of_many_lengths(case: BandCase) -> None:
    check(case)


@pytest.mark.parametrize("case", cases_of(("pages",), MANY, 2), ids=str)
def test_over_pages(case: BandCase) -> None:
    check(replace(case, deterministic=False))


@pytest.mark.parametrize("layout", ["dense", "packed", "origin"])
@pytest.mark.parametrize("band", [(None, -700), (-700, None), (900, -300), (-300, 900)], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256, 512])
def test_long_bands(head_dim: int, band: tuple[Any, Any], layout: str) -> None:
    length = scaled(2100, 150)
    lengths = ((length, length + 333),) * 2
    check(BandCase(layout, lengths, band, head_dim=head_dim, heads=(8, 4), device=DEVICE))


@pytest.mark.parametrize("queries", [1, 3, 16])
@pytest.mark.parametrize("band", [(None, -40), (100, -3), (-2, None), (-1, 8), (None, -5000)])
def test_few_queries_over_many_pages(band: tuple[Any, Any], queries: int) -> None:
    """Where keys are split over CTAs."""
    lengths = tuple((queries, n) for n in (scaled(3000, 300), 17, scaled(900, 90)))
    check(BandCase("pages", lengths, band, head_dim=128, heads=(8, 1), device=DEVICE))


END = st.none() | st.integers(-400, 400)


@settings(max_examples=scaled(60, 15), derandomize=True, deadline=None, database=None)
@given(
    layout=st.sampled_from([*LAYOUTS]),
    lengths=st.lists(st.tuples(st.integers(0, 300), st.integers(0, 300)), min_size=1, max_size=3),
    window=st.tuples(END, END),
    causal=st.booleans(),
    head_dim=st.sampled_from([32, 64, 80, 128, 256, 512]),
    dtype=st.sampled_from([torch.bfloat16, torch.float16]),
    has_sink=st.booleans(),
)
def test_any_band(layout: str, lengths: list[tuple[int, int]], **fields: Any) -> None:
    if layout == "dense":
        lengths = [lengths[0]] * len(lengths)
    check(BandCase(layout, tuple(lengths), heads=(4, 2), device=DEVICE, **fields))


@pytest.mark.cuda_only
@pytest.mark.parametrize("name", ["seqused_q", "seqused_k"])
@pytest.mark.parametrize("window", [(None, -9), (-9, None)])
def test_lengths_that_are_wrong_are_reported(window: tuple[Any, Any], name: str) -> None:
    """As they were given, not without the rows that a band hides."""
    q = torch.randn(2, 64, 4, 64, dtype=torch.bfloat16, device=DEVICE)
    used = torch.tensor([64, 70], dtype=torch.int32, device=DEVICE)
    flash_attn_varlen_func(q, q, q, window_size=window, **{name: used})
    with pytest.raises(ValueError, match=rf"^{name}: .* got 70 at index 1"):
        check_device_errors()
