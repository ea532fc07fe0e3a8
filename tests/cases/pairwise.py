"""Combinations of parameter values in which every pair of values meets, far fewer than all."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any


def pairwise(axes: Mapping[str, Sequence[Any]], seed: int = 0) -> list[dict[str, Any]]:
    """Rows {axis: value} such that any two values of two axes stand together in some row.

    Greedy: each row starts from a pair that is missing and takes, axis by axis, the value that
    brings the most further missing pairs. The same rows for the same axes and seed.
    """
    rng = random.Random(seed)
    names = list(axes)
    missing = {
        ((a, i), (b, j))
        for a, b in combinations(names, 2)
        for i in range(len(axes[a]))
        for j in range(len(axes[b]))
    }
    rows = []
    while missing:
        row = dict(rng.choice(sorted(missing)))
        for name in rng.sample(names, len(names)):
            if name not in row:
                choices = list(range(len(axes[name])))
                rng.shuffle(choices)
                row[name] = max(choices, key=lambda i: len(_new(names, row | {name: i}, missing)))
        missing -= _new(names, row, missing)
        rows.append({name: axes[name][row[name]] for name in names})
    return rows


def _new(names: list[str], row: dict[str, int], missing: set[Any]) -> set[Any]:
    """The missing pairs that the row has."""
    chosen = [(name, row[name]) for name in names if name in row]
    return missing.intersection(combinations(chosen, 2))
