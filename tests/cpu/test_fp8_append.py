"""What an append writes into a cache of FP8 (e4m3) on the CPU backend, and quantize_kv makes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import flash_attn_cuda as ours
from flash_attn_cuda import flash_attn_with_kvcache, quantize_kv
from flash_attn_cuda.call.fields import AttentionCall
from flash_attn_cuda.call.fp8 import to_e4m3
from flash_attn_cuda.functions.chunks import attend_over_cache_in_chunks
from tests.cases.attention import KvCacheCase
from tests.cases.fp8_cache import (
    APPENDS,
    E4M3,
    Fp8Case,
    attend,
    check_appended_numbers,
    check_fp8,
    dequantized,
)
from tests.reference.fp8 import from_bytes, numbers, scaled_down, to_bytes, token_scales

pytestmark = pytest.mark.usefixtures("one_thread")

_ops = torch.ops.flash_attn_cuda

# -- what an append writes -------------------------------------------------------------------------

SPECIAL = [0.0, -0.0, torch.nan, torch.inf, -torch.inf, 448.0, -449.0, 464.0, 466.0, 1e30, 2.0**-9]
SPECIAL += [2.0**-10, 3 * 2.0**-11, 2.0**-11, -(2.0**-9) * 1.5, 17.0]


def append(x: Tensor, scale: Any, **options: Any) -> tuple[Tensor, Tensor, Any, Any]:
    """Caches of one row behind x (16,) was appended, and the scales."""
    caches = [torch.zeros(1, 1, 1, 16).to(E4M3) for _ in "kv"]
    scales = [scale.clone() if isinstance(scale, Tensor) else scale for _ in "kv"]
    new = x.view(1, 1, 1, 16)
    q = torch.zeros_like(new)
    flash_attn_with_kvcache(
        q, *caches, new, new, cache_seqlens=0, k_descale=scales[0], v_descale=scales[1], **options
    )
    return (*(from_bytes(y.view(torch.uint8)).flatten() for y in caches), *scales)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_special_numbers(dtype: torch.dtype) -> None:
    x = torch.tensor(SPECIAL, dtype=torch.float64).to(dtype)
    k, v, *_ = append(x, 1.0)
    expected = from_bytes(to_bytes(x.double()))
    torch.testing.assert_close(k, expected, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(v, k, rtol=0, atol=0, equal_nan=True)
    assert k[2].isnan() and k[3] == 448.0 and k[4] == -448.0 and k[9] == 448.0
    assert torch.signbit(k[1])


def test_rounding_is_that_of_the_table() -> None:
    """Every number, every middle of two, and what is beside them; torch's own agrees."""
    table = numbers()
    x = torch.cat([table, (table[1:] + table[:-1]) / 2])
    x = torch.cat([x, x * (1 + 2.0**-20), x * (1 - 2.0**-20)])
    x = torch.cat([x, -x]).float()
    found = to_e4m3(x, torch.ones(()))
    assert torch.equal(found.view(torch.uint8), to_bytes(x))
    assert torch.equal(x.clamp(-448, 448).to(E4M3).view(torch.uint8), to_bytes(x))
    near = torch.cat([x.double() * (1 + sign * 2.0**-40) for sign in (-1, 1)])  # fp32 is x
    assert torch.equal(to_e4m3(near, torch.ones(())).view(torch.uint8), to_bytes(near))
    codes = torch.arange(256).to(torch.uint8)
    wide = from_bytes(codes)
    torch.testing.assert_close(codes.view(E4M3).double(), wide, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("scale", [0.0, -0.0, -0.5, torch.inf, torch.nan, 1e-40, 1e38, 3e-39])
def test_scales_that_nobody_wants(scale: float) -> None:
    """Another sequence is as it is without them."""
    x = torch.linspace(-3.0, 3.0, 16)
    k, *_ = append(x, torch.tensor([scale]))
    expected = from_bytes(to_bytes(scaled_down(x, torch.tensor(scale))))
    torch.testing.assert_close(k, expected, rtol=0, atol=0, equal_nan=True)
    if scale == 0.0:
        assert not k.any()
    case = Fp8Case(
        KvCacheCase(cached=(9, 7), seqlens_new=1, capacity=10, head_dim=16, device="cpu"),
        *("batch", "token"),
    )
    inputs = case.make_inputs()
    expected_result, _ = attend(case, inputs)
    bad = {name: inputs.scales[name].clone() for name in inputs.scales}
    bad["k_descale"][0], bad["v_descale"][0] = scale, scale
    result, _ = attend(case, replace(inputs, scales=bad))
    assert torch.equal(result.out[1], expected_result.out[1])
    assert torch.equal(result.lse[1], expected_result.lse[1])


def test_scales_of_tokens() -> None:
    """Of what is finite; rows of zeros have 1."""
    rows = {
        "normal": torch.randn(16),
        "zeros": torch.zeros(16),
        "special": torch.tensor(SPECIAL),
        "nan": torch.full((16,), torch.nan),
        "tiny": torch.full((16,), 1e-38),
    }
    for name, row in rows.items():
        x = row.bfloat16()
        scale = torch.full((1, 1, 1), torch.nan)
        k, v, k_scale, v_scale = append(x, scale, quantize="token")
        wanted = token_scales(x)
        assert k_scale.item() == v_scale.item() == wanted.item(), name
        expected = from_bytes(to_bytes(scaled_down(x, wanted)))
        for found in (k, v):
            torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
        if name == "zeros" or name == "nan":
            assert wanted == 1.0
    assert k.abs().max() == 448.0


@pytest.mark.parametrize("name", APPENDS)
def test_numbers_are_appended_as_they_are(name: str) -> None:
    fields = {"head_dim": 32, "capacity": 40, "device": "cpu", **APPENDS[name]}
    check_appended_numbers(Fp8Case(KvCacheCase((30, 0, 11), **fields), "number", "number"))


def test_append_then_read() -> None:
    """Token by token, rotated, with scales of their own: as of what quantize_kv makes at once."""
    steps = 7
    q, k, v = (torch.randn(2, steps, heads, 32, dtype=torch.bfloat16) for heads in (4, 2, 2))
    angles = torch.rand(steps, 8)
    tables = {"rotary_cos": angles.cos().bfloat16(), "rotary_sin": angles.sin().bfloat16()}
    caches = [torch.full((2, 9, 2, 32), torch.nan).to(E4M3) for _ in "kv"]
    scales = {f"{name}_descale": torch.full((2, 9, 2), torch.nan) for name in "kv"}
    given: dict[str, Any] = {**scales, "quantize": "token", "causal": True, **tables}
    for t in range(steps):
        at = slice(t, t + 1)
        out = flash_attn_with_kvcache(
            q[:, at], *caches, k[:, at], v[:, at], cache_seqlens=t, **given
        )
    from flash_attn_cuda.functions.rotary import apply_rotary_emb

    turned = apply_rotary_emb(k, *tables.values(), interleaved=True)
    k8, v8, k_scale, v_scale = quantize_kv(turned, v)
    for cache, x in zip(caches, (k8, v8), strict=True):
        assert torch.equal(cache[:, :steps].view(torch.uint8), x.view(torch.uint8))
        assert cache[:, steps:].float().isnan().all()
    for name, x in (("k_descale", k_scale), ("v_descale", v_scale)):
        assert torch.equal(scales[name][:, :steps], x) and scales[name][:, steps:].isnan().all()
    last = apply_rotary_emb(q[:, -1:], *(x[-1:] for x in tables.values()), interleaved=True)
    expected = flash_attn_with_kvcache(last, k8, v8, k_descale=k_scale, v_descale=v_scale)
    assert torch.equal(out, expected)


@pytest.mark.parametrize("queries", [1, 4])
@pytest.mark.parametrize("quantize", [None, "token"])
def test_chunks(queries: int, quantize: str | None) -> None:
    """As of the cache in 64 bits; what is appended is what a call without chunks appends."""
    form = "batch" if quantize is None else "token"
    cache = KvCacheCase(
        *((9, 7), queries, queries, 14), dtype=torch.float64, head_dim=32, device="cpu", causal=True
    )
    case = Fp8Case(cache, form, form, quantize=quantize)
    inputs = case.make_inputs()
    _, found = attend(case, inputs)
    actual, written = attend(case, inputs, attention_chunk=4)
    for x, y in zip(found, written, strict=True):
        assert torch.equal(*(z.view(torch.uint8) for z in (x, y)))
    k, v = (
        dequantized(x, y[..., None] if quantize else y[:, None, :, None])
        for x, y in zip(found[:2], found[2:], strict=True)
    )
    assert inputs.cache.k is not None
    wide = AttentionCall(
        inputs.cache.q, k.nan_to_num(), v.nan_to_num(), over_cache=True, causal=True,
        seqused_k=inputs.cache.cache_seqlens + queries,
    )  # fmt: skip
    expected = attend_over_cache_in_chunks(wide, 4)
    torch.testing.assert_close((actual.out, actual.lse), (expected.out, expected.softmax_lse))


def test_sequences_of_one_entry_see_what_others_appended() -> None:
    cache = KvCacheCase(
        cached=(9, 5, 9), batch_idx=(1, 1, 0), capacity=16, head_dim=16, device="cpu"
    )
    check_fp8(Fp8Case(cache, "batch", "token"))


@pytest.mark.parametrize("page_size", [None, 4])
def test_no_sequences(page_size: int | None) -> None:
    cache = KvCacheCase(
        cached=(),
        batch_idx=(),
        entries=2,
        capacity=8,
        seqlens_new=1,
        page_size=page_size,
        device="cpu",
    )
    case = Fp8Case(cache, "token", "token", quantize="token")
    result, _ = attend(case, case.make_inputs())
    assert result.out.shape == (0, 1, 4, 64)


# -- quantize_kv -----------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(2, 5, 3), (7, 3), (0, 3), (2, 0, 3), (4, 8, 1)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_quantize_kv(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    k, v = (torch.randn(*shape, d).to(dtype) for d in (32, 16))
    for x in (k, v):
        if x.numel() > 0:
            x[0] = 0.0
            x[-1, ..., 3], x[-1, ..., 4] = torch.inf, torch.nan
    *found, k_scale, v_scale = quantize_kv(k, v)
    for x, code, scale in zip((k, v), found, (k_scale, v_scale), strict=True):
        assert code.dtype == E4M3 and code.shape == x.shape
        assert torch.equal(scale, token_scales(x)) and scale.dtype == torch.float32
        assert torch.equal(code.view(torch.uint8), to_bytes(scaled_down(x, scale[..., None])))
    *found, k_scale, v_scale = quantize_kv(k, v, "head")
    for x, code, scale in zip((k, v), found, (k_scale, v_scale), strict=True):
        assert scale.shape == (*shape[:-2], shape[-1])
        of_rows = scale.unsqueeze(-2).expand(shape)
        if x.numel() > 0:
            rows = x.movedim(-2, len(shape) - 2).flatten(-2)
            assert torch.equal(scale, token_scales(rows))
        assert torch.equal(code.view(torch.uint8), to_bytes(scaled_down(x, of_rows[..., None])))


def test_quantize_kv_refuses() -> None:
    k, v = torch.randn(2, 5, 3, 16), torch.randn(2, 5, 3, 32)
    for changes, kind, message in (
        ({"mode": "row"}, ValueError, r"^mode: must be 'token' or 'head', got 'row'"),
        ({"k": 3}, TypeError, r"^k: must be a torch.Tensor, got int"),
        ({"k": k[0, 0]}, ValueError, r"^k: must have shape \(batch, .* got \(3, 16\)"),
        ({"k": k[..., :8]}, ValueError, r"^k: last dimension .*multiple of 16 .*, got 8"),
        ({"v": v[..., :24]}, ValueError, r"^v: last dimension \(head_dim_v\).*, got 24"),
        ({"v": v[:1]}, ValueError, r"^v: must have the shape of k but for the last dimension"),
        ({"v": v.int()}, TypeError, r"^v: dtype must be one of float16.*, got torch.int32"),
        ({"k": k.clone().requires_grad_()}, NotImplementedError, r"^k: must not require grad"),
    ):  # fmt: skip
        with pytest.raises(kind, match=message):
            quantize_kv(**{"k": k, "v": v, **changes})
    assert "quantize_kv" in ours.__all__
