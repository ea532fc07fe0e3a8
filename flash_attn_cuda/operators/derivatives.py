"""Derivatives of the operators, reverse and forward mode, and the functions that run them with.

Of attention F(x), of q, k, v, bias and sink, with J its Jacobian:

    attention            F(x)                    backward J(x)^T w        jvp J(x) t
    attention_gradients  J(x)^T w                backward J(x) u, H       jvp J(x)^T tw + H
    attention_jvp        J(x) t                  backward J(x)^T w, H     jvp J(x) tt
    attention_hvp        H = d<w, J(x) t> / dx   neither: it would be a third derivative

H is symmetric: the Hessian of <w, F(x)> times t. A derivative of a derivative counts what it was
given of the forward, out and softmax_lse, as functions of x: they have no gradient of their own.

Formulas are an operator's own where a custom_op can have them, and an autograd.Function's under
torch.func and forward mode, which custom_op does not know.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.autograd import forward_ad

from ..call import (
    ARGUMENTS,
    DIFFERENTIABLE,
    DIRECTIONS,
    FIELDS,
    INCOMING,
    OF_BACKWARD,
    OF_FORWARD,
    READ,
    TANGENTS,
    AttentionCall,
    Gradients,
    Incoming,
    Results,
    Tangents,
)
from ..checks.calls import check_gradients, missing_backward
from . import vmap  # noqa: F401  whose rules register themselves
from .attention import (
    GRADIENTS,
    attention_op,
    described,
    gradients_op,
)
from .second_order import JVP_ARGUMENTS, hvp_op, jvp_op
from .support import Tensors2, arguments_of, for_transforms, is_functorch_active

_ops = torch.ops.flash_attn_cuda
_GRADIENT_ARGUMENTS = (*OF_BACKWARD, *INCOMING)
_THIRD = (
    "flash_attn_cuda does not implement third derivatives of attention: what double backward or a "
    "forward-mode derivative of gradients gave cannot be differentiated again"
)

# -- running them --------------------------------------------------------------------------------


def run_operator(call: AttentionCall) -> Results:
    """By the operator that the call is for."""
    if call.k_new is not None and call.quantizes_tokens:
        return Results(*_ops.attention_with_quantized_append(*arguments_of(call, FIELDS)))
    if call.k_new is not None:
        return Results(*_ops.attention_with_append(*arguments_of(call, FIELDS)))
    op = _attention if _wants_functions() else _ops.attention
    return Results(*op(*arguments_of(call, READ)))


def run_gradients_operator(call: AttentionCall, incoming: Incoming) -> Gradients:
    """Without softmax_d; gradients of what the call does not have, or that are not wanted, are
    empty.
    """
    op = _gradients if _wants_functions() else _ops.attention_gradients
    found = op(*arguments_of(call, OF_BACKWARD), *arguments_of(incoming, INCOMING))
    return _gradients_of(found)


def run_jvp_operator(call: AttentionCall, incoming: Incoming, tangents: Tangents) -> Tensors2:
    """(tout, tlse); at least one tangent is given."""
    op = _jvp if _wants_functions() else _ops.attention_jvp
    found: Tensors2 = op(
        *arguments_of(call, OF_BACKWARD),
        *arguments_of(incoming, OF_FORWARD),
        *arguments_of(tangents, DIRECTIONS),
    )
    return found


def run_hvp_operator(call: AttentionCall, incoming: Incoming, tangents: Tangents) -> Gradients:
    """As run_gradients_operator; the tangents have tout and tlse."""
    op = _hvp if _wants_functions() else _ops.attention_hvp
    found = op(
        *arguments_of(call, OF_BACKWARD),
        *arguments_of(incoming, INCOMING),
        *arguments_of(tangents, tuple(TANGENTS)),
    )
    return _gradients_of(found)


def _gradients_of(found: Sequence[Tensor]) -> Gradients:
    return Gradients(**dict(zip(GRADIENTS, found, strict=True)), softmax_d=None)


def _as_function(*parts: Any) -> Callable[..., Any]:
    """for_transforms, which a compiler calls and does not trace: it would trace operators, and
    those drop tangents without a word.
    """
    function = for_transforms(*parts)

    @_disable_dynamo
    def attention_under_transforms(*args: Any) -> Any:
        return function(*args)

    return attention_under_transforms


def _wants_functions() -> bool:
    return forward_ad._current_level >= 0 or is_functorch_active()


# -- what formulas keep --------------------------------------------------------------------------


def _save(ctx: Any, given: Mapping[str, Any]) -> None:
    """The given tensors and others by name."""
    ctx.names = [name for name, x in given.items() if isinstance(x, Tensor)]
    ctx.others = {name: x for name, x in given.items() if not isinstance(x, Tensor)}
    tensors = [given[name] for name in ctx.names]
    ctx.save_for_backward(*tensors)
    if _wants_functions():
        ctx.save_for_forward(*tensors)


def _saved(ctx: Any) -> dict[str, Any]:
    return {**ctx.others, **dict(zip(ctx.names, ctx.saved_tensors, strict=True))}


def _call_of(given: Mapping[str, Any]) -> AttentionCall:
    return AttentionCall(**{name: given[name] for name in OF_BACKWARD})


def _of_forward(given: Mapping[str, Any], **incoming: Any) -> Incoming:
    """Incoming with what is kept of a forward."""
    return Incoming(**{"dout": None, "dlse": None, **incoming}, **_only(given, OF_FORWARD))


def _only(given: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    return {name: given[name] for name in names}


def _direction(given: Mapping[str, Any], prefix: str = "") -> Tangents | None:
    """Tangents of the differentiable arguments, which `given` has by name with a prefix; None where
    there is none.
    """
    found = {f"t{name}": given.get(f"{prefix}{name}") for name in DIFFERENTIABLE}
    return None if all(x is None for x in found.values()) else Tangents(**found)


def _wanted(ctx: Any, names: Sequence[str]) -> dict[str, bool]:
    return dict(zip(names, ctx.needs_input_grad, strict=True))


# -- attention -----------------------------------------------------------------------------------


def _save_attention(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    call = described(inputs)
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[2:])
    ctx.refusal = missing_backward(call)
    if ctx.refusal is not None:
        # Not the tensors: nothing reads them, and pages may be written before the backward refuses.
        given = zip(READ, inputs, ctx.needs_input_grad, strict=False)  # torch adds one of its own
        ctx.missing = {name: (x.shape, x.dtype) for name, x, is_wanted in given if is_wanted}
        return
    if call.fp32_results and any(ctx.needs_input_grad):
        raise NotImplementedError(
            "fp32_results: must be False in a call whose gradients are wanted, got True"
        )
    check_gradients(call, wants_dbias=ctx.needs_input_grad[READ.index("bias")])
    results = Results(*output)
    kept = {name: getattr(results, name) for name in OF_FORWARD}
    _save(ctx, _only(vars(call), OF_BACKWARD) | kept)


def _attention_backward(
    ctx: Any, dout: Tensor | None, dlse: Tensor | None, *_: None
) -> tuple[Any, ...]:
    gradient = dlse if dout is None else dout
    if gradient is None:
        return (None,) * len(READ)
    if ctx.refusal is not None:
        return _missing_gradients(ctx, gradient)
    wanted, given = _wanted(ctx, READ), _saved(ctx)
    if not _wants_functions():  # which may want derivatives of other levels than this one's
        for name in DIFFERENTIABLE:
            if ARGUMENTS[name].is_in_lse and not wanted[name]:
                given[name] = None
    incoming = _of_forward(given, dout=dout, dlse=dlse, wants_dbias=wanted["bias"])
    found = run_gradients_operator(_call_of(given), incoming)
    made = {name: getattr(found, f"d{name}") for name in DIFFERENTIABLE if wanted[name]}
    return tuple(made.get(name) for name in READ)


def _missing_gradients(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    """Refuses, or, where a compiler traces this together with the forward, leaves it to operators
    that refuse when the backward runs.
    """
    if is_functorch_active():
        raise NotImplementedError(ctx.refusal)
    op, missing = _ops.missing_gradient, ctx.missing
    return tuple(op(gradient, *missing[x], ctx.refusal) if x in missing else None for x in READ)


def _attention_jvp(ctx: Any, *tangents: Any) -> tuple[Any, ...]:
    given = _saved(ctx)
    direction = _direction(dict(zip(READ, tangents, strict=True)))
    if direction is None:
        return (None,) * len(Results._fields)
    return (*run_jvp_operator(_call_of(given), _of_forward(given), direction), None, None)


attention_op.register_autograd(_attention_backward, setup_context=_save_attention)
_attention = _as_function(attention_op, _save_attention, _attention_backward, _attention_jvp)

# -- its gradients -------------------------------------------------------------------------------


def _save_gradients(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.set_materialize_grads(False)
    _save(ctx, dict(zip(_GRADIENT_ARGUMENTS, inputs, strict=True)))


def _gradients_backward(ctx: Any, *incoming: Any) -> tuple[Any, ...]:
    given, wanted = _saved(ctx), _wanted(ctx, _GRADIENT_ARGUMENTS)
    call, of_backward = _call_of(given), Incoming(**_only(given, INCOMING))
    direction = _direction(_of_existing(call, of_backward, incoming), "d")
    if direction is None:
        return (None,) * len(_GRADIENT_ARGUMENTS)
    tout, tlse = run_jvp_operator(call, of_backward, direction)
    made = {"dout": tout, "dlse": tlse}
    if any(wanted[name] for name in DIFFERENTIABLE):
        along = replace(direction, tout=tout, tlse=tlse)
        wants_dbias = wanted["bias"]
        found = run_hvp_operator(call, replace(of_backward, wants_dbias=wants_dbias), along)
        made |= {name: getattr(found, f"d{name}") for name in DIFFERENTIABLE}
    return tuple(made.get(name) if wanted[name] else None for name in _GRADIENT_ARGUMENTS)


def _of_existing(
    call: AttentionCall, incoming: Incoming, of_gradients: Sequence[Any]
) -> dict[str, Any]:
    """What belongs to gradients that are there: others are empty."""
    found = dict(zip(GRADIENTS, of_gradients, strict=True))
    exists = {"dbias": incoming.wants_dbias, "dsink": call.sink is not None}
    return {name: x for name, x in found.items() if exists.get(name, True)}


def _gradients_jvp(ctx: Any, *tangents: Any) -> tuple[Any, ...]:
    given = _saved(ctx)
    moved = dict(zip(_GRADIENT_ARGUMENTS, tangents, strict=True))
    call, incoming = _call_of(given), Incoming(**_only(given, INCOMING))
    found = []
    if moved["dout"] is not None or moved["dlse"] is not None:
        linear = replace(incoming, dout=moved["dout"], dlse=moved["dlse"])
        found.append(run_gradients_operator(call, linear))
    if (direction := _direction(moved)) is not None:
        tout, tlse = run_jvp_operator(call, incoming, direction)
        along = replace(direction, tout=tout, tlse=tlse)
        found.append(run_hvp_operator(call, incoming, along))
    return tuple(sum(getattr(x, name) for x in found) if found else None for name in GRADIENTS)


gradients_op.register_autograd(_gradients_backward, setup_context=_save_gradients)
_gradients = _as_function(gradients_op, _save_gradients, _gradients_backward, _gradients_jvp)

# -- its derivative in a direction ---------------------------------------------------------------


def _save_jvp(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.set_materialize_grads(False)
    given = dict(zip(JVP_ARGUMENTS, inputs, strict=True))
    _save(ctx, given | dict(zip(("tout", "tlse"), output, strict=True)))


def _jvp_backward(ctx: Any, dtout: Tensor | None, dtlse: Tensor | None) -> tuple[Any, ...]:
    if dtout is None and dtlse is None:
        return (None,) * len(JVP_ARGUMENTS)
    given, wanted = _saved(ctx), _wanted(ctx, JVP_ARGUMENTS)
    call = _call_of(given)
    made: dict[str, Any] = {}
    if any(wanted[name] for name in DIRECTIONS):
        incoming = _of_forward(given, dout=dtout, dlse=dtlse, wants_dbias=wanted["tbias"])
        found = run_gradients_operator(call, incoming)
        made |= {f"t{name}": getattr(found, f"d{name}") for name in DIFFERENTIABLE}
    if any(wanted[name] for name in DIFFERENTIABLE):
        incoming = _of_forward(given, dout=dtout, dlse=dtlse, wants_dbias=wanted["bias"])
        found = run_hvp_operator(call, incoming, Tangents(**_only(given, tuple(TANGENTS))))
        made |= {name: getattr(found, f"d{name}") for name in DIFFERENTIABLE}
    return tuple(made.get(name) if wanted[name] else None for name in JVP_ARGUMENTS)


def _jvp_jvp(ctx: Any, *tangents: Any) -> tuple[Any, ...]:
    moved = dict(zip(JVP_ARGUMENTS, tangents, strict=True))
    if _direction(moved) is not None:
        raise NotImplementedError(
            "flash_attn_cuda does not implement forward mode over forward mode or double backward: "
            "differentiate gradients in forward mode (torch.func.jacfwd of jacrev), or a "
            "forward-mode derivative in reverse mode"
        )
    direction = _direction(moved, "t")
    if direction is None:
        return None, None
    given = _saved(ctx)
    return run_jvp_operator(_call_of(given), _of_forward(given), direction)


jvp_op.register_autograd(_jvp_backward, setup_context=_save_jvp)
_jvp = _as_function(jvp_op, _save_jvp, _jvp_backward, _jvp_jvp)

# -- third derivatives ---------------------------------------------------------------------------


def _save_nothing(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """Nothing is needed to refuse."""


def _no_third_derivative(ctx: Any, *_: Any) -> Any:
    raise NotImplementedError(_THIRD)


hvp_op.register_autograd(_no_third_derivative)
_hvp = _as_function(hvp_op, _save_nothing, _no_third_derivative, _no_third_derivative)
