"""Operators and compilers over caches of FP8 (e4m3), on the CPU backend."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck

from flash_attn_cuda import flash_attn_varlen_func, flash_attn_with_kvcache
from tests.cases.cpu_harness import one_thread  # noqa: F401
from tests.cases.fp8_cache import (
    E4M3,
    a_cache,
    packed_inputs,
)
from tests.cases.masked_operators import int32
from tests.cases.operators import append_arguments, arguments, gradients_arguments

pytestmark = pytest.mark.usefixtures("one_thread")

_ops = torch.ops.flash_attn_cuda

# -- operators -------------------------------------------------------------------------------------


def fields(new: int = 0, form: str = "batch", **changes: Any) -> dict[str, Any]:
    """Of an operator's call."""
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


def test_opcheck() -> None:
    expanded = {"k_descale": torch.ones(1).expand(2), "v_descale": torch.ones(2, 1).expand(2, 2)}
    quantized = append_arguments(**fields(1, "token", quantizes_tokens=True))
    # torch's own comparison of tensors before and after has no e4m3: what is written is below.
    tests = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    for op, flat in (
        (_ops.attention, arguments(**fields())),
        (_ops.attention, arguments(**fields(form="token"))),
        (_ops.attention_with_append, append_arguments(**fields(1))),
        (_ops.attention_with_append, append_arguments(**fields(1, **expanded))),
        (_ops.attention_with_quantized_append, quantized),
    ):
        opcheck(op, flat, test_utils=tests)


def test_what_operators_say_that_they_write() -> None:
    def written(op: Any) -> list[str]:
        arguments = op.default._schema.arguments
        return [x.name for x in arguments if x.alias_info is not None and x.alias_info.is_write]

    assert written(_ops.attention) == []
    assert written(_ops.attention_with_append) == ["k", "v"]
    scales = ["k_descale", "v_descale"]
    assert written(_ops.attention_with_quantized_append) == ["k", "v", *scales]
    quantized, plain = fields(1, "token", quantizes_tokens=True), fields(1, "token")
    with pytest.raises(ValueError, match=r"^quantizes_tokens: must be False"):
        _ops.attention_with_append(*append_arguments(**quantized))
    with pytest.raises(ValueError, match=r"^quantizes_tokens: must be True"):
        _ops.attention_with_quantized_append(*append_arguments(**plain))


@pytest.mark.parametrize("name", ["q", "k_descale", "q_descale"])
def test_operators_refuse_gradients(name: str) -> None:
    made = fields()
    made[name].requires_grad_()
    out = _ops.attention(*arguments(**made))[0]
    with pytest.raises(NotImplementedError, match=r"^k_cache: must not be of torch.float8_e4m3fn"):
        out.sum().backward()
    with torch.no_grad():
        assert not _ops.attention(*arguments(**made))[0].requires_grad


def test_backward_operators_refuse_it() -> None:
    call = packed_inputs(torch.float32)
    call |= {f"{x}_descale": torch.ones(2) for x in "kv"}
    out, lse, *_ = _ops.attention(*arguments(**call))
    flat = gradients_arguments(**call, dout=out, out=out, softmax_lse=lse)
    with pytest.raises(NotImplementedError, match=r"^k: must not be of torch.float8_e4m3fn"):
        _ops.attention_gradients(*flat)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("quantize", [None, "token"])
def test_compiled_decoding(backend: str, quantize: str | None) -> None:
    """A loop of steps, whose lengths are tensors: caches and scales that it leaves behind."""
    torch._dynamo.reset()

    def step(
        q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, used: Tensor,
        k_descale: Any, v_descale: Any,
    ) -> Tensor:  # fmt: skip
        out = flash_attn_with_kvcache(
            q * 2.0, k_cache, v_cache, k, v, cache_seqlens=used, causal=True,
            k_descale=k_descale, v_descale=v_descale, quantize=quantize,
        )  # fmt: skip
        if quantize is not None:
            out = out + k_descale[:, :3].sum()
        return out

    compiled = torch.compile(step, fullgraph=True, backend=backend)

    def made() -> dict[str, Any]:
        state = {f"{x}_cache": torch.zeros(3, 11, 2, 16).to(E4M3) for x in "kv"}
        scales = {f"{x}_descale": torch.zeros(3, 11, 2) for x in "kv"}
        return state | (scales if quantize else {"k_descale": 0.1, "v_descale": torch.ones(2)})

    states, used = [made(), made()], int32(0, 3, 5)
    for _ in range(3):
        given = {"q": torch.randn(3, 1, 4, 16), "used": used}
        given |= {x: torch.randn(3, 1, 2, 16) for x in "kv"}
        actual = compiled(**given, **states[0])
        torch.testing.assert_close(actual, step(**given, **states[1]))
        used = used + 1
    for name, x in states[0].items():
        if isinstance(x, Tensor):
            assert torch.equal(*(y.view(torch.uint8) for y in (x, states[1][name]))), name
    assert states[0]["k_cache"].view(torch.uint8).any()


def test_export() -> None:
    class Module(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, kv: Tensor, scale: Tensor) -> Tensor:
            return flash_attn_with_kvcache(
                q, k, v, kv, kv, cache_seqlens=3, k_descale=scale, v_descale=scale
            )

    caches = [torch.zeros(2, 9, 2, 16).to(E4M3) for _ in "kv"]
    given = (torch.randn(2, 1, 4, 16), *caches, torch.randn(2, 1, 2, 16), torch.rand(2, 2))
    program = torch.export.export(Module(), tuple(x.clone() for x in given))
    assert "flash_attn_cuda.attention_with_append" in str(program.graph)
    exported, eager = [[x.clone() for x in given] for _ in range(2)]
    torch.testing.assert_close(program.module()(*exported), Module()(*eager))
    for x, y in zip(exported, eager, strict=True):
        assert torch.equal(x.view(torch.uint8), y.view(torch.uint8))


@pytest.mark.parametrize("packed", [False, True])
def test_fake_cuda_tensors(packed: bool) -> None:
    with FakeTensorMode():
        rows = (6,) if packed else (2, 3)
        q = torch.empty(*rows, 4, 64, device="cuda").to(E4M3)
        pool = torch.empty(7, 5, 2, 64, device="cuda").to(E4M3)
        table = torch.empty(2, 3, device="cuda", dtype=torch.int32)
        cu = torch.empty(3, device="cuda", dtype=torch.int32) if packed else None
        scale = torch.empty(7, 5, 2, device="cuda")
        out, lse = flash_attn_with_kvcache(
            q, pool, pool, block_table=table, cache_seqlens=4, cu_seqlens_q=cu,
            q_descale=1.0, k_descale=scale, v_descale=0.5, return_softmax_lse=True,
        )  # fmt: skip
        assert out.shape == q.shape and out.dtype == torch.bfloat16
        assert lse.shape == ((4, 6) if packed else (2, 4, 3)) and lse.dtype == torch.float32


def test_mapped_calls() -> None:
    """One entry after the other."""
    call = packed_inputs()
    call |= {f"{x}_descale": torch.rand(2) for x in "kv"}
    q = torch.randn(3, *call.pop("q").shape, dtype=torch.float64)
    with torch.no_grad():
        out = torch.func.vmap(lambda x: flash_attn_varlen_func(x, **call))(q)
        expected = torch.stack([flash_attn_varlen_func(x, **call) for x in q])
    torch.testing.assert_close(out, expected)
