"""Bands of keys, by the plain rule of positions, and sequences in every layout that has bands.

Query i of a sequence stands at key i + seqlen_k - seqlen_q; a band has the keys whose distance from
there is from first to last, of any signs, None for no end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from flash_attn_cuda.call.fields import AttentionCall
from flash_attn_cuda.call.tensors import lse_dtype
from flash_attn_cuda.integrations import flash_attention_4
from flash_attn_cuda.operators.derivatives import run_operator
from tests import reference
from tests.cases.attention import DTYPE_NAMES, AttentionCase
from tests.cases.harness import missing_row
from tests.reference import AttentionOptions, AttentionResult

Ends = tuple[int | None, int | None]
Lengths = tuple[tuple[int, int], ...]  # (queries, keys) of each sequence
Window = tuple[Any, Any]


def ends_of_flash_attention_2(causal: bool, window: Window) -> Ends:
    """Of window_size in FlashAttention-2's docstrings: query i sees keys between [i + seqlen_k -
    seqlen_q - left, i + seqlen_k - seqlen_q + right], and -1 is infinite. FlashAttention-3's, those
    of vLLM, torch's varlen_attn and ring-flash-attention are the same.
    """
    left, right = (None if end is None or end < 0 else end for end in window)
    return None if left is None else -left, 0 if causal else right


def ends_of_flash_attention_4(causal: bool, window: Window) -> Ends:
    """Of window_size in flash_attn/cute/interface.py of flash-attn-4, 4.0.0b36: None is no end, as
    are two negative numbers; then causal is a right end of 0. Any other number is an end.
    """
    left, right = window
    if None not in (left, right) and left < 0 and right < 0:
        left = right = None
    return None if left is None else -left, 0 if causal else right


def visible(ends: Ends, seqlen_q: int, seqlen_k: int) -> Tensor:
    """(Sq, Sk) booleans."""
    distance = torch.arange(seqlen_k)[None] - torch.arange(seqlen_q)[:, None] - seqlen_k + seqlen_q
    first, last = ends
    seen = torch.ones_like(distance, dtype=torch.bool)
    if first is not None:
        seen &= distance >= first
    if last is not None:
        seen &= distance <= last
    return seen


# -- sequences -------------------------------------------------------------------------------------


def bounds_of(lengths: Sequence[int], device: str) -> Tensor:
    """cu_seqlens."""
    return torch.tensor([*accumulate(lengths, initial=0)], dtype=torch.int32, device=device)


@dataclass
class Rows:
    """q (total_q, Hq, D), k (total_k, Hk, D), v (total_k, Hk, Dv) of packed sequences, gradients of
    their results, and a sink (Hq,) or None.
    """

    lengths: Lengths
    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    dlse: Tensor
    sink: Tensor | None = None
    pages: dict[int, tuple[Tensor, ...]] = field(default_factory=dict)

    @property
    def device(self) -> str:
        return str(self.q.device)

    @cached_property
    def lengths_q(self) -> list[int]:
        return [x for x, _ in self.lengths]

    @cached_property
    def lengths_k(self) -> list[int]:
        return [x for _, x in self.lengths]

    def packed(self) -> dict[str, Any]:
        return {
            "cu_seqlens_q": bounds_of(self.lengths_q, self.device),
            "cu_seqlens_k": bounds_of(self.lengths_k, self.device),
            "max_seqlen_q": max(self.lengths_q, default=0),
            "max_seqlen_k": max(self.lengths_k, default=0),
        }

    def used(self) -> dict[str, Tensor]:
        return {
            "seqused_q": bounds_of(self.lengths_q, self.device).diff(),
            "seqused_k": bounds_of(self.lengths_k, self.device).diff(),
        }

    def batch(self, x: Tensor, lengths: Sequence[int]) -> Tensor:
        """(B, longest and 3, ...): rows behind a sequence's hold NaN."""
        rows = x.new_full((len(lengths), max(lengths, default=0) + 3, *x.shape[1:]), torch.nan)
        return rows.index_put(self.places(lengths), x)

    def places(self, lengths: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Of every packed row: its sequence, and its place in it."""
        counts = torch.tensor(lengths, dtype=torch.int64, device=self.device)
        owner = torch.arange(len(lengths), device=self.device).repeat_interleave(counts)
        return owner, torch.cat([torch.arange(n, device=self.device) for n in lengths])

    def of_pages(self, page_size: int) -> tuple[Tensor, Tensor, Tensor]:
        """(k, v, block_table): pages in a random order, with NaN behind a sequence."""
        if page_size not in self.pages:
            longest = -(-max(self.lengths_k) // page_size) * page_size
            count = len(self.lengths) * longest // page_size
            order = torch.randperm(count, generator=torch.Generator().manual_seed(1))
            table = order.to(self.device, torch.int32).view(len(self.lengths), -1)
            pools = []
            for x in (self.k, self.v):
                rows = x.new_full((len(self.lengths), longest, *x.shape[1:]), torch.nan)
                rows = rows.index_put(self.places(self.lengths_k), x)
                pool = rows.reshape(count, page_size, *x.shape[1:])
                pools.append(pool[order.argsort().to(self.device)])
            self.pages[page_size] = (*pools, table)
        return self.pages[page_size]

    def to_packed(self, out: Tensor, softmax_lse: Tensor) -> tuple[Tensor, Tensor]:
        """Of results (B, Sq, Hq, Dv) and (B, Hq, Sq): the rows of sequences."""
        places = self.places(self.lengths_q)
        return out[places], softmax_lse.transpose(1, 2)[places].T


def make_rows(
    lengths: Lengths,
    *,
    device: str = "cpu",
    dtype: torch.dtype = torch.float64,
    heads: tuple[int, int] = (4, 2),
    head_dim: int = 16,
    head_dim_v: int | None = None,
    has_sink: bool = False,
    seed: int = 0,
) -> Rows:
    made = torch.Generator().manual_seed(seed)
    total_q, total_k = (sum(x) for x in zip(*lengths, strict=True))
    columns = head_dim if head_dim_v is None else head_dim_v
    of_lse = torch.float64 if dtype == torch.float64 else torch.float32

    def normal(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, generator=made, dtype=torch.float64).to(device, dtype)

    return Rows(
        lengths,
        q=normal(total_q, heads[0], head_dim),
        k=normal(total_k, heads[1], head_dim),
        v=normal(total_k, heads[1], columns),
        dout=normal(total_q, heads[0], columns),
        dlse=normal(heads[0], total_q, dtype=of_lse),
        sink=normal(heads[0], dtype=torch.float32) if has_sink else None,
    )


# -- results ---------------------------------------------------------------------------------------

# (rows with leaves, causal, window) -> packed (out, softmax_lse)
Attend = Callable[[Rows, bool, Window], tuple[Tensor, Tensor]]


def run(
    attend: Attend, rows: Rows, causal: bool, window: Window, *, backward: bool = True
) -> AttentionResult:
    """Results and gradients of a call on these rows."""
    if not backward:
        with torch.no_grad():
            return AttentionResult(*attend(rows, causal, window))
    leaves = [x.detach().requires_grad_() for x in (rows.q, rows.k, rows.v)]
    sink = None if rows.sink is None else rows.sink.detach().requires_grad_()
    of_leaves = Rows(rows.lengths, *leaves, rows.dout, rows.dlse, sink)
    out, lse = attend(of_leaves, causal, window)
    wanted = leaves if sink is None else [*leaves, sink]
    gradients = torch.autograd.grad((out, lse), wanted, (rows.dout, rows.dlse))
    named = dict(zip(("dq", "dk", "dv", "dsink"), gradients, strict=False))
    return AttentionResult(out.detach(), lse.detach(), **named)


def expected(
    rows: Rows, ends: Ends, *, low: bool = False, backward: bool = True, **features: Any
) -> AttentionResult:
    """The reference's results under a mask of the visible pairs; low: of the inputs' dtype."""
    most = (max(rows.lengths_q, default=0), max(rows.lengths_k, default=0))
    mask = torch.zeros(len(rows.lengths), 1, *most, dtype=torch.bool)
    for b, (seqlen_q, seqlen_k) in enumerate(rows.lengths):
        mask[b, 0, :seqlen_q, :seqlen_k] = visible(ends, seqlen_q, seqlen_k)
    function = reference.varlen_low_precision if low else reference.varlen_attention_with_gradients
    sink = None if rows.sink is None else rows.sink.to(torch.float32 if low else torch.float64)
    bounds = rows.packed()
    options = AttentionOptions(mask=mask.to(rows.device), sink=sink, **features)
    result = function(
        *(rows.q, rows.k, rows.v, rows.dout, rows.dlse),
        **{name: bounds[name] for name in ("cu_seqlens_q", "cu_seqlens_k")},
        options=options,
    )
    if not backward:
        result.dq = result.dk = result.dv = result.dsink = None
    return result


# -- bands, in every layout -----------------------------------------------------------------------


def attend_dense(rows: Rows, causal: bool, window: Window, **options: Any) -> Any:
    """Of sequences of one length."""
    batch = len(rows.lengths)
    q, k, v = (x.unflatten(0, (batch, -1)) for x in (rows.q, rows.k, rows.v))
    out, lse = flash_attention_4.flash_attn_func(
        *(q, k, v),
        causal=causal,
        window_size=window,
        learnable_sink=rows.sink,
        return_lse=True,
        **options,
    )
    return out.flatten(0, 1), lse.transpose(0, 1).flatten(1)


def attend_packed(rows: Rows, causal: bool, window: Window, **options: Any) -> Any:
    return flash_attention_4.flash_attn_varlen_func(
        *(rows.q, rows.k, rows.v),
        **rows.packed(),
        causal=causal,
        window_size=window,
        learnable_sink=rows.sink,
        return_lse=True,
        **options,
    )


def attend_used(rows: Rows, causal: bool, window: Window, **options: Any) -> Any:
    """Of the first rows of sequences in longer ones."""
    q = rows.batch(rows.q, rows.lengths_q)
    k, v = (rows.batch(x, rows.lengths_k) for x in (rows.k, rows.v))
    results = flash_attention_4.flash_attn_varlen_func(
        *(q, k, v),
        **rows.used(),
        causal=causal,
        window_size=window,
        learnable_sink=rows.sink,
        return_lse=True,
        **options,
    )
    return rows.to_packed(*results)


def attend_pages(
    rows: Rows, causal: bool, window: Window, page_size: int = 4, **options: Any
) -> Any:
    """Without gradients."""
    k, v, table = rows.of_pages(page_size)
    bounds = rows.packed()
    return flash_attention_4.flash_attn_varlen_func(
        *(rows.q, k, v),
        cu_seqlens_q=bounds["cu_seqlens_q"],
        max_seqlen_q=bounds["max_seqlen_q"],
        seqused_k=rows.used()["seqused_k"],
        page_table=table,
        causal=causal,
        window_size=window,
        learnable_sink=rows.sink,
        return_lse=True,
        **options,
    )


def attend_by_origin(
    rows: Rows, causal: bool, window: Window, softcap: float = 0.0, deterministic: bool = False
) -> Any:
    """By AttentionCall.origin, which moves the bands of packed sequences in another way."""
    shift, left, right = moved_window(ends_of_flash_attention_4(causal, window))
    most = 2**30
    origin = torch.zeros(len(rows.lengths), 4, dtype=torch.int32)
    lengths_k, lengths_q = torch.tensor(rows.lengths_k), torch.tensor(rows.lengths_q)
    origin[:, 3] = (lengths_k - lengths_q + shift).clamp(-most, most)
    call = AttentionCall(
        *(rows.q, rows.k, rows.v),
        **rows.packed(),
        origin=origin.to(rows.device),
        window_size_left=left,
        window_size_right=right,
        softcap=softcap,
        deterministic=deterministic,
        sink=None if rows.sink is None else rows.sink.to(lse_dtype(rows.q.dtype)),
    )
    return run_operator(call)[:2]


def moved_window(ends: Ends) -> tuple[int, int, int]:
    """(shift, left, right), negative for unlimited: a window around i + shift."""
    first, last = (None if x is None else max(-(2**29), min(x, 2**29)) for x in ends)
    if first is None:
        return (0, -1, -1) if last is None else (min(last, 0), -1, max(last, 0))
    if last is None:
        return max(first, 0), max(-first, 0), -1
    if first > last:
        return -(2**30), 0, 0
    shift = max(first, min(last, 0))
    return shift, shift - first, last - shift


LAYOUTS = {
    "dense": attend_dense,
    "packed": attend_packed,
    "used": attend_used,
    "pages": attend_pages,
    "origin": attend_by_origin,
}


@dataclass(frozen=True)
class BandCase:
    """A call of FlashAttention-4's functions, or of the operator by an origin; a dense one has
    sequences of one length.
    """

    layout: str
    lengths: Lengths
    window: Window
    causal: bool = False
    heads: tuple[int, int] = (4, 2)
    head_dim: int = 64
    head_dim_v: int | None = None
    dtype: torch.dtype = torch.bfloat16
    softcap: float = 0.0
    has_sink: bool = False
    deterministic: bool = False
    device: str = "cpu"

    def has_backward(self) -> bool:
        return self.layout != "pages"

    def missing_row(self) -> str | None:
        """What the build lacks for this case, or None."""
        of_shape = AttentionCase(
            head_dim=self.head_dim,
            head_dim_v=self.head_dim_v,
            dtype=self.dtype,
            causal=True,
            softcap=self.softcap,
            deterministic=self.deterministic,
        )
        further = () if self.has_backward() else ("paged_kv",)
        return missing_row(of_shape, backward=self.has_backward(), further=further)

    def rows(self, seed: int = 0) -> Rows:
        return make_rows(
            self.lengths,
            device=self.device,
            dtype=self.dtype,
            heads=self.heads,
            head_dim=self.head_dim,
            head_dim_v=self.head_dim_v,
            has_sink=self.has_sink,
            seed=seed,
        )

    def run(self, rows: Rows) -> AttentionResult:
        def attend(rows: Rows, causal: bool, window: Window) -> tuple[Tensor, Tensor]:
            options = {"softcap": self.softcap, "deterministic": self.deterministic}
            return LAYOUTS[self.layout](rows, causal, window, **options)

        return run(attend, rows, self.causal, self.window, backward=self.has_backward())

    def reference(self, rows: Rows) -> tuple[AttentionResult, AttentionResult]:
        """(fp64 result, naive low-precision result) for tolerance.assert_close."""
        ends = ends_of_flash_attention_4(self.causal, self.window)
        options = {"softcap": self.softcap, "backward": self.has_backward()}
        exact = expected(rows, ends, **options)
        return exact, expected(rows, ends, low=True, **options)

    def __str__(self) -> str:
        parts = [self.layout, DTYPE_NAMES[self.dtype], f"hd{self.head_dim}", f"{self.window}"]
        named = {"causal": self.causal, "sink": self.has_sink, "softcap": self.softcap > 0.0}
        named["deterministic"] = self.deterministic
        shape = " ".join(f"{q}x{k}" for q, k in self.lengths)
        return " ".join([*parts, *(name for name, on in named.items() if on), shape])
