"""One attention call: the description that every public function makes of its arguments, and that
operators, both backends and the extension (csrc/torch_binding/arguments.h) read.

An argument is a field here and in arguments.h, a rule in checks/calls.py, and what uses it.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling

from .checks.tensors import lse_dtype, round_up_seqlen


@dataclass(eq=False)
class AttentionCall:
    """Sequences of one length: q (B, Sq, Hq, D), k (B, Sk, Hk, D), v (B, Sk, Hk, Dv).

    Packed, with cu_seqlens_q: q (total_q, Hq, D), k (total_k, Hk, D), v likewise. Paged, with a
    block_table: k (num_pages, page_size, Hk, D). Over a cache: k (entries, capacity, Hk, D), or
    paged; q of one length or packed.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    dropout_p: float = 0.0
    softmax_scale: float | None = None  # D ** -0.5
    causal: bool = False
    window_size_left: int = -1  # negative: none
    window_size_right: int = -1
    softcap: float = 0.0  # zero or negative: off
    alibi_slopes: Tensor | None = None  # (Hq,) or (B, Hq), fp32
    bias: Tensor | None = None  # (B|1, Hq|1, Sq|1, Sk), of q's dtype or fp32
    sink: Tensor | None = None  # (Hq,), of softmax_lse's dtype
    deterministic: bool = False
    rng_state: Tensor | None = None  # (2,), int64: a forward's seed and offset; None: drawn
    cu_seqlens_q: Tensor | None = None  # (B + 1,); lengths and indices are int32
    cu_seqlens_k: Tensor | None = None  # (B + 1,); of pages the lengths alone, or None
    seqused_q: Tensor | None = None  # (B,)
    seqused_k: Tensor | None = None  # (B,); of a cache before anything is appended
    leftpad_k: Tensor | None = None  # (B,)
    # (B, 4), where a sequence lies in a longer one that others compute the rest of: [stream,
    # first_q, first_k, shift]. Dropout's stream of query head h is stream + h, and it counts
    # queries from first_q and keys from first_k, multiples of 16; window and ALiBi have shift,
    # clamped to +-2^30, instead of seqlen_k - seqlen_q, and window sizes from 2^29 on are none.
    origin: Tensor | None = None
    max_seqlen_q: int = 0  # of packed sequences, upper bounds; 0: not known
    max_seqlen_k: int = 0
    block_table: Tensor | None = None  # (B, max_pages)
    block_rows: Tensor | None = None  # (B|1, Hq|1, Tq, 2 + Tk), which a forward reads (masks/)
    block_columns: Tensor | None = None  # (B|1, Hq|1, Tk, 2 + Tq), which a backward reads
    mask_bits: Tensor | None = None  # (B|1, Hq|1, Sq, 4 * Tk)
    return_softmax: bool = False  # S_dmask, where there is dropout
    num_splits: int = 0  # 0: chosen, for pages and caches; others are not split
    batch_invariant: bool = False
    over_cache: bool = False
    cache_batch_idx: Tensor | None = None  # (B,)
    seqlen_k: int | None = None  # instead of seqused_k, of every sequence of a cache
    k_new: Tensor | None = None  # (B, Snew, Hk, D), or packed (total, Hk, D): appended to the cache
    v_new: Tensor | None = None
    cu_seqlens_k_new: Tensor | None = None  # (B + 1,); None for packed ones: cu_seqlens_q
    rotary_cos: Tensor | None = None  # (seqlen_rotary, rotary_dim / 2)
    rotary_sin: Tensor | None = None
    rotary_interleaved: bool = True
    fp32_results: bool = False  # out, dq, dk and dv of softmax_lse's dtype, not q's; no masks
    sm_margin: int = 0  # multiprocessors that the kernels of Hopper's family leave to others
    out: Tensor | None = None  # to be written, by the extension or after an operator

    def is_packed(self) -> bool:
        return self.cu_seqlens_q is not None

    def reads_in_place(self) -> bool:
        """Whether k and v are a cache or pages, which nobody copies and nothing differentiates."""
        return self.over_cache or self.block_table is not None

    def has_masks(self) -> bool:
        """Whether pairs are hidden or scores changed by tensors over them."""
        return self.block_rows is not None or self.bias is not None

    def batch(self) -> int:
        """Sequences of the call."""
        return self.q.shape[0] if self.cu_seqlens_q is None else self.cu_seqlens_q.shape[0] - 1

    def capacity(self) -> int:
        """Rows that a cache has for one sequence."""
        rows = self.k.shape[1]
        return rows if self.block_table is None else self.block_table.shape[1] * rows

    def scale(self) -> float:
        return self.q.shape[-1] ** -0.5 if self.softmax_scale is None else self.softmax_scale

    def lse_shape(self) -> tuple[int, ...]:
        if self.is_packed():
            total_q, heads_q, _ = self.q.shape
            return heads_q, total_q
        batch, seqlen_q, heads_q, _ = self.q.shape
        return batch, heads_q, seqlen_q

    def lse_dtype(self) -> torch.dtype:
        return lse_dtype(self.q.dtype)

    def result_dtype(self) -> torch.dtype:
        """Of out, dq, dk and dv."""
        return self.lse_dtype() if self.fp32_results else self.q.dtype

    def softmax_d_shape(self) -> tuple[int, ...]:
        """As lse_shape, with rows rounded up to 128 unless they are packed."""
        shape = self.lse_shape()
        return shape if self.is_packed() else (*shape[:2], round_up_seqlen(shape[2]))

    def wants_s_dmask(self) -> bool:
        return self.return_softmax and self.dropout_p > 0.0

    def s_dmask_shape(self) -> tuple[int, ...]:
        """(0,) where it is not wanted."""
        if not self.wants_s_dmask():
            return (0,)
        if self.is_packed():
            return self.batch(), self.q.shape[1], self.max_seqlen_q, self.max_seqlen_k
        return *self.lse_shape(), self.k.shape[1]


def describe(**given: Any) -> AttentionCall:
    """AttentionCall(**given), q, k and v among them, in less time: what is not given stays with the
    class. A small call's host time shows what its description costs.
    """
    if is_compiling():
        return AttentionCall(**given)
    call = object.__new__(AttentionCall)
    call.__dict__ = given
    return call


# The arguments of the operator that writes into a cache; an operator makes its results itself.
FIELDS = tuple(field.name for field in fields(AttentionCall) if field.name != "out")
# What the operator that does not write does without.
APPENDED = ("k_new", "v_new", "cu_seqlens_k_new", "rotary_cos", "rotary_sin", "rotary_interleaved")
READ = tuple(name for name in FIELDS if name not in APPENDED)
TENSORS = tuple(
    x.name for x in fields(AttentionCall) if x.name in FIELDS and "Tensor" in str(x.type)
)
# What a backward needs of it: its random numbers are those that the forward had (Incoming).
OF_BACKWARD = tuple(name for name in READ if name != "rng_state")
DIFFERENTIABLE = ("q", "k", "v", "bias", "sink")


@dataclass(eq=False)
class Incoming:
    """What a backward has beyond the forward's arguments: gradients of the results, and these.

    dout or dlse None: the loss does not depend on it. out and softmax_lse may be those of a whole
    that this call computed a part of. dq, dk, dv: to be written, if not None; accumulate: to be
    added to, all three, of a call with fp32_results.
    """

    dout: Tensor | None
    dlse: Tensor | None
    out: Tensor
    softmax_lse: Tensor
    rng_state: Tensor | None
    wants_dbias: bool = False
    dq: Tensor | None = None
    dk: Tensor | None = None
    dv: Tensor | None = None
    accumulate: bool = False
    wants_softmax_d: bool = False


class Names(NamedTuple):
    """What a caller knows arguments as: slices of a packed tensor are errors of that tensor."""

    q: str = "q"
    k: str = "k"
    v: str = "v"
    cu_seqlens_q: str = "cu_seqlens_q"
    cu_seqlens_k: str = "cu_seqlens_k"
    max_seqlen_q: str = "max_seqlen_q"
    max_seqlen_k: str = "max_seqlen_k"
    total_q: str = "total_q"
    total_k: str = "total_k"
    seqused_k: str = "seqused_k"
    leftpad_k: str = "leftpad_k"


NAMES = Names()
CACHE_NAMES = Names(k="k_cache", v="v_cache", seqused_k="cache_seqlens", leftpad_k="cache_leftpad")
