"""Which row of the kernel table a call finds on a Hopper GPU."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from build_tools.kernel_row import (
    BackwardRow,
    Dtype,
    Family,
    Feature,
    ForwardRow,
    KernelRow,
    Kind,
    Mask,
    Pass,
)
from build_tools.kernel_table import (
    ALL_ROWS,
    BACKWARD_ROWS,
    FORWARD_ROWS,
)
from tests.building.kernel_rows import least_keys, most_seqlen

SM90_ROWS = [row for row in FORWARD_ROWS if row.family is Family.sm90]
SM90_BACKWARD_ROWS = [row for row in BACKWARD_ROWS if row.family is Family.sm90]


@pytest.mark.parametrize(
    ("rows", "sm90_rows"), [(FORWARD_ROWS, SM90_ROWS), (BACKWARD_ROWS, SM90_BACKWARD_ROWS)]
)
def test_sm90_rows_come_first(rows, sm90_rows) -> None:
    """Where they run they are faster than any other that would serve."""
    assert sm90_rows
    assert rows[: len(sm90_rows)] == tuple(sm90_rows)


def _walks(row: KernelRow, features: Feature) -> bool:
    """The sm90 kernels with lists walk nothing else."""
    return Feature.block_sparse in features or Feature.block_sparse not in row.features


def chosen_sm90_row(
    head_dim: int,
    features: Feature,
    seqlen: int,
    value_dim: int | None = None,
    *,
    is_causal: bool = True,
    keys: int = 1,
) -> ForwardRow:
    """The rule of select_instance.cpp, on a GPU and tensors that suit every row. keys: that a query
    sees, on average.
    """
    return next(
        row
        for row in SM90_ROWS
        if row.dtype is Dtype.bf16
        and row.head_dim >= head_dim
        and row.value_dim >= (head_dim if value_dim is None else value_dim)
        and features in row.features
        and _walks(row, features)
        and seqlen <= most_seqlen(row)[0 if is_causal else 1]
        and keys >= least_keys(row)[1 if is_causal else 0]
    )


@pytest.mark.parametrize(
    "features", [Feature(0), Feature.dropout, Feature.softcap, Feature.alibi | Feature.dropout]
)
def test_sm90_serves_every_head_dim_with_its_narrowest_row(features) -> None:
    buckets = {row.head_dim for row in SM90_ROWS if not row.is_wide}
    assert max(buckets) == 256
    for head_dim in range(8, 257, 8):
        for seqlen, is_causal in product((1, 1 << 20), (False, True)):
            row = chosen_sm90_row(head_dim, features, seqlen, is_causal=is_causal)
            assert row.head_dim == min(n for n in buckets if n >= head_dim)
            assert bool(row.features) == bool(features), "features cost speed"


def test_short_sequences_have_a_row_of_their_own() -> None:
    (short,) = (row for row in SM90_ROWS if row.variant == "short" and row.dtype is Dtype.bf16)
    for is_causal, most in ((True, short.most_causal_seqlen), (False, short.most_full_seqlen)):
        assert most > 0
        for seqlen, is_short in ((1, True), (most, True), (most + 1, False)):
            row = chosen_sm90_row(short.head_dim, Feature(0), seqlen, is_causal=is_causal)
            assert (row == short) is is_short
            row = chosen_sm90_row(short.head_dim, Feature.dropout, seqlen, is_causal=is_causal)
            assert row != short


HIGH_ROWS = [row for row in SM90_ROWS if row.variant.startswith("long") and row.dtype is Dtype.bf16]


def test_some_head_dims_have_rows_of_higher_tiles() -> None:
    assert {(row.head_dim, row.variant) for row in HIGH_ROWS} == {
        (64, "long_modifiers"),
        (96, "long"),
        (96, "long_modifiers"),
        (128, "long"),
    }


@pytest.mark.parametrize("high", HIGH_ROWS, ids=lambda row: row.name)
def test_higher_tiles_are_for_queries_that_see_many_keys(high) -> None:
    assert high.block_m == 192
    modifiers = Feature.softcap | Feature.alibi
    wanted = [Feature.softcap, Feature.alibi, modifiers] if high.features else [Feature(0)]
    others = [Feature.dropout, modifiers | Feature.dropout, Feature.paged_kv]
    if not high.features:
        others += [Feature.softcap, Feature.alibi]
    for is_causal, least in ((True, high.least_keys_windowed), (False, high.least_keys_full)):
        assert least > 1
        for keys, is_high in ((least - 1, False), (least, True), (1 << 30, True)):
            call = {"seqlen": 1 << 20, "is_causal": is_causal, "keys": keys}
            for features in wanted:
                assert (chosen_sm90_row(high.head_dim, features, **call) == high) is is_high
            for features in others:
                assert chosen_sm90_row(high.head_dim, features, **call) != high


@pytest.mark.parametrize("head_dim", [8, 64, 72, 128])
def test_lists_alone_have_sm90_rows(head_dim) -> None:
    forward = chosen_sm90_row(head_dim, Feature.block_sparse, 1)
    backward = chosen_sm90_backward_row(head_dim, Feature.block_sparse)
    for row in (forward, backward):
        assert row.variant == "sparse"
        assert row.head_dim == (64 if head_dim <= 64 else 128)


@pytest.mark.parametrize("row", SM90_ROWS, ids=lambda row: row.name)
def test_sm90_tiles_are_what_the_kernel_takes(row) -> None:
    """Two to four warpgroups of 64 rows each; boxes of at most 256 rows; halves of 16 keys."""
    assert row.mask is Mask.windowed and row.kind is not Kind.decode
    if row.is_wide:  # two warpgroups share 64 rows
        assert (row.block_m, row.block_n, row.num_warps) == (64, 64, 8)
        return
    assert row.block_m in (128, 192, 256) and row.num_warps * 16 == row.block_m
    assert row.block_n <= 256 and row.block_n % 16 == 0


def chosen_sm90_backward_row(
    head_dim: int,
    features: Feature,
    value_dim: int | None = None,
    *,
    keys: int = 1,
    is_full: bool = True,
) -> BackwardRow:
    """The rule of select_instance.cpp, on a GPU and tensors that suit every row. keys: that a query
    sees, on average.
    """
    return next(
        row
        for row in SM90_BACKWARD_ROWS
        if row.dtype is Dtype.bf16
        and row.head_dim >= head_dim
        and row.value_dim >= (head_dim if value_dim is None else value_dim)
        and features in row.features
        and _walks(row, features)
        and keys >= least_keys(row)[0 if is_full else 1]
    )


def test_pairs_of_ctas_share_the_tiles_of_long_sequences() -> None:
    pairs = (row for row in SM90_BACKWARD_ROWS if row.variant == "pair")
    (pair,) = (row for row in pairs if row.dtype is Dtype.bf16)
    assert pair.ctas_per_tile == 2 and pair.block_n == 256
    for is_full, least in ((True, pair.least_keys_full), (False, pair.least_keys_windowed)):
        assert least > 1
        for keys, is_pair in ((least - 1, False), (least, True), (1 << 30, True)):
            row = chosen_sm90_backward_row(pair.head_dim, Feature(0), keys=keys, is_full=is_full)
            assert (row.variant == "pair") is is_pair
        row = chosen_sm90_backward_row(128, Feature.deterministic, keys=1 << 30, is_full=is_full)
        assert row.variant == "pair"
        for features in (Feature.alibi, Feature.softcap, Feature.block_sparse):
            row = chosen_sm90_backward_row(128, features, keys=1 << 30, is_full=is_full)
            assert row.variant != "pair"


@pytest.mark.parametrize("ordered", [Feature(0), Feature.deterministic])
@pytest.mark.parametrize(
    "features",
    [
        *(Feature(0), Feature.dropout, Feature.softcap, Feature.alibi),
        Feature.softcap | Feature.alibi | Feature.dropout,
    ],
)
def test_sm90_backward_serves_every_head_dim_with_its_narrowest_row(features, ordered) -> None:
    buckets = {row.head_dim for row in SM90_BACKWARD_ROWS if not row.is_wide}
    assert max(buckets) == 256
    for head_dim in range(8, 257, 8):
        row = chosen_sm90_backward_row(head_dim, features | ordered)
        assert row.head_dim == min(n for n in buckets if n >= head_dim)
        assert bool(row.features & ~Feature.deterministic) == bool(features), "features cost speed"


@pytest.mark.parametrize("head_dim", [32, 64, 96, 128])
def test_a_softcap_alone_pays_for_its_weights_on_sm90(head_dim) -> None:
    for features in (Feature.dropout, Feature.alibi, Feature.alibi | Feature.dropout):
        row = chosen_sm90_backward_row(head_dim, features)
        assert Feature.softcap not in row.features
        plain = chosen_sm90_backward_row(head_dim, Feature(0))
        assert (row.block_m, row.block_n) == (plain.block_m, plain.block_n)
        assert (
            Feature.softcap
            in chosen_sm90_backward_row(head_dim, features | Feature.softcap).features
        )


@pytest.mark.parametrize("head_dim", [32, 64, 96, 128])
def test_sm90_backward_pays_for_dropout_only_where_it_drops(head_dim) -> None:
    both = Feature.softcap | Feature.alibi
    for features, variant in (
        (Feature.alibi, "alibi"),
        (Feature.softcap, "softcap"),
        (both, "softcap"),
    ):
        assert chosen_sm90_backward_row(head_dim, features).variant == variant
    for features, variant in (
        (Feature(0), "dropout"),
        (Feature.alibi, "dropout"),
        (Feature.softcap, "softcap_dropout"),
        (both, "softcap_dropout"),
    ):
        assert chosen_sm90_backward_row(head_dim, features | Feature.dropout).variant == variant


@pytest.mark.parametrize("row", SM90_BACKWARD_ROWS, ids=lambda row: row.name)
def test_sm90_backward_tiles_are_what_the_kernel_takes(row) -> None:
    """Two warpgroups of 64 keys each, or, where dK and dV of as many fill one each, of the same; of
    pairs of CTAs twice as many.
    """
    assert row.mask is Mask.windowed
    if row.is_wide:  # two warpgroups share 64 rows
        assert (row.block_m, row.block_n, row.num_warps) == (64, 64, 8)
        return
    assert row.block_m in (64, 128, 256)  # whole warpgroups of dQ, a power of two
    assert row.block_n == (128 if row.separate_keys else 128 * row.ctas_per_tile)
    assert row.separate_keys == (row.head_dim > 128)
    assert row.ctas_per_tile == (2 if row.separate_keys or row.variant == "pair" else 1)
    assert row.num_warps == 8
    assert row.head_dim % 32 == 0


@pytest.mark.parametrize(
    ("head_dim", "value_dim", "row_dims"),
    [
        (192, 128, (192, 128)),
        (136, 64, (192, 128)),
        (192, 136, (192, 192)),
        (128, 64, (128, 128)),
        (200, 128, (256, 256)),
        (128, 192, (192, 192)),
    ],
)
def test_narrow_values_run_the_narrowest_row_that_holds_both(head_dim, value_dim, row_dims) -> None:
    forward = chosen_sm90_row(head_dim, Feature(0), 0, value_dim)
    backward = chosen_sm90_backward_row(head_dim, Feature.deterministic, value_dim)
    assert (forward.head_dim, forward.value_dim) == row_dims
    assert (backward.head_dim, backward.value_dim) == row_dims
    with_dropout = chosen_sm90_row(head_dim, Feature.dropout, 0, value_dim)
    assert with_dropout.value_dim == with_dropout.head_dim


def test_rows_of_narrow_values_say_so_and_are_of_sm90() -> None:
    narrow = [row for row in ALL_ROWS if row.head_dim_v is not None]
    assert {row.kernel_pass for row in narrow} == set(Pass)
    for row in narrow:
        assert row.family is Family.sm90 and row.value_dim < row.head_dim
        assert f"_hd{row.head_dim}_dv{row.value_dim}_" in row.name
        twins = [replace(row, head_dim_v=None), replace(row, head_dim_v=64)]
        assert all(row.tile != twin.tile for twin in twins)


@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_alibi_alone_needs_no_warps_that_draw(head_dim) -> None:
    assert chosen_sm90_row(head_dim, Feature.alibi, 4096).features is Feature.alibi
    for more in (Feature.softcap, Feature.dropout):
        assert Feature.dropout in chosen_sm90_row(head_dim, Feature.alibi | more, 4096).features
