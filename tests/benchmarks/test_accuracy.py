"""What accuracy.py and key_bias.py measure and show, on the CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks.core import accuracy_figure, performance, report, result_files
from benchmarks.suites import accuracy, key_bias
from tests.cases.attention import AttentionCase
from tests.reference import attention_with_gradients

PEERS_OF_CUDA = {"sdpa_cudnn", "fa3"}


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    """The result file of a small run."""
    path = tmp_path_factory.mktemp("results") / "h200_accuracy.json"
    shapes = ["--seqlens", "128", "32", "--head-dims", "128", "16x8"]
    assert accuracy.main(["--device", "cpu", *shapes, "--json", str(path)]) == 0
    return path


def test_a_row_of_each_cell(written: Path) -> None:
    """A mean of keys and values is an error of dq where D is made of an O in 16 bits."""
    document = json.loads(written.read_text())
    rows, pairs = document["results"], [len(accuracy.MEANS), len(accuracy.FEW_MEANS)]
    assert len(rows) == len({row["name"] for row in rows}) == 2 * (2 * sum(pairs) + 3 * pairs[1])
    assert document["missing"].keys() >= PEERS_OF_CUDA
    for row in rows:
        assert row["status"] == "ok", row["reason"]
        assert {"ours", "maths", *accuracy.OTHER_KERNELS} <= row.keys() and (
            "sdpa_flash" in row or row["absent"]
        )
        for errors in (row[name] for name in accuracy.CONTENDERS if name in row):
            assert list(errors) == ["out", "dq", "dk", "dv"]
            unit = 2.0**-9 if row["dtype"] == "bf16" else 2.0**-12
            assert unit / 4 < errors["out"] < 2 * unit
        assert row["over_maths"] == pytest.approx(row["ours"]["dq"] / row["maths"]["dq"], rel=0.02)
    of_flash = {
        tuple(row["means"]): row
        for row in rows
        if (row["head_dim"], row["seqlen"], row["dtype"]) == (128, 128, "bf16")
        and row["heads"] == [2, 2]
    }
    assert of_flash[0, 0]["sdpa_flash"]["dq"] < 0.004
    of_maths, errors = (of_flash[4, 4][name]["dq"] for name in ("maths", "sdpa_flash"))
    assert of_maths < 0.01 and errors > 10 * of_maths


@pytest.mark.parametrize("causal", [False, True])
def test_maths_is_attention(causal: bool) -> None:
    case = AttentionCase(2, 24, 24, 4, 2, 16, 8, dtype=torch.float32, causal=causal, device="cpu")
    inputs = case.make_inputs()
    tensors = (inputs.q, inputs.k, inputs.v, inputs.dout)
    with torch.autocast("cpu", torch.bfloat16):  # which would round its factors
        found = accuracy.compute(accuracy.CONTENDERS["maths"], case, inputs)
    expected = attention_with_gradients(*tensors, causal=causal).tensors()
    for name, x in zip(accuracy.RESULTS, found, strict=True):
        torch.testing.assert_close(x.double(), expected[name], rtol=1e-5, atol=1e-5)


def test_the_figure_and_the_table_of_a_result(written: Path, monkeypatch, capsys) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(result_files, "RESULTS", written.parent)
    monkeypatch.setattr(accuracy_figure, "SEQLENS", [128])
    result_files.load.cache_clear()
    figure = written.with_name("accuracy_h200.svg")
    assert performance.main(["--figure", str(figure)]) == 0
    assert performance.shows_results(figure)
    result_files.load.cache_clear()
    shown = figure.read_text()
    assert all(text in shown for text in ("flash_attn_cuda", "softmax of fp32"))
    assert report.main([str(written), "--markdown"]) == 0
    assert "4, 1" in capsys.readouterr().out


def test_a_model_with_biases(tmp_path: Path) -> None:
    path = tmp_path / "key_bias.json"
    sizes = ["--preset", "tiny", "--seqlen", "32", "--batch-size", "2", "--steps", "3"]
    assert key_bias.main(["--device", "cpu", *sizes, "--json", str(path)]) == 0
    rows = json.loads(path.read_text())["results"]
    groups = ["0, 0", "1, 1", "4, 1", "4, 1 after 3 steps"]
    assert list(dict.fromkeys(row["group"] for row in rows)) == groups
    for row in rows:
        assert row["what"] not in PEERS_OF_CUDA
        assert all(1e-8 < row[weights] < 1e-4 for weights in key_bias.WEIGHTS)  # fp32 against fp64
    trained = [row for row in rows if "loss" in row]
    assert trained[0]["what"] == "fp32" and trained[0]["loss_difference"] == 0.0
    assert all(x["group"] == groups[-1] and x["loss_difference"] < 1e-5 for x in trained)


def test_biases_of_keys_are_in_columns_that_turn_least() -> None:
    preset = key_bias.PRESETS["tiny"]
    model = key_bias.new_model(preset, (4, 1), torch.device("cpu"))
    of_keys, of_values = model.blocks[1].attention.biases.detach().unbind()
    assert of_keys.square().mean(-1).sqrt() == pytest.approx(4.0)
    assert of_values.square().mean(-1).sqrt() == pytest.approx(1.0)
    still = 3 * preset.model.head_dim // 8
    assert not of_keys.unflatten(-1, (2, -1))[..., :still].any()
