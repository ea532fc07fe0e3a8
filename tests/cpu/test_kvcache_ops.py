"""The custom operators of a KV cache and of partial results: what they write, opcheck, compile."""

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
    flash_attn_with_kvcache,
)
from flash_attn_cuda.call import APPENDED
from tests.cases.operators import (
    append_arguments,
    arguments,
    backward_arguments,
    gradients_arguments,
)
from tests.cases.roads import Extension, extension

__all__ = ["extension"]  # pytest finds it here

_ops = torch.ops.flash_attn_cuda


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def make_cache(new: int = 0, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """q (2, 3, 4, 16), caches of 3 entries and 9 rows, and `new` keys to append."""
    made = {"q": torch.randn(2, 3, 4, 16, dtype=dtype)}
    made |= {f"{name}_cache": torch.randn(3, 9, 2, 16, dtype=dtype) for name in "kv"}
    if new:
        made |= {name: torch.randn(2, new, 2, 16, dtype=dtype) for name in "kv"}
    return made


def attend(q: Tensor, k_cache: Tensor, v_cache: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    result = flash_attn_with_kvcache(q, k_cache, v_cache, return_softmax_lse=True, **options)
    assert isinstance(result, tuple)
    return result


def test_appends_and_attends() -> None:
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


def test_sinks() -> None:
    """Also of a sequence without a key; a sink of any dtype is what it is in fp32."""
    made = {name: x[:2] for name, x in make_cache().items()}
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        sink = torch.randn(4).to(dtype)
        out, lse = attend(**made, cache_seqlens=int32(6, 0), sink=sink)
        tensors = (made["q"][:1], *(made[f"{name}_cache"][:1, :6] for name in "kv"))
        expected, expected_lse, _ = flash_attn_func(*tensors, sink=sink, return_attn_probs=True)
        torch.testing.assert_close((out[:1], lse[:1]), (expected, expected_lse))
        assert not out[1].any()
        torch.testing.assert_close(lse[1], sink.double()[:, None].expand(4, 3))


@pytest.mark.parametrize("lengths", [5, torch.tensor(5), None], ids=["int", "numpy-like", "all"])
def test_one_length_for_all(lengths: Any) -> None:
    made = make_cache()
    made = {name: x[:2] for name, x in made.items()}
    if isinstance(lengths, Tensor):
        lengths = lengths.numpy()[()]  # an integer that is no int
    out, lse = attend(**made, cache_seqlens=lengths)
    used = 9 if lengths is None else 5
    k, v = made["k_cache"][:, :used], made["v_cache"][:, :used]
    expected = flash_attn_func(made["q"], k, v, return_attn_probs=True)[:2]
    torch.testing.assert_close((out, lse), expected)


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


def operator_fields(new: bool = True, **changes: Any) -> dict[str, Any]:
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


def test_opcheck() -> None:
    opcheck(_ops.attention, arguments(**operator_fields(new=False)))
    lengths = {"seqused_k": None, "seqlen_k": 5}
    opcheck(_ops.attention, arguments(**operator_fields(new=False, **lengths)))
    opcheck(_ops.attention_with_append, append_arguments(**operator_fields()))
    partials = (torch.randn(3, 2, 5, 4, 8), torch.randn(3, 2, 5, 4))
    opcheck(_ops._flash_attn_combine, (*partials, torch.bfloat16))
    opcheck(_ops._flash_attn_combine_out, (*partials, torch.empty(2, 5, 4, 8)))
    nothing = (torch.randn(3, 2, 0, 4, 8), torch.randn(3, 2, 0, 4))
    opcheck(_ops._flash_attn_combine, (*nothing, None))


def test_operators_do_not_trade_places() -> None:
    schema = _ops.attention.default._schema
    assert not schema.is_mutable and not {x.name for x in schema.arguments} & {*APPENDED}
    with pytest.raises(ValueError, match=r"^k: must be given"):
        _ops.attention_with_append(*append_arguments(**operator_fields(new=False)))


@pytest.mark.parametrize("name", ["q", "k", "v", "sink"])
def test_the_backward_of_the_operator_refuses(name: str) -> None:
    """The public function refuses a tensor that requires grad."""
    given = operator_fields(new=False)
    leaf = given[name].requires_grad_()
    out, lse, *_ = _ops.attention(*arguments(**given))
    for result in (out, lse):
        with pytest.raises(NotImplementedError, match="gradients are wanted"):
            torch.autograd.grad(result.sum(), leaf, retain_graph=True)
    with torch.no_grad():
        assert not _ops.attention(*arguments(**given))[0].requires_grad


def test_backward_operators_refuse_a_cache() -> None:
    given = operator_fields(new=False)
    out, lse, *_ = _ops.attention(*arguments(**given))
    given |= {"dout": out, "out": out, "softmax_lse": lse}
    for op, flat in (
        (_ops.attention_gradients, gradients_arguments(**given)),
        (_ops.attention_backward, backward_arguments(**given)),
    ):
        with pytest.raises(NotImplementedError, match="gradients are wanted"):
            op(*flat)


def test_compiled_decoding() -> None:
    """A loop of steps, whose lengths are tensors: one graph, and the cache it leaves behind."""
    torch._dynamo.reset()
    graphs = []

    def backend(module: Any, _: Any) -> Any:
        graphs.append(module)
        return module

    def step(q: Tensor, kv_cache: Tensor, kv: Tensor, used: Tensor) -> Tensor:
        out = flash_attn_with_kvcache(
            q * 2.0, kv_cache[:, 0], kv_cache[:, 1], kv[:, :, 0], kv[:, :, 1],
            cache_seqlens=used, causal=True,
        )  # fmt: skip
        return out + kv_cache[:, 0].sum()

    compiled = torch.compile(step, fullgraph=True, backend=backend, dynamic=True)
    caches = [torch.zeros(3, 2, 11, 2, 8, dtype=torch.float64) for _ in range(2)]
    used = int32(0, 3, 5)
    for _ in range(4):
        q = torch.randn(3, 1, 4, 8, dtype=torch.float64)
        kv = torch.randn(3, 1, 2, 2, 8, dtype=torch.float64)
        actual = compiled(q, caches[0], kv, used)
        torch.testing.assert_close(actual, step(q, caches[1], kv, used))
        used = used + 1
    assert torch.equal(*caches) and caches[0].any() and len(graphs) == 1


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_mutation_survives_functionalisation(backend: str) -> None:
    torch._dynamo.reset()

    def two_steps(q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor) -> Tensor:
        first = flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=4)
        second = flash_attn_with_kvcache(q, k_cache, v_cache, k + 1.0, v, cache_seqlens=6)
        return first + second + flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=8)

    compiled = torch.compile(two_steps, fullgraph=True, backend=backend)
    made = {name: x[:2] for name, x in make_cache(new=2).items()}
    copies = {name: x.clone() for name, x in made.items()}
    torch.testing.assert_close(compiled(**made), two_steps(**copies))
    torch.testing.assert_close(made, copies)


def test_windows_of_symbols() -> None:
    torch._dynamo.reset()
    made = make_cache()

    def decode(left: int) -> Tensor:
        index = int32(2, 0)
        return attend(**made, cache_batch_idx=index, causal=True, window_size=(left, -1))[0]

    compiled = torch.compile(decode, fullgraph=True, backend="aot_eager")
    for left in (3, 4, 5):
        torch.testing.assert_close(compiled(left), decode(left))


@pytest.mark.parametrize("name", ["q", "k_cache", "k", "sink"])
def test_forward_mode_is_refused(name: str) -> None:
    given = {**make_cache(new=1), "sink": torch.zeros(4, dtype=torch.float64)}
    options = {"cache_seqlens": 4, "cache_batch_idx": int32(2, 0)}

    def decode(x: Tensor) -> Tensor:
        return attend(**{**given, name: x}, **options)[0]

    x = given[name]
    with (
        forward_ad.dual_level(),
        pytest.raises(NotImplementedError, match=f"^{name}: .*forward-mo"),
    ):
        decode(forward_ad.make_dual(x, x))
    with pytest.raises(NotImplementedError, match=f"^{name}: .*forward-mode"):
        torch.func.jvp(decode, (x,), (x,))


def test_forward_mode_of_partial_results_is_refused() -> None:
    out, lse = torch.ones(3, 2, 5, 4, 8), torch.ones(3, 2, 5, 4)
    with pytest.raises(NotImplementedError, match=r"^lse_partial: .*forward-mode"):
        torch.func.jvp(lambda x: flash_attn_combine(out, x)[0], (lse,), (lse,))


def test_export() -> None:
    class Module(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, kv: Tensor, used: Tensor) -> Tensor:
            return flash_attn_with_kvcache(q, k, v, kv, kv, cache_seqlens=used)

    made = {name: x[:2] for name, x in make_cache(new=1).items()}
    arguments = (made["q"], made["k_cache"], made["v_cache"], made["k"], int32(4, 6))
    program = torch.export.export(Module(), tuple(x.clone() for x in arguments))
    assert "flash_attn_cuda.attention_with_append" in str(program.graph)
    exported, eager = [[x.clone() for x in arguments] for _ in range(2)]
    torch.testing.assert_close(program.module()(*exported), Module()(*eager))
    torch.testing.assert_close(exported, eager)


@pytest.mark.parametrize("packed", [False, True])
def test_fake_cuda_tensors(packed: bool) -> None:
    with FakeTensorMode():
        rows = (6,) if packed else (2, 3)
        q = torch.empty(*rows, 4, 59, device="cuda", dtype=torch.float16)
        pool = torch.empty(7, 5, 2, 59, device="cuda", dtype=torch.float16)
        table = torch.empty(2, 3, device="cuda", dtype=torch.int32)
        cu = torch.empty(3, device="cuda", dtype=torch.int32) if packed else None
        out, lse = attend(q, pool, pool, block_table=table, cache_seqlens=4, cu_seqlens_q=cu)
        assert out.shape == q.shape and lse.dtype == torch.float32
        assert lse.shape == ((4, 6) if packed else (2, 4, 3))


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


class TestExtensionRoute:
    """Plain calls go to the extension, with a stand-in for it and its CUDA tensors."""

    def test_arguments(self, extension: Extension) -> None:
        made = make_cache(new=1, dtype=torch.bfloat16)
        options = {"window_size": (10**12, 0), "cache_batch_idx": int32(0, 2)}
        sink = torch.nn.Parameter(torch.randn(4), requires_grad=False)
        attend(**made, cache_seqlens=4, sink=sink, **options)
        (given,) = extension.calls
        assert type(given.sink) is Tensor and torch.equal(given.sink, sink)
        assert given.over_cache and given.k is made["k_cache"] and given.k_new is made["k"]
        assert given.seqlen_k == 4 and given.seqused_k is None
        assert given.cache_batch_idx is options["cache_batch_idx"]
        assert given.window_size_left == 2**31 - 1 and given.window_size_right == 0
        assert given.scale() == 0.25 and given.cu_seqlens_k_new is None

    def test_rejected_calls_get_the_same_words_as_on_the_cpu(self, extension: Extension) -> None:
        extension.error = RuntimeError("the extension's own words")
        with pytest.raises(ValueError, match=r"^num_splits: must be from 0"):
            attend(**make_cache(), cache_batch_idx=int32(0, 2), num_splits=-1)
        assert len(extension.calls) == 1
