"""Packed sequences over pages, in large tensors, and between canaries."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from flash_attn_cuda import check_device_errors, flash_attn_varlen_func
from tests.cases.attention import VarlenCase
from tests.cases.fp8_harness import make
from tests.cases.harness import (
    DEVICE,
    ON_CPU,
    assert_same_bits,
    assert_same_up_to_one_rounding,
    bits,
    make_cache_case,
    make_case,
    make_varlen_case,
    run_forward_backward,
    run_reference,
    skip_without_row,
)
from tests.cases.masked import MaskedCase, RandomBias
from tests.cases.masked_harness import skip_without_masked_row
from tests.reference import AttentionResult, dense_keys
from tests.reference.tolerance import assert_close

pytestmark = pytest.mark.gpu


def paged_inputs(
    case: VarlenCase, page_size: int, spare_pages: int = 2
) -> tuple[Any, Tensor, Tensor, Tensor]:
    """(inputs, k pool, v pool, block_table): the keys of `case`, scattered over pages in any order.
    Rows that hold no key are NaN; table entries that no key needs point nowhere.
    """
    inputs = case.make_inputs()
    pages_of = [-(-n // page_size) for n in case.keys]
    width = max(pages_of, default=0) + spare_pages
    order = torch.randperm(sum(pages_of) + 3)
    pools = [
        torch.full((len(order), page_size, *x.shape[1:]), torch.nan, dtype=x.dtype, device=DEVICE)
        for x in (inputs.k, inputs.v)
    ]
    table = torch.full((case.batch, width), 2**31 - 1, dtype=torch.int32)
    row = page = 0
    for b, n in enumerate(case.keys):
        for index in range(pages_of[b]):
            target = int(order[page])
            table[b, index] = target
            rows = min(page_size, n - index * page_size)
            for pool, x in zip(pools, (inputs.k, inputs.v), strict=True):
                pool[target, :rows] = x[row : row + rows]
            row += rows
            page += 1
    return inputs, *pools, table.to(DEVICE)


@pytest.mark.parametrize("page_size", [1, 7, 16, 256, 300])
@pytest.mark.parametrize(
    "features",
    [{}, {"causal": True}, {"window": (30, 2), "softcap": 5.0}],
    ids=["full", "causal", "window_softcap"],
)
def test_pages(page_size: int, features: dict[str, Any]) -> None:
    """flash_attn_varlen_func with a block_table: any page size, any splits."""
    for head_dim, lengths in (
        (64, ((70, 1, 0, 130), (200, 301, 50, 0))),
        (128, ((1, 1, 1), (333, 1, 64))),
    ):
        case = make_varlen_case(
            lengths_q=lengths[0],
            lengths_k=lengths[1],
            num_heads_k=2,
            head_dim=head_dim,
            **features,
        )
        skip_without_row(make_cache_case(page_size=page_size, head_dim=head_dim, **features))
        inputs, pool_k, pool_v, table = paged_inputs(case, page_size)
        expected = run_reference(case, inputs, use_dlse=False)
        for num_splits in (0, 1, 3):
            out, lse, _ = flash_attn_varlen_func(
                *(inputs.q, pool_k, pool_v, inputs.cu_seqlens_q, inputs.cu_seqlens_k, None, None),
                **case.arguments(),
                return_attn_probs=True,
                block_table=table,
                num_splits=num_splits,
            )
            assert_close(AttentionResult(out, lse), *expected)


def test_pages_with_lengths_from_seqused() -> None:
    """seqused_k rather than cu_seqlens_k says how many keys each sequence has in its pages."""
    case = make_varlen_case(lengths_q=(40, 3), lengths_k=(100, 33), num_heads_k=2, causal=True)
    skip_without_row(make_cache_case(page_size=16, causal=True))
    inputs, pool_k, pool_v, table = paged_inputs(case, 16)
    used = torch.tensor([100, 33], dtype=torch.int32, device=DEVICE)
    bounds = torch.tensor([0, 112, 224], dtype=torch.int32, device=DEVICE)
    out, lse, _ = flash_attn_varlen_func(
        *(inputs.q, pool_k, pool_v, inputs.cu_seqlens_q, bounds, None, None),
        causal=True,
        seqused_k=used,
        return_attn_probs=True,
        block_table=table,
    )
    assert_close(AttentionResult(out, lse), *run_reference(case, inputs, use_dlse=False))
    first = dense_keys(pool_k, 0, 0, 100, table.clamp_max(len(pool_k) - 1))
    assert torch.equal(bits(first), bits(inputs.k[:100]))  # guards the test's own pages


def test_batch_invariant_pages() -> None:
    """The same bits whatever the company and however long the others are."""
    case = make_varlen_case(
        lengths_q=(1, 5, 1), lengths_k=(700, 64, 129), num_heads_k=2, causal=True
    )
    skip_without_row(make_cache_case(page_size=16, causal=True))
    inputs, pool_k, pool_v, table = paged_inputs(case, 16)

    def attend(b: int | None) -> Tensor:
        cu_q, cu_k, blocks, q = inputs.cu_seqlens_q, inputs.cu_seqlens_k, table, inputs.q
        if b is not None:
            q = q[int(cu_q[b]) : int(cu_q[b + 1])]
            cu_q, cu_k = (x[b : b + 2] - x[b] for x in (cu_q, cu_k))
            blocks = table[b : b + 1]
        return flash_attn_varlen_func(
            *(q, pool_k, pool_v, cu_q, cu_k, None, None),
            causal=True,
            block_table=blocks,
            batch_invariant=True,
        )

    together = attend(None)
    alone = torch.cat([attend(b) for b in range(3)])
    assert torch.equal(bits(together), bits(alone))


COMPANIES: tuple[tuple[Any, ...], ...] = (  # lengths of queries, of keys, heads, options
    ((130, 1), (28, 1), (16, 1), {"softcap": 5.0}),
    ((1, 1, 1), (1, 633, 1200), (7, 1), {"causal": True, "alibi_slopes": 7}),
    ((0, 2, 0), (1130, 508, 1177), (4, 2), {}),
    ((1, 64), (0, 1200), (4, 4), {"window_size": (300, 5)}),
)


@pytest.mark.parametrize(
    ("is_e4m3", "given"), [(False, ""), (False, "sink"), (False, "attn_mask"), (True, "sink")]
)
@pytest.mark.parametrize("head_dim", [32, 64, 96, 128, 192, 256, 512])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_batch_invariance_without_pages(
    dtype: torch.dtype, head_dim: int, is_e4m3: bool, given: str
) -> None:
    """The same bits in company and alone, with a sink, which no part of the keys is of, too."""
    if is_e4m3:
        make(cached=(1,), head_dim=head_dim, dtype=dtype)  # or skip
    bias = RandomBias() if given == "attn_mask" else None
    case = MaskedCase(make_case(head_dim=head_dim, dtype=dtype), None, bias)
    skip_without_masked_row(case, backward=False)
    for lengths_q, lengths_k, heads, options in COMPANIES:
        sizes = ((sum(lengths_q), heads[0]), (sum(lengths_k), heads[1]), (sum(lengths_k), heads[1]))
        q, k, v = (torch.randn(*x, head_dim, device=DEVICE, dtype=dtype) for x in sizes)
        more: dict[str, Any] = dict(options)
        if "alibi_slopes" in more:
            more["alibi_slopes"] = torch.rand(more["alibi_slopes"], device=DEVICE)
        if is_e4m3:
            k, v = k.to(torch.float8_e4m3fn), v.to(torch.float8_e4m3fn)
            more |= {"k_descale": 0.7, "v_descale": 1.3}
        if given == "sink":
            more["sink"] = torch.randn(heads[0], device=DEVICE)
        bounds = [torch.tensor([0, *x]).cumsum(0).int().to(DEVICE) for x in (lengths_q, lengths_k)]
        most = (max(lengths_q), max(lengths_k))
        if given == "attn_mask":
            more["attn_mask"] = torch.randn(1, 1, *most, device=DEVICE, dtype=dtype)

        def attend(*rows: Any, most: Any = most, more: Any = more) -> list[Tensor]:
            found = flash_attn_varlen_func(
                *(*rows, *most), batch_invariant=True, return_attn_probs=True, **more
            )
            return [bits(found[0]), bits(found[1].mT)]

        together = attend(q, k, v, *bounds)
        for b, (of_q, of_k) in enumerate(zip(*(x.unfold(0, 2, 1) for x in bounds), strict=True)):
            at_q, at_k = (slice(*x.tolist()) for x in (of_q, of_k))
            alone = attend(q[at_q], k[at_k], v[at_k], of_q - of_q[0], of_k - of_k[0])
            for name, x, y in zip(("out", "lse"), alone, together, strict=True):
                assert torch.equal(x, y[at_q]), (name, b, lengths_q, lengths_k)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_rows_behind_the_last_sequence(causal: bool) -> None:
    """cu_seqlens may end before the tensors do: a buffer may be larger than a step's tokens."""
    case = make_varlen_case(
        lengths_q=(64, 0, 129), lengths_k=(33, 5, 70), num_heads_k=2, causal=causal
    )
    skip_without_row(case)
    inputs = case.make_inputs()
    expected = run_forward_backward(case, inputs)
    rows = {"q": 40, "dout": 40, "k": 7, "v": 7}
    longer = {
        name: torch.cat([x, torch.full_like(x[:1], torch.nan).expand(more, -1, -1)])
        for name, more in rows.items()
        for x in [getattr(inputs, name)]
    }
    nothing = torch.full((4, 40), torch.nan, dtype=inputs.dlse.dtype, device=DEVICE)
    leaves = [longer[name].requires_grad_() for name in "qkv"]
    out, lse, _ = flash_attn_varlen_func(
        *(*leaves, inputs.cu_seqlens_q, inputs.cu_seqlens_k, None, None),
        causal=causal,
        return_attn_probs=True,
    )
    gradients = torch.autograd.grad(
        [out, lse], leaves, [longer["dout"], torch.cat([inputs.dlse, nothing], 1)]
    )
    result = AttentionResult(out, lse.transpose(0, 1), *gradients)
    totals = {"out": 193, "lse": 193, "dq": 193, "dk": 108, "dv": 108}
    for name, x in result.tensors().items():
        behind = x[totals[name] :]
        assert (behind == (-torch.inf if name == "lse" else 0)).all(), name
    inside = {name: x[: totals[name]] for name, x in result.tensors().items()}
    inside["lse"] = inside["lse"].transpose(0, 1)
    # More rows can mean other splits of a key head's query heads, hence sums in another order.
    for name in ("dk", "dv"):
        assert_same_up_to_one_rounding(inside[name], expected.tensors()[name], name)
        inside[name] = expected.tensors()[name]
    assert_same_bits(AttentionResult(**inside), expected)
    check_device_errors()


@pytest.mark.cuda_only
def test_tensors_past_two_to_the_31_elements() -> None:
    """Rows beyond 2^31 elements of q and out; the last sequences are compared."""
    if torch.cuda.get_device_properties(0).total_memory < 100 << 30:
        pytest.skip("needs a device with 100 GiB of memory")
    heads, head_dim, length = 128, 128, 64
    count = 2**31 // (heads * head_dim * length) + 3
    case = make_case(
        batch=count,
        seqlen_q=length,
        seqlen_k=length,
        num_heads_q=heads,
        num_heads_k=1,
        head_dim=head_dim,
        causal=True,
    )
    skip_without_row(case)
    q = torch.randn(count * length, heads, head_dim, device="cuda", dtype=torch.bfloat16)
    k, v = (
        torch.randn(count * length, 1, head_dim, device="cuda", dtype=torch.bfloat16)
        for _ in range(2)
    )
    cu_seqlens = torch.arange(count + 1, dtype=torch.int32, device="cuda") * length
    out, lse, _ = flash_attn_varlen_func(
        *(q, k, v, cu_seqlens, cu_seqlens, length, length), causal=True, return_attn_probs=True
    )
    one = make_varlen_case(
        lengths_q=(length,), num_heads_q=heads, num_heads_k=1, head_dim=128, causal=True
    )
    for b in (0, count // 2, count - 1):
        rows = slice(b * length, (b + 1) * length)
        sample = one.make_inputs()
        for name, x in (("q", q), ("k", k), ("v", v)):
            getattr(sample, name).copy_(x[rows])
        expected = run_reference(one, sample, use_dlse=False)
        assert_close(AttentionResult(out[rows], lse[:, rows]), *expected)
    del q, k, v, out, lse
    torch.cuda.empty_cache()


@pytest.mark.cuda_only
def test_fresh_memory_full_of_nan() -> None:
    """Tables, sums and statistics lie in memory that holds whatever was there."""
    case = make_varlen_case(
        lengths_q=(1, 129, 0, 64, 300), num_heads_q=8, num_heads_k=1, head_dim=96, causal=True
    )
    skip_without_row(case)
    inputs = case.make_inputs()
    expected = run_reference(case, inputs)
    for fill in (torch.nan, -1.0, 1e30):
        filling = [torch.full((1 << size,), fill, device="cuda") for size in range(8, 26)]
        filling += [torch.full((1 << size,), fill, device="cuda") for size in range(8, 22)]
        del filling
        assert_close(run_forward_backward(case, inputs), *expected)


def test_device_is_what_the_run_says() -> None:
    """Guards against a run that believes it tests a GPU and does not."""
    cu_seqlens = torch.tensor([0, 3], dtype=torch.int32, device=DEVICE)
    q = torch.zeros(3, 1, 8, dtype=torch.bfloat16, device=DEVICE)
    out = flash_attn_varlen_func(q, q, q, cu_seqlens, cu_seqlens, 3, 3)
    assert out.is_cuda != ON_CPU
