"""The benchmark's arithmetic, backends, outputs and command lines, on the CPU."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace

import pytest
import torch
from torch.nn.attention.bias import CausalBias

from benchmarks.core import grid_tables
from benchmarks.core.metrics import (
    Pass,
    Timing,
    geometric_mean,
    least_traffic,
    operations,
    quantile,
)
from benchmarks.core.refcheck import ReferenceCheck
from benchmarks.core.runner import make_input_sets
from benchmarks.peers import backends
from benchmarks.peers.backends import BACKENDS, Backend, Unsupported
from benchmarks.suites import grid as bench
from benchmarks.suites import host_builds, host_overhead
from tests.benchmarks.cases import SMALL, TINY_GRID, sdpa_like
from tests.cases.attention import AttentionCase, VarlenCase, benchmark_cases
from tests.cases.cpu_harness import one_thread  # noqa: F401
from tests.reference import attention

pytestmark = pytest.mark.usefixtures("one_thread")


# Arithmetic


def test_quantiles_interpolate():
    assert quantile([4.0, 1.0, 3.0, 2.0], 0.5) == 2.5
    assert quantile([4.0, 1.0, 3.0, 2.0], 0.0) == 1.0
    assert quantile([4.0, 1.0, 3.0, 2.0], 1.0) == 4.0
    assert quantile([7.0], 0.25) == 7.0
    assert quantile([0.0, 10.0], 0.25) == 2.5


def test_ratios_are_of_what_ran_in_the_same_round():
    slow_and_fast_clocks = Timing.of([2.2, 2.2, 1.1, 1.1])
    other = Timing.of([2.0, 2.0, 1.0, 1.0])
    assert slow_and_fast_clocks.over(other) == pytest.approx(1.1)
    one_change_apart = Timing.of([2.2, 1.1, 1.1, 1.1])  # the quotient of the medians is 0.73
    assert one_change_apart.over(other) == pytest.approx(1.1)
    assert one_change_apart.divided_by(2).over(other) == pytest.approx(0.55)
    with pytest.raises(ValueError, match="zip"):
        Timing.of([1.0]).over(other)


def test_timing_is_the_median_not_the_mean():
    timing = Timing.of([1.0, 1.0, 1.0, 1.0, 1000.0])
    assert (timing.median_ms, timing.low_ms, timing.high_ms, timing.samples) == (1.0, 1.0, 1.0, 5)


def test_geometric_mean():
    assert geometric_mean([2.0, 8.0]) == pytest.approx(4.0)
    assert geometric_mean([0.5, 2.0]) == pytest.approx(1.0)


@pytest.mark.parametrize("function", [geometric_mean, lambda values: quantile(values, 0.5)])
def test_statistics_of_nothing_are_refused(function):
    with pytest.raises(ValueError, match="values must hold at least one number"):
        function([])


def test_operations_follow_the_papers_convention():
    full, causal = (
        AttentionCase(1, 8192, 8192, 16, 16, 128, causal=causal) for causal in (False, True)
    )
    assert operations(full, Pass.forward) == 4 * 8192 * 8192 * 128 * 16
    assert operations(full, Pass.backward) == 2.5 * operations(full, Pass.forward)
    assert operations(causal, Pass.forward) == pytest.approx(
        operations(full, Pass.forward) / 2, rel=1e-3
    )


def test_operations_with_values_of_another_head_dim():
    case = AttentionCase(1, 64, 64, 3, 3, 192, head_dim_v=128)
    assert operations(case, Pass.forward) == 2 * 64 * 64 * 3 * (192 + 128)
    assert operations(case, Pass.backward) == 2 * 64 * 64 * 3 * (3 * 192 + 2 * 128)
    packed = VarlenCase(lengths_q=(64,), num_heads_q=3, num_heads_k=3, head_dim=192, head_dim_v=128)
    for which in Pass:
        assert operations(packed, which) == operations(case, which)
    assert least_traffic(case, Pass.forward) == 2 * 64 * 3 * (192 + 128) * 2 + 64 * 3 * 4


def test_operations_of_packed_sequences_are_the_sum_of_theirs():
    case = VarlenCase(
        lengths_q=(1, 7, 0), lengths_k=(3, 7, 2), num_heads_q=2, num_heads_k=1, head_dim=8
    )
    pairs = 1 * 3 + 7 * 7
    assert operations(case, Pass.forward) == 4 * pairs * 2 * 8
    assert operations(case, Pass.backward) == 10 * pairs * 2 * 8
    pairs = 3 + 7 * 8 // 2
    assert operations(replace(case, causal=True), Pass.forward) == 4 * pairs * 2 * 8


def test_operations_count_only_rows_that_take_part():
    case = VarlenCase(
        lengths_q=(9,), used_q=(4,), used_k=(6,), leftpad=(2,), num_heads_q=1, num_heads_k=1
    )
    assert operations(case, Pass.forward) == 4 * (4 * 4) * case.head_dim


def test_operations_fall_with_the_window():
    full = AttentionCase(1, 4096, 4096, 1, 1, 64, causal=True)
    window = replace(full, window=(1024, 0))
    pairs = sum(min(row + 1, 1025) for row in range(4096))
    assert operations(window, Pass.forward) == 4 * pairs * 64
    assert operations(replace(full, causal=False, window=(1024, 0)), Pass.forward) == operations(
        window, Pass.forward
    )
    packed = VarlenCase(
        lengths_q=(4096,), num_heads_q=1, num_heads_k=1, causal=True, window=(1024, 0)
    )
    assert operations(packed, Pass.backward) == operations(window, Pass.backward)


def test_rates_have_the_right_units():
    case = AttentionCase(1, 1024, 1024, 8, 8, 64)
    timing = Timing(median_ms=1.0, low_ms=1.0, high_ms=1.0, samples=1)
    assert timing.teraflops(case, Pass.forward) == operations(case, Pass.forward) / 1e-3 / 1e12
    assert timing.gigabytes_per_second(case, Pass.backward) == pytest.approx(
        least_traffic(case, Pass.backward) / 1e-3 / 1e9
    )
    assert least_traffic(case, Pass.forward) == 4 * 1024 * 8 * 64 * 2 + 1024 * 8 * 4


# Backends


@pytest.mark.parametrize("name", ["ours", "sdpa_flash", "sdpa_math", "sdpa"])
@pytest.mark.parametrize("lengths", [(16, 16), (8, 24)])
@pytest.mark.parametrize("causal", [False, True])
def test_backends_compute_the_same_attention(name, lengths, causal):
    heads_k = 2 if name == "ours" else 4  # torch's CPU kernels differ in what they do with groups
    case = AttentionCase(
        2, *lengths, 4, heads_k, 16, dtype=torch.float32, causal=causal, device="cpu"
    )
    inputs = make_input_sets(case)[0]
    checker = ReferenceCheck(case, inputs)
    for which, names in ((Pass.forward, {"out"}), (Pass.backward, {"dq", "dk", "dv"})):
        verdict = checker.check(BACKENDS[name], which)
        assert verdict.keys() == {"passes", *names}
        assert verdict["passes"], verdict


@pytest.mark.parametrize("name", ["sdpa_math", "sdpa_cudnn"])
def test_masks_are_made_before_the_clock_starts(name, monkeypatch):
    """Where a kernel has no such mask torch makes a tensor of its own object, in each call."""
    monkeypatch.setattr(backends, "require_cuda", lambda case: None)
    monkeypatch.setattr(CausalBias, "_materialize", lambda *_: pytest.fail("made in a call"))
    case = replace(SMALL, seqlen_q=8, seqlen_k=24, num_heads_k=4, causal=True)
    inputs = make_input_sets(case)[0]
    q, k, v = (BACKENDS[name].view(x) for x in (inputs.q, inputs.k, inputs.v))
    attend = BACKENDS[name].prepare(case)
    with BACKENDS["sdpa_math"].scope():  # the mask is the same
        out = BACKENDS[name].view(attend(q, k, v))
    expected, _ = attention(inputs.q, inputs.k, inputs.v, causal=True)
    torch.testing.assert_close(out, expected.float())


def test_refcheck_finds_a_wrong_result():
    checker = ReferenceCheck(SMALL, make_input_sets(SMALL)[0])
    sdpa = BACKENDS["sdpa_math"].prepare(SMALL)
    wrong = sdpa_like("wrong", lambda q, k, v: sdpa(q * 1.01, k, v))
    assert not checker.check(wrong, Pass.forward)["passes"]
    assert not checker.check(wrong, Pass.backward)["passes"]


def test_cuda_backends_say_so_on_the_cpu():
    for name in ("sdpa_cudnn", "sdpa_efficient", "flex", "fa3", "ffpa"):
        with pytest.raises(Unsupported, match="CUDA devices only"):
            BACKENDS[name].prepare(SMALL)


# Command lines


def test_a_wrong_result_fails_the_run(monkeypatch, capsys):
    sdpa = BACKENDS["sdpa_math"]
    wrong = Backend(
        "ours", "wrong", lambda case: lambda q, k, v: 2 * sdpa.prepare(case)(q, k, v), sdpa.order
    )
    monkeypatch.setitem(BACKENDS, "ours", wrong)
    arguments = [*TINY_GRID, "--backends", "ours", "--passes", "forward", "--masks", "full"]
    assert bench.main([*arguments, "--refcheck"]) == 1
    assert "2 results differ from the reference" in capsys.readouterr().err
    assert bench.main(arguments) == 0


def test_shapes_replace_the_grid():
    options = bench.parse_arguments(
        ["--shape", "4,1024,4096,32,8,128", "--masks", "causal", "--dtype", "fp16"]
    )
    (case,) = bench.cases_of(options)
    assert (case.batch, *case.query_shape[1:], *case.key_shape[1:3]) == (
        *(4, 1024, 32, 128),
        *(4096, 8),
    )
    assert case.causal and case.dtype == torch.float16


def test_values_of_another_head_dim(tmp_path):
    options = bench.parse_arguments(["--shape", "4,1024,4096,32,8,192x128"])
    assert {(case.head_dim, case.value_dim) for case in bench.cases_of(options)} == {(192, 128)}
    path = tmp_path / "results.json"
    grid = [*TINY_GRID]
    grid[grid.index("--head-dims") + 1] = "16x8"
    assert bench.main([*grid, "--refcheck", "--backends", "ours", "--json", str(path)]) == 0
    document = json.loads(path.read_text())
    assert {(row["head_dim"], row["head_dim_v"]) for row in document["results"]} == {(16, 8)}
    assert "| 16x8 |" in grid_tables.markdown(document)
    with pytest.raises(SystemExit):
        bench.parse_arguments(["--head-dims", "16x8x8"])


@pytest.mark.parametrize("shape", ["1,2,3", "1,2,3,4,5,x", "1,8,8,3,2,64", "1,8,8,2,2,8x8x8"])
def test_a_bad_shape_is_refused(shape, capsys):
    with pytest.raises(SystemExit):
        bench.parse_arguments(["--shape", shape])
    assert "must be six integers B,Sq,Sk,Hq,Hk,D" in capsys.readouterr().err


def test_the_default_grid_is_the_papers():
    options = bench.parse_arguments(["--device", "cuda"])
    assert list(bench.cases_of(options)) == list(benchmark_cases())
    assert options.backends == ["ours", "sdpa_flash"] and options.baseline == "sdpa_flash"


def test_host_overhead_reports_each_mode(tmp_path, capsys):
    path = tmp_path / "host.json"
    arguments = ["--device", "cpu", "--batches", "2", "--calls", "1", "--json", str(path)]
    assert host_overhead.main([*arguments, "--backends", "ours", "sdpa_math", "fa3"]) == 0
    results = json.loads(path.read_text())["results"]
    assert len(results) == 3 * 3
    for entry in results:
        if entry["backend"] == "fa3":
            assert entry["status"] == "unsupported" and "CUDA devices only" in entry["reason"]
        else:
            assert entry["batches"] == 2  # a whole cycle
            assert 0 < entry["low_us"] <= entry["median_us"] <= entry["high_us"]
    assert "b1-q128k128-h8/8-d128-bf16-full" in capsys.readouterr().out


def test_host_overhead_of_other_functions(tmp_path):
    path = tmp_path / "host.json"
    arguments = ["--device", "cpu", "--batches", "2", "--calls", "1", "--json", str(path)]
    assert host_overhead.main([*arguments, "--backends", "ours_varlen", "ours_cache"]) == 0
    status = {
        (x["backend"], x["mode"]): x["status"] for x in json.loads(path.read_text())["results"]
    }
    for mode in host_overhead.Mode:
        assert status["ours_varlen", mode.value] == "ok"
        runs = mode is host_overhead.Mode.inference
        assert status["ours_cache", mode.value] == ("ok" if runs else "unsupported")


def test_host_time_of_two_builds_in_turns(monkeypatch, tmp_path, capsys):
    ran = []

    def run(name, folder, options):
        ran.append((name, folder))
        time = {"before": 5.0, "now": 3.0}[name] + len(ran)
        entries = [
            {"mode": "inference", "backend": "ours", "status": "ok", "median_us": time},
            {"mode": "recording", "backend": "ours_cache", "status": "unsupported"},
        ]
        return {"case": "small", "environment": {"commit": name}, "results": entries}

    monkeypatch.setattr(host_builds, "run", run)
    for name in ("a", "b"):
        (tmp_path / name / "flash_attn_cuda").mkdir(parents=True)
    path = tmp_path / "builds.json"
    builds = [f"before={tmp_path / 'a'}", f"now={tmp_path / 'b'}"]
    assert host_builds.main([*builds, "--rounds", "2", "--json", str(path)]) == 0
    assert [name for name, _ in ran] == ["before", "now", "now", "before"]
    assert dict(ran) == {"before": tmp_path / "a", "now": tmp_path / "b"}
    document = json.loads(path.read_text())
    assert document["environments"] == {"before": {"commit": "before"}, "now": {"commit": "now"}}
    before, now = document["results"]
    assert before["turns_us"] == [6.0, 9.0] and before["least_us"] == 6.0
    assert now["turns_us"] == [5.0, 6.0] and now["median_us"] == 5.5
    assert "now        least 5.0 us" in capsys.readouterr().out


ONE_TURN = ["--device", "cpu", "--batches", "2", "--calls", "1", "--backends", "ours"]


def test_a_build_is_measured_by_a_process_of_its_own():
    document = host_builds.run("here", host_builds.ROOT, ONE_TURN)
    assert [entry["mode"] for entry in document["results"]] == list(host_overhead.Mode)
    assert document["environment"]["commit"] == "here"


def test_a_build_is_that_of_its_folder(tmp_path):
    package = tmp_path / "flash_attn_cuda"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit(77)")
    with pytest.raises(subprocess.CalledProcessError) as raised:
        host_builds.run("stub", tmp_path, ONE_TURN)
    assert raised.value.returncode == 77


@pytest.mark.parametrize("given", ["now", "=.", "now=/nowhere"])
def test_a_build_needs_a_name_and_a_package(given, capsys):
    with pytest.raises(SystemExit):
        host_builds.main([given])
    assert "NAME=FOLDER" in capsys.readouterr().err


def test_host_overhead_goes_on_and_fails_where_a_backend_fails(monkeypatch, tmp_path, capsys):
    def refuse(q, k, v):
        raise ValueError("a defect\nof two lines")

    monkeypatch.setitem(BACKENDS, "ours", sdpa_like("ours", refuse))
    path = tmp_path / "host.json"
    arguments = ["--device", "cpu", "--batches", "3", "--calls", "1", "--modes", "inference"]
    arguments += ["--json", str(path), "--backends", "ours", "sdpa_math", "sdpa"]
    assert host_overhead.main(arguments) == 1
    broken, *fine = json.loads(path.read_text())["results"]
    assert (broken["status"], broken["reason"]) == ("failed", "a defect")
    assert [entry["batches"] for entry in fine] == [4, 4]  # whole cycles of two
    assert "failed: inference ours" in capsys.readouterr().err
