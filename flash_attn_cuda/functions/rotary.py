"""Rotary position embedding: RoFormer (Su et al., 2021), section 3.2.2.

Eager calls on CUDA run one kernel, and another one for the gradient of x. Everything else is made
of torch's operators: what torch.compile traces, which fuses them into one kernel, calls under
torch.func or a torch mode, forward-mode gradients, gradients of cos and sin, fp64 and other
devices. The attention with a KV cache has its own, fused with the append.
"""

from __future__ import annotations

from functools import cache
from types import ModuleType, NoneType
from typing import Any, cast

import torch
from torch import Tensor
from torch._C import _has_storage
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from ..call.tensors import check_may_be_written
from ..installed import build_info
from ..operators.dtensor_import import is_dtensor
from .arguments import is_plain_cuda_call

__all__ = ["apply_rotary_emb", "apply_rotary_emb_func"]

_KERNEL_DTYPES = frozenset((torch.float16, torch.bfloat16, torch.float32))
_PLAIN = frozenset((Tensor, NoneType, int))  # of seqlen_offsets and cu_seqlens


def apply_rotary_emb(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> Tensor:
    """Rotate pairs of x's first 2 * cos.shape[1] dimensions by the angles of their positions.

    Token t of sequence b is at position t + seqlen_offsets[b]; its pair d turns by the angle whose
    cosine and sine are cos[position, d] and sin[position, d]. Computed in fp32 (fp64 for fp64), and
    rounded once to x's dtype.

    Args:
        x: (batch, seqlen, heads, head_dim), or (total, heads, head_dim) with cu_seqlens.
        cos: (positions, rotary_dim / 2), rotary_dim <= head_dim; the dimensions behind rotary_dim
            stay as they are.
        sin: as cos.
        interleaved: pairs are (x[2d], x[2d + 1]), as in GPT-J; else (x[d], x[d + rotary_dim / 2]),
            as in GPT-NeoX.
        inplace: write into x and return it. Of a leaf that requires a gradient, or a view of one,
            what is returned has the gradient: another tensor of x's memory, compiled a copy.
        seqlen_offsets: the position of each sequence's first token: an int, or int32 or int64
            (batch,).
        cu_seqlens: (batch + 1,) int32, where each packed sequence starts. Rows outside every
            sequence stay as they are.
        max_seqlen: of no use here; FlashAttention-2 requires it with cu_seqlens.

    Returns:
        The rotated tensor, of x's shape and dtype; differentiable in x, cos and sin, in place too.

        Nothing here waits for the GPU. Positions that only the device knows and that cos does not
        reach are not rotated.

    Raises:
        TypeError: an argument is not of the type required.
        ValueError: shapes, devices or positions do not fit.
    """
    return rotate(x, cos, sin, interleaved, inplace, seqlen_offsets, cu_seqlens)


apply_rotary_emb_func = apply_rotary_emb


def rotate(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    conjugate: bool = False,
) -> Tensor:
    """apply_rotary_emb; with `conjugate` by the negative angles, which is its gradient."""
    if inplace and is_recorded_leaf(x):
        others = (seqlen_offsets, cu_seqlens, conjugate)
        return into_leaf(rotate(x, cos, sin, interleaved, False, *others), x)
    if not _has_kernel(x, cos, sin, seqlen_offsets, cu_seqlens):
        _check(x, cos, sin, seqlen_offsets, cu_seqlens)
        if inplace:
            check_may_be_written("x", x)
        if is_dtensor(x) or is_dtensor(cos):
            from ..operators.dtensor_shards import rotate_in_shards

            tables = (cast(Any, x), cos, sin, interleaved, inplace, seqlen_offsets, cu_seqlens)
            return rotate_in_shards(rotate, *tables, conjugate)
        sin = -sin if conjugate else sin
        return _rotate_by_operators(x, cos, sin, interleaved, inplace, seqlen_offsets, cu_seqlens)
    is_recorded = x.requires_grad and torch.is_grad_enabled()
    run = _Rotation.apply if is_recorded else _rotate_by_kernel
    try:
        return run(x, cos, sin, interleaved, inplace, seqlen_offsets, cu_seqlens, conjugate)
    except Exception:
        _check(x, cos, sin, seqlen_offsets, cu_seqlens)  # for the words of the error
        if cu_seqlens is None and not isinstance(seqlen_offsets, Tensor):
            _check_offset(x, cos, seqlen_offsets)
        if inplace:
            check_may_be_written("x", x)
        raise


def is_recorded_leaf(x: Any) -> bool:
    """Whether torch lets nobody write it: a leaf that wants a gradient, or a view of one."""
    if not (isinstance(x, Tensor) and x.requires_grad and torch.is_grad_enabled()):
        return False
    if is_compiling():  # a graph knows nothing of what its inputs are views of
        return x.is_leaf
    return (x if x._base is None else x._base).is_leaf and forward_ad._current_level < 0


class _IntoLeaf(torch.autograd.Function):
    """(turned, leaf) -> the leaf's memory, with turned's values and history."""

    generate_vmap_rule = True

    @staticmethod
    def forward(turned: Tensor, leaf: Tensor) -> Tensor:
        leaf.detach().copy_(turned)
        return leaf.detach()  # no view to autograd, so that others of the leaf may be written

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Nothing is kept."""

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, None]:
        return dout, None


def into_leaf(turned: Tensor, leaf: Tensor) -> Tensor:
    """Write what was made of a leaf into it, as FlashAttention-2 does; the result has turned's
    history, and the leaf none.
    """
    out: Tensor = _IntoLeaf.apply(turned, leaf)
    return out


def _has_kernel(x: Any, cos: Any, sin: Any, offsets: Any, cu_seqlens: Any) -> bool:
    return (
        is_plain_cuda_call(x, cos, sin)
        and _PLAIN.issuperset((type(offsets), type(cu_seqlens)))
        and _KERNEL_DTYPES.issuperset((x.dtype, cos.dtype, sin.dtype))
        and forward_ad._current_level < 0
        # Gradients of tables the kernel does not make.
        and not ((cos.requires_grad or sin.requires_grad) and torch.is_grad_enabled())
        and _device_has_kernels(x.device.index)
    )


@cache
def _device_has_kernels(index: int) -> bool:
    return build_info.cuda_unavailable_reason(index) is None


def _rotate_by_kernel(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
    inplace: bool,
    offsets: int | Tensor,
    cu_seqlens: Tensor | None,
    conjugate: bool,
) -> Tensor:
    offset, each = (0, offsets) if isinstance(offsets, Tensor) else (offsets, None)
    run = cast(ModuleType, build_info.extension).rotary
    return run(x, cos, sin, offset, each, cu_seqlens, interleaved, inplace, conjugate)


class _Rotation(torch.autograd.Function):
    """_rotate_by_kernel with its gradient of x."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        x, cos, sin, interleaved, inplace, offsets, cu_seqlens, conjugate = args
        each = offsets if isinstance(offsets, Tensor) else None
        ctx.save_for_backward(cos, sin, each, cu_seqlens)
        ctx.options = interleaved, offsets if each is None else 0, conjugate
        if inplace:
            ctx.mark_dirty(x)
        return _rotate_by_kernel(*args)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin, each, cu_seqlens = ctx.saved_tensors
        interleaved, offset, conjugate = ctx.options
        offsets = offset if each is None else each
        if _has_storage(dout):
            dx = rotate(dout, cos, sin, interleaved, False, offsets, cu_seqlens, not conjugate)
        else:
            sin = -sin if conjugate else sin
            dx = _gradient_by_operators(dout, cos, sin, interleaved, offsets, cu_seqlens)
        return dx, *(None,) * 7


def _gradient_by_operators(dout: Tensor, cos: Tensor, sin: Tensor, *others: Any) -> Tensor:
    """For is_grads_batched=True, whose tensors have no memory and take few operators beside those
    of autograd's own formulas.
    """
    interleaved, offsets, cu_seqlens = others
    with torch.enable_grad():
        x = torch.zeros(dout.shape, dtype=dout.dtype, device=dout.device, requires_grad=True)
        out = _rotate_by_operators(x, cos, sin, interleaved, False, offsets, cu_seqlens)
    (dx,) = torch.autograd.grad(out, x, dout, create_graph=torch.is_grad_enabled())
    return dx


def _rotate_by_operators(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
    inplace: bool,
    seqlen_offsets: int | Tensor,
    cu_seqlens: Tensor | None,
) -> Tensor:
    if cu_seqlens is None:
        positions = _dense_positions(x, cos, seqlen_offsets)
    else:
        positions = _packed_positions(x, cos, seqlen_offsets, cu_seqlens)
    compute_dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    cos, sin = (
        _rows(table.to(compute_dtype), positions, fill).unsqueeze(-2)
        for table, fill in ((cos, 1.0), (sin, 0.0))
    )
    rotary_dim = 2 * cos.shape[-1]
    turning = x[..., :rotary_dim]
    first, second = _pairs(turning.to(compute_dtype), interleaved)
    turned = _unpair(first * cos - second * sin, first * sin + second * cos, interleaved)
    if inplace:
        turning.copy_(turned)
        return x
    return torch.cat([turned.to(x.dtype), x[..., rotary_dim:]], dim=-1)


def _pairs(x: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    first, second = x.unflatten(-1, (-1, 2)).unbind(-1) if interleaved else x.chunk(2, dim=-1)
    return first, second


def _unpair(first: Tensor, second: Tensor, interleaved: bool) -> Tensor:
    if interleaved:
        return torch.stack([first, second], dim=-1).flatten(-2)
    return torch.cat([first, second], dim=-1)


def _dense_positions(x: Tensor, cos: Tensor, offsets: int | Tensor) -> Tensor | slice:
    """A slice of the tables, or (batch, seqlen) positions where offsets is a tensor."""
    seqlen = x.shape[1]
    if not isinstance(offsets, Tensor):
        _check_offset(x, cos, offsets)
        return slice(offsets, offsets + seqlen)
    positions = offsets.long()[:, None] + torch.arange(seqlen, device=x.device)
    _check_positions(positions, cos)
    return positions


def _check_offset(x: Tensor, cos: Tensor, offset: int) -> None:
    if offset < 0:
        raise ValueError(f"seqlen_offsets: must not be negative, got {offset}")
    positions = offset + x.shape[1]
    if positions > cos.shape[0]:
        raise ValueError(
            f"cos: must have a row for each of {positions} positions "
            f"(seqlen_offsets + seqlen), got {cos.shape[0]}"
        )


def _packed_positions(
    x: Tensor, cos: Tensor, offsets: int | Tensor, cu_seqlens: Tensor
) -> Tensor | slice:
    """(total,) positions; -1 outside every sequence."""
    token = torch.arange(x.shape[0], device=x.device, dtype=cu_seqlens.dtype)
    batch = cu_seqlens.shape[0] - 1
    if batch == 0:
        return torch.full_like(token, -1).long()
    # The sequence that starts last at or before the token: zero-length ones are passed over.
    sequence = torch.searchsorted(cu_seqlens, token, right=True) - 1
    inside = (sequence >= 0) & (sequence < batch)
    sequence = sequence.clamp(0, batch - 1)
    positions = token.long() - cu_seqlens[sequence].long()
    positions = positions + (offsets[sequence].long() if isinstance(offsets, Tensor) else offsets)
    _check_positions(positions[inside] if not x.is_cuda else positions, cos)
    return torch.where(inside, positions, -1)


def _rows(table: Tensor, positions: Tensor | slice, fill: float) -> Tensor:
    """Rows of the table at `positions`; `fill` where it has none."""
    if isinstance(positions, slice):
        return table[positions]
    if table.shape[0] == 0:
        return table.new_full((*positions.shape, table.shape[1]), fill)
    known = (positions >= 0) & (positions < table.shape[0])
    rows = table[positions.clamp(0, table.shape[0] - 1)]
    return torch.where(known.unsqueeze(-1), rows, fill)


def _check_positions(positions: Tensor, cos: Tensor) -> None:
    """Raise for a position outside the tables where reading it costs nothing."""
    if is_compiling() or type(positions) is not Tensor:
        return
    if positions.device.type != "cpu" or positions.numel() == 0:
        return
    lowest, highest = (int(bound) for bound in positions.aminmax())
    if lowest < 0:
        raise ValueError(f"seqlen_offsets: must not be negative, got {lowest}")
    if highest >= cos.shape[0]:
        raise ValueError(
            f"cos: must have a row for each of {highest + 1} positions, got {cos.shape[0]}"
        )


def _check(x: Any, cos: Any, sin: Any, offsets: Any, cu_seqlens: Any) -> None:
    for name, tensor in (("x", x), ("cos", cos), ("sin", sin)):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name}: must be a torch.Tensor, got {type(tensor).__name__}")
        if not tensor.is_floating_point():
            raise TypeError(f"{name}: must have a floating-point dtype, got {tensor.dtype}")
    layout = "(batch, seqlen, heads, head_dim)"
    if cu_seqlens is not None:
        layout = "(total, heads, head_dim) with cu_seqlens"
        _check_integers("cu_seqlens", cu_seqlens, x)
        if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] == 0:
            raise ValueError(
                f"cu_seqlens: must have shape (batch + 1,), got {tuple(cu_seqlens.shape)}"
            )
    if x.dim() != layout.split(")")[0].count(",") + 1:
        raise ValueError(f"x: must have shape {layout}, got {tuple(x.shape)}")
    if cos.dim() != 2 or 2 * cos.shape[1] > x.shape[-1]:
        raise ValueError(
            "cos: must have shape (positions, rotary_dim / 2) with rotary_dim at most head_dim "
            f"({x.shape[-1]}), got {tuple(cos.shape)}"
        )
    if sin.shape != cos.shape:
        raise ValueError(
            f"sin: must have the shape of cos, {tuple(cos.shape)}, got {tuple(sin.shape)}"
        )
    for name, tensor in (("cos", cos), ("sin", sin)):
        if tensor.device != x.device:
            raise ValueError(
                f"{name}: must be on the device of x ({x.device}), got {tensor.device}"
            )
    if isinstance(offsets, Tensor):
        _check_integers("seqlen_offsets", offsets, x)
        batch = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        if tuple(offsets.shape) != (batch,):
            raise ValueError(
                f"seqlen_offsets: must have shape (batch,) = ({batch},), got {tuple(offsets.shape)}"
            )
    elif not isinstance(offsets, (int, torch.SymInt)):
        raise TypeError(f"seqlen_offsets: must be an int or a tensor, got {type(offsets).__name__}")


def _check_integers(name: str, tensor: Any, x: Tensor) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name}: must be a torch.Tensor, got {type(tensor).__name__}")
    if tensor.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name}: dtype must be int32 or int64, got {tensor.dtype}")
    if tensor.device != x.device:
        raise ValueError(f"{name}: must be on the device of x ({x.device}), got {tensor.device}")
