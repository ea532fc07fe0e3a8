"""The public functions: FlashAttention-2's signatures, good and bad arguments, routes taken."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import flash_attn_cuda
from flash_attn_cuda import (
    arguments,
    build_info,
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    interface,
)
from flash_attn_cuda.call import AttentionCall, Results
from tests.reference import attention

TRAINING = (
    "dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, "
    "alibi_slopes=None, deterministic=False, return_attn_probs=False"
)
MASKS = "attn_mask=None, block_mask=None, block_size=None, sink=None, attention_chunk=0"
ROUNDING = "keep_rounding=True"
LENGTHS = "cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k"
MASK = "causal, window_size_left, window_size_right, softcap, alibi_slopes"
BACKWARD = "dout, q, k, v, out, softmax_lse, dq, dk, dv"

# FlashAttention-2's parameters, and behind them this package's own.
SIGNATURES = {
    "flash_attn_func": f"q, k, v, {TRAINING}, *, {MASKS}, {ROUNDING}",
    "flash_attn_kvpacked_func": f"q, kv, {TRAINING}, *, {ROUNDING}",
    "flash_attn_qkvpacked_func": f"qkv, {TRAINING}, *, {ROUNDING}",
    "flash_attn_varlen_func": (
        f"q, k, v, {LENGTHS}, {TRAINING}, block_table=None, *, seqused_q=None, seqused_k=None, "
        f"leftpad_k=None, num_splits=0, batch_invariant=False, {MASKS}, out=None, "
        f"q_descale=None, k_descale=None, v_descale=None, {ROUNDING}"
    ),
    "flash_attn_varlen_kvpacked_func": f"q, kv, {LENGTHS}, {TRAINING}, *, {ROUNDING}",
    "flash_attn_varlen_qkvpacked_func": f"qkv, cu_seqlens, max_seqlen, {TRAINING}, *, {ROUNDING}",
    "flash_attn_with_kvcache": (
        "q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, "
        "cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, block_table=None, "
        "softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, "
        "rotary_interleaved=True, alibi_slopes=None, num_splits=0, return_softmax_lse=False, "
        "*, cu_seqlens_q=None, max_seqlen_q=None, cu_seqlens_k_new=None, batch_invariant=False, "
        "sink=None, attention_chunk=0, out=None, q_descale=None, k_descale=None, v_descale=None, "
        "quantize=None"
    ),
    "flash_attn_combine": "out_partial, lse_partial, out=None, out_dtype=None",
    "check_device_errors": "device=None",
    "_flash_attn_forward": (
        f"q, k, v, dropout_p, softmax_scale, {MASK}, return_softmax, deterministic=False"
    ),
    "_flash_attn_varlen_forward": (
        f"q, k, v, {LENGTHS}, dropout_p, softmax_scale, causal, window_size_left=-1, "
        "window_size_right=-1, softcap=0.0, alibi_slopes=None, return_softmax=False, "
        "block_table=None, leftpad_k=None, seqused_k=None, zero_tensors=False, num_splits=0, "
        "seqused_q=None, batch_invariant=False, deterministic=False, sink=None"
    ),
    "_flash_attn_backward": (
        f"{BACKWARD}, dropout_p, softmax_scale, {MASK}, deterministic, rng_state=None, dlse=None"
    ),
    "_flash_attn_varlen_backward": (
        f"{BACKWARD}, {LENGTHS}, dropout_p, softmax_scale, {MASK}, deterministic, "
        "rng_state=None, zero_tensors=False, dlse=None, seqused_q=None, seqused_k=None, "
        "leftpad_k=None"
    ),
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


class TestExtensionRoute:
    """Which calls skip the operators, with a stand-in for the extension and its CUDA tensors."""

    class Extension:
        """Computes with the CPU backend and counts its calls."""

        def __init__(self) -> None:
            self.head_dims: list[int] = []

        def attention(
            self,
            q: Tensor,
            k: Tensor,
            v: Tensor,
            softmax_scale: float | None,
            causal: bool,
            returns_lse: bool,
        ) -> tuple[Tensor, Tensor | None]:
            self.head_dims.append(q.shape[-1])
            if k.shape[2] == 3:
                raise ValueError("the extension's own words")
            out, lse = attention(q, k, v, softmax_scale=softmax_scale, causal=causal)
            return out, lse if returns_lse else None

        def forward(self, call: AttentionCall, returns_lse: bool) -> Results:
            self.head_dims.append(call.q.shape[-1])
            self.call = call
            out, lse = attention(
                *(call.q, call.k, call.v),
                softmax_scale=call.scale(),
                causal=call.causal,
                window=(call.window_size_left, call.window_size_right),
                softcap=call.softcap,
            )
            return Results(out, lse if returns_lse else None, None, None)

    @pytest.fixture
    def extension(self, monkeypatch: pytest.MonkeyPatch) -> Extension:
        extension = self.Extension()
        monkeypatch.setattr(build_info, "extension", extension)
        monkeypatch.setattr(Tensor, "is_cuda", property(lambda x: x.device.type == "cpu"))
        return extension

    def test_plain_calls_take_it(self, extension: Extension) -> None:
        q, k, v = tensors()
        expected, expected_lse = attention(q, k, v, causal=True)
        out, lse, s_dmask = flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
        torch.testing.assert_close((out, lse), (expected, expected_lse))
        assert s_dmask.shape == (0,) and extension.head_dims == [8]
        torch.testing.assert_close(flash_attn_func(q, k, v, causal=True), expected)

    def test_head_dim_is_padded(self, extension: Extension) -> None:
        q, k, v = (x[..., :5].detach().requires_grad_() for x in tensors())
        out = flash_attn_func(q, k, v)
        expected, _ = attention(q, k, v)
        torch.testing.assert_close(out, expected)
        assert extension.head_dims == [8]
        grads = (torch.autograd.grad(x.sin().sum(), (q, k, v)) for x in (out, expected))
        torch.testing.assert_close(*grads)

    def test_features_take_it(self, extension: Extension) -> None:
        q, k, v = (x[..., :5] for x in tensors(5, 9))
        slopes = torch.zeros(4)
        options = {"window_size": (10**12, 2), "softcap": 3.0, "deterministic": True}
        out = flash_attn_func(q, k, v, alibi_slopes=slopes, **options)
        torch.testing.assert_close(out, attention(q, k, v, window=(None, 2), softcap=3.0)[0])
        given = extension.call
        lengths = ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k", "leftpad_k")
        assert all(getattr(given, name) is None for name in lengths)
        assert given.dropout_p == 0.0 and given.deterministic and given.causal is False
        assert given.softmax_scale == 5**-0.5 and given.softcap == 3.0
        assert given.window_size_left == 2**31 - 1 and given.window_size_right == 2
        assert given.alibi_slopes is slopes and extension.head_dims == [8]

    def test_debug_probabilities_do_not(self, extension: Extension) -> None:
        *_, s_dmask = flash_attn_func(*tensors(dtype=torch.bfloat16), 0.5, return_attn_probs=True)
        assert s_dmask.shape == (2, 4, 6, 6) and extension.head_dims == []

    def test_anything_watching_takes_the_operators(
        self, extension: Extension, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        q, k, v = tensors()
        plain = arguments.is_plain_cuda_call
        assert plain(q, k, v)
        assert not plain(torch.nn.Parameter(q), k, v)
        with torch.device("cpu"):
            assert not plain(q, k, v)
        with FlopCounterMode(display=False):
            assert not plain(q, k, v)
        seen = []
        torch.vmap(lambda x: seen.append(plain(x, x, x)) or x)(torch.stack((q, q)))
        assert seen == [False]
        monkeypatch.setattr(build_info, "extension", None)
        assert not plain(q, k, v)

    def test_rejected_calls_get_the_same_words_as_on_the_cpu(self, extension: Extension) -> None:
        q, _, _ = tensors(dtype=torch.bfloat16)
        k = torch.zeros(2, 6, 3, 8, dtype=q.dtype)
        with pytest.raises(ValueError, match=r"^k: number of heads must divide that of q \(4\)"):
            flash_attn_func(q, k, k)
