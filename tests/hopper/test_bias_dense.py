"""The rows of Hopper kernels for a bias in dense calls: agreement with the reference, biases of
infinity and large values, that a CTA finds its way through many tiles, and the same bits.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.cases.harness import (
    DEVICE,
    ON_CPU,
    Check,
    assert_same_bits,
    assert_same_up_to_one_rounding,
    bits,
    scaled,
)
from tests.cases.masked import RandomBias, expand_blocks
from tests.cases.masked_harness import (
    check_filled_rows,
    check_large_values,
    run_masked,
)
from tests.cases.matrix import BOTH, Call, check_calls, each, grid, inputs_of
from tests.cases.matrix import DTYPES as EVERY_DTYPE
from tests.cases.repeats import Load
from tests.hopper.sm90 import CAUSAL, DTYPES, MASKS, assert_shares_heads, runs_sm90_kernels
from tests.hopper.sm90_bias import HEAD_DIM, OWN, assert_right, bias_case, with_bias

__all__ = ["runs_sm90_kernels"]  # pytest finds it here

pytestmark = pytest.mark.gpu


# -- agreement with the reference ------------------------------------------------------------------

ANY_HEAD_DIM, TWO = [40, 64, 72, 128], [64, 128]
EVERY_SINK = [torch.float32, torch.float16, torch.bfloat16]
TABLE: dict[str, list[Call]] = {
    # A gradient that is stored, and sums over sequences, heads and both.
    "what shares one": grid(
        batch=3, lengths=(200, 336), num_heads_k=2, head_dim=ANY_HEAD_DIM, dtype=EVERY_DTYPE,
        causal=BOTH, bias=[RandomBias(own) for own in OWN],
    ),
    # Ends of sequences anywhere in a tile and in a box of 64 keys.
    "lengths": grid(
        heads=(2, 1), head_dim=TWO, causal=BOTH,
        lengths=[
            *((1, 8), (1, 304), (300, 8), (3, 64), (65, 72), (127, 136), (128, 128), (129, 128)),
            *((255, 264), (321, 72), (64, 520), (500, 40), (130, 192), (63, 200)),
        ],
        of=[
            {"bias": RandomBias("bhq")},
            {"bias": RandomBias("hq"), "dtype": torch.float16},
            {"bias": RandomBias("q")},
        ],
    ),
    # Tiles that nobody visits, whose gradient is 0, and rows that see nothing.
    "windows": grid(
        num_heads_k=2, head_dim=ANY_HEAD_DIM,
        range=[*MASKS[2:], {"window": (33, 20), "causal": True}],
        of=[
            {"lengths": (200, 336), "bias": RandomBias("bhq")},
            {"lengths": (336, 200), "bias": RandomBias("hq"), "dtype": torch.float16},
            {"lengths": (400, 136), "bias": RandomBias("bq")},
        ],
    ),
    # Query heads of one key head, each with a bias of its own or one for all.
    "heads": grid(
        lengths=(140, 272), heads=[(1, 1), (3, 3), (4, 1), (6, 2), (16, 1)], head_dim=TWO,
        causal=True, bias=[RandomBias("bhq"), RandomBias("bq")],
    ),
    "scales": grid(
        lengths=(130, 200), num_heads_k=2, head_dim=ANY_HEAD_DIM, causal=True,
        softmax_scale=[0.0, -0.0, 0.3, 3.0],
        of=[
            {"bias": RandomBias("bhq")},
            {"bias": RandomBias("hq", hidden=0.3), "dtype": torch.float16},
        ],
    ),
    # Rows that see the sink alone: of hidden keys, and those that come before all keys.
    "sinks": grid(
        num_heads_k=2, head_dim=TWO, dtype=EVERY_DTYPE, sink=EVERY_SINK,
        bias=[RandomBias("bhq"), RandomBias("hq", hidden=0.95)],
        of=[{"lengths": (200, 40)}, {"lengths": (200, 136), "causal": True}],
    ),
    "many tiles for every CTA": grid(
        batch=9, heads=(16, 8), head_dim=TWO,
        of=[
            {"lengths": (60, 304), "bias": RandomBias("bhq")},  # one query tile
            {"lengths": (304, 304), "bias": RandomBias("bhq"), "causal": True},
            {"lengths": (304, 200), "bias": RandomBias("hq"), "window": (-1, 7)},
            # Most tiles without queries, between others.
            {"lengths": (60, 608), "bias": RandomBias("q"), "window": (64, 0)},
            # Queries without keys.
            {"lengths": (300, 136), "bias": RandomBias("bq"), "window": (64, 0)},
        ],
    ),
    # More than SMs: of keys and of queries.
    "many tiles of one key head": grid(
        batch=1, lengths=[(72, 18_000), (18_000, 72)], heads=(2, 1), head_dim=TWO, causal=BOTH,
        bias=[RandomBias("bhq"), RandomBias("q")],
    ),
}  # fmt: skip


@each(TABLE)
def test_agreement(check: Check, calls: list[Call]) -> None:
    check_calls(check, calls)


@HEAD_DIM
@pytest.mark.parametrize(
    ("lengths", "own", "mask"),
    [
        ((300, 64), "bhq", {"causal": True}),
        ((100, 392), "hq", {"window": (0, 0)}),
        ((260, 136), "q", {}),
    ],
    ids=str,
)
def test_ctas_that_share_a_key_head(
    check: Check, lengths: tuple[int, int], own: str, mask: dict[str, Any], head_dim: int
) -> None:
    """Few key heads: fp32 partial sums of dk and dv, of tiles that no query sees too."""
    case = bias_case(own, lengths, (16, 1), batch=1, head_dim=head_dim, **mask)
    assert_shares_heads(case.of, bias=True)
    check(case)


# -- infinity and large values ---------------------------------------------------------------------


@DTYPES
@HEAD_DIM
@pytest.mark.parametrize("hidden", [0.1, 0.7, 0.99, 1.0])
def test_minus_infinity_hides(hidden: float, head_dim: int, dtype: torch.dtype) -> None:
    """Up to whole tiles, and rows that see nothing. What is hidden has no gradient."""
    for own, causal, sink in (
        ("bhq", False, None),
        ("hq", True, torch.float32),
        ("q", False, torch.float32),
    ):
        case = bias_case(
            own,
            (200, 336),
            hidden=hidden,
            sink=sink,
            head_dim=head_dim,
            dtype=dtype,
            causal=causal,
        )
        inputs = inputs_of(case)
        actual = assert_right(case, inputs)
        assert not actual.dbias[inputs.bias == -torch.inf].any()


@HEAD_DIM
@pytest.mark.parametrize("size", [64, 128])
def test_minus_infinity_hides_tiles(size: int, head_dim: int) -> None:
    """Whole tiles between others, the first and the last that a query meets, and all of a row."""
    case = bias_case("bhq", (330, 400), head_dim=head_dim)
    inputs = inputs_of(case)
    generator = torch.Generator(DEVICE).manual_seed(size)
    shape = (2, 4, -(-330 // size), -(-400 // size))
    blocks = torch.rand(shape, generator=generator, device=DEVICE) < 0.5
    blocks[0, 0, :, -1] = False
    blocks[0, 1, :, 0] = False
    blocks[0, 2, 1] = False
    blocks[0, 3] = False
    blocks[0, 3, :, 1] = True
    hidden = ~expand_blocks(blocks, (size, size), 330, 400)
    causal = replace(case, of=replace(case.of, causal=True), sink=torch.float32)
    for one in (case, causal):
        dirty = with_bias(one.make_inputs(), inputs.bias.masked_fill(hidden, -torch.inf))
        assert not assert_right(one, dirty).dbias[hidden].any()


@DTYPES
@HEAD_DIM
@pytest.mark.parametrize("fill", [-1e4, 1e4, "least"])
def test_large_values(fill: float | str, head_dim: int, dtype: torch.dtype) -> None:
    """Up to the dtype's least, as other code hides keys."""
    case = bias_case("hq", (200, 336), head_dim=head_dim, dtype=dtype)
    value = torch.finfo(dtype).min if fill == "least" else float(fill)
    check_large_values(case, value, rtol=2.0 * torch.finfo(dtype).eps)


@HEAD_DIM
@pytest.mark.parametrize("fill", [-1e9, -1e12, -1e30, torch.finfo(torch.bfloat16).min])
def test_filled_rows(fill: float, head_dim: int) -> None:
    check_filled_rows(bias_case("hq", (200, 336), head_dim=head_dim), fill)


@HEAD_DIM
def test_bad_values_stay_in_their_head(head_dim: int) -> None:
    """Infinity and NaN in the bias of one head of many, whose tiles a CTA takes between others."""
    batch, heads = scaled(6, 2), (scaled(16, 4), scaled(16, 4))
    case = bias_case("bhq", (300, 336), heads, batch=batch, head_dim=head_dim, causal=True)
    inputs = inputs_of(case)
    clean = run_masked(case, inputs)
    for bad in (torch.nan, torch.inf):
        bias = inputs.bias.clone()
        bias[1, 2, 7] = bad
        dirty = run_masked(case, with_bias(inputs, bias))
        assert not dirty.out[1, 7, 2].isfinite().any()
        for result in (clean, dirty):
            for x in (result.out, result.dq, result.dk, result.dv):
                x[1, :, 2] = 0.0
            for x in (result.lse, result.dbias):
                x[1, 2] = 0.0
        assert_same_bits(dirty, clean, str(bad))


# -- the same bits ---------------------------------------------------------------------------------


@CAUSAL
@HEAD_DIM
@pytest.mark.parametrize("own", ["bhq", "hq"])
def test_repeated_runs_give_the_same_bits(own: str, head_dim: int, causal: bool) -> None:
    """All but dq, and the bias's gradient where it is a sum."""
    case = bias_case(
        own,
        lengths=(scaled(500, 90), scaled(528, 152)),
        heads=(scaled(12, 4), scaled(12, 2)),
        sink=torch.float32,
        batch=scaled(4, 3),
        head_dim=head_dim,
        causal=causal,
    )
    inputs = inputs_of(case)
    first = run_masked(case, inputs)
    sums = () if ON_CPU else ("dq", "dbias")[: 1 if "b" in own else 2]
    load = Load()
    for run in range(scaled(20, 2)):
        load.push()
        for name, x in run_masked(case, inputs).tensors().items():
            y = first.tensors()[name]
            if name in sums:
                assert_same_up_to_one_rounding(x, y, f"{name} of run {run}")
            else:
                assert torch.equal(bits(x), bits(y)), f"{name} of run {run}"


@HEAD_DIM
def test_a_bias_without_a_gradient(head_dim: int) -> None:
    """The same bits as with one."""
    for own in ("bhq", "q"):
        case = bias_case(own, (200, 336), head_dim=head_dim, causal=True)
        inputs = inputs_of(case)
        fixed = replace(case, bias=RandomBias(own, requires_grad=False))
        assert_same_bits(run_masked(fixed, inputs), run_masked(case, inputs), own)
