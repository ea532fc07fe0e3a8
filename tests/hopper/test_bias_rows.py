"""Which calls with a bias the Hopper kernels take, that they read a bias wherever it lies and
nothing around it, and that the sm80 kernels agree with them.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.cases import families
from tests.cases.attention import Alibi
from tests.cases.harness import DEVICE, DTYPE_NAMES, assert_same_bits, make_case, make_varlen_case
from tests.cases.masked import MaskedCase, MaskedInputs, RandomBias, RandomMask
from tests.cases.masked_harness import masked_reference, run_masked
from tests.cases.matrix import inputs_of
from tests.hopper.sm90 import CAUSAL, DTYPES, check_launches, row_name, runs_sm90_kernels
from tests.hopper.sm90_bias import HEAD_DIM, OWN, assert_right, bias_case, with_bias
from tests.reference.tolerance import assert_close

__all__ = ["runs_sm90_kernels"]  # pytest finds it here

pytestmark = pytest.mark.gpu

BUCKETS = {8: 64, 40: 64, 64: 64, 72: 128, 96: 128, 128: 128, 200: 256}


def in_larger(bias: Tensor, width: int, first: int = 8, outside: float = torch.nan) -> Tensor:
    """The same as a part of a larger tensor, whose rows have `width` elements."""
    batch, heads, rows, columns = bias.shape
    larger = bias.new_full((batch, heads + 2, rows + 5, width), outside)
    return larger[:, 1:-1, 3:-2, first : first + columns].copy_(bias)


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
    at = ("forward", "backward").index(pass_name)
    calls = [
        (name, partial(run_masked, case, inputs), rows[at])
        for name, case, inputs, rows in launches()
    ]
    check_launches(calls, pass_name)


# -- where a bias lies -----------------------------------------------------------------------------


@DTYPES
@HEAD_DIM
@pytest.mark.parametrize(("width", "first"), [(216, 8), (264, 64), (200, 0)])
def test_padded_rows(width: int, first: int, head_dim: int, dtype: torch.dtype) -> None:
    """NaN around: the bits of a contiguous bias."""
    for own, causal in (("bhq", False), ("hq", True)):
        case = bias_case(own, (130, 200), head_dim=head_dim, dtype=dtype, causal=causal)
        inputs = inputs_of(case)
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
    for own in ("bhq", "q"):
        case = bias_case(own, lengths, head_dim=head_dim, causal=causal)
        inputs = inputs_of(case)
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
    case = bias_case("bhq", (260, 264), (3, 3), head_dim=head_dim)
    inputs = inputs_of(case)
    sizes = dict(zip(("batch", "head", "row"), inputs.bias.shape, strict=False))
    strides = {"batch": 3 * 260 * 264, "head": 260 * 264, "row": 264}
    if far == "row":
        strides |= {"batch": 3 * 264, "head": 264}
    elif far == "head":
        strides["batch"] = 260 * 264
    strides[far] = -(-(1 << 31) // (sizes[far] - 1) // 8) * 8 + 8
    last = sum((sizes[dim] - 1) * step for dim, step in strides.items())
    assert (sizes[far] - 1) * strides[far] > 1 << 31 and last < 3 << 30
    buffer = torch.empty(last + 264, dtype=case.of.dtype, device=DEVICE)
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
    inputs = inputs_of(case)
    expected, naive = masked_reference(case, inputs)
    result = run_masked(case, inputs)
    other = run_masked(case, with_bias(inputs, inputs.bias.float()))
    for each in (result, other):
        assert_close(each, expected, naive)
    exact = {name: x.double() for name, x in other.tensors().items()}
    assert_close(result, replace(expected, **exact), naive)
