"""Sinks: dense, packed, over caches and pages, with splits; against the fp64 reference."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from flash_attn_cuda import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from tests.cases.attention import HEAD_RATIOS, Alibi
from tests.cases.harness import (
    DEVICE,
    Check,
    assert_same_bits,
    bits,
    captured,
    check_cache,
    make_cache_case,
    make_case,
    make_varlen_case,
    no_host_sync,
    scaled,
    skip_without_row,
)
from tests.cases.masked import MaskedCase, RandomMask
from tests.cases.masked_harness import (
    CheckMask,
    masked_reference,
    run_masked,
    skip_without_masked_row,
)
from tests.cases.pairwise import pairwise
from tests.cases.repeats import Load
from tests.reference import AttentionResult
from tests.reference.tolerance import assert_close

pytestmark = pytest.mark.gpu


CAUSAL = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
PAGES = pytest.mark.parametrize("page_size", [None, 16], ids=["dense", "paged"])


# -- training --------------------------------------------------------------------------------------


@CAUSAL
@pytest.mark.parametrize("head_dim", [8, 16, 32, 40, 59, 64, 96, 128, 192, 256, 512])
def test_head_dims(check_mask: CheckMask, head_dim: int, causal: bool) -> None:
    """More queries than keys: under a causal mask some see the sink alone."""
    for sink, dtype in zip(DTYPES, (torch.bfloat16, torch.float16, torch.bfloat16), strict=True):
        of = make_case(
            seqlen_q=211, seqlen_k=150, num_heads_k=2, head_dim=head_dim, dtype=dtype, causal=causal
        )
        check_mask(MaskedCase(of, None, None, sink))


LENGTHS = ((1, 1), (1, 300), (300, 1), (127, 129), (128, 128), (64, 513), (1000, 1000))


@CAUSAL
@pytest.mark.parametrize("lengths", LENGTHS, ids=lambda n: f"{n[0]}x{n[1]}")
def test_lengths(check_mask: CheckMask, lengths: tuple[int, int], causal: bool) -> None:
    for head_dim in (64, 128):
        of = make_case(
            seqlen_q=min(lengths[0], scaled(1000, 300)),
            seqlen_k=min(lengths[1], scaled(1000, 300)),
            num_heads_k=1,
            head_dim=head_dim,
            causal=causal,
        )
        check_mask(MaskedCase(of, None, None, torch.float32))


@pytest.mark.parametrize("heads", HEAD_RATIOS, ids=str)
def test_head_ratios(check_mask: CheckMask, heads: tuple[int, int]) -> None:
    of = make_case(seqlen_q=130, seqlen_k=150, num_heads_q=heads[0], num_heads_k=heads[1])
    check_mask(MaskedCase(of, None, None, torch.float32))


@pytest.mark.parametrize(
    "features",
    [
        {"window": (70, 0)},
        {"window": (-1, 40)},
        {"softcap": 3.0},
        {"alibi": Alibi.per_batch},
        {"dropout_p": 0.3},
        {"dropout_p": 0.17, "softcap": 3.0, "alibi": Alibi.per_head, "window": (90, 5)},
        {"softmax_scale": -0.3},
        {"deterministic": True, "causal": True},
    ],
    ids=lambda features: "-".join(features),
)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_with_other_features(
    check_mask: CheckMask, features: dict[str, Any], head_dim: int
) -> None:
    of = make_case(seqlen_q=200, seqlen_k=333, num_heads_k=2, head_dim=head_dim, **features)
    check_mask(MaskedCase(of, None, None, torch.float32))


@CAUSAL
def test_packed(check_mask: CheckMask, causal: bool) -> None:
    """Rows behind the used ones, and of no sequence, have lse -inf and give the sink nothing."""
    for lengths in (
        {"lengths_q": (64, 0, 200, 17, 130), "lengths_k": (90, 33, 129, 0, 130)},
        {"lengths_q": (130, 20, 64), "used_q": (100, 0, 64), "used_k": (129, 20, 9)},
        {"lengths_q": (70, 20), "lengths_k": (200, 90), "leftpad": (130, 90)},
        {"lengths_q": (0, 0), "lengths_k": (5, 0)},
    ):
        for head_dim, dtype in ((64, torch.bfloat16), (128, torch.float16)):
            of = make_varlen_case(
                **lengths, num_heads_k=2, head_dim=head_dim, dtype=dtype, causal=causal
            )
            check_mask(MaskedCase(of, None, None, torch.float32))


@pytest.mark.parametrize("head_dim", [64, 128])
def test_values_at_the_ends(head_dim: int) -> None:
    """None at all (-inf), ones that no key comes near, and ones that no key notices."""
    of = make_case(seqlen_q=200, seqlen_k=150, num_heads_k=2, head_dim=head_dim, causal=True)
    for mask in (None, RandomMask(0.3, 64, "hq", "sparsity")):
        case = MaskedCase(of, mask, None, torch.float32)
        skip_without_masked_row(case)
        inputs = case.make_inputs()
        inputs.sink.copy_(torch.tensor([-torch.inf, 40.0, -40.0, 0.0]))
        actual = run_masked(case, inputs)
        assert_close(actual, *masked_reference(case, inputs))
        plain = run_masked(replace(case, sink=None), inputs)
        assert torch.equal(bits(actual.lse[:, 0]), bits(plain.lse[:, 0]))
        assert actual.dsink[0] == 0.0 and actual.out[:, :, 1].abs().max() < 1e-12


def test_queries_without_a_key() -> None:
    """out is 0, lse the sink, and what comes in through lse goes to the sink."""
    of = make_case(seqlen_q=300, seqlen_k=70, num_heads_k=2, causal=True)
    case = MaskedCase(of, None, None, torch.float32)
    skip_without_masked_row(case)
    inputs = case.make_inputs()
    actual = run_masked(case, inputs)
    assert not actual.out[:, :230].any() and not actual.dq[:, :230].any()
    expected = inputs.sink[None, :, None].expand(2, -1, 230)
    torch.testing.assert_close(actual.lse[:, :, :230], expected)
    changed = replace(inputs, of=replace(inputs.of, dlse=inputs.of.dlse.clone()))
    changed.of.dlse[:, :, :230] += 1.0
    torch.testing.assert_close(
        run_masked(case, changed).dsink, actual.dsink + 2 * 230.0, rtol=1e-4, atol=1e-2
    )


@pytest.mark.parametrize("head_dim", [8, 64, 128, 256, 512])
def test_many_rows(check_mask: CheckMask, head_dim: int) -> None:
    """More shares of a head's gradient than a thread block adds at a time, and more heads than
    shares.
    """
    lengths = scaled((*(150,) * 200, 3000, 1, 0, 77), (150, 300, 1, 0, 77))
    few = {"num_heads_q": 2, "num_heads_k": 2}
    many = {"num_heads_q": scaled(300, 30), "num_heads_k": scaled(300, 30)}
    for of in (
        make_varlen_case(lengths_q=lengths, head_dim=head_dim, causal=True, **few),
        make_case(batch=1, seqlen_q=3, seqlen_k=5, head_dim=head_dim, **many),
    ):
        check_mask(MaskedCase(of, None, None, torch.float32))


@pytest.mark.parametrize("deterministic", [False, True])
def test_the_gradient_repeats(deterministic: bool) -> None:
    """Bit for bit, whether or not that is asked of dq too."""
    length = scaled(1500, 300)
    options = {"num_heads_k": 2, "deterministic": deterministic}
    for of in (
        make_case(seqlen_q=length, seqlen_k=length, **options),
        make_varlen_case(lengths_q=(length, 0, 70, *(17,) * 20), causal=True, **options),
    ):
        case = MaskedCase(of, None, None, torch.float32)
        skip_without_masked_row(case)
        inputs = case.make_inputs()
        expected = run_masked(case, inputs)
        load = Load()
        for _ in range(5):
            load.push()
            assert_same_bits(run_masked(case, inputs), expected, deterministic=deterministic)


# -- caches ----------------------------------------------------------------------------------------


@CAUSAL
@PAGES
@pytest.mark.parametrize("seqlen_q", [1, 3, 16, 33, 130])
def test_caches(check: Check, seqlen_q: int, page_size: int | None, causal: bool) -> None:
    """A sequence without a key, appends, every dtype."""
    for head_dim, sink, new in (
        (64, torch.float32, None),
        (128, torch.bfloat16, seqlen_q),
        (59, torch.float16, None),
    ):
        case = make_cache_case(
            cached=(150, 0, 37),
            seqlens_q=seqlen_q,
            seqlens_new=new,
            capacity=300,
            page_size=page_size,
            head_dim=head_dim,
            causal=causal,
            sink=sink,
        )
        check(case, backward=False)


@PAGES
@pytest.mark.parametrize("num_splits", [0, 1, 2, 3, 7, 64, 256])
def test_splits(num_splits: int, page_size: int | None) -> None:
    """The sink counts once, however many parts there are, and where a part sees no key."""
    for seqlen_q, heads_k, features in (
        (1, 2, {}),
        (1, 4, {"window": (100, 0)}),
        (70, 1, {"causal": True}),
        (3, 2, {"softcap": 5.0, "alibi": Alibi.per_batch, "causal": True}),
    ):
        case = make_cache_case(
            cached=(scaled(3000, 600), 0, 63, scaled(1000, 200)),
            seqlens_q=seqlen_q,
            seqlens_new=seqlen_q,
            capacity=scaled(3200, 700),
            page_size=page_size,
            num_heads_k=heads_k,
            sink=torch.float32,
            **features,
        )
        skip_without_row(case)
        check_cache(case, num_splits=num_splits)
        if num_splits == 0:
            check_cache(case, batch_invariant=True)


CACHES: dict[str, tuple[Any, ...]] = {
    "dtype": (torch.bfloat16, torch.float16),
    "head_dim": (32, 64, 96, 128, 256, 320, 512),
    "heads": ((4, 4), (8, 2), (6, 1)),
    "lengths": ((1, 1), (1, None), (7, 7), (40, 2), ((3, 0, 20), (3, 0, 20)), ((1, 4, 0), None)),
    "page_size": (None, 1, 7, 256),
    "places": ({}, {"leftpad": (90, 0, 1)}, {"batch_idx": (4, 0, 2)}),
    "range": ({}, {"causal": True}, {"window": (33, -1)}, {"window": (40, 3)}),
    "rotary_dim": (0, 32),
    "softcap": (0.0, 4.0),
    "num_splits": (0, 1, 3, 50),
    "sink": DTYPES,
}


def cache_case(heads: Any, lengths: Any, rotary_dim: int, **fields: Any) -> Any:
    """A case of one combination of CACHES; only what is appended can be rotated."""
    return make_cache_case(
        cached=(100, 0, 37),
        num_heads_q=heads[0],
        num_heads_k=heads[1],
        seqlens_q=lengths[0],
        seqlens_new=lengths[1],
        rotary_dim=rotary_dim if lengths[1] is not None else 0,
        **fields.pop("places"),
        **fields.pop("range"),
        **fields,
    )


@pytest.mark.parametrize(
    ("num_splits", "case"),
    [(row.pop("num_splits"), cache_case(**row)) for row in pairwise(CACHES)],
    ids=str,
)
def test_combinations_over_caches(num_splits: int, case: Any) -> None:
    skip_without_row(case)
    check_cache(case, num_splits=num_splits)


# -- pages of packed sequences ---------------------------------------------------------------------


@CAUSAL
@pytest.mark.parametrize("page_size", [1, 16, 100])
@pytest.mark.parametrize("splits", [{}, {"num_splits": 3}, {"batch_invariant": True}], ids=str)
def test_packed_queries_over_pages(splits: dict[str, Any], page_size: int, causal: bool) -> None:
    of = make_varlen_case(
        lengths_q=(64, 0, 1, 17), lengths_k=(190, 33, 0, 130), num_heads_k=2, causal=causal
    )
    case = MaskedCase(of, None, None, torch.bfloat16)
    skip_without_masked_row(case, backward=False)
    paged = make_cache_case(page_size=page_size, causal=causal)
    skip_without_row(paged, backward=False)
    inputs = case.make_inputs()
    of_inputs = inputs.of
    pages = -(-190 // page_size)
    table = torch.randperm(4 * pages).view(4, pages).to(DEVICE, torch.int32)
    pools = []
    for x in (of_inputs.k, of_inputs.v):
        pool = torch.full((4 * pages, page_size, 2, 64), torch.nan, dtype=x.dtype, device=DEVICE)
        for b, (start, length) in enumerate(zip((0, 190, 223, 223), of.keys, strict=True)):
            rows = torch.arange(length, device=DEVICE)
            at = (table[b, rows // page_size].long(), rows % page_size)
            pool[at] = x[start : start + length]
        pools.append(pool)
    with torch.no_grad():
        out, lse, _ = flash_attn_varlen_func(
            *(of_inputs.q, *pools, of_inputs.cu_seqlens_q, of_inputs.cu_seqlens_k, 64, 190),
            block_table=table, causal=causal, sink=inputs.sink, return_attn_probs=True, **splits,
        )  # fmt: skip
    expected, naive = masked_reference(case, inputs)
    assert_close(AttentionResult(out=out, lse=lse), expected, naive)


# -- no waiting, graphs ----------------------------------------------------------------------------


def test_graphs_replay_with_other_sinks() -> None:
    """In every dtype, which the call makes fp32 on the device."""
    of = make_case(seqlen_q=130, seqlen_k=150, num_heads_k=2, causal=True)
    skip_without_row(of)
    inputs = of.make_inputs()
    q, k, v = inputs.q, inputs.k, inputs.v
    for dtype in DTYPES:
        sink = torch.zeros(4, dtype=dtype, device=DEVICE)

        def step(sink: Any = sink) -> tuple[torch.Tensor, torch.Tensor]:
            leaf = sink.detach().requires_grad_()
            out = flash_attn_func(q, k, v, sink=leaf)
            return out.detach(), torch.autograd.grad(out, leaf, inputs.dout)[0]

        step()
        with no_host_sync():
            step()
        replay = captured(step)
        for value in (1.0, -2.0):
            sink.copy_(torch.arange(4) * value)
            for x, y in zip(replay(), step(), strict=True):
                assert torch.equal(bits(x), bits(y)), (dtype, value)


def test_decoding_graphs_replay_with_other_sinks() -> None:
    case = make_cache_case(sink=torch.float32)
    skip_without_row(case, backward=False)
    inputs = case.make_inputs()
    given = inputs.arguments()
    for splits in (1, 5):
        replay = captured(lambda n=splits: flash_attn_with_kvcache(**given, num_splits=n))
        for value in (1.0, -2.0):
            inputs.sink.copy_(torch.arange(4) * value)
            expected = flash_attn_with_kvcache(**given, num_splits=splits)
            assert torch.equal(bits(replay()), bits(expected)), (splits, value)
