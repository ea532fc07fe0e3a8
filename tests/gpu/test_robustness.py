"""Repeatability, the operators beside the eager path, memory that is not ours to write."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from flash_attn_cuda.installed import build_info
from tests.cases.attention import AttentionCase, AttentionInputs, Layout
from tests.cases.harness import (
    assert_same_bits,
    bits,
    make_case,
    run_forward,
    run_forward_backward,
    skip_without_row,
)
from tests.cases.matrix import inputs_of
from tests.cases.operators import arguments, backward_arguments
from tests.reference import AttentionResult

pytestmark = pytest.mark.gpu

OPS = torch.ops.flash_attn_cuda


def described(case: AttentionCase, inputs: AttentionInputs) -> dict[str, Any]:
    """The fields of a call without features."""
    tensors = {"q": inputs.q, "k": inputs.k, "v": inputs.v}
    return {**tensors, "softmax_scale": case.softmax_scale, "causal": case.causal}


def operator_forward(case: AttentionCase, inputs: AttentionInputs) -> tuple[Tensor, Tensor]:
    fields = described(case, inputs) | {"keeps_rounding": True}
    out, lse, *_ = OPS.attention(*arguments(**fields))
    return out, lse


# -- repeatability -------------------------------------------------------------------------------


def test_a_head_does_not_depend_on_its_company() -> None:
    """The same head alone and among others: the same bits, whatever the grid's order."""
    case = make_case(batch=3, seqlen_q=200, seqlen_k=330, num_heads_q=6, num_heads_k=6, causal=True)
    inputs = inputs_of(case, backward=False)
    together = run_forward(case, inputs)
    at = (slice(1, 2), slice(None), slice(4, 5))
    one = replace(inputs, q=inputs.q[at], k=inputs.k[at], v=inputs.v[at])
    alone = run_forward(replace(case, batch=1, num_heads_q=1, num_heads_k=1), one)
    assert torch.equal(bits(alone.out), bits(together.out[at]))
    assert torch.equal(bits(alone.lse), bits(together.lse[1:2, 4:5]))


@pytest.mark.parametrize("head_dim", [64, 96])
def test_with_and_without_autograd_give_the_same_bits(head_dim: int) -> None:
    case = make_case(seqlen_q=150, seqlen_k=170, num_heads_k=2, head_dim=head_dim, causal=True)
    inputs = inputs_of(case)
    with_autograd = run_forward_backward(case, inputs)
    assert_same_bits(run_forward(case, inputs), with_autograd)


# -- the two ways in: the extension's own autograd, and the operators ----------------------------


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("head_dim", [64, 128, 200])
def test_eager_path_and_operators_give_the_same_bits(head_dim: int, causal: bool) -> None:
    case = make_case(
        seqlen_q=150,
        seqlen_k=170,
        num_heads_k=2,
        head_dim=head_dim,
        causal=causal,
        softmax_scale=0.2,
    )
    inputs = inputs_of(case)
    leaves = [x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    out, lse = operator_forward(case, replace(inputs, q=leaves[0], k=leaves[1], v=leaves[2]))
    gradients = torch.autograd.grad([out, lse], leaves, [inputs.dout, inputs.dlse])
    assert_same_bits(AttentionResult(out, lse, *gradients), run_forward_backward(case, inputs))


def operator_backward(
    case: AttentionCase,
    inputs: AttentionInputs,
    forward: AttentionResult,
    targets: tuple[Tensor, ...],
) -> Tensor:
    return OPS.attention_backward(
        *backward_arguments(
            **described(case, inputs),
            dout=inputs.dout,
            dlse=inputs.dlse,
            out=forward.out,
            softmax_lse=forward.lse,
            **dict(zip(("dq", "dk", "dv"), targets, strict=True)),
        )
    )


class Guarded:
    """NaN to be written over, inside a larger tensor that holds a known pattern."""

    PATTERN = 77.0

    def __init__(self, like: Tensor, layout: Layout) -> None:
        batch, seqlen, heads, head_dim = like.shape
        shapes: dict[Layout, tuple[tuple[int, ...], Callable[[Tensor], Tensor]]] = {
            Layout.surrounded: (
                (batch + 2, seqlen + 2, heads + 2, head_dim + 16),
                lambda x: x[1:-1, 1:-1, 1:-1, 8:-8],
            ),
            Layout.packed: ((batch, seqlen, 3, heads, head_dim), lambda x: x[:, :, 1]),
            Layout.heads_first: (
                (batch, heads, seqlen + 1, head_dim),
                lambda x: x[:, :, :-1].transpose(1, 2),
            ),
            Layout.odd_stride: ((batch, seqlen, heads, head_dim + 1), lambda x: x[..., :head_dim]),
            Layout.strided_head_dim: ((batch, seqlen, heads, 2 * head_dim), lambda x: x[..., ::2]),
            Layout.misaligned: (
                (like.numel() + 16,),
                lambda x: x[1 : 1 + like.numel()].view(like.shape),
            ),
        }
        shape, view = shapes[layout]
        self.buffer = torch.full(shape, self.PATTERN, dtype=like.dtype, device=like.device)
        self.inside = view(self.buffer).fill_(torch.nan)
        self.mask = torch.zeros(shape, dtype=torch.bool, device=like.device)
        view(self.mask).fill_(True)

    def check(self, name: str) -> None:
        changed = int((self.buffer != self.PATTERN)[~self.mask].sum())
        assert changed == 0, f"{name}: {changed} elements outside the tensor were written"
        unwritten = int(self.inside.isnan().sum())
        assert unwritten == 0, f"{name}: {unwritten} elements were not written"


GUARDED_LAYOUTS = pytest.mark.parametrize(
    "layout",
    [
        *(Layout.surrounded, Layout.packed, Layout.heads_first, Layout.odd_stride),
        *(Layout.misaligned, Layout.strided_head_dim),
    ],
    ids=lambda layout: layout.value,
)


@GUARDED_LAYOUTS
@pytest.mark.parametrize(
    "head_dims",
    [*((d, d) for d in (8, 64, 104, 256, 512)), (192, 128), (128, 64)],
    ids=str,
)
def test_gradients_into_given_tensors(head_dims: tuple[int, int], layout: Layout) -> None:
    """dq, dk, dv are written in full and nothing around them, rows without keys included."""
    case = make_case(
        seqlen_q=211,
        seqlen_k=150,
        num_heads_k=2,
        head_dim=head_dims[0],
        head_dim_v=head_dims[1],
        causal=True,
        layout=layout,
    )
    inputs = inputs_of(case)
    expected = run_forward_backward(case, inputs, keep_rounding=False)
    guards = [Guarded(x, layout) for x in (inputs.q, inputs.k, inputs.v)]
    operator_backward(case, inputs, expected, tuple(guard.inside for guard in guards))
    for name, guard in zip(("dq", "dk", "dv"), guards, strict=True):
        guard.check(name)
    gradients = (guard.inside for guard in guards)
    assert_same_bits(AttentionResult(expected.out, expected.lse, *gradients), expected)


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 2), ()])
def test_only_the_given_gradients_are_written(wanted: tuple[int, ...]) -> None:
    case = make_case(seqlen_q=70, seqlen_k=90, num_heads_k=2)
    inputs = inputs_of(case)
    expected = run_forward_backward(case, inputs, keep_rounding=False)
    targets = [
        torch.full_like(x, torch.nan) if index in wanted else None
        for index, x in enumerate((inputs.q, inputs.k, inputs.v))
    ]
    operator_backward(case, inputs, expected, tuple(targets))
    names = ("dq", "dk", "dv")
    given = {name: x for name, x in zip(names, targets, strict=True) if x is not None}
    assert_same_bits(AttentionResult(expected.out, expected.lse, **given), expected)


def test_softmax_d_is_the_row_term_of_the_backward() -> None:
    case = make_case(seqlen_q=70, seqlen_k=90)
    inputs = inputs_of(case)
    forward = run_forward(case, inputs)
    softmax_d = operator_backward(case, inputs, forward, (None, None, None))
    assert softmax_d.shape == (case.batch, case.num_heads_q, 128)
    rows = (inputs.dout.double() * forward.out.double()).sum(-1).transpose(1, 2) - inputs.dlse
    torch.testing.assert_close(softmax_d[..., :70].double(), rows, rtol=1e-5, atol=1e-4)
    assert not softmax_d[..., 70:].any()


@pytest.mark.cuda_only
@GUARDED_LAYOUTS
@pytest.mark.parametrize("head_dim", [8, 64, 104, 256, 512])
def test_output_into_a_given_tensor(head_dim: int, layout: Layout) -> None:
    """_C.fwd writes all of `out` and nothing around it, directly or through a copy."""
    case = make_case(seqlen_q=211, seqlen_k=150, num_heads_k=2, head_dim=head_dim, causal=True)
    inputs = inputs_of(case, backward=False)
    expected = run_forward(case, inputs)
    guard = Guarded(inputs.q, layout)
    out, lse, *_ = build_info.extension.fwd(
        *(inputs.q, inputs.k, inputs.v, guard.inside, None, 0.0, case.head_dim**-0.5, True),
        *(-1, -1, 0.0, False, None),
    )
    guard.check("out")
    assert out.data_ptr() == guard.inside.data_ptr()
    assert_same_bits(AttentionResult(guard.inside, lse), expected)


def _opcheck_arguments(case: AttentionCase) -> tuple[tuple[object, ...], tuple[object, ...]]:
    inputs = case.make_inputs()
    forward = run_forward(case, inputs)
    given = described(case, inputs)
    leaves = {name: given[name].detach().requires_grad_() for name in "qkv"}
    incoming = {
        "dout": inputs.dout,
        "dlse": inputs.dlse,
        "out": forward.out,
        "softmax_lse": forward.lse,
        **{f"d{name}": torch.empty_like(given[name]) for name in "qkv"},
    }
    return arguments(**{**given, **leaves}), backward_arguments(**given, **incoming)


@pytest.mark.parametrize(
    "layout", [Layout.contiguous, Layout.heads_first], ids=lambda layout: layout.value
)
def test_opcheck(layout: Layout) -> None:
    case = make_case(seqlen_q=40, seqlen_k=50, num_heads_k=2, causal=True, layout=layout)
    skip_without_row(case)
    forward, backward = _opcheck_arguments(case)
    # dq is summed by atomic adds: opcheck compares two runs, and 16-bit gradients may differ by one
    # rounding.
    torch.library.opcheck(OPS.attention.default, forward, atol=1e-2, rtol=1e-2)
    torch.library.opcheck(OPS.attention_backward.default, backward, atol=1e-2, rtol=1e-2)
