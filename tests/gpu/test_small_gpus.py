"""The rows for GPUs with less shared memory or without wgmma, run on whatever GPU is here."""

from __future__ import annotations

from typing import Any

import pytest

from flash_attn_cuda.installed import build_info
from kernel_table.all_rows import ALL_ROWS
from tests.cases.harness import built_row
from tests.gpu.limits import run_limited

A100_BYTES = 166_912  # 163 KiB a block
GEFORCE_BYTES = 101_376  # 99 KiB a block: compute capability 8.6, 8.9 and 12.0
SHARES = 4  # of several hundred calls, for as many workers

pytestmark = pytest.mark.gpu


def skip_without_rows_for_less_memory() -> None:
    """A build for Hopper alone has few of them, which it runs too (kernel_table/hopper_rows.py)."""
    compiled = {row.name for row in build_info.compiled_rows()}
    if not all(row.name in compiled for row in ALL_ROWS if "smem" in row.name):
        pytest.skip("this build has not all rows for less shared memory")


@pytest.mark.parametrize(
    "limits",
    [{"smem_bytes": A100_BYTES}, {"smem_bytes": GEFORCE_BYTES}, {"capability": 80}],
    ids=["a100", "geforce", "capability80"],
)
@pytest.mark.parametrize("share", range(1, SHARES + 1))
def test_results_are_right_on_less(limits: dict[str, Any], share: int) -> None:
    if "smem_bytes" in limits:
        skip_without_rows_for_less_memory()
    arguments = ("--share", f"{share}/{SHARES}", "--references-on-gpu")
    result = run_limited("-m", "tests.sanitizer.sanitize", *arguments, **limits)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(
    ("smem_bytes", "head_dim", "variant"),
    [(A100_BYTES, 128, ""), (A100_BYTES, 256, "smem163k"), (GEFORCE_BYTES, 64, "smem99k")],
)
def test_the_row_that_fits_is_chosen(smem_bytes: int, head_dim: int, variant: str) -> None:
    if variant:
        skip_without_rows_for_less_memory()
    shapes = {"batch_size": 1, "seqlen_q": 128, "seqlen_k": 128, "num_heads_q": 1}
    shapes |= {"num_heads_k": 1, "head_dim": head_dim}
    program = (
        "from flash_attn_cuda.report.explain import call_of_shapes, explain\n"
        f"plan = explain('backward', call_of_shapes(dtype='bf16', causal=True, **{shapes}))\n"
        "print(plan['instance'], plan['smem_bytes'])"
    )
    result = run_limited("-c", program, smem_bytes=smem_bytes)
    if "no compiled backward kernel" in result.stderr:
        pytest.skip(f"head_dim {head_dim} is not in this build")
    assert result.returncode == 0, result.stderr
    instance, used_bytes = result.stdout.split()
    assert instance == built_row(f"bwd_sm80_bf16_hd{head_dim}_windowed_{variant}".rstrip("_"))
    assert int(used_bytes) <= smem_bytes
