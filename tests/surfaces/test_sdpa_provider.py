"""torch's attention by these kernels (integrations/sdpa.py): torch's own semantics, with and
without activation.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from inspect import signature
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.varlen import varlen_attn

from flash_attn_cuda import flash_attn_func, flash_attn_varlen_func
from flash_attn_cuda.installed import build_info
from tests.cases.attention import AttentionCase, VarlenCase
from tests.cases.harness import captured, run_reference
from tests.reference import AttentionResult
from tests.reference.tolerance import assert_close

NAME = "flash_attn_cuda"
aten = torch.ops.aten
GPU = [pytest.mark.gpu, pytest.mark.cuda_only]
DEVICES = pytest.mark.parametrize("device", [pytest.param("cuda", marks=GPU)])
OPERATORS = (
    "_flash_attention_forward",
    "_flash_attention_forward_no_dropout_inplace",
    "_flash_attention_backward",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_backward",
)
needs_extension = pytest.mark.skipif(build_info.extension is None, reason="needs the extension")


def restore() -> None:
    """torch 2.10 has no function for it: there the next activation does."""
    name = "restore_flash_attention_impl"
    if hasattr(torch.nn.attention, name):
        getattr(torch.nn.attention, name)(_raise_warn=False)
    else:
        build_info.extension.give_back_aten_operators()
        torch.nn.attention._registry._FLASH_ATTENTION_ACTIVE = None


@contextmanager
def active() -> Iterator[None]:
    torch.nn.attention.activate_flash_attention_impl(NAME)
    try:
        yield
    finally:
        restore()


@pytest.fixture
def activated() -> Iterator[None]:
    with active():
        yield


def attend(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """SDPA's flash backend, of (batch, heads, seqlen, head_dim)."""
    options["enable_gqa"] = q.shape[1] != k.shape[1]
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return F.scaled_dot_product_attention(q, k, v, **options)


def is_ours(operator: str) -> bool:
    """Whether torch's dispatcher runs ours for CUDA tensors."""
    (line,) = re.findall(r"^CUDA: (.*)$", torch._C._dispatch_dump_table(f"aten::{operator}"), re.M)
    return "aten_operators.cpp" in line


def leaves_of(inputs: Any) -> list[Tensor]:
    """(batch, heads, seqlen, head_dim), in memory as a projection leaves them."""
    return [x.detach().clone().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]


def with_gradients(leaves: list[Tensor], dout: Tensor, **options: Any) -> tuple[Tensor, ...]:
    """(out, dq, dk, dv) as flash_attn_func has them."""
    out = attend(*(x.transpose(1, 2) for x in leaves), **options).transpose(1, 2)
    return out, *torch.autograd.grad(out, leaves, dout)


@DEVICES
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [40, 64, 128])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads_k", [2, 4])
@pytest.mark.usefixtures("activated")
def test_values_and_gradients(
    device: str, dtype: torch.dtype, head_dim: int, causal: bool, heads_k: int
) -> None:
    case = AttentionCase(
        seqlen_q=75,
        seqlen_k=75,
        num_heads_k=heads_k,
        head_dim=head_dim,
        dtype=dtype,
        causal=causal,
        softmax_scale=0.3,
        device=device,
    )
    inputs = case.make_inputs()
    results = with_gradients(leaves_of(inputs), inputs.dout, is_causal=causal, scale=0.3)
    q, k, v = (x.transpose(1, 2) for x in (inputs.q, inputs.k, inputs.v))
    lse = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, scale=0.3)[1]
    out, *gradients = results
    actual = AttentionResult(out.detach(), lse, *gradients)
    assert_close(actual, *run_reference(case, inputs, use_dlse=False))


@DEVICES
@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
@pytest.mark.usefixtures("activated")
def test_bits_are_those_of_our_own_call(device: str, dropout_p: float) -> None:
    """Dropout follows torch's seed, and the backward the forward's. torch keeps O alone."""
    case = AttentionCase(seqlen_q=190, seqlen_k=190, device=device)
    inputs = case.make_inputs()
    torch.manual_seed(5)
    results = with_gradients(leaves_of(inputs), inputs.dout, is_causal=True, dropout_p=dropout_p)
    leaves = leaves_of(inputs)
    torch.manual_seed(5)
    out = flash_attn_func(*leaves, dropout_p=dropout_p, causal=True, keep_rounding=False)
    expected = (out, *torch.autograd.grad(out, leaves, inputs.dout))
    for name, x, y in zip(("out", "dq", "dk", "dv"), results, expected, strict=True):
        if device == "cuda" and name == "dq":  # its sums have no fixed order
            torch.testing.assert_close(x, y, rtol=0.02, atol=0.02)
        else:
            assert torch.equal(x, y), name


@DEVICES
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (20, 7)])
@pytest.mark.skipif(
    "window_size" not in signature(varlen_attn).parameters, reason="this torch has no window_size"
)
@pytest.mark.usefixtures("activated")
def test_packed_sequences(device: str, window: tuple[int, int]) -> None:
    case = VarlenCase(
        lengths_q=(33, 0, 70, 5),
        lengths_k=(33, 0, 70, 5),
        head_dim=64,
        window=window,
        device=device,
    )
    inputs = case.make_inputs()
    leaves = leaves_of(inputs)
    bounds = (inputs.cu_seqlens_q, inputs.cu_seqlens_k, 70, 70)
    request = torch.nn.attention.varlen.AuxRequest(lse=True)
    out, lse = varlen_attn(*leaves, *bounds, window_size=window, return_aux=request)
    gradients = torch.autograd.grad(out, leaves, inputs.dout)
    actual = AttentionResult(out.detach(), lse.detach(), *gradients)
    assert_close(actual, *run_reference(case, inputs, use_dlse=False))
    assert torch.equal(out, flash_attn_varlen_func(*leaves, *bounds, window_size=window))


@DEVICES
@pytest.mark.skipif(
    "block_table" not in str(aten._flash_attention_forward.default._schema),
    reason="this torch has no block_table",
)
@pytest.mark.usefixtures("activated")
def test_pages(device: str) -> None:
    generator = torch.Generator(device).manual_seed(1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.bfloat16, device=device, generator=generator)

    q, k, v = normal(9, 4, 64), normal(6, 16, 2, 64), normal(6, 16, 2, 64)
    table = torch.tensor([[3, 1], [5, 0]], dtype=torch.int32, device=device)
    bounds = torch.tensor([0, 4, 9], dtype=torch.int32, device=device)
    used = torch.tensor([20, 9], dtype=torch.int32, device=device)
    lengths = {"seqused_k": used, "block_table": table}
    out = varlen_attn(q, k, v, bounds, None, 5, 32, enable_gqa=True, **lengths)
    ours = flash_attn_varlen_func(q, k, v, bounds, None, 5, 32, **lengths)
    assert torch.equal(out, ours)


@DEVICES
@pytest.mark.skipif(
    not hasattr(aten, "_flash_attention_forward_no_dropout_inplace"),
    reason="this torch does not have the operator",
)
@pytest.mark.usefixtures("activated")
def test_given_outputs_are_written(device: str) -> None:
    case = VarlenCase(lengths_q=(33, 70), lengths_k=(33, 70), device=device)
    inputs = case.make_inputs()
    tensors = (inputs.q, inputs.k, inputs.v, inputs.cu_seqlens_q, inputs.cu_seqlens_k, 70, 70)
    out = torch.full_like(inputs.q, torch.nan)
    lse = aten._flash_attention_forward_no_dropout_inplace(out, *tensors, 0.0, True, False)
    expected, expected_lse, _ = flash_attn_varlen_func(
        *tensors, causal=True, return_attn_probs=True
    )
    assert torch.equal(out, expected)
    assert torch.equal(lse, expected_lse)


@DEVICES
@pytest.mark.usefixtures("activated")
def test_debug_mask_has_torchs_shape(device: str) -> None:
    q, k, v = (torch.randn(1, 2, 70, 64, device=device).bfloat16() for _ in range(3))
    *_, mask = aten._scaled_dot_product_flash_attention(q, k, v, 0.5, False, True)
    assert mask.shape == (1, 2, 128, 128)
    of_pairs = mask[..., :70, :70]
    assert (of_pairs > 0).any()
    assert (of_pairs < 0).any()
    assert not mask[..., 70:, :].any()
    assert not mask[..., 70:].any()


@DEVICES
@pytest.mark.parametrize("strides", ["of a projection", "contiguous"])
@pytest.mark.usefixtures("activated")
def test_compile(device: str, strides: str) -> None:
    def block(x: Tensor) -> Tensor:
        q, k, v = (x * 1.5).unflatten(-1, (3, 2, 64)).unbind(-3)
        heads_first = [y.transpose(1, 2) for y in (q, k, v)]
        if strides == "contiguous":
            heads_first = [y.contiguous() for y in heads_first]
        return attend(*heads_first, is_causal=True).transpose(1, 2).flatten(2) + 1.0

    def results(function: Any) -> tuple[Tensor, Tensor]:
        x = torch.linspace(-1.0, 1.0, 2 * 40 * 384, device=device).bfloat16().view(2, 40, 384)
        x.requires_grad_()
        out = function(x)
        return out, *torch.autograd.grad(out.float().square().sum(), x)

    torch._dynamo.reset()
    compiled = results(torch.compile(block, fullgraph=True, backend="aot_eager"))
    for x, y in zip(compiled, results(block), strict=True):
        torch.testing.assert_close(x, y, rtol=0.02, atol=0.02)
        assert x.stride() == y.stride()


@DEVICES
@pytest.mark.usefixtures("activated")
def test_checkpointed_dropout(device: str) -> None:
    case = AttentionCase(seqlen_q=90, seqlen_k=90, dropout_p=0.4, device=device)
    inputs = case.make_inputs()

    def gradients(checkpointed: bool) -> tuple[Tensor, ...]:
        leaves = [x.transpose(1, 2) for x in leaves_of(inputs)]
        torch.manual_seed(3)
        if checkpointed:
            out = torch.utils.checkpoint.checkpoint(
                attend, *leaves, dropout_p=0.4, use_reentrant=False
            )
        else:
            out = attend(*leaves, dropout_p=0.4)
        return out, *torch.autograd.grad(out, leaves, inputs.dout.transpose(1, 2))

    for x, y in zip(gradients(True), gradients(False), strict=True):
        torch.testing.assert_close(x, y, rtol=0.02, atol=0.02)


@DEVICES
@pytest.mark.usefixtures("activated")
def test_threads(device: str) -> None:
    case = AttentionCase(seqlen_q=90, seqlen_k=90, causal=True, device=device)
    inputs = case.make_inputs()
    expected = flash_attn_func(inputs.q, inputs.k, inputs.v, causal=True)
    q, k, v = (x.transpose(1, 2) for x in (inputs.q, inputs.k, inputs.v))
    wrong = []

    def run() -> None:
        for _ in range(5):
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            if not torch.equal(out.transpose(1, 2), expected):
                wrong.append(threading.get_ident())

    threads = [threading.Thread(target=run) for _ in range(4)]
    # Here and not in each of them: what it allows, it allows the whole process.
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong


# -- activation, which needs no GPU --------------------------------------------------------------


def test_the_name_is_known_and_not_active() -> None:
    assert NAME in torch.nn.attention.list_flash_attention_impls()
    assert torch.nn.attention.current_flash_attention_impl() != NAME


@needs_extension
def test_activated_and_removed_twice() -> None:
    there = [name for name in OPERATORS if hasattr(aten, name)]
    assert len(there) >= 4
    for _ in range(2):
        assert not any(map(is_ours, there))
        with active():
            assert torch.nn.attention.current_flash_attention_impl() == NAME
            assert all(map(is_ours, there))
            with active():  # once more: the first is removed
                assert all(map(is_ours, there))
    assert not any(map(is_ours, there))


def test_without_the_extension_it_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_info, "extension", None)
    monkeypatch.setattr(build_info, "cuda_unavailable_reason", lambda: "no reason")
    with pytest.raises(RuntimeError, match="flash_attn_cuda: no reason"):
        torch.nn.attention.activate_flash_attention_impl(NAME)
    assert torch.nn.attention.current_flash_attention_impl() is None


# -- beside torch's kernels ----------------------------------------------------------------------


def of_both(function: Any) -> tuple[Any, Any]:
    """With and without activation."""
    without = function()
    with active():
        return function(), without


@DEVICES
@pytest.mark.parametrize("seqlens", [(128, 128), (1, 77), (100, 300), (300, 100), (1000, 1000)])
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"scale": 0.05}], ids=str)
def test_the_same_as_torchs(device: str, seqlens: tuple[int, int], options: dict[str, Any]) -> None:
    """Through SDPA as users call it; of causal calls that are not square torch takes another."""
    q, k, v = (
        torch.randn(2, 4, length, 64, device=device, dtype=torch.float16, requires_grad=True)
        for length in (seqlens[0], seqlens[1], seqlens[1])
    )

    def run() -> tuple[Tensor, ...]:
        out = F.scaled_dot_product_attention(q, k, v, **options)
        return out, *torch.autograd.grad(out.float().square().sum(), (q, k, v))

    for x, y in zip(*of_both(run), strict=True):
        torch.testing.assert_close(x, y, rtol=0.01, atol=0.01)
        assert x.stride() == y.stride()


@DEVICES
def test_lower_right_masks(device: str) -> None:
    q = torch.randn(2, 4, 50, 64, device=device, dtype=torch.bfloat16)
    k, v = (torch.randn(2, 4, 90, 64, device=device, dtype=torch.bfloat16) for _ in range(2))
    mask = causal_lower_right(50, 90)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        ours, torchs = of_both(lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=mask))
    torch.testing.assert_close(ours, torchs, rtol=0.02, atol=0.02)


@DEVICES
def test_what_no_kernel_takes_is_torchs(device: str) -> None:
    """Lengths of sequences that are not packed, of which torch's kernel does not hear."""
    q, k, v = (torch.randn(2, 130, 4, 64, device=device).bfloat16() for _ in range(3))
    used = torch.tensor([3, 130], dtype=torch.int32, device=device)

    def run() -> tuple[Any, ...]:
        options = (None, None, 130, 130, 0.0, False, False)
        return aten._flash_attention_forward(q, k, v, *options, seqused_k=used)[:2]

    for x, y in zip(*of_both(run), strict=True):
        assert torch.equal(x, y)


@DEVICES
def test_nested_tensors(device: str) -> None:
    def run() -> list[Tensor]:
        torch.manual_seed(2)
        parts = [torch.randn(n, 4, 64, device=device, dtype=torch.bfloat16) for n in (30, 7, 64)]
        x = torch.nested.as_nested_tensor(parts, layout=torch.jagged).requires_grad_()
        heads_first = x.transpose(1, 2)
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            out = F.scaled_dot_product_attention(heads_first, heads_first, heads_first)
        (gradient,) = torch.autograd.grad(out.values().float().square().sum(), x)
        return [out.values(), gradient.values()]

    for x, y in zip(*of_both(run), strict=True):
        torch.testing.assert_close(x, y, rtol=0.03, atol=0.03)


@DEVICES
@pytest.mark.usefixtures("activated")
def test_autocast(device: str) -> None:
    q, k, v = (torch.randn(2, 4, 90, 64, device=device, requires_grad=True) for _ in range(3))
    with torch.autocast(device, dtype=torch.bfloat16):
        out = attend(q, k, v)
    assert out.dtype == torch.bfloat16
    gradients = torch.autograd.grad(out.float().sum(), (q, k, v))
    assert all(x.dtype == torch.float32 for x in gradients)


@DEVICES
@pytest.mark.usefixtures("activated")
def test_graphs(device: str) -> None:
    q, k, v = (torch.randn(2, 4, 190, 64, device=device).bfloat16() for _ in range(3))
    replay = captured(lambda: attend(q, k, v, is_causal=True))
    q.copy_(torch.randn_like(q))
    assert torch.equal(replay(), attend(q, k, v, is_causal=True))


@DEVICES
@pytest.mark.usefixtures("activated")
def test_fixed_order(device: str) -> None:
    case = AttentionCase(seqlen_q=1000, seqlen_k=1000, device=device)
    inputs = case.make_inputs()
    torch.use_deterministic_algorithms(True)
    try:
        first, second = (with_gradients(leaves_of(inputs), inputs.dout) for _ in range(2))
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))


@DEVICES
@pytest.mark.usefixtures("activated")
def test_export(device: str) -> None:
    class Block(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    q, k, v = (torch.randn(2, 4, 90, 64, device=device).bfloat16() for _ in range(3))
    program = torch.export.export(Block(), (q, k, v)).module()
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        torch.testing.assert_close(program(q, k, v), Block()(q, k, v), rtol=0.02, atol=0.02)
