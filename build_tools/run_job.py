"""Runs one compile, keeping what it printed and what it cost. Started by ninja for every object.

``python run_job.py OBJECT -- COMPILER ARGUMENTS...`` writes OBJECT, which gets its name when it is
whole, OBJECT.log (the compiler's messages, which hold ptxas's figures) and OBJECT.json (CPU
seconds, peak memory, size of the object). A compile that ccache answered keeps the figures of the
real one. It starts once an object: standard library only.
"""

import json
import os
import resource
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

# Set by ninja_build: what stands before a compiler, ccache or nothing. Not in ninja's commands, as
# another environment's would then compile everything again.
LAUNCHER_VARIABLE = "FLASH_ATTN_CUDA_BUILD_LAUNCHER"

# What ptxas prints of a kernel that is as it should be; the rest of a compiler's output gets shown.
ROUTINE_LINES = ("ptxas info", "    0 bytes stack frame")


def run(command: list[str]) -> tuple[subprocess.CompletedProcess[str], bool]:
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


def main(target: Path, command: list[str]) -> int:
    start = time.monotonic()
    new = target.with_name(target.name + ".new")
    result, cached = run([str(new) if part == str(target) else part for part in command])
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    for line in result.stdout.splitlines():
        if not line.startswith(ROUTINE_LINES):
            print(line)
    if result.returncode:
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
        sys.exit(main(Path(sys.argv[1]), sys.argv[3:]))
    except OSError as error:  # a full disk
        sys.exit(f"error: {error}")
