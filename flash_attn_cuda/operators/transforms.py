"""Operators in forward mode and under the transforms of torch.func, which custom_op does not know.

A jvp that is the innermost transform takes dual tensors apart and runs the operator and its formula
one level below. Other transforms, and forward mode without them, see an autograd.Function. Tensors
alone are its operands, as each costs host time several times over; torch.func unwraps no other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._C import _functorch, _is_fwd_grad_enabled
from torch._compile import _disable_dynamo
from torch._functorch.pyfunctorch import JvpInterpreter
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from ..call.functorch import is_functorch_active
from .support import is_plain_cuda

_JVP, _VMAP = _functorch.TransformType.Jvp, _functorch.TransformType.Vmap
Named = Mapping[str, Any]


@dataclass(frozen=True)
class Formulas:
    """Of an operator of these arguments. `keep` says what its derivatives read, by name, of named
    arguments and of results; `save` and `gradients` are as an autograd.Function's, of all
    arguments; `tangents` makes those of results of what is kept and of named tangents.
    """

    names: Sequence[str]
    keep: Callable[[Named, Sequence[Tensor]], Named]
    save: Callable[[Any, Sequence[Any], Sequence[Tensor]], None]
    gradients: Callable[..., Sequence[Tensor | None]]
    tangents: Callable[[Named, Named], Sequence[Tensor | None]]


@dataclass(frozen=True, eq=False)
class Arguments:
    """All of an operator but for tensors, whose places these are."""

    others: list[Any]
    places: list[int]

    def with_tensors(self, tensors: Iterable[Tensor]) -> list[Any]:
        return self.spread(tensors, self.others)

    def spread(self, of_tensors: Iterable[Any], others: list[Any]) -> list[Any]:
        found = others.copy()
        for place, x in zip(self.places, of_tensors, strict=True):
            found[place] = x
        return found


def wants_functions() -> bool:
    """Whether anybody asks for what custom_op does not have."""
    # A compiler does not trace the second question.
    is_dual = forward_ad._current_level >= 0 and (is_compiling() or _is_fwd_grad_enabled())
    return is_dual or is_functorch_active()


def is_wanted(ctx: Any, names: Sequence[str]) -> dict[str, bool]:
    """By an operator's arguments, whether the gradient of each is wanted; ctx is a custom_op's or
    that of for_transforms.
    """
    arguments: Arguments | None = getattr(ctx, "arguments", None)
    needed = ctx.needs_input_grad
    if arguments is not None:
        needed = arguments.spread(needed[1:], [False] * len(names))
    return dict(zip(names, needed, strict=False))  # a custom_op's has one more at times


def for_transforms(
    op: Callable[..., Any], on_cuda: Callable[..., Any], formulas: Formulas
) -> Callable[..., Any]:
    """`op` in any mode and under any transform; takes all arguments by position. `on_cuda` is its
    implementation for where nothing else would see the operator.
    """

    def apply(*args: Any) -> Any:
        return (on_cuda if is_plain_cuda(args) else op)(*args)

    in_eager = _as_function(apply, formulas)
    # What a compiler traced of it for tensors, torch 2.15 would run for dual tensors too.
    untraced = _disable_dynamo(in_eager)

    @_disable_dynamo  # which would trace operators, and those drop tangents without a word
    def attention_under_transforms(*args: Any) -> Any:
        return run(*args)

    def run(*args: Any) -> Any:
        if not wants_functions():
            return (in_eager if _is_recorded(args) else apply)(*args)
        if is_compiling():
            if not _drops_no_tangent():
                return attention_under_transforms(*args)
            return _of_duals(op, formulas, args)
        interpreter = _functorch.peek_interpreter_stack()
        if interpreter is None or interpreter.key() != _JVP or not _is_fwd_grad_enabled():
            return untraced(*args)
        return _one_level_below(run, formulas, args, interpreter)

    return run


def _is_recorded(args: Sequence[Any]) -> bool:
    """Whether eager autograd makes a graph of it, for which custom_op takes a third of a ms."""
    if is_compiling() or not torch.is_grad_enabled():
        return False
    # A list, as a generator is a call for each argument.
    return bool([x for x in args if isinstance(x, Tensor) and x.requires_grad])


def _drops_no_tangent() -> bool:
    """Whether operators themselves are right below the innermost transform, which is a jvp."""
    stack = _functorch.get_interpreter_stack() or []
    return [x.key() for x in stack[-1:]] == [_JVP] and all(x.key() == _VMAP for x in stack[:-1])


# As by torch.compiler.assume_constant_result, which imports the compiler.
_drops_no_tangent._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _of_duals(op: Callable[..., Any], formulas: Formulas, args: Sequence[Any]) -> tuple[Any, ...]:
    pairs = [forward_ad.unpack_dual(x) if isinstance(x, Tensor) else (x, None) for x in args]
    given, moved = zip(*pairs, strict=True)
    return _with_tangents(*_both(op, formulas, given, moved))


def _one_level_below(
    op: Callable[..., Any], formulas: Formulas, args: Sequence[Any], interpreter: Any
) -> tuple[Any, ...]:
    level = interpreter.level()

    def unwrapped(x: Any) -> tuple[Any, Tensor | None]:
        if not isinstance(x, Tensor):
            return x, None
        x = _functorch.unwrap_if_dead(x)
        if _functorch.maybe_get_level(x) != level:
            return x, None
        tangent = forward_ad.unpack_dual(x).tangent
        if tangent is not None:
            tangent = _functorch._unwrap_for_grad(tangent, level)
        return _functorch._unwrap_for_grad(x, level), tangent

    given, moved = zip(*map(unwrapped, args), strict=True)
    with JvpInterpreter(interpreter).lower():
        # Nothing is dual where no transform is left: levels of forward mode do not nest.
        is_last = not _functorch.peek_interpreter_stack()
        with forward_ad._set_fwd_grad_enabled(False) if is_last else nullcontext():
            found = _both(op, formulas, given, moved)
    return _with_tangents(*found)


def _both(
    op: Callable[..., Any], formulas: Formulas, given: Sequence[Any], moved: Sequence[Any]
) -> tuple[Sequence[Tensor], Sequence[Tensor | None]]:
    """(results, their tangents) of arguments and theirs."""
    found = op(*given)
    if all(x is None for x in moved):
        return found, (None,) * len(found)
    names = formulas.names
    kept = formulas.keep(dict(zip(names, given, strict=True)), found)
    return found, formulas.tangents(kept, dict(zip(names, moved, strict=True)))


def _with_tangents(
    results: Sequence[Tensor], tangents: Sequence[Tensor | None]
) -> tuple[Tensor, ...]:
    pairs = zip(results, tangents, strict=True)
    return tuple(x if t is None else forward_ad.make_dual(x, t) for x, t in pairs)


def _as_function(op: Callable[..., Any], formulas: Formulas) -> Callable[..., Any]:
    class Function(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(arguments: Arguments, *tensors: Tensor) -> Any:
            return op(*arguments.with_tensors(tensors))

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            ctx.arguments = inputs[0]
            formulas.save(ctx, ctx.arguments.with_tensors(inputs[1:]), output)

        @staticmethod
        def backward(ctx: Any, *of_results: Any) -> Any:
            found = formulas.gradients(ctx, *of_results)
            return None, *(found[place] for place in ctx.arguments.places)

        @staticmethod
        def jvp(ctx: Any, _: None, *tangents: Any) -> Any:
            names = formulas.names
            moved = ctx.arguments.spread(tangents, [None] * len(names))
            return formulas.tangents(saved(ctx), dict(zip(names, moved, strict=True)))

    def apply(*args: Any) -> Any:
        places = [place for place, x in enumerate(args) if isinstance(x, Tensor)]
        others = [None if isinstance(x, Tensor) else x for x in args]
        return Function.apply(Arguments(others, places), *(args[place] for place in places))

    return apply


# -- what formulas keep --------------------------------------------------------------------------


def save(ctx: Any, given: Named) -> None:
    """The given tensors and others by name."""
    ctx.names = [name for name, x in given.items() if isinstance(x, Tensor)]
    ctx.others = {name: x for name, x in given.items() if not isinstance(x, Tensor)}
    tensors = [given[name] for name in ctx.names]
    ctx.save_for_backward(*tensors)
    if hasattr(ctx, "arguments"):
        ctx.save_for_forward(*tensors)


def saved(ctx: Any) -> dict[str, Any]:
    return {**ctx.others, **dict(zip(ctx.names, ctx.saved_tensors, strict=True))}
