"""BlockSparsity: which tiles of a mask are visited, and which pairs of those are visible.

Its cost: docs/masks.md. Ready-made masks: ready_made.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from ..call.masks import check_key_lists
from ..call.pieces import HIDDEN, PARTIAL, PIECE, VISIBLE, pieces_of
from ..call.rules import tiles_of
from ..call.tensors import check_tensor
from .entries import ListedRows, tell_strange_entries
from .lists import (
    bits_of_lists,
    by_pair,
    listed_blocks,
    lists_of_pieces,
    pack_rows,
    pieces_of_bits,
    pieces_of_blocks,
    pieces_of_rows,
    unpack,
)
from .plot import plot_pieces

__all__ = ["BlockSparsity", "sparsity_of_pieces"]

MAX_SEQLEN = 1 << 30  # a tile's index and its pieces are one int32

MASK_MOD_PAIRS = 1 << 22  # a mask_mod computes in int64 and in tensors of its own


@dataclass(frozen=True, eq=False, repr=False)
class BlockSparsity:
    """A mask as kernels walk it: lists of tiles of 128 x 128 pairs, and a bit for each pair.

    Built in torch operations on the device of what it is made of; building, to_mask and density
    never wait for the device. Immutable and without a gradient; attention takes it as `block_mask`.

    Attributes:
        seqlen_q, seqlen_k: the mask's extent in queries and keys. Of packed sequences, bounds.
        rows: int32 (batch or 1, heads or 1, Tq, 2 + Tk), Tq and Tk being the lengths in tiles. Of
            the tile of queries t, rows[b, h, t] is [count, order, visit, visit, ...]: the number of
            key tiles it visits, the t'th tile to be worked on (most visits first), the visits in
            ascending order and zeros. A visit is 256 * tile plus two bits, at 2 * (2 * query half +
            key half), for each piece of 64 x 64: 0 hidden, 1 visible, 2 as the pair's bit says.
        columns: int32 (batch or 1, heads or 1, Tk, 2 + Tq): likewise, the tiles of queries that
            visit a tile of keys; pieces are counted the same way.
        bits: int32 (batch or 1, heads or 1, seqlen_q, 4 * Tk): bit j % 32 of word j // 32 of row i
            is set if the pair (i, j) is visible. None: no piece needs it. Pieces that the lists
            call hidden or visible are, whatever their bits.

    Raises:
        TypeError: a tensor is missing, of another dtype or not dense; a length is no integer.
        ValueError: a length out of range, another shape or device, a tensor not contiguous.
    """

    seqlen_q: int
    seqlen_k: int
    rows: Tensor
    columns: Tensor
    bits: Tensor | None

    def __post_init__(self) -> None:
        _check_seqlen("seqlen_q", self.seqlen_q)
        _check_seqlen("seqlen_k", self.seqlen_k)
        tiles_q, tiles_k = tiles_of(self.seqlen_q), tiles_of(self.seqlen_k)
        self._check("rows", self.rows, (tiles_q, 2 + tiles_k))
        self._check("columns", self.columns, (tiles_k, 2 + tiles_q))
        if self.columns.shape[:2] != self.rows.shape[:2]:
            raise ValueError(
                f"columns: must have the batch and heads of rows, {tuple(self.rows.shape[:2])}, "
                f"got {tuple(self.columns.shape[:2])}"
            )
        if self.bits is not None:
            self._check("bits", self.bits, (self.seqlen_q, 4 * tiles_k))
            for name, dim in (("batch", 0), ("heads", 1)):
                of_bits, of_rows = self.bits.shape[dim], self.rows.shape[dim]
                if of_bits != of_rows and 1 not in (of_bits, of_rows):
                    raise ValueError(
                        f"bits: {name} must be 1 or that of rows ({of_rows}), got {of_bits}"
                    )

    def _check(self, name: str, tensor: Any, last: tuple[int, int]) -> None:
        check_tensor(name, tensor)
        if tensor.dtype != torch.int32:
            raise TypeError(f"{name}: dtype must be torch.int32, got {tensor.dtype}")
        if tensor.device != self.rows.device:
            raise ValueError(
                f"{name}: must be on the device of rows ({self.rows.device}), got {tensor.device}"
            )
        if tensor.dim() != 4 or tuple(tensor.shape[2:]) != last:
            shape = f"(batch or 1, heads or 1, {last[0]}, {last[1]})"
            raise ValueError(f"{name}: must have shape {shape}, got {tuple(tensor.shape)}")
        if not tensor.is_contiguous():
            raise ValueError(f"{name}: must be contiguous, got strides {tensor.stride()}")

    def __repr__(self) -> str:
        lists_and_bits = "lists" if self.bits is None else "lists and bits"
        return (
            f"BlockSparsity(batch={self.batch}, heads={self.heads}, seqlen_q={self.seqlen_q}, "
            f"seqlen_k={self.seqlen_k}, {lists_and_bits} on {self.device})"
        )

    @property
    def batch(self) -> int:
        """Sequences that have a mask of their own; 1: all have the same."""
        return self._extent(0)

    @property
    def heads(self) -> int:
        """Query heads that have a mask of their own; 1: all have the same."""
        return self._extent(1)

    def _extent(self, dim: int) -> int:
        extent = self.rows.shape[dim]
        return self.bits.shape[dim] if extent == 1 and self.bits is not None else extent

    @property
    def device(self) -> torch.device:
        return self.rows.device

    # -- making one --------------------------------------------------------------------------------

    @staticmethod
    def from_mask(mask: Tensor, *, seqlen_q: int | None = None) -> BlockSparsity:
        """Of a dense mask; always with bits.

        Args:
            mask: bool, True visible: (batch or 1, heads or 1, seqlen_q or 1, seqlen_k), with any
                strides; (heads or 1, ...) and (seqlen_q or 1, seqlen_k) as well. Dimensions that
                are expanded, like one of 1, cost nothing.
            seqlen_q: the number of queries; needed where the mask has one row for all of them.

        Raises:
            TypeError: mask is no bool tensor, seqlen_q no integer.
            ValueError: another shape.
        """
        check_tensor("mask", mask)
        mask = _in_four_dimensions("mask", mask, "seqlen_q or 1, seqlen_k")
        if seqlen_q is None:
            seqlen_q = mask.shape[2]
        _check_seqlen("seqlen_q", seqlen_q)
        if mask.shape[2] != 1 and mask.shape[2] != seqlen_q:
            raise ValueError(f"mask: must have 1 row or seqlen_q ({seqlen_q}), got {mask.shape[2]}")
        seqlen_k = mask.shape[3]

        for dim in range(3):
            if mask.stride(dim) == 0 and mask.shape[dim] > 1:
                mask = mask.narrow(dim, 0, 1)
        batch, heads, different, _ = mask.shape  # rows that are all the same count as one
        bits = pack_rows(
            lambda first, last: mask[:, :, first:last], (batch, heads), different, seqlen_k
        )
        pieces = pieces_of_bits(bits, different, seqlen_k)
        if different != seqlen_q:
            bits = bits.expand(-1, -1, seqlen_q, -1).contiguous()
            pieces = pieces.expand(-1, -1, pieces_of(seqlen_q), -1)
        return sparsity_of_pieces(pieces, bits, seqlen_q, seqlen_k)

    @staticmethod
    def from_blocks(
        block_mask: Tensor, block_size: int | tuple[int, int], seqlen_q: int, seqlen_k: int
    ) -> BlockSparsity:
        """Of a mask in blocks, all of whose pairs are visible or none; without bits.

        Args:
            block_mask: bool, True visible: (batch or 1, heads or 1, blocks of queries, blocks of
                keys), or without the first one or two; blocks at the ends may be cut short.
            block_size: queries and keys of a block, or one number for both: multiples of 64.

        Raises:
            TypeError: block_mask is no bool tensor; a number is no integer.
            ValueError: another shape; a block size that is no multiple of 64.
        """
        check_tensor("block_mask", block_mask)
        blocks = _in_four_dimensions("block_mask", block_mask, "blocks of queries, blocks of keys")
        _check_seqlen("seqlen_q", seqlen_q)
        _check_seqlen("seqlen_k", seqlen_k)
        size = _checked_block_size("block_size", block_size)
        expected = (-(-seqlen_q // size[0]), -(-seqlen_k // size[1]))
        if tuple(blocks.shape[2:]) != expected:
            raise ValueError(
                f"block_mask: must have {expected[0]} x {expected[1]} blocks of {size} for "
                f"{seqlen_q} queries and {seqlen_k} keys, got {tuple(block_mask.shape)}"
            )
        pieces = pieces_of_blocks(blocks, size, seqlen_q, seqlen_k).to(torch.uint8) * VISIBLE
        return sparsity_of_pieces(pieces, None, seqlen_q, seqlen_k)

    @staticmethod
    def from_block_mask(block_mask: Any, device: torch.device | str | None = None) -> BlockSparsity:
        """Of a BlockMask of torch.nn.attention.flex_attention.

        Its full blocks are visible. The bits of the others come from its mask_mod, which is
        evaluated for every pair of the batch and heads of the block mask, a few rows at a time: do
        this once, not for every call. Without bits if there is no mask_mod. Indices out of range
        are dropped.

        Args:
            block_mask: a BlockMask with a BLOCK_SIZE in multiples of 64.
            device: where the result is to be; default: where the block mask is, which is also
                where mask_mod is evaluated.

        Raises:
            TypeError: block_mask is none.
            ValueError: its BLOCK_SIZE is no multiple of 64; its tensors do not fit its lengths.
            RuntimeError: it is a part of a block mask, whose mask_mod torch does not give out.
        """
        from torch.nn.attention.flex_attention import BlockMask, noop_mask

        if not isinstance(block_mask, BlockMask):
            raise TypeError(f"block_mask: must be a BlockMask, got {type(block_mask).__name__}")
        size = _checked_block_size("block_mask.BLOCK_SIZE", block_mask.BLOCK_SIZE)
        seqlen_q, seqlen_k = block_mask.seq_lengths
        partial = _listed_pieces(
            "kv", block_mask.kv_num_blocks, block_mask.kv_indices, size, seqlen_q, seqlen_k
        )
        bits = None
        pieces = partial.to(torch.uint8) * VISIBLE
        if block_mask.mask_mod is not noop_mask:
            bits = _bits_of_mask_mod(block_mask.mask_mod, partial, seqlen_q, seqlen_k)
            pieces = torch.where(partial, pieces_of_bits(bits, seqlen_q, seqlen_k), HIDDEN)
        counts, indices = block_mask.full_kv_num_blocks, block_mask.full_kv_indices
        if counts is not None and indices is not None:
            full = _listed_pieces("full_kv", counts, indices, size, seqlen_q, seqlen_k)
            pieces = torch.where(full, VISIBLE, pieces)
        made = sparsity_of_pieces(pieces, bits, seqlen_q, seqlen_k)
        return made if device is None else made.to(device)

    @staticmethod
    def from_key_lists(
        key_lists: Tensor,
        key_list_block: int,
        seqlen_q: int,
        seqlen_k: int,
        *,
        key_list_queries: int = 1,
    ) -> BlockSparsity:
        """Of lists of the blocks of keys that queries see. Without bits where a list is of 64 or
        128 queries and its blocks of 64 or 128 keys.

        Args:
            key_lists: int32 (batch or 1, lists, heads or 1, n), with any strides. Entry e stands
                for keys e * key_list_block to (e + 1) * key_list_block - 1, and -1 for none, as
                what is no block of keys, which check_device_errors reports. Twice is once.
            key_list_block: 1, 8, 16, 32, 64 or 128.
            key_list_queries: 1, 64 or 128: queries of a list, of which there are as many as that
                takes.

        Raises:
            TypeError: key_lists is no int32 tensor; a number is no integer.
            ValueError: another shape or number; on the CPU an entry that is no block of keys.
        """
        check_tensor("key_lists", key_lists)
        _check_seqlen("seqlen_q", seqlen_q)
        _check_seqlen("seqlen_k", seqlen_k)
        check_key_lists(key_lists, key_list_block, key_list_queries)
        lists = -(-seqlen_q // key_list_queries)
        if key_lists.dim() != 4 or key_lists.shape[1] != lists:
            raise ValueError(
                f"key_lists: must have shape (batch or 1, {lists}, heads or 1, n) for {seqlen_q} "
                f"queries, {key_list_queries} a list, got {tuple(key_lists.shape)}"
            )
        tell_strange_entries(key_lists, key_list_block, ListedRows(seqlen_k))
        size = (key_list_queries, key_list_block)
        return sparsity_of_lists(key_lists, size, seqlen_q, seqlen_k)

    # -- reading one -------------------------------------------------------------------------------

    def pieces(self) -> Tensor:
        """What `rows` say of each piece of 64 x 64 pairs: 0 hidden, 1 visible, 2 as bits say.

        uint8 (batch or 1, heads or 1, ceil(seqlen_q / 64), ceil(seqlen_k / 64)).
        """
        return pieces_of_rows(self.rows, self.seqlen_q, self.seqlen_k)

    def to_mask(self) -> Tensor:
        """The dense mask, bool (batch or 1, heads or 1, seqlen_q, seqlen_k), True visible."""
        pieces = self.pieces()
        visible = by_pair(pieces == VISIBLE, self.seqlen_q, self.seqlen_k)
        if self.bits is None:
            return visible
        looked_up = by_pair(pieces == PARTIAL, self.seqlen_q, self.seqlen_k)
        return visible | (looked_up & unpack(self.bits, self.seqlen_k))

    def to(self, device: torch.device | str) -> BlockSparsity:
        """The same on another device; itself where it is there already."""
        rows, columns = self.rows.to(device), self.columns.to(device)
        bits = None if self.bits is None else self.bits.to(device)
        if rows is self.rows and columns is self.columns and bits is self.bits:
            return self
        return BlockSparsity(self.seqlen_q, self.seqlen_k, rows, columns, bits)

    def density(self) -> Tensor:
        """The share of pieces of 64 x 64 that are not hidden, fp32 (), over batch and heads."""
        visited = self.pieces() != HIDDEN
        return visited.sum(dtype=torch.float32) / max(1, visited.numel())

    def plot(self, batch: int = 0, head: int = 0, *, ax: Any = None) -> Any:
        """Draw the pieces of one sequence and head: hidden, visible, partial. Needs matplotlib.

        Waits for the device. Returns the matplotlib Axes: `ax`, or one of a new figure.

        Raises:
            ModuleNotFoundError: matplotlib is not installed.
            ValueError: there is no such sequence or head.
        """
        for name, index, extent in (("batch", batch, self.batch), ("head", head, self.heads)):
            if not 0 <= index < extent:
                raise ValueError(f"{name}: must be from 0 to {extent - 1}, got {index}")
        pieces = self.pieces().expand(self.batch, self.heads, -1, -1)[batch, head].cpu()
        title = f"sequence {batch}, head {head}"
        return plot_pieces(pieces, self.seqlen_q, self.seqlen_k, title, ax)


BlockSparsity.__module__ = __name__.partition(".")[0]  # where pickles look for it


def sparsity_of_pieces(
    pieces: Tensor, bits: Tensor | None, seqlen_q: int, seqlen_k: int
) -> BlockSparsity:
    """Of pieces uint8 (batch or 1, heads or 1, ceil(seqlen_q / 64), ceil(seqlen_k / 64)) as
    BlockSparsity.pieces() returns them, and the bits that the partial ones need.
    """
    rows, columns = lists_of_pieces(pieces)
    return BlockSparsity(seqlen_q, seqlen_k, rows, columns, bits)


def sparsity_of_lists(
    key_lists: Tensor, size: tuple[int, int], seqlen_q: int, seqlen_k: int
) -> BlockSparsity:
    """BlockSparsity.from_key_lists of arguments that are right; `size`: queries of a list and keys
    of a block.
    """
    queries, block = size
    bits = None
    if queries % PIECE == block % PIECE == 0:
        listed = listed_blocks(key_lists.transpose(1, 2), -(-seqlen_k // block))
        pieces = pieces_of_blocks(listed, size, seqlen_q, seqlen_k).to(torch.uint8) * VISIBLE
    else:
        bits = bits_of_lists(key_lists, queries, block, seqlen_q, seqlen_k)
        pieces = pieces_of_bits(bits, seqlen_q, seqlen_k)
    return sparsity_of_pieces(pieces, bits, seqlen_q, seqlen_k)


# -- block masks of torch --------------------------------------------------------------------------


def _listed_pieces(
    name: str,
    counts: Tensor,
    indices: Tensor,
    size: tuple[int, int],
    seqlen_q: int,
    seqlen_k: int,
) -> Tensor:
    """Which pieces are of a block that the lists of a BlockMask name, bool (B, H, ...)."""
    blocks_q, blocks_k = -(-seqlen_q // size[0]), -(-seqlen_k // size[1])
    if indices.dim() > 4 or indices.shape[-2] != blocks_q:
        raise ValueError(
            f"block_mask.{name}_indices: must have {blocks_q} rows for {seqlen_q} queries in "
            f"blocks of {size[0]}, got shape {tuple(indices.shape)}"
        )
    if counts.shape != indices.shape[:-1]:
        raise ValueError(
            f"block_mask.{name}_num_blocks: must have shape {tuple(indices.shape[:-1])}, "
            f"got {tuple(counts.shape)}"
        )
    place = torch.arange(indices.shape[-1], device=indices.device)
    listed = listed_blocks(indices.masked_fill(place >= counts.unsqueeze(-1), -1), blocks_k)
    listed = listed[(None,) * (4 - listed.dim())]
    return pieces_of_blocks(listed, size, seqlen_q, seqlen_k)


def _bits_of_mask_mod(
    mask_mod: Callable[..., Tensor], like: Tensor, seqlen_q: int, seqlen_k: int
) -> Tensor:
    """Bits of a mask_mod over the batch, heads and device of `like` (B, H, ...)."""
    from torch.nn.attention.flex_attention import create_mask

    batch, heads = like.shape[:2]

    def rows_of(first: int, last: int) -> Tensor:
        def of_these_rows(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return mask_mod(b, h, query + first, key)

        rows = create_mask(of_these_rows, batch, heads, last - first, seqlen_k, device=like.device)
        return rows.to(torch.bool)

    return pack_rows(rows_of, (batch, heads), seqlen_q, seqlen_k, MASK_MOD_PAIRS)


# -- checks ----------------------------------------------------------------------------------------


def _in_four_dimensions(name: str, mask: Tensor, last: str) -> Tensor:
    """(batch or 1, heads or 1, ...) of a bool tensor of 2 to 4 dimensions."""
    if mask.dtype != torch.bool:
        raise TypeError(f"{name}: dtype must be torch.bool, got {mask.dtype}")
    if not 2 <= mask.dim() <= 4:
        raise ValueError(
            f"{name}: must have shape (batch or 1, heads or 1, {last}), got {tuple(mask.shape)}"
        )
    return mask[(None,) * (4 - mask.dim())]


def _check_seqlen(name: str, seqlen: Any) -> None:
    if not isinstance(seqlen, (int, torch.SymInt)) or isinstance(seqlen, bool):
        raise TypeError(f"{name}: must be an integer, got {type(seqlen).__name__}")
    if not 0 <= seqlen <= MAX_SEQLEN:
        raise ValueError(f"{name}: must be from 0 to {MAX_SEQLEN}, got {seqlen}")


def _checked_block_size(name: str, block_size: Any) -> tuple[int, int]:
    """The pair of a block size, or of one number for both."""
    pair = block_size if isinstance(block_size, (tuple, list)) else (block_size, block_size)
    if len(pair) != 2 or not all(type(size) is int for size in pair):
        raise TypeError(f"{name}: must be one or two integers, got {block_size!r}")
    if not all(size > 0 and size % PIECE == 0 for size in pair):
        raise ValueError(f"{name}: must be positive multiples of {PIECE}, got {block_size}")
    return cast("tuple[int, int]", tuple(pair))
