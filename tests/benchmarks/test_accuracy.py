"""What accuracy.py and key_bias.py measure and show, on the CPU."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch

from benchmarks.core import accuracy_figure, performance, report, result_files
from benchmarks.peers.backends import BACKENDS
from benchmarks.suites import accuracy, key_bias
from tests.cases.attention import AttentionCase
from tests.cases.cpu_harness import one_thread  # noqa: F401
from tests.reference import attention_with_gradients

pytestmark = pytest.mark.usefixtures("one_thread")

PEERS_OF_CUDA = {"sdpa_cudnn", "fa3"}


@cache
def small_run() -> str:
    """What it writes."""
    shapes = ["--seqlens", "128", "32", "--head-dims", "128", "16x8"]
    with TemporaryDirectory() as folder:
        path = Path(folder, "accuracy.json")
        assert accuracy.main(["--device", "cpu", *shapes, "--json", str(path)]) == 0
        return path.read_text()


@pytest.fixture
def document() -> dict:
    return json.loads(small_run())


def test_a_row_of_each_cell(document: dict) -> None:
    rows = document["results"]
    pairs = [len(accuracy.MEANS), len(accuracy.FEW_MEANS)]
    assert len(rows) == 2 * (2 * sum(pairs) + 3 * pairs[1])
    assert document["missing"].keys() >= PEERS_OF_CUDA
    assert len({row["name"] for row in rows}) == len(rows)
    for row in rows:
        assert row["status"] == "ok", row["reason"]
        of_contenders = [row[name] for name in accuracy.CONTENDERS if name in row]
        assert {"ours", "maths"} <= row.keys()
        assert "sdpa_flash" in row or "sdpa_flash" in row["absent"]
        for errors in of_contenders:
            assert list(errors) == ["out", "dq", "dk", "dv"]
            unit = 2.0**-9 if row["dtype"] == "bf16" else 2.0**-12
            assert unit / 4 < errors["out"] < 2 * unit
        assert row["over_maths"] == pytest.approx(row["ours"]["dq"] / row["maths"]["dq"], rel=0.02)


def test_a_mean_of_keys_and_values_is_an_error_of_dq(document: dict) -> None:
    """Torch's kernel makes D of an O in 16 bits."""
    for causal in (False, True):
        errors = {
            tuple(row["means"]): [row[name]["dq"] for name in ("maths", "sdpa_flash")]
            for row in document["results"]
            if (row["head_dim"], row["seqlen"], row["dtype"]) == (128, 128, "bf16")
            and row["causal"] is causal
            and row["heads"] == [2, 2]
        }
        assert max(errors[0, 0]) < 0.004
        of_maths, of_flash = errors[4, 4]
        assert of_maths < 0.01 and of_flash > 10 * of_maths


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


def test_what_fails_fails_the_run(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    def refuse(case: AttentionCase) -> accuracy.Attend:
        if case.head_dim == 16:
            raise ValueError("a defect")
        return BACKENDS["ours"].prepare(case)

    broken = accuracy.Backend("ours", "", refuse)
    monkeypatch.setattr(accuracy, "CONTENDERS", {"ours": broken})
    shapes = ["--device", "cpu", "--seqlens", "32", "--head-dims", "8", "16", "--dtypes", "bf16"]
    assert accuracy.main(shapes) == 1
    assert "d16-bf16-full means 0, 0" in capsys.readouterr().err


def test_the_figure_and_the_table_of_a_result(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys
) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "h200_accuracy.json"
    path.write_text(small_run())
    monkeypatch.setattr(result_files, "RESULTS", tmp_path)
    monkeypatch.setattr(accuracy_figure, "SEQLENS", [128])
    result_files.load.cache_clear()
    figure = tmp_path / "accuracy_h200.svg"
    assert performance.main(["--figure", str(figure)]) == 0
    assert performance.shows_results(figure)
    shown = figure.read_text()
    assert all(text in shown for text in ("flash_attn_cuda", "softmax of fp32"))
    result_files.load.cache_clear()
    assert report.main([str(path), "--markdown"]) == 0
    assert "| 4, 1 |" in capsys.readouterr().out


def test_a_model_with_biases(tmp_path: Path) -> None:
    path = tmp_path / "key_bias.json"
    sizes = ["--preset", "tiny", "--seqlen", "32", "--batch-size", "2", "--steps", "3"]
    assert key_bias.main(["--device", "cpu", *sizes, "--json", str(path)]) == 0
    rows = json.loads(path.read_text())["results"]
    groups = ["0, 0", "1, 1", "4, 1", "4, 1 after 3 steps"]
    assert list(dict.fromkeys(row["group"] for row in rows)) == groups
    for row in rows:
        assert row["what"] not in PEERS_OF_CUDA
        for weights in key_bias.WEIGHTS:
            assert 1e-8 < row[weights] < 1e-4  # of fp32 against fp64
    trained = [row for row in rows if "loss" in row]
    assert trained[0]["what"] == "fp32" and trained[0]["loss_difference"] == 0.0
    for row in trained:
        assert row["group"] == groups[-1] and row["loss_difference"] < 1e-5


def test_biases_of_keys_are_in_columns_that_turn_least() -> None:
    preset = key_bias.PRESETS["tiny"]
    model = key_bias.new_model(preset, (4, 1), torch.device("cpu"))
    of_keys, of_values = model.blocks[1].attention.biases.detach().unbind()
    head_dim = preset.model.head_dim
    assert of_keys.square().mean(-1).sqrt() == pytest.approx(4.0)
    assert of_values.square().mean(-1).sqrt() == pytest.approx(1.0)
    assert not of_keys.unflatten(-1, (2, -1))[..., : 3 * head_dim // 8].any()
