"""Calls of FlashAttention-3's, FlashAttention-4's and vLLM's functions, and what each is here: the
same bits. What one of them has alone is in its own file.
"""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import flash_attn_cuda as ours
from flash_attn_cuda.integrations import compat, vllm
from flash_attn_cuda.integrations import flash_attention_3 as fa3
from flash_attn_cuda.integrations import flash_attention_4 as fa4
from tests.cases.harness import DEVICE, no_host_sync
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
from tests.surfaces.public_names import FLASH_ATTENTION_3, FLASH_ATTENTION_4_INTERFACE, VLLM

SCORES: dict[str, Any] = {"softmax_scale": 0.4, "softcap": 5.0}
WINDOW: dict[str, Any] = {**SCORES, "window_size": (4, 2)}
PROBS, LSE = {"return_attn_probs": True}, {"return_softmax_lse": True}
HINTS: dict[str, Any] = {"pack_gqa": True, "sm_margin": 8}


def test_names() -> None:
    """Their signatures are in test_public_names."""
    for names, module in (
        (FLASH_ATTENTION_3.signatures(), fa3),
        (FLASH_ATTENTION_4_INTERFACE.served, fa4),
        (VLLM.served, vllm),
    ):
        assert sorted(names) == sorted(module.__all__)
    assert fa3.flash_attn_combine is ours.flash_attn_combine


def tensors(device: str) -> SimpleNamespace:
    """What calls are made of. A cache is made anew for each call, which may write into it."""
    q, k, v = dense(device)
    step, k_cache, v_cache = dense(device, 3, 12)
    made = SimpleNamespace(qkv=(q, k, v), rows=tuple(x.flatten(0, 1) for x in (q, k, v)))
    made.cu = (int32(device, 0, 7, 14), int32(device, 0, 9, 18))
    made.lengths = {"cu_seqlens_q": made.cu[0], "cu_seqlens_k": made.cu[1]}
    made.lengths |= {"max_seqlen_q": 7, "max_seqlen_k": 9}
    made.used = {"seqused_q": int32(device, 7, 3), "seqused_k": int32(device, 5, 9)}
    made.qkv_packed = normal(device, 2, 7, 3, 4, 16)
    made.joined = normal(device, 2, 7, 8, 16)
    made.sink, made.slopes = torch.randn(4, device=device), torch.rand(4, device=device)
    made.step, made.filled = step, {"cache_seqlens": int32(device, 4, 6)}
    made.cache = lambda: (k_cache.clone(), v_cache.clone())
    made.new = {"k": normal(device, 2, 2, 2, 16), "v": normal(device, 2, 2, 2, 24)}
    made.pages = [x.view(6, 4, 2, -1) for x in (k_cache, v_cache)]
    made.table = int32(device, 3, 0, 5, 1, 4, 2).view(2, 3)
    made.bounds = {"cu_seqlens_q": int32(device, 0, 2, 6), "causal": True}
    made.partials = torch.randn(3, 2, 5, 4, 16, device=device), torch.randn(3, 2, 5, 4).to(device)
    made.leftpad, made.step_rows = {"cache_leftpad": int32(device, 1, 0)}, step.flatten(0, 1)
    made.plan = fa3.get_scheduler_metadata(2, 3, 12, 4, 2, 16, made.filled["cache_seqlens"])
    made.of_4 = {**SCORES, "learnable_sink": made.sink, "return_lse": True}
    return made


def as_rows(results: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return results[0].flatten(0, 1), results[1].transpose(0, 1).flatten(1)


# Which of ours a function is, what it calls ours' arguments, and what has no meaning here.
FUNCTIONS = {
    **{getattr(fa3, name): getattr(ours, name) for name in fa3.__all__ if hasattr(ours, name)},
    fa4.flash_attn_func: ours.flash_attn_func,
    fa4.flash_attn_combine: ours.flash_attn_combine,
    vllm.flash_attn_varlen_func: ours.flash_attn_varlen_func,
}
NAMES = {"page_table": "block_table", "learnable_sink": "sink", "s_aux": "sink"}
NAMES |= {"return_lse": "return_attn_probs"}
IGNORED = ("pack_gqa", "sm_margin", "scheduler_metadata")
Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


def pages(t: SimpleNamespace, splits: int) -> Call:
    options = {**t.filled, **t.bounds, **LSE, "max_seqlen_q": 4, "num_splits": splits}
    return fa3.flash_attn_with_kvcache, (t.step_rows, *t.pages), {**options, "page_table": t.table}


MAPPINGS: dict[str, Callable[[SimpleNamespace], Call]] = {
    "3": lambda t: (fa3.flash_attn_func, t.qkv, PROBS),
    "3 causal": lambda t: (fa3.flash_attn_func, t.qkv, {**PROBS, "causal": True}),
    "3 window": lambda t: (fa3.flash_attn_func, t.qkv, {**PROBS, **WINDOW}),
    "3 out alone": lambda t: (fa3.flash_attn_func, t.qkv, {**WINDOW, **HINTS}),
    "3 chunks": lambda t: (fa3.flash_attn_func, t.qkv, {"attention_chunk": 3}),
    "3 qkv": lambda t: (fa3.flash_attn_qkvpacked_func, (t.qkv_packed,), {**PROBS, **WINDOW}),
    "3 packed": lambda t: (
        fa3.flash_attn_varlen_func, (*t.rows, *t.cu, 7, 9), {**WINDOW, **HINTS, **PROBS}
    ),
    "3 packed, used": lambda t: (
        fa3.flash_attn_varlen_func, (*t.rows, *t.cu, 7, 9), {**t.used, **WINDOW}
    ),
    "3 append": lambda t: (
        fa3.flash_attn_with_kvcache, (t.step, *t.cache()),
        {**t.filled, **t.new, **t.leftpad, **WINDOW, **HINTS, **LSE, "scheduler_metadata": t.plan},
    ),
    "3 cache, out alone": lambda t: (
        fa3.flash_attn_with_kvcache, (t.step, *t.cache()), {**t.filled, **t.leftpad}
    ),
    **{f"3 pages, {x} splits": lambda t, x=x: pages(t, x) for x in (0, -1, 2)},
    "4 left": lambda t: (fa4.flash_attn_func, t.qkv, {**t.of_4, "window_size": (4, None)}),
    "4 right": lambda t: (fa4.flash_attn_func, t.qkv, {**t.of_4, "window_size": (None, 2)}),
    "4 both": lambda t: (fa4.flash_attn_func, t.qkv, {**t.of_4, "window_size": (3, 1)}),
    "4 combine": lambda t: (fa4.flash_attn_combine, t.partials, {}),
    "4 combine into fp16": lambda t: (fa4.flash_attn_combine, t.partials, {"out_dtype": HALF}),
    "vllm": lambda t: (
        vllm.flash_attn_varlen_func, t.rows, {**t.lengths, **WINDOW, **LSE, "s_aux": t.sink}
    ),
    "vllm slopes": lambda t: (
        vllm.flash_attn_varlen_func, t.rows, {**t.lengths, "alibi_slopes": t.slopes}
    ),
    "vllm dropout": lambda t: (vllm.flash_attn_varlen_func, t.rows, {**t.lengths, **DROPOUT}),
    "vllm dropout, softmax_lse": lambda t: (
        vllm.flash_attn_varlen_func, t.rows, {**t.lengths, **DROPOUT, **LSE}
    ),
}  # fmt: skip
DROPOUT, HALF = {"dropout_p": 0.4}, torch.float16


def in_our_words(function: Callable[..., Any], given: dict[str, Any]) -> dict[str, Any]:
    options = {NAMES.get(name, name): x for name, x in given.items() if name not in IGNORED}
    if function is vllm.flash_attn_varlen_func and options.pop("return_softmax_lse", False):
        options["return_attn_probs"] = True
    if "window_size" in options:
        options["window_size"] = tuple(-1 if x is None else x for x in options["window_size"])
    if "num_splits" in options:
        options["num_splits"] = max(0, options["num_splits"])
    return options


@ON_EVERY_DEVICE
@pytest.mark.parametrize("name", MAPPINGS)
def test_same_results(name: str, device: str) -> None:
    """(out, softmax_lse) or out alone, and what a cache then holds."""
    function, given, options = MAPPINGS[name](tensors(device))
    copies = [x.clone() if isinstance(x, Tensor) else x for x in given]
    results = []
    for call, tensors_of, named in (
        (function, given, options),
        (FUNCTIONS[function], copies, in_our_words(function, options)),
    ):
        torch.manual_seed(3)
        found = call(*tensors_of, **named)
        results.append((*(found[:2] if isinstance(found, tuple) else (found,)), *tensors_of[1:3]))
    assert_same(*(tuple(x for x in made if isinstance(x, Tensor)) for made in results))


@ON_EVERY_DEVICE
def test_other_forms(device: str) -> None:
    """Fewer key heads in one tensor; new keys that are not packed, of queries that are; partial
    results of 16 bits, of sequences in any order, and packed.
    """
    t, causal = tensors(device), {"causal": True}
    found = fa3.flash_attn_qkvpacked_func(t.joined, num_heads_q=4, **causal, **PROBS)
    of_parts = ours.flash_attn_func(*t.joined.split([4, 2, 2], 2), **causal, **PROBS)[:2]
    assert_same(found, of_parts)
    caches = t.cache(), t.cache()
    found = fa3.flash_attn_with_kvcache(t.step_rows, *caches[0], **t.new, **t.filled, **t.bounds)
    new = {name: x.flatten(0, 1) for name, x in t.new.items()}
    starts = {"cu_seqlens_k_new": int32(device, 0, 2, 4)}
    given = (t.step_rows, *caches[1])
    assert_same(
        (found, *caches[0]),
        (ours.flash_attn_with_kvcache(*given, **new, **t.filled, **t.bounds, **starts), *caches[1]),
    )
    out, lse = t.partials
    half = out.bfloat16()
    wanted = ours.flash_attn_combine(half.float(), lse, out_dtype=torch.bfloat16)
    assert_same(fa4.flash_attn_combine(half, lse), wanted)
    wanted = ours.flash_attn_combine(out, lse)
    order = {"seqused": t.cu[0][:2], "virtual_batch_idx": t.cu[0][:2]}
    assert_same(fa4.flash_attn_combine(out, lse, **order), wanted)
    assert_same(fa4.flash_attn_combine(out, lse, return_lse=False)[0], wanted[0])
    found = fa4.flash_attn_combine(out[:, 0], lse[:, 0], cu_seqlens=t.cu[0])
    assert_same(found, tuple(x[0] for x in wanted))


@ON_EVERY_DEVICE
def test_results_are_the_references(device: str) -> None:
    """And softmax_lse is None of version 4 unless it is asked for or a gradient may need it."""
    t = tensors(device)
    sink = {"sink": t.sink.double()}
    lengths, scores = [(7, 9)] * 2, {**SCORES, "window": (4, 2)}
    found = fa3.flash_attn_func(*t.qkv, **WINDOW, **PROBS)
    assert_near(found, expected_of(*t.qkv, lengths, **scores))
    found = fa4.flash_attn_func(*t.qkv, **WINDOW, learnable_sink=t.sink, return_lse=True)
    assert_near(found, expected_of(*t.qkv, lengths, **scores, **sink))
    found = vllm.flash_attn_varlen_func(*t.rows, **t.lengths, **WINDOW, s_aux=t.sink, **LSE)
    assert_near(found, as_rows(expected_of(*t.qkv, lengths, **scores, **sink)))
    assert fa4.flash_attn_func(*t.qkv)[1] is None
    q = t.qkv[0].detach().requires_grad_()
    assert fa4.flash_attn_func(q, *t.qkv[1:])[1] is not None


@ON_EVERY_DEVICE
def test_what_else_is_returned_and_written(device: str) -> None:
    t = tensors(device)
    found = fa3.flash_attn_with_kvcache(t.step, *t.cache(), **t.filled, **LSE)
    assert len(found) == 4 and found[2].numel() == found[3].numel() == 0
    sizes = (2, 3, 12, 4, 2, 16, t.filled["cache_seqlens"])
    for plan in (
        fa3.get_scheduler_metadata(*sizes, page_size=None),
        vllm.get_scheduler_metadata(*sizes),
    ):
        assert plan.shape == (0,) and plan.dtype == torch.int32 and plan.device == t.step.device
    chunks = ours.flash_attn_func(*t.qkv, attention_chunk=3)
    none = (None, None, 7, 9)
    assert_near([fa3.flash_attn_varlen_func(*t.qkv, *none, attention_chunk=3)], [chunks])
    assert_near([fa3.flash_attn_with_kvcache(*t.qkv, attention_chunk=3)], [chunks])

    out, lse = t.partials
    target = torch.zeros(2, 5, 4, 16, dtype=torch.float16, device=device)
    assert fa4.flash_attn_combine(out.half(), lse, target)[0] is target
    assert_same(target, fa4.flash_attn_combine(out.half(), lse)[0])
    assert fa4.flash_attn_combine(out.half(), lse, out_dtype=torch.float32)[0].dtype == lse.dtype
    given = (out[:, 0], lse[:, 0], target[0].zero_())
    assert fa4.flash_attn_combine(*given, cu_seqlens=t.cu[0])[0] is given[2]
    assert_same(given[2], ours.flash_attn_combine(out, lse)[0][0].half())
    with pytest.raises(NotImplementedError, match=r"^seqused: must be None, as every row of an"):
        fa4.flash_attn_combine(*given, seqused=t.cu[0])
    with pytest.raises(ValueError, match=r"^out_partial: must have 5 dimensions"):
        fa4.flash_attn_combine(out[0, 0], lse[0, 0])

    call = {**t.lengths, "cu_seqlens_k": None, "seqused_k": t.used["seqused_k"]}
    target = torch.zeros_like(t.rows[0][..., :1]).expand(-1, -1, 24).contiguous()
    assert vllm.flash_attn_varlen_func(t.rows[0], *t.qkv[1:], **call, out=target) is target
    assert_near([target], as_rows(expected_of(*t.qkv, [(7, 5), (7, 9)]))[:1])
    with pytest.raises(NotImplementedError, match=r"^return_softmax_lse: must be False where"):
        vllm.flash_attn_varlen_func(*t.rows, **t.lengths, **DROPOUT, **LSE, s_aux=t.sink)


@ON_EVERY_DEVICE
@pytest.mark.parametrize("version", [3, 4])
def test_gradients(version: int, device: str) -> None:
    """Near: deterministic alone repeats dq to the bit on a GPU, which is not what this is about."""
    t = tensors(device)
    leaves, sink = [x.requires_grad_() for x in t.qkv], t.sink.requires_grad_()
    results = []
    for is_ours in (False, True):
        if version == 3:
            function = ours.flash_attn_func if is_ours else fa3.flash_attn_func
            out, lse = function(*leaves, causal=True, **PROBS)[:2]
        elif is_ours:
            out, lse, _ = ours.flash_attn_func(*leaves, causal=True, sink=sink, **PROBS)
        else:
            out, lse = fa4.flash_attn_func(*leaves, causal=True, learnable_sink=sink)
        wanted = [*leaves, sink] if version == 4 else leaves
        results.append(torch.autograd.grad(out.sin().sum() + lse[..., 1:].sin().sum(), wanted))
    assert_near(*results)
    (gradient,) = torch.autograd.grad(
        fa3.flash_attn_qkvpacked_func(t.joined.requires_grad_(), num_heads_q=4).sum(), t.joined
    )
    assert gradient.shape == t.joined.shape


@ON_EVERY_DEVICE
@pytest.mark.parametrize("version", [3, 4])
@pytest.mark.parametrize("is_used", [False, True], ids=["whole", "used"])
@pytest.mark.parametrize("packed", ["", "q", "k", "qk"])
def test_any_layout(packed: str, is_used: bool, version: int, device: str) -> None:
    """Of queries and keys, each packed or not."""
    t = tensors(device)
    given = dict(zip("qkv", t.qkv, strict=True))
    lengths = [(7, 5), (3, 9)] if is_used else [(7, 9)] * 2
    expected = expected_of(*t.qkv, lengths, causal=True)
    call: dict[str, Any] = {"cu_seqlens_q": None, "cu_seqlens_k": None}
    call |= {"max_seqlen_q": 7, "max_seqlen_k": 9, "causal": True, **(t.used if is_used else {})}
    if "q" in packed:
        given["q"], call["cu_seqlens_q"], expected = t.rows[0], t.cu[0], as_rows(expected)
    if "k" in packed:
        given |= {"k": t.rows[1], "v": t.rows[2]}
        call["cu_seqlens_k"] = t.cu[1]
    leaves = [x.detach().requires_grad_() for x in given.values()]
    if version == 3:
        results = fa3.flash_attn_varlen_func(*leaves, **call, **PROBS)
    else:
        results = fa4.flash_attn_varlen_func(
            *leaves, **call, return_lse=True, min_seqlen_k=1, seqlen_k_per_split=256,
            scheduler_metadata=(), disable_scheduler_metadata=True,
        )  # fmt: skip
    assert_near(results, expected)
    assert results[1].is_contiguous()
    gradients = torch.autograd.grad(results[0].sum(), leaves)
    assert [x.shape for x in gradients] == [x.shape for x in leaves]


def test_full_graphs() -> None:
    t, table = tensors("cpu"), normal("cpu", 24, 4)
    q, k, v = t.qkv
    used, cache = t.used["seqused_k"], t.cache()
    tables = {"rotary_cos": table, "rotary_sin": table, "rotary_seqlens": used}
    none = (None, None, 7, 9, None, used)
    assert_compiles(lambda q: fa3.flash_attn_func(q, k, v, causal=True, **PROBS), q)
    assert_compiles(lambda q: fa3.flash_attn_varlen_func(q, k, v, *none, **PROBS), q)
    assert_compiles(
        lambda q: fa3.flash_attn_with_kvcache(q, *cache, **t.filled, **t.new, **tables), t.step
    )
    assert_compiles(lambda q: fa4.flash_attn_func(q, k, v, return_lse=True), q)
    assert_compiles(lambda *x: fa4.flash_attn_combine(*x, out_dtype=torch.bfloat16), *t.partials)


@pytest.mark.gpu
def test_nothing_waits_for_the_device() -> None:
    t, tables = tensors(DEVICE), [normal(DEVICE, 24, 4) for _ in range(2)]
    q, k, v = t.qkv
    used = t.used["seqused_k"]
    positions = {"rotary_cos": tables[0], "rotary_sin": tables[1], **t.filled}
    positions["rotary_seqlens"] = t.filled["cache_seqlens"]
    with no_host_sync():
        fa3.flash_attn_varlen_func(q, k, v, None, None, 7, 9, seqused_k=used, causal=True)
        out, lse, *_ = fa3._flash_attn_forward(q, k, v, seqused_k=used)
        fa3._flash_attn_backward(out, q, k, v, out, lse, None, None, None, used, causal=False)
        for causal in (False, True):
            fa3.flash_attn_with_kvcache(t.step, *t.cache(), **t.new, **positions, causal=causal)
        fa4.flash_attn_func(q, k, v, mask_mod=lambda b, h, i, j: j <= i)
        fa4.flash_attn_varlen_func(q, k, v, seqused_k=used, causal=True)
        fa4.flash_attn_varlen_func(t.step, *t.pages, page_table=t.table)


# -- what is refused -------------------------------------------------------------------------------

SCALED = "must be None where the tensor that it scales is not of"
CHOSEN, MODS, AUX = (
    "must be None, as keys chosen by indices",
    "must be None, as functions of scores are not implemented",
    "must be None, as a mask_mod takes four arguments",
)
OF_VLLM = "must be None, as masks of vLLM"
ONE_PRODUCT = "must be None, as scores have one product"
ONE, ZERO = torch.ones(1), torch.zeros(1)
VERSION_3 = ("flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache")
# Modules and functions, an argument, its value, the error.
REFUSED: list[tuple[Any, tuple[str, ...], str, Any, type[Exception], str]] = [
    *(
        (fa3, (*VERSION_3, "flash_attn_qkvpacked_func"), name, ONE, ValueError, SCALED)
        for name in ("q_descale", "k_descale", "v_descale")
    ),
    *(
        (fa4, VERSION_3[:2], name, value, NotImplementedError, words)
        for name, value, words in (
            ("score_mod", max, MODS), ("score_mod_bwd", max, MODS), ("aux_tensors", [ZERO], AUX),
            ("aux_scalars", (1,), AUX), ("qv", ZERO, ONE_PRODUCT),
            ("gather_kv_indices", ZERO, CHOSEN), ("gather_bwd_recompute_p", True, CHOSEN),
            ("gather_bwd_token_chunk", 8, CHOSEN),
        )
    ),
    *(
        (vllm, VERSION_3[1:2], name, value, NotImplementedError, words)
        for name, value, words in (
            ("output_scale", ONE, "must be None, as results of FP8 are not implemented"),
            ("cp_world_size", 2, "must be 1, as context parallelism is not implemented, got 2"),
            ("cp_tot_seqused_k", ZERO, "must be None, as context parallelism"),
            ("mask_mod", max, OF_VLLM), ("block_sparse_tensors", (), OF_VLLM),
            ("aux_tensors", [], OF_VLLM), ("aux_tensor_leading_dims", [], OF_VLLM),
            ("dynamic_causal", ZERO, OF_VLLM),
        )
    ),
]  # fmt: skip


def arguments_of(function: Callable[..., Any]) -> tuple[Any, ...]:
    """By position, but for vLLM's lengths."""
    t = tensors("cpu")
    if function is fa3.flash_attn_qkvpacked_func:
        return (t.qkv_packed,)
    if function is fa3.flash_attn_varlen_func:
        return (*t.rows, *t.cu, 7, 9)
    return t.rows if function is vllm.flash_attn_varlen_func else t.qkv


@pytest.mark.parametrize("refused", REFUSED, ids=lambda x: f"{x[0].__name__[-6:]}-{x[2]}")
def test_what_is_refused(refused: Any) -> None:
    module, functions, name, value, error, words = refused
    for function in (getattr(module, x) for x in functions):
        lengths = tensors("cpu").lengths if module is vllm else {}
        with pytest.raises(error, match=f"^{name}: {words}"):
            function(*arguments_of(function), **lengths, **{name: value})


def test_other_fp8_is_refused() -> None:
    """What e4m3 does is in test_fp8.py."""
    t, e5m2, e4m3 = tensors("cpu"), torch.float8_e5m2, torch.float8_e4m3fn
    for index, name in enumerate("qkv"):
        given = [[*x[:index], x[index].to(e5m2), *x[index + 1 :]] for x in (t.qkv, t.rows)]
        message = f"^{name}: must not be of FP8 other than torch.float8_e4m3fn, .*, got {e5m2}"
        with pytest.raises(NotImplementedError, match=message):
            fa3.flash_attn_func(*given[0])
        with pytest.raises(NotImplementedError, match=f"^{name}: must not be of FP8"):
            vllm.flash_attn_varlen_func(*given[1], **t.lengths)
    with pytest.raises(NotImplementedError, match=r"^out: must not be of FP8"):
        vllm.flash_attn_varlen_func(*t.rows, **t.lengths, out=torch.zeros(14, 4, 24).to(e4m3))
    for function in (fa4.flash_attn_func, fa4.flash_attn_varlen_func):
        with pytest.raises(NotImplementedError, match=r"^v: must not be of FP8"):
            function(*t.qkv[:2], t.qkv[2].to(e4m3))
    cache, new = t.cache(), {name: x.to(e5m2) for name, x in t.new.items()}
    with pytest.raises(NotImplementedError, match=r"^k: must not be of FP8 other than"):
        fa3.flash_attn_with_kvcache(t.step, *cache, **new, **t.filled)
    with pytest.raises(NotImplementedError, match=r"^k_cache: must not be of FP8"):
        fa3.flash_attn_with_kvcache(t.step, cache[0].to(e5m2), cache[1])


# -- installed -------------------------------------------------------------------------------------


def test_install_serves_them() -> None:
    compat.install()
    try:
        module = importlib.import_module("flash_attn_interface")
        assert module.__all__ == [x for x in module.__all__ if x[0] != "_"]
        assert {*module.__all__} == {x for x in FLASH_ATTENTION_3.signatures() if x[0] != "_"}
        for name in FLASH_ATTENTION_3.signatures():
            assert getattr(module, name) is getattr(fa3, name)
        assert module.__file__ == compat.__file__
        package = importlib.import_module("flash_attn.cute")
        interface = importlib.import_module("flash_attn.cute.interface")
        for name in FLASH_ATTENTION_4_INTERFACE.signatures():
            assert getattr(package, name) is getattr(interface, name) is getattr(fa4, name)
        sparsity = importlib.import_module("flash_attn.cute.block_sparsity")
        assert sparsity.BlockSparseTensorsTorch is fa4.BlockSparseTensorsTorch
        assert importlib.import_module("flash_attn").cute is package
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module("flash_attn.cute.flash_fwd")
    finally:
        compat.uninstall()
    assert "flash_attn_interface" not in sys.modules
    assert importlib.util.find_spec("flash_attn") is None


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
assert not sys.modules.keys() & {
    "flash_attn_cuda.integrations.flash_attention_3",
    "flash_attn_cuda.integrations.flash_attention_4",
    "flash_attn_cuda.integrations.flash_mla",
    "flash_attn_cuda.integrations.ring_flash_attn",
    "flash_attn_cuda.integrations.transformers",
    "flash_attn_cuda.integrations.vllm",
}
import flash_attn_interface
assert "flash_attn_cuda.integrations.flash_attention_3" in sys.modules
assert "flash_attn_cuda.integrations.flash_attention_4" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)
