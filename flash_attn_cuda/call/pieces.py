"""What lists and bits of a mask count in: a tile is 128 queries x 128 keys, a piece a quarter of
one, 64 x 64.
"""

from __future__ import annotations

PIECE = 64
HIDDEN, VISIBLE, PARTIAL = 0, 1, 2  # of a piece: no pair, every pair, those whose bit is set


def pieces_of(seqlen: int) -> int:
    return -(-seqlen // PIECE)
