"""One attention call: the declaration of its arguments and results, of which everything else that
lists them is made. Which of them go together, rules.py says.

A field says its type, its default and, in `argument`, what it is to others. From that come the
operators' schemas (operators/support.py), the rules of arrays (call/checks.py), and the extension's
structs, with what autograd keeps and what has a gradient (build_tools/generate/call_structs.py).
The extension also has an AttentionCall's methods that are one expression, a bool or an int.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling

from .tensors import E4M3, E8M0, as_number, check_no_gradient, lse_dtype, round_up_seqlen
from .window import UNLIMITED, WindowSize, window_bounds


class Argument(NamedTuple):
    """What a field of a description is to those that read all of them.

    part: "" for what a backward needs too, "forward" for what it does not, "cache" for what is of
    calls that have no backward, as those over caches, "append" for what writes into a cache,
    "out" for what operators do not have. Of what comes into a backward, "target" for what it
    writes, and how, "extension" for what operators do not have.
    shape: of an array that is checked by it alone: B sequences, Hq query heads, Hk key heads,
    tokens of a cache or pages, each with Hk, and of FP8 latent rows groups of a token's columns;
    "|" between those that it may have; "...": any, for rules.py to restrict. Or like what.
    dtype: of that array, "int32", "int64", "fp32", "e8m0", "lse", softmax_lse's, or "new", that of
    new keys; or of q or the results; with "or" between those that it may have.
    is_strided: kernels read that array by its strides, not as a plain one.
    is_needed: it must not be None.
    is_in_lse: a backward reads it for its own gradient alone, as softmax_lse has the rest of it.
    over_pairs: of queries and keys: what has "?" behind it may be 1. Sq and Sk are
    the lengths, of packed sequences the bounds, or more; Tq and Tk tiles of them.
    by_distance: the shape of such an array instead, where bias_by_distance is True.
    at_least, at_most, below: the range of a number.
    in_float32: what a number is there: "finite", or "normal" where it is above 0.
    """

    part: str = ""
    shape: str = ""
    dtype: str = "int32"
    name_of_cache: str = ""  # what errors of a call over a cache say, if not the field's name
    is_needed: bool = False
    has_gradient: bool = False
    is_in_lse: bool = False
    over_pairs: bool = False
    by_distance: str = ""
    is_strided: bool = False
    at_least: int | None = None
    at_most: int | None = None
    below: int | None = None
    in_float32: str = ""

    def shapes(self) -> tuple[tuple[str | int, ...], ...]:
        """That the array may have: sizes such as "B" or 4, or "tokens" for those of k's rows, with
        "groups" and as many as the array has behind them.
        """
        return tuple(map(sizes_of, self.shape.split("|")))


def sizes_of(shape: str) -> tuple[str | int, ...]:
    """Of a declared shape."""
    sizes = (x.strip() for x in shape.strip(" ()").split(","))
    return tuple(int(x) if x.isdecimal() else x for x in sizes if x)


def argument(default: Any = MISSING, **said: Any) -> Any:
    """A field of a description; `said` is an Argument's."""
    return field(default=default, metadata={"argument": Argument(**said)})


def default_softmax_scale(head_dim: int) -> float:
    return head_dim**-0.5


@dataclass(eq=False)
class AttentionCall:
    """Sequences of one length: q (B, Sq, Hq, D), k (B, Sk, Hk, D), v (B, Sk, Hk, Dv).

    Packed, with cu_seqlens_q: q (total_q, Hq, D), k (total_k, Hk, D), v likewise. Paged, with a
    block_table: k (num_pages, page_size, Hk, D). Over a cache: k (entries, capacity, Hk, D), or
    paged; q of one length or packed. Latent, with qv: scores are those of q by k and of qv by v.
    """

    q: Tensor = argument(has_gradient=True)
    k: Tensor = argument(has_gradient=True, name_of_cache="k_cache")
    v: Tensor = argument(has_gradient=True, name_of_cache="v_cache")
    dropout_p: float = argument(0.0, at_least=0, below=1)
    # default_softmax_scale(D)
    softmax_scale: float | None = argument(None, in_float32="finite")
    causal: bool = argument(False)
    window_size_left: int = argument(-1)  # negative: none
    window_size_right: int = argument(-1)
    softcap: float = argument(0.0, in_float32="normal")  # zero or negative: off
    alibi_slopes: Tensor | None = argument(
        None, shape="(Hq,) | (B, Hq)", dtype="fp32", is_strided=True
    )
    bias: Tensor | None = argument(
        None,
        shape="(B?, Hq?, Sq?, Sk)",
        by_distance="(B?, Hq?, 1, Sq + Sk)",
        dtype="q or fp32",
        has_gradient=True,
        over_pairs=True,
    )
    # element Sq + j - i of the bias is that of query i and key j
    bias_by_distance: bool = argument(False)
    # exp(sink) joins the denominator of every softmax of its head
    sink: Tensor | None = argument(
        None, shape="(Hq,)", dtype="lse", has_gradient=True, is_in_lse=True
    )
    deterministic: bool = argument(False)
    # (2,), int64: a forward's seed and offset; None: drawn
    rng_state: Tensor | None = argument(None, part="forward")
    cu_seqlens_q: Tensor | None = argument(None)  # (B + 1,); lengths and indices are int32
    # of pages the lengths alone, or None
    cu_seqlens_k: Tensor | None = argument(None, shape="(1 + B,)")
    seqused_q: Tensor | None = argument(None, shape="(B,)")
    # of a cache before anything is appended
    seqused_k: Tensor | None = argument(None, shape="(B,)", name_of_cache="cache_seqlens")
    leftpad_k: Tensor | None = argument(None, shape="(B,)", name_of_cache="cache_leftpad")
    # Where a sequence lies in a longer one that others compute the rest of: [stream, first_q,
    # first_k, shift]. Dropout's stream of query head h is stream + h, and it counts queries from
    # first_q and keys from first_k, multiples of 16; window and ALiBi have shift, clamped to
    # +-2^30, instead of seqlen_k - seqlen_q, and window sizes from 2^29 on are none.
    origin: Tensor | None = argument(None, shape="(B, 4)")
    # of packed sequences, upper bounds; 0: not known
    max_seqlen_q: int = argument(0, at_least=0)
    max_seqlen_k: int = argument(0, at_least=0)
    # (B, max_pages)
    block_table: Tensor | None = argument(None, shape="...", part="cache", is_strided=True)
    # which a forward reads, and its derivative in a direction (masks/)
    block_rows: Tensor | None = argument(None, shape="(B?, Hq?, Tq, 2 + Tk)", over_pairs=True)
    # which a backward reads
    block_columns: Tensor | None = argument(None, shape="(B?, Hq?, Tk, 2 + Tq)", over_pairs=True)
    mask_bits: Tensor | None = argument(None, shape="(B?, Hq?, Sq, 4 * Tk)", over_pairs=True)
    return_softmax: bool = argument(False, part="forward")  # S_dmask, where there is dropout
    return_max_logits: bool = argument(False, part="forward")
    # 0: chosen, for pages and caches; others are not split
    num_splits: int = argument(0, at_least=0, at_most=256, part="forward")
    batch_invariant: bool = argument(False, part="forward")
    over_cache: bool = argument(False, part="cache")
    cache_batch_idx: Tensor | None = argument(None, shape="(B,)", part="cache")
    # (B, Sq, Hq, Dv), or packed as q: scores are softmax_scale * (q k^T + qv v^T)
    qv: Tensor | None = argument(None, shape="...", dtype="q", part="cache", is_strided=True)
    # (B, Sq, Hk, n), or packed (total_q, Hk, n): the keys that a query's heads see, by their
    # positions in its sequence; negative: none. Without a qv blocks of keys: what is none of the
    # sequence's is none, and a block stands in a list once
    key_lists: Tensor | None = argument(None, shape="...", is_strided=True)
    # keys that an entry stands for, from its multiple on
    key_list_block: int = argument(1, at_least=1)
    # (B, Sq, Sq), or packed (total_q, n): which of the last Sq keys of its sequence, those of its
    # queries, a query sees
    tree_mask: Tensor | None = argument(
        None, shape="...", dtype="bool", part="cache", is_strided=True
    )
    # (Hq, 2 * reach + 1), over a cache or pages; others have a bias: element reach + j - i -
    # (seqlen_k - seqlen_q), or the first or last one, is added to the score of query i and key j
    relative_bias: Tensor | None = argument(
        None, shape="...", dtype="q or fp32", part="cache", is_strided=True
    )
    # where v alone is of e4m3: k's columns are values too, behind v's
    values_include_rope: bool = argument(False, part="cache")
    # instead of seqused_k, of every sequence of a cache
    seqlen_k: int | None = argument(None, part="cache")
    # (B, Snew, Hk, D), or with bounds (total, Hk, D): appended to the cache
    k_new: Tensor | None = argument(
        None, shape="...", dtype="new", part="append", name_of_cache="k", is_strided=True
    )
    v_new: Tensor | None = argument(
        None, shape="...", dtype="new", part="append", name_of_cache="v", is_strided=True
    )
    cu_seqlens_k_new: Tensor | None = argument(None, shape="(1 + B,)", part="append")
    # (seqlen_rotary, rotary_dim / 2)
    rotary_cos: Tensor | None = argument(None, shape="...", dtype="q", part="append")
    rotary_sin: Tensor | None = argument(None, shape="...", dtype="q", part="append")
    rotary_interleaved: bool = argument(True, part="append")
    # What k and v of e4m3, and q before it was converted, are times. None: 1. v alone may be of
    # e4m3 beside a qv; then a token's columns may have several scales, one for as many each, which
    # may be of e8m0.
    q_descale: Tensor | None = argument(
        None, shape="(Hk,) | (B, Hk)", dtype="fp32", is_strided=True, part="cache"
    )
    k_descale: Tensor | None = argument(
        None, shape="(Hk,) | (B, Hk) | tokens", dtype="fp32", is_strided=True, part="cache"
    )
    v_descale: Tensor | None = argument(
        None,
        shape="(Hk,) | (B, Hk) | tokens | groups",
        dtype="fp32 or e8m0",
        is_strided=True,
        part="cache",
    )
    # where q is of e4m3, and products are: what is in 16 bits is fp16, not bf16
    out_is_half: bool = argument(False, part="cache")
    # scales of new keys and values are made of them, and written into k_descale and v_descale
    quantizes_tokens: bool = argument(False, part="append")
    fp32_results: bool = argument(False)  # out, dq, dk, dv of softmax_lse's dtype; no masks
    # multiprocessors that the kernels of Hopper's family leave
    sm_margin: int = argument(0, at_least=0)
    # of out, what rounding takes from it (rounding.py), for a backward; where autograd records a
    # call, of its own accord
    keeps_rounding: bool = argument(False, part="forward")
    # to be written, by the extension or after an operator
    out: Tensor | None = argument(None, part="out")
    # autograd does without that
    saves_memory: bool = argument(False, part="out")

    def is_packed(self) -> bool:
        return self.cu_seqlens_q is not None

    def reads_in_place(self) -> bool:
        """Whether k and v are a cache or pages, which nobody copies and nothing differentiates."""
        return self.over_cache or self.block_table is not None

    def is_fp8(self) -> bool:
        """Whether k, and with it v, is of e4m3."""
        return self.k.dtype == E4M3

    def multiplies_fp8(self) -> bool:
        """Whether q is of e4m3 too, and so are the products."""
        return self.q.dtype == E4M3

    def is_fp8_latent(self) -> bool:
        """Whether v alone is of e4m3: latent rows beside rotary columns in 16 bits."""
        return (
            self.qv is not None
            and not self.is_of_one_length()
            and self.v.dtype == E4M3
            and self.k.dtype != E4M3
        )

    def has_fp8_values(self) -> bool:
        """Whether v is of e4m3, with k or alone."""
        return self.v.dtype == E4M3

    def has_e8m0_scales(self) -> bool:
        """Whether scales of v are bytes that stand for powers of two."""
        return self.v_descale is not None and self.v_descale.dtype == E8M0

    def appends_fp8(self) -> bool:
        """Whether new keys are numbers of a cache of e4m3 already."""
        return self.k_new is not None and self.is_fp8() and self.k_new.dtype == E4M3

    def is_of_one_length(self) -> bool:
        """Whether all sequences have the length that q and k say."""
        return self.cu_seqlens_q is None and not self.over_cache

    def is_dense(self) -> bool:
        """Whether k has as many keys for each sequence, and is neither a cache nor pages."""
        return self.cu_seqlens_q is None and not self.reads_in_place()

    def reads_e4m3(self) -> bool:
        """Whether k or v, one of which may be wrong, is of e4m3 where both may be."""
        return (
            not self.is_of_one_length()
            and not self.is_fp8_latent()
            and (self.k.dtype == E4M3 or self.v.dtype == E4M3)
        )

    def has_cache_seqlens(self) -> bool:
        return self.seqused_k is not None or self.seqlen_k is not None

    def needs_cu_seqlens_k(self) -> bool:
        """Whether nothing else tells the lengths of keys."""
        return (
            self.is_packed()
            and not self.over_cache
            and (self.block_table is None or self.seqused_k is None)
        )

    def reads_entries_in_order(self) -> bool:
        """Whether a sequence's entry of the cache is that of its own number."""
        return self.over_cache and self.block_table is None and self.cache_batch_idx is None

    def lists_blocks(self) -> bool:
        """Whether queries have lists of blocks of keys, and no qv."""
        return self.key_lists is not None and self.qv is None

    def has_idle_block(self) -> bool:
        """Whether key_list_block is not 1 where entries are of one key, or there are none."""
        return self.key_list_block != 1 and not self.lists_blocks()

    def reads_plain_keys_in_place(self) -> bool:
        return self.reads_in_place() and self.qv is None

    def has_lists(self) -> bool:
        return self.block_rows is not None or self.block_columns is not None

    def has_masks(self) -> bool:
        """Whether pairs are hidden or scores changed by tensors over them."""
        return self.has_lists() or self.bias is not None

    def packed(self) -> AttentionCall:
        """The call with its sequences, all of one length, packed."""
        (batch, seqlen_q), seqlen_k = self.q.shape[:2], self.k.shape[1]
        entries = torch.arange(batch + 1, device=self.q.device, dtype=torch.int32)
        q, k, v = (x.flatten(0, 1) for x in (self.q, self.k, self.v))
        bounds: dict[str, Any] = {"max_seqlen_q": seqlen_q, "max_seqlen_k": seqlen_k}
        bounds |= {"cu_seqlens_q": entries * seqlen_q, "cu_seqlens_k": entries * seqlen_k}
        return replace(self, q=q, k=k, v=v, **bounds)

    def window(self) -> tuple[int, int]:
        """(left, right): keys that a query sees on either side of its own; -1: all of them."""
        right = 0 if self.causal else self.window_size_right
        return max(self.window_size_left, -1), max(right, -1)

    def is_windowed(self) -> bool:
        """Whether what a query sees depends on where it stands."""
        is_bounded = self.window_size_left >= 0 or self.window_size_right >= 0
        return self.causal or is_bounded or self.tree_mask is not None

    def bounds_right(self) -> bool:
        """Whether window_size has a right bound."""
        return self.window_size_right >= 0

    def batch(self) -> int:
        """Sequences of the call."""
        return self.q.shape[0] if self.cu_seqlens_q is None else self.cu_seqlens_q.shape[0] - 1

    def heads_q(self) -> int:
        return self.q.shape[-2]

    def heads_k(self) -> int:
        return self.k.shape[-2]

    def head_dim(self) -> int:
        """That of q."""
        return self.q.shape[-1]

    def head_dim_k(self) -> int:
        return self.k.shape[-1]

    def head_dim_v(self) -> int:
        return self.v.shape[-1]

    def value_columns(self) -> int:
        """Those of out."""
        return self.v.shape[-1] + (self.k.shape[-1] if self.values_include_rope else 0)

    def entries(self) -> int:
        """Sequences that k, neither packed nor pages, has keys of."""
        return self.k.shape[0]

    def capacity(self) -> int:
        """Rows that a cache has for one sequence."""
        return self.k.shape[1] * (1 if self.block_table is None else self.block_table.shape[1])

    def scale(self) -> float:
        given = self.softmax_scale
        return default_softmax_scale(self.q.shape[-1]) if given is None else given

    def out_shape(self) -> tuple[int, ...]:
        return *self.q.shape[:-1], self.value_columns()

    def lse_shape(self) -> tuple[int, ...]:
        if self.is_packed():
            total_q, heads_q, _ = self.q.shape
            return heads_q, total_q
        batch, seqlen_q, heads_q, _ = self.q.shape
        return batch, heads_q, seqlen_q

    def lse_dtype(self) -> torch.dtype:
        return lse_dtype(self.q.dtype)

    def dtype(self) -> torch.dtype:
        """q's; where that is e4m3 the one in 16 bits that others have."""
        if self.q.dtype != E4M3:
            return self.q.dtype
        return torch.float16 if self.out_is_half else torch.bfloat16

    def result_dtype(self) -> torch.dtype:
        """Of out, dq, dk and dv."""
        return self.lse_dtype() if self.fp32_results else self.dtype()

    def returns_rounding(self) -> bool:
        """Whether there is an out_rounding: results in 32 bits and more are as computed."""
        is_rounded = self.result_dtype() != self.lse_dtype()
        has_backward = not self.reads_in_place() and self.qv is self.tree_mask is None
        return self.keeps_rounding and is_rounded and has_backward

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


def options_of(
    dropout_p: Any,
    softmax_scale: Any,
    causal: Any,
    window_size: WindowSize,
    softcap: Any,
    alibi_slopes: Any,
    deterministic: Any,
) -> dict[str, Any]:
    """Fields of a call: the options that every public function has, but for what is off. TypeError
    and ValueError name the argument.
    """
    options: dict[str, Any] = {"causal": bool(causal)}
    if not (type(dropout_p) is type(softcap) is float):
        dropout_p, softcap = as_number("dropout_p", dropout_p), as_number("softcap", softcap)
    if dropout_p or softcap or deterministic:
        options["dropout_p"], options["softcap"] = dropout_p, softcap
        options["deterministic"] = bool(deterministic)
    if alibi_slopes is not None:
        check_no_gradient("alibi_slopes", alibi_slopes)
        options["alibi_slopes"] = alibi_slopes
    if softmax_scale is not None:
        if type(softmax_scale) is not float:
            softmax_scale = as_number("softmax_scale", softmax_scale, "None or a number")
        options["softmax_scale"] = softmax_scale
    if window_size is not UNLIMITED:
        options["window_size_left"], options["window_size_right"] = window_bounds(window_size)
    return options


@dataclass(eq=False)
class Incoming:
    """What a backward has beyond the forward's arguments: gradients of the results, and these.

    dout or dlse None: the loss does not depend on it. out and softmax_lse may be those of a whole
    that this call computed a part of. dq, dk, dv: to be written, if not None; accumulate: to be
    added to, all three, of a call with fp32_results.
    """

    dout: Tensor | None = argument(shape="out", dtype="q")
    dlse: Tensor | None = argument(shape="lse", dtype="lse")
    out: Tensor = argument(shape="out", dtype="q", is_needed=True)
    softmax_lse: Tensor = argument(shape="lse", dtype="lse", is_needed=True)
    rng_state: Tensor | None = argument()
    wants_dbias: bool = argument(False)
    # None or empty: out alone is known
    out_rounding: Tensor | None = argument(None, shape="out", dtype="int8")
    dq: Tensor | None = argument(None, part="target", shape="q", dtype="results")
    dk: Tensor | None = argument(None, part="target", shape="k", dtype="results")
    dv: Tensor | None = argument(None, part="target", shape="v", dtype="results")
    accumulate: bool = argument(False, part="target")
    wants_softmax_d: bool = argument(False, part="extension")


@dataclass(eq=False)
class Tangents:
    """A direction in which results are differentiated: forward mode's tangents of the arguments
    that have a gradient, each like the argument, None for zero; and those of the results.
    """

    tq: Tensor | None = argument(None, shape="q", dtype="q")
    tk: Tensor | None = argument(None, shape="k", dtype="q")
    tv: Tensor | None = argument(None, shape="v", dtype="q")
    tbias: Tensor | None = argument(None, shape="bias", dtype="bias")
    tsink: Tensor | None = argument(None, shape="sink", dtype="lse")
    tout: Tensor | None = argument(None, part="result", shape="out", dtype="q")
    tlse: Tensor | None = argument(None, part="result", shape="lse", dtype="lse")
    # None or empty: tout alone is known
    tout_rounding: Tensor | None = argument(None, part="result", shape="out", dtype="int8")

    def with_results(self, of_results: Sequence[Tensor]) -> Tangents:
        """The direction and what attention_jvp returned of it."""
        return replace(self, **dict(zip(OF_RESULTS, of_results, strict=True)))


class Results(NamedTuple):
    """Of a forward, in the order in which operators and the extension return them."""

    out: Tensor  # as q, of the columns of values
    softmax_lse: Tensor  # (B, Hq, Sq), packed (Hq, total_q), natural logarithm
    # probabilities before dropout, negative where dropped; None or empty where not wanted
    S_dmask: Tensor | None
    rng_state: Tensor | None  # (2,), int64: seed and offset; None or empty without dropout
    # as out, int8: what rounding takes from it (rounding.py); None or empty where not wanted
    out_rounding: Tensor | None = None
    # (B, Hq), as softmax_lse: the largest score of a head's softmax, -inf of none, the sink none of
    # them; None or empty where not wanted
    max_logits: Tensor | None = None


def forms_of_results(call: AttentionCall) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of each as operators return it: (0,) for what is not wanted."""
    out = call.out_shape()
    return {
        "out": (out, call.result_dtype()),
        "softmax_lse": (call.lse_shape(), call.lse_dtype()),
        "S_dmask": (call.s_dmask_shape(), call.dtype()),
        "rng_state": ((2 if call.dropout_p > 0.0 else 0,), torch.int64),
        "out_rounding": (out if call.returns_rounding() else (0,), torch.int8),
        "max_logits": (
            (call.batch(), call.heads_q()) if call.return_max_logits else (0,),
            call.lse_dtype(),
        ),
    }


class Gradients(NamedTuple):
    """Of a backward, likewise. What is not wanted is None or empty."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    softmax_d: Tensor | None  # rowsum(dout * out) - dlse
    dbias: Tensor | None
    dsink: Tensor | None


ARGUMENTS: dict[str, Argument] = {x.name: x.metadata["argument"] for x in fields(AttentionCall)}


def _names(is_wanted: Callable[[Argument], bool]) -> tuple[str, ...]:
    return tuple(name for name, said in ARGUMENTS.items() if is_wanted(said))


# The arguments of the operator that writes into a cache; an operator makes its results itself.
FIELDS = _names(lambda said: said.part != "out")
# What the operator that does not write does without.
APPENDED = _names(lambda said: said.part == "append")
READ = tuple(name for name in FIELDS if name not in APPENDED)
TENSORS = tuple(
    x.name for x in fields(AttentionCall) if x.name in FIELDS and "Tensor" in str(x.type)
)
# What a backward's operators take: their random numbers are those that the forward had (Incoming).
OF_BACKWARD = tuple(name for name in READ if name != "rng_state")
DIFFERENTIABLE = _names(lambda said: said.has_gradient)
# Of a call over e4m3, what its backward refuses the gradients of.
WITH_SCALES = (*DIFFERENTIABLE, "q_descale", "k_descale", "v_descale")
OVER_PAIRS = _names(lambda said: said.over_pairs)
# Numbers that have a range.
RANGES = _names(lambda said: said.at_least is not None or said.in_float32 != "")
# (name, shapes, dtype) of what is checked by its declaration alone.
ARRAYS = tuple(
    (name, x.shapes(), x.dtype) for name, x in ARGUMENTS.items() if x.shape and not x.over_pairs
)
_INCOMING: dict[str, Argument] = {x.name: x.metadata["argument"] for x in fields(Incoming)}
# Arguments of operators among what comes into a backward, and what of it has a shape.
INCOMING = tuple(name for name, said in _INCOMING.items() if said.part == "")
INCOMING_AND_TARGETS = tuple(name for name, x in _INCOMING.items() if x.part != "extension")
INCOMING_ARRAYS = {name: said for name, said in _INCOMING.items() if said.shape}
TARGETS = tuple(name for name, said in INCOMING_ARRAYS.items() if said.part == "target")
# What a derivative in a direction has of what comes into a backward.
OF_FORWARD = ("out", "softmax_lse", "rng_state", "out_rounding")
TANGENTS: dict[str, Argument] = {x.name: x.metadata["argument"] for x in fields(Tangents)}
DIRECTIONS = tuple(name for name, said in TANGENTS.items() if said.part == "")
# What a derivative in a direction returns
OF_RESULTS = tuple(name for name, said in TANGENTS.items() if said.part == "result")


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
    k_new: str = "k_new"
    v_new: str = "v_new"


NAMES = Names()
CACHE_NAMES = Names(
    **{name: said.name_of_cache for name, said in ARGUMENTS.items() if said.name_of_cache}
)
