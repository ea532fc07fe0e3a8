"""What the public functions make of their arguments before a backend sees them.

Windows become two integers, defaults numbers, autocast's dtypes are applied and head dims padded.
"""

from __future__ import annotations

import operator
from typing import Any, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor
from torch._C import (
    _are_functorch_transforms_active,
    _len_torch_dispatch_stack,
    _len_torch_function_stack,
)
from torch.compiler import is_compiling
from torch.nn.functional import pad

from . import build_info
from .call import NAMES, Names
from .checks.tensors import (
    MAX_INT32,
    as_number,
    check_dropout_p,
    check_softcap,
    check_tensor,
    refuse_gradients,
)
from .dtensor_import import is_dtensor

WindowSize: TypeAlias = "tuple[int | None, int | None] | list[int | None] | Tensor"
Result: TypeAlias = "Tensor | tuple[Tensor, Tensor, Tensor]"


class _Window(NamedTuple):
    """A type of its own, so that `is` works while a compiler is tracing too: a plain tuple cannot
    be compared there with a caller's that holds a symbol.
    """

    left: int
    right: int

    def __repr__(self) -> str:
        return repr(tuple(self))  # what a signature shows


UNLIMITED = _Window(-1, -1)  # the window_size that hides nothing


# Fields of an AttentionCall: the options that every public function has, checked as far as no other
# argument is needed for that.
Options: TypeAlias = dict[str, Any]

# What nearly every call wants, full and causal: making one would be a tenth of a small call's time.
_FULL: Options = {"causal": False}
_CAUSAL: Options = {"causal": True}


def make_options(
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size: WindowSize,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
) -> Options:
    """The options of a public function. TypeError and ValueError name the argument."""
    causal = bool(causal)
    if not (type(dropout_p) is type(softcap) is float):
        dropout_p, softcap = as_number("dropout_p", dropout_p), as_number("softcap", softcap)
    if not (dropout_p or softcap or deterministic) and alibi_slopes is None:
        if window_size is UNLIMITED and softmax_scale is None:
            return _CAUSAL if causal else _FULL
    else:
        check_dropout_p(dropout_p)
        check_softcap(softcap)
        check_slopes_have_no_gradient(alibi_slopes)
    if softmax_scale is not None and type(softmax_scale) is not float:
        softmax_scale = as_number("softmax_scale", softmax_scale, "None or a number")
    left, right = window_bounds(window_size)
    return {
        "dropout_p": float(dropout_p),
        "softmax_scale": softmax_scale,
        "causal": causal,
        "window_size_left": left,
        "window_size_right": right,
        "softcap": float(softcap),
        "alibi_slopes": alibi_slopes,
        "deterministic": bool(deterministic),
    }


def plain_mask(options: Options) -> tuple[float | None, bool] | None:
    """(softmax_scale, causal) where there is no option but a full or a causal mask; else None."""
    if len(options) == 1:
        return None, options["causal"]
    if (
        options["dropout_p"] == 0.0
        and options["softcap"] <= 0.0
        and options["alibi_slopes"] is None
        and not options["deterministic"]
        and options["window_size_left"] < 0
        and (options["causal"] or options["window_size_right"] <= 0)
    ):
        causal = options["causal"] or options["window_size_right"] == 0
        return options["softmax_scale"], causal
    return None


def window_bounds(window_size: WindowSize) -> tuple[int, int]:
    """(left, right) of a sequence or tensor of two integers; -1 where it says None, or something
    negative that no kernel could hold.
    """
    if window_size is UNLIMITED:
        return UNLIMITED
    left, right = window_ends(window_size)
    left, right = -1 if left is None else left, -1 if right is None else right
    # While a compiler is tracing, a comparison would bind symbols to this call's numbers.
    if is_compiling() or (-1 <= left <= MAX_INT32 and -1 <= right <= MAX_INT32):
        return left, right
    return max(-1, min(left, MAX_INT32)), max(-1, min(right, MAX_INT32))


def window_ends(window_size: WindowSize) -> tuple[int | None, int | None]:
    """The two entries of a window_size as they were given, for packages to which a negative one is
    a bound like others. TypeError names the argument.
    """
    if isinstance(window_size, Tensor):
        window_size = window_size.tolist()
    try:
        left, right = window_size
        return _end(left), _end(right)
    except (TypeError, ValueError) as error:
        raise TypeError(f"window_size: must be two integers, got {window_size!r}") from error


def _end(value: Any) -> int | None:
    if value is None or type(value) is int:
        return value
    if isinstance(value, (int, torch.SymInt)):
        return cast(int, value)
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    return operator.index(value)


def check_slopes_have_no_gradient(alibi_slopes: Any) -> None:
    """Raise for what is no tensor, and for slopes that a backward would have to differentiate."""
    if alibi_slopes is not None:
        check_tensor("alibi_slopes", alibi_slopes)
        refuse_gradients("which attention does not give to slopes", alibi_slopes=alibi_slopes)


def seqlen_bound(name: str, max_seqlen: Any, total: int) -> int:
    """A host integer for max_seqlen, without reading a tensor: `total` for a tensor or None."""
    if isinstance(max_seqlen, Tensor):
        if max_seqlen.dim() != 0:
            shape = tuple(max_seqlen.shape)
            raise ValueError(f"{name}: must be an integer or a 0-d tensor, got shape {shape}")
        return total
    if max_seqlen is None:
        return total
    if isinstance(max_seqlen, (int, torch.SymInt)):
        return cast(int, max_seqlen)
    try:
        return operator.index(max_seqlen)
    except TypeError as error:
        kind = type(max_seqlen).__name__
        raise TypeError(f"{name}: must be an integer, a 0-d tensor or None, got {kind}") from error


def rows_bound(x: Tensor, block_table: Any = None) -> int:
    """An upper bound of the length of a sequence packed in x, or in its pages; 0 for what checks
    will refuse.
    """
    if x.dim() == 0:
        return 0
    if not isinstance(block_table, Tensor):
        return x.shape[0]
    return block_table.shape[1] * x.shape[1] if block_table.dim() == 2 and x.dim() > 1 else 0


def packed_lengths(
    q: Any, k: Any, given: tuple[Any, Any, Any, Any], names: Names = NAMES, block_table: Any = None
) -> dict[str, Any]:
    """Fields of an AttentionCall: `given` is cu_seqlens_q, cu_seqlens_k, max_seqlen_q and
    max_seqlen_k, whose bounds become integers.
    """
    cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k = given
    check_tensor(names.q, q)
    check_tensor(names.k, k)
    if cu_seqlens_q is None:
        check_tensor(names.cu_seqlens_q, cu_seqlens_q)
    return {
        "cu_seqlens_q": cu_seqlens_q,
        "cu_seqlens_k": cu_seqlens_k,
        "max_seqlen_q": seqlen_bound(names.max_seqlen_q, max_seqlen_q, rows_bound(q)),
        "max_seqlen_k": seqlen_bound(names.max_seqlen_k, max_seqlen_k, rows_bound(k, block_table)),
    }


def is_plain_cuda_call(q: Any, k: Any, v: Any) -> bool:
    """Whether nothing but eager autograd would see an operator: half a microsecond. While a
    compiler is tracing, the answer is no.
    """
    return (
        not is_compiling()
        and build_info.extension is not None
        and type(q) is Tensor
        and type(k) is Tensor
        and type(v) is Tensor
        and q.is_cuda
        and _len_torch_dispatch_stack() == 0
        and _len_torch_function_stack() == 0
        and not _are_functorch_transforms_active()
    )


def pad_head_dim(x: Tensor) -> Tensor:
    """Zeros to a multiple of 8: they add nothing to a score, and their outputs are cut off."""
    padding = -x.shape[-1] % 8
    if padding == 0:
        return x
    if is_dtensor(x):  # which torch 2.11 would gather to pad it
        return torch.cat([x, x.new_zeros((*x.shape[:-1], padding))], -1)
    return pad(x, (0, padding))


def needs_padding(q: Tensor, v: Tensor) -> bool:
    """Whether the training kernels cannot read q and k, or v, as they are."""
    return q.shape[-1] % 8 != 0 or v.shape[-1] % 8 != 0


def cast_for_autocast(*tensors: Any) -> tuple[Any, ...]:
    """To torch.autocast's dtype, except fp64, as it does for torch's own attention."""
    return tuple(_cast_one(x) if isinstance(x, Tensor) else x for x in tensors)


def _cast_one(x: Tensor) -> Tensor:
    device = x.device.type
    if device not in ("cuda", "cpu") or not torch.is_autocast_enabled(device):
        return x
    if not x.is_floating_point() or x.dtype == torch.float64:
        return x
    return x.to(torch.get_autocast_dtype(device))
