"""The reference against torch and hand-made cases; the closeness rule against wrong results; the
arithmetic of cases.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from tests.cases.attention import AttentionCase, AttentionInputs, Layout, arrange, benchmark_cases
from tests.reference import (
    AttentionResult,
    WindowBounds,
    attention,
    attention_with_gradients,
    low_precision,
    visible_keys,
)
from tests.reference.tolerance import LSE_RELATIVE_ERROR, assert_close, compare

FP64 = AttentionCase(
    batch=2,
    seqlen_q=5,
    seqlen_k=7,
    num_heads_q=4,
    num_heads_k=2,
    head_dim=8,
    dtype=torch.float64,
    device="cpu",
)


def torch_attention(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float | None
) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        out = scaled_dot_product_attention(
            *(x.transpose(1, 2) for x in (q, k, v)), attn_mask=visible, scale=scale, enable_gqa=True
        )
    return out.transpose(1, 2)


@pytest.mark.parametrize("scale", [None, 0.0, -0.7, 3.0])
@pytest.mark.parametrize("causal", [False, True])
def test_reference_equals_torch(causal: bool, scale: float | None) -> None:
    inputs = FP64.make_inputs(1)
    leaves = [x.requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    visible = torch.ones(5, 7, dtype=torch.bool)
    if causal:
        visible = visible.tril(2)
    expected = torch_attention(*leaves, visible, scale)
    gradients = torch.autograd.grad(expected, leaves, inputs.dout)
    detached = [x.detach() for x in leaves]
    result = attention_with_gradients(*detached, inputs.dout, softmax_scale=scale, causal=causal)
    torch.testing.assert_close(result.out, expected.detach())
    for actual, gradient in zip((result.dq, result.dk, result.dv), gradients, strict=True):
        torch.testing.assert_close(actual, gradient)


@pytest.mark.parametrize("masked", [False, True])
def test_chunks_do_not_change_the_result(monkeypatch: pytest.MonkeyPatch, masked: bool) -> None:
    inputs = FP64.make_inputs(3)
    arguments = (inputs.q, inputs.k, inputs.v, inputs.dout, inputs.dlse)
    options: dict[str, Any] = {"causal": True}
    if masked:
        options["mask"] = torch.rand(2, 4, 5, 7) < 0.5
        options["bias"] = torch.randn(1, 4, 1, 7, dtype=torch.float64)
        options["sink"] = torch.randn(4, dtype=torch.float64)
    whole = attention_with_gradients(*arguments, **options)
    naive = low_precision(*arguments, **options)
    # One lane and two queries at a time.
    monkeypatch.setattr("tests.reference.parts.MAX_SCORES_PER_CHUNK", 30)
    for name, expected in attention_with_gradients(*arguments, **options).tensors().items():
        torch.testing.assert_close(expected, whole.tensors()[name])
    for name, expected in low_precision(*arguments, **options).tensors().items():
        torch.testing.assert_close(expected, naive.tensors()[name])


def test_hand_made_case() -> None:
    """One query, two keys, scores ln 3 and 0: weights 3/4 and 1/4."""
    q = torch.tensor([[[[1.0, 0.0]]]])
    k = torch.tensor([[[[math.log(3.0), 5.0]], [[0.0, -5.0]]]])
    v = torch.tensor([[[[4.0, 0.0]], [[0.0, 8.0]]]])
    out, lse = attention(q, k, v, softmax_scale=1.0)
    torch.testing.assert_close(out, torch.tensor([[[[3.0, 2.0]]]], dtype=torch.float64))
    assert lse.item() == pytest.approx(math.log(4.0))


@pytest.mark.parametrize(
    ("lengths", "causal", "window", "rows"),
    [
        ((3, 3), True, (-1, -1), ["x..", "xx.", "xxx"]),
        ((2, 4), True, (-1, -1), ["xxx.", "xxxx"]),
        ((4, 2), True, (-1, -1), ["..", "..", "x.", "xx"]),
        ((3, 3), False, (-1, -1), ["xxx", "xxx", "xxx"]),
        ((4, 4), False, (1, 0), ["x...", "xx..", ".xx.", "..xx"]),
        ((4, 4), True, (1, 2), ["x...", "xx..", ".xx.", "..xx"]),
        ((4, 4), False, (0, 0), ["x...", ".x..", "..x.", "...x"]),
        ((4, 4), False, (-1, 1), ["xx..", "xxx.", "xxxx", "xxxx"]),
        ((4, 4), False, (1, None), ["xxxx", "xxxx", ".xxx", "..xx"]),
        ((2, 5), False, (1, 1), ["..xxx", "...xx"]),
    ],
)
def test_visible_keys(
    lengths: tuple[int, int], causal: bool, window: WindowBounds, rows: list[str]
) -> None:
    visible = visible_keys(*lengths, causal=causal, window=window)
    assert ["".join("x" if seen else "." for seen in row) for row in visible.tolist()] == rows


def test_rows_without_a_visible_key() -> None:
    case = replace(FP64, seqlen_q=6, seqlen_k=2)
    inputs = case.make_inputs(5)
    result = attention_with_gradients(
        inputs.q, inputs.k, inputs.v, inputs.dout, inputs.dlse, causal=True
    )
    assert (result.out[:, :4] == 0).all()
    assert (result.dq[:, :4] == 0).all()
    assert (result.lse[:, :, :4] == -math.inf).all()
    alone = attention_with_gradients(
        inputs.q[:, 4:], inputs.k, inputs.v, inputs.dout[:, 4:], inputs.dlse[:, :, 4:], causal=True
    )
    torch.testing.assert_close(result.dk, alone.dk)
    torch.testing.assert_close(result.dv, alone.dv)


@pytest.mark.parametrize("empty", ["batch", "seqlen_q", "seqlen_k"])
def test_empty_shapes(empty: str) -> None:
    case = replace(FP64, **{empty: 0})
    inputs = case.make_inputs()
    tensors = (inputs.q, inputs.k, inputs.v, inputs.dout, inputs.dlse)
    for result in (attention_with_gradients(*tensors), low_precision(*tensors)):
        for name, like in {"out": inputs.q, "dq": inputs.q, "dk": inputs.k, "dv": inputs.v}.items():
            assert result.tensors()[name].shape == like.shape
            assert not result.tensors()[name].any()
        assert result.lse.shape == (case.batch, 4, case.seqlen_q)
        assert (result.lse == -math.inf).all()
    out, lse = attention(inputs.q, inputs.k, inputs.v)
    assert (out.shape, lse.shape) == (inputs.q.shape, inputs.dlse.shape)


# -- the closeness rule --------------------------------------------------------------------------


def flash_like(
    case: AttentionCase, inputs: AttentionInputs, mutation: str = "none"
) -> AttentionResult:
    """A kernel's arithmetic: fp32 but for P, dS and results; with one mistake if asked."""
    q, k, v, dout = (x.float().transpose(1, 2) for x in (inputs.q, inputs.k, inputs.v, inputs.dout))
    scale = case.head_dim**-0.5 * (1.01 if mutation == "scale off by 1 %" else 1.0)
    visible = visible_keys(case.seqlen_q, case.seqlen_k, causal=case.causal)
    if mutation == "causal off by one":
        visible = visible_keys(case.seqlen_q, case.seqlen_k, window=(-1, 1))
    if mutation == "dropped key":
        visible[:, case.seqlen_k // 2] = False

    def rounded(x: Tensor) -> Tensor:
        return x.to(case.dtype).float()

    scores = (q @ k.mT * scale).masked_fill(~visible, -math.inf)
    keyless = ~visible.any(-1)[:, None]
    row_max = scores.amax(-1, keepdim=True).masked_fill(keyless, 0.0)
    probs = (scores - row_max).exp()
    row_sum = probs.sum(-1, keepdim=True).masked_fill(keyless, 1.0)
    lse = (row_max + row_sum.log()).masked_fill(keyless, -math.inf)
    out = rounded(rounded(probs) @ v / row_sum)
    probs = probs / row_sum
    row_d = (dout * out).sum(-1, keepdim=True)
    if mutation != "lse gradient dropped":
        row_d = row_d - inputs.dlse[..., None]
    dscores = rounded(probs * (dout @ v.mT - row_d.masked_fill(keyless, 0.0)))
    gradients = (scale * dscores @ k, scale * dscores.mT @ q, rounded(probs).mT @ dout)
    dq, dk, dv = (x.to(case.dtype).transpose(1, 2) for x in gradients)
    result = AttentionResult(out.to(case.dtype).transpose(1, 2), lse[..., 0], dq, dk, dv)
    if mutation == "one NaN":
        result.dk[0, 3, 0, 1] = math.nan
    if mutation == "one infinite lse":
        result.lse[0, 0, -1] = math.inf
    if mutation == "gradient never written":
        result.dq.zero_()
    if mutation == "last row of out missing":
        result.out[:, -1] = 0.0
    return result


def reference_of(
    case: AttentionCase, inputs: AttentionInputs
) -> tuple[AttentionResult, AttentionResult]:
    tensors = (inputs.q, inputs.k, inputs.v, inputs.dout, inputs.dlse)
    return (
        attention_with_gradients(*tensors, causal=case.causal),
        low_precision(*tensors, causal=case.causal),
    )


def rule_case(dtype: torch.dtype, **fields: int) -> AttentionCase:
    sizes = {"seqlen_q": 64, "seqlen_k": 64, **fields}
    return AttentionCase(dtype=dtype, causal=True, device="cpu", **sizes)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("lengths", [(64, 64), (1, 1), (3, 2), (1, 40), (70, 3), (33, 100)])
def test_rule_accepts_a_correct_kernel(lengths: tuple[int, int], dtype: torch.dtype) -> None:
    case = rule_case(dtype, seqlen_q=lengths[0], seqlen_k=lengths[1])
    for seed in range(3):
        inputs = case.make_inputs(seed)
        assert_close(flash_like(case, inputs), *reference_of(case, inputs))


# What must be found, and in which tensors; "scale off by 1 %" is less than a rounding of bf16,
# where only lse shows it.
MUTATIONS = {
    "dropped key": {"out", "lse", "dq", "dk", "dv"},
    "causal off by one": {"out", "lse", "dq", "dk", "dv"},
    "scale off by 1 %": {"lse"},
    "lse gradient dropped": {"dq", "dk"},
    "one NaN": {"dk"},
    "one infinite lse": {"lse"},
    "gradient never written": {"dq"},
    "last row of out missing": {"out"},
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mutation", MUTATIONS)
def test_rule_rejects_a_wrong_kernel(mutation: str, dtype: torch.dtype) -> None:
    case = rule_case(dtype)
    inputs = case.make_inputs(7)
    expected = reference_of(case, inputs)
    report = compare(flash_like(case, inputs, mutation), *expected)
    found = {item.name for item in report if not item.passes}
    missed = MUTATIONS[mutation] - found
    assert not missed, f"{mutation} goes unnoticed in {missed}"
    with pytest.raises(AssertionError, match="not close"):
        assert_close(flash_like(case, inputs, mutation), *expected)


def test_rule_finds_one_percent_in_fp16_gradients() -> None:
    case = rule_case(torch.float16)
    inputs = case.make_inputs(7)
    report = compare(flash_like(case, inputs, "scale off by 1 %"), *reference_of(case, inputs))
    assert all(item.mean_ratio > 2.0 for item in report)


def test_rule_holds_the_mean_of_lse_to_less_than_its_maximum() -> None:
    """One element may be off by what all of them together may not."""
    exact = torch.zeros(1, 4, 400, dtype=torch.float64)
    out = torch.zeros(1, 400, 4, 8, dtype=torch.float64)
    reference = AttentionResult(out=out, lse=exact)
    for share, everywhere, passes in (
        *((0.9, False, True), (1.1, False, False)),
        *((0.5, True, True), (0.6, True, False), (math.nan, False, False)),
    ):
        lse = exact.clone()
        lse[slice(None) if everywhere else (0, 0, 7)] = share * LSE_RELATIVE_ERROR
        actual = AttentionResult(out=out.bfloat16(), lse=lse.float())
        judged = compare(actual, reference, reference)
        assert [item.passes for item in judged if item.name == "lse"] == [passes], share


def test_rule_rounds_the_yardstick_as_the_result_is_rounded() -> None:
    """As a bf16 sink's gradient beside fp16 queries; 2 % off are still found."""
    generator = torch.Generator().manual_seed(0)
    row = torch.zeros(1, 1, 1, 1, dtype=torch.float64)
    for _ in range(100):
        exact = torch.rand(4, generator=generator, dtype=torch.float64) + 1.0
        reference = AttentionResult(out=row, lse=row[..., 0], dsink=exact)
        naive = replace(reference, dsink=exact.half())
        right = replace(reference, out=row.half(), dsink=exact.bfloat16())
        assert_close(right, reference, naive)
        wrong = replace(right, dsink=(1.02 * exact).bfloat16())
        with pytest.raises(AssertionError, match="dsink"):
            assert_close(wrong, reference, naive)


def test_rule_rejects_a_yardstick_that_is_not_finite() -> None:
    case = rule_case(torch.float16)
    inputs = case.make_inputs(7)
    reference, naive = reference_of(case, inputs)
    naive.out[0, 0, 0, 0] = math.nan
    with pytest.raises(AssertionError, match=r"out: .*nothing is shown"):
        assert_close(flash_like(case, inputs), reference, naive)


def test_rule_rejects_wrong_shapes_and_filled_empty_rows() -> None:
    case = rule_case(torch.bfloat16, seqlen_q=4, seqlen_k=2)
    inputs = case.make_inputs(8)
    expected = reference_of(case, inputs)
    good = flash_like(case, inputs)
    with pytest.raises(AssertionError, match=r"dk: .*shape"):
        assert_close(replace(good, dk=good.dk[:, :1]), *expected)
    good.out[0, 0, 0, 0] = 1e-30
    with pytest.raises(AssertionError, match="without a visible key"):
        assert_close(good, *expected)


# -- cases ---------------------------------------------------------------------------------------


def test_flops_and_bytes() -> None:
    case = AttentionCase(batch=2, seqlen_q=3, seqlen_k=5, num_heads_q=4, num_heads_k=2, head_dim=8)
    products = 2 * 4 * 3 * 5 * 8  # multiply-adds of Q K^T over all heads
    assert case.forward_flops() == 2 * 2 * products
    assert case.backward_flops() == 5 * 2 * products
    q_bytes, k_bytes, lse_bytes = 2 * 3 * 4 * 8 * 2, 2 * 5 * 2 * 8 * 2, 2 * 4 * 3 * 4
    assert case.forward_bytes() == 2 * q_bytes + 2 * k_bytes + lse_bytes
    assert case.backward_bytes() == 4 * q_bytes + 4 * k_bytes + lse_bytes


def test_heads_must_divide() -> None:
    with pytest.raises(ValueError, match="num_heads_k"):
        AttentionCase(num_heads_q=4, num_heads_k=3)


def test_benchmark_grid() -> None:
    cases = list(benchmark_cases())
    assert len(cases) == len(set(map(str, cases))) == 3 * 2 * 6
    assert all(case.batch * case.seqlen_q == 16_384 for case in cases)
    assert all(case.num_heads_q * case.head_dim == 2048 for case in cases)


@pytest.mark.parametrize("layout", Layout)
def test_layouts_hold_the_values_and_nothing_else_is_finite(layout: Layout) -> None:
    x = torch.randn(2, 3, 4, 16).to(torch.bfloat16)
    expected = x[:1].expand(x.shape) if layout is Layout.expanded_batch else x
    arranged = arrange(x, layout)
    assert torch.equal(arranged, expected)
    dense = layout in (Layout.contiguous,)
    assert arranged.is_contiguous() == (dense or layout is Layout.misaligned)
    storage = torch.tensor([], dtype=x.dtype).set_(arranged.untyped_storage())
    finite = int(storage.isfinite().sum())
    assert finite == (x.numel() // 2 if layout is Layout.expanded_batch else x.numel())
    if layout is Layout.misaligned:
        assert arranged.data_ptr() % 16 == 2


def test_inputs_depend_on_the_seed_alone() -> None:
    case = replace(FP64, layout=Layout.packed)
    first, again, other = case.make_inputs(1), case.make_inputs(1), case.make_inputs(2)
    assert torch.equal(first.q, again.q)
    assert torch.equal(first.dlse, again.dlse)
    assert not torch.equal(first.q, other.q)
    assert not torch.equal(first.q, first.dout)
    assert torch.equal(replace(case, layout=Layout.contiguous).make_inputs(1).v, first.v)
