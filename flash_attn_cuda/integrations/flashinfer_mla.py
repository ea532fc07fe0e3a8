"""FlashInfer's flashinfer.mla.BatchMLAPagedAttentionWrapper: its parameters, order, defaults and
results, of flash_attn_cuda.flash_attn_with_kvcache.

The signatures are those of flashinfer/mla.py in flashinfer-ai/flashinfer (commit 00e3d68). Caches
are read where they lie; FP8 and what is only of its backend cutlass are refused by name. compat
does not install it: libraries take a flashinfer that is there for the whole package.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ..call.tensors import check_like, check_tensor
from ..functions.kvcache import flash_attn_with_kvcache
from .sequences import REFUSALS, refuse_given, renamed

__all__ = ["BatchMLAPagedAttentionWrapper"]


class BatchMLAPagedAttentionWrapper:
    """Latent attention of packed queries over pages of latent and of rotary columns.

    float_workspace_buffer: on the device of the calls; not written. use_cuda_graph: plan() writes
    into buffers that stay where they are, so that a captured run() may be replayed. Of the four
    buffers that FlashInfer has for that, qo_indptr tells the number of sequences, and kv_indices
    how many pages one may have: as many for each as fit. backend: any but cutlass.
    """

    def __init__(
        self,
        float_workspace_buffer: Tensor,
        use_cuda_graph: bool = False,
        qo_indptr: Tensor | None = None,
        kv_indptr: Tensor | None = None,
        kv_indices: Tensor | None = None,
        kv_len_arr: Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        if backend == "cutlass":
            raise NotImplementedError("backend: must not be cutlass, which has no plan, got it")
        self.device = float_workspace_buffer.device
        self._use_cuda_graph = use_cuda_graph
        self._width = None
        if use_cuda_graph:
            check_tensor("qo_indptr", qo_indptr)
            check_tensor("kv_indices", kv_indices)
            assert qo_indptr is not None and kv_indices is not None
            self._width = kv_indices.shape[0] // max(1, qo_indptr.shape[0] - 1)
        self._lengths: dict[str, Any] = {}

    def plan(
        self,
        qo_indptr: Tensor,
        kv_indptr: Tensor,
        kv_indices: Tensor,
        kv_len_arr: Tensor,
        num_heads: int,
        head_dim_ckv: int,
        head_dim_kpe: int,
        page_size: int,
        causal: bool,
        sm_scale: float,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
        use_profiler: bool = False,
    ) -> None:
        """Keep what run() needs. Waits for the device, as there.

        Args:
            qo_indptr: (batch + 1,): sequence b has the queries from qo_indptr[b] to
                qo_indptr[b + 1].
            kv_indptr: (batch + 1,): its pages are those of kv_indices[kv_indptr[b]] to
                kv_indices[kv_indptr[b + 1]].
            kv_indices: pages.
            kv_len_arr: (batch,): its keys.
            causal: aligned to the last query and key.
            sm_scale: of the scores.
            num_heads, head_dim_ckv, head_dim_kpe, page_size, q_data_type, kv_data_type: not read:
                run() sees them.
            use_profiler: False.

        Raises:
            ValueError: with use_cuda_graph, other numbers of sequences or more pages than the
                buffers have. NotImplementedError: use_profiler.
        """
        if use_profiler:
            raise NotImplementedError("use_profiler: must be False, got True")
        counts = kv_indptr.diff()
        most = int(counts.max()) if counts.numel() > 0 else 0
        width = most if self._width is None else self._width
        if most > width:
            raise ValueError(
                f"kv_indptr: must have at most {width} pages a sequence, as many as the buffer "
                f"kv_indices has for each, got {most}"
            )
        self._max_seqlen_q = int(qo_indptr.diff().max()) if qo_indptr.numel() > 1 else 0
        self._causal, self._sm_scale = causal, sm_scale
        first, counts, pages = (
            x.to(self.device) for x in (kv_indptr[:-1], counts, kv_indices.int())
        )
        place = torch.arange(width, device=self.device)
        at = (first[:, None] + place).clamp(max=max(0, pages.shape[0] - 1))
        table = pages[at] if pages.shape[0] > 0 else at.int()
        self._keep("block_table", table.masked_fill(place >= counts[:, None], 0))
        self._keep("cu_seqlens_q", qo_indptr.to(self.device, torch.int32))
        self._keep("cache_seqlens", kv_len_arr.to(self.device, torch.int32))

    def _keep(self, name: str, x: Tensor) -> None:
        """In the tensor that a graph may have been captured with."""
        kept = self._lengths.get(name)
        if not self._use_cuda_graph or kept is None:
            self._lengths[name] = x.clone()
        elif kept.shape != x.shape:
            raise ValueError(
                f"qo_indptr: must have as many sequences in every plan with use_cuda_graph, got "
                f"{x.shape[0]} rows of {name} after {kept.shape[0]}"
            )
        else:
            kept.copy_(x)

    def run(
        self,
        q_nope: Tensor,
        q_pe: Tensor,
        ckv_cache: Tensor,
        kpe_cache: Tensor,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        profiler_buffer: Tensor | None = None,
        kv_len: Tensor | None = None,
        page_table: Tensor | None = None,
        return_lse_base_on_e: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """flash_attn_cuda.flash_attn_with_kvcache of what plan() was told.

        Args:
            q_nope: (total_q, heads, head_dim_ckv), of fp16 or bf16.
            q_pe: (total_q, heads, head_dim_kpe); head_dim_kpe may be 0.
            ckv_cache: (num_pages, page_size, head_dim_ckv).
            kpe_cache: (num_pages, page_size, head_dim_kpe).
            out: as q_nope, to write the result into.
            lse: (total_q, heads), fp32, likewise, with return_lse.
            return_lse: also return lse: of powers of two, or natural with return_lse_base_on_e.

        Returns:
            out, or (out, lse).

        Raises:
            RuntimeError: plan() was not called. As flash_attn_cuda.flash_attn_with_kvcache.
            NotImplementedError: profiler_buffer, kv_len or page_table.
        """
        refuse_given(
            "only FlashInfer's cutlass backend or profiler reads it",
            profiler_buffer=profiler_buffer,
            kv_len=kv_len,
            page_table=page_table,
        )
        if not self._lengths:
            raise RuntimeError("plan: must be called before run")
        given = {"q_nope": q_nope, "q_pe": q_pe, "ckv_cache": ckv_cache, "kpe_cache": kpe_cache}
        for name, tensor in given.items():
            check_tensor(name, tensor)
        # Where nothing is rotary, a value is its key.
        has_rotary = q_pe.shape[-1] > 0
        keys = kpe_cache if has_rotary else ckv_cache
        try:
            out, found = flash_attn_with_kvcache(
                q_pe if has_rotary else q_nope,
                keys.unsqueeze(-2),
                ckv_cache.unsqueeze(-2),
                qv=q_nope if has_rotary else None,
                softmax_scale=self._sm_scale,
                causal=self._causal,
                max_seqlen_q=self._max_seqlen_q,
                return_softmax_lse=True,
                out=out,
                **self._lengths,
            )
        except REFUSALS as error:
            names = {"v_cache": "ckv_cache", "k_cache": "ckv_cache", "q": "q_nope"}
            if has_rotary:
                names |= {"k_cache": "kpe_cache", "qv": "q_nope", "q": "q_pe"}
            raise renamed(error, names) from error
        if not return_lse:
            return out
        found = found.transpose(0, 1)
        if not return_lse_base_on_e:
            found = found * math.log2(math.e)
        if lse is None:
            return out, found.contiguous()
        check_like("lse", lse, found.shape, found.dtype, q_nope)
        return out, lse.copy_(found)
