"""vLLM's attention functions on this package: the names, parameters, order and defaults of
vllm.vllm_flash_attn.

    from flash_attn_cuda.integrations.vllm import flash_attn_varlen_func, get_scheduler_metadata

The signatures are those of vllm/vllm_flash_attn/flash_attn_interface.py in vllm-project/vllm
(commit 01420e0). vLLM is not imported, nor changed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..call.tensors import E4M3
from ..call.window import UNLIMITED, WindowSize
from .names import refused_names
from .sequences import (
    attend_sequences,
    no_scheduler_metadata,
    refuse_fp8,
    refuse_given,
    scales_of,
    splits_of,
)

__all__ = [
    "fa_version_unsupported_reason",
    "flash_attn_varlen_func",
    "get_scheduler_metadata",
    "is_fa_version_supported",
]

_SPARSE = "call flash_attn_cuda.{} with block_mask, a flash_attn_cuda.BlockSparsity"
__getattr__ = refused_names(
    "vllm_flash_attn",
    {
        "sparse_attn_func": _SPARSE.format("flash_attn_func"),
        "sparse_attn_varlen_func": _SPARSE.format("flash_attn_varlen_func"),
    },
)

_VERSIONS = (2, 3, 4)
_NAMES = {"sink": "s_aux", "return_attn_probs": "return_softmax_lse", "qv": "q_v"}


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    max_seqlen_q: int,
    cu_seqlens_q: Tensor,
    max_seqlen_k: int,
    cu_seqlens_k: Tensor | None = None,
    seqused_k: Tensor | None = None,
    q_v: Tensor | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
    return_softmax_lse: bool = False,
    out: Tensor | None = None,
    scheduler_metadata: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    num_splits: int = 0,
    output_scale: Tensor | None = None,
    fa_version: int = 2,
    s_aux: Tensor | None = None,
    cp_world_size: int = 1,
    cp_rank: int = 0,
    cp_tot_seqused_k: Tensor | None = None,
    mask_mod: Callable[..., Any] | None = None,
    block_sparse_tensors: Any = None,
    aux_tensors: list[Tensor] | None = None,
    aux_tensor_leading_dims: Any = None,
    dynamic_causal: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """flash_attn_cuda.flash_attn_varlen_func, by vLLM's names. Options that are not listed are its.

    Args:
        q: (total_q, heads_q, head_dim).
        k: (total_k, heads_k, head_dim) with cu_seqlens_k; with a block_table pages (num_pages,
            page_size, heads_k, head_dim); else (batch, seqlen_k, heads_k, head_dim).
        v: as k, with head_dim_v.
        cu_seqlens_k: (batch + 1,), int32; exactly one of this and seqused_k is given.
        seqused_k: (batch,), int32: keys of each sequence. Given with a block_table.
        q_v: (total_q, heads_q, head_dim_v): qv, with every fa_version; softmax_scale goes with it.
        window_size: (left, right) as flash_attn_cuda.flash_attn_func's: any negative number for
            unlimited, each side on its own, with every fa_version; causal sets right to 0. None for
            (-1, -1).
        out: (total_q, heads_q, head_dim_v) to write the result into; for inference.
        s_aux: (heads_q,): sink, with every fa_version.
        scheduler_metadata, num_splits, fa_version: choose how the call is scheduled there, and
            which of vLLM's builds runs. They are accepted; num_splits counts over pages.
        q_descale, k_descale, v_descale: fp32 scales of tensors of float8_e4m3fn, as k and v may
            both be, and with them q: (batch, heads_k), as vLLM expands them, or one for all, 0-d or
            (1,). None is 1. Those of other tensors are not read. out is of q's dtype, or bf16 of q
            of float8_e4m3fn, unless `out` is of fp16. head dims are multiples of 16 then.
        return_attn_probs: has no effect, as in vLLM.

    Returns:
        out (total_q, heads_q, head_dim_v), `out` itself where it was given, or with
        return_softmax_lse (out, softmax_lse (heads_q, total_q)).

    Raises:
        As flash_attn_cuda.flash_attn_varlen_func. ValueError: both or none of cu_seqlens_k and
        seqused_k, a block_table without seqused_k, an fa_version other than 2, 3 and 4.
        NotImplementedError: tensors of FP8 other than float8_e4m3fn, an out of FP8,
        output_scale, a cp_world_size other than 1, cp_tot_seqused_k, mask_mod,
        block_sparse_tensors, aux_tensors, aux_tensor_leading_dims, dynamic_causal.
    """
    _check_lengths(cu_seqlens_k, seqused_k, block_table)
    _check_version(fa_version)
    if out is not None:
        refuse_fp8(out=out)
    refuse_fp8(E4M3, q=q, k=k, v=v)
    refuse_given("results of FP8 are not implemented", output_scale=output_scale)
    if cp_world_size != 1:
        raise NotImplementedError(
            "cp_world_size: must be 1, as context parallelism is not implemented, "
            f"got {cp_world_size}"
        )
    refuse_given("context parallelism is not implemented", cp_tot_seqused_k=cp_tot_seqused_k)
    refuse_given(
        "masks of vLLM are not implemented",
        mask_mod=mask_mod,
        block_sparse_tensors=block_sparse_tensors,
        aux_tensors=aux_tensors,
        aux_tensor_leading_dims=aux_tensor_leading_dims,
        dynamic_causal=dynamic_causal,
    )
    found, softmax_lse = attend_sequences(
        *(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k),
        **scales_of((q, k, v), (q_descale, k_descale, v_descale), ignores_others=True),
        seqused_k=seqused_k,
        block_table=block_table,
        num_splits=splits_of(num_splits),
        qv=q_v,
        out=out,
        names=_NAMES,
        wants_lse=return_softmax_lse,
        dropout_p=dropout_p,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=UNLIMITED if window_size is None else tuple(window_size),
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        deterministic=deterministic,
        sink=s_aux,
    )
    return (found, softmax_lse) if return_softmax_lse else found


def get_scheduler_metadata(
    batch_size: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    num_heads_q: int,
    num_heads_kv: int,
    headdim: int,
    cache_seqlens: Tensor,
    qkv_dtype: torch.dtype = torch.bfloat16,
    headdim_v: int | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_size: int | None = None,
    max_seqlen_k_new: int = 0,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    has_softcap: bool = False,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> Tensor:
    """An empty int32 tensor on the device of cache_seqlens, for scheduler_metadata: this package
    plans in the call itself. Nothing else is read.
    """
    return no_scheduler_metadata(cache_seqlens)


def is_fa_version_supported(fa_version: int) -> bool:
    """True: each is this package. ValueError for what is not 2, 3 or 4."""
    _check_version(fa_version)
    return True


def fa_version_unsupported_reason(fa_version: int) -> str | None:
    """None: each is this package. ValueError for what is not 2, 3 or 4."""
    _check_version(fa_version)
    return None


def _check_version(fa_version: int) -> None:
    if fa_version not in _VERSIONS:
        raise ValueError(f"fa_version: must be 2, 3 or 4, got {fa_version}")


def _check_lengths(cu_seqlens_k: Any, seqused_k: Any, block_table: Any) -> None:
    if (cu_seqlens_k is None) == (seqused_k is None):
        given = "neither" if cu_seqlens_k is None else "both"
        raise ValueError(f"cu_seqlens_k, seqused_k: one of them must be given, got {given}")
    if block_table is not None and seqused_k is None:
        raise ValueError("seqused_k: must be given with a block_table, got None")
