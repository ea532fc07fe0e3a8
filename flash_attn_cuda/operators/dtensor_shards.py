"""What public functions do with DTensors where they are more than one operator: masks, chunks and
rotations are made and computed on each rank's shards, in torch's operators, with their gradients.

Imported when DTensors are (dtensor_import.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from ..call.fields import AttentionCall, Results
from .dtensor import local_call, split_of, whole_results
from .dtensor_split import BATCH, HEADS, WHOLE, Split


def attend_in_shards(
    call: AttentionCall, attend: Callable[[AttentionCall], Results], feature: str
) -> Results:
    """Results by `attend`, which takes each rank's part.

    NotImplementedError: the call has dropout, whose mask `attend` would count from the part's
    begin; `feature` is what it is named as.
    """
    if call.dropout_p > 0.0:
        raise NotImplementedError(
            f"dropout_p: must be 0 with {feature} of DTensors, got {call.dropout_p}"
        )
    split = split_of(call)
    part = local_call(call, split)
    part.out = None
    found = whole_results(call, split, attend(part))
    return found if call.out is None else found._replace(out=call.out.copy_(found.out))


def local_mask(name: str, mask: DTensor) -> Tensor:
    """This rank's shard of a mask of booleans, which no DTensor operator makes lists of."""
    for dim, placement in enumerate(mask.placements):
        is_shard = type(placement) is Shard and placement.dim + 4 - mask.ndim < 2
        if not (is_shard or placement.is_replicate()):
            raise ValueError(
                f"{name}: must be sharded over batch or heads or replicated on mesh dimension "
                f"{dim}, got {placement!r}: redistribute it"
            )
    return mask.to_local()


def like_mask(mask: DTensor, made: Tensor | None) -> DTensor | None:
    """What was made of a mask's shard, (batch or 1, heads or 1, ...), as the mask is sharded."""
    if made is None:
        return None
    placements = [
        Shard(p.dim + 4 - mask.ndim) if isinstance(p, Shard) else Replicate()
        for p in mask.placements
    ]
    sizes = ((1,) * 4 + tuple(mask.shape))[-4:]
    shape = torch.Size((*sizes[:2], *made.shape[2:]))
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        made, mask.device_mesh, placements, run_check=False, shape=shape, stride=stride
    )


def rotate_in_shards(
    rotate: Callable[..., Tensor],
    x: DTensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
    inplace: bool,
    offsets: Any,
    cu_seqlens: Tensor | None,
    conjugate: bool,
) -> DTensor:
    """rotate(...) of a DTensor sharded over batch or heads; tables and bounds are replicated."""
    if inplace and torch.is_grad_enabled() and x.requires_grad:
        raise NotImplementedError(
            "inplace: must be False for a DTensor that requires grad, got True"
        )
    batch = BATCH if cu_seqlens is None else WHOLE
    layout = (BATCH, WHOLE, HEADS, WHOLE) if cu_seqlens is None else (WHOLE, HEADS, WHOLE)
    layouts = {
        **{"x": layout, "cos": (WHOLE, WHOLE), "sin": (WHOLE, WHOLE)},
        **{"seqlen_offsets": (batch,), "cu_seqlens": (WHOLE,)},
    }
    given = {"x": x, "cos": cos, "sin": sin, "seqlen_offsets": offsets, "cu_seqlens": cu_seqlens}
    tensors = {name: value for name, value in given.items() if isinstance(value, Tensor)}
    split = Split(tensors, layouts, "x", {})
    given |= {name: split.local(name, value) for name, value in tensors.items()}
    x_local, cos, sin, offsets, cu_seqlens = given.values()
    found = rotate(x_local, cos, sin, interleaved, inplace, offsets, cu_seqlens, conjugate)
    return x if inplace else split.result(found, layout, x.shape)
