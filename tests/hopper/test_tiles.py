"""The forward kernels of Hopper GPUs where a CTA has many tiles, in a fixed order or drawn:
agreement with the reference, whatever the word held that counts what is drawn.
"""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.cases import families
from tests.cases.attention import Alibi, AttentionCase, VarlenCase
from tests.cases.harness import (
    ON_CPU,
    Check,
    assert_same_bits,
    captured,
    make_case,
    make_varlen_case,
    run_forward,
    scaled,
)
from tests.cases.matrix import BOTH, Call, check_calls, each, grid
from tests.hopper.sm90 import (
    CAUSAL,
    HEAD_DIMS,
    MASKS,
    assert_row,
    most_short_seqlen,
    multiprocessors,
    random_lengths,
    row_name,
    runs_sm90_kernels,
)

__all__ = ["runs_sm90_kernels"]  # pytest finds it here

pytestmark = pytest.mark.gpu


LENGTHS_Q, LENGTHS_K = (random_lengths(seed, scaled(40, 6), scaled(600, 150)) for seed in (1, 2))
USED_K = tuple(n - n // 5 for n in LENGTHS_K)
TABLE: dict[str, list[Call]] = {
    # About 14 rounds of tiles with two to five key blocks.
    "of some blocks": grid(
        batch=40, lengths=(300, 300), heads=(16, 4), head_dim=[*HEAD_DIMS],
        range=MASKS[:2] + MASKS[5:], backward=False,
    ),
    "of few blocks": grid(
        batch=12, heads=(16, 8), head_dim=[*HEAD_DIMS], backward=False,
        of=[
            {"lengths": (300, 60)},  # one key block each
            {"lengths": (300, 200)},  # two or three
            {"lengths": (380, 120)},  # the same of the plain row at 64, whose steps these fill
            {"lengths": (380, 250)},
            {"lengths": (700, 150), "causal": True},  # most tiles see no key
            {"lengths": (500, 300), "window": (64, 0)},  # the first do not
            {"lengths": (300, 500), "window": (0, 0)},
            {"lengths": (40, 700), "causal": True},  # a warpgroup without queries
            {"lengths": (300, 0)},  # no tile sees a key
        ],
    ),
    # From one key block to 16, the long ones first, and beyond the row for short sequences; at
    # head_dim 64 two full rounds, which lower tiles would exceed.
    "of many blocks": grid(
        batch=1, lengths=(2000, 2000), heads=(24, 2), head_dim=[64, 128], causal=True,
        backward=False,
    ),
    "of features": grid(
        batch=9, lengths=(140, 150), heads=(16, 2), head_dim=[*HEAD_DIMS], backward=False,
        of=[{"dropout_p": 0.3, "causal": True}, {"softcap": 4.0, "window": (60, 9)}],
        alibi=[None, Alibi.per_batch],
    ),
    "of packed sequences": [
        call
        for d in HEAD_DIMS
        for call in grid(
            lengths_q=random_lengths(d, scaled(40, 6), scaled(700, 150)),
            lengths_k=random_lengths(d + 1, scaled(40, 6), scaled(700, 150)),
            heads=(4, 2), head_dim=d, causal=BOTH, backward=False,
        )
    ],
    # Tiles that end within a sequence's rows, or lie behind the queries that attend.
    "of partly used sequences": grid(
        lengths_q=LENGTHS_Q, lengths_k=LENGTHS_K, used_k=USED_K,
        used_q=tuple(n // (1 + index % 4) for index, n in enumerate(LENGTHS_Q)),
        leftpad=tuple(min(n, index * 7 % 50) for index, n in enumerate(USED_K)),
        num_heads_k=2, head_dim=[64, 128, 256], window=(90, 30), backward=False,
    ),
}  # fmt: skip


@each(TABLE)
def test_many_tiles_for_every_cta(check: Check, calls: list[Call]) -> None:
    check_calls(check, calls)


@CAUSAL
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_as_many_tiles_as_sms_and_one_more_or_less(
    check: Check, head_dim: int, causal: bool
) -> None:
    """One tile a head: the last round has one CTA's work, or lacks one's. At head_dim 64 that is so
    of longer sequences for the plain row.
    """
    sms = multiprocessors(8)
    tiles = (1, 2, sms - 1, sms, sms + 1, 2 * sms - 1, 2 * sms, 2 * sms + 1, 3 * sms + 1)
    seqlens = ((70, 260), (190, 380)) if head_dim == 64 else ((70, 260),)
    for heads, (seqlen_q, seqlen_k) in itertools.product(tiles, seqlens):
        case = make_case(
            batch=1,
            seqlen_q=seqlen_q,
            seqlen_k=seqlen_k,
            num_heads_q=heads,
            num_heads_k=heads,
            head_dim=head_dim,
            causal=causal,
        )
        check(case, backward=False)


def test_packed_lengths_around_the_row_for_short_ones(check: Check) -> None:
    """Their bound and their average say which row serves; either is right."""
    for causal in (False, True):
        most = scaled(1088 if ON_CPU else most_short_seqlen(causal=causal), 200)
        for longest, is_short in ((most, True), (most + 1, False)):
            lengths = (longest, 0, 130)
            case = make_varlen_case(lengths_q=lengths, num_heads_k=1, causal=causal)
            assert_row(case, row_name(64, "short" if is_short else ""))
            check(case, backward=False)


# More tiles than CTAs, which then draw them.
DRAWN = {
    "causal": {"causal": True},
    "window": {"window": (200, 90)},
    "left bound": {"window": (333, -1)},
    "packed": {"causal": True},
}


@pytest.mark.cuda_only
@pytest.mark.parametrize("kind", DRAWN)
@pytest.mark.parametrize("held", [0, 1, -1, 0x7FF5_0000_0000_0003], ids=hex)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_ctas_draw_tiles_whatever_memory_held(head_dim: int, held: int, kind: str) -> None:
    """They count what is drawn in a word that nobody has zeroed; a graph, which repeats the call's
    mark, finds it as the first launch did.
    """
    case: AttentionCase | VarlenCase
    if kind == "packed":
        lengths = random_lengths(3, 40, 700)
        case = make_varlen_case(lengths_q=lengths, num_heads_k=2, head_dim=head_dim, **DRAWN[kind])
    else:
        case = make_case(
            batch=13, seqlen_q=700, seqlen_k=700, num_heads_k=2, head_dim=head_dim, **DRAWN[kind]
        )
    plan = families.planned(case)
    assert plan["draws_tiles"] and plan["workspace_bytes"] > 0
    inputs = case.make_inputs()
    expected = run_forward(case, inputs)
    for _ in range(10):
        memory = [torch.full((1 << 15,), held, device="cuda") for _ in range(64)]
        del memory
        assert_same_bits(run_forward(case, inputs), expected)
    replay = captured(lambda: run_forward(case, inputs))
    for _ in range(5):
        assert_same_bits(replay(), expected)


@pytest.mark.cuda_only
@pytest.mark.parametrize("num_heads_k", [10, 2])
@pytest.mark.parametrize("seqlen", [197, 257])
def test_low_tiles_end_a_grid_of_short_steps(seqlen: int, num_heads_k: int, check: Check) -> None:
    """Tiles of the last heads come in another order, where some are left for a last round."""
    grids = (
        make_case(
            batch=batch,
            seqlen_q=seqlen,
            seqlen_k=seqlen,
            num_heads_q=10,
            num_heads_k=num_heads_k,
            head_dim=64,
        )
        for batch in range(20, 60)
    )
    case = next(c for c in grids if families.planned(c)["schedule"]["least_last_heads"] > 1)
    check(case, backward=False)
