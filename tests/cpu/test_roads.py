"""One truth on every road: whichever way a call takes, eager, through an operator, compiled, by a
private function, torch's own operators or another package's surface, the kernels' parameters are
made of the same settings.

Without a GPU: what arrives at the extension, or at an operator's implementation, is recorded and
described by the extension as kernels read it (tests/cases/roads.py). The roads of torch's own
operators are those of test_torchs_roads.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import flash_attn_cuda as ours
from flash_attn_cuda.call.fields import AttentionCall
from flash_attn_cuda.context_parallel import ContextParallel
from flash_attn_cuda.functions import private
from flash_attn_cuda.installed import build_info
from flash_attn_cuda.integrations import flash_attention_3 as fa3
from flash_attn_cuda.integrations import flash_attention_4 as fa4
from flash_attn_cuda.integrations import vllm
from tests.cases.roads import (
    HEADS,
    LONGEST,
    NO_MASKS,
    OPTIONS,
    PACKED,
    TOTAL,
    Arrivals,
    Options,
    arrivals,
    assert_arrived,
    assert_same,
    dense_inputs,
    described,
    eagerly,
    integers,
    packed_inputs,
)
from tests.context_parallel.ranks import alone

__all__ = ["alone", "arrivals"]  # pytest finds them here

pytestmark = pytest.mark.skipif(
    build_info.extension is None, reason="flash_attn_cuda._C is not built here"
)

LENGTHS: dict[str, Options] = {
    "none": {},
    "seqused_k": {"seqused_k": integers(11, 23)},
    "seqused": {"seqused_q": integers(3, 20), "seqused_k": integers(11, 23)},
    "leftpad": {"leftpad_k": integers(2, 5)},
}


# -- sequences of one length -----------------------------------------------------------------------


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


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    def road(*tensors: Tensor, **options: Any) -> Any:
        torch._dynamo.reset()
        return torch.compile(function, backend="aot_eager", fullgraph=True)(*tensors, **options)

    return road


# What tells a compiled road from others; the options of "all" do it together.
NOT_COMPILED = {*OPTIONS} - {"all", "dropout", "mask", "bias"}


def with_one_tensor(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
    return ours.flash_attn_kvpacked_func(q, torch.stack([k, v], 2), **options)


DENSE: dict[str, tuple[Callable[..., Any], set[str]]] = {  # and the options that a road lacks
    "operator": (ours.flash_attn_func, set()),
    "compiled": (compiled(ours.flash_attn_func), NOT_COMPILED),
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


# -- packed sequences ------------------------------------------------------------------------------


def packed_by_fa4(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
    return fa4.flash_attn_varlen_func(q, k, v, **in_words_of_fa4(options))[0]


def packed_by_vllm(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
    window = options.pop("window_size", None)
    sink = options.pop("sink", None)
    return vllm.flash_attn_varlen_func(q, k, v, window_size=window, s_aux=sink, **options)


def check_packed(
    road: str, given: Options, arrivals: Arrivals, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v = packed_inputs()
    forward, backward = eagerly(lambda: ours.flash_attn_varlen_func(q, k, v, **given), monkeypatch)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    PACKED_ROADS[road][0](*leaves, **given).float().sum().backward()
    assert_arrived(arrivals, forward, backward)


PACKED_ROADS: dict[str, tuple[Callable[..., Any], set[str]]] = {
    "operator": (ours.flash_attn_varlen_func, set()),
    "compiled": (compiled(ours.flash_attn_varlen_func), NOT_COMPILED),
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


def new_keys(*rows: int) -> Options:
    return {name: torch.randn(*rows, HEADS, 16).bfloat16() for name in "kv"}


APPENDS: dict[str, Options] = {
    "new_keys": {"cache_seqlens": integers(5, 20), **new_keys(2, 3)},
    "one_length": {"cache_seqlens": 7, **new_keys(2, 3)},
    "rotary": {
        **{"cache_seqlens": integers(5, 20), **new_keys(2, 3), "rotary_interleaved": False},
        **{
            name: torch.rand(LONGEST + LONGEST, 4).bfloat16()
            for name in ("rotary_cos", "rotary_sin")
        },
    },
}


@pytest.mark.parametrize("name", APPENDS)
def test_appended_keys(name: str, arrivals: Arrivals, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = dense_inputs()

    def road() -> Any:
        return ours.flash_attn_with_kvcache(q, k, v, causal=True, **APPENDS[name])

    forward, _ = eagerly(road, monkeypatch)
    road()
    (call,) = arrivals.forward
    assert_same(described(call)[0], forward)
    assert forward["k_new"] is not None and forward["seqlen_k"] == call.seqlen_k


E4M3 = torch.float8_e4m3fn
TOKENS = (2, LONGEST, HEADS)
FP8: dict[str, Options] = {
    "heads": {"k_descale": torch.rand(HEADS), "v_descale": torch.rand(HEADS)},
    "numbers": {"k_descale": 0.25, "v_descale": 0.5},
    "sequences": {
        "k_descale": torch.rand(2, HEADS),
        "v_descale": torch.rand(2, 1).expand(2, HEADS),
    },
    "tokens": {"k_descale": torch.rand(TOKENS), "v_descale": torch.rand(TOKENS)},
    "queries": {"q_descale": torch.rand(2, HEADS), "k_descale": 0.25, "v_descale": 0.5},
    "append": {**APPENDS["rotary"], "k_descale": torch.rand(HEADS), "v_descale": 0.5},
    "quantized_append": {
        **{**APPENDS["rotary"], "quantize": "token"},
        **{"k_descale": torch.rand(TOKENS), "v_descale": torch.rand(TOKENS)},
    },
}


FP8_ROADS: dict[str, Callable[..., Any]] = {
    "operator": ours.flash_attn_with_kvcache,
    "compiled": compiled(ours.flash_attn_with_kvcache),
    "fa3": fa3.flash_attn_with_kvcache,
}


NOT_OF_FA3 = ("fa3", "quantized_append")


def without_expansion(options: Options) -> Options:
    return {name: x.contiguous() if isinstance(x, Tensor) else x for name, x in options.items()}


@pytest.mark.parametrize(
    ("road", "name"),
    [
        *((x, y) for x in FP8_ROADS for y in FP8 if x != "compiled" and (x, y) != NOT_OF_FA3),
        *(("compiled", y) for y in ("numbers", "quantized_append")),
    ],
)
def test_caches_of_e4m3(
    road: str, name: str, arrivals: Arrivals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FlashAttention-3's function has no quantize."""
    q, *caches = dense_inputs()
    caches = [x.to(E4M3) for x in caches]
    q = q.to(E4M3) if "q_descale" in FP8[name] else q
    given = {"cache_seqlens": integers(11, 20), "causal": True, **FP8[name]}
    forward, _ = eagerly(lambda: ours.flash_attn_with_kvcache(q, *caches, **given), monkeypatch)
    FP8_ROADS[road](q, *caches, **given)
    (call,) = arrivals.forward
    told, _ = described(call)
    names = ("q", "k", "v", "out")  # e4m3 is not compared, and a converted q is another tensor
    assert_same(
        without_expansion(told),
        without_expansion(forward),
        [x for x in forward if x not in names],
    )
    for x in ("k_descale", "v_descale"):
        assert isinstance(told[x], Tensor) and told[x].dtype == torch.float32
    assert told["quantizes_tokens"] == (name == "quantized_append")
    assert told["q"].dtype == torch.bfloat16 and torch.equal(told["q"], forward["q"])


def packed_fp8_by_vllm(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
    if "cu_seqlens_k" in options and "seqused_k" in options:
        del options["cu_seqlens_k"]
    return vllm.flash_attn_varlen_func(q, k, v, **options)


@pytest.mark.parametrize(
    "road", [ours.flash_attn_varlen_func, fa3.flash_attn_varlen_func, packed_fp8_by_vllm]
)
@pytest.mark.parametrize("name", ["heads", "sequences", "queries"])
def test_packed_sequences_of_e4m3(
    road: Callable[..., Any], name: str, arrivals: Arrivals, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, *keys = packed_inputs()
    q = q.to(E4M3) if "q_descale" in FP8[name] else q
    k, v = (x.to(E4M3) for x in keys)
    given = {**PACKED, "causal": True, **FP8[name]}
    forward, _ = eagerly(lambda: ours.flash_attn_varlen_func(q, k, v, **given), monkeypatch)
    road(q, k, v, **given)
    (call,) = arrivals.forward
    told, _ = described(call)
    assert_same(told, forward, [x for x in forward if x not in ("q", "k", "v", "out")])
    assert torch.equal(told["q"], forward["q"]) and told["k"] is k


def test_packed_keys_behind_one_length() -> None:
    """Sequences have different lengths then."""
    q, k, v = packed_inputs()[0], *dense_inputs()[1:]
    keys = {f"{name}_new": x for name, x in new_keys(TOTAL).items()}
    bounds = PACKED["cu_seqlens_q"]
    keys |= {"cu_seqlens_q": bounds, "cu_seqlens_k_new": bounds}
    told, _ = described(AttentionCall(q, k, v, over_cache=True, seqlen_k=0, **keys))
    assert told["seqlen_k"] is None and told["cu_seqlens_k_new"] is bounds
    assert torch.equal(told["seqused_k"], integers(0, 0))


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
