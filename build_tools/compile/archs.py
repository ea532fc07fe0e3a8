"""Which GPU architectures to compile for, and the nvcc flags that say so."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

from kernel_table.row import Family

VARIABLE = "FLASH_ATTN_CUDA_ARCHS"
TORCH_VARIABLE = "TORCH_CUDA_ARCH_LIST"  # what torch's own extension builder reads
WITHOUT_A_GPU = "80+PTX;90a"  # each family, and PTX for GPUs that come after them
MINIMUM = 80
HOPPER = 90  # its kernels use instructions of 90a alone, so 90 stands for that
FIRST_WITH_SUFFIX = {"": MINIMUM, "a": HOPPER, "f": 100}
# Names that TORCH_CUDA_ARCH_LIST may have in place of numbers.
TORCH_NAMES = {
    "ampere": "8.0 8.6+PTX",
    "ada": "8.9+PTX",
    "hopper": "9.0+PTX",
    "blackwell": "10.0 12.0+PTX",
}


class ArchError(ValueError):
    """An architecture list that cannot be read or served."""


@dataclass(frozen=True)
class Arch:
    """One entry of the list.

    ``90a`` is capability 90 with its arch-specific instructions; ``+PTX`` adds portable code.
    """

    capability: int
    suffix: str = ""
    ptx: bool = False

    def __str__(self) -> str:
        return f"{self.capability}{self.suffix}{'+PTX' if self.ptx else ''}"


def _entries(text: str) -> list[str]:
    return re.split(r"[;,\s]+", text.strip(";, \t\r\n"))


def _parse_entry(entry: str, variable: str) -> Arch:
    """One entry as it is written, whatever the kernels run on; ArchError where it is none."""
    match = re.fullmatch(r"(\d{2,3}|1?\d\.\d)([af]?)(\+PTX)?", entry)
    if not match:
        raise ArchError(f"{variable}: expected entries like 80, 90a or 80+PTX, got {entry!r}")
    number, suffix, ptx = match.groups()
    arch = Arch(int(number.replace(".", "")), suffix, ptx is not None)
    if arch.capability == HOPPER and not suffix:
        arch = replace(arch, suffix="a")
    return arch


def parse_archs(text: str) -> list[Arch]:
    """``"80;90"``, ``"8.0;9.0a+PTX"`` or ``"80+PTX"`` to entries in rising order; 90 is 90a.

    Raises ArchError, naming the entry, for one that cannot be read or that no kernel runs on.
    """
    archs = set()
    for entry in _entries(text):
        arch = _parse_entry(entry, VARIABLE)
        if arch.capability < MINIMUM:
            raise ArchError(f"{VARIABLE}: the kernels need capability >= {MINIMUM}, got {entry!r}")
        first = FIRST_WITH_SUFFIX[arch.suffix]
        if arch.capability < first:
            raise ArchError(
                f"{VARIABLE}: there is a suffix {arch.suffix} from {first} on, got {entry!r}"
            )
        archs.add(arch)
    return in_order(archs)


def in_order(archs: Iterable[Arch]) -> list[Arch]:
    return sorted(archs, key=lambda arch: (arch.capability, arch.suffix, arch.ptx))


def as_text(archs: Iterable[Arch]) -> str:
    return ";".join(map(str, archs))


def of_torchs_list(text: str) -> str:
    """What TORCH_CUDA_ARCH_LIST asks for, less the GPUs that the kernels do not run on.

    Raises ArchError for an entry that cannot be read, or where nothing is left.
    """
    entries = [
        number
        for entry in _entries(text)
        for number in TORCH_NAMES.get(entry.lower(), entry).split()
    ]
    asked = [_parse_entry(entry, TORCH_VARIABLE) for entry in entries]
    usable = {arch for arch in asked if arch.capability >= MINIMUM}
    if not usable:
        raise ArchError(f"{TORCH_VARIABLE}: the kernels need capability >= {MINIMUM}, got {text!r}")
    return as_text(in_order(usable))


def wanted_archs() -> str:
    """FLASH_ATTN_CUDA_ARCHS, else TORCH_CUDA_ARCH_LIST, else those of the GPUs present."""
    if given := os.environ.get(VARIABLE):
        return given
    if given := os.environ.get(TORCH_VARIABLE):
        return of_torchs_list(given)
    return default_archs()


def check_compilable(archs: list[Arch], capabilities: Collection[int], compiler: str) -> None:
    """Raises ArchError for an entry that ``compiler`` has no code for, as far as it tells."""
    for arch in archs:
        if capabilities and arch.capability not in capabilities:
            usable = ", ".join(str(c) for c in sorted(capabilities) if c >= MINIMUM)
            raise ArchError(f"{VARIABLE}: {compiler} compiles for {usable}, got '{arch}'")


def _capabilities_from_torch() -> list[int]:
    try:
        import torch
    except ImportError:
        return []
    if not torch.cuda.is_available():
        return []
    capabilities = (torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count()))
    return [10 * major + minor for major, minor in capabilities]


def _capabilities_from_driver() -> list[int]:
    command = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return []
    capabilities = re.findall(r"^\s*(\d+)\.(\d)\s*$", result.stdout, flags=re.MULTILINE)
    return [int(major + minor) for major, minor in capabilities]


def usable_capabilities() -> list[int]:
    """Of the GPUs present, those that the kernels run on, each once, in rising order."""
    present = set(_capabilities_from_torch() or _capabilities_from_driver())
    return sorted(capability for capability in present if capability >= MINIMUM)


def default_archs() -> str:
    """The archs of the GPUs present that the kernels can run on, else of all."""
    return ";".join("90a" if c == HOPPER else str(c) for c in usable_capabilities()) or (
        WITHOUT_A_GPU
    )


def plain_gencode(archs: list[Arch], for_hopper: bool = True) -> list[str]:
    """Flags for code that runs on every listed arch, and for PTX of the highest one.

    The PTX serves GPUs that come later. An entry's ``+PTX`` asks for its PTX instead. Not
    ``for_hopper``: what no Hopper GPU runs (kernel_table/hopper_rows.py) is compiled for the others
    alone.
    """
    capabilities = sorted(
        {arch.capability for arch in archs if for_hopper or arch.capability != HOPPER}
    )
    with_ptx = sorted({arch.capability for arch in archs if arch.ptx}) or capabilities[-1:]
    flags = [f"-gencode=arch=compute_{c},code=sm_{c}" for c in capabilities]
    return flags + [f"-gencode=arch=compute_{c},code=compute_{c}" for c in with_ptx]


def family_gencode(family: Family, archs: list[Arch], for_hopper: bool = True) -> list[str]:
    """Flags for one family's units; empty when none of ``archs`` runs them."""
    match family:
        case Family.sm80:
            return plain_gencode(archs, for_hopper)
        case Family.sm90:
            wanted = any(arch.capability == HOPPER for arch in archs)
            return ["-gencode=arch=compute_90a,code=sm_90a"] if wanted else []
