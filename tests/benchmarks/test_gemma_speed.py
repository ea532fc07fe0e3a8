"""The benchmark of a model with Gemma 4's layers, on the CPU."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks.suites import gemma
from tests.cases.cpu_harness import one_thread  # noqa: F401

pytestmark = pytest.mark.usefixtures("one_thread")


def test_attentions_train_alike(tmp_path, capsys):
    path = tmp_path / "gemma.json"
    options = "--device cpu --preset tiny --seqlen 64 --batch-size 2 --steps 3 --rounds 2"
    names = ["ours", "sdpa", "ours+sdpa-repeated"]
    assert gemma.main([*options.split(), "--attentions", *names, "--json", str(path)]) == 0
    document = json.loads(path.read_text())
    assert document["command"].startswith("python -m benchmarks.suites.gemma --device cpu")
    assert [row["attention"] for row in document["results"]] == names
    for row in document["results"]:
        assert len(row["tokens_per_second"]) == 2 and min(row["tokens_per_second"]) > 0
        expected = document["results"][1]
        assert row["train_losses"] == pytest.approx(expected["train_losses"], rel=1e-4)
        assert row["validation_loss"] == pytest.approx(expected["validation_loss"], rel=1e-4)
    assert "tokens/s" in capsys.readouterr().out


def test_the_layers_are_gemma_4s():
    config = gemma.PRESETS["12-layers"].model
    dims = [config.kind(layer).head_dim for layer in range(config.layers)]
    assert dims == 2 * [*[256] * 5, 512]


def test_flex_has_the_window_of_the_others():
    sliding = gemma.PRESETS["tiny"].model.sliding
    mask = gemma.flex_mask(sliding.window, 24, torch.device("cpu")).mask_mod
    places = torch.arange(24)
    visible = mask(torch.tensor(0), torch.tensor(0), places[:, None], places)
    distance = places[:, None] - places
    assert torch.equal(visible, (distance >= 0) & (distance < 16))


def test_what_is_refused(capsys):
    with pytest.raises(SystemExit, match="flex trains on CUDA devices only"):
        gemma.main(["--device", "cpu", "--attentions", "flex"])
    with pytest.raises(SystemExit):
        gemma.parse_arguments(["--attentions", "ours+xla"])
    assert "one or two of ours," in capsys.readouterr().err
