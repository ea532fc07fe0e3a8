"""attention_chunk: a query sees the keys of its own chunk alone (Llama 4's local layers).

A chunk is chunk keys from a multiple of it on; a query's is that of the key that it is aligned to,
key i + seqlen_k - seqlen_q for query i, and other masks act within it. Chunks do not see each
other, so they are sequences: a call with chunks is one over more and shorter ones, at their bottom
right as long ones are, whatever kernel that takes, forward and backward. Nothing is copied where
lengths are equal and multiples of the chunk. All else is arithmetic on the device, in pieces of
which there are as many as there can be; those without a query are empty.

A mask or a bias is over the pairs of whole sequences, so a call that has one stays whole, and its
block mask hides what is in another chunk. Dropout then drops what it drops without chunks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..call.checks import check_call
from ..call.fields import AttentionCall, Results
from ..call.pieces import PIECE, VISIBLE
from ..call.rules import TILE, tiles_of
from ..call.tensors import as_index, refuse_with
from ..masks.lists import intersection, lists_of_pieces, pieces_of_bits, pieces_of_rows
from ..operators.dtensor_import import is_dtensor
from .arguments import cast_for_autocast
from .attend import results_of
from .rotary import apply_rotary_emb


def check_chunk(attention_chunk: Any) -> int:
    """0 for none."""
    chunk = as_index("attention_chunk", attention_chunk)
    if chunk < 0:
        raise ValueError(f"attention_chunk: must be 0, for none, or positive, got {chunk}")
    return chunk


@dataclass
class Sequences:
    """What is cut: where queries and keys of each begin and how many there are, int64 (batch,).
    Keys may begin behind rows of their sequence that are padding.
    """

    first_q: Tensor
    len_q: Tensor
    row_k: Tensor
    first_k: Tensor
    len_k: Tensor

    def shift(self) -> Tensor:
        """The key that query 0 is aligned to."""
        return self.len_k.clamp(min=0) - self.len_q.clamp(min=0)


@dataclass
class Pieces:
    """In the order of their rows, int64 (count,); those that are too many are empty."""

    owner: Tensor  # the sequence
    first_q: Tensor
    len_q: Tensor
    first_k: Tensor
    len_k: Tensor


def _cut(
    whole: Sequences,
    chunk: int,
    count: int,
    *,
    end_q: Tensor,
    end_k: Tensor,
    before: bool,
    late: bool,
) -> Pieces:
    """`count`: the most that there can be. `before`: queries may come before every key, which are a
    piece without keys. `late`: keys before the first query's chunk are in none.
    """
    len_q, len_k = whole.len_q.clamp(min=0), whole.len_k.clamp(min=0)
    shift = whole.shift()
    skipped = shift.clamp(min=0) // chunk if late else torch.zeros_like(shift)
    parts = (-(-len_k // chunk) - skipped).clamp(min=0) + int(before)
    ends = parts.cumsum(0)
    slot = torch.arange(count, device=ends.device)
    owner = torch.searchsorted(ends, slot, right=True)
    is_one = owner < ends.shape[0]
    owner = owner.clamp(max=ends.shape[0] - 1)
    number = slot - (ends - parts)[owner] - int(before)
    has_keys = number >= 0
    begin = torch.where(has_keys, (number + skipped[owner]) * chunk, 0)
    end = torch.where(has_keys, begin + chunk, 0)

    def queries_below(key: Tensor) -> Tensor:
        return (key - shift[owner]).clamp(min=0).minimum(len_q[owner])

    is_first = number == (-1 if before else 0)
    first_q = torch.where(is_first, 0, queries_below(begin))
    last_q = queries_below(torch.where(has_keys, end, skipped[owner] * chunk))
    keys = torch.minimum(end, len_k[owner]) - begin
    first_k = torch.where(has_keys, whole.first_k[owner] + begin, whole.row_k[owner])
    return Pieces(
        owner,
        torch.where(is_one, whole.first_q[owner] + first_q, end_q),
        torch.where(is_one, last_q - first_q, 0).clamp(min=0),
        torch.where(is_one, first_k, end_k),
        torch.where(is_one & has_keys, keys, 0).clamp(min=0),
    )


def _bounds(first: Tensor, end: Tensor) -> Tensor:
    """cu_seqlens."""
    return torch.cat([first, end[None]]).int()


def _rows_of(slopes: Tensor | None, owner: Tensor) -> Tensor | None:
    return slopes[owner] if slopes is not None and slopes.dim() == 2 else slopes


def _scales_of(call: AttentionCall, owner: Tensor) -> dict[str, Any]:
    """Scales of e4m3, where sequences have their own."""
    names = ("q_descale", "k_descale", "v_descale")
    return {name: _rows_of(getattr(call, name), owner) for name in names}


def attend_in_chunks(call: AttentionCall, chunk: int, returns_lse: bool) -> Results:
    """What results_of returns, of a call in chunks."""
    reasons = {
        "a block_table, which flash_attn_with_kvcache takes": call.block_table is not None,
        "return_attn_probs and dropout": returns_lse and call.dropout_p > 0.0,
        "key_lists": call.key_lists is not None,
        "tree_mask": call.tree_mask is not None,
    }
    refuse_with("attention_chunk: must be 0 with {}, got {}", reasons, chunk)
    call.q, call.k, call.v, call.qv = cast_for_autocast(call.q, call.k, call.v, call.qv)
    check_call(call, is_padded=False)
    if call.batch() == 0:
        return results_of(call, returns_lse)
    if is_dtensor(call.q) or is_dtensor(call.k):
        return _in_shards(call, lambda part: attend_in_chunks(part, chunk, True))
    if call.is_packed():
        if call.has_masks():
            return results_of(_hiding_others(call, chunk), returns_lse)
        cut, owner = _of_packed(call, chunk)
        return _with_logits_of(call, results_of(cut, returns_lse), owner)
    (batch, seqlen_q), seqlen_k = call.q.shape[:2], call.k.shape[1]
    if seqlen_q <= seqlen_k <= chunk:
        return results_of(call, returns_lse)
    if call.has_masks():
        return results_of(_hiding_others(call, chunk), returns_lse)
    if seqlen_q == seqlen_k and seqlen_q % chunk == 0:
        cut = _of_equal_chunks(call, chunk)
        owner = torch.arange(cut.batch(), device=call.q.device) // (seqlen_q // chunk)
    else:
        cut, owner = _of_packed(call.packed(), chunk, before=seqlen_q > seqlen_k)
    found = _with_logits_of(call, results_of(cut, returns_lse), owner)
    softmax_lse = found.softmax_lse
    if returns_lse and cut.is_packed():
        softmax_lse = softmax_lse.unflatten(1, (batch, seqlen_q)).transpose(0, 1)
    elif returns_lse:
        softmax_lse = softmax_lse.unflatten(0, (batch, -1)).transpose(1, 2).flatten(2)
    out = found.out.reshape(batch, seqlen_q, *found.out.shape[-2:])
    return found._replace(out=out, softmax_lse=softmax_lse)


def _with_logits_of(call: AttentionCall, found: Results, owner: Tensor) -> Results:
    """With max_logits, where wanted, of the call's sequences; owner: of each piece."""
    pieces = found.max_logits
    if not call.return_max_logits or pieces is None:
        return found
    whole = pieces.new_full((call.batch(), pieces.shape[1]), -torch.inf)
    index = owner[:, None].expand(pieces.shape)
    return found._replace(max_logits=whole.scatter_reduce(0, index, pieces, "amax"))


def _in_shards(call: AttentionCall, attend: Callable[[AttentionCall], Results]) -> Results:
    """Each rank cuts its part."""
    from ..operators.dtensor_shards import attend_in_shards

    return attend_in_shards(call, attend, "attention_chunk")


def _of_equal_chunks(call: AttentionCall, chunk: int) -> AttentionCall:
    """Chunks as entries of the batch."""
    q, k, v = (x.unflatten(1, (-1, chunk)).flatten(0, 1) for x in (call.q, call.k, call.v))
    slopes = call.alibi_slopes
    if slopes is not None and slopes.dim() == 2:
        slopes = slopes.repeat_interleave(q.shape[0] // call.q.shape[0], 0)
    return replace(call, q=q, k=k, v=v, alibi_slopes=slopes)


def packed_sequences(call: AttentionCall) -> Sequences:
    """Where those of a packed call lie, on the device."""
    cu_q, cu_k = call.cu_seqlens_q, call.cu_seqlens_k
    assert cu_q is not None and cu_k is not None
    rows_q, rows_k = cu_q.diff().long(), cu_k.diff().long()
    len_q = rows_q if call.seqused_q is None else call.seqused_q.long().minimum(rows_q)
    last_k = rows_k if call.seqused_k is None else call.seqused_k.long().minimum(rows_k)
    pad = torch.zeros_like(last_k) if call.leftpad_k is None else call.leftpad_k.long()
    row_k = cu_k[:-1].long()
    return Sequences(cu_q[:-1].long(), len_q, row_k, row_k + pad, last_k - pad)


def _of_packed(
    call: AttentionCall, chunk: int, before: bool = True
) -> tuple[AttentionCall, Tensor]:
    """Chunks as packed sequences, and the call's sequence that each is of."""
    cu_q, cu_k = call.cu_seqlens_q, call.cu_seqlens_k
    assert cu_q is not None and cu_k is not None
    whole = packed_sequences(call)
    end_q, end_k = cu_q[-1].long(), cu_k[-1].long()  # rows behind are nobody's
    batch = cu_q.shape[0] - 1
    count = call.k.shape[0] // chunk + (2 if before else 1) * batch
    cut = _cut(whole, chunk, count, end_q=end_q, end_k=end_k, before=before, late=False)
    has_own_lengths = call.seqused_k is not None or call.leftpad_k is not None
    made = replace(
        call,
        cu_seqlens_q=_bounds(cut.first_q, end_q),
        cu_seqlens_k=_bounds(cut.first_k, end_k),
        seqused_q=None if call.seqused_q is None else cut.len_q.int(),
        seqused_k=cut.len_k.int() if has_own_lengths else None,
        leftpad_k=None,
        max_seqlen_q=call.max_seqlen_q if before else min(chunk, call.max_seqlen_q),
        max_seqlen_k=min(chunk, call.max_seqlen_k),
        alibi_slopes=_rows_of(call.alibi_slopes, cut.owner),
        **_scales_of(call, cut.owner),
    )
    return made, cut.owner


# -- with a mask or a bias -----------------------------------------------------------------------


def _hiding_others(call: AttentionCall, chunk: int) -> AttentionCall:
    """The call, whose block mask hides other chunks; with a bias alone it has one then."""
    rows, bits = call.block_rows, call.mask_bits
    first: int | Tensor
    if not call.is_packed():
        seqlen_q, seqlen_k = call.q.shape[1], call.k.shape[1]
        first = seqlen_k - seqlen_q
    else:
        seqlen_q, seqlen_k = call.max_seqlen_q, call.max_seqlen_k
        first = packed_sequences(call).shift().view(-1, 1, 1, 1)
        if rows is not None:  # which may be longer
            seqlen_q = TILE * rows.shape[2] if bits is None else bits.shape[2]
            seqlen_k = TILE * (rows.shape[3] - 2)
    mask = _chunk_mask(chunk, first, seqlen_q, seqlen_k, call.q.device)
    if rows is not None:
        mask = intersection((pieces_of_rows(rows, seqlen_q, seqlen_k), bits), mask)
    pieces, bits = mask
    rows, columns = lists_of_pieces(pieces)
    return replace(call, block_rows=rows, block_columns=columns, mask_bits=bits)


def _chunk_mask(
    chunk: int, first: int | Tensor, seqlen_q: int, seqlen_k: int, device: torch.device
) -> tuple[Tensor, Tensor | None]:
    """Pieces and bits, (1 or batch, 1, ...), of chunks; no bits if each fills pieces. `first`: the
    key that query 0 is aligned to; of each sequence (batch, 1, 1, 1).
    """
    if not isinstance(first, Tensor) and chunk % PIECE == first % PIECE == 0:
        query = torch.arange(first, first + seqlen_q, PIECE, device=device)[:, None]
        same = query // chunk == torch.arange(0, seqlen_k, PIECE, device=device) // chunk
        return same[None, None].to(torch.uint8) * VISIBLE, None
    position = torch.arange(seqlen_q, device=device).view(1, 1, -1, 1) + first
    begin = (position // chunk * chunk).clamp(max=seqlen_k)
    word = torch.arange(2 * tiles_of(seqlen_k), device=device) * PIECE  # the first key of one
    # Of each bit those from it on, and none.
    from_bit = torch.nn.functional.pad(-1 << torch.arange(PIECE, device=device), (0, 1))

    def from_key(key: Tensor) -> Tensor:
        return from_bit[(key - word).clamp_(0, PIECE)]

    bits = (from_key(begin) ^ from_key((begin + chunk).clamp(max=seqlen_k))).view(torch.int32)
    return pieces_of_bits(bits, seqlen_q, seqlen_k), bits


# -- over a cache --------------------------------------------------------------------------------


def attend_over_cache_in_chunks(call: AttentionCall, chunk: int) -> Results:
    """attend_in_chunks over a cache. New keys are appended first, unless one query a sequence sees
    one.
    """
    reasons = {
        "key_lists": call.key_lists is not None,
        "tree_mask": call.tree_mask is not None,
        "attn_mask": call.bias is not None,
        "relative_bias": call.relative_bias is not None,
    }
    refuse_with("attention_chunk: must be 0 with {}, got {}", reasons, chunk)
    check_call(call, is_padded=False)
    if call.batch() == 0:
        return results_of(call)
    if is_dtensor(call.q) or is_dtensor(call.k):
        return _in_shards(call, lambda part: attend_over_cache_in_chunks(part, chunk))
    if call.rotary_cos is not None and call.k_new is not None:
        call = _rotated(call)
    is_decode = not call.is_packed() and call.q.shape[1] == 1
    appends_one = call.k_new is not None and call.k_new.dim() == 4 and call.k_new.shape[1] == 1
    if call.k_new is not None and not (is_decode and appends_one):
        call = _appended(call)
    filled = _filled(call)
    pad = torch.zeros_like(filled) if call.leftpad_k is None else call.leftpad_k.long()
    if is_decode:
        len_k = filled - pad + int(call.k_new is not None)
        skipped = (len_k - 1).clamp(min=0) // chunk * chunk
        return results_of(replace(call, leftpad_k=(pad + skipped).int()))
    return _over_pieces(call, chunk, filled, pad)


def _over_pieces(call: AttentionCall, chunk: int, filled: Tensor, pad: Tensor) -> Results:
    is_packed, batch = call.is_packed(), call.batch()
    q = call.q if is_packed else call.q.flatten(0, 1)
    qv = call.qv if call.qv is None or is_packed else call.qv.flatten(0, 1)
    total_q = q.shape[0]
    if is_packed:
        bounds = call.cu_seqlens_q
        count = total_q // chunk + 3 * batch
        most = call.max_seqlen_q
    else:
        most = call.q.shape[1]
        bounds = torch.arange(batch + 1, device=q.device) * most
        count = batch * ((most + chunk - 2) // chunk + 2)
    assert bounds is not None
    whole = Sequences(bounds[:-1].long(), bounds.diff().long(), pad, pad, filled - pad)
    end_q = bounds[-1].long()
    nothing = torch.zeros_like(end_q)
    cut = _cut(whole, chunk, count, end_q=end_q, end_k=nothing, before=True, late=True)
    entry = cut.owner if call.cache_batch_idx is None else call.cache_batch_idx[cut.owner]
    pieces = replace(
        call,
        q=q,
        qv=qv,
        out=call.out if is_packed else None,
        cu_seqlens_q=_bounds(cut.first_q, end_q),
        max_seqlen_q=most,
        seqused_k=(cut.first_k + cut.len_k).int(),
        seqlen_k=None,
        leftpad_k=cut.first_k.int(),
        cache_batch_idx=entry.int(),
        alibi_slopes=_rows_of(call.alibi_slopes, cut.owner),
        **_scales_of(call, cut.owner),
    )
    found = results_of(pieces)
    if is_packed:
        return found
    shape = (batch, call.q.shape[1])
    out = found.out.unflatten(0, shape)
    softmax_lse = found.softmax_lse.unflatten(1, shape).transpose(0, 1)
    return found._replace(
        out=out if call.out is None else call.out.copy_(out), softmax_lse=softmax_lse
    )


def _filled(call: AttentionCall) -> Tensor:
    """Rows of the cache that each sequence fills, int64."""
    if call.seqused_k is not None:
        return call.seqused_k.long()
    rows = call.capacity() if call.seqlen_k is None else call.seqlen_k
    return torch.full((call.batch(),), rows, dtype=torch.int64, device=call.q.device)


def _appended(call: AttentionCall) -> AttentionCall:
    """The call behind an append of its new keys, which a call without queries makes."""
    assert call.k_new is not None

    def no_queries(x: Tensor) -> Tensor:
        return x.new_empty((call.batch(), 0, *x.shape[-2:]))

    q, qv = no_queries(call.q), None if call.qv is None else no_queries(call.qv)
    bounds = call.cu_seqlens_k_new
    results_of(replace(call, q=q, qv=qv, cu_seqlens_q=None, max_seqlen_q=0, out=None))
    new = call.k_new.shape[1] if bounds is None else bounds.diff().long()
    filled = (_filled(call) + new).clamp(max=call.capacity()).int()
    nothing: dict[str, Any] = {"k_new": None, "v_new": None, "cu_seqlens_k_new": None}
    nothing["quantizes_tokens"] = False
    return replace(call, seqused_k=filled, seqlen_k=None, **nothing)


def _rotated(call: AttentionCall) -> AttentionCall:
    """The call with queries and new keys turned by their positions already."""
    assert call.rotary_cos is not None and call.rotary_sin is not None
    tables = (call.rotary_cos, call.rotary_sin, call.rotary_interleaved)
    filled = _filled(call).int()
    runs = call.is_windowed()

    def turned(x: Tensor, bounds: Tensor | None, runs: bool) -> Tensor:
        if bounds is None and runs:
            return apply_rotary_emb(x, *tables, seqlen_offsets=filled)
        if bounds is None:  # all at the first position: heads and positions change places
            rows = x.flatten(1, 2).unsqueeze(1)
            return apply_rotary_emb(rows, *tables, seqlen_offsets=filled).view_as(x)
        lengths: dict[str, Any] = {"cu_seqlens": bounds, "max_seqlen": x.shape[0]}
        if runs:
            return apply_rotary_emb(x, *tables, seqlen_offsets=filled, **lengths)
        row = torch.arange(x.shape[0], device=x.device)
        owner = torch.searchsorted(bounds[1:].long(), row, right=True)
        first = filled[owner.clamp(max=filled.shape[0] - 1)]
        return apply_rotary_emb(x[:, None], *tables, seqlen_offsets=first)[:, 0]

    k_new = call.k_new
    assert k_new is not None
    return replace(
        call,
        q=turned(call.q, call.cu_seqlens_q, runs),
        k_new=turned(k_new, call.cu_seqlens_k_new, True),
        rotary_cos=None,
        rotary_sin=None,
    )
