"""Derivatives in a direction and second derivatives of a MaskedCase's call, and of the reference.

A case says which tensors move; a transform is a kind of derivative, which takes the package's
function and the reference's alike. Named tensors are q, k, v, bias, sink, which a call is
differentiable in, and dout, dlse, the weights of its results.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from flash_attn_cuda import BlockSparsity
from flash_attn_cuda.call.fields import AttentionCall, Incoming, Tangents
from flash_attn_cuda.call.tensors import lse_dtype
from flash_attn_cuda.operators.derivatives import run_jvp_operator, run_operator
from tests import reference
from tests.cases.attention import Alibi, VarlenCase
from tests.cases.cpu_harness import call_of
from tests.cases.harness import drawn_rng_state, expected_keep_mask
from tests.cases.masked import (
    MaskedCase,
    MaskedInputs,
    RandomBias,
    RandomMask,
    masked_dense,
    masked_varlen,
)
from tests.cases.masked_harness import attend_masked
from tests.cases.operators import incoming_of
from tests.reference.dense import FP32_DOT_NOISE
from tests.reference.tolerance import LSE_RELATIVE_ERROR, Closeness, compare_tensor, failure

Named: TypeAlias = dict[str, Tensor]
Function: TypeAlias = Callable[[Named], tuple[Tensor, ...]]  # (out, lse) or (out,)

LEAVES = ("q", "k", "v", "bias", "sink")
OF_LSE = ("tlse", "dlse")  # results that 16 bits do not round
FP64_ERROR = 2.0**-38  # of 1 and the largest value


@dataclass(frozen=True)
class DerivativeCase:
    """A call, and the tensors whose tangents are given; those that it has not are left out, and
    with none left all move.
    """

    of: MaskedCase
    moved: tuple[str, ...] = LEAVES

    def __str__(self) -> str:
        return f"{self.of}-{'+'.join(self.moved)}"

    def make_problem(self, seed: int = 0) -> Problem:
        # With the bias that a relative_bias stands for (tests/cpu/test_masked.py has its own).
        inputs = replace(self.of.make_inputs(seed), relative_bias=None)
        leaves = {name: getattr(inputs.of, name) for name in "qkv"}
        if self.of.bias is not None and self.of.bias.requires_grad:
            leaves["bias"] = inputs.bias
        if self.of.sink is not None:
            leaves["sink"] = inputs.sink
        weights = {"dout": inputs.of.dout, "dlse": inputs.of.dlse}
        if not self.of.returns_lse:
            del weights["dlse"]
        movable = leaves | weights
        moved = [name for name in self.moved if name in movable] or list(leaves)
        generator = torch.Generator(self.of.of.device).manual_seed(seed + 2)
        tangents = {name: tangent_of(movable[name], generator) for name in moved}
        keep_mask = None
        if self.of.of.dropout_p > 0.0:
            keep_mask = expected_keep_mask(self.of.of, drawn_rng_state(self.of.of, inputs.of))
        return Problem(self.of, inputs, keep_mask, leaves, weights, tangents)


def tangent_of(x: Tensor, generator: torch.Generator) -> Tensor:
    """Normal values, and NaN where x is NaN, which is where nothing reads it."""
    made = torch.randn(x.shape, dtype=x.dtype, device=x.device, generator=generator)
    return made.masked_fill_(x.isnan(), torch.nan)


@dataclass(frozen=True, eq=False)
class Problem:
    """Tensors of a DerivativeCase. tangents: of those that move."""

    case: MaskedCase
    inputs: MaskedInputs
    keep_mask: Tensor | None  # of dropout, by the reference
    leaves: Named
    weights: Named
    tangents: Named

    def to(self, dtype: torch.dtype) -> Problem:
        named = (
            {name: x.to(dtype) for name, x in tensors.items()}
            for tensors in (self.leaves, self.weights, self.tangents)
        )
        return Problem(self.case, self.inputs, self.keep_mask, *named)

    def without_nan(self) -> Problem:
        named = (
            {name: x.nan_to_num(0.0, neginf=-torch.inf) for name, x in tensors.items()}
            for tensors in (self.leaves, self.weights, self.tangents)
        )
        return Problem(self.case, self.inputs, self.keep_mask, *named)

    def tangents_of(self, names: Mapping[str, Tensor]) -> Named:
        return {name: x for name, x in self.tangents.items() if name in names}

    def attend(self, leaves: Named) -> tuple[Tensor, ...]:
        """The public function."""
        count = 2 if self.case.returns_lse else 1
        found = attend_masked(self.case, self.inputs, leaves, return_attn_probs=count == 2)
        return found[:count] if isinstance(found, tuple) else (found,)

    def reference(self, dtype: torch.dtype, *, with_lse: bool = False) -> Function:
        """The reference in this dtype, `with_lse` where the public function returns none too."""
        case, inputs = self.case, self.inputs
        options = case.of.options(inputs.of.alibi_slopes, self.keep_mask)
        options = replace(options, mask=case.visible(inputs))
        scale = options.scale(case.of.head_dim)

        def attention(leaves: Named) -> tuple[Tensor, ...]:
            given: dict[str, Any] = {"bias": inputs.bias, "sink": inputs.sink} | leaves
            of_scores = {
                name: None if given[name] is None else given[name].to(dtype)
                for name in ("bias", "sink")
            }
            call: dict[str, Any] = {"options": replace(options, softmax_scale=1.0, **of_scores)}
            call["compute_dtype"] = dtype
            tensors = given["q"], given["k"] * scale, given["v"]
            if isinstance(case.of, VarlenCase):
                results = reference.varlen_attention(*tensors, **inputs.of.lengths(), **call)
            else:
                results = reference.attention(*tensors, **call)
            return results if with_lse else results[: len(self.weights)]

        return attention


# -- cases -----------------------------------------------------------------------------------------

FEATURES: dict[str, list[Any]] = {
    "heads": [(1, 1), (4, 4), (6, 2), (4, 1)],
    "head_dims": [(8, 8), (16, 8), (8, 24)],
    "mask": [
        *(None, RandomMask(0.5, 1, "q"), RandomMask(0.3, 1, "bhq"), RandomMask(0.5, 64, "hq")),
        RandomMask(0.6, 64, "b", "blocks"),
    ],
    "bias": [
        *(None, RandomBias("bhq"), RandomBias("h", fp32=True), RandomBias("q", hidden=0.3)),
        RandomBias("b"),
    ],
    "has_sink": [False, True],
    "deterministic": [False, True],
    "causal": [False, True],
    "window": [(-1, -1), (20, -1), (7, 3)],
    "softcap": [0.0, 2.5],
    "alibi": [None, *Alibi],
    "dropout_p": [0.0, 0.17],
    "softmax_scale": [None, -0.4],
    "moved": [
        *(LEAVES, ("q", "k"), ("q", "v"), ("k", "v"), ("q",), ("bias",), ("sink",)),
        *(("k", "dlse"), ("v", "dout")),
    ],
}
DENSE = {
    "lengths": [(1, 1), (33, 64), (70, 70), (3, 90), (90, 3), (140, 150)],
    **FEATURES,
}
PACKED = {
    "lengths": [
        {"lengths_q": (33, 0, 150), "lengths_k": (64, 5, 140)},
        {"lengths_q": (0, 0, 7), "lengths_k": (3, 0, 0)},
        {"lengths_q": (130, 20, 64), "used_q": (100, 0, 64), "used_k": (129, 20, 9)},
        {"lengths_q": (70, 20), "lengths_k": (200, 90), "leftpad": (60, 90), "used_k": (190, 90)},
    ],
    **FEATURES,
}


def case_of_row(row: dict[str, Any], dtype: torch.dtype, *, device: str = "cpu") -> DerivativeCase:
    """The case of a row of DENSE or PACKED that there can be."""
    fields = {"dtype": dtype, "device": device, **row}
    lengths, moved = fields.pop("lengths"), fields.pop("moved")
    fields["num_heads_q"], fields["num_heads_k"] = fields.pop("heads")
    fields["head_dim"], fields["head_dim_v"] = fields.pop("head_dims")
    of_sink = torch.float64 if dtype == torch.float64 else torch.float32
    fields["sink"] = of_sink if fields.pop("has_sink") else None
    mask, bias = fields["mask"], fields["bias"]
    if mask is not None and bias is not None and mask.given == "attn_mask":
        fields["mask"] = replace(mask, given="sparsity")
    if isinstance(lengths, dict):
        return DerivativeCase(masked_varlen(**lengths, **fields), moved)
    seqlen_q, seqlen_k = lengths
    return DerivativeCase(masked_dense(seqlen_q=seqlen_q, seqlen_k=seqlen_k, **fields), moved)


def call_of_case(case: MaskedCase, inputs: MaskedInputs, **others: Any) -> AttentionCall:
    """What an operator is given; `others` are fields of it. There is no rng_state."""
    of = inputs.of
    given: dict[str, Any] = {"alibi_slopes": of.alibi_slopes, "bias": inputs.bias}
    if inputs.sink is not None:
        given["sink"] = inputs.sink.to(lse_dtype(of.q.dtype))
    if inputs.mask is not None:
        made = BlockSparsity.from_mask(inputs.mask, seqlen_q=case.seqlens[0])
        given |= {"block_rows": made.rows, "block_columns": made.columns, "mask_bits": made.bits}
    if isinstance(case.of, VarlenCase):
        most = dict(zip(("max_seqlen_q", "max_seqlen_k"), case.seqlens, strict=True))
        given |= of.lengths() | most
    return call_of(case.of, of.q, of.k, of.v, **(given | others))


def described(problem: Problem) -> tuple[AttentionCall, Incoming, Tangents]:
    """What attention_hvp is given."""
    call, of = call_of_case(problem.case, problem.inputs), problem.inputs.of
    wants = {"wants_dbias": "bias" in problem.leaves}
    incoming = incoming_of(run_operator(call), of.dout, of.dlse, **wants)
    tangents = Tangents(**{f"t{name}": problem.tangents.get(name) for name in LEAVES})
    return call, incoming, tangents.with_results(run_jvp_operator(call, incoming, tangents))


def poisoned_problem(**fields: Any) -> Problem:
    """Packed sequences with NaN beyond every length: in rows of everything that has such, and of a
    bias and its tangent where no pair is. `fields` are a VarlenCase's.
    """
    of_sink = torch.float64 if fields["dtype"] == torch.float64 else torch.float32
    lengths: dict[str, Any] = {"lengths_q": (5, 0, 9, 3), "lengths_k": (7, 4, 8, 0)}
    lengths |= {"used_q": (5, 0, 6, 3), "used_k": (6, 4, 8, 0), "leftpad": (2, 1, 0, 0)}
    case = masked_varlen(None, RandomBias("bhq"), of_sink, **lengths, **fields)
    problem = DerivativeCase(case).make_problem()
    for index, (seqlen_q, seqlen_k) in enumerate(((5, 4), (0, 3), (6, 8), (3, 0))):
        for x in (problem.leaves["bias"], problem.tangents["bias"]):
            x[index, :, seqlen_q:] = x[index, ..., seqlen_k:] = torch.nan
    return problem


def hidden_problems(tangent: float, **fields: Any) -> tuple[Problem, Problem]:
    """A bias that hides pairs, and one row altogether, by -inf, whose tangent is 0, or this.
    `fields` are an AttentionCase's.
    """
    of_sink = torch.float64 if fields["dtype"] == torch.float64 else torch.float32
    case = masked_dense(None, RandomBias("hq", hidden=0.4), of_sink, **fields)
    problem = DerivativeCase(case).make_problem()
    problem.leaves["bias"][:, :, 7] = -torch.inf
    hidden = problem.leaves["bias"] == -torch.inf

    def filled(value: float) -> Problem:
        of_bias = problem.tangents["bias"].masked_fill(hidden, value)
        return replace(problem, tangents=problem.tangents | {"bias": of_bias})

    return filled(0.0), filled(tangent)


# -- transforms ------------------------------------------------------------------------------------

Transform: TypeAlias = Callable[[Function, Problem], Named]


def jvp(function: Function, problem: Problem) -> Named:
    """Tangents of the results."""
    tangents = problem.tangents_of(problem.leaves)
    points = {name: problem.leaves[name] for name in tangents}
    _, found = torch.func.jvp(lambda x: function(problem.leaves | x), (points,), (tangents,))
    return dict(zip(("tout", "tlse"), found, strict=False))


def double_backward(function: Function, problem: Problem) -> Named:
    """Gradients, by leaves and weights, of <tangents, gradients>."""
    leaves, weights = _requiring_grad(problem.leaves), _requiring_grad(problem.weights)
    first = gradients_of(function, leaves, weights, create_graph=True)
    tangents = problem.tangents_of(leaves)
    outputs = [first[name] for name in tangents]
    return _gradients(outputs, leaves | weights, list(tangents.values()))


def forward_over_reverse(function: Function, problem: Problem) -> Named:
    """Tangents of the gradients. Weights may move too."""
    points = problem.leaves | problem.weights
    moved = {name: points[name] for name in problem.tangents}

    def gradients(x: Named) -> Named:
        given = points | x
        leaves = {name: given[name] for name in problem.leaves}
        weights = tuple(given[name] for name in problem.weights)
        return torch.func.vjp(function, leaves)[1](weights)[0]

    return torch.func.jvp(gradients, (moved,), (problem.tangents,))[1]


def reverse_over_forward(function: Function, problem: Problem) -> Named:
    """Gradients, by leaves and tangents, of <weights, tangents of the results>."""
    leaves = _requiring_grad(problem.leaves)
    tangents = _requiring_grad(problem.tangents_of(leaves))
    moved = {name: leaves[name] for name in tangents}
    _, results = torch.func.jvp(lambda x: function(leaves | x), (moved,), (tangents,))
    named = leaves | {f"t{name}": x for name, x in tangents.items()}
    return _gradients(list(results), named, list(problem.weights.values()))


SECOND_ORDER = (double_backward, forward_over_reverse, reverse_over_forward)


def gradients_of(
    function: Function, leaves: Named, weights: Named, *, create_graph: bool = False
) -> Named:
    """Of <weights, results> by leaves, which require grad."""
    results = function(leaves)
    return _gradients(list(results), leaves, list(weights.values()), create_graph=create_graph)


def _gradients(
    outputs: list[Tensor], inputs: Named, weights: list[Tensor], create_graph: bool = False
) -> Named:
    pairs = [(x, y) for x, y in zip(outputs, weights, strict=True) if x.requires_grad]
    found = torch.autograd.grad(
        [x for x, _ in pairs],
        list(inputs.values()),
        [y for _, y in pairs],
        create_graph=create_graph,
        materialize_grads=True,
    )
    return dict(zip(inputs, found, strict=True))


def _requiring_grad(tensors: Named) -> Named:
    return {name: x.detach().requires_grad_() for name, x in tensors.items()}


# -- comparing them --------------------------------------------------------------------------------


def check_derivatives(case: DerivativeCase, transform: Transform, seed: int = 0) -> list[Closeness]:
    """Compares a transform of the public function with that of the reference."""
    return check_problem(case.make_problem(seed), transform)


def check_problem(problem: Problem, transform: Transform) -> list[Closeness]:
    report = compare_derivatives(problem, transform, transform(problem.attend, problem))
    failures = [str(x) for x in report if not x.passes]
    assert not failures, "\n".join(["not close to the reference:", *failures])
    return report


def compare_derivatives(problem: Problem, transform: Transform, actual: Named) -> list[Closeness]:
    """In fp64 tightly, else by the error of the same mathematics in the call's dtype."""
    dtype = problem.case.of.dtype

    def of_reference(dtype: torch.dtype) -> Named:
        return transform(problem.reference(dtype), problem.to(dtype))

    exact = of_reference(torch.float64)
    assert actual.keys() == exact.keys()
    if dtype == torch.float64:
        return [_compare_fp64(name, x, exact[name]) for name, x in actual.items()]
    naive, noise = of_reference(dtype), _noise_of(problem)
    report = []
    for name, x in actual.items():
        if name in OF_LSE:
            naive_fp32 = of_reference(torch.float32)[name]
            # Each is a row of its own.
            made = [y[..., None] for y in (x, exact[name], naive_fp32)]
            report.append(compare_tensor(name, *made, noise=noise["tlse"]))
        else:
            report.append(compare_tensor(name, x, exact[name], naive[name], noise[name]))
    return report


def _compare_fp64(name: str, actual: Tensor, exact: Tensor) -> Closeness:
    """What is rounded to fp32 at the end, as an fp32 bias's gradient, may be off by that."""
    if actual.shape != exact.shape:
        return failure(name, f"shape {tuple(actual.shape)} is not {tuple(exact.shape)}")
    if actual.numel() == 0:
        return Closeness(name, 0.0, 0.0, 0.0, 0.0)
    if not actual.isfinite().all():
        return failure(name, f"{int((~actual.isfinite()).sum())} elements are not finite")
    error, largest = (actual.double() - exact).abs(), exact.abs().max().item()
    allowed = (FP64_ERROR + torch.finfo(actual.dtype).eps) * (1.0 + largest)
    max_error, mean_error = error.max().item(), error.mean().item()
    return Closeness(name, max_error, max_error / allowed, mean_error, mean_error / allowed)


def _noise_of(problem: Problem) -> dict[str, float]:
    """What rounding dot products to fp32, and out and its tangent to their dtype, may do to each
    result where exact ones cancel, as in a row that sees one key.

    Errors of rowsum(dout * out) and rowsum(dout * tout) act like a change of dlse, so what they do
    to gradients is one more gradient of lse.
    """
    exact = problem.to(torch.float64).without_nan()
    function = problem.reference(torch.float64, with_lse=True)
    out, lse = function(exact.leaves)
    moved = exact.tangents_of(exact.leaves)
    tangents = moved or {name: torch.zeros_like(x) for name, x in exact.leaves.items()}
    with_tangents = replace(exact, tangents=tangents)
    tout, tlse = jvp(function, with_tangents).values()
    eps, dout = torch.finfo(problem.case.of.dtype).eps, exact.weights["dout"]

    def of_rows(x: Tensor) -> Tensor:
        """What rounding x, like out, does to rowsum(dout * x)."""
        dots = 2.0 * FP32_DOT_NOISE * dout.norm(dim=-1) * x.norm(dim=-1)
        return (dots + eps * (dout * x).norm(dim=-1)).transpose(-1, -2)

    of_out = of_rows(out)
    of_scores, of_probs = _tangent_of_scores(exact)
    of_probs += torch.finfo(torch.float32).eps * _largest(lse.abs())  # large where ALiBi is
    moves = tlse.abs().transpose(-1, -2)[..., None] * out.abs()
    of_values = of_scores * _largest(exact.leaves["v"].abs())
    of_values += _largest(tangents["v"].abs()) if "v" in tangents else 0.0
    noise = {"tlse": of_scores * of_probs, "tout": eps * _largest(moves) + of_probs * of_values}
    noise["dout"] = noise["tout"]
    first = _largest_each(gradients_by_lse(function, exact, of_out))
    beta = of_rows(tout) + tlse.abs() * of_out
    second = _largest_each(gradients_by_lse(function, exact, beta))
    weights = {"dout": torch.zeros_like(dout), "dlse": of_out}
    along = double_backward(function, replace(with_tangents, weights=weights))
    third = _largest_each({name: along[name] for name in exact.leaves})
    weights = {"dout": dout.abs(), "dlse": torch.zeros_like(lse)}
    of_dout = gradients_of(function, _requiring_grad(exact.leaves), weights)["v"]
    first["v"] += of_probs * _largest(of_dout.abs())
    second["v"] += of_probs * of_scores * _largest(of_dout.abs())
    for name in exact.leaves:
        noise[f"t{name}"] = first[name]
        noise[name] = first[name] + second[name] + third[name]
    return noise


def gradients_by_lse(function: Function, problem: Problem, dlse: Tensor) -> Named:
    """Gradients of <dlse, lse>."""
    weights = {"dout": torch.zeros_like(problem.weights["dout"]), "dlse": dlse}
    return gradients_of(function, _requiring_grad(problem.leaves), weights)


def _tangent_of_scores(problem: Problem) -> tuple[float, float]:
    """(the largest that there can be, what a probability may be off by relative to itself)."""
    norms, tangents = (
        {name: _largest(x.norm(dim=-1) if name in "qk" else x.abs()) for name, x in tensors.items()}
        for tensors in (problem.leaves, problem.tangents)
    )
    scale = abs(problem.case.of.options().scale(problem.case.of.head_dim))
    of_products = tangents.get("q", 0.0) * norms["k"] + norms["q"] * tangents.get("k", 0.0)
    of_scores = scale * of_products + tangents.get("bias", 0.0) + tangents.get("sink", 0.0)
    return of_scores, FP32_DOT_NOISE * (1.0 + scale * norms["q"] * norms["k"]) + LSE_RELATIVE_ERROR


def _largest_each(tensors: Named) -> dict[str, float]:
    return {name: _largest(x.abs()) for name, x in tensors.items()}


def _largest(x: Tensor) -> float:
    return x.nan_to_num(0.0, 0.0, 0.0).max().item() if x.numel() > 0 else 0.0
