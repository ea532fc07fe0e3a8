"""window_size, as callers say it, in two integers."""

from __future__ import annotations

import operator
from typing import Any, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor
from torch.compiler import is_compiling

from .tensors import MAX_INT32

WindowSize: TypeAlias = "tuple[int | None, int | None] | list[int | None] | Tensor"


class _Window(NamedTuple):
    """A type of its own, so that `is` works while a compiler is tracing too: a plain tuple cannot
    be compared there with a caller's that holds a symbol.
    """

    left: int
    right: int

    def __repr__(self) -> str:
        return repr(tuple(self))  # what a signature shows


UNLIMITED = _Window(-1, -1)  # the window_size that hides nothing


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


def is_unlimited(window_size: WindowSize) -> bool:
    """Whether it says (-1, -1); where a compiler is tracing, False if it is not UNLIMITED."""
    return window_size is UNLIMITED or (
        type(window_size) is tuple and not is_compiling() and window_size == UNLIMITED
    )


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
