"""Custom operators that sum partial results, of keys that were split. None has gradients.

_flash_attn_combine      as new tensors
_flash_attn_combine_out  into a given one
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..call.tensors import check_like, check_may_be_written, check_tensor
from ..cpu.combine import combine
from .support import Tensors2, call_extension, define, ops

COMBINED_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class CombineCall:
    """Arguments of both operators; where out (B, S, H, D) is given, dtype is that of it."""

    out_partial: Tensor
    lse_partial: Tensor
    dtype: torch.dtype
    out: Tensor | None = None

    def empty_lse(self) -> Tensor:
        """(B, S, H), where the rows of a head are neighbours, on every device: the layout that the
        kernel writes, and so the one that a compiler is told.
        """
        _, batch, seqlen, heads = self.lse_partial.shape
        strides = (heads * seqlen, 1, seqlen)
        return self.lse_partial.new_empty_strided((batch, seqlen, heads), strides)

    def empty(self) -> Tensors2:
        partial = self.out_partial
        return partial.new_empty(partial.shape[1:], dtype=self.dtype), self.empty_lse()

    def on_cpu(self) -> Tensors2:
        out, softmax_lse = combine(self.out_partial, self.lse_partial, self.dtype)
        out = out if self.out is None else self.out.copy_(out)
        return out, self.empty_lse().copy_(softmax_lse)

    def on_cuda(self) -> Tensors2:
        arguments = (self.out_partial, self.lse_partial, self.out, self.dtype)
        out, softmax_lse = call_extension("combine", self.out_partial.device, *arguments)
        return out, softmax_lse


def checked(out_partial: Any, lse_partial: Any, out_dtype: torch.dtype | None) -> CombineCall:
    """The call; raises for what no backend runs."""
    check_partials(out_partial, lse_partial)
    dtype = out_partial.dtype if out_dtype is None else out_dtype
    _check_dtype("out_dtype: must", dtype, out_partial)
    return CombineCall(out_partial, lse_partial, dtype)


def checked_out(out_partial: Any, lse_partial: Any, out: Any) -> CombineCall:
    """The call, which writes into out; raises for what no backend runs."""
    check_tensor("out", out)
    check_partials(out_partial, lse_partial)
    _check_dtype("out: dtype must", out.dtype, out_partial)
    check_like("out", out, out_partial.shape[1:], out.dtype, out_partial, "out_partial")
    check_may_be_written("out", out)
    return CombineCall(out_partial, lse_partial, out.dtype, out)


def _check_dtype(what: str, dtype: torch.dtype, out_partial: Tensor) -> None:
    if dtype not in (*COMBINED_DTYPES, out_partial.dtype):
        allowed = ", ".join(str(x).removeprefix("torch.") for x in COMBINED_DTYPES)
        raise TypeError(f"{what} be one of {allowed}, got {dtype}")


def check_partials(out_partial: Any, lse_partial: Any) -> None:
    """Raise unless these are fp32 (fp64 on the CPU) (splits, B, S, H, D) and (splits, B, S, H)."""
    check_tensor("out_partial", out_partial)
    dtypes = (torch.float32,) if out_partial.is_cuda else (torch.float32, torch.float64)
    if out_partial.dtype not in dtypes:
        raise TypeError(f"out_partial: dtype must be torch.float32, got {out_partial.dtype}")
    shape = tuple(out_partial.shape)
    if len(shape) != 5:
        raise ValueError(
            "out_partial: must have 5 dimensions (splits, batch, seqlen, heads, head_dim), "
            f"got shape {shape}"
        )
    if shape[0] < 1:
        raise ValueError(f"out_partial: must have at least one split, got shape {shape}")
    like = (shape[:-1], out_partial.dtype, out_partial, "out_partial")
    check_like("lse_partial", lse_partial, *like)


_combine_op = define(
    "_flash_attn_combine",
    "(Tensor out_partial, Tensor lse_partial, ScalarType? out_dtype) "
    "-> (Tensor out, Tensor softmax_lse)",
    check=lambda *args: (checked(*args),),
    cpu=CombineCall.on_cpu,
    cuda=CombineCall.on_cuda,
    fake=CombineCall.empty,
)
_combine_out_op = define(
    "_flash_attn_combine_out",
    "(Tensor out_partial, Tensor lse_partial, Tensor(a!) out) -> Tensor softmax_lse",
    mutated=("out",),
    check=lambda *args: (checked_out(*args),),
    cpu=lambda call: call.on_cpu()[1],
    cuda=lambda call: call.on_cuda()[1],
    fake=CombineCall.empty_lse,
)


def run_combine(
    out_partial: Tensor, lse_partial: Tensor, out_dtype: torch.dtype | None
) -> Tensors2:
    """(out, softmax_lse)."""
    return ops._flash_attn_combine(out_partial, lse_partial, out_dtype)


def run_combine_out(out_partial: Tensor, lse_partial: Tensor, out: Tensor) -> Tensor:
    """softmax_lse; writes out."""
    return ops._flash_attn_combine_out(out_partial, lse_partial, out)
