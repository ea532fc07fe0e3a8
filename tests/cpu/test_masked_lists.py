"""The CPU backend reads what a mask hides from the lists and bits that the kernels read."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from flash_attn_cuda import BlockSparsity, cpu, flash_attn_func, flash_attn_varlen_func
from flash_attn_cuda.call.fields import AttentionCall
from flash_attn_cuda.installed import build_info
from flash_attn_cuda.masks.of_call import lists_without_repeats
from flash_attn_cuda.operators.derivatives import run_operator
from tests.cases.attention import AttentionCase, VarlenCase
from tests.cases.masked import MaskedCase, RandomMask, masked_dense, masked_varlen
from tests.cases.masked_harness import masked_reference
from tests.reference import attention_with_gradients

pytestmark = pytest.mark.usefixtures("one_thread")

BASE: dict[str, Any] = {
    "device": "cpu", "head_dim": 8, "dtype": torch.float64, "num_heads_q": 4, "num_heads_k": 2
}  # fmt: skip


def test_what_no_list_visits_is_not_read() -> None:
    """NaN in keys and values of tiles that nobody visits; query heads of a group have their own."""
    q, k, v = (torch.randn(2, 300, heads, 8, dtype=torch.float64) for heads in (4, 2, 2))
    q.requires_grad_()
    blocks = torch.ones(2, 4, 3, 3, dtype=torch.bool)
    blocks[0, 1, 0, 1] = False  # of two heads of one key head, for some queries
    blocks[1, :, :, 2] = False
    pairs = blocks.repeat_interleave(128, 2).repeat_interleave(128, 3)[..., :300, :300]
    expected = attention_with_gradients(q.detach(), k, v, q.detach().sin(), mask=pairs)
    for x in (k, v):
        x[1, 256:] = torch.nan
        x[0, 128:256, 0] = torch.nan
    k.requires_grad_(), v.requires_grad_()
    out = flash_attn_func(q, k, v, block_mask=blocks, block_size=(128, 128))
    assert out[1].isfinite().all() and out[0, :128, 1].isfinite().all()
    torch.testing.assert_close(out[0, :128, 1], expected.out[0, :128, 1])
    torch.testing.assert_close(out[1], expected.out[1])
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), q.detach().sin())
    torch.testing.assert_close(dq[1], expected.dq[1])
    torch.testing.assert_close((dk[1], dv[1]), (expected.dk[1], expected.dv[1]))


def test_corrupt_lists_are_harmless() -> None:
    """Counts, tiles and pieces at random: whatever it computes, it comes to an end."""
    q, k, v = (torch.randn(1, 300, 2, 8, dtype=torch.float64) for _ in range(3))
    q.requires_grad_()
    good = BlockSparsity.from_mask(torch.rand(1, 2, 300, 300) < 0.5)
    for seed in range(5):
        generator = torch.Generator().manual_seed(seed)
        rows, columns = (
            torch.randint(-(2**31), 2**31, x.shape, dtype=torch.int32, generator=generator)
            for x in (good.rows, good.columns)
        )
        bad = BlockSparsity(300, 300, rows, columns, good.bits)
        flash_attn_func(q, k, v, block_mask=bad).sum().backward()


def test_lists_without_their_bits_hide_what_is_partial() -> None:
    """As the operator reads them; a BlockSparsity that is made knows better."""
    mask = torch.rand(1, 1, 128, 256) < 0.5
    mask[..., :64] = True
    good = BlockSparsity.from_mask(mask)
    bits_lost = BlockSparsity(128, 256, good.rows, good.columns, None)
    seen = cpu.Visibility.of_rows(bits_lost.rows, None)
    hidden = seen.hidden((slice(0, 1), slice(0, 1)), range(128), range(256))
    assert torch.equal(hidden[0, 0], torch.arange(256).expand(128, -1) >= 64)


def test_rows_and_columns_say_the_same() -> None:
    mask = torch.rand(2, 3, 300, 500) < torch.rand(2, 3, 1, 1)
    mask[:, :, 64:200, 100:300] = True
    mask[:, :, 200:, :130] = False
    made = BlockSparsity.from_mask(mask)
    every, blocks = (slice(0, 2), slice(0, 3)), (range(300), range(500))
    for visibility in (
        cpu.Visibility.of_rows(made.rows, made.bits),
        cpu.Visibility.of_columns(made.columns, made.bits),
    ):
        assert torch.equal(visibility.hidden(every, *blocks), ~mask)
        part = visibility.hidden((slice(1, 2), slice(1, 3)), range(70, 190), range(33, 321))
        assert torch.equal(part, ~mask[1:2, 1:3, 70:190, 33:321])


def test_packed_bounds_that_no_integer_gives() -> None:
    """The lengths of a BlockSparsity then bound those of sequences."""
    case = masked_varlen(
        RandomMask(0.5, 1, "bhq", "sparsity"),
        lengths_q=(33, 0, 150),
        lengths_k=(64, 5, 140),
        **BASE,
    )
    inputs = case.make_inputs()
    expected = masked_reference(case, inputs)[0].out
    sparsity = BlockSparsity.from_mask(inputs.mask)
    tensors = (inputs.of.q, inputs.of.k, inputs.of.v)
    lengths = inputs.of.lengths()
    for most in (None, torch.tensor(150), 150):
        out = flash_attn_varlen_func(
            *tensors, **lengths, max_seqlen_q=most, max_seqlen_k=most and 140, block_mask=sparsity
        )
        torch.testing.assert_close(out, expected)


def _listed(case: MaskedCase) -> tuple[AttentionCall, Any, dict[str, Any]]:
    """A call that has its lists itself, and a public function and arguments for the same."""
    inputs = case.make_inputs()
    tensors: dict[str, Any] = {name: getattr(inputs.of, name) for name in "qkv"}
    tensors = {name: x.detach().requires_grad_() for name, x in tensors.items()}
    arguments = case.arguments(inputs)
    given = {name: arguments[name] for name in ("key_lists", "key_list_block")}
    causal = {"causal": case.of.causal}
    lists = lists_without_repeats(given["key_lists"])
    if isinstance(case.of, AttentionCase):
        call = AttentionCall(**tensors, **causal, **given | {"key_lists": lists})
        return call, flash_attn_func, tensors | causal | given
    bounds = {"max_seqlen_q": case.of.max_seqlen_q, "max_seqlen_k": case.of.max_seqlen_k}
    packed = inputs.of.lengths() | bounds | causal
    call = AttentionCall(**tensors, **packed, **given | {"key_lists": lists})
    return call, flash_attn_varlen_func, tensors | packed | given


LISTED = [
    masked_dense(
        RandomMask(0.4, 16, "bhq", "key_lists"), batch=2, seqlen_q=70, seqlen_k=90, causal=True,
        **BASE,
    ),
    masked_varlen(
        RandomMask(0.4, 64, "bhq", "key_lists"), lengths_q=(33, 0, 70), lengths_k=(150, 5, 0),
        used_k=(130, 5, 0), **BASE,
    ),
]  # fmt: skip


@pytest.mark.parametrize("case", LISTED, ids=str)
def test_a_call_with_lists_is_one_with_their_mask(case: MaskedCase) -> None:
    """Of operators: results, gradients and their derivatives."""
    call, function, arguments = _listed(case)
    inputs = call.q, call.k, call.v
    found = []
    for out in (run_operator(call).out, function(**arguments)):
        first = torch.autograd.grad(out.sin().sum(), inputs, create_graph=True)
        second = torch.autograd.grad(sum(x.sin().sum() for x in first), inputs)
        found.append((out, *first, *second))
    for listed, masked in zip(*found, strict=True):
        torch.testing.assert_close(listed, masked)


@pytest.mark.skipif(build_info.extension is None, reason="flash_attn_cuda._C is not built here")
@pytest.mark.parametrize("case", LISTED, ids=str)
def test_lists_are_turned_around(case: MaskedCase) -> None:
    """As the backward of kernels walks them: of each block the queries that list it, ascending."""
    call, *_ = _listed(case)
    assert call.key_lists is not None and build_info.extension is not None
    kept = replace(call, q=call.q.detach().bfloat16(), k=call.k.detach().bfloat16())
    kept.v = kept.k
    assert build_info.extension.listed_queries(kept)[3] is None
    kept.deterministic = True
    places, rows, begins, ranks = build_info.extension.listed_queries(kept)
    assert {x.dtype for x in (places, rows, begins, ranks)} == {torch.int32}
    block, (heads, n) = call.key_list_block, call.key_lists.shape[-2:]
    key_rows = call.k.shape[:-2].numel()
    expected: dict[int, list[int]] = {}
    for row, of_row in enumerate(call.key_lists.reshape(-1, heads, n).tolist()):
        first, keys = 0, call.k.shape[1]
        if isinstance(case.of, VarlenCase):
            ends = torch.tensor(case.of.lengths_q).cumsum(0)
            index = min(int((ends <= row).sum()), len(ends) - 1)
            first, keys = sum(case.of.lengths_k[:index]), (case.of.used_k or case.of.keys)[index]
        else:
            first = row // call.q.shape[1] * keys
        for head, entries in enumerate(of_row):
            for entry in entries:
                if 0 <= entry * block < keys:
                    expected.setdefault(head * key_rows + first + entry * block, []).append(row)
    counts = begins.diff().tolist()
    assert begins[0] == 0 and len(counts) == heads * key_rows
    assert {i: count for i, count in enumerate(counts) if count} == {
        place: len(found) for place, found in expected.items()
    }
    for place, found in expected.items():
        span = slice(int(begins[place]), int(begins[place + 1]))
        assert rows[span].tolist() == found and set(places[span].tolist()) == {place}
        head, lower = place // key_rows, [x for x in expected if x < place]
        for row, rank in zip(found, ranks[span].tolist(), strict=True):
            assert rank == sum(row in expected[x] for x in lower if x // key_rows == head)
    assert (places[int(begins[-1]) :] == heads * key_rows).all()
