"""Which GPU a process of a parallel run has first."""

from __future__ import annotations

import pytest

from tests.gpu.gpus import gpus_of_worker, visible_gpus


def test_workers_take_gpus_in_turns() -> None:
    firsts = [gpus_of_worker(f"gw{i}", ["0", "3", "5"])[0] for i in range(7)]
    assert firsts == ["0", "3", "5", "0", "3", "5", "0"]


def test_every_worker_sees_all_gpus() -> None:
    assert gpus_of_worker("gw4", ["0", "3", "5"]) == ["3", "5", "0"]


def test_a_worker_needs_a_number() -> None:
    with pytest.raises(ValueError, match="worker must be gw and a number, got 'master'"):
        gpus_of_worker("master", ["0"])


def test_a_choice_of_gpus_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,1")
    assert visible_gpus() == ["2", "1"]
