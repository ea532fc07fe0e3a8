"""Calls with masks, biases and sinks for the operators, small and on the CPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flash_attn_cuda import BlockSparsity
from tests.cases.operators import attention

SCALE = 0.3


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def make_inputs(
    requires_grad: bool = False, dtype: torch.dtype = torch.float64, seqlens: Any = (7, 9)
) -> list[Tensor]:
    """q (2, 7, 4, 16), k and v (2, 9, 2, 16), a bias (1, 4, 7, 9) and a sink (4,)."""
    seqlen_q, seqlen_k = seqlens
    keys = (2, seqlen_k, 2, 16)
    shapes = ((2, seqlen_q, 4, 16), keys, keys, (1, 4, seqlen_q, seqlen_k), (4,))
    return [torch.randn(shape, dtype=dtype, requires_grad=requires_grad) for shape in shapes]


def make_sparsity(seqlens: Any = (7, 9)) -> BlockSparsity:
    return BlockSparsity.from_mask(torch.rand(2, 1, *seqlens) < 0.6)


def forward_fields(
    packed: bool,
    requires_grad: bool = False,
    dtype: torch.dtype = torch.float64,
    bias_dtype: torch.dtype | None = None,
    **changes: Any,
) -> dict[str, Any]:
    """Of an AttentionCall, with everything."""
    q, k, v, bias, sink = make_inputs(requires_grad, dtype)
    bias = bias if bias_dtype is None else bias.to(bias_dtype)
    sink = sink if dtype == torch.float64 else sink.float()
    sparsity = make_sparsity()
    given = {
        "q": q, "k": k, "v": v, "softmax_scale": SCALE, "window_size_left": 5,
        "window_size_right": 2, "alibi_slopes": torch.rand(2, 4), "block_rows": sparsity.rows,
        "block_columns": sparsity.columns, "mask_bits": sparsity.bits, "bias": bias, "sink": sink,
    }  # fmt: skip
    if packed:
        given |= {name: given[name].detach().flatten(0, 1) for name in "qkv"}
        for name in "qkv":
            given[name].requires_grad_(requires_grad)
        given |= {"cu_seqlens_q": int32(0, 7, 10), "cu_seqlens_k": int32(0, 9, 17)}
        given |= {"max_seqlen_q": 7, "max_seqlen_k": 9}
        given |= {"seqused_q": int32(7, 2), "seqused_k": int32(8, 8)}
        given |= {"leftpad_k": int32(1, 0)}
    return {**given, **changes}


def backward_fields(
    packed: bool,
    dtype: torch.dtype = torch.float64,
    bias_dtype: torch.dtype | None = None,
    **changes: Any,
) -> dict[str, Any]:
    """The same and those of an Incoming."""
    given = forward_fields(packed, dtype=dtype, bias_dtype=bias_dtype, dropout_p=0.3)
    found = attention(**given)
    lse = found.softmax_lse.masked_fill(found.softmax_lse == -torch.inf, 0.0)
    incoming = {"dout": torch.randn_like(found.out), "dlse": torch.randn_like(lse)}
    results = {"out": found.out, "softmax_lse": lse, "rng_state": found.rng_state}
    results["wants_dbias"] = True
    return {**given, **incoming, **results, **changes}
