"""What the tests of the CPU backend share: run a case through it, and the reference beside it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flash_attn_cuda.call.fields import AttentionCall, Incoming
from flash_attn_cuda.cpu import DEFAULT_TILING, Tiling, backward_on_cpu, forward_on_cpu
from tests.cases.attention import AttentionCase, Features, VarlenCase
from tests.cases.harness import references
from tests.reference import AttentionResult

SMALL_TILES = Tiling(block_m=16, block_n=24, max_scores=1 << 11)
SEED, OFFSET = 0x1234_5678_9ABC_DEF, 0x3_0000_0007  # both use more than 32 bits
RNG_STATE = torch.tensor([SEED, OFFSET])


def call_of(case: Features, q: Tensor, k: Tensor, v: Tensor, **others: Any) -> AttentionCall:
    """The case's call of these tensors; `others` are fields of it."""
    given: dict[str, Any] = case.arguments()
    left, right = given.pop("window_size")
    return AttentionCall(q, k, v, **given, window_size_left=left, window_size_right=right, **others)


def call_of_inputs(case: AttentionCase | VarlenCase, inputs: Any) -> AttentionCall:
    lengths = inputs.lengths() if isinstance(case, VarlenCase) else {}
    given = {**lengths, "alibi_slopes": inputs.alibi_slopes}
    return call_of(case, inputs.q, inputs.k, inputs.v, **given)


def compute(
    case: AttentionCase | VarlenCase, inputs: Any, tiling: Tiling | None = None
) -> AttentionResult:
    """Forward and backward, with RNG_STATE for dropout."""
    if tiling is None:
        tiling = DEFAULT_TILING if isinstance(case, VarlenCase) else SMALL_TILES
    call = call_of_inputs(case, inputs)
    out, lse, *_ = forward_on_cpu(call, RNG_STATE, tiling)
    incoming = Incoming(inputs.dout, inputs.dlse, out, lse, RNG_STATE)
    found = backward_on_cpu(call, incoming, tiling)
    return AttentionResult(out=out, lse=lse, dq=found.dq, dk=found.dk, dv=found.dv)


def reference_of(case: AttentionCase | VarlenCase, inputs: Any) -> AttentionResult:
    return references(case, inputs, rng_state=RNG_STATE)[0]()


def naive_of(case: AttentionCase | VarlenCase, inputs: Any) -> AttentionResult:
    return references(case, inputs, rng_state=RNG_STATE)[1]()


def assert_fp64_close(actual: AttentionResult, expected: AttentionResult) -> None:
    for name, x in actual.tensors().items():
        torch.testing.assert_close(
            x,
            expected.tensors()[name],
            rtol=1e-11,
            atol=1e-11,
            msg=lambda text, n=name: f"{n}: {text}",
        )
