"""Tensors that callers kept from inside a transform of torch.func serve later calls as any other,
as with torch's own operators; those that may not be written are refused before anything is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._C import _functorch

from flash_attn_cuda import (
    flash_attn_combine,
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    quantize_kv,
)
from flash_attn_cuda.call.fields import AttentionCall
from flash_attn_cuda.functions.private import _flash_attn_backward
from flash_attn_cuda.functions.rotary import apply_rotary_emb
from flash_attn_cuda.installed import build_info
from tests.cases.harness import DEVICE
from tests.cpu.test_out_argument import cached, int32, masked, normal, packed, with_new_keys

DEVICES = ["cpu", pytest.param(DEVICE, marks=pytest.mark.gpu)]


def kept(x: Tensor, depth: int = 1) -> Tensor:
    """A copy that was made inside so many transforms, which have ended."""
    found = []

    def inside(y: Tensor) -> Tensor:
        found.append(x.detach().clone())
        return y.sum()

    for _ in range(depth):
        inside = torch.func.grad(inside)
    torch.func.jvp(inside, (torch.ones(()),), (torch.ones(()),))
    assert _functorch.is_functorch_wrapped_tensor(found[0])
    return found[0]


def kept_from_vmap(x: Tensor) -> Tensor:
    found = []

    def inside(one: Tensor) -> Tensor:
        found.append(one * 1)
        return one

    torch.vmap(inside)(torch.stack([x, x]))
    return found[0]


def dense(device: str, **more: Any) -> dict[str, Any]:
    shapes = {"q": (2, 5, 4, 16), "k": (2, 7, 2, 16), "v": (2, 7, 2, 16)}
    return {name: normal(device, *shape) for name, shape in shapes.items()} | more


def rotated(device: str, **more: Any) -> dict[str, Any]:
    tables = {name: normal(device, 9, 8) for name in ("cos", "sin")}
    return {"x": normal(device, 2, 5, 4, 16), **tables, "inplace": True, **more}


CALLS: dict[str, tuple[Callable[..., Any], Callable[[str], dict[str, Any]]]] = {
    "dense": (flash_attn_func, dense),
    "softcap": (flash_attn_func, lambda device: dense(device, softcap=5.0)),
    "mask": (flash_attn_func, lambda device: dense(device, attn_mask=normal(device, 5, 7))),
    "packed": (flash_attn_varlen_func, packed),
    "lists": (flash_attn_varlen_func, masked),
    "cache": (flash_attn_with_kvcache, cached),
    "append": (flash_attn_with_kvcache, with_new_keys),
    "rotary": (apply_rotary_emb, rotated),
    "offsets": (
        apply_rotary_emb,
        lambda device: rotated(device, inplace=False, seqlen_offsets=int32(device, 1, 3)),
    ),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("name", CALLS)
def test_of_a_transform_that_has_ended(name: str, depth: int, device: str) -> None:
    """In place too."""
    function, make = CALLS[name]
    given = make(device)
    again = {key: kept(x, depth) if isinstance(x, Tensor) else x for key, x in given.items()}
    assert torch.equal(function(**again), function(**given))
    for key, x in given.items():
        if isinstance(x, Tensor):
            assert torch.equal(again[key] + 0, x), key
    single = {key: again[key] for key, x in given.items() if isinstance(x, Tensor)}
    for key, x in single.items():
        if key not in ("x", "k_cache", "v_cache"):
            assert torch.equal(function(**given | {key: x}), function(**given)), key


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("options", [{}, {"softcap": 5.0}], ids=str)
def test_gradients_beside_and_of_such(options: dict[str, Any], causal: bool, device: str) -> None:
    given = dense(device, causal=causal, **options)
    q, dout = given["q"].requires_grad_(), normal(device, 2, 5, 4, 16)
    (expected,) = torch.autograd.grad(flash_attn_func(**given), q, dout)
    given |= {"k": kept(given["k"]), "v": kept(given["v"])}
    (found,) = torch.autograd.grad(flash_attn_func(**given), q, kept(dout))
    assert torch.equal(found, expected)
    leaf, (cos, sin) = given["q"], (normal(device, 9, 8) for _ in range(2))
    turned = apply_rotary_emb(leaf, cos, sin)
    (expected,) = torch.autograd.grad(turned, leaf, dout)
    again = apply_rotary_emb(leaf, kept(cos), kept(sin))
    (found,) = torch.autograd.grad(again, leaf, kept(dout))
    assert torch.equal(found, expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["dense", "softcap", "packed", "cache", "rotary"])
def test_of_a_vmap_that_has_ended(name: str, device: str) -> None:
    """Which torch's own operators refuse as well."""
    function, make = CALLS[name]
    given = make(device)
    key = next(x for x in ("k", "k_cache", "cos") if x in given)
    message = "escaped from inside" if name == "rotary" and device == "cpu" else f"^{key}: must not"
    with pytest.raises(Exception, match=message):
        function(**given | {key: kept_from_vmap(given[key])})


@pytest.mark.skipif(build_info.extension is None, reason="flash_attn_cuda._C is not built here")
def test_the_extension_reads_them() -> None:
    extension: Any = build_info.extension
    given = dense("cpu")
    expected = extension.explain_settings(AttentionCall(**given))
    wrapped = {name: kept(x) for name, x in given.items()}
    assert str(extension.explain_settings(AttentionCall(**wrapped))) == str(expected)
    for call in (
        lambda **given: extension.explain_settings(AttentionCall(**given)),
        lambda q, k, v: extension.attention(q, k, v, None, False),
        lambda q, k, v: extension.rotary(q, v, k, 0, None, None, False, False, False),
    ):
        with pytest.raises(NotImplementedError, match=r"^(k|sin): must not be wrapped by a trans"):
            call(**given | {"k": kept_from_vmap(given["k"])})


# Tensors of inference mode


def append(device: str) -> tuple[Callable[..., Any], dict[str, Tensor]]:
    given = with_new_keys(device)
    caches = {name: given.pop(name) for name in ("k_cache", "v_cache")}
    return lambda **caches: flash_attn_with_kvcache(**given, **caches), caches


def quantized_append(device: str) -> tuple[Callable[..., Any], dict[str, Tensor]]:
    given = with_new_keys(device)
    k, v, *scales_of = quantize_kv(given["k_cache"], given["v_cache"], "token")
    given |= {"k_cache": k, "v_cache": v, "quantize": "token"}
    scales = dict(zip(("k_descale", "v_descale"), scales_of, strict=True))
    return lambda **scales: flash_attn_with_kvcache(**given, **scales), scales


def combine(device: str) -> tuple[Callable[..., Any], dict[str, Tensor]]:
    parts = torch.randn(3, 1, 2, 4, 8, device=device), torch.randn(3, 1, 2, 4, device=device)
    return lambda out: flash_attn_combine(*parts, out=out), {"out": torch.ones_like(parts[0][0])}


def gradients(device: str) -> tuple[Callable[..., Any], dict[str, Tensor]]:
    q, k, v = dense(device).values()
    out, lse, *_ = flash_attn_func(q, k, v, return_attn_probs=True)
    options = (0.0, 1.0, False, -1, -1, 0.0, None, False)
    targets = {f"d{name}": torch.ones_like(x) for name, x in (("q", q), ("k", k), ("v", v))}
    return lambda dq, dk, dv: _flash_attn_backward(
        out, q, k, v, out, lse, dq, dk, dv, *options
    ), targets


def rotation(device: str) -> tuple[Callable[..., Any], dict[str, Tensor]]:
    given = rotated(device)
    x = given.pop("x")
    return lambda x: apply_rotary_emb(x, **given), {"x": x}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("make", [append, quantized_append, combine, gradients, rotation])
def test_targets_of_inference_mode(
    make: Callable[[str], tuple[Callable[..., Any], dict[str, Tensor]]], device: str
) -> None:
    """Are refused by name outside of it before anything is written."""
    run, targets = make(device)
    for name in targets:
        given = {key: x.clone() for key, x in targets.items()}
        with torch.inference_mode():
            given[name] = targets[name].clone()
        with pytest.raises(ValueError, match=f"^{name}: must not be made in inference mode"):
            run(**given)
        for key, x in targets.items():
            assert torch.equal(given[key].float(), x.float()), key
        with torch.inference_mode():
            run(**given)
            assert not torch.equal(given[name].float(), targets[name].float())
