"""Arguments of the operators, which they take by position: fields of call.py's dataclasses."""

from __future__ import annotations

from typing import Any

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
    Tangents,
)
from flash_attn_cuda.operators.support import arguments_of


def arguments(q: Tensor, k: Tensor, v: Tensor, **given: Any) -> tuple[Any, ...]:
    """Of attention."""
    return arguments_of(AttentionCall(q, k, v, **given), READ)


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
