"""Runs sanitize.py, whole, under compute-sanitizer's four tools, and writes what they found into
the summary of the GPU tests (gpu/summary.py), beside what the tests showed.

    python -m tests.sanitizer.sanitize_all --summary tests/gpu_results --processes 16

Each tool judges the kernels that it can follow. racecheck does not know the phases of mbarriers,
nor initcheck what TMA writes, so those two run the sm80 family, which Hopper GPUs run as well;
memcheck and synccheck run both families. racecheck does not know barriers of a part of a CTA's
warps either: with the one of the decode kernels of wide heads, it reports races across the CTA's
own barriers. It looks at shared memory, where CTAs of that family, which have a tile each, do not
meet: it takes few heads of calls that have more tiles than the GPU has SMs. Of derivatives it looks
at this package's kernels alone, as references are made on the GPU: all 32 calls in 50 s, not 12 in
230. initcheck leaves out what decode kernels, and the preprocess of a sink's gradient, read on
purpose (calls over a cache: shared/schedule/marked_counter.h, sm80/decode/combine.h).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import NoReturn

ROOT = Path(__file__).resolve().parents[2]

from tests.gpu import summary as gpu_summary  # noqa: E402
from tests.gpu.gpus import visible_gpus  # noqa: E402

SANITIZE = ("-m", "tests.sanitizer.sanitize")
SM80_ALONE = {"FLASH_ATTN_CUDA_CAPABILITY_LIMIT": "80"}
SINGLE_TENSORS = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}  # else one allocation holds many
ERROR_STATUS = 99  # of the sanitizer; sanitize.py's own are 1, a wrong result, and 2, no GPU

running: set[subprocess.Popen[bytes]] = set()  # each leads a process group
stopping = threading.Event()


@dataclass(frozen=True)
class Run:
    """One tool over one family's calls."""

    tool: str
    family: str
    variables: dict[str, str]
    options: tuple[str, ...] = ()  # of sanitize.py
    kernels_without: str = ""  # part of the names of kernels that the tool leaves out
    kernels_with: str = ""  # part of the names of those that it looks at; nothing: all


RUNS = (
    Run("memcheck", "as planned", SINGLE_TENSORS),
    Run("synccheck", "as planned", {}),
    Run("memcheck", "sm80", {**SINGLE_TENSORS, **SM80_ALONE}),
    Run("racecheck", "sm80", SM80_ALONE, ("--most-heads", "2", "--without", "derivatives"),
        kernels_without="512_windowed_decode"),
    Run("racecheck", "sm80, derivatives", SM80_ALONE,
        ("--most-heads", "2", "--only", "derivatives"), kernels_with="flash_attn_cuda"),
    Run("initcheck", "sm80", {**SINGLE_TENSORS, **SM80_ALONE}, ("--without", "cache"),
        kernels_without="preprocess_kernel"),
    Run("synccheck", "sm80", SM80_ALONE),
)  # fmt: skip


@dataclass(frozen=True)
class Verdict:
    """What a run came to. Passed: every share ended by itself, without a finding."""

    tool: str
    family: str
    calls: int
    wrong_results: int
    findings: int
    unfinished_shares: int
    seconds: float

    @property
    def passed(self) -> bool:
        return self.calls > 0 and not (
            self.wrong_results or self.findings or self.unfinished_shares
        )


def kill(process: subprocess.Popen[bytes]) -> None:
    """With the program that it watches."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def stop(signum: int, _frame: FrameType | None) -> NoReturn:
    """Nothing goes on using the GPU behind a run that was told to end."""
    stopping.set()
    for process in list(running):
        kill(process)
    raise SystemExit(128 + signum)


@contextmanager
def stopping_on_signals() -> Iterator[None]:
    stopping.clear()
    before = {each: signal.signal(each, stop) for each in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def run_share(run: Run, share: int, shares: int, logs: Path, seconds: float) -> tuple[str, bool]:
    """What a share printed, and whether it ended within its time."""
    command = ["compute-sanitizer", "--tool", run.tool, "--error-exitcode", str(ERROR_STATUS)]
    for option, part in (
        ("--kernel-name", run.kernels_with),
        ("--kernel-name-exclude", run.kernels_without),
    ):
        command += [option, f"kernel_substring={part}"] if part else []
    command += [sys.executable, *SANITIZE, "--share", f"{share}/{shares}", *run.options]
    log = logs / f"{run.tool}-{run.family.replace(' ', '-')}-{share}.log"
    environment = {**os.environ, **run.variables, **own_resources(share, shares)}
    with log.open("w") as file:
        process = subprocess.Popen(
            command, env=environment, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        running.add(process)
        if stopping.is_set():  # since before it was known
            kill(process)
        try:
            ended = process.wait(seconds) in (0, 1, ERROR_STATUS)
        except subprocess.TimeoutExpired:
            kill(process)
            process.wait()
            ended = False
        running.discard(process)
    return log.read_text(), ended


def own_resources(share: int, shares: int) -> dict[str, str]:
    """A GPU, in turns, and an equal part of the cores."""
    gpus = visible_gpus()
    gpu = {"CUDA_VISIBLE_DEVICES": gpus[share % len(gpus)]} if gpus else {}
    return {**gpu, "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // shares))}


def findings(text: str) -> int:
    """Errors or hazards, from the sanitizer's closing line; 1 where it has none."""
    found = re.findall(r"(?:ERROR SUMMARY: |RACECHECK SUMMARY: )(\d+)", text)
    return int(found[-1]) if found else 1


def calls_and_wrong(text: str) -> tuple[int, int]:
    """From the closing line of sanitize.py; of a stopped share, what was right until then."""
    closing = re.search(r"^sanitize: (\d+) calls on .*, (\d+) wrong,", text, re.MULTILINE)
    if closing is None:
        return len(re.findall(r": right$", text, re.MULTILINE)), 0
    return int(closing[1]), int(closing[2])


def judge(run: Run, processes: int, logs: Path, seconds: float) -> Verdict:
    started = time.monotonic()
    with ThreadPoolExecutor(processes) as pool:
        shares = range(1, processes + 1)
        done = list(pool.map(lambda i: run_share(run, i, processes, logs, seconds), shares))
    counts = [calls_and_wrong(text) for text, _ in done]
    return Verdict(
        tool=run.tool,
        family=run.family,
        calls=sum(calls for calls, _ in counts),
        wrong_results=sum(wrong for _, wrong in counts),
        findings=sum(findings(text) for text, ended in done if ended),
        unfinished_shares=sum(not ended for _, ended in done),
        seconds=round(time.monotonic() - started, 1),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--summary", type=Path, required=True, metavar="DIRECTORY")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--logs", type=Path, default=Path("build/sanitizer"))
    parser.add_argument("--tools", nargs="+", choices=sorted({run.tool for run in RUNS}))
    parser.add_argument("--seconds", type=float, default=3600.0, help="that a run may take")
    given = parser.parse_args(arguments)
    given.logs.mkdir(parents=True, exist_ok=True)
    verdicts = []
    with stopping_on_signals():
        for run in RUNS:
            if given.tools is None or run.tool in given.tools:
                verdicts.append(judge(run, given.processes, given.logs, given.seconds))
                print(json.dumps(asdict(verdicts[-1])), flush=True)
                gpu_summary.add_sanitizer(given.summary, [asdict(verdicts[-1])])
    return 0 if all(verdict.passed for verdict in verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
