"""BlockSparsity against loops over tiles, pieces and words of the dense mask."""

from __future__ import annotations

import dataclasses
import pickle
import sys
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from flash_attn_cuda import BlockSparsity
from flash_attn_cuda.masks import sparsity as sparsity_module
from flash_attn_cuda.masks.lists import pack, pack_rows, unpack
from tests.cases.harness import DEVICE, captured, no_host_sync

SIZES = [(1, 1), (64, 64), (127, 129), (300, 517), (65, 191), (1, 700), (513, 2)]
DENSITIES = [0.0, 0.01, 0.1, 0.5, 1.0]


# -- what the tensors must be, in loops ------------------------------------------------------------


def expected_piece(mask: np.ndarray, row: int, column: int) -> int:
    pairs = mask[64 * row : 64 * row + 64, 64 * column : 64 * column + 64]
    return 0 if not pairs.any() else 1 if pairs.all() else 2


def expected_pieces(mask: np.ndarray) -> np.ndarray:
    """Of one mask (Sq, Sk), padded with hidden ones to whole tiles."""
    tiles_q, tiles_k = -(-mask.shape[0] // 128), -(-mask.shape[1] // 128)
    pieces = np.zeros((2 * tiles_q, 2 * tiles_k), dtype=int)
    for row in range(-(-mask.shape[0] // 64)):
        for column in range(-(-mask.shape[1] // 64)):
            pieces[row, column] = expected_piece(mask, row, column)
    return pieces


def expected_lists(pieces: np.ndarray) -> tuple[list[list[int]], list[list[int]]]:
    """rows and columns of the pieces of one mask."""
    tiles_q, tiles_k = pieces.shape[0] // 2, pieces.shape[1] // 2
    visits: dict[tuple[int, int], int] = {}
    for t in range(tiles_q):
        for u in range(tiles_k):
            halves = [pieces[2 * t + y, 2 * u + x] for y in (0, 1) for x in (0, 1)]
            if any(halves):
                visits[t, u] = sum(int(half) * 4**n for n, half in enumerate(halves))
    rows = [[u * 256 + visits[t, u] for u in range(tiles_k) if (t, u) in visits]
            for t in range(tiles_q)]  # fmt: skip
    columns = [[t * 256 + visits[t, u] for t in range(tiles_q) if (t, u) in visits]
               for u in range(tiles_k)]  # fmt: skip
    return with_counts(rows, tiles_k), with_counts(columns, tiles_q)


def with_counts(lists: list[list[int]], others: int) -> list[list[int]]:
    order = sorted(range(len(lists)), key=lambda t: (-len(lists[t]), t))
    return [
        [len(visits), order[t], *visits, *[0] * (others - len(visits))]
        for t, visits in enumerate(lists)
    ]


def expected_bits(mask: np.ndarray) -> np.ndarray:
    words = np.zeros((mask.shape[0], 4 * -(-mask.shape[1] // 128)), dtype=np.uint32)
    for j in range(mask.shape[1]):
        words[:, j // 32] |= mask[:, j].astype(np.uint32) << np.uint32(j % 32)
    return words.view(np.int32)


def assert_is(sparsity: BlockSparsity, mask: Tensor, *, has_bits: bool = True) -> None:
    """Everything about the sparsity of a dense mask (B, H, Sq, Sk)."""
    assert (sparsity.seqlen_q, sparsity.seqlen_k) == tuple(mask.shape[2:])
    assert torch.equal(sparsity.to_mask().expand_as(mask), mask)
    assert (sparsity.bits is not None) == has_bits
    batch, heads = sparsity.batch, sparsity.heads
    visited, pieces_in_all = 0, 0
    for b in range(batch):
        for h in range(heads):
            dense = mask[min(b, mask.shape[0] - 1), min(h, mask.shape[1] - 1)].numpy()
            pieces = expected_pieces(dense)
            rows, columns = expected_lists(pieces)
            assert sparsity.rows[b, h].tolist() == rows
            assert sparsity.columns[b, h].tolist() == columns
            real = pieces[: -(-dense.shape[0] // 64), : -(-dense.shape[1] // 64)]
            assert np.array_equal(sparsity.pieces()[b, h].numpy(), real)
            visited, pieces_in_all = visited + (real != 0).sum(), pieces_in_all + real.size
            if sparsity.bits is not None:
                assert np.array_equal(sparsity.bits[b, h].numpy(), expected_bits(dense))
    density = sparsity.density()
    assert density.shape == () and density.dtype == torch.float32
    assert density.item() == pytest.approx(visited / max(1, pieces_in_all))


def random_mask(shape: tuple[int, ...], density: float, seed: int = 0, size: int = 64) -> Tensor:
    """Blocks of size x size that are hidden, visible or, of `density`, mixed."""
    generator = torch.Generator().manual_seed(seed)
    *first, queries, keys = shape
    kind = torch.randint(3, (*first, queries // size + 1, keys // size + 1), generator=generator)
    kind = kind.repeat_interleave(size, -1)[..., :keys].repeat_interleave(size, -2)
    mixed = torch.rand(shape, generator=generator) < density
    return torch.where(kind[..., :queries, :] == 2, mixed, kind[..., :queries, :] == 1)


# -- from_mask -------------------------------------------------------------------------------------


@pytest.mark.parametrize("density", DENSITIES)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_lists_and_bits_of_a_dense_mask(size: tuple[int, int], density: float) -> None:
    generator = torch.Generator().manual_seed(1)
    mask = torch.rand(2, 2, *size, generator=generator) < density
    assert_is(BlockSparsity.from_mask(mask), mask)
    mask = random_mask((1, 2, *size), density)
    assert_is(BlockSparsity.from_mask(mask), mask)


@settings(max_examples=60, deadline=None)
@given(
    batch=st.integers(1, 3),
    heads=st.integers(1, 3),
    queries=st.integers(0, 400),
    keys=st.integers(0, 400),
    density=st.sampled_from([*DENSITIES, 0.999]),
    block=st.sampled_from([32, 64, 128]),
    seed=st.integers(0, 2**31),
)
def test_any_mask(
    batch: int, heads: int, queries: int, keys: int, density: float, block: int, seed: int
) -> None:
    mask = random_mask((batch, heads, queries, keys), density, seed, block)
    assert_is(BlockSparsity.from_mask(mask), mask)


@pytest.mark.parametrize("unused", [10, 16])
@pytest.mark.parametrize("keys", [128, 200, 256])
def test_masks_of_any_strides(keys: int, unused: int) -> None:
    mask = random_mask((2, 3, 150, keys + unused), 0.5)
    for view in (
        mask[..., 3 : keys + 3],  # begins at no multiple of 8
        mask[..., 8 : keys + 8],
        mask[..., :keys].mT.contiguous().mT,
        mask[..., :keys].transpose(0, 1),
        mask[:, ::2, ::3, :keys],
        mask[..., ::2],
        mask[1, 2, 1:2, :keys],
    ):
        view = view if view.dim() == 4 else view[None, None]
        assert_is(BlockSparsity.from_mask(view), view)


def test_leading_dimensions_are_optional() -> None:
    mask = random_mask((1, 3, 130, 70), 0.5)
    assert_is(BlockSparsity.from_mask(mask[0]), mask)
    assert_is(BlockSparsity.from_mask(mask[0, 1]), mask[:, 1:2])


def test_expanded_dimensions_cost_nothing() -> None:
    mask = random_mask((2, 1, 200, 300), 0.5)
    for expanded, extents in (
        (mask.expand(2, 4, -1, -1), (2, 1)),
        (mask[:1].expand(3, 4, -1, -1), (1, 1)),
    ):
        sparsity = BlockSparsity.from_mask(expanded)
        assert (sparsity.batch, sparsity.heads) == extents
        assert_is(sparsity, expanded)


def test_one_row_for_all_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    packed: list[int] = []

    def counted(rows_of: Any, extents: Any, seqlen_q: int, *others: int) -> Tensor:
        packed.append(seqlen_q)
        return pack_rows(rows_of, extents, seqlen_q, *others)

    monkeypatch.setattr(sparsity_module, "pack_rows", counted)
    row = torch.rand(3, 1, 1, 300) < 0.9
    row[..., 64:192] = True
    row[1, ..., 192:] = False
    for queries in (0, 1, 64, 200):
        every = row.expand(-1, -1, queries, -1)
        assert_is(BlockSparsity.from_mask(row, seqlen_q=queries), every)
        assert_is(BlockSparsity.from_mask(every), every)
    assert packed == [1, 0, 1, 1, 1, 1, 1, 1]  # and an expanded one is no more than one


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0), (0, 2, 70, 70), (2, 0, 70, 70)])
def test_nothing_to_attend_to(shape: tuple[int, ...]) -> None:
    mask = torch.zeros(shape, dtype=torch.bool)
    sparsity = BlockSparsity.from_mask(mask)
    assert sparsity.to_mask().shape[-len(shape) :] == shape
    assert sparsity.density().item() == 0.0
    if len(shape) == 2:
        assert_is(sparsity, mask[None, None])


@pytest.mark.parametrize("chunk_pairs", [1, 1000, 5000, 10**6])
def test_bits_in_chunks(chunk_pairs: int) -> None:
    mask = random_mask((2, 3, 77, 200), 0.5)
    bits = pack_rows(lambda first, last: mask[:, :, first:last], (2, 3), 77, 200, chunk_pairs)
    assert torch.equal(bits, pack(mask)) and torch.equal(unpack(bits, 200), mask)


def test_every_pattern_of_eight_bools() -> None:
    patterns = torch.arange(256)[:, None] >> torch.arange(8) & 1
    packed = pack(patterns.bool().flatten()).view(torch.uint8)
    assert packed.tolist() == list(range(256))


# -- from_blocks -----------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("block", [(64, 64), (128, 64), (64, 192), (256, 128), (1 << 30, 64)])
def test_blocks(block: tuple[int, int], size: tuple[int, int]) -> None:
    counts = tuple(-(-seqlen // of_block) for seqlen, of_block in zip(size, block, strict=True))
    blocks = torch.rand(2, 3, *counts) < 0.5
    mask = blocks
    for dim, (seqlen, of_block) in enumerate(zip(size, block, strict=True), start=2):
        mask = mask.index_select(dim, torch.arange(seqlen) // of_block)
    assert_is(BlockSparsity.from_blocks(blocks, block, *size), mask, has_bits=False)
    shared = BlockSparsity.from_blocks(blocks[0], block, *size)
    assert_is(shared, mask[:1], has_bits=False)
    assert_is(BlockSparsity.from_blocks(blocks[0, 1], block, *size), mask[:1, 1:2], has_bits=False)


def test_one_number_for_a_block() -> None:
    blocks = torch.eye(3, dtype=torch.bool)
    sparsity = BlockSparsity.from_blocks(blocks, 64, 130, 192)
    assert torch.equal(sparsity.pieces()[0, 0], blocks.to(torch.uint8))


# -- reading, moving, drawing ----------------------------------------------------------------------


def test_entries_out_of_range_are_no_visits() -> None:
    mask = torch.ones(1, 1, 300, 300, dtype=torch.bool)
    sparsity = BlockSparsity.from_mask(mask)
    rows = sparsity.rows.clone()
    rows[0, 0, 0, 2:] = torch.tensor([-1, 7 << 8 | 85, 1 << 8 | 85])
    rows[0, 0, 1, 0] = -5
    rows[0, 0, 2, 0] = 1 << 30
    mask[..., :128, :128] = False
    mask[..., :128, 256:] = False
    mask[..., 128:256, :] = False
    changed = dataclasses.replace(sparsity, rows=rows)
    assert torch.equal(changed.to_mask(), mask)


def test_lists_have_the_last_word() -> None:
    """Bits matter in partial pieces alone, and may be fewer than lists over batch and heads."""
    blocks = torch.zeros(2, 3, 2, 2, dtype=torch.bool)
    blocks[1, 2] = torch.eye(2, dtype=torch.bool)
    lists = BlockSparsity.from_blocks(blocks, 128, 256, 256)
    bits = torch.zeros(1, 1, 256, 8, dtype=torch.int32)
    sparsity = dataclasses.replace(lists, bits=bits)
    assert torch.equal(sparsity.to_mask(), lists.to_mask())
    shared = BlockSparsity.from_blocks(blocks[1:, 2:], 128, 256, 256)
    many = dataclasses.replace(shared, bits=bits.expand(4, 5, -1, -1).contiguous())
    assert (many.batch, many.heads) == (4, 5)
    assert torch.equal(many.to_mask(), shared.to_mask().expand(4, 5, -1, -1))


def test_to_another_device() -> None:
    sparsity = BlockSparsity.from_mask(random_mask((1, 2, 100, 100), 0.5))
    assert sparsity.to("cpu") is sparsity
    moved = sparsity.to("meta")
    assert moved.device == moved.columns.device == moved.bits.device == torch.device("meta")
    assert repr(moved) == (
        "BlockSparsity(batch=1, heads=2, seqlen_q=100, seqlen_k=100, lists and bits on meta)"
    )
    blocks = BlockSparsity.from_blocks(torch.eye(2, dtype=torch.bool), 64, 128, 128)
    assert blocks.to("meta").bits is None and "lists on meta" in repr(blocks.to("meta"))


def test_it_does_not_change() -> None:
    sparsity = BlockSparsity.from_mask(torch.ones(3, 3, dtype=torch.bool))
    with pytest.raises(dataclasses.FrozenInstanceError):
        sparsity.seqlen_q = 5  # type: ignore[misc]
    assert hash(sparsity) != hash(dataclasses.replace(sparsity))


@pytest.mark.parametrize("size", [(300, 500), (9000, 64), (1, 1), (0, 0)])
def test_plot(size: tuple[int, int]) -> None:
    pytest.importorskip("matplotlib").use("Agg")
    from matplotlib import pyplot

    sparsity = BlockSparsity.from_mask(random_mask((1, 2, *size), 0.5))
    ax = sparsity.plot(head=1)
    assert ax.get_xlim() == (0, max(1, size[1])) and ax.get_ylim() == (max(1, size[0]), 0)
    if min(size) > 0:
        assert np.array_equal(ax.get_images()[0].get_array(), sparsity.pieces()[0, 1])
    assert len(ax.get_lines()) == (2 + 3 if size == (300, 500) else 0)
    _, mine = pyplot.subplots()
    assert sparsity.plot(ax=mine) is mine
    with pytest.raises(ValueError, match=r"^head: must be from 0 to 1, got 2"):
        sparsity.plot(head=2)
    with pytest.raises(ValueError, match=r"^batch: must be from 0 to 0, got -1"):
        sparsity.plot(batch=-1)
    pyplot.close("all")


def test_plot_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    sparsity = BlockSparsity.from_mask(torch.ones(3, 3, dtype=torch.bool))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ModuleNotFoundError, match=r"^plot: needs matplotlib"):
        sparsity.plot()


# -- no waiting ------------------------------------------------------------------------------------


def everything_built(mask: Tensor, blocks: Tensor, row: Tensor) -> list[Tensor]:
    """The tensors of one of each kind, and what is read from them."""
    seqlen_q, seqlen_k = mask.shape[-2:]
    results = []
    for sparsity in (
        BlockSparsity.from_mask(mask),
        BlockSparsity.from_mask(row, seqlen_q=seqlen_q),
        BlockSparsity.from_blocks(blocks, (64, 128), seqlen_q, seqlen_k),
    ):
        results += [sparsity.rows, sparsity.columns, sparsity.to_mask(), sparsity.density()]
        results += [] if sparsity.bits is None else [sparsity.bits]
    return results


def make_inputs(device: str = "cpu", seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    mask = random_mask((2, 3, 300, 517), 0.5, seed)
    blocks = torch.rand(2, 1, 5, 5, generator=generator) < 0.5
    row = torch.rand(2, 1, 1, 517, generator=generator) < 0.5
    return mask.to(device), blocks.to(device), row.to(device)


def test_contents_decide_nothing_on_the_host() -> None:
    """Tensors without contents, which .item() and nonzero() refuse, do."""
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(x) for x in make_inputs()]
        shapes = [x.shape for x in everything_built(*fakes)]
    assert shapes == [x.shape for x in everything_built(*make_inputs())]


def of_a_mask(mask: Tensor, *_: Tensor) -> list[Tensor]:
    """One kind, as inductor takes seconds for each."""
    sparsity = BlockSparsity.from_mask(mask)
    assert sparsity.bits is not None
    return [sparsity.rows, sparsity.columns, sparsity.bits, sparsity.to_mask()]


@pytest.mark.parametrize(
    ("function", "backend"), [(everything_built, "aot_eager"), (of_a_mask, "inductor")]
)
def test_compiled_whole(function: Any, backend: str) -> None:
    inputs = make_inputs()
    compiled = torch.compile(function, fullgraph=True, backend=backend)
    for actual, expected in zip(compiled(*inputs), function(*inputs), strict=True):
        torch.testing.assert_close(actual, expected)


def test_an_argument_of_compiled_code() -> None:
    mask = random_mask((1, 1, 200, 256), 0.5)
    compiled = torch.compile(lambda x: x.to_mask(), fullgraph=True, backend="eager")
    assert torch.equal(compiled(BlockSparsity.from_mask(mask)), mask)
    made = torch.compile(BlockSparsity.from_mask, fullgraph=True, backend="eager")(mask)
    assert torch.equal(made.to_mask(), mask)


@pytest.mark.gpu
def test_built_on_the_device_and_captured() -> None:
    inputs = make_inputs(DEVICE)
    expected = everything_built(*make_inputs())
    with no_host_sync():
        results = everything_built(*inputs)
    for actual, wanted in zip(results, expected, strict=True):
        torch.testing.assert_close(actual.cpu(), wanted)

    replay = captured(lambda: everything_built(*inputs))
    changed = make_inputs(seed=1)
    for x, y in zip(inputs, changed, strict=True):
        x.copy_(y)
    results = replay() if DEVICE != "cpu" else everything_built(*inputs)
    for actual, wanted in zip(results, everything_built(*changed), strict=True):
        torch.testing.assert_close(actual.cpu(), wanted)


def test_pickles_name_the_package_alone() -> None:
    """So that they outlive where its modules lie."""
    made = BlockSparsity.from_mask(torch.rand(5, 7) < 0.5)
    data = pickle.dumps(made)
    assert b"flash_attn_cuda.masks" not in data
    assert torch.equal(pickle.loads(data).to_mask(), made.to_mask())
