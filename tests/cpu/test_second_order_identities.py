"""Derivatives in a direction against gradients, whatever the call, its tiles and the direction.

J is the Jacobian of (out, lse), H the Hessian of <w, (out, lse)>: <w, J t> = <J^T w, t>, and
<u, H t> = <t, H u>.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flash_attn_cuda.call import AttentionCall, Incoming, Tangents
from flash_attn_cuda.cpu import Tiling, backward_on_cpu, forward_on_cpu
from flash_attn_cuda.cpu.calls import hvp_on_cpu, jvp_on_cpu
from tests.cases.attention import Alibi
from tests.cases.cpu_harness import RNG_STATE, one_thread  # noqa: F401
from tests.cases.masked import OWN, RandomBias, RandomMask, masked_dense, masked_varlen
from tests.cases.second_order import LEAVES, call_of_case, tangent_of

pytestmark = pytest.mark.usefixtures("one_thread")

BOUND = st.just(-1) | st.integers(0, 20)
LENGTH = st.integers(0, 16)


@st.composite
def any_call(draw: st.DrawFn) -> tuple[AttentionCall, Tensor, Tensor]:
    """A call in fp64, dout and dlse."""
    group, heads_k = draw(st.sampled_from([(1, 1), (1, 2), (2, 1), (3, 2)]))
    mask = RandomMask(draw(st.floats(0.0, 1.0)), 1, draw(st.sampled_from(OWN)), "sparsity")
    bias = RandomBias(draw(st.sampled_from(OWN)), hidden=draw(st.sampled_from([0.0, 0.4])))
    fields: dict[str, Any] = {
        "mask": draw(st.sampled_from([None, mask])),
        "bias": draw(st.sampled_from([None, bias])),
        "sink": draw(st.sampled_from([None, torch.float64])),
        "num_heads_q": group * heads_k,
        "num_heads_k": heads_k,
        "head_dim": 4,
        "head_dim_v": draw(st.sampled_from([4, 3])),
        "softmax_scale": draw(st.floats(-1.5, 1.5)),
        "causal": draw(st.booleans()),
        "window": draw(st.tuples(BOUND, BOUND)),
        "softcap": draw(st.sampled_from([0.0, 0.7, 5.0])),
        "alibi": draw(st.sampled_from([None, *Alibi])),
        "dropout_p": draw(st.sampled_from([0.0, 0.3])),
    }
    fields |= {"dtype": torch.float64, "device": "cpu"}
    seed = draw(st.integers(0, 2**31))
    lengths = draw(st.lists(st.tuples(LENGTH, LENGTH), min_size=1, max_size=3))
    if draw(st.booleans()):
        lengths_q, lengths_k = zip(*lengths, strict=True)
        used = tuple(draw(st.integers(0, x)) for x in lengths_q)
        case = masked_varlen(lengths_q=lengths_q, lengths_k=lengths_k, used_q=used, **fields)
    else:
        case = masked_dense(seqlen_q=lengths[0][0], seqlen_k=lengths[0][1], **fields)
    inputs = case.make_inputs(seed)
    return call_of_case(case, inputs), inputs.of.dout, inputs.of.dlse


TILING = st.builds(Tiling, *[st.integers(3, 12)] * 2, st.sampled_from([1, 100, 1 << 12]))
SEED = st.integers(0, 2**31)


def direction_of(call: AttentionCall, seed: int) -> Tangents:
    """One in which some of what there is does not move."""
    generator = torch.Generator().manual_seed(seed)
    tangents = {}
    for index, name in enumerate(LEAVES):
        if (x := getattr(call, name)) is not None and seed >> index & 3:
            tangents[f"t{name}"] = tangent_of(x, generator)
    return Tangents(**tangents)


def inner(a: dict[str, Tensor | None], b: dict[str, Tensor | None]) -> tuple[float, float]:
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


def by_leaf(tangents: Tangents) -> dict[str, Tensor | None]:
    return {name: getattr(tangents, f"t{name}") for name in LEAVES}


@settings(max_examples=40, deadline=None)
@given(made=any_call(), seed=SEED, tiling=TILING)
def test_jvp_is_the_transpose_of_the_backward(
    made: tuple[AttentionCall, Tensor, Tensor], seed: int, tiling: Tiling
) -> None:
    call, dout, dlse = made
    out, lse, *_ = forward_on_cpu(call, RNG_STATE)
    wants_dbias = call.bias is not None
    incoming = Incoming(dout, dlse, out, lse, RNG_STATE, wants_dbias)
    tangents = direction_of(call, seed)
    tout, tlse, _ = jvp_on_cpu(call, incoming, tangents, tiling)
    assert tout.isfinite().all() and tlse.isfinite().all()
    found = backward_on_cpu(call, incoming)
    gradients = {name: getattr(found, f"d{name}") for name in LEAVES}
    along = inner({"out": dout, "lse": dlse}, {"out": tout, "lse": tlse})
    assert_equal(along, inner(gradients, by_leaf(tangents)))


@settings(max_examples=40, deadline=None)
@given(made=any_call(), seeds=st.tuples(SEED, SEED), tiling=TILING)
def test_the_hessian_is_symmetric(
    made: tuple[AttentionCall, Tensor, Tensor], seeds: tuple[int, int], tiling: Tiling
) -> None:
    call, dout, dlse = made
    out, lse, *_ = forward_on_cpu(call, RNG_STATE)
    incoming = Incoming(dout, dlse, out, lse, RNG_STATE, wants_dbias=call.bias is not None)
    directions, products = [direction_of(call, seed) for seed in seeds], []
    for tangents in directions:
        along = tangents.with_results(jvp_on_cpu(call, incoming, tangents))
        found = hvp_on_cpu(call, incoming, along, tiling)
        products.append({name: getattr(found, f"d{name}") for name in LEAVES})
    assert all(x.isfinite().all() for made in products for x in made.values() if x is not None)
    one, other = directions
    assert_equal(inner(products[0], by_leaf(other)), inner(products[1], by_leaf(one)))
