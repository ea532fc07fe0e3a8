"""Every array of a call (flash_attn_cuda/call/fields.py), by the road of Python and by that of the
extension: one of another dtype, shape, device or layout raises the same on both.

q, k and v, and which arrays go together, are in test_rules.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from flash_attn_cuda.call.checks import check_call
from flash_attn_cuda.call.fields import ARGUMENTS, OVER_PAIRS, AttentionCall
from flash_attn_cuda.installed import build_info
from tests.cpu.test_rules import (
    APPENDS,
    CACHE,
    FP8_LATENT,
    LATENT,
    LISTS,
    ONE_LENGTH,
    PACKED,
    PAGED,
    Described,
    described,
    fp8,
    integers,
    zeros,
)

EXTENSION: Any = build_info.extension
ROADS = (check_call, *([] if EXTENSION is None else [EXTENSION.explain_settings]))
OF_NEW = {f"{x}_new": zeros(3, 2, 16) for x in "kv"} | {"cu_seqlens_k_new": integers(3)}
ROTARY = {name: zeros(9, 8) for name in ("rotary_cos", "rotary_sin")}
E4M3_CACHE = fp8(CACHE)
# Of each array a call that has it.
HAVING: dict[str, Described] = {
    "alibi_slopes": ONE_LENGTH | {"alibi_slopes": torch.ones(4)},
    "bias": ONE_LENGTH | {"bias": zeros(2, 4, 3, 10)},
    "sink": ONE_LENGTH | {"sink": torch.ones(4)},
    "cu_seqlens_k": PACKED,
    "seqused_q": PACKED | {"seqused_q": integers(2)},
    "seqused_k": CACHE,
    "leftpad_k": CACHE | {"leftpad_k": integers(2)},
    "origin": PACKED | {"origin": integers(2, 4)},
    "block_table": PAGED,
    "block_rows": ONE_LENGTH | LISTS,
    "block_columns": ONE_LENGTH | LISTS,
    "mask_bits": ONE_LENGTH | LISTS | {"mask_bits": integers(2, 4, 3, 4)},
    "cache_batch_idx": CACHE | {"cache_batch_idx": integers(2)},
    "k_new": CACHE | APPENDS,
    "v_new": CACHE | APPENDS,
    "cu_seqlens_k_new": CACHE | OF_NEW,
    "rotary_cos": CACHE | APPENDS | ROTARY,
    "rotary_sin": CACHE | APPENDS | ROTARY,
    "q_descale": E4M3_CACHE | {"q_descale": torch.ones(2)},
    "k_descale": E4M3_CACHE,
    "v_descale": FP8_LATENT,
    "qv": LATENT,
    "key_lists": LATENT | {"key_lists": integers(6, 2, 9)},
    "tree_mask": CACHE | {"tree_mask": zeros(2, 3, 3, dtype=torch.bool)},
    "relative_bias": CACHE | {"relative_bias": torch.zeros(4, 5)},
}
# What is done to an array, the exception, and how its words go on behind the array's name.
CHANGES: dict[str, tuple[Callable[[Tensor], Tensor], type[Exception], str]] = {
    "dtype": (lambda x: x.to(torch.int64), TypeError, "dtype must be "),
    "size": (lambda x: torch.cat([x, x], -1), ValueError, "must have shape ("),
    "dimensions": (lambda x: x[None], ValueError, "must have "),
    "device": (lambda x: x.to("meta"), ValueError, "must be on the device of q (cpu), got meta"),
    "layout": (lambda x: x.to_sparse(), TypeError, "must be a dense tensor, got layout "),
}


def words_of(road: Callable[[AttentionCall], Any], call: AttentionCall, kind: Any) -> str:
    with pytest.raises(kind) as raised:
        road(call)
    assert type(raised.value) is kind
    return str(raised.value)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", HAVING)
def test_of_an_array(name: str, change: str) -> None:
    given, (alter, kind, words) = HAVING[name], CHANGES[change]
    for road in ROADS:
        road(described(given))
    if change == "size" and name in ("block_table", "qv", "v_descale", "key_lists"):
        return  # any number of pages, groups or keys; a rule of its own (test_rules.py)
    call = described(given | {name: alter(given[name])})
    known = ARGUMENTS[name].name_of_cache if "over_cache" in given else name
    found = [words_of(road, call, kind) for road in ROADS]
    assert found[0].startswith(f"{known or name}: {words}")
    if change != "layout":  # which each calls by its own names
        assert len(set(found)) == 1, found


@pytest.mark.skipif(EXTENSION is None, reason="flash_attn_cuda._C is not built here")
@pytest.mark.parametrize("name", HAVING)
def test_kernels_read_plain_arrays(name: str) -> None:
    """Those over pairs are copied first where that must be. Rows of a block_table lie anywhere."""
    given, said = HAVING[name], ARGUMENTS[name]
    call = described(given | {name: torch.stack([given[name]] * 2, -1)[..., 0]})
    check_call(call)
    if said.over_pairs or (said.is_strided and name != "block_table"):
        EXTENSION.explain_settings(call)
    else:
        assert "must be contiguous, got strides [" in words_of(ROADS[-1], call, ValueError)


def test_every_array_is_here() -> None:
    assert HAVING.keys() == {name for name, said in ARGUMENTS.items() if said.shape}


# Of packed sequences: two of at most 9 queries and keys. Longer ones are as good.
@pytest.mark.parametrize(
    ("name", "shape", "must"),
    [
        ("block_rows", (1, 1, 0, 3), "2 or 1, 4 or 1, 1 or more, 3 or more"),
        ("block_rows", (3, 1, 1, 3), "2 or 1, 4 or 1, 1 or more, 3 or more"),
        ("block_columns", (1, 1, 1, 2), "2 or 1, 4 or 1, 1 or more, 3 or more"),
        ("mask_bits", (1, 1, 8, 4), "2 or 1, 4 or 1, 9 or more, 4 or more"),
        ("bias", (1, 1, 8, 9), "2 or 1, 4 or 1, 9 or more or 1, 9 or more"),
        ("bias", (1, 2, 1, 9), "2 or 1, 4 or 1, 9 or more or 1, 9 or more"),
        ("bias", (1, 1, 1, 8), "2 or 1, 4 or 1, 9 or more or 1, 9 or more"),
        ("bias_by_distance", (1, 1, 2, 18), "2 or 1, 4 or 1, 1, 18 or more"),
        ("bias_by_distance", (1, 1, 1, 17), "2 or 1, 4 or 1, 1, 18 or more"),
    ],
)
def test_over_pairs_of_packed_sequences(name: str, shape: tuple[int, ...], must: str) -> None:
    others: Described = LISTS
    if name.startswith("bias"):
        name, others = "bias", {"bias_by_distance": name != "bias"}
    assert name in OVER_PAIRS
    array = zeros(*shape, dtype=torch.bfloat16 if name == "bias" else torch.int32)
    call = described(PACKED | others | {name: array})
    for road in ROADS:
        assert words_of(road, call, ValueError) == f"{name}: must have shape ({must}), got {shape}"
    for road in ROADS:
        road(described(PACKED | LISTS | {"bias": zeros(1, 1, 20, 20)}))
        road(described(PACKED | {"bias": zeros(2, 4, 1, 30), "bias_by_distance": True}))
