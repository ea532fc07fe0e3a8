"""What the ranks of a test do: the order in which transfers are asked for, waited for and worked
beside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.distributed import _functional_collectives as collectives
from torch.utils.checkpoint import checkpoint

from flash_attn_cuda.context_parallel import ContextParallel, attention
from tests.context_parallel.cases import Case, Whole, group_of, keep_draws, sharded_results
from tests.context_parallel.derivative_cases import Problem, jvp

GROUPS = 2
# Both groups are asked for before the first is waited for, and each goes back before the next.
IN_TURN = [
    *("ask 0", "ask 1"),
    *("wait 0", "attend", "ask 2"),
    *("wait 1", "attend", "ask 3"),
    *("wait 2", "wait 3"),
]


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


def transfers_are_beside_attention(case: Case) -> None:
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


def gradients_of_lse_travel_with_those_of_out(case: Case) -> None:
    """Of one group after the other. The log-sum-exp may be written in place."""
    parallel = group_of(case)
    leaves = leaves_of(parallel, case)
    out, softmax_lse = parallel.attend(*leaves, causal=True, return_lse=True)
    loss = out.square().sum() + softmax_lse.mul_(2.0).sum()
    with recorded() as events:
        torch.autograd.grad(loss, leaves)
    assert events == [
        *(f"ask {n}" for n in range(2 * GROUPS)),
        *("wait 0", "wait 1", "attend", "ask 4"),
        *("wait 2", "wait 3", "attend", "ask 5"),
        *("wait 4", "wait 5"),
    ]


def tangents_travel_beside_attention(case: Case) -> None:
    """Behind what they are tangents of; rows of the log-sum-exp go back behind those of out."""
    problem = Problem.of(case)
    mine, direction = problem.mine(problem.arguments()), problem.mine(problem.direction)
    jvp(problem.attend, mine, direction)  # what is agreed on and prepared
    with recorded() as events:
        jvp(problem.attend, mine, direction)
    in_turn = [*("ask",) * GROUPS, *("wait", "attend", "ask", "ask") * GROUPS]
    in_turn += ["wait"] * 2 * GROUPS
    assert [x.split()[0] for x in events] == in_turn * 2


def nothing_is_left_in_flight(case: Case) -> None:
    """What a checkpoint computes again is waited for, too."""
    parallel = group_of(case)
    leaves = leaves_of(parallel, case)
    with recorded() as events:
        out = checkpoint(parallel.attend, *leaves, causal=True, use_reentrant=False)
        out.sum().backward()
    for event in ("ask", "wait"):
        assert sum(x.startswith(event) for x in events) == 3 * 2 * GROUPS


def groups_give_the_same_bits(case: Case, groups: tuple[int | tuple[int, ...], ...]) -> None:
    """As all heads at once."""
    found = []
    for head_groups in (1, *groups):
        of_groups = replace(case, head_groups=head_groups)
        parallel = group_of(of_groups)
        drawn = keep_draws(parallel)
        torch.manual_seed(case.seed)
        results, _ = sharded_results(of_groups, parallel, Whole.of(of_groups))
        assert bool(drawn) == (case.dropout_p > 0)
        found.append(results)
    for results in found[1:]:
        for name, x in found[0].items():
            assert torch.equal(results[name], x), name
