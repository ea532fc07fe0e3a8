"""Context parallelism with FSDP2, tensor parallelism, torch.compile and activation checkpoints, and
DTensors over a mesh of two dimensions, in processes over gloo, in fp64: gradients are those of one
process.
"""

from __future__ import annotations

import pytest
import torch

from tests.context_parallel import composition_cases as cases
from tests.context_parallel import dtensor_cases
from tests.context_parallel.ranks import Ranks

SCHEMES = ["ring", "all_gather", "ulysses"]


@pytest.mark.parametrize("over_both", [False, True], ids=["over-fsdp", "over-both"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_fully_shard(four: Ranks, scheme: str, over_both: bool) -> None:
    four.run(cases.with_fsdp, scheme, over_both)


@pytest.mark.skipif(torch.__version__ < "2.14", reason="FSDP2 of this torch has no torch.func")
@pytest.mark.parametrize("passes", [1, 2])
def test_forward_mode_in_a_step_of_sharded_weights(two: Ranks, passes: int) -> None:
    two.run(cases.with_forward_mode_in_a_step, passes)


@pytest.mark.parametrize("has_alibi", [False, True], ids=["plain", "alibi"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_tensor_parallel(four: Ranks, scheme: str, has_alibi: bool) -> None:
    four.run(cases.with_tensor_parallel, scheme, has_alibi)


def test_dtensors_over_batch_and_heads(four: Ranks) -> None:
    four.run(dtensor_cases.over_two_dimensions)


@pytest.mark.parametrize("use_reentrant", [True, False], ids=["reentrant", "not-reentrant"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_checkpoint(two: Ranks, scheme: str, use_reentrant: bool) -> None:
    two.run(cases.checkpointed, scheme, use_reentrant)


# A compile takes seconds on every rank: each scheme and each mechanism is compiled once.


def test_compile_takes_options_and_documents(two: Ranks) -> None:
    two.run(cases.compiled_options, "all_gather")


def test_compile_ulysses_and_ring(four: Ranks) -> None:
    four.run(cases.compiled_options, "ulysses+ring", 2)


def test_compile_a_model(two: Ranks) -> None:
    """Another length compiles anew."""
    two.run(cases.compiled, "ring", (16, 32, 16))


def test_compile_a_checkpoint(two: Ranks) -> None:
    use_reentrant, is_compiled = False, True
    two.run(cases.checkpointed, "ulysses", use_reentrant, is_compiled)


def test_compile_where_ranks_send_nothing(two: Ranks) -> None:
    two.run(cases.compiled_where_ranks_send_nothing)


def test_compile_takes_dropout(two: Ranks) -> None:
    two.run(cases.compiled_dropout)
