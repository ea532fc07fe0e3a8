"""Plans of context parallelism and what follows from them: arithmetic alone."""

from __future__ import annotations

import math
import random
from collections import Counter
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flash_attn_cuda.context_parallel import Band, Piece, Plan, steps
from flash_attn_cuda.context_parallel.attention import begins_with_all_rows, head_slices
from flash_attn_cuda.context_parallel.head_exchange import check_heads, copy, is_of_words
from flash_attn_cuda.context_parallel.load import Heads, Load, even_groups
from flash_attn_cuda.context_parallel.plan import rows_of_joined
from flash_attn_cuda.context_parallel.schedule import Sight, ringing

BANDS = st.builds(
    Band,
    st.one_of(st.none(), st.integers(0, 40)),
    st.one_of(st.none(), st.just(0), st.integers(0, 40)),
)
LENGTHS = st.lists(st.integers(0, 60), min_size=1, max_size=8)


def seen(band: Band, i: int, j: int) -> bool:
    return (band.left is None or j >= i - band.left) and (band.right is None or j <= i + band.right)


@given(BANDS, st.integers(0, 30), st.data())
def test_pairs_of_a_range(band: Band, length: int, data: st.DataObject) -> None:
    begin = data.draw(st.integers(0, length))
    end = data.draw(st.integers(begin, length))
    wanted = sum(seen(band, i, j) for i in range(begin, end) for j in range(length))
    assert band.pairs(begin, end, length) == wanted


def test_band_of_options() -> None:
    assert Band.of(True) == Band(None, 0)
    assert Band.of(False, (3, 5)) == Band(3, 5)
    assert Band.of(True, (3, 5)) == Band(3, 0)
    assert Band.of(False, (None, -1)) == Band(None, None)


@st.composite
def plans(draw: st.DrawFn, lengths: st.SearchStrategy[list[int]] = LENGTHS) -> Plan:
    ranks = draw(st.integers(1, 4))
    kind = draw(st.sampled_from(("balanced", "zigzag", "contiguous")))
    if kind == "balanced":
        multiple = draw(st.sampled_from((1, 16)))
        return Plan.balanced(draw(lengths), ranks, draw(BANDS), multiple=multiple)
    parts = 2 * ranks if kind == "zigzag" else ranks
    equal = [x // parts * parts for x in draw(lengths)]
    return getattr(Plan, kind)(equal, ranks)


@given(plans())
def test_every_token_is_on_one_rank(plan: Plan) -> None:
    rows = [x for rank in range(len(plan.ranks)) for x in plan.rows_of(rank) if x >= 0]
    assert sorted(rows) == list(range(plan.total))
    for rank, mine in enumerate(plan.ranks):
        assert len(plan.rows_of(rank)) == len(plan.positions_of(rank)) == plan.rows
        assert len(set(mine)) == len(mine)
        assert all((x.sequence, x.end) != (y.sequence, y.begin) for x, y in pairwise(mine))
    fetched = 0
    for mine in plan.ranks:
        for sequence in {piece.sequence for piece in mine}:
            fetched += plan.lengths[sequence] * any(
                x.sequence == sequence for other in plan.ranks if other is not mine for x in other
            )
    assert (plan.travelling == 0) == (fetched == 0)
    assert plan.travelling <= fetched


@given(LENGTHS, st.integers(1, 4), BANDS)
def test_shards_differ_by_no_row_where_the_ranks_divide_the_total(
    lengths: list[int], ranks: int, band: Band
) -> None:
    plan = Plan.balanced(lengths, ranks, band)
    assert plan.rows == -(-sum(lengths) // ranks)


@given(LENGTHS, st.integers(1, 4), BANDS)
def test_documents_are_cut_at_multiples(lengths: list[int], ranks: int, band: Band) -> None:
    plan = Plan.balanced(lengths, ranks, band, multiple=16)
    assert plan.multiple == 16
    assert plan.rows < sum(lengths) / ranks + 16 * (len(lengths) + 2)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 3000), min_size=1, max_size=8), st.integers(1, 6))
def test_shards_are_of_whole_multiples(lengths: list[int], ranks: int) -> None:
    plan = Plan.balanced(lengths, ranks, Band(None, 0), multiple=16)
    assert plan.rows % 16 == 0
    assert all(plan.used_rows(rank) <= plan.rows for rank in range(ranks))


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("mean", [4096, 16384])
def test_balance_of_log_normal_documents(ranks: int, mean: int) -> None:
    """Documents such as training has, 64k tokens a rank: within 2 % of the mean, and few cut."""
    generator = random.Random(ranks * mean)
    left, lengths = 65536 * ranks, []
    while left:
        lengths.append(min(left, max(16, int(generator.lognormvariate(math.log(mean) - 0.5, 1)))))
        left -= lengths[-1]
    plan = Plan.balanced(lengths, ranks, Band(None, 0))
    assert plan.imbalance(Band(None, 0)) <= 1.02
    pieces = Counter(piece.sequence for mine in plan.ranks for piece in mine)
    if mean == 4096:
        assert sum(count > 1 for count in pieces.values()) <= len(lengths) // 4
        assert plan.travelling <= 65536 * ranks  # of each rank no more than it has


def test_a_zigzag_is_balanced_exactly() -> None:
    plan = Plan.zigzag([64], 4)
    assert plan.ranks[1] == (Piece(0, 8, 16), Piece(0, 48, 56))
    assert plan.imbalance(Band(None, 0)) == 1.0


@given(plans(), st.data())
def test_rows_of_a_joined_plan_go_there_and_back(plan: Plan, data: st.DataObject) -> None:
    """Each row of its ranks once, padding to padding."""
    ranks = len(plan.ranks)
    size = data.draw(st.sampled_from([x for x in range(1, ranks + 1) if ranks % x == 0]))
    inside = plan.joined(size)
    for rank in range(ranks // size):
        order, places = rows_of_joined(plan, inside, rank)
        held = [x for member in range(size) for x in plan.rows_of(rank * size + member)]
        assert [held[x] for x in order] == inside.rows_of(rank)
        assert [order[x] for x in places] == list(range(size * plan.rows))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("dim", [1, 3, 8])
@pytest.mark.parametrize("offset", [0, 1, 4])
def test_copies_between_views(dtype: torch.dtype, dim: int, offset: int) -> None:
    """By words of 8 bytes or by items, of rows that begin between words as well."""
    x = torch.randn(5, 4, 2 * dim + offset).to(dtype)[..., offset::2]
    row = torch.randn(90 + offset).to(dtype)[offset:]
    expanded = x[:1].expand(5, -1, -1), row[:1].expand(5, 4, dim)
    for source in (x, x.contiguous(), row.view(5, 6, 3), *expanded):
        into = torch.zeros(*source.shape[:2], source.shape[2] + offset, dtype=dtype)[..., offset:]
        copy(into, source)
        assert torch.equal(into, source)


def test_what_words_are_copied_of() -> None:
    x = torch.zeros(4, 6, 8, dtype=torch.bfloat16)
    assert is_of_words(x)
    assert is_of_words(x.transpose(0, 1)[:, :, :4])
    assert not is_of_words(x[..., :6])  # of 12 bytes
    assert not is_of_words(x[..., 2:6])  # from byte 4 on
    assert not is_of_words(x.transpose(1, 2))
    buffer = bytearray(66)
    assert not is_of_words(torch.frombuffer(buffer, dtype=torch.bfloat16, offset=2).view(4, 8))
    assert not is_of_words(torch.zeros(4, 6, 9, dtype=torch.bfloat16)[..., :8])  # a row: 18 bytes


def test_heads_that_ranks_share_out() -> None:
    for ranks in (1, 2, 4, 8, 12, 24):
        check_heads(24, 4, ranks)
    for ranks in (3, 5, 6, 16, 48):
        with pytest.raises(ValueError, match=rf"heads: ulysses over {ranks} .* got 24 and 4"):
            check_heads(24, 4, ranks)


def test_lengths_that_do_not_divide() -> None:
    with pytest.raises(
        ValueError, match=r"lengths: must be multiples of 8 .* got 12 of sequence 1"
    ):
        Plan.zigzag([16, 12], 4)


def pairs_of(
    plan: Plan, rank: int, band: Band, calls: list[list[steps.Part]], tokens_q: list, tokens_k: list
) -> Counter:
    """(sequence, query, key) of all that the packed calls of a rank compute."""
    found: Counter = Counter()
    for parts in calls:
        call = steps.PackedCall.of(parts, heads=3)
        bounds = zip(
            pairwise(call.cu_seqlens_q), pairwise(call.cu_seqlens_k), call.origin, strict=True
        )
        for (q_begin, q_end), (k_begin, k_end), (stream, first_q, first_k, shift) in bounds:
            assert 0 <= q_begin <= q_end and 0 <= k_begin <= k_end
            for i in range(q_end - q_begin):
                for j in range(k_end - k_begin):
                    query = tokens_q[call.q[0] + q_begin + i]
                    key = tokens_k[call.k[0] + k_begin + j]
                    if call.is_masked:
                        assert query == (stream // 3, first_q + i)
                        assert key == (stream // 3, first_k + j)
                        aligned = (k_end - k_begin) - (q_end - q_begin)
                        assert not call.is_aligned or shift == aligned
                        if not seen(band, i + shift, j):
                            continue
                    found[query + key] += 1
    return found


def tokens_of(held: list[steps.Held]) -> dict[int, tuple[int, int]]:
    return {
        x.row + i - x.piece.begin: (x.piece.sequence, i)
        for x in held
        for i in range(x.piece.begin, x.piece.end)
    }


def wanted_pairs(plan: Plan, band: Band) -> Counter:
    return Counter(
        (s, i, s, j)
        for s, n in enumerate(plan.lengths)
        for i in range(n)
        for j in range(n)
        if seen(band, i, j)
    )


def rows_sent(exchange: steps.Exchange, target: int) -> list[int]:
    rows = [row for begin, end in exchange.rows for row in range(begin, end)]
    first = sum(exchange.sent[:target])
    return rows[first : first + exchange.sent[target]]


@settings(max_examples=60, deadline=None)
@given(plans(), BANDS, st.booleans())
def test_hops_compute_every_visible_pair_once(plan: Plan, band: Band, keeps_places: bool) -> None:
    found: Counter = Counter()
    ranks = len(plan.ranks)
    for rank in range(ranks):
        queries = tokens_of([steps.Held(*x) for x in plan.placed(rank)])
        for distance in range(ranks):
            exchange, keys = steps.hop(plan, rank, distance, band)
            source = (rank - distance) % ranks
            theirs, _ = steps.hop(plan, source, distance, band)
            shard = tokens_of([steps.Held(*x) for x in plan.placed(source)])
            came = [shard[row] for row in rows_sent(theirs, rank)]
            assert exchange.received[source] == len(came)
            assert dict(enumerate(came)) == tokens_of(keys)
            assert bool(came) <= (not steps.is_hop_empty(plan, distance, band))
            parts = steps.hop_parts(plan, rank, band, keys)
            calls = steps.calls_of(parts, keeps_places=keeps_places)
            found += pairs_of(plan, rank, band, calls, queries, tokens_of(keys))
    assert found == wanted_pairs(plan, band)


@settings(max_examples=60, deadline=None)
@given(plans(), BANDS, st.booleans())
def test_gathered_keys_give_every_visible_pair_once(
    plan: Plan, band: Band, keeps_places: bool
) -> None:
    found: Counter = Counter()
    ranks = len(plan.ranks)
    gathered = [steps.gather(plan, rank, band, keeps_places=keeps_places) for rank in range(ranks)]
    for rank, (exchange, order, parts) in enumerate(gathered):
        came = []
        for source in range(ranks):
            shard = tokens_of([steps.Held(*x) for x in plan.placed(source)])
            rows = rows_sent(gathered[source][0], rank)
            assert exchange.received[source] == len(rows)
            came += [shard[row] for row in rows]
        keys = [came[row] for row in order]
        shard = tokens_of([steps.Held(*x) for x in plan.placed(rank)])
        queries = list(shard.values())
        rows = []
        whole = steps.whole_parts(plan, rank, band)
        for some, tokens_k in ((whole, queries), (parts, keys)):
            calls = steps.without_gaps(some)
            for call in map(lambda parts: steps.PackedCall.of(parts, 1), calls):
                rows += queries[call.q[0] : call.q[1]]
            found += pairs_of(plan, rank, band, calls, queries, tokens_k)
        assert sorted(rows) == sorted(queries)
        cut = [
            queries[row] for begin, end in steps.cut_rows(plan, rank) for row in range(begin, end)
        ]
        assert cut == [queries[row] for part in parts for row in range(*part.q)]
    assert found == wanted_pairs(plan, band)


@settings(max_examples=60, deadline=None)
@given(plans(), BANDS)
def test_every_place_of_gathered_keys_goes_back_to_its_row(plan: Plan, band: Band) -> None:
    for rank in range(len(plan.ranks)):
        exchange, order, _ = steps.gather(plan, rank, band, keeps_places=True)
        first, others = steps.way_back(order, sum(exchange.received))
        back = [[place] for place in first]
        for rows, places in others:
            assert steps.length(rows) == steps.length(places) > 0
            for row, place in zip(range(*rows), range(*places), strict=True):
                back[row].append(place)
        for row, places_of_row in enumerate(back):
            assert places_of_row == [place for place, x in enumerate(order) if x == row] != []


def test_one_call_takes_both_pieces_of_a_zigzag() -> None:
    plan = Plan.zigzag([64], 2)
    _, order, parts = steps.gather(plan, 0, Band(None, 0), keeps_places=False)
    assert [(x.q, x.k) for x in parts] == [((0, 16), (0, 16)), ((16, 32), (16, 80))]
    assert [len(x) for x in steps.without_gaps(parts)] == [2]
    assert steps.way_back(order, 64)[1] == [((0, 16), (16, 32))]
    _, order, parts = steps.gather(plan, 0, Band(), keeps_places=False)  # all see the same
    assert [(x.q, x.k) for x in parts] == [((0, 32), (0, 64))]
    assert len(steps.gather(plan, 0, Band(), keeps_places=True)[2]) == 2


def test_pieces_of_a_masked_call_keep_their_places() -> None:
    """All of the short sequence is seen, of the long one not: the mask is the call's."""
    plan = Plan.zigzag([4, 8], 2)
    _, _, parts = steps.gather(plan, 0, Band(None, 3), keeps_places=False)
    assert [(x.q, x.first_q, x.is_masked) for x in parts] == [
        ((0, 1), 0, False),
        ((1, 2), 3, False),
        ((2, 4), 0, True),
        ((4, 6), 6, False),
    ]
    assert len(steps.gather(plan, 0, Band(None, 7), keeps_places=False)[2]) == 2


def test_a_zigzag_ring_takes_one_call_a_hop() -> None:
    plan, band = Plan.zigzag([64], 4), Band(None, 0)
    for rank in range(4):
        for distance in range(4):
            _, keys = steps.hop(plan, rank, distance, band)
            parts = steps.hop_parts(plan, rank, band, keys)
            calls = steps.calls_of(parts, keeps_places=False)
            if distance:
                assert [call[0].is_masked for call in calls] == [False]


def test_hops_that_nobody_sees_are_skipped() -> None:
    plan = Plan.contiguous([64], 4)
    assert [steps.is_hop_empty(plan, x, Band(15, 0)) for x in range(4)] == [
        False,
        False,
        True,
        True,
    ]
    whole = Plan.of_pieces([8, 8], [[Piece(0, 0, 8)], [Piece(1, 0, 8)]])
    assert steps.is_hop_empty(whole, 1, Band())


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_a_ring_over_one_sequence_begins_with_all_rows(ranks: int) -> None:
    """The first call then finds no sums that others have begun."""
    assert all(begin_with_all_rows(Plan.zigzag([64], ranks)))


def test_a_ring_over_a_shard_with_padding_does_not() -> None:
    plan = Plan.balanced([30, 35], 2, Band(None, 0))
    assert [plan.used_rows(rank) for rank in range(2)] != [plan.rows] * 2
    assert begin_with_all_rows(plan) == [plan.used_rows(rank) == plan.rows for rank in range(2)]
    assert not begins_with_all_rows((), plan.rows, plan.rows)


def begin_with_all_rows(plan: Plan) -> list[bool]:
    sight, cpu = Sight(Band(None, 0)), torch.device("cpu")
    own = [ringing(plan, rank, 4, sight, cpu).hops[0] for rank in range(len(plan.ranks))]
    return [begins_with_all_rows(hop.calls, plan.rows, plan.rows) for hop in own]


# Groups of heads


def groups_of(ranks: int, seqlen: int, backward: bool, heads_k: int = 8) -> tuple[int, ...]:
    plan = Plan.zigzag([seqlen], ranks)
    heads = Heads(32, heads_k, columns=256, itemsize=2)
    return Load.of(plan, Band(None, 0)).head_groups(heads, backward=backward)


def test_a_forward_waits_for_one_head() -> None:
    assert groups_of(2, 1 << 14, False) == (8,)  # too short
    assert groups_of(2, 1 << 15, False) == (1, 7)
    assert groups_of(2, 1 << 16, False) == (1, 7)
    assert groups_of(2, 1 << 17, False) == (8,)  # a transfer is 0.8 % of the work
    assert groups_of(2, 1 << 15, False, heads_k=1) == (1,)
    # Where the others may come after the work on the first has ended:
    assert groups_of(8, 1 << 17, False) == (2, 2, 2, 2)
    assert groups_of(2, 1 << 17, False, heads_k=32) == (16, 16)


def test_groups_of_a_backward_are_even() -> None:
    assert groups_of(2, 1 << 14, True) == (8,)
    assert groups_of(2, 1 << 15, True) == (4, 4)
    assert groups_of(2, 1 << 16, True) == (8,)
    assert groups_of(2, 1 << 15, True, heads_k=1) == (1,)
    assert groups_of(8, 1 << 17, True) == (2, 2, 2, 2)


@given(st.integers(1, 12), st.integers(1, 12), st.integers(1, 4))
def test_groups_share_heads_in_order(heads_k: int, count: int, shared: int) -> None:
    groups = even_groups(heads_k, count)
    assert len(groups) == min(count, heads_k) and max(groups) - min(groups) <= 1
    slices = list(head_slices(heads_k * shared, groups))
    for heads, number in ((0, heads_k * shared), (1, heads_k)):
        of_each = [range(number)[x[heads]] for x in slices]
        assert [x for one in of_each for x in one] == list(range(number))
    assert all(len(range(99)[q]) == shared * len(range(99)[k]) for q, k in slices)


# Shards in order


@given(
    st.lists(st.integers(0, 70), min_size=1, max_size=12),
    st.integers(1, 5),
    st.sampled_from([1, 16]),
)
def test_shards_in_order(lengths: list[int], ranks: int, multiple: int) -> None:
    plan = Plan.in_order(lengths, ranks, multiple=multiple)
    rows = [row for rank in range(ranks) for row in plan.rows_of(rank) if row >= 0]
    assert rows == list(range(sum(lengths)))
    assert plan.multiple >= multiple
    assert plan.rows <= -(-sum(lengths) // ranks) + multiple - 1
    if multiple == 1:  # rows need no other order
        every = list(range(ranks * plan.rows))
        assert rows_of_joined(plan, plan.joined(ranks), 0) == (every, every)
