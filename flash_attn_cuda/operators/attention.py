"""Custom operators of namespace `flash_attn_cuda`, for torch.compile, export, vmap, autograd. Their
arguments are the fields of an AttentionCall (call.py), in order.

    attention              differentiable in what call.py says, through softmax_lse too
    attention_with_append  writes new keys and values into a cache first; without gradients
    attention_gradients    the first one's gradients as new tensors: its autograd formula
    attention_backward     the same into given dq, dk and dv, or added to them; returns softmax_d
    gradient_over_pages    stands for a gradient through pages or a cache, and refuses to run

attend.py and private.py call them; combine.py has those of partial results.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..call import (
    ARGUMENTS,
    DIFFERENTIABLE,
    FIELDS,
    INCOMING,
    INCOMING_AND_TARGETS,
    OF_BACKWARD,
    READ,
    TARGETS,
    TENSORS,
    AttentionCall,
    Gradients,
    Incoming,
    Results,
    forms_of_results,
)
from ..checks.calls import check_call, check_contents, check_gradients, check_incoming
from ..checks.tensors import refuse_forward_gradients
from ..cpu.calls import backward_on_cpu, forward_on_cpu
from .support import (
    RANDOM,
    arguments_of,
    call_extension,
    check_randomness,
    define,
    draw_rng_state,
    for_transforms,
    is_functorch_active,
    no_double_backward,
    one_by_one,
    save_nothing,
    schema_of,
)

_ops = torch.ops.flash_attn_cuda
# Of the operator that returns gradients; softmax_d is the other one's.
_GRADIENTS = tuple(f"d{name}" for name in DIFFERENTIABLE)
_NO_GRADIENTS_OVER_PAGES = (
    "block_table: must be None in a call whose gradients are wanted, got a tensor; gradients "
    "through the pages of a block_table are not implemented"
)

# -- forward -------------------------------------------------------------------------------------


def _described(args: Sequence[Any], names: Sequence[str] = READ) -> AttentionCall:
    return AttentionCall(**dict(zip(names, args, strict=True)))


def _checked(*args: Any) -> tuple[AttentionCall]:
    call = _described(args)
    check_call(call)
    return (call,)


def _checked_append(*args: Any) -> tuple[AttentionCall]:
    call = _described(args, FIELDS)
    check_call(call)
    if call.k_new is None or not call.over_cache:
        raise ValueError("k: must be given, over a cache; attention reads one alone")
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
_attention_op = define(
    "attention",
    schema_of(Results._fields, (AttentionCall, READ)),
    check=_checked,
    **_FORWARD,
    **RANDOM,
)
_append_op = define(
    "attention_with_append",
    schema_of(Results._fields, (AttentionCall, FIELDS), mutated=("k", "v")),
    mutated=("k", "v"),
    check=_checked_append,
    **_FORWARD,
)


def run_operator(call: AttentionCall) -> Results:
    """By the operator that the call is for."""
    if call.k_new is not None:
        return Results(*_ops.attention_with_append(*arguments_of(call, FIELDS)))
    op = _attention_for_transforms if is_functorch_active() else _ops.attention
    return Results(*op(*arguments_of(call, READ)))


# -- the autograd formula ------------------------------------------------------------------------


_SAVED = tuple(name for name in TENSORS if name in OF_BACKWARD)


def _save_for_gradients(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    call = _described(inputs)
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[2:])
    ctx.in_place = call.reads_in_place()
    if ctx.in_place:
        # Not the tensors: nothing reads them, and pages may be written before the backward refuses.
        tensors = {name: getattr(call, name) for name in DIFFERENTIABLE}
        ctx.wanted = {name: (x.shape, x.dtype) for name, x in tensors.items() if x is not None}
        return
    if call.fp32_results and any(ctx.needs_input_grad):
        raise NotImplementedError(
            "fp32_results: must be False in a call whose gradients are wanted, got True"
        )
    check_gradients(call, wants_dbias=ctx.needs_input_grad[READ.index("bias")])
    results = Results(*output)
    kept = (results.out, results.softmax_lse, results.rng_state)
    ctx.save_for_backward(*arguments_of(call, _SAVED), *kept)
    ctx.others = {name: getattr(call, name) for name in OF_BACKWARD if name not in TENSORS}


def _gradients(ctx: Any, dout: Tensor | None, dlse: Tensor | None, *_: None) -> tuple[Any, ...]:
    refuse_forward_gradients(dout=dout, dlse=dlse)
    gradient = dlse if dout is None else dout
    if gradient is None:
        return (None,) * len(READ)
    if ctx.in_place:
        return _gradients_in_place(ctx, gradient)
    wanted = dict(zip(READ, ctx.needs_input_grad, strict=True))
    *saved, out, softmax_lse, rng_state = ctx.saved_tensors
    tensors = dict(zip(_SAVED, saved, strict=True))
    for name in DIFFERENTIABLE:
        if ARGUMENTS[name].is_in_lse and not wanted[name]:
            tensors[name] = None
    call = AttentionCall(**tensors, **ctx.others)
    incoming = Incoming(dout, dlse, out, softmax_lse, rng_state, wants_dbias=wanted["bias"])
    found = run_gradients_operator(call, incoming)
    made = {name: getattr(found, f"d{name}") for name in DIFFERENTIABLE if wanted[name]}
    return tuple(made.get(name) for name in READ)


def _gradients_in_place(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    """Refuses, or, where a compiler traces this together with the forward, leaves it to operators
    that refuse when the backward runs.
    """
    if is_functorch_active():
        raise NotImplementedError(_NO_GRADIENTS_OVER_PAGES)
    op = _ops.gradient_over_pages
    return tuple(op(gradient, *ctx.wanted[x]) if x in ctx.wanted else None for x in READ)


@torch.library.custom_op(
    "flash_attn_cuda::gradient_over_pages",
    mutates_args=(),
    schema="(Tensor gradient, SymInt[] sizes, ScalarType dtype) -> Tensor",
)
def _gradient_over_pages_op(gradient: Tensor, sizes: Sequence[int], dtype: torch.dtype) -> Tensor:
    raise NotImplementedError(_NO_GRADIENTS_OVER_PAGES)


@_gradient_over_pages_op.register_fake
def _(gradient: Tensor, sizes: Sequence[int], dtype: torch.dtype) -> Tensor:
    return gradient.new_empty(sizes, dtype=dtype)


_attention_op.register_autograd(_gradients, setup_context=_save_for_gradients)
_attention_for_transforms = for_transforms(_attention_op, _save_for_gradients, _gradients)

# -- backward ------------------------------------------------------------------------------------


def _checked_backward(*args: Any) -> tuple[AttentionCall, Incoming]:
    count = len(OF_BACKWARD)
    call = _described(args[:count], OF_BACKWARD)
    check_call(call)
    # The operator that returns gradients takes the first of them.
    incoming = Incoming(**dict(zip(INCOMING_AND_TARGETS, args[count:], strict=False)))
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


def _empty_gradients(call: AttentionCall, incoming: Incoming) -> Gradients:
    made: dict[str, Any] = dict.fromkeys(Gradients._fields)
    for name in DIFFERENTIABLE:
        argument = getattr(call, name)
        if argument is not None and (name != "bias" or incoming.wants_dbias):
            dtype = call.result_dtype() if f"d{name}" in TARGETS else argument.dtype
            made[f"d{name}"] = argument.new_empty(argument.shape, dtype=dtype)
    return Gradients(**made)


def _for_operator(call: AttentionCall, found: Gradients) -> tuple[Tensor, ...]:
    """Empty tensors, of an argument's dtype, for those that there are not."""
    made = []
    for name in DIFFERENTIABLE:
        argument, gradient = getattr(call, name), getattr(found, f"d{name}")
        like: Tensor = call.q if argument is None else argument
        made.append(like.new_empty((0,)) if gradient is None else gradient)
    return tuple(made)


_gradients_op = define(
    "attention_gradients",
    schema_of(_GRADIENTS, (AttentionCall, OF_BACKWARD), (Incoming, INCOMING)),
    check=_checked_backward,
    cpu=lambda call, incoming: _for_operator(call, _backward_on_cpu(call, incoming)),
    cuda=lambda call, incoming: _for_operator(call, _backward_on_cuda(call, incoming)),
    fake=lambda call, incoming: _for_operator(call, _empty_gradients(call, incoming)),
)


def run_gradients_operator(call: AttentionCall, incoming: Incoming) -> Gradients:
    """Without softmax_d; gradients of what the call does not have, or that are not wanted, are
    empty.
    """
    op = _gradients_for_transforms if is_functorch_active() else _ops.attention_gradients
    found = op(*arguments_of(call, OF_BACKWARD), *arguments_of(incoming, INCOMING))
    return Gradients(**dict(zip(_GRADIENTS, found, strict=True)), softmax_d=None)


_gradients_op.register_autograd(no_double_backward)
_gradients_for_transforms = for_transforms(_gradients_op, save_nothing, no_double_backward)


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
    return _ops.attention_backward(
        *arguments_of(call, OF_BACKWARD), *arguments_of(incoming, INCOMING_AND_TARGETS)
    )


# -- vmap ----------------------------------------------------------------------------------------

_FOLDED = ("q", "k", "v", "alibi_slopes")
_OTHERS = tuple(name for name in TENSORS if name not in _FOLDED)
# Results of which every batch entry has its own, and what it may share with others.
_OF_ENTRIES = frozenset(("out", "softmax_lse", "S_dmask"))
_SHARED = frozenset(("rng_state",))


def _folds_into_batch(call: AttentionCall) -> bool:
    """Whether a call over one more dimension is a call of a larger batch: one whose other tensors
    are None, and not over a cache, which nobody copies.
    """
    return not call.over_cache and all(x is None for x in arguments_of(call, _OTHERS))


@_attention_op.register_vmap
def _(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, tuple[Any, ...]]:
    call, size = _described(args), info.batch_size
    check_randomness(call.dropout_p, info.randomness)
    if not _folds_into_batch(call):
        return one_by_one(_attention_op, size, in_dims, args)
    folded, batch = _folded(call, dict(zip(READ, in_dims, strict=True)), size)
    wanted = {name for name, (shape, _) in forms_of_results(folded).items() if shape != (0,)}
    if not wanted <= _OF_ENTRIES | _SHARED:
        return one_by_one(_attention_op, size, in_dims, args)
    found = _attention_op(*arguments_of(folded, READ))
    mapped = wanted & _OF_ENTRIES
    return _unfolded(dict(zip(Results._fields, found, strict=True)), mapped, size, batch)


@_gradients_op.register_vmap
def _(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, tuple[Any, ...]]:
    size, count = info.batch_size, len(OF_BACKWARD)
    call = _described(args[:count], OF_BACKWARD)
    given = dict(zip(INCOMING, args[count:], strict=True))
    dims = dict(zip((*OF_BACKWARD, *INCOMING), in_dims, strict=True))
    # Where the forward was not mapped, batch entries are part of what decides about dropout.
    is_of_one_forward = call.dropout_p > 0.0 and dims["out"] is None
    if size > 0 and (is_of_one_forward or not _folds_into_batch(call)):
        return one_by_one(_gradients_op, size, in_dims, args)
    folded, batch = _folded(call, dims, size)
    for name in ("dout", "dlse", "out", "softmax_lse"):
        given[name] = _fold_into_batch(size, given[name], dims[name])
    found = _gradients_op(*arguments_of(folded, OF_BACKWARD), *given.values())
    return _unfolded(dict(zip(_GRADIENTS, found, strict=True)), TARGETS, size, batch)


def _folded(call: AttentionCall, dims: dict[str, Any], size: int) -> tuple[AttentionCall, int]:
    """The call with vmap's dimension in its batch, and the batch of one entry."""
    dim = dims["q"]
    batch = call.q.shape[0] if dim is None else call.q.movedim(dim, 0).shape[1]
    folded = {name: _fold_into_batch(size, getattr(call, name), dims[name]) for name in "qkv"}
    slopes = _fold_slopes(size, batch, call.alibi_slopes, dims["alibi_slopes"])
    return replace(call, **folded, alibi_slopes=slopes), batch


def _fold_into_batch(size: int, x: Any, dim: int | None) -> Any:
    """Merge vmap's dimension into the batch of a tensor; one without it is repeated."""
    if x is None:
        return None
    x = x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
    return x.flatten(0, 1)


def _fold_slopes(size: int, batch: int, slopes: Any, dim: int | None) -> Any:
    """ALiBi slopes (heads,) or (batch, heads) of the folded batch."""
    if slopes is None or (dim is None and slopes.dim() == 1):
        return slopes
    slopes = slopes.expand(size, *slopes.shape) if dim is None else slopes.movedim(dim, 0)
    if slopes.dim() == 2:
        slopes = slopes[:, None]
    return slopes.expand(size, batch, slopes.shape[-1]).flatten(0, 1)


def _unfolded(
    found: dict[str, Tensor], mapped: Collection[str], size: int, batch: int
) -> tuple[tuple[Tensor, ...], tuple[int | None, ...]]:
    """Results and where vmap's dimension is in each; those `mapped` have it in the batch."""
    results = tuple(
        x.unflatten(0, (size, batch)) if name in mapped else x for name, x in found.items()
    )
    return results, tuple(0 if name in mapped else None for name in found)
