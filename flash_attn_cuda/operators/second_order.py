"""Operators of derivatives in a direction (Tangents of call/fields.py), which forward mode and a
second backward are made of (derivatives.py).

    attention_jvp  tangents of out and softmax_lse, and what rounding takes from the first, where
                   out_rounding is known
    attention_hvp  gradients of <dout, tout> + <dlse, tlse> by what attention is differentiable in:
                   the Hessian of <dout, out> + <dlse, softmax_lse> times the tangents
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..call.checks import check_call, check_contents, check_incoming, check_tangents
from ..call.fields import (
    DIRECTIONS,
    INCOMING,
    OF_BACKWARD,
    OF_FORWARD,
    OF_RESULTS,
    TANGENTS,
    AttentionCall,
    Gradients,
    Incoming,
    Tangents,
)
from ..call.rounding import is_known
from ..cpu.calls import hvp_on_cpu, jvp_on_cpu
from .attention import GRADIENTS, described, empty_gradients, gradients_for_operator
from .support import Tensors3, call_extension, define, schema_of, without_dispatcher

JVP_ARGUMENTS = (*OF_BACKWARD, *OF_FORWARD, *DIRECTIONS)
HVP_ARGUMENTS = (*OF_BACKWARD, *INCOMING, *TANGENTS)


Made = tuple[AttentionCall, Incoming, Tangents]


def _made_jvp(*args: Any) -> Made:
    given = dict(zip(JVP_ARGUMENTS, args, strict=True))
    incoming = Incoming(None, None, **{name: given[name] for name in OF_FORWARD})
    tangents = Tangents(**{name: given[name] for name in DIRECTIONS})
    return described(args[: len(OF_BACKWARD)], OF_BACKWARD), incoming, tangents


def _made_hvp(*args: Any) -> Made:
    given = dict(zip(HVP_ARGUMENTS, args, strict=True))
    incoming = Incoming(**{name: given[name] for name in INCOMING})
    tangents = Tangents(**{name: given[name] for name in TANGENTS})
    return described(args[: len(OF_BACKWARD)], OF_BACKWARD), incoming, tangents


def _checked_jvp(*args: Any) -> Made:
    return _checked(*_made_jvp(*args))


def _checked_hvp(*args: Any) -> Made:
    call, incoming, tangents = _made_hvp(*args)
    for name in ("tout", "tlse"):
        if getattr(tangents, name) is None:
            raise TypeError(f"{name}: must be attention_jvp's for these tangents, got None")
    return _checked(call, incoming, tangents)


def _checked(call: AttentionCall, incoming: Incoming, tangents: Tangents) -> Made:
    check_call(call)
    check_tangents(call, tangents)
    check_incoming(call, incoming)
    return call, incoming, tangents


def _jvp_on_cpu(call: AttentionCall, incoming: Incoming, tangents: Tangents) -> Tensors3:
    check_contents(call)
    return jvp_on_cpu(call, incoming, tangents)


def _jvp_on_cuda(call: AttentionCall, incoming: Incoming, tangents: Tangents) -> Tensors3:
    tout, tlse, rounding = call_extension("jvp", call.q.device, call, incoming, tangents)
    return tout, tlse, call.q.new_empty((0,), dtype=torch.int8) if rounding is None else rounding


def _empty_jvp(call: AttentionCall, incoming: Incoming, _tangents: Tangents) -> Tensors3:
    tout = call.q.new_empty(call.out_shape())
    tlse = call.q.new_empty(call.lse_shape(), dtype=call.lse_dtype())
    kept = tout.shape if is_known(incoming.out_rounding) else (0,)
    return tout, tlse, tout.new_empty(kept, dtype=torch.int8)


jvp_op = define(
    "attention_jvp",
    schema_of(
        OF_RESULTS,
        *((AttentionCall, OF_BACKWARD), (Incoming, OF_FORWARD), (Tangents, DIRECTIONS)),
    ),
    check=_checked_jvp,
    cpu=_jvp_on_cpu,
    cuda=_jvp_on_cuda,
    fake=_empty_jvp,
)
jvp_on_cuda = without_dispatcher(_checked_jvp, _made_jvp, _jvp_on_cuda)


def _hvp_on_cpu(call: AttentionCall, incoming: Incoming, tangents: Tangents) -> Any:
    check_contents(call)
    return gradients_for_operator(call, hvp_on_cpu(call, incoming, tangents))


def _hvp_on_cuda(call: AttentionCall, incoming: Incoming, tangents: Tangents) -> Any:
    found: Gradients = call_extension("hvp", call.q.device, call, incoming, tangents)
    return gradients_for_operator(call, found)


def _empty_hvp(call: AttentionCall, incoming: Incoming, _tangents: Tangents) -> tuple[Tensor, ...]:
    return gradients_for_operator(call, empty_gradients(call, incoming))


hvp_op = define(
    "attention_hvp",
    schema_of(
        GRADIENTS, (AttentionCall, OF_BACKWARD), (Incoming, INCOMING), (Tangents, tuple(TANGENTS))
    ),
    check=_checked_hvp,
    cpu=_hvp_on_cpu,
    cuda=_hvp_on_cuda,
    fake=_empty_hvp,
)
hvp_on_cuda = without_dispatcher(_checked_hvp, _made_hvp, _hvp_on_cuda)
