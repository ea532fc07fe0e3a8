"""Masks that have a row of their own for every query, of transformers.py: on the kernels, and what
those lack for them, which runs on torch's attention.
"""

from __future__ import annotations

import contextlib
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.weak import WeakTensorKeyDictionary
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from ..call.rules import MAX_HEAD_DIM
from ..functions.kept import is_passing, made_to_keep
from ..masks.sparsity import BlockSparsity
from .transformers_masks import sparsity_of

# Where a block has less shared memory (compute capability 8.6, 8.9, 12.0), the backward under a
# mask or a bias has kernels up to this head dim.
_ENOUGH_SHARED_MEMORY = 160 * 1024
_HEAD_DIM_OF_LITTLE_MEMORY = 128


def mask_arguments(mask: Tensor, query: Tensor, key: Tensor) -> dict[str, Any]:
    """What flash_attn_func takes for a mask of transformers' layers.

    Args:
        mask: bool, true is visible, or floating, added to the scores; broadcasts to (batch,
            heads_q, seqlen_q, seqlen_k).
        query, key: (batch, heads, seqlen, head_dim).

    Raises:
        ValueError: mask has another shape.
    """
    wanted = (*query.shape[:3], key.shape[2])
    shape = tuple(mask.shape)
    fits = len(shape) == 4 and shape[3] == wanted[3]
    if not fits or not all(s == 1 or s == most for s, most in zip(shape, wanted, strict=True)):
        raise ValueError(
            "attention_mask: must broadcast to (batch, heads_q, seqlen_q) and end in seqlen_k, "
            f"{wanted}, got shape {shape}"
        )
    if mask.is_floating_point():
        is_taken = mask.dtype in (query.dtype, torch.float32)
        return {"attn_mask": mask if is_taken else mask.to(query.dtype)}
    if mask.dtype != torch.bool:
        return {"attn_mask": mask}  # which is refused
    sparsity = _known_sparsity(mask, query.shape[2])
    return {"attn_mask": mask} if sparsity is None else {"block_mask": sparsity}


def what_kernels_lack(
    mask: Tensor, query: Tensor, key: Tensor, value: Tensor, sink: Tensor | None
) -> str | None:
    """What there is no kernel for, of a call with a mask."""
    wants_gradient = torch.is_grad_enabled() and any(
        x is not None and x.requires_grad for x in (query, key, value, mask, sink)
    )
    head_dim = max(query.shape[-1], value.shape[-1])
    if head_dim > MAX_HEAD_DIM:
        return f"head dims above {MAX_HEAD_DIM}"
    if not query.is_cuda:
        return None
    if query.dtype not in (torch.float16, torch.bfloat16) and not torch.is_autocast_enabled("cuda"):
        return "tensors that are neither fp16 nor bf16"
    if (
        wants_gradient
        and head_dim > _HEAD_DIM_OF_LITTLE_MEMORY
        and _has_little_shared_memory(query.device.index)
    ):
        return f"a backward above head dim {_HEAD_DIM_OF_LITTLE_MEMORY} on this GPU"
    return None


def torch_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    lacking: str,
    ordered: bool,
    options: dict[str, Any],
) -> tuple[Tensor, None]:
    """transformers' attention on torch's; says once for each `lacking` that it runs.

    `options` are those of transformers' sdpa_attention_forward.
    """
    _say_once(lacking)
    if mask.is_floating_point():
        mask = mask.to(query.dtype)
    # Of torch's kernels this one repeats its sums whether or not torch is told to.
    is_told = torch.are_deterministic_algorithms_enabled()
    choice = sdpa_kernel(SDPBackend.MATH) if ordered and not is_told else contextlib.nullcontext()
    with choice:
        return sdpa_attention_forward(module, query, key, value, mask, is_causal=False, **options)


_said: set[str] = set()


@torch.compiler.assume_constant_result  # at compile time, without a break of the graph
def _say_once(lacking: str) -> bool:
    if lacking not in _said:
        _said.add(lacking)
        warnings.warn(
            f"flash_attn_cuda: under a mask of its own for every query there is no kernel for "
            f"{lacking}; layers that ask for it run on torch's attention",
            stacklevel=4,
        )
    return True


@torch.compiler.assume_constant_result
def _has_little_shared_memory(device: int | None) -> bool:
    properties: Any = torch.cuda.get_device_properties(device)
    return bool(properties.shared_memory_per_block_optin < _ENOUGH_SHARED_MEMORY)


# Masks that a caller gave, the version and stream they were read at, and what they are. All layers
# of a model get the same few.
_given: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def _known_sparsity(mask: Tensor, seqlen_q: int) -> BlockSparsity | None:
    """What a bool mask is, made once for all layers; None where nobody may remember it.

    A compiler shares what it traces itself. A graph that is captured has to read the mask again
    whenever it is replayed, and a mask of inference mode has no version that says whether it is
    still the same.
    """
    made = sparsity_of(mask)
    if made is not None:
        return made
    if torch.compiler.is_compiling() or mask.is_inference() or is_passing(mask):
        return None
    stream = 0
    if mask.is_cuda:
        if torch.cuda.is_current_stream_capturing():
            return None
        stream = torch.cuda.current_stream(mask.device).cuda_stream
    read_at = (mask._version, stream, seqlen_q)
    known = _given.get(mask)
    if known is None or known[0] != read_at:
        made = made_to_keep(lambda: BlockSparsity.from_mask(mask, seqlen_q=seqlen_q))
        known = (read_at, made)
        if not is_passing(made.rows):
            _given[mask] = known
    return known[1]
