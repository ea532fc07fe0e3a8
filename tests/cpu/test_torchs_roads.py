"""The roads of test_roads.py through torch's own operators, which SDPA and varlen_attn call. What
they hand over, the extension says by the functions that their kernels call (call_of_torch).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from inspect import signature
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

import flash_attn_cuda as ours
from flash_attn_cuda.call.fields import AttentionCall
from flash_attn_cuda.cpu.calls import forward_on_cpu
from flash_attn_cuda.installed import build_info
from flash_attn_cuda.report.explain import call_of_torch
from tests.cases.roads import (
    HEADS,
    LONGEST,
    NO_MASKS,
    OPTIONS,
    PACKED,
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

__all__ = ["arrivals"]  # pytest finds it here

pytestmark = pytest.mark.skipif(
    build_info.extension is None, reason="flash_attn_cuda._C is not built here"
)

aten = torch.ops.aten
FORWARDS = (
    "_flash_attention_forward",
    "_flash_attention_forward_no_dropout_inplace",
    "_scaled_dot_product_flash_attention",
)
BACKWARDS = ("_flash_attention_backward", "_scaled_dot_product_flash_attention_backward")


@pytest.fixture
def torchs(arrivals: Arrivals) -> Iterator[None]:
    """Has torch's operators run on the CPU, where torch has none, and their calls recorded."""

    def forward(operator: str, *given: Any, **options: Any) -> Any:
        call = call_of_torch(getattr(aten, operator).default, *given, **options)
        assert call is not None
        arrivals.forward.append(call)
        out, lse, *_ = forward_on_cpu(call, torch.zeros(2, dtype=torch.int64))
        if operator.endswith("inplace"):
            return lse
        rest = (torch.zeros(2, dtype=torch.uint64), torch.zeros((), dtype=torch.uint64))
        if operator.startswith("_scaled"):
            lengths = (None, None, call.q.shape[1], call.k.shape[1])
            return out.transpose(1, 2), lse, *lengths, *rest, out.new_empty(0)
        return out, lse, *rest, out.new_empty(0)

    def backward(operator: str, *given: Any, **options: Any) -> Any:
        call = call_of_torch(getattr(aten, operator).default, *given, **options)
        assert call is not None
        arrivals.backward.append(call)
        return tuple(torch.zeros_like(x) for x in given[1:4])

    with torch.library._scoped_library("aten", "IMPL") as library:
        for names, function in ((FORWARDS, forward), (BACKWARDS, backward)):
            for name in names:
                if hasattr(aten, name):
                    library.impl(name, partial(function, name), "CPU")
        yield


def in_words_of_torch(options: Options) -> Options:
    left, right = options.pop("window_size", (-1, -1))
    words = {"softmax_scale": "scale"}
    named = {words.get(name, name): value for name, value in options.items()}
    return {"window_size_left": left, "window_size_right": right, **named}


def by_sdpa(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """The operator of its flash backend, which has three options."""
    given = (options.pop("dropout_p", 0.0), options.pop("causal", False), False)
    scale = options.pop("softmax_scale", None)
    assert not options
    heads_first = (x.transpose(1, 2) for x in (q, k, v))
    out = aten._scaled_dot_product_flash_attention(*heads_first, *given, scale=scale)[0]
    return out.transpose(1, 2)


def by_aten(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    lengths = [options.pop(name, None) for name in PACKED]
    if lengths[0] is None:
        lengths = [None, None, q.shape[1], k.shape[1]]
    given = (options.pop("dropout_p", 0.0), options.pop("causal", False), False)
    named = in_words_of_torch(options)
    return aten._flash_attention_forward(q, k, v, *lengths, *given, **named)[0]


def by_aten_inplace(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    lengths = [options.pop(name) for name in PACKED]
    given = (0.0, options.pop("causal", False), False)
    out = torch.empty_like(q)
    named = in_words_of_torch(options)
    aten._flash_attention_forward_no_dropout_inplace(out, q, k, v, *lengths, *given, **named)
    return out


def by_varlen_attn(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    lengths = [options.pop(name) for name in PACKED]
    scale = options.pop("softmax_scale", None)
    if options.pop("causal", False):
        options["window_size"] = (-1, 0)
    return varlen_attn(q, k, v, *lengths, scale=scale, **options)


NO_SCORES = {"softcap", "sink", "all", *NO_MASKS}
HAS_WINDOWS = "window_size" in signature(varlen_attn).parameters
TORCHS: dict[str, tuple[Callable[..., Tensor], Options, set[str]]] = {
    "sdpa": (by_sdpa, {}, {"window", "left_window", "causal_window", "alibi", *NO_SCORES}),
    "aten": (by_aten, {}, NO_SCORES),
    "packed": (by_aten, PACKED, NO_SCORES),
    "varlen_attn": (
        by_varlen_attn,
        PACKED,
        {
            *("causal_window", "alibi", "dropout", *NO_SCORES),
            *(() if HAS_WINDOWS else ("causal", "window", "left_window")),
        },
    ),
}
HAS_PAGES = "block_table" in str(aten._flash_attention_forward.default._schema)
needs_pages = pytest.mark.skipif(not HAS_PAGES, reason="this torch has no block_table")


def check_torchs(
    road: Callable[..., Tensor],
    inputs: list[Tensor],
    given: Options,
    monkeypatch: pytest.MonkeyPatch,
    arrivals: Arrivals,
) -> None:
    """Compares a forward, and a backward where an input requires grad."""
    without = [x.detach() for x in inputs]
    is_packed = "cu_seqlens_q" in given
    function = ours.flash_attn_varlen_func if is_packed else ours.flash_attn_func
    forward, backward = eagerly(lambda: function(*without, **given), monkeypatch)
    options = dict(given)
    torch.use_deterministic_algorithms(options.pop("deterministic", False))
    try:
        out = road(*inputs, **options)
        if out.requires_grad:
            out.float().sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)
    if out.requires_grad:
        assert_arrived(arrivals, forward, backward)
    else:
        (call,) = arrivals.forward
        assert_same(described(call)[0], forward, [name for name in forward if name != "out"])


@pytest.mark.usefixtures("torchs")
@pytest.mark.parametrize(
    ("road", "name"),
    [
        (road, name)
        for road, (_, _, lacks) in TORCHS.items()
        for name in OPTIONS
        if name not in lacks
    ],
)
def test_torchs_operators(
    road: str, name: str, arrivals: Arrivals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's backward is not told of slopes."""
    function, lengths, _ = TORCHS[road]
    inputs = packed_inputs() if lengths else dense_inputs()
    leaves = [x.requires_grad_(name != "alibi") for x in inputs]
    check_torchs(function, leaves, lengths | OPTIONS[name], monkeypatch, arrivals)


@pytest.mark.usefixtures("torchs")
@pytest.mark.parametrize("name", ["none", "causal", "scale", "window", "alibi"])
@pytest.mark.skipif(not hasattr(aten, FORWARDS[1]), reason="this torch lacks the operator")
def test_torchs_operator_that_writes_into_a_tensor(
    name: str, arrivals: Arrivals, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_torchs(by_aten_inplace, packed_inputs(), PACKED | OPTIONS[name], monkeypatch, arrivals)
    assert isinstance(arrivals.forward[0].out, Tensor)


@needs_pages
@pytest.mark.usefixtures("torchs")
@pytest.mark.parametrize("road", [by_aten, by_aten_inplace, by_varlen_attn])
@pytest.mark.parametrize("paged", [False, True], ids=["rows", "pages"])
def test_torchs_operators_with_lengths(
    road: Callable[..., Tensor],
    paged: bool,
    arrivals: Arrivals,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    inputs = packed_inputs()
    given = PACKED | {"seqused_k": integers(11, 23)}
    if paged:
        inputs[1:] = torch.randn(2, 4, 16, HEADS, 16).bfloat16().unbind()
        given |= {"block_table": integers(3, 1, 2, 0).view(2, 2), "num_splits": 3}
        given |= {"cu_seqlens_k": None}
    check_torchs(road, inputs, given, monkeypatch, arrivals)
    assert arrivals.forward[0].seqused_k is not None


def test_calls_that_are_left_to_torch() -> None:
    """Lengths of sequences that are not packed, of which torch's kernel does not hear, and what no
    kernel takes.
    """
    lengths = (None, None, LONGEST, LONGEST, 0.0, False, False)
    operator = aten._flash_attention_forward.default

    def explained(*qkv: Tensor, **options: Any) -> AttentionCall | None:
        return call_of_torch(operator, *qkv, *lengths, **options)

    q, k, v = dense_inputs()
    assert explained(q, k, v) is not None
    assert explained(q, k, v, seqused_k=integers(11, 23)) is None
    assert explained(q.float(), k.float(), v.float()) is None
    assert explained(q, k.half(), v) is None
    assert explained(q, k, v[..., :8]) is None
    assert explained(q[..., :12], k[..., :12], v[..., :12]) is None
    assert explained(q.transpose(-1, -2).contiguous().transpose(-1, -2), k, v) is None
