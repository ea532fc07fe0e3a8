"""Errors of context parallel attention over the GPUs of a host against fp64, beside one GPU's.

    torchrun --nproc-per-node 2 -m benchmarks.context_parallel.errors --json errors.json

Problems and contenders are those of speed.py, of fewer tokens. error is the root
mean square of the difference from fp64, over that of the fp64 result, of all ranks together;
largest is the largest difference, likewise over the root mean square of the result.
"""

from __future__ import annotations

import argparse
import gc
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.context_parallel.speed import (
    ONE_GPU,
    RING_FLASH_ATTENTION,
    SCHEMES,
    Problem,
    contenders,
    find_peer,
    join_ranks,
)
from benchmarks.core.documents import environment, write_outputs
from benchmarks.core.feature_tables import Column, Row, Target, number, print_document, ratio
from benchmarks.core.lengths import log_normal_lengths
from tests.reference import varlen_attention_with_gradients

SCHEMA = 1
BENCHMARK = "errors of context parallel"
RESULTS = ("out", "dq", "dk", "dv")
ROUNDING = Target("over_one_gpu", 1.01, at_least=False)

COLUMNS = (
    Column("problem", "group"),
    Column("of", "tensor"),
    Column("what", "scheme"),
    Column("error", "error", number(4)),
    Column("largest", "largest_error", number(3)),
    Column("/ one GPU", "over_one_gpu", ratio),
)


def exact_results(problem: Problem) -> list[Tensor]:
    """RESULTS of the whole in fp64."""
    q, k, v, dout = problem.inputs()
    bounds = torch.tensor(problem.cu_seqlens, dtype=torch.int32)
    found = varlen_attention_with_gradients(
        q, k, v, dout, None, cu_seqlens_q=bounds, cu_seqlens_k=bounds, causal=True
    )
    tensors = found.tensors()
    return [tensors[name] for name in RESULTS]


def errors(mine: Tensor, exact: Tensor, on_all_ranks: bool) -> tuple[float, float]:
    """Root mean square and largest of the differences, over the root mean square of exact."""
    difference = mine.double() - exact
    sums = torch.stack([difference.square().sum(), exact.square().sum()])
    largest = difference.abs().max()
    count = torch.tensor(exact.numel(), device=exact.device)
    if on_all_ranks:
        dist.all_reduce(sums)
        dist.all_reduce(count)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
    of_error, of_exact = (sums / count).sqrt().tolist()
    return of_error / of_exact, largest.item() / of_exact


def rows_of(problem: Problem, names: Sequence[str]) -> Iterator[Row]:
    exact = exact_results(problem)
    single: dict[str, float] = {}
    for name, make in contenders(problem, names, ExitStack()):
        passes = make()
        assert passes.shard is not None
        values = [passes.forward(), *passes.backward()]
        for tensor, value, whole in zip(RESULTS, values, exact, strict=True):
            error, largest = errors(value, passes.shard(whole), name != ONE_GPU)
            if name == ONE_GPU:
                single[tensor] = error
            row: Row = {
                "name": f"{problem} {tensor} {name}",
                "group": str(problem),
                "tokens": problem.total,
                "mean_length": problem.mean,
                "tensor": tensor,
                "scheme": name,
                "status": "ok",
                "reason": None,
                "error": error,
                "largest_error": largest,
                "over_one_gpu": error / single[tensor],
            }
            row["targets"] = [ROUNDING.judge(row)] if name in SCHEMES else []
            yield row


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", "--json", type=Path, help="where the results go")
    parser.add_argument("--tokens", type=int, default=8192, help="in all")
    parser.add_argument("--mean", type=int, default=1024, help="length of packed documents")
    options = parser.parse_args(arguments)
    join_ranks()
    rows: list[Row] = []
    command = ["torchrun", "-m", "benchmarks.context_parallel.errors", *(arguments or sys.argv[1:])]
    document: dict[str, Any] = {
        "schema": SCHEMA,
        "benchmark": BENCHMARK,
        "command": shlex.join(command),
        "ranks": dist.get_world_size(),
        "environment": environment("cuda"),
        "results": rows,
    }
    names = [ONE_GPU, *SCHEMES, *([RING_FLASH_ATTENTION] if find_peer() else [])]
    documents = log_normal_lengths(options.tokens // options.mean, options.mean)
    for problem in (Problem((options.tokens,)), Problem(documents, options.mean)):
        rows += rows_of(problem, names)
        gc.collect()
        torch.cuda.empty_cache()
    if dist.get_rank() == 0:
        if options.out:
            write_outputs(document, json_path=options.out, csv_path=None, plot_path=None)
        print_document(document, COLUMNS)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
