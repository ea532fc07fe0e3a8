"""Runs random calls against the fp64 reference, for as long as one likes.

    python -m tests.fuzz.run --seconds 300 --processes 8

Every call but a derivative runs twice, and bits must repeat where they are promised to. What the
package refuses by NotImplementedError is counted by its message. A failure is printed with the
command that runs it again. The exit status is 1 if there was one.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import re
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

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
        again = partial(attend_over_cache, call.case, inputs, num_splits=call.num_splits)
        result, *caches = again()
        assert_same_bits(again()[0], result, "of the second run")
        assert_cache_close(call.case, inputs, result, *caches)


def _check_attention(case: MaskedCase) -> None:
    inputs = case.make_inputs()
    result, again = (_with_gradients_if_any(case, inputs) for _ in range(2))
    assert_same_bits(again, result, "of the second run", deterministic=case.of.deterministic)
    assert_close(result, *masked_reference(case, inputs))


def _with_gradients_if_any(case: MaskedCase, inputs: MaskedInputs) -> AttentionResult:
    """Without gradients where the call's are refused."""
    try:
        return run_masked(case, inputs)
    except NotImplementedError:
        return run_masked(case, inputs, backward=False)


def run_calls(
    kinds: Sequence[str],
    seed: int,
    numbers: Iterator[int],
    *,
    deadline: float,
    device: str,
    most_pairs: float,
) -> Tally:
    """The calls of these numbers until the deadline, by time.time."""
    tally = Tally()
    for number in numbers:
        if time.time() > deadline:
            break
        kind = kinds[number % len(kinds)]
        call = None
        try:
            call = draw_call(kind, seed, number, device, most_pairs)
            check(call)
            if device == "cuda":
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
            tally.wrong[kind] += 1
            again = f"--kinds {' '.join(kinds)} --seed {seed} --first {number} --calls 1"
            text = traceback.format_exc(limit=-2)
            tally.failures.append(f"WRONG {call}\n  python -m tests.fuzz.run {again}\n{text}")
            if "CUDA error" in text:  # nothing runs in this process any more
                break
    return tally


def _process_main(options: argparse.Namespace, share: int, deadline: float) -> Tally:
    last = None if options.calls is None else options.first + options.calls
    numbers = itertools.count(options.first + share, options.processes)
    return run_calls(
        options.kinds,
        options.seed,
        itertools.takewhile(lambda n: last is None or n < last, numbers),
        deadline=deadline,
        device=options.device,
        most_pairs=options.most_pairs,
    )


def main(arguments: Sequence[str] | None = None) -> int:
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
    options = parser.parse_args(arguments)
    deadline = time.time() + options.seconds
    tally = Tally()
    if options.processes == 1:
        tally = _process_main(options, 0, deadline)
    else:
        with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
            shares = [(options, share, deadline) for share in range(options.processes)]
            for part in pool.starmap(_process_main, shares):
                tally.add(part)
    print(tally)
    return 1 if tally.failures else 0


if __name__ == "__main__":
    sys.exit(main())
