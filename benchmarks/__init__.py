"""Programs that measure this package beside others: ``python -m benchmarks.suites.grid --help``."""

import sys
from pathlib import Path

# ``python -m`` puts this folder first on the path. It goes last, so that an installed
# flash_attn_cuda, or one on PYTHONPATH, is the one that is measured.
_ROOT = str(Path(__file__).resolve().parents[1])
sys.path[:] = [folder for folder in sys.path if Path(folder).resolve() != Path(_ROOT)] + [_ROOT]
