"""The backward kernels of Hopper GPUs in which two CTAs share a tile of keys: agreement with the
reference, and the same bits.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.cases import families
from tests.cases.attention import AttentionCase, VarlenCase
from tests.cases.harness import (
    ON_CPU,
    Check,
    make_case,
    scaled,
    skip_without_row,
)
from tests.cases.masked import MaskedCase
from tests.cases.matrix import BOTH, DTYPES, Call, check_calls, each, grid, pairs
from tests.cases.repeats import REPEATS, assert_repeatable, crowded_case
from tests.hopper.sm90 import (
    CAUSAL,
    MASKS,
    assert_shares_heads,
    runs_sm90_kernels,
    shared_case,
)

__all__ = ["runs_sm90_kernels"]  # pytest finds it here

pytestmark = pytest.mark.gpu

# Of pairs of CTAs: the second one's half of a query tile or of a key tile may not exist, and the
# boxes of K that one has of the other's keys may have no column.
HEAD_DIMS_OF_192 = ((136, 136), (152, 152), (168, 136), (184, 184), (192, 128), (192, 72))
HEAD_DIMS_OF_256 = ((200, 200), (232, 200), (248, 248), (256, 256))
PAIRS: dict[str, list[Call]] = {
    "of wide heads": pairs(
        seed=7,
        head_dims=[*HEAD_DIMS_OF_192, (192, 192), *HEAD_DIMS_OF_256],
        dtype=DTYPES,
        seqlen_q=[1, 31, 32, 33, 64, 97, 160],
        seqlen_k=[1, 63, 64, 65, 128, 129, 192, 193, 330],
        heads=[(2, 2), (4, 1)],
        mask=MASKS,
        deterministic=BOTH,
    )
}


@each(PAIRS)
def test_two_ctas_a_tile(check: Check, calls: list[Call]) -> None:
    check_calls(check, calls)


# Of long sequences at head_dim 128 as well, and here each CTA has two parts of 64 keys. Few queries
# see many keys of every case.
LONG: dict[str, list[Call]] = {
    "pairs": pairs(
        seed=8,
        head_dim=[104, 120, 128],
        dtype=DTYPES,
        seqlen_q=[1, 31, 33, 64, 65, 97, 160, 330],
        seqlen_k=[2050, 2111, 2176, 2177, 2240, 2304, 2305, 2430],
        heads=[(2, 2), (4, 1)],
        mask=[
            *({}, {"causal": True}),
            *({"window": window} for window in ((1900, -1), (1600, 0), (-1, 7), (1600, 300))),
        ],
        deterministic=BOTH,
    ),
    "packed": grid(
        lengths_q=(70, 0, 200, 1, 64),
        lengths_k=(2500, 2100, 2305, 1900, 2431),
        heads=(4, 2),
        head_dim=128,
        of=[
            *({}, {"causal": True}, {"causal": True, "deterministic": True}),
            {"used_q": (70, 0, 100, 1, 7), "used_k": (2500, 1, 0, 1900, 1000)},
            {
                **{"used_q": (70, 0, 100, 1, 7), "used_k": (2500, 1, 0, 1900, 1000)},
                "leftpad": (5, 0, 0, 1000, 129),
            },
        ],
    ),
}


def pair_case(case: AttentionCase | VarlenCase) -> AttentionCase | VarlenCase:
    skip_without_row(case)
    if not ON_CPU:
        assert families.planned(case, "backward")["instance"].endswith("_pair"), str(case)
    return case


@each(LONG)
def test_two_ctas_a_tile_of_long_sequences(check: Check, calls: list[Call]) -> None:
    for call in calls:
        assert isinstance(call.case, MaskedCase)
        pair_case(call.case.of)
    check_calls(check, calls)


@pytest.mark.parametrize(
    "features",
    [{}, {"causal": True}, {"window": (1700, 20), "num_heads_k": 1}],
    ids=["full", "causal", "window_mqa"],
)
def test_two_ctas_a_tile_repeat_bits(features: dict[str, Any]) -> None:
    """They take their turns as well."""
    case = crowded_case(
        head_dim=128, seqlen_q=scaled(1900, 100), seqlen_k=scaled(3100, 200), **features
    )
    assert_repeatable(pair_case(case), REPEATS)


@pytest.mark.parametrize("head_dims", [(128, 72), (104, 128), (128, 128)], ids=str)
def test_pairs_of_ctas_that_share_a_key_head(check: Check, head_dims: tuple[int, int]) -> None:
    """Partial sums of dk and dv, of values of other head dims too."""
    case = make_case(
        batch=1,
        seqlen_q=700,
        seqlen_k=1100,
        num_heads_q=16,
        num_heads_k=1,
        head_dim=head_dims[0],
        head_dim_v=head_dims[1],
    )
    assert_shares_heads(case)
    check(pair_case(case))


def test_pairs_of_ctas_take_many_tiles(check: Check) -> None:
    """More than there are pairs, of which some see no query; and the last ones in parts."""
    for fields in (
        {"seqlen_q": 64, "window": (1600, -1), "seqlen_k": 2700},
        {"seqlen_q": 400, "causal": True},
        {"seqlen_q": 700, "num_heads_q": scaled(20, 4)},
    ):
        heads = scaled(20, 2)
        sizes = {"batch": 1, "num_heads_q": heads, "num_heads_k": heads // 2, "seqlen_k": 2200}
        check(pair_case(make_case(**{**sizes, "head_dim": 128, **fields})))
    case = shared_case(
        head_dim=128, seqlen_q=900, seqlen_k=2100, num_heads_q=8, num_heads_k=8, causal=False
    )
    check(pair_case(case))


@CAUSAL
def test_pairs_of_ctas_give_the_same_bits(causal: bool) -> None:
    """Of all but dq."""
    sizes = {"seqlen_q": scaled(600, 60), "seqlen_k": scaled(2500, 150), "head_dim": 128}
    heads = {"num_heads_q": scaled(16, 2), "num_heads_k": scaled(8, 2)}
    assert_repeatable(pair_case(make_case(**sizes, **heads, batch=1, causal=causal)), scaled(20, 2))
