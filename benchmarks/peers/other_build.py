"""Another build of this package's extension as a contender: what a change of kernels costs or gains
shows only where both builds take turns on one GPU.

FLASH_ATTN_CUDA_OTHER_BUILD names its library, flash_attn_cuda/_C.*.so of another checkout. Of that
`attention` alone is called, which every build has: plain calls, full and causal.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from functools import cache
from typing import Any

LIBRARY_VARIABLE = "FLASH_ATTN_CUDA_OTHER_BUILD"


@cache
def other_attention() -> Callable[..., Any]:
    """(q, k, v, softmax_scale, causal) to (out, softmax_lse). Raises ImportError, which says what
    is missing.
    """
    path = os.environ.get(LIBRARY_VARIABLE)
    if not path:
        raise ImportError(f"{LIBRARY_VARIABLE} is not set")
    # Its last component is what the library's initialisation is named after. The rest tells it from
    # this build: of a name that it knows, pybind11 returns the module that it has loaded before.
    spec = importlib.util.spec_from_file_location("other_build._C", path)
    if spec is None or spec.loader is None or not os.path.isfile(path):
        raise ImportError(f"{LIBRARY_VARIABLE}: {path} is no module of Python")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.attention
