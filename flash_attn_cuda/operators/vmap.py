"""Rules of the operators for torch.vmap: a larger batch where a call's tensors have one, else one
entry after the other.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from ..call.fields import (
    INCOMING,
    OF_BACKWARD,
    OF_RESULTS,
    OVER_PAIRS,
    READ,
    TARGETS,
    TENSORS,
    AttentionCall,
    Results,
    forms_of_results,
)
from .attention import GRADIENTS, attention_op, described, gradients_op
from .second_order import HVP_ARGUMENTS, JVP_ARGUMENTS, hvp_op, jvp_op
from .support import arguments_of, check_randomness, one_by_one

_FOLDED = ("q", "k", "v", "alibi_slopes")
_OTHERS = tuple(name for name in TENSORS if name not in (*_FOLDED, *OVER_PAIRS, "sink"))
Dims = dict[str, Any]  # vmap's dimension of each argument, or None
# Results of which every batch entry has its own, and what it may share with others.
_OF_ENTRIES = frozenset(("out", "softmax_lse", "S_dmask", "out_rounding", "max_logits"))
_SHARED = frozenset(("rng_state",))


def _folds_into_batch(call: AttentionCall, dims: Dims) -> bool:
    """Whether a call over one more dimension is a call of a larger batch: one without lengths, and
    not over a cache, which nobody copies. Its sink is the same for all entries; masks and biases
    are, or they have the batch of each.
    """
    # Derivatives with these may not fold, and a forward's dropout has to be theirs.
    others = _OTHERS if call.dropout_p == 0.0 else (*_OTHERS, *OVER_PAIRS, "sink")
    if call.over_cache or any(x is not None for x in arguments_of(call, others)):
        return False
    batch = _batch(call.q, dims["q"])
    return dims["sink"] is None and all(
        _is_shared(call, dims, name) or (dims[name] is not None and _batch(x, dims[name]) == batch)
        for name, x in zip(OVER_PAIRS, arguments_of(call, OVER_PAIRS), strict=True)
        if x is not None
    )


def _batch(x: Tensor, dim: int | None) -> int:
    """Of one entry."""
    return x.shape[0 if dim != 0 else 1]


def _is_shared(call: AttentionCall, dims: Dims, name: str) -> bool:
    """Whether a mask or bias is the same for all entries and their batches."""
    return dims[name] is None and getattr(call, name).shape[0] == 1


@attention_op.register_vmap
def _(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, tuple[Any, ...]]:
    call, size = described(args), info.batch_size
    check_randomness(call.dropout_p, info.randomness)
    dims = dict(zip(READ, in_dims, strict=True))
    if not _folds_into_batch(call, dims):
        return one_by_one(attention_op, size, in_dims, args)
    folded, batch = _folded(call, dims, size)
    wanted = {name for name, (shape, _) in forms_of_results(folded).items() if shape != (0,)}
    if not wanted <= _OF_ENTRIES | _SHARED:
        return one_by_one(attention_op, size, in_dims, args)
    found = attention_op(*arguments_of(folded, READ))
    mapped = wanted & _OF_ENTRIES
    return _unfolded(dict(zip(Results._fields, found, strict=True)), mapped, size, batch)


def _rule_of_derivatives(
    op: Any, names: Sequence[str], results: Sequence[str], mapped: Collection[str]
) -> None:
    """Registers the rule of an operator of a forward's call and results. `names`: its arguments,
    OF_BACKWARD first; `mapped`: those of its results that have a batch.
    """

    def rule(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, tuple[Any, ...]]:
        size, count = info.batch_size, len(OF_BACKWARD)
        call = described(args[:count], OF_BACKWARD)
        others = dict(zip(names[count:], args[count:], strict=True))
        dims = dict(zip(names, in_dims, strict=True))
        # Where the forward was not mapped, batch entries are part of what decides about dropout.
        is_of_one_forward = call.dropout_p > 0.0 and dims["out"] is None
        folds = _folds_into_batch(call, dims) and not _moves_shared(call, dims, others)
        if size > 0 and (is_of_one_forward or not folds):
            return one_by_one(op, size, in_dims, args)
        folded, batch = _folded(call, dims, size)
        for name, x in others.items():
            if isinstance(x, Tensor) and name not in _SHARED:
                others[name] = _fold_into_batch(size, x, dims[name])
        found = op(*arguments_of(folded, OF_BACKWARD), *others.values())
        made = dict(zip(results, found, strict=True))
        of_entries = [name for name in mapped if made[name].shape != (0,)]
        if others.get("wants_dbias"):
            of_entries.append("dbias")
        return _unfolded(made, of_entries, size, batch)

    op.register_vmap(rule)


def _moves_shared(call: AttentionCall, dims: Dims, others: dict[str, Any]) -> bool:
    """Whether what entries share has a tangent or a gradient, of which each entry has its own."""
    has_gradients = "wants_dbias" in others
    if call.sink is not None and (has_gradients or others["tsink"] is not None):
        return True
    moves_bias = others.get("wants_dbias", False) or others.get("tbias") is not None
    return moves_bias and _is_shared(call, dims, "bias")


_rule_of_derivatives(gradients_op, (*OF_BACKWARD, *INCOMING), GRADIENTS, TARGETS)
_rule_of_derivatives(jvp_op, JVP_ARGUMENTS, OF_RESULTS, OF_RESULTS)
_rule_of_derivatives(hvp_op, HVP_ARGUMENTS, GRADIENTS, TARGETS)


def _folded(call: AttentionCall, dims: Dims, size: int) -> tuple[AttentionCall, int]:
    """The call with vmap's dimension in its batch, and the batch of one entry."""
    batch = _batch(call.q, dims["q"])
    names = ["q", "k", "v"]
    names += [x for x in OVER_PAIRS if getattr(call, x) is not None and dims[x] is not None]
    folded = {name: _fold_into_batch(size, getattr(call, name), dims[name]) for name in names}
    slopes = _fold_slopes(size, batch, call.alibi_slopes, dims["alibi_slopes"])
    return replace(call, **folded, alibi_slopes=slopes), batch


def _fold_into_batch(size: int, x: Any, dim: int | None) -> Any:
    """Merge vmap's dimension into the batch of a tensor; one without it is repeated."""
    if x is None:
        return None
    x = x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
    return x.flatten(0, 1)


def _fold_slopes(size: int, batch: int, slopes: Any, dim: int | None) -> Any:
    """ALiBi slopes (heads,) or (batch, heads) of the folded batch."""
    if slopes is None or (dim is None and slopes.dim() == 1):
        return slopes
    slopes = slopes.expand(size, *slopes.shape) if dim is None else slopes.movedim(dim, 0)
    if slopes.dim() == 2:
        slopes = slopes[:, None]
    return slopes.expand(size, batch, slopes.shape[-1]).flatten(0, 1)


def _unfolded(
    found: dict[str, Tensor], mapped: Collection[str], size: int, batch: int
) -> tuple[tuple[Tensor, ...], tuple[int | None, ...]]:
    """Results and where vmap's dimension is in each; those `mapped` have it in the batch."""
    results = tuple(
        x.unflatten(0, (size, batch)) if name in mapped else x for name, x in found.items()
    )
    return results, tuple(0 if name in mapped else None for name in found)
