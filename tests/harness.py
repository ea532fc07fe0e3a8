"""What the GPU tests share: run a case through the package and compare it with the reference.

FLASH_ATTN_CUDA_TEST_DEVICE=cpu runs the GPU tests on the CPU backend instead, which debugs the
tests themselves. Those that need a real device (marker `cuda_only`) are skipped then, and sizes are
cut by `scaled`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from cases import DTYPE_NAMES, AttentionCase, AttentionInputs
from reference import AttentionResult, attention_with_gradients, low_precision
from tolerance import Closeness, assert_close
from torch import Tensor

from flash_attn_cuda import build_info, flash_attn_func

DEVICE = os.environ.get("FLASH_ATTN_CUDA_TEST_DEVICE", "cuda")
ON_CPU = DEVICE == "cpu"

# The `check` fixture of conftest.py: (case, backward=True, seed=0, use_dlse=True) -> comparisons.
Check = Callable[..., list[Closeness]]


def make_case(**fields: Any) -> AttentionCase:
    """An AttentionCase on the device under test."""
    return AttentionCase(device=DEVICE, **fields)


def scaled(size: int, cpu_size: int) -> int:
    """`size` on a GPU, `cpu_size` where the CPU backend stands in for it."""
    return cpu_size if ON_CPU else size


def missing_row(case: AttentionCase, *, backward: bool) -> str | None:
    """What the build lacks for this case, or None. The CPU backend lacks nothing."""
    if ON_CPU:
        return None
    for pass_name in ("forward", "backward") if backward else ("forward",):
        covered = any(
            row.pass_name == pass_name
            and row.dtype == DTYPE_NAMES[case.dtype]
            and row.head_dim >= case.head_dim
            and (row.mask == "windowed" or not case.causal)
            for row in build_info.compiled_rows()
        )
        if not covered:
            mask = "windowed" if case.causal else "full"
            return (
                f"no compiled {pass_name} row for {DTYPE_NAMES[case.dtype]}, {mask}, "
                f"head_dim {case.head_dim}"
            )
    return None


def skip_without_row(case: AttentionCase, *, backward: bool = True) -> None:
    """Skip the test, saying which row the build lacks, where it cannot run this case."""
    reason = missing_row(case, backward=backward)
    if reason is not None:
        pytest.skip(reason)


def run_forward(case: AttentionCase, inputs: AttentionInputs) -> AttentionResult:
    """out and lse of the public function, without autograd."""
    with torch.no_grad():
        out, lse, _ = flash_attn_func(
            inputs.q,
            inputs.k,
            inputs.v,
            softmax_scale=case.softmax_scale,
            causal=case.causal,
            return_attn_probs=True,
        )
    return AttentionResult(out=out, lse=lse)


def run_forward_backward(
    case: AttentionCase, inputs: AttentionInputs, *, use_dlse: bool = True
) -> AttentionResult:
    """The public function and its gradients, through lse as well where `use_dlse`."""
    leaves = [x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    out, lse, _ = flash_attn_func(
        *leaves, softmax_scale=case.softmax_scale, causal=case.causal, return_attn_probs=True
    )
    outputs, incoming = [out], [inputs.dout]
    if use_dlse:
        outputs.append(lse)
        incoming.append(inputs.dlse)
    dq, dk, dv = torch.autograd.grad(outputs, leaves, incoming)
    return AttentionResult(out=out.detach(), lse=lse.detach(), dq=dq, dk=dk, dv=dv)


def run_reference(
    case: AttentionCase, inputs: AttentionInputs, *, use_dlse: bool = True
) -> tuple[AttentionResult, AttentionResult]:
    """(fp64 result, naive low-precision result) for tolerance.assert_close."""
    tensors = (inputs.q, inputs.k, inputs.v, inputs.dout, inputs.dlse if use_dlse else None)
    options = {"softmax_scale": case.softmax_scale, "causal": case.causal}
    return attention_with_gradients(*tensors, **options), low_precision(*tensors, **options)


def check_forward(case: AttentionCase, seed: int = 0) -> list[Closeness]:
    inputs = case.make_inputs(seed)
    return assert_close(run_forward(case, inputs), *run_reference(case, inputs, use_dlse=False))


def check_forward_backward(
    case: AttentionCase, seed: int = 0, *, use_dlse: bool = True
) -> list[Closeness]:
    inputs = case.make_inputs(seed)
    actual = run_forward_backward(case, inputs, use_dlse=use_dlse)
    return assert_close(actual, *run_reference(case, inputs, use_dlse=use_dlse))


def bits(x: Tensor) -> Tensor:
    """The bits as integers: equality is bitwise, NaN and signed zero included."""
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    return x.detach().contiguous().view(integer)


def assert_same_bits(actual: AttentionResult, expected: AttentionResult, context: str = "") -> None:
    """All bitwise equal, but dq to one rounding: atomic adds sum it in any order."""
    for name, x in actual.tensors().items():
        y = expected.tensors()[name]
        if name == "dq" and not ON_CPU:
            assert_same_up_to_one_rounding(x, y, f"dq {context}")
        else:
            different = int((bits(x) != bits(y)).sum())
            assert different == 0, f"{name} {context}: {different} of {x.numel()} elements differ"


def assert_same_up_to_one_rounding(x: Tensor, y: Tensor, context: str = "") -> None:
    """One last place of the dtype, and 2^-20 of the largest value for fp32 sums."""
    x32, y32 = x.float(), y.float()
    if x.numel() == 0:
        return
    allowed = torch.finfo(x.dtype).eps * y32.abs() + 2.0**-20 * y32.abs().max()
    worst = ((x32 - y32).abs() / allowed.clamp_min(torch.finfo(torch.float32).tiny)).max().item()
    assert worst <= 1.0, f"{context}: {worst:.2f} times one rounding apart"


@contextmanager
def side_stream() -> Iterator[None]:
    """Run the body on a stream of its own, ordered after and before the current one."""
    if ON_CPU:
        yield
        return
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream().wait_stream(stream)
