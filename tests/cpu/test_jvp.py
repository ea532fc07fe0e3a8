"""Forward mode: tangents of out and softmax_lse against torch.func.jvp of the reference in fp64."""

from __future__ import annotations

import cProfile
import pstats
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import jacfwd, jvp, linearize, vmap
from torch.library import opcheck

from flash_attn_cuda import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)
from flash_attn_cuda.call import AttentionCall, Incoming, Results, Tangents
from flash_attn_cuda.cpu.calls import jvp_on_cpu
from flash_attn_cuda.interface import _flash_attn_backward, _flash_attn_forward
from flash_attn_cuda.operators import attention as attention_operators
from flash_attn_cuda.operators import second_order as second_order_operators
from flash_attn_cuda.operators.derivatives import run_operator
from flash_attn_cuda.operators.support import is_plain_cuda
from tests.cases import second_order
from tests.cases.cpu_harness import SMALL_TILES, one_thread  # noqa: F401
from tests.cases.masked import RandomBias, RandomMask, masked_dense, masked_varlen
from tests.cases.masked_operators import backward_fields, int32
from tests.cases.memory import PeakBytes
from tests.cases.operators import jvp_arguments
from tests.cases.pairwise import pairwise
from tests.cases.roads import Extension, extension
from tests.cases.second_order import (
    DENSE,
    LEAVES,
    PACKED,
    DerivativeCase,
    case_of_row,
    check_derivatives,
    check_problem,
    described,
    hidden_problems,
    poisoned_problem,
)
from tests.cases.small_calls import attend, expected, make_inputs, tensors
from tests.reference import attention

__all__ = ["extension"]  # pytest finds it here

pytestmark = pytest.mark.usefixtures("one_thread")

_ops = torch.ops.flash_attn_cuda
FP64: dict[str, Any] = {"device": "cpu", "head_dim": 8, "dtype": torch.float64}
BASE: dict[str, Any] = {**FP64, "num_heads_q": 4, "num_heads_k": 2}


# -- against the reference -------------------------------------------------------------------------


@pytest.mark.parametrize("row", [*pairwise(DENSE), *pairwise(PACKED, 1)], ids=str)
def test_fp64_equals_the_reference(row: dict[str, Any]) -> None:
    case = case_of_row(row, torch.float64, has_gradients=False)
    check_derivatives(case, second_order.jvp)


LOW_PRECISION = {"dtype": [torch.float32, torch.bfloat16, torch.float16]}


@pytest.mark.parametrize(
    "row", [*pairwise(DENSE | LOW_PRECISION, 2)[::4], *pairwise(PACKED | LOW_PRECISION, 3)[::4]]
)
def test_other_dtypes_are_close(row: dict[str, Any]) -> None:
    row = dict(row)
    case = case_of_row(row, row.pop("dtype"), has_gradients=False)
    check_derivatives(case, second_order.jvp)


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_many_tiles(packed: bool) -> None:
    features = {"bias": RandomBias("hq"), "sink": torch.float64, "causal": True, "softcap": 2.0}
    if packed:
        case = masked_varlen(lengths_q=(300, 7), lengths_k=(520, 9), **features, **BASE)
    else:
        case = masked_dense(batch=1, seqlen_q=300, seqlen_k=520, **features, **BASE)
    check_derivatives(DerivativeCase(case), second_order.jvp)


@pytest.mark.parametrize("mask", [None, RandomMask(0.3, 1, "hq")], ids=str)
def test_results_do_not_depend_on_the_tiling(mask: RandomMask | None) -> None:
    case = masked_dense(
        *(mask, RandomBias("hq"), torch.float64),
        **{**BASE, "seqlen_q": 40, "seqlen_k": 50, "causal": True, "dropout_p": 0.3},
    )
    given = described(DerivativeCase(case).make_problem())
    for x, y in zip(jvp_on_cpu(*given, SMALL_TILES), jvp_on_cpu(*given), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_repeats_bit_for_bit(dtype: torch.dtype, deterministic: bool) -> None:
    masks = (None, None) if deterministic else (RandomMask(0.5, 1, "hq"), RandomBias("hq"))
    fields = {**BASE, "dtype": dtype, "seqlen_q": 70, "seqlen_k": 90, "dropout_p": 0.2}
    case = masked_dense(*masks, torch.float32, deterministic=deterministic, **fields)
    problem = DerivativeCase(case).make_problem()
    first, second = (second_order.jvp(problem.attend, problem) for _ in range(2))
    assert torch.equal(first["tout"], second["tout"])


def test_a_tangent_that_is_missing_is_zero() -> None:
    fields = backward_fields(packed=False)
    every = {f"t{name}": torch.randn_like(fields[name]) for name in LEAVES}
    for missing in every:
        rest = {name: x for name, x in every.items() if name != missing}
        zero = {**rest, missing: torch.zeros_like(every[missing])}
        for x, y in zip(*(run_jvp(**fields, **made) for made in (rest, zero)), strict=True):
            torch.testing.assert_close(x, y, rtol=0.0, atol=1e-15)
    assert not any(x.any() for x in run_jvp(**fields))


def run_jvp(**given: Any) -> tuple[Tensor, Tensor]:
    return _ops.attention_jvp(*jvp_arguments(**given))


# -- other functions -------------------------------------------------------------------------------


def test_packed_tensors() -> None:
    qkv, tangent = tensors((2, 5, 3, 4, 8), (2, 5, 3, 4, 8))
    wanted = jvp(lambda x: expected(*x.unbind(2))[0], (qkv,), (tangent,))
    found = jvp(lambda x: flash_attn_qkvpacked_func(x, causal=True), (qkv,), (tangent,))
    torch.testing.assert_close(found, wanted)
    q, (kv, t_kv) = qkv[:, :, 0], (x[:, :, 1:] for x in (qkv, tangent))
    wanted = jvp(lambda x: expected(q, *x.unbind(2))[0], (kv,), (t_kv,))
    found = jvp(lambda x: flash_attn_kvpacked_func(q, x, causal=True), (kv,), (t_kv,))
    torch.testing.assert_close(found, wanted)


def test_packed_tensors_of_packed_sequences() -> None:
    qkv, tangent = tensors((2, 5, 3, 4, 8), (2, 5, 3, 4, 8))
    rows, t_rows = qkv.flatten(0, 1), tangent.flatten(0, 1)
    cu, q = int32(0, 5, 10), rows[:, 0]

    def by_qkv(x: Tensor) -> Tensor:
        return flash_attn_varlen_qkvpacked_func(x, cu, 5, causal=True)

    def by_kv(x: Tensor) -> Tensor:
        return flash_attn_varlen_kvpacked_func(q, x, cu, cu, 5, 5, causal=True)

    wanted = jvp(lambda x: expected(*x.unbind(2))[0].flatten(0, 1), (qkv,), (tangent,))
    torch.testing.assert_close(jvp(by_qkv, (rows,), (t_rows,)), wanted)
    kv, t_kv = rows[:, 1:], t_rows[:, 1:]
    tangent[:, :, 0] = 0.0
    wanted = jvp(lambda x: expected(*x.unbind(2))[0].flatten(0, 1), (qkv,), (tangent,))
    torch.testing.assert_close(jvp(by_kv, (kv,), (t_kv,)), wanted)


def test_chunks() -> None:
    """Which are sequences of their own."""
    inputs, tangents = make_inputs(), make_inputs()
    chunk = torch.arange(6) // 3
    mask = chunk[1:, None] == chunk

    def wanted(*x: Tensor) -> Tensor:
        return attention(*x, causal=True, mask=mask[None, None])[0]

    def found(*x: Tensor) -> Tensor:
        return flash_attn_func(*x, causal=True, attention_chunk=3)

    made = (jvp(f, tuple(inputs), tuple(tangents)) for f in (found, wanted))
    torch.testing.assert_close(*made)


def test_autocast() -> None:
    """q, k and v are cast, and so are their tangents."""
    inputs, tangents = tensors(*[(2, 5, 4, 8)] * 3), tensors(*[(2, 5, 4, 8)] * 3)
    with torch.autocast("cpu", torch.bfloat16):
        points, directions = (tuple(x.float() for x in made) for made in (inputs, tangents))
        found = jvp(lambda *x: attend(*x)[0], points, directions)
    assert all(x.dtype == torch.bfloat16 for x in found)
    wanted = jvp(lambda *x: expected(*x)[0], tuple(inputs), tuple(tangents))
    for x, y in zip(found, wanted, strict=True):
        torch.testing.assert_close(x.double(), y, rtol=0.05, atol=0.05)


# -- edges -----------------------------------------------------------------------------------------


def test_rows_that_see_no_key() -> None:
    """They have 0, or with a sink its tangent in lse."""
    mask = RandomMask(0.02, 1, "hq", "sparsity")
    for sink in (None, torch.float64):
        case = masked_dense(mask, None, sink, seqlen_q=40, seqlen_k=50, **BASE)
        problem = DerivativeCase(case).make_problem()
        tout, tlse = second_order.jvp(problem.attend, problem).values()
        keyless = ~problem.inputs.mask.any(-1).expand(2, 4, 40)
        assert keyless.any() and not tout.transpose(1, 2)[keyless].any()
        tsink = problem.tangents.get("sink", torch.zeros(4).double())
        assert torch.equal(tlse[keyless], tsink[:, None].expand(tlse.shape)[keyless])


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_any_tangent_of_a_bias_of_minus_infinity(value: float) -> None:
    problems = hidden_problems(value, seqlen_q=40, seqlen_k=50, **BASE)
    found, expected = (second_order.jvp(x.attend, x) for x in problems)
    for name, x in found.items():
        assert x.isfinite().all() and torch.equal(x, expected[name]), name


def test_a_sink_of_minus_infinity_is_none() -> None:
    case = masked_dense(RandomMask(0.1), None, torch.float64, seqlen_q=9, seqlen_k=9, **BASE)
    problem = DerivativeCase(case).make_problem()
    problem.leaves["sink"][1] = -torch.inf
    check_problem(problem, second_order.jvp)


def test_nothing_is_read_beyond_any_length() -> None:
    problem = poisoned_problem(**BASE)
    assert all(x.isnan().any() for name, x in problem.tangents.items() if name != "sink")
    check_problem(problem, second_order.jvp)


@pytest.mark.parametrize("lengths", [(0, 5), (5, 0), (0, 0)], ids=str)
def test_no_queries_or_no_keys(lengths: tuple[int, int]) -> None:
    q, k = tensors((2, lengths[0], 4, 8), (2, lengths[1], 2, 8))
    for x in jvp(attend, (q, k, k), (q, k, k))[1]:
        assert not x.any()
    cu_q, cu_k = int32(0, lengths[0]), int32(0, lengths[1])

    def packed(*x: Tensor) -> Tensor:
        return flash_attn_varlen_func(*x, cu_q, cu_k, *lengths)

    rows = q[0], k[0], k[0]
    assert not jvp(packed, rows, rows)[1].any()


def test_memory_is_linear_in_the_length() -> None:
    """All scores would be 64 MiB; what there is of inputs and results is a quarter of one."""
    q = torch.randn(1, 4096, 1, 4)
    lse = torch.zeros(1, 1, 4096)
    with torch.no_grad(), PeakBytes() as memory:
        jvp_on_cpu(AttentionCall(q, q, q), Incoming(None, None, q, lse, None), Tangents(q, q, q))
    assert memory.peak < 2**22


# -- transforms ------------------------------------------------------------------------------------


def test_opcheck() -> None:
    for packed, moved in ((True, LEAVES), (False, ("k", "sink"))):
        fields = backward_fields(packed)
        tangents = {f"t{name}": torch.randn_like(fields[name]) for name in moved}
        opcheck(_ops.attention_jvp, jvp_arguments(**fields, **tangents))
    fields = backward_fields(packed=False, bias=None, sink=None, dropout_p=0.0)
    opcheck(_ops.attention_jvp, jvp_arguments(**fields, tq=torch.randn_like(fields["q"])))


def test_opcheck_with_gradients() -> None:
    fields = backward_fields(packed=False, window_size_left=-1)
    tangents = {f"t{name}": torch.randn_like(fields[name]) for name in LEAVES}
    for name in ("q", "k", "v", "bias", "sink"):
        fields[name].requires_grad_()
        tangents[f"t{name}"].requires_grad_()
    opcheck(_ops.attention_jvp, jvp_arguments(**fields, **tangents))


def test_dual_tensors_within_no_grad() -> None:
    inputs, tangents = make_inputs(), make_inputs()
    wanted = jvp(expected, tuple(inputs), tuple(tangents))[1]
    with torch.no_grad(), forward_ad.dual_level():
        duals = [forward_ad.make_dual(x, t) for x, t in zip(inputs, tangents, strict=True)]
        found = [forward_ad.unpack_dual(x) for x in attend(*duals)]
        assert forward_ad.unpack_dual(attend(*inputs)[0]).tangent is None
    torch.testing.assert_close(tuple(x.tangent for x in found), wanted)
    torch.testing.assert_close(tuple(x.primal for x in found), expected(*inputs))


def test_linearize() -> None:
    inputs, tangents = make_inputs(), make_inputs()
    out, derivative = linearize(lambda *x: attend(*x)[0], *inputs)
    wanted, tangent = jvp(lambda *x: expected(*x)[0], tuple(inputs), tuple(tangents))
    torch.testing.assert_close(out, wanted)
    torch.testing.assert_close(derivative(*tangents), tangent)


def test_jacfwd() -> None:
    inputs = tensors((1, 3, 2, 2), (1, 4, 1, 2), (1, 4, 1, 2))
    for found, wanted in zip(
        *(jacfwd(f, (0, 1, 2))(*inputs) for f in (attend, expected)), strict=True
    ):
        torch.testing.assert_close(found, wanted)


MAPPED = [(0, 0, 0, 0), (None, 0, None, 0), (0, None, 2, None), (None, None, None, 0)]


@pytest.mark.parametrize("in_dims", MAPPED, ids=str)
def test_vmap(in_dims: tuple[int | None, ...]) -> None:
    """Of q, k, v and q's tangent."""
    inputs = [
        x if dim is None else torch.stack([x, 2.0 * x.flip(1)], dim)
        for x, dim in zip([*make_inputs(), make_inputs()[0]], in_dims, strict=True)
    ]

    def of(function: Callable[..., Any]) -> Any:
        def along(*x: Tensor) -> Any:
            return jvp(lambda q: function(q, *x[1:3]), (x[0],), (x[3],))[1]

        return vmap(along, in_dims)(*inputs)

    torch.testing.assert_close(of(attend), of(expected))


def test_vmap_with_a_bias_and_a_sink() -> None:
    q, k, v = make_inputs()
    bias, sink = tensors((3, 1, 4, 5, 6), (4,))
    tangents = torch.randn_like(bias)

    def of(function: Callable[..., Any]) -> Any:
        return vmap(lambda x, t: jvp(function, (x, sink), (t, sink)))(bias, tangents)

    found = of(lambda x, s: flash_attn_func(q, k, v, attn_mask=x, sink=s))
    torch.testing.assert_close(found, of(lambda x, s: attention(q, k, v, bias=x, sink=s)[0]))


def by_torch_func(q: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:
    out, tangent = jvp(lambda x: flash_attn_func(x, *rest, softcap=2.0), (q,), (q,))
    return out, tangent


def by_dual_tensors(q: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:
    with forward_ad.dual_level():
        found = flash_attn_func(forward_ad.make_dual(q, q), *rest, softcap=2.0)
        out, tangent = forward_ad.unpack_dual(found)
        return out.clone(), tangent


@pytest.mark.parametrize("of", [by_torch_func, by_dual_tensors])
def test_forward_mode_on_a_gpu(of: Callable[..., Any], request: pytest.FixtureRequest) -> None:
    """The extension runs both halves with no dispatcher between; where a mode watches, operators
    do.
    """
    inputs = [x.bfloat16() for x in make_inputs()]
    wanted = of(*inputs)
    extension: Extension = request.getfixturevalue("extension")
    torch.testing.assert_close(of(*inputs), wanted)
    assert len(extension.calls) == 2
    with PeakBytes():
        of(*inputs)
    assert len(extension.calls) == 2


@pytest.mark.usefixtures("extension")
def test_directions_in_a_batch_are_not_plain() -> None:
    """A wrapper of is_grads_batched is a Tensor without memory."""
    x, seen = torch.zeros(2, 3), []
    assert is_plain_cuda((x, None, 0.5))
    torch._vmap_internals._vmap(lambda row: seen.append(is_plain_cuda((row,))) or row)(x)
    assert seen == [False]


def test_what_the_extension_refuses_has_the_words_of_checks(extension: Extension) -> None:
    extension.error = RuntimeError("refused")
    wrong, error, words = WRONG[0]
    given = jvp_arguments(**backward_fields(packed=False), **wrong)
    with pytest.raises(error, match="^" + re.escape(words)):
        second_order_operators.jvp_on_cuda(*given)


def test_few_functions_are_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose number is host time that does not depend on the machine: 1,500 where tensors alone pass
    through torch.func, 9,000 where all arguments do.
    """
    inputs = tuple(make_inputs())
    out, lse = attend(*inputs)
    empty = torch.empty(0), torch.empty(0, dtype=torch.int64)
    found = Results(out, lse, *empty)
    monkeypatch.setattr(attention_operators, "forward_on_cpu", lambda *_: found)
    monkeypatch.setattr(
        second_order_operators, "jvp_on_cpu", lambda *_: (out.clone(), lse.clone(), empty[0])
    )
    jvp(attend, inputs, inputs)
    profile = cProfile.Profile()
    profile.runcall(jvp, attend, inputs, inputs)
    assert pstats.Stats(profile).total_calls < 3000


# -- dropout that a forward draws ------------------------------------------------------------------


def dropped(*x: Tensor) -> Tensor:
    torch.manual_seed(7)
    return flash_attn_func(*x, 0.4)


def test_the_tangent_has_the_mask_of_the_forward() -> None:
    inputs, tangents, step = make_inputs(), make_inputs(), 1e-5
    out, tangent = jvp(dropped, tuple(inputs), tuple(tangents))
    assert torch.equal(out, dropped(*inputs))
    after, before = (
        dropped(*(x + sign * step * t for x, t in zip(inputs, tangents, strict=True)))
        for sign in (1.0, -1.0)
    )
    torch.testing.assert_close(tangent, (after - before) / (2.0 * step), rtol=1e-7, atol=1e-7)


def test_vmap_of_tangents_has_one_mask() -> None:
    """Where the call itself is not mapped; else each entry has its own."""
    inputs, directions = make_inputs(), torch.randn(3, 2, 5, 4, 8).double()

    def along(t: Tensor) -> Tensor:
        return jvp(lambda q: dropped(q, *inputs[1:]), (inputs[0],), (t,))[1]

    found = vmap(along, randomness="same")(directions)
    torch.testing.assert_close(found, torch.stack([along(t) for t in directions]))


# -- what is refused -------------------------------------------------------------------------------

WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"tq": torch.zeros(2, 7, 4, 8).double()}, ValueError, "tq: must have shape (2, 7, 4, 16), g"),
    ({"tk": torch.zeros(2, 9, 4, 16).double()}, ValueError, "tk: must have shape (2, 9, 2, 16), g"),
    ({"tv": torch.zeros(9, 2, 16).double()}, ValueError, "tv: must have shape (2, 9, 2, 16), got"),
    ({"tbias": torch.zeros(4, 7, 9).double()}, ValueError, "tbias: must have shape (1, 4, 7, 9)"),
    ({"tsink": torch.zeros(1).double()}, ValueError, "tsink: must have shape (4,), got (1,)"),
    ({"tq": torch.zeros(2, 7, 4, 16)}, TypeError, "tq: dtype must be torch.float64, got torch.fl"),
    ({"tv": torch.zeros(2, 9, 2, 16).half()}, TypeError, "tv: dtype must be torch.float64, got t"),
    ({"tbias": torch.zeros(1, 4, 7, 9)}, TypeError, "tbias: dtype must be torch.float64, got tor"),
    ({"tsink": torch.zeros(4)}, TypeError, "tsink: dtype must be torch.float64, got torch.float3"),
    ({"tk": torch.empty(2, 9, 2, 16, device="meta").double()}, ValueError, "tk: must be on"),
    ({"bias": None, "tbias": torch.zeros(1)}, ValueError, "tbias: must be None without bias, got"),
    ({"sink": None, "tsink": torch.zeros(4)}, ValueError, "tsink: must be None without sink, got"),
    ({"rng_state": None}, ValueError, "rng_state: must be given with dropout, as the"),
    ({"out": torch.zeros(2, 7, 4, 8).double()}, ValueError, "out: must have shape (2, 7, 4, 16)"),
    ({"softmax_lse": torch.zeros(2, 4, 9).double()}, ValueError, "softmax_lse: must have shape"),
]


@pytest.mark.parametrize(("changes", "error", "words"), WRONG, ids=lambda x: str(x)[:40])
def test_wrong_operator_arguments(
    changes: dict[str, Any], error: type[Exception], words: str
) -> None:
    fields = backward_fields(packed=False)
    given = {"tq": torch.zeros_like(fields["q"]), **fields, **changes}
    with pytest.raises(error, match="^" + re.escape(words)):
        run_jvp(**given)


FORWARD_MODE = r": must not carry a forward-mode gradient, got a dual tensor$"


def test_slopes_have_no_tangent() -> None:
    inputs, slopes = make_inputs(), torch.ones(4)

    def of_slopes(x: Tensor) -> Tensor:
        return flash_attn_func(*inputs, alibi_slopes=x)

    def of_dual(x: Tensor) -> None:
        with torch.no_grad(), forward_ad.dual_level():
            of_slopes(forward_ad.make_dual(x, x))

    mapped = torch.vmap(of_slopes)
    for derivative in (
        of_dual,
        lambda x: jvp(of_slopes, (x,), (x,)),
        lambda x: jvp(lambda x: mapped(torch.stack([x, x])), (x,), (x,)),
    ):
        with pytest.raises(NotImplementedError, match="^alibi_slopes" + FORWARD_MODE):
            derivative(slopes)


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_pages_have_no_tangent(name: str) -> None:
    given = dict(zip("qkv", tensors((6, 4, 8), (3, 2, 2, 8), (3, 2, 2, 8)), strict=True))
    lengths = (int32(0, 6), int32(0, 6), 6, 6)

    def paged(x: Tensor) -> Tensor:
        tensors = (given | {name: x}).values()
        return flash_attn_varlen_func(*tensors, *lengths, block_table=int32(2, 0, 1)[None])

    with pytest.raises(NotImplementedError, match="^" + name + FORWARD_MODE):
        jvp(paged, (given[name],), (given[name],))


def test_private_functions_have_no_tangent() -> None:
    q, k, v = make_inputs()
    options = (0.0, 0.3, False, -1, -1, 0.0, None, False)
    out, lse, *_ = _flash_attn_forward(q, k, v, *options)
    with pytest.raises(NotImplementedError, match="^k" + FORWARD_MODE):
        jvp(lambda x: _flash_attn_forward(q, x, v, *options)[0], (k,), (k,))
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(out, out)
        with pytest.raises(NotImplementedError, match="^dout" + FORWARD_MODE):
            _flash_attn_backward(dual, q, k, v, out, lse, None, None, None, *options)


def test_fp32_results_have_no_tangent() -> None:
    q, k, v = tensors((5, 4, 8), (5, 2, 8), (5, 2, 8), dtype=torch.bfloat16)
    lengths = {"cu_seqlens_q": int32(0, 5), "cu_seqlens_k": int32(0, 5)}
    lengths |= {"max_seqlen_q": 5, "max_seqlen_k": 5}

    def attend(x: Tensor) -> Tensor:
        return run_operator(AttentionCall(x, k, v, fp32_results=True, **lengths)).out

    with pytest.raises(NotImplementedError, match=r"^fp32_results: must be False in a call"):
        jvp(attend, (q,), (q,))


def test_forward_mode_over_forward_mode() -> None:
    q, k, v = make_inputs()

    def tangent(x: Tensor) -> Tensor:
        return jvp(lambda x: attend(x, k, v)[0], (x,), (q,))[1]

    words = "^flash_attn_cuda does not implement forward mode over forward mode"
    for function in (lambda: jvp(tangent, (q,), (q,)), lambda: jacfwd(jacfwd(attend))(q, k, v)):
        with pytest.raises(NotImplementedError, match=words):
            function()
    # The tangent moves alone: this is linear.
    found = jvp(lambda t: jvp(lambda x: attend(x, k, v)[0], (q,), (t,))[1], (q,), (q,))
    torch.testing.assert_close(found[1], found[0])
