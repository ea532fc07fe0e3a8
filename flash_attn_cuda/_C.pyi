"""The compiled extension, whose documentation is in csrc/torch_binding/module.cpp.

Written by build_tools/generate_stub.py.
"""

from typing import Any

from torch import Generator, Tensor, dtype

from .call import AttentionCall, Gradients, Incoming, Results

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
def fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor | None,
    alibi_slopes: Tensor | None,
    p_dropout: float,
    softmax_scale: float,
    is_causal: bool,
    window_left: int,
    window_right: int,
    softcap: float,
    return_softmax: bool,
    unused_generator: Generator | None,
) -> list[Tensor]: ...
def varlen_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None,
    seqused_k: Tensor | None,
    leftpad_k: Tensor | None,
    block_table: Tensor | None,
    alibi_slopes: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    p_dropout: float,
    softmax_scale: float,
    zero_tensors: bool,
    is_causal: bool,
    window_left: int,
    window_right: int,
    softcap: float,
    return_softmax: bool,
    unused_generator: Generator | None,
    num_splits: int = 0,
) -> list[Tensor]: ...
def bwd(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    alibi_slopes: Tensor | None,
    p_dropout: float,
    softmax_scale: float,
    is_causal: bool,
    window_left: int,
    window_right: int,
    softcap: float,
    deterministic: bool,
    unused_generator: Generator | None,
    rng_state: Tensor | None,
) -> list[Tensor]: ...
def varlen_bwd(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    alibi_slopes: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    p_dropout: float,
    softmax_scale: float,
    zero_tensors: bool,
    is_causal: bool,
    window_left: int,
    window_right: int,
    softcap: float,
    deterministic: bool,
    unused_generator: Generator | None,
    rng_state: Tensor | None,
) -> list[Tensor]: ...
def fwd_kvcache(
    q: Tensor,
    kcache: Tensor,
    vcache: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    seqlens_k: Tensor | None,
    rotary_cos: Tensor | None,
    rotary_sin: Tensor | None,
    cache_batch_idx: Tensor | None,
    leftpad_k: Tensor | None,
    block_table: Tensor | None,
    alibi_slopes: Tensor | None,
    out: Tensor | None,
    softmax_scale: float,
    is_causal: bool,
    window_left: int,
    window_right: int,
    softcap: float,
    is_rotary_interleaved: bool,
    num_splits: int,
) -> list[Tensor]: ...
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
) -> dict[str, Any]: ...
def explain_backward(
    call: AttentionCall,
    device: int | None = None,
) -> dict[str, Any]: ...
def explain_settings(call: AttentionCall) -> list[dict[str, Any]]: ...
def forward_instances() -> list[str]: ...
def backward_instances() -> list[str]: ...
def build_record() -> str: ...
