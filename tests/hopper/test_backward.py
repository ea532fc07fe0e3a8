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
from tests.cases.pairwise import pairwise
from tests.cases.repeats import assert_repeatable
from tests.hopper.sm90 import (
    CAUSAL,
    EVERY_HEAD_DIM,
    FOUR_PARTS,
    MASKS,
    many_sequences,
    random_lengths,
    runs_sm90_kernels,
    shaped_case,
    shared_case,
)

__all__ = ["runs_sm90_kernels"]  # pytest finds it here

pytestmark = pytest.mark.gpu

GRADIENTS = ("dq", "dk", "dv")


# -- agreement with the reference ------------------------------------------------------------------

LENGTHS = (0, 1, 63, 64, 65, 127, 128, 129, 130, 257, 400)
SHAPES: dict[str, tuple[Any, ...]] = {
    "head_dim": (8, 40, 64, 72, 96, 104, 128, 160, 192, 224, 256),
    "dtype": (torch.bfloat16, torch.float16),
    "seqlen_q": LENGTHS,
    "seqlen_k": LENGTHS,
    "heads": ((2, 2), (4, 1), (6, 2)),
    "mask": MASKS,
    "softmax_scale": (None, 0.3),
}
FEATURES: dict[str, tuple[Any, ...]] = {
    "head_dim": (8, 64, 72, 96, 128, 192, 224, 256),
    "dtype": (torch.bfloat16, torch.float16),
    "seqlen_q": (1, 64, 65, 129, 200),
    "seqlen_k": (1, 63, 65, 127, 129, 193, 301),
    "heads": ((2, 2), (6, 2)),
    "mask": MASKS,
    "softcap": (0.0, 3.0),
    "alibi": (None, *Alibi),
    "dropout_p": (0.0, 0.2),
    "deterministic": (False, True),
}


@FOUR_PARTS
def test_shapes(check: Check, part: int) -> None:
    """Every pair of a head dim, a length, a mask and so on."""
    for choice in pairwise(SHAPES, seed=5)[part :: 4 * scaled(1, 4)]:
        check(shaped_case(**choice))


@FOUR_PARTS
def test_features(check: Check, part: int) -> None:
    for choice in pairwise(FEATURES, seed=6)[part :: 4 * scaled(1, 4)]:
        check(shaped_case(**choice, batch=1))


@EVERY_HEAD_DIM
def test_scales(check: Check, head_dim: int) -> None:
    for scale in (0.0, -0.0, 5.0, -0.3):
        check(make_case(seqlen_q=130, seqlen_k=100, head_dim=head_dim, softmax_scale=scale))


@EVERY_HEAD_DIM
def test_ctas_that_share_a_key_head(check: Check, head_dim: int) -> None:
    """Few key heads: fp32 partial sums, of tiles that no query sees too."""
    for lengths, mask in (
        ((300, 67), {"causal": True}),
        ((100, 390), {"window": (0, 0)}),
        ((260, 129), {"softcap": 4.0, "deterministic": True}),
    ):
        case = make_case(
            batch=1,
            seqlen_q=lengths[0],
            seqlen_k=lengths[1],
            num_heads_q=16,
            num_heads_k=1,
            head_dim=head_dim,
            **mask,
        )
        if not ON_CPU:
            assert families.planned(case, "backward")["dkdv_splits"] > 1, str(case)
        check(case)
    packed = {"lengths_q": (200, 0, 150), "lengths_k": (60, 20, 0), "num_heads_k": 1}
    check(make_varlen_case(**packed, num_heads_q=8, head_dim=head_dim))


# -- many tiles for every CTA ----------------------------------------------------------------------


@EVERY_HEAD_DIM
@pytest.mark.parametrize(
    ("lengths", "mask"),
    [
        ((60, 300), {}),  # one query tile
        ((300, 300), {"causal": True}),
        ((300, 200), {"window": (-1, 7), "deterministic": True}),
        ((60, 600), {"window": (64, 0)}),  # most tiles without queries, between others
        ((300, 130), {"window": (64, 0)}),  # queries without keys
        ((0, 200), {}),  # no tile has queries
    ],
    ids=str,
)
def test_many_tiles_for_every_cta(
    check: Check, head_dim: int, lengths: tuple[int, int], mask: dict[str, Any]
) -> None:
    case = make_case(
        batch=scaled(17, 1),  # 136 key heads: one round and a little, so that no CTA takes a head
        seqlen_q=lengths[0],
        seqlen_k=lengths[1],
        num_heads_q=scaled(16, 4),
        num_heads_k=scaled(8, 2),
        head_dim=head_dim,
        **mask,
    )
    check(case)


@CAUSAL
@EVERY_HEAD_DIM
def test_many_tiles_of_packed_sequences(check: Check, head_dim: int, causal: bool) -> None:
    case = many_sequences(head_dim, scaled(25, 6), scaled(500, 150), (8, 4), causal=causal)
    check(case)
    check(replace(case, dropout_p=0.2, deterministic=True))


@EVERY_HEAD_DIM
def test_many_tiles_of_partly_used_sequences(check: Check, head_dim: int) -> None:
    """Tiles that end within a sequence's rows, or lie behind the keys that are used."""
    lengths = random_lengths(1, scaled(40, 6), scaled(400, 150))
    keys = random_lengths(2, len(lengths), scaled(400, 150))
    case = make_varlen_case(
        lengths_q=lengths,
        lengths_k=keys,
        used_q=tuple(n // (1 + index % 4) for index, n in enumerate(lengths)),
        used_k=tuple(n // (1 + index % 3) for index, n in enumerate(keys)),
        num_heads_k=2,
        head_dim=head_dim,
        window=(90, 30),
    )
    check(case)
    leftpad = tuple(min(n, index * 7 % 50) for index, n in enumerate(case.used_k or ()))
    check(replace(case, leftpad=leftpad, window=(-1, -1)))


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
    inputs = case.make_inputs()
    first = run_forward_backward(case, inputs)
    for _ in range(scaled(50, 2)):
        assert_same_bits(run_forward_backward(case, inputs), first, str(case))


# -- all key tiles of a head in one CTA ------------------------------------------------------------


def swept_case(head_dim: int, **fields: Any) -> AttentionCase:
    """A head for every SM, short enough for L2 or of few key tiles."""
    sms = 3 if ON_CPU else torch.cuda.get_device_properties("cuda").multi_processor_count
    sizes = {"batch": 1, "num_heads_q": sms, "num_heads_k": sms}
    case = make_case(**{**sizes, "head_dim": head_dim, **fields})
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
    batch = 2 if ON_CPU else torch.cuda.get_device_properties("cuda").multi_processor_count // 4
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
    inputs = case.make_inputs()
    first = run_forward_backward(case, inputs)
    for _ in range(scaled(20, 2)):
        again = run_forward_backward(case, inputs)
        assert_same_bits(again, first, str(case), deterministic=True)


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
    heads = 3 if ON_CPU else torch.cuda.get_device_properties("cuda").multi_processor_count // 4
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
        {
            "used_q": (280, 100, 0, 0, 400, 1, 17, 130, 270, 0),
            "used_k": (200, 257, 129, 0, 130, 70, 0, 150, 0, 256),
            "causal": True,
        },
        {
            "used_k": (280, 257, 129, 0, 390, 70, 9, 190, 270, 256),
            "leftpad": (7, 0, 129, 0, 70, 1, 0, 50, 100, 200),
        },
        {"softcap": 3.0},
        {"alibi": Alibi.per_batch, "causal": True, "dtype": torch.float16},
    ],
    ids=str,
)
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
    if not ON_CPU:
        assert families.planned(case, "backward")["dkdv_splits"] > 1
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
    inputs = case.make_inputs()
    first = run_forward_backward(case, inputs)
    for _ in range(scaled(20, 2)):
        again = run_forward_backward(case, inputs)
        assert_same_bits(again, first, str(case), deterministic=True)


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
    skip_without_row(case)
    inputs = case.make_inputs()
    expected = run_forward_backward(case, inputs)
    names = ("q", "k", "v", "dout")
    for batch, head in ((0, 0), (1, 3), (case.batch - 1, case.num_heads_q - 1)):
        at = (slice(batch, batch + 1), slice(None), slice(head, head + 1))
        alone = {name: getattr(inputs, name)[at] for name in names}
        alone["dlse"] = inputs.dlse[batch : batch + 1, head : head + 1]
        one = replace(case, batch=1, num_heads_q=1, num_heads_k=1)
        result = run_forward_backward(one, replace(inputs, **alone))
        for name in GRADIENTS:
            x, y = result.tensors()[name], expected.tensors()[name][at]
            assert torch.equal(bits(x), bits(y)), (name, batch, head)
    for bad in (torch.nan, torch.inf):
        for name in names:
            getattr(inputs, name)[1, 7, 2] = bad
        dirty = run_forward_backward(case, inputs)
        assert not dirty.dk[1, 7, 2].isfinite().any()
        for result in (expected, dirty):
            result.lse[1, 2] = 0.0
            for name in ("out", *GRADIENTS):
                result.tensors()[name][1, :, 2] = 0.0
        assert_same_bits(dirty, expected, str(bad), deterministic=True)
