"""Packed sequences over pages, in large tensors, in buffers longer than they are, under bounds that
are too small.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from flash_attn_cuda import (
    check_device_errors,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
)
from tests.cases.attention import Alibi, VarlenCase
from tests.cases.fp8_harness import make
from tests.cases.harness import (
    DEVICE,
    bits,
    captured,
    check_rows_behind,
    make_cache_case,
    make_case,
    make_varlen_case,
    run_forward_backward,
    run_reference,
    skip_without_row,
)
from tests.cases.masked import MaskedCase, RandomBias, RandomMask
from tests.cases.masked_harness import skip_without_masked_row
from tests.cases.matrix import inputs_of
from tests.cases.public_calls import lengths, normal
from tests.reference import AttentionResult, dense_keys
from tests.reference.parts import mask_of_tree
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


SPLITS: list[dict[str, Any]] = [
    *({"num_splits": n} for n in (0, 1, 3)),
    {"batch_invariant": True},
]


@pytest.mark.parametrize("page_size", [1, 7, 16, 100, 256, 300])
@pytest.mark.parametrize(
    "of_scores",
    [
        *({}, {"sink": torch.bfloat16}, {"mask": RandomMask(0.7, own="bq")}),
        *({"bias": RandomBias("bhq", hidden=0.3)}, {"bias": RandomBias("h", fp32=True)}),
        {"bias": RandomBias(reach=40)},
    ],
    ids=["", "sink", "mask", "bias", "fp32_bias", "relative"],
)
@pytest.mark.parametrize(
    "features",
    [{}, {"causal": True}, {"window": (30, 2), "softcap": 5.0}],
    ids=["full", "causal", "window_softcap"],
)
def test_pages(features: dict[str, Any], of_scores: dict[str, Any], page_size: int) -> None:
    """flash_attn_varlen_func with a block_table: any page size, any splits."""
    for head_dim, queries, keys in (
        (64, (70, 1, 0, 130), (200, 301, 50, 0)),
        (128, (1, 1, 1), (333, 1, 64)),
    ):
        of = make_varlen_case(
            lengths_q=queries,
            lengths_k=keys,
            num_heads_k=2,
            head_dim=head_dim,
            **features,
        )
        masked = MaskedCase(of, **of_scores).make_inputs()
        given, relative_bias = masked.options(), masked.relative_bias
        attn_mask, bounds = given.get("mask", given.get("bias")), (None, None)
        needs = {} if attn_mask is None else {"mask": "bias-"}
        if relative_bias is not None:
            attn_mask = None
        if attn_mask is not None:
            bounds = of.max_seqlen_q, of.max_seqlen_k
        skip_without_row(
            make_cache_case(page_size=page_size, head_dim=head_dim, **features, **needs)
        )
        inputs, pool_k, pool_v, table = paged_inputs(of, page_size)
        expected = run_reference(of, inputs, use_dlse=False, **given)
        for splits in SPLITS:
            out, lse, _ = flash_attn_varlen_func(
                *(inputs.q, pool_k, pool_v, inputs.cu_seqlens_q, inputs.cu_seqlens_k, *bounds),
                **of.arguments(),
                return_attn_probs=True,
                block_table=table,
                sink=given.get("sink"),
                attn_mask=attn_mask,
                relative_bias=relative_bias,
                **splits,
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


def test_trees() -> None:
    """In pages and packed, of which the queries that attend count, and with any split."""
    case = make_varlen_case(
        **{"lengths_q": (70, 1, 0, 130, 9), "used_q": (64, 1, 0, 100, 9), "num_heads_k": 2},
        **{"lengths_k": (200, 301, 50, 99, 0), "window": (150, -1), "head_dim": 128},
    )
    skip_without_row(make_cache_case(page_size=16, head_dim=128, tree="any"))
    inputs, pool_k, pool_v, table = paged_inputs(case, 16)
    tree = torch.rand(case.total_q, 131, device=DEVICE) < 0.5
    pairs = torch.zeros(case.batch, 1, 130, 301, dtype=torch.bool, device=DEVICE)
    for b, rows in enumerate(tree.split(case.lengths_q)):
        queries, keys = case.used_q[b], case.lengths_k[b]
        pairs[b, :, :queries, :keys] = mask_of_tree(rows[:queries], keys)
    expected = run_reference(case, inputs, use_dlse=False, mask=pairs)
    bounds = (inputs.cu_seqlens_q, inputs.cu_seqlens_k, None, None)
    options = {**case.arguments(), "seqused_q": inputs.seqused_q, "return_attn_probs": True}
    for changes in (*SPLITS, {"block_table": None}):
        given = {"block_table": table, **changes}
        k, v = (inputs.k, inputs.v) if given["block_table"] is None else (pool_k, pool_v)
        result = flash_attn_varlen_func(
            *(inputs.q, k, v, *bounds), **options, **given, tree_mask=tree
        )
        assert_close(AttentionResult(*result[:2]), *expected)


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


# -- rows behind the last sequence, as a captured CUDA graph has them, and bounds ------------------

LENGTHS_Q, LENGTHS_K = (70, 0, 1, 129), (130, 20, 0, 65)


@pytest.mark.parametrize("rows", [(1, 0), (0, 1), (300, 200)], ids=str)
@pytest.mark.parametrize(
    "features",
    [
        {},
        {"causal": True},
        {"window": (20, 3), "alibi": Alibi.per_batch},
        {"causal": True, "head_dim": 59, "deterministic": True},
        {"used_q": (30, 0, 0, 129), "used_k": (130, 0, 0, 64), "leftpad": (5, 0, 0, 64)},
    ],
    ids=str,
)
def test_rows_behind_the_last_sequence(features: dict[str, Any], rows: tuple[int, int]) -> None:
    """No error is on record either."""
    case = make_varlen_case(lengths_q=LENGTHS_Q, lengths_k=LENGTHS_K, num_heads_k=2, **features)
    skip_without_row(case)
    check_rows_behind(case, *rows)
    check_device_errors()


def test_no_sequence_at_all() -> None:
    """Only zeros in cu_seqlens, or a single one: every row is behind the last sequence."""
    for cu in (lengths(0), lengths(0, 0, 0)):
        leaves = [normal(90, heads, 64).requires_grad_() for heads in (4, 2, 2)]
        out, lse, _ = flash_attn_varlen_func(*leaves, cu, cu, 0, None, return_attn_probs=True)
        gradients = torch.autograd.grad([out, lse], leaves, [out + 1, lse.exp() + 1])
        assert (lse == -torch.inf).all()
        assert not any(x.any() for x in (out, *gradients))
    check_device_errors()


# -- bounds ----------------------------------------------------------------------------------------


@pytest.mark.cuda_only  # on the CPU it is an error
@pytest.mark.parametrize("bounds", [(0, 0), (1, 1), (20, 1), (1, 300)], ids=str)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_a_max_seqlen_far_too_small(bounds: tuple[int, int], causal: bool) -> None:
    """It is a hint: on the device lengths alone say what there is."""
    case = make_varlen_case(lengths_q=LENGTHS_Q, lengths_k=LENGTHS_K, num_heads_k=2, causal=causal)
    inputs = inputs_of(case)
    given = dict(zip(("max_seqlen_q", "max_seqlen_k"), bounds, strict=True))
    result = run_forward_backward(case, inputs, **given)
    assert_close(result, *run_reference(case, inputs))


# -- a cache ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("paged", [False, True], ids=["dense", "paged"])
def test_a_decode_graph_takes_fewer_tokens_than_it_was_captured_with(paged: bool) -> None:
    """Packed queries and new keys: what lies behind the last sequence goes nowhere."""
    page_size, pages, rows = 16, 4, 12
    table = torch.arange(3 * pages, dtype=torch.int32, device=DEVICE).flip(0).view(3, pages)
    shape = (3 * pages, page_size) if paged else (3, pages * page_size)
    start = [normal(*shape, 2, 64) for _ in range(2)]
    tokens = {"q": normal(rows, 4, 64), "k": normal(rows, 2, 64), "v": normal(rows, 2, 64)}
    caches = [x.clone() for x in start]
    used, cu = lengths(0, 40, 7), lengths(0, 4, 8, 12)

    def attend(given: dict[str, Tensor], into: list[Tensor], cu_seqlens: Tensor) -> Any:
        return flash_attn_with_kvcache(
            *(given["q"], *into, given["k"], given["v"]),
            cache_seqlens=used,
            block_table=table if paged else None,
            cu_seqlens_q=cu_seqlens,
            causal=True,
            return_softmax_lse=True,
        )

    replay = captured(lambda: attend(tokens, caches, cu))
    for ends in ((0, 4, 8, 12), (0, 3, 4, 9), (0, 0, 1, 1), (0, 0, 0, 0)):
        for x, y in zip(caches, start, strict=True):
            x.copy_(y)
        cu.copy_(lengths(*ends))
        total = ends[-1]
        out, lse = replay()
        expected_caches = [x.clone() for x in start]
        few = {name: x[:total] for name, x in tokens.items()}
        expected_out, expected_lse = attend(few, expected_caches, lengths(*ends))
        torch.testing.assert_close(out[:total], expected_out, rtol=2.0**-7, atol=2.0**-9)
        torch.testing.assert_close(lse[:, :total], expected_lse, rtol=1e-4, atol=1e-4)
        assert not out[total:].any() and (lse[:, total:] == -torch.inf).all()
        for x, y in zip(caches, expected_caches, strict=True):
            assert torch.equal(bits(x), bits(y)), ends
    check_device_errors()
