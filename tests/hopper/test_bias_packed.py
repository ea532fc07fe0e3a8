"""The rows of Hopper kernels for a bias on packed sequences, whose ends lie anywhere in what a bias
has for them: agreement with the reference, and that no sequence sees anything of the others.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flash_attn_cuda import flash_attn_func, flash_attn_varlen_func
from tests.cases.attention import VarlenCase
from tests.cases.harness import make_varlen_case, scaled
from tests.cases.masked import MaskedCase, RandomBias
from tests.cases.matrix import inputs_of
from tests.hopper.sm90 import CAUSAL, check_neighbours, many_sequences, runs_sm90_kernels
from tests.hopper.sm90_bias import HEAD_DIM, assert_right, with_bias

__all__ = ["runs_sm90_kernels"]  # pytest finds it here

pytestmark = pytest.mark.gpu

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
    inputs = inputs_of(case)
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
    of = make_varlen_case(
        lengths_q=(70, 0, 1, 129, 200),
        lengths_k=(130, 20, 0, 65, 192),
        num_heads_k=2,
        head_dim=head_dim,
        causal=True,
    )
    results = ("out", "lse", "dk", "dv", "dbias")[: 5 if "b" in own else 4]
    check_neighbours(MaskedCase(of, None, RandomBias(own)), results)


@pytest.mark.cuda_only
@HEAD_DIM
@pytest.mark.parametrize("own", ["bhq", "hq"])
def test_sequences_longer_than_the_bias(own: str, head_dim: int) -> None:
    """Which the host does not know: nothing faults, and the sequence that fits is right."""
    of = make_varlen_case(lengths_q=(104, 300), num_heads_k=2, head_dim=head_dim)
    case = MaskedCase(of, None, RandomBias(own))
    inputs = inputs_of(case)
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


@CAUSAL
@HEAD_DIM
def test_many_tiles_of_packed_sequences(head_dim: int, causal: bool) -> None:
    of = many_sequences(head_dim, scaled(40, 6), scaled(300, 150), (4, 2), causal=causal)
    for own in ("bhq", "hq"):
        assert_right_with_room(MaskedCase(of, None, RandomBias(own)))
