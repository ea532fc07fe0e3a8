"""Forms of a small call in fp64, dense, masked and packed, by the package and the reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from flash_attn_cuda import BlockSparsity, flash_attn_func, flash_attn_varlen_func
from tests.cases.masked_operators import SCALE, int32
from tests.reference import attention, varlen_attention

Outputs = tuple[Tensor, Tensor]


class Form(NamedTuple):
    """Shapes of q, k, v and of a bias and a sink, and (out, softmax_lse) of such: the package's and
    the reference's.
    """

    shapes: tuple[tuple[int, ...], ...]
    attend: Callable[..., Outputs]
    expected: Callable[..., Outputs]

    def make_inputs(self, **options: Any) -> list[Tensor]:
        return [torch.randn(x, **{"dtype": torch.float64, **options}) for x in self.shapes]


DENSE = ((2, 7, 4, 16), (2, 9, 2, 16), (2, 9, 2, 24))
PACKED = ((10, 4, 16), (11, 2, 16), (11, 2, 24))
STARTS = {"cu_seqlens_q": int32(0, 3, 3, 10), "cu_seqlens_k": int32(0, 4, 5, 11)}
USED = {"seqused_q": int32(2, 0, 5), "seqused_k": int32(3, 1, 6), "leftpad_k": int32(1, 0, 2)}
MASK = torch.rand(1, 1, 7, 9, generator=torch.Generator().manual_seed(0)) < 0.6
SLOPES = torch.linspace(0.1, 0.5, 12).view(3, 4)


def on(x: Tensor, given: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: y.to(x.device) for name, y in given.items()}


def dense(q: Tensor, k: Tensor, v: Tensor, **more: Any) -> Outputs:
    options = {"softmax_scale": SCALE, "causal": True, "return_attn_probs": True, **more}
    return flash_attn_func(q, k, v, **options)[:2]


def masked(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, sink: Tensor) -> Outputs:
    sparsity = BlockSparsity.from_mask(MASK.to(q.device))
    return dense(q, k, v, attn_mask=bias, block_mask=sparsity, sink=sink)


def packed(q: Tensor, k: Tensor, v: Tensor, **more: Any) -> Outputs:
    options = {"softmax_scale": SCALE, "return_attn_probs": True, **more}
    return flash_attn_varlen_func(q, k, v, **on(q, STARTS), **{**MOST, **options})[:2]


MOST = {"max_seqlen_q": 7, "max_seqlen_k": None}
FORMS = {
    "dense": Form(
        DENSE, dense, lambda *x: attention(*x, softmax_scale=SCALE, causal=True)
    ),
    "masked": Form(
        (*DENSE, (1, 4, 7, 9), (4,)),
        masked,
        lambda q, k, v, bias, sink: attention(
            q, k, v, softmax_scale=SCALE, causal=True, mask=MASK, bias=bias, sink=sink
        ),
    ),
    "packed": Form(
        PACKED,
        lambda *x: packed(*x, causal=True),
        lambda *x: varlen_attention(*x, **STARTS, softmax_scale=SCALE, causal=True),
    ),
    "used": Form(  # rows that take no part, and what else there is
        PACKED,
        lambda *x: packed(
            *x, window_size=(None, 1), softcap=2.0, alibi_slopes=SLOPES.to(x[0].device),
            num_splits=2, **on(x[0], USED),
        ),
        lambda *x: varlen_attention(
            *x, **STARTS, **USED, softmax_scale=SCALE, window=(-1, 1), softcap=2.0,
            alibi_slopes=SLOPES.double(),
        ),
    ),
}  # fmt: skip
over_forms = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)


def loss(outputs: tuple[Tensor, ...]) -> Tensor:
    return sum((x.nan_to_num(neginf=0.0).sin() * (i + 1)).sum() for i, x in enumerate(outputs))


def gradients_of(function: Callable[..., Outputs], inputs: list[Tensor]) -> tuple[Tensor, ...]:
    return torch.autograd.grad(loss(function(*inputs)), inputs)
