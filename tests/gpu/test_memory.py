"""Memory layouts, packed tensors, and sizes at the limits of integers, forward and backward."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from flash_attn_cuda import flash_attn_kvpacked_func, flash_attn_qkvpacked_func
from tests.cases.attention import Layout
from tests.cases.harness import (
    assert_same_bits,
    make_case,
    run_forward,
    run_forward_backward,
    run_reference,
    skip_without_row,
)
from tests.cases.matrix import inputs_of
from tests.reference import AttentionResult
from tests.reference.tolerance import assert_close

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("head_dim", [40, 59, 64, 72, 96, 128, 192, 256])
@pytest.mark.parametrize("layout", list(Layout), ids=lambda layout: layout.value)
def test_layouts(layout: Layout, head_dim: int) -> None:
    """The memory around the tensors is NaN, and results do not depend on the layout: bit for bit,
    but for expanded tensors, which TMA cannot read and other kernels do.
    """
    case = make_case(
        seqlen_q=75, seqlen_k=131, num_heads_k=2, head_dim=head_dim, causal=True, layout=layout
    )
    inputs = inputs_of(case)
    result = run_forward_backward(case, inputs)
    assert_close(result, *run_reference(case, inputs))
    dense = replace(
        inputs,
        q=inputs.q.contiguous(),
        k=inputs.k.contiguous(),
        v=inputs.v.contiguous(),
        dout=inputs.dout.contiguous(),
    )
    if layout is not Layout.expanded_batch:
        assert_same_bits(result, run_forward_backward(case, dense), layout.value)


@pytest.mark.parametrize("layout", [Layout.misaligned, Layout.every_other_row, Layout.packed])
def test_layouts_may_differ_between_tensors(layout: Layout) -> None:
    case = make_case(seqlen_q=75, seqlen_k=131, layout=layout)
    skip_without_row(case)
    strided, dense = case.make_inputs(), replace(case, layout=Layout.contiguous).make_inputs()
    expected = run_forward_backward(case, dense)
    for name in ("q", "k", "v", "dout"):
        mixed = replace(dense, **{name: getattr(strided, name)})
        assert_same_bits(run_forward_backward(case, mixed), expected, name)


@pytest.mark.parametrize("head_dim", [64, 96, 59])
def test_packed_functions(head_dim: int) -> None:
    """qkv and kv in one tensor: same bits as the three tensors apart, gradient in one piece."""
    case = make_case(seqlen_q=130, seqlen_k=130, head_dim=head_dim, causal=True)
    inputs = inputs_of(case)
    expected = run_forward_backward(case, inputs)
    options = {"causal": True, "return_attn_probs": True}

    qkv = torch.stack([inputs.q, inputs.k, inputs.v], 2).requires_grad_()
    out, lse, _ = flash_attn_qkvpacked_func(qkv, **options)
    (dqkv,) = torch.autograd.grad([out, lse], [qkv], [inputs.dout, inputs.dlse])
    assert_same_bits(AttentionResult(out, lse, *dqkv.unbind(2)), expected, "qkv")

    q = inputs.q.detach().requires_grad_()
    kv = torch.stack([inputs.k, inputs.v], 2).requires_grad_()
    out, lse, _ = flash_attn_kvpacked_func(q, kv, **options)
    dq, dkv = torch.autograd.grad([out, lse], [q, kv], [inputs.dout, inputs.dlse])
    assert_same_bits(AttentionResult(out, lse, dq, *dkv.unbind(2)), expected, "kv")


@pytest.mark.cuda_only
def test_forward_needs_no_memory_beyond_its_results() -> None:
    case = make_case(batch=1, seqlen_q=4096, seqlen_k=4096, num_heads_q=8, num_heads_k=8)
    inputs = inputs_of(case, backward=False)
    run_forward(case, inputs)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = run_forward(case, inputs)
    results = sum(x.numel() * x.element_size() for x in result.tensors().values())
    assert torch.cuda.max_memory_allocated() - before <= results + 4096


# -- sizes at the limits of integers -------------------------------------------------------------


@pytest.mark.cuda_only
@pytest.mark.parametrize("large", ["rows", "batches"])
def test_tensors_past_two_to_the_31_elements(large: str) -> None:
    """Offsets past 2^31 inside a sequence and of a batch; a sample of heads is compared."""
    if torch.cuda.get_device_properties(0).total_memory < 100 << 30:
        pytest.skip("needs a device with 100 GiB of memory")
    sizes = {
        "rows": {"batch": 1, "seqlen_q": 16_640, "seqlen_k": 16_640, "heads": 1024},
        "batches": {"batch": 131_584, "seqlen_q": 130, "seqlen_k": 130, "heads": 1},
    }[large]
    heads = sizes.pop("heads")
    case = make_case(**sizes, num_heads_q=heads, num_heads_k=heads, head_dim=128, causal=True)
    skip_without_row(case)
    assert case.batch * case.seqlen_q * heads * case.head_dim > 1 << 31
    inputs = case.make_inputs()
    result = run_forward_backward(case, inputs)
    for batch, head in {(0, 0), (case.batch // 2, heads // 2), (case.batch - 1, heads - 1)}:
        one = replace(case, batch=1, num_heads_q=1, num_heads_k=1)
        at = (slice(batch, batch + 1), slice(None), slice(head, head + 1))
        at_row = (slice(batch, batch + 1), slice(head, head + 1))
        sample = replace(
            inputs,
            q=inputs.q[at],
            k=inputs.k[at],
            v=inputs.v[at],
            dout=inputs.dout[at],
            dlse=inputs.dlse[at_row],
        )
        actual = {name: x[at_row if name == "lse" else at] for name, x in result.tensors().items()}
        assert_close(AttentionResult(**actual), *run_reference(one, sample))
    del inputs, result, sample, actual
    torch.cuda.empty_cache()
