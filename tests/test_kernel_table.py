"""The kernel table: what the C++ side reads of it, which row a call finds, and the row filter."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
from kernel_rows import (
    DECODE_ROW,
    DROPOUT_ROW,
    FEATURES_ROW,
    ROW,
    SHORT_ROW,
    SM80_FIELDS,
    SM90_BACKWARD_DROPOUT_ROW,
    SM90_BACKWARD_ROW,
    SM90_ROW,
    TABLE,
)

from build_tools import generate_units
from build_tools.kernel_table import (
    ALL_ROWS,
    BACKWARD_ROWS,
    FORWARD_ROWS,
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
from build_tools.row_filter import RowFilterError, select_rows

REPO = Path(__file__).resolve().parents[1]


# The table


def test_row_names_are_unique() -> None:
    names = [row.name for row in ALL_ROWS]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("rows", [FORWARD_ROWS, BACKWARD_ROWS])
def test_rows_have_the_fields_of_the_struct_in_its_order(rows) -> None:
    header = (REPO / "csrc/flash_attn/config.h").read_text()
    body = re.search(rf"struct {rows[0].config_struct} {{(.*?)\n}};", header, flags=re.DOTALL)
    assert body is not None
    assert re.findall(r"^\s+\w+ (\w+);", body[1], flags=re.MULTILINE) == list(rows[0].config())


@pytest.mark.parametrize("enum", [Dtype, Mask, Family, Kind])
def test_enumerators_are_those_of_the_header(enum) -> None:
    header = (REPO / "csrc/flash_attn/config.h").read_text()
    name = generate_units.CPP_ENUMS[enum]
    body = re.search(rf"enum class {name} : std::uint8_t {{ (.*?) }};", header)
    assert body is not None
    assert body[1].split(", ") == [member.value for member in enum]


def test_features_are_those_of_the_header() -> None:
    header = (REPO / "csrc/flash_attn/config.h").read_text()
    body = re.search(r"namespace feature {(.*?)}  // namespace feature", header, flags=re.DOTALL)
    assert body is not None
    bits = re.findall(r"FeatureSet (\w+) = 1u << (\d+);", body[1])
    assert {name: 1 << int(bit) for name, bit in bits} == {f.name: f.value for f in Feature}


def test_features_have_the_names_that_errors_print() -> None:
    text = (REPO / "csrc/host/names.h").read_text()
    named = re.findall(r"{feature::(\w+), \"(\w+)\"}", text)
    assert named == [(feature.name, feature.name) for feature in Feature]


def _kind(row: KernelRow) -> Kind | None:
    return row.kind if isinstance(row, ForwardRow) else None


def _group(row: KernelRow) -> tuple:
    """What a request and the device fix: rows of other groups never compete with this one."""
    return row.kernel_pass, row.family, row.dtype, _kind(row)


def _most_causal_queries(row: KernelRow) -> int:
    return row.most_causal_queries if isinstance(row, ForwardRow) else 0


@pytest.mark.parametrize("rows", [FORWARD_ROWS, BACKWARD_ROWS])
def test_smaller_head_dims_and_full_masks_come_first(rows) -> None:
    order = list(Mask)
    for group in {_group(row) for row in rows}:
        keys = [(row.head_dim, order.index(row.mask)) for row in rows if _group(row) == group]
        assert keys == sorted(keys)


@pytest.mark.parametrize("rows", [FORWARD_ROWS, BACKWARD_ROWS])
def test_every_row_with_features_has_a_plain_twin_before_it(rows) -> None:
    """So that a call without features never runs the slower kernel. In sm80 of the same tile, as
    tiles differ in the shared memory that they need; all of sm90 fit the GPUs that it runs on.
    """
    free = Feature.deterministic  # costs some kernels nothing: their plain rows have it
    tiles = ("block_m", "block_n", "num_warps")

    def tile(row: KernelRow) -> dict:
        left_out = ("features", *(tiles if row.family is Family.sm90 else ()))
        return {name: value for name, value in row.config().items() if name not in left_out}

    for position, row in enumerate(rows):
        if _kind(row) is Kind.decode or not row.features & ~free:
            continue
        twins = [
            other
            for other in rows[:position]
            if tile(other) == tile(row) and not other.features & ~free
        ]
        assert twins, row.name


@pytest.mark.parametrize("rows", [FORWARD_ROWS, BACKWARD_ROWS])
def test_every_dtype_has_the_same_rows(rows) -> None:
    for row in rows:
        others = [replace(row, dtype=dtype) for dtype in Dtype]
        assert all(other in rows for other in others), row.name


def test_every_row_can_run_something_of_its_own() -> None:
    """A row that an earlier one covers whatever the request would never be chosen.

    Shared memory is not in the table: rows that differ in it have a variant that says so. Rows of
    another family are there for GPUs and tensors that it does not suit.
    """
    for position, row in enumerate(ALL_ROWS):
        if "smem" in row.variant:
            continue
        for earlier in ALL_ROWS[:position]:
            covers = (
                _group(earlier) == _group(row)
                and earlier.head_dim >= row.head_dim
                and (
                    _most_causal_queries(earlier) == 0
                    or 0 < _most_causal_queries(row) <= _most_causal_queries(earlier)
                )
                and (earlier.mask is Mask.windowed or row.mask is Mask.full)
                and row.features in earlier.features
            )
            assert not covers, (earlier.name, row.name)


FEATURES_OF_CALLS = {
    Pass.forward: [
        *(Feature(0), Feature.softcap, Feature.alibi, Feature.dropout, Feature.paged_kv),
        Feature.softcap | Feature.alibi | Feature.dropout,
        Feature.softcap | Feature.alibi | Feature.paged_kv,
    ],
    Pass.backward: [
        Feature.deterministic,
        Feature.softcap | Feature.alibi | Feature.dropout | Feature.deterministic,
    ],
}


@pytest.mark.parametrize("kernel_pass", list(Pass))
def test_every_call_has_a_row(kernel_pass) -> None:
    """On every GPU: of the family that runs on all of them, with any number of queries."""
    rows = [row for row in ALL_ROWS if row.kernel_pass is kernel_pass]
    rows = [row for row in rows if row.family is Family.sm80 and not _most_causal_queries(row)]
    requests = product((32, 64, 96, 128, 192, 256), Dtype, FEATURES_OF_CALLS[kernel_pass])
    for head_dim, dtype, features in requests:
        assert any(
            row.head_dim == head_dim
            and row.dtype is dtype
            and row.mask is Mask.windowed
            and _kind(row) is not Kind.decode
            and features in row.features
            for row in rows
        ), (head_dim, dtype, features)


def test_decode_rows_serve_what_only_they_can() -> None:
    """Tiles of 16 rows that hold several heads, every head dim, splits and pages."""
    rows = [row for row in FORWARD_ROWS if row.kind is Kind.decode]
    assert {row.head_dim for row in rows} == {32, 64, 96, 128, 192, 256}
    for row in rows:
        assert row.block_m == 16
        assert Feature.packed_gqa | Feature.split_kv | Feature.paged_kv in row.features


SM90_ROWS = [row for row in FORWARD_ROWS if row.family is Family.sm90]
SM90_BACKWARD_ROWS = [row for row in BACKWARD_ROWS if row.family is Family.sm90]


@pytest.mark.parametrize(
    ("rows", "sm90_rows"), [(FORWARD_ROWS, SM90_ROWS), (BACKWARD_ROWS, SM90_BACKWARD_ROWS)]
)
def test_sm90_rows_come_first(rows, sm90_rows) -> None:
    """Where they run they are faster than any other that would serve."""
    assert sm90_rows
    assert rows[: len(sm90_rows)] == tuple(sm90_rows)


def chosen_sm90_row(head_dim: int, features: Feature, causal_queries: int) -> ForwardRow:
    """The rule of select_instance.cpp, on a GPU and tensors that suit every row."""
    return next(
        row
        for row in SM90_ROWS
        if row.dtype is Dtype.bf16
        and row.head_dim >= head_dim
        and features in row.features
        and (row.most_causal_queries == 0 or 0 < causal_queries <= row.most_causal_queries)
    )


@pytest.mark.parametrize(
    "features", [Feature(0), Feature.dropout, Feature.softcap, Feature.alibi | Feature.dropout]
)
def test_sm90_serves_every_head_dim_with_its_narrowest_row(features) -> None:
    buckets = {row.head_dim for row in SM90_ROWS}
    assert max(buckets) == 256
    for head_dim in range(8, 257, 8):
        for causal_queries in (0, 1, 1 << 20):
            row = chosen_sm90_row(head_dim, features, causal_queries)
            assert row.head_dim == min(n for n in buckets if n >= head_dim)
            assert bool(row.features) == bool(features), "features cost speed"


def test_short_causal_sequences_have_a_row_of_their_own() -> None:
    (short,) = (row for row in SM90_ROWS if row.variant == "short" and row.dtype is Dtype.bf16)
    most = short.most_causal_queries
    assert most > 0
    for causal_queries, is_short in ((0, False), (1, True), (most, True), (most + 1, False)):
        row = chosen_sm90_row(short.head_dim, Feature(0), causal_queries)
        assert (row == short) is is_short
        assert chosen_sm90_row(short.head_dim, Feature.dropout, causal_queries) != short


@pytest.mark.parametrize("row", SM90_ROWS, ids=lambda row: row.name)
def test_sm90_tiles_are_what_the_kernel_takes(row) -> None:
    """Two or three warpgroups of 64 rows each; boxes of at most 256 rows; halves of 16 keys."""
    assert row.mask is Mask.windowed and row.kind is Kind.tiles
    assert row.block_m in (128, 192) and row.num_warps * 16 == row.block_m
    assert row.block_n <= 256 and row.block_n % 16 == 0


def chosen_sm90_backward_row(head_dim: int, features: Feature) -> BackwardRow:
    """The rule of select_instance.cpp, on a GPU and tensors that suit every row."""
    return next(
        row
        for row in SM90_BACKWARD_ROWS
        if row.dtype is Dtype.bf16 and row.head_dim >= head_dim and features in row.features
    )


@pytest.mark.parametrize("ordered", [Feature(0), Feature.deterministic])
@pytest.mark.parametrize(
    "features",
    [
        *(Feature(0), Feature.dropout, Feature.softcap, Feature.alibi),
        Feature.softcap | Feature.alibi | Feature.dropout,
    ],
)
def test_sm90_backward_serves_every_head_dim_with_its_narrowest_row(features, ordered) -> None:
    buckets = {row.head_dim for row in SM90_BACKWARD_ROWS}
    assert max(buckets) == 256
    for head_dim in range(8, 257, 8):
        row = chosen_sm90_backward_row(head_dim, features | ordered)
        assert row.head_dim == min(n for n in buckets if n >= head_dim)
        assert bool(row.features & ~Feature.deterministic) == bool(features), "features cost speed"


@pytest.mark.parametrize("row", SM90_BACKWARD_ROWS, ids=lambda row: row.name)
def test_sm90_backward_tiles_are_what_the_kernel_takes(row) -> None:
    """Two warpgroups of 64 keys each, or, where dK and dV of as many fill one each, of the same."""
    assert row.mask is Mask.windowed
    assert row.block_m in (64, 128, 256)  # whole warpgroups of dQ, a power of two
    assert row.block_n == (64 if row.head_dim > 128 else 128)
    assert row.num_warps == 8
    assert row.head_dim % 32 == 0


@pytest.mark.parametrize("row", BACKWARD_ROWS, ids=lambda row: row.name)
def test_sm80_alone_shares_out_its_warps_and_buffers(row) -> None:
    values = [getattr(row, name) for name in SM80_FIELDS]
    if row.family is Family.sm90:
        assert not any(values)
    else:
        assert all(values)
        assert all(row.num_warps % warps == 0 for warps in values[:3])


# Row filter


def test_an_empty_filter_selects_every_row() -> None:
    assert select_rows("") == list(ALL_ROWS)


def test_patterns_of_a_clause_must_all_match() -> None:
    rows = select_rows("pass=forward, head_dim=64|128, dtype=bf16", TABLE)
    assert [row.name for row in rows] == [
        "fwd_sm80_bf16_hd64_windowed",
        "fwd_sm80_bf16_hd128_windowed",
    ]


def test_any_clause_may_match_and_table_order_stays() -> None:
    rows = select_rows("pass=backward,head_dim=64;pass=forward,head_dim=32", TABLE)
    assert [row.name for row in rows] == [
        "fwd_sm80_fp16_hd32_windowed",
        "fwd_sm80_bf16_hd32_windowed",
        "bwd_sm80_bf16_hd64_full",
    ]


def test_kinds_and_variants_can_be_chosen() -> None:
    table = [ROW, FEATURES_ROW, DECODE_ROW]
    assert select_rows("variant=plain", table) == [ROW]
    assert select_rows("variant=features|decode", table) == [FEATURES_ROW, DECODE_ROW]
    assert select_rows("kind=tiles", table) == [ROW, FEATURES_ROW]
    assert select_rows("kind=decode", table) == [DECODE_ROW]


def test_families_can_be_chosen() -> None:
    table = [SHORT_ROW, SM90_ROW, DROPOUT_ROW, ROW, FEATURES_ROW]
    assert select_rows("family=sm80", table) == [ROW, FEATURES_ROW]
    assert select_rows("family=sm90,variant=plain|short", table) == [SHORT_ROW, SM90_ROW]
    assert select_rows("most_causal_queries=1000", table) == [SHORT_ROW]
    assert select_rows("head_dim=128,variant=plain", table) == [SM90_ROW, ROW]


def test_sm90_backward_rows_can_be_chosen() -> None:
    table = [SM90_ROW, SM90_BACKWARD_ROW, SM90_BACKWARD_DROPOUT_ROW, *TABLE]
    backward = [SM90_BACKWARD_ROW, SM90_BACKWARD_DROPOUT_ROW]
    assert select_rows("pass=backward,family=sm90", table) == backward
    assert select_rows("pass=backward,family=sm90,variant=plain", table) == [SM90_BACKWARD_ROW]
    assert select_rows("stages_q=0", table) == backward


def test_every_row_is_chosen_by_what_it_says_of_itself() -> None:
    kinds = {Pass.forward: "pass=forward,kind={row.kind.value}", Pass.backward: "pass=backward"}
    for row in ALL_ROWS:
        clause = (
            f"{kinds[row.kernel_pass].format(row=row)},family={row.family.value},"
            f"head_dim={row.head_dim},dtype={row.dtype.value},mask={row.mask.value},"
            f"variant={row.variant or 'plain'}"
        )
        assert select_rows(clause) == [row]


def test_a_field_of_one_pass_alone_excludes_the_other() -> None:
    assert {row.kernel_pass for row in select_rows("stages_q=2", TABLE)} == {Pass.backward}


@pytest.mark.parametrize(
    ("row_filter", "complaint"),
    [
        ("head_dim", "'head_dim'"),
        ("head_dims=64", "no field 'head_dims'"),
        ("head_dim=64|100", "no row has head_dim=100"),
        ("pass=forward;dtype=fp8", "no row has dtype=fp8"),
        ("variant=cache", "no row has variant=cache; there are plain"),
        ("features=softcap", "no field 'features'"),
    ],
)
def test_a_filter_that_says_nothing_of_the_table_is_refused(row_filter, complaint) -> None:
    with pytest.raises(RowFilterError, match=re.escape(complaint)):
        select_rows(row_filter, TABLE)


def test_a_clause_that_matches_no_row_is_refused() -> None:
    with pytest.raises(RowFilterError, match="matches 'pass=forward,stages_q=2'"):
        select_rows("head_dim=128;pass=forward,stages_q=2", TABLE)
