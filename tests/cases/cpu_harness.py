"""What the tests of the CPU backend share: run a case through it, and the reference beside it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from flash_attn_cuda import cpu
from flash_attn_cuda.cpu import Tiling
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


def cpu_options(case: Features, head_dim: int, slopes: Tensor | None) -> cpu.AttentionOptions:
    left, right = case.window
    return cpu.AttentionOptions(
        softmax_scale=head_dim**-0.5 if case.softmax_scale is None else case.softmax_scale,
        window=(left, 0 if case.causal else right),
        softcap=case.softcap,
        alibi_slopes=slopes,
        dropout_p=case.dropout_p,
        rng_state=RNG_STATE if case.dropout_p > 0.0 else None,
    )


def compute(
    case: AttentionCase, inputs: AttentionInputs, tiling: Tiling = SMALL_TILES
) -> AttentionResult:
    q, k, v = inputs.q, inputs.k, inputs.v
    options = cpu_options(case, case.head_dim, inputs.alibi_slopes)
    out, lse = cpu.attention_forward(q, k, v, options, tiling)
    dq, dk, dv, _ = cpu.attention_backward(
        inputs.dout, q, k, v, out, lse, options, inputs.dlse, tiling
    )
    return AttentionResult(out=out, lse=lse, dq=dq, dk=dk, dv=dv)


def compute_varlen(case: VarlenCase, inputs: VarlenInputs) -> AttentionResult:
    q, k, v = inputs.q, inputs.k, inputs.v
    options = cpu_options(case, case.head_dim, inputs.alibi_slopes)
    lengths = inputs.lengths()
    out, lse = cpu.varlen_forward(q, k, v, options=options, **lengths)
    dq, dk, dv, _ = cpu.varlen_backward(
        inputs.dout, q, k, v, out, lse, options=options, dlse=inputs.dlse, **lengths
    )
    return AttentionResult(out=out, lse=lse, dq=dq, dk=dk, dv=dv)


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
