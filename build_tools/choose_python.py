"""Prints the Python to install into: the active one if it has torch, else that of .venv."""

import sys
import sysconfig
from importlib.util import find_spec
from pathlib import Path

# Debian and others mark the system's Python so: pip refuses to install there (PEP 668).
marker = Path(sysconfig.get_path("stdlib")) / "EXTERNALLY-MANAGED"
in_environment = sys.prefix != sys.base_prefix
usable = find_spec("torch") is not None and (in_environment or not marker.exists())
print(sys.executable if usable else ".venv/bin/python")
