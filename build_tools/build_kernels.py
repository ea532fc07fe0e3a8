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

from build_tools.compile import archs, jobs, ninja_build, toolchain, unused_headers
from build_tools.compile.ninja_build import Compile
from build_tools.compile.toolchain import REPO, Nvcc, ToolchainError
from build_tools.generate import kernel_units
from kernel_table import hopper_rows, row_filter
from kernel_table.all_rows import ALL_ROWS
from kernel_table.row import Family, KernelRow

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


@dataclass(frozen=True)
class BuildOptions:
    """What to build and where; the defaults are the environment variables that the README lists."""

    archs: str = field(default_factory=archs.wanted_archs)
    rows: str = field(default_factory=lambda: os.environ.get(row_filter.VARIABLE, ""))
    jobs: int = field(default_factory=jobs.default_jobs)
    build_dir: Path = field(default_factory=default_build_dir)
    source_dir: Path = REPO / "csrc"
    extra_nvcc_flags: tuple[str, ...] = ()


@dataclass(frozen=True)
class DeviceCode:
    """What is compiled for GPUs, and by what."""

    nvcc: Nvcc
    cutlass: Path
    archs: list[archs.Arch]
    rows: list[KernelRow]
    for_others: frozenset[KernelRow]  # that no Hopper GPU finds

    def units(self, jobs: int) -> list[kernel_units.Unit]:
        return kernel_units.longest_first(kernel_units.units_of(self.rows, self.for_others, jobs))


@dataclass(frozen=True)
class Plan:
    """Everything a build will do, decided before the first file is written."""

    options: BuildOptions
    cuda_headers: tuple[Path, ...]
    device: DeviceCode | None  # None: the host's part alone, whose launches raise

    @property
    def archive(self) -> Path:
        return self.options.build_dir / ARCHIVE_NAME

    @property
    def rows(self) -> list[KernelRow]:
        return self.device.rows if self.device else []

    def record(self) -> dict[str, Any]:
        """What the library says of itself at run time."""
        device = self.device
        return {
            "archs": [str(arch) for arch in device.archs] if device else [],
            "nvcc": device.nvcc.version if device else "",
            "cutlass": toolchain.cutlass_version(device.cutlass) if device else "",
            "rows": self.options.rows,
            "instances": [kernel_units.row_record(row) for row in self.rows],
        }


def make_plan(options: BuildOptions, table: Sequence[KernelRow] = ALL_ROWS) -> Plan:
    """Chooses tools and rows; ToolchainError, ArchError or RowFilterError says what is wrong."""
    nvcc = toolchain.find_nvcc()
    if nvcc is None:
        raise ToolchainError(f"there is no nvcc in {toolchain.NVCC_PLACES}")
    toolchain.check_nvcc_version(nvcc)
    wanted = archs.parse_archs(options.archs)
    archs.check_compilable(wanted, toolchain.nvcc_capabilities(nvcc), f"nvcc {nvcc.version}")
    needed = hopper_rows.needed(table)
    runnable = [row for row in table if archs.family_gencode(row.family, wanted, row in needed)]
    rows = row_filter.select_rows(options.rows, runnable)
    for_others = frozenset(table) - hopper_rows.found(table)
    device = DeviceCode(nvcc, toolchain.find_cutlass(), wanted, rows, for_others)
    return Plan(options, nvcc.include_dirs, device)


def plan_without_device_code(cuda_major: int) -> Plan:
    """The library without kernels, which needs no nvcc: it plans calls, and launching one raises.
    For machines without a GPU, where it lets the extension be compiled, imported and tested.
    """
    folder = default_build_dir().with_name(f"without_device_code_cuda{cuda_major}")
    options = BuildOptions(archs="", rows="", build_dir=folder)
    return Plan(options, toolchain.cuda_headers(cuda_major), None)


def _object_of(plan: Plan, source: Path) -> Path:
    return plan.options.build_dir / "objects" / f"{source.stem}.o"


def _device_compiles(plan: Plan, device: DeviceCode, generated: Path) -> list[Compile]:
    """One compile per unit and auxiliary kernel."""
    options = plan.options
    command = (
        str(device.nvcc.path),
        *NVCC_FLAGS,
        *options.extra_nvcc_flags,
        *toolchain.nvcc_host_compiler_flags(),
        f"-I{options.source_dir}",
    )
    unused = unused_headers.write(generated / "unused_headers")

    def compile_of(source: Path, family: Family, for_hopper: bool = True) -> Compile:
        headers = (unused[family], device.cutlass, *plan.cuda_headers)
        includes = (f"-isystem={folder}" for folder in headers)
        gencode = archs.family_gencode(family, device.archs, for_hopper)
        return Compile(source, _object_of(plan, source), (*command, *includes, *gencode))

    units = [
        compile_of(generated / f"{unit.name}.cu", unit.family, unit.for_hopper)
        for unit in device.units(options.jobs)
    ]
    auxiliary = sorted(options.source_dir.glob("auxiliary/**/*.cu"))
    return units + [compile_of(source, Family.sm80) for source in auxiliary]


def _host_compiles(plan: Plan, sources: Sequence[Path]) -> list[Compile]:
    command = (
        toolchain.host_compiler(),
        *CXX_FLAGS,
        f"-I{plan.options.source_dir}",
        *(part for folder in plan.cuda_headers for part in ("-isystem", str(folder))),
    )
    return [Compile(source, _object_of(plan, source), command) for source in sources]


def _compiles(plan: Plan) -> list[Compile]:
    """What can fail quickly comes first: the host's part."""
    options = plan.options
    generated = options.build_dir / "generated"
    for_others = plan.device.for_others if plan.device else ()
    kernel_units.generate(plan.rows, plan.record(), generated, for_others, options.jobs)
    host_sources = [generated / "registry.cpp", generated / "build_record.cpp"]
    host_sources += sorted(options.source_dir.glob("host/*.cpp"))
    if plan.device is None:
        host_sources.append(options.source_dir / "auxiliary/without_device_code.cpp")
        return _host_compiles(plan, host_sources)
    return [*_host_compiles(plan, host_sources), *_device_compiles(plan, plan.device, generated)]


def _write_manifest(plan: Plan, compiles: Sequence[Compile]) -> None:
    """What resource_report needs to judge this build: compiler logs, and which rows it has."""
    manifest = {
        "logs": [f"{job.object}.log" for job in compiles if job.source.suffix == ".cu"],
        "rows": [row.name for row in plan.rows],
    }
    jobs.write_if_changed(plan.options.build_dir / MANIFEST_NAME, json.dumps(manifest, indent=1))


def closing_line(plan: Plan, cost: ninja_build.Cost) -> str:
    archive_mib = plan.archive.stat().st_size / 2**20
    unmeasured = (
        f" ({cost.never_measured} compiles came from ccache)" if cost.never_measured else ""
    )
    kernels = (
        f"{len(plan.rows)} kernels for {archs.as_text(plan.device.archs)}"
        if plan.device
        else "no kernels"
    )
    return (
        f"flash_attn_cuda: {kernels}, "
        f"{cost.cpu_seconds / 60:.1f} CPU-minutes{unmeasured}, "
        f"at most {cost.peak_bytes / 2**30:.1f} GiB a job, archive {archive_mib:.1f} MiB"
    )


def product_of(plan: Plan) -> ninja_build.Product:
    """The archive, of which all is written here but what ninja makes."""
    compiles = _compiles(plan)
    _write_manifest(plan, compiles)
    # ar adds to an archive that exists, and would keep members that are no longer built.
    link = ninja_build.Link(plan.archive, "rm -f $out.new && ar rcsD $out.new $in")
    return ninja_build.Product(plan.options.build_dir, compiles, link)


def build_plan(plan: Plan, of_archive: Sequence[ninja_build.Product] = ()) -> None:
    """Builds what is out of date of the archive and of products that read it, whose compiles begin
    first, and prints one closing line.
    """
    options = plan.options
    with ninja_build.locked(options.build_dir):
        archive = product_of(plan)
        ninja_build.build([*of_archive, archive], options.jobs)
        print(closing_line(plan, ninja_build.total_cost(archive.compiles)), flush=True)


def build(options: BuildOptions, table: Sequence[KernelRow] = ALL_ROWS) -> Path:
    """``build_plan`` of these options; the archive's path."""
    plan = make_plan(options, table)
    build_plan(plan)
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
    except (ValueError, RuntimeError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
