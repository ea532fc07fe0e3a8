"""The mask function of transformers.py: what transformers' masks mean for the kernels.

transformers describes a mask by nested functions of indices. Those of its own making are recognised
by name; whatever else there is becomes a 4-D mask.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers.masking_utils import (
    bidirectional_mask_function,
    causal_mask_function,
    sdpa_mask,
)

from .sequences import Sequences, is_contiguous

# Attribute of a 2-D mask: its Sequences, made once for all layers. A copy that lost it still says
# the same; then each layer makes its own.
_SEQUENCES = "_flash_attn_cuda_sequences"


@dataclass(frozen=True)
class Pattern:
    """A mask that the kernels can compute."""

    causal: bool = False
    window: int | None = None
    segments: Tensor | None = None  # (batch, seqlen): number of a token's packed sequence, from 0


@torch.compiler.disable(reason="it reads how transformers' mask functions are nested")
def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable = causal_mask_function,
    attention_mask: Tensor | None = None,
    **options: Any,
) -> Tensor | None:
    """transformers' mask function: what attention() needs to know beside its options.

    Args:
        batch_size, q_length, kv_length: sizes of the attention.
        q_offset, kv_offset: position of the first query and of the first key.
        mask_function: transformers' description of the pattern.
        attention_mask: (batch, tokens seen), bool: false is padding.
        options: what transformers' sdpa_mask takes further.

    Returns:
        None where every token is real; (batch, kv_length) bool, false at keys that are padding or
        beyond the last query; (batch, kv_length) int32, the number of the packed sequence that a
        token belongs to, from 1; or, where the kernels cannot compute the pattern, a
        (batch, 1, q_length, kv_length) bool mask.
    """
    if hasattr(attention_mask, _SEQUENCES):  # generate() makes masks before the model does
        return attention_mask
    pattern = recognise(mask_function)
    result: Tensor | None = None
    if pattern is not None and pattern.segments is not None:
        return _of_segments(pattern.segments)
    if pattern is not None:
        sizes = (batch_size, q_length, kv_length, q_offset, kv_offset)
        is_known, result = _of_padding(pattern, sizes, attention_mask, options.get("device"))
        if is_known:
            return result
    else:
        name = getattr(mask_function, "__qualname__", repr(mask_function))
        warnings.warn(
            f"flash_attn_cuda: the mask {name} is none that the kernels compute; these layers run "
            "on torch's attention, or where there are sinks on ours with a dense mask",
            stacklevel=2,
        )
    options |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    return sdpa_mask(
        *(batch_size, q_length, kv_length, q_offset, kv_offset),
        mask_function=mask_function,
        attention_mask=attention_mask,
        **options,
    )


def recognise(mask_function: Callable) -> Pattern | None:
    """The pattern of one of transformers' mask functions; None for any that is not known."""
    if mask_function is causal_mask_function:
        return Pattern(causal=True)
    if mask_function is bidirectional_mask_function:
        return Pattern()
    if mask_function.__module__ != causal_mask_function.__module__:
        return None
    # What else transformers makes are closures, told apart by their names and what they hold.
    names = mask_function.__code__.co_freevars
    cells = mask_function.__closure__ or ()
    held = {name: cell.cell_contents for name, cell in zip(names, cells, strict=True)}
    match mask_function.__name__, *sorted(held):
        case "inner_mask", "sliding_window":
            return Pattern(window=held["sliding_window"])
        case "inner_mask", "packed_sequence_mask":
            return Pattern(segments=held["packed_sequence_mask"])
        case "inner_mask", "mask_function", "position_ids":  # within its sequence: the same
            return recognise(held["mask_function"])
        case "and_mask", "mask_functions":
            return _intersection([recognise(part) for part in held["mask_functions"]])
    return None


def sequences_of(
    mask: Tensor, seqlen_q: int, seqlen_k: int, causal: bool, window: bool
) -> Sequences:
    """The Sequences of a 2-D mask: those attention_mask() left with it, or made from its contents.

    Raises:
        NotImplementedError: they would have to be made, for a mask whose padding a window has to
            count.
    """
    sequences = getattr(mask, _SEQUENCES, None)
    if sequences is not None:
        return sequences
    if mask.dtype == torch.int32:
        return Sequences.packed(mask, at_most=torch.compiler.is_compiling())
    real_k = pad(mask != 0, (0, seqlen_k - mask.shape[1]))
    if window:
        raise NotImplementedError(
            "attention_mask: a sliding window over padding needs the mask that "
            "flash_attn_cuda's mask function makes, got another 2-D mask"
        )
    if causal and seqlen_q == seqlen_k:
        real_q = real_k
    elif seqlen_q == 1 or not causal:
        real_q = real_k.new_ones(real_k.shape[0], seqlen_q)
    else:  # the queries end where the last key of any row ends
        end = (real_k.any(0) * torch.arange(1, seqlen_k + 1, device=mask.device)).amax()
        real_q = real_k[:, end - seqlen_q + torch.arange(seqlen_q, device=mask.device)]
    return Sequences.scattered(real_q, real_k)


def packed_by_positions(
    position_ids: Tensor | None, batch: int, seqlen_q: int, seqlen_k: int
) -> Sequences | None:
    """The packed sequences of a single row whose positions start again, or None.

    transformers' rule: a row is packed if its positions do not rise by one throughout; sequences
    start at the lowest position. Waits for the GPU once for each position_ids tensor.
    """
    if position_ids is None or tuple(position_ids.shape) != (batch, seqlen_q):
        return None
    if batch != 1 or seqlen_q == 1 or seqlen_q != seqlen_k:
        return None
    if not torch.compiler.is_compiling():
        return _last_positions.sequences(position_ids)
    return Sequences.packed(_segments(position_ids), at_most=True)


class _LastPositions:
    """The answer for the tensor last asked about: every layer of a model asks about the same."""

    def __init__(self) -> None:
        # One tuple, so that another thread finds the tensor, its version and the answer that belong
        # together.
        self._last: tuple[Callable[[], Tensor | None], int, Sequences | None] | None = None

    def sequences(self, position_ids: Tensor) -> Sequences | None:
        if position_ids.is_inference():  # it has no version: its contents may have changed
            return _packed_or_not(position_ids)
        if self._last is not None:
            tensor, version, answer = self._last
            if tensor() is position_ids and version == position_ids._version:
                return answer
        answer = _packed_or_not(position_ids)
        self._last = (weakref.ref(position_ids), position_ids._version, answer)
        return answer


_last_positions = _LastPositions()


def _packed_or_not(position_ids: Tensor) -> Sequences | None:
    row = position_ids[0]
    rising = row[0] + torch.arange(row.shape[0], device=row.device)
    if torch.equal(row, rising.to(row.dtype)):
        return None
    return Sequences.packed(_segments(position_ids))


def _segments(position_ids: Tensor) -> Tensor:
    return (position_ids == position_ids.amin()).cumsum(1).clamp_min(1)


def _intersection(patterns: list[Pattern | None]) -> Pattern | None:
    result = Pattern()
    for pattern in patterns:
        if pattern is None:
            return None
        for name in ("window", "segments"):
            value = getattr(pattern, name)
            if value is not None:
                if getattr(result, name) is not None:
                    return None
                result = replace(result, **{name: value})
        result = replace(result, causal=result.causal or pattern.causal)
    return result


def _of_segments(numbers: Tensor) -> Tensor:
    mask = numbers.int() + 1
    setattr(mask, _SEQUENCES, Sequences.packed(mask))
    return mask


def _of_padding(
    pattern: Pattern,
    sizes: tuple[int, int, int, int | Tensor, int],
    attention_mask: Tensor | None,
    device: Any,
) -> tuple[bool, Tensor | None]:
    """(whether the kernels can compute it, the mask for them)."""
    batch, q_length, kv_length, q_offset, kv_offset = sizes
    has_window = pattern.window is not None and kv_length > pattern.window
    first_query = q_offset - kv_offset  # as a place among the keys
    if attention_mask is None:
        if not pattern.causal:
            return not has_window or q_length == kv_length, None
        if isinstance(first_query, int) and first_query + q_length == kv_length:
            return True, None
        real_k = torch.ones(batch, kv_length, dtype=torch.bool, device=device)
    else:
        real_k = attention_mask != 0
        if real_k.shape[1] != kv_length:  # else it is one that this function made before
            missing = max(kv_offset + kv_length - real_k.shape[1], 0)
            real_k = pad(real_k, (0, missing))[:, kv_offset : kv_offset + kv_length]
    if pattern.causal:  # a static cache has room behind the last query
        places = torch.arange(kv_length, device=real_k.device)
        real_k = real_k & (places < first_query + q_length)

    # Of a cross-attention there may be as many queries as keys too: only a limit says it is none.
    is_self = (pattern.causal or has_window) and q_length == kv_length
    if is_self and isinstance(first_query, int) and first_query == 0:
        real_q = real_k
    elif q_length == 1 or not pattern.causal or attention_mask is None:
        if has_window and not pattern.causal:
            return False, None
        real_q = real_k.new_ones(batch, q_length)
    else:
        queries = first_query + torch.arange(q_length, device=real_k.device)
        real_q = real_k[:, queries.clamp(0, kv_length - 1)]
    all_real, contiguous, ends = False, True, pattern.causal
    if attention_mask is not None and batch > 0 and q_length > 0:
        answers = (real_k.all(), is_contiguous(real_k) & is_contiguous(real_q), real_q[:, -1].all())
        all_real, contiguous, ends = torch.stack(answers).tolist()
    if all_real and (not pattern.causal or isinstance(first_query, int)):
        return True, None
    if not contiguous and has_window:
        return False, None
    if contiguous:
        sequences = Sequences.ranges(real_q, real_k, ends=ends and pattern.causal)
    else:
        sequences = Sequences.scattered(real_q, real_k)
    setattr(real_k, _SEQUENCES, sequences)
    return True, real_k
