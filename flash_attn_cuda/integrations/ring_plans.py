"""Plans of ring_flash_attn's layouts, and what is read on the host for them, once."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils.weak import WeakTensorKeyDictionary

from ..call.tensors import check_tensor
from ..context_parallel import Band, Piece, Plan
from ..functions.kept import made_to_keep

PLANS_KEPT = 64


@torch.compiler.disable
@lru_cache(maxsize=PLANS_KEPT)
def contiguous(lengths: tuple[int, ...], ranks: int) -> Plan:
    """lengths: of every rank's part of each sequence."""
    return Plan.contiguous([ranks * x for x in lengths], ranks)


@torch.compiler.disable
@lru_cache(maxsize=PLANS_KEPT)
def zigzag(lengths: tuple[int, ...], ranks: int) -> Plan:
    for sequence, length in enumerate(lengths):
        if length % 2:
            raise ValueError(
                "q: must have an even number of rows of every sequence, two parts of it, got "
                f"{length} of sequence {sequence}"
            )
    return Plan.zigzag([ranks * x for x in lengths], ranks)


@torch.compiler.disable
@lru_cache(maxsize=PLANS_KEPT)
def balanced(lengths: tuple[int, ...], ranks: int, band: Band, multiple: int) -> Plan:
    return Plan.balanced([ranks * x for x in lengths], ranks, band, multiple=multiple)


# -- llama3 ----------------------------------------------------------------------------------------


class Slice(NamedTuple):
    """What a rank has of a packed batch, and what it sees: bounds of the rank's queries, of keys,
    and the rows of all ranks' keys that the latter count in.
    """

    cu_seqlens_q: tuple[int, ...]
    cu_seqlens_k: tuple[int, ...]
    first: int
    end: int

    @classmethod
    def of(cls, bounds: Sequence[int], causal: bool, rank: int, ranks: int) -> Slice:
        rows = bounds[-1] // ranks
        begin, end = rank * rows, (rank + 1) * rows
        one, last = bisect_right(bounds, begin) - 1, bisect_left(bounds, end)
        first, stop = bounds[one], end if causal else bounds[last]
        inner = bounds[one + 1 : last]
        return cls(
            (0, *(x - begin for x in inner), rows),
            (0, *(x - first for x in inner), stop - first),
            first,
            stop,
        )


@torch.compiler.disable
def plan_of_documents(
    cu_seqlens_q: Tensor, local_k_slice: slice, rows: int, causal: bool, group: ProcessGroup
) -> Plan:
    """The plan of all ranks' documents, from what each knows of its own."""
    lengths = lengths_of("cu_seqlens_q", cu_seqlens_q, rows)
    key = _key_of(cu_seqlens_q, local_k_slice, causal, group)
    known = _plans.get(cu_seqlens_q, {})
    if key is not None and key in known:
        return known[key]
    every: list[Any] = [None] * group.size()
    mine = (lengths, local_k_slice.start, local_k_slice.stop)
    dist.all_gather_object(every, mine, group)
    plan = _plan_of_slices(tuple(every), bool(causal))
    remember_plan(cu_seqlens_q, local_k_slice, causal, group, plan)
    return plan


def remember_plan(
    cu_seqlens_q: Tensor, local_k_slice: slice, causal: bool, group: ProcessGroup, plan: Plan
) -> None:
    """Spare plan_of_documents of these its question to the other ranks."""
    key = _key_of(cu_seqlens_q, local_k_slice, causal, group)
    if key is not None:
        _plans.setdefault(cu_seqlens_q, {})[key] = plan


def _key_of(
    cu_seqlens_q: Tensor, local_k_slice: slice, causal: bool, group: ProcessGroup
) -> tuple[Any, ...] | None:
    """None for a tensor of torch.inference_mode, whose changes are not counted."""
    if cu_seqlens_q.is_inference():
        return None
    version = cu_seqlens_q._version
    return version, local_k_slice.start, local_k_slice.stop, bool(causal), group


@lru_cache(maxsize=PLANS_KEPT)
def _plan_of_slices(slices: tuple[tuple[tuple[int, ...], int, int], ...], causal: bool) -> Plan:
    """slices: of each rank the lengths of its rows of documents, and the slice of keys it sees."""
    ranks, rows = len(slices), sum(slices[0][0])
    beginnings, row = {0}, 0
    for rank, (lengths, first, _) in enumerate(slices):
        if sum(lengths) != rows:
            raise ValueError(
                f"cu_seqlens_q: must end at the same row on every rank, got {rows} on rank 0 and "
                f"{sum(lengths)} on rank {rank}"
            )
        for number, length in enumerate(lengths):
            if number > 0 or first == row:
                beginnings.add(row)
            row += length
    bounds = sorted({*beginnings, row})
    for rank, (_, first, end) in enumerate(slices):
        wanted = Slice.of(bounds, causal, rank, ranks) if row else Slice((0,), (0,), 0, 0)
        if (first, end) != wanted[2:]:
            raise ValueError(
                f"local_k_slice: must be slice({wanted.first}, {wanted.end}) on rank {rank}, as "
                "llama3_flash_attn_prepare_cu_seqlens makes it of the same documents for "
                f"causal={causal}, got slice({first}, {end})"
            )
    return equal_shards(tuple(bounds), ranks)


@torch.compiler.disable
@lru_cache(maxsize=PLANS_KEPT)
def equal_shards(bounds: tuple[int, ...], ranks: int) -> Plan:
    """The plan of a packed batch in equal contiguous shards, wherever its documents begin."""
    documents = [(begin, end) for begin, end in pairwise(bounds) if begin < end]
    rows = bounds[-1] // ranks
    pieces = [
        [
            Piece(number, max(begin, rank * rows) - begin, min(end, (rank + 1) * rows) - begin)
            for number, (begin, end) in enumerate(documents)
            if begin < (rank + 1) * rows and rank * rows < end
        ]
        for rank in range(ranks)
    ]
    return Plan.of_pieces([end - begin for begin, end in documents], pieces)


# -- lengths on the host ---------------------------------------------------------------------------

_plans: Any = WeakTensorKeyDictionary()  # of cu_seqlens_q of llama3
_read: Any = WeakTensorKeyDictionary()  # (version, bounds) of tensors that have been waited for


@torch.compiler.disable
def bounds_of(name: str, cu_seqlens: Tensor | Sequence[int]) -> tuple[int, ...]:
    """On the host; a CUDA tensor is waited for once, until it is written to."""
    if isinstance(cu_seqlens, Tensor) and (cu_seqlens.dim() != 1 or cu_seqlens.is_floating_point()):
        raise ValueError(
            f"{name}: must be integers of shape (sequences + 1,), got {cu_seqlens.dtype} of shape "
            f"{tuple(cu_seqlens.shape)}"
        )
    if not isinstance(cu_seqlens, Tensor):
        bounds = tuple(int(x) for x in cu_seqlens)
    elif not cu_seqlens.is_cuda or cu_seqlens.is_inference():
        bounds = tuple(cu_seqlens.tolist())
    else:
        version, bounds = _read.get(cu_seqlens, (None, ()))
        if version != cu_seqlens._version:
            bounds = tuple(cu_seqlens.tolist())
            _read[cu_seqlens] = (cu_seqlens._version, bounds)
    if not bounds or bounds[0] != 0 or any(end < begin for begin, end in pairwise(bounds)):
        raise ValueError(
            f"{name}: must start at 0 and not decrease, got {list(bounds[:8])}"
            f"{', ...' if len(bounds) > 8 else ''}"
        )
    return bounds


def lengths_of(name: str, cu_seqlens: Tensor | Sequence[int], rows: int) -> tuple[int, ...]:
    """Of the rank's own parts of sequences."""
    bounds = bounds_of(name, cu_seqlens)
    if bounds[-1] != rows:
        raise ValueError(f"{name}: must end at this rank's {rows} rows of q, got {bounds[-1]}")
    return tuple(end - begin for begin, end in pairwise(bounds))


def llama3_flash_attn_prepare_cu_seqlens(
    cu_seqlens: Tensor, causal: bool, rank: int, world_size: int
) -> tuple[Tensor, Tensor, int, int, slice]:
    """What a rank has of a packed batch in equal contiguous shards, and which keys it sees.

    Args:
        cu_seqlens: (documents + 1,) integers of the whole batch, whose last is a multiple of
            world_size. A tensor on a GPU is waited for.
        causal: of the attention to come.

    Returns:
        (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, local_k_slice): bounds of the
        documents among the rank's queries and among the keys they see, like cu_seqlens; the
        longest of each; the rows of the whole batch that these keys are.
    """
    check_tensor("cu_seqlens", cu_seqlens)
    bounds = bounds_of("cu_seqlens", cu_seqlens)
    if world_size < 1 or bounds[-1] % world_size or bounds[-1] == 0:
        raise ValueError(
            f"cu_seqlens: must end at a positive multiple of world_size {world_size}, "
            f"got {bounds[-1]}"
        )
    if not 0 <= rank < world_size:
        raise ValueError(f"rank: must be in [0, {world_size}), got {rank}")
    mine = Slice.of(bounds, causal, rank, world_size)

    def on_device(rows: tuple[int, ...]) -> Tensor:
        # Its changes are counted, as plan_of_documents asks.
        dtype, device = cu_seqlens.dtype, cu_seqlens.device
        return made_to_keep(lambda: torch.tensor(rows, dtype=dtype, device=device))

    longest = [max(end - begin for begin, end in pairwise(x)) for x in mine[:2]]
    made = (on_device(mine.cu_seqlens_q), on_device(mine.cu_seqlens_k))
    return *made, longest[0], longest[1], slice(mine.first, mine.end)
