"""Latent attention by the names of FlashAttention-3, vLLM and FlashMLA."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from flash_attn_cuda import flash_attn_varlen_func, flash_attn_with_kvcache
from flash_attn_cuda.integrations import flash_attention_3 as fa3
from flash_attn_cuda.integrations import flash_mla, vllm
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


@pytest.mark.parametrize(
    "name", ["indices", "attn_sink", "extra_k_cache", "topk_length", "is_fp8_kvcache"]
)
def test_what_flash_mla_refuses(name: str) -> None:
    with pytest.raises(NotImplementedError, match=f"^{name}: must be"):
        mla(**{name: USED if name != "is_fp8_kvcache" else True})
    with pytest.raises(NotImplementedError, match=r"^indices: "):
        flash_mla.flash_mla_sparse_fwd(USED, USED, USED, 1.0)


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
