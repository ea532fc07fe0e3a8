"""Caches of FP8 (e4m3) on the CPU backend: what is computed, what an append writes, what is
refused, operators and compilers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.library import opcheck

import flash_attn_cuda as ours
from flash_attn_cuda import flash_attn_varlen_func, flash_attn_with_kvcache, quantize_kv
from flash_attn_cuda.call import AttentionCall
from flash_attn_cuda.chunks import attend_over_cache_in_chunks
from flash_attn_cuda.fp8 import to_e4m3
from tests.cases.attention import Alibi, KvCacheCase
from tests.cases.cpu_harness import one_thread  # noqa: F401
from tests.cases.fp8_cache import (
    E4M3,
    FORMS,
    STRIDES,
    Fp8Case,
    assert_fp8_close,
    attend,
    check_fp8,
    reference_of,
)
from tests.cases.operators import append_arguments, arguments, gradients_arguments
from tests.cases.pairwise import pairwise
from tests.reference.fp8 import from_bytes, numbers, scaled_down, to_bytes, token_scales

pytestmark = pytest.mark.usefixtures("one_thread")

_ops = torch.ops.flash_attn_cuda

QUERIES: dict[str, dict[str, Any]] = {
    "decode": {"seqlens_q": 1},
    "append": {"seqlens_q": 1, "seqlens_new": 1},
    "chunk": {"seqlens_q": 5, "seqlens_new": 5},
    "more_keys": {"seqlens_q": 2, "seqlens_new": 6},
    "packed": {"seqlens_q": (3, 0, 7)},
    "packed_append": {"seqlens_q": (3, 1, 7), "seqlens_new": (3, 1, 7)},
    "packed_other": {"seqlens_q": (3, 1, 2), "seqlens_new": (0, 5, 7)},
}
ROTARY: dict[str, dict[str, Any]] = {
    "none": {},
    "pairs": {"rotary_dim": 8},
    "halves": {"rotary_dim": 16},
}
AXES: dict[str, list[Any]] = {
    "queries": list(QUERIES),
    "rotary": list(ROTARY),
    "page_size": [None, 1, 7, 16],
    "leftpad": [None, (3, 0, 20)],
    "batch_idx": [None, (4, 0, 2)],
    "causal": [False, True],
    "window": [(-1, -1), (6, -1), (9, 3)],
    "features": [{}, {"softcap": 2.0}, {"alibi": Alibi.per_batch}],
    "heads": [(4, 4), (6, 2), (4, 1)],
    "sink": [None, torch.float32],
    "head_dims": [(16, 16), (32, 16), (48, 80)],
    "k_form": list(FORMS),
    "v_form": list(FORMS),
    "strides": list(STRIDES),
    "powers": [False, True],
    "quantize": [None, "token"],
}


def make_case(
    queries: str,
    rotary: str,
    features: dict[str, Any],
    heads: tuple[int, int],
    head_dims: tuple[int, int],
    k_form: str,
    v_form: str,
    strides: str,
    powers: bool,
    quantize: str | None,
    q_is_fp8: bool = False,
    **fields: Any,
) -> Fp8Case:
    """quantize wants new keys and scales per token; a rotation wants new keys."""
    appends = "seqlens_new" in QUERIES[queries]
    cache = KvCacheCase(
        cached=(30, 0, 25),
        capacity=40,
        rotary_interleaved=rotary == "pairs",
        num_heads_q=heads[0],
        num_heads_k=heads[1],
        head_dim=head_dims[0],
        head_dim_v=head_dims[1],
        device="cpu",
        **QUERIES[queries],
        **(ROTARY[rotary] if appends else {}),
        **features,
        **fields,
    )
    if quantize is not None and appends:
        forms = ("token", "token", "strided" if strides == "expanded" else strides)
    else:
        forms, quantize = (k_form, v_form, strides), None
    return Fp8Case(cache, *forms, powers=powers, quantize=quantize, q_is_fp8=q_is_fp8)


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


# -- what is computed ------------------------------------------------------------------------------


@pytest.mark.parametrize("row", pairwise(AXES), ids=str)
def test_equals_the_reference(row: dict[str, Any]) -> None:
    case = make_case(**row, dtype=torch.float64)
    inputs = case.make_inputs()
    assert_fp8_close(case, inputs, *attend(case, inputs))
    appended = reference_of(case, inputs).appended
    assert bool(appended.any()) == (case.cache.seqlens_new is not None)


@pytest.mark.parametrize("q_is_fp8", [False, True], ids=["q16", "q8"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("row", pairwise(AXES, 1)[::2], ids=str)
def test_low_precision_is_close(row: dict[str, Any], dtype: torch.dtype, q_is_fp8: bool) -> None:
    case = make_case(**row, dtype=dtype, q_is_fp8=q_is_fp8 and dtype == torch.bfloat16)
    check_fp8(case)


@st.composite
def cases(draw: st.DrawFn) -> Fp8Case:
    batch, capacity = draw(st.integers(1, 4)), draw(st.integers(1, 60))
    heads_k = draw(st.integers(1, 3))
    packed = draw(st.booleans())
    length = st.integers(0, 1) | st.integers(0, 40)
    seqlens_q: Any = tuple(draw(length) for _ in range(batch)) if packed else draw(length)
    seqlens_new: Any = None
    if draw(st.booleans()):
        size = st.integers(0, min(capacity, 9))
        seqlens_new = tuple(draw(size) for _ in range(batch)) if packed else draw(size)
    new = seqlens_new if isinstance(seqlens_new, tuple) else (seqlens_new or 0,) * batch
    cached = tuple(draw(st.integers(0, capacity - n)) for n in new)
    fields: dict[str, Any] = {}
    if draw(st.booleans()):
        fields["leftpad"] = tuple(draw(st.integers(0, n)) for n in cached)
    if draw(st.booleans()):
        fields["entries"] = entries = batch + draw(st.integers(0, 2))
        fields["batch_idx"] = tuple(draw(st.permutations(range(entries)))[:batch])
    head_dim = 16 * draw(st.integers(1, 32))
    queries = seqlens_q if packed else (seqlens_q,) * batch
    covered = all(n + m <= capacity + 1 for n, m in zip(cached, queries, strict=True))
    if seqlens_new is not None and covered and draw(st.booleans()):
        fields["rotary_dim"] = 16 * draw(st.integers(1, head_dim // 16))
        fields["rotary_interleaved"] = draw(st.booleans())
    quantize = None
    forms = tuple(draw(st.sampled_from(FORMS)) for _ in "kv")
    strides = draw(st.sampled_from(STRIDES))
    if seqlens_new is not None and draw(st.booleans()):
        quantize, forms, strides = "token", ("token", "token"), draw(st.sampled_from(STRIDES[::2]))
    q_is_fp8, bound = draw(st.booleans()), st.just(-1) | st.integers(0, 30)
    cache = KvCacheCase(
        cached=cached,
        seqlens_q=seqlens_q,
        seqlens_new=seqlens_new,
        capacity=capacity,
        page_size=draw(st.none() | st.integers(1, 50)),
        num_heads_q=heads_k * draw(st.integers(1, 5)),
        num_heads_k=heads_k,
        head_dim=head_dim,
        head_dim_v=16 * draw(st.integers(1, 32)),
        dtype=torch.bfloat16 if q_is_fp8 else draw(st.sampled_from([torch.bfloat16, torch.half])),
        causal=draw(st.booleans()),
        window=(draw(bound), draw(bound)),
        softcap=draw(st.just(0.0) | st.floats(0.5, 50.0, width=32)),
        alibi=draw(st.none() | st.sampled_from(Alibi)),
        sink=draw(st.none() | st.just(torch.float32)),
        device="cpu",
        **fields,
    )
    return Fp8Case(cache, *forms, strides, draw(st.booleans()), quantize, q_is_fp8)


@settings(
    max_examples=60,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(case=cases(), num_splits=st.sampled_from([0, 1, 5]), seed=st.integers(0, 1 << 20))
def test_random_cases(case: Fp8Case, num_splits: int, seed: int) -> None:
    check_fp8(case, seed, num_splits=num_splits)


# -- packed sequences ------------------------------------------------------------------------------


def packed_inputs(dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    """Two sequences and a row behind, 4 heads of queries, 2 of keys."""
    return {
        "q": torch.randn(9, 4, 32, dtype=dtype),
        "k": to_bytes(40.0 * torch.randn(12, 2, 32)).view(E4M3),
        "v": to_bytes(40.0 * torch.randn(12, 2, 16)).view(E4M3),
        "cu_seqlens_q": int32(0, 5, 8),
        "cu_seqlens_k": int32(0, 5, 11),
        "max_seqlen_q": 5,
        "max_seqlen_k": 6,
    }


def dequantized(x: Tensor, scale: Tensor | float, dtype: torch.dtype = torch.float64) -> Tensor:
    return (from_bytes(x.view(torch.uint8)) * scale).to(dtype)


SCALES: dict[str, tuple[Any, Any]] = {  # what is given, and what rows of k are times
    "number": (0.25, 0.25),
    "head": (torch.tensor([0.25, 0.7]), torch.tensor([0.25, 0.7])[:, None]),
    "batch": (
        torch.tensor([[0.25, 0.7], [0.1, 1.5]]),
        torch.tensor([[0.25, 0.7], [0.1, 1.5]])
        .repeat_interleave(torch.tensor([5, 7]), 0)[..., None],
    ),
    "expanded": (torch.tensor([[0.3]]).expand(2, 2), torch.tensor(0.3)),
}  # fmt: skip
LENGTHS: dict[str, dict[str, Any]] = {
    "whole": {},
    "used": {"seqused_q": int32(4, 1), "seqused_k": int32(3, 6), "leftpad_k": int32(1, 2)},
    "chunks": {"attention_chunk": 2},
    "features": {"window_size": (2, 1), "softcap": 3.0, "sink": torch.ones(4).double()},
}


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("name", SCALES)
def test_packed_sequences(name: str, lengths: str) -> None:
    scale, rows = SCALES[name]
    call = {**packed_inputs(), "causal": True, "return_attn_probs": True, **LENGTHS[lengths]}
    found = flash_attn_varlen_func(**call, k_descale=scale, v_descale=scale)
    wide = {x: dequantized(call[x], rows) for x in "kv"}
    torch.testing.assert_close(found[:2], flash_attn_varlen_func(**call | wide)[:2])


@pytest.mark.parametrize("with_bounds", [False, True])
def test_packed_queries_over_pages(with_bounds: bool) -> None:
    """Scales per token, and NaN in a page that no table names."""
    call = packed_inputs()
    pages = {name: torch.cat([call[name], call[name][:8]]).view(5, 4, 2, -1) for name in "kv"}
    scales = {f"{name}_descale": torch.rand(5, 4, 2) + 0.5 for name in "kv"}
    wide = {x: dequantized(pages[x], scales[f"{x}_descale"][..., None]) for x in "kv"}
    for x in scales.values():
        x[4] = torch.nan
    call |= {"block_table": int32(3, 0, 1, 2).view(2, 2), "seqused_k": int32(5, 6)}
    if not with_bounds:
        call["cu_seqlens_k"] = None
    out = flash_attn_varlen_func(**call | pages, **scales, causal=True)
    torch.testing.assert_close(out, flash_attn_varlen_func(**call | wide, causal=True))


def test_autocast_leaves_fp8_alone() -> None:
    call = packed_inputs(torch.float32)
    scales = {"k_descale": 0.25, "v_descale": 0.5}
    with torch.autocast("cpu", torch.bfloat16):
        out = flash_attn_varlen_func(**call, **scales)
    assert out.dtype == torch.bfloat16
    expected = flash_attn_varlen_func(**call | {"q": call["q"].bfloat16()}, **scales)
    assert torch.equal(out, expected)


# -- q of e4m3 -------------------------------------------------------------------------------------


@pytest.mark.parametrize("out_dtype", [None, torch.bfloat16, torch.float16], ids=str)
def test_queries_are_converted_exactly(out_dtype: torch.dtype | None) -> None:
    """Every number of e4m3, and a scale for each head of keys."""
    code = torch.arange(254)
    q = torch.where(code < 127, code, code + 1).to(torch.uint8).repeat(3)[: 2 * 1 * 4 * 64]
    q = q.view(2, 1, 4, 64).view(E4M3)
    k, v = (to_bytes(40.0 * torch.randn(2, 9, 2, 64)).view(E4M3) for _ in "kv")
    scale = torch.rand(2, 2) / 400.0
    out = None if out_dtype is None else torch.empty(2, 1, 4, 64, dtype=out_dtype)
    given = {"k_descale": 0.25, "v_descale": 0.5, "cache_seqlens": 7, "return_softmax_lse": True}
    found, lse = flash_attn_with_kvcache(q, k, v, q_descale=scale, out=out, **given)
    assert found.dtype == (out_dtype or torch.bfloat16) and (out is None or found is out)
    wide = from_bytes(q.view(torch.uint8)) * scale.repeat_interleave(2, 1)[:, None, :, None]
    expected, expected_lse = flash_attn_with_kvcache(wide, k, v, **given)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.double(), expected, rtol=8e-3, atol=8e-3)


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
    from flash_attn_cuda.rotary import apply_rotary_emb

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


# -- what is refused -------------------------------------------------------------------------------


def a_cache(
    new: int = 0, form: str = "head", dtype: torch.dtype = torch.bfloat16
) -> dict[str, Any]:
    """Arguments: 2 sequences of up to 9 keys, 4 heads of queries over 2, head dim 32."""
    case = Fp8Case(
        KvCacheCase(*((4, 6), 1, new or None, 9), head_dim=32, head_dim_v=16, device="cpu"),
        *(form, form),
    )
    given = case.make_inputs().arguments()
    return {name: x for name, x in given.items() if x is not None}


def bits(x: Tensor) -> Tensor:
    """NaN are equal, too."""
    return x.flatten().contiguous().view(torch.uint8)


TOKEN_SCALES = {f"{name}_descale": torch.ones(2, 9, 2) for name in "kv"}
QUANTIZE: dict[str, Any] = {**TOKEN_SCALES, "quantize": "token"}
WIDE = torch.zeros(2, 9, 2, 32, dtype=torch.bfloat16)
BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "no scales": ({"k_descale": None}, ValueError, "k_descale: must be given where k_cache is of"),
    "no scales of v": ({"v_descale": None}, ValueError, "v_descale: must be given where v_cache"),
    "shape": (
        {"k_descale": torch.ones(3)},
        ValueError,
        r"k_descale: must have shape \(2,\) or \(2, 2\) or \(2, 9, 2\), got \(3,\)",
    ),
    "shape of v": (
        {"v_descale": torch.ones(2, 8, 2)}, ValueError, r"v_descale: must have .* got \(2, 8, 2\)",
    ),
    "0-d": ({"k_descale": torch.ones(())}, ValueError, r"k_descale: must have shape .* got \(\)"),
    "dtype": (
        {"k_descale": torch.ones(2).bfloat16()},
        TypeError,
        r"k_descale: dtype must be torch.float32, got torch.bfloat16",
    ),
    "device": (
        {"v_descale": torch.ones(2, device="meta")},
        ValueError,
        r"v_descale: must be on the device of q \(cpu\), got meta",
    ),
    "no number": ({"k_descale": "1"}, TypeError, "k_descale: must be a number .*, got str"),
    "a bool": ({"k_descale": True}, TypeError, "k_descale: must be a number or a tensor, got bool"),
    "scales of 16 bits": (
        {"k_cache": WIDE, "v_cache": WIDE},
        ValueError,
        "k_descale: must be None where k_cache is not of torch.float8_e4m3fn but of torch.bfloat16",
    ),
    "scales of v of 16 bits": (
        {"k_cache": WIDE, "v_cache": WIDE, "k_descale": None, "v_descale": 2.0},
        ValueError,
        "v_descale: must be None where v_cache is not .* got 2.0",
    ),
    "a scale of q": ({"q_descale": 1.0}, ValueError, "q_descale: must be None where q is not of"),
    "mixed": (
        {"v_cache": WIDE, "v_descale": None},
        TypeError,
        r"v_cache: must have the dtype of k_cache \(torch.float8_e4m3fn\), got torch.bfloat16",
    ),
    "mixed the other way": (
        {"k_cache": WIDE, "k_descale": None},
        TypeError,
        r"v_cache: must have the dtype of k_cache \(torch.bfloat16\), got torch.float8_e4m3fn",
    ),
    "e5m2": (
        {"k_cache": WIDE.to(torch.float8_e5m2), "k_descale": None},
        TypeError,
        "k_cache: dtype must be one of .*float8_e4m3fn on cpu, got torch.float8_e5m2",
    ),
    "q of e5m2": (
        {"q": torch.zeros(2, 1, 4, 32).to(torch.float8_e5m2)},
        TypeError,
        "q: dtype must be one of .* got torch.float8_e5m2",
    ),
    "q without a scale": (
        {"q": torch.zeros(2, 1, 4, 32).to(E4M3)},
        ValueError,
        "q_descale: must be given where q is of torch.float8_e4m3fn, got None",
    ),
    "q alone": (
        {"q": torch.zeros(2, 1, 4, 32).to(E4M3), "k_cache": WIDE, "v_cache": WIDE,
         "k_descale": None, "v_descale": None, "q_descale": 1.0},
        TypeError,
        "q: must be of torch.float8_e4m3fn only where k_cache is, got torch.bfloat16",
    ),
    "shape of q's": (
        {"q": torch.zeros(2, 1, 4, 32).to(E4M3), "q_descale": torch.ones(2, 9, 2)},
        ValueError,
        r"q_descale: must have shape \(2,\) or \(2, 2\), got \(2, 9, 2\)",
    ),
    "head_dim": (
        {"q": torch.zeros(2, 1, 4, 24).bfloat16(), "k_cache": torch.zeros(2, 9, 2, 24).to(E4M3)},
        ValueError,
        r"k_cache: last dimension \(head_dim\) must be a multiple of 16 .* got 24",
    ),
    "head_dim_v": (
        {"v_cache": torch.zeros(2, 9, 2, 40).to(E4M3)},
        ValueError,
        r"v_cache: last dimension \(head_dim_v\) must be a multiple of 16 .* got 40",
    ),
    "quantize without k": (
        QUANTIZE | {"k": None, "v": None}, ValueError, "quantize: must be None without k, got",
    ),
    "quantize of another kind": (
        {"quantize": "head"}, ValueError, "quantize: must be None or 'token', got 'head'",
    ),
    "quantize into 16 bits": (
        {"k_cache": WIDE, "v_cache": WIDE, "k_descale": None, "v_descale": None,
         "quantize": "token"},
        ValueError,
        "quantize: must be None where k_cache is not of torch.float8_e4m3fn but of torch.bfloat16",
    ),
    "quantize into a number": (
        QUANTIZE | {"k_descale": 1.0},
        ValueError,
        "k_descale: must be a tensor with a scale for every token .* got 1.0",
    ),
    "quantize into heads": (
        QUANTIZE | {"v_descale": torch.ones(2, 2)},
        ValueError,
        r"v_descale: must have a scale for every token of k_cache, shape \(2, 9, 2\), .* \(2, 2\)",
    ),
    "quantize into what is expanded": (
        QUANTIZE | {"k_descale": torch.ones(2, 1, 2).expand(2, 9, 2)},
        ValueError,
        r"k_descale: must not be expanded where quantize writes it, got strides \(2, 0, 1\)",
    ),
    "quantize into one": (
        QUANTIZE | dict.fromkeys(TOKEN_SCALES, torch.ones(2, 9, 2)),
        ValueError,
        "v_descale: must be another tensor than k_descale",
    ),
    "new keys of another dtype": (
        {"k": torch.zeros(2, 1, 2, 32).to(E4M3)},
        TypeError,
        r"k: must have the dtype of q \(torch.bfloat16\), got torch.float8_e4m3fn",
    ),
    "out of another dtype": (
        {"out": torch.zeros(2, 1, 4, 16)}, TypeError, "out: dtype must be torch.bfloat16",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments(name: str) -> None:
    """Nothing is written."""
    changes, kind, message = BAD[name]
    given = {**a_cache(new=1), **changes}
    tensors = {name: x for name, x in given.items() if isinstance(x, Tensor) and not x.is_meta}
    before = {name: x.clone() for name, x in tensors.items()}
    with pytest.raises(kind, match=f"^{message}"):
        flash_attn_with_kvcache(**given)
    for name, x in tensors.items():
        assert torch.equal(bits(x), bits(before[name])), name


PACKED_BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "no scales": ({"k_descale": None}, ValueError, "k_descale: must be given where k is of"),
    "per token": (
        {"k_descale": torch.ones(12, 2)},
        ValueError,
        r"k_descale: must have shape \(2,\) or \(2, 2\), got \(12, 2\)",
    ),
    "dropout": (
        {"dropout_p": 0.1}, NotImplementedError, "dropout_p: must be 0 where .* got 0.1",
    ),
    "a mask": (
        {"attn_mask": torch.ones(5, 6, dtype=torch.bool)},
        NotImplementedError,
        "attn_mask: must be None where keys are of torch.float8_e4m3fn",
    ),
    "a bias": (
        {"attn_mask": torch.ones(5, 6, dtype=torch.float64)},
        NotImplementedError,
        "attn_mask: must be None where keys are of torch.float8_e4m3fn",
    ),
    "mixed": (
        {"v": torch.zeros(12, 2, 16).double(), "v_descale": None},
        TypeError,
        "v: must have the dtype of k",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PACKED_BAD)
def test_bad_arguments_of_packed_sequences(name: str) -> None:
    changes, kind, message = PACKED_BAD[name]
    with pytest.raises(kind, match=f"^{message}"):
        flash_attn_varlen_func(**{**packed_inputs(), "k_descale": 1.0, "v_descale": 1.0, **changes})


def test_other_functions_do_not_take_it() -> None:
    q, k = torch.zeros(2, 5, 2, 16), torch.zeros(2, 5, 2, 16).to(E4M3)
    with pytest.raises(TypeError, match=r"^k: dtype must be one of float16.* got .*float8_e4m3fn"):
        ours.flash_attn_func(q, k, k)
    kv = torch.zeros(10, 2, 2, 16).to(E4M3)
    with pytest.raises(ValueError, match=r"^k_descale: must be given where kv\[:, 0\] is of"):
        ours.flash_attn_varlen_kvpacked_func(
            q.flatten(0, 1), kv, int32(0, 5, 10), int32(0, 5, 10), 5, 5
        )
    call = packed_inputs(torch.float32)
    lengths = {name: call.pop(name) for name in ("cu_seqlens_q", "cu_seqlens_k")}
    origin = torch.zeros(2, 4, dtype=torch.int32)
    most = {"max_seqlen_q": 5, "max_seqlen_k": 6}
    scales = {"k_descale": torch.ones(2), "v_descale": torch.ones(2)}
    for name, value in (("fp32_results", True), ("origin", origin)):
        flat = arguments(
            call["q"], call["k"], call["v"], **lengths, **most, **scales, **{name: value}
        )
        with pytest.raises(NotImplementedError, match=f"^{name}: must be"):
            _ops.attention(*flat)


@pytest.mark.parametrize("name", ["q", "k_descale", "v_descale", "sink", "k", "v_cache"])
def test_gradients_over_a_cache_are_refused(name: str) -> None:
    made = {**a_cache(new=1), "sink": torch.zeros(4)}
    made[name] = made[name].clone().requires_grad_()
    with pytest.raises(NotImplementedError, match=f"^{name}: must not require grad"):
        flash_attn_with_kvcache(**made)
    with torch.no_grad():
        flash_attn_with_kvcache(**made)


@pytest.mark.parametrize("name", ["q", "k", "v", "k_descale", "v_descale", "sink"])
def test_gradients_of_packed_sequences_are_refused(name: str) -> None:
    scales = {f"{x}_descale": torch.ones(2) for x in "kv"}
    made = {**packed_inputs(), **scales, "sink": torch.zeros(4)}
    leaf = made[name].clone().requires_grad_()
    with pytest.raises(NotImplementedError, match=f"^{name}: must not require grad"):
        flash_attn_varlen_func(**made | {name: leaf})
    with torch.no_grad():
        flash_attn_varlen_func(**made | {name: leaf})
    if made[name].dtype == E4M3:
        return
    with (
        forward_ad.dual_level(),
        pytest.raises(NotImplementedError, match=f"^{name}: must not carry a forward-mode"),
    ):
        dual = forward_ad.make_dual(made[name], torch.ones_like(made[name]))
        flash_attn_varlen_func(**made | {name: dual})


# -- operators -------------------------------------------------------------------------------------


def fields(new: int = 0, form: str = "batch", **changes: Any) -> dict[str, Any]:
    """Of an operator's call."""
    made = a_cache(new, form)
    call = {
        "q": made["q"], "k": made["k_cache"], "v": made["v_cache"], "over_cache": True,
        "seqused_k": made["cache_seqlens"], "causal": True,
        "k_descale": made["k_descale"], "v_descale": made["v_descale"],
        "q_descale": torch.rand(2, 2),
    }  # fmt: skip
    if new:
        call |= {"k_new": made["k"], "v_new": made["v"]}
    return call | changes


def test_opcheck() -> None:
    expanded = {"k_descale": torch.ones(1).expand(2), "v_descale": torch.ones(2, 1).expand(2, 2)}
    quantized = append_arguments(**fields(1, "token", quantizes_tokens=True))
    # torch's own comparison of tensors before and after has no e4m3: what is written is below.
    tests = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    for op, flat in (
        (_ops.attention, arguments(**fields())),
        (_ops.attention, arguments(**fields(form="token"))),
        (_ops.attention_with_append, append_arguments(**fields(1))),
        (_ops.attention_with_append, append_arguments(**fields(1, **expanded))),
        (_ops.attention_with_quantized_append, quantized),
    ):
        opcheck(op, flat, test_utils=tests)


def test_what_operators_say_that_they_write() -> None:
    def written(op: Any) -> list[str]:
        arguments = op.default._schema.arguments
        return [x.name for x in arguments if x.alias_info is not None and x.alias_info.is_write]

    assert written(_ops.attention) == []
    assert written(_ops.attention_with_append) == ["k", "v"]
    scales = ["k_descale", "v_descale"]
    assert written(_ops.attention_with_quantized_append) == ["k", "v", *scales]
    quantized, plain = fields(1, "token", quantizes_tokens=True), fields(1, "token")
    with pytest.raises(ValueError, match=r"^quantizes_tokens: must be False"):
        _ops.attention_with_append(*append_arguments(**quantized))
    with pytest.raises(ValueError, match=r"^quantizes_tokens: must be True"):
        _ops.attention_with_quantized_append(*append_arguments(**plain))


@pytest.mark.parametrize("name", ["q", "k_descale", "q_descale"])
def test_operators_refuse_gradients(name: str) -> None:
    made = fields()
    made[name].requires_grad_()
    with pytest.raises(NotImplementedError, match=f"^{name}: must not require grad"):
        _ops.attention(*arguments(**made))
    with torch.no_grad():
        assert not _ops.attention(*arguments(**made))[0].requires_grad


def test_backward_operators_refuse_it() -> None:
    call = packed_inputs(torch.float32)
    call |= {f"{x}_descale": torch.ones(2) for x in "kv"}
    out, lse, *_ = _ops.attention(*arguments(**call))
    flat = gradients_arguments(**call, dout=out, out=out, softmax_lse=lse)
    with pytest.raises(NotImplementedError, match=r"^k: must not be of torch.float8_e4m3fn"):
        _ops.attention_gradients(*flat)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("quantize", [None, "token"])
def test_compiled_decoding(backend: str, quantize: str | None) -> None:
    """A loop of steps, whose lengths are tensors: caches and scales that it leaves behind."""
    torch._dynamo.reset()

    def step(
        q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, used: Tensor,
        k_descale: Any, v_descale: Any,
    ) -> Tensor:  # fmt: skip
        out = flash_attn_with_kvcache(
            q * 2.0, k_cache, v_cache, k, v, cache_seqlens=used, causal=True,
            k_descale=k_descale, v_descale=v_descale, quantize=quantize,
        )  # fmt: skip
        if quantize is not None:
            out = out + k_descale[:, :3].sum()
        return out

    compiled = torch.compile(step, fullgraph=True, backend=backend)

    def made() -> dict[str, Any]:
        state = {f"{x}_cache": torch.zeros(3, 11, 2, 16).to(E4M3) for x in "kv"}
        scales = {f"{x}_descale": torch.zeros(3, 11, 2) for x in "kv"}
        return state | (scales if quantize else {"k_descale": 0.1, "v_descale": torch.ones(2)})

    states, used = [made(), made()], int32(0, 3, 5)
    for _ in range(3):
        given = {"q": torch.randn(3, 1, 4, 16), "used": used}
        given |= {x: torch.randn(3, 1, 2, 16) for x in "kv"}
        actual = compiled(**given, **states[0])
        torch.testing.assert_close(actual, step(**given, **states[1]))
        used = used + 1
    for name, x in states[0].items():
        if isinstance(x, Tensor):
            assert torch.equal(*(y.view(torch.uint8) for y in (x, states[1][name]))), name
    assert states[0]["k_cache"].view(torch.uint8).any()


def test_export() -> None:
    class Module(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, kv: Tensor, scale: Tensor) -> Tensor:
            return flash_attn_with_kvcache(
                q, k, v, kv, kv, cache_seqlens=3, k_descale=scale, v_descale=scale
            )

    caches = [torch.zeros(2, 9, 2, 16).to(E4M3) for _ in "kv"]
    given = (torch.randn(2, 1, 4, 16), *caches, torch.randn(2, 1, 2, 16), torch.rand(2, 2))
    program = torch.export.export(Module(), tuple(x.clone() for x in given))
    assert "flash_attn_cuda.attention_with_append" in str(program.graph)
    exported, eager = [[x.clone() for x in given] for _ in range(2)]
    torch.testing.assert_close(program.module()(*exported), Module()(*eager))
    for x, y in zip(exported, eager, strict=True):
        assert torch.equal(x.view(torch.uint8), y.view(torch.uint8))


@pytest.mark.parametrize("packed", [False, True])
def test_fake_cuda_tensors(packed: bool) -> None:
    with FakeTensorMode():
        rows = (6,) if packed else (2, 3)
        q = torch.empty(*rows, 4, 64, device="cuda").to(E4M3)
        pool = torch.empty(7, 5, 2, 64, device="cuda").to(E4M3)
        table = torch.empty(2, 3, device="cuda", dtype=torch.int32)
        cu = torch.empty(3, device="cuda", dtype=torch.int32) if packed else None
        scale = torch.empty(7, 5, 2, device="cuda")
        out, lse = flash_attn_with_kvcache(
            q, pool, pool, block_table=table, cache_seqlens=4, cu_seqlens_q=cu,
            q_descale=1.0, k_descale=scale, v_descale=0.5, return_softmax_lse=True,
        )  # fmt: skip
        assert out.shape == q.shape and out.dtype == torch.bfloat16
        assert lse.shape == ((4, 6) if packed else (2, 4, 3)) and lse.dtype == torch.float32


def test_mapped_calls() -> None:
    """One entry after the other."""
    call = packed_inputs()
    call |= {f"{x}_descale": torch.rand(2) for x in "kv"}
    q = torch.randn(3, *call.pop("q").shape, dtype=torch.float64)
    with torch.no_grad():
        out = torch.func.vmap(lambda x: flash_attn_varlen_func(x, **call))(q)
        expected = torch.stack([flash_attn_varlen_func(x, **call) for x in q])
    torch.testing.assert_close(out, expected)
