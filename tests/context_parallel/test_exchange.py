"""Collectives between two processes over gloo: ulysses' in order, and that none is left out."""

from __future__ import annotations

import pytest

from tests.context_parallel import exchange_cases as cases
from tests.context_parallel.cases import Case
from tests.context_parallel.ranks import Ranks

CASE = Case("ulysses", 2, heads_q=8)
SCHEMES = pytest.mark.parametrize("scheme", ["ulysses", "all_gather", "ring"])


def test_what_goes_the_same_way_travels_together(two: Ranks) -> None:
    two.run(cases.what_goes_the_same_way_travels_together, CASE)


def test_tangents_travel_as_what_they_are_of(two: Ranks) -> None:
    two.run(cases.tangents_travel_as_what_they_are_of, CASE)


def test_nothing_is_left_in_flight(two: Ranks) -> None:
    two.run(cases.nothing_is_left_in_flight, CASE)


@SCHEMES
def test_losses_leave_results_out(two: Ranks, scheme: str) -> None:
    two.run(cases.losses_leave_results_out, Case(scheme, 2, heads_q=8))


@SCHEMES
def test_one_loss_depends_on_nothing(two: Ranks, scheme: str) -> None:
    two.run(cases.one_loss_depends_on_nothing, Case(scheme, 2, heads_q=8))


@SCHEMES
def test_nothing_at_all(two: Ranks, scheme: str) -> None:
    two.run(cases.nothing_at_all, Case(scheme, 2, heads_q=8))
