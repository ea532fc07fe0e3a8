"""`out=` of packed sequences and of caches: the result is written there, or the call is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from flash_attn_cuda import (
    BlockSparsity,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
)
from tests.cases.harness import DEVICE
from tests.cases.roads import Extension, extension

__all__ = ["extension"]  # pytest finds it here

DEVICES = ["cpu", pytest.param(DEVICE, marks=pytest.mark.gpu)]
HEAD_DIMS = [16, 11]  # as kernels read it, and padded for them


def normal(device: str, *shape: int) -> Tensor:
    return torch.randn(shape).to(device, torch.bfloat16)


def int32(device: str, *values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def packed(device: str = "cpu", head_dim: int = 16, **more: Any) -> dict[str, Any]:
    """A call of flash_attn_varlen_func, of 9 queries and 11 keys."""
    shapes = {"q": (9, 4, head_dim), "k": (11, 2, head_dim), "v": (11, 2, head_dim)}
    given: dict[str, Any] = {name: normal(device, *shape) for name, shape in shapes.items()}
    given |= {"cu_seqlens_q": int32(device, 0, 4, 4, 9), "cu_seqlens_k": int32(device, 0, 5, 8, 11)}
    return given | {"max_seqlen_q": 5, "max_seqlen_k": 5, "causal": True, **more}


def in_pages(device: str = "cpu", head_dim: int = 16) -> dict[str, Any]:
    table = int32(device, 0, 1, 2).view(3, 1)
    pool = {name: normal(device, 3, 5, 2, head_dim) for name in "kv"}
    return packed(device, head_dim, block_table=table, **pool)


def cached(device: str = "cpu", head_dim: int = 16, **more: Any) -> dict[str, Any]:
    """A call of flash_attn_with_kvcache, of 2 x 3 queries."""
    shapes = {"q": (2, 3, 4, head_dim)} | dict.fromkeys(("k_cache", "v_cache"), (2, 9, 2, head_dim))
    given: dict[str, Any] = {name: normal(device, *shape) for name, shape in shapes.items()}
    return given | {"cache_seqlens": int32(device, 4, 6), "causal": True, **more}


def with_new_keys(device: str = "cpu", head_dim: int = 16) -> dict[str, Any]:
    new = {name: normal(device, 2, 3, 2, head_dim) for name in "kv"}
    return cached(device, head_dim, **new)


def masked(device: str = "cpu", head_dim: int = 16) -> dict[str, Any]:
    mask = BlockSparsity.from_mask(torch.rand(5, 5, device=device) < 0.7)
    return packed(device, head_dim, block_mask=mask, sink=torch.randn(4, device=device))


VARLEN, CACHE = flash_attn_varlen_func, flash_attn_with_kvcache
CALLS = pytest.mark.parametrize(
    ("function", "make"),
    [(VARLEN, packed), (VARLEN, in_pages), (VARLEN, masked), (CACHE, cached),
     (CACHE, with_new_keys)],
    ids=["packed", "pages", "masked", "cache", "append"],
)  # fmt: skip


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@CALLS
def test_the_result_is_out(
    function: Callable[..., Any], make: Callable[..., dict[str, Any]], head_dim: int, device: str
) -> None:
    """Into rows of a longer buffer, and with softmax_lse as without an out."""
    lse = {"return_softmax_lse": True} if function is CACHE else {"return_attn_probs": True}
    given = make(device, head_dim)
    expected, expected_lse, *_ = function(**given, **lse)
    shape = expected.shape
    buffer = torch.full((*shape[:-1], shape[-1] + 8), 7.0, dtype=expected.dtype, device=device)
    out = buffer[..., : shape[-1]]
    assert function(**given, out=out) is out
    assert torch.equal(out, expected) and (buffer[..., shape[-1] :] == 7.0).all()
    out.fill_(7.0)
    result, actual_lse, *_ = function(**given, **lse, out=out)
    assert result is out and torch.equal(out, expected) and torch.equal(actual_lse, expected_lse)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("function", "make"), [(VARLEN, packed), (CACHE, cached)])
def test_what_is_refused(
    function: Callable[..., Any], make: Callable[..., dict[str, Any]], device: str
) -> None:
    given = make(device)
    good = torch.zeros_like(given["q"])
    wide = torch.zeros(*good.shape[:-1], 32, dtype=good.dtype, device=device)
    for bad, kind, message in (
        (good[:, :, :2], ValueError, "must have shape"),
        (good.half(), TypeError, "dtype must be torch.bfloat16, got torch.float16"),
        (good.to("meta"), ValueError, "must be on the device of q"),
        (wide[..., ::2], ValueError, "must be contiguous in its last dimension, got stride 2"),
        ("good", TypeError, "must be a torch.Tensor, got str"),
        (good.clone().requires_grad_(), NotImplementedError, "must not require grad"),
    ):
        with pytest.raises(kind, match=f"^out: {message}"):
            function(**given, out=bad)
    with pytest.raises(ValueError, match=r"^q: must have"):
        function(**given | {"q": given["q"][..., 0]}, out=good)


@pytest.mark.parametrize("device", DEVICES)
@CALLS
def test_a_tensor_of_inference_mode(
    function: Callable[..., Any], make: Callable[..., dict[str, Any]], device: str
) -> None:
    """Is refused outside of it before a key is appended."""
    given = make(device)
    with torch.inference_mode():
        out = torch.full_like(given["q"], 7.0)
    before = {name: x.clone() for name, x in given.items() if name in ("k_cache", "v_cache")}
    with pytest.raises(ValueError, match=r"^out: must not be made in inference mode"):
        function(**given, out=out)
    assert (out == 7.0).all() and all(torch.equal(given[name], x) for name, x in before.items())
    with torch.inference_mode():
        assert function(**given, out=out) is out
        assert torch.equal(out, function(**given))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["q", "k", "v", "sink"])
@pytest.mark.parametrize("make", [packed, in_pages])
def test_gradients_are_refused(make: Callable[..., dict[str, Any]], name: str, device: str) -> None:
    given = make(device)
    given |= {"sink": torch.zeros(4, device=device)}
    given[name].requires_grad_()
    out = torch.empty_like(given["q"])
    with pytest.raises(NotImplementedError, match=r"^out: must be None in a call whose gradients"):
        flash_attn_varlen_func(**given, out=out)
    with torch.no_grad():
        assert flash_attn_varlen_func(**given, out=out) is out
        assert torch.equal(out, flash_attn_varlen_func(**given))


def test_autocast_decides_about_the_dtype() -> None:
    given = packed(**{name: torch.randn(9, 4, 16) for name in "qkv"})
    given["cu_seqlens_k"] = given["cu_seqlens_q"]
    out = torch.empty(9, 4, 16, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(
            flash_attn_varlen_func(**given, out=out), flash_attn_varlen_func(**given)
        )
        with pytest.raises(TypeError, match=r"^out: dtype must be torch.bfloat16"):
            flash_attn_varlen_func(**given, out=out.float())


@pytest.mark.parametrize("device", DEVICES)
@CALLS
def test_in_a_full_graph(
    function: Callable[..., Any], make: Callable[..., dict[str, Any]], device: str
) -> None:
    given = make(device)
    q = given.pop("q")

    @torch.compile(fullgraph=True, backend="aot_eager")
    def compiled(q: Tensor, out: Tensor) -> Tensor:
        return function(q=q * 2, **given, out=out)

    out = torch.empty_like(q)
    result = compiled(q, out)
    expected = function(q=q * 2, **given)
    assert torch.equal(out, expected) and torch.equal(result, expected)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_the_extension_writes_it(extension: Extension, head_dim: int) -> None:
    """Unless its result has columns that out has not."""
    for function, given in (
        (VARLEN, packed(head_dim=head_dim)),
        (CACHE, cached(head_dim=head_dim)),
    ):
        expected, out = function(**given), torch.zeros_like(given["q"])
        assert function(**given, out=out) is out and torch.equal(out, expected)
        call = extension.calls.pop()
        is_padded = head_dim % 8 != 0 and function is VARLEN
        assert call.out is (None if is_padded else out)


def test_the_extension_is_not_given_what_is_refused(extension: Extension) -> None:
    given = packed()
    with pytest.raises(ValueError, match=r"^out: must have shape"):
        flash_attn_varlen_func(**given, out=torch.zeros(1, dtype=torch.bfloat16))
    given["v"].requires_grad_()
    with pytest.raises(NotImplementedError, match=r"^out: "):
        flash_attn_varlen_func(**given, out=torch.zeros_like(given["q"]))
    assert not extension.calls
