"""Values of another head dim than queries and keys, without a GPU: the CPU backend, the operators
and what traces them.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from flash_attn_cuda import (
    BlockSparsity,
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
)
from tests.cases.attention import AttentionCase, KvCacheCase, VarlenCase
from tests.cases.cpu_harness import (
    assert_fp64_close,
    compute,
    reference_of,
    varlen_reference_of,
)
from tests.cases.harness import run_forward_backward
from tests.cases.operators import arguments, backward_arguments, gradients_arguments
from tests.reference import attention, kvcache_reference

_ops = torch.ops.flash_attn_cuda

PAIRS = pytest.mark.parametrize(("head_dim", "head_dim_v"), [(24, 16), (16, 24), (33, 5)], ids=str)
CAUSAL = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])


def make_inputs(
    head_dim: int = 24, head_dim_v: int = 16, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor, Tensor]:
    shapes = ((2, 7, 4, head_dim), (2, 9, 2, head_dim), (2, 9, 2, head_dim_v))
    q, k, v = (torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes)
    return q, k, v


# -- the CPU backend -------------------------------------------------------------------------------


@CAUSAL
@PAIRS
def test_fp64_equals_the_reference(head_dim: int, head_dim_v: int, causal: bool) -> None:
    case = AttentionCase(
        seqlen_q=70,
        seqlen_k=133,
        num_heads_k=2,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        dtype=torch.float64,
        causal=causal,
        device="cpu",
    )
    inputs = case.make_inputs()
    assert_fp64_close(compute(case, inputs), reference_of(case, inputs))


@PAIRS
def test_packed_sequences_equal_the_reference(head_dim: int, head_dim_v: int) -> None:
    case = VarlenCase(
        lengths_q=(30, 0, 17),
        lengths_k=(20, 5, 40),
        used_q=(30, 0, 11),
        used_k=(20, 4, 33),
        leftpad=(3, 0, 0),
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        dtype=torch.float64,
        causal=True,
        device="cpu",
    )
    inputs = case.make_inputs()
    assert_fp64_close(run_forward_backward(case, inputs), varlen_reference_of(case, inputs))


@PAIRS
@pytest.mark.parametrize("page_size", [None, 8])
def test_caches_equal_the_reference(head_dim: int, head_dim_v: int, page_size: int | None) -> None:
    case = KvCacheCase(
        cached=(20, 0, 11),
        seqlens_q=3,
        seqlens_new=4,
        capacity=40,
        page_size=page_size,
        rotary_dim=8,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        dtype=torch.float64,
        causal=True,
        device="cpu",
    )
    arguments = case.make_inputs().arguments()
    options = case.options(arguments.pop("alibi_slopes"))
    expected = kvcache_reference(**arguments, options=options)
    with torch.no_grad():
        out, lse = flash_attn_with_kvcache(**arguments, causal=True, return_softmax_lse=True)
    assert out.shape == (3, 3, 4, head_dim_v)
    torch.testing.assert_close(out, expected.expected.out)
    torch.testing.assert_close(lse, expected.expected.lse)
    torch.testing.assert_close(
        arguments["v_cache"], expected.v_cache, rtol=0, atol=0, equal_nan=True
    )


def test_masks_biases_and_sinks() -> None:
    q, k, v = make_inputs()
    mask = torch.rand(7, 9) < 0.7
    bias = torch.randn(1, 4, 7, 9, dtype=torch.float64, requires_grad=True)
    sink = torch.randn(4, dtype=torch.float64, requires_grad=True)
    sparsity = BlockSparsity.from_mask(mask[None, None])
    out = flash_attn_func(q, k, v, attn_mask=bias, block_mask=sparsity, sink=sink)
    wanted, _ = attention(q, k, v, bias=bias, mask=mask[None, None], sink=sink)
    torch.testing.assert_close(out, wanted)
    assert isinstance(out, Tensor)
    leaves = (q, k, v, bias, sink)
    gradient = torch.randn_like(out)
    for x, y in zip(
        torch.autograd.grad(out, leaves, gradient),
        torch.autograd.grad(wanted, leaves, gradient),
        strict=True,
    ):
        torch.testing.assert_close(x, y)


# -- operators -------------------------------------------------------------------------------------

SCORES = {"softmax_scale": 24**-0.5, "causal": True}


def test_opcheck() -> None:
    torch.library.opcheck(_ops.attention, arguments(*make_inputs(), **SCORES))
    q, k, v = (x.detach() for x in make_inputs())
    out, lse, _, rng_state, _ = _ops.attention(*arguments(q, k, v, **SCORES))
    given = {"q": q, "k": k, "v": v, **SCORES, "dout": torch.randn_like(out), "out": out}
    given |= {"softmax_lse": lse, "rng_state": rng_state}
    targets = {f"d{name}": torch.empty_like(given[name]) for name in "qkv"}
    torch.library.opcheck(_ops.attention_backward, backward_arguments(**given, **targets))
    given["dlse"] = torch.randn_like(lse)
    torch.library.opcheck(_ops.attention_gradients, gradients_arguments(**given))


def test_opcheck_of_packed_sequences() -> None:
    q, k, v = (x.detach().flatten(0, 1).requires_grad_() for x in make_inputs())
    starts = (torch.tensor([0, 7, 14]).int(), torch.tensor([0, 9, 18]).int())
    lengths = dict(zip(("cu_seqlens_q", "cu_seqlens_k"), starts, strict=True))
    lengths |= {"max_seqlen_q": 7, "max_seqlen_k": 9}
    torch.library.opcheck(_ops.attention, arguments(q, k, v, **lengths, **SCORES))


@PAIRS
def test_compile(head_dim: int, head_dim_v: int) -> None:
    torch._dynamo.reset()
    inputs = make_inputs(head_dim, head_dim_v)
    compiled = torch.compile(flash_attn_func, fullgraph=True, backend="aot_eager")
    actual, (expected, _) = compiled(*inputs), attention(*inputs)
    torch.testing.assert_close(actual, expected)
    gradients = (torch.autograd.grad(x.sin().sum(), inputs) for x in (actual, expected))
    torch.testing.assert_close(next(gradients), next(gradients))


@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(192, 128), (20, 16), (16, 20), (20, 12)])
def test_fake_cuda_tensors(head_dim: int, head_dim_v: int) -> None:
    """Shapes on CUDA without a device; head dims that are no multiples of 8 are padded and cut."""

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    with FakeTensorMode():
        q, k, v = empty(2, 7, 4, head_dim), empty(2, 9, 2, head_dim), empty(2, 9, 2, head_dim_v)
        starts = [torch.empty(3, device="cuda", dtype=torch.int32) for _ in range(2)]
        calls: Any = (
            lambda: flash_attn_func(q, k, v),
            lambda: flash_attn_func(q, k, v, sink=torch.empty(4, device="cuda")),
            lambda: flash_attn_varlen_func(
                *(x.flatten(0, 1) for x in (q, k, v)), *starts, None, None
            ),
        )
        for call in calls:
            out = call()
            assert out.shape[-2:] == (4, head_dim_v) and out.dtype == q.dtype
        caches = (k.detach(), v.detach())
        assert flash_attn_with_kvcache(q.detach(), *caches).shape == (2, 7, 4, head_dim_v)


def test_meta_tensors_and_vmap() -> None:
    q, k, v = (x.detach().to("meta").requires_grad_() for x in make_inputs(dtype=torch.float32))
    out = flash_attn_func(q, k, v)
    out.sum().backward()
    assert out.shape == (2, 7, 4, 16) and v.grad.shape == v.shape
    inputs = [torch.stack([x, x.flip(1)]) for x in make_inputs()]
    actual = torch.vmap(flash_attn_func)(*inputs)
    each = [attention(*x)[0] for x in zip(*inputs, strict=True)]
    torch.testing.assert_close(actual, torch.stack(each))


# -- errors ----------------------------------------------------------------------------------------


def test_gradients_are_those_of_out() -> None:
    q, k, v = (x.detach() for x in make_inputs())
    out, lse, _, rng_state, _ = _ops.attention(*arguments(q, k, v, **SCORES))
    given = {"q": q, "k": k, "v": v, **SCORES, "softmax_lse": lse, "rng_state": rng_state}
    given |= {"dout": out, "out": out}
    for name in ("dout", "out"):
        with pytest.raises(ValueError, match=rf"^{name}: must have shape \(2, 7, 4, 16\), got"):
            _ops.attention_backward(*backward_arguments(**{**given, name: q}))


def test_new_values_have_the_head_dim_of_their_cache() -> None:
    q, k, v = (x.detach() for x in make_inputs())
    lengths = torch.tensor([3, 4], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"^v: must have shape \(2, 2, 2, 16\), got"):
        flash_attn_with_kvcache(q, k, v, k[:, :2], k[:, :2], cache_seqlens=lengths)
