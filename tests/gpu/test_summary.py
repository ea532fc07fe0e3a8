"""The summary of a GPU test run: what it counts, whatever phase of a test an outcome is of."""

from __future__ import annotations

import json

import pytest

pytest_plugins = ["pytester"]

SETTINGS = """
import pytest
from tests.gpu import summary as gpu_summary

def pytest_addoption(parser):
    gpu_summary.add_option(parser)

def pytest_configure(config):
    config.addinivalue_line("markers", "gpu: counted")
    gpu_summary.register(config)

@pytest.fixture
def broken():
    raise RuntimeError("before the test")

@pytest.fixture
def finds_errors():
    yield
    raise ValueError("cache_seqlens: must be ...")
"""

TESTS = """
import pytest
from tests.gpu import summary as gpu_summary
from tests.reference.tolerance import Closeness

pytestmark = pytest.mark.gpu

def test_passes(request):
    gpu_summary.record(request.node, "case", [Closeness("out", 0.5, 0.25, 0.125, 0.0625)])

def test_fails():
    assert False

def test_setup(broken):
    pass

def test_teardown(finds_errors):
    pass

def test_fails_twice(finds_errors):
    assert False

def test_skips():
    pytest.skip("needs more")

@pytest.mark.skip(reason="needs more")
def test_is_skipped():
    pass
"""


def test_errors_around_tests_count(pytester: pytest.Pytester) -> None:
    """Those of a teardown too, where conftest.py looks for device errors."""
    pytester.makeconftest(SETTINGS)
    pytester.makepyfile(test_some=TESTS, test_others="def test_without_the_marker(): assert False")
    pytester.runpytest("--gpu-summary=summary", "-p", "no:cacheprovider")
    (file,) = (pytester.path / "summary").glob("*.json")
    summary = json.loads(file.read_text())
    assert summary["outcomes"] == {"passed": 2, "failed": 2, "error": 3, "skipped": 2}
    assert summary["failures"] == [
        *("test_some.py::test_fails", "test_some.py::test_setup (setup)"),
        *("test_some.py::test_teardown (teardown)", "test_some.py::test_fails_twice"),
        "test_some.py::test_fails_twice (teardown)",
    ]
    assert summary["skip_reasons"] == {"needs more": 2}
    assert summary["comparisons"] == 1
    assert summary["worst"]["out max"] == {"ratio": 0.25, "error": 0.5, "case": "case"}
    assert "3 error" in file.with_suffix(".md").read_text()
