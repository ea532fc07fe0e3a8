"""The row filter of partial builds."""

from __future__ import annotations

import re

import pytest

from build_tools.kernel_row import Pass
from build_tools.kernel_table import ALL_ROWS
from build_tools.row_filter import RowFilterError, select_rows
from tests.building.kernel_rows import (
    DECODE_ROW,
    DROPOUT_ROW,
    FEATURES_ROW,
    ROW,
    SHORT_ROW,
    SM90_BACKWARD_DROPOUT_ROW,
    SM90_BACKWARD_ROW,
    SM90_ROW,
    TABLE,
)


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
    assert select_rows("most_causal_seqlen=1000", table) == [SHORT_ROW]
    assert select_rows("head_dim=128,variant=plain", table) == [SM90_ROW, ROW]


def test_sm90_backward_rows_can_be_chosen() -> None:
    table = [SM90_ROW, SM90_BACKWARD_ROW, SM90_BACKWARD_DROPOUT_ROW, *TABLE]
    backward = [SM90_BACKWARD_ROW, SM90_BACKWARD_DROPOUT_ROW]
    assert select_rows("pass=backward,family=sm90", table) == backward
    assert select_rows("pass=backward,family=sm90,variant=plain", table) == [SM90_BACKWARD_ROW]
    assert select_rows("finishes_dq=false", table) == backward
    assert select_rows("ctas_per_tile=1,stages_q=2", table) == backward


def test_every_row_is_chosen_by_what_it_says_of_itself() -> None:
    kinds = {Pass.forward: "pass=forward,kind={row.kind.value}", Pass.backward: "pass=backward"}
    for row in ALL_ROWS:
        clause = (
            f"{kinds[row.kernel_pass].format(row=row)},family={row.family.value},"
            f"head_dim={row.head_dim},head_dim_v={row.value_dim},dtype={row.dtype.value},"
            f"mask={row.mask.value},variant={row.variant or 'plain'}"
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
        (";", "expected at least one clause, got ';'"),
        ("head_dim=64,head_dim=128", "head_dim stands twice in"),
    ],
)
def test_a_filter_that_says_nothing_of_the_table_is_refused(row_filter, complaint) -> None:
    with pytest.raises(RowFilterError, match=re.escape(complaint)):
        select_rows(row_filter, TABLE)


def test_a_clause_that_matches_no_row_is_refused() -> None:
    with pytest.raises(RowFilterError, match="matches 'pass=forward,stages_q=2'"):
        select_rows("head_dim=128;pass=forward,stages_q=2", TABLE)
