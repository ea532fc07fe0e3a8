"""Attention with a mask of its own, a bias or a sink: what the public functions do with those.

Everything becomes one call of _masked_forward: lists and bits of a BlockSparsity, a bias in four
dimensions, a sink in fp32. Calls with none of them do not come here.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .arguments import (
    Options,
    Result,
    cast_for_autocast,
    default_scale,
    is_plain_cuda_call,
    needs_padding,
    pad_head_dim,
    rows_bound,
    seqlen_bound,
)
from .checks import (
    check_alibi_slopes,
    check_attention_inputs,
    check_sink,
    check_softmax_scale,
    check_tensor,
    refuse_forward_gradients,
    sink_for,
)
from .length_checks import Lengths, check_varlen_inputs
from .mask_checks import PairExtent, check_attn_mask, check_blocks, check_sparsity
from .masked_ops import MaskedForwardCall, masked_forward_for_transforms
from .op_support import arguments_of, check_vmap_randomness, is_functorch_active
from .sparsity import BlockSparsity

_ops = torch.ops.flash_attn_cuda


class Masks(NamedTuple):
    """What attends beyond windows, as a caller gave it."""

    attn_mask: Tensor | None
    block_mask: Any
    block_size: Any
    sink: Tensor | None

    def is_dense_mask(self) -> bool:  # no property, as in Lengths
        return isinstance(self.attn_mask, Tensor) and self.attn_mask.dtype == torch.bool

    def sink_over_pages(self, q: Any) -> Tensor | None:
        """The sink of a call that reads pages, which can have none of the others."""
        for name in ("attn_mask", "block_mask", "block_size"):
            if getattr(self, name) is not None:
                raise NotImplementedError(f"{name}: must be None with a block_table")
        check_tensor("q", q)
        sink = sink_for(q, self.sink)
        # With a gradient in view it stays in the graph, so that the backward can refuse.
        is_differentiated = sink is not None and sink.requires_grad and torch.is_grad_enabled()
        return sink if sink is None or is_differentiated else sink.detach()


def attend_masked(
    q: Tensor, k: Tensor, v: Tensor, options: Options, masks: Masks, return_attn_probs: bool
) -> Result:
    """flash_attn_func where one of the masks is given."""
    q, k, v = cast_for_autocast(q, k, v)
    check_attention_inputs(q, k, v, options.softmax_scale)
    check_alibi_slopes(options.alibi_slopes, q.shape[0], q)
    extent = PairExtent(q.shape[0], q.shape[2], q.shape[1], k.shape[1], is_packed=False)
    sparsity = _given_sparsity(masks)
    return _attend(q, k, v, None, extent, options, masks, sparsity, return_attn_probs)


def attend_masked_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: tuple[Any, Any],
    max_seqlens: tuple[Any, Any],
    used: tuple[Tensor | None, Tensor | None, Tensor | None],
    options: Options,
    masks: Masks,
    return_attn_probs: bool,
) -> Result:
    """flash_attn_varlen_func, without a block_table, where one of the masks is given."""
    q, k, v = cast_for_autocast(q, k, v)
    check_tensor("q", q)
    check_tensor("k", k)
    sparsity = _given_sparsity(masks)
    most_q, most_k = (None, None) if sparsity is None else (sparsity.seqlen_q, sparsity.seqlen_k)
    bounds = (
        _bound("max_seqlen_q", max_seqlens[0], masks, most_q, q),
        _bound("max_seqlen_k", max_seqlens[1], masks, most_k, k),
    )
    lengths = Lengths(*cu_seqlens, *bounds, *used)
    check_softmax_scale(options.softmax_scale)
    check_varlen_inputs(q, k, v, lengths)
    check_alibi_slopes(options.alibi_slopes, lengths.batch(), q)
    extent = PairExtent(lengths.batch(), q.shape[1], *bounds, is_packed=True)
    return _attend(q, k, v, lengths, extent, options, masks, sparsity, return_attn_probs)


def sink_without_gradient(q: Tensor, sink: Any) -> Tensor | None:
    """sink_for of a call without a backward: a parameter becomes a plain tensor."""
    sink = sink_for(q, sink)
    return None if sink is None else sink.detach()


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Lengths | None,
    extent: PairExtent,
    options: Options,
    masks: Masks,
    sparsity: BlockSparsity | None,
    return_attn_probs: bool,
) -> Result:
    if return_attn_probs and options.dropout_p > 0.0:
        raise NotImplementedError(
            "return_attn_probs: must be False where there is dropout and an attn_mask, a "
            f"block_mask or a sink, got True and dropout_p {options.dropout_p}"
        )
    sparsity = _checked_sparsity(masks, sparsity, extent, q)
    bias = None if masks.is_dense_mask() else _bias_of(masks.attn_mask, extent, q)
    sink = sink_for(q, masks.sink)
    check_sink(sink, q)

    head_dim_v = v.shape[-1]
    scale = default_scale(q, options.softmax_scale)
    is_padded = q.is_cuda and needs_padding(q, v)
    if is_padded:
        q, k, v = pad_head_dim(q), pad_head_dim(k), pad_head_dim(v)
    needs_gradient = torch.is_grad_enabled() and any(
        x is not None and x.requires_grad for x in (q, k, v, bias, sink)
    )
    call = MaskedForwardCall(
        q=q,
        k=k,
        v=v,
        cu_seqlens_q=None if lengths is None else lengths.cu_seqlens_q,
        cu_seqlens_k=None if lengths is None else lengths.cu_seqlens_k,
        seqused_q=None if lengths is None else lengths.seqused_q,
        seqused_k=None if lengths is None else lengths.seqused_k,
        leftpad_k=None if lengths is None else lengths.leftpad_k,
        max_seqlen_q=extent.seqlen_q,
        max_seqlen_k=extent.seqlen_k,
        dropout_p=options.dropout_p,
        softmax_scale=scale,
        causal=options.causal,
        window_size_left=options.window_left,
        window_size_right=options.window_right,
        softcap=options.softcap,
        alibi_slopes=options.alibi_slopes,
        deterministic=options.deterministic,
        block_rows=None if sparsity is None else sparsity.rows,
        block_columns=None if sparsity is None else sparsity.columns,
        mask_bits=None if sparsity is None else sparsity.bits,
        bias=bias,
        # A parameter that needs no gradient is a plain tensor.
        sink=sink.detach() if sink is not None and not needs_gradient else sink,
    )
    if needs_gradient:
        call.check_gradients(wants_dbias=bias is not None and bias.requires_grad)
    refuse_forward_gradients(q=q, k=k, v=v, attn_mask=bias, sink=sink)
    arguments = arguments_of(call)
    check_vmap_randomness(options.dropout_p, *arguments)
    others = (x for x in arguments[3:] if isinstance(x, Tensor))
    if not needs_gradient and is_plain_cuda_call(q, k, v, *others):
        out, softmax_lse, _ = call.on_cuda()
    else:
        op = masked_forward_for_transforms if is_functorch_active() else _ops._masked_forward
        out, softmax_lse, _ = op(*arguments)
    out = out[..., :head_dim_v] if is_padded else out
    return (out, softmax_lse, q.new_empty((0,))) if return_attn_probs else out


# -- the arguments -------------------------------------------------------------------------------


def _given_sparsity(masks: Masks) -> BlockSparsity | None:
    """A block_mask that knows its lengths, which are not checked; None for others."""
    block_mask = masks.block_mask
    if block_mask is not None and masks.is_dense_mask():
        raise ValueError(
            "attn_mask, block_mask: must not both be masks, got a bool attn_mask and a block_mask"
        )
    if isinstance(block_mask, Tensor):
        return None
    if masks.block_size is not None:
        raise ValueError(
            f"block_size: must be None without a block_mask of booleans, got {masks.block_size!r}"
        )
    if block_mask is None or isinstance(block_mask, BlockSparsity):
        return block_mask
    if hasattr(block_mask, "kv_num_blocks"):
        return BlockSparsity.from_block_mask(block_mask)
    raise TypeError(
        "block_mask: must be a BlockSparsity, a BlockMask of torch or a bool tensor, "
        f"got {type(block_mask).__name__}"
    )


def _checked_sparsity(
    masks: Masks, given: BlockSparsity | None, extent: PairExtent, q: Tensor
) -> BlockSparsity | None:
    """The mask of a call, whatever it was given as."""
    if given is None and isinstance(masks.block_mask, Tensor):
        check_blocks(masks.block_mask, masks.block_size, extent, q)
        size = tuple(masks.block_size)
        given = BlockSparsity.from_blocks(
            masks.block_mask, (size[0], size[1]), extent.seqlen_q, extent.seqlen_k
        )
    if masks.is_dense_mask():
        check_attn_mask(masks.attn_mask, extent, q)
        assert masks.attn_mask is not None
        return BlockSparsity.from_mask(masks.attn_mask, seqlen_q=extent.seqlen_q)
    if given is not None:
        check_sparsity(given, "block_mask", extent, q)
    return given


def _bias_of(attn_mask: Any, extent: PairExtent, q: Tensor) -> Tensor | None:
    """A floating attn_mask in four dimensions."""
    if attn_mask is None:
        return None
    if isinstance(attn_mask, Tensor) and attn_mask.dtype != torch.float32:
        (attn_mask,) = cast_for_autocast(attn_mask)
    check_attn_mask(attn_mask, extent, q)
    return attn_mask[(None,) * (4 - attn_mask.dim())]


def _bound(name: str, max_seqlen: Any, masks: Masks, of_mask: int | None, x: Tensor) -> int:
    """A bound of the lengths: an integer that was given, else what the mask was made for."""
    if max_seqlen is None or isinstance(max_seqlen, Tensor):
        for mask in ("attn_mask", "block_mask"):
            if isinstance(getattr(masks, mask), Tensor):
                kind = type(max_seqlen).__name__
                raise TypeError(f"{name}: must be an integer with a tensor {mask}, got {kind}")
        if of_mask is not None:
            return of_mask
    return seqlen_bound(name, max_seqlen, rows_bound(x))
