"""Masks in blocks of 128 x 128 pairs, of a wanted density, and as FlexAttention takes them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

BLOCK = 128  # queries and keys of a block


def random_blocks(blocks: int, heads: int, density: float, seed: int = 0) -> Tensor:
    """The diagonal, so that no query and no key is left alone, and random blocks of each head.

    Returns bool (1, heads, blocks, blocks), True visible: round(density * blocks ** 2) of a head.

    Raises ValueError if the diagonal is more than that.
    """
    generator = torch.Generator().manual_seed(seed)
    rank = torch.rand(1, heads, blocks, blocks, generator=generator)
    rank.diagonal(dim1=-2, dim2=-1).fill_(-1.0)
    return lowest(rank, density)


def window_blocks(blocks: int, heads: int, density: float) -> Tensor:
    """A global block at the start, which sees and is seen by all, and a window around each query's.

    The blocks nearest to the diagonal: to meet the density, the outermost diagonal is left off
    somewhere. As random_blocks, but every head has the same.
    """
    query, key = torch.arange(blocks)[:, None], torch.arange(blocks)
    rank = 2 * (query - key).abs() + (key > query)
    rank[0, :] = rank[:, 0] = -1
    return lowest(rank, density).expand(1, heads, blocks, blocks).contiguous()


def lowest(rank: Tensor, density: float) -> Tensor:
    """The blocks of lowest rank (..., blocks, blocks). Those with a negative one must be in."""
    flat = rank.flatten(-2)
    count = round(density * flat.shape[-1])
    least = int((flat < 0).sum(-1).max())
    if not least <= count <= flat.shape[-1]:
        bound = least / flat.shape[-1]
        raise ValueError(f"density: must be from {bound:.3g} to 1 for this mask, got {density}")
    chosen = flat.argsort(dim=-1, stable=True)[..., :count]
    return torch.zeros_like(flat, dtype=torch.bool).scatter(-1, chosen, True).view(rank.shape)


def flex_block_mask(blocks: Tensor) -> Any:
    """A BlockMask of full blocks alone, in which FlexAttention evaluates no mask_mod.

    The tensors' shapes and strides depend on those of `blocks` (batch, heads, ...) alone: one
    compiled kernel takes all masks of a shape.
    """
    from torch.nn.attention.flex_attention import BlockMask

    counts = blocks.sum(-1, dtype=torch.int32)
    indices = blocks.to(torch.uint8).argsort(dim=-1, descending=True, stable=True).to(torch.int32)
    partial = (torch.zeros_like(counts), torch.zeros_like(indices))
    return BlockMask.from_kv_blocks(*partial, counts, indices, BLOCK_SIZE=BLOCK)
