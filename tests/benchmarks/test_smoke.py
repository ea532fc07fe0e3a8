"""Every suite measures something small on the CPU, saves its rows and prints them."""

from __future__ import annotations

import json
from contextlib import nullcontext
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.core import report, runner, turns
from benchmarks.peers.backends import BACKENDS
from benchmarks.suites import (
    decode,
    feature_cost,
    features,
    gemma,
    grid,
    host_overhead,
    latent,
    mask_entrants,
    mask_tables,
    prefill,
    rounding_cost,
    train,
    varlen,
)
from benchmarks.suites.mask_blocks import BLOCK, flex_block_mask
from tests.benchmarks.cases import BRIEF_OPTIONS, sdpa_like

TINY: dict[Any, dict[str, Any]] = {
    turns: {"MIN_ROUNDS": 2},
    # A second and half a second each; test_turns.py has both.
    runner: {"warm_up": lambda *_: None},
    turns.gc: {"collect": lambda: 0},
    varlen: {"groups": lambda *_: [varlen.VarlenGroup(16, 16, 64, 32, device="cpu")]},
    decode: {
        "groups": lambda *_: [decode.DecodeGroup("tiny", (5, 300), None, 4, 2, 16, device="cpu")]
    },
    latent: {"groups": lambda *_: [latent.LatentGroup(4, 2, 64, 1, 32, 16, 16, device="cpu")]},
    decode.measure_copy: {"__defaults__": (1000,)},
    prefill: {"groups": lambda *_: [prefill.PrefillGroup(2, 5, 256, 16, 4, 2, device="cpu")]},
    feature_cost: {"SEQLEN": 32, "HEAD_DIMS": (16, 16), "TOKENS": 64, "HIDDEN": 32},
    rounding_cost: {"SEQLENS": (16, 32), "HEAD_DIMS": (16,)},
    mask_entrants: {
        **{"HEADS": 2, "DENSITY_SEQLEN": 2 * BLOCK, "DENSITIES": (1.0, 0.75)},
        **{"DOCUMENTS": 2, "MEAN_DOCUMENT": 60, "BIAS_SEQLEN": 150, "SINK_SEQLENS": (32,)},
        **{"DISTANCE_SEQLENS": (150,), "LIST_SEQLENS": (300,), "LIST_HEADS": (4, 2)},
        "HEAD_DIMS": (8, 16),
    },
}
OPTIONS = {
    **{f"features {name}": "--quick" for name in features.BENCHMARKS},
    "limits": "--quick --tokens 16 --hidden 256 --size 32",
    "rotary": "--quick --head-dims 8 --tokens 16",
    "second_order": "--head-dims 8 --seqlens 32 --tokens 64 --width 16",
    "fp8_cache": "--shape 2,40,4,2,16 --queries 8",
}
PEERS = (
    "sdpa_cudnn",
    "torch",
    "Flash",
    "FA3",
    "fla",
    "jvp_flash_attention",
)  # which may be missing


@pytest.fixture(autouse=True)
def _tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    for owner, changes in TINY.items():
        for name, value in changes.items():
            monkeypatch.setattr(owner, name, value)
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)


def run(name: str, options: str, path: Path) -> tuple[int, dict[str, Any]]:
    """The exit status, and what was written."""
    suite, *command = name.split()
    arguments = [*command, "--device", "cpu", *options.split(), "--json", str(path)]
    status = import_module(f"benchmarks.suites.{suite}").main(arguments)
    document = json.loads(path.read_text())
    assert document["schema"] == 1
    assert document["command"].startswith(f"python -m benchmarks.suites.{name} --device cpu")
    assert {"device", "driver", "torch", "cuda", "commit"} <= document["environment"].keys()
    return status, document


@pytest.mark.filterwarnings("ignore:.*[fF]lash|.*fused:UserWarning")  # torch's refusals
@pytest.mark.parametrize("name", OPTIONS)
def test_a_suite_runs_saves_and_prints(name: str, tmp_path: Path, capsys) -> None:
    path = tmp_path / "r.json"
    status, document = run(name, f"{OPTIONS[name]} {BRIEF_OPTIONS}", path)
    printed = capsys.readouterr()
    assert status == 0, printed.err
    check_rows(document)
    assert "targets met:" in printed.out
    assert table_of(path, capsys) == len(document["results"])


def check_rows(document: dict[str, Any]) -> None:
    assert (document["protocol"]["version"], document["protocol"]["turn_ms"]) == (4, 0.2)
    rows = document["results"]
    parts = {row.get("part") for row in rows}
    assert rows and len({(row.get("part"), frozenset(row)) for row in rows}) == len(parts)
    names = [row.get("name") or (row["case"], row["pass"], row["backend"]) for row in rows]
    assert len(set(names)) == len(names)
    for row in rows:
        assert row["sm_clock_mhz"] is row["watts"] is row.get("joules_per_call") is None
        if row["status"] == "ok":
            assert 0 < row["low_ms"] <= row["median_ms"] <= row["high_ms"] and row["samples"] == 2
        else:
            what = row.get("what") or row["backend"]
            assert row["status"] == "unsupported" and row["reason"] and what.startswith(PEERS)
            assert row["median_ms"] is row.get("tflops") is None


def table_of(path: Path, capsys) -> int:
    """How many lines the report's table has."""
    capsys.readouterr()
    assert report.main([str(path), "--markdown"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    return len(lines) - 2


def test_the_grid_checks_its_results(tmp_path: Path, monkeypatch, capsys) -> None:
    options = "--dtype fp32 --head-dims 16x8 --seqlens 16 32 --tokens 32 --hidden 32 --refcheck "
    options += f"{BRIEF_OPTIONS} --joules --baseline sdpa_math --backends ours"
    path = tmp_path / "r.json"
    status, document = run("grid", f"{options} sdpa_math sdpa_cudnn", path)
    check_rows(document)
    assert status == 0 and document["protocol"]["joules_turn_ms"] == 1000.0
    rows = [row for row in document["results"] if row["status"] == "ok"]
    assert len(rows) == 2 * 2 * 2 * 2 and all(row["check"]["passes"] for row in rows)
    assert {(row["head_dim"], row["head_dim_v"]) for row in rows} == {(16, 8)}
    summary = [("forward", "ours"), ("backward", "ours")]
    assert [(x["pass"], x["backend"]) for x in document["summary"]] == summary
    assert table_of(path, capsys) == 2 * 2 * 2
    wrong = sdpa_like("ours", lambda *qkv: 2 * F.scaled_dot_product_attention(*qkv))
    monkeypatch.setitem(BACKENDS, "ours", wrong)
    assert run("grid", f"{options} --passes forward --masks full", path)[0] == 1
    assert "2 results differ from the reference" in capsys.readouterr().err


# -- masks -----------------------------------------------------------------------------------------


def dense_in_blocks(q: Tensor, k: Tensor, v: Tensor, block_mask: Any) -> Tensor:
    """(B, H, S, D); what FlexAttention makes of full blocks."""
    blocks = block_mask.to_dense().bool()
    pairs = blocks.repeat_interleave(BLOCK, -2).repeat_interleave(BLOCK, -1)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=pairs)


@pytest.fixture
def peers_of_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlexAttention has no backward on the CPU, and torch's kernel for biases none at all."""
    monkeypatch.setattr(mask_entrants, "require_cuda", lambda case: None)
    monkeypatch.setattr(mask_entrants, "sdpa_kernel", lambda kernel: nullcontext())
    monkeypatch.setattr(mask_entrants, "flex_by_distance", mask_entrants.torch_by_distance)
    replace_flex(monkeypatch, dense_in_blocks)


def replace_flex(monkeypatch: pytest.MonkeyPatch, attend: Any) -> None:
    def prepare(case: Any, blocks: Tensor) -> Any:
        return partial(attend, block_mask=flex_block_mask(blocks))

    monkeypatch.setattr(mask_entrants, "flex_in_blocks", prepare)


@pytest.mark.usefixtures("peers_of_masks")
def test_masks_compute_what_their_peers_do(tmp_path: Path, capsys) -> None:
    path = tmp_path / "r.json"
    status, document = run("masks", BRIEF_OPTIONS, path)
    assert status == 0, capsys.readouterr().err
    check_rows(document)
    rows = document["results"]
    assert {row["part"] for row in rows} == set(mask_entrants.PARTS)
    assert all(row["status"] == "ok" for row in rows if row["what"] != mask_entrants.FLA)
    checked = [row for row in rows if row["check"]]
    assert {row["what"] for row in checked} == {
        *("block mask", "causal mask", "mask, causal call", "bias", "relative bias", "lists")
    }
    for row in checked:
        names = {"dq", "dk", "dv", *(["dbias"] if "bias" in row["what"] else [])}
        assert row["check"]["errors"].keys() == ({"out"} if row["pass"] == "forward" else names)
        assert row["error"] < 0.02
    printed = capsys.readouterr().out
    assert "targets met:" in printed and "FlexAttention" not in printed
    assert table_of(path, capsys) == len(mask_tables.short(document)["results"]) < len(rows)


@pytest.mark.usefixtures("peers_of_masks")
def test_wrong_results_and_failures_fail_the_run(tmp_path: Path, monkeypatch, capsys) -> None:
    def without_the_mask(q: Tensor, k: Tensor, v: Tensor, block_mask: Any) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v)

    options = f"--parts density {BRIEF_OPTIONS}"
    replace_flex(monkeypatch, without_the_mask)
    status, document = run("masks", options, tmp_path / "r.json")
    assert status == 1
    assert "wrong results: random 0.75 d16 S256 forward block mask" in capsys.readouterr().err
    passes = {r["density"]: r["check"]["passes"] for r in document["results"] if r["check"]}
    assert passes == {1.0: True, 0.75: False}

    def fail(*_: Tensor, **__: Any) -> Tensor:
        raise RuntimeError("no compiler\nbacktrace")

    replace_flex(monkeypatch, fail)
    status, document = run("masks", options, tmp_path / "r.json")
    captured = capsys.readouterr()
    assert status == 1 and "failed: no" in captured.out
    assert "failed: all 1 d16 S256 forward FlexAttention" in captured.err
    ours = [row for row in document["results"] if row["what"] == "block mask"]
    assert all(row["status"] == "ok" and row["speedup"] is None for row in ours)


# -- what all of them do ---------------------------------------------------------------------------


def test_an_error_leaves_what_was_measured_before_it(monkeypatch, tmp_path: Path) -> None:
    def lose_the_device(group: Any, protocol: Any) -> Any:
        raise RuntimeError("lost")

    monkeypatch.setattr(decode, "measure_group", lose_the_device)
    path = tmp_path / "r.json"
    with pytest.raises(RuntimeError, match="lost"):
        run("features decode", BRIEF_OPTIONS, path)
    assert [row["what"] for row in json.loads(path.read_text())["results"]] == ["1000 bytes"]


@pytest.mark.parametrize(
    ("name", "options", "error"),
    [
        ("grid", "--shape 1,2,3", "must be six integers B,Sq,Sk,Hq,Hk,D"),
        ("grid", "--shape 1,8,8,3,2,64", "must be six integers B,Sq,Sk,Hq,Hk,D"),
        ("grid", "--head-dims 16x8x8", "must be D or DxDv"),
        ("grid", "--turn-ms nan", "must be a positive number, got 'nan'"),
        ("grid", "--turn-ms -1", "must be a positive number, got '-1'"),
        (
            "masks",
            "--parts density,all",
            "some of density,document,bias,distance,sink,lists, got 'all'",
        ),
        ("fp8_cache", "--shape 1,2,3", "must be five integers B,S,Hq,Hk,D"),
        ("train", "--steps 20", "--steps must be from 1 to 19"),
        ("gemma", "--attentions ours+xla", "must be one or two of ours,"),
        ("host_builds", "now=/nowhere", "NAME=FOLDER with a FOLDER that has flash_attn_cuda"),
    ],
)
def test_bad_options(name: str, options: str, error: str, capsys) -> None:
    with pytest.raises(SystemExit):
        import_module(f"benchmarks.suites.{name}").main(options.split())
    assert error in capsys.readouterr().err


def test_shapes_instead_of_the_grid() -> None:
    shape = "4,1024,4096,32,8,192x128"
    options = grid.parse_arguments(["--shape", shape, "--masks", "causal", "--dtype", "fp16"])
    (case,) = grid.cases_of(options)
    assert (case.query_shape, case.key_shape[:3]) == ((4, 1024, 32, 192), (4, 4096, 8))
    assert (case.value_dim, case.causal, case.dtype) == (128, True, torch.float16)


# -- training and host time ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("suite", "attentions"),
    [(train, ("ours", "sdpa-math")), (gemma, ("ours", "sdpa", "ours+sdpa-repeated"))],
    ids=["train", "gemma"],
)
def test_attentions_train_alike(suite: Any, attentions, tmp_path: Path, capsys) -> None:
    options = "--preset tiny --seqlen 64 --batch-size 2 --steps 3 --rounds 2 --attentions"
    name = suite.__name__.rpartition(".")[2]
    status, document = run(name, f"{options} {' '.join(attentions)}", tmp_path / "r.json")
    rows = document["results"]
    assert status == 0 and [row["attention"] for row in rows] == list(attentions)
    for row in rows:
        assert len(row["tokens_per_second"]) == 2 and min(row["tokens_per_second"]) > 0
        assert len(row["train_losses"]) == 3
        assert row["train_losses"] == pytest.approx(rows[1]["train_losses"], rel=1e-4)
        assert row["validation_loss"] == pytest.approx(rows[1]["validation_loss"], rel=1e-4)
    assert "tokens/s" in capsys.readouterr().out


def test_layers_of_gemma_4() -> None:
    config = gemma.PRESETS["12-layers"].model
    assert [config.kind(layer).head_dim for layer in range(12)] == 2 * [*[256] * 5, 512]
    mask = gemma.flex_mask(16, 24, torch.device("cpu")).mask_mod
    places = torch.arange(24)
    distance = places[:, None] - places
    visible = mask(torch.tensor(0), torch.tensor(0), places[:, None], places)
    assert torch.equal(visible, (distance >= 0) & (distance < 16))
    with pytest.raises(SystemExit, match="flex trains on CUDA devices only"):
        gemma.main(["--device", "cpu", "--attentions", "flex"])


def test_host_time_in_each_mode(monkeypatch, tmp_path: Path, capsys) -> None:
    def refuse(*_: Tensor) -> Tensor:
        raise ValueError("a defect\nof two lines")

    monkeypatch.setitem(BACKENDS, "sdpa", sdpa_like("sdpa", refuse))
    options = "--batches 1 --calls 1 --backends ours ours_varlen ours_cache fa3 sdpa"
    status, document = run("host_overhead", options, tmp_path / "r.json")
    assert status == 1
    assert "failed: inference sdpa; recording sdpa" in capsys.readouterr().err
    found = {(x["mode"], x["backend"]): x for x in document["results"]}
    assert len(found) == 3 * 5
    for (mode, backend), x in found.items():
        if x["status"] == "ok":
            assert x["batches"] == 2 and 0 < x["low_us"] <= x["median_us"] <= x["high_us"]
        elif backend == "sdpa":
            assert (x["status"], x["reason"]) == ("failed", "a defect")
        else:
            assert backend == "fa3" or (backend == "ours_cache" and mode != "inference")
            assert x["status"] == "unsupported"


def test_host_time_of_builds_in_turns(monkeypatch, tmp_path: Path, capsys) -> None:
    """A turn is a process of the build's folder; the last one here is real."""
    from benchmarks.suites import host_builds

    one_turn = ["--device", "cpu", "--batches", "2", "--calls", "1", "--backends", "ours"]
    document = host_builds.run("here", host_builds.ROOT, one_turn)
    assert [entry["mode"] for entry in document["results"]] == list(host_overhead.Mode)
    assert document["environment"]["commit"] == "here"

    ran = []

    def fake(command: list[str], *, env: dict[str, str], **_: Any) -> None:
        name, folder = env[host_builds.COMMIT_VARIABLE], env["PYTHONPATH"].split(":")[0]
        ran.append((name, folder))
        time = {"before": 5.0, "now": 3.0}[name] + len(ran)
        entries = [
            {"mode": "inference", "backend": "ours", "status": "ok", "median_us": time},
            {"mode": "recording", "backend": "ours_cache", "status": "unsupported"},
        ]
        facts = {"case": "small", "environment": {"commit": name}, "results": entries}
        Path(command[-1]).write_text(json.dumps(facts))

    monkeypatch.setattr(host_builds.subprocess, "run", fake)
    folders = {"before": tmp_path / "a", "now": tmp_path / "b"}
    for folder in folders.values():
        (folder / "flash_attn_cuda").mkdir(parents=True)
    path = tmp_path / "builds.json"
    builds = [f"{name}={folder}" for name, folder in folders.items()]
    assert host_builds.main([*builds, "--rounds", "2", "--json", str(path)]) == 0
    order = ("before", "now", "now", "before")
    assert ran == [(name, str(folders[name])) for name in order]
    document = json.loads(path.read_text())
    assert document["environments"] == {"before": {"commit": "before"}, "now": {"commit": "now"}}
    before, now = document["results"]
    assert before["turns_us"] == [6.0, 9.0] and before["least_us"] == 6.0
    assert now["turns_us"] == [5.0, 6.0] and now["median_us"] == 5.5
    assert "now        least 5.0 us" in capsys.readouterr().out
