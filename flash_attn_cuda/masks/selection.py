"""Lists of the blocks of keys that queries score highest, for `key_lists` of an attention call.

Query i stands at position i + seqlen_k - seqlen_q among the keys and selects of the blocks that
begin there or before. Lists have no gradient. Scores are made a few queries at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from ..call.tensors import as_index, check_tensor

__all__ = ["moba_key_lists", "nsa_key_lists"]

CHUNK_SCORES = 1 << 25  # fp32 numbers at a time


@torch.no_grad()
def moba_key_lists(q: Tensor, k: Tensor, *, key_list_block: int, top_k: int) -> Tensor:
    """The blocks whose mean key has the largest products with a query, and the query's own block:
    Lu et al., "MoBA: Mixture of Block Attention for Long-Context LLMs", 2025.

    Products of query heads that share a key head are added, as they share a list.

    Args:
        q: (batch, seqlen_q, heads_q, head_dim), floating.
        k: (batch, seqlen_k, heads_k, head_dim); heads_k divides heads_q.
        key_list_block: keys of a block.
        top_k: blocks of a query, its own among them.

    Returns:
        int32 (batch, seqlen_q, heads_k, top_k), -1 where there are fewer.

    Raises:
        TypeError, ValueError: an argument is of another type, shape or range.
    """
    _check_heads("q", q, "k", k)
    block, top_k = _at_least_one(key_list_block=key_list_block, top_k=top_k)
    seqlen_k = k.shape[1]
    blocks = -(-seqlen_k // block)
    padded = torch.nn.functional.pad(k.float(), (0, 0, 0, 0, 0, blocks * block - seqlen_k))
    mean = padded.unflatten(1, (blocks, block)).mean(2)  # where it is cut it is no query's choice

    def scores_of(rows: slice, position: Tensor) -> Tensor:
        queries = q[:, rows].float().unflatten(2, (k.shape[2], -1)).sum(3)
        scores = torch.einsum("bqhd,bchd->bqhc", queries, mean)
        return _with_chosen(scores, position, block, first=0, last=1)

    return _best(scores_of, q, k.shape[2], seqlen_k, blocks, top_k)


@torch.no_grad()
def nsa_key_lists(
    q: Tensor,
    k_compressed: Tensor,
    seqlen_k: int,
    *,
    key_list_block: int = 64,
    top_k: int = 16,
    compression_block: int = 32,
    compression_stride: int = 16,
    initial: int = 1,
    local: int = 2,
    softmax_scale: float | None = None,
) -> Tensor:
    """The blocks to which attention over compressed keys gives most: Yuan et al., "Native Sparse
    Attention: Hardware-Aligned and Natively Trainable Sparse Attention", 2025, token selection.

    Compressed key c stands for keys from c * compression_stride on, compression_block of them. A
    block's importance is, over its strides, the probability of all compressed keys that have the
    stride, summed over the query heads that share a key head.

    Args:
        q: (batch, seqlen_q, heads_q, head_dim), floating.
        k_compressed: (batch, compressed, heads_k, head_dim), as a model makes them.
        seqlen_k: keys, which may go beyond the last compressed one.
        key_list_block: keys of a block, a multiple of compression_stride.
        top_k: blocks of a query, among them those of `initial` and `local`.
        compression_block: a multiple of compression_stride.
        initial: blocks from the first on that are always chosen.
        local: blocks up to the query's own that are always chosen.
        softmax_scale: of the products; None for head_dim ** -0.5.

    Returns:
        int32 (batch, seqlen_q, heads_k, top_k), -1 where there are fewer.

    Raises:
        TypeError, ValueError: an argument is of another type, shape or range.
    """
    _check_heads("q", q, "k_compressed", k_compressed)
    block, top_k, width, stride = _at_least_one(
        key_list_block=key_list_block,
        top_k=top_k,
        compression_block=compression_block,
        compression_stride=compression_stride,
    )
    for name, size in (("key_list_block", block), ("compression_block", width)):
        if size % stride != 0:
            raise ValueError(f"{name}: must be a multiple of {stride}, a stride, got {size}")
    seqlen_k = as_index("seqlen_k", seqlen_k)
    initial, local = as_index("initial", initial), as_index("local", local)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    blocks, count, heads_k = -(-seqlen_k // block), k_compressed.shape[1], k_compressed.shape[2]
    end = torch.arange(count, device=q.device) * stride + width  # behind a compressed key's keys
    strides = blocks * (block // stride)
    keys = k_compressed.float()

    def scores_of(rows: slice, position: Tensor) -> Tensor:
        queries = q[:, rows].float().unflatten(2, (heads_k, -1))
        scores = torch.einsum("bqhgd,bchd->bqhgc", queries, keys) * scale
        scores = scores.masked_fill((end > position[:, None] + 1)[:, None, None], -math.inf)
        of_compressed = scores.softmax(-1).nan_to_num(0.0).sum(3)
        # Of a stride: of the compressed keys that begin in it and in width / stride - 1 before it.
        before = width // stride - 1
        padded = torch.nn.functional.pad(of_compressed, (before, strides))
        of_strides = padded.unfold(-1, before + 1, 1).sum(-1)[..., :strides]
        importance = of_strides.unflatten(-1, (blocks, -1)).sum(-1)
        return _with_chosen(importance, position, block, first=initial, last=local)

    return _best(scores_of, q, heads_k, seqlen_k, blocks, top_k)


def _with_chosen(scores: Tensor, position: Tensor, block: int, first: int, last: int) -> Tensor:
    """Scores (B, queries, H, blocks), infinite of the first blocks and of the last up to a query's
    own, -inf of those behind it.
    """
    own = position.div(block, rounding_mode="floor")[:, None]
    number = torch.arange(scores.shape[-1], device=scores.device)
    is_chosen = (number < first) | (number > own - last)
    scores = scores.masked_fill(is_chosen[:, None], math.inf)
    return scores.masked_fill((number > own)[:, None], -math.inf)


def _best(
    scores_of: Callable[[slice, Tensor], Tensor],
    q: Tensor,
    heads_k: int,
    seqlen_k: int,
    blocks: int,
    top_k: int,
) -> Tensor:
    """The numbers of the highest scores above -inf. scores_of(rows, their positions)."""
    batch, seqlen_q, heads_q = q.shape[:3]
    step = seqlen_q
    if not is_compiling():  # a loop over a length would fix it
        step = max(1, CHUNK_SCORES // max(1, batch * heads_q * 4 * blocks))
    position = torch.arange(seqlen_q, device=q.device) + (seqlen_k - seqlen_q)
    parts = []
    for begin in range(0, max(1, seqlen_q), max(1, step)):
        rows = slice(begin, begin + step)
        with torch.autocast(q.device.type, enabled=False):
            found = scores_of(rows, position[rows]).topk(min(top_k, blocks), -1)
        parts.append(found.indices.int().masked_fill(found.values == -math.inf, -1))
    lists = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
    return torch.nn.functional.pad(lists, (0, top_k - lists.shape[-1]), value=-1)


def _at_least_one(**numbers: Any) -> tuple[int, ...]:
    for name, number in numbers.items():
        if as_index(name, number) < 1:
            raise ValueError(f"{name}: must be at least 1, got {number}")
    return tuple(as_index(*each) for each in numbers.items())


def _check_heads(name_q: str, q: Any, name_k: str, k: Any) -> None:
    for name, x in ((name_q, q), (name_k, k)):
        check_tensor(name, x)
        if x.dim() != 4 or not x.is_floating_point():
            raise ValueError(
                f"{name}: must be floating with four dimensions, got {x.dtype} {tuple(x.shape)}"
            )
    if k.shape[2] < 1 or q.shape[2] % k.shape[2] != 0 or q.shape[-1] != k.shape[-1]:
        raise ValueError(
            f"{name_k}: heads must divide those of {name_q} and head_dim must be the same, got "
            f"{tuple(k.shape)} and {tuple(q.shape)}"
        )
