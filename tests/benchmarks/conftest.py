"""Calls of benchmarks are small."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module", autouse=True)
def _one_thread(one_thread: None) -> None:
    pass
