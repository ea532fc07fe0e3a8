"""Attention for PyTorch on CUDA devices, with a CPU backend that computes the same.

The public functions are those of FlashAttention-2, with its names and parameters.
"""

__version__ = "0.1.0"

from . import masks
from .call.fp8 import quantize_kv
from .call.latent import LatentFormat, latent_views, quantize_latent
from .functions.interface import (
    check_device_errors,
    flash_attn_combine,
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)
from .functions.relative_bias import t5_relative_bias
from .installed.build_info import compiled_rows, cuda_unavailable_reason
from .integrations import sdpa as _sdpa
from .masks.sparsity import BlockSparsity
from .operators.dtensor_import import register_when_imported as _register_when_imported

__all__ = [
    "BlockSparsity",
    "LatentFormat",
    "check_device_errors",
    "compiled_rows",
    "cuda_unavailable_reason",
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "latent_views",
    "masks",
    "quantize_kv",
    "quantize_latent",
    "t5_relative_bias",
]

_sdpa.register()  # torch.nn.attention.activate_flash_attention_impl("flash_attn_cuda")
_register_when_imported()  # what the operators do with DTensors, and count for FlopCounterMode
