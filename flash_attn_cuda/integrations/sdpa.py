"""torch's own attention by these kernels: a provider for torch's registry of flash attention.

    import flash_attn_cuda
    torch.nn.attention.activate_flash_attention_impl("flash_attn_cuda")

From then on the operators of torch's flash backend run here for CUDA tensors
(csrc/torch_binding/aten_operators.cpp), and with them F.scaled_dot_product_attention,
torch.nn.attention.varlen and nested tensors. A call that no kernel of this installation takes goes
on to torch's. As there, a causal mask of these operators is aligned to the bottom right corner;
SDPA itself asks them for square ones alone, and has no windows. window_size of varlen_attn, and
window_size_left and window_size_right of _flash_attention_forward, are as flash_attn_func's: any
negative number or None for unlimited, each side on its own, 0 for nothing beyond the diagonal.
varlen_attn takes no None, and (-1, 0) as causal.
"""

from __future__ import annotations

import warnings

import torch

from ..installed import build_info

NAME = build_info.PACKAGE  # in torch's registry


class Activation:
    """Holds the operators until it is removed. One at a time: torch's registry removes the last."""

    def __init__(self) -> None:
        if build_info.extension is None:
            raise RuntimeError(f"{NAME}: {build_info.cuda_unavailable_reason()}")
        with warnings.catch_warnings():  # that there are kernels already, which is the point
            warnings.filterwarnings("ignore", message=".*verriding a previously registered kernel")
            build_info.extension.take_aten_operators()

    def remove(self) -> None:
        """Gives the operators back to torch."""
        if build_info.extension is not None:
            build_info.extension.give_back_aten_operators()


def register() -> None:
    """Makes the name known to torch; activates nothing."""
    torch.nn.attention.register_flash_attention_impl(NAME, register_fn=Activation)
