"""Backwards that add to given dq, dk and dv, on a GPU: fp32 sums of what kernels would write."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from flash_attn_cuda.call.fields import Incoming
from flash_attn_cuda.installed import build_info
from flash_attn_cuda.operators.derivatives import run_operator
from tests.cases.accumulate import SumCase, sum_cases
from tests.cases.harness import skip_without_row
from tests.gpu.limits import run_limited

pytestmark = [pytest.mark.gpu, pytest.mark.cuda_only]


def skip_without(case: SumCase) -> None:
    skip_without_row(case.row())


@pytest.mark.parametrize("case", sum_cases(), ids=str)
def test_sums(case: SumCase) -> None:
    skip_without(case)
    assert not case.problems()


def test_sums_of_kernels_for_other_gpus() -> None:
    for case in sum_cases():
        skip_without(case)
    ran = run_limited("-m", "tests.cases.accumulate", capability=80)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert f"{len(list(sum_cases()))} cases" in ran.stdout


def test_a_missing_target_is_refused_by_the_extension() -> None:
    """Which context parallelism calls without the checks before operators."""
    case = next(sum_cases())
    skip_without(case)
    call = case.call(torch.Generator().manual_seed(0))
    out, softmax_lse, *_ = run_operator(call)
    incoming = Incoming(out, None, out, softmax_lse, None, accumulate=True)
    with pytest.raises(ValueError, match=r"^accumulate: must be False without fp32_results"):
        build_info.extension.backward(call, incoming)
    with pytest.raises(ValueError, match=r"^dq: must be given with accumulate, got None"):
        build_info.extension.backward(replace(call, fp32_results=True), incoming)
