"""Attention problems over a KV cache. Rows of the cache that hold no key are NaN."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from tests.cases.layouts import DTYPE_NAMES, Alibi, Features, feature, head_dims_text, poisoned
from tests.reference.kvcache import CacheTensors


@dataclass(frozen=True)
class KvCacheInputs(CacheTensors):
    """What a call has besides numbers."""

    alibi_slopes: Tensor | None = None
    sink: Tensor | None = None

    def arguments(self) -> dict[str, Tensor | None]:
        """For the function and for kvcache_reference."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def sequence(self, b: int, capacity: int | None = None) -> KvCacheInputs:
        """Sequence b alone, in a cache of another capacity; its pages stay where they are."""
        at, table = slice(b, b + 1), self.block_table
        changed: dict[str, Any] = {"q": self.q[at], "cache_seqlens": self.cache_seqlens[at]}
        for name in ("qv", "key_lists", "tree_mask", "attn_mask"):
            x = getattr(self, name)
            changed[name] = None if x is None else x[at]
        if table is not None:
            width = table.shape[1] if capacity is None else -(-capacity // self.k_cache.shape[1])
            changed["block_table"] = table.new_full((1, width), -1)
            changed["block_table"][:, : table.shape[1]] = table[at, :width]
            return replace(self, **changed)
        for name in ("k_cache", "v_cache"):
            x = getattr(self, name)[at]
            changed[name] = poisoned(x, 1, capacity or x.shape[1], *x.shape[2:])
            changed[name][:, : x.shape[1]] = x[:, :capacity]
        return replace(self, **changed)


@dataclass(frozen=True)
class KvCacheCase(Features):
    """One call over a cache, one entry of `cached` a sequence. Lengths in tokens."""

    cached: tuple[int, ...] = (100, 0, 37)  # rows before the append, left padding included
    seqlens_q: int | tuple[int, ...] = 1  # a tuple: packed queries
    # appended; packed if queries are
    seqlens_new: int | tuple[int, ...] | None = feature(None, "new{0.seqlens_new}".format)
    capacity: int = 192  # rows of a sequence; with pages rounded up to whole ones
    page_size: int | None = feature(None, "page{0.page_size}".format, needs="paged_kv")
    leftpad: tuple[int, ...] | None = feature(None, "leftpad{0.leftpad}".format)
    batch_idx: tuple[int, ...] | None = feature(None, "idx{0.batch_idx}".format)
    entries: int | None = None  # of the cache, or rows of the block table; None: as needed
    rotary_dim: int = feature(0, "rotary{0.rotary_dim}{0.pairs}".format)
    rotary_interleaved: bool = True
    num_heads_q: int = 4
    num_heads_k: int = 2
    head_dim: int = 64
    head_dim_v: int | None = None  # None: head_dim
    sink: torch.dtype | None = feature(None, lambda x: f"sink_{DTYPE_NAMES[x.sink]}")
    has_qv: bool = feature(False, "qv".format)
    keys_per_list: int | None = feature(None, "lists{0.keys_per_list}".format)  # None: no lists
    tree: str | None = feature(None, "tree_{0.tree}".format, needs="split_kv")  # of TREES
    mask: str | None = feature(None, "mask_{0.mask}".format, needs="bias")  # of MASKS
    reach: int | None = feature(None, "reach{0.reach}".format, needs="bias")  # of a relative_bias

    def __str__(self) -> str:
        parts = [f"b{self.batch}", f"q{self.seqlens_q}", f"cached{self.cached}"]
        parts.append(f"h{self.num_heads_q}/{self.num_heads_k}")
        parts += [head_dims_text(self.head_dim, self.value_dim), *self.feature_parts()]
        return "-".join(parts).replace(" ", "")

    @property
    def pairs(self) -> str:
        return "interleaved" if self.rotary_interleaved else "halves"

    @property
    def batch(self) -> int:
        return len(self.cached)

    @property
    def value_dim(self) -> int:
        return self.head_dim if self.head_dim_v is None else self.head_dim_v

    @property
    def is_packed(self) -> bool:
        return not isinstance(self.seqlens_q, int)

    @property
    def num_entries(self) -> int:
        if self.entries is not None:
            return self.entries
        return self.batch if self.batch_idx is None else max(self.batch_idx, default=0) + 1

    @property
    def pages_per_entry(self) -> int:
        return -(-self.capacity // (self.page_size or 1))

    def of_each(self, seqlens: int | tuple[int, ...] | None) -> tuple[int, ...]:
        """Such lengths, one for each sequence."""
        return seqlens if isinstance(seqlens, tuple) else (seqlens or 0,) * self.batch

    def make_inputs(self, seed: int = 0) -> KvCacheInputs:
        """Standard normal values, the same for the same seed and device type; pages in any order.
        Rows of the cache outside every [leftpad, cached), or that no list names, are NaN.
        """
        generator = torch.Generator(self.device).manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, dtype=self.dtype, device=self.device, generator=generator)

        new = self.seqlens_new
        head_dims = (self.head_dim, self.value_dim)
        q = normal(*self._leading(self.seqlens_q), self.num_heads_q, self.head_dim)
        k, v = (
            None if new is None else normal(*self._leading(new), self.num_heads_k, head_dim)
            for head_dim in head_dims
        )
        block_table = self._block_table(generator)
        cos = sin = None
        if self.rotary_dim > 0:
            positions = torch.arange(self.capacity + 1, dtype=torch.float64)[:, None]
            frequencies = 1e4 ** -torch.linspace(0, 1, self.rotary_dim // 2, dtype=torch.float64)
            angles = positions * frequencies
            cos, sin = (x.to(self.device, self.dtype) for x in (angles.cos(), angles.sin()))
        inputs = KvCacheInputs(
            q=q,
            k_cache=self._cache(normal, block_table, head_dims[0]),
            v_cache=self._cache(normal, block_table, head_dims[1]),
            k=k,
            v=v,
            rotary_cos=cos,
            rotary_sin=sin,
            cache_seqlens=self._integers(self.cached),
            cache_batch_idx=self._integers(self.batch_idx),
            cache_leftpad=self._integers(self.leftpad),
            block_table=block_table,
            cu_seqlens_q=self._offsets(self.seqlens_q),
            cu_seqlens_k_new=self._offsets(new),
            alibi_slopes=self.make_slopes(self.batch, self.num_heads_q, generator),
            sink=self._sink(generator),
            qv=normal(*q.shape[:-1], self.value_dim) if self.has_qv else None,
            tree_mask=self._tree_mask(generator),
            attn_mask=self._mask(generator),
            relative_bias=self._relative_bias(generator),
        )
        return inputs if self.keys_per_list is None else self._with_lists(inputs, generator)

    def _tree_mask(self, generator: torch.Generator) -> Tensor | None:
        """In a larger tensor, of which all else would show keys; packed with columns too many."""
        if self.tree is None:
            return None
        queries, counts = self.seqlens_q, self.of_each(self.seqlens_q)
        longest = max(counts, default=0)
        trees = [draw_tree(self.tree, n, generator) for n in counts]
        if isinstance(queries, int):
            around = torch.ones(self.batch, longest + 1, longest + 8, dtype=torch.bool)
            mask = around.to(self.device)[:, :longest, 3 : 3 + longest]
            for of, tree in zip(mask, trees, strict=True):
                of.copy_(tree)
            return mask
        mask = torch.ones(sum(counts), longest + 7, dtype=torch.bool, device=self.device)
        for rows, tree in zip(mask.split(counts), trees, strict=True):
            rows[:, 3 : 3 + len(tree)] = tree
        return mask[:, 3:]

    def _mask(self, generator: torch.Generator) -> Tensor | None:
        """Rows of a wider tensor, whose other columns would hide, or be NaN. A third is hidden."""
        if self.mask is None:
            return None
        kind, own = self.mask.split("-")
        queries = self.seqlens_q
        longest = queries if isinstance(queries, int) else max(queries, default=0)
        rows = self.pages_per_entry * self.page_size if self.page_size else self.capacity
        sizes = {"b": self.batch, "h": self.num_heads_q, "q": longest}
        shape = (*(size if name in own else 1 for name, size in sizes.items()), rows)
        shown = torch.rand(shape, device=self.device, generator=generator) > 1 / 3
        if kind == "bool":
            around = torch.zeros(*shape[:-1], rows + 3, dtype=torch.bool, device=self.device)
            mask = around[..., :rows]
            return mask.copy_(shown)
        dtype = self.dtype if kind == "bias" else torch.float32
        bias = torch.randn(shape, device=self.device, generator=generator).to(dtype)
        mask = poisoned(bias, *shape[:-1], rows + 3)[..., :rows]
        return mask.copy_(bias.masked_fill(~shown, -torch.inf))

    def _relative_bias(self, generator: torch.Generator) -> Tensor | None:
        """Of q's dtype or, of an even reach, fp32, in a wider tensor of NaN."""
        if self.reach is None:
            return None
        shape, dtype = (self.num_heads_q, 2 * self.reach + 1), self.dtype
        bias = torch.randn(shape, device=self.device, generator=generator)
        bias = bias.to(torch.float32 if self.reach % 2 == 0 else dtype)
        return poisoned(bias, shape[0], shape[1] + 3)[:, 1:-2].copy_(bias)

    def _sink(self, generator: torch.Generator) -> Tensor | None:
        if self.sink is None:
            return None
        sink = torch.randn(self.num_heads_q, device=self.device, generator=generator)
        return sink.to(self.sink)

    def _with_lists(self, inputs: KvCacheInputs, generator: torch.Generator) -> KvCacheInputs:
        """Lists, and NaN in rows of the cache that none of them names."""
        batch, table, lists = self.batch, inputs.block_table, []
        queries, new = (self.of_each(n) for n in (self.seqlens_q, self.seqlens_new))
        for b, pad in enumerate(self.leftpad or (0,) * batch):
            shape = (queries[b], self.num_heads_k, self.keys_per_list or 0)
            lists.append(draw_lists(shape, self.cached[b] + new[b] - pad, generator))
            named = torch.zeros(self.capacity, dtype=torch.bool, device=self.device)
            named[lists[-1][lists[-1] >= 0].long() + pad] = True
            entry, rows = self.batch_idx[b] if self.batch_idx else b, (~named).nonzero().flatten()
            places: Any = (entry, rows)
            if table is not None:
                size = inputs.k_cache.shape[1]
                places = (table[entry][rows // size].long(), rows % size)
            inputs.k_cache[places] = inputs.v_cache[places] = torch.nan
        packed = torch.cat(lists)
        if not self.is_packed:
            packed = packed.unflatten(0, (batch, -1)) if batch > 0 else packed[None][:0]
        return replace(inputs, key_lists=packed)

    def _leading(self, seqlens: int | tuple[int, ...]) -> tuple[int, ...]:
        return (self.batch, seqlens) if isinstance(seqlens, int) else (sum(seqlens),)

    def _offsets(self, seqlens: int | tuple[int, ...] | None) -> Tensor | None:
        if seqlens is None or isinstance(seqlens, int):
            return None
        return self._integers((0, *accumulate(seqlens)))

    def _integers(self, values: tuple[int, ...] | None) -> Tensor | None:
        if values is None:
            return None
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def _block_table(self, generator: torch.Generator) -> Tensor | None:
        if self.page_size is None:
            return None
        count = self.num_entries * self.pages_per_entry
        # One page more than is used, so that pages are not simply all of the pool.
        order = torch.randperm(count + 1, device=self.device, generator=generator)[:count]
        return order.view(self.num_entries, self.pages_per_entry).to(torch.int32)

    def _cache(
        self, normal: Callable[..., Tensor], block_table: Tensor | None, head_dim: int
    ) -> Tensor:
        rows = self.page_size or 1
        entries = normal(
            self.num_entries,
            self.capacity if block_table is None else self.pages_per_entry * rows,
            self.num_heads_k,
            head_dim,
        )
        holds_key = torch.zeros(entries.shape[:2], dtype=torch.bool)
        for index, used in enumerate(self.cached):
            entry = index if self.batch_idx is None else self.batch_idx[index]
            begin = 0 if self.leftpad is None else self.leftpad[index]
            holds_key[entry, begin:used] = True
        entries[~holds_key.to(self.device)] = torch.nan
        if block_table is None:
            return entries
        pages = entries.view(-1, rows, *entries.shape[2:])
        pool = torch.full_like(pages[:1], torch.nan).repeat(len(pages) + 1, 1, 1, 1)
        pool[block_table.flatten().long()] = pages
        return pool


def draw_lists(shape: tuple[int, int, int], seqlen_k: int, generator: torch.Generator) -> Tensor:
    """int32 (Sq, Hk, n): of a query keys at random, some of them twice and some none, or neighbours
    in order, or, of some, none at all.
    """
    device = generator.device

    def uniform(*sizes: int) -> Tensor:
        return torch.rand(sizes, device=device, generator=generator)

    anywhere = (uniform(*shape) * seqlen_k).int()
    first = (uniform(*shape[:2], 1) * seqlen_k).int()
    in_order = first + torch.arange(shape[2], device=device, dtype=torch.int32)
    is_none = (uniform(*shape) < 0.2) | (anywhere >= seqlen_k)
    nothing = torch.where(uniform(*shape) < 0.5, -1, -(2**31)).int()
    anywhere = torch.where(is_none, nothing, anywhere)
    in_order = torch.where(in_order < seqlen_k, in_order, nothing)
    kind = uniform(*shape[:2], 1)
    return torch.where(kind < 0.5, anywhere, torch.where(kind < 0.9, in_order, nothing))


TREES = ("drawn", "any", "none", "triangle")


def draw_tree(kind: str, size: int, generator: torch.Generator) -> Tensor:
    """bool (size, size): what of their keys the queries see. "drawn": each its ancestors and
    itself, of any parents before it; "any": each any; "none"; "triangle": as under causal.
    """
    device = generator.device
    if kind == "any":
        return torch.rand(size, size, device=device, generator=generator) < 0.5
    if kind != "drawn":
        return torch.ones(size, size, dtype=torch.bool, device=device).tril(
            0 if kind == "triangle" else -size
        )
    mask = torch.eye(size, dtype=torch.bool)
    parents = torch.rand(size, device=device, generator=generator).tolist()
    for i, share in enumerate(parents):
        parent = int(share * (i + 1)) - 1  # one of those before it, or the last key of all
        if parent >= 0:
            mask[i] |= mask[parent]
    return mask.to(device)


# A bool mask, or a bias of q's dtype or fp32, and its dimensions of batch, heads and queries.
MASKS = ("bool-", "bool-bq", "bias-bhq", "bias-h", "fp32-q", "fp32-bh")
QUERIES: dict[str, dict[str, Any]] = {
    "decode": {"seqlens_q": 1},
    "append": {"seqlens_q": 1, "seqlens_new": 1},
    "chunk": {"seqlens_q": 5, "seqlens_new": 5},
    "more_keys": {"seqlens_q": 2, "seqlens_new": 6},
    "packed": {"seqlens_q": (3, 0, 7)},
    "packed_append": {"seqlens_q": (3, 1, 7), "seqlens_new": (3, 1, 7)},
    "packed_other": {"seqlens_q": (3, 1, 2), "seqlens_new": (0, 5, 7)},
}
ROTARY: dict[str, dict[str, Any]] = {
    "none": {},
    "pairs": {"rotary_dim": 8},
    "halves": {"rotary_dim": 16},
}
# What calls over a cache are drawn from, by names of cache_case's arguments.
CACHE_AXES: dict[str, list[Any]] = {
    "queries": list(QUERIES),
    "rotary": list(ROTARY),
    "page_size": [None, 1, 7, 16],
    "leftpad": [None, (3, 0, 20)],
    "batch_idx": [None, (4, 0, 2)],
    "causal": [False, True],
    "window": [(-1, -1), (6, -1), (9, 3)],
    "features": [{}, {"softcap": 2.0}, {"alibi": Alibi.per_batch}],
    "heads": [(4, 4), (6, 2), (4, 1)],
    "sink": [None, torch.float32],
}


def cache_case(
    queries: str, rotary: str, features: dict[str, Any], heads: tuple[int, int], **fields: Any
) -> KvCacheCase:
    return KvCacheCase(
        cached=(30, 0, 25),
        capacity=40,
        rotary_interleaved=rotary == "pairs",
        num_heads_q=heads[0],
        num_heads_k=heads[1],
        device="cpu",
        **QUERIES[queries],
        **ROTARY[rotary],
        **features,
        **{"head_dim": 16, **fields},
    )
