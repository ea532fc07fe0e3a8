"""Runs random calls against the fp64 reference, for as long as one likes.

    python -m tests.fuzz.run --seconds 300 --processes 8

Every call but a derivative runs twice, and bits must repeat where they are promised to. What the
package refuses by NotImplementedError is counted by its message. A failure, or a call that does not
end, is printed with the command that runs it again. The exit status is 1 if there was one.
"""

from __future__ import annotations

import argparse
import faulthandler
import itertools
import multiprocessing
import re
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from flash_attn_cuda import check_device_errors
from tests.cases.fp8_cache import Fp8Case, assert_fp8_close
from tests.cases.fp8_cache import attend as attend_fp8
from tests.cases.harness import assert_cache_close, assert_same_bits, attend_over_cache
from tests.cases.masked import MaskedCase, MaskedInputs
from tests.cases.masked_harness import masked_reference, run_masked
from tests.cases.second_order import check_derivatives
from tests.fuzz.draw import KINDS, MOST_PAIRS, CacheCall, DerivativeCall, RandomCall, draw_call
from tests.reference import AttentionResult
from tests.reference.tolerance import assert_close

GRACE = 60.0  # seconds after the deadline for the call that runs then


@dataclass
class Tally:
    """Calls by kind, and texts of what was refused and of what failed."""

    right: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    wrong: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    def add(self, other: Tally) -> None:
        for name in ("right", "refused", "wrong", "refusals"):
            getattr(self, name).update(getattr(other, name))
        self.failures += other.failures

    def __str__(self) -> str:
        lines = [f"{count:6} refused: {text}" for text, count in self.refusals.most_common()]
        lines += self.failures
        for kind in KINDS:
            counts = (self.right[kind], self.refused[kind], self.wrong[kind])
            if any(counts):
                lines.append("{}: {} right, {} refused, {} wrong".format(kind, *counts))
        return "\n".join(lines)


def check(call: RandomCall) -> None:
    """Raise AssertionError where a result is wrong, NotImplementedError where it is refused."""
    if isinstance(call, DerivativeCall):
        check_derivatives(call.case, call.transform)
    elif isinstance(call, CacheCall):
        _check_cache(call)
    else:
        _check_attention(call)


def _check_cache(call: CacheCall) -> None:
    if isinstance(call.case, Fp8Case):
        of_fp8 = call.case.make_inputs()
        run = partial(attend_fp8, call.case, of_fp8, num_splits=call.num_splits)
        result, written = run()
        assert_same_bits(run()[0], result, "of the second run")
        assert_fp8_close(call.case, of_fp8, result, written)
    else:
        inputs = call.case.make_inputs()
        run_cache = partial(attend_over_cache, call.case, inputs, num_splits=call.num_splits)
        result, *caches = run_cache()
        assert_same_bits(run_cache()[0], result, "of the second run")
        assert_cache_close(call.case, inputs, result, *caches)


def _check_attention(case: MaskedCase) -> None:
    inputs = case.make_inputs()
    result, second = (_with_gradients_if_any(case, inputs) for _ in range(2))
    second.dbias = None  # atomic adds sum what pairs share
    assert_same_bits(second, result, "of the second run", deterministic=case.of.deterministic)
    assert_close(result, *masked_reference(case, inputs))


def _with_gradients_if_any(case: MaskedCase, inputs: MaskedInputs) -> AttentionResult:
    """Without gradients where the call's are refused."""
    try:
        return run_masked(case, inputs)
    except NotImplementedError:
        return run_masked(case, inputs, backward=False)


def run_calls(
    options: argparse.Namespace,
    numbers: Iterator[int],
    deadline: float,
    begin: Callable[[int], None] = lambda _: None,
) -> Tally:
    """The calls of these numbers until the deadline, by time.time. begin: told each number."""
    tally = Tally()
    for number in numbers:
        if time.time() > deadline:
            break
        begin(number)
        kind = options.kinds[number % len(options.kinds)]
        call = None
        try:
            call = draw_call(kind, options.seed, number, options.device, options.most_pairs)
            check(call)
            if options.device == "cuda":
                check_device_errors()
            tally.right[kind] += 1
        except NotImplementedError as refusal:
            tally.refused[kind] += 1
            tally.refusals[re.sub(r"\d+", "N", str(refusal))] += 1
        except torch.cuda.OutOfMemoryError:
            tally.refused[kind] += 1
            tally.refusals["no memory for the call and its reference"] += 1
            torch.cuda.empty_cache()
        except Exception:  # whatever it is, it is a finding
            text = traceback.format_exc(limit=-2)
            tally.wrong[kind] += 1
            tally.failures.append(f"WRONG {call}\n  {again(options, number)}\n{text}")
            if "CUDA error" in text:  # nothing runs in this process any more
                break
    return tally


def again(options: argparse.Namespace, number: int) -> str:
    """The command that runs the call of this number alone."""
    return (
        f"python -m tests.fuzz.run --kinds {' '.join(options.kinds)} --seed {options.seed} "
        f"--device {options.device} --most-pairs {options.most_pairs:g} --first {number} --calls 1"
    )


def numbers_of(options: argparse.Namespace, share: int) -> Iterator[int]:
    """Those of one process."""
    last = float("inf") if options.calls is None else options.first + options.calls
    every = itertools.count(options.first + share, options.processes)
    return itertools.takewhile(lambda number: number < last, every)


def _run_share(
    options: argparse.Namespace, share: int, deadline: float, running: Any, tallies: Any
) -> None:
    def begin(number: int) -> None:
        running[share] = number

    faulthandler.dump_traceback_later(deadline + GRACE - 5.0 - time.time())
    tallies.put(run_calls(options, numbers_of(options, share), deadline, begin))


def run_shares(options: argparse.Namespace, deadline: float) -> Tally:
    """The calls in processes side by side. One that crashes, or does not end within GRACE of the
    deadline, is a failure.
    """
    context = multiprocessing.get_context("spawn")
    running = context.Array("q", [options.first] * options.processes)
    tallies = context.SimpleQueue()
    processes = [
        context.Process(target=_run_share, args=(options, share, deadline, running, tallies))
        for share in range(options.processes)
    ]
    for process in processes:
        process.start()
    tally = Tally()
    ended: set[int] = set()
    while len(ended) < len(processes) and time.time() < deadline + GRACE:
        time.sleep(0.1)
        # Before the queue is read: what has ended has put its tally there.
        ended = {n for n, process in enumerate(processes) if process.exitcode is not None}
        while not tallies.empty():
            tally.add(tallies.get())
    for share, process in enumerate(processes):
        if process.exitcode != 0:
            number = running[share]
            what = "DID NOT END" if process.exitcode is None else f"CRASHED ({process.exitcode})"
            kind = options.kinds[number % len(options.kinds)]
            call = draw_call(kind, options.seed, number, options.device, options.most_pairs)
            tally.wrong[kind] += 1
            tally.failures.append(f"{what} {call}\n  {again(options, number)}")
            process.kill()
    return tally


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first call")
    parser.add_argument("--calls", type=int, help="no more than these")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--device", default="cuda")
    parser.add_argument(
        "--most-pairs", type=float, default=MOST_PAIRS, help="of queries and keys, of all heads"
    )
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    deadline = time.time() + options.seconds
    if options.processes == 1:
        tally = run_calls(options, numbers_of(options, 0), deadline)
    else:
        tally = run_shares(options, deadline)
    print(tally)
    return 1 if tally.failures else 0


if __name__ == "__main__":
    sys.exit(main())
