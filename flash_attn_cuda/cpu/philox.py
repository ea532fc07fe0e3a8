"""Which probabilities dropout keeps: a function of seed, offset, batch entry, head, query and key.

The bits of the kernels (shared/dropout/dropout.h), in torch operations on any device. Philox4x32
with 7 rounds: Salmon, Moraes, Dror, Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3", 2011. One
block of 128 bits serves 4 queries, two neighbours and the two 8 further on, times 4 such keys, with
8 bits each, below which come 8 more that the block shares; 16 x 16 probabilities take 4 x 4 blocks.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

STEPS = 1 << 16  # dropout_p counts in steps of 1 / STEPS
ROUNDS = 7
SHARED_AFTER = 5  # rounds; words 1 and 3 then make the bits that a block shares
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_INCREMENTS = (0x9E3779B9, 0xBB67AE85)

_LOW_32 = 0xFFFFFFFF
_GROUP = 16  # queries and keys of a group: blocks do not cross its edges


def dropout_threshold(dropout_p: float) -> int:
    """16 random bits below this drop a probability; 0 drops nothing, 65,535 is the most."""
    return min(max(math.floor(dropout_p * STEPS + 0.5), 0), STEPS - 1)


def keep_scale(dropout_p: float) -> float:
    """What kept probabilities are multiplied by, so that dropout leaves the mean as it is."""
    return STEPS / (STEPS - dropout_threshold(dropout_p))


def keep_mask(
    rng_state: Tensor,
    dropout_p: float,
    batch: range,
    heads: range,
    num_heads: int,
    rows: range,
    cols: range,
) -> Tensor:
    """(batch, heads, rows, cols) booleans: which probabilities of these ranges are kept.

    `rng_state` is (seed, offset), int64 (2); the result lies on its device, and reading it does not
    synchronise. `batch` counts sequences, `rows` and `cols` queries and keys within one; the ranges
    have step 1. num_heads: query heads of the whole call.
    """
    row_groups, col_groups = _groups(rows), _groups(cols)
    lanes = [entry * num_heads + head for entry in batch for head in heads]
    shape = (len(lanes), len(row_groups) * 4, len(col_groups) * 4)
    if 0 in shape:
        empty = (len(batch), len(heads), len(rows), len(cols))
        return torch.empty(empty, dtype=torch.bool, device=rng_state.device)

    blocks = _kept_of_blocks(rng_state, dropout_threshold(dropout_p), lanes, row_groups, col_groups)
    # (lanes, row group, its blocks, column group, its blocks), and of a block's bits: neighbouring
    # row, neighbouring column, row 8 further on, column 8 further on.
    blocks = blocks.view(len(lanes), len(row_groups), 4, len(col_groups), 4)
    pairs = torch.arange(16, device=rng_state.device)
    kept = ((blocks[..., None] >> pairs) & 1).bool().unflatten(-1, (2, 2, 2, 2))
    kept = kept.permute(0, 1, 7, 2, 5, 3, 8, 4, 6).reshape(
        len(batch), len(heads), len(row_groups) * _GROUP, len(col_groups) * _GROUP
    )
    first_row, first_col = rows.start % _GROUP, cols.start % _GROUP
    kept = kept[:, :, first_row : first_row + len(rows), first_col : first_col + len(cols)]
    return kept.contiguous()


def _groups(positions: range) -> range:
    """The groups that hold any of these positions."""
    if len(positions) == 0:
        return range(0)
    return range(positions.start // _GROUP, (positions.stop - 1) // _GROUP + 1)


def _kept_of_blocks(
    rng_state: Tensor, threshold: int, lanes: list[int], row_groups: range, col_groups: range
) -> Tensor:
    """(lanes, 4 * row groups, 4 * column groups): a bit for each of the 16 pairs of every block.

    Of a pair's bits the lower half of word n has number n and the upper half number 4 + n. All
    pairs are compared with the threshold at once, from the lowest bit up.
    """
    words, shared = _philox(rng_state, lanes, row_groups, col_groups)
    kept = torch.where(shared >> 24 >= threshold % 256, 0xFFFF, 0)
    for bit in range(8):
        bits = words[bit % 4] >> 16 * (bit // 4)
        kept = bits & kept if threshold >> (8 + bit) & 1 else bits | kept
    return kept & 0xFFFF


def _philox(
    rng_state: Tensor, lanes: list[int], row_groups: range, col_groups: range
) -> tuple[tuple[Tensor, ...], Tensor]:
    """The four words of every block, in int64, and its shared bits at the top of another.

    Each (lanes, 4 * row groups, 4 * column groups).
    """
    device = rng_state.device

    def counter(values: range | list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device) & _LOW_32

    def blocks(groups: range) -> Tensor:
        return torch.arange(groups.start * 4, groups.stop * 4, dtype=torch.int64, device=device)

    seed, offset = rng_state[0], rng_state[1]
    seed_high, offset_high = ((x >> 32) & _LOW_32 for x in (seed, offset))
    keys = [seed & _LOW_32, seed_high ^ offset_high]
    c0 = blocks(col_groups)
    c1 = blocks(row_groups)[:, None]
    c2 = counter(lanes)[:, None, None]
    c3 = offset & _LOW_32
    shared = c1
    for done in range(ROUNDS):
        if done == SHARED_AFTER:
            shared = c1 ^ c3
        # The product of two numbers of 32 bits may pass 2^63. Integer arithmetic is modulo 2^64
        # and >> brings in copies of the sign bit, which the masks take off.
        product0, product1 = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            ((product1 >> 32) & _LOW_32) ^ c1 ^ keys[0],
            product1 & _LOW_32,
            ((product0 >> 32) & _LOW_32) ^ c3 ^ keys[1],
            product0 & _LOW_32,
        )
        keys = [(key + step) & _LOW_32 for key, step in zip(keys, KEY_INCREMENTS, strict=True)]
    *words, shared = torch.broadcast_tensors(c0, c1, c2, c3, shared)
    return tuple(words), shared
