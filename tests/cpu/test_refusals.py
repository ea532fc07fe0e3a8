"""What is refused before anything runs, by the public functions, the private ones and operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from flash_attn_cuda import flash_attn_varlen_func, flash_attn_with_kvcache
from flash_attn_cuda.functions.interface import (
    _flash_attn_backward,
    _flash_attn_forward,
    _flash_attn_varlen_backward,
    _flash_attn_varlen_forward,
)
from tests.cases.operators import arguments, gradients_arguments

SCORES = (0.0, 0.3, True, -1, -1, 0.0)  # dropout_p, softmax_scale, causal, window, softcap


def int32(*values: int, device: str = "cpu") -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


# -- gradients and dropout -------------------------------------------------------------------------


def test_dropout_over_pages() -> None:
    q, pool = torch.zeros(6, 4, 8), torch.zeros(3, 5, 2, 8)
    table, cu_seqlens = int32(2, 0).view(1, 2), int32(0, 6)
    lengths = (cu_seqlens, cu_seqlens, 6, 6)
    flash_attn_varlen_func(q, pool, pool, *lengths, 0.0, block_table=table)
    message = r"^dropout_p: must be 0 with a block_table, got 0\.1"
    with pytest.raises(NotImplementedError, match=message):
        flash_attn_varlen_func(q, pool, pool, *lengths, 0.1, block_table=table)


NO_GRADIENT_OVER_PAGES = r"^block_table: must be None in a call whose gradients are wanted, got a"
SHAPES = {"q": (6, 4, 8), "k": (3, 5, 2, 8), "v": (3, 5, 2, 8), "sink": (4,)}
PAGED = {
    name: torch.randn(shape, generator=torch.Generator().manual_seed(index))
    for index, (name, shape) in enumerate(SHAPES.items())
}


def paged(x: Tensor, name: str = "q", private: bool = False) -> tuple[Tensor, Tensor]:
    """(out, softmax_lse) of 6 queries over 6 keys in pages, x standing for one tensor."""
    given: dict[str, Any] = {**PAGED, name: x}
    cu_seqlens = int32(0, 6)
    given |= {"cu_seqlens_q": cu_seqlens, "cu_seqlens_k": cu_seqlens}
    given |= {"max_seqlen_q": 6, "max_seqlen_k": 6, "block_table": int32(2, 0).view(1, 2)}
    if private:
        options = {"dropout_p": 0.0, "softmax_scale": 8**-0.5, "causal": False}
        return _flash_attn_varlen_forward(**given, **options)[:2]
    return flash_attn_varlen_func(**given, return_attn_probs=True)[:2]


@pytest.mark.parametrize("private", [False, True], ids=["public", "private"])
@pytest.mark.parametrize("name", SHAPES)
def test_gradients_through_pages_are_refused_in_the_backward(name: str, private: bool) -> None:
    x = torch.ones(SHAPES[name])
    expected = paged(x, name, private)
    assert not any(result.requires_grad for result in expected)
    leaf = x.clone().requires_grad_()
    results = paged(leaf, name, private)
    torch.testing.assert_close(results, expected, rtol=0.0, atol=0.0)
    for result in results:
        assert result.requires_grad
        for create_graph in (False, True):
            with pytest.raises(NotImplementedError, match=NO_GRADIENT_OVER_PAGES):
                torch.autograd.grad(result.sum(), leaf, create_graph=create_graph)
    with torch.no_grad():
        assert not paged(leaf, name, private)[0].requires_grad


def test_pages_may_be_written_before_their_backward_is_refused() -> None:
    """Which is then what the error is about."""
    pool = torch.ones(SHAPES["k"])
    x = torch.zeros(6, 4, 8, requires_grad=True)
    lengths = (int32(0, 6), int32(0, 6), 6, 6)
    out = flash_attn_varlen_func(x, pool, pool, *lengths, block_table=int32(2, 0).view(1, 2))
    pool.zero_()
    with pytest.raises(NotImplementedError, match=NO_GRADIENT_OVER_PAGES):
        out.sum().backward()


@pytest.mark.parametrize(
    ("name", "backend"), zip(SHAPES, ("eager", *["aot_eager"] * 3), strict=True)
)
def test_compiled_gradients_through_pages(name: str, backend: str) -> None:
    """The compiler traces a backward before anyone asks for one."""
    torch._dynamo.reset()
    leaf = torch.ones(SHAPES[name], requires_grad=True)
    compiled = torch.compile(lambda x: paged(x * 2.0, name), fullgraph=True, backend=backend)
    for index in range(2):
        result = compiled(leaf)[index]
        assert result.requires_grad
        torch.testing.assert_close(result, paged(leaf * 2.0, name)[index])
        with pytest.raises(NotImplementedError, match=NO_GRADIENT_OVER_PAGES):
            result.sum().backward()


def test_transforms_of_attention_over_pages() -> None:
    q = torch.ones(2, 6, 4, 8)
    out, _ = torch.vmap(paged)(q)
    torch.testing.assert_close(out[1], paged(q[1])[0])
    gradient = torch.func.grad(lambda x: paged(x)[0].sum())
    for transformed in (lambda: gradient(q[0]), lambda: torch.vmap(gradient)(q)):
        with pytest.raises(NotImplementedError, match=NO_GRADIENT_OVER_PAGES):
            transformed()
    for name in SHAPES:
        x = torch.ones(SHAPES[name])
        with pytest.raises(NotImplementedError, match=f"^{name}: must not carry a forward-mode"):
            torch.func.jvp(lambda x, name=name: paged(x, name)[0], (x,), (x,))


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_private_forwards_have_no_gradient_of_slopes(packed: bool) -> None:
    """Which would be dropped in silence, as nothing but q, k and v has one."""
    x = torch.zeros(2, 6, 4, 8)
    slopes = torch.ones(4, requires_grad=True)
    lengths = (int32(0, 6, 12), int32(0, 6, 12), 6, 6)

    def call() -> None:
        if packed:
            rows = x.flatten(0, 1)
            _flash_attn_varlen_forward(rows, rows, rows, *lengths, *SCORES, slopes)
        else:
            _flash_attn_forward(x, x, x, *SCORES, slopes, False)

    with pytest.raises(NotImplementedError, match=r"^alibi_slopes: must not require grad"):
        call()
    with torch.no_grad():
        call()


# -- what is no tensor, or a wrong one -------------------------------------------------------------


@pytest.mark.parametrize("name", ["q", "k_cache", "v_cache"])
def test_caches_that_are_no_tensors(name: str) -> None:
    given: dict[str, Any] = {"q": torch.zeros(2, 1, 4, 8)}
    given |= {cache: torch.zeros(2, 9, 2, 8) for cache in ("k_cache", "v_cache")}
    with pytest.raises(TypeError, match=rf"^{name}: must be a torch.Tensor, got list"):
        flash_attn_with_kvcache(**{**given, name: [1.0]})


# -- head dims that kernels cannot read ------------------------------------------------------------


def dense_forward(q: Tensor, v: Tensor) -> None:
    _flash_attn_forward(q, q, v, *SCORES, None, False)


def dense_backward(q: Tensor, v: Tensor) -> None:
    out, lse = v.new_empty(v.shape), q.new_empty((2, 4, 6), dtype=torch.float32)
    _flash_attn_backward(out, q, q, v, out, lse, None, None, None, *SCORES, None, False)


def packed(q: Tensor, v: Tensor) -> tuple[list[Tensor], tuple[Any, ...]]:
    cu_seqlens = torch.empty(3, dtype=torch.int32, device=q.device)
    return [x.flatten(0, 1) for x in (q, q, v)], (cu_seqlens, cu_seqlens, 6, 6)


def packed_forward(q: Tensor, v: Tensor) -> None:
    tensors, lengths = packed(q, v)
    _flash_attn_varlen_forward(*tensors, *lengths, *SCORES)


def packed_backward(q: Tensor, v: Tensor) -> None:
    tensors, lengths = packed(q, v)
    out = torch.empty_like(tensors[2])
    lse = q.new_empty((4, 12), dtype=torch.float32)
    targets = (None, None, None)
    _flash_attn_varlen_backward(out, *tensors, out, lse, *targets, *lengths, *SCORES, None, False)


def packed_gradients(q: Tensor, v: Tensor) -> None:
    (q, k, v), (cu_seqlens, *_) = packed(q, v)
    out, lse = torch.empty_like(v), q.new_empty((4, 12), dtype=torch.float32)
    given = {"q": q, "k": k, "v": v, "dout": out, "out": out, "softmax_lse": lse}
    given |= {"cu_seqlens_q": cu_seqlens, "cu_seqlens_k": cu_seqlens}
    given |= {"max_seqlen_q": 6, "max_seqlen_k": 6}
    torch.ops.flash_attn_cuda.attention_gradients(*gradients_arguments(**given))


def masked_forward(q: Tensor, v: Tensor) -> None:
    bias = q.new_empty((2, 1, 1, 6))
    torch.ops.flash_attn_cuda.attention(*arguments(q, q, v, bias=bias))


CALLS = (
    *(dense_forward, dense_backward, packed_forward, packed_backward, packed_gradients),
    masked_forward,
)


@pytest.mark.parametrize("call", CALLS)
def test_head_dims_of_cuda_tensors(call: Callable[[Tensor, Tensor], None]) -> None:
    """Public functions pad what is no multiple of 8; operators say so, compiling them included."""
    for head_dim, head_dim_v, message in (
        (24, 16, None),
        (20, 20, r"^q: last dimension \(head_dim\) must be a multiple of 8 on CUDA, got 20"),
        (24, 20, r"^v: last dimension \(head_dim_v\) must be a multiple of 8 on CUDA, got 20"),
    ):
        with FakeTensorMode():
            half = {"device": "cuda", "dtype": torch.bfloat16}
            q, v = (torch.empty(2, 6, 4, d, **half) for d in (head_dim, head_dim_v))
            if message is None:
                call(q, v)
                continue
            with pytest.raises(ValueError, match=message):
                call(q, v)


def test_caches_have_any_head_dim() -> None:
    with FakeTensorMode():
        half = {"device": "cuda", "dtype": torch.bfloat16}
        q, k = torch.empty(2, 3, 4, 20, **half), torch.empty(2, 9, 2, 20, **half)
        v = torch.empty(2, 9, 2, 12, **half)
        used = torch.empty(2, device="cuda", dtype=torch.int32)
        out, lse = flash_attn_with_kvcache(q, k, v, cache_seqlens=used, return_softmax_lse=True)
        assert out.shape == (2, 3, 4, 12) and lse.shape == (2, 4, 3)


def test_bad_arguments_of_a_packed_backward() -> None:
    """Found on the CPU as on fake tensors."""
    for device in ("cpu", "meta"):
        x = torch.zeros(12, 4, 8, device=device)
        cu_seqlens = int32(0, 6, 12, device=device)
        lse = torch.zeros(4, 11, device=device)
        lengths, targets = (cu_seqlens, cu_seqlens, 6, 6), (None, None, None)
        with pytest.raises(ValueError, match=r"^softmax_lse: must have shape \(4, 12\)"):
            _flash_attn_varlen_backward(
                x, x, x, x, x, lse, *targets, *lengths, *SCORES, None, False
            )


def test_the_private_functions_of_packed_sequences_need_their_lengths() -> None:
    q = torch.randn(2, 8, 2, 16)
    with pytest.raises(TypeError, match=r"cu_seqlens_q: must be a torch\.Tensor, got NoneType"):
        _flash_attn_varlen_forward(q, q, q, None, None, 8, 8, 0.0, 1.0, False)


@pytest.mark.parametrize(
    ("max_seqlen_k", "message"), [(-5, "must be at least 0, got -5"), (2**63, "must be at most")]
)
def test_bounds_of_pages_without_cu_seqlens_k(max_seqlen_k: int, message: str) -> None:
    q, pages = torch.randn(3, 2, 16), torch.randn(4, 4, 2, 16)
    cu_seqlens, used = (torch.tensor(x, dtype=torch.int32) for x in ([0, 3], [9]))
    table = torch.tensor([[0, 1, 2]], dtype=torch.int32)
    with pytest.raises(ValueError, match=f"max_seqlen_k: {message}"):
        flash_attn_varlen_func(
            *(q, pages, pages, cu_seqlens, None, 3, max_seqlen_k), block_table=table, seqused_k=used
        )
