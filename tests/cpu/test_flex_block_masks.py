"""BlockSparsity.from_block_mask: block masks of torch.nn.attention.flex_attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, create_mask

from flash_attn_cuda import BlockSparsity
from flash_attn_cuda.masks import sparsity
from tests.cases.pairwise import pairwise

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

DOCUMENTS = torch.randint(3, (2, 600), generator=torch.Generator().manual_seed(0)).sort(-1).values

MASK_MODS: dict[str, MaskMod] = {
    "causal": lambda b, h, q, k: q >= k,
    "window": lambda b, h, q, k: (q - k).abs() <= 90 + 0 * h,
    "documents": lambda b, h, q, k: DOCUMENTS[b, q] == DOCUMENTS[b, k],
    "by head": lambda b, h, q, k: (q >= k) & (k % (h + 1) == 0),
    "everything": lambda b, h, q, k: q >= 0,
    "nothing": lambda b, h, q, k: q < 0,
}


def block_mask(name: str, *sizes: Any, block: Any = 128) -> BlockMask:
    return create_block_mask(MASK_MODS[name], *sizes, device="cpu", BLOCK_SIZE=block)


AXES = {
    "name": list(MASK_MODS),
    "seqlens": [(300, 300), (128, 256), (130, 517)],
    "block": [128, 64, (64, 128), (256, 192), (128, 1 << 12)],
}


@pytest.mark.parametrize("row", pairwise(AXES), ids=str)
def test_block_masks(row: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    name, seqlens, block = row.values()
    monkeypatch.setattr(sparsity, "MASK_MOD_PAIRS", 10_000)  # rows in several chunks
    extents = (2 if name == "documents" else 1, 2 if name == "by head" else None)
    made = BlockSparsity.from_block_mask(block_mask(name, *extents, *seqlens, block=block))
    mask = create_mask(MASK_MODS[name], *extents, *seqlens, device="cpu")
    assert torch.equal(made.to_mask(), mask)
    of_mask = BlockSparsity.from_mask(mask)
    for field in ("rows", "columns", "bits"):
        assert torch.equal(getattr(made, field), getattr(of_mask, field))


def blocks_of(
    kv: list[list[int]], full: list[list[int]] | None = None, **options: Any
) -> BlockMask:
    """A block mask (1, 1, rows, ...) by the indices of its rows, as they are, in 64 x 64 blocks."""
    lists = []
    for indices in (kv, full):
        if indices is None:
            continue
        most = max(1, *(len(row) for row in indices))
        padded = [row + [-7] * (most - len(row)) for row in indices]
        lists.append(torch.tensor([[[len(row) for row in indices]]], dtype=torch.int32))
        lists.append(torch.tensor([[padded]], dtype=torch.int32))
    return BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=64, compute_q_blocks=False, **options)


def test_without_a_mask_mod_there_are_no_bits() -> None:
    made = BlockSparsity.from_block_mask(blocks_of([[0, 2], [], [1]], seq_lengths=(180, 130)))
    assert made.bits is None
    assert made.pieces().tolist() == [[[[1, 0, 1], [0, 0, 0], [0, 1, 0]]]]


def test_lists_say_more_than_the_mask_mod() -> None:
    made = BlockSparsity.from_block_mask(
        blocks_of([[0, 1], [1]], [[1], [0]], mask_mod=MASK_MODS["causal"], seq_lengths=(128, 128))
    )
    expected = torch.ones(128, 128, dtype=torch.bool)
    expected[:64, :64] = expected[:64, :64].tril()
    expected[64:, 64:] = expected[64:, 64:].tril()
    assert torch.equal(made.to_mask()[0, 0], expected)
    assert made.pieces().tolist() == [[[[2, 1], [1, 2]]]]
    unlisted = blocks_of([[0], [1]], mask_mod=MASK_MODS["causal"], seq_lengths=(128, 128))
    assert BlockSparsity.from_block_mask(unlisted).pieces().tolist() == [[[[2, 0], [0, 2]]]]


@pytest.mark.parametrize("full", [False, True])
def test_indices_out_of_range_are_dropped(full: bool) -> None:
    lists = [[0, 3, 1 << 30], [-1, 2, -(1 << 30)], [2, 2, 1]]
    mask = blocks_of([[], [], []], lists) if full else blocks_of(lists)
    mask.seq_lengths = (192, 192)
    for counts in (mask.kv_num_blocks, mask.full_kv_num_blocks):
        if counts is not None and counts.any():
            counts.copy_(torch.tensor([3, 1 << 20, -1]))  # more than there are, and fewer than none
    made = BlockSparsity.from_block_mask(mask)
    assert made.pieces().tolist() == [[[[1, 0, 0], [0, 0, 1], [0, 0, 0]]]]


def test_fewer_dimensions() -> None:
    mask = BlockMask.from_kv_blocks(
        torch.tensor([1, 2]), torch.tensor([[1, 0], [0, 1]]), seq_lengths=(200, 200)
    )
    made = BlockSparsity.from_block_mask(mask)
    assert made.pieces()[0, 0, ::2, ::2].tolist() == [[0, 1], [1, 1]]


def test_another_device() -> None:
    mask = block_mask("causal", 1, 1, 200, 200)
    made = BlockSparsity.from_block_mask(mask, device="meta")
    assert made.device == torch.device("meta") == made.bits.device


def test_no_waiting() -> None:
    def tensors(mask: BlockMask) -> list[Tensor]:
        made = BlockSparsity.from_block_mask(mask)
        return [made.rows, made.columns, made.bits, made.density()]

    mask = block_mask("window", 2, 3, 300, 400)
    compiled = torch.compile(lambda x: [x + y for y in tensors(mask)], fullgraph=True,
                             backend="eager")  # fmt: skip
    for actual, expected in zip(compiled(torch.zeros((), dtype=torch.int32)), tensors(mask),
                                strict=True):  # fmt: skip
        assert torch.equal(actual, expected)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = BlockMask.from_kv_blocks(
            *(mode.from_tensor(x) for x in mask.as_tuple()[2:6]),
            mask_mod=mask.mask_mod, seq_lengths=(300, 400), compute_q_blocks=False,
        )  # fmt: skip
        assert [x.shape for x in tensors(fake)] == [x.shape for x in tensors(mask)]


def test_what_is_no_block_mask_or_does_not_fit() -> None:
    with pytest.raises(TypeError, match=r"^block_mask: must be a BlockMask, got Tensor"):
        BlockSparsity.from_block_mask(torch.ones(2, 2))
    with pytest.raises(ValueError, match=r"^block_mask.BLOCK_SIZE: must be positive multiples"):
        BlockSparsity.from_block_mask(block_mask("causal", 1, 1, 64, 64, block=32))
    mask = block_mask("causal", 1, 1, 512, 512)
    # Some query blocks: of newer torch releases with lengths that fit, and no mask_mod to ask.
    refused = r"^block_mask.kv_indices: must have 4 rows for 512 |mask_mod from a sliced BlockMask"
    with pytest.raises((ValueError, RuntimeError), match=refused):
        BlockSparsity.from_block_mask(mask[:, :, :2])
    with pytest.raises(RuntimeError, match="mask_mod from a sliced BlockMask"):
        BlockSparsity.from_block_mask(mask[:, :1])
    mask.kv_num_blocks = mask.kv_num_blocks[..., :3]
    with pytest.raises(ValueError, match=r"^block_mask.kv_num_blocks: must have shape \(1, 1, 4\)"):
        BlockSparsity.from_block_mask(mask)
