"""Clock, power and energy: which turn a reading is of, and what happens without NVML."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from benchmarks.core import power, runner
from benchmarks.core.power import Gauge, Monitor, Power, Reading, power_of
from benchmarks.core.turns import Protocol, Subject, Turn


def reading(at: float, clock=None, watts=None, joules=None) -> Reading:
    return Reading(at, clock, watts, joules)


# Readings and turns


def test_a_reading_counts_for_the_turn_in_which_it_falls():
    """Those of lead-ins, and of other contenders' turns, do not."""
    mine = [Turn(1.0, begin=1.0, end=2.0), Turn(1.0, begin=5.0, end=6.0)]
    theirs = [Turn(1.0, begin=3.0, end=4.0)]
    readings = [
        reading(0.5, 1980.0, 300.0),
        reading(1.0, 1600.0, 690.0),
        reading(1.5, 1500.0, 700.0),
        reading(3.5, 1700.0, 680.0),
        reading(4.5, 1000.0, 100.0),
        reading(5.5, 1530.0, 695.0),
    ]
    assert power_of(readings, mine) == Power(sm_clock_mhz=1530.0, watts=pytest.approx(695.0))
    assert power_of(readings, theirs) == Power(sm_clock_mhz=1700.0, watts=680.0)
    assert power_of(readings, []) == power_of([], mine) == Power()


def test_what_cannot_be_read_is_none():
    turn = Turn(1.0, begin=0.0, end=1.0)
    assert power_of([reading(0.5, clock=1500.0)], [turn]) == Power(sm_clock_mhz=1500.0)
    assert power_of([reading(0.5, watts=500.0)], [turn], [turn]) == Power(watts=500.0)


def test_turns_with_sleeps_have_no_power():
    """The device did nothing for part of them."""
    turn = Turn(1.0, begin=0.0, end=1.0, is_continuous=False)
    readings = [reading(i / 10, 1500.0, 400.0, 40.0 * i) for i in range(11)]
    assert power_of(readings, [turn], [turn]) == Power()


# Energy


def counted(watts: float, step_s: float, until_s: float = 1.2) -> list[Reading]:
    """A counter that moves every `step_s`, read every 10 ms."""
    moments = [index / 100 for index in range(int(until_s * 100))]
    return [reading(at, joules=int(at / step_s + 1e-9) * step_s * watts) for at in moments]


@pytest.mark.parametrize("step_s", [0.01, 0.1, 0.13])
def test_energy_is_taken_between_the_counters_steps(step_s):
    """A step of 0.1 s is a tenth of a turn."""
    turn = Turn(milliseconds=2.0, begin=0.05, end=1.05)
    found = power_of(counted(700.0, step_s), [], [turn]).joules_per_call
    assert found == pytest.approx(700.0 * 2e-3, rel=0.02)


def test_energy_is_the_median_of_its_turns():
    readings = counted(700.0, 0.02)
    joule_turns = [Turn(ms, begin=0.1, end=1.1) for ms in (1.0, 2.0, 10.0)]
    assert power_of(readings, [], joule_turns).joules_per_call == pytest.approx(1.4, rel=0.02)


def test_a_counter_that_hardly_moved_says_nothing():
    turn = Turn(milliseconds=2.0, begin=0.05, end=1.05)
    assert power_of(counted(700.0, 0.3), [], [replace(turn, end=0.85)]).joules_per_call is None
    assert power_of(counted(700.0, 5.0), [], [turn]).joules_per_call is None


# NVML


class NVMLError(Exception):
    pass


def fake_nvml(**changes) -> SimpleNamespace:
    """pynvml, as far as it is used; the handle is the UUID."""

    def fields(handle, ids):
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


def refuse(*_arguments):
    raise NVMLError("Not Supported")


def test_a_gauge_reads_in_common_units():
    found = Gauge(fake_nvml(), "handle").read()
    assert (found.sm_clock_mhz, found.watts, found.joules) == (1530.0, 691.5, 12.5)
    assert Gauge(fake_nvml(), "handle").limit_watts() == 700.0


@pytest.mark.parametrize(
    "changes",
    [
        {"nvmlDeviceGetFieldValues": refuse},
        {"nvmlDeviceGetFieldValues": lambda *_: [SimpleNamespace(nvmlReturn=3)]},
    ],
)
def test_power_of_the_moment_may_be_missing(changes):
    assert Gauge(fake_nvml(**changes), "handle").read().watts == 650.0
    older = fake_nvml()
    del older.NVML_FI_DEV_POWER_INSTANT
    assert Gauge(older, "handle").read().watts == 650.0


def test_a_device_may_refuse_each_figure():
    functions = [name for name in vars(fake_nvml()) if name.startswith("nvmlDeviceGet")]
    found = Gauge(fake_nvml(**dict.fromkeys(functions, refuse)), "handle").read()
    assert (found.sm_clock_mhz, found.watts, found.joules) == (None, None, None)


@pytest.fixture
def visible_device(monkeypatch):
    """torch's current device is the second one of those visible; NVML may count others."""
    devices = [SimpleNamespace(uuid="aaa"), SimpleNamespace(uuid="bbb")]
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: devices[index])
    power.open_gauge.cache_clear()
    yield devices
    power.open_gauge.cache_clear()


def test_the_gauge_is_of_torchs_device(visible_device, monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml())
    assert power.current_gauge().handle == "GPU-bbb"
    visible_device[1].uuid = "GPU-ccc"
    assert power.current_gauge().handle == "GPU-ccc"


@pytest.mark.parametrize(
    "module",
    [None, fake_nvml(nvmlInit=refuse), fake_nvml(nvmlDeviceGetHandleByUUID=refuse)],
    ids=["no package", "no library", "unknown device"],
)
def test_without_nvml_there_is_no_gauge(visible_device, monkeypatch, module):
    monkeypatch.setitem(sys.modules, "pynvml", module)
    assert power.current_gauge() is None


def test_an_older_torch_names_no_device(visible_device):
    del visible_device[1].uuid
    assert power.current_gauge() is None


# Monitor


def test_a_monitor_reads_until_it_is_left():
    with Monitor(Gauge(fake_nvml(), "handle"), period_s=1e-4) as monitor:
        assert monitor.counts_joules
        deadline = time.perf_counter() + 30.0
        while len(monitor.readings) < 3 and time.perf_counter() < deadline:
            time.sleep(1e-3)
    count = len(monitor.readings)
    assert count >= 3 and monitor.readings[0].watts == 691.5
    assert not monitor._thread.is_alive()
    moments = [each.at for each in monitor.readings]
    assert moments == sorted(moments)


def test_a_monitor_without_a_gauge_reads_nothing():
    with Monitor(None) as monitor:
        assert not monitor.counts_joules
    assert monitor.readings == []


class FakeMonitor:
    """One reading in each turn: the clock is the number of the turn."""

    def __init__(self, _gauge) -> None:
        self.readings = []
        self.counts_joules = True

    def __enter__(self):
        return self

    def __exit__(self, *_error) -> None:
        pass


@pytest.mark.parametrize("joules", [False, True])
def test_figures_go_to_the_contender_whose_turn_it_was(monkeypatch, joules):
    monitors = []

    def monitor_of(gauge):
        monitors.append(FakeMonitor(gauge))
        return monitors[-1]

    asked = []

    def take_turns(contenders, rounds, turn_ms, on_cuda):
        """Of seconds, one contender after the other; the counter runs at 100 W per contender."""
        asked.append((rounds, turn_ms))
        taken = [[] for _ in contenders]
        for index in range(len(contenders) if rounds else 0):
            begin = 10.0 * len(asked) + 2 * index
            taken[index].append(Turn(5.0, begin, begin + 1.0))
            watts = 100.0 * (index + 1)
            monitors[0].readings += [
                Reading(begin + i / 10, 1000.0 + index, watts, watts * i / 10) for i in range(11)
            ]
        return taken

    monkeypatch.setattr(runner, "Monitor", monitor_of)
    monkeypatch.setattr(runner, "take_turns", take_turns)
    monkeypatch.setattr(runner, "warm_up", lambda *given: None)
    subjects = [Subject(name, lambda: [lambda: None]) for name in "ab"]
    protocol = Protocol(turn_ms=1.0, budget_ms=0.0, joules=joules)
    first, second = runner.measure(subjects, records=False, on_cuda=False, protocol=protocol)
    assert (first.power.sm_clock_mhz, second.power.sm_clock_mhz) == (1000.0, 1001.0)
    assert (first.power.watts, second.power.watts) == (pytest.approx(100), pytest.approx(200))
    found = [each.power.joules_per_call for each in (first, second)]
    assert found == ([pytest.approx(0.5), pytest.approx(1.0)] if joules else [None, None])
    assert asked == [(4, 1.0), (2 if joules else 0, 1000.0)]
