"""The rows of Hopper kernels for a bias in dense calls: agreement with the reference, biases of
infinity and large values, that a CTA finds its way through many tiles, and the same bits.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.cases import families
from tests.cases.harness import (
    DEVICE,
    ON_CPU,
    assert_same_bits,
    assert_same_up_to_one_rounding,
    bits,
    scaled,
)
from tests.cases.masked import RandomBias, expand_blocks
from tests.cases.masked_harness import (
    CheckMask,
    check_filled_rows,
    run_masked,
    skip_without_masked_row,
)
from tests.cases.repeats import Load
from tests.hopper.sm90 import CAUSAL, DTYPES, MASKS, runs_sm90_kernels
from tests.hopper.sm90_bias import HEAD_DIM, OWN, assert_right, bias_case, with_bias

__all__ = ["runs_sm90_kernels"]  # pytest finds it here

pytestmark = pytest.mark.gpu


ANY_HEAD_DIM = pytest.mark.parametrize("head_dim", [40, 64, 72, 128])


# -- agreement with the reference ------------------------------------------------------------------


@ANY_HEAD_DIM
@pytest.mark.parametrize("own", OWN)
def test_what_shares_a_bias(check_mask: CheckMask, own: str, head_dim: int) -> None:
    """A gradient that is stored, and sums over sequences, heads and both."""
    for dtype in (torch.bfloat16, torch.float16):
        for causal in (False, True):
            check_mask(
                bias_case(own, (200, 336), batch=3, head_dim=head_dim, dtype=dtype, causal=causal)
            )


LENGTHS = (
    *((1, 8), (1, 304), (300, 8), (3, 64), (65, 72), (127, 136), (128, 128), (129, 128)),
    *((255, 264), (321, 72), (64, 520), (500, 40), (130, 192), (63, 200)),
)


@CAUSAL
@HEAD_DIM
@pytest.mark.parametrize("lengths", LENGTHS, ids=lambda n: f"{n[0]}x{n[1]}")
def test_lengths(
    check_mask: CheckMask, lengths: tuple[int, int], head_dim: int, causal: bool
) -> None:
    """Ends of sequences anywhere in a tile and in a box of 64 keys."""
    for own, dtype in (("bhq", torch.bfloat16), ("hq", torch.float16), ("q", torch.bfloat16)):
        check_mask(bias_case(own, lengths, (2, 1), head_dim=head_dim, dtype=dtype, causal=causal))


@ANY_HEAD_DIM
@pytest.mark.parametrize(
    "mask", [*MASKS[2:], {"window": (33, 20), "causal": True}], ids=lambda mask: str(mask["window"])
)
def test_windows(check_mask: CheckMask, mask: dict[str, Any], head_dim: int) -> None:
    """Tiles that nobody visits, whose gradient is 0, and rows that see nothing."""
    for lengths, own, dtype in (
        ((200, 336), "bhq", torch.bfloat16),
        ((336, 200), "hq", torch.float16),
        ((400, 136), "bq", torch.bfloat16),
    ):
        check_mask(bias_case(own, lengths, head_dim=head_dim, dtype=dtype, **mask))


@HEAD_DIM
@pytest.mark.parametrize("heads", [(1, 1), (3, 3), (4, 1), (6, 2), (16, 1)], ids=str)
def test_head_ratios(check_mask: CheckMask, heads: tuple[int, int], head_dim: int) -> None:
    """Query heads of one key head, each with a bias of its own or one for all."""
    for own in ("bhq", "bq"):
        check_mask(bias_case(own, (140, 272), heads, head_dim=head_dim, causal=True))


@HEAD_DIM
def test_ctas_that_share_a_key_head(check_mask: CheckMask, head_dim: int) -> None:
    """Few key heads: fp32 partial sums of dk and dv, of tiles that no query sees too."""
    for lengths, own, mask in (
        ((300, 64), "bhq", {"causal": True}),
        ((100, 392), "hq", {"window": (0, 0)}),
        ((260, 136), "q", {}),
    ):
        case = bias_case(own, lengths, (16, 1), batch=1, head_dim=head_dim, **mask)
        if not ON_CPU:
            planned = families.planned(case.of, "backward", bias=True)
            assert planned["dkdv_splits"] > 1, str(case)
        check_mask(case)


@ANY_HEAD_DIM
@pytest.mark.parametrize("scale", [0.0, -0.0, 0.3, 3.0])
def test_scales(check_mask: CheckMask, scale: float, head_dim: int) -> None:
    for own, dtype, hidden in (("bhq", torch.bfloat16, 0.0), ("hq", torch.float16, 0.3)):
        case = bias_case(
            own,
            (130, 200),
            hidden=hidden,
            head_dim=head_dim,
            dtype=dtype,
            softmax_scale=scale,
            causal=True,
        )
        check_mask(case)


@DTYPES
@HEAD_DIM
@pytest.mark.parametrize("sink", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_sinks(check_mask: CheckMask, sink: torch.dtype, head_dim: int, dtype: torch.dtype) -> None:
    """With rows that see the sink alone: of hidden keys, and those that come before all keys."""
    fields: dict[str, Any] = {"sink": sink, "head_dim": head_dim, "dtype": dtype}
    for own, hidden in (("bhq", 0.0), ("hq", 0.95)):
        check_mask(bias_case(own, (200, 40), hidden=hidden, **fields))
        check_mask(bias_case(own, (200, 136), hidden=hidden, causal=True, **fields))


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
        skip_without_masked_row(case)
        inputs = case.make_inputs()
        actual = assert_right(case, inputs)
        assert not actual.dbias[inputs.bias == -torch.inf].any()


@HEAD_DIM
@pytest.mark.parametrize("size", [64, 128])
def test_minus_infinity_hides_tiles(size: int, head_dim: int) -> None:
    """Whole tiles between others, the first and the last that a query meets, and all of a row."""
    case = bias_case("bhq", (330, 400), head_dim=head_dim)
    skip_without_masked_row(case)
    inputs = case.make_inputs()
    generator = torch.Generator(DEVICE).manual_seed(size)
    shape = (2, 4, -(-330 // size), -(-400 // size))
    blocks = torch.rand(shape, generator=generator, device=DEVICE) < 0.5
    blocks[0, 0, :, -1] = False
    blocks[0, 1, :, 0] = False
    blocks[0, 2, 1] = False
    blocks[0, 3] = False
    blocks[0, 3, :, 1] = True
    hidden = ~expand_blocks(blocks, size, 330, 400)
    causal = replace(case, of=replace(case.of, causal=True), sink=torch.float32)
    for each in (case, causal):
        dirty = with_bias(each.make_inputs(), inputs.bias.masked_fill(hidden, -torch.inf))
        assert not assert_right(each, dirty).dbias[hidden].any()


@DTYPES
@HEAD_DIM
@pytest.mark.parametrize("fill", [-1e4, 1e4, "least"])
def test_large_values(fill: float | str, head_dim: int, dtype: torch.dtype) -> None:
    """Keys with a large negative value, up to the dtype's least as other code hides them, and those
    beside large ones: they have no weight, as if they were hidden.
    """
    case = bias_case("hq", (200, 336), head_dim=head_dim, dtype=dtype)
    skip_without_masked_row(case)
    inputs = case.make_inputs()
    value = torch.finfo(dtype).min if fill == "least" else float(fill)
    chosen = torch.rand(inputs.bias.shape, device=DEVICE) < 0.5
    chosen[..., 5] = value > 0.0
    hidden = chosen if value < 0.0 else ~chosen
    large = inputs.bias.masked_fill(chosen, value)
    actual, expected = (
        run_masked(case, with_bias(inputs, bias)).tensors()
        for bias in (large, large.masked_fill(hidden, -torch.inf))
    )
    rounding = 2.0 * torch.finfo(dtype).eps
    for name, y in expected.items():
        torch.testing.assert_close(
            actual[name], y, rtol=rounding, atol=1e-3, msg=lambda m, n=name: f"{n}: {m}"
        )
    assert not actual["dbias"][hidden].any()


@HEAD_DIM
@pytest.mark.parametrize("fill", [-1e9, -1e12, -1e30, "least"])
def test_filled_rows(fill: float | str, head_dim: int) -> None:
    case = bias_case("hq", (200, 336), head_dim=head_dim, dtype=torch.bfloat16)
    skip_without_masked_row(case)
    check_filled_rows(case, torch.finfo(torch.bfloat16).min if fill == "least" else float(fill))


@HEAD_DIM
def test_bad_values_stay_in_their_head(head_dim: int) -> None:
    """Infinity and NaN in the bias of one head of many, whose tiles a CTA takes between others."""
    batch, heads = scaled(6, 2), (scaled(16, 4), scaled(16, 4))
    case = bias_case("bhq", (300, 336), heads, batch=batch, head_dim=head_dim, causal=True)
    skip_without_masked_row(case)
    inputs = case.make_inputs()
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


# -- many tiles for every CTA ----------------------------------------------------------------------


@HEAD_DIM
@pytest.mark.parametrize(
    ("lengths", "own", "mask"),
    [
        ((60, 304), "bhq", {}),  # one query tile
        ((304, 304), "bhq", {"causal": True}),
        ((304, 200), "hq", {"window": (-1, 7)}),
        ((60, 608), "q", {"window": (64, 0)}),  # most tiles without queries, between others
        ((300, 136), "bq", {"window": (64, 0)}),  # queries without keys
    ],
    ids=str,
)
def test_many_tiles_for_every_cta(
    check_mask: CheckMask, head_dim: int, lengths: tuple[int, int], own: str, mask: dict[str, Any]
) -> None:
    batch, heads = scaled(9, 1), (scaled(16, 4), scaled(8, 2))
    check_mask(bias_case(own, lengths, heads, batch=batch, head_dim=head_dim, **mask))


@CAUSAL
@HEAD_DIM
@pytest.mark.parametrize("own", ["bhq", "q"])
def test_many_tiles_of_one_key_head(
    check_mask: CheckMask, own: str, head_dim: int, causal: bool
) -> None:
    """More than SMs: of keys and of queries."""
    many = scaled(18_000, 600)
    for lengths in ((72, many), (many, 72)):
        check_mask(bias_case(own, lengths, (2, 1), batch=1, head_dim=head_dim, causal=causal))


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
    skip_without_masked_row(case)
    inputs = case.make_inputs()
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
        skip_without_masked_row(case)
        inputs = case.make_inputs()
        fixed = replace(case, bias=RandomBias(own, requires_grad=False))
        assert_same_bits(run_masked(fixed, inputs), run_masked(case, inputs), own)
