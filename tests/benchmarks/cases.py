"""What tests of the benchmarks share: small problems, brief turns, times that are made up."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.core.metrics import Timing
from benchmarks.core.runner import Measurement, Status
from benchmarks.core.turns import Protocol
from benchmarks.peers.backends import Backend, TensorOrder
from tests.cases.attention import AttentionCase

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks/results"
RESULT_FILES = sorted(RESULTS.glob("*.json"))
needs_results = pytest.mark.skipif(not RESULT_FILES, reason="an sdist has no benchmarks/results")

SMALL = AttentionCase(2, 16, 16, 4, 2, 16, dtype=torch.float32, device="cpu")
BRIEF = Protocol(turn_ms=0.2, budget_ms=0.0, warm_up_ms=0.0)  # four turns
BRIEF_OPTIONS = "--turn-ms 0.2 --budget-ms 0"


def sdpa_like(name: str, attend: Any) -> Backend:
    return Backend(name, "for this test", lambda case: attend, TensorOrder.heads_first)


def fake_measure(milliseconds: dict[str, float]) -> Callable[..., list[Measurement]]:
    """runner.measure with these times; subjects without one are unsupported."""

    def measure(subjects: Any, **_: Any) -> list[Measurement]:
        return [
            Measurement(Status.ok, timing=Timing.of([milliseconds[x.name]] * 4))
            if x.name in milliseconds
            else Measurement(Status.unsupported, "no such thing")
            for x in subjects
        ]

    return measure
