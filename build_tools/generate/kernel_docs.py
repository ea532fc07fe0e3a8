"""Writes the list of kernels in docs/kernels.md, between its two comments, out of the kernel table.

python -m build_tools.generate.kernel_docs           # writes it
python -m build_tools.generate.kernel_docs --check   # status 1 where the document says otherwise
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Sequence

from build_tools.compile.toolchain import REPO
from kernel_table.all_rows import ALL_ROWS
from kernel_table.row import Feature, Kernel, KernelRow

DOCUMENT = REPO / "docs/kernels.md"
BLOCK = re.compile(r"(?<=<!-- generated: kernels -->\n).*?(?=<!-- end -->)", re.DOTALL)
HEADER = "|kernel|row|head dims|features|lengths|\n|---|---|---|---|---|"


def table(rows: Sequence[KernelRow]) -> str:
    """The rows of one kernel after those of another, each in the order of selection."""
    kernels = dict.fromkeys(row.kernel for row in rows)
    return "\n".join([HEADER, *(line for kernel in kernels for line in lines_of(kernel, rows))])


def lines_of(kernel: Kernel, rows: Sequence[KernelRow]) -> Iterator[str]:
    """One for all rows that differ in dtype, head dim and the shared memory they need alone."""
    alike: dict[tuple[str, str], dict[str, dict[str, str]]] = {}  # lengths by memory and head dim
    for row in (row for row in rows if row.kernel is kernel):
        features = ", ".join(str(f.name) for f in Feature if f in row.features)
        variant, memory = of_gpu(row)
        of_line = alike.setdefault((variant or "plain", features), {})
        of_line.setdefault(memory, {})[head_dims(row)] = lengths(row)
    name = f"`{kernel.value.replace(' ', '/')}`"
    for (variant, features), of_line in alike.items():
        dims = "; ".join(f"{memory}{', '.join(of_dims)}" for memory, of_dims in of_line.items())
        bounds = of_each(
            {m + d: text for m, of_dims in of_line.items() for d, text in of_dims.items()}
        )
        cells = (name, f"`{variant}`", dims, features, bounds)
        yield f"|{'|'.join(cell or ' ' for cell in cells)}|"
        name = ""


def of_gpu(row: KernelRow) -> tuple[str, str]:
    """A row's variant, and apart from it the GPUs with less shared memory that it is for."""
    variant, smem, size = row.variant.partition("smem")
    return variant.rstrip("_"), f"{smem}{size}: " if smem else ""


def head_dims(row: KernelRow) -> str:
    """192, or 192/128 where values have another one."""
    return f"{row.head_dim}" if row.head_dim_v is None else f"{row.head_dim}/{row.head_dim_v}"


def lengths(row: KernelRow) -> str:
    """Those that the row is for, whatever other rows there are; "" where it is for all."""
    most = [getattr(row, f"most_{mask}_seqlen", 0) for mask in ("full", "causal")]
    least = [getattr(row, f"least_keys_{mask}", 0) for mask in ("full", "windowed")]
    bounds = {"up to": most, "from": least}
    return ", ".join(f"{word} {without_and_with_mask(x)}" for word, x in bounds.items() if any(x))


def without_and_with_mask(bounds: Sequence[int]) -> str:
    full, masked = (f"{bound:,}" for bound in bounds)
    return full if full == masked else f"{full} full, {masked} masked"


def of_each(of_dims: dict[str, str]) -> str:
    """The text that all head dims share, or each one's own."""
    if len(set(of_dims.values())) == 1:
        return next(iter(of_dims.values()))
    return "; ".join(f"{head_dim}: {text}" for head_dim, text in of_dims.items())


def written(text: str) -> str:
    """The document with the list as the kernel table gives it."""
    return BLOCK.sub(f"\n{table(ALL_ROWS)}\n\n", text)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m build_tools.generate.kernel_docs",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--check", action="store_true", help="write nothing")
    check = parser.parse_args(arguments).check
    text = DOCUMENT.read_text()
    if not check:
        DOCUMENT.write_text(written(text))
    elif written(text) != text:
        print(f"{DOCUMENT}: run python -m build_tools.generate.kernel_docs", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
