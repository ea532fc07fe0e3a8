"""What the public functions make of their arguments before a backend sees them.

Lengths become integers, autocast's dtypes are applied and head dims padded; call/fields.py has what
it makes of options, call/window.py of windows.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.functional import pad

from ..call.fields import NAMES, AttentionCall, Names
from ..call.functorch import is_watched
from ..call.tensors import as_index, check_dtype, check_tensor, lse_dtype, refuse_forward_gradients
from ..installed import build_info
from ..operators.dtensor_import import is_dtensor

Result: TypeAlias = "Tensor | tuple[Tensor, ...]"


def of_lse_dtype(name: str, x: Any, q: Tensor, *, is_differentiable: bool = True) -> Any:
    """x, of one of the dtypes that callers may have it in, in softmax_lse's dtype; a parameter
    without a gradient is detached.
    """
    if x is None:
        return None
    check_tensor(name, x)
    # Whether a plain tensor needs a gradient is not known where torch.vmap maps it.
    if type(x) is not Tensor and isinstance(x, torch.nn.Parameter):
        is_differentiable &= x.requires_grad and torch.is_grad_enabled()
    dtype = lse_dtype(q.dtype)
    if x.dtype != dtype:
        check_dtype(name, x.dtype, (torch.float32, torch.float16, torch.bfloat16))
        x = x.to(dtype)
    if is_differentiable:
        return x.contiguous()
    refuse_forward_gradients(**{name: x})  # which detaching would drop
    return x.contiguous().detach()


def add_lists(
    call: AttentionCall, key_lists: Any, key_list_block: Any, key_list_queries: Any = 1
) -> None:
    """Lists of the keys that queries see, in a call with a qv."""
    if as_index("key_list_queries", key_list_queries) != 1:
        raise NotImplementedError(f"key_list_queries: must be 1 with a qv, got {key_list_queries}")
    if key_lists is not None:
        check_tensor("key_lists", key_lists)
        call.key_lists = key_lists
    call.key_list_block = as_index("key_list_block", key_list_block)


def add_tree(call: AttentionCall, tree_mask: Any, max_seqlen_q: Any) -> None:
    """A mask of the pairs of queries and their own keys, whose width bounds lengths that no integer
    does.
    """
    check_tensor("tree_mask", tree_mask)
    call.tree_mask = tree_mask
    if call.is_packed() and tree_mask.dim() == 2 and not isinstance(max_seqlen_q, int):
        call.max_seqlen_q = min(call.max_seqlen_q, tree_mask.shape[1])


def seqlen_bound(name: str, max_seqlen: Any, x: Tensor, block_table: Any = None) -> int:
    """A host integer for the max_seqlen of sequences packed in x, or in its pages, without reading
    a tensor: what fits there for a tensor or None.
    """
    if type(max_seqlen) is int:
        return max_seqlen
    if isinstance(max_seqlen, Tensor) and max_seqlen.dim() != 0:
        shape = tuple(max_seqlen.shape)
        raise ValueError(f"{name}: must be an integer or a 0-d tensor, got shape {shape}")
    if max_seqlen is None or isinstance(max_seqlen, Tensor):
        return rows_bound(x, block_table)
    return as_index(name, max_seqlen, "an integer, a 0-d tensor or None")


def rows_bound(x: Tensor, block_table: Any = None) -> int:
    """An upper bound of the length of a sequence packed in x, or in its pages; 0 for what checks
    will refuse.
    """
    if x.dim() == 0:
        return 0
    if not isinstance(block_table, Tensor):
        return x.shape[0]
    return block_table.shape[1] * x.shape[1] if block_table.dim() == 2 and x.dim() > 1 else 0


def packed_lengths(
    q: Any, k: Any, given: tuple[Any, Any, Any, Any], names: Names = NAMES, block_table: Any = None
) -> dict[str, Any]:
    """Fields of an AttentionCall: `given` is cu_seqlens_q, cu_seqlens_k, max_seqlen_q and
    max_seqlen_k, whose bounds become integers.
    """
    cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k = given
    check_tensor(names.q, q)
    check_tensor(names.k, k)
    if cu_seqlens_q is None:
        check_tensor(names.cu_seqlens_q, cu_seqlens_q)
    return {
        "cu_seqlens_q": cu_seqlens_q,
        "cu_seqlens_k": cu_seqlens_k,
        "max_seqlen_q": seqlen_bound(names.max_seqlen_q, max_seqlen_q, q),
        "max_seqlen_k": seqlen_bound(names.max_seqlen_k, max_seqlen_k, k, block_table),
    }


def is_plain_cuda_call(q: Any, k: Any, v: Any) -> bool:
    """Whether nothing but eager autograd would see an operator: half a microsecond. While a
    compiler is tracing, the answer is no.
    """
    return (
        not is_watched()
        and build_info.extension is not None
        and type(q) is Tensor
        and type(k) is Tensor
        and type(v) is Tensor
        and q.is_cuda
        and forward_ad._current_level < 0
    )


def pad_head_dim(x: Tensor) -> Tensor:
    """Zeros to a multiple of 8: they add nothing to a score, and their outputs are cut off."""
    padding = -x.shape[-1] % 8
    if padding == 0:
        return x
    if is_dtensor(x):  # which torch 2.11 would gather to pad it
        return torch.cat([x, x.new_zeros((*x.shape[:-1], padding))], -1)
    return pad(x, (0, padding))


def needs_padding(q: Tensor, v: Tensor) -> bool:
    """Whether the training kernels cannot read q and k, or v, as they are."""
    return q.shape[-1] % 8 != 0 or v.shape[-1] % 8 != 0


def cast_for_autocast(*tensors: Any) -> tuple[Any, ...]:
    """To torch.autocast's dtype, except fp64, as it does for torch's own attention."""
    return tuple(_cast_one(x) if isinstance(x, Tensor) else x for x in tensors)


def _cast_one(x: Tensor) -> Tensor:
    device = x.device.type
    if device not in ("cuda", "cpu") or not torch.is_autocast_enabled(device):
        return x
    # FP8 is storage with a scale, of which a cast would know nothing.
    if not x.is_floating_point() or x.dtype == torch.float64 or x.dtype.itemsize == 1:
        return x
    return x.to(torch.get_autocast_dtype(device))
