"""Runs one compile, keeping what it printed and what it cost. Started by ninja for every object.

``python run_job.py OBJECT -- COMPILER ARGUMENTS...`` writes OBJECT.log (the compiler's messages,
which hold ptxas's figures) and OBJECT.json (CPU seconds, peak memory). A compile that ccache
answered keeps the figures of the real one. It starts once an object: standard library only.
"""

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

# What ptxas prints of a kernel that is as it should be; the rest of a compiler's output gets shown.
ROUTINE_LINES = ("ptxas info", "    0 bytes stack frame")


def run(command: list[str]) -> tuple[subprocess.CompletedProcess[str], bool]:
    """The finished compile, and whether ccache had its result."""
    with tempfile.NamedTemporaryFile("r", suffix=".ccache-stats") as stats:
        environment = {**os.environ, "CCACHE_STATSLOG": stats.name}
        result = subprocess.run(
            command,
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        return result, "cache_hit" in stats.read()


def main(target: Path, command: list[str]) -> int:
    start = time.monotonic()
    result, cached = run(command)
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    for line in result.stdout.splitlines():
        if not line.startswith(ROUTINE_LINES):
            print(line)
    if result.returncode:
        return result.returncode
    target.with_name(target.name + ".log").write_text(result.stdout)
    record = target.with_name(target.name + ".json")
    if not (cached and record.is_file()):
        figures = {
            "cpu_seconds": round(usage.ru_utime + usage.ru_stime, 2),
            "wall_seconds": round(time.monotonic() - start, 2),
            "peak_bytes": usage.ru_maxrss * 1024,
            "cached": cached,
        }
        record.write_text(json.dumps(figures))
    return 0


if __name__ == "__main__":
    assert sys.argv[2] == "--"
    sys.exit(main(Path(sys.argv[1]), sys.argv[3:]))
