"""torch's own attention by these kernels: a provider for torch's registry of flash attention.

    import flash_attn_cuda
    torch.nn.attention.activate_flash_attention_impl("flash_attn_cuda")

From then on the operators of torch's flash backend run here for CUDA tensors, and with them
F.scaled_dot_product_attention, torch.nn.attention.varlen, nested tensors and torch's context
parallelism. A call that no kernel of this installation takes goes on to torch's. Whether one does
depends on what forward and backward both see, so that they agree. Shapes are aten's: dense
operators of SDPA have (batch, heads, seqlen, head_dim), the others (batch, seqlen, heads, head_dim)
or packed (total, heads, head_dim). As there, a causal mask is aligned to the bottom right corner;
SDPA itself asks for square ones alone.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from .. import build_info
from ..call import AttentionCall, Incoming
from ..checks.tensors import CUDA_DTYPES
from ..operators.attention import backward_on, forward_on

NAME = "flash_attn_cuda"  # in torch's registry

_ROUNDED = 128  # torch's debug mask ends at a multiple of it
_MOST_HEAD_DIM, _HEAD_DIM_STEP = 256, 8


def register() -> None:
    """Makes the name known to torch; activates nothing."""
    torch.nn.attention.register_flash_attention_impl(NAME, register_fn=activate)


class Activation:
    """Holds the operators until it is removed."""

    def __init__(self, dispatch_key: str) -> None:
        self._library: torch.library.Library | None = torch.library.Library("aten", "IMPL")
        with warnings.catch_warnings():  # that there are kernels already, which is the point
            warnings.filterwarnings("ignore", message=".*[Oo]verriding a previously registered")
            for name, implementation in _OPERATORS.items():
                if not hasattr(torch.ops.aten, name):
                    continue  # younger than this torch
                other = _torchs_kernel(name, dispatch_key)
                self._library.impl(name, implementation(other), dispatch_key, with_keyset=True)

    def remove(self) -> None:
        """Gives the operators back to torch."""
        self._library = None


def activate(dispatch_key: str = "CUDA") -> Activation:
    """What torch's registry calls; another key than CUDA is for tests."""
    if dispatch_key == "CUDA" and build_info.extension is None:
        raise RuntimeError(f"{NAME}: {build_info.cuda_unavailable_reason()}")
    return Activation(dispatch_key)


Kernel = Callable[..., Any]


def _torchs_kernel(name: str, dispatch_key: str) -> Kernel:
    """(keyset, *args, **kwargs): what ran before; refuses where nothing did."""
    try:
        return torch.library.get_kernel(f"aten::{name}", dispatch_key).call_boxed
    except RuntimeError:

        def refuse(*_: Any, **__: Any) -> Any:
            raise NotImplementedError(f"aten::{name}: torch has no kernel for {dispatch_key}")

        return refuse


# -- which calls ---------------------------------------------------------------------------------


def _takes(query: Tensor, key: Tensor, value: Tensor, dropout_p: float) -> bool:
    """Whether both passes are there for a call."""
    head_dim = query.shape[-1]
    return (
        query.dtype in CUDA_DTYPES
        and key.dtype == value.dtype == query.dtype
        and query.stride(-1) == key.stride(-1) == value.stride(-1) == 1
        and key.shape[-1] == value.shape[-1] == head_dim
        and head_dim % _HEAD_DIM_STEP == 0
        and 0 < head_dim <= _MOST_HEAD_DIM
        and (
            not query.is_cuda
            or _has_kernels(query.device.index, query.dtype, head_dim, dropout_p > 0.0)
        )
    )


def _takes_forward(args: tuple[Any, ...], options: dict[str, Any]) -> bool:
    """Of _flash_attention_forward's arguments."""
    query, key, value, cum_seq_q, _, _, _, dropout_p, *_ = args
    is_dense = cum_seq_q is None
    has_lengths = any(options.get(x) is not None for x in ("seqused_k", "block_table"))
    return not (is_dense and has_lengths) and _takes(query, key, value, dropout_p)


@cache
def _has_kernels(device: int, dtype: torch.dtype, head_dim: int, drops: bool) -> bool:
    if build_info.extension is None:
        return False
    name = "fp16" if dtype == torch.float16 else "bf16"
    shape = (name, head_dim, 1, 128, 128, 1, 1, True, device)
    p_dropout = 0.5 if drops else 0.0
    try:
        build_info.extension.explain_forward(*shape, p_dropout=p_dropout)
        build_info.extension.explain_backward(*shape, p_dropout=p_dropout)
    except RuntimeError:
        return False
    return True


# -- the operators -------------------------------------------------------------------------------


def _forward(call: AttentionCall, return_debug_mask: bool) -> tuple[Tensor, ...]:
    """(out, softmax_lse, rng_state, unused, debug_attn_mask)."""
    q = call.q
    call.return_softmax = return_debug_mask and call.dropout_p > 0.0
    out, softmax_lse, s_dmask, rng_state = forward_on(call)
    if call.dropout_p > 0.0:
        rng_state = rng_state.view(torch.uint64)
    else:
        rng_state = torch.empty(2, dtype=torch.uint64, device=q.device)
    if call.return_softmax:
        s_dmask = torch.nn.functional.pad(
            s_dmask, (0, -s_dmask.shape[-1] % _ROUNDED, 0, -s_dmask.shape[-2] % _ROUNDED)
        )
    unused = torch.empty((), dtype=torch.uint64, device=q.device)
    return out, softmax_lse, rng_state, unused, s_dmask


def _described(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqused_k: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> AttentionCall:
    is_packed = cum_seq_q is not None
    return AttentionCall(
        query,
        key,
        value,
        dropout_p=dropout_p,
        softmax_scale=scale,
        causal=is_causal,
        window_size_left=-1 if window_size_left is None else window_size_left,
        window_size_right=-1 if window_size_right is None else window_size_right,
        alibi_slopes=alibi_slopes,
        cu_seqlens_q=cum_seq_q,
        cu_seqlens_k=cum_seq_k,
        seqused_k=seqused_k,
        max_seqlen_q=max_q if is_packed else 0,
        max_seqlen_k=max_k if is_packed else 0,
        block_table=block_table,
        num_splits=num_splits or 0,
    )


def _flash_attention_forward(other: Kernel) -> Kernel:
    def forward(keyset: Any, *args: Any, **options: Any) -> Any:
        if not _takes_forward(args, options):
            return other(keyset, *args, **options)
        *of_call, return_debug_mask = args
        return _forward(_described(*of_call, **options), return_debug_mask)

    return forward


def _flash_attention_forward_no_dropout_inplace(other: Kernel) -> Kernel:
    def forward(keyset: Any, out: Tensor, *args: Any, **options: Any) -> Any:
        if out.stride(-1) != 1 or not _takes_forward(args, options):
            return other(keyset, out, *args, **options)
        call = _described(*args[:-1], **options)
        call.out = out
        return forward_on(call)[1]

    return forward


def _flash_attention_backward(other: Kernel) -> Kernel:
    def backward(
        keyset: Any,
        grad_out: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        logsumexp: Tensor,
        cum_seq_q: Tensor | None,
        cum_seq_k: Tensor | None,
        max_q: int,
        max_k: int,
        dropout_p: float,
        is_causal: bool,
        rng_state: Tensor,
        unused: Tensor,
        **options: Any,
    ) -> Any:
        if not _takes(query, key, value, dropout_p):
            of_forward = (query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k)
            rest = (dropout_p, is_causal, rng_state, unused)
            return other(keyset, grad_out, *of_forward, *rest, **options)
        lengths = (cum_seq_q, cum_seq_k, max_q, max_k)
        call = _described(query, key, value, *lengths, dropout_p, is_causal, **options)
        targets = (torch.empty_like(query), torch.empty_like(key), torch.empty_like(value))
        return _backward(call, grad_out, out, logsumexp, rng_state, *targets)

    return backward


def _backward(
    call: AttentionCall,
    grad_out: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    rng_state: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    call.deterministic = torch.are_deterministic_algorithms_enabled()
    state = rng_state.view(torch.int64) if call.dropout_p > 0.0 else None
    backward_on(call, Incoming(grad_out, None, out, logsumexp, state, dq=dq, dk=dk, dv=dv))
    return dq, dk, dv


def _sdpa_forward(other: Kernel) -> Kernel:
    def forward(
        keyset: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        return_debug_mask: bool = False,
        *,
        scale: float | None = None,
    ) -> Any:
        if not _takes(query, key, value, dropout_p):
            options = (dropout_p, is_causal, return_debug_mask)
            return other(keyset, query, key, value, *options, scale=scale)
        out = torch.empty_like(query)  # with its strides, as compilers expect
        call = AttentionCall(
            query.transpose(1, 2),
            key.transpose(1, 2),
            value.transpose(1, 2),
            dropout_p=dropout_p,
            softmax_scale=scale,
            causal=is_causal,
            out=out.transpose(1, 2),
        )
        _, softmax_lse, rng_state, unused, debug = _forward(call, return_debug_mask)
        lengths = (None, None, query.shape[2], key.shape[2])
        return out, softmax_lse, *lengths, rng_state, unused, debug

    return forward


def _sdpa_backward(other: Kernel) -> Kernel:
    def backward(
        keyset: Any,
        grad_out: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        logsumexp: Tensor,
        cum_seq_q: Tensor | None,
        cum_seq_k: Tensor | None,
        max_q: int,
        max_k: int,
        dropout_p: float,
        is_causal: bool,
        philox_seed: Tensor,
        philox_offset: Tensor,
        *,
        scale: float | None = None,
    ) -> Any:
        if not _takes(query, key, value, dropout_p):
            lengths = (cum_seq_q, cum_seq_k, max_q, max_k)
            of_forward = (query, key, value, out, logsumexp, *lengths, dropout_p, is_causal)
            random = (philox_seed, philox_offset)
            return other(keyset, grad_out, *of_forward, *random, scale=scale)
        call = AttentionCall(
            query.transpose(1, 2),
            key.transpose(1, 2),
            value.transpose(1, 2),
            dropout_p=dropout_p,
            softmax_scale=scale,
            causal=is_causal,
        )
        gradients = (torch.empty_like(query), torch.empty_like(key), torch.empty_like(value))
        targets = (x.transpose(1, 2) for x in gradients)
        results = (grad_out.transpose(1, 2), out.transpose(1, 2), logsumexp, philox_seed)
        _backward(call, *results, *targets)
        return gradients

    return backward


_OPERATORS: dict[str, Callable[[Kernel], Kernel]] = {
    "_flash_attention_forward": _flash_attention_forward,
    "_flash_attention_forward_no_dropout_inplace": _flash_attention_forward_no_dropout_inplace,
    "_flash_attention_backward": _flash_attention_backward,
    "_scaled_dot_product_flash_attention": _sdpa_forward,
    "_scaled_dot_product_flash_attention_backward": _sdpa_backward,
}
