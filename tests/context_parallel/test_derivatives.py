"""Forward mode and torch.func through context parallelism, in two processes over gloo, in fp64:
tangents are those of one call over the whole, and what has none is refused by name.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.context_parallel import derivative_cases as cases
from tests.context_parallel.cases import Case
from tests.context_parallel.ranks import Ranks

SCHEMES = {
    "all_gather": Case("all_gather", 2),
    "all_gather-in-uneven-groups": Case("all_gather", 2, head_groups=(1, 3)),
    "ulysses": Case("ulysses", 2),
}
LAYOUTS = {
    "batch": {"lengths": (64,), "batch": 2},
    "documents": {"lengths": (5, 90, 1, 0, 37, 16, 43), "batch": None},
    "few": {"lengths": (1,), "batch": None},  # a rank without rows
}
OPTIONS = {
    "full": {"causal": False},
    "window": {"window_size": (17, -1)},
    "softcap-alibi": {"softcap": 3.0, "has_alibi": True, "max_logits": True},
    "sink": {"has_sink": True},
    "dropout": {"dropout_p": 0.3},
    "head-dims": {"head_dim": 12, "head_dim_v": 4},
    "gqa": {"heads_q": 8, "heads_k": 4},
}
FORMS = tuple(cases.FORMS)


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_tangents_equal_the_whole(two: Ranks, scheme: str, layout: str, option: str) -> None:
    case = replace(SCHEMES[scheme], **OPTIONS[option], **LAYOUTS[layout])
    two.run(cases.tangents_equal_the_whole, case, "torch.func")


@pytest.mark.parametrize("option", ["sink", "dropout"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_tangents_of_dual_numbers(two: Ranks, scheme: str, option: str) -> None:
    case = replace(SCHEMES[scheme], **OPTIONS[option], **LAYOUTS["documents"])
    two.run(cases.tangents_equal_the_whole, case, "forward_ad")


def test_key_heads_that_ranks_share(two: Ranks) -> None:
    case = replace(SCHEMES["ulysses"], heads_k=1, **LAYOUTS["batch"])
    for form in FORMS:
        two.run(cases.tangents_equal_the_whole, case, form)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_tangents_of_some_arguments(two: Ranks, scheme: str, form: str) -> None:
    case = replace(SCHEMES[scheme], has_sink=True)
    for names in (("q",), ("k",), ("v",), ("sink",), ("k", "sink")):
        two.run(cases.tangents_equal_the_whole, case, form, names)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_tangents_of_keys_of_some_ranks(two: Ranks, scheme: str) -> None:
    two.run(cases.of_some_ranks, SCHEMES[scheme])


@pytest.mark.parametrize("scheme", ["ring", "all_gather", "ulysses"])
def test_ranks_without_tangents_differ(two: Ranks, scheme: str) -> None:
    message = "forward-mode gradients: must be the same on every rank, got some on rank 0, none"
    with pytest.raises(AssertionError, match=message) as error:
        two.run(cases.on_one_rank_alone, scheme)
    assert "rank 1:\nTraceback" in str(error.value)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_in_low_precision(two: Ranks, scheme: str) -> None:
    case = replace(SCHEMES[scheme], dtype=torch.bfloat16, head_dim=32, head_dim_v=32)
    two.run(cases.tangents_are_as_close_as_one_call, replace(case, **LAYOUTS["documents"]))


@pytest.mark.parametrize("option", ["sink", "softcap-alibi"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_step_of_both_modes(two: Ranks, scheme: str, option: str) -> None:
    two.run(cases.a_training_step, replace(SCHEMES[scheme], **OPTIONS[option]))


@pytest.mark.parametrize("scheme", ["ring", *SCHEMES])
def test_gradients_by_torch_func(two: Ranks, scheme: str) -> None:
    case = SCHEMES.get(scheme, Case(scheme, 2))
    case = replace(case, has_sink=True, has_alibi=True, **LAYOUTS["documents"])
    two.run(cases.gradients_by_torch_func, case)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_what_a_transform_prepares_serves_later_calls(two: Ranks, scheme: str) -> None:
    two.run(cases.prepared_inside_a_transform, replace(SCHEMES[scheme], has_alibi=True))


@pytest.mark.parametrize("scheme", ["ring", "all_gather", "ulysses"])
def test_a_level_without_tangents(two: Ranks, scheme: str) -> None:
    two.run(cases.still_equals_the_whole_in_a_level, Case(scheme, 2))


@pytest.mark.parametrize(("scheme", "ulysses_size"), [("ring", None), ("ulysses+ring", 2)])
def test_schemes_that_merge_have_no_forward_mode(
    two: Ranks, scheme: str, ulysses_size: int | None
) -> None:
    two.run(cases.refuses_forward_mode, scheme, ulysses_size)


def test_stripes_have_no_forward_mode(two: Ranks) -> None:
    two.run(cases.refuses_forward_mode_of_stripes)


@pytest.mark.parametrize("scheme", ["ring", "all_gather", "ulysses"])
def test_second_derivatives_are_refused_by_name(two: Ranks, scheme: str) -> None:
    two.run(cases.refuses_second_derivatives, scheme)
