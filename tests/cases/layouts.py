"""Parts of a case: dtypes by name, memory layouts, and the features of a call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields, is_dataclass, replace
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from tests.reference import AttentionOptions

DTYPE_NAMES = {
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.float64: "fp64",
}


class Layout(Enum):
    """How a (B, S, H, D) tensor lies in memory. Gaps between its elements hold NaN."""

    contiguous = "contiguous"
    heads_first = "heads_first"  # memory order (B, H, S, D), as torch's own attention wants it
    seqlen_first = "seqlen_first"  # memory order (S, B, H, D)
    packed = "packed"  # the middle one of three tensors in one (B, S, 3, H, D)
    sliced_head_dim = "sliced_head_dim"  # the first D of D + 8 columns
    odd_stride = "odd_stride"  # rows D + 1 apart: no row but the first is aligned to 16 bytes
    misaligned = "misaligned"  # dense, but the first element is 2 bytes off any alignment
    every_other_row = "every_other_row"  # positions 0, 2, 4, ... of a sequence twice as long
    surrounded = "surrounded"  # a block inside a tensor larger in every dimension
    expanded_batch = "expanded_batch"  # one batch entry shown B times, stride 0
    strided_head_dim = "strided_head_dim"  # last stride 2: what no kernel reads in place


def arrange(x: Tensor, layout: Layout) -> Tensor:
    """A tensor with the shape and values of `x` (B, S, H, D) in memory of `layout`.

    For expanded_batch every batch entry takes the values of the first.
    """
    batch, seqlen, heads, head_dim = x.shape
    match layout:
        case Layout.contiguous:
            return x.contiguous()
        case Layout.expanded_batch:
            return x[:1].clone().expand(x.shape)
        case Layout.heads_first:
            view = poisoned(x, batch, heads, seqlen, head_dim).transpose(1, 2)
        case Layout.seqlen_first:
            view = poisoned(x, seqlen, batch, heads, head_dim).transpose(0, 1)
        case Layout.packed:
            view = poisoned(x, batch, seqlen, 3, heads, head_dim)[:, :, 1]
        case Layout.sliced_head_dim:
            view = poisoned(x, batch, seqlen, heads, head_dim + 8)[..., :head_dim]
        case Layout.odd_stride:
            view = poisoned(x, batch, seqlen, heads, head_dim + 1)[..., :head_dim]
        case Layout.misaligned:
            view = poisoned(x, x.numel() + 1)[1:].view(x.shape)
        case Layout.every_other_row:
            view = poisoned(x, batch, 2 * seqlen, heads, head_dim)[:, ::2]
        case Layout.surrounded:
            view = poisoned(x, batch + 2, seqlen + 2, heads + 2, head_dim + 16)
            view = view[1:-1, 1:-1, 1:-1, 8:-8]
        case Layout.strided_head_dim:
            view = poisoned(x, batch, seqlen, heads, 2 * head_dim)[..., ::2]
    return view.copy_(x)


def poisoned(like: Tensor, *shape: int) -> Tensor:
    """NaN of this shape, in the dtype and on the device of `like`."""
    return torch.full(shape, torch.nan, dtype=like.dtype, device=like.device)


def moved(x: Any, device: torch.device | str) -> Any:
    """Copies of tensors on the device, with their strides and the memory between their elements,
    and what holds some.
    """
    if isinstance(x, Tensor):
        memory = x.new_empty(0).set_(x.untyped_storage())
        return memory.to(device, copy=True).as_strided(x.shape, x.stride(), x.storage_offset())
    if isinstance(x, dict):
        return {name: moved(value, device) for name, value in x.items()}
    if is_dataclass(x) and not isinstance(x, type):
        own = {field.name: moved(getattr(x, field.name), device) for field in fields(x)}
        return replace(x, **own)
    return x


def head_dims_text(head_dim: int, value_dim: int) -> str:
    """What str() of a case says of them: d64, or d192v128."""
    return f"d{head_dim}" if value_dim == head_dim else f"d{head_dim}v{value_dim}"


class Alibi(Enum):
    """What ALiBi slopes a call takes."""

    per_head = "alibi"  # (H,)
    per_batch = "alibi_batch"  # (B, H)


def feature(
    default: Any,
    says: Callable[[Any], str],
    *,
    needs: str | None = None,
    drawn: tuple[float, Any] | None = None,
) -> Any:
    """A field of a case. `says`: what str() says of a case with another value. `needs`: the feature
    that rows of the kernel table must have for it. `drawn`: how often random calls have it, and
    which values.
    """
    return field(default=default, metadata={"says": says, "needs": needs, "drawn": drawn})


@dataclass(frozen=True, kw_only=True)
class Features:
    """What a case computes besides its sizes: AttentionOptions by description, under their names
    where a call has them as they are.
    """

    dtype: torch.dtype = torch.bfloat16
    causal: bool = False
    window: tuple[int, int] = feature((-1, -1), "window{0.window[0]},{0.window[1]}".format)
    softmax_scale: float | None = feature(  # None: head_dim ** -0.5
        None, "scale{0.softmax_scale:g}".format, drawn=(0.15, (0.0, -0.3, 0.02, 0.7))
    )
    softcap: float = feature(
        0.0, "softcap{0.softcap:g}".format, needs="softcap", drawn=(0.25, (0.8, 5.0, 50.0))
    )
    alibi: Alibi | None = feature(
        None, "{0.alibi.value}".format, needs="alibi", drawn=(0.25, tuple(Alibi))
    )
    dropout_p: float = feature(
        0.0, "dropout{0.dropout_p:g}".format, needs="dropout", drawn=(0.25, (0.1, 0.17, 0.5, 0.9))
    )
    deterministic: bool = feature(False, "deterministic".format, needs="deterministic")
    max_logits: bool = feature(False, "max_logits".format, drawn=(0.3, (True,)))
    device: str = "cuda"

    def given(self, of: str) -> list[Any]:
        """What `feature` was told as `of`, of fields that are not as by default."""
        told = [x for x in fields(self) if x.metadata.get(of)]
        return [x.metadata[of] for x in told if getattr(self, x.name) != x.default]

    def feature_parts(self) -> list[str]:
        """What str() says of features; defaults go without saying."""
        said = [says(self) for says in self.given("says")]
        return [DTYPE_NAMES[self.dtype], "causal" if self.causal else "full", *said]

    def make_slopes(self, batch: int, heads: int, generator: torch.Generator) -> Tensor | None:
        """Slopes up to 0.3, fp32."""
        if self.alibi is None:
            return None
        shape = (heads,) if self.alibi is Alibi.per_head else (batch, heads)
        return 0.3 * torch.rand(shape, device=self.device, generator=generator)

    def _numbers(self) -> dict[str, Any]:
        """The options that are no tensors."""
        names = {x.name for x in fields(AttentionOptions)} & {x.name for x in fields(Features)}
        return {name: getattr(self, name) for name in names}

    def options(
        self, alibi_slopes: Tensor | None = None, keep_mask: Tensor | None = None
    ) -> AttentionOptions:
        """For the reference. `keep_mask` (B, Hq, Sq, Sk) is needed with dropout."""
        return AttentionOptions(**self._numbers(), alibi_slopes=alibi_slopes, keep_mask=keep_mask)

    def arguments(self) -> dict[str, Any]:
        """The keyword arguments of the training functions; slopes are in the inputs."""
        given = {**self._numbers(), "deterministic": self.deterministic}
        if self.max_logits:
            given["return_max_logits"] = True
        return {"window_size": given.pop("window"), **given}


# How often random calls have a feature, and which values.
DRAWN: dict[str, tuple[float, Any]] = {
    x.name: x.metadata["drawn"] for x in fields(Features) if x.metadata.get("drawn")
}
