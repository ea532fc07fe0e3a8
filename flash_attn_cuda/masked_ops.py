"""Custom operators of attention with a sparse mask, a bias or a sink, dense or packed.

_masked_forward    differentiable in q, k, v, bias and sink
_masked_gradients  their gradients as new tensors

masked.py makes their arguments of what people give; what lists and bits mean is in sparsity.py.
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
    check_sink,
    lse_dtype,
    output_shape,
    refuse_forward_gradients,
)
from .length_checks import check_varlen_contents, check_varlen_inputs
from .mask_checks import PairExtent, check_bias, check_lists
from .op_support import (
    RANDOM,
    Tensors3,
    Tensors5,
    arguments_of,
    call_extension,
    check_score_arguments,
    cpu_options,
    draw_rng_state,
    empty_rng_state,
    extension_lengths,
    extension_options,
    for_transforms,
    is_functorch_active,
    no_double_backward,
    one_by_one,
    save_nothing,
    schema_of,
)
from .varlen_ops import lengths_of

_ops = torch.ops.flash_attn_cuda


@dataclass(frozen=True)
class MaskedArguments:
    """What both operators take. Without cu_seqlens_q sequences have one length, which is what
    max_seqlen_q and max_seqlen_k say, and there are no other lengths.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None
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
    alibi_slopes: Tensor | None
    deterministic: bool
    block_rows: Tensor | None  # (B|1, Hq|1, Tq, 2 + Tk), which the forward reads
    block_columns: Tensor | None  # (B|1, Hq|1, Tk, 2 + Tq), which the backward reads
    mask_bits: Tensor | None  # (B|1, Hq|1, Sq, 4 * Tk)
    bias: Tensor | None  # (B|1, Hq|1, Sq|1, Sk)
    sink: Tensor | None  # (Hq,), of softmax_lse's dtype

    @property
    def is_packed(self) -> bool:
        return self.cu_seqlens_q is not None

    @property
    def lse_shape(self) -> tuple[int, ...]:
        if self.is_packed:
            total_q, heads_q, _ = self.q.shape
            return heads_q, total_q
        batch, seqlen_q, heads_q, _ = self.q.shape
        return batch, heads_q, seqlen_q

    def check(self) -> None:
        """Raise for what no backend runs."""
        if self.cu_seqlens_q is None:
            check_attention_inputs(self.q, self.k, self.v, self.softmax_scale)
            self._check_one_length()
            batch = self.q.shape[0]
        else:
            check_varlen_inputs(self.q, self.k, self.v, lengths_of(self))
            batch = self.cu_seqlens_q.shape[0] - 1
        check_score_arguments(self, batch, self.q)
        check_cuda_head_dims(self.q, self.v)
        extent = PairExtent(
            *(batch, self.q.shape[-2], self.max_seqlen_q, self.max_seqlen_k, self.is_packed)
        )
        check_lists(self.block_rows, self.block_columns, self.mask_bits, extent, self.q)
        check_bias("bias", self.bias, extent, self.q)
        check_sink(self.sink, self.q)

    def _check_one_length(self) -> None:
        for name in ("cu_seqlens_k", "seqused_q", "seqused_k", "leftpad_k"):
            if getattr(self, name) is not None:
                raise ValueError(f"{name}: must be None without cu_seqlens_q, got a tensor")
        for name, x in (("max_seqlen_q", self.q), ("max_seqlen_k", self.k)):
            if getattr(self, name) != x.shape[1]:
                raise ValueError(
                    f"{name}: must be the length of {name[-1]} ({x.shape[1]}) without "
                    f"cu_seqlens_q, got {getattr(self, name)}"
                )

    def check_gradients(self, wants_dbias: bool) -> None:
        """Raise for a forward that has no backward."""
        if self.deterministic and (self.block_rows is not None or self.bias is not None):
            what = "a block mask" if self.block_rows is not None else "a floating attn_mask"
            raise NotImplementedError(f"deterministic: must be False with {what}, got True")
        if wants_dbias and self.softcap > 0.0:
            raise NotImplementedError(
                f"attn_mask: has no gradient with softcap, got a softcap of {self.softcap}"
            )

    def backend_options(self, rng_state: Tensor | None, *, by_columns: bool) -> Any:
        """The options as the CPU backend takes them."""
        visibility = None
        if by_columns and self.block_columns is not None:
            visibility = cpu.Visibility.of_columns(self.block_columns, self.mask_bits)
        elif self.block_rows is not None:
            visibility = cpu.Visibility.of_rows(self.block_rows, self.mask_bits)
        options = cpu_options(self, rng_state)
        return replace(options, visibility=visibility, bias=self.bias, sink=self.sink)

    def used_lengths(self) -> dict[str, Tensor | None]:
        """The lengths of packed sequences by the names that the CPU backend gives them; their
        contents are checked.
        """
        check_varlen_contents(self.q, self.k, lengths_of(self))
        names = ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k", "leftpad_k")
        return {name: getattr(self, name) for name in names}


# -- forward -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MaskedForwardCall(MaskedArguments):
    """Arguments of _masked_forward."""

    def on_cpu(self) -> Tensors3:
        rng_state = draw_rng_state(self.dropout_p)
        options = self.backend_options(rng_state, by_columns=False)
        with torch.autocast("cpu", enabled=False):
            if self.is_packed:
                lengths: Any = self.used_lengths()
                results = cpu.varlen_forward(self.q, self.k, self.v, options=options, **lengths)
            else:
                results = cpu.attention_forward(self.q, self.k, self.v, options)
        return *results, rng_state

    def on_cuda(self) -> Tensors3:
        """(out, softmax_lse, rng_state), outside autograd."""
        out, softmax_lse, rng_state = call_extension(
            "masked_fwd",
            *(self.q, self.k, self.v),
            out=None,
            p_dropout=self.dropout_p,
            block_rows=self.block_rows,
            mask_bits=self.mask_bits,
            bias=self.bias,
            sink=self.sink,
            **extension_lengths(self),
            **extension_options(self),
        )
        return out, softmax_lse, rng_state


@torch.library.custom_op(
    "flash_attn_cuda::_masked_forward",
    mutates_args=(),
    device_types="cpu",
    schema=schema_of(MaskedForwardCall, "Tensor out, Tensor softmax_lse, Tensor rng_state"),
    **RANDOM,
)
def _forward_op(*args: Any) -> Tensors3:
    call = MaskedForwardCall(*args)
    call.check()
    return call.on_cpu()


@_forward_op.register_kernel("cuda")
def _(*args: Any) -> Tensors3:
    call = MaskedForwardCall(*args)
    call.check()
    return call.on_cuda()


@_forward_op.register_fake
def _(*args: Any) -> Tensors3:
    call = MaskedForwardCall(*args)
    call.check()
    q = call.q
    softmax_lse = q.new_empty(call.lse_shape, dtype=lse_dtype(q.dtype))
    out = q.new_empty(output_shape(q, call.v))
    return out, softmax_lse, empty_rng_state(q, call.dropout_p)


_FIELDS = tuple(field.name for field in fields(MaskedForwardCall))
_TENSORS = tuple(f.name for f in fields(MaskedForwardCall) if "Tensor" in str(f.type))
_BIAS = _FIELDS.index("bias")
_RESULTS = ("out", "softmax_lse", "rng_state")


def _save_for_gradients(ctx: Any, inputs: tuple[Any, ...], output: Tensors3) -> None:
    call = MaskedForwardCall(*inputs)
    call.check_gradients(wants_dbias=ctx.needs_input_grad[_BIAS])
    ctx.save_for_backward(*(getattr(call, name) for name in _TENSORS), *output)
    ctx.options = {name: getattr(call, name) for name in _FIELDS if name not in _TENSORS}
    ctx.mark_non_differentiable(output[2])
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, dout: Tensor | None, dlse: Tensor | None, *_: None) -> tuple[Any, ...]:
    refuse_forward_gradients(dout=dout, dlse=dlse)
    wanted = dict(zip(_FIELDS, ctx.needs_input_grad, strict=True))
    if dout is None and dlse is None:
        return (None,) * len(_FIELDS)
    saved = dict(zip((*_TENSORS, *_RESULTS), ctx.saved_tensors, strict=True))
    sink = saved["sink"]
    if not wanted["sink"]:
        saved["sink"] = None
    call = MaskedGradientsCall(
        dout=dout, dlse=dlse, wants_dbias=wanted["bias"], **saved, **ctx.options
    )
    op = _gradients_for_transforms if is_functorch_active() else _ops._masked_gradients
    made = dict(zip(("q", "k", "v", "bias", "sink"), op(*arguments_of(call)), strict=True))
    made["bias"] = made["bias"] if wanted["bias"] else None
    made["sink"] = made["sink"].to(sink.dtype) if wanted["sink"] else None
    return tuple(made.get(name) for name in _FIELDS)


_forward_op.register_autograd(_gradients, setup_context=_save_for_gradients)
masked_forward_for_transforms = for_transforms(_forward_op, _save_for_gradients, _gradients)
_forward_op.register_vmap(one_by_one(_forward_op, _FIELDS.index("dropout_p")))


# -- backward ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Incoming:
    """None: the loss does not depend on it."""

    dout: Tensor | None
    dlse: Tensor | None


@dataclass(frozen=True)
class MaskedGradientsCall(MaskedArguments, _Incoming):
    """Arguments of _masked_gradients: dout, dlse, those of the forward and its results. A sink
    that needs no gradient is None.
    """

    out: Tensor
    softmax_lse: Tensor
    rng_state: Tensor | None
    wants_dbias: bool

    def with_dout(self) -> MaskedGradientsCall:
        """The same with a dout, checked."""
        call = self if self.dout is not None else replace(self, dout=torch.zeros_like(self.out))
        call.check()
        call.check_gradients(call.wants_dbias)
        if call.wants_dbias and call.bias is None:
            raise ValueError("wants_dbias: must be False without a bias, got True")
        check_backward_tensors(
            *(call.dout, call.out, call.softmax_lse, call.dlse, call.q, call.v, call.lse_shape)
        )
        check_rng_state(call.rng_state, call.dropout_p, call.q)
        return call

    @property
    def dbias_shape(self) -> tuple[int, ...]:
        """Of the bias's gradient; (0,) where it is not wanted."""
        return tuple(self.bias.shape) if self.wants_dbias and self.bias is not None else (0,)

    @property
    def dbias_dtype(self) -> torch.dtype:
        """The bias's own, whatever its gradient is summed in."""
        return self.q.dtype if self.bias is None else self.bias.dtype

    def _sink_gradient(self, softmax_d: Tensor) -> Tensor:
        """(heads_q,): the sum over queries of exp(sink - lse) * (dlse - rowsum(dout * out)), which
        is -softmax_d; rows that are no query's have lse -inf.
        """
        if self.sink is None:
            return self.q.new_empty((0,), dtype=lse_dtype(self.q.dtype))
        lse = self.softmax_lse
        of_rows = torch.exp(self.sink[:, None] - lse) * softmax_d[..., : lse.shape[-1]]
        of_rows = of_rows.masked_fill(lse == -torch.inf, 0.0)
        return -(of_rows.sum(-1) if self.is_packed else of_rows.sum((0, 2)))

    def on_cpu(self) -> Tensors5:
        assert self.dout is not None  # with_dout
        options = self.backend_options(self.rng_state, by_columns=True)
        sums = self.q.new_zeros(self.dbias_shape, dtype=lse_dtype(self.q.dtype))
        tensors = (self.dout, self.q, self.k, self.v, self.out, self.softmax_lse)
        dbias = sums if self.wants_dbias else None
        with torch.autocast("cpu", enabled=False):
            if self.is_packed:
                lengths: Any = self.used_lengths()
                *gradients, softmax_d = cpu.varlen_backward(
                    *tensors, options=options, dlse=self.dlse, dbias=dbias, **lengths
                )
            else:
                *gradients, softmax_d = cpu.attention_backward(
                    *tensors, options, self.dlse, dbias=dbias
                )
            dq, dk, dv = gradients
            return dq, dk, dv, sums.to(self.dbias_dtype), self._sink_gradient(softmax_d)

    def on_cuda(self) -> Tensors5:
        assert self.dout is not None  # with_dout
        dq, dk, dv, _, dbias, dsink = call_extension(
            "masked_bwd",
            *(self.dout, self.q, self.k, self.v, self.out, self.softmax_lse),
            p_dropout=self.dropout_p,
            deterministic=self.deterministic,
            rng_state=self.rng_state if self.dropout_p > 0.0 else None,
            dlse=self.dlse,
            block_columns=self.block_columns,
            mask_bits=self.mask_bits,
            bias=self.bias,
            wants_dbias=self.wants_dbias,
            sink=self.sink,
            wants_softmax_d=False,
            **extension_lengths(self),
            **extension_options(self),
        )
        return dq, dk, dv, dbias.to(self.dbias_dtype), dsink


@torch.library.custom_op(
    "flash_attn_cuda::_masked_gradients",
    mutates_args=(),
    device_types="cpu",
    schema=schema_of(
        MaskedGradientsCall, "Tensor dq, Tensor dk, Tensor dv, Tensor dbias, Tensor dsink"
    ),
)
def _gradients_op(*args: Any) -> Tensors5:
    return MaskedGradientsCall(*args).with_dout().on_cpu()


@_gradients_op.register_kernel("cuda")
def _(*args: Any) -> Tensors5:
    return MaskedGradientsCall(*args).with_dout().on_cuda()


@_gradients_op.register_fake
def _(*args: Any) -> Tensors5:
    call = MaskedGradientsCall(*args).with_dout()
    q, k, v = call.q, call.k, call.v
    dsink = q.new_empty((0,) if call.sink is None else call.sink.shape, dtype=lse_dtype(q.dtype))
    gradients = (q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape))
    return *gradients, q.new_empty(call.dbias_shape, dtype=call.dbias_dtype), dsink


_gradients_op.register_autograd(no_double_backward)
_gradients_for_transforms = for_transforms(_gradients_op, save_nothing, no_double_backward)
