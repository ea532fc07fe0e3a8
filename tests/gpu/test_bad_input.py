"""Lengths and indices that only the device can see: clamped, flagged and harmless."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from flash_attn_cuda import check_device_errors
from tests.cases.bad_input import (
    BadContent,
    Cache,
    bad_content_cases,
    differences,
    int32,
)
from tests.cases.harness import ON_CPU, bits

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).resolve().parents[2]
CASES = bad_content_cases()


@pytest.fixture(autouse=True)
def _no_flag_before_or_after() -> Any:
    check_device_errors()
    yield
    check_device_errors()


# -- contents of index tensors ---------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=str)
def test_bad_content(case: BadContent) -> None:
    """CUDA: as if clamped, nothing else touched, flagged. CPU: refused."""
    prepared = case.prepare()
    if ON_CPU:
        before = [guard.tensor.clone() for guard in prepared.guards]
        with pytest.raises(ValueError, match=case.match):
            prepared.call()
        for guard, x in zip(prepared.guards, before, strict=True):
            assert torch.equal(bits(guard.tensor), bits(x)), f"{guard.name} was written"
        return
    results = prepared.call()
    with pytest.raises(ValueError, match=case.match):
        check_device_errors()
    for name, x in results.items():
        assert not x.isnan().any(), f"{name} has NaN from outside a tensor"
    if prepared.expected is not None:
        assert not differences(results, prepared.expected())
    for guard in prepared.guards:
        guard.check()


@pytest.mark.cuda_only
def test_the_first_flag_stays_until_it_is_asked_for() -> None:
    by_name = {case.name: case for case in CASES}
    first = by_name["cu_seqlens_q decreasing"]
    for case in (first, by_name["dense cache_seqlens -1"]):
        case.prepare().call()
    with pytest.raises(ValueError, match=first.match):
        check_device_errors(torch.device("cuda", torch.cuda.current_device()))
    check_device_errors()


@pytest.mark.cuda_only
def test_a_flag_is_set_by_each_pass_and_each_replay() -> None:
    """The same bad tensor again is found again, in a captured graph as well."""
    case = next(case for case in CASES if case.name == "dense cache_seqlens 22")
    prepared = case.prepare()
    prepared.call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        prepared.call()
    for launch in (prepared.call, graph.replay, graph.replay):
        with pytest.raises(ValueError, match=case.match):
            check_device_errors()
        check_device_errors()
        launch()
    with pytest.raises(ValueError, match=case.match):
        check_device_errors()


CHECKED_SCRIPT = """
import re, sys
from tests.cases.bad_input import bad_content_cases
unnoticed = []
for case in bad_content_cases():
    prepared = case.prepare()
    try:
        prepared.call()
        unnoticed.append(case.name + ": no error")
    except ValueError as error:
        if not re.search(case.match, str(error)):
            unnoticed.append(case.name + ": " + str(error))
    for guard in prepared.guards:
        guard.check()
print("\\n".join(unnoticed))
sys.exit(bool(unnoticed))
"""


def test_checks_on_demand_raise_at_the_call() -> None:
    """FLASH_ATTN_CUDA_CHECK=1, in a process of its own."""
    result = subprocess.run(
        [sys.executable, "-c", CHECKED_SCRIPT],
        env={**os.environ, "FLASH_ATTN_CUDA_CHECK": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr


# Has no memory for small allocations, which are those of this package: torch's are of MiB.
FULL_DEVICE = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>
int cudaMalloc(void **data, size_t bytes) {
  static int (*allocate)(void **, size_t);
  if (bytes < 4096) return 2; /* cudaErrorMemoryAllocation */
  if (!allocate) allocate = dlsym(dlopen(RUNTIME, RTLD_LAZY | RTLD_NOLOAD), "cudaMalloc");
  return allocate(data, bytes);
}
"""
BESIDE_A_CAPTURE = """
import torch
from flash_attn_cuda import check_device_errors, flash_attn_varlen_func
x = torch.randn(16, 2, 64, device="cuda", dtype=torch.float16)
bounds = torch.tensor([0, 16], device="cuda", dtype=torch.int32)
graph, other = torch.cuda.CUDAGraph(), torch.cuda.Stream()
torch.cuda.synchronize()
with torch.cuda.graph(graph, capture_error_mode="relaxed"):
    y = x + 1
    with torch.cuda.stream(other):
        out = flash_attn_varlen_func(x, x, x, bounds, bounds, 16, 16)
graph.replay()
check_device_errors()
assert torch.equal(y, x + 1) and out.isfinite().all()
"""


@pytest.mark.cuda_only
def test_the_first_call_on_a_full_device(tmp_path: Path) -> None:
    """Beside a graph that another stream captures."""
    library = tmp_path / "full.so"
    runtime = f"libcudart.so.{str(torch.version.cuda).split('.')[0]}"
    compiler = [os.environ.get("CC", "cc"), "-shared", "-fPIC", "-x", "c", "-", "-ldl"]
    subprocess.run(
        [*compiler, f'-DRUNTIME="{runtime}"', "-o", str(library)],
        input=FULL_DEVICE.encode(),
        check=True,
    )
    result = subprocess.run(
        [sys.executable, "-c", BESIDE_A_CAPTURE],
        env={**os.environ, "LD_PRELOAD": str(library)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr


def test_entries_that_nothing_uses_may_hold_anything() -> None:
    """Pages behind the last key, tables of rows that cache_batch_idx skips."""
    cache = Cache(paged=True, table=((4, 1, -1), (2**31 - 1, 77, -9), (3, 9999, -(2**31))))
    out = cache.call(cache_seqlens=int32((14, 0, 7)))["out"]
    assert out.isfinite().all() and not out[1].any()
    swapped = cache.call(cache_seqlens=int32((7, 14, 1)), cache_batch_idx=int32((2, 0, 2)))["out"]
    assert swapped.isfinite().all()
    for guard in cache.guards:
        guard.check()
