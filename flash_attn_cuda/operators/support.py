"""What the custom operators share: schemas, calls of the extension, random numbers, vmap.

An operator's arguments are the fields of dataclasses, in their order: the schema is made of them,
and an implementation reads its arguments through them.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Collection, Sequence
from types import NoneType
from typing import Any

import torch
from torch import Tensor
from torch._C import _functorch

from ..call.functorch import is_functorch_active, is_mapped, is_watched
from ..installed import build_info
from ..installed.build_info import PACKAGE

ops: Any = getattr(torch.ops, PACKAGE)

Tensors2 = tuple[Tensor, Tensor]
Tensors3 = tuple[Tensor, Tensor, Tensor]

# A dropout's seed comes from torch's generator: whoever recomputes a call must restore it first.
# custom_op knows tags since torch 2.7.
_HAS_TAGS = "tags" in inspect.signature(torch.library.custom_op).parameters
RANDOM: dict[str, Any] = {"tags": (torch.Tag.nondeterministic_seeded,)} if _HAS_TAGS else {}

# Of what a call has: no subclass of a tensor that would want to see an operator.
PLAIN = frozenset((Tensor, torch.nn.Parameter, NoneType, float, int, bool))

_SCHEMA_TYPES = {
    "Tensor": "Tensor",
    "Tensor | None": "Tensor?",
    "int": "SymInt",
    "int | None": "SymInt?",
    "float": "float",
    "float | None": "float?",
    "bool": "bool",
}


def define(
    name: str,
    schema: str,
    *,
    check: Callable[..., tuple[Any, ...]],
    cpu: Callable[..., Any],
    cuda: Callable[..., Any],
    fake: Callable[..., Any],
    mutated: Sequence[str] = (),
    **settings: Any,
) -> Any:
    """The operator `name` of the package. `check` makes of its arguments what the implementations
    take, of which `fake` is a compiler's; `mutated` names the arguments that it writes into.
    """

    def checked(run: Callable[..., Any]) -> Callable[..., Any]:
        def implementation(*args: Any) -> Any:
            found = run(*check(*args))
            return tuple(found) if isinstance(found, tuple) else found

        return implementation

    op = torch.library.custom_op(
        f"{PACKAGE}::{name}",
        checked(cpu),
        mutates_args=mutated,
        device_types="cpu",
        schema=schema,
        **settings,
    )
    op.register_kernel("cuda")(checked(cuda))
    op.register_fake(checked(fake))
    return op


def without_dispatcher(
    check: Callable[..., tuple[Any, ...]],
    make: Callable[..., tuple[Any, ...]],
    cuda: Callable[..., Any],
) -> Callable[..., Any]:
    """An operator's implementation for arguments of which is_plain_cuda: a tenth of a millisecond
    less. The extension checks them; `check` has the words of what it refuses.
    """

    def implementation(*args: Any) -> Any:
        try:
            return cuda(*make(*args))
        except Exception:
            check(*args)
            raise

    return implementation


def is_plain_cuda(args: Sequence[Any]) -> bool:
    """Whether nothing but autograd would see an operator of these arguments, and all tensors are
    ones of memory: those of is_grads_batched are not.
    """
    return (
        not is_watched()
        and build_info.extension is not None
        and args[0].is_cuda
        and PLAIN.issuperset(map(type, args))
        and not any(isinstance(x, Tensor) and _functorch.is_legacy_batchedtensor(x) for x in args)
    )


def schema_of(
    returns: str | Sequence[str],
    *parts: tuple[type, Sequence[str]],
    mutated: Collection[str] = (),
) -> str:
    """The schema of an operator whose arguments are these fields of these dataclasses, in order.

    `returns` is the schema's list of results, or names of tensors.
    """
    if not isinstance(returns, str):
        returns = ", ".join(f"Tensor {name}" for name in returns)
    aliases = dict(zip(mutated, "abcd", strict=False))
    arguments = []
    for described, names in parts:
        types = {field.name: str(field.type) for field in dataclasses.fields(described)}
        for name in names:
            kind = _SCHEMA_TYPES[types[name]]
            if name in aliases:
                kind = kind.replace("Tensor", f"Tensor({aliases[name]}!)")
            arguments.append(f"{kind} {name}")
    return f"({', '.join(arguments)}) -> ({returns})"


def arguments_of(call: Any, names: Sequence[str]) -> tuple[Any, ...]:
    """These fields of a call in order: an operator's arguments. dataclasses.astuple would copy the
    tensors.
    """
    return tuple([getattr(call, name) for name in names])


def call_extension(function: str, device: torch.device, *arguments: Any) -> Any:
    """Call a function of the extension; where it cannot run on the device, say why."""
    try:
        return getattr(build_info.extension, function)(*arguments)
    except (AttributeError, RuntimeError) as error:
        build_info.require_cuda(device, error)
        raise


def draw_rng_state(dropout_p: float, device: torch.device | str = "cpu") -> Tensor:
    """(seed, offset) of a call, int64, from the device's default generator; empty without dropout.
    The extension draws its own.
    """
    if dropout_p == 0.0:
        return torch.empty(0, dtype=torch.int64, device=device)
    rng_state = torch.randint(0, 2**62, (2,), dtype=torch.int64, device=device)
    rng_state[1] = 0
    return rng_state


def check_randomness(dropout_p: float, randomness: str, is_mapped: bool = True) -> None:
    """Raise unless a call with dropout under torch.vmap gets the `randomness` that it asks for.

    `is_mapped`: whether any of its tensors is.
    """
    if dropout_p == 0.0 or randomness == ("different" if is_mapped else "same"):
        return
    if randomness == "error":
        raise RuntimeError(
            "dropout_p: under torch.vmap, dropout needs randomness='different', or 'same' where no "
            "tensor of the call is mapped, got randomness='error'"
        )
    which = "a" if is_mapped else "no"
    raise NotImplementedError(
        f"dropout_p: under torch.vmap with randomness={randomness!r}, must be 0 where {which} "
        f"tensor of the call is mapped, got {dropout_p}"
    )


def check_vmap_randomness(dropout_p: float, *tensors: Any) -> None:
    """check_randomness of every torch.vmap around a call, those that it does not notice included,
    as none of its tensors is mapped there.
    """
    if dropout_p == 0.0 or not is_functorch_active():
        return
    for interpreter in _functorch.get_interpreter_stack():
        if interpreter.key() == _functorch.TransformType.Vmap:
            level = interpreter.level()
            randomness = _functorch.CVmapInterpreterPtr(interpreter).randomness()
            mapped = any(isinstance(x, Tensor) and is_mapped(x, level) for x in tensors)
            check_randomness(dropout_p, randomness.name.lower(), mapped)


def one_by_one(
    op: Callable[..., Any], size: int, in_dims: tuple[Any, ...], args: tuple[Any, ...]
) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """What a rule for torch.vmap returns where it calls an operator for one entry after the other,
    so that a dropout is another one for each.
    """
    if size == 0:
        raise NotImplementedError("torch.vmap: must map over at least one entry, got 0")
    pairs = list(zip(args, in_dims, strict=True))
    each = [
        op(*(x if dim is None else x.select(dim, index) for x, dim in pairs))
        for index in range(size)
    ]
    results = tuple(torch.stack(x) for x in zip(*each, strict=True))
    return results, (0,) * len(results)
