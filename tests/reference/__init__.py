"""The specification in code: attention computed the obvious way in fp64, gradients by autograd.
Nothing in it comes from the package.

Conventions of the whole package:
  - q (B, Sq, Hq, D), k (B, Sk, Hk, D), v (B, Sk, Hk, Dv), out (B, Sq, Hq, Dv), Hq a multiple of
    Hk; query head h reads key head h // (Hq / Hk). Dv may be any other than D.
  - scores = softmax_scale * q k^T; softmax_scale None means D ** -0.5. softcap > 0 turns a score
    into softcap * tanh(score / softcap). ALiBi then takes slope * |i + Sk - Sq - j| from it.
  - Key j is visible to query i iff  i + Sk - Sq - left <= j <= i + Sk - Sq + right: both ends
    inclusive, aligned to the bottom right corner. A negative or None bound is no bound. causal sets
    right to 0.
  - lse (B, Hq, Sq) is the natural logarithm of the sum of exp(score) over visible keys.
  - A bias, (B, Hq, Sq, Sk) or broadcast to that but in Sk, is then added; -inf hides a key. A mask
    of that shape hides keys as well. Of packed sequences, Sq and Sk are bounds of theirs.
  - A sink (Hq,) adds exp(sink) to the softmax's denominator, so that lse has it too.
  - A query without a visible key has out 0 and lse -inf, or the sink, and no gradient flows through
    it but that of lse by the sink.
  - max_logits (B, Hq) is the largest score of a visible pair, -inf without one; a sink is none.
  - Dropout multiplies probabilities by keep / (1 - p), p in whole steps of 2^-16; lse does not see
    it. Which ones are kept is a matter of reference_dropout.
  - Packed sequences: q (total_q, Hq, D), k (total_k, Hk, D), v (total_k, Hk, Dv), lse (Hq,
    total_q). Sequence b has the rows from cu_seqlens[b] to cu_seqlens[b + 1], of queries the first
    seqused_q[b], of keys those from leftpad_k[b] to seqused_k[b]. Its Sq and Sk are those counts,
    and i and j count from its first query and key. Other rows have out 0, lse -inf, gradient 0.
  - With key_lists (B, Sq, Hk, n), packed (total_q, Hk, n), a query sees of those keys the ones that
    its list names by their j, and one that stands there twice counts twice; others are not read.
  - With tree_mask (B, Sq, Sq), packed (total_q, n), a query sees of the last Sq keys the ones that
    its row has, and all before them.
  - With qv, of out's shape, scores = softmax_scale * (q k^T + qv v^T).
  - k and v of FP8 (e4m3) are their numbers times a scale: of a head, of a sequence's head, or of a
    token's head. q of FP8 likewise, by the key head that it reads.
"""

from __future__ import annotations

from tests.reference.dense import attention, attention_with_gradients, low_precision
from tests.reference.dropout import keep_mask, philox_4x32_7
from tests.reference.fp8 import Fp8CacheResult, fp8_cache_reference
from tests.reference.kvcache import KvCacheResult, kvcache_reference, rotate
from tests.reference.options import (
    NO_WINDOW,
    AttentionOptions,
    AttentionResult,
    WindowBounds,
    visible_keys,
)
from tests.reference.parts import bias_of_lists, with_qv
from tests.reference.varlen import (
    dense_keys,
    varlen_attention,
    varlen_attention_with_gradients,
    varlen_low_precision,
)

__all__ = [
    "NO_WINDOW",
    "AttentionOptions",
    "AttentionResult",
    "Fp8CacheResult",
    "KvCacheResult",
    "WindowBounds",
    "attention",
    "attention_with_gradients",
    "bias_of_lists",
    "dense_keys",
    "fp8_cache_reference",
    "keep_mask",
    "kvcache_reference",
    "low_precision",
    "philox_4x32_7",
    "rotate",
    "varlen_attention",
    "varlen_attention_with_gradients",
    "varlen_low_precision",
    "visible_keys",
    "with_qv",
]
