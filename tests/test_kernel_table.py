"""The kernel table: what the C++ side reads of it, which row a call finds, and the row filter."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
from kernel_rows import DECODE_ROW, FEATURES_ROW, ROW, TABLE

from build_tools import generate_units
from build_tools.kernel_table import (
    ALL_ROWS,
    BACKWARD_ROWS,
    FORWARD_ROWS,
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
    """What a request fixes: rows of other groups never compete with this one."""
    return row.kernel_pass, row.dtype, _kind(row)


@pytest.mark.parametrize("rows", [FORWARD_ROWS, BACKWARD_ROWS])
def test_smaller_head_dims_and_full_masks_come_first(rows) -> None:
    order = list(Mask)
    for group in {_group(row) for row in rows}:
        keys = [(row.head_dim, order.index(row.mask)) for row in rows if _group(row) == group]
        assert keys == sorted(keys)


@pytest.mark.parametrize("rows", [FORWARD_ROWS, BACKWARD_ROWS])
def test_every_row_with_features_has_a_plain_twin_before_it(rows) -> None:
    """Of the same tile, so that a call without features never runs the slower kernel."""
    free = Feature.deterministic  # costs some kernels nothing: their plain rows have it

    def tile(row: KernelRow) -> dict:
        return {name: value for name, value in row.config().items() if name != "features"}

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

    Shared memory is not in the table: rows that differ in it have a variant that says so.
    """
    for position, row in enumerate(ALL_ROWS):
        if "smem" in row.variant:
            continue
        for earlier in ALL_ROWS[:position]:
            covers = (
                _group(earlier) == _group(row)
                and earlier.family is row.family
                and earlier.head_dim >= row.head_dim
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
    rows = [row for row in ALL_ROWS if row.kernel_pass is kernel_pass]
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


def test_every_row_is_chosen_by_what_it_says_of_itself() -> None:
    kinds = {Pass.forward: "pass=forward,kind={row.kind.value}", Pass.backward: "pass=backward"}
    for row in ALL_ROWS:
        clause = (
            f"{kinds[row.kernel_pass].format(row=row)},head_dim={row.head_dim},"
            f"dtype={row.dtype.value},mask={row.mask.value},variant={row.variant or 'plain'}"
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
