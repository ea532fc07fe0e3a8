"""The backward kernels of Hopper GPUs: agreement with the reference, that a CTA finds its way
through many tiles, and that they give the same bits.

What holds of any kernel is tested elsewhere too, and on a Hopper GPU of these.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.cases import families
from tests.cases.attention import Alibi, AttentionCase, VarlenCase
from tests.cases.harness import (
    ON_CPU,
    Check,
    assert_same_bits,
    bits,
    check_rows_behind,
    make_case,
    make_varlen_case,
    run_forward_backward,
    scaled,
    skip_without_row,
)
from tests.cases.matrix import BOTH, Call, check_calls, each, grid, inputs_of
from tests.cases.repeats import assert_repeatable
from tests.hopper.sm90 import (
    CAUSAL,
    EVERY_HEAD_DIM,
    HEAD_DIMS,
    assert_shares_heads,
    multiprocessors,
    random_lengths,
    runs_sm90_kernels,
    shared_case,
)

__all__ = ["runs_sm90_kernels"]  # pytest finds it here

pytestmark = pytest.mark.gpu


def assert_repeats(case: AttentionCase | VarlenCase, repeats: int, **options: bool) -> None:
    inputs = case.make_inputs()
    first = run_forward_backward(case, inputs)
    for _ in range(repeats):
        assert_same_bits(run_forward_backward(case, inputs), first, str(case), **options)


# -- agreement with the reference (test_forward.py has pairs of everything) ------------------------


@EVERY_HEAD_DIM
@pytest.mark.parametrize(
    ("lengths", "features"),
    [
        ((300, 67), {"causal": True}),
        ((100, 390), {"window": (0, 0)}),
        ((260, 129), {"softcap": 4.0, "deterministic": True}),
    ],
    ids=str,
)
def test_ctas_that_share_a_key_head(
    check: Check, head_dim: int, lengths: tuple[int, int], features: dict[str, Any]
) -> None:
    """Few key heads: fp32 partial sums, of tiles that no query sees too."""
    case = make_case(
        batch=1,
        seqlen_q=lengths[0],
        seqlen_k=lengths[1],
        num_heads_q=16,
        num_heads_k=1,
        head_dim=head_dim,
        **features,
    )
    assert_shares_heads(case)
    check(case)


# -- many tiles for every CTA ----------------------------------------------------------------------

LENGTHS_Q, LENGTHS_K = (random_lengths(seed, scaled(40, 6), scaled(400, 150)) for seed in (1, 2))
USED_K = tuple(n // (1 + index % 3) for index, n in enumerate(LENGTHS_K))
MANY_TILES: dict[str, list[Call]] = {
    # 136 key heads: one round and a little, so that no CTA takes a head.
    "of each": grid(
        batch=17, heads=(16, 8), head_dim=[*HEAD_DIMS],
        of=[
            {"lengths": (60, 300)},  # one query tile
            {"lengths": (300, 300), "causal": True},
            {"lengths": (300, 200), "window": (-1, 7), "deterministic": True},
            {"lengths": (60, 600), "window": (64, 0)},  # most without queries, between others
            {"lengths": (300, 130), "window": (64, 0)},  # queries without keys
            {"lengths": (0, 200)},  # no tile has queries
        ],
    ),
    "of shared key heads": grid(
        lengths_q=(200, 0, 150), lengths_k=(60, 20, 0), heads=(8, 1), head_dim=[*HEAD_DIMS]
    ),
    "of packed sequences": [
        call
        for d in HEAD_DIMS
        for call in grid(
            lengths_q=random_lengths(d, scaled(25, 6), scaled(500, 150)),
            lengths_k=random_lengths(d + 1, scaled(25, 6), scaled(500, 150)),
            heads=(8, 4), head_dim=d, causal=BOTH,
            of=[{}, {"dropout_p": 0.2, "deterministic": True}],
        )
    ],
    # Tiles that end within a sequence's rows, or lie behind the keys that are used.
    "of partly used sequences": grid(
        lengths_q=LENGTHS_Q, lengths_k=LENGTHS_K, num_heads_k=2, head_dim=[*HEAD_DIMS],
        used_q=tuple(n // (1 + index % 4) for index, n in enumerate(LENGTHS_Q)), used_k=USED_K,
        of=[
            {"window": (90, 30)},
            {"leftpad": tuple(min(n, index * 7 % 50) for index, n in enumerate(USED_K))},
        ],
    ),
}  # fmt: skip


@each(MANY_TILES)
def test_many_tiles_for_every_cta(check: Check, calls: list[Call]) -> None:
    check_calls(check, calls)


# -- last tiles that CTAs share --------------------------------------------------------------------


@pytest.mark.parametrize("head_dim", [64, 72, 128])
@pytest.mark.parametrize(
    "fields",
    [
        {"seqlen_q": 700, "seqlen_k": 100},  # dq without sums
        {"seqlen_q": 700, "seqlen_k": 200},
        {"seqlen_q": 900, "seqlen_k": 900, "num_heads_q": 4, "num_heads_k": 4},  # all tiles
        {"seqlen_q": 600, "seqlen_k": 1100, "num_heads_q": 6, "num_heads_k": 2},
        {"seqlen_q": 3000, "seqlen_k": 90, "num_heads_q": 8, "num_heads_k": 1},  # and partial sums
        {"seqlen_q": 700, "seqlen_k": 400, "dtype": torch.float16},
    ],
    ids=str,
)
def test_last_tiles_in_parts(check: Check, head_dim: int, fields: dict[str, Any]) -> None:
    check(shared_case(head_dim=head_dim, **fields))


@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_key_gradients_of_tiles_in_parts_repeat(head_dim: int) -> None:
    case = shared_case(head_dim=head_dim, seqlen_q=1500, seqlen_k=300, num_heads_q=8, num_heads_k=4)
    assert_repeats(case, scaled(50, 2))


# -- all key tiles of a head in one CTA ------------------------------------------------------------


def swept_case(head_dim: int, **fields: Any) -> AttentionCase:
    """A head for every SM, short enough for L2 or of few key tiles."""
    heads = {"num_heads_q": multiprocessors(3), "num_heads_k": multiprocessors(3)}
    case = make_case(**{"batch": 1, **heads, "head_dim": head_dim, **fields})
    skip_without_row(case)
    if not ON_CPU:
        # Pairs of CTAs do not.
        assert families.planned(case, "backward")["sweeps"] == (head_dim <= 128), str(case)
    return case


@EVERY_HEAD_DIM
@pytest.mark.parametrize(
    ("lengths", "features"),
    [
        ((130, 300), {}),  # forth and back
        ((130, 257), {"causal": True}),  # queries with one, two and three key tiles
        ((400, 500), {"causal": True}),  # more than fits L2 above head dim 64
        ((130, 129), {"causal": True}),  # a query without keys
        ((65, 700), {"window": (90, 0)}),  # tiles without queries, first and last ones in between
        ((100, 290), {"window": (30, -1)}),  # from the last key tile on
        ((129, 190), {"window": (-1, 20)}),
        ((130, 200), {"softcap": 3.0, "dropout_p": 0.2}),
        ((130, 200), {"alibi": Alibi.per_head, "causal": True, "dtype": torch.float16}),
    ],
    ids=str,
)
def test_sweeps(
    check: Check, head_dim: int, lengths: tuple[int, int], features: dict[str, Any]
) -> None:
    check(swept_case(head_dim, seqlen_q=lengths[0], seqlen_k=lengths[1], **features))


def test_sweeps_of_several_rounds_and_of_heads_that_share_keys(check: Check) -> None:
    for fields in (
        {"batch": 3, "seqlen_q": 200, "seqlen_k": 333},
        {"batch": 2, "seqlen_q": 150, "seqlen_k": 260, "causal": True},
    ):
        case = swept_case(64, **fields)
        check(case)
        # Twice the bytes a sweep has to have, so half the queries.
        shared = {"num_heads_k": case.num_heads_q // 2, "batch": 2 * case.batch}
        check(swept_case(64, **{**fields, **shared, "seqlen_q": fields["seqlen_q"] // 2}))


def test_sweeps_of_some_of_the_heads_that_share_keys(check: Check) -> None:
    """With partial sums of the keys' gradients."""
    batch = multiprocessors(8) // 4
    for features in ({}, {"causal": True}):
        heads = {"num_heads_q": 8, "num_heads_k": 1}
        case = swept_case(64, batch=batch, **heads, seqlen_q=260, seqlen_k=130, **features)
        if not ON_CPU:
            assert families.planned(case, "backward")["dkdv_splits"] == 4
        check(case)


@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_sweeps_give_the_same_bits(head_dim: int) -> None:
    """Of dq as well, which has an order here that nobody asked for."""
    case = swept_case(head_dim, seqlen_q=130, seqlen_k=270, causal=True)
    assert_repeats(case, scaled(20, 2), deterministic=True)


# -- all key tiles of a packed sequence in one CTA -------------------------------------------------

# Sequences of one key tile, of several, of none, and one that is too long.
SWEPT_LENGTHS = (280, 257, 129, 0, 400, 70, 17, 200, 270, 256)


def check_swept(case: VarlenCase, least: int, beyond: int) -> None:
    """Whether sequences are swept that have `least` rows and not those that have `beyond`."""
    skip_without_row(case)
    if ON_CPU:
        return
    rows = families.planned(case, "backward")["sequence_table"]["swept_rows"]
    # Pairs of CTAs do not.
    assert (least <= rows < beyond) if case.head_dim <= 128 else rows == 0, str(case)


def swept_packed_case(head_dim: int, **fields: Any) -> VarlenCase:
    """Four times these sequences and a head for every fourth SM, so that most are short beside what
    a CTA does.
    """
    heads = multiprocessors(12) // 4
    lists = {"lengths_q": SWEPT_LENGTHS} | fields
    repeated = {x: 4 * of for x, of in lists.items() if x.startswith(("lengths", "used", "left"))}
    shape = {"num_heads_q": heads, "num_heads_k": heads, "head_dim": head_dim}
    case = make_varlen_case(**shape, **{**lists, **repeated})
    check_swept(case, 280, 400)
    return case


@EVERY_HEAD_DIM
@pytest.mark.parametrize(
    "features",
    [
        {},
        {"causal": True},
        {"causal": True, "dtype": torch.float16},
        {"lengths_k": (280, 130, 270, 90, 420, 0, 129, 257, 150, 260), "causal": True},
        {"lengths_k": (65, 270, 150, 20, 130, 420, 257, 200, 280, 129)},
        {"window": (90, 0)},  # tiles without queries
        {"window": (30, -1)},  # from the last key tile on
        {"window": (-1, 20)},
        {"used_q": (280, 100, 0, 0, 400, 1, 17, 130, 270, 0),
         "used_k": (200, 257, 129, 0, 130, 70, 0, 150, 0, 256), "causal": True},
        {"used_k": (280, 257, 129, 0, 390, 70, 9, 190, 270, 256),
         "leftpad": (7, 0, 129, 0, 70, 1, 0, 50, 100, 200)},
        {"softcap": 3.0},
        {"alibi": Alibi.per_batch, "causal": True, "dtype": torch.float16},
    ],
    ids=str,
)  # fmt: skip
def test_sweeps_of_packed_sequences(check: Check, head_dim: int, features: dict[str, Any]) -> None:
    check(swept_packed_case(head_dim, **features))


def test_sweeps_of_packed_sequences_whose_heads_share_keys(check: Check) -> None:
    lengths = tuple(length // 2 for length in SWEPT_LENGTHS) * 4
    for heads in ((80, 40), (96, 24)):
        case = make_varlen_case(
            lengths_q=lengths,
            lengths_k=lengths[::-1],
            num_heads_q=scaled(heads[0], 4),
            num_heads_k=scaled(heads[1], 2),
            causal=True,
        )
        check_swept(case, 140, 200)
        check(case)


def test_sweeps_of_packed_sequences_and_of_some_of_the_heads_that_share_keys(check: Check) -> None:
    """With partial sums of the keys' gradients, of longer sequences as well."""
    case = make_varlen_case(
        lengths_q=(140,) * 8 + (372,) * 8,
        num_heads_q=scaled(32, 4),
        num_heads_k=scaled(4, 1),
        causal=True,
    )
    check_swept(case, 140, 372)
    assert_shares_heads(case)
    check(case)


@EVERY_HEAD_DIM
def test_sweeps_of_packed_sequences_with_dropout(check: Check, head_dim: int) -> None:
    case = make_varlen_case(
        lengths_q=(150, 130, 0, 140, 20, 200) * 6,
        num_heads_q=scaled(36, 3),
        num_heads_k=scaled(36, 3),
        head_dim=head_dim,
        dropout_p=0.2,
        causal=True,
    )
    check_swept(case, 150, 200)
    check(case)


@EVERY_HEAD_DIM
def test_rows_behind_swept_sequences_get_zeros(head_dim: int) -> None:
    """They are a sequence without queries and keys, of two key tiles."""
    case = make_varlen_case(
        lengths_q=(150, 130, 0, 140, 20, 200) * 6,
        num_heads_q=scaled(36, 3),
        num_heads_k=scaled(36, 3),
        head_dim=head_dim,
    )
    check_swept(case, 150, 200)
    check_rows_behind(case, 150, 140)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_sweeps_of_packed_sequences_beside_one_whose_dq_idle_warps_finish(
    check: Check, head_dim: int
) -> None:
    """Of keys enough for that (finish_keys_full)."""
    keys = scaled(6000 if head_dim == 64 else 3000, 700)
    case = make_varlen_case(
        lengths_q=(200, 130, 200, 210, 50, 200, scaled(700, 100)),
        lengths_k=(200, 210, 190, 130, 200, 200, keys),
        num_heads_q=scaled(20, 2),
        num_heads_k=scaled(20, 2),
        head_dim=head_dim,
    )
    check_swept(case, 210, 700)
    if not ON_CPU:
        assert families.planned(case, "backward")["dq_path"] == "finished"
    check(case)


@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_sweeps_of_packed_sequences_give_the_same_bits(head_dim: int) -> None:
    """Of dq as well, where all are short."""
    lengths = (280, 257, 129, 0, 250, 270, 17, 200)
    case = swept_packed_case(head_dim, lengths_q=lengths, causal=True)
    assert_repeats(case, scaled(20, 2), deterministic=True)


# -- the same bits ---------------------------------------------------------------------------------


def many_heads_case(head_dim: int, **features: Any) -> AttentionCase:
    """Several tiles of every head, and more of them than SMs."""
    sizes = {"batch": scaled(6, 2), "num_heads_q": scaled(16, 4), "num_heads_k": scaled(16, 4)}
    sizes |= {"seqlen_q": scaled(500, 90), "seqlen_k": scaled(530, 150)}
    return make_case(**{**sizes, "head_dim": head_dim, **features})


@EVERY_HEAD_DIM
@CAUSAL
@pytest.mark.parametrize("deterministic", [False, True], ids=["unordered", "ordered"])
def test_repeated_runs_give_the_same_bits(head_dim: int, causal: bool, deterministic: bool) -> None:
    """Without an order all but dq."""
    order = {"causal": causal, "deterministic": deterministic}
    for heads_k in (scaled(16, 4), scaled(4, 2)):
        case = many_heads_case(head_dim, num_heads_k=heads_k, **order)
        assert_repeatable(case, scaled(20, 2))
    few = {"batch": 1, "seqlen_k": 140, "num_heads_k": 1}  # keys' gradients in partial sums
    assert_repeatable(many_heads_case(head_dim, **few, **order), scaled(20, 2))


@EVERY_HEAD_DIM
def test_a_head_does_not_depend_on_its_company(head_dim: int) -> None:
    """Whatever CTA takes its tiles, after whose, and whatever those hold."""
    case = many_heads_case(head_dim, causal=True, deterministic=True)
    inputs = inputs_of(case)
    expected = run_forward_backward(case, inputs)
    names = ("q", "k", "v", "dout")
    for batch, head in ((0, 0), (1, 3), (case.batch - 1, case.num_heads_q - 1)):
        at = (slice(batch, batch + 1), slice(None), slice(head, head + 1))
        alone = {name: getattr(inputs, name)[at] for name in names}
        alone["dlse"] = inputs.dlse[batch : batch + 1, head : head + 1]
        one = replace(case, batch=1, num_heads_q=1, num_heads_k=1)
        result = run_forward_backward(one, replace(inputs, **alone))
        for name, x in result.tensors().items():
            y = expected.tensors()[name][at[::2] if name == "lse" else at]
            assert torch.equal(bits(x), bits(y)), (name, batch, head)
    for bad in (torch.nan, torch.inf):
        for name in names:
            getattr(inputs, name)[1, 7, 2] = bad
        dirty = run_forward_backward(case, inputs)
        assert not dirty.dk[1, 7, 2].isfinite().any() and not dirty.out[1, 7:, 2].isfinite().any()
        for result in (expected, dirty):
            result.lse[1, 2] = 0.0
            for name in ("out", "dq", "dk", "dv"):
                result.tensors()[name][1, :, 2] = 0.0
        assert_same_bits(dirty, expected, str(bad), deterministic=True)
