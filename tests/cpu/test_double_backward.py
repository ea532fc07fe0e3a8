"""Second derivatives by torch's own transforms. Numbers: test_derivatives.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.library import opcheck
from torch.utils.checkpoint import checkpoint

from flash_attn_cuda import flash_attn_func
from tests.cases.masked_operators import backward_fields
from tests.cases.operators import gradients_arguments
from tests.cases.second_order import LEAVES
from tests.reference import attention

pytestmark = pytest.mark.usefixtures("one_thread")

_ops = torch.ops.flash_attn_cuda
EVERY = (0, 1, 2, 3, 4)


def make_inputs() -> list[Tensor]:
    """q (1, 3, 2, 2), k and v (1, 4, 1, 2), a bias (1, 1, 3, 4), a sink (2,)."""
    shapes = ((1, 3, 2, 2), (1, 4, 1, 2), (1, 4, 1, 2), (1, 1, 3, 4), (2,))
    return [torch.randn(shape, dtype=torch.float64) for shape in shapes]


def attend(*x: Tensor) -> tuple[Tensor, Tensor]:
    q, k, v, bias, sink = x
    options = {"causal": True, "return_attn_probs": True}
    return flash_attn_func(q, k, v, attn_mask=bias, sink=sink, **options)[:2]


def expected(*x: Tensor) -> tuple[Tensor, Tensor]:
    q, k, v, bias, sink = x
    return attention(q, k, v, causal=True, bias=bias, sink=sink)


def loss_of(function: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., Tensor]:
    def loss(*x: Tensor) -> Tensor:
        out, lse = function(*x)
        return out.sin().sum() + (lse * lse).sum()

    return loss


# -- against the reference -------------------------------------------------------------------------


@pytest.mark.parametrize("index", range(5))
@pytest.mark.parametrize("other", range(5))
def test_every_pair_of_arguments(index: int, other: int) -> None:
    """The gradient of one, by another alone: what the first does not want counts all the same."""
    inputs = make_inputs()

    def of(function: Callable[..., Any], outer: str) -> Tensor:
        loss = loss_of(function)

        def gradient(x: Tensor) -> Tensor:
            given = [x if i == other else y for i, y in enumerate(inputs)]
            return grad(loss, index)(*given)

        if outer == "forward":
            return jvp(gradient, (inputs[other],), (inputs[other].cos(),))[1]
        if outer == "reverse":
            return grad(lambda x: gradient(x).sin().sum())(inputs[other])
        leaves = [y.clone().requires_grad_(i in (index, other)) for i, y in enumerate(inputs)]
        (first,) = torch.autograd.grad(loss(*leaves), leaves[index], create_graph=True)
        return torch.autograd.grad(first.sin().sum(), leaves[other])[0]

    for outer in ("forward", "reverse", "autograd"):
        torch.testing.assert_close(of(attend, outer), of(expected, outer), msg=outer)


@pytest.mark.parametrize("index", [0, 1], ids=["out", "lse"])
def test_one_result_alone(index: int) -> None:
    inputs, moved = make_inputs(), make_inputs()

    def of(function: Callable[..., Any]) -> list[Any]:
        def loss(*x: Tensor) -> Tensor:
            return function(*x)[index].sin().sum()

        def tangent(*x: Tensor) -> Tensor:
            return jvp(loss, x, tuple(moved))[1]

        def gradients(*x: Tensor) -> tuple[Tensor, ...]:
            return grad(loss, EVERY)(*x)

        return [
            jvp(gradients, tuple(inputs), tuple(moved))[1],
            vjp(gradients, *inputs)[1](tuple(moved)),
            grad(tangent, EVERY)(*inputs),
        ]

    for found, wanted in zip(of(attend), of(expected), strict=True):
        torch.testing.assert_close(found, wanted)


# -- transforms ------------------------------------------------------------------------------------

NESTED: dict[str, Callable[..., Any]] = {
    "hessian": hessian,
    "forward over reverse": lambda f, n: jacfwd(jacrev(f, n), n),
    "reverse over forward": lambda f, n: jacrev(jacfwd(f, n), n),
    "reverse over reverse": lambda f, n: jacrev(jacrev(f, n), n),
}


@pytest.mark.parametrize("name", NESTED)
def test_hessians(name: str) -> None:
    inputs = make_inputs()
    found, wanted = (NESTED[name](loss_of(f), EVERY)(*inputs) for f in (attend, expected))
    torch.testing.assert_close(found, wanted)


def test_hessian_by_autograd() -> None:
    q, *others = make_inputs()
    for options in ({}, {"outer_jacobian_strategy": "forward-mode", "vectorize": True}):
        found, wanted = (
            torch.autograd.functional.hessian(lambda x, f=f: loss_of(f)(x, *others), q, **options)
            for f in (attend, expected)
        )
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("outer", ["reverse", "forward"])
def test_vmap_of_second_derivatives(outer: str, with_bias: bool) -> None:
    inputs = make_inputs()
    mapped = [torch.stack([x, 2.0 * x, x.flip(0)]) for x in inputs[: 5 if with_bias else 3]]

    def of(function: Callable[..., Any]) -> Any:
        def loss(*x: Tensor) -> Tensor:
            return loss_of(function)(*x, *([] if with_bias else inputs[3:]))

        def second(*x: Tensor) -> Any:
            argnums = tuple(range(len(x)))
            if outer == "forward":
                return jvp(grad(loss, argnums), x, tuple(y.cos() for y in x))[1]
            gradients = grad(loss, argnums)
            return grad(lambda *x: sum(y.sin().sum() for y in gradients(*x)), argnums)(*x)

        return vmap(second)(*mapped)

    def plain(*x: Tensor) -> tuple[Tensor, Tensor]:
        return flash_attn_func(*x[:3], return_attn_probs=True)[:2]

    if with_bias:
        torch.testing.assert_close(of(attend), of(expected))
    else:
        torch.testing.assert_close(of(plain), of(lambda *x: attention(*x[:3])))


def test_several_directions_at_once() -> None:
    """torch.autograd's own batches, of a double backward."""
    inputs = [x.requires_grad_() for x in make_inputs()]
    gradients = torch.autograd.grad(loss_of(attend)(*inputs), inputs, create_graph=True)
    directions = [torch.stack([torch.randn_like(x) for _ in range(3)]) for x in inputs]
    each = [
        torch.autograd.grad(gradients, inputs, x, retain_graph=True)
        for x in zip(*directions, strict=True)
    ]
    batched = torch.autograd.grad(gradients, inputs, directions, is_grads_batched=True)
    for x, y in zip(batched, zip(*each, strict=True), strict=True):
        torch.testing.assert_close(x, torch.stack(y))


@pytest.mark.parametrize("dropout_p", [0.0, 0.4])
def test_forward_mode_of_a_backward(dropout_p: float) -> None:
    """Of a graph that was made without it: only what comes into the backward moves."""
    leaves = [x.requires_grad_() for x in make_inputs()[:3]]
    out = flash_attn_func(*leaves, dropout_p)
    dout, moved = torch.randn_like(out), torch.randn_like(out)
    wanted = torch.autograd.grad(out, leaves, moved, retain_graph=True)
    with forward_ad.dual_level():
        found = torch.autograd.grad(out, leaves, forward_ad.make_dual(dout, moved))
        tangents = tuple(forward_ad.unpack_dual(x).tangent for x in found)
    torch.testing.assert_close(tangents, wanted)


def test_dual_leaves_and_a_backward() -> None:
    inputs, moved = make_inputs(), make_inputs()

    def of(function: Callable[..., Any]) -> tuple[Any, ...]:
        with forward_ad.dual_level():
            leaves = [x.clone().requires_grad_() for x in inputs]
            duals = [forward_ad.make_dual(x, t) for x, t in zip(leaves, moved, strict=True)]
            found = torch.autograd.grad(loss_of(function)(*duals), duals)
            return tuple(forward_ad.unpack_dual(x).tangent for x in found)

    torch.testing.assert_close(of(attend), of(expected))


@pytest.mark.parametrize("dropout_p", [0.0, 0.4])
def test_checkpointed(dropout_p: float) -> None:
    """What is recomputed is differentiated twice as well, with the mask of the forward."""
    leaves = [x.requires_grad_() for x in make_inputs()]

    def attend(*x: Tensor) -> Tensor:
        q, k, v, bias, sink = x
        return flash_attn_func(q, k, v, dropout_p, attn_mask=bias, sink=sink)

    def checkpointed(*x: Tensor) -> Tensor:
        return checkpoint(attend, *x, use_reentrant=False)

    results = []
    for function in (attend, checkpointed):
        torch.manual_seed(2)
        loss = function(*leaves).sin().sum()
        gradients = torch.autograd.grad(loss, leaves, create_graph=True)
        results.append(torch.autograd.grad(sum(x.sin().sum() for x in gradients), leaves))
    torch.testing.assert_close(*results)


def test_gradient_penalty() -> None:
    """backward() of a gradient's norm, which accumulates into leaves."""
    results = []
    for function in (attend, expected):
        torch.manual_seed(0)
        leaves = [x.requires_grad_() for x in make_inputs()]
        loss = loss_of(function)(*leaves)
        gradients = torch.autograd.grad(loss, leaves[:3], create_graph=True)
        (loss + sum(x.square().sum() for x in gradients)).backward()
        results.append([x.grad for x in leaves])
    torch.testing.assert_close(*results)


def dropped(*x: Tensor) -> Tensor:
    torch.manual_seed(7)
    return flash_attn_func(*x, 0.4)


def test_second_derivatives_have_the_mask_of_the_forward() -> None:
    inputs, moved, step = make_inputs()[:3], make_inputs()[:3], 1e-5

    def gradients(*x: Tensor) -> tuple[Tensor, ...]:
        return grad(lambda *x: dropped(*x).sin().sum(), (0, 1, 2))(*x)

    after, before = (
        gradients(*(x + sign * step * t for x, t in zip(inputs, moved, strict=True)))
        for sign in (1.0, -1.0)
    )
    differences = tuple((x - y) / (2.0 * step) for x, y in zip(after, before, strict=True))
    found = jvp(gradients, tuple(inputs), tuple(moved))[1]
    torch.testing.assert_close(found, differences, rtol=1e-6, atol=1e-7)
    by_two_backwards = vjp(gradients, *inputs)[1](tuple(moved))
    torch.testing.assert_close(by_two_backwards, found)


def test_opcheck_of_gradients_with_gradients() -> None:
    fields = backward_fields(packed=True)
    for name in (*LEAVES, "dout", "dlse"):
        fields[name] = fields[name].detach().requires_grad_()
    opcheck(_ops.attention_gradients, gradients_arguments(**fields))


# -- what is refused -------------------------------------------------------------------------------


def test_third_derivatives() -> None:
    q, *others = make_inputs()
    loss = loss_of(attend)

    def second(x: Tensor) -> Tensor:
        return grad(lambda x: grad(loss)(x, *others).sin().sum())(x)

    def along(x: Tensor) -> Tensor:
        return jvp(lambda x: grad(loss)(x, *others), (x,), (q,))[1]

    def by_autograd() -> None:
        leaf = q.clone().requires_grad_()
        found = loss(leaf, *others)
        for _ in range(2):
            (found,) = torch.autograd.grad(found.sin().sum(), leaf, create_graph=True)
        found.sum().backward()

    words = "^flash_attn_cuda does not implement third derivatives of attention"
    for third in (
        by_autograd,
        lambda: grad(lambda x: second(x).sum())(q),
        lambda: grad(lambda x: along(x).sum())(q),
    ):
        with pytest.raises(NotImplementedError, match=words):
            third()
    words = "^flash_attn_cuda does not implement forward mode over forward mode or double backward"
    for function in (along, second):
        with pytest.raises(NotImplementedError, match=words):
            jvp(function, (q,), (q,))


def test_second_derivatives_by_a_bias_under_a_softcap() -> None:
    """The cap does not see it, but its gradient what is capped."""
    q, k, v, bias, _ = make_inputs()

    def out(q: Tensor, bias: Tensor) -> Tensor:
        return flash_attn_func(q, k, v, softcap=1.5, attn_mask=bias).sin().sum()

    def wanted(q: Tensor, bias: Tensor) -> Tensor:
        return attention(q, k, v, softcap=1.5, bias=bias)[0].sin().sum()

    found, exact = (jvp(lambda x, f=f: grad(f)(q, x), (bias,), (bias,)) for f in (out, wanted))
    torch.testing.assert_close(found, exact)
    found, exact = (
        jvp(lambda x, y, f=f: grad(f, 1)(x, y), (q, bias), (q, bias)) for f in (out, wanted)
    )
    torch.testing.assert_close(found, exact)


def test_compiled_double_backward() -> None:
    """Compiled code has one backward alone, and torch says so."""
    torch._dynamo.reset()
    leaves = [x.requires_grad_() for x in make_inputs()]
    compiled = torch.compile(loss_of(attend), fullgraph=True, backend="aot_eager")
    gradients = torch.autograd.grad(compiled(*leaves), leaves, create_graph=True)
    wanted = torch.autograd.grad(loss_of(expected)(*leaves), leaves)
    torch.testing.assert_close(gradients, wanted)
    with pytest.raises(RuntimeError, match="does not currently support double backward"):
        torch.autograd.grad(gradients[0].sum(), leaves)
