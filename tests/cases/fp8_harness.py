"""What tests of FP8 caches on the GPU share: their forms of scales, cases that the build has rows
for, and bytes that are compared.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from flash_attn_cuda.installed import build_info
from tests.cases.attention import DTYPE_NAMES
from tests.cases.fp8_cache import Fp8Case
from tests.cases.harness import ON_CPU, make_cache_case

FORMS = {
    "head": {"k_form": "head", "v_form": "head"},
    "powers": {"k_form": "batch", "v_form": "number", "powers": True},
    "token": {"k_form": "token", "v_form": "token"},
    "mixed": {"k_form": "token", "v_form": "head", "strides": "strided"},
    "expanded": {"k_form": "batch", "v_form": "token", "strides": "expanded"},
}
# Of calls with qv, whose keys have no scales.
LATENT_FORMS: dict[str, dict[str, Any]] = {
    name: {"k_form": "none", "v_form": v_form, "strides": strides}
    for name, v_form, strides in (
        ("rows", "group", "rows"),
        ("groups apart", "group", "strided"),
        ("groups", "group", "plain"),
        ("expanded groups", "group", "expanded"),
        ("token", "token", "strided"),
        ("batch", "batch", "plain"),
        ("number", "number", "plain"),
    )
}
V4_ROWS = "rows of DeepSeek V4"
LATENT_FORMS[V4_ROWS] = {**LATENT_FORMS["rows"], "is_v4": True}


def skip_without_fp8_row(case: Fp8Case) -> None:
    """Skip the test where the build has no row of e4m3 for its head dims: a row serves every
    option.
    """
    cache = case.cache
    has_row = ON_CPU or any(
        row.pass_name == "forward"
        and row.dtype == DTYPE_NAMES[cache.dtype]
        and row.head_dim >= cache.head_dim
        and row.head_dim_v >= cache.value_dim
        and ("latent" if cache.has_qv else "e4m3_kv") in row.config["features"]
        for row in build_info.compiled_rows()
    )
    if not has_row:
        head_dims = f"head dims {cache.head_dim} and {cache.value_dim}"
        pytest.skip(f"no compiled forward row of e4m3 for {DTYPE_NAMES[cache.dtype]}, {head_dims}")


def make(
    form: str = "head", *, quantize: str | None = None, q_is_fp8: bool = False, **fields: Any
) -> Fp8Case:
    """A case, or a skipped test where the build has no row for it."""
    case = Fp8Case(make_cache_case(**fields), **FORMS[form], quantize=quantize, q_is_fp8=q_is_fp8)
    skip_without_fp8_row(case)
    return case


def same_bytes(x: Tensor, y: Tensor) -> bool:
    return torch.equal(x.contiguous().view(torch.uint8), y.contiguous().view(torch.uint8))
