"""Packed buffers longer than their sequences, as a captured CUDA graph has them, and bounds that
are too small.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from flash_attn_cuda import (
    check_device_errors,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
)
from tests.cases.attention import Alibi
from tests.cases.harness import (
    DEVICE,
    bits,
    captured,
    check_rows_behind,
    make_varlen_case,
    run_reference,
    skip_without_row,
)
from tests.cases.public_calls import lengths, normal
from tests.reference import AttentionResult
from tests.reference.tolerance import assert_close

pytestmark = pytest.mark.gpu

LENGTHS_Q, LENGTHS_K = (70, 0, 1, 129), (130, 20, 0, 65)


# -- cu_seqlens that end before the rows do --------------------------------------------------------


@pytest.mark.parametrize("rows", [(1, 0), (0, 1), (300, 200)], ids=str)
@pytest.mark.parametrize(
    "features",
    [
        {},
        {"causal": True},
        {"window": (20, 3), "alibi": Alibi.per_batch},
        {"causal": True, "head_dim": 59, "deterministic": True},
        {"used_q": (30, 0, 0, 129), "used_k": (130, 0, 0, 64), "leftpad": (5, 0, 0, 64)},
    ],
    ids=str,
)
def test_rows_behind_the_last_sequence(features: dict[str, Any], rows: tuple[int, int]) -> None:
    """No error is on record either."""
    case = make_varlen_case(lengths_q=LENGTHS_Q, lengths_k=LENGTHS_K, num_heads_k=2, **features)
    skip_without_row(case)
    check_rows_behind(case, *rows)
    check_device_errors()


def test_no_sequence_at_all() -> None:
    """Only zeros in cu_seqlens, or a single one: every row is behind the last sequence."""
    for cu in (lengths(0), lengths(0, 0, 0)):
        leaves = [normal(90, heads, 64).requires_grad_() for heads in (4, 2, 2)]
        out, lse, _ = flash_attn_varlen_func(*leaves, cu, cu, 0, None, return_attn_probs=True)
        gradients = torch.autograd.grad([out, lse], leaves, [out + 1, lse.exp() + 1])
        assert (lse == -torch.inf).all()
        assert not any(x.any() for x in (out, *gradients))
    check_device_errors()


# -- bounds ----------------------------------------------------------------------------------------


@pytest.mark.cuda_only  # on the CPU it is an error
@pytest.mark.parametrize("bounds", [(0, 0), (1, 1), (20, 1), (1, 300)], ids=str)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_a_max_seqlen_far_too_small(bounds: tuple[int, int], causal: bool) -> None:
    """It is a hint: on the device lengths alone say what there is."""
    case = make_varlen_case(lengths_q=LENGTHS_Q, lengths_k=LENGTHS_K, num_heads_k=2, causal=causal)
    skip_without_row(case)
    inputs = case.make_inputs()
    leaves = [x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    out, lse, _ = flash_attn_varlen_func(
        *(*leaves, inputs.cu_seqlens_q, inputs.cu_seqlens_k, *bounds),
        causal=causal,
        return_attn_probs=True,
    )
    gradients = torch.autograd.grad([out, lse], leaves, [inputs.dout, inputs.dlse])
    result = AttentionResult(out.detach(), lse.detach(), *gradients)
    assert_close(result, *run_reference(case, inputs))


# -- a cache ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("paged", [False, True], ids=["dense", "paged"])
def test_a_decode_graph_takes_fewer_tokens_than_it_was_captured_with(paged: bool) -> None:
    """Packed queries and new keys: what lies behind the last sequence goes nowhere."""
    page_size, pages, rows = 16, 4, 12
    table = torch.arange(3 * pages, dtype=torch.int32, device=DEVICE).flip(0).view(3, pages)
    shape = (3 * pages, page_size) if paged else (3, pages * page_size)
    start = [normal(*shape, 2, 64) for _ in range(2)]
    tokens = {"q": normal(rows, 4, 64), "k": normal(rows, 2, 64), "v": normal(rows, 2, 64)}
    caches = [x.clone() for x in start]
    used, cu = lengths(0, 40, 7), lengths(0, 4, 8, 12)

    def attend(given: dict[str, Tensor], into: list[Tensor], cu_seqlens: Tensor) -> Any:
        return flash_attn_with_kvcache(
            *(given["q"], *into, given["k"], given["v"]),
            cache_seqlens=used,
            block_table=table if paged else None,
            cu_seqlens_q=cu_seqlens,
            causal=True,
            return_softmax_lse=True,
        )

    replay = captured(lambda: attend(tokens, caches, cu))
    for ends in ((0, 4, 8, 12), (0, 3, 4, 9), (0, 0, 1, 1), (0, 0, 0, 0)):
        for x, y in zip(caches, start, strict=True):
            x.copy_(y)
        cu.copy_(lengths(*ends))
        total = ends[-1]
        out, lse = replay()
        expected_caches = [x.clone() for x in start]
        few = {name: x[:total] for name, x in tokens.items()}
        expected_out, expected_lse = attend(few, expected_caches, lengths(*ends))
        torch.testing.assert_close(out[:total], expected_out, rtol=2.0**-7, atol=2.0**-9)
        torch.testing.assert_close(lse[:, :total], expected_lse, rtol=1e-4, atol=1e-4)
        assert not out[total:].any() and (lse[:, total:] == -torch.inf).all()
        for x, y in zip(caches, expected_caches, strict=True):
            assert torch.equal(bits(x), bits(y)), ends
    check_device_errors()
