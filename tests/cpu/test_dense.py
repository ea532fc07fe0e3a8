"""The CPU backend against the fp64 reference: every shape rule, feature, tiling, memory."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch

from flash_attn_cuda.call.fields import Incoming
from flash_attn_cuda.cpu import Tiling, backward_on_cpu, forward_on_cpu
from flash_attn_cuda.cpu.dense import probabilities
from flash_attn_cuda.cpu.philox import keep_scale
from tests.cases.attention import Alibi, AttentionCase, Layout
from tests.cases.cpu_harness import (
    OFFSET,
    RNG_STATE,
    SEED,
    SMALL_TILES,
    assert_fp64_close,
    call_of,
    compute,
    naive_of,
    reference_of,
)
from tests.cases.pairwise import pairwise
from tests.reference import AttentionResult, keep_mask
from tests.reference.tolerance import assert_close

pytestmark = pytest.mark.usefixtures("one_thread")


def cpu_case(**fields: Any) -> AttentionCase:
    return AttentionCase(**{"device": "cpu", "head_dim": 16, **fields})


FEATURES = {
    "causal": [False, True],
    "window": [(-1, -1), (20, -1), (-1, 9), (7, 3), (0, 0), (1000, 1000)],
    "softcap": [0.0, 2.5, 30.0],
    "alibi": [None, *Alibi],
    "dropout_p": [0.0, 0.001, 0.17, 0.9],
    "softmax_scale": [None, -0.4, 0.0, 3.0],
}
SIZES = {
    "lengths": [
        *((1, 1), (1, 77), (77, 1), (33, 64), (64, 33), (70, 70), (3, 90), (90, 3), (130, 257)),
    ],
    "heads": [(1, 1), (4, 4), (6, 2), (5, 1)],
    "head_dims": [(16, 16), (24, 16), (16, 24), (33, 5)],
    "layout": list(Layout),
}


def sized(row: dict[str, Any]) -> AttentionCase:
    """A case of a row of SIZES and FEATURES."""
    fields = dict(row)
    seqlen_q, seqlen_k = fields.pop("lengths")
    heads_q, heads_k = fields.pop("heads")
    fields["head_dim"], fields["head_dim_v"] = fields.pop("head_dims")
    lengths = {"seqlen_q": seqlen_q, "seqlen_k": seqlen_k}
    return cpu_case(**lengths, num_heads_q=heads_q, num_heads_k=heads_k, **fields)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("head_dim", [1, 7, 64, 111, 256])
def test_other_dtypes_are_close(head_dim: int, dtype: torch.dtype, causal: bool) -> None:
    case = cpu_case(
        seqlen_q=65, seqlen_k=90, num_heads_k=2, head_dim=head_dim, dtype=dtype, causal=causal
    )
    inputs = case.make_inputs()
    actual, expected = compute(case, inputs), reference_of(case, inputs)
    assert actual.out.dtype == actual.dq.dtype == actual.dk.dtype == actual.dv.dtype == dtype
    assert actual.lse.dtype == torch.float32
    if dtype == torch.float32:
        # As precise as the computation itself, so that no naive one can be a yardstick.
        for name, x in actual.tensors().items():
            exact = expected.tensors()[name]
            assert (x - exact).abs().max() <= 1e-5 * exact.abs().max(), name
        return
    assert_close(actual, expected, naive_of(case, inputs))


@pytest.mark.parametrize("case", [sized(row) for row in pairwise({**SIZES, **FEATURES})], ids=str)
def test_features_in_fp64(case: AttentionCase) -> None:
    case = replace(case, dtype=torch.float64)
    inputs = case.make_inputs()
    assert_fp64_close(compute(case, inputs), reference_of(case, inputs))


LOW_PRECISION = {**SIZES, **FEATURES, "dtype": [torch.float16, torch.bfloat16]}


@pytest.mark.parametrize("case", [sized(row) for row in pairwise(LOW_PRECISION, 1)], ids=str)
def test_features_in_low_precision(case: AttentionCase) -> None:
    inputs = case.make_inputs()
    actual = compute(case, inputs)
    assert_close(actual, reference_of(case, inputs), naive_of(case, inputs))


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
@pytest.mark.parametrize(
    "tiling",
    [Tiling(1, 1, 1), Tiling(7, 5, 64), Tiling(64, 8, 1 << 9), Tiling(8, 64, 1 << 14), Tiling()],
    ids=str,
)
def test_results_do_not_depend_on_the_tiling(
    tiling: Tiling, dropout_p: float, causal: bool
) -> None:
    case = cpu_case(
        seqlen_q=19,
        seqlen_k=13,
        num_heads_q=4,
        num_heads_k=2,
        dtype=torch.float64,
        causal=causal,
        window=(-1, -1) if causal else (6, 2),
        dropout_p=dropout_p,
        alibi=Alibi.per_batch,
    )
    inputs = case.make_inputs()
    assert_fp64_close(compute(case, inputs, tiling), compute(case, inputs, Tiling(100, 100)))


def test_rows_without_a_visible_key() -> None:
    case = cpu_case(seqlen_q=50, seqlen_k=20, dtype=torch.float32, causal=True)
    inputs = case.make_inputs()
    inputs.dlse[:] = torch.nan  # what a loss of lse = -inf may send
    blind = slice(0, 30)
    inputs.dlse[:, :, 30:] = 1.0
    result = compute(case, inputs)
    assert not result.out[:, blind].any()
    assert (result.lse[:, :, blind] == -torch.inf).all()
    assert not result.dq[:, blind].any()
    assert result.out[:, 30:].any() and result.lse[:, :, 30:].isfinite().all()
    assert all(x.isfinite().all() for x in (result.dq, result.dk, result.dv))


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(
    ("batch", "seqlen_q", "seqlen_k"), [(0, 4, 5), (2, 0, 5), (2, 4, 0), (2, 0, 0)]
)
def test_empty_calls(batch: int, seqlen_q: int, seqlen_k: int, causal: bool) -> None:
    case = cpu_case(
        batch=batch, seqlen_q=seqlen_q, seqlen_k=seqlen_k, dtype=torch.float32, causal=causal
    )
    result = compute(case, case.make_inputs())
    assert result.out.shape == result.dq.shape == case.query_shape
    assert result.dk.shape == result.dv.shape == case.key_shape
    assert not any(x.any() for x in (result.out, result.dq, result.dk, result.dv))
    assert (result.lse == -torch.inf).all()


def test_large_scores_do_not_overflow() -> None:
    case = cpu_case(seqlen_q=20, seqlen_k=60, dtype=torch.float64, softmax_scale=1e3)
    inputs = case.make_inputs()
    result = compute(case, inputs)
    assert_fp64_close(
        AttentionResult(out=result.out, lse=result.lse),
        AttentionResult(out=(expected := reference_of(case, inputs)).out, lse=expected.lse),
    )
    assert all(x.isfinite().all() for x in result.tensors().values())


@pytest.mark.parametrize("window", [(-1, 0), (4, 0)])
def test_invisible_key_blocks_are_not_read(window: tuple[int, int]) -> None:
    """Tiles beyond the window are skipped, so NaN in their keys cannot reach a result."""
    case = cpu_case(seqlen_q=64, seqlen_k=64, dtype=torch.float32, window=window)
    inputs = case.make_inputs()
    tail = slice(32, 64)
    for x in (inputs.k, inputs.v):
        x[:, tail] = torch.nan
    result = compute(case, inputs, Tiling(block_m=16, block_n=16))
    assert result.out[:, :32].isfinite().all() and result.lse[:, :, :32].isfinite().all()
    assert result.dq[:, :32].isfinite().all()
    assert result.out[:, tail].isnan().all()
    if window[0] == 4:  # queries from 48 on see keys from 44 on
        for x in (inputs.k, inputs.v):
            x[:, tail], x[:, :32] = 1.0, torch.nan
        result = compute(case, inputs, Tiling(block_m=16, block_n=16))
        assert result.out[:, 48:].isfinite().all() and result.dq[:, 48:].isfinite().all()
        assert result.dk[:, 48:].isfinite().all() and result.dv[:, 48:].isfinite().all()


def test_softmax_d() -> None:
    case = cpu_case(seqlen_q=30, seqlen_k=30, dtype=torch.float64)
    inputs = case.make_inputs()
    call = call_of(case, inputs.q, inputs.k, inputs.v)
    out, lse, *_ = forward_on_cpu(call, RNG_STATE)
    incoming = Incoming(inputs.dout, inputs.dlse, out, lse, None)
    softmax_d = backward_on_cpu(call, incoming, SMALL_TILES).softmax_d
    assert softmax_d is not None
    expected = (inputs.dout * out).sum(-1).transpose(1, 2) - inputs.dlse
    assert softmax_d.shape == (case.batch, case.num_heads_q, 128)
    torch.testing.assert_close(softmax_d[..., :30], expected)
    assert not softmax_d[..., 30:].any()


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
@pytest.mark.parametrize("window", [(-1, -1), (5, 2)])
def test_probabilities(window: tuple[int, int], dropout_p: float) -> None:
    case = cpu_case(
        seqlen_q=33,
        seqlen_k=21,
        num_heads_k=2,
        dtype=torch.float64,
        window=window,
        softcap=3.0,
        alibi=Alibi.per_batch,
        dropout_p=dropout_p,
    )
    inputs = case.make_inputs()
    slopes = inputs.alibi_slopes
    call = call_of(case, inputs.q, inputs.k, inputs.v, alibi_slopes=slopes)
    out, lse, *_ = forward_on_cpu(call, RNG_STATE)
    probs = torch.zeros(2, 4, 33, 21, dtype=torch.float64)
    probabilities(replace(call, rng_state=RNG_STATE), lse, probs, SMALL_TILES)
    torch.testing.assert_close(probs.abs().sum(-1), (lse > -torch.inf).double())
    if dropout_p > 0.0:
        keep = keep_mask(SEED, OFFSET, dropout_p, 2, 4, 33, 21)
        assert torch.equal(~probs.signbit(), keep)
    else:
        assert not probs.signbit().any()
    values = inputs.v.repeat_interleave(2, dim=2)
    kept = probs.clamp_min(0.0) * keep_scale(dropout_p)
    torch.testing.assert_close(torch.einsum("bhmn,bnhd->bmhd", kept, values), out)


MEMORY_SCRIPT = """
import resource, sys, torch
from flash_attn_cuda import flash_attn_func
torch.set_num_threads(1)

def step(seqlen):
    q, k, v = (torch.randn(1, seqlen, 2, 32, requires_grad=True) for _ in range(3))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    flash_attn_func(q, k, v, causal=True).sum().backward()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024

step(600)
print(step(8192))
"""


def test_memory_at_8k_tokens() -> None:
    """The scores of one head alone would be 256 MiB; out and the gradients are 10 MiB."""
    result = subprocess.run(
        [sys.executable, "-c", MEMORY_SCRIPT], capture_output=True, text=True, check=True
    )
    assert int(result.stdout) < 100, f"{result.stdout} MiB beyond the inputs"
