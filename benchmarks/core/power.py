"""Clock, power and energy of the current GPU while it is timed, where NVML can be read.

They need the package nvidia-ml-py. Without it, or without the right to read a figure, that figure
is None and nothing else changes.

A thread reads them all the while, and a reading counts for the turn in which it falls. The thread
waits most of the time and lets go of the interpreter while NVML works; a turn's calls are issued
ahead of the device, which does not notice.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

import torch

from benchmarks.core.turns import Turn

PERIOD_S = 0.01
# The energy counter moves in steps. Those that it made within a turn must span most of it.
LEAST_SPAN = 0.5


@dataclass(frozen=True)
class Reading:
    at: float  # seconds of time.perf_counter
    sm_clock_mhz: float | None
    watts: float | None
    joules: float | None  # since the driver was loaded


@dataclass(frozen=True)
class Power:
    """Of a contender's turns."""

    sm_clock_mhz: float | None = None  # median
    watts: float | None = None  # mean
    joules_per_call: float | None = None


class Gauge:
    """NVML's figures of one device."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self.nvml, self.handle = nvml, handle

    def read(self) -> Reading:
        return Reading(
            at=time.perf_counter(),
            sm_clock_mhz=self._attempt(self._sm_clock),
            watts=self._watts(),
            joules=self._attempt(self._joules),
        )

    def limit_watts(self) -> float | None:
        return self._attempt(self._limit)

    def _attempt(self, read: Callable[[], float]) -> float | None:
        try:
            return read()
        except (self.nvml.NVMLError, AttributeError):  # of older drivers, of older packages
            return None

    def _sm_clock(self) -> float:
        return float(self.nvml.nvmlDeviceGetClockInfo(self.handle, self.nvml.NVML_CLOCK_SM))

    def _watts(self) -> float | None:
        now = self._attempt(self._watts_now)
        return now if now is not None else self._attempt(self._watts_of_a_second)

    def _watts_now(self) -> float:
        (value,) = self.nvml.nvmlDeviceGetFieldValues(
            self.handle, [self.nvml.NVML_FI_DEV_POWER_INSTANT]
        )
        if value.nvmlReturn != self.nvml.NVML_SUCCESS:
            raise self.nvml.NVMLError(value.nvmlReturn)
        return value.value.uiVal / 1e3

    def _watts_of_a_second(self) -> float:
        """Which the driver averages, on most devices, over ten turns."""
        return self.nvml.nvmlDeviceGetPowerUsage(self.handle) / 1e3

    def _joules(self) -> float:
        return self.nvml.nvmlDeviceGetTotalEnergyConsumption(self.handle) / 1e3

    def _limit(self) -> float:
        return self.nvml.nvmlDeviceGetEnforcedPowerLimit(self.handle) / 1e3


def current_gauge() -> Gauge | None:
    """Of the current CUDA device; None where NVML cannot be read."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    uuid = getattr(properties, "uuid", None)
    return None if uuid is None else open_gauge(f"GPU-{str(uuid).removeprefix('GPU-')}")


@cache
def open_gauge(uuid: str) -> Gauge | None:
    """By UUID: NVML counts all devices, torch those of CUDA_VISIBLE_DEVICES."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        return Gauge(pynvml, pynvml.nvmlDeviceGetHandleByUUID(uuid))
    except pynvml.NVMLError:
        return None


class Monitor:
    """Readings of a gauge while the context is entered; none without a gauge."""

    def __init__(self, gauge: Gauge | None, period_s: float = PERIOD_S) -> None:
        self.gauge, self.period_s = gauge, period_s
        self.readings: list[Reading] = []
        self._leaves = threading.Event()
        self._thread = threading.Thread(target=self._read_on, daemon=True)

    def __enter__(self) -> Monitor:
        if self.gauge is not None:
            self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        if self.gauge is not None:
            self._leaves.set()
            self._thread.join()

    @property
    def counts_joules(self) -> bool:
        return self.gauge is not None and self.gauge.read().joules is not None

    def _read_on(self) -> None:
        while not self._leaves.wait(self.period_s):
            self.readings.append(self.gauge.read())


def power_of(
    readings: Sequence[Reading], turns: Sequence[Turn], joule_turns: Sequence[Turn] = ()
) -> Power:
    """Clock and watts of `turns`, energy of the longer `joule_turns`."""
    within = [reading for turn in turns for reading in during(turn, readings)]
    clocks = [reading.sm_clock_mhz for reading in within if reading.sm_clock_mhz is not None]
    watts = [reading.watts for reading in within if reading.watts is not None]
    found = [joules_per_call(readings, turn) for turn in joule_turns]
    joules = [each for each in found if each is not None]
    return Power(
        sm_clock_mhz=statistics.median(clocks) if clocks else None,
        watts=statistics.fmean(watts) if watts else None,
        joules_per_call=statistics.median(joules) if joules else None,
    )


def during(turn: Turn, readings: Sequence[Reading]) -> list[Reading]:
    """None of a turn in which the device slept between its calls."""
    if not turn.is_continuous:
        return []
    return [reading for reading in readings if turn.begin <= reading.at <= turn.end]


def joules_per_call(readings: Sequence[Reading], turn: Turn) -> float | None:
    """From the counter's first step within the turn to its last one: what it shows between steps is
    of some time before.
    """
    counted = [reading for reading in during(turn, readings) if reading.joules is not None]
    steps = [after for before, after in pairwise(counted) if after.joules != before.joules]
    if len(steps) < 2:
        return None
    seconds = steps[-1].at - steps[0].at
    if seconds < LEAST_SPAN * (turn.end - turn.begin):
        return None
    watts = (steps[-1].joules - steps[0].joules) / seconds
    return watts * turn.milliseconds * 1e-3
