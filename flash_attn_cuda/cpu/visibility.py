"""Which pairs a sparse mask leaves, read from the lists and bits that the kernels read.

Lists and bits are those of a BlockSparsity (masks/sparsity.py), and the backward reads its columns
where the forward reads its rows: what one of them gets wrong shows in the results.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..call.pieces import PARTIAL, PIECE, VISIBLE

Part = tuple[slice, slice]  # batch entries and query heads


@dataclass(frozen=True, eq=False)
class Visibility:
    """The pairs of a call that its mask leaves; what lies outside of the mask is hidden."""

    pieces: Tensor  # uint8 (B|1, Hq|1, pieces of queries, pieces of keys): HIDDEN, VISIBLE, PARTIAL
    bits: Tensor | None  # int32 (B|1, Hq|1, queries, words); None: PARTIAL is hidden

    @classmethod
    def of_rows(cls, rows: Tensor, bits: Tensor | None) -> Visibility:
        """By the lists of query tiles, int32 (B|1, Hq|1, Tq, 2 + Tk)."""
        return cls(_codes(rows).movedim(-2, -3).flatten(-2).flatten(-3, -2), bits)

    @classmethod
    def of_columns(cls, columns: Tensor, bits: Tensor | None) -> Visibility:
        """By the lists of key tiles, int32 (B|1, Hq|1, Tk, 2 + Tq)."""
        by_query = _codes(columns).transpose(2, 3)
        return cls(by_query.movedim(-2, -3).flatten(-2).flatten(-3, -2), bits)

    @property
    def differs_by_sequence(self) -> bool:
        return self.pieces.shape[0] > 1

    @property
    def differs_by_head(self) -> bool:
        return self.pieces.shape[1] > 1

    def has_visit(self, part: Part, rows: range, cols: range) -> bool:
        """Whether a list has a visit that these queries and keys are part of."""
        first_row, last_row = rows.start // PIECE, (rows.stop - 1) // PIECE
        first_col, last_col = cols.start // PIECE, (cols.stop - 1) // PIECE
        pieces = self.pieces[broadcast_part(self.pieces, part)]
        return bool(pieces[..., first_row : last_row + 1, first_col : last_col + 1].any())

    def hidden(self, part: Part, rows: range, cols: range) -> Tensor:
        """(B|1, Hq|1, rows, cols) booleans: keys that queries do not see."""
        row, col = (torch.arange(x.start, x.stop, device=self.pieces.device) for x in (rows, cols))
        pieces = self.pieces[broadcast_part(self.pieces, part)]
        codes = _take(_take(pieces, -2, row // PIECE), -1, col // PIECE)
        visible = codes == VISIBLE
        if self.bits is not None:
            words = self.bits[broadcast_part(self.bits, part)]
            words = _take(_take(words, -2, row), -1, col // 32)
            visible |= (codes == PARTIAL) & (words >> (col % 32) & 1).bool()
        return visible.logical_not_()


def broadcast_part(x: Tensor, part: Part) -> Part:
    """An index of the part of x (B|1, Hq|1, ...) that serves these batch entries and heads."""
    batches, heads = part
    every = slice(0, 1)
    return batches if x.shape[0] > 1 else every, heads if x.shape[1] > 1 else every


def _codes(lists: Tensor) -> Tensor:
    """(B, H, tiles, others, query half, key half) uint8: the pieces of every visit, 0 of others.

    What no list can say is no visit: counts beyond the list, tiles that do not exist.
    """
    others = lists.shape[-1] - 2
    entries = lists[..., 2:]
    tile = entries >> 8
    is_visit = torch.arange(others, device=lists.device) < lists[..., :1]
    is_visit &= (tile >= 0) & (tile < others)
    shifts = torch.arange(0, 8, 2, device=lists.device).to(entries.dtype)
    pieces = ((entries[..., None] >> shifts) & 3).to(torch.uint8)
    codes = pieces.new_zeros(*lists.shape[:-1], others + 1, 4)
    place = torch.where(is_visit, tile, others).long()[..., None].expand(pieces.shape)
    return codes.scatter_(-2, place, pieces)[..., :others, :].unflatten(-1, (2, 2))


def _take(x: Tensor, dim: int, index: Tensor) -> Tensor:
    """x at these indices along dim; 0 at those beyond it."""
    size = x.shape[dim]
    if size == 0:
        shape = list(x.shape)
        shape[dim] = len(index)
        return x.new_zeros(shape)
    taken = x.index_select(dim, index.clamp(max=size - 1))
    is_inside = index < size
    return taken * (is_inside if dim == -1 else is_inside[:, None]).to(x.dtype)
