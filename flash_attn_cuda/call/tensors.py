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

MAX_FLOAT32 = torch.finfo(torch.float32).max
MIN_FLOAT32 = torch.finfo(torch.float32).tiny
MAX_INT32 = 2**31 - 1
MAX_INT64 = 2**63 - 1

CUDA_DTYPES = (torch.float16, torch.bfloat16)
CPU_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
E4M3 = torch.float8_e4m3fn
E8M0 = torch.float8_e8m0fnu  # powers of two
NO_BACKWARD = "has no backward (torch.no_grad() says that none is wanted)"


def lse_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of softmax_lse and softmax_d: fp32, or fp64 for fp64 inputs (CPU only)."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def round_up_seqlen(seqlen: int) -> int:
    """Rows per head of softmax_d where it is not packed: a multiple of 128."""
    return (seqlen + 127) // 128 * 128


def check_contiguous_rows(name: str, x: Tensor) -> None:
    if x.stride(-1) != 1:
        raise ValueError(
            f"{name}: must be contiguous in its last dimension, got stride {x.stride(-1)}"
        )


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
    """Raise unless the (seed, offset) of a call with dropout are int64."""
    if dropout_p > 0.0:
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


def _check_is_mapped(name: str) -> None:
    """Raise for a tensor of torch.vmap where no transform is running, of which torch's own
    operators complain as well.
    """
    if not _are_functorch_transforms_active():
        raise ValueError(
            f"{name}: must not be kept from inside torch.vmap, got a tensor that was mapped there"
        )


def check_data(name: str, tensor: Any, layout: str, further: tuple[torch.dtype, ...] = ()) -> None:
    """Raise unless `tensor` has this layout, and a dtype of its device or one of these."""
    check_tensor(name, tensor)
    if not is_compiling() and _functorch.is_batchedtensor(tensor):
        _check_is_mapped(name)
    check_dims(name, tensor, layout)
    device = tensor.device.type
    if device not in ("cuda", "cpu", "meta"):
        raise ValueError(f"{name}: must be a CUDA or CPU tensor, got one on {tensor.device}")
    dtypes = CUDA_DTYPES if device == "cuda" else CPU_DTYPES
    check_dtype(name, tensor.dtype, dtypes + further, f" on {device}")
