"""What rounding takes from a result, and gradients that need it, on the CPU."""

from __future__ import annotations

import pytest
import torch

from flash_attn_cuda.call.rounding import rounded, unrounded
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

DTYPES = {torch.bfloat16: 16, torch.float16: 19}  # bits that are known with what is kept


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_kept_is_a_rounding_of_eight_bits_more(dtype: torch.dtype) -> None:
    """Also of ties, which went either way, and of zero."""
    x = torch.randn(100_000) * torch.exp2(torch.randint(-8, 8, (100_000,)).float())
    ties = torch.arange(1.0, 2.0, 2.0 ** -(DTYPES[dtype] - 8))[1::2]
    x = x[x.abs() > 2.0**-13]  # normal numbers of either
    for exact in (x, ties, -ties, 512.0 * ties, torch.zeros(3)):
        result, kept = rounded(exact, dtype)
        assert torch.equal(result, exact.to(dtype)) and kept.dtype == torch.int8
        error, last_place = (unrounded(result, kept) - exact).abs(), 2.0 ** -DTYPES[dtype]
        assert bool((error <= 2.0 * last_place * exact.abs()).all())  # by ties, and near them
    error = (unrounded(*rounded(x, dtype)) - x).abs()
    assert (error > last_place * x.abs()).float().mean() < 0.01
    whole = x.to(dtype).float()
    assert torch.equal(unrounded(*rounded(whole, dtype)), whole)


@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_of_fewer_bits_lose_nothing(dtype: torch.dtype) -> None:
    """Below the normal numbers what is kept may say less, and never misleads."""
    smallest = torch.finfo(dtype).smallest_normal
    exact = smallest * torch.rand(10_000)
    result, kept = rounded(exact, dtype)
    before, after = ((y - exact).abs() for y in (result.float(), unrounded(result, kept)))
    assert bool((after <= before + 2.0 ** -DTYPES[dtype] * exact + 1e-30).all())


def test_nothing_known_is_the_result() -> None:
    x = torch.randn(4, dtype=torch.bfloat16)
    assert unrounded(x, None) is x and unrounded(x, x.new_empty(0, dtype=torch.int8)) is x
    wide = torch.randn(4)
    assert unrounded(wide, None) is wide


@pytest.mark.parametrize("name", FEATURES)
def test_features(name: str) -> None:
    check_rounding(feature_case(name, "cpu"))


@pytest.mark.parametrize("name", ROADS)
def test_roads(name: str) -> None:
    check_road(ROADS[name], "cpu")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SECOND_ROADS)
def test_second_order(name: str, dtype: torch.dtype) -> None:
    check_second_order(SECOND_ROADS[name], dtype, "cpu")


@pytest.mark.parametrize("dtype", DTYPES)
def test_jvp(dtype: torch.dtype) -> None:
    check_jvp("cpu", dtype=dtype)


def test_what_is_kept() -> None:
    """A byte for each number of out, where a gradient follows and the caller does not decline."""
    case = feature_case("full", "cpu").of
    assert kept_bytes(case) == case.batch * case.seqlen_q * case.num_heads_q * case.head_dim
    assert kept_bytes(case, keep_rounding=False) == 0
