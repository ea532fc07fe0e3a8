"""What flash_attn.cute, FlashAttention-4's module, has alone: pages, masks by functions, lists.
What its functions are here: test_mappings.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import flash_attn_cuda as ours
from flash_attn_cuda.integrations import flash_attention_4 as fa4
from flash_attn_cuda.integrations.flash_attention_4 import BlockSparseTensorsTorch
from tests.surfaces.calls import (
    ON_EVERY_DEVICE,
    assert_compiles,
    assert_near,
    assert_same,
    dense,
    expected_of,
    int32,
)

FIELDS = (
    "mask_block_cnt mask_block_idx full_block_cnt full_block_idx cu_total_m_blocks "
    "cu_block_idx_offsets block_size dq_write_order dq_write_order_full spt"
)


def test_fields_of_block_sparse_tensors() -> None:
    assert BlockSparseTensorsTorch._fields == tuple(FIELDS.split())
    assert BlockSparseTensorsTorch._field_defaults == dict.fromkeys(FIELDS.split()[2:])


@ON_EVERY_DEVICE
@pytest.mark.parametrize("packed", [False, True])
def test_pages(packed: bool, device: str) -> None:
    """All rows of a sequence's pages where nobody says how many are used."""
    q, k, v = dense(device, 7, 12)
    table = int32(device, 3, 0, 5, 1, 4, 2).view(2, 3)
    order = table.flatten().long().argsort()
    pages = [x.reshape(6, 4, *x.shape[2:])[order] for x in (k, v)]
    for used in (None, [12, 9]):
        more: dict[str, Any] = {} if used is None else {"seqused_k": int32(device, *used)}
        expected = expected_of(q, k, v, [(7, n) for n in used or (12, 12)], causal=True)
        rows = q
        if packed:
            rows, more["cu_seqlens_q"] = q.flatten(0, 1), int32(device, 0, 7, 14)
            expected = expected[0].flatten(0, 1), expected[1].transpose(0, 1).flatten(1)
        results = fa4.flash_attn_varlen_func(
            rows, *pages, page_table=table, causal=True, return_lse=True, **more
        )
        assert_near(results, expected)


# -- masks -----------------------------------------------------------------------------------------


def of_everything(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """Keys up to 3 + 2 * b behind its own position, but every fifth, another for each head."""
    return (key <= query + 3 + 2 * b) & ((key + h) % 5 != 0)


def pairs_of(
    mask_mod: Callable[..., Any], batch: int, heads: int, seqlen_q: int, seqlen_k: int, device: str
) -> Tensor:
    index = [torch.arange(n, device=device) for n in (batch, heads, seqlen_q, seqlen_k)]
    b, h, i, j = (x.view(*(-1 if k == n else 1 for k in range(4))) for n, x in enumerate(index))
    return mask_mod(b, h, i, j)


@ON_EVERY_DEVICE
def test_mask_mod(device: str) -> None:
    """It alone decides, whatever causal and window_size say."""
    inputs = dense(device, 140, 150)
    mask = pairs_of(of_everything, 2, 4, 140, 150, device)
    expected = expected_of(*inputs, [(140, 150)] * 2, mask=mask)
    for ignored in ({}, {"causal": True}, {"window_size": (3, 0)}):
        results = fa4.flash_attn_func(*inputs, mask_mod=of_everything, return_lse=True, **ignored)
        assert_near(results, expected)
        results = fa4.flash_attn_varlen_func(
            *inputs, mask_mod=of_everything, return_lse=True, **ignored
        )
        assert_near(results, expected)


@ON_EVERY_DEVICE
def test_mask_mod_counts_from_a_sequences_first(device: str) -> None:
    q, k, v = dense(device, 70, 80)
    lengths = [(70, 50), (20, 80)]
    mask = pairs_of(of_everything, 2, 4, 70, 80, device)
    out, lse = expected_of(q, k, v, lengths, mask=mask)
    used = {"seqused_q": int32(device, 70, 20), "seqused_k": int32(device, 50, 80)}
    options = {"mask_mod": of_everything, "return_lse": True}
    assert_near(fa4.flash_attn_varlen_func(q, k, v, **used, **options), (out, lse))
    rows = {"cu_seqlens_q": int32(device, 0, 70, 90), "cu_seqlens_k": int32(device, 0, 50, 130)}
    packed = [
        torch.cat([x[b, : used[b]] for b in range(2)])
        for x, used in ((q, (70, 20)), (k, (50, 80)), (v, (50, 80)))
    ]
    for most in ({}, {"max_seqlen_q": 70, "max_seqlen_k": 80}):
        results = fa4.flash_attn_varlen_func(*packed, **rows, **most, **options)
        expected = (
            torch.cat([out[0], out[1, :20]]),
            torch.cat([lse[0], lse[1, :, :20]], 1),
        )
        assert_near(results, expected)


def lists_of(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Counts and indices of blocks (B, H, M, N) that are True."""
    indices = (~blocks).int().argsort(dim=-1, stable=True).int()
    return blocks.sum(-1, dtype=torch.int32), indices


def seen(blocks: Tensor, size: tuple[int, int], seqlen_q: int, seqlen_k: int) -> Tensor:
    by_pair = blocks.repeat_interleave(size[0], 2).repeat_interleave(size[1], 3)
    return by_pair[..., :seqlen_q, :seqlen_k]


@ON_EVERY_DEVICE
@pytest.mark.parametrize("size", [None, (256, 128), (128, 64)], ids=str)
@pytest.mark.parametrize("has_mod", [False, True], ids=["blocks", "mask_mod"])
@pytest.mark.parametrize("of_heads", [1, 4])
def test_block_sparse_tensors(
    of_heads: int, has_mod: bool, size: tuple[int, int] | None, device: str
) -> None:
    """Listed as partial, a block is as mask_mod says, without one visible where causal is."""
    inputs = dense(device, 260, 200)
    extent = size or (128, 128)
    shape = (2, of_heads, -(-260 // extent[0]), -(-200 // extent[1]))
    full = torch.rand(shape, device=device) < 0.4
    partial = ~full & (torch.rand(shape, device=device) < 0.5)
    tensors = BlockSparseTensorsTorch(*lists_of(partial), *lists_of(full), block_size=size)
    mod = of_everything if has_mod else None
    visible = seen(partial, extent, 260, 200)
    if has_mod:
        visible = visible & pairs_of(of_everything, 2, 4, 260, 200, device)
    mask = visible | seen(full, extent, 260, 200)
    options = {"causal": not has_mod, "mask": mask}
    expected = expected_of(*inputs, [(260, 200)] * 2, **options)
    call = {"mask_mod": mod, "block_sparse_tensors": tensors, "causal": True, "return_lse": True}
    assert_near(fa4.flash_attn_func(*inputs, **call, block_sparse_tensors_bwd=tensors), expected)
    if not has_mod:  # whose lists may lack the full blocks
        tensors = BlockSparseTensorsTorch(*lists_of(partial | full), block_size=size)
    assert_near(
        fa4.flash_attn_varlen_func(*inputs, **call | {"block_sparse_tensors": tensors}), expected
    )


def test_number_of_lists_tells_the_size() -> None:
    inputs = dense("cpu", 300, 130)
    for lists, size in ((3, (128, 128)), (2, (256, 128))):
        blocks = torch.rand(1, 1, lists, 2) < 0.6
        tensors = BlockSparseTensorsTorch(*lists_of(blocks))
        mask = seen(blocks, size, 300, 130)
        out = fa4.flash_attn_func(*inputs, block_sparse_tensors=tensors)[0]
        assert_near((out,), expected_of(*inputs, [(300, 130)] * 2, mask=mask)[:1])
    tensors = BlockSparseTensorsTorch(*lists_of(torch.ones(1, 1, 4, 2, dtype=torch.bool)))
    with pytest.raises(ValueError, match=r"^block_sparse_tensors.block_size: must be given where"):
        fa4.flash_attn_func(*inputs, block_sparse_tensors=tensors)


@ON_EVERY_DEVICE
def test_gradients_through_masks(device: str) -> None:
    inputs = [x.requires_grad_() for x in dense(device, 140, 150)]
    mask = pairs_of(of_everything, 2, 4, 140, 150, device)
    out, lse = fa4.flash_attn_func(*inputs, mask_mod=of_everything)
    assert lse is not None
    gradients = torch.autograd.grad(out.sin().sum(), inputs)
    out = ours.flash_attn_func(*inputs, attn_mask=mask)
    assert_near(gradients, torch.autograd.grad(out.sin().sum(), inputs))


def test_full_graphs() -> None:
    q, k, v = dense("cpu")
    used = int32("cpu", 5, 9)
    tensors = BlockSparseTensorsTorch(*lists_of(torch.ones(1, 1, 1, 1, dtype=torch.bool)))
    lse = {"return_lse": True}
    for mask in ({"mask_mod": of_everything}, {"block_sparse_tensors": tensors}):
        assert_compiles(lambda q, mask=mask: fa4.flash_attn_func(q, k, v, **mask, **lse), q)
    assert_compiles(
        lambda q: fa4.flash_attn_varlen_func(
            q, k, v, mask_mod=of_everything, seqused_k=used, **lse
        ),
        q,
    )


# -- refusals --------------------------------------------------------------------------------------


def of_the_dsl(b: Any, h: Any, query: Any, key: Any, seqlen_info: Any, aux_tensors: Any) -> Any:
    raise AssertionError("is not called")


@pytest.mark.parametrize("function", ["flash_attn_func", "flash_attn_varlen_func"])
def test_masks_and_tensors_that_are_refused(function: str) -> None:
    attend = getattr(fa4, function)
    q, k, v = dense("cpu")
    for mod in (of_the_dsl, lambda query, key: query >= key, 3):
        with pytest.raises(NotImplementedError, match=r"^mask_mod: must be a function of \(batch"):
            attend(q, k, v, mask_mod=mod)
    lists = lists_of(torch.ones(1, 1, 1, 1, dtype=torch.bool))
    for size in ((128, 32), (0, 128)):
        tensors = BlockSparseTensorsTorch(*lists, block_size=size)
        message = r"^block_sparse_tensors.block_size: must be positive multiples of 64, got"
        with pytest.raises(NotImplementedError, match=message):
            attend(q, k, v, block_sparse_tensors=tensors)
    many = lists_of(torch.ones(1, 1, 1, 3, dtype=torch.bool))
    other_heads = lists_of(torch.ones(1, 3, 1, 1, dtype=torch.bool))
    for name, bad in (
        ("mask_block_idx", (lists[0], many[1])),
        ("mask_block_cnt", other_heads),
        ("full_block_cnt", (*lists, *other_heads)),
    ):
        message = rf"^block_sparse_tensors.{name}: must have shape \(2 or 1, 4 or 1, 1"
        with pytest.raises(ValueError, match=message):
            attend(q, k, v, block_sparse_tensors=BlockSparseTensorsTorch(*bad))
    with pytest.raises(TypeError, match=r"^block_sparse_tensors.mask_block_cnt: must be a torch.T"):
        attend(q, k, v, block_sparse_tensors=(1, 2))


def test_errors_have_their_names() -> None:
    q, k, v = dense("cpu")
    for function in (fa4.flash_attn_func, fa4.flash_attn_varlen_func):
        with pytest.raises(
            ValueError, match=r"^learnable_sink: must have shape \(4,\), got \(3,\)"
        ):
            function(q, k, v, learnable_sink=torch.zeros(3, dtype=torch.float64))
    for table, more, kind in (
        (int32("cpu", 0), {}, ValueError),
        (int32("cpu", 0, 1, 2).view(3, 1), {}, ValueError),
        (torch.zeros(2, 1), {"seqused_k": int32("cpu", 1, 1)}, TypeError),
        ("table", {}, TypeError),
    ):
        with pytest.raises(kind, match=r"^page_table: "):
            fa4.flash_attn_varlen_func(q, k, v, page_table=table, **more)


def test_masks_of_pages_and_of_packed_queries() -> None:
    q, k, v = dense("cpu")
    tensors = BlockSparseTensorsTorch(*lists_of(torch.ones(1, 1, 1, 1, dtype=torch.bool)))
    table = int32("cpu", 0, 1).view(2, 1)
    for name, mask in (("mask_mod", of_everything), ("block_sparse_tensors", tensors)):
        with pytest.raises(NotImplementedError, match=f"^{name}: must be None, as masks over pag"):
            fa4.flash_attn_varlen_func(q, k, v, page_table=table, **{name: mask})
    with pytest.raises(NotImplementedError, match=r"^block_sparse_tensors: must be None, as lists"):
        fa4.flash_attn_varlen_func(
            *(q.flatten(0, 1), k, v),
            cu_seqlens_q=int32("cpu", 0, 7, 14),
            block_sparse_tensors=tensors,
        )
    with pytest.raises(ValueError, match=r"^q: must have 4 dimensions"):
        fa4.flash_attn_varlen_func(q[0], k, v, mask_mod=of_everything)
    with pytest.raises(ValueError, match=r"^q: must have 4 dimensions"):
        fa4.flash_attn_func(q[0], k, v, mask_mod=of_everything)


def test_scheduler_metadata() -> None:
    """A tuple of nothing, which a call takes."""
    q, k, v = dense("cpu")
    used = int32("cpu", 5, 9)
    sizes = (7, 9, 4, 2, 16, 0)
    plan = fa4.get_scheduler_metadata(*sizes, headdim_v=24, causal=True, seqused_k=used)
    assert isinstance(plan, fa4.SchedulerMetadataTensorsTorch) and not any(plan)
    assert plan._fields[:2] == ("num_m_blocks_ptr", "num_splits_dynamic_ptr")
    call: dict[str, Any] = {"seqused_k": used, "causal": True, "num_splits": 0}
    found = fa4.flash_attn_varlen_func(q, k, v, **call, scheduler_metadata=plan)
    assert_same(found[0], fa4.flash_attn_varlen_func(q, k, v, **call)[0])
    with pytest.raises(ValueError, match=r"^cu_seqlens_q, .* seqused_k: one of them must be given"):
        fa4.get_scheduler_metadata(*sizes)
    with pytest.raises(ValueError, match=r"^cu_seqlens_q, seqused_k: must be of one batch, got"):
        cu_seqlens = int32("cpu", 0, 3, 5, 9)
        fa4.get_scheduler_metadata(*sizes, cu_seqlens_q=cu_seqlens, seqused_k=used)
    with pytest.raises(TypeError, match=r"^seqused_q: must be a torch\.Tensor, got list"):
        fa4.get_scheduler_metadata(*sizes, seqused_q=[1, 2])
