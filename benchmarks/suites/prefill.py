"""Chunks of queries over a KV cache, causal: paged against dense, and torch's flash kernel.

All subjects of a group read the same keys and values; pages stand in random order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from benchmarks.core.feature_tables import Column, Row, Target, number, quotient, ratio, timing_of
from benchmarks.core.runner import Call, Subject, measure
from benchmarks.core.turns import Protocol
from benchmarks.peers.backends import require_ours

PAGE_SIZES = (16, 64, 256)
DENSE, TORCH = "dense", "torch flash"
FLASH = partial(sdpa_kernel, SDPBackend.FLASH_ATTENTION)

COLUMNS = (
    Column("D", "head_dim"),
    Column("batch", "batch"),
    Column("queries", "seqlen_q"),
    Column("keys", "seqlen_k"),
    Column("cache", "what"),
    Column("ms", "median_ms", number(4)),
    Column("TFLOP/s", "tflops", number(3)),
    Column("/ dense", "over_dense", ratio),
    Column("/ torch", "over_torch", ratio),
)


@dataclass(frozen=True)
class PrefillGroup:
    """The last seqlen_q of seqlen_k tokens of every sequence attend."""

    batch: int
    seqlen_q: int
    seqlen_k: int  # a multiple of every page size
    head_dim: int = 128
    num_heads_q: int = 32
    num_heads_k: int = 8
    dtype: torch.dtype = torch.bfloat16
    device: str = "cuda"

    def __str__(self) -> str:
        return f"d{self.head_dim} B{self.batch} {self.seqlen_q} over {self.seqlen_k}"

    @property
    def flops(self) -> int:
        """Of visible pairs."""
        pairs = self.seqlen_q * (2 * self.seqlen_k - self.seqlen_q + 1) // 2
        return 4 * self.batch * self.num_heads_q * self.head_dim * pairs


def groups(device: str = "cuda", quick: bool = False) -> list[PrefillGroup]:
    shapes = [(1, 2048, 8192), (4, 512, 4096), (16, 512, 512), (1, 512, 32_768), (1, 128, 32_768)]
    heads = {64: (32, 8), 128: (32, 8), 256: (16, 8)}
    if quick:
        shapes, heads = shapes[:1], {128: heads[128]}
    return [
        PrefillGroup(*shape, head_dim, *of_q_and_k, device=device)
        for head_dim, of_q_and_k in heads.items()
        for shape in shapes
    ]


class Prefill:
    """Random tensors of a group."""

    def __init__(self, group: PrefillGroup) -> None:
        generator = torch.Generator(group.device).manual_seed(0)

        def normal(seqlen: int, heads: int) -> Tensor:
            x = torch.empty(
                (group.batch, seqlen, heads, group.head_dim), dtype=group.dtype, device=group.device
            )
            return x.normal_(generator=generator)

        self.group = group
        self.generator = generator
        self.q = normal(group.seqlen_q, group.num_heads_q)
        self.k, self.v = (normal(group.seqlen_k, group.num_heads_k) for _ in range(2))
        self.lengths = torch.full(
            (group.batch,), group.seqlen_k, dtype=torch.int32, device=group.device
        )

    def ours(self, page_size: int | None, **mask: Any) -> list[Call]:
        """Causal, or under another mask."""
        from flash_attn_cuda import flash_attn_with_kvcache

        require_ours(self.group.device)
        k, v, table = self.k, self.v, None
        if page_size is not None:
            shape = (-1, page_size, *k.shape[-2:])
            count = k.shape[0] * k.shape[1] // page_size
            order = torch.randperm(count, generator=self.generator, device=k.device)
            table = order.to(torch.int32).view(self.group.batch, -1)
            k, v = (torch.empty_like(x.view(shape)) for x in (k, v))
            k[order], v[order] = self.k.view(shape), self.v.view(shape)
        given = {"cache_seqlens": self.lengths, "block_table": table, **(mask or {"causal": True})}
        return [lambda: flash_attn_with_kvcache(self.q, k, v, **given)]

    def torch_flash(self) -> list[Call]:
        q, k, v = (x.transpose(1, 2) for x in (self.q, self.k, self.v))
        mask = causal_lower_right(self.group.seqlen_q, self.group.seqlen_k)
        return [lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)]


def measure_group(group: PrefillGroup, protocol: Protocol) -> Iterator[Row]:
    prefill = Prefill(group)
    prepare_of: dict[str, Callable[[], list[Call]]] = {
        DENSE: partial(prefill.ours, None),
        **{f"paged {size}": partial(prefill.ours, size) for size in PAGE_SIZES},
        TORCH: prefill.torch_flash,
    }
    subjects = [
        Subject(name, prepare, FLASH if name == TORCH else nullcontext)
        for name, prepare in prepare_of.items()
    ]
    on_cuda = torch.device(group.device).type == "cuda"
    measured = measure(subjects, records=False, on_cuda=on_cuda, protocol=protocol)
    rows = {}
    for subject, measurement in zip(subjects, measured, strict=True):
        timing = measurement.timing
        rows[subject.name] = {
            "name": f"{group} {subject.name}",
            "group": str(group),
            "batch": group.batch,
            "seqlen_q": group.seqlen_q,
            "seqlen_k": group.seqlen_k,
            "num_heads_q": group.num_heads_q,
            "num_heads_k": group.num_heads_k,
            "head_dim": group.head_dim,
            "what": subject.name,
            **timing_of(measurement),
            "tflops": timing and group.flops / timing.median_ms * 1e-9,
        }
    for name, row in rows.items():
        row["over_dense"] = (
            None if name == DENSE else quotient(row["tflops"], rows[DENSE]["tflops"])
        )
        row["over_torch"] = (
            None if name == TORCH else quotient(row["tflops"], rows[TORCH]["tflops"])
        )
        row["targets"] = [target.judge(row) for target in targets_of(name)]
    yield from rows.values()


def targets_of(name: str) -> list[Target]:
    if name == TORCH:
        return []
    others = [Target("over_torch", 1.0)]
    return others if name == DENSE else [Target("over_dense", 0.9), *others]
