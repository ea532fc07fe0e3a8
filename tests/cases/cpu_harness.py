"""What the tests of the CPU backend share: run a case through it, and the reference beside it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from flash_attn_cuda.call.fields import AttentionCall, Incoming
from flash_attn_cuda.cpu import DEFAULT_TILING, Tiling, backward_on_cpu, forward_on_cpu
from tests.cases.attention import AttentionCase, AttentionInputs, Features, VarlenCase, VarlenInputs
from tests.reference import (
    AttentionOptions,
    AttentionResult,
    attention_with_gradients,
    keep_mask,
    low_precision,
    varlen_attention_with_gradients,
    varlen_low_precision,
)

SMALL_TILES = Tiling(block_m=16, block_n=24, max_scores=1 << 11)
SEED, OFFSET = 0x1234_5678_9ABC_DEF, 0x3_0000_0007  # both use more than 32 bits
RNG_STATE = torch.tensor([SEED, OFFSET])


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Tiles this small gain nothing from threads, and lose much on busy cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def call_of(case: Features, q: Tensor, k: Tensor, v: Tensor, **others: Any) -> AttentionCall:
    """The case's call of these tensors; `others` are fields of it."""
    given: dict[str, Any] = case.arguments()
    left, right = given.pop("window_size")
    return AttentionCall(q, k, v, **given, window_size_left=left, window_size_right=right, **others)


def compute(
    case: AttentionCase, inputs: AttentionInputs, tiling: Tiling = SMALL_TILES
) -> AttentionResult:
    slopes = inputs.alibi_slopes
    call = call_of(case, inputs.q, inputs.k, inputs.v, alibi_slopes=slopes)
    return compute_call(call, inputs, tiling)


def compute_varlen(case: VarlenCase, inputs: VarlenInputs) -> AttentionResult:
    return compute_call(varlen_call_of(case, inputs), inputs)


def varlen_call_of(case: VarlenCase, inputs: VarlenInputs) -> AttentionCall:
    lengths: dict[str, Any] = {**inputs.lengths(), "alibi_slopes": inputs.alibi_slopes}
    return call_of(case, inputs.q, inputs.k, inputs.v, **lengths)


def compute_call(
    call: AttentionCall,
    inputs: AttentionInputs | VarlenInputs,
    tiling: Tiling = DEFAULT_TILING,
) -> AttentionResult:
    """Runs forward and backward, with RNG_STATE for dropout."""
    out, lse, *_ = forward_on_cpu(call, RNG_STATE, tiling)
    incoming = Incoming(inputs.dout, inputs.dlse, out, lse, RNG_STATE)
    found = backward_on_cpu(call, incoming, tiling)
    return AttentionResult(out=out, lse=lse, dq=found.dq, dk=found.dk, dv=found.dv)


def reference_options(case: AttentionCase, inputs: AttentionInputs) -> AttentionOptions:
    sizes = (case.batch, case.num_heads_q, case.seqlen_q, case.seqlen_k)
    return _options(case, inputs.alibi_slopes, sizes)


def varlen_reference_options(case: VarlenCase, inputs: VarlenInputs) -> AttentionOptions:
    sizes = (case.batch, case.num_heads_q, case.max_seqlen_q, case.max_seqlen_k)
    return _options(case, inputs.alibi_slopes, sizes)


def _options(
    case: Features, slopes: Tensor | None, sizes: tuple[int, int, int, int]
) -> AttentionOptions:
    keep = keep_mask(SEED, OFFSET, case.dropout_p, *sizes) if case.dropout_p > 0.0 else None
    return case.options(slopes, keep)


def reference_of(case: AttentionCase, inputs: AttentionInputs) -> AttentionResult:
    tensors = (inputs.q, inputs.k, inputs.v, inputs.dout, inputs.dlse)
    return attention_with_gradients(*tensors, options=reference_options(case, inputs))


def naive_of(case: AttentionCase, inputs: AttentionInputs) -> AttentionResult:
    tensors = (inputs.q, inputs.k, inputs.v, inputs.dout, inputs.dlse)
    return low_precision(*tensors, options=reference_options(case, inputs))


def varlen_reference_of(case: VarlenCase, inputs: VarlenInputs) -> AttentionResult:
    tensors = (inputs.q, inputs.k, inputs.v, inputs.dout, inputs.dlse)
    options = varlen_reference_options(case, inputs)
    return varlen_attention_with_gradients(*tensors, **inputs.lengths(), options=options)


def varlen_naive_of(case: VarlenCase, inputs: VarlenInputs) -> AttentionResult:
    tensors = (inputs.q, inputs.k, inputs.v, inputs.dout, inputs.dlse)
    options = varlen_reference_options(case, inputs)
    return varlen_low_precision(*tensors, **inputs.lengths(), options=options)


def assert_fp64_close(actual: AttentionResult, expected: AttentionResult) -> None:
    for name, x in actual.tensors().items():
        torch.testing.assert_close(
            x,
            expected.tensors()[name],
            rtol=1e-11,
            atol=1e-11,
            msg=lambda text, n=name: f"{n}: {text}",
        )
