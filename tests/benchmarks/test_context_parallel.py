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

from benchmarks.context_parallel import errors
from benchmarks.context_parallel import speed as benchmark


def test_transfers_beside_kernels_and_alone() -> None:
    kernels = [(0.0, 4.0, False), (6.0, 8.0, False)]
    transfers = [(1.0, 5.0, True), (4.5, 5.5, True), (6.5, 7.0, True), (8.0, 9.0, True)]
    assert benchmark.transfer_times(kernels + transfers) == (4.5 + 0.5 + 1.0, 1.5 + 1.0)
    assert benchmark.transfer_times(kernels) == (0.0, 0.0)
    assert benchmark.transfer_times([]) == (0.0, 0.0)


def test_problems_and_their_targets() -> None:
    options = benchmark.parse_arguments(["--seqlens", "16384", "32768", "65536"])
    problems = benchmark.problems(options)
    limits = [target and target.limit for target in (x.target() for x in problems)]
    assert limits == [None, 0.90, 0.95, 0.90, 0.90]
    assert [x.total for x in problems[-2:]] == [131_072, 131_072]
    assert len(problems[-2].lengths) == 32
    assert problems[0].flops("forward") == pytest.approx(16_384 * 16_385 / 2 * 4 * 32 * 128)
    assert problems[0].flops("backward") == 2.5 * problems[0].flops("forward")
    assert problems[-1].cu_seqlens[-1] == 131_072


def test_problems_of_other_heads() -> None:
    options = benchmark.parse_arguments(["--heads-k", "4", "--seqlens", "1024", "--means", "512"])
    one, documents = benchmark.problems(options)
    assert str(one) == "S1024, heads 32/4"
    assert str(documents) == "S131072 documents of 512, heads 32/4"
    assert str(benchmark.Problem((1024,))) == "S1024"
    row = benchmark.row_of(one, "forward", benchmark.ONE_GPU, None, None)
    assert (row["heads_q"], row["heads_k"]) == (32, 4)


def test_exact_results_are_those_of_each_document(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = [(12, heads, 4) for heads in (benchmark.HEADS_Q, *[benchmark.HEADS_K] * 2)]
    q, k, v = (torch.randn(x, dtype=torch.double, requires_grad=True) for x in shapes)
    dout = torch.randn_like(q)
    monkeypatch.setattr(
        benchmark.Problem, "inputs", lambda _: [x.detach() for x in (q, k, v, dout)]
    )
    problem = benchmark.Problem((5, 7), 6)
    expected = torch.cat(
        [
            torch.nn.functional.scaled_dot_product_attention(
                *(x[rows].transpose(0, 1) for x in (q, k, v)), is_causal=True, enable_gqa=True
            ).transpose(0, 1)
            for rows in (slice(0, 5), slice(5, 12))
        ]
    )
    gradients = torch.autograd.grad(expected, (q, k, v), dout)
    for found, wanted in zip(errors.exact_results(problem), (expected, *gradients), strict=True):
        torch.testing.assert_close(found, wanted)


def test_errors_are_relative_to_the_root_mean_square() -> None:
    exact = torch.full((4, 5), 2.0, dtype=torch.double)
    mine = exact.clone()
    assert errors.errors(mine, exact, False) == (0.0, 0.0)
    mine[0, 0] += 0.2
    found, largest = errors.errors(mine, exact, False)
    assert found == pytest.approx(0.1 / 20**0.5)
    assert largest == pytest.approx(0.1)


def test_groups_of_heads_as_contenders() -> None:
    arguments = ["--head-groups", "8", "1,7", "--ulysses-sizes", "2", "4"]
    options = benchmark.parse_arguments(arguments)
    assert options.head_groups == ["8", "1,7"] and options.ulysses_sizes == [2, 4]
    assert benchmark.numbers_in("ulysses+ring 2") == ("ulysses+ring", [2])
    assert benchmark.numbers_in("all_gather 1,7") == ("all_gather", [1, 7])
    assert benchmark.numbers_in("all_gather 8") == ("all_gather", [8])
    assert benchmark.numbers_in("ring") == ("ring", None)


class Clock:
    """Stands in for time_calls: whom is called how often, in what time. milliseconds: of a call by
    name; first_ms: of the first one, where it is another.
    """

    def __init__(self, milliseconds: dict[str, float], first_ms: dict[str, float] | None = None):
        self.milliseconds = milliseconds
        self.first_ms = first_ms or {}
        self.calls: list[tuple[str, int]] = []

    def __call__(self, call: Callable[[], str], count: int) -> float:
        self.calls.append((call(), count))
        return self.first_ms.pop(call(), self.milliseconds[call()])


def measured(monkeypatch: pytest.MonkeyPatch, clock: Clock, rounds: int) -> list[float]:
    monkeypatch.setattr(benchmark, "time_calls", clock)
    calls = [lambda name=name: name for name in clock.milliseconds]
    first_ms = [clock(call, 1) for call in calls]
    clock.calls.clear()
    return benchmark.measure(calls, first_ms, 100.0, rounds)


def test_turns_go_forth_and_back(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock({"a": 10.0, "b": 40.0})
    assert measured(monkeypatch, clock, 4) == [10.0, 40.0]
    estimates = [("a", 1), ("a", 1), ("b", 1), ("b", 1)]
    a, b = ("a", 10), ("b", 3)
    assert clock.calls == [*estimates, a, b, b, a, a, b, b, a]


def test_long_calls_are_made_in_turns_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock({"a": 12_000.0, "b": 37_000.0})
    assert measured(monkeypatch, clock, 2) == [12_000.0, 37_000.0]
    assert clock.calls == [("a", 1), ("b", 1), ("b", 1), ("a", 1)]


def test_turns_are_long_where_the_first_call_alone_was(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock({"a": 10.0}, {"a": 3000.0})
    assert measured(monkeypatch, clock, 2) == [10.0]
    assert clock.calls == [("a", 1), ("a", 10)] * 2


@pytest.mark.parametrize("rounds", ["0", "-2", "3", "two"])
def test_rounds_are_even(rounds: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        benchmark.parse_arguments(["--rounds", rounds])
    assert "argument --rounds: " in capsys.readouterr().err
    assert benchmark.parse_arguments(["--rounds", "2"]).rounds == 2
    assert benchmark.parse_arguments([]).rounds == 4


def statuses(
    monkeypatch: pytest.MonkeyPatch, squares: dict[str, float | None]
) -> dict[str, dict[str, str | None]]:
    """Of each pass, why a contender failed or None; squares: of its results on each of two ranks;
    None: it raises an error.
    """

    def made(value: float | None) -> benchmark.Passes:
        if value is None:
            raise RuntimeError("no memory")
        return benchmark.Passes(str, str, value, None)

    def contenders(*_: Any) -> Iterator[tuple[str, Callable[[], benchmark.Passes]]]:
        for name, value in squares.items():
            yield name, partial(made, value)

    monkeypatch.setattr(benchmark, "contenders", contenders)
    monkeypatch.setattr(benchmark, "time_calls", lambda call, count: 50.0)
    monkeypatch.setattr(benchmark, "summed", lambda value: 2 * value)
    monkeypatch.setattr(benchmark.dist, "get_world_size", lambda: 2)
    options = benchmark.parse_arguments(["--contenders", "ring"])
    found = {}
    for rows in benchmark.rows_of(benchmark.Problem((64,)), options):
        (which,) = {row["pass"] for row in rows}
        found[which] = {row["scheme"]: row["reason"] for row in rows}
        assert all((row["status"] == "failed") == bool(row["reason"]) for row in rows)
    assert list(found) == ["forward", "backward"]
    return found


def test_results_are_held_against_one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    squares = {benchmark.ONE_GPU: 2.0, "ring": 1.0, "torch": 3.0, "ulysses": None}
    for reasons in statuses(monkeypatch, squares).values():
        assert reasons == {
            benchmark.ONE_GPU: None,
            "ring": None,
            "torch": "AssertionError: results differ from one GPU's, squares by 2",
            "ulysses": "RuntimeError: no memory",
        }


def test_results_are_held_against_nothing_without_one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for reasons in statuses(monkeypatch, {"ring": 1.0, "torch": 3.0}).values():
        assert reasons == {"ring": None, "torch": None}
    failed = {benchmark.ONE_GPU: None, "ring": 1.0, "torch": 3.0}
    for reasons in statuses(monkeypatch, failed).values():
        assert reasons.pop(benchmark.ONE_GPU) == "RuntimeError: no memory"
        assert reasons == {"ring": None, "torch": None}


def test_what_is_measured_is_written_at_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def interrupted(problem: benchmark.Problem, _: Any) -> Iterator[list[dict[str, str]]]:
        yield [{"name": f"{problem} forward"}]
        raise KeyboardInterrupt

    ranks = SimpleNamespace(get_rank=lambda: 0, get_world_size=lambda: 2)
    monkeypatch.setattr(benchmark, "dist", ranks)
    monkeypatch.setattr(benchmark, "join_ranks", lambda: None)
    monkeypatch.setattr(benchmark, "environment", lambda device: {})
    monkeypatch.setattr(benchmark, "rows_of", interrupted)
    path = tmp_path / "results.json"
    with pytest.raises(KeyboardInterrupt):
        benchmark.main(["--seqlens", "64", "--rounds", "2", "--json", str(path)])
    document = json.loads(path.read_text())
    assert document["results"] == [{"name": "S64 forward"}]
    assert document["protocol"]["rounds"] == 2
