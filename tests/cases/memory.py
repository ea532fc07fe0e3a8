"""Memory of tensors, counted as torch makes them."""

from __future__ import annotations

import weakref
from collections import Counter
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class PeakBytes(TorchDispatchMode):
    """Counts the bytes of the storages of all tensors that live at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.users: Counter[int] = Counter()
        self.bytes: dict[int, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, tuple | list) else (result,):
            if isinstance(x, Tensor):
                self.add(x)
        return result

    def add(self, x: Tensor) -> None:
        storage = x.untyped_storage()
        key = storage._cdata
        self.users[key] += 1
        self.bytes[key] = storage.nbytes()
        self.peak = max(self.peak, sum(self.bytes.values()))
        weakref.finalize(x, self.drop, key)

    def drop(self, key: int) -> None:
        self.users[key] -= 1
        if self.users[key] == 0:
            del self.bytes[key], self.users[key]
