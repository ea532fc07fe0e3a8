"""FlashAttention-3's private functions, which others build on: its names, arguments and order.

The signatures are those of flash_attn_interface's operators, from the commit that
flash_attention_3.py names, which says what options are. Calls as before they were operators are
answered as then: window_size is a pair, in the place of window_size_left and window_size_right or
by name; out_ of the forward is out; is_causal of the backward is causal, and its results are dq,
dk, dv and softmax_d. A compiler, and torch.export, sees the operators of operators/attention.py.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from ..call.tensors import E4M3, check_like, check_tensor
from ..call.window import window_bounds
from ..functions import private
from .flash_attention_3_kvcache import flash_attn_with_kvcache
from .sequences import (
    REFUSALS,
    attend_sequences,
    packed,
    packed_beside,
    packed_keys,
    refuse_fp8,
    refuse_given,
    renamed,
    scales_of,
    splits_of,
    with_no_partials,
)

__all__ = ["_flash_attn_backward", "_flash_attn_forward"]

Function = Callable[..., Any]
Forward = tuple[Tensor, Tensor, Tensor, Tensor]
# What flash_attn_with_kvcache, which a call may need, knows arguments as.
_NAMES_OF_CACHE = {"k": "k_new", "v": "v_new", "k_cache": "k", "v_cache": "v"}
_NAMES_OF_CACHE |= {"cache_seqlens": "seqused_k", "cache_batch_idx": "kv_batch_idx"}
_NAMES_OF_CACHE |= {"cache_leftpad": "leftpad_k", "rotary_seqlens": "seqlens_rotary"}


def _as_before(answer: Function, **new_names: str) -> Callable[[Function], Function]:
    """Decorates a function that may also be called as before it was an operator: `answer` calls it
    with the arguments that it has now.
    """

    def decorate(function: Function) -> Function:
        place = list(inspect.signature(function).parameters).index("window_size_left")

        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            is_before = False
            if len(args) > place and not isinstance(args[place], (int, torch.SymInt)):
                args = (*args[:place], *window_bounds(args[place]), *args[place + 1 :])
                is_before = True
            elif "window_size" in kwargs:
                left, right = window_bounds(kwargs.pop("window_size"))
                kwargs |= {"window_size_left": left, "window_size_right": right}
                is_before = True
            for old, new in new_names.items():
                if old in kwargs:
                    kwargs[new] = kwargs.pop(old)
                    is_before = True
            return (answer if is_before else _called)(function, *args, **kwargs)

        return call

    return decorate


def _called(function: Function, *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


def _with_gradients(function: Function, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    """(dq, dk, dv, softmax_d) of a backward, which are made where they are not given."""
    given = inspect.signature(function).bind(*args, **kwargs).arguments
    for name in "qkv":
        if given.get(f"d{name}") is None:
            given[f"d{name}"] = torch.empty_like(given[name])
    softmax_d = function(**given)
    return given["dq"], given["dk"], given["dv"], softmax_d


@_as_before(_called, out="out_")
def _flash_attn_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_new: Tensor | None = None,
    v_new: Tensor | None = None,
    qv: Tensor | None = None,
    out_: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    max_seqlen_q: int | Tensor | None = None,
    max_seqlen_k: int | Tensor | None = None,
    page_table: Tensor | None = None,
    kv_batch_idx: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    seqlens_rotary: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Tensor | None = None,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> Forward:
    """Any forward: of sequences of one length, packed, in pages, or over a cache.

    q is (batch, seqlen_q, heads_q, head_dim), or with cu_seqlens_q packed, and so are k and v with
    cu_seqlens_k; with a page_table they are pages. With k_new, kv_batch_idx or leftpad_k they are a
    cache that holds seqused_k keys of each sequence, and arguments are those of
    flash_attn_with_kvcache, k_new and v_new its k and v.

    Returns out, which is out_ where that is given, softmax_lse (batch, heads_q, seqlen_q) or
    (heads_q, total_q), and two empty tensors, as flash_attn_with_kvcache. Differentiable in q, k
    and v through both, but over pages and a cache.

    Raises as flash_attn_interface's functions. NotImplementedError: cu_seqlens_k or seqused_q
    with what is of a cache.
    """
    window_size = (window_size_left, window_size_right)
    options: dict[str, Any] = {"softmax_scale": softmax_scale, "causal": causal}
    options |= {"window_size": window_size, "softcap": softcap, "attention_chunk": attention_chunk}
    of_cache: dict[str, Any] = {"k": k_new, "v": v_new, "cu_seqlens_k_new": cu_seqlens_k_new}
    of_cache |= {"cache_batch_idx": kv_batch_idx, "cache_leftpad": leftpad_k}
    of_cache |= {"rotary_cos": rotary_cos, "rotary_sin": rotary_sin}
    of_cache |= {"rotary_seqlens": seqlens_rotary}
    if all(x is None for x in of_cache.values()):
        refuse_fp8(E4M3, q=q, k=k, v=v)
        out, softmax_lse = attend_sequences(
            q,
            k,
            v,
            cu_seqlens_q,
            cu_seqlens_k,
            max_seqlen_q,
            max_seqlen_k,
            seqused_q=seqused_q,
            seqused_k=seqused_k,
            block_table=page_table,
            num_splits=splits_of(num_splits),
            qv=qv,
            names={"block_table": "page_table"},
            **scales_of((q, k, v), (q_descale, k_descale, v_descale), ignores_others=False),
            **options,
        )
    else:
        refuse_given(
            "new keys have no such lengths", cu_seqlens_k=cu_seqlens_k, seqused_q=seqused_q
        )
        try:
            out, softmax_lse, *_ = flash_attn_with_kvcache(
                *(q, k, v),
                qv=qv,
                cache_seqlens=seqused_k,
                page_table=page_table,
                cu_seqlens_q=cu_seqlens_q,
                max_seqlen_q=max_seqlen_q,
                rotary_interleaved=rotary_interleaved,
                num_splits=num_splits,
                return_softmax_lse=True,
                q_descale=q_descale,
                k_descale=k_descale,
                v_descale=v_descale,
                **(of_cache | options),
            )
        except REFUSALS as error:
            raise renamed(error, _NAMES_OF_CACHE) from error
    if out_ is not None:
        check_like("out_", out_, out.shape, out.dtype, q)
        out = out_.copy_(out)
    return with_no_partials(out, softmax_lse)


@_as_before(_with_gradients, causal="is_causal")
def _flash_attn_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    sequed_q: Tensor | None = None,
    sequed_k: Tensor | None = None,
    max_seqlen_q: int | Tensor | None = None,
    max_seqlen_k: int | Tensor | None = None,
    dq: Tensor | None = None,
    dk: Tensor | None = None,
    dv: Tensor | None = None,
    softmax_scale: float | None = None,
    is_causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    deterministic: bool = False,
    sm_margin: int = 0,
) -> Tensor:
    """The backward of a _flash_attn_forward of sequences of one length or packed: writes dq, dk, dv
    (None: not wanted), every row.

    Returns softmax_d, rowsum(dout * out) in fp32: (batch, heads_q, seqlen_q rounded up to 128), or
    (heads_q, total_q) where there are lengths, total_q that of all rows of q.
    """
    options: tuple[Any, ...] = (0.0, softmax_scale, is_causal, window_size_left, window_size_right)
    options += (softcap, None, deterministic)
    lengths = (cu_seqlens_q, cu_seqlens_k, sequed_q, sequed_k)
    if all(x is None for x in lengths):
        return private._flash_attn_backward(dout, q, k, v, out, softmax_lse, dq, dk, dv, *options)
    targets: dict[str, Any] = {"dq": dq, "dk": dk, "dv": dv}
    for name, x in (("q", q), ("k", k), ("v", v)):
        if targets[f"d{name}"] is not None:
            check_tensor(name, x)
            check_like(f"d{name}", targets[f"d{name}"], x.shape, x.dtype, x, name)
    made = dict(targets)
    if cu_seqlens_q is None:
        queries, cu_seqlens_q, max_seqlen_q = packed("q", q)
        dout, out = packed_beside("dout", dout, "q", q), packed_beside("out", out, "q", q)
        q = queries
        softmax_lse = softmax_lse.transpose(0, 1).flatten(1)
        made["dq"] = None if dq is None else torch.empty_like(q)
    if cu_seqlens_k is None:
        k, v, cu_seqlens_k, max_seqlen_k = packed_keys(k, v, cu_seqlens_q)
        made["dk"] = None if dk is None else torch.empty_like(k)
        made["dv"] = None if dv is None else torch.empty_like(v)
    try:
        given: tuple[Any, ...] = (dout, q, k, v, out, softmax_lse, *made.values())
        given += (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *options)
        used: dict[str, Any] = {"seqused_q": sequed_q, "seqused_k": sequed_k}
        softmax_d = private._flash_attn_varlen_backward(*given, **used)
    except REFUSALS as error:
        raise renamed(error, {"seqused_q": "sequed_q", "seqused_k": "sequed_k"}) from error
    for name, target in targets.items():
        if target is not None and target is not made[name]:
            target.copy_(made[name].view(target.shape))
    return softmax_d
