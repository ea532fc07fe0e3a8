"""The benchmark of training, on the CPU."""

from __future__ import annotations

import json

import pytest

from benchmarks.suites import train as train_speed
from tests.cases.cpu_harness import one_thread  # noqa: F401

pytestmark = pytest.mark.usefixtures("one_thread")


def test_attentions_train_alike_and_every_run_counts(tmp_path, capsys):
    path = tmp_path / "train.json"
    options = "--device cpu --preset tiny --seqlen 64 --batch-size 2 --steps 3 --rounds 2"
    arguments = [*options.split(), "--attentions", "ours", "sdpa-math", "--json", str(path)]
    assert train_speed.main(arguments) == 0
    document = json.loads(path.read_text())
    assert document["command"].startswith("python -m benchmarks.suites.train --device cpu")
    ours, peer = document["results"]
    assert [ours["attention"], peer["attention"]] == ["ours", "sdpa-math"]
    for row in (ours, peer):
        assert len(row["tokens_per_second"]) == 2 and min(row["tokens_per_second"]) > 0
        assert len(row["train_losses"]) == 3
    assert ours["train_losses"] == pytest.approx(peer["train_losses"], rel=1e-4)
    assert ours["validation_loss"] == pytest.approx(peer["validation_loss"], rel=1e-4)
    assert "tokens/s" in capsys.readouterr().out


def test_steps_that_would_time_a_validation_are_refused(capsys):
    with pytest.raises(SystemExit):
        train_speed.main(["--device", "cpu", "--steps", "20"])
    assert "--steps must be from 1 to 19" in capsys.readouterr().err
