"""Attention for PyTorch on CUDA devices, with a CPU backend that computes the same.

The public functions are those of FlashAttention-2, with its names and parameters.
"""

__version__ = "0.1.0"

from . import ops
from .build_info import compiled_rows, cuda_unavailable_reason
from .interface import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)

__all__ = [
    "compiled_rows",
    "cuda_unavailable_reason",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "ops",
]
