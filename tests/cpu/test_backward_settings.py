"""The backward of an eager CUDA call is told what an operator's is: every setting of the forward.

The extension shows both for tensors on any device, without a GPU (explain_settings).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from flash_attn_cuda.call.fields import ARGUMENTS, OF_BACKWARD, AttentionCall
from flash_attn_cuda.functions.arguments import packed_lengths
from flash_attn_cuda.installed import build_info
from flash_attn_cuda.masks.sparsity import BlockSparsity

pytestmark = pytest.mark.skipif(
    build_info.extension is None, reason="flash_attn_cuda._C is not built here"
)

TOTAL, HEADS, LONGEST = 40, 2, 23
BOUNDS = torch.tensor([0, 17, 40], dtype=torch.int32)


def integers(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def lists() -> dict[str, Any]:
    mask = torch.rand(2, HEADS, LONGEST, LONGEST) < 0.5
    made = BlockSparsity.from_mask(mask, seqlen_q=LONGEST)
    return {"block_rows": made.rows, "block_columns": made.columns, "mask_bits": made.bits}


# What each field of a packed call is set to.
SETTINGS: dict[str, Any] = {
    "dropout_p": 0.3,
    "softmax_scale": 0.7,
    "causal": True,
    "window_size_left": 5,
    "window_size_right": 3,
    "softcap": 2.5,
    "alibi_slopes": torch.rand(HEADS),
    "bias": torch.randn(2, HEADS, LONGEST, LONGEST).bfloat16(),
    "sink": torch.randn(HEADS),
    "deterministic": True,
    "seqused_q": integers(3, 20),
    "seqused_k": integers(17, 4),
    "leftpad_k": integers(1, 2),
    "origin": torch.zeros(2, 4, dtype=torch.int32),
    "max_seqlen_q": LONGEST,
    "max_seqlen_k": LONGEST + 1,
    "fp32_results": True,
    "sm_margin": 7,
}
OF_LISTS = {"block_columns", "mask_bits"}
# What a backward does not read, and its own derivatives do.
OF_DERIVATIVES = {"block_rows"}
# A backward has no use for these: how the forward split keys and what it returned, and caches and
# pages, which have no gradients.
OF_FORWARD = {name for name in OF_BACKWARD if ARGUMENTS[name].part}


def told(**settings: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """(what an operator's backward is told, what autograd kept of an eager call)."""
    q, k, v = torch.randn(3, TOTAL, HEADS, 8).bfloat16()
    lengths = {"cu_seqlens_q": BOUNDS, "cu_seqlens_k": BOUNDS.clone()}
    call = AttentionCall(q, k, v, **lengths, **settings)
    extension: Any = build_info.extension
    by_operator, by_autograd = extension.explain_settings(call)
    return by_operator, by_autograd


def assert_same(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert found.keys() == wanted.keys() == ARGUMENTS.keys()
    for name, value in wanted.items():
        if ARGUMENTS[name].part or name in OF_DERIVATIVES:
            continue
        is_same = found[name] is value if isinstance(value, Tensor) else found[name] == value
        assert is_same, f"{name}: {found[name]} for {value}"


def test_every_field_is_set_here() -> None:
    """A field that is added is a setting of a backward, or has no meaning for one."""
    lengths = {"q", "k", "v", "cu_seqlens_q", "cu_seqlens_k"}
    lists = OF_LISTS | OF_DERIVATIVES
    alone = {"bias_by_distance", "key_lists", "key_list_block"}  # with others than these
    assert {*SETTINGS, *lists, *alone, *OF_FORWARD, *lengths} == set(OF_BACKWARD)


@pytest.mark.parametrize("name", SETTINGS)
def test_one_setting(name: str) -> None:
    by_operator, by_autograd = told(**{name: SETTINGS[name]})
    assert_same(by_autograd, by_operator)
    before, _ = told()
    if isinstance(SETTINGS.get(name), Tensor):
        assert by_autograd[name] is SETTINGS[name]
    else:
        assert by_autograd[name] != before[name]


def test_lists_of_blocks() -> None:
    given = lists()
    by_operator, by_autograd = told(max_seqlen_q=LONGEST, max_seqlen_k=LONGEST, **given)
    assert_same(by_autograd, by_operator)
    assert by_autograd["block_columns"] is given["block_columns"]
    assert by_autograd["mask_bits"] is given["mask_bits"]
    assert by_autograd["block_rows"] is given["block_rows"] and by_operator["block_rows"] is None


def test_lists_of_blocks_of_each_query() -> None:
    lists = torch.zeros(TOTAL, HEADS, 3, dtype=torch.int32)
    by_operator, by_autograd = told(key_lists=lists, key_list_block=64, softcap=2.5)
    assert_same(by_autograd, by_operator)
    assert by_autograd["key_lists"] is lists and by_autograd["key_list_block"] == 64


@pytest.mark.parametrize("without", ["origin", "bias"])
def test_all_at_once(without: str) -> None:
    """But for what does not go together."""
    left_out = {without, *(() if without == "bias" else ("fp32_results",))}
    settings = {x: y for x, y in SETTINGS.items() if x not in left_out}
    if without == "origin":
        settings["max_seqlen_q"] = settings["max_seqlen_k"] = LONGEST
    by_operator, by_autograd = told(**settings)
    assert_same(by_autograd, by_operator)


def test_a_bias_by_distance() -> None:
    bounds = {"max_seqlen_q": LONGEST, "max_seqlen_k": LONGEST}
    bias = torch.randn(1, HEADS, 1, 2 * LONGEST)
    by_operator, by_autograd = told(bias=bias, bias_by_distance=True, **bounds)
    assert_same(by_autograd, by_operator)
    assert by_autograd["bias_by_distance"] is True


def test_sequences_of_one_length() -> None:
    q, k, v = torch.randn(3, 2, 16, HEADS, 8).bfloat16()
    call = AttentionCall(q, k, v, causal=True, sm_margin=3, dropout_p=0.1)
    extension: Any = build_info.extension
    by_operator, by_autograd = extension.explain_settings(call)
    assert_same(by_autograd, by_operator)
    assert by_autograd["sm_margin"] == 3


@pytest.mark.parametrize("bound", [None, torch.empty((), dtype=torch.int32, device="meta"), 23])
def test_bounds_that_are_no_integers_are_not_read(bound: Any) -> None:
    """All rows stand in for them, in both."""
    q = torch.randn(TOTAL, HEADS, 8)
    lengths = packed_lengths(q, q, (BOUNDS, BOUNDS, bound, bound))
    by_operator, by_autograd = told(**{x: lengths[x] for x in ("max_seqlen_q", "max_seqlen_k")})
    assert_same(by_autograd, by_operator)
    wanted = bound if isinstance(bound, int) else TOTAL
    assert (by_autograd["max_seqlen_q"], by_autograd["max_seqlen_k"]) == (wanted, wanted)
