"""What the tests of the Hopper kernels share: where they run, and what they go over."""

from __future__ import annotations

import os
from typing import Any

import families
import pytest
import torch
from harness import ON_CPU

from flash_attn_cuda import build_info

LIMITS = ("FLASH_ATTN_CUDA_CAPABILITY_LIMIT", "FLASH_ATTN_CUDA_SMEM_LIMIT")
HEAD_DIMS = families.HEAD_DIMS
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
EVERY_HEAD_DIM = pytest.mark.parametrize("head_dim", HEAD_DIMS)
CAUSAL = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
MASKS: tuple[dict[str, Any], ...] = (
    {},
    {"causal": True},
    *({"window": window} for window in ((0, 0), (5, -1), (-1, 7), (100, 50), (64, 0))),
)


@pytest.fixture(autouse=True)
def runs_sm90_kernels() -> None:
    if ON_CPU:
        return
    capability = torch.cuda.get_device_capability()
    if capability != (9, 0):
        pytest.skip(f"needs compute capability 9.0, this is {capability[0]}.{capability[1]}")
    for variable in LIMITS:
        if variable in os.environ:
            pytest.skip(f"{variable} is set")
    if not any(row.family == "sm90" for row in build_info.compiled_rows()):
        pytest.skip("this build has no sm90 rows")


def row_name(head_dim: int, variant: str = "", family: str = "sm90", dtype: str = "bf16") -> str:
    return "_".join(filter(None, ["fwd", family, dtype, f"hd{head_dim}", "windowed", variant]))


def most_causal_queries() -> int:
    """Of the row for short causal sequences."""
    rows = {row.name: row for row in build_info.compiled_rows()}
    return rows[row_name(64, "short")].config["most_causal_queries"]
