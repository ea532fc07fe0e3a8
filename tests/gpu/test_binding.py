"""flash_attn_cuda._C itself: its errors, its handling of tensors, its autograd node, its plans."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from flash_attn_cuda import flash_attn_func
from flash_attn_cuda.call.fields import AttentionCall
from flash_attn_cuda.installed import build_info
from flash_attn_cuda.report.explain import call_of_shapes, explain
from tests.cases import binding
from tests.cases.harness import make_case, skip_without_row

pytestmark = [pytest.mark.gpu, pytest.mark.cuda_only]

BATCH, SEQLEN, HEADS, HEAD_DIM = 2, 40, 4, 64


@pytest.fixture
def extension() -> Any:
    skip_without_row(make_case(head_dim=HEAD_DIM, causal=True))
    return build_info.extension


def tensor(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape or (BATCH, SEQLEN, HEADS, HEAD_DIM), device="cuda").to(dtype)


def forward(extension: Any, q: Tensor, k: Tensor, v: Tensor, **changes: Any) -> list[Tensor]:
    options = {
        "out": None,
        "alibi_slopes": None,
        "p_dropout": 0.0,
        "softmax_scale": 0.125,
        "is_causal": True,
        "window_left": -1,
        "window_right": -1,
        "softcap": 0.0,
        "return_softmax": False,
        "unused_generator": None,
    }
    return extension.fwd(q, k, v, **{**options, **changes})


def backward(extension: Any, dout: Tensor, *saved: Tensor, **changes: Any) -> list[Tensor]:
    """bwd, or, with a dlse, which FlashAttention-2's function does not take, backward."""
    if "dlse" in changes:
        q, k, v, out, lse = saved
        options = {"softmax_scale": 0.125, "causal": True, "incoming": changes}
        return binding.backward(extension, q, k, v, dout=dout, results=(out, lse), **options)
    options = {
        **dict.fromkeys(("dq", "dk", "dv", "alibi_slopes", "unused_generator", "rng_state")),
        "p_dropout": 0.0,
        "softmax_scale": 0.125,
        "is_causal": True,
        "window_left": -1,
        "window_right": -1,
        "softcap": 0.0,
        "deterministic": False,
    }
    return extension.bwd(dout, *saved, **{**options, **changes})


# -- errors ----------------------------------------------------------------------------------------

BAD_INPUTS = {
    "q on the CPU": (ValueError, "q: must be a CUDA tensor, got one on cpu", {"q": torch.zeros(1)}),
    "k on the CPU": (ValueError, "k: must be a CUDA tensor, got one on cpu", {"k": torch.zeros(1)}),
    "fp32": (TypeError, "q: dtype must be float16 or bfloat16, got torch.float32",
        {"q": torch.float32}),
    "head_dim 59": (ValueError,
        r"q: last dimension \(head_dim\) must be a multiple of 8 on CUDA, got 59",
        {"q": (2, 40, 4, 59), "k": (2, 40, 4, 59)}),
    "v head_dim 60": (ValueError,
        r"v: last dimension \(head_dim_v\) must be a multiple of 8 on CUDA, got 60",
        {"v": (2, 40, 4, 60)}),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_INPUTS)
def test_bad_inputs(extension: Any, name: str) -> None:
    """Argument, rule and value are named. A change is a shape, a dtype or the tensor itself."""
    error, message, changes = BAD_INPUTS[name]
    tensors = {"q": tensor(), "k": tensor(), "v": tensor()}
    for argument, change in changes.items():
        if isinstance(change, torch.dtype):
            tensors[argument] = tensor(dtype=change)
        else:
            tensors[argument] = tensor(*change) if isinstance(change, tuple) else change
    with pytest.raises(error, match=message):
        extension.attention(*tensors.values(), None, False)
    with pytest.raises(error, match=message):
        forward(extension, **tensors)


@pytest.mark.parametrize(
    ("argument", "value", "error"),
    [
        ("p_dropout", 1.0, ValueError),
        ("softmax_scale", math.nan, ValueError),
        ("softcap", 1e-40, ValueError),
        ("unused_generator", torch.Generator(), NotImplementedError),
    ],
)
def test_bad_options(extension: Any, argument: str, value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=f"^{argument}: .*must (be|have)"):
        forward(extension, tensor(), tensor(), tensor(), **{argument: value})


def test_window_arguments(extension: Any) -> None:
    q, k, v = tensor(), tensor(), tensor()
    causal = forward(extension, q, k, v)[0]
    assert torch.equal(forward(extension, q, k, v, is_causal=False, window_right=0)[0], causal)
    assert torch.equal(forward(extension, q, k, v, window_right=7)[0], causal)  # causal wins
    assert torch.equal(forward(extension, q, k, v, window_left=2**40)[0], causal)
    assert not torch.equal(forward(extension, q, k, v, is_causal=False, window_right=7)[0], causal)


@pytest.mark.parametrize("return_softmax", [False, True])
def test_what_dropout_returns(extension: Any, return_softmax: bool) -> None:
    """rng_state, and probabilities on demand; without dropout both are empty."""
    skip_without_row(make_case(head_dim=HEAD_DIM, causal=True, dropout_p=0.5), backward=False)
    q, k, v = tensor(), tensor(), tensor()[:, :-1]
    k = k[:, :-1]
    for p in (0.0, 0.5):
        *_, s_dmask, rng_state = forward(
            extension, q, k, v, p_dropout=p, return_softmax=return_softmax
        )
        shape = (BATCH, HEADS, SEQLEN, SEQLEN - 1) if return_softmax and p > 0.0 else (0,)
        assert s_dmask.shape == shape and s_dmask.dtype == q.dtype
        assert torch.signbit(s_dmask).any() == (s_dmask.numel() > 0)
        assert rng_state.dtype == torch.int64 and rng_state.numel() == (2 if p > 0.0 else 0)


@pytest.mark.parametrize(
    ("argument", "value", "error"),
    [
        ("dout", (2, 40, 4, 32), ValueError),
        ("out", torch.half, TypeError),
        ("softmax_lse", torch.half, TypeError),
        ("softmax_lse", (2, 4, 41), ValueError),
        ("dlse", (2, 4), ValueError),
        ("dk", (2, 41, 4, 64), ValueError),
        ("dv", torch.zeros(BATCH, SEQLEN, HEADS, HEAD_DIM, dtype=torch.bfloat16), ValueError),
    ],
)
def test_bad_gradients(extension: Any, argument: str, value: Any, error: type[Exception]) -> None:
    q, k, v = tensor(), tensor(), tensor()
    out, lse, *_ = forward(extension, q, k, v)
    named = {"dout": tensor(), "q": q, "k": k, "v": v, "out": out, "softmax_lse": lse}
    if isinstance(value, torch.dtype):
        value = named[argument].to(value)
    elif isinstance(value, tuple):
        value = tensor(*value, dtype=torch.float32 if "lse" in argument else torch.bfloat16)
    if argument in named:
        named[argument], changes = value, {}
    else:
        changes = {argument: value}
    with pytest.raises(error, match=f"^{argument}: "):
        backward(extension, *named.values(), **changes)


# -- tensors as they come --------------------------------------------------------------------------


def test_an_output_that_names_memory_twice_is_refused(extension: Any) -> None:
    with pytest.raises(RuntimeError, match="single memory location"):
        forward(extension, tensor(), tensor(), tensor(), out=tensor()[:1].expand(BATCH, -1, -1, -1))


def test_writing_a_given_output_counts_as_a_change(extension: Any) -> None:
    """Autograd elsewhere must see that a tensor it saved was overwritten."""
    out = tensor()
    before = out._version
    forward(extension, tensor(), tensor(), tensor(), out=out)
    assert out._version == before + 1


def test_a_refused_backward_changes_nothing(extension: Any) -> None:
    """All targets are checked before one counts as written."""
    q, k, v, dout, dq = (tensor() for _ in range(5))
    out, lse, *_ = forward(extension, q, k, v)
    version, before = dq._version, dq.clone()
    with pytest.raises(ValueError, match=r"^dv: "):
        backward(extension, dout, q, k, v, out, lse, dq=dq, dv=tensor()[:1])
    assert dq._version == version and torch.equal(dq, before)


# -- the autograd node -----------------------------------------------------------------------------


def leaves() -> list[Tensor]:
    return [tensor().requires_grad_() for _ in range(3)]


def test_no_graph_without_a_need_for_one(extension: Any) -> None:
    assert extension.attention(tensor(), tensor(), tensor(), None, True)[0].grad_fn is None
    with torch.no_grad():
        assert extension.attention(*leaves(), None, True)[0].grad_fn is None
    with torch.inference_mode():
        assert extension.attention(*leaves(), None, True)[0].is_inference()


@pytest.mark.parametrize("through", ["out", "lse", "both"])
def test_gradients_are_those_of_backward(extension: Any, through: str) -> None:
    q, k, v = leaves()
    out, lse = extension.attention(q, k, v, 0.125, True)
    dout = tensor() if through != "lse" else None
    dlse = torch.randn_like(lse) if through != "out" else None
    pairs = [pair for pair in ((out, dout), (lse, dlse)) if pair[1] is not None]
    actual = torch.autograd.grad([x for x, _ in pairs], (q, k, v), [x for _, x in pairs])
    zeros = torch.zeros_like(out)
    saved = [x.detach() for x in (q, k, v, out, lse)]
    call = AttentionCall(*saved[:3], softmax_scale=0.125, causal=True, keeps_rounding=True)
    given = {"dlse": dlse, "out_rounding": extension.forward(call).out_rounding}
    expected = backward(extension, zeros if dout is None else dout, *saved, **given)
    assert torch.equal(actual[1], expected[1]) and torch.equal(actual[2], expected[2])
    torch.testing.assert_close(actual[0], expected[0])  # dq sums in any order


@pytest.mark.parametrize("function", ["attention", "forward"])
def test_a_graph_without_softmax_lse_has_the_same_gradients(extension: Any, function: str) -> None:
    q, k, v = leaves()
    dout = tensor()

    def run(returns_lse: bool) -> tuple[Tensor, Tensor | None, tuple[Tensor, ...]]:
        if function == "attention":
            out, lse = extension.attention(q, k, v, 0.125, True, returns_lse)
        else:
            call = AttentionCall(q, k, v, softmax_scale=0.125, causal=True)
            out, lse, *_ = extension.forward(call, returns_lse)
        return out, lse, torch.autograd.grad(out, (q, k, v), dout)

    out, lse, expected = run(True)
    alone, none, actual = run(False)
    assert lse is not None and none is None
    assert torch.equal(alone, out)
    assert torch.equal(actual[1], expected[1]) and torch.equal(actual[2], expected[2])
    torch.testing.assert_close(actual[0], expected[0])  # dq sums in any order


def test_gradients_of_a_bias_and_a_sink_without_softmax_lse() -> None:
    q, k, v = leaves()
    bias = tensor(1, 1, SEQLEN, SEQLEN).requires_grad_()
    sink = torch.randn(HEADS, device="cuda", requires_grad=True)
    masks = {"attn_mask": bias, "sink": sink}
    dout = tensor()
    alone = flash_attn_func(q, k, v, **masks)
    out, lse, _ = flash_attn_func(q, k, v, return_attn_probs=True, **masks)
    assert torch.equal(alone, out) and lse.requires_grad
    expected = torch.autograd.grad(out, (bias, sink, k), dout)
    actual = torch.autograd.grad(alone, (bias, sink, k), dout)
    torch.testing.assert_close(actual, expected)


def test_only_wanted_gradients_are_returned(extension: Any) -> None:
    q, k, v = tensor(), tensor().requires_grad_(), tensor()
    extension.attention(q, k, v, None, False)[0].sum().backward()
    assert q.grad is None and v.grad is None and k.grad is not None


def test_the_rules_of_autograd_hold(extension: Any) -> None:
    q, k, v = leaves()
    out, _ = extension.attention(q, k, v, None, False)
    out.sum().backward()
    with pytest.raises(RuntimeError, match="a second time"):
        out.sum().backward()

    changed = k * 1
    out, _ = extension.attention(q, changed, v, None, False)
    changed.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()

    out, _ = extension.attention(q, k, v, None, False)
    (gradient,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    (second,) = torch.autograd.grad(gradient.sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="third derivatives"):
        second.sum().backward()


def test_dual_tensors_are_refused(extension: Any) -> None:
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(tensor(), tensor())
        with pytest.raises(NotImplementedError, match=r"k: must not carry a forward-mode gradient"):
            extension.attention(tensor(), dual, tensor(), None, False)
        out, lse = extension.attention(tensor().requires_grad_(), tensor(), tensor(), None, False)
        for name, x in (("dout", out), ("dlse", lse)):
            dual = torch.autograd.forward_ad.make_dual(torch.ones_like(x), torch.ones_like(x))
            with pytest.raises(
                NotImplementedError, match=rf"{name}: must not carry a forward-mode"
            ):
                x.backward(dual, retain_graph=True)


# -- plans -----------------------------------------------------------------------------------------


def test_explain_names_a_compiled_instance(extension: Any) -> None:
    shapes = {
        "dtype": "bf16",
        "head_dim": HEAD_DIM,
        "batch_size": 1,
        "seqlen_q": 2048,
        "seqlen_k": 1024,
        "num_heads_q": 8,
        "num_heads_k": 2,
        "causal": True,
    }
    plan = explain("forward", call_of_shapes(**shapes))
    assert plan["instance"] in extension.forward_instances()
    tiles = -(-2048 // plan["config"]["block_m"])
    assert plan["schedule"]["num_tiles"] == tiles and plan["schedule"]["num_batch_heads"] == 8
    # CTAs of Hopper's kernels may be fewer, and walk the tiles.
    is_sm80 = plan["config"]["family"] == "sm80"
    assert plan["grid"] == 8 * tiles if is_sm80 else 0 < plan["grid"] <= 8 * tiles
    assert plan["config"]["mask"] == "windowed" and plan["workspace_bytes"] == 0

    plan = explain("backward", call_of_shapes(**shapes), torch.cuda.current_device())
    assert plan["instance"] in extension.backward_instances()
    tiles = -(-1024 // plan["config"]["block_n"])
    schedule = plan["schedule"]
    assert schedule["num_tiles"] == tiles
    assert schedule["num_batch_heads"] == 2 * plan["dkdv_splits"]
    is_sm80 = plan["config"]["family"] == "sm80"
    assert plan["grid"] == 2 * plan["dkdv_splits"] * tiles if is_sm80 else plan["grid"] > 0
    assert plan["workspace_bytes"] >= 8 * 2048 * (HEAD_DIM + 1) * 4

    with pytest.raises(ValueError, match="dtype: must be 'fp16' or 'bf16', got 'fp64'"):
        call_of_shapes(**{**shapes, "dtype": "fp64"})
    with pytest.raises(ValueError, match=r"^q: last dimension .* from 1 to 512, got 1024"):
        explain("forward", call_of_shapes(**{**shapes, "head_dim": 1024}))


def test_build_record_lists_the_instances_in_order(extension: Any) -> None:
    record = json.loads(extension.build_record())
    for kernel_pass in ("forward", "backward"):
        names = [row["name"] for row in record["instances"] if row["pass"] == kernel_pass]
        assert names == getattr(extension, f"{kernel_pass}_instances")()
