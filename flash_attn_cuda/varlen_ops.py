"""Custom operators of packed sequences, as ops.py for those of one length.

_flash_attn_varlen_forward    FlashAttention-2's operator; differentiable
_flash_attn_varlen_backward   FlashAttention-2's operator; writes dq, dk, dv
_flash_attn_varlen_gradients  the same gradients as new tensors
_flash_attn_varlen_gradient_over_pages  stands for one of a call with a block_table; refuses to run
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from . import cpu
from .checks import (
    check_backward_tensors,
    check_cuda_head_dims,
    check_rng_state,
    check_sink,
    check_targets,
    lse_dtype,
    output_shape,
    refuse_forward_gradients,
)
from .length_checks import (
    Lengths,
    check_num_splits,
    check_varlen_contents,
    check_varlen_inputs,
)
from .op_support import (
    FORWARD_RETURNS,
    GRADIENTS_RETURNS,
    RANDOM,
    Tensors3,
    Tensors4,
    call_extension,
    check_score_arguments,
    cpu_options,
    draw_rng_state,
    empty_rng_state,
    empty_s_dmask,
    extension_lengths,
    extension_options,
    for_transforms,
    is_functorch_active,
    no_double_backward,
    one_by_one,
    save_nothing,
    schema_of,
)

_ops = torch.ops.flash_attn_cuda
_NO_GRADIENTS_OVER_PAGES = (
    "block_table: must be None in a call whose gradients are wanted, got a tensor; gradients "
    "through the pages of a block_table are not implemented"
)

# -- forward -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class VarlenForwardCall:
    """Arguments of _flash_attn_varlen_forward: FlashAttention-2's, then this package's own."""

    q: Tensor
    k: Tensor
    v: Tensor
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor | None
    max_seqlen_q: int
    max_seqlen_k: int
    dropout_p: float
    softmax_scale: float
    causal: bool
    window_size_left: int = -1
    window_size_right: int = -1
    softcap: float = 0.0
    alibi_slopes: Tensor | None = None
    return_softmax: bool = False
    block_table: Tensor | None = None
    leftpad_k: Tensor | None = None
    seqused_k: Tensor | None = None
    zero_tensors: bool = False  # of no effect: every row of every result is written
    num_splits: int = 0
    seqused_q: Tensor | None = None
    batch_invariant: bool = False
    deterministic: bool = False
    sink: Tensor | None = None  # (heads_q,), without a gradient

    def check(self) -> None:
        """Raise for what no backend runs."""
        check_varlen_inputs(self.q, self.k, self.v, lengths_of(self, self.block_table))
        check_score_arguments(self, self.cu_seqlens_q.shape[0] - 1, self.q)
        check_num_splits(self.num_splits)
        check_sink(self.sink, self.q)
        check_cuda_head_dims(self.q, self.v)

    @property
    def wants_s_dmask(self) -> bool:
        return self.return_softmax and self.dropout_p > 0.0

    def on_cuda(self) -> Tensors4:
        """(out, softmax_lse, S_dmask, rng_state), outside autograd."""
        out, softmax_lse, s_dmask, rng_state = call_extension(
            "varlen_fwd",
            *(self.q, self.k, self.v),
            out=None,
            p_dropout=self.dropout_p,
            return_softmax=self.wants_s_dmask,
            num_splits=self.num_splits,
            batch_invariant=self.batch_invariant,
            block_table=self.block_table,
            sink=self.sink,
            zero_tensors=False,
            unused_generator=None,
            **extension_lengths(self),
            **extension_options(self),
        )
        return out, softmax_lse, s_dmask, rng_state


def lengths_of(call: Any, block_table: Tensor | None = None) -> Lengths:
    """The lengths among the arguments of a forward or a backward."""
    return Lengths(
        call.cu_seqlens_q,
        call.cu_seqlens_k,
        call.max_seqlen_q,
        call.max_seqlen_k,
        call.seqused_q,
        call.seqused_k,
        call.leftpad_k,
        block_table,
    )


@torch.library.custom_op(
    "flash_attn_cuda::_flash_attn_varlen_forward",
    mutates_args=(),
    device_types="cpu",
    schema=schema_of(VarlenForwardCall, FORWARD_RETURNS),
    **RANDOM,
)
def _forward_op(*args: Any) -> Tensors4:
    call = VarlenForwardCall(*args)
    call.check()
    q, k, v = call.q, call.k, call.v
    lengths = lengths_of(call, call.block_table)
    check_varlen_contents(q, k, lengths)
    rng_state = draw_rng_state(call.dropout_p)
    options = replace(cpu_options(call, rng_state), sink=call.sink)
    starts = (call.cu_seqlens_q, _starts_of_keys(lengths))
    used = (call.seqused_q, call.seqused_k, call.leftpad_k, call.block_table)
    with torch.autocast("cpu", enabled=False):
        out, softmax_lse = cpu.varlen_forward(q, k, v, *starts, options, *used)
        if call.wants_s_dmask:
            bounds = (call.max_seqlen_q, call.max_seqlen_k)
            s_dmask = cpu.varlen_probabilities(q, k, softmax_lse, *starts, *bounds, options, *used)
        else:
            s_dmask = q.new_empty((0,))
    return out, softmax_lse, s_dmask, rng_state


@_forward_op.register_kernel("cuda")
def _(*args: Any) -> Tensors4:
    call = VarlenForwardCall(*args)
    call.check()
    return call.on_cuda()


@_forward_op.register_fake
def _(*args: Any) -> Tensors4:
    call = VarlenForwardCall(*args)
    call.check()
    q = call.q
    total_q, heads_q, _ = q.shape
    softmax_lse = q.new_empty((heads_q, total_q), dtype=lse_dtype(q.dtype))
    batch = call.cu_seqlens_q.shape[0] - 1
    s_dmask_shape = (batch, heads_q, call.max_seqlen_q, call.max_seqlen_k)
    s_dmask = empty_s_dmask(q, call.wants_s_dmask, s_dmask_shape)
    out = q.new_empty(output_shape(q, call.v))
    return out, softmax_lse, s_dmask, empty_rng_state(q, call.dropout_p)


def _starts_of_keys(lengths: Lengths) -> Tensor:
    """cu_seqlens_k, or what stands in for it with pages, where nothing but differences counts."""
    if lengths.cu_seqlens_k is not None:
        return lengths.cu_seqlens_k
    assert lengths.seqused_k is not None  # checked
    return pad(lengths.seqused_k.cumsum(0, dtype=torch.int32), (1, 0))


def _save_for_gradients(ctx: Any, inputs: tuple[Any, ...], output: Tensors4) -> None:
    call = VarlenForwardCall(*inputs)
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[2:])
    ctx.over_pages = call.block_table is not None
    if ctx.over_pages:
        # Not the tensors: nothing reads them, and pages may be written before the backward refuses.
        tensors = {"q": call.q, "k": call.k, "v": call.v, "sink": call.sink}
        ctx.wanted = {name: (x.shape, x.dtype) for name, x in tensors.items() if x is not None}
        return
    if call.sink is not None:
        raise NotImplementedError(
            "sink: has no backward here, which _masked_forward has; inputs must not require grad"
        )
    out, softmax_lse, _, rng_state = output
    ctx.save_for_backward(
        *(call.q, call.k, call.v, out, softmax_lse, rng_state, call.alibi_slopes),
        *(call.cu_seqlens_q, call.cu_seqlens_k, call.seqused_q, call.seqused_k, call.leftpad_k),
    )
    ctx.options = (
        *(call.max_seqlen_q, call.max_seqlen_k, call.dropout_p, call.softmax_scale, call.causal),
        *(call.window_size_left, call.window_size_right, call.softcap, call.deterministic),
    )


def _gradients(ctx: Any, dout: Tensor | None, dlse: Tensor | None, *_: None) -> tuple[Any, ...]:
    refuse_forward_gradients(dout=dout, dlse=dlse)
    others = (None,) * (len(fields(VarlenForwardCall)) - 3)
    gradient = dlse if dout is None else dout
    if gradient is None:
        return None, None, None, *others
    if ctx.over_pages:
        return _gradients_over_pages(ctx, gradient)
    op = _gradients_for_transforms if is_functorch_active() else _ops._flash_attn_varlen_gradients
    return *op(dout, dlse, *ctx.saved_tensors, *ctx.options), *others


def _gradients_over_pages(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    """Refuses, or, where a compiler traces this together with the forward, leaves it to operators
    that refuse when the backward runs.
    """
    if is_functorch_active():
        raise NotImplementedError(_NO_GRADIENTS_OVER_PAGES)
    op = _ops._flash_attn_varlen_gradient_over_pages
    names = [f.name for f in fields(VarlenForwardCall)]
    return tuple(op(gradient, *ctx.wanted[x]) if x in ctx.wanted else None for x in names)


@torch.library.custom_op(
    "flash_attn_cuda::_flash_attn_varlen_gradient_over_pages",
    mutates_args=(),
    schema="(Tensor gradient, SymInt[] sizes, ScalarType dtype) -> Tensor",
)
def _gradient_over_pages_op(gradient: Tensor, sizes: Sequence[int], dtype: torch.dtype) -> Tensor:
    raise NotImplementedError(_NO_GRADIENTS_OVER_PAGES)


@_gradient_over_pages_op.register_fake
def _(gradient: Tensor, sizes: Sequence[int], dtype: torch.dtype) -> Tensor:
    return gradient.new_empty(sizes, dtype=dtype)


_forward_op.register_autograd(_gradients, setup_context=_save_for_gradients)
varlen_forward_for_transforms = for_transforms(_forward_op, _save_for_gradients, _gradients)
_forward_op.register_vmap(
    one_by_one(_forward_op, [f.name for f in fields(VarlenForwardCall)].index("dropout_p"))
)

# -- backward into given tensors -----------------------------------------------------------------


@dataclass(frozen=True)
class VarlenBackwardCall:
    """Arguments of _flash_attn_varlen_backward: FlashAttention-2's, then this package's own."""

    dout: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    softmax_lse: Tensor
    dq: Tensor | None
    dk: Tensor | None
    dv: Tensor | None
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    dropout_p: float
    softmax_scale: float
    causal: bool
    window_size_left: int
    window_size_right: int
    softcap: float
    alibi_slopes: Tensor | None
    deterministic: bool
    rng_state: Tensor | None = None
    zero_tensors: bool = False
    dlse: Tensor | None = None
    seqused_q: Tensor | None = None
    seqused_k: Tensor | None = None
    leftpad_k: Tensor | None = None

    def check(self) -> None:
        """Raise for what no backend runs."""
        q = self.q
        check_varlen_inputs(q, self.k, self.v, lengths_of(self))
        check_score_arguments(self, self.cu_seqlens_q.shape[0] - 1, q)
        rows = (q.shape[1], q.shape[0])
        check_backward_tensors(self.dout, self.out, self.softmax_lse, self.dlse, q, self.v, rows)
        check_rng_state(self.rng_state, self.dropout_p, q)
        check_cuda_head_dims(q, self.v)
        check_targets(self.dq, self.dk, self.dv, q, self.k, self.v)

    def on_cpu(self) -> Tensors4:
        """(dq, dk, dv, softmax_d) in new tensors."""
        check_varlen_contents(self.q, self.k, lengths_of(self))
        with torch.autocast("cpu", enabled=False):
            return cpu.varlen_backward(
                *(self.dout, self.q, self.k, self.v, self.out, self.softmax_lse),
                *(self.cu_seqlens_q, self.cu_seqlens_k, cpu_options(self, self.rng_state)),
                dlse=self.dlse,
                seqused_q=self.seqused_q,
                seqused_k=self.seqused_k,
                leftpad_k=self.leftpad_k,
            )

    def on_cuda(self) -> Tensors4:
        """(dq, dk, dv, softmax_d), in the targets where given, else in new tensors."""
        dq, dk, dv, softmax_d = call_extension(
            "varlen_bwd",
            *(self.dout, self.q, self.k, self.v, self.out, self.softmax_lse),
            dq=self.dq,
            dk=self.dk,
            dv=self.dv,
            p_dropout=self.dropout_p,
            deterministic=self.deterministic,
            rng_state=self.rng_state if self.dropout_p > 0.0 else None,
            dlse=self.dlse,
            zero_tensors=False,
            unused_generator=None,
            **extension_lengths(self),
            **extension_options(self),
        )
        return dq, dk, dv, softmax_d


@torch.library.custom_op(
    "flash_attn_cuda::_flash_attn_varlen_backward",
    mutates_args=("dq", "dk", "dv"),
    device_types="cpu",
    schema=schema_of(VarlenBackwardCall, "Tensor softmax_d", mutated=("dq", "dk", "dv")),
)
def _backward_op(*args: Any) -> Tensor:
    call = VarlenBackwardCall(*args)
    call.check()
    *gradients, softmax_d = call.on_cpu()
    for target, gradient in zip((call.dq, call.dk, call.dv), gradients, strict=True):
        if target is not None:
            target.copy_(gradient)
    return softmax_d


@_backward_op.register_kernel("cuda")
def _(*args: Any) -> Tensor:
    call = VarlenBackwardCall(*args)
    call.check()
    return call.on_cuda()[3]


@_backward_op.register_fake
def _(*args: Any) -> Tensor:
    call = VarlenBackwardCall(*args)
    call.check()
    return torch.empty_like(call.softmax_lse, memory_format=torch.contiguous_format)


# -- backward into new tensors -------------------------------------------------------------------


@dataclass(frozen=True)
class VarlenGradientsCall:
    """Arguments of _flash_attn_varlen_gradients. dout or dlse None: the loss does not depend on
    it.
    """

    dout: Tensor | None
    dlse: Tensor | None
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    softmax_lse: Tensor
    rng_state: Tensor | None
    alibi_slopes: Tensor | None
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    seqused_q: Tensor | None
    seqused_k: Tensor | None
    leftpad_k: Tensor | None
    max_seqlen_q: int
    max_seqlen_k: int
    dropout_p: float
    softmax_scale: float
    causal: bool
    window_size_left: int
    window_size_right: int
    softcap: float
    deterministic: bool

    def backward_call(self) -> VarlenBackwardCall:
        """The same as arguments of the backward, checked."""
        call = VarlenBackwardCall(
            dout=torch.zeros_like(self.out) if self.dout is None else self.dout,
            dq=None,
            dk=None,
            dv=None,
            **{f.name: getattr(self, f.name) for f in fields(self) if f.name != "dout"},
        )
        call.check()
        return call


@torch.library.custom_op(
    "flash_attn_cuda::_flash_attn_varlen_gradients",
    mutates_args=(),
    device_types="cpu",
    schema=schema_of(VarlenGradientsCall, GRADIENTS_RETURNS),
)
def _gradients_op(*args: Any) -> Tensors3:
    return VarlenGradientsCall(*args).backward_call().on_cpu()[:3]


@_gradients_op.register_kernel("cuda")
def _(*args: Any) -> Tensors3:
    return VarlenGradientsCall(*args).backward_call().on_cuda()[:3]


@_gradients_op.register_fake
def _(*args: Any) -> Tensors3:
    call = VarlenGradientsCall(*args).backward_call()
    q, k, v = call.q, call.k, call.v
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


_gradients_op.register_autograd(no_double_backward)
_gradients_for_transforms = for_transforms(_gradients_op, save_nothing, no_double_backward)
