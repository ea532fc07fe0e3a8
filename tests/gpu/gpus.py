"""Which GPUs a process uses, where several share the work."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

import torch


def visible_gpus() -> list[str]:
    """As CUDA_VISIBLE_DEVICES names them. Does not start CUDA."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return named.split(",") if named else [str(i) for i in range(torch.cuda.device_count())]


def gpus_of_worker(worker: str, gpus: Sequence[str]) -> list[str]:
    """All of them, in an order in which consecutive workers (gw0, gw1, ...) have another first."""
    number = re.fullmatch(r"gw(\d+)", worker)
    if number is None:
        raise ValueError(f"worker must be gw and a number, got {worker!r}")
    first = int(number[1]) % len(gpus)
    return [*gpus[first:], *gpus[:first]]
