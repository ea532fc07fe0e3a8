"""What BlockSparsity refuses, and how it says so."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from flash_attn_cuda import BlockSparsity


def tensors(**changes: Any) -> dict[str, Any]:
    """The fields of a good BlockSparsity, some changed."""
    fields = {
        "seqlen_q": 200,
        "seqlen_k": 300,
        "rows": torch.zeros(2, 3, 2, 5, dtype=torch.int32),
        "columns": torch.zeros(2, 3, 3, 4, dtype=torch.int32),
        "bits": torch.zeros(2, 1, 200, 12, dtype=torch.int32),
    }
    return {**fields, **changes}


def ints(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int32)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"seqlen_q": 200.0}, TypeError, r"^seqlen_q: must be an integer, got float"),
        ({"seqlen_k": True}, TypeError, r"^seqlen_k: must be an integer, got bool"),
        ({"seqlen_q": -1}, ValueError, r"^seqlen_q: must be from 0 to 1073741824, got -1"),
        ({"seqlen_k": 1 << 31}, ValueError, r"^seqlen_k: must be from 0 to 1073741824"),
        ({"rows": None}, TypeError, r"^rows: must be a torch.Tensor, got NoneType"),
        ({"rows": ints(2, 3, 2, 5).long()}, TypeError, r"^rows: dtype must be torch.int32, got"),
        ({"rows": ints(2, 3, 3, 5)}, ValueError, r"^rows: must have shape \(.*, 2, 5\), got"),
        ({"rows": ints(3, 2, 5)}, ValueError, r"^rows: must have shape .* got \(3, 2, 5\)"),
        ({"rows": ints(2, 3, 5, 2).mT}, ValueError, r"^rows: must be contiguous, got strides"),
        ({"columns": ints(2, 3, 3, 5)}, ValueError, r"^columns: must have shape \(.*, 3, 4\)"),
        ({"columns": ints(1, 3, 3, 4)}, ValueError, r"^columns: must have the batch and heads of"),
        ({"columns": ints(2, 3, 3, 4).to("meta")}, ValueError, r"^columns: .* device of rows .cpu"),
        ({"bits": ints(2, 3, 200, 10)}, ValueError, r"^bits: must have shape \(.*, 200, 12\), got"),
        ({"bits": ints(2, 2, 200, 12)}, ValueError, r"^bits: heads must be 1 or .* \(3\), got 2"),
        ({"bits": ints(3, 1, 200, 12)}, ValueError, r"^bits: batch must be 1 or .* \(2\), got 3"),
        ({"bits": ints(2, 1, 200, 12).bool()}, TypeError, r"^bits: dtype must be torch.int32"),
        ({"bits": ints(1, 1, 1, 12).expand(1, 1, 200, 12)}, ValueError, r"^bits: must be contig"),
    ],
)
def test_bad_fields(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    BlockSparsity(**tensors())
    BlockSparsity(**tensors(bits=None))
    with pytest.raises(error, match=message):
        BlockSparsity(**tensors(**changes))


BOOLS = torch.ones(4, 5, dtype=torch.bool)
# How it is made, of what, with what.
BAD: tuple[tuple[str, Any, dict[str, Any], type[Exception], str], ...] = (
    ("from_mask", ([[True]],), {}, TypeError, r"^mask: must be a torch.Tensor"),
    ("from_mask", (BOOLS.float(),), {}, TypeError, r"^mask: dtype must be torch.b"),
    ("from_mask", (BOOLS[0],), {}, ValueError, r"^mask: must have shape .* \(5,\)"),
    ("from_mask", (BOOLS[(None,) * 3],), {}, ValueError, r"^mask: must have shape"),
    ("from_mask", (BOOLS,), {"seqlen_q": 5}, ValueError,
     r"^mask: must have 1 row or seqlen_q \(5\), got 4"),
    ("from_mask", (BOOLS,), {"seqlen_q": 4.0}, TypeError, r"^seqlen_q: must be an"),
    ("from_blocks", (BOOLS.int(), 64, 200, 300), {}, TypeError,
     r"^block_mask: dtype must be torch.bool, got torch.int32"),
    ("from_blocks", (BOOLS, 64, 257, 300), {}, ValueError,
     r"^block_mask: must have 5 x 5 blocks of \(64, 64\) for 257 .* got \(4, 5\)"),
    ("from_blocks", (BOOLS, (64, 96), 200, 300), {}, ValueError,
     r"^block_size: must be positive multiples of 64, got \(64, 96\)"),
    ("from_blocks", (BOOLS, 0, 200, 300), {}, ValueError,
     r"^block_size: must be positive multiples of 64, got 0"),
    ("from_blocks", (BOOLS, (64, 64, 64), 200, 300), {}, TypeError,
     r"^block_size: must be one or two integers, got \(64, 64, 64\)"),
    ("from_blocks", (BOOLS, 64.0, 200, 300), {}, TypeError,
     r"^block_size: must be one or two integers, got 64.0"),
    ("from_blocks", (BOOLS, 64, -1, 9), {}, ValueError, r"^seqlen_q: must be fr"),
)  # fmt: skip


@pytest.mark.parametrize(("make", "given", "options", "error", "message"), BAD)
def test_bad_arguments(
    make: str, given: Any, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        getattr(BlockSparsity, make)(*given, **options)
