"""What a call of given shapes would run: `python -m flash_attn_cuda --explain`, and tests.

The call has tensors without memory and goes the way of a call that runs, up to the plan.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from ..call.fields import AttentionCall
from ..call.rules import TILE
from ..installed import build_info

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


def explain(kernel_pass: str, call: AttentionCall, device: int | None = None) -> dict[str, Any]:
    """The plan of a "forward", a "backward", a "jvp" or an "hvp": a dict of instance, config (its
    row of the build record), grid and others, as csrc/torch_binding/module.cpp says. RuntimeError
    where no compiled kernel serves the call.
    """
    extension: Any = build_info.extension
    is_forward = kernel_pass in ("forward", "jvp")
    of_pass = extension.explain_forward if is_forward else extension.explain_backward
    plan = of_pass(call, device, kernel_pass in ("jvp", "hvp"))
    rows = {row["name"]: row for row in build_info.build_record()["instances"]}
    return {**plan, "config": rows[plan["instance"]]}


def call_of_torch(operator: OpOverload, *given: Any, **options: Any) -> AttentionCall | None:
    """The call that is run where an operator of torch, as torch.ops.aten._flash_attention_forward
    .default, is taken (integrations/sdpa.py) and has these arguments, on any device. None: it is
    left to torch.
    """
    extension: Any = build_info.extension
    further = operator._schema.arguments[len(given) :]
    arguments = (*given, *(options.get(x.name, x.default_value) for x in further))
    name = operator._schema.name.removeprefix("aten::")
    fields = extension.explain_aten_operator(name, arguments)
    return None if fields is None else AttentionCall(**fields)


def call_of_shapes(
    *,
    dtype: str,
    head_dim: int,
    batch_size: int,
    seqlen_q: int,
    seqlen_k: int,
    num_heads_q: int,
    num_heads_k: int,
    head_dim_v: int | None = None,
    packed: bool = False,
    alibi: bool = False,
    block_sparse: bool = False,
    bias: bool = False,
    page_size: int = 0,
    lengths_on_device: bool = False,
    e4m3: bool = False,
    fp8_products: bool = False,
    qv: bool = False,
    keys_per_list: int = 0,
    **options: Any,
) -> AttentionCall:
    """A call with tensors of these shapes and no memory; `options` are numbers of an AttentionCall.

    packed: seqlen_q and seqlen_k are totals. page_size 0: not paged; else, as with
    lengths_on_device, the call is over a cache, of seqlen_k rows a sequence, unless it is packed.
    e4m3: keys and values are of that dtype. fp8_products: queries as well. qv: there is one, and a
    scale, whatever it is. keys_per_list 0: without key_lists.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype: must be 'fp16' or 'bf16', got {dtype!r}")
    if page_size < 0:
        raise ValueError(f"page_size: must not be negative, got {page_size}")
    over_cache = not packed and (lengths_on_device or page_size > 0)
    head_dim_v = head_dim if head_dim_v is None else head_dim_v
    if not over_cache:  # as the public functions pad them
        head_dim, head_dim_v = (-(-size // 8) * 8 for size in (head_dim, head_dim_v))
    pages = -(-seqlen_k // page_size) if page_size > 0 else 0
    rows_q = (seqlen_q,) if packed else (batch_size, seqlen_q)
    rows_k = (seqlen_k,) if packed else (batch_size, seqlen_k)
    rows_k = (batch_size * pages, page_size) if page_size > 0 else rows_k

    def tensor(*shape: int, dtype: torch.dtype = DTYPES[dtype]) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    def integers(*shape: int) -> Tensor:
        return tensor(*shape, dtype=torch.int32)

    given: dict[str, Any] = {"over_cache": over_cache, **options}
    if packed:
        given["cu_seqlens_q"] = integers(batch_size + 1)
        if page_size == 0:
            given["cu_seqlens_k"] = integers(batch_size + 1)
    if lengths_on_device or page_size > 0:
        given["seqused_k"] = integers(batch_size)
    if page_size > 0:
        given["block_table"] = integers(batch_size, pages)
    if alibi:
        given["alibi_slopes"] = tensor(num_heads_q, dtype=torch.float32)
    if block_sparse:
        tiles_q, tiles_k = (-(-seqlen // TILE) for seqlen in (seqlen_q, seqlen_k))
        given["block_rows"] = integers(1, 1, tiles_q, 2 + tiles_k)
        given["block_columns"] = integers(1, 1, tiles_k, 2 + tiles_q)
    e4m3 = e4m3 or fp8_products
    if e4m3:
        given["k_descale"] = given["v_descale"] = tensor(num_heads_k, dtype=torch.float32)
    if fp8_products:
        given["q_descale"], given["out_is_half"] = given["k_descale"], dtype == "fp16"
    if qv:
        given["qv"] = tensor(*rows_q, num_heads_q, head_dim_v)
        if given.get("softmax_scale") is None:
            given["softmax_scale"] = 1.0
    if keys_per_list > 0:
        given["key_lists"] = integers(*rows_q, num_heads_k, keys_per_list)
    if bias:
        given["bias"] = tensor(1, num_heads_q, seqlen_q, seqlen_k)
    of_keys = torch.float8_e4m3fn if e4m3 else DTYPES[dtype]
    of_queries = of_keys if fp8_products else DTYPES[dtype]
    return AttentionCall(
        tensor(*rows_q, num_heads_q, head_dim, dtype=of_queries),
        tensor(*rows_k, num_heads_k, head_dim, dtype=of_keys),
        tensor(*rows_k, num_heads_k, head_dim_v, dtype=of_keys),
        **given,
    )
