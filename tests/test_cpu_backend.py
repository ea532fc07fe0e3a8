"""The CPU backend against the fp64 reference: every shape rule, tiling, memory."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from cases import AttentionCase, AttentionInputs, Layout
from reference import AttentionResult, attention_with_gradients, low_precision
from tolerance import assert_close

from flash_attn_cuda import cpu, flash_attn_func
from flash_attn_cuda.cpu import Tiling

SMALL_TILES = Tiling(block_m=16, block_n=24, max_scores=1 << 11)
CAUSAL = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])

LENGTHS = ((1, 1), (1, 77), (77, 1), (33, 64), (64, 33), (100, 100), (130, 257))
HEADS = ((1, 1), (4, 4), (6, 2), (5, 1))


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Tiles this small gain nothing from threads, and lose much on busy cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def cpu_case(**fields: object) -> AttentionCase:
    return AttentionCase(**{"device": "cpu", "head_dim": 16, **fields})


def scale_of(case: AttentionCase) -> float:
    return case.head_dim**-0.5 if case.softmax_scale is None else case.softmax_scale


def compute(
    case: AttentionCase, inputs: AttentionInputs, tiling: Tiling = SMALL_TILES
) -> AttentionResult:
    q, k, v = inputs.q, inputs.k, inputs.v
    scale = scale_of(case)
    out, lse = cpu.attention_forward(q, k, v, scale, case.causal, tiling)
    dq, dk, dv, _ = cpu.attention_backward(
        inputs.dout, q, k, v, out, lse, scale, case.causal, inputs.dlse, tiling
    )
    return AttentionResult(out=out, lse=lse, dq=dq, dk=dk, dv=dv)


def reference_of(case: AttentionCase, inputs: AttentionInputs) -> AttentionResult:
    return attention_with_gradients(
        *(inputs.q, inputs.k, inputs.v, inputs.dout, inputs.dlse),
        softmax_scale=case.softmax_scale,
        causal=case.causal,
    )


def assert_fp64_close(actual: AttentionResult, expected: AttentionResult) -> None:
    for name, x in actual.tensors().items():
        torch.testing.assert_close(
            x,
            expected.tensors()[name],
            rtol=1e-11,
            atol=1e-11,
            msg=lambda text, n=name: f"{n}: {text}",
        )


@CAUSAL
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_fp64_equals_the_reference(
    lengths: tuple[int, int], heads: tuple[int, int], causal: bool
) -> None:
    case = cpu_case(
        seqlen_q=lengths[0],
        seqlen_k=lengths[1],
        num_heads_q=heads[0],
        num_heads_k=heads[1],
        dtype=torch.float64,
        causal=causal,
    )
    inputs = case.make_inputs()
    assert_fp64_close(compute(case, inputs), reference_of(case, inputs))


@CAUSAL
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
    naive = low_precision(
        *(inputs.q, inputs.k, inputs.v, inputs.dout, inputs.dlse), causal=case.causal
    )
    assert_close(actual, expected, naive)


@CAUSAL
@pytest.mark.parametrize("scale", [0.0, -0.7, 3.0, 1e-3])
def test_softmax_scales(scale: float, causal: bool) -> None:
    case = cpu_case(
        seqlen_q=40, seqlen_k=50, softmax_scale=scale, dtype=torch.float64, causal=causal
    )
    inputs = case.make_inputs()
    assert_fp64_close(compute(case, inputs), reference_of(case, inputs))


@pytest.mark.parametrize("layout", list(Layout), ids=lambda layout: layout.value)
def test_memory_layouts(layout: Layout) -> None:
    case = cpu_case(seqlen_q=40, seqlen_k=50, dtype=torch.float64, causal=True, layout=layout)
    inputs = case.make_inputs()
    assert_fp64_close(compute(case, inputs), reference_of(case, inputs))


@CAUSAL
@pytest.mark.parametrize(
    "tiling",
    [Tiling(1, 1, 1), Tiling(7, 5, 64), Tiling(64, 8, 1 << 9), Tiling(8, 64, 1 << 14), Tiling()],
    ids=str,
)
def test_results_do_not_depend_on_the_tiling(tiling: Tiling, causal: bool) -> None:
    case = cpu_case(
        seqlen_q=37, seqlen_k=29, num_heads_q=6, num_heads_k=2, dtype=torch.float64, causal=causal
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


@CAUSAL
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


def test_invisible_key_blocks_are_not_read() -> None:
    """A causal tile above the diagonal is skipped, so NaN in its keys cannot reach the output."""
    case = cpu_case(seqlen_q=64, seqlen_k=64, dtype=torch.float32, causal=True)
    inputs = case.make_inputs()
    inputs.k[:, 32:] = torch.nan
    inputs.v[:, 32:] = torch.nan
    out, lse = cpu.attention_forward(
        inputs.q, inputs.k, inputs.v, 0.25, True, Tiling(block_m=16, block_n=16)
    )
    assert out[:, :32].isfinite().all() and lse[:, :, :32].isfinite().all()
    assert out[:, 32:].isnan().all()


def test_softmax_d() -> None:
    case = cpu_case(seqlen_q=30, seqlen_k=30, dtype=torch.float64)
    inputs = case.make_inputs()
    q, k, v = inputs.q, inputs.k, inputs.v
    out, lse = cpu.attention_forward(q, k, v, 0.25, False)
    *_, softmax_d = cpu.attention_backward(
        inputs.dout, q, k, v, out, lse, 0.25, False, inputs.dlse, SMALL_TILES
    )
    expected = (inputs.dout * out).sum(-1).transpose(1, 2) - inputs.dlse
    assert softmax_d.shape == (case.batch, case.num_heads_q, 128)
    torch.testing.assert_close(softmax_d[..., :30], expected)
    assert not softmax_d[..., 30:].any()


@CAUSAL
def test_gradcheck_through_out_and_lse(causal: bool) -> None:
    case = cpu_case(
        batch=1,
        seqlen_q=5,
        seqlen_k=7,
        num_heads_q=4,
        num_heads_k=2,
        head_dim=3,
        dtype=torch.float64,
    )
    inputs = case.make_inputs()
    leaves = [x.requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]

    def attention(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return flash_attn_func(*tensors, causal=causal, return_attn_probs=True)[:2]

    assert torch.autograd.gradcheck(attention, leaves)


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
print(step(16_384))
"""


def test_memory_at_16k_tokens() -> None:
    """The scores of one head alone would be 1 GiB; out and the gradients are 20 MiB."""
    result = subprocess.run(
        [sys.executable, "-c", MEMORY_SCRIPT], capture_output=True, text=True, check=True
    )
    assert int(result.stdout) < 256, f"{result.stdout} MiB beyond the inputs"
