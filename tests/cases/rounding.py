"""Gradients where keys and values have a mean: what O's rounding takes from D, the mean of the keys
multiplies in dq, unless the call keeps it (flash_attn_cuda/call/rounding.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from flash_attn_cuda import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
)
from flash_attn_cuda.call.tensors import lse_dtype
from tests.cases.attention import Alibi, AttentionCase, VarlenCase
from tests.cases.harness import DEVICE, run_reference
from tests.cases.masked import MaskedCase, MaskedInputs, RandomBias, RandomMask
from tests.cases.masked_harness import masked_reference, run_masked

# dq's relative error, where keys have a mean of 4 standard deviations and values one of 1: what
# the rounding of dS and of the result leaves, and a half more.
MOST = {torch.bfloat16: 2.4e-2, torch.float16: 3.0e-3}
SHARE = 0.45  # of the error of a call that keeps nothing, at most

# Fields of a MaskedCase and of the case in it; "lengths_q": of a packed one.
FEATURES: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "fp16": {"dtype": torch.float16},
    "grouped": {"num_heads_k": 1, "causal": True},
    "modified": {"softcap": 60.0, "alibi": Alibi.per_batch, "window": (300, 60)},
    "dropout": {"dropout_p": 0.2},
    "deterministic": {"deterministic": True, "causal": True},
    "few_queries": {"seqlen_q": 3, "num_heads_k": 1, "seqlen_k": 900},
    "padded": {"head_dim": 36},
    "sink": {"sink": torch.float32},
    "mask": {"mask": RandomMask(0.6)},
    "bias": {"bias": RandomBias("q", requires_grad=False), "causal": True},
    "packed": {"lengths_q": (300, 0, 17, 200), "lengths_k": (300, 5, 400, 0), "causal": True},
}
_OF_MASKS = ("mask", "bias", "sink")


def feature_case(name: str, device: str = DEVICE, **changes: Any) -> MaskedCase:
    fields = {"device": device, **FEATURES[name], **changes}
    masks = {x: fields.pop(x) for x in _OF_MASKS if x in fields}
    if "lengths_q" in fields:
        return MaskedCase(VarlenCase(**fields), **masks)
    return MaskedCase(AttentionCase(**({"seqlen_q": 400, "seqlen_k": 400} | fields)), **masks)


def with_means(x: Tensor, mean: float, seed: int) -> Tensor:
    """x and so many standard deviations in one direction of its columns."""
    direction = torch.randn(x.shape[-1], generator=torch.Generator().manual_seed(seed))
    direction *= mean * x.shape[-1] ** 0.5 / direction.norm()
    return (x.float() + direction.to(x.device)).to(x.dtype)


def inputs_with_means(case: MaskedCase) -> MaskedInputs:
    inputs = case.make_inputs()
    k, v = with_means(inputs.of.k, 4.0, 1), with_means(inputs.of.v, 1.0, 2)
    return replace(inputs, of=replace(inputs.of, k=k, v=v))


def error(x: Tensor, exact: Tensor) -> float:
    return ((x.double() - exact).norm() / exact.norm()).item()


def check_rounding(case: MaskedCase, **changes: Any) -> None:
    inputs = inputs_with_means(case)
    exact, _ = masked_reference(case, inputs, use_dlse=False)
    kept, lost = (
        run_masked(case, inputs, use_dlse=False, keep_rounding=keeps, **changes)
        for keeps in (True, False)
    )
    assert torch.equal(kept.out, lost.out)
    errors = error(kept.dq, exact.dq), error(lost.dq, exact.dq)
    assert errors[0] <= MOST[case.of.dtype] and errors[0] <= SHARE * errors[1], errors


def check_road(road: Callable[..., Tensor], device: str = DEVICE) -> None:
    """dq of a call that goes another way: as near as the plain one's. road(q, k, v, dout) -> dq."""
    case = feature_case("full", device)
    inputs = inputs_with_means(case).of
    exact, _ = run_reference(case.of, inputs, use_dlse=False)
    found = error(road(inputs.q, inputs.k, inputs.v, inputs.dout), exact.dq)
    assert found <= MOST[case.of.dtype], found


def _gradient(function: Callable[..., Tensor], q: Tensor, *others: Tensor) -> Tensor:
    *given, dout = others
    leaf = q.detach().requires_grad_()
    (dq,) = torch.autograd.grad(function(leaf, *given), leaf, dout)
    return dq


def _under_torch_func(q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> Tensor:
    _, pull = torch.func.vjp(lambda x: flash_attn_func(x, k, v), q)
    return pull(dout)[0]


def _mapped(q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> Tensor:
    def one(x: Tensor, *given: Tensor) -> Tensor:
        return _under_torch_func(*(y[None] for y in (x, *given)))[0]

    return torch.func.vmap(one)(q, k, v, dout)


def _seen_by_a_mode(*given: Tensor) -> Tensor:
    with FlopCounterMode(display=False):
        return _gradient(flash_attn_func, *given)


def _compiled(*given: Tensor) -> Tensor:
    function = torch.compile(lambda *x: flash_attn_func(*x), backend="aot_eager", fullgraph=True)
    return _gradient(function, *given)


ROADS: dict[str, Callable[..., Tensor]] = {
    "torch.func": _under_torch_func,
    "vmap": _mapped,
    "mode": _seen_by_a_mode,
    "compiled": _compiled,
    "checkpoint": partial(
        _gradient, lambda *x: checkpoint(flash_attn_func, *x, use_reentrant=False)
    ),
    "kvpacked": partial(
        _gradient, lambda q, k, v: flash_attn_kvpacked_func(q, torch.stack((k, v), 2))
    ),
    "qkvpacked": partial(
        _gradient, lambda q, k, v: flash_attn_qkvpacked_func(torch.stack((q, k, v), 2))
    ),
}


# -- second derivatives ---------------------------------------------------------------------------


def _penalties(function: Callable[..., Tensor], *inputs: Tensor) -> tuple[Tensor, ...]:
    """Gradients by q, k and v of the squares of the gradients, as double backward makes them."""
    leaves = [x.detach().requires_grad_() for x in inputs[:3]]
    found = torch.autograd.grad(function(*leaves), leaves, inputs[3], create_graph=True)
    return torch.autograd.grad(sum(x.to(lse_dtype(x.dtype)).square().sum() for x in found), leaves)


def _penalties_of_functions(function: Callable[..., Tensor], *inputs: Tensor) -> tuple[Tensor, ...]:
    def penalty(*x: Tensor) -> Any:
        _, pull = torch.func.vjp(function, *x)
        return sum(x.float().square().sum() for x in pull(inputs[3]))

    found: tuple[Tensor, ...] = torch.func.grad(penalty, argnums=(0, 1, 2))(*inputs[:3])
    return found


SECOND_ROADS = {"eager": _penalties, "torch.func": _penalties_of_functions}


def _plain_maths(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """In the type of the inputs, with a softmax in fp32 or fp64."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    scores = q @ k.mT * q.shape[-1] ** -0.5
    if causal:
        hidden = torch.ones(scores.shape[-2:], device=q.device, dtype=torch.bool).triu(1)
        scores = scores.masked_fill(hidden, -torch.inf)
    probs = scores.to(lse_dtype(q.dtype)).softmax(-1).to(q.dtype)
    return (probs @ v).transpose(1, 2)


def check_jvp(
    device: str = DEVICE, head_dim: int = 64, dtype: torch.dtype = torch.bfloat16
) -> None:
    """Along keys' tangents that have a mean, where values do: mu * O takes most of it away."""
    shape, generator = (2, 256, 2, head_dim), torch.Generator().manual_seed(4)
    drawn = [torch.randn(shape, generator=generator) for _ in range(6)]
    q, k, v, tq, tk, tv = (x.to(device, dtype) for x in drawn)
    v, tk = with_means(v, 1.0, 2), with_means(tk, 4.0, 3)
    maths = partial(_plain_maths, causal=False)

    def moved(function: Callable[..., Tensor], to: torch.dtype) -> Tensor:
        points, tangents = ([x.to(to) for x in xs] for xs in ((q, k, v), (tq, tk, tv)))
        return torch.func.jvp(function, tuple(points), tuple(tangents))[1]

    exact = moved(maths, torch.float64)
    errors = error(moved(flash_attn_func, dtype), exact), error(moved(maths, dtype), exact)
    assert errors[0] <= 3.0 * errors[1], errors


def check_second_order(
    road: Callable[..., tuple[Tensor, ...]],
    dtype: torch.dtype = torch.bfloat16,
    device: str = DEVICE,
    head_dim: int = 64,
    causal: bool = False,
) -> None:
    """A gradient penalty of inputs from 0 to 1: keys, values and their tangents have a mean."""
    shape, generator = (2, 128, 2, head_dim), torch.Generator().manual_seed(3)
    drawn = [torch.rand(shape, generator=generator) for _ in range(3)]
    drawn.append(torch.randn(shape, generator=generator))
    inputs = tuple(x.to(device, dtype) for x in drawn)
    maths = partial(_plain_maths, causal=causal)
    exact = _penalties(maths, *(x.double() for x in inputs))
    found = road(partial(flash_attn_func, causal=causal), *inputs)
    for ours, theirs, x in zip(found, _penalties(maths, *inputs), exact, strict=True):
        errors = error(ours, x), error(theirs, x)
        assert errors[0] <= 3.0 * errors[1], errors
    if causal:  # the rounding of P where a query sees few keys takes as much
        return
    lost = road(partial(flash_attn_func, causal=causal, keep_rounding=False), *inputs)
    errors = error(found[0], exact[0]), error(lost[0], exact[0])
    assert errors[0] <= SHARE * errors[1], errors


def kept_bytes(case: AttentionCase, **options: Any) -> int:
    """Of what a call keeps for its backward, the numbers of one byte."""
    inputs, found = case.make_inputs(), []

    def pack(x: Tensor) -> Tensor:
        found.append(x.numel() if x.element_size() == 1 else 0)
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        flash_attn_func(inputs.q.requires_grad_(), inputs.k, inputs.v, **options)
    return sum(found)
