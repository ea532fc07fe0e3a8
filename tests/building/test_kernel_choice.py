"""Which row of the kernel table a call finds on a Hopper GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kernel_table.all_rows import ALL_ROWS, BACKWARD_ROWS, FORWARD_ROWS
from kernel_table.row import BackwardRow, Dtype, Family, Feature, ForwardRow, Kind, Pass
from tests.building.kernel_rows import least_keys, most_seqlen

SM90_ROWS = [row for row in ALL_ROWS if row.family is Family.sm90]
# Without the kinds that only some calls ask for.
BF16_ROWS = [
    row
    for row in SM90_ROWS
    if row.dtype is Dtype.bf16 and getattr(row, "kind", Kind.tiles) is Kind.tiles
]
SOFTCAP, ALIBI, DROPOUT = Feature.softcap, Feature.alibi, Feature.dropout
PLAIN, MODIFIERS = Feature(0), SOFTCAP | ALIBI
ANY_LENGTH = 1 << 20


def chosen(
    pass_name: str,
    head_dim: int,
    features: Feature = PLAIN,
    value_dim: int | None = None,
    *,
    seqlen: int = ANY_LENGTH,
    is_causal: bool = True,
    keys: int = 1,
) -> ForwardRow | BackwardRow:
    """The rule of select_instance.cpp, on a GPU and tensors that suit every row. keys: that a query
    sees, on average. The kernels with lists walk nothing else.
    """
    return next(
        row
        for row in BF16_ROWS
        if row.kernel_pass is Pass[pass_name]
        and row.head_dim >= head_dim
        and row.value_dim >= (value_dim or head_dim)
        and features in row.features
        and (Feature.block_sparse in features or Feature.block_sparse not in row.features)
        and seqlen <= most_seqlen(row)[0 if is_causal else 1]
        and keys >= least_keys(row)[1 if is_causal else 0]
    )


@pytest.mark.parametrize("rows", [FORWARD_ROWS, BACKWARD_ROWS])
def test_sm90_rows_come_first(rows) -> None:
    """Where they run they are faster than any other that would serve."""
    of_sm90 = [row for row in rows if row.family is Family.sm90]
    assert of_sm90 and rows[: len(of_sm90)] == tuple(of_sm90)


# The variant that calls of long sequences find, by what they come with: for each head dim that has
# rows, which serve head dims up to theirs. A feature's code costs speed, so plain calls run none.
HEAD_DIMS = (64, 96, 128, 192, 256)
VARIANTS: dict[tuple[str, tuple[Feature, ...]], tuple[str, ...]] = {
    ("forward", (PLAIN,)): ("",) * 5,
    ("forward", (ALIBI,)): ("alibi",) * 3 + ("dropout",) * 2,
    ("forward", (SOFTCAP, MODIFIERS, DROPOUT, ALIBI | DROPOUT)): ("dropout",) * 5,
    ("backward", (PLAIN,)): ("",) * 5,
    ("backward", (ALIBI,)): ("alibi",) * 3 + ("dropout",) * 2,
    ("backward", (DROPOUT, ALIBI | DROPOUT)): ("dropout",) * 5,
    # A softcap alone pays for its weights.
    ("backward", (SOFTCAP, MODIFIERS)): ("softcap",) * 3 + ("dropout",) * 2,
    ("backward", (SOFTCAP | DROPOUT, MODIFIERS | DROPOUT)): ("softcap_dropout",) * 3
    + ("dropout",) * 2,
}


@pytest.mark.parametrize(("pass_name", "asked"), VARIANTS)
def test_calls_find_the_narrowest_row_with_the_fewest_features(pass_name, asked) -> None:
    for head_dim in range(8, 257, 8):
        place = next(i for i, own in enumerate(HEAD_DIMS) if head_dim <= own)
        wanted = (HEAD_DIMS[place], VARIANTS[pass_name, asked][place])
        for features in asked:
            for more in (PLAIN, Feature.deterministic)[: 1 + (pass_name == "backward")]:
                row = chosen(pass_name, head_dim, features | more)
                assert (row.head_dim, row.variant) == wanted, (head_dim, features, more)


@pytest.mark.parametrize("pass_name", ["forward", "backward"])
def test_lists_alone_and_a_bias_alone_have_rows(pass_name: str) -> None:
    for head_dim, row_dim in ((8, 64), (64, 64), (72, 128), (128, 128)):
        for features, variant in ((Feature.block_sparse, "sparse"), (Feature.bias, "bias")):
            row = chosen(pass_name, head_dim, features)
            assert (row.head_dim, row.variant) == (row_dim, variant)


def test_short_sequences_have_a_row_of_their_own() -> None:
    (short,) = (row for row in BF16_ROWS if row.variant == "short")
    for is_causal, most in ((True, short.most_causal_seqlen), (False, short.most_full_seqlen)):
        assert most > 0
        for seqlen, is_short in ((1, True), (most, True), (most + 1, False)):
            call = {"seqlen": seqlen, "is_causal": is_causal}
            assert (chosen("forward", short.head_dim, **call) == short) is is_short
            assert chosen("forward", short.head_dim, DROPOUT, **call) != short


# Higher tiles of the forward, pairs of CTAs of the backward.
LONG_ROWS = {
    (row.kernel_pass.name, row.head_dim, row.variant): row
    for row in BF16_ROWS
    if least_keys(row) != (0, 0)
}


def test_some_head_dims_have_rows_for_queries_that_see_many_keys() -> None:
    assert set(LONG_ROWS) == {
        ("forward", 64, "long_modifiers"),
        ("forward", 96, "long"),
        ("forward", 96, "long_modifiers"),
        ("forward", 128, "long"),
        ("backward", 128, "pair"),
    }
    for (pass_name, _, _), row in LONG_ROWS.items():
        assert row.block_m == 192 if pass_name == "forward" else row.ctas_per_tile == 2


@pytest.mark.parametrize("key", LONG_ROWS, ids=str)
def test_queries_that_see_many_keys_find_them(key: tuple[str, int, str]) -> None:
    long, (pass_name, head_dim, _) = LONG_ROWS[key], key
    wanted, others = [PLAIN], [SOFTCAP, ALIBI, MODIFIERS, DROPOUT, Feature.block_sparse]
    if pass_name == "backward":
        wanted.append(Feature.deterministic)
    elif long.features:
        wanted, others = [SOFTCAP, ALIBI, MODIFIERS], [DROPOUT, MODIFIERS | DROPOUT]
    for is_causal, least in ((True, long.least_keys_windowed), (False, long.least_keys_full)):
        assert least > 1
        for keys, is_long in ((least - 1, False), (least, True), (1 << 30, True)):
            call = {"is_causal": is_causal, "keys": keys}
            for features in wanted:
                assert (chosen(pass_name, head_dim, features, **call) == long) is is_long
            for features in others:
                if head_dim != 96 or Feature.block_sparse not in features:  # which 96 has none of
                    assert chosen(pass_name, head_dim, features, **call) != long


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
    for pass_name in ("forward", "backward"):
        row = chosen(pass_name, head_dim, value_dim=value_dim)
        assert (row.head_dim, row.value_dim) == row_dims
    with_dropout = chosen("forward", head_dim, DROPOUT, value_dim)
    assert with_dropout.value_dim == with_dropout.head_dim


def test_rows_of_narrow_values_say_so_and_are_of_sm90() -> None:
    narrow = [row for row in ALL_ROWS if row.head_dim_v is not None and not row.is_latent]
    assert {row.kernel_pass for row in narrow} == set(Pass)
    for row in narrow:
        assert row.family is Family.sm90 and row.value_dim < row.head_dim
        assert f"_hd{row.head_dim}_dv{row.value_dim}_" in row.name
        twins = [replace(row, head_dim_v=None), replace(row, head_dim_v=64)]
        assert all(row.tile != twin.tile for twin in twins)


def test_tiles_are_tall_where_their_kind_says_so() -> None:
    for row in SM90_ROWS:
        if isinstance(row, ForwardRow) and not row.is_latent:
            assert row.kind is (Kind.tall if row.block_m == 256 else Kind.tiles)


def test_latent_rows_are_told_apart_by_the_rows_of_a_sequence() -> None:
    """The first that has them all runs, of e4m3 those that convert. The decode rows serve what
    neither TMA nor vectors can load, and GPUs by their shared memory.
    """
    latent = [row for row in FORWARD_ROWS if row.is_latent and row.dtype is Dtype.bf16]
    assert all(row.head_dim == 64 and "latent" in row.config()["features"].name for row in latent)
    of_sm90 = [
        (row.value_dim, row.block_m, row.is_e4m3) for row in latent if row.kind is Kind.latent
    ]
    in_16_bits = [(columns, rows, False) for columns in (256, 512) for rows in (16, 32, 64)]
    assert sorted(of_sm90) == sorted([*in_16_bits, (512, 16, True), (512, 32, True)])
    decoding = [(row.value_dim, row.variant) for row in latent if row.kind is Kind.decode]
    assert decoding == [(512, "decode_latent"), (512, "decode_latent_smem99k")]
    assert len(latent) == len(of_sm90) + len(decoding)
