"""The extension's own rules of a call, which callers of FlashAttention-2's functions and of torch's
operators meet. The public functions' are in test_checks.py.

Without a GPU: the extension describes a call of tensors on the CPU by the same rules
(explain_settings), but for those of q, k and v, which want a GPU.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from flash_attn_cuda.call.fields import AttentionCall
from flash_attn_cuda.installed import build_info

pytestmark = pytest.mark.skipif(
    build_info.extension is None, reason="flash_attn_cuda._C is not built here"
)


def integers(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def zeros(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


def new_keys(rows: int, heads: int = 2, head_dim_v: int = 16, **further: Any) -> dict[str, Any]:
    """Keys and values to be appended to a cache of two sequences."""
    return {
        "k_new": zeros(2, rows, heads, 16),
        "v_new": zeros(2, rows, heads, head_dim_v),
    } | further


PACKED_KEYS = {"k_new": zeros(3, 2, 16), "v_new": zeros(3, 2, 16)}
LISTS = {name: zeros(1, 1, 1, 3, dtype=torch.int32) for name in ("block_rows", "block_columns")}


def tables(rows: int, columns: int = 8) -> dict[str, Any]:
    return {name: zeros(rows, columns) for name in ("rotary_cos", "rotary_sin")}


def many_sequences(queries: int, rows: int) -> dict[str, Any]:
    """2^30 over one page, with so many queries and new keys each."""
    q, new = zeros(1, queries, 4, 16), zeros(1, rows, 2, 16)
    given = {"q": q, "k_new": new, "v_new": new, "block_table": zeros(1, 1, dtype=torch.int32)}
    return {name: x.expand(2**30, *x.shape[1:]) for name, x in given.items()} | {"seqlen_k": 3}


# What is added to a call over a cache of ten rows for each of two sequences, and the error.
OVER_CACHE: dict[str, tuple[dict[str, Any], str]] = {
    "packed rows that kernels cannot number": (
        {name: zeros(1, 2, 16).expand(10**9 + 1, -1, -1) for name in ("k_new", "v_new")}
        | {"cu_seqlens_k_new": integers(0, 1, 2), "seqlen_k": 3},
        "k: must have at most 1000000000 rows of all sequences, got 1000000001",
    ),
    "rows that kernels cannot number": (many_sequences(queries=1, rows=3),
        "k: must have at most 2147483647 rows of all sequences, got 3221225472"),
    "queries that kernels cannot number": (many_sequences(queries=3, rows=1) | tables(9),
        "q: must have at most 2147483647 rows of all sequences, got 3221225472"),
    "too many rows": (new_keys(11, seqlen_k=0),
        "k: must fit the cache, which holds 10 rows of a sequence, got 11"),
    "no room": (
        new_keys(4, seqlen_k=7),
        "cache_seqlens: must be from 0 to 6, for 4 new keys and a cache of 10, got 7",
    ),
    "short tables": (
        new_keys(1, seqlen_k=9) | tables(9),
        "rotary_cos: must have a row for every position, 10 in all, got 9",
    ),
    "rows that are one": (new_keys(1, seqlen_k=1, k=zeros(1, 10, 2, 16).expand(2, -1, -1, -1)),
        "k_cache: must not name memory twice where keys are appended, got strides"),
}  # fmt: skip
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "probabilities": (
        {
            **{"over_cache": False, "q": zeros(6, 4, 16), "k": zeros(6, 2, 16)},
            **{"v": zeros(6, 2, 16), "dropout_p": 0.5, "return_softmax": True},
            **{name: integers(0, 6) for name in ("cu_seqlens_q", "cu_seqlens_k")},
            **{"max_seqlen_q": 6, "max_seqlen_k": 2**31},
        },
        "return_softmax: must be False where max_seqlen_q or max_seqlen_k is above 2147483647 "
        "(2147483648), got True",
    ),
}


def e4m3(*shape: int) -> Tensor:
    return torch.zeros(shape).to(torch.float8_e4m3fn)


def e4m3_cache(head_dim: int = 16, head_dim_v: int = 16) -> dict[str, Any]:
    q = zeros(2, 3, 4, head_dim)
    return {"q": q, "k": e4m3(2, 10, 2, head_dim), "v": e4m3(2, 10, 2, head_dim_v)}


def scales(*shape: int) -> Tensor:
    return torch.ones(shape)


def of_heads(*shape: int) -> dict[str, Any]:
    return {name: scales(*shape or (2,)) for name in ("k_descale", "v_descale")}


def of_tokens() -> dict[str, Any]:
    """Scales of each token, which an append writes."""
    return new_keys(1, seqlen_k=3, quantizes_tokens=True) | {
        name: scales(2, 10, 2) for name in ("k_descale", "v_descale")
    }


NEW_NUMBERS = {"k_new": e4m3(2, 1, 2, 16), "v_new": e4m3(2, 1, 2, 16), "seqlen_k": 3}
# What is added to a call over such a cache, and the error.
OVER_E4M3: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "strides": ({"k": e4m3(2, 10, 2, 24)[..., :16]}, ValueError,
        "k_cache: strides of rows must be multiples of 16 of torch.float8_e4m3fn, got strides"),
    "first row": ({"v": e4m3(2, 10, 2, 32)[..., 8:24]}, ValueError,
        "v_cache: must begin at a multiple of 16 bytes of torch.float8_e4m3fn, got an address 8 "),
    "packed keys": ({**{"over_cache": False, "q": zeros(3, 4, 16), "k": e4m3(7, 2, 16)},
        **{"v": e4m3(7, 2, 16), "k_descale": scales(7, 2)},
        **{"cu_seqlens_q": integers(0, 3), "cu_seqlens_k": integers(0, 7)}}, ValueError,
        "k_descale: must have shape (2,) or (1, 2), got (7, 2)"),
    "new keys": (NEW_NUMBERS | {"v_new": zeros(2, 1, 2, 16)}, TypeError,
        "v: dtype must be torch.float8_e4m3fn, got torch.bfloat16"),
    "keys beside latent rows": ({"k": zeros(2, 10, 2, 20)[..., :16], "k_descale": None,
        "qv": zeros(2, 3, 4, 16), "softmax_scale": 0.1}, ValueError,
        "k_cache: strides of rows must be multiples of 8 of torch.bfloat16, got strides"),
}  # fmt: skip


def explain(**given: Any) -> None:
    extension: Any = build_info.extension
    call = {"q": zeros(2, 3, 4, 16), "k": zeros(2, 10, 2, 16), "v": zeros(2, 10, 2, 16)}
    extension.explain_settings(AttentionCall(**call | given))


@pytest.mark.parametrize("name", OVER_CACHE)
def test_over_a_cache(name: str) -> None:
    given, text = OVER_CACHE[name]
    with pytest.raises(ValueError) as raised:
        explain(over_cache=True, **given)
    assert str(raised.value).startswith(text)


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    given, text = REFUSED[name]
    with pytest.raises(NotImplementedError) as raised:
        explain(**{"over_cache": True} | given)
    assert str(raised.value).startswith(text)


@pytest.mark.parametrize("name", OVER_E4M3)
def test_over_a_cache_of_e4m3(name: str) -> None:
    given, error, text = OVER_E4M3[name]
    with pytest.raises(error) as raised:
        explain(**{"over_cache": True} | e4m3_cache() | of_heads() | given)
    assert str(raised.value).startswith(text)


def test_no_gradient_of_scales() -> None:
    extension: Any = build_info.extension
    call = AttentionCall(**e4m3_cache(), k_descale=scales(2).requires_grad_())
    with pytest.raises(NotImplementedError, match=r"^k_descale: must not require grad"):
        extension.forward(call)


def test_flash_attention_2_has_no_scales() -> None:
    extension: Any = build_info.extension
    q, k, v = e4m3_cache().values()
    further = (*[None] * 10, 1.0, False, -1, -1, 0.0, True, 0)
    with pytest.raises(TypeError) as raised:
        extension.fwd_kvcache(q, k, v, *further)
    assert str(raised.value).startswith("k_cache: must have the dtype of q (torch.bfloat16), got")


@pytest.mark.parametrize("shape", [(2,), (2, 2), (2, 10, 2)])
def test_scales_that_fit(shape: tuple[int, ...]) -> None:
    for scale in (scales(*shape), scales(1).expand(shape)):
        explain(**e4m3_cache(), over_cache=True, k_descale=scale, v_descale=scale)
    explain(**e4m3_cache(), over_cache=True, **of_tokens(), q_descale=scales(2, 2))
    pages = {"k": e4m3(5, 8, 2, 16), "v": e4m3(5, 8, 2, 32), "block_table": integers(0, 1)[:, None]}
    per_token = (5, 8, 2) if len(shape) == 3 else shape
    explain(**e4m3_cache() | pages, over_cache=True, **of_heads(*per_token))
    on_meta = {name: x.to("meta") for name, x in (e4m3_cache() | of_heads(*shape)).items()}
    explain(**on_meta, over_cache=True)


def test_what_fits() -> None:
    explain(over_cache=True, **new_keys(1, seqlen_k=8), **tables(9))
    explain(**LISTS, mask_bits=zeros(1, 1, 3, 4, dtype=torch.int32), bias=zeros(2, 4, 1, 10))
