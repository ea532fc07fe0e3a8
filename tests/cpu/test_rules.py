"""Every rule of which arguments go together, of sizes and of dtypes
(flash_attn_cuda/call/rules.py), and of a number's range (flash_attn_cuda/call/fields.py), by the
road of Python and by that of the extension: a call that breaks it and no rule before it raises the
same on both.

The extension describes a call of tensors on the CPU (explain_settings). The rules of what comes
into a backward or a derivative, which want a GPU there, are broken by the operators' tests.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from flash_attn_cuda.call import rules
from flash_attn_cuda.call.checks import check_call, check_incoming, check_tangents
from flash_attn_cuda.call.fields import NAMES, RANGES, AttentionCall, Incoming, Tangents
from flash_attn_cuda.call.interpret import check_holds, check_rules
from flash_attn_cuda.installed import build_info

EXTENSION: Any = build_info.extension
E4M3, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu
OF_E4M3, NOT_OF_E4M3 = f"is of {E4M3}", f"is not of {E4M3}"
# Field: how errors call it, what breaks a rule against it, what it must be instead, what it is said
# to be. Others are tensors.
FIELDS: dict[str, tuple[str, Any, str, str]] = {
    "dropout_p": ("dropout_p", 0.5, "0", "0.5"),
    "seqlen_k": ("seqlen_k", 3, "None", "3"),
    "bias": ("attn_mask", torch.zeros(2, 4, 3, 10), "None", "a tensor"),
    "quantizes_tokens": ("quantize", True, "None", "'token'"),
    "bias_by_distance": ("bias_by_distance", True, "False", "True"),
    "block_rows": ("block_mask", torch.zeros(1, 1, 1, 3, dtype=torch.int32), "None", "a mask"),
    "fp32_results": ("fp32_results", True, "False", "True"),
    "return_max_logits": ("return_max_logits", True, "False", "True"),
    "values_include_rope": ("values_include_rope", True, "False", "True"),
    "deterministic": ("deterministic", True, "False", "True"),
    "causal": ("causal", True, "False", "True"),
    "bounds_right": ("window_size", 0, "unbounded on the right", "a right bound"),
}
OF_TRAINING = "dropout_p bias fp32_results origin return_max_logits"
LACKED_BY_FEW = f"{OF_TRAINING} relative_bias"
LACKED_IN_PLACE = "dropout_p block_rows bias_by_distance fp32_results origin return_max_logits"
UNABSORBED = "as a model scales by the head dim that it has without absorption"
ROTARY = "rotary_cos rotary_sin"
OF_TREE = "with a tree_mask, which says what of their own keys queries see"
DENSE_DIMS = "4 dimensions (batch, seqlen, heads, head_dim)"
PACKED_DIMS = "3 dimensions (total, heads, head_dim)"

Described = dict[str, Any]


def zeros(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.zeros(shape).to(dtype)


def integers(*shape: int) -> Tensor:
    return zeros(*shape, dtype=torch.int32)


ONE_LENGTH: Described = {"q": zeros(2, 3, 4, 16), "k": zeros(2, 10, 2, 16)}
PACKED: Described = {"q": zeros(6, 4, 16), "k": zeros(20, 2, 16)}
PACKED |= {f"cu_seqlens_{x}": integers(3) for x in "qk"} | {f"max_seqlen_{x}": 9 for x in "qk"}
PAGED: Described = PACKED | {"k": zeros(5, 8, 2, 16), "block_table": integers(2, 3)}
CACHE: Described = ONE_LENGTH | {"over_cache": True, "seqused_k": integers(2)}
LATENT: Described = PACKED | {"qv": zeros(6, 4, 16), "softmax_scale": 0.1}
LISTS: Described = {x: integers(1, 1, 1, 3) for x in ("block_rows", "block_columns")}
APPENDS: Described = {f"{x}_new": zeros(2, 1, 2, 16) for x in "kv"}


def fp8(call: Described) -> Described:
    scales = {f"{x}_descale": torch.ones(2) for x in "kv"}
    return call | scales | {"k": call["k"].to(E4M3)}


# v alone is of e4m3.
FP8_LATENT: Described = CACHE | {"qv": zeros(2, 3, 4, 256), "softmax_scale": 0.1}
FP8_LATENT |= {"v": zeros(2, 10, 2, 256, dtype=E4M3), "v_descale": torch.ones(2, 10, 2, 2)}


# A call of which the fact holds, and which obeys all rules so far.
CALLS: dict[str, Described] = {
    "is_of_one_length": ONE_LENGTH,
    "not over_cache": ONE_LENGTH,
    "over_cache": CACHE,
    "block_table": PAGED,
    "has_masks": PACKED | {"bias": zeros(2, 4, 9, 9)},
    "has_lists": ONE_LENGTH | LISTS,
    "not has_lists": ONE_LENGTH,
    "not bias": ONE_LENGTH,
    "bias": ONE_LENGTH | {"bias": zeros(1, 1, 3, 10)},
    "wants_s_dmask": PACKED | {"dropout_p": 0.5, "return_softmax": True},
    "qv": LATENT,
    "not qv": CACHE,
    "key_lists": LATENT | {"key_lists": integers(6, 2, 9)},
    "tree_mask": PACKED | {"tree_mask": zeros(6, 9, dtype=torch.bool)},
    "is_fp8": fp8(PACKED),
    "not is_fp8": CACHE,
    "is_fp8_latent": FP8_LATENT,
    "not is_fp8_latent": CACHE,
    "not has_fp8_values": CACHE,
    "appends_fp8": fp8(CACHE) | {x: y.to(E4M3) for x, y in APPENDS.items()},
    "v_new": CACHE | {"v_new": APPENDS["v_new"]},
    "k_new": CACHE | {"k_new": APPENDS["k_new"]},
    "not k_new": fp8(CACHE),
    "seqlen_k": ONE_LENGTH | {"over_cache": True, "seqlen_k": 3},
    "rotary_cos": CACHE | APPENDS | {"rotary_cos": zeros(9, 8)},
    "rotary_sin": CACHE | APPENDS | {"rotary_sin": zeros(9, 8)},
    "reads_in_place": PAGED,
    "not reads_in_place": ONE_LENGTH,
    "relative_bias": CACHE | {"relative_bias": torch.zeros(4, 5)},
    "fp32_results": ONE_LENGTH | {"fp32_results": True},
    "reads_plain_keys_in_place": PAGED,
    "lists_blocks": PACKED | {"key_lists": integers(6, 2, 9)},
}


def a_call(fact: str, **changes: Any) -> AttentionCall:
    return described(CALLS[fact] | changes)


def described(given: Described) -> AttentionCall:
    return AttentionCall(**{"v": given["k"]} | given)


# Fact, exception, the end of its words, fields that each break a rule where the fact holds.
ABSENT = (
    ("is_of_one_length", ValueError, "without cu_seqlens_q",
     "origin cu_seqlens_k seqused_q seqused_k leftpad_k block_table qv tree_mask"),
    ("not over_cache", ValueError, "without over_cache",
     f"cache_batch_idx seqlen_k k_new v_new cu_seqlens_k_new {ROTARY}"),
    ("over_cache", NotImplementedError, "over a cache", LACKED_IN_PLACE),
    ("block_table", NotImplementedError, "with a block_table", LACKED_IN_PLACE),
    ("not reads_in_place", ValueError, "without a cache and pages", "relative_bias"),
    ("relative_bias", NotImplementedError, "with a relative_bias", "bias"),
    ("has_masks", NotImplementedError, "with a mask or a bias", "fp32_results origin"),
    ("not has_lists", ValueError, "without a block mask", "mask_bits"),
    ("not bias", ValueError, "without a bias", "bias_by_distance"),
    ("wants_s_dmask", NotImplementedError, "with return_softmax and dropout", "bias origin"),
    ("is_fp8", NotImplementedError, f"where k {OF_E4M3}", f"{LACKED_BY_FEW} qv"),
    ("qv", NotImplementedError, "with qv", f"{LACKED_BY_FEW} alibi_slopes"),
    ("tree_mask", ValueError, OF_TREE, "causal bounds_right"),
    ("tree_mask", NotImplementedError, OF_TREE, LACKED_BY_FEW),
    ("key_lists", NotImplementedError, "with key_lists", "tree_mask"),
    ("reads_plain_keys_in_place", NotImplementedError, "over a cache or pages without qv",
     "key_lists"),
    ("lists_blocks", NotImplementedError, "with key_lists without qv",
     f"{OF_TRAINING} alibi_slopes leftpad_k"),
    ("not is_fp8", ValueError, f"where k_cache {NOT_OF_E4M3}", "q_descale k_descale"),
    ("not has_fp8_values", ValueError, f"where v_cache {NOT_OF_E4M3}",
     "v_descale quantizes_tokens"),
    ("not is_fp8_latent", ValueError, f"where v_cache alone {NOT_OF_E4M3}", "values_include_rope"),
    ("appends_fp8", ValueError, f"where k {OF_E4M3}", "quantizes_tokens"),
    ("appends_fp8", NotImplementedError, f"where k {OF_E4M3}", ROTARY),
    ("not k_new", ValueError, "without k", f"cu_seqlens_k_new {ROTARY} quantizes_tokens"),
    ("seqlen_k", ValueError, "with seqlen_k", "seqused_k"),
)  # fmt: skip
GIVEN = (
    ("is_fp8", "k_descale", f"k_descale: must be given where k {OF_E4M3}, got None"),
    ("is_fp8", "v_descale", f"v_descale: must be given where k {OF_E4M3}, got None"),
    ("is_fp8_latent", "v_descale",
     f"v_descale: must be given where v_cache alone {OF_E4M3}, got None"),
    ("qv", "softmax_scale", f"softmax_scale: must be given with qv, {UNABSORBED}, got None"),
    ("v_new", "k_new", "k: must be given with v, got None"),
    ("k_new", "v_new", "v: must be given with k, got None"),
    ("k_new", "has_cache_seqlens", "cache_seqlens: must be given with k, got None"),
    ("rotary_cos", "rotary_sin", "rotary_sin: must be given with rotary_cos, got None"),
    ("rotary_sin", "rotary_cos", "rotary_cos: must be given with rotary_sin, got None"),
)  # fmt: skip
QUANTIZES = fp8(CACHE) | APPENDS | {"quantizes_tokens": True}
QUANTIZES |= {f"{x}_descale": torch.ones(2, 10, 2) for x in "kv"}
ROPE: Described = {"values_include_rope": True}
ONE_SCALE, EXPANDED = torch.ones(2, 10, 2), torch.ones(2, 10, 1).expand(2, 10, 2)
A_SCALE = "must have a scale for every token of k_cache, shape (2, 10, 2), where quantize writes it"
NOT_EXPANDED = "must not be expanded where quantize writes it, got strides (10, 1, 0)"
# Of each table of sizes and dtypes, for each of its rules: a call, what breaks the rule in it, and
# the error.
SIZES: dict[str, tuple[tuple[Described, Described, str], ...]] = {
    "OF_TENSORS": (
        (fp8(PACKED), {"v": PACKED["k"]},
         f"v: must have the dtype of k ({E4M3}), got torch.bfloat16"),
        (ONE_LENGTH, {"k": zeros(2, 10, 2, 16, dtype=torch.half)},
         "k: must have the dtype of q (torch.bfloat16), got torch.float16"),
        (ONE_LENGTH, {"v": zeros(2, 10, 2, 16, dtype=torch.half)},
         "v: must have the dtype of q (torch.bfloat16), got torch.float16"),
        (ONE_LENGTH, {"q": zeros(2, 3, 4, 520), "k": zeros(2, 10, 2, 520)},
         "q: last dimension (head_dim) must be from 1 to 512, got 520"),
        (ONE_LENGTH, {"q": zeros(2, 3, 0, 16)},
         "q: must have at least one head, got shape (2, 3, 0, 16)"),
        (CACHE, {"k": zeros(2, 10, 0, 16)},
         "k_cache: must have at least one head, got shape (2, 10, 0, 16)"),
        (CACHE, {"k": zeros(2, 10, 3, 16)},
         "k_cache: number of heads must divide that of q (4), got 3"),
        (PACKED, {"k": zeros(20, 2, 8)},
         "k: last dimension (head_dim) must be that of q (16), got 8"),
        (PAGED, {"v": zeros(5, 8, 2, 0)},
         "v: last dimension (head_dim_v) must be from 1 to 512, got 0"),
    ),
    "OF_VALUES": (
        (CACHE, {"v": zeros(2, 9, 2, 16)},
         "v_cache: must have the shape of k_cache but for the last dimension, (2, 10, 2, 16), got "
         "(2, 9, 2, 16)"),
        (ONE_LENGTH, {"k": zeros(3, 10, 2, 16)}, "k: batch must be that of q (2), got 3"),
    ),
    "OF_BOUNDS": (
        (PACKED, {"cu_seqlens_q": integers(0)},
         "cu_seqlens_q: must have shape (batch + 1,), got (0,)"),
    ),
    "OF_E4M3": (
        (fp8(PACKED), {"q": zeros(6, 4, 24), "k": zeros(20, 2, 24, dtype=E4M3)},
         f"k: last dimension (head_dim) must be a multiple of 16 of {E4M3}, got 24"),
        (FP8_LATENT, {"q": zeros(2, 3, 4, 20), "k": zeros(2, 10, 2, 20)},
         "k_cache: last dimension (head_dim) must be a multiple of 8 beside v_cache of "
         f"{E4M3}, got 20"),
        (fp8(CACHE), {"v": zeros(2, 10, 2, 8, dtype=E4M3)},
         f"v_cache: last dimension (head_dim_v) must be a multiple of 16 of {E4M3}, got 8"),
        (FP8_LATENT, {"q": zeros(2, 3, 4, 264), "k": zeros(2, 10, 2, 264), **ROPE},
         "v_cache: last dimension (head_dim_v) and that of k_cache, which values_include_rope "
         "adds, must be at most 512 together, got 520"),
    ),
    "OF_BATCH": (
        (ONE_LENGTH, {"max_seqlen_q": 5},
         "max_seqlen_q: must be the length of q (3) without cu_seqlens_q, got 5"),
        (ONE_LENGTH, {"max_seqlen_k": 5},
         "max_seqlen_k: must be the length of k (10) without cu_seqlens_q, got 5"),
        (PACKED, {"cu_seqlens_k": None}, "cu_seqlens_k: must be a torch.Tensor, got NoneType"),
        (CACHE, {"k": zeros(3, 10, 2, 16)},
         "k_cache: batch must be that of q (2) without cache_batch_idx, got 3"),
    ),
    "OF_ARRAYS": (
        (LATENT, {"qv": zeros(6, 2, 16)},
         "qv: must have the shape of q but for the last dimension, (6, 4, 16), got (6, 2, 16)"),
        (LATENT, {"qv": zeros(6, 4, 24)},
         "qv: last dimension must be that of v (16), got (6, 4, 24)"),
        (LATENT, {"key_lists": integers(6, 4, 9)},
         "key_lists: must have a list for every query of q, (6, 4, 16), and head of k (2), got "
         "(6, 4, 9)"),
        (CACHE, {"tree_mask": zeros(2, 3, 4, dtype=torch.bool)},
         "tree_mask: must have shape (2, 3, 3), got (2, 3, 4)"),
        (PACKED, {"tree_mask": zeros(6, 8, dtype=torch.bool)},
         "tree_mask: must have a row for each query (6) and at least max_seqlen_q (9) columns, got "
         "(6, 8)"),
        (CACHE, {"relative_bias": zeros(4, 6)},
         "relative_bias: must have shape (4, 2 * reach + 1), got (4, 6)"),
        (PACKED, {"key_lists": integers(6, 2, 9), "key_list_block": 24},
         "key_list_block: must be 1, 8, 16, 32, 64 or 128, got 24"),
        (PAGED, {"block_table": integers(3, 3)},
         "block_table: must have shape (2, max_pages), got (3, 3)"),
        (CACHE, {"block_table": integers(2), "cache_batch_idx": integers(2)},
         "block_table: must have shape (batch, max_pages), got (2,)"),
        (PAGED, {"k": zeros(5, 0, 2, 16)},
         "k: pages must have at least one row, got shape (5, 0, 2, 16)"),
        (QUANTIZES, {"k_descale": torch.ones(2)}, f"k_descale: {A_SCALE}, got (2,)"),
        (QUANTIZES, {"v_descale": torch.ones(2, 2)}, f"v_descale: {A_SCALE}, got (2, 2)"),
        (QUANTIZES, {"k_descale": EXPANDED}, f"k_descale: {NOT_EXPANDED}"),
        (QUANTIZES, {"v_descale": EXPANDED}, f"v_descale: {NOT_EXPANDED}"),
        (QUANTIZES, {"k_descale": ONE_SCALE, "v_descale": ONE_SCALE},
         "v_descale: must be another tensor than k_descale where quantize writes it"),
        (FP8_LATENT, {"v_descale": torch.ones(2, 10, 2, 8)},
         "v_descale: last dimension must divide the columns of v_cache (256) into groups of 64, "
         "128, 256 or 512, got (2, 10, 2, 8)"),
        (FP8_LATENT, {"v_descale": torch.ones(2, 10, 2).to(E8M0)},
         f"v_descale: must have a scale for each group of a token's columns where it is of {E8M0}, "
         "got (2, 10, 2)"),
        (PACKED, {"origin": integers(2, 4), "q": zeros(1, 4, 16).expand(2**28 + 1, 4, 16)},
         "origin: must be None for more than 268435456 rows, got q of (268435457, 4, 16) and k of "
         "(20, 2, 16)"),
        (CACHE | APPENDS, {"k_new": zeros(3, 2, 16)},
         f"k: must have {DENSE_DIMS}, got shape (3, 2, 16)"),
        (CACHE | APPENDS, {"cu_seqlens_k_new": integers(3)},
         f"k: must have {PACKED_DIMS}, got shape (2, 1, 2, 16)"),
        (CACHE | APPENDS, {"rotary_cos": zeros(9, 9), "rotary_sin": zeros(9, 9)},
         "rotary_cos: must have shape (seqlen_rotary, rotary_dim / 2) with a rotary_dim from 2 to "
         "head_dim (16), got (9, 9)"),
        (CACHE | APPENDS, {"rotary_cos": zeros(9, 8), "rotary_sin": zeros(9, 7)},
         "rotary_sin: must have shape (9, 8), got (9, 7)"),
    ),
}  # fmt: skip
# Call, argument, shape, dimensions that it must have.
LAYOUTS = (
    (ONE_LENGTH, "q", (3, 4, 16), DENSE_DIMS),
    (PACKED, "q", (2, 3, 4, 16), PACKED_DIMS),
    (ONE_LENGTH, "k", (10, 2, 16), DENSE_DIMS),
    (ONE_LENGTH, "v", (10, 2, 16), DENSE_DIMS),
    (PACKED, "v", (2, 10, 2, 16), PACKED_DIMS),
    (PAGED, "k", (20, 2, 16), "4 dimensions (num_pages, page_size, heads, head_dim)"),
    (CACHE, "k", (20, 2, 16), "4 dimensions (batch_cache, capacity, heads, head_dim)"),
)
WANTED = "in a call whose gradients are wanted"
DIRECTED = "in a call that is differentiated in a direction"
# Fact, what is changed beside it, words.
OF_BACKWARD: tuple[tuple[str, Described, str], ...] = (
    ("qv", {}, f"qv: must be None {WANTED}, as attention with it has no backward"),
    ("is_fp8", {},
     f"k: must not be of {E4M3} {WANTED}, as attention over it has no backward"),
    ("over_cache", {},
     f"k_cache: must not be attended to {WANTED}, as that has no backward"),
    ("block_table", {}, f"block_table: must be None {WANTED}, got a tensor"),
    ("tree_mask", {}, f"tree_mask: must be None {WANTED}, got a tensor"),
)  # fmt: skip
OF_DIRECTION = (
    ("qv", f"qv: must be None {DIRECTED}, got a tensor"),
    ("is_fp8", f"k: must not be of {E4M3} {DIRECTED}"),
    ("reads_in_place", f"block_table: must be None {DIRECTED}, as must be a cache"),
    ("fp32_results", f"fp32_results: must be False {DIRECTED}, got True"),
    ("tree_mask", f"tree_mask: must be None {DIRECTED}, got a tensor"),
    ("lists_blocks", f"key_lists: must be None {DIRECTED}, got a tensor"),
)
# Of a number: values out of its range, what it must be, and the bounds themselves.
OUT_OF_RANGE: dict[str, tuple[tuple[float, ...], str, tuple[float, ...]]] = {
    "dropout_p": ((-0.5, 1.5, math.nan), "at least 0 and below 1", (0.0, 0.99)),
    "softmax_scale": ((1e39, -math.inf, math.nan), "finite in float32", (-3.4e38, 0.0)),
    "softcap": ((1e-42, 1e39, math.nan), "off (0) or a normal number in float32", (-1.5, 1.2e-38)),
    "max_seqlen_q": ((-1,), "at least 0", (0,)),
    "max_seqlen_k": ((-1,), "at least 0", (0, 2**63 - 1)),
    "key_list_block": ((-1, 0), "at least 1", (1,)),
    "num_splits": ((-1, 257), "from 0 to 256", (0, 256)),
    "sm_margin": ((-1,), "at least 0", (0, 2**63 - 1)),
}


# What is changed where that is not the field alone.
CHANGES: dict[str, Described] = {
    "has_cache_seqlens": {"seqused_k": None, "v_new": APPENDS["v_new"]},
    "bounds_right": {"window_size_right": 0},
}
OF_CACHE = {("seqlen_k", "seqused_k"): "cache_seqlens"}  # how errors call it there


def cases() -> Iterator[tuple[tuple[str, str], Described, type[Exception], str]]:
    """(fact, field), what is changed, exception, words."""
    for fact, kind, where, names in ABSENT:
        for name in names.split():
            known, value, must, got = FIELDS.get(name, (name, integers(2), "None", "a tensor"))
            known = OF_CACHE.get((fact, name), known)
            changes = CHANGES.get(name, {name: value})
            yield (fact, name), changes, kind, f"{known}: must be {must} {where}, got {got}"
    for fact, name, words in GIVEN:
        yield (fact, name), CHANGES.get(name, {name: None}), ValueError, words


CASES = {" ".join(broken): (broken, *case) for broken, *case in cases()}


def assert_refused(run: Callable[[], Any], kind: type[Exception], words: str) -> None:
    with pytest.raises(kind) as raised:
        run()
    assert type(raised.value) is kind and str(raised.value) == words


@pytest.mark.parametrize("case", CASES)
def test_of_a_call(case: str) -> None:
    (fact, _), changes, kind, words = CASES[case]
    assert_refused_on_both(a_call(fact, **changes), kind, words)


def assert_refused_on_both(call: AttentionCall, kind: type[Exception], words: str) -> None:
    assert_refused(lambda: check_call(call), kind, words)
    if EXTENSION is not None:
        assert_refused(lambda: EXTENSION.explain_settings(call), kind, words)


@pytest.mark.parametrize("table", SIZES)
def test_of_sizes(table: str) -> None:
    for rule, (given, changes, words) in zip(getattr(rules, table), SIZES[table], strict=True):
        assert re.fullmatch(".*: " + as_pattern(rule.words), words)
        assert_refused_on_both(described(given | changes), rule.kind, words)


def as_pattern(words: str) -> str:
    return ".*".join(map(re.escape, re.split(r"\{.*?\}", words)))


@pytest.mark.parametrize(("given", "name", "shape", "must"), LAYOUTS)
def test_of_a_layout(given: Described, name: str, shape: tuple[int, ...], must: str) -> None:
    known = f"{name}_cache" if "over_cache" in given else name
    words = f"{known}: must have {must}, got shape {shape}"
    assert_refused_on_both(described(given | {name: zeros(*shape)}), ValueError, words)


@pytest.mark.parametrize(
    "shape", [(2, 3, 2, 9), (2, 3, 9), (1, 3, 2, 9), (2, 1, 2, 9), (2, 3, 4, 9), (2, 3, 2, 0)]
)
def test_of_lists_over_a_cache(shape: tuple[int, ...]) -> None:
    latent: Described = {"qv": zeros(2, 3, 4, 16), "softmax_scale": 0.1}
    call = described(CACHE | latent | {"key_lists": integers(*shape)})
    if shape[:3] == (2, 3, 2):
        check_call(call)
        if EXTENSION is not None:
            EXTENSION.explain_settings(call)
        return
    must = "must have a list for every query of q, (2, 3, 4, 16), and head of k_cache (2)"
    assert_refused_on_both(call, ValueError, f"key_lists: {must}, got {shape}")


def test_of_blocks_of_listed_keys() -> None:
    blocks = {"key_lists": integers(6, 2, 9), "key_list_block": 8}
    for given in (LATENT | blocks, PACKED | {"key_list_block": 8}):
        words = "key_list_block: must be 1, got 8"
        assert_refused_on_both(described(given), NotImplementedError, words)


@pytest.mark.parametrize(("tiles_q", "shape"), [(1, (1, 1, 9, 8)), (2, (1, 1, 9, 4))])
def test_of_bits(tiles_q: int, shape: tuple[int, ...]) -> None:
    """Python sees a forward's lists, the extension those of the backward that it explains."""
    rows, columns = (1, 1, tiles_q, 3), (1, 1, 1, 2 + tiles_q)
    lists = {"block_rows": integers(*rows), "block_columns": integers(*columns)}
    call = described(PACKED | lists | {"mask_bits": integers(*shape)})
    words = "mask_bits: must have the rows and words of block_{}, got shape {}"
    assert_refused(lambda: check_call(call), ValueError, words.format(f"rows, {rows}", shape))
    if EXTENSION is not None:
        road = partial(EXTENSION.explain_settings, call)
        assert_refused(road, ValueError, words.format(f"columns, {columns}", shape))


def test_of_head_dims_on_cuda() -> None:
    """The extension's road wants a GPU."""
    call = described(ONE_LENGTH | {"q": zeros(2, 3, 4, 20), "k": zeros(2, 10, 2, 20)})
    words = "must be a multiple of 8 on CUDA, got 20"
    road = partial(check_holds, rules.OF_CUDA, NAMES, call)
    assert_refused(road, ValueError, f"q: last dimension (head_dim) {words}")
    call.q = call.k = zeros(2, 3, 4, 24)
    assert_refused(road, ValueError, f"v: last dimension (head_dim_v) {words}")
    call.over_cache = True
    road()


def test_of_head_dims_with_qv_on_cuda() -> None:
    wide = {"q": zeros(6, 4, 72), "k": zeros(20, 2, 72), "v": PACKED["k"]}
    road = partial(check_holds, rules.OF_CUDA, NAMES, described(LATENT | wide))
    words = "q: last dimension (head_dim) must be at most 64 with qv on CUDA, got 72"
    assert_refused(road, ValueError, words)


@pytest.mark.parametrize("name", RANGES)
def test_of_a_number(name: str) -> None:
    values, must, within = OUT_OF_RANGE[name]
    roads = (check_call, *([] if EXTENSION is None else [EXTENSION.explain_settings]))
    for value, road in itertools.product(values, roads):
        call = AttentionCall(**PACKED | {"v": PACKED["k"], name: value})
        words = f"{name}: must be {must}, got {value}"
        assert_refused(partial(road, call), ValueError, words)
    for value, road in itertools.product(within, roads):
        road(AttentionCall(**PACKED | {"v": PACKED["k"], name: value}))


@pytest.mark.parametrize(("fact", "changes", "words"), OF_BACKWARD)
def test_of_a_backward(fact: str, changes: Described, words: str) -> None:
    call = a_call(fact, **changes)
    call.q = call.q.clone().requires_grad_()
    incoming = Incoming(None, None, call.q, call.q, None)
    assert_refused(lambda: check_incoming(call, incoming), NotImplementedError, words)
    if EXTENSION is not None:
        assert_refused(lambda: EXTENSION.forward(call), NotImplementedError, words)


# Of a call that autograd records: what is changed beside the call, exception, words.
OF_RECORDED: tuple[tuple[Described, type[Exception], str], ...] = (
    ({"out": zeros(2, 3, 4, 16)}, NotImplementedError,
     f"out: must be None {WANTED}, got a tensor (torch.no_grad() says that none is)"),
    ({"fp32_results": True}, NotImplementedError,
     f"fp32_results: must be False {WANTED}, got True"),
    ({"block_rows": LISTS["block_rows"]}, ValueError,
     "block_columns: must be given with block_rows, got None"),
    ({"block_columns": LISTS["block_columns"]}, ValueError,
     "block_rows: must be given with block_columns, got None"),
)  # fmt: skip


@pytest.mark.parametrize(("changes", "kind", "words"), OF_RECORDED)
def test_of_a_recorded_call(changes: Described, kind: type[Exception], words: str) -> None:
    call = described(ONE_LENGTH | changes)
    call.q = call.q.clone().requires_grad_()
    tables = rules.OF_RECORDED + rules.OF_LISTS
    assert_refused(lambda: check_rules(tables, NAMES, call), kind, words)
    if EXTENSION is not None:
        assert_refused(lambda: EXTENSION.forward(call), kind, words)


@pytest.mark.parametrize(("fact", "words"), OF_DIRECTION)
def test_of_a_direction(fact: str, words: str) -> None:
    """The extension's road wants a GPU."""
    call = a_call(fact)
    assert_refused(lambda: check_tangents(call, Tangents()), NotImplementedError, words)


def test_every_rule_is_broken_here() -> None:
    """By a call of which its fact holds."""
    named = {"bias": "has_masks", "block_rows": "has_lists"}
    broken = {(fact, named.get(name, name)) for (fact, name), *_ in CASES.values()}
    stated = {
        (each.fact, name)
        for each in rules.OF_CALL
        for name in (*each.absent, *each.refused, *each.given)
    }
    assert broken == stated
    assert [fact for fact, *_ in OF_BACKWARD] == [each.fact for each in rules.OF_BACKWARD]
    assert [fact for fact, _ in OF_DIRECTION] == [each.fact for each in rules.OF_DIRECTION]


def test_what_obeys() -> None:
    """Every call but those of a pair of which one is missing."""
    pairs = ("k_new", "v_new", "rotary_cos", "rotary_sin")
    for fact in CALLS.keys() - pairs:
        check_call(a_call(fact))
        if EXTENSION is not None:
            EXTENSION.explain_settings(a_call(fact))
