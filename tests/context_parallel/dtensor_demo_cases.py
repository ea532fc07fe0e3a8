"""What the ranks do in a test of the demo's model, whose layers torch cuts."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import distribute_tensor as distribute
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.context_parallel.dtensor_cases import REPLICATED, line_of_ranks


def trains_as_one(steps: int = 3) -> None:
    """The demo's GPT, its layers cut by parallelize_module: losses and weights of one process."""
    losses, weights = _train(_demo_model(), steps)
    mesh = line_of_ranks()
    model = _demo_model()
    columns = ColwiseParallel(use_local_output=False)  # attention gets DTensors
    plan = {
        "attention.qkv": columns,
        "attention.project": RowwiseParallel(),
        "mlp.expand": ColwiseParallel(),
        "mlp.project": RowwiseParallel(),
    }
    for block in model.blocks:
        parallelize_module(block, mesh, plan)
    # What DTensors are multiplied with is one.
    model.cos, model.sin = (distribute(x, mesh, [REPLICATED]) for x in (model.cos, model.sin))
    found, found_weights = _train(model, steps)
    assert losses[0] > losses[-1]
    torch.testing.assert_close(found, losses, rtol=1e-9, atol=1e-11)
    for name, x in found_weights.items():
        whole = x.full_tensor() if isinstance(x, DTensor) else x
        torch.testing.assert_close(whole, weights[name], rtol=1e-7, atol=1e-9, msg=name)


def _demo_model() -> Any:
    examples = str(Path(__file__).resolve().parents[2] / "examples")
    if examples not in sys.path:
        sys.path.insert(0, examples)
    from model import GPT, GPTConfig

    torch.manual_seed(9)
    return GPT(GPTConfig(layers=2, width=32, heads=4, seqlen=16, vocab_size=40)).double()


def _train(model: nn.Module, steps: int) -> tuple[Tensor, dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(10)
    tokens = torch.randint(0, 40, (2, 17), generator=generator)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for _ in range(steps):
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses), dict(model.named_parameters())
