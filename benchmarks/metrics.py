"""What is counted and how it is summarised: the work of a case, statistics of samples, ratios."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from cases import AttentionCase


class Pass(str, Enum):
    forward = "forward"
    backward = "backward"


def operations(case: AttentionCase, which: Pass) -> int:
    """Floating-point operations of the matrix products on visible query-key pairs.

    4 * pairs * head_dim per head forward, 2.5 times that backward; a causal mask leaves half of a
    square and half of its diagonal.
    """
    return case.forward_flops() if which is Pass.forward else case.backward_flops()


def least_traffic(case: AttentionCase, which: Pass) -> int:
    """Bytes that must cross device memory at least: every input read, every output written once."""
    return case.forward_bytes() if which is Pass.forward else case.backward_bytes()


@dataclass(frozen=True)
class Timing:
    """Statistics of one cell's samples, in milliseconds per call."""

    median_ms: float
    low_ms: float  # first quartile
    high_ms: float  # third quartile
    samples: int

    @classmethod
    def of(cls, samples_ms: Sequence[float]) -> Timing:
        return cls(
            median_ms=quantile(samples_ms, 0.5),
            low_ms=quantile(samples_ms, 0.25),
            high_ms=quantile(samples_ms, 0.75),
            samples=len(samples_ms),
        )

    def teraflops(self, case: AttentionCase, which: Pass) -> float:
        """10^12 operations per second."""
        return operations(case, which) / self.median_ms / 1e9

    def gigabytes_per_second(self, case: AttentionCase, which: Pass) -> float:
        """10^9 bytes of least traffic per second: a lower bound of what the memory did."""
        return least_traffic(case, which) / self.median_ms / 1e6


def quantile(values: Sequence[float], fraction: float) -> float:
    """Linear interpolation between the closest ranks."""
    if not values:
        raise ValueError("values must hold at least one number, got none")
    ordered = sorted(values)
    position = fraction * (len(ordered) - 1)
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (position - below) * (ordered[above] - ordered[below])


def geometric_mean(values: Iterable[float]) -> float:
    logarithms = [math.log(value) for value in values]
    if not logarithms:
        raise ValueError("values must hold at least one number, got none")
    return math.exp(sum(logarithms) / len(logarithms))
