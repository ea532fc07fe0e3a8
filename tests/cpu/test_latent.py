"""Latent attention on the CPU backend, beside the calls over a cache of test_kvcache.py."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.flop_counter import FlopCounterMode

from flash_attn_cuda import (
    LatentFormat,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    latent_views,
    quantize_latent,
)
from tests.cases.fp8_cache import (
    E4M3,
    TOKEN_FORMS,
    Fp8Case,
    assert_fp8_close,
    attend,
    check_fp8,
    dequantized,
)
from tests.cases.fp8_harness import LATENT_FORMS, V4_ROWS
from tests.cases.harness import assert_same_bits, attend_over_cache, bits
from tests.cases.kvcache import CACHE_AXES, KvCacheCase, cache_case
from tests.cases.latent import check_packed, joined, split, with_poisoned_table
from tests.cases.pairwise import pairwise
from tests.cases.varlen import VarlenCase
from tests.reference.fp8 import scaled_down, to_bytes, to_powers, token_powers, token_scales

pytestmark = pytest.mark.usefixtures("one_thread")

SMALL: dict[str, Any] = {"head_dim": 16, "head_dim_v": 40, "softmax_scale": 0.1, "device": "cpu"}
CU = torch.tensor([0, 2, 6], dtype=torch.int32)
USED = torch.tensor([5, 3], dtype=torch.int32)


@pytest.mark.parametrize("page_size", [None, 1, 7])
@pytest.mark.parametrize(
    "features",
    [
        {"causal": True}, {"window": (9, 3), "softcap": 4.0}, {"leftpad": (5, 0, 9)},
        {"used_q": (1, 0, 5), "used_k": (19, 9, 0)},
    ],
    ids=str,
)  # fmt: skip
def test_packed(features: dict[str, Any], page_size: int | None) -> None:
    lengths: dict[str, Any] = {"lengths_q": (1, 0, 17), "lengths_k": (20, 9, 33), "num_heads_k": 2}
    case = VarlenCase(**lengths, **SMALL, **features)
    check_packed(case, page_size)
    check_packed(case, page_size, keys_per_list=12)


@pytest.mark.parametrize("page_size", [None, 8])
def test_joined_caches_and_poisoned_tables(page_size: int | None) -> None:
    case = KvCacheCase(cached=(30, 0, 9), capacity=64, page_size=page_size, has_qv=True, **SMALL)
    inputs = case.make_inputs()
    expected, *_ = attend_over_cache(case, inputs)
    assert_same_bits(attend_over_cache(case, inputs, **joined(inputs))[0], expected)
    if page_size is not None:
        assert_same_bits(attend_over_cache(case, with_poisoned_table(inputs))[0], expected)


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.bfloat16)


def arguments_of(function: Any) -> dict[str, Any]:
    """Of a call that is valid."""
    torch.manual_seed(0)
    given: dict[str, Any] = {"softmax_scale": 0.2, "causal": True}
    if function is flash_attn_with_kvcache:
        given |= {"q": normal(2, 3, 4, 8), "qv": normal(2, 3, 4, 16), "cache_seqlens": USED}
        return given | dict(
            zip(("k_cache", "v_cache"), split(normal(2, 9, 1, 24), 16), strict=True)
        )
    given |= {"q": normal(6, 4, 8), "qv": normal(6, 4, 16), "cu_seqlens_q": CU, "cu_seqlens_k": CU}
    given |= {"k": normal(6, 2, 8), "v": normal(6, 2, 16), "max_seqlen_q": 4, "max_seqlen_k": 4}
    return given


def with_lists(function: Any) -> dict[str, Any]:
    """Of a call that is valid: two keys of each query, the first twice."""
    given = arguments_of(function)
    heads_k = given["k_cache" if "k_cache" in given else "k"].shape[-2]
    lists = torch.tensor([0, -1, 0, 1, -7], dtype=torch.int32)
    return given | {"key_lists": lists.expand(*given["q"].shape[:-2], heads_k, 5)}


FUNCTIONS = pytest.mark.parametrize("function", [flash_attn_with_kvcache, flash_attn_varlen_func])


@FUNCTIONS
@pytest.mark.parametrize("chunk", [0, 2])
def test_equals_one_product(function: Any, chunk: int) -> None:
    """Of queries and keys of all columns, in chunks and into an out as well."""
    given = arguments_of(function) | {"attention_chunk": chunk}
    k, v = ("k_cache", "v_cache") if "k_cache" in given else "kv"
    wide = {"q": torch.cat([given["q"], given["qv"]], -1), "qv": None}
    wide[k] = torch.cat([given[k], given[v]], -1)
    out = torch.empty_like(given["qv"])
    assert function(**given, out=out) is out
    assert torch.equal(bits(out), bits(function(**given | wide)))


@FUNCTIONS
def test_there_is_no_backward(function: Any) -> None:
    given = arguments_of(function)
    for name in ("q", "qv", "v_cache" if "v_cache" in given else "v"):
        leaf = given[name].clone().requires_grad_()
        with pytest.raises(NotImplementedError, match=rf"^{name}: must not require grad, .* no"):
            function(**given | {name: leaf})
        with torch.no_grad():
            function(**given | {name: leaf})
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(given[name], torch.ones_like(given[name]))
            with pytest.raises(NotImplementedError, match=rf"^{name}: must not carry a forward"):
                function(**given | {name: dual})


@FUNCTIONS
@pytest.mark.parametrize("make", [arguments_of, with_lists])
def test_under_a_compiler(function: Any, make: Any) -> None:
    given = make(function)
    compiled = torch.compile(lambda x: function(**x), fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert torch.equal(compiled(given), function(**given))


def test_under_autocast_and_vmap() -> None:
    given = arguments_of(flash_attn_varlen_func)
    expected, qv = flash_attn_varlen_func(**given), given.pop("qv")
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(flash_attn_varlen_func(**given, qv=qv.float()), expected)
    mapped = torch.vmap(lambda x: flash_attn_varlen_func(**given, qv=x))
    assert torch.equal(mapped(torch.stack([qv, qv * 0]))[0], expected)


# -- rows of FP8 -----------------------------------------------------------------------------------

SMALL_ROWS = LatentFormat(128, 8, 64, scale_offset=128, rotary_offset=144, row_bytes=176)
SMALL_V4_ROWS = LatentFormat(
    *(128, 8, 64, torch.float8_e8m0fnu),
    scale_offset=0, rotary_offset=128, row_bytes=152, page_scale_bytes=8,
)  # fmt: skip
EVERY_ROWS = pytest.mark.parametrize("rows", [SMALL_ROWS, SMALL_V4_ROWS])
FP8_AXES: dict[str, list[Any]] = {
    **{name: values for name, values in CACHE_AXES.items() if name != "features"},
    "features": [{}, {"softcap": 2.0}],
    "form": [*LATENT_FORMS],
    "head_dims": [(16, 128), (24, 64), (32, 256)],
    "group": [64, 128],
    "quantize": [False, True],
    "keys_per_list": [None, 7],
}


def fp8_case(
    form: str,
    head_dims: tuple[int, int],
    group: int,
    quantize: bool,
    keys_per_list: int | None = None,
    **row: Any,
) -> Any:
    cache = cache_case(
        **row | {"rotary": row["rotary"] if "append" in row["queries"] else "none"},
        head_dim=head_dims[0], head_dim_v=head_dims[1],
    )  # fmt: skip
    of_latent: dict[str, Any] = {"has_qv": True, "softmax_scale": 0.2}
    of_latent["keys_per_list"] = keys_per_list
    # Rotary columns of rows of bytes are in 16 bits.
    dtype = torch.bfloat16 if LATENT_FORMS[form]["strides"] == "rows" else torch.float64
    case = Fp8Case(replace(cache, dtype=dtype, **of_latent), **LATENT_FORMS[form])
    writes = quantize and case.v_form in TOKEN_FORMS and case.strides != "expanded"
    appends = cache.seqlens_new is not None
    return replace(
        case, group=min(group, head_dims[1]), quantize="token" if writes and appends else None
    )


@pytest.mark.parametrize("row", pairwise(FP8_AXES, 2), ids=str)
def test_rows_of_fp8(row: dict[str, Any]) -> None:
    check_fp8(fp8_case(**row))


@pytest.mark.parametrize("form", ["rows", "batch", V4_ROWS])
def test_chunks_of_rows_of_fp8(form: str) -> None:
    """Behind an append. A chunk of all keys hides none."""
    base: dict[str, Any] = {"head_dims": (16, 128), "group": 64, "quantize": True}
    base |= {"rotary": "pairs", "features": {}, "heads": (4, 1), "page_size": 7, "causal": True}
    case = fp8_case(form, queries="chunk", **base)
    inputs = case.make_inputs()
    result, written = attend(case, inputs, attention_chunk=100)
    assert_fp8_close(case, inputs, result, written)
    assert not torch.equal(attend(case, inputs, attention_chunk=8)[0].out, result.out)


def test_packed_values_of_fp8() -> None:
    given = arguments_of(flash_attn_varlen_func)
    v, scale = to_bytes(40.0 * torch.randn(6, 2, 16)).view(E4M3), torch.tensor([0.25, 0.5])
    found = flash_attn_varlen_func(**given | {"v": v}, v_descale=scale)
    wide = dequantized(v, scale[:, None], torch.bfloat16)
    expected = flash_attn_varlen_func(**given | {"v": wide})
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)


@EVERY_ROWS
def test_packed_queries_over_rows_of_fp8(rows: LatentFormat) -> None:
    """flash_attn_varlen_func over pages: as flash_attn_with_kvcache."""
    views = dict(
        zip(("k", "v", "v_descale"), latent_views(some_rows(5, 4, of=rows), rows), strict=True)
    )
    q, qv, lengths = normal(6, 4, 8), normal(6, 4, 128), {"cu_seqlens_q": CU}
    table = torch.tensor([[3, 0], [1, 2]], dtype=torch.int32)
    options: dict[str, Any] = {"softmax_scale": 0.2, "causal": True, "qv": qv, "block_table": table}
    options["values_include_rope"] = rows.page_scale_bytes > 0
    found = flash_attn_varlen_func(
        q, **views, **lengths, cu_seqlens_k=None, max_seqlen_q=4, max_seqlen_k=5, seqused_k=USED,
        **options,
    )  # fmt: skip
    caches = {f"{name}_cache": views.pop(name) for name in "kv"}
    assert torch.equal(
        found,
        flash_attn_with_kvcache(q, **caches, **views, **lengths, cache_seqlens=USED, **options),
    )


def some_rows(*shape: int, of: LatentFormat = SMALL_ROWS) -> Tensor:
    return quantize_latent(normal(*shape, 128), normal(*shape, 8), of)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_quantize_latent(dtype: torch.dtype) -> None:
    """The numbers and scales of the reference, in places of a row of 656 bytes."""
    latent = (torch.randn(3, 2, 4, 128) * torch.tensor([1e-3, 1.0, 30.0, 2.0])[:, None]).to(dtype)
    latent[0, 0, 0, :3] = torch.tensor([torch.inf, torch.nan, -torch.inf])
    latent[0, 1, 1], latent[1, 0, 2, 5:] = 0.0, -0.0
    rotary = normal(3, 2, 64)
    rows = quantize_latent(latent.flatten(-2), rotary)
    assert rows.shape == (3, 2, 656) and rows.dtype == torch.uint8
    scale = token_scales(latent)
    assert torch.equal(rows[..., :512], to_bytes(scaled_down(latent, scale[..., None])).flatten(-2))
    assert torch.equal(rows[..., 512:528], scale.view(torch.uint8))
    assert torch.equal(rows[..., 528:], rotary.view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_quantize_latent_as_flash_mla_does(dtype: torch.dtype) -> None:
    """Its tests/quant.py: scales are powers of two, from 2^-13 on, behind the rows of a page."""
    latent = torch.randn(3, 4, 7, 64) * torch.tensor([1e-3, 1.0, 30.0, 448.0])[:, None, None]
    latent[0, 0, :3] = torch.tensor([0.0, 448.0 * 2.0**-9, 450.0 * 2.0**-9])[:, None]
    latent, rotary = latent.to(dtype), normal(3, 4, 64)
    pages = quantize_latent(latent.flatten(-2), rotary, LatentFormat.DEEPSEEK_V4)
    assert pages.shape == (3, 4, 584)
    rows, scales = pages.flatten(1).split([4 * 576, 4 * 8], 1)
    rows, scales = rows.view(3, 4, 576), scales.view(3, 4, 8)
    scale = token_powers(latent)
    assert scale[0, 0, :3].tolist() == [2.0**-13, 2.0**-9, 2.0**-8]
    assert torch.equal(scales[..., :7], to_powers(scale)) and not scales[..., 7].any()
    assert torch.equal(rows[..., :448], to_bytes(scaled_down(latent, scale[..., None])).flatten(-2))
    assert torch.equal(rows[..., 448:], rotary.view(torch.uint8))


@pytest.mark.parametrize("as_bytes", [torch.uint8, torch.int8, E4M3], ids=str)
def test_latent_views(as_bytes: torch.dtype) -> None:
    """Nothing is copied; bytes of no part stay 0."""
    rows = some_rows(3, 5)[:, :4]
    assert not rows[..., 136:144].any() and not rows[..., 160:].any()
    for cache in (rows, rows[:, :, None]):
        k, v, scale = latent_views(cache.view(as_bytes), SMALL_ROWS)
        assert k.shape == (3, 4, 1, 8) and v.shape == (3, 4, 1, 128) and scale.shape == (3, 4, 1, 2)
        begins = [x.data_ptr() - rows.data_ptr() for x in (v, scale, k)]
        assert begins == [0, 128, 144] and v.stride() == (880, 176, 176, 1)
    assert latent_views(rows, SMALL_ROWS, torch.float16)[0].dtype == torch.float16


def test_views_of_pages_with_scales_behind() -> None:
    """Of several heads; pages lie apart, and what is odd of them is seen."""
    room = some_rows(3, 10, of=SMALL_V4_ROWS).flatten(1)[:, : 8 * 152]
    pages = room.unflatten(1, (4, 2, 152))
    k, v, scale = latent_views(pages, SMALL_V4_ROWS)
    assert k.shape == (3, 4, 2, 8) and v.shape == (3, 4, 2, 128) and scale.shape == (3, 4, 2, 2)
    begins = [x.data_ptr() - pages.data_ptr() for x in (v, k, scale)]
    assert begins == [0, 128, 8 * 144]
    assert v.stride() == (1520, 288, 144, 1) and scale.stride() == (1520, 16, 8, 1)
    for apart in (pages[:, :, :1], pages[:, ::2]):
        with pytest.raises(ValueError, match=r"^cache: pages must be contiguous, as scales lie"):
            latent_views(apart, SMALL_V4_ROWS)


ROW = normal(2, 3, 512), normal(2, 3, 64)
OF_BYTES = replace(LatentFormat(), scale_dtype=torch.uint8)
# What is called, the exception, and its first words.
BAD_ROWS: tuple[tuple[Any, tuple[Any, ...], type[Exception], str], ...] = (
    (quantize_latent, (ROW[0].int(), ROW[1]), TypeError, "latent: dtype must be one of"),
    (quantize_latent, (ROW[0], ROW[1].float()), TypeError, "rotary: dtype must be one of"),
    (quantize_latent, (ROW[1], ROW[1]), ValueError,
     r"latent: last dimension must be 512, got \(2, 3, 64\)"),
    (quantize_latent, (ROW[0], ROW[1][:1]), ValueError,
     r"rotary: must have shape \(2, 3, 64\), got \(1, 3, 64\)"),
    (quantize_latent, (*ROW, OF_BYTES), NotImplementedError,
     "row_format: scale_dtype must be torch.float32 or torch.float8_e8m0fnu, got torch.uint8"),
    (quantize_latent, (ROW[0].clone().requires_grad_(), ROW[1]), NotImplementedError,
     "latent: must not require grad"),
    (latent_views, (normal(2, 3, 656),), TypeError, "cache: dtype must be one of uint8"),
    (latent_views, (some_rows(2, 3), SMALL_ROWS, torch.float32), TypeError,
     "dtype: dtype must be one of float16, bfloat16, got torch.float32"),
    (latent_views, (some_rows(2, 3),), ValueError,
     r"cache: must have shape .*, 656\), got \(2, 3, 176\)"),
)  # fmt: skip


def test_bad_rows_of_fp8() -> None:
    for function, given, kind, message in BAD_ROWS:
        with pytest.raises(kind, match=f"^{message}"):
            function(*given)


@EVERY_ROWS
def test_an_append_makes_the_rows_of_quantize_latent(rows: LatentFormat) -> None:
    """Under a compiler too, where the views are made in what it compiles."""
    of_rows, is_v4 = rows, rows.page_scale_bytes > 0
    cache, new = some_rows(2, 9, of=of_rows), (normal(2, 3, 128), normal(2, 3, 8))
    q, qv = normal(2, 1, 4, 8), normal(2, 1, 4, 128)

    def step(cache: Tensor) -> Tensor:
        k, v, scale = latent_views(cache, of_rows)
        latent, rotary = (x[:, :, None] for x in new)
        return flash_attn_with_kvcache(
            q, k, v, rotary, latent, cache_seqlens=USED, qv=qv, v_descale=scale, quantize="token",
            softmax_scale=0.2, values_include_rope=is_v4,
        )  # fmt: skip

    expected = cache.clone()
    parts = latent_views(expected, of_rows)
    made = latent_views(quantize_latent(*new, of_rows), of_rows)
    for index, used in enumerate(USED.tolist()):
        for part, of_new in zip(parts, made, strict=True):
            at = index, slice(used, used + 3)
            part.view(torch.uint8)[at] = of_new[index].view(torch.uint8)
    written, compiled = cache.clone(), cache.clone()
    out = step(written)
    assert torch.equal(written, expected)
    with torch.no_grad():
        found = torch.compile(step, fullgraph=True, backend="aot_eager")(compiled)
    assert torch.equal(found, out) and torch.equal(compiled, expected)


@pytest.mark.parametrize(("make", "pairs"), [(arguments_of, 3 * (5 + 3)), (with_lists, 2 * 3 * 5)])
def test_flops(make: Any, pairs: int) -> None:
    with FlopCounterMode(display=False) as counter:
        flash_attn_with_kvcache(**make(flash_attn_with_kvcache) | {"causal": False})
    assert counter.get_total_flops() == 2 * 4 * pairs * (8 + 16 + 16)


# -- lists of keys ---------------------------------------------------------------------------------


@FUNCTIONS
def test_lists_by_other_roads(function: Any) -> None:
    given = with_lists(function)
    expected = function(**given)
    assert not torch.equal(expected, function(**given | {"key_lists": None}))
    out = torch.empty_like(expected)
    assert function(**given, out=out) is out and torch.equal(out, expected)
    lists = given.pop("key_lists")
    mapped = torch.vmap(lambda x: function(**given, key_lists=x))
    assert torch.equal(
        mapped(torch.stack([lists, lists * 0 - 1])), torch.stack([expected, out * 0])
    )


@FUNCTIONS
@pytest.mark.parametrize("count", [0, 3])
def test_lists_of_nothing(function: Any, count: int) -> None:
    given = with_lists(function)
    given |= {"key_lists": given["key_lists"][..., :count] * 0 - 1, "sink": torch.arange(4.0)}
    is_packed = function is flash_attn_varlen_func
    wants_lse = "return_attn_probs" if is_packed else "return_softmax_lse"
    out, lse, *_ = function(**given, **{wants_lse: True})
    assert not out.any()
    assert torch.equal(lse, torch.arange(4.0)[:, None].expand_as(lse))
    _, lse, *_ = function(**given | {"sink": None}, **{wants_lse: True})
    assert (lse == -torch.inf).all()


@FUNCTIONS
def test_what_lists_go_with(function: Any) -> None:
    given = with_lists(function)
    with pytest.raises(NotImplementedError, match=r"^attention_chunk: must be 0 with key_lists, "):
        function(**given, attention_chunk=2)
    with pytest.raises(NotImplementedError, match=r"^key_list_block: must be 1, got 64"):
        function(**given, key_list_block=64)
    with pytest.raises(TypeError, match=r"^key_list_block: must be an integer, got float"):
        function(**given, key_list_block=1.0)
    with pytest.raises(TypeError, match=r"^key_lists: must be a torch.Tensor, got list"):
        function(**given | {"key_lists": [0]})
    lists = given["key_lists"].clone()
    lists.flatten()[-5] = 4
    with pytest.raises(
        ValueError, match=r"^key_lists: must be below .*, [34], got 4 in sequence 1"
    ):
        function(**given | {"key_lists": lists})
