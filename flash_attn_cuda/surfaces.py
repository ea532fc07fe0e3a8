"""Modules of integrations that users may import as flash_attn_cuda.surfaces.<name>."""

import sys

from .integrations import (
    flash_attention_3,
    flash_attention_4,
    flash_mla,
    flashinfer_mla,
    ring_flash_attn,
)

for _module in (flash_attention_3, flash_attention_4, flash_mla, flashinfer_mla, ring_flash_attn):
    sys.modules[f"{__name__}.{_module.__name__.rpartition('.')[2]}"] = _module
