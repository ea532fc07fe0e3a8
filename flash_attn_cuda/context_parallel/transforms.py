"""What forward mode and the transforms of torch.func ask of code that is around a Function."""

from __future__ import annotations

from torch import Tensor
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from ..call.tensors import has_forward_gradient


def in_forward_mode() -> bool:
    """Whether tensors may be dual."""
    return not is_compiling() and forward_ad._current_level >= 0


def dual_names(**tensors: Tensor | None) -> list[str]:
    """Of those that carry a forward-mode gradient."""
    if not in_forward_mode():
        return []
    return [name for name, x in tensors.items() if x is not None and has_forward_gradient(x)]


def refuse_forward_mode(scheme: str, names: list[str]) -> None:
    """NotImplementedError where there are names, of dual tensors."""
    if names:
        raise NotImplementedError(
            f"{names[0]}: must not carry a forward-mode gradient by scheme {scheme!r}, got a dual "
            "tensor; 'all_gather' and 'ulysses' have forward mode"
        )
