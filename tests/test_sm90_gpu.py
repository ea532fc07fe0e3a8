"""The forward kernels of Hopper GPUs: which calls they take, that a CTA finds its way through many
tiles, that they touch nothing but their sequences, and that the sm80 kernels agree.

What holds of any kernel is tested elsewhere too, and on a Hopper GPU of these. With the CPU backend
under test the sizes are small, and what asks for kernels is skipped.
"""

from __future__ import annotations

import os
import random
import re
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import families
import logits
import pytest
import torch
from bad_input import Guard
from cases import Alibi, AttentionCase, KvCacheCase, Layout, VarlenCase
from harness import (
    DEVICE,
    ON_CPU,
    Case,
    Check,
    assert_same_bits,
    bits,
    drawn_rng_state,
    expected_keep_mask,
    make_cache_case,
    make_case,
    make_varlen_case,
    run_forward,
    run_reference,
    scaled,
    skip_without_row,
)
from limits import run_limited
from pairwise import pairwise
from reference import AttentionResult, visible_keys
from tolerance import assert_close
from torch import Tensor

from flash_attn_cuda import build_info, flash_attn_func

pytestmark = pytest.mark.gpu

LIMITS = ("FLASH_ATTN_CUDA_CAPABILITY_LIMIT", "FLASH_ATTN_CUDA_SMEM_LIMIT")
HEAD_DIMS = families.HEAD_DIMS
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
EVERY_HEAD_DIM = pytest.mark.parametrize("head_dim", HEAD_DIMS)
CAUSAL = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
MASKS: tuple[dict[str, Any], ...] = (
    {},
    {"causal": True},
    *({"window": window} for window in ((0, 0), (5, -1), (-1, 7), (100, 50), (64, 0))),
)


@pytest.fixture(autouse=True)
def _runs_sm90_kernels() -> None:
    if ON_CPU:
        return
    capability = torch.cuda.get_device_capability()
    if capability != (9, 0):
        pytest.skip(f"needs compute capability 9.0, this is {capability[0]}.{capability[1]}")
    for variable in LIMITS:
        if variable in os.environ:
            pytest.skip(f"{variable} is set")
    if not any(row.family == "sm90" for row in build_info.compiled_rows()):
        pytest.skip("this build has no sm90 rows")


def row_name(head_dim: int, variant: str = "", family: str = "sm90", dtype: str = "bf16") -> str:
    return "_".join(filter(None, ["fwd", family, dtype, f"hd{head_dim}", "windowed", variant]))


def most_causal_queries() -> int:
    """Of the row for short causal sequences."""
    rows = {row.name: row for row in build_info.compiled_rows()}
    return rows[row_name(64, "short")].config["most_causal_queries"]


# -- which kernel ----------------------------------------------------------------------------------


@pytest.mark.cuda_only
@DTYPES
@pytest.mark.parametrize(
    ("head_dim", "bucket"),
    [*((d, d) for d in HEAD_DIMS), (8, 64), (72, 96), (104, 128), (136, 192), (200, 256)],
)
def test_every_head_dim_has_a_row(head_dim: int, bucket: int, dtype: torch.dtype) -> None:
    short_name = {torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
    for variant, features in (
        ("", {}),
        ("", {"window": (7, -1)}),
        ("dropout", {"dropout_p": 0.1}),
        ("dropout", {"softcap": 3.0, "causal": True}),
        ("dropout", {"alibi": Alibi.per_head}),
    ):
        case = make_case(seqlen_q=300, seqlen_k=200, head_dim=head_dim, dtype=dtype, **features)
        plan = families.planned(case)
        assert plan["instance"] == row_name(bucket, variant, dtype=short_name), str(case)
        assert plan["config"]["family"] == "sm90"


@pytest.mark.cuda_only
def test_short_causal_sequences_have_a_row() -> None:
    most = most_causal_queries()
    for seqlen, features, variant in (
        (min(1024, most), {"causal": True}, "short"),
        (most, {"causal": True}, "short"),
        (most, {"window": (20, 3)}, "short"),
        (most + 1, {"causal": True}, ""),
        (most, {}, ""),
        (most, {"window": (20, -1)}, ""),
        (most, {"causal": True, "dropout_p": 0.1}, "dropout"),
    ):
        dense = make_case(seqlen_q=seqlen, seqlen_k=seqlen, **features)
        assert families.planned(dense)["instance"] == row_name(64, variant), str(dense)
        packed = make_varlen_case(lengths_q=(seqlen, 90, 0, 90), **features)
        assert families.planned(packed)["instance"] == row_name(64, variant), str(packed)
    wider = make_case(seqlen_q=1024, seqlen_k=1024, head_dim=72, causal=True)
    assert families.planned(wider)["instance"] == row_name(96)


def launches() -> list[tuple[Case, str]]:
    """Calls, and the rows that they are to run."""
    sm80 = {"family": "sm80"}
    base = make_case(seqlen_q=200, seqlen_k=300)
    packed = make_varlen_case(lengths_q=(200, 0, 33))
    cache = make_cache_case(seqlens_q=70)
    long = most_causal_queries() + 1
    return [
        (base, row_name(64)),
        (replace(base, causal=True), row_name(64, "short")),
        (replace(base, seqlen_q=long, causal=True), row_name(64)),
        (replace(base, head_dim=128, dtype=torch.float16), row_name(128, dtype="fp16")),
        (replace(base, softcap=3.0), row_name(64, "dropout")),
        (replace(base, alibi=Alibi.per_batch, head_dim=192), row_name(192, "dropout")),
        (replace(base, dropout_p=0.5, head_dim=256), row_name(256, "dropout")),
        (replace(base, softmax_scale=0.0), row_name(64)),
        (replace(base, softmax_scale=-0.5), row_name(64, **sm80)),
        (replace(base, softmax_scale=-0.5, softcap=3.0), row_name(64, "modifiers", **sm80)),
        (replace(base, layout=Layout.expanded_batch), row_name(64, **sm80)),
        (replace(base, layout=Layout.expanded_batch, batch=1), row_name(64)),
        (replace(base, layout=Layout.heads_first), row_name(64)),
        (replace(base, layout=Layout.surrounded), row_name(64)),
        (replace(base, layout=Layout.odd_stride), row_name(64)),  # of a copy
        (replace(base, seqlen_q=4), row_name(64, "decode", **sm80)),
        (packed, row_name(64)),
        (replace(packed, causal=True), row_name(64, "short")),
        (replace(packed, lengths_q=(long, 0, 33), causal=True), row_name(64)),
        (cache, row_name(64)),
        (replace(cache, leftpad=(3, 0, 1), head_dim=128), row_name(128)),
        (replace(cache, page_size=16), row_name(64, "modifiers", **sm80)),
        (replace(cache, seqlens_q=1), row_name(64, "decode", **sm80)),
    ]


@pytest.mark.cuda_only
def test_which_kernels_run() -> None:
    """By the names that a profiler sees."""
    calls = launches()
    prepared = [(case, case.make_inputs()) for case, _ in calls]
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for case, inputs in prepared:
            run_forward(case, inputs)
        torch.cuda.synchronize()
    events = sorted(profile.events(), key=lambda event: event.time_range.start)
    if not events:
        pytest.skip("the profiler sees no kernels here")
    forwards = {row.name for row in build_info.compiled_rows() if row.pass_name == "forward"}
    words = (word for event in events for word in re.findall(r"fwd_[a-z0-9_]+", event.name))
    seen = [word for word in words if word in forwards]
    expected = [f"{case}: {name}" for case, name in calls]
    assert [f"{case}: {name}" for (case, _), name in zip(calls, seen, strict=False)] == expected


# -- agreement with the reference ------------------------------------------------------------------

SHAPES: dict[str, tuple[Any, ...]] = {
    "head_dim": (8, 40, 64, 72, 96, 104, 128, 160, 192, 224, 256),
    "dtype": (torch.bfloat16, torch.float16),
    "seqlen_q": (1, 63, 64, 65, 127, 129, 191, 193, 257, 511, 1000),
    "seqlen_k": (0, 1, 63, 64, 65, 80, 81, 96, 97, 127, 128, 129, 193, 257, 511, 1000),
    "heads": ((2, 2), (4, 1), (8, 1), (20, 1)),  # 20: one query is more than decode kernels take
    "mask": MASKS,
    "softmax_scale": (None, 0.3),
}
FEATURES: dict[str, tuple[Any, ...]] = {
    "head_dim": (8, 64, 72, 96, 128, 192, 224, 256),
    "dtype": (torch.bfloat16, torch.float16),
    "seqlen_q": (1, 65, 129, 200, 257),
    "seqlen_k": (1, 64, 81, 97, 129, 301),
    "heads": ((2, 2), (20, 1)),
    "mask": MASKS,
    "softcap": (0.0, 3.0),
    "alibi": (None, *Alibi),
    "dropout_p": (0.0, 0.2),
}


def shaped_case(heads: tuple[int, int], mask: dict[str, Any], **fields: Any) -> AttentionCase:
    """A case of one combination of SHAPES or FEATURES."""
    return make_case(num_heads_q=heads[0], num_heads_k=heads[1], **mask, **fields)


EIGHT_PARTS = pytest.mark.parametrize("part", range(8))


@EIGHT_PARTS
def test_shapes(check: Check, part: int) -> None:
    """Every pair of a head dim, a length, a mask and so on."""
    for choice in pairwise(SHAPES, seed=3)[part :: 8 * scaled(1, 4)]:
        check(shaped_case(**choice), backward=False)


@EIGHT_PARTS
def test_features(check: Check, part: int) -> None:
    for choice in pairwise(FEATURES, seed=4)[part :: 8 * scaled(1, 4)]:
        check(shaped_case(**choice, batch=1), backward=False)


def edges(head_dim: int) -> list[int]:
    """Rows of a warpgroup, of a tile, and keys of a block."""
    rows = [row for row in build_info.compiled_rows() if row.family == "sm90"]
    configs = [row.config for row in rows if row.head_dim == head_dim]
    return sorted({64, *(config[name] for config in configs for name in ("block_m", "block_n"))})


@EVERY_HEAD_DIM
def test_windows_around_the_edges_of_blocks(check: Check, head_dim: int) -> None:
    """Both ends of the window cross the bits that stand for a thread's columns, odd ones too."""
    generator = random.Random(head_dim)
    for edge in edges(head_dim):
        for length in (edge - 1, edge, edge + 1, 2 * edge + 1):
            for _ in range(2):
                window = (generator.choice((-1, 0, 1, 7, 8, 9, 31, 33, edge)), -1)
                window = (window[0], generator.choice((0, 1, 2, 15, 17, edge - 1)))
                case = make_case(
                    batch=1,
                    seqlen_q=length,
                    seqlen_k=length + generator.choice((-40, -1, 0, 3, 130)),
                    num_heads_q=2,
                    num_heads_k=1,
                    head_dim=head_dim,
                    window=window,
                )
                check(case, backward=False)


# -- many tiles for every CTA ----------------------------------------------------------------------


@EVERY_HEAD_DIM
@pytest.mark.parametrize("mask", MASKS[:2] + MASKS[5:], ids=str)
def test_many_tiles_for_every_cta(check: Check, head_dim: int, mask: dict[str, Any]) -> None:
    """About 14 rounds of tiles with two to five key blocks."""
    case = make_case(
        batch=scaled(40, 2),
        seqlen_q=scaled(300, 70),
        seqlen_k=scaled(300, 70),
        num_heads_q=scaled(16, 2),
        num_heads_k=scaled(4, 1),
        head_dim=head_dim,
        **mask,
    )
    check(case, backward=False)


@EVERY_HEAD_DIM
@pytest.mark.parametrize(
    ("lengths", "mask"),
    [
        ((300, 60), {}),  # one key block each
        ((300, 200), {}),  # two or three
        ((700, 150), {"causal": True}),  # most tiles see no key
        ((500, 300), {"window": (64, 0)}),  # the first do not
        ((300, 500), {"window": (0, 0)}),
        ((40, 700), {"causal": True}),  # a warpgroup without queries
        ((300, 0), {}),  # no tile sees a key
    ],
    ids=str,
)
def test_many_tiles_of_few_blocks(
    check: Check, head_dim: int, lengths: tuple[int, int], mask: dict[str, Any]
) -> None:
    case = make_case(
        batch=scaled(12, 1),
        seqlen_q=lengths[0],
        seqlen_k=lengths[1],
        num_heads_q=scaled(16, 2),
        num_heads_k=scaled(8, 1),
        head_dim=head_dim,
        **mask,
    )
    check(case, backward=False)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_long_causal_tiles(check: Check, head_dim: int) -> None:
    """From one key block to 16, the long ones first, and beyond the row for short sequences."""
    size = scaled(2000, 200)
    case = make_case(
        batch=1,
        seqlen_q=size,
        seqlen_k=size,
        num_heads_q=scaled(24, 2),
        num_heads_k=2,
        head_dim=head_dim,
        causal=True,
    )
    check(case, backward=False)


@CAUSAL
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_as_many_tiles_as_sms_and_one_more_or_less(
    check: Check, head_dim: int, causal: bool
) -> None:
    """One tile a head: the last round has one CTA's work, or lacks one's."""
    sms = 8 if ON_CPU else torch.cuda.get_device_properties(0).multi_processor_count
    for tiles in (1, 2, sms - 1, sms, sms + 1, 2 * sms - 1, 2 * sms, 2 * sms + 1, 3 * sms + 1):
        case = make_case(
            batch=1,
            seqlen_q=70,
            seqlen_k=260,
            num_heads_q=tiles,
            num_heads_k=tiles,
            head_dim=head_dim,
            causal=causal,
        )
        check(case, backward=False)


@EVERY_HEAD_DIM
def test_many_tiles_with_features(check: Check, head_dim: int) -> None:
    for features in ({"dropout_p": 0.3, "causal": True}, {"softcap": 4.0, "window": (60, 9)}):
        case = make_case(
            batch=scaled(9, 1),
            seqlen_q=140,
            seqlen_k=150,
            num_heads_q=scaled(16, 2),
            num_heads_k=2,
            head_dim=head_dim,
            **features,
        )
        check(case, backward=False)
        check(replace(case, alibi=Alibi.per_batch), backward=False)


def random_lengths(seed: int, count: int, most: int) -> tuple[int, ...]:
    """Many short ones, some long ones, some empty."""
    generator = random.Random(seed)
    return tuple(
        generator.choice((0, generator.randint(1, 70), generator.randint(1, most)))
        for _ in range(count)
    )


@CAUSAL
@EVERY_HEAD_DIM
def test_many_tiles_of_packed_sequences(check: Check, head_dim: int, causal: bool) -> None:
    count, most = scaled(40, 6), scaled(700, 150)
    case = make_varlen_case(
        lengths_q=random_lengths(head_dim, count, most),
        lengths_k=random_lengths(head_dim + 1, count, most),
        num_heads_q=4,
        num_heads_k=2,
        head_dim=head_dim,
        causal=causal,
    )
    check(case, backward=False)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_many_tiles_of_partly_used_sequences(check: Check, head_dim: int) -> None:
    """Tiles that end within a sequence's rows, or lie behind the queries that attend."""
    lengths = random_lengths(1, scaled(40, 6), scaled(600, 150))
    keys = random_lengths(2, len(lengths), scaled(600, 150))
    used_k = tuple(n - n // 5 for n in keys)
    case = make_varlen_case(
        lengths_q=lengths,
        lengths_k=keys,
        used_q=tuple(n // (1 + index % 4) for index, n in enumerate(lengths)),
        used_k=used_k,
        leftpad=tuple(min(n, index * 7 % 50) for index, n in enumerate(used_k)),
        num_heads_k=2,
        head_dim=head_dim,
        window=(90, 30),
    )
    check(case, backward=False)


def test_packed_lengths_around_the_row_for_short_ones(check: Check) -> None:
    """max_seqlen_q says which row serves; either is right."""
    most = scaled(1280 if ON_CPU else most_causal_queries(), 200)
    for longest in (most, most + 1):
        lengths = (longest, 1, 0, 130, 64)
        check(make_varlen_case(lengths_q=lengths, num_heads_k=1, causal=True), backward=False)


# -- what is not theirs ----------------------------------------------------------------------------


@pytest.mark.parametrize("head_dim", [72, 96, 192, 256])
@pytest.mark.parametrize(
    "layout",
    [
        Layout.heads_first,
        Layout.seqlen_first,
        Layout.packed,
        Layout.sliced_head_dim,
        Layout.every_other_row,
        Layout.surrounded,
    ],
    ids=lambda layout: layout.value,
)
def test_layouts_that_tma_reads_in_place(layout: Layout, head_dim: int) -> None:
    """NaN in every gap, and the bits of contiguous tensors."""
    case = make_case(
        seqlen_q=211, seqlen_k=150, num_heads_k=2, head_dim=head_dim, causal=True, layout=layout
    )
    skip_without_row(case, backward=False)
    inputs = case.make_inputs()
    result = run_forward(case, inputs)
    dense = {name: getattr(inputs, name).contiguous() for name in ("q", "k", "v")}
    assert_same_bits(run_forward(case, replace(inputs, **dense)), result, layout.value)
    assert_close(result, *run_reference(case, inputs, use_dlse=False))


@CAUSAL
@EVERY_HEAD_DIM
def test_one_query_or_one_key(check: Check, head_dim: int, causal: bool) -> None:
    """Dimensions of one element, whose strides are nobody's."""
    for seqlen_q, seqlen_k, heads in ((130, 1, (1, 1)), (1, 130, (20, 1)), (1, 1, (20, 1))):
        case = make_case(
            batch=1,
            seqlen_q=seqlen_q,
            seqlen_k=seqlen_k,
            num_heads_q=heads[0],
            num_heads_k=heads[1],
            head_dim=head_dim,
            causal=causal,
        )
        check(case, backward=False)


PACKED_LENGTHS = ((70, 0, 1, 129, 200), (130, 20, 0, 65, 333))


def packed_case(**fields: Any) -> VarlenCase:
    return make_varlen_case(
        **{
            "lengths_q": PACKED_LENGTHS[0],
            "lengths_k": PACKED_LENGTHS[1],
            "num_heads_k": 2,
            **fields,
        }
    )


@CAUSAL
@EVERY_HEAD_DIM
def test_a_sequence_does_not_see_its_neighbours(head_dim: int, causal: bool) -> None:
    """All of the others NaN: the same bits."""
    case = packed_case(head_dim=head_dim, causal=causal)
    skip_without_row(case, backward=False)
    clean = case.make_inputs()
    expected = run_forward(case, clean)
    starts_q, starts_k = ([0, *accumulate(lengths)] for lengths in PACKED_LENGTHS)
    for index in range(case.batch):
        rows, keys = (slice(*starts[index : index + 2]) for starts in (starts_q, starts_k))
        dirty = {}
        for name, kept in (("q", rows), ("k", keys), ("v", keys)):
            x = getattr(clean, name)
            dirty[name] = torch.full_like(x, torch.nan)
            dirty[name][kept] = x[kept]
        result = run_forward(case, replace(clean, **dirty))
        assert torch.equal(bits(result.out[rows]), bits(expected.out[rows])), index
        assert torch.equal(bits(result.lse[:, rows]), bits(expected.lse[:, rows])), index


def nan_behind(x: Tensor, rows: int) -> Tensor:
    return torch.cat([x, x.new_full((rows, *x.shape[1:]), torch.nan)])


@EVERY_HEAD_DIM
@pytest.mark.parametrize("rows", [(1, 1), (300, 200)], ids=str)
def test_rows_behind_the_last_sequence(head_dim: int, rows: tuple[int, int]) -> None:
    """They hold NaN and get out 0 and lse -inf."""
    case = packed_case(head_dim=head_dim, causal=True)
    skip_without_row(case, backward=False)
    inputs = case.make_inputs()
    longer = {"q": nan_behind(inputs.q, rows[0])}
    longer |= {name: nan_behind(getattr(inputs, name), rows[1]) for name in "kv"}
    result = run_forward(case, replace(inputs, **longer))
    out, behind = result.out.split([case.total_q, rows[0]])
    lse, lse_behind = result.lse.split([case.total_q, rows[0]], 1)
    assert not behind.any() and (lse_behind == -torch.inf).all()
    assert_close(AttentionResult(out, lse), *run_reference(case, inputs, use_dlse=False))


@pytest.mark.cuda_only
@EVERY_HEAD_DIM
@pytest.mark.parametrize("unused", [0, 8], ids=["whole", "part"])
def test_packed_output_into_a_given_tensor(head_dim: int, unused: int) -> None:
    """NaN around q, k, v and out: nothing around out is written, all of it is. A part of the row's
    head dim, or all of it.
    """
    case = packed_case(
        head_dim=head_dim - unused,
        causal=True,
        used_q=(70, 0, 1, 40, 199),
        used_k=(130, 0, 0, 64, 200),
        leftpad=(1, 0, 0, 64, 100),
    )
    skip_without_row(case, backward=False)
    inputs = case.make_inputs()
    guards = {name: Guard(name, getattr(inputs, name), margin=200) for name in ("q", "k", "v")}
    guards["out"] = Guard("out", torch.full_like(inputs.q, torch.nan), margin=200)
    out, lse, *_ = build_info.extension.varlen_fwd(
        *(guards[name].tensor for name in ("q", "k", "v", "out")),
        *(inputs.cu_seqlens_q, inputs.cu_seqlens_k, inputs.seqused_k, inputs.leftpad_k),
        *(None, None, case.max_seqlen_q, case.max_seqlen_k, 0.0, case.head_dim**-0.5, False, True),
        *(-1, -1, 0.0, False, None),
        seqused_q=inputs.seqused_q,
    )
    for guard in guards.values():
        guard.check()
    assert out.data_ptr() == guards["out"].tensor.data_ptr()
    assert_close(AttentionResult(out, lse), *run_reference(case, inputs, use_dlse=False))


@EVERY_HEAD_DIM
@pytest.mark.parametrize(
    "places",
    [
        {"capacity": 700, "cached": (600, 0, 333)},
        {"leftpad": (90, 0, 30), "cached": (150, 70, 192)},
        {"batch_idx": (3, 0, 2), "entries": 5},
    ],
    ids=str,
)
def test_caches(check: Check, head_dim: int, places: dict[str, Any]) -> None:
    """Rows that hold no key are NaN. Enough queries for these kernels, and keys appended before."""
    case: KvCacheCase = make_cache_case(head_dim=head_dim, seqlens_q=70, **places)
    check(case, backward=False)
    check(replace(case, causal=True, num_heads_q=6), backward=False)
    appended = {"seqlens_q": 40, "seqlens_new": 30, "capacity": 700, "causal": True}
    check(replace(case, **appended), backward=False)


@pytest.mark.cuda_only
@pytest.mark.parametrize("far", ["batch", "row", "head"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_strides_past_two_to_the_31_elements(head_dim: int, far: str) -> None:
    """q, k and v lie interleaved in one buffer of 4 GiB, with more than 2^31 elements from the
    first to the last of a dimension.
    """
    case = make_case(
        seqlen_q=260, seqlen_k=260, num_heads_q=3, num_heads_k=3, head_dim=head_dim, causal=True
    )
    skip_without_row(case, backward=False)
    if torch.cuda.mem_get_info()[0] < 12 << 30:
        pytest.skip("needs 12 GiB of free memory")
    inputs = case.make_inputs()
    batch, seqlen, heads, _ = case.query_shape
    names = ("q", "k", "v")
    near = {"batch": seqlen * heads, "row": heads, "head": 1}
    if far == "row":
        near["batch"] = heads
        near["row"] = batch * heads
    if far == "head":
        near |= {"batch": seqlen, "row": 1, "head": batch * seqlen}
    strides = {dim: step * head_dim * len(names) for dim, step in near.items()}
    sizes = {"batch": batch, "row": seqlen, "head": heads}
    strides[far] = -(-(1 << 31) // (sizes[far] - 1) // 8) * 8 + 8
    last = sum((sizes[dim] - 1) * strides[dim] for dim in sizes)
    assert (sizes[far] - 1) * strides[far] > 1 << 31 and last < 3 << 30
    buffer = torch.empty(last + (len(names) + 1) * head_dim, dtype=case.dtype, device=DEVICE)
    moved = {}
    for index, name in enumerate(names):
        view = buffer.as_strided(
            case.query_shape,
            (strides["batch"], strides["row"], strides["head"], 1),
            index * head_dim,
        )
        moved[name] = view.copy_(getattr(inputs, name))
    assert_same_bits(run_forward(case, replace(inputs, **moved)), run_forward(case, inputs), far)
    del buffer, moved, view
    torch.cuda.empty_cache()


# -- numbers that are hard on a softmax ------------------------------------------------------------


@DTYPES
@EVERY_HEAD_DIM
def test_extreme_logits(head_dim: int, dtype: torch.dtype) -> None:
    for values in logits.ALL:
        for causal in (False, True):
            case = make_case(
                seqlen_q=200, seqlen_k=301, head_dim=head_dim, dtype=dtype, causal=causal
            )
            skip_without_row(case, backward=False)
            inputs = case.make_inputs()
            q, k = values(inputs.q, inputs.k)
            inputs = replace(inputs, q=q, k=k)
            assert_close(run_forward(case, inputs), *run_reference(case, inputs, use_dlse=False))


@EVERY_HEAD_DIM
def test_scales(check: Check, head_dim: int) -> None:
    for scale in (0.0, -0.0, 1e-6, 5.0, 100.0, -0.3):
        for mask in ({"causal": True}, {"window": (64, 0)}):
            case = make_case(
                seqlen_q=130, seqlen_k=100, head_dim=head_dim, softmax_scale=scale, **mask
            )
            check(case, backward=False)


@EVERY_HEAD_DIM
def test_bad_values_stay_in_their_head(head_dim: int) -> None:
    """Infinity and NaN in one head of many, whose tiles a CTA takes between others."""
    case = make_case(
        batch=scaled(10, 2),
        seqlen_q=200,
        seqlen_k=300,
        num_heads_q=scaled(16, 4),
        num_heads_k=scaled(16, 4),
        head_dim=head_dim,
        causal=True,
    )
    skip_without_row(case, backward=False)
    inputs = case.make_inputs()
    clean = run_forward(case, inputs)
    for bad in (torch.nan, torch.inf):
        for x in (inputs.q, inputs.k, inputs.v):
            x[1, 7, 2] = bad
        dirty = run_forward(case, inputs)
        assert not dirty.out[1, 7:, 2].isfinite().any()
        for result in (clean, dirty):
            result.out[1, :, 2] = 0.0
            result.lse[1, 2] = 0.0
        assert_same_bits(dirty, clean, str(bad))


# -- the same bits ---------------------------------------------------------------------------------


@EVERY_HEAD_DIM
@pytest.mark.parametrize("features", [{}, {"causal": True}, {"dropout_p": 0.3}], ids=str)
def test_repeated_runs_give_the_same_bits(head_dim: int, features: dict[str, Any]) -> None:
    """50 runs of more tiles than SMs, compared on the device."""
    case = make_case(
        batch=scaled(8, 1),
        seqlen_q=scaled(400, 70),
        seqlen_k=scaled(700, 90),
        num_heads_q=scaled(16, 2),
        num_heads_k=2,
        head_dim=head_dim,
        **features,
    )
    skip_without_row(case, backward=False)
    inputs = case.make_inputs()
    first = run_forward(case, inputs)
    different = []
    for _ in range(scaled(50, 2)):
        again = run_forward(case, inputs)
        pairs = ((again.out, first.out), (again.lse, first.lse))
        different.append(sum((bits(x) != bits(y)).sum() for x, y in pairs))
    assert not torch.stack(different).any(), "elements differ from the first run's"


@EVERY_HEAD_DIM
def test_a_head_does_not_depend_on_its_company(head_dim: int) -> None:
    """Whatever CTA takes its tiles, and after whose."""
    case = make_case(
        batch=scaled(9, 2),
        seqlen_q=300,
        seqlen_k=330,
        num_heads_q=scaled(16, 4),
        num_heads_k=scaled(16, 4),
        head_dim=head_dim,
        causal=True,
    )
    skip_without_row(case, backward=False)
    inputs = case.make_inputs()
    together = run_forward(case, inputs)
    for batch, head in ((0, 0), (1, 3), (case.batch - 1, case.num_heads_q - 1)):
        at = (slice(batch, batch + 1), slice(None), slice(head, head + 1))
        alone = flash_attn_func(
            *(x[at] for x in (inputs.q, inputs.k, inputs.v)), causal=True, return_attn_probs=True
        )
        assert torch.equal(bits(alone[0]), bits(together.out[at])), (batch, head)
        at_row = (slice(batch, batch + 1), slice(head, head + 1))
        assert torch.equal(bits(alone[1]), bits(together.lse[at_row])), (batch, head)


# -- the sm80 kernels on the same GPU --------------------------------------------------------------


@DTYPES
@EVERY_HEAD_DIM
def test_dropout_drops_what_seed_and_offset_say(head_dim: int, dtype: torch.dtype) -> None:
    """Pair by pair, as the kernel multiplied it."""
    case = make_case(
        seqlen_q=200, seqlen_k=301, head_dim=head_dim, num_heads_k=2, dropout_p=0.3, dtype=dtype
    )
    skip_without_row(case, backward=False)
    kept = expected_keep_mask(case, drawn_rng_state(case, case.make_inputs()))
    assert torch.equal(families.kept_pairs(case), kept)


@pytest.mark.cuda_only
def test_both_families_agree(tmp_path: Path) -> None:
    """With the reference, with each other, and on what is dropped, bit for bit."""
    for case in (*families.CASES, *families.DROPOUT_CASES):
        skip_without_row(case, backward=False)
    file = tmp_path / "sm80.pt"
    finished = run_limited("tests/families.py", str(file), capability=80)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    there, here = torch.load(file, map_location=DEVICE), families.results()
    for case in (*families.CASES, *families.DROPOUT_CASES):
        sm90, sm80 = here[str(case)], there[str(case)]
        assert (sm90["family"], sm80["family"]) == ("sm90", "sm80"), str(case)
        expected = run_reference(case, case.make_inputs(), use_dlse=False)
        for result in (sm90, sm80):
            assert_close(AttentionResult(result["out"], result["lse"]), *expected)
        other = AttentionResult(sm80["out"].double(), sm80["lse"].double())
        assert_close(AttentionResult(sm90["out"], sm90["lse"]), other, expected[1])
    for case in families.DROPOUT_CASES:
        kept = here[str(case)]["kept"]
        assert torch.equal(kept, there[str(case)]["kept"]), str(case)
        mask = expected_keep_mask(case, drawn_rng_state(case, case.make_inputs()))
        visible = visible_keys(case.seqlen_q, case.seqlen_k, causal=case.causal, device=DEVICE)
        assert torch.equal(kept, mask & visible), str(case)
