"""Speed of FP8 caches: keys and values of float8_e4m3fn beside those of 16 bits.

    python -m benchmarks.suites.fp8_cache --json fp8_cache.json
    python -m benchmarks.suites.fp8_cache --parts decode --shape 32,4096,32,8,128

decode is one query a sequence over a cache, in CUDA graphs as of benchmarks.suites.decode, beside
FlashAttention-3 where it is, whose queries are of e4m3 as well over such a cache. prefill is the
last 2,048 queries over a cache, causal. append writes new tokens into an empty cache, rotated and
quantized, by calls without queries, in CUDA graphs, beside a copy of as many bytes. Queries and new
tokens are of bf16, scales one per head or one per token and head. Bytes of decode are the cache's
and its scales', bytes of append what is read and written, rotary tables included. Medians of turns
of 100 ms; what is compared is timed in one process, and ratios are medians over its rounds.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.core.feature_tables import Column, Row, Target, number, ratio, timing_of
from benchmarks.core.metrics import Timing
from benchmarks.core.row_programs import fill, new_document, one_by_one, status_of
from benchmarks.core.runner import Call, Subject, measure
from benchmarks.core.turns import Protocol, add_options, protocol_of
from benchmarks.peers.backends import require_ours
from benchmarks.suites.decode import (
    Caches,
    DecodeGroup,
    NumberedCall,
    fa3_attend,
    fa3_dense,
    graph_of,
    ours_dense,
)
from benchmarks.suites.prefill import Prefill, PrefillGroup
from benchmarks.suites.rotary import RotaryGroup

SCHEMA = 1
BENCHMARK = "fp8_cache"
E4M3, LARGEST = torch.float8_e4m3fn, 448.0
HEAD, TOKEN = "e4m3, scales per head", "e4m3, scales per token"
MODES = {HEAD: "head", TOKEN: "token"}  # of quantize_kv
WIDE, FA3, FA3_WIDE, COPY = "16 bits", "FA3, e4m3", "FA3, 16 bits", "copy"
SCALE_BYTES = torch.float32.itemsize
APPENDED_LARGEST = 6.0  # of normal numbers, for scales that are there before them

# Ratios, and by what has them whose time is the numerator.
OVER: dict[str, dict[str, str]] = {
    "over_16_bits": {HEAD: WIDE, TOKEN: WIDE, FA3: FA3_WIDE},
    "over_per_head": {TOKEN: HEAD},
    "over_fa3": {WIDE: FA3_WIDE, HEAD: FA3, TOKEN: FA3},
}

COLUMNS = (
    Column("problem", "group"),
    Column("part", "part"),
    Column("cache", "what"),
    Column("us", "microseconds", number(4)),
    Column("GB/s", "gigabytes_per_second", number(4)),
    Column("TFLOP/s", "tflops", number(3)),
    Column("16 bits /", "over_16_bits", ratio),
    Column("per head /", "over_per_head", ratio),
    Column("FA3 /", "over_fa3", ratio),
    Column("/ copy", "over_copy", ratio),
)


@dataclass(frozen=True)
class Shape:
    """Sequences in a cache, all of one length."""

    batch: int
    seqlen: int
    num_heads_q: int
    num_heads_k: int
    head_dim: int
    limit: float | None = None  # what 16 bits' time over that of scales per head must reach

    @property
    def dimensions(self) -> tuple[int, ...]:
        return self.batch, self.seqlen, self.num_heads_q, self.num_heads_k, self.head_dim

    def __str__(self) -> str:
        batch, seqlen, heads_q, heads_k, head_dim = self.dimensions
        length = f"{seqlen // 1024}k" if seqlen % 1024 == 0 else str(seqlen)
        return f"B{batch} S{length} {heads_q}/{heads_k} d{head_dim}"

    def group(self, device: str) -> DecodeGroup:
        heads = self.num_heads_q, self.num_heads_k, self.head_dim
        return DecodeGroup(str(self), (self.seqlen,) * self.batch, None, *heads, device=device)


SHAPES: dict[str, tuple[Shape, ...]] = {
    "decode": (
        Shape(32, 4096, 32, 8, 128, 1.80),
        Shape(128, 8192, 32, 8, 128, 1.85),
        Shape(1, 8192, 32, 8, 128, 1.15),
        Shape(1, 65_536, 32, 8, 128, 1.6),
        Shape(32, 8192, 16, 2, 256, 1.7),  # Qwen3.5
        Shape(32, 8192, 32, 8, 64),
        Shape(8, 8192, 32, 4, 512),
    ),
    "prefill": (
        Shape(1, 8192, 32, 8, 128, 0.93),
        Shape(1, 8192, 16, 2, 256, 0.93),
        Shape(1, 8192, 32, 8, 64, 0.93),
    ),
    "append": (Shape(1, 8192, 32, 8, 128), Shape(1, 8192, 16, 2, 256)),
}


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", "--json", type=Path, help="where the results go")
    parser.add_argument("--quick", action="store_true", help="the first shape of a part alone")
    parser.add_argument("--parts", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument(
        "--shape",
        action="append",
        type=shape_of,
        metavar="B,S,Hq,Hk,D",
        help="this instead of those of the parts; may be given several times",
    )
    parser.add_argument("--queries", type=int, default=2048, help="of prefill (%(default)s)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add_options(parser)
    return parser.parse_args(arguments)


def shape_of(text: str) -> Shape:
    try:
        batch, seqlen, heads_q, heads_k, head_dim = map(int, text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"must be five integers B,S,Hq,Hk,D, got {text!r}"
        ) from None
    return Shape(batch, seqlen, heads_q, heads_k, head_dim)


@dataclass(frozen=True)
class Quantized:
    """Keys and values of e4m3; of each copy of a cache in the first dimension."""

    k: Tensor
    v: Tensor
    k_descale: Tensor  # (..., batch, heads_k) or (..., batch, capacity, heads_k)
    v_descale: Tensor

    @classmethod
    def of(cls, k: Tensor, v: Tensor, what: str) -> Quantized:
        """k, v: (..., batch, seqlen, heads_k, head_dim)."""
        from flash_attn_cuda import quantize_kv

        lead = k.shape[:-3]
        made = quantize_kv(k.flatten(0, -4), v.flatten(0, -4), mode=MODES[what])
        return cls(*(x.unflatten(0, lead) for x in made))

    def copies(self) -> list[Quantized]:
        tensors = self.k, self.v, self.k_descale, self.v_descale
        return [Quantized(*one) for one in zip(*tensors, strict=True)]

    @property
    def scales(self) -> dict[str, Any]:
        return {"k_descale": self.k_descale, "v_descale": self.v_descale}


# Decoding


def decode_rows(shape: Shape, options: argparse.Namespace, protocol: Protocol) -> list[Row]:
    caches = Caches(shape.group(options.device))
    group = caches.group
    quantized = {what: Quantized.of(caches.k, caches.v, what) for what in MODES}
    calls_of: dict[str, Callable[[Caches], NumberedCall]] = {
        WIDE: ours_dense,
        **{what: partial(ours_e4m3, quantized=quantized[what]) for what in MODES},
        FA3_WIDE: fa3_dense,
        FA3: partial(fa3_e4m3, quantized=quantized[HEAD]),
    }
    moved = {WIDE: group.kv_bytes, FA3_WIDE: group.kv_bytes}
    moved |= {what: group.kv_bytes // 2 + scale_bytes(shape, what) for what in MODES}
    moved[FA3] = moved[HEAD]
    return graph_rows("decode", shape, caches, calls_of, moved, protocol)


def scale_bytes(shape: Shape, what: str) -> int:
    """Of keys and values of all sequences."""
    of_head = shape.seqlen if what == TOKEN else 1
    return 2 * shape.batch * shape.num_heads_k * of_head * SCALE_BYTES


def ours_e4m3(caches: Caches, quantized: Quantized) -> NumberedCall:
    from flash_attn_cuda import flash_attn_with_kvcache

    require_ours(caches.group.device)
    q, copies = caches.q.unbind(), quantized.copies()

    def attend(index: int) -> object:
        one = copies[index]
        return flash_attn_with_kvcache(
            *(q[index], one.k, one.v), cache_seqlens=caches.lengths, causal=True, **one.scales
        )

    return attend


def fa3_e4m3(caches: Caches, quantized: Quantized) -> NumberedCall:
    attend = fa3_attend(caches.group)
    scale = caches.q.abs().max().float() / LARGEST
    q = (caches.q / scale).clamp(-LARGEST, LARGEST).to(E4M3).unbind()
    copies = quantized.copies()
    q_descale = scale.expand(caches.group.batch, caches.group.num_heads_k)

    def call(index: int) -> object:
        one = copies[index]
        return attend(q[index], one.k, one.v, caches.lengths, q_descale=q_descale, **one.scales)

    return call


# Prefill


def prefill_rows(shape: Shape, options: argparse.Namespace, protocol: Protocol) -> list[Row]:
    batch, seqlen, heads_q, heads_k, head_dim = shape.dimensions
    queries = min(options.queries, seqlen)
    group = PrefillGroup(
        *(batch, queries, seqlen, head_dim, heads_q, heads_k), device=options.device
    )
    prefill = Prefill(group)
    subjects = [
        Subject(WIDE, partial(prefill.ours, None)),
        *(Subject(what, partial(prefill_e4m3, prefill, what)) for what in MODES),
    ]
    more = {"queries": queries}
    return rows_of(
        "prefill",
        shape,
        subjects,
        protocol,
        on_cuda=prefill.q.is_cuda,
        flops=group.flops,
        more=more,
    )


def prefill_e4m3(prefill: Prefill, what: str) -> list[Call]:
    from flash_attn_cuda import flash_attn_with_kvcache

    require_ours(prefill.group.device)
    made = Quantized.of(prefill.k, prefill.v, what)
    return [
        partial(
            flash_attn_with_kvcache,
            *(prefill.q, made.k, made.v),
            cache_seqlens=prefill.lengths,
            causal=True,
            **made.scales,
        )
    ]


# Appending


def append_rows(shape: Shape, options: argparse.Namespace, protocol: Protocol) -> list[Row]:
    """The cache of a group, of 16 bits, is what is appended here, to another one."""
    caches = Caches(shape.group(options.device))
    group = caches.group
    tables = RotaryGroup(shape.seqlen, shape.head_dim, False, options.device).tables()
    table_bytes = sum(table.nbytes for table in tables)
    moved = {WIDE: 2 * group.kv_bytes + table_bytes}
    moved |= {
        what: group.kv_bytes * 3 // 2 + table_bytes + scale_bytes(shape, what) for what in MODES
    }
    moved[COPY] = moved[HEAD] // 2 * 2
    calls_of: dict[str, Callable[[Caches], NumberedCall]] = {
        what: partial(appending, targets=append_targets(caches, what), tables=tables)
        for what in (WIDE, *MODES)
    }
    calls_of[COPY] = partial(copying, size=moved[COPY] // 2)
    return graph_rows("append", shape, caches, calls_of, moved, protocol)


def append_targets(caches: Caches, what: str) -> list[dict[str, Any]]:
    """What a call that appends says of its cache, which is empty, for each copy."""
    group, new = caches.group, partial(torch.empty, device=caches.group.device)
    dtype, shape = group.dtype if what == WIDE else E4M3, caches.k.shape[1:]
    targets = []
    for _ in range(group.copies):
        target: dict[str, Any] = {x: new(shape, dtype=dtype) for x in ("k_cache", "v_cache")}
        if what == HEAD:
            scale = new(group.num_heads_k).fill_(APPENDED_LARGEST / LARGEST)
            target |= {"k_descale": scale, "v_descale": scale}
        elif what == TOKEN:  # which writes them
            target |= {x: new(shape[:-1]) for x in ("k_descale", "v_descale")}
            target["quantize"] = "token"
        targets.append(target)
    return targets


def appending(
    caches: Caches, targets: Sequence[dict[str, Any]], tables: tuple[Tensor, Tensor]
) -> NumberedCall:
    """A call without queries appends and does no more."""
    from flash_attn_cuda import flash_attn_with_kvcache

    group, seqlen = caches.group, caches.group.lengths[0]
    require_ours(group.device)
    q = caches.q[:, :, :0].unbind()
    k, v = (x[:, :, :seqlen].unbind() for x in (caches.k, caches.v))
    before = torch.zeros_like(caches.lengths)
    options: dict[str, Any] = dict(zip(("rotary_cos", "rotary_sin"), tables, strict=True))
    options |= {"rotary_interleaved": False, "cache_seqlens": before, "causal": True}
    return lambda index: flash_attn_with_kvcache(
        q[index], k=k[index], v=v[index], **targets[index], **options
    )


def copying(caches: Caches, size: int) -> NumberedCall:
    """Of this many bytes."""
    shape = caches.group.copies, size
    source = torch.ones(shape, dtype=torch.uint8, device=caches.group.device)
    sources, targets = source.unbind(), torch.empty_like(source).unbind()
    return lambda index: targets[index].copy_(sources[index])


# Rows


def graph_rows(
    part: str,
    shape: Shape,
    caches: Caches,
    calls_of: dict[str, Callable[[Caches], NumberedCall]],
    moved: dict[str, int],
    protocol: Protocol,
) -> list[Row]:
    """Of calls in CUDA graphs, each on one copy of the caches."""
    subjects = [
        Subject(what, partial(graph_of, prepare, caches)) for what, prepare in calls_of.items()
    ]
    return rows_of(
        part,
        shape,
        subjects,
        protocol,
        on_cuda=caches.group.on_cuda,
        calls=caches.group.calls,
        moved=moved,
    )


def rows_of(
    part: str,
    shape: Shape,
    subjects: Sequence[Subject],
    protocol: Protocol,
    *,
    on_cuda: bool,
    calls: int = 1,
    moved: dict[str, int] | None = None,
    flops: int | None = None,
    more: Row | None = None,
) -> list[Row]:
    """Has the subjects timed.

    Args:
        calls: of attention in a subject's call.
        moved: bytes of each by subject.
        flops: of each.
        more: what all rows have.
    """
    moved = moved or {}
    names = [subject.name for subject in subjects]
    measured = measure(subjects, records=False, on_cuda=on_cuda, protocol=protocol)
    timings = {
        what: measurement.timing and measurement.timing.divided_by(calls)
        for what, measurement in zip(names, measured, strict=True)
    }
    rows = []
    for (what, timing), measurement in zip(timings.items(), measured, strict=True):
        size, share = moved.get(what), faster(timings, COPY, what)
        row: Row = {
            "name": f"{part} {shape} {what}",
            "group": str(shape),
            "part": part,
            "shape": list(shape.dimensions),
            "calls": calls,
            "what": what,
            **(more or {}),
            **timing_of(measurement, timing),
            "bytes": size,
            "microseconds": timing and timing.median_ms * 1e3,
            "gigabytes_per_second": timing and size and size / timing.median_ms / 1e6,
            "tflops": timing and flops and flops / timing.median_ms / 1e9,
            **{name: faster(timings, bases.get(what), what) for name, bases in OVER.items()},
            "over_copy": share and share * moved[what] / moved[COPY],
        }
        row["targets"] = [target.judge(row) for target in targets_of(part, shape, what)]
        rows.append(row)
    return rows


def faster(timings: dict[str, Timing | None], base: str | None, what: str) -> float | None:
    """The time of `base` over that of `what`, where both were measured."""
    timing, other = timings[what], timings.get(base or "")
    return None if timing is None or other is None or base == what else other.over(timing)


def targets_of(part: str, shape: Shape, what: str) -> list[Target]:
    if what not in MODES:
        return []
    if part == "append":
        return [Target("over_copy", 0.80)]
    if what == TOKEN:
        return [Target("over_per_head", 0.93)] if part == "decode" else []
    return [] if shape.limit is None else [Target("over_16_bits", shape.limit)]


PARTS = {"decode": decode_rows, "prefill": prefill_rows, "append": append_rows}


def shapes(part: str, options: argparse.Namespace) -> Sequence[Shape]:
    found = options.shape or SHAPES[part]
    return found[:1] if options.quick else found


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    program = "python -m benchmarks.suites.fp8_cache"
    document = new_document(BENCHMARK, SCHEMA, program, arguments, options)
    problems = {
        f"{part} {shape}": partial(PARTS[part], shape, options, protocol_of(options))
        for part in options.parts
        for shape in shapes(part, options)
    }
    return status_of(fill(document, one_by_one(problems), COLUMNS, options.out))


if __name__ == "__main__":
    sys.exit(main())
