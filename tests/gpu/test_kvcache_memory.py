"""KV caches: bits that do not depend on the batch, memory layouts, what is copied, large caches."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from flash_attn_cuda import flash_attn_func, flash_attn_with_kvcache
from tests.cases.attention import KvCacheCase, Layout, arrange
from tests.cases.harness import (
    DEVICE,
    Check,
    attend_over_cache,
    bits,
    captured,
    check_cache,
    make_cache_case,
    make_case,
    run_reference,
    scaled,
    skip_without_row,
)
from tests.cases.matrix import inputs_of
from tests.reference import AttentionResult
from tests.reference.tolerance import assert_close

pytestmark = pytest.mark.gpu

PAGES = pytest.mark.parametrize("page_size", [None, 16], ids=["dense", "paged"])


# -- bits ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page_size", [None, 16, 64], ids=str)
@pytest.mark.parametrize(
    ("seqlen_q", "features"),
    [(1, {}), (1, {"window": (300, 0)}), (5, {"causal": True}), (70, {"causal": True})],
    ids=str,
)
@pytest.mark.parametrize("heads", [(8, 2), (4, 4)], ids=str)
def test_batch_invariance(
    heads: tuple[int, int], seqlen_q: int, features: dict[str, Any], page_size: int | None
) -> None:
    """The same bits alone and among others, in small and in large caches, with any num_splits."""
    cached = (scaled(2500, 500), 1, 0, 64, 65, scaled(1024, 300))
    case = make_cache_case(
        cached=cached * scaled(8, 2),
        seqlens_q=seqlen_q,
        capacity=scaled(2560, 512),
        page_size=page_size,
        num_heads_q=heads[0],
        num_heads_k=heads[1],
        **features,
    )
    inputs = inputs_of(case)
    together, *_ = attend_over_cache(case, inputs, batch_invariant=True)
    for b, n in enumerate(cached):
        for capacity in (None, max(1, n), 4 * scaled(2560, 512)):
            alone, *_ = attend_over_cache(
                case, inputs.sequence(b, capacity), batch_invariant=True, num_splits=b
            )
            context = f"{n} keys, capacity {capacity}"
            assert torch.equal(bits(alone.out[0]), bits(together.out[b])), context
            assert torch.equal(bits(alone.lse[0]), bits(together.lse[b])), context
    check_cache(replace(case, cached=cached), batch_invariant=True)


@pytest.mark.parametrize("many", [False, True], ids=["few", "many"])
@pytest.mark.parametrize("held", [0, 1, -1, 0x7FF5_0000_0000_0003], ids=hex)
def test_ctas_count_whatever_memory_held(held: int, many: bool) -> None:
    """Who is last in a tile, and what is left of more items than places, by words that nobody has
    zeroed.
    """
    if many:
        case = make_cache_case(
            cached=(300,) * scaled(40, 4), capacity=320, num_heads_q=8, num_heads_k=8
        )
    else:
        case = make_cache_case(cached=(scaled(3000, 300), 0, 70), capacity=scaled(3072, 320))
    inputs = inputs_of(case)
    expected, *_ = attend_over_cache(case, inputs, num_splits=0)
    for num_splits in (0, 2, 7):
        for _ in range(scaled(20, 1)):
            size = scaled(1 << 15, 1)  # of the workspace and others that the allocator has together
            memory = [torch.full((size,), held, device=DEVICE) for _ in range(scaled(64, 1))]
            del memory
            actual, *_ = attend_over_cache(case, inputs, num_splits=num_splits)
            torch.testing.assert_close(actual.out, expected.out, rtol=2**-7, atol=2**-7)
            torch.testing.assert_close(actual.lse, expected.lse, rtol=2**-19, atol=2**-19)


# -- memory ----------------------------------------------------------------------------------------


LAYOUTS = pytest.mark.parametrize(
    "layout",
    [Layout.heads_first, Layout.packed, Layout.odd_stride, Layout.misaligned],
    ids=lambda layout: layout.value,
)


@PAGES
@LAYOUTS
@pytest.mark.parametrize("head_dim", [64, 59])
def test_layouts_of_the_cache(head_dim: int, layout: Layout, page_size: int | None) -> None:
    """Read and written where it lies, whatever its strides: nothing is left in a copy."""
    case = make_cache_case(
        cached=(100, 0, 37), seqlens_q=3, seqlens_new=3, head_dim=head_dim, page_size=page_size
    )
    inputs = inputs_of(case)
    expected, *caches = attend_over_cache(case, inputs)
    moved = [arrange(x, layout) for x in (inputs.k_cache, inputs.v_cache)]
    arguments = {**inputs.arguments(), **dict(zip(("k_cache", "v_cache"), moved, strict=True))}
    out = flash_attn_with_kvcache(**arguments)
    torch.testing.assert_close(out, expected.out, rtol=2.0**-7, atol=2.0**-9)
    for x, y in zip(moved, caches, strict=True):
        assert torch.equal(bits(x), bits(y))


@PAGES
@LAYOUTS
def test_layouts_of_queries_and_new_keys(
    check: Check, layout: Layout, page_size: int | None
) -> None:
    case = make_cache_case(
        cached=(100, 0, 37), seqlens_q=3, seqlens_new=3, page_size=page_size, rotary_dim=32
    )
    inputs = case.make_inputs()
    moved = {name: arrange(getattr(inputs, name), layout) for name in ("q", "k", "v")}
    check(case, inputs=replace(inputs, **moved))


@PAGES
def test_around_the_cache_nothing_is_written(page_size: int | None) -> None:
    """Caches lie inside larger buffers of NaN; every row but the appended ones keeps its bits."""
    case = make_cache_case(cached=(189, 0, 37), seqlens_q=3, seqlens_new=3, page_size=page_size)
    inputs = inputs_of(case)
    buffers, caches = [], []
    for x in (inputs.k_cache, inputs.v_cache):
        buffer = torch.full((x.shape[0] + 2, *x.shape[1:]), torch.nan, dtype=x.dtype, device=DEVICE)
        buffers.append(buffer)
        caches.append(buffer[1:-1].copy_(x))
    flash_attn_with_kvcache(**{**inputs.arguments(), "k_cache": caches[0], "v_cache": caches[1]})
    for buffer in buffers:
        assert buffer[0].isnan().all() and buffer[-1].isnan().all()
    check_cache(case, inputs=inputs)


@pytest.mark.cuda_only
@PAGES
@pytest.mark.parametrize("head_dim", [59, 111, 64])
def test_no_head_dim_costs_a_copy_of_the_cache(head_dim: int, page_size: int | None) -> None:
    case = make_cache_case(
        cached=(100,) * 8,
        seqlens_new=1,
        capacity=32_768,
        page_size=page_size,
        head_dim=head_dim,
        num_heads_k=4,
    )
    inputs = inputs_of(case)
    flash_attn_with_kvcache(**inputs.arguments())
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    flash_attn_with_kvcache(**inputs.arguments())
    cache_bytes = inputs.k_cache.numel() * inputs.k_cache.element_size()
    assert torch.cuda.max_memory_allocated() - before < cache_bytes / 8


@pytest.mark.cuda_only
@pytest.mark.parametrize("kind", ["rows", "entries", "pages"])
def test_caches_past_two_to_the_31_elements(kind: str) -> None:
    """Offsets past 2^31 within a sequence, of a batch entry and of a page, read and appended to."""
    if torch.cuda.get_device_properties(0).total_memory < 100 << 30:
        pytest.skip("needs a device with 100 GiB of memory")
    heads, head_dim = 8, 128
    rows = 2**31 // (heads * head_dim) + 1000
    shape = {"rows": (1, rows), "entries": (rows // 1000, 1000), "pages": (rows // 16, 16)}[kind]
    caches = [
        torch.zeros(*shape, heads, head_dim, dtype=torch.bfloat16, device="cuda") for _ in range(2)
    ]
    keys = 500
    one = make_case(
        batch=1, seqlen_q=1, seqlen_k=keys, num_heads_q=8, num_heads_k=8, head_dim=head_dim
    )
    skip_without_row(make_cache_case(page_size=16 if kind == "pages" else None, head_dim=head_dim))
    inputs = one.make_inputs()
    options: dict[str, Any] = {}
    if kind == "rows":  # the last rows of one very long sequence; left padding hides the others
        first = rows - keys
        for cache, x in zip(caches, (inputs.k, inputs.v), strict=True):
            cache[0, first : first + keys - 1] = x[0, :-1]
        options = {"cache_seqlens": rows - 1, "cache_leftpad": _int32(first)}
    elif kind == "entries":
        for cache, x in zip(caches, (inputs.k, inputs.v), strict=True):
            cache[-1, : keys - 1] = x[0, :-1]
        options = {"cache_seqlens": keys - 1, "cache_batch_idx": _int32(shape[0] - 1)}
    else:
        table = torch.arange(shape[0] - 1, shape[0] - 40, -1, dtype=torch.int32, device="cuda")
        for cache, x in zip(caches, (inputs.k, inputs.v), strict=True):
            for page in range(-(-(keys - 1) // 16)):
                part = x[0, 16 * page : min(16 * page + 16, keys - 1)]
                cache[table[page], : len(part)] = part
        options = {"cache_seqlens": keys - 1, "block_table": table[None]}
    out, lse = flash_attn_with_kvcache(
        *(inputs.q, *caches, inputs.k[:, -1:], inputs.v[:, -1:]), return_softmax_lse=True, **options
    )
    assert_close(AttentionResult(out, lse), *run_reference(one, inputs, use_dlse=False))
    del caches
    torch.cuda.empty_cache()


def _int32(value: int) -> Tensor:
    return torch.tensor([value], dtype=torch.int32, device=DEVICE)


# -- use -------------------------------------------------------------------------------------------


@PAGES
def test_generation_token_by_token(page_size: int | None) -> None:
    """A prompt, then single tokens: the rows of one causal call over all of it."""
    total, prompt = 40, 33
    case = make_cache_case(
        cached=(0, 0), seqlens_q=prompt, seqlens_new=total, capacity=64, page_size=page_size
    )
    inputs = inputs_of(case)
    q = torch.randn(2, total, 4, 64).to(DEVICE, torch.bfloat16)
    whole = flash_attn_func(q, inputs.k, inputs.v, causal=True)
    pieces = [
        flash_attn_with_kvcache(
            *(q[:, begin:end], inputs.k_cache, inputs.v_cache),
            *(inputs.k[:, begin:end], inputs.v[:, begin:end]),
            cache_seqlens=torch.full((2,), begin, dtype=torch.int32, device=DEVICE),
            block_table=inputs.block_table,
            causal=True,
        )
        for begin, end in ((0, prompt), *((n, n + 1) for n in range(prompt, total)))
    ]
    torch.testing.assert_close(torch.cat(pieces, 1), whole, rtol=2.0**-6, atol=2.0**-8)


def test_inputs_that_require_grad_under_no_grad() -> None:
    case = make_cache_case(cached=(100, 0, 37))
    inputs = inputs_of(case)
    expected, *_ = attend_over_cache(case, inputs)
    inputs.q.requires_grad_()
    with torch.no_grad():
        actual, *_ = attend_over_cache(case, inputs)
    assert not actual.out.requires_grad
    assert torch.equal(bits(actual.out), bits(expected.out))


def test_lse_on_demand() -> None:
    case: KvCacheCase = make_cache_case(cached=(100, 0, 37), seqlens_q=2)
    inputs = inputs_of(case)
    expected, *_ = attend_over_cache(case, inputs)
    out = flash_attn_with_kvcache(**inputs.arguments())
    assert isinstance(out, Tensor)
    assert torch.equal(bits(out), bits(expected.out))
    assert expected.lse.shape == (3, 4, 2) and expected.lse.dtype == torch.float32


@pytest.mark.cuda_only
def test_many_sequences() -> None:
    """More than a grid dimension holds, in a graph."""
    batch = 70_000
    case = make_cache_case(
        cached=(3,) * batch, capacity=4, num_heads_q=2, num_heads_k=1, head_dim=32
    )
    inputs = inputs_of(case)
    outs = captured(lambda: flash_attn_with_kvcache(**inputs.arguments()))()
    one = make_case(batch=batch, seqlen_q=1, seqlen_k=3, num_heads_q=2, num_heads_k=1, head_dim=32)
    dense = one.make_inputs()
    dense = replace(dense, q=inputs.q, k=inputs.k_cache[:, :3], v=inputs.v_cache[:, :3])
    _, lse = flash_attn_with_kvcache(**inputs.arguments(), return_softmax_lse=True)
    assert_close(AttentionResult(outs, lse), *run_reference(one, dense, use_dlse=False))
