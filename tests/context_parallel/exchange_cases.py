"""What the ranks of a test do: which collectives they take part in, and in which order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as collectives
from torch.utils.checkpoint import checkpoint

from flash_attn_cuda import flash_attn_func
from flash_attn_cuda.context_parallel import ContextParallel, attention
from tests.context_parallel.cases import Case, Whole, group_of
from tests.context_parallel.derivative_cases import Problem, jvp

# One collective before attention and one after it.
IN_TURN = ["ask 0", "wait 0", "attend", "ask 1", "wait 1"]


@contextmanager
def recorded() -> Iterator[list[str]]:
    """All-to-alls asked for, by number, waits for them, and calls of attention, as they come."""
    events: list[str] = []
    asked: dict[int, int] = {}  # by the storage of what comes
    ask, wait = collectives.all_to_all_single, collectives.wait_tensor

    def storage(x: Any) -> int:
        return getattr(x, "elem", x).untyped_storage()._cdata

    def asking(*args: Any) -> Tensor:
        came = ask(*args)
        number = sum(event.startswith("ask") for event in events)
        asked[storage(came)] = number
        events.append(f"ask {number}")
        return came

    def waiting(x: Tensor) -> Tensor:
        if storage(x) in asked:
            event = f"wait {asked[storage(x)]}"
            if event not in events:  # later waits are over at once
                events.append(event)
        return wait(x)

    def attending(name: str) -> Callable[..., Any]:
        run = getattr(attention, name)

        def recording(*args: Any, **kwargs: Any) -> Any:
            events.append("attend")
            return run(*args, **kwargs)

        return recording

    names = ("attend_into", "gradients_into", "run_jvp_operator")
    with (
        mock.patch.object(collectives, "all_to_all_single", asking),
        mock.patch.object(collectives, "wait_tensor", waiting),
        mock.patch.multiple(attention, **{name: attending(name) for name in names}),
    ):
        yield events


def leaves_of(parallel: ContextParallel, case: Case) -> list[Tensor]:
    whole = Whole.of(case)
    return [parallel.shard(x[None]).requires_grad_() for x in (whole.q, whole.k, whole.v)]


def what_goes_the_same_way_travels_together(case: Case) -> None:
    parallel = group_of(case)
    leaves = leaves_of(parallel, case)
    parallel.attend(*leaves, causal=True)  # what is agreed on and prepared
    with recorded() as events:
        out = parallel.attend(*leaves, causal=True)
    assert events == IN_TURN
    with recorded() as events:
        torch.autograd.grad(out.square().sum(), leaves)
    assert events == IN_TURN
    with recorded() as events:
        torch.func.grad(lambda q: parallel.attend(q, *leaves[1:], causal=True).sum())(leaves[0])
    assert [x.split()[0] for x in events] == [x.split()[0] for x in IN_TURN * 2]


def tangents_travel_as_what_they_are_of(case: Case) -> None:
    """Rows of the log-sum-exp go back behind those of out."""
    problem = Problem.of(case)
    mine, direction = problem.mine(problem.arguments()), problem.mine(problem.direction)
    jvp(problem.attend, mine, direction)  # what is agreed on and prepared
    with recorded() as events:
        jvp(problem.attend, mine, direction)
    in_turn = ["ask", "wait", "attend", *("ask", "wait") * 2]
    assert [x.split()[0] for x in events] == in_turn * 2


def nothing_is_left_in_flight(case: Case) -> None:
    """What a checkpoint computes again is waited for, too."""
    parallel = group_of(case)
    leaves = leaves_of(parallel, case)
    with recorded() as events:
        out = checkpoint(parallel.attend, *leaves, causal=True, use_reentrant=False)
        out.sum().backward()
    for event in ("ask", "wait"):
        assert sum(x.startswith(event) for x in events) == 3 * 2


def losses_leave_results_out(case: Case) -> None:
    """Each rank's loss another one: gradients are those of the sum of all losses, and no rank waits
    for what another does not send. By ulysses the log-sum-exp may be written in place.
    """
    whole, parallel = Whole.of(case), group_of(case)

    def loss(out: Tensor, softmax_lse: Tensor, *, with_out: bool) -> Tensor:
        if with_out:
            return out.square().sum()
        doubled = softmax_lse.mul_(2.0) if case.scheme == "ulysses" else 2.0 * softmax_lse
        return doubled.square().sum()

    leaves = leaves_of(parallel, case)
    out, softmax_lse = parallel.attend(*leaves, causal=True, return_lse=True)
    found = torch.autograd.grad(loss(out, softmax_lse, with_out=dist.get_rank() == 0), leaves)
    of_whole = [x[None].detach().requires_grad_() for x in (whole.q, whole.k, whole.v)]
    out, softmax_lse, _ = flash_attn_func(*of_whole, causal=True, return_attn_probs=True)
    total = 0.0
    for rank in range(dist.get_world_size()):
        rows = rows_of_rank(parallel, out.shape[1], rank, case.device)
        of_rank = out[:, rows], softmax_lse[:, :, rows]
        total = total + loss(*(x.clone() for x in of_rank), with_out=rank == 0)
    for x, y in zip(found, torch.autograd.grad(total, of_whole), strict=True):
        assert_near(x, parallel.shard(y))


def assert_near(x: Tensor, y: Tensor) -> None:
    """To rounding in fp64, and to some roundings of the largest value in 16 bits."""
    allowed = 1e-9 if x.dtype == torch.float64 else 4.0 * torch.finfo(x.dtype).eps
    largest = y.abs().max().item() if y.numel() > 0 else 0.0
    torch.testing.assert_close(x, y, rtol=0.0, atol=allowed * max(1.0, largest))


class NoGradient(torch.autograd.Function):
    """The same tensor, whose gradient is lost."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> None:
        return None


def one_loss_depends_on_nothing(case: Case) -> None:
    """Gradients are those of the other ranks' losses, which wait for nobody."""
    parallel = group_of(case)

    def gradients(out_of: Callable[[Tensor], Tensor]) -> tuple[Tensor, ...]:
        leaves = leaves_of(parallel, case)
        loss = out_of(parallel.attend(*leaves, causal=True)).square().sum()
        return torch.autograd.grad(loss, leaves)

    is_first = dist.get_rank() == 0
    found = gradients(NoGradient.apply if is_first else torch.clone)
    expected = gradients(lambda out: 0.0 * out if is_first else out)
    for x, y in zip(found, expected, strict=True):
        assert_near(x, y)


def rows_of_rank(parallel: ContextParallel, seqlen: int, rank: int, device: str) -> list[int]:
    """Positions of a sequence that the rank has."""
    positions = parallel.shard(torch.arange(seqlen, device=device)[None]).contiguous()
    every = [torch.empty_like(positions) for _ in range(dist.get_world_size())]
    dist.all_gather(every, positions)
    return every[rank][0].tolist()


def nothing_at_all(case: Case) -> None:
    """Of rows: results and gradients have as many."""
    parallel = group_of(case)
    for shape in ((0, 0), (2, 0), (0, 32)):
        heads_and_dims = ((case.heads_q, case.head_dim), (case.heads_k, case.head_dim))
        heads_and_dims += ((case.heads_k, case.head_dim_v),)
        options = {"dtype": case.dtype, "device": case.device, "requires_grad": True}
        leaves = [torch.zeros(*shape, *x, **options) for x in heads_and_dims]
        out, softmax_lse = parallel.attend(*leaves, causal=True, return_lse=True)
        assert out.shape == (*shape, case.heads_q, case.head_dim_v)
        assert softmax_lse.shape == (shape[0], case.heads_q, shape[1])
        for x, y in zip(torch.autograd.grad(out.sum(), leaves), leaves, strict=True):
            assert x.shape == y.shape
