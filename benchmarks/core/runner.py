"""Sets up what is to be timed, has it timed in turns (turns.py) and says what became of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial

import torch
from torch import Tensor

from benchmarks.core.metrics import Pass, Timing
from benchmarks.core.power import Monitor, Power, current_gauge, power_of
from benchmarks.core.turns import (
    JOULES_ROUNDS,
    JOULES_TURN_MS,
    Call,
    Contender,
    Protocol,
    Subject,
    estimate,
    rounds_for,
    take_turns,
    time_alike,
    warm_up,
)
from benchmarks.peers.backends import Backend, Unsupported, is_cuda
from tests.cases.attention import AttentionCase, AttentionInputs

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
class Measurement:
    """What became of a subject. Without status ok there is a reason and no figures."""

    status: Status
    reason: str | None = None
    timing: Timing | None = None
    peak_bytes: int | None = None  # most memory one call held beyond its inputs; CUDA only
    power: Power = field(default_factory=Power)


@dataclass(frozen=True)
class Result:
    """What became of one backend on one case and pass."""

    case: AttentionCase
    which: Pass
    backend: str
    measurement: Measurement
    check: dict[str, object] | None = None  # refcheck's verdict

    @property
    def status(self) -> Status:
        return self.measurement.status

    @property
    def reason(self) -> str | None:
        return self.measurement.reason

    @property
    def timing(self) -> Timing | None:
        return self.measurement.timing


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
    protocol: Protocol,
) -> list[Result]:
    """Times all backends on one case."""
    subjects = [
        Subject(backend.name, partial(make_calls, backend, case, which, inputs), backend.scope)
        for backend in backends
    ]
    measured = measure(
        subjects, records=which is Pass.backward, on_cuda=is_cuda(case), protocol=protocol
    )
    return [
        Result(case, which, subject.name, measurement)
        for subject, measurement in zip(subjects, measured, strict=True)
    ]


def measure(
    subjects: Sequence[Subject], *, records: bool, on_cuda: bool, protocol: Protocol
) -> list[Measurement]:
    """One per subject, all timed in turns; with `records` calls are recorded for autograd."""
    contenders: list[Contender] = []
    outcomes: list[Contender | Measurement] = []
    with torch.set_grad_enabled(records):
        for subject in subjects:
            try:
                contenders.append(set_up(subject, protocol.turn_ms, on_cuda))
                outcomes.append(contenders[-1])
            except Exception as error:
                outcomes.append(failure(error))
        figures = iter(time_all(contenders, on_cuda, protocol))
    return [outcome if isinstance(outcome, Measurement) else next(figures) for outcome in outcomes]


def time_all(
    contenders: Sequence[Contender], on_cuda: bool, protocol: Protocol
) -> list[Measurement]:
    """One per contender."""
    time_alike(contenders)
    with Monitor(current_gauge() if on_cuda else None) as monitor:
        if on_cuda:
            warm_up(contenders, protocol, on_cuda)
        rounds = rounds_for(contenders, protocol)
        turns = take_turns(contenders, rounds, protocol.turn_ms, on_cuda)
        rounds = JOULES_ROUNDS if protocol.joules and monitor.counts_joules else 0
        joule_turns = take_turns(contenders, rounds, JOULES_TURN_MS, on_cuda)
    return [
        Measurement(
            Status.ok,
            timing=Timing.of([turn.milliseconds for turn in short]),
            peak_bytes=contender.peak_bytes,
            power=power_of(monitor.readings, short, long),
        )
        for contender, short, long in zip(contenders, turns, joule_turns, strict=True)
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


def set_up(subject: Subject, turn_ms: float, on_cuda: bool) -> Contender:
    """Prepares the subject and runs its calls once each, which also compiles and tunes them."""
    with subject.scope():
        calls = subject.prepare()
        calls[0]()
        contender = Contender(subject, calls, peak_bytes=peak_memory(calls[0], on_cuda))
        for call in calls:
            call()
        estimate(contender, turn_ms, on_cuda)
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
