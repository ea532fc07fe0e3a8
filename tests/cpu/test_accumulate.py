"""Backwards that add to given dq, dk and dv, by the CPU backend, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from flash_attn_cuda.call.fields import AttentionCall, Incoming
from flash_attn_cuda.operators.attention import run_backward_operator
from flash_attn_cuda.operators.derivatives import run_operator
from tests.cases.accumulate import WHATS, SumCase, Target

SMALL = 70  # of a sequence; more heads than eight are for GPUs


def small(case: SumCase) -> SumCase:
    heads = (4, 2) if max(case.heads) > 8 and case.heads[1] > 1 else case.heads
    lengths = (tuple(min(x, SMALL) for x in y) for y in (case.lengths_q, case.lengths_k))
    used = case.used and ((70, 0, 60, 5), (60, 20, 33, 33), (10, 0, 30, 0))
    lengths_q, lengths_k = lengths
    return replace(case, lengths_q=lengths_q, lengths_k=lengths_k, heads=heads, used=used)


@pytest.mark.parametrize("what", WHATS, ids=lambda what: what["what"])
def test_sums(what: dict) -> None:
    for place in ("contiguous", "side by side", "odd stride"):
        case = SumCase(**what, head_dims=(32, 24), place=place, device="cpu")
        assert not small(case).problems()


def a_backward() -> tuple[AttentionCall, Incoming]:
    q = torch.randn(1, 9, 2, 16, dtype=torch.bfloat16)
    call = AttentionCall(q, q, q, fp32_results=True)
    out, softmax_lse, *_ = run_operator(replace(call, fp32_results=False))
    targets = {name: torch.zeros(q.shape) for name in ("dq", "dk", "dv")}
    incoming = Incoming(out, None, out, softmax_lse, None, **targets, accumulate=True)
    return call, incoming


def test_twice_is_twice() -> None:
    call, incoming = a_backward()
    run_backward_operator(call, incoming)
    assert incoming.dv is not None
    once = incoming.dv.clone()
    assert once.any()
    run_backward_operator(call, incoming)
    assert torch.equal(incoming.dv, 2.0 * once)


@pytest.mark.parametrize("missing", ["dq", "dk", "dv"])
def test_all_targets_are_needed(missing: str) -> None:
    call, incoming = a_backward()
    with pytest.raises(ValueError, match=rf"^{missing}: must be given with accumulate, got None"):
        run_backward_operator(call, replace(incoming, **{missing: None}))


def test_sums_in_16_bits_are_refused() -> None:
    call, incoming = a_backward()
    with pytest.raises(ValueError, match=r"^accumulate: must be False without fp32_results"):
        run_backward_operator(replace(call, fp32_results=False), incoming)


def test_what_the_cases_would_find() -> None:
    """A sum that is off, one that is NaN, and a row behind the target that was written."""
    buffer = torch.zeros(4, 2, 8)
    target = Target(buffer, slice(0, 8), torch.Generator().manual_seed(0))
    buffer[3] = 77.0
    gradient = torch.ones(3, 2, 8)
    target.inside += 1.0
    assert not list(target.problems(gradient, True))
    target.inside[1, 1, 3] += 1e-3
    assert list(target.problems(gradient, False))
    target.inside[1, 1, 3] = torch.nan
    assert list(target.problems(gradient, False))
    buffer[3, 0, 0] = 0.0
    assert len(list(target.problems(gradient, False))) == 2
