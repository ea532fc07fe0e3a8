"""The forward kernels of Hopper GPUs touch nothing but their sequences, wherever those end."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor

from flash_attn_cuda import build_info
from tests.cases import binding
from tests.cases.attention import KvCacheCase, Layout, VarlenCase
from tests.cases.bad_input import Guard
from tests.cases.harness import (
    Check,
    assert_same_bits,
    bits,
    make_cache_case,
    make_case,
    make_varlen_case,
    run_forward,
    run_reference,
    skip_without_row,
)
from tests.hopper.sm90 import CAUSAL, EVERY_HEAD_DIM, far_apart, runs_sm90_kernels
from tests.reference import AttentionResult
from tests.reference.tolerance import assert_close

__all__ = ["runs_sm90_kernels"]  # pytest finds it here

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("head_dim", [72, 96, 192, 256])
@pytest.mark.parametrize(
    "layout",
    [
        Layout.heads_first,
        Layout.seqlen_first,
        Layout.packed,
        Layout.sliced_head_dim,
        Layout.every_other_row,
        Layout.surrounded,
    ],
    ids=lambda layout: layout.value,
)
def test_layouts_that_tma_reads_in_place(layout: Layout, head_dim: int) -> None:
    """NaN in every gap, and the bits of contiguous tensors."""
    case = make_case(
        seqlen_q=211, seqlen_k=150, num_heads_k=2, head_dim=head_dim, causal=True, layout=layout
    )
    skip_without_row(case, backward=False)
    inputs = case.make_inputs()
    result = run_forward(case, inputs)
    dense = {name: getattr(inputs, name).contiguous() for name in ("q", "k", "v")}
    assert_same_bits(run_forward(case, replace(inputs, **dense)), result, layout.value)
    assert_close(result, *run_reference(case, inputs, use_dlse=False))


@CAUSAL
@EVERY_HEAD_DIM
def test_one_query_or_one_key(check: Check, head_dim: int, causal: bool) -> None:
    """Dimensions of one element, whose strides are nobody's."""
    for seqlen_q, seqlen_k, heads in ((130, 1, (1, 1)), (1, 130, (20, 1)), (1, 1, (20, 1))):
        case = make_case(
            batch=1,
            seqlen_q=seqlen_q,
            seqlen_k=seqlen_k,
            num_heads_q=heads[0],
            num_heads_k=heads[1],
            head_dim=head_dim,
            causal=causal,
        )
        check(case, backward=False)


PACKED_LENGTHS = ((70, 0, 1, 129, 200), (130, 20, 0, 65, 333))


def packed_case(**fields: Any) -> VarlenCase:
    return make_varlen_case(
        **{
            "lengths_q": PACKED_LENGTHS[0],
            "lengths_k": PACKED_LENGTHS[1],
            "num_heads_k": 2,
            **fields,
        }
    )


@CAUSAL
@EVERY_HEAD_DIM
def test_a_sequence_does_not_see_its_neighbours(head_dim: int, causal: bool) -> None:
    """All of the others NaN: the same bits."""
    case = packed_case(head_dim=head_dim, causal=causal)
    skip_without_row(case, backward=False)
    clean = case.make_inputs()
    expected = run_forward(case, clean)
    starts_q, starts_k = ([0, *accumulate(lengths)] for lengths in PACKED_LENGTHS)
    for index in range(case.batch):
        rows, keys = (slice(*starts[index : index + 2]) for starts in (starts_q, starts_k))
        dirty = {}
        for name, kept in (("q", rows), ("k", keys), ("v", keys)):
            x = getattr(clean, name)
            dirty[name] = torch.full_like(x, torch.nan)
            dirty[name][kept] = x[kept]
        result = run_forward(case, replace(clean, **dirty))
        assert torch.equal(bits(result.out[rows]), bits(expected.out[rows])), index
        assert torch.equal(bits(result.lse[:, rows]), bits(expected.lse[:, rows])), index


def nan_behind(x: Tensor, rows: int) -> Tensor:
    return torch.cat([x, x.new_full((rows, *x.shape[1:]), torch.nan)])


@EVERY_HEAD_DIM
@pytest.mark.parametrize("rows", [(1, 1), (300, 200)], ids=str)
def test_rows_behind_the_last_sequence(head_dim: int, rows: tuple[int, int]) -> None:
    """They hold NaN and get out 0 and lse -inf."""
    case = packed_case(head_dim=head_dim, causal=True)
    skip_without_row(case, backward=False)
    inputs = case.make_inputs()
    longer = {"q": nan_behind(inputs.q, rows[0])}
    longer |= {name: nan_behind(getattr(inputs, name), rows[1]) for name in "kv"}
    result = run_forward(case, replace(inputs, **longer))
    out, behind = result.out.split([case.total_q, rows[0]])
    lse, lse_behind = result.lse.split([case.total_q, rows[0]], 1)
    assert not behind.any() and (lse_behind == -torch.inf).all()
    assert_close(AttentionResult(out, lse), *run_reference(case, inputs, use_dlse=False))


@pytest.mark.cuda_only
@EVERY_HEAD_DIM
@pytest.mark.parametrize("unused", [0, 8], ids=["whole", "part"])
def test_packed_output_into_a_given_tensor(head_dim: int, unused: int) -> None:
    """NaN around q, k, v and out: nothing around out is written, all of it is. A part of the row's
    head dim, or all of it.
    """
    case = packed_case(
        head_dim=head_dim - unused,
        causal=True,
        used_q=(70, 0, 1, 40, 199),
        used_k=(130, 0, 0, 64, 200),
        leftpad=(1, 0, 0, 64, 100),
    )
    skip_without_row(case, backward=False)
    inputs = case.make_inputs()
    guards = {name: Guard(name, getattr(inputs, name), margin=200) for name in ("q", "k", "v")}
    guards["out"] = Guard("out", torch.full_like(inputs.q, torch.nan), margin=200)
    out, lse, *_ = binding.forward(
        build_info.extension,
        *(guards[name].tensor for name in ("q", "k", "v")),
        out=guards["out"].tensor,
        **inputs.lengths(),
        max_seqlen_q=case.max_seqlen_q,
        max_seqlen_k=case.max_seqlen_k,
        causal=True,
    )
    for guard in guards.values():
        guard.check()
    assert out.data_ptr() == guards["out"].tensor.data_ptr()
    assert_close(AttentionResult(out, lse), *run_reference(case, inputs, use_dlse=False))


@EVERY_HEAD_DIM
@pytest.mark.parametrize(
    "places",
    [
        {"capacity": 700, "cached": (600, 0, 333)},
        {"leftpad": (90, 0, 30), "cached": (150, 70, 192)},
        {"batch_idx": (3, 0, 2), "entries": 5},
    ],
    ids=str,
)
def test_caches(check: Check, head_dim: int, places: dict[str, Any]) -> None:
    """Rows that hold no key are NaN. Enough queries for these kernels, and keys appended before."""
    case: KvCacheCase = make_cache_case(head_dim=head_dim, seqlens_q=70, **places)
    check(case, backward=False)
    check(replace(case, causal=True, num_heads_q=6), backward=False)
    appended = {"seqlens_q": 40, "seqlens_new": 30, "capacity": 700, "causal": True}
    check(replace(case, **appended), backward=False)


@pytest.mark.cuda_only
@pytest.mark.parametrize("far", ["batch", "row", "head"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_strides_past_two_to_the_31_elements(head_dim: int, far: str) -> None:
    case = make_case(
        seqlen_q=260, seqlen_k=260, num_heads_q=3, num_heads_k=3, head_dim=head_dim, causal=True
    )
    skip_without_row(case, backward=False)
    inputs = case.make_inputs()
    moved = far_apart(case, ("q", "k", "v"), far)
    for name, x in moved.items():
        x.copy_(getattr(inputs, name))
    assert_same_bits(run_forward(case, replace(inputs, **moved)), run_forward(case, inputs), far)
    del moved, x
    torch.cuda.empty_cache()
