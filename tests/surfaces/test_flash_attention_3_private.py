"""FlashAttention-3's private functions, and what its own suites do with them: gradients that repeat
(test_flash_attn_bwd_determinism.py), export and packages (test_torch_compile_and_export.py).
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from flash_attn_cuda.integrations import compat
from flash_attn_cuda.integrations import flash_attention_3 as fa3
from tests.cases.inductor import has_python_headers
from tests.surfaces.calls import (
    ON_EVERY_DEVICE,
    assert_compiles,
    assert_near,
    assert_same,
    dense,
    int32,
    normal,
)

forward, backward = fa3._flash_attn_forward, fa3._flash_attn_backward
MASKS: tuple[dict[str, Any], ...] = ({}, {"causal": True}, {"window_size": (4, 2), "softcap": 5.0})
OVER_MASKS = pytest.mark.parametrize("mask", MASKS, ids=["full", "causal", "window"])
SCALE = 0.3


def as_operator(mask: dict[str, Any]) -> dict[str, Any]:
    """The mask as operators have it."""
    left, right = mask.get("window_size", (-1, -1))
    others = {name: x for name, x in mask.items() if name != "window_size"}
    return {**others, "window_size_left": left, "window_size_right": right}


@ON_EVERY_DEVICE
@OVER_MASKS
def test_forward(mask: dict[str, Any], device: str) -> None:
    """The public function's, whether called as an operator or as before it was one."""
    q, k, v = dense(device)
    expected = fa3.flash_attn_func(q, k, v, **mask, return_attn_probs=True)
    out, lse, *partials = forward(q, k, v, **as_operator(mask))
    assert_same((out, lse), expected)
    assert [x.shape for x in partials] == [(0,), (0,)]
    target = torch.empty_like(out)
    found = forward(q, k, v, **mask, out=target)
    assert found[0] is target
    assert_same(found[:2], expected)
    window, softcap = mask.get("window_size", (-1, -1)), mask.get("softcap", 0.0)
    positional = (*[None] * 21, mask.get("causal", False), window, 0, softcap)
    assert_same(forward(q, k, v, *positional)[:2], expected)


def sequences(device: str, layout: str) -> tuple[list[Tensor], dict[str, Any]]:
    """q, k and v, and lengths as the forward has them."""
    given, used = (
        dense(device),
        {"seqused_q": int32(device, 7, 3), "seqused_k": int32(device, 5, 9)},
    )
    if layout == "dense":
        return given, {}
    if layout == "used":
        return given, used
    lengths = {"cu_seqlens_q": int32(device, 0, 7, 14), "max_seqlen_q": 7}
    if layout == "packed q":
        return [given[0].flatten(0, 1), *given[1:]], lengths | used
    lengths |= {"cu_seqlens_k": int32(device, 0, 9, 18), "max_seqlen_k": 9}
    return [x.flatten(0, 1) for x in given], lengths


@ON_EVERY_DEVICE
@OVER_MASKS
@pytest.mark.parametrize("layout", ["dense", "used", "packed q", "packed"])
def test_gradients(layout: str, mask: dict[str, Any], device: str) -> None:
    """Those of autograd, which repeat to the bit, by the calls of either form."""
    given, lengths = sequences(device, layout)
    leaves = [x.requires_grad_() for x in given]
    out, lse, *_ = forward(*leaves, **lengths, **as_operator(mask), softmax_scale=SCALE)
    dout = torch.randn_like(out)
    expected = torch.autograd.grad(out, leaves, dout)
    names = ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k")
    of_lengths = [lengths.get(name) for name in (*names, "max_seqlen_q", "max_seqlen_k")]
    call = (dout, *leaves, out, lse, *of_lengths)
    window, softcap = mask.get("window_size", (-1, -1)), mask.get("softcap", 0.0)

    def targets() -> list[Tensor]:
        return [torch.full_like(x, torch.nan) for x in leaves]

    first = targets()
    softmax_d = backward(
        *(*call, *first, SCALE, mask.get("causal", False), *window, softcap), deterministic=True
    )
    assert_near(tuple(first), expected)
    of_rows = (dout * out).double().sum(-1).transpose(-1, -2)
    if layout in ("used", "dense"):
        of_rows = of_rows if layout == "dense" else of_rows.transpose(0, 1).flatten(1)
        softmax_d = softmax_d[..., : of_rows.shape[-1]]
    torch.testing.assert_close(softmax_d.double(), of_rows, rtol=0.02, atol=0.02)
    for as_before in (
        (*call, *targets(), SCALE, mask.get("causal", False), window, softcap, True, 0),
        call,
    ):
        others = {"softmax_scale": SCALE, "deterministic": True, **mask, "window_size": window}
        *found, _ = backward(*as_before, **(others if as_before is call else {}))
        assert_same(tuple(found), tuple(first))
        assert as_before is call or found[0] is as_before[-9]


def test_wrong_targets_are_not_written() -> None:
    given, lengths = sequences("cpu", "used")
    out, lse, *_ = forward(*given, **lengths)
    used = (None, None, lengths["seqused_q"], lengths["seqused_k"], None, None)
    dq, short = torch.zeros_like(given[0]), torch.zeros_like(given[1])[:, 1:]
    with pytest.raises(ValueError, match=r"^dk: must have shape \(2, 9, 2, 16\), got"):
        backward(out, *given, out, lse, *used, dq, short, None)
    assert not dq.any()
    with pytest.raises(ValueError, match=r"^sequed_k: must have shape \(2,\), got \(1,\)"):
        backward(out, *given, out, lse, None, None, used[2], used[3][:1], None, None, dq)
    with pytest.raises(ValueError, match=r"^out_: must have shape \(2, 7, 4, 24\), got"):
        forward(*given, out_=out[:1])


@ON_EVERY_DEVICE
def test_caches_and_pages(device: str) -> None:
    q, k, v = dense(device, 2, 12)
    new = {"k": normal(device, 2, 2, 2, 16), "v": normal(device, 2, 2, 2, 24)}
    used = int32(device, 5, 9)
    caches = [(k.clone(), v.clone()) for _ in range(2)]
    expected = fa3.flash_attn_with_kvcache(
        q, *caches[0], **new, cache_seqlens=used, causal=True, return_softmax_lse=True
    )
    assert_same(
        forward(q, *caches[1], *new.values(), seqused_k=used, causal=True, num_splits=0), expected
    )
    assert_same(caches[1], caches[0])
    pages, table = (k.view(6, 4, 2, 16), v.view(6, 4, 2, 24)), int32(device, 3, 0, 5, 1, 4, 2)
    given = {"page_table": table.view(2, 3), "causal": True}
    expected = fa3.flash_attn_with_kvcache(
        q, *pages, cache_seqlens=used, **given, return_softmax_lse=True
    )
    assert_near(forward(q, *pages, seqused_k=used, **given)[:2], expected[:2])


@pytest.mark.parametrize(
    ("name", "others"),
    [("cu_seqlens_k", {"kv_batch_idx": int32("cpu", 1, 0)}),
     ("seqused_q", {"leftpad_k": int32("cpu", 1, 0)})],
)  # fmt: skip
def test_what_is_refused(name: str, others: dict[str, Any]) -> None:
    with pytest.raises(NotImplementedError, match=f"^{name}: must be None, as"):
        forward(*dense("cpu"), **{name: int32("cpu", 1, 2)}, **others)


def test_errors_have_their_names() -> None:
    q, k, v = dense("cpu")
    with pytest.raises(ValueError, match=r"^kv_batch_idx: .* got 7"):
        forward(q, k, v, kv_batch_idx=int32("cpu", 1, 7))
    with pytest.raises(TypeError, match=r"^k_new: dtype must be torch.float64, got"):
        forward(q, k, v, k[:, :1].float(), v[:, :1], seqused_k=int32("cpu", 1, 7))


# -- operators -------------------------------------------------------------------------------------


@pytest.fixture
def installed() -> Iterator[None]:
    compat.install()
    importlib.import_module("flash_attn_interface")
    yield
    compat.uninstall()
    assert not hasattr(torch.ops.flash_attn_3, "_flash_attn_forward")


@ON_EVERY_DEVICE
@pytest.mark.usefixtures("installed")
def test_under_compile(device: str) -> None:
    q, k, v = dense(device)
    ops = torch.ops.flash_attn_3
    assert_compiles(lambda q: ops._flash_attn_forward(q, k, v, causal=True)[:2], q)
    out, lse, *_ = forward(q, k, v)

    def gradients(dout: Tensor) -> tuple[Tensor, ...]:
        found = [torch.empty_like(x) for x in (q, k, v)]
        softmax_d = ops._flash_attn_backward(
            dout, q, k, v, out, lse, *[None] * 6, *found, SCALE, deterministic=True
        )
        return *found, softmax_d

    assert_compiles(gradients, out)


class Block(torch.nn.Module):
    """Projections around attention, twice."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = torch.nn.Linear(64, 192), torch.nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (2, 32)) for y in self.qkv(x).chunk(3, -1))
        q = fa3.flash_attn_func(q, k, v, causal=True)
        return self.out(forward(q, k, v, causal=True)[0].flatten(2))


@ON_EVERY_DEVICE
def test_export(device: str, tmp_path: Path) -> None:
    """Exported, with gradients, and as an ahead-of-time compiled package, which runs alone."""
    model = Block().to(device, torch.bfloat16)
    x = torch.randn(2, 40, 64).to(device, torch.bfloat16)
    expected = torch.compile(model, backend="aot_eager")(x)
    gradients = torch.autograd.grad(expected.sum(), list(model.parameters()))
    program = torch.export.export(model, (x,))
    exported = program.module()
    found = exported(x)
    assert torch.equal(found, expected)
    assert_near(torch.autograd.grad(found.sum(), list(exported.parameters())), gradients)
    if device != "cpu" and (not has_python_headers() or torch.__version__ < "2.14"):
        pytest.skip("no Python headers, or torch 2.11, whose loader crashes for any model")
    package = str(tmp_path / "model.pt2")
    with torch.no_grad():
        torch._inductor.aoti_compile_and_package(program, package_path=package)
    loaded = torch._inductor.aoti_load_package(package)
    assert_near((loaded(x),), (expected,))
