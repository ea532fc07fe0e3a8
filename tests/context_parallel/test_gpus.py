"""Context parallelism by NCCL over two GPUs, four and eight, as many as there are: results as
close to fp64 as those of one call on one GPU, bits that repeat, and CUDA graphs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.cases.harness import ON_CPU
from tests.context_parallel import (
    cases,
    composition_cases,
    derivative_cases,
    dtensor_cases,
    exchange_cases,
)
from tests.context_parallel.cases import Case
from tests.context_parallel.drawn_cases import any_case
from tests.context_parallel.ranks import Ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.cuda_only,
    pytest.mark.skipif(
        not ON_CPU and torch.cuda.device_count() < 2, reason="needs two CUDA devices"
    ),
]


COUNTS = [n for n in (2, 4, 8) if n <= torch.cuda.device_count()] or [2]


@pytest.fixture(scope="module", params=COUNTS, ids=lambda count: f"{count}-gpus")
def gpus(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    ranks = Ranks(request.param, "nccl")
    yield ranks
    ranks.stop()


BASE = Case(
    "ring", 2, lengths=(704,), head_dim=64, head_dim_v=64, dtype=torch.bfloat16, device="cuda"
)


def case_of(gpus: Ranks, **fields: Any) -> Case:
    case = replace(BASE, **fields)
    if case.ulysses_size is not None and gpus.size <= case.ulysses_size:
        pytest.skip("a ring has two groups at least")
    return cases.with_groups_of_its_heads(cases.of_ranks(case, gpus.size))


SCHEMES = {
    "ring": {"scheme": "ring"},
    "all_gather": {"scheme": "all_gather"},
    "all_gather-in-groups": {"scheme": "all_gather", "head_groups": 2},
    "all_gather-in-uneven-groups": {"scheme": "all_gather", "head_groups": (1, 3)},
    "ulysses": {"scheme": "ulysses"},
    "ulysses+ring": {"scheme": "ulysses+ring", "ulysses_size": 2},
}
IN_FORWARD_MODE = [name for name in SCHEMES if name not in ("ring", "ulysses+ring")]
LAYOUTS = {
    "one": {},
    "batch": {"lengths": (320,), "batch": 3},
    "documents": {"lengths": (5, 490, 1, 0, 137, 16, 243), "batch": None},
}
OPTIONS = {
    "full": {"causal": False},
    "causal": {},
    "window": {"window_size": (101, -1)},
    "wide": {"window_size": (140, 61), "causal": False},
    "softcap-logits": {"softcap": 3.0, "max_logits": True},
    "alibi": {"has_alibi": True},
    "sink": {"has_sink": True},
    "dropout": {"dropout_p": 0.3},
    "gqa": {"heads_q": 8, "heads_k": 2},
    "shared": {"heads_q": 8, "heads_k": 1},  # ranks of ulysses share the head of keys
    "d128": {"head_dim": 128, "head_dim_v": 128, "dtype": torch.float16},
    "head-dims": {"head_dim": 192, "head_dim_v": 128},
    "all-at-once": {"window_size": (129, -1), "softcap": 2.0, "has_alibi": True, "has_sink": True},
}


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_is_as_close_as_one_call(gpus: Ranks, scheme: str, layout: str, option: str) -> None:
    case = case_of(gpus, **SCHEMES[scheme], **LAYOUTS[layout], **OPTIONS[option])
    gpus.run(cases.is_as_close_as_one_call, case)


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_call(gpus: Ranks, data: st.DataObject) -> None:
    head_dims = ((64, 64), (128, 128), (192, 128), (96, 40))
    case = data.draw(
        any_case(gpus.size, head_dims, 500, dtype=torch.bfloat16, device="cuda"), label="case"
    )
    if sum(case.sequences) > 0:
        gpus.run(cases.is_as_close_as_one_call, case)
    else:
        gpus.run(exchange_cases.nothing_at_all, case)


@pytest.mark.parametrize("option", ["full", "window", "sink", "dropout", "gqa", "d128"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("scheme", IN_FORWARD_MODE)
def test_tangents_are_as_close_as_one_call(
    gpus: Ranks, scheme: str, layout: str, option: str
) -> None:
    case = case_of(gpus, **SCHEMES[scheme], **LAYOUTS[layout], **OPTIONS[option])
    gpus.run(derivative_cases.tangents_are_as_close_as_one_call, case)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_values_repeat_bit_by_bit(gpus: Ranks, scheme: str, layout: str) -> None:
    case = case_of(gpus, **SCHEMES[scheme], **LAYOUTS[layout], deterministic=True)
    gpus.run(cases.repeats, case)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_in_a_cuda_graph(gpus: Ranks, scheme: str) -> None:
    gpus.run(cases.in_a_graph, case_of(gpus, **SCHEMES[scheme], deterministic=True))


@pytest.mark.parametrize("scheme", ["ring", "all_gather", "ulysses"])
def test_in_a_mesh_of_two_dimensions(gpus: Ranks, scheme: str) -> None:
    """Weights sharded by FSDP2, or heads by tensor parallelism, along the other one."""
    if gpus.size != 4:
        pytest.skip("a mesh of two by two ranks")
    for over_both in (False, True):
        gpus.run(composition_cases.with_fsdp, scheme, over_both, composition_cases.CUDA)
    for has_alibi in (False, True):
        gpus.run(composition_cases.with_tensor_parallel, scheme, has_alibi, composition_cases.CUDA)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_rank_sends_what_others_wait_for(gpus: Ranks, scheme: str) -> None:
    case = case_of(gpus, **SCHEMES[scheme])
    gpus.run(exchange_cases.losses_leave_results_out, case)
    gpus.run(exchange_cases.one_loss_depends_on_nothing, case)
    gpus.run(exchange_cases.nothing_at_all, case)


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
@pytest.mark.parametrize("cut", ["heads", "batch", "packed-heads"])
def test_dtensors(gpus: Ranks, cut: str, dropout_p: float) -> None:
    is_packed = cut.startswith("packed")
    gpus.run(dtensor_cases.on_gpus, cut.removeprefix("packed-"), dropout_p, is_packed)
