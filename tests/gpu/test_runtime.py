"""What surrounds a call: CUDA graphs, streams, devices, the allocator, modes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from flash_attn_cuda import flash_attn_func, flash_attn_varlen_func
from tests.cases.attention import AttentionCase, VarlenCase
from tests.cases.harness import (
    Check,
    assert_same_bits,
    bits,
    make_case,
    make_varlen_case,
    run_forward,
    run_forward_backward,
    side_stream,
    skip_without_row,
)
from tests.cases.matrix import inputs_of
from tests.reference import AttentionResult

pytestmark = pytest.mark.gpu


@pytest.mark.cuda_only
@pytest.mark.parametrize("head_dim", [64, 59, 256, 512])
def test_cuda_graph_replays_on_new_data(head_dim: int) -> None:
    case = make_case(seqlen_q=200, seqlen_k=230, num_heads_k=2, head_dim=head_dim, causal=True)
    skip_without_row(case)
    static = case.make_inputs(0)
    with side_stream():
        run_forward_backward(case, static)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run_forward_backward(case, static)
    for seed in (1, 2):
        fresh = case.make_inputs(seed)
        for name in ("q", "k", "v", "dout", "dlse"):
            getattr(static, name).copy_(getattr(fresh, name))
        graph.replay()
        assert_same_bits(captured, run_forward_backward(case, fresh), f"seed {seed}")


@pytest.mark.cuda_only
def test_two_streams_at_once() -> None:
    """Calls on two streams overlap without sharing any memory: each gets the bits it gets alone."""
    case = make_case(batch=2, seqlen_q=700, seqlen_k=700, num_heads_k=1, head_dim=128, causal=True)
    skip_without_row(case)
    inputs = [case.make_inputs(seed) for seed in (1, 2)]
    expected = [run_forward_backward(case, each) for each in inputs]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in inputs]
    results: list[list[AttentionResult]] = [[], []]
    for _ in range(10):
        for index, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                results[index].append(run_forward_backward(case, inputs[index]))
    torch.cuda.synchronize()
    for index, runs in enumerate(results):
        for run in runs:
            assert_same_bits(run, expected[index], f"stream {index}")


@pytest.mark.cuda_only
def test_kernels_run_on_the_current_stream() -> None:
    """A call queued behind work on its stream sees that work's results."""
    case = make_case(seqlen_q=200, seqlen_k=200)
    inputs = inputs_of(case)
    expected = run_forward_backward(case, inputs)
    late = replace(inputs, q=torch.full_like(inputs.q, torch.nan))
    torch.cuda.synchronize()
    with side_stream():
        torch.cuda._sleep(50_000_000)  # about 30 ms
        late.q.copy_(inputs.q)
        result = run_forward_backward(case, late)
    torch.cuda.synchronize()
    assert_same_bits(result, expected)


@pytest.mark.cuda_only
def test_a_device_that_is_not_the_current_one() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    case = make_case(seqlen_q=150, seqlen_k=170, num_heads_k=2, causal=True)
    inputs = inputs_of(case)
    names = ("q", "k", "v", "dout", "dlse")
    moved = {name: getattr(inputs, name).to("cuda:1") for name in names}
    elsewhere = replace(inputs, **moved)
    expected = run_forward_backward(case, inputs)
    with torch.cuda.device(0):
        result = run_forward_backward(case, elsewhere)
        assert torch.cuda.current_device() == 0
    assert all(x.device.index == 1 for x in result.tensors().values())
    assert_same_bits(result.to("cuda:0"), expected)
    with pytest.raises((ValueError, RuntimeError), match=r"\bk\b.*cuda:1"):
        flash_attn_func(inputs.q, elsewhere.k, inputs.v)


@pytest.mark.cuda_only
@pytest.mark.parametrize("fill", [torch.nan, -1.0, 1e30])
@pytest.mark.parametrize("packed", [False, True])
def test_whatever_fresh_memory_holds(check: Check, packed: bool, fill: float) -> None:
    """Workspaces, tables and statistics lie in what the allocator had, of every size class."""
    fields = {"num_heads_q": 8, "num_heads_k": 1, "head_dim": 96, "causal": True}
    case: AttentionCase | VarlenCase = (
        make_varlen_case(lengths_q=(1, 129, 0, 64, 300), **fields)
        if packed
        else make_case(seqlen_q=300, seqlen_k=260, **fields)
    )
    inputs = inputs_of(case)
    for _ in range(3):
        filling = [torch.full((1 << size,), fill, device="cuda") for size in range(8, 26)]
        filling += [torch.full((1 << size,), fill, device="cuda") for size in range(8, 22)]
        del filling
        check(case, inputs=inputs)


@pytest.mark.cuda_only
def test_autocast_and_no_grad_modes() -> None:
    case = make_case(seqlen_q=90, seqlen_k=90, causal=True)
    inputs = inputs_of(case)
    expected = run_forward(case, inputs)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        cast = flash_attn_func(inputs.q.float(), inputs.k.float(), inputs.v.float(), causal=True)
    assert torch.equal(bits(cast), bits(expected.out))
    with torch.inference_mode():
        inferred = flash_attn_func(inputs.q, inputs.k, inputs.v, causal=True)
    assert torch.equal(bits(inferred), bits(expected.out))


@pytest.mark.cuda_only
def test_autocast_of_packed_sequences() -> None:
    case = make_varlen_case(lengths_q=(50, 0, 40), causal=True)
    inputs = inputs_of(case)
    expected = run_forward(case, inputs)
    lengths = (inputs.cu_seqlens_q, inputs.cu_seqlens_k, case.max_seqlen_q, case.max_seqlen_k)
    tensors = (inputs.q.float(), inputs.k.float(), inputs.v.float())
    with torch.autocast("cuda", dtype=torch.bfloat16):
        cast = flash_attn_varlen_func(*tensors, *lengths, causal=True)
    assert torch.equal(bits(cast), bits(expected.out))
