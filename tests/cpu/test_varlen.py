"""Packed sequences on the CPU backend: against the reference, against dense calls, gaps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from flash_attn_cuda.cpu import forward_on_cpu
from tests.cases.attention import Alibi, VarlenCase
from tests.cases.cpu_harness import (
    OFFSET,
    RNG_STATE,
    SEED,
    assert_fp64_close,
    call_of_inputs,
    compute,
    naive_of,
    reference_of,
)
from tests.cases.pairwise import pairwise
from tests.reference import keep_mask
from tests.reference.tolerance import assert_close

pytestmark = pytest.mark.usefixtures("one_thread")

LENGTHS: dict[str, dict[str, Any]] = {
    "same": {"lengths_q": (40, 7, 33)},
    "cross": {"lengths_q": (10, 40, 1), "lengths_k": (64, 5, 30)},
    "empty": {"lengths_q": (0, 20, 5, 0), "lengths_k": (9, 0, 30, 0)},
    "used": {"lengths_q": (12, 30, 20), "lengths_k": (40, 12, 25), "used_q": (5, 30, 0),
        "used_k": (33, 0, 25)},
    "leftpad": {"lengths_q": (12, 30, 20), "lengths_k": (40, 12, 25), "used_k": (33, 12, 20),
        "leftpad": (3, 12, 19)},
    "none": {"lengths_q": ()},
}  # fmt: skip

AXES = {
    "lengths": list(LENGTHS),
    "heads": [(1, 1), (6, 2)],
    "head_dims": [(8, 8), (16, 8), (8, 24)],
    "causal": [False, True],
    "window": [(-1, -1), (8, -1), (-1, 4), (5, 2)],
    "softcap": [0.0, 2.5],
    "alibi": [None, *Alibi],
    "dropout_p": [0.0, 0.2],
}


def varlen_case(
    lengths: str,
    heads: tuple[int, int] = (4, 2),
    head_dims: tuple[int, int] = (8, 8),
    **fields: Any,
) -> VarlenCase:
    return VarlenCase(
        **LENGTHS[lengths],
        num_heads_q=heads[0],
        num_heads_k=heads[1],
        head_dim=head_dims[0],
        head_dim_v=head_dims[1],
        device="cpu",
        **fields,
    )


@pytest.mark.parametrize("row", pairwise(AXES), ids=str)
def test_equals_the_reference(row: dict[str, Any]) -> None:
    case = varlen_case(**row, dtype=torch.float64)
    inputs = case.make_inputs()
    assert_fp64_close(compute(case, inputs), reference_of(case, inputs))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("row", pairwise(AXES, 1)[::2], ids=str)
def test_low_precision_is_close(row: dict[str, Any], dtype: torch.dtype) -> None:
    case = varlen_case(**row, dtype=dtype)
    inputs = case.make_inputs()
    actual = compute(case, inputs)
    assert actual.out.dtype == actual.dk.dtype == dtype
    assert actual.lse.dtype == torch.float32
    assert_close(actual, reference_of(case, inputs), naive_of(case, inputs))


def test_rows_outside_the_sequences() -> None:
    """Before, between and behind them: poison in, nothing out."""
    case = varlen_case("used", dtype=torch.float32)
    inputs = case.make_inputs()
    pad_q, pad_k = (torch.full_like(x[:3], torch.nan) for x in (inputs.q, inputs.k))
    pad_rows = torch.full_like(inputs.dlse[:, :3], torch.nan)
    padded = replace(
        inputs,
        q=torch.cat([pad_q, inputs.q, pad_q]),
        dout=torch.cat([pad_q, inputs.dout, pad_q]),
        k=torch.cat([pad_k, inputs.k, pad_k]),
        v=torch.cat([pad_k, inputs.v, pad_k]),
        dlse=torch.cat([pad_rows, inputs.dlse, pad_rows], 1),
        cu_seqlens_q=inputs.cu_seqlens_q + 3,
        cu_seqlens_k=inputs.cu_seqlens_k + 3,
    )
    plain, result = compute(case, inputs), compute(case, padded)
    for name, x in result.tensors().items():
        dim = 1 if name == "lse" else 0
        middle = x.narrow(dim, 3, x.shape[dim] - 6)
        assert torch.equal(middle, plain.tensors()[name]), name
        ends = torch.cat([x.narrow(dim, 0, 3), x.narrow(dim, x.shape[dim] - 3, 3)], dim)
        assert (ends == (-torch.inf if name == "lse" else 0.0)).all(), name


@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize("lengths", ["cross", "leftpad"])
def test_paged_keys(lengths: str, page_size: int) -> None:
    case = varlen_case(lengths, dtype=torch.float64, causal=True, alibi=Alibi.per_head)
    inputs = case.make_inputs()
    pages_each = -(-max(case.keys) // page_size)
    order = torch.randperm(case.batch * pages_each + 2)[: case.batch * pages_each]
    table = order.view(case.batch, pages_each).to(torch.int32)
    pools = []
    for x in (inputs.k, inputs.v):
        pool = torch.full((len(order) + 2, page_size, *x.shape[1:]), torch.nan, dtype=x.dtype)
        start = 0
        for index, length in enumerate(case.keys):
            for row in range(length):
                pool[table[index, row // page_size], row % page_size] = x[start + row]
            start += length
        pools.append(pool)
    call = call_of_inputs(case, inputs)
    expected = forward_on_cpu(call, RNG_STATE)
    paged = replace(call, k=pools[0], v=pools[1], block_table=table)
    actual = forward_on_cpu(paged, RNG_STATE)
    assert torch.equal(actual.out, expected.out)
    assert torch.equal(actual.softmax_lse, expected.softmax_lse)


@pytest.mark.parametrize("lengths", ["cross", "used", "leftpad"])
def test_probabilities(lengths: str) -> None:
    case = varlen_case(lengths, dtype=torch.float64, dropout_p=0.3, window=(6, 6))
    inputs = case.make_inputs()
    sizes = (case.max_seqlen_q + 1, case.max_seqlen_k + 2)
    bounds: dict[str, Any] = dict(zip(("max_seqlen_q", "max_seqlen_k"), sizes, strict=True))
    call = replace(call_of_inputs(case, inputs), return_softmax=True, **bounds)
    _, lse, probs, *_ = forward_on_cpu(call, RNG_STATE)
    assert probs is not None
    assert probs.shape == (case.batch, case.num_heads_q, *sizes)
    keep = keep_mask(SEED, OFFSET, 0.3, case.batch, case.num_heads_q, *sizes)
    assert not (probs > 0.0)[~keep].any() and not (probs < 0.0)[keep].any()
    for index, length in enumerate(case.lengths_q):
        start = int(inputs.cu_seqlens_q[index])
        sums = probs[index, :, :length].abs().sum(-1)
        seen = lse[:, start : start + length] > -torch.inf
        torch.testing.assert_close(sums, seen.double())
