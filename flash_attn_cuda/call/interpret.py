"""Interprets the rules of rules.py, and of numbers' ranges (fields.py).

A fact asks whether something is given, on, or of a dtype. It compares no sizes, so that a compiler
may trace it.
"""

from __future__ import annotations

from typing import Any

from torch import SymFloat, SymInt, Tensor
from torch.compiler import is_compiling

from .rules import KNOWN, LAYOUTS, NUMBERS, Must, Rules, range_in_words
from .tensors import MAX_FLOAT32, MAX_INT64, MIN_FLOAT32

Broken = tuple[type[Exception], str]
_ELSEWHERE = object()


def check_rules(rules: tuple[Rules, ...], names: Any, *described: Any) -> None:
    """Raise for the first rule that a call, or what comes with one and the call, breaks; `names`:
    what errors call the arguments, a call.Names.
    """
    if (broken := first_broken(rules, names, *described)) is not None:
        kind, words = broken
        raise kind(words)


def check_holds(rules: tuple[Must, ...], names: Any, call: Any) -> None:
    """Raise for the first rule of sizes and dtypes that a call breaks."""
    for each in rules:
        if _is_true(each.where, (call,)) and not each.holds(call):
            known = getattr(names, each.argument, each.argument)
            raise each.kind(f"{known}: {_written(each.words, names, call)}")


def layout_of(name: str, call: Any) -> str:
    """The dimensions that q, k or v must have."""
    *choices, (_, otherwise) = LAYOUTS[name]
    for fact, layout in choices:
        if _is_true(fact, (call,)):
            return layout
    return otherwise


def check_in_range(name: str, value: Any, said: Any) -> None:
    """Raise unless a number is None or what its field's Argument says.

    What a compiler holds as symbols, or may, is left alone: a comparison would bind it to this
    call's numbers. dropout_p and softcap choose what is computed, and are bound.
    """
    is_symbol = isinstance(value, SymInt) or (is_compiling() and isinstance(value, int))
    is_scale = isinstance(value, SymFloat) and said.in_float32 == "finite"
    if value is None or is_symbol or is_scale:
        return
    if not _is_in_range(value, said):
        raise ValueError(f"{name}: must be {range_in_words(said._asdict())}, got {value}")
    if said.at_least is not None and value > MAX_INT64:  # more than operators take
        raise ValueError(f"{name}: must be at most {MAX_INT64}, got {value}")


def _is_in_range(value: float, said: Any) -> bool:
    if said.in_float32 == "finite":
        return abs(value) <= MAX_FLOAT32
    if said.in_float32 == "normal":
        return value <= 0.0 or MIN_FLOAT32 <= value <= MAX_FLOAT32
    is_below = said.below is None or value < said.below
    return said.at_least <= value and is_below and (said.at_most is None or value <= said.at_most)


def first_broken(rules: tuple[Rules, ...], names: Any, *described: Any) -> Broken | None:
    """The exception of the first rule that does not hold, and its words."""
    for each in rules:
        if _is_true(each.fact, described):
            if each.refusal:
                return NotImplementedError, _written(each.refusal, names, *described)
            if (broken := _broken(each, names, described)) is not None:
                return broken
    return None


def _broken(rules: Rules, names: Any, described: tuple[Any, ...]) -> Broken | None:
    for name in rules.absent:
        if _is_set(name, described):
            return ValueError, _words(rules, names, name, *_must_and_got(name, described))
    for name in rules.refused:
        if _is_set(name, described):
            return NotImplementedError, _words(rules, names, name, *_must_and_got(name, described))
    for name in rules.given:
        if not _is_set(name, described):
            return ValueError, _words(rules, names, name, "given", "None")
    return None


def _is_true(fact: str, described: tuple[Any, ...]) -> bool:
    """Whether a fact, maybe with "not" before it, holds; "": always."""
    if not fact:
        return True
    # A compiler's symbol for a bool, as of dropout_p, is branched on and not compared. A slice
    # calls no function: this is asked some fifty times a check.
    is_negated = fact[:4] == "not "
    is_set = _is_set(fact[4:] if is_negated else fact, described)
    return (not is_set) if is_negated else is_set


def _is_set(name: str, described: tuple[Any, ...]) -> bool:
    """Whether a field of one of the descriptions is given, on or above 0, or a function says so."""
    for each in described:
        value: Any = getattr(each, name, _ELSEWHERE)
        if value is None or value is False:
            return False
        if value is not _ELSEWHERE:
            return value() if callable(value) else name not in NUMBERS or bool(value > 0.0)
    raise AttributeError(name)


def _must_and_got(name: str, described: tuple[Any, ...]) -> tuple[str, str]:
    """What an argument that must be absent must be, and what it is."""
    if name in KNOWN:
        return KNOWN[name].absent, KNOWN[name].given
    value = next(getattr(each, name) for each in described if hasattr(each, name))
    if name in NUMBERS:
        return "0", str(value)
    if value is True:
        return "False", "True"
    return "None", "a tensor" if isinstance(value, Tensor) else str(value)


def _written(words: str, names: Any, *described: Any) -> str:
    """Words with the names, sizes and dtypes that they have places for (rules.Must)."""
    text, *others = words.split("{")  # by means that a compiler traces
    for each in others:
        place, _, after = each.partition("}")
        text += _told(place, names, described) + after
    return text


def _told(place: str, names: Any, described: tuple[Any, ...]) -> str:
    name, _, what = place.partition(".")
    if not what and hasattr(names, name):
        return str(getattr(names, name))
    value = next(getattr(each, name) for each in described if hasattr(each, name))
    if what == "strides":
        return str(tuple(value.stride()))
    if what == "dtype":
        return str(value.dtype)
    if not what.startswith("shape"):
        return str(value() if callable(value) else value)
    shape, index = tuple(value.shape), what.removeprefix("shape").strip("[]")
    if not index:
        return str(shape)
    return str(shape[:-1] if index == ":-1" else shape[int(index)])


def _words(rules: Rules, names: Any, name: str, must: str, got: str) -> str:
    known = KNOWN[name].name if name in KNOWN else getattr(names, name, name)
    return f"{known}: must be {must} {rules.where.format_map(names._asdict())}, got {got}"
