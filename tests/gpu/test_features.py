"""Windows, softcap, ALiBi and their combinations with everything else, forward and backward."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from flash_attn_cuda import flash_attn_func
from tests.cases import families
from tests.cases.attention import Alibi, AttentionCase, Layout
from tests.cases.harness import (
    ON_CPU,
    Check,
    assert_same_bits,
    check_cache,
    make_cache_case,
    make_case,
    run_forward_backward,
    run_reference,
    scaled,
    skip_without_row,
)
from tests.cases.pairwise import pairwise
from tests.reference.tolerance import assert_close

pytestmark = pytest.mark.gpu

LENGTHS = pytest.mark.parametrize(
    "lengths",
    [(130, 130), (70, 201), (201, 70), (1, 150), (150, 1)],
    ids=lambda n: f"{n[0]}x{n[1]}",
)
CAUSAL = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])


# -- windows ---------------------------------------------------------------------------------------

WINDOWS = (
    (0, 0),
    (0, -1),
    (-1, 0),
    (5, -1),
    (-1, 5),
    (63, -1),
    (-1, 64),
    (1, 0),
    (17, 33),
    (100, 3),
    (64, 64),
    (500, 1),  # wider than the keys on one side, then on both
    (1, 500),
    (500, 500),
    (2**31 - 1, 0),
    (2**31 - 1, 2**31 - 1),
    (-7, 2),  # any negative bound is none
)


@LENGTHS
@CAUSAL
def test_windows(check: Check, lengths: tuple[int, int], causal: bool) -> None:
    for seed, window in enumerate(WINDOWS):
        case = make_case(
            seqlen_q=lengths[0],
            seqlen_k=lengths[1],
            num_heads_k=2,
            num_heads_q=2,
            batch=1,
            window=window,
            causal=causal,
        )
        check(case, seed=seed)


@pytest.mark.parametrize("head_dim", [32, 96, 128, 192, 256, 512])
def test_windows_in_every_bucket(check: Check, head_dim: int) -> None:
    for lengths, window in (((257, 300), (40, 2)), ((300, 140), (-1, 70)), ((140, 300), (70, -1))):
        check(
            make_case(
                batch=1,
                seqlen_q=lengths[0],
                seqlen_k=lengths[1],
                num_heads_k=2,
                head_dim=head_dim,
                window=window,
            )
        )


@pytest.mark.parametrize("window", [(200, 0), (0, 130), (300, 300), (-1, 700), (700, -1)], ids=str)
def test_windows_over_many_tiles(check: Check, window: tuple[int, int]) -> None:
    """Tiles left out on both sides, Sq above and below Sk."""
    for seqlen_q, seqlen_k in ((1500, 1000), (1000, 1500)):
        case = make_case(
            batch=1,
            seqlen_q=scaled(seqlen_q, seqlen_q // 2),
            seqlen_k=scaled(seqlen_k, seqlen_k // 2),
            num_heads_q=2,
            num_heads_k=1,
            window=window,
        )
        check(case)


def test_a_left_bound_alone_leaves_the_right_open() -> None:
    """Early queries of Sq > Sk + 1 keep the keys to their right (FlashAttention-2 cuts them)."""
    case = make_case(batch=1, seqlen_q=8, seqlen_k=3, num_heads_q=1, num_heads_k=1, window=(0, -1))
    skip_without_row(case)
    inputs = case.make_inputs()
    inputs.q.zero_()  # every visible key counts the same
    result = run_forward_backward(case, inputs, use_dlse=False)
    visible = torch.tensor([3, 3, 3, 3, 3, 3, 2, 1])
    torch.testing.assert_close(result.lse[0, 0].cpu(), visible.log().to(result.lse.dtype))


# -- softcap ---------------------------------------------------------------------------------------


@CAUSAL
@pytest.mark.parametrize("softcap", [0.1, 1.0, 30.0, 1e4])
def test_softcap(check: Check, softcap: float, causal: bool) -> None:
    check(make_case(seqlen_q=140, seqlen_k=170, num_heads_k=2, softcap=softcap, causal=causal))


@pytest.mark.parametrize("head_dim", [32, 96, 128, 192, 256, 512])
def test_softcap_in_every_bucket(check: Check, head_dim: int) -> None:
    check(make_case(seqlen_q=140, seqlen_k=170, head_dim=head_dim, softcap=5.0, num_heads_k=2))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_softcap_of_large_scores(dtype: torch.dtype) -> None:
    """Scores of hundreds: the tanh is flat, and its gradient 0 rather than NaN."""
    case = make_case(seqlen_q=130, seqlen_k=150, softcap=20.0, dtype=dtype, causal=True)
    skip_without_row(case)
    inputs = case.make_inputs()
    inputs = replace(inputs, q=inputs.q * 30, k=inputs.k * 30)
    assert_close(run_forward_backward(case, inputs), *run_reference(case, inputs))


BOTH_DTYPES = pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"]
)
# Scores of the rows of share 1 in every 64 keys: from one 128 keys to those before them they rise
# by up to 2^36.
LEVELS = (0.0, -24.0, 20.0, 25.0, -10.0, 8.0, -25.0)
SHARES = (1.0, 0.5, 0.0, 3.0)  # of 16 rows each; with 3 the polynomial for tanh does not reach


def set_shares(q: Tensor) -> None:
    """Column 0 of (..., seqlen_q, heads, head_dim)."""
    rows = torch.arange(q.shape[-3], device=q.device)
    shares = torch.tensor(SHARES, dtype=q.dtype, device=q.device)
    q[..., 0] = shares[rows // 16 % len(SHARES), None]


def levels_of(groups_of_keys: Tensor, head_dim: int) -> Tensor:
    levels = torch.tensor(LEVELS, device=groups_of_keys.device)
    return levels[groups_of_keys % len(LEVELS)] * head_dim**0.5


@CAUSAL
@BOTH_DTYPES
@pytest.mark.parametrize("is_long", [False, True], ids=["usual", "long"])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256, 512])
def test_softcap_of_scores_that_rise(
    head_dim: int, is_long: bool, dtype: torch.dtype, causal: bool
) -> None:
    """From block to block by more than exponentials can follow, within reach of the kernels'
    polynomial for tanh and beyond it, in different warps and blocks. Rows for long calls want so
    many heads that lower tiles would need another round.
    """
    heads = scaled(134, 2) if is_long else 2
    case = make_case(
        batch=1,
        seqlen_q=190,
        seqlen_k=scaled(1700, 900) if is_long else 900,
        num_heads_q=heads,
        num_heads_k=1,
        head_dim=head_dim,
        softcap=50.0,
        dtype=dtype,
        causal=causal,
    )
    skip_without_row(case)
    if is_long and head_dim <= 96 and not ON_CPU:
        name = families.planned(case)["instance"]
        assert "sm90" not in name or name.endswith("_long_modifiers")
    inputs = case.make_inputs()
    set_shares(inputs.q)
    from_the_end = torch.arange(case.seqlen_k - 1, -1, -1, device=inputs.k.device)
    inputs.k[..., 0] = levels_of(from_the_end // 64, head_dim)[:, None].to(dtype)
    assert_close(run_forward_backward(case, inputs), *run_reference(case, inputs))


@CAUSAL
@BOTH_DTYPES
@pytest.mark.parametrize("head_dim", [64, 128, 256, 512])
def test_softcap_of_scores_that_rise_from_page_to_page(
    head_dim: int, dtype: torch.dtype, causal: bool
) -> None:
    case = make_cache_case(
        cached=(900, 650),
        capacity=1024,
        page_size=64,
        seqlens_q=200,
        head_dim=head_dim,
        softcap=50.0,
        dtype=dtype,
        causal=causal,
    )
    skip_without_row(case)
    inputs = case.make_inputs()
    set_shares(inputs.q)
    pages = torch.arange(len(inputs.k_cache), device=inputs.q.device)
    inputs.k_cache[..., 0] = levels_of(pages, head_dim)[:, None, None].to(dtype)
    check_cache(case, inputs=inputs)


def test_softcap_of_zero_or_less_is_off() -> None:
    case = make_case(seqlen_q=70, seqlen_k=90)
    skip_without_row(case)
    inputs = case.make_inputs()
    plain = flash_attn_func(inputs.q, inputs.k, inputs.v)
    for softcap in (0.0, -0.0, -1.0, -50.0):
        assert torch.equal(flash_attn_func(inputs.q, inputs.k, inputs.v, softcap=softcap), plain)


# -- ALiBi -----------------------------------------------------------------------------------------


@CAUSAL
@pytest.mark.parametrize("head_dim", [72, 96, 112, 128])
def test_alibi_of_slope_0_changes_no_bit(head_dim: int, causal: bool) -> None:
    """A score is not even multiplied by a factor that is 1 up to rounding."""
    case = make_case(seqlen_q=200, seqlen_k=330, head_dim=head_dim, causal=causal)
    skip_without_row(case)
    inputs = case.make_inputs()
    slopes = torch.zeros(case.num_heads_q, device=inputs.q.device)
    plain, flat = (
        flash_attn_func(inputs.q, inputs.k, inputs.v, causal=causal, alibi_slopes=alibi)
        for alibi in (None, slopes)
    )
    assert torch.equal(flat, plain)


@LENGTHS
@pytest.mark.parametrize("alibi", Alibi, ids=lambda alibi: alibi.value)
def test_alibi(check: Check, alibi: Alibi, lengths: tuple[int, int]) -> None:
    for head_dim, causal in ((64, False), (64, True), (128, False), (40, True)):
        case = make_case(
            seqlen_q=lengths[0],
            seqlen_k=lengths[1],
            num_heads_q=6,
            num_heads_k=2,
            head_dim=head_dim,
            alibi=alibi,
            causal=causal,
        )
        check(case)


@pytest.mark.parametrize("head_dim", [32, 96, 192, 256, 512])
def test_alibi_in_every_bucket(check: Check, head_dim: int) -> None:
    check(make_case(seqlen_q=140, seqlen_k=170, head_dim=head_dim, alibi=Alibi.per_batch))


@CAUSAL
@pytest.mark.parametrize("factor", [0.0, -1.0, 30.0, -30.0, 1e4])
def test_alibi_slopes_of_any_size(factor: float, causal: bool) -> None:
    case = make_case(seqlen_q=130, seqlen_k=150, alibi=Alibi.per_batch, causal=causal)
    skip_without_row(case)
    inputs = case.make_inputs()
    inputs = replace(inputs, alibi_slopes=inputs.alibi_slopes * factor)
    assert_close(run_forward_backward(case, inputs), *run_reference(case, inputs))


def test_alibi_slopes_in_any_memory() -> None:
    """(B, H) with the batch expanded, or cut out of a wider tensor."""
    case = make_case(seqlen_q=70, seqlen_k=90, alibi=Alibi.per_head)
    skip_without_row(case)
    inputs = case.make_inputs()
    expected = run_forward_backward(case, inputs)
    slopes = inputs.alibi_slopes
    wide = torch.full((2, 9), torch.nan, device=slopes.device)
    wide[:, 3:7] = slopes
    strided = torch.full((4, 3), torch.nan, device=slopes.device)
    strided[:, 1] = slopes
    for same in (slopes.expand(2, 4), wide[:, 3:7], strided[:, 1]):
        assert_same_bits(
            run_forward_backward(case, replace(inputs, alibi_slopes=same)),
            expected,
            str(same.shape),
        )


# -- the scale with all of them --------------------------------------------------------------------


@pytest.mark.parametrize("scale", [0.0, -0.3, 1e-6, 5.0, -100.0])
@pytest.mark.parametrize(
    "features",
    [
        {"softcap": 3.0},
        {"alibi": Alibi.per_head},
        {"softcap": 3.0, "alibi": Alibi.per_batch},
        {"window": (30, 4)},
        {"softcap": 3.0, "alibi": Alibi.per_head, "window": (30, 4), "dropout_p": 0.2},
    ],
    ids=lambda features: "-".join(features),
)
def test_softmax_scale(check: Check, features: dict[str, Any], scale: float) -> None:
    check(make_case(seqlen_q=100, seqlen_k=130, softmax_scale=scale, **features))


@pytest.mark.parametrize("scale", [1e20, -1e30, 1e38])
def test_huge_scales_stay_finite(scale: float) -> None:
    """softcap bounds every score, and a window hides keys whatever the sign of the scale."""
    case = make_case(seqlen_q=100, seqlen_k=130, softmax_scale=scale, softcap=10.0, window=(20, 0))
    skip_without_row(case)
    result = run_forward_backward(case, case.make_inputs())
    for name, x in result.tensors().items():
        assert x.isfinite().all(), name
    assert (result.lse.abs() <= 10.0 + 3.1).all()  # of at most 21 keys, each within the cap


# -- combinations ----------------------------------------------------------------------------------

SETTINGS: dict[str, tuple[Any, ...]] = {
    "dtype": (torch.bfloat16, torch.float16),
    "head_dim": (32, 64, 80, 96, 111, 128, 160, 192, 256, 320, 512),
    "heads": ((4, 4), (6, 2), (4, 1)),
    "lengths": ((130, 130), (70, 201), (201, 70), (1, 150), (113, 64), (257, 129)),
    "mask": (
        {},
        {"causal": True},
        {"window": (33, -1)},
        {"window": (-1, 21)},
        {"window": (0, 0)},
        {"window": (60, 9)},
        {"window": (40, 5), "causal": True},
    ),
    "softcap": (0.0, 4.0),
    "alibi": (None, Alibi.per_head, Alibi.per_batch),
    "dropout_p": (0.0, 0.2),
    "deterministic": (False, True),
    "softmax_scale": (None, -0.2),
    "layout": (Layout.contiguous, Layout.packed, Layout.odd_stride),
}


def combined_case(heads: tuple[int, int], lengths: tuple[int, int], **fields: Any) -> AttentionCase:
    """A case of one combination of SETTINGS."""
    return make_case(
        num_heads_q=heads[0],
        num_heads_k=heads[1],
        seqlen_q=lengths[0],
        seqlen_k=lengths[1],
        **fields.pop("mask"),
        **fields,
    )


COMBINATIONS = [combined_case(**choice) for choice in pairwise(SETTINGS)]


@pytest.mark.parametrize("case", COMBINATIONS, ids=str)
def test_combinations(check: Check, case: AttentionCase) -> None:
    check(case)


@st.composite
def feature_cases(draw: st.DrawFn) -> AttentionCase:
    heads_k = draw(st.integers(1, 3))
    limit = scaled(400, 70)
    bound = st.sampled_from([-1, 0, 1]) | st.integers(0, 400)
    return make_case(
        batch=draw(st.integers(1, 3)),
        seqlen_q=draw(st.integers(1, limit)),
        seqlen_k=draw(st.integers(1, limit)),
        num_heads_q=heads_k * draw(st.integers(1, 4)),
        num_heads_k=heads_k,
        head_dim=draw(st.integers(1, 512)),
        dtype=draw(st.sampled_from([torch.bfloat16, torch.float16])),
        causal=draw(st.booleans()),
        window=(draw(bound), draw(bound)),
        softcap=draw(st.just(0.0) | st.floats(0.5, 50.0, width=32)),
        alibi=draw(st.none() | st.sampled_from(Alibi)),
        dropout_p=draw(st.just(0.0) | st.floats(0.01, 0.9)),
        deterministic=draw(st.booleans()),
        softmax_scale=draw(st.none() | st.floats(-1.0, 1.0, width=32)),
        layout=draw(st.sampled_from(list(Layout))),
    )


@settings(
    max_examples=scaled(80, 20),
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(case=feature_cases(), seed=st.integers(0, 1 << 20))
def test_random_combinations(check: Check, case: AttentionCase, seed: int) -> None:
    check(case, seed=seed)


@pytest.mark.parametrize("features", [{"softcap": 4.0}, {"alibi": Alibi.per_head}, {}], ids=str)
def test_rows_without_keys_have_no_gradient(features: dict[str, Any]) -> None:
    """Whatever arrives there, with every feature that touches the scores."""
    case = make_case(
        seqlen_q=300, seqlen_k=70, window=(30, 0), dropout_p=0.1, **features, num_heads_k=2
    )
    skip_without_row(case)
    inputs = case.make_inputs()
    result = run_forward_backward(case, inputs)
    keyless = slice(0, 230)
    assert not result.out[:, keyless].any() and not result.dq[:, keyless].any()
    assert (result.lse[:, :, keyless] == -torch.inf).all()
    inputs.dout[:, keyless] = 1e4
    inputs.dlse[:, :, keyless] = torch.nan
    assert_same_bits(run_forward_backward(case, inputs), result)
