"""What the ranks of a test do with the functions of ring_flash_attn: each takes rows of the whole
in a function's layout, and has what one call over the whole gives these rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from flash_attn_cuda.context_parallel import parallel
from flash_attn_cuda.integrations import ring_flash_attn as ring
from tests.context_parallel.cases import Case, Whole


@dataclass(frozen=True)
class Call:
    """stem: of the name, before `_func`; form: "", "kvpacked_" or "qkvpacked_"."""

    stem: str
    case: Case
    form: str = ""
    heads_k_stride: int = 1


def rows_of(stem: str, bounds: list[int]) -> Tensor:
    """Which rows of the packed whole this rank has."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if stem.startswith("llama3"):
        return torch.arange(bounds[-1]).chunk(ranks)[rank]
    mine = []
    for begin, end in pairwise(bounds):
        rows = torch.arange(begin, end)
        if stem.startswith("stripe"):
            mine.append(rows[rank::ranks])
        elif stem.startswith("zigzag"):
            parts = rows.view(2 * ranks, -1)
            mine += [parts[rank], parts[2 * ranks - 1 - rank]]
        else:
            mine.append(rows.view(ranks, -1)[rank])
    return torch.cat(mine)


def scheme_of(call: Call) -> tuple[str, int | None]:
    if call.stem.startswith("llama3"):
        return "all_gather", call.case.heads_k // call.heads_k_stride
    return "ring", None


def equals_the_whole(call: Call) -> None:
    case = call.case
    whole, ranks = Whole.of(case), dist.get_world_size()
    rows = rows_of(call.stem, whole.cu_seqlens)
    q, k, v, dout = (x[rows] for x in (whole.q, whole.k, whole.v, whole.dout))
    dlse = whole.dlse[:, rows]
    places: tuple[Any, ...] = ()
    if call.stem.startswith("llama3"):
        bounds = torch.tensor(whole.cu_seqlens, dtype=torch.int32)
        *made, of_keys = ring.llama3_flash_attn_prepare_cu_seqlens(
            bounds, case.causal, dist.get_rank(), ranks
        )
        places = (*made, call.heads_k_stride, of_keys)
    elif "varlen" in call.stem:
        bounds = torch.tensor(whole.cu_seqlens, dtype=torch.int32) // ranks
        places = (bounds, max(case.lengths, default=0) // ranks)
    else:
        assert case.batch is not None
        q, k, v, dout = (x.unflatten(0, (case.batch, -1)) for x in (q, k, v, dout))
        dlse = dlse.unflatten(1, (case.batch, -1)).transpose(0, 1)
    packed = {
        "": [q, k, v],
        "kvpacked_": [q, torch.stack((k, v), -3)] if call.form == "kvpacked_" else [],
        "qkvpacked_": [torch.stack((q, k, v), -3)] if call.form == "qkvpacked_" else [],
    }
    inputs = [x.clone().requires_grad_() for x in packed[call.form]]
    torch.manual_seed(dist.get_rank())
    used = ring._parallel(ring._group_of(None), *scheme_of(call))
    drawn: list[Tensor] = []
    draw = used._draw
    used._draw = lambda q: drawn.append(draw(q)) or drawn[-1]
    try:
        out, softmax_lse, nothing = getattr(ring, f"{call.stem}_{call.form}func")(
            *inputs,
            *places,
            dropout_p=case.dropout_p,
            causal=case.causal,
            window_size=case.window_size,
            alibi_slopes=whole.slopes,
            return_attn_probs=True,
        )
    finally:
        used._draw = draw
    assert nothing is None
    torch.autograd.backward((out, softmax_lse), (dout, dlse))
    grads = [x for one in inputs for x in unpacked(one.grad, 4 - len(inputs), one is inputs[0])]
    if "varlen" not in call.stem:
        out, *grads = (x.flatten(0, 1) for x in (out, *grads))
        softmax_lse = softmax_lse.transpose(0, 1).flatten(1)
    wanted = whole.results(case, drawn[0] if drawn else None)
    found = (out, softmax_lse.t(), *grads)
    for name, x in zip(("out", "softmax_lse", "dq", "dk", "dv"), found, strict=True):
        torch.testing.assert_close(
            x, wanted[name][rows], rtol=1e-9, atol=1e-10, msg=lambda m, name=name: f"{name}: {m}"
        )


def unpacked(x: Tensor, most: int, is_first: bool) -> tuple[Tensor, ...]:
    """Of one of three inputs, of q and kv, of qkv."""
    is_alone = most == 1 or (most == 2 and is_first)
    return (x,) if is_alone else x.unbind(-3)


def out_alone() -> None:
    """Without return_attn_probs; the tensor of lengths is asked about once."""
    x = torch.randn(8, 2, 4, dtype=torch.float64)
    assert isinstance(ring.ring_flash_attn_func(x[None], x[None], x[None]), Tensor)
    bounds = torch.tensor([0, 4, 8], dtype=torch.int32)
    out = ring.ring_flash_attn_varlen_func(x, x, x, bounds, 4, causal=True)
    assert torch.equal(out, ring.ring_flash_attn_varlen_func(x, x, x, [0, 4, 8], None, causal=True))
    ranks = dist.get_world_size()
    whole = torch.tensor([0, 3, 8 * ranks], dtype=torch.int32)
    *made, of_keys = ring.llama3_flash_attn_prepare_cu_seqlens(whole, True, dist.get_rank(), ranks)
    asked: list[Any] = []
    gather = dist.all_gather_object
    dist.all_gather_object = lambda *a: asked.append(a) or gather(*a)
    try:
        for _ in range(3):
            out = ring.llama3_flash_attn_varlen_func(x, x, x, *made, 2, of_keys, causal=True)
        count = len(asked)
        made[0].add_(0)
        again = ring.llama3_flash_attn_varlen_func(x, x, x, *made, 2, of_keys, causal=True)
    finally:
        dist.all_gather_object = gather
    assert isinstance(out, Tensor) and torch.equal(out, again)
    assert count <= 2 and len(asked) == count + 1


def keeps_no_more(most: int) -> None:
    """Batches of packed documents, each with a plan of its own, and the first ones again."""
    x = torch.randn(12, 2, 4, dtype=torch.float64)
    first: dict[int, Tensor] = {}
    before, parallel.MOST_KEPT = parallel.MOST_KEPT, most
    try:
        for cut in (*range(12), *range(4)):
            out = ring.ring_flash_attn_varlen_func(x, x, x, [0, cut, 12], None, causal=True)
            assert torch.equal(out, first.setdefault(cut, out))
        used = ring._parallel(ring._group_of(None), "ring", None)
        assert len(used._prepared) <= most and len(used._agreed) <= most
    finally:
        parallel.MOST_KEPT = before


def under_inference_mode() -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    x, bounds = torch.randn(8, 2, 4), torch.tensor([0, 3, 8 * ranks])
    *made, of_keys = ring.llama3_flash_attn_prepare_cu_seqlens(bounds, True, rank, ranks)
    wanted = ring.llama3_flash_attn_varlen_func(x, x, x, *made, 2, of_keys, causal=True)
    with torch.inference_mode():
        *made, of_keys = ring.llama3_flash_attn_prepare_cu_seqlens(bounds + 0, True, rank, ranks)
        assert not made[0].is_inference()
        for cu_seqlens_q in (made[0], made[0] + 0):
            out = ring.llama3_flash_attn_varlen_func(
                x, x, x, cu_seqlens_q, *made[1:], 2, of_keys, causal=True
            )
            assert torch.equal(out, wanted)


def refuses() -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    x, packed = torch.zeros(1, 6, 4, 8), torch.zeros(6, 4, 8)
    three, kv = (packed, packed, packed), torch.zeros(6, 3, 4, 8)
    with pytest.raises(ValueError, match=r"q: must have shape \(batch, seqlen, heads, .* got \(6,"):
        ring.ring_flash_attn_func(*three)
    with pytest.raises(TypeError, match=r"k: must be a torch\.Tensor, got int"):
        ring.zigzag_ring_flash_attn_func(x, 1, x)
    with pytest.raises(
        ValueError, match=r"k: must have q's batch and seqlen, \(1, 6\), got shape \(1, 5,"
    ):
        ring.stripe_flash_attn_func(x, x[:, :5], x)
    with pytest.raises(ValueError, match=r"kv: must have shape \(rows, 2, heads, head_dim\), got"):
        ring.ring_flash_attn_varlen_kvpacked_func(packed, kv, [0, 6], 6)
    with pytest.raises(ValueError, match=r"qkv: must have shape \(batch, seqlen, 3, heads, head_d"):
        ring.ring_flash_attn_qkvpacked_func(x)
    with pytest.raises(ValueError, match=r"cu_seqlens: must end at this rank's 6 rows .* got 12"):
        ring.ring_flash_attn_varlen_func(*three, torch.tensor([0, 12]), 12)
    with pytest.raises(ValueError, match=r"cu_seqlens: must start at 0 and not .* got \[0, 7, 6\]"):
        ring.ring_flash_attn_varlen_func(*three, [0, 7, 6], 7)
    with pytest.raises(ValueError, match=r"max_seqlen: must be at least 4, the .* got 2"):
        ring.ring_flash_attn_varlen_func(*three, [0, 4, 6], 2)
    with pytest.raises(ValueError, match=r"q: must have an even number of rows .* got 3 of sequen"):
        ring.zigzag_ring_flash_attn_varlen_func(*three, [0, 3, 6], 3)
    with pytest.raises(ValueError, match=r"dropout_p: must be 0 where .* multiples of 16"):
        ring.ring_flash_attn_func(x, x, x, dropout_p=0.1)

    with pytest.raises(ValueError, match=r"cu_seqlens: must be integers .* got torch\.float32 of"):
        ring.ring_flash_attn_varlen_func(*three, torch.tensor([0.0, 6.0]), 6)

    bounds = torch.tensor([0, 5, 6 * ranks])
    prepare = ring.llama3_flash_attn_prepare_cu_seqlens
    *made, of_keys = prepare(bounds, True, rank, ranks)
    with pytest.raises(ValueError, match=r"cu_seqlens: must end at a positive multiple of world_s"):
        prepare(torch.tensor([0, 6 * ranks - 1]), True, rank, ranks)
    with pytest.raises(ValueError, match=rf"rank: must be in \[0, {ranks}\), got {ranks}"):
        prepare(bounds, True, ranks, ranks)
    with pytest.raises(ValueError, match=r"heads_k_stride: must divide the 4 heads of .* got 3"):
        ring.llama3_flash_attn_varlen_func(*three, *made, 3, of_keys)
    with pytest.raises(
        ValueError, match=r"local_k_slice: must be slice\(0, .* on rank 0, as .*Fal"
    ):
        ring.llama3_flash_attn_varlen_func(*three, *made, 1, slice(0, 6), causal=False)
    with pytest.raises(NotImplementedError, match=r"alibi_slopes: must have shape \(heads,\), .* "):
        slopes = torch.zeros(2, 4)
        ring.llama3_flash_attn_varlen_func(*three, *made, 1, of_keys, alibi_slopes=slopes)
