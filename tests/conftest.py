"""Test settings: which tests can run here, seeds, and the record of errors for the summary of a GPU
run.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from flash_attn_cuda import check_device_errors
from tests.cases.harness import DEVICE, ON_CPU, Check
from tests.cases.matrix import AnyCase, Call, judge
from tests.context_parallel.ranks import Ranks
from tests.gpu import summary as gpu_summary
from tests.gpu.gpus import gpus_of_worker, visible_gpus
from tests.reference.tolerance import Closeness


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Operations of microseconds on several threads mostly wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def pytest_addoption(parser: pytest.Parser) -> None:
    gpu_summary.add_option(parser)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs a CUDA device and the compiled extension")
    config.addinivalue_line(
        "markers", "cuda_only: a gpu test that the CPU backend cannot stand in for"
    )
    gpu_summary.register(config)
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    if worker is not None and not ON_CPU and torch.cuda.device_count() > 1:
        # Before CUDA starts, so that device 0 is another for every worker.
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus_of_worker(worker, visible_gpus()))


# Rooms whose tests start other programs come first, so that no worker ends on a long one.
FIRST_ROOMS = ("host", "examples", "building", "context_parallel", "benchmarks", "surfaces")
# Where modules keep processes, objects, a model or a tree to build: one worker runs a module.
KEEPING = ("host", "examples", "context_parallel", "building/test_wheel", "surfaces/test_.*ring")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """In place of pytest-xdist's own groups, which 3.8 loses with pytest 9.2."""
    if config.getoption("dist") != "loadgroup":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class ByModule(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            path = nodeid.partition("::")[0]
            return path if re.search(f"/({'|'.join(KEEPING)})", path) else nodeid

    return ByModule(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=_turn)
    reason = _no_gpu_reason()
    for item in items:
        if item.get_closest_marker("gpu") is None:
            continue
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=reason))
        elif ON_CPU and item.get_closest_marker("cuda_only") is not None:
            item.add_marker(pytest.mark.skip(reason="needs a real CUDA device"))


def _turn(item: pytest.Item) -> int:
    """When a test's room has its turn."""
    room = item.path.parent.name
    return FIRST_ROOMS.index(room) if room in FIRST_ROOMS else len(FIRST_ROOMS)


def pytest_report_teststatus(report: pytest.TestReport) -> tuple[str, str, str] | None:
    """A skipped test is counted and leaves no letter: without a GPU there are thousands."""
    return (
        ("skipped", "", "SKIPPED") if report.skipped and not hasattr(report, "wasxfail") else None
    )


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Why tests were skipped, in a line a reason. Failures follow, in pytest's own summary."""
    skipped = terminalreporter.getreports("skipped")
    for reason, count in Counter(map(gpu_summary.skip_reason, skipped)).most_common():
        terminalreporter.write_line(f"skipped {count:5}: {reason}")


def _no_gpu_reason() -> str | None:
    """Why gpu tests cannot run here, or None when they can."""
    if ON_CPU:
        return None
    from flash_attn_cuda import cuda_unavailable_reason

    return cuda_unavailable_reason()


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _no_device_error_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """A bad length that a test's kernels met is that test's error, not a later one's."""
    yield
    if not ON_CPU and request.node.get_closest_marker("gpu") is not None:
        check_device_errors()


@pytest.fixture
def device() -> str:
    """The device of the GPU tests: cuda, or cpu where the CPU backend stands in."""
    return DEVICE


@pytest.fixture
def check(request: pytest.FixtureRequest) -> Check:
    """check(case, ...): what matrix.judge does with a case or a call; its errors are recorded."""

    def run(case: AnyCase | Call, **options: Any) -> list[Closeness]:
        if isinstance(case, Call):
            case, options = case.case, dict(case.options) | options
        try:
            report = judge(case, **options)
        except AssertionError as error:
            raise AssertionError(f"{case}: {error}") from error
        gpu_summary.record(request.node, str(case), report)
        return report

    return run


@pytest.fixture(scope="session")
def two() -> Iterator[Ranks]:
    ranks = Ranks(2)
    yield ranks
    ranks.stop()


@pytest.fixture(scope="session")
def four() -> Iterator[Ranks]:
    ranks = Ranks(4)
    yield ranks
    ranks.stop()
