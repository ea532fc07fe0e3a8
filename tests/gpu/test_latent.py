"""Latent attention, a cache's or packed, by tables against the fp64 reference. Rows that hold no
key and pages that nobody uses are NaN.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from flash_attn_cuda import flash_attn_with_kvcache
from tests.cases.fp8_cache import Fp8Case, attend
from tests.cases.fp8_harness import LATENT_FORMS, V4_ROWS
from tests.cases.harness import (
    DEVICE,
    Check,
    assert_same_bits,
    attend_over_cache,
    captured,
    check_cache,
    make_cache_case,
    make_varlen_case,
    no_host_sync,
    scaled,
    skip_without_row,
)
from tests.cases.kvcache import KvCacheCase, KvCacheInputs
from tests.cases.latent import LATENT, check_packed, joined, with_poisoned_table
from tests.cases.matrix import BOTH, DTYPES, Call, check_calls, each, grid, pairs
from tests.reference import AttentionResult

pytestmark = pytest.mark.gpu

LONG, LONGEST = scaled(1000, 200), scaled(4097, 300)
PAGES = [None, 1, 16, 48, 64, 256]
HEADS = [(n, 1) for n in (1, 8, 16, 17, 32, 64, 128)]
FEW: list[dict[str, Any]] = [
    *({"seqlens_q": n} for n in (1, 2, 3, 4)),
    {"seqlens_q": (1, 5, 0, 3)},
]
PLACES: list[dict[str, Any]] = [
    {}, {"batch_idx": (3, 0, 2), "entries": 5}, {"leftpad": (10, 0, 37)},
    {"batch_idx": (3, 0, 2), "entries": 5, "leftpad": (90, 0, 1)},
]  # fmt: skip


def a_case(**fields: Any) -> KvCacheCase:
    return make_cache_case(**{**LATENT, "num_heads_q": 16, **fields})


@pytest.fixture(autouse=True)
def _rows() -> None:
    skip_without_row(a_case())


SHAPES: dict[str, list[Call]] = {
    "heads": grid(
        **LATENT, cached=(LONG, 0, 65, 1), capacity=LONG + 30, page_size=[None, 64],
        num_heads_q=[n for n, _ in HEADS], causal=BOTH, of=FEW,
    ),
    "keys": grid(
        **LATENT, cached=[(0, 1, 63, 64), (65, LONG, LONGEST, 0), (LONGEST,)],
        capacity=LONGEST + 60, num_heads_q=[16, 128], page_size=PAGES, seqlens_q=[1, 3],
        causal=True,
    ),
    # CTAs that take several whole tiles, some of which see no key.
    "many sequences": grid(
        **LATENT, cached=(65, 0, 3, 0, 0) * scaled(240, 2), capacity=70, page_size=[None, 16],
        num_heads_q=[16, 128],
    ),
    "columns": grid(
        **(LATENT | {"head_dim": [64, 24], "head_dim_v": [512, 456, 256, 200]}), dtype=DTYPES,
        cached=(LONG, 64, 3), capacity=LONG, num_heads_q=[8, 64], page_size=[None, 48],
        seqlens_q=2, causal=True,
    ),
    "key heads": grid(
        **(LATENT | {"num_heads_k": 2}), cached=(150, 3, 64), num_heads_q=[2, 34, 256],
        seqlens_q=[1, 3], page_size=[None, 16],
    ),
    # Logits of a hundred, ones that the scale hides, and ones that it turns around.
    "scales": grid(
        **(LATENT | {"softmax_scale": [4.0, 0.0, -0.1]}), cached=(LONG, 0, 65), capacity=LONG,
        num_heads_q=[16, 128], seqlens_q=[1, 3], dtype=DTYPES,
    ),
    "append": grid(
        **LATENT, cached=(100, 0, 63), num_heads_q=[16, 64], page_size=PAGES, causal=BOTH,
        queries=[(1, 1), (3, 3), (2, 5), ((1, 3, 2), (1, 3, 2))],
        rotary=[(0, True), (64, True), (32, False)],
    ),
    "splits": grid(
        **LATENT, cached=(LONGEST, 0, 63, LONG), capacity=LONGEST, num_heads_q=[8, 128],
        page_size=[None, 64], seqlens_q=[1, 2], num_splits=[0, 1, 2, 7, 64, 256],
    ),
    "pairs": pairs(
        **LATENT, cached=(LONG, 0, 37), capacity=LONG + 50, dtype=DTYPES, heads=HEADS, of=FEW[:4],
        page_size=PAGES, causal=BOTH, window=[(-1, -1), (33, -1), (40, 3)], softcap=[0.0, 4.0],
        sink=[None, torch.float32, torch.bfloat16], num_splits=[0, 1, 3], batch_invariant=BOTH,
        places=PLACES,
    ),
    "trees": grid(
        **LATENT, cached=(LONG, 0, 65), capacity=LONG + 80, page_size=[None, 64],
        num_heads_q=[8, 16, 32, 128], queries=[(4, 4), (70, 70), ((1, 5, 9), None)],
        tree=["drawn", "any"], window=[(-1, -1), (40, -1)],
    ),
    "lists": grid(
        **LATENT, cached=(LONG, 0, 65, 1), capacity=LONG + 30, page_size=[None, 1, 16, 48, 64],
        num_heads_q=[n for n, _ in HEADS], of=FEW, keys_per_list=[5, 100],
    ),
    "lists of some length": grid(
        **LATENT, cached=(LONGEST, 0, LONG), capacity=LONGEST, page_size=[None, 1, 64],
        num_heads_q=[8, 128], seqlens_q=[1, 2], keys_per_list=[1, 63, 64, 65, scaled(2048, 200)],
        num_splits=[0, 1, 7, 256],
    ),
    "lists of other columns": grid(
        **(LATENT | {"head_dim": [64, 24], "head_dim_v": [512, 200], "num_heads_k": [1, 2]}),
        dtype=DTYPES, cached=(LONG, 64, 3), capacity=LONG, num_heads_q=[8, 34],
        page_size=[None, 48], seqlens_q=2, keys_per_list=70,
    ),
    "lists and an append": grid(
        **LATENT, cached=(100, 0, 63), num_heads_q=[16, 64], page_size=[None, 1, 64], causal=BOTH,
        queries=[(1, 1), (3, 3), ((1, 3, 2), (1, 3, 2))], rotary=[(0, True), (32, False)],
        keys_per_list=40,
    ),
    "pairs with lists": pairs(
        **(LATENT | {"softmax_scale": [192**-0.5, 4.0, 0.0, -0.1]}), cached=(LONG, 0, 37),
        capacity=LONG + 50, dtype=DTYPES, heads=HEADS, of=FEW[:4], page_size=PAGES, causal=BOTH,
        window=[(-1, -1), (33, -1), (400, 300)], softcap=[0.0, 4.0],
        sink=[None, torch.float32, torch.bfloat16], num_splits=[0, 1, 3], batch_invariant=BOTH,
        keys_per_list=[1, 64, scaled(700, 90)],
        places=PLACES,
    ),
}  # fmt: skip


EVERY_FORM = [name for name in LATENT_FORMS if name != V4_ROWS]
V4: dict[str, Any] = LATENT | {"form": V4_ROWS, "head_dim_v": 448, "group": 64}
FP8_SHAPES: dict[str, list[Call]] = {
    "heads": grid(
        **LATENT, form="rows", cached=(LONG, 0, 65, 1), capacity=LONG + 30, page_size=[None, 64],
        num_heads_q=[n for n, _ in HEADS], causal=BOTH, of=FEW,
    ),
    "keys": grid(
        **LATENT, form=["rows", "batch"], cached=[(0, 1, 63, 64), (65, LONG, LONGEST, 0)],
        capacity=LONGEST + 60, num_heads_q=[16, 128], page_size=PAGES, seqlens_q=[1, 3],
        causal=True,
    ),
    "many sequences": grid(
        **LATENT, form="rows", cached=(65, 0, 3, 0, 0) * scaled(240, 2), capacity=70,
        page_size=[None, 16], num_heads_q=[16, 128],
    ),
    "columns": grid(
        **LATENT | {"head_dim": [64, 24]}, cached=(LONG, 64, 3), capacity=LONG, dtype=DTYPES,
        num_heads_q=[8, 64], page_size=[None, 48], seqlens_q=2, causal=True,
        of=[
            *({"head_dim_v": n, "group": 64} for n in (512, 448, 256, 64)),
            *({"head_dim_v": n, "group": n} for n in (512, 256)),
            *({"head_dim_v": n, "form": "token"} for n in (464, 16)),
        ],
    ),
    "DeepSeek V4": grid(
        **V4, cached=(LONG, 0, 65, 1), capacity=LONG + 30, dtype=DTYPES, num_heads_q=[8, 17, 128],
        page_size=[None, 1, 64], causal=BOTH,
        of=[*FEW[1:4:2], {"keys_per_list": 70}],
    ),
    "other columns as DeepSeek V4's": grid(
        **V4 | {"head_dim": [64, 24], "head_dim_v": [448, 256, 192], "num_heads_k": 2},
        cached=(LONG, 64, 3), capacity=LONG, num_heads_q=[8, 34], page_size=[None, 48],
        seqlens_q=2,
    ),
    "an append as DeepSeek V4's": grid(
        **V4, cached=(100, 0, 63), num_heads_q=16, page_size=[None, 1, 64],
        quantize=[None, "token"], queries=[(1, 1), (2, 5), ((1, 3, 2), (1, 3, 2))],
        rotary=[(0, True), (64, True)],
    ),
    "key heads": grid(
        **LATENT | {"num_heads_k": 2}, form=EVERY_FORM, cached=(150, 3, 64), num_heads_q=[2, 34],
        seqlens_q=[1, 3], page_size=[None, 16],
    ),
    "append": grid(
        **LATENT, cached=(100, 0, 63), num_heads_q=[16, 64], page_size=PAGES, causal=BOTH,
        queries=[(1, 1), (2, 5), ((1, 3, 2), (1, 3, 2))],
        of=[
            {"form": "rows", "quantize": "token"}, {"form": "groups apart"}, {"form": "batch"},
            {"form": "rows", "quantize": "token", "group": 64, "rotary": (64, True)},
            {"form": "rows", "quantize": "token", "group": 512, "rotary": (12, False)},
            {"form": "token", "rotary": (32, False), "head_dim_v": 464},
        ],
    ),
    "pairs": pairs(
        **LATENT, form=EVERY_FORM, cached=(LONG, 0, 37), capacity=LONG + 50, dtype=DTYPES,
        heads=HEADS, of=FEW[:4], page_size=PAGES, causal=BOTH,
        window=[(-1, -1), (33, -1), (40, 3)], softcap=[0.0, 4.0], sink=[None, torch.float32],
        num_splits=[0, 1, 3], batch_invariant=BOTH,
        places=PLACES,
    ),
}  # fmt: skip


@each(FP8_SHAPES)
def test_over_rows_of_fp8(check: Check, calls: list[Call]) -> None:
    check_calls(check, calls)


@pytest.mark.parametrize(("form", "latent"), [("rows", 512), (V4_ROWS, 448)])
@pytest.mark.parametrize("page_size", PAGES)
@pytest.mark.parametrize("heads", [16, 128])
def test_what_no_key_of_fp8_has_is_not_read(
    heads: int, page_size: int | None, form: str, latent: int
) -> None:
    """Entries of tables and bytes of rows. NaN among a sequence's keys are its own alone."""
    case = a_case(
        cached=(LONG, 0, 65), capacity=LONG + 30, num_heads_q=heads, page_size=page_size,
        head_dim_v=latent,
    )  # fmt: skip
    fp8 = Fp8Case(case, **LATENT_FORMS[form], group=64)
    inputs = fp8.make_inputs()
    expected, _ = attend(fp8, inputs)
    if page_size is not None:
        poisoned = replace(inputs, cache=with_poisoned_table(inputs.cache))
        assert_same_bits(attend(fp8, poisoned)[0], expected)
    rows, table = inputs.cache.v_cache.view(torch.uint8), inputs.cache.block_table
    for key in (64, LONG - 1):  # of the first part of a tile's keys, and of the last
        row = rows[0, key] if table is None else rows[table[0, key // page_size], key % page_size]
        number = row[..., 300]
        kept = number.clone()
        number.fill_(0xFF)  # NaN of e4m3
        found, _ = attend(fp8, inputs)
        number.copy_(kept)
        assert found.out[0].isnan().all() and found.lse[0].isnan().all()
        of_others = (AttentionResult(out=x.out[1:], lse=x.lse[1:]) for x in (found, expected))
        assert_same_bits(*of_others)


@each(SHAPES)
def test_over_a_cache(check: Check, calls: list[Call]) -> None:
    check_calls(check, calls)


@pytest.mark.parametrize("page_size", PAGES)
@pytest.mark.parametrize("heads", [8, 16, 128])
def test_packed(heads: int, page_size: int | None) -> None:
    lengths = {"lengths_q": (1, 3, 0, 17, 2), "lengths_k": (LONG, 65, 9, 64, 1)}
    others = {"num_heads_q": heads, **LATENT} | {"num_heads_k": 1}
    del others["has_qv"]
    for features in (
        {"causal": True},
        {"window": (40, 3), "softcap": 4.0},
        {"used_q": (1, 2, 0, 5, 0), "used_k": (LONG - 1, 60, 9, 0, 1)},
        {"leftpad": (5, 0, 9, 63, 1)},
    ):
        case = make_varlen_case(**lengths, **others, **features)
        for keys_per_list in (None, 90):
            check_packed(case, page_size, keys_per_list)
            check_packed(case, page_size, keys_per_list, batch_invariant=True)


def run(case: KvCacheCase, inputs: KvCacheInputs, **changes: Any) -> AttentionResult:
    return attend_over_cache(case, inputs, **changes)[0]


@pytest.mark.parametrize("page_size", PAGES)
@pytest.mark.parametrize("heads", [16, 128])
def test_joined_caches_and_poisoned_tables_give_the_same_bits(
    heads: int, page_size: int | None
) -> None:
    case = a_case(cached=(LONG, 0, 65), capacity=LONG + 300, num_heads_q=heads, page_size=page_size)
    for keys_per_list in (None, 100):
        case = replace(case, keys_per_list=keys_per_list)
        inputs = case.make_inputs()
        expected = run(case, inputs)
        assert_same_bits(run(case, inputs, **joined(inputs)), expected)
        if page_size is not None:
            assert_same_bits(run(case, with_poisoned_table(inputs)), expected)


@pytest.mark.parametrize("keys_per_list", [None, scaled(1200, 100)])
@pytest.mark.parametrize("page_size", [None, 1, 64])
@pytest.mark.parametrize(("heads", "queries"), [(8, 1), (16, 3), (128, 2)])
def test_batch_invariance(
    heads: int, queries: int, page_size: int | None, keys_per_list: int | None
) -> None:
    """The same bits alone and among others, in small and in large caches, with any num_splits."""
    cached = (LONG, 1, 0, 64, 65)
    case = a_case(
        cached=cached * scaled(20, 2), capacity=LONG + 24, page_size=page_size,
        seqlens_q=queries, num_heads_q=heads, causal=True, keys_per_list=keys_per_list,
    )  # fmt: skip
    inputs = case.make_inputs()
    together = run(case, inputs, batch_invariant=True)
    for b, n in enumerate(cached):
        for capacity in (None, max(1, n), 4 * LONG):
            alone = inputs.sequence(b, capacity)
            found = run(case, alone, batch_invariant=True, num_splits=b)
            wanted = AttentionResult(out=together.out[b : b + 1], lse=together.lse[b : b + 1])
            assert_same_bits(found, wanted, f"{n} keys, capacity {capacity}")


@pytest.mark.parametrize("page_size", [None, 64])
@pytest.mark.parametrize("heads", [16, 128])
def test_replays_with_other_lengths(heads: int, page_size: int | None) -> None:
    """Captured with nearly empty caches: grids and splits do not depend on what they hold."""
    case = a_case(cached=(LONGEST,) * 4, capacity=LONGEST, page_size=page_size, num_heads_q=heads)
    inputs = case.make_inputs()
    used = torch.tensor([1, 0, 0, 2], dtype=torch.int32, device=DEVICE)
    static = replace(inputs, cache_seqlens=used)
    replay = captured(lambda: run(case, static, **joined(inputs)))
    for values in ((LONGEST, 1, 0, 63), (64, 65, LONG, 0), (0, 0, 0, 0), (1, LONGEST, 1, 1)):
        lengths = torch.tensor(values, dtype=torch.int32, device=DEVICE)
        used.copy_(lengths)
        assert_same_bits(replay(), run(case, replace(inputs, cache_seqlens=lengths)), str(values))


@pytest.mark.parametrize("page_size", [None, 1, 64])
@pytest.mark.parametrize("heads", [16, 128])
def test_replays_with_other_lists(heads: int, page_size: int | None) -> None:
    """Lists of any strides, that a graph was captured with when they named nothing."""
    case = a_case(
        cached=(LONG, 0, 65), capacity=LONG, page_size=page_size, num_heads_q=heads, seqlens_q=2,
        keys_per_list=scaled(700, 90),
    )  # fmt: skip
    inputs = case.make_inputs()
    lists = inputs.key_lists
    assert lists is not None
    expected = run(case, inputs)
    apart = lists.new_empty((2, *lists.shape[:1], 3, lists.shape[-1] + 5)).transpose(0, 1)
    static = apart[..., 1:2, 2:-3].fill_(-1)
    assert not static.is_contiguous() and static.shape == lists.shape
    replay = captured(lambda: run(case, replace(inputs, key_lists=static)))
    nothing = replay()
    assert not nothing.out.any() and (nothing.lse == -torch.inf).all()
    for changed in (lists, lists.flip(1), lists.roll(1, -1)):
        static.copy_(changed)
        assert_same_bits(replay(), run(case, replace(inputs, key_lists=changed)))
    assert_same_bits(run(case, replace(inputs, key_lists=lists)), expected)


@pytest.mark.cuda_only
def test_nothing_is_copied_or_waited_for() -> None:
    case = a_case(cached=(LONGEST,) * 8, capacity=LONGEST, num_heads_q=16)
    inputs = case.make_inputs()
    both, out = joined(inputs), torch.empty_like(inputs.qv)
    given = {name: x for name, x in inputs.arguments().items() if x is not None} | both
    options = {"softmax_scale": case.softmax_scale, "num_splits": 1, "out": out}
    call = lambda: flash_attn_with_kvcache(**given, **options)  # noqa: E731
    call()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with no_host_sync():
        assert call() is out
    taken = torch.cuda.max_memory_allocated() - before
    assert taken < inputs.k_cache.nbytes


def test_an_int_length_and_an_out() -> None:
    case = a_case(cached=(50, 50), seqlens_q=2, seqlens_new=2, rotary_dim=64, causal=True)
    check_cache(case, cache_seqlens=50)
