"""Custom operators of namespace `flash_attn_cuda`, for torch.compile, export, vmap, autograd. Their
arguments are the fields of an AttentionCall (call/fields.py), in order.

    attention              differentiable in what call/fields.py says, through softmax_lse too
    attention_with_append  writes new keys and values into a cache first; without gradients
    attention_with_quantized_append  the same, and writes the scales that it makes for them
    attention_gradients    the first one's gradients as new tensors: its autograd formula
    attention_backward     the same into given dq, dk and dv, or added to them; returns softmax_d
    missing_gradient       stands for a gradient through pages, a cache or e4m3; refuses to run

Those of derivatives in a direction are in second_order.py, formulas of all in derivatives.py, rules
for torch.vmap in vmap.py; combine.py has those of partial results.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..call.checks import check_call, check_contents, check_incoming
from ..call.fields import (
    DIFFERENTIABLE,
    FIELDS,
    INCOMING,
    INCOMING_AND_TARGETS,
    OF_BACKWARD,
    READ,
    TARGETS,
    AttentionCall,
    Gradients,
    Incoming,
    Results,
    forms_of_results,
)
from ..cpu.calls import backward_on_cpu, forward_on_cpu
from .support import (
    PACKAGE,
    RANDOM,
    arguments_of,
    call_extension,
    define,
    draw_rng_state,
    ops,
    schema_of,
    without_dispatcher,
)

# Of the operator that returns gradients; softmax_d is the other one's.
GRADIENTS: tuple[str, ...] = tuple(f"d{name}" for name in DIFFERENTIABLE)

# -- forward -------------------------------------------------------------------------------------


def described(args: Sequence[Any], names: Sequence[str] = READ) -> AttentionCall:
    return AttentionCall(**dict(zip(names, args, strict=True)))


def _made(*args: Any) -> tuple[AttentionCall]:
    return (described(args),)


def _checked(*args: Any) -> tuple[AttentionCall]:
    (call,) = _made(*args)
    check_call(call)
    return (call,)


def _checked_append(*args: Any) -> tuple[AttentionCall]:
    call = described(args, FIELDS)
    check_call(call)
    if call.k_new is None or not call.over_cache:
        raise ValueError("k: must be given, over a cache; attention reads one alone")
    return (call,)


def _checked_plain_append(*args: Any) -> tuple[AttentionCall]:
    (call,) = _checked_append(*args)
    if call.quantizes_tokens:
        raise ValueError("quantizes_tokens: must be False, as scales are not written, got True")
    return (call,)


def _checked_quantized_append(*args: Any) -> tuple[AttentionCall]:
    (call,) = _checked_append(*args)
    if not call.quantizes_tokens:
        raise ValueError("quantizes_tokens: must be True, as scales are written, got False")
    return (call,)


def _on_cpu(call: AttentionCall) -> Results:
    check_contents(call)
    if call.rng_state is None or call.dropout_p == 0.0:
        rng_state = draw_rng_state(call.dropout_p)
    else:
        rng_state = call.rng_state.clone()
    return forward_on_cpu(call, rng_state)


def _on_cuda(call: AttentionCall) -> Results:
    with torch.no_grad():
        found: Results = call_extension("forward", call.q.device, call)
    missing = [name for name, x in zip(Results._fields, found, strict=True) if x is None]
    return found._replace(**_empty(call, missing))


def _empty_results(call: AttentionCall) -> Results:
    return Results(**_empty(call, Results._fields))


def _empty(call: AttentionCall, names: Sequence[str]) -> dict[str, Any]:
    """These results, uninitialised."""
    forms = forms_of_results(call)
    return {name: call.q.new_empty(forms[name][0], dtype=forms[name][1]) for name in names}


_FORWARD: dict[str, Any] = {"cpu": _on_cpu, "cuda": _on_cuda, "fake": _empty_results}
attention_op: Any = define(
    "attention",
    schema_of(Results._fields, (AttentionCall, READ)),
    check=_checked,
    **_FORWARD,
    **RANDOM,
)
attention_on_cuda: Any = without_dispatcher(_checked, _made, _on_cuda)
_append_op = define(
    "attention_with_append",
    schema_of(Results._fields, (AttentionCall, FIELDS), mutated=("k", "v")),
    mutated=("k", "v"),
    check=_checked_plain_append,
    **_FORWARD,
)
# Its own operator: a compiler copies back what is mutated, which expanded scales do not take.
_WRITTEN = ("k", "v", "k_descale", "v_descale")
_quantized_append_op = define(
    "attention_with_quantized_append",
    schema_of(Results._fields, (AttentionCall, FIELDS), mutated=_WRITTEN),
    mutated=_WRITTEN,
    check=_checked_quantized_append,
    **_FORWARD,
)


# -- gradients that there are not ---------------------------------------------------------------


@torch.library.custom_op(
    f"{PACKAGE}::missing_gradient",
    mutates_args=(),
    schema="(Tensor gradient, SymInt[] sizes, ScalarType dtype, str reason) -> Tensor",
)
def _missing_gradient_op(
    gradient: Tensor, sizes: Sequence[int], dtype: torch.dtype, reason: str
) -> Tensor:
    raise NotImplementedError(reason)


@_missing_gradient_op.register_fake
def _(gradient: Tensor, sizes: Sequence[int], dtype: torch.dtype, reason: str) -> Tensor:
    return gradient.new_empty(sizes, dtype=dtype)


# -- backward ------------------------------------------------------------------------------------


def _made_backward(*args: Any) -> tuple[AttentionCall, Incoming]:
    count = len(OF_BACKWARD)
    # The operator that returns gradients takes the first of them.
    incoming = Incoming(**dict(zip(INCOMING_AND_TARGETS, args[count:], strict=False)))
    return described(args[:count], OF_BACKWARD), incoming


def _checked_backward(*args: Any) -> tuple[AttentionCall, Incoming]:
    call, incoming = _made_backward(*args)
    check_call(call)
    check_incoming(call, incoming)
    return call, incoming


def _backward_on_cpu(call: AttentionCall, incoming: Incoming) -> Gradients:
    check_contents(call)
    return backward_on_cpu(call, incoming)


def _backward_on_cuda(call: AttentionCall, incoming: Incoming) -> Gradients:
    if call.dropout_p == 0.0:
        incoming = replace(incoming, rng_state=None)
    found: Gradients = call_extension("backward", call.q.device, call, incoming)
    if found.dbias is not None and call.bias is not None:
        found = found._replace(dbias=found.dbias.to(call.bias.dtype))
    return found


def empty_gradients(call: AttentionCall, incoming: Incoming) -> Gradients:
    made: dict[str, Any] = dict.fromkeys(Gradients._fields)
    for name in DIFFERENTIABLE:
        argument = getattr(call, name)
        if argument is not None and (name != "bias" or incoming.wants_dbias):
            dtype = call.result_dtype() if f"d{name}" in TARGETS else argument.dtype
            made[f"d{name}"] = argument.new_empty(argument.shape, dtype=dtype)
    return Gradients(**made)


def gradients_for_operator(call: AttentionCall, found: Gradients) -> tuple[Tensor, ...]:
    """Empty tensors, of an argument's dtype, for those that there are not."""
    made = []
    for name in DIFFERENTIABLE:
        argument, gradient = getattr(call, name), getattr(found, f"d{name}")
        like: Tensor = call.q if argument is None else argument
        made.append(like.new_empty((0,)) if gradient is None else gradient)
    return tuple(made)


def _gradients_on_cuda(call: AttentionCall, incoming: Incoming) -> tuple[Tensor, ...]:
    return gradients_for_operator(call, _backward_on_cuda(call, incoming))


gradients_op: Any = define(
    "attention_gradients",
    schema_of(GRADIENTS, (AttentionCall, OF_BACKWARD), (Incoming, INCOMING)),
    check=_checked_backward,
    cpu=lambda call, incoming: gradients_for_operator(call, _backward_on_cpu(call, incoming)),
    cuda=_gradients_on_cuda,
    fake=lambda call, incoming: gradients_for_operator(call, empty_gradients(call, incoming)),
)
gradients_on_cuda: Any = without_dispatcher(_checked_backward, _made_backward, _gradients_on_cuda)


def _written_on_cpu(call: AttentionCall, incoming: Incoming) -> Tensor | None:
    found = _backward_on_cpu(call, incoming)
    for name in TARGETS:
        target, gradient = getattr(incoming, name), getattr(found, name)
        if target is not None:
            target.add_(gradient) if incoming.accumulate else target.copy_(gradient)
    return found.softmax_d


def _written_on_cuda(call: AttentionCall, incoming: Incoming) -> Tensor | None:
    return _backward_on_cuda(call, replace(incoming, wants_softmax_d=True)).softmax_d


_backward_op = define(
    "attention_backward",
    schema_of(
        "Tensor softmax_d",
        *((AttentionCall, OF_BACKWARD), (Incoming, INCOMING_AND_TARGETS)),
        mutated=TARGETS,
    ),
    mutated=TARGETS,
    check=_checked_backward,
    cpu=_written_on_cpu,
    cuda=_written_on_cuda,
    fake=lambda call, _: call.q.new_empty(call.softmax_d_shape(), dtype=call.lse_dtype()),
)


def run_backward_operator(call: AttentionCall, incoming: Incoming) -> Tensor:
    """Writes dq, dk and dv where they are given, or adds to them; returns softmax_d."""
    return ops.attention_backward(
        *arguments_of(call, OF_BACKWARD), *arguments_of(incoming, INCOMING_AND_TARGETS)
    )
