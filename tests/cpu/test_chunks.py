"""attention_chunk against a mask of it in fp64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from flash_attn_cuda import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from tests import reference
from tests.cases.attention import Alibi, AttentionCase, VarlenCase
from tests.cases.harness import captured, run_reference
from tests.reference import AttentionResult
from tests.reference.tolerance import assert_close

GPU = [pytest.mark.gpu, pytest.mark.cuda_only]
DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])


def chunk_mask(seqlen_q: int, seqlen_k: int, chunk: int, device: str = "cpu") -> Tensor:
    """(seqlen_q, seqlen_k), by the definition."""
    position = torch.arange(seqlen_q, device=device)[:, None] + seqlen_k - seqlen_q
    key = torch.arange(seqlen_k, device=device)
    return position.div(chunk, rounding_mode="floor") == key.div(chunk, rounding_mode="floor")


def results_of(
    case: Any, inputs: Any, function: Any, *lengths: Any, **more: Any
) -> AttentionResult:
    leaves = [x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    out, lse, _ = function(
        *leaves,
        *lengths,
        softmax_scale=case.softmax_scale,
        causal=case.causal,
        window_size=case.window,
        softcap=case.softcap,
        alibi_slopes=inputs.alibi_slopes,
        return_attn_probs=True,
        **more,
    )
    gradients = torch.autograd.grad([out, lse], leaves, [inputs.dout, inputs.dlse])
    return AttentionResult(out.detach(), lse.detach(), *gradients)


@DEVICES
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("seqlens", "chunk"),
    [
        ((96, 96), 32),
        ((100, 100), 32),
        ((100, 100), 1),
        ((40, 130), 48),
        ((130, 40), 48),
        ((1, 97), 32),
        ((130, 7), 5),
        ((60, 60), 64),
        ((9, 0), 4),
    ],
)
@pytest.mark.parametrize(
    "features",
    [{}, {"alibi": Alibi.per_batch, "softcap": 3.0}, {"window": (20, 9)}],
    ids=["plain", "modified", "window"],
)
def test_dense(
    device: str, causal: bool, seqlens: tuple[int, int], chunk: int, features: dict[str, Any]
) -> None:
    case = AttentionCase(
        batch=2,
        seqlen_q=seqlens[0],
        seqlen_k=seqlens[1],
        num_heads_k=2,
        causal=causal,
        device=device,
        dtype=torch.bfloat16,
        **features,
    )
    inputs = case.make_inputs()
    result = results_of(case, inputs, flash_attn_func, attention_chunk=chunk)
    mask = chunk_mask(*seqlens, chunk, device)[None, None]
    assert_close(result, *run_reference(case, inputs, mask=mask))


@DEVICES
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("chunk", [1, 32, 1000])
@pytest.mark.parametrize("partly", [False, True])
def test_packed(device: str, causal: bool, chunk: int, partly: bool) -> None:
    """Each sequence against itself alone."""
    lengths_q, lengths_k = (33, 0, 70, 5, 64, 20), (33, 4, 130, 90, 64, 3)
    more: dict[str, Any] = {}
    if partly:
        more = {"used_k": (30, 2, 128, 50, 64, 3), "leftpad": (3, 0, 0, 17, 64, 0)}
    case = VarlenCase(
        lengths_q=lengths_q,
        lengths_k=lengths_k,
        num_heads_k=2,
        causal=causal,
        device=device,
        dtype=torch.bfloat16,
        **more,
    )
    inputs = case.make_inputs()
    bounds = (inputs.cu_seqlens_q, inputs.cu_seqlens_k, 70, 130)
    given = {
        name: torch.tensor(more[key], dtype=torch.int32, device=device)
        for name, key in (("seqused_k", "used_k"), ("leftpad_k", "leftpad"))
        if key in more
    }
    actual = results_of(
        case, inputs, flash_attn_varlen_func, *bounds, attention_chunk=chunk, **given
    )
    starts_q = [sum(lengths_q[:i]) for i in range(len(lengths_q))]
    starts_k = [sum(lengths_k[:i]) for i in range(len(lengths_k))]
    for index, (first_q, first_k) in enumerate(zip(starts_q, starts_k, strict=True)):
        used = more["used_k"][index] if partly else lengths_k[index]
        pad = more["leftpad"][index] if partly else 0
        rows_q = slice(first_q, first_q + lengths_q[index])
        rows_k = slice(first_k + pad, first_k + used)
        dense = AttentionCase(
            batch=1,
            seqlen_q=lengths_q[index],
            seqlen_k=used - pad,
            num_heads_k=2,
            causal=causal,
            device=device,
            dtype=torch.bfloat16,
        )
        one = replace(
            dense.make_inputs(),
            q=inputs.q[None, rows_q],
            k=inputs.k[None, rows_k],
            v=inputs.v[None, rows_k],
            dout=inputs.dout[None, rows_q],
            dlse=inputs.dlse[None, :, rows_q],
        )
        mask = chunk_mask(dense.seqlen_q, dense.seqlen_k, chunk, device)[None, None]
        part = AttentionResult(
            actual.out[None, rows_q],
            actual.lse[None, :, rows_q],
            actual.dq[None, rows_q],
            actual.dk[None, rows_k],
            actual.dv[None, rows_k],
        )
        assert_close(part, *run_reference(dense, one, mask=mask))


@DEVICES
@pytest.mark.parametrize("seqlen_q", [1, 3, 40])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("new", [0, 1, 5])
@pytest.mark.parametrize("rotary", [False, True])
@pytest.mark.parametrize("pages", [False, True])
def test_caches(
    device: str, seqlen_q: int, causal: bool, new: int, rotary: bool, pages: bool
) -> None:
    """Against a call that appends, and a call with a mask over what it left."""
    if rotary and new == 0:
        pytest.skip("queries are rotated with new keys alone")
    chunk, capacity = 16, 96
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.bfloat16, device=device, generator=generator)

    filled = torch.tensor([50, 16, 90, 3], dtype=torch.int32, device=device)
    pad = torch.tensor([0, 7, 20, 0], dtype=torch.int32, device=device)
    q, cache = normal(4, seqlen_q, 4, 64), [normal(6, capacity, 2, 64) for _ in "kv"]
    entry = torch.tensor([5, 0, 3, 1], dtype=torch.int32, device=device)
    given: dict[str, Any] = {"cache_leftpad": pad, "cache_batch_idx": entry, "causal": causal}
    if pages:
        cache = [x.reshape(12, 48, 2, 64) for x in cache]
        given["block_table"] = torch.arange(12, dtype=torch.int32, device=device).view(6, 2)
    if new:
        given |= {"k": normal(4, new, 2, 64), "v": normal(4, new, 2, 64)}
    if rotary:
        angles = torch.rand(160, 16, device=device, generator=generator) * 6
        given |= {"rotary_cos": angles.cos().bfloat16(), "rotary_sin": angles.sin().bfloat16()}
    expected_cache = [x.clone() for x in cache]
    _, plain_lse = flash_attn_with_kvcache(
        q, *expected_cache, cache_seqlens=filled, return_softmax_lse=True, **given
    )
    out, lse = flash_attn_with_kvcache(
        q, *cache, cache_seqlens=filled, return_softmax_lse=True, attention_chunk=chunk, **given
    )
    assert out.shape == q.shape
    assert lse.shape == plain_lse.shape
    for x, y in zip(cache, expected_cache, strict=True):
        torch.testing.assert_close(x, y, rtol=0.01, atol=0.01)
    rows = [x.reshape(6, capacity, 2, 64) for x in cache]
    turned = turned_queries(q, given, filled, causal) if rotary else q
    for index in range(4):
        end = min(int(filled[index]) + new, capacity)
        keys = slice(int(pad[index]), end)
        k, v = (x[int(entry[index]), keys][None].double() for x in rows)
        mask = chunk_mask(seqlen_q, k.shape[1], chunk, device)[None, None]
        exact = reference.attention(turned[index : index + 1], k, v, causal=causal, mask=mask)
        for x, y in zip((out[index], lse[index]), exact, strict=True):
            torch.testing.assert_close(x, y[0].to(x.dtype), rtol=0.02, atol=0.02)


def turned_queries(q: Tensor, given: dict[str, Any], filled: Tensor, runs: bool) -> Tensor:
    cos, sin = given["rotary_cos"].double(), given["rotary_sin"].double()
    steps = torch.arange(q.shape[1], device=q.device) if runs else torch.zeros_like(filled[:1])
    position = filled[:, None].long() + steps
    position = position.expand(q.shape[0], q.shape[1])
    cos, sin = cos[position][:, :, None], sin[position][:, :, None]
    x = q.double()
    pairs = x[..., :32].unflatten(-1, (16, 2))
    first, second = pairs.unbind(-1)
    turned = torch.stack([first * cos - second * sin, first * sin + second * cos], -1).flatten(-2)
    return torch.cat([turned, x[..., 32:]], -1).to(q.dtype)


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
