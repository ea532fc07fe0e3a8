"""Processes, each a rank, for tests of what runs on several GPUs: over gloo, or over NCCL with a
GPU for each.
"""

from __future__ import annotations

import os
import tempfile
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

# A server imports these once and forks a process for each rank, which then starts in no time.
PRELOADED = (
    *("torch", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor"),
    "torch._inductor.compile_fx",  # as long to import as a small graph to compile
    *("flash_attn_cuda.context_parallel", "tests.context_parallel.composition_cases"),
)


def forking_context() -> Any:
    """Of torch.multiprocessing, whose processes begin with what PRELOADED names. That asks for
    GPUs, after which no forked process may use one.
    """
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    return context


class Ranks:
    """`size` processes, started once and kept. backend: of torch.distributed."""

    def __init__(self, size: int, backend: str = "gloo") -> None:
        self.size = size
        self.backend = backend
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []

    def _start(self) -> None:
        context = mp.get_context("spawn") if self.backend == "nccl" else forking_context()
        self._folder = tempfile.TemporaryDirectory()
        store = os.path.join(self._folder.name, "store")
        for rank in range(self.size):
            mine, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, self.size, self.backend, store, theirs), daemon=True
            )
            process.start()
            self._pipes.append(mine)
            self._processes.append(process)

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = 180.0) -> list[Any]:
        """function(*args), a module's, on every rank; raises what any of them raised, and then
        starts anew: a rank that has failed may have left others waiting.
        """
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            pipe.send((function, args))
        results: dict[int, Any] = {}
        errors: dict[int, str] = {}
        waiting = dict(enumerate(self._pipes))
        while waiting:
            ready = wait(waiting.values(), timeout if not errors else 1.0)
            if not ready:
                errors |= dict.fromkeys(waiting, "has not answered")
                break
            for rank in [rank for rank, pipe in waiting.items() if pipe in ready]:
                try:
                    results[rank], error = waiting.pop(rank).recv()
                except EOFError:
                    error = "has died"
                if error is not None:
                    errors[rank] = error
        if errors:
            self.stop()
            raise AssertionError("\n".join(f"rank {x}:\n{errors[x]}" for x in sorted(errors)))
        return [results[rank] for rank in range(self.size)]

    def stop(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        if self._processes:
            self._folder.cleanup()
        self._pipes, self._processes = [], []


def _serve(rank: int, size: int, backend: str, store: str, pipe: Connection) -> None:
    torch.set_num_threads(1)
    # What nobody writes is NaN then, and not by chance zero.
    torch.use_deterministic_algorithms(True, warn_only=True)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        backend,
        init_method=f"file://{store}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=60),
    )
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((function(*args), None))
        except BaseException:
            pipe.send((None, traceback.format_exc()))


@pytest.fixture
def alone() -> Iterator[None]:
    """A group of this process."""
    if dist.is_initialized():
        pytest.skip("this process is one of a group already")
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()
