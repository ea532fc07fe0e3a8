"""What calls over keys and values of FP8 (e4m3) refuse, on the CPU backend."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

import flash_attn_cuda as ours
from flash_attn_cuda import flash_attn_varlen_func, flash_attn_with_kvcache
from tests.cases.fp8_cache import (
    E4M3,
    a_cache,
    packed_inputs,
)
from tests.cases.masked_operators import int32

pytestmark = pytest.mark.usefixtures("one_thread")

# -- what is refused -------------------------------------------------------------------------------


def bits(x: Tensor) -> Tensor:
    """NaN are equal, too."""
    return x.flatten().contiguous().view(torch.uint8)


TOKEN_SCALES = {f"{name}_descale": torch.ones(2, 9, 2) for name in "kv"}
QUANTIZE: dict[str, Any] = {**TOKEN_SCALES, "quantize": "token"}
WIDE = torch.zeros(2, 9, 2, 32, dtype=torch.bfloat16)
NO_SCALES = {"k_descale": None, "v_descale": None}
NEW = {"k": torch.zeros(2, 1, 2, 32).to(E4M3), "v": torch.zeros(2, 1, 2, 16).to(E4M3)}
BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "no number": ({"k_descale": "1"}, TypeError, "k_descale: must be a number .*, got str"),
    "a bool": ({"k_descale": True}, TypeError, "k_descale: must be a number or a tensor, got bool"),
    "a scale of q": ({"q_descale": 1.0}, ValueError, "q_descale: must be None where q is not of"),
    "mixed the other way": ({"k_cache": WIDE, "k_descale": None}, TypeError,
        r"v_cache: must have the dtype of k_cache \(torch.bfloat16\), got torch.float8_e4m3fn"),
    "e5m2": ({"k_cache": WIDE.to(torch.float8_e5m2), "k_descale": None}, TypeError,
        "k_cache: dtype must be one of .*float8_e4m3fn on cpu, got torch.float8_e5m2"),
    "q of e5m2": ({"q": torch.zeros(2, 1, 4, 32).to(torch.float8_e5m2)}, TypeError,
        "q: dtype must be one of .* got torch.float8_e5m2"),
    "q without a scale": ({"q": torch.zeros(2, 1, 4, 32).to(E4M3)}, ValueError,
        "q_descale: must be given where q is of torch.float8_e4m3fn, got None"),
    "q alone": ({"q": torch.zeros(2, 1, 4, 32).to(E4M3), "k_cache": WIDE, "v_cache": WIDE,
        "k_descale": None, "v_descale": None, "q_descale": 1.0}, TypeError,
        "q: must be of torch.float8_e4m3fn only where k_cache is, got torch.bfloat16"),
    "quantize of another kind": (
        {"quantize": "head"}, ValueError, "quantize: must be None or 'token', got 'head'",
    ),
    "new keys without values": (
        {"k": NEW["k"]}, TypeError, "v: dtype must be torch.float8_e4m3fn, got torch.bfloat16",
    ),
    "new values without keys": (
        {"v": NEW["v"]}, TypeError, r"v: dtype must be torch.bfloat16, got .*e4m3fn",
    ),
    "new keys for 16 bits": (
        NEW | NO_SCALES | {"k_cache": WIDE, "v_cache": WIDE[..., :16]},
        TypeError,
        r"k: dtype must be torch.bfloat16, got torch.float8_e4m3fn",
    ),
    "bytes": ({"v_cache": torch.zeros(2, 9, 2, 16, dtype=torch.uint8)}, TypeError,
        r"v_cache: must be of torch.float8_e4m3fn where v_descale is given, as "
        r"\.view\(torch.float8_e4m3fn\) is, got torch.uint8"),
    "out of another dtype": (
        {"out": torch.zeros(2, 1, 4, 16)}, TypeError, "out: dtype must be torch.bfloat16",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments(name: str) -> None:
    """Nothing is written."""
    changes, kind, message = BAD[name]
    given = {**a_cache(new=1), **changes}
    tensors = {name: x for name, x in given.items() if isinstance(x, Tensor) and not x.is_meta}
    before = {name: x.clone() for name, x in tensors.items()}
    with pytest.raises(kind, match=f"^{message}"):
        flash_attn_with_kvcache(**given)
    for name, x in tensors.items():
        assert torch.equal(bits(x), bits(before[name])), name


PACKED_BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "per token": ({"k_descale": torch.ones(12, 2)}, ValueError,
        r"k_descale: must have shape \(2,\) or \(2, 2\), got \(12, 2\)"),
}  # fmt: skip


@pytest.mark.parametrize("name", PACKED_BAD)
def test_bad_arguments_of_packed_sequences(name: str) -> None:
    changes, kind, message = PACKED_BAD[name]
    with pytest.raises(kind, match=f"^{message}"):
        flash_attn_varlen_func(**{**packed_inputs(), "k_descale": 1.0, "v_descale": 1.0, **changes})


def test_other_functions_do_not_take_it() -> None:
    q, k = torch.zeros(2, 5, 2, 16), torch.zeros(2, 5, 2, 16).to(E4M3)
    with pytest.raises(TypeError, match=r"^k: dtype must be one of float16.* got .*float8_e4m3fn"):
        ours.flash_attn_func(q, k, k)
    kv = torch.zeros(10, 2, 2, 16).to(E4M3)
    with pytest.raises(ValueError, match=r"^k_descale: must be given where kv\[:, 0\] is of"):
        ours.flash_attn_varlen_kvpacked_func(
            q.flatten(0, 1), kv, int32(0, 5, 10), int32(0, 5, 10), 5, 5
        )


def assert_refused_in_the_backward(attend: Any, leaf: Tensor, message: str) -> None:
    """By the name of what has no gradient; the forward is that without one."""
    for x in attend():
        with pytest.raises(NotImplementedError, match=message):
            torch.autograd.grad(x.sum(), leaf, retain_graph=True)
    with torch.no_grad():
        assert not attend()[0].requires_grad
        assert torch.equal(attend()[0], x) or torch.equal(attend()[1], x)


@pytest.mark.parametrize("name", ["q", "k_descale", "v_descale", "sink", "k", "v_cache"])
def test_gradients_of_an_append_are_refused(name: str) -> None:
    made = {**a_cache(new=1), "sink": torch.zeros(4)}
    made[name] = made[name].clone().requires_grad_()
    with pytest.raises(NotImplementedError, match=f"^{name}: must not require grad"):
        flash_attn_with_kvcache(**made)
    with torch.no_grad():
        flash_attn_with_kvcache(**made)


@pytest.mark.parametrize("name", ["q", "k_descale", "sink", "v_cache"])
def test_gradients_over_a_cache_are_refused_in_the_backward(name: str) -> None:
    made = {**a_cache(), "sink": torch.zeros(4), "return_softmax_lse": True}
    calls = {f"of {E4M3}": made}
    if name != "k_descale":
        calls["attended to"] = made | NO_SCALES | {"k_cache": WIDE, "v_cache": WIDE}
    for rule, given in calls.items():
        leaf = given[name].clone().requires_grad_()
        assert_refused_in_the_backward(
            lambda given=given, leaf=leaf: flash_attn_with_kvcache(**given | {name: leaf}),
            leaf,
            f"^k_cache: must not be {rule} in a call whose gradients are wanted",
        )


@pytest.mark.parametrize("name", ["q", "k", "v", "k_descale", "v_descale", "sink"])
def test_gradients_of_packed_sequences_are_refused(name: str) -> None:
    scales = {f"{x}_descale": torch.ones(2) for x in "kv"}
    made = {**packed_inputs(), **scales, "sink": torch.zeros(4)}
    leaf = made[name].clone().requires_grad_()
    assert_refused_in_the_backward(
        lambda: flash_attn_varlen_func(**made | {name: leaf}, return_attn_probs=True)[:2],
        leaf,
        f"^k: must not be of {E4M3} in a call whose gradients are wanted",
    )
    if made[name].dtype == E4M3:
        return
    with (
        forward_ad.dual_level(),
        pytest.raises(NotImplementedError, match=f"^{name}: must not carry a forward-mode"),
    ):
        dual = forward_ad.make_dual(made[name], torch.ones_like(made[name]))
        flash_attn_varlen_func(**made | {name: dual})
