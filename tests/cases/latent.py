"""Latent attention: calls with a qv, whose keys are a few rotary columns and whose values are many
latent ones. Both may be views of one tensor.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tests.cases.harness import attend
from tests.cases.kvcache import KvCacheInputs, draw_lists
from tests.cases.layouts import poisoned
from tests.cases.varlen import VarlenCase
from tests.reference import (
    AttentionResult,
    bias_of_lists,
    varlen_attention_with_gradients,
    varlen_low_precision,
    with_qv,
)
from tests.reference.tolerance import Closeness, assert_close

# Of a KvCacheCase: DeepSeek's columns, and its scale.
LATENT: dict[str, Any] = {"head_dim": 64, "head_dim_v": 512, "num_heads_k": 1}
LATENT |= {"softmax_scale": 192**-0.5, "has_qv": True}


def split(both: Tensor, latent: int) -> tuple[Tensor, Tensor]:
    """(keys, values) of what holds values and, behind them, keys."""
    return both[..., latent:], both[..., :latent]


def joined(inputs: KvCacheInputs) -> dict[str, Tensor]:
    """The caches of a call as views of one."""
    both = torch.cat([inputs.v_cache, inputs.k_cache], -1)
    return dict(zip(("k_cache", "v_cache"), split(both, inputs.v_cache.shape[-1]), strict=True))


def with_poisoned_table(inputs: KvCacheInputs) -> KvCacheInputs:
    """Entries of the block table that no key needs name no page."""
    table, page_size = inputs.block_table, inputs.k_cache.shape[1]
    assert table is not None
    pages = torch.arange(table.shape[1], device=table.device)
    is_needed = pages * page_size < inputs.cache_seqlens[:, None]
    return replace(inputs, block_table=table.masked_fill(~is_needed, 2**31 - 1))


def check_packed(
    case: VarlenCase, page_size: int | None = None, keys_per_list: int | None = None, **changes: Any
) -> list[Closeness]:
    """flash_attn_varlen_func with a qv, over views of one tensor, against the reference; `changes`
    are arguments that must not matter. With lists of keys, those that none names are NaN.
    """
    inputs = case.make_inputs()
    qv = inputs.dout  # random, of its shape
    both = torch.cat([inputs.v, inputs.k], -1)
    bias = None
    if keys_per_list is not None:
        changes["key_lists"], bias, is_named = _lists(case, keys_per_list)
        both = both.masked_fill(~is_named[:, None, None], torch.nan)
    if page_size is not None:
        both, changes["block_table"] = _in_pages(both, case, page_size)
    tensors = (inputs.q, *split(both, case.value_dim))
    out, lse, _ = attend(case, inputs, *tensors, qv=qv, **changes)
    products = with_qv(inputs.q, inputs.k, inputs.v, qv)
    given = (*products, inputs.v, torch.zeros_like(qv), None)
    options: dict[str, Any] = {**inputs.lengths(), "options": replace(case.options(), bias=bias)}
    exact = varlen_attention_with_gradients(*given, **options)
    naive = varlen_low_precision(*given, **options)
    return assert_close(AttentionResult(out=out, lse=lse), exact, naive)


def _lists(case: VarlenCase, keys_per_list: int) -> tuple[Tensor, Tensor, Tensor]:
    """(key_lists, the reference's bias of them, whether some list names a row of k). Lists of
    queries that do not attend name anything.
    """
    heads_q, heads_k = case.num_heads_q, case.num_heads_k
    generator = torch.Generator(case.device).manual_seed(1)
    used_q, used_k = case.used_q or case.lengths_q, case.used_k or case.keys
    pads = case.leftpad or (0,) * case.batch
    bias = torch.full(
        (case.batch, heads_q, max(case.lengths_q), max(case.keys)), -torch.inf,
        dtype=torch.float64, device=case.device,
    )  # fmt: skip
    lists, named = [], []
    for b, (rows_q, rows_k) in enumerate(zip(case.lengths_q, case.keys, strict=True)):
        seqlen_q, seqlen_k = used_q[b], used_k[b] - pads[b]
        own = draw_lists((rows_q, heads_k, keys_per_list), seqlen_k, generator)
        own[seqlen_q:] = 2**31 - 1
        lists.append(own)
        own = own[:seqlen_q]
        named.append(torch.zeros(rows_k, dtype=torch.bool, device=case.device))
        named[-1][own[own >= 0].long() + pads[b]] = True
        of_lists = bias_of_lists(own, seqlen_k, heads_q // heads_k)
        bias[b, :, :seqlen_q, :seqlen_k] = of_lists[0]
    return torch.cat(lists), bias, torch.cat(named)


def _in_pages(x: Tensor, case: VarlenCase, page_size: int) -> tuple[Tensor, Tensor]:
    """(pages, block_table) of packed rows, in a random order, with NaN behind a sequence."""
    count = -(-max(case.keys) // page_size)
    order = torch.randperm(case.batch * count + 1, device=x.device)[: case.batch * count]
    table = order.view(case.batch, count).int()
    pages = poisoned(x, case.batch * count + 1, page_size, *x.shape[1:])
    for rows, entry in zip(x.split(case.keys), table.long(), strict=True):
        padded = poisoned(x, count * page_size, *x.shape[1:])
        padded[: len(rows)] = rows
        pages[entry] = padded.view(count, page_size, *x.shape[1:])
    return pages, table
