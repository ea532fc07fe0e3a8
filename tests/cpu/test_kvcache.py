"""The KV cache on the CPU backend, and the combination of partial results."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flash_attn_cuda.call.fields import AttentionCall
from flash_attn_cuda.cpu import combine, forward_on_cpu
from tests.cases.attention import KvCacheCase, KvCacheInputs
from tests.cases.cpu_harness import RNG_STATE
from tests.cases.harness import attend_over_cache, check_cache, reference_of_cache
from tests.cases.kvcache import CACHE_AXES, MASKS, QUERIES, TREES, cache_case
from tests.cases.pairwise import pairwise
from tests.reference import AttentionResult, attention

pytestmark = pytest.mark.usefixtures("one_thread")


AXES = {
    **{**CACHE_AXES, "head_dims": [(16, 16), (24, 16), (16, 24), (33, 5)]},
    **{"has_qv": [0, 1], "keys_per_list": [None, 1, 30], "tree": [None, *TREES]},
    **{"mask": [None, *MASKS], "reach": [None, 0, 5, 64]},
}


def drawn_case(row: dict[str, Any], dtype: torch.dtype) -> KvCacheCase:
    """Queries are rotated with new keys alone, lists want qv, and qv has a scale and no slopes. A
    tree has neither lists nor a right bound, a mask or a relative_bias neither of these.
    """
    fields = dict(row)
    if fields["mask"] is not None:
        fields["reach"] = None
    if fields["mask"] is not None or fields["reach"] is not None:
        fields |= {"tree": None, "keys_per_list": None, "has_qv": 0}
    if fields["tree"] is not None:
        fields |= {"keys_per_list": None, "causal": False, "window": (row["window"][0], -1)}
    fields["has_qv"] |= fields["keys_per_list"] is not None
    if fields["has_qv"]:
        fields["softmax_scale"] = 0.2
        fields["features"] = {x: y for x, y in row["features"].items() if x != "alibi"}
    head_dim, head_dim_v = fields.pop("head_dims")
    if "seqlens_new" not in QUERIES[fields["queries"]]:
        fields["rotary"] = "none"
    return cache_case(**fields, head_dim=head_dim, head_dim_v=head_dim_v, dtype=dtype)


@pytest.mark.parametrize("row", pairwise(AXES), ids=str)
def test_equals_the_reference(row: dict[str, Any]) -> None:
    case = drawn_case(row, torch.float64)
    inputs = case.make_inputs()
    expected = reference_of_cache(case, inputs)
    actual, *caches = attend_over_cache(case, inputs)
    torch.testing.assert_close(actual.out, expected.expected.out, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(actual.lse, expected.expected.lse, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(caches, [expected.k_cache, expected.v_cache], equal_nan=True)
    assert bool(expected.appended.any()) == (case.seqlens_new is not None)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("row", pairwise(AXES, 1)[::3], ids=str)
def test_low_precision_is_close(row: dict[str, Any], dtype: torch.dtype) -> None:
    check_cache(drawn_case(row, dtype))


def run(case: KvCacheCase, inputs: KvCacheInputs) -> AttentionResult:
    return attend_over_cache(case, inputs)[0]


def test_without_lengths_the_whole_capacity_counts() -> None:
    case = KvCacheCase(
        cached=(20, 20), capacity=20, head_dim=8, dtype=torch.float64, device="cpu", leftpad=(0, 4)
    )
    inputs = case.make_inputs()
    full = run(case, replace(inputs, cache_seqlens=None))
    same = run(case, inputs)
    assert torch.equal(full.out, same.out) and torch.equal(full.lse, same.lse)
    assert torch.equal(run(case, replace(inputs, cache_seqlens=20)).out, same.out)


def test_decoding_token_by_token_equals_one_causal_call() -> None:
    """The rotation included: positions of queries and keys agree."""
    steps = 12
    q, k, v = (torch.randn(2, steps, heads, 8, dtype=torch.float64) for heads in (4, 2, 2))
    angles = torch.rand(steps, 4, dtype=torch.float64)
    tables = (angles.cos(), angles.sin())

    def cache() -> tuple[torch.Tensor, torch.Tensor]:
        return torch.full((2, steps, 2, 8), math.nan).double(), torch.zeros(2, steps, 2, 8).double()

    def attend(caches: tuple[torch.Tensor, torch.Tensor], part: slice) -> torch.Tensor:
        call = AttentionCall(
            *(q[:, part], *caches),
            causal=True,
            over_cache=True,
            seqlen_k=part.start,
            **{"k_new": k[:, part], "v_new": v[:, part]},
            **{"rotary_cos": tables[0], "rotary_sin": tables[1]},
        )
        return forward_on_cpu(call, RNG_STATE).out

    once_caches, step_caches = cache(), cache()
    once = attend(once_caches, slice(0, steps))
    for t in range(steps):
        out = attend(step_caches, slice(t, t + 1))
        torch.testing.assert_close(out, once[:, t : t + 1])
    for x, y in zip(once_caches, step_caches, strict=True):
        torch.testing.assert_close(x, y)


def test_sequences_may_share_an_entry() -> None:
    case = KvCacheCase(
        cached=(9, 5, 9),
        batch_idx=(1, 1, 0),
        capacity=16,
        head_dim=8,
        dtype=torch.float64,
        device="cpu",
    )
    inputs = case.make_inputs()
    expected = reference_of_cache(case, inputs).expected
    torch.testing.assert_close(run(case, inputs).out, expected.out)


@pytest.mark.parametrize("page_size", [None, 4])
def test_no_sequences(page_size: int | None) -> None:
    case = KvCacheCase(
        cached=(),
        batch_idx=(),
        entries=2,
        capacity=8,
        seqlens_new=1,
        page_size=page_size,
        device="cpu",
    )
    result, k_cache, _ = attend_over_cache(case, case.make_inputs())
    assert result.out.shape == (0, 1, 4, 64) and result.lse.shape == (0, 4, 1)
    assert k_cache.isnan().all()


# -- combination ---------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(
    cuts=st.lists(st.integers(0, 30), max_size=6),
    seqlen_q=st.integers(0, 5),
    seed=st.integers(0, 1000),
)
def test_combination_of_parts_is_the_whole(cuts: list[int], seqlen_q: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (
        torch.randn(2, length, 3, 8, dtype=torch.float64, generator=generator)
        for length in (seqlen_q, 30, 30)
    )
    edges = [0, *sorted(cuts), 30]
    parts = [
        attention(q, k[:, begin:end], v[:, begin:end]) for begin, end in itertools.pairwise(edges)
    ]
    out_partial = torch.stack([out for out, _ in parts]).float()
    lse_partial = torch.stack([lse.transpose(1, 2) for _, lse in parts]).float()
    out_partial[lse_partial == -math.inf] = math.nan  # of an empty part
    out, lse = combine(out_partial, lse_partial, torch.float32)
    expected_out, expected_lse = attention(q, k, v)
    torch.testing.assert_close(out.double(), expected_out, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse.double(), expected_lse.transpose(1, 2), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("splits", [0, 1, 3])
def test_combination_without_any_key(splits: int) -> None:
    out_partial = torch.full((splits, 2, 4, 3, 8), math.nan)
    lse_partial = torch.full((splits, 2, 4, 3), -math.inf)
    out, lse = combine(out_partial, lse_partial, torch.bfloat16)
    assert out.shape == (2, 4, 3, 8) and out.dtype == torch.bfloat16 and not out.any()
    assert lse.shape == (2, 4, 3) and (lse == -math.inf).all()
