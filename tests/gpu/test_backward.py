"""What autograd asks of a call: gradients of some inputs, through some results, of any memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from flash_attn_cuda import flash_attn_func
from tests.cases.attention import Alibi
from tests.cases.harness import (
    assert_same_bits,
    assert_same_up_to_one_rounding,
    bits,
    make_case,
    run_forward_backward,
    run_reference,
)
from tests.cases.matrix import inputs_of
from tests.reference import AttentionResult
from tests.reference.tolerance import assert_close

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_gradients_through_lse_alone(causal: bool) -> None:
    case = make_case(seqlen_q=150, seqlen_k=130, num_heads_k=2, causal=causal)
    inputs = inputs_of(case)
    inputs.dout.zero_()
    reference, naive = run_reference(case, inputs)
    leaves = [x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    out, lse, _ = flash_attn_func(*leaves, causal=causal, return_attn_probs=True)
    dq, dk, dv = torch.autograd.grad(lse, leaves, inputs.dlse, materialize_grads=True)
    assert_close(AttentionResult(out.detach(), lse.detach(), dq, dk, dv), reference, naive)
    assert not dv.any()


def test_zero_gradient_in_zero_gradient_out() -> None:
    case = make_case(seqlen_q=150, seqlen_k=130, causal=True)
    inputs = inputs_of(case)
    inputs.dout.zero_()
    result = run_forward_backward(case, inputs, use_dlse=False)
    for name in ("dq", "dk", "dv"):
        assert not result.tensors()[name].any(), name


@pytest.mark.parametrize("head_dim", [64, 59])
@pytest.mark.parametrize("wanted", ["q", "k", "v", "qk", "kv", "qv"])
def test_only_some_inputs_require_gradients(wanted: str, head_dim: int) -> None:
    case = make_case(seqlen_q=100, seqlen_k=140, num_heads_k=2, head_dim=head_dim, causal=True)
    inputs = inputs_of(case)
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
    inputs = inputs_of(case)
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
    inputs = inputs_of(case)

    ones = torch.ones_like(inputs.q)
    expanded = torch.ones((), dtype=case.dtype, device=case.device).expand(inputs.q.shape)
    transposed = inputs.dout.transpose(1, 3).contiguous().transpose(1, 3)
    for dout, same in ((expanded, ones), (transposed, inputs.dout)):
        actual, expected = (
            run_forward_backward(case, replace(inputs, dout=x), use_dlse=False)
            for x in (dout, same)
        )
        assert_same_bits(actual, expected)


def test_same_tensor_as_query_key_and_value() -> None:
    case = make_case(seqlen_q=100, seqlen_k=100)
    inputs = inputs_of(case)
    x = inputs.q.detach().requires_grad_()
    flash_attn_func(x, x, x, causal=True).backward(inputs.dout)
    leaves = [inputs.q.detach().clone().requires_grad_() for _ in range(3)]
    flash_attn_func(*leaves, causal=True).backward(inputs.dout)
    total = sum(leaf.grad.float() for leaf in leaves)
    bound = 3 * 2.0**-8 * sum(leaf.grad.float().abs() for leaf in leaves)
    assert ((x.grad.float() - total).abs() <= bound + 1e-5).all()


WITHOUT_KEYS: list[dict[str, Any]] = [
    *({"head_dim": head_dim} for head_dim in (64, 128, 256, 512)),
    *(
        {"num_heads_k": 2, "window": (30, 0), "dropout_p": 0.1, **more}
        for more in ({}, {"softcap": 4.0}, {"alibi": Alibi.per_head})
    ),
]


@pytest.mark.parametrize("features", WITHOUT_KEYS, ids=str)
def test_rows_without_keys_have_no_gradient(features: dict[str, Any]) -> None:
    """Whatever arrives there, with every feature that touches the scores."""
    case = make_case(seqlen_q=300, seqlen_k=70, causal=True, **features)
    inputs = inputs_of(case)
    result = run_forward_backward(case, inputs)
    keyless = slice(0, 230)
    assert not result.out[:, keyless].any() and not result.dq[:, keyless].any()
    assert (result.lse[:, :, keyless] == -torch.inf).all()
    inputs.dout[:, keyless] = 1e4
    inputs.dlse[:, :, keyless] = torch.nan  # what the derivative of most functions of -inf is
    assert_same_bits(run_forward_backward(case, inputs), result)


@pytest.mark.parametrize("head_dims", [(192, 128), (128, 64), (96, 32)], ids=str)
def test_keys_and_values_in_one_tensor(head_dims: tuple[int, int]) -> None:
    """As multi-head latent attention projects them: (batch, seqlen, heads, columns of both)."""
    case = make_case(seqlen_q=200, seqlen_k=300, num_heads_k=2, head_dim=head_dims[0], causal=True)
    case = replace(case, head_dim_v=head_dims[1])
    inputs = inputs_of(case)
    both = torch.cat([inputs.k, inputs.v], -1).requires_grad_()
    q = inputs.q.detach().requires_grad_()
    out = flash_attn_func(q, *both.split(head_dims, -1), causal=True)
    dq, dboth = torch.autograd.grad(out, (q, both), inputs.dout)
    dk, dv = dboth.split(head_dims, -1)
    expected = run_forward_backward(case, inputs, use_dlse=False)
    assert_same_bits(replace(expected, out=out.detach(), dq=dq, dk=dk, dv=dv), expected)
