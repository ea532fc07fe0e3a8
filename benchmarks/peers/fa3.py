"""FlashAttention-3 as a peer, from whichever place has it.

- `flash_attn_interface`, the package that its sources install;
- the library that FLASH_ATTN_3_LIBRARY names, which defines torch.ops.flash_attn_3;
- the one inside xformers' wheel, which is not imported for it.

Such a library may want a CUDA runtime other than torch's on LD_LIBRARY_PATH.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

LIBRARY_VARIABLE = "FLASH_ATTN_3_LIBRARY"
IN_XFORMERS = "flash_attn_3/_C*.so"

Attend = Callable[..., Tensor]  # (q, k, v, softmax_scale, causal, and lengths by their names)


@cache
def flash_attention_3() -> Attend:
    """Raises ImportError, which says what was looked for."""
    return attend_of("flash_attn_func")


@cache
def flash_attention_3_packed() -> Attend:
    """For packed sequences: (q, k, v, cu_seqlens, max_seqlen, causal)."""
    attend = attend_of("flash_attn_varlen_func")

    def attend_packed(
        q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, causal: bool
    ) -> Tensor:
        cu_seqlens_both = {"cu_seqlens_q": cu_seqlens, "cu_seqlens_k": cu_seqlens}
        max_seqlen_both = {"max_seqlen_q": max_seqlen, "max_seqlen_k": max_seqlen}
        return attend(q, k, v, None, causal, **cu_seqlens_both, **max_seqlen_both)

    return attend_packed


def attend_of(function: str) -> Attend:
    """A function of the package, or the same of its operators."""
    try:
        package = importlib.import_module("flash_attn_interface")
    except ImportError:
        return through_ops(load_ops())
    of_package = getattr(package, function)

    def attend(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        softmax_scale: float | None,
        causal: bool,
        **lengths: Tensor | int,
    ) -> Tensor:
        with refusals():
            result = of_package(q, k, v, softmax_scale=softmax_scale, causal=causal, **lengths)
        return result[0] if isinstance(result, tuple) else result  # older releases add the lse

    return attend


@cache
def flash_attention_3_cached() -> Attend:
    """For a query of each sequence over a cache: (q, k, v, cache_seqlens), and q_descale, k_descale
    and v_descale by their names. It decides itself over how many CTAs keys are split.
    """
    try:
        package = importlib.import_module("flash_attn_interface")
    except ImportError:
        return cached_through_ops(load_ops())

    def attend(
        q: Tensor, k: Tensor, v: Tensor, cache_seqlens: Tensor, **descales: Tensor
    ) -> Tensor:
        with refusals():
            result: Tensor = package.flash_attn_with_kvcache(
                q, k, v, cache_seqlens=cache_seqlens, **descales
            )
        return result

    return attend


@cache
def flash_attention_3_latent() -> Attend:
    """Absorbed latent attention over pages, causal: (q, k, v, qv, cache_seqlens, block_table,
    softmax_scale). Through the operators alone.
    """
    forward = Operator(load_ops().fwd)

    def attend(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        qv: Tensor,
        cache_seqlens: Tensor,
        block_table: Tensor,
        softmax_scale: float,
    ) -> Tensor:
        lengths = {"seqused_k": cache_seqlens, "page_table": block_table}
        options = {"softmax_scale": softmax_scale, "is_causal": True}
        return forward(q=q, k=k, v=v, q_v=qv, **lengths, **options)[0]

    return attend


def load_ops() -> Any:
    """The namespace with its operators fwd and bwd."""
    path = library_path()
    if path is None:
        raise ImportError(
            f"flash_attn_interface is not importable, {LIBRARY_VARIABLE} is not set and there is "
            f"no xformers with {IN_XFORMERS}"
        )
    try:
        torch.ops.load_library(path)
    except OSError as error:
        raise ImportError(f"{path} cannot be loaded: {error}") from None
    return torch.ops.flash_attn_3


def library_path() -> str | None:
    if path := os.environ.get(LIBRARY_VARIABLE):
        return path
    xformers = importlib.util.find_spec("xformers")
    folders = (xformers and xformers.submodule_search_locations) or ()
    return next((str(path) for folder in folders for path in Path(folder).glob(IN_XFORMERS)), None)


def through_ops(ops: Any) -> Attend:
    forward, backward = Operator(ops.fwd), Operator(ops.bwd)

    class FlashAttention3(torch.autograd.Function):
        @staticmethod
        def forward(
            ctx: Any,
            q: Tensor,
            k: Tensor,
            v: Tensor,
            softmax_scale: float,
            causal: bool,
            lengths: dict[str, Tensor | int],
        ) -> Tensor:
            ctx.options = {"softmax_scale": softmax_scale, "is_causal": causal, **lengths}
            out, lse, *_ = forward(q=q, k=k, v=v, num_splits=1, **ctx.options)
            ctx.save_for_backward(q, k, v, out, lse)
            return out

        @staticmethod
        def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
            q, k, v, out, lse = ctx.saved_tensors
            dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
            tensors = {"q": q, "k": k, "v": v, "out": out, "dq": dq, "dk": dk, "dv": dv}
            backward(dout=dout, softmax_lse=lse, **tensors, **ctx.options)
            return dq, dk, dv, None, None, None

    def attend(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        softmax_scale: float | None,
        causal: bool,
        **lengths: Tensor | int,
    ) -> Tensor:
        scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
        return FlashAttention3.apply(q, k, v, scale, causal, lengths)

    return attend


def cached_through_ops(ops: Any) -> Attend:
    forward = Operator(ops.fwd)

    def attend(
        q: Tensor, k: Tensor, v: Tensor, cache_seqlens: Tensor, **descales: Tensor
    ) -> Tensor:
        scale = q.shape[-1] ** -0.5
        return forward(q=q, k=k, v=v, seqused_k=cache_seqlens, softmax_scale=scale, **descales)[0]

    return attend


class Operator:
    """Calls an operator by its arguments' names, whose order and number differ by release."""

    def __init__(self, packet: Any) -> None:
        self.overload = packet.default
        arguments = self.overload._schema.arguments
        self.names = {argument.name for argument in arguments}
        self.absent = {
            argument.name: None for argument in arguments if not argument.has_default_value()
        }

    def __call__(self, **values: Any) -> Any:
        unknown = sorted(values.keys() - self.names)
        if unknown:
            raise NotImplementedError(f"{self.overload} takes no {', '.join(unknown)}")
        with refusals():
            return self.overload(**(self.absent | values))


@contextmanager
def refusals() -> Iterator[None]:
    """Head dims and FP8 that were left out of a build, or that no release has, are no failures."""
    try:
        yield
    except RuntimeError as error:
        if "support" not in str(error) or not re.search("hdim|head|fp8|FP8", str(error)):
            raise
        raise NotImplementedError(str(error)) from None
