"""Tables in Markdown, without the spaces that are for those who edit it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def markdown_table(
    header: Sequence[str], lines: Iterable[Sequence[str]], words: Sequence[str] | None = None
) -> str:
    """words: headers of columns that hold words, by default the first; others hold numbers."""
    words = header[:1] if words is None else words
    rules = ["---" if name in words else "---:" for name in header]
    return "\n".join(
        f"|{'|'.join(cell or ' ' for cell in line)}|" for line in (header, rules, *lines)
    )
