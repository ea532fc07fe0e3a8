"""The compiled extension: csrc/torch_binding/module.cpp has its documentation."""

from typing import Any

from torch import Generator, Tensor

def attention(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None, causal: bool
) -> tuple[Tensor, Tensor]: ...
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
    dlse: Tensor | None = None,
) -> list[Tensor]: ...
def explain_forward(
    dtype: str,
    head_dim: int,
    batch_size: int,
    seqlen_q: int,
    seqlen_k: int,
    num_heads_q: int,
    num_heads_k: int,
    causal: bool,
    device: int | None = None,
) -> dict[str, Any]: ...
def explain_backward(
    dtype: str,
    head_dim: int,
    batch_size: int,
    seqlen_q: int,
    seqlen_k: int,
    num_heads_q: int,
    num_heads_k: int,
    causal: bool,
    device: int | None = None,
) -> dict[str, Any]: ...
def forward_instances() -> list[str]: ...
def backward_instances() -> list[str]: ...
def build_record() -> str: ...
