"""What masks.py compares: masks in blocks, documents, biases, sinks, lists, and their references.

A group is one problem; its entrants compute it, or what it is compared with, from the same memory.
No two calls find their data in a cache: inputs are larger than any.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.core.feature_tables import Target
from benchmarks.core.lengths import log_normal_lengths
from benchmarks.core.metrics import Pass
from benchmarks.peers.backends import (
    BACKENDS,
    TensorOrder,
    Unsupported,
    compiled_flex_attention,
    require_cuda,
    require_ours,
)
from benchmarks.suites.feature_cost import plain_case
from benchmarks.suites.mask_blocks import BLOCK, flex_block_mask, random_blocks, window_blocks
from benchmarks.suites.varlen import ours_packed
from tests.cases.attention import AttentionCase, AttentionInputs, VarlenCase, VarlenInputs

HEADS = 16
DENSITY_SEQLEN = 16_384
DENSITIES, QUICK_DENSITIES = (1.0, 0.5, 0.25, 0.1, 0.05), (0.25, 0.05)
DOCUMENTS, MEAN_DOCUMENT = 32, 1024
BIAS_SEQLEN = 4096
DISTANCE_SEQLENS, REACH = (4096, 16_384), 128  # of a relative_bias, as T5's
SINK_SEQLENS, QUICK_SINK_SEQLENS = (1024, 4096, 16_384), (4096,)
LIST_SEQLENS, LIST_HEADS = (16_384, 65_536), (64, 4)  # as native sparse attention's
LISTED_BLOCKS, LISTED_KEYS = 16, 64  # of a query, and of a block
HEAD_DIMS = (64, 128)

FLA = "fla parallel_nsa"
ALL, RANDOM, WINDOW = "all", "random", "window"
BLOCKS = {ALL: random_blocks, RANDOM: random_blocks, WINDOW: window_blocks}

# time_ratio: time over the reference's; speedup: the peer's time over it.
OF_DENSE_TIME = {0.25: 0.29, 0.05: 0.075}
FASTER_THAN_FLEX = Target("speedup", 1.15)
FASTER_THAN_TORCH = Target("speedup", 1.3)
TWICE_AS_FAST_AS_FLEX = Target("speedup", 2.0)
LIKE_PACKED = Target("time_ratio", 1.1, at_least=False)
SINK_COSTS_LITTLE = Target("time_ratio", 1.02, at_least=False)

Attend = Callable[..., Tensor]  # of an entrant's inputs


@dataclass(frozen=True)
class MaskGroup:
    """One problem, and for block masks the share of pairs that is visible."""

    part: str
    case: AttentionCase | VarlenCase
    mask: str
    density: float | None = None

    def __str__(self) -> str:
        density = "" if self.density is None else f" {self.density:g}"
        return f"{self.mask}{density} d{self.case.head_dim} S{self.seqlen}"

    @property
    def seqlen(self) -> int:
        """Tokens of a sequence; of packed ones, of all."""
        return self.case.total_q if isinstance(self.case, VarlenCase) else self.case.seqlen_q

    @property
    def on_cuda(self) -> bool:
        return torch.device(self.case.device).type == "cuda"


@dataclass(frozen=True)
class Entrant:
    """Something to time. `prepare` makes the function that is called with `inputs`, which are
    leaves: q, k, v in `order` and what else has a gradient.
    """

    name: str
    prepare: Callable[[], Attend]
    inputs: tuple[Tensor, ...]
    dout: Tensor
    order: TensorOrder = TensorOrder.seqlen_first
    scope: Callable[[], AbstractContextManager] = nullcontext
    density: float = 1.0  # share of the case's pairs that it must compute
    reference: str | None = None  # the entrant whose time its own is a multiple of
    peer: str | None = None  # torch's, which should take longer
    twin: str | None = None  # one that computes the same, to compare results with
    targets: tuple[Target, ...] = ()
    passes: tuple[Pass, ...] = tuple(Pass)


# -- groups ----------------------------------------------------------------------------------------

HeadDims = tuple[int, ...] | None  # None: those of the part


def density_groups(device: str, quick: bool, head_dims: HeadDims) -> list[MaskGroup]:
    groups = []
    for head_dim in head_dims or HEAD_DIMS[1:]:
        case = one_sequence(DENSITY_SEQLEN, head_dim, device)
        for density in QUICK_DENSITIES if quick else DENSITIES:
            masks = (ALL,) if density == 1.0 else (RANDOM, WINDOW)
            groups += [MaskGroup("density", case, mask, density) for mask in masks]
    return groups


def document_groups(device: str, quick: bool, head_dims: HeadDims) -> list[MaskGroup]:
    return [
        MaskGroup("document", packed_documents(head_dim, device), f"{DOCUMENTS} documents")
        for head_dim in head_dims or HEAD_DIMS[1:]
    ]


def bias_groups(device: str, quick: bool, head_dims: HeadDims) -> list[MaskGroup]:
    return [
        MaskGroup("bias", one_sequence(BIAS_SEQLEN, head_dim, device), "bias")
        for head_dim in head_dims or (HEAD_DIMS[1:] if quick else HEAD_DIMS)
    ]


def distance_groups(device: str, quick: bool, head_dims: HeadDims) -> list[MaskGroup]:
    return [
        MaskGroup("distance", one_sequence(seqlen, head_dim, device), "relative bias")
        for head_dim in head_dims or HEAD_DIMS[:1]
        for seqlen in (DISTANCE_SEQLENS[:1] if quick else DISTANCE_SEQLENS)
    ]


def list_groups(device: str, quick: bool, head_dims: HeadDims) -> list[MaskGroup]:
    heads_q, heads_k = LIST_HEADS
    return [
        MaskGroup("lists", case, f"{LISTED_BLOCKS} blocks of {LISTED_KEYS}", listed_share(seqlen))
        for head_dim in head_dims or HEAD_DIMS[1:]
        for seqlen in (LIST_SEQLENS[:1] if quick else LIST_SEQLENS)
        for case in (
            replace(
                one_sequence(seqlen, head_dim, device),
                num_heads_q=heads_q,
                num_heads_k=heads_k,
                causal=True,
            ),
        )
    ]


def sink_groups(device: str, quick: bool, head_dims: HeadDims) -> list[MaskGroup]:
    return [
        MaskGroup("sink", plain_case(seqlen, head_dim, True, device), "sink")
        for head_dim in head_dims or (HEAD_DIMS[1:] if quick else HEAD_DIMS)
        for seqlen in (QUICK_SINK_SEQLENS if quick else SINK_SEQLENS)
    ]


def one_sequence(seqlen: int, head_dim: int, device: str) -> AttentionCase:
    return AttentionCase(
        batch=1,
        seqlen_q=seqlen,
        seqlen_k=seqlen,
        num_heads_q=HEADS,
        num_heads_k=HEADS,
        head_dim=head_dim,
        device=device,
    )


def packed_documents(head_dim: int, device: str) -> VarlenCase:
    return VarlenCase(
        lengths_q=log_normal_lengths(DOCUMENTS, MEAN_DOCUMENT),
        num_heads_q=HEADS,
        num_heads_k=HEADS,
        head_dim=head_dim,
        causal=True,
        device=device,
    )


# -- entrants of a group ---------------------------------------------------------------------------


def density_entrants(group: MaskGroup) -> list[Entrant]:
    case, density = group.case, group.density
    inputs = case.make_inputs()
    ours = tensors_of(inputs)
    make_blocks, count = BLOCKS[group.mask], case.seqlen_q // BLOCK
    blocks = make_blocks(count, case.num_heads_q, density).to(case.device)
    limit = OF_DENSE_TIME.get(density)
    targets = () if limit is None else (Target("time_ratio", limit, at_least=False),)
    return [
        Entrant(
            "block mask",
            partial(ours_in_blocks, case, blocks),
            *ours,
            density=density,
            reference="dense",
            peer="FlexAttention",
            twin="FlexAttention",
            targets=(*targets, FASTER_THAN_FLEX),
        ),
        Entrant("dense", partial(BACKENDS["ours"].prepare, case), *ours),
        Entrant(
            "FlexAttention",
            partial(flex_in_blocks, case, blocks),
            *tensors_of(inputs, heads_first),
            order=TensorOrder.heads_first,
            density=density,
        ),
    ]


def document_entrants(group: MaskGroup) -> list[Entrant]:
    """The mask with causality in its bits, and with causality left to the call."""
    case = group.case
    inputs = case.make_inputs()
    dense = tensors_of(inputs, lambda x: x[None])
    like_packed = {"reference": "packed", "twin": "packed"}
    return [
        Entrant(
            "causal mask",
            partial(ours_of_documents, case, in_mask=True),
            *dense,
            **like_packed,
            targets=(LIKE_PACKED,),
        ),
        Entrant(
            "mask, causal call",
            partial(ours_of_documents, case, in_mask=False),
            *dense,
            **like_packed,
        ),
        Entrant("packed", partial(ours_packed, case), *tensors_of(inputs)),
    ]


def bias_entrants(group: MaskGroup) -> list[Entrant]:
    """Backward with the bias's gradient."""
    case = group.case
    generator = torch.Generator(case.device).manual_seed(1)
    shape = (1, case.num_heads_q, case.seqlen_q, case.seqlen_k)
    bias = torch.randn(shape, dtype=case.dtype, device=case.device, generator=generator)
    (bias,) = leaves(bias)
    inputs = case.make_inputs()
    ours, dout = tensors_of(inputs)
    views, dout_view = tensors_of(inputs, heads_first)
    return [
        Entrant(
            "bias",
            partial(ours_with_bias, case),
            (*ours, bias),
            dout,
            peer="torch efficient",
            twin="torch efficient",
            targets=(FASTER_THAN_TORCH,),
        ),
        Entrant(
            "torch efficient",
            partial(torch_with_bias, case),
            (*views, bias),
            dout_view,
            order=TensorOrder.heads_first,
            scope=partial(sdpa_kernel, SDPBackend.EFFICIENT_ATTENTION),
        ),
    ]


def distance_entrants(group: MaskGroup) -> list[Entrant]:
    """Backward with the table's gradient. A bias over pairs takes seconds at more than the least
    length.
    """
    case = group.case
    generator = torch.Generator(case.device).manual_seed(1)
    shape = (case.num_heads_q, 2 * REACH + 1)
    rounded = torch.randn(shape, dtype=case.dtype, device=case.device, generator=generator)
    table = rounded.float()  # as sums are; torch's bias over pairs is rounded
    has_twin = case.seqlen_q == DISTANCE_SEQLENS[0]
    inputs = case.make_inputs()
    ours, dout = tensors_of(inputs)
    views, dout_view = tensors_of(inputs, heads_first)
    torchs = {"order": TensorOrder.heads_first, "dout": dout_view}
    entrants = [
        Entrant(
            "relative bias",
            partial(ours_by_distance, case),
            (*ours, *leaves(table)),
            dout,
            peer="flex",
            twin="torch, dense bias" if has_twin else None,
            targets=(TWICE_AS_FAST_AS_FLEX,),
        ),
        # With a table of fp32 no tile of torch 2.11's fits a Hopper GPU.
        Entrant("flex", partial(flex_by_distance, case), (*views, *leaves(rounded)), **torchs),
    ]
    dense = Entrant(
        "torch, dense bias",
        partial(torch_by_distance, case),
        (*views, *leaves(table)),
        scope=partial(sdpa_kernel, SDPBackend.EFFICIENT_ATTENTION),
        **torchs,
    )
    return [*entrants, dense] if has_twin else entrants


def list_entrants(group: MaskGroup) -> list[Entrant]:
    """Lists of blocks of each query, and the mask that they stand for, whose bits are many."""
    case = group.case
    lists = listed_blocks(case.seqlen_q, case.num_heads_k, case.device)
    ours = tensors_of(case.make_inputs())
    common = {"density": group.density, "reference": "causal"}
    has_mask = case.seqlen_q == LIST_SEQLENS[0]
    mask = Entrant("their mask", partial(ours_by_mask, case, lists), *ours, **common)
    twin = mask.name if has_mask else None
    return [
        Entrant("lists", partial(ours_by_lists, case, lists), *ours, **common, peer=FLA, twin=twin),
        *([mask] if has_mask else []),
        Entrant("causal", partial(BACKENDS["ours"].prepare, case), *ours),
        Entrant(FLA, partial(fla_by_lists, case, lists), *ours, density=group.density),
    ]


def listed_blocks(seqlen: int, heads: int, device: str) -> Tensor:
    """int32 (1, seqlen, heads, n): the first block, a query's own, that before it, and others at
    random, -1 for those that come twice.
    """
    generator = torch.Generator(device).manual_seed(1)
    own = torch.arange(seqlen, device=device)[:, None] // LISTED_KEYS
    shape = 1, seqlen, heads, LISTED_BLOCKS
    chance = torch.rand(shape, device=device, generator=generator)
    lists = (chance * (own[..., None] + 1)).int()
    lists[..., 0], lists[..., 1], lists[..., 2] = 0, own, (own - 1).clamp_min(0)
    lists = lists.sort(-1).values
    repeats = torch.nn.functional.pad(lists[..., 1:] == lists[..., :-1], (1, 0))
    return lists.masked_fill(repeats, -1)


def listed_share(seqlen: int) -> float:
    """Of the pairs of causal attention those of listed blocks, about."""
    lists = listed_blocks(seqlen, 1, "cpu")[0, :, 0]
    behind = torch.arange(1, seqlen + 1)[:, None] - lists * LISTED_KEYS
    keys = behind.clamp(0, LISTED_KEYS) * (lists >= 0)
    return round(keys.sum().item() / (seqlen * (seqlen + 1) / 2), 4)


def sink_entrants(group: MaskGroup) -> list[Entrant]:
    """A constant sink and, backward, one with a gradient."""
    case = group.case
    generator = torch.Generator(case.device).manual_seed(1)
    sink = torch.randn(case.num_heads_q, device=case.device, generator=generator)
    inputs, dout = tensors_of(case.make_inputs())
    costs_little = {"reference": "plain", "targets": (SINK_COSTS_LITTLE,)}
    return [
        Entrant("sink", partial(ours_with_sink, case, sink), inputs, dout, **costs_little),
        Entrant(
            "sink with gradient",
            partial(ours_with_sink, case),
            (*inputs, *leaves(sink)),
            dout,
            **costs_little,
            passes=(Pass.backward,),
        ),
        Entrant("plain", partial(BACKENDS["ours"].prepare, case), inputs, dout),
    ]


def tensors_of(
    inputs: AttentionInputs | VarlenInputs, view: Callable[[Tensor], Tensor] = lambda x: x
) -> tuple[tuple[Tensor, ...], Tensor]:
    """((q, k, v), dout) as views."""
    return leaves(*map(view, (inputs.q, inputs.k, inputs.v))), view(inputs.dout)


def heads_first(x: Tensor) -> Tensor:
    return x.transpose(1, 2)


def leaves(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The same memory, each with a gradient of its own."""
    return tuple(x.detach().requires_grad_() for x in tensors)


# -- calls -----------------------------------------------------------------------------------------


def ours_in_blocks(case: AttentionCase, blocks: Tensor) -> Attend:
    from flash_attn_cuda import BlockSparsity, flash_attn_func

    require_ours(case.device)
    sparsity = BlockSparsity.from_blocks(blocks, BLOCK, case.seqlen_q, case.seqlen_k)
    return partial(flash_attn_func, block_mask=sparsity)


def require_triton(case: AttentionCase) -> None:
    require_cuda(case)
    try:
        import triton  # noqa: F401
    except ImportError as error:
        raise Unsupported(f"triton is not importable: {error}") from None


def flex_in_blocks(case: AttentionCase, blocks: Tensor) -> Attend:
    require_triton(case)
    return partial(compiled_flex_attention(), block_mask=flex_block_mask(blocks))


def ours_of_documents(case: VarlenCase, in_mask: bool) -> Attend:
    """Causality `in_mask`, else in the call."""
    from flash_attn_cuda import flash_attn_func, masks

    require_ours(case.device)
    lengths = torch.tensor(case.lengths_q, device=case.device)
    ids = torch.arange(case.batch, device=case.device).repeat_interleave(lengths)
    sparsity = masks.document(ids, causal=in_mask)
    return partial(flash_attn_func, block_mask=sparsity, causal=not in_mask)


def ours_with_bias(case: AttentionCase) -> Attend:
    from flash_attn_cuda import flash_attn_func

    require_ours(case.device)
    return lambda q, k, v, bias: flash_attn_func(q, k, v, attn_mask=bias)


def torch_with_bias(case: AttentionCase) -> Attend:
    require_cuda(case)
    return F.scaled_dot_product_attention  # whose fourth argument is the bias


def ours_by_distance(case: AttentionCase) -> Attend:
    from flash_attn_cuda import flash_attn_func

    require_ours(case.device)
    return lambda q, k, v, table: flash_attn_func(q, k, v, relative_bias=table)


def flex_by_distance(case: AttentionCase) -> Attend:
    require_triton(case)
    flex = compiled_flex_attention()

    def attend(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
        def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return score + table[h, (j - i).clamp(-REACH, REACH) + REACH]

        return flex(q, k, v, score_mod=score_mod)

    return attend


def torch_by_distance(case: AttentionCase) -> Attend:
    """The bias is made in every call, as of a table that is trained."""
    require_cuda(case)
    query, key = (torch.arange(x, device=case.device) for x in (case.seqlen_q, case.seqlen_k))
    place = (key - query[:, None]).clamp(-REACH, REACH) + REACH

    def attend(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, table[None, :, place].to(q.dtype))

    return attend


def ours_with_sink(case: AttentionCase, constant: Tensor | None = None) -> Attend:
    """Without a constant sink the function takes one as its last argument."""
    from flash_attn_cuda import flash_attn_func

    require_ours(case.device)
    causal = case.causal
    if constant is not None:
        return partial(flash_attn_func, causal=causal, sink=constant)
    return lambda q, k, v, sink: flash_attn_func(q, k, v, causal=causal, sink=sink)


def ours_by_lists(case: AttentionCase, lists: Tensor) -> Attend:
    from flash_attn_cuda import flash_attn_func

    require_ours(case.device)
    return partial(flash_attn_func, causal=True, key_lists=lists, key_list_block=LISTED_KEYS)


def ours_by_mask(case: AttentionCase, lists: Tensor) -> Attend:
    from flash_attn_cuda import BlockSparsity, flash_attn_func

    require_ours(case.device)
    of_heads = lists.repeat_interleave(case.num_heads_q // case.num_heads_k, 2)
    made = BlockSparsity.from_key_lists(of_heads, LISTED_KEYS, case.seqlen_q, case.seqlen_k)
    return partial(flash_attn_func, causal=True, block_mask=made)


def fla_by_lists(case: AttentionCase, lists: Tensor) -> Attend:
    require_triton(case)
    try:
        from fla.ops.nsa import parallel_nsa
    except ImportError as error:
        raise Unsupported(f"fla is not importable: {error}") from None
    return partial(
        parallel_nsa,
        block_indices=lists.long(),
        block_counts=LISTED_BLOCKS,
        block_size=LISTED_KEYS,
    )


Groups = Callable[[str, bool, HeadDims], list[MaskGroup]]
PARTS: dict[str, tuple[Groups, Callable[[MaskGroup], list[Entrant]]]] = {
    "density": (density_groups, density_entrants),
    "document": (document_groups, document_entrants),
    "bias": (bias_groups, bias_entrants),
    "distance": (distance_groups, distance_entrants),
    "sink": (sink_groups, sink_entrants),
    "lists": (list_groups, list_entrants),
}
