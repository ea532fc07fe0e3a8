"""Forward mode alone: its transforms, functions and roads. Numbers: test_derivatives.py."""

from __future__ import annotations

import cProfile
import pstats
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import jacfwd, jvp, linearize, vmap

from flash_attn_cuda import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
)
from flash_attn_cuda.call.fields import Results
from flash_attn_cuda.functions.interface import _flash_attn_backward, _flash_attn_forward
from flash_attn_cuda.operators import attention as attention_operators
from flash_attn_cuda.operators import second_order as second_order_operators
from flash_attn_cuda.operators.support import is_plain_cuda
from tests.cases.masked_operators import backward_fields
from tests.cases.memory import PeakBytes
from tests.cases.operators import jvp_arguments
from tests.cases.roads import Extension, extension
from tests.cases.small_calls import attend, expected, make_inputs, tensors
from tests.reference import attention

__all__ = ["extension"]  # pytest finds it here

pytestmark = pytest.mark.usefixtures("one_thread")


# -- other functions -------------------------------------------------------------------------------


def test_packed_tensors() -> None:
    qkv, tangent = tensors((2, 5, 3, 4, 8), (2, 5, 3, 4, 8))
    wanted = jvp(lambda x: expected(*x.unbind(2))[0], (qkv,), (tangent,))
    found = jvp(lambda x: flash_attn_qkvpacked_func(x, causal=True), (qkv,), (tangent,))
    torch.testing.assert_close(found, wanted)
    q, (kv, t_kv) = qkv[:, :, 0], (x[:, :, 1:] for x in (qkv, tangent))
    wanted = jvp(lambda x: expected(q, *x.unbind(2))[0], (kv,), (t_kv,))
    found = jvp(lambda x: flash_attn_kvpacked_func(q, x, causal=True), (kv,), (t_kv,))
    torch.testing.assert_close(found, wanted)


def test_chunks() -> None:
    """Which are sequences of their own."""
    inputs, tangents = make_inputs(), make_inputs()
    chunk = torch.arange(6) // 3
    mask = chunk[1:, None] == chunk

    def wanted(*x: Tensor) -> Tensor:
        return attention(*x, causal=True, mask=mask[None, None])[0]

    def found(*x: Tensor) -> Tensor:
        return flash_attn_func(*x, causal=True, attention_chunk=3)

    made = (jvp(f, tuple(inputs), tuple(tangents)) for f in (found, wanted))
    torch.testing.assert_close(*made)


def test_autocast() -> None:
    """q, k and v are cast, and so are their tangents."""
    inputs, tangents = tensors(*[(2, 5, 4, 8)] * 3), tensors(*[(2, 5, 4, 8)] * 3)
    with torch.autocast("cpu", torch.bfloat16):
        points, directions = (tuple(x.float() for x in made) for made in (inputs, tangents))
        found = jvp(lambda *x: attend(*x)[0], points, directions)
    assert all(x.dtype == torch.bfloat16 for x in found)
    wanted = jvp(lambda *x: expected(*x)[0], tuple(inputs), tuple(tangents))
    for x, y in zip(found, wanted, strict=True):
        torch.testing.assert_close(x.double(), y, rtol=0.05, atol=0.05)


# -- transforms ------------------------------------------------------------------------------------


def test_dual_tensors_within_no_grad() -> None:
    inputs, tangents = make_inputs(), make_inputs()
    wanted = jvp(expected, tuple(inputs), tuple(tangents))[1]
    with torch.no_grad(), forward_ad.dual_level():
        duals = [forward_ad.make_dual(x, t) for x, t in zip(inputs, tangents, strict=True)]
        found = [forward_ad.unpack_dual(x) for x in attend(*duals)]
        assert forward_ad.unpack_dual(attend(*inputs)[0]).tangent is None
    torch.testing.assert_close(tuple(x.tangent for x in found), wanted)
    torch.testing.assert_close(tuple(x.primal for x in found), expected(*inputs))


def test_linearize() -> None:
    inputs, tangents = make_inputs(), make_inputs()
    out, derivative = linearize(lambda *x: attend(*x)[0], *inputs)
    wanted, tangent = jvp(lambda *x: expected(*x)[0], tuple(inputs), tuple(tangents))
    torch.testing.assert_close(out, wanted)
    torch.testing.assert_close(derivative(*tangents), tangent)


def test_jacfwd() -> None:
    inputs = tensors((1, 3, 2, 2), (1, 4, 1, 2), (1, 4, 1, 2))
    for found, wanted in zip(
        *(jacfwd(f, (0, 1, 2))(*inputs) for f in (attend, expected)), strict=True
    ):
        torch.testing.assert_close(found, wanted)


MAPPED = [(0, 0, 0, 0), (None, 0, None, 0), (0, None, 2, None), (None, None, None, 0)]


@pytest.mark.parametrize("in_dims", MAPPED, ids=str)
def test_vmap(in_dims: tuple[int | None, ...]) -> None:
    """Of q, k, v and q's tangent."""
    inputs = [
        x if dim is None else torch.stack([x, 2.0 * x.flip(1)], dim)
        for x, dim in zip([*make_inputs(), make_inputs()[0]], in_dims, strict=True)
    ]

    def of(function: Callable[..., Any]) -> Any:
        def along(*x: Tensor) -> Any:
            return jvp(lambda q: function(q, *x[1:3]), (x[0],), (x[3],))[1]

        return vmap(along, in_dims)(*inputs)

    torch.testing.assert_close(of(attend), of(expected))


def test_vmap_with_a_bias_and_a_sink() -> None:
    q, k, v = make_inputs()
    bias, sink = tensors((3, 1, 4, 5, 6), (4,))
    tangents = torch.randn_like(bias)

    def of(function: Callable[..., Any]) -> Any:
        return vmap(lambda x, t: jvp(function, (x, sink), (t, sink)))(bias, tangents)

    found = of(lambda x, s: flash_attn_func(q, k, v, attn_mask=x, sink=s))
    torch.testing.assert_close(found, of(lambda x, s: attention(q, k, v, bias=x, sink=s)[0]))


def by_torch_func(q: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:
    out, tangent = jvp(lambda x: flash_attn_func(x, *rest, softcap=2.0), (q,), (q,))
    return out, tangent


def by_dual_tensors(q: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:
    with forward_ad.dual_level():
        found = flash_attn_func(forward_ad.make_dual(q, q), *rest, softcap=2.0)
        out, tangent = forward_ad.unpack_dual(found)
        return out.clone(), tangent


@pytest.mark.parametrize("of", [by_torch_func, by_dual_tensors])
def test_forward_mode_on_a_gpu(of: Callable[..., Any], request: pytest.FixtureRequest) -> None:
    """The extension runs both halves with no dispatcher between; where a mode watches, operators
    do.
    """
    inputs = [x.bfloat16() for x in make_inputs()]
    wanted = of(*inputs)
    extension: Extension = request.getfixturevalue("extension")
    torch.testing.assert_close(of(*inputs), wanted)
    assert len(extension.calls) == 2
    with PeakBytes():
        of(*inputs)
    assert len(extension.calls) == 2


@pytest.mark.usefixtures("extension")
def test_directions_in_a_batch_are_not_plain() -> None:
    """A wrapper of is_grads_batched is a Tensor without memory."""
    x, seen = torch.zeros(2, 3), []
    assert is_plain_cuda((x, None, 0.5))
    torch._vmap_internals._vmap(lambda row: seen.append(is_plain_cuda((row,))) or row)(x)
    assert seen == [False]


def test_what_the_extension_refuses_has_the_words_of_checks(extension: Extension) -> None:
    extension.error = RuntimeError("refused")
    given = jvp_arguments(**backward_fields(packed=False), tq=torch.zeros(2, 7, 4, 8).double())
    with pytest.raises(ValueError, match=r"^tq: must have shape \(2, 7, 4, 16\), got"):
        second_order_operators.jvp_on_cuda(*given)


def test_few_functions_are_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose number is host time that does not depend on the machine: 2,900 where tensors alone pass
    through torch.func, over 9,000 where all arguments do.
    """
    inputs = tuple(make_inputs())
    out, lse = attend(*inputs)
    empty = torch.empty(0), torch.empty(0, dtype=torch.int64)
    found = Results(out, lse, *empty)
    monkeypatch.setattr(attention_operators, "forward_on_cpu", lambda *_: found)
    monkeypatch.setattr(
        second_order_operators, "jvp_on_cpu", lambda *_: (out.clone(), lse.clone(), empty[0])
    )
    jvp(attend, inputs, inputs)
    profile = cProfile.Profile()
    profile.runcall(jvp, attend, inputs, inputs)
    assert pstats.Stats(profile).total_calls < 3000


# -- dropout that a forward draws ------------------------------------------------------------------


def dropped(*x: Tensor) -> Tensor:
    torch.manual_seed(7)
    return flash_attn_func(*x, 0.4)


def test_the_tangent_has_the_mask_of_the_forward() -> None:
    inputs, tangents, step = make_inputs(), make_inputs(), 1e-5
    out, tangent = jvp(dropped, tuple(inputs), tuple(tangents))
    assert torch.equal(out, dropped(*inputs))
    after, before = (
        dropped(*(x + sign * step * t for x, t in zip(inputs, tangents, strict=True)))
        for sign in (1.0, -1.0)
    )
    torch.testing.assert_close(tangent, (after - before) / (2.0 * step), rtol=1e-7, atol=1e-7)


def test_vmap_of_tangents_has_one_mask() -> None:
    """Where the call itself is not mapped; else each entry has its own."""
    inputs, directions = make_inputs(), torch.randn(3, 2, 5, 4, 8).double()

    def along(t: Tensor) -> Tensor:
        return jvp(lambda q: dropped(q, *inputs[1:]), (inputs[0],), (t,))[1]

    found = vmap(along, randomness="same")(directions)
    torch.testing.assert_close(found, torch.stack([along(t) for t in directions]))


# -- what is refused -------------------------------------------------------------------------------


FORWARD_MODE = r": must not carry a forward-mode gradient, got a dual tensor$"


def test_slopes_have_no_tangent() -> None:
    inputs, slopes = make_inputs(), torch.ones(4)

    def of_slopes(x: Tensor) -> Tensor:
        return flash_attn_func(*inputs, alibi_slopes=x)

    def of_dual(x: Tensor) -> None:
        with torch.no_grad(), forward_ad.dual_level():
            of_slopes(forward_ad.make_dual(x, x))

    mapped = torch.vmap(of_slopes)
    for derivative in (
        of_dual,
        lambda x: jvp(of_slopes, (x,), (x,)),
        lambda x: jvp(lambda x: mapped(torch.stack([x, x])), (x,), (x,)),
    ):
        with pytest.raises(NotImplementedError, match="^alibi_slopes" + FORWARD_MODE):
            derivative(slopes)


def test_private_functions_have_no_tangent() -> None:
    q, k, v = make_inputs()
    options = (0.0, 0.3, False, -1, -1, 0.0, None, False)
    out, lse, *_ = _flash_attn_forward(q, k, v, *options)
    with pytest.raises(NotImplementedError, match="^k" + FORWARD_MODE):
        jvp(lambda x: _flash_attn_forward(q, x, v, *options)[0], (k,), (k,))
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(out, out)
        with pytest.raises(NotImplementedError, match="^dout" + FORWARD_MODE):
            _flash_attn_backward(dual, q, k, v, out, lse, None, None, None, *options)


def test_forward_mode_over_forward_mode() -> None:
    q, k, v = make_inputs()

    def tangent(x: Tensor) -> Tensor:
        return jvp(lambda x: attend(x, k, v)[0], (x,), (q,))[1]

    words = "^flash_attn_cuda does not implement forward mode over forward mode"
    for function in (lambda: jvp(tangent, (q,), (q,)), lambda: jacfwd(jacfwd(attend))(q, k, v)):
        with pytest.raises(NotImplementedError, match=words):
            function()
    # The tangent moves alone: this is linear.
    found = jvp(lambda t: jvp(lambda x: attend(x, k, v)[0], (q,), (t,))[1], (q,), (q,))
    torch.testing.assert_close(found[1], found[0])
