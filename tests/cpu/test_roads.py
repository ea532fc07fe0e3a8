"""One truth on every road: whichever way a call takes, eager, through an operator, compiled, by a
private function, torch's own operators or another package's surface, the kernels' parameters are
made of the same settings.

Without a GPU: what arrives at the extension, or at an operator's implementation, is recorded and
described by the extension as kernels read it (explain_settings). Parameters are made of that alone
(csrc/torch_binding/to_params.h). What torch's operators hand over, the extension says by the
functions that their kernels call (call_of_torch).
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
from flash_attn_cuda import attend, build_info, private
from flash_attn_cuda.call import ARGUMENTS, AttentionCall, Results
from flash_attn_cuda.context_parallel import ContextParallel
from flash_attn_cuda.cpu.calls import forward_on_cpu
from flash_attn_cuda.explain import call_of_torch
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
    """A sink whose gradient nobody wants is not told to an operator's backward, nor lists of rows,
    which autograd keeps for derivatives in a direction.
    """
    (call,), (of_gradients,) = arrivals.forward, arrivals.backward
    told, _ = described(call)
    assert_same(told, forward)
    told, kept = described(of_gradients)
    names = [name for name in KEPT if name not in ("sink", "block_rows")]
    assert_same(told, backward, names)
    assert_same(kept, told, names)


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


# -- torch's own operators, which SDPA and varlen_attn call ----------------------------------------

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


def fp8_cache_compiled(*tensors: Tensor, **options: Any) -> Any:
    torch._dynamo.reset()
    function = torch.compile(ours.flash_attn_with_kvcache, backend="aot_eager", fullgraph=True)
    return function(*tensors, **options)


FP8_ROADS: dict[str, Callable[..., Any]] = {
    "operator": ours.flash_attn_with_kvcache,
    "compiled": fp8_cache_compiled,
    "fa3": fa3.flash_attn_with_kvcache,
}


def without_expansion(options: Options) -> Options:
    return {name: x.contiguous() if isinstance(x, Tensor) else x for name, x in options.items()}


@pytest.mark.parametrize(
    ("road", "name"),
    [(x, y) for x in FP8_ROADS for y in FP8 if (x, y) != ("fa3", "quantized_append")],
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
    """Sequences have different lengths then; the bounds of new keys may be those of queries."""
    q, k, v = packed_inputs()[0], *dense_inputs()[1:]
    keys = {f"{name}_new": x for name, x in new_keys(TOTAL).items()}
    bounds = PACKED["cu_seqlens_q"]
    call = AttentionCall(q, k, v, cu_seqlens_q=bounds, over_cache=True, seqlen_k=0, **keys)
    told, _ = described(call)
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
