"""Processes that train one model: data parallel, and each sequence over several of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from model import GPT, Attention
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from training import Corpus

if TYPE_CHECKING:
    from flash_attn_cuda.context_parallel import ContextParallel

SCHEMES = ("auto", "ring", "all_gather", "ulysses")


def world_size() -> int:
    """Of the processes that torchrun, or start_processes, has started; 1 where neither has."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_started() -> bool:
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def start_processes(main: Callable[[list[str]], int], arguments: list[str], count: int) -> int:
    """main(arguments) in `count` processes of this machine, as `torchrun --standalone` starts them;
    the largest status that any of them returned.
    """
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=count,
        run_id="train_gpt",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        max_restarts=0,
        monitor_interval=0.1,
    )
    return max(elastic_launch(config, main)(arguments).values())


@dataclass(frozen=True)
class Ranks:
    """This process among those that train. All have the same weights and the same batches; the
    data ranks share out a batch's sequences, the context ranks each sequence's tokens.
    """

    parallel: ContextParallel
    data_rank: int
    data_ranks: int
    device: torch.device

    @classmethod
    @contextmanager
    def joined(cls, context: int, scheme: str, device: torch.device) -> Iterator[Ranks]:
        """A mesh (data, context) of the started processes, `context` neighbours to a sequence."""
        from flash_attn_cuda.context_parallel import ContextParallel

        if device.type == "cuda":
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        elif "OMP_NUM_THREADS" not in os.environ:
            local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
            torch.set_num_threads(max(1, torch.get_num_threads() // local))
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        try:
            shape = (world_size() // context, context)
            mesh = init_device_mesh(device.type, shape, mesh_dim_names=("data", "context"))
            parallel = ContextParallel(mesh["context"], scheme)
            yield cls(parallel, mesh.get_local_rank("data"), shape[0], device)
        finally:
            dist.destroy_process_group()

    def __str__(self) -> str:
        context = self.parallel.size
        return f"{self.data_ranks * context} processes, {self.data_ranks} data x {context} context"

    @property
    def is_first(self) -> bool:
        return dist.get_rank() == 0

    @property
    def attention(self) -> Attention:
        """Causal self-attention of this rank's shards (batch, seqlen / ranks, heads, head_dim)."""
        return self._attend

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.parallel.attend(q, k, v, causal=True)

    def shard(self, x: Tensor) -> Tensor:
        """This rank's part of x (batch, seqlen): (batch / data ranks, seqlen / context ranks)."""
        return self.parallel.shard(x.chunk(self.data_ranks)[self.data_rank])

    def batch(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(tokens, targets, positions) of this rank; positions (seqlen / context ranks,)."""
        positions = self.parallel.position_ids(tokens.shape[1], device=tokens.device)
        return self.shard(tokens), self.shard(targets), positions

    def mean(self, x: Tensor) -> Tensor:
        """Over all ranks, which all have the same number of tokens."""
        total = x.detach().clone()
        dist.all_reduce(total)
        return total / dist.get_world_size()

    def of_first(self, x: float) -> float:
        """x of rank 0, which all ranks then act on."""
        shared = torch.tensor(x, dtype=torch.float64, device=self.device)
        dist.broadcast(shared, 0)
        return shared.item()

    def averaging(self, model: GPT, loss: Callable[..., Tensor]) -> DistributedDataParallel:
        """The loss function whose backward leaves each gradient's mean over all ranks."""
        return DistributedDataParallel(LossOf(model, loss))


class LossOf(nn.Module):
    """A model's loss as a module's forward, which is what DistributedDataParallel watches. It has
    the parameters alone: buffers, the same everywhere, would be sent before each step.
    """

    def __init__(self, model: GPT, loss: Callable[..., Tensor]) -> None:
        super().__init__()
        self.weights = nn.ParameterList(model.parameters())
        self.loss = loss

    def forward(self, tokens: Tensor, targets: Tensor, positions: Tensor) -> Tensor:
        return self.loss(tokens, targets, positions)


class ShardedCorpus(Corpus):
    """The same batches as a Corpus, of which each rank gets its part."""

    def __init__(
        self, text: bytes, seqlen: int, batch_size: int, device: torch.device, ranks: Ranks
    ) -> None:
        super().__init__(text, seqlen, batch_size, device)
        self.ranks = ranks

    def batches(self, split: str, seed: int) -> Iterator[tuple[Tensor, ...]]:
        """Endless (tokens, targets, positions) of this rank."""
        for tokens, targets in self.whole_batches(split, seed):
            yield self.ranks.batch(tokens, targets)
