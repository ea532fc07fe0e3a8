"""Latent attention on the CPU backend, beside the calls over a cache of test_kvcache.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.library import opcheck
from torch.utils.flop_counter import FlopCounterMode

from flash_attn_cuda import flash_attn_varlen_func, flash_attn_with_kvcache
from tests.cases.cpu_harness import one_thread  # noqa: F401
from tests.cases.harness import assert_same_bits, attend_over_cache, bits
from tests.cases.kvcache import KvCacheCase
from tests.cases.latent import check_packed, joined, split, with_poisoned_table
from tests.cases.operators import append_arguments, arguments
from tests.cases.varlen import VarlenCase

pytestmark = pytest.mark.usefixtures("one_thread")

SMALL: dict[str, Any] = {"head_dim": 16, "head_dim_v": 40, "softmax_scale": 0.1, "device": "cpu"}
CU = torch.tensor([0, 2, 6], dtype=torch.int32)
USED = torch.tensor([5, 3], dtype=torch.int32)


@pytest.mark.parametrize("page_size", [None, 1, 7])
@pytest.mark.parametrize(
    "features",
    [
        {"causal": True}, {"window": (9, 3), "softcap": 4.0}, {"leftpad": (5, 0, 9)},
        {"used_q": (1, 0, 5), "used_k": (19, 9, 0)},
    ],
    ids=str,
)  # fmt: skip
def test_packed(features: dict[str, Any], page_size: int | None) -> None:
    lengths: dict[str, Any] = {"lengths_q": (1, 0, 17), "lengths_k": (20, 9, 33), "num_heads_k": 2}
    case = VarlenCase(**lengths, **SMALL, **features)
    check_packed(case, page_size)
    check_packed(case, page_size, keys_per_list=12)


@pytest.mark.parametrize("page_size", [None, 8])
def test_joined_caches_and_poisoned_tables(page_size: int | None) -> None:
    case = KvCacheCase(cached=(30, 0, 9), capacity=64, page_size=page_size, has_qv=True, **SMALL)
    inputs = case.make_inputs()
    expected, *_ = attend_over_cache(case, inputs)
    assert_same_bits(attend_over_cache(case, inputs, **joined(inputs))[0], expected)
    if page_size is not None:
        assert_same_bits(attend_over_cache(case, with_poisoned_table(inputs))[0], expected)


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.bfloat16)


def arguments_of(function: Any) -> dict[str, Any]:
    """Of a call that is valid."""
    torch.manual_seed(0)
    given: dict[str, Any] = {"softmax_scale": 0.2, "causal": True}
    if function is flash_attn_with_kvcache:
        given |= {"q": normal(2, 3, 4, 8), "qv": normal(2, 3, 4, 16), "cache_seqlens": USED}
        return given | dict(
            zip(("k_cache", "v_cache"), split(normal(2, 9, 1, 24), 16), strict=True)
        )
    given |= {"q": normal(6, 4, 8), "qv": normal(6, 4, 16), "cu_seqlens_q": CU, "cu_seqlens_k": CU}
    given |= {"k": normal(6, 2, 8), "v": normal(6, 2, 16), "max_seqlen_q": 4, "max_seqlen_k": 4}
    return given


FUNCTIONS = pytest.mark.parametrize("function", [flash_attn_with_kvcache, flash_attn_varlen_func])


@FUNCTIONS
@pytest.mark.parametrize("chunk", [0, 2])
def test_equals_one_product(function: Any, chunk: int) -> None:
    """Of queries and keys of all columns, in chunks and into an out as well."""
    given = arguments_of(function) | {"attention_chunk": chunk}
    k, v = ("k_cache", "v_cache") if "k_cache" in given else "kv"
    wide = {"q": torch.cat([given["q"], given["qv"]], -1), "qv": None}
    wide[k] = torch.cat([given[k], given[v]], -1)
    out = torch.empty_like(given["qv"])
    assert function(**given, out=out) is out
    assert torch.equal(bits(out), bits(function(**given | wide)))


@FUNCTIONS
def test_there_is_no_backward(function: Any) -> None:
    given = arguments_of(function)
    for name in ("q", "qv", "v_cache" if "v_cache" in given else "v"):
        leaf = given[name].clone().requires_grad_()
        with pytest.raises(NotImplementedError, match=rf"^{name}: must not require grad, .* no"):
            function(**given | {name: leaf})
        with torch.no_grad():
            function(**given | {name: leaf})
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(given[name], torch.ones_like(given[name]))
            with pytest.raises(NotImplementedError, match=rf"^{name}: must not carry a forward"):
                function(**given | {name: dual})


@FUNCTIONS
def test_under_a_compiler(function: Any) -> None:
    given = arguments_of(function)
    compiled = torch.compile(lambda x: function(**x), fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert torch.equal(compiled(given), function(**given))


def test_under_autocast_and_vmap() -> None:
    given = arguments_of(flash_attn_varlen_func)
    expected, qv = flash_attn_varlen_func(**given), given.pop("qv")
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(flash_attn_varlen_func(**given, qv=qv.float()), expected)
    mapped = torch.vmap(lambda x: flash_attn_varlen_func(**given, qv=x))
    assert torch.equal(mapped(torch.stack([qv, qv * 0]))[0], expected)


def test_operators() -> None:
    call: dict[str, Any] = {"q": normal(2, 3, 4, 8), "qv": normal(2, 3, 4, 16)}
    call |= {"k": normal(2, 9, 1, 8), "v": normal(2, 9, 1, 16), "seqused_k": USED}
    call |= {"softmax_scale": 0.2, "over_cache": True}
    opcheck(torch.ops.flash_attn_cuda.attention, arguments(**call))
    call |= {"k_new": normal(2, 1, 1, 8), "v_new": normal(2, 1, 1, 16)}
    opcheck(torch.ops.flash_attn_cuda.attention_with_append, append_arguments(**call))


def test_flops() -> None:
    given = arguments_of(flash_attn_with_kvcache) | {"causal": False}
    with FlopCounterMode(display=False) as counter:
        flash_attn_with_kvcache(**given)
    assert counter.get_total_flops() == 2 * 4 * 3 * (5 + 3) * (8 + 16 + 16)


# -- lists of keys ---------------------------------------------------------------------------------


def with_lists(function: Any) -> dict[str, Any]:
    """Of a call that is valid: two keys of each query, the first twice."""
    given = arguments_of(function)
    heads_k = given["k_cache" if "k_cache" in given else "k"].shape[-2]
    lists = torch.tensor([0, -1, 0, 1, -7], dtype=torch.int32)
    return given | {"key_lists": lists.expand(*given["q"].shape[:-2], heads_k, 5)}


@FUNCTIONS
def test_lists_by_every_road(function: Any) -> None:
    given = with_lists(function)
    expected = function(**given)
    assert not torch.equal(expected, function(**given | {"key_lists": None}))
    out = torch.empty_like(expected)
    assert function(**given, out=out) is out and torch.equal(out, expected)
    compiled = torch.compile(lambda x: function(**x), fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert torch.equal(compiled(given), expected)
    lists = given.pop("key_lists")
    mapped = torch.vmap(lambda x: function(**given, key_lists=x))
    assert torch.equal(
        mapped(torch.stack([lists, lists * 0 - 1])), torch.stack([expected, out * 0])
    )


@FUNCTIONS
@pytest.mark.parametrize("count", [0, 3])
def test_lists_of_nothing(function: Any, count: int) -> None:
    given = with_lists(function)
    given |= {"key_lists": given["key_lists"][..., :count] * 0 - 1, "sink": torch.arange(4.0)}
    is_packed = function is flash_attn_varlen_func
    wants_lse = "return_attn_probs" if is_packed else "return_softmax_lse"
    out, lse, *_ = function(**given, **{wants_lse: True})
    assert not out.any()
    assert torch.equal(lse, torch.arange(4.0)[:, None].expand_as(lse))
    _, lse, *_ = function(**given | {"sink": None}, **{wants_lse: True})
    assert (lse == -torch.inf).all()


@FUNCTIONS
def test_what_lists_go_with(function: Any) -> None:
    given = with_lists(function)
    with pytest.raises(NotImplementedError, match=r"^attention_chunk: must be 0 with key_lists, "):
        function(**given, attention_chunk=2)
    with pytest.raises(NotImplementedError, match=r"^key_list_block: must be 1, got 64"):
        function(**given, key_list_block=64)
    with pytest.raises(TypeError, match=r"^key_list_block: must be an integer, got float"):
        function(**given, key_list_block=1.0)
    with pytest.raises(TypeError, match=r"^key_lists: must be a torch.Tensor, got list"):
        function(**given | {"key_lists": [0]})
    lists = given["key_lists"].clone()
    lists.flatten()[-5] = 4
    with pytest.raises(
        ValueError, match=r"^key_lists: must be below .*, [34], got 4 in sequence 1"
    ):
        function(**given | {"key_lists": lists})


def test_operators_with_lists() -> None:
    call: dict[str, Any] = {"q": normal(2, 3, 4, 8), "qv": normal(2, 3, 4, 16)}
    call |= {"k": normal(2, 9, 1, 8), "v": normal(2, 9, 1, 16), "seqused_k": USED}
    call |= {"key_lists": torch.zeros(2, 3, 1, 4, dtype=torch.int32)}
    call |= {"softmax_scale": 0.2, "over_cache": True}
    opcheck(torch.ops.flash_attn_cuda.attention, arguments(**call))


def test_flops_of_lists() -> None:
    with FlopCounterMode(display=False) as counter:
        flash_attn_with_kvcache(**with_lists(flash_attn_with_kvcache))
    assert counter.get_total_flops() == 2 * 4 * (2 * 3 * 5) * (8 + 16 + 16)
