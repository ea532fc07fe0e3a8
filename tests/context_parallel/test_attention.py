"""Context parallelism in processes over gloo, in fp64: what the ranks have together is what one
call over the whole gives.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings

from flash_attn_cuda.context_parallel.head_exchange import check_heads
from flash_attn_cuda.context_parallel.plan import equal_plan
from tests.cases.pairwise import pairwise
from tests.context_parallel import cases
from tests.context_parallel.cases import Case, Whole
from tests.context_parallel.drawn_cases import any_case
from tests.context_parallel.ranks import Ranks

SCHEMES = {
    "ring": Case("ring", 4),
    "all_gather": Case("all_gather", 4),
    "all_gather-in-groups": Case("all_gather", 4, head_groups=2),
    "all_gather-in-uneven-groups": Case("all_gather", 4, head_groups=(1, 3)),
    "ulysses": Case("ulysses", 4),
    "ulysses+ring": Case("ulysses+ring", 4, ulysses_size=2),
    "auto": Case("auto", 4),
}
LAYOUTS = {
    "one": {"lengths": (96,)},
    "batch": {"lengths": (64,), "batch": 3},
    "documents": {"lengths": (5, 90, 1, 0, 37, 16, 43), "batch": None},
    "few": {"lengths": (3, 2), "batch": None},  # ranks without rows
}
OPTIONS = {
    "full": {"causal": False},
    "causal": {},
    "window": {"window_size": (17, -1)},
    "narrow": {"window_size": (3, 2), "causal": False},
    "wide": {"window_size": (40, 21), "causal": False},
    "softcap": {"softcap": 3.0},
    "alibi": {"has_alibi": True},
    "alibi-full": {"has_alibi": True, "causal": False},
    "sink": {"has_sink": True},
    "dropout": {"dropout_p": 0.3, "lengths": (128,)},
    "dropout-window": {"dropout_p": 0.3, "lengths": (256,), "window_size": (50, -1)},
    "max_logits": {"max_logits": True, "window_size": (30, -1)},
    "head-dims": {"head_dim": 12, "head_dim_v": 4},
    "all-at-once": {
        **{"window_size": (29, -1), "softcap": 2.0, "max_logits": True},
        **{"has_alibi": True, "has_sink": True},
    },
}


@pytest.mark.parametrize(
    ("scheme", "layout", "option"),
    [
        tuple(row.values())
        for row in pairwise({"scheme": [*SCHEMES], "layout": [*LAYOUTS], "option": [*OPTIONS]})
    ],
)
def test_equals_the_whole(four: Ranks, scheme: str, layout: str, option: str) -> None:
    case = replace(SCHEMES[scheme], **{**LAYOUTS[layout], **OPTIONS[option]})
    if layout == "documents" or layout == "few":
        case = replace(case, lengths=LAYOUTS[layout]["lengths"])
    four.run(cases.equals_the_whole, case)


@pytest.mark.parametrize(
    "layout",
    [
        {"lengths": (0, 0, 0), "batch": None},
        {"lengths": (0,), "batch": 2},
        {"lengths": (64,), "batch": 0},
    ],
    ids=["documents", "seqlen", "batch"],
)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_nothing_at_all(four: Ranks, scheme: str, layout: dict[str, Any]) -> None:
    for options in ({}, {"has_alibi": True, "has_sink": True, "max_logits": True}):
        four.run(cases.equals_the_whole, replace(SCHEMES[scheme], **layout, **options))


def test_groups_of_heads_of_either_pass(four: Ranks) -> None:
    four.run(cases.has_groups_of_either_pass, Case("all_gather", 4))


@pytest.mark.parametrize("heads", [(8, 4), (8, 2), (4, 1), (12, 4)])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_fewer_heads_of_keys(four: Ranks, scheme: str, heads: tuple[int, int]) -> None:
    case = replace(SCHEMES[scheme], heads_q=heads[0], heads_k=heads[1])
    four.run(cases.equals_the_whole, cases.with_groups_of_its_heads(case))


@pytest.mark.parametrize("heads", [(4, 4), (8, 2), (8, 1)])
def test_cases_grow_no_more_than_ranks_need(heads: tuple[int, int]) -> None:
    heads_q, heads_k = heads
    case = Case("ulysses", 2, lengths=(704,), heads_q=heads_q, heads_k=heads_k)
    assert cases.of_ranks(case, 2) == case
    for ranks, length in ((4, 768), (8, 768)):
        found = cases.of_ranks(case, ranks)
        check_heads(found.heads_q, found.heads_k, ranks)
        assert found.heads_k == (1 if heads_k == 1 else max(heads_k, ranks))
        assert found.heads_q == heads_q // heads_k * found.heads_k
        assert found.lengths == (length,)
        assert equal_plan(found.lengths, ranks).multiple == 16
    assert cases.of_ranks(replace(case, batch=None, lengths=(3, 2)), 8).lengths == (3, 2)


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(any_case(4))
def test_any_call(four: Ranks, case: Case) -> None:
    four.run(cases.equals_the_whole, case)


def test_options_that_differ(two: Ranks) -> None:
    with pytest.raises(AssertionError, match=r"softcap: must be the same on every rank, got") as e:
        two.run(cases.attend_with_own_softcap)
    assert "0.0 on rank 0, 1.0 on rank 1" in str(e.value)
    assert "rank 1:" in str(e.value)


@pytest.mark.parametrize(
    "difference, message",
    [
        ("dtype", r"k: must be the same on every rank, got .*float64 on rank 0, .*float32"),
        ("heads", r"k: must be the same on every rank, got \(16, 2, 8\) .* on rank 0"),
        *(
            (name, rf"{name}: must be the same on every rank, got True on rank 0")
            for name in ("return_lse", "return_max_logits")
        ),
    ],
)
def test_calls_of_ulysses_that_differ(two: Ranks, difference: str, message: str) -> None:
    """Raised by all ranks, before a collective of different sizes."""
    with pytest.raises(AssertionError, match=message) as e:
        two.run(cases.attend_with_own, difference)
    assert "rank 1:" in str(e.value)


def test_options_that_differ_in_one_of_two_groups(four: Ranks) -> None:
    """Raised by the ranks of the other groups too, which wait for nobody."""
    with pytest.raises(AssertionError, match="softcap: must be the same on every rank, got") as e:
        four.run(cases.attend_with_own_softcap, "ulysses+ring", 2, timeout=40.0)
    assert all(f"rank {rank}:\nTraceback" in str(e.value) for rank in range(4))


def test_values_repeat_bit_by_bit(four: Ranks) -> None:
    for scheme in ("ring", "all_gather", "ulysses"):
        four.run(cases.repeats, Case(scheme, 4, heads_k=4, dtype=torch.bfloat16))


def test_shard_and_unshard(four: Ranks) -> None:
    four.run(cases.round_trips)


@pytest.mark.parametrize("scheme", ["ring", "all_gather", "ulysses"])
def test_training_after_inference(two: Ranks, scheme: str) -> None:
    two.run(cases.trains_after_inference, scheme)


def test_auto_chooses_by_what_travels(four: Ranks) -> None:
    four.run(cases.chooses_by_what_travels)


def test_over_a_mesh(four: Ranks) -> None:
    four.run(cases.over_a_mesh)


def test_over_a_permuted_mesh(four: Ranks) -> None:
    four.run(cases.over_a_permuted_mesh)


@pytest.mark.skipif(torch.__version__ < "2.14", reason="this torch sorts the ranks of a group")
def test_over_an_unsorted_group(four: Ranks) -> None:
    four.run(cases.over_an_unsorted_group)


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
def test_under_a_checkpoint(two: Ranks, dropout_p: float) -> None:
    two.run(cases.under_a_checkpoint, dropout_p)


def test_bad_arguments(two: Ranks) -> None:
    two.run(cases.refuses)


def test_closeness_of_dsink_allows_roundings_alone() -> None:
    """Of two heads errors of two roundings differ by any factor; 5 % of dsink are found."""
    wrong = 0
    for seed in range(60):
        case = Case("ring", 2, (4,), heads_q=2, heads_k=2, has_sink=True, seed=seed)
        whole = Whole.of(replace(case, head_dim=64, head_dim_v=64, dtype=torch.bfloat16))
        wanted = whole.in_fp64_on_cpu().results(case, None)
        own, usual = (cases.dsink_of_rounded(wanted, whole, n) for n in (2 * seed, 2 * seed + 1))
        cases.assert_as_close(wanted | {"dsink": own}, wanted | {"dsink": usual}, wanted, whole)
        try:
            found = wanted | {"dsink": 1.05 * own}
            cases.assert_as_close(found, wanted | {"dsink": usual}, wanted, whole)
        except AssertionError:
            wrong += 1
    assert wrong > 50
