"""Rotary embedding against complex multiplication, token by token."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from flash_attn_cuda.functions import rotary
from flash_attn_cuda.functions.rotary import apply_rotary_emb, apply_rotary_emb_func
from flash_attn_cuda.installed import build_info
from flash_attn_cuda.integrations.rotary_layers import (
    ApplyRotaryEmb,
    ApplyRotaryEmbKV_,
    ApplyRotaryEmbQKV_,
    RotaryEmbedding,
    apply_rotary,
    apply_rotary_emb_kv_,
    apply_rotary_emb_qkv_,
    apply_rotary_emb_torch,
    rotate_half,
)
from tests.cases.harness import DEVICE

DEVICES = ["cpu", pytest.param(DEVICE, marks=pytest.mark.gpu)]
HEAD_DIM = 12


def tables(rotary_dim: int, device: str = "cpu", positions: int = 20) -> tuple[Tensor, Tensor]:
    angle = torch.randn(positions, rotary_dim // 2, dtype=torch.float64, device=device)
    return angle.cos(), angle.sin()


def turn(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """x (heads, head_dim) at one position, in fp64."""
    half = cos.shape[0]
    pairs = [(2 * d, 2 * d + 1) if interleaved else (d, d + half) for d in range(half)]
    out = x.double().clone()
    for d, (first, second) in enumerate(pairs):
        number = torch.complex(x[:, first].double(), x[:, second].double())
        turned = number * torch.complex(cos[d].double(), sin[d].double())
        out[:, first], out[:, second] = turned.real, turned.imag
    return out


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rotary_dim", [HEAD_DIM, 4, 0])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("offsets", [0, 3, [0, 2, 14]])
def test_dense(
    device: str, dtype: torch.dtype, rotary_dim: int, interleaved: bool, offsets: Any
) -> None:
    x = torch.randn(3, 6, 2, HEAD_DIM, device=device).to(dtype)
    cos, sin = (table.to(dtype) for table in tables(rotary_dim, device))
    starts = offsets if isinstance(offsets, list) else [offsets] * 3
    argument = torch.tensor(offsets, device=device) if isinstance(offsets, list) else offsets
    actual = apply_rotary_emb(x, cos, sin, interleaved, seqlen_offsets=argument)
    assert actual.dtype == dtype
    for b in range(3):
        for s in range(6):
            at = starts[b] + s
            expected = turn(x[b, s], cos[at], sin[at], interleaved)
            assert_rounded(actual[b, s], expected)
    in_place = x.clone()
    out = apply_rotary_emb(in_place, cos, sin, interleaved, True, argument)
    assert out is in_place and torch.equal(out, actual)


def assert_rounded(actual: Tensor, expected: Tensor) -> None:
    """fp32 arithmetic and one rounding to the dtype."""
    eps = max(torch.finfo(actual.dtype).eps, 0.0)
    bound = eps * expected.abs() + (1e-14 if actual.dtype == torch.float64 else 1e-6)
    assert ((actual.double() - expected).abs() <= bound).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("with_offsets", [False, True])
@pytest.mark.parametrize("inplace", [False, True])
def test_packed(device: str, with_offsets: bool, inplace: bool) -> None:
    x = torch.randn(12, 2, HEAD_DIM, device=device)
    cos, sin = (table.float() for table in tables(8, device))
    cu_seqlens = torch.tensor([1, 4, 4, 9, 10], dtype=torch.int32, device=device)
    offsets = torch.tensor([5, 0, 2, 7], dtype=torch.int32, device=device) if with_offsets else 0
    given = x.clone()
    actual = apply_rotary_emb(
        given, cos, sin, inplace=inplace, seqlen_offsets=offsets, cu_seqlens=cu_seqlens
    )
    expected = x.double()
    starts = cu_seqlens.tolist()
    for b in range(4):
        first = int(offsets[b]) if isinstance(offsets, Tensor) else 0
        for t in range(starts[b], starts[b + 1]):
            at = first + t - starts[b]
            expected[t] = turn(x[t], cos[at], sin[at], False)
    assert_rounded(actual, expected)
    assert torch.equal(actual[[0, 10, 11]], x[[0, 10, 11]])  # outside every sequence
    assert (actual is given) == inplace


def test_no_sequences_and_no_tokens() -> None:
    cos, sin = tables(4)
    x = torch.randn(3, 1, 4)
    none = torch.zeros(1, dtype=torch.int32)
    assert torch.equal(apply_rotary_emb(x, cos, sin, cu_seqlens=none), x)
    assert apply_rotary_emb(x[:0], cos, sin, cu_seqlens=none).shape == (0, 1, 4)
    assert apply_rotary_emb(x[None, :0], cos, sin).shape == (1, 0, 1, 4)
    assert apply_rotary_emb(x[None, :0], cos[:0], sin[:0]).shape == (1, 0, 1, 4)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_gradients(interleaved: bool, inplace: bool, packed: bool) -> None:
    shape = (5, 2, 6) if packed else (2, 3, 2, 6)
    options: dict[str, Any] = {"seqlen_offsets": torch.tensor([1, 4])}
    if packed:
        options["cu_seqlens"] = torch.tensor([0, 2, 5], dtype=torch.int32)
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    cos, sin = (table.requires_grad_(not inplace) for table in tables(4))

    def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x * 1.0  # which may be written
        return apply_rotary_emb(x, cos, sin, interleaved, inplace, **options)

    assert torch.autograd.gradcheck(rotate, (x, cos, sin))


# The autograd of the kernel, with torch's operators in its place


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Has calls on the CPU go the way of the kernel; whether each was by the negative angles."""
    calls = []

    def has_kernel(x: Tensor, cos: Tensor, sin: Tensor, *_: Any) -> bool:
        return not (torch.is_grad_enabled() and cos.requires_grad)

    def run(x: Tensor, cos: Tensor, sin: Tensor, *others: Any) -> Tensor:
        *others, conjugate = others
        calls.append(conjugate)
        with torch.no_grad():
            return rotary._rotate_by_operators(x, cos, -sin if conjugate else sin, *others)

    monkeypatch.setattr(rotary, "_has_kernel", has_kernel)
    monkeypatch.setattr(rotary, "_rotate_by_kernel", run)
    return calls


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("conjugate", [False, True])
def test_gradients_of_the_kernel(
    stand_in: list[bool], inplace: bool, packed: bool, conjugate: bool
) -> None:
    x = torch.randn((5, 2, 6) if packed else (2, 5, 2, 6), dtype=torch.float64, requires_grad=True)
    cu_seqlens = torch.tensor([0, 2, 5], dtype=torch.int32) if packed else None
    offsets = torch.tensor([1, 4])
    cos, sin = tables(4)

    def turned(x: Tensor) -> Tensor:
        given = (offsets, cu_seqlens, None, False, inplace, conjugate)
        return apply_rotary(x * 1.0, cos, sin, *given)

    assert torch.autograd.gradcheck(turned, x, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(turned, x)
    stand_in.clear()
    turned(x).sum().backward()
    assert stand_in == [conjugate, not conjugate]
    stand_in.clear()
    with torch.no_grad():
        turned(x)
    assert stand_in == [conjugate]


def test_what_the_kernel_writes(stand_in: list[bool]) -> None:
    cos, sin = tables(4)
    leaf = torch.randn(2, 5, 3, 2, 6, dtype=torch.float64, requires_grad=True)
    qkv = leaf * 1.0
    squares = qkv.square()
    out = apply_rotary_emb_qkv_(qkv, cos, sin)
    (gradient,) = torch.autograd.grad(out, leaf, torch.ones_like(out))
    back = apply_rotary(torch.ones_like(out[:, :, 0]), cos, sin, conjugate=True)
    assert torch.equal(gradient[:, :, :2], torch.stack([back, back], 2))
    assert torch.equal(gradient[:, :, 2], torch.ones_like(back))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        squares.sum().backward()


# A leaf that requires a gradient is written in place, as FlashAttention-2 does it


IN_PLACE = {
    "x": (apply_rotary_emb, (2, 5, 2, 8), {"inplace": True}),
    "packed": (
        apply_rotary_emb,
        (10, 2, 8),
        {"inplace": True, "cu_seqlens": torch.tensor([0, 5, 10], dtype=torch.int32)},
    ),
    "qkv": (apply_rotary_emb_qkv_, (2, 5, 3, 2, 8), {}),
    "grouped": (apply_rotary_emb_qkv_, (2, 5, 4, 8), {"num_heads_q": 2}),
    "kv": (apply_rotary_emb_kv_, (2, 5, 2, 2, 8), {}),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("offsets", [2, [1, 4]])
@pytest.mark.parametrize("form", IN_PLACE)
def test_a_leaf(device: str, compiled: bool, offsets: Any, form: str) -> None:
    rotate, shape, options = IN_PLACE[form]
    moved = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in options.items()}
    starts = torch.tensor(offsets, device=device) if isinstance(offsets, list) else offsets

    def turn(x: Tensor) -> Tensor:
        return rotate(x, cos, sin, seqlen_offsets=starts, **moved)

    cos, sin = (table.float() for table in tables(4, device))
    leaf = torch.randn(shape, device=device, requires_grad=True)
    other, weights = leaf.detach().clone().requires_grad_(), torch.randn(shape, device=device)
    expected = turn(other * 1.0)
    (gradient,) = torch.autograd.grad((expected * weights).sum(), other)
    torch._dynamo.reset()  # whose limit of variants counts all of these
    run = torch.compile(turn, fullgraph=True, backend="aot_eager") if compiled else turn
    out = run(leaf)
    assert leaf.is_leaf and torch.equal(leaf, out)
    (out * weights).sum().backward()
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(leaf.grad, gradient)
    if not compiled:
        assert out.data_ptr() == leaf.data_ptr()


def test_views_of_a_leaf(stand_in: list[bool]) -> None:
    """Of which each is written after the other, and what was kept before is found out."""
    cos, sin = tables(4)
    leaf = torch.randn(2, 5, 3, 2, 6, dtype=torch.float64, requires_grad=True)
    before, squares = leaf.detach().clone(), leaf.square()
    q, k = (apply_rotary_emb(leaf[:, :, index], cos, sin, inplace=True) for index in (0, 1))
    assert torch.equal(leaf.detach(), apply_rotary_emb_qkv_(before, cos, sin))
    (gradient,) = torch.autograd.grad(q.sum() + 2 * k.sum(), leaf)
    back = apply_rotary(torch.ones_like(before[:, :, 0]), cos, sin, conjugate=True)
    assert torch.equal(gradient, torch.stack([back, 2 * back, 0 * back], 2))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        squares.sum().backward()
    view = before[:, :, 0].requires_grad_()  # a leaf itself
    apply_rotary_emb(view, cos, sin, inplace=True).sum().backward()
    assert torch.equal(view.grad, back)


def test_the_kernel_makes_no_gradients_of_tables(stand_in: list[bool]) -> None:
    cos, sin = tables(4)
    apply_rotary_emb(torch.ones(1, 2, 1, 6), cos.requires_grad_(), sin).sum().backward()
    assert cos.grad is not None and cos.grad.any() and not stand_in


@pytest.mark.skipif(build_info.extension is None, reason="flash_attn_cuda._C is not built here")
def test_the_extension_takes_cuda_tensors() -> None:
    assert build_info.extension is not None
    x, (cos, sin) = torch.zeros(1, 2, 1, 8), tables(8)
    with pytest.raises(ValueError, match="x: must be a CUDA tensor, got one on cpu"):
        build_info.extension.rotary(x, cos, sin, 0, None, None, False, False, False)


@pytest.mark.parametrize("device", DEVICES)
def test_compiles_without_a_break(device: str) -> None:
    x = torch.randn(2, 5, 2, 8, device=device)
    cos, sin = (table.float() for table in tables(8, device))
    offsets = torch.tensor([3, 1], device=device)
    compiled = torch.compile(apply_rotary_emb, fullgraph=True, backend="aot_eager")
    actual = compiled(x, cos, sin, seqlen_offsets=offsets)
    torch.testing.assert_close(actual, apply_rotary_emb(x, cos, sin, seqlen_offsets=offsets))


@pytest.mark.gpu
@pytest.mark.cuda_only
def test_nothing_waits_and_unknown_positions_stay(device: str) -> None:
    x = torch.randn(2, 5, 2, 8, device=device)
    cos, sin = (table.float() for table in tables(8, device))
    offsets = torch.tensor([17, 0], device=device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        actual = apply_rotary_emb(x, cos, sin, seqlen_offsets=offsets)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(actual[0, 3:], x[0, 3:])
    assert not torch.equal(actual[0, :3], x[0, :3])


def test_the_other_name() -> None:
    assert apply_rotary_emb_func is apply_rotary_emb


X, (COS, SIN) = torch.zeros(2, 5, 1, 8), tables(8)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"x": X[0]}, ValueError, r"x: must have shape \(batch, seqlen, heads, head_dim\), got"),
        ({"x": X.long()}, TypeError, "x: must have a floating-point dtype, got torch.int64"),
        ({"x": [1.0]}, TypeError, "x: must be a torch.Tensor, got list"),
        ({"cos": COS[0]}, ValueError, r"cos: must have shape .* got \(4,\)"),
        ({"cos": torch.zeros(20, 5)}, ValueError, r"cos: .* at most head_dim \(8\), got \(20, 5\)"),
        ({"sin": SIN[:3]}, ValueError, r"sin: must have the shape of cos, \(20, 4\), got \(3, 4\)"),
        ({"sin": SIN.to("meta")}, ValueError, r"sin: must be on the device of x \(cpu\), got meta"),
        ({"seqlen_offsets": 16}, ValueError, r"cos: must have a row for each of 21 .* got 20"),
        ({"seqlen_offsets": -1}, ValueError, "seqlen_offsets: must not be negative, got -1"),
        ({"seqlen_offsets": 0.5}, TypeError, "seqlen_offsets: must be an int or a tensor"),
        ({"seqlen_offsets": torch.tensor([0])}, ValueError, r"seqlen_offsets: .* got \(1,\)"),
        ({"seqlen_offsets": torch.tensor([0.0, 1.0])}, TypeError, "seqlen_offsets: dtype must be"),
        ({"seqlen_offsets": torch.tensor([0, 16])}, ValueError, "cos: must have a row for each of"),
        ({"seqlen_offsets": torch.tensor([0, -1])}, ValueError, "seqlen_offsets: .* got -1"),
        ({"cu_seqlens": torch.tensor([0, 2])}, ValueError, "x: .* with cu_seqlens, got"),
        ({"x": X[0], "cu_seqlens": torch.zeros(1, 2).int()}, ValueError, "cu_seqlens: must have"),
        ({"x": X[0], "cu_seqlens": [0, 2]}, TypeError, "cu_seqlens: must be a torch.Tensor"),
    ],
)
def test_bad_calls(arguments: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        apply_rotary_emb(**({"x": X, "cos": COS, "sin": SIN} | arguments))


# What else flash_attn has of it


@pytest.mark.parametrize("interleaved", [False, True])
def test_bare_rotation_and_its_conjugate(interleaved: bool) -> None:
    x = torch.randn(2, 6, 2, HEAD_DIM, dtype=torch.float64)
    tensors = (x, *tables(4))
    expected = apply_rotary_emb(*tensors, interleaved, seqlen_offsets=3)
    turned = apply_rotary(*tensors, 3, interleaved=interleaved)
    assert torch.equal(turned, expected)
    assert torch.equal(ApplyRotaryEmb.apply(*tensors, interleaved, False, 3), expected)
    back = apply_rotary(turned, *tensors[1:], 3, None, None, interleaved, True, True)
    assert back is turned
    torch.testing.assert_close(back, x)


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotation_in_operations_of_torch(interleaved: bool) -> None:
    x = torch.randn(2, 5, 3, HEAD_DIM, dtype=torch.float64)
    cos, sin = tables(4, positions=5)
    expected = apply_rotary_emb(x, cos, sin, interleaved)
    found = apply_rotary_emb_torch(x, cos, sin, interleaved)
    torch.testing.assert_close(found, expected)
    each = [table.expand(2, *table.shape) for table in (cos, sin)]
    assert torch.equal(apply_rotary_emb_torch(x, *each, interleaved), found)
    half = rotate_half(torch.arange(6.0), interleaved)
    assert half.tolist() == ([-1, 0, -3, 2, -5, 4] if interleaved else [-3, -4, -5, 0, 1, 2])
    assert ApplyRotaryEmbQKV_.apply is apply_rotary_emb_qkv_
    assert ApplyRotaryEmbKV_.apply is apply_rotary_emb_kv_
    with pytest.raises(ValueError, match=r"cos, sin: must have one shape, .* got \(5, 2\) and \(4"):
        apply_rotary_emb_torch(x, cos, sin[:4])


@pytest.mark.parametrize("has_tables_of_keys", [False, True])
@pytest.mark.parametrize("heads_k", [2, 1])
def test_packed_projections(has_tables_of_keys: bool, heads_k: int) -> None:
    q, k, v = (torch.randn(2, 6, heads, HEAD_DIM) for heads in (2, heads_k, heads_k))
    of_q = [table.float() for table in tables(4)]
    of_k = [table.float() for table in tables(4)] if has_tables_of_keys else of_q
    expected = (apply_rotary_emb(q, *of_q), apply_rotary_emb(k, *of_k), v)
    given = of_k if has_tables_of_keys else [None, None]
    qkv = torch.cat([q, k, v], 2)
    out = apply_rotary_emb_qkv_(qkv, *of_q, *given, num_heads_q=2)
    assert out is qkv and torch.equal(out, torch.cat(expected, 2))
    kv = torch.stack([k, v], 2)
    out = apply_rotary_emb_kv_(kv, *of_k)
    assert out is kv and torch.equal(out, torch.stack(expected[1:], 2))
    if heads_k == 2:
        qkv = torch.stack([q, k, v], 2).requires_grad_()
        out = apply_rotary_emb_qkv_(qkv * 1.0, *of_q, *given)
        assert torch.equal(out, torch.stack(expected, 2))
        (gradient,) = torch.autograd.grad(out[:, :, 1].sum(), qkv)
        conjugate = apply_rotary(torch.ones_like(k), *of_k, conjugate=True)
        torch.testing.assert_close(gradient[:, :, 1], conjugate)


def test_wrong_projections() -> None:
    cos, sin = tables(4)
    for shape, heads, message in (
        ((1, 2, 2, 1, 8), None, r"qkv: must have shape \(batch, seqlen, 3, heads, head_dim\)"),
        ((1, 2, 4, 8), None, "num_heads_q: must be given"),
        ((1, 2, 4, 8), 1, r"qkv: .* with num_heads_q 1, got \(1, 2, 4, 8\)"),
        ((1, 2, 4, 8), 6, r"qkv: .* with num_heads_q 6, got \(1, 2, 4, 8\)"),
        ((1, 2, 8), 2, r"qkv: .* with num_heads_q 2, got \(1, 2, 8\)"),
    ):
        with pytest.raises(ValueError, match=message):
            apply_rotary_emb_qkv_(torch.zeros(shape), cos, sin, num_heads_q=heads)
    with pytest.raises(ValueError, match=r"kv: must have shape .* got \(1, 2, 3, 1, 8\)"):
        apply_rotary_emb_kv_(torch.zeros(1, 2, 3, 1, 8), cos, sin)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("scale_base", [None, 16])
def test_module(interleaved: bool, scale_base: int | None) -> None:
    dim, seqlen, base = 8, 6, 100.0
    embedding = RotaryEmbedding(dim, base, interleaved, scale_base)
    assert not embedding.state_dict()
    q, k, v = (torch.randn(2, seqlen, 2, HEAD_DIM) for _ in range(3))

    def expected(x: Tensor, offsets: list[int], sign: int, length: int) -> Tensor:
        places = torch.arange(0, dim, 2, dtype=torch.float64)
        rows = []
        for b, offset in enumerate(offsets):
            for s in range(seqlen):
                angle = (offset + s) * base ** (-places / dim)
                growth = torch.ones(dim // 2, dtype=torch.float64)
                if scale_base is not None:
                    power = sign * (offset + s - length // 2) / scale_base
                    growth = ((places + 0.4 * dim) / (1.4 * dim)) ** power
                rows.append(turn(x[b, s], angle.cos() * growth, angle.sin() * growth, interleaved))
        return torch.stack(rows).view(2, seqlen, 2, HEAD_DIM).float()

    qkv = torch.stack([q, k, v], 2)
    out = embedding(qkv)
    assert out is qkv and torch.equal(out[:, :, 2], v)
    torch.testing.assert_close(out[:, :, 0], expected(q, [0, 0], 1, seqlen))
    torch.testing.assert_close(out[:, :, 1], expected(k, [0, 0], -1, seqlen))

    offsets = torch.tensor([3, 0])
    turned_q, kv = embedding(q.clone(), torch.stack([k, v], 2), offsets, max_seqlen=20)
    torch.testing.assert_close(turned_q, expected(q, [3, 0], 1, 20))
    torch.testing.assert_close(kv[:, :, 0], expected(k, [3, 0], -1, 20))
    assert torch.equal(kv[:, :, 1], v)
    grouped = embedding(torch.cat([q, k[:, :, :1], v[:, :, :1]], 2), seqlen_offset=2, num_heads_q=2)
    torch.testing.assert_close(grouped[:, :, 2:3], expected(k, [2, 2], -1, 20)[:, :, :1])
    with pytest.raises(ValueError, match="max_seqlen: must be given with a tensor seqlen_offset"):
        embedding(qkv, seqlen_offset=offsets)


def test_tables_of_a_module() -> None:
    embedding = RotaryEmbedding(8, scale_base=512).bfloat16()
    embedding._update_cos_sin_cache(10, device=torch.device("cpu"), dtype=torch.float32)
    tables = embedding._cos_cached
    exact = RotaryEmbedding(8, scale_base=512)
    with torch.inference_mode():
        exact._update_cos_sin_cache(10, torch.device("cpu"), torch.float32)
    assert tables is not None and torch.equal(tables, exact._cos_cached)
    embedding._update_cos_sin_cache(7, torch.device("cpu"), torch.float32)
    assert embedding._cos_cached is tables
    embedding._update_cos_sin_cache(7, torch.device("cpu"), torch.float16)
    assert embedding._cos_cached.dtype == torch.float16 and len(embedding._cos_cached) == 7
    with pytest.raises(ValueError, match="dim: must be even and not negative, got 7"):
        RotaryEmbedding(7)


def of_buffers(f: Callable[[Tensor], Tensor], embedding: RotaryEmbedding, x: Tensor) -> None:
    """As torch.func.functional_call gives them, inside a transform."""

    def turn(x: Tensor, buffers: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(embedding, buffers, (x * 1.0,)).sum()

    torch.func.grad(turn)(x, dict(embedding.named_buffers()))


def in_inference_mode(f: Callable[[Tensor], Tensor], embedding: RotaryEmbedding, x: Tensor) -> None:
    with torch.inference_mode():
        f(x)


def fake(f: Callable[[Tensor], Tensor], embedding: RotaryEmbedding, x: Tensor) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert isinstance(f(mode.from_tensor(x)), FakeTensor)


def compiled_gradient(f: Callable[[Tensor], Tensor], embedding: RotaryEmbedding, x: Tensor) -> None:
    torch._dynamo.reset()
    torch.compile(lambda x: torch.func.grad(f)(x), fullgraph=True, backend="aot_eager")(x)


FIRST_CALLS = {
    "grad": lambda f, _, x: torch.func.grad(f)(x),
    "jvp": lambda f, _, x: torch.func.jvp(f, (x,), (x,)),
    "jvp of grad": lambda f, _, x: torch.func.jvp(torch.func.grad(f), (x,), (x,)),
    "buffers": of_buffers,
    "inference": in_inference_mode,
    "fake": fake,
    "compiled grad": compiled_gradient,
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("first", FIRST_CALLS)
def test_tables_outlive_their_call(first: str, device: str) -> None:
    """Whatever a module is made or called in, what it keeps are plain tensors, which copies,
    pickles and later calls find, those with gradients in eval mode too.
    """
    x = torch.randn(1, 6, 3, 2, 8, device=device)
    expected = RotaryEmbedding(8, scale_base=16, device=device)(x.clone())
    made = [RotaryEmbedding(8, scale_base=16, device=device)]

    def turn(x: Tensor) -> Tensor:
        if first in ("grad", "jvp", "inference"):
            made.append(RotaryEmbedding(8, scale_base=16, device=device))
        return sum(embedding(x * 1.0).square().sum() for embedding in made)

    FIRST_CALLS[first](turn, made[0], x)
    for embedding in made:
        for tensor in (x for x in vars(embedding).values() if isinstance(x, Tensor)):
            assert type(tensor) is Tensor and tensor.untyped_storage() and not tensor.is_inference()
        embedding.eval()
        for each in (embedding, copy.deepcopy(embedding), pickle.loads(pickle.dumps(embedding))):
            leaf = x.clone().requires_grad_()
            out = each(leaf * 1.0)
            assert torch.equal(out, expected)
            assert torch.autograd.grad(out, leaf, out)[0].any()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_tables_of_a_compiled_inference(backend: str) -> None:
    """Serve inference until a compiled or an eager call records gradients."""
    x = torch.randn(1, 6, 3, 2, 8)
    for record in (True, False):
        torch._dynamo.reset()
        embedding = RotaryEmbedding(8).eval()
        compiled = torch.compile(embedding, fullgraph=True, backend=backend)
        with torch.inference_mode():
            expected = compiled(x.clone())
            tables = embedding._cos_cached
            assert torch.equal(compiled(x.clone()), expected) and embedding._cos_cached is tables
        for _ in range(2):
            leaf = x.clone().requires_grad_()
            out = (compiled if record else embedding)(leaf * 1.0)
            out.sum().backward()
            assert torch.equal(out, expected) and leaf.grad is not None
