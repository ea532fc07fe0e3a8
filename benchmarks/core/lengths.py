"""Sequence lengths of uneven batches."""

from __future__ import annotations

import math
import random
from itertools import accumulate, pairwise
from statistics import NormalDist

# Of the logarithm of a length. The longest of 128 sequences is then 9 times the mean.
SIGMA = 1.0


def log_normal_lengths(
    count: int, mean: int, *, sigma: float = SIGMA, seed: int = 0
) -> tuple[int, ...]:
    """`count` lengths, in tokens, that sum to exactly count * mean.

    They are evenly spaced quantiles of a log-normal distribution, in random order, not a sample of
    it: a sample of eight would say more about its seed than about the distribution.

    Raises ValueError if a length would be 0.
    """
    normal = NormalDist(0.0, sigma)
    weights = [math.exp(normal.inv_cdf((index + 0.5) / count)) for index in range(count)]
    random.Random(seed).shuffle(weights)
    scale = count * mean / sum(weights)
    ends = [0, *(round(scale * total) for total in accumulate(weights))]
    lengths = tuple(end - begin for begin, end in pairwise(ends))
    if min(lengths) < 1:
        raise ValueError(f"mean: must leave at least one token to each of {count}, got {mean}")
    return lengths
