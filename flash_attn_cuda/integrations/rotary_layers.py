"""What else flash_attn has of rotary embedding: packed projections, a module, the bare rotation.

All of it is apply_rotary_emb's: its kernel, autograd, torch.compile and every device.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from ..functions.kept import is_passing, is_usable, made_to_keep
from ..functions.rotary import apply_rotary_emb, into_leaf, is_recorded_leaf, rotate

__all__ = [
    "ApplyRotaryEmb",
    "ApplyRotaryEmbKV_",
    "ApplyRotaryEmbQKV_",
    "RotaryEmbedding",
    "apply_rotary",
    "apply_rotary_emb_kv_",
    "apply_rotary_emb_qkv_",
    "apply_rotary_emb_torch",
    "rotate_half",
]


def apply_rotary(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    seqlen_offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    interleaved: bool = False,
    inplace: bool = False,
    conjugate: bool = False,
) -> Tensor:
    """apply_rotary_emb in the argument order of flash_attn.ops.triton.rotary.

    `conjugate` turns by the negative angles, which is the gradient of the rotation.
    """
    return rotate(x, cos, sin, interleaved, inplace, seqlen_offsets, cu_seqlens, conjugate)


class ApplyRotaryEmb:
    """For code that calls the apply() of FlashAttention-2's autograd function."""

    apply = staticmethod(apply_rotary_emb)


def apply_rotary_emb_qkv_(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    cos_k: Tensor | None = None,
    sin_k: Tensor | None = None,
    interleaved: bool = False,
    seqlen_offsets: int | Tensor = 0,
    num_heads_q: int | None = None,
) -> Tensor:
    """Rotate queries and keys of a packed projection in place, and return it; of a leaf as
    apply_rotary_emb.

    Args:
        qkv: (batch, seqlen, 3, heads, head_dim), or (batch, seqlen, num_heads_q + 2 * heads_k,
            head_dim): queries, then keys, then values.
        cos, sin, interleaved, seqlen_offsets: as apply_rotary_emb.
        cos_k, sin_k: tables of the keys, if not the same.
        num_heads_q: the number of query heads, which a qkv of four dimensions needs.

    Raises:
        ValueError: qkv is of another shape, or as apply_rotary_emb.
    """
    if is_recorded_leaf(qkv):
        tables = (cos, sin, cos_k, sin_k, interleaved, seqlen_offsets, num_heads_q)
        return into_leaf(apply_rotary_emb_qkv_(qkv.clone(), *tables), qkv)
    if qkv.dim() == 5:
        if qkv.shape[2] != 3:
            raise ValueError(
                f"qkv: must have shape (batch, seqlen, 3, heads, head_dim), got {tuple(qkv.shape)}"
            )
        q, k = qkv[:, :, 0], qkv[:, :, 1]
    else:
        heads_k = _heads_k(qkv, num_heads_q)
        heads_q = qkv.shape[2] - 2 * heads_k
        q, k = qkv[:, :, :heads_q], qkv[:, :, heads_q : heads_q + heads_k]
    cos_k, sin_k = cos if cos_k is None else cos_k, sin if sin_k is None else sin_k
    apply_rotary_emb(q, cos, sin, interleaved, True, seqlen_offsets)
    apply_rotary_emb(k, cos_k, sin_k, interleaved, True, seqlen_offsets)
    return qkv


def apply_rotary_emb_kv_(
    kv: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    seqlen_offsets: int | Tensor = 0,
) -> Tensor:
    """Rotate the keys of kv (batch, seqlen, 2, heads, head_dim) in place, and return it; of a leaf
    as apply_rotary_emb.

    The other arguments are apply_rotary_emb's.

    Raises:
        ValueError: kv is of another shape, or as apply_rotary_emb.
    """
    if kv.dim() != 5 or kv.shape[2] != 2:
        raise ValueError(
            f"kv: must have shape (batch, seqlen, 2, heads, head_dim), got {tuple(kv.shape)}"
        )
    if is_recorded_leaf(kv):
        turned = apply_rotary_emb_kv_(kv.clone(), cos, sin, interleaved, seqlen_offsets)
        return into_leaf(turned, kv)
    apply_rotary_emb(kv[:, :, 0], cos, sin, interleaved, True, seqlen_offsets)
    return kv


class ApplyRotaryEmbQKV_:
    """For code that calls the apply() of FlashAttention-2's autograd function."""

    apply = staticmethod(apply_rotary_emb_qkv_)


class ApplyRotaryEmbKV_:
    """For code that calls the apply() of FlashAttention-2's autograd function."""

    apply = staticmethod(apply_rotary_emb_kv_)


def rotate_half(x: Tensor, interleaved: bool = False) -> Tensor:
    """(-b, a) of the pairs (a, b) of x's last dimension, which lie as in apply_rotary_emb."""
    if interleaved:
        a, b = x[..., ::2], x[..., 1::2]
        return torch.stack((-b, a), dim=-1).flatten(-2)
    a, b = x.chunk(2, dim=-1)
    return torch.cat((-b, a), dim=-1)


def apply_rotary_emb_torch(
    x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False
) -> Tensor:
    """x (batch, seqlen, heads, head_dim) rotated, in operations of torch.

    cos, sin: (seqlen, rotary_dim / 2) or (batch, seqlen, rotary_dim / 2), a row for each of x's.
    Raises ValueError where they are of more than head_dim, or differ in shape.
    """
    rotary_dim = 2 * cos.shape[-1]
    if rotary_dim > x.shape[-1] or cos.shape != sin.shape:
        raise ValueError(
            f"cos, sin: must have one shape, (..., rotary_dim / 2) of at most {x.shape[-1] // 2}, "
            f"got {tuple(cos.shape)} and {tuple(sin.shape)}"
        )
    angles = []
    for table in (cos, sin):
        both = table.repeat_interleave(2, -1) if interleaved else torch.cat((table, table), -1)
        angles.append(both.unsqueeze(-2))
    turned = x[..., :rotary_dim]
    turned = turned * angles[0] + rotate_half(turned, interleaved) * angles[1]
    return torch.cat((turned, x[..., rotary_dim:]), dim=-1)


class RotaryEmbedding(nn.Module):
    """Rotary embedding with tables of its own, as flash_attn.layers.rotary has it.

    With `scale_base` it is XPos (Sun et al., "A Length-Extrapolatable Transformer", 2022,
    arXiv:2212.10554): queries grow, and keys shrink, with their distance from the middle of the
    tables, in powers of how far over scale_base.

    Args:
        dim: how many dimensions of a head turn, an even number.
        base: the longest wavelength is 2 pi times about that many tokens.
        interleaved: pairs are neighbours, as apply_rotary_emb has it.
        scale_base: None for no XPos.
        device: of the frequencies; tables are on the device of what is rotated.
    """

    inv_freq: Tensor
    scale: Tensor | None
    _may_be_saved = True  # whether tables may, by autograd: a compiler cannot ask them

    def __init__(
        self,
        dim: int,
        base: float = 10000.0,
        interleaved: bool = False,
        scale_base: float | None = None,
        device: Any = None,
    ) -> None:
        super().__init__()
        if dim < 0 or dim % 2 != 0:
            raise ValueError(f"dim: must be even and not negative, got {dim}")
        self.dim = dim
        self.base = float(base)
        self.interleaved = interleaved
        self.scale_base = scale_base
        inv_freq = made_to_keep(lambda: self._compute_inv_freq(device))
        self.register_buffer("inv_freq", inv_freq, persistent=False)
        scale = None if scale_base is None else made_to_keep(lambda: self._compute_scale(device))
        self.register_buffer("scale", scale, persistent=False)
        self._forget_tables()

    def _forget_tables(self) -> None:
        # Subclasses and attention modules of others read these names.
        self._seq_len_cached = 0
        self._cos_cached: Tensor | None = None
        self._sin_cached: Tensor | None = None
        self._cos_k_cached: Tensor | None = None
        self._sin_k_cached: Tensor | None = None

    def forward(
        self,
        qkv: Tensor,
        kv: Tensor | None = None,
        seqlen_offset: int | Tensor = 0,
        max_seqlen: int | None = None,
        num_heads_q: int | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Rotate queries and keys in place.

        Args:
            qkv: as apply_rotary_emb_qkv_ takes it; with kv, q (batch, seqlen, heads, head_dim).
            kv: (batch, seqlen, 2, heads, head_dim).
            seqlen_offset: position of each sequence's first token: an int or (batch,).
            max_seqlen: how long the tables must be at least; needed where seqlen_offset is a
                tensor, which is not read.
            num_heads_q: as apply_rotary_emb_qkv_.

        Returns:
            qkv, or (q, kv).
        """
        if max_seqlen is None:
            if isinstance(seqlen_offset, Tensor):
                raise ValueError("max_seqlen: must be given with a tensor seqlen_offset, got None")
            max_seqlen = qkv.shape[1] + seqlen_offset
        self._update_cos_sin_cache(max_seqlen, device=qkv.device, dtype=qkv.dtype)
        cos, sin = self._cos_cached, self._sin_cached
        assert cos is not None and sin is not None
        cos_k = cos if self._cos_k_cached is None else self._cos_k_cached
        sin_k = sin if self._sin_k_cached is None else self._sin_k_cached
        if is_passing(cos):
            self._forget_tables()
        if kv is None:
            return apply_rotary_emb_qkv_(
                *(qkv, cos, sin, cos_k, sin_k, self.interleaved, seqlen_offset, num_heads_q)
            )
        q = apply_rotary_emb(qkv, cos, sin, self.interleaved, True, seqlen_offset)
        return q, apply_rotary_emb_kv_(kv, cos_k, sin_k, self.interleaved, seqlen_offset)

    def _compute_inv_freq(self, device: Any = None) -> Tensor:
        return self.base ** (-self._even_dims(device) / self.dim)

    def _compute_scale(self, device: Any = None) -> Tensor:
        return (self._even_dims(device) / self.dim + 0.4) / 1.4

    def _even_dims(self, device: Any) -> Tensor:
        return torch.arange(0, self.dim, 2, device=device, dtype=torch.float32)

    def _update_cos_sin_cache(
        self, seqlen: int, device: Any = None, dtype: torch.dtype | None = None
    ) -> None:
        """Make the tables anew where they are too short, elsewhere, of another dtype, or such that
        this call may not use them.
        """
        device = self.inv_freq.device if device is None else torch.device(device)
        dtype = torch.float32 if dtype is None else dtype
        cached = self._cos_cached
        if (
            cached is not None
            and seqlen <= self._seq_len_cached
            and (cached.device, cached.dtype) == (device, dtype)
            and is_usable(cached)
            and (self._may_be_saved or not torch.is_grad_enabled())
        ):
            return
        self._seq_len_cached = seqlen
        self._may_be_saved = not is_compiling() or torch.is_grad_enabled()
        made_to_keep(lambda: self._make_tables(seqlen, device, dtype), self.inv_freq)

    def _make_tables(self, seqlen: int, device: torch.device, dtype: torch.dtype) -> None:
        # In fp32 whatever the module was cast to: positions are large numbers.
        position = torch.arange(seqlen, device=device, dtype=torch.float32)
        is_exact = self.inv_freq.dtype == torch.float32
        inv_freq = self.inv_freq.to(device) if is_exact else self._compute_inv_freq(device)
        angle = position[:, None] * inv_freq
        cos, sin = angle.cos(), angle.sin()
        if self.scale_base is None:
            self._cos_cached, self._sin_cached = cos.to(dtype), sin.to(dtype)
            return
        power = (position - seqlen // 2) / self.scale_base
        growth = self._compute_scale(device) ** power[:, None]
        self._cos_cached, self._sin_cached = (cos * growth).to(dtype), (sin * growth).to(dtype)
        self._cos_k_cached, self._sin_k_cached = (cos / growth).to(dtype), (sin / growth).to(dtype)


def _heads_k(qkv: Tensor, num_heads_q: int | None) -> int:
    if num_heads_q is None:
        raise ValueError(
            f"num_heads_q: must be given with a qkv of shape {tuple(qkv.shape)}, got None"
        )
    heads_k, rest = divmod(qkv.shape[2] - num_heads_q, 2) if qkv.dim() == 4 else (-1, 0)
    if heads_k < 0 or rest != 0:
        raise ValueError(
            "qkv: must have shape (batch, seqlen, num_heads_q + 2 * heads_k, head_dim) with "
            f"num_heads_q {num_heads_q}, got {tuple(qkv.shape)}"
        )
    return heads_k
