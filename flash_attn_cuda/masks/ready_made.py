"""Masks that others have described, each as a BlockSparsity; the package's docstring says what they
have in common.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..call.pieces import HIDDEN, VISIBLE, pieces_of
from ..call.tensors import check_tensor
from .lists import pack_rows, pieces_of_bits, pieces_of_blocks
from .random_choice import random_choice
from .sparsity import BlockSparsity, sparsity_of_pieces

__all__ = ["bigbird", "dilated", "document", "prefix_lm", "sliding_window", "strided"]

# What a mask shows: (positions of some queries (rows, 1), keys (seqlen_k,), slice of the queries)
# to bool (batch or 1, heads or 1, rows, seqlen_k) or what broadcasts to it. Nothing but bools may
# be of that size.
Rule = Callable[[Tensor, Tensor, slice], Tensor]

CHUNK_PAIRS = 1 << 24  # pairs at a time, several bools each

Device = torch.device | str | None


def prefix_lm(
    seqlen_q: int, prefix: int | Tensor, seqlen_k: int | None = None, *, device: Device = None
) -> BlockSparsity:
    """Causal, but the first keys are visible to every query.

    Raffel et al., "Exploring the Limits of Transfer Learning with a Unified Text-to-Text
    Transformer", 2019, section 3.2.1.

    Args:
        prefix: how many keys; an integer tensor (batch,): of each sequence.

    Raises:
        TypeError: a number or tensor is of another type.
        ValueError: a number out of range, a tensor of another shape.
    """
    seqlen_k = _seqlens(seqlen_q, seqlen_k)
    if isinstance(prefix, Tensor):
        check_tensor("prefix", prefix)
        _check_integers("prefix", prefix)
        if prefix.dim() != 1:
            raise ValueError(f"prefix: must have shape (batch,), got {tuple(prefix.shape)}")
        batch, device = prefix.shape[0], _device_of("prefix", prefix, device)
        prefix = prefix.view(-1, 1, 1, 1)
    else:
        _check_number("prefix", prefix, least=0)
        batch = 1
        if prefix >= seqlen_k:
            return _everything(seqlen_q, seqlen_k, device)

    def rule(query: Tensor, key: Tensor, _: slice) -> Tensor:
        return (key < prefix) | (key <= query)

    return _made_of(rule, (batch, 1), seqlen_q, seqlen_k, device)


def document(ids: Tensor, ids_k: Tensor | None = None, *, causal: bool = False) -> BlockSparsity:
    """Tokens of several documents in one sequence see their own document.

    Grattafiori et al., "The Llama 3 Herd of Models", 2024, section 3.2. Documents need not be in
    one piece. A packed call (flash_attn_varlen_func) does the same for documents that are, without
    a mask.

    Args:
        ids: the document of each query, integers (seqlen_q,) or (batch or 1, seqlen_q). Tokens with
            a negative one, as padding may have it, see nothing and are not seen.
        ids_k: of each key (seqlen_k,) or (batch or 1, seqlen_k); default: the same.
        causal: a query sees no key behind its position.

    Raises:
        TypeError: ids are no tensors of integers.
        ValueError: another shape, or device.
    """
    named = (("ids", ids), ("ids_k", ids if ids_k is None else ids_k))
    for name, tensor in named:
        check_tensor(name, tensor)
        _check_integers(name, tensor)
        if tensor.dim() not in (1, 2):
            shape = tuple(tensor.shape)
            raise ValueError(f"{name}: must have shape (seqlen,) or (batch, seqlen), got {shape}")
    of_queries, of_keys = (torch.atleast_2d(tensor)[:, None] for _, tensor in named)
    _device_of("ids_k", of_keys, of_queries.device)
    batches = {of_queries.shape[0], of_keys.shape[0]}
    if len(batches - {1}) > 1:
        raise ValueError(
            f"ids_k: batch must be 1 or that of ids ({of_queries.shape[0]}), got {of_keys.shape[0]}"
        )
    of_keys = of_keys[..., None, :]
    is_key = of_keys >= 0

    def rule(query: Tensor, key: Tensor, rows: slice) -> Tensor:
        same = of_queries[..., rows, None] == of_keys
        same &= is_key
        return same & (key <= query) if causal else same

    batch = 0 if 0 in batches else max(batches)
    seqlens = (of_queries.shape[-1], of_keys.shape[-1])
    return _made_of(rule, (batch, 1), *seqlens, of_queries.device)


def sliding_window(
    seqlen_q: int,
    window: tuple[int, int],
    seqlen_k: int | None = None,
    *,
    global_tokens: int | Tensor = 0,
    causal: bool = False,
    device: Device = None,
) -> BlockSparsity:
    """A window around each query, and tokens that see and are seen by all.

    Beltagy, Peters, Cohan, "Longformer: The Long-Document Transformer", 2020, section 3.1; the
    first tokens as global ones, causal: Xiao et al., "Efficient Streaming Language Models with
    Attention Sinks", 2023, section 3. Without global tokens, window_size of an attention call does
    the same and needs no mask.

    Args:
        window: (left, right), inclusive, negative for no bound, as window_size of a call.
        global_tokens: how many tokens at the start are global; or which, bool (seqlen_k,) or
            (batch, seqlen_k), by position: a query is global if the key at its position is.
        causal: a query sees no key behind its position.

    Raises:
        TypeError: a number or tensor is of another type.
        ValueError: a number out of range, a tensor of another shape.
    """
    seqlen_k = _seqlens(seqlen_q, seqlen_k)
    left, right = _bounds(window, 1, seqlen_q, seqlen_k)
    batch, global_keys = 1, None
    if isinstance(global_tokens, Tensor):
        check_tensor("global_tokens", global_tokens)
        if global_tokens.dtype != torch.bool:
            raise TypeError(f"global_tokens: dtype must be torch.bool, got {global_tokens.dtype}")
        if global_tokens.dim() not in (1, 2) or global_tokens.shape[-1] != seqlen_k:
            raise ValueError(
                f"global_tokens: must have shape ({seqlen_k},) or (batch, {seqlen_k}), "
                f"got {tuple(global_tokens.shape)}"
            )
        device = _device_of("global_tokens", global_tokens, device)
        global_keys = torch.atleast_2d(global_tokens)[:, None]
        batch = global_keys.shape[0]
    else:
        _check_number("global_tokens", global_tokens, least=0)
        if global_tokens > 0:
            global_keys = torch.arange(seqlen_k, device=device)[None, None] < global_tokens
    if _hides_nothing(left, right, causal, seqlen_q, seqlen_k):
        return _everything(seqlen_q, seqlen_k, device)
    if global_keys is not None:  # of the queries' positions, some of which may lie before key 0
        global_queries = torch.nn.functional.pad(global_keys, (seqlen_q - seqlen_k, 0))

    def rule(query: Tensor, key: Tensor, rows: slice) -> Tensor:
        visible = (key >= query - left) & (key <= query + right)
        if global_keys is not None:
            visible = visible | global_keys[..., None, :] | global_queries[..., rows, None]
        return visible & (key <= query) if causal else visible

    return _made_of(rule, (batch, 1), seqlen_q, seqlen_k, device)


def dilated(
    seqlen_q: int,
    window: tuple[int, int],
    dilation: int | Sequence[int],
    seqlen_k: int | None = None,
    *,
    causal: bool = False,
    device: Device = None,
) -> BlockSparsity:
    """A window with gaps: a query at p sees the keys p + n * dilation, n from -left to right.

    Beltagy, Peters, Cohan, "Longformer: The Long-Document Transformer", 2020, section 3.1.

    Args:
        window: (left, right), counted in visible keys; negative for no bound.
        dilation: from one visible key to the next; 1: no gaps. Several numbers: of each query head.
        causal: a query sees no key behind its position.

    Raises:
        TypeError: a number is of another type.
        ValueError: a number out of range.
    """
    seqlen_k = _seqlens(seqlen_q, seqlen_k)
    steps = list(dilation) if isinstance(dilation, Sequence) else [dilation]
    if not steps:
        raise ValueError(f"dilation: must be one or several integers, got {dilation!r}")
    for step in steps:
        _check_number("dilation", step, least=1)
    longest = max(seqlen_q, seqlen_k)
    steps = [min(step, longest + 1) for step in steps]
    bounds = [_bounds(window, step, seqlen_q, seqlen_k) for step in steps]
    if max(steps) == 1 and _hides_nothing(*bounds[0], causal, seqlen_q, seqlen_k):
        return _everything(seqlen_q, seqlen_k, device)

    def of_head(query: Tensor, key: Tensor, step: int, left: int, right: int) -> Tensor:
        visible = (key >= query - left) & (key <= query + (0 if causal else right))
        return visible & (key % step == query % step)

    def rule(query: Tensor, key: Tensor, _: slice) -> Tensor:
        heads = zip(steps, bounds, strict=True)
        return torch.stack([of_head(query, key, step, *bound) for step, bound in heads])

    return _made_of(rule, (1, len(steps)), seqlen_q, seqlen_k, device)


def strided(
    seqlen_q: int,
    stride: int,
    seqlen_k: int | None = None,
    *,
    causal: bool = True,
    device: Device = None,
) -> BlockSparsity:
    """The last `stride` keys, and every stride'th one before them, counted from the query.

    Child et al., "Generating Long Sequences with Sparse Transformers", 2019, section 4.3: the two
    strided patterns in one head. Not causal: to both sides.

    Raises:
        TypeError: a number is of another type.
        ValueError: a number out of range.
    """
    seqlen_k = _seqlens(seqlen_q, seqlen_k)
    _check_number("stride", stride, least=1)
    stride = min(stride, max(seqlen_q, seqlen_k) + 1)
    if stride == 1 and not causal:
        return _everything(seqlen_q, seqlen_k, device)

    def rule(query: Tensor, key: Tensor, _: slice) -> Tensor:
        visible = (key >= query - stride) & (key <= query + stride)
        visible |= key % stride == query % stride
        return visible & (key <= query) if causal else visible

    return _made_of(rule, (1, 1), seqlen_q, seqlen_k, device)


def bigbird(
    seqlen_q: int,
    seqlen_k: int | None = None,
    *,
    seed: int,
    block_size: int = 64,
    window_blocks: int = 3,
    global_blocks: int = 2,
    random_blocks: int = 3,
    heads: int = 1,
    causal: bool = False,
    device: Device = None,
) -> BlockSparsity:
    """Blocks around each query's, blocks at the start that see and are seen by all, random blocks.

    Zaheer et al., "Big Bird: Transformers for Longer Sequences", 2020, section 2 and appendix D,
    with the sizes of its base model (appendix E) as defaults. Has no bits unless it is causal.

    Args:
        seed: any integer. The same one gives the same blocks on every device.
        block_size: queries and keys of a block, a multiple of 64 that divides seqlen_k - seqlen_q.
        window_blocks: odd; the query's own block and half of the others on each side.
        global_blocks: how many at the start.
        random_blocks: how many per block of queries, of those it does not see otherwise.
        heads: query heads, each with random blocks of its own; 1: all have the same.
        causal: a query sees no key behind its position, and random blocks are drawn before it.

    Raises:
        TypeError: a number is of another type.
        ValueError: a number out of range.
    """
    seqlen_k = _seqlens(seqlen_q, seqlen_k)
    _check_number("seed", seed)
    _check_number("block_size", block_size, least=1)
    _check_number("window_blocks", window_blocks, least=1)
    _check_number("global_blocks", global_blocks, least=0)
    _check_number("random_blocks", random_blocks, least=0)
    _check_number("heads", heads, least=1)
    if window_blocks % 2 == 0:
        raise ValueError(f"window_blocks: must be odd, got {window_blocks}")
    if block_size % 64 != 0 or (seqlen_k - seqlen_q) % block_size != 0:
        raise ValueError(
            f"block_size: must be a multiple of 64 that divides seqlen_k - seqlen_q "
            f"({seqlen_k - seqlen_q}), got {block_size}"
        )
    queries, keys = -(-seqlen_q // block_size), -(-seqlen_k // block_size)
    shift = (seqlen_k - seqlen_q) // block_size
    query = torch.arange(queries, device=device)[:, None] + shift
    key = torch.arange(keys, device=device)
    blocks = ((key - query).abs() <= window_blocks // 2) | (key < global_blocks)
    blocks = blocks | ((query >= 0) & (query < global_blocks))
    past = key <= query if causal else key >= 0
    blocks = blocks.expand(heads, -1, -1)
    if random_blocks > 0 and 0 not in (queries, keys):
        blocks = blocks | random_choice(~blocks & past, random_blocks, seed)
    blocks = (blocks & past)[None]
    size = (block_size, block_size)
    if not causal:
        return BlockSparsity.from_blocks(blocks, size, seqlen_q, seqlen_k)
    diagonal = _bits_of(lambda query, key, _: key <= query, (1, 1), seqlen_q, seqlen_k, device)
    in_blocks = pieces_of_blocks(blocks, size, seqlen_q, seqlen_k)
    pieces = pieces_of_bits(diagonal, seqlen_q, seqlen_k)
    pieces = torch.where(in_blocks, pieces, HIDDEN)
    return sparsity_of_pieces(pieces, diagonal, seqlen_q, seqlen_k)


# -- making ----------------------------------------------------------------------------------------


def _bits_of(
    rule: Rule, batch_and_heads: tuple[int, int], seqlen_q: int, seqlen_k: int, device: Device
) -> Tensor:
    key = torch.arange(seqlen_k, dtype=torch.int32, device=device)

    def rows_of(first: int, last: int) -> Tensor:
        shift = seqlen_k - seqlen_q
        query = torch.arange(first + shift, last + shift, dtype=torch.int32, device=device)
        visible = rule(query[:, None], key, slice(first, last))
        return visible.expand(*batch_and_heads, last - first, seqlen_k)

    return pack_rows(rows_of, batch_and_heads, seqlen_q, seqlen_k, CHUNK_PAIRS)


def _made_of(
    rule: Rule, batch_and_heads: tuple[int, int], seqlen_q: int, seqlen_k: int, device: Device
) -> BlockSparsity:
    bits = _bits_of(rule, batch_and_heads, seqlen_q, seqlen_k, device)
    return sparsity_of_pieces(pieces_of_bits(bits, seqlen_q, seqlen_k), bits, seqlen_q, seqlen_k)


def _everything(seqlen_q: int, seqlen_k: int, device: Device) -> BlockSparsity:
    shape = (1, 1, pieces_of(seqlen_q), pieces_of(seqlen_k))
    pieces = torch.full(shape, VISIBLE, dtype=torch.uint8, device=device)
    return sparsity_of_pieces(pieces, None, seqlen_q, seqlen_k)


# -- arguments -------------------------------------------------------------------------------------


def _bounds(window: Any, step: int, seqlen_q: int, seqlen_k: int) -> tuple[int, int]:
    """(left, right) in keys; no two positions are further apart than the longer length."""
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise TypeError(f"window: must be two integers, got {window!r}")
    for bound in window:
        _check_number("window", bound)
    limit = max(seqlen_q, seqlen_k)
    left, right = (limit if bound < 0 else min(bound * step, limit) for bound in window)
    return left, right


def _hides_nothing(left: int, right: int, causal: bool, seqlen_q: int, seqlen_k: int) -> bool:
    return not causal and left >= seqlen_k - 1 and right >= seqlen_q - 1


def _seqlens(seqlen_q: Any, seqlen_k: Any) -> int:
    """seqlen_k, or seqlen_q for None."""
    _check_number("seqlen_q", seqlen_q, least=0)
    if seqlen_k is None:
        return seqlen_q
    _check_number("seqlen_k", seqlen_k, least=0)
    return seqlen_k


def _check_number(name: str, value: Any, least: int | None = None) -> None:
    if not isinstance(value, (int, torch.SymInt)) or isinstance(value, bool):
        raise TypeError(f"{name}: must be an integer, got {type(value).__name__}")
    if least is not None and value < least:
        raise ValueError(f"{name}: must be at least {least}, got {value}")


def _check_integers(name: str, tensor: Tensor) -> None:
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
        raise TypeError(f"{name}: dtype must be an integer one, got {tensor.dtype}")


def _device_of(name: str, tensor: Tensor, device: Device) -> torch.device:
    """The tensor's device, which `device` must be if given."""
    if device is None:
        return tensor.device
    wanted = torch.device(device)
    if wanted.type != tensor.device.type or wanted.index not in (None, tensor.device.index):
        raise ValueError(f"{name}: must be on {device}, got {tensor.device}")
    return tensor.device
