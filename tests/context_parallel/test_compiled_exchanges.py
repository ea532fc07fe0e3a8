"""Exchanges of the graphs that ranks compile, in one process, whose group sends nothing: what a
rank sends to another, that one receives, in every graph and in the same order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from functorch.compile import (
    default_partition,
    make_boxed_func,
    min_cut_rematerialization_partition,
)
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import select_decomp_table
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

from flash_attn_cuda.context_parallel import Band, ContextParallel, Plan
from flash_attn_cuda.context_parallel.parallel import IS_TRACED

pytestmark = pytest.mark.skipif(not IS_TRACED, reason="attend is a graph break")

Exchange = tuple[str, list[int], list[int]]  # rows from each rank and to each
# The last rank has no row, and of the others one sends and one receives.
PLAN = Plan.balanced([32], 3, Band(), multiple=16)
PARTITIONS: dict[str, dict[str, Any]] = {
    "as-written": {"partition_fn": default_partition},
    "decomposed": {
        "partition_fn": min_cut_rematerialization_partition,
        "decompositions": select_decomp_table,
    },
}


def exchanges_of(graph: Any) -> list[Exchange]:
    """All-to-alls, and gathers of a random state."""
    found = []
    for node in graph.nodes:
        if getattr(node.target, "namespace", None) == "_c10d_functional":
            name, ones = node.target._opname, [1] * len(PLAN.ranks)
            if name != "wait_tensor":
                sizes = node.args[1:3] if name == "all_to_all_single" else (ones, ones)
                found.append((name, *sizes))
    return found


def told_apart(graph: Any) -> bool:
    """Whether no two sends have the same arguments, which a compiler may merge into one."""
    sends = [
        str(x.args) for x in graph.nodes if getattr(x.target, "_opname", None) == "rows_to_send"
    ]
    return len(set(sends)) == len(sends)


class Compiler:
    """A backend that keeps the exchanges of all graphs, which are not run."""

    def __init__(self, partition: str) -> None:
        self.found: list[list[Exchange]] = []
        self.backend = aot_autograd(
            fw_compiler=self.keep, bw_compiler=self.keep, **PARTITIONS[partition]
        )

    def keep(self, module: Any, _: Any) -> Callable[..., Any]:
        assert told_apart(module.graph)
        self.found.append(exchanges_of(module.graph))
        made = [None if x is None else x.meta["val"] for x in module.graph.output_node().args[0]]

        def zeros(*_: Any) -> list[Any]:
            return [x.new_zeros(x.shape) if isinstance(x, Tensor) else x for x in made]

        return make_boxed_func(zeros)


Attend = Callable[..., Tensor]
Loss = Callable[[Attend, Tensor, Tensor, Tensor], Tensor]


def shared_keys(attend: Attend, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Of two windows, whose rows are the same where there are none."""
    found = [attend(x, k, v, window_size=(n, -1)) for x, n in ((q, 5), (q.sin(), 2))]
    return found[0].square().sum() + found[1].square().sum()


def summed(attend: Attend, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Of a rank without queries both have the same results and gradients."""
    return (attend(q, k, v) + attend(q.sin(), k, v)).sum()


def checkpointed(attend: Attend, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attentions that are computed again, the last one with a random state that a rank without
    queries does not read.
    """
    for p in (0.0, 0.0, 0.5):
        q = checkpoint(lambda q, p=p: attend(q, k, v, dropout_p=p).sin(), q, use_reentrant=False)
    return q.square().sum()


def of_rank(rank: int, ranks: int, scheme: str, loss: Loss, partition: str) -> list[list[Exchange]]:
    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    torch._dynamo.reset()
    try:
        parallel = ContextParallel(None, scheme)
        leaves = [torch.randn(PLAN.rows, 4, 8, requires_grad=True) for _ in "qkv"]

        def attend(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
            return parallel.attend(q, k, v, PLAN, causal=True, **options)

        compiler = Compiler(partition)
        run = torch.compile(loss, backend=compiler.backend, fullgraph=True)
        run(attend, *leaves).backward()
        return compiler.found
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("loss", "scheme", "partition"),
    [
        (shared_keys, "ring", "decomposed"),
        (summed, "all_gather", "as-written"),
        (checkpointed, "ring", "as-written"),
    ],
)
def test_ranks_make_the_same_exchanges(loss: Loss, scheme: str, partition: str) -> None:
    if dist.is_initialized():
        pytest.skip("this process is one of a group already")
    ranks = len(PLAN.ranks)
    every = [of_rank(rank, ranks, scheme, loss, partition) for rank in range(ranks)]
    names = [[[x[0] for x in graph] for graph in of_one] for of_one in every]
    assert names == [names[0]] * ranks, names
    for graphs in zip(*every, strict=True):
        for exchanges in zip(*graphs, strict=True):
            received, sent = ([x[n] for x in exchanges] for n in (1, 2))
            assert received == [list(x) for x in zip(*sent, strict=True)]
