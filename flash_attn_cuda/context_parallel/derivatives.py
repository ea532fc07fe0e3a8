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

from ..call.fields import Tangents
from .attention import (
    OfWhole,
    Work,
    attend_to_keys,
    gathered_jvp,
    gradient_of_sink,
    gradients_of_rows,
)
from .transforms import in_forward_mode
from .ulysses import Kept, exchanged_backward, exchanged_forward, exchanged_jvp

_OPERANDS = 7  # of ContextAttention


class ContextAttention(torch.autograd.Function):
    """A Found of q (rows, heads_q, D), k and v (rows, heads_k, D), by a Work, whose settings have
    no tensors: torch.func unwraps operands alone. Where ranks share out the heads, out, softmax_lse
    if the work returns it, and behind these what derivatives read: nobody else does, so that it has
    no gradients. max_logits, the last of all, have none.
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
    ) -> tuple[Tensor, ...]:
        work = work.given(alibi_slopes, rng_state)
        if work.across is None:
            return attend_to_keys(work, q, k, v, sink)
        results, kept, max_logits = exchanged_forward(work, q, k, v, sink)
        return *results, *kept, max_logits

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.work, ctx.count = inputs[-1], len(output)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(output[-1])
        ctx.save_for_backward(*read_by_derivatives(inputs, output))

    @staticmethod
    def backward(ctx: Any, *of_results: Tensor | None) -> Any:
        dout = of_results[0]
        dlse = of_results[1] if count_of_results(ctx.work) == 2 else None
        # Also where this rank's loss depends on neither: others wait for what it sends.
        wants_dsink = ctx.needs_input_grad[3]
        run = gradients if is_compiling() else ContextGradients.apply
        found = run(ctx.work, wants_dsink, dout, dlse, *ctx.saved_tensors)
        return *found, *(None,) * (_OPERANDS - len(found))


class DualContextAttention(ContextAttention):
    """ContextAttention with forward mode, which torch.compile does not trace."""

    @staticmethod
    def forward(*operands: Any) -> tuple[Tensor, ...]:
        # In forward mode operators are Functions too, which see what requires grad even in here.
        detached: Any = [x.detach() if isinstance(x, Tensor) else x for x in operands]
        return ContextAttention.forward(*detached)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ContextAttention.setup_context(ctx, inputs, output)
        ctx.save_for_forward(*read_by_derivatives(inputs, output))

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> Any:
        direction = tangents[:4]  # of q, k, v and sink
        if all(x is None for x in direction):
            return (None,) * ctx.count
        return ContextTangents.apply(*direction, ctx.work, *ctx.saved_tensors)


def attend_in_context(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink: Tensor | None,
    alibi_slopes: Tensor | None,
    rng_state: Tensor | None,
    work: Work,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """ContextAttention, differentiable in the modes that are there: (out, softmax_lse, max_logits),
    None for what the work does not return.
    """
    function = DualContextAttention if in_forward_mode() else ContextAttention
    found = function.apply(q, k, v, sink, alibi_slopes, rng_state, work)
    max_logits = None if work.sequences is None else found[-1]
    return found[0], found[1] if work.returns_lse else None, max_logits


def count_of_results(work: Work) -> int:
    """How many of what ContextAttention returns is of this rank's rows."""
    return 2 if work.across is None or work.returns_lse else 1


def read_by_derivatives(
    inputs: tuple[Any, ...], output: tuple[Tensor, ...]
) -> tuple[Tensor | None, ...]:
    """(sink, alibi_slopes, rng_state), and behind them the fields of Kept."""
    q, k, v, sink, alibi_slopes, rng_state, work = inputs
    output = output[:-1]
    kept = (q, k, v, *output) if work.across is None else output[count_of_results(work) :]
    return sink, alibi_slopes, rng_state, *kept


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
        work: Work,
        sink: Tensor | None,
        alibi_slopes: Tensor | None,
        rng_state: Tensor | None,
        *kept: Tensor,
    ) -> tuple[Tensor | None, ...]:
        work = work.given(alibi_slopes, rng_state)
        direction = Tangents(tq=tq, tk=tk, tv=tv, tsink=tsink)
        if work.across is not None:
            results, of_kept = exchanged_jvp(work, Kept(*kept), sink, direction)
            return *results, *of_kept, None
        q, k, v, out, softmax_lse, rounding = kept
        of_forward = OfWhole(None, None, out, softmax_lse, rng_state, rounding)
        return *gathered_jvp(work, q, k, v, sink, of_forward, direction), None, None

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.scheme = inputs[4].scheme

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
    sink: Tensor | None,
    alibi_slopes: Tensor | None,
    rng_state: Tensor | None,
    *kept: Tensor,
) -> tuple[Tensor | None, ...]:
    """(dq, dk, dv, dsink) of this rank's rows."""
    work = work.given(alibi_slopes, rng_state)
    sink = sink if wants_dsink else None
    if work.across is not None:
        return exchanged_backward(work, Kept(*kept), sink, dout, dlse)
    q, k, v, out, softmax_lse, rounding = kept
    dout = torch.zeros_like(out) if dout is None else dout
    incoming = OfWhole(dout, dlse, out, softmax_lse, rng_state, rounding)
    found = gradients_of_rows(work, q, k, v, incoming)
    return *found, None if sink is None else gradient_of_sink(q, k, v, sink, incoming)


def no_second_derivative(scheme: str) -> str:
    return (
        f"scheme: context parallelism by {scheme!r} has first derivatives alone: its gradients and "
        "its forward-mode gradients cannot be differentiated"
    )
