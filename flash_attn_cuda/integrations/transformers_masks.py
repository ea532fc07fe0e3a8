"""The mask function of transformers.py: what transformers' masks mean for the kernels.

transformers describes a mask by nested functions of indices. Those of its own making are recognised
by their code; whatever else there is becomes a 4-D mask, and a BlockSparsity.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import CodeType
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import masking_utils
from transformers.masking_utils import (
    bidirectional_mask_function,
    causal_mask_function,
    sdpa_mask,
)

from ..call.functorch import is_mapped
from ..functions.kept import is_passing, made_to_keep
from ..masks.sparsity import BlockSparsity
from .transformers_sequences import Sequences, is_contiguous

# Attribute of a mask: its Meaning. A 2-D copy that lost it still says which keys are real; the rest
# is then as the layer has it, and each layer makes its own Sequences. A 4-D one says everything.
_MEANING = "_flash_attn_cuda_meaning"

# Of a 2-D mask whose keys are all real. A copy must say so too without being read, which would
# wait: where a model is spread over devices, every layer may get one.
_ALL_REAL = torch.int16
_SEGMENTS = torch.int32

# Whether torch.compile traces what a function of a function holds. Where it does not, a graph that
# must be whole gets a 4-D mask for whatever such a function means.
_SEES_CLOSURES = torch.__version__ >= "2.14"  # a TorchVersion, which compares as versions do


@dataclass(frozen=True)
class Pattern:
    """A mask that the kernels can compute: how far from its own place a query sees, inclusive."""

    left: int | None = None  # None: any distance
    right: int | None = None
    segments: Tensor | None = None  # (batch, seqlen): number of a token's packed sequence, from 0
    chunk: int = 0  # flash_attn_func's attention_chunk

    @classmethod
    def of_layer(cls, causal: bool, sliding_window: int | None, chunk: int = 0) -> Pattern:
        """What a layer says; its window counts a query's own key."""
        distance = None if sliding_window is None else sliding_window - 1
        return cls(distance, 0 if causal else distance, chunk=chunk)

    @property
    def causal(self) -> bool:
        return self.right == 0

    def has_window(self, seqlen: int) -> bool:
        """Whether more than causality hides any of so many tokens."""
        return self._has_ends(seqlen) or 0 < self.chunk < seqlen

    def _has_ends(self, seqlen: int) -> bool:
        ends = (self.left, None if self.causal else self.right)
        return any(end is not None and seqlen > end + 1 for end in ends)

    def window_size(self, seqlen: int) -> tuple[int, int]:
        """The functions' argument, next to `causal`."""
        if not self._has_ends(seqlen):
            return (-1, -1)
        left, right = (-1 if end is None else end for end in (self.left, self.right))
        return (left, right)

    def is_like(self, other: Pattern) -> bool:
        return (self.left, self.right, self.chunk) == (other.left, other.right, other.chunk)


@dataclass(frozen=True)
class Meaning:
    """What a mask of attention_mask() stands for, made once for all layers."""

    pattern: Pattern
    q_length: int
    sequences: Sequences | None  # None: every key is real, and the last query's is the last


@dataclass(frozen=True)
class DenseMeaning:
    """The same of a 4-D mask, as long as nobody writes into that."""

    sparsity: BlockSparsity
    version: int | None  # of the mask; None in inference mode, where it has none, and in graphs


def _reading_outside_graphs(function: Callable) -> Callable:
    """The mask function `function`, which is run outside the graphs of torch.compile where it reads
    what they hide. In a graph that must be whole it has to do without.
    """
    outside = torch.compiler.disable(function, reason="it reads the padding mask")

    @functools.wraps(function)
    def choose(
        *sizes: int | Tensor,
        mask_function: Callable = causal_mask_function,
        attention_mask: Tensor | None = None,
        **options: Any,
    ) -> Tensor | None:
        is_plain = attention_mask is None and (_SEES_CLOSURES or _plain(mask_function) is not None)
        leaves = torch.compiler.is_compiling() and not is_plain and _may_leave_graph()
        options |= {"mask_function": mask_function, "attention_mask": attention_mask}
        return (outside if leaves else function)(*sizes, **options)

    return choose


@torch.compiler.assume_constant_result
def _may_leave_graph() -> bool:
    """False with fullgraph=True, and under torch.export."""
    try:
        from torch._dynamo.symbolic_convert import InstructionTranslator

        tracer = InstructionTranslator.current_tx()
        return not (tracer.one_graph or tracer.error_on_graph_break)
    except (AttributeError, ImportError):  # there is none, as under torch.export
        return False


@_reading_outside_graphs
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
        (batch, kv_length) bool, false at keys that are padding or beyond the last query;
        (batch, kv_length) int16, all 1, where every key is real; (batch, kv_length) int32, the
        number of the packed sequence that a token belongs to, from 1; or, where the kernels need
        a bit for every pair, a (batch, 1, q_length, kv_length) bool mask with its DenseMeaning. All
        others carry their Meaning, for which a mask is there even if every key is real: not every
        layer of transformers knows its own causality and window.
    """
    pattern = recognise(mask_function)
    if _says_already(attention_mask, pattern, q_length, kv_length):
        return attention_mask
    if pattern is not None and pattern.segments is not None:
        return _of_segments(pattern)
    if pattern is not None:
        sizes = (batch_size, q_length, kv_length, q_offset, kv_offset)
        result = _of_padding(pattern, sizes, attention_mask, options.get("device"))
        if result is not None:
            return result
    options |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    mask = sdpa_mask(
        *(batch_size, q_length, kv_length, q_offset, kv_offset),
        mask_function=mask_function,
        attention_mask=None if attention_mask is None else attention_mask != 0,
        **options,
    )
    is_versioned = not torch.compiler.is_compiling() and not mask.is_inference()
    sparsity = BlockSparsity.from_mask(mask, seqlen_q=q_length)
    setattr(mask, _MEANING, DenseMeaning(sparsity, mask._version if is_versioned else None))
    return mask


def _place(code: CodeType) -> tuple[str, int]:
    """What tells a function from others also while it is traced, and where torch.compile makes it
    anew, which on Python 3.10 loses its name.
    """
    return code.co_filename, code.co_firstlineno


def _makers() -> dict[tuple[str, int], str]:
    """Where the code of transformers' nested mask functions is, and who makes them."""
    made = {
        name: make(*held)
        for name, held in (
            ("sliding_window_overlay", (1,)),
            ("sliding_window_bidirectional_overlay", (1,)),
            ("chunked_overlay", (1, None)),
            ("packed_sequence_mask_function", (None,)),
            ("remap_positions_for_packed_sequence", (causal_mask_function, None)),
            ("and_masks", (causal_mask_function,)),
        )
        if (make := getattr(masking_utils, name, None)) is not None  # some releases lack some
    }
    return {_place(function.__code__): name for name, function in made.items()}


_MAKERS = _makers()


def recognise(mask_function: Callable) -> Pattern | None:
    """The pattern of one of transformers' mask functions; None for any that is not known."""
    plain = _plain(mask_function)
    if plain is not None or (torch.compiler.is_compiling() and not _SEES_CLOSURES):
        return plain
    # What else transformers makes are closures, told apart by their code and what they hold.
    code = getattr(mask_function, "__code__", None)
    maker = None if code is None else _MAKERS.get(_place(code))
    if code is None or maker is None:
        return None
    cells = mask_function.__closure__ or ()
    held = {name: cell.cell_contents for name, cell in zip(code.co_freevars, cells, strict=True)}
    match maker, *sorted(held):
        case "sliding_window_overlay", "sliding_window":
            return Pattern(left=held["sliding_window"] - 1)
        case "sliding_window_bidirectional_overlay", "sliding_window":
            return Pattern(held["sliding_window"], held["sliding_window"])
        case "chunked_overlay", "chunk_size", "left_padding":
            return Pattern(chunk=held["chunk_size"])
        case "packed_sequence_mask_function", "packed_sequence_mask":
            return Pattern(segments=held["packed_sequence_mask"])
        case "remap_positions_for_packed_sequence", "mask_function", "position_ids":
            return recognise(held["mask_function"])  # within its sequence: the same
        case "and_masks", "mask_functions":
            return _intersection([recognise(part) for part in held["mask_functions"]])
    return None


def _plain(mask_function: Callable) -> Pattern | None:
    if mask_function is causal_mask_function:
        return Pattern(right=0)
    return Pattern() if mask_function is bidirectional_mask_function else None


def meaning_of(mask: Tensor | None) -> Meaning | None:
    """What attention_mask() left with a 2-D mask; None for others and for copies."""
    meaning = getattr(mask, _MEANING, None)
    return meaning if isinstance(meaning, Meaning) else None


def sparsity_of(mask: Tensor) -> BlockSparsity | None:
    """What attention_mask() left with a 4-D mask; None for others, for copies, and where the mask
    has been written into.
    """
    meaning = getattr(mask, _MEANING, None)
    if not isinstance(meaning, DenseMeaning):
        return None
    is_known = torch.compiler.is_compiling() or meaning.version is None
    return meaning.sparsity if is_known or mask._version == meaning.version else None


def _says_already(
    mask: Tensor | None, pattern: Pattern | None, q_length: int, kv_length: int
) -> bool:
    """Whether attention_mask() made it for the same: generate() makes masks before the model."""
    meaning = meaning_of(mask)
    if mask is None or meaning is None or pattern is None:
        return False
    same_sizes = (meaning.q_length, mask.shape[1]) == (q_length, kv_length)
    return same_sizes and meaning.pattern.is_like(pattern)


def _is_hidden(x: Tensor) -> bool:
    """Whether nobody may read it: a graph has it, or torch.vmap maps it."""
    return torch.compiler.is_compiling() or is_mapped(x)


def without_meaning(
    mask: Tensor, seqlen_q: int, seqlen_k: int, pattern: Pattern
) -> Sequences | Tensor | None:
    """What a 2-D mask stands for by its contents: Sequences, a 4-D bool mask, or None: no mask.

    Waits for the GPU where there is a window, which counts padding in between, unless nobody may
    read the mask. The queries are the last tokens up to the last key of any row, or where they are
    not causal others than the keys.

    Raises:
        NotImplementedError: a window of queries whose places among the keys nobody knows.
    """
    if mask.dtype == _ALL_REAL:
        return None
    if mask.dtype == _SEGMENTS:
        return Sequences.packed(mask, at_most=_is_hidden(mask))
    real_k = pad(mask != 0, (0, seqlen_k - mask.shape[1]))
    window = pattern.has_window(max(seqlen_q, seqlen_k))
    if window and not pattern.causal and seqlen_q != seqlen_k:
        raise NotImplementedError(
            "attention_mask: must be what flash_attn_cuda's mask function makes where a window is "
            f"not causal and there are other queries than keys ({seqlen_q} and {seqlen_k}), "
            "got another 2-D mask"
        )
    places_k = torch.arange(seqlen_k, device=mask.device)
    places_q = places_k[:seqlen_q]
    if seqlen_q == seqlen_k and (pattern.causal or window):
        real_q = real_k
    elif not pattern.causal or (seqlen_q == 1 and not window):
        real_q = real_k.new_ones(real_k.shape[0], seqlen_q)
    else:
        end = (real_k.any(0) * (places_k + 1)).amax()
        places_q = end - seqlen_q + torch.arange(seqlen_q, device=mask.device)
        real_q = real_k[:, places_q]
    if not window:
        return Sequences.scattered(real_q, real_k)
    if not _is_hidden(mask) and bool(is_contiguous(real_k) & is_contiguous(real_q)):
        return Sequences.ranges(real_q, real_k, ends=False)
    distance = places_k - places_q[:, None]
    visible = real_k[:, None, None, :]
    if pattern.chunk > 0:
        first = real_k.int().argmax(1)[:, None]
        chunk_q, chunk_k = ((x - first) // pattern.chunk for x in (places_q, places_k))
        visible = visible & (chunk_q[:, None, :, None] == chunk_k[:, None, None, :])
    if pattern.left is not None:
        visible = visible & (distance >= -pattern.left)
    return visible if pattern.right is None else visible & (distance <= pattern.right)


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
    if not _is_hidden(position_ids):
        return _last_positions.sequences(position_ids)
    return Sequences.packed(_segments(position_ids), at_most=True)


class _LastPositions:
    """The answer for the tensor last asked about: every layer of a model asks about the same."""

    def __init__(self) -> None:
        # One tuple, so that another thread finds the tensor, its version and the answer that belong
        # together.
        self._last: tuple[Callable[[], Tensor | None], int, Sequences | None] | None = None

    def sequences(self, position_ids: Tensor) -> Sequences | None:
        # One of inference mode has no version: its contents may have changed.
        if position_ids.is_inference() or is_passing(position_ids):
            return _packed_or_not(position_ids)
        last = self._last
        if last is not None:
            tensor, version, answer = last
            if tensor() is position_ids and version == position_ids._version:
                return answer
        answer = made_to_keep(lambda: _packed_or_not(position_ids))
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
    known = [pattern for pattern in patterns if pattern is not None]
    segments = [pattern.segments for pattern in known if pattern.segments is not None]
    chunks = [pattern.chunk for pattern in known if pattern.chunk > 0]
    if len(known) < len(patterns) or len(segments) > 1 or len(chunks) > 1:
        return None
    if segments and chunks:  # which count from the padding's end, not from a sequence's start
        return None
    left, right = (
        min((end for end in ends if end is not None), default=None)
        for ends in ([x.left for x in known], [x.right for x in known])
    )
    return Pattern(left, right, segments[0] if segments else None, sum(chunks))


def _with_meaning(
    mask: Tensor, pattern: Pattern, q_length: int, sequences: Sequences | None
) -> Tensor:
    setattr(mask, _MEANING, Meaning(replace(pattern, segments=None), q_length, sequences))
    return mask


def _of_segments(pattern: Pattern) -> Tensor:
    assert pattern.segments is not None
    mask = pattern.segments.to(_SEGMENTS) + 1
    sequences = Sequences.packed(mask, at_most=_is_hidden(mask))
    return _with_meaning(mask, pattern, mask.shape[1], sequences)


def _of_padding(
    pattern: Pattern,
    sizes: tuple[int, int, int, int | Tensor, int],
    attention_mask: Tensor | None,
    device: Any,
) -> Tensor | None:
    """The mask for the kernels; None where they need a bit for every pair."""
    batch, q_length, kv_length, q_offset, kv_offset = sizes
    has_window = pattern.has_window(max(q_length, kv_length))
    first_query = q_offset - kv_offset  # as a place among the keys
    if has_window and not pattern.causal and q_length != kv_length:
        return None
    if pattern.chunk > 0 and kv_offset != 0:  # a cache that dropped keys, from which chunks count
        return None
    if attention_mask is None:
        is_whole = isinstance(first_query, int) and first_query + q_length == kv_length
        if is_whole or not pattern.causal:
            ones = torch.ones(batch, kv_length, dtype=_ALL_REAL, device=device)
            return _with_meaning(ones, pattern, q_length, None)
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
            return None
        real_q = real_k.new_ones(batch, q_length)
    else:
        queries = first_query + torch.arange(q_length, device=real_k.device)
        real_q = real_k[:, queries.clamp(0, kv_length - 1)]
    all_real, contiguous, ends = False, True, pattern.causal
    if attention_mask is not None and _is_hidden(attention_mask):
        if has_window or q_length == 1:
            return None
        contiguous = False
    elif attention_mask is not None and batch > 0 and q_length > 0:
        answers = (real_k.all(), is_contiguous(real_k) & is_contiguous(real_q), real_q[:, -1].all())
        all_real, contiguous, ends = torch.stack(answers).tolist()
    if all_real and (not pattern.causal or isinstance(first_query, int)):
        return _with_meaning(real_k.to(_ALL_REAL), pattern, q_length, None)
    if not contiguous and has_window:
        return None
    if contiguous:
        sequences = Sequences.ranges(real_q, real_k, ends=ends and pattern.causal)
    else:
        sequences = Sequences.scattered(real_q, real_k)
    return _with_meaning(real_k, pattern, q_length, sequences)
