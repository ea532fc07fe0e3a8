"""What the operators do with DTensors: each rank computes the batch entries and heads that it has.

A dimension of the mesh may cut the batch of everything, or the heads of everything, or nothing: q
says which, and the others have to fit, as attention is independent over both. What is replicated
where q is cut is cut here, which moves nothing between ranks: lengths, slopes and masks, which may
also be plain tensors that hold the whole, and the key heads that a rank's query heads read, whose
gradients are sums over ranks (Partial) then. Anything else is refused; gradients that come in alone
are moved to where their results are. A dropout's mask is that of the whole: the seed is the first
rank's, and a rank's sequences and heads count from where they are in the whole (AttentionCall's
origin).

Imported when DTensors are (dtensor_import.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.nn.functional import pad

from ..call.checks import check_call, check_incoming, check_tangents, names_of
from ..call.fields import (
    ARRAYS,
    DIFFERENTIABLE,
    DIRECTIONS,
    FIELDS,
    INCOMING,
    INCOMING_AND_TARGETS,
    OF_BACKWARD,
    OF_FORWARD,
    OVER_PAIRS,
    READ,
    TANGENTS,
    TARGETS,
    TENSORS,
    AttentionCall,
    Incoming,
    Results,
    Tangents,
    forms_of_results,
)
from ..call.rounding import is_known
from ..call.tensors import refuse_with
from . import attention, combine, second_order
from .dtensor_split import BATCH, HEADS, KEY_HEADS, ROWS, SCALES, WHOLE, Layout, Split
from .support import arguments_of, draw_rng_state

Rule = Callable[[Any, dict[str, Any]], Any]

# -- attention -------------------------------------------------------------------------------------


def layouts_of(call: AttentionCall) -> dict[str, Layout]:
    """Of the tensors of an AttentionCall (call/fields.py)."""
    # The sequences of packed tensors are not a dimension, which could be cut.
    is_cut = not call.is_packed() and call.cu_seqlens_k_new is None
    batch = BATCH if is_cut else WHOLE
    q = (WHOLE, HEADS, WHOLE) if call.is_packed() else (batch, WHOLE, HEADS, WHOLE)
    keys = (WHOLE, KEY_HEADS, WHOLE)
    if call.block_table is not None or call.cache_batch_idx is not None:
        entries: Layout = (WHOLE, *keys)  # which indices of the whole name
    elif call.over_cache or not call.is_packed():
        entries = (batch, *keys)
    else:
        entries = keys
    new = keys if call.cu_seqlens_k_new is not None else (batch, *keys)
    sizes: dict[Any, Any] = {"B": batch, "Hq": HEADS, "Hk": KEY_HEADS}
    arrays: dict[str, Layout] = {}
    for name, shapes, _ in ARRAYS:
        if shapes == (("...",),):
            continue
        allowed = [tuple(sizes.get(x, WHOLE) for x in shape) for shape in shapes]
        if ("tokens",) in shapes:
            allowed[shapes.index(("tokens",))] = entries[:-1]
        if ("groups",) in shapes:
            allowed[shapes.index(("groups",))] = entries
        given: Any = getattr(call, name)
        arrays[name] = next(x for x in allowed if given is None or len(x) == given.dim())
    pairs = (batch, HEADS, WHOLE, WHOLE)
    table = (WHOLE if call.cache_batch_idx is not None else batch, WHOLE)
    return {
        **{"q": q, "qv": q, "k": entries, "v": entries, "k_new": new, "v_new": new},
        **arrays,
        **dict.fromkeys(OVER_PAIRS, pairs),
        **dict.fromkeys(
            ("cu_seqlens_q", "cu_seqlens_k", "cu_seqlens_k_new", "rng_state"), (WHOLE,)
        ),
        **dict.fromkeys(("rotary_cos", "rotary_sin"), (WHOLE, WHOLE)),
        "block_table": table,
        "key_lists": (*q[:-2], KEY_HEADS, WHOLE),
        "tree_mask": (*q[:-2], WHOLE),
        "relative_bias": (HEADS, WHOLE),
    }


def _layouts_of_incoming(call: AttentionCall, layouts: Mapping[str, Layout]) -> dict[str, Layout]:
    """Of the tensors of an Incoming and of Tangents."""
    rows = layout_of_rows(call)
    return {
        **dict.fromkeys(("dout", "out", "out_rounding", "tout", "tout_rounding"), layouts["q"]),
        **dict.fromkeys(("dlse", "softmax_lse", "tlse"), rows),
        **{"d" + name: layouts[name] for name in "qkv"},
        **{"t" + name: layouts[name] for name in DIFFERENTIABLE},
    }


def layout_of_rows(call: AttentionCall) -> Layout:
    """Of softmax_lse and softmax_d."""
    return (HEADS, WHOLE) if call.is_packed() else (layouts_of(call)["q"][0], HEADS, WHOLE)


def _titles_of(call: AttentionCall, names: Any = None) -> dict[str, str]:
    """What errors call the fields of a call."""
    if names is None:
        titles: dict[str, str] = names_of(call)._asdict()
    else:
        masks = dict.fromkeys(OVER_PAIRS, "attn_mask, block_mask")
        titles = {**names._asdict(), **masks, "bias": "attn_mask"}
    return titles


def split_of(
    call: AttentionCall, of_derivative: Mapping[str, Tensor] | None = None, names: Any = None
) -> Split:
    """How a call that is checked lies on the mesh; raises, in a caller's `names`, for DTensors that
    do not fit. of_derivative: the tensors of an Incoming and of Tangents.
    """
    layouts = layouts_of(call)
    given = {name: x for name in TENSORS if (x := getattr(call, name)) is not None}
    if of_derivative is not None:
        layouts |= _layouts_of_incoming(call, layouts)
        given |= of_derivative
    split = Split(given, layouts, "q", _titles_of(call, names))
    _check_appended(call, split)
    _check_dropout(call, split)
    return split


def _check_appended(call: AttentionCall, split: Split) -> None:
    """A cache that ranks share would get the keys of some of them alone."""
    if call.k_new is None:
        return
    title = _titles_of(call)["k"]
    if BATCH in split.cuts and BATCH not in layouts_of(call)["k"]:
        raise ValueError(
            "q: must not be sharded over batch where new keys are appended to what ranks share, a "
            f"{title} with a block_table or cache_batch_idx: redistribute q and the new keys"
        )
    _, count, held = split.key_heads(call.k.shape[-2])
    if count < held:
        raise ValueError(
            f"{title}: must be sharded over heads as q is where new keys are appended, got "
            "replicated heads: redistribute it"
        )


def _check_dropout(call: AttentionCall, split: Split) -> None:
    if call.dropout_p == 0.0 or not any(split.cuts):
        return
    reasons = {
        "an attn_mask or a block_mask": call.has_masks(),
        "return_attn_probs": call.wants_s_dmask(),
    }
    refuse_with(
        "dropout_p: must be 0 with {} where DTensors are sharded, got {}: "
        "redistribute q, k and v to be replicated",
        reasons,
        call.dropout_p,
    )


def local_call(call: AttentionCall, split: Split) -> AttentionCall:
    """This rank's part, of which all tensors are plain."""
    tensors = {name: x for name in TENSORS if (x := getattr(call, name)) is not None}
    local: dict[str, Any] = {name: split.local(name, x) for name, x in tensors.items()}
    first, count, held = split.key_heads(call.k.shape[-2])
    if count < held:
        local |= {name: local[name].narrow(-2, first, count) for name in "kv"}
        given = [name for name in SCALES if name in local]
        dims = {name: min(local[name].dim() - 1, 2) for name in given}  # of heads
        local |= {name: local[name].narrow(dims[name], first, count) for name in given}
        if "key_lists" in local:
            local["key_lists"] = local["key_lists"].narrow(-2, first, count)
    part = replace(call, **local)
    return part if call.dropout_p == 0.0 else _as_part_of_dropout(call, part, split)


def _as_part_of_dropout(call: AttentionCall, part: AttentionCall, split: Split) -> AttentionCall:
    """The part, packed, with the places of its sequences and heads in the whole's dropout."""
    if not any(split.cuts):
        return part
    first_head, _ = split.extent(HEADS, call.q.shape[-2])
    if part.origin is not None:
        stream, places = part.origin.split([1, 3], dim=1)
        return replace(part, origin=torch.cat([stream + first_head, places], 1))
    first, count = split.extent(BATCH, call.batch())
    sequence = torch.arange(first, first + count, dtype=torch.int32, device=part.q.device)
    part = part if part.is_packed() else part.packed()
    zero = torch.zeros_like(sequence)
    stream = sequence * call.q.shape[-2] + first_head
    return replace(part, origin=torch.stack([stream, zero, zero, _shift(part)], 1))


def _shift(part: AttentionCall) -> Tensor:
    """seqlen_k - seqlen_q of packed sequences, int32."""
    bounds_q, bounds_k = part.cu_seqlens_q, part.cu_seqlens_k
    assert bounds_q is not None and bounds_k is not None
    len_q, end_k = bounds_q.diff(), bounds_k.diff()
    if part.seqused_q is not None:
        len_q = len_q.minimum(part.seqused_q)
    if part.seqused_k is not None:
        end_k = end_k.minimum(part.seqused_k)
    return end_k - len_q if part.leftpad_k is None else end_k - part.leftpad_k - len_q


def _unpacked_rows(x: Tensor, batch: int) -> Tensor:
    """(heads, total) as (batch, heads, seqlen)."""
    return x.unflatten(1, (batch, -1) if batch > 0 else (0, 0)).transpose(0, 1).contiguous()


def _shared_rng_state(call: AttentionCall, split: Split) -> Tensor:
    """The rng_state of a forward: what the mesh's first rank draws."""
    like = cast(DTensor, call.q).to_local()
    if isinstance(like, FakeTensor) or type(like) is not Tensor:
        raise NotImplementedError(
            "dropout_p: must be 0 where torch.compile traces DTensors, as their ranks agree on a "
            f"seed, got {call.dropout_p}"
        )
    drawn = draw_rng_state(call.dropout_p, like.device)
    return distribute_tensor(drawn, split.mesh, [Replicate()] * split.mesh.ndim).to_local()


def _forward(names: Sequence[str]) -> Rule:
    """Of an operator whose arguments are these fields of a call."""

    def rule(func: Any, given: dict[str, Any]) -> tuple[Any, ...]:
        call = AttentionCall(**given)
        check_call(call)
        split = split_of(call)
        part = local_call(call, split)
        if call.dropout_p > 0.0 and call.rng_state is None:
            part = replace(part, rng_state=_shared_rng_state(call, split))
        found = Results(*func(*arguments_of(part, names)))
        return tuple(whole_results(call, split, _unpacked(call, part, found)))

    return rule


def _unpacked(call: AttentionCall, part: AttentionCall, found: Results) -> Results:
    """Out and softmax_lse of a part that is packed as the call has them."""
    if not part.is_packed() or call.is_packed():
        return found
    shape = (part.batch(), call.q.shape[1])
    if found.out_rounding is not None and call.returns_rounding():
        found = found._replace(out_rounding=found.out_rounding.unflatten(0, shape))
    return found._replace(
        out=found.out.unflatten(0, shape),
        softmax_lse=_unpacked_rows(found.softmax_lse, shape[0]),
    )


def whole_results(call: AttentionCall, split: Split, found: Results) -> Results:
    """The DTensors of which a rank has `found`; what is None stays None."""
    layout_of_q = layouts_of(call)["q"]
    layouts: dict[str, Layout] = {
        "out": layout_of_q,
        "softmax_lse": layout_of_rows(call),
        "S_dmask": (layout_of_q[0], HEADS, WHOLE, WHOLE),
        "rng_state": (WHOLE,),
        "out_rounding": layout_of_q,
        "max_logits": (WHOLE if call.is_packed() else layout_of_q[0], HEADS),
    }
    made = {}
    for name, (shape, _) in forms_of_results(call).items():
        if (x := getattr(found, name)) is not None:
            made[name] = split.result(x, (WHOLE,) if shape == (0,) else layouts[name], shape)
    return found._replace(**made)


def _refuse_written_scales(func: Any, given: dict[str, Any]) -> Any:
    raise NotImplementedError("quantize: must be None where tensors are DTensors, got 'token'")


class _DerivativePart:
    """A backward, or a derivative in a direction, on a rank's shards."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        def only(names: Any) -> dict[str, Any]:
            return {name: given[name] for name in names if name in given}

        self.call = AttentionCall(**only(OF_BACKWARD))
        incoming = Incoming(**({"dout": None, "dlse": None} | only(INCOMING_AND_TARGETS)))
        tangents = Tangents(**only(TANGENTS))
        check_call(self.call)
        if any(name in given for name in DIRECTIONS):
            check_tangents(self.call, tangents)
        check_incoming(self.call, incoming)
        if not is_known(incoming.out_rounding):
            incoming = replace(incoming, out_rounding=None)
        if not is_known(tangents.tout_rounding):
            tangents = replace(tangents, tout_rounding=None)
        every = vars(incoming) | vars(tangents)
        tensors = {name: x for name, x in every.items() if isinstance(x, Tensor)}
        self.split = split_of(self.call, tensors)
        self.part = local_call(self.call, self.split)
        self.is_repacked = self.part.is_packed() and not self.call.is_packed()
        local: dict[str, Any] = {name: self._local(name, x) for name, x in tensors.items()}
        self.incoming = replace(incoming, **{n: x for n, x in local.items() if n not in TANGENTS})
        self.tangents = replace(tangents, **{n: x for n, x in local.items() if n in TANGENTS})

    def _local(self, name: str, x: Tensor) -> Tensor:
        """As the part has it."""
        local = self.split.local(name, x)
        if name in ("tk", "tv"):
            first, count, _ = self.split.key_heads(self.call.k.shape[-2])
            local = local.narrow(-2, first, count)
        if not self.is_repacked:
            return local
        if name in ("dout", "out", "out_rounding", "tout", "tout_rounding", "tq", "tk", "tv"):
            return local.flatten(0, 1)
        if name in ("dlse", "softmax_lse", "tlse"):
            return local.transpose(0, 1).flatten(1).contiguous()
        return local

    def arguments(self, incoming: Incoming, names: Sequence[str]) -> tuple[Any, ...]:
        return *arguments_of(self.part, OF_BACKWARD), *arguments_of(incoming, names)

    def shards(self, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of what the part reads as those of the shards that this rank has."""
        if self.is_repacked:
            batch, call = self.part.batch(), self.call
            dq = dq.unflatten(0, (batch, call.q.shape[1]))
            dk, dv = (x.unflatten(0, (batch, call.k.shape[1])) for x in (dk, dv))
        first, count, held = self.split.key_heads(self.call.k.shape[-2])
        if count < held:
            dk, dv = (_among_heads(x, first, held) for x in (dk, dv))
        return dq, dk, dv

    def result(self, name: str, found: Tensor) -> DTensor:
        """The gradient of an argument; what is empty is not wanted."""
        argument = getattr(self.call, name)
        if argument is None or found.dim() != argument.dim():
            return self.split.result(found, (WHOLE,), found.shape)
        return self.split.whole(found, self.split.placements_of_gradient(name), argument.shape)


def _among_heads(found: Tensor, first: int, held: int) -> Tensor:
    """The gradient of `held` heads of keys, of which the call has read those from `first` on."""
    whole = found.new_zeros((*found.shape[:-2], held, found.shape[-1]))
    whole.narrow(-2, first, found.shape[-2]).copy_(found)
    return whole


def _gradients_rule(func: Any, given: dict[str, Any]) -> tuple[DTensor, ...]:
    """Of attention_gradients and, with tangents, of attention_hvp."""
    part = _DerivativePart(given)
    along = [name for name in TANGENTS if name in given]
    dq, dk, dv, *others = func(
        *part.arguments(part.incoming, INCOMING), *arguments_of(part.tangents, along)
    )
    found = (*part.shards(dq, dk, dv), *others)
    return tuple(map(part.result, DIFFERENTIABLE, found))


def _jvp_rule(func: Any, given: dict[str, Any]) -> tuple[Tensor | None, ...]:
    part = _DerivativePart(given)
    tout, tlse, rounding = func(
        *part.arguments(part.incoming, OF_FORWARD), *arguments_of(part.tangents, DIRECTIONS)
    )
    call = replace(part.call, keeps_rounding=is_known(part.incoming.out_rounding))
    found = _unpacked(call, part.part, Results(tout, tlse, None, None, rounding))
    whole = whole_results(call, part.split, found)
    return whole.out, whole.softmax_lse, whole.out_rounding


def _backward_rule(func: Any, given: dict[str, Any]) -> DTensor:
    """Where shards are not what the part reads, results are written by way of others."""
    backward = _DerivativePart(given)
    call, part, incoming = backward.call, backward.part, backward.incoming
    made: dict[str, Any] = {
        name: torch.empty_like(x, dtype=call.result_dtype())
        for name, x in zip(TARGETS, (part.q, part.k, part.v), strict=True)
    }
    writes = replace(incoming, **made, accumulate=False)
    softmax_d = func(*backward.arguments(writes, INCOMING_AND_TARGETS))
    for name, gradient in zip(TARGETS, backward.shards(*made.values()), strict=True):
        target = getattr(incoming, name)
        if target is not None:
            target.add_(gradient) if incoming.accumulate else target.copy_(gradient)
    if backward.is_repacked:
        softmax_d = _unpacked_rows(softmax_d, part.batch())
        softmax_d = pad(softmax_d, (0, call.softmax_d_shape()[2] - softmax_d.shape[2]))
    return backward.split.result(softmax_d, layout_of_rows(call), call.softmax_d_shape())


def _missing_rule(func: Any, given: dict[str, Any]) -> DTensor:
    gradient = given.pop("gradient")
    found = func(gradient.to_local(), **given)
    return DTensor.from_local(found, gradient.device_mesh, run_check=False)


# -- partial results -------------------------------------------------------------------------------

_PARTIALS = {
    "out_partial": (WHOLE, BATCH, ROWS, HEADS, WHOLE),
    "lse_partial": (WHOLE, BATCH, ROWS, HEADS),
    "out": (BATCH, ROWS, HEADS, WHOLE),
}


def _split_of_partials(given: dict[str, Any]) -> tuple[Split, dict[str, Tensor]]:
    tensors = {name: x for name, x in given.items() if isinstance(x, Tensor)}
    split = Split(tensors, _PARTIALS, "out_partial", {})
    return split, {name: split.local(name, x) for name, x in tensors.items()}


def _combine_rule(func: Any, given: dict[str, Any]) -> tuple[DTensor, DTensor]:
    combine.checked(**given)
    split, local = _split_of_partials(given)
    out, softmax_lse = func(*local.values(), given["out_dtype"])
    shape = given["out_partial"].shape[1:]
    return (
        split.result(out, _PARTIALS["out"], shape),
        split.result(softmax_lse, _PARTIALS["out"][:-1], shape[:-1]),
    )


def _combine_out_rule(func: Any, given: dict[str, Any]) -> DTensor:
    combine.checked_out(**given)
    split, local = _split_of_partials(given)
    softmax_lse = func(*local.values())
    return split.result(softmax_lse, _PARTIALS["out"][:-1], given["out"].shape[:-1])


# -- registration ----------------------------------------------------------------------------------


def register() -> None:
    """Gives every operator its rule."""
    rules: dict[Any, Rule] = {
        attention.attention_op: _forward(READ),
        attention._append_op: _forward(FIELDS),
        attention._quantized_append_op: _refuse_written_scales,
        attention.gradients_op: _gradients_rule,
        attention._backward_op: _backward_rule,
        attention._missing_gradient_op: _missing_rule,
        second_order.jvp_op: _jvp_rule,
        second_order.hvp_op: _gradients_rule,
        combine._combine_op: _combine_rule,
        combine._combine_out_op: _combine_out_rule,
    }
    for op, rule in rules.items():
        op.register_torch_dispatch(DTensor, _dispatching(rule))


def _dispatching(rule: Rule) -> Callable[..., Any]:
    def dispatch(cls: Any, func: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
        names = (argument.name for argument in func._schema.arguments)
        with torch.no_grad():
            return rule(func, dict(zip(names, args, strict=False)) | (kwargs or {}))

    return dispatch
