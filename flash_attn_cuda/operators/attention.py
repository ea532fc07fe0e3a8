"""Custom operators of namespace `flash_attn_cuda`, for torch.compile, export, vmap, autograd. Their
arguments are the fields of an AttentionCall (call.py), in order.

    attention              differentiable in q, k, v, bias and sink, through softmax_lse too
    attention_with_append  writes new keys and values into a cache first; without gradients
    attention_gradients    the first one's gradients as new tensors: its autograd formula
    attention_backward     the same into given dq, dk and dv, or added to them; returns softmax_d
    gradient_over_pages    stands for a gradient through pages or a cache, and refuses to run

attend.py and private.py call them; combine.py has those of partial results.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..call import (
    DIFFERENTIABLE,
    FIELDS,
    OF_BACKWARD,
    READ,
    TENSORS,
    AttentionCall,
    Gradients,
    Incoming,
    Results,
)
from ..checks.calls import check_call, check_contents, check_gradients, check_incoming
from ..checks.tensors import output_shape, refuse_forward_gradients
from ..cpu.calls import backward_on_cpu, forward_on_cpu
from .support import (
    RANDOM,
    arguments_of,
    call_extension,
    check_randomness,
    draw_rng_state,
    empty_rng_state,
    for_transforms,
    is_functorch_active,
    no_double_backward,
    one_by_one,
    save_nothing,
    schema_of,
    select_entry,
)

_ops = torch.ops.flash_attn_cuda
# Of the operator that returns gradients; softmax_d is the other one's.
_GRADIENTS = tuple(name for name in Gradients._fields if name != "softmax_d")
_NO_GRADIENTS_OVER_PAGES = (
    "block_table: must be None in a call whose gradients are wanted, got a tensor; gradients "
    "through the pages of a block_table are not implemented"
)

# -- forward -------------------------------------------------------------------------------------


def _checked(args: tuple[Any, ...], names: Sequence[str] = READ) -> AttentionCall:
    call = AttentionCall(**dict(zip(names, args, strict=True)))
    check_call(call)
    return call


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
    if found.S_dmask is None:
        found = found._replace(S_dmask=call.q.new_empty((0,)))
    if found.rng_state is None:
        found = found._replace(rng_state=empty_rng_state(call.q, 0.0))
    return found


def _empty_results(call: AttentionCall) -> Results:
    q = call.q
    return Results(
        out=q.new_empty(output_shape(q, call.v), dtype=call.result_dtype()),
        softmax_lse=q.new_empty(call.lse_shape(), dtype=call.lse_dtype()),
        S_dmask=q.new_empty(call.s_dmask_shape()),
        rng_state=empty_rng_state(q, call.dropout_p),
    )


@torch.library.custom_op(
    "flash_attn_cuda::attention",
    mutates_args=(),
    device_types="cpu",
    schema=schema_of(Results._fields, (AttentionCall, READ)),
    **RANDOM,
)
def _attention_op(*args: Any) -> tuple[Any, ...]:
    return tuple(_on_cpu(_checked(args)))


@_attention_op.register_kernel("cuda")
def _(*args: Any) -> tuple[Any, ...]:
    return tuple(_on_cuda(_checked(args)))


@_attention_op.register_fake
def _(*args: Any) -> tuple[Any, ...]:
    return tuple(_empty_results(_checked(args)))


def _checked_append(args: tuple[Any, ...]) -> AttentionCall:
    call = _checked(args, FIELDS)
    if call.k_new is None or not call.over_cache:
        raise ValueError("k: must be given, over a cache; attention reads one alone")
    return call


@torch.library.custom_op(
    "flash_attn_cuda::attention_with_append",
    mutates_args=("k", "v"),
    device_types="cpu",
    schema=schema_of(Results._fields, (AttentionCall, FIELDS), mutated=("k", "v")),
)
def _append_op(*args: Any) -> tuple[Any, ...]:
    return tuple(_on_cpu(_checked_append(args)))


@_append_op.register_kernel("cuda")
def _(*args: Any) -> tuple[Any, ...]:
    return tuple(_on_cuda(_checked_append(args)))


@_append_op.register_fake
def _(*args: Any) -> tuple[Any, ...]:
    return tuple(_empty_results(_checked_append(args)))


def run_operator(call: AttentionCall) -> Results:
    """By the operator that the call is for."""
    if call.k_new is not None:
        return Results(*_ops.attention_with_append(*arguments_of(call, FIELDS)))
    op = _attention_for_transforms if is_functorch_active() else _ops.attention
    return Results(*op(*arguments_of(call, READ)))


# -- the autograd formula ------------------------------------------------------------------------


_SAVED = tuple(name for name in TENSORS if name in OF_BACKWARD)


def _save_for_gradients(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    call = AttentionCall(**dict(zip(READ, inputs, strict=True)))
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
    sink = tensors["sink"]
    if not wanted["sink"]:
        tensors["sink"] = None
    call = AttentionCall(**tensors, **ctx.others)
    incoming = Incoming(dout, dlse, out, softmax_lse, rng_state, wants_dbias=wanted["bias"])
    found = run_gradients_operator(call, incoming)
    made: dict[str, Any] = {name: getattr(found, f"d{name}") for name in DIFFERENTIABLE}
    made["bias"] = made["bias"] if wanted["bias"] else None
    made["sink"] = made["sink"].to(sink.dtype) if wanted["sink"] and sink is not None else None
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

TARGETS = ("dq", "dk", "dv")
INCOMING = ("dout", "dlse", "out", "softmax_lse", "rng_state", "wants_dbias")
INCOMING_AND_TARGETS = (*INCOMING, *TARGETS, "accumulate")


def _checked_backward(
    args: tuple[Any, ...], names: Sequence[str]
) -> tuple[AttentionCall, Incoming]:
    count = len(OF_BACKWARD)
    call = _checked(args[:count], OF_BACKWARD)
    incoming = Incoming(**dict(zip(names, args[count:], strict=True)))
    check_incoming(call, incoming)
    return call, incoming


def _backward_on_cuda(call: AttentionCall, incoming: Incoming) -> Gradients:
    if call.dropout_p == 0.0:
        incoming = replace(incoming, rng_state=None)
    return call_extension("backward", call.q.device, call, incoming)


def _empty_gradients(call: AttentionCall, wants_dbias: bool) -> tuple[Tensor, ...]:
    q, k, v = call.q, call.k, call.v
    dbias = q.new_empty((0,))
    if wants_dbias and call.bias is not None:
        dbias = q.new_empty(tuple(call.bias.shape), dtype=call.bias.dtype)
    elif call.bias is not None:
        dbias = dbias.to(call.bias.dtype)
    sizes = (0,) if call.sink is None else tuple(call.sink.shape)
    dsink = q.new_empty(sizes, dtype=call.lse_dtype())
    dq, dk, dv = (x.new_empty(x.shape, dtype=call.result_dtype()) for x in (q, k, v))
    return dq, dk, dv, dbias, dsink


@torch.library.custom_op(
    "flash_attn_cuda::attention_gradients",
    mutates_args=(),
    device_types="cpu",
    schema=schema_of(
        _GRADIENTS,
        (AttentionCall, OF_BACKWARD),
        (Incoming, INCOMING),
    ),
)
def _gradients_op(*args: Any) -> tuple[Tensor, ...]:
    call, incoming = _checked_backward(args, INCOMING)
    check_contents(call)
    return arguments_of(backward_on_cpu(call, incoming), _GRADIENTS)


@_gradients_op.register_kernel("cuda")
def _(*args: Any) -> tuple[Tensor, ...]:
    call, incoming = _checked_backward(args, INCOMING)
    found = _backward_on_cuda(call, incoming)
    dtype = call.q.dtype if call.bias is None else call.bias.dtype
    dbias = call.q.new_empty((0,)) if found.dbias is None else found.dbias
    found = found._replace(dbias=dbias.to(dtype))
    if found.dsink is None:
        found = found._replace(dsink=call.q.new_empty((0,), dtype=call.lse_dtype()))
    return arguments_of(found, _GRADIENTS)


@_gradients_op.register_fake
def _(*args: Any) -> tuple[Tensor, ...]:
    call, incoming = _checked_backward(args, INCOMING)
    return _empty_gradients(call, incoming.wants_dbias)


def run_gradients_operator(call: AttentionCall, incoming: Incoming) -> Gradients:
    """Without softmax_d; dbias and dsink are empty where the call has no bias, or none of it is
    wanted, and no sink.
    """
    op = _gradients_for_transforms if is_functorch_active() else _ops.attention_gradients
    found = op(*arguments_of(call, OF_BACKWARD), *arguments_of(incoming, INCOMING))
    return Gradients(**dict(zip(_GRADIENTS, found, strict=True)), softmax_d=None)


_gradients_op.register_autograd(no_double_backward)
_gradients_for_transforms = for_transforms(_gradients_op, save_nothing, no_double_backward)


@torch.library.custom_op(
    "flash_attn_cuda::attention_backward",
    mutates_args=TARGETS,
    device_types="cpu",
    schema=schema_of(
        "Tensor softmax_d",
        (AttentionCall, OF_BACKWARD),
        (Incoming, INCOMING_AND_TARGETS),
        mutated=TARGETS,
    ),
)
def _backward_op(*args: Any) -> Tensor | None:
    call, incoming = _checked_backward(args, INCOMING_AND_TARGETS)
    check_contents(call)
    found = backward_on_cpu(call, incoming)
    for name in TARGETS:
        target, gradient = getattr(incoming, name), getattr(found, name)
        if target is not None and incoming.accumulate:
            target.add_(gradient)
        elif target is not None:
            target.copy_(gradient)
    return found.softmax_d


@_backward_op.register_kernel("cuda")
def _(*args: Any) -> Tensor | None:
    call, incoming = _checked_backward(args, INCOMING_AND_TARGETS)
    return _backward_on_cuda(call, replace(incoming, wants_softmax_d=True)).softmax_d


@_backward_op.register_fake
def _(*args: Any) -> Tensor:
    call, _ = _checked_backward(args, INCOMING_AND_TARGETS)
    return call.q.new_empty(call.softmax_d_shape(), dtype=call.lse_dtype())


def run_backward_operator(call: AttentionCall, incoming: Incoming) -> Tensor:
    """Writes dq, dk and dv where they are given, or adds to them; returns softmax_d."""
    return _ops.attention_backward(
        *arguments_of(call, OF_BACKWARD), *arguments_of(incoming, INCOMING_AND_TARGETS)
    )


# -- vmap ----------------------------------------------------------------------------------------

_DROPOUT = READ.index("dropout_p")
_forward_one_by_one = one_by_one(_attention_op, _DROPOUT)
_FOLDED = frozenset(
    (
        "q",
        "k",
        "v",
        "dropout_p",
        "softmax_scale",
        "causal",
        "window_size_left",
        "window_size_right",
        "softcap",
        "alibi_slopes",
        "deterministic",
        "return_softmax",
    )
)


def _folds_into_batch(call: AttentionCall) -> bool:
    """Whether a call over one more dimension is a call of a larger batch: one whose other tensors
    are None, and not over a cache, which nobody copies.
    """
    others = (getattr(call, name) for name in TENSORS if name not in _FOLDED)
    return not call.over_cache and all(x is None for x in others)


@_attention_op.register_vmap
def _(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, tuple[Any, ...]]:
    call, size = AttentionCall(**dict(zip(READ, args, strict=True))), info.batch_size
    if not _folds_into_batch(call):
        return _forward_one_by_one(info, in_dims, *args)
    check_randomness(call.dropout_p, info.randomness)
    folded, batch = _folded(call, dict(zip(READ, in_dims, strict=True)), size)
    out, softmax_lse, s_dmask, rng_state = _attention_op(*arguments_of(folded, READ))
    out, softmax_lse = (_unfold_batch(size, batch, x) for x in (out, softmax_lse))
    if call.wants_s_dmask():
        return (out, softmax_lse, _unfold_batch(size, batch, s_dmask), rng_state), (0, 0, 0, None)
    return (out, softmax_lse, s_dmask, rng_state), (0, 0, None, None)


@_gradients_op.register_vmap
def _(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, tuple[Any, ...]]:
    size, count = info.batch_size, len(OF_BACKWARD)
    call = AttentionCall(**dict(zip(OF_BACKWARD, args[:count], strict=True)))
    given = dict(zip(INCOMING, args[count:], strict=True))
    dims = dict(zip((*OF_BACKWARD, *INCOMING), in_dims, strict=True))
    # Where the forward was not mapped, batch entries are part of what decides about dropout.
    is_of_one_forward = call.dropout_p > 0.0 and dims["out"] is None
    if size > 0 and (is_of_one_forward or not _folds_into_batch(call)):
        each = [_gradients_op(*select_entry(args, in_dims, index)) for index in range(size)]
        results = tuple(torch.stack(x) for x in zip(*each, strict=True))
        return results, (0,) * len(results)
    folded, batch = _folded(call, dims, size)
    for name in ("dout", "dlse", "out", "softmax_lse"):
        given[name] = _fold_into_batch(size, given[name], dims[name])
    *found, dbias, dsink = _gradients_op(*arguments_of(folded, OF_BACKWARD), *given.values())
    dq, dk, dv = (_unfold_batch(size, batch, x) for x in found)
    return (dq, dk, dv, dbias, dsink), (0, 0, 0, None, None)


def _folded(call: AttentionCall, dims: dict[str, Any], size: int) -> tuple[AttentionCall, int]:
    """The call with vmap's dimension in its batch, and the batch of one entry."""
    batch = _batch_of(call.q, dims["q"])
    tensors = {name: _fold_into_batch(size, getattr(call, name), dims[name]) for name in "qkv"}
    slopes = _fold_slopes(size, batch, call.alibi_slopes, dims["alibi_slopes"])
    return replace(call, **tensors, alibi_slopes=slopes), batch


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


def _unfold_batch(size: int, batch: int, x: Tensor) -> Tensor:
    return x.unflatten(0, (size, batch))


def _batch_of(x: Tensor, dim: int | None) -> int:
    """The batch of one entry of vmap's dimension."""
    return x.shape[0] if dim is None else x.movedim(dim, 0).shape[1]
