"""What is around a call: transforms of torch.func, what torch.vmap maps, torch's modes."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._C import _functorch, _len_torch_dispatch_stack, _len_torch_function_stack
from torch.compiler import is_compiling


def is_functorch_active() -> bool:
    """Whether a transform of torch.func, vmap included, is running."""
    return not is_compiling() and torch._C._are_functorch_transforms_active()


def is_watched() -> bool:
    """Whether a compiler, a mode of torch or a transform would see an operator."""
    return (
        is_compiling()
        or _len_torch_dispatch_stack() > 0
        or _len_torch_function_stack() > 0
        or torch._C._are_functorch_transforms_active()
    )


def is_mapped(x: Tensor, level: int | None = None) -> bool:
    """Whether torch.vmap, or that of this level, maps x, whatever other transforms wrap it in."""
    while is_functorch_active() and _functorch.is_functorch_wrapped_tensor(x):
        if _functorch.is_batchedtensor(x) and level in (None, _functorch.maybe_get_level(x)):
            return True
        x = _functorch.get_unwrapped(x)
    return False
