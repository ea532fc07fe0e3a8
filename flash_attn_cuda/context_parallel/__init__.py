"""One sequence over many GPUs: attention whose queries, keys and values each rank has a part of."""

from .parallel import ContextParallel
from .plan import Band, Piece, Plan

__all__ = ["Band", "ContextParallel", "Piece", "Plan"]
