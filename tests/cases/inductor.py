"""Whether torch's inductor can compile here."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path


def has_python_headers() -> bool:
    """Triton, inductor's code generator on GPUs, compiles a C file against them."""
    folders = [sysconfig.get_paths()["include"], *os.environ.get("CPATH", "").split(os.pathsep)]
    return any(Path(folder, "Python.h").exists() for folder in folders if folder)
