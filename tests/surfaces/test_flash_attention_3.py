"""flash_attn_interface, FlashAttention-3's module, on this package."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

import flash_attn_cuda as ours
from flash_attn_cuda import compat
from flash_attn_cuda.surfaces import flash_attention_3 as fa3
from tests.cases.harness import DEVICE, no_host_sync
from tests.reference import kvcache_reference
from tests.surfaces.calls import (
    ON_EVERY_DEVICE,
    assert_compiles,
    assert_near,
    assert_same,
    dense,
    expected_of,
    int32,
    normal,
)
from tests.surfaces.public_names import FLASH_ATTENTION_3

SIGNATURES = FLASH_ATTENTION_3.signatures()
OPTIONS: dict[str, Any] = {"softmax_scale": 0.4, "window_size": (4, 2), "softcap": 5.0}
EXPECTED: dict[str, Any] = {"softmax_scale": 0.4, "window": (4, 2), "softcap": 5.0}
HINTS: dict[str, Any] = {"pack_gqa": True, "sm_margin": 8}


def test_names() -> None:
    """Their signatures are in test_public_names."""
    assert sorted(SIGNATURES) == sorted(fa3.__all__)


# -- results ---------------------------------------------------------------------------------------


@ON_EVERY_DEVICE
def test_dense(device: str) -> None:
    """softmax_lse on request, as a pair, and gradients through both."""
    given = dense(device)
    for options in ({}, {"causal": True}, OPTIONS):
        results = fa3.flash_attn_func(*given, **options, return_attn_probs=True)
        assert_same(results, ours.flash_attn_func(*given, **options, return_attn_probs=True)[:2])
        assert_same(fa3.flash_attn_func(*given, **options), results[0])
        assert_same(fa3.flash_attn_func(*given, **options, **HINTS, num_splits=3), results[0])
    assert_near(results, expected_of(*given, [(7, 9)] * 2, **EXPECTED))
    leaves = [x.requires_grad_() for x in given]
    gradients = []
    for function in (fa3.flash_attn_func, ours.flash_attn_func):
        out, lse = function(*leaves, causal=True, return_attn_probs=True)[:2]
        # deterministic alone repeats dq to the bit on a GPU, which is not what this is about
        gradients.append(torch.autograd.grad(out.sin().sum() + lse[..., 1:].sin().sum(), leaves))
    assert_near(*gradients)


@ON_EVERY_DEVICE
def test_chunks(device: str) -> None:
    q, k, v = dense(device)
    for options in ({"causal": True}, {}):
        chunks = {"attention_chunk": 3, **options}
        expected = ours.flash_attn_func(q, k, v, **chunks)
        assert_same(fa3.flash_attn_func(q, k, v, **chunks), expected)
        none = (None, None, q.shape[1], k.shape[1])
        assert_near([fa3.flash_attn_varlen_func(q, k, v, *none, **chunks)], [expected])
        assert_near([fa3.flash_attn_with_kvcache(q, k, v, **chunks)], [expected])
    qkv = normal(device, 2, 7, 3, 4, 16)
    expected = ours.flash_attn_func(*qkv.unbind(2), attention_chunk=3)
    assert_same(fa3.flash_attn_qkvpacked_func(qkv, attention_chunk=3), expected)


@ON_EVERY_DEVICE
def test_qkvpacked(device: str) -> None:
    qkv = normal(device, 2, 7, 3, 4, 16).requires_grad_()
    results = fa3.flash_attn_qkvpacked_func(qkv, causal=True, return_attn_probs=True)
    expected = ours.flash_attn_qkvpacked_func(qkv, causal=True, return_attn_probs=True)[:2]
    assert_same(results, expected)
    assert_same(fa3.flash_attn_qkvpacked_func(qkv, causal=True), expected[0])

    joined = normal(device, 2, 7, 8, 16).requires_grad_()
    out, lse = fa3.flash_attn_qkvpacked_func(
        joined, num_heads_q=4, causal=True, return_attn_probs=True
    )
    q, k, v = joined[:, :, :4], joined[:, :, 4:6], joined[:, :, 6:]
    assert_same((out, lse), ours.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)[:2])
    (gradient,) = torch.autograd.grad(out.sum(), joined)
    assert gradient.shape == joined.shape
    for heads in (None, 0, 3, 8):
        with pytest.raises(ValueError, match=r"^num_heads_q: must leave an even number"):
            fa3.flash_attn_qkvpacked_func(joined, num_heads_q=heads)


@ON_EVERY_DEVICE
def test_packed_sequences(device: str) -> None:
    q, k, v = (x.flatten(0, 1) for x in dense(device))
    lengths = (int32(device, 0, 7, 14), int32(device, 0, 9, 18), 7, 9)
    used = {"seqused_q": int32(device, 7, 3), "seqused_k": int32(device, 5, 9)}
    for more in ({}, used):
        results = fa3.flash_attn_varlen_func(
            q, k, v, *lengths, **more, **OPTIONS, **HINTS, return_attn_probs=True
        )
        expected = ours.flash_attn_varlen_func(
            q, k, v, *lengths, **more, **OPTIONS, return_attn_probs=True
        )[:2]
        assert_same(results, expected)
        assert_same(fa3.flash_attn_varlen_func(q, k, v, *lengths, **more, **OPTIONS), results[0])


@ON_EVERY_DEVICE
@pytest.mark.parametrize("packed_q", [False, True], ids=["q", "packed-q"])
@pytest.mark.parametrize("packed_k", [False, True], ids=["k", "packed-k"])
def test_any_layout(packed_q: bool, packed_k: bool, device: str) -> None:
    q, k, v = dense(device)
    out, lse = expected_of(q, k, v, [(7, 5), (3, 9)], causal=True)
    cu_q = int32(device, 0, 7, 14) if packed_q else None
    cu_k = int32(device, 0, 9, 18) if packed_k else None
    if packed_q:
        q, out, lse = q.flatten(0, 1), out.flatten(0, 1), lse.transpose(0, 1).flatten(1)
    if packed_k:
        k, v = k.flatten(0, 1), v.flatten(0, 1)
    used = {"seqused_q": int32(device, 7, 3), "seqused_k": int32(device, 5, 9)}
    given = [x.requires_grad_() for x in (q, k, v)]
    results = fa3.flash_attn_varlen_func(
        *given, cu_q, cu_k, 7, 9, **used, causal=True, return_attn_probs=True
    )
    assert_near(results, (out, lse))
    assert results[1].is_contiguous()
    gradients = torch.autograd.grad(results[0].sum(), given)
    assert [x.shape for x in gradients] == [x.shape for x in given]


@ON_EVERY_DEVICE
def test_empty_layouts(device: str) -> None:
    for batch, seqlen in ((0, 7), (2, 0)):
        q, k, v = dense(device, seqlen, 9, batch)
        used = int32(device, *[4] * batch)
        out, lse = fa3.flash_attn_varlen_func(
            q, k, v, None, None, 7, 9, seqused_k=used, return_attn_probs=True
        )
        assert out.shape == (batch, seqlen, 4, 24) and lse.shape == (batch, 4, seqlen)
    with pytest.raises(ValueError, match=r"^k: must have 4 dimensions .* got shape \(18, 2, 16\)"):
        q, k, v = dense(device)
        fa3.flash_attn_varlen_func(
            *(q, k.flatten(0, 1), v, None, None, 7, 9), seqused_k=int32(device, 5, 5)
        )


# -- caches ----------------------------------------------------------------------------------------


def cache(device: str, new: int = 0) -> dict[str, Tensor]:
    q, k_cache, v_cache = dense(device, 3, 12)
    made = {"q": q, "k_cache": k_cache, "v_cache": v_cache, "cache_seqlens": int32(device, 4, 6)}
    if new:
        made |= {"k": normal(device, 2, new, 2, 16), "v": normal(device, 2, new, 2, 24)}
    return made


def copied(given: dict[str, Any]) -> dict[str, Any]:
    return {name: x.clone() if isinstance(x, Tensor) else x for name, x in given.items()}


@ON_EVERY_DEVICE
def test_kvcache(device: str) -> None:
    made = cache(device, 3)
    options = {**OPTIONS, "cache_leftpad": int32(device, 1, 0)}
    first, second = copied(made), copied(made)
    metadata = fa3.get_scheduler_metadata(
        2, 3, 12, 4, 2, 16, made["cache_seqlens"], page_size=None, causal=True
    )
    assert metadata.shape == (0,) and metadata.dtype == torch.int32
    assert metadata.device == made["q"].device
    results = fa3.flash_attn_with_kvcache(
        **first, **options, **HINTS, scheduler_metadata=metadata, return_softmax_lse=True
    )
    assert len(results) == 4 and results[2].numel() == results[3].numel() == 0
    expected = ours.flash_attn_with_kvcache(**second, **options, return_softmax_lse=True)
    assert_same(results[:2], expected)
    assert_same(first["k_cache"], second["k_cache"])
    assert_same(fa3.flash_attn_with_kvcache(**copied(made), **options), expected[0])


@ON_EVERY_DEVICE
def test_pages_and_packed_queries(device: str) -> None:
    made = cache(device)
    pool = {name: made.pop(name).view(6, 4, 2, -1) for name in ("k_cache", "v_cache")}
    table = int32(device, 3, 0, 5, 1, 4, 2).view(2, 3)
    made["q"] = made["q"].flatten(0, 1)
    options = {"cu_seqlens_q": int32(device, 0, 2, 6), "max_seqlen_q": 4, "causal": True}
    for splits in (0, -1, 2):
        results = fa3.flash_attn_with_kvcache(
            **made, **pool, page_table=table, **options, num_splits=splits, return_softmax_lse=True
        )
        expected = ours.flash_attn_with_kvcache(
            **made, **pool, block_table=table, **options, num_splits=max(0, splits),
            return_softmax_lse=True,
        )  # fmt: skip
        assert_same(results[:2], expected)


@ON_EVERY_DEVICE
def test_new_keys_of_packed_queries(device: str) -> None:
    """They need not be packed themselves."""
    made = cache(device, 2)
    made["q"] = made["q"].flatten(0, 1)
    options = {"cu_seqlens_q": int32(device, 0, 2, 6), "causal": True}
    first, second = copied(made), copied(made)
    out = fa3.flash_attn_with_kvcache(**first, **options)
    second |= {name: second[name].flatten(0, 1) for name in "kv"}
    second["cu_seqlens_k_new"] = int32(device, 0, 2, 4)
    assert_same(out, ours.flash_attn_with_kvcache(**second, **options))
    assert_same(first["v_cache"], second["v_cache"])


@ON_EVERY_DEVICE
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("packed", [False, True])
def test_rotary_seqlens(packed: bool, causal: bool, interleaved: bool, device: str) -> None:
    """At the lengths of the cache it changes nothing; elsewhere it is the reference's rotation with
    tables that begin at another row.
    """
    made = cache(device, 3)
    angle = torch.randn(24, 4)
    tables = {
        name: x.to(device, made["q"].dtype)
        for name, x in (("rotary_cos", angle.cos()), ("rotary_sin", angle.sin()))
    }
    options: dict[str, Any] = {"causal": causal, "rotary_interleaved": interleaved}
    if packed:
        made |= {name: made[name].flatten(0, 1) for name in "qkv"}
        made["q"] = torch.cat([made["q"], made["q"][:2]])  # two rows that are no sequence's
        options["cu_seqlens_q"] = int32(device, 0, 2, 6)
        options["cu_seqlens_k_new"] = int32(device, 0, 3, 6)
    for shift in (0, 5):
        given, shifted = copied(made), {name: x.roll(-shift, 0) for name, x in tables.items()}
        results = fa3.flash_attn_with_kvcache(
            **given, **tables, **options, rotary_seqlens=made["cache_seqlens"] + shift,
            return_softmax_lse=True,
        )  # fmt: skip
        expected = kvcache_reference(**copied(made), **shifted, **options)
        rows = slice(0, 6 if packed else 2)
        assert_near((results[0][rows],), (expected.expected.out[rows],))
        assert_near((given["k_cache"],), (expected.k_cache,))


@ON_EVERY_DEVICE
def test_rotary_seqlens_that_do_not_fit(device: str) -> None:
    made = cache(device, 3)
    table = normal(device, 24, 4)
    given = {**made, "rotary_cos": table, "rotary_sin": table}
    with pytest.raises(ValueError, match=r"^rotary_seqlens: must have shape \(2,\)"):
        fa3.flash_attn_with_kvcache(**given, rotary_seqlens=int32(device, 1))
    if device == "cpu":
        for bad in (-1, 22):
            with pytest.raises(ValueError, match=r"^rotary_seqlens: "):
                fa3.flash_attn_with_kvcache(**given, rotary_seqlens=int32(device, 0, bad))
    without = fa3.flash_attn_with_kvcache(**copied(made), rotary_seqlens=int32(device, 1, 1))
    assert_same(without, fa3.flash_attn_with_kvcache(**copied(made)))
    del given["k"], given["v"]
    with pytest.raises(ValueError, match=r"^rotary_cos: must be None without k"):
        fa3.flash_attn_with_kvcache(**given, rotary_seqlens=int32(device, 0, 0))


def test_full_graphs() -> None:
    q, k, v = dense("cpu")
    used, table = int32("cpu", 5, 9), normal("cpu", 24, 4)
    made = cache("cpu", 3)
    rows = made.pop("q")
    lse = {"return_attn_probs": True}
    assert_compiles(lambda q: fa3.flash_attn_func(q, k, v, causal=True, **lse), q)
    assert_compiles(
        lambda q: fa3.flash_attn_varlen_func(q, k, v, None, None, 7, 9, None, used, **lse), q
    )
    assert_compiles(
        lambda q: fa3.flash_attn_with_kvcache(
            q, **made, rotary_cos=table, rotary_sin=table, rotary_seqlens=used
        ),
        rows,
    )


def test_combine_is_ours() -> None:
    assert fa3.flash_attn_combine is ours.flash_attn_combine


# -- refusals --------------------------------------------------------------------------------------

NAMES = {
    "qv": (r"must be None, as scores have one product", torch.zeros(1)),
    "q_descale": (r"must be None where the tensor that it scales is not of", torch.ones(1)),
    "k_descale": (r"must be None where the tensor that it scales is not of", torch.ones(1)),
    "v_descale": (r"must be None where the tensor that it scales is not of", torch.ones(1)),
}


def _calls() -> dict[str, Callable[..., Any]]:
    q, k, v = dense("cpu")
    packed = (*(x.flatten(0, 1) for x in (q, k, v)), int32("cpu", 0, 7), int32("cpu", 0, 9), 7, 9)
    return {
        "flash_attn_func": lambda **x: fa3.flash_attn_func(q, k, v, **x),
        "flash_attn_qkvpacked_func": lambda **x: fa3.flash_attn_qkvpacked_func(q[:, :, None], **x),
        "flash_attn_varlen_func": lambda **x: fa3.flash_attn_varlen_func(*packed, **x),
        "flash_attn_with_kvcache": lambda **x: fa3.flash_attn_with_kvcache(q, k, v, **x),
    }


@pytest.mark.parametrize("function", _calls())
@pytest.mark.parametrize("name", NAMES)
def test_what_is_refused(name: str, function: str) -> None:
    if function == "flash_attn_qkvpacked_func" and name == "qv":
        pytest.skip("it has no qv")
    message, value = NAMES[name]
    kind = NotImplementedError if name == "qv" else ValueError
    with pytest.raises(kind, match=f"^{name}: {message}"):
        _calls()[function](**{name: value})


def test_errors_have_their_names() -> None:
    q, k, v = dense("cpu")
    with pytest.raises(ValueError, match=r"^page_table: must have shape \(2, max_pages\), got"):
        fa3.flash_attn_with_kvcache(q, k, v, page_table=int32("cpu", 0), cache_seqlens=2)
    with pytest.raises(ValueError, match=r"^page_table: must be a page of the pool, from 0 to 1"):
        fa3.flash_attn_with_kvcache(
            q, k, v, page_table=int32("cpu", 0, 2).view(2, 1), cache_seqlens=2
        )


def test_other_fp8_is_refused() -> None:
    """What e4m3 does is in test_fp8.py."""
    q, k, v = dense("cpu")
    dtype = torch.float8_e5m2
    for index, name in enumerate("qkv"):
        given = [x.to(dtype) if index == i else x for i, x in enumerate((q, k, v))]
        message = f"^{name}: must not be of FP8 other than torch.float8_e4m3fn, .*, got {dtype}"
        with pytest.raises(NotImplementedError, match=message):
            fa3.flash_attn_func(*given)
    with pytest.raises(NotImplementedError, match=r"^k_cache: must not be of FP8"):
        fa3.flash_attn_with_kvcache(q, k.to(dtype), v)
    with pytest.raises(NotImplementedError, match=r"^k: must not be of FP8 other than"):
        new = k[:, :1].to(dtype)
        fa3.flash_attn_with_kvcache(q, k, v, new, v[:, :1], cache_seqlens=1)


# -- installed -------------------------------------------------------------------------------------


def test_install_serves_it() -> None:
    compat.install()
    try:
        module = importlib.import_module("flash_attn_interface")
        assert module.flash_attn_func is fa3.flash_attn_func
        assert sorted(module.__all__) == sorted(x for x in SIGNATURES if x[0] != "_")
        assert (
            module._flash_attn_forward is fa3._flash_attn_forward
            and module.__file__ == compat.__file__
        )
    finally:
        compat.uninstall()
    assert "flash_attn_interface" not in sys.modules


def test_another_one_is_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn_interface", ModuleType("flash_attn_interface"))
    with pytest.raises(RuntimeError, match=r"flash_attn_interface has already been imported from"):
        compat.install()
    assert not compat.is_installed()


def test_nothing_is_imported_before_it_is_asked_for() -> None:
    code = """
import sys
import flash_attn_cuda.compat
flash_attn_cuda.compat.install()
ours = "flash_attn_cuda.surfaces", "flash_attn_cuda.integrations.vllm"
assert not [name for name in sys.modules if name.startswith(ours)]
import flash_attn_interface
assert "flash_attn_cuda.surfaces.flash_attention_3" in sys.modules
assert "flash_attn_cuda.surfaces.flash_attention_4" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.gpu
def test_nothing_waits_for_the_device() -> None:
    made = cache(DEVICE, 3)
    tables = {name: normal(DEVICE, 24, 4) for name in ("rotary_cos", "rotary_sin")}
    q, k, v = dense(DEVICE)
    used = int32(DEVICE, 5, 9)
    with no_host_sync():
        fa3.flash_attn_varlen_func(q, k, v, None, None, 7, 9, seqused_k=used, causal=True)
        out, lse, *_ = fa3._flash_attn_forward(q, k, v, seqused_k=used)
        fa3._flash_attn_backward(out, q, k, v, out, lse, None, None, None, used, causal=False)
        for causal in (False, True):
            fa3.flash_attn_with_kvcache(
                **made, **tables, rotary_seqlens=made["cache_seqlens"], causal=causal
            )
