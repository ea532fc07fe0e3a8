"""The functions of flash_attn_cuda._C: FlashAttention-2's arguments, which callers pass by
position, and the description of a call.
"""

from __future__ import annotations

import ast
import dataclasses
import re
from types import SimpleNamespace

import pytest
import torch

from build_tools.generate import call_structs
from flash_attn_cuda.call.fields import (
    ARGUMENTS,
    DIFFERENTIABLE,
    OF_BACKWARD,
    AttentionCall,
    Incoming,
)
from flash_attn_cuda.installed import build_info

SCORES = "p_dropout softmax_scale"
MASK = "is_causal window_left window_right softcap"
FORWARD = "q k v out"
BACKWARD = "dout q k v out softmax_lse dq dk dv"
LENGTHS = "cu_seqlens_q cu_seqlens_k"
MOST = "max_seqlen_q max_seqlen_k"

# FlashAttention-2's order.
POSITIONAL = {
    "fwd": f"{FORWARD} alibi_slopes {SCORES} {MASK} return_softmax unused_generator",
    "varlen_fwd": (
        f"{FORWARD} {LENGTHS} seqused_k leftpad_k block_table alibi_slopes {MOST} {SCORES} "
        f"zero_tensors {MASK} return_softmax unused_generator num_splits"
    ),
    "bwd": f"{BACKWARD} alibi_slopes {SCORES} {MASK} deterministic unused_generator rng_state",
    "varlen_bwd": (
        f"{BACKWARD} {LENGTHS} alibi_slopes {MOST} {SCORES} zero_tensors {MASK} deterministic "
        "unused_generator rng_state"
    ),
    "fwd_kvcache": (
        "q kcache vcache k v seqlens_k rotary_cos rotary_sin cache_batch_idx leftpad_k "
        f"block_table alibi_slopes out softmax_scale {MASK} is_rotary_interleaved num_splits"
    ),
}

needs_extension = pytest.mark.skipif(
    build_info.extension is None, reason="flash_attn_cuda._C is not built here"
)


@needs_extension
@pytest.mark.parametrize("name", POSITIONAL)
def test_flash_attention_2s_arguments(name: str) -> None:
    """Those and no others: what this package adds is in the description of a call. The docstring
    begins with the signature, as pybind11 writes it.
    """
    signature = getattr(build_info.extension, name).__doc__.split("\n", 1)[0]
    (function,) = ast.parse(f"def {signature}: ...").body
    assert isinstance(function, ast.FunctionDef)
    assert [x.arg for x in function.args.args] == POSITIONAL[name].split()


@pytest.mark.parametrize("described", [AttentionCall, Incoming])
def test_the_description_of_a_call_is_the_same_on_both_sides(described: type) -> None:
    """Fields of the Python class, in its order, are those of the extension's struct, which it
    reads, and what a description does not set has the same default.
    """
    text, name = call_structs.text(), described.__name__
    body = re.search(rf"^struct {name} \{{\n(.*?)\n\}};", text, flags=re.DOTALL | re.MULTILINE)
    visit = re.search(rf"visit_fields\({name}& .*?\n\}}", text, flags=re.DOTALL)
    assert body is not None and visit is not None
    fields = dataclasses.fields(described)
    declared = re.findall(r"^  (\S+) (\w+)(?: = ([\w.-]+))?;", body[1], flags=re.MULTILINE)
    assert [x for _, x, _ in declared] == [x.name for x in fields]
    read = re.findall(r'visitor\("(\w+)", described\.\1, (true|false)\);', visit[0])
    assert read == [(x.name, str(x.type == "Tensor").lower()) for x in fields]
    for field, (kind, _, default) in zip(fields, declared, strict=True):
        is_number = "Tensor" not in str(field.type)
        assert (kind == "at::Tensor") != is_number
        assert kind.startswith("std::optional") == (is_number and "None" in str(field.type))
        if field.default is dataclasses.MISSING or field.default is None:
            assert not default
        else:
            assert ast.literal_eval(default.capitalize()) == field.default


def test_what_autograd_keeps() -> None:
    """All that an operator's backward is told, but for what is the forward's, or a cache's: the
    lists of both, as a derivative in a direction, of the backward too, goes by the forward's.
    """
    text = call_structs.text()
    kept = re.search(r"void visit_kept\(.*?\n\}", text, flags=re.DOTALL)
    assert kept is not None
    names = re.findall(r"visitor\(call\.(\w+)\)", kept[0])
    assert names == [x for x in OF_BACKWARD if ARGUMENTS[x].part == ""]
    assert {"cu_seqlens_q", "max_seqlen_q", "sink", "block_rows", "block_columns"} < set(names)
    assert not {"num_splits", "return_softmax", "block_table", "k_new", "out"} & set(names)
    inputs = re.findall(r'visitor\("(\w+)", call\.\1, found\.d\1\)', text)
    assert inputs == list(DIFFERENTIABLE)


@needs_extension
def test_what_is_no_description_of_a_call() -> None:
    extension = build_info.extension
    assert extension is not None
    with pytest.raises(AttributeError, match="__dict__"):
        extension.forward(object())
    with pytest.raises(AttributeError, match="q: is not described"):
        extension.forward(SimpleNamespace(k=torch.zeros(1)))
    call = AttentionCall(None, None, None)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="q: got NoneType"):
        extension.forward(call)
