"""What the arguments of an attention call must satisfy, whichever backend runs it.

Every error names the argument, the rule and the offending value. TypeError: not a tensor, not a
number, a dtype without a kernel. ValueError: shapes, devices, values. Lengths and indices, of
packed sequences and of caches, are in lengths.py.
"""

from __future__ import annotations

import numbers
import operator
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch._C import _are_functorch_transforms_active, _functorch
from torch.autograd import forward_ad
from torch.compiler import is_compiling

MAX_HEAD_DIM = 512
MAX_FLOAT32 = torch.finfo(torch.float32).max
MIN_FLOAT32 = torch.finfo(torch.float32).tiny
MAX_INT32 = 2**31 - 1
MAX_INT64 = 2**63 - 1

CUDA_DTYPES = (torch.float16, torch.bfloat16)
CPU_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
E4M3 = torch.float8_e4m3fn
FP8_MULTIPLE = 16  # of the head dims of e4m3

DENSE_LAYOUT = "(batch, seqlen, heads, head_dim)"
PACKED_LAYOUT = "(total, heads, head_dim)"
PAGED_LAYOUT = "(num_pages, page_size, heads, head_dim)"
CACHE_LAYOUT = "(batch_cache, capacity, heads, head_dim)"


def lse_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of softmax_lse and softmax_d: fp32, or fp64 for fp64 inputs (CPU only)."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def round_up_seqlen(seqlen: int) -> int:
    """Rows per head of softmax_d where it is not packed: a multiple of 128."""
    return (seqlen + 127) // 128 * 128


def check_qkv(
    q: Any,
    k: Any,
    v: Any,
    names: tuple[str, str, str],
    q_layout: str,
    k_layout: str,
    *,
    allows_fp8: bool = False,
) -> None:
    """Raise unless the tensors have these layouts, one device, one dtype and heads that fit.

    A layout is the names of the dimensions, which end in heads and head_dim; v may have another
    head_dim than q and k. `allows_fp8`: k and v, both, may be of e4m3 instead.
    """
    q_name, k_name, v_name = names
    _check_data(q_name, q, q_layout)
    for name, tensor in ((k_name, k), (v_name, v)):
        _check_data(name, tensor, k_layout, (E4M3,) if allows_fp8 else ())
        check_device(name, tensor, q, q_name)
    if allows_fp8 and E4M3 in (k.dtype, v.dtype):
        if v.dtype != k.dtype:
            raise TypeError(f"{v_name}: must have the dtype of {k_name} ({k.dtype}), got {v.dtype}")
        check_fp8_head_dim(k_name, "head_dim", k.shape[-1])
        check_fp8_head_dim(v_name, "head_dim_v", v.shape[-1])
    else:
        check_device_and_dtype(k_name, k, q, q_name)
        check_device_and_dtype(v_name, v, q, q_name)
    heads_q, head_dim = q.shape[-2:]
    heads_k = k.shape[-2]
    _check_head_dim(q_name, "head_dim", head_dim)
    if heads_q < 1:
        raise ValueError(f"{q_name}: must have at least one head, got shape {tuple(q.shape)}")
    if heads_k < 1:
        raise ValueError(f"{k_name}: must have at least one head, got shape {tuple(k.shape)}")
    if heads_q % heads_k != 0:
        raise ValueError(
            f"{k_name}: number of heads must divide that of {q_name} ({heads_q}), got {heads_k}"
        )
    if k.shape[-1] != head_dim:
        raise ValueError(
            f"{k_name}: last dimension (head_dim) must be that of {q_name} ({head_dim}), "
            f"got {k.shape[-1]}"
        )
    check_values_like(v_name, v, k_name, k)
    _check_head_dim(v_name, "head_dim_v", v.shape[-1])


def output_shape(q: Tensor, v: Tensor) -> tuple[int, ...]:
    """The shape of out: that of q, with the head dim of v."""
    return *q.shape[:-1], v.shape[-1]


def check_fp8_head_dim(name: str, dimension: str, size: int) -> None:
    """Raise unless a tensor of e4m3 may have this head dim."""
    if size % FP8_MULTIPLE != 0:
        raise ValueError(
            f"{name}: last dimension ({dimension}) must be a multiple of {FP8_MULTIPLE} of {E4M3}, "
            f"got {size}"
        )


def check_values_like(v_name: str, v: Tensor, k_name: str, k: Tensor) -> None:
    """Raise unless v has the shape of k but for the head dim."""
    if v.shape[:-1] != k.shape[:-1]:
        raise ValueError(
            f"{v_name}: must have the shape of {k_name} but for the last dimension, "
            f"{tuple(k.shape)}, got {tuple(v.shape)}"
        )


def check_contiguous_rows(name: str, x: Tensor) -> None:
    if x.stride(-1) != 1:
        raise ValueError(
            f"{name}: must be contiguous in its last dimension, got stride {x.stride(-1)}"
        )


def check_pair(a_name: str, a: Any, b_name: str, b: Any) -> None:
    """Raise unless both are None or neither."""
    if (a is None) != (b is None):
        missing, given = (a_name, b_name) if a is None else (b_name, a_name)
        raise ValueError(f"{missing}: must be given with {given}, got None")


def check_device(name: str, tensor: Tensor, q: Tensor, q_name: str = "q") -> None:
    """Raise unless `tensor` lies on the device of q."""
    if tensor.device != q.device:
        raise ValueError(
            f"{name}: must be on the device of {q_name} ({q.device}), got {tensor.device}"
        )


def check_device_and_dtype(name: str, tensor: Tensor, q: Tensor, q_name: str = "q") -> None:
    """Raise unless `tensor` has the device and the dtype of q."""
    check_device(name, tensor, q, q_name)
    if tensor.dtype != q.dtype:
        raise TypeError(f"{name}: must have the dtype of {q_name} ({q.dtype}), got {tensor.dtype}")


def check_dtype(
    name: str, dtype: torch.dtype, allowed: Sequence[torch.dtype], where: str = ""
) -> None:
    """Raise unless a dtype is one of some."""
    if dtype not in allowed:
        names = ", ".join(str(x).removeprefix("torch.") for x in allowed)
        raise TypeError(f"{name}: dtype must be one of {names}{where}, got {dtype}")


def as_number(name: str, value: Any, wanted: str = "a number") -> float:
    """A number as operators take it, of one of Python's or numpy's types or a 0-d tensor on the
    CPU; TypeError for others.
    """
    if isinstance(value, Tensor) and value.dim() == 0:
        if value.device.type != "cpu":
            raise TypeError(
                f"{name}: must be {wanted}, or a tensor on the CPU, as reading another one would "
                f"wait for the device, got one on {value.device}"
            )
        refuse_gradients("which attention does not give to numbers", **{name: value})
        value = value.item()
    if isinstance(value, bool) or not isinstance(
        value, numbers.Real | torch.SymFloat | torch.SymInt
    ):
        raise TypeError(f"{name}: must be {wanted}, got {type(value).__name__}")
    if isinstance(value, (int, torch.SymFloat, torch.SymInt)):
        return cast(float, value)
    return float(value)


def as_index(name: str, value: Any, wanted: str = "an integer") -> int:
    """An integer of any type, as operators take it; TypeError for what is none."""
    if isinstance(value, (int, torch.SymInt)):
        return cast(int, value)
    try:
        return operator.index(value)
    except TypeError as error:
        raise TypeError(f"{name}: must be {wanted}, got {type(value).__name__}") from error


def check_number(name: str, value: Any, wanted: str = "a number") -> None:
    """Raise for what is not of a type that operators take for a float."""
    if not isinstance(value, (int, float, torch.SymFloat)):
        raise TypeError(f"{name}: must be {wanted}, got {type(value).__name__}")


def check_rng_state(rng_state: Any, dropout_p: float, q: Tensor) -> None:
    """Raise unless a backward with dropout has the forward's (seed, offset), int64."""
    if dropout_p == 0.0:
        return
    if rng_state is None:
        raise ValueError(
            f"rng_state: must be that of the forward where dropout_p > 0 ({dropout_p}), got None"
        )
    check_like("rng_state", rng_state, (2,), torch.int64, q)


def check_place(
    name: str,
    tensor: Any,
    dtypes: torch.dtype | tuple[torch.dtype, ...],
    q: Tensor,
    q_name: str = "q",
) -> None:
    """Raise unless `tensor` has one of these dtypes and lies on the device of q."""
    check_tensor(name, tensor)
    check_device(name, tensor, q, q_name)
    allowed = dtypes if isinstance(dtypes, tuple) else (dtypes,)
    if tensor.dtype not in allowed:
        text = " or ".join(dict.fromkeys(map(str, allowed)))
        raise TypeError(f"{name}: dtype must be {text}, got {tensor.dtype}")


def check_like(
    name: str,
    tensor: Any,
    shape: Sequence[int],
    dtype: torch.dtype,
    q: Tensor,
    q_name: str = "q",
) -> None:
    """Raise unless `tensor` has this shape and dtype and lies on the device of q."""
    check_place(name, tensor, dtype, q, q_name)
    if tuple(tensor.shape) != tuple(shape):
        raise ValueError(f"{name}: must have shape {tuple(shape)}, got {tuple(tensor.shape)}")


def check_shapes(name: str, tensor: Tensor, shapes: Sequence[Sequence[int]]) -> None:
    """Raise unless `tensor` has one of these shapes."""
    if not any(_has_shape(tensor, shape) for shape in shapes):
        allowed = " or ".join(str(tuple(shape)) for shape in shapes)
        raise ValueError(f"{name}: must have shape {allowed}, got {tuple(tensor.shape)}")


def _has_shape(x: Tensor, shape: Sequence[int]) -> bool:
    # One by one: where a compiler traces, `in` takes a symbol for another number.
    return x.dim() == len(shape) and all(a == b for a, b in zip(x.shape, shape, strict=True))


def check_cuda_head_dims(q: Tensor, v: Tensor) -> None:
    """Raise unless the kernels can read q and v as they are; the public functions pad others."""
    for name, dimension, x in (("q", "head_dim", q), ("v", "head_dim_v", v)):
        if x.is_cuda and x.shape[-1] % 8 != 0:
            raise ValueError(
                f"{name}: last dimension ({dimension}) must be a multiple of 8 on CUDA, "
                f"got {x.shape[-1]}"
            )


def check_dims(name: str, tensor: Tensor, layout: str) -> None:
    """Raise unless `tensor` has the dimensions that the layout names."""
    dims = layout.count(",") + 1
    if tensor.dim() != dims:
        raise ValueError(
            f"{name}: must have {dims} dimensions {layout}, got shape {tuple(tensor.shape)}"
        )


def check_packed(name: str, tensor: Any, layout: str, packed: int) -> None:
    """Raise unless `tensor` has this layout, with `packed` tensors along the dimension before the
    last two.
    """
    check_tensor(name, tensor)
    if tensor.dim() != layout.count(",") + 1 or tensor.shape[-3] != packed:
        raise ValueError(f"{name}: must have shape {layout}, got {tuple(tensor.shape)}")


def check_tensor(name: str, tensor: Any) -> None:
    """Raise unless `tensor` is a dense tensor."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name}: must be a torch.Tensor, got {type(tensor).__name__}")
    if tensor.layout != torch.strided or tensor.is_nested:
        layout = "a nested tensor" if tensor.is_nested else f"layout {tensor.layout}"
        raise TypeError(f"{name}: must be a dense tensor, got {layout}")


def check_may_be_written(name: str, x: Tensor) -> None:
    """Raise for a tensor of inference mode outside of that; a compiler cannot ask."""
    if not is_compiling() and x.is_inference() and not torch.is_inference_mode_enabled():
        raise ValueError(
            f"{name}: must not be made in inference mode where that is off, as torch lets nobody "
            "write such a tensor there, got one"
        )


def check_no_gradient(name: str, x: Any) -> None:
    """Raise for what is no tensor, and for one that a backward would have to differentiate."""
    check_tensor(name, x)
    refuse_gradients("which attention does not give to slopes", **{name: x})


def refuse_with(text: str, reasons: dict[str, bool], *values: Any) -> None:
    """Raise NotImplementedError for the first reason that holds. The text has places for it and for
    the values, which are not written out before that: a compiler's symbols cannot be.
    """
    for reason, holds in reasons.items():
        if holds:
            raise NotImplementedError(text.format(reason, *values))


def refuse_gradients(reason: str, **tensors: Any) -> None:
    """Raise NotImplementedError if autograd would want the gradient of one of the tensors."""
    if forward_ad._current_level >= 0:
        refuse_forward_gradients(**tensors)
    if not torch.is_grad_enabled():
        return
    for name, tensor in tensors.items():
        if isinstance(tensor, Tensor) and tensor.requires_grad:
            raise NotImplementedError(f"{name}: must not require grad, {reason}")


def refuse_forward_gradients(**tensors: Any) -> None:
    """Raise NotImplementedError for a dual tensor: operators would drop its forward-mode gradient
    without a word.
    """
    if forward_ad._current_level < 0:
        return
    for name, tensor in tensors.items():
        if isinstance(tensor, Tensor) and has_forward_gradient(tensor):
            raise NotImplementedError(
                f"{name}: must not carry a forward-mode gradient, got a dual tensor"
            )


def has_forward_gradient(tensor: Tensor) -> bool:
    """Whether it is a dual tensor of the current level of forward mode."""
    # A dual tensor may be below the wrappers that other transforms of torch.func put around it.
    while True:
        is_batched = _functorch.is_batchedtensor(tensor)
        if not is_batched and forward_ad.unpack_dual(tensor).tangent is not None:
            return True
        if not _functorch.is_functorch_wrapped_tensor(tensor):
            return False
        tensor = _functorch.get_unwrapped(tensor)


def _check_head_dim(name: str, dimension: str, size: int) -> None:
    if not 1 <= size <= MAX_HEAD_DIM:
        raise ValueError(
            f"{name}: last dimension ({dimension}) must be from 1 to {MAX_HEAD_DIM}, got {size}"
        )


def _check_is_mapped(name: str) -> None:
    """Raise for a tensor of torch.vmap where no transform is running, of which torch's own
    operators complain as well.
    """
    if not _are_functorch_transforms_active():
        raise ValueError(
            f"{name}: must not be kept from inside torch.vmap, got a tensor that was mapped there"
        )


def _check_data(name: str, tensor: Any, layout: str, further: tuple[torch.dtype, ...] = ()) -> None:
    check_tensor(name, tensor)
    if not is_compiling() and _functorch.is_batchedtensor(tensor):
        _check_is_mapped(name)
    check_dims(name, tensor, layout)
    device = tensor.device.type
    if device not in ("cuda", "cpu", "meta"):
        raise ValueError(f"{name}: must be a CUDA or CPU tensor, got one on {tensor.device}")
    dtypes = CUDA_DTYPES if device == "cuda" else CPU_DTYPES
    check_dtype(name, tensor.dtype, dtypes + further, f" on {device}")
