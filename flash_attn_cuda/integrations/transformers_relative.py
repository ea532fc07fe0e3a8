"""Relative position biases of T5, mT5 and UMT5, for transformers.py: of the tensor over all pairs
that their layers make, here is the table that it repeats.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Collection
from typing import Any

from torch import Tensor, nn

from ..functions.relative_bias import t5_relative_bias

_LAYERS = ("T5Attention", "MT5Attention", "UMT5Attention")
_TABLE_DIMS = 3  # (1, heads, 2 * reach + 1), where a tensor over pairs has four dimensions


def make_tables(model: Any, registered: Collection[str]) -> None:
    """Lets layers of the model's family make tables where their attention is a `registered` one."""
    module = sys.modules[type(model).__module__]
    if not hasattr(module, "ALL_ATTENTION_FUNCTIONS"):
        return  # an older one, whose layers have an attention of their own
    for name in _LAYERS:
        layer = getattr(module, name, None)
        original = getattr(layer, "compute_bias", None)
        if layer is not None and not getattr(original, "_knows_flash_attn_cuda", False):
            layer.compute_bias = _with_tables(original, registered)


def _with_tables(original: Any, registered: Collection[str]) -> Any:
    @functools.wraps(original)
    def compute_bias(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        if self.config._attn_implementation not in registered:
            return original(self, *args, **kwargs)
        table = t5_relative_bias(
            self.relative_attention_bias.weight,
            bidirectional=not self.is_decoder,
            max_distance=self.relative_attention_max_distance,
        )
        return table[None]

    compute_bias._knows_flash_attn_cuda = True  # type: ignore[attr-defined]
    return compute_bias


def relative_bias_of(module: nn.Module, position_bias: Tensor | None) -> Tensor | None:
    """flash_attn_func's relative_bias. Attention to an encoder has zeros.

    Raises:
        NotImplementedError: position_bias is a tensor over pairs that may be something else.
    """
    if position_bias is None:
        return None
    if position_bias.dim() == _TABLE_DIMS:
        return position_bias[0]
    if type(module).__name__ in _LAYERS and not _attends_to_itself(module):
        return None
    raise NotImplementedError(
        "position_bias: must be that of T5, mT5 or UMT5, as others are not implemented by "
        f"flash_attn_cuda, got shape {tuple(position_bias.shape)} from {type(module).__name__}"
    )


def _attends_to_itself(module: Any) -> bool:
    return bool(module.is_causal or not module.is_decoder)
