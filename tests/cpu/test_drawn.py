"""Random calls, drawn as tests/fuzz draws them: in fp64 against the reference, their derivatives in
a direction against gradients, and calls over caches.

J is the Jacobian of (out, lse), H the Hessian of <w, (out, lse)>: <w, J t> = <J^T w, t>, and
<u, H t> = <t, H u>.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from flash_attn_cuda.call.fields import AttentionCall, Incoming, Tangents
from flash_attn_cuda.cpu import Tiling, backward_on_cpu, forward_on_cpu
from flash_attn_cuda.cpu.calls import hvp_on_cpu, jvp_on_cpu
from tests.cases.cpu_harness import RNG_STATE, assert_fp64_close
from tests.cases.masked import MaskedCase
from tests.cases.masked_harness import masked_reference, run_masked
from tests.cases.second_order import LEAVES, call_of_case, tangent_of
from tests.fuzz.draw import draw_call
from tests.fuzz.run import check

pytestmark = pytest.mark.usefixtures("one_thread")

SEED = 11
Named = dict[str, Tensor | None]
over_numbers = pytest.mark.parametrize("number", range(30))
over_kinds = pytest.mark.parametrize("kind", ["dense", "packed"])


def drawn(kind: str, number: int, most_pairs: float) -> MaskedCase:
    """In fp64, of what all gradients are implemented of."""
    case = draw_call(kind, SEED, number, "cpu", most_pairs)
    assert isinstance(case, MaskedCase)
    bias = case.bias
    if bias is not None:
        bias = replace(bias, fp32=False, requires_grad=True)
    sink = None if case.sink is None else torch.float64
    of = replace(case.of, dtype=torch.float64, deterministic=False)
    return replace(case, of=of, bias=bias, sink=sink)


@over_kinds
@over_numbers
def test_equals_the_reference(number: int, kind: str) -> None:
    case = drawn(kind, number, 4e3)
    inputs = case.make_inputs(number)
    assert_fp64_close(run_masked(case, inputs), masked_reference(case, inputs)[0])


@pytest.mark.parametrize("number", range(12))
@pytest.mark.parametrize("kind", ["cache", "fp8_cache"])
def test_over_caches(kind: str, number: int) -> None:
    check(draw_call(kind, SEED, number, "cpu", 4e3), number)


# -- derivatives in a direction --------------------------------------------------------------------


def described(kind: str, number: int) -> tuple[AttentionCall, Incoming, random.Random]:
    case = drawn(kind, number, 400.0)
    inputs = case.make_inputs(number)
    call = call_of_case(case, inputs)
    out, lse, *_ = forward_on_cpu(call, RNG_STATE)
    wants_dbias = case.bias is not None and case.bias.requires_grad
    results = (inputs.of.dout, inputs.of.dlse, out, lse, RNG_STATE)
    return call, Incoming(*results, wants_dbias), random.Random(number)


def drawn_tiling(rng: random.Random) -> Tiling:
    return Tiling(rng.randint(3, 12), rng.randint(3, 12), rng.choice((1, 100, 1 << 12)))


def direction_of(call: AttentionCall, rng: random.Random) -> Tangents:
    """One in which some of what there is does not move."""
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    moved = {name: getattr(call, name) for name in LEAVES if rng.random() < 0.75}
    return Tangents(
        **{f"t{x}": tangent_of(y, generator) for x, y in moved.items() if y is not None}
    )


def inner(a: Named, b: Named) -> tuple[float, float]:
    """The sum of products, and that of their magnitudes; of rows of no sequence nothing counts."""
    products = [torch.zeros(1)]
    for name, x in a.items():
        y = b.get(name)
        if x is not None and y is not None:
            assert not (x * y).isinf().any(), name
            products.append((x.nan_to_num(0.0) * y.nan_to_num(0.0)).flatten())
    every = torch.cat(products)
    return every.sum().item(), every.abs().sum().item()


def assert_equal(a: tuple[float, float], b: tuple[float, float]) -> None:
    assert abs(a[0] - b[0]) <= 1e-11 * (1.0 + a[1] + b[1]), (a, b)


def by_leaf(described: object, prefix: str) -> Named:
    return {name: getattr(described, f"{prefix}{name}") for name in LEAVES}


@over_kinds
@over_numbers
def test_jvp_is_the_transpose_of_the_backward(number: int, kind: str) -> None:
    call, incoming, rng = described(kind, number)
    tangents = direction_of(call, rng)
    tout, tlse, _ = jvp_on_cpu(call, incoming, tangents, drawn_tiling(rng))
    assert tout.isfinite().all() and tlse.isfinite().all()
    gradients = by_leaf(backward_on_cpu(call, incoming), "d")
    along = inner({"out": incoming.dout, "lse": incoming.dlse}, {"out": tout, "lse": tlse})
    assert_equal(along, inner(gradients, by_leaf(tangents, "t")))


@over_kinds
@over_numbers
def test_the_hessian_is_symmetric(number: int, kind: str) -> None:
    call, incoming, rng = described(kind, number)
    directions, products = [direction_of(call, rng) for _ in range(2)], []
    for tangents in directions:
        along = tangents.with_results(jvp_on_cpu(call, incoming, tangents))
        products.append(by_leaf(hvp_on_cpu(call, incoming, along, drawn_tiling(rng)), "d"))
    assert all(x.isfinite().all() for made in products for x in made.values() if x is not None)
    one, other = (by_leaf(x, "t") for x in directions)
    assert_equal(inner(products[0], other), inner(products[1], one))
