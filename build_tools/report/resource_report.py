"""What every compiled kernel takes of an SM: registers, spills, stack and shared memory.

``python -m build_tools.report.resource_report`` prints the kernels of the last build and exits with
status 1 when one spills more than spill_allowances.json allows its row, or when ptxas could not
keep wgmma asynchronous or ignored setmaxnreg, which it mentions only in passing.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from build_tools.build_kernels import ARCHIVE_NAME, MANIFEST_NAME, BuildOptions, default_build_dir
from build_tools.compile import toolchain
from build_tools.report import spill_allowances
from kernel_table.all_rows import ALL_ROWS

COLUMNS = ("kernel", "arch", "registers", "spill B", "stack B", "smem B")

# Prints the dynamic shared memory of each instance, which ptxas cannot know.
SMEM_PROBE = """#include <cstdio>
#include "flash_attn/instance.h"
void print(auto instances) {
  for (auto* i : instances) std::printf("%s %d\\n", i->name, i->smem_bytes);
}
int main() {
  print(flash_attn_cuda::forward_instances());
  print(flash_attn_cuda::backward_instances());
}
"""


@dataclass(frozen=True)
class KernelUsage:
    """One kernel as compiled for one arch. Sizes are bytes; registers and stack are per thread."""

    symbol: str
    arch: str
    registers: int
    stack: int
    spill_stores: int
    spill_loads: int
    static_smem: int

    @property
    def spill(self) -> int:
        return max(self.spill_stores, self.spill_loads)

    @property
    def is_main_kernel(self) -> bool:
        """Whether an instance's smem_bytes speak of this kernel, not of one that helps it."""
        kinds = "forward|backward|decode|wide_forward|wide_backward|latent|jvp|hvp"
        return re.search(rf"\d({kinds})_kernelI", self.symbol) is not None

    def instance(self, names: Iterable[str]) -> str | None:
        """The table row it was compiled from; None for an auxiliary kernel.

        A mangled name has its length in front, so no row is mistaken for a longer one.
        """
        return next((name for name in names if f"{len(name)}{name}" in self.symbol), None)


def parse_ptxas(text: str) -> list[KernelUsage]:
    """The kernels in the output of ``nvcc -Xptxas -v``.

    Raises ValueError when a kernel is announced and its figures are missing: a report must not pass
    because it could not be read.
    """
    usages = []
    for section in re.split(r"(?=ptxas info\s*: Compiling entry function)", text)[1:]:
        entry = re.match(r"ptxas info\s*: Compiling entry function '(\S+)' for '(\w+)'", section)
        # A function that was not inlined has properties of its own: the entry's are by its name.
        frame = entry and re.search(
            rf"Function properties for {re.escape(entry[1])}\s+"
            r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads",
            section,
        )
        used = re.search(r"Used (\d+) registers(?:.*?(\d+)(?:\+\d+)? bytes smem)?", section)
        if not (entry and frame and used):
            raise ValueError(f"cannot read ptxas's report of a kernel:\n{section[:500]}")
        stack, stores, loads = map(int, frame.groups())
        usage = KernelUsage(
            symbol=entry[1],
            arch=entry[2],
            registers=int(used[1]),
            stack=stack,
            spill_stores=stores,
            spill_loads=loads,
            static_smem=int(used[2] or 0),
        )
        usages.append(usage)
    return usages


def lost_performance(text: str) -> list[str]:
    """What ptxas says of wgmma that it had to serialize and of setmaxnreg that it ignored."""
    return sorted(set(re.findall(r"\(C75\d\d\) .*", text)))


def excess_spills(usages: Iterable[KernelUsage], allowed: dict[str, int]) -> list[str]:
    """A sentence per kernel that spills more than its row allows; an auxiliary one may not."""
    sentences = []
    for usage in usages:
        name = usage.instance(allowed)
        limit = allowed[name] if name else 0
        if usage.spill > limit:
            kernel = f"{name or usage.symbol} ({usage.arch})"
            sentences.append(f"{kernel} spills {usage.spill} bytes; {limit} allowed")
    return sentences


def dynamic_smem(build_dir: Path) -> dict[str, int]:
    """Bytes that each instance asks for at launch, from the archive; empty where it cannot link."""
    nvcc = toolchain.find_nvcc()
    if nvcc is None:
        return {}
    source, program = build_dir / "smem_probe.cpp", build_dir / "smem_probe"
    source.write_text(SMEM_PROBE)
    include = f"-I{BuildOptions.source_dir}"
    libraries = [f"-L{folder.parent / 'lib'}" for folder in nvcc.include_dirs]
    inputs = [str(source), str(build_dir / ARCHIVE_NAME), *libraries]
    command = [str(nvcc.path), "-std=c++20", include, *inputs, "-o", str(program)]
    if subprocess.run(command, capture_output=True).returncode:
        return {}
    listing = subprocess.run([program], capture_output=True, text=True, check=True).stdout
    return {name: int(size) for name, size in (line.split() for line in listing.splitlines())}


def demangle(symbols: Sequence[str]) -> list[str]:
    """Readable kernel names without parameters; the symbols where there is no c++filt."""
    command = ["c++filt"]
    text = "\n".join(symbols)
    try:
        result = subprocess.run(command, input=text, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return list(symbols)
    noise = re.compile(r"\(anonymous namespace\)::|flash_attn_cuda::|^void ")
    return [noise.sub("", line).split("(")[0] for line in result.stdout.splitlines()]


def table(usages: Sequence[KernelUsage], allowed: dict[str, int], smem: dict[str, int]) -> str:
    """The report: one line per kernel and arch, in the order of compilation."""
    rows: list[tuple[str, ...]] = [COLUMNS]
    for usage, kernel in zip(usages, demangle([usage.symbol for usage in usages]), strict=True):
        launched = smem.get(usage.instance(allowed) or "", 0) if usage.is_main_kernel else 0
        figures = (usage.registers, usage.spill, usage.stack, usage.static_smem + launched)
        rows.append((kernel, usage.arch, *map(str, figures)))
    name_width, *widths = (max(map(len, column)) for column in zip(*rows, strict=True))
    lines = (
        (row[0].ljust(name_width), *(c.rjust(w) for c, w in zip(row[1:], widths, strict=True)))
        for row in rows
    )
    return "\n".join("  ".join(line) for line in lines)


def spills_of(usages: Iterable[KernelUsage], rows: Collection[str]) -> dict[str, int]:
    """The most that each row's kernels spill, over the archs that they were compiled for."""
    spills: dict[str, int] = {}
    for usage in usages:
        if name := usage.instance(rows):
            spills[name] = max(usage.spill, spills.get(name, 0))
    return spills


def report(build_dir: Path, accepts: bool = False) -> int:
    """Prints the table and what is wrong with it; the process's exit status. With ``accepts`` what
    the build spills is allowed from now on.
    """
    manifest = json.loads((build_dir / MANIFEST_NAME).read_text())
    texts = [Path(log).read_text() for log in manifest["logs"]]
    usages = [usage for text in texts for usage in parse_ptxas(text)]
    if accepts:
        spill_allowances.accept(spills_of(usages, manifest["rows"]), [row.name for row in ALL_ROWS])
    allowances = spill_allowances.load()
    allowed = {row: allowances.get(row, 0) for row in manifest["rows"]}
    print(table(usages, allowed, dynamic_smem(build_dir)))
    unseen = set(allowed) - {usage.instance(allowed) for usage in usages}
    problems = [f"{name}: ptxas reported no kernel" for name in sorted(unseen)]
    problems += excess_spills(usages, allowed)
    problems += [complaint for text in texts for complaint in lost_performance(text)]
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    return 1 if problems else 0


def main(arguments: Sequence[str]) -> int:
    program = "python -m build_tools.report.resource_report"
    parser = argparse.ArgumentParser(prog=program, description=__doc__)
    parser.add_argument(
        "--build-dir", type=Path, default=default_build_dir(), help="FLASH_ATTN_CUDA_BUILD_DIR"
    )
    parser.add_argument(
        "--accept",
        action="store_true",
        help="allow what this build's rows spill, in spill_allowances.json; build all archs first",
    )
    given = parser.parse_args(arguments)
    build_dir = given.build_dir
    if not (build_dir / MANIFEST_NAME).is_file():
        print(f"error: no build in {build_dir}: build_tools.build_kernels first", file=sys.stderr)
        return 1
    return report(build_dir, given.accept)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
