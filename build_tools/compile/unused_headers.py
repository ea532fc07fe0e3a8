"""Empty files in place of headers of CuTe that no kernel of a family uses.

``cute/tensor.hpp`` brings the instructions of every GPU that CUTLASS knows, which the compiler
reads three times a unit, for the host, for each architecture and for the host again: without
them that takes 12 CPU-seconds and not 17. Kernels are the same without them.
"""

from __future__ import annotations

from pathlib import Path

from kernel_table.row import Family

# Of Blackwell GPUs, and by them of sparse products.
_BLACKWELL = (
    "cute/atom/copy_traits_sm100.hpp",
    "cute/atom/mma_traits_sm100.hpp",
    "cute/atom/mma_traits_sm120.hpp",
    "cute/atom/mma_traits_sm120_sparse.hpp",
)
# mma.sync of other GPUs and of other types, and wgmma.
_NOT_SM80 = (
    "cute/atom/mma_traits_sm61.hpp",
    "cute/atom/mma_traits_sm70.hpp",
    "cute/atom/mma_traits_sm89.hpp",
    "cute/atom/mma_traits_sm90.hpp",
    "cute/atom/mma_traits_sm90_gmma.hpp",
)
UNUSED = {Family.sm80: (*_BLACKWELL, *_NOT_SM80), Family.sm90: _BLACKWELL}
TEXT = "// Empty: see build_tools/compile/unused_headers.py.\n"


def write(folder: Path) -> dict[Family, Path]:
    """Writes them below ``folder``; for each family what to search before CUTLASS's own."""
    for family, names in UNUSED.items():
        for name in names:
            header = folder / family.value / name
            if not header.is_file():  # one that is written again is newer than every object
                header.parent.mkdir(parents=True, exist_ok=True)
                header.write_text(TEXT)
    return {family: folder / family.value for family in UNUSED}
