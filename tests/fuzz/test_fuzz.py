"""Random calls, a few on the CPU and more on a GPU, and that what is wrong is named."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import pytest

from tests.cases.harness import DEVICE, scaled
from tests.cases.masked import MaskedCase
from tests.cases.second_order import SECOND_ORDER, jvp
from tests.fuzz import run
from tests.fuzz.draw import KINDS, RandomCall, draw_call
from tests.fuzz.run import REFUSED, RIGHT, WRONG, Tally, outcome_of

SEED = 7
ON_CPU = "--seed 7 --device cpu --most-pairs 4e3"


def check_calls(kind: str, calls: int, device: str, most_pairs: float) -> None:
    given = f"--kinds {kind} --seed {SEED} --device {device} --most-pairs {most_pairs}"
    options, tally = run.parse(given.split()), Tally()
    for number in range(calls):
        tally.add(outcome_of(options, number))
    assert not tally.failures
    counts = {what: tally.counts[kind, what] for what in (RIGHT, REFUSED)}
    assert sum(counts.values()) == calls
    assert counts[RIGHT] > 2 * counts[REFUSED], str(tally)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_calls(kind: str) -> None:
    check_calls(kind, scaled(100, 10), DEVICE, scaled(4_000_000, 4_000))


@pytest.mark.parametrize("kind", KINDS)
def test_calls_on_the_cpu(kind: str) -> None:
    check_calls(kind, 5, "cpu", 4_000.0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_number_draws_the_same_call(kind: str) -> None:
    drawn = [[str(draw_call(kind, SEED, n, "cpu")) for n in range(50)] for _ in range(2)]
    assert drawn[0] == drawn[1]
    assert len(set(drawn[0])) > 45


def test_draws_reach_every_feature() -> None:
    """Of 400 calls of a kind, some have each of what their case can have."""
    drawn = {kind: [draw_call(kind, SEED, n, "cpu") for n in range(400)] for kind in KINDS}
    for kind in ("dense", "packed"):
        cases = [x for x in drawn[kind] if isinstance(x, MaskedCase)]
        assert any(x.chunk and (x.mask or x.bias) for x in cases)
        assert any(x.bias and x.bias.reach for x in cases)
        of = [x.of for x in cases]
        assert constant(cases) == set() and constant(of) == {"device"}
        given = {"attn_mask", "sparsity", "blocks", "key_lists"}
        assert {x.mask.given for x in cases if x.mask} == given
        assert any(x.bias is not None and not x.bias.requires_grad for x in cases)
        assert len({x.window for x in of}) > 10
    assert len({x.of.layout for x in drawn["dense"]}) > 8
    of_training, of_latent = (
        {"device", "dropout_p", "deterministic", "max_logits"},
        {"has_qv", "alibi"},
    )
    caches, latent, fp8, fp8_latent = (
        [x.case for x in drawn[kind]]
        for kind in ("cache", "latent_cache", "fp8_cache", "fp8_latent_cache")
    )
    of_scores, of_lists = {"mask", "reach"}, {"has_qv", "keys_per_list"}
    of_latent |= of_scores
    assert constant(caches) == of_training | of_lists
    assert constant([x.cache for x in fp8]) == of_training | of_lists | of_scores
    for cases in (latent, [x.cache for x in fp8_latent]):
        assert constant(cases) == of_training | of_latent
    assert constant(fp8) == {"group", "is_v4"}
    assert len({(x.k_form, x.v_form, x.strides) for x in fp8}) > 20
    assert constant(fp8_latent) == {"k_form", "powers", "q_is_fp8"}
    assert len({(x.v_form, x.strides, x.group) for x in fp8_latent}) > 25
    assert len({x.num_splits for x in drawn["cache"]}) > 3
    assert {x.transform for x in drawn["derivatives"]} == {jvp, *SECOND_ORDER}


def constant(cases: Sequence[Any]) -> set[str]:
    """Fields that have one value in all of them."""
    names = {x.name for x in fields(cases[0])}
    return {name for name in names if len({getattr(x, name) for x in cases}) == 1}


def test_a_wrong_result_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    attend = run.run_masked

    def off_by_one_percent(*args: object, **options: object) -> object:
        result = attend(*args, **options)
        result.out *= 1.01
        return result

    monkeypatch.setattr(run, "run_masked", off_by_one_percent)
    options = run.parse(f"--kinds dense {ON_CPU}".split())
    found = [outcome_of(options, number) for number in range(8)]
    wrong = [(n, x.text or "") for n, x in enumerate(found) if x.what == WRONG]
    assert wrong
    for number, text in wrong:
        assert "not close to the reference" in text
        assert f"{ON_CPU.replace('4e3', '4000.0')} --first {number} --calls 1" in text


def refuse_fail_and_stop(call: RandomCall, number: int) -> str | None:
    """Even numbers end in a crash, odd ones in a call that does not end."""
    match number:
        case 2:
            raise NotImplementedError("this one")
        case 4:
            raise RuntimeError("no compiled kernel covers it")
        case 6:
            raise AssertionError("the seventh call")
        case 8:
            os._exit(5)
        case 5:
            time.sleep(600.0)
    return "some of it" if number == 3 else None


def test_processes_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever becomes of a call, nothing before it is lost, and it is named."""
    monkeypatch.setattr(run, "GRACE", 1.0)
    options = run.parse(f"--kinds packed cache --processes 2 --seconds 5 {ON_CPU}".split())
    tally = run.run_calls(options, refuse_fail_and_stop)
    right = {("packed", RIGHT): 1, ("cache", RIGHT): 2}
    assert tally.counts == right | {
        ("packed", REFUSED): 2,
        ("packed", WRONG): 2,
        ("cache", WRONG): 1,
    }
    refusals = {"this one": 1, "some of it": 1, "no compiled kernel covers it": 1}
    assert tally.refusals == refusals
    wrong, *stopped = tally.failures
    assert "the seventh call" in wrong and "--first 6 --calls 1" in wrong
    crashed, endless = sorted(stopped)
    assert "CRASHED (5)" in crashed and "--first 8 --calls 1" in crashed
    assert "DID NOT END" in endless and "--first 5 --calls 1" in endless


def test_so_many_calls_and_no_more() -> None:
    options = run.parse(f"--kinds dense --first 3 --calls 5 --processes 2 {ON_CPU}".split())
    assert [list(run._numbers_of(options, share)) for share in range(2)] == [[3, 5, 7], [4, 6]]
