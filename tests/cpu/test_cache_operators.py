"""The operators over caches, of 16 bits and more or of e4m3, and of partial results: what they
write, under autograd, compilers, transforms and modes.
"""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.library import opcheck

from flash_attn_cuda import (
    flash_attn_combine,
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
)
from flash_attn_cuda.call.fields import APPENDED
from tests.cases.fp8_cache import E4M3, a_cache, packed_inputs
from tests.cases.masked_operators import int32
from tests.cases.operators import (
    append_arguments,
    arguments,
    backward_arguments,
    gradients_arguments,
)

_ops = torch.ops.flash_attn_cuda


def make_cache(new: int = 0, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """q (2, 3, 4, 16), caches of 3 entries and 9 rows, and `new` keys to append."""
    made = {"q": torch.randn(2, 3, 4, 16, dtype=dtype)}
    made |= {f"{name}_cache": torch.randn(3, 9, 2, 16, dtype=dtype) for name in "kv"}
    if new:
        made |= {name: torch.randn(2, new, 2, 16, dtype=dtype) for name in "kv"}
    return made


def attend(q: Tensor, k_cache: Tensor, v_cache: Tensor, **options: Any) -> Any:
    return flash_attn_with_kvcache(q, k_cache, v_cache, return_softmax_lse=True, **options)


def of_sixteen_bits(new: bool = True, **changes: Any) -> dict[str, Any]:
    """Fields of a call, with everything."""
    made = make_cache(new=2 if new else 0)
    given = {
        "q": made["q"], "k": made["k_cache"], "v": made["v_cache"], "over_cache": True,
        "seqused_k": int32(4, 6), "cache_batch_idx": int32(2, 0), "leftpad_k": int32(1, 0),
        "softmax_scale": 0.3, "causal": True, "window_size_left": 3, "softcap": 2.0,
        "alibi_slopes": torch.rand(2, 4), "sink": torch.rand(4, dtype=torch.float64),
    }  # fmt: skip
    if new:
        given |= {"k_new": made["k"], "v_new": made["v"], "rotary_interleaved": False}
        tables = ("rotary_cos", "rotary_sin")
        given |= {name: torch.randn(9, 4, dtype=torch.float64) for name in tables}
    return {**given, **changes}


def of_e4m3(new: int = 0, form: str = "batch", **changes: Any) -> dict[str, Any]:
    made = a_cache(new, form)
    call = {
        "q": made["q"], "k": made["k_cache"], "v": made["v_cache"], "over_cache": True,
        "seqused_k": made["cache_seqlens"], "causal": True,
        "k_descale": made["k_descale"], "v_descale": made["v_descale"],
        "q_descale": torch.rand(2, 2),
    }  # fmt: skip
    if new:
        call |= {"k_new": made["k"], "v_new": made["v"]}
    return call | changes


def of_latent(**changes: Any) -> dict[str, Any]:
    """v alone is of e4m3, with scales of groups of its columns; over lists of keys."""
    call: dict[str, Any] = {"q": torch.randn(2, 3, 4, 8), "qv": torch.randn(2, 3, 4, 128)}
    call |= {"k": torch.randn(2, 9, 1, 8), "v": torch.randn(2, 9, 1, 128).to(torch.float8_e4m3fn)}
    call |= {"v_descale": torch.rand(2, 9, 1, 2), "softmax_scale": 0.2, "over_cache": True}
    call |= {"k_new": torch.randn(2, 1, 1, 8), "v_new": torch.randn(2, 1, 1, 128)}
    call |= {"key_lists": torch.randint(-3, 3, (2, 3, 1, 4), dtype=torch.int32)}
    return call | {"seqused_k": int32(5, 3)} | changes


# -- operators -------------------------------------------------------------------------------------


def test_opcheck() -> None:
    opcheck(_ops.attention, arguments(**of_sixteen_bits(new=False)))
    one_length = of_sixteen_bits(new=False, seqused_k=None, seqlen_k=5)
    opcheck(_ops.attention, arguments(**one_length))
    opcheck(_ops.attention_with_append, append_arguments(**of_sixteen_bits()))
    in_16_bits = {"v": torch.randn(2, 9, 1, 128), "v_descale": None}
    opcheck(_ops.attention, arguments(**of_latent(**in_16_bits, k_new=None, v_new=None)))
    opcheck(_ops.attention_with_append, append_arguments(**of_latent(**in_16_bits)))
    partials = (torch.randn(3, 2, 5, 4, 8), torch.randn(3, 2, 5, 4))
    opcheck(_ops._flash_attn_combine, (*partials, torch.bfloat16))
    opcheck(_ops._flash_attn_combine_out, (*partials, torch.empty(2, 5, 4, 8)))
    opcheck(_ops._flash_attn_combine, (partials[0][:, :, :0], partials[1][:, :, :0], None))


def test_opcheck_of_e4m3() -> None:
    expanded = {"k_descale": torch.ones(1).expand(2), "v_descale": torch.ones(2, 1).expand(2, 2)}
    quantized = append_arguments(**of_e4m3(1, "token", quantizes_tokens=True))
    # torch's own comparison of tensors before and after has no e4m3: what is written is below.
    tests = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    for op, flat in (
        (_ops.attention, arguments(**of_e4m3())),
        (_ops.attention, arguments(**of_e4m3(form="token"))),
        (_ops.attention_with_append, append_arguments(**of_e4m3(1))),
        (_ops.attention_with_append, append_arguments(**of_e4m3(1, **expanded))),
        (_ops.attention_with_quantized_append, quantized),
        (_ops.attention, arguments(**of_latent(k_new=None, v_new=None))),
        (_ops.attention_with_append, append_arguments(**of_latent())),
        (
            _ops.attention_with_quantized_append,
            append_arguments(**of_latent(quantizes_tokens=True)),
        ),
    ):
        opcheck(op, flat, test_utils=tests)


def written(op: Any) -> list[str]:
    arguments = op.default._schema.arguments
    return [x.name for x in arguments if x.alias_info is not None and x.alias_info.is_write]


def test_what_operators_say_that_they_write() -> None:
    """None takes another's place."""
    schema = _ops.attention.default._schema
    assert not schema.is_mutable and not {x.name for x in schema.arguments} & {*APPENDED}
    scales = ["k_descale", "v_descale"]
    assert written(_ops.attention_with_append) == ["k", "v"]
    assert written(_ops.attention_with_quantized_append) == ["k", "v", *scales]
    for op, given, words in (
        ("attention_with_append", of_sixteen_bits(new=False), "^k: must be given"),
        (
            "attention_with_append",
            of_e4m3(1, "token", quantizes_tokens=True),
            "^quantizes_tokens: must be False",
        ),
        ("attention_with_quantized_append", of_e4m3(1, "token"), "^quantizes_tokens: must be True"),
    ):
        with pytest.raises(ValueError, match=words):
            getattr(_ops, op)(*append_arguments(**given))


@pytest.mark.parametrize(
    ("make", "name"),
    [
        *((of_sixteen_bits, name) for name in ("q", "k", "v", "sink")),
        *((of_e4m3, name) for name in ("q", "k_descale", "q_descale")),
    ],
)
def test_the_backward_refuses(make: Any, name: str) -> None:
    """The public function refuses a tensor that requires grad where it appends."""
    given = make(new=False)
    leaf = given[name].requires_grad_()
    out, lse, *_ = _ops.attention(*arguments(**given))
    for result in (out, lse):
        with pytest.raises(NotImplementedError, match=r"^k_cache: .*gradients are wanted"):
            torch.autograd.grad(result.sum(), leaf, retain_graph=True)
    with torch.no_grad():
        assert not _ops.attention(*arguments(**given))[0].requires_grad


def test_backward_operators_refuse() -> None:
    packed = packed_inputs(torch.float32) | {f"{x}_descale": torch.ones(2) for x in "kv"}
    for given, name in ((of_sixteen_bits(new=False), "k_cache"), (packed, "k")):
        out, lse, *_ = _ops.attention(*arguments(**given))
        given |= {"dout": out, "out": out, "softmax_lse": lse}
        for op, flat in (
            (_ops.attention_gradients, gradients_arguments(**given)),
            (_ops.attention_backward, backward_arguments(**given)),
        ):
            with pytest.raises(NotImplementedError, match=f"^{name}: .*gradients are wanted"):
                op(*flat)


@pytest.mark.parametrize("name", ["q", "k_cache", "k", "sink"])
def test_forward_mode_is_refused(name: str) -> None:
    given = {**make_cache(new=1), "sink": torch.zeros(4, dtype=torch.float64)}
    options = {"cache_seqlens": 4, "cache_batch_idx": int32(2, 0)}

    def decode(x: Tensor) -> Tensor:
        return attend(**{**given, name: x}, **options)[0]

    def by_dual(x: Tensor) -> None:
        with forward_ad.dual_level():
            decode(forward_ad.make_dual(x, x))

    for derivative in (by_dual, lambda x: torch.func.jvp(decode, (x,), (x,))):
        with pytest.raises(NotImplementedError, match=f"^{name}: .*forward-mode"):
            derivative(given[name])


# -- the public function ---------------------------------------------------------------------------


def test_appends_and_attends() -> None:
    """The entry that no sequence has stays as it is. A sequence without a key has its sink, which
    in any dtype is what it is in fp32.
    """
    made = make_cache(new=2)
    before = {name: x.clone() for name, x in made.items()}
    index = {"cache_batch_idx": int32(2, 0), "cache_leftpad": int32(1, 0)}
    out, lse = attend(**made, cache_seqlens=int32(4, 7), causal=True, **index)
    for row, (entry, begin, used) in enumerate(((2, 1, 4), (0, 0, 7))):
        keys = []
        for name in "kv":
            expected = before[f"{name}_cache"][entry].clone()
            expected[used : used + 2] = before[name][row]
            assert torch.equal(made[f"{name}_cache"][entry], expected)
            keys.append(expected[None, begin : used + 2])
        expected_out, expected_lse, _ = flash_attn_func(
            before["q"][row : row + 1], *keys, causal=True, return_attn_probs=True
        )
        torch.testing.assert_close((out[row], lse[row]), (expected_out[0], expected_lse[0]))
    assert torch.equal(made["k_cache"][1], before["k_cache"][1])
    del made["k"], made["v"]
    for dtype in (torch.float64, torch.bfloat16):
        sink = torch.randn(4).to(dtype)
        out, lse = attend(**made, cache_seqlens=int32(6, 0), cache_batch_idx=int32(1, 2), sink=sink)
        assert out[0].any() and not out[1].any()
        torch.testing.assert_close(lse[1], sink.double()[:, None].expand(4, 3))


@pytest.mark.parametrize("lengths", [5, torch.tensor(5), None], ids=["int", "numpy-like", "all"])
def test_one_length_for_all(lengths: Any) -> None:
    made = {name: x[:2] for name, x in make_cache().items()}
    if isinstance(lengths, Tensor):
        lengths = lengths.numpy()[()]  # an integer that is no int
    used = 9 if lengths is None else 5
    keys = (made["k_cache"][:, :used], made["v_cache"][:, :used])
    expected = flash_attn_func(made["q"], *keys, return_attn_probs=True)[:2]
    torch.testing.assert_close(attend(**made, cache_seqlens=lengths), expected)


def test_packed_queries_and_new_keys() -> None:
    made = make_cache(new=3)
    by_batch = {name: x.clone() for name, x in made.items()}
    index = {"cache_batch_idx": int32(2, 0), "cache_seqlens": int32(4, 6), "causal": True}
    expected, expected_lse = attend(**by_batch, **index)
    packed = {name: made[name].flatten(0, 1) for name in ("q", "k", "v")}
    out, lse = attend(
        **{**made, **packed}, **index, cu_seqlens_q=int32(0, 3, 6), max_seqlen_q=torch.tensor(3)
    )
    torch.testing.assert_close(out, expected.flatten(0, 1))
    torch.testing.assert_close(lse, expected_lse.transpose(0, 1).flatten(1))
    assert torch.equal(made["k_cache"], by_batch["k_cache"])


def test_mapped_calls_of_e4m3() -> None:
    """One entry after the other."""
    call = packed_inputs() | {f"{x}_descale": torch.rand(2) for x in "kv"}
    q = torch.randn(3, *call.pop("q").shape, dtype=torch.float64)
    with torch.no_grad():
        out = torch.func.vmap(lambda x: flash_attn_varlen_func(x, **call))(q)
        expected = torch.stack([flash_attn_varlen_func(x, **call) for x in q])
    torch.testing.assert_close(out, expected)


# -- compilers -------------------------------------------------------------------------------------


def state_of(kind: str) -> dict[str, Any]:
    """Caches, and scales of them where they are of e4m3."""
    dtype = E4M3 if kind in ("e4m3", "quantized") else torch.float64
    state: dict[str, Any] = {f"{x}_cache": torch.zeros(3, 11, 2, 16).to(dtype) for x in "kv"}
    if kind == "quantized":
        return state | {f"{x}_descale": torch.zeros(3, 11, 2) for x in "kv"}
    return state | ({"k_descale": 0.1, "v_descale": torch.ones(2)} if kind == "e4m3" else {})


@pytest.mark.parametrize("kind", ["wide", "attn_mask", "relative_bias", "e4m3", "quantized"])
def test_compiled_decoding(kind: str) -> None:
    """A loop of steps, whose lengths are tensors: one graph, and what it leaves behind."""
    torch._dynamo.reset()
    graphs = []

    def backend(module: Any, _: Any) -> Any:
        graphs.append(module)
        return module

    def step(q: Tensor, k_cache: Tensor, used: Tensor, **given: Any) -> Tensor:
        more = {"quantize": "token"} if kind == "quantized" else {}
        out = flash_attn_with_kvcache(
            q * 2.0, k_cache, cache_seqlens=used, causal=True, **given, **more
        )
        return out + k_cache.float().sum() + (given["k_descale"].sum() if more else 0.0)

    compiled = torch.compile(step, fullgraph=True, backend=backend, dynamic=True)
    states, used = [state_of(kind), state_of(kind)], int32(0, 3, 5)
    dtype = torch.float32 if kind in ("e4m3", "quantized") else torch.float64
    of_scores: dict[str, Any] = {"attn_mask": torch.rand(3, 1, 1, 11) < 0.5}
    of_scores["relative_bias"] = torch.randn(4, 9, dtype=torch.float64)
    for _ in range(3):
        given = {"q": torch.randn(3, 1, 4, 16, dtype=dtype), "used": used}
        given |= {x: torch.randn(3, 1, 2, 16, dtype=dtype) for x in "kv"}
        given |= {kind: of_scores[kind]} if kind in of_scores else {}
        torch.testing.assert_close(compiled(**given, **states[0]), step(**given, **states[1]))
        used = used + 1
    for name, x in states[0].items():
        if isinstance(x, Tensor):
            assert torch.equal(*(y.float() for y in (x, states[1][name]))), name
    assert states[0]["k_cache"].float().any() and len(graphs) == 1


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_mutation_survives_functionalisation(backend: str) -> None:
    """Of a cache that two calls write and a third reads, and of scales."""
    torch._dynamo.reset()

    def three_steps(q: Tensor, k: Tensor, v: Tensor, **state: Any) -> Tensor:
        first = flash_attn_with_kvcache(q, k=k, v=v, cache_seqlens=4, quantize="token", **state)
        second = flash_attn_with_kvcache(
            q, k=k + 1.0, v=v, cache_seqlens=6, quantize="token", **state
        )
        return first + second + flash_attn_with_kvcache(q, cache_seqlens=8, **state)

    compiled = torch.compile(three_steps, fullgraph=True, backend=backend)
    given = {"q": torch.randn(3, 1, 4, 16)} | {x: torch.randn(3, 2, 2, 16) for x in "kv"}
    states = [state_of("quantized") for _ in range(2)]
    found, wanted = compiled(**given, **states[0]), three_steps(**given, **states[1])
    torch.testing.assert_close(found, wanted)
    for x, y in zip(states[0].values(), states[1].values(), strict=True):
        assert x.float().any() and torch.equal(x.float(), y.float())


def test_export() -> None:
    class Module(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, kv: Tensor, scale: Any) -> Tensor:
            scales = {} if scale is None else {"k_descale": scale, "v_descale": scale}
            return flash_attn_with_kvcache(q, k, v, kv, kv, cache_seqlens=3, **scales)

    for dtype, scale in ((torch.float32, None), (E4M3, torch.rand(2, 2))):
        caches = [torch.zeros(2, 9, 2, 16).to(dtype) for _ in "kv"]
        given = (torch.randn(2, 1, 4, 16), *caches, torch.randn(2, 1, 2, 16), scale)

        def copied(given: Any = given) -> list[Any]:
            return [x if x is None else x.clone() for x in given]

        program = torch.export.export(Module(), tuple(copied()))
        assert "flash_attn_cuda.attention_with_append" in str(program.graph)
        exported, eager = copied(), copied()
        torch.testing.assert_close(program.module()(*exported), Module()(*eager))
        for x, y in zip(exported[1:3], eager[1:3], strict=True):
            assert x.float().any() and torch.equal(x.float(), y.float())


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, E4M3], ids=str)
def test_fake_cuda_tensors(dtype: torch.dtype, packed: bool) -> None:
    """Of any head dim in 16 bits."""
    head_dims = (59, 20) if dtype == torch.float16 else (64, 16)
    with FakeTensorMode():
        rows = (6,) if packed else (2, 3)
        q = torch.empty(*rows, 4, head_dims[0], device="cuda").to(dtype)
        pools = [torch.empty(7, 5, 2, d, device="cuda").to(dtype) for d in head_dims]
        table = torch.empty(2, 3, device="cuda", dtype=torch.int32)
        cu = torch.empty(3, device="cuda", dtype=torch.int32) if packed else None
        scales: dict[str, Any] = {}
        if dtype == E4M3:
            scales = {"q_descale": 1.0, "k_descale": torch.empty(7, 5, 2, device="cuda")}
            scales["v_descale"] = 0.5
        out, lse = attend(q, *pools, block_table=table, cache_seqlens=4, cu_seqlens_q=cu, **scales)
        assert out.shape == (*rows, 4, head_dims[1]) and lse.dtype == torch.float32
        assert out.dtype == (torch.bfloat16 if scales else dtype)
        assert lse.shape == ((4, 6) if packed else (2, 4, 3))


# -- partial results -------------------------------------------------------------------------------


@pytest.mark.parametrize("out_dtype", [None, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_combine(out_dtype: torch.dtype | None) -> None:
    q, k, v = (torch.randn(2, n, 4, 16) for n in (5, 12, 12))
    parts = [
        flash_attn_func(q, k[:, a:b], v[:, a:b], return_attn_probs=True)[:2]
        for a, b in ((0, 4), (4, 4), (4, 12))
    ]
    out_partial = torch.stack([out for out, _ in parts])
    out_partial[1] = torch.nan
    lse_partial = torch.stack([lse.transpose(1, 2) for _, lse in parts])
    expected, expected_lse, _ = flash_attn_func(q, k, v, return_attn_probs=True)
    expected_lse = expected_lse.transpose(1, 2)
    out, lse = flash_attn_combine(out_partial, lse_partial, out_dtype=out_dtype)
    assert out.dtype == (out_dtype or torch.float32)
    torch.testing.assert_close(out, expected.to(out.dtype))
    torch.testing.assert_close(lse, expected_lse)
    target = torch.full((2, 4, 5, 16), torch.nan, dtype=out.dtype).transpose(1, 2)
    given, lse = flash_attn_combine(out_partial, lse_partial, target, out_dtype)
    assert given is target and torch.equal(target, out)
    torch.testing.assert_close(lse, expected_lse)
    with pytest.raises(NotImplementedError, match=r"^lse_partial: .*forward-mode"):
        torch.func.jvp(lambda x: flash_attn_combine(out_partial, x)[0], (lse_partial,) * 1,
                       (lse_partial,))  # fmt: skip


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("given", [False, True], ids=["new", "given"])
def test_combined_lse_has_flash_attention_3s_layout(device: str, given: bool) -> None:
    """(batch, seqlen, heads), the rows of a head side by side; of a GPU as a compiler sees it."""
    mode = FakeTensorMode() if device == "cuda" else contextlib.nullcontext()
    with mode:
        out_partial = torch.empty(3, 2, 5, 4, 16, device=device)
        target = torch.empty(2, 5, 4, 16, device=device) if given else None
        lse_partial = torch.empty(3, 2, 5, 4, device=device)
        out, lse = flash_attn_combine(out_partial, lse_partial, target)
        assert out.shape == (2, 5, 4, 16) and lse.dtype == torch.float32
        assert lse.shape == (2, 5, 4) and lse.stride() == (20, 1, 5)
