"""Forward mode under torch.compile: one graph, or eagerly what no graph has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.exc import Unsupported
from torch.autograd import forward_ad
from torch.func import grad, jvp, vmap

from tests.cases.small_calls import attend, expected, make_inputs

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_functions_do_not_drop_tangents(backend: str) -> None:
    """They run eagerly there."""
    torch._dynamo.reset()
    inputs, tangents = tuple(make_inputs()), tuple(make_inputs())
    wanted = jvp(expected, inputs, tangents)
    compiled = torch.compile(attend, backend=backend)
    torch.testing.assert_close(compiled(*inputs), wanted[0])
    torch.testing.assert_close(jvp(compiled, inputs, tangents), wanted)
    with forward_ad.dual_level():
        duals = map(forward_ad.make_dual, inputs, tangents)
        found = [forward_ad.unpack_dual(x).tangent for x in compiled(*duals)]
    torch.testing.assert_close(tuple(found), wanted[1])


def penalty(function: Callable[..., Any], x: tuple[Tensor, ...], t: tuple[Tensor, ...]) -> Tensor:
    """What a training step may have of a derivative in a direction."""
    (out, lse), (tout, tlse) = jvp(function, x, t)
    return (out.sin() * tout.cos()).sum() + (lse * tlse).sum()


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_compiled_derivative_is_one_graph(dynamic: bool) -> None:
    """With gradients, which hang on points and tangents."""
    torch._dynamo.reset()
    leaves = [x.requires_grad_() for x in (*make_inputs(), *make_inputs())]
    settings = {"backend": "aot_eager", "fullgraph": True, "dynamic": dynamic}
    compiled = torch.compile(lambda *x: penalty(attend, x[:3], x[3:]), **settings)
    wanted = penalty(expected, tuple(leaves[:3]), tuple(leaves[3:]))
    found = compiled(*leaves)
    torch.testing.assert_close(found, wanted)
    of_graph, of_reference = (torch.autograd.grad(x, leaves) for x in (found, wanted))
    torch.testing.assert_close(of_graph, of_reference)


NESTED: dict[str, tuple[Callable[..., Any], bool]] = {  # and whether a graph has them
    "some": (lambda f: lambda q, k, v, t: jvp(lambda x: f(q, x, v), (k,), (2.0 * k,)), True),
    "mapped": (lambda f: vmap(lambda *x: jvp(lambda q: f(q, *x[1:3]), x[:1], x[3:])), True),
    "of_mapped": (lambda f: lambda *x: jvp(vmap(f), x[:3], (x[3], *x[1:3])), False),
    "of_gradient": (
        lambda f: lambda q, k, v, t: jvp(grad(lambda q: f(q, k, v)[0].sum()), (q,), (t,)),
        False,
    ),
    "gradient": (
        lambda f: (
            lambda q, k, v, t: grad(
                lambda q: jvp(lambda q: f(q, k, v)[0], (q,), (t,))[1].sin().sum()
            )(q)
        ),
        False,
    ),
}


@pytest.mark.parametrize("name", NESTED)
def test_compiled_transforms_of_derivatives(name: str) -> None:
    """What no graph has runs eagerly; in a full graph it cannot, and torch says so."""
    torch._dynamo.reset()
    make, is_traced = NESTED[name]
    inputs = [x[None] if "mapped" in name else x for x in (*make_inputs(), make_inputs()[0])]
    wanted = make(expected)(*inputs)
    torch.testing.assert_close(torch.compile(make(attend), backend="aot_eager")(*inputs), wanted)
    torch._dynamo.reset()
    whole = torch.compile(make(attend), backend="aot_eager", fullgraph=True)
    if is_traced:
        torch.testing.assert_close(whole(*inputs), wanted)
        return
    with pytest.raises(Unsupported, match="attention_under_transforms"):
        whole(*inputs)
