"""Custom operators that sum partial results, of keys that were split. None has gradients.

_flash_attn_combine      as new tensors
_flash_attn_combine_out  into a given one
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import cpu
from ..checks.tensors import check_like, check_tensor
from .support import Tensors2, call_extension, schema_of

_ops = torch.ops.flash_attn_cuda
_RETURNS = "Tensor out, Tensor softmax_lse"
COMBINED_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


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
    schema=schema_of(_RETURNS, (CombineCall, ("out_partial", "lse_partial", "out_dtype"))),
)
def _combine_op(*args: Any) -> Tensors2:
    call = CombineCall(*args)
    call.check()
    return call.on_cpu()


@_combine_op.register_kernel("cuda")
def _(*args: Any) -> Tensors2:
    call = CombineCall(*args)
    call.check()
    device = call.out_partial.device
    out, softmax_lse = call_extension(
        "combine", device, call.out_partial, call.lse_partial, None, call.dtype
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
    schema=schema_of(
        "Tensor softmax_lse",
        (CombineOutCall, ("out_partial", "lse_partial", "out")),
        mutated=("out",),
    ),
)
def _combine_out_op(out_partial: Tensor, lse_partial: Tensor, out: Tensor) -> Tensor:
    combined, softmax_lse = CombineOutCall(out_partial, lse_partial, out).check().on_cpu()
    out.copy_(combined)
    return softmax_lse


@_combine_out_op.register_kernel("cuda")
def _(out_partial: Tensor, lse_partial: Tensor, out: Tensor) -> Tensor:
    CombineOutCall(out_partial, lse_partial, out).check()
    device = out_partial.device
    return call_extension("combine", device, out_partial, lse_partial, out, out.dtype)[1]


@_combine_out_op.register_fake
def _(out_partial: Tensor, lse_partial: Tensor, out: Tensor) -> Tensor:
    return CombineOutCall(out_partial, lse_partial, out).check().empty_lse()


def run_combine(
    out_partial: Tensor, lse_partial: Tensor, out_dtype: torch.dtype | None
) -> Tensors2:
    """(out, softmax_lse)."""
    return _ops._flash_attn_combine(out_partial, lse_partial, out_dtype)


def run_combine_out(out_partial: Tensor, lse_partial: Tensor, out: Tensor) -> Tensor:
    """softmax_lse; writes out."""
    return _ops._flash_attn_combine_out(out_partial, lse_partial, out)
