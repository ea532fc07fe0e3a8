"""The one rule by which a result counts as close enough to the fp64 reference.

A fixed tolerance is wrong for attention: errors grow with |v|, shrink with the number of keys, and
one that passes the smallest case hides a wrong mask in the largest. The yardstick is the naive
computation in the same dtype on the same inputs (reference.low_precision), which rounds scores,
probabilities and gradients to that dtype, and its results to that of what is judged, where a sink
is coarser than q. A kernel that keeps the scores and all sums in fp32 makes about half its errors,
so:

    max |x - ref|  <=  2 * max |naive - ref|  + floor
    mean |x - ref| <=  1 * mean |naive - ref| + floor / 8

The maximum is one unlucky element out of many, hence the 2. The mean hardly varies and is what
finds systematic errors: leaving one key of 64 out stays under twice the naive mean in bf16, a scale
off by 1 % is 4 times the naive mean in fp16 and hundreds of times what lse may be off by.

`floor` covers what the yardstick can miss by luck or by structure: one rounding of the largest
reference value (2^-8 of it in bf16, 2^-11 in fp16), the spacing of the dtype's subnormals, and for
dq and dk the fp32 rounding that is left where the exact gradient cancels to nothing
(AttentionResult.noise). With few elements neither statistic is stable: both factors grow by
4 / sqrt(rows), 12 % for a thousand rows, where a row is one query or key of one head that is not 0,
and its elements share the error of one softmax. What `floor` may do to a mean grows so that it is
all of it for one row, whose mean is its maximum.

lse and max_logits stay in fp32 whatever the inputs, so they are held to fp32: 2^-19 of 1 + |lse|,
about 16 units in the last place, for a sum of up to thousands of exponentials, and the rounding of
the dot products in it. The mean is held to half of that, which grows with few rows as the factors
do: tensor cores cut sums off instead of rounding them, which took 0.6 of it for logits near 45,
sums of 256 terms.
Where the reference says -inf it must be exactly -inf, and `out` exactly 0.

NaN never passes: comparisons are written so that a NaN on either side fails, and the result must
be finite.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from tests.reference import AttentionResult

MAX_FACTOR = 2.0
MEAN_FACTOR = 1.0
FEW_ROWS = 4.0  # over the square root of the number of rows: what factors grow by
LSE_RELATIVE_ERROR = 2.0**-19
LSE_MEAN_FACTOR = 0.5
IN_FP32 = ("lse", "max_logits")


@dataclass(frozen=True)
class Closeness:
    """How one tensor compares. The ratios are of error to allowed error: above 1 fails."""

    name: str
    max_error: float
    max_ratio: float
    mean_error: float
    mean_ratio: float
    complaint: str | None = None  # what disqualifies the result whatever the ratios

    @property
    def passes(self) -> bool:
        return self.complaint is None and self.max_ratio <= 1.0 and self.mean_ratio <= 1.0

    def as_dict(self) -> dict[str, object]:
        return asdict(self)

    def __str__(self) -> str:
        text = (
            f"{self.name}: max error {self.max_error:.3g} ({self.max_ratio:.2f} of allowed), "
            f"mean error {self.mean_error:.3g} ({self.mean_ratio:.2f} of allowed)"
        )
        return f"{text}; {self.complaint}" if self.complaint else text


def compare(
    actual: AttentionResult, reference: AttentionResult, naive: AttentionResult
) -> list[Closeness]:
    """Compare what `actual` has with the reference, by the error of the naive result."""
    report = []
    expected, yardstick = reference.tensors(), naive.tensors()
    for name, x in actual.tensors().items():
        noise = reference.noise.get(name, 0.0)
        if name in IN_FP32:
            report.append(_compare_in_fp32(name, x, expected[name], noise))
        else:
            report.append(compare_tensor(name, x, expected[name], yardstick[name], noise))
    keyless = reference.lse == -math.inf
    # (B, Sq, Hq, D) and (B, Hq, Sq), or (total_q, Hq, D) and (Hq, total_q)
    if actual.out.shape == reference.out.shape and actual.out.transpose(-3, -2)[keyless].any():
        report.append(failure("out", "rows without a visible key are not 0"))
    return report


def assert_close(
    actual: AttentionResult, reference: AttentionResult, naive: AttentionResult
) -> list[Closeness]:
    """Raise AssertionError naming every tensor that is off; returns the comparisons."""
    report = compare(actual, reference, naive)
    failures = [str(item) for item in report if not item.passes]
    assert not failures, "\n".join(["not close to the reference:", *failures])
    return report


def compare_tensor(
    name: str, actual: Tensor, reference: Tensor, naive: Tensor, noise: float
) -> Closeness:
    """By the rule for tensors other than lse."""
    if actual.shape != reference.shape:
        return failure(name, f"shape {tuple(actual.shape)} is not {tuple(reference.shape)}")
    if actual.numel() == 0:
        return Closeness(name, 0.0, 0.0, 0.0, 0.0)
    limits = torch.finfo(actual.dtype)
    error = (actual.to(reference.dtype) - reference).abs_()
    naive_error = (naive.to(actual.dtype).to(reference.dtype) - reference).abs_()
    largest, rows, max_error, mean_error, max_naive, mean_naive = _on_host(
        torch.linalg.vector_norm(reference, math.inf),
        reference.any(-1).sum(),
        *(error.max(), error.mean(), naive_error.max(), naive_error.mean()),
    )
    if not math.isfinite(max_error) and not actual.isfinite().all():
        return failure(name, f"{int((~actual.isfinite()).sum())} elements are not finite")
    rounding = limits.eps / 2 * largest + limits.smallest_normal * limits.eps
    few_rows = FEW_ROWS / math.sqrt(max(1, rows))
    return _judge(
        name,
        max_error=max_error,
        max_allowed=(MAX_FACTOR + few_rows) * max_naive + rounding + noise,
        mean_error=mean_error,
        mean_allowed=(MEAN_FACTOR + few_rows) * mean_naive
        + (rounding + noise) * (1.0 + 7.0 * few_rows / FEW_ROWS) / 8,
    )


def _compare_in_fp32(name: str, actual: Tensor, reference: Tensor, noise: float) -> Closeness:
    if actual.shape != reference.shape:
        return failure(name, f"shape {tuple(actual.shape)} is not {tuple(reference.shape)}")
    if actual.numel() == 0:
        return Closeness(name, 0.0, 0.0, 0.0, 0.0)
    keyless = reference == -math.inf
    error = (actual.to(reference.dtype) - reference).abs().masked_fill(keyless, 0.0)
    allowed = LSE_RELATIVE_ERROR * (1.0 + reference.abs().masked_fill(keyless, 0.0))
    rows = (~keyless).sum().clamp(min=1).double()
    of_mean = LSE_MEAN_FACTOR * (1.0 + FEW_ROWS / rows.sqrt())
    elsewhere, max_error, mean_error, max_ratio, mean_ratio = _on_host(
        ((actual == -math.inf) != keyless).any(),
        *(error.max(), error.mean()),
        (error / (allowed + noise)).max(),
        (error / (of_mean * allowed + noise)).mean(),
    )
    if elsewhere:
        return failure(name, "-inf is not exactly where no key is visible")
    return Closeness(
        name,
        max_error=max_error,
        max_ratio=_nan_is_infinite(max_ratio),
        mean_error=mean_error,
        mean_ratio=_nan_is_infinite(mean_ratio),
    )


def _on_host(*numbers: Tensor) -> list[float]:
    """In one wait for the device."""
    found: list[float] = torch.stack([x.double() for x in numbers]).tolist()
    return found


def _judge(
    name: str, *, max_error: float, max_allowed: float, mean_error: float, mean_allowed: float
) -> Closeness:
    complaint = None
    if not (math.isfinite(max_allowed) and math.isfinite(mean_allowed)):
        complaint = "the reference or the naive computation is not finite, so nothing is shown"
    return Closeness(
        name,
        max_error=max_error,
        max_ratio=_nan_is_infinite(max_error / max_allowed),
        mean_error=mean_error,
        mean_ratio=_nan_is_infinite(mean_error / mean_allowed),
        complaint=complaint,
    )


def failure(name: str, complaint: str) -> Closeness:
    return Closeness(name, math.inf, math.inf, math.inf, math.inf, complaint)


def _nan_is_infinite(ratio: float) -> float:
    return math.inf if math.isnan(ratio) else ratio
