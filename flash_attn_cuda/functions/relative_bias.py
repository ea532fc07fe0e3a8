"""Biases that depend on the distance between query and key alone, as T5's (Raffel et al.,
"Exploring the Limits of Transfer Learning with a Unified Text-to-Text Transformer", 2020).

A caller's table has an element for each distance up to its reach. A call has one for each distance
that occurs (bias_by_distance, call/fields.py), so that its memory grows with seqlen_q + seqlen_k.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ..call.checks import check_call, extent_of
from ..call.fields import AttentionCall
from ..call.tensors import NO_BACKWARD, as_index, check_place, check_tensor, refuse_gradients
from .arguments import cast_for_autocast
from .chunks import packed_sequences


def t5_relative_bias(weight: Tensor, *, bidirectional: bool, max_distance: int = 128) -> Tensor:
    """The relative_bias of T5, mT5 and UMT5, differentiable.

    Args:
        weight: (num_buckets, heads_q), the weight of a model's relative_attention_bias.
        bidirectional: True in an encoder: half of the buckets are for keys behind the query.
        max_distance: from this distance on all keys are in the last bucket.

    Returns:
        (heads_q, 2 * max_distance + 1), of weight's dtype.

    Raises:
        TypeError: weight is no floating tensor, max_distance no integer.
        ValueError: weight does not have two dimensions and as many buckets as exact distances
            need, or max_distance is none that buckets of growing size can reach.
    """
    check_tensor("weight", weight)
    max_distance = as_index("max_distance", max_distance)
    if not weight.is_floating_point():
        raise TypeError(f"weight: must be floating, got {weight.dtype}")
    sides = 2 if bidirectional else 1
    if weight.dim() != 2 or weight.shape[0] < 2 * sides or weight.shape[0] % sides != 0:
        raise ValueError(
            f"weight: must have shape (num_buckets, heads_q) with at least {2 * sides} buckets"
            f"{', an even number' * bidirectional}, got {tuple(weight.shape)}"
        )
    buckets = weight.shape[0] // sides
    if max_distance <= buckets // 2:
        raise ValueError(
            f"max_distance: must be above {buckets // 2}, the distances that have buckets of their "
            f"own, got {max_distance}"
        )
    distance = torch.arange(-max_distance, max_distance + 1, device=weight.device)
    return weight[_t5_bucket(distance, buckets, bidirectional, max_distance)].t()


def _t5_bucket(distance: Tensor, buckets: int, bidirectional: bool, max_distance: int) -> Tensor:
    """Of keys at j - i. `buckets`: of one side. Half of them have one distance each, the others
    ranges that grow by a factor.
    """
    first, reach = torch.zeros_like(distance), (-distance).clamp(min=0)
    if bidirectional:
        first, reach = (distance > 0) * buckets, distance.abs()
    exact = buckets // 2
    growth = (reach.clamp(min=exact).float() / exact).log() / math.log(max_distance / exact)
    far = exact + (growth * (buckets - exact)).long()
    return first + torch.where(reach < exact, reach, far.clamp(max=buckets - 1))


def add_relative_bias(call: AttentionCall, relative_bias: Any) -> None:
    """Sets the bias of a call, whose other arguments are checked first."""
    if call.bias is not None:
        raise NotImplementedError(
            f"relative_bias: must be None with {'an' if call.reads_in_place() else 'a floating'} "
            "attn_mask, got a tensor"
        )
    if not call.over_cache:
        call.q, call.k, call.v = cast_for_autocast(call.q, call.k, call.v)
    check_call(call, is_padded=False)
    if isinstance(relative_bias, Tensor) and relative_bias.dtype != torch.float32:
        (relative_bias,) = cast_for_autocast(relative_bias)
    _check_relative_bias(relative_bias, call)
    if call.reads_in_place():
        what = "a cache" if call.over_cache else "pages"
        refuse_gradients(f"as attention over {what} {NO_BACKWARD}", relative_bias=relative_bias)
        call.relative_bias = relative_bias
        return
    # Not rounded before the sums of gradients are.
    exact, shift = relative_bias.to(call.lse_dtype()), _shift_of(call)
    if shift is None:
        call.bias = _by_distance(exact, call)
    else:
        call.bias = _by_distance_of_each(exact, call, shift)
    call.bias_by_distance = True


def _check_relative_bias(relative_bias: Any, call: AttentionCall) -> None:
    check_place("relative_bias", relative_bias, (call.q.dtype, torch.float32), call.q)
    shape, heads = tuple(relative_bias.shape), call.heads_q()
    if len(shape) != 2 or shape[0] != heads or shape[1] % 2 == 0:
        raise ValueError(
            "relative_bias: must have shape (heads_q, 2 * reach + 1) with as many heads as q "
            f"({heads}), got {shape}"
        )


def _shift_of(call: AttentionCall) -> Tensor | None:
    """(batch,): seqlen_k - seqlen_q of each packed sequence; None where the call says that of all,
    in seqlens or by giving both the same bounds.
    """
    if not call.is_packed():
        return None
    has_lengths = call.seqused_q is not None or call.seqused_k is not None
    if call.cu_seqlens_q is call.cu_seqlens_k and not has_lengths and call.leftpad_k is None:
        return None
    return packed_sequences(call).shift()


def _by_distance(relative_bias: Tensor, call: AttentionCall) -> Tensor:
    """(1, Hq, 1, Sq + Sk), in pieces, whose gradients are sums in a fixed order."""
    extent, reach = extent_of(call), relative_bias.shape[1] // 2
    shift = 0 if extent.is_packed else extent.seqlen_k - extent.seqlen_q
    first = -extent.seqlen_q - shift  # the distance of element 0 to a query's own key
    stop = first + extent.seqlen_q + extent.seqlen_k
    begin, end = (min(max(x, -reach), reach + 1) for x in (first, stop))
    before = relative_bias[:, :1].expand(-1, min(-reach, stop) - min(-reach, first))
    behind = relative_bias[:, -1:].expand(-1, max(reach + 1, stop) - max(reach + 1, first))
    within = relative_bias[:, begin + reach : end + reach]
    return torch.cat([before, within, behind], 1)[None, :, None]


def _by_distance_of_each(relative_bias: Tensor, call: AttentionCall, shift: Tensor) -> Tensor:
    """(B, Hq, 1, Sq + Sk), of sequences that only the device knows the lengths of."""
    extent, reach = extent_of(call), relative_bias.shape[1] // 2
    from_own = torch.arange(extent.seqlen_q + extent.seqlen_k, device=shift.device)
    from_own = from_own - extent.seqlen_q - shift[:, None]
    return relative_bias[:, from_own.clamp(-reach, reach) + reach].transpose(0, 1)[:, :, None]
