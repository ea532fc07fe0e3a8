"""Gradients where keys and values have a mean, by every kernel and on every road."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from flash_attn_cuda.call.fields import AttentionCall
from flash_attn_cuda.call.rounding import rounded
from flash_attn_cuda.operators.derivatives import run_operator
from tests.cases.harness import DEVICE, bits, make_case, skip_without_row
from tests.cases.masked_harness import skip_without_masked_row
from tests.cases.rounding import (
    FEATURES,
    ROADS,
    SECOND_ROADS,
    check_jvp,
    check_road,
    check_rounding,
    check_second_order,
    feature_case,
    kept_bytes,
)

pytestmark = pytest.mark.gpu
HEAD_DIMS = [32, 64, 96, 128, 192, (192, 128), 256, 512]


@pytest.mark.parametrize("name", FEATURES)
def test_features(name: str) -> None:
    case = feature_case(name)
    skip_without_masked_row(case)
    check_rounding(case)


def test_keys_in_parts() -> None:
    """What several CTAs have of a row is combined before it is rounded."""
    case = feature_case("packed")
    skip_without_masked_row(case)
    check_rounding(case, num_splits=3)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("head_dim", HEAD_DIMS, ids=str)
def test_head_dims(head_dim: Any, causal: bool) -> None:
    wide, narrow = head_dim if isinstance(head_dim, tuple) else (head_dim, None)
    case = feature_case("full", head_dim=wide, head_dim_v=narrow, causal=causal)
    skip_without_masked_row(case)
    check_rounding(case)


@pytest.mark.parametrize("name", ROADS)
def test_roads(name: str) -> None:
    skip_without_row(make_case())
    check_road(ROADS[name])


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("head_dim", [64, 128, 256, 512])
@pytest.mark.parametrize("name", SECOND_ROADS)
def test_second_order(name: str, head_dim: int, causal: bool) -> None:
    skip_without_row(make_case(head_dim=head_dim, causal=causal))
    check_second_order(SECOND_ROADS[name], head_dim=head_dim, causal=causal)


@pytest.mark.parametrize("head_dim", [64, 128, 256, 512])
def test_jvp(head_dim: int) -> None:
    skip_without_row(make_case(head_dim=head_dim))
    check_jvp(head_dim=head_dim)


def test_what_is_kept() -> None:
    """A byte for each number of out, where a gradient follows and the caller does not decline."""
    case = make_case()
    skip_without_row(case)
    out = case.batch * case.seqlen_q * case.num_heads_q * case.head_dim
    assert kept_bytes(case) == out
    assert kept_bytes(case, keep_rounding=False) == 0


@pytest.mark.parametrize("lengths", [(300, 300), (2, 700), (300, 0)], ids=str)
@pytest.mark.parametrize("head_dim", [40, *HEAD_DIMS], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_bits_are_those_of_the_exact_result(dtype: Any, head_dim: Any, lengths: Any) -> None:
    """Of the same kernel's result in fp32."""
    wide, narrow = head_dim if isinstance(head_dim, tuple) else (head_dim, head_dim)
    case = make_case(head_dim=wide, head_dim_v=narrow, dtype=dtype)
    skip_without_row(case)
    shapes = ((lengths[0], 4, wide), (lengths[1], 2, wide), (lengths[1], 2, narrow))
    q, k, v = (torch.randn(2, *x, device=DEVICE, dtype=dtype) for x in shapes)
    call = AttentionCall(q, k, v, keeps_rounding=True)
    found, exact = run_operator(call), run_operator(replace(call, fp32_results=True))
    out, kept = rounded(exact.out, dtype)
    assert exact.out_rounding is not None and exact.out_rounding.numel() == 0
    assert torch.equal(bits(found.out), bits(out))
    assert torch.equal(found.out_rounding, kept)
