"""Latent attention by the names of FlashAttention-3, vLLM, FlashMLA and FlashInfer."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from flash_attn_cuda import (
    LatentFormat,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    latent_views,
    quantize_latent,
)
from flash_attn_cuda.integrations import flash_attention_3 as fa3
from flash_attn_cuda.integrations import flash_mla, vllm
from flash_attn_cuda.integrations.flashinfer_mla import BatchMLAPagedAttentionWrapper
from tests.cases.latent import split

ROPE, LATENT = 16, 32
SCALE = {"softmax_scale": 0.3}
USED = torch.tensor([5, 0], dtype=torch.int32)
TABLE = torch.tensor([[3, 0], [1, 2]], dtype=torch.int32)


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.bfloat16)


def assert_same(actual: Any, expected: Any) -> None:
    for x, y in zip(actual, expected, strict=True):
        assert torch.equal(x, y)


def test_flash_attention_3_and_vllm() -> None:
    q, qv, both = normal(2, 3, 4, ROPE), normal(2, 3, 4, LATENT), normal(2, 8, 1, LATENT + ROPE)
    k, v = split(both, LATENT)
    cu_q, cu_k = (torch.arange(3, dtype=torch.int32) * x for x in (3, 8))
    rows, of_keys = (q.flatten(0, 1), qv.flatten(0, 1)), (k.flatten(0, 1), v.flatten(0, 1))
    lengths = (cu_q, cu_k, 3, 8)
    packed = flash_attn_varlen_func(
        rows[0], *of_keys, *lengths, qv=rows[1], causal=True, return_attn_probs=True, **SCALE
    )
    options: dict[str, Any] = {"causal": True, "return_attn_probs": True, **SCALE}
    assert_same(
        fa3.flash_attn_varlen_func(rows[0], *of_keys, *lengths, qv=rows[1], **options), packed[:2]
    )
    dense = packed[0].view(2, 3, 4, LATENT), packed[1].view(4, 2, 3).transpose(0, 1)
    assert_same(fa3.flash_attn_func(q, k, v, qv=qv, **options), dense)
    assert_same(fa3._flash_attn_forward(q, k, v, qv=qv, causal=True, **SCALE)[:2], dense)
    over_cache = flash_attn_with_kvcache(q, k, v, cache_seqlens=USED, qv=qv, **SCALE)
    given = {"seqused_k": USED, **SCALE}
    of_3 = fa3.flash_attn_with_kvcache(q, k, v, qv=qv, cache_seqlens=USED, **SCALE)
    assert torch.equal(of_3, over_cache)
    cache = (q, k, v, k[:, :1], v[:, :1])
    appended = fa3._flash_attn_forward(*cache, qv=qv, seqused_k=USED, **SCALE)
    assert appended[0].shape == over_cache.shape
    of_vllm = vllm.flash_attn_varlen_func(rows[0], k, v, 3, cu_q, 8, q_v=rows[1], **given)
    assert torch.equal(of_vllm, over_cache.flatten(0, 1))


def test_errors_have_their_names() -> None:
    q, (k, v) = normal(2, 3, 4, ROPE), (normal(2, 8, 1, ROPE) for _ in "kv")
    with pytest.raises(ValueError, match=r"^qv: must have the shape of q"):
        fa3.flash_attn_with_kvcache(q, k, v, qv=q[:1], **SCALE)
    with pytest.raises(ValueError, match=r"^softmax_scale: must be given with qv"):
        fa3.flash_attn_with_kvcache(q, k, v, qv=q)
    rows, bounds = q.flatten(0, 1), torch.arange(3, dtype=torch.int32) * 3
    with pytest.raises(ValueError, match=r"^q_v: must have the shape of q"):
        vllm.flash_attn_varlen_func(rows, k, v, 3, bounds, 8, seqused_k=USED, q_v=rows[:1], **SCALE)


# -- FlashMLA --------------------------------------------------------------------------------------


def mla(**changes: Any) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    pages = normal(4, 4, 1, LATENT + ROPE)
    given = (normal(2, 3, 4, LATENT + ROPE), pages, TABLE, USED, LATENT)
    return flash_mla.flash_mla_with_kvcache(*given, *flash_mla.get_mla_metadata(), **changes)


@pytest.mark.parametrize("options", [{}, {"causal": True}, SCALE], ids=str)
def test_flash_mla(options: dict[str, Any]) -> None:
    """In FlashMLA, lse of a query that sees no key is +inf."""
    torch.manual_seed(0)
    k, v = split(normal(4, 4, 1, LATENT + ROPE), LATENT)
    q, qv = split(normal(2, 3, 4, LATENT + ROPE), LATENT)
    scale = {"softmax_scale": (LATENT + ROPE) ** -0.5} | options
    expected, lse = flash_attn_with_kvcache(
        q, k, v, qv=qv, block_table=TABLE, cache_seqlens=USED, return_softmax_lse=True, **scale
    )
    out, found = mla(**options)
    assert torch.equal(out, expected) and not out[1].any()
    assert (lse[1] == -math.inf).all() and (found[1] == math.inf).all()
    assert torch.equal(found[0], lse[0])


V4 = LatentFormat.DEEPSEEK_V4
EVERY_ROWS = pytest.mark.parametrize("rows", [LatentFormat(), V4], ids=["V3.2", "V4"])


def of_bytes(rows: LatentFormat) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Queries (2, 3, 4, head_dim), pages that lie apart, and what they are of our own function."""
    latent, rotary = normal(4, 5, rows.latent_dim), normal(4, 5, rows.rotary_dim)
    pages = quantize_latent(latent, rotary, rows)[:, :, None]
    if rows is V4:  # of four tokens; what is behind a page's scales is NaN
        apart = torch.full((4, 5 * 584), 0xFF, dtype=torch.uint8)
        pages = apart[:, : 4 * 584].unflatten(1, (4, 1, 584))
        pages.copy_(quantize_latent(latent[:, :4], rotary[:, :4], rows)[:, :, None])
    q, pages = normal(2, 3, 4, rows.latent_dim + rows.rotary_dim), pages[:, :4]
    keys, values, scales = latent_views(pages, rows)
    ours = {"k_cache": keys, "v_cache": values, "v_descale": scales, "softmax_scale": 0.1}
    return q, pages, ours | {"values_include_rope": rows is V4}


@EVERY_ROWS
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.float8_e4m3fn], ids=str)
def test_flash_mla_over_rows_of_fp8(dtype: torch.dtype, rows: LatentFormat) -> None:
    """Of a cache in which pages lie apart."""
    q, pages, ours = of_bytes(rows)
    rope, nope = split(q, rows.latent_dim)
    options: dict[str, Any] = {"block_table": TABLE, "cache_seqlens": USED, "causal": True}
    expected = flash_attn_with_kvcache(rope, qv=nope, **ours, **options)
    given: dict[str, Any] = {"softmax_scale": 0.1, "causal": True, "is_fp8_kvcache": True}

    def run(q: Tensor, pages: Tensor, head_dim_v: int = 512) -> Tensor:
        return flash_mla.flash_mla_with_kvcache(q, pages, TABLE, USED, head_dim_v, None, **given)[0]

    assert torch.equal(run(q, pages.view(dtype)), expected)
    with pytest.raises(
        ValueError, match=rf"^k_cache: must have shape .*, {rows.row_bytes}\), got \(4, 4, 1, 560"
    ):
        run(q, pages[..., :560])
    with pytest.raises(ValueError, match=r"^head_dim_v: must be 512 with is_fp8_kvcache, got 256"):
        run(q, pages, 256)
    with pytest.raises(ValueError, match=r"^q: last dimension must be 576 or 512 with is_fp8"):
        run(normal(2, 3, 4, 640), pages)
    with pytest.raises(TypeError, match=r"^q: dtype must be one of float16, bfloat16 with is_fp8"):
        run(q.float(), pages)


@EVERY_ROWS
def test_chosen_rows_of_fp8(rows: LatentFormat) -> None:
    """The bits of our own call, over the pool as one sequence."""
    q, pages, ours = of_bytes(rows)
    indices = torch.randint(-1, 16, (2, 3, 9), dtype=torch.int32)
    out, _ = flash_mla.flash_mla_with_kvcache(
        q, pages, None, None, 512, None, softmax_scale=0.1, is_fp8_kvcache=True, indices=indices
    )
    (rope, nope), lists = split(q.flatten(0, 1)[None], rows.latent_dim), indices.view(1, 6, 1, 9)
    table = torch.arange(4, dtype=torch.int32)[None]
    expected = flash_attn_with_kvcache(rope, qv=nope, block_table=table, key_lists=lists, **ours)
    assert torch.equal(out.flatten(0, 1), expected[0])


def chosen(
    q: Tensor, rows: Tensor, indices: Tensor, head_dim_v: int, scale: float, sink: Tensor | None
) -> tuple[Tensor, Tensor]:
    """What FlashMLA says of its results: q (S, H, D), rows (N, D), indices (S, topk) -> out, lse,
    which does not have the sink.
    """
    is_there = (indices >= 0) & (indices < len(rows))
    keys = rows[indices.where(is_there, 0).long()].double()
    scores = torch.einsum("shd,skd->shk", q.double(), keys) * scale
    scores = scores.masked_fill(~is_there[:, None], -math.inf)
    lse = scores.logsumexp(-1)
    all_lse = lse if sink is None else torch.logaddexp(lse, sink.double())
    weights = (scores - all_lse[..., None]).exp().nan_to_num(0.0)
    out = weights @ keys[..., :head_dim_v]
    return out, lse.masked_fill(lse == -math.inf, math.inf)


def check_chosen(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    torch.testing.assert_close(found[0].double(), expected[0], rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(found[1].double(), expected[1], rtol=1e-5, atol=1e-5)


SINK = torch.tensor([-math.inf, 3.0, math.inf, 0.0])
OF_INDICES = ("attn_sink", "extra_k_cache", "topk_length")


@pytest.mark.parametrize("head_dim_v", [LATENT, LATENT + ROPE])
@pytest.mark.parametrize("sink", [None, SINK])
@pytest.mark.parametrize("lengths", [None, torch.tensor([2, 7])])
@pytest.mark.parametrize("is_strided", [False, True])
def test_chosen_keys_of_flash_mla(
    is_strided: bool, lengths: Tensor | None, sink: Tensor | None, head_dim_v: int
) -> None:
    """By their places in the pages, which no sequence owns."""
    torch.manual_seed(1)
    q, wide = normal(2, 3, 4, LATENT + ROPE), normal(5, 6, 1, LATENT + ROPE)
    pages = wide[:, :4] if is_strided else wide.flatten(0, 1)[:20].view(5, 4, 1, -1)
    indices = torch.randint(-3, 20, (2, 3, 9), dtype=torch.int32)
    indices[1, 2] = -1
    found = flash_mla.flash_mla_with_kvcache(
        *(q, pages, None, None, head_dim_v, flash_mla.get_mla_metadata()[0]),
        indices=indices, attn_sink=sink, topk_length=lengths,
    )  # fmt: skip
    if lengths is not None:
        indices = indices.masked_fill(torch.arange(9) >= lengths[:, None, None], -1)
    given = (q.flatten(0, 1), pages.flatten(0, 2), indices.flatten(0, 1))
    out, lse = chosen(*given, head_dim_v, (LATENT + ROPE) ** -0.5, sink)
    check_chosen(found, (out.view(2, 3, 4, -1), lse.view(2, 3, 4).transpose(1, 2)))


@pytest.mark.parametrize("sink", [None, SINK])
@pytest.mark.parametrize("lengths", [None, torch.arange(6)])
def test_sparse_prefill_of_flash_mla(lengths: Tensor | None, sink: Tensor | None) -> None:
    torch.manual_seed(2)
    q, kv = normal(6, 4, LATENT + ROPE), normal(11, 1, LATENT + ROPE)
    indices = torch.randint(-2, 14, (6, 1, 7), dtype=torch.int32)
    indices[3] = 11  # beyond kv, as FlashMLA may have it
    given = (q, kv, indices, 0.3, LATENT, sink, lengths)
    out, largest, lse = flash_mla.flash_mla_sparse_fwd(*given)
    if lengths is not None:
        indices = indices.masked_fill(torch.arange(7) >= lengths[:, None, None], -1)
    assert largest is None and out.dtype == torch.bfloat16
    check_chosen((out, lse), chosen(q, kv[:, 0], indices[:, 0], LATENT, 0.3, sink))


@pytest.mark.parametrize("numbers", [1, 2 * 2 * 7 * 48, 1 << 24])  # a query, two, all at a time
@pytest.mark.parametrize("rows", [11, 0])
def test_largest_scores_of_sparse_prefill(
    monkeypatch: pytest.MonkeyPatch, rows: int, numbers: int
) -> None:
    """Rows that no list names are NaN; the scale may be negative."""
    torch.manual_seed(3)
    monkeypatch.setattr(flash_mla, "_GATHERED_NUMBERS", numbers)
    q, kv = normal(5, 4, LATENT + ROPE), normal(rows, 2, LATENT + ROPE)
    kv[:2] = torch.nan
    indices = torch.randint(-2, 11, (5, 2, 7), dtype=torch.int32)
    indices = indices.where(indices > 1, -1)
    indices[3, 1] = -1
    lengths = torch.tensor([7, 3, 0, 7, 7])
    given = (q, kv, indices, -0.3, LATENT, SINK, lengths)
    with torch.autocast("cpu"):
        _, largest, _ = flash_mla.flash_mla_sparse_fwd(*given, return_max_logits=True)
    expected = torch.full((5, 4), -math.inf, dtype=torch.float64)
    for i, head in product(range(5), range(4)):
        named = indices[i, head // 2, : lengths[i]]
        keys = kv[named[(named >= 0) & (named < rows)].long(), head // 2].double()
        scores = -0.3 * (keys @ q[i, head].double())
        expected[i, head] = max(scores.tolist(), default=-math.inf)
    assert largest.dtype == torch.float32
    torch.testing.assert_close(largest.double(), expected, rtol=1e-6, atol=1e-6)


def test_errors_of_chosen_keys_have_flash_mla_s_names() -> None:
    q, kv = normal(6, 4, LATENT + ROPE), normal(11, 1, LATENT + ROPE)
    indices = torch.zeros(6, 1, 7, dtype=torch.int32)

    def sparse(**changes: Any) -> Any:
        given = {"q": q, "kv": kv, "indices": indices, "sm_scale": 0.3, "d_v": LATENT}
        return flash_mla.flash_mla_sparse_fwd(**given | changes)

    def decode(**changes: Any) -> Any:
        return mla(**{"indices": torch.zeros(2, 3, 7, dtype=torch.int32)} | changes)

    for run, changes, kind, words in (
        (sparse, {"indices": indices.long()}, TypeError, r"indices: dtype must be torch\.int32"),
        (sparse, {"indices": indices[:3]}, ValueError, r"indices: must have a list for every"),
        (sparse, {"indices": indices[0]}, ValueError, r"indices: must have 3 dimensions, got"),
        (sparse, {"kv": kv[..., :8]}, ValueError, r"kv: last dimension"),
        (sparse, {"d_v": 0}, ValueError, r"d_v: must be from 1 to 48, q's head_dim, got 0"),
        (sparse, {"sm_scale": None}, ValueError, r"sm_scale: must be given"),
        (sparse, {"attn_sink": SINK[:2]}, ValueError, r"attn_sink: must have shape \(4,\), got"),
        (sparse, {"topk_length": USED}, ValueError, r"topk_length: must have shape \(6,\), got"),
        (sparse, {"indexer_topk": 512}, NotImplementedError, r"indexer_topk: must be 0, .*, got 5"),
        *((mla, {x: USED}, NotImplementedError, f"{x}: must be") for x in OF_INDICES),
        (decode, {"causal": True}, ValueError, r"causal: must be False with indices, got True"),
        (decode, {"indices": indices}, ValueError, r"indices: must have shape \(2, 3, 7\), got"),
        (decode, {"extra_k_cache": q}, NotImplementedError, r"extra_k_cache: must be None, as"),
    ):
        with pytest.raises(kind, match=f"^{words}"):
            run(**changes)


def test_head_dims_of_flash_mla() -> None:
    q, pages = normal(2, 3, 4, 48), normal(4, 4, 1, 48)
    for head_dim_v in (0, 49):
        with pytest.raises(ValueError, match=r"^head_dim_v: must be from 1 to 48, .*"):
            flash_mla.flash_mla_with_kvcache(q, pages, TABLE, USED, head_dim_v, None)
    out, _ = flash_mla.flash_mla_with_kvcache(q, pages, TABLE, USED, 48, None)
    given = {"block_table": TABLE, "cache_seqlens": USED}
    assert torch.equal(out, flash_attn_with_kvcache(q, pages, pages, **given))
    with pytest.raises(ValueError, match=r"^k_cache: last dimension"):
        flash_mla.flash_mla_with_kvcache(q, pages[..., :40], TABLE, USED, 32, None)


# -- FlashInfer ------------------------------------------------------------------------------------

PAGE = 4
QO, KV_LENS = torch.tensor([0, 2, 2, 5], dtype=torch.int32), torch.tensor([7, 3, 9])
KV, KV_INDICES = torch.tensor([0, 2, 3, 6]), torch.tensor([5, 1, 6, 0, 2, 4])


def planned(rope: int = ROPE, causal: bool = True, **options: Any) -> Any:
    wrapper = BatchMLAPagedAttentionWrapper(torch.empty(0), **options)
    dtype = torch.bfloat16
    wrapper.plan(QO, KV, KV_INDICES, KV_LENS, 4, LATENT, rope, PAGE, causal, 0.3, dtype, dtype)
    return wrapper


def of_flashinfer(rope: int = ROPE) -> tuple[Tensor, ...]:
    """q_nope, q_pe, ckv_cache, kpe_cache."""
    rows, pages = (5, 4), (7, PAGE)
    return tuple(normal(*x, n) for x in (rows, pages) for n in (LATENT, rope))


@pytest.mark.parametrize("rope", [ROPE, 0])
@pytest.mark.parametrize("causal", [False, True])
def test_flashinfer(causal: bool, rope: int) -> None:
    wrapper, given = planned(rope, causal), of_flashinfer(rope)
    qv, q, ckv, kpe = given
    table = torch.tensor([[5, 1, 0], [6, 0, 0], [0, 2, 4]], dtype=torch.int32)
    # Without rotary columns a value is its key.
    products = (q, kpe, qv) if rope > 0 else (qv, ckv, None)
    expected, lse = flash_attn_with_kvcache(
        products[0], products[1][:, :, None], ckv[:, :, None], qv=products[2],
        cache_seqlens=KV_LENS.int(), block_table=table, cu_seqlens_q=QO, causal=causal,
        return_softmax_lse=True, softmax_scale=0.3,
    )  # fmt: skip
    assert torch.equal(wrapper.run(*given), expected)
    out, found = torch.empty_like(expected), torch.empty(5, 4)
    results = wrapper.run(*given, out, found, True)
    assert results[0] is out and results[1] is found and torch.equal(out, expected)
    torch.testing.assert_close(found, lse.T * math.log2(math.e))
    _, natural = wrapper.run(*given, return_lse=True, return_lse_base_on_e=True)
    assert torch.equal(natural, lse.T)


def test_a_plan_of_flashinfer_for_graphs() -> None:
    """Stays where it is, with as many pages a sequence as the buffer has for each."""
    buffers = {"qo_indptr": torch.empty(4), "kv_indices": torch.empty(9)}
    wrapper = planned(use_cuda_graph=True, **buffers)
    before = {name: x.data_ptr() for name, x in wrapper._lengths.items()}
    given = of_flashinfer()
    assert torch.equal(wrapper.run(*given), planned().run(*given))
    rest = (4, LATENT, ROPE, PAGE, True, 0.3, torch.bfloat16, torch.bfloat16)
    wrapper.plan(QO, KV, KV_INDICES.flip(0), KV_LENS, *rest)
    assert {name: x.data_ptr() for name, x in wrapper._lengths.items()} == before
    with pytest.raises(ValueError, match=r"^kv_indptr: must have at most 3 pages a .*, got 4"):
        wrapper.plan(QO, torch.tensor([0, 4, 5, 6]), KV_INDICES, KV_LENS, *rest)
    with pytest.raises(ValueError, match=r"^qo_indptr: must have as many sequences in every plan"):
        wrapper.plan(QO[:3], KV[:3], KV_INDICES, KV_LENS[:2], *rest)


def test_what_flashinfer_has_beside_it() -> None:
    given = of_flashinfer()
    wrapper = BatchMLAPagedAttentionWrapper(torch.empty(0))
    with pytest.raises(RuntimeError, match=r"^plan: must be called before run"):
        wrapper.run(*given)
    for name in ("profiler_buffer", "kv_len", "page_table"):
        with pytest.raises(NotImplementedError, match=rf"^{name}: must be None"):
            planned().run(*given, **{name: KV_LENS})
    with pytest.raises(NotImplementedError, match=r"^backend: must not be cutlass"):
        planned(backend="cutlass")
    with pytest.raises(ValueError, match=r"^q_nope: must have the shape of q_pe but for"):
        planned().run(given[0][:, :2], *given[1:])
