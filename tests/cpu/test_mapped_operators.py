"""The operators under torch.vmap, by every form of a call, against the reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from flash_attn_cuda import flash_attn_func, flash_attn_varlen_func
from tests.cases.forms import FORMS, Outputs, dense, loss, masked, packed
from tests.cases.roads import Arrivals, arrivals

__all__ = ["arrivals"]  # pytest finds it here

# In what dimension inputs are mapped, and the batch of what then arrives.
MAPPED: dict[str, tuple[str, tuple[int | None, ...], int]] = {
    "all": ("dense", (0, 0, 0), 4),
    "elsewhere": ("dense", (1, None, 3), 4),
    "keys": ("dense", (None, 2, None), 4),
    "shared": ("masked", (0, None, 0, None, None), 4),
    "bias": ("masked", (None, 0, None, 0, None), 4),
    "sink": ("masked", (0, 0, 0, 0, 0), 2),
    "packed": ("packed", (0, None, 1), 0),
    "used": ("used", (0, 0, 0), 0),
}


@pytest.mark.parametrize("name", MAPPED)
def test_vmap(name: str, arrivals: Arrivals) -> None:
    """A larger batch where sequences are dense and a sink is the same for all entries, else entry
    by entry; with derivatives in a direction, and gradients, of which each entry has its own.
    """
    form, in_dims, batch = FORMS[MAPPED[name][0]], *MAPPED[name][1:]
    inputs = form.make_inputs()
    if in_dims[3:4] == (0,):
        inputs[3] = inputs[3].repeat(2, 1, 1, 1)
    stacked = [
        x if dim is None else torch.stack([x, x.flip(1) if x.dim() > 1 else 2.0 * x], dim)
        for x, dim in zip(inputs, in_dims, strict=True)
    ]

    def of(function: Callable[..., Outputs]) -> Any:
        def derivatives(*x: Tensor) -> Any:
            def outputs(*moved: Tensor) -> Any:
                return tuple(y.nan_to_num(neginf=0.0) for y in function(*moved, *x[3:]))

            along = torch.func.jvp(outputs, x[:3], x[:3])
            return along, torch.func.grad(lambda *y: loss(outputs(*y)), (0, 1, 2))(*x[:3])

        return torch.vmap(derivatives, in_dims)(*stacked)

    torch.testing.assert_close(of(form.attend), of(form.expected))
    assert not batch or {x.batch() for x in arrivals.forward} == {batch}


@pytest.mark.parametrize("index", range(5))
def test_gradients_through_vmap(index: int) -> None:
    """Where a mapped tensor does not say that it requires grad."""
    inputs = FORMS["masked"].make_inputs()
    x = torch.stack([inputs[index], inputs[index].flip(0)])

    def through(x: Tensor) -> Tensor:
        return loss(masked(*inputs[:index], x, *inputs[index + 1 :]))

    actual = torch.func.grad(lambda x: torch.vmap(through)(x).sum())(x)
    torch.testing.assert_close(actual, torch.stack([torch.func.grad(through)(each) for each in x]))


def test_vmap_with_slopes() -> None:
    inputs = [torch.stack([x, x.flip(1), 2 * x]) for x in FORMS["dense"].make_inputs()]
    for shape in ((4,), (2, 4), (3, 4), (3, 2, 4)):
        slopes = torch.rand(shape)
        dim = 0 if shape[0] == 3 else None
        actual = torch.vmap(lambda *x: dense(*x[:3], alibi_slopes=x[3])[0], (0, 0, 0, dim))(
            *inputs, slopes
        )
        each = [slopes] * 3 if dim is None else list(slopes)
        expected = [
            dense(*x, alibi_slopes=s)[0] for *x, s in zip(*inputs, each, strict=True)
        ]  # fmt: skip
        torch.testing.assert_close(actual, torch.stack(expected))


@pytest.mark.parametrize(("name", "mapped"), [("dense", 0), ("masked", 4), ("packed", 0)])
def test_vmap_with_dropout(name: str, mapped: int) -> None:
    inputs = FORMS[name].make_inputs()

    def attend(x: Tensor) -> Tensor:
        given = [*inputs[:mapped], x, *inputs[mapped + 1 :]]
        if name == "packed":
            return packed(*given, dropout_p=0.5)[0]
        return flash_attn_func(*given[:3], 0.5, sink=given[4] if mapped else None)

    both = torch.stack([inputs[mapped]] * 2)
    with pytest.raises(RuntimeError, match=r"^dropout_p: .*got randomness='error'"):
        torch.vmap(attend)(both)
    with pytest.raises(NotImplementedError, match=r"^dropout_p: .*randomness='same'.* a tensor"):
        torch.vmap(attend, randomness="same")(both)
    torch.manual_seed(0)
    out = torch.vmap(attend, randomness="different")(both)
    assert not torch.equal(out[0], out[1])
    if name != "dense":  # whose larger batch draws once
        torch.manual_seed(0)
        torch.testing.assert_close(out, torch.stack([attend(x) for x in both]))
    with pytest.raises(RuntimeError, match=r"dropout_p: .*got randomness='error'"):
        torch.compile(lambda x: torch.vmap(attend)(x), backend="aot_eager")(both)


def test_vmap_that_maps_nothing_of_a_call_with_dropout() -> None:
    inputs, others = FORMS["dense"].make_inputs(), torch.zeros(3, 1)

    def attend(x: Tensor) -> Tensor:
        return flash_attn_func(*inputs, 0.5) + x

    with pytest.raises(RuntimeError, match=r"^dropout_p: .*got randomness='error'"):
        torch.vmap(attend)(others)
    with pytest.raises(NotImplementedError, match=r"^dropout_p: .*'different'.* no tensor"):
        torch.vmap(attend, randomness="different")(others)
    out = torch.vmap(attend, randomness="same")(others)
    assert torch.equal(out[0], out[1]) and torch.equal(out[0], out[2])


def test_vmap_over_nothing() -> None:
    q, k, v = (torch.stack([x])[:0] for x in FORMS["dense"].make_inputs())
    assert torch.vmap(flash_attn_func)(q, k, v).shape == (0, 2, 7, 4, 24)
    gradients = torch.vmap(lambda *x: torch.func.vjp(dense, *x)[1](dense(*x)))(q, k, v)
    assert [x.shape for x in gradients] == [x.shape for x in (q, k, v)]
    rows = [torch.stack([x])[:0] for x in FORMS["packed"].make_inputs()]
    with pytest.raises(NotImplementedError, match=r"^torch.vmap: must map over at least one"):
        torch.vmap(packed)(*rows)


@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
def test_vmap_of_a_backward_alone(dropout_p: float) -> None:
    """Gradients for several dout of one call, whose dropout is that call's for all of them."""
    leaves = FORMS["dense"].make_inputs(requires_grad=True)
    slopes = torch.rand(2, 4)

    def attend(*x: Tensor) -> Tensor:
        return flash_attn_func(*x, dropout_p, alibi_slopes=slopes)

    torch.manual_seed(1)
    out = attend(*leaves)
    douts = torch.randn(3, *out.shape, dtype=out.dtype)
    each = [torch.autograd.grad(out, leaves, dout, retain_graph=True) for dout in douts]
    expected = tuple(torch.stack(x) for x in zip(*each, strict=True))
    batched = torch.autograd.grad(out, leaves, douts, is_grads_batched=True)
    torch.testing.assert_close(batched, expected)
    torch.manual_seed(1)
    _, vjp = torch.func.vjp(attend, *(x.detach() for x in leaves))
    torch.testing.assert_close(torch.vmap(vjp)(douts), expected)


def test_vmap_over_bad_contents_names_them() -> None:
    x = torch.randn(6, 2, 8)
    cu_seqlens = torch.tensor([[0, 3, 6], [0, 7, 6]], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"^cu_seqlens_q: must not decrease, got 6 at index 2"):
        torch.vmap(lambda cu: flash_attn_varlen_func(x, x, x, cu, cu, 6, 6))(cu_seqlens)
