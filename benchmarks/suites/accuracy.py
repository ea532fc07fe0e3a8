"""Relative error of out, dq, dk and dv against fp64, where keys and values have a mean.

    python -m benchmarks.suites.accuracy --json accuracy.json
    python -m benchmarks.suites.accuracy --quick
    FLASH_ATTN_CUDA_CAPABILITY_LIMIT=80 python -m benchmarks.suites.accuracy \\
        --without sdpa_flash sdpa_cudnn fa3  # the kernels of other GPUs

Inputs are standard normal. To keys and values a direction of their own is added, so many standard
deviations long in each column. An error is |x - exact| / |exact|, norms over the whole tensor.
Compared are ours, also by the kernels of masks, biases and packed sequences, torch's
FlashAttention-2 and cuDNN, FlashAttention-3 and maths: separate products whose factors are of 16
bits, with sums and a softmax of fp32.

The first length has every head dim, mask and dtype; the other lengths have the first two head dims
in bf16. Wanted is a dq of ours that is at most 1.5 times as far off as that of maths.
"""

from __future__ import annotations

import argparse
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.core.feature_tables import Column, Row, Target, quotient, ratio
from benchmarks.core.row_programs import fill, new_document, status_of
from benchmarks.core.runner import Measurement, Status, failure
from benchmarks.peers.backends import (
    BACKENDS,
    Attend,
    Backend,
    TensorOrder,
    Unsupported,
    require_ours,
)
from benchmarks.suites.grid import DTYPES, MASKS, HeadDims, parse_head_dims
from tests.cases.attention import DTYPE_NAMES, AttentionCase, AttentionInputs
from tests.reference import attention_with_gradients

SCHEMA = 1
BENCHMARK = "accuracy"
RESULTS = ("out", "dq", "dk", "dv")
OURS, WITHOUT_ROUNDING, MATHS = "ours", "ours, keep_rounding=False", "maths"
OF_DEVIATIONS = "ours, k - mean(k)"
OTHER_KERNELS = MASKED, BIASED, PACKED = "ours, a mask", "ours, a bias", "ours, packed"
BESIDE_MATHS = Target("over_maths", 1.5, at_least=False)
DIGITS = 3  # of a figure in the results

HEAD_DIMS: list[HeadDims] = [(d, None) for d in (128, 64, 32, 96, 192, 256, 512)]
HEAD_DIMS.append((192, 128))
SEQLENS = [2048, 512, 1024, 4096, 8192, 16_384]
HEADS, GROUPED_HEADS = (2, 2), (8, 2)

Means = tuple[int, int]  # of keys and of values, in standard deviations
MEANS: tuple[Means, ...] = ((0, 0), (0, 1), (1, 1), (4, 0), (4, 1), (4, 4), (16, 1))
FEW_MEANS: tuple[Means, ...] = ((0, 0), (1, 1), (4, 1))


@dataclass(frozen=True)
class Cell:
    """A call, and what its keys and values have in common."""

    case: AttentionCase
    means: Means

    def __str__(self) -> str:
        return "{} means {}, {}".format(self.case, *self.means)

    def inputs(self) -> AttentionInputs:
        made = self.case.make_inputs()
        generator = torch.Generator(self.case.device).manual_seed(1)
        k, v = (
            shifted(x, mean, generator)
            for x, mean in zip((made.k, made.v), self.means, strict=True)
        )
        return replace(made, k=k, v=v)


def shifted(x: Tensor, mean: float, generator: torch.Generator) -> Tensor:
    """x (B, S, H, D) and a direction of each head whose columns have this root mean square."""
    direction = torch.randn(x.shape[2:], device=x.device, generator=generator)
    direction *= mean * x.shape[-1] ** 0.5 / direction.norm(dim=-1, keepdim=True)
    return (x + direction).to(x.dtype)


# Contenders


class Maths(torch.autograd.Function):
    """Causal attention or not of q (B, Hq, S, D), k (B, Hk, S, D), v (B, Hk, S, Dv) by separate
    products. P and dS are rounded as factors of products alone, and D = sum_j P dP is of fp32.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, causal: bool
    ) -> Tensor:
        q = q.unflatten(1, (k.shape[1], -1))  # (B, Hk, G, S, D)
        k, v = k.unsqueeze(2), v.unsqueeze(2)
        scores = multiply(q, k.mT) * softmax_scale
        if causal:
            hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
            scores.masked_fill_(hidden, -torch.inf)
        probabilities = scores.softmax(-1)
        ctx.save_for_backward(q, k, v, probabilities)
        ctx.softmax_scale = softmax_scale
        return multiply(probabilities.to(q.dtype), v).to(q.dtype).flatten(1, 2)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, probabilities = ctx.saved_tensors
        dout = dout.unflatten(1, q.shape[1:3])
        dprobabilities = multiply(dout, v.mT)
        dv = multiply(probabilities.to(q.dtype).mT, dout).sum(2)
        dscores = torch._softmax_backward_data(
            dprobabilities, probabilities, -1, probabilities.dtype
        )
        dscores = dscores.to(q.dtype)
        dq = (multiply(dscores, k) * ctx.softmax_scale).flatten(1, 2)
        dk = (multiply(dscores.mT, q) * ctx.softmax_scale).sum(2)
        return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype), None, None


def multiply(a: Tensor, b: Tensor) -> Tensor:
    """In fp32, which has every product of 16-bit factors; autocast would round the factors."""
    with torch.autocast(a.device.type, enabled=False):
        return a.float() @ b.float()


def prepare_maths(case: AttentionCase) -> Attend:
    return lambda q, k, v: Maths.apply(q, k, v, case.head_dim**-0.5, case.causal)


def prepare_without_rounding(case: AttentionCase) -> Attend:
    """Ours of an O that is kept in 16 bits alone for the backward."""
    from flash_attn_cuda import flash_attn_func

    require_ours(case.device)
    if "keep_rounding" not in inspect.signature(flash_attn_func).parameters:
        raise Unsupported("flash_attn_func has no argument keep_rounding")
    options: dict[str, Any] = {"causal": case.causal, "keep_rounding": False}
    return partial(flash_attn_func, **options)


def prepare_of_deviations(case: AttentionCase) -> Attend:
    """Ours of keys without their mean, which is the same function of them."""
    attend = BACKENDS["ours"].prepare(case)
    return lambda q, k, v: attend(q, k - k.detach().mean(1, keepdim=True), v)


def prepare_masked(case: AttentionCase, dtype: torch.dtype | None = torch.bool) -> Attend:
    """Ours of an attn_mask that hides what a causal mask does, or nothing; a bias of `dtype`."""
    from flash_attn_cuda import flash_attn_func

    shown = torch.ones(case.seqlen_q, case.seqlen_k, dtype=torch.bool, device=case.device)
    mask = shown.tril(case.seqlen_k - case.seqlen_q) if case.causal else shown
    if dtype is not torch.bool:
        mask = torch.zeros_like(mask, dtype=case.dtype).masked_fill_(~mask, -torch.inf)
    return partial(flash_attn_func, attn_mask=mask)


def prepare_packed(case: AttentionCase) -> Attend:
    from flash_attn_cuda import flash_attn_varlen_func

    lengths = [
        torch.arange(0, (case.batch + 1) * x, x, dtype=torch.int32, device=case.device)
        for x in (case.seqlen_q, case.seqlen_k)
    ]
    options: dict[str, Any] = {"causal": case.causal}

    def attend(*qkv: Tensor) -> Tensor:
        bounds = (*lengths, case.seqlen_q, case.seqlen_k)
        found = flash_attn_varlen_func(*(x.flatten(0, 1) for x in qkv), *bounds, **options)
        return found.unflatten(0, (case.batch, -1))

    return attend


CONTENDERS = {
    OURS: BACKENDS["ours"],
    OF_DEVIATIONS: Backend(OF_DEVIATIONS, "", prepare_of_deviations),
    WITHOUT_ROUNDING: Backend(WITHOUT_ROUNDING, "", prepare_without_rounding),
    MASKED: Backend(MASKED, "", prepare_masked),
    BIASED: Backend(BIASED, "", partial(prepare_masked, dtype=None)),
    PACKED: Backend(PACKED, "", prepare_packed),
    **{name: BACKENDS[name] for name in ("sdpa_flash", "sdpa_cudnn", "fa3")},
    MATHS: Backend(MATHS, "", prepare_maths, TensorOrder.heads_first),
}


def find_contenders(
    device: str, without: Sequence[str], is_missing: Callable[[str, str], None]
) -> list[Backend]:
    """Those that compute a small call; `is_missing` is told of others and why."""
    case = AttentionCase(1, 64, 64, 2, 2, 64, causal=True, device=device)
    inputs = case.make_inputs()
    found = []
    for name, backend in CONTENDERS.items():
        if name in without:
            continue
        outcome = compute(backend, case, inputs)
        if isinstance(outcome, Measurement) and outcome.status is Status.unsupported:
            is_missing(name, outcome.reason or "")
        else:
            found.append(backend)
    return found


def compute(
    backend: Backend, case: AttentionCase, inputs: AttentionInputs
) -> tuple[Tensor, ...] | Measurement:
    """out, dq, dk and dv as (B, S, H, D), or why there are none."""
    q, k, v, dout = (backend.view(x.detach()) for x in (inputs.q, inputs.k, inputs.v, inputs.dout))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    try:
        with backend.scope(), torch.enable_grad():
            out = backend.prepare(case)(*leaves)
            gradients = torch.autograd.grad(out, leaves, dout)
    except Exception as error:
        return failure(error)
    return tuple(backend.view(x.detach()) for x in (out, *gradients))


# Cells


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument(
        "--quick", action="store_true", help="the first length, dtype and two head dims alone"
    )
    parser.add_argument(
        "--head-dims", nargs="+", type=parse_head_dims, default=HEAD_DIMS, metavar="D[xDv]"
    )
    parser.add_argument("--seqlens", nargs="+", type=int, default=SEQLENS)
    parser.add_argument(
        "--dtypes",
        nargs="+",
        choices=DTYPES,
        default=["bf16", "fp16"],
        help="all pairs of means are those of the first",
    )
    parser.add_argument("--without", nargs="+", choices=CONTENDERS, default=[], metavar="NAME")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(arguments)
    if options.quick:
        options.seqlens, options.dtypes = options.seqlens[:1], options.dtypes[:1]
        options.head_dims = options.head_dims[:2]
    return options


def cells(options: argparse.Namespace) -> Iterator[Cell]:
    first, *others = options.seqlens
    dtype, *other_dtypes = options.dtypes
    few = options.head_dims[:2]
    shapes: list[tuple[Any, ...]] = [
        *product([first], options.head_dims, [dtype], [HEADS], [MEANS]),
        *product([first], options.head_dims, other_dtypes, [HEADS], [FEW_MEANS]),
        *product(others, few, [dtype], [HEADS], [FEW_MEANS]),
        (first, few[0], dtype, GROUPED_HEADS, FEW_MEANS),
    ]
    for (seqlen, head_dims, dtype, heads, pairs), causal in product(shapes, MASKS.values()):
        case = AttentionCase(
            *(1, seqlen, seqlen, *heads, *head_dims),
            dtype=DTYPES[dtype],
            causal=causal,
            device=options.device,
        )
        yield from (Cell(case, means) for means in pairs)


# Rows


def of_dq(errors: dict[str, float]) -> str:
    return f"{errors['dq']:.1e}"


def pair(means: Means) -> str:
    return "{}, {}".format(*means)


COLUMNS = (
    Column("dq of", "group"),
    Column("means", "means", pair),
    *(Column(name, name, of_dq) for name in CONTENDERS),
    Column("ours / maths", "over_maths", ratio),
)


def relative_errors(found: Sequence[Tensor], exact: Sequence[Tensor]) -> dict[str, float]:
    pairs = zip(found, exact, strict=True)
    errors = torch.stack([(x.double() - y).norm() / y.norm() for x, y in pairs]).tolist()
    return dict(zip(RESULTS, map(rounded, errors), strict=True))


def rounded(figure: float) -> float:
    return float(f"{figure:.{DIGITS}g}")


def row_of(cell: Cell, contenders: Sequence[Backend]) -> Row:
    """Errors by contender; absent is why others have none."""
    case, inputs = cell.case, cell.inputs()
    tensors = (inputs.q, inputs.k, inputs.v, inputs.dout)
    reference = attention_with_gradients(*tensors, causal=case.causal).tensors()
    exact = [reference[name] for name in RESULTS]
    row: Row = {
        "name": str(cell),
        "group": str(case),
        "seqlen": case.seqlen_q,
        "head_dim": case.head_dim,
        "head_dim_v": case.value_dim,
        "heads": [case.num_heads_q, case.num_heads_k],
        "dtype": DTYPE_NAMES[case.dtype],
        "causal": case.causal,
        "means": list(cell.means),
        "status": Status.ok.value,
        "reason": None,
        "absent": {},
    }
    for backend in contenders:
        outcome = compute(backend, case, inputs)
        if not isinstance(outcome, Measurement):
            row[backend.name] = relative_errors(outcome, exact)
            continue
        row["absent"][backend.name] = outcome.reason
        if outcome.status is not Status.unsupported:
            row["status"], row["reason"] = Status.failed.value, f"{backend.name}: {outcome.reason}"
    ours, maths = (row.get(name, {}).get("dq") for name in (OURS, MATHS))
    over_maths = quotient(ours, maths)
    row["over_maths"] = over_maths and rounded(over_maths)
    row["targets"] = [BESIDE_MATHS.judge(row)] if ours is not None else []
    return row


def measure_all(cells: Sequence[Cell], contenders: Sequence[Backend]) -> Iterator[list[Row]]:
    for index, cell in enumerate(cells, start=1):
        print(f"[{index}/{len(cells)}] {cell}", file=sys.stderr, flush=True)
        yield [row_of(cell, contenders)]


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    program = "python -m benchmarks.suites.accuracy"
    document = new_document(BENCHMARK, SCHEMA, program, arguments, options)
    missing = document["missing"] = {}
    contenders = find_contenders(options.device, options.without, missing.__setitem__)
    for name, reason in missing.items():
        print(f"without {name}: {reason}", file=sys.stderr)
    rows = measure_all(list(cells(options)), contenders)
    return status_of(fill(document, rows, COLUMNS, options.json))


if __name__ == "__main__":
    sys.exit(main())
