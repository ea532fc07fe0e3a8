"""Interprets the rules of which arguments go together (rules.py).

A fact asks whether something is given, on, or of a dtype. It compares no sizes, so that a compiler
may trace it.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..rules import KNOWN, NUMBERS, Rules

Broken = tuple[type[Exception], str]
_ELSEWHERE = object()


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
        fact = each.fact.removeprefix("not ")
        if _is_set(fact, described) == (fact == each.fact):
            if each.refusal:
                return NotImplementedError, each.refusal.format_map(names._asdict())
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


def _words(rules: Rules, names: Any, name: str, must: str, got: str) -> str:
    known = KNOWN[name].name if name in KNOWN else getattr(names, name, name)
    return f"{known}: must be {must} {rules.where.format_map(names._asdict())}, got {got}"
