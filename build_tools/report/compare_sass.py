"""Compares the machine code of two builds, function by function.

python -m build_tools.report.compare_sass OLD.a NEW.a

For a change that is to leave kernels as they are, such as a name or a file: prints each function
whose instructions differ, with its instructions and its loads and stores of local memory in both,
and exits with status 1 if there is one that is longer or has more of them. Registers and addresses
may have other numbers in the same instructions. Needs cuobjdump, of the CUDA toolkit or of
Triton's package.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from build_tools.compile.toolchain import ToolchainError

FUNCTION = re.compile(r"^\s*Function : (\S+)$")
INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)")
# Of functions without a name outside their file nvcc's names have a number that changes with it.
FILE_NUMBER = re.compile(r"(?<=_GLOBAL__N__)[0-9a-f]{8}_")
LOCAL = ("LDL", "STL")  # loads and stores of what was spilled


@dataclass(frozen=True)
class Code:
    """The opcodes of a function, in order."""

    opcodes: tuple[str, ...]

    @property
    def local(self) -> int:
        return sum(opcode.startswith(LOCAL) for opcode in self.opcodes)

    def is_worse_than(self, other: Code) -> bool:
        return len(self.opcodes) > len(other.opcodes) or self.local > other.local


def find_cuobjdump() -> str:
    if on_path := shutil.which("cuobjdump"):
        return on_path
    triton = find_spec("triton")
    if triton is not None and triton.origin is not None:
        path = Path(triton.origin).parent / "backends/nvidia/bin/cuobjdump"
        if path.is_file():
            return str(path)
    raise ToolchainError("cuobjdump is neither on PATH nor in Triton's package: pip install triton")


def functions(lines: Iterator[str]) -> dict[str, Code]:
    """The functions in what cuobjdump prints."""
    opcodes: dict[str, list[str]] = {}
    current: list[str] = []
    for line in lines:
        if found := FUNCTION.match(line):
            current = opcodes.setdefault(FILE_NUMBER.sub("", found[1]), [])
        elif found := INSTRUCTION.match(line):
            current.append(found[1])
    return {name: Code(tuple(code)) for name, code in opcodes.items()}


def disassembled(archive: Path) -> dict[str, Code]:
    command = [find_cuobjdump(), "-sass", str(archive)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        code = functions(iter(process.stdout))
    if process.returncode or not code:
        raise ToolchainError(f"cuobjdump read no code in {archive}")
    return code


def compare(old: dict[str, Code], new: dict[str, Code]) -> tuple[list[str], bool]:
    """A line for every difference, and whether there is one for the worse."""
    lines = [f"only in the old build: {name}" for name in sorted(old.keys() - new.keys())]
    lines += [f"only in the new build: {name}" for name in sorted(new.keys() - old.keys())]
    worse = bool(lines)
    for name in sorted(old.keys() & new.keys()):
        before, after = old[name], new[name]
        if before.opcodes != after.opcodes:
            worse = worse or after.is_worse_than(before)
            lines.append(
                f"{name}: {len(before.opcodes)} -> {len(after.opcodes)} instructions, "
                f"{before.local} -> {after.local} of local memory"
            )
    return lines, worse


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m build_tools.report.compare_sass",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    given = parser.parse_args(arguments)
    try:
        old, new = disassembled(given.old), disassembled(given.new)
    except (ToolchainError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    lines, worse = compare(old, new)
    print("\n".join([*lines, f"{len(new)} functions, {len(lines)} of them differ"]))
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
