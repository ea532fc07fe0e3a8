"""Bad arguments that the host can see: an error that names the argument, the rule and the value,
before anything runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from flash_attn_cuda import (
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
)
from flash_attn_cuda.functions.interface import (
    _flash_attn_backward,
    _flash_attn_forward,
    _flash_attn_varlen_backward,
    _flash_attn_varlen_forward,
)
from tests.cases.bad_input import int32, normal, varlen_inputs
from tests.cases.harness import DEVICE

pytestmark = pytest.mark.gpu


def tensors(**changes: Any) -> dict[str, Any]:
    """q, k, v (2, 6, 4 or 2, 64) in bf16; a change is a shape or another value."""
    shapes = {"q": (2, 6, 4, 64), "k": (2, 6, 2, 64), "v": (2, 6, 2, 64)}
    made = {name: changes.pop(name, shape) for name, shape in shapes.items()}
    return {name: normal(*x) if isinstance(x, tuple) else x for name, x in made.items()} | changes


def packed(**changes: Any) -> dict[str, Any]:
    """The varlen function's arguments for three sequences of 40 tokens in all."""
    arguments: dict[str, Any] = {guard.name: guard.tensor for guard in varlen_inputs()}
    arguments |= {"cu_seqlens_q": int32((0, 10, 25, 40)), "cu_seqlens_k": int32((0, 12, 20, 40))}
    return arguments | {"max_seqlen_q": 15, "max_seqlen_k": 20} | changes


def cached(**changes: Any) -> dict[str, Any]:
    """flash_attn_with_kvcache's arguments: two sequences, capacity 9."""
    arguments: dict[str, Any] = {"q": normal(2, 3, 4, 64)}
    arguments |= {name: normal(2, 9, 2, 64) for name in ("k_cache", "v_cache")}
    return arguments | {"cache_seqlens": int32((4, 5))} | changes


def paged(**changes: Any) -> dict[str, Any]:
    pool = {name: normal(5, 7, 2, 64) for name in ("k_cache", "v_cache")}
    return cached(**pool, block_table=int32(((1, 2), (0, 4)))) | changes


def new_keys(length: int, heads: int = 2) -> Tensor:
    return normal(2, length, heads, 64)


NAN = float("nan")
NEW = {"k": new_keys(1), "v": new_keys(1)}
# Of a function: good arguments, and changes that each break one that the error names first. One of
# each kind of check: the rules and arrays that there are, tests/cpu/test_rules.py and
# test_arrays.py break.
BAD: dict[Callable[..., Any], tuple[tuple[Callable[..., dict[str, Any]], dict[str, Any]], ...]] = {
    flash_attn_func: (
        *((tensors, {"dropout_p": p}) for p in (1.0, NAN)),
        (tensors, {"k": (2, 6, 3, 64), "v": (2, 6, 3, 64)}),
        *((tensors, {"window_size": window}) for window in ((1, 2, 3), "ab", 3)),
        *((tensors, {"alibi_slopes": x}) for x in (torch.ones(3), 0.5)),
    ),
    flash_attn_varlen_func: (
        *((packed, {"max_seqlen_q": n}) for n in (-1, "15")),
        (packed, {"cu_seqlens_q": (0, 10, 25, 40)}),
        (packed, {"cu_seqlens_k": int32((0, 10, 40))}),
        (packed, {"v": normal(41, 2, 64)}),
    ),
    flash_attn_with_kvcache: (
        (cached, {"k_cache": normal(2, 9, 2, 32)}),
        (cached, {"cache_seqlens": torch.tensor([4, 5])}),
        *((cached, {"cache_seqlens": n}) for n in (-1, 10)),
        *((cached, {"k": x, "v": x}) for x in (new_keys(1, 4), new_keys(10))),
        (cached, {"q": normal(2, 3, 4, 64).requires_grad_(), **NEW}),
        (cached, {"k_cache": normal(2, 9, 2, 64).requires_grad_(), **NEW}),
        (paged, {"block_table": int32((1, 2))}),
    ),
}
CALLS = [(function, *each) for function, changes in BAD.items() for each in changes]


@pytest.mark.parametrize(
    ("function", "arguments", "changes"),
    CALLS,
    ids=[f"{f.__name__}-{'-'.join(c)}-{i}" for i, (f, _, c) in enumerate(CALLS)],
)
def test_host_errors(function: Any, arguments: Any, changes: dict[str, Any]) -> None:
    """The error names the argument first, then the rule, then what was given."""
    moved = {
        key: x.to(DEVICE) if isinstance(x, Tensor) and not x.requires_grad else x
        for key, x in changes.items()
    }
    errors = (ValueError, TypeError, NotImplementedError)
    with pytest.raises(errors, match=rf"^({next(iter(changes))}): "):
        function(**arguments(**moved))


@pytest.mark.parametrize("name", ["q", "k", "v", "sink"])
def test_gradients_through_a_block_table_are_refused_in_the_backward(name: str) -> None:
    """The forward is that of inputs without gradients, to the bit."""
    arguments = paged()
    tensors = {
        "q": normal(6, 4, 64),
        "k": arguments["k_cache"],
        "v": arguments["v_cache"],
        "sink": torch.zeros(4, device=DEVICE),
    }
    cu_seqlens = {"cu_seqlens_q": int32((0, 3, 6)), "cu_seqlens_k": int32((0, 4, 9))}
    call = {**cu_seqlens, "max_seqlen_q": 3, "max_seqlen_k": 5, "return_attn_probs": True}
    call["block_table"] = arguments["block_table"]
    expected = flash_attn_varlen_func(**tensors, **call)
    tensors[name].requires_grad_()
    out, lse, _ = flash_attn_varlen_func(**tensors, **call)
    assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])
    for result in (out, lse):
        with pytest.raises(
            NotImplementedError, match=r"^block_table: must be None in a call whose"
        ):
            result.sum().backward()
    with torch.no_grad():
        assert not flash_attn_varlen_func(**tensors, **call)[0].requires_grad


@pytest.mark.cuda_only
@pytest.mark.parametrize(
    ("function", "arguments", "name"),
    [
        *((flash_attn_func, tensors, name) for name in ("k", "v")),
        *((flash_attn_varlen_func, packed, name) for name in ("k", "v")),
        *((flash_attn_varlen_func, packed, f"cu_seqlens_{name}") for name in "qk"),
        *((flash_attn_with_kvcache, cached, name) for name in ("k_cache", "cache_seqlens")),
        (flash_attn_with_kvcache, paged, "block_table"),
    ],
)
def test_tensors_on_another_device(function: Any, arguments: Any, name: str) -> None:
    given = arguments()
    given[name] = given[name].cpu()
    with pytest.raises((ValueError, RuntimeError), match=rf"\b{name}\b.*cpu"):
        function(**given)


# -- the private operators -------------------------------------------------------------------------

FORWARD_OPTIONS = (0.125, True, -1, -1, 0.0, None)


def backward_arguments(varlen: bool, dropout_p: float) -> tuple[Any, dict[str, Any]]:
    if varlen:
        given = packed()
        q, k, v = (given.pop(name) for name in "qkv")
        forward = _flash_attn_varlen_forward(
            q, k, v, **given, dropout_p=dropout_p, softmax_scale=0.125, causal=True
        )
    else:
        given = {}
        q, k, v = tensors().values()
        forward = _flash_attn_forward(q, k, v, dropout_p, *FORWARD_OPTIONS, False)
    out, lse, _, rng_state = forward
    saved = {"dout": torch.ones_like(out), "q": q, "k": k, "v": v, "out": out, "softmax_lse": lse}
    saved |= {f"d{name}": torch.empty_like(x) for name, x in (("q", q), ("k", k), ("v", v))}
    options = dict(
        zip(
            ("softmax_scale", "causal", "window_size_left", "window_size_right", "softcap"),
            FORWARD_OPTIONS,
            strict=False,
        )
    )
    options |= {"alibi_slopes": None, "deterministic": False, "rng_state": rng_state}
    function = _flash_attn_varlen_backward if varlen else _flash_attn_backward
    return function, {**saved, **given, **options, "dropout_p": dropout_p}


BAD_SAVED = {
    "softmax_lse dtype": ("softmax_lse", lambda x: x.half()),
    "softmax_lse shape": ("softmax_lse", lambda x: x[..., :-1]),
    "rng_state missing": ("rng_state", lambda x: None),
    "rng_state dtype": ("rng_state", lambda x: x.to(torch.int32)),
    "rng_state size": ("rng_state", lambda x: x[:1]),
    "dout shape": ("dout", lambda x: x[:-1]),
    "dq shape": ("dq", lambda x: x[:-1]),
    "dk dtype": ("dk", lambda x: x.float()),
}


@pytest.mark.parametrize("varlen", [False, True], ids=["dense", "varlen"])
@pytest.mark.parametrize("change", BAD_SAVED)
def test_what_a_backward_is_given(change: str, varlen: bool) -> None:
    function, arguments = backward_arguments(varlen, dropout_p=0.2)
    function(**arguments)
    name, alter = BAD_SAVED[change]
    arguments[name] = alter(arguments[name])
    with pytest.raises((ValueError, TypeError), match=rf"^{name}: "):
        function(**arguments)


@pytest.mark.cuda_only
def test_rng_state_on_another_device() -> None:
    function, arguments = backward_arguments(varlen=False, dropout_p=0.2)
    arguments["rng_state"] = arguments["rng_state"].cpu()
    with pytest.raises((ValueError, TypeError), match=r"^rng_state: .*cpu"):
        function(**arguments)
