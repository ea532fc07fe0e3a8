"""Rotary embedding against complex multiplication, token by token."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import DEVICE
from torch import Tensor

from flash_attn_cuda.rotary import apply_rotary_emb, apply_rotary_emb_func

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
        x = x * 1.0  # a leaf that wants gradients cannot be written to
        return apply_rotary_emb(x, cos, sin, interleaved, inplace, **options)

    assert torch.autograd.gradcheck(rotate, (x, cos, sin))


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
