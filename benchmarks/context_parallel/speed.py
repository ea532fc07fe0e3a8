"""Context parallel attention over the GPUs of a host, against one GPU that does all of it.

    torchrun --nproc-per-node 2 -m benchmarks.context_parallel.speed --json context_parallel.json
    torchrun --nproc-per-node 2 -m benchmarks.context_parallel.speed --seqlens 32768 --means

Causal attention, head_dim 128, 32 query and 8 key heads (--heads-k), bf16. Long sequences have
--seqlens tokens in all; packed documents have --tokens in all, with log-normal lengths of each
mean. efficiency is the time of one GPU for the whole, over the ranks, over the time of the slowest
rank: 1 where ranks lose nothing. Every rank times one GPU's call too, so that both find the same
clocks. What is compared is timed in turns, A B C C B A, a turn of at least --turn-ms in each of
--rounds (2 for a million tokens, of which one GPU takes a minute); a barrier begins a turn. The
file is written after each pass of each problem.

Peers: `torch`, torch.distributed's context_parallel over scaled_dot_product_attention; and
`ring-flash-attention`, if it is installed, whose exchanges then run over this package's kernels
(compat.install), so that schedules are compared, not kernels. --trace: also the time in which a
rank's transfers ran beside no kernel, from torch's profiler.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import math
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from itertools import accumulate, pairwise
from pathlib import Path
from statistics import median
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as functional
from torch import Tensor

import flash_attn_cuda.compat
from benchmarks.core.documents import environment, write_outputs
from benchmarks.core.feature_tables import Column, Row, Target, number, print_document, ratio
from benchmarks.core.lengths import log_normal_lengths
from benchmarks.core.turns import PROTOCOL, order_of_turns
from flash_attn_cuda import flash_attn_func, flash_attn_varlen_func
from flash_attn_cuda.context_parallel import ContextParallel

SCHEMA = 1
BENCHMARK = "context parallel"
SCHEMES = ("all_gather", "ring", "ulysses")
AUTO = "auto"  # whichever of them ContextParallel takes
ONE_GPU, TORCH, RING_FLASH_ATTENTION = "one GPU", "torch", "ring-flash-attention"
HEADS_Q, HEADS_K, HEAD_DIM = 32, 8, 128
DTYPE = torch.bfloat16
PASSES = ("forward", "backward")
ROUNDS = 4
LONG_MS = 1000.0  # of a call whose first is all its warm-up
TRACED_ITERATIONS = 3

COLUMNS = (
    Column("problem", "group"),
    Column("pass", "pass"),
    Column("what", "scheme"),
    Column("ms", "milliseconds", number(4)),
    Column("TFLOP/s a GPU", "tflops", number(4)),
    Column("efficiency", "efficiency", ratio),
    Column("exposed ms", "exposed_ms", number(3)),
)


@dataclass(frozen=True)
class Passes:
    forward: Callable[[], Tensor]
    backward: Callable[[], Sequence[Tensor]]  # gradients of q, k, v
    squares: float  # sum over out's elements on this rank
    shard: Callable[[Tensor], Tensor] | None  # this rank's rows of a whole tensor


@dataclass(frozen=True)
class Problem:
    """lengths: of documents packed one behind the other; one for a sequence that is not packed."""

    lengths: tuple[int, ...]
    mean: int | None = None  # None: one sequence
    heads_k: int = HEADS_K

    def __str__(self) -> str:
        text = f"S{self.total}" + (f" documents of {self.mean}" if self.mean else "")
        return text if self.heads_k == HEADS_K else f"{text}, heads {HEADS_Q}/{self.heads_k}"

    @property
    def total(self) -> int:
        return sum(self.lengths)

    @property
    def cu_seqlens(self) -> list[int]:
        return [0, *accumulate(self.lengths)]

    def flops(self, which: str) -> float:
        pairs = sum(length * (length + 1) / 2 for length in self.lengths)
        return pairs * 4 * HEADS_Q * HEAD_DIM * (2.5 if which == "backward" else 1)

    def target(self) -> Target | None:
        if self.mean:
            return Target("efficiency", 0.90)
        if self.total >= 65_536:
            return Target("efficiency", 0.95)
        return Target("efficiency", 0.90) if self.total >= 32_768 else None

    def inputs(self) -> list[Tensor]:
        """q, k, v and dout of the whole, the same on every rank."""
        generator = torch.Generator("cuda").manual_seed(0)
        heads = (HEADS_Q, self.heads_k, self.heads_k, HEADS_Q)
        shapes = [(self.total, n, HEAD_DIM) for n in heads]
        return [
            torch.randn(shape, generator=generator, dtype=DTYPE, device="cuda") for shape in shapes
        ]


def sharded_passes(
    attend: Callable[..., Tensor], problem: Problem, shard: Callable[[Tensor], Tensor]
) -> Passes:
    return passes_of(attend, [shard(x) for x in problem.inputs()], shard)


def passes_of(
    attend: Callable[..., Tensor],
    tensors: Sequence[Tensor],
    shard: Callable[[Tensor], Tensor] | None = None,
) -> Passes:
    q, k, v, dout = tensors
    inputs = [x.detach().requires_grad_() for x in (q, k, v)]
    out = attend(*inputs)

    def forward() -> Tensor:
        with torch.no_grad():
            return attend(*inputs)

    backward = partial(torch.autograd.grad, out, inputs, dout, retain_graph=True)
    squares = sum(x.float().square().sum().item() for x in out.detach().split(4096, -3))
    return Passes(forward, backward, squares, shard)


def one_gpu(problem: Problem) -> Passes:
    if not problem.mean:
        return sharded_passes(partial(flash_attn_func, causal=True), problem, lambda x: x[None])
    bounds = torch.tensor(problem.cu_seqlens, dtype=torch.int32, device="cuda")
    longest = max(problem.lengths)

    def attend(*qkv: Tensor) -> Tensor:
        return flash_attn_varlen_func(*qkv, bounds, bounds, longest, longest, causal=True)

    return sharded_passes(attend, problem, lambda x: x)


def numbers_in(contender: str) -> tuple[str, list[int] | None]:
    """(scheme, groups of heads of keys) of "all_gather 1,7", or of a scheme alone; of "ulysses+ring
    2" the ranks that share out heads.
    """
    scheme, _, numbers = contender.partition(" ")
    return scheme, [int(x) for x in numbers.split(",")] if numbers else None


def ours(problem: Problem, contender: str) -> Passes:
    scheme, numbers = numbers_in(contender)
    if scheme == "ulysses+ring":
        assert numbers is not None
        parallel = ContextParallel(None, scheme, ulysses_size=numbers[0])
    else:
        parallel = ContextParallel(None, scheme, head_groups=numbers)
    if problem.mean:
        plan = parallel.plan(problem.cu_seqlens)
        attend = partial(parallel.attend, plan=plan, causal=True)
        return sharded_passes(attend, problem, lambda x: parallel.shard(x, plan))
    attend = partial(parallel.attend, causal=True)
    return sharded_passes(attend, problem, lambda x: parallel.shard(x[None]))


def peer_module(name: str) -> Any:
    """A module of the installed ring-flash-attention over this package's kernels; under another
    name, since compat serves the usual one.
    """
    parent = "installed_ring_flash_attn"
    if parent not in sys.modules:
        spec = find_spec("ring_flash_attn")
        assert spec is not None and spec.origin is not None
        package = ModuleType(parent)
        package.__path__ = [str(Path(spec.origin).parent)]
        sys.modules[parent] = package
        flash_attn_cuda.compat.install()
    return import_module(f"{parent}.{name}")


def ring_flash_attention(problem: Problem) -> Passes:
    if not problem.mean:
        parallel = ContextParallel(None, "ring")  # of which the layout is the same, zigzag
        zigzag = peer_module("zigzag_ring_flash_attn").zigzag_ring_flash_attn_func
        return sharded_passes(
            partial(zigzag, causal=True), problem, lambda x: parallel.shard(x[None])
        )
    peer = peer_module("llama3_flash_attn_varlen")
    rank, size = dist.get_rank(), dist.get_world_size()
    bounds = torch.tensor(problem.cu_seqlens, dtype=torch.int32, device="cuda")
    cu_q, cu_k, max_q, max_k, local_k = peer.llama3_flash_attn_prepare_cu_seqlens(
        bounds, True, rank, size
    )

    def attend(*qkv: Tensor) -> Tensor:
        return peer.llama3_flash_attn_varlen_func(
            *qkv, cu_q, cu_k, max_q, max_k, heads_k_stride=1, local_k_slice=local_k, causal=True
        )

    return sharded_passes(attend, problem, lambda x: x.chunk(size)[rank])


def torch_context_parallel(problem: Problem, stack: contextlib.ExitStack) -> Passes:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel
    from torch.nn.attention import SDPBackend, sdpa_kernel

    if problem.mean:
        raise ValueError("its causal attention takes sequences of one length")
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    whole = [x[None].transpose(1, 2).contiguous() for x in problem.inputs()]
    stack.enter_context(sdpa_kernel(SDPBackend.FLASH_ATTENTION))
    stack.enter_context(
        context_parallel(
            mesh, buffers=whole, buffer_seq_dims=[2] * 4, no_restore_buffers=set(whole)
        )
    )

    def attend(*qkv: Tensor) -> Tensor:  # by the name that context_parallel patches
        return functional.scaled_dot_product_attention(*qkv, is_causal=True, enable_gqa=True)

    return passes_of(attend, whole)


def contenders(
    problem: Problem, names: Sequence[str], stack: contextlib.ExitStack
) -> Iterator[tuple[str, Callable[[], Passes]]]:
    for name in names:
        if name == ONE_GPU:
            yield name, partial(one_gpu, problem)
        elif name == TORCH:
            yield name, partial(torch_context_parallel, problem, stack)
        elif name == RING_FLASH_ATTENTION:
            yield name, partial(ring_flash_attention, problem)
        else:
            yield name, partial(ours, problem, name)


# -- time ------------------------------------------------------------------------------------------


def slowest(milliseconds: float) -> float:
    """Of all ranks."""
    value = torch.tensor(milliseconds, device="cuda")
    dist.all_reduce(value, dist.ReduceOp.MAX)
    return value.item()


def time_calls(call: Callable[[], object], count: int) -> float:
    """Milliseconds of a call, on the slowest rank."""
    dist.barrier()
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    for _ in range(count):
        call()
    last.record()
    torch.cuda.synchronize()
    return slowest(first.elapsed_time(last) / count)


def measure(
    calls: Sequence[Callable[[], object]],
    first_ms: Sequence[float],
    turn_ms: float,
    rounds: int,
) -> list[float]:
    """Milliseconds of each call; first_ms: of the first of each, made before."""
    estimates = [estimate(*x) for x in zip(calls, first_ms, strict=True)]
    taken: list[list[float]] = [[] for _ in calls]
    for index in order_of_turns(len(calls), rounds):
        taken[index].append(take_turn(calls[index], estimates[index], turn_ms))
    return [median(x) for x in taken]


def estimate(call: Callable[[], object], first_ms: float) -> float:
    """Milliseconds of a call, for which a long one is not made again."""
    if first_ms > LONG_MS:
        return first_ms
    time_calls(call, 1)
    return time_calls(call, 1)


def take_turn(call: Callable[[], object], estimate_ms: float, turn_ms: float) -> float:
    """Again where the first call alone was long, and so the turn is short."""
    count = math.ceil(turn_ms / estimate_ms)
    milliseconds = time_calls(call, count)
    if count * milliseconds < turn_ms / 2:
        return time_calls(call, math.ceil(turn_ms / milliseconds))
    return milliseconds


def summed(value: float) -> float:
    """Over all ranks."""
    total = torch.tensor(value, device="cuda", dtype=torch.float64)
    dist.all_reduce(total)
    return total.item()


def check_squares(passes: Passes, single: Passes) -> None:
    """Whether the ranks' results are those of one GPU: a peer that does not exchange keys is
    faster.
    """
    error = abs(summed(passes.squares) / single.squares - 1)
    if error > 1e-2:
        raise AssertionError(f"results differ from one GPU's, squares by {error:.2g}")


def exposed(call: Callable[[], object]) -> dict[str, float]:
    """Of one call on this rank, from the profiler: milliseconds in which transfers ran, and in
    which they ran beside no other kernel.
    """
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    call()
    dist.barrier()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        for _ in range(TRACED_ITERATIONS):
            call()
        torch.cuda.synchronize()
    transfers, alone = transfer_times(
        [
            (event.time_range.start, event.time_range.end, "nccl" in event.name.lower())
            for event in trace.events()
            if event.device_type == DeviceType.CUDA
        ]
    )
    per_call = 1e3 * TRACED_ITERATIONS
    return {"transfer_ms": transfers / per_call, "exposed_ms": alone / per_call}


def transfer_times(spans: Sequence[tuple[float, float, bool]]) -> tuple[float, float]:
    """How long any transfer ran, and how long beside nothing else; spans: (begin, end, whether it
    is a transfer).
    """
    marks = [(begin, 1, is_transfer) for begin, _, is_transfer in spans]
    marks += [(end, -1, is_transfer) for _, end, is_transfer in spans]
    running = {True: 0, False: 0}
    transfers = alone = 0.0
    for (begin, step, is_transfer), (end, *_) in pairwise(sorted(marks)):
        running[is_transfer] += step
        if running[True]:
            transfers += end - begin
            alone += 0.0 if running[False] else end - begin
    return transfers, alone


def rows_of(problem: Problem, options: argparse.Namespace) -> Iterator[list[Row]]:
    """Of each pass. What comes after one GPU in the order of contenders is held against it."""
    names: list[str] = []
    made: list[Passes] = []
    firsts: list[dict[str, float]] = []  # milliseconds of the first call
    with contextlib.ExitStack() as stack:
        reasons = {}
        names_wanted = [
            *options.contenders,
            *(f"all_gather {x}" for x in options.head_groups),
            *(f"ulysses+ring {x}" for x in options.ulysses_sizes),
        ]
        for name, make in contenders(problem, names_wanted, stack):
            try:
                passes = make()
                first = {which: time_calls(getattr(passes, which), 1) for which in PASSES}
                if ONE_GPU in names and name != ONE_GPU:
                    check_squares(passes, made[names.index(ONE_GPU)])
            except Exception as error:
                reasons[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
                continue
            names.append(name)
            made.append(passes)
            firsts.append(first)
        for which in PASSES:
            calls = [getattr(passes, which) for passes in made]
            first_ms = [first[which] for first in firsts]
            times = measure(calls, first_ms, options.turn_ms, options.rounds)
            single = dict(zip(names, times, strict=True)).get(ONE_GPU)
            rows = [
                row_of(problem, which, name, milliseconds, single)
                | (
                    exposed(call)
                    if options.trace and name != ONE_GPU
                    else {"transfer_ms": None, "exposed_ms": None}
                )
                for name, call, milliseconds in zip(names, calls, times, strict=True)
            ]
            rows += [
                row_of(problem, which, name, None, single)
                | {
                    "status": "failed",
                    "reason": reason,
                    "transfer_ms": None,
                    "exposed_ms": None,
                }
                for name, reason in reasons.items()
            ]
            yield rows


def row_of(
    problem: Problem, which: str, scheme: str, milliseconds: float | None, single: float | None
) -> Row:
    ranks = 1 if scheme == ONE_GPU else dist.get_world_size()
    row: Row = {
        "name": f"{problem} {which} {scheme}",
        "group": str(problem),
        "tokens": problem.total,
        "heads_q": HEADS_Q,
        "heads_k": problem.heads_k,
        "mean_length": problem.mean,
        "pass": which,
        "scheme": scheme,
        "ranks": ranks,
        "status": "ok",
        "reason": None,
        "milliseconds": milliseconds,
        "single_milliseconds": single,
        "tflops": milliseconds and problem.flops(which) / ranks / milliseconds / 1e9,
        "efficiency": single / ranks / milliseconds if single and milliseconds else None,
    }
    target = problem.target()
    row["targets"] = [target.judge(row)] if target and scheme in (*SCHEMES, AUTO) else []
    return row


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", "--json", type=Path, help="where the results go")
    parser.add_argument(
        "--seqlens", nargs="*", type=int, default=[16_384, 32_768, 65_536, 131_072, 262_144]
    )
    parser.add_argument("--means", nargs="*", type=int, default=[4096, 16_384])
    parser.add_argument("--tokens", type=int, default=131_072, help="of packed documents")
    parser.add_argument("--heads-k", type=int, default=HEADS_K, help="of 32 heads of queries")
    every = [ONE_GPU, *SCHEMES, AUTO, TORCH, *([RING_FLASH_ATTENTION] if find_peer() else [])]
    parser.add_argument("--contenders", nargs="+", choices=every, default=every)
    parser.add_argument(
        "--activate",
        action="store_true",
        help="torch's flash attention runs on this package, also that of `torch` here",
    )
    parser.add_argument(
        "--head-groups",
        nargs="+",
        default=[],
        metavar="N,N",
        help="also all_gather with groups of so many heads of keys each",
    )
    parser.add_argument(
        "--ulysses-sizes",
        nargs="+",
        type=int,
        default=[],
        metavar="N",
        help="also ulysses over so many neighbouring ranks, and a ring over those groups",
    )
    parser.add_argument("--turn-ms", type=float, default=100.0)
    parser.add_argument(
        "--rounds",
        type=even_number,
        default=ROUNDS,
        help="turns of each, an even number (default: %(default)d)",
    )
    parser.add_argument("--trace", action="store_true", help="also show exposed transfers")
    return parser.parse_args(arguments)


def even_number(text: str) -> int:
    value = int(text)
    if value < 2 or value % 2:
        raise argparse.ArgumentTypeError(f"must be an even number of at least 2, got {value}")
    return value


def find_peer() -> bool:
    return find_spec("ring_flash_attn") is not None


def problems(options: argparse.Namespace) -> list[Problem]:
    documents = [
        Problem(log_normal_lengths(options.tokens // mean, mean), mean, options.heads_k)
        for mean in options.means
    ]
    return [*(Problem((x,), None, options.heads_k) for x in options.seqlens), *documents]


def join_ranks() -> None:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(
        "nccl",
        device_id=torch.device("cuda", torch.cuda.current_device()),
        timeout=timedelta(seconds=90),
    )


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    join_ranks()
    if options.activate:
        torch.nn.attention.activate_flash_attention_impl("flash_attn_cuda")
    is_first = dist.get_rank() == 0
    command = ["torchrun", "-m", "benchmarks.context_parallel.speed", *(arguments or sys.argv[1:])]
    rows: list[Row] = []
    document: dict[str, Any] = {
        "schema": SCHEMA,
        "benchmark": BENCHMARK,
        "command": shlex.join(command),
        "protocol": {
            "name": PROTOCOL,
            "order": "A B B A",
            "turn_ms": options.turn_ms,
            "rounds": options.rounds,
        },
        "ranks": dist.get_world_size(),
        "environment": environment("cuda"),
        "results": rows,
    }
    for problem in problems(options):
        if is_first:
            print(problem, file=sys.stderr, flush=True)
        for found in rows_of(problem, options):
            rows += found
            if is_first and options.out:
                write_outputs(document, json_path=options.out, csv_path=None, plot_path=None)
        gc.collect()
        torch.cuda.empty_cache()
    if is_first:
        print_document(document, COLUMNS)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
