"""Arguments of the operators, which they take by position: fields of call.py's dataclasses."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from torch import Tensor

from flash_attn_cuda.call import FIELDS, OF_BACKWARD, READ, AttentionCall, Incoming
from flash_attn_cuda.operators.support import arguments_of

_OF_INCOMING = tuple(field.name for field in fields(Incoming))
_OF_TARGETS = ("dq", "dk", "dv", "accumulate")
_OF_GRADIENTS = tuple(x for x in _OF_INCOMING if x not in (*_OF_TARGETS, "wants_softmax_d"))


def arguments(q: Tensor, k: Tensor, v: Tensor, **given: Any) -> tuple[Any, ...]:
    """Of attention."""
    return arguments_of(AttentionCall(q, k, v, **given), READ)


def append_arguments(q: Tensor, k: Tensor, v: Tensor, **given: Any) -> tuple[Any, ...]:
    """Of attention_with_append."""
    return arguments_of(AttentionCall(q, k, v, **given), FIELDS)


def gradients_arguments(**given: Any) -> tuple[Any, ...]:
    """Of attention_gradients. dout, dlse and rng_state may be left out."""
    call, incoming = backward_call(**given)
    return arguments_of(call, OF_BACKWARD) + arguments_of(incoming, _OF_GRADIENTS)


def backward_arguments(**given: Any) -> tuple[Any, ...]:
    """Of attention_backward: those of attention_gradients, then dq, dk and dv, None if left out,
    and whether they are added to.
    """
    call, incoming = backward_call(**given)
    return arguments_of(call, OF_BACKWARD) + arguments_of(incoming, (*_OF_GRADIENTS, *_OF_TARGETS))


def backward_call(**given: Any) -> tuple[AttentionCall, Incoming]:
    """The fields of both, told apart."""
    incoming = {"dout": None, "dlse": None, "rng_state": None}
    incoming |= {name: x for name, x in given.items() if name in _OF_INCOMING}
    call = {name: x for name, x in given.items() if name not in _OF_INCOMING}
    return AttentionCall(**call), Incoming(**incoming)
