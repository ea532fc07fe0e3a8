"""How far one argument reaches, and how much stands around the kernels: counts of the sources.

python -m build_tools.report.reach [WORD...]

Tests, docs, benchmarks and examples do not count: they are to name every argument.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from build_tools.compile.toolchain import REPO

FOLDERS = ("flash_attn_cuda", "csrc", "build_tools", "kernel_table")
SUFFIXES = (".py", ".cpp", ".cu", ".h")
WORDS = ("sink", "softcap", "leftpad_k")
# Around the package's own functions: they pass arguments on.
AROUND = ("integrations", "context_parallel")
AROUND_TEXT = ", ".join(AROUND)
# What stands between a caller and a backend, in the package.
INTERFACE = (
    *("call", "functions", "report/explain.py"),
    *("operators/attention.py", "operators/combine.py", "operators/support.py"),
)
MANY = 10  # parameters
LAUNCHERS = ("csrc/sm90/forward/launch.h", "csrc/sm90/backward/launch.h")


def sources(*folders: str) -> list[Path]:
    """The code in these folders, but for this file, which names what it counts."""
    found = (path for folder in folders for path in sorted((REPO / folder).rglob("*")))
    return [path for path in found if path.suffix in SUFFIXES and path != Path(__file__)]


def naming(word: str, paths: Iterable[Path]) -> tuple[int, int]:
    """In how many files and lines the word stands by itself, in capitals or not."""
    pattern = re.compile(rf"\b{re.escape(word)}\b", re.IGNORECASE)
    lines = [sum(bool(pattern.search(x)) for x in path.read_text().splitlines()) for path in paths]
    return sum(count > 0 for count in lines), sum(lines)


def length(paths: Iterable[Path]) -> int:
    return sum(len(path.read_text().splitlines()) for path in paths)


def headers_behind(header: Path) -> set[Path]:
    """The project's headers that it includes, and those that they include."""
    found: set[Path] = set()
    waiting = [header]
    while waiting:
        text = waiting.pop().read_text()
        named = (REPO / "csrc" / name for name in re.findall(r'#include "([^"]+)"', text))
        new = {path for path in named if path.is_file()} - found
        found |= new
        waiting += new
    return found


def entries() -> list[int]:
    """The arguments of each function of the extension that takes q, the package's own first."""
    module, others = (
        (REPO / f"csrc/torch_binding/{name}.cpp").read_text() for name in ("module", "flash_attn_2")
    )
    own = re.findall(r"module\.def\((.*?)\);\n", module, flags=re.DOTALL)
    counts = [len(re.findall(r"py::arg\(", each)) for each in own if '"q"' in each]
    listed = re.findall(r"define\(\s*module,.*?_outputs,\s(.*?)\);\n", others, flags=re.DOTALL)
    return counts + [1 + re.sub(r"\(.*?\)", "", each).count(",") for each in listed]


def operators() -> int:
    """Operators of torch that the package defines."""
    return sum(
        len(re.findall(r"^@torch\.library\.custom_op|= define\($", path.read_text(), re.MULTILINE))
        for path in sources("flash_attn_cuda")
    )


def parameters(path: Path) -> list[int]:
    """How many each function of a Python file has, self among them."""
    functions = (x for x in ast.walk(ast.parse(path.read_text())) if isinstance(x, ast.FunctionDef))
    listed = (x.args for x in functions)
    return [len([*x.posonlyargs, *x.args, *x.kwonlyargs]) for x in listed]


def interface() -> list[Path]:
    return [path for name in INTERFACE for path in modules(REPO / "flash_attn_cuda" / name)]


def modules(path: Path) -> list[Path]:
    """A module, or those of a folder."""
    return sorted(path.glob("*.py")) if path.is_dir() else [path]


def report(words: Sequence[str]) -> list[str]:
    code = sources(*FOLDERS)
    lines = []
    for word in words:
        files, named = naming(word, code)
        inside, _ = naming(word, (path for path in code if not {*AROUND} & {*path.parts}))
        lines.append(f"{word}: {files} files, {named} lines; {inside} files without {AROUND_TEXT}")
    python = sources("flash_attn_cuda")
    host = sources("csrc/torch_binding", "csrc/host")
    taken = entries()
    count = sum(x >= MANY for path in python if path.suffix == ".py" for x in parameters(path))
    lines += [
        f"functions of the extension that take q: {len(taken)}, of {min(taken)} to {max(taken)} "
        "arguments",
        f"operators of torch: {operators()}",
        f"Python: {length(python)} lines in {len(python)} files",
        f"Python interface: {length(interface())} lines in {len(interface())} files",
        f"Python functions of {MANY} and more parameters: {count}",
        f"binding and host C++: {length(host)} lines in {len(host)} files",
    ]
    for launcher in LAUNCHERS:
        lines.append(f"headers behind {launcher}: {len(headers_behind(REPO / launcher))}")
    return lines


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m build_tools.report.reach",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("words", nargs="*", default=list(WORDS), metavar="WORD")
    print("\n".join(report(parser.parse_args(arguments).words)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
