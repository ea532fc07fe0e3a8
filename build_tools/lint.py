"""Layout and lint of the whole repository: ruff and mypy for Python, clang-format for C++ and CUDA.

``python -m build_tools.lint`` checks, ``--fix`` rewrites. Versions are pinned in
lint_requirements.txt, because each release of a formatter lays code out a little differently.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
CPP_FOLDERS = ("csrc", "tests")
CPP_SUFFIXES = (".h", ".cpp", ".cu")


def cpp_files() -> list[str]:
    files = (path for folder in CPP_FOLDERS for path in sorted((REPO / folder).rglob("*")))
    return [str(path.relative_to(REPO)) for path in files if path.suffix in CPP_SUFFIXES]


def commands(fix: bool) -> list[list[str]]:
    """What to run from the repository's root, all of it, so that one run shows all there is."""
    scripts = Path(sysconfig.get_path("scripts"))
    ruff, clang_format = str(scripts / "ruff"), str(scripts / "clang-format")
    if fix:
        python = [[ruff, "check", "--fix", "."], [ruff, "format", "."]]
        return [*python, [clang_format, "-i", *cpp_files()]]
    python = [[ruff, "format", "--check", "."], [ruff, "check", "."]]
    cpp = [clang_format, "--dry-run", "--Werror", *cpp_files()]
    return [*python, cpp, [sys.executable, "-m", "mypy"]]


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m build_tools.lint", description=__doc__)
    parser.add_argument("--fix", action="store_true", help="rewrite files instead of checking them")
    fix = parser.parse_args(arguments).fix
    failed = [c for c in commands(fix) if subprocess.run(c, cwd=REPO).returncode != 0]
    for command in failed:
        print(f"lint: {' '.join(command[:4])} found something", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
