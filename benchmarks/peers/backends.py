"""The attention implementations that can be compared, behind one interface.

All backends work on the same memory, in which tensors lie as (B, S, H, D). torch's functions want
(B, H, S, D): they get transposed views, made before the clock starts, which their kernels read
without a copy, so that nothing but the call itself is compared.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from enum import Enum
from functools import cache, partial
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from benchmarks.peers.fa3 import flash_attention_3
from benchmarks.peers.other_build import other_attention
from tests.cases.attention import AttentionCase

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
Prepare = Callable[[AttentionCase], Attend]
T = TypeVar("T")

FA3_MAX_HEAD_DIM = 256
FFPA_HEAD_DIMS = range(320, 513, 64)


class Unsupported(Exception):
    """This backend does not compute this case here; the message says why."""


class TensorOrder(Enum):
    seqlen_first = "B, S, H, D"
    heads_first = "B, H, S, D"


@dataclass(frozen=True)
class Backend:
    """One implementation.

    `prepare` makes the function that computes a case, on tensors in the backend's own `order`.
    `scope` makes the context that its calls need; entering it is no part of a call.
    """

    name: str
    description: str
    prepare: Prepare
    order: TensorOrder = TensorOrder.seqlen_first
    scope: Callable[[], AbstractContextManager] = nullcontext

    def view(self, x: Tensor) -> Tensor:
        """From (B, S, H, D) to the backend's order, and from that back."""
        return x.transpose(1, 2) if self.order is TensorOrder.heads_first else x


def found(look_for: Callable[[], T]) -> T:
    """What it finds; a peer that is not here is no failure."""
    try:
        return look_for()
    except ImportError as error:
        raise Unsupported(str(error)) from None


def prepare_ours(case: AttentionCase) -> Attend:
    from flash_attn_cuda import flash_attn_func

    require_ours(case.device)
    # Only what the case asks for: a plain call is timed as callers write it.
    features = {
        name: value for name, value in case.arguments().items() if name in features_of(case)
    }
    if case.alibi is not None:
        generator = torch.Generator(case.device).manual_seed(0)
        features["alibi_slopes"] = case.make_slopes(case.batch, case.num_heads_q, generator)
    scale, causal = case.softmax_scale, case.causal
    return lambda q, k, v: flash_attn_func(q, k, v, softmax_scale=scale, causal=causal, **features)


def prepare_other_build(case: AttentionCase) -> Attend:
    require_cuda(case)
    refuse_features(case)
    if case.head_dim % 8 or case.value_dim % 8:
        raise Unsupported("is called without padding, so head dims must be multiples of 8")
    attention = found(other_attention)
    scale, causal = case.softmax_scale, case.causal
    return lambda q, k, v: attention(q, k, v, scale, causal)[0]


def prepare_fa3(case: AttentionCase) -> Attend:
    require_cuda(case)
    refuse_features(case)
    if any(d > FA3_MAX_HEAD_DIM or d % 8 for d in (case.head_dim, case.value_dim)):
        raise Unsupported(f"has multiples of 8 up to {FA3_MAX_HEAD_DIM} as head dims")
    return partial(found(flash_attention_3), softmax_scale=case.softmax_scale, causal=case.causal)


def prepare_ffpa(case: AttentionCase) -> Attend:
    require_cuda(case)
    refuse_features(case)
    if case.head_dim not in FFPA_HEAD_DIMS or case.head_dim != case.value_dim:
        raise Unsupported(f"has {', '.join(map(str, FFPA_HEAD_DIMS))} as head dims")
    attend = found(lambda: importlib.import_module("ffpa_attn").ffpa_attn_func)
    options = {"is_causal": case.causal, "scale": case.softmax_scale, "backend": "cutedsl"}
    return partial(attend, enable_gqa=has_grouped_heads(case), **options)


def prepare_sdpa(case: AttentionCase, *, mask_is_tensor: bool = False) -> Attend:
    """`mask_is_tensor`: for kernels that know no mask aligned to the bottom right, for which torch
    would make its tensor anew in each call.
    """
    refuse_features(case, but="dropout_p")
    options = {"scale": case.softmax_scale, "enable_gqa": has_grouped_heads(case)}
    options["dropout_p"] = case.dropout_p
    # is_causal aligns to the top left corner; this package, and this bias, to the bottom right.
    lengths = (case.seqlen_q, case.seqlen_k)
    if case.causal and case.seqlen_q != case.seqlen_k and mask_is_tensor:
        pairs = torch.ones(lengths, dtype=torch.bool, device=case.device)
        options["attn_mask"] = pairs.tril(case.seqlen_k - case.seqlen_q)
    elif case.causal and case.seqlen_q != case.seqlen_k:
        options["attn_mask"] = causal_lower_right(*lengths)
    else:
        options["is_causal"] = case.causal
    return partial(F.scaled_dot_product_attention, **options)


def prepare_math(case: AttentionCase) -> Attend:
    return prepare_sdpa(case, mask_is_tensor=True)


def prepare_cudnn(case: AttentionCase) -> Attend:
    require_cuda(case)
    return prepare_sdpa(case, mask_is_tensor=True)


def prepare_efficient(case: AttentionCase) -> Attend:
    require_cuda(case)
    return prepare_sdpa(case)


def prepare_flex(case: AttentionCase) -> Attend:
    from torch.nn.attention.flex_attention import create_block_mask

    require_cuda(case)
    refuse_features(case)
    flex_attention = compiled_flex_attention()
    shift = case.seqlen_k - case.seqlen_q

    def is_visible(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return key <= query + shift

    mask = None
    if case.causal:
        lengths = (case.seqlen_q, case.seqlen_k)
        mask = create_block_mask(is_visible, None, None, *lengths, device=case.device)
    options = {"scale": case.softmax_scale, "enable_gqa": has_grouped_heads(case)}
    return partial(flex_attention, block_mask=mask, **options)


@cache
def compiled_flex_attention() -> Callable[..., Tensor]:
    from torch.nn.attention.flex_attention import flex_attention

    # One kernel per shape: dynamic shapes would time a kernel made for any length. Donated buffers
    # forbid running the same backward twice.
    torch._dynamo.config.recompile_limit = 256
    torch._functorch.config.donated_buffer = False
    return torch.compile(flex_attention, dynamic=False)


def is_cuda(case: AttentionCase) -> bool:
    return torch.device(case.device).type == "cuda"


def require_cuda(case: AttentionCase) -> None:
    if not is_cuda(case):
        raise Unsupported("runs on CUDA devices only")


def require_ours(device: str) -> None:
    from flash_attn_cuda import cuda_unavailable_reason

    if torch.device(device).type == "cuda" and (reason := cuda_unavailable_reason()):
        raise Unsupported(reason)


def features_of(case: AttentionCase) -> list[str]:
    """The arguments by which a call differs from plain attention; the mask's `causal` is plain."""
    wanted = {
        "window_size": case.window != (-1, -1),
        "softcap": case.softcap > 0.0,
        "alibi_slopes": case.alibi is not None,
        "dropout_p": case.dropout_p > 0.0,
        "deterministic": case.deterministic,
        "return_max_logits": case.max_logits,
    }
    return [name for name, is_wanted in wanted.items() if is_wanted]


def refuse_features(case: AttentionCase, but: str | None = None) -> None:
    """Raises Unsupported if the case has a feature, `but` excepted."""
    refused = [name for name in features_of(case) if name != but]
    if refused:
        raise Unsupported(f"not measured with {', '.join(refused)}")


def has_grouped_heads(case: AttentionCase) -> bool:
    return case.num_heads_q != case.num_heads_k


def sdpa_backend(
    name: str, description: str, kernel: SDPBackend, prepare: Prepare = prepare_sdpa
) -> Backend:
    """torch's scaled_dot_product_attention restricted to one of its kernels."""
    scope = partial(sdpa_kernel, kernel)
    return Backend(f"sdpa_{name}", f"torch SDPA, {description}", prepare, HEADS_FIRST, scope)


@contextmanager
def our_operators() -> Iterator[None]:
    """SDPA's flash backend runs ours."""
    import flash_attn_cuda  # noqa: F401  # makes its name known to torch

    torch.nn.attention.activate_flash_attention_impl("flash_attn_cuda")
    try:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            yield
    finally:
        torch.nn.attention.restore_flash_attention_impl()


def prepare_sdpa_ours(case: AttentionCase) -> Attend:
    require_ours(case.device)
    return prepare_sdpa(case)


HEADS_FIRST = TensorOrder.heads_first
FA2 = "flash kernels (FlashAttention-2 on CUDA)"

BACKENDS = {
    backend.name: backend
    for backend in (
        Backend("ours", "flash_attn_cuda", prepare_ours),
        sdpa_backend("flash", FA2, SDPBackend.FLASH_ATTENTION),
        Backend(
            "sdpa_ours",
            "torch SDPA, flash_attn_cuda activated",
            prepare_sdpa_ours,
            HEADS_FIRST,
            our_operators,
        ),
        sdpa_backend("cudnn", "cuDNN", SDPBackend.CUDNN_ATTENTION, prepare_cudnn),
        sdpa_backend(
            "efficient", "memory-efficient", SDPBackend.EFFICIENT_ATTENTION, prepare_efficient
        ),
        sdpa_backend("math", "separate matrix products", SDPBackend.MATH, prepare_math),
        Backend("sdpa", "torch SDPA, kernel chosen by torch", prepare_sdpa, HEADS_FIRST),
        Backend("flex", "torch FlexAttention, compiled", prepare_flex, HEADS_FIRST),
        Backend("fa3", "FlashAttention-3, when installed (fa3.py)", prepare_fa3),
        Backend("ffpa", "ffpa-attn's CuTe DSL kernels, when installed", prepare_ffpa, HEADS_FIRST),
        Backend("other_build", "another build of ours (other_build.py)", prepare_other_build),
    )
}
