"""What calls over keys and values of FP8 (e4m3) compute, on the CPU backend."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flash_attn_cuda import flash_attn_varlen_func, flash_attn_with_kvcache
from tests.cases.fp8_cache import (
    E4M3,
    FORMS,
    STRIDES,
    Fp8Case,
    assert_fp8_close,
    attend,
    check_fp8,
    dequantized,
    packed_inputs,
    reference_of,
)
from tests.cases.kvcache import CACHE_AXES, QUERIES, cache_case
from tests.cases.masked_operators import int32
from tests.cases.pairwise import pairwise
from tests.reference.fp8 import from_bytes, to_bytes

pytestmark = pytest.mark.usefixtures("one_thread")

_ops = torch.ops.flash_attn_cuda

AXES: dict[str, list[Any]] = {
    **CACHE_AXES,
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
    cache = cache_case(
        queries,
        rotary if appends else "none",
        features,
        heads,
        head_dim=head_dims[0],
        head_dim_v=head_dims[1],
        **fields,
    )
    if quantize is not None and appends:
        forms = ("token", "token", "strided" if strides == "expanded" else strides)
    else:
        forms, quantize = (k_form, v_form, strides), None
    return Fp8Case(cache, *forms, powers=powers, quantize=quantize, q_is_fp8=q_is_fp8)


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
@pytest.mark.parametrize("row", pairwise(AXES, 1)[::3], ids=str)
def test_low_precision_is_close(row: dict[str, Any], dtype: torch.dtype, q_is_fp8: bool) -> None:
    case = make_case(**row, dtype=dtype, q_is_fp8=q_is_fp8 and dtype == torch.bfloat16)
    check_fp8(case)


# -- packed sequences ------------------------------------------------------------------------------


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
