"""What tests of the benchmarks share; they have the benchmarks' folder on their path."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.core.turns import Protocol
from benchmarks.peers.backends import Backend, TensorOrder
from tests.cases.attention import AttentionCase

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks/results"
RESULT_FILES = sorted(RESULTS.glob("*.json"))
needs_results = pytest.mark.skipif(not RESULT_FILES, reason="an sdist has no benchmarks/results")

SMALL = AttentionCase(
    batch=2,
    seqlen_q=16,
    seqlen_k=16,
    num_heads_q=4,
    num_heads_k=2,
    head_dim=16,
    dtype=torch.float32,
    device="cpu",
)

BRIEF = Protocol(turn_ms=0.2, budget_ms=0.0)  # four turns
BRIEF_OPTIONS = ["--turn-ms", "0.2", "--budget-ms", "0"]

TINY_GRID = ["--device", "cpu", "--dtype", "fp32", "--head-dims", "16", "--seqlens", "16", "32"]
TINY_GRID += ["--tokens", "32", "--hidden", "32", *BRIEF_OPTIONS]


def sdpa_like(name: str, attend: Any) -> Backend:
    return Backend(name, "for this test", lambda case: attend, TensorOrder.heads_first)
