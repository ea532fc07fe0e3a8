"""The Hopper kernels over a cache, in pages or with its keys split: calls of more rows than
decoding takes, against the fp64 reference. Rows of the cache that hold no key are NaN.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from flash_attn_cuda import check_device_errors, flash_attn_with_kvcache
from tests.cases.attention import Alibi, KvCacheCase
from tests.cases.harness import (
    DEVICE,
    Check,
    assert_same_bits,
    attend_over_cache,
    captured,
    make_cache_case,
    skip_without_row,
)
from tests.cases.kvcache import TREES
from tests.cases.matrix import BOTH, DTYPES, Call, check_calls, each, grid, inputs_of, pairs
from tests.hopper.sm90 import CAUSAL, MASKS, runs_sm90_kernels
from tests.reference import AttentionResult

__all__ = ["runs_sm90_kernels"]  # pytest finds it here

pytestmark = pytest.mark.gpu

PAGE_SIZES = [8, 16, 24, 48, 64, 128, 192, 256, 1024]
BESIDES: dict[str, Any] = {
    **{"cached": (300, 0, 37), "queries": (90, 90), "capacity": 512, "page_size": [16, 256]},
    **{"head_dim": 128, "causal": BOTH},
}
TABLE: dict[str, list[Call]] = {
    "shapes": pairs(
        capacity=1100,
        page_size=PAGE_SIZES,
        head_dim=[8, 64, 72, 128, 256],
        range=MASKS,
        heads=[(4, 4), (6, 2), (5, 1)],
        cached=[(500, 0, 129), (1, 128, 1024), (1000, 999, 64)],
        seqlens_q=[100, 129, (65, 0, 300), (1, 200, 7)],
        dtype=DTYPES,
    ),
    # Appended keys, rotation, entries out of order, a sink, narrower values, modified scores.
    "what the cache has besides": grid(
        **BESIDES,
        of=[
            *({}, {"rotary_dim": 64}, {"batch_idx": (3, 0, 2), "entries": 5}),
            *({"sink": torch.float32}, {"head_dim_v": 64}, {"softcap": 5.0}),
            {"softcap": 5.0, "alibi": Alibi.per_batch, "window": (100, 0)},
        ],
    ),
    # Splits without keys, rows that see none of a split's, and sequences without any.
    "splits": pairs(
        capacity=2048,
        num_splits=[0, 2, 3, 8, 100],
        page_size=[None, 16, 256],
        head_dim=[40, 64, 128, 256],
        range=MASKS,
        heads=[(2, 2), (6, 2), (5, 1)],
        cached=[(1500, 0, 129), (128, 1, 1300), (1000, 2000, 64)],
        seqlens_q=[100, (65, 0, 300), (1, 200, 7)],
        sink=[None, torch.float32],
        softcap=[0.0, 5.0],
        alibi=[None, Alibi.per_head],
        dtype=DTYPES,
    ),
    # Own keys in one block and in several, of calls that causal ones run plain rows for.
    "trees": pairs(
        capacity=2048, tree=list(TREES), page_size=[None, 16, 256], num_splits=[0, 1, 3],
        head_dim=[40, 64, 128, 256], window=[(-1, -1), (100, -1)], heads=[(4, 4), (6, 2), (5, 1)],
        cached=[(1500, 0, 129), (128, 1, 1300)],
        seqlens_q=[100, 129, 300, (65, 0, 300), (1, 200, 7)],
        softcap=[0.0, 5.0], alibi=[None, Alibi.per_head], sink=[None, torch.float32], dtype=DTYPES,
    ),
    # A warpgroup without queries, of one block, of several, of splits and of other tiles.
    "up to 64 queries": grid(
        cached=(1500, 0, 129, 40), capacity=2048, page_size=[None, 16], heads=(8, 1),
        head_dim=[64, 128, 256], seqlens_q=[33, 64, (64, 1, 65, 129)], num_splits=[0, 1, 3],
        of=[{"causal": True}, {}, {"tree": "drawn"}, {"window": (30, 5), "softcap": 5.0}],
    ),
    "splits of padded and reordered entries": grid(
        cached=(1500, 0, 700), queries=(90, 90), capacity=1600, page_size=[None, 16],
        head_dim=128, causal=True, batch_idx=(3, 0, 2), entries=5, leftpad=(9, 0, 300),
        num_splits=[1, 0, 5],
    ),
}  # fmt: skip


@each(TABLE)
def test_agreement(check: Check, calls: list[Call]) -> None:
    check_calls(check, calls)


def dense(case: KvCacheCase, inputs: Any) -> dict[str, Tensor]:
    """The cache of the call with every sequence's rows one behind the other."""
    given = inputs.arguments()
    table = given.pop("block_table").long()
    return given | {name: given[name][table].flatten(1, 2) for name in ("k_cache", "v_cache")}


@pytest.mark.cuda_only
@CAUSAL
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_the_same_bits_as_a_dense_cache(page_size: int, causal: bool) -> None:
    """At head_dim 128, where all have the same tiles: only where keys lie differs. Unsplit the
    dense call runs the plain row.
    """
    case = make_cache_case(
        cached=(900, 130, 0), seqlens_q=200, capacity=1024, page_size=page_size, head_dim=128
    )
    case = replace(case, causal=causal)
    inputs = inputs_of(case)
    rows = dense(case, inputs)
    for splits in (1, 4):
        paged = attend_over_cache(case, inputs, num_splits=splits)[0]
        result = flash_attn_with_kvcache(
            **rows, causal=causal, num_splits=splits, return_softmax_lse=True
        )
        assert_same_bits(AttentionResult(*result), paged, f"splits {splits}")


@pytest.mark.cuda_only
@CAUSAL
@pytest.mark.parametrize("is_packed", [False, True], ids=["fixed", "drawn"])
def test_many_tiles_repeat_to_the_bit(is_packed: bool, causal: bool) -> None:
    """More tiles than SMs, uneven lengths: CTAs have a fixed order, or draw where queries are
    packed, and who draws a tile must not matter.
    """
    cached = tuple((173 * i) % 2000 for i in range(24))
    case = make_cache_case(
        cached=cached,
        seqlens_q=(300,) * len(cached) if is_packed else 300,
        capacity=2048,
        page_size=64,
        head_dim=128,
        causal=causal,
    )
    check_repeats(case)


@pytest.mark.cuda_only
def test_splits_that_are_drawn_repeat_to_the_bit() -> None:
    case = make_cache_case(
        cached=(2000, 1, 1500), seqlens_q=(300, 20, 100), capacity=2048, page_size=64, head_dim=128
    )
    check_repeats(case, num_splits=9)


def check_repeats(case: KvCacheCase, **options: Any) -> None:
    inputs = inputs_of(case)
    first = attend_over_cache(case, inputs, **options)[0]
    for _ in range(20):
        assert_same_bits(attend_over_cache(case, inputs, **options)[0], first)


@pytest.mark.parametrize("page_size", [None, 64])
def test_a_graph_is_replayed_with_other_lengths(page_size: int | None) -> None:
    """Splits are planned by the capacity, and share what keys there are."""
    case = make_cache_case(
        cached=(1900, 1900), seqlens_q=100, capacity=2048, page_size=page_size, head_dim=128
    )
    skip_without_row(case)
    arguments = case.make_inputs().arguments()
    arguments |= {name: arguments[name].nan_to_num() for name in ("k_cache", "v_cache")}
    lengths = arguments["cache_seqlens"]
    replay = captured(
        lambda: flash_attn_with_kvcache(**arguments, causal=True, return_softmax_lse=True)
    )
    for new in ((1900, 1900), (5, 0), (128, 2000), (700, 129)):
        lengths.copy_(torch.tensor(new, dtype=lengths.dtype))
        out, lse = (x.clone() for x in replay())
        expected = flash_attn_with_kvcache(**arguments, causal=True, return_softmax_lse=True)
        assert_same_bits(AttentionResult(out, lse), AttentionResult(*expected), str(new))


BAD_PAGES = (-1, 2**31 - 1, -(2**31), "one beyond")


@pytest.mark.cuda_only
@CAUSAL
@pytest.mark.parametrize("page_size", [8, 64, 256])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_pages_that_do_not_exist(page_size: int, head_dim: int, causal: bool) -> None:
    """Their keys are hidden and the call is flagged; the others count. What no entry of the table
    names is NaN, the pool's first and last page among it, and so is what an earlier call has left
    in shared memory.
    """
    lengths, seqlen_q, heads = (700, 256, 50, 0), 80, 2
    pages = -(-1024 // page_size)
    count = 4 * pages + 2
    generator = torch.Generator(DEVICE).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.bfloat16, device=DEVICE, generator=generator)

    pool = [normal(count, page_size, heads, head_dim) for _ in range(2)]
    table = 1 + torch.randperm(4 * pages, generator=torch.Generator().manual_seed(1))
    table = table.reshape(4, pages).int()
    missing = torch.zeros(4, 1024, dtype=torch.bool)
    for sequence, length in enumerate(lengths):
        used = -(-length // page_size)
        for index, value in enumerate(BAD_PAGES[: used // 2]):
            page = used - 1 - 2 * index
            table[sequence, page] = count if isinstance(value, str) else value
            missing[sequence, page * page_size : (page + 1) * page_size] = True
    is_named = torch.zeros(count, dtype=torch.bool)
    for sequence, length in enumerate(lengths):
        entries = table[sequence, : -(-length // page_size)].long()
        is_named[entries[(entries >= 0) & (entries < count)]] = True
    assert missing.any() and not is_named[[0, -1]].any()
    for x in pool:
        x[~is_named.to(DEVICE)] = torch.nan
    q = normal(4, seqlen_q, heads, head_dim)
    seqlens = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    options = {"cache_seqlens": seqlens, "causal": causal, "return_softmax_lse": True}
    poison = [torch.full_like(x, torch.nan) for x in pool]
    good = torch.arange(4 * pages, dtype=torch.int32, device=DEVICE).view(4, pages)
    flash_attn_with_kvcache(q, *poison, block_table=good, **options)
    out, lse = flash_attn_with_kvcache(q, *pool, block_table=table.to(DEVICE), **options)
    with pytest.raises(ValueError, match="block_table"):
        check_device_errors()
    for sequence, length in enumerate(lengths):
        entries = table[sequence].clamp(0, count - 1).long().to(DEVICE)
        k, v = (x[entries].flatten(0, 1)[:length].double().nan_to_num() for x in pool)
        scores = torch.einsum("qhd,khd->hqk", q[sequence].double(), k) * head_dim**-0.5
        hidden = missing[sequence, :length].to(DEVICE).expand(seqlen_q, length)
        if causal:
            pairs = torch.ones(seqlen_q, length, dtype=torch.bool, device=DEVICE)
            hidden = hidden | ~pairs.tril(length - seqlen_q)
        scores = scores.masked_fill(hidden, -torch.inf)
        wanted_lse = scores.logsumexp(-1)
        weights = (scores - wanted_lse[..., None]).exp().nan_to_num()
        wanted = torch.einsum("hqk,khd->qhd", weights, v)
        torch.testing.assert_close(out[sequence].double(), wanted, atol=0.02, rtol=0.02)
        torch.testing.assert_close(lse[sequence].double(), wanted_lse, atol=1e-3, rtol=1e-3)
