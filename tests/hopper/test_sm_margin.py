"""Multiprocessors that a call leaves to other kernels: the grids that are launched, and results."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from flash_attn_cuda.call.fields import AttentionCall, Incoming
from flash_attn_cuda.operators.derivatives import run_gradients_operator, run_operator
from flash_attn_cuda.report.explain import explain
from tests.cases.operators import incoming_of
from tests.hopper.sm90 import runs_sm90_kernels

__all__ = ["runs_sm90_kernels"]  # pytest finds it here
pytestmark = pytest.mark.gpu

MARGIN = 40


def grids(run: Callable[[], object], kernel: str, folder: Path) -> list[int]:
    """Thread blocks of each launch of kernels of this name."""
    run()
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        run()
        torch.cuda.synchronize()
    path = folder / "trace.json"
    trace.export_chrome_trace(str(path))
    events = json.loads(path.read_text())["traceEvents"]
    launches = [x for x in events if x.get("cat") == "kernel" and kernel in x["name"]]
    return [x["args"]["grid"][0] for x in launches]


@pytest.fixture
def call() -> AttentionCall:
    shape = (2, 4096, 16, 128)
    return AttentionCall(
        *(torch.randn(shape, dtype=torch.bfloat16, device="cuda") for _ in range(3)),
        causal=True,
        deterministic=True,
    )


def incoming_behind(call: AttentionCall) -> Incoming:
    found = run_operator(call)
    return incoming_of(found, torch.ones_like(found.out))


def test_kernels_leave_them(call: AttentionCall, tmp_path: Path) -> None:
    incoming = incoming_behind(call)
    of_device = torch.cuda.get_device_properties(0).multi_processor_count
    for kernel, run in (
        ("forward_kernel", run_operator),
        ("backward_kernel", lambda x: run_gradients_operator(x, incoming)),
    ):
        (every,) = grids(lambda run=run: run(call), kernel, tmp_path)
        (fewer,) = grids(lambda run=run: run(replace(call, sm_margin=MARGIN)), kernel, tmp_path)
        kernel_pass = kernel.removesuffix("_kernel")
        assert every == explain(kernel_pass, call)["grid"]
        of_each = every // of_device
        assert every == of_device * of_each > 0
        assert fewer == (of_device - MARGIN) * of_each


@pytest.mark.parametrize("margin", [1, MARGIN, 10_000])
def test_results_are_the_same(call: AttentionCall, margin: int) -> None:
    incoming = incoming_behind(call)

    def results(sm_margin: int) -> list[Tensor]:
        here = replace(call, sm_margin=sm_margin)
        return [*run_operator(here)[:2], *run_gradients_operator(here, incoming)[:3]]

    for found, wanted in zip(results(margin), results(0), strict=True):
        assert torch.equal(found, wanted)
