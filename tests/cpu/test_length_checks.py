"""Bad lengths and indices of packed sequences and caches: their form, and contents on the CPU.

gpu/test_bad_input.py has what happens to bad contents on a device.
"""

from __future__ import annotations

from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

from flash_attn_cuda import (
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)


def zeros(*shape: int, **options: Any) -> Tensor:
    return torch.zeros(shape, **options)


# -- packed sequences ------------------------------------------------------------------------------


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def packed(**changes: Any) -> dict[str, Any]:
    """Sequences of 3, 0 and 7 queries over 4, 1 and 5 keys, some arguments replaced."""
    good = {"q": zeros(10, 4, 8), "k": zeros(10, 2, 8), "v": zeros(10, 2, 8)}
    good |= {"cu_seqlens_q": int32(0, 3, 3, 10), "cu_seqlens_k": int32(0, 4, 5, 10)}
    return {**good, "max_seqlen_q": 7, "max_seqlen_k": 5, **changes}


PAGES = {
    "k": zeros(6, 2, 2, 8),
    "v": zeros(6, 2, 2, 8),
    "block_table": torch.tensor([[0, 1, 99], [2, -1, 7], [3, 4, 5]], dtype=torch.int32),
}

BAD_PACKED = {
    "cu list": (packed(cu_seqlens_q=[0, 3]), TypeError, r"^cu_seqlens_q: must be a torch.Tensor"),
    "start": (packed(cu_seqlens_q=int32(1, 3, 3, 10)), ValueError, r"^cu_seqlens_q: .*0, got 1 at"),
    "order": (packed(cu_seqlens_k=int32(0, 6, 5, 10)), ValueError,
        r"^cu_seqlens_k: .*got 5 at index 2"),
    "wrap": (packed(cu_seqlens_k=int32(0, 6, -(2**31), 10)), ValueError,
        r"^cu_seqlens_k: .*got -2147"),
    "end": (packed(cu_seqlens_q=int32(0, 3, 3, 11)), ValueError,
        r"^cu_seqlens_q: must end within total_q \(10\), got 11 at index 3"),
    "max": (
        packed(max_seqlen_q=6),
        ValueError,
        r"^max_seqlen_q: .*longest sequence, got 6 for 7 rows",
    ),
    "max str": (packed(max_seqlen_k="5"), TypeError,
        r"^max_seqlen_k: must be an integer, .*got str"),
    "max dims": (packed(max_seqlen_k=int32(5)), ValueError,
        r"^max_seqlen_k: .*0-d tensor, got shape"),
    "used_q": (packed(seqused_q=int32(3, 1, 7)), ValueError,
        r"^seqused_q: .*0 to 0, got 1 at index 1"),
    "used_k": (packed(seqused_k=int32(4, 1, -1)), ValueError,
        r"^seqused_k: .*0 to 5, got -1 at index 2"),
    "leftpad": (packed(leftpad_k=int32(0, 0, 3), seqused_k=int32(4, 1, 2)), ValueError,
        r"^leftpad_k: must be from 0 to 2, got 3 at index 2"),
    "max > 64 bits": (packed(max_seqlen_k=2**70), ValueError, r"^max_seqlen_k: must be at most"),
    "splits str": (packed(num_splits="2"), TypeError, r"^num_splits: must be an integer, got str"),
    "splits float": (packed(num_splits=1.0), TypeError, r"^num_splits: .*integer, got float"),
    "splits None": (packed(num_splits=None), TypeError, r"^num_splits: .*integer, got NoneType"),
    "splits tensor": (packed(num_splits=torch.tensor(2)), TypeError,
        r"^num_splits: .*integer, got Tensor"),
    "invariant": (packed(batch_invariant="x"), TypeError,
        r"^batch_invariant: must be a bool, got str"),
    "page of padding": (packed(**PAGES, seqused_k=int32(4, 3, 1), leftpad_k=int32(0, 2, 0)),
        ValueError, r"^block_table: must be .*, got -1 at index \(1, 1\)"),
    "page": (packed(**PAGES, seqused_k=int32(4, 3, 1)), ValueError,
        r"^block_table: must be a page of the pool, from 0 to 5, got -1 at index \(1, 1\)"),
    "capacity": (packed(**PAGES, seqused_k=int32(7, 1, 1)), ValueError,
        r"^seqused_k: .*0 to 6, got 7"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_PACKED)
def test_bad_packed_calls(name: str) -> None:
    arguments, error, message = BAD_PACKED[name]
    with pytest.raises(error, match=message):
        flash_attn_varlen_func(**arguments)


def test_packed_calls_that_are_good() -> None:
    flash_attn_varlen_func(**packed())
    flash_attn_varlen_func(**packed(max_seqlen_q=torch.tensor(-5), max_seqlen_k=None))
    flash_attn_varlen_func(**packed(max_seqlen_q=1, seqused_q=int32(1, 0, 1)))
    flash_attn_varlen_func(**packed(max_seqlen_q=3, cu_seqlens_q=int32(0, 3, 3, 5)))
    flash_attn_varlen_func(**packed(cu_seqlens_q=int32(0, 0, 0, 0), cu_seqlens_k=int32(0, 4, 5, 9)))
    used = int32(4, 2, 1)  # page 99 and the last two of sequence 1 hold no key
    flash_attn_varlen_func(**packed(**PAGES, seqused_k=used))
    flash_attn_varlen_func(**packed(**PAGES, seqused_k=used, cu_seqlens_k=None))
    # Nothing but padding in sequence 1, whose last page is none.
    used, leftpad = int32(4, 3, 1), int32(0, 3, 0)
    flash_attn_varlen_func(**packed(**PAGES, seqused_k=used, leftpad_k=leftpad))
    flash_attn_varlen_func(**packed(num_splits=numpy.int64(2), max_seqlen_k=2**63 - 1))


def test_packed_forms_name_their_own_arguments() -> None:
    cu_seqlens = int32(0, 6)
    qkv, kv = zeros(6, 3, 4, 8), zeros(6, 2, 2, 8)
    for call, message in (
        (lambda: flash_attn_varlen_qkvpacked_func(kv, cu_seqlens, 6), r"^qkv: must have shape"),
        (
            lambda: flash_attn_varlen_qkvpacked_func(qkv, cu_seqlens.long(), 6),
            r"^cu_seqlens: dtype",
        ),
        (lambda: flash_attn_varlen_qkvpacked_func(qkv, cu_seqlens, -5), r"^max_seqlen: .*got -5"),
        (
            lambda: flash_attn_varlen_qkvpacked_func(qkv, cu_seqlens, 5),
            r"^max_seqlen: must be at least the longest sequence, got 5",
        ),
        (
            lambda: flash_attn_varlen_qkvpacked_func(qkv, int32(0, 4, 3), 5),
            r"^cu_seqlens: must not decrease",
        ),
        (
            lambda: flash_attn_varlen_qkvpacked_func(qkv, int32(0, 7), 7),
            r"^cu_seqlens: must end within total \(6\), got 7",
        ),
        (
            lambda: flash_attn_varlen_kvpacked_func(qkv[:, 0], kv, cu_seqlens, int32(0, 7), 6, 7),
            r"^cu_seqlens_k: must end within total_k \(6\), got 7",
        ),
        (
            lambda: flash_attn_varlen_kvpacked_func(qkv[:, 0], qkv, *(cu_seqlens,) * 2, 6, 6),
            r"^kv: ",
        ),
        (
            lambda: flash_attn_varlen_kvpacked_func(
                zeros(6, 3, 8), kv, cu_seqlens, cu_seqlens, 6, 6
            ),
            r"^kv\[:, 0\]: number of heads",
        ),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            call()


# -- caches ----------------------------------------------------------------------------------------

NEW = {"k": zeros(2, 3, 2, 8), "v": zeros(2, 3, 2, 8)}
ROTARY = {"rotary_cos": zeros(9, 4), "rotary_sin": zeros(9, 4)}


def cached(**changes: Any) -> dict[str, Any]:
    """Two sequences over a cache of 9 rows, with 4 and 5 of them filled."""
    good = {"q": zeros(2, 3, 4, 8), "k_cache": zeros(2, 9, 2, 8), "v_cache": zeros(2, 9, 2, 8)}
    return {**good, "cache_seqlens": int32(4, 5), **changes}


def paged(**changes: Any) -> dict[str, Any]:
    pool = {"k_cache": zeros(4, 3, 2, 8), "v_cache": zeros(4, 3, 2, 8)}
    table = torch.tensor([[0, 1, 2], [3, 9, -1]], dtype=torch.int32)
    return cached(**{**pool, "block_table": table, "cache_seqlens": int32(4, 3), **changes})


BAD_CACHES = {
    "lengths": (cached(cache_seqlens=int32(10, 5)), ValueError,
        r"^cache_seqlens: .*9, got 10 at index 0"),
    "negative": (cached(cache_seqlens=int32(1, -1)), ValueError,
        r"^cache_seqlens: .*got -1 at index 1"),
    "int": (cached(cache_seqlens=10), ValueError, r"^cache_seqlens: must be from 0 to 9.*got 10"),
    "int append": (
        cached(**NEW, cache_seqlens=7),
        ValueError,
        r"^cache_seqlens: .*0 to 6, for 3 new",
    ),
    "float": (cached(cache_seqlens=1.5), TypeError,
        r"^cache_seqlens: must be an integer or a tensor"),
    "append": (cached(**NEW, cache_seqlens=int32(4, 7)), ValueError,
        r"^cache_seqlens: .*got 10 at index 1"),
    "index": (cached(cache_batch_idx=int32(0, 2)), ValueError,
        r"^cache_batch_idx: .*0 to 1, got 2"),
    "leftpad": (cached(cache_leftpad=int32(5, 0)), ValueError, r"^cache_leftpad: .*0 to 4, got 5"),
    "cos short": (cached(**NEW, rotary_cos=zeros(7, 4), rotary_sin=zeros(7, 4)), ValueError,
        r"^rotary_cos: .*must be from 0 to 6, got 7 at index 1"),
    "grad": (cached(**NEW, k_cache=zeros(2, 9, 2, 8, requires_grad=True)), NotImplementedError,
        r"^k_cache: must not require grad"),
    "page": (paged(cache_seqlens=int32(4, 4)), ValueError,
        r"^block_table: .*got 9 at index \(1, 1\)"),
    "page of an append": (paged(**NEW, cache_seqlens=int32(4, 2)), ValueError,
        r"^block_table: .*got 9 at index \(1, 1\)"),
    "paged capacity": (paged(cache_seqlens=int32(4, 10)), ValueError, r"^cache_seqlens: .*0 to 9"),
    "cu_seqlens_q": (cached(q=zeros(6, 4, 8), cu_seqlens_q=int32(0, 4, 7)), ValueError,
        r"^cu_seqlens_q: must end within total_q \(6\), got 7"),
    "cu_seqlens_k_new": (cached(k=zeros(4, 2, 8), v=zeros(4, 2, 8),
        cu_seqlens_k_new=int32(0, 5, 4)), ValueError,
        r"^cu_seqlens_k_new: must not decrease, got 4 at index 2"),
    "end of cu_seqlens_k_new": (cached(k=zeros(4, 2, 8), v=zeros(4, 2, 8),
        cu_seqlens_k_new=int32(0, 2, 5)), ValueError,
        r"^cu_seqlens_k_new: must end within total_k_new \(4\), got 5 at index 2"),
    "cos empty": (
        cached(**NEW, rotary_cos=zeros(0, 4), rotary_sin=zeros(0, 4), cache_seqlens=0),
        ValueError,
        r"^rotary_cos: must have a row for every position, got no rows",
    ),
    "page of padding": (paged(cache_seqlens=int32(4, 4), cache_leftpad=int32(0, 3)), ValueError,
        r"^block_table: .*got 9 at index \(1, 1\)"),
    "q 0-d": (cached(q=torch.tensor(1.0), cu_seqlens_q=int32(0, 1)), ValueError,
        r"^q: must have 3 dimensions"),
    "max > 64 bits": (cached(q=zeros(6, 4, 8), cu_seqlens_q=int32(0, 4, 6), max_seqlen_q=2**70),
        ValueError, r"^max_seqlen_q: must be at most"),
    "splits float": (cached(num_splits=1.5), TypeError, r"^num_splits: .*integer, got float"),
    "splits None": (cached(num_splits=None), TypeError, r"^num_splits: .*integer, got NoneType"),
    "invariant": (cached(batch_invariant=1), TypeError, r"^batch_invariant: .*bool, got int"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_CACHES)
def test_bad_cache_calls(name: str) -> None:
    """Nothing is written by a call that fails."""
    arguments, error, message = BAD_CACHES[name]
    with pytest.raises(error, match=message):
        flash_attn_with_kvcache(**arguments)
    assert not arguments["k_cache"].any()


def test_cache_calls_that_are_good() -> None:
    for arguments in (cached(), paged(), cached(cache_seqlens=9), cached(**NEW, cache_seqlens=6)):
        flash_attn_with_kvcache(**arguments)
    flash_attn_with_kvcache(**cached(cache_seqlens=None))
    flash_attn_with_kvcache(**cached(max_seqlen_q=2**70))  # of no use without cu_seqlens_q
    # Nothing but padding in sequence 1, whose second page is none.
    flash_attn_with_kvcache(**paged(cache_seqlens=int32(4, 4), cache_leftpad=int32(0, 4)))
    flash_attn_with_kvcache(
        **cached(q=zeros(6, 4, 8), cu_seqlens_q=int32(0, 1, 3), max_seqlen_q=2),
        **{"k": zeros(9, 2, 8), "v": zeros(9, 2, 8), "cu_seqlens_k_new": int32(0, 2, 2)},
    )
    flash_attn_with_kvcache(**cached(**NEW, **ROTARY, cache_seqlens=int32(6, 0)))
    with torch.no_grad():
        flash_attn_with_kvcache(**cached(q=zeros(2, 3, 4, 8, requires_grad=True)))
