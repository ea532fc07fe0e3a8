"""Public names of other packages are served or refused by name."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

from flash_attn_cuda.integrations import compat
from tests.surfaces import public_names
from tests.surfaces.public_names import MODULES, Module

over_modules = pytest.mark.parametrize("module", [pytest.param(m, id=m.name) for m in MODULES])


@pytest.fixture(autouse=True)
def installed() -> Iterator[None]:
    compat.install()
    yield
    compat.uninstall()


def imported(module: Module) -> ModuleType:
    if module.needs:
        pytest.importorskip(module.needs)
    return importlib.import_module(module.name)


def parameters_of(function: Callable[..., Any]) -> list[tuple[Any, ...]]:
    return [(x.name, x.kind, x.default) for x in inspect.signature(function).parameters.values()]


@over_modules
def test_served(module: Module) -> None:
    """With their parameters, order and defaults; nobody has to give ours, which are behind them."""
    ours = imported(module)
    for name, signature in module.served.items():
        found = getattr(ours, name)
        if signature is None:
            continue
        theirs = parameters_of(eval(f"lambda {signature}: None", {"torch": torch}))
        first, own = parameters_of(found)[: len(theirs)], parameters_of(found)[len(theirs) :]
        assert first == theirs, name
        assert all(default is not inspect.Parameter.empty for _, _, default in own), name


@pytest.mark.parametrize(("name", "signature"), public_names.FLASHINFER_MLA_METHODS.items())
def test_methods_of_flashinfer(name: str, signature: str) -> None:
    ours = imported(public_names.FLASHINFER_MLA).BatchMLAPagedAttentionWrapper
    theirs = eval(f"lambda {signature}: None")
    assert parameters_of(getattr(ours, name)) == parameters_of(theirs)


@over_modules
def test_refused(module: Module) -> None:
    """Not there for hasattr and for an import that is tried; who takes it is told."""
    ours = imported(module)
    for name, instead in module.refused.items():
        assert not hasattr(ours, name)
        with pytest.raises(AttributeError, match=rf"\.{name}: is not implemented; .*{instead}"):
            getattr(ours, name)
        with pytest.raises(ImportError, match=f"cannot import name '{name}'"):
            exec(f"from {module.name} import {name}", {})


@over_modules
def test_others_are_not_there(module: Module) -> None:
    assert not module.served.keys() & module.refused.keys() and module.of
    with pytest.raises(AttributeError, match="has no attribute 'nothing_like_it'"):
        _ = imported(module).nothing_like_it


def test_every_module_is_listed() -> None:
    """Of those that resolve: a new one comes with its names."""
    listed = {module.name for module in MODULES}
    packages = {"flash_attn.layers", "flash_attn.ops", "flash_attn.ops.triton"}  # of modules alone
    elsewhere = {public_names.VLLM.name, public_names.FLASHINFER_MLA.name}
    assert {*compat._PROVIDED, *compat._SURFACES} == (listed - elsewhere | packages)
    for name in packages:
        assert compat._PROVIDED[name] == {}
