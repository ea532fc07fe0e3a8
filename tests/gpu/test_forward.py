"""The forward on a GPU against fp64: lengths, scales, extreme values, empty shapes."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from flash_attn_cuda import flash_attn_func
from tests.cases import logits
from tests.cases.attention import HEAD_RATIOS, LONG_SEQLENS, ODD_SEQLENS, AttentionCase, Layout
from tests.cases.harness import (
    DEVICE,
    ON_CPU,
    Check,
    assert_same_bits,
    make_case,
    run_forward,
    run_forward_backward,
    run_reference,
    scaled,
    skip_without_row,
)
from tests.cases.operators import arguments
from tests.reference import AttentionResult
from tests.reference.tolerance import assert_close

pytestmark = pytest.mark.gpu

CAUSAL = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])


@CAUSAL
@pytest.mark.parametrize("seqlen_q", ODD_SEQLENS)
def test_odd_lengths(check: Check, seqlen_q: int, causal: bool) -> None:
    for seqlen_k in ODD_SEQLENS:
        case = make_case(seqlen_q=seqlen_q, seqlen_k=seqlen_k, num_heads_k=2, causal=causal)
        check(case, backward=False, seed=seqlen_k)


@CAUSAL
@pytest.mark.parametrize("head_dim", [32, 96, 128, 192, 256, 512])
def test_odd_lengths_in_every_bucket(check: Check, head_dim: int, causal: bool) -> None:
    partners = random.Random(head_dim).sample(ODD_SEQLENS, len(ODD_SEQLENS))
    for seqlen_q, seqlen_k in zip(ODD_SEQLENS, partners, strict=True):
        case = make_case(
            seqlen_q=seqlen_q, seqlen_k=seqlen_k, num_heads_k=2, head_dim=head_dim, causal=causal
        )
        check(case, backward=False)


@CAUSAL
@pytest.mark.parametrize("lengths", LONG_SEQLENS, ids=lambda lengths: f"{lengths[0]}x{lengths[1]}")
@pytest.mark.parametrize("head_dim", [64, 128, 256, 512])
def test_long_lengths(check: Check, head_dim: int, lengths: tuple[int, int], causal: bool) -> None:
    seqlen_q, seqlen_k = (scaled(seqlen, max(1, seqlen // 8)) for seqlen in lengths)
    case = make_case(
        batch=1,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        num_heads_q=2,
        num_heads_k=1,
        head_dim=head_dim,
        causal=causal,
    )
    check(case, backward=False)


@CAUSAL
@pytest.mark.parametrize("ratio", HEAD_RATIOS, ids=lambda ratio: f"{ratio[0]}over{ratio[1]}")
def test_head_ratios(check: Check, ratio: tuple[int, int], causal: bool) -> None:
    for head_dim, dtype in ((64, torch.bfloat16), (128, torch.float16)):
        case = make_case(
            seqlen_q=67,
            seqlen_k=201,
            num_heads_q=ratio[0],
            num_heads_k=ratio[1],
            head_dim=head_dim,
            dtype=dtype,
            causal=causal,
        )
        check(case, backward=False)


# -- softmax scale and values --------------------------------------------------------------------


@CAUSAL
@pytest.mark.parametrize("scale", [None, 0.0, -0.0, 0.125, -0.3, 1e-6, 5.0, 100.0, -100.0])
def test_softmax_scale(check: Check, scale: float | None, causal: bool) -> None:
    case = make_case(seqlen_q=130, seqlen_k=150, softmax_scale=scale, causal=causal)
    check(case, backward=False)


@pytest.mark.parametrize("scale", [1e4, -1e4, 1e20, -1e30, 1e-30, 1e-44])
def test_softmax_scale_of_any_size_gives_a_softmax(scale: float) -> None:
    """At 1e4 a row keeps one key, at 1e-30 all count alike: exact, without a yardstick."""
    case = make_case(seqlen_q=130, seqlen_k=150, softmax_scale=scale, num_heads_q=2, num_heads_k=2)
    skip_without_row(case, backward=False)
    inputs = case.make_inputs()
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


@CAUSAL
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("values", logits.ALL)
def test_extreme_logits(values: object, dtype: torch.dtype, causal: bool) -> None:
    case = make_case(seqlen_q=200, seqlen_k=301, dtype=dtype, causal=causal)
    skip_without_row(case)
    inputs = case.make_inputs()
    q, k = values(inputs.q, inputs.k)
    inputs = replace(inputs, q=q, k=k)
    assert_close(run_forward_backward(case, inputs), *run_reference(case, inputs))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_bad_values_stay_in_their_head(bad: float) -> None:
    """NaN and infinity in one head leave every other head's results untouched, bit for bit."""
    case = make_case(seqlen_q=140, seqlen_k=150, causal=True)
    skip_without_row(case)
    clean = case.make_inputs()
    dirty = case.make_inputs()
    for x in (dirty.q, dirty.k, dirty.v):
        x[1, 7, 2] = bad
    results = [run_forward_backward(case, inputs) for inputs in (clean, dirty)]
    assert not results[1].out[1, 7:, 2].isfinite().any()
    others = [
        AttentionResult(
            **{
                name: torch.cat([_heads_first(name, x)[0], _heads_first(name, x)[1, [0, 1, 3]]])
                for name, x in result.tensors().items()
            }
        )
        for result in results
    ]
    assert_same_bits(*reversed(others))


def _heads_first(name: str, x: Tensor) -> Tensor:
    return x if name == "lse" else x.transpose(1, 2)


def test_a_bad_query_spoils_only_its_row() -> None:
    """Not compared bit for bit: rows of one warp may share the decision when to rescale."""
    case = make_case(seqlen_q=140, seqlen_k=150)
    skip_without_row(case, backward=False)
    inputs = case.make_inputs()
    clean, expected = run_forward(case, inputs), run_reference(case, inputs, use_dlse=False)
    inputs.q[0, 70, 1, 3] = torch.nan
    dirty = run_forward(case, inputs)
    assert dirty.out[0, 70, 1].isnan().all()
    assert dirty.lse[0, 1, 70].isnan()
    dirty.out[0, 70, 1] = clean.out[0, 70, 1]
    dirty.lse[0, 1, 70] = clean.lse[0, 1, 70]
    assert_close(dirty, *expected)


# -- random shapes, other backends ---------------------------------------------------------------


@st.composite
def attention_cases(draw: st.DrawFn) -> AttentionCase:
    heads_k = draw(st.integers(1, 4))
    limit = scaled(600, 80)
    return make_case(
        batch=draw(st.integers(1, 3)),
        seqlen_q=draw(st.integers(1, limit)),
        seqlen_k=draw(st.integers(1, limit)),
        num_heads_q=heads_k * draw(st.integers(1, 5)),
        num_heads_k=heads_k,
        head_dim=draw(st.integers(1, 512)),
        dtype=draw(st.sampled_from([torch.bfloat16, torch.float16])),
        causal=draw(st.booleans()),
        softmax_scale=draw(st.none() | st.floats(-2.0, 2.0, width=32)),
        layout=draw(st.sampled_from(list(Layout))),
    )


@settings(
    max_examples=scaled(150, 25),
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(case=attention_cases(), seed=st.integers(0, 1 << 20))
def test_random_cases(check: Check, case: AttentionCase, seed: int) -> None:
    check(case, seed=seed)


@CAUSAL
@pytest.mark.parametrize("head_dim", [40, 64, 111, 256, 512])
def test_gpu_and_cpu_agree(head_dim: int, causal: bool) -> None:
    """Two implementations, one result: the GPU against the CPU backend in fp64 as reference."""
    case = make_case(
        batch=1,
        seqlen_q=60,
        seqlen_k=90,
        num_heads_q=4,
        num_heads_k=2,
        head_dim=head_dim,
        causal=causal,
    )
    skip_without_row(case)
    inputs = case.make_inputs()
    _, naive = run_reference(case, inputs)
    names = ("q", "k", "v", "dout", "dlse")
    fields = {name: getattr(inputs, name).detach().cpu().double() for name in names}
    backend = run_forward_backward(replace(case, device="cpu"), replace(inputs, **fields))
    assert_close(run_forward_backward(case, inputs).to("cpu"), backend, naive.to("cpu"))


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
        for name, x in result.tensors().items():
            expected = (
                inputs.dlse if name == "lse" else inputs.k if name in ("dk", "dv") else inputs.q
            )
            assert x.shape == expected.shape, f"{empty}: {name}"
            assert (x == (-torch.inf if name == "lse" else 0)).all(), f"{empty}: {name}"


@pytest.mark.cuda_only
@pytest.mark.parametrize("argument", ["k", "v"])
def test_tensors_on_different_devices_are_refused(argument: str) -> None:
    inputs = make_case().make_inputs()
    tensors = {"q": inputs.q, "k": inputs.k, "v": inputs.v}
    tensors[argument] = tensors[argument].cpu()
    with pytest.raises((ValueError, RuntimeError), match=rf"\b{argument}\b.*cpu"):
        flash_attn_func(**tensors)


@pytest.mark.cuda_only
def test_dtypes_without_a_kernel_are_refused() -> None:
    inputs = make_case(dtype=torch.float32).make_inputs()
    with pytest.raises((TypeError, RuntimeError), match="float32"):
        flash_attn_func(inputs.q, inputs.k, inputs.v)


def test_device_is_what_the_run_says() -> None:
    """Guards against a run that believes it tests a GPU and does not."""
    out = flash_attn_func(*(torch.zeros(1, 1, 1, 8, dtype=torch.bfloat16, device=DEVICE),) * 3)
    assert out.is_cuda != ON_CPU
