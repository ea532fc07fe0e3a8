"""Packed sequences: lengths of every kind, forward and backward, with all features."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from flash_attn_cuda import (
    check_device_errors,
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)
from flash_attn_cuda.interface import _flash_attn_varlen_backward
from tests.cases.attention import Alibi, VarlenCase
from tests.cases.harness import (
    DEVICE,
    Check,
    assert_same_bits,
    make_case,
    make_varlen_case,
    run_forward,
    run_forward_backward,
    run_reference,
    scaled,
    skip_without_row,
)
from tests.cases.pairwise import pairwise
from tests.reference import AttentionResult
from tests.reference.tolerance import assert_close

pytestmark = pytest.mark.gpu

CAUSAL = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])

# (lengths of queries, lengths of keys)
LENGTHS: dict[str, tuple[tuple[int, ...], tuple[int, ...] | None]] = {
    "one": ((150,), None),
    "even": ((64, 64, 64), None),
    "odd": ((1, 129, 17, 64, 63, 200), None),
    "with_empty": ((0, 70, 0, 0, 33, 0), None),
    "single_tokens": ((1,) * 37, None),
    "empty_queries": ((0, 40, 0), (50, 70, 0)),
    "empty_keys": ((40, 50, 3), (0, 60, 0)),
    "decode": ((1, 1, 1, 1), (200, 1, 0, 65)),
    "more_queries": ((200, 130, 5), (70, 129, 1)),
    "more_keys": ((70, 1, 129), (200, 130, 300)),
    "all_empty": ((0, 0, 0), None),
    "no_queries": ((0, 0), (30, 70)),
    "no_keys": ((30, 70), (0, 0)),
    "no_sequences": ((), None),
}
ALL_LENGTHS = pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())


def varlen(lengths: tuple[tuple[int, ...], tuple[int, ...] | None], **fields: Any) -> VarlenCase:
    return make_varlen_case(
        **{"num_heads_k": 2, **fields}, lengths_q=lengths[0], lengths_k=lengths[1]
    )


# -- lengths ---------------------------------------------------------------------------------------


@ALL_LENGTHS
@CAUSAL
def test_lengths(check: Check, lengths: Any, causal: bool) -> None:
    check(varlen(lengths, causal=causal))


@pytest.mark.parametrize("head_dim", [32, 40, 59, 96, 128, 192, 256, 512])
def test_lengths_in_every_bucket(check: Check, head_dim: int) -> None:
    check(varlen(LENGTHS["odd"], head_dim=head_dim, causal=True))
    check(varlen(LENGTHS["more_queries"], head_dim=head_dim, num_heads_k=1, dtype=torch.float16))


@pytest.mark.parametrize("heads", [(1, 1), (6, 2), (16, 1), (12, 4)], ids=str)
def test_head_ratios(check: Check, heads: tuple[int, int]) -> None:
    for name in ("more_keys", "with_empty"):
        case = varlen(LENGTHS[name], causal=True, num_heads_q=heads[0], num_heads_k=heads[1])
        check(case)


@CAUSAL
def test_one_long_sequence_and_many_tiny_ones(check: Check, causal: bool) -> None:
    lengths = (*(3, 1, 0, 2) * 20, scaled(4000, 500), *(1, 0, 5) * 20)
    check(varlen((lengths, None), causal=causal, num_heads_q=2, num_heads_k=1))


def test_lengths_drawn_from_a_log_normal(check: Check) -> None:
    generator = torch.Generator().manual_seed(3)
    drawn = torch.exp(torch.randn(scaled(60, 12), generator=generator) + 4.5).int()
    check(varlen((tuple(drawn.tolist()), None), causal=True))


@pytest.mark.parametrize("empty", ["none", "every_other", "runs"])
def test_more_sequences_than_a_grid_dimension_holds(empty: str) -> None:
    """70,000 sequences of two tokens, empty ones between them; a batch of two tokens says what is
    right.
    """
    count = scaled(70_000, 500)
    dense = make_case(
        batch=count, seqlen_q=2, seqlen_k=2, num_heads_q=2, num_heads_k=1, head_dim=32, causal=True
    )
    skip_without_row(dense)
    inputs = dense.make_inputs()
    ends = {
        "none": torch.arange(count + 1) * 2,
        "every_other": (torch.arange(2 * count + 1) + 1) // 2 * 2,
        "runs": torch.cat(
            [torch.zeros(70_000), torch.arange(count + 1) * 2, 2 * count * torch.ones(9)]
        ),
    }[empty]
    cu_seqlens = ends.to(DEVICE, torch.int32)
    leaves = [x.flatten(0, 1).requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    out, lse, _ = flash_attn_varlen_func(
        *(*leaves, cu_seqlens, cu_seqlens, 2, 2), causal=True, return_attn_probs=True
    )
    incoming = [inputs.dout.flatten(0, 1), inputs.dlse.transpose(0, 1).flatten(1)]
    gradients = torch.autograd.grad([out, lse], leaves, incoming)
    unpacked = [x.unflatten(0, (count, 2)) for x in (out, *gradients)]
    lse = lse.unflatten(1, (count, 2)).transpose(0, 1)
    actual = AttentionResult(unpacked[0].detach(), lse.detach(), *unpacked[1:])
    assert_close(actual, *run_reference(dense, inputs))
    check_device_errors()


# -- seqused, leftpad: rows of the buffers that are nobody's ---------------------------------------

USED = {
    "seqused_q": {"used_q": (64, 0, 1, 33)},
    "seqused_k": {"used_k": (1, 17, 0, 30)},
    "both": {"used_q": (10, 17, 128, 0), "used_k": (64, 5, 100, 3)},
    "leftpad_k": {"leftpad": (0, 17, 100, 1)},
    "all": {"used_q": (10, 17, 128, 5), "used_k": (64, 5, 100, 33), "leftpad": (60, 5, 0, 3)},
}


@pytest.mark.parametrize("used", USED.values(), ids=USED.keys())
@pytest.mark.parametrize(
    "features",
    [{}, {"causal": True}, {"window": (20, 3), "alibi": Alibi.per_batch}, {"dropout_p": 0.2}],
    ids=str,
)
def test_rows_outside_the_sequences(check: Check, used: Any, features: Any) -> None:
    """They hold NaN in every input, so that whatever reads them shows; out, dq, dk, dv are 0."""
    for head_dim in (64, 128):
        case = varlen(((64, 17, 128, 33), None), head_dim=head_dim, **used, **features)
        check(case)


def test_every_row_of_given_gradients_is_written() -> None:
    """Into tensors that held NaN, rows that nobody uses included."""
    case = varlen(
        ((64, 17, 128, 33), None), used_q=(10, 17, 0, 5), used_k=(64, 0, 100, 2), causal=True
    )
    skip_without_row(case)
    inputs = case.make_inputs()
    expected = run_forward_backward(case, inputs, keep_rounding=False)
    targets = [torch.full_like(x, torch.nan) for x in (inputs.q, inputs.k, inputs.v)]
    softmax_d = _flash_attn_varlen_backward(
        *(inputs.dout, inputs.q, inputs.k, inputs.v, expected.out, expected.lse, *targets),
        *(inputs.cu_seqlens_q, inputs.cu_seqlens_k, 128, 128, 0.0, 0.125, True, -1, -1, 0.0),
        *(None, False),
        dlse=inputs.dlse,
        seqused_q=inputs.seqused_q,
        seqused_k=inputs.seqused_k,
    )
    assert softmax_d.shape == expected.lse.shape
    assert_same_bits(AttentionResult(expected.out, expected.lse, *targets), expected)


# -- max_seqlen ------------------------------------------------------------------------------------


def test_max_seqlen_is_only_a_bound() -> None:
    """Exact, too large, unknown, or a tensor that nobody reads: the same bits."""
    case = varlen(LENGTHS["odd"], causal=True)
    skip_without_row(case)
    inputs = case.make_inputs()
    expected = run_forward_backward(case, inputs)
    longest = case.max_seqlen_q
    for given_q, given_k in (
        (None, None),
        (longest + 1, 10 * longest),
        (case.total_q, None),
        (1 << 30, 1 << 40),
        (torch.tensor(longest), torch.tensor(longest, dtype=torch.int32)),
        (torch.tensor(longest, device=DEVICE), torch.tensor(3, device=DEVICE)),
    ):
        leaves = [x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
        out, lse, _ = flash_attn_varlen_func(
            *(*leaves, inputs.cu_seqlens_q, inputs.cu_seqlens_k, given_q, given_k),
            causal=True,
            return_attn_probs=True,
        )
        gradients = torch.autograd.grad([out, lse], leaves, [inputs.dout, inputs.dlse])
        assert_same_bits(AttentionResult(out, lse, *gradients), expected, f"{given_q} {given_k}")


# -- the same as something else --------------------------------------------------------------------


@CAUSAL
@pytest.mark.parametrize("head_dim", [64, 128])
def test_even_lengths_are_a_batch(head_dim: int, causal: bool) -> None:
    dense = make_case(
        batch=3, seqlen_q=140, seqlen_k=90, num_heads_k=2, head_dim=head_dim, causal=causal
    )
    skip_without_row(dense)
    inputs = dense.make_inputs()
    case = varlen(((140,) * 3, (90,) * 3), head_dim=head_dim, causal=causal)
    packed = replace(
        case.make_inputs(),
        **{name: getattr(inputs, name).flatten(0, 1) for name in ("q", "k", "v", "dout")},
        dlse=inputs.dlse.transpose(0, 1).flatten(1),
    )
    result = run_forward_backward(case, packed)
    rows = {name: x.unflatten(0, (3, -1)) for name, x in result.tensors().items() if name != "lse"}
    lse = result.lse.unflatten(1, (3, -1)).transpose(0, 1)
    assert_close(AttentionResult(lse=lse, **rows), *run_reference(dense, inputs))
    expected = flash_attn_func(inputs.q, inputs.k, inputs.v, causal=causal)
    torch.testing.assert_close(rows["out"], expected, rtol=2.0**-7, atol=2.0**-9)


def test_a_sequence_does_not_depend_on_its_company() -> None:
    """Its output alone and among others, of one length or another, to a rounding."""
    case = varlen(((70, 0, 300, 33), None), causal=True)
    skip_without_row(case, backward=False)
    inputs = case.make_inputs()
    together = run_forward(case, inputs)
    begin = 0
    for n in case.lengths_q:
        part = slice(begin, begin + n)
        alone = flash_attn_func(
            *(x[None, part] for x in (inputs.q, inputs.k, inputs.v)), causal=True
        )
        torch.testing.assert_close(together.out[part], alone[0], rtol=2.0**-7, atol=2.0**-9)
        begin += n


@pytest.mark.parametrize("head_dim", [64, 59])
def test_packed_functions(head_dim: int) -> None:
    """qkv and kv in one tensor: same bits as the three tensors apart, gradient in one piece."""
    case = varlen(LENGTHS["odd"], head_dim=head_dim, causal=True, num_heads_k=4)
    skip_without_row(case)
    inputs = case.make_inputs()
    expected = run_forward_backward(case, inputs)
    options: dict[str, Any] = {"causal": True, "return_attn_probs": True}

    qkv = torch.stack([inputs.q, inputs.k, inputs.v], 1).requires_grad_()
    out, lse, _ = flash_attn_varlen_qkvpacked_func(qkv, inputs.cu_seqlens_q, 200, **options)
    (dqkv,) = torch.autograd.grad([out, lse], [qkv], [inputs.dout, inputs.dlse])
    assert_same_bits(AttentionResult(out, lse, *dqkv.unbind(1)), expected, "qkv")

    q = inputs.q.detach().requires_grad_()
    kv = torch.stack([inputs.k, inputs.v], 1).requires_grad_()
    out, lse, _ = flash_attn_varlen_kvpacked_func(
        q, kv, inputs.cu_seqlens_q, inputs.cu_seqlens_k, 200, 200, **options
    )
    dq, dkv = torch.autograd.grad([out, lse], [q, kv], [inputs.dout, inputs.dlse])
    assert_same_bits(AttentionResult(out, lse, dq, *dkv.unbind(1)), expected, "kv")


def _spaced(x: Tensor) -> Tensor:
    wide = torch.full((x.shape[0], 2, *x.shape[1:]), torch.nan, dtype=x.dtype, device=x.device)
    wide[:, 1] = x
    return wide[:, 1]


def _heads_first(x: Tensor) -> Tensor:
    return x.transpose(0, 1).contiguous().transpose(0, 1)


def _misaligned(x: Tensor) -> Tensor:
    flat = torch.full((x.numel() + 1,), torch.nan, dtype=x.dtype, device=x.device)
    return flat[1:].view(x.shape).copy_(x)


@pytest.mark.parametrize("arrange", [_spaced, _heads_first, _misaligned])
def test_layouts(arrange: Any) -> None:
    case = varlen(LENGTHS["more_keys"], causal=True)
    skip_without_row(case)
    inputs = case.make_inputs()
    expected = run_forward_backward(case, inputs)
    moved = {name: arrange(getattr(inputs, name)) for name in ("q", "k", "v", "dout")}
    assert_same_bits(run_forward_backward(case, replace(inputs, **moved)), expected)


# -- everything together ---------------------------------------------------------------------------

SETTINGS: dict[str, tuple[Any, ...]] = {
    "lengths": tuple(
        LENGTHS[name] for name in ("odd", "with_empty", "more_queries", "more_keys", "empty_keys")
    ),
    "dtype": (torch.bfloat16, torch.float16),
    "head_dim": (32, 64, 96, 111, 128, 192, 256, 320, 512),
    "heads": ((4, 4), (6, 2), (4, 1)),
    "mask": ({}, {"causal": True}, {"window": (33, -1)}, {"window": (-1, 9)}, {"window": (40, 3)}),
    "softcap": (0.0, 4.0),
    "alibi": (None, Alibi.per_head, Alibi.per_batch),
    "dropout_p": (0.0, 0.2),
    "deterministic": (False, True),
    "softmax_scale": (None, -0.2),
    "used": (False, True),
}


def combined_case(heads: tuple[int, int], lengths: Any, used: bool, **fields: Any) -> VarlenCase:
    """A case of one combination of SETTINGS."""
    keys = lengths[0] if lengths[1] is None else lengths[1]
    if used:
        fields["used_q"] = tuple(n - n // 3 for n in lengths[0])
        fields["used_k"] = tuple(n - n // 5 for n in keys)
        fields["leftpad"] = tuple(n // 4 for n in keys)
    return varlen(
        lengths, num_heads_q=heads[0], num_heads_k=heads[1], **fields.pop("mask"), **fields
    )


@pytest.mark.parametrize(
    "case", [combined_case(**choice) for choice in pairwise(SETTINGS, seed=1)], ids=str
)
def test_combinations(check: Check, case: VarlenCase) -> None:
    check(case)


@st.composite
def varlen_cases(draw: st.DrawFn) -> VarlenCase:
    heads_k = draw(st.integers(1, 3))
    length = st.sampled_from([0, 0, 1, 64, 65]) | st.integers(0, scaled(300, 50))
    lengths_q = draw(st.lists(length, max_size=6))
    lengths_k = [draw(length) for _ in lengths_q]
    fields: dict[str, Any] = {}
    if draw(st.booleans()):
        fields["used_q"] = tuple(draw(st.integers(0, n)) for n in lengths_q)
    used_k = lengths_k
    if draw(st.booleans()):
        fields["used_k"] = used_k = tuple(draw(st.integers(0, n)) for n in lengths_k)
    if draw(st.booleans()):
        fields["leftpad"] = tuple(draw(st.integers(0, n)) for n in used_k)
    bound = st.just(-1) | st.integers(0, 300)
    return make_varlen_case(
        lengths_q=tuple(lengths_q),
        lengths_k=tuple(lengths_k),
        num_heads_q=heads_k * draw(st.integers(1, 4)),
        num_heads_k=heads_k,
        head_dim=draw(st.integers(1, 512)),
        dtype=draw(st.sampled_from([torch.bfloat16, torch.float16])),
        causal=draw(st.booleans()),
        window=(draw(bound), draw(bound)),
        softcap=draw(st.just(0.0) | st.floats(0.5, 50.0, width=32)),
        alibi=draw(st.none() | st.sampled_from(Alibi)),
        dropout_p=draw(st.just(0.0) | st.floats(0.01, 0.9)),
        deterministic=draw(st.booleans()),
        **fields,
    )


@settings(
    max_examples=scaled(80, 20),
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(case=varlen_cases(), seed=st.integers(0, 1 << 20))
def test_random_cases(check: Check, case: VarlenCase, seed: int) -> None:
    check(case, seed=seed)
