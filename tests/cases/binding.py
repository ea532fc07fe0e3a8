"""Calls of flash_attn_cuda._C as this package makes them: a description of a call, and results."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from flash_attn_cuda.call.fields import AttentionCall, Gradients, Incoming, Results


def forward(extension: Any, q: Tensor, k: Tensor, v: Tensor, **described: Any) -> Results:
    return extension.forward(AttentionCall(q, k, v, **described))


def backward(
    extension: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    dout: Tensor | None,
    results: tuple[Tensor, Tensor],
    incoming: dict[str, Any] | None = None,
    **described: Any,
) -> Gradients:
    """`results`: out and softmax_lse of the forward."""
    given = {"dlse": None, "rng_state": None, "wants_softmax_d": True, **(incoming or {})}
    out, softmax_lse = results
    return extension.backward(
        AttentionCall(q, k, v, **described),
        Incoming(dout=dout, out=out, softmax_lse=softmax_lse, **given),
    )
