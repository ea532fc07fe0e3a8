"""Derivatives in a direction and second derivatives, in every order, against those of the reference
in fp64. What each order alone has: test_jvp.py and test_double_backward.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

from flash_attn_cuda import flash_attn_func, flash_attn_varlen_func
from flash_attn_cuda.call.fields import OF_RESULTS, AttentionCall, Incoming, Tangents
from flash_attn_cuda.cpu.calls import hvp_on_cpu, jvp_on_cpu
from tests.cases.cpu_harness import SMALL_TILES
from tests.cases.masked import RandomBias, RandomMask, masked_dense, masked_varlen
from tests.cases.masked_operators import backward_fields, int32
from tests.cases.memory import PeakBytes
from tests.cases.operators import hvp_arguments, jvp_arguments
from tests.cases.pairwise import pairwise
from tests.cases.second_order import (
    DENSE,
    LEAVES,
    PACKED,
    SECOND_ORDER,
    DerivativeCase,
    Transform,
    case_of_row,
    check_derivatives,
    check_problem,
    described,
    double_backward,
    forward_over_reverse,
    hidden_problems,
    jvp,
    poisoned_problem,
    reverse_over_forward,
)

pytestmark = pytest.mark.usefixtures("one_thread")

_ops = torch.ops.flash_attn_cuda
FP64: dict[str, Any] = {"device": "cpu", "head_dim": 8, "dtype": torch.float64}
BASE: dict[str, Any] = {**FP64, "num_heads_q": 4, "num_heads_k": 2}
over_orders = pytest.mark.parametrize("transform", [jvp, *SECOND_ORDER])
over_two = pytest.mark.parametrize("transform", [jvp, double_backward])
over_packed = pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])

FIRST = [*pairwise(DENSE), *pairwise(PACKED, 1)]
SECOND = [*pairwise(DENSE, 4), *pairwise(PACKED, 5)]
ROWS = [
    *((row, jvp) for row in FIRST),
    *((row, double_backward) for row in SECOND),
    *((row, x) for row in SECOND[::4] for x in (forward_over_reverse, reverse_over_forward)),
]
LOW = {"dtype": [torch.float32, torch.bfloat16, torch.float16]}
OF_LOW = {"transform": [double_backward, double_backward, *SECOND_ORDER[1:]], **LOW}
LOW_ROWS = [
    *({**row, "transform": jvp} for row in pairwise(DENSE | LOW, 2)[::4]),
    *({**row, "transform": jvp} for row in pairwise(PACKED | LOW, 3)[::4]),
    *pairwise(DENSE | OF_LOW, 6)[::4],
    *pairwise(PACKED | OF_LOW, 7)[::4],
]


@pytest.mark.parametrize(("row", "transform"), ROWS, ids=lambda x: getattr(x, "__name__", str(x)))
def test_fp64_equals_the_reference(row: dict[str, Any], transform: Transform) -> None:
    case = case_of_row(row, torch.float64)
    check_derivatives(case, transform)


@pytest.mark.parametrize("row", LOW_ROWS)
def test_other_dtypes_are_close(row: dict[str, Any]) -> None:
    row = dict(row)
    transform = row.pop("transform")
    case = case_of_row(row, row.pop("dtype"))
    check_derivatives(case, transform)


@over_two
@over_packed
def test_many_tiles(packed: bool, transform: Transform) -> None:
    features = {"bias": RandomBias("hq"), "sink": torch.float64, "causal": True}
    if packed:
        case = masked_varlen(lengths_q=(300, 7), lengths_k=(520, 9), **features, **BASE)
    else:
        case = masked_dense(batch=1, seqlen_q=300, seqlen_k=520, **features, **BASE)
    check_derivatives(DerivativeCase(case), transform)


@pytest.mark.parametrize("on_cpu", [jvp_on_cpu, hvp_on_cpu])
@pytest.mark.parametrize("mask", [None, RandomMask(0.3, 1, "hq")], ids=str)
def test_results_do_not_depend_on_the_tiling(
    mask: RandomMask | None, on_cpu: Callable[..., Any]
) -> None:
    case = masked_dense(
        *(mask, RandomBias("hq"), torch.float64),
        **{**BASE, "seqlen_q": 40, "seqlen_k": 50, "causal": True, "dropout_p": 0.3},
    )
    given = described(DerivativeCase(case).make_problem())
    for x, y in zip(on_cpu(*given, SMALL_TILES), on_cpu(*given), strict=True):
        assert (x is None) == (y is None)
        if x is not None:
            torch.testing.assert_close(x, y, rtol=1e-11, atol=1e-11)


@over_two
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_repeats_bit_for_bit(dtype: torch.dtype, deterministic: bool, transform: Transform) -> None:
    masks = (RandomMask(0.5, 1, "hq"), RandomBias("hq"))
    fields = {**BASE, "dtype": dtype, "seqlen_q": 70, "seqlen_k": 90, "dropout_p": 0.2}
    case = masked_dense(*masks, torch.float32, deterministic=deterministic, **fields)
    problem = DerivativeCase(case).make_problem()
    first, second = (transform(problem.attend, problem) for _ in range(2))
    assert all(torch.equal(x, second[name]) for name, x in first.items())


# -- edges -----------------------------------------------------------------------------------------


@over_orders
@pytest.mark.parametrize("sink", [None, torch.float64], ids=["no_sink", "sink"])
def test_rows_that_see_no_key(sink: torch.dtype | None, transform: Transform) -> None:
    """They have 0, or with a sink its tangent in lse; what comes in through them goes nowhere but
    to the sink.
    """
    mask = RandomMask(0.02, 1, "hq", "sparsity")
    case = masked_dense(mask, None, sink, seqlen_q=40, seqlen_k=50, **BASE)
    problem = DerivativeCase(case).make_problem()
    check_problem(problem, transform)
    keyless = ~problem.inputs.mask.any(-1).expand(2, 4, 40)
    assert keyless.any()
    found = transform(problem.attend, problem)
    for name in {"tout", "q", "dout"} & found.keys():
        assert not found[name].transpose(1, 2)[keyless].any(), name
    if transform is jvp:
        tsink = problem.tangents.get("sink", torch.zeros(4).double())
        expanded = tsink[:, None].expand(keyless.shape)[keyless]
        assert torch.equal(found["tlse"][keyless], expanded)
    elif sink is None and "dlse" in found:
        assert not found["dlse"][keyless].any()


@over_orders
@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_any_tangent_of_a_bias_of_minus_infinity(value: float, transform: Transform) -> None:
    expected_of, problem = hidden_problems(value, seqlen_q=40, seqlen_k=50, **BASE)
    found, wanted = (transform(x.attend, x) for x in (problem, expected_of))
    for name, x in found.items():
        assert x.isfinite().all() and torch.equal(x, wanted[name]), name
    if "bias" in found:
        assert not found["bias"][problem.leaves["bias"] == -torch.inf].any()


@over_orders
def test_a_sink_of_minus_infinity_is_none(transform: Transform) -> None:
    case = masked_dense(RandomMask(0.1), None, torch.float64, seqlen_q=9, seqlen_k=9, **BASE)
    problem = DerivativeCase(case).make_problem()
    problem.leaves["sink"][1] = -torch.inf
    check_problem(problem, transform)
    if transform is double_backward:
        assert transform(problem.attend, problem)["sink"][1] == 0.0


@over_orders
def test_nothing_is_read_beyond_any_length(transform: Transform) -> None:
    problem = poisoned_problem(**BASE)
    assert all(x.isnan().any() for name, x in problem.tangents.items() if name != "sink")
    check_problem(problem, transform)


@over_packed
@pytest.mark.parametrize("lengths", [(0, 5), (5, 0), (0, 0)], ids=str)
def test_no_queries_or_no_keys(lengths: tuple[int, int], packed: bool) -> None:
    leaves = [torch.randn(2, x, 2, 4, requires_grad=True) for x in (lengths[0], *lengths[1:] * 2)]
    cu = [int32(0, x) for x in lengths]

    def attend(*x: Tensor) -> Tensor:
        if packed:
            return flash_attn_varlen_func(*(y[0] for y in x), *cu, *lengths)
        return flash_attn_func(*x)

    moved = tuple(x.detach() for x in leaves)
    assert not torch.func.jvp(attend, moved, moved)[1].any()
    gradients = torch.autograd.grad(attend(*leaves).sin().sum(), leaves, create_graph=True)
    found = torch.autograd.grad(sum(x.sin().sum() for x in gradients), leaves)
    assert not any(x.any() for x in found)


@pytest.mark.parametrize(("on_cpu", "most"), [(jvp_on_cpu, 2**22), (hvp_on_cpu, 2**23)])
def test_memory_is_linear_in_the_length(on_cpu: Callable[..., Any], most: int) -> None:
    """All scores would be 64 MiB; what there is of inputs and results is a quarter of one."""
    q, lse = torch.randn(1, 4096, 1, 4), torch.zeros(1, 1, 4096)
    incoming, tangents = Incoming(q, lse, q, lse, None), Tangents(q, q, q, None, None, q, lse)
    with torch.no_grad(), PeakBytes() as memory:
        on_cpu(AttentionCall(q, q, q), incoming, tangents)
    assert memory.peak < most


# -- operators -------------------------------------------------------------------------------------

NO_BIAS = {"bias": None, "sink": None, "wants_dbias": False, "dlse": None, "dropout_p": 0.0}


def directional(packed: bool, moved: tuple[str, ...] = LEAVES, **changes: Any) -> dict[str, Any]:
    """Fields of attention_jvp's call, of which attention_hvp has these and the results."""
    fields = backward_fields(packed, **changes)
    return fields | {f"t{x}": torch.randn_like(fields[x]) for x in moved if fields[x] is not None}


def with_results(fields: dict[str, Any]) -> dict[str, Any]:
    found = _ops.attention_jvp(*jvp_arguments(**of_jvp(fields)))
    return fields | dict(zip(OF_RESULTS, found, strict=True))


def of_jvp(fields: dict[str, Any]) -> dict[str, Any]:
    return {x: y for x, y in fields.items() if x not in ("dout", "dlse", "wants_dbias")}


@pytest.mark.parametrize(
    ("packed", "moved", "changes"),
    [
        (True, LEAVES, {}),
        (False, LEAVES, NO_BIAS),
        (False, ("q", "bias"), {"dout": None, "wants_dbias": False}),
    ],
)
def test_opcheck(packed: bool, moved: tuple[str, ...], changes: dict[str, Any]) -> None:
    fields = directional(packed, moved, **changes)
    opcheck(_ops.attention_jvp, jvp_arguments(**of_jvp(fields)))
    given = hvp_arguments(**with_results(fields))
    opcheck(_ops.attention_hvp, given)
    if "q" in moved and changes.get("dout", 0) is None:
        assert [x.shape for x in _ops.attention_hvp(*given)[3:]] == [(0,), (4,)]


def test_opcheck_with_gradients() -> None:
    fields = of_jvp(directional(packed=False, window_size_left=-1))
    for name in LEAVES:
        fields[name].requires_grad_()
        fields[f"t{name}"].requires_grad_()
    opcheck(_ops.attention_jvp, jvp_arguments(**fields))


def test_a_tangent_that_is_missing_is_zero() -> None:
    fields = of_jvp(directional(packed=False))
    for missing in LEAVES:
        zero = {f"t{missing}": torch.zeros_like(fields[missing])}
        of_rest, of_zero = (
            _ops.attention_jvp(*jvp_arguments(**fields | given))
            for given in ({f"t{missing}": None}, zero)
        )
        for x, y in zip(of_rest, of_zero, strict=True):
            torch.testing.assert_close(x, y, rtol=0.0, atol=1e-15)
    none = dict.fromkeys(f"t{name}" for name in LEAVES)
    assert not any(x.any() for x in _ops.attention_jvp(*jvp_arguments(**fields | none)))


Wrong = list[tuple[dict[str, Any], type[Exception], str]]
OF_BOTH: Wrong = [
    ({"tq": torch.zeros(2, 7, 4, 8).double()}, ValueError, "tq: must have shape (2, 7, 4, 16), g"),
    ({"tk": torch.zeros(2, 9, 4, 16).double()}, ValueError, "tk: must have shape (2, 9, 2, 16), g"),
    ({"tv": torch.zeros(2, 9, 2, 16)}, TypeError, "tv: dtype must be torch.float64, got torch.fl"),
    ({"tbias": torch.zeros(4, 7, 9).double()}, ValueError, "tbias: must have shape (1, 4, 7, 9)"),
    ({"tbias": torch.zeros(1, 4, 7, 9)}, TypeError, "tbias: dtype must be torch.float64, got tor"),
    ({"tsink": torch.zeros(1).double()}, ValueError, "tsink: must have shape (4,), got (1,)"),
    ({"tsink": torch.zeros(4)}, TypeError, "tsink: dtype must be torch.float64, got torch.float3"),
    ({"tk": torch.empty(2, 9, 2, 16, device="meta").double()}, ValueError, "tk: must be on"),
    ({"rng_state": None}, ValueError, "rng_state: must be given with dropout, as the"),
    ({"out": torch.zeros(2, 7, 4, 8).double()}, ValueError, "out: must have shape (2, 7, 4, 16)"),
    ({"softmax_lse": torch.zeros(2, 4, 9).double()}, ValueError, "softmax_lse: must have shape"),
]
OF_JVP: Wrong = [
    ({"bias": None, "tbias": torch.zeros(1)}, ValueError, "tbias: must be None without bias, got"),
    ({"sink": None, "tsink": torch.zeros(4)}, ValueError, "tsink: must be None without sink, got"),
]
OF_HVP: Wrong = [
    ({"tout": torch.zeros(2, 7, 2, 16).double()}, ValueError, "tout: must have shape (2, 7, 4, 16"),
    ({"tlse": torch.zeros(2, 7, 4).double()}, ValueError, "tlse: must have shape (2, 4, 7), got ("),
    ({"tlse": torch.zeros(2, 4, 7)}, TypeError, "tlse: dtype must be torch.float64, got torch.flo"),
    ({"tout": None}, TypeError, "tout: must be attention_jvp's for these tangents, got None"),
    ({"tlse": None}, TypeError, "tlse: must be attention_jvp's for these tangents, got None"),
    ({"bias": None, "tbias": None}, ValueError, "wants_dbias: must be False without a bias, got "),
]


def test_wrong_operator_arguments() -> None:
    fields = with_results(directional(packed=False))
    for op, of_op, made, wrong in (
        (_ops.attention_jvp, jvp_arguments, of_jvp, OF_BOTH + OF_JVP),
        (_ops.attention_hvp, hvp_arguments, dict, OF_BOTH + OF_HVP),
    ):
        given = {x: y for x, y in fields.items() if made is dict or x not in OF_RESULTS}
        for changes, error, words in wrong:
            with pytest.raises(error, match="^" + re.escape(words)):
                op(*of_op(**made({**given, **changes})))
