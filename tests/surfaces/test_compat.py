"""flash_attn_cuda.compat: code that imports flash_attn runs on this package."""

from __future__ import annotations

import functools
import importlib
import importlib.machinery
import importlib.metadata
import importlib.util
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import flash_attn_cuda
from flash_attn_cuda.functions import private, rotary
from flash_attn_cuda.installed import build_info
from flash_attn_cuda.integrations import compat, padding
from tests.cases.harness import DEVICE


@pytest.fixture
def installed() -> Iterator[None]:
    compat.install()
    yield
    compat.uninstall()


@pytest.mark.usefixtures("installed")
def test_names_are_ours() -> None:
    flash_attn = importlib.import_module("flash_attn")
    interface = importlib.import_module("flash_attn.flash_attn_interface")
    for name in (name for name in flash_attn_cuda.__all__ if name.startswith("flash_attn_")):
        if hasattr(flash_attn, name):
            assert getattr(flash_attn, name) is getattr(flash_attn_cuda, name)
            assert getattr(interface, name) is getattr(flash_attn_cuda, name)
    assert {name for name in flash_attn.__all__ if name != "__version__"} == {
        "flash_attn_func",
        "flash_attn_kvpacked_func",
        "flash_attn_qkvpacked_func",
        "flash_attn_varlen_func",
        "flash_attn_varlen_kvpacked_func",
        "flash_attn_varlen_qkvpacked_func",
        "flash_attn_with_kvcache",
    }
    assert interface._flash_attn_varlen_backward is private._flash_attn_varlen_backward
    assert interface._wrapped_flash_attn_forward is private._flash_attn_forward


@pytest.mark.usefixtures("installed")
def test_what_is_not_there_is_not_found() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'flash_attn\.losses'"):
        importlib.import_module("flash_attn.losses")
    assert importlib.util.find_spec("flash_attn.ops.rms_norm") is None


@pytest.mark.usefixtures("installed")
def test_names_that_are_imported_unguarded() -> None:
    """By libraries, as soon as they see that there is a flash_attn."""
    names: dict[str, Any] = {}
    code = """
    import flash_attn
    from flash_attn.bert_padding import IndexFirstAxis, IndexPutFirstAxis
    from flash_attn.flash_attn_interface import flash_attn_gpu, maybe_contiguous
    from flash_attn import flash_attn_func, flash_attn_with_kvcache
    from flash_attn.bert_padding import index_first_axis, pad_input, unpad_input
    from flash_attn.layers.rotary import ApplyRotaryEmb, RotaryEmbedding, apply_rotary_emb
    from flash_attn.layers.rotary import apply_rotary_emb_kv_, apply_rotary_emb_qkv_
    from flash_attn.ops.triton.rotary import apply_rotary
    """
    exec(textwrap.dedent(code), names)
    assert names["flash_attn"].__file__ == compat.__file__
    assert names["pad_input"] is padding.pad_input
    assert names["flash_attn"].layers.rotary.apply_rotary_emb_func is rotary.apply_rotary_emb
    x, indices = torch.randn(4, 3), torch.tensor([2, 0])
    rows = names["IndexFirstAxis"].apply(x, indices)
    assert torch.equal(rows, x[indices])
    assert torch.equal(names["IndexPutFirstAxis"].apply(rows, indices, 4)[indices], rows)
    maybe_contiguous = names["maybe_contiguous"]
    assert maybe_contiguous(None) is None and maybe_contiguous(x) is x
    assert maybe_contiguous(x.T).is_contiguous() and torch.equal(maybe_contiguous(x.T), x.T)
    extension = names["flash_attn_gpu"]
    if build_info.extension is not None:
        assert extension is build_info.extension
        return
    for name in ("fwd", "varlen_fwd", "bwd", "varlen_bwd", "fwd_kvcache"):
        with pytest.raises(RuntimeError, match=r"flash_attn_2_cuda: .*CUDA extension"):
            getattr(extension, name)(x)


def test_what_bert_padding_has_of_einops(monkeypatch: pytest.MonkeyPatch) -> None:
    einops = ModuleType("einops")
    einops.__spec__ = importlib.machinery.ModuleSpec("einops", None)
    einops.rearrange, einops.repeat = object(), object()
    monkeypatch.setitem(sys.modules, "einops", einops)
    compat.install()
    try:
        bert_padding = importlib.import_module("flash_attn.bert_padding")
        assert bert_padding.rearrange is einops.rearrange
    finally:
        compat.uninstall()


def test_operators_under_their_names() -> None:
    """What a policy of selective checkpointing lists is the operator that then runs."""
    assert not hasattr(torch.ops.flash_attn, "_flash_attn_forward")
    compat.install()
    try:
        listed = torch.ops.flash_attn._flash_attn_forward.default
        seen = []

        def policy(context: Any, operator: Any, *_: Any, **__: Any) -> CheckpointPolicy:
            seen.append(operator is listed)
            save = CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE
            return save[operator is not listed]

        q = torch.randn(1, 4, 2, 8, requires_grad=True)
        context_fn = functools.partial(create_selective_checkpoint_contexts, policy)
        out = checkpoint(
            lambda q: flash_attn_cuda.flash_attn_func(q, q, q),
            q,
            use_reentrant=False,
            context_fn=context_fn,
        )
        (gradient,) = torch.autograd.grad(out.sum(), q)
        assert any(seen)
        (expected,) = torch.autograd.grad(flash_attn_cuda.flash_attn_func(q, q, q).sum(), q)
        assert torch.equal(gradient, expected)
    finally:
        compat.uninstall()
    assert not hasattr(torch.ops.flash_attn, "_flash_attn_forward")


@pytest.mark.usefixtures("installed")
def test_packaging_metadata() -> None:
    assert importlib.util.find_spec("flash_attn") is not None
    for name in ("flash_attn", "flash-attn", "Flash.Attn"):
        assert importlib.metadata.version(name) == compat.VERSION
    distribution = importlib.metadata.distribution("flash-attn")
    assert distribution.metadata["Name"] == "flash-attn" and distribution.name == "flash-attn"
    assert distribution.metadata.json["version"] == compat.VERSION
    assert importlib.metadata.packages_distributions()["flash_attn"] == ["flash-attn"]
    major, minor, _ = (int(number) for number in compat.VERSION.split("."))
    assert (major, minor) == (2, 8)


def test_install_twice_and_uninstall() -> None:
    assert not compat.is_installed()
    compat.install()
    module = importlib.import_module("flash_attn")
    compat.install()
    assert importlib.import_module("flash_attn") is module and compat.is_installed()
    compat.uninstall()
    compat.uninstall()
    assert not compat.is_installed() and "flash_attn" not in sys.modules
    assert importlib.util.find_spec("flash_attn") is None
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("flash_attn")


def test_another_flash_attn_is_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    other = ModuleType("flash_attn")
    other.__file__ = "/elsewhere/flash_attn/__init__.py"
    monkeypatch.setitem(sys.modules, "flash_attn", other)
    with pytest.raises(RuntimeError, match=r"flash_attn has already been imported from /elsewhere"):
        compat.install()
    assert sys.modules["flash_attn"] is other and not compat.is_installed()


@pytest.mark.usefixtures("installed")
def test_transformers_sees_it(monkeypatch: pytest.MonkeyPatch) -> None:
    utils = pytest.importorskip("transformers.utils.import_utils")
    # As releases before 5.23 hold it from when they were imported, by another test perhaps.
    known = dict(getattr(utils, "PACKAGE_DISTRIBUTION_MAPPING", {}))
    monkeypatch.setattr(utils, "PACKAGE_DISTRIBUTION_MAPPING", known, raising=False)
    compat.uninstall()
    assert "flash_attn" not in known
    compat.install()
    assert known["flash_attn"] == ["flash-attn"]
    assert utils.is_flash_attn_greater_or_equal("2.4.1")
    compat.uninstall()
    assert not utils.is_flash_attn_greater_or_equal("2.4.1")
    compat.install()
    assert utils.is_flash_attn_greater_or_equal("2.4.1")


@pytest.mark.gpu
@pytest.mark.cuda_only
def test_flash_attention_2_of_transformers_runs_on_it() -> None:
    pytest.importorskip("transformers")
    code = f"""
    from flash_attn_cuda import compat
    compat.install()
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    sizes = dict(vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2)
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).to("{DEVICE}", torch.bfloat16)
    tokens = torch.randint(1, 64, (2, 12), device="{DEVICE}")
    mask = torch.ones_like(tokens)
    mask[0, :5] = 0
    outputs = []
    for name in ("sdpa", "flash_attention_2"):
        model.set_attn_implementation(name)
        outputs.append(model(tokens, attention_mask=mask).logits[mask.bool()].float())
    assert (outputs[0] - outputs[1]).abs().max() < 0.05 * outputs[0].abs().max()
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True)
