"""The package ring_flash_attn: its names, parameters, order, defaults and results.

The signatures are those of zhuzilin/ring-flash-attention (commits d4223db and 5e52d25). Each rank
of `group` gives its own rows, in the layout that a name stands for, and gets its own rows of out:

    ring_...            part r of N of every sequence
    zigzag_ring_...     parts r and 2 N - 1 - r of 2 N of every sequence
    stripe_...          tokens r, r + N, r + 2 N, ... of every sequence
    llama3_..._varlen   rows [r L, (r + 1) L) of the packed batch, wherever documents begin

context_parallel computes them: ring, zigzag and stripe with its ring, llama3 with its all_gather.
What all of them share:

- causal may be False in every layout; windows, dropout and alibi_slopes, (heads,) or but for llama3
  (sequences, heads), are those of one call over the whole. Dropout takes sequences that a layout
  cuts at multiples of 16, stripes any.
- window_size: (left, right) as flash_attn_cuda.flash_attn_func's: any negative number or None for
  unlimited, each side on its own, 0 for nothing beyond the diagonal; bounds beyond a sequence hide
  nothing, and causal sets right to 0.
- Rows of stripes travel once more than those of other layouts, to contiguous pieces and back.
- cu_seqlens and cu_seqlens_q are read on the host. A list or a CPU tensor costs nothing; a CUDA
  tensor is waited for at the first call that sees it, and again only if it was written to; one of
  torch.inference_mode, which does not tell, at every call. The llama3 functions, which know the
  rank's own documents alone, then also ask the other ranks.
- return_attn_probs returns (out, softmax_lse, None), through whose softmax_lse gradients flow.
- substitute_hf_flash_attn and update_ring_flash_attn_params, for models of transformers, are those
  of integrations.transformers_ring, which says what they do. They raise ImportError without it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from ..call.tensors import check_packed, check_tensor
from ..call.window import UNLIMITED, WindowSize, window_bounds
from ..context_parallel import Band, ContextParallel, Plan
from ..context_parallel.stripes import stripes_of
from .ring_plans import (
    balanced,
    contiguous,
    lengths_of,
    llama3_flash_attn_prepare_cu_seqlens,
    plan_of_documents,
    zigzag,
)

__all__ = [
    "llama3_flash_attn_prepare_cu_seqlens",
    "llama3_flash_attn_varlen_func",
    "llama3_flash_attn_varlen_kvpacked_func",
    "llama3_flash_attn_varlen_qkvpacked_func",
    "ring_flash_attn_func",
    "ring_flash_attn_kvpacked_func",
    "ring_flash_attn_qkvpacked_func",
    "ring_flash_attn_varlen_func",
    "ring_flash_attn_varlen_kvpacked_func",
    "ring_flash_attn_varlen_qkvpacked_func",
    "stripe_flash_attn_func",
    "stripe_flash_attn_kvpacked_func",
    "stripe_flash_attn_qkvpacked_func",
    "substitute_hf_flash_attn",
    "update_ring_flash_attn_params",
    "zigzag_ring_flash_attn_func",
    "zigzag_ring_flash_attn_kvpacked_func",
    "zigzag_ring_flash_attn_qkvpacked_func",
    "zigzag_ring_flash_attn_varlen_func",
    "zigzag_ring_flash_attn_varlen_kvpacked_func",
    "zigzag_ring_flash_attn_varlen_qkvpacked_func",
]

Function = Callable[..., Any]
Layout = Callable[..., Any]  # attention of packed rows of sequences of these local lengths


class _Options(NamedTuple):
    """What every function's parameters end with, but for the last two."""

    dropout_p: float
    softmax_scale: float | None
    causal: bool
    window_size: WindowSize
    alibi_slopes: Tensor | None
    deterministic: bool


# -- layouts ---------------------------------------------------------------------------------------


@torch.compiler.disable
@lru_cache(maxsize=16)
def _parallel(group: ProcessGroup, scheme: str, head_groups: int | None) -> ContextParallel:
    return ContextParallel(group, scheme, head_groups=head_groups)


def _group_of(group: ProcessGroup | None) -> ProcessGroup:
    found = dist.group.WORLD if group is None else group
    if found is None:
        raise RuntimeError("group: torch.distributed must be initialised first")
    return found


def _attend(parallel: ContextParallel, qkv: Sequence[Tensor], plan: Plan, options: _Options) -> Any:
    """(out, softmax_lse) of shards of the plan."""
    q, k, v = qkv
    return parallel.attend(q, k, v, plan, return_lse=True, **options._asdict())


def _of_plan(plan_of: Callable[[tuple[int, ...], int], Plan]) -> Layout:
    def attend(
        qkv: Sequence[Tensor], lengths: tuple[int, ...], options: _Options, group: ProcessGroup
    ) -> Any:
        parallel = _parallel(group, "ring", None)
        plan = plan_of(lengths, parallel.size)
        return _attend(parallel, qkv, plan, options)

    return attend


def _stripes(
    qkv: Sequence[Tensor], lengths: tuple[int, ...], options: _Options, group: ProcessGroup
) -> Any:
    parallel = _parallel(group, "ring", None)
    band = Band.of(options.causal, window_bounds(options.window_size))
    plan = balanced(lengths, parallel.size, band, 16 if options.dropout_p else 1)
    device = qkv[0].device
    stripes = parallel._once(
        (plan, "stripes", device), lambda: stripes_of(plan, parallel.rank, device)
    )
    shards = [stripes.to_shard(x, group) for x in qkv]
    out, softmax_lse = _attend(parallel, shards, plan, options)
    return stripes.to_stripe(out, group), stripes.to_stripe(softmax_lse.t(), group).t()


# -- functions of one layout -----------------------------------------------------------------------


def _qkv(tensors: dict[str, Tensor], shape: str) -> list[Tensor]:
    """Of {q, k, v}, {q, kv} or {qkv}; shape: of one of three."""
    found: list[Tensor] = []
    for name, x in tensors.items():
        if len(name) > 1:
            check_packed(name, x, shape.replace("heads", f"{len(name)}, heads", 1), len(name))
            found += x.unbind(-3)
            continue
        check_tensor(name, x)
        if x.dim() != shape.count(",") + 1:
            raise ValueError(f"{name}: must have shape {shape}, got {tuple(x.shape)}")
        found.append(x)
    return found


def _batch(
    tensors: dict[str, Tensor], layout: Layout, options: _Options, probs: bool, group: Any
) -> Any:
    """Of tensors (batch, seqlen, ..., heads, head_dim)."""
    qkv = _qkv(tensors, "(batch, seqlen, heads, head_dim)")
    batch, seqlen = qkv[0].shape[:2]
    for name, x in zip("qkv", qkv, strict=True):
        if x.shape[:2] != (batch, seqlen):
            raise ValueError(
                f"{name}: must have q's batch and seqlen, {(batch, seqlen)}, got shape "
                f"{tuple(x.shape)}"
            )
    rows = [x.flatten(0, 1) for x in qkv]
    out, softmax_lse = layout(rows, (seqlen,) * batch, options, _group_of(group))
    out = out.unflatten(0, (batch, seqlen))
    if not probs:
        return out
    return out, softmax_lse.unflatten(1, (batch, seqlen)).transpose(0, 1), None


def _varlen(
    tensors: dict[str, Tensor],
    cu_seqlens: Tensor | Sequence[int],
    max_seqlen: Any,
    layout: Layout,
    options: _Options,
    probs: bool,
    group: Any,
) -> Any:
    """Of tensors (rows, ..., heads, head_dim)."""
    qkv = _qkv(tensors, "(rows, heads, head_dim)")
    lengths = lengths_of("cu_seqlens", cu_seqlens, qkv[0].shape[0])
    longest = max(lengths, default=0)
    if isinstance(max_seqlen, int) and max_seqlen < longest:
        raise ValueError(
            f"max_seqlen: must be at least {longest}, the longest of cu_seqlens, got {max_seqlen}"
        )
    out, softmax_lse = layout(qkv, lengths, options, _group_of(group))
    return (out, softmax_lse, None) if probs else out


def _named(functions: Sequence[Function], stem: str, rows: str) -> tuple[Any, ...]:
    """The functions under their names: of q, k, v, of q, kv, of qkv."""
    for function, form in zip(functions, ("", "kvpacked_", "qkvpacked_"), strict=True):
        function.__name__ = function.__qualname__ = f"{stem}_{form}func"
        function.__doc__ = f"{(function.__doc__ or '').strip()}\n\n    Each rank has {rows}.\n    "
    return tuple(functions)


def _batch_functions(stem: str, layout: Layout, rows: str) -> tuple[Any, ...]:
    def func(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: WindowSize = UNLIMITED,
        alibi_slopes: Tensor | None = None,
        deterministic: bool = False,
        return_attn_probs: bool = False,
        group: ProcessGroup | None = None,
    ) -> Any:
        """Attention of q (batch, seqlen, heads_q, head_dim) over k, v (batch, seqlen, heads_k,
        ...), of which seqlen are this rank's; out, or (out, softmax_lse (batch, heads_q, seqlen),
        None).
        """
        options = _Options(
            dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic
        )
        return _batch({"q": q, "k": k, "v": v}, layout, options, return_attn_probs, group)

    def kvpacked(
        q: Tensor,
        kv: Tensor,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: WindowSize = UNLIMITED,
        alibi_slopes: Tensor | None = None,
        deterministic: bool = False,
        return_attn_probs: bool = False,
        group: ProcessGroup | None = None,
    ) -> Any:
        """The function of q, k, v with kv (batch, seqlen, 2, heads_k, head_dim)."""
        options = _Options(
            dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic
        )
        return _batch({"q": q, "kv": kv}, layout, options, return_attn_probs, group)

    def qkvpacked(
        qkv: Tensor,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: WindowSize = UNLIMITED,
        alibi_slopes: Tensor | None = None,
        deterministic: bool = False,
        return_attn_probs: bool = False,
        group: ProcessGroup | None = None,
    ) -> Any:
        """The function of q, k, v with qkv (batch, seqlen, 3, heads, head_dim)."""
        options = _Options(
            dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic
        )
        return _batch({"qkv": qkv}, layout, options, return_attn_probs, group)

    return _named((func, kvpacked, qkvpacked), stem, rows)


def _varlen_functions(stem: str, layout: Layout, rows: str) -> tuple[Any, ...]:
    def func(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens: Tensor | Sequence[int],
        max_seqlen: int | Tensor | None,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: WindowSize = UNLIMITED,
        alibi_slopes: Tensor | None = None,
        deterministic: bool = False,
        return_attn_probs: bool = False,
        group: ProcessGroup | None = None,
    ) -> Any:
        """Attention of packed q (rows, heads_q, head_dim) over k, v (rows, heads_k, ...); out, or
        (out, softmax_lse (heads_q, rows), None). cu_seqlens (sequences + 1,) are bounds of this
        rank's rows, those of the whole divided by the ranks; max_seqlen is the longest of them.
        """
        options = _Options(
            dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic
        )
        tensors = {"q": q, "k": k, "v": v}
        return _varlen(tensors, cu_seqlens, max_seqlen, layout, options, return_attn_probs, group)

    def kvpacked(
        q: Tensor,
        kv: Tensor,
        cu_seqlens: Tensor | Sequence[int],
        max_seqlen: int | Tensor | None,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: WindowSize = UNLIMITED,
        alibi_slopes: Tensor | None = None,
        deterministic: bool = False,
        return_attn_probs: bool = False,
        group: ProcessGroup | None = None,
    ) -> Any:
        """The function of q, k, v with kv (rows, 2, heads_k, head_dim)."""
        options = _Options(
            dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic
        )
        tensors = {"q": q, "kv": kv}
        return _varlen(tensors, cu_seqlens, max_seqlen, layout, options, return_attn_probs, group)

    def qkvpacked(
        qkv: Tensor,
        cu_seqlens: Tensor | Sequence[int],
        max_seqlen: int | Tensor | None,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: WindowSize = UNLIMITED,
        alibi_slopes: Tensor | None = None,
        deterministic: bool = False,
        return_attn_probs: bool = False,
        group: ProcessGroup | None = None,
    ) -> Any:
        """The function of q, k, v with qkv (rows, 3, heads, head_dim)."""
        options = _Options(
            dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic
        )
        tensors = {"qkv": qkv}
        return _varlen(tensors, cu_seqlens, max_seqlen, layout, options, return_attn_probs, group)

    return _named((func, kvpacked, qkvpacked), stem, rows)


_RING = (_of_plan(contiguous), "part r of N of every sequence")
_ZIGZAG = (_of_plan(zigzag), "parts r and 2 N - 1 - r of 2 N of every sequence")
_STRIPE = (_stripes, "tokens r, r + N, r + 2 N, ... of every sequence")

(
    ring_flash_attn_func,
    ring_flash_attn_kvpacked_func,
    ring_flash_attn_qkvpacked_func,
) = _batch_functions("ring_flash_attn", *_RING)
(
    zigzag_ring_flash_attn_func,
    zigzag_ring_flash_attn_kvpacked_func,
    zigzag_ring_flash_attn_qkvpacked_func,
) = _batch_functions("zigzag_ring_flash_attn", *_ZIGZAG)
(
    stripe_flash_attn_func,
    stripe_flash_attn_kvpacked_func,
    stripe_flash_attn_qkvpacked_func,
) = _batch_functions("stripe_flash_attn", *_STRIPE)
(
    ring_flash_attn_varlen_func,
    ring_flash_attn_varlen_kvpacked_func,
    ring_flash_attn_varlen_qkvpacked_func,
) = _varlen_functions("ring_flash_attn_varlen", *_RING)
(
    zigzag_ring_flash_attn_varlen_func,
    zigzag_ring_flash_attn_varlen_kvpacked_func,
    zigzag_ring_flash_attn_varlen_qkvpacked_func,
) = _varlen_functions("zigzag_ring_flash_attn_varlen", *_ZIGZAG)


# -- llama3 ----------------------------------------------------------------------------------------


def llama3_flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | Tensor | None,
    max_seqlen_k: int | Tensor | None,
    heads_k_stride: int,
    local_k_slice: slice,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = UNLIMITED,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    group: ProcessGroup | None = None,
) -> Any:
    """Attention of packed q (rows, heads_q, head_dim) over k, v (rows, heads_k, ...), the rank's
    shard of documents that are packed one behind the other.

    Args:
        cu_seqlens_q, local_k_slice: of llama3_flash_attn_prepare_cu_seqlens, for the same causal.
            Ranks tell each other at the first call with a tensor cu_seqlens_q, so that all of them
            have to call with a new one where one does.
        cu_seqlens_k, max_seqlen_q, max_seqlen_k: follow from these, and are not read.
        heads_k_stride: how many heads of keys a transfer brings; it divides heads_k. All transfers
            are asked for at once, so that it does not bound memory.

    Returns:
        out as q, or with return_attn_probs (out, softmax_lse (heads_q, rows), None).
    """
    options = _Options(dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic)
    places = (cu_seqlens_q, heads_k_stride, local_k_slice)
    return _llama3({"q": q, "k": k, "v": v}, *places, options, return_attn_probs, group)


def llama3_flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | Tensor | None,
    max_seqlen_k: int | Tensor | None,
    heads_k_stride: int,
    local_k_slice: slice,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = UNLIMITED,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    group: ProcessGroup | None = None,
) -> Any:
    """llama3_flash_attn_varlen_func of kv (rows, 2, heads_k, head_dim)."""
    options = _Options(dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic)
    places = (cu_seqlens_q, heads_k_stride, local_k_slice)
    return _llama3({"q": q, "kv": kv}, *places, options, return_attn_probs, group)


def llama3_flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | Tensor | None,
    max_seqlen_k: int | Tensor | None,
    heads_k_stride: int,
    local_k_slice: slice,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = UNLIMITED,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    group: ProcessGroup | None = None,
) -> Any:
    """llama3_flash_attn_varlen_func of qkv (rows, 3, heads, head_dim)."""
    options = _Options(dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic)
    places = (cu_seqlens_q, heads_k_stride, local_k_slice)
    return _llama3({"qkv": qkv}, *places, options, return_attn_probs, group)


def _llama3(
    tensors: dict[str, Tensor],
    cu_seqlens_q: Tensor,
    heads_k_stride: int,
    local_k_slice: slice,
    options: _Options,
    probs: bool,
    group: ProcessGroup | None,
) -> Any:
    qkv = _qkv(tensors, "(rows, heads, head_dim)")
    check_tensor("cu_seqlens_q", cu_seqlens_q)
    slopes, heads_k = options.alibi_slopes, qkv[1].shape[1]
    if slopes is not None and slopes.dim() != 1:
        raise NotImplementedError(
            "alibi_slopes: must have shape (heads,), as no rank knows the number of documents, got "
            f"{tuple(slopes.shape)}"
        )
    if heads_k_stride < 1 or heads_k % heads_k_stride:
        raise ValueError(
            f"heads_k_stride: must divide the {heads_k} heads of keys, got {heads_k_stride}"
        )
    whole = _group_of(group)
    plan = plan_of_documents(cu_seqlens_q, local_k_slice, qkv[0].shape[0], options.causal, whole)
    parallel = _parallel(whole, "all_gather", heads_k // heads_k_stride)
    out, softmax_lse = _attend(parallel, qkv, plan, options)
    return (out, softmax_lse, None) if probs else out


# -- models of transformers ------------------------------------------------------------------------


def substitute_hf_flash_attn(process_group: ProcessGroup, heads_k_stride: int) -> None:
    """Make "flash_attention_2" of transformers attention over the ranks of process_group.

    heads_k_stride: how many heads of keys a transfer brings; it divides heads_k.
    """
    _adapter("substitute_hf_flash_attn")(process_group, heads_k_stride)


def update_ring_flash_attn_params(cu_seqlens: Tensor, process_group: ProcessGroup) -> None:
    """Say where the documents of the batch to come are: cu_seqlens (documents + 1,) integers, of
    the whole, on every rank the same, whose last is a multiple of the ranks.
    """
    _adapter("update_ring_flash_attn_params")(cu_seqlens, process_group)


def _adapter(name: str) -> Function:
    """A function of the module that needs transformers."""
    try:
        module = importlib.import_module(".transformers_ring", __package__)
    except ImportError as error:
        raise ImportError(
            f"{name}: needs Hugging Face transformers, `pip install -U transformers`: {error}"
        ) from error
    return cast(Function, getattr(module, name))
