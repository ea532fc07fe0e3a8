"""`import flash_attn` served by this package, for code that was written for FlashAttention-2.

    import flash_attn_cuda.compat
    flash_attn_cuda.compat.install()
    from flash_attn import flash_attn_func  # flash_attn_cuda's

What resolves is in _PROVIDED: the modules, and the names in them, that do not depend on
FlashAttention-2's own compiled files. Any other module of flash_attn is not found, as in an
installation that lacks it, so that code which asks before it uses one takes its other path.
Packaging metadata (importlib.metadata) knows a distribution flash-attn of version VERSION, because
libraries decide by it whether flash_attn is there.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Sequence
from email.message import Message
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import Distribution, DistributionFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from . import build_info, interface, padding, private, rotary

__all__ = ["VERSION", "install", "is_installed", "uninstall"]

VERSION = "2.8.3"  # of FlashAttention-2, whose interface this is

_FUNCTIONS = {
    name: getattr(interface, name)
    for name in (
        "flash_attn_func",
        "flash_attn_kvpacked_func",
        "flash_attn_qkvpacked_func",
        "flash_attn_varlen_func",
        "flash_attn_varlen_kvpacked_func",
        "flash_attn_varlen_qkvpacked_func",
        "flash_attn_with_kvcache",
    )
}
_PRIVATE_FUNCTIONS = {
    name: getattr(private, name)
    for name in (
        "_flash_attn_backward",
        "_flash_attn_forward",
        "_flash_attn_varlen_backward",
        "_flash_attn_varlen_forward",
    )
}
# FlashAttention-2's names for the same functions called through torch's dispatcher.
_WRAPPED_FUNCTIONS = {f"_wrapped{name}": function for name, function in _PRIVATE_FUNCTIONS.items()}

_PROVIDED: dict[str, dict[str, Any]] = {
    "flash_attn": {"__version__": VERSION, **_FUNCTIONS},
    "flash_attn.flash_attn_interface": _FUNCTIONS | _PRIVATE_FUNCTIONS | _WRAPPED_FUNCTIONS,
    "flash_attn.bert_padding": {name: getattr(padding, name) for name in padding.__all__},
    "flash_attn.layers": {},
    "flash_attn.layers.rotary": {name: getattr(rotary, name) for name in rotary.__all__},
}
_PACKAGES = ("flash_attn", "flash_attn.layers")
_EXTENSION = "flash_attn_2_cuda"  # FlashAttention-2's compiled module: ours has its functions


def install() -> None:
    """Make `import flash_attn` and its modules resolve to this package, in this process.

    Call it before the libraries that look for flash_attn are imported. Calling it again changes
    nothing. An installed FlashAttention that has not been imported yet is hidden until uninstall().

    Raises:
        RuntimeError: another flash_attn has been imported already.
    """
    if is_installed():
        return
    for name in (*_PROVIDED, _EXTENSION):
        if name in sys.modules and not _is_ours(sys.modules[name]):
            where = getattr(sys.modules[name], "__file__", None) or "an unknown file"
            raise RuntimeError(
                f"flash_attn_cuda.compat.install(): {name} has already been imported from {where}; "
                "call install() before anything imports flash_attn"
            )
    sys.meta_path.insert(0, _FINDER)
    for name in _PROVIDED:
        importlib.import_module(name)
    if build_info.extension is not None:
        sys.modules[_EXTENSION] = build_info.extension
    _forget_availability()


def uninstall() -> None:
    """Undo install(): what has been imported from flash_attn by then keeps working."""
    if not is_installed():
        return
    sys.meta_path.remove(_FINDER)
    for name in _PROVIDED:
        if name in sys.modules and _is_ours(sys.modules[name]):
            del sys.modules[name]
    if sys.modules.get(_EXTENSION) is build_info.extension:
        sys.modules.pop(_EXTENSION, None)
    importlib.invalidate_caches()
    _forget_availability()


def is_installed() -> bool:
    """Whether `import flash_attn` resolves to this package."""
    return _FINDER in sys.meta_path


def _is_ours(module: ModuleType) -> bool:
    spec = getattr(module, "__spec__", None)
    return module is build_info.extension or getattr(spec, "loader", None) is _LOADER


class _Loader(Loader):
    def exec_module(self, module: ModuleType) -> None:
        provided = _PROVIDED[module.__name__]
        module.__doc__ = f"{module.__name__}, provided by {__package__}."
        module.__dict__.update(provided)
        module.__dict__["__all__"] = [name for name in provided if not name.startswith("_")]


class _Distribution(Distribution):
    """Packaging metadata of a distribution flash-attn that holds the module flash_attn."""

    def read_text(self, filename: str) -> str | None:
        return {
            "METADATA": f"Metadata-Version: 2.1\nName: flash-attn\nVersion: {VERSION}\n",
            "top_level.txt": "flash_attn\n",
            "INSTALLER": f"{__package__}.compat\n",
        }.get(filename)

    def locate_file(self, path: Any) -> Path:
        return Path(__file__).parent / path

    @property
    def metadata(self) -> Any:
        message = Message()
        message["Metadata-Version"], message["Name"] = "2.1", "flash-attn"
        message["Version"] = VERSION
        return message


class _Finder(MetaPathFinder):
    """Finds the modules of _PROVIDED and the distribution flash-attn."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in _PROVIDED:
            return None
        origin = f"{__package__}.compat"
        return ModuleSpec(fullname, _LOADER, origin=origin, is_package=fullname in _PACKAGES)

    def find_distributions(self, context: Any = None) -> Iterator[Distribution]:
        name = (context or DistributionFinder.Context()).name
        if name is None or name.lower().replace("_", "-").replace(".", "-") == "flash-attn":
            yield _Distribution()

    def invalidate_caches(self) -> None:
        pass


_LOADER = _Loader()
_FINDER = _Finder()


def _forget_availability() -> None:
    """Clear what transformers, if imported, remembers of whether flash_attn is installed."""
    utils = sys.modules.get("transformers.utils.import_utils")
    for name, function in list(vars(utils).items()) if utils is not None else ():
        if name.startswith("is_flash_attn") or name == "_package_distribution_mapping":
            clear = getattr(function, "cache_clear", None)
            if clear is not None:
                clear()
