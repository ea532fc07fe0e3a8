"""The compiles of a build: how many run at once, and how one runs.

As many run at once as there are cores, but no more than memory holds.

ninja starts ``python jobs.py OBJECT -- COMPILER ARGUMENTS...`` for every object. It writes OBJECT,
which gets its name when it is whole and goes where the compile fails, OBJECT.log (the compiler's
messages, which hold ptxas's figures) and OBJECT.json (CPU seconds, peak memory, size of the
object). A compile that ccache answered keeps the figures of the real one. It starts once an object:
standard library only.
"""

from __future__ import annotations

import json
import os
import resource
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

VARIABLE = "FLASH_ATTN_CUDA_JOBS"
COMMON_VARIABLE = "MAX_JOBS"  # which torch's extension builder and other kernels' builds read
BYTES_PER_JOB = 4 << 30  # of a compile; sm80 backward units take 3.7 to 3.9 GiB, head dim 96 4.4
CGROUP = Path("/sys/fs/cgroup")
# Set by ninja_build: what stands before a compiler, ccache or nothing. Not in ninja's commands, as
# another environment's would then compile everything again.
LAUNCHER_VARIABLE = "FLASH_ATTN_CUDA_BUILD_LAUNCHER"

# What ptxas prints of a kernel that is as it should be; the rest of a compiler's output gets shown.
ROUTINE_LINES = ("ptxas info", "    0 bytes stack frame")


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


def _finished(command: list[str]) -> tuple[subprocess.CompletedProcess[str], bool]:
    """The finished compile, and whether ccache had its result."""
    launcher = shlex.split(os.environ.get(LAUNCHER_VARIABLE, ""))
    with tempfile.NamedTemporaryFile("r", suffix=".ccache-stats") as stats:
        environment = {**os.environ, "CCACHE_STATSLOG": stats.name}
        result = subprocess.run(
            [*launcher, *command],
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        return result, "cache_hit" in stats.read()


def write_whole(path: Path, text: str) -> None:
    """Writes ``path`` in one step: a build that ends in the middle leaves what was there."""
    new = path.with_name(path.name + ".new")
    new.write_text(text)
    new.replace(path)


def write_if_changed(path: Path, text: str) -> bool:
    """Writes ``path`` unless it holds ``text`` already, so that its dependents stay up to date."""
    if path.is_file() and path.read_text() == text:
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, text)
    return True


def run_job(target: Path, command: list[str]) -> int:
    """Runs the compile; its exit status."""
    start = time.monotonic()
    new = target.with_name(target.name + ".new")
    result, cached = _finished([str(new) if part == str(target) else part for part in command])
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    for line in result.stdout.splitlines():
        if not line.startswith(ROUTINE_LINES):
            print(line)
    if result.returncode:
        target.unlink(missing_ok=True)  # whoever looks sees which compiles failed
        return result.returncode
    write_whole(target.with_name(target.name + ".log"), result.stdout)
    record = target.with_name(target.name + ".json")
    figures = (
        json.loads(record.read_text())
        if cached and record.is_file()
        else {
            "cpu_seconds": round(usage.ru_utime + usage.ru_stime, 2),
            "wall_seconds": round(time.monotonic() - start, 2),
            "peak_bytes": usage.ru_maxrss * 1024,
            "cached": cached,
        }
    )
    write_whole(record, json.dumps({**figures, "bytes": new.stat().st_size}))
    new.replace(target)
    return 0


if __name__ == "__main__":
    assert sys.argv[2] == "--"
    try:
        sys.exit(run_job(Path(sys.argv[1]), sys.argv[3:]))
    except OSError as error:  # a full disk
        sys.exit(f"error: {error}")
