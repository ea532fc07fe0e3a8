"""FlashAttention-3, and another build of this package, as contenders: where they are looked for,
and what they are called with.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.core.metrics import Pass
from benchmarks.core.refcheck import ReferenceCheck
from benchmarks.core.runner import Status, make_input_sets, run_case
from benchmarks.peers import backends, fa3, other_build
from benchmarks.peers.backends import BACKENDS, Unsupported
from flash_attn_cuda.call.fields import AttentionCall, Incoming
from flash_attn_cuda.cpu import backward_on_cpu, forward_on_cpu
from flash_attn_cuda.installed import build_info
from tests.benchmarks.cases import BRIEF, SMALL

NAMESPACE = "fake_flash_attn_3"
FORWARD = (
    "fwd(Tensor q, Tensor k, Tensor v, Tensor? k_new, Tensor(out!)? out=None, "
    "int? max_seqlen_q=None, float? softmax_scale=None, bool is_causal=False, "
    "int window_size_left=-1, int num_splits=0, bool? pack_gqa=None) "
    "-> (Tensor(out!), Tensor, Tensor, Tensor)"
)
BACKWARD = (
    "bwd(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, "
    "Tensor(dq!)? dq=None, Tensor(dk!)? dk=None, Tensor(dv!)? dv=None, int? max_seqlen_q=None, "
    "float? softmax_scale=None, bool is_causal=False, int window_left=-1) "
    "-> (Tensor, Tensor)"
)
FUNCTIONS = (fa3.flash_attention_3, fa3.flash_attention_3_packed, fa3.flash_attention_3_cached)


@pytest.fixture(autouse=True)
def _looked_for_anew(monkeypatch) -> Iterator[None]:
    """On the CPU, without the package."""
    monkeypatch.setattr(backends, "require_cuda", lambda case: None)
    monkeypatch.setitem(sys.modules, "flash_attn_interface", None)
    for function in (*FUNCTIONS, other_build.other_attention):
        function.cache_clear()
    yield
    for function in (*FUNCTIONS, other_build.other_attention):
        function.cache_clear()


def check_results(backend: str, **changes: Any) -> None:
    case = replace(SMALL, **changes)
    checker = ReferenceCheck(case, make_input_sets(case)[0])
    for which in Pass:
        verdict = checker.check(BACKENDS[backend], which)
        assert verdict["passes"], verdict


# FlashAttention-3's operators


def named(operator: str, arguments: tuple[Any, ...]) -> dict[str, Any]:
    """By the schema, which the dispatcher makes positions of."""
    schema = getattr(getattr(torch.ops, NAMESPACE), operator).default._schema
    return dict(zip((argument.name for argument in schema.arguments), arguments, strict=False))


def forward(*arguments: Any) -> tuple[torch.Tensor, ...]:
    given = named("fwd", arguments)
    q = given["q"]
    assert given["k_new"] is None and given["num_splits"] == 1 and not torch.is_grad_enabled()
    if q.shape[-1] == 24:
        raise RuntimeError("This flash attention build does not support hdim 24.")
    if q.shape[-1] == 40:
        raise RuntimeError("CUDA error: operation not supported")
    found = forward_on_cpu(call_of(**given), q.new_empty(0))
    return found.out, found.softmax_lse, q.new_empty(0), q.new_empty(0)


def backward(*arguments: Any) -> tuple[torch.Tensor, ...]:
    given = named("bwd", arguments)
    incoming = Incoming(given["dout"], None, given["out"], given["softmax_lse"], None)
    found = backward_on_cpu(call_of(**given), incoming)
    for name in ("dq", "dk", "dv"):
        given[name].copy_(getattr(found, name))
    return torch.empty(0), given["softmax_lse"].clone()


def call_of(*, softmax_scale: float, is_causal: bool = False, **others: Any) -> AttentionCall:
    tensors = (others[name] for name in "qkv")
    return AttentionCall(*tensors, softmax_scale=softmax_scale, causal=is_causal)


@pytest.fixture(scope="module")
def library() -> Iterator[Any]:
    """An operator library of CPU kernels with such schemas, as long as the tests run."""
    with torch.library._scoped_library(NAMESPACE, "DEF") as library:
        library.define(FORWARD)
        library.define(BACKWARD)
        library.impl("fwd", forward, "CPU")
        library.impl("bwd", backward, "CPU")
        yield getattr(torch.ops, NAMESPACE)


@pytest.mark.parametrize(("causal", "scale"), [(False, 0.3), (True, None)])
def test_operators_compute_attention_and_its_gradients(library, monkeypatch, causal, scale) -> None:
    monkeypatch.setattr(fa3, "load_ops", lambda: library)
    check_results("fa3", causal=causal, softmax_scale=scale)


@pytest.mark.parametrize(
    ("head_dim", "status", "reason"),
    [
        (16, Status.ok, None),
        (24, Status.unsupported, "does not support hdim 24"),
        (40, Status.failed, "operation not supported"),  # a defect, not a missing head dim
        (12, Status.unsupported, "multiples of 8 up to 256"),
        (264, Status.unsupported, "multiples of 8 up to 256"),
    ],
)
def test_head_dims_that_it_lacks(library, monkeypatch, head_dim, status, reason) -> None:
    monkeypatch.setattr(fa3, "load_ops", lambda: library)
    case = replace(SMALL, head_dim=head_dim)
    (result,) = run_case(case, Pass.forward, [BACKENDS["fa3"]], make_input_sets(case), BRIEF)
    assert result.status is status
    assert result.reason is reason is None or reason in result.reason


def test_what_a_release_or_a_build_lacks(library) -> None:
    """A causal call must not be timed as a full one."""
    with pytest.raises(NotImplementedError, match=r"fwd.* takes no no_such_thing"):
        fa3.Operator(library.fwd)(q=None, no_such_thing=True)
    with pytest.raises(NotImplementedError, match="FP8"), fa3.refusals():
        raise RuntimeError("This flash attention build does not support FP8.")


# Where FlashAttention-3 is


def test_the_package_comes_first(monkeypatch) -> None:
    package = ModuleType("flash_attn_interface")
    package.flash_attn_func = lambda q, k, v, **given: ((q, given), "lse")
    package.flash_attn_varlen_func = package.flash_attn_func
    package.flash_attn_with_kvcache = lambda *tensors, **given: given
    monkeypatch.setitem(sys.modules, "flash_attn_interface", package)
    monkeypatch.setattr(fa3, "load_ops", lambda: pytest.fail("not wanted"))
    plain = {"softmax_scale": None, "causal": True}
    assert fa3.flash_attention_3()("q", "k", "v", **plain) == ("q", plain)
    attended, given = fa3.flash_attention_3_packed()("q", "k", "v", "cu_seqlens", 7, True)
    assert attended == "q" and given == {
        **plain,
        **dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), "cu_seqlens"),
        **dict.fromkeys(("max_seqlen_q", "max_seqlen_k"), 7),
    }
    given = fa3.flash_attention_3_cached()("q", "k", "v", "lengths", v_descale="scales")
    assert given == {"cache_seqlens": "lengths", "v_descale": "scales"}


def test_a_cache_comes_with_its_lengths_and_scales(monkeypatch) -> None:
    monkeypatch.setattr(fa3, "load_ops", lambda: SimpleNamespace(fwd="fwd"))
    monkeypatch.setattr(fa3, "Operator", lambda operator: lambda **given: [(operator, given)])
    q = torch.empty(2, 1, 4, 16)
    operator, given = fa3.flash_attention_3_cached()(q, "k", "v", "lengths", k_descale="scales")
    assert operator == "fwd" and given.pop("q") is q and given.pop("k_descale") == "scales"
    assert given == {"k": "k", "v": "v", "seqused_k": "lengths", "softmax_scale": 0.25}


def test_without_any_it_says_what_was_looked_for(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(fa3.importlib.util, "find_spec", lambda name: None)
    monkeypatch.delenv(fa3.LIBRARY_VARIABLE, raising=False)
    with pytest.raises(Unsupported, match=r"flash_attn_interface.*FLASH_ATTN_3_LIBRARY.*xformers"):
        BACKENDS["fa3"].prepare(SMALL)
    (tmp_path / "fa3.so").write_text("no library")
    monkeypatch.setenv(fa3.LIBRARY_VARIABLE, str(tmp_path / "fa3.so"))
    with pytest.raises(Unsupported, match=r"fa3\.so cannot be loaded"):
        BACKENDS["fa3"].prepare(SMALL)


# Another build

LIBRARY = """
from flash_attn_cuda import flash_attn_func

def attention(q, k, v, softmax_scale, causal):
    options = {"softmax_scale": softmax_scale, "causal": causal, "return_attn_probs": True}
    return flash_attn_func(q, k, v, **options)[:2]
"""


def test_another_build_is_checked_like_others(monkeypatch, tmp_path: Path) -> None:
    (tmp_path / "_C.py").write_text(LIBRARY)
    monkeypatch.setenv(other_build.LIBRARY_VARIABLE, str(tmp_path / "_C.py"))
    for causal in (False, True):
        check_results("other_build", causal=causal)
    for changes in ({"softcap": 3.0}, {"head_dim": 12}):
        with pytest.raises(Unsupported, match=r"softcap|multiples of 8"):
            BACKENDS["other_build"].prepare(replace(SMALL, **changes))


@pytest.mark.skipif(build_info.extension is None, reason="flash_attn_cuda._C is not built here")
def test_a_library_is_loaded_beside_ours(monkeypatch) -> None:
    assert build_info.extension is not None
    monkeypatch.setenv(other_build.LIBRARY_VARIABLE, str(build_info.extension.__file__))
    with pytest.raises(ValueError, match="q: must be a CUDA tensor"):
        other_build.other_attention()(*[torch.zeros(1, 8, 1, 8)] * 3, None, False)
    assert other_build.other_attention() is not build_info.extension.attention
