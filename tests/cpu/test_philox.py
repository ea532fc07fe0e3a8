"""Which probabilities dropout keeps: the package's Philox against an independent one and against
what random bits must be like.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flash_attn_cuda.cpu.philox import _philox, dropout_threshold, keep_mask, keep_scale
from tests import reference
from tests.cases.cpu_harness import OFFSET, RNG_STATE, SEED

pytestmark = pytest.mark.usefixtures("one_thread")

PROBABILITIES = (0.001, 0.1, 0.5, 0.9)

# Philox4x32 with 7 rounds, known answers published with Random123: counter, key, result.
KNOWN_ANSWERS = [
    ([0] * 4, [0] * 2, [0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48]),
    ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A],
    ),
]


def whole_mask(
    dropout_p: float,
    sizes: tuple[int, int, int, int],
    state: Tensor = RNG_STATE,
) -> Tensor:
    """(B, H, Sq, Sk)."""
    batch, heads, seqlen_q, seqlen_k = sizes
    ranges = (range(batch), range(heads), heads, range(seqlen_q), range(seqlen_k))
    return keep_mask(state, dropout_p, *ranges)


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_reference_philox_gives_the_known_answers(
    counter: list[int], key: list[int], expected: list[int]
) -> None:
    words = reference.philox_4x32_7(tuple(np.array(c) for c in counter), tuple(key))
    assert [int(word) for word in words] == expected


INT64 = st.integers(-(2**63), 2**63 - 1)


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.tuples(*[st.integers(1, 3)] * 2, *[st.integers(1, 50)] * 2),
    dropout_p=st.floats(0.0, 1.0, exclude_max=True),
    seed=INT64,
    offset=INT64,
)
def test_equals_the_reference(
    sizes: tuple[int, int, int, int], dropout_p: float, seed: int, offset: int
) -> None:
    expected = reference.keep_mask(seed, offset, dropout_p, *sizes)
    assert torch.equal(whole_mask(dropout_p, sizes, torch.tensor([seed, offset])), expected)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_parts_are_parts_of_the_whole(data: st.DataObject) -> None:
    sizes = (2, 3, 40, 50)
    whole = whole_mask(0.4, sizes)
    ranges = []
    for size in sizes:
        start = data.draw(st.integers(0, size))
        ranges.append(range(start, data.draw(st.integers(start, size))))
    batch, heads, rows, cols = ranges
    part = keep_mask(RNG_STATE, 0.4, batch, heads, sizes[1], rows, cols)
    slices = tuple(slice(x.start, x.stop) for x in ranges)
    assert torch.equal(part, whole[slices])


@pytest.mark.parametrize(
    ("dropout_p", "threshold"),
    [
        (0.0, 0),
        (2**-18, 0),
        (2**-17, 1),  # half a step: away from zero
        (2**-16, 1),
        (0.001, 66),
        (0.1, 6554),
        (0.5, 32768),
        (1 - 2**-18, 65535),
        (0.99999999, 65535),
    ],
)
def test_threshold(dropout_p: float, threshold: int) -> None:
    assert dropout_threshold(dropout_p) == threshold
    assert keep_scale(dropout_p) == 65536 / (65536 - threshold)


def test_zero_keeps_everything() -> None:
    assert whole_mask(0.0, (2, 3, 40, 40)).all()


# -- randomness ----------------------------------------------------------------------------------

SAMPLE = (2, 4, 256, 512)
LIMIT = 5.0  # standard deviations: one false alarm in two million


def dropped_of(dropout_p: float, state: Tensor = RNG_STATE) -> Tensor:
    """Zero mean and unit variance if the bits are random: (drops - p) / sigma."""
    p = dropout_threshold(dropout_p) / 65536
    dropped = (~whole_mask(dropout_p, SAMPLE, state)).double()
    return (dropped - p) / (p * (1 - p)) ** 0.5


@pytest.mark.parametrize("dropout_p", PROBABILITIES)
def test_the_share_of_drops(dropout_p: float) -> None:
    x = dropped_of(dropout_p)
    assert abs(x.mean() * x.numel() ** 0.5) < LIMIT
    for dims in itertools.combinations(range(4), 3):  # of every row, column, head, batch entry
        count = x.numel() / x.shape[6 - sum(dims)]
        assert (x.mean(dims).abs() * count**0.5 < LIMIT).all(), dims


@pytest.mark.parametrize("dropout_p", PROBABILITIES)
def test_neighbours_are_independent(dropout_p: float) -> None:
    """Along rows and columns at every distance within and across blocks, diagonals included."""
    x = dropped_of(dropout_p)
    distances = (0, 1, 2, 4, 7, 8, 9, 16, 17)
    for down, right in itertools.product(distances, distances):
        if down == right == 0:
            continue
        products = x[..., down:, right:] * x[..., : 256 - down, : 512 - right]
        z = products.mean() * products.numel() ** 0.5
        # Rare drops: pairs of them are counted, not summed, and tail further than a normal.
        limit = LIMIT if dropout_p > 0.01 else 3 * LIMIT
        assert abs(z) < limit, (down, right)


@pytest.mark.parametrize(("dropout_p", "states"), [(0.001, 4), (0.0031, 12), (0.1, 1), (0.5, 1)])
def test_pairs_of_a_block_are_as_correlated_as_their_shared_bits_make_them(
    dropout_p: float, states: int
) -> None:
    """By the variance of the threshold's lower half, docs/numerics.md; at 0.5 there is none."""
    sums, count = 0.0, 0
    for state in range(states):
        x = dropped_of(dropout_p, torch.tensor([SEED + state, OFFSET]))
        # (blocks, pairs): two neighbours and the two 8 further on, in both directions
        tiles = x.unflatten(-1, (-1, 2, 4, 2)).unflatten(-5, (-1, 2, 4, 2))
        blocks = tiles.permute(0, 1, 2, 4, 6, 8, 3, 5, 7, 9).reshape(-1, 16)
        sums += float((blocks.sum(-1) ** 2 - (blocks**2).sum(-1)).sum()) / 2
        count += len(blocks) * 16 * 15 // 2
    threshold = dropout_threshold(dropout_p)
    p, share = threshold / 65536, threshold % 256 / 256
    expected = share * (1 - share) / (65536 * p * (1 - p))
    assert expected < 1 / 256
    correlation, deviation = sums / count, count**-0.5
    assert abs(correlation - expected) < (1 if dropout_p > 0.01 else 2) * LIMIT * deviation
    if dropout_p < 0.01:
        assert correlation > LIMIT * deviation  # 16 bits for each pair would not do


def shared_bytes(seed: int = SEED, offset: int = OFFSET, lane: int = 0) -> Tensor:
    """(512, 512): of the blocks of one head."""
    groups = range(128)
    return _philox(torch.tensor([seed, offset]), [lane], groups, groups)[1][0] >> 24


def deviation_of_matches(a: Tensor, b: Tensor) -> float:
    """Of how often two equal numbers of 8 bits meet, in standard deviations."""
    share = 1 / 256
    matches = float((a == b).double().mean())
    return (matches - share) * (a.numel() / (share * (1 - share))) ** 0.5


def test_shared_bits_are_those_of_the_whole_counter_and_key() -> None:
    base = shared_bytes()
    others = {
        "head": shared_bytes(lane=1),
        "another head": shared_bytes(lane=2),
        "offset": shared_bytes(offset=OFFSET + 1),
        "the next call's offset": shared_bytes(offset=OFFSET + 4),
        "seed": shared_bytes(seed=SEED + 1),
        "upper half of the seed": shared_bytes(seed=SEED + 2**32),
    }
    for what, other in others.items():
        assert abs(deviation_of_matches(base, other)) < LIMIT, what
    for distance in (1, 2, 4, 8, 16, 64):
        assert abs(deviation_of_matches(base[distance:], base[:-distance])) < LIMIT, distance
        assert abs(deviation_of_matches(base[:, distance:], base[:, :-distance])) < LIMIT, distance


def test_shared_bits_know_nothing_of_the_pairs_own() -> None:
    groups = range(128)
    words, shared = _philox(torch.tensor([SEED, OFFSET]), [0], groups, groups)

    def signs(word: Tensor, bits: range) -> Tensor:
        return torch.stack([(word >> bit & 1).double().flatten() * 2 - 1 for bit in bits])

    of_block = signs(shared, range(24, 32))
    for word in words:
        z = of_block @ signs(word, range(32)).T / of_block.shape[1] ** 0.5
        assert z.abs().max() < LIMIT


@pytest.mark.parametrize("dropout_p", [0.003, 0.1])
def test_no_position_is_spared_call_after_call(dropout_p: float) -> None:
    """Over the offsets of many calls with one seed a position drops as often as any other."""
    calls, size = 800, 64
    drops = torch.zeros(size, size, dtype=torch.double)
    for call in range(calls):
        state = torch.tensor([SEED, OFFSET + 4 * call])
        drops += ~keep_mask(state, dropout_p, range(1), range(1), 1, range(size), range(size))[0, 0]
    p = dropout_threshold(dropout_p) / 65536
    ratio = float(drops.var()) / (calls * p * (1 - p))
    assert abs(ratio - 1) < LIMIT * (2 / size**2) ** 0.5 * 1.5  # rare drops tail further


@pytest.mark.parametrize("dropout_p", PROBABILITIES)
def test_heads_batches_and_states_are_independent(dropout_p: float) -> None:
    base = dropped_of(dropout_p)
    flat = base.flatten(0, 1).flatten(1)
    correlation = flat @ flat.T / flat.shape[1] ** 0.5
    limit = LIMIT if dropout_p > 0.01 else 3 * LIMIT
    off_diagonal = correlation - torch.diag(correlation.diag())
    assert off_diagonal.abs().max() < limit
    states = [(SEED + 1, OFFSET), (SEED, OFFSET + 1), (SEED + 2**32, OFFSET), (0, 0), (1, 0)]
    for state in [*states, (SEED, OFFSET + 2**32)]:
        other = dropped_of(dropout_p, torch.tensor(state))
        assert abs((base * other).mean() * base.numel() ** 0.5) < limit, state


def test_all_16_bits_are_uniform() -> None:
    """Thresholds at every power of two, so every bit decides somewhere."""
    for bit in range(16):
        p = 2.0**bit / 65536
        drops = float((~whole_mask(p, (1, 4, 512, 512))).sum())
        count = 4 * 512 * 512
        assert abs(drops - count * p) < LIMIT * (count * p * (1 - p)) ** 0.5, bit
