"""Attention over a KV cache: appends, rotary, pages, splits, against the fp64 reference. Every row
of both caches is compared as well, and rows that hold no key are NaN.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flash_attn_cuda import check_device_errors
from tests.cases.attention import Alibi, KvCacheCase
from tests.cases.harness import (
    DEVICE,
    Check,
    attend_over_cache,
    bits,
    check_cache,
    make_cache_case,
    scaled,
    skip_without_row,
)
from tests.cases.pairwise import pairwise

pytestmark = pytest.mark.gpu

CAUSAL = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
PAGES = pytest.mark.parametrize("page_size", [None, 16], ids=["dense", "paged"])


@pytest.fixture(autouse=True)
def _no_device_errors() -> Any:
    """Good calls leave no flag."""
    yield
    check_device_errors()


# -- shapes ----------------------------------------------------------------------------------------


@CAUSAL
@PAGES
@pytest.mark.parametrize("seqlen_q", [1, 2, 3, 7, 8, 16, 17, 33, 64, 65, 127, 130])
def test_query_lengths(check: Check, seqlen_q: int, page_size: int | None, causal: bool) -> None:
    """Reading alone, and the step of generation: as many keys appended as there are queries."""
    base = make_cache_case(
        cached=(150, 0, 37), seqlens_q=seqlen_q, capacity=300, page_size=page_size, causal=causal
    )
    check(base, backward=False)
    check(replace(base, seqlens_new=seqlen_q), backward=False, seed=1)


@PAGES
@pytest.mark.parametrize(
    "heads",
    [(1, 1), (4, 4), (2, 1), (6, 2), (9, 3), (12, 4), (32, 8), (16, 1), (40, 1), (71, 1)],
    ids=str,
)
def test_head_ratios(check: Check, heads: tuple[int, int], page_size: int | None) -> None:
    """Query heads of one key head share a tile: groups that fill one, and that do not."""
    for seqlen_q, dtype in ((1, torch.bfloat16), (3, torch.float16), (20, torch.bfloat16)):
        case = make_cache_case(
            cached=(150, 3, 64),
            seqlens_q=seqlen_q,
            seqlens_new=seqlen_q,
            num_heads_q=heads[0],
            num_heads_k=heads[1],
            page_size=page_size,
            dtype=dtype,
            causal=True,
        )
        check(case, backward=False)


@PAGES
@pytest.mark.parametrize("head_dim", [1, 8, 32, 40, 59, 64, 96, 111, 128, 160, 192, 255, 256, 512])
def test_head_dims(check: Check, head_dim: int, page_size: int | None) -> None:
    """Odd ones too, whose rows start on no 16-byte boundary."""
    for seqlen_q in (1, 20):
        case = make_cache_case(
            cached=(150, 0, 64),
            seqlens_q=seqlen_q,
            seqlens_new=seqlen_q,
            head_dim=head_dim,
            page_size=page_size,
            causal=True,
        )
        check(case, backward=False)


@pytest.mark.parametrize("page_size", [1, 2, 7, 16, 64, 100, 256, 300])
@pytest.mark.parametrize("head_dim", [64, 59, 128])
def test_page_sizes(check: Check, head_dim: int, page_size: int) -> None:
    for seqlen_q, new in ((1, 1), (33, 40), (5, None)):
        case = make_cache_case(
            cached=(299, 0, 16, 257),
            seqlens_q=seqlen_q,
            seqlens_new=new,
            capacity=340,
            page_size=page_size,
            head_dim=head_dim,
            causal=True,
        )
        check(case, backward=False)


@pytest.mark.parametrize(
    "fields",
    [
        {"cached": ()},
        {"cached": (0, 0, 0)},
        {"cached": (0,), "seqlens_new": 1},
        {"cached": (5, 9), "seqlens_q": 0},
        {"cached": (5, 9), "seqlens_q": 0, "seqlens_new": 2},
        {"cached": (5, 9), "seqlens_q": 2, "seqlens_new": 0},
        {"cached": (192, 192), "seqlens_q": 3},
        {"cached": (0, 0), "capacity": 0},
        {"cached": (191, 0), "seqlens_new": 1, "capacity": 192},
    ],
    ids=str,
)
@PAGES
def test_empty_and_full(check: Check, fields: dict[str, Any], page_size: int | None) -> None:
    check(make_cache_case(**fields, page_size=page_size, causal=True), backward=False)


# -- arguments -------------------------------------------------------------------------------------


@PAGES
def test_one_length_for_all(page_size: int | None) -> None:
    """An int, a tensor of it, and for a full cache None: the same bits."""
    for length in (0, 77, 192):
        case = make_cache_case(cached=(length,) * 3, seqlens_q=2, page_size=page_size, causal=True)
        skip_without_row(case)
        inputs = case.make_inputs()
        expected, *_ = attend_over_cache(case, inputs)
        for seqlens in (length, *([None] if length == 192 else [])):
            actual, *_ = attend_over_cache(case, inputs, cache_seqlens=seqlens)
            assert torch.equal(bits(actual.out), bits(expected.out)), seqlens
            assert torch.equal(bits(actual.lse), bits(expected.lse)), seqlens


def test_an_int_length_with_an_append() -> None:
    case = make_cache_case(cached=(50, 50), seqlens_q=3, seqlens_new=3, causal=True)
    skip_without_row(case)
    check_cache(case, cache_seqlens=50)


PLACES: dict[str, dict[str, Any]] = {
    "batch_idx": {"batch_idx": (3, 0, 2), "entries": 5},
    "leftpad": {"leftpad": (10, 0, 37)},
    "both": {"batch_idx": (3, 0, 2), "entries": 5, "leftpad": (90, 0, 1)},
}


@pytest.mark.parametrize("places", PLACES.values(), ids=PLACES.keys())
@pytest.mark.parametrize("page_size", [None, 7, 16])
@CAUSAL
def test_places_in_the_cache(
    check: Check, places: dict[str, Any], page_size: int | None, causal: bool
) -> None:
    """With and without an append; leftpad up to the whole length."""
    for seqlen_q, new in ((1, 1), (1, None), (20, 20), (20, 3)):
        case = make_cache_case(
            cached=(100, 0, 37),
            seqlens_q=seqlen_q,
            seqlens_new=new,
            page_size=page_size,
            causal=causal,
            **places,
        )
        check(case, backward=False)


def test_sequences_may_share_an_entry(check: Check) -> None:
    """Two queries over one prefix, read at two lengths, without appending."""
    case = make_cache_case(cached=(100, 100, 37), seqlens_q=4, batch_idx=(1, 1, 0), entries=2)
    check(case, backward=False)


@pytest.mark.parametrize(
    "lengths",
    [
        ((1, 1, 1), None),
        ((5, 0, 70), None),
        ((5, 0, 70), (5, 0, 70)),
        ((3, 1, 0), (20, 1, 2)),
        ((0, 0, 0), (1, 2, 3)),
        ((1, 130, 4), (0, 0, 0)),
    ],
    ids=str,
)
@pytest.mark.parametrize("page_size", [None, 16, 7])
def test_packed_queries(check: Check, lengths: Any, page_size: int | None) -> None:
    """cu_seqlens_q, and cu_seqlens_k_new where it differs; Sq = 1 with empty sequences too."""
    for heads_k, features in ((2, {"causal": True}), (1, {"window": (40, 3), "rotary_dim": 32})):
        if "rotary_dim" in features and lengths[1] is None:
            continue
        case = make_cache_case(
            cached=(100, 0, 37),
            seqlens_q=lengths[0],
            seqlens_new=lengths[1],
            page_size=page_size,
            num_heads_k=heads_k,
            leftpad=(3, 0, 37),
            **features,
        )
        check(case, backward=False)


# -- rotary ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("interleaved", [True, False], ids=["interleaved", "halves"])
@pytest.mark.parametrize(
    "mask", [{}, {"causal": True}, {"window": (50, -1)}, {"window": (-1, 3)}], ids=str
)
@pytest.mark.parametrize("sizes", [(64, 16), (64, 64), (128, 32), (111, 48), (256, 256)], ids=str)
def test_rotary(check: Check, sizes: tuple[int, int], mask: Any, interleaved: bool) -> None:
    """Queries turn with their rows under a mask, all alike without one; sizes: head_dim, turned."""
    for seqlen_q, new, page_size in ((1, 1, None), (9, 9, 7), (5, 30, None)):
        case = make_cache_case(
            cached=(100, 0, 37),
            seqlens_q=seqlen_q,
            seqlens_new=new,
            page_size=page_size,
            head_dim=sizes[0],
            rotary_dim=sizes[1],
            rotary_interleaved=interleaved,
            **mask,
        )
        check(case, backward=False)


def test_rotary_with_places(check: Check) -> None:
    """Positions are rows of the cache, left padding included."""
    for page_size in (None, 16):
        case = make_cache_case(
            cached=(100, 5, 37),
            seqlens_q=3,
            seqlens_new=3,
            page_size=page_size,
            rotary_dim=32,
            causal=True,
            **PLACES["both"] | {"leftpad": (90, 5, 1)},
        )
        check(case, backward=False)


# -- splits ----------------------------------------------------------------------------------------


@PAGES
@pytest.mark.parametrize("num_splits", [0, 1, 2, 3, 7, 64, 129, 256])
def test_splits(num_splits: int, page_size: int | None) -> None:
    """More splits than keys, and splits that see none of theirs."""
    for seqlen_q, heads_k, features in (
        (1, 2, {}),
        (1, 4, {"window": (100, 0)}),
        (70, 1, {"causal": True}),
        (3, 2, {"softcap": 5.0, "alibi": Alibi.per_batch, "causal": True}),
    ):
        case = make_cache_case(
            cached=(scaled(3000, 600), 0, 63, 1000 if DEVICE != "cpu" else 200),
            seqlens_q=seqlen_q,
            seqlens_new=seqlen_q,
            capacity=scaled(3200, 700),
            page_size=page_size,
            num_heads_k=heads_k,
            **features,
        )
        skip_without_row(case)
        check_cache(case, num_splits=num_splits)


@PAGES
@pytest.mark.parametrize("num_splits", [0, 1, 9])
def test_more_parts_than_places(num_splits: int, page_size: int | None) -> None:
    """So many that CTAs that are done take what is left, of sequences alike and of others."""
    batch = scaled(80, 6)
    for lengths in ((150,), (0, 700, 3, 64, 65, 210, 33)):
        case = make_cache_case(
            cached=(lengths * batch)[:batch],
            seqlens_q=1,
            capacity=720,
            page_size=page_size,
            num_heads_q=8,
            num_heads_k=8,
        )
        check_cache(case, num_splits=num_splits)


# -- everything together ---------------------------------------------------------------------------

SETTINGS: dict[str, tuple[Any, ...]] = {
    "dtype": (torch.bfloat16, torch.float16),
    "head_dim": (32, 59, 64, 96, 128, 192, 256, 320, 512),
    "heads": ((4, 4), (8, 2), (6, 1), (5, 5)),
    "lengths": (
        *((1, 1), (1, None), (7, 7), (40, 40), (40, 2)),
        *(((3, 0, 20), (3, 0, 20)), ((1, 4, 0), None)),
    ),
    "page_size": (None, 1, 7, 16, 256),
    "places": ({}, *PLACES.values()),
    "mask": ({}, {"causal": True}, {"window": (33, -1)}, {"window": (-1, 9)}, {"window": (40, 3)}),
    "softcap": (0.0, 4.0),
    "alibi": (None, Alibi.per_head, Alibi.per_batch),
    "rotary": ((0, True), (16, True), (32, False)),
    "softmax_scale": (None, -0.2),
    "num_splits": (0, 1, 3, 50),
}


def combined_case(heads: Any, lengths: Any, rotary: Any, **fields: Any) -> KvCacheCase:
    """A case of one combination of SETTINGS; only what is appended can be rotated."""
    return make_cache_case(
        cached=(100, 0, 37),
        capacity=192,
        num_heads_q=heads[0],
        num_heads_k=heads[1],
        seqlens_q=lengths[0],
        seqlens_new=lengths[1],
        rotary_dim=rotary[0] if lengths[1] is not None else 0,
        rotary_interleaved=rotary[1],
        **fields.pop("places"),
        **fields.pop("mask"),
        **fields,
    )


COMBINATIONS = [
    (choice.pop("num_splits"), combined_case(**choice)) for choice in pairwise(SETTINGS, seed=2)
]


@pytest.mark.parametrize(("num_splits", "case"), COMBINATIONS, ids=str)
def test_combinations(num_splits: int, case: KvCacheCase) -> None:
    skip_without_row(case)
    check_cache(case, num_splits=num_splits)


@st.composite
def cache_cases(draw: st.DrawFn) -> KvCacheCase:
    batch = draw(st.integers(1, 4))
    capacity = draw(st.integers(1, scaled(400, 80)))
    heads_k, head_dim = draw(st.integers(1, 3)), draw(st.integers(1, 512))
    packed = draw(st.booleans())
    lengths = st.integers(0, 1) | st.integers(0, 140)
    seqlens_q: Any = tuple(draw(lengths) for _ in range(batch)) if packed else draw(lengths)
    new_most = draw(st.sampled_from([0, 1, 30])) if draw(st.booleans()) else None
    seqlens_new: Any = None
    if new_most is not None:
        size = st.integers(0, min(new_most, capacity))
        seqlens_new = tuple(draw(size) for _ in range(batch)) if packed else draw(size)
    new = seqlens_new if packed and new_most is not None else (seqlens_new or 0,) * batch
    cached = tuple(draw(st.integers(0, capacity - n)) for n in new)
    fields: dict[str, Any] = {}
    if draw(st.booleans()):
        fields["leftpad"] = tuple(draw(st.integers(0, n)) for n in cached)
    if draw(st.booleans()):
        fields["entries"] = entries = batch + draw(st.integers(0, 2))
        fields["batch_idx"] = tuple(draw(st.permutations(range(entries)))[:batch])
    queries = seqlens_q if packed else (seqlens_q,) * batch
    table_covers = all(n + m <= capacity + 1 for n, m in zip(cached, queries, strict=True))
    if new_most is not None and table_covers and head_dim >= 16 and draw(st.booleans()):
        fields["rotary_dim"] = 16 * draw(st.integers(1, head_dim // 16))
        fields["rotary_interleaved"] = draw(st.booleans())
    bound = st.just(-1) | st.integers(0, 200)
    return make_cache_case(
        cached=cached,
        seqlens_q=seqlens_q,
        seqlens_new=seqlens_new,
        capacity=capacity,
        page_size=draw(st.none() | st.sampled_from([1, 16]) | st.integers(1, 300)),
        num_heads_q=heads_k * draw(st.integers(1, 9)),
        num_heads_k=heads_k,
        head_dim=head_dim,
        dtype=draw(st.sampled_from([torch.bfloat16, torch.float16])),
        causal=draw(st.booleans()),
        window=(draw(bound), draw(bound)),
        softcap=draw(st.just(0.0) | st.floats(0.5, 50.0, width=32)),
        alibi=draw(st.none() | st.sampled_from(Alibi)),
        **fields,
    )


@settings(
    max_examples=scaled(100, 20),
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    case=cache_cases(),
    num_splits=st.sampled_from([0, 0, 1, 2, 5, 200]),
    batch_invariant=st.booleans(),
    seed=st.integers(0, 1 << 20),
)
def test_random_cases(case: KvCacheCase, num_splits: int, batch_invariant: bool, seed: int) -> None:
    skip_without_row(case)
    check_cache(case, seed, num_splits=num_splits, batch_invariant=batch_invariant)
