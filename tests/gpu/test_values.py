"""Numbers that are hard on kernels, against the fp64 reference: scores far apart, scales and slopes
of any size, infinity and NaN, calls without anything.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from flash_attn_cuda import flash_attn_func
from tests.cases import families, logits
from tests.cases.attention import Alibi
from tests.cases.harness import (
    DEVICE,
    ON_CPU,
    Check,
    assert_same_bits,
    make_cache_case,
    make_case,
    run_forward,
    run_forward_backward,
    run_reference,
    scaled,
    skip_without_row,
)
from tests.cases.matrix import inputs_of
from tests.cases.operators import arguments
from tests.reference import AttentionResult
from tests.reference.tolerance import assert_close

pytestmark = pytest.mark.gpu

CAUSAL = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])


# -- scores ----------------------------------------------------------------------------------------


@CAUSAL
@DTYPES
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("values", logits.ALL)
def test_extreme_logits(
    check: Check, values: Any, head_dim: int, dtype: torch.dtype, causal: bool
) -> None:
    case = make_case(seqlen_q=200, seqlen_k=301, head_dim=head_dim, dtype=dtype, causal=causal)
    inputs = case.make_inputs()
    q, k = values(inputs.q, inputs.k)
    check(case, inputs=replace(inputs, q=q, k=k), backward=head_dim == 64)


@CAUSAL
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256, 512])
@pytest.mark.parametrize("values", logits.ALL)
def test_max_logits_of_extreme_scores(
    check: Check, values: Any, head_dim: int, causal: bool
) -> None:
    """What is known of the largest score decides what is looked at, and no bit of a result."""
    case = make_case(
        seqlen_q=scaled(700, 200), seqlen_k=301, head_dim=head_dim, causal=causal, max_logits=True
    )
    inputs = case.make_inputs()
    q, k = values(inputs.q, inputs.k)
    given = replace(inputs, q=q, k=k)
    # Products of 512 terms are cut off 32 times: 1.23 of what these scores may be off by.
    if not (values is logits.steep_steps and head_dim == 512):
        check(case, inputs=given, backward=False)
    plain = run_forward(replace(case, max_logits=False), given)
    assert_same_bits(plain, run_forward(case, given))


def test_max_logits_of_nan_and_infinity() -> None:
    """A score that is no number is not the largest, and changes nothing in other heads."""
    case = make_case(seqlen_q=140, seqlen_k=150, max_logits=True)
    inputs = inputs_of(case, backward=False)
    clean = run_forward(case, inputs).max_logits
    inputs.q[0, 70, 1, 3] = torch.nan
    inputs.q[1, 70, 2, 0] = torch.inf
    dirty = run_forward(case, inputs).max_logits
    assert dirty[1, 2] == torch.inf
    assert dirty[0, 1] <= clean[0, 1] or ON_CPU  # where a maximum with a NaN is one
    dirty[0, 1], dirty[1, 2] = clean[0, 1], clean[1, 2]
    assert torch.equal(dirty, clean)


@pytest.mark.parametrize("head_dim", [64, 128, 192])
def test_dropout_where_scores_rise_steeply(check: Check, head_dim: int) -> None:
    """A block of scores is done again if its reference was too low, with the same decisions."""
    case = make_case(seqlen_q=200, seqlen_k=301, head_dim=head_dim, dropout_p=0.3)
    inputs = case.make_inputs()
    q, k = logits.steep_steps(inputs.q, inputs.k)
    check(case, inputs=replace(inputs, q=q, k=k))


@pytest.mark.parametrize("scale", [1e4, -1e4, 1e20, -1e30, 1e-30, 1e-44])
def test_softmax_scale_of_any_size_gives_a_softmax(scale: float) -> None:
    """At 1e4 a row keeps one key, at 1e-30 all count alike: exact, without a yardstick."""
    case = make_case(seqlen_q=130, seqlen_k=150, softmax_scale=scale, num_heads_q=2, num_heads_k=2)
    inputs = inputs_of(case, backward=False)
    out = run_forward(case, inputs).out.double()
    if abs(scale) < 1:
        expected = inputs.v.double().mean(1, keepdim=True).expand_as(out)
    else:
        scores = torch.einsum("bmhd,bnhd->bhmn", inputs.q.double(), inputs.k.double()) * scale
        best = scores.topk(2, -1)
        clear = best.values[..., 0] - best.values[..., 1] > 20 + 1e-5 * best.values[..., 0].abs()
        keys = inputs.v.double().transpose(1, 2)
        chosen = best.indices[..., :1].expand(*out.transpose(1, 2).shape)
        expected = keys.gather(2, chosen).transpose(1, 2)
        assert clear.float().mean() > 0.9
        clear = clear.transpose(1, 2)[..., None]
        out, expected = out.where(clear, 0.0), expected.where(clear, 0.0)
    assert (out - expected).abs().max() <= 2.0**-8 * expected.abs().max()


@pytest.mark.parametrize("scale", [1e20, -1e30, 1e38])
def test_huge_scales_stay_finite(scale: float) -> None:
    """softcap bounds every score, and a window hides keys whatever the sign of the scale."""
    case = make_case(seqlen_q=100, seqlen_k=130, softmax_scale=scale, softcap=10.0, window=(20, 0))
    skip_without_row(case)
    result = run_forward_backward(case, case.make_inputs())
    for name, x in result.tensors().items():
        assert x.isfinite().all(), name
    assert (result.lse.abs() <= 10.0 + 3.1).all()  # of at most 21 keys, each within the cap


def test_a_left_bound_alone_leaves_the_right_open() -> None:
    """Early queries of Sq > Sk + 1 keep the keys to their right (FlashAttention-2 cuts them)."""
    case = make_case(batch=1, seqlen_q=8, seqlen_k=3, num_heads_q=1, num_heads_k=1, window=(0, -1))
    inputs = inputs_of(case)
    inputs.q.zero_()  # every visible key counts the same
    result = run_forward_backward(case, inputs, use_dlse=False)
    visible = torch.tensor([3, 3, 3, 3, 3, 3, 2, 1])
    torch.testing.assert_close(result.lse[0, 0].cpu(), visible.log().to(result.lse.dtype))


# -- softcap ---------------------------------------------------------------------------------------


@DTYPES
def test_softcap_of_large_scores(check: Check, dtype: torch.dtype) -> None:
    """Scores of hundreds: the tanh is flat, and its gradient 0 rather than NaN."""
    case = make_case(seqlen_q=130, seqlen_k=150, softcap=20.0, dtype=dtype, causal=True)
    inputs = case.make_inputs()
    check(case, inputs=replace(inputs, q=inputs.q * 30, k=inputs.k * 30))


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
@DTYPES
@pytest.mark.parametrize("is_long", [False, True], ids=["usual", "long"])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256, 512])
def test_softcap_of_scores_that_rise(
    check: Check, head_dim: int, is_long: bool, dtype: torch.dtype, causal: bool
) -> None:
    """From block to block by more than exponentials can follow, within reach of the kernels'
    polynomial for tanh and beyond it, in different warps and blocks. Rows for long calls want so
    many heads that lower tiles would need another round.
    """
    case = make_case(
        batch=1,
        seqlen_q=190,
        seqlen_k=scaled(1700, 900) if is_long else 900,
        num_heads_q=scaled(134, 2) if is_long else 2,
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
    check(case, inputs=inputs)
    check(replace(case, max_logits=True), inputs=inputs, backward=False)


@CAUSAL
@DTYPES
@pytest.mark.parametrize("head_dim", [64, 128, 256, 512])
def test_softcap_of_scores_that_rise_from_page_to_page(
    check: Check, head_dim: int, dtype: torch.dtype, causal: bool
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
    inputs = case.make_inputs()
    set_shares(inputs.q)
    pages = torch.arange(len(inputs.k_cache), device=inputs.q.device)
    inputs.k_cache[..., 0] = levels_of(pages, head_dim)[:, None, None].to(dtype)
    check(case, inputs=inputs)


def test_softcap_of_zero_or_less_is_off() -> None:
    case = make_case(seqlen_q=70, seqlen_k=90)
    inputs = inputs_of(case)
    plain = flash_attn_func(inputs.q, inputs.k, inputs.v)
    for softcap in (0.0, -0.0, -1.0, -50.0):
        assert torch.equal(flash_attn_func(inputs.q, inputs.k, inputs.v, softcap=softcap), plain)


# -- ALiBi -----------------------------------------------------------------------------------------


@CAUSAL
@pytest.mark.parametrize("head_dim", [72, 96, 112, 128])
def test_alibi_of_slope_0_changes_no_bit(head_dim: int, causal: bool) -> None:
    """A score is not even multiplied by a factor that is 1 up to rounding."""
    case = make_case(seqlen_q=200, seqlen_k=330, head_dim=head_dim, causal=causal)
    inputs = inputs_of(case)
    plain, flat = (
        flash_attn_func(inputs.q, inputs.k, inputs.v, causal=causal, alibi_slopes=alibi)
        for alibi in (None, torch.zeros(case.num_heads_q, device=DEVICE))
    )
    assert torch.equal(flat, plain)


@CAUSAL
@pytest.mark.parametrize("factor", [0.0, -1.0, 30.0, -30.0, 1e4])
def test_alibi_slopes_of_any_size(check: Check, factor: float, causal: bool) -> None:
    case = make_case(seqlen_q=130, seqlen_k=150, alibi=Alibi.per_batch, causal=causal)
    inputs = case.make_inputs()
    check(case, inputs=replace(inputs, alibi_slopes=inputs.alibi_slopes * factor))


def test_alibi_slopes_in_any_memory() -> None:
    """(B, H) with the batch expanded, or cut out of a wider tensor."""
    case = make_case(seqlen_q=70, seqlen_k=90, alibi=Alibi.per_head)
    inputs = inputs_of(case)
    expected = run_forward_backward(case, inputs)
    slopes = inputs.alibi_slopes
    wide = torch.full((2, 9), torch.nan, device=slopes.device)
    wide[:, 3:7] = slopes
    strided = torch.full((4, 3), torch.nan, device=slopes.device)
    strided[:, 1] = slopes
    for same in (slopes.expand(2, 4), wide[:, 3:7], strided[:, 1]):
        actual = run_forward_backward(case, replace(inputs, alibi_slopes=same))
        assert_same_bits(actual, expected, str(same.shape))


# -- gradients, infinity, NaN, nothing -------------------------------------------------------------


@pytest.mark.parametrize("factor", [2.0**-18, 2.0**8])
def test_gradients_that_underflow_or_are_large(check: Check, factor: float) -> None:
    case = make_case(seqlen_q=130, seqlen_k=150, dtype=torch.float16, causal=True)
    inputs = case.make_inputs()
    check(case, inputs=replace(inputs, dout=inputs.dout * factor, dlse=inputs.dlse * factor))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_bad_values_stay_in_their_head(bad: float) -> None:
    """NaN and infinity in one head leave every other head's results untouched, bit for bit."""
    case = make_case(seqlen_q=140, seqlen_k=150, causal=True)
    skip_without_row(case)
    clean, dirty = case.make_inputs(), case.make_inputs()
    for x in (dirty.q, dirty.k, dirty.v):
        x[1, 7, 2] = bad
    results = [run_forward_backward(case, inputs) for inputs in (clean, dirty)]
    assert not results[1].out[1, 7:, 2].isfinite().any()
    for result in results:
        result.lse[1, 2] = 0.0
        for x in (result.out, result.dq, result.dk, result.dv):
            x[1, :, 2] = 0.0
    assert_same_bits(*reversed(results))


def test_a_bad_query_spoils_only_its_row() -> None:
    """Not compared bit for bit: rows of one warp may share the decision when to rescale."""
    case = make_case(seqlen_q=140, seqlen_k=150)
    inputs = inputs_of(case, backward=False)
    clean, expected = run_forward(case, inputs), run_reference(case, inputs, use_dlse=False)
    inputs.q[0, 70, 1, 3] = torch.nan
    dirty = run_forward(case, inputs)
    assert dirty.out[0, 70, 1].isnan().all()
    assert dirty.lse[0, 1, 70].isnan()
    dirty.out[0, 70, 1] = clean.out[0, 70, 1]
    dirty.lse[0, 1, 70] = clean.lse[0, 1, 70]
    assert_close(dirty, *expected)


@pytest.mark.parametrize("route", ["eager", "operator"])
def test_empty_shapes(route: str) -> None:
    for empty in ("batch", "seqlen_q", "seqlen_k"):
        case = make_case(num_heads_k=2, **{empty: 0})
        inputs = case.make_inputs()
        if route == "eager":
            result = run_forward_backward(case, inputs)
        else:
            fields = arguments(inputs.q, inputs.k, inputs.v, softmax_scale=0.125)
            out, lse, *_ = torch.ops.flash_attn_cuda.attention(*fields)
            result = AttentionResult(out, lse)
        shapes = {"lse": inputs.dlse, "dk": inputs.k, "dv": inputs.k}
        for name, x in result.tensors().items():
            assert x.shape == shapes.get(name, inputs.q).shape, f"{empty}: {name}"
            assert (x == (-torch.inf if name == "lse" else 0)).all(), f"{empty}: {name}"


def test_device_is_what_the_run_says() -> None:
    """Guards against a run that believes it tests a GPU and does not."""
    out = flash_attn_func(*(torch.zeros(1, 1, 1, 8, dtype=torch.bfloat16, device=DEVICE),) * 3)
    assert out.is_cuda != ON_CPU
