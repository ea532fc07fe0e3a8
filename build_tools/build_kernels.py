"""Builds the kernel library: table rows -> generated units -> ninja -> one static archive.

``python -m build_tools.build_kernels --help`` lists the options; each defaults to an environment
variable. The archive depends on the sources, the table, nvcc and CUTLASS alone: a new torch or
Python does not rebuild it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from build_tools import archs, generate_units, jobs, ninja_build, row_filter, toolchain
from build_tools.kernel_row import KernelRow
from build_tools.kernel_table import ALL_ROWS
from build_tools.toolchain import REPO, Nvcc, ToolchainError

ARCHIVE_NAME = "libflash_attn_cuda_kernels.a"
MANIFEST_NAME = "kernels.json"
CXX_FLAGS = ("-std=c++20", "-O3", "-DNDEBUG", "-fPIC", "-Wall")
NVCC_FLAGS = (
    "-std=c++20",
    "-O3",
    "-DNDEBUG",
    "--expt-relaxed-constexpr",
    "-Xcompiler=-fPIC",
    "-Xptxas=-v",  # resource_report reads it
)


def default_build_dir() -> Path:
    return Path(os.environ.get("FLASH_ATTN_CUDA_BUILD_DIR") or REPO / "build/kernels").absolute()


def _archs_wanted() -> str:
    return os.environ.get(archs.VARIABLE) or archs.default_archs()


@dataclass(frozen=True)
class BuildOptions:
    """What to build and where; the defaults are the environment variables that the README lists."""

    archs: str = field(default_factory=_archs_wanted)
    rows: str = field(default_factory=lambda: os.environ.get(row_filter.VARIABLE, ""))
    jobs: int = field(default_factory=jobs.default_jobs)
    build_dir: Path = field(default_factory=default_build_dir)
    source_dir: Path = REPO / "csrc"
    extra_nvcc_flags: tuple[str, ...] = ()


@dataclass(frozen=True)
class Plan:
    """Everything a build will do, decided before the first file is written."""

    options: BuildOptions
    nvcc: Nvcc
    cutlass: Path
    archs: list[archs.Arch]
    rows: list[KernelRow]

    @property
    def archive(self) -> Path:
        return self.options.build_dir / ARCHIVE_NAME

    def record(self) -> dict[str, Any]:
        """What the library says of itself at run time."""
        return {
            "archs": [str(arch) for arch in self.archs],
            "nvcc": self.nvcc.version,
            "cutlass": toolchain.cutlass_version(self.cutlass),
            "rows": self.options.rows,
            "instances": [generate_units.row_record(row) for row in self.rows],
        }


def make_plan(options: BuildOptions, table: Sequence[KernelRow] = ALL_ROWS) -> Plan:
    """Chooses tools and rows; ToolchainError, ArchError or RowFilterError says what is wrong."""
    nvcc = toolchain.find_nvcc()
    if nvcc is None:
        raise ToolchainError(f"there is no nvcc in {toolchain.NVCC_PLACES}")
    toolchain.check_nvcc_version(nvcc)
    wanted = archs.parse_archs(options.archs)
    archs.check_compilable(wanted, toolchain.nvcc_capabilities(nvcc), f"nvcc {nvcc.version}")
    runnable = [row for row in table if archs.family_gencode(row.family, wanted)]
    rows = row_filter.select_rows(options.rows, runnable)
    return Plan(options, nvcc, toolchain.find_cutlass(), wanted, rows)


def _compiles(plan: Plan) -> list[ninja_build.Compile]:
    """One compile per unit, auxiliary kernel and host source."""
    options = plan.options
    generated = options.build_dir / "generated"
    generate_units.generate(plan.rows, plan.record(), generated)

    nvcc_command = (
        str(plan.nvcc.path),
        *NVCC_FLAGS,
        *options.extra_nvcc_flags,
        *toolchain.nvcc_host_compiler_flags(),
        f"-I{options.source_dir}",
        *(f"-isystem={folder}" for folder in (plan.cutlass, *plan.nvcc.include_dirs)),
    )
    host_command = (
        toolchain.host_compiler(),
        *CXX_FLAGS,
        f"-I{options.source_dir}",
        *(part for folder in plan.nvcc.include_dirs for part in ("-isystem", str(folder))),
    )

    def compile_of(source: Path, *command: str) -> ninja_build.Compile:
        target = options.build_dir / "objects" / f"{source.stem}.o"
        return ninja_build.Compile(source, target, command)

    units = [
        compile_of(
            generated / f"{unit.name}.cu",
            *nvcc_command,
            *archs.family_gencode(unit.family, plan.archs),
        )
        for unit in generate_units.units_of(plan.rows)
    ]
    auxiliary = [
        compile_of(source, *nvcc_command, *archs.plain_gencode(plan.archs))
        for source in sorted(options.source_dir.glob("auxiliary/*.cu"))
    ]
    host_sources = [generated / "registry.cpp", generated / "build_record.cpp"]
    host_sources += sorted(options.source_dir.glob("host/*.cpp"))
    return units + auxiliary + [compile_of(source, *host_command) for source in host_sources]


def _write_manifest(plan: Plan, compiles: Sequence[ninja_build.Compile]) -> None:
    """What resource_report needs to judge this build: compiler logs and each kernel's allowance."""
    manifest = {
        "logs": [f"{job.object}.log" for job in compiles if job.source.suffix == ".cu"],
        "allowed_spill_bytes": {row.name: row.allowed_spill_bytes for row in plan.rows},
    }
    generate_units.write_if_changed(
        plan.options.build_dir / MANIFEST_NAME, json.dumps(manifest, indent=1)
    )


def closing_line(plan: Plan, cost: ninja_build.Cost) -> str:
    archive_mib = plan.archive.stat().st_size / 2**20
    unmeasured = (
        f" ({cost.never_measured} compiles came from ccache)" if cost.never_measured else ""
    )
    return (
        f"flash_attn_cuda: {len(plan.rows)} kernels for {';'.join(map(str, plan.archs))}, "
        f"{cost.cpu_seconds / 60:.1f} CPU-minutes{unmeasured}, "
        f"at most {cost.peak_bytes / 2**30:.1f} GiB a job, archive {archive_mib:.1f} MiB"
    )


def build(options: BuildOptions, table: Sequence[KernelRow] = ALL_ROWS) -> Path:
    """Builds what is out of date, prints one closing line and returns the archive's path."""
    plan = make_plan(options, table)
    if missing := archs.missing_hopper_kernels(plan.archs):
        print(f"flash_attn_cuda: {missing}", file=sys.stderr, flush=True)
    with ninja_build.locked(options.build_dir):
        compiles = _compiles(plan)
        _write_manifest(plan, compiles)
        # ar adds to an archive that exists, and would keep members that are no longer built.
        link = ninja_build.Link(plan.archive, "rm -f $out.new && ar rcsD $out.new $in")
        ninja_build.build(options.build_dir, compiles, link, options.jobs)
        print(closing_line(plan, ninja_build.total_cost(compiles)), flush=True)
    return plan.archive


def options_from_command_line(arguments: Sequence[str]) -> BuildOptions:
    defaults = BuildOptions()
    program = "python -m build_tools.build_kernels"
    parser = argparse.ArgumentParser(prog=program, description=__doc__)

    def option(name: str, variable: str, default: Any) -> None:
        parser.add_argument(name, default=str(default), help=f"{variable}, {default}")

    option("--archs", archs.VARIABLE, defaults.archs)
    option("--rows", row_filter.VARIABLE, defaults.rows)
    option("--jobs", jobs.VARIABLE, defaults.jobs)
    option("--build-dir", "FLASH_ATTN_CUDA_BUILD_DIR", defaults.build_dir)
    parser.add_argument("--lineinfo", action="store_true", help="source lines for profilers")
    given = parser.parse_args(arguments)
    return BuildOptions(
        archs=given.archs,
        rows=given.rows,
        jobs=jobs.parse_jobs(given.jobs, "--jobs"),
        build_dir=Path(given.build_dir).absolute(),
        extra_nvcc_flags=("-lineinfo",) if given.lineinfo else (),
    )


def main(arguments: Sequence[str]) -> int:
    try:
        build(options_from_command_line(arguments))
    except (ValueError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
