"""What sanitize.py runs with masks, biases and sinks, by the rows that a build has, and with lists
that no mask has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from flash_attn_cuda import BlockSparsity, masks
from flash_attn_cuda.call.rules import TILE
from tests.cases.attention import AttentionCase, VarlenCase
from tests.cases.masked import MaskedCase, RandomBias, RandomMask
from tests.sanitizer.cases import TRAINING, dense_case, each_head_dim, many_packed, row_kinds

# How a mask is made of a random one, and lists of good ones.
MaskChange = Callable[[Tensor], Tensor]
ListChange = Callable[[BlockSparsity], BlockSparsity]

# -- masks, biases and sinks -----------------------------------------------------------------------


def masked_cases() -> Iterator[tuple[str, MaskedCase, MaskChange | None]]:
    """(what, case, change of its mask): those of the rows with lists and a bias, sinks of all rows;
    masks that the call makes lists of, for a single query, and that hide everything.
    """
    for dtype, head_dim in row_kinds("bias"):
        for case in bias_cases(dtype, head_dim):
            yield "bias", case, None
    for dtype, head_dim in row_kinds("block_sparse"):
        for case in sparse_cases(dtype, head_dim):
            yield "mask", case, None
        common: dict[str, Any] = {"dtype": dtype, "head_dim": head_dim}
        heads = {"num_heads_q": 4, "num_heads_k": 2}
        square = dense_case(1, (330, 330), (4, 2), **common)
        blocks = RandomMask(0.7, 64, "hq", "sparsity")
        yield "empty tiles", MaskedCase(square, blocks), without_second_tiles
        causal = MaskedCase(replace(square, causal=True), blocks, None, torch.float32)
        yield "empty tiles", causal, without_second_tiles
        packed = VarlenCase(**common, **heads, lengths_q=(70, 0, 150), lengths_k=(33, 5, 300))
        pairs = RandomMask(given="sparsity")
        yield "documents", MaskedCase(replace(packed, causal=True), pairs), documents
        padded = replace(packed, used_q=(60, 0, 150), used_k=(30, 0, 290), leftpad=(0, 0, 9))
        yield "documents", MaskedCase(padded, pairs), documents
    for dtype, head_dim in row_kinds("key_lists"):
        for case in listed_cases(dtype, head_dim):
            yield "mask", case, None
    for dtype, head_dim in row_kinds():
        for case in sink_cases(dtype, head_dim):
            yield "sink", case, None
    base = AttentionCase(batch=2, seqlen_q=150, seqlen_k=201, num_heads_k=2)
    yield "mask", MaskedCase(base, RandomMask(0.5, 1, "hq", "attn_mask")), None
    keys = MaskedCase(replace(base, head_dim=59, causal=True), RandomMask(0.5, 1, "b", "attn_mask"))
    yield "mask", keys, None
    yield "mask", MaskedCase(replace(base, seqlen_q=1), RandomMask(0.5, 64, "bhq", "blocks")), None
    hidden = MaskedCase(base, RandomMask(0.0, 64, "q", "sparsity"), None, torch.float16)
    yield "mask", hidden, None


def listed_cases(dtype: torch.dtype, head_dim: int) -> Iterator[MaskedCase]:
    """Lists of each query: of whole and of small blocks, and a block that many queries list; sums
    in a fixed order.
    """
    dense = dense_case(1, (150, 330), (6, 2), dtype=dtype, head_dim=head_dim)
    yield MaskedCase(dense, RandomMask(0.3, 64, "bhq", "key_lists"), None, torch.float32)
    small = replace(dense, head_dim=head_dim - 8, causal=True, softcap=4.0)
    yield MaskedCase(small, RandomMask(0.3, 8, "bhq", "key_lists"))
    yield MaskedCase(replace(small, deterministic=True), RandomMask(0.3, 16, "bhq", "key_lists"))
    packed = VarlenCase(
        **{"dtype": dtype, "head_dim": head_dim, "num_heads_q": 20, "num_heads_k": 1},
        lengths_q=(70, 0, 300), lengths_k=(33, 5, 140), used_k=(30, 5, 140), causal=True,
    )  # fmt: skip
    for case in (packed, replace(packed, deterministic=True)):
        yield MaskedCase(case, RandomMask(0.7, 128, "bhq", "key_lists"))


def sparse_cases(dtype: torch.dtype, head_dim: int) -> Iterator[MaskedCase]:
    """Lists of half of the tiles, without bits and with them, and with what only some rows have."""
    dense = dense_case(1, (150, 330), (4, 2), dtype=dtype, head_dim=head_dim)
    yield MaskedCase(dense, RandomMask(0.5, 64, "hq", "blocks"))
    tall = replace(dense, batch=2, seqlen_q=330, seqlen_k=150, causal=True)
    yield MaskedCase(tall, RandomMask(0.5, 64, "bhq", "blocks"))
    yield MaskedCase(replace(dense, head_dim=head_dim - 8), RandomMask(0.5, 1, "hq", "sparsity"))
    yield MaskedCase(tall, RandomMask(0.5, 1, "q", "sparsity"), None, torch.bfloat16)
    yield MaskedCase(replace(dense, **TRAINING), RandomMask(0.5, 1, "hq", "sparsity"))


def bias_cases(dtype: torch.dtype, head_dim: int) -> Iterator[MaskedCase]:
    """Rows of a bias that start on no boundary and, for all rows that there are, on one; a gradient
    of its own and sums over sequences, heads and queries.
    """
    common: dict[str, Any] = {"dtype": dtype, "head_dim": head_dim}
    dense = dense_case(2, (70, 151), (4, 2), **common)
    aligned = replace(dense, batch=1, seqlen_q=150, seqlen_k=136, causal=True)
    ragged = replace(dense, seqlen_q=149, seqlen_k=200)
    yield MaskedCase(dense, None, RandomBias("hq"))
    yield MaskedCase(aligned, None, RandomBias("hq"))
    yield MaskedCase(aligned, None, RandomBias("hq", fp32=True))
    yield MaskedCase(ragged, None, RandomBias("bhq"))
    yield MaskedCase(ragged, None, RandomBias("hq", hidden=0.3), torch.float32)
    yield MaskedCase(replace(ragged, causal=True, num_heads_k=1), None, RandomBias("q"))
    short = replace(ragged, seqlen_q=1, seqlen_k=8, head_dim=head_dim - 8)
    yield MaskedCase(short, None, RandomBias("bhq"))
    yield MaskedCase(replace(ragged, window=(40, 10)), None, RandomBias("bq", requires_grad=False))
    yield MaskedCase(replace(dense, causal=True), None, RandomBias("bhq", fp32=True))
    yield MaskedCase(dense, None, RandomBias("h"))
    yield MaskedCase(replace(dense, causal=True), None, RandomBias("b", fp32=True, hidden=0.3))
    capped = replace(dense, softcap=5.0)
    yield MaskedCase(capped, None, RandomBias("hq", requires_grad=False))
    yield MaskedCase(dense, None, RandomBias(reach=20))
    yield MaskedCase(short, None, RandomBias(reach=300))
    yield MaskedCase(
        replace(aligned, dropout_p=0.2), RandomMask(0.5, 64, "hq", "sparsity"), RandomBias("hq")
    )
    packed = VarlenCase(
        **common,
        lengths_q=(70, 0, 130),
        lengths_k=(33, 5, 140),
        used_q=(60, 0, 130),
        used_k=(33, 5, 137),
        num_heads_q=4,
        num_heads_k=2,
        causal=True,
    )
    yield MaskedCase(packed, None, RandomBias("hq"), torch.float32)
    even = replace(packed, lengths_k=(33, 5, 144), leftpad=(3, 0, 130))
    yield MaskedCase(even, None, RandomBias("bhq"), torch.float32)
    yield MaskedCase(replace(even, causal=False), None, RandomBias("hq"))
    yield MaskedCase(even, None, RandomBias(reach=20))


def sink_cases(dtype: torch.dtype, head_dim: int) -> Iterator[MaskedCase]:
    """Queries that see the sink alone, and every feature with one; packed."""
    common: dict[str, Any] = {"dtype": dtype, "head_dim": head_dim, "num_heads_q": 2}
    dense = AttentionCase(**common, batch=1, seqlen_q=150, seqlen_k=70, num_heads_k=1, causal=True)
    yield MaskedCase(dense, sink=torch.float32)
    packed = VarlenCase(**common, lengths_q=(70, 0, 1), lengths_k=(33, 5, 140), num_heads_k=1)
    yield MaskedCase(replace(packed, **TRAINING, used_q=(60, 0, 1)), sink=dtype)


def many_tile_masked_cases() -> Iterator[tuple[MaskedCase, MaskChange | None]]:
    """As many_tile_cases, for rows with lists and a bias: lists of any length, empty ones between
    others; packed; a sink.
    """
    head_dims = sorted({head_dim for _, head_dim in row_kinds("block_sparse")})
    for common in each_head_dim(head_dims):
        many = dense_case(1, (150, 270), (180, 90), **common)
        yield MaskedCase(many, RandomMask(0.3, 128, "hq", "blocks")), None
        causal = replace(many, causal=True)
        yield MaskedCase(causal, RandomMask(0.5, 64, "hq", "sparsity"), sink=torch.float32), None
        packed = MaskedCase(many_packed(common), RandomMask(given="sparsity"))
        yield packed, documents
        long = replace(many, seqlen_q=4200, seqlen_k=300, num_heads_q=2, num_heads_k=2)
        yield MaskedCase(long, RandomMask(0.02, 64, "hq", "sparsity")), keys_that_all_queries_see
        yield MaskedCase(causal, sink=torch.float32), None
        yield MaskedCase(replace(many, seqlen_q=70, seqlen_k=151), None, RandomBias("hq")), None
        even = replace(many, seqlen_q=71, seqlen_k=152)
        yield MaskedCase(even, None, RandomBias("hq")), None
        yield MaskedCase(replace(even, causal=True), None, RandomBias("q")), None


def without_second_tiles(mask: Tensor) -> Tensor:
    """The second tile of queries sees nothing, and nobody the second tile of keys."""
    mask = mask.clone()
    mask[..., TILE : 2 * TILE, :] = False
    mask[..., TILE : 2 * TILE] = False
    return mask


def keys_that_all_queries_see(mask: Tensor) -> Tensor:
    """In the second tile of keys, whose steps are then shared by CTAs."""
    mask = mask.clone()
    mask[..., TILE : TILE + 70] = True
    return mask


def documents(mask: Tensor) -> Tensor:
    """Documents of 50 queries and of 70 keys; the third one has queries and no keys."""
    ids, ids_k = torch.arange(mask.shape[-2]) // 50, torch.arange(mask.shape[-1]) // 70
    return masks.document(ids, ids_k.masked_fill(ids_k == 2, -1)).to_mask()


# -- lists that no mask has ------------------------------------------------------------------------

INT_MAX, INT_MIN = 2**31 - 1, -(2**31)
COUNTS, ORDERS, VISITS = slice(0, 1), slice(1, 2), slice(2, None)


def bad_list_cases() -> Iterator[tuple[str, MaskedCase, ListChange]]:
    """(what, case, change of its lists): each field out of its range, and all at random."""
    fields: dict[str, tuple[slice, int]] = {
        "counts too large": (COUNTS, INT_MAX),
        "counts negative": (COUNTS, INT_MIN),
        "orders too large": (ORDERS, INT_MAX),
        "orders negative": (ORDERS, -1),
        "tiles just behind the last": (VISITS, 3 << 8 | 0b10_01_10_01),
        "tiles too large": (VISITS, INT_MAX),
        "tiles negative": (VISITS, INT_MIN),
        "pieces of no state": (VISITS, 0xFF),
    }
    ranges = {"small numbers": (-3, 1000), "any numbers": (INT_MIN, INT_MAX)}
    for common in each_head_dim(sorted({head_dim for _, head_dim in row_kinds("block_sparse")})):
        common |= {"num_heads_q": 4, "num_heads_k": 2}
        mask = RandomMask(0.5, 1, "hq", "sparsity")
        dense = MaskedCase(AttentionCase(**common, batch=1, seqlen_q=150, seqlen_k=330), mask)
        of_packed = VarlenCase(**common, lengths_q=(150, 0, 70), lengths_k=(330, 5, 0), causal=True)
        packed = MaskedCase(of_packed, mask)
        for name, (part, value) in fields.items():
            yield name, dense, of_both_lists(filled(part, value))
        for name, bounds in ranges.items():
            for case in (dense, packed):
                yield name, case, of_both_lists(random_numbers(*bounds))
        yield "no bits", packed, lambda lists: replace(lists, bits=None)


def outgrown_cases() -> Iterator[MaskedCase]:
    """Short sequences whose masks and biases longer ones shall meet."""
    of = AttentionCase(batch=1, seqlen_q=100, seqlen_k=100, num_heads_k=2)
    yield MaskedCase(of, RandomMask(0.5, 1, "hq", "sparsity"))
    yield MaskedCase(of, None, RandomBias("hq"))
    yield MaskedCase(of, None, RandomBias("h", fp32=True))
    yield MaskedCase(replace(of, seqlen_q=104, seqlen_k=104), None, RandomBias("hq"))


def of_both_lists(change: Callable[[Tensor], Tensor]) -> ListChange:
    return lambda lists: replace(lists, rows=change(lists.rows), columns=change(lists.columns))


def filled(part: slice, value: int) -> Callable[[Tensor], Tensor]:
    def change(x: Tensor) -> Tensor:
        x = x.clone()
        x[..., part] = value
        return x

    return change


def random_numbers(least: int, most: int) -> Callable[[Tensor], Tensor]:
    def change(x: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(x.numel())
        return torch.randint(least, most, x.shape, generator=generator, dtype=x.dtype)

    return change
