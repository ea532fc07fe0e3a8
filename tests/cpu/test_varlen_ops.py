"""The custom operators of packed sequences: opcheck, compile, export, autograd, torch.func.

Results are compared with flash_attn_func on every sequence by itself.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck

from flash_attn_cuda import (
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)
from flash_attn_cuda.interface import _flash_attn_varlen_backward, _flash_attn_varlen_forward
from tests.cases.operators import arguments, backward_arguments, gradients_arguments
from tests.cases.roads import Extension, extension

__all__ = ["extension"]  # pytest finds it here

_ops = torch.ops.flash_attn_cuda
SCALE = 0.3
STARTS_Q, STARTS_K = (0, 3, 3, 10), (0, 4, 5, 11)


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def make_inputs(requires_grad: bool = False, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """q (10, 4, 16), k and v (11, 2, 16), for three sequences."""
    shapes = ((10, 4, 16), (11, 2, 16), (11, 2, 16))
    return [torch.randn(shape, dtype=dtype, requires_grad=requires_grad) for shape in shapes]


def packed(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    lengths = (int32(*STARTS_Q), int32(*STARTS_K), 7, None)
    out, lse, _ = flash_attn_varlen_func(
        q, k, v, *lengths, softmax_scale=SCALE, return_attn_probs=True, **options
    )
    return out, lse


def one_by_one(
    q: Tensor, k: Tensor, v: Tensor, slopes: Tensor | None = None, **options: Any
) -> tuple[Tensor, Tensor]:
    """(out, lse) from a dense call for every sequence."""
    outs, lses = [], []
    bounds = zip(itertools.pairwise(STARTS_Q), itertools.pairwise(STARTS_K), strict=True)
    for index, ((q0, q1), (k0, k1)) in enumerate(bounds):
        out, lse, _ = flash_attn_func(
            *(q[None, q0:q1], k[None, k0:k1], v[None, k0:k1]),
            softmax_scale=SCALE,
            alibi_slopes=None if slopes is None else slopes[index],
            return_attn_probs=True,
            **options,
        )
        outs.append(out[0])
        lses.append(lse[0])
    return torch.cat(outs), torch.cat(lses, 1)


def loss(outputs: tuple[Tensor, Tensor]) -> Tensor:
    out, lse = outputs
    return out.sin().sum() + 2.0 * lse.nan_to_num(neginf=0.0).sin().sum()


FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window_size": (None, 1)},
    "softcap": {"softcap": 2.0, "deterministic": True},
}


@pytest.mark.parametrize("feature", FEATURES)
def test_outputs_and_gradients(feature: str) -> None:
    leaves = make_inputs(requires_grad=True)
    options = FEATURES[feature]
    actual, expected = packed(*leaves, **options), one_by_one(*leaves, **options)
    torch.testing.assert_close(actual, expected)
    grads = (torch.autograd.grad(loss(x), leaves) for x in (actual, expected))
    torch.testing.assert_close(*grads)


def test_slopes_of_every_sequence() -> None:
    inputs, slopes = make_inputs(), torch.rand(3, 4)
    actual = packed(*inputs, alibi_slopes=slopes)
    torch.testing.assert_close(actual, one_by_one(*inputs, slopes=slopes))


def test_packed_tensors() -> None:
    q, k, v = (x.requires_grad_() for x in make_inputs())
    cu_q, cu_k = int32(*STARTS_Q), int32(*STARTS_K)
    kv = torch.stack((k, v), 1)
    out = flash_attn_varlen_kvpacked_func(q, kv, cu_q, cu_k, None, None, causal=True)
    torch.testing.assert_close(out, flash_attn_varlen_func(q, k, v, cu_q, cu_k, 7, 6, causal=True))
    qkv = torch.stack((q, q * 2.0, q * 3.0), 1)
    out = flash_attn_varlen_qkvpacked_func(qkv, cu_q, torch.tensor(7))
    expected = flash_attn_varlen_func(q, q * 2.0, q * 3.0, cu_q, cu_q, 7, 7)
    torch.testing.assert_close(out, expected)


def test_dropout_agrees_with_what_it_says_it_drops() -> None:
    q, k, v = make_inputs(requires_grad=True)
    lengths = (int32(*STARTS_Q), int32(*STARTS_K), 7, 6)
    out, _, s_dmask = flash_attn_varlen_func(q, k, v, *lengths, 0.5, return_attn_probs=True)
    assert s_dmask.shape == (3, 4, 7, 6) and not s_dmask.requires_grad
    probs = s_dmask[2, :, :7, :6]
    torch.testing.assert_close(probs.abs().sum(-1), torch.ones(4, 7, dtype=torch.float64))
    kept = probs.masked_fill(probs.signbit(), 0.0) * 2.0
    values = v[5:11].repeat_interleave(2, 1)
    torch.testing.assert_close(out[3:], torch.einsum("hmn,nhd->mhd", kept, values))
    # The backward uses the same mask: out is linear in v.
    (dv,) = torch.autograd.grad(out.sum(), v)
    torch.testing.assert_close((dv * v).sum(), out.sum())


def test_used_lengths_and_padding() -> None:
    """Rows that take no part get zeros, forward and backward."""
    q, k, v = make_inputs(requires_grad=True)
    used = {"seqused_q": int32(2, 0, 5), "seqused_k": int32(3, 1, 6), "leftpad_k": int32(1, 0, 2)}
    out, lse = packed(q, k, v, causal=True, **used)
    grads = torch.autograd.grad(loss((out, lse)), (q, k, v))
    rows_q, rows_k = [*range(2), *range(3, 8)], [1, 2, 4, *range(7, 11)]
    cu = (int32(0, 2, 2, 7), int32(0, 2, 3, 7))
    leaves = [x[rows] for x, rows in ((q, rows_q), (k, rows_k), (v, rows_k))]
    few, few_lse, _ = flash_attn_varlen_func(
        *leaves, *cu, None, None, softmax_scale=SCALE, causal=True, return_attn_probs=True
    )
    expected = torch.zeros_like(out).index_copy(0, torch.tensor(rows_q), few)
    torch.testing.assert_close(out, expected)
    others = [row for row in range(10) if row not in rows_q]
    assert (lse[:, others] == -torch.inf).all()
    expected_grads = torch.autograd.grad(loss((few, few_lse)), (q, k, v))
    torch.testing.assert_close(grads, expected_grads)


def forward_fields(requires_grad: bool = False, **changes: Any) -> dict[str, Any]:
    options: dict[str, Any] = {
        "cu_seqlens_q": int32(*STARTS_Q), "cu_seqlens_k": int32(*STARTS_K), "max_seqlen_q": 7,
        "max_seqlen_k": 6, "softmax_scale": SCALE, "causal": True, "window_size_left": 3,
        "softcap": 1.5, "alibi_slopes": torch.rand(3, 4), "leftpad_k": int32(1, 0, 1),
        "seqused_k": int32(3, 1, 6), "seqused_q": int32(2, 0, 7), "deterministic": True,
    }  # fmt: skip
    return {**dict(zip("qkv", make_inputs(requires_grad), strict=True)), **options, **changes}


@pytest.mark.parametrize("requires_grad", [False, True])
def test_opcheck_forward(requires_grad: bool) -> None:
    opcheck(_ops.attention, arguments(**forward_fields(requires_grad)))


def test_opcheck_forward_with_dropout() -> None:
    given = forward_fields(dropout_p=0.4, return_softmax=True)
    opcheck(_ops.attention, arguments(**given))


@pytest.mark.parametrize("requires_grad", [False, True])
def test_opcheck_forward_with_a_sink(requires_grad: bool) -> None:
    sink = torch.rand(4, dtype=torch.float64, requires_grad=requires_grad)
    opcheck(_ops.attention, arguments(**forward_fields(requires_grad, sink=sink)))


@pytest.mark.parametrize("requires_grad", [False, True])
def test_opcheck_forward_over_pages(requires_grad: bool) -> None:
    """All but a backward, which there is none of (test_refusals.py)."""
    pool = torch.randn(4, 3, 2, 16, dtype=torch.float64, requires_grad=requires_grad)
    given = forward_fields(k=pool, v=pool, block_table=int32(2, 0, 3, 1, 1, 2).view(3, 2))
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    more = () if requires_grad else ("test_aot_dispatch_dynamic",)
    opcheck(_ops.attention, arguments(**given), test_utils=(*checks, *more))


def backward_fields() -> dict[str, Any]:
    given = forward_fields(dropout_p=0.3, deterministic=False)
    out, lse, _, rng_state, _ = _ops.attention(*arguments(**given))
    incoming = {"dout": torch.randn_like(out), "dlse": torch.randn_like(lse)}
    return {**given, **incoming, "out": out, "softmax_lse": lse, "rng_state": rng_state}


def test_opcheck_backward() -> None:
    given = backward_fields()
    targets = {f"d{name}": torch.empty_like(given[name]) for name in "qk"}
    opcheck(_ops.attention_backward, backward_arguments(**given, **targets))


@pytest.mark.parametrize("missing", ["nothing", "dout", "dlse"])
def test_opcheck_gradients(missing: str) -> None:
    given = {name: x for name, x in backward_fields().items() if name != missing}
    opcheck(_ops.attention_gradients, gradients_arguments(**given))


def test_private_functions_are_forward_and_backward_of_one_call() -> None:
    q, k, v = make_inputs(requires_grad=True)
    lengths = (int32(*STARTS_Q), int32(*STARTS_K), None, torch.tensor(6))
    out, lse, s_dmask, rng_state = _flash_attn_varlen_forward(q, k, v, *lengths, 0.4, SCALE, True)
    assert s_dmask.shape == (0,) and rng_state.shape == (2,)
    assert [x.requires_grad for x in (out, lse, s_dmask, rng_state)] == [True, True, False, False]
    dout = torch.randn_like(out)
    expected = torch.autograd.grad(out, (q, k, v), dout)
    grads = [torch.full_like(x, torch.nan) for x in (q, k, v)]
    softmax_d = _flash_attn_varlen_backward(
        *(dout, q, k, v, out, lse, *grads, *lengths, 0.4, SCALE, True, -1, -1, 0.0, None, False),
        rng_state=rng_state,
    )
    torch.testing.assert_close(tuple(grads), expected)
    visible = lse > -torch.inf
    torch.testing.assert_close(softmax_d[visible], (dout * out).sum(-1).T[visible])


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
def test_compile_with_dynamic_shapes(dropout_p: float) -> None:
    torch._dynamo.reset()
    graphs = []

    def backend(module: Any, _: Any) -> Any:
        graphs.append(module)
        return module

    def model(qkv: Tensor, cu: Tensor, longest: Any) -> tuple[Tensor, Tensor]:
        out, lse, _ = flash_attn_varlen_qkvpacked_func(
            qkv * 2.0, cu, longest, dropout_p, window_size=(4, -1), return_attn_probs=True
        )
        return out, lse

    compiled = torch.compile(model, fullgraph=True, backend=backend, dynamic=True)
    for batch, length in ((3, 7), (5, 9), (6, 11)):
        qkv = torch.randn(batch * length, 3, 2, 8, dtype=torch.float64, requires_grad=True)
        cu = torch.arange(batch + 1, dtype=torch.int32) * length
        results = []
        for function in (model, compiled):
            torch.manual_seed(1)
            outputs = function(qkv, cu, length)
            results.append((*outputs, *torch.autograd.grad(loss(outputs), qkv)))
        torch.testing.assert_close(*results)
        torch.testing.assert_close(compiled(qkv, cu, cu.diff().max())[1], results[0][1])
    assert len(graphs) == 2  # max_seqlen as an integer and as a tensor


def test_compile_after_unpadding() -> None:
    """total is a number that only the data tells."""
    torch._dynamo.reset()

    def model(x: Tensor, mask: Tensor) -> Tensor:
        cu = torch.nn.functional.pad(mask.sum(1).cumsum(0), (1, 0)).int()
        qkv = x[mask]
        return flash_attn_varlen_qkvpacked_func(qkv, cu, None, causal=True)

    x = torch.randn(2, 6, 3, 2, 8, dtype=torch.float64)
    mask = torch.tensor([[1, 1, 0, 1, 0, 0], [1, 1, 1, 1, 1, 0]]).bool()
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=True)
        torch.testing.assert_close(compiled(x, mask), model(x, mask))


def test_export_keeps_the_operator() -> None:
    class Module(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, cu: Tensor) -> Tensor:
            return flash_attn_varlen_func(q, k, v, cu, cu, None, None, causal=True)

    tokens, entries = torch.export.Dim("tokens", min=2), torch.export.Dim("entries", min=2)
    inputs = tuple(torch.randn(10, 2, 8) for _ in range(3))
    shapes = ({0: tokens}, {0: tokens}, {0: tokens}, {0: entries})
    program = torch.export.export(
        Module(), (*inputs, int32(0, 4, 10)), dynamic_shapes=shapes, strict=False
    )
    assert "flash_attn_cuda.attention" in str(program.graph)
    more = (*(torch.cat((x, x)) for x in inputs), int32(0, 1, 2, 20))
    torch.testing.assert_close(program.module()(*more), Module()(*more))


def test_fake_and_meta_tensors() -> None:
    with FakeTensorMode():
        q = torch.empty(7, 4, 20, device="cuda", dtype=torch.bfloat16)
        cu = torch.empty(4, device="cuda", dtype=torch.int32)
        out, lse, s_dmask = flash_attn_varlen_func(
            q, q, q, cu, cu, 5, None, 0.1, return_attn_probs=True
        )
        assert out.shape == q.shape and lse.shape == (4, 7) and s_dmask.shape == (3, 4, 5, 7)
    q = torch.empty(7, 4, 16, device="meta", requires_grad=True)
    cu = torch.empty(4, device="meta", dtype=torch.int32)
    flash_attn_varlen_func(q, q, q, cu, cu, 5, 5).sum().backward()
    assert q.grad.shape == q.shape


def test_windows_of_symbols() -> None:
    torch._dynamo.reset()
    inputs = make_inputs()

    def attend(left: int) -> Tensor:
        return packed(*inputs, window_size=(left, 0))[0]

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    for left in (3, 4, 5):
        torch.testing.assert_close(compiled(left), attend(left))


def test_vmap_with_dropout() -> None:
    stacked = [torch.stack([x, x]) for x in make_inputs()]

    def attend(*x: Tensor) -> Tensor:
        return packed(*x, dropout_p=0.5)[0]

    with pytest.raises(RuntimeError, match=r"^dropout_p: .*got randomness='error'"):
        torch.vmap(attend)(*stacked)
    with pytest.raises(NotImplementedError, match=r"^dropout_p: .*randomness='same'"):
        torch.vmap(attend, randomness="same")(*stacked)
    torch.manual_seed(0)
    out = torch.vmap(attend, randomness="different")(*stacked)
    torch.manual_seed(0)
    torch.testing.assert_close(out, torch.stack([attend(*x) for x in zip(*stacked, strict=True)]))
    assert not torch.equal(out[0], out[1])
    with pytest.raises(RuntimeError, match=r"dropout_p: .*got randomness='error'"):
        torch.compile(lambda *x: torch.vmap(attend)(*x), backend="aot_eager")(*stacked)


def test_vmap_over_nothing_is_refused() -> None:
    q, k, v = (torch.stack([x])[:0] for x in make_inputs())
    with pytest.raises(NotImplementedError, match=r"^torch.vmap: must map over at least one"):
        torch.vmap(lambda *x: packed(*x)[0])(q, k, v)


@pytest.mark.parametrize(
    "options", [{}, {"sink": torch.zeros(4).double()}, {"num_splits": 2}], ids=str
)
def test_forward_mode(options: dict[str, Any]) -> None:
    """Also where keys are said to be split, which is no matter without pages."""
    inputs, tangents = tuple(make_inputs()), tuple(make_inputs())
    found = torch.func.jvp(lambda *x: packed(*x, **options), inputs, tangents)
    without = {name: x for name, x in options.items() if name != "num_splits"}
    expected = torch.func.jvp(lambda *x: one_by_one(*x, **without), inputs, tangents)
    torch.testing.assert_close(found, expected)


def test_func_grad() -> None:
    inputs = make_inputs()
    actual = torch.func.grad(lambda *x: loss(packed(*x)), argnums=(0, 1, 2))(*inputs)
    expected = torch.func.grad(lambda *x: loss(one_by_one(*x)), argnums=(0, 1, 2))(*inputs)
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("batch", [0, 2])
def test_nothing_to_attend_to(batch: int) -> None:
    """B = 0, and sequences that are all empty."""
    q = torch.randn(0, 4, 8, requires_grad=True)
    cu = torch.zeros(batch + 1, dtype=torch.int32)
    out, lse, _ = flash_attn_varlen_func(q, q, q, cu, cu, 0, 0, return_attn_probs=True)
    assert out.shape == q.shape and lse.shape == (4, 0)
    out.sum().backward()


def test_pages() -> None:
    """A pool in any order, whatever the page size."""
    q, k, v = make_inputs()
    expected = packed(q, k, v, causal=True)
    for page_size in (1, 2, 3, 7):
        pages = -(-6 // page_size)
        order = torch.randperm(3 * pages).int().view(3, pages)
        pools = [torch.full((3 * pages, page_size, 2, 16), torch.nan).double() for _ in range(2)]
        for row, (begin, end) in enumerate(itertools.pairwise(STARTS_K)):
            for key in range(end - begin):
                page = order[row, key // page_size]
                for pool, x in zip(pools, (k, v), strict=True):
                    pool[page, key % page_size] = x[begin + key]
        actual = packed(q, *pools, causal=True, block_table=order)
        torch.testing.assert_close(actual, expected)
        with_sink = {"causal": True, "sink": torch.rand(4, dtype=torch.float64)}
        actual = packed(q, *pools, block_table=order, **with_sink)
        torch.testing.assert_close(actual, packed(q, k, v, **with_sink))
        used = {"seqused_k": int32(4, 1, 6), "num_splits": 3, "batch_invariant": True}
        lengths = (int32(*STARTS_Q), None, 7, None)
        out = flash_attn_varlen_func(
            q, *pools, *lengths, softmax_scale=SCALE, causal=True, block_table=order, **used
        )
        torch.testing.assert_close(out, expected[0])


class TestExtensionRoute:
    """Plain calls go to the extension, with a stand-in for it and its CUDA tensors."""

    def test_training(self, extension: Extension) -> None:
        q, k, v = (x[..., :5] for x in make_inputs(dtype=torch.bfloat16))
        cu_q, cu_k = int32(*STARTS_Q), int32(*STARTS_K)
        used = {"seqused_q": int32(1, 0, 1), "leftpad_k": int32(1, 0, 1)}
        slopes = torch.ones(4)
        out = flash_attn_varlen_func(
            *(q, k, v, cu_q, cu_k, torch.tensor(7), 6, 0.25), alibi_slopes=slopes, **used
        )
        (given,) = extension.calls
        assert out.shape == q.shape and given.k.shape == (11, 2, 8)
        assert given.cu_seqlens_q is cu_q and given.cu_seqlens_k is cu_k
        assert given.seqused_q is used["seqused_q"] and given.seqused_k is None
        assert given.leftpad_k is used["leftpad_k"] and given.dropout_p == 0.25
        assert given.max_seqlen_q == 10 and given.max_seqlen_k == 6
        assert given.softmax_scale == 5**-0.5 and given.causal is False and given.softcap == 0.0
        assert given.window_size_left == given.window_size_right == -1
        assert given.alibi_slopes is slopes and given.deterministic is False

    def test_splits(self, extension: Extension) -> None:
        q, k, v = make_inputs(dtype=torch.bfloat16)
        lengths = (int32(*STARTS_Q), int32(*STARTS_K), 7, None)
        flash_attn_varlen_func(q, k, v, *lengths, num_splits=4, window_size=(3, None))
        (given,) = extension.calls
        assert given.num_splits == 4 and given.max_seqlen_k == 11
        assert given.window_size_left == 3 and given.return_softmax is False

    @pytest.mark.parametrize("num_splits", [0, 4])
    def test_autocast(self, extension: Extension, num_splits: int) -> None:
        q, k, v = make_inputs(dtype=torch.float32)
        lengths = (int32(*STARTS_Q), int32(*STARTS_K), 7, None)
        with torch.autocast("cpu", torch.bfloat16):
            out = flash_attn_varlen_func(q, k, v, *lengths, num_splits=num_splits)
        (given,) = extension.calls
        assert given.q.dtype == out.dtype == torch.bfloat16

    def test_rejected_calls_get_the_same_words_as_on_the_cpu(self, extension: Extension) -> None:
        q, k, v = make_inputs(dtype=torch.bfloat16)
        lengths = (int32(*STARTS_Q), int32(*STARTS_K), 7, -3)
        extension.error = RuntimeError("the extension's own words")
        with pytest.raises(ValueError, match=r"^max_seqlen_k: must be at least 0, got -3"):
            flash_attn_varlen_func(q, k, v, *lengths)
        assert len(extension.calls) == 1


def test_vmap_over_bad_contents_names_them() -> None:
    x = torch.randn(6, 2, 8)
    cu_seqlens = torch.tensor([[0, 3, 6], [0, 7, 6]], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"^cu_seqlens_q: must not decrease, got 6 at index 2"):
        torch.vmap(lambda cu: flash_attn_varlen_func(x, x, x, cu, cu, 6, 6))(cu_seqlens)
