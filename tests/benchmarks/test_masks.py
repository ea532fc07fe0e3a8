"""What masks.py builds, judges and prints, on the CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from benchmarks.core import feature_tables, report
from benchmarks.core.metrics import Pass, Timing, operations
from benchmarks.core.runner import Measurement, Status
from benchmarks.suites import mask_tables
from benchmarks.suites import masks as mask_speed
from benchmarks.suites.mask_blocks import BLOCK, flex_block_mask, random_blocks, window_blocks
from benchmarks.suites.mask_entrants import PARTS, RANDOM, MaskGroup, one_sequence
from flash_attn_cuda import BlockSparsity
from tests.benchmarks.cases import BRIEF, BRIEF_OPTIONS
from tests.benchmarks.tiny_masks import dense_in_blocks, make_tiny, replace_flex

MAKERS = pytest.mark.parametrize("make", [random_blocks, window_blocks])


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    """Calls of microseconds on several threads mostly wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def tiny(monkeypatch):
    make_tiny(monkeypatch)


@pytest.fixture
def flex(monkeypatch):
    replace_flex(monkeypatch, dense_in_blocks)


# Masks in blocks


@MAKERS
@pytest.mark.parametrize("density", [1.0, 0.5, 0.25, 0.1, 0.05])
def test_masks_have_the_density_asked_for(make, density):
    blocks = make(128, 4, density)
    assert (blocks.shape, blocks.dtype) == ((1, 4, 128, 128), torch.bool)
    assert blocks.sum((0, 2, 3)).tolist() == [round(density * 128 * 128)] * 4
    assert blocks.any(-1).all() and blocks.any(-2).all()
    sparsity = BlockSparsity.from_blocks(blocks, BLOCK, 128 * BLOCK, 128 * BLOCK)
    assert sparsity.density().item() == pytest.approx(density, abs=1e-4)
    assert torch.equal(blocks, make(128, 4, density))


def test_random_masks_differ_by_head_and_have_the_diagonal():
    blocks = random_blocks(32, 3, 0.2)[0]
    assert blocks.diagonal(dim1=1, dim2=2).all()
    assert not torch.equal(blocks[0], blocks[1]) and not torch.equal(blocks[1], blocks[2])
    assert not torch.equal(blocks, random_blocks(32, 3, 0.2, seed=1)[0])


@pytest.mark.parametrize("density", [0.2, 0.3, 0.9])
def test_windows_are_the_blocks_nearest_to_the_diagonal(density):
    blocks = window_blocks(32, 2, density)[0]
    assert torch.equal(blocks[0], blocks[1])
    window = blocks[0].clone()
    assert window[0].all() and window[:, 0].all()
    inner = torch.arange(1, 32)
    distance = (inner[:, None] - inner).abs()
    reach = distance[window[1:, 1:]].max()
    assert window[1:, 1:][distance < reach].all()


@MAKERS
def test_a_density_that_a_mask_cannot_have_is_refused(make):
    for density in (0.01, 1.01):
        with pytest.raises(ValueError, match=r"^density: must be from 0\.\d+ to 1 .*, got [01]"):
            make(16, 2, density)


@MAKERS
@pytest.mark.parametrize("density", [1.0, 0.5, 0.25])
def test_the_block_mask_of_torch_is_the_same_mask(make, density):
    blocks = make(8, 2, density)
    block_mask = flex_block_mask(blocks)
    ours = BlockSparsity.from_blocks(blocks, BLOCK, 8 * BLOCK, 8 * BLOCK)
    torchs = BlockSparsity.from_block_mask(block_mask)
    assert torch.equal(torchs.rows, ours.rows) and torch.equal(torchs.columns, ours.columns)
    assert torch.equal(block_mask.to_dense().bool(), blocks)  # by rows
    assert torch.equal(torchs.pieces()[..., ::2, ::2] == 1, blocks)
    assert not block_mask.kv_num_blocks.any() and not block_mask.q_num_blocks.any()
    assert block_mask.full_q_num_blocks.tolist() == blocks.sum(-2).tolist()
    assert torchs.bits is None


def test_shapes_of_torchs_block_masks_do_not_depend_on_the_density():
    """Nor do strides: a kernel is compiled once."""

    def shapes(block_mask):
        return [
            (x.shape, x.stride(), x.dtype) if isinstance(x, torch.Tensor) else x
            for x in block_mask.as_tuple()
        ]

    first, *others = (
        shapes(flex_block_mask(make(16, 3, density)))
        for make in (random_blocks, window_blocks)
        for density in (1.0, 0.5, 0.25)
    )
    assert all(other == first for other in others)


# Rows and tables


def fake_measure(milliseconds: dict[str, float]):
    """runner.measure with these times; subjects without one are unsupported."""

    def measure(subjects, **_options):
        return [
            Measurement(Status.ok, timing=Timing.of([milliseconds[s.name]] * 5))
            if s.name in milliseconds
            else Measurement(Status.unsupported, "no such thing")
            for s in subjects
        ]

    return measure


def rows_of(group: MaskGroup, which: Pass, times: dict[str, float], monkeypatch):
    monkeypatch.setattr(mask_speed, "measure_in_turns", fake_measure(times))
    return mask_speed.measure_pass(group, which, PARTS[group.part][1](group), BRIEF)


def test_density_ratios_are_of_times(tiny, monkeypatch):
    group = MaskGroup("density", one_sequence(16 * BLOCK, 16, "cpu"), RANDOM, 0.25)
    times = {"block mask": 3.0, "dense": 10.0, "FlexAttention": 3.3}
    rows = rows_of(group, Pass.backward, times, monkeypatch)
    row = rows["block mask"]
    assert row["time_ratio"] == pytest.approx(0.3)
    assert row["speedup"] == pytest.approx(1.1)
    assert [(t["figure"], t["limit"], t["met"]) for t in row["targets"]] == [
        ("time_ratio", 0.29, False),
        ("speedup", 1.15, False),
    ]
    work = operations(group.case, Pass.backward) / 1e9
    assert row["tflops"] == pytest.approx(work * 0.25 / 3.0)
    assert rows["dense"]["tflops"] == pytest.approx(work / 10.0)
    assert rows["dense"]["time_ratio"] is None and not rows["dense"]["targets"]
    times["block mask"] = 2.8
    met = [
        t["met"] for t in rows_of(group, Pass.forward, times, monkeypatch)[row["what"]]["targets"]
    ]
    assert met == [True, True]


@pytest.mark.parametrize(
    ("density", "limits"), [(0.5, [1.15]), (0.1, [1.15]), (0.05, [0.075, 1.15])]
)
def test_targets_of_densities(density, limits, tiny, monkeypatch):
    group = MaskGroup("density", one_sequence(32 * BLOCK, 16, "cpu"), RANDOM, density)
    row = rows_of(group, Pass.forward, {}, monkeypatch)["block mask"]
    assert [target["limit"] for target in row["targets"]] == limits
    assert all(target["met"] is None for target in row["targets"])


def test_targets_of_the_other_parts(tiny, monkeypatch):
    times = {"causal mask": 1.1, "packed": 1.0, "bias": 1.0, "torch efficient": 1.25}
    times |= {"sink": 1.03, "sink with gradient": 1.01, "plain": 1.0}
    judged = {}
    for part in ("document", "bias", "sink"):
        group = PARTS[part][0]("cpu", True, None)[0]
        for row in rows_of(group, Pass.backward, times, monkeypatch).values():
            for target in row["targets"]:
                judged[row["what"]] = (target["figure"], target["limit"], target["met"])
    assert judged == {
        "causal mask": ("time_ratio", 1.1, True),
        "bias": ("speedup", 1.3, False),
        "sink": ("time_ratio", 1.02, False),
        "sink with gradient": ("time_ratio", 1.02, True),
    }


def written_row(what: str, **changes) -> dict:
    row = {
        "name": f"random 0.25 d128 S16384 forward {what}",
        "group": "random 0.25 d128 S16384",
        "part": "density",
        "head_dim": 128,
        "seqlen": 16_384,
        "mask": "random",
        "density": 0.25,
        "pass": "forward",
        "what": what,
        "status": "ok",
        "reason": None,
        "median_ms": 4.0,
        "tflops": 550.0,
        "reference": None,
        "reference_ms": None,
        "time_ratio": None,
        "peer": None,
        "peer_ms": None,
        "speedup": None,
        "error": None,
        "targets": [],
    }
    return row | changes


def test_the_table_has_what_is_compared_and_what_could_not_run():
    ours = {"reference": "dense", "reference_ms": 4.0, "peer": "FlexAttention", "error": 0.0041}
    targets = [{"figure": "time_ratio", "limit": 0.29, "at_least": False, "met": True}]
    document = {
        "benchmark": "masks",
        "command": "c",
        "environment": {"device": "d", "torch": "t", "commit": None},
        "results": [
            written_row("block mask", median_ms=1.1, time_ratio=0.275, targets=targets, **ours),
            written_row("dense"),
            written_row("FlexAttention", status="failed", reason="none", median_ms=None),
        ],
    }
    shown = feature_tables.markdown(mask_tables.short(document), mask_tables.COLUMNS)
    lines = [line for line in shown.splitlines() if line.startswith("| random ")]
    problem = "random 0.25 d128 S16384"
    assert [[cell.strip() for cell in line.strip("|").split("|")] for line in lines] == [
        [
            *(problem, "forward", "block mask", "1.100", "550", "4.000", "0.275 (<= 0.290)"),
            *("", "", "4.1e-03"),
        ],
        [problem, "forward", "FlexAttention", "", "550", *[""] * 4, "failed: none"],
    ]
    assert "targets met: 1 of 1" in shown
    assert len(document["results"]) == 3


# Command line


def run(tmp_path: Path, *arguments: str) -> tuple[int, dict]:
    path = tmp_path / "r.json"
    options = ["--device", "cpu", *BRIEF_OPTIONS, "--out", str(path), *arguments]
    code = mask_speed.main(options)
    return code, json.loads(path.read_text())


def test_all_parts_run_save_and_print(tiny, flex, tmp_path, capsys):
    code, document = run(tmp_path)
    assert code == 0, capsys.readouterr().err
    printed = capsys.readouterr().out
    assert (document["schema"], document["benchmark"]) == (1, "masks")
    assert document["command"].startswith("python -m benchmarks.suites.masks --device cpu")
    assert {"device", "torch", "commit", "cuda", "driver"} <= document["environment"].keys()
    assert (document["protocol"]["version"], document["protocol"]["turn_ms"]) == (4, 0.2)
    rows = document["results"]
    assert {row["part"] for row in rows} == set(PARTS)
    assert len({frozenset(row) for row in rows}) == 1
    assert len({row["name"] for row in rows}) == len(rows)
    for row in rows:
        if row["what"] == "torch efficient":  # on CUDA devices only
            assert row["status"] == "unsupported" and row["reason"]
        else:
            assert row["status"] == "ok" and 0 < row["low_ms"] <= row["median_ms"]
    checked = [row for row in rows if row["check"]]
    assert {row["what"] for row in checked} == {"block mask", "causal mask", "mask, causal call"}
    assert all(row["check"]["passes"] and row["error"] < 0.02 for row in checked)
    assert "targets met:" in printed and "FlexAttention" not in printed

    shown = mask_tables.short(document)["results"]
    assert report.main([str(tmp_path / "r.json"), "--markdown"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert len(lines) == 2 + len(shown) < len(rows)
    assert report.main([str(tmp_path / "r.json")]) == 0
    assert "targets met:" in capsys.readouterr().out


def test_without_a_gpu_flex_is_a_row_that_says_so(tiny, tmp_path, capsys):
    code, document = run(tmp_path, "--parts", "density")
    assert code == 0
    flex_rows = [row for row in document["results"] if row["what"] == "FlexAttention"]
    assert {(row["status"], row["reason"]) for row in flex_rows} == {
        ("unsupported", "runs on CUDA devices only")
    }
    assert capsys.readouterr().out.count("FlexAttention") == len(flex_rows)
    assert not any(row["check"] for row in document["results"])


def test_a_compiler_that_fails_fails_the_run(tiny, monkeypatch, tmp_path, capsys):
    def fail(*_inputs, **_options):
        raise RuntimeError("no compiler\nbacktrace")

    replace_flex(monkeypatch, fail)
    code, document = run(tmp_path, "--parts", "density")
    captured = capsys.readouterr()
    assert code == 1 and "failed: no" in captured.out
    assert "failed: all 1 d32 S512 forward FlexAttention" in captured.err
    ours = [row for row in document["results"] if row["what"] == "block mask"]
    assert all(row["status"] == "ok" and row["speedup"] is None for row in ours)


def test_wrong_results_fail_the_run(tiny, monkeypatch, tmp_path, capsys):
    def without_the_mask(q, k, v, block_mask):
        return F.scaled_dot_product_attention(q, k, v)

    replace_flex(monkeypatch, without_the_mask)
    code, document = run(tmp_path, "--parts", "density")
    assert code == 1
    assert "wrong results: random 0.5 d32 S512 forward block mask" in capsys.readouterr().err
    passes = {r["density"]: r["check"]["passes"] for r in document["results"] if r["check"]}
    assert passes == {1.0: True, 0.5: False}


def test_an_error_leaves_what_was_measured_before_it(tiny, monkeypatch, tmp_path):
    measure_group = mask_speed.measure_group

    def lose_the_device(group, protocol):
        if group.part == "sink":
            raise RuntimeError("lost")
        return measure_group(group, protocol)

    monkeypatch.setattr(mask_speed, "measure_group", lose_the_device)
    with pytest.raises(RuntimeError, match="lost"):
        run(tmp_path, "--parts", "document,sink")
    rows = json.loads((tmp_path / "r.json").read_text())["results"]
    assert {row["part"] for row in rows} == {"document"}
