"""The bits, pieces and lists of a BlockSparsity, made and read in torch operations.

A tile is 128 queries x 128 keys, a piece a quarter of one, 64 x 64. Nothing here waits for the
device or decides by contents, so that all of it can be captured and traced. BlockSparsity has the
formats.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.nn.functional import pad

from ..call.pieces import HIDDEN, PARTIAL, PIECE, VISIBLE, pieces_of
from ..call.rules import TILE, tiles_of

CHUNK_PAIRS = 1 << 25  # pairs packed at a time: their temporaries take a byte each

# Eight bools are eight bytes of 0 or 1, bit 8i of an int64. Times this, bit i of the product's
# highest byte: 8i - 7j is i for i = j and outside 0..7 for all others, and no two sums collide.
_GATHER_BITS = 0x0102040810204080
_NO_VISIT = torch.iinfo(torch.int32).max


# -- bits ------------------------------------------------------------------------------------------


def pack(visible: Tensor) -> Tensor:
    """Bits of bools: (..., n) to int32 (..., 4 * tiles_of(n)), bit j % 32 of word j // 32."""
    if visible.numel() == 0:
        shape = (*visible.shape[:-1], 4 * tiles_of(visible.shape[-1]))
        return torch.zeros(shape, dtype=torch.int32, device=visible.device)
    if is_compiling():  # Inductor has no view of bools as another type
        visible = visible.to(torch.uint8)
    missing = -visible.shape[-1] % TILE
    if missing > 0:
        visible = pad(visible, (0, missing))
    elif is_compiling() or not _is_read_as_int64(visible):
        visible = visible.clone(memory_format=torch.contiguous_format)
    gathered = visible.view(torch.int64) * _GATHER_BITS
    highest = gathered.view(torch.uint8)[..., 7::8]
    return highest.clone(memory_format=torch.contiguous_format).view(torch.int32)


def pack_rows(
    rows_of: Callable[[int, int], Tensor],
    batch_and_heads: tuple[int, int],
    seqlen_q: int,
    seqlen_k: int,
    chunk_pairs: int = CHUNK_PAIRS,
) -> Tensor:
    """pack() of a mask that is made a few rows at a time.

    rows_of(first, last) is bool (B, H, last - first, seqlen_k), queries `first` to before `last`;
    B and H are `batch_and_heads`. The result is int32 (B, H, seqlen_q, 4 * tiles_of(seqlen_k)).
    """
    if is_compiling():  # a loop over a length would fix it
        return pack(rows_of(0, seqlen_q))
    batch, heads = batch_and_heads
    step = max(1, chunk_pairs // max(1, batch * heads * seqlen_k))
    parts = [
        pack(rows_of(first, min(first + step, seqlen_q)))
        for first in range(0, max(1, seqlen_q), step)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts, -2)


def unpack(bits: Tensor, seqlen_k: int) -> Tensor:
    """The bools (..., seqlen_k) of bits int32 (..., 4 * tiles_of(seqlen_k))."""
    shifts = torch.arange(8, dtype=torch.uint8, device=bits.device)
    numbers = (bits.view(torch.uint8).unsqueeze(-1) >> shifts) & 1
    return numbers.flatten(-2)[..., :seqlen_k] != 0


def _is_read_as_int64(visible: Tensor) -> bool:
    """Whether eight neighbouring bools of every row are eight bytes at a multiple of eight."""
    return bool(
        visible.stride(-1) == 1
        and visible.storage_offset() % 8 == 0
        and all(stride % 8 == 0 for stride in visible.stride()[:-1])
    )


# -- pieces ----------------------------------------------------------------------------------------


def pieces_of_bits(bits: Tensor, seqlen_q: int, seqlen_k: int) -> Tensor:
    """What each piece is, by bits int32 (B, H, seqlen_q, 4 * tiles_of(seqlen_k)).

    uint8 (B, H, pieces_of(seqlen_q), pieces_of(seqlen_k)). Pairs beyond the lengths do not count:
    a piece that they are part of is VISIBLE if all its real pairs are.
    """
    if bits.numel() == 0:
        shape = (*bits.shape[:2], pieces_of(seqlen_q), pieces_of(seqlen_k))
        return torch.zeros(shape, dtype=torch.uint8, device=bits.device)
    words = bits.view(torch.int64)[..., : pieces_of(seqlen_k)]  # a piece's share of a row each
    ones = torch.ones(1, seqlen_k, dtype=torch.bool, device=bits.device)
    complete = pack(ones).view(torch.int64)[..., : pieces_of(seqlen_k)]
    missing = -seqlen_q % PIECE
    if missing > 0:
        words = pad(words, (0, 0, 0, missing))
    some, every = words != 0, words == complete
    if missing > 0:
        every = every | (torch.arange(words.shape[-2], device=bits.device)[:, None] >= seqlen_q)
    shape = (pieces_of(seqlen_q), PIECE)
    some, every = some.unflatten(-2, shape).any(-2), every.unflatten(-2, shape).all(-2)
    return some.to(torch.uint8) * (PARTIAL - every.to(torch.uint8))


def pieces_of_blocks(
    blocks: Tensor, block_size: tuple[int, int], seqlen_q: int, seqlen_k: int
) -> Tensor:
    """The same (B, H, pieces of queries, pieces of keys) of blocks (B, H, blocks of queries, blocks
    of keys), any dtype; `block_size`: queries and keys of one, multiples of 64.
    """
    for dim, size, seqlen in ((-2, block_size[0], seqlen_q), (-1, block_size[1], seqlen_k)):
        block = torch.arange(pieces_of(seqlen), device=blocks.device) // (size // PIECE)
        blocks = blocks.index_select(dim, block)
    return blocks


def listed_blocks(key_lists: Tensor, blocks: int) -> Tensor:
    """Which of so many blocks lists (..., n) name, bool (..., blocks); what is none of them is not
    listed.
    """
    is_block = (key_lists >= 0) & (key_lists < blocks)
    listed = key_lists.new_zeros((*key_lists.shape[:-1], blocks + 1), dtype=torch.bool)
    return listed.scatter(-1, torch.where(is_block, key_lists, blocks).long(), True)[..., :blocks]


def bits_of_lists(
    key_lists: Tensor, queries: int, block: int, seqlen_q: int, seqlen_k: int
) -> Tensor:
    """pack() of what lists (B, lists of so many queries each, H, n) of blocks of keys name."""
    blocks = -(-seqlen_k // block)
    if block % PIECE == 0 and seqlen_k > 0:
        row = torch.arange(seqlen_q, device=key_lists.device) // queries
        listed = listed_blocks(key_lists.transpose(1, 2), blocks).index_select(2, row)
        words = listed.repeat_interleave(block // PIECE, -1)  # a piece's share of a row each
        count = 2 * tiles_of(seqlen_k)
        words = pad(words[..., :count], (0, max(0, count - words.shape[-1])))
        ones = torch.ones(1, seqlen_k, dtype=torch.bool, device=key_lists.device)
        return torch.where(words, pack(ones).view(torch.int64), 0).view(torch.int32)

    def rows_of(first: int, last: int) -> Tensor:
        row = torch.arange(first, last, device=key_lists.device) // queries
        lists = key_lists.index_select(1, row).transpose(1, 2)
        return listed_blocks(lists, blocks).repeat_interleave(block, -1)[..., :seqlen_k]

    batch_and_heads = (key_lists.shape[0], key_lists.shape[2])
    return pack_rows(rows_of, batch_and_heads, seqlen_q, seqlen_k)


def by_pair(pieces: Tensor, seqlen_q: int, seqlen_k: int) -> Tensor:
    """(B, H, seqlen_q, seqlen_k) of (B, H, pieces of queries, pieces of keys)."""
    keys = pieces.repeat_interleave(PIECE, -1)[..., :seqlen_k]
    return keys.repeat_interleave(PIECE, -2)[..., :seqlen_q, :]


def intersection(
    one: tuple[Tensor, Tensor | None], other: tuple[Tensor, Tensor | None]
) -> tuple[Tensor, Tensor | None]:
    """Pieces and bits of what two masks of the same lengths show, given theirs."""
    (a, a_bits), (b, b_bits) = one, other
    pieces = torch.where((a != HIDDEN) & (b != HIDDEN), torch.maximum(a, b), HIDDEN)
    if a_bits is None or b_bits is None or a_bits.numel() == 0:
        return pieces, b_bits if a_bits is None else a_bits
    return pieces, (_visible_words(a, a_bits) & _visible_words(b, b_bits)).view(torch.int32)


def _visible_words(pieces: Tensor, bits: Tensor) -> Tensor:
    """A piece's share of each row, int64, whose bits are right where it is VISIBLE too."""
    row = torch.arange(bits.shape[-2], device=bits.device) // PIECE
    whole = pad(pieces == VISIBLE, (0, pieces.shape[-1] % 2)).index_select(-2, row)
    return torch.where(whole, -1, bits.view(torch.int64))


# -- lists -----------------------------------------------------------------------------------------


def lists_of_pieces(pieces: Tensor) -> tuple[Tensor, Tensor]:
    """(rows, columns) of a BlockSparsity by its pieces uint8 (B, H, ...)."""
    whole = pad(pieces, (0, pieces.shape[-1] % 2, 0, pieces.shape[-2] % 2)).to(torch.int32)
    codes = whole[..., 0::2, 0::2] | whole[..., 0::2, 1::2] << 2
    codes = codes | whole[..., 1::2, 0::2] << 4 | whole[..., 1::2, 1::2] << 6
    return _list_visits(codes), _list_visits(codes.mT)


def pieces_of_rows(rows: Tensor, seqlen_q: int, seqlen_k: int) -> Tensor:
    """The pieces uint8 (B, H, ...) of lists by query tiles; entries out of range are no visits."""
    others = rows.shape[-1] - 2
    entries = rows[..., 2:]
    tile = entries >> 8
    place = torch.arange(others, dtype=torch.int32, device=rows.device)
    is_visit = (place < rows[..., :1]) & (tile >= 0) & (tile < others)
    codes = rows.new_zeros(*rows.shape[:-1], others + 1)
    codes = codes.scatter(-1, torch.where(is_visit, tile, others).long(), entries & 255)
    shifts = torch.arange(0, 8, 2, dtype=torch.int32, device=rows.device).view(2, 2)
    halves = (codes[..., :others, None, None] >> shifts) & 3  # (B, H, Tq, Tk, query half, key half)
    whole = halves.movedim(-2, -3).flatten(-2).flatten(-3, -2)
    return whole[..., : pieces_of(seqlen_q), : pieces_of(seqlen_k)].to(torch.uint8)


def _list_visits(codes: Tensor) -> Tensor:
    """The lists (..., tiles, 2 + others) of codes int32 (..., tiles, others); code 0: no visit."""
    visited = codes != 0
    count = visited.sum(-1, dtype=torch.int32)
    order = count.argsort(dim=-1, descending=True, stable=True).to(torch.int32)
    other = torch.arange(codes.shape[-1], dtype=torch.int32, device=codes.device)
    entries = torch.where(visited, other << 8 | codes, _NO_VISIT).sort(-1).values
    entries = entries.masked_fill(entries == _NO_VISIT, 0)
    return torch.cat((count.unsqueeze(-1), order.unsqueeze(-1), entries), -1)
