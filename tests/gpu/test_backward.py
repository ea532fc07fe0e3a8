"""Forward and backward on a GPU against the fp64 reference: every head dim, lengths, head ratios,
what autograd asks for.
"""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from flash_attn_cuda import flash_attn_func
from tests.cases.attention import (
    ALL_HEAD_DIMS,
    BUCKET_HEAD_DIMS,
    HEAD_RATIOS,
    LONG_SEQLENS,
    ODD_SEQLENS,
)
from tests.cases.harness import (
    Check,
    assert_same_bits,
    assert_same_up_to_one_rounding,
    bits,
    make_case,
    run_forward_backward,
    run_reference,
    scaled,
    skip_without_row,
)
from tests.reference import AttentionResult
from tests.reference.tolerance import assert_close

pytestmark = pytest.mark.gpu

CAUSAL = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])


@CAUSAL
@pytest.mark.parametrize("head_dim", ALL_HEAD_DIMS)
def test_every_head_dim(check: Check, head_dim: int, causal: bool) -> None:
    seqlen_q, seqlen_k = scaled(197, 53), scaled(263, 71)
    check(
        make_case(
            seqlen_q=seqlen_q, seqlen_k=seqlen_k, num_heads_k=2, head_dim=head_dim, causal=causal
        )
    )


@CAUSAL
@pytest.mark.parametrize("head_dim", [*BUCKET_HEAD_DIMS, 8, 40, 111, 200])
def test_head_dims_in_fp16(check: Check, head_dim: int, causal: bool) -> None:
    check(
        make_case(
            seqlen_q=scaled(260, 70),
            seqlen_k=scaled(190, 50),
            num_heads_k=2,
            head_dim=head_dim,
            dtype=torch.float16,
            causal=causal,
        )
    )


@CAUSAL
@pytest.mark.parametrize("seqlen_q", ODD_SEQLENS)
def test_odd_lengths(check: Check, seqlen_q: int, causal: bool) -> None:
    for seqlen_k in random.Random(seqlen_q).sample(ODD_SEQLENS, scaled(len(ODD_SEQLENS), 3)):
        case = make_case(seqlen_q=seqlen_q, seqlen_k=seqlen_k, num_heads_k=2, causal=causal)
        check(case, seed=seqlen_k)


@CAUSAL
@pytest.mark.parametrize("head_dim", [32, 96, 128, 192, 256, 512])
def test_odd_lengths_in_every_bucket(check: Check, head_dim: int, causal: bool) -> None:
    seqlens = ODD_SEQLENS[: scaled(len(ODD_SEQLENS), 6)]
    partners = random.Random(head_dim).sample(seqlens, len(seqlens))
    for seqlen_q, seqlen_k in zip(seqlens, partners, strict=True):
        case = make_case(
            seqlen_q=seqlen_q, seqlen_k=seqlen_k, num_heads_k=4, head_dim=head_dim, causal=causal
        )
        check(case)


@CAUSAL
@pytest.mark.parametrize("lengths", LONG_SEQLENS, ids=lambda lengths: f"{lengths[0]}x{lengths[1]}")
@pytest.mark.parametrize("head_dim", [64, 128, 256, 512])
def test_long_lengths(check: Check, head_dim: int, lengths: tuple[int, int], causal: bool) -> None:
    seqlen_q, seqlen_k = (scaled(seqlen, max(1, seqlen // 16)) for seqlen in lengths)
    check(
        make_case(
            batch=1,
            seqlen_q=seqlen_q,
            seqlen_k=seqlen_k,
            num_heads_q=2,
            num_heads_k=1,
            head_dim=head_dim,
            causal=causal,
        )
    )


@CAUSAL
@pytest.mark.parametrize("batch", [1, 5])
@pytest.mark.parametrize("ratio", HEAD_RATIOS, ids=lambda ratio: f"{ratio[0]}over{ratio[1]}")
def test_head_ratios(check: Check, ratio: tuple[int, int], batch: int, causal: bool) -> None:
    """Few key heads let thread blocks share one and add up fp32 partial sums; many do not."""
    for head_dim, dtype in ((64, torch.bfloat16), (128, torch.float16)):
        check(
            make_case(
                batch=batch,
                seqlen_q=67,
                seqlen_k=201,
                num_heads_q=ratio[0],
                num_heads_k=ratio[1],
                head_dim=head_dim,
                dtype=dtype,
                causal=causal,
            )
        )


@pytest.mark.parametrize("head_dim", BUCKET_HEAD_DIMS)
def test_many_key_heads_at_once(check: Check, head_dim: int) -> None:
    """More thread blocks than a GPU runs at a time, so that the order of the grid matters."""
    check(
        make_case(
            batch=4,
            seqlen_q=scaled(520, 40),
            seqlen_k=scaled(520, 40),
            num_heads_q=scaled(48, 4),
            num_heads_k=scaled(24, 2),
            head_dim=head_dim,
            causal=True,
        )
    )


@CAUSAL
@pytest.mark.parametrize("scale", [0.0, -0.3, 1e-6, 5.0, 100.0, -100.0])
def test_softmax_scale(check: Check, scale: float, causal: bool) -> None:
    check(make_case(seqlen_q=130, seqlen_k=150, softmax_scale=scale, causal=causal))


@CAUSAL
@pytest.mark.parametrize("head_dim", [64, 128, 192])
def test_gradients_without_lse(check: Check, head_dim: int, causal: bool) -> None:
    case = make_case(seqlen_q=150, seqlen_k=170, head_dim=head_dim, causal=causal)
    check(case, use_dlse=False)


@CAUSAL
def test_gradients_through_lse_alone(causal: bool) -> None:
    case = make_case(seqlen_q=150, seqlen_k=130, num_heads_k=2, causal=causal)
    skip_without_row(case)
    inputs = case.make_inputs()
    inputs.dout.zero_()
    reference, naive = run_reference(case, inputs)
    leaves = [x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    out, lse, _ = flash_attn_func(*leaves, causal=causal, return_attn_probs=True)
    dq, dk, dv = torch.autograd.grad(lse, leaves, inputs.dlse, materialize_grads=True)
    assert_close(AttentionResult(out.detach(), lse.detach(), dq, dk, dv), reference, naive)
    assert not dv.any()


def test_zero_gradient_in_zero_gradient_out() -> None:
    case = make_case(seqlen_q=150, seqlen_k=130, causal=True)
    skip_without_row(case)
    inputs = case.make_inputs()
    inputs.dout.zero_()
    result = run_forward_backward(case, inputs, use_dlse=False)
    for name in ("dq", "dk", "dv"):
        assert not result.tensors()[name].any(), name


@pytest.mark.parametrize("head_dim", [64, 59])
@pytest.mark.parametrize("wanted", ["q", "k", "v", "qk", "kv", "qv"])
def test_only_some_inputs_require_gradients(wanted: str, head_dim: int) -> None:
    case = make_case(seqlen_q=100, seqlen_k=140, num_heads_k=2, head_dim=head_dim, causal=True)
    skip_without_row(case)
    inputs = case.make_inputs()
    expected = run_forward_backward(case, inputs)
    leaves = {
        name: getattr(inputs, name).detach().requires_grad_(name in wanted)
        for name in ("q", "k", "v")
    }
    out, lse, _ = flash_attn_func(**leaves, causal=True, return_attn_probs=True)
    torch.autograd.backward([out, lse], [inputs.dout, inputs.dlse])
    for name, leaf in leaves.items():
        if name not in wanted:
            assert leaf.grad is None
        elif name == "q":
            assert_same_up_to_one_rounding(leaf.grad, expected.dq, "dq")
        else:
            assert torch.equal(bits(leaf.grad), bits(expected.tensors()[f"d{name}"])), name


def test_gradients_accumulate_and_the_graph_can_be_kept() -> None:
    case = make_case(seqlen_q=100, seqlen_k=140)
    skip_without_row(case)
    inputs = case.make_inputs()
    v = inputs.v.detach().requires_grad_()
    out = flash_attn_func(inputs.q, inputs.k, v)
    out.backward(inputs.dout, retain_graph=True)
    once = v.grad.clone()
    out.backward(inputs.dout)
    assert torch.equal(v.grad, once + once)


@pytest.mark.parametrize("head_dim", [64, 59])
def test_incoming_gradient_of_any_memory(head_dim: int) -> None:
    """sum() sends one number expanded, a transposed loss sends a transposed gradient."""
    case = make_case(seqlen_q=100, seqlen_k=140, head_dim=head_dim)
    skip_without_row(case)
    inputs = case.make_inputs()

    def gradients(dout: Tensor) -> AttentionResult:
        leaves = [x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
        out, lse, _ = flash_attn_func(*leaves, return_attn_probs=True)
        return AttentionResult(out, lse, *torch.autograd.grad(out, leaves, dout))

    ones = torch.ones_like(inputs.q)
    expanded = torch.ones((), dtype=case.dtype, device=case.device).expand(inputs.q.shape)
    assert_same_bits(gradients(expanded), gradients(ones))
    transposed = inputs.dout.transpose(1, 3).contiguous().transpose(1, 3)
    assert_same_bits(gradients(transposed), gradients(inputs.dout))


def test_same_tensor_as_query_key_and_value() -> None:
    case = make_case(seqlen_q=100, seqlen_k=100)
    skip_without_row(case)
    inputs = case.make_inputs()
    x = inputs.q.detach().requires_grad_()
    flash_attn_func(x, x, x, causal=True).backward(inputs.dout)
    leaves = [inputs.q.detach().clone().requires_grad_() for _ in range(3)]
    flash_attn_func(*leaves, causal=True).backward(inputs.dout)
    total = sum(leaf.grad.float() for leaf in leaves)
    bound = 3 * 2.0**-8 * sum(leaf.grad.float().abs() for leaf in leaves)
    assert ((x.grad.float() - total).abs() <= bound + 1e-5).all()


def test_backward_after_the_inputs_changed_is_refused() -> None:
    """What the backward reads is saved, not copied: autograd notices a change in place."""
    case = make_case(seqlen_q=64, seqlen_k=64)
    skip_without_row(case)
    inputs = case.make_inputs()
    q = inputs.q.clone().requires_grad_()
    k = inputs.k.clone()
    out = flash_attn_func(q, k, inputs.v)
    k.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward(inputs.dout)


@pytest.mark.parametrize("head_dim", [64, 128, 256, 512])
def test_rows_without_keys_have_no_gradient(head_dim: int) -> None:
    case = make_case(seqlen_q=300, seqlen_k=70, head_dim=head_dim, causal=True)
    skip_without_row(case)
    inputs = case.make_inputs()
    result = run_forward_backward(case, inputs)
    keyless = slice(0, 230)
    assert not result.out[:, keyless].any()
    assert not result.dq[:, keyless].any()
    assert (result.lse[:, :, keyless] == -torch.inf).all()
    # What arrives for these rows must not matter, however bad.
    inputs.dout[:, keyless] = 1e4
    inputs.dlse[:, :, keyless] = torch.nan  # what the derivative of most functions of -inf is
    assert_same_bits(run_forward_backward(case, inputs), result)


def test_values_whose_gradient_underflows_or_is_large() -> None:
    for factor in (2.0**-18, 2.0**8):
        case = make_case(seqlen_q=130, seqlen_k=150, dtype=torch.float16, causal=True)
        skip_without_row(case)
        inputs = case.make_inputs()
        inputs.dout.mul_(factor)
        inputs.dlse.mul_(factor)
        assert_close(run_forward_backward(case, inputs), *run_reference(case, inputs))
