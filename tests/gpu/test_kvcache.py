"""Attention over a KV cache by tables: appends, rotary, pages, splits, sinks, against the fp64
reference. Every row of both caches is compared as well, and rows that hold no key are NaN.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.cases.attention import Alibi
from tests.cases.harness import (
    Check,
    assert_same_bits,
    attend_over_cache,
    bits,
    captured,
    check_cache,
    make_cache_case,
    scaled,
    skip_without_row,
)
from tests.cases.kvcache import MASKS, TREES
from tests.cases.matrix import BOTH, DTYPES, Call, check_calls, each, grid, inputs_of, pairs

pytestmark = pytest.mark.gpu

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
PAGES = [None, 16]
PLACES: list[dict[str, Any]] = [
    {"batch_idx": (3, 0, 2), "entries": 5},
    {"leftpad": (10, 0, 37)},
    {"batch_idx": (3, 0, 2), "entries": 5, "leftpad": (90, 0, 1)},
]
SPLITS: list[dict[str, Any]] = [
    {"queries": (1, 1)},
    {"queries": (1, 1), "num_heads_k": 4, "window": (100, 0)},
    {"queries": (70, 70), "num_heads_k": 1, "causal": True},
    {"queries": (3, 3), "softcap": 5.0, "alibi": Alibi.per_batch, "causal": True},
]
LONG: dict[str, Any] = {
    "cached": (scaled(3000, 600), 0, 63, scaled(1000, 200)),
    "capacity": scaled(3200, 700),
}
MANY = scaled(80, 6)

SHAPES: dict[str, list[Call]] = {
    # Reading alone, and the step of generation: as many keys appended as there are queries.
    "query lengths": grid(
        cached=(150, 0, 37), capacity=300, page_size=PAGES, causal=BOTH,
        queries=[
            (n, new)
            for n in (1, 2, 3, 7, 8, 16, 17, 33, 64, 65, 127, 130) for new in (None, n)
        ],
    ),
    # Query heads of one key head share a tile: groups that fill one, and that do not.
    "heads": grid(
        cached=(150, 3, 64), causal=True, page_size=PAGES,
        heads=[
            *((1, 1), (4, 4), (2, 1), (6, 2), (9, 3), (12, 4), (32, 8), (16, 1), (40, 1), (71, 1))
        ],
        of=[
            *({"queries": (1, 1)}, {"queries": (3, 3), "dtype": FP16}, {"queries": (20, 20)}),
        ],
    ),
    # Odd ones too, whose rows start on no 16-byte boundary.
    "head dims": grid(
        cached=(150, 0, 64), queries=[(1, 1), (20, 20)], page_size=PAGES, causal=True,
        head_dim=[1, 8, 32, 40, 59, 64, 96, 111, 128, 160, 192, 255, 256, 512],
    ),
    # An append with rotated keys, few queries and many, any head dim in place.
    "value dims": grid(
        cached=(100, 0, 37), page_size=[None, 16, 7],
        head_dims=[(192, 128), (128, 64), (64, 128), (59, 33), (64, 33)],
        of=[
            {"queries": (1, 1)},
            {"queries": (3, 5), "rotary_dim": 32, "causal": True},
            {"queries": (70, None), "leftpad": (3, 0, 37)},
            {"queries": ((9, 0, 30), (9, 0, 30)), "causal": True},
        ],
    ),
    "page sizes": grid(
        cached=(299, 0, 16, 257), capacity=340, causal=True, head_dim=[64, 59, 128],
        page_size=[1, 2, 7, 16, 64, 100, 256, 300], queries=[(1, 1), (33, 40), (5, None)],
    ),
    "empty and full": grid(
        page_size=PAGES, causal=True,
        of=[
            *({"cached": ()}, {"cached": (0, 0, 0)}, {"cached": (0,), "seqlens_new": 1}),
            {"cached": (5, 9), "seqlens_q": 0},
            {"cached": (5, 9), "seqlens_q": 0, "seqlens_new": 2},
            {"cached": (5, 9), "seqlens_q": 2, "seqlens_new": 0},
            *({"cached": (192, 192), "seqlens_q": 3}, {"cached": (0, 0), "capacity": 0}),
            {"cached": (191, 0), "seqlens_new": 1, "capacity": 192},
        ],
    ),
    # With and without an append; leftpad up to the whole length.
    "places": grid(
        cached=(100, 0, 37), page_size=[None, 7, 16], causal=BOTH,
        places=[*PLACES, {"leftpad": (100, 0, 37)}],
        queries=[(1, 1), (1, None), (20, 20), (20, 3)],
    ),
    # Two queries over one prefix, read at two lengths, without appending.
    "shared entries": grid(cached=(100, 100, 37), seqlens_q=4, batch_idx=(1, 1, 0), entries=2),
    # cu_seqlens_q, and cu_seqlens_k_new where it differs; Sq = 1 with empty sequences too.
    "packed queries": grid(
        cached=(100, 0, 37), leftpad=(3, 0, 37), page_size=[None, 16, 7],
        queries=[
            *(((1, 1, 1), None), ((5, 0, 70), None), ((5, 0, 70), (5, 0, 70))),
            *(((3, 1, 0), (20, 1, 2)), ((0, 0, 0), (1, 2, 3)), ((1, 130, 4), (0, 0, 0))),
        ],
        of=[{"causal": True}, {"num_heads_k": 1, "window": (40, 3), "rotary_dim": 32}],
    ),
    # Queries turn with their rows under a mask, all alike without one.
    "rotary": grid(
        cached=(100, 0, 37), rotary_interleaved=BOTH,
        range=[{}, {"causal": True}, {"window": (50, -1)}, {"window": (-1, 3)}],
        sizes=[
            {"head_dim": d, "rotary_dim": turned}
            for d, turned in ((64, 16), (64, 64), (128, 32), (111, 48), (256, 256))
        ],
        of=[{"queries": (1, 1)}, {"queries": (9, 9), "page_size": 7}, {"queries": (5, 30)}],
    ),
    # Positions are rows of the cache, left padding included.
    "rotary and places": grid(
        cached=(100, 5, 37), queries=(3, 3), page_size=PAGES, rotary_dim=32, causal=True,
        batch_idx=(3, 0, 2), entries=5, leftpad=(90, 5, 1),
    ),
    # Sequences of fewer keys than queries, own keys in several blocks, groups that tiles cut.
    "trees": grid(
        cached=(300, 0, 37), capacity=500, page_size=[None, 7, 16], tree=list(TREES),
        queries=[(1, 1), (9, 9), (70, None), (130, 130), ((5, 0, 70), None), ((1, 130, 4),) * 2],
        of=[
            {"head_dim": 128},
            {"head_dim": 64, "heads": (5, 5), "window": (50, -1), "sink": FP32},
            {"head_dim": 59, "heads": (9, 3), "rotary_dim": 16, "leftpad": (90, 0, 1)},
            {"head_dim": 256, "heads": (6, 1), "softcap": 4.0, "alibi": Alibi.per_batch},
            {"head_dim": 512},
        ],
    ),
    # Of few queries and many, any head dim and page; columns of keys that are not there hold NaN.
    "masks": grid(
        cached=(300, 0, 37), capacity=500, page_size=[None, 7, 16], mask=list(MASKS),
        queries=[(1, 1), (9, 9), (70, None), (130, 130), ((5, 0, 70), None), ((1, 130, 4),) * 2],
        of=[
            {"head_dim": 128, "causal": True},
            {"head_dim": 64, "heads": (5, 5), "window": (50, -1), "sink": FP32},
            {"head_dim": 59, "heads": (9, 3), "rotary_dim": 16, "leftpad": (90, 0, 1)},
            {"head_dim": 256, "heads": (6, 1), "softcap": 4.0, "alibi": Alibi.per_batch},
            {"head_dim": 192, "softmax_scale": -0.2, "batch_idx": (3, 0, 2), "entries": 5},
            *({"head_dim": 512}, {"head_dim": 32, "dtype": FP16}, {"head_dims": (64, 33)}),
        ],
    ),
    "relative biases": grid(
        cached=(300, 0, 37), capacity=500, page_size=[None, 16], reach=[0, 5, 128],
        queries=[(1, 1), (9, 9), (70, None), (130, 130), ((5, 0, 70), None), ((1, 130, 4),) * 2],
        of=[
            {"head_dim": 128, "causal": True},
            {"head_dim": 64, "heads": (5, 5), "sink": FP32, "softmax_scale": -0.2},
            {"head_dim": 59, "heads": (9, 3), "rotary_dim": 16, "leftpad": (90, 0, 1)},
            {"head_dim": 256, "heads": (6, 1), "softcap": 4.0, "alibi": Alibi.per_batch},
            {"head_dim": 512, "dtype": FP16},
        ],
    ),
    # Every dtype of a sink, a sequence without a key, appends.
    "sinks": grid(
        cached=(150, 0, 37), capacity=300, page_size=PAGES, causal=BOTH,
        of=[
            {"queries": (n, n if sink is BF16 else None), "head_dim": d, "sink": sink}
            for n in (1, 3, 16, 33, 130)
            for d, sink in ((64, FP32), (128, BF16), (59, FP16))
        ],
    ),
}  # fmt: skip

PARTS: dict[str, list[Call]] = {
    # More splits than keys, and splits that see none of theirs; a sink counts once.
    "splits": grid(
        **LONG, of=SPLITS, page_size=PAGES, sink=[None, FP32],
        num_splits=[0, 1, 2, 3, 7, 64, 129, 256],
    ),
    "splits of trees": grid(
        **LONG, tree=["drawn", "none"], page_size=PAGES, num_splits=[0, 2, 7, 64],
        of=[
            *({"queries": (16, 16)}, {"queries": (70, 70), "num_heads_k": 1}),
            {"queries": (64, 64), "head_dim": 128, "window": (900, -1)},
        ],
    ),
    "splits of masks": grid(
        **LONG, mask=["bool-bq", "bias-h"], page_size=PAGES, num_splits=[0, 2, 7, 64],
        of=[
            *({"queries": (16, 16)}, {"queries": (70, 70), "num_heads_k": 1}),
            {"queries": (64, 64), "head_dim": 128, "window": (900, -1)},
        ],
    ),
    "splits of relative biases": grid(
        **LONG, reach=300, page_size=PAGES, num_splits=[0, 2, 64], queries=[(16, 16), (70, 70)],
        batch_invariant=BOTH,
    ),
    "batch-invariant masks": grid(
        **LONG, queries=[(16, 16), ((9, 0, 64, 1),) * 2], page_size=PAGES, mask="fp32-bh",
        batch_invariant=True,
    ),
    "batch-invariant trees": grid(
        **LONG, queries=[(16, 16), ((9, 0, 64, 1),) * 2], page_size=PAGES, tree="drawn",
        batch_invariant=True,
    ),
    "batch-invariant": grid(**LONG, of=SPLITS, page_size=PAGES, sink=FP32, batch_invariant=True),
    "splits of narrow values": grid(
        cached=(900, 3, 450), capacity=1000, head_dims=[(192, 128), (128, 64), (64, 33)],
        num_splits=[1, 3, 64],
    ),
    # So many that CTAs that are done take what is left, of sequences alike and of others.
    "more parts than places": grid(
        cached=[(150,) * MANY, ((0, 700, 3, 64, 65, 210, 33) * MANY)[:MANY]], capacity=720,
        page_size=PAGES, heads=(8, 8), num_splits=[0, 1, 9],
    ),
    "pairs": pairs(
        seed=2,
        cached=(100, 0, 37),
        capacity=192,
        dtype=DTYPES,
        head_dims=[
            *((d, None) for d in (32, 59, 64, 96, 128, 192, 256, 320, 512)),
            *((192, 128), (64, 33)),
        ],
        heads=[(4, 4), (8, 2), (6, 1), (5, 5)],
        queries=[
            *((1, 1), (1, None), (7, 7), (40, 40), (40, 2)),
            *(((3, 0, 20), (3, 0, 20)), ((1, 4, 0), None)),
        ],
        page_size=[None, 1, 7, 16, 256],
        places=[{}, *PLACES],
        range=[
            *({}, {"causal": True}, {"window": (33, -1)}, {"window": (-1, 9)}),
            {"window": (40, 3)},
        ],
        softcap=[0.0, 4.0],
        alibi=[None, *Alibi],
        rotary=[(0, True), (16, True), (32, False)],
        softmax_scale=[None, -0.2],
        num_splits=[0, 1, 3, 50],
        sink=[None, FP32, BF16, FP16],
    ),
}  # fmt: skip


@each(SHAPES)
def test_shapes(check: Check, calls: list[Call]) -> None:
    check_calls(check, calls)


@each(PARTS)
def test_parts(check: Check, calls: list[Call]) -> None:
    check_calls(check, calls)


@pytest.mark.parametrize("page_size", PAGES, ids=["dense", "paged"])
def test_one_length_for_all(page_size: int | None) -> None:
    """An int, a tensor of it, and for a full cache None: the same bits."""
    for length in (0, 77, 192):
        case = make_cache_case(cached=(length,) * 3, seqlens_q=2, page_size=page_size, causal=True)
        inputs = inputs_of(case)
        expected, *_ = attend_over_cache(case, inputs)
        for seqlens in (length, *([None] if length == 192 else [])):
            actual, *_ = attend_over_cache(case, inputs, cache_seqlens=seqlens)
            assert torch.equal(bits(actual.out), bits(expected.out)), seqlens
            assert torch.equal(bits(actual.lse), bits(expected.lse)), seqlens


@pytest.mark.parametrize("queries", [4, 100])
def test_a_graph_is_replayed_with_other_trees(queries: int) -> None:
    case = make_cache_case(cached=(700, 0), capacity=900, seqlens_q=queries, tree="any")
    inputs = inputs_of(case)
    static = inputs.tree_mask.clone().fill_(False)
    replay = captured(lambda: attend_over_cache(case, replace(inputs, tree_mask=static))[0])
    for changed in (inputs.tree_mask, inputs.tree_mask.flip(1), torch.ones_like(static)):
        static.copy_(changed)
        expected = attend_over_cache(case, replace(inputs, tree_mask=changed))[0]
        assert_same_bits(replay(), expected)


def test_an_int_length_with_an_append() -> None:
    case = make_cache_case(cached=(50, 50), seqlens_q=3, seqlens_new=3, causal=True)
    skip_without_row(case)
    check_cache(case, cache_seqlens=50)
