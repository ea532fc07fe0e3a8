"""From padded batches to packed sequences and back: the interface of FlashAttention-2's padding.

A padded batch is (batch, seqlen, ...) with a mask of its real tokens; packed sequences are the real
tokens alone, (total, ...), one sequence behind the other, described by cu_seqlens. Everything here
is differentiable in the token values.

unpad_input has to wait for the GPU twice: the number of real tokens decides the shape of its
result, and max_seqlen is returned as a Python int. Call it once per batch, not once per layer, or
describe the padding with seqused_q, seqused_k and cu_seqlens, which needs no copy and no wait.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

__all__ = [
    "IndexFirstAxis",
    "IndexFirstAxisResidual",
    "IndexPutFirstAxis",
    "index_first_axis",
    "index_first_axis_residual",
    "index_put_first_axis",
    "pad_input",
    "unpad_input",
    "unpad_input_for_concatenated_sequences",
]


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """The tokens of a padded batch that a mask selects, packed.

    Args:
        hidden_states: (batch, seqlen, ...).
        attention_mask: (batch, seqlen), bool or numbers: nonzero is a real token. Real tokens may
            be anywhere in a row.
        unused_mask: (batch, seqlen): nonzero is a token that gets room in the packed tensor but is
            not to be attended to, which seqused tells the attention.

    Returns:
        (packed, indices, cu_seqlens, max_seqlen, seqused): packed (total, ...), the tokens of both
        masks; indices (total,) int64, their places in the flattened batch; cu_seqlens (batch + 1,)
        int32, where each sequence starts in packed; max_seqlen, the longest one's length; seqused
        (batch,) int32, the number of tokens of attention_mask alone.

        On CUDA this waits for the GPU twice: for total and for max_seqlen.

    Raises:
        TypeError: an argument is not a tensor.
        ValueError: the shapes do not fit.
    """
    _check_mask("attention_mask", attention_mask, hidden_states)
    used = attention_mask != 0
    kept = used
    if unused_mask is not None:
        _check_mask("unused_mask", unused_mask, hidden_states)
        kept = used | (unused_mask != 0)
    lengths = kept.sum(1, dtype=torch.int32)
    indices = kept.flatten().nonzero().flatten()
    return (
        index_first_axis(hidden_states.flatten(0, 1), indices),
        indices,
        _cumulative(lengths),
        _maximum(lengths),
        used.sum(1, dtype=torch.int32),
    )


def unpad_input_for_concatenated_sequences(
    hidden_states: Tensor, attention_mask_in_length: Tensor
) -> tuple[Tensor, Tensor, Tensor, int]:
    """unpad_input for rows that hold several sequences each, one behind the other.

    Args:
        hidden_states: (batch, seqlen, ...).
        attention_mask_in_length: (batch, seqlen), integers: the lengths of a row's sequences, in
            order, then zeros. [2, 3, 0, 0, 0, 0] is a row of two sequences, of two and three
            tokens, and one token of padding.

    Returns:
        (packed, indices, cu_seqlens, max_seqlen) as unpad_input, with one sequence per positive
        length. On CUDA this waits for the GPU three times.

    Raises:
        TypeError: an argument is not a tensor.
        ValueError: the shapes do not fit.
    """
    _check_mask("attention_mask_in_length", attention_mask_in_length, hidden_states)
    seqlen = attention_mask_in_length.shape[1]
    places = torch.arange(seqlen, device=attention_mask_in_length.device)
    kept = places < attention_mask_in_length.sum(1, keepdim=True)
    lengths = attention_mask_in_length.flatten()
    lengths = lengths[lengths > 0].to(torch.int32)
    indices = kept.flatten().nonzero().flatten()
    packed = index_first_axis(hidden_states.flatten(0, 1), indices)
    return packed, indices, _cumulative(lengths), _maximum(lengths)


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """Undo unpad_input: packed (total, ...) to (batch, seqlen, ...), zero where no token was.

    `indices` (total,) int64 are unpad_input's, each place at most once. Never waits for the GPU.
    """
    return index_put_first_axis(hidden_states, indices, batch * seqlen).unflatten(
        0, (batch, seqlen)
    )


def index_first_axis(x: Tensor, indices: Tensor) -> Tensor:
    """Rows of x (n, ...) at `indices` (total,): (total, ...)."""
    return x.index_select(0, indices)


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """Zeros (first_axis_dim, ...) with values (total, ...) at `indices` (total,), all different."""
    zeros = values.new_zeros((first_axis_dim, *values.shape[1:]))
    return zeros.index_copy(0, indices.long(), values)


def index_first_axis_residual(x: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """(index_first_axis(x, indices), x): FlashAttention-2's form for a residual connection."""
    return index_first_axis(x, indices), x


class IndexFirstAxis:
    """For code that calls the apply() of FlashAttention-2's autograd function."""

    apply = staticmethod(index_first_axis)


class IndexFirstAxisResidual:
    """For code that calls the apply() of FlashAttention-2's autograd function."""

    apply = staticmethod(index_first_axis_residual)


class IndexPutFirstAxis:
    """For code that calls the apply() of FlashAttention-2's autograd function."""

    apply = staticmethod(index_put_first_axis)


def _check_mask(name: str, mask: Any, hidden_states: Any) -> None:
    for argument, tensor in (("hidden_states", hidden_states), (name, mask)):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{argument}: must be a torch.Tensor, got {type(tensor).__name__}")
    if hidden_states.dim() < 2:
        raise ValueError(
            f"hidden_states: must have shape (batch, seqlen, ...), got {tuple(hidden_states.shape)}"
        )
    expected = tuple(hidden_states.shape[:2])
    if tuple(mask.shape) != expected:
        raise ValueError(
            f"{name}: must have the batch and seqlen of hidden_states, {expected}, "
            f"got {tuple(mask.shape)}"
        )


def _cumulative(lengths: Tensor) -> Tensor:
    return pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))


def _maximum(lengths: Tensor) -> int:
    return int(lengths.max()) if lengths.numel() > 0 else 0
