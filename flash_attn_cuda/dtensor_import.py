"""When torch.distributed.tensor is imported, the operators learn what to do with DTensors
(operators/dtensor.py); until then nobody has any, and importing this package does not pay for it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

_MODULE = "torch.distributed.tensor"
_types: tuple[type, ...] = ()  # DTensor, where there are any


def is_dtensor(x: Any) -> bool:
    return isinstance(x, _types)


class _Finder(MetaPathFinder):
    """Finds that module as everybody does, once, and adds what comes behind its execution."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != _MODULE or self not in sys.meta_path:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(Loader):
    """A loader whose module registers our rules when it is complete."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        _register()


def register_when_imported() -> None:
    """Registers the rules of DTensors: now where there are any, else when they are imported."""
    if _MODULE in sys.modules:
        _register()
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def _register() -> None:
    global _types
    from .operators import dtensor

    _types = (dtensor.DTensor,)
    dtensor.register()
