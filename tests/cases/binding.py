"""Calls of flash_attn_cuda._C as this package makes them: a description of a call, and results."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from flash_attn_cuda.call.fields import AttentionCall, Incoming


def forward(extension: Any, q: Tensor, k: Tensor, v: Tensor, **described: Any) -> list[Any]:
    """[out, softmax_lse, S_dmask or None, rng_state or None]."""
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
) -> list[Any]:
    """[dq, dk, dv, softmax_d, dbias, dsink]; `results`: out and softmax_lse of the forward."""
    given = {"dlse": None, "rng_state": None, "wants_softmax_d": True, **(incoming or {})}
    out, softmax_lse = results
    return extension.backward(
        AttentionCall(q, k, v, **described),
        Incoming(dout=dout, out=out, softmax_lse=softmax_lse, **given),
    )
