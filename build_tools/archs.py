"""Which GPU architectures to compile for, and the nvcc flags that say so."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Collection
from dataclasses import dataclass

from build_tools.kernel_row import Family

VARIABLE = "FLASH_ATTN_CUDA_ARCHS"
WITHOUT_A_GPU = "80;90a"
MINIMUM = 80
FIRST_WITH_SUFFIX = {"": MINIMUM, "a": 90, "f": 100}


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
    for entry in re.split(r"[;,\s]+", text.strip(";, \t\r\n")):
        match = re.fullmatch(r"(\d{2,3}|1?\d\.\d)([af]?)(\+PTX)?", entry)
        if not match:
            raise ArchError(f"{VARIABLE}: expected entries like 80, 90a or 80+PTX, got {entry!r}")
        number, suffix, ptx = match.groups()
        arch = Arch(int(number.replace(".", "")), suffix, ptx is not None)
        if arch.capability < MINIMUM:
            raise ArchError(f"{VARIABLE}: the kernels need capability >= {MINIMUM}, got {entry!r}")
        first = FIRST_WITH_SUFFIX[suffix]
        if arch.capability < first:
            raise ArchError(
                f"{VARIABLE}: there is a suffix {suffix} from {first} on, got {entry!r}"
            )
        archs.add(arch)
    return sorted(archs, key=lambda arch: (arch.capability, arch.suffix, arch.ptx))


def check_compilable(archs: list[Arch], capabilities: Collection[int], compiler: str) -> None:
    """Raises ArchError for an entry that ``compiler`` has no code for, as far as it tells."""
    for arch in archs:
        if capabilities and arch.capability not in capabilities:
            usable = ", ".join(str(c) for c in sorted(capabilities) if c >= MINIMUM)
            raise ArchError(f"{VARIABLE}: {compiler} compiles for {usable}, got '{arch}'")


def missing_hopper_kernels(archs: list[Arch]) -> str | None:
    """A sentence where the list has Hopper without the suffix that its kernels need, else None."""
    suffixes = {arch.suffix for arch in archs if arch.capability == 90}
    if not suffixes or "a" in suffixes:
        return None
    return f"{VARIABLE}: 90 without a: no Hopper kernels; 90a has them"


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
