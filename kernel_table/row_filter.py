"""Choosing rows of the kernel table for a partial build.

A filter is ``;``-separated clauses and a row is built when any clause matches. A clause is a comma
list of ``field=value|value`` patterns that must all match:
``pass=forward,head_dim=64|128;pass=backward,dtype=bf16``.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from enum import Enum, Flag

from kernel_table.all_rows import ALL_ROWS
from kernel_table.row import KernelRow

VARIABLE = "FLASH_ATTN_CUDA_ROWS"


class RowFilterError(ValueError):
    """A filter that cannot be read, or that chooses nothing."""


@functools.cache
def _field_texts(row: KernelRow) -> dict[str, str]:
    """A row as the filter sees it: field name to text. An empty ``variant`` is ``plain``."""
    texts = {
        name: value.value if isinstance(value, Enum) else str(value).lower()
        for name, value in row.config().items()
        if not isinstance(value, Flag)
    }
    return {"pass": row.kernel_pass.name, "variant": row.variant or "plain", **texts}


def _parse_clause(clause: str, rows: Sequence[KernelRow]) -> dict[str, set[str]]:
    patterns: dict[str, set[str]] = {}
    texts = [_field_texts(row) for row in rows]
    for pattern in clause.split(","):
        name, equals, values = (part.strip() for part in pattern.partition("="))
        if not equals or not values:
            raise RowFilterError(
                f"{VARIABLE}: expected field=value|value, got {pattern.strip()!r} in {clause!r}"
            )
        known = {text[name] for text in texts if name in text}
        if not known:
            choices = sorted({field for text in texts for field in text})
            raise RowFilterError(f"{VARIABLE}: no field {name!r}; rows have {', '.join(choices)}")
        wanted = {value.strip() for value in values.split("|")}
        if unknown := sorted(wanted - known):
            choices = sorted(known)
            raise RowFilterError(
                f"{VARIABLE}: no row has {name}={unknown[0]}; there are {', '.join(choices)}"
            )
        if name in patterns:
            raise RowFilterError(
                f"{VARIABLE}: {name} stands twice in {clause!r}; its values go into one pattern, "
                f"{name}={'|'.join(sorted(patterns[name] | wanted))}"
            )
        patterns[name] = wanted
    return patterns


def select_rows(row_filter: str, rows: Sequence[KernelRow] = ALL_ROWS) -> list[KernelRow]:
    """The rows that ``row_filter`` chooses, in table order; all of them for an empty filter.

    Raises RowFilterError, naming the part at fault, for an unknown field or value and for a clause
    that matches no row.
    """
    if not row_filter.strip():
        return list(rows)
    clauses = [clause for part in row_filter.split(";") if (clause := part.strip())]
    if not clauses:
        raise RowFilterError(f"{VARIABLE}: expected at least one clause, got {row_filter!r}")
    chosen: set[str] = set()
    for clause in clauses:
        patterns = _parse_clause(clause, rows)
        matching = {
            row.name
            for row in rows
            if all(_field_texts(row).get(name) in wanted for name, wanted in patterns.items())
        }
        if not matching:
            raise RowFilterError(f"{VARIABLE}: no row of the kernel table matches {clause!r}")
        chosen |= matching
    return [row for row in rows if row.name in chosen]
