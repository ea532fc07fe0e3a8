"""Which probabilities dropout keeps, written out element by element.

The random bits are those of Philox4x32 with 7 rounds (Salmon, Moraes, Dror, Shaw, "Parallel Random
Numbers: As Easy as 1, 2, 3", 2011). One block of 128 bits serves 4 rows x 4 columns, each in two
pairs 8 apart, as the registers of two threads hold them; every element takes 8 bits of it. They are
the upper half of the 16 that decide. The lower half is the same for all of a block: the top of the
exclusive or of the second and the fourth word after five of the seven rounds.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_INCREMENTS = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 7
LOW_32 = 0xFFFFFFFF

Words = tuple[np.ndarray, ...]


def philox_4x32_7(counter: Words, key: tuple[int, int], rounds: int = ROUNDS) -> Words:
    """Four words of 32 bits from a counter of four and a key of two; uint64 arrays."""
    c0, c1, c2, c3 = (np.asarray(word, dtype=np.uint64) for word in counter)
    k0, k1 = key
    shift, mask = np.uint64(32), np.uint64(LOW_32)
    for _ in range(rounds):
        product0, product1 = c0 * np.uint64(MULTIPLIERS[0]), c2 * np.uint64(MULTIPLIERS[1])
        c0, c1, c2, c3 = (
            (product1 >> shift) ^ c1 ^ np.uint64(k0),
            product1 & mask,
            (product0 >> shift) ^ c3 ^ np.uint64(k1),
            product0 & mask,
        )
        k0, k1 = (k0 + KEY_INCREMENTS[0]) & LOW_32, (k1 + KEY_INCREMENTS[1]) & LOW_32
    return c0, c1, c2, c3


def random_16(
    seed: int, offset: int, head: np.ndarray, row: np.ndarray, column: np.ndarray
) -> np.ndarray:
    """16 random bits for every (batch index * heads + head, row, column)."""
    counter = (
        (column // 16) * 4 + (column % 8) // 2,
        (row // 16) * 4 + (row % 8) // 2,
        head,
        np.asarray(offset & LOW_32),
    )
    seed_high, offset_high = (seed >> 32) & LOW_32, (offset >> 32) & LOW_32
    key = (seed & LOW_32, seed_high ^ offset_high)
    words = philox_4x32_7(counter, key)
    element = row % 2 * 8 + column % 2 * 4 + (row // 8) % 2 * 2 + (column // 8) % 2
    own = np.zeros(np.broadcast_shapes(row.shape, column.shape), dtype=np.uint64)
    for word, bits in enumerate(words):
        for half in range(2):
            bit = bits >> (16 * half + element).astype(np.uint64) & np.uint64(1)
            own += bit << np.uint64(4 * half + word)
    after_five = philox_4x32_7(counter, key, rounds=5)
    shared = (after_five[1] ^ after_five[3]) >> np.uint64(24)
    return own << np.uint64(8) | shared


def keep_mask(
    seed: int,
    offset: int,
    dropout_p: float,
    batch: int,
    heads: int,
    seqlen_q: int,
    seqlen_k: int,
) -> Tensor:
    """(B, H, Sq, Sk) booleans: which probabilities are kept."""
    threshold = min(int(dropout_p * 65_536 + 0.5), 65_535)
    mask = np.empty((batch * heads, seqlen_q, seqlen_k), dtype=bool)
    row, column = np.indices((seqlen_q, seqlen_k))
    for head in range(batch * heads):
        bits = random_16(seed, offset, np.full_like(row, head), row, column)
        mask[head] = bits >= threshold
    return torch.from_numpy(mask.reshape(batch, heads, seqlen_q, seqlen_k))
