"""The custom operators: opcheck, compile, export, autograd, torch.func, modes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck

from flash_attn_cuda import flash_attn_func, flash_attn_qkvpacked_func
from flash_attn_cuda.interface import _flash_attn_backward, _flash_attn_forward
from tests.cases.operators import arguments, backward_arguments, gradients_arguments
from tests.reference import attention, attention_with_gradients

_ops = torch.ops.flash_attn_cuda
SCALE = 0.3
OPTIONS = {"softmax_scale": SCALE, "causal": True}


def make_inputs(dtype: torch.dtype = torch.float64, requires_grad: bool = False) -> list[Tensor]:
    """q (2, 7, 4, 16), k and v (2, 9, 2, 16)."""
    shapes = ((2, 7, 4, 16), (2, 9, 2, 16), (2, 9, 2, 16))
    return [torch.randn(shape, dtype=dtype, requires_grad=requires_grad) for shape in shapes]


def both_outputs(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    out, lse, _ = flash_attn_func(q, k, v, softmax_scale=SCALE, causal=True, return_attn_probs=True)
    return out, lse


def expected_outputs(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return attention(q, k, v, softmax_scale=SCALE, causal=True)


def loss(outputs: tuple[Tensor, ...]) -> Tensor:
    return sum((x.sin() * (i + 1)).sum() for i, x in enumerate(outputs))


def test_opcheck_forward() -> None:
    for requires_grad in (False, True):
        inputs = make_inputs(requires_grad=requires_grad)
        opcheck(_ops.attention, arguments(*inputs, **OPTIONS))


def backward_inputs() -> dict[str, Any]:
    q, k, v = make_inputs()
    out, lse, *_ = _ops.attention(*arguments(q, k, v, **OPTIONS))
    given = {"dout": torch.randn_like(out), "q": q, "k": k, "v": v, "out": out}
    return {**given, "softmax_lse": lse}


@pytest.mark.parametrize("with_dlse", [False, True])
def test_opcheck_backward(with_dlse: bool) -> None:
    given = {**backward_inputs(), **OPTIONS}
    given["dlse"] = torch.randn_like(given["softmax_lse"]) if with_dlse else None
    targets = {f"d{name}": torch.empty_like(given[name]) for name in "qkv"}
    opcheck(_ops.attention_backward, backward_arguments(**given, **targets))
    opcheck(_ops.attention_backward, backward_arguments(**given, dk=targets["dk"]))


@pytest.mark.parametrize("missing", ["nothing", "dout", "dlse"])
def test_opcheck_gradients(missing: str) -> None:
    given = {**backward_inputs(), **OPTIONS}
    given["dlse"] = given["softmax_lse"].sin()
    given = {name: x for name, x in given.items() if name != missing}
    opcheck(_ops.attention_gradients, gradients_arguments(**given))


def test_private_functions_agree_with_the_reference() -> None:
    q, k, v = make_inputs()
    out, lse, s_dmask, rng_state = _flash_attn_forward(
        q=q, k=k, v=v, dropout_p=0.0, softmax_scale=SCALE, causal=False, window_size_left=-1,
        window_size_right=0, softcap=0.0, alibi_slopes=None, return_softmax=False,
    )  # fmt: skip
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    dq, dk, dv = (torch.full_like(x, torch.nan) for x in (q, k, v))
    softmax_d = _flash_attn_backward(
        dout, q, k, v, out, lse, dq, dk, dv, 0.0, SCALE, True, -1, -1, 0.0, None, False, rng_state,
        dlse=dlse,
    )  # fmt: skip
    expected = attention_with_gradients(q, k, v, dout, dlse, softmax_scale=SCALE, causal=True)
    for name, actual in {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv}.items():
        torch.testing.assert_close(
            actual, expected.tensors()[name], msg=lambda m, n=name: f"{n} {m}"
        )
    assert s_dmask.numel() == rng_state.numel() == 0
    assert softmax_d.shape == (2, 4, 128)


def test_backward_writes_only_wanted_gradients_into_any_strides() -> None:
    dout, q, k, v, out, lse = backward_inputs().values()
    packed = torch.full((2, 9, 2, 2, 16), torch.nan, dtype=q.dtype)
    options = (0.0, SCALE, True, -1, -1, 0.0, None, False)
    _flash_attn_backward(dout, q, k, v, out, lse, None, packed[:, :, 0], packed[:, :, 1], *options)
    expected = attention_with_gradients(q, k, v, dout, softmax_scale=SCALE, causal=True)
    torch.testing.assert_close(packed, torch.stack((expected.dk, expected.dv), 2))


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 2)], ids=str)
@pytest.mark.parametrize("outputs", ["out", "lse", "both"])
def test_some_inputs_and_some_outputs(wanted: tuple[int, ...], outputs: str) -> None:
    inputs = make_inputs()
    for index in wanted:
        inputs[index].requires_grad_()
    leaves = [inputs[index] for index in wanted]
    pick = {"out": slice(0, 1), "lse": slice(1, 2), "both": slice(0, 2)}[outputs]
    if pick == slice(1, 2) and wanted == (2,):
        grads = torch.autograd.grad(loss(both_outputs(*inputs)[pick]), leaves)
        assert not grads[0].any()  # lse does not depend on v
        return
    actual = torch.autograd.grad(loss(both_outputs(*inputs)[pick]), leaves, allow_unused=True)
    expected = torch.autograd.grad(loss(expected_outputs(*inputs)[pick]), leaves, allow_unused=True)
    for x, y in zip(actual, expected, strict=True):
        torch.testing.assert_close(x, torch.zeros_like(x) if y is None else y)


def test_no_graph_without_need() -> None:
    out, lse = both_outputs(*make_inputs())
    assert out.grad_fn is None and lse.grad_fn is None
    with torch.no_grad():
        assert both_outputs(*make_inputs(requires_grad=True))[0].grad_fn is None
    with torch.inference_mode():
        both_outputs(*make_inputs())


def test_debug_outputs_are_not_differentiable() -> None:
    options = (0.0, SCALE, True, -1, -1, 0.0, None, False)
    outputs = _flash_attn_forward(*make_inputs(requires_grad=True), *options)
    assert [x.requires_grad for x in outputs] == [True, True, False, False]


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compile(backend: str) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(both_outputs, fullgraph=True, backend=backend)
    leaves = make_inputs(requires_grad=True)
    actual = torch.autograd.grad(loss(compiled(*leaves)), leaves)
    expected = torch.autograd.grad(loss(expected_outputs(*leaves)), leaves)
    torch.testing.assert_close(actual, expected)


def test_compile_with_dynamic_shapes_and_other_arguments() -> None:
    torch._dynamo.reset()

    def model(qkv: Tensor) -> Tensor:
        return flash_attn_qkvpacked_func(qkv * 2.0, window_size=(-1, 0), dropout_p=0.0)

    compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=True)
    for batch, seqlen in ((2, 5), (3, 9), (4, 11)):
        qkv = torch.randn(batch, seqlen, 3, 2, 8, dtype=torch.float64, requires_grad=True)
        expected, _ = attention(*(qkv * 2.0).unbind(2), causal=True)
        actual = compiled(qkv)
        torch.testing.assert_close(actual, expected)
        (x,), (y,) = (torch.autograd.grad(z.sin().sum(), qkv) for z in (actual, expected))
        torch.testing.assert_close(x, y)


class Windowed(torch.nn.Module):
    def forward(self, q: Tensor, left: int) -> Tensor:
        return flash_attn_func(q, q, q, window_size=(left, 0))


def test_windows_of_symbols() -> None:
    torch._dynamo.reset()
    q = make_inputs()[0]
    compiled = torch.compile(Windowed(), fullgraph=True, backend="aot_eager")
    for left in (3, 4, 5, -1):
        torch.testing.assert_close(compiled(q, left), Windowed()(q, left))
    sizes = {"q": None, "left": torch.export.Dim.DYNAMIC}
    for strict in (False, True):
        program = torch.export.export(Windowed(), (q, 3), dynamic_shapes=sizes, strict=strict)
        torch.testing.assert_close(program.module()(q, 5), Windowed()(q, 5))


class Module(torch.nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flash_attn_func(q, k, v, causal=True)


def test_export_keeps_the_operator() -> None:
    inputs = tuple(make_inputs(torch.float32))
    batch = torch.export.Dim("batch", min=1, max=64)
    program = torch.export.export(Module(), inputs, dynamic_shapes=({0: batch},) * 3)
    assert "flash_attn_cuda.attention" in str(program.graph)
    more = tuple(torch.cat((x, x)) for x in inputs)
    torch.testing.assert_close(program.module()(*more), Module()(*more))


@pytest.mark.parametrize("head_dim", [16, 20])
def test_fake_cuda_tensors(head_dim: int) -> None:
    """Shapes on CUDA without a device; a head_dim that is no multiple of 8 is padded and cut."""
    with FakeTensorMode():
        q, k = (torch.empty(2, s, 4, head_dim, device="cuda", dtype=torch.bfloat16) for s in (7, 9))
        out, lse, s_dmask = flash_attn_func(q, k, k, return_attn_probs=True)
        assert out.shape == q.shape and out.dtype == q.dtype and out.device == q.device
        assert lse.shape == (2, 4, 7) and lse.dtype == torch.float32
        assert s_dmask.shape == (0,) and s_dmask.dtype == q.dtype


def test_meta_tensors() -> None:
    q = torch.empty(2, 7, 4, 16, device="meta", dtype=torch.bfloat16, requires_grad=True)
    out = flash_attn_func(q, q, q)
    out.sum().backward()
    assert out.shape == q.shape and q.grad.shape == q.shape


def test_func_grad() -> None:
    inputs = make_inputs()
    actual = torch.func.grad(lambda *x: loss(both_outputs(*x)), argnums=(0, 1, 2))(*inputs)
    expected = torch.func.grad(lambda *x: loss(expected_outputs(*x)), argnums=(0, 1, 2))(*inputs)
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("in_dims", [(0, 0, 0), (1, None, 3), (None, 2, None)], ids=str)
def test_vmap_and_vmap_of_grad(in_dims: tuple[int | None, ...]) -> None:
    inputs = [
        x if dim is None else torch.stack([x, x.flip(1), 2 * x], dim)
        for x, dim in zip(make_inputs(), in_dims, strict=True)
    ]

    def one_by_one(function: Callable[..., tuple[Tensor, ...]]) -> list[Tensor]:
        slices = [
            [x if dim is None else x.select(dim, i) for x, dim in zip(inputs, in_dims, strict=True)]
            for i in range(3)
        ]
        return [torch.stack(x) for x in zip(*(function(*x) for x in slices), strict=True)]

    actual = torch.vmap(both_outputs, in_dims)(*inputs)
    torch.testing.assert_close(list(actual), one_by_one(expected_outputs))
    gradient = torch.func.grad(lambda *x: loss(both_outputs(*x)), argnums=(0, 1, 2))
    torch.testing.assert_close(
        list(torch.vmap(gradient, in_dims)(*inputs)),
        one_by_one(torch.func.grad(lambda *x: loss(expected_outputs(*x)), argnums=(0, 1, 2))),
    )


@pytest.mark.parametrize("slopes_dim", [None, 0])
def test_vmap_with_slopes(slopes_dim: int | None) -> None:
    inputs = [torch.stack([x, x.flip(1), 2 * x]) for x in make_inputs()]
    for shape in ((4,), (2, 4)):
        slopes = torch.rand(shape if slopes_dim is None else (3, *shape))
        actual = torch.vmap(
            lambda q, k, v, s: flash_attn_func(q, k, v, alibi_slopes=s),
            in_dims=(0, 0, 0, slopes_dim),
        )(*inputs, slopes)
        each = [slopes] * 3 if slopes_dim is None else list(slopes)
        expected = [
            flash_attn_func(*x, alibi_slopes=s)
            for *x, s in zip(*inputs, each, strict=True)
        ]  # fmt: skip
        torch.testing.assert_close(actual, torch.stack(expected))


def test_vmap_with_dropout() -> None:
    q, k, v = (torch.stack([x, x]) for x in make_inputs())

    def attend(*x: Tensor) -> tuple[Tensor, ...]:
        return flash_attn_func(*x, 0.5, return_attn_probs=True)

    with pytest.raises(RuntimeError, match=r"^dropout_p: .*randomness='different'"):
        torch.vmap(attend)(q, k, v)
    with pytest.raises(NotImplementedError, match=r"^dropout_p: .*randomness='same'.* a tensor"):
        torch.vmap(attend, randomness="same")(q, k, v)
    out, lse, s_dmask = torch.vmap(attend, randomness="different")(q, k, v)
    assert s_dmask.shape == (2, 2, 4, 7, 9) and torch.equal(lse[0], lse[1])
    assert not torch.equal(out[0], out[1])


def test_vmap_that_maps_nothing_of_a_call_with_dropout() -> None:
    inputs, others = make_inputs(), torch.zeros(3, 1)

    def attend(x: Tensor) -> Tensor:
        return flash_attn_func(*inputs, 0.5) + x

    with pytest.raises(RuntimeError, match=r"^dropout_p: .*got randomness='error'"):
        torch.vmap(attend)(others)
    with pytest.raises(NotImplementedError, match=r"^dropout_p: .*'different'.* no tensor"):
        torch.vmap(attend, randomness="different")(others)
    out = torch.vmap(attend, randomness="same")(others)
    assert torch.equal(out[0], out[1]) and torch.equal(out[0], out[2])


def test_vmap_over_nothing() -> None:
    q, k, v = (torch.stack([x, x])[:0] for x in make_inputs())
    assert torch.vmap(flash_attn_func)(q, k, v).shape == q.shape
    gradients = torch.vmap(lambda *x: torch.func.vjp(flash_attn_func, *x)[1](x[0]))(q, k, v)
    assert [x.shape for x in gradients] == [x.shape for x in (q, k, v)]


@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
def test_vmap_of_a_backward_alone(dropout_p: float) -> None:
    """Gradients for several dout of one call, whose dropout is that call's for all of them."""
    leaves = make_inputs(requires_grad=True)
    out = flash_attn_func(*leaves, dropout_p, alibi_slopes=torch.rand(2, 4))
    douts = torch.randn(3, *out.shape, dtype=out.dtype)
    each = [torch.autograd.grad(out, leaves, dout, retain_graph=True) for dout in douts]
    batched = torch.autograd.grad(out, leaves, douts, is_grads_batched=True)
    torch.testing.assert_close(batched, tuple(torch.stack(x) for x in zip(*each, strict=True)))


def test_opcheck_with_every_feature() -> None:
    slopes = torch.rand(2, 4)
    options = {
        "dropout_p": 0.4, "softmax_scale": SCALE, "window_size_left": 5, "window_size_right": 1,
        "softcap": 1.5, "alibi_slopes": slopes, "deterministic": True, "return_softmax": True,
    }  # fmt: skip
    for requires_grad in (False, True):
        inputs = make_inputs(requires_grad=requires_grad)
        opcheck(_ops.attention, arguments(*inputs, **options))
    q, k, v = make_inputs()
    out, lse, _, state, _ = _ops.attention(*arguments(q, k, v, **options))
    results = {"out": out, "softmax_lse": lse, "rng_state": state}
    incoming = {"dout": out.sin(), "dlse": lse.sin()}
    given = gradients_arguments(q=q, k=k, v=v, **options, **results, **incoming)
    opcheck(_ops.attention_gradients, given)


def test_checkpointed_dropout_is_that_of_the_forward() -> None:
    """What is recomputed in the backward drops what the forward dropped, compiled or not."""
    torch._dynamo.reset()
    leaves = make_inputs(requires_grad=True)

    def attend(*x: Tensor) -> Tensor:
        return flash_attn_func(*x, 0.5)

    def checkpointed(*x: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(attend, *x, use_reentrant=False)

    results = []
    for function in (attend, checkpointed, torch.compile(checkpointed, backend="aot_eager")):
        torch.manual_seed(2)
        out = function(*leaves)
        results.append((out, *torch.autograd.grad(out.sin().sum(), leaves)))
    torch.testing.assert_close(results[1], results[0])
    torch.testing.assert_close(results[2], results[0])


def test_backend_keeps_its_precision_under_autocast() -> None:
    """The operators compute in the dtype given; only the public functions cast."""
    q, k, v = make_inputs(torch.float32)
    expected = _ops.attention(*arguments(q, k, v, **OPTIONS))[0]
    with torch.autocast("cpu", torch.bfloat16):
        actual = _ops.attention(*arguments(q, k, v, **OPTIONS))[0]
    assert torch.equal(actual, expected)


def test_default_device_does_not_leak_in() -> None:
    q, k, v = make_inputs(requires_grad=True)
    with torch.device("meta"):
        out = flash_attn_func(q, k, v, causal=True)
        (dq,) = torch.autograd.grad(out.sum(), q)
    assert out.device.type == dq.device.type == "cpu"
