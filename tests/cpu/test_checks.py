"""Bad arguments: every one gets an error that names it, the rule and the value.

Those of packed sequences and of caches are in test_length_checks.py.
"""

from __future__ import annotations

from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

from flash_attn_cuda import (
    check_device_errors,
    flash_attn_combine,
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
)
from flash_attn_cuda.functions import interface
from flash_attn_cuda.installed import build_info


def tensors(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    shapes = ((2, 6, 4, 8), (2, 6, 2, 8), (2, 6, 2, 8))
    return [torch.randn(shape, dtype=dtype) for shape in shapes]


# -- sequences of one length -----------------------------------------------------------------------


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
    "0 dims": (bad(k=torch.tensor(1.0)), ValueError, r"^k: must have 4 dimensions"),
    "integers": (bad(q=zeros(2, 6, 4, 8, dtype=torch.int32)), TypeError, r"^q: dtype must .*int32"),
    "complex": (bad(q=zeros(2, 6, 4, 8, dtype=torch.cfloat)), TypeError, r"^q: dtype must"),
    "device k": (bad(k=zeros(*KV, device="meta")), ValueError, r"^k: must be on the device of q"),
    "device v": (bad(v=zeros(*KV, device="meta")), ValueError, r"^v: .*\(cpu\), got meta"),
    "device q": (bad(q=zeros(2, 6, 4, 8, device="meta")), ValueError, r"^k: .*\(meta\), got cpu"),
    "no slopes": (bad(alibi_slopes=1.0), TypeError, r"^alibi_slopes: must be a torch.Tensor"),
    "p str": (bad(dropout_p="0.1"), TypeError, r"^dropout_p: must be a number, got str"),
    "cap str": (bad(softcap="1"), TypeError, r"^softcap: must be a number, got str"),
    "p None": (bad(dropout_p=None), TypeError, r"^dropout_p: must be a number, got NoneType"),
    "p list": (bad(dropout_p=[]), TypeError, r"^dropout_p: must be a number, got list"),
    "p empty": (bad(dropout_p=""), TypeError, r"^dropout_p: must be a number, got str"),
    "p bool": (bad(dropout_p=False), TypeError, r"^dropout_p: must be a number, got bool"),
    "p 1-d": (bad(dropout_p=zeros(1)), TypeError, r"^dropout_p: must be a number, got Tensor"),
    "p device": (bad(dropout_p=zeros(device="meta")), TypeError,
        r"^dropout_p: .* a tensor on the CPU, as reading .* would wait .*, got one on meta"),
    "cap None": (bad(softcap=None), TypeError, r"^softcap: must be a number, got NoneType"),
    "cap bool": (bad(softcap=torch.tensor(True)), TypeError, r"^softcap: must .*got bool"),
    "bool scale": (bad(softmax_scale=True), TypeError, r"^softmax_scale: must be None or a number"),
    "complex scale": (bad(softmax_scale=1j), TypeError, r"^softmax_scale: .*, got complex"),
    "scale grad": (bad(softmax_scale=torch.tensor(0.3, requires_grad=True)), NotImplementedError,
        r"^softmax_scale: must not require grad"),
    "np p = 1": (bad(dropout_p=numpy.float32(1)), ValueError, r"^dropout_p: .*got 1.0"),
    "str scale": (bad(softmax_scale="1"), TypeError, r"^softmax_scale: must be None or a number"),
}  # fmt: skip


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


@pytest.mark.parametrize("missing", [None, torch.zeros(2), torch.zeros(3, dtype=torch.int64)])
def test_a_backward_with_dropout_needs_the_state(missing: Tensor | None) -> None:
    q, k, v = tensors(dtype=torch.float32)
    options = (0.5, 1.0, False, -1, -1, 0.0, None)
    out, lse, _, rng_state = interface._flash_attn_forward(q, k, v, *options, False)
    given = (out, q, k, v, out, lse, None, None, None, *options, False)
    interface._flash_attn_backward(*given, rng_state)
    with pytest.raises((TypeError, ValueError), match=r"^rng_state: must|^rng_state: dtype"):
        interface._flash_attn_backward(*given, missing)


# -- partial results, records ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"out_partial": zeros(3, 2, 5, 4)}, ValueError, r"^out_partial: must have 5 dimensions"),
        ({"out_partial": zeros(3, 2, 5, 4, 8).half()}, TypeError, r"^out_partial: dtype must"),
        ({"lse_partial": zeros(3, 2, 4, 5)}, ValueError, r"^lse_partial: must have shape"),
        ({"lse_partial": zeros(3, 2, 5, 4).double()}, TypeError, r"^lse_partial: dtype must"),
        ({"out": zeros(2, 5, 4, 9)}, ValueError, r"^out: must have shape"),
        ({"out": zeros(2, 5, 4, 8).int()}, TypeError, r"^out: dtype must"),
        ({"out": zeros(2, 5, 4, 8), "out_dtype": torch.half}, TypeError, r"^out_dtype: must be"),
        ({"out_dtype": torch.int32}, TypeError, r"^out_dtype: must be one of"),
        ({"out_dtype": "x"}, TypeError, r"^out_dtype: must be a torch.dtype or None, got str"),
        ({"out_partial": numpy.ones(5)}, TypeError, r"^out_partial: must be a torch.Tensor, got"),
        ({"lse_partial": None}, TypeError, r"^lse_partial: must be a torch.Tensor, got NoneType"),
        (
            {"lse_partial": zeros(3, 2, 5, 4).requires_grad_()},
            NotImplementedError,
            r"^lse_partial: ",
        ),
    ],
)
def test_bad_partial_results(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    good = {"out_partial": zeros(3, 2, 5, 4, 8), "lse_partial": zeros(3, 2, 5, 4)}
    flash_attn_combine(**good)
    with pytest.raises(error, match=message):
        flash_attn_combine(**{**good, **changes})


def test_errors_of_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing to find without a device; else the extension's record in words."""

    class Extension:
        @staticmethod
        def device_errors(device: int) -> tuple[str, int, int, int] | None:
            return ("seqused_k", 3, -5, 7) if device == 1 else None

    check_device_errors()
    check_device_errors("cpu")
    monkeypatch.setattr(build_info, "extension", Extension)
    check_device_errors(0)
    with pytest.raises(ValueError, match=r"^seqused_k: must be .*got -5 at index 3 \(limit 7\)$"):
        check_device_errors(1)
