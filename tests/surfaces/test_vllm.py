"""vLLM's attention functions on this package."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import flash_attn_cuda as ours
from flash_attn_cuda.integrations import vllm
from tests.cases.harness import DEVICE, captured, no_host_sync
from tests.surfaces.calls import (
    ON_EVERY_DEVICE,
    assert_near,
    assert_same,
    dense,
    expected_of,
    int32,
    normal,
)

LENGTHS = [(5, 9), (1, 12), (0, 3)]  # queries of a prompt and of a token, keys with what is cached


@pytest.mark.parametrize("fa_version", [2, 3, 4])
def test_every_version_is_this_package(fa_version: int) -> None:
    assert vllm.is_fa_version_supported(fa_version)
    assert vllm.fa_version_unsupported_reason(fa_version) is None
    for function in (vllm.is_fa_version_supported, vllm.fa_version_unsupported_reason):
        with pytest.raises(ValueError, match=r"fa_version: must be 2, 3 or 4, got 5"):
            function(5)


def a_batch(device: str, padding: int = 3) -> tuple[dict[str, Any], list[Tensor]]:
    """vLLM's call over pages of 4 rows, with `padding` rows of queries that are no sequence's, and
    q, k, v with a dimension for the batch.
    """
    q, k, v = dense(device, 5, 12, 3)
    rows = torch.cat([q[b, :used] for b, (used, _) in enumerate(LENGTHS)])
    rows = torch.cat([rows, rows.new_full((padding, 4, 16), torch.nan)])
    table = torch.randperm(9, device=device).int().view(3, 3)
    order = table.flatten().long().argsort()
    pages = [x.reshape(9, 4, *x.shape[2:])[order] for x in (k, v)]
    call = {
        "q": rows, "k": pages[0], "v": pages[1], "max_seqlen_q": 5, "max_seqlen_k": 12,
        "cu_seqlens_q": int32(device, 0, 5, 6, 6), "seqused_k": int32(device, 9, 12, 3),
        "block_table": table,
    }  # fmt: skip
    return call, [q, k, v]


def rows_of(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """A batch's (out, lse) with the queries of LENGTHS packed."""
    used = [n for n, _ in LENGTHS]
    outs = [out[b, :n] for b, n in enumerate(used)]
    return torch.cat(outs), torch.cat([lse[b, :, :n] for b, n in enumerate(used)], 1)


@ON_EVERY_DEVICE
@pytest.mark.parametrize("fa_version", [2, 3, 4])
def test_a_step_of_serving(fa_version: int, device: str) -> None:
    """Into the buffer of the engine, whose rows behind the last query are 0 afterwards."""
    call, given = a_batch(device)
    sink = torch.randn(4, device=device)
    metadata = vllm.get_scheduler_metadata(
        batch_size=3, max_seqlen_q=5, max_seqlen_k=12, num_heads_q=4, num_heads_kv=2, headdim=16,
        cache_seqlens=call["seqused_k"], qkv_dtype=torch.bfloat16, page_size=4, causal=True,
    )  # fmt: skip
    assert metadata.shape == (0,) and metadata.dtype == torch.int32
    kept = torch.zeros(8, dtype=torch.int32, device=device)  # as engines do for captured graphs
    kept[: metadata.shape[0]] = metadata
    out = torch.full((9, 4, 24), 7.0, dtype=given[0].dtype, device=device)
    scale = torch.ones(3, 2, device=device)
    result, lse = vllm.flash_attn_varlen_func(
        **call,
        out=out,
        softmax_scale=0.4,
        causal=True,
        window_size=[7, 0],
        softcap=5.0,
        s_aux=sink,
        scheduler_metadata=kept[: metadata.shape[0]],
        fa_version=fa_version,
        q_descale=scale,
        k_descale=scale,
        v_descale=scale,
        return_softmax_lse=True,
        return_attn_probs=True,
    )
    assert result is out
    features = {"softmax_scale": 0.4, "softcap": 5.0, "window": (7, 0), "sink": sink.double()}
    expected = rows_of(*expected_of(*given, LENGTHS, causal=True, **features))
    assert_near((out[:6], lse[:, :6]), expected)
    assert not out[6:].any()
    call |= {"causal": True, "softmax_scale": 0.4, "window_size": (7, 0), "softcap": 5.0}
    assert_same(vllm.flash_attn_varlen_func(**call, s_aux=sink), out)
    assert_same(ours.flash_attn_varlen_func(**call, cu_seqlens_k=None, sink=sink), out)


@ON_EVERY_DEVICE
@pytest.mark.parametrize("num_splits", [-1, 0, 1, 3])
def test_splits_and_slopes(num_splits: int, device: str) -> None:
    call, given = a_batch(device, padding=0)
    slopes = torch.rand(4, device=device)
    out, lse = vllm.flash_attn_varlen_func(
        **call, causal=True, alibi_slopes=slopes, num_splits=num_splits, return_softmax_lse=True
    )
    features = {"causal": True, "alibi_slopes": slopes.double()}
    assert_near((out, lse), rows_of(*expected_of(*given, LENGTHS, **features)))


def test_under_compile() -> None:
    call, _ = a_batch("cpu")

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(q: Tensor, out: Tensor) -> Tensor:
        return vllm.flash_attn_varlen_func(**call | {"q": q + 0}, causal=True, out=out)

    out = torch.zeros(9, 4, 24, dtype=torch.float64)
    step(call["q"], out)
    assert_same(out, vllm.flash_attn_varlen_func(**call, causal=True))


# -- refusals --------------------------------------------------------------------------------------


def test_lengths_and_versions() -> None:
    call, _ = a_batch("cpu")
    for version in (1, 5, None):
        with pytest.raises(ValueError, match=r"^fa_version: must be 2, 3 or 4, got"):
            vllm.flash_attn_varlen_func(**call, fa_version=version)
    cu_k = int32("cpu", 0, 9, 12, 24)
    with pytest.raises(ValueError, match=r"^cu_seqlens_k, seqused_k: one of them .* got both"):
        vllm.flash_attn_varlen_func(**call, cu_seqlens_k=cu_k)
    used = call.pop("seqused_k")
    with pytest.raises(ValueError, match=r"^cu_seqlens_k, seqused_k: one of them .* got neither"):
        vllm.flash_attn_varlen_func(**call)
    with pytest.raises(ValueError, match=r"^seqused_k: must be given with a block_table, got None"):
        vllm.flash_attn_varlen_func(**call, cu_seqlens_k=cu_k)
    with pytest.raises(ValueError, match=r"^s_aux: must have shape \(4,\), got \(3,\)"):
        vllm.flash_attn_varlen_func(
            **call, seqused_k=used, s_aux=torch.zeros(3, dtype=torch.float64)
        )
    call["q"].requires_grad_()
    out = torch.zeros(9, 4, 24, dtype=torch.float64)
    with pytest.raises(NotImplementedError, match=r"^out: must be None in a call whose gradients"):
        vllm.flash_attn_varlen_func(**call, seqused_k=used, out=out)


@pytest.mark.gpu
def test_nothing_waits_for_the_device() -> None:
    call, _ = a_batch(DEVICE)
    out = normal(DEVICE, 9, 4, 24)
    with no_host_sync():
        vllm.flash_attn_varlen_func(**call, out=out, causal=True)


@pytest.mark.gpu
def test_a_captured_step() -> None:
    """A replay writes the same buffer, by the lengths of then."""
    call, _ = a_batch(DEVICE)
    out = normal(DEVICE, 9, 4, 24)
    replay = captured(lambda: vllm.flash_attn_varlen_func(**call, out=out, causal=True))
    call["seqused_k"].copy_(int32(DEVICE, 12, 5, 0))
    assert replay() is out
    assert_same(out, vllm.flash_attn_varlen_func(**call, causal=True))
