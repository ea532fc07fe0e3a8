"""Derivatives of a rank's attention, for autograd and torch.func: reverse mode, and forward mode by
schemes in which a query meets all its keys in one call.

A rank's attention is a function of its own queries and of the keys of all ranks. Its tangents, as
its gradients, are of what all ranks have together: every rank calls with tangents, or none does.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from ..call import AttentionCall, Tangents
from ..cpu.tiles import sink_gradient
from .attention import (
    OfWhole,
    Work,
    gathered_backward,
    gathered_forward,
    gathered_jvp,
    merged_backward,
    merged_forward,
)
from .transforms import in_forward_mode

_OPERANDS = 7  # of ContextAttention


class ContextAttention(torch.autograd.Function):
    """(out, softmax_lse) of q (rows, heads_q, D), k and v (rows, heads_k, D), by a Work, whose
    settings have no tensors: torch.func unwraps operands alone.
    """

    @staticmethod
    def forward(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sink: Tensor | None,
        alibi_slopes: Tensor | None,
        rng_state: Tensor | None,
        work: Work,
    ) -> tuple[Tensor, Tensor]:
        run = merged_forward if work.schedule.merges else gathered_forward
        return run(work.given(alibi_slopes, rng_state), q, k, v, sink)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        *operands, ctx.work = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*operands, *output)

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> Any:
        if dout is None and dlse is None:
            return (None,) * _OPERANDS
        wants_dsink = ctx.needs_input_grad[3]
        run = gradients if is_compiling() else ContextGradients.apply
        found = run(ctx.work, wants_dsink, dout, dlse, *ctx.saved_tensors)
        return *found, *(None,) * (_OPERANDS - len(found))


class DualContextAttention(ContextAttention):
    """ContextAttention with forward mode, which torch.compile does not trace."""

    @staticmethod
    def forward(*operands: Any) -> tuple[Tensor, Tensor]:
        # In forward mode operators are Functions too, which see what requires grad even in here.
        detached: Any = [x.detach() if isinstance(x, Tensor) else x for x in operands]
        return ContextAttention.forward(*detached)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ContextAttention.setup_context(ctx, inputs, output)
        ctx.save_for_forward(*inputs[:-1], *output)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> Any:
        direction = tangents[:4]  # of q, k, v and sink
        if all(x is None for x in direction):
            return None, None
        return ContextTangents.apply(*direction, *ctx.saved_tensors, ctx.work)


def attend_in_context(*operands: Any) -> tuple[Tensor, Tensor]:
    """ContextAttention, differentiable in the modes that are there."""
    function = DualContextAttention if in_forward_mode() else ContextAttention
    found: tuple[Tensor, Tensor] = function.apply(*operands)
    return found


class ContextGradients(torch.autograd.Function):
    """Gradients of ContextAttention, which have no derivatives."""

    @staticmethod
    def forward(*operands: Any) -> tuple[Tensor | None, ...]:
        return gradients(*operands)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.scheme = inputs[0].scheme

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise NotImplementedError(no_second_derivative(ctx.scheme))

    @staticmethod
    def jvp(ctx: Any, *_: Any) -> Any:
        raise NotImplementedError(no_second_derivative(ctx.scheme))


class ContextTangents(torch.autograd.Function):
    """Tangents of ContextAttention's results, which have no derivatives."""

    @staticmethod
    def forward(
        tq: Tensor | None,
        tk: Tensor | None,
        tv: Tensor | None,
        tsink: Tensor | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sink: Tensor | None,
        alibi_slopes: Tensor | None,
        rng_state: Tensor | None,
        out: Tensor,
        softmax_lse: Tensor,
        work: Work,
    ) -> tuple[Tensor, Tensor]:
        of_forward = OfWhole(None, None, out, softmax_lse, rng_state)
        direction = Tangents(tq=tq, tk=tk, tv=tv, tsink=tsink)
        work = work.given(alibi_slopes, rng_state)
        return gathered_jvp(work, q, k, v, sink, of_forward, direction)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.scheme = inputs[-1].scheme

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise NotImplementedError(no_second_derivative(ctx.scheme))

    @staticmethod
    def jvp(ctx: Any, *_: Any) -> Any:
        raise NotImplementedError(no_second_derivative(ctx.scheme))


def gradients(
    work: Work,
    wants_dsink: bool,
    dout: Tensor | None,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink: Tensor | None,
    alibi_slopes: Tensor | None,
    rng_state: Tensor | None,
    out: Tensor,
    softmax_lse: Tensor,
) -> tuple[Tensor | None, ...]:
    """(dq, dk, dv, dsink) of this rank's rows."""
    dout = torch.zeros_like(out) if dout is None else dout
    run = merged_backward if work.schedule.merges else gathered_backward
    incoming = OfWhole(dout, dlse, out, softmax_lse, rng_state)
    found = run(work.given(alibi_slopes, rng_state), q, k, v, incoming)
    if sink is None or not wants_dsink:
        return *found, None
    softmax_d = (dout.to(softmax_lse.dtype) * out).sum(-1).t()
    softmax_d = softmax_d if dlse is None else softmax_d - dlse
    return *found, sink_gradient(AttentionCall(q, k, v, sink=sink), softmax_lse, softmax_d)


def no_second_derivative(scheme: str) -> str:
    return (
        f"scheme: context parallelism by {scheme!r} has first derivatives alone: its gradients and "
        "its forward-mode gradients cannot be differentiated"
    )
