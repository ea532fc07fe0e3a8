"""Tensors of FP8 (e4m3) in FlashAttention-3's and vLLM's functions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import flash_attn_cuda as ours
from flash_attn_cuda.integrations import flash_attention_3 as fa3
from flash_attn_cuda.integrations import vllm
from tests.cases.harness import DEVICE, no_host_sync
from tests.reference.fp8 import from_bytes, to_bytes
from tests.surfaces.calls import ON_EVERY_DEVICE, assert_compiles, assert_same, int32, normal

E4M3 = torch.float8_e4m3fn


def fp8(device: str, *shape: int) -> Tensor:
    return to_bytes(40.0 * torch.randn(shape)).view(E4M3).to(device)


def wide(x: Tensor, scale: Any) -> Tensor:
    return from_bytes(x.view(torch.uint8)) * scale


def assert_near(actual: Tensor, expected: Tensor) -> None:
    """To what 16 bits leave of results around 1."""
    torch.testing.assert_close(actual.double(), expected.double(), rtol=0.02, atol=0.02)


def descales(device: str, batch: int = 2) -> dict[str, Tensor]:
    """(batch, heads_k), as FlashAttention-3 wants them; k's and v's expanded."""
    made = {"q_descale": torch.rand(batch, 2) / 40.0}
    made |= {"k_descale": torch.full((1, 1), 0.02).expand(batch, 2)}
    made |= {"v_descale": torch.rand(1, 2).expand(batch, 2) / 40.0}
    return {name: x.to(device) for name, x in made.items()}


@ON_EVERY_DEVICE
def test_dense(device: str) -> None:
    """q, k and v of e4m3, out of bf16; softmax_lse in its layout."""
    q, k, v = fp8(device, 2, 7, 4, 32), fp8(device, 2, 9, 2, 32), fp8(device, 2, 9, 2, 16)
    scales = descales(device)
    options: dict[str, Any] = {"causal": True, "softcap": 5.0, "window_size": (4, -1)}
    out, lse = fa3.flash_attn_func(q, k, v, **scales, **options, return_attn_probs=True)
    assert out.dtype == torch.bfloat16 and lse.shape == (2, 4, 7) and lse.dtype == torch.float32
    of_q = scales["q_descale"].repeat_interleave(2, 1)[:, None, :, None]
    of_k, of_v = (scales[f"{x}_descale"][:, None, :, None] for x in "kv")
    tensors = [x.cpu() for x in (wide(q, of_q), wide(k, of_k), wide(v, of_v))]
    expected, expected_lse, _ = ours.flash_attn_func(*tensors, **options, return_attn_probs=True)
    assert_near(out.cpu(), expected)
    assert_near(lse.cpu(), expected_lse)
    none = (None, None, None, None)
    assert_same(fa3.flash_attn_varlen_func(q, k, v, *none, **scales, **options), out)
    assert_same(fa3.flash_attn_with_kvcache(q, k, v, **scales, **options), out)
    same = fa3.flash_attn_func(q.bfloat16(), k, v, **scales | {"q_descale": None}, **options)
    assert same.dtype == torch.bfloat16


@ON_EVERY_DEVICE
def test_one_tensor(device: str) -> None:
    scales = descales(device)
    for shape, heads in (((2, 7, 3, 2, 32), None), ((2, 7, 8, 32), 4)):
        qkv = fp8(device, *shape)
        parts = qkv.unbind(2) if heads is None else qkv.split([4, 2, 2], 2)
        out = fa3.flash_attn_qkvpacked_func(qkv, causal=True, num_heads_q=heads, **scales)
        assert_same(out, fa3.flash_attn_func(*parts, causal=True, **scales))


@ON_EVERY_DEVICE
def test_without_scales_they_are_one(device: str) -> None:
    q, k, v = fp8(device, 2, 3, 4, 16), fp8(device, 2, 9, 2, 16), fp8(device, 2, 9, 2, 16)
    one = torch.ones(2, 2, device=device)
    scales = {"q_descale": one, "k_descale": one, "v_descale": one}
    out = fa3.flash_attn_func(q, k, v, softmax_scale=1e-4)
    assert_same(out, fa3.flash_attn_func(q, k, v, softmax_scale=1e-4, **scales))


@ON_EVERY_DEVICE
@pytest.mark.parametrize("are_numbers", [False, True], ids=["wide", "e4m3"])
def test_appended_keys_are_quantized(are_numbers: bool, device: str) -> None:
    """Or numbers of the cache already."""
    q, k, v = normal(device, 2, 1, 4, 32), *(normal(device, 2, 1, 2, 32) for _ in "kv")
    tables = {name: normal(device, 9, 8) for name in ("rotary_cos", "rotary_sin")}
    if are_numbers:
        k, v, tables = fp8(device, 2, 1, 2, 32), fp8(device, 2, 1, 2, 32), {}
    scales = descales(device) | {"q_descale": None}
    found = []
    for function in (fa3.flash_attn_with_kvcache, ours.flash_attn_with_kvcache):
        caches = [torch.zeros(2, 9, 2, 32).to(device, E4M3) for _ in "kv"]
        out = function(q, *caches, k, v, cache_seqlens=3, **tables, **scales)
        found.append((out, *(x.view(torch.uint8) for x in caches)))
    assert_same(*found)
    assert found[0][1][:, 3].any() and not found[0][1][:, 4:].any()
    if are_numbers:
        assert_same(
            tuple(x[:, 3:4] for x in found[0][1:]), (k.view(torch.uint8), v.view(torch.uint8))
        )


def test_positions_of_their_own() -> None:
    """Of q of 16 bits alone."""
    q, k, v = normal("cpu", 2, 1, 4, 32), *(normal("cpu", 2, 1, 2, 32) for _ in "kv")
    tables = {name: normal("cpu", 9, 8) for name in ("rotary_cos", "rotary_sin")}
    given: dict[str, Any] = {"cache_seqlens": 3, "rotary_seqlens": int32("cpu", 3, 3), **tables}
    caches = [[torch.zeros(2, 9, 2, 32).to(E4M3) for _ in "kv"] for _ in range(2)]
    out = fa3.flash_attn_with_kvcache(q, *caches[0], k, v, **given)
    del given["rotary_seqlens"]
    torch.testing.assert_close(out, fa3.flash_attn_with_kvcache(q, *caches[1], k, v, **given))
    given["rotary_seqlens"] = int32("cpu", 3, 3)
    with pytest.raises(NotImplementedError, match=r"^rotary_seqlens: must be None, as q or k is"):
        fa3.flash_attn_with_kvcache(q.to(E4M3), *caches[0], k.bfloat16(), v.bfloat16(), **given)


@ON_EVERY_DEVICE
def test_gradients_are_refused_in_the_backward(device: str) -> None:
    """Whoever wants none may leave leaves as they are, of e4m3 too."""
    q, k, v = (fp8(device, 2, 9, heads, 16).requires_grad_() for heads in (4, 2, 2))
    scales = descales(device)
    for function in (fa3.flash_attn_func, fa3.flash_attn_with_kvcache):
        out = function(q, k, v, **scales)
        with torch.no_grad():
            assert_same(out, function(q, k, v, **scales))
        for leaf in (q, k, v):
            with pytest.raises(NotImplementedError, match=r"^k(_cache)?: must not be of .*e4m3fn"):
                torch.autograd.grad(out.sum(), leaf, retain_graph=True)


def a_step(device: str) -> dict[str, Any]:
    """vLLM's call over pages: five queries, one, and none."""
    table = torch.randperm(9).int().view(3, 3).to(device)
    return {
        "q": normal(device, 6, 4, 32).bfloat16(),
        "k": fp8(device, 9, 4, 2, 32),
        "v": fp8(device, 9, 4, 2, 16),
        "max_seqlen_q": 5,
        "max_seqlen_k": 12,
        "cu_seqlens_q": int32(device, 0, 5, 6, 6),
        "seqused_k": int32(device, 9, 12, 3),
        "block_table": table,
        "causal": True,
    }


@ON_EVERY_DEVICE
@pytest.mark.parametrize("q_is_fp8", [False, True], ids=["q16", "q8"])
@pytest.mark.parametrize("form", ["expanded", "(1,)", "0-d", "none", "head"])
def test_a_step_of_serving(form: str, q_is_fp8: bool, device: str) -> None:
    """Scales of q of 16 bits are of no use, as in vLLM."""
    call = a_step(device)
    if q_is_fp8:
        call["q"] = fp8(device, 6, 4, 32)
    scale = torch.tensor([0.02], device=device)
    made = {
        "expanded": scale[None].expand(3, 2),
        "(1,)": scale,
        "0-d": scale[0],
        "none": None,
        "head": torch.tensor([0.02, 0.01], device=device),
    }[form]
    names = ("q_descale", "k_descale", "v_descale")
    if form == "none":
        call["softmax_scale"] = 1e-4
    out = torch.empty(6, 4, 16, dtype=torch.bfloat16, device=device)
    found = vllm.flash_attn_varlen_func(**call, **dict.fromkeys(names, made), out=out)
    assert found is out
    for scale in {"none": (1.0,), "(1,)": (made, 0.02), "0-d": (made, 0.02)}.get(form, (made,)):
        given: dict[str, Any] = dict.fromkeys(names[0 if q_is_fp8 else 1 :], scale)
        assert_same(ours.flash_attn_varlen_func(**call, cu_seqlens_k=None, **given), out)


@pytest.mark.gpu
def test_scales_of_checkpoints_are_not_waited_for() -> None:
    call, scale = a_step(DEVICE), torch.tensor(0.02, device=DEVICE)
    with no_host_sync():
        ours.flash_attn_varlen_func(**call, cu_seqlens_k=None, k_descale=scale, v_descale=scale)


def test_under_compile() -> None:
    call = a_step("cpu")
    q = call.pop("q")

    def step(q: Tensor, scale: Tensor) -> Tensor:
        return vllm.flash_attn_varlen_func(q + 0, **call, k_descale=scale, v_descale=scale)

    assert_compiles(step, q, torch.tensor(0.02))
