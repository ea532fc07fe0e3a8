"""Times several things in turns, so that clocks and temperature hit all alike."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial

import torch
from backends import Backend, Unsupported, is_cuda
from cases import AttentionCase, AttentionInputs
from metrics import Pass, Timing
from torch import Tensor

Call = Callable[[], object]

# A sample is one or more calls between two clock readings, long enough for the clock.
SAMPLE_MS = 0.5
MAX_CALLS_PER_SAMPLE = 20
MIN_ROUNDS, MAX_ROUNDS = 5, 100

# A call that takes less than twice the host's time for it may end before the host has issued the
# next one: the device is then kept busy first, so that a sample holds no wait for the host.
MIN_HOST_MS, MAX_HOST_MS = 0.1, 1.0  # per call: what is taken for the host's time
SLEEP_CYCLES_PER_MS = 2_000_000  # near the clock of current data-centre GPUs

# Input sets are used in turn, so that none of a call's data is left in the L2 cache.
CACHE_MULTIPLE = 3
MAX_INPUT_SETS = 16


SDPA_REFUSAL = "No available kernel"  # what SDPA says when a kernel does not compute a case

# After one of these the CUDA context is lost and every further figure would be wrong. The class is
# younger than the oldest supported torch.
LOST_DEVICE = (torch.AcceleratorError,) if hasattr(torch, "AcceleratorError") else ()


class Status(str, Enum):
    ok = "ok"
    unsupported = "unsupported"
    out_of_memory = "out of memory"
    failed = "failed"


@dataclass(frozen=True)
class Result:
    """One backend on one case and pass. Without status ok there is a reason and no figures."""

    case: AttentionCase
    which: Pass
    backend: str
    status: Status
    reason: str | None = None
    timing: Timing | None = None
    peak_bytes: int | None = None  # most memory one call held beyond its inputs; CUDA only
    check: dict[str, object] | None = None  # refcheck's verdict


@dataclass(frozen=True)
class Subject:
    """Something to time. `prepare` sets it up and makes one call per input set, to be used in turn;
    `scope` makes the context that its calls need.
    """

    name: str
    prepare: Callable[[], Sequence[Call]]
    scope: Callable[[], AbstractContextManager] = nullcontext


@dataclass(frozen=True)
class Measurement:
    """What became of a subject. Without status ok there is a reason and no figures."""

    status: Status
    reason: str | None = None
    timing: Timing | None = None
    peak_bytes: int | None = None  # most memory one call held beyond its inputs; CUDA only


@dataclass
class Contender:
    """A subject that is set up."""

    subject: Subject
    calls: Sequence[Call]
    peak_bytes: int | None = None
    calls_per_sample: int = 1
    estimate_ms: float = 0.0
    host_ms: float = MIN_HOST_MS  # to issue a call


def make_input_sets(case: AttentionCase, seed: int = 0) -> list[AttentionInputs]:
    """Random normal inputs that require gradients; as many sets as it takes to defeat the cache."""
    first = case.make_inputs(seed)
    sets = [first]
    if is_cuda(case):
        cache = torch.cuda.get_device_properties(case.device).L2_cache_size
        size = sum(x.numel() * x.element_size() for x in (first.q, first.k, first.v))
        count = min(MAX_INPUT_SETS, max(1, math.ceil(CACHE_MULTIPLE * cache / size)))
        sets += [case.make_inputs(seed + index) for index in range(1, count)]
    return [
        replace(s, q=s.q.requires_grad_(), k=s.k.requires_grad_(), v=s.v.requires_grad_())
        for s in sets
    ]


def run_case(
    case: AttentionCase,
    which: Pass,
    backends: Sequence[Backend],
    inputs: Sequence[AttentionInputs],
    budget_ms: float,
) -> list[Result]:
    """Times all backends on one case; about `budget_ms` of device time for each of them."""
    subjects = [
        Subject(backend.name, partial(make_calls, backend, case, which, inputs), backend.scope)
        for backend in backends
    ]
    measured = measure(
        subjects, records=which is Pass.backward, on_cuda=is_cuda(case), budget_ms=budget_ms
    )
    return [
        Result(case, which, subject.name, m.status, m.reason, m.timing, m.peak_bytes)
        for subject, m in zip(subjects, measured, strict=True)
    ]


def measure(
    subjects: Sequence[Subject], *, records: bool, on_cuda: bool, budget_ms: float
) -> list[Measurement]:
    """One per subject, all timed in turns; with `records` calls are recorded for autograd."""
    contenders: list[Contender] = []
    outcomes: list[Contender | Measurement] = []
    with torch.set_grad_enabled(records):
        for subject in subjects:
            try:
                contenders.append(set_up(subject, on_cuda))
                outcomes.append(contenders[-1])
            except Exception as error:
                outcomes.append(failure(error))
        samples = collect_samples(contenders, on_cuda, budget_ms)
    timings = iter([Timing.of(values) for values in samples])
    return [
        outcome
        if isinstance(outcome, Measurement)
        else Measurement(Status.ok, timing=next(timings), peak_bytes=outcome.peak_bytes)
        for outcome in outcomes
    ]


def failure(error: Exception) -> Measurement:
    """What cannot run is a row of the table, not the end of the benchmark."""
    if isinstance(error, LOST_DEVICE):
        raise error
    if isinstance(error, torch.OutOfMemoryError):
        torch.cuda.empty_cache()
        status = Status.out_of_memory
    elif isinstance(error, Unsupported | NotImplementedError) or SDPA_REFUSAL in str(error):
        status = Status.unsupported
    else:
        status = Status.failed
    reason = str(error).strip().splitlines()
    return Measurement(status, reason=reason[0] if reason else repr(error))


def set_up(subject: Subject, on_cuda: bool) -> Contender:
    """Prepares the subject and runs its calls once each, which also compiles and tunes them."""
    with subject.scope():
        calls = subject.prepare()
        calls[0]()
        contender = Contender(subject, calls, peak_bytes=peak_memory(calls[0], on_cuda))
        for call in calls:
            call()
        estimate(contender, on_cuda)
    return contender


def make_calls(
    backend: Backend, case: AttentionCase, which: Pass, inputs: Sequence[AttentionInputs]
) -> list[Call]:
    attend = backend.prepare(case)
    return [
        make_call(attend, which, *(backend.view(x) for x in (one.q, one.k, one.v, one.dout)))
        for one in inputs
    ]


def make_call(attend: Callable[..., Tensor], which: Pass, *tensors: Tensor) -> Call:
    """One pass of `attend`; tensors: its inputs, q, k, v and what else has a gradient, then dout.
    For the backward the forward runs here, once.
    """
    *inputs, dout = tensors
    if which is Pass.forward:
        return lambda: attend(*inputs)
    out = attend(*inputs)
    return lambda: torch.autograd.grad(out, inputs, dout, retain_graph=True)


def peak_memory(call: Call, on_cuda: bool) -> int | None:
    """Most bytes allocated during the call, its results included, beyond what was there before."""
    if not on_cuda:
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def estimate(contender: Contender, on_cuda: bool) -> None:
    """How long a call takes, the device and the host, and from it how many make a sample."""
    contender.calls_per_sample = 3
    begin = time.perf_counter()
    sample = take_sample(contender, start=0, on_cuda=on_cuda)
    host_ms = (time.perf_counter() - begin) * 1e3 / contender.calls_per_sample
    contender.host_ms = min(MAX_HOST_MS, max(MIN_HOST_MS, host_ms))
    contender.estimate_ms = max(sample.milliseconds(), 1e-4)
    wanted = math.ceil(SAMPLE_MS / contender.estimate_ms)
    contender.calls_per_sample = min(MAX_CALLS_PER_SAMPLE, max(1, wanted))


def collect_samples(
    contenders: Sequence[Contender], on_cuda: bool, budget_ms: float
) -> list[list[float]]:
    """Milliseconds per call, one list per contender, all of the same length."""
    if not contenders:
        return []
    round_ms = sum(c.estimate_ms * c.calls_per_sample for c in contenders)
    rounds = math.ceil(budget_ms * len(contenders) / round_ms)
    rounds = min(MAX_ROUNDS, max(MIN_ROUNDS, rounds))
    cycle = rounds_of_a_cycle(len(contenders))
    rounds = -(-rounds // cycle) * cycle
    samples: list[list[Sample]] = [[] for _ in contenders]
    gc.collect()
    gc.disable()  # a collection inside a sample would be taken for the subject's own time
    try:
        for round_index, turn in interleave(len(contenders), rounds):
            with contenders[turn].subject.scope():
                start = round_index * contenders[turn].calls_per_sample
                samples[turn].append(take_sample(contenders[turn], start, on_cuda))
    finally:
        gc.enable()
    return [[sample.milliseconds() for sample in of_one] for of_one in samples]


def rounds_of_a_cycle(contenders: int) -> int:
    """After which the order of `interleave` has come out even."""
    return contenders if contenders % 2 == 0 else 2 * contenders


def interleave(contenders: int, rounds: int) -> Iterator[tuple[int, int]]:
    """(round, contender): each once a round; in a cycle of rounds each first, second, ... equally
    often, and each behind each other one, as what ran before costs clocks. (Williams, "Experimental
    designs balanced for the estimation of residual effects of treatments", 1949.)
    """
    # 0, 1, -1, 2, -2, ...: neighbours differ by another number each time.
    zigzag = [(place + 1) // 2 * (1 if place % 2 else -1) for place in range(contenders)]
    for round_index in range(rounds):
        order = [(turn + round_index) % contenders for turn in zigzag]
        # Of an odd number the neighbours come out even with those of the reverse.
        is_reversed = contenders % 2 == 1 and round_index // contenders % 2 == 1
        for turn in reversed(order) if is_reversed else order:
            yield round_index, turn


@dataclass(frozen=True)
class Sample:
    """A stretch of calls between two readings of the device's or the host's clock."""

    calls: int
    begin: torch.cuda.Event | float
    end: torch.cuda.Event | float

    def milliseconds(self) -> float:
        """Per call; waits for the device."""
        if isinstance(self.begin, float):
            return (self.end - self.begin) * 1e3 / self.calls
        self.end.synchronize()
        return self.begin.elapsed_time(self.end) / self.calls


def take_sample(contender: Contender, start: int, on_cuda: bool) -> Sample:
    """`calls_per_sample` calls on consecutive input sets; on CUDA they are only issued."""
    count = contender.calls_per_sample
    calls = [contender.calls[(start + i) % len(contender.calls)] for i in range(count)]
    if not on_cuda:
        begin = time.perf_counter()
        for call in calls:
            call()
        return Sample(count, begin, time.perf_counter())
    if contender.estimate_ms < 2 * contender.host_ms:
        torch.cuda._sleep(int(count * contender.host_ms * SLEEP_CYCLES_PER_MS))
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for call in calls:
        call()
    end.record()
    return Sample(count, begin, end)
