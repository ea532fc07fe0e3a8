"""Random calls, a few on the CPU and more on a GPU, and that a wrong result is named."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import pytest

from tests.cases.harness import DEVICE, scaled
from tests.cases.masked import MaskedCase
from tests.cases.second_order import SECOND_ORDER, jvp
from tests.fuzz import run
from tests.fuzz.draw import KINDS, draw_call
from tests.fuzz.run import Tally, run_calls

SEED = 7


def tally_of(kind: str, calls: int, device: str, most_pairs: float) -> Tally:
    given = f"--kinds {kind} --seed {SEED} --device {device} --most-pairs {most_pairs}"
    return run_calls(run.parse(given.split()), iter(range(calls)), time.time() + 300.0)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_calls(kind: str) -> None:
    tally = tally_of(kind, scaled(100, 10), DEVICE, scaled(4_000_000, 4_000))
    assert not tally.failures, str(tally)
    assert tally.right[kind] > 2 * tally.refused[kind], str(tally)


@pytest.mark.parametrize("kind", KINDS)
def test_calls_on_the_cpu(kind: str) -> None:
    tally = tally_of(kind, 10, "cpu", 4_000.0)
    assert not tally.failures, str(tally)
    assert tally.right[kind] + tally.refused[kind] == 10


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
        assert_some_have(cases, "mask", "bias", "sink")
        of = [x.of for x in cases]
        assert_some_have(of, "causal", "softcap", "alibi", "dropout_p", "softmax_scale")
        assert_some_have(of, "deterministic", "head_dim_v")
    assert_some_have([x.of for x in drawn["packed"]], "lengths_k", "used_q", "used_k", "leftpad")
    caches = [x.case for x in drawn["cache"]]
    for cases in (caches, [x.case.cache for x in drawn["fp8_cache"]]):
        assert_some_have(cases, "page_size", "leftpad", "batch_idx", "seqlens_new", "rotary_dim")
        assert_some_have(cases, "sink", "causal", "softcap", "alibi")
    transforms = {x.transform for x in drawn["derivatives"]}
    assert transforms == {jvp, *SECOND_ORDER}


def assert_some_have(cases: Sequence[Any], *names: str) -> None:
    for name in names:
        assert any(getattr(x, name) for x in cases), name


def test_a_wrong_result_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    attend = run.run_masked

    def off_by_one_percent(*args: object, **options: object) -> object:
        result = attend(*args, **options)
        result.out *= 1.01
        return result

    monkeypatch.setattr(run, "run_masked", off_by_one_percent)
    status = run.main(
        ["--kinds", "dense", "--calls", "8", "--device", "cpu", "--most-pairs", "4e3"]
    )
    printed = capsys.readouterr().out
    assert status == 1
    assert "WRONG" in printed
    assert "--kinds dense --seed 0 --device cpu --most-pairs 4000 --first" in printed
    assert "not close to the reference" in printed


def test_processes_side_by_side(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """All calls run, and one that does not end is named."""
    given = "--kinds packed cache --calls 20 --device cpu --most-pairs 4e3 --processes 2"
    assert run.main(given.split()) == 0
    assert "packed: 10 right" in capfd.readouterr().out
    monkeypatch.setattr(run, "GRACE", -5.0)  # before a process has imported torch
    assert run.main([*given.split(), "--seconds", "5"]) == 1
    printed = capfd.readouterr().out
    assert printed.count("DID NOT END") == 2
    assert "--first 0 --calls 1" in printed
