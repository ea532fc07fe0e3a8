"""One query a sequence over a KV cache, in CUDA graphs: bytes of keys and values per second.

A graph holds many calls, each on another copy of the cache, together several times larger than the
L2 cache, so that every byte comes from memory. Dense and paged calls read the same memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.core.feature_tables import Column, Row, Target, number, quotient, ratio, timing_of
from benchmarks.core.lengths import log_normal_lengths
from benchmarks.core.runner import Call, Status, Subject, measure
from benchmarks.core.turns import Protocol
from benchmarks.peers.backends import (
    FA3_MAX_HEAD_DIM,
    Unsupported,
    found,
    require_cuda,
    require_ours,
)
from benchmarks.peers.fa3 import flash_attention_3_cached

PAGE_SIZES = (16, 256)
ROWS_MULTIPLE = 256  # of a sequence's capacity: whole pages of either size
CACHE_MULTIPLE = 10  # copies of the cache together, in sizes of the L2 cache
GRAPH_MS = 1.0  # least time of a graph, by the estimate below
ESTIMATE_BYTES_PER_MS = 4e9
ESTIMATE_LAUNCH_MS = 0.005
COPY_BYTES = 1 << 30

NumberedCall = Callable[[int], object]  # takes the number of a copy
FLASH = partial(sdpa_kernel, SDPBackend.FLASH_ATTENTION)
DENSE, APPEND, COPY = "dense", "dense, append + rotary", "device copy"
TORCH, FA3 = "torch flash", "FlashAttention-3"

COLUMNS = (
    Column("batch", "group"),
    Column("KV MB", "kv_megabytes", number(3)),
    Column("calls a graph", "calls"),
    Column("cache", "what"),
    Column("us a call", "microseconds", number(3)),
    Column("KV TB/s", "terabytes_per_second", number(3)),
    Column("/ dense", "over_dense", ratio),
    Column("/ copy", "over_copy", ratio),
)


class GraphedGroup:
    """Calls over a cache, of which a graph holds many."""

    device: str
    kv_bytes: int  # keys and values that a call reads

    @property
    def estimate_ms(self) -> float:
        """Of a call."""
        return self.kv_bytes / ESTIMATE_BYTES_PER_MS + ESTIMATE_LAUNCH_MS

    @property
    def on_cuda(self) -> bool:
        return torch.device(self.device).type == "cuda"

    @property
    def copies(self) -> int:
        if not self.on_cuda:
            return 1
        cache = torch.cuda.get_device_properties(self.device).L2_cache_size
        return max(1, math.ceil(CACHE_MULTIPLE * cache / self.kv_bytes))

    @property
    def calls(self) -> int:
        """Of a graph: each copy equally often, for long enough to be timed."""
        copies = self.copies
        return (
            copies * math.ceil(GRAPH_MS / (copies * self.estimate_ms)) if self.on_cuda else copies
        )


@dataclass(frozen=True)
class DecodeGroup(GraphedGroup):
    """One batch of cached sequences, lengths in tokens, and what its dense cache must reach."""

    name: str
    lengths: tuple[int, ...]
    target: Target | None = None
    num_heads_q: int = 32
    num_heads_k: int = 8
    head_dim: int = 128
    dtype: torch.dtype = torch.bfloat16
    device: str = "cuda"

    def __str__(self) -> str:
        return self.name

    @property
    def batch(self) -> int:
        return len(self.lengths)

    @property
    def capacity(self) -> int:
        """Rows of a sequence in the cache."""
        return math.ceil(max(self.lengths) / ROWS_MULTIPLE) * ROWS_MULTIPLE

    @property
    def kv_bytes(self) -> int:
        return 2 * sum(self.lengths) * self.num_heads_k * self.head_dim * self.dtype.itemsize


def groups(device: str = "cuda", quick: bool = False) -> list[DecodeGroup]:
    def even(batch: int, seqlen: int, target: Target | None = None) -> DecodeGroup:
        return DecodeGroup(f"B{batch} S{seqlen // 1024}k", (seqlen,) * batch, target, device=device)

    def at_least(terabytes_per_second: float) -> Target:
        return Target("terabytes_per_second", terabytes_per_second)

    def wide(batch: int, seqlen: int) -> DecodeGroup:
        of_narrow = even(batch, seqlen)
        return replace(of_narrow, name=f"{of_narrow} d512", num_heads_k=4, head_dim=512)

    some = [
        even(1, 8192, Target("microseconds", 20.0, at_least=False)),
        even(32, 4096, at_least(3.6)),
    ]
    if quick:
        return some
    uneven = DecodeGroup("B32 S4k uneven", log_normal_lengths(32, 4096), device=device)
    return [
        even(1, 1024),
        some[0],
        even(1, 65_536, at_least(3.0)),
        even(8, 8192),
        some[1],
        uneven,
        even(128, 8192, at_least(3.9)),
        wide(8, 8192),
        wide(1, 32_768),
    ]


class Caches:
    """Random tensors of a group: for each copy a query and a cache, and a new row to append."""

    def __init__(self, group: DecodeGroup) -> None:
        generator = torch.Generator(group.device).manual_seed(0)

        def normal(*shape: int) -> Tensor:
            x = torch.empty(shape, dtype=group.dtype, device=group.device)
            return x.normal_(generator=generator)

        lead, row = (group.copies, group.batch), (group.num_heads_k, group.head_dim)
        self.group = group
        self.q = normal(*lead, 1, group.num_heads_q, group.head_dim)
        self.k, self.v = (normal(*lead, group.capacity, *row) for _ in range(2))
        self.new_k, self.new_v = (normal(*lead, 1, *row) for _ in range(2))
        self.lengths = torch.tensor(group.lengths, dtype=torch.int32, device=group.device)
        self.generator = generator

    def pages(self, size: int) -> tuple[Tensor, Tensor, Tensor]:
        """Keys and values as pages (N, size, Hk, D), and tables (copies, B, pages a sequence) in
        which every page stands once, in random order.
        """
        k, v = (x.view(-1, size, *x.shape[-2:]) for x in (self.k, self.v))
        order = torch.randperm(len(k), generator=self.generator, device=k.device)
        return k, v, order.to(torch.int32).view(*self.k.shape[:2], -1)

    def rotary(self) -> tuple[Tensor, Tensor]:
        """Cosines and sines (capacity, D / 2)."""
        group = self.group
        positions = torch.arange(group.capacity, device=group.device)[:, None]
        steps = torch.arange(0, group.head_dim, 2, device=group.device) / group.head_dim
        angles = positions * 10_000.0**-steps
        return angles.cos().to(group.dtype), angles.sin().to(group.dtype)


class CapturedCalls:
    """A CUDA graph of a function's work; keeps the tensors alive that the function refers to."""

    def __init__(self, function: Call) -> None:
        self.function = function
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            function()
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            function()

    def __call__(self) -> None:
        self.graph.replay()


def measure_group(group: DecodeGroup, protocol: Protocol) -> Iterator[Row]:
    caches = Caches(group)
    # Appending writes to the cache, so it comes after what reads it.
    calls_of: dict[str, Callable[[Caches], NumberedCall]] = {
        DENSE: ours_dense,
        **{f"paged {size}": partial(ours_paged, size=size) for size in PAGE_SIZES},
        TORCH: torch_dense,
        FA3: fa3_dense,
        APPEND: ours_appending,
    }
    subjects = [
        Subject(name, partial(graph_of, prepare, caches), FLASH if name == TORCH else nullcontext)
        for name, prepare in calls_of.items()
    ]
    measured = measure(subjects, records=False, on_cuda=group.on_cuda, protocol=protocol)
    dense_us = None
    for subject, measurement in zip(subjects, measured, strict=True):
        timing = measurement.timing and measurement.timing.divided_by(group.calls)
        microseconds = timing and timing.median_ms * 1e3
        if subject.name == DENSE:
            dense_us = microseconds
        row = {
            "name": f"{group} {subject.name}",
            "group": group.name,
            "lengths": list(group.lengths),
            "num_heads_q": group.num_heads_q,
            "num_heads_k": group.num_heads_k,
            "head_dim": group.head_dim,
            "kv_megabytes": group.kv_bytes / 1e6,
            "copies": group.copies,
            "calls": group.calls,
            "what": subject.name,
            **timing_of(measurement, timing),
            "microseconds": microseconds,
            "terabytes_per_second": quotient(group.kv_bytes / 1e6, microseconds),
            "over_dense": None if subject.name == DENSE else quotient(dense_us, microseconds),
            "over_copy": None,
        }
        row["targets"] = [target.judge(row) for target in targets_of(group, subject.name)]
        yield row


def targets_of(group: DecodeGroup, name: str) -> list[Target]:
    if name == DENSE:
        return [] if group.target is None else [group.target]
    return [Target("over_dense", 0.9)] if name.startswith("paged") else []


def graph_of(prepare: Callable[[Any], NumberedCall], inputs: Any) -> list[Call]:
    """One call that is a whole graph, of inputs.group; without CUDA the same calls in a loop."""
    attend, group = prepare(inputs), inputs.group
    order = [index % group.copies for index in range(group.calls)]

    def run() -> None:
        for index in order:
            attend(index)

    return [CapturedCalls(run) if group.on_cuda else run]


def ours_dense(caches: Caches) -> NumberedCall:
    from flash_attn_cuda import flash_attn_with_kvcache

    require_ours(caches.group.device)
    q, k, v = caches.q.unbind(), caches.k.unbind(), caches.v.unbind()
    return lambda index: flash_attn_with_kvcache(
        q[index], k[index], v[index], cache_seqlens=caches.lengths, causal=True
    )


def ours_paged(caches: Caches, size: int) -> NumberedCall:
    from flash_attn_cuda import flash_attn_with_kvcache

    require_ours(caches.group.device)
    k, v, tables = caches.pages(size)
    q, table = caches.q.unbind(), tables.unbind()
    return lambda index: flash_attn_with_kvcache(
        q[index], k, v, cache_seqlens=caches.lengths, block_table=table[index], causal=True
    )


def ours_appending(caches: Caches) -> NumberedCall:
    """The same number of keys: the last one is appended, rotated like the query."""
    from flash_attn_cuda import flash_attn_with_kvcache

    require_ours(caches.group.device)
    q, k, v = caches.q.unbind(), caches.k.unbind(), caches.v.unbind()
    new_k, new_v = caches.new_k.unbind(), caches.new_v.unbind()
    cos, sin = caches.rotary()
    before = caches.lengths - 1
    return lambda index: flash_attn_with_kvcache(
        *(q[index], k[index], v[index], new_k[index], new_v[index], cos, sin),
        cache_seqlens=before,
        causal=True,
    )


def torch_dense(caches: Caches) -> NumberedCall:
    lengths = set(caches.group.lengths)
    if len(lengths) > 1:
        raise Unsupported("takes no lengths of sequences")
    (seqlen,) = lengths
    q = caches.q.transpose(2, 3).unbind()
    k, v = (x[:, :, :seqlen].transpose(2, 3).unbind() for x in (caches.k, caches.v))
    return lambda index: F.scaled_dot_product_attention(
        q[index], k[index], v[index], enable_gqa=True
    )


def fa3_dense(caches: Caches) -> NumberedCall:
    attend = fa3_attend(caches.group)
    q, k, v = caches.q.unbind(), caches.k.unbind(), caches.v.unbind()
    return lambda index: attend(q[index], k[index], v[index], caches.lengths)


def fa3_attend(group: DecodeGroup) -> Callable[..., object]:
    """As fa3.flash_attention_3_cached; Unsupported where it is not here or lacks the head dim."""
    require_cuda(group)
    if group.head_dim > FA3_MAX_HEAD_DIM:
        raise Unsupported(f"has head dims up to {FA3_MAX_HEAD_DIM}")
    return found(flash_attention_3_cached)


def measure_copy(device: str, protocol: Protocol, size: int = COPY_BYTES) -> Row:
    """A copy from device memory to device memory; bytes read and written both count."""
    on_cuda = torch.device(device).type == "cuda"
    source = torch.ones(size, dtype=torch.uint8, device=device)
    destination = torch.empty_like(source)
    subject = Subject(COPY, lambda: [lambda: destination.copy_(source)])
    (measurement,) = measure([subject], records=False, on_cuda=on_cuda, protocol=protocol)
    microseconds = measurement.timing and measurement.timing.median_ms * 1e3
    return {
        "name": COPY,
        "group": COPY,
        "lengths": [],
        "num_heads_q": None,
        "num_heads_k": None,
        "head_dim": None,
        "kv_megabytes": None,
        "copies": None,
        "calls": None,
        "what": f"{size} bytes",
        **timing_of(measurement),
        "microseconds": microseconds,
        "terabytes_per_second": quotient(2 * size / 1e6, microseconds),
        "over_dense": None,
        "over_copy": None,
        "targets": [],
    }


def add_copy_shares(rows: list[Row]) -> None:
    """Sets over_copy: a row's bytes per second over those of the copy."""
    rates = {row["group"]: row["terabytes_per_second"] for row in rows}
    for row in rows:
        if row["group"] != COPY and row["status"] == Status.ok.value:
            row["over_copy"] = quotient(row["terabytes_per_second"], rates.get(COPY))
