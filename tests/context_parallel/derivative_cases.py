"""What the ranks of a test do: attention of shards differentiated in forward mode and by torch.func
and held against attention of the whole.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import forward_ad

from flash_attn_cuda.context_parallel import ContextParallel, Plan
from flash_attn_cuda.integrations import ring_flash_attn
from flash_attn_cuda.operators.derivatives import run_operator
from tests.context_parallel.cases import (
    Case,
    Whole,
    equals_the_whole,
    keep_draws,
    make,
    sharded_results,
)

NAMES = ("q", "k", "v", "sink")
Attend = Callable[..., tuple[Tensor, Tensor]]


@dataclass
class Problem:
    """A case's numbers, packed, and a direction of theirs; rows of either on this rank."""

    case: Case
    parallel: ContextParallel
    whole: Whole
    direction: dict[str, Tensor]
    plan: Plan | None

    @classmethod
    def of(cls, case: Case, names: tuple[str, ...] = NAMES) -> Problem:
        """names: of the arguments that have tangents. The ContextParallel has prepared nothing."""
        parallel, whole = make(case), Whole.of(case)
        other = Whole.of(replace(case, seed=case.seed + 100))
        found = {name: getattr(other, name) for name in names}
        plan = None
        if case.batch is None:
            multiple = 16 if case.dropout_p else 1
            plan = parallel.plan(
                whole.cu_seqlens,
                causal=case.causal,
                window_size=case.window_size,
                multiple=multiple,
            )
        direction = {name: x for name, x in found.items() if x is not None}
        return cls(case, parallel, whole, direction, plan)

    def cut(self, x: Tensor) -> Tensor:
        if self.plan is not None:
            return self.parallel.shard(x, self.plan).contiguous()
        return self.parallel.shard(x.unflatten(0, (self.case.batch, -1))).contiguous()

    def join(self, x: Tensor) -> Tensor:
        joined = self.parallel.unshard(x, self.plan)
        return joined if self.plan is not None else joined.flatten(0, 1)

    def arguments(self) -> dict[str, Tensor]:
        given = {name: getattr(self.whole, name) for name in NAMES}
        return {name: x for name, x in given.items() if x is not None}

    def mine(self, given: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: x if name == "sink" else self.cut(x) for name, x in given.items()}

    def attend(self, **given: Tensor) -> tuple[Tensor, Tensor]:
        """out and softmax_lse by rows, of this rank's rows."""
        q, k, v = (given.pop(name) for name in "qkv")
        options = self.case.options() | given
        found = self.parallel.attend(
            *(q, k, v, self.plan),
            **options,
            alibi_slopes=self.whole.slopes,
            return_lse=True,
            return_max_logits=self.case.max_logits,
        )
        out, softmax_lse, *_ = found
        return out, softmax_lse.transpose(-1, -2)

    def attend_whole(
        self, rng_state: Tensor | None, whole: Whole | None = None
    ) -> Callable[..., tuple[Tensor, Tensor]]:
        """out and softmax_lse by rows, of one call."""
        of = self.whole if whole is None else whole

        def attend(**given: Tensor) -> tuple[Tensor, Tensor]:
            found = run_operator(of.call(self.case, rng_state, **given))
            return found.out, found.softmax_lse.t()

        return attend


def jvp(attend: Attend, arguments: dict[str, Tensor], direction: dict[str, Tensor]) -> Any:
    """((out, lse), (tout, tlse)) by torch.func, of tangents of some of the arguments."""
    others = {name: x for name, x in arguments.items() if name not in direction}
    names = tuple(direction)
    return torch.func.jvp(
        lambda *given: attend(**dict(zip(names, given, strict=True)), **others),
        tuple(arguments[name] for name in names),
        tuple(direction.values()),
    )


def by_dual_numbers(
    attend: Attend, arguments: dict[str, Tensor], direction: dict[str, Tensor]
) -> Any:
    """The same by torch.autograd.forward_ad."""
    with forward_ad.dual_level():
        duals = {
            name: forward_ad.make_dual(x, direction[name]) if name in direction else x
            for name, x in arguments.items()
        }
        primals, tangents = zip(*map(forward_ad.unpack_dual, attend(**duals)), strict=True)
    return primals, tangents


FORMS = {"torch.func": jvp, "forward_ad": by_dual_numbers}


def tangents_equal_the_whole(case: Case, form: str, names: tuple[str, ...] = NAMES) -> None:
    problem = Problem.of(case, names)
    drawn = keep_draws(problem.parallel)
    torch.manual_seed(case.seed + dist.get_rank())
    mine, direction = problem.mine(problem.arguments()), problem.mine(problem.direction)
    found = FORMS[form](problem.attend, mine, direction)
    one = problem.attend_whole(drawn[0] if drawn else None)
    wanted = jvp(one, problem.arguments(), problem.direction)
    assert wanted[1][0].abs().max() > 0.1
    for kind, of_ranks, of_one in zip(("result", "tangent"), found, wanted, strict=True):
        for name, x, y in zip(("out", "softmax_lse"), of_ranks, of_one, strict=True):
            torch.testing.assert_close(
                problem.join(x),
                y,
                rtol=1e-9,
                atol=1e-10,
                msg=lambda m, name=name, kind=kind: f"{kind} of {name}: {m}",
            )


def tangents_are_as_close_as_one_call(case: Case) -> None:
    """In low precision: as cases.is_as_close_as_one_call has it of results."""
    problem = Problem.of(case)
    drawn = keep_draws(problem.parallel)
    torch.manual_seed(case.seed + dist.get_rank())
    mine, direction = problem.mine(problem.arguments()), problem.mine(problem.direction)
    _, found = jvp(problem.attend, mine, direction)
    rng_state = drawn[0] if drawn else None
    _, usual = jvp(problem.attend_whole(rng_state), problem.arguments(), problem.direction)
    exact = replace(problem, whole=problem.whole.in_fp64_on_cpu())
    one = exact.attend_whole(None if rng_state is None else rng_state.cpu())
    wide = {name: x.cpu().double() for name, x in problem.direction.items()}
    _, wanted = jvp(one, exact.arguments(), wide)
    for name, x, y, z in zip(("out", "lse"), found, usual, wanted, strict=True):
        error, error_of_one = ((t.cpu().double() - z).abs() for t in (problem.join(x), y))
        unit = torch.finfo(case.dtype).eps * z.abs().max()
        assert error.isfinite().all(), name
        assert error.max() <= 2 * error_of_one.max() + unit, (name, error.max())
        assert error.mean() <= 1.5 * error_of_one.mean() + unit / 8, (name, error.mean())


def of_some_ranks(case: Case) -> None:
    """Only the first rank has tangents of k and v: those of others count as zero."""
    problem = Problem.of(case)
    direction = problem.mine(problem.direction)
    if dist.get_rank() > 0:
        direction = {"q": direction["q"]}
    _, found = by_dual_numbers(problem.attend, problem.mine(problem.arguments()), direction)

    def of_first(name: str, x: Tensor) -> Tensor:
        mine = problem.cut(x)
        return problem.join(mine if dist.get_rank() == 0 or name == "q" else torch.zeros_like(mine))

    whole = {name: of_first(name, x) for name, x in problem.direction.items()}
    _, wanted = jvp(problem.attend_whole(None), problem.arguments(), whole)
    for x, y in zip(found, wanted, strict=True):
        torch.testing.assert_close(problem.join(x), y, rtol=1e-9, atol=1e-10)


def on_one_rank_alone(scheme: str) -> None:
    """Another rank calls without tangents."""
    x = torch.randn(1, 16, 4, 8)
    parallel = ContextParallel(None, scheme)
    with forward_ad.dual_level():
        q = forward_ad.make_dual(x, x) if dist.get_rank() == 0 else x
        parallel.attend(q, x, x)


def prepared_inside_a_transform(case: Case) -> None:
    """Schedules, places and agreements that a transform's first call has made serve others."""
    problem = Problem.of(case)
    mine, direction = problem.mine(problem.arguments()), problem.mine(problem.direction)
    inside = Problem.of(case)  # the rows of which are cut inside, too

    def attend(q: Tensor) -> Tensor:
        return inside.attend(**(mine | {"q": q}))[0] * inside.cut(problem.whole.q)

    torch.func.jvp(attend, (mine["q"],), (direction["q"],))
    torch.func.grad(lambda q: attend(q).sum())(mine["q"])
    found, _ = sharded_results(case, inside.parallel, problem.whole)
    for name, x in problem.whole.results(case, None).items():
        torch.testing.assert_close(found[name], x, rtol=1e-9, atol=1e-10)


def a_training_step(case: Case) -> None:
    """Reverse mode through the result of forward mode, whose tangent is a constant, as in MeanFlow:
    gradients are those of the whole.
    """
    problem = Problem.of(case)

    def gradients(attend: Attend, arguments: Any, direction: Any) -> dict[str, Tensor]:
        leaves = {name: x.clone().requires_grad_() for name, x in arguments.items()}
        (out, softmax_lse), (tout, tlse) = jvp(attend, leaves, direction)
        loss = (out - tout.detach()).square().sum() + (softmax_lse - tlse.detach()).square().sum()
        return dict(zip(leaves, torch.autograd.grad(loss, tuple(leaves.values())), strict=True))

    mine, direction = problem.mine(problem.arguments()), problem.mine(problem.direction)
    found = gradients(problem.attend, mine, direction)
    wanted = gradients(problem.attend_whole(None), problem.arguments(), problem.direction)
    for name, x in wanted.items():
        if name == "sink":
            dist.all_reduce(found[name])
        gradient = found[name] if name == "sink" else problem.join(found[name])
        torch.testing.assert_close(gradient, x, rtol=1e-9, atol=1e-9)


def gradients_by_torch_func(case: Case) -> None:
    """torch.func.vjp gives what backward gives."""
    problem = Problem.of(case)
    mine = problem.mine(problem.arguments())
    names = tuple(mine)
    results, pull = torch.func.vjp(
        lambda *given: problem.attend(**dict(zip(names, given, strict=True))), *mine.values()
    )
    dout, dlse = problem.cut(problem.whole.dout), problem.cut(problem.whole.dlse.t())
    found = pull((dout, dlse))
    leaves = [x.clone().requires_grad_() for x in mine.values()]
    again = problem.attend(**dict(zip(names, leaves, strict=True)))
    wanted = torch.autograd.grad(again, leaves, (dout, dlse))
    for x, y in zip((*results, *found), (*again, *wanted), strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0)


def refuses_forward_mode(scheme: str, ulysses_size: int | None = None) -> None:
    x = torch.randn(1, 16, 4, 8)
    parallel = ContextParallel(None, scheme, ulysses_size=ulysses_size)
    message = rf"v: must not carry a forward-mode gradient by scheme '{scheme}'".replace("+", r"\+")
    plain = parallel.attend(x, x, x)
    with pytest.raises(NotImplementedError, match=message):
        torch.func.jvp(lambda v: parallel.attend(x, x, v), (x,), (x,))
    with forward_ad.dual_level():
        with pytest.raises(NotImplementedError, match=message):
            parallel.attend(x, x, forward_ad.make_dual(x, x))
        assert torch.equal(parallel.attend(x, x, x), plain)


def refuses_forward_mode_of_stripes() -> None:
    x = torch.randn(1, 16, 4, 8)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, x)
        with pytest.raises(NotImplementedError, match=r"x: must not carry .* by scheme 'ring'"):
            ring_flash_attn.stripe_flash_attn_func(x, dual, x, causal=True)


def refuses_second_derivatives(scheme: str) -> None:
    """Of gradients in either mode, and of a tangent in reverse mode."""
    x = torch.randn(1, 16, 4, 8, dtype=torch.float64)
    parallel = ContextParallel(None, scheme)
    message = f"scheme: context parallelism by '{scheme}' has first derivatives alone"

    def attend(q: Tensor) -> Tensor:
        return parallel.attend(q, x, x, causal=True)

    for loss in (lambda out: out.sum(), lambda out: out.square().sum()):
        leaf = x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(loss(attend(leaf)), leaf, create_graph=True)
        with pytest.raises(NotImplementedError, match=message):
            gradient.square().sum().backward()
        gradient_of = torch.func.grad(lambda q, loss=loss: loss(attend(q)))
        with pytest.raises(NotImplementedError, match=message):
            torch.func.grad(lambda q, f=gradient_of: f(q).square().sum())(x)
    if scheme == "ring":
        return
    with pytest.raises(NotImplementedError, match=message):
        torch.func.jvp(gradient_of, (x,), (x,))
    leaf = x.clone().requires_grad_()
    _, tangent = torch.func.jvp(attend, (leaf,), (x,))
    with pytest.raises(NotImplementedError, match=message):
        tangent.sum().backward()


def still_equals_the_whole_in_a_level(case: Case) -> None:
    """Results and gradients where forward mode is on and no argument has a tangent."""
    with forward_ad.dual_level():
        equals_the_whole(case)
