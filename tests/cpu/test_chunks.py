"""attention_chunk against a mask of it in fp64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from flash_attn_cuda import (
    BlockSparsity,
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
)
from tests.cases.attention import Alibi, KvCacheCase
from tests.cases.harness import assert_cache_close, attend_over_cache, captured
from tests.cases.masked import (
    MaskedCase,
    RandomBias,
    RandomMask,
    chunk_masks,
    masked_dense,
    masked_varlen,
)
from tests.cases.masked_harness import masked_reference, run_masked
from tests.cases.pairwise import pairwise
from tests.reference.tolerance import assert_close

GPU = [pytest.mark.gpu, pytest.mark.cuda_only]
DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])

FORMS = (
    *(((96, 96), 32), ((100, 100), 32), ((100, 100), 1), ((40, 130), 48), ((130, 40), 48)),
    *(((1, 97), 32), ((130, 7), 5), ((60, 60), 64), ((9, 0), 4), ((200, 264), 64)),
)
# Of a MaskedCase, and of the case that it is over.
FEATURES: tuple[tuple[dict[str, Any], dict[str, Any]], ...] = (
    ({}, {}),
    ({}, {"alibi": Alibi.per_batch, "softcap": 3.0}),
    ({}, {"window": (20, 9)}),
    ({"mask": RandomMask(0.5, 1, "h"), "sink": torch.float32}, {"softcap": 3.0}),
    ({"mask": RandomMask(0.3, 1, "bq", "sparsity"), "bias": RandomBias("h")}, {"dropout_p": 0.3}),
    ({"mask": RandomMask(0.5, 64, "hq", "blocks")}, {"window": (20, 9)}),
    ({"bias": RandomBias("bhq")}, {"alibi": Alibi.per_head}),
    ({"bias": RandomBias(reach=40)}, {}),
)


def check(case: MaskedCase) -> None:
    inputs = case.make_inputs()
    assert_close(run_masked(case, inputs), *masked_reference(case, inputs))


@DEVICES
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_dense(device: str, form: tuple[tuple[int, int], int], causal: bool) -> None:
    (seqlen_q, seqlen_k), chunk = form
    for masks, features in FEATURES:
        check(
            masked_dense(
                seqlen_q=seqlen_q, seqlen_k=seqlen_k, num_heads_k=2, causal=causal, device=device,
                chunk=chunk, **masks, **features,
            )
        )  # fmt: skip


@DEVICES
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("chunk", [1, 32, 1000])
@pytest.mark.parametrize("partly", [False, True])
@pytest.mark.parametrize("features", FEATURES, ids=str)
def test_packed(
    device: str, causal: bool, chunk: int, partly: bool, features: tuple[dict[str, Any], ...]
) -> None:
    """Each sequence against itself alone."""
    more: dict[str, Any] = features[0] | features[1]
    if partly:
        more |= {"used_k": (30, 2, 128, 50, 64, 3), "leftpad": (3, 0, 0, 17, 64, 0)}
        more |= {"used_q": (30, 0, 70, 2, 64, 20)}
    check(
        masked_varlen(
            lengths_q=(33, 0, 70, 5, 64, 20), lengths_k=(33, 4, 130, 90, 64, 3), num_heads_k=2,
            causal=causal, device=device, chunk=chunk, **more,
        )
    )  # fmt: skip


@DEVICES
@pytest.mark.parametrize("has_bits", [True, False])
def test_block_masks_longer_than_packed_sequences(device: str, has_bits: bool) -> None:
    case = masked_varlen(
        lengths_q=(70, 5, 100), lengths_k=(130, 90, 100), causal=True, device=device, chunk=48
    )
    inputs, longer = case.make_inputs(), torch.rand(1, 4, 300, 400, device=device) < 0.5
    if has_bits:
        sparsity = BlockSparsity.from_mask(longer)
    else:
        blocks = longer[..., ::64, ::64]
        sparsity = BlockSparsity.from_blocks(blocks, 64, 300, 400)
        longer = sparsity.to_mask()
    found = run_masked(case, inputs, block_mask=sparsity, max_seqlen_q=None, max_seqlen_k=None)
    assert_close(found, *masked_reference(case, replace(inputs, mask=longer[..., :100, :130])))


OVER_CACHES = pairwise(
    {
        "seqlens_q": [1, 3, 40],
        "causal": [True, False],
        "seqlens_new": [None, 1, 5],
        "rotary_dim": [0, 32],
        "page_size": [None, 48],
    }
)


@DEVICES
@pytest.mark.parametrize("row", OVER_CACHES, ids=str)
def test_caches(device: str, row: dict[str, Any]) -> None:
    """Queries are rotated with new keys alone."""
    new = row["seqlens_new"] or 0
    fields = {**row, "rotary_dim": row["rotary_dim"] if new else 0}
    case = KvCacheCase(
        cached=(50, 16, 56, 3), capacity=96, leftpad=(0, 7, 20, 0), batch_idx=(5, 0, 3, 1),
        device=device, **fields,
    )  # fmt: skip
    inputs = case.make_inputs()
    assert case.leftpad is not None
    keys = [used + new - pad for used, pad in zip(case.cached, case.leftpad, strict=True)]
    queries = row["seqlens_q"]
    mask = chunk_masks([(queries, n) for n in keys], 16, (queries, max(keys)), device)
    found, *caches = attend_over_cache(case, inputs, attention_chunk=16)
    assert_cache_close(case, inputs, found, *caches, mask=mask)


@DEVICES
def test_packed_queries_over_a_cache(device: str) -> None:
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.bfloat16, device=device, generator=generator)

    filled = torch.tensor([50, 0, 90], dtype=torch.int32, device=device)
    q, k, v = normal(45, 4, 64), normal(3, 96, 2, 64), normal(3, 96, 2, 64)
    bounds = torch.tensor([0, 30, 32, 45], dtype=torch.int32, device=device)
    out = flash_attn_with_kvcache(
        q, k, v, cache_seqlens=filled, cu_seqlens_q=bounds, attention_chunk=16, causal=True
    )
    for index, (first, last) in enumerate([(0, 30), (30, 32), (32, 45)]):
        alone = flash_attn_with_kvcache(
            q[None, first:last],
            k[index : index + 1],
            v[index : index + 1],
            cache_seqlens=filled[index : index + 1],
            attention_chunk=16,
            causal=True,
        )
        torch.testing.assert_close(out[first:last], alone[0], rtol=0.02, atol=0.02)


@DEVICES
def test_dropout_and_compile(device: str) -> None:
    q, k, v = (
        torch.randn(2, 100, 2, 64, device=device).bfloat16().requires_grad_() for _ in range(3)
    )

    def attend(attn_mask: Tensor | None) -> Tensor:
        options: dict[str, Any] = {"attn_mask": attn_mask, "attention_chunk": 32}
        return flash_attn_func(q, k, v, causal=True, **options) * 2

    torch._dynamo.reset()
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    bias = torch.randn(100, 100, device=device)
    for mask in (None, bias > 0.0, bias):
        torch.testing.assert_close(compiled(mask), attend(mask))
    outs = []
    for _ in range(2):
        torch.manual_seed(4)
        outs.append(flash_attn_func(q, k, v, dropout_p=0.3, attention_chunk=32))
    assert torch.equal(*outs)
    assert not torch.equal(outs[0], flash_attn_func(q, k, v, attention_chunk=32))


@pytest.mark.gpu
@pytest.mark.cuda_only
def test_graphs() -> None:
    lengths = torch.tensor([0, 40, 100], dtype=torch.int32, device="cuda")
    q, k, v = (torch.randn(100, 2, 64, device="cuda").bfloat16() for _ in range(3))

    def attend() -> Tensor:
        return flash_attn_varlen_func(q, k, v, lengths, lengths, 100, 100, attention_chunk=32)

    replay = captured(attend)
    lengths[1] = 70
    assert torch.equal(replay(), attend())


@pytest.mark.parametrize(
    ("chunk", "error", "words"),
    [
        (-1, ValueError, "attention_chunk: must be 0, for none, or positive, got -1"),
        (1.5, TypeError, "attention_chunk: must be an integer, got float"),
    ],
)
def test_bad_chunks(chunk: Any, error: type[Exception], words: str) -> None:
    q = torch.zeros(1, 4, 1, 8)
    with pytest.raises(error, match=words):
        flash_attn_func(q, q, q, attention_chunk=chunk)


def test_what_chunks_do_not_go_with() -> None:
    q = torch.zeros(1, 4, 1, 8)
    with pytest.raises(NotImplementedError, match=r"attention_chunk: .* dropout, got 2"):
        flash_attn_func(q, q, q, 0.5, return_attn_probs=True, attention_chunk=2)
    with pytest.raises(ValueError, match="v: "):
        flash_attn_func(q, q.repeat(2, 1, 1, 1), q, attention_chunk=2)
    bounds = torch.tensor([0, 4], dtype=torch.int32)
    table = torch.zeros(1, 1, dtype=torch.int32)
    with pytest.raises(NotImplementedError, match=r"attention_chunk: .* block_table"):
        flash_attn_varlen_func(
            q[0], q, q, bounds, bounds, 4, 4, block_table=table, attention_chunk=2
        )


@pytest.mark.parametrize("causal", [False, True])
def test_rows_behind_the_last_sequence_are_nobodys(causal: bool) -> None:
    q, k, v = torch.randn(3, 50, 2, 16, dtype=torch.float64)
    bounds = torch.tensor([0, 7, 47], dtype=torch.int32)
    given = (bounds, bounds, 40, 40)
    options = {"causal": causal, "attention_chunk": 16, "return_attn_probs": True}
    out, lse, _ = flash_attn_varlen_func(q, k, v, *given, **options)
    wanted, wanted_lse, _ = flash_attn_varlen_func(q[:47], k[:47], v[:47], *given, **options)
    torch.testing.assert_close(out[:47], wanted)
    torch.testing.assert_close(lse[:, :47], wanted_lse)
    assert not out[47:].any() and lse[:, 47:].isneginf().all()
