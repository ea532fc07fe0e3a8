"""The CPU backend: FlashAttention-2 in torch operations.

Forward is Algorithm 1 and backward Algorithm 2 of Dao, "FlashAttention-2: Faster Attention with
Better Parallelism and Work Partitioning" (2023): tiles of queries against tiles of keys, online
softmax with an output that is normalised once at the end, and a backward that recomputes the
probabilities from the log-sum-exp. Extra memory is O(seqlen * head_dim).

    calls       a whole call, forward or backward
    sequences   packed sequences and those over a cache: each is a dense call
    dense       sequences of one length
    tiles       which blocks of queries and keys meet, and what becomes of their scores
    visibility  the pairs that a sparse mask leaves
    philox      what dropout keeps
    combine     sums of partial results

Everything is computed in fp64 for fp64 inputs and in fp32 otherwise. Calls have passed
call/checks.py, contents of lengths included.
"""

from __future__ import annotations

from .calls import backward_on_cpu, forward_on_cpu
from .combine import combine
from .tiles import DEFAULT_TILING, Tiling
from .visibility import Visibility

__all__ = [
    "DEFAULT_TILING",
    "Tiling",
    "Visibility",
    "backward_on_cpu",
    "combine",
    "forward_on_cpu",
]
