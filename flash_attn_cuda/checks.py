"""What the arguments of an attention call must satisfy, whichever backend runs it.

Every error names the argument, the rule and the offending value. TypeError: not a tensor, not a
number, a dtype without a kernel. ValueError: shapes, devices, values. NotImplementedError: an
argument of FlashAttention-2 that this version refuses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

MAX_HEAD_DIM = 256
MAX_SCALE = torch.finfo(torch.float32).max

CUDA_DTYPES = (torch.float16, torch.bfloat16)
CPU_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

# What a caller knows q, k and v as: slices of a packed tensor are errors of that tensor.
Names = tuple[str, str, str]
QKV_NAMES: Names = ("q", "k", "v")


def lse_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of softmax_lse and softmax_d: fp32, or fp64 for fp64 inputs (CPU only)."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def check_attention_inputs(
    q: Any, k: Any, v: Any, softmax_scale: Any, names: Names = QKV_NAMES
) -> None:
    """Raise unless q (B, Sq, Hq, D) and k, v (B, Sk, Hk, D) are a call that some backend runs."""
    q_name, k_name, v_name = names
    for name, tensor in zip(names, (q, k, v), strict=True):
        _check_tensor(name, tensor)
        if tensor.device != q.device:
            raise ValueError(
                f"{name}: must be on the device of {q_name} ({q.device}), got {tensor.device}"
            )
        if tensor.dtype != q.dtype:
            raise TypeError(
                f"{name}: must have the dtype of {q_name} ({q.dtype}), got {tensor.dtype}"
            )

    batch, _, heads_q, head_dim = q.shape
    heads_k = k.shape[2]
    if not 1 <= head_dim <= MAX_HEAD_DIM:
        raise ValueError(
            f"{q_name}: last dimension (head_dim) must be from 1 to {MAX_HEAD_DIM}, got {head_dim}"
        )
    if heads_q < 1:
        raise ValueError(f"{q_name}: must have at least one head, got shape {tuple(q.shape)}")
    if heads_k < 1:
        raise ValueError(f"{k_name}: must have at least one head, got shape {tuple(k.shape)}")
    if heads_q % heads_k != 0:
        raise ValueError(
            f"{k_name}: number of heads must divide that of {q_name} ({heads_q}), got {heads_k}"
        )
    if k.shape[0] != batch:
        raise ValueError(f"{k_name}: batch must be that of {q_name} ({batch}), got {k.shape[0]}")
    if k.shape[3] != head_dim:
        raise ValueError(
            f"{k_name}: last dimension (head_dim) must be that of {q_name} ({head_dim}), "
            f"got {k.shape[3]}"
        )
    if v.shape != k.shape:
        raise ValueError(
            f"{v_name}: must have the shape of {k_name}, {tuple(k.shape)}, got {tuple(v.shape)}"
        )
    check_softmax_scale(softmax_scale)


def check_softmax_scale(softmax_scale: Any) -> None:
    """Raise unless softmax_scale is None (for head_dim ** -0.5) or a number finite in fp32."""
    if softmax_scale is None or isinstance(softmax_scale, torch.SymFloat):
        return
    if not isinstance(softmax_scale, int | float):
        kind = type(softmax_scale).__name__
        raise TypeError(f"softmax_scale: must be None or a number, got {kind}")
    if not abs(softmax_scale) <= MAX_SCALE:
        raise ValueError(f"softmax_scale: must be finite in float32, got {softmax_scale}")


def check_backward_inputs(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    softmax_scale: float,
    dlse: Tensor | None,
) -> None:
    """Raise unless the tensors are those of one attention call and of its outputs' gradients."""
    check_attention_inputs(q, k, v, softmax_scale)
    batch, seqlen_q, heads_q, _ = q.shape
    rows = (batch, heads_q, seqlen_q)
    check_like("dout", dout, q.shape, q.dtype, q)
    check_like("out", out, q.shape, q.dtype, q)
    check_like("softmax_lse", softmax_lse, rows, lse_dtype(q.dtype), q)
    if dlse is not None:
        check_like("dlse", dlse, rows, lse_dtype(q.dtype), q)


def check_like(
    name: str, tensor: Tensor, shape: Sequence[int], dtype: torch.dtype, q: Tensor
) -> None:
    """Raise unless `tensor` has this shape and dtype and lies on the device of q."""
    if tensor.device != q.device:
        raise ValueError(f"{name}: must be on the device of q ({q.device}), got {tensor.device}")
    if tensor.dtype != dtype:
        raise TypeError(f"{name}: dtype must be {dtype}, got {tensor.dtype}")
    if tuple(tensor.shape) != tuple(shape):
        raise ValueError(f"{name}: must have shape {tuple(shape)}, got {tuple(tensor.shape)}")


def check_cuda_head_dim(q: Tensor) -> None:
    """Raise unless the kernels can read q as it is; the public functions pad other head dims."""
    if q.is_cuda and q.shape[-1] % 8 != 0:
        raise ValueError(
            f"q: last dimension (head_dim) must be a multiple of 8 on CUDA, got {q.shape[-1]}"
        )


def check_packed(name: str, tensor: Any, layout: str, packed: int) -> None:
    """Raise unless `tensor` has five dimensions, with `packed` tensors along dimension 2."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name}: must be a torch.Tensor, got {type(tensor).__name__}")
    if tensor.dim() != 5 or tensor.shape[2] != packed:
        raise ValueError(f"{name}: must have shape {layout}, got {tuple(tensor.shape)}")


def refuse_later_arguments(
    dropout_p: float, softcap: float, alibi_slopes: Any, deterministic: bool
) -> None:
    """Raise NotImplementedError for the first argument that asks for what this version lacks."""
    if dropout_p != 0.0:
        raise not_implemented("dropout_p", "must be 0.0", dropout_p)
    if softcap > 0.0:
        raise not_implemented("softcap", "must be 0.0", softcap)
    if alibi_slopes is not None:
        raise not_implemented("alibi_slopes", "must be None", type(alibi_slopes).__name__)
    if deterministic:
        raise not_implemented("deterministic", "must be False", deterministic)


def causal_from_window(causal: bool, window_size: Any) -> bool:
    """Fold `window_size` into `causal`; NotImplementedError for a window that is more than that.

    `window_size` is (left, right), a sequence or tensor of two integers, both ends inclusive;
    negative or None is unlimited on that side. causal=True sets right to 0.
    """
    try:
        left, right = window_size
        left = -1 if left is None else int(left)
        right = -1 if right is None else int(right)
    except (TypeError, ValueError) as error:
        raise TypeError(f"window_size: must be two integers, got {window_size!r}") from error
    if left < 0 and (causal or right <= 0):
        return bool(causal) or right == 0
    raise not_implemented("window_size", "must be (-1, -1) or (-1, 0), causal", (left, right))


def not_implemented(argument: str, rule: str, value: object) -> NotImplementedError:
    """The error for a value of a FlashAttention-2 argument that this version does not implement."""
    return NotImplementedError(f"{argument}: {rule}, got {value} (not implemented yet)")


def packed_sequences_not_implemented(argument: str) -> NotImplementedError:
    """The error of the functions of packed sequences, which `argument` describes."""
    return NotImplementedError(
        f"{argument}: packed sequences of different lengths are not implemented yet; "
        "flash_attn_func takes one sequence, or several of one length"
    )


def _check_tensor(name: str, tensor: Any) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name}: must be a torch.Tensor, got {type(tensor).__name__}")
    if tensor.layout != torch.strided or tensor.is_nested:
        layout = "a nested tensor" if tensor.is_nested else f"layout {tensor.layout}"
        raise TypeError(f"{name}: must be a dense tensor, got {layout}")
    if tensor.dim() != 4:
        raise ValueError(
            f"{name}: must have 4 dimensions (batch, seqlen, heads, head_dim), "
            f"got shape {tuple(tensor.shape)}"
        )
    device = tensor.device.type
    if device not in ("cuda", "cpu", "meta"):
        raise ValueError(f"{name}: must be a CUDA or CPU tensor, got one on {tensor.device}")
    dtypes = CUDA_DTYPES if device == "cuda" else CPU_DTYPES
    if tensor.dtype not in dtypes:
        allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise TypeError(f"{name}: dtype must be one of {allowed} on {device}, got {tensor.dtype}")
