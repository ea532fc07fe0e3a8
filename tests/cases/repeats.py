"""The same call many times, while the device is busy with other things.

FLASH_ATTN_CUDA_TEST_REPEATS=1000 in the environment repeats that often instead of 200 times.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.cases.attention import AttentionCase, VarlenCase
from tests.cases.harness import (
    ON_CPU,
    bits,
    make_case,
    run_forward_backward,
    scaled,
    skip_without_row,
)
from tests.cases.masked import MaskedCase
from tests.cases.masked_harness import run_masked, skip_without_masked_row
from tests.reference import AttentionResult

REPEATS = int(os.environ.get("FLASH_ATTN_CUDA_TEST_REPEATS", scaled(200, 2)))


class Load:
    """Matrix products on two other streams, a few more at every `push`: thread blocks of the
    kernels under test start late, in another order, and on fewer SMs.
    """

    def __init__(self) -> None:
        if ON_CPU:
            return
        self._streams = [torch.cuda.Stream() for _ in range(2)]
        self._operands = [
            torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for size in (2048, 256)
        ]
        torch.cuda.synchronize()

    def push(self) -> None:
        if ON_CPU:
            return
        for stream, operand, times in zip(self._streams, self._operands, (2, 9), strict=True):
            with torch.cuda.stream(stream):
                for _ in range(times):
                    torch.mm(operand, operand)


def reordered(x: Tensor, y: Tensor) -> Tensor:
    """Where x is what a sum in fp32, rounded to y, may be in another order."""
    allowed = torch.finfo(y.dtype).eps * y.float().abs() + 2.0**-16 * y.float().abs().max()
    return (x.float() - y.float()).abs() <= allowed


def assert_same_forward(run: Callable[[], AttentionResult], repeats: int, name: str) -> None:
    """out and lse bit for bit, compared on the device."""
    first = run()
    different = []
    load = Load()
    for _ in range(repeats):
        load.push()
        result = run()
        pairs = ((result.out, first.out), (result.lse, first.lse))
        different.append(torch.stack([(bits(x) != bits(y)).sum() for x, y in pairs]))
    counts = torch.stack(different).sum(0).tolist()
    assert counts == [0, 0], f"{name}: elements of out and lse that differed in {repeats} runs"


def assert_repeatable(case: AttentionCase | VarlenCase | MaskedCase, repeats: int) -> None:
    """out, lse and gradients bit for bit, with results compared on the device; dq where the case is
    not deterministic up to the order of its sums.
    """
    if isinstance(case, MaskedCase):
        skip_without_masked_row(case)
        run: Callable[..., AttentionResult] = run_masked
        is_ordered = case.of.deterministic
    else:
        skip_without_row(case)
        run, is_ordered = run_forward_backward, case.deterministic
    inputs = case.make_inputs()
    first = run(case, inputs)
    names = list(first.tensors())

    def differences(name: str, x: Tensor) -> Tensor:
        y = first.tensors()[name]
        same = bits(x) == bits(y) if name != "dq" or is_ordered else reordered(x, y)
        return (~same).sum()

    different = []
    load = Load()
    for _ in range(repeats):
        load.push()
        tensors = run(case, inputs).tensors()
        different.append(torch.stack([differences(name, tensors[name]) for name in names]))
    counts = torch.stack(different).sum(0).tolist()
    wrong = {name: count for name, count in zip(names, counts, strict=True) if count}
    assert not wrong, f"elements that differed in {repeats} runs: {wrong}"


def crowded_case(**fields: Any) -> AttentionCase:
    """Many key blocks add to each query, and more thread blocks than run at a time."""
    return make_case(
        **{
            "batch": 2,
            "seqlen_q": scaled(1100, 100),
            "seqlen_k": scaled(1300, 150),
            "num_heads_q": 8,
            "num_heads_k": 8,
            "deterministic": True,
            **fields,
        }
    )
