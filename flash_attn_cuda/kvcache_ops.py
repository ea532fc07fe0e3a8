"""Custom operators of attention over a KV cache. None has gradients.

_flash_attn_with_kvcache         reads the cache
_flash_attn_with_kvcache_append  writes new keys and values into it first
_flash_attn_combine              sums partial results, of keys that were split
_flash_attn_combine_out          the same into a given tensor
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from . import cpu
from .cache_checks import CacheArguments, check_cache_contents, check_cache_inputs
from .checks import MAX_INT32, check_like, check_tensor, lse_dtype, output_shape
from .op_support import (
    Tensors2,
    call_extension,
    check_score_arguments,
    cpu_options,
    extension_options,
    schema_of,
)

_RETURNS = "Tensor out, Tensor softmax_lse"
COMBINED_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class KvCacheCall(CacheArguments):
    """A call of either cache operator."""

    @property
    def dropout_p(self) -> float:
        return 0.0

    def check(self) -> None:
        """Raise for what no backend runs."""
        check_cache_inputs(self)
        check_score_arguments(self, self.batch, self.q)

    def on_cpu(self) -> Tensors2:
        used = self.cache_seqlens
        if self.seqlen_k is not None:
            used = torch.full((self.batch,), self.seqlen_k, dtype=torch.int32, device="cpu")
        check_cache_contents(self, used)
        options = replace(cpu_options(self, None), sink=self.sink)
        with torch.autocast("cpu", enabled=False):
            return cpu.kvcache_forward(
                *(self.q, self.k_cache, self.v_cache, self.k, self.v, options),
                rotary_cos=self.rotary_cos,
                rotary_sin=self.rotary_sin,
                rotary_interleaved=self.rotary_interleaved,
                cache_seqlens=used,
                cache_batch_idx=self.cache_batch_idx,
                cache_leftpad=self.cache_leftpad,
                block_table=self.block_table,
                cu_seqlens_q=self.cu_seqlens_q,
                cu_seqlens_k_new=self.cu_seqlens_k_new,
            )

    def on_cuda(self) -> Tensors2:
        out, softmax_lse = call_extension("fwd_kvcache", self.q, **self.extension_arguments())
        return out, softmax_lse

    def extension_arguments(self) -> dict[str, Any]:
        """All but q, by the names that the extension gives them."""
        return {
            "kcache": self.k_cache,
            "vcache": self.v_cache,
            "k": self.k,
            "v": self.v,
            "seqlens_k": self.cache_seqlens,
            "rotary_cos": self.rotary_cos,
            "rotary_sin": self.rotary_sin,
            "cache_batch_idx": self.cache_batch_idx,
            "leftpad_k": self.cache_leftpad,
            "block_table": self.block_table,
            "out": None,
            "is_rotary_interleaved": self.rotary_interleaved,
            "num_splits": self.num_splits,
            "cu_seqlens_q": self.cu_seqlens_q,
            "max_seqlen_q": min(self.max_seqlen_q, MAX_INT32),
            "cu_seqlens_k_new": self.cu_seqlens_k_new,
            "batch_invariant": self.batch_invariant,
            "seqlen_k": self.seqlen_k,
            "sink": self.sink,
            **extension_options(self),
        }

    def empty_results(self) -> Tensors2:
        q = self.q
        if self.cu_seqlens_q is None:
            batch, seqlen_q, heads_q, _ = q.shape
            rows: tuple[int, ...] = (batch, heads_q, seqlen_q)
        else:
            total_q, heads_q, _ = q.shape
            rows = (heads_q, total_q)
        out = q.new_empty(output_shape(q, self.v_cache))
        return out, q.new_empty(rows, dtype=lse_dtype(q.dtype))


def _read_call(args: tuple[Any, ...]) -> KvCacheCall:
    call = KvCacheCall(*args)
    call.check()
    if call.k is not None:
        raise ValueError("k: must be None; _flash_attn_with_kvcache_append writes into the cache")
    return call


def _append_call(args: tuple[Any, ...]) -> KvCacheCall:
    call = KvCacheCall(*args)
    call.check()
    if call.k is None:
        raise ValueError("k: must be given; _flash_attn_with_kvcache reads the cache alone")
    return call


@torch.library.custom_op(
    "flash_attn_cuda::_flash_attn_with_kvcache",
    mutates_args=(),
    device_types="cpu",
    schema=schema_of(KvCacheCall, _RETURNS),
)
def _read_op(*args: Any) -> Tensors2:
    return _read_call(args).on_cpu()


@_read_op.register_kernel("cuda")
def _(*args: Any) -> Tensors2:
    return _read_call(args).on_cuda()


@_read_op.register_fake
def _(*args: Any) -> Tensors2:
    return _read_call(args).empty_results()


@torch.library.custom_op(
    "flash_attn_cuda::_flash_attn_with_kvcache_append",
    mutates_args=("k_cache", "v_cache"),
    device_types="cpu",
    schema=schema_of(KvCacheCall, _RETURNS, mutated=("k_cache", "v_cache")),
)
def _append_op(*args: Any) -> Tensors2:
    return _append_call(args).on_cpu()


@_append_op.register_kernel("cuda")
def _(*args: Any) -> Tensors2:
    return _append_call(args).on_cuda()


@_append_op.register_fake
def _(*args: Any) -> Tensors2:
    return _append_call(args).empty_results()


# -- combine -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CombineCall:
    """Arguments of _flash_attn_combine. out_dtype None is out_partial's."""

    out_partial: Tensor
    lse_partial: Tensor
    out_dtype: torch.dtype | None

    def check(self) -> None:
        """Raise for what no backend runs."""
        check_partials(self.out_partial, self.lse_partial)
        if self.dtype not in (*COMBINED_DTYPES, self.out_partial.dtype):
            allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in COMBINED_DTYPES)
            raise TypeError(f"out_dtype: must be one of {allowed}, got {self.dtype}")

    @property
    def dtype(self) -> torch.dtype:
        return self.out_partial.dtype if self.out_dtype is None else self.out_dtype

    def empty_lse(self) -> Tensor:
        """(B, S, H), where the rows of a head are neighbours, on every device: the layout that the
        kernel writes, and so the one that a compiler is told.
        """
        _, batch, seqlen, heads = self.lse_partial.shape
        strides = (heads * seqlen, 1, seqlen)
        return self.lse_partial.new_empty_strided((batch, seqlen, heads), strides)

    def on_cpu(self) -> Tensors2:
        out, softmax_lse = cpu.combine(self.out_partial, self.lse_partial, self.dtype)
        return out, self.empty_lse().copy_(softmax_lse)


def check_partials(out_partial: Any, lse_partial: Any) -> None:
    """Raise unless these are fp32 (fp64 on the CPU) (splits, B, S, H, D) and (splits, B, S, H)."""
    check_tensor("out_partial", out_partial)
    dtypes = (torch.float32,) if out_partial.is_cuda else (torch.float32, torch.float64)
    if out_partial.dtype not in dtypes:
        raise TypeError(f"out_partial: dtype must be torch.float32, got {out_partial.dtype}")
    if out_partial.dim() != 5:
        raise ValueError(
            "out_partial: must have 5 dimensions (splits, batch, seqlen, heads, head_dim), "
            f"got shape {tuple(out_partial.shape)}"
        )
    if out_partial.shape[0] < 1:
        raise ValueError(
            f"out_partial: must have at least one split, got shape {tuple(out_partial.shape)}"
        )
    check_tensor("lse_partial", lse_partial)
    if lse_partial.device != out_partial.device:
        raise ValueError(
            f"lse_partial: must be on the device of out_partial ({out_partial.device}), "
            f"got {lse_partial.device}"
        )
    check_like("lse_partial", lse_partial, out_partial.shape[:-1], out_partial.dtype, out_partial)


@torch.library.custom_op(
    "flash_attn_cuda::_flash_attn_combine",
    mutates_args=(),
    device_types="cpu",
    schema=schema_of(CombineCall, _RETURNS),
)
def _combine_op(*args: Any) -> Tensors2:
    call = CombineCall(*args)
    call.check()
    return call.on_cpu()


@_combine_op.register_kernel("cuda")
def _(*args: Any) -> Tensors2:
    call = CombineCall(*args)
    call.check()
    out, softmax_lse = call_extension(
        "combine", call.out_partial, lse_partial=call.lse_partial, out=None, out_dtype=call.dtype
    )
    return out, softmax_lse


@_combine_op.register_fake
def _(*args: Any) -> Tensors2:
    call = CombineCall(*args)
    call.check()
    partial = call.out_partial
    return partial.new_empty(partial.shape[1:], dtype=call.dtype), call.empty_lse()


@dataclass(frozen=True)
class CombineOutCall:
    """Arguments of _flash_attn_combine_out: out (B, S, H, D) is written."""

    out_partial: Tensor
    lse_partial: Tensor
    out: Tensor

    def check(self) -> CombineCall:
        """Raise for what no backend runs; returns the call that computes the same."""
        check_tensor("out", self.out)
        call = CombineCall(self.out_partial, self.lse_partial, self.out.dtype)
        check_partials(self.out_partial, self.lse_partial)
        if self.out.dtype not in (*COMBINED_DTYPES, self.out_partial.dtype):
            allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in COMBINED_DTYPES)
            raise TypeError(f"out: dtype must be one of {allowed}, got {self.out.dtype}")
        if self.out.device != self.out_partial.device:
            raise ValueError(
                f"out: must be on the device of out_partial ({self.out_partial.device}), "
                f"got {self.out.device}"
            )
        check_like("out", self.out, self.out_partial.shape[1:], self.out.dtype, self.out_partial)
        return call


@torch.library.custom_op(
    "flash_attn_cuda::_flash_attn_combine_out",
    mutates_args=("out",),
    device_types="cpu",
    schema=schema_of(CombineOutCall, "Tensor softmax_lse", mutated=("out",)),
)
def _combine_out_op(out_partial: Tensor, lse_partial: Tensor, out: Tensor) -> Tensor:
    combined, softmax_lse = CombineOutCall(out_partial, lse_partial, out).check().on_cpu()
    out.copy_(combined)
    return softmax_lse


@_combine_out_op.register_kernel("cuda")
def _(out_partial: Tensor, lse_partial: Tensor, out: Tensor) -> Tensor:
    CombineOutCall(out_partial, lse_partial, out).check()
    return call_extension(
        "combine", out_partial, lse_partial=lse_partial, out=out, out_dtype=out.dtype
    )[1]


@_combine_out_op.register_fake
def _(out_partial: Tensor, lse_partial: Tensor, out: Tensor) -> Tensor:
    return CombineOutCall(out_partial, lse_partial, out).check().empty_lse()
