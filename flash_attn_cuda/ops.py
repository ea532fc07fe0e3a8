"""Custom operators of namespace `flash_attn_cuda`, for torch.compile, export, vmap, autograd.

    _flash_attn_forward    FlashAttention-2's operator; differentiable, through softmax_lse too
    _flash_attn_backward   FlashAttention-2's operator; writes dq, dk, dv and returns softmax_d
    _flash_attn_gradients  the same gradients as new tensors: the first one's autograd formula

private.py and interface.py are what people call.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from . import build_info, cpu
from .checks import (
    causal_from_window,
    check_attention_inputs,
    check_backward_inputs,
    check_cuda_head_dim,
    check_like,
    lse_dtype,
    not_implemented,
    refuse_later_arguments,
)

_ops = torch.ops.flash_attn_cuda

Tensors3 = tuple[Tensor, Tensor, Tensor]
Tensors4 = tuple[Tensor, Tensor, Tensor, Tensor]
Tensors6 = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]

# -- forward -------------------------------------------------------------------------------------


@torch.library.custom_op(
    "flash_attn_cuda::_flash_attn_forward",
    mutates_args=(),
    device_types="cpu",
    schema=(
        "(Tensor q, Tensor k, Tensor v, float dropout_p, float softmax_scale, bool causal, "
        "SymInt window_size_left, SymInt window_size_right, float softcap, Tensor? alibi_slopes, "
        "bool return_softmax) -> (Tensor out, Tensor softmax_lse, Tensor S_dmask, Tensor rng_state)"
    ),
)
def _forward_op(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> Tensors4:
    softmax_scale, causal = _check_forward(q, k, v, *options)
    with torch.autocast("cpu", enabled=False):
        out, softmax_lse = cpu.attention_forward(q, k, v, softmax_scale, causal)
    return out, softmax_lse, *_no_dropout_state(q)


@_forward_op.register_kernel("cuda")
def _(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> Tensors4:
    softmax_scale, causal = _check_forward(q, k, v, *options)
    out, softmax_lse, s_dmask, rng_state = _call_extension(
        "fwd",
        *(q, k, v),
        out=None,
        alibi_slopes=None,
        p_dropout=0.0,
        softmax_scale=softmax_scale,
        is_causal=causal,
        window_left=-1,
        window_right=-1,
        softcap=0.0,
        return_softmax=False,
        unused_generator=None,
    )
    return out, softmax_lse, s_dmask, rng_state


@_forward_op.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> Tensors4:
    _check_forward(q, k, v, *options)
    batch, seqlen_q, heads_q, _ = q.shape
    softmax_lse = q.new_empty((batch, heads_q, seqlen_q), dtype=lse_dtype(q.dtype))
    return q.new_empty(q.shape), softmax_lse, *_no_dropout_state(q)


def _save_for_gradients(ctx: Any, inputs: tuple[Any, ...], output: Tensors4) -> None:
    q, k, v, _, softmax_scale, causal, window_left, window_right, *_ = inputs
    out, softmax_lse, s_dmask, rng_state = output
    ctx.save_for_backward(q, k, v, out, softmax_lse)
    ctx.softmax_scale = softmax_scale
    ctx.causal = causal_from_window(causal, (window_left, window_right))
    ctx.mark_non_differentiable(s_dmask, rng_state)
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, dout: Tensor | None, dlse: Tensor | None, *_: None) -> tuple[Any, ...]:
    options = (None,) * 8
    if dout is None and dlse is None:
        return None, None, None, *options
    op = _FunctorchGradients.apply if is_functorch_active() else _ops._flash_attn_gradients
    return *op(dout, dlse, *ctx.saved_tensors, ctx.softmax_scale, ctx.causal), *options


_forward_op.register_autograd(_gradients, setup_context=_save_for_gradients)


@_forward_op.register_vmap
def _(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Tensors4, tuple[Any, ...]]:
    q, k, v = _fold_into_batch(info.batch_size, args[:3], in_dims[:3])
    out, softmax_lse, s_dmask, rng_state = _forward_op(q, k, v, *args[3:])
    out, softmax_lse = _unfold_batch(info.batch_size, (out, softmax_lse))
    return (out, softmax_lse, s_dmask, rng_state), (0, 0, None, None)


# -- backward into given tensors -----------------------------------------------------------------


@torch.library.custom_op(
    "flash_attn_cuda::_flash_attn_backward",
    mutates_args=("dq", "dk", "dv"),
    device_types="cpu",
    schema=(
        "(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, "
        "Tensor(a!)? dq, Tensor(b!)? dk, Tensor(c!)? dv, float dropout_p, float softmax_scale, "
        "bool causal, SymInt window_size_left, SymInt window_size_right, float softcap, "
        "Tensor? alibi_slopes, bool deterministic, Tensor? rng_state=None, Tensor? dlse=None) "
        "-> Tensor softmax_d"
    ),
)
def _backward_op(*args: Any) -> Tensor:
    tensors, targets, softmax_scale, causal, dlse = _check_backward(*args)
    with torch.autocast("cpu", enabled=False):
        *gradients, softmax_d = cpu.attention_backward(*tensors, softmax_scale, causal, dlse)
    for target, gradient in zip(targets, gradients, strict=True):
        if target is not None:
            target.copy_(gradient)
    return softmax_d


@_backward_op.register_kernel("cuda")
def _(*args: Any) -> Tensor:
    return _cuda_backward(*_check_backward(*args))[3]


@_backward_op.register_fake
def _(*args: Any) -> Tensor:
    (_, q, *_), _, _, _, _ = _check_backward(*args)
    batch, seqlen_q, heads_q, _ = q.shape
    rows = cpu.round_up_seqlen(seqlen_q)
    return q.new_empty((batch, heads_q, rows), dtype=lse_dtype(q.dtype))


# -- backward into new tensors -------------------------------------------------------------------


@torch.library.custom_op(
    "flash_attn_cuda::_flash_attn_gradients",
    mutates_args=(),
    device_types="cpu",
    schema=(
        "(Tensor? dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, "
        "Tensor softmax_lse, float softmax_scale, bool causal) -> (Tensor dq, Tensor dk, Tensor dv)"
    ),
)
def _gradients_op(dout: Tensor | None, dlse: Tensor | None, *args: Any) -> Tensors3:
    tensors, softmax_scale, causal = _check_gradients(dout, dlse, *args)
    with torch.autocast("cpu", enabled=False):
        dq, dk, dv, _ = cpu.attention_backward(*tensors, softmax_scale, causal, dlse)
    return dq, dk, dv


@_gradients_op.register_kernel("cuda")
def _(dout: Tensor | None, dlse: Tensor | None, *args: Any) -> Tensors3:
    tensors, softmax_scale, causal = _check_gradients(dout, dlse, *args)
    dq, dk, dv, _ = _cuda_backward(tensors, (None, None, None), softmax_scale, causal, dlse)
    return dq, dk, dv


@_gradients_op.register_fake
def _(dout: Tensor | None, dlse: Tensor | None, *args: Any) -> Tensors3:
    (_, q, k, v, *_), _, _ = _check_gradients(dout, dlse, *args)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _no_double_backward(ctx: Any, *_: Any) -> None:
    raise NotImplementedError(
        "flash_attn_cuda does not implement double backward: the gradients of attention cannot be "
        "differentiated again (create_graph=True)"
    )


_gradients_op.register_autograd(_no_double_backward)


@_gradients_op.register_vmap
def _(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Tensors3, tuple[int, ...]]:
    tensors = _fold_into_batch(info.batch_size, args[:7], in_dims[:7])
    dq, dk, dv = _unfold_batch(info.batch_size, _gradients_op(*tensors, *args[7:]))
    return (dq, dk, dv), (0, 0, 0)


# -- torch.func ----------------------------------------------------------------------------------
# Its transforms want autograd formulas as autograd.Functions of a form custom_op does not make.


class _FunctorchAttention(torch.autograd.Function):
    generate_vmap_rule = True
    setup_context = staticmethod(_save_for_gradients)
    backward = staticmethod(_gradients)

    @staticmethod
    def forward(*args: Any) -> Tensors4:
        return _forward_op(*args)


class _FunctorchGradients(torch.autograd.Function):
    generate_vmap_rule = True
    backward = staticmethod(_no_double_backward)

    @staticmethod
    def forward(*args: Any) -> Tensors3:
        return _gradients_op(*args)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensors3) -> None:
        pass


forward_for_transforms = _FunctorchAttention.apply


def is_functorch_active() -> bool:
    """Whether a transform of torch.func, vmap included, is running."""
    return not is_compiling() and torch._C._are_functorch_transforms_active()


# -- shared pieces -------------------------------------------------------------------------------


def _check_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    return_softmax: bool,
) -> tuple[float, bool]:
    """Raise for what no backend runs; returns (softmax_scale, causal with the window folded in)."""
    refuse_later_arguments(dropout_p, softcap, alibi_slopes, deterministic=False)
    if return_softmax:
        raise not_implemented("return_softmax", "must be False", return_softmax)
    causal = causal_from_window(causal, (window_size_left, window_size_right))
    check_attention_inputs(q, k, v, softmax_scale)
    check_cuda_head_dim(q)
    return softmax_scale, causal


def _check_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None = None,
    dlse: Tensor | None = None,
) -> tuple[Tensors6, tuple[Tensor | None, ...], float, bool, Tensor | None]:
    """Raise for what no backend runs; returns (tensors, targets, softmax_scale, causal, dlse)."""
    refuse_later_arguments(dropout_p, softcap, alibi_slopes, deterministic)
    causal = causal_from_window(causal, (window_size_left, window_size_right))
    tensors = (dout, q, k, v, out, softmax_lse)
    check_backward_inputs(*tensors, softmax_scale, dlse)
    check_cuda_head_dim(q)
    for name, target, like in (("dq", dq, q), ("dk", dk, k), ("dv", dv, v)):
        if target is not None:
            check_like(name, target, like.shape, like.dtype, q)
    return tensors, (dq, dk, dv), softmax_scale, causal, dlse


def _check_gradients(
    dout: Tensor | None,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    softmax_scale: float,
    causal: bool,
) -> tuple[Tensors6, float, bool]:
    """Raise for mismatched tensors; returns (tensors with a dout, softmax_scale, causal)."""
    if dout is None:
        dout = torch.zeros_like(out)
    tensors = (dout, q, k, v, out, softmax_lse)
    check_backward_inputs(*tensors, softmax_scale, dlse)
    check_cuda_head_dim(q)
    return tensors, softmax_scale, causal


def _no_dropout_state(q: Tensor) -> tuple[Tensor, Tensor]:
    """S_dmask and rng_state of a call without dropout."""
    return q.new_empty((0,)), q.new_empty((0,), dtype=torch.int64)


def _cuda_backward(
    tensors: tuple[Tensor, ...],
    targets: tuple[Tensor | None, ...],
    softmax_scale: float,
    causal: bool,
    dlse: Tensor | None,
) -> Tensors4:
    """Gradients in `targets` where given, else in new tensors; returns (dq, dk, dv, softmax_d)."""
    dq, dk, dv = targets
    dq, dk, dv, softmax_d = _call_extension(
        "bwd",
        *tensors,
        dq=dq,
        dk=dk,
        dv=dv,
        alibi_slopes=None,
        p_dropout=0.0,
        softmax_scale=softmax_scale,
        is_causal=causal,
        window_left=-1,
        window_right=-1,
        softcap=0.0,
        deterministic=False,
        unused_generator=None,
        rng_state=None,
        dlse=dlse,
    )
    return dq, dk, dv, softmax_d


def _call_extension(function: str, *tensors: Tensor, **options: Any) -> list[Tensor]:
    """Call a function of the extension; where it cannot run on the device, say why."""
    try:
        return getattr(build_info.extension, function)(*tensors, **options)
    except (AttributeError, RuntimeError) as error:
        build_info.require_cuda(tensors[0].device, error)
        raise


def _fold_into_batch(
    size: int, tensors: tuple[Tensor | None, ...], dims: tuple[int | None, ...]
) -> list[Tensor | None]:
    """Merge vmap's dimension into the batch of every tensor; one without it is repeated."""
    folded: list[Tensor | None] = []
    for x, dim in zip(tensors, dims, strict=True):
        if x is not None:
            x = x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
            x = x.flatten(0, 1)
        folded.append(x)
    return folded


def _unfold_batch(size: int, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(x.unflatten(0, (size, x.shape[0] // size)) for x in tensors)
