"""The public functions: FlashAttention-2's signatures, good and bad arguments, routes taken."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from reference import attention
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import flash_attn_cuda
from flash_attn_cuda import (
    build_info,
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    interface,
)

TRAINING = (
    "dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, "
    "alibi_slopes=None, deterministic=False, return_attn_probs=False"
)
LENGTHS = "cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k"
MASK = "causal, window_size_left, window_size_right, softcap, alibi_slopes"
BACKWARD = "dout, q, k, v, out, softmax_lse, dq, dk, dv"

SIGNATURES = {
    "flash_attn_func": f"q, k, v, {TRAINING}",
    "flash_attn_kvpacked_func": f"q, kv, {TRAINING}",
    "flash_attn_qkvpacked_func": f"qkv, {TRAINING}",
    "flash_attn_varlen_func": f"q, k, v, {LENGTHS}, {TRAINING}, block_table=None",
    "flash_attn_varlen_kvpacked_func": f"q, kv, {LENGTHS}, {TRAINING}",
    "flash_attn_varlen_qkvpacked_func": f"qkv, cu_seqlens, max_seqlen, {TRAINING}",
    "flash_attn_with_kvcache": (
        "q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, "
        "cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, block_table=None, "
        "softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, "
        "rotary_interleaved=True, alibi_slopes=None, num_splits=0, return_softmax_lse=False"
    ),
    "_flash_attn_forward": f"q, k, v, dropout_p, softmax_scale, {MASK}, return_softmax",
    "_flash_attn_varlen_forward": (
        f"q, k, v, {LENGTHS}, dropout_p, softmax_scale, causal, window_size_left=-1, "
        "window_size_right=-1, softcap=0.0, alibi_slopes=None, return_softmax=False, "
        "block_table=None, leftpad_k=None, seqused_k=None, zero_tensors=False, num_splits=0"
    ),
    # dlse is this package's own addition.
    "_flash_attn_backward": (
        f"{BACKWARD}, dropout_p, softmax_scale, {MASK}, deterministic, rng_state=None, dlse=None"
    ),
    "_flash_attn_varlen_backward": (
        f"{BACKWARD}, {LENGTHS}, dropout_p, softmax_scale, {MASK}, deterministic, "
        "rng_state=None, zero_tensors=False"
    ),
}


def tensors(
    seqlen_q: int = 6, seqlen_k: int = 6, dtype: torch.dtype = torch.float64
) -> list[Tensor]:
    shapes = ((2, seqlen_q, 4, 8), (2, seqlen_k, 2, 8), (2, seqlen_k, 2, 8))
    return [torch.randn(shape, dtype=dtype) for shape in shapes]


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures_are_those_of_flash_attention_2(name: str) -> None:
    parameters = inspect.signature(getattr(interface, name)).parameters.values()
    assert all(p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD for p in parameters)
    shown = ", ".join(
        p.name if p.default is inspect.Parameter.empty else f"{p.name}={p.default!r}"
        for p in parameters
    )
    assert shown == SIGNATURES[name]
    assert inspect.getdoc(getattr(interface, name))


def test_package_exports() -> None:
    public = {name for name in SIGNATURES if not name.startswith("_")}
    assert public <= set(flash_attn_cuda.__all__)


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("dropout_p", 0.1),
        ("window_size", (3, 0)),
        ("window_size", (-1, 2)),
        ("window_size", (0, -1)),
        ("window_size", torch.tensor([4, 4])),
        ("softcap", 30.0),
        ("alibi_slopes", torch.ones(4)),
        ("deterministic", True),
    ],
    ids=str,
)
def test_later_arguments_are_refused_by_name(argument: str, value: Any) -> None:
    q, k, v = tensors()
    calls = (
        lambda: flash_attn_func(q, k, v, **{argument: value}),
        lambda: flash_attn_kvpacked_func(q, torch.stack((k, v), 2), **{argument: value}),
        lambda: flash_attn_qkvpacked_func(torch.stack((q, q, q), 2), **{argument: value}),
    )
    for call in calls:
        with pytest.raises(NotImplementedError, match=rf"^{argument}: "):
            call()


@pytest.mark.parametrize(
    ("name", "argument"),
    [
        ("flash_attn_varlen_func", "cu_seqlens_q"),
        ("flash_attn_varlen_kvpacked_func", "cu_seqlens_q"),
        ("flash_attn_varlen_qkvpacked_func", "cu_seqlens"),
        ("flash_attn_with_kvcache", "k_cache"),
        ("_flash_attn_varlen_forward", "cu_seqlens_q"),
        ("_flash_attn_varlen_backward", "cu_seqlens_q"),
    ],
)
def test_later_functions_are_refused_by_name(name: str, argument: str) -> None:
    function = getattr(interface, name)
    parameters = inspect.signature(function).parameters.values()
    required = [None for p in parameters if p.default is inspect.Parameter.empty]
    with pytest.raises(NotImplementedError, match=rf"^{argument}: "):
        function(*required)


@pytest.mark.parametrize(
    "option", ["dropout_p", "softcap", "alibi_slopes", "window", "return_softmax"]
)
def test_operator_refuses_later_arguments(option: str) -> None:
    given: dict[str, Any] = {
        "dropout_p": 0.0, "softmax_scale": 1.0, "causal": False, "window_size_left": -1,
        "window_size_right": -1, "softcap": 0.0, "alibi_slopes": None, "return_softmax": False,
    }  # fmt: skip
    given |= {
        "dropout_p": {"dropout_p": 0.5},
        "softcap": {"softcap": 1.0},
        "alibi_slopes": {"alibi_slopes": torch.ones(4)},
        "window": {"window_size_left": 2},
        "return_softmax": {"return_softmax": True},
    }[option]
    with pytest.raises(NotImplementedError, match=option):
        interface._flash_attn_forward(*tensors(), **given)


@pytest.mark.parametrize(
    ("causal", "window_size", "is_causal"),
    [
        (False, (-1, -1), False),
        (True, (-1, -1), True),
        (False, (-1, 0), True),
        (False, [-7, -2], False),
        (False, (None, None), False),
        (False, (None, 0), True),
        (True, (-1, 5), True),  # causal sets the right end
        (False, torch.tensor([-1, 0]), True),
        (1, torch.tensor([-1, -1]), True),
    ],
    ids=str,
)
def test_windows_that_are_full_or_causal(causal: bool, window_size: Any, is_causal: bool) -> None:
    q, k, v = tensors(5, 9)
    expected, _ = attention(q, k, v, causal=is_causal)
    actual = flash_attn_func(q, k, v, causal=causal, window_size=window_size)
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("window_size", [3, (1,), (1, 2, 3), ("a", "b"), None], ids=str)
def test_windows_that_are_none(window_size: Any) -> None:
    with pytest.raises(TypeError, match=r"^window_size: must be two integers"):
        flash_attn_func(*tensors(), window_size=window_size)


def bad(q: Any = None, k: Any = None, v: Any = None, **options: Any) -> dict[str, Any]:
    """The arguments of a good call with some replaced."""
    good = dict(zip("qkv", tensors(dtype=torch.float32), strict=True))
    given = {name: x for name, x in (("q", q), ("k", k), ("v", v)) if x is not None}
    return {**good, **given, **options}


def zeros(*shape: int, **options: Any) -> Tensor:
    return torch.zeros(shape, **options)


KV = (2, 6, 2, 8)
BAD_CALLS = {
    "a list": (bad(q=[1.0]), TypeError, r"^q: must be a torch.Tensor, got list"),
    "a number": (bad(k=3), TypeError, r"^k: must be a torch.Tensor, got int"),
    "sparse": (bad(k=zeros(*KV).to_sparse()), TypeError, r"^k: must be a dense tensor, got layout"),
    "3 dims": (bad(q=zeros(6, 4, 8)), ValueError, r"^q: must have 4 dimensions .*\(6, 4, 8\)"),
    "5 dims": (bad(v=zeros(1, *KV)), ValueError, r"^v: must have 4 dimensions"),
    "0 dims": (bad(k=torch.tensor(1.0)), ValueError, r"^k: must have 4 dimensions"),
    "integers": (bad(q=zeros(2, 6, 4, 8, dtype=torch.int32)), TypeError, r"^q: dtype must .*int32"),
    "complex": (bad(q=zeros(2, 6, 4, 8, dtype=torch.cfloat)), TypeError, r"^q: dtype must"),
    "dtypes k": (bad(k=zeros(*KV).half()), TypeError, r"^k: must have the dtype of q .*float16"),
    "dtypes v": (bad(v=zeros(*KV).double()), TypeError, r"^v: must have the dtype of q"),
    "device k": (bad(k=zeros(*KV, device="meta")), ValueError, r"^k: must be on the device of q"),
    "device v": (bad(v=zeros(*KV, device="meta")), ValueError, r"^v: .*\(cpu\), got meta"),
    "device q": (bad(q=zeros(2, 6, 4, 8, device="meta")), ValueError, r"^k: .*\(meta\), got cpu"),
    "batch": (
        bad(k=zeros(3, 6, 2, 8), v=zeros(3, 6, 2, 8)),
        ValueError,
        r"^k: batch .*\(2\), got 3",
    ),
    "head_dim k": (bad(k=zeros(2, 6, 2, 16)), ValueError, r"^k: last dimension .*\(8\), got 16"),
    "head_dim v": (bad(v=zeros(2, 6, 2, 16)), ValueError, r"^v: must have the shape of k"),
    "seqlen v": (bad(v=zeros(2, 5, 2, 8)), ValueError, r"^v: must have the shape of k"),
    "heads v": (bad(v=zeros(2, 6, 4, 8)), ValueError, r"^v: must have the shape of k"),
    "heads": (
        bad(k=zeros(2, 6, 3, 8), v=zeros(2, 6, 3, 8)),
        ValueError,
        r"^k: number of heads .*got 3",
    ),
    "Hk > Hq": (bad(k=zeros(2, 6, 8, 8), v=zeros(2, 6, 8, 8)), ValueError, r"^k: number of heads"),
    "Hk = 0": (
        bad(k=zeros(2, 6, 0, 8), v=zeros(2, 6, 0, 8)),
        ValueError,
        r"^k: .*at least one head",
    ),
    "Hq = 0": (bad(q=zeros(2, 6, 0, 8)), ValueError, r"^q: must have at least one head"),
    "D = 0": (bad(q=zeros(2, 6, 4, 0)), ValueError, r"^q: last dimension .*from 1 to 256, got 0"),
    "D > 256": (bad(q=zeros(2, 6, 4, 264)), ValueError, r"^q: last dimension .*256, got 264"),
    "NaN scale": (bad(softmax_scale=float("nan")), ValueError, r"^softmax_scale: .*finite.*nan"),
    "inf scale": (bad(softmax_scale=float("-inf")), ValueError, r"^softmax_scale: .*finite.*inf"),
    "big scale": (bad(softmax_scale=1e39), ValueError, r"^softmax_scale: .*finite in float32"),
    "str scale": (bad(softmax_scale="1"), TypeError, r"^softmax_scale: must be None or a number"),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_bad_calls(name: str) -> None:
    arguments, error, message = BAD_CALLS[name]
    with pytest.raises(error, match=message):
        flash_attn_func(**arguments)


def test_bad_packed_tensors() -> None:
    q, k, _ = tensors()
    qkv = "qkv: must have shape (batch, seqlen, 3, heads, head_dim), got "
    kv = "kv: must have shape (batch, seqlen_k, 2, heads_k, head_dim), got "
    for call, message in (
        (lambda: flash_attn_qkvpacked_func(q), f"{qkv}(2, 6, 4, 8)"),
        (lambda: flash_attn_qkvpacked_func(torch.stack((q, q), 2)), f"{qkv}(2, 6, 2, 4, 8)"),
        (lambda: flash_attn_kvpacked_func(q, k), f"{kv}(2, 6, 2, 8)"),
        (lambda: flash_attn_kvpacked_func(q, torch.stack((k, k, k), 2)), f"{kv}(2, 6, 3, 2, 8)"),
    ):
        with pytest.raises(ValueError) as caught:
            call()
        assert str(caught.value) == message
    with pytest.raises(TypeError, match=r"^kv: must be a torch.Tensor, got tuple"):
        flash_attn_kvpacked_func(q, (k, k))
    with pytest.raises(ValueError, match=r"^kv\[:, :, 0\]: batch must be that of q"):
        flash_attn_kvpacked_func(q, torch.zeros(3, 6, 2, 2, 8, dtype=q.dtype))


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("dout", torch.zeros(2, 6, 4, 9), ValueError),
        ("out", torch.zeros(2, 6, 4, 8, dtype=torch.float16), TypeError),
        ("softmax_lse", torch.zeros(2, 6, 4), ValueError),
        ("softmax_lse", torch.zeros(2, 4, 6, dtype=torch.float64), TypeError),
        ("dq", torch.zeros(2, 5, 4, 8), ValueError),
        ("dk", torch.zeros(2, 6, 4, 8), ValueError),
        ("dv", torch.zeros(2, 6, 2, 8, device="meta"), ValueError),
        ("dlse", torch.zeros(2, 4, 7), ValueError),
    ],
    ids=str,
)
def test_bad_backward_calls(name: str, value: Tensor, error: type[Exception]) -> None:
    q, k, v = tensors(dtype=torch.float32)
    given: dict[str, Any] = {
        "dout": q, "q": q, "k": k, "v": v, "out": q, "softmax_lse": torch.zeros(2, 4, 6),
        "dq": torch.empty_like(q), "dk": torch.empty_like(k), "dv": torch.empty_like(v),
        "dropout_p": 0.0, "softmax_scale": 1.0, "causal": False, "window_size_left": -1,
        "window_size_right": -1, "softcap": 0.0, "alibi_slopes": None, "deterministic": False,
    }  # fmt: skip
    interface._flash_attn_backward(**given)
    with pytest.raises(error, match=rf"^{name}: "):
        interface._flash_attn_backward(**{**given, name: value})


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
            self, q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None, causal: bool
        ) -> tuple[Tensor, Tensor]:
            self.head_dims.append(q.shape[-1])
            if k.shape[2] == 3:
                raise ValueError("the extension's own words")
            return attention(q, k, v, softmax_scale=softmax_scale, causal=causal)

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

    def test_head_dim_is_padded(self, extension: Extension) -> None:
        q, k, v = (x[..., :5].detach().requires_grad_() for x in tensors())
        out = flash_attn_func(q, k, v)
        expected, _ = attention(q, k, v)
        torch.testing.assert_close(out, expected)
        assert extension.head_dims == [8]
        grads = (torch.autograd.grad(x.sin().sum(), (q, k, v)) for x in (out, expected))
        torch.testing.assert_close(*grads)

    def test_anything_watching_takes_the_operators(
        self, extension: Extension, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        q, k, v = tensors()
        plain = interface._is_plain_cuda_call
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
