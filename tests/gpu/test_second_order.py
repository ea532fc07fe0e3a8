"""Derivatives in a direction and second derivatives by the kernels against fp64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import jvp
from torch.utils.flop_counter import FlopCounterMode

from flash_attn_cuda import BlockSparsity, flash_attn_func
from tests.cases import second_order
from tests.cases.attention import Layout
from tests.cases.harness import DEVICE
from tests.cases.masked import RandomMask, masked_dense, masked_varlen
from tests.cases.pairwise import pairwise
from tests.cases.second_order import (
    DENSE,
    LEAVES,
    PACKED,
    DerivativeCase,
    Transform,
    case_of_row,
    check_derivatives,
)

pytestmark = pytest.mark.gpu

HEAD_DIMS = [
    *((64, 64), (128, 128), (256, 256), (512, 512), (96, 96), (72, 40), (40, 200), (20, 20)),
    *((192, 192), (320, 512)),
]
AXES: dict[str, Any] = {
    "head_dims": HEAD_DIMS,
    "dtype": [torch.bfloat16, torch.float16],
}
LENGTHS = [(1, 1), (33, 64), (64, 33), (257, 300), (3, 190), (190, 3), (140, 150)]
DENSE_ROWS = pairwise({**DENSE, **AXES, "lengths": LENGTHS})
PACKED_ROWS = pairwise({**PACKED, **AXES}, 1)
BASE: dict[str, Any] = {"device": DEVICE, "num_heads_q": 4, "num_heads_k": 2}


def case_on_gpu(row: dict[str, Any]) -> DerivativeCase:
    fields = {name: x for name, x in row.items() if name != "dtype"}
    return case_of_row(fields, row["dtype"], device=DEVICE)


@pytest.mark.parametrize("row", [*DENSE_ROWS, *PACKED_ROWS], ids=str)
def test_jvp(row: dict[str, Any]) -> None:
    check_derivatives(case_on_gpu(row), second_order.jvp)


@pytest.mark.parametrize("row", [*DENSE_ROWS, *PACKED_ROWS], ids=str)
def test_double_backward(row: dict[str, Any]) -> None:
    check_derivatives(case_on_gpu(row), second_order.double_backward)


@pytest.mark.parametrize(
    "transform", [second_order.forward_over_reverse, second_order.reverse_over_forward]
)
@pytest.mark.parametrize("row", [*DENSE_ROWS[::5], *PACKED_ROWS[::5]], ids=str)
def test_mixed_modes(row: dict[str, Any], transform: Transform) -> None:
    check_derivatives(case_on_gpu(row), transform)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("head_dim", [32, 64, 88, 96, 128, 160, 192, 256])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (100, 30)}], ids=str)
def test_calls_of_hopper_rows(options: dict[str, Any], head_dim: int, dtype: torch.dtype) -> None:
    """Many tiles of nothing but a window, dense and packed."""
    fields = {**BASE, "head_dim": head_dim, "dtype": dtype, **options}
    dense = masked_dense(seqlen_q=419, seqlen_k=530, **fields)
    packed = masked_varlen(lengths_q=(300, 0, 64, 129), lengths_k=(260, 40, 64, 500), **fields)
    for case in (dense, packed):
        check_derivatives(DerivativeCase(case), second_order.jvp)


TRANSFORMS = [second_order.jvp, *second_order.SECOND_ORDER]


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("head_dim", [64, 59])
@pytest.mark.parametrize(
    "layout", [x for x in Layout if x is not Layout.expanded_batch], ids=lambda x: x.value
)
def test_memory_layouts(layout: Layout, head_dim: int, transform: Transform) -> None:
    """Second derivatives hang on what was given, also where kernels read a copy of it."""
    fields = {**BASE, "seqlen_q": 70, "seqlen_k": 90, "head_dim": head_dim, "layout": layout}
    for more in ({}, {"softcap": 3.0}):  # two roads into the extension
        case = masked_dense(**fields, **more, dtype=torch.float16)
        check_derivatives(DerivativeCase(case, (*LEAVES, "dout")), transform)


def test_copies_of_what_kernels_cannot_read() -> None:
    """A negative view and a bias whose columns lie apart, beside an expanded q and a sink of 16
    bits: second derivatives are those of contiguous tensors.
    """
    (q, k, v), weight = leaves_and_weight(64)
    q = q[:, :1].detach()
    bias = torch.randn(2, 4, 300, 300, device=DEVICE, dtype=q.dtype)
    sink = torch.randn(4, device=DEVICE, dtype=q.dtype)

    def seconds(as_given: Any) -> tuple[Tensor, ...]:
        leaves = [x.detach().requires_grad_() for x in (q, k, v, bias, sink)]
        views = [leaves[0].expand(-1, 300, -1, -1), leaves[1], torch._neg_view(leaves[2])]
        views += [leaves[3].transpose(2, 3), leaves[4]]
        given = [as_given(x) for x in views]
        out = flash_attn_func(*given[:3], attn_mask=given[3], sink=given[4])
        first = torch.autograd.grad(out, leaves, weight, create_graph=True)
        return torch.autograd.grad(first, leaves, [x.detach() for x in leaves])

    plain = seconds(lambda x: x.contiguous().resolve_neg())
    for x, y in zip(seconds(lambda x: x), plain, strict=True):
        torch.testing.assert_close(x, y, rtol=2e-2, atol=2e-2 * y.abs().max().item())


def leaves_and_weight(head_dim: int) -> tuple[list[Tensor], Tensor]:
    shape = (2, 300, 4, head_dim)
    made = [torch.randn(shape, device=DEVICE, dtype=torch.bfloat16) for _ in range(4)]
    return [x.requires_grad_() for x in made[:3]], made[3]


def test_what_the_first_backward_leaves_out() -> None:
    """Gradients of q alone are differentiated by a sink and by a bias."""
    (q, k, v), weight = leaves_and_weight(64)
    sink = torch.randn(4, device=DEVICE, requires_grad=True)
    bias = torch.randn(2, 4, 300, 300, device=DEVICE, dtype=q.dtype, requires_grad=True)
    out = flash_attn_func(q, k, v, attn_mask=bias, sink=sink)
    everything = torch.autograd.grad(out, (q, sink, bias), weight, create_graph=True)
    expected = torch.autograd.grad(everything[0], (sink, bias), weight)
    out = flash_attn_func(q, k, v, attn_mask=bias, sink=sink)
    (alone,) = torch.autograd.grad(out, q, weight, create_graph=True)
    for x, y in zip(torch.autograd.grad(alone, (sink, bias), weight), expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-2, atol=1e-2)


def test_what_a_second_backward_leaves_to_operators() -> None:
    """Several directions at once, and a third derivative, which is refused by name."""
    leaves, weight = leaves_and_weight(64)
    out = flash_attn_func(*leaves, causal=True)
    first = torch.autograd.grad(out, leaves, weight, create_graph=True)
    directions = [torch.randn(2, *x.shape, device=DEVICE, dtype=x.dtype) for x in leaves]
    options = {"retain_graph": True, "is_grads_batched": True}
    batched = torch.autograd.grad(first, leaves, directions, **options)
    for i, along in enumerate(zip(*directions, strict=True)):
        alone = torch.autograd.grad(first, leaves, along, retain_graph=True)
        for x, y in zip(batched, alone, strict=True):
            torch.testing.assert_close(x[i], y, rtol=2e-2, atol=2e-2 * y.abs().max().item())
    second = torch.autograd.grad(first, leaves, [weight] * 3, create_graph=True)
    with pytest.raises(NotImplementedError, match="does not implement third derivatives"):
        torch.autograd.grad(second, leaves, [weight] * 3)


def test_eager_calls_are_counted() -> None:
    """A backward too whose forward was not."""
    leaves, weight = leaves_and_weight(64)
    product = 2 * 2 * 4 * 300 * 300 * 64
    with FlopCounterMode(display=False) as of_forward:
        flash_attn_func(*leaves)
    out = flash_attn_func(*leaves)
    with FlopCounterMode(display=False) as of_backward:
        torch.autograd.grad(out, leaves, weight)
    assert of_forward.get_total_flops() == 2 * product
    assert of_backward.get_total_flops() == 5 * product


def test_a_compiled_jvp_is_one_graph() -> None:
    points = tuple(x.detach() for x in leaves_and_weight(64)[0])
    moved = tuple(x.detach() for x in leaves_and_weight(64)[0])

    def along(x: tuple[Tensor, ...], t: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        return jvp(lambda *x: flash_attn_func(*x, causal=True), x, t)

    compiled = torch.compile(along, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(points, moved), along(points, moved))


@pytest.mark.parametrize("is_masked", [False, True], ids=["causal", "masked"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_repeats_bit_for_bit(head_dim: int, is_masked: bool) -> None:
    """The jvp always, the double backward of a deterministic call, by a shared bias too."""
    leaves, weight = leaves_and_weight(head_dim)
    options: dict[str, Any] = {"causal": True}
    if is_masked:
        visible = torch.rand(4, 300, 300, device=DEVICE) < 0.3
        bias = torch.randn(4, 1, 300, device=DEVICE, requires_grad=True)
        options |= {"block_mask": BlockSparsity.from_mask(visible), "attn_mask": bias}
    points = [*leaves, options["attn_mask"]] if is_masked else leaves

    def run() -> list[Tensor]:
        with forward_ad.dual_level():
            duals = [forward_ad.make_dual(x, weight) for x in leaves]
            tangent = forward_ad.unpack_dual(flash_attn_func(*duals, **options)).tangent
        out = flash_attn_func(*leaves, **options, deterministic=True)
        first = torch.autograd.grad(out, leaves, weight, create_graph=True)
        return [tangent, *first, *torch.autograd.grad(first, points, [weight] * 3)]

    expected = run()
    for _ in range(20):
        assert all(torch.equal(x, y) for x, y in zip(run(), expected, strict=True))


def test_nothing_is_read_beyond_any_length() -> None:
    """Rows that are no sequence's hold NaN, those of tangents too."""
    case = masked_varlen(
        lengths_q=(130, 20, 64),
        lengths_k=(150, 64, 64),
        used_q=(100, 0, 64),
        used_k=(129, 20, 9),
        **BASE,
        head_dim=128,
        dtype=torch.bfloat16,
        causal=True,
    )
    for transform in (second_order.jvp, second_order.double_backward):
        check_derivatives(DerivativeCase(case), transform)


@pytest.mark.parametrize("size", [1, 64])
def test_sparse_masks(size: int) -> None:
    """Blocks that no list names are not read."""
    mask = RandomMask(0.3, size, "hq", "sparsity")
    case = masked_dense(
        seqlen_q=500, seqlen_k=700, **BASE, head_dim=64, dtype=torch.bfloat16, mask=mask
    )
    for transform in (second_order.jvp, second_order.double_backward):
        check_derivatives(DerivativeCase(case), transform)


def test_memory_is_linear_in_the_length() -> None:
    """A jvp holds its results and little more; scores of these would be 8 GiB."""
    q, k, v = (torch.randn(1, 16384, 16, 64, device=DEVICE, dtype=torch.bfloat16) for _ in range(3))
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with forward_ad.dual_level(), torch.no_grad():
        duals = [forward_ad.make_dual(x, x) for x in (q, k, v)]
        out = flash_attn_func(*duals)
        assert forward_ad.unpack_dual(out).tangent is not None
    assert torch.cuda.max_memory_allocated() - before < 4 * q.nbytes


def test_mixed_tangents_leave_the_others_out() -> None:
    """Without the tangent of v the products with it are left out, and its memory is not read."""
    of = masked_dense(seqlen_q=70, seqlen_k=90, **BASE, head_dim=128, dtype=torch.bfloat16)
    for moved in [(x,) for x in LEAVES[:3]] + [("q", "v"), ("k", "v")]:
        check_derivatives(replace(DerivativeCase(of), moved=moved), second_order.jvp)
        check_derivatives(replace(DerivativeCase(of), moved=moved), second_order.double_backward)
