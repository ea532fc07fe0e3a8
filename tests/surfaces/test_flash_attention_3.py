"""What flash_attn_interface, FlashAttention-3's module, has alone: positions of a rotation. What
its functions are here: test_mappings.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from flash_attn_cuda.integrations import flash_attention_3 as fa3
from tests.reference import kvcache_reference
from tests.surfaces.calls import (
    ON_EVERY_DEVICE,
    assert_near,
    assert_same,
    dense,
    int32,
    normal,
)


@ON_EVERY_DEVICE
def test_empty_layouts(device: str) -> None:
    for batch, seqlen in ((0, 7), (2, 0)):
        q, k, v = dense(device, seqlen, 9, batch)
        used = int32(device, *[4] * batch)
        out, lse = fa3.flash_attn_varlen_func(
            q, k, v, None, None, 7, 9, seqused_k=used, return_attn_probs=True
        )
        assert out.shape == (batch, seqlen, 4, 24) and lse.shape == (batch, 4, seqlen)
    with pytest.raises(ValueError, match=r"^k: must have 4 dimensions .* got shape \(18, 2, 16\)"):
        q, k, v = dense(device)
        fa3.flash_attn_varlen_func(
            *(q, k.flatten(0, 1), v, None, None, 7, 9), seqused_k=int32(device, 5, 5)
        )


def test_shapes_that_packed_rows_do_not_show() -> None:
    """A tensor of as many rows in other places is none of this call's."""
    q, k, v = dense("cpu", 6, 8)
    qv, out = (normal("cpu", 2, 6, 4, 24) for _ in range(2))
    latent: dict[str, Any] = {"q": q, "k": k, "v": v, "qv": qv, "softmax_scale": 0.2}
    appended = {"q": q.flatten(0, 1), "k_cache": k, "v_cache": v, "k": k[:, :2], "v": v[:, :2]}
    appended |= {"cache_seqlens": int32("cpu", 4, 6), "cu_seqlens_q": int32("cpu", 0, 6, 12)}
    backward = {"dout": out, "q": q, "k": k, "v": v, "out": out, "softmax_lse": out[..., 0].mT}
    backward |= {"sequed_k": int32("cpu", 8, 8)}
    beside = "must have the shape of {} but for the last dimension, .*, got .4, "
    for function, given, changes, words in (
        (fa3.flash_attn_func, latent, {"v": v.view(4, 4, 2, 24)}, f"v: {beside.format('k')}"),
        (fa3.flash_attn_func, latent, {"qv": qv.view(4, 3, 4, 24)}, f"qv: {beside.format('q')}"),
        (fa3.flash_attn_func, latent, {"k": k[:1], "v": v[:1]}, "k: batch must be .* .2., got 1"),
        (fa3.flash_attn_with_kvcache, appended, {"v": v.view(8, 2, 2, 24)[:4, :1]}, "v: must"),
        (fa3._flash_attn_backward, backward, {"dout": out.view(4, 3, 4, 24)}, "dout: must"),
    ):
        with pytest.raises(ValueError, match=f"^{words}"):
            function(**given | changes)


# -- caches ----------------------------------------------------------------------------------------


def cache(device: str, new: int = 0) -> dict[str, Tensor]:
    q, k_cache, v_cache = dense(device, 3, 12)
    made = {"q": q, "k_cache": k_cache, "v_cache": v_cache, "cache_seqlens": int32(device, 4, 6)}
    if new:
        made |= {"k": normal(device, 2, new, 2, 16), "v": normal(device, 2, new, 2, 24)}
    return made


def copied(given: dict[str, Any]) -> dict[str, Any]:
    return {name: x.clone() if isinstance(x, Tensor) else x for name, x in given.items()}


@ON_EVERY_DEVICE
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("packed", [False, True])
def test_rotary_seqlens(packed: bool, causal: bool, interleaved: bool, device: str) -> None:
    """At the lengths of the cache it changes nothing; elsewhere it is the reference's rotation with
    tables that begin at another row.
    """
    made = cache(device, 3)
    angle = torch.randn(24, 4)
    tables = {
        name: x.to(device, made["q"].dtype)
        for name, x in (("rotary_cos", angle.cos()), ("rotary_sin", angle.sin()))
    }
    options: dict[str, Any] = {"causal": causal, "rotary_interleaved": interleaved}
    if packed:
        made |= {name: made[name].flatten(0, 1) for name in "qkv"}
        made["q"] = torch.cat([made["q"], made["q"][:2]])  # two rows that are no sequence's
        options["cu_seqlens_q"] = int32(device, 0, 2, 6)
        options["cu_seqlens_k_new"] = int32(device, 0, 3, 6)
    for shift in (0, 5):
        given, shifted = copied(made), {name: x.roll(-shift, 0) for name, x in tables.items()}
        results = fa3.flash_attn_with_kvcache(
            **given, **tables, **options, rotary_seqlens=made["cache_seqlens"] + shift,
            return_softmax_lse=True,
        )  # fmt: skip
        expected = kvcache_reference(**copied(made), **shifted, **options)
        rows = slice(0, 6 if packed else 2)
        assert_near((results[0][rows],), (expected.expected.out[rows],))
        assert_near((given["k_cache"],), (expected.k_cache,))


@ON_EVERY_DEVICE
def test_rotary_seqlens_that_do_not_fit(device: str) -> None:
    made = cache(device, 3)
    table = normal(device, 24, 4)
    given = {**made, "rotary_cos": table, "rotary_sin": table}
    with pytest.raises(ValueError, match=r"^rotary_seqlens: must have shape \(2,\)"):
        fa3.flash_attn_with_kvcache(**given, rotary_seqlens=int32(device, 1))
    if device == "cpu":
        for bad in (-1, 22):
            with pytest.raises(ValueError, match=r"^rotary_seqlens: "):
                fa3.flash_attn_with_kvcache(**given, rotary_seqlens=int32(device, 0, bad))
    without = fa3.flash_attn_with_kvcache(**copied(made), rotary_seqlens=int32(device, 1, 1))
    assert_same(without, fa3.flash_attn_with_kvcache(**copied(made)))
    del given["k"], given["v"]
    with pytest.raises(ValueError, match=r"^rotary_cos: must be None without k"):
        fa3.flash_attn_with_kvcache(**given, rotary_seqlens=int32(device, 0, 0))


def test_wrong_arguments() -> None:
    q, k, v = dense("cpu")
    for heads in (None, 0, 3, 8):
        with pytest.raises(ValueError, match=r"^num_heads_q: must leave an even number"):
            fa3.flash_attn_qkvpacked_func(q.repeat(1, 1, 2, 1), num_heads_q=heads)
    with pytest.raises(ValueError, match=r"^page_table: must have shape \(2, max_pages\), got"):
        fa3.flash_attn_with_kvcache(q, k, v, page_table=int32("cpu", 0), cache_seqlens=2)
    with pytest.raises(ValueError, match=r"^page_table: must be a page of the pool, from 0 to 1"):
        fa3.flash_attn_with_kvcache(
            q, k, v, page_table=int32("cpu", 0, 2).view(2, 1), cache_seqlens=2
        )
