"""Writes what README and docs/performance.md say of speed, from the files in benchmarks/results.

    python -m benchmarks.core.performance
    python -m benchmarks.core.performance --check  # status 1 where texts or figures are others
    python -m benchmarks.core.performance --figure docs/speed_h200.svg

A text has a line "generated: NAME" and a line "end", both comments; what is between them is one of
performance_tables.TEXTS. A figure's name is what it shows, one of FIGURES, and its card.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from benchmarks.core import accuracy_figure, speed_figure
from benchmarks.core.performance_tables import TEXTS
from benchmarks.core.result_files import CARDS

ROOT = Path(__file__).resolve().parents[2]
FILES = ("README.md", "docs/performance.md", "benchmarks/results/README.md")
FIGURES = {"speed": speed_figure, "accuracy": accuracy_figure}
BLOCK = re.compile(r"<!-- generated: ([^>]*) -->.*?<!-- end -->", re.DOTALL)


def written(text: str) -> str:
    """The text with its tables as the results give them."""
    return BLOCK.sub(block, text)


def block(found: re.Match[str]) -> str:
    name = found[1]
    if name not in TEXTS:
        raise SystemExit(f"generated: expected one of {', '.join(TEXTS)}, got {name!r}")
    return f"<!-- generated: {name} -->\n\n{TEXTS[name]()}\n\n<!-- end -->"


def update() -> list[Path]:
    """Writes the texts that are not what the results give, and returns them."""
    changed = []
    for path in map(ROOT.joinpath, FILES):
        text = path.read_text()
        if written(text) != text:
            path.write_text(written(text))
            changed.append(path)
    return changed


def stale() -> list[Path]:
    """Texts and figures that are not what the results give."""
    texts = [ROOT / file for file in FILES]
    old = [path for path in texts if written(path.read_text()) != path.read_text()]
    return old + [path for path in figures() if not shows_results(path)]


def figures() -> list[Path]:
    return [path for name in FIGURES for path in sorted(ROOT.glob(f"docs/{name}_*.svg"))]


def shows_results(figure: Path) -> bool:
    """Whether the file was drawn of the results."""
    module, card = kind_of(figure)
    digest = speed_figure.digest(module.lines_of(card))
    return f"<dc:source>{digest}</dc:source>" in figure.read_text()


def kind_of(figure: Path) -> tuple[ModuleType, str]:
    """What draws it, and its card."""
    name, _, card = figure.stem.rpartition("_")
    if card not in CARDS or name not in FIGURES:
        names = ", ".join(f"{name}_{card}.svg" for name in FIGURES for card in CARDS)
        raise SystemExit(f"--figure: expected a name such as {names}, got {figure.name}")
    return FIGURES[name], card


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing")
    parser.add_argument("--figure", type=Path, metavar="SVG", help="draw this and write no text")
    options = parser.parse_args(arguments)
    if options.figure is not None:
        module, card = kind_of(options.figure)
        module.draw(card, options.figure)
        return 0
    paths = stale() if options.check else update()
    for path in paths:
        what = "not what the results give" if options.check else "written"
        print(f"{path.relative_to(ROOT)}: {what}")
    return 1 if options.check and paths else 0


if __name__ == "__main__":
    sys.exit(main())
