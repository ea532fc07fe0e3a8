"""What arrives at the extension, or at an operator's implementation, by whichever road a call takes
(tests/cpu/test_roads.py, tests/cpu/test_torchs_roads.py and others): recorded, and described by the
extension as kernels read it (explain_settings). Parameters are made of that alone
(csrc/torch_binding/to_params.h).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from flash_attn_cuda.call.fields import ARGUMENTS, AttentionCall, Incoming, Results, Tangents
from flash_attn_cuda.cpu.calls import forward_on_cpu, jvp_on_cpu
from flash_attn_cuda.functions import attend
from flash_attn_cuda.installed import build_info
from flash_attn_cuda.operators import attention as operators
from flash_attn_cuda.operators.support import Tensors3

Options = dict[str, Any]
Described = dict[str, Any]

HEADS, LONGEST, TOTAL = 2, 23, 40
KEPT = [name for name, said in ARGUMENTS.items() if said.part == ""]


def integers(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


OPTIONS: dict[str, Options] = {
    "none": {},
    "causal": {"causal": True},
    "scale": {"softmax_scale": 0.3},
    "window": {"window_size": (5, 3)},
    "left_window": {"window_size": (5, -1)},
    "causal_window": {"window_size": (7, 4), "causal": True},
    "softcap": {"softcap": 2.5},
    "alibi": {"alibi_slopes": torch.rand(HEADS)},
    "dropout": {"dropout_p": 0.25},
    "deterministic": {"deterministic": True},
    "sink": {"sink": torch.randn(HEADS)},
    "mask": {"attn_mask": torch.rand(LONGEST, LONGEST) > 0.3},
    "bias": {"attn_mask": torch.randn(LONGEST, LONGEST)},
    "all": {
        **{"causal": True, "softmax_scale": 0.3, "window_size": (7, 0), "softcap": 2.5},
        **{"alibi_slopes": torch.rand(HEADS), "deterministic": True, "sink": torch.randn(HEADS)},
    },
}
PACKED: Options = {
    "cu_seqlens_q": integers(0, 17, TOTAL),
    "cu_seqlens_k": integers(0, 17, TOTAL),
    "max_seqlen_q": LONGEST,
    "max_seqlen_k": LONGEST,
}
NO_MASKS = {"mask", "bias"}


def dense_inputs() -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(2, LONGEST, HEADS, 16, dtype=torch.bfloat16) for _ in "qkv"]


def packed_inputs() -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(TOTAL, HEADS, 16, dtype=torch.bfloat16) for _ in "qkv"]


class Arrivals:
    """The calls that forwards and backwards were told of, of one road."""

    def __init__(self) -> None:
        self.forward: list[AttentionCall] = []
        self.backward: list[AttentionCall] = []


class Extension:
    """Stands where the extension does, for tensors on the CPU that are taken for a GPU's. With an
    error it refuses every call.
    """

    def __init__(self, arrivals: Arrivals) -> None:
        self.arrivals = arrivals
        self.error: Exception | None = None

    @property
    def calls(self) -> list[AttentionCall]:
        return self.arrivals.forward

    def forward(self, call: AttentionCall, returns_lse: bool = True) -> Results:
        self.calls.append(call)
        if self.error is not None:
            raise self.error
        results = forward_on_cpu(call, torch.zeros(2, dtype=torch.int64))
        if call.out is None:
            return results
        return results._replace(out=call.out.copy_(results.out))

    def jvp(self, call: AttentionCall, incoming: Incoming, tangents: Tangents) -> Tensors3:
        self.calls.append(call)
        if self.error is not None:
            raise self.error
        return jvp_on_cpu(call, incoming, tangents)

    def attention(self, *arguments: Any) -> tuple[Tensor, Tensor]:
        q, k, v, softmax_scale, causal, _ = arguments
        call = AttentionCall(q, k, v, softmax_scale=softmax_scale, causal=causal)
        results = self.forward(call)
        return results.out, results.softmax_lse


@pytest.fixture
def extension(monkeypatch: pytest.MonkeyPatch) -> Extension:
    """Which plain calls of tensors on the CPU reach."""
    stand_in = Extension(Arrivals())
    monkeypatch.setattr(build_info, "extension", stand_in)
    monkeypatch.setattr(Tensor, "is_cuda", property(lambda x: x.device.type == "cpu"))
    return stand_in


@pytest.fixture
def arrivals(monkeypatch: pytest.MonkeyPatch) -> Arrivals:
    """Of the operators' implementations on the CPU."""
    seen = Arrivals()
    on_cpu, backward_on_cpu = operators.forward_on_cpu, operators.backward_on_cpu

    def forward(call: AttentionCall, rng_state: Tensor) -> Any:
        seen.forward.append(call)
        return on_cpu(call, rng_state)

    def backward(call: AttentionCall, incoming: Any) -> Any:
        seen.backward.append(call)
        return backward_on_cpu(call, incoming)

    monkeypatch.setattr(operators, "forward_on_cpu", forward)
    monkeypatch.setattr(operators, "backward_on_cpu", backward)
    return seen


def described(call: AttentionCall) -> tuple[Described, Described]:
    """(what a pass that is told of this call reads, what autograd keeps of a forward of it)."""
    extension: Any = build_info.extension
    told, kept = extension.explain_settings(call)
    return told, kept


def assert_same(found: Described, wanted: Described, names: list[str] | None = None) -> None:
    for name in list(wanted) if names is None else names:
        if name == "keeps_rounding":  # which the extension's autograd does of its own accord
            continue
        x, y = found[name], wanted[name]
        if isinstance(x, Tensor) and isinstance(y, Tensor):
            assert x.dtype == y.dtype and torch.equal(x, y), name
        else:
            assert x == y, f"{name}: {x} where an eager call says {y}"


def eagerly(
    road: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> tuple[Described, Described]:
    """(forward, backward) of the road that an eager CUDA call takes."""
    seen = Arrivals()
    real = build_info.extension
    with monkeypatch.context() as patch:
        patch.setattr(attend, "is_plain_cuda_call", lambda *tensors: True)
        patch.setattr(build_info, "extension", Extension(seen))
        with torch.no_grad():
            road()
    assert build_info.extension is real
    (call,) = seen.forward
    return described(call)


def assert_arrived(arrivals: Arrivals, forward: Described, backward: Described) -> None:
    """A sink whose gradient nobody wants is not told to an operator's backward, nor lists of rows,
    which autograd keeps for derivatives in a direction.
    """
    (call,), (of_gradients,) = arrivals.forward, arrivals.backward
    told, _ = described(call)
    assert_same(told, forward)
    told, kept = described(of_gradients)
    names = [name for name in KEPT if name not in ("sink", "block_rows")]
    assert_same(told, backward, names)
    assert_same(kept, told, names)
