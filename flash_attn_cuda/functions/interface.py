"""The public functions: FlashAttention-2's names, parameters and semantics, on CUDA and CPU.

The maths is that of Dao et al., "FlashAttention" (2022, section 3.1) and Dao, "FlashAttention-2"
(2023, section 3.1): for every batch and head, softmax(softmax_scale * q k^T + mask) v, without
storing the scores. Each function describes its call (call/fields.py), and all descriptions go one
way (attend.py).
"""

from ..installed.device_errors import check_device_errors
from .dense import flash_attn_func, flash_attn_kvpacked_func, flash_attn_qkvpacked_func
from .kvcache import flash_attn_combine, flash_attn_with_kvcache
from .private import (
    _flash_attn_backward,
    _flash_attn_forward,
    _flash_attn_varlen_backward,
    _flash_attn_varlen_forward,
)
from .varlen import (
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)

__all__ = [
    "_flash_attn_backward",
    "_flash_attn_forward",
    "_flash_attn_varlen_backward",
    "_flash_attn_varlen_forward",
    "check_device_errors",
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]
