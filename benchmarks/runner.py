"""Times several backends on one case, interleaved, so that clocks and temperature hit all alike."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum

import torch
from backends import Backend, Unsupported, is_cuda
from cases import AttentionCase, AttentionInputs
from metrics import Pass, Timing

Call = Callable[[], object]

# A sample is one or more calls between two clock readings, long enough for the clock.
SAMPLE_MS = 0.5
MAX_CALLS_PER_SAMPLE = 20
MIN_ROUNDS, MAX_ROUNDS = 5, 100

# Calls shorter than this may end before the host has issued the next one: the device is then kept
# busy first, so that a sample holds no wait for the host.
SHORT_CALL_MS = 0.2
HOST_LEAD_MS_PER_CALL = 0.1
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


@dataclass
class Contender:
    """A backend set up for one case and pass: one call per input set."""

    backend: Backend
    calls: list[Call]
    peak_bytes: int | None = None
    calls_per_sample: int = 1
    estimate_ms: float = 0.0


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
    """Times all backends; about `budget_ms` of device time for each of them."""
    contenders, failures = [], {}
    for backend in backends:
        try:
            contenders.append(prepare_contender(backend, case, which, inputs))
        except Exception as error:
            failures[backend.name] = failure(case, which, backend, error)
    samples = collect_samples(contenders, which, is_cuda(case), budget_ms)
    measured = {
        contender.backend.name: Result(
            case,
            which,
            contender.backend.name,
            Status.ok,
            timing=Timing.of(values),
            peak_bytes=contender.peak_bytes,
        )
        for contender, values in zip(contenders, samples, strict=True)
    }
    return [(failures | measured)[backend.name] for backend in backends]


def failure(case: AttentionCase, which: Pass, backend: Backend, error: Exception) -> Result:
    """A backend that cannot run a case is a row of the table, not the end of the benchmark."""
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
    return Result(case, which, backend.name, status, reason=reason[0] if reason else repr(error))


def prepare_contender(
    backend: Backend, case: AttentionCase, which: Pass, inputs: Sequence[AttentionInputs]
) -> Contender:
    """Sets the backend up and runs it once on every input set, which also compiles and tunes it."""
    attend = backend.prepare(case)
    with backend.scope(), torch.set_grad_enabled(which is Pass.backward):
        calls = [make_call(backend, attend, which, one) for one in inputs]
        calls[0]()
        contender = Contender(backend, calls, peak_bytes=peak_memory(calls[0], is_cuda(case)))
        for call in calls:
            call()
        estimate(contender, is_cuda(case))
    return contender


def make_call(backend: Backend, attend: Callable, which: Pass, inputs: AttentionInputs) -> Call:
    q, k, v = (backend.view(x) for x in (inputs.q, inputs.k, inputs.v))
    if which is Pass.forward:
        return lambda: attend(q, k, v)
    out, dout = attend(q, k, v), backend.view(inputs.dout)
    return lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)


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
    """How long a call takes, and from it how many make a sample."""
    contender.calls_per_sample = 3
    sample = take_sample(contender, start=0, on_cuda=on_cuda)
    contender.estimate_ms = max(sample.milliseconds(), 1e-4)
    wanted = math.ceil(SAMPLE_MS / contender.estimate_ms)
    contender.calls_per_sample = min(MAX_CALLS_PER_SAMPLE, max(1, wanted))


def collect_samples(
    contenders: Sequence[Contender], which: Pass, on_cuda: bool, budget_ms: float
) -> list[list[float]]:
    """Milliseconds per call, one list per contender, all of the same length."""
    if not contenders:
        return []
    round_ms = sum(c.estimate_ms * c.calls_per_sample for c in contenders)
    rounds = math.ceil(budget_ms * len(contenders) / round_ms)
    rounds = min(MAX_ROUNDS, max(MIN_ROUNDS, rounds))
    samples: list[list[Sample]] = [[] for _ in contenders]
    gc.collect()
    gc.disable()  # a collection inside a sample would be taken for the backend's own time
    try:
        with torch.set_grad_enabled(which is Pass.backward):
            for round_index, turn in interleave(len(contenders), rounds):
                with contenders[turn].backend.scope():
                    start = round_index * contenders[turn].calls_per_sample
                    samples[turn].append(take_sample(contenders[turn], start, on_cuda))
    finally:
        gc.enable()
    return [[sample.milliseconds() for sample in of_one] for of_one in samples]


def interleave(contenders: int, rounds: int) -> Iterator[tuple[int, int]]:
    """(round, contender): each once a round, and each first, second, ... equally often."""
    for round_index in range(rounds):
        for turn in range(contenders):
            yield round_index, (round_index + turn) % contenders


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
    if contender.estimate_ms < SHORT_CALL_MS:
        torch.cuda._sleep(int(count * HOST_LEAD_MS_PER_CALL * SLEEP_CYCLES_PER_MS))
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for call in calls:
        call()
    end.record()
    return Sample(count, begin, end)
