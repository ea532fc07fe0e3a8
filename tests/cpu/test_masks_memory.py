"""Memory that long masks need while they are made, and that no contents decide how."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from flash_attn_cuda import BlockSparsity, masks
from flash_attn_cuda.call.fields import AttentionCall
from flash_attn_cuda.functions.chunks import _hiding_others
from tests.cases.memory import PeakBytes

LONG = 16384
LONG_MASKS: dict[str, Callable[[], BlockSparsity]] = {
    "prefix_lm": lambda: masks.prefix_lm(LONG, 1000),
    "document": lambda: masks.document(torch.zeros(LONG, dtype=torch.int64), causal=True),
    "sliding_window": lambda: masks.sliding_window(LONG, (1000, 0), global_tokens=9, causal=True),
    "dilated": lambda: masks.dilated(LONG, (100, 100), 3, causal=True),
    "strided": lambda: masks.strided(LONG, 128),
    "bigbird": lambda: masks.bigbird(LONG, seed=0, causal=True),
}


@pytest.mark.parametrize("name", LONG_MASKS)
def test_memory_and_contents_of_long_masks(name: str) -> None:
    """A peak of half a byte for each pair, an eighth of which stays; nothing decided by contents,
    since fake tensors have none.
    """
    with FakeTensorMode(), PeakBytes() as memory:
        made = LONG_MASKS[name]()
        assert made.bits is not None
        kept = sum(memory.bytes.values())
    assert 0.12 * LONG**2 < kept < 0.13 * LONG**2
    assert memory.peak < 0.5 * LONG**2


def test_memory_of_chunks_with_a_mask() -> None:
    """Four times their bits, beside those of the mask."""
    with FakeTensorMode():
        q = torch.empty(1, LONG, 1, 8)
        mask = masks.strided(LONG, 128)
        lists = {"block_rows": mask.rows, "block_columns": mask.columns}
        call = AttentionCall(q, q, q, mask_bits=mask.bits, **lists)
        with PeakBytes() as memory:
            _hiding_others(call, 1000)
    assert memory.peak < 4.01 * LONG**2 / 8


def test_memory_without_bits() -> None:
    with FakeTensorMode(), PeakBytes() as memory:
        assert masks.bigbird(LONG, seed=0).bits is None
    assert memory.peak < 0.05 * LONG**2


def test_memory_of_a_dense_mask() -> None:
    with FakeTensorMode(), PeakBytes() as memory:
        made = BlockSparsity.from_mask(torch.ones(LONG, LONG, dtype=torch.bool))
        assert made.bits is not None
    assert memory.peak < 1.5 * LONG**2
