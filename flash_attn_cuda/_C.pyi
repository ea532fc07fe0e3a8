"""The compiled extension, whose documentation is in csrc/torch_binding/module.cpp.

Written by build_tools/generate_stub.py.
"""

from typing import Any

from torch import Tensor, dtype

from .call import AttentionCall, Gradients, Incoming, Results, Tangents

def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None,
    causal: bool,
    returns_lse: bool = True,
) -> tuple[Tensor, Tensor | None]: ...
def forward(call: AttentionCall, returns_lse: bool = True) -> Results: ...
def backward(call: AttentionCall, incoming: Incoming) -> Gradients: ...
def jvp(
    call: AttentionCall,
    incoming: Incoming,
    tangents: Tangents,
) -> tuple[Tensor, Tensor, Tensor]: ...
def hvp(call: AttentionCall, incoming: Incoming, tangents: Tangents) -> Gradients: ...
def combine(
    out_partial: Tensor,
    lse_partial: Tensor,
    out: Tensor | None = None,
    out_dtype: dtype | None = None,
) -> list[Tensor]: ...
def merge(
    out: Tensor,
    softmax_lse: Tensor,
    part: Tensor,
    part_lse: Tensor,
    result: Tensor | None = None,
    rounding: Tensor | None = None,
) -> None: ...
def rotary(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    seqlen_offset: int,
    seqlen_offsets: Tensor | None,
    cu_seqlens: Tensor | None,
    interleaved: bool,
    inplace: bool,
    conjugate: bool,
) -> Tensor: ...
def take_aten_operators() -> None: ...
def give_back_aten_operators() -> None: ...
def device_errors(device: int | None = None) -> tuple[str, int, int, int] | None: ...
def explain_forward(
    call: AttentionCall,
    device: int | None = None,
    tangents: bool = False,
) -> dict[str, Any]: ...
def explain_backward(
    call: AttentionCall,
    device: int | None = None,
    tangents: bool = False,
) -> dict[str, Any]: ...
def explain_settings(call: AttentionCall) -> list[dict[str, Any]]: ...
def explain_aten_operator(
    name: str,
    arguments: tuple[Any, ...],
) -> dict[str, Any] | None: ...
def forward_instances() -> list[str]: ...
def backward_instances() -> list[str]: ...
def build_record() -> str: ...
def fwd(*arguments: Any, **named: Any) -> list[Tensor]: ...
def varlen_fwd(*arguments: Any, **named: Any) -> list[Tensor]: ...
def bwd(*arguments: Any, **named: Any) -> list[Tensor]: ...
def varlen_bwd(*arguments: Any, **named: Any) -> list[Tensor]: ...
def fwd_kvcache(*arguments: Any, **named: Any) -> list[Tensor]: ...
