"""Runs random calls against the fp64 reference, for as long as one likes.

    python -m tests.fuzz.run --seconds 300 --processes 8

Every call but a derivative runs twice, and bits must repeat where they are promised to. What the
package refuses by NotImplementedError, or has no kernel for, is counted by its message. The kernels
of other GPUs run with FLASH_ATTN_CUDA_CAPABILITY_LIMIT=80 in the environment, and
FLASH_ATTN_CUDA_SMEM_LIMIT=101376 those with less shared memory. A call whose result is wrong, that
crashes or that does not end is printed with the command that runs it again. The exit status is 1 if
there was one.
"""

from __future__ import annotations

import argparse
import faulthandler
import itertools
import multiprocessing
import os
import re
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
from torch import Tensor

from flash_attn_cuda import check_device_errors
from tests.cases.fp8_cache import Fp8Case, assert_fp8_close
from tests.cases.fp8_cache import attend as attend_fp8
from tests.cases.harness import assert_cache_close, assert_same_bits, attend_over_cache
from tests.cases.kvcache import KvCacheCase
from tests.cases.layouts import moved
from tests.cases.masked import MaskedCase
from tests.cases.masked_harness import masked_reference, run_masked
from tests.cases.second_order import check_derivatives
from tests.fuzz.draw import KINDS, MOST_PAIRS, CacheCall, DerivativeCall, RandomCall, draw_call
from tests.reference import AttentionResult
from tests.reference.tolerance import assert_close

MOST_WORK_ON_HOST = 1e9  # reference_work, a tenth of a second of a core: two thirds of the calls
# To glibc, as processes start: memory of one tensor is there for the next. The host takes longer to
# fill in fresh pages than to compute on them.
OF_MALLOC = {"MMAP_MAX_": "0", "TRIM_THRESHOLD_": f"{1 << 40}", "TOP_PAD_": f"{1 << 26}"}
GRACE = 60.0  # seconds after the deadline for the calls that run then
RIGHT, REFUSED, WRONG = "right", "refused", "wrong"
NO_MEMORY = "no memory for the call and its reference"
NO_KERNEL = "no compiled"  # begins what is said where the build, or the GPU, has none for a call

# (call, seed of its tensors) -> what was refused of it, or None. Raises AssertionError where a
# result is wrong, and what is_refusal() knows where all of it is refused.
Check = Callable[[RandomCall, int], str | None]


# -- one call --------------------------------------------------------------------------------------


def check(call: RandomCall, seed: int) -> str | None:
    if isinstance(call, DerivativeCall):
        check_derivatives(call.case, call.transform, seed)
        return None
    if isinstance(call, CacheCall):
        _check_cache(call, seed)
        return None
    return _check_attention(call, seed)


def _check_cache(call: CacheCall, seed: int) -> None:
    """A small call's inputs and reference are made on the host: they are hundreds of operators that
    take a GPU microseconds each, and the processes queue for it.
    """
    device = call.cache.device
    if reference_work(call.cache) <= MOST_WORK_ON_HOST:
        call = call.on("cpu")
    case, here = call.case, call.cache.device
    inputs = case.make_inputs(seed)
    given = inputs if here == device else moved(inputs, device)

    def attend() -> tuple[AttentionResult, list[Any]]:
        if isinstance(case, Fp8Case):
            result, written = attend_fp8(case, given, num_splits=call.num_splits)
        else:
            result, *written = attend_over_cache(case, given, num_splits=call.num_splits)
        return result.to(here), [x.to(here) if isinstance(x, Tensor) else x for x in written]

    (result, written), (again, _) = attend(), attend()
    assert_same_bits(again, result, "of the second run")
    if isinstance(case, Fp8Case):
        assert_fp8_close(case, inputs, result, written)
    else:
        assert_cache_close(case, inputs, result, *written)


def reference_work(cache: KvCacheCase) -> float:
    """Operations of the products; a number of the cache takes a processor as long as a thousand."""
    lengths_q, new = (cache.of_each(n) for n in (cache.seqlens_q, cache.seqlens_new))
    pairs = sum(q * (k + n) for q, k, n in zip(lengths_q, cache.cached, new, strict=True))
    columns = cache.head_dim + cache.value_dim * (1 + cache.has_qv)
    rows = cache.num_entries * cache.capacity * cache.num_heads_k
    products = 2.0 * pairs * cache.num_heads_q * columns
    return products + 1e3 * rows * (cache.head_dim + cache.value_dim)


def is_refusal(error: Exception) -> bool:
    return isinstance(error, NotImplementedError) or str(error).startswith(NO_KERNEL)


def _check_attention(case: MaskedCase, seed: int) -> str | None:
    inputs = case.make_inputs(seed)
    refused = None
    try:
        result = run_masked(case, inputs)
    except RuntimeError as error:  # of which NotImplementedError is one
        if not is_refusal(error):
            raise
        refused = f"gradients of it: {error}"
        result = run_masked(case, inputs, backward=False)
    again = run_masked(case, inputs, backward=refused is None)
    if not case.of.deterministic:
        again.dbias = None  # atomic adds sum what pairs share
    order = {"deterministic": case.of.deterministic, "summed": case.summed}
    assert_same_bits(again, result, "of the second run", **order)
    assert_close(result, *masked_reference(case, inputs))
    return refused


@dataclass(frozen=True)
class Outcome:
    """Of one call. text: what was refused, or what is wrong and the command that runs it again."""

    kind: str
    what: str
    text: str | None = None


def kind_of(options: argparse.Namespace, number: int) -> str:
    kind: str = options.kinds[number % len(options.kinds)]
    return kind


def call_of(options: argparse.Namespace, number: int) -> RandomCall:
    kind = kind_of(options, number)
    return draw_call(kind, options.seed, number, options.device, options.most_pairs)


def outcome_of(options: argparse.Namespace, number: int, checked_by: Check = check) -> Outcome:
    kind = kind_of(options, number)
    call = None
    try:
        call = call_of(options, number)
        refused = checked_by(call, number)
        if options.device == "cuda":
            check_device_errors()
        return Outcome(kind, RIGHT, refused)
    except torch.cuda.OutOfMemoryError:
        torch.cuda.empty_cache()
        return Outcome(kind, REFUSED, NO_MEMORY)
    except Exception as error:
        if is_refusal(error):
            return Outcome(kind, REFUSED, str(error))
        text = traceback.format_exc(limit=-2)
        return Outcome(kind, WRONG, f"WRONG {call}\n  {again(options, number)}\n{text}")


def again(options: argparse.Namespace, number: int) -> str:
    """The command that runs the call of this number alone."""
    return (
        f"python -m tests.fuzz.run --kinds {' '.join(options.kinds)} --seed {options.seed} "
        f"--device {options.device} --most-pairs {options.most_pairs!r} --first {number} --calls 1"
    )


# -- many calls ------------------------------------------------------------------------------------


@dataclass
class Tally:
    """counts: calls by (kind, what became of them)."""

    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    def add(self, outcome: Outcome) -> None:
        self.counts[outcome.kind, outcome.what] += 1
        if outcome.text is None:
            return
        if outcome.what == WRONG:
            print(outcome.text, flush=True)
            self.failures.append(outcome.text)
        else:
            self.refusals[re.sub(r"\d+", "N", outcome.text)] += 1

    def __str__(self) -> str:
        lines = [f"{count:6} refused: {text}" for text, count in self.refusals.most_common()]
        for kind in dict.fromkeys(kind for kind, _ in self.counts):
            counts = (f"{self.counts[kind, what]} {what}" for what in (RIGHT, REFUSED, WRONG))
            lines.append(f"{kind}: {', '.join(counts)}")
        return "\n".join(lines)


@dataclass
class Share:
    """A process, what it tells, and the call that it is at: None before the first and between."""

    process: multiprocessing.process.BaseProcess
    reader: Connection
    number: int | None = None


def run_calls(options: argparse.Namespace, checked_by: Check = check) -> Tally:
    """The calls in options.processes side by side until options.seconds are over, which count from
    when all have begun. A process that crashes, or does not end within GRACE of that, is a failure.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.fuzz.run"])
    shares = []
    for number in range(options.processes):
        reader, writer = context.Pipe(duplex=False)
        arguments = (options, number, checked_by, writer)
        process = context.Process(target=_run_share, args=arguments)
        process.start()
        writer.close()  # so that the reader sees the end of the process
        shares.append(Share(process, reader))
    for share in shares:
        share.reader.poll(None)
    deadline = time.time() + options.seconds
    tally = Tally()
    telling = {share.reader: share for share in shares}
    while telling and (left := deadline + GRACE - time.time()) > 0.0:
        for reader in wait(list(telling), left):
            share = telling[reader]
            try:
                told = share.reader.recv()
            except EOFError:
                del telling[reader]
                continue
            share.number = told if isinstance(told, int) else None
            if isinstance(told, Outcome):
                tally.add(told)
    for share in shares:
        if share.reader in telling:
            tally.add(_unfinished(options, share, "DID NOT END"))
            share.process.kill()
        share.process.join()
        if share.process.exitcode != 0 and share.reader not in telling:
            tally.add(_unfinished(options, share, f"CRASHED ({share.process.exitcode})"))
    return tally


def _unfinished(options: argparse.Namespace, share: Share, what: str) -> Outcome:
    if share.number is None:
        return Outcome("no call", WRONG, f"{what}: a process outside a call")
    text = f"{what} {call_of(options, share.number)}\n  {again(options, share.number)}"
    return Outcome(kind_of(options, share.number), WRONG, text)


def _run_share(
    options: argparse.Namespace, share: int, checked_by: Check, writer: Connection
) -> None:
    deadline = time.time() + options.seconds
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // options.processes))
    # Where it is when it does not end, to stderr.
    faulthandler.dump_traceback_later(max(1.0, options.seconds + GRACE - 5.0))
    for number in _numbers_of(options, share):
        if time.time() > deadline:
            break
        writer.send(number)
        outcome = outcome_of(options, number, checked_by)
        writer.send(outcome)
        if outcome.what == WRONG and "CUDA error" in (outcome.text or ""):
            break  # nothing runs in this process any more
    faulthandler.cancel_dump_traceback_later()


def _numbers_of(options: argparse.Namespace, share: int) -> Iterator[int]:
    last = float("inf") if options.calls is None else options.first + options.calls
    every = itertools.count(options.first + share, options.processes)
    return itertools.takewhile(lambda number: number < last, every)


# -- the program -----------------------------------------------------------------------------------


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
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
    for name, value in OF_MALLOC.items():
        os.environ.setdefault(f"MALLOC_{name}", value)
    tally = run_calls(parse(arguments))
    print(tally)
    return 1 if tally.failures else 0


if __name__ == "__main__":
    sys.exit(main())
