"""Custom operators of namespace `flash_attn_cuda`, for torch.compile, export, vmap, autograd.

    _flash_attn_forward    FlashAttention-2's operator; differentiable, through softmax_lse too
    _flash_attn_backward   FlashAttention-2's operator; writes dq, dk, dv and returns softmax_d
    _flash_attn_gradients  the same gradients as new tensors: the first one's autograd formula

Those of packed sequences are in varlen_ops.py, of a KV cache in kvcache_ops.py, of masks, biases
and sinks in masked_ops.py. private.py and interface.py are what people call.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from . import cpu
from .checks import (
    check_attention_inputs,
    check_backward_tensors,
    check_cuda_head_dims,
    check_rng_state,
    check_targets,
    lse_dtype,
    output_shape,
    refuse_forward_gradients,
)
from .op_support import (
    FORWARD_RETURNS,
    GRADIENTS_RETURNS,
    RANDOM,
    Tensors3,
    Tensors4,
    arguments_of,
    call_extension,
    check_randomness,
    check_score_arguments,
    cpu_options,
    draw_rng_state,
    empty_rng_state,
    empty_s_dmask,
    extension_options,
    for_transforms,
    is_functorch_active,
    no_double_backward,
    save_nothing,
    schema_of,
    select_entry,
)

_ops = torch.ops.flash_attn_cuda

# -- forward -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ForwardCall:
    """Arguments of _flash_attn_forward: FlashAttention-2's, and what its backward will want."""

    q: Tensor
    k: Tensor
    v: Tensor
    dropout_p: float
    softmax_scale: float
    causal: bool
    window_size_left: int
    window_size_right: int
    softcap: float
    alibi_slopes: Tensor | None
    return_softmax: bool
    deterministic: bool = False

    def check(self) -> None:
        """Raise for what no backend runs."""
        check_attention_inputs(self.q, self.k, self.v, self.softmax_scale)
        check_score_arguments(self, self.q.shape[0], self.q)
        check_cuda_head_dims(self.q, self.v)

    @property
    def wants_s_dmask(self) -> bool:
        return self.return_softmax and self.dropout_p > 0.0

    @property
    def lse_shape(self) -> tuple[int, int, int]:
        batch, seqlen_q, heads_q, _ = self.q.shape
        return batch, heads_q, seqlen_q


@torch.library.custom_op(
    "flash_attn_cuda::_flash_attn_forward",
    mutates_args=(),
    device_types="cpu",
    schema=schema_of(ForwardCall, FORWARD_RETURNS),
    **RANDOM,
)
def _forward_op(*args: Any) -> Tensors4:
    call = ForwardCall(*args)
    call.check()
    q, k, v = call.q, call.k, call.v
    rng_state = draw_rng_state(call.dropout_p)
    options = cpu_options(call, rng_state)
    with torch.autocast("cpu", enabled=False):
        out, softmax_lse = cpu.attention_forward(q, k, v, options)
        if call.wants_s_dmask:
            s_dmask = cpu.probabilities(q, k, softmax_lse, options)
        else:
            s_dmask = q.new_empty((0,))
    return out, softmax_lse, s_dmask, rng_state


@_forward_op.register_kernel("cuda")
def _(*args: Any) -> Tensors4:
    call = ForwardCall(*args)
    call.check()
    out, softmax_lse, s_dmask, rng_state = call_extension(
        "fwd",
        *(call.q, call.k, call.v),
        out=None,
        p_dropout=call.dropout_p,
        return_softmax=call.wants_s_dmask,
        unused_generator=None,
        **extension_options(call),
    )
    return out, softmax_lse, s_dmask, rng_state


@_forward_op.register_fake
def _(*args: Any) -> Tensors4:
    call = ForwardCall(*args)
    call.check()
    q = call.q
    softmax_lse = q.new_empty(call.lse_shape, dtype=lse_dtype(q.dtype))
    s_dmask = empty_s_dmask(q, call.wants_s_dmask, (*call.lse_shape, call.k.shape[1]))
    out = q.new_empty(output_shape(q, call.v))
    return out, softmax_lse, s_dmask, empty_rng_state(q, call.dropout_p)


def _save_for_gradients(ctx: Any, inputs: tuple[Any, ...], output: Tensors4) -> None:
    call = ForwardCall(*inputs)
    out, softmax_lse, s_dmask, rng_state = output
    ctx.save_for_backward(call.q, call.k, call.v, out, softmax_lse, rng_state, call.alibi_slopes)
    ctx.options = (
        *(call.dropout_p, call.softmax_scale, call.causal, call.window_size_left),
        *(call.window_size_right, call.softcap, call.deterministic),
    )
    ctx.mark_non_differentiable(s_dmask, rng_state)
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, dout: Tensor | None, dlse: Tensor | None, *_: None) -> tuple[Any, ...]:
    refuse_forward_gradients(dout=dout, dlse=dlse)
    options = (None,) * (len(fields(ForwardCall)) - 3)
    if dout is None and dlse is None:
        return None, None, None, *options
    op = _gradients_for_transforms if is_functorch_active() else _ops._flash_attn_gradients
    return *op(dout, dlse, *ctx.saved_tensors, *ctx.options), *options


_forward_op.register_autograd(_gradients, setup_context=_save_for_gradients)
forward_for_transforms = for_transforms(_forward_op, _save_for_gradients, _gradients)


@_forward_op.register_vmap
def _(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Tensors4, tuple[Any, ...]]:
    call, size = ForwardCall(*args), info.batch_size
    dims: Any = ForwardCall(*in_dims)
    check_randomness(call.dropout_p, info.randomness)
    q, k, v = (
        _fold_into_batch(size, x, dim)
        for x, dim in ((call.q, dims.q), (call.k, dims.k), (call.v, dims.v))
    )
    batch = _batch_of(call.q, dims.q)
    slopes = _fold_slopes(size, batch, call.alibi_slopes, dims.alibi_slopes)
    folded = replace(call, q=q, k=k, v=v, alibi_slopes=slopes)
    out, softmax_lse, s_dmask, rng_state = _forward_op(*arguments_of(folded))
    out, softmax_lse = (_unfold_batch(size, batch, x) for x in (out, softmax_lse))
    if call.wants_s_dmask:
        return (out, softmax_lse, _unfold_batch(size, batch, s_dmask), rng_state), (0, 0, 0, None)
    return (out, softmax_lse, s_dmask, rng_state), (0, 0, None, None)


# -- backward into given tensors -----------------------------------------------------------------


@dataclass(frozen=True)
class BackwardCall:
    """Arguments of _flash_attn_backward: FlashAttention-2's, and dlse."""

    dout: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    softmax_lse: Tensor
    dq: Tensor | None
    dk: Tensor | None
    dv: Tensor | None
    dropout_p: float
    softmax_scale: float
    causal: bool
    window_size_left: int
    window_size_right: int
    softcap: float
    alibi_slopes: Tensor | None
    deterministic: bool
    rng_state: Tensor | None = None
    dlse: Tensor | None = None

    def check(self) -> None:
        """Raise for what no backend runs."""
        q = self.q
        check_attention_inputs(q, self.k, self.v, self.softmax_scale)
        check_score_arguments(self, q.shape[0], q)
        batch, seqlen_q, heads_q, _ = q.shape
        rows = (batch, heads_q, seqlen_q)
        check_backward_tensors(self.dout, self.out, self.softmax_lse, self.dlse, q, self.v, rows)
        check_rng_state(self.rng_state, self.dropout_p, q)
        check_cuda_head_dims(q, self.v)
        check_targets(self.dq, self.dk, self.dv, q, self.k, self.v)

    def on_cpu(self) -> Tensors4:
        """(dq, dk, dv, softmax_d) in new tensors."""
        with torch.autocast("cpu", enabled=False):
            return cpu.attention_backward(
                *(self.dout, self.q, self.k, self.v, self.out, self.softmax_lse),
                cpu_options(self, self.rng_state),
                self.dlse,
            )

    def on_cuda(self) -> Tensors4:
        """(dq, dk, dv, softmax_d), in the targets where given, else in new tensors."""
        dq, dk, dv, softmax_d = call_extension(
            "bwd",
            *(self.dout, self.q, self.k, self.v, self.out, self.softmax_lse),
            dq=self.dq,
            dk=self.dk,
            dv=self.dv,
            p_dropout=self.dropout_p,
            deterministic=self.deterministic,
            unused_generator=None,
            rng_state=self.rng_state if self.dropout_p > 0.0 else None,
            dlse=self.dlse,
            **extension_options(self),
        )
        return dq, dk, dv, softmax_d


@torch.library.custom_op(
    "flash_attn_cuda::_flash_attn_backward",
    mutates_args=("dq", "dk", "dv"),
    device_types="cpu",
    schema=schema_of(BackwardCall, "Tensor softmax_d", mutated=("dq", "dk", "dv")),
)
def _backward_op(*args: Any) -> Tensor:
    call = BackwardCall(*args)
    call.check()
    *gradients, softmax_d = call.on_cpu()
    for target, gradient in zip((call.dq, call.dk, call.dv), gradients, strict=True):
        if target is not None:
            target.copy_(gradient)
    return softmax_d


@_backward_op.register_kernel("cuda")
def _(*args: Any) -> Tensor:
    call = BackwardCall(*args)
    call.check()
    return call.on_cuda()[3]


@_backward_op.register_fake
def _(*args: Any) -> Tensor:
    call = BackwardCall(*args)
    call.check()
    batch, seqlen_q, heads_q, _ = call.q.shape
    rows = cpu.round_up_seqlen(seqlen_q)
    return call.q.new_empty((batch, heads_q, rows), dtype=lse_dtype(call.q.dtype))


# -- backward into new tensors -------------------------------------------------------------------


@dataclass(frozen=True)
class GradientsCall:
    """Arguments of _flash_attn_gradients. dout or dlse None: the loss does not depend on it."""

    dout: Tensor | None
    dlse: Tensor | None
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    softmax_lse: Tensor
    rng_state: Tensor | None
    alibi_slopes: Tensor | None
    dropout_p: float
    softmax_scale: float
    causal: bool
    window_size_left: int
    window_size_right: int
    softcap: float
    deterministic: bool

    def backward_call(self) -> BackwardCall:
        """The same as arguments of the backward, checked."""
        call = BackwardCall(
            dout=torch.zeros_like(self.out) if self.dout is None else self.dout,
            dq=None,
            dk=None,
            dv=None,
            **{f.name: getattr(self, f.name) for f in fields(self) if f.name != "dout"},
        )
        call.check()
        return call


@torch.library.custom_op(
    "flash_attn_cuda::_flash_attn_gradients",
    mutates_args=(),
    device_types="cpu",
    schema=schema_of(GradientsCall, GRADIENTS_RETURNS),
)
def _gradients_op(*args: Any) -> Tensors3:
    return GradientsCall(*args).backward_call().on_cpu()[:3]


@_gradients_op.register_kernel("cuda")
def _(*args: Any) -> Tensors3:
    return GradientsCall(*args).backward_call().on_cuda()[:3]


@_gradients_op.register_fake
def _(*args: Any) -> Tensors3:
    call = GradientsCall(*args).backward_call()
    q, k, v = call.q, call.k, call.v
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


_gradients_op.register_autograd(no_double_backward)
_gradients_for_transforms = for_transforms(_gradients_op, save_nothing, no_double_backward)


@_gradients_op.register_vmap
def _(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Tensors3, tuple[int, ...]]:
    call, size = GradientsCall(*args), info.batch_size
    dims: Any = GradientsCall(*in_dims)
    if call.dropout_p > 0.0 and dims.out is None and size > 0:
        # The forward was not mapped, and batch entries are part of what decides about dropout.
        each = [_gradients_op(*select_entry(args, in_dims, index)) for index in range(size)]
        dq, dk, dv = (torch.stack(x) for x in zip(*each, strict=True))
        return (dq, dk, dv), (0, 0, 0)
    names = ("dout", "dlse", "q", "k", "v", "out", "softmax_lse")
    tensors = {
        name: _fold_into_batch(size, getattr(call, name), getattr(dims, name)) for name in names
    }
    batch = _batch_of(call.q, dims.q)
    slopes = _fold_slopes(size, batch, call.alibi_slopes, dims.alibi_slopes)
    folded = replace(call, alibi_slopes=slopes, **tensors)
    dq, dk, dv = (_unfold_batch(size, batch, x) for x in _gradients_op(*arguments_of(folded)))
    return (dq, dk, dv), (0, 0, 0)


# -- vmap ----------------------------------------------------------------------------------------


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
