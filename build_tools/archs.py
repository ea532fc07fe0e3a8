"""Which GPU architectures to compile for, and the nvcc flags that say so."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass

from build_tools.kernel_row import Family

VARIABLE = "FLASH_ATTN_CUDA_ARCHS"
WITHOUT_A_GPU = "80;90a"
MINIMUM = 80


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


def parse_archs(text: str) -> list[Arch]:
    """``"80;90a"``, ``"8.0;9.0a+PTX"`` or ``"80+PTX"`` to entries in rising order.

    Raises ArchError, naming the entry, for one that cannot be read or that no kernel runs on.
    """
    archs = set()
    for entry in re.split(r"[;,\s]+", text.strip()):
        match = re.fullmatch(r"(\d+)\.?(\d)([af]?)(\+PTX)?", entry)
        if not match:
            raise ArchError(f"{VARIABLE}: expected entries like 80, 90a or 80+PTX, got {entry!r}")
        major, minor, suffix, ptx = match.groups()
        arch = Arch(int(major + minor), suffix, ptx is not None)
        if arch.capability < MINIMUM:
            raise ArchError(f"{VARIABLE}: the kernels need capability >= {MINIMUM}, got {entry!r}")
        archs.add(arch)
    return sorted(archs, key=lambda arch: (arch.capability, arch.suffix, arch.ptx))


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


def default_archs() -> str:
    """The archs of the GPUs present that the kernels can run on, else one of each family."""
    present = set(_capabilities_from_torch() or _capabilities_from_driver())
    usable = sorted(capability for capability in present if capability >= MINIMUM)
    return ";".join("90a" if c == 90 else str(c) for c in usable) or WITHOUT_A_GPU


def plain_gencode(archs: list[Arch]) -> list[str]:
    """Flags for code that runs on every listed arch, and for PTX of the highest one.

    The PTX serves GPUs that come later. An entry's ``+PTX`` asks for its PTX instead.
    """
    capabilities = sorted({arch.capability for arch in archs})
    with_ptx = sorted({arch.capability for arch in archs if arch.ptx}) or capabilities[-1:]
    flags = [f"-gencode=arch=compute_{c},code=sm_{c}" for c in capabilities]
    return flags + [f"-gencode=arch=compute_{c},code=compute_{c}" for c in with_ptx]


def family_gencode(family: Family, archs: list[Arch]) -> list[str]:
    """Flags for one family's units; empty when none of ``archs`` can run the family."""
    match family:
        case Family.sm80:
            return plain_gencode(archs)
        case Family.sm90:
            wanted = any(arch.capability == 90 and arch.suffix == "a" for arch in archs)
            return ["-gencode=arch=compute_90a,code=sm_90a"] if wanted else []
