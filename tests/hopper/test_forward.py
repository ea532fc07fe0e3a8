"""The forward kernels of Hopper GPUs: agreement with the reference, and the same bits every time
(test_tiles.py: that a CTA finds its way through many tiles).

What holds of any kernel is tested elsewhere too, and on a Hopper GPU of these. With the CPU backend
under test the sizes are small, and what asks for kernels is skipped.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from flash_attn_cuda import build_info, flash_attn_func
from tests.cases import families, logits
from tests.cases.attention import DTYPE_NAMES, Alibi, AttentionCase
from tests.cases.harness import (
    ON_CPU,
    Check,
    assert_same_bits,
    bits,
    make_case,
    make_varlen_case,
    run_forward,
    run_reference,
    scaled,
    skip_without_row,
)
from tests.cases.pairwise import pairwise
from tests.hopper.sm90 import (
    DTYPES,
    EVERY_HEAD_DIM,
    MASKS,
    row_name,
    runs_sm90_kernels,
    shaped_case,
)
from tests.reference.tolerance import assert_close

__all__ = ["runs_sm90_kernels"]  # pytest finds it here

pytestmark = pytest.mark.gpu


# -- agreement with the reference ------------------------------------------------------------------

SHAPES: dict[str, tuple[Any, ...]] = {
    "head_dim": (8, 40, 64, 72, 96, 104, 128, 160, 192, 224, 256),
    "dtype": (torch.bfloat16, torch.float16),
    "seqlen_q": (1, 63, 64, 65, 127, 129, 191, 193, 257, 511, 1000),
    "seqlen_k": (0, 1, 63, 64, 65, 80, 81, 96, 97, 127, 128, 129, 193, 257, 511, 1000),
    "heads": ((2, 2), (4, 1), (8, 1), (20, 1)),  # 20: one query is more than decode kernels take
    "mask": MASKS,
    "softmax_scale": (None, 0.3),
}
FEATURES: dict[str, tuple[Any, ...]] = {
    "head_dim": (8, 64, 72, 96, 128, 192, 224, 256),
    "dtype": (torch.bfloat16, torch.float16),
    "seqlen_q": (1, 65, 129, 200, 257),
    "seqlen_k": (1, 64, 81, 97, 129, 301),
    "heads": ((2, 2), (20, 1)),
    "mask": MASKS,
    "softcap": (0.0, 3.0),
    "alibi": (None, *Alibi),
    "dropout_p": (0.0, 0.2),
}


EIGHT_PARTS = pytest.mark.parametrize("part", range(8))


@EIGHT_PARTS
def test_shapes(check: Check, part: int) -> None:
    """Every pair of a head dim, a length, a mask and so on."""
    for choice in pairwise(SHAPES, seed=3)[part :: 8 * scaled(1, 4)]:
        check(shaped_case(**choice), backward=False)


@EIGHT_PARTS
def test_features(check: Check, part: int) -> None:
    for choice in pairwise(FEATURES, seed=4)[part :: 8 * scaled(1, 4)]:
        check(shaped_case(**choice, batch=1), backward=False)


@EIGHT_PARTS
def test_shapes_beyond_the_row_for_few_steps(check: Check, part: int) -> None:
    """One of the two lengths is enough for the other row of head dim 128."""
    long = scaled(600, 70)
    lengths = [(long, k) for k in SHAPES["seqlen_k"]] + [(q, long) for q in SHAPES["seqlen_q"]]
    settings = {
        "lengths": lengths,
        **{name: SHAPES[name] for name in ("dtype", "heads", "mask", "softmax_scale")},
        "head_dim": (104, 128),
    }
    for choice in pairwise(settings, seed=5)[part :: 8 * scaled(1, 4)]:
        seqlen_q, seqlen_k = choice.pop("lengths")
        check(shaped_case(**choice, seqlen_q=seqlen_q, seqlen_k=seqlen_k), backward=False)


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
                window = (generator.choice((-1, 0, 1, 7, 8, 9, 31, 33, edge)), -1)
                window = (window[0], generator.choice((0, 1, 2, 15, 17, edge - 1)))
                case = make_case(
                    batch=1,
                    seqlen_q=length,
                    seqlen_k=max(0, length + generator.choice((-40, -1, 0, 3, 130))),
                    num_heads_q=2,
                    num_heads_k=1,
                    head_dim=head_dim,
                    window=window,
                )
                check(case, backward=False)


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
    for seqlen_q, seqlen_k in (
        *((n, n) for n in (16, 17, 65, 80, 81, 144, 197, 257)),
        (70, 133),
        (130, 72),
        (33, 208),
        (200, 1),
    ):
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
        if not ON_CPU:
            is_longer = seqlen_k > 256 and features == {"window": (5, -1)}
            row = row_name(64, "" if is_longer else "short", dtype=DTYPE_NAMES[dtype])
            assert families.planned(case)["instance"] == row
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
    sms = 4 if ON_CPU else torch.cuda.get_device_properties("cuda").multi_processor_count
    tiles = -(-seqlens[0] // 256)
    heads = max(1, 3 * sms // (4 * tiles))  # a round of these tiles less than of others
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
    if not ON_CPU:
        row = row_name(64, "tall", dtype=DTYPE_NAMES[dtype])
        assert families.planned(case)["instance"] == row
    check(case, backward=False)


@DTYPES
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_the_ends_of_short_packed_sequences(causal: bool, dtype: torch.dtype, check: Check) -> None:
    """Of them a part is used: rows behind get out 0."""
    lengths = (5, 64, 197, 80, 0, 129, 250)
    case = make_varlen_case(
        lengths_q=lengths,
        used_q=(5, 20, 130, 65, 0, 1, 193),
        used_k=(1, 64, 68, 80, 0, 17, 208),
        num_heads_k=2,
        dtype=dtype,
        causal=causal,
    )
    check(case)


@DTYPES
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
    seqlens: tuple[int, int], features: dict[str, Any], dtype: torch.dtype, check: Check
) -> None:
    for head_dim in (64, 128, 256):
        seqlen_q, seqlen_k = (scaled(n, n // 10) for n in seqlens)
        case = make_case(
            seqlen_q=seqlen_q,
            seqlen_k=seqlen_k,
            num_heads_k=2,
            head_dim=head_dim,
            dtype=dtype,
            **features,
        )
        if not ON_CPU:
            name = row_name(head_dim, dtype=DTYPE_NAMES[dtype])
            assert families.planned(case)["instance"] == name
        check(case, backward=False)


@DTYPES
@pytest.mark.parametrize("features", MASKS)
def test_low_tiles(features: dict[str, Any], dtype: torch.dtype, check: Check) -> None:
    """Of calls that leave SMs idle anyway, in the row that is there for caches."""
    for head_dim in (64, 40):
        case = make_case(
            seqlen_q=scaled(700, 70),
            seqlen_k=scaled(1500, 150),
            num_heads_k=2,
            head_dim=head_dim,
            dtype=dtype,
            **features,
        )
        if not ON_CPU:
            sees_few = -1 not in features.get("window", (-1, -1))
            name = row_name(64, "" if sees_few else "cache", dtype=DTYPE_NAMES[dtype])
            assert families.planned(case)["instance"] == name
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
    sms = 4 if ON_CPU else torch.cuda.get_device_properties("cuda").multi_processor_count
    heads = {"num_heads_q": sms + 2, "num_heads_k": 1}
    seqlen_k = enough_keys + lengths[1]
    case = make_case(
        batch=1,
        seqlen_q=lengths[0],
        seqlen_k=scaled(seqlen_k, seqlen_k - enough_keys + 190),
        head_dim=head_dim if lengths[0] > 129 else head_dim - 16,
        dtype=dtype,
        **heads,
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
def test_scores_far_from_those_of_other_blocks(head_dim: int, dtype: torch.dtype) -> None:
    """Scores far above and below 0, of all keys of a query and of those of a tile's first block
    alone, which are the last ones.
    """
    case = make_case(batch=1, seqlen_q=130, seqlen_k=400, head_dim=head_dim, dtype=dtype)
    skip_without_row(case, backward=False)
    every, last = slice(None), slice(384, None)
    for shift, keys in itertools.product((-300.0, -70.0, -15.0, 15.0, 70.0), (every, last)):
        inputs = case.make_inputs()
        # A column that only adds the shift: scores are softmax_scale * q k.
        inputs.q[..., 0] = 1.0
        inputs.k[..., 0] = 0.0
        inputs.k[:, keys, :, 0] = shift * head_dim**0.5
        assert_close(run_forward(case, inputs), *run_reference(case, inputs, use_dlse=False))


@DTYPES
@EVERY_HEAD_DIM
def test_extreme_logits(head_dim: int, dtype: torch.dtype) -> None:
    for values in logits.ALL:
        for causal in (False, True):
            case = make_case(
                seqlen_q=200, seqlen_k=301, head_dim=head_dim, dtype=dtype, causal=causal
            )
            skip_without_row(case, backward=False)
            inputs = case.make_inputs()
            q, k = values(inputs.q, inputs.k)
            inputs = replace(inputs, q=q, k=k)
            assert_close(run_forward(case, inputs), *run_reference(case, inputs, use_dlse=False))


@EVERY_HEAD_DIM
def test_scales(check: Check, head_dim: int) -> None:
    for scale in (0.0, -0.0, 1e-6, 5.0, 100.0, -0.3):
        for mask in ({"causal": True}, {"window": (64, 0)}):
            case = make_case(
                seqlen_q=130, seqlen_k=100, head_dim=head_dim, softmax_scale=scale, **mask
            )
            check(case, backward=False)


def many_heads_case(head_dim: int) -> AttentionCase:
    """Several tiles of every head, and more of them than SMs."""
    return make_case(
        batch=scaled(10, 2),
        seqlen_q=300,
        seqlen_k=330,
        num_heads_q=scaled(16, 4),
        num_heads_k=scaled(16, 4),
        head_dim=head_dim,
        causal=True,
    )


@EVERY_HEAD_DIM
def test_bad_values_stay_in_their_head(head_dim: int) -> None:
    """Infinity and NaN in one head of many, whose tiles a CTA takes between others."""
    case = many_heads_case(head_dim)
    skip_without_row(case, backward=False)
    inputs = case.make_inputs()
    clean = run_forward(case, inputs)
    for bad in (torch.nan, torch.inf):
        for x in (inputs.q, inputs.k, inputs.v):
            x[1, 7, 2] = bad
        dirty = run_forward(case, inputs)
        assert not dirty.out[1, 7:, 2].isfinite().any()
        for result in (clean, dirty):
            result.out[1, :, 2] = 0.0
            result.lse[1, 2] = 0.0
        assert_same_bits(dirty, clean, str(bad))


# -- the same bits ---------------------------------------------------------------------------------


@EVERY_HEAD_DIM
@pytest.mark.parametrize("features", [{}, {"causal": True}, {"dropout_p": 0.3}], ids=str)
def test_repeated_runs_give_the_same_bits(head_dim: int, features: dict[str, Any]) -> None:
    """50 runs of more tiles than SMs, compared on the device."""
    case = make_case(
        batch=scaled(8, 1),
        seqlen_q=scaled(400, 70),
        seqlen_k=scaled(700, 90),
        num_heads_q=scaled(16, 2),
        num_heads_k=2,
        head_dim=head_dim,
        **features,
    )
    skip_without_row(case, backward=False)
    inputs = case.make_inputs()
    first = run_forward(case, inputs)
    different = []
    for _ in range(scaled(50, 2)):
        again = run_forward(case, inputs)
        pairs = ((again.out, first.out), (again.lse, first.lse))
        different.append(sum((bits(x) != bits(y)).sum() for x, y in pairs))
    assert not torch.stack(different).any(), "elements differ from the first run's"


@EVERY_HEAD_DIM
def test_a_head_does_not_depend_on_its_company(head_dim: int) -> None:
    """Whatever CTA takes its tiles, and after whose."""
    case = many_heads_case(head_dim)
    skip_without_row(case, backward=False)
    inputs = case.make_inputs()
    together = run_forward(case, inputs)
    for batch, head in ((0, 0), (1, 3), (case.batch - 1, case.num_heads_q - 1)):
        at = (slice(batch, batch + 1), slice(None), slice(head, head + 1))
        alone = flash_attn_func(
            *(x[at] for x in (inputs.q, inputs.k, inputs.v)), causal=True, return_attn_probs=True
        )
        assert torch.equal(bits(alone[0]), bits(together.out[at])), (batch, head)
        at_row = (slice(batch, batch + 1), slice(head, head + 1))
        assert torch.equal(bits(alone[1]), bits(together.lse[at_row])), (batch, head)
