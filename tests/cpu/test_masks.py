"""Ready-made masks against their definitions, pair by pair, in loops."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flash_attn_cuda import BlockSparsity, masks
from flash_attn_cuda.masks import random_choice, ready_made
from tests.cases.harness import DEVICE, no_host_sync

SEQLENS = [(70, 70), (1, 130), (60, 201), (150, 65)]


def by_pairs(seqlen_q: int, seqlen_k: int, visible: Callable[[int, int], bool]) -> Tensor:
    """(Sq, Sk) of visible(position of the query, key)."""
    shift = seqlen_k - seqlen_q
    rows = [[visible(i + shift, j) for j in range(seqlen_k)] for i in range(seqlen_q)]
    return torch.tensor(rows, dtype=torch.bool).view(seqlen_q, seqlen_k)


def assert_is(sparsity: BlockSparsity, mask: Tensor, *, has_bits: bool = True) -> None:
    """The dense mask (B, H, Sq, Sk) and the lists that it has."""
    assert torch.equal(sparsity.to_mask(), mask)
    assert (sparsity.bits is not None) == has_bits
    of_mask = BlockSparsity.from_mask(mask)
    assert torch.equal(sparsity.rows, of_mask.rows)
    assert torch.equal(sparsity.columns, of_mask.columns)


# -- prefix LM -------------------------------------------------------------------------------------


@pytest.mark.parametrize("seqlens", SEQLENS, ids=str)
@pytest.mark.parametrize("prefix", [0, 1, 64, 65])
def test_prefix_lm(seqlens: tuple[int, int], prefix: int) -> None:
    expected = by_pairs(*seqlens, lambda p, j: j < prefix or j <= p)
    hides = prefix < seqlens[1]
    assert_is(masks.prefix_lm(seqlens[0], prefix, seqlens[1]), expected[None, None], has_bits=hides)


def test_a_prefix_for_each_sequence() -> None:
    made = masks.prefix_lm(90, torch.tensor([0, 17, 90, 1000]))
    each = [masks.prefix_lm(90, prefix).to_mask() for prefix in (0, 17, 90, 1000)]
    assert_is(made, torch.cat(each))


# -- documents -------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
def test_documents(causal: bool) -> None:
    ids = torch.tensor([0] * 50 + [3] * 70 + [0] * 10 + [-1] * 20)
    expected = by_pairs(
        150,
        150,
        lambda p, j: bool(ids[p] == ids[j] >= 0) and (j <= p or not causal),
    )
    assert_is(masks.document(ids, causal=causal), expected[None, None])
    both = masks.document(torch.stack((ids, ids * 0)).int(), causal=causal).to_mask()
    assert torch.equal(both[:1, 0], expected[None])
    everything = torch.ones(150, 150, dtype=torch.bool)
    assert torch.equal(both[1, 0], everything.tril() if causal else everything)


def test_documents_of_queries_and_keys() -> None:
    ids, ids_k = torch.tensor([[4, 4, 5], [5, 5, 5]]), torch.tensor([4, 4, 4, 5, 5])
    made = masks.document(ids, ids_k, causal=True).to_mask()
    expected = [
        [[1, 1, 1, 0, 0], [1, 1, 1, 0, 0], [0, 0, 0, 1, 1]],
        [[0, 0, 0, 0, 0], [0, 0, 0, 1, 0], [0, 0, 0, 1, 1]],
    ]
    assert made[:, 0].int().tolist() == expected
    assert masks.document(ids[:0], ids_k).to_mask().shape == (0, 1, 3, 5)


# -- windows ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("seqlens", SEQLENS, ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [(0, 0), (17, 3), (64, -1), (-1, 10), (1 << 40, 0)], ids=str)
def test_sliding_window(seqlens: tuple[int, int], causal: bool, window: tuple[int, int]) -> None:
    left, right = (float("inf") if bound < 0 else bound for bound in window)

    def near(p: int, j: int) -> bool:
        return p - left <= j <= p + right and (j <= p or not causal)

    made = masks.sliding_window(seqlens[0], window, seqlens[1], causal=causal)
    expected = by_pairs(*seqlens, near)
    only_blocks = bool(expected.all()) and not causal
    assert_is(made, expected[None, None], has_bits=not only_blocks)

    is_global = {0, 1, 2, 66}

    def seen(p: int, j: int) -> bool:
        return near(p, j) or ((j in is_global or p in is_global) and (j <= p or not causal))

    chosen = torch.tensor([j in is_global for j in range(seqlens[1])])
    made = masks.sliding_window(seqlens[0], window, seqlens[1], causal=causal, global_tokens=chosen)
    assert torch.equal(made.to_mask()[0, 0], by_pairs(*seqlens, seen))
    is_global -= {66}
    made = masks.sliding_window(seqlens[0], window, seqlens[1], causal=causal, global_tokens=3)
    assert torch.equal(made.to_mask()[0, 0], by_pairs(*seqlens, seen))


def test_global_tokens_of_each_sequence() -> None:
    chosen = torch.rand(3, 100) < 0.1
    made = masks.sliding_window(80, (5, 5), 100, global_tokens=chosen)
    each = [masks.sliding_window(80, (5, 5), 100, global_tokens=x).to_mask() for x in chosen]
    assert_is(made, torch.cat(each))


@pytest.mark.parametrize("seqlens", [(64, 64), (40, 100), (100, 40)], ids=str)
def test_what_hides_nothing_has_no_bits(seqlens: tuple[int, int]) -> None:
    queries, keys = seqlens
    everything = torch.ones(1, 1, queries, keys, dtype=torch.bool)
    for made in (
        masks.sliding_window(queries, (-1, -1), keys),
        masks.sliding_window(queries, (keys - 1, queries - 1), keys),
        masks.dilated(queries, (-1, 1000), 1, keys),
        masks.strided(queries, 1, keys, causal=False),
        masks.prefix_lm(queries, keys, keys),
    ):
        assert_is(made, everything, has_bits=False)
    for made in (
        masks.sliding_window(queries, (keys - 2, queries - 1), keys),
        masks.sliding_window(queries, (keys - 1, queries - 2), keys),
    ):
        assert made.bits is not None and (~made.to_mask()).sum() == 1
    assert masks.prefix_lm(queries, keys - 1, keys).bits is not None


@pytest.mark.parametrize("seqlens", SEQLENS, ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [(3, 0), (2, 5), (-1, -1)], ids=str)
def test_dilated(seqlens: tuple[int, int], causal: bool, window: tuple[int, int]) -> None:
    left, right = (float("inf") if bound < 0 else bound for bound in window)

    def seen(step: int) -> Callable[[int, int], bool]:
        def visible(p: int, j: int) -> bool:
            whole = (j - p) % step == 0 and -left <= (j - p) // step <= right
            return whole and (j <= p or not causal)

        return visible

    for dilation in (1, 3, [1, 2, 1 << 40]):
        made = masks.dilated(seqlens[0], window, dilation, seqlens[1], causal=causal)
        steps = dilation if isinstance(dilation, list) else [dilation]
        expected = torch.stack([by_pairs(*seqlens, seen(step)) for step in steps])
        only_blocks = dilation == 1 and window == (-1, -1) and not causal
        assert_is(made, expected[None], has_bits=not only_blocks)


@pytest.mark.parametrize("seqlens", SEQLENS, ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("stride", [2, 16, 100, 1 << 40])
def test_strided(seqlens: tuple[int, int], causal: bool, stride: int) -> None:
    expected = by_pairs(
        *seqlens,
        lambda p, j: (abs(p - j) <= stride or (p - j) % stride == 0) and (j <= p or not causal),
    )
    made = masks.strided(seqlens[0], stride, seqlens[1], causal=causal)
    assert_is(made, expected[None, None])


# -- random blocks ---------------------------------------------------------------------------------


def regular_blocks(
    queries: int, keys: int, shift: int, window: int, first: int, causal: bool
) -> Tensor:
    """The blocks that bigbird does not draw."""
    return by_pairs_of_blocks(
        queries,
        keys,
        shift,
        lambda a, b: (
            (abs(a - b) <= window // 2 or b < first or 0 <= a < first) and (b <= a or not causal)
        ),
    )


def by_pairs_of_blocks(
    queries: int, keys: int, shift: int, visible: Callable[[int, int], bool]
) -> Tensor:
    rows = [[visible(a + shift, b) for b in range(keys)] for a in range(queries)]
    return torch.tensor(rows, dtype=torch.bool)


@settings(max_examples=40, deadline=None)
@given(
    seqlen_q=st.integers(1, 900),
    more_blocks=st.integers(-3, 6),
    block=st.sampled_from([64, 128, 192]),
    window=st.sampled_from([1, 3, 5]),
    first=st.integers(0, 3),
    drawn=st.integers(0, 4),
    heads=st.integers(1, 3),
    causal=st.booleans(),
    seed=st.integers(-(2**70), 2**70),
)
def test_bigbird(
    seqlen_q: int, more_blocks: int, block: int, window: int, first: int, drawn: int, heads: int,
    causal: bool, seed: int,
) -> None:  # fmt: skip
    seqlen_k = seqlen_q + more_blocks * block
    if seqlen_k < 1:
        return
    options: dict[str, Any] = {
        "seed": seed, "block_size": block, "window_blocks": window, "global_blocks": first,
        "heads": heads,
    }  # fmt: skip
    made = masks.bigbird(seqlen_q, seqlen_k, random_blocks=drawn, causal=causal, **options)
    assert made.heads == heads
    assert (made.bits is not None) == causal
    mask = made.to_mask()
    if causal:
        diagonal = by_pairs(seqlen_q, seqlen_k, lambda p, j: j <= p)
        assert made.bits.shape[1] == 1 and not (mask & ~diagonal).any()
    queries, keys = -(-seqlen_q // block), -(-seqlen_k // block)
    regular = regular_blocks(queries, keys, more_blocks, window, first, causal)
    past = by_pairs_of_blocks(queries, keys, more_blocks, lambda a, b: b <= a or not causal)
    for head in range(heads):
        blocks = torch.zeros(queries, keys, dtype=torch.bool)
        for a in range(queries):
            for b in range(keys):
                pairs = mask[0, head, a * block : (a + 1) * block, b * block : (b + 1) * block]
                blocks[a, b] = pairs.any()
                own = causal and b == a + more_blocks
                assert pairs.all() == blocks[a, b] or own
        assert not (regular & ~blocks).any() and not (blocks & ~past).any()
        candidates = (past & ~regular).sum(-1)
        assert torch.equal((blocks & ~regular).sum(-1), candidates.clamp(max=drawn))
    of_mask = BlockSparsity.from_mask(mask)
    assert torch.equal(made.rows, of_mask.rows) and torch.equal(made.columns, of_mask.columns)
    again = masks.bigbird(seqlen_q, seqlen_k, random_blocks=drawn, causal=causal, **options)
    assert torch.equal(again.rows, made.rows)


def test_random_blocks_are_even_and_differ() -> None:
    options: dict[str, Any] = {"window_blocks": 1, "global_blocks": 0, "random_blocks": 4}
    drawn = [masks.bigbird(64 * 32, seed=seed, heads=2, **options).pieces() for seed in range(100)]
    counts = sum(x.int() for x in drawn)[0]
    off_diagonal = counts[:, ~torch.eye(32, dtype=torch.bool)].float()
    share = 4 / 31
    assert (off_diagonal.mean() / 100 - share).abs() < 1e-6
    assert (off_diagonal / 100 - share).abs().max() < 6 * (share * (1 - share) / 100) ** 0.5
    pictures = Counter(bytes(x[0, h].flatten().tolist()) for x in drawn for h in (0, 1))
    assert len(pictures) == 200


def test_the_drawn_blocks_stay_what_they_are() -> None:
    """A mask that was trained with must come back in another release and on another device."""
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    bits = random_choice._random_bits(3, 1234567, torch.device("cpu"))
    assert [x % 2**64 for x in bits.tolist()] == published
    made = masks.bigbird(640, seed=7, window_blocks=1, global_blocks=0, random_blocks=2)
    drawn = ["".join(map(str, row)) for row in made.pieces()[0, 0].tolist()]
    assert drawn == [
        "1011000000",
        "0110001000",
        "0010110000",
        "1001000100",
        "0100100010",
        "1000010001",
        "0000001011",
        "0000010101",
        "0010001010",
        "0001000011",
    ]


# -- chunks, devices ------------------------------------------------------------------------------


def test_rows_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = torch.rand(2, 200) < 0.1
    whole = masks.sliding_window(150, (20, 5), 200, global_tokens=chosen)
    monkeypatch.setattr(ready_made, "CHUNK_PAIRS", 3000)
    chunked = masks.sliding_window(150, (20, 5), 200, global_tokens=chosen)
    assert torch.equal(chunked.bits, whole.bits) and torch.equal(chunked.rows, whole.rows)


def all_masks(device: str) -> list[BlockSparsity]:
    ids = torch.arange(300).sub(20).div(90, rounding_mode="floor").to(device)
    return [
        masks.prefix_lm(300, 50, device=device),
        masks.prefix_lm(300, torch.tensor([3, 70]).to(device)),
        masks.document(ids),
        masks.sliding_window(300, (20, 20), global_tokens=5, device=device),
        masks.dilated(300, (20, 20), [2, 3], device=device),
        masks.strided(300, 17, device=device),
        masks.bigbird(900, seed=3, heads=2, device=device),
        masks.bigbird(900, seed=3, causal=True, device=device),
    ]


def test_compiled_whole() -> None:
    compiled = torch.compile(all_masks, fullgraph=True, backend="eager")
    for actual, expected in zip(compiled("cpu"), all_masks("cpu"), strict=True):
        assert torch.equal(actual.to_mask(), expected.to_mask())


@pytest.mark.gpu
def test_the_same_on_the_device() -> None:
    all_masks(DEVICE)
    for actual, expected in zip(all_masks(DEVICE), all_masks("cpu"), strict=True):
        for field in ("rows", "columns", "bits"):
            made, wanted = getattr(actual, field), getattr(expected, field)
            assert made is wanted is None or torch.equal(made.cpu(), wanted)
    with no_host_sync():
        masks.sliding_window(300, (20, 20), global_tokens=5, device=DEVICE)
        masks.bigbird(900, seed=3, causal=True, device=DEVICE)


# -- arguments -------------------------------------------------------------------------------------

IDS = torch.zeros(2, 9, dtype=torch.int64)


BAD: tuple[tuple[str, dict[str, Any], Any, type[Exception], str], ...] = (
    ("prefix_lm", {}, (9.0, 1), TypeError, r"^seqlen_q: must be an integer, got float"),
    ("prefix_lm", {}, (9, 1, -1), ValueError, r"^seqlen_k: must be at least 0, got -1"),
    ("prefix_lm", {}, (9, -1), ValueError, r"^prefix: must be at least 0, got -1"),
    ("prefix_lm", {}, (9, IDS), ValueError, r"^prefix: must have shape .* \(2, 9\)"),
    ("prefix_lm", {}, (9, IDS[0].float()), TypeError, r"^prefix: dtype must be an int"),
    ("prefix_lm", {"device": "meta"}, (9, IDS[0]), ValueError, r"^prefix: must be on meta, got"),
    ("document", {}, ([1, 2],), TypeError, r"^ids: must be a torch.Tensor, got list"),
    ("document", {}, (IDS.bool(),), TypeError, r"^ids: dtype must be an integer one, got"),
    ("document", {}, (IDS[None],), ValueError, r"^ids: must have shape .* \(1, 2, 9\)"),
    ("document", {}, (IDS, IDS[0, 0]), ValueError, r"^ids_k: must have shape .* \(\)"),
    ("document", {}, (IDS, IDS.repeat(2, 1)), ValueError, r"^ids_k: batch must be 1 .*, got 4"),
    ("document", {}, (IDS, IDS.to("meta")), ValueError, r"^ids_k: must be on cpu, got meta"),
    ("sliding_window", {}, (9, 5), TypeError, r"^window: must be two integers, got 5"),
    ("sliding_window", {}, (9, (5, 0.5)), TypeError, r"^window: must be an integer, got"),
    ("sliding_window", {"global_tokens": -1}, (9, (1, 1)), ValueError,
     r"^global_tokens: must be at least 0, got -1"),
    ("sliding_window", {"global_tokens": IDS}, (9, (1, 1)), TypeError,
     r"^global_tokens: dtype must be torch.bool, got torch.int64"),
    ("sliding_window", {"global_tokens": IDS.bool()}, (9, (1, 1), 8), ValueError,
     r"^global_tokens: must have shape \(8,\) or \(batch, 8\), got \(2, 9\)"),
    ("dilated", {}, (9, (1, 1), 0), ValueError, r"^dilation: must be at least 1, got 0"),
    ("dilated", {}, (9, (1, 1), [2, 0.5]), TypeError, r"^dilation: must be an integer"),
    ("dilated", {}, (9, (1, 1), []), ValueError, r"^dilation: must be one or several"),
    ("strided", {}, (9, 0), ValueError, r"^stride: must be at least 1, got 0"),
    ("bigbird", {"seed": 0.5}, (9,), TypeError, r"^seed: must be an integer, got float"),
    ("bigbird", {"window_blocks": 2}, (9,), ValueError, r"^window_blocks: must be"),
    ("bigbird", {"heads": 0}, (9,), ValueError, r"^heads: must be at least 1"),
    ("bigbird", {"block_size": 96}, (9,), ValueError,
     r"^block_size: must be a multiple of 64 .* got 96"),
    ("bigbird", {"block_size": 128}, (64, 256), ValueError,
     r"^block_size: must be .* that divides seqlen_k - seqlen_q \(192\), got 128"),
)  # fmt: skip


@pytest.mark.parametrize(("name", "options", "given", "error", "message"), BAD)
def test_bad_arguments(
    name: str, options: dict[str, Any], given: Any, error: type[Exception], message: str
) -> None:
    seed = {"seed": 0} if name == "bigbird" else {}
    with pytest.raises(error, match=message):
        getattr(masks, name)(*given, **seed | options)
