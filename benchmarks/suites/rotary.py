"""Speed of rotary embedding in bytes per second, and its share of a copy's.

    python -m benchmarks.suites.rotary --json rotary.json
    python -m benchmarks.suites.rotary --quick --head-dims 128

x is (1, tokens, 32, head_dim) in bf16, cos and sin in bf16 too. Compared are the kernel, the same
made of torch's operators, those compiled by torch.compile, and Tensor.copy_ of x. forward and copy
write a new tensor, in place writes x, backward is the gradient of x alone, without the forward.
Bytes are those of x and of the tables read once, and of the result written once; calls take input
sets in turn, so that none of x is in the L2 cache. Medians of turns of 100 ms; what is compared is
timed in one process, and the share of the copy is the median over its rounds.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.core.feature_tables import (
    Column,
    Row,
    Target,
    number,
    ratio,
    timing_of,
)
from benchmarks.core.row_programs import fill, new_document, one_by_one, status_of
from benchmarks.core.runner import CACHE_MULTIPLE, MAX_INPUT_SETS, Call, Subject, measure
from benchmarks.core.turns import Protocol, add_options, protocol_of
from benchmarks.peers.backends import require_ours

SCHEMA = 1
BENCHMARK = "rotary"
PASSES = ("forward", "in place", "backward")
OURS, OPERATORS, COMPILED, COPY = "ours", "torch operators", "torch.compile", "copy"
SHARE_OF_COPY = Target("over_copy", 0.85)

COLUMNS = (
    Column("problem", "group"),
    Column("pass", "pass"),
    Column("what", "what"),
    Column("us", "microseconds", number(4)),
    Column("GB/s", "gigabytes_per_second", number(4)),
    Column("/ copy", "over_copy", ratio),
)


@dataclass(frozen=True)
class RotaryGroup:
    """One shape of x that turns whole."""

    tokens: int
    head_dim: int
    interleaved: bool
    device: str
    num_heads: int = 32
    dtype: torch.dtype = torch.bfloat16

    def __str__(self) -> str:
        pairs = " interleaved" if self.interleaved else ""
        return f"S{self.tokens} H{self.num_heads} d{self.head_dim}{pairs}"

    @property
    def on_cuda(self) -> bool:
        return torch.device(self.device).type == "cuda"

    @property
    def x_bytes(self) -> int:
        return self.tokens * self.num_heads * self.head_dim * self.dtype.itemsize

    @property
    def table_bytes(self) -> int:
        return self.tokens * self.head_dim * self.dtype.itemsize  # of cos and sin together

    def tables(self) -> tuple[Tensor, Tensor]:
        positions = torch.arange(self.tokens, device=self.device)[:, None]
        steps = torch.arange(0, self.head_dim, 2, device=self.device) / self.head_dim
        angles = positions * 10_000.0**-steps
        return angles.cos().to(self.dtype), angles.sin().to(self.dtype)

    def input_sets(self) -> list[Tensor]:
        """As many as it takes to defeat the cache."""
        count = 1
        if self.on_cuda:
            cache = torch.cuda.get_device_properties(self.device).L2_cache_size
            count = min(MAX_INPUT_SETS, max(1, math.ceil(CACHE_MULTIPLE * cache / self.x_bytes)))
        generator = torch.Generator(self.device).manual_seed(0)
        shape = (1, self.tokens, self.num_heads, self.head_dim)
        empty = (torch.empty(shape, dtype=self.dtype, device=self.device) for _ in range(count))
        return [x.normal_(generator=generator) for x in empty]


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", "--json", type=Path, help="where the results go")
    parser.add_argument("--quick", action="store_true", help="4k tokens, and halves alone")
    parser.add_argument("--head-dims", nargs="+", type=int, default=[64, 128, 256])
    parser.add_argument("--tokens", nargs="+", type=int, default=[4096, 16_384])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add_options(parser)
    options = parser.parse_args(arguments)
    if options.quick:
        options.tokens = options.tokens[:1]
    return options


def groups(options: argparse.Namespace) -> list[RotaryGroup]:
    return [
        RotaryGroup(tokens, head_dim, interleaved, options.device)
        for head_dim in options.head_dims
        for tokens in options.tokens
        for interleaved in ((False,) if options.quick else (False, True))
    ]


def rotations(group: RotaryGroup, inplace: bool) -> dict[str, Callable[[Tensor], Tensor]]:
    from flash_attn_cuda.functions import rotary

    tables = group.tables()

    def ours(x: Tensor) -> Tensor:
        return rotary.apply_rotary_emb(x, *tables, group.interleaved, inplace)

    def operators(x: Tensor) -> Tensor:
        return rotary._rotate_by_operators(x, *tables, group.interleaved, inplace, 0, None)

    return {OURS: ours, OPERATORS: operators, COMPILED: torch.compile(operators, dynamic=False)}


def calls_of(
    rotate: Callable[[Tensor], Tensor], which: str, inputs: Sequence[Tensor], is_ours: bool
) -> list[Call]:
    if is_ours:
        require_ours(inputs[0].device.type)
    if which != "backward":
        return [partial(rotate, x) for x in inputs]
    leaf = inputs[0].clone().requires_grad_()
    out = rotate(leaf)
    # Their gradients are input sets as good as any.
    return [partial(torch.autograd.grad, out, leaf, x, retain_graph=True) for x in inputs]


def measure_pass(group: RotaryGroup, which: str, protocol: Protocol) -> Iterator[Row]:
    inputs = group.input_sets()
    torch._dynamo.reset()
    subjects = [
        Subject(name, partial(calls_of, rotate, which, inputs, name == OURS))
        for name, rotate in rotations(group, which == "in place").items()
    ]
    copies = [partial(lambda x: torch.empty_like(x).copy_(x), x) for x in inputs]
    subjects.append(Subject(COPY, lambda: copies))
    measured = measure(
        subjects, records=which == "backward", on_cuda=group.on_cuda, protocol=protocol
    )
    copy = measured[-1].timing
    for subject, measurement in zip(subjects, measured, strict=True):
        timing, is_copy = measurement.timing, subject.name == COPY
        moved = 2 * group.x_bytes + (0 if is_copy else group.table_bytes)
        share = None
        if timing and copy and not is_copy:
            share = moved / (2 * group.x_bytes) / timing.over(copy)
        row: Row = {
            "name": f"{group} {which} {subject.name}",
            "group": str(group),
            "tokens": group.tokens,
            "num_heads": group.num_heads,
            "head_dim": group.head_dim,
            "interleaved": group.interleaved,
            "pass": which,
            "what": subject.name,
            **timing_of(measurement),
            "peak_bytes": measurement.peak_bytes,
            "bytes": moved,
            "microseconds": timing and timing.median_ms * 1e3,
            "gigabytes_per_second": timing and moved / timing.median_ms / 1e6,
            "over_copy": share,
        }
        row["targets"] = [SHARE_OF_COPY.judge(row)] if subject.name == OURS else []
        yield row


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    program = "python -m benchmarks.suites.rotary"
    document = new_document(BENCHMARK, SCHEMA, program, arguments, options)
    problems = {
        f"{group} {which}": partial(measure_pass, group, which, protocol_of(options))
        for group, which in product(groups(options), PASSES)
    }
    return status_of(fill(document, one_by_one(problems), COLUMNS, options.out))


if __name__ == "__main__":
    sys.exit(main())
