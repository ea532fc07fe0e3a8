"""Interprets the rules of which arguments go together (rules.py).

A fact asks whether something is given, on, or of a dtype. It compares no sizes, so that a compiler
may trace it.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..rules import KNOWN, NUMBERS, Rules

Broken = tuple[type[Exception], str]
_ABSENT = object()


def check_rules(rules: tuple[Rules, ...], names: Any, *described: Any) -> None:
    """Raise for the first rule that a call, or what comes with one and the call, breaks; `names`:
    what errors call the arguments, a call.Names.
    """
    if (broken := first_broken(rules, names, *described)) is not None:
        kind, words = broken
        raise kind(words)


def first_broken(rules: tuple[Rules, ...], names: Any, *described: Any) -> Broken | None:
    """The exception of the first rule that does not hold, and its words."""
    for each in rules:
        if _holds(each.fact, described) and (broken := _broken(each, names, described)) is not None:
            return broken
    return None


def _broken(rules: Rules, names: Any, described: tuple[Any, ...]) -> Broken | None:
    if rules.refusal:
        return NotImplementedError, rules.refusal.format_map(names._asdict())
    for arguments, kind in ((rules.absent, ValueError), (rules.refused, NotImplementedError)):
        for name in arguments:
            value = _value(name, described)
            if _is_set(name, value):
                return kind, _words(rules, names, name, *_must_and_got(name, value))
    for name in rules.given:
        if _value(name, described) is None:
            return ValueError, _words(rules, names, name, "given", "None")
    return None


def _holds(fact: str, described: tuple[Any, ...]) -> bool:
    name = fact.removeprefix("not ")
    return _is_set(name, _value(name, described)) == (name == fact)


def _value(name: str, described: tuple[Any, ...]) -> Any:
    """Of a field, or of a function, of the description that has it."""
    for each in described:
        value = getattr(each, name, _ABSENT)
        if value is not _ABSENT:
            return value() if callable(value) else value
    raise AttributeError(name)


def _is_set(name: str, value: Any) -> bool:
    if value is None or value is False:
        return False
    return name not in NUMBERS or bool(value > 0.0)


def _must_and_got(name: str, value: Any) -> tuple[str, str]:
    """What an argument that must be absent must be, and what it is."""
    if name in KNOWN:
        return KNOWN[name].absent, KNOWN[name].given
    if name in NUMBERS:
        return "0", str(value)
    if value is True:
        return "False", "True"
    return "None", "a tensor" if isinstance(value, Tensor) else str(value)


def _words(rules: Rules, names: Any, name: str, must: str, got: str) -> str:
    known = KNOWN[name].name if name in KNOWN else getattr(names, name, name)
    return f"{known}: must be {must} {rules.where.format_map(names._asdict())}, got {got}"
