"""Agreement with torch's FlexAttention, compiled, on its own block masks. On the CPU that is eager,
and has no backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from flash_attn_cuda import BlockSparsity, flash_attn_func
from tests.cases.harness import DEVICE, ON_CPU, make_case, scaled
from tests.cases.inductor import has_python_headers
from tests.cases.masked import MaskedCase, RandomBias, RandomMask
from tests.cases.masked_harness import skip_without_masked_row
from tests.cases.matrix import inputs_of
from tests.reference import AttentionResult, attention_with_gradients, low_precision
from tests.reference.tolerance import assert_close

pytestmark = pytest.mark.gpu

SEQLEN = scaled(1000, 300)
BATCH, HEADS_Q, HEADS_K = 2, 4, 2
MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def causal(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return key <= query


def window(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return (query - key <= 70) & (key <= query)


def documents(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return (query // (90 + 41 * b)) == (key // (90 + 41 * b))


def strides_by_head(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return (key <= query) & (((query - key) % (h + 2) == 0) | (query - key < 20 * b))


@pytest.fixture(scope="module")
def flex() -> Any:
    """torch.compile'd on CUDA, where eager takes the memory of all scores in fp32."""
    if ON_CPU:
        return flex_attention
    if not has_python_headers():
        pytest.skip("inductor needs Python's headers")
    torch._dynamo.reset()
    return torch.compile(flex_attention, dynamic=False)


def mask_of(mask_mod: MaskMod) -> Tensor:
    """(B, Hq, S, S), what the function says of every pair."""
    sizes = (BATCH, HEADS_Q, SEQLEN, SEQLEN)
    index = [
        torch.arange(size, device=DEVICE).view(-1, *(1,) * (3 - dim))
        for dim, size in enumerate(sizes)
    ]
    return mask_mod(*index).expand(sizes)


def results_of(
    attend: Callable[..., Tensor], tensors: tuple[Tensor, ...], dout: Tensor, *, backward: bool
) -> dict[str, Tensor]:
    """out and, with a backward, the gradients of q, k, v and, where there is a fourth, the bias."""
    if not backward:
        with torch.no_grad():
            return {"out": attend(*tensors)}
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    out = attend(*leaves)
    gradients = torch.autograd.grad(out, leaves, dout)
    return {"out": out.detach()} | dict(zip(("dq", "dk", "dv", "dbias"), gradients, strict=False))


def assert_agree(actual: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    """To the roundings of two kernels in 16 bits, in what the other has."""
    for name, y in other.items():
        error = (actual[name].float() - y.float()).abs().max().item()
        assert error <= 0.03 * y.float().abs().max().item(), f"{name}: {error}"


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("mask_mod", [causal, window, documents, strides_by_head])
def test_block_masks(flex: Any, mask_mod: MaskMod, head_dim: int) -> None:
    """The same BlockMask for both: ours converts it, in the call or before."""
    of = make_case(
        batch=BATCH,
        seqlen_q=SEQLEN,
        seqlen_k=SEQLEN,
        num_heads_q=HEADS_Q,
        num_heads_k=HEADS_K,
        head_dim=head_dim,
    )
    skip_without_masked_row(MaskedCase(of, RandomMask()))
    inputs = of.make_inputs()
    tensors = (inputs.q, inputs.k, inputs.v)
    block_mask = create_block_mask(mask_mod, BATCH, HEADS_Q, SEQLEN, SEQLEN, device=DEVICE)

    def theirs(*tensors: Tensor) -> Tensor:
        heads_first = (x.transpose(1, 2) for x in tensors)
        return flex(*heads_first, block_mask=block_mask, enable_gqa=True).transpose(1, 2)

    other = results_of(theirs, tensors, inputs.dout, backward=not ON_CPU)
    masked = {"mask": mask_of(mask_mod)}
    expected = attention_with_gradients(*tensors, inputs.dout, **masked)
    naive = low_precision(*tensors, inputs.dout, **masked)
    for given in (block_mask, BlockSparsity.from_block_mask(block_mask)):

        def ours(*tensors: Tensor, given: Any = given) -> Tensor:
            return flash_attn_func(*tensors, block_mask=given)

        actual = results_of(ours, tensors, inputs.dout, backward=True)
        assert_agree(actual, other)
        lse = flash_attn_func(*tensors, block_mask=given, return_attn_probs=True)[1]
        assert_close(AttentionResult(lse=lse, **actual), expected, naive)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_biases_by_score_mod(flex: Any, head_dim: int) -> None:
    """A bias that FlexAttention adds in a score_mod, and its gradient."""
    of = make_case(
        batch=BATCH,
        seqlen_q=SEQLEN,
        seqlen_k=SEQLEN,
        num_heads_q=HEADS_Q,
        num_heads_k=HEADS_K,
        head_dim=head_dim,
    )
    case = MaskedCase(of, RandomMask(), RandomBias("hq"))
    inputs = inputs_of(case)
    block_mask = create_block_mask(causal, BATCH, HEADS_Q, SEQLEN, SEQLEN, device=DEVICE)

    def theirs(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        table = bias[0]

        def add(score: Tensor, b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return score + table[h, query, key]

        heads_first = (x.transpose(1, 2) for x in (q, k, v))
        out = flex(*heads_first, score_mod=add, block_mask=block_mask, enable_gqa=True)
        return out.transpose(1, 2)

    def ours(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        return flash_attn_func(q, k, v, attn_mask=bias, block_mask=block_mask)

    tensors = (inputs.of.q, inputs.of.k, inputs.of.v, inputs.bias)
    other = results_of(theirs, tensors, inputs.of.dout, backward=not ON_CPU)
    assert_agree(results_of(ours, tensors, inputs.of.dout, backward=True), other)
