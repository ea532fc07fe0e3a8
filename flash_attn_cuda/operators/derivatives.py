"""Derivatives of the operators, reverse and forward mode, and the functions that run them with.

Of attention F(x), of q, k, v, bias and sink, with J its Jacobian:

    attention            F(x)                    backward J(x)^T w        jvp J(x) t
    attention_gradients  J(x)^T w                backward J(x) u, H       jvp J(x)^T tw + H
    attention_jvp        J(x) t                  backward J(x)^T w, H     jvp J(x) tt
    attention_hvp        H = d<w, J(x) t> / dx   neither: it would be a third derivative

H is symmetric: the Hessian of <w, F(x)> times t. A derivative of a derivative counts what it was
given of the forward, out and softmax_lse, as functions of x: they have no gradient of their own.

Formulas are an operator's own where a custom_op can have them; transforms.py runs them in forward
mode and under torch.func.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from ..call.checks import missing_backward
from ..call.fields import (
    ARGUMENTS,
    DIFFERENTIABLE,
    DIRECTIONS,
    FIELDS,
    INCOMING,
    OF_BACKWARD,
    OF_FORWARD,
    OF_RESULTS,
    READ,
    TANGENTS,
    AttentionCall,
    Gradients,
    Incoming,
    Results,
    Tangents,
)
from ..call.functorch import is_functorch_active
from ..masks.of_call import by_mask
from . import vmap  # noqa: F401  whose rules register themselves
from .attention import (
    GRADIENTS,
    attention_on_cuda,
    attention_op,
    gradients_on_cuda,
    gradients_op,
)
from .second_order import (
    HVP_ARGUMENTS,
    JVP_ARGUMENTS,
    hvp_on_cuda,
    hvp_op,
    jvp_on_cuda,
    jvp_op,
)
from .support import Tensors3, arguments_of, ops
from .transforms import (
    Formulas,
    Named,
    for_transforms,
    is_wanted,
    save,
    saved,
    wants_functions,
)

_GRADIENT_ARGUMENTS = (*OF_BACKWARD, *INCOMING)
_THIRD = (
    "flash_attn_cuda does not implement third derivatives of attention: what double backward or a "
    "forward-mode derivative of gradients gave cannot be differentiated again"
)

# -- running them --------------------------------------------------------------------------------


def run_operator(call: AttentionCall) -> Results:
    """By the operator that the call is for."""
    if call.k_new is not None and call.quantizes_tokens:
        return Results(*ops.attention_with_quantized_append(*arguments_of(call, FIELDS)))
    if call.k_new is not None:
        return Results(*ops.attention_with_append(*arguments_of(call, FIELDS)))
    return Results(*_attention(*arguments_of(call, READ)))


def run_gradients_operator(call: AttentionCall, incoming: Incoming) -> Gradients:
    """Without softmax_d; gradients of what the call does not have, or that are not wanted, are
    empty.
    """
    found = _gradients(*arguments_of(call, OF_BACKWARD), *arguments_of(incoming, INCOMING))
    return _gradients_of(found)


def run_jvp_operator(call: AttentionCall, incoming: Incoming, tangents: Tangents) -> Tensors3:
    """(tout, tlse, tout_rounding); at least one tangent is given."""
    call = by_mask(call)
    found: Tensors3 = _jvp(
        *arguments_of(call, OF_BACKWARD),
        *arguments_of(incoming, OF_FORWARD),
        *arguments_of(tangents, DIRECTIONS),
    )
    return found


def run_hvp_operator(call: AttentionCall, incoming: Incoming, tangents: Tangents) -> Gradients:
    """As run_gradients_operator; the tangents have those of the results."""
    call = by_mask(call)
    found = _hvp(
        *arguments_of(call, OF_BACKWARD),
        *arguments_of(incoming, INCOMING),
        *arguments_of(tangents, tuple(TANGENTS)),
    )
    return _gradients_of(found)


def _gradients_of(found: Sequence[Tensor]) -> Gradients:
    return Gradients(**dict(zip(GRADIENTS, found, strict=True)), softmax_d=None)


# -- what formulas read --------------------------------------------------------------------------


def _call_of(given: Named) -> AttentionCall:
    return AttentionCall(**{name: given[name] for name in OF_BACKWARD})


def _of_forward(given: Named, **incoming: Any) -> Incoming:
    """Incoming with what is kept of a forward."""
    return Incoming(**{"dout": None, "dlse": None, **incoming}, **_only(given, OF_FORWARD))


def _only(given: Named, names: Sequence[str]) -> dict[str, Any]:
    return {name: given[name] for name in names}


def _direction(given: Named, prefix: str = "") -> Tangents | None:
    """Tangents of the differentiable arguments, which `given` has by name with a prefix; None where
    there is none.
    """
    found = {f"t{name}": given.get(f"{prefix}{name}") for name in DIFFERENTIABLE}
    return None if all(x is None for x in found.values()) else Tangents(**found)


# -- attention -----------------------------------------------------------------------------------


def _keep_attention(given: Named, results: Sequence[Tensor]) -> dict[str, Any]:
    found = dict(zip(Results._fields, results, strict=True))
    return _only(given, OF_BACKWARD) | _only(found, OF_FORWARD)


def _save_attention(ctx: Any, inputs: Sequence[Any], output: Sequence[Tensor]) -> None:
    given, wanted = dict(zip(READ, inputs, strict=True)), is_wanted(ctx, READ)
    call, is_differentiated = AttentionCall(**given), any(wanted.values())
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[2:])
    ctx.refusal = missing_backward(call)
    if ctx.refusal is not None:
        # Not the tensors: nothing reads them, and pages may be written before the backward refuses.
        ctx.missing = {name: (x.shape, x.dtype) for name, x in given.items() if wanted[name]}
        return
    if call.fp32_results and is_differentiated:
        raise NotImplementedError(
            "fp32_results: must be False in a call whose gradients are wanted, got True"
        )
    save(ctx, _keep_attention(given, output))


def _attention_backward(
    ctx: Any, dout: Tensor | None, dlse: Tensor | None, *_: None
) -> tuple[Any, ...]:
    gradient = dlse if dout is None else dout
    if gradient is None:
        return (None,) * len(READ)
    if ctx.refusal is not None:
        return _missing_gradients(ctx, gradient)
    wanted, given = is_wanted(ctx, READ), saved(ctx)
    if not wants_functions():  # which may want derivatives of other levels than this one's
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
    op, missing = ops.missing_gradient, ctx.missing
    return tuple(op(gradient, *missing[x], ctx.refusal) if x in missing else None for x in READ)


def _attention_jvp(given: Named, moved: Named) -> tuple[Any, ...]:
    direction = _direction(moved)
    if direction is None:
        return (None,) * len(Results._fields)
    tout, tlse, _ = run_jvp_operator(_call_of(given), _of_forward(given), direction)
    return tout, tlse, *(None,) * (len(Results._fields) - 2)


attention_op.register_autograd(_attention_backward, setup_context=_save_attention)
_attention = for_transforms(
    ops.attention,
    attention_on_cuda,
    Formulas(READ, _keep_attention, _save_attention, _attention_backward, _attention_jvp),
)

# -- its gradients -------------------------------------------------------------------------------


def _keep_gradients(given: Named, _: Sequence[Tensor]) -> Named:
    return given


def _save_gradients(ctx: Any, inputs: Sequence[Any], output: Any) -> None:
    ctx.set_materialize_grads(False)
    save(ctx, dict(zip(_GRADIENT_ARGUMENTS, inputs, strict=True)))


def _gradients_backward(ctx: Any, *incoming: Any) -> tuple[Any, ...]:
    given, wanted = saved(ctx), is_wanted(ctx, _GRADIENT_ARGUMENTS)
    call, of_backward = _call_of(given), Incoming(**_only(given, INCOMING))
    direction = _direction(_of_existing(call, of_backward, incoming), "d")
    if direction is None:
        return (None,) * len(_GRADIENT_ARGUMENTS)
    moved = run_jvp_operator(call, of_backward, direction)
    made: dict[str, Any] = {"dout": moved[0], "dlse": moved[1]}
    if any(wanted[name] for name in DIFFERENTIABLE):
        wants_dbias = wanted["bias"]
        along = direction.with_results(moved)
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


def _gradients_jvp(given: Named, moved: Named) -> tuple[Any, ...]:
    call, incoming = _call_of(given), Incoming(**_only(given, INCOMING))
    found = []
    if moved["dout"] is not None or moved["dlse"] is not None:
        linear = replace(incoming, dout=moved["dout"], dlse=moved["dlse"])
        found.append(run_gradients_operator(call, linear))
    if (direction := _direction(moved)) is not None:
        along = direction.with_results(run_jvp_operator(call, incoming, direction))
        found.append(run_hvp_operator(call, incoming, along))
    return tuple(sum(getattr(x, name) for x in found) if found else None for name in GRADIENTS)


gradients_op.register_autograd(_gradients_backward, setup_context=_save_gradients)
_gradients = for_transforms(
    ops.attention_gradients,
    gradients_on_cuda,
    Formulas(
        _GRADIENT_ARGUMENTS, _keep_gradients, _save_gradients, _gradients_backward, _gradients_jvp
    ),
)

# -- its derivative in a direction ---------------------------------------------------------------


def _keep_jvp(given: Named, results: Sequence[Tensor]) -> dict[str, Any]:
    return {**given, **dict(zip(OF_RESULTS, results, strict=True))}


def _save_jvp(ctx: Any, inputs: Sequence[Any], output: Sequence[Tensor]) -> None:
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[2:])
    save(ctx, _keep_jvp(dict(zip(JVP_ARGUMENTS, inputs, strict=True)), output))


def _jvp_backward(
    ctx: Any, dtout: Tensor | None, dtlse: Tensor | None, *_: None
) -> tuple[Any, ...]:
    if dtout is None and dtlse is None:
        return (None,) * len(JVP_ARGUMENTS)
    given, wanted = saved(ctx), is_wanted(ctx, JVP_ARGUMENTS)
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


def _jvp_jvp(given: Named, moved: Named) -> tuple[Any, ...]:
    if _direction(moved) is not None:
        raise NotImplementedError(
            "flash_attn_cuda does not implement forward mode over forward mode or double backward: "
            "differentiate gradients in forward mode (torch.func.jacfwd of jacrev), or a "
            "forward-mode derivative in reverse mode"
        )
    direction = _direction(moved, "t")
    if direction is None:
        return (None,) * len(OF_RESULTS)
    tout, tlse, _ = run_jvp_operator(_call_of(given), _of_forward(given), direction)
    return tout, tlse, None


jvp_op.register_autograd(_jvp_backward, setup_context=_save_jvp)
_jvp = for_transforms(
    ops.attention_jvp,
    jvp_on_cuda,
    Formulas(JVP_ARGUMENTS, _keep_jvp, _save_jvp, _jvp_backward, _jvp_jvp),
)

# -- third derivatives ---------------------------------------------------------------------------


def _save_nothing(ctx: Any, inputs: Sequence[Any], output: Any) -> None:
    """Nothing is needed to refuse."""
    save(ctx, {})


def _no_third_derivative(*_: Any) -> Any:
    raise NotImplementedError(_THIRD)


hvp_op.register_autograd(_no_third_derivative)
_hvp = for_transforms(
    ops.attention_hvp,
    hvp_on_cuda,
    Formulas(
        HVP_ARGUMENTS, _keep_gradients, _save_nothing, _no_third_derivative, _no_third_derivative
    ),
)
