"""The rows for GPUs with less shared memory, run on whatever GPU is here.

FLASH_ATTN_CUDA_SMEM_LIMIT is read when the library first asks about the device, so each limit gets
a process of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
A100_BYTES = 166_912  # 163 KiB a block
GEFORCE_BYTES = 101_376  # 99 KiB a block: compute capability 8.6, 8.9 and 12.0

pytestmark = pytest.mark.gpu


def run_limited(smem_bytes: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    env = {
        **os.environ,
        "FLASH_ATTN_CUDA_SMEM_LIMIT": str(smem_bytes),
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=env, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("smem_bytes", [A100_BYTES, GEFORCE_BYTES])
def test_results_are_right_with_less_shared_memory(smem_bytes: int) -> None:
    result = run_limited(smem_bytes, "tests/sanitize.py")
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(
    ("smem_bytes", "head_dim", "variant"),
    [(A100_BYTES, 128, "windowed"), (A100_BYTES, 256, "smem163k"), (GEFORCE_BYTES, 64, "smem99k")],
)
def test_the_row_that_fits_is_chosen(smem_bytes: int, head_dim: int, variant: str) -> None:
    call = f"explain_backward('bf16', {head_dim}, 1, 128, 128, 1, 1, True)"
    program = (
        f"from flash_attn_cuda import build_info\nplan = build_info.extension.{call}\n"
        "print(plan['instance'], plan['smem_bytes'])"
    )
    result = run_limited(smem_bytes, "-c", program)
    if "no compiled backward kernel" in result.stderr:
        pytest.skip(f"head_dim {head_dim} is not in this build")
    assert result.returncode == 0, result.stderr
    instance, used_bytes = result.stdout.split()
    assert instance.endswith(variant)
    assert int(used_bytes) <= smem_bytes
