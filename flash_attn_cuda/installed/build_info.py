"""What this installation can run: its extension, its kernels, and why CUDA is unavailable.

Importing this module loads the extension `flash_attn_cuda._C` when there is one. The package works
without it: CPU tensors run on the CPU backend, CUDA tensors raise a RuntimeError with the reason
given here.
"""

from __future__ import annotations

import json
import platform
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from .. import __version__

# flash_attn_cuda; another where a loader imports the folder by its path. Operators have it before
# their names, so that two copies can be loaded.
PACKAGE: str = __name__.partition(".")[0]
FOLDER = Path(__file__).parents[1]  # of the package, with the extension
INSTALL_RECORD = FOLDER / "_install.json"  # by setup.py: what it chose and why
EXTENSION = f"{PACKAGE}._C"
REINSTALL = (
    "To get it, run FLASH_ATTN_CUDA_BACKEND=cuda pip install --force-reinstall --no-deps "
    "--no-cache-dir . in the source folder: that builds it or says what is missing"
)
# A string constant in the extension, so that its torch can be named even when it does not load.
BUILT_WITH = re.compile(rb"flash_attn_cuda built with ([ -~]+)\0")


@dataclass(frozen=True)
class CompiledRow:
    """One compiled kernel: a row of the kernel table for one dtype."""

    name: str
    pass_name: str  # "forward" or "backward"
    family: str  # "sm80" or "sm90"
    dtype: str  # "fp16" or "bf16"
    mask: str  # "full" or "windowed"
    head_dim: int  # serves every head dim up to this one
    head_dim_v: int  # the same of values and outputs
    config: dict[str, Any]  # tile sizes and what else the table says

    @property
    def variant(self) -> str:
        """What tells it from other rows of its head dim; "plain" where nothing has to."""
        return self.name.partition(f"_{self.mask}")[2].removeprefix("_") or "plain"

    @property
    def kind(self) -> str:
        """ "tiles" of many queries, or "decode", for few queries over many keys."""
        return self.config.get("kind", "tiles")

    @property
    def features(self) -> tuple[str, ...]:
        """What it computes beyond masks: "softcap", "alibi", "dropout", ..."""
        return tuple(self.config.get("features") or ())


def _load_extension() -> tuple[ModuleType | None, str | None]:
    """The extension module, or None and the reason."""
    spec = find_spec(EXTENSION)
    if spec is None or spec.origin is None:
        return None, _missing_reason()
    try:
        return import_module(EXTENSION), None
    except ImportError as error:
        reason = (
            f"the CUDA extension of flash_attn_cuda does not load: {error} "
            f"(built with {_built_with(Path(spec.origin))}, running with {_running_with()}). "
            "Install flash_attn_cuda again for this torch"
        )
        warnings.warn(f"{reason}. CPU tensors still work.", RuntimeWarning, stacklevel=2)
        return None, reason


def extension_loads() -> bool:
    """False where there is an extension for this Python and it cannot be loaded."""
    return extension is not None or find_spec(EXTENSION) is None


def _missing_reason() -> str:
    chosen = _installed_choice()
    others = sorted(path.name for path in FOLDER.glob("_C.*.so"))
    if others and chosen.get("backend") != "cpu":
        return f"the CUDA extension was built for another Python: {', '.join(others)}"
    reason = f", because {chosen['reason']}" if chosen.get("backend") == "cpu" else ""
    return (
        "flash_attn_cuda was installed without its CUDA extension (CPU backend only)"
        f"{reason}. {REINSTALL}"
    )


def _installed_choice() -> dict[str, str]:
    """The backend that setup.py chose and its reason; empty in a source tree never installed."""
    try:
        return json.loads(INSTALL_RECORD.read_text())
    except FileNotFoundError:
        return {}


def _built_with(extension_file: Path) -> str:
    """What the extension says of itself, read from its file."""
    found = BUILT_WITH.search(extension_file.read_bytes())
    return found[1].decode() if found else "an unknown torch"


def _running_with() -> str:
    python = platform.python_version()
    return f"torch {torch.__version__}, cuda {torch.version.cuda}, python {python}"


extension, _extension_error = _load_extension()


@cache
def build_record() -> dict[str, Any]:
    """What the extension was built from: archs, compiler, instances. Empty without it."""
    return json.loads(extension.build_record()) if extension is not None else {}


@cache
def compiled_rows() -> tuple[CompiledRow, ...]:
    """The compiled kernels, in selection order; empty without the extension."""
    return tuple(compiled_row(instance) for instance in build_record().get("instances", ()))


def compiled_row(instance: dict[str, Any]) -> CompiledRow:
    """A row as the build record has it."""
    config = dict(instance)
    return CompiledRow(
        name=config.pop("name"),
        pass_name=config.pop("pass"),
        family=config.pop("family"),
        dtype=config.pop("dtype"),
        mask=config.pop("mask"),
        head_dim=int(config.pop("head_dim")),
        head_dim_v=int(config.pop("head_dim_v")),
        config=config,
    )


def compiled_archs() -> tuple[str, ...]:
    """Architectures of the build, as FLASH_ATTN_CUDA_ARCHS spells them: ("80", "90a")."""
    return tuple(str(arch) for arch in build_record().get("archs", ()))


class CodeKind(Enum):
    """What a device has of a build."""

    binary = "binary"  # machine code
    ptx = "PTX"  # which the driver compiles when a kernel first runs, and keeps
    none = "none"


@dataclass(frozen=True)
class Code:
    kind: CodeKind
    arch: str = ""  # as FLASH_ATTN_CUDA_ARCHS names it

    def __str__(self) -> str:
        return f"{self.kind.value} of {self.arch}" if self.arch else self.kind.value


def code_for(archs: Sequence[str], capability: tuple[int, int]) -> Code:
    """What a device of this capability runs of kernels built for these FLASH_ATTN_CUDA_ARCHS.

    Machine code runs on its own major version, from its minor one up; PTX on anything as new as it.
    The entries with +PTX bring PTX, or the highest one where no entry asks for it.
    """
    names = [arch.removesuffix("+PTX") for arch in archs]
    versions = {name: divmod(int(name.rstrip("af")), 10) for name in names}
    asked = [arch.removesuffix("+PTX") for arch in archs if arch.endswith("+PTX")]
    highest = [max(versions, key=lambda name: versions[name])] if versions else []
    binaries = [
        name
        for name, (major, minor) in versions.items()
        if major == capability[0] and minor <= capability[1]
    ]
    # PTX is of the plain architecture: that of 90a would run on Hopper alone.
    texts = [name for name in asked or highest if versions[name] <= capability]
    for kind, found in ((CodeKind.binary, binaries), (CodeKind.ptx, texts)):
        if found:
            arch = max(found, key=lambda name: versions[name])
            return Code(kind, arch.rstrip("af") if kind is CodeKind.ptx else arch)
    return Code(CodeKind.none)


def archs_run_on(archs: Sequence[str], capability: tuple[int, int]) -> bool:
    """Whether kernels built for these FLASH_ATTN_CUDA_ARCHS run on a device of this capability."""
    return code_for(archs, capability).kind is not CodeKind.none


def cuda_unavailable_reason(device: torch.device | int | None = None) -> str | None:
    """Why CUDA tensors on `device` (None: the current one) cannot be computed, or None."""
    if extension is None:
        return _extension_error
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    capability = torch.cuda.get_device_capability(device)
    name = torch.cuda.get_device_name(device)
    found = f"{name} has compute capability {capability[0]}.{capability[1]}"
    if capability < (8, 0):
        return f"{found}; flash_attn_cuda needs 8.0 or higher"
    archs = compiled_archs()
    if not archs_run_on(archs, capability):
        return (
            f"{found}; this build has kernels for {', '.join(archs) or 'no architecture'} only. "
            f"Rebuild with FLASH_ATTN_CUDA_ARCHS={capability[0]}{capability[1]}"
        )
    return None


def require_cuda(device: torch.device | int | None, cause: Exception | None = None) -> None:
    """Raise RuntimeError with the reason when CUDA tensors on `device` cannot be computed."""
    reason = cuda_unavailable_reason(device)
    if reason is not None:
        raise RuntimeError(f"flash_attn_cuda cannot run on {device}: {reason}") from cause


def describe() -> str:
    """Versions, devices and compiled kernels, for a person to read."""
    lines = [f"flash_attn_cuda {__version__}", f"running with     {_running_with()}"]
    record = build_record()
    if record:
        facts = {key: value for key, value in record.items() if key not in ("instances", "archs")}
        lines.append(f"compiled for     {', '.join(compiled_archs())}")
        lines.append(f"code for GPUs    {_code_of_gpus(compiled_archs())}")
        lines += [f"  {key}: {value}" for key, value in facts.items() if value]
    lines += _describe_devices()
    lines += _describe_rows()
    return "\n".join(lines)


def _describe_devices() -> list[str]:
    if not torch.cuda.is_available():
        return [f"CUDA             not available: {cuda_unavailable_reason()}"]
    lines = []
    for index in range(torch.cuda.device_count()):
        reason = cuda_unavailable_reason(index)
        name = torch.cuda.get_device_name(index)
        code = code_for(compiled_archs(), torch.cuda.get_device_capability(index))
        lines.append(f"cuda:{index}           {name}: {reason or f'ready, runs {code}'}")
    return lines


# Compute capabilities of GPUs that there are.
_CAPABILITIES = ((8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0))


def _code_of_gpus(archs: Sequence[str]) -> str:
    """For people who have another GPU than the one that a wheel or an image was made on."""
    groups: dict[str, list[str]] = {}
    for major, minor in _CAPABILITIES:
        groups.setdefault(str(code_for(archs, (major, minor))), []).append(f"{major}.{minor}")
    return "; ".join(f"{', '.join(gpus)}: {code}" for code, gpus in groups.items())


def _describe_rows() -> list[str]:
    groups: dict[tuple[str, str, str], list[tuple[int, int]]] = {}
    for row in compiled_rows():
        parts = [row.dtype, row.mask]
        if row.kind == "decode":
            parts.append("decode")
        elif "tangent" in row.features:
            parts.append("tangents")
        elif "softcap" in row.features:
            parts.append("features")
        head_dims = groups.setdefault((row.pass_name, row.family, " ".join(parts)), [])
        head_dims.append((row.head_dim, row.head_dim_v))
    lines = [f"kernels          {len(compiled_rows())}"]
    for (pass_name, family, kind), head_dims in groups.items():
        pairs = sorted(set(head_dims))
        dims = ", ".join(f"{of_q}" if of_q == of_v else f"{of_q}/{of_v}" for of_q, of_v in pairs)
        lines.append(f"  {pass_name:8} {family} {kind:22} head dims {dims}")
    return lines


# Fields of a row that share a column of the printed table, each with the part of its name that
# tells it from the others.
_SHARED_COLUMNS = {
    "stages": re.compile(r"stages_(\w+)"),
    "registers": re.compile(r"(\w+)_registers"),
    "warps along": re.compile(r"warps_(\w+)"),
    "up to seqlen": re.compile(r"most_(\w+)_seqlen"),
    "from keys": re.compile(r"least_keys_(\w+)"),
    "finishes from keys": re.compile(r"finish_keys_(\w+)"),
}
_LAST = ("dtypes", "paths", "features")
_NEVER = 2**31 - 1


def table_text(rows: Sequence[CompiledRow]) -> str:
    """The rows as aligned text: a part for each family, pass and head dim, with a line for each
    variant, in selection order. Columns that would be empty are left out.
    """
    parts: dict[str, dict[tuple[str, ...], dict[str, str]]] = {}
    for row in rows:
        head_dims = f"{row.head_dim}"
        if row.head_dim_v != row.head_dim:
            head_dims += f", of values {row.head_dim_v}"
        name = "decode" if row.kind == "decode" else row.pass_name
        lines = parts.setdefault(f"{row.family} {name}, head dim {head_dims}", {})
        cells = _cells(row)
        line = lines.setdefault(tuple(cells.values()), cells)
        line["dtypes"] = f"{line.get('dtypes', '')} {row.dtype}".strip()
    return "\n\n".join(f"{title}\n{_aligned(list(part.values()))}" for title, part in parts.items())


def _cells(row: CompiledRow) -> dict[str, str]:
    """What the table prints of a row, by column. Fields that are 0 go without saying."""
    config = dict(row.config)
    config.pop("kind", None)
    features = config.pop("features", None) or ()
    tile = f"{config.pop('block_m')} x {config.pop('block_n')}"
    cells = {"variant": row.variant, "mask": row.mask, "tile": tile}
    cells["warps"] = str(config.pop("num_warps"))
    paths = [name for name, value in config.items() if value is True]
    for name, value in config.items():
        if isinstance(value, bool) or not value:
            continue
        text = "never" if value == _NEVER else str(value)
        for column, pattern in _SHARED_COLUMNS.items():
            if part := pattern.fullmatch(name):
                before = f"{cells[column]}, " if column in cells else ""
                cells[column] = f"{before}{part[1]} {text}"
                break
        else:
            cells[name] = text
    cells["paths"] = ", ".join(paths)
    cells["features"] = ", ".join(features)
    return cells


def _aligned(lines: Sequence[dict[str, str]]) -> str:
    """Lines of cells by column under a line of the columns' names."""
    named = dict.fromkeys(column for line in lines for column in line if column not in _LAST)
    columns = [*named, *_LAST]
    columns = [column for column in columns if any(line.get(column) for line in lines)]
    texts = [columns, *([line.get(column, "") for column in columns] for line in lines)]
    widths = [max(map(len, cells)) for cells in zip(*texts, strict=True)]
    return "\n".join("  ".join(["", *map(str.ljust, text, widths)]).rstrip() for text in texts)
