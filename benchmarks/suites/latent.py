"""Absorbed latent attention over a joined paged cache, in CUDA graphs, beside FlashAttention-3.

As in benchmarks.suites.decode a graph holds many calls, each with other pages, so that every byte
comes from memory: 576 columns of bf16 a key, of which the first 512 are the value, or a row of FP8.
FlashAttention-3 has lists of keys as pages of one key each, and no rows of FP8.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch

from benchmarks.core.feature_tables import Column, Row, number, quotient, ratio, timing_of
from benchmarks.core.runner import Subject, measure
from benchmarks.core.turns import Protocol
from benchmarks.peers.backends import found, require_cuda, require_ours
from benchmarks.peers.fa3 import flash_attention_3_latent
from benchmarks.suites.decode import GraphedGroup, NumberedCall, graph_of

OURS, FA3 = "ours", "FlashAttention-3"
ESTIMATE_FLOP_PER_MS = 4e11
FP8_ROW_BYTES = 656

COLUMNS = (
    Column("shape", "group"),
    Column("kernel", "what"),
    Column("us a call", "microseconds", number(4)),
    Column("KV TB/s", "terabytes_per_second", number(3)),
    Column("TFLOP/s", "tflops", number(3)),
    Column("FA3 /", "over_fa3", ratio),
)


@dataclass(frozen=True)
class LatentGroup(GraphedGroup):
    heads: int
    batch: int
    keys: int
    queries: int
    latent: int = 512
    rope: int = 64
    is_listed: bool = False  # keys are those of a list, anywhere
    is_fp8: bool = False
    device: str = "cuda"

    def __str__(self) -> str:
        kinds = [name for name in ("listed", "fp8") if getattr(self, f"is_{name}")]
        shape = f"{self.heads} heads, B{self.batch} S{self.keys}, {self.queries} queries"
        return " ".join([shape, *kinds])

    @property
    def page_size(self) -> int:
        return 1 if self.is_listed else 64

    @property
    def kv_bytes(self) -> int:
        row = FP8_ROW_BYTES if self.is_fp8 else 2 * (self.latent + self.rope)
        return self.batch * self.keys * row

    @property
    def flop(self) -> int:
        products = 2 * self.latent + self.rope
        return 2 * self.batch * self.keys * self.heads * self.queries * products

    @property
    def estimate_ms(self) -> float:
        return super().estimate_ms + self.flop / ESTIMATE_FLOP_PER_MS


def groups(device: str = "cuda", quick: bool = False) -> list[LatentGroup]:
    few = [(16, 1, 8192, 1), (16, 1, 65_536, 1), (16, 32, 4096, 1), (16, 32, 4096, 2)]
    few += [(16, 128, 4096, 1), (16, 128, 4096, 2), (16, 64, 16_384, 1), (8, 32, 4096, 1)]
    many = [(32, 32, 4096, 1), (64, 32, 4096, 1), (128, 1, 8192, 1), (128, 1, 65_536, 1)]
    many += [(128, 32, 4096, 1), (128, 32, 4096, 2), (128, 128, 4096, 1), (128, 64, 16_384, 1)]
    dense = [LatentGroup(*shape, device=device) for shape in (few[:1] if quick else few + many)]
    lists = [(8, 8, 2048, 1), (16, 8, 2048, 1), (16, 64, 2048, 1), (128, 256, 2048, 1)]
    rest = [LatentGroup(*x, is_listed=True, device=device) for x in lists[: 1 if quick else None]]
    kinds = [*dense[:1], *rest] if quick else [dense[i] for i in (0, 2, 6, 8)] + rest
    return dense + rest + [replace(group, is_fp8=True) for group in kinds]


class Inputs:
    def __init__(self, group: LatentGroup) -> None:
        generator = torch.Generator(group.device).manual_seed(0)

        def normal(*shape: int) -> torch.Tensor:
            x = torch.empty(shape, dtype=torch.bfloat16, device=group.device)
            return x.normal_(generator=generator)

        pages = group.copies * group.batch * group.keys // group.page_size
        rows = (group.batch, group.queries, group.heads)
        both = normal(pages, group.page_size, 1, group.latent + group.rope)
        self.v_descale: torch.Tensor | None = None
        order = torch.randperm(pages, generator=generator, device=group.device).int()
        lengths = torch.full((group.batch,), group.keys, dtype=torch.int32, device=group.device)
        self.group = group
        self.q, self.qv = normal(*rows, group.rope), normal(*rows, group.latent)
        self.k, self.v = both[..., group.latent :], both[..., : group.latent]
        if group.is_fp8:
            from flash_attn_cuda import latent_views, quantize_latent

            parts = zip(self.v.split(4096), self.k.split(4096), strict=True)
            stored = torch.cat([quantize_latent(v, k) for v, k in parts])
            self.k, self.v, self.v_descale = latent_views(stored)
        self.tables = order.view(group.copies, group.batch, -1)
        self.lengths = lengths
        self.scale = (128 + group.rope) ** -0.5


def ours(inputs: Inputs) -> NumberedCall:
    from flash_attn_cuda import flash_attn_with_kvcache

    require_ours(inputs.group.device)
    x = inputs
    if x.group.is_listed:
        parts = (x.k, x.v, x.v_descale)
        pool = [None if part is None else part.flatten(0, 1)[None] for part in parts]
        entries = torch.zeros_like(x.lengths)
        return lambda index: flash_attn_with_kvcache(
            *(x.q, *pool[:2]), qv=x.qv, v_descale=pool[2], cache_batch_idx=entries,
            key_lists=x.tables[index][:, None, None], softmax_scale=x.scale,
        )  # fmt: skip
    return lambda index: flash_attn_with_kvcache(
        *(x.q, x.k, x.v), qv=x.qv, v_descale=x.v_descale, cache_seqlens=x.lengths,
        block_table=x.tables[index], softmax_scale=x.scale, causal=True,
    )  # fmt: skip


def fa3(inputs: Inputs) -> NumberedCall:
    require_cuda(inputs.group)
    attend = found(flash_attention_3_latent)
    x = inputs
    return lambda index: attend(x.q, x.k, x.v, x.qv, x.lengths, x.tables[index], x.scale)


def measure_group(group: LatentGroup, protocol: Protocol) -> Iterator[Row]:
    inputs = Inputs(group)
    subjects = [Subject(OURS, partial(graph_of, ours, inputs))]
    if not group.is_fp8:
        subjects.append(Subject(FA3, partial(graph_of, fa3, inputs)))
    measured = measure(subjects, records=False, on_cuda=group.on_cuda, protocol=protocol)
    timings = [found.timing and found.timing.divided_by(group.calls) for found in measured]
    microseconds = [timing and timing.median_ms * 1e3 for timing in timings]
    for subject, measurement, timing, us in zip(
        subjects, measured, timings, microseconds, strict=True
    ):
        yield {
            "name": f"{group} {subject.name}",
            "group": str(group),
            "what": subject.name,
            "copies": group.copies,
            "calls": group.calls,
            **timing_of(measurement, timing),
            "microseconds": us,
            "terabytes_per_second": quotient(group.kv_bytes / 1e6, us),
            "tflops": quotient(group.flop / 1e6, us),
            "over_fa3": quotient(microseconds[-1], us) if subject is not subjects[-1] else None,
            "targets": [],
        }
