"""The CPU backend: FlashAttention-2 in torch operations.

Forward is Algorithm 1 and backward Algorithm 2 of Dao, "FlashAttention-2: Faster Attention with
Better Parallelism and Work Partitioning" (2023): tiles of queries against tiles of keys, online
softmax with an output that is normalised once at the end, and a backward that recomputes the
probabilities from the log-sum-exp. Extra memory is O(seqlen * head_dim).

    tiles       which blocks of queries and keys meet, and what becomes of their scores
    dense       sequences of one length
    varlen      packed sequences: each is a dense call
    kvcache     attention over a KV cache, and the combination of partial results
    visibility  the pairs that a sparse mask leaves

Everything is computed in fp64 for fp64 inputs and in fp32 otherwise. The functions expect arguments
that have passed checks/, contents of lengths included. calls.py makes them of an AttentionCall.
"""

from __future__ import annotations

from .dense import attention_backward, attention_forward, probabilities
from .kvcache import combine, kvcache_forward
from .tiles import DEFAULT_TILING, AttentionOptions, Tiling
from .varlen import varlen_backward, varlen_forward, varlen_probabilities
from .visibility import Visibility

__all__ = [
    "DEFAULT_TILING",
    "AttentionOptions",
    "Tiling",
    "Visibility",
    "attention_backward",
    "attention_forward",
    "combine",
    "kvcache_forward",
    "probabilities",
    "varlen_backward",
    "varlen_forward",
    "varlen_probabilities",
]
