"""The benchmark of context parallelism, as far as it needs no GPU."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.context_parallel import errors, speed


def test_transfers_beside_kernels_and_alone() -> None:
    kernels = [(0.0, 4.0, False), (6.0, 8.0, False)]
    transfers = [(1.0, 5.0, True), (4.5, 5.5, True), (6.5, 7.0, True), (8.0, 9.0, True)]
    assert speed.transfer_times(kernels + transfers) == (4.5 + 0.5 + 1.0, 1.5 + 1.0)
    assert speed.transfer_times(kernels) == speed.transfer_times([]) == (0.0, 0.0)


def test_problems_and_contenders() -> None:
    given = "--seqlens 16384 32768 65536 --head-groups 8 1,7 --ulysses-sizes 2"
    options = speed.parse_arguments(given.split())
    problems = speed.problems(options)
    limits = [target and target.limit for target in (x.target() for x in problems)]
    assert limits == [None, 0.90, 0.95, 0.90, 0.90]
    assert problems[-1].cu_seqlens[-1] == problems[-1].total == 131_072
    assert len(problems[-2].lengths) == 32
    assert problems[0].flops("forward") == pytest.approx(16_384 * 16_385 / 2 * 4 * 32 * 128)
    assert problems[0].flops("backward") == 2.5 * problems[0].flops("forward")
    assert (options.head_groups, options.ulysses_sizes) == (["8", "1,7"], [2])
    assert speed.numbers_in("ulysses+ring 2") == ("ulysses+ring", [2])
    assert speed.numbers_in("all_gather 1,7") == ("all_gather", [1, 7])
    assert speed.numbers_in("ring") == ("ring", None)
    options = speed.parse_arguments(["--heads-k", "4", "--seqlens", "1024", "--means", "512"])
    one, documents = speed.problems(options)
    assert str(one) == "S1024, heads 32/4" and str(speed.Problem((1024,))) == "S1024"
    assert str(documents) == "S131072 documents of 512, heads 32/4"
    row = speed.row_of(one, "forward", speed.ONE_GPU, None, None)
    assert (row["heads_q"], row["heads_k"]) == (32, 4)


# -- results ---------------------------------------------------------------------------------------


def test_errors_are_of_each_document_and_relative(monkeypatch) -> None:
    """To the root mean square of what fp64 gives."""
    shapes = [(12, heads, 4) for heads in (speed.HEADS_Q, *[speed.HEADS_K] * 2)]
    q, k, v = (torch.randn(x, dtype=torch.double, requires_grad=True) for x in shapes)
    dout = torch.randn_like(q)
    inputs = [x.detach() for x in (q, k, v, dout)]
    monkeypatch.setattr(speed.Problem, "inputs", lambda _: inputs)
    expected = torch.cat(
        [
            torch.nn.functional.scaled_dot_product_attention(
                *(x[rows].transpose(0, 1) for x in (q, k, v)), is_causal=True, enable_gqa=True
            ).transpose(0, 1)
            for rows in (slice(0, 5), slice(5, 12))
        ]
    )
    gradients = torch.autograd.grad(expected, (q, k, v), dout)
    found = errors.exact_results(speed.Problem((5, 7), 6))
    for x, wanted in zip(found, (expected, *gradients), strict=True):
        torch.testing.assert_close(x, wanted)
    exact = torch.full((4, 5), 2.0, dtype=torch.double)
    mine = exact.clone()
    assert errors.errors(mine, exact, False) == (0.0, 0.0)
    mine[0, 0] += 0.2
    error = errors.errors(mine, exact, False)
    assert error == (pytest.approx(0.1 / 20**0.5), pytest.approx(0.1))


@pytest.mark.parametrize("alone", [{speed.ONE_GPU: 2.0}, {speed.ONE_GPU: None}, {}])
def test_results_are_held_against_one_gpu(alone: dict[str, float | None], monkeypatch) -> None:
    """If there is any; squares of results are those of each of two ranks, None: it raises."""

    def made(value: float | None) -> speed.Passes:
        if value is None:
            raise RuntimeError("no memory")
        return speed.Passes(str, str, value, None)

    squares = {**alone, "ring": 1.0, "torch": 3.0, "ulysses": None}

    def contenders(*_: Any) -> Iterator[tuple[str, Callable[[], speed.Passes]]]:
        for name, value in squares.items():
            yield name, partial(made, value)

    monkeypatch.setattr(speed, "contenders", contenders)
    monkeypatch.setattr(speed, "time_calls", lambda call, count: 50.0)
    monkeypatch.setattr(speed, "summed", lambda value: 2 * value)
    monkeypatch.setattr(speed.dist, "get_world_size", lambda: 2)
    reasons = dict.fromkeys(squares) | {"ulysses": "RuntimeError: no memory"}
    if alone == {speed.ONE_GPU: None}:
        reasons[speed.ONE_GPU] = reasons["ulysses"]
    elif alone:
        reasons["torch"] = "AssertionError: results differ from one GPU's, squares by 2"
    passes = list(speed.rows_of(speed.Problem((64,)), speed.parse_arguments([])))
    assert [rows[0]["pass"] for rows in passes] == ["forward", "backward"]
    for rows in passes:
        assert {row["scheme"]: row["reason"] for row in rows} == reasons
        assert all((row["status"] == "failed") == bool(row["reason"]) for row in rows)


def test_what_is_measured_is_written_at_once(monkeypatch, tmp_path: Path) -> None:
    def interrupted(problem: speed.Problem, _: Any) -> Iterator[list[dict[str, str]]]:
        yield [{"name": f"{problem} forward"}]
        raise KeyboardInterrupt

    ranks = SimpleNamespace(get_rank=lambda: 0, get_world_size=lambda: 2)
    monkeypatch.setattr(speed, "dist", ranks)
    monkeypatch.setattr(speed, "join_ranks", lambda: None)
    monkeypatch.setattr(speed, "environment", lambda device: {})
    monkeypatch.setattr(speed, "rows_of", interrupted)
    path = tmp_path / "results.json"
    with pytest.raises(KeyboardInterrupt):
        speed.main(["--seqlens", "64", "--rounds", "2", "--json", str(path)])
    document = json.loads(path.read_text())
    assert document["results"] == [{"name": "S64 forward"}]
    assert document["protocol"]["rounds"] == 2


# -- time ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("milliseconds", "first_ms", "calls"),
    [
        # Forth and back, after two looks at each; a turn is of 100 ms.
        ((10.0, 40.0), (10.0, 40.0), "a1 a1 b1 b1 a10 b3 b3 a10"),
        ((12_000.0, 37_000.0), (12_000.0, 37_000.0), "a1 b1 b1 a1"),
        # Where the first call alone was long, the turn was short.
        ((10.0,), (3000.0,), "a1 a10 a1 a10"),
    ],
)
def test_turns_of_ranks(milliseconds, first_ms, calls: str, monkeypatch) -> None:
    made = []

    def time_calls(call: Callable[[], str], count: int) -> float:
        made.append(f"{call()}{count}")
        return milliseconds["ab".index(call())]

    monkeypatch.setattr(speed, "time_calls", time_calls)
    names = [lambda name=name: name for name in "ab"[: len(milliseconds)]]
    assert speed.measure(names, first_ms, 100.0, 2) == list(milliseconds)
    assert made == calls.split()
