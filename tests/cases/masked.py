"""Attention problems with a mask, a bias or a sink, on top of a dense or packed one."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor

from flash_attn_cuda import BlockSparsity
from tests.cases.attention import DTYPE_NAMES, AttentionCase, VarlenCase
from tests.reference.options import OVER

# Which dimensions of (batch, heads, queries) a mask or a bias has of its own: every subset.
OWN = tuple("".join(x) for x in product(("", "b"), ("", "h"), ("", "q")))


@dataclass(frozen=True)
class RandomMask:
    """Blocks, or pairs where `size` is 1, that are visible with probability `density`.

    given: "attn_mask", "sparsity", a BlockSparsity, "blocks", with a block_size, or "key_lists", of
    blocks of keys, a list for so many `queries` and each key head.
    """

    density: float = 0.3
    size: int = 1
    own: str = "q"
    given: str = "attn_mask"
    queries: int = 1

    def __str__(self) -> str:
        given = self.given + (f"{self.queries}" if self.queries > 1 else "")
        return f"mask{self.density:g}of{self.size}{self.own}-{given}"


@dataclass(frozen=True)
class RandomBias:
    """Normal values, in fp32 or else the dtype of q; `hidden` is the share that is -inf.

    With a `reach` a relative_bias, for which the reference has the bias that it stands for.
    """

    own: str = "bhq"
    fp32: bool = False
    hidden: float = 0.0
    requires_grad: bool = True
    reach: int | None = None

    def __str__(self) -> str:
        dtype = "fp32" if self.fp32 else "same"
        own = self.own if self.reach is None else f"to{self.reach}"
        return f"bias{own}-{dtype}" + (f"-hidden{self.hidden:g}" if self.hidden else "")


@dataclass(frozen=True)
class MaskedInputs:
    """`of`: the inputs without a mask. bias and mask have four dimensions. relative_bias: what the
    bias is made of, if it is.
    """

    of: Any  # AttentionInputs or VarlenInputs
    mask: Tensor | None  # bool, True visible
    blocks: Tensor | None  # bool, the blocks that the mask consists of; of key heads for lists
    bias: Tensor | None
    sink: Tensor | None
    relative_bias: Tensor | None = None

    def options(self) -> dict[str, Tensor]:
        """Those of the reference that there are."""
        return {name: x for name, x in vars(self).items() if name in OVER and x is not None}


@dataclass(frozen=True)
class MaskedCase:
    """A call of flash_attn_func or flash_attn_varlen_func with what a mask adds to it."""

    of: AttentionCase | VarlenCase
    mask: RandomMask | None = None
    bias: RandomBias | None = None
    sink: torch.dtype | None = None
    chunk: int = 0  # attention_chunk

    def __str__(self) -> str:
        parts = [str(x) for x in (self.of, self.mask, self.bias) if x is not None]
        parts += [] if self.sink is None else [f"sink_{DTYPE_NAMES[self.sink]}"]
        return "-".join(parts + ([f"chunk{self.chunk}"] if self.chunk else []))

    @property
    def seqlens(self) -> tuple[int, int]:
        """Queries and keys, of packed sequences the most."""
        if isinstance(self.of, VarlenCase):
            return self.of.max_seqlen_q, self.of.max_seqlen_k
        return self.of.seqlen_q, self.of.seqlen_k

    @property
    def returns_lse(self) -> bool:
        """Whether the public function does: not with dropout and a mask, a bias or a sink."""
        has_more = self.mask is not None or self.bias is not None or self.sink is not None
        return self.of.dropout_p == 0.0 or not has_more

    @property
    def summed(self) -> tuple[str, ...]:
        """Gradients that the backward may sum in any order."""
        has_lists = self.mask is not None and self.mask.given == "key_lists"
        return ("dq", "dk", "dv") if has_lists else ("dq",)

    def make_inputs(self, seed: int = 0) -> MaskedInputs:
        generator = torch.Generator(self.of.device).manual_seed(seed + 1)
        mask = blocks = bias = sink = relative_bias = None
        seqlen_q, seqlen_k = self.seqlens
        if self.mask is not None:
            size, are_lists = self.mask.size, self.mask.given == "key_lists"
            rows = self.mask.queries if are_lists else size
            shape = self._shape(self.mask.own, -(-seqlen_q // rows), -(-seqlen_k // size))
            if are_lists and shape[1] > 1:
                shape = (shape[0], self.of.num_heads_k, *shape[2:])
            blocks = torch.rand(shape, generator=generator, device=self.of.device)
            blocks = blocks < self.mask.density
            of_heads = blocks
            if 1 < shape[1] < self.of.num_heads_q:
                of_heads = blocks.repeat_interleave(self.of.num_heads_q // shape[1], 1)
            mask = expand_blocks(of_heads, (rows, size), seqlen_q, seqlen_k)
        if self.bias is not None:
            shape = self._shape(self.bias.own, seqlen_q, seqlen_k)
            if self.bias.reach is not None:
                shape = self.of.num_heads_q, 2 * self.bias.reach + 1
            dtype = torch.float32 if self.bias.fp32 else self.of.dtype
            bias = torch.randn(shape, generator=generator, device=self.of.device).to(dtype)
            if self.bias.hidden > 0.0:
                chance = torch.rand(shape, generator=generator, device=self.of.device)
                bias = bias.masked_fill(chance < self.bias.hidden, -torch.inf)
            if self.bias.reach is not None:
                relative_bias, bias = bias, self.over_pairs(bias)
        if self.sink is not None:
            heads = self.of.num_heads_q
            sink = torch.randn(heads, generator=generator, device=self.of.device).to(self.sink)
        of = self.of.make_inputs(seed)
        return MaskedInputs(of, mask, blocks, bias, sink, relative_bias)

    def over_pairs(self, relative_bias: Tensor) -> Tensor:
        """(B|1, Hq, Sq, Sk), differentiable: the bias that it stands for."""
        reach = relative_bias.shape[1] // 2
        queries, keys = (torch.arange(x, device=relative_bias.device) for x in self.seqlens)
        distance = keys - queries[:, None]
        places = [(distance - (k - q)).clamp(-reach, reach) + reach for q, k in self._lengths()]
        return torch.stack([relative_bias[:, place] for place in places])

    def _shape(self, own: str, rows: int, columns: int) -> tuple[int, int, int, int]:
        batch = self.of.batch if "b" in own else 1
        return batch, self.of.num_heads_q if "h" in own else 1, rows if "q" in own else 1, columns

    def arguments(self, inputs: MaskedInputs) -> dict[str, Any]:
        """The keyword arguments that a mask adds to a call's."""
        arguments: dict[str, Any] = {"attn_mask": inputs.bias, "sink": inputs.sink}
        if inputs.relative_bias is not None:
            arguments |= {"attn_mask": None, "relative_bias": inputs.relative_bias}
        arguments["attention_chunk"] = self.chunk
        if self.mask is None:
            return arguments
        seqlens = self.seqlens
        if self.mask.given == "attn_mask":
            arguments["attn_mask"] = inputs.mask
        elif self.mask.given == "sparsity":
            made = BlockSparsity.from_mask(inputs.mask, seqlen_q=seqlens[0])
            arguments["block_mask"] = made
        elif self.mask.given == "key_lists":
            arguments["key_lists"] = self._lists(inputs.blocks)
            arguments["key_list_block"] = self.mask.size
            arguments["key_list_queries"] = self.mask.queries
        else:
            rows = -(-seqlens[0] // self.mask.size)
            arguments["block_mask"] = inputs.blocks.expand(-1, -1, rows, -1)
            arguments["block_size"] = (self.mask.size, self.mask.size)
        return arguments

    def _lists(self, blocks: Tensor) -> Tensor:
        """key_lists of blocks, those that a sequence has, in no order, with one twice and none
        between them.
        """
        rows = -(-self.seqlens[0] // self.mask.queries)
        shape = (self.of.batch, self.of.num_heads_k, rows, blocks.shape[-1])
        number = torch.arange(shape[-1], device=blocks.device)
        entries = torch.where(blocks.expand(shape), number, -1).int()
        one = (*shape[:3], 1)
        none = entries.new_full(one, -1)
        entries = torch.cat([none, entries.flip(-1), entries[..., :1]], -1).transpose(1, 2)
        if isinstance(self.of, AttentionCase):
            return entries
        ends = [-(-keys // self.mask.size) for _, keys in self._lengths()]
        lists = [
            entries[i, :n].masked_fill(entries[i, :n] >= end, -1)
            for i, (n, end) in enumerate(zip(self.of.lengths_q, ends, strict=True))
        ]
        total = entries.new_full((self.of.total_q, *entries.shape[2:]), 0)
        packed = torch.cat(lists)
        total[: packed.shape[0]] = packed
        return total

    def visible(self, inputs: MaskedInputs) -> Tensor | None:
        """The mask, and chunks."""
        if self.chunk == 0:
            return inputs.mask
        chunks = chunk_masks(self._lengths(), self.chunk, self.seqlens, self.of.device)
        return chunks if inputs.mask is None else chunks & inputs.mask

    def _lengths(self) -> list[tuple[int, int]]:
        """Queries that attend and keys that are there, of each sequence."""
        of = self.of
        if isinstance(of, AttentionCase):
            return [self.seqlens]
        queries = of.lengths_q if of.used_q is None else of.used_q
        ends = of.keys if of.used_k is None else of.used_k
        begins = (0,) * of.batch if of.leftpad is None else of.leftpad
        return [(q, k - pad) for q, k, pad in zip(queries, ends, begins, strict=True)]


def chunk_masks(
    lengths: list[tuple[int, int]], chunk: int, seqlens: tuple[int, int], device: str
) -> Tensor:
    """attention_chunk by its definition, (B, 1, *seqlens), of sequences of so many queries and
    keys.
    """
    query, key = (torch.arange(n, device=device) for n in seqlens)
    masks = [
        (query[:, None] + keys - queries).div(chunk, rounding_mode="floor") == key // chunk
        for queries, keys in lengths
    ]
    return torch.stack(masks)[:, None]


def expand_blocks(blocks: Tensor, size: tuple[int, int], seqlen_q: int, seqlen_k: int) -> Tensor:
    """Pairs of blocks (B|1, Hq|1, blocks of queries or 1, blocks of keys)."""
    columns = blocks.repeat_interleave(size[1], -1)[..., :seqlen_k]
    return columns.repeat_interleave(size[0], -2)[..., : 1 if blocks.shape[2] == 1 else seqlen_q, :]


def masked_dense(
    mask: RandomMask | None = None,
    bias: RandomBias | None = None,
    sink: torch.dtype | None = None,
    *,
    chunk: int = 0,
    **fields: Any,
) -> MaskedCase:
    """A MaskedCase over an AttentionCase of these fields."""
    return MaskedCase(AttentionCase(**fields), mask, bias, sink, chunk)


def masked_varlen(
    mask: RandomMask | None = None,
    bias: RandomBias | None = None,
    sink: torch.dtype | None = None,
    *,
    chunk: int = 0,
    **fields: Any,
) -> MaskedCase:
    """A MaskedCase over a VarlenCase of these fields."""
    return MaskedCase(VarlenCase(**fields), mask, bias, sink, chunk)
