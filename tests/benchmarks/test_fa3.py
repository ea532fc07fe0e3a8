"""FlashAttention-3 as a peer: where it is looked for, and its operators behind autograd."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import pytest
import torch

from benchmarks.core.metrics import Pass
from benchmarks.core.refcheck import ReferenceCheck
from benchmarks.core.runner import Status, make_input_sets, run_case
from benchmarks.peers import backends, fa3
from benchmarks.peers.backends import BACKENDS, Unsupported
from flash_attn_cuda.call import AttentionCall, Incoming
from flash_attn_cuda.cpu import backward_on_cpu, forward_on_cpu
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


def named(operator: str, arguments: tuple) -> dict:
    """By the schema, which the dispatcher makes positions of."""
    schema = getattr(getattr(torch.ops, NAMESPACE), operator).default._schema
    return dict(zip((argument.name for argument in schema.arguments), arguments, strict=False))


def forward(*arguments):
    given = named("fwd", arguments)
    q = given["q"]
    assert given["k_new"] is None and given["num_splits"] == 1 and not torch.is_grad_enabled()
    if q.shape[-1] == 24:
        raise RuntimeError("This flash attention build does not support hdim 24.")
    if q.shape[-1] == 40:
        raise RuntimeError("CUDA error: operation not supported")
    found = forward_on_cpu(call_of(**given), q.new_empty(0))
    return found.out, found.softmax_lse, q.new_empty(0), q.new_empty(0)


def backward(*arguments):
    given = named("bwd", arguments)
    incoming = Incoming(given["dout"], None, given["out"], given["softmax_lse"], None)
    found = backward_on_cpu(call_of(**given), incoming)
    for name in ("dq", "dk", "dv"):
        given[name].copy_(getattr(found, name))
    return torch.empty(0), given["softmax_lse"].clone()


def call_of(*, softmax_scale: float, is_causal: bool = False, **others) -> AttentionCall:
    tensors = (others[name] for name in "qkv")
    return AttentionCall(*tensors, softmax_scale=softmax_scale, causal=is_causal)


@pytest.fixture(scope="module")
def library():
    """An operator library of CPU kernels with such schemas, as long as the tests run."""
    with torch.library._scoped_library(NAMESPACE, "DEF") as library:
        library.define(FORWARD)
        library.define(BACKWARD)
        library.impl("fwd", forward, "CPU")
        library.impl("bwd", backward, "CPU")
        yield getattr(torch.ops, NAMESPACE)


@pytest.fixture(autouse=True)
def _looked_for_anew():
    cached = (fa3.flash_attention_3, fa3.flash_attention_3_packed, fa3.flash_attention_3_cached)
    for function in cached:
        function.cache_clear()
    yield
    for function in cached:
        function.cache_clear()


@pytest.fixture
def installed(library, monkeypatch):
    monkeypatch.setattr(backends, "require_cuda", lambda case: None)
    monkeypatch.setitem(sys.modules, "flash_attn_interface", None)
    monkeypatch.setattr(fa3, "load_ops", lambda: library)


# Operators


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_operators_compute_attention_and_its_gradients(installed, causal, scale):
    case = replace(SMALL, causal=causal, softmax_scale=scale)
    checker = ReferenceCheck(case, make_input_sets(case)[0])
    for which in Pass:
        verdict = checker.check(BACKENDS["fa3"], which)
        assert verdict["passes"], verdict


@pytest.mark.parametrize("which", Pass)
def test_operators_are_timed_like_other_backends(installed, which):
    inputs = make_input_sets(SMALL)
    fa3_result, ours = run_case(
        SMALL, which, [BACKENDS["fa3"], BACKENDS["sdpa_math"]], inputs, BRIEF
    )
    assert fa3_result.status is ours.status is Status.ok
    assert fa3_result.timing.samples == ours.timing.samples == 4


@pytest.mark.parametrize(
    ("head_dim", "status", "reason"),
    [
        (24, Status.unsupported, "does not support hdim 24"),
        (40, Status.failed, "operation not supported"),  # a defect, not a missing head dim
        (12, Status.unsupported, "multiples of 8 up to 256"),
        (264, Status.unsupported, "multiples of 8 up to 256"),
    ],
)
def test_head_dims_that_it_lacks_are_unsupported(installed, head_dim, status, reason):
    case = replace(SMALL, head_dim=head_dim)
    (result,) = run_case(case, Pass.forward, [BACKENDS["fa3"]], make_input_sets(case), BRIEF)
    assert result.status is status and reason in result.reason


def test_an_argument_that_a_release_lacks_is_not_left_out(library):
    """A causal call must not be timed as a full one."""
    with pytest.raises(NotImplementedError, match=r"fwd.* takes no no_such_thing"):
        fa3.Operator(library.fwd)(q=None, no_such_thing=True)


# Where it is


def test_the_package_comes_first(library, monkeypatch):
    package = ModuleType("flash_attn_interface")
    package.flash_attn_func = lambda q, k, v, *, softmax_scale, causal: ((q, causal), "lse")
    monkeypatch.setitem(sys.modules, "flash_attn_interface", package)
    monkeypatch.setattr(fa3, "load_ops", lambda: pytest.fail("not wanted"))
    assert fa3.flash_attention_3()("q", "k", "v", softmax_scale=None, causal=True) == ("q", True)


def test_packed_sequences_come_with_their_lengths(monkeypatch):
    package = ModuleType("flash_attn_interface")
    package.flash_attn_varlen_func = lambda q, k, v, **given: ((q, given), "lse")
    monkeypatch.setitem(sys.modules, "flash_attn_interface", package)
    attended, given = fa3.flash_attention_3_packed()("q", "k", "v", "cu_seqlens", 7, True)
    assert attended == "q" and given == {
        "softmax_scale": None,
        "causal": True,
        **dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), "cu_seqlens"),
        **dict.fromkeys(("max_seqlen_q", "max_seqlen_k"), 7),
    }


def test_a_cache_comes_with_its_lengths(monkeypatch):
    monkeypatch.setitem(sys.modules, "flash_attn_interface", None)
    monkeypatch.setattr(fa3, "load_ops", lambda: SimpleNamespace(fwd="fwd"))
    monkeypatch.setattr(fa3, "Operator", lambda operator: lambda **given: [(operator, given)])
    q = torch.empty(2, 1, 4, 16)
    operator, given = fa3.flash_attention_3_cached()(q, "k", "v", "lengths")
    assert operator == "fwd" and given.pop("q") is q
    assert given == {"k": "k", "v": "v", "seqused_k": "lengths", "softmax_scale": 0.25}
    _, given = fa3.flash_attention_3_cached()(q, "k", "v", "lengths", k_descale="scales")
    assert given["k_descale"] == "scales"


def test_a_cache_of_fp8_comes_with_its_scales(monkeypatch):
    package = ModuleType("flash_attn_interface")
    package.flash_attn_with_kvcache = lambda *tensors, **given: given
    monkeypatch.setitem(sys.modules, "flash_attn_interface", package)
    given = fa3.flash_attention_3_cached()("q", "k", "v", "lengths", v_descale="scales")
    assert given == {"cache_seqlens": "lengths", "v_descale": "scales"}


def test_fp8_that_a_build_lacks_is_unsupported():
    with pytest.raises(NotImplementedError, match="FP8"), fa3.refusals():
        raise RuntimeError("This flash attention build does not support FP8.")


def test_a_library_by_its_name_comes_before_the_one_in_xformers(tmp_path, monkeypatch):
    folder = tmp_path / "xformers"
    (folder / "flash_attn_3").mkdir(parents=True)
    inside = folder / "flash_attn_3" / "_C.so"
    inside.touch()
    spec = SimpleNamespace(submodule_search_locations=[str(folder)])
    monkeypatch.setattr(fa3.importlib.util, "find_spec", lambda name: {"xformers": spec}[name])
    monkeypatch.delenv(fa3.LIBRARY_VARIABLE, raising=False)
    assert fa3.library_path() == str(inside)
    monkeypatch.setenv(fa3.LIBRARY_VARIABLE, "/elsewhere/fa3.so")
    assert fa3.library_path() == "/elsewhere/fa3.so"
    assert "xformers" not in sys.modules


@pytest.fixture
def nowhere(monkeypatch):
    monkeypatch.setattr(backends, "require_cuda", lambda case: None)
    monkeypatch.setitem(sys.modules, "flash_attn_interface", None)
    monkeypatch.setattr(fa3.importlib.util, "find_spec", lambda name: None)
    monkeypatch.delenv(fa3.LIBRARY_VARIABLE, raising=False)


def test_without_any_it_says_what_was_looked_for(nowhere):
    with pytest.raises(Unsupported, match=r"flash_attn_interface.*FLASH_ATTN_3_LIBRARY.*xformers"):
        BACKENDS["fa3"].prepare(SMALL)


def test_a_library_that_cannot_be_loaded_is_a_reason(nowhere, monkeypatch, tmp_path):
    path = tmp_path / "fa3.so"
    path.write_text("no library")
    monkeypatch.setenv(fa3.LIBRARY_VARIABLE, str(path))
    with pytest.raises(Unsupported, match=r"fa3\.so cannot be loaded"):
        BACKENDS["fa3"].prepare(SMALL)
