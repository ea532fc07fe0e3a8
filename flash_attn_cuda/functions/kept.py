"""What is kept for later calls: tensors that no transform, mode or compiler around a call has made
its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._C import _are_functorch_transforms_active, _functorch, _len_torch_dispatch_stack
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import FakeTensor
from torch.compiler import is_compiling

from ..call.functorch import is_functorch_active

Made = TypeVar("Made")


def outside_transforms(make: Callable[[], Made]) -> Made:
    """make(), of nothing that a transform knows, as it is where no transform of torch.func is
    running: one wraps every tensor that is made inside it, and no process group takes those.
    """
    if not is_functorch_active():
        return make()
    with temporarily_clear_interpreter_stack():
        return make()


def made_to_keep(make: Callable[[], Made], *of: Tensor) -> Made:
    """make(), of these tensors, for all later calls, where they are not passing themselves: outside
    transforms, and of inference mode, as training may use what validation has made.
    """
    if is_compiling() or any(map(is_passing, of)):
        return make()
    if not torch.is_inference_mode_enabled():
        return outside_transforms(make)
    with torch.inference_mode(False), torch.no_grad():
        return outside_transforms(make)


def is_passing(x: Any) -> bool:
    """Whether a tensor is of a transform, or a mode of fake tensors; while a compiler is tracing,
    whether one that is made now is.
    """
    if is_compiling():
        return _are_functorch_transforms_active()
    return isinstance(x, FakeTensor) or _functorch.is_functorch_wrapped_tensor(x)


def are_tensors_fake() -> bool:
    """Whether those that are made here have no contents."""
    return _len_torch_dispatch_stack() > 0 and active_fake_mode() is not None


def is_usable(kept: Tensor) -> bool:
    """Whether a call may use what was kept; while a compiler is tracing, which cannot ask, yes."""
    if is_compiling():
        return True
    if is_passing(kept) or are_tensors_fake():
        return False
    return not kept.is_inference() or torch.is_inference_mode_enabled()
