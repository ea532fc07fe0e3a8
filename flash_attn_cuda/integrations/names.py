"""Names of other packages that are not here."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn


def refused_names(module: str, instead: dict[str, str]) -> Callable[[str], NoReturn]:
    """A module's __getattr__: for a name of another package that is not here, what to do instead.

    An AttributeError, so that hasattr tells, and so does an import that is tried.
    """

    def __getattr__(name: str) -> NoReturn:
        if name in instead:
            raise AttributeError(f"{module}.{name}: is not implemented; {instead[name]}")
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return __getattr__
