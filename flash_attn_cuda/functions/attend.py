"""The one way of a call: from its description (call/fields.py) to its results.

Where the tensors are plain and nothing is watching (no compiler, no torch mode, no functorch
transform, no forward mode), CUDA calls go straight to the extension, whose autograd is in C++ and
which checks its inputs itself; everything else goes through the operators.
"""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType
from typing import cast

import torch
from torch import Tensor
from torch._C import _is_any_autocast_enabled
from torch.compiler import is_compiling

from ..call import rules
from ..call.checks import (
    check_call,
    check_contents,
    check_out,
    check_return_attn_probs,
    names_of,
)
from ..call.fields import DIFFERENTIABLE, NAMES, TENSORS, WITH_SCALES, AttentionCall, Names, Results
from ..call.functorch import is_functorch_active
from ..call.interpret import check_rules
from ..call.tensors import refuse_forward_gradients
from ..installed import build_info
from ..operators.derivatives import run_operator
from ..operators.dtensor_import import is_dtensor
from ..operators.support import PLAIN, arguments_of, check_vmap_randomness
from ..operators.transforms import wants_functions
from .arguments import (
    Result,
    cast_for_autocast,
    is_plain_cuda_call,
    needs_padding,
    pad_head_dim,
)


def attend(
    call: AttentionCall, return_attn_probs: bool = False, names: Names | None = None
) -> Result:
    """What a public function returns. `names`: what errors call the arguments."""
    results = results_of(call, return_attn_probs, names)
    return returned(results, return_attn_probs, call.return_max_logits)


def returned(results: Results, return_attn_probs: bool, return_max_logits: bool) -> Result:
    """out, or (out[, softmax_lse, S_dmask][, max_logits])."""
    out, s_dmask = results.out, results.S_dmask
    found: tuple[Tensor, ...] = (out,)
    if return_attn_probs:
        found += results.softmax_lse, out.new_empty((0,)) if s_dmask is None else s_dmask
    if return_max_logits:
        assert results.max_logits is not None
        found += (results.max_logits,)
    return out if len(found) == 1 else found


def results_of(
    call: AttentionCall, returns_lse: bool = True, names: Names | None = None
) -> Results:
    """What was not wanted may be None; S_dmask is made where softmax_lse is wanted."""
    call.return_softmax = returns_lse and call.dropout_p > 0.0
    if call.return_softmax:
        check_return_attn_probs(call)
    if call.out is not None:
        _check_out(call, names)
    if call.return_softmax or not _is_plain(call):
        return _by_operator(call, names)
    return _by_extension(call, names, returns_lse)


def attend_plainly(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None,
    causal: bool,
    returns_lse: bool,
    names: Names,
) -> tuple[Tensor, Tensor | None] | None:
    """(out, softmax_lse or None) of a call without options, whose host time counts most; None where
    it has to go the way of the others.
    """
    if not is_plain_cuda_call(q, k, v) or _is_any_autocast_enabled() or _has_to_be_padded(q, v):
        return None
    try:
        return cast(ModuleType, build_info.extension).attention(
            q, k, v, softmax_scale, causal, returns_lse
        )
    except Exception as error:
        _explain(AttentionCall(q, k, v, softmax_scale=softmax_scale, causal=causal), names, error)
        raise


def needs_gradient(call: AttentionCall) -> bool:
    if not torch.is_grad_enabled():
        return False
    inputs = arguments_of(call, DIFFERENTIABLE if call.v_descale is None else WITH_SCALES)
    return any(x is not None and x.requires_grad for x in inputs)


def may_be_differentiated(call: AttentionCall) -> bool:
    """Whether a derivative is recorded, or a transform may ask for one."""
    return needs_gradient(call) or wants_functions()


def _check_out(call: AttentionCall, names: Names | None) -> None:
    """Raises for an out that the results of this call cannot be written into."""
    if needs_gradient(call):
        check_rules(rules.OF_RECORDED, NAMES, call)
    if not call.over_cache:
        call.q, call.k, call.v, call.qv = cast_for_autocast(call.q, call.k, call.v, call.qv)
    try:
        check_out(call)
    except (TypeError, ValueError):
        _check(call, names)  # what is wrong with other arguments comes first
        raise


def _is_plain(call: AttentionCall) -> bool:
    return (
        is_plain_cuda_call(call.q, call.k, call.v)
        and PLAIN.issuperset(map(type, vars(call).values()))
        # The backward of others refuses.
        and (
            (call.block_table is call.v_descale is None and not call.over_cache)
            or not needs_gradient(call)
        )
    )


def _by_extension(call: AttentionCall, names: Names | None, returns_lse: bool) -> Results:
    """An input that the extension refuses is checked here for the words of the error."""
    try:
        if call.over_cache:
            return cast(ModuleType, build_info.extension).forward(call, returns_lse)
        if _is_any_autocast_enabled():
            call.q, call.k, call.v, call.qv = cast_for_autocast(call.q, call.k, call.v, call.qv)
        padded = _padded(call)
        results: Results = cast(ModuleType, build_info.extension).forward(padded, returns_lse)
        if padded is not call:
            results = results._replace(out=_unpadded(results.out, call))
        return results
    except Exception as error:
        _explain(call, names, error)
        raise


def _explain(call: AttentionCall, names: Names | None, error: Exception) -> None:
    """Raises in this package's words, where they say what the extension refused."""
    _check(call, names)
    build_info.require_cuda(call.q.device, error)


def _by_operator(call: AttentionCall, names: Names | None) -> Results:
    if not call.over_cache:
        call.q, call.k, call.v, call.qv = cast_for_autocast(call.q, call.k, call.v, call.qv)
    _check(call, names)
    if not is_compiling() and any(map(is_dtensor, vars(call).values())):
        from ..operators.dtensor import split_of

        split_of(call, names=names_of(call) if names is None else names)  # for its errors' words
    check_vmap_randomness(call.dropout_p, *arguments_of(call, TENSORS))
    call.keeps_rounding = not call.saves_memory and may_be_differentiated(call)
    padded = call if call.over_cache or not call.q.is_cuda else _padded(call)
    try:
        results = run_operator(padded)
    except ValueError:
        # Of contents, for which the operator has names of its own.
        if call.q.device.type == "cpu" and not is_functorch_active():
            check_contents(call, names)
        raise
    if padded is not call or call.out is not None:
        results = results._replace(out=_unpadded(results.out, call))
    return results


def _check(call: AttentionCall, names: Names | None) -> None:
    """Raises for what no backend runs."""
    check_call(call, names, is_padded=False)
    if call.reads_in_place():
        refuse_forward_gradients(**{name: getattr(call, name) for name in DIFFERENTIABLE})


def _has_to_be_padded(q: Tensor, v: Tensor) -> bool:
    return q.dim() > 0 and v.dim() > 0 and needs_padding(q, v)


def _padded(call: AttentionCall) -> AttentionCall:
    """The call, or one whose head dims are multiples of 8, as the training kernels want them; the
    result of that has to be cut, and so is not written into an out. A call with qv is refused then.
    """
    if call.qv is not None or not _has_to_be_padded(call.q, call.v):
        return call
    q, k, v = (pad_head_dim(x) for x in (call.q, call.k, call.v))
    return replace(call, q=q, k=k, v=v, softmax_scale=call.scale(), out=None)


def _unpadded(out: Tensor, call: AttentionCall) -> Tensor:
    """The result without padded columns, in the tensor that the caller gave for it, if any."""
    out = out[..., : call.v.shape[-1]]
    return out if call.out is None else call.out.copy_(out)
