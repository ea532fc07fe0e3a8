"""Sequences that are parts of longer ones (AttentionCall.origin), on the CPU: parts give together
what the whole gives.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

from flash_attn_cuda.call.checks import check_call
from flash_attn_cuda.call.fields import INCOMING, OF_BACKWARD, READ, AttentionCall, Incoming
from flash_attn_cuda.context_parallel import ContextParallel
from flash_attn_cuda.operators.attention import run_backward_operator
from flash_attn_cuda.operators.derivatives import run_gradients_operator, run_operator
from flash_attn_cuda.operators.support import arguments_of
from tests.cases.operators import incoming_of
from tests.cases.parts import Documents, Inputs, Results, part_call, run_parts, run_whole

_ops = torch.ops.flash_attn_cuda

DOCUMENTS = {
    "one": Documents((150,), (150,), (48, 96), (32, 96)),
    "several": Documents((70, 0, 150, 33), (90, 20, 150, 33), (32, 96), (48, 64)),
    "fewer keys": Documents((140,), (60,), (64,), (16, 48)),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window_size_left": 20, "window_size_right": 7},
    "left": {"window_size_left": 5},
    "right": {"window_size_right": 30},
    "far": {"window_size_left": 0, "window_size_right": 1},
    "causal dropout": {"causal": True, "dropout_p": 0.3},
    "window dropout": {"window_size_left": 9, "window_size_right": 40, "dropout_p": 0.3},
    "softcap": {"softcap": 2.0, "causal": True},
}


def assert_same(found: Results, expected: Results, tolerance: float = 1e-12) -> None:
    names = ("out", "lse", "dq", "dk", "dv")
    ours = (found.out, found.lse, *found.gradients)
    theirs = (expected.out, expected.lse, *expected.gradients)
    for name, x, y in zip(names, ours, theirs, strict=True):
        torch.testing.assert_close(
            *(x.double(), y.double()), rtol=tolerance, atol=tolerance, msg=lambda m, n=name: n + m
        )


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("documents", DOCUMENTS)
@pytest.mark.parametrize("heads", [(4, 4), (4, 2)])
def test_parts_give_the_whole(documents: str, options: str, heads: tuple[int, int]) -> None:
    inputs = Inputs.random(DOCUMENTS[documents], heads)
    whole, rng_state = run_whole(DOCUMENTS[documents], inputs, **OPTIONS[options])
    parts = run_parts(DOCUMENTS[documents], inputs, rng_state, **OPTIONS[options])
    assert_same(parts, whole)


@pytest.mark.parametrize("options", ["plain", "causal", "window"])
@pytest.mark.parametrize("shape", [(4,), (4, 4)])
def test_alibi(options: str, shape: tuple[int, ...]) -> None:
    documents = DOCUMENTS["several"]
    inputs = Inputs.random(documents)
    given = {**OPTIONS[options], "alibi_slopes": torch.rand(shape) * 0.1}
    whole, _ = run_whole(documents, inputs, **given)
    assert_same(run_parts(documents, inputs, None, **given), whole)


def test_cuts_need_not_be_multiples_without_dropout() -> None:
    documents = Documents((50, 77), (61, 77), (13, 55), (7, 31))
    inputs = Inputs.random(documents)
    given = {"window_size_left": 11, "window_size_right": 3}
    whole, _ = run_whole(documents, inputs, **given)
    assert_same(run_parts(documents, inputs, None, **given), whole)


def test_sink_of_one_part() -> None:
    documents = DOCUMENTS["several"]
    inputs = Inputs.random(documents)
    sink = torch.randn(4, dtype=torch.float64)
    whole, _ = run_whole(documents, inputs, sink=sink, causal=True)
    out = torch.zeros_like(inputs.dout)
    weights = torch.zeros(*whole.lse.shape, dtype=torch.float64)
    for index, (of_q, of_k) in enumerate(documents.parts()):
        is_first = index % (len(documents.cuts_k) + 1) == 0
        call, rows, _ = part_call(
            documents, inputs, of_q, of_k, causal=True, sink=sink if is_first else None
        )
        part, lse, *_ = run_operator(call)
        weight = (lse - whole.lse[:, rows]).exp()
        weights[:, rows] += weight
        out[rows] += part * weight.T[..., None]
    torch.testing.assert_close(weights, torch.ones_like(weights), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(out, whole.out, rtol=1e-12, atol=1e-12)


def test_streams_are_of_heads() -> None:
    """A call of some of the heads draws what the call of all of them draws for these."""
    documents = Documents((64,), (64,), (), ())
    inputs = Inputs.random(documents, (4, 4))
    whole, rng_state = run_whole(documents, inputs, dropout_p=0.4)
    of_q, of_k = next(documents.parts())
    call, _, _ = part_call(documents, inputs, of_q, of_k, rng_state, dropout_p=0.4)
    assert call.origin is not None
    call.origin[0, 0] = 3
    last = replace(call, **{name: getattr(call, name)[:, 3:] for name in "qkv"})
    found = run_operator(last)
    torch.testing.assert_close(found.out, whole.out[:, 3:])
    assert torch.equal(found.rng_state, rng_state)


def test_a_given_state_is_not_drawn() -> None:
    q = torch.randn(1, 32, 2, 8)
    call = AttentionCall(q, q, q, dropout_p=0.5)
    found = run_operator(call)
    given = replace(call, rng_state=found.rng_state)
    before = torch.get_rng_state()
    again = run_operator(given)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(again.out, found.out) and torch.equal(again.rng_state, found.rng_state)
    assert again.rng_state.data_ptr() != found.rng_state.data_ptr()
    assert run_operator(replace(given, dropout_p=0.0)).rng_state.numel() == 0


@pytest.mark.parametrize("shift", [-(2**31), -(2**30), -500, 500, 2**30, 2**31 - 1])
@pytest.mark.parametrize("options", ["causal", "left", "window"])
def test_windows_that_do_not_reach(shift: int, options: str) -> None:
    documents = Documents((40, 30), (50, 20), (), ())
    inputs = Inputs.random(documents)
    of_q, of_k = next(documents.parts())
    call, _, _ = part_call(documents, inputs, of_q, of_k, **OPTIONS[options])
    assert call.origin is not None
    call.origin[:, 3] = shift
    out, lse, *_ = run_operator(call)
    sees_all = shift > 0 if options == "causal" else options == "left" and shift < 0
    incoming = Incoming(inputs.dout, None, inputs.dout, inputs.dlse, None)
    gradients = run_gradients_operator(call, incoming)[:3]
    if sees_all:
        whole, _ = run_whole(documents, inputs)
        torch.testing.assert_close(out, whole.out)
        assert all(x.all() for x in gradients)
    else:
        assert not out.any() and torch.equal(lse, torch.full_like(lse, -torch.inf))
        assert not any(x.any() for x in gradients)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_fp32_results(dtype: torch.dtype) -> None:
    documents = DOCUMENTS["several"]
    inputs = Inputs.random(documents, dtype=dtype)
    rounded, rng_state = run_whole(documents, inputs, causal=True, dropout_p=0.2)
    whole, _ = run_whole(
        documents, inputs, causal=True, dropout_p=0.2, fp32_results=True, rng_state=rng_state
    )
    assert rounded.out.dtype == dtype
    for x, y in zip((rounded.out, *rounded.gradients), (whole.out, *whole.gradients), strict=True):
        assert y.dtype == torch.float32
        assert torch.equal(y.to(dtype), x)
    parts = run_parts(documents, inputs, rng_state, causal=True, dropout_p=0.2)
    assert_same(parts, whole, tolerance=2e-2)  # out is rounded between forward and backward
    torch.testing.assert_close(parts.out, whole.out.double(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_fp32_results_are_no_less_than_the_inputs(dtype: torch.dtype) -> None:
    q = torch.randn(1, 5, 2, 8, dtype=dtype)
    call = AttentionCall(q, q, q, fp32_results=True)
    out, lse, *_ = run_operator(call)
    gradients = run_gradients_operator(call, Incoming(out, None, out, lse, None))[:3]
    assert all(x.dtype == dtype for x in (out, *gradients))


def test_results_into_given_tensors() -> None:
    documents = DOCUMENTS["several"]
    inputs = Inputs.random(documents, dtype=torch.bfloat16)
    of_q, of_k = list(documents.parts())[4]
    call, rows, _ = part_call(documents, inputs, of_q, of_k, causal=True)
    given = (inputs.dout[rows], None, inputs.dout[rows], inputs.dlse[:, rows].contiguous(), None)
    dq, dk, dv = (
        torch.full_like(x, torch.nan, dtype=torch.float32) for x in (call.q, call.k, call.v)
    )
    softmax_d = run_backward_operator(call, Incoming(*given, dq=dq, dk=dk, dv=dv))
    assert softmax_d.shape == call.lse_shape()
    for x, y in zip((dq, dk, dv), run_gradients_operator(call, Incoming(*given))[:3], strict=True):
        assert torch.equal(x, y)
    with pytest.raises(TypeError, match=r"^dk: dtype must be torch.float32"):
        run_backward_operator(call, Incoming(*given, dq=dq, dk=dk.bfloat16(), dv=dv))


def test_autograd_of_a_part() -> None:
    documents = DOCUMENTS["several"]
    inputs = Inputs.random(documents)
    of_q, of_k = list(documents.parts())[4]
    call, rows, _ = part_call(documents, inputs, of_q, of_k, causal=True, fp32_results=False)
    for x in (call.q, call.k, call.v):
        x.requires_grad_()
    results = run_operator(call)
    loss = (results.out * inputs.dout[rows]).sum()
    found = torch.autograd.grad(loss, (call.q, call.k, call.v))
    incoming = incoming_of(results, inputs.dout[rows])
    expected = run_gradients_operator(replace(call, q=call.q.detach()), incoming)[:3]
    for x, y in zip(found, expected, strict=True):
        assert torch.equal(x, y)
    with pytest.raises(NotImplementedError, match=r"^fp32_results: must be False"):
        run_operator(replace(call, fp32_results=True))


def changed(call: AttentionCall, **changes: Any) -> AttentionCall:
    return replace(call, **{name: x(call) if callable(x) else x for name, x in changes.items()})


def a_call(**options: Any) -> AttentionCall:
    documents = Documents((40, 30), (48, 32), (), ())
    inputs = Inputs.random(documents, dtype=torch.bfloat16)
    of_q, of_k = next(documents.parts())
    return part_call(documents, inputs, of_q, of_k, **options)[0]


REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "type": ({"origin": 3}, TypeError, "origin: must be a torch.Tensor"),
    "state": ({"rng_state": torch.zeros(2), "dropout_p": 0.5}, TypeError,
        "rng_state: dtype must be torch.int64"),
}  # fmt: skip


@pytest.mark.parametrize("refused", REFUSED)
def test_refusals(refused: str) -> None:
    changes, error, match = REFUSED[refused]
    with pytest.raises(error, match=f"^{match}"):
        check_call(changed(a_call(), **changes))


@pytest.mark.parametrize(
    ("margin", "error"), [(-1, ValueError), (True, TypeError), (1.5, TypeError)]
)
def test_a_margin_is_a_number_of_multiprocessors(margin: Any, error: type[Exception]) -> None:
    q = torch.randn(1, 8, 2, 8, dtype=torch.bfloat16)
    with pytest.raises(error, match=r"^sm_margin: must"):
        check_call(AttentionCall(q, q, q, sm_margin=margin))
    with pytest.raises(error, match=r"^sm_margin: must"):
        ContextParallel(sm_margin=margin)
    check_call(AttentionCall(q, q, q, sm_margin=8))


@pytest.mark.parametrize("row", [(0, 8, 0, 0), (0, 0, 17, 0), (0, -16, 0, 0)])
def test_places_that_dropout_cannot_count_from(row: tuple[int, ...]) -> None:
    call = a_call(dropout_p=0.5)
    assert call.origin is not None
    call.origin[1] = torch.tensor(row, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"^origin: must have multiples of 16"):
        run_operator(call)
    run_operator(replace(call, dropout_p=0.0))


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
def test_opcheck(dropout_p: float) -> None:
    call = a_call(causal=True, dropout_p=dropout_p, rng_state=torch.tensor([7, 4]))
    opcheck(_ops.attention, arguments_of(call, READ))
    found = run_operator(call)
    incoming = incoming_of(found, found.out.bfloat16())
    given: tuple[Any, ...] = arguments_of(call, OF_BACKWARD) + arguments_of(incoming, INCOMING)
    opcheck(_ops.attention_gradients, given)
    targets: list[Tensor] = [x.float() for x in (call.q, call.k, call.v)]
    for accumulate in (False, True):
        opcheck(_ops.attention_backward, (*given, *targets, accumulate))


def test_compiled_parts() -> None:
    call = a_call(causal=True)
    names = [name for name in READ if name not in ("q", "k", "v", "origin")]
    others = {name: getattr(call, name) for name in names}

    def forward(q: Tensor, k: Tensor, v: Tensor, origin: Tensor) -> Tensor:
        return run_operator(AttentionCall(q, k, v, origin=origin, **others))[0] * 2

    assert call.origin is not None
    given = (call.q, call.k, call.v, call.origin)
    compiled = torch.compile(forward, backend="aot_eager", fullgraph=True)
    found = compiled(*given)
    assert found.dtype == torch.float32
    assert torch.equal(found, forward(*given))
