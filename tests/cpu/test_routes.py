"""Which calls skip the operators, and what the extension is given of them, with a stand-in for it
and its CUDA tensors. Whether that is the same on every road: test_roads.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from flash_attn_cuda import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from flash_attn_cuda.call.fields import AttentionCall, Results
from flash_attn_cuda.cpu import backward_on_cpu
from flash_attn_cuda.cpu.tiles import sink_gradient
from flash_attn_cuda.functions import arguments
from flash_attn_cuda.installed import build_info
from tests.cases.masked_operators import backward_fields, int32, make_sparsity
from tests.cases.operators import backward_call
from tests.cases.roads import Extension, extension
from tests.reference import attention

__all__ = ["extension"]  # pytest finds it here


def half(*shape: int) -> Tensor:
    return torch.randn(shape).bfloat16()


DENSE = {"q": half(2, 7, 4, 16), "k": half(2, 9, 2, 16), "v": half(2, 9, 2, 16)}
PADDED = {name: x[..., :5] for name, x in DENSE.items()}
CU_Q, CU_K = int32(0, 3, 3, 14), int32(0, 4, 5, 18)
ROWS: dict[str, Any] = {name: x.flatten(0, 1) for name, x in DENSE.items()}
ROWS |= {"cu_seqlens_q": CU_Q, "cu_seqlens_k": CU_K}
NEW = {"k": half(2, 1, 2, 16), "v": half(2, 1, 2, 16)}
CACHE = {"q": DENSE["q"], "k_cache": DENSE["k"], "v_cache": DENSE["v"]}
SLOPES, SINK, USED, BIAS = torch.ones(4), torch.randn(4), int32(1, 0, 1), half(1, 4, 7, 9)
PARAMETER = torch.nn.Parameter(SINK, requires_grad=False)
SPARSITY = make_sparsity()
LISTS = {"block_rows": SPARSITY.rows, "block_columns": SPARSITY.columns, "mask_bits": SPARSITY.bits}
NO_LENGTHS = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k", "leftpad_k"))
WIDE = {"window_size_left": 2**31 - 1, "window_size_right": 2}
Given = dict[str, Any]

# Function, what it is called with, fields that arrive.
ROUTES: dict[str, tuple[Callable[..., Any], Given, Given]] = {
    "plain": (flash_attn_func, {**DENSE, "causal": True}, {**DENSE, "causal": True}),
    "features": (
        flash_attn_func,
        {
            **PADDED,
            **{"window_size": (10**12, 2), "softcap": 3.0, "deterministic": True},
            **{"alibi_slopes": SLOPES},
        },
        {
            **{**NO_LENGTHS, **WIDE, "softmax_scale": 5**-0.5, "softcap": 3.0, "dropout_p": 0.0},
            **{"deterministic": True, "causal": False, "alibi_slopes": SLOPES},
        },
    ),
    "masks": (
        flash_attn_func,
        {**DENSE, "attn_mask": BIAS, "block_mask": SPARSITY, "sink": PARAMETER},
        {**LISTS, "cu_seqlens_q": None, "bias": BIAS},
    ),
    "packed": (
        flash_attn_varlen_func,
        {
            **{**ROWS, **{name: ROWS[name][..., :5] for name in "qkv"}, "seqused_q": USED},
            **{"max_seqlen_q": torch.tensor(7), "max_seqlen_k": 14, "dropout_p": 0.25},
            **{"alibi_slopes": SLOPES, "leftpad_k": USED},
        },
        {
            **{"cu_seqlens_q": CU_Q, "cu_seqlens_k": CU_K, "seqused_q": USED, "seqused_k": None},
            **{"leftpad_k": USED, "dropout_p": 0.25, "max_seqlen_q": 14, "max_seqlen_k": 14},
            **{"softmax_scale": 5**-0.5, "softcap": 0.0, "window_size_left": -1, "causal": False},
            **{"window_size_right": -1, "alibi_slopes": SLOPES, "deterministic": False},
        },
    ),
    "splits": (
        flash_attn_varlen_func,
        {**ROWS, "max_seqlen_q": 11, "max_seqlen_k": None, "num_splits": 4, "sink": SINK,
         "window_size": (3, None)},
        {"num_splits": 4, "max_seqlen_k": 18, "window_size_left": 3, "return_softmax": False,
         "block_rows": None, "bias": None},
    ),
    "append": (
        flash_attn_with_kvcache,
        {**CACHE, **NEW, "cache_seqlens": 4, "sink": PARAMETER, "cache_batch_idx": USED[:2],
         "window_size": (10**12, 2)},
        {**WIDE, "over_cache": True, "k": CACHE["k_cache"], "k_new": NEW["k"], "seqlen_k": 4,
         "seqused_k": None, "cache_batch_idx": None, "cu_seqlens_k_new": None},
    ),
}  # fmt: skip
ROUTES["append"][2]["cache_batch_idx"] = ROUTES["append"][1]["cache_batch_idx"]


@pytest.mark.parametrize("name", ROUTES)
def test_what_arrives(name: str, extension: Extension) -> None:
    """Head dims padded for kernels and results cut, a parameter as the tensor that it is."""
    function, given, fields = ROUTES[name]
    result = function(**given)
    out = result[0] if isinstance(result, tuple) else result
    (call,) = extension.calls
    for field, value in fields.items():
        found = getattr(call, field)
        if isinstance(value, Tensor):
            assert found.data_ptr() == value.data_ptr() and found.shape == value.shape, field
        else:
            assert found == value, field
    assert out.shape == given["q"].shape and call.q.shape[-1] == (given["q"].shape[-1] + 7) // 8 * 8
    assert call.sink is None or (type(call.sink) is Tensor and torch.equal(call.sink, SINK))


def test_a_bias_and_a_sink_have_the_dtypes_of_kernels(extension: Extension) -> None:
    sink = SINK.bfloat16()
    flash_attn_func(**DENSE, attn_mask=torch.zeros(7, 9), sink=sink)
    flash_attn_func(**DENSE, attn_mask=BIAS)
    wide, narrow = extension.calls
    assert wide.bias.dtype == wide.sink.dtype == torch.float32 and wide.bias.shape == (1, 1, 7, 9)
    assert narrow.bias.dtype == torch.bfloat16


@pytest.mark.parametrize("num_splits", [0, 4])
def test_autocast(extension: Extension, num_splits: int) -> None:
    given = {name: ROWS[name].float() for name in "qkv"}
    with torch.autocast("cpu", torch.bfloat16):
        out = flash_attn_varlen_func(**ROWS | given, max_seqlen_q=11, max_seqlen_k=None,
                                     num_splits=num_splits)  # fmt: skip
    assert extension.calls[0].q.dtype == out.dtype == torch.bfloat16


def test_gradients_of_padded_head_dims(
    extension: Extension, monkeypatch: pytest.MonkeyPatch
) -> None:
    def by_reference(call: AttentionCall, returns_lse: bool) -> Results:
        assert call.q.shape[-1] == 8
        out, _ = attention(call.q, call.k, call.v, softmax_scale=call.softmax_scale)
        return Results(out, None, None, None)

    monkeypatch.setattr(extension, "forward", by_reference)
    leaves = [x.double().requires_grad_() for x in PADDED.values()]
    outs = flash_attn_func(*leaves), attention(*leaves)[0]
    torch.testing.assert_close(*outs)
    torch.testing.assert_close(*(torch.autograd.grad(x.sin().sum(), leaves) for x in outs))


def test_debug_probabilities_are_asked_for(extension: Extension) -> None:
    *_, s_dmask = flash_attn_func(**DENSE, dropout_p=0.5, return_attn_probs=True)
    (call,) = extension.calls
    assert s_dmask.shape == (2, 4, 7, 9) and call.return_softmax


def test_anything_watching_takes_the_operators(
    extension: Extension, monkeypatch: pytest.MonkeyPatch
) -> None:
    (q, k, v), plain = DENSE.values(), arguments.is_plain_cuda_call
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


@pytest.mark.parametrize(
    ("function", "given", "words"),
    [
        (flash_attn_func, {**DENSE, "k": half(2, 9, 3, 16), "v": half(2, 9, 3, 16)},
         r"^k: number of heads must divide that of q \(4\)"),
        (flash_attn_varlen_func, {**ROWS, "max_seqlen_q": 11, "max_seqlen_k": -3},
         r"^max_seqlen_k: must be at least 0, got -3"),
        (flash_attn_with_kvcache, {**CACHE, "num_splits": -1}, r"^num_splits: must be from 0"),
    ],
    ids=["dense", "packed", "cache"],
)  # fmt: skip
def test_rejected_calls_get_the_same_words_as_on_the_cpu(
    function: Callable[..., Any], given: Given, words: str, extension: Extension
) -> None:
    extension.error = RuntimeError("the extension's own words")
    with pytest.raises(ValueError, match=words):
        function(**given)
    assert len(extension.calls) == 1


def test_gradient_of_a_sink() -> None:
    """softmax_d comes padded to 128 rows, whatever they hold."""
    call, incoming = backward_call(**backward_fields(packed=False))
    dout_out = (incoming.dout * incoming.out).sum(-1).transpose(1, 2)
    softmax_d = torch.full((2, 4, 128), torch.nan, dtype=torch.float64)
    softmax_d[..., :7] = dout_out - incoming.dlse
    found = sink_gradient(call, incoming.softmax_lse, softmax_d)
    torch.testing.assert_close(found, backward_on_cpu(call, incoming).dsink)
