"""What the operators count for torch.utils.flop_counter.FlopCounterMode: multiplications and
additions of their products, on the pairs that lengths, causal and window leave.

Lengths count where they are integers or in the host's memory. Where a sequence's are on a GPU, it
counts as every query by every key that there may be. Masks and biases hide nothing here, and lists
of keys have all of their entries.

Imported when torch.utils.flop_counter is (dtensor_import.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any

from torch import Tensor
from torch.utils.flop_counter import flop_registry, register_flop_formula

from ..call.fields import DIRECTIONS, FIELDS, OF_BACKWARD, READ, AttentionCall
from .second_order import HVP_ARGUMENTS, JVP_ARGUMENTS
from .support import ops

Products = Callable[[dict[str, Any]], tuple[int, int]]  # over columns of keys, and of values


def register() -> None:
    for op, names, products in _FORMULAS:
        if op not in flop_registry:
            register_flop_formula(op, get_raw=True)(_formula(names, products))


def _formula(names: Sequence[str], products: Products) -> Callable[..., int]:
    def formula(*args: Any, **kwargs: Any) -> int:
        given = dict(zip(names, args, strict=False)) | kwargs
        fields = FIELDS if "k_new" in names else OF_BACKWARD
        call = AttentionCall(**{name: given[name] for name in fields})
        of_keys, of_values = products(given)
        of_scores = call.q.shape[-1] + (0 if call.qv is None else call.qv.shape[-1])
        columns = of_keys * of_scores + of_values * call.value_columns()
        return 2 * call.q.shape[-2] * visible_pairs(call) * columns

    return formula


def _of_forward(_given: dict[str, Any]) -> tuple[int, int]:
    """S; P V."""
    return 1, 1


def _of_backward(_given: dict[str, Any]) -> tuple[int, int]:
    """S, dQ, dK; dP, dV."""
    return 3, 2


def _of_jvp(given: dict[str, Any]) -> tuple[int, int]:
    """S, tQ K, Q tK; (P * T) V, P tV."""
    tq, tk, tv, *of_scores = (given[name] is not None for name in DIRECTIONS)
    return 1 + tq + tk, any((tq, tk, *of_scores)) + tv


def _of_hvp(given: dict[str, Any]) -> tuple[int, int]:
    """S, tdS K, tdS Q, and of tq and tk a part of T and of dK or dQ; dP, dV, dO tV."""
    tq, tk, tv = (given[name] is not None for name in ("tq", "tk", "tv"))
    return 3 + 2 * tq + 2 * tk, 2 + tv


_FORMULAS: tuple[tuple[Any, Sequence[str], Products], ...] = (
    (ops.attention, READ, _of_forward),
    (ops.attention_with_append, FIELDS, _of_forward),
    (ops.attention_with_quantized_append, FIELDS, _of_forward),
    (ops.attention_gradients, OF_BACKWARD, _of_backward),
    (ops.attention_backward, OF_BACKWARD, _of_backward),
    (ops.attention_jvp, JVP_ARGUMENTS, _of_jvp),
    (ops.attention_hvp, HVP_ARGUMENTS, _of_hvp),
)


# -- pairs ---------------------------------------------------------------------------------------


def visible_pairs(call: AttentionCall) -> int:
    """Of a query and a key that it sees, in all sequences, of one head."""
    if call.key_lists is not None:
        return call.key_lists.numel() * call.key_list_block // call.k.shape[-2]
    lengths_q, lengths_k = _queries(call), _keys(call)
    if lengths_q is None or lengths_k is None:
        rows = call.q.shape[0] if call.is_packed() else call.batch() * call.q.shape[1]
        return rows * _most_keys(call)
    left, right = call.window()
    return sum(_pairs(*x, left, right) for x in zip(lengths_q, lengths_k, strict=True))


def _pairs(seqlen_q: int, seqlen_k: int, left: int, right: int) -> int:
    """Of one sequence; a negative bound is none."""

    def up_to(last: int) -> int:
        """Pairs of a query i and a key at most i + last."""
        return _sum(seqlen_q + last, seqlen_k) - _sum(last, seqlen_k)

    shift = seqlen_k - seqlen_q
    pairs = seqlen_q * seqlen_k if right < 0 else up_to(shift + right)
    return pairs - (0 if left < 0 else up_to(shift - left - 1))


def _sum(last: int, most: int) -> int:
    """Of min(x, most) for x from 1 to last."""
    inside = max(0, min(last, most))
    return inside * (inside + 1) // 2 + max(0, last - most) * most


def _queries(call: AttentionCall) -> Iterable[int] | None:
    """Of each sequence; None where the host does not know."""
    if call.seqused_q is not None:
        return _known(call.seqused_q)
    if call.cu_seqlens_q is None:
        return [call.q.shape[1]] * call.batch()
    return _differences(call.cu_seqlens_q)


def _keys(call: AttentionCall) -> Iterable[int] | None:
    used: Iterable[int] | None
    if call.seqlen_k is not None:
        used = [call.seqlen_k] * call.batch()
    elif call.seqused_k is not None:
        used = _known(call.seqused_k)
    elif call.cu_seqlens_k is not None:
        used = _differences(call.cu_seqlens_k)
    else:
        used = [call.capacity()] * call.batch()
    more, none = _new_keys(call), [0] * call.batch()
    padding = none if call.leftpad_k is None else _known(call.leftpad_k)
    if used is None or more is None or padding is None:
        return None
    return [x + y - z for x, y, z in zip(used, more, padding, strict=True)]


def _new_keys(call: AttentionCall) -> Iterable[int] | None:
    if call.k_new is None:
        return [0] * call.batch()
    if call.k_new.dim() == 4:
        return [call.k_new.shape[1]] * call.batch()
    bounds = call.cu_seqlens_q if call.cu_seqlens_k_new is None else call.cu_seqlens_k_new
    return None if bounds is None else _differences(bounds)


def _most_keys(call: AttentionCall) -> int:
    if call.reads_in_place() or not call.is_packed():
        return call.capacity()
    return call.max_seqlen_k or call.k.shape[0]


def _known(x: Tensor) -> list[int] | None:
    """Its numbers where they are in the host's memory, and no stand-ins."""
    return x.tolist() if type(x) is Tensor and x.device.type == "cpu" else None


def _differences(bounds: Tensor) -> list[int] | None:
    found = _known(bounds)
    return None if found is None else [y - x for x, y in pairwise(found)]
