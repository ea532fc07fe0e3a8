"""`import flash_attn` served by this package, for code that was written for FlashAttention-2, 3, 4.

    import flash_attn_cuda.compat
    flash_attn_cuda.compat.install()
    from flash_attn import flash_attn_func  # flash_attn_cuda's
    from flash_attn_interface import flash_attn_func  # with FlashAttention-3's parameters
    from flash_attn.cute import flash_attn_func  # with FlashAttention-4's
    from ring_flash_attn import ring_flash_attn_func  # with ring-flash-attention's
    from flash_mla import flash_mla_with_kvcache  # with FlashMLA's

What resolves is in _PROVIDED: modules, and names in them, that libraries import as soon as they see
that there is a flash_attn; and in _SURFACES: modules of FlashAttention-3 and 4, FlashMLA and
ring-flash-attention, whose functions are imported when the module is, and whose docstrings say what
each argument does. A name of theirs that is not here is an AttributeError that says what to do
instead, and so an ImportError of an import statement. Any other module of flash_attn is not found,
which code that tries the import can handle; code that asks for flash_attn alone and then imports
such a module fails, as it does in an installation that lacks it.
torch.ops.flash_attn and, once flash_attn_interface is imported, torch.ops.flash_attn_3 have our
operators under FlashAttention-2's and 3's names, so that a policy of selective checkpointing that
lists them works. Packaging metadata (importlib.metadata) knows a distribution
flash-attn of version VERSION, because libraries decide by it whether flash_attn is there. There is
none of FlashAttention-3 and 4: libraries that choose by it stay with FlashAttention-2's functions,
which have more features here.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import Distribution, DistributionFinder
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ..functions import interface, private, rotary
from ..installed import build_info
from ..operators.support import ops
from . import padding, rotary_layers
from .names import refused_names

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

_EXTENSION = "flash_attn_2_cuda"  # FlashAttention-2's compiled module: ours has its functions
_EXTENSION_FUNCTIONS = ("fwd", "varlen_fwd", "bwd", "varlen_bwd", "fwd_kvcache")


def _extension() -> ModuleType:
    """The compiled module; without it one whose functions raise, as ours do for CUDA tensors.

    Libraries take it when they are imported, and may never call it.
    """
    if build_info.extension is not None:
        return build_info.extension
    module = ModuleType(_EXTENSION)

    def unavailable(*_: Any, **__: Any) -> None:
        raise RuntimeError(f"{_EXTENSION}: {build_info.cuda_unavailable_reason()}")

    for name in _EXTENSION_FUNCTIONS:
        setattr(module, name, unavailable)
    return module


def maybe_contiguous(x: Tensor | None) -> Tensor | None:
    """x with a contiguous last dimension: itself where it has one."""
    return x if x is None or x.stride(-1) == 1 else x.contiguous()


class _Operator:
    """What stands for an operator of FlashAttention-2: it is called with that one's arguments.
    `default` is the operator that runs, for policies of selective checkpointing to list; it takes
    this package's arguments.
    """

    def __init__(self, function: Callable[..., Any], runs: Any) -> None:
        self._function = function
        self.default = runs.default

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)


_OPERATORS: list[tuple[Any, str, _Operator]] = []  # the namespace of torch.ops, the name there


def _serve_operators(namespace: Any, functions: dict[str, Any]) -> None:
    """Under those of the functions' names that no operator has."""
    for name, function in functions.items():
        if not hasattr(namespace, name):
            runs = ops.attention_backward if "backward" in name else ops.attention
            _OPERATORS.append((namespace, name, _Operator(function, runs)))
            setattr(namespace, name, _OPERATORS[-1][-1])


_PROVIDED: dict[str, dict[str, Any]] = {
    "flash_attn": {"__version__": VERSION, **_FUNCTIONS},
    "flash_attn.flash_attn_interface": {
        **(_FUNCTIONS | _PRIVATE_FUNCTIONS | _WRAPPED_FUNCTIONS),
        "flash_attn_gpu": _extension(),
        "maybe_contiguous": maybe_contiguous,
    },
    "flash_attn.bert_padding": {name: getattr(padding, name) for name in padding.__all__},
    "flash_attn.layers": {},
    "flash_attn.layers.rotary": {
        name: getattr(module, name) for module in (rotary, rotary_layers) for name in module.__all__
    },
    "flash_attn.ops": {},
    "flash_attn.ops.triton": {},
    "flash_attn.ops.triton.rotary": {"apply_rotary": rotary_layers.apply_rotary},
}
# Modules whose names are those of one of ours, its __all__.
_SURFACES = {
    "flash_attn_interface": f"{__package__}.flash_attention_3",
    "flash_attn.cute": f"{__package__}.flash_attention_4",
    "flash_attn.cute.block_sparsity": f"{__package__}.flash_attention_4",
    "flash_attn.cute.interface": f"{__package__}.flash_attention_4",
    "flash_mla": f"{__package__}.flash_mla",
    "flash_mla.flash_mla_interface": f"{__package__}.flash_mla",
    "ring_flash_attn": f"{__package__}.ring_flash_attn",
    "ring_flash_attn.adapters": f"{__package__}.transformers_ring",
    "ring_flash_attn.adapters.hf_adapter": f"{__package__}.transformers_ring",
}
# What a module says of itself, beside its names.
_VERSIONS = {"flash_attn.cute": "4.0.0b36"}  # of FlashAttention-4, whose interface this is
# Names that are not here, and what to do instead; those of surfaces are in their modules.
_REFUSED = {
    "flash_attn.flash_attn_interface": {
        "FlashAttnFunc": "call flash_attn_func",
        "FlashAttnKVPackedFunc": "call flash_attn_kvpacked_func",
        "FlashAttnQKVPackedFunc": "call flash_attn_qkvpacked_func",
        "FlashAttnVarlenFunc": "call flash_attn_varlen_func",
        "FlashAttnVarlenKVPackedFunc": "call flash_attn_varlen_kvpacked_func",
        "FlashAttnVarlenQKVPackedFunc": "call flash_attn_varlen_qkvpacked_func",
    },
    "flash_attn.ops.triton.rotary": {"rotary_kernel": "call apply_rotary"},
}
_PACKAGES = (
    "flash_attn",
    "flash_attn.cute",
    "flash_attn.layers",
    "flash_attn.ops",
    "flash_attn.ops.triton",
    "flash_mla",
    "ring_flash_attn",
    "ring_flash_attn.adapters",
)


def install() -> None:
    """Make `import flash_attn`, its modules, FlashAttention-3's, flash_attn_interface, flash_mla
    and ring_flash_attn resolve to this package, in this process.

    Call it before the libraries that look for flash_attn are imported. Calling it again changes
    nothing. An installed FlashAttention that has not been imported yet is hidden until uninstall().

    Raises:
        RuntimeError: another flash_attn, flash_attn_interface, flash_mla or ring_flash_attn has
            been imported already.
    """
    if is_installed():
        return
    for name in (*_PROVIDED, *_SURFACES, _EXTENSION):
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
    _serve_operators(torch.ops.flash_attn, _PRIVATE_FUNCTIONS)
    _forget_availability()


def uninstall() -> None:
    """Undo install(): what has been imported from flash_attn by then keeps working."""
    if not is_installed():
        return
    sys.meta_path.remove(_FINDER)
    for name in (*_PROVIDED, *_SURFACES):
        if name in sys.modules and _is_ours(sys.modules[name]):
            del sys.modules[name]
    if sys.modules.get(_EXTENSION) is build_info.extension:
        sys.modules.pop(_EXTENSION, None)
    while _OPERATORS:
        namespace, name, operator = _OPERATORS.pop()
        if vars(namespace).get(name) is operator:
            delattr(namespace, name)
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
        provided = _provided_by(module.__name__)
        module.__doc__ = f"{module.__name__}, provided by flash_attn_cuda."
        module.__dict__.update(provided)
        if module.__name__ == "flash_attn.bert_padding":
            module.__dict__.update(_einops())
        if module.__name__ == "flash_attn_interface":
            private_functions = {name: provided[name] for name in provided if name.startswith("_")}
            _serve_operators(torch.ops.flash_attn_3, private_functions)
        module.__dict__["__all__"] = [name for name in provided if not name.startswith("_")]
        if module.__name__ in _VERSIONS:
            module.__dict__["__version__"] = _VERSIONS[module.__name__]
        refusal = _refusal_of(module.__name__)
        if refusal is not None:
            module.__dict__["__getattr__"] = refusal


def _refusal_of(name: str) -> Any:
    """A module's __getattr__, for names that are not here."""
    if name in _REFUSED:
        return refused_names(name, _REFUSED[name])
    surface = sys.modules.get(_SURFACES.get(name, ""))
    return getattr(surface, "__getattr__", None)


def _provided_by(name: str) -> dict[str, Any]:
    """What a module of ours holds."""
    if name in _PROVIDED:
        return _PROVIDED[name]
    surface = importlib.import_module(_SURFACES[name])
    return {attribute: getattr(surface, attribute) for attribute in surface.__all__}


def _einops() -> dict[str, Any]:
    """What code takes from flash_attn.bert_padding that is einops', if that is installed."""
    if importlib.util.find_spec("einops") is None:
        return {}
    einops = importlib.import_module("einops")
    return {"rearrange": einops.rearrange, "repeat": einops.repeat}


class _Distribution(Distribution):
    """Packaging metadata of a distribution flash-attn that holds the module flash_attn."""

    def read_text(self, filename: str) -> str | None:
        return {
            "METADATA": f"Metadata-Version: 2.1\nName: flash-attn\nVersion: {VERSION}\n",
            "top_level.txt": "flash_attn\n",
            "INSTALLER": "flash_attn_cuda.compat\n",
        }.get(filename)

    def locate_file(self, path: Any) -> Path:
        return Path(__file__).parent / path


class _Finder(MetaPathFinder):
    """Finds the modules of _PROVIDED and _SURFACES and the distribution flash-attn."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in _PROVIDED and fullname not in _SURFACES:
            return None
        spec = ModuleSpec(fullname, _LOADER, origin=__file__, is_package=fullname in _PACKAGES)
        spec.has_location = True  # becomes the module's __file__
        return spec

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
    # What the function of that name returns, which older releases hold since they were imported.
    mapping = getattr(utils, "PACKAGE_DISTRIBUTION_MAPPING", None)
    if isinstance(mapping, dict):
        mapping.clear()
        mapping.update(importlib.metadata.packages_distributions())
