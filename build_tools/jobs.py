"""How many compiles to run at once: as many as there are cores, but no more than memory holds."""

from __future__ import annotations

import os
from pathlib import Path

VARIABLE = "FLASH_ATTN_CUDA_JOBS"
COMMON_VARIABLE = "MAX_JOBS"  # which torch's extension builder and other kernels' builds read
BYTES_PER_JOB = 4 << 30  # of a compile; sm80 backward units take 3.7 to 3.9 GiB, head dim 96 4.4
CGROUP = Path("/sys/fs/cgroup")


def available_cores() -> int:
    """Cores this process may use: its affinity, and a container's CPU quota."""
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    try:
        quota, period = (CGROUP / "cpu.max").read_text().split()
        return max(1, min(cores, int(quota) // int(period)))
    except (OSError, ValueError):  # no cgroup v2, or a quota of "max"
        return cores


def free_memory() -> int:
    """Bytes that new processes can take: the machine's, or what a container's limit leaves."""
    meminfo = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(meminfo["MemAvailable"].split()[0]) * 1024
    try:
        limit = int((CGROUP / "memory.max").read_text())
        return min(free, limit - int((CGROUP / "memory.current").read_text()))
    except (OSError, ValueError):
        return free


def job_count(cores: int, free_bytes: int) -> int:
    return max(1, min(cores, free_bytes // BYTES_PER_JOB))


def parse_jobs(text: str, setting: str) -> int:
    """The number that ``setting`` gives; ValueError for none of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"{setting}: expected a whole number of at least 1, got {text!r}")
    return int(text)


def default_jobs() -> int:
    """FLASH_ATTN_CUDA_JOBS when set, else MAX_JOBS, else what cores and memory allow."""
    for variable in (VARIABLE, COMMON_VARIABLE):
        if given := os.environ.get(variable):
            return parse_jobs(given, variable)
    return job_count(available_cores(), free_memory())
