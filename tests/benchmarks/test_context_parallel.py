"""The benchmark of context parallelism, as far as it needs no GPU."""

from __future__ import annotations

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
