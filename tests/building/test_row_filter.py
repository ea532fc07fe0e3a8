"""The row filter of partial builds."""

from __future__ import annotations

import re

import pytest

from kernel_table.all_rows import ALL_ROWS
from kernel_table.row import KernelRow, Pass
from kernel_table.row_filter import RowFilterError, select_rows
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

SM90_TABLE = [SHORT_ROW, SM90_ROW, DROPOUT_ROW, ROW, FEATURES_ROW, DECODE_ROW]
BACKWARD_TABLE = [SM90_ROW, SM90_BACKWARD_ROW, SM90_BACKWARD_DROPOUT_ROW, *TABLE]


@pytest.mark.parametrize(
    ("table", "row_filter", "names"),
    [
        # Patterns of a clause must all match.
        (TABLE, "pass=forward, head_dim=64|128, dtype=bf16", "fwd_64_bf16 fwd_128_bf16"),
        # Any clause may match, and table order stays.
        (
            TABLE,
            "pass=backward,head_dim=64;pass=forward,head_dim=32",
            "fwd_32_fp16 fwd_32_bf16 bwd_64_bf16",
        ),
        (SM90_TABLE, "family=sm80,variant=plain", "fwd_128_bf16"),
        (SM90_TABLE, "variant=features|decode", "fwd_128_bf16_features fwd_128_bf16_decode"),
        (SM90_TABLE, "kind=tiles,family=sm80", "fwd_128_bf16 fwd_128_bf16_features"),
        (SM90_TABLE, "kind=decode", "fwd_128_bf16_decode"),
        (SM90_TABLE, "family=sm90,variant=plain|short", "fwd_128_bf16_short fwd_128_bf16"),
        (SM90_TABLE, "most_causal_seqlen=1000", "fwd_128_bf16_short"),
        (BACKWARD_TABLE, "pass=backward,family=sm90", "bwd_128_bf16 bwd_128_bf16_dropout"),
        (BACKWARD_TABLE, "pass=backward,family=sm90,variant=plain", "bwd_128_bf16"),
        (BACKWARD_TABLE, "finishes_dq=false", "bwd_128_bf16 bwd_128_bf16_dropout"),
        # A field of one pass alone excludes the other.
        (TABLE, "stages_q=2", "bwd_64_bf16 bwd_128_bf16"),
    ],
)
def test_rows_are_chosen(table, row_filter: str, names: str) -> None:
    def short(row: KernelRow) -> str:
        variant = f"_{row.variant}" * bool(row.variant)
        return f"{row.kernel_pass.value}_{row.head_dim}_{row.dtype.value}{variant}"

    assert [short(row) for row in select_rows(row_filter, table)] == names.split()


def test_an_empty_filter_selects_every_row() -> None:
    assert select_rows("") == list(ALL_ROWS)


def test_every_row_is_chosen_by_what_it_says_of_itself() -> None:
    kinds = {Pass.forward: "pass=forward,kind={row.kind.value}", Pass.backward: "pass=backward"}
    for row in ALL_ROWS:
        clause = (
            f"{kinds[row.kernel_pass].format(row=row)},family={row.family.value},"
            f"head_dim={row.head_dim},head_dim_v={row.value_dim},dtype={row.dtype.value},"
            f"mask={row.mask.value},variant={row.variant or 'plain'}"
        )
        assert select_rows(clause) == [row]


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
        ("head_dim=128;pass=forward,stages_q=2", "matches 'pass=forward,stages_q=2'"),
    ],
)
def test_a_filter_that_says_nothing_of_the_table_is_refused(row_filter, complaint) -> None:
    with pytest.raises(RowFilterError, match=re.escape(complaint)):
        select_rows(row_filter, TABLE)
