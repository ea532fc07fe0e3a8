"""The kernels of Hopper GPUs: agreement with the reference of pairs of everything, and of the calls
that each forward row is there for (test_tiles.py: that a CTA finds its way through many tiles).

What holds of any kernel is tested elsewhere too, and on a Hopper GPU of these. With the CPU backend
under test the sizes are small, and what asks for kernels is skipped.
"""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch

from flash_attn_cuda.installed import build_info
from tests.cases import families
from tests.cases.attention import DTYPE_NAMES, Alibi
from tests.cases.harness import (
    ON_CPU,
    Check,
    make_case,
    scaled,
    skip_without_row,
)
from tests.cases.matrix import BOTH, Call, check_calls, each, grid, pairs
from tests.cases.matrix import DTYPES as EVERY_DTYPE
from tests.hopper.sm90 import (
    DTYPES,
    EVERY_HEAD_DIM,
    MASKS,
    assert_row,
    multiprocessors,
    row_name,
    runs_sm90_kernels,
)

__all__ = ["runs_sm90_kernels"]  # pytest finds it here

pytestmark = pytest.mark.gpu


# -- agreement with the reference ------------------------------------------------------------------

KEYS = [0, 1, 63, 64, 65, 80, 81, 96, 97, 127, 128, 129, 130, 193, 257, 400, 511, 1000]
QUERIES = [0, 1, 63, 64, 65, 127, 128, 129, 130, 191, 193, 257, 400, 511, 1000]
SHAPES: dict[str, Any] = {
    "dtype": EVERY_DTYPE,
    "heads": [(2, 2), (4, 1), (6, 2), (8, 1), (20, 1)],  # 20: one query is no decode kernel's
    "range": MASKS,
    "softmax_scale": [None, 0.3],
}
TABLE: dict[str, list[Call]] = {
    "shapes": pairs(
        seed=3,
        head_dim=[8, 40, 64, 72, 96, 104, 128, 160, 192, 224, 256],
        seqlen_q=QUERIES,
        seqlen_k=KEYS,
        **SHAPES,
    ),
    "features": pairs(
        seed=4,
        batch=1,
        head_dim=[8, 64, 72, 96, 128, 192, 224, 256],
        dtype=EVERY_DTYPE,
        seqlen_q=[1, 64, 65, 129, 200, 257],
        seqlen_k=[1, 63, 64, 65, 81, 97, 127, 129, 193, 301],
        heads=[(2, 2), (6, 2), (20, 1)],
        range=MASKS,
        softcap=[0.0, 3.0],
        alibi=[None, *Alibi],
        dropout_p=[0.0, 0.2],
        deterministic=BOTH,
    ),
    # One of the two lengths is enough for the other row of head dim 128.
    "beyond the row for few steps": pairs(
        seed=5,
        head_dim=[104, 128],
        lengths=[*((600, keys) for keys in KEYS), *((queries, 600) for queries in QUERIES)],
        **SHAPES,
    ),
    # Of packed sequences a part is used: rows behind get out 0.
    "the ends of short packed sequences": grid(
        lengths_q=(5, 64, 197, 80, 0, 129, 250), used_q=(5, 20, 130, 65, 0, 1, 193),
        used_k=(1, 64, 68, 80, 0, 17, 208), num_heads_k=2, dtype=EVERY_DTYPE, causal=BOTH,
    ),
}  # fmt: skip


@each(TABLE)
def test_agreement(check: Check, calls: list[Call]) -> None:
    check_calls(check, calls)


def edges(head_dim: int) -> list[int]:
    """Rows of a warpgroup, of a tile, and keys of a block."""
    rows = [row for row in build_info.compiled_rows() if row.family == "sm90"]
    configs = [row.config for row in rows if row.head_dim == head_dim]
    return sorted({64, *(config[name] for config in configs for name in ("block_m", "block_n"))})


@EVERY_HEAD_DIM
def test_windows_around_the_edges_of_blocks(check: Check, head_dim: int) -> None:
    """Both ends of the window cross the bits that stand for a thread's columns, odd ones too."""
    generator = random.Random(head_dim)
    for edge in edges(head_dim):
        for length in (edge - 1, edge, edge + 1, 2 * edge + 1):
            for _ in range(2):
                left = generator.choice((-1, 0, 1, 7, 8, 9, 31, 33, edge))
                case = make_case(
                    batch=1,
                    window=(left, generator.choice((0, 1, 2, 15, 17, edge - 1))),
                    seqlen_q=length,
                    seqlen_k=max(0, length + generator.choice((-40, -1, 0, 3, 130))),
                    num_heads_q=2,
                    num_heads_k=1,
                    head_dim=head_dim,
                )
                check(case, backward=False)


# -- calls of certain rows -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("head_dim", "dtype"), [(64, torch.bfloat16), (64, torch.float16), (40, torch.bfloat16)]
)
@pytest.mark.parametrize(
    "features", [{}, {"causal": True}, {"window": (70, 3)}, {"window": (5, -1)}], ids=str
)
def test_the_ends_of_short_sequences(
    features: dict[str, Any], head_dim: int, dtype: torch.dtype, check: Check
) -> None:
    """Up to 16 keys of a last block have a step of their own, and warps without queries leave
    scores alone.
    """
    same = [(n, n) for n in (16, 17, 65, 80, 81, 144, 197, 257)]
    for seqlen_q, seqlen_k in (*same, (70, 133), (130, 72), (33, 208), (200, 1)):
        case = make_case(
            batch=scaled(6, 1),
            seqlen_q=seqlen_q,
            seqlen_k=seqlen_k,
            num_heads_q=scaled(12, 4),
            num_heads_k=scaled(6, 2),
            head_dim=head_dim,
            dtype=dtype,
            **features,
        )
        is_longer = seqlen_k > 256 and features == {"window": (5, -1)}
        assert_row(case, row_name(64, "" if is_longer else "short", dtype=DTYPE_NAMES[dtype]))
        check(case)


@DTYPES
@pytest.mark.parametrize("head_dim", [40, 64])
@pytest.mark.parametrize(
    ("seqlens", "features"),
    [
        *(((512, 512), {}), ((385, 300), {}), ((449, 128), {}), ((511, 1200), {})),
        *(((700, 64), {"softmax_scale": 0.3}), ((961, 100), {}), ((1024, 127), {})),
        *(((1250, 1250), {"causal": True}), ((500, 1300), {"causal": True})),
        *(((1280, 600), {"causal": True}), ((1200, 1250), {"window": (-1, 70)})),
    ],
    ids=str,
)
def test_tall_tiles(
    seqlens: tuple[int, int],
    features: dict[str, Any],
    head_dim: int,
    dtype: torch.dtype,
    check: Check,
) -> None:
    """Of four warpgroups, some of which have no queries, or see no keys."""
    tiles = -(-seqlens[0] // 256)
    heads = max(1, 3 * multiprocessors(4) // (4 * tiles))  # a round less than of other tiles
    case = make_case(
        batch=2,
        seqlen_q=seqlens[0],
        seqlen_k=seqlens[1],
        num_heads_q=2 * (heads // 2 + heads % 2),
        num_heads_k=heads // 2 + heads % 2,
        head_dim=head_dim,
        dtype=dtype,
        **features,
    )
    assert_row(case, row_name(64, "tall", dtype=DTYPE_NAMES[dtype]))
    check(case, backward=False)


@DTYPES
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize(
    ("seqlens", "features"),
    [
        ((1500, 662), {"causal": True}),  # of a tile's warpgroups the first sees nothing
        ((1500, 662), {"window": (64, 0)}),
        ((1500, 662), {"window": (300, 100)}),
        ((1374, 900), {"causal": True}),  # of the last tile's two have no queries
        ((1374, 900), {"window": (130, -1)}),
    ],
)
def test_warpgroups_that_see_other_blocks(
    seqlens: tuple[int, int],
    features: dict[str, Any],
    head_dim: int,
    dtype: torch.dtype,
    check: Check,
) -> None:
    case = make_case(
        seqlen_q=scaled(seqlens[0], 150),
        seqlen_k=scaled(seqlens[1], 66),
        num_heads_k=2,
        head_dim=head_dim,
        dtype=dtype,
        **features,
    )
    assert_row(case, row_name(head_dim, dtype=DTYPE_NAMES[dtype]))
    check(case, backward=False)


@DTYPES
@pytest.mark.parametrize("head_dim", [64, 40])
@pytest.mark.parametrize("features", MASKS)
def test_low_tiles(
    features: dict[str, Any], head_dim: int, dtype: torch.dtype, check: Check
) -> None:
    """Of calls that leave SMs idle anyway, in the row that is there for caches."""
    case = make_case(
        seqlen_q=scaled(700, 70),
        seqlen_k=scaled(1500, 150),
        num_heads_k=2,
        head_dim=head_dim,
        dtype=dtype,
        **features,
    )
    sees_few = -1 not in features.get("window", (-1, -1))
    assert_row(case, row_name(64, "" if sees_few else "cache", dtype=DTYPE_NAMES[dtype]))
    check(case, backward=False)


# Rows of three warpgroups of 64 queries: head dim, enough keys for them, and features.
HIGH_TILES = [
    (128, 8192, {}),
    (96, 1536, {}),
    *(
        (head_dim, keys, features)
        for head_dim, keys in ((96, 1536), (64, 1280))
        for features in (
            {"softcap": 30.0},
            {"alibi": Alibi.per_head},
            {"softcap": 3.0, "alibi": Alibi.per_batch},
        )
    ),
]


@pytest.mark.parametrize("mask", [{}, {"causal": True}, {"window": 30}], ids=str)
@pytest.mark.parametrize("lengths", [(192, 0), (129, 79), (190, 128)], ids=str)
@pytest.mark.parametrize("row", HIGH_TILES, ids=str)
@DTYPES
def test_high_tiles_of_queries_that_see_many_keys(
    row: tuple[int, int, dict[str, Any]],
    lengths: tuple[int, int],
    mask: dict[str, Any],
    dtype: torch.dtype,
    check: Check,
) -> None:
    """Of so many heads that lower tiles would need another round of the device."""
    head_dim, enough_keys, features = row
    if "window" in mask:
        mask = {"window": (enough_keys * 4 // 5, mask["window"])}
    seqlen_k = enough_keys + lengths[1]
    case = make_case(
        batch=1,
        seqlen_q=lengths[0],
        seqlen_k=scaled(seqlen_k, seqlen_k - enough_keys + 190),
        num_heads_q=multiprocessors(4) + 2,
        num_heads_k=1,
        head_dim=head_dim if lengths[0] > 129 else head_dim - 16,
        dtype=dtype,
        **mask,
        **features,
    )
    skip_without_row(case)
    if not ON_CPU:
        name = families.planned(case)["instance"]
        assert name.endswith("_long_modifiers" if features else "_long"), str(case)
    check(case)


# -- numbers that are hard on a softmax ------------------------------------------------------------


@DTYPES
@EVERY_HEAD_DIM
def test_scores_far_from_those_of_other_blocks(
    check: Check, head_dim: int, dtype: torch.dtype
) -> None:
    """Scores far above and below 0, of all keys of a query and of those of a tile's first block
    alone, which are the last ones.
    """
    case = make_case(batch=1, seqlen_q=130, seqlen_k=400, head_dim=head_dim, dtype=dtype)
    every, last = slice(None), slice(384, None)
    for shift, keys in itertools.product((-300.0, -70.0, -15.0, 15.0, 70.0), (every, last)):
        inputs = case.make_inputs()
        # A column that only adds the shift: scores are softmax_scale * q k.
        inputs.q[..., 0] = 1.0
        inputs.k[..., 0] = 0.0
        inputs.k[:, keys, :, 0] = shift * head_dim**0.5
        check(case, backward=False, inputs=inputs)
