"""Wrong masks, biases and sinks: errors that name the argument, the rule and the value."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from flash_attn_cuda import (
    BlockSparsity,
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    t5_relative_bias,
)
from flash_attn_cuda.functions.interface import _flash_attn_varlen_forward
from tests.cases.masked_operators import int32, make_inputs


def ones(*shape: int, **options: Any) -> Tensor:
    return torch.ones(shape, **{"dtype": torch.bool, **options})


def sparsity(*shape: int) -> BlockSparsity:
    return BlockSparsity.from_mask(ones(*shape))


def blocks(*shape: int, size: Any = (64, 64), **options: Any) -> dict[str, Any]:
    return {"block_mask": ones(*shape, **options), "block_size": size}


# Of q (2, 7, 4, 16) and k (2, 9, 2, 16) in fp64: arguments, error, its words.
WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"attn_mask": [[True]]}, TypeError, "attn_mask: must be a torch.Tensor, got list"),
    ({"attn_mask": ones(7, 9, dtype=torch.int64)}, TypeError,
     "attn_mask: dtype must be one of torch.bool, torch.float64, torch.float32, got torch.int64"),
    ({"attn_mask": ones(7, 9, dtype=torch.bfloat16)}, TypeError, "attn_mask: dtype must be one of"),
    ({"attn_mask": ones(9)}, ValueError, "attn_mask: must have 2 to 4 dimensions"),
    ({"attn_mask": ones(1, 1, 1, 7, 9)}, ValueError, "attn_mask: must have 2 to 4 dimensions"),
    ({"attn_mask": ones(7, 1)}, ValueError,
     "attn_mask: must have 2 to 4 dimensions that broadcast to (batch, heads_q, seqlen_q) "
     "(2, 4, 7) and end in seqlen_k 9, got shape (7, 1)"),
    ({"attn_mask": ones(8, 9)}, ValueError, "attn_mask: must have 2 to 4 dimensions that"),
    ({"attn_mask": ones(2, 7, 9)}, ValueError, "attn_mask: must have 2 to 4 dimensions that"),
    ({"attn_mask": ones(3, 1, 7, 9)}, ValueError, "attn_mask: must have 2 to 4 dimensions that"),
    ({"attn_mask": ones(7, 9, dtype=torch.float32, device="meta")}, ValueError,
     "attn_mask: must be on the device of q (cpu), got meta"),
    ({"attn_mask": ones(7, 9), "block_mask": sparsity(7, 9)}, ValueError,
     "attn_mask, block_mask: must not both be masks, got a bool attn_mask and a block_mask"),
    ({"attn_mask": ones(7, 9), **blocks(1, 1)}, ValueError, "attn_mask, block_mask: must not both"),
    ({"block_mask": "causal"}, TypeError,
     "block_mask: must be a BlockSparsity, a BlockMask of torch or a bool tensor, got str"),
    (blocks(1, 1, size=None), ValueError,
     "block_size: must be given with a block_mask of booleans, got None"),
    (blocks(1, 1, size=(64, 100)), ValueError,
     "block_size: must be positive multiples of 64, got (64, 100)"),
    (blocks(1, 1, size=(0, 64)), ValueError, "block_size: must be positive multiples of 64"),
    (blocks(1, 1, size=64), TypeError, "block_size: must be two integers, got 64"),
    (blocks(1, 1, size=(64, True)), TypeError, "block_size: must be two integers, got (64, True)"),
    (blocks(1, 1, size=(64.0, 64)), TypeError, "block_size: must be two integers"),
    ({"block_size": (64, 64)}, ValueError,
     "block_size: must be None without a block_mask of booleans, got (64, 64)"),
    ({"block_size": (64, 64), "block_mask": sparsity(7, 9)}, ValueError,
     "block_size: must be None without a block_mask of booleans"),
    (blocks(1, 1, dtype=torch.float32), TypeError,
     "block_mask: dtype must be torch.bool, got torch.float32"),
    (blocks(1), ValueError, "block_mask: must have 2 to 4 dimensions that end in (1, 1)"),
    (blocks(1, 2), ValueError,
     "block_mask: must have 2 to 4 dimensions that end in (1, 1), the blocks of (64, 64) of 7 "
     "queries and 9 keys, got shape (1, 2)"),
    (blocks(3, 1, 1, 1), ValueError, "block_mask: batch must be 1 or that of q (2), got 3"),
    (blocks(2, 3, 1, 1), ValueError, "block_mask: heads must be 1 or that of q (4), got 3"),
    (blocks(1, 1, device="meta"), ValueError, "block_mask: must be on the device of q (cpu)"),
    ({"block_mask": sparsity(8, 9)}, ValueError,
     "block_mask: must have as many queries as q (7), got 8"),
    ({"block_mask": sparsity(7, 5)}, ValueError, "block_mask: must have as many keys as k (9)"),
    ({"block_mask": sparsity(1, 2, 7, 9)}, ValueError, "block_mask: heads must be 1 or that of q"),
    ({"block_mask": sparsity(7, 9).to("meta")}, ValueError,
     "block_mask: must be on the device of q (cpu), got meta"),
    ({"relative_bias": 1.0}, TypeError, "relative_bias: must be a torch.Tensor, got float"),
    ({"relative_bias": ones(4, 3, dtype=torch.half)}, TypeError,
     "relative_bias: dtype must be torch.float64 or torch.float32, got torch.float16"),
    ({"relative_bias": ones(4, 3, dtype=torch.float32, device="meta")}, ValueError,
     "relative_bias: must be on the device of q (cpu), got meta"),
    *(({"relative_bias": ones(*shape, dtype=torch.float32)}, ValueError,
       "relative_bias: must have shape (heads_q, 2 * reach + 1) with as many heads as q (4), got "
       f"{shape}") for shape in ((4, 4), (3, 5), (1, 4, 5))),
    ({"relative_bias": ones(4, 3, dtype=torch.float32),
      "attn_mask": ones(7, 9, dtype=torch.float32)}, NotImplementedError,
     "relative_bias: must be None with a floating attn_mask, got a tensor"),
    ({"sink": 1.0}, TypeError, "sink: must be a torch.Tensor, got float"),
    ({"sink": ones(4)}, TypeError,
     "sink: dtype must be one of float32, float16, bfloat16, got torch.bool"),
    ({"sink": ones(3, dtype=torch.float32)}, ValueError, "sink: must have shape (4,), got (3,)"),
    ({"sink": ones(1, 4, dtype=torch.float32)}, ValueError, "sink: must have shape (4,)"),
    ({"sink": ones(4, dtype=torch.float32, device="meta")}, ValueError,
     "sink: must be on the device of q (cpu), got meta"),
    # What a call checks without them as well.
    ({"sink": ones(4, dtype=torch.float32), "softmax_scale": "1"}, TypeError, "softmax_scale: "),
    ({"attn_mask": ones(7, 9), "alibi_slopes": torch.ones(3)}, ValueError,
     "alibi_slopes: must have shape (4,) or (2, 4), got (3,)"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "error", "words"), WRONG, ids=lambda x: str(x)[:60])
def test_wrong_arguments(changes: dict[str, Any], error: type[Exception], words: str) -> None:
    q, k, v, _, _ = make_inputs()
    with pytest.raises(error, match="^" + re.escape(words)):
        flash_attn_func(q, k, v, **changes)


@pytest.mark.parametrize(("options", "error", "words"), [
    ({"weight": 1.0}, TypeError, "weight: must be a torch.Tensor, got float"),
    ({"weight": ones(8, 4)}, TypeError, "weight: must be floating, got torch.bool"),
    ({"weight": torch.ones(8)}, ValueError,
     "weight: must have shape (num_buckets, heads_q) with at least 4 buckets, an even number, got"),
    ({"weight": torch.ones(7, 4)}, ValueError, "weight: must have shape (num_buckets, heads_q)"),
    ({"weight": torch.ones(1, 4), "bidirectional": False}, ValueError,
     "weight: must have shape (num_buckets, heads_q) with at least 2 buckets, got (1, 4)"),
    ({"max_distance": 2}, ValueError,
     "max_distance: must be above 2, the distances that have buckets of their own, got 2"),
    ({"max_distance": 2.5}, TypeError, "max_distance: must be an integer"),
], ids=lambda x: str(x)[:60])  # fmt: skip
def test_wrong_tables_of_t5(options: dict[str, Any], error: type[Exception], words: str) -> None:
    given = {"weight": torch.ones(8, 4), "bidirectional": True} | options
    with pytest.raises(error, match="^" + re.escape(words)):
        t5_relative_bias(**given)


def test_a_bool_mask_for_each_entry_of_vmap() -> None:
    q = torch.randn(3, 1, 9, 2, 8)
    masks = torch.rand(3, 1, 1, 9, 9) < 0.6

    def attend(q: Tensor, mask: Tensor) -> Tensor:
        return flash_attn_func(q, q, q, attn_mask=mask)

    def gradient(q: Tensor, mask: Tensor) -> Tensor:
        return torch.func.grad(lambda q, mask: attend(q, mask).sum())(q, mask)

    words = r"attn_mask: under torch\.vmap .* got bool ones of shape \(1, 1, 9, 9\)"
    for function in (attend, gradient):
        with pytest.raises(NotImplementedError, match=words):
            torch.func.vmap(function)(q, masks)
    out = torch.func.vmap(attend, in_dims=(0, None))(q, masks[0])
    added = torch.zeros(masks.shape).masked_fill(~masks, -float("inf"))
    torch.testing.assert_close(out[0], attend(q[0], masks[0]))
    torch.testing.assert_close(torch.func.vmap(attend)(q, added)[1], attend(q[1], masks[1]))


def test_a_sink_of_fp64_is_for_fp64() -> None:
    q, k, v, _, sink = make_inputs(dtype=torch.float32)
    flash_attn_func(q.double(), k.double(), v.double(), sink=sink.double())
    with pytest.raises(TypeError, match=r"^sink: dtype must be one of"):
        flash_attn_func(q, k, v, sink=sink.double())


def test_q_k_and_v_are_checked() -> None:
    q, k, v, _, sink = make_inputs()
    with pytest.raises(ValueError, match=r"^v: must have the shape of k"):
        flash_attn_func(q, k, v[:, 1:], sink=sink)
    with pytest.raises(TypeError, match=r"^q: must be a torch.Tensor, got int"):
        flash_attn_func(1, k, v, sink=sink)
    with pytest.raises(ValueError, match=r"^k: batch must be that of q \(2\), got 1"):
        flash_attn_func(q, k[:1], v[:1], attn_mask=ones(7, 9))


# -- what is refused -------------------------------------------------------------------------------


def test_probabilities_are_refused() -> None:
    q, k, v, bias, sink = make_inputs()
    for given in ({"attn_mask": bias}, {"sink": sink}, {"attn_mask": ones(7, 9)}):
        with pytest.raises(NotImplementedError, match=r"^return_attn_probs: must be False .* 0.5"):
            flash_attn_func(q, k, v, 0.5, return_attn_probs=True, **given)


# -- packed ----------------------------------------------------------------------------------------


def packed_arguments(**changes: Any) -> dict[str, Any]:
    """Sequences of 7 and 3 queries, of 9 and 8 keys."""
    q, k, v = (x.flatten(0, 1) for x in make_inputs()[:3])
    lengths = {"cu_seqlens_q": int32(0, 7, 10), "cu_seqlens_k": int32(0, 9, 17)}
    return {"q": q, "k": k, "v": v, **lengths, "max_seqlen_q": 7, "max_seqlen_k": 9, **changes}


PACKED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"attn_mask": ones(7, 9), "max_seqlen_q": None}, TypeError,
     "max_seqlen_q: must be an integer with a tensor attn_mask, got NoneType"),
    ({**blocks(1, 1), "max_seqlen_k": torch.tensor(9)}, TypeError,
     "max_seqlen_k: must be an integer with a tensor block_mask, got Tensor"),
    ({"attn_mask": ones(8, 9)}, ValueError, "attn_mask: must have 2 to 4 dimensions that"),
    ({"block_mask": sparsity(6, 9)}, ValueError,
     "block_mask: must have at least max_seqlen_q (7) queries, got 6"),
    ({"block_mask": sparsity(7, 8)}, ValueError,
     "block_mask: must have at least max_seqlen_k (9) keys, got 8"),
    ({"block_mask": sparsity(3, 1, 7, 9)}, ValueError,
     "block_mask: batch must be 1 or that of q (2), got 3"),
    (
        {"block_mask": sparsity(6, 9), "max_seqlen_q": None},
        ValueError,
        "max_seqlen_q: must be at least the longest sequence, got 6 for 7 rows of sequence 0",
    ),
    (
        {"attn_mask": ones(7, 5), "max_seqlen_k": 5},
        ValueError,
        "max_seqlen_k: must be at least the longest sequence, got 5 for 9 rows of sequence 0",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "error", "words"), PACKED, ids=lambda x: str(x)[:60])
def test_wrong_packed_arguments(
    changes: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match="^" + re.escape(words)):
        flash_attn_varlen_func(**packed_arguments(**changes))


def test_pages_take_no_block_mask() -> None:
    pages = {"k": torch.randn(3, 4, 2, 16).double(), "v": torch.randn(3, 4, 2, 16).double()}
    table = {"block_table": int32(0, 1, 2, 0, 1, 2).view(2, 3), "cu_seqlens_k": int32(0, 9, 17)}
    given = packed_arguments(**pages, **table)
    for name, value in (
        ("block_mask", sparsity(7, 9)),
        ("block_size", (64, 64)),
    ):
        with pytest.raises(NotImplementedError, match=f"^{name}: must be None with a block_table"):
            flash_attn_varlen_func(**given, **{name: value})
    flash_attn_varlen_func(**given, attn_mask=ones(7, 9))
    table = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
    with pytest.raises(NotImplementedError, match=r"^relative_bias: must not require grad"):
        flash_attn_varlen_func(**given, relative_bias=table)
    with pytest.raises(NotImplementedError, match=r"^relative_bias: must be None with an attn_mas"):
        flash_attn_varlen_func(**given, relative_bias=table.detach(), attn_mask=ones(7, 9))
    with pytest.raises(TypeError, match=r"^max_seqlen_k: must be an integer with a tensor attn_m"):
        flash_attn_varlen_func(**given | {"max_seqlen_k": None}, attn_mask=ones(7, 9))
    with pytest.raises(ValueError, match=r"^attn_mask: must have .* end in seqlen_k 9, got .*12"):
        flash_attn_varlen_func(**given, attn_mask=ones(7, 12))
    sink = torch.zeros(4)
    flash_attn_varlen_func(**given, sink=sink)
    with pytest.raises(ValueError, match=r"^sink: must have shape \(4,\), got \(2,\)"):
        flash_attn_varlen_func(**given, sink=torch.zeros(2))


def test_the_private_packed_forward_has_the_gradient_of_a_sink() -> None:
    given = packed_arguments()
    options = {"softmax_scale": 0.3, "causal": False}
    sink = torch.randn(4, dtype=torch.float64)
    leaves = [x.requires_grad_() for x in (sink, given["q"], given["k"], given["v"])]
    private = _flash_attn_varlen_forward(**given, **options, dropout_p=0.0, sink=sink)
    public = flash_attn_varlen_func(**given, **options, sink=sink, return_attn_probs=True)
    results = []
    for out, lse, *_ in (private, public):
        # Rows behind the last sequence are nobody's.
        loss = out.sin().sum() + lse.nan_to_num(neginf=0.0).cos().sum()
        results.append((out, lse, *torch.autograd.grad(loss, leaves)))
    assert results[0][2].any()
    torch.testing.assert_close(*results)


# -- a cache ---------------------------------------------------------------------------------------


def test_sinks_of_a_cache() -> None:
    q, cache, _, _, sink = make_inputs(dtype=torch.float32)
    given = {"q": q, "k_cache": cache, "v_cache": cache, "cache_seqlens": int32(3, 9)}
    with pytest.raises(ValueError, match=r"^sink: must have shape \(4,\), got \(3,\)"):
        flash_attn_with_kvcache(**given, sink=sink[:3])
    with torch.no_grad():
        flash_attn_with_kvcache(**given, sink=torch.nn.Parameter(sink))


def test_masks_of_a_cache() -> None:
    q, cache, _, _, _ = make_inputs(dtype=torch.float32)
    (batch, queries), rows = q.shape[:2], cache.shape[1]
    given = {"q": q, "k_cache": cache, "v_cache": cache, "cache_seqlens": int32(3, 9)}
    words = rf"^attn_mask: must have .* \({batch}, 4, {queries}\) and end in seqlen_k"
    with pytest.raises(ValueError, match=rf"{words} {rows}, got shape \(1, {rows - 1}\)"):
        flash_attn_with_kvcache(**given, attn_mask=ones(1, rows - 1))
    with pytest.raises(ValueError, match=rf"{words} 5, got shape \(1, {rows}\)"):
        flash_attn_with_kvcache(**given | {"cache_seqlens": 5}, attn_mask=ones(1, rows))
    with pytest.raises(NotImplementedError, match=r"^attention_chunk: must be 0 with attn_mask"):
        flash_attn_with_kvcache(**given, attn_mask=ones(1, rows), attention_chunk=3)
    packed = given | {"q": q.flatten(0, 1), "cu_seqlens_q": int32(0, queries, 2 * queries)}
    with pytest.raises(TypeError, match=r"^max_seqlen_q: must be an integer with a tensor attn_m"):
        flash_attn_with_kvcache(**packed, attn_mask=ones(queries, rows))
    with pytest.raises(NotImplementedError, match=r"^attention_chunk: must be 0 with relative_b"):
        flash_attn_with_kvcache(**given, relative_bias=torch.zeros(4, 5), attention_chunk=3)
    with pytest.raises(ValueError, match=r"^relative_bias: must have shape .*got \(4, 6\)"):
        flash_attn_with_kvcache(**given, relative_bias=torch.zeros(4, 6))
    mask = torch.rand(batch, 1, queries, 5) < 0.5
    of_five = flash_attn_with_kvcache(**given | {"cache_seqlens": 5}, attn_mask=mask)
    wider = torch.nn.functional.pad(mask, (0, rows - 5))
    lengths = {"cache_seqlens": int32(5, 5)}
    assert torch.equal(flash_attn_with_kvcache(**given | lengths, attn_mask=wider), of_five)
