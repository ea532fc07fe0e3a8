"""The rows of Hopper kernels for a bias: which calls they take, agreement with the reference and
with the sm80 rows, that a CTA finds its way through many tiles, what of a bias they read, and that
they give the same bits.

What holds of any bias is tested in test_bias_gpu.py too. Here rows of a bias have a multiple of 8
keys, or strides that are one, so that TMA can load them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate
from typing import Any

import families
import pytest
import torch
from cases import Alibi, VarlenCase
from harness import (
    DEVICE,
    DTYPE_NAMES,
    ON_CPU,
    assert_same_bits,
    assert_same_up_to_one_rounding,
    bits,
    make_case,
    make_varlen_case,
    scaled,
)
from masked_cases import MaskedCase, MaskedInputs, RandomBias, RandomMask, expand_blocks
from masked_harness import masked_reference, run_masked, skip_without_masked_row
from reference import AttentionResult
from repeats import Load
from sm90 import CAUSAL, DTYPES, MASKS, kernels_run, random_lengths, row_name, runs_sm90_kernels
from tolerance import Closeness, assert_close
from torch import Tensor

from flash_attn_cuda import flash_attn_func, flash_attn_varlen_func

__all__ = ["runs_sm90_kernels"]  # pytest finds it here

pytestmark = pytest.mark.gpu

CheckMask = Callable[..., list[Closeness]]

OWN = ("q", "hq", "bq", "bhq")  # what has rows of its own for queries
BUCKETS = {8: 64, 40: 64, 64: 64, 72: 128, 96: 128, 128: 128, 200: 256}
HEAD_DIM = pytest.mark.parametrize("head_dim", [64, 128])
ANY_HEAD_DIM = pytest.mark.parametrize("head_dim", [40, 64, 72, 128])


def in_larger(bias: Tensor, width: int, first: int = 8, outside: float = torch.nan) -> Tensor:
    """The same as a part of a larger tensor, whose rows have `width` elements."""
    batch, heads, rows, columns = bias.shape
    larger = bias.new_full((batch, heads + 2, rows + 5, width), outside)
    return larger[:, 1:-1, 3:-2, first : first + columns].copy_(bias)


def with_bias(inputs: MaskedInputs, bias: Tensor) -> MaskedInputs:
    return replace(inputs, bias=bias)


def assert_right(case: MaskedCase, inputs: MaskedInputs, **changes: Any) -> AttentionResult:
    """What the call gives, compared with the reference; `changes` are other arguments of it."""
    actual = run_masked(case, inputs, **changes)
    assert_close(actual, *masked_reference(case, inputs))
    return actual


# -- which kernel ----------------------------------------------------------------------------------


def rows_of(case: MaskedCase, forward: str, backward: str) -> tuple[str, str]:
    """The names of the rows of these families that serve the case."""
    bucket, dtype = BUCKETS[case.of.head_dim], DTYPE_NAMES[case.of.dtype]
    variants = {"sm90": "bias", "sm80": "masked"}
    of_backward = {**variants, "sm80": "masked_smem163k" if bucket == 256 else "masked"}
    return (
        row_name(bucket, variants[forward], forward, dtype),
        row_name(bucket, of_backward[backward], backward, dtype, "bwd"),
    )


@pytest.mark.cuda_only
@DTYPES
@pytest.mark.parametrize("head_dim", BUCKETS)
def test_which_rows_are_planned(head_dim: int, dtype: torch.dtype) -> None:
    """For a contiguous bias of q's dtype."""
    of = make_case(seqlen_q=300, seqlen_k=200, head_dim=head_dim, dtype=dtype)
    own = "sm90" if head_dim <= 128 else "sm80"
    for changes, family in (
        ({}, own),
        ({"causal": True}, own),
        ({"window": (7, -1)}, own),
        ({"seqlen_q": 1}, own),
        ({"seqlen_k": 8}, own),
        ({"seqlen_k": 196}, "sm80"),
        ({"seqlen_k": 201}, "sm80"),
        ({"softcap": 3.0}, "sm80"),
        ({"alibi": Alibi.per_head}, "sm80"),
        ({"dropout_p": 0.1}, "sm80"),
    ):
        case = MaskedCase(replace(of, **changes), None, RandomBias())
        planned = [families.planned(case.of, name, bias=True) for name in ("forward", "backward")]
        names = [plan["instance"] for plan in planned]
        assert names == list(rows_of(case, family, family)), str(case)
        assert {plan["config"]["family"] for plan in planned} == {family}, str(case)


def launches() -> list[tuple[str, MaskedCase, MaskedInputs, tuple[str, str]]]:
    """Calls, and the families of the rows that forward and backward are to run."""
    made: list[tuple[str, MaskedCase, MaskedInputs, tuple[str, str]]] = []

    def add(
        name: str, case: MaskedCase, forward: str, backward: str, bias: Tensor | None = None
    ) -> None:
        inputs = case.make_inputs()
        inputs = inputs if bias is None else with_bias(inputs, bias)
        made.append((name, case, inputs, rows_of(case, forward, backward)))

    base = make_case(seqlen_q=200, seqlen_k=304, num_heads_k=2)
    odd = replace(base, seqlen_k=300)
    packed = make_varlen_case(lengths_q=(200, 0, 33), lengths_k=(304, 5, 40), num_heads_k=2)
    for own in OWN:
        add(own, MaskedCase(base, None, RandomBias(own)), "sm90", "sm90")
    for own in ("", "h", "b"):
        add(f"a row for all queries {own}", MaskedCase(base, None, RandomBias(own)), "sm80", "sm80")
    for changes, family in (
        ({"causal": True, "head_dim": 72, "dtype": torch.float16}, "sm90"),
        ({"window": (50, 3), "head_dim": 128}, "sm90"),
        ({"seqlen_q": 1, "num_heads_k": 4}, "sm90"),  # as few as decode kernels take
        ({"softmax_scale": 0.0}, "sm90"),
        ({"softmax_scale": -0.3}, "sm80"),
        ({"alibi": Alibi.per_head}, "sm80"),
        ({"seqlen_k": 300}, "sm80"),
        ({"head_dim": 200}, "sm80"),
    ):
        of = replace(base, **changes)
        add(str(changes), MaskedCase(of, None, RandomBias()), family, family)
    case = MaskedCase(base, None, RandomBias())
    fixed = MaskedCase(odd, None, RandomBias(requires_grad=False))
    add("sink", replace(case, sink=torch.float32), "sm90", "sm90")
    add("packed", replace(case, of=packed), "sm90", "sm90")
    add("fp32", replace(case, bias=RandomBias(fp32=True)), "sm80", "sm80")
    add("mask", replace(case, mask=RandomMask(given="sparsity")), "sm80", "sm80")
    capped = replace(base, softcap=3.0)
    add("softcap", replace(fixed, of=capped), "sm80", "sm80")
    add("without a gradient", replace(fixed, of=base), "sm90", "sm90")

    bias, odd_bias = case.make_inputs().bias, fixed.make_inputs().bias
    add("expanded", case, "sm90", "sm90", bias[:1, :1].expand_as(bias))
    add("transposed", case, "sm90", "sm90", bias.mT.contiguous().mT)  # of a copy
    add("padded rows", case, "sm90", "sm90", in_larger(bias, 328))
    add("columns from the fifth on", case, "sm80", "sm80", in_larger(bias, 328, 5))
    add("odd rows", case, "sm80", "sm80", in_larger(bias, 327))
    add("300 keys in padded rows", fixed, "sm90", "sm90", in_larger(odd_bias, 328))
    # The gradient of which has no room between its rows.
    with_gradient = replace(fixed, bias=RandomBias())
    add("and a gradient", with_gradient, "sm90", "sm80", in_larger(odd_bias, 328))
    return made


@pytest.mark.cuda_only
@pytest.mark.parametrize("pass_name", ["forward", "backward"])
def test_which_kernels_run(pass_name: str) -> None:
    """By the names that a profiler sees."""
    calls = launches()

    def run() -> None:
        for _, case, inputs, _ in calls:
            run_masked(case, inputs)

    seen = kernels_run(run, pass_name)
    at = ("forward", "backward").index(pass_name)
    wanted = [f"{name}: {rows[at]}" for name, *_, rows in calls]
    assert [f"{name}: {row}" for (name, *_), row in zip(calls, seen, strict=False)] == wanted


# -- agreement with the reference ------------------------------------------------------------------


@ANY_HEAD_DIM
@pytest.mark.parametrize("own", OWN)
def test_what_shares_a_bias(check_mask: CheckMask, own: str, head_dim: int) -> None:
    """A gradient that is stored, and sums over sequences, heads and both."""
    for dtype in (torch.bfloat16, torch.float16):
        for causal in (False, True):
            of = make_case(
                batch=3,
                seqlen_q=200,
                seqlen_k=336,
                num_heads_k=2,
                head_dim=head_dim,
                dtype=dtype,
                causal=causal,
            )
            check_mask(MaskedCase(of, None, RandomBias(own)))


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
        of = make_case(
            seqlen_q=lengths[0],
            seqlen_k=lengths[1],
            num_heads_q=2,
            num_heads_k=1,
            head_dim=head_dim,
            dtype=dtype,
            causal=causal,
        )
        check_mask(MaskedCase(of, None, RandomBias(own)))


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
        of = make_case(
            seqlen_q=lengths[0],
            seqlen_k=lengths[1],
            num_heads_k=2,
            head_dim=head_dim,
            dtype=dtype,
            **mask,
        )
        check_mask(MaskedCase(of, None, RandomBias(own)))


@HEAD_DIM
@pytest.mark.parametrize("heads", [(1, 1), (3, 3), (4, 1), (6, 2), (16, 1)], ids=str)
def test_head_ratios(check_mask: CheckMask, heads: tuple[int, int], head_dim: int) -> None:
    """Query heads of one key head, each with a bias of its own or one for all."""
    of = make_case(
        seqlen_q=140,
        seqlen_k=272,
        num_heads_q=heads[0],
        num_heads_k=heads[1],
        head_dim=head_dim,
        causal=True,
    )
    for own in ("bhq", "bq"):
        check_mask(MaskedCase(of, None, RandomBias(own)))


@HEAD_DIM
def test_ctas_that_share_a_key_head(check_mask: CheckMask, head_dim: int) -> None:
    """Few key heads: fp32 partial sums of dk and dv, of tiles that no query sees too."""
    for lengths, own, mask in (
        ((300, 64), "bhq", {"causal": True}),
        ((100, 392), "hq", {"window": (0, 0)}),
        ((260, 136), "q", {}),
    ):
        of = make_case(
            batch=1,
            seqlen_q=lengths[0],
            seqlen_k=lengths[1],
            num_heads_q=16,
            num_heads_k=1,
            head_dim=head_dim,
            **mask,
        )
        if not ON_CPU:
            assert families.planned(of, "backward", bias=True)["dkdv_splits"] > 1, str(of)
        check_mask(MaskedCase(of, None, RandomBias(own)))


@ANY_HEAD_DIM
@pytest.mark.parametrize("scale", [0.0, -0.0, 0.3, 3.0])
def test_scales(check_mask: CheckMask, scale: float, head_dim: int) -> None:
    for own, dtype, hidden in (("bhq", torch.bfloat16, 0.0), ("hq", torch.float16, 0.3)):
        of = make_case(
            seqlen_q=130,
            seqlen_k=200,
            num_heads_k=2,
            head_dim=head_dim,
            dtype=dtype,
            softmax_scale=scale,
            causal=True,
        )
        check_mask(MaskedCase(of, None, RandomBias(own, hidden=hidden)))


@DTYPES
@HEAD_DIM
@pytest.mark.parametrize("sink", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_sinks(check_mask: CheckMask, sink: torch.dtype, head_dim: int, dtype: torch.dtype) -> None:
    """With rows that see the sink alone: of hidden keys, and those that come before all keys."""
    fields = {"num_heads_k": 2, "head_dim": head_dim, "dtype": dtype}
    for own, hidden in (("bhq", 0.0), ("hq", 0.95)):
        bias = RandomBias(own, hidden=hidden)
        check_mask(MaskedCase(make_case(seqlen_q=200, seqlen_k=40, **fields), None, bias, sink))
        of = make_case(seqlen_q=200, seqlen_k=136, causal=True, **fields)
        check_mask(MaskedCase(of, None, bias, sink))


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
        of = make_case(
            seqlen_q=200,
            seqlen_k=336,
            num_heads_k=2,
            head_dim=head_dim,
            dtype=dtype,
            causal=causal,
        )
        case = MaskedCase(of, None, RandomBias(own, hidden=hidden), sink)
        skip_without_masked_row(case)
        inputs = case.make_inputs()
        actual = assert_right(case, inputs)
        assert not actual.dbias[inputs.bias == -torch.inf].any()


@HEAD_DIM
@pytest.mark.parametrize("size", [64, 128])
def test_minus_infinity_hides_tiles(size: int, head_dim: int) -> None:
    """Whole tiles between others, the first and the last that a query meets, and all of a row."""
    of = make_case(seqlen_q=330, seqlen_k=400, num_heads_k=2, head_dim=head_dim)
    case = MaskedCase(of, None, RandomBias("bhq"))
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
    for each in (case, replace(case, of=replace(of, causal=True), sink=torch.float32)):
        dirty = with_bias(each.make_inputs(), inputs.bias.masked_fill(hidden, -torch.inf))
        assert not assert_right(each, dirty).dbias[hidden].any()


@DTYPES
@HEAD_DIM
@pytest.mark.parametrize("fill", [-1e4, 1e4, "least"])
def test_large_values(fill: float | str, head_dim: int, dtype: torch.dtype) -> None:
    """Keys with a large negative value, up to the dtype's least as other code hides them, and those
    beside large ones: they have no weight, as if they were hidden.
    """
    of = make_case(seqlen_q=200, seqlen_k=336, num_heads_k=2, head_dim=head_dim, dtype=dtype)
    case = MaskedCase(of, None, RandomBias("hq"))
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
def test_bad_values_stay_in_their_head(head_dim: int) -> None:
    """Infinity and NaN in the bias of one head of many, whose tiles a CTA takes between others."""
    sizes = {"batch": scaled(6, 2), "num_heads_q": scaled(16, 4), "num_heads_k": scaled(16, 4)}
    of = make_case(seqlen_q=300, seqlen_k=336, head_dim=head_dim, causal=True, **sizes)
    case = MaskedCase(of, None, RandomBias("bhq"))
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


# -- packed sequences ------------------------------------------------------------------------------

PACKED: dict[str, dict[str, Any]] = {
    "mixed": {"lengths_q": (64, 0, 200, 17, 130), "lengths_k": (90, 33, 129, 0, 130)},
    "same": {"lengths_q": (200, 0, 17, 333)},
    "used": {"lengths_q": (130, 20, 64), "used_q": (100, 0, 64), "used_k": (129, 20, 9)},
    "leftpad": {"lengths_q": (70, 20, 90), "lengths_k": (200, 90, 1), "leftpad": (130, 90, 0)},
    "empty": {"lengths_q": (0, 0), "lengths_k": (5, 0)},
    "keyless": {"lengths_q": (70, 5), "lengths_k": (0, 0)},
    "one query": {"lengths_q": (1, 1, 1), "lengths_k": (300, 0, 64)},
}


def assert_right_with_room(case: MaskedCase) -> None:
    """With a bias for longer sequences, of a multiple of 8 keys and NaN wherever there is no pair:
    beyond each sequence or, of a bias for all of them, beyond the longest. The gradient is 0 there.
    """
    skip_without_masked_row(case)
    inputs = case.make_inputs()
    of = case.of
    assert isinstance(of, VarlenCase)
    queries, ends, begins = of.used_q or of.lengths_q, of.used_k or of.keys, of.leftpad
    keys = tuple(end - begin for end, begin in zip(ends, begins or (0,) * of.batch, strict=True))
    batch, heads, rows, columns = inputs.bias.shape
    shape = (batch, heads, rows + 5, columns + 8 + -columns % 8)
    bias = inputs.bias.new_full(shape, torch.nan)
    for index in range(batch):
        most = (queries[index], keys[index]) if batch > 1 else (max(queries), max(keys))
        pairs = (index, slice(None), slice(most[0]), slice(most[1]))
        bias[pairs] = inputs.bias[pairs]
    bounds = {"max_seqlen_q": shape[2], "max_seqlen_k": shape[3]}
    actual = assert_right(case, with_bias(inputs, bias), **bounds)
    assert not actual.dbias[bias.isnan()].any()


@HEAD_DIM
@CAUSAL
@pytest.mark.parametrize("lengths", PACKED)
def test_packed(lengths: str, causal: bool, head_dim: int) -> None:
    """NaN reaches no result from rows that no sequence uses, nor from what a bias has beyond the
    sequences.
    """
    for own, dtype, hidden, sink in (
        ("bhq", torch.bfloat16, 0.0, None),
        ("bq", torch.float16, 0.7, torch.float32),
        ("hq", torch.bfloat16, 0.0, torch.bfloat16),
        ("q", torch.float16, 0.0, None),
    ):
        of = make_varlen_case(
            **PACKED[lengths], num_heads_k=2, head_dim=head_dim, dtype=dtype, causal=causal
        )
        assert_right_with_room(MaskedCase(of, None, RandomBias(own, hidden=hidden), sink))


@HEAD_DIM
@pytest.mark.parametrize("own", ["bhq", "hq"])
def test_a_sequence_does_not_see_its_neighbours(own: str, head_dim: int) -> None:
    """All of the others NaN, a bias of their own too: the same bits."""
    lengths = {"q": (70, 0, 1, 129, 200), "k": (130, 20, 0, 65, 192)}
    of = make_varlen_case(
        lengths_q=lengths["q"],
        lengths_k=lengths["k"],
        num_heads_k=2,
        head_dim=head_dim,
        causal=True,
    )
    case = MaskedCase(of, None, RandomBias(own))
    skip_without_masked_row(case)
    inputs = case.make_inputs()
    expected = run_masked(case, inputs)
    starts = {name: [0, *accumulate(each)] for name, each in lengths.items()}
    for index in range(of.batch):
        rows, keys = (slice(*starts[name][index : index + 2]) for name in ("q", "k"))
        dirty = {}
        for name, kept in (("q", rows), ("dout", rows), ("k", keys), ("v", keys)):
            x = getattr(inputs.of, name)
            dirty[name] = torch.full_like(x, torch.nan)
            dirty[name][kept] = x[kept]
        bias = inputs.bias
        if "b" in own:
            bias = torch.full_like(bias, torch.nan)
            bias[index] = inputs.bias[index]
        given = replace(inputs, of=replace(inputs.of, **dirty), bias=bias)
        result = run_masked(case, given)
        parts = {"out": rows, "lse": (slice(None), rows), "dk": keys, "dv": keys}
        if "b" in own:
            parts["dbias"] = index
        for name, at in parts.items():
            x, y = (each.tensors()[name][at] for each in (result, expected))
            assert torch.equal(bits(x), bits(y)), f"{name} of sequence {index}"


@pytest.mark.cuda_only
@HEAD_DIM
@pytest.mark.parametrize("own", ["bhq", "hq"])
def test_sequences_longer_than_the_bias(own: str, head_dim: int) -> None:
    """Which the host does not know: nothing faults, and the sequence that fits is right."""
    of = make_varlen_case(lengths_q=(104, 300), num_heads_k=2, head_dim=head_dim)
    case = MaskedCase(of, None, RandomBias(own))
    skip_without_masked_row(case)
    inputs = case.make_inputs()
    bias = inputs.bias[..., :104, :104].contiguous()
    bounds = {"max_seqlen_q": 104, "max_seqlen_k": 104}
    leaves = [getattr(inputs.of, name).detach().requires_grad_() for name in "qkv"]
    leaves.append(bias.requires_grad_())
    out = flash_attn_varlen_func(*leaves[:3], **inputs.of.lengths(), **bounds, attn_mask=leaves[3])
    _, dk, dv, dbias = torch.autograd.grad(out, leaves, inputs.of.dout)
    torch.cuda.synchronize()
    alone = [x.detach()[None, :104].requires_grad_() for x in leaves[:3]]
    alone.append(bias.detach()[:1].requires_grad_())
    expected = flash_attn_func(*alone[:3], attn_mask=alone[3])
    gradients = torch.autograd.grad(expected, alone, inputs.of.dout[None, :104])
    pairs = [(out, expected), (dk, gradients[1]), (dv, gradients[2])]
    for x, y in pairs:
        torch.testing.assert_close(x[:104], y[0], rtol=2e-2, atol=2e-2)
    if "b" in own:
        torch.testing.assert_close(dbias[:1], gradients[3], rtol=2e-2, atol=2e-2)


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
    of = make_case(
        batch=scaled(9, 1),
        seqlen_q=lengths[0],
        seqlen_k=lengths[1],
        num_heads_q=scaled(16, 4),
        num_heads_k=scaled(8, 2),
        head_dim=head_dim,
        **mask,
    )
    check_mask(MaskedCase(of, None, RandomBias(own)))


@CAUSAL
@HEAD_DIM
@pytest.mark.parametrize("own", ["bhq", "q"])
def test_many_tiles_of_one_key_head(
    check_mask: CheckMask, own: str, head_dim: int, causal: bool
) -> None:
    """More than SMs: of keys and of queries."""
    many = scaled(18_000, 600)
    for lengths in ((72, many), (many, 72)):
        of = make_case(
            batch=1,
            seqlen_q=lengths[0],
            seqlen_k=lengths[1],
            num_heads_q=2,
            num_heads_k=1,
            head_dim=head_dim,
            causal=causal,
        )
        check_mask(MaskedCase(of, None, RandomBias(own)))


@CAUSAL
@HEAD_DIM
def test_many_tiles_of_packed_sequences(head_dim: int, causal: bool) -> None:
    count, most = scaled(40, 6), scaled(300, 150)
    of = make_varlen_case(
        lengths_q=random_lengths(head_dim, count, most),
        lengths_k=random_lengths(head_dim + 1, count, most),
        num_heads_q=4,
        num_heads_k=2,
        head_dim=head_dim,
        causal=causal,
    )
    for own in ("bhq", "hq"):
        assert_right_with_room(MaskedCase(of, None, RandomBias(own)))


# -- where a bias lies -----------------------------------------------------------------------------


@DTYPES
@HEAD_DIM
@pytest.mark.parametrize(("width", "first"), [(216, 8), (264, 64), (200, 0)])
def test_padded_rows(width: int, first: int, head_dim: int, dtype: torch.dtype) -> None:
    """NaN around: the bits of a contiguous bias."""
    for own, causal in (("bhq", False), ("hq", True)):
        of = make_case(
            seqlen_q=130, seqlen_k=200, num_heads_k=2, head_dim=head_dim, dtype=dtype, causal=causal
        )
        case = MaskedCase(of, None, RandomBias(own))
        skip_without_masked_row(case)
        inputs = case.make_inputs()
        padded = with_bias(inputs, in_larger(inputs.bias, width, first))
        assert padded.bias.stride(2) == width
        # The gradient for both sequences is a sum of two, in which order does not matter.
        assert_same_bits(assert_right(case, padded), run_masked(case, inputs), own)


@CAUSAL
@HEAD_DIM
@pytest.mark.parametrize(
    "lengths", [(130, 197), (65, 1), (200, 63), (129, 129), (70, 65), (1, 190)], ids=str
)
def test_any_number_of_keys_in_padded_rows(
    lengths: tuple[int, int], head_dim: int, causal: bool
) -> None:
    """The same bits whatever is between rows. Where the bias has a gradient the sm80 rows make
    that.
    """
    of = make_case(
        seqlen_q=lengths[0],
        seqlen_k=lengths[1],
        num_heads_k=2,
        head_dim=head_dim,
        causal=causal,
    )
    for own in ("bhq", "q"):
        case = MaskedCase(of, None, RandomBias(own))
        skip_without_masked_row(case)
        inputs = case.make_inputs()
        given = [
            with_bias(inputs, in_larger(inputs.bias, width, 8, outside))
            for width, outside in ((208, 0.0), (224, torch.nan))
        ]
        assert_right(case, given[1])
        fixed = replace(case, bias=RandomBias(own, requires_grad=False))
        assert_same_bits(assert_right(fixed, given[1]), run_masked(fixed, given[0]), own)


@pytest.mark.cuda_only
@pytest.mark.parametrize("far", ["batch", "head", "row"])
@HEAD_DIM
def test_strides_past_two_to_the_31_elements(far: str, head_dim: int) -> None:
    """The bits of a contiguous bias."""
    if torch.cuda.mem_get_info()[0] < 8 << 30:
        pytest.skip("needs 8 GiB of free memory")
    of = make_case(seqlen_q=260, seqlen_k=264, num_heads_q=3, num_heads_k=3, head_dim=head_dim)
    case = MaskedCase(of, None, RandomBias("bhq"))
    skip_without_masked_row(case)
    inputs = case.make_inputs()
    sizes = dict(zip(("batch", "head", "row"), inputs.bias.shape, strict=False))
    strides = {"batch": 3 * 260 * 264, "head": 260 * 264, "row": 264}
    if far == "row":
        strides |= {"batch": 3 * 264, "head": 264}
    elif far == "head":
        strides["batch"] = 260 * 264
    strides[far] = -(-(1 << 31) // (sizes[far] - 1) // 8) * 8 + 8
    last = sum((sizes[dim] - 1) * step for dim, step in strides.items())
    assert (sizes[far] - 1) * strides[far] > 1 << 31 and last < 3 << 30
    buffer = torch.empty(last + 264, dtype=of.dtype, device=DEVICE)
    moved = buffer.as_strided(inputs.bias.shape, (*strides.values(), 1)).copy_(inputs.bias)
    assert_same_bits(run_masked(case, with_bias(inputs, moved)), run_masked(case, inputs), far)
    del buffer, moved
    torch.cuda.empty_cache()


# -- the sm80 kernels on the same GPU --------------------------------------------------------------

AGREEING: tuple[tuple[str, dict[str, Any]], ...] = (
    ("bhq", {"head_dim": 64}),
    ("hq", {"head_dim": 128, "dtype": torch.float16, "causal": True}),
    ("q", {"head_dim": 40, "dtype": torch.float16, "window": (100, 20)}),
    ("bq", {"head_dim": 72, "window": (-1, 7)}),
    ("bhq", {"head_dim": 128, "num_heads_k": 1, "softmax_scale": 0.5}),
    ("hq", {"head_dim": 64, "seqlen_q": 1000, "seqlen_k": 904, "causal": True}),
)


@pytest.mark.parametrize(("own", "fields"), AGREEING, ids=str)
def test_both_families_agree(own: str, fields: dict[str, Any]) -> None:
    """With the reference and with each other: the same values in fp32 run sm80 rows."""
    sizes = {"seqlen_q": 301, "seqlen_k": 456, "num_heads_k": 2}
    case = MaskedCase(make_case(**{**sizes, **fields}), None, RandomBias(own), torch.float32)
    skip_without_masked_row(case)
    inputs = case.make_inputs()
    expected, naive = masked_reference(case, inputs)
    result = run_masked(case, inputs)
    other = run_masked(case, with_bias(inputs, inputs.bias.float()))
    for each in (result, other):
        assert_close(each, expected, naive)
    exact = {name: x.double() for name, x in other.tensors().items()}
    assert_close(result, replace(expected, **exact), naive)


@HEAD_DIM
def test_a_bias_without_a_gradient(head_dim: int) -> None:
    """The same bits as with one."""
    of = make_case(seqlen_q=200, seqlen_k=336, num_heads_k=2, head_dim=head_dim, causal=True)
    for own in ("bhq", "q"):
        case = MaskedCase(of, None, RandomBias(own))
        skip_without_masked_row(case)
        inputs = case.make_inputs()
        fixed = replace(case, bias=RandomBias(own, requires_grad=False))
        assert_same_bits(run_masked(fixed, inputs), run_masked(case, inputs), own)


# -- the same bits ---------------------------------------------------------------------------------


@CAUSAL
@HEAD_DIM
@pytest.mark.parametrize("own", ["bhq", "hq"])
def test_repeated_runs_give_the_same_bits(own: str, head_dim: int, causal: bool) -> None:
    """All but dq, and the bias's gradient where it is a sum."""
    of = make_case(
        batch=scaled(4, 3),
        seqlen_q=scaled(500, 90),
        seqlen_k=scaled(528, 152),
        num_heads_q=scaled(12, 4),
        num_heads_k=scaled(12, 2),
        head_dim=head_dim,
        causal=causal,
    )
    case = MaskedCase(of, None, RandomBias(own), torch.float32)
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
