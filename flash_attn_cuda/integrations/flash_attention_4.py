"""FlashAttention-4's flash_attn.cute: its names, parameters, order, defaults and results.

The signatures are those of flash_attn/cute/interface.py in the package flash-attn-4, 4.0.0b36.
Options that are not described here are those of this package's functions of the same name. What
flash_attn_func and flash_attn_varlen_func share:

- They return (out, softmax_lse); softmax_lse is None unless return_lse asks for it or an input
  requires grad. Gradients flow through it.
- window_size: (left, right): query i sees the keys from i + seqlen_k - seqlen_q - left to i +
  seqlen_k - seqlen_q + right. None is unlimited, each on its own, and so are two negative numbers,
  both. One negative number is a bound as others are: (None, -5) has keys up to i - 5, (-5, None)
  those from i + 5 on, (6, -2) those from i - 6 to i - 2, of square sequences, and (-5, 2) none.
  Zero: nothing beyond the diagonal. Bounds beyond a sequence hide nothing or, where they are
  negative, all of it. causal sets right to 0, whatever it was, after that: (-5, None) with causal
  has no key. A tensor of two integers will do, or one for a bound; on CUDA reading it waits for the
  device.
- learnable_sink: (heads_q,), this package's sink.
- num_splits, pack_gqa, min_seqlen_k, scheduler_metadata, disable_scheduler_metadata,
  seqlen_k_per_split and block_sparse_tensors_bwd choose how a call is scheduled there. They are
  accepted; num_splits counts where this package splits keys, over pages.
- mask_mod: a function of (batch, head, query, key) that says whether a key is visible, of tensors
  of indices as torch's flex_attention has it. It is evaluated for every pair, in every call: for a
  mask that is used again, make a flash_attn_cuda.BlockSparsity once. With it, causal and
  window_size have no effect, as in FlashAttention-4.
- block_sparse_tensors: a BlockSparseTensorsTorch: the blocks that mask_mod decides about
  (mask_block_*; all their pairs are visible without one) and those that it does not (full_block_*).
  causal and window_size hide pairs of both. block_size None is keys in blocks of 128 and queries in
  blocks of 128 or 256, whichever fits the lists.
- get_scheduler_metadata's result is one of those hints.
- NotImplementedError, by name: score_mod, score_mod_bwd, aux_tensors, aux_scalars; qv,
  gather_kv_indices and what belongs to it; tensors of FP8; a mask_mod that is not such a function,
  such as those of the CuTe DSL; masks with a page_table; block_sparse_tensors of packed queries, or
  in blocks that are no multiples of 64.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..call.pieces import PIECE
from ..call.tensors import check_tensor
from ..call.window import WindowSize, window_ends
from ..functions.arguments import seqlen_bound
from ..functions.kvcache import flash_attn_combine as _combine
from .bands import Band
from .names import refused_names
from .sequences import attend_sequences, refuse_fp8, refuse_given, splits_of

__all__ = [
    "BlockSparseTensorsTorch",
    "SchedulerMetadataTensorsTorch",
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_varlen_func",
    "get_scheduler_metadata",
]

_RETURNS = "which return softmax_lse with return_lse"
_ORDER = "leave dq_write_order None: no order of a block-sparse backward is given here"
__getattr__ = refused_names(
    "flash_attn.cute",
    {
        "FlashAttnFunc": "call flash_attn_func",
        "FlashAttnVarlenFunc": "call flash_attn_varlen_func",
        "_flash_attn_fwd": f"call flash_attn_func or flash_attn_varlen_func, {_RETURNS}",
        "_flash_attn_bwd": "call torch.autograd.grad on the outputs of flash_attn_func",
        "compute_dq_write_order": _ORDER,
        "compute_dq_write_order_from_block_mask": _ORDER,
        "fast_sampling": "make a flash_attn_cuda.BlockSparsity of the mask_mod once",
    },
)

_NAMES = {"sink": "learnable_sink", "block_table": "page_table"}
_KEYS = 128  # of a block of FlashAttention-4 whose size is not given
_QUERIES = (128, 256)


class BlockSparseTensorsTorch(NamedTuple):
    """Lists of the blocks of keys that each block of queries sees.

    mask_block_cnt, full_block_cnt: int32 (batch or 1, heads_q or 1, blocks of queries), and
    mask_block_idx, full_block_idx: int32 (..., blocks of keys), of which the first so many count.
    block_size: (queries, keys) of a block. The others are of layouts and orders that this package
    does not read.
    """

    mask_block_cnt: Tensor
    mask_block_idx: Tensor
    full_block_cnt: Tensor | None = None
    full_block_idx: Tensor | None = None
    cu_total_m_blocks: Tensor | None = None
    cu_block_idx_offsets: Tensor | None = None
    block_size: tuple[int, int] | None = None
    dq_write_order: Tensor | None = None
    dq_write_order_full: Tensor | None = None
    spt: bool | None = None


class SchedulerMetadataTensorsTorch(NamedTuple):
    """What a call is scheduled by there, of which nothing is read here."""

    num_m_blocks_ptr: Tensor | None
    num_splits_dynamic_ptr: Tensor | None
    virtual_batch_idx_ptr: Tensor | None
    num_nheads_in_l2_ptr: Tensor | None
    tile_count_semaphore: Tensor | None
    cu_total_m_blocks: Tensor | None = None
    cu_total_splits_m_blocks: Tensor | None = None
    blocks_to_batch_idx: Tensor | None = None


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qv: Tensor | None = None,
    gather_kv_indices: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (None, None),
    learnable_sink: Tensor | None = None,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    score_mod: Callable[..., Any] | None = None,
    score_mod_bwd: Callable[..., Any] | None = None,
    mask_mod: Callable[..., Any] | None = None,
    aux_tensors: list[Tensor] | None = None,
    aux_scalars: tuple[Any, ...] | None = None,
    block_sparse_tensors: BlockSparseTensorsTorch | None = None,
    block_sparse_tensors_bwd: BlockSparseTensorsTorch | None = None,
    return_lse: bool = False,
    gather_bwd_recompute_p: bool = False,
    gather_bwd_token_chunk: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Attention of q (batch, seqlen_q, heads_q, head_dim) over k, v (batch, seqlen_k, heads_k,
    head_dim or head_dim_v).

    Returns out (batch, seqlen_q, heads_q, head_dim_v) and softmax_lse (batch, heads_q, seqlen_q).
    Errors as flash_attn_cuda.flash_attn_func, and the module's.
    """
    _refuse(
        *(score_mod, score_mod_bwd, aux_tensors, aux_scalars, qv, gather_kv_indices),
        *(gather_bwd_recompute_p, gather_bwd_token_chunk, q, k, v),
    )
    block_mask = None
    if mask_mod is not None or block_sparse_tensors is not None:
        check_tensor("q", q)
        check_tensor("k", k)
        if q.dim() == 4 and k.dim() == 4:  # others are refused with their names
            pairs = _Pairs(q.shape[0], q.shape[2], q.shape[1], k.shape[1], q.device)
            block_mask = _block_mask(mask_mod, block_sparse_tensors, pairs)
    causal, window_size, hidden = _band(causal, window_size, mask_mod).as_window()
    results = attend_sequences(
        *(q, k, v, None, None, None, None),
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        hidden=hidden,
        softcap=softcap,
        deterministic=deterministic,
        block_mask=block_mask,
        sink=learnable_sink,
        names=_NAMES,
    )
    return _results(*results, return_lse, q, k, v)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qv: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    min_seqlen_k: int | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    gather_kv_indices: Tensor | None = None,
    page_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (None, None),
    learnable_sink: Tensor | None = None,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    score_mod: Callable[..., Any] | None = None,
    score_mod_bwd: Callable[..., Any] | None = None,
    mask_mod: Callable[..., Any] | None = None,
    block_sparse_tensors: BlockSparseTensorsTorch | None = None,
    aux_tensors: list[Tensor] | None = None,
    aux_scalars: tuple[Any, ...] | None = None,
    return_lse: bool = False,
    scheduler_metadata: Any = None,
    seqlen_k_per_split: int | None = None,
    disable_scheduler_metadata: bool = False,
    gather_bwd_recompute_p: bool = False,
    gather_bwd_token_chunk: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """flash_attn_func of packed sequences: q (total_q, heads_q, head_dim), k, v (total_k, ...).

    Args:
        cu_seqlens_q: (batch + 1,), int32; None where q is (batch, seqlen_q, heads_q, head_dim).
        cu_seqlens_k: the same of k and v; None also with a page_table.
        page_table: (batch, max_pages), int32, over k, v (num_pages, page_size, heads_k, ...):
            flash_attn_cuda.flash_attn_varlen_func's block_table. Without seqused_k a sequence has
            all rows of its pages.
        mask_mod: queries and keys count from a sequence's first.

    Returns:
        out in q's layout, and softmax_lse (heads_q, total_q) or (batch, heads_q, seqlen_q).

    Raises:
        As flash_attn_cuda.flash_attn_varlen_func, and the module's.
    """
    _refuse(
        *(score_mod, score_mod_bwd, aux_tensors, aux_scalars, qv, gather_kv_indices),
        *(gather_bwd_recompute_p, gather_bwd_token_chunk, q, k, v),
    )
    block_mask = None
    if mask_mod is not None or block_sparse_tensors is not None:
        if page_table is not None:
            refuse_given(
                "masks over pages are not implemented",
                mask_mod=mask_mod,
                block_sparse_tensors=block_sparse_tensors,
            )
        if cu_seqlens_q is not None:
            refuse_given(
                "lists of blocks of packed queries are not implemented",
                block_sparse_tensors=block_sparse_tensors,
            )
        batch, max_seqlen_q = _extent("q", q, cu_seqlens_q, max_seqlen_q)
        _, max_seqlen_k = _extent("k", k, cu_seqlens_k, max_seqlen_k)
        pairs = _Pairs(batch, q.shape[-2], max_seqlen_q, max_seqlen_k, q.device)
        block_mask = _block_mask(mask_mod, block_sparse_tensors, pairs)
    causal, window_size, hidden = _band(causal, window_size, mask_mod).as_window()
    results = attend_sequences(
        *(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k),
        seqused_q=seqused_q,
        seqused_k=seqused_k,
        block_table=page_table,
        num_splits=splits_of(num_splits),
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        hidden=hidden,
        softcap=softcap,
        deterministic=deterministic,
        block_mask=block_mask,
        sink=learnable_sink,
        names=_NAMES,
    )
    return _results(*results, return_lse, q, k, v)


def flash_attn_combine(
    out_partial: Tensor,
    lse_partial: Tensor,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    cu_seqlens: Tensor | None = None,
    seqused: Tensor | None = None,
    virtual_batch_idx: Tensor | None = None,
    return_lse: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """One result from those over parts of the keys, as flash_attn_cuda.flash_attn_combine.

    Args:
        out_partial: (splits, batch, seqlen, heads, head_dim), or of packed sequences (splits,
            total_q, heads, head_dim): fp32, or fp16 or bf16, of which the sums are in fp32.
        lse_partial: the shape of out_partial without head_dim, fp32.
        out: (batch, seqlen, heads, head_dim) or (total_q, heads, head_dim) to write into.
        out_dtype: dtype of a new one; None for out_partial's.
        cu_seqlens, seqused, virtual_batch_idx: say there which rows are combined, and in which
            order. Here all are, each on its own, so that these have no effect.

    Returns:
        (out, softmax_lse), softmax_lse (batch, seqlen, heads) or (total_q, heads), or None without
        return_lse.

    Raises:
        As flash_attn_cuda.flash_attn_combine. NotImplementedError: there are a seqused and an out,
        whose rows behind those in use would not stay as they are.
    """
    if out is not None:
        refuse_given("every row of an out is written", seqused=seqused)
    check_tensor("out_partial", out_partial)
    check_tensor("lse_partial", lse_partial)
    if out_dtype is None and out is None:
        out_dtype = out_partial.dtype
    if out_partial.dtype in (torch.float16, torch.bfloat16):
        out_partial = out_partial.float()
    is_packed = out_partial.dim() == 4 and lse_partial.dim() == 3
    if not is_packed:
        out, softmax_lse = _combine(out_partial, lse_partial, out, out_dtype)
        return out, softmax_lse if return_lse else None
    target = None
    if out is not None:
        check_tensor("out", out)
        target = out.unsqueeze(0)
    found, softmax_lse = _combine(
        out_partial.unsqueeze(1), lse_partial.unsqueeze(1), target, out_dtype
    )
    return found[0] if out is None else out, softmax_lse[0] if return_lse else None


def get_scheduler_metadata(
    max_seqlen_q: int,
    max_seqlen_k: int,
    nheads: int,
    nheads_kv: int,
    headdim: int,
    num_splits: int,
    headdim_v: int | None = None,
    pack_gqa: int | None = None,
    causal: bool = False,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqlen_k_new: int = 0,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    seqlen_k_per_split: int | None = None,
    _arch: int | None = None,
) -> SchedulerMetadataTensorsTorch:
    """For flash_attn_varlen_func's scheduler_metadata: a tuple of nothing, as FlashAttention-4's is
    of a call that its kernels need no schedule for. This package plans in the call itself.

    Args:
        cu_seqlens_q, cu_seqlens_k: (batch + 1,), and seqused_q, seqused_k: (batch,): one of these
            is given, and all that are agree in batch. Nothing else is looked at.

    Raises:
        ValueError: none of them is given, or they do not agree.
    """
    ends = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    counts = {"seqused_q": seqused_q, "seqused_k": seqused_k}
    batches = {}
    for name, x in (ends | counts).items():
        if x is not None:
            check_tensor(name, x)
            batches[name] = x.shape[0] - (name in ends)
    if not batches:
        raise ValueError(f"{', '.join(ends | counts)}: one of them must be given, got none")
    if len(set(batches.values())) > 1:
        raise ValueError(f"{', '.join(batches)}: must be of one batch, got {batches}")
    return SchedulerMetadataTensorsTorch(None, None, None, None, None)


class _Pairs(NamedTuple):
    """The pairs of queries and keys that a mask is about."""

    batch: int
    heads: int
    seqlen_q: int
    seqlen_k: int
    device: torch.device


def _refuse(
    score_mod: Any,
    score_mod_bwd: Any,
    aux_tensors: Any,
    aux_scalars: Any,
    qv: Any,
    gather_kv_indices: Any,
    gather_bwd_recompute_p: Any,
    gather_bwd_token_chunk: Any,
    q: Any,
    k: Any,
    v: Any,
) -> None:
    """Raise for what the module's functions have no kernels for."""
    refuse_given(
        "functions of scores are not implemented", score_mod=score_mod, score_mod_bwd=score_mod_bwd
    )
    refuse_given(
        "a mask_mod takes four arguments", aux_tensors=aux_tensors, aux_scalars=aux_scalars
    )
    refuse_given("scores have one product of queries and keys", qv=qv)
    refuse_given(
        "keys chosen by indices are not implemented",
        gather_kv_indices=gather_kv_indices,
        gather_bwd_recompute_p=gather_bwd_recompute_p or None,
        gather_bwd_token_chunk=gather_bwd_token_chunk,
    )
    refuse_fp8(q=q, k=k, v=v)


def _band(causal: bool, window_size: WindowSize, mask_mod: Any) -> Band:
    """What causal and window_size say, which a mask_mod has no use for."""
    left, right = window_ends(window_size)
    if mask_mod is not None:
        return Band(None, None)
    if left is not None and right is not None and left < 0 and right < 0:
        left = right = None
    return Band(None if left is None else -left, 0 if causal else right)


def _results(
    out: Tensor, softmax_lse: Tensor, return_lse: bool, *inputs: Tensor
) -> tuple[Tensor, Tensor | None]:
    is_wanted = return_lse or any(x.requires_grad for x in inputs)
    return out, softmax_lse if is_wanted else None


def _extent(
    name: str, x: Tensor, cu_seqlens: Tensor | None, max_seqlen: int | None
) -> tuple[int, int]:
    """(sequences, upper bound of their lengths)."""
    check_tensor(name, x)
    if cu_seqlens is not None:
        check_tensor(f"cu_seqlens_{name}", cu_seqlens)
        bound = seqlen_bound(f"max_seqlen_{name}", max_seqlen, x)
        return cu_seqlens.shape[0] - 1, bound
    if x.dim() != 4:
        raise ValueError(
            f"{name}: must have 4 dimensions where there is no cu_seqlens_{name}, "
            f"got shape {tuple(x.shape)}"
        )
    return x.shape[0], x.shape[1]


def _block_mask(mask_mod: Any, tensors: Any, pairs: _Pairs) -> Any:
    """A BlockMask of torch, which attention makes a BlockSparsity of."""
    from torch.nn.attention.flex_attention import BlockMask

    if mask_mod is not None:
        _check_mask_mod(mask_mod)
    if tensors is None:
        size = (_KEYS, _KEYS)
        lists = [*_all_blocks(pairs, size)]
    else:
        size = _block_size(tensors, pairs)
        lists = [*_lists("mask", tensors, size, pairs)]
        if getattr(tensors, "full_block_cnt", None) is not None:
            lists += _lists("full", tensors, size, pairs)
    if mask_mod is not None:  # which may tell batch and heads apart where the lists do not
        lists = [x.expand(pairs.batch, pairs.heads, *x.shape[2:]) for x in lists]
    return BlockMask.from_kv_blocks(
        lists[0],
        lists[1],
        lists[2] if len(lists) > 2 else None,
        lists[3] if len(lists) > 2 else None,
        BLOCK_SIZE=size,
        mask_mod=mask_mod,
        seq_lengths=(pairs.seqlen_q, pairs.seqlen_k),
        compute_q_blocks=False,
    )


def _check_mask_mod(mask_mod: Any) -> None:
    """Raise unless this is a function of (batch, head, query, key)."""
    try:
        inspect.signature(mask_mod).bind(0, 0, 0, 0)
    except (TypeError, ValueError) as error:
        raise NotImplementedError(
            "mask_mod: must be a function of (batch, head, query, key) on tensors, as torch's "
            f"flex_attention takes it, got {mask_mod!r}"
        ) from error


def _all_blocks(pairs: _Pairs, size: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Lists that name every block."""
    blocks_q, blocks_k = _blocks(pairs, size)
    indices = torch.arange(blocks_k, dtype=torch.int32, device=pairs.device)
    count = torch.full((1, 1, blocks_q), blocks_k, dtype=torch.int32, device=pairs.device)
    return count, indices.expand(1, 1, blocks_q, blocks_k)


def _block_size(tensors: Any, pairs: _Pairs) -> tuple[int, int]:
    """(queries, keys) of a block, as given or as the number of lists tells."""
    given = getattr(tensors, "block_size", None)
    if given is not None:
        size = (int(given[0]), int(given[1]))
        if any(extent < 1 or extent % PIECE != 0 for extent in size):
            raise NotImplementedError(
                "block_sparse_tensors.block_size: must be positive multiples of "
                f"{PIECE}, got {tuple(given)}"
            )
        return size
    count = getattr(tensors, "mask_block_cnt", None)
    check_tensor("block_sparse_tensors.mask_block_cnt", count)
    assert count is not None
    for queries in _QUERIES:
        if count.dim() > 0 and count.shape[-1] == _blocks(pairs, (queries, _KEYS))[0]:
            return queries, _KEYS
    raise ValueError(
        "block_sparse_tensors.block_size: must be given where the blocks of queries are not of "
        f"{_QUERIES[0]} or {_QUERIES[1]}, got None for {pairs.seqlen_q} queries in lists of "
        f"shape {tuple(count.shape)}"
    )


def _lists(kind: str, tensors: Any, size: tuple[int, int], pairs: _Pairs) -> tuple[Tensor, Tensor]:
    """The counts and indices of one kind of blocks."""
    blocks_q, blocks_k = _blocks(pairs, size)
    found = []
    for part, last in (("cnt", (blocks_q,)), ("idx", (blocks_q, blocks_k))):
        name = f"{kind}_block_{part}"
        x = getattr(tensors, name, None)
        check_tensor(f"block_sparse_tensors.{name}", x)
        assert x is not None
        first = tuple(x.shape[:2])
        fits = all(n in (1, m) for n, m in zip(first, (pairs.batch, pairs.heads), strict=False))
        if x.dim() != 2 + len(last) or not fits or tuple(x.shape[2:]) != last:
            shape = ", ".join(map(str, last))
            raise ValueError(
                f"block_sparse_tensors.{name}: must have shape ({pairs.batch} or 1, {pairs.heads} "
                f"or 1, {shape}), got {tuple(x.shape)}"
            )
        found.append(x)
    return found[0], found[1]


def _blocks(pairs: _Pairs, size: tuple[int, int]) -> tuple[int, int]:
    return -(-pairs.seqlen_q // size[0]), -(-pairs.seqlen_k // size[1])
