"""Clock, power and energy: which turn a reading is of, and what happens without NVML."""

from __future__ import annotations

import sys
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.core import power, runner
from benchmarks.core.power import Gauge, Monitor, Power, Reading, power_of
from benchmarks.core.turns import Protocol, Subject, Turn


def reading(at: float, clock: float | None, watts: float | None) -> Reading:
    return Reading(at, clock, watts, None)


def test_a_reading_counts_for_the_turn_in_which_it_falls() -> None:
    """Those of lead-ins, of other contenders' turns and of turns with sleeps do not."""
    mine = [Turn(1.0, begin=1.0, end=2.0), Turn(1.0, begin=5.0, end=6.0)]
    readings = [
        reading(0.5, 1980.0, 300.0),
        reading(1.0, 1600.0, 690.0),
        reading(1.5, 1500.0, 700.0),
        reading(3.5, 1700.0, None),
        reading(5.5, 1530.0, 695.0),
    ]
    assert power_of(readings, mine) == Power(sm_clock_mhz=1530.0, watts=pytest.approx(695.0))
    assert power_of(readings, [Turn(1.0, 3.0, 4.0)]) == Power(sm_clock_mhz=1700.0)
    asleep = [Turn(1.0, begin=1.0, end=2.0, is_continuous=False)]
    assert power_of(readings, []) == power_of([], mine) == power_of(readings, asleep) == Power()


def counted(watts: float, step_s: float) -> list[Reading]:
    """A counter that moves every `step_s`, read every 10 ms."""
    moments = [index / 100 for index in range(120)]
    joules = (int(at / step_s + 1e-9) * step_s * watts for at in moments)
    return [Reading(at, None, None, x) for at, x in zip(moments, joules, strict=True)]


@pytest.mark.parametrize("step_s", [0.01, 0.1, 0.13])
def test_energy_is_taken_between_the_counters_steps(step_s: float) -> None:
    """A step of 0.1 s is a tenth of a turn. Of several turns the median counts."""
    turns = [Turn(milliseconds, begin=0.05, end=1.05) for milliseconds in (1.0, 2.0, 10.0)]
    found = power_of(counted(700.0, step_s), [], turns).joules_per_call
    assert found == pytest.approx(700.0 * 2e-3, rel=0.02)


# NVML


class NVMLError(Exception):
    pass


def fake_nvml(**changes: Any) -> SimpleNamespace:
    """pynvml, as far as it is used; the handle is the UUID."""

    def fields(handle: str, ids: list[int]) -> list[SimpleNamespace]:
        assert ids == [186]
        return [SimpleNamespace(nvmlReturn=0, value=SimpleNamespace(uiVal=691_500))]

    functions = {
        "NVMLError": NVMLError,
        "NVML_SUCCESS": 0,
        "NVML_CLOCK_SM": 1,
        "NVML_FI_DEV_POWER_INSTANT": 186,
        "nvmlInit": lambda: None,
        "nvmlDeviceGetHandleByUUID": lambda uuid: uuid,
        "nvmlDeviceGetClockInfo": lambda handle, which: {1: 1530}[which],
        "nvmlDeviceGetFieldValues": fields,
        "nvmlDeviceGetPowerUsage": lambda handle: 650_000,
        "nvmlDeviceGetTotalEnergyConsumption": lambda handle: 12_500,
        "nvmlDeviceGetEnforcedPowerLimit": lambda handle: 700_000,
    }
    return SimpleNamespace(**(functions | changes))


def refuse(*_: Any) -> None:
    raise NVMLError("Not Supported")


def test_a_gauge_reads_in_common_units() -> None:
    """And does without what a device refuses, or an older package lacks."""
    gauge = Gauge(fake_nvml(), "handle")
    found = gauge.read()
    assert (found.sm_clock_mhz, found.watts, found.joules) == (1530.0, 691.5, 12.5)
    assert gauge.limit_watts() == 700.0
    older = fake_nvml()
    del older.NVML_FI_DEV_POWER_INSTANT
    failed = fake_nvml(nvmlDeviceGetFieldValues=lambda *_: [SimpleNamespace(nvmlReturn=3)])
    for nvml in (older, failed, fake_nvml(nvmlDeviceGetFieldValues=refuse)):
        assert Gauge(nvml, "handle").read().watts == 650.0
    functions = [name for name in vars(fake_nvml()) if name.startswith("nvmlDeviceGet")]
    found = Gauge(fake_nvml(**dict.fromkeys(functions, refuse)), "handle").read()
    assert (found.sm_clock_mhz, found.watts, found.joules) == (None, None, None)


def test_the_gauge_is_of_torchs_device(monkeypatch) -> None:
    """The second one of those visible; NVML may count others. Without NVML there is none."""
    devices = [SimpleNamespace(uuid="aaa"), SimpleNamespace(uuid="bbb")]
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: devices[index])

    def gauge_with(module: Any) -> Gauge | None:
        power.open_gauge.cache_clear()
        monkeypatch.setitem(sys.modules, "pynvml", module)
        return power.current_gauge()

    found = gauge_with(fake_nvml())
    assert found is not None and found.handle == "GPU-bbb"
    refusing = (fake_nvml(**{x: refuse}) for x in ("nvmlInit", "nvmlDeviceGetHandleByUUID"))
    assert [gauge_with(module) for module in (None, *refusing)] == [None] * 3
    del devices[1].uuid  # of an older torch
    assert gauge_with(fake_nvml()) is None
    power.open_gauge.cache_clear()


def test_a_monitor_reads_until_it_is_left() -> None:
    with Monitor(Gauge(fake_nvml(), "handle"), period_s=1e-4) as monitor:
        assert monitor.counts_joules
        deadline = time.perf_counter() + 30.0
        while len(monitor.readings) < 3 and time.perf_counter() < deadline:
            time.sleep(1e-3)
    moments = [each.at for each in monitor.readings]
    assert len(moments) >= 3 and moments == sorted(moments)
    assert not monitor._thread.is_alive()
    with Monitor(None) as monitor:
        assert not monitor.counts_joules
    assert monitor.readings == []


@pytest.mark.parametrize("joules", [False, True])
def test_figures_go_to_the_contender_whose_turn_it_was(monkeypatch, joules: bool) -> None:
    """The clock is the number of the contender; turns are of seconds, one after the other."""
    monitor, asked = Monitor(None), []
    monkeypatch.setattr(Monitor, "counts_joules", True)

    def take_turns(contenders: Any, rounds: int, turn_ms: float, on_cuda: bool) -> Any:
        asked.append((rounds, turn_ms))
        taken: list[list[Turn]] = [[] for _ in contenders]
        for index in range(len(contenders) if rounds else 0):
            begin, watts = 10.0 * len(asked) + 2 * index, 100.0 * (index + 1)
            taken[index].append(Turn(5.0, begin, begin + 1.0))
            monitor.readings += [
                Reading(begin + i / 10, 1000.0 + index, watts, watts * i / 10) for i in range(11)
            ]
        return taken

    monkeypatch.setattr(runner, "Monitor", lambda gauge: monitor)
    monkeypatch.setattr(runner, "take_turns", take_turns)
    subjects = [Subject(name, lambda: [lambda: None]) for name in "ab"]
    protocol = Protocol(turn_ms=1.0, budget_ms=0.0, joules=joules)
    found = runner.measure(subjects, records=False, on_cuda=False, protocol=protocol)
    assert [each.power.sm_clock_mhz for each in found] == [1000.0, 1001.0]
    assert [each.power.watts for each in found] == [pytest.approx(100), pytest.approx(200)]
    energy = [pytest.approx(0.5), pytest.approx(1.0)] if joules else [None, None]
    assert [each.power.joules_per_call for each in found] == energy
    assert asked == [(4, 1.0), (2 if joules else 0, 1000.0)]
