"""Does a model compute the same with this package's attention as with torch's?"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from model import GPT, Attention, ours, sdpa, sdpa_math
from torch import Tensor
from training import Curve, autocast, device_of

if TYPE_CHECKING:
    from processes import Ranks

Gradients = dict[str, Tensor]
Step = tuple[float, Gradients]  # the loss, and the gradient of every parameter


@dataclass(frozen=True)
class StepAgreement:
    """One training step with our attention and with torch's, both held against higher precision."""

    loss_ours: float
    loss_sdpa: float
    gradient_difference: float  # largest over parameters of |ours - sdpa| / |sdpa|, 2-norms
    worst_parameter: str
    error_ours: float  # the same measure of each against the reference, for the worst parameter
    error_sdpa: float
    reference: str
    agrees: bool

    @property
    def loss_difference(self) -> float:
        return abs(self.loss_ours - self.loss_sdpa) / abs(self.loss_sdpa)

    def __str__(self) -> str:
        verdict = "agree" if self.agrees else "DISAGREE beyond rounding"
        return (
            f"one step, ours and torch SDPA {verdict}: loss {self.loss_ours:.6f} and "
            f"{self.loss_sdpa:.6f}, relative difference {self.loss_difference:.1e}; gradients "
            f"differ by at most {self.gradient_difference:.1e} ({self.worst_parameter}; from "
            f"{self.reference}: ours {self.error_ours:.1e}, SDPA {self.error_sdpa:.1e})"
        )


def compare_step(
    model: GPT, tokens: Tensor, targets: Tensor, ranks: Ranks | None = None
) -> StepAgreement:
    """Loss and gradients of one step on (tokens, targets), each (B, S), with both attentions. With
    ranks ours is of their parts, means over all of them, and torch's of the whole on each rank.
    """
    is_cuda = device_of(model).type == "cuda"
    dtype = torch.bfloat16 if is_cuda else torch.float32
    exact_model = copy.deepcopy(model).to(WIDER[dtype])

    with autocast(device_of(model)):
        if ranks is None:
            step_ours = step_gradients(model, ours, tokens, targets)
        else:
            parts = ranks.batch(tokens, targets)
            loss_ours, grads_ours = step_gradients(model, ranks.attention, *parts)
            loss_ours = ranks.mean(torch.tensor(loss_ours, device=device_of(model))).item()
            step_ours = loss_ours, {name: ranks.mean(x) for name, x in grads_ours.items()}
        step_sdpa = step_gradients(model, sdpa, tokens, targets)
    step_exact = step_gradients(exact_model, sdpa_math, tokens, targets)
    return judge(step_ours, step_sdpa, step_exact, dtype)


# In which a step of a dtype is computed to hold it against.
WIDER = {torch.bfloat16: torch.float32, torch.float32: torch.float64}


def judge(step_ours: Step, step_sdpa: Step, step_exact: Step, dtype: torch.dtype) -> StepAgreement:
    """Rounding differs between any two implementations. Ours, of this dtype, agrees when its
    distance from the same step in WIDER precision is at most twice torch's, plus one unit of
    rounding: the loss, and the gradient of every parameter.
    """
    (loss_ours, grads_ours), (loss_sdpa, grads_sdpa) = step_ours, step_sdpa
    loss_exact, grads_exact = step_exact
    unit = torch.finfo(dtype).eps
    differences = {name: distance(grads_ours[name], grads_sdpa[name]) for name in grads_sdpa}
    errors_ours = {name: distance(grads_ours[name], grads_exact[name]) for name in grads_exact}
    errors_sdpa = {name: distance(grads_sdpa[name], grads_exact[name]) for name in grads_exact}
    loss_is_close = abs(loss_ours - loss_exact) <= (
        2 * abs(loss_sdpa - loss_exact) + unit * abs(loss_exact)
    )
    grads_are_close = all(errors_ours[n] <= 2 * errors_sdpa[n] + unit for n in errors_ours)
    worst = max(differences, key=differences.__getitem__)
    return StepAgreement(
        loss_ours=loss_ours,
        loss_sdpa=loss_sdpa,
        gradient_difference=differences[worst],
        worst_parameter=worst,
        error_ours=errors_ours[worst],
        error_sdpa=errors_sdpa[worst],
        reference=str(WIDER[dtype]).removeprefix("torch."),
        agrees=loss_is_close and grads_are_close,
    )


def step_gradients(
    model: GPT,
    attention: Attention,
    tokens: Tensor,
    targets: Tensor,
    positions: Tensor | None = None,
) -> Step:
    """Loss and the gradient of every parameter; the model's own gradients and attention stay."""
    names, parameters = zip(*model.named_parameters(), strict=True)
    with model.using(attention):
        loss = model.loss(tokens, targets, positions)
        gradients = torch.autograd.grad(loss, parameters)
    return loss.item(), dict(zip(names, gradients, strict=True))


def distance(a: Tensor, b: Tensor) -> float:
    """|a - b| / |b| in the 2-norm; 0 when both vanish."""
    a, b = a.double(), b.double()
    difference, size = (a - b).norm().item(), b.norm().item()
    if difference == 0.0:
        return 0.0
    return difference / size if size > 0.0 else float("inf")


@dataclass(frozen=True)
class CurveAgreement:
    """Loss curves of equal runs: ours against SDPA, and SDPA against itself in other arithmetic."""

    difference: float  # largest |ours - sdpa| over the steps, nats per byte
    step: int
    control: float  # largest |sdpa-math - sdpa|: what another order of rounding does to a run
    validation_ours: float
    validation_sdpa: float
    agrees: bool

    def __str__(self) -> str:
        verdict = "agree" if self.agrees else "DISAGREE beyond rounding"
        return (
            f"loss curves of ours and torch SDPA {verdict}: largest difference "
            f"{self.difference:.2e} at step {self.step} (SDPA's own math path differs from SDPA by "
            f"{self.control:.2e}); validation loss {self.validation_ours:.4f} and "
            f"{self.validation_sdpa:.4f}"
        )


# Training amplifies rounding: two runs that differ in the last bit drift apart step by step, and
# the largest drift of two such pairs is itself random. Below the second figure nothing is wrong.
DRIFT_FACTOR = 3.0
DRIFT_FLOOR = 0.02  # nats per byte


def compare_curves(curve_ours: Curve, curve_sdpa: Curve, curve_control: Curve) -> CurveAgreement:
    """Compares runs of equal length that differ in the attention implementation alone."""
    loss_ours, loss_sdpa, loss_control = (
        torch.tensor(curve.train, dtype=torch.float64)
        for curve in (curve_ours, curve_sdpa, curve_control)
    )
    difference = (loss_ours - loss_sdpa).abs()
    control = (loss_control - loss_sdpa).abs().max().item()
    return CurveAgreement(
        difference=difference.max().item(),
        step=int(difference.argmax()) + 1,
        control=control,
        validation_ours=curve_ours.validation[-1][1],
        validation_sdpa=curve_sdpa.validation[-1][1],
        agrees=bool((difference <= max(DRIFT_FACTOR * control, DRIFT_FLOOR)).all()),
    )
