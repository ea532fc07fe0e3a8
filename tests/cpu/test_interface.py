"""The public functions: FlashAttention-2's signatures, what arguments may be, what is returned; and
the private ones. Which calls take the operators: test_routes.py.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

import flash_attn_cuda
from flash_attn_cuda import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
)
from flash_attn_cuda.functions import interface
from tests.reference import AttentionResult, attention, attention_with_gradients
from tests.surfaces.public_names import FLASH_ATTENTION_2_INTERFACE

MASKS = "attn_mask=None, block_mask=None, block_size=None, sink=None, attention_chunk=0"
ROUNDING, LOGITS = "keep_rounding=True", "return_max_logits=False"
BIAS, PRODUCTS = "relative_bias=None", "fp8_products=False"
LISTS = "key_lists=None, key_list_block=1"
QUERIES, ROPE = "key_list_queries=1", "values_include_rope=False, tree_mask=None"
DESCALES = "q_descale=None, k_descale=None, v_descale=None"
# What this package's functions have behind FlashAttention-2's parameters.
OWN = {
    "flash_attn_func": f"*, {MASKS}, {ROUNDING}, {BIAS}, {LISTS}, {QUERIES}, {LOGITS}",
    "flash_attn_kvpacked_func": f"*, {ROUNDING}, {LOGITS}",
    "flash_attn_qkvpacked_func": f"*, {ROUNDING}, {LOGITS}",
    "flash_attn_varlen_func": (
        "*, seqused_q=None, seqused_k=None, leftpad_k=None, num_splits=0, batch_invariant=False, "
        f"{MASKS}, out=None, qv=None, {DESCALES}, {ROUNDING}, {BIAS}, {LISTS}, {QUERIES}, "
        f"{ROPE}, {LOGITS}, {PRODUCTS}"
    ),
    "flash_attn_varlen_kvpacked_func": f"*, {ROUNDING}, {LOGITS}",
    "flash_attn_varlen_qkvpacked_func": f"*, {ROUNDING}, {LOGITS}",
    "flash_attn_with_kvcache": (
        "*, cu_seqlens_q=None, max_seqlen_q=None, cu_seqlens_k_new=None, batch_invariant=False, "
        f"sink=None, attention_chunk=0, out=None, qv=None, {DESCALES}, quantize=None, {LISTS}, "
        f"{ROPE}, attn_mask=None, {BIAS}, {PRODUCTS}"
    ),
    "_flash_attn_forward": "deterministic=False",
    "_flash_attn_varlen_forward": (
        "num_splits=0, seqused_q=None, batch_invariant=False, deterministic=False, sink=None"
    ),
    "_flash_attn_backward": "dlse=None",
    "_flash_attn_varlen_backward": "dlse=None, seqused_q=None, seqused_k=None, leftpad_k=None",
}
OF_FLASH_ATTENTION_2 = FLASH_ATTENTION_2_INTERFACE.signatures()
SIGNATURES = {name: f"{OF_FLASH_ATTENTION_2[name]}, {own}" for name, own in OWN.items()}
SIGNATURES |= {
    "flash_attn_combine": "out_partial, lse_partial, out=None, out_dtype=None",
    "check_device_errors": "device=None",
}


def tensors(
    seqlen_q: int = 6, seqlen_k: int = 6, dtype: torch.dtype = torch.float64
) -> list[Tensor]:
    shapes = ((2, seqlen_q, 4, 8), (2, seqlen_k, 2, 8), (2, seqlen_k, 2, 8))
    return [torch.randn(shape, dtype=dtype) for shape in shapes]


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures_are_those_of_flash_attention_2(name: str) -> None:
    parameters = list(inspect.signature(getattr(interface, name)).parameters.values())
    shown = [
        p.name if p.default is inspect.Parameter.empty else f"{p.name}={p.default!r}"
        for p in parameters
    ]
    named_only = [p.kind is inspect.Parameter.KEYWORD_ONLY for p in parameters]
    if any(named_only):
        shown.insert(named_only.index(True), "*")
    assert ", ".join(shown) == SIGNATURES[name]
    assert inspect.getdoc(getattr(interface, name))


def test_package_exports() -> None:
    public = {name for name in SIGNATURES if not name.startswith("_")}
    assert public <= set(flash_attn_cuda.__all__)


@pytest.mark.parametrize(
    ("causal", "window_size", "window"),
    [
        (False, (-1, -1), (None, None)),
        (True, (-1, -1), (None, 0)),
        (False, (-1, 0), (None, 0)),
        (False, [-7, -2], (None, None)),
        (False, (None, None), (None, None)),
        (False, (None, 0), (None, 0)),
        (True, (-1, 5), (None, 0)),  # causal sets the right end
        (True, (2, 5), (2, 0)),
        (False, (0, -1), (0, None)),
        (False, (None, 2), (None, 2)),
        (False, (10**12, 1), (None, 1)),
        (False, (2**70, -(2**70)), (None, None)),
        (False, torch.tensor([-1, 0]), (None, 0)),
        (False, (torch.tensor(2), torch.tensor(-1)), (2, None)),
        (1, torch.tensor([3, -1]), (3, 0)),
    ],
    ids=str,
)
def test_windows(causal: bool, window_size: Any, window: tuple[int | None, int | None]) -> None:
    q, k, v = tensors(5, 9)
    expected, _ = attention(q, k, v, window=window)
    actual = flash_attn_func(q, k, v, causal=causal, window_size=window_size)
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize(
    "window_size",
    [3, (1,), (1, 2, 3), ("a", "b"), (1.5, 0), (torch.tensor(1.5), 2), torch.ones(2), None],
    ids=str,
)
def test_windows_that_are_none(window_size: Any) -> None:
    with pytest.raises(TypeError, match=r"^window_size: must be two integers"):
        flash_attn_func(*tensors(), window_size=window_size)


@pytest.mark.parametrize("kind", [numpy.float32, numpy.float64, torch.tensor, Fraction])
def test_numbers_of_other_types(kind: Callable[[float], Any]) -> None:
    """Read once, on the CPU."""
    q, k, v = tensors()
    numbers = {"dropout_p": 0.25, "softmax_scale": 0.5, "softcap": 2.0}
    results = []
    for given in (numbers, {name: kind(x) for name, x in numbers.items()}):
        torch.manual_seed(0)
        results.append(flash_attn_func(q, k, v, **given))
    assert torch.equal(*results)
    assert torch.equal(flash_attn_func(q, k, v, kind(0.0), None), flash_attn_func(q, k, v))


@pytest.mark.parametrize("causal", [False, True])
def test_packed_functions(causal: bool) -> None:
    """Outputs and gradients of the packed functions are those of the unpacked one."""
    q, k, v = (x.requires_grad_() for x in tensors())
    expected = flash_attn_func(q, k, v, softmax_scale=0.2, causal=causal)
    dq, dk, dv = torch.autograd.grad(expected.sin().sum(), (q, k, v))
    kv = torch.stack((k, v), 2).detach().requires_grad_()
    actual = flash_attn_kvpacked_func(q, kv, softmax_scale=0.2, causal=causal)
    assert torch.equal(actual, expected)
    grads = torch.autograd.grad(actual.sin().sum(), (q, kv))
    torch.testing.assert_close(grads, (dq, torch.stack((dk, dv), 2)))

    qkv = torch.randn(2, 6, 3, 4, 8, dtype=torch.float64, requires_grad=True)
    expected = flash_attn_func(qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2], causal=causal)
    (dqkv,) = torch.autograd.grad(expected.sin().sum(), qkv)
    actual = flash_attn_qkvpacked_func(qkv, causal=causal)
    assert torch.equal(actual, expected)
    torch.testing.assert_close(torch.autograd.grad(actual.sin().sum(), qkv)[0], dqkv)


def test_returns() -> None:
    q, k, v = tensors(3, 5, torch.bfloat16)
    assert flash_attn_func(q, k, v).dtype == torch.bfloat16
    out, lse, s_dmask = flash_attn_func(q, k, v, return_attn_probs=True)
    assert torch.equal(out, flash_attn_func(q, k, v))
    assert lse.shape == (2, 4, 3) and lse.dtype == torch.float32
    assert s_dmask.shape == (0,)
    torch.testing.assert_close(lse.double(), attention(q, k, v)[1], rtol=1e-5, atol=1e-5)


def test_probabilities_of_a_dropped_call() -> None:
    """S_dmask holds the probabilities, negative where the output lacks them."""
    q, k, v = tensors(5, 300)
    out, lse, s_dmask = flash_attn_func(q, k, v, 0.5, return_attn_probs=True)
    group = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(group, 2) for x in (k, v))
    scores = torch.einsum("bmhd,bnhd->bhmn", q, k) * q.shape[-1] ** -0.5
    torch.testing.assert_close(s_dmask.abs(), scores.softmax(-1))
    torch.testing.assert_close(lse, scores.logsumexp(-1))
    kept = s_dmask.masked_fill(s_dmask.signbit(), 0.0) * 2.0
    torch.testing.assert_close(out, torch.einsum("bhmn,bnhd->bmhd", kept, v))
    assert 0.4 < s_dmask.signbit().double().mean() < 0.6


def test_dropout_follows_the_default_generator() -> None:
    q, k, v = tensors()
    outs = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        outs.append((flash_attn_func(q, k, v, 0.5), flash_attn_func(q, k, v, 0.5)))
    assert torch.equal(outs[0][0], outs[1][0]) and torch.equal(outs[0][1], outs[1][1])
    assert not torch.equal(outs[0][0], outs[0][1])
    assert not torch.equal(outs[0][0], outs[2][0])


@pytest.mark.parametrize("packed", [False, True])
def test_slopes_with_a_gradient_are_refused(packed: bool) -> None:
    q, k, v = tensors()
    slopes = torch.ones(4, requires_grad=True)
    with pytest.raises(NotImplementedError, match=r"^alibi_slopes: must not require grad"):
        if packed:
            cu = torch.tensor([0, 6], dtype=torch.int32)
            flash_attn_varlen_func(q[0], k[0], v[0], cu, cu, 6, 6, alibi_slopes=slopes)
        else:
            flash_attn_func(q, k, v, alibi_slopes=slopes)
    with torch.no_grad():
        flash_attn_func(q, k, v, alibi_slopes=slopes)


def test_positional_order() -> None:
    q, k, v = tensors()
    by_position = flash_attn_func(q, k, v, 0.0, 0.5, True, (-1, -1), 0.0, None, False, True)
    by_name = flash_attn_func(q, k, v, softmax_scale=0.5, causal=True, return_attn_probs=True)
    assert all(torch.equal(x, y) for x, y in zip(by_position, by_name, strict=True))


@pytest.mark.parametrize("given", [torch.float32, torch.float16, torch.float64], ids=str)
def test_autocast_casts_as_torch_does(given: torch.dtype) -> None:
    q, k, v = (x.requires_grad_() for x in tensors(dtype=given))
    with torch.autocast("cpu", torch.bfloat16):
        out = flash_attn_func(q, k, v)
        product = torch.matmul(q, q.transpose(-1, -2))
    assert out.dtype == product.dtype
    out.sum().backward()
    assert q.grad.dtype == k.grad.dtype == v.grad.dtype == given


# -- the private functions -------------------------------------------------------------------------

SCALE = 0.3


def test_private_functions_of_sequences_of_one_length() -> None:
    """The backward writes what is wanted into any strides."""
    q, k, v = tensors(7, 9)
    options = (0.0, SCALE, False, -1, 0, 0.0, None)
    out, lse, s_dmask, rng_state = interface._flash_attn_forward(q, k, v, *options, False)
    assert s_dmask.numel() == rng_state.numel() == 0
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    dq, dkv = torch.full_like(q, torch.nan), torch.full((2, 9, 2, 2, 8), torch.nan).double()
    given = (dout, q, k, v, out, lse)
    softmax_d = interface._flash_attn_backward(
        *given, dq, *dkv.unbind(2), *options, False, rng_state, dlse=dlse
    )
    assert softmax_d.shape == (2, 4, 128)
    wanted = attention_with_gradients(q, k, v, dout, dlse, softmax_scale=SCALE, causal=True)
    found = AttentionResult(out, lse, dq, *dkv.unbind(2))
    for name, x in found.tensors().items():
        torch.testing.assert_close(x, wanted.tensors()[name], msg=lambda m, n=name: f"{n} {m}")
    dkv.fill_(torch.nan)
    interface._flash_attn_backward(*given, None, None, dkv[:, :, 1], *options, False)
    torch.testing.assert_close(dkv[:, :, 1], wanted.dv)
    assert dkv[:, :, 0].isnan().all()


def test_private_functions_of_packed_sequences() -> None:
    """Forward and backward of one call, whose debug outputs are not differentiable."""
    q, k, v = (x.flatten(0, 1).requires_grad_() for x in tensors(5, 5))
    starts = torch.tensor([0, 3, 3, 10], dtype=torch.int32)
    lengths = (starts, starts, None, torch.tensor(7))
    forward = interface._flash_attn_varlen_forward(q, k, v, *lengths, 0.4, SCALE, True)
    out, lse, s_dmask, rng_state = forward
    assert s_dmask.shape == (0,) and rng_state.shape == (2,)
    assert [x.requires_grad for x in forward] == [True, True, False, False]
    dout = torch.randn_like(out)
    gradients = [torch.full_like(x, torch.nan) for x in (q, k, v)]
    softmax_d = interface._flash_attn_varlen_backward(
        *(dout, q, k, v, out, lse, *gradients, *lengths, 0.4, SCALE, True, -1, -1, 0.0, None),
        *(False, rng_state),
    )
    torch.testing.assert_close(tuple(gradients), torch.autograd.grad(out, (q, k, v), dout))
    torch.testing.assert_close(softmax_d, (dout * out).sum(-1).T)
