"""One truth on every road: whichever way a call takes, eager, through an operator, compiled, by a
private function or another package's surface, the kernels' parameters are made of the same
settings.

Without a GPU: what arrives at the extension, or at an operator's implementation, is recorded and
described by the extension as kernels read it (explain_settings). Parameters are made of that alone
(csrc/torch_binding/to_params.h).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import flash_attn_cuda as ours
from flash_attn_cuda import attend, build_info, private
from flash_attn_cuda.call import ARGUMENTS, AttentionCall, Results
from flash_attn_cuda.context_parallel import ContextParallel
from flash_attn_cuda.cpu.calls import forward_on_cpu
from flash_attn_cuda.integrations import vllm
from flash_attn_cuda.operators import attention as operators
from flash_attn_cuda.surfaces import flash_attention_3 as fa3
from flash_attn_cuda.surfaces import flash_attention_4 as fa4
from tests.context_parallel.ranks import alone

__all__ = ["alone"]  # pytest finds it here

pytestmark = pytest.mark.skipif(
    build_info.extension is None, reason="flash_attn_cuda._C is not built here"
)

Options = dict[str, Any]
Described = dict[str, Any]

HEADS, LONGEST, TOTAL = 2, 23, 40
KEPT = [name for name, said in ARGUMENTS.items() if said.part == ""]


def integers(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


OPTIONS: dict[str, Options] = {
    "none": {},
    "causal": {"causal": True},
    "scale": {"softmax_scale": 0.3},
    "window": {"window_size": (5, 3)},
    "left_window": {"window_size": (5, -1)},
    "causal_window": {"window_size": (7, 4), "causal": True},
    "softcap": {"softcap": 2.5},
    "alibi": {"alibi_slopes": torch.rand(HEADS)},
    "dropout": {"dropout_p": 0.25},
    "deterministic": {"deterministic": True},
    "sink": {"sink": torch.randn(HEADS)},
    "mask": {"attn_mask": torch.rand(LONGEST, LONGEST) > 0.3},
    "bias": {"attn_mask": torch.randn(LONGEST, LONGEST)},
    "all": {
        **{"causal": True, "softmax_scale": 0.3, "window_size": (7, 0), "softcap": 2.5},
        **{"alibi_slopes": torch.rand(HEADS), "deterministic": True, "sink": torch.randn(HEADS)},
    },
}
PACKED: Options = {
    "cu_seqlens_q": integers(0, 17, TOTAL),
    "cu_seqlens_k": integers(0, 17, TOTAL),
    "max_seqlen_q": LONGEST,
    "max_seqlen_k": LONGEST,
}
LENGTHS: dict[str, Options] = {
    "none": {},
    "seqused_k": {"seqused_k": integers(11, 23)},
    "seqused": {"seqused_q": integers(3, 20), "seqused_k": integers(11, 23)},
    "leftpad": {"leftpad_k": integers(2, 5)},
}


# -- what arrives ----------------------------------------------------------------------------------


class Arrivals:
    """The calls that forwards and backwards were told of, of one road."""

    def __init__(self) -> None:
        self.forward: list[AttentionCall] = []
        self.backward: list[AttentionCall] = []


class Extension:
    """Stands where the extension does, for tensors on the CPU that are taken for a GPU's."""

    def __init__(self, arrivals: Arrivals) -> None:
        self.arrivals = arrivals

    def forward(self, call: AttentionCall, returns_lse: bool = True) -> Results:
        self.arrivals.forward.append(call)
        return forward_on_cpu(call, torch.zeros(2, dtype=torch.int64))

    def attention(self, *arguments: Any) -> tuple[Tensor, Tensor]:
        q, k, v, softmax_scale, causal, _ = arguments
        call = AttentionCall(q, k, v, softmax_scale=softmax_scale, causal=causal)
        results = self.forward(call)
        return results.out, results.softmax_lse


@pytest.fixture
def arrivals(monkeypatch: pytest.MonkeyPatch) -> Arrivals:
    """Of the operators' implementations on the CPU."""
    seen = Arrivals()
    on_cpu, backward_on_cpu = operators.forward_on_cpu, operators.backward_on_cpu

    def forward(call: AttentionCall, rng_state: Tensor) -> Any:
        seen.forward.append(call)
        return on_cpu(call, rng_state)

    def backward(call: AttentionCall, incoming: Any) -> Any:
        seen.backward.append(call)
        return backward_on_cpu(call, incoming)

    monkeypatch.setattr(operators, "forward_on_cpu", forward)
    monkeypatch.setattr(operators, "backward_on_cpu", backward)
    return seen


def described(call: AttentionCall) -> tuple[Described, Described]:
    """(what a pass that is told of this call reads, what autograd keeps of a forward of it)."""
    extension: Any = build_info.extension
    told, kept = extension.explain_settings(call)
    return told, kept


def assert_same(found: Described, wanted: Described, names: list[str] | None = None) -> None:
    for name in list(wanted) if names is None else names:
        x, y = found[name], wanted[name]
        if isinstance(x, Tensor) and isinstance(y, Tensor):
            assert x.dtype == y.dtype and torch.equal(x, y), name
        else:
            assert x == y, f"{name}: {x} where an eager call says {y}"


def eagerly(
    road: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> tuple[Described, Described]:
    """(forward, backward) of the road that an eager CUDA call takes."""
    seen = Arrivals()
    real = build_info.extension
    with monkeypatch.context() as patch:
        patch.setattr(attend, "is_plain_cuda_call", lambda *tensors: True)
        patch.setattr(build_info, "extension", Extension(seen))
        with torch.no_grad():
            road()
    assert build_info.extension is real
    (call,) = seen.forward
    return described(call)


# -- sequences of one length -----------------------------------------------------------------------


def dense_inputs() -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(2, LONGEST, HEADS, 16, dtype=torch.bfloat16) for _ in "qkv"]


def privately(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
    """By the private functions, whose arguments stand in their order."""
    left, right = options.pop("window_size", (-1, -1))
    slopes, dropout_p = options.pop("alibi_slopes", None), options.pop("dropout_p", 0.0)
    scale = options.pop("softmax_scale", q.shape[-1] ** -0.5)
    causal, softcap = options.pop("causal", False), options.pop("softcap", 0.0)
    deterministic = options.pop("deterministic", False)
    assert not options
    common = (dropout_p, scale, causal, left, right, softcap)
    return private._flash_attn_forward(q, k, v, *common, slopes, False, deterministic)[0]


def by_fa3(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
    return fa3.flash_attn_func(q, k, v, **options)


def in_words_of_fa4(options: Options) -> Options:
    """To which a negative bound is a bound."""
    sizes = options.pop("window_size", (-1, -1))
    window = tuple(None if size < 0 else size for size in sizes)
    return {"learnable_sink": options.pop("sink", None), "window_size": window, **options}


def by_fa4(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
    return fa4.flash_attn_func(q, k, v, **in_words_of_fa4(options))[0]


def compiled(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
    torch._dynamo.reset()
    function = torch.compile(ours.flash_attn_func, backend="aot_eager", fullgraph=True)
    return function(q, k, v, **options)


def with_one_tensor(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
    return ours.flash_attn_kvpacked_func(q, torch.stack([k, v], 2), **options)


DENSE: dict[str, tuple[Callable[..., Any], set[str]]] = {  # and the options that a road lacks
    "operator": (ours.flash_attn_func, set()),
    "compiled": (compiled, set()),
    "kvpacked": (with_one_tensor, {"sink", "mask", "bias", "all"}),
    "private": (privately, {"sink", "mask", "bias", "all"}),
    "fa3": (by_fa3, {"alibi", "dropout", "sink", "mask", "bias", "all"}),
    "fa4": (by_fa4, {"alibi", "dropout", "mask", "bias", "all"}),
}


@pytest.mark.parametrize(
    ("road", "name"),
    [(road, name) for road, (_, lacks) in DENSE.items() for name in OPTIONS if name not in lacks],
)
def test_sequences_of_one_length(
    road: str, name: str, arrivals: Arrivals, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v = dense_inputs()
    forward, backward = eagerly(lambda: ours.flash_attn_func(q, k, v, **OPTIONS[name]), monkeypatch)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    DENSE[road][0](*leaves, **OPTIONS[name]).float().sum().backward()
    assert_arrived(arrivals, forward, backward)


def assert_arrived(arrivals: Arrivals, forward: Described, backward: Described) -> None:
    """A sink whose gradient nobody wants is not told to an operator's backward."""
    (call,), (of_gradients,) = arrivals.forward, arrivals.backward
    told, _ = described(call)
    assert_same(told, forward)
    told, kept = described(of_gradients)
    assert_same(told, backward, [name for name in KEPT if name != "sink"])
    assert_same(kept, told, [name for name in KEPT if name != "sink"])


# -- packed sequences ------------------------------------------------------------------------------


def packed_inputs() -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(TOTAL, HEADS, 16, dtype=torch.bfloat16) for _ in "qkv"]


def packed_by_fa4(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
    return fa4.flash_attn_varlen_func(q, k, v, **in_words_of_fa4(options))[0]


def packed_by_vllm(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
    window = options.pop("window_size", None)
    sink = options.pop("sink", None)
    return vllm.flash_attn_varlen_func(q, k, v, window_size=window, s_aux=sink, **options)


def packed_compiled(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
    torch._dynamo.reset()
    function = torch.compile(ours.flash_attn_varlen_func, backend="aot_eager", fullgraph=True)
    return function(q, k, v, **options)


def check_packed(
    road: str, given: Options, arrivals: Arrivals, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v = packed_inputs()
    forward, backward = eagerly(lambda: ours.flash_attn_varlen_func(q, k, v, **given), monkeypatch)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    PACKED_ROADS[road][0](*leaves, **given).float().sum().backward()
    assert_arrived(arrivals, forward, backward)


NO_MASKS = {"mask", "bias"}
PACKED_ROADS: dict[str, tuple[Callable[..., Any], set[str]]] = {
    "operator": (ours.flash_attn_varlen_func, set()),
    "compiled": (packed_compiled, set()),
    "fa3": (fa3.flash_attn_varlen_func, {"alibi", "dropout", "sink", "all", *NO_MASKS}),
    "fa4": (packed_by_fa4, {"alibi", "dropout", "all", *NO_MASKS}),
    "vllm": (packed_by_vllm, {"dropout", *NO_MASKS}),
}


@pytest.mark.parametrize(
    ("road", "name"),
    [
        (road, name)
        for road, (_, lacks) in PACKED_ROADS.items()
        for name in OPTIONS
        if name not in lacks
    ],
)
def test_packed_sequences(
    road: str, name: str, arrivals: Arrivals, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_packed(road, PACKED | OPTIONS[name], arrivals, monkeypatch)


@pytest.mark.parametrize("name", LENGTHS)
@pytest.mark.parametrize("road", ["operator", "fa3"])
def test_lengths(road: str, name: str, arrivals: Arrivals, monkeypatch: pytest.MonkeyPatch) -> None:
    if road == "fa3" and name == "leftpad":
        pytest.skip("it has no leftpad_k here")
    check_packed(road, PACKED | LENGTHS[name], arrivals, monkeypatch)


# -- over a cache ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["none", "causal", "window", "softcap", "alibi", "sink"])
def test_over_a_cache(name: str, arrivals: Arrivals, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = dense_inputs()
    given = {"cache_seqlens": integers(11, 23), "num_splits": 3, **OPTIONS[name]}

    def road() -> Any:
        return ours.flash_attn_with_kvcache(q, k, v, **given)

    forward, _ = eagerly(road, monkeypatch)
    assert forward["num_splits"] == 3 and forward["over_cache"]
    road()
    (call,) = arrivals.forward
    assert_same(described(call)[0], forward)


# -- context parallelism, of one rank --------------------------------------------------------------

OF_ONE_RANK = [
    *("softmax_scale", "window_size_left", "window_size_right", "softcap", "alibi_slopes"),
    *("dropout_p", "deterministic", "sink", "cu_seqlens_q", "cu_seqlens_k"),
    *("max_seqlen_q", "max_seqlen_k", "fp32_results", "sm_margin", "num_splits"),
]


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("name", [name for name in OPTIONS if name not in NO_MASKS])
def test_context_parallelism(
    name: str, arrivals: Arrivals, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v = packed_inputs()
    options = dict(OPTIONS[name])
    forward, backward = eagerly(
        lambda: ours.flash_attn_varlen_func(q, k, v, **PACKED, **options), monkeypatch
    )
    band = {"causal": options.get("causal", False)}
    band["window_size"] = options.get("window_size", (-1, -1))
    parallel = ContextParallel(scheme="all_gather", head_groups=1)
    plan = parallel.plan(PACKED["cu_seqlens_q"], multiple=16 if name == "dropout" else 1, **band)
    leaves = [parallel.shard(x, plan).clone().requires_grad_() for x in (q, k, v)]
    parallel.attend(*leaves, plan, **options).float().sum().backward()
    (call,), (of_gradients,) = arrivals.forward, arrivals.backward
    assert_same(described(call)[0], forward, OF_ONE_RANK)
    told, _ = described(of_gradients)
    assert_same(told, backward, [x for x in OF_ONE_RANK if x not in ("sink", "num_splits")])
