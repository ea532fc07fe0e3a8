"""Biases on the scores and their gradients, against the fp64 reference and torch's attention."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from flash_attn_cuda import flash_attn_func
from tests.cases.attention import Alibi
from tests.cases.harness import bits, make_case, make_varlen_case, scaled
from tests.cases.masked import OWN, MaskedCase, RandomBias, RandomMask
from tests.cases.masked_harness import (
    CheckMask,
    check_filled_rows,
    masked_reference,
    run_masked,
    skip_without_masked_row,
)
from tests.cases.pairwise import pairwise
from tests.reference.tolerance import assert_close

pytestmark = pytest.mark.gpu


CAUSAL = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
HEAD_DIM = pytest.mark.parametrize("head_dim", [64, 128])
FP32 = pytest.mark.parametrize("fp32", [False, True], ids=["same", "fp32"])


@HEAD_DIM
@FP32
@pytest.mark.parametrize("own", OWN)
def test_what_shares_a_bias(check_mask: CheckMask, own: str, fp32: bool, head_dim: int) -> None:
    """The gradient is the sum over what it is shared by: sequences, heads, queries."""
    for dtype, causal in ((torch.bfloat16, False), (torch.float16, True)):
        of = make_case(
            batch=3,
            seqlen_q=200,
            seqlen_k=333,
            num_heads_k=2,
            head_dim=head_dim,
            dtype=dtype,
            causal=causal,
        )
        check_mask(MaskedCase(of, None, RandomBias(own, fp32)))


LENGTHS = (
    *((1, 1), (1, 300), (300, 1), (3, 64), (65, 63), (127, 129), (128, 128), (129, 127)),
    *((255, 257), (321, 65), (64, 513), (500, 33)),
)


@CAUSAL
@FP32
@pytest.mark.parametrize("lengths", LENGTHS, ids=lambda n: f"{n[0]}x{n[1]}")
def test_lengths(check_mask: CheckMask, lengths: tuple[int, int], fp32: bool, causal: bool) -> None:
    """Odd numbers of keys too, where rows of a bias start on no boundary."""
    for head_dim, own in ((64, "hq"), (128, "bhq"), (128, "h")):
        of = make_case(
            seqlen_q=lengths[0],
            seqlen_k=lengths[1],
            num_heads_q=2,
            num_heads_k=1,
            head_dim=head_dim,
            causal=causal,
        )
        check_mask(MaskedCase(of, None, RandomBias(own, fp32)))


@pytest.mark.parametrize("head_dim", [8, 40, 59, 96, 160, 192, 256, 512])
def test_head_dims(check_mask: CheckMask, head_dim: int) -> None:
    of = make_case(batch=1, seqlen_q=211, seqlen_k=300, num_heads_k=2, head_dim=head_dim)
    check_mask(MaskedCase(of, None, RandomBias("hq")))
    check_mask(MaskedCase(replace(of, causal=True), None, RandomBias("bhq", fp32=True)))


@HEAD_DIM
@FP32
def test_many_tiles(check_mask: CheckMask, fp32: bool, head_dim: int) -> None:
    of = make_case(
        batch=2,
        seqlen_q=scaled(1500, 300),
        seqlen_k=scaled(1700, 400),
        num_heads_k=1,
        head_dim=head_dim,
        causal=True,
    )
    for own in ("bhq", "q", ""):
        check_mask(MaskedCase(of, None, RandomBias(own, fp32)))


@pytest.mark.parametrize(
    "features",
    [
        {"window": (70, -1)},
        {"window": (33, 20), "causal": True},
        {"alibi": Alibi.per_batch},
        {"dropout_p": 0.3},
        {"dropout_p": 0.17, "alibi": Alibi.per_head, "window": (90, 5)},
        {"softmax_scale": -0.3},
        {"softmax_scale": 0.0},
    ],
    ids=lambda features: "-".join(features),
)
@HEAD_DIM
def test_with_other_features(
    check_mask: CheckMask, features: dict[str, Any], head_dim: int
) -> None:
    of = make_case(seqlen_q=200, seqlen_k=333, num_heads_k=2, head_dim=head_dim, **features)
    for own, sink in (("bhq", None), ("h", torch.float32)):
        check_mask(MaskedCase(of, None, RandomBias(own), sink))


@pytest.mark.parametrize("softcap", [0.5, 20.0])
def test_with_softcap(check_mask: CheckMask, softcap: float) -> None:
    """The cap does not see the bias. It has no gradient then, the others have theirs."""
    of = make_case(seqlen_q=200, seqlen_k=333, num_heads_k=2, softcap=softcap, causal=True)
    for own in ("hq", "b"):
        check_mask(MaskedCase(of, None, RandomBias(own, requires_grad=False)))


@pytest.mark.parametrize("hidden", [0.1, 0.7, 0.99, 1.0])
@FP32
def test_minus_infinity_hides(check_mask: CheckMask, fp32: bool, hidden: float) -> None:
    """Up to whole tiles, and rows that see nothing."""
    for own, head_dim in (("bhq", 64), ("h", 128)):
        of = make_case(seqlen_q=200, seqlen_k=333, num_heads_k=2, head_dim=head_dim)
        check_mask(MaskedCase(of, None, RandomBias(own, fp32, hidden)))
        case = MaskedCase(of, None, RandomBias(own, fp32, hidden), torch.float32)
        check_mask(case, seed=1)


@pytest.mark.parametrize("fill", [-1e4, -3e4, 1e4])
def test_large_values(fill: float) -> None:
    """Keys with a large negative value, as other code hides them, and those beside large ones: they
    have no weight, as if they were hidden.
    """
    of = make_case(seqlen_q=200, seqlen_k=333, num_heads_k=2, dtype=torch.float16)
    case = MaskedCase(of, None, RandomBias("hq", fp32=True))
    skip_without_masked_row(case)
    inputs = case.make_inputs()
    chosen = torch.rand(inputs.bias.shape, device=inputs.bias.device) < 0.5
    chosen[..., 5] = fill > 0.0
    hidden = chosen if fill < 0.0 else ~chosen
    large = inputs.bias.masked_fill(chosen, fill)
    actual, expected = (
        run_masked(case, replace(inputs, bias=bias)).tensors()
        for bias in (large, large.masked_fill(hidden, -torch.inf))
    )
    for name, y in expected.items():
        torch.testing.assert_close(
            actual[name], y, rtol=1e-3, atol=1e-3, msg=lambda m, n=name: f"{n}: {m}"
        )
    assert not actual["dbias"][hidden].any()


@HEAD_DIM
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("fill", [-1e9, -1e12, -1e30, "least"])
def test_filled_rows(fill: float | str, dtype: torch.dtype, head_dim: int) -> None:
    of = make_case(
        seqlen_q=200, seqlen_k=333, num_heads_q=4, num_heads_k=2, head_dim=head_dim, dtype=dtype
    )
    case = MaskedCase(of, None, RandomBias("hq", fp32=True))
    skip_without_masked_row(case)
    check_filled_rows(case, torch.finfo(torch.float32).min if fill == "least" else float(fill))


@HEAD_DIM
def test_with_a_mask(check_mask: CheckMask, head_dim: int) -> None:
    of = make_case(seqlen_q=200, seqlen_k=333, num_heads_k=2, head_dim=head_dim, causal=True)
    for mask in (RandomMask(0.5, 1, "hq", "sparsity"), RandomMask(0.5, 128, "bq", "blocks")):
        for own in ("bhq", "q", "h"):
            check_mask(MaskedCase(of, mask, RandomBias(own)))


@HEAD_DIM
@CAUSAL
def test_packed(check_mask: CheckMask, causal: bool, head_dim: int) -> None:
    for lengths in (
        {"lengths_q": (64, 0, 200, 17, 130), "lengths_k": (90, 33, 129, 0, 130)},
        {"lengths_q": (130, 20, 64), "used_q": (100, 0, 64), "used_k": (129, 20, 9)},
        {"lengths_q": (70, 20), "lengths_k": (200, 90), "leftpad": (130, 90)},
        {"lengths_q": (0, 0), "lengths_k": (5, 0)},
    ):
        of = make_varlen_case(**lengths, num_heads_k=2, head_dim=head_dim, causal=causal)
        for own, fp32 in (("bhq", False), ("h", True), ("", False), ("q", True)):
            check_mask(MaskedCase(of, None, RandomBias(own, fp32)))
        mask = RandomMask(0.5, 64, "bhq", "sparsity")
        check_mask(MaskedCase(of, mask, RandomBias("b"), torch.bfloat16))


@FP32
@pytest.mark.parametrize("strides", ["expanded", "transposed", "sliced", "misaligned"])
def test_any_strides(strides: str, fp32: bool) -> None:
    """The results are those of a contiguous bias, to the bit but for what is summed by atomics."""
    of = make_case(seqlen_q=130, seqlen_k=200, num_heads_k=2)
    case = MaskedCase(of, None, RandomBias("q" if strides == "expanded" else "bhq", fp32))
    skip_without_masked_row(case)
    inputs = case.make_inputs()
    bias = inputs.bias
    if strides == "expanded":
        same = bias.expand(2, 4, -1, -1)
    elif strides == "transposed":
        same = bias.mT.contiguous().mT
    elif strides == "sliced":
        same = torch.full((2, 5, 140, 211), torch.nan, dtype=bias.dtype, device=bias.device)
        same = same[:, 1:, 3:133, 5:205].copy_(bias)
    else:
        same = torch.empty(bias.numel() + 1, dtype=bias.dtype, device=bias.device)
        same = same[1:].view(bias.shape).copy_(bias)
    tensors = (inputs.of.q, inputs.of.k, inputs.of.v)
    # What TMA cannot load runs the kernels of a bias in fp32, whatever its dtype.
    suits_tma = strides in ("expanded", "transposed")
    expected = flash_attn_func(*tensors, attn_mask=bias if suits_tma else bias.float())
    assert torch.equal(bits(flash_attn_func(*tensors, attn_mask=same)), bits(expected))
    actual = run_masked(case, replace(inputs, bias=same))
    wanted, naive = masked_reference(case, replace(inputs, bias=same))
    assert_close(actual, wanted, naive)


@HEAD_DIM
@pytest.mark.parametrize("own", ["bhq", "hq", "b", ""])
def test_gradients_are_those_of_torch(own: str, head_dim: int) -> None:
    """scaled_dot_product_attention with the same bias, on equal heads."""
    of = make_case(batch=2, seqlen_q=140, seqlen_k=270, head_dim=head_dim)
    case = MaskedCase(of, None, RandomBias(own))
    skip_without_masked_row(case)
    inputs = case.make_inputs()
    actual = run_masked(case, inputs, use_dlse=False)
    leaves = [
        x.detach().clone().requires_grad_()
        for x in (inputs.of.q, inputs.of.k, inputs.of.v, inputs.bias)
    ]
    q, k, v = (x.transpose(1, 2) for x in leaves[:3])
    out = scaled_dot_product_attention(q, k, v, leaves[3].expand(2, 4, 140, 270)).transpose(1, 2)
    gradients = torch.autograd.grad(out, leaves, inputs.of.dout)
    results = (actual.dq, actual.dk, actual.dv, actual.dbias)
    for name, x, y in zip(
        ("out", "dq", "dk", "dv", "dbias"), (actual.out, *results), (out, *gradients), strict=True
    ):
        error = (x.float() - y.float()).abs().max().item()
        assert error <= 0.03 * y.float().abs().max().item(), f"{name}: {error}"


SETTINGS: dict[str, tuple[Any, ...]] = {
    "dtype": (torch.bfloat16, torch.float16),
    "head_dim": (40, 64, 96, 128, 256, 320, 512),
    "heads": ((4, 4), (6, 2), (4, 1)),
    "lengths": ((130, 130), (70, 201), (201, 70), (1, 150), (257, 129)),
    "bias": tuple(RandomBias(own, own in ("q", "bh")) for own in OWN),
    "mask": (None, RandomMask(0.5, 1, "bhq", "sparsity"), RandomMask(0.5, 64, "h", "blocks")),
    "range": ({}, {"causal": True}, {"window": (33, -1)}, {"window": (60, 9)}),
    "alibi": (None, Alibi.per_batch),
    "dropout_p": (0.0, 0.2),
    "softmax_scale": (None, -0.2),
    "sink": (None, torch.float32),
}


def combined_case(
    heads: Any, lengths: Any, mask: Any, bias: Any, sink: Any, **fields: Any
) -> MaskedCase:
    """A case of one combination of SETTINGS."""
    of = make_case(
        num_heads_q=heads[0],
        num_heads_k=heads[1],
        seqlen_q=lengths[0],
        seqlen_k=lengths[1],
        **fields.pop("range"),
        **fields,
    )
    return MaskedCase(of, mask, bias, sink)


@pytest.mark.parametrize("case", [combined_case(**row) for row in pairwise(SETTINGS)], ids=str)
def test_combinations(check_mask: CheckMask, case: MaskedCase) -> None:
    check_mask(case)
