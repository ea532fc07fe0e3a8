"""What is counted and how it is summarised: the work of a case, statistics of samples, ratios."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from tests.cases.attention import AttentionCase, VarlenCase


class Pass(str, Enum):
    forward = "forward"
    backward = "backward"


def operations(case: AttentionCase | VarlenCase, which: Pass) -> int:
    """Floating-point operations of the matrix products on visible query-key pairs.

    2 * pairs * (D + Dv) per head forward, 2 * pairs * (3 D + 2 Dv) backward, D the head dim of
    queries and keys and Dv that of values; a causal mask leaves half of a square and half of its
    diagonal. Packed sequences: the sum over them.
    """
    if isinstance(case, VarlenCase):
        return sum(operations(sequence, which) for sequence in sequences(case))
    return case.forward_flops() if which is Pass.forward else case.backward_flops()


def sequences(case: VarlenCase) -> Iterator[AttentionCase]:
    """Each sequence as a problem of its own, of the rows that take part."""
    used_q = case.lengths_q if case.used_q is None else case.used_q
    used_k = case.keys if case.used_k is None else case.used_k
    leftpad = (0,) * case.batch if case.leftpad is None else case.leftpad
    for seqlen_q, end, begin in zip(used_q, used_k, leftpad, strict=True):
        yield AttentionCase(
            batch=1,
            seqlen_q=seqlen_q,
            seqlen_k=end - begin,
            num_heads_q=case.num_heads_q,
            num_heads_k=case.num_heads_k,
            head_dim=case.head_dim,
            head_dim_v=case.head_dim_v,
            causal=case.causal,
            window=case.window,
        )


def least_traffic(case: AttentionCase, which: Pass) -> int:
    """Bytes that must cross device memory at least: every input read, every output written once."""
    return case.forward_bytes() if which is Pass.forward else case.backward_bytes()


@dataclass(frozen=True)
class Timing:
    """Statistics of one cell's turns, in milliseconds per call."""

    median_ms: float
    low_ms: float  # first quartile
    high_ms: float  # third quartile
    samples: int
    of_rounds: tuple[float, ...] = ()  # a turn of each round, in their order

    @classmethod
    def of(cls, samples_ms: Sequence[float]) -> Timing:
        return cls(
            median_ms=quantile(samples_ms, 0.5),
            low_ms=quantile(samples_ms, 0.25),
            high_ms=quantile(samples_ms, 0.75),
            samples=len(samples_ms),
            of_rounds=tuple(samples_ms),
        )

    def divided_by(self, count: int) -> Timing:
        """Of one of `count` equal parts of a call."""
        return Timing(
            self.median_ms / count,
            self.low_ms / count,
            self.high_ms / count,
            self.samples,
            tuple(sample / count for sample in self.of_rounds),
        )

    def over(self, other: Timing) -> float:
        """Time over that of what was timed in the same rounds: the median of the rounds' ratios, in
        which clocks that change from round to round are above and below the stroke.
        """
        ratios = [a / b for a, b in zip(self.of_rounds, other.of_rounds, strict=True)]
        return quantile(ratios, 0.5)

    def teraflops(self, case: AttentionCase | VarlenCase, which: Pass) -> float:
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
