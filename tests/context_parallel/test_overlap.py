"""Groups of heads that ulysses exchanges beside attention, in two processes over gloo."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.context_parallel import overlap_cases as cases
from tests.context_parallel.cases import Case
from tests.context_parallel.ranks import Ranks

pytestmark = pytest.mark.xdist_group("ranks")

CASE = Case("ulysses", 2, heads_q=8, head_groups=cases.GROUPS)
OPTIONS = {
    "plain": {},
    "documents": {"lengths": (5, 90, 1, 0, 37, 16, 43), "batch": None},
    "dropout": {"dropout_p": 0.3, "lengths": (128,)},
    "alibi-sink": {"has_alibi": True, "has_sink": True},
    "bf16": {"dtype": torch.bfloat16},
}


def test_transfers_are_beside_attention(two: Ranks) -> None:
    two.run(cases.transfers_are_beside_attention, CASE)


def test_gradients_of_lse_travel_with_those_of_out(two: Ranks) -> None:
    two.run(cases.gradients_of_lse_travel_with_those_of_out, CASE)


def test_tangents_travel_beside_attention(two: Ranks) -> None:
    two.run(cases.tangents_travel_beside_attention, CASE)


def test_nothing_is_left_in_flight(two: Ranks) -> None:
    two.run(cases.nothing_is_left_in_flight, CASE)


@pytest.mark.parametrize("option", OPTIONS)
def test_groups_give_the_same_bits(two: Ranks, option: str) -> None:
    case = replace(CASE, heads_q=16, heads_k=8, **OPTIONS[option])
    two.run(cases.groups_give_the_same_bits, case, (2, 4, (1, 3)))
