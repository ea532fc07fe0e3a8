"""Arguments of the operators, which they take by position: fields of call.py's dataclasses; and
what they return, by name.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flash_attn_cuda.call.fields import (
    DIRECTIONS,
    FIELDS,
    INCOMING,
    INCOMING_AND_TARGETS,
    OF_BACKWARD,
    OF_FORWARD,
    READ,
    TANGENTS,
    AttentionCall,
    Incoming,
    Results,
    Tangents,
)
from flash_attn_cuda.operators.support import arguments_of


def arguments(q: Tensor, k: Tensor, v: Tensor, **given: Any) -> tuple[Any, ...]:
    """Of attention."""
    return arguments_of(AttentionCall(q, k, v, **given), READ)


def attention(**given: Any) -> Results:
    """Of the operator, with fields of an AttentionCall."""
    return Results(*torch.ops.flash_attn_cuda.attention(*arguments(**given)))


def incoming_of(found: Results, dout: Tensor, dlse: Tensor | None = None, **given: Any) -> Incoming:
    """What comes into a backward behind a forward, whose results are rounded as dout is."""
    kept = {name: getattr(found, name) for name in ("softmax_lse", "rng_state")}
    out = found.out.detach().to(dout.dtype)
    return Incoming(dout=dout, dlse=dlse, out=out, **kept, **given)


def append_arguments(q: Tensor, k: Tensor, v: Tensor, **given: Any) -> tuple[Any, ...]:
    """Of attention_with_append."""
    return arguments_of(AttentionCall(q, k, v, **given), FIELDS)


def gradients_arguments(**given: Any) -> tuple[Any, ...]:
    """Of attention_gradients. dout, dlse and rng_state may be left out."""
    call, incoming = backward_call(**given)
    return arguments_of(call, OF_BACKWARD) + arguments_of(incoming, INCOMING)


def backward_arguments(**given: Any) -> tuple[Any, ...]:
    """Of attention_backward: those of attention_gradients, then dq, dk and dv, None if left out,
    and whether they are added to.
    """
    call, incoming = backward_call(**given)
    return arguments_of(call, OF_BACKWARD) + arguments_of(incoming, INCOMING_AND_TARGETS)


def jvp_arguments(**given: Any) -> tuple[Any, ...]:
    """Of attention_jvp. rng_state and tangents may be left out."""
    call, incoming, tangents = directional_call(**given)
    return (
        *arguments_of(call, OF_BACKWARD),
        *arguments_of(incoming, OF_FORWARD),
        *arguments_of(tangents, DIRECTIONS),
    )


def hvp_arguments(**given: Any) -> tuple[Any, ...]:
    """Of attention_hvp: dout, dlse, rng_state and tangents may be left out."""
    call, incoming, tangents = directional_call(**given)
    return (
        *arguments_of(call, OF_BACKWARD),
        *arguments_of(incoming, INCOMING),
        *arguments_of(tangents, tuple(TANGENTS)),
    )


def directional_call(**given: Any) -> tuple[AttentionCall, Incoming, Tangents]:
    """The fields of all three, told apart."""
    tangents = {name: x for name, x in given.items() if name in TANGENTS}
    others = {name: x for name, x in given.items() if name not in TANGENTS}
    return *backward_call(**others), Tangents(**tangents)


def backward_call(**given: Any) -> tuple[AttentionCall, Incoming]:
    """The fields of both, told apart."""
    incoming = {"dout": None, "dlse": None, "rng_state": None}
    incoming |= {name: x for name, x in given.items() if name in INCOMING_AND_TARGETS}
    call = {name: x for name, x in given.items() if name not in INCOMING_AND_TARGETS}
    return AttentionCall(**call), Incoming(**incoming)
