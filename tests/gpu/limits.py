"""Other programs run as if the GPU had less than it has.

The library reads FLASH_ATTN_CUDA_CAPABILITY_LIMIT and FLASH_ATTN_CUDA_SMEM_LIMIT when it first asks
about a device, so each limit gets a process of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def run_limited(
    *arguments: str, smem_bytes: int | None = None, capability: int | None = None
) -> subprocess.CompletedProcess[str]:
    """Python with these arguments, as on a GPU with so many bytes of shared memory a block and of
    this compute capability (80, 90); None: as many as there are.
    """
    env = dict(os.environ)
    if smem_bytes is not None:
        env["FLASH_ATTN_CUDA_SMEM_LIMIT"] = str(smem_bytes)
    if capability is not None:
        env["FLASH_ATTN_CUDA_CAPABILITY_LIMIT"] = str(capability)
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=env, capture_output=True, text=True, check=False
    )
