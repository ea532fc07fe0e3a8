"""When torch.distributed.tensor is imported, the operators learn what to do with DTensors
(operators/dtensor.py), and when torch.utils.flop_counter is, what they count there
(operators/flops.py); until then nobody asks, and importing this package does not pay for it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

_types: tuple[type, ...] = ()  # DTensor, where there are any


def is_dtensor(x: Any) -> bool:
    return isinstance(x, _types)


class _Finder(MetaPathFinder):
    """Finds a module as everybody does, once, and adds what comes behind its execution."""

    def __init__(self, module: str, register: Callable[[], None]) -> None:
        self.module, self._register = module, register

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != self.module or self not in sys.meta_path:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self._register)
        return spec


class _Loader(Loader):
    """A loader whose module registers our rules when it is complete."""

    def __init__(self, loader: Loader, register: Callable[[], None]) -> None:
        self._loader, self._register = loader, register

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._register()


def register_when_imported() -> None:
    """Registers what is known of each module: now where it is there, else when it is imported."""
    for module, register in _REGISTER.items():
        if module in sys.modules:
            register()
        elif not any(isinstance(x, _Finder) and x.module == module for x in sys.meta_path):
            sys.meta_path.insert(0, _Finder(module, register))


def _register_dtensors() -> None:
    global _types
    from . import dtensor

    _types = (dtensor.DTensor,)
    dtensor.register()


def _register_flops() -> None:
    from . import flops

    flops.register()


_REGISTER = {
    "torch.distributed.tensor": _register_dtensors,
    "torch.utils.flop_counter": _register_flops,
}
