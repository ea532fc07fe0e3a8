"""Calls drawn at random (tests/fuzz/draw.py) against the fp64 reference: forms no table has."""

from __future__ import annotations

import pytest

from tests.cases.harness import DEVICE, scaled
from tests.fuzz import run

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", ["dense", "packed", "cache"])
def test_drawn_calls(kind: str, seed: int) -> None:
    pairs = scaled(4_000_000, 4_000)
    given = f"--kinds {kind} --seed {seed} --device {DEVICE} --most-pairs {pairs}"
    options = run.parse(given.split())
    outcomes = [run.outcome_of(options, number) for number in range(scaled(100, 5))]
    assert not [x.text for x in outcomes if x.what == run.WRONG]
