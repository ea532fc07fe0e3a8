"""attention_chunk against a mask of it in fp64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from flash_attn_cuda import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from tests.cases.attention import Alibi, AttentionCase, KvCacheCase, VarlenCase
from tests.cases.harness import (
    assert_cache_close,
    attend_over_cache,
    captured,
    run_forward_backward,
    run_reference,
)
from tests.cases.pairwise import pairwise
from tests.reference.tolerance import assert_close

GPU = [pytest.mark.gpu, pytest.mark.cuda_only]
DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])


def chunk_mask(seqlen_q: int, seqlen_k: int, chunk: int, device: str = "cpu") -> Tensor:
    """(seqlen_q, seqlen_k), by the definition."""
    position = torch.arange(seqlen_q, device=device)[:, None] + seqlen_k - seqlen_q
    key = torch.arange(seqlen_k, device=device)
    return position.div(chunk, rounding_mode="floor") == key.div(chunk, rounding_mode="floor")


def masks_of(lengths: list[tuple[int, int]], chunk: int, device: str) -> Tensor:
    """(B, 1, Sq, Sk) of sequences of so many queries and keys."""
    longest = [max(x) for x in zip(*lengths, strict=True)]
    made = torch.zeros(len(lengths), 1, *longest, dtype=torch.bool, device=device)
    for index, (queries, keys) in enumerate(lengths):
        made[index, 0, :queries, :keys] = chunk_mask(queries, keys, chunk, device)
    return made


FORMS = (
    *(((96, 96), 32), ((100, 100), 32), ((100, 100), 1), ((40, 130), 48), ((130, 40), 48)),
    *(((1, 97), 32), ((130, 7), 5), ((60, 60), 64), ((9, 0), 4)),
)
FEATURES: tuple[dict[str, Any], ...] = (
    {},
    {"alibi": Alibi.per_batch, "softcap": 3.0},
    {"window": (20, 9)},
)


@DEVICES
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_dense(device: str, form: tuple[tuple[int, int], int], causal: bool) -> None:
    (seqlen_q, seqlen_k), chunk = form
    for features in FEATURES:
        case = AttentionCase(
            seqlen_q=seqlen_q, seqlen_k=seqlen_k, num_heads_k=2, causal=causal, device=device,
            **features,
        )  # fmt: skip
        inputs, mask = case.make_inputs(), chunk_mask(seqlen_q, seqlen_k, chunk, device)
        found = run_forward_backward(case, inputs, attention_chunk=chunk)
        assert_close(found, *run_reference(case, inputs, mask=mask[None, None]))


@DEVICES
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("chunk", [1, 32, 1000])
@pytest.mark.parametrize("partly", [False, True])
def test_packed(device: str, causal: bool, chunk: int, partly: bool) -> None:
    """Each sequence against itself alone."""
    more: dict[str, Any] = {}
    if partly:
        more = {"used_k": (30, 2, 128, 50, 64, 3), "leftpad": (3, 0, 0, 17, 64, 0)}
    case = VarlenCase(
        lengths_q=(33, 0, 70, 5, 64, 20), lengths_k=(33, 4, 130, 90, 64, 3), num_heads_k=2,
        causal=causal, device=device, **more,
    )  # fmt: skip
    inputs, none = case.make_inputs(), (0,) * 6
    used = zip(more.get("used_k", case.lengths_k), more.get("leftpad", none), strict=True)
    lengths = list(zip(case.lengths_q, (x - pad for x, pad in used), strict=True))
    mask = masks_of(lengths, chunk, device)
    found = run_forward_backward(case, inputs, attention_chunk=chunk)
    assert_close(found, *run_reference(case, inputs, mask=mask))


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
    keys = (used + new - pad for used, pad in zip(case.cached, case.leftpad, strict=True))
    mask = masks_of([(row["seqlens_q"], n) for n in keys], 16, device)
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

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flash_attn_func(q, k, v, causal=True, attention_chunk=32) * 2

    torch._dynamo.reset()
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")(q, k, v)
    torch.testing.assert_close(compiled, attend(q, k, v))
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
    mask = torch.ones(4, 4, dtype=torch.bool)
    with pytest.raises(NotImplementedError, match=r"attention_chunk: .* attn_mask .* got 2"):
        flash_attn_func(q, q, q, attn_mask=mask, attention_chunk=2)
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
