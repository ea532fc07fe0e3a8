"""What FlopCounterMode counts: products on visible pairs, forward, backward, in a direction."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.func import jvp
from torch.utils.flop_counter import FlopCounterMode

from flash_attn_cuda import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from tests.cases.attention import AttentionCase
from tests.cases.masked_operators import int32

SHAPE: dict[str, Any] = {"num_heads_q": 4, "num_heads_k": 2, "head_dim": 16, "head_dim_v": 8}
CASE = AttentionCase(device="cpu", dtype=torch.float32, **SHAPE)
CASES = [
    replace(CASE, seqlen_q=seqlen_q, seqlen_k=seqlen_k, causal=causal, window=window)
    for seqlen_q, seqlen_k in ((7, 7), (3, 9), (9, 3))
    for causal, window in ((False, (-1, -1)), (True, (-1, -1)), (True, (2, -1)), (False, (1, 4)))
]


def counted(function: Callable[..., Any], *arguments: Any, **options: Any) -> int:
    with FlopCounterMode(display=False) as mode:
        function(*arguments, **options)
    return mode.get_total_flops()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_derivatives(case: AttentionCase) -> None:
    of = case.make_inputs()
    leaves = [x.requires_grad_() for x in (of.q, of.k, of.v)]
    moved = [x.detach() for x in leaves]

    def attend(*x: Tensor) -> Tensor:
        return flash_attn_func(*x, causal=case.causal, window_size=case.window)

    def along(*places: int) -> int:
        """A jvp along some of them, without its forward."""

        def of_some(*x: Tensor) -> Tensor:
            given = dict(enumerate(moved)) | dict(zip(places, x, strict=True))
            return attend(*given.values())

        points = tuple(moved[place] for place in places)
        return counted(jvp, of_some, points, points) - case.forward_flops()

    assert counted(attend, *leaves) == case.forward_flops()
    out = attend(*leaves)
    options = {"create_graph": True, "retain_graph": True}
    backward = counted(torch.autograd.grad, out, leaves, of.dout, **options)
    assert backward == case.backward_flops()
    assert along(0, 1, 2) == case._flops(of_keys=3, of_values=2)
    assert along(0) == case._flops(of_keys=2, of_values=1)
    assert along(2) == case._flops(of_keys=1, of_values=1)
    first = torch.autograd.grad(out, leaves, of.dout, create_graph=True)
    second = counted(torch.autograd.grad, first, leaves, moved)
    assert second == along(0, 1, 2) + case._flops(of_keys=7, of_values=3)


BOUNDS = {"cu_seqlens_q": int32(0, 4, 4, 11), "cu_seqlens_k": int32(0, 5, 9, 15)}
KNOWN: list[tuple[dict[str, Tensor], list[tuple[int, int]]]] = [
    ({}, [(4, 5), (0, 4), (7, 6)]),
    ({"seqused_k": int32(3, 0, 6)}, [(4, 3), (7, 6)]),
    ({"seqused_q": int32(1, 0, 2), "leftpad_k": int32(2, 1, 0)}, [(1, 3), (2, 6)]),
]


def flops(lengths: list[tuple[int, int]]) -> int:
    """Of causal sequences."""
    cases = (replace(CASE, batch=1, causal=True, seqlen_q=x, seqlen_k=y) for x, y in lengths)
    return sum(case.forward_flops() for case in cases)


def make_inputs(*rows: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    q, k = rows
    return torch.randn(*q, 4, 16), torch.randn(*k, 2, 16), torch.randn(*k, 2, 8)


@pytest.mark.parametrize(("more", "lengths"), KNOWN, ids=str)
def test_packed(more: dict[str, Tensor], lengths: list[tuple[int, int]]) -> None:
    options = {**BOUNDS, "max_seqlen_q": 7, "max_seqlen_k": 6, "causal": True, **more}
    found = counted(flash_attn_varlen_func, *make_inputs((11,), (15,)), **options)
    assert found == flops(lengths)


def test_lengths_that_the_host_does_not_have() -> None:
    """Every query counts with every key that there may be, whatever the mask."""
    with FakeTensorMode() as fake:
        inputs = [fake.from_tensor(x) for x in (*make_inputs((11,), (15,)), *BOUNDS.values())]
        found = counted(flash_attn_varlen_func, *inputs, 7, 6, causal=True)
    assert found == 2 * 4 * (11 * 6) * (16 + 8)


@pytest.mark.parametrize("cache_seqlens", [5, int32(5, 2)], ids=str)
@pytest.mark.parametrize("new", [0, 3])
def test_over_a_cache(cache_seqlens: Any, new: int) -> None:
    q, *caches = make_inputs((2, 3), (2, 20))
    keys = dict(zip("kv", make_inputs((2, 3), (2, 3))[1:], strict=True)) if new else {}
    options = {"cache_seqlens": cache_seqlens, "causal": True, **keys}
    found = counted(flash_attn_with_kvcache, q, *caches, **options)
    second = 5 if isinstance(cache_seqlens, int) else 2
    assert found == flops([(3, 5 + new), (3, second + new)])
