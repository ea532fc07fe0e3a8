"""What features.py counts, compares, judges and prints, on the CPU."""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import pytest
import torch

from benchmarks.core import feature_tables, report
from benchmarks.core.feature_tables import Target, number
from benchmarks.core.lengths import log_normal_lengths
from benchmarks.core.metrics import Pass, Timing, operations
from benchmarks.core.runner import Measurement, Status
from benchmarks.peers.backends import BACKENDS, Unsupported, features_of
from benchmarks.suites import decode as decode_speed
from benchmarks.suites import feature_cost, features
from benchmarks.suites import prefill as prefill_speed
from benchmarks.suites import varlen as varlen_speed
from benchmarks.suites.varlen import DENSE, EQUAL, FA3, PACKED, TORCH, VarlenGroup
from tests.benchmarks.cases import BRIEF, BRIEF_OPTIONS
from tests.cases.attention import AttentionCase

TINY_VARLEN = VarlenGroup(mean=16, head_dim=16, tokens=64, hidden=32, device="cpu")
TINY_DECODE = decode_speed.DecodeGroup(
    "tiny", (5, 300), num_heads_q=4, num_heads_k=2, head_dim=16, device="cpu"
)


TINY_PREFILL = prefill_speed.PrefillGroup(
    batch=2, seqlen_q=5, seqlen_k=256, num_heads_q=4, num_heads_k=2, head_dim=16, device="cpu"
)


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    """Calls of microseconds on several threads mostly wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def tiny_feature_group(causal: bool) -> feature_cost.FeatureGroup:
    plain = AttentionCase(1, 32, 32, 2, 2, 16, causal=causal, device="cpu")
    return feature_cost.FeatureGroup(plain, feature_cost.variants(causal))


# Lengths


@pytest.mark.parametrize(("count", "mean"), [(128, 256), (32, 1024), (8, 4096), (1, 7)])
def test_log_normal_lengths_keep_the_mean(count, mean):
    lengths = log_normal_lengths(count, mean)
    assert (len(lengths), sum(lengths)) == (count, count * mean)
    assert min(lengths) >= 1
    assert lengths == log_normal_lengths(count, mean)


def test_log_normal_lengths_are_uneven_and_not_sorted():
    lengths = log_normal_lengths(128, 256)
    assert max(lengths) > 5 * 256 and min(lengths) < 256 / 5
    assert list(lengths) != sorted(lengths)
    assert sorted(lengths)[63] == pytest.approx(256 * 2.718**-0.5, rel=0.1)  # the median


def test_too_short_a_mean_is_refused():
    with pytest.raises(ValueError, match="mean: must leave at least one token to each of 64"):
        log_normal_lengths(64, 1)


# Case lists: what is to be measured


def test_equal_lengths_count_as_a_dense_batch():
    for which in Pass:
        assert operations(TINY_VARLEN.equal, which) == operations(TINY_VARLEN.dense, which)
        assert operations(TINY_VARLEN.packed, which) > operations(TINY_VARLEN.dense, which)


def test_varlen_groups():
    groups = varlen_speed.groups()
    assert {(group.head_dim, group.mean) for group in groups} == {
        (128, 8192),
        *((head_dim, mean) for head_dim in (64, 128, 256) for mean in (256, 1024, 4096)),
    }
    for group in groups:
        tokens = 65_536 if group.mean == 8192 else 32_768
        assert group.packed.total_q == group.dense.batch * group.dense.seqlen_q == tokens
        assert group.heads * group.head_dim == 2048
        assert group.packed.causal and group.dense.causal
    assert len(varlen_speed.groups(quick=True)) == 1


def test_feature_groups():
    groups = feature_cost.groups()
    every = {v.name for v in feature_cost.variants(True)}
    order = {"plain", "deterministic"}
    for seqlen, head_dims, names in (
        (4096, (64, 128), every),
        (4096, (256,), order),
        (8192, (64, 128, 256), order),
    ):
        of_length = [
            group
            for group in groups
            if group.plain.seqlen_q == seqlen and group.plain.head_dim in head_dims
        ]
        assert {(g.plain.head_dim, g.plain.causal) for g in of_length} == {
            (head_dim, causal) for head_dim in head_dims for causal in (False, True)
        }
        for group in of_length:
            assert {v.name.replace("1024,1024", "1024,0") for v in group.variants} == names
            assert group.plain.batch * seqlen == 16_384
            assert group.plain.num_heads_q * group.plain.head_dim == 2048
    assert len(groups) == 4 + 2 + 6
    assert len(feature_cost.groups(quick=True)) == 1


@pytest.mark.parametrize("causal", [False, True])
def test_each_variant_has_one_feature_and_its_references_exist(causal):
    group = tiny_feature_group(causal)
    names = [variant.name for variant in group.variants]
    assert len(set(names)) == len(names)
    for variant in group.variants:
        wanted = 0 if variant.name == variant.plain else 1
        assert len(features_of(replace(group.plain, **variant.changes))) == wanted
        assert variant.plain in names and (variant.peer is None or variant.peer in names)


def test_decode_groups():
    groups = {group.name: group for group in decode_speed.groups()}
    assert {name: group.target and group.target.limit for name, group in groups.items()} == {
        "B1 S1k": None,
        "B1 S8k": 20.0,
        "B1 S64k": 3.0,
        "B8 S8k": None,
        "B32 S4k": 3.6,
        "B32 S4k uneven": None,
        "B128 S8k": 3.9,
        "B8 S8k d512": None,
        "B1 S32k d512": None,
    }
    for group in groups.values():
        heads = (32, 4, 512) if "d512" in group.name else (32, 8, 128)
        assert (group.num_heads_q, group.num_heads_k, group.head_dim) == heads
        assert group.capacity >= max(group.lengths)
        assert all(group.capacity % size == 0 for size in decode_speed.PAGE_SIZES)
    assert groups["B128 S8k"].kv_bytes == 2 * 128 * 8192 * 8 * 128 * 2
    assert len(set(groups["B32 S4k uneven"].lengths)) > 16


def test_graphs_cycle_through_more_than_the_cache(monkeypatch):
    class Properties:
        L2_cache_size = 60 << 20

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    for group in decode_speed.groups():
        assert group.copies * group.kv_bytes >= 3 * Properties.L2_cache_size
        assert group.calls % group.copies == 0
        assert group.calls * group.kv_bytes / 4e9 < 10  # milliseconds


def test_pages_stand_once_in_the_tables_in_random_order():
    caches = decode_speed.Caches(TINY_DECODE)
    k, v, tables = caches.pages(16)
    assert k.shape == v.shape == (2 * 512 // 16, 16, 2, 16)
    assert tables.shape == (1, 2, 512 // 16) and tables.dtype == torch.int32
    assert sorted(tables.flatten().tolist()) == list(range(len(k)))
    assert k.data_ptr() == caches.k.data_ptr()


# Backends


def test_plain_calls_of_ours_pass_no_feature(monkeypatch):
    import flash_attn_cuda

    seen = []
    monkeypatch.setattr(
        flash_attn_cuda, "flash_attn_func", lambda *tensors, **options: seen.append(options)
    )
    group = tiny_feature_group(True)
    for variant in group.variants[:6]:
        case = replace(group.plain, **variant.changes)
        BACKENDS["ours"].prepare(case)(None, None, None)
        assert set(seen.pop()) == {"softmax_scale", "causal", *features_of(case)}


@pytest.mark.parametrize("changes", [{"softcap": 5.0}, {"window": (3, 0)}, {"deterministic": True}])
def test_torch_backends_refuse_features_that_they_lack(changes):
    case = replace(tiny_feature_group(False).plain, **changes)
    with pytest.raises(Unsupported, match="not measured with"):
        BACKENDS["sdpa_flash"].prepare(case)


def test_torchs_packed_attention_takes_these_arguments(monkeypatch):
    """On meta tensors, which check the signature and record the backward."""
    monkeypatch.setattr(varlen_speed, "offsets", lambda case: torch.empty(5, device="meta").int())
    attend = varlen_speed.torch_packed(replace(TINY_VARLEN, device="cuda").packed)
    q, k, v = (
        torch.empty(64, 2, 16, dtype=torch.bfloat16, device="meta", requires_grad=True)
        for _ in range(3)
    )
    out = attend(q, k, v)
    gradients = torch.autograd.grad(out, (q, k, v), torch.empty_like(out))
    assert all(x.shape == q.shape for x in (out, *gradients))


# Rows and tables


def test_targets_are_judged():
    row = {"a": 0.95, "b": None}
    assert Target("a", 0.95).judge(row)["met"] is True
    assert Target("a", 0.96).judge(row)["met"] is False
    assert Target("a", 0.9, at_least=False).judge(row)["met"] is False
    assert Target("b", 0.9).judge(row)["met"] is None


def test_numbers_are_shown_with_few_digits():
    assert [number(3)(x) for x in (0.1234, 3.086, 25.54, 412.6, 1e4)] == [
        *("0.12", "3.09", "25.5", "413", "10000"),
    ]


def fake_measure(milliseconds: dict[str, float]):
    """runner.measure with these times; subjects without one are unsupported."""

    def measure(subjects, **_options):
        return [
            Measurement(Status.ok, timing=Timing(*[milliseconds[s.name]] * 3, samples=5))
            if s.name in milliseconds
            else Measurement(Status.unsupported, "no such thing")
            for s in subjects
        ]

    return measure


def test_varlen_ratios_are_of_speeds(monkeypatch):
    more = operations(TINY_VARLEN.packed, Pass.forward) / operations(
        TINY_VARLEN.dense, Pass.forward
    )
    times = {PACKED: 2.0, EQUAL: 1.25, DENSE: 1.0, TORCH: 3.0, FA3: 2.5}
    monkeypatch.setattr(varlen_speed, "measure", fake_measure(times))
    rows = {
        row["what"]: row
        for row in varlen_speed.measure_group(TINY_VARLEN, BRIEF)
        if row["pass"] == "forward"
    }
    assert rows[PACKED]["over_dense"] == pytest.approx(more / 2)
    assert rows[PACKED]["over_torch"] == pytest.approx(1.5)
    assert rows[PACKED]["over_fa3"] == pytest.approx(1.25)
    assert rows[EQUAL]["over_dense"] == pytest.approx(0.8)
    assert [target["met"] for target in rows[PACKED]["targets"]] == [more / 2 >= 0.95, True]
    assert not rows[DENSE]["targets"] and not rows[EQUAL]["targets"]


def test_a_missing_peer_leaves_its_ratio_empty(monkeypatch):
    monkeypatch.setattr(
        varlen_speed, "measure", fake_measure({PACKED: 1.0, EQUAL: 1.0, DENSE: 1.0})
    )
    rows = {row["name"]: row for row in varlen_speed.measure_group(TINY_VARLEN, BRIEF)}
    packed, peer = (rows[f"{TINY_VARLEN} backward {name}"] for name in (PACKED, TORCH))
    assert packed["over_torch"] is None and packed["targets"][1]["met"] is None
    assert (peer["status"], peer["reason"]) == ("unsupported", "no such thing")


def test_feature_costs_are_relative_to_the_work(monkeypatch):
    group = tiny_feature_group(True)
    group = replace(group, plain=replace(group.plain, seqlen_q=4096, seqlen_k=4096))
    names = [variant.name for variant in group.variants]
    times = dict.fromkeys(names, 1.0) | {"dropout 0.1": 1.2, "softcap 50": 1.2, "torch": 2.0}
    monkeypatch.setattr(feature_cost, "measure", fake_measure(times))
    monkeypatch.setattr(feature_cost, "make_input_sets", lambda case: [])
    rows = {(row["pass"], row["what"]): row for row in feature_cost.measure_group(group, BRIEF)}
    dropout, softcap = rows["forward", "dropout 0.1"], rows["forward", "softcap 50"]
    assert dropout["over_plain"] == pytest.approx(1 / 1.2)
    assert dropout["more_time_percent"] == pytest.approx(20.0)
    assert dropout["targets"][0]["met"] and not softcap["targets"][0]["met"]
    assert dropout["over_torch"] == pytest.approx(1 / 1.2)
    assert rows["forward", "plain"]["over_torch"] == pytest.approx(2.0)
    assert rows["forward", "plain"]["over_plain"] is None
    window = rows["forward", "window 1024,0"]  # as long for less work
    assert window["over_plain"] < 0.5 and not window["targets"][0]["met"]
    assert ("forward", "deterministic") not in rows and ("backward", "deterministic") in rows


def test_decode_rates_count_keys_and_values(monkeypatch):
    group = replace(decode_speed.groups("cpu")[1], lengths=(512,), device="cpu")
    monkeypatch.setattr(
        decode_speed, "measure", fake_measure({"dense": 1.0, "paged 16": 1.25, "device copy": 1.0})
    )
    rows = {row["what"]: row for row in decode_speed.measure_group(group, BRIEF)}
    rate = 512 * 8 * 128 * 2 * 2 / 1e-3 / 1e12
    assert rows["dense"]["terabytes_per_second"] == pytest.approx(rate)
    assert rows["dense"]["microseconds"] == pytest.approx(1000.0)
    assert rows["dense"]["targets"][0] == {
        **{"figure": "microseconds", "limit": 20.0, "at_least": False, "met": False}
    }
    assert rows["paged 16"]["over_dense"] == pytest.approx(0.8)
    assert rows["paged 256"]["targets"][0]["met"] is None
    every = [decode_speed.measure_copy("cpu", BRIEF, size=1000), *rows.values()]
    decode_speed.add_copy_shares(every)
    assert every[0]["terabytes_per_second"] == pytest.approx(2e-6)
    assert rows["dense"]["over_copy"] == pytest.approx(rate / 2e-6)
    assert every[0]["over_copy"] is None and rows["paged 256"]["over_copy"] is None


# Prefill


def test_prefill_groups_have_whole_pages_and_operations_of_visible_pairs():
    for group in prefill_speed.groups():
        assert all(group.seqlen_k % size == 0 for size in prefill_speed.PAGE_SIZES)
        first = group.seqlen_k - group.seqlen_q
        pairs = sum(first + query + 1 for query in range(group.seqlen_q))
        assert group.flops == 4 * group.batch * group.num_heads_q * group.head_dim * pairs


def test_subjects_of_a_prefill_attend_to_the_same_keys():
    prefill = prefill_speed.Prefill(replace(TINY_PREFILL, dtype=torch.float32))
    dense = prefill.ours(None)[0]()
    for size in prefill_speed.PAGE_SIZES:
        assert torch.equal(prefill.ours(size)[0](), dense)
    torch.testing.assert_close(prefill.torch_flash()[0]().transpose(1, 2), dense)


def test_prefill_rates_and_ratios(monkeypatch):
    times = {"dense": 1.0, "paged 16": 1.25, "paged 64": 1.0, "torch flash": 2.0}
    monkeypatch.setattr(prefill_speed, "measure", fake_measure(times))
    rows = {row["what"]: row for row in prefill_speed.measure_group(TINY_PREFILL, BRIEF)}
    assert rows["dense"]["tflops"] == pytest.approx(TINY_PREFILL.flops * 1e-9)
    assert rows["dense"]["over_dense"] is None and rows["dense"]["over_torch"] == 2.0
    assert rows["paged 16"]["over_dense"] == pytest.approx(0.8)
    assert [target["met"] for target in rows["paged 16"]["targets"]] == [False, True]
    assert [target["met"] for target in rows["paged 64"]["targets"]] == [True, True]
    assert [target["met"] for target in rows["paged 256"]["targets"]] == [None, None]
    assert rows["torch flash"]["targets"] == []


# Command lines


@pytest.fixture
def tiny(monkeypatch):
    """Every benchmark with one small group."""
    monkeypatch.setattr(varlen_speed, "groups", lambda device, quick: [TINY_VARLEN])
    monkeypatch.setattr(feature_cost, "groups", lambda device, quick: [tiny_feature_group(True)])
    monkeypatch.setattr(decode_speed, "groups", lambda device, quick: [TINY_DECODE])
    monkeypatch.setattr(prefill_speed, "groups", lambda device, quick: [TINY_PREFILL])
    monkeypatch.setattr(decode_speed.measure_copy, "__defaults__", (1000,))


@pytest.mark.filterwarnings("ignore:.*[fF]lash|.*fused:UserWarning")  # torch's refusals
@pytest.mark.parametrize("name", features.BENCHMARKS)
def test_each_benchmark_runs_saves_and_prints(name, tiny, tmp_path, capsys):
    path = tmp_path / f"{name}.json"
    arguments = [name, "--device", "cpu", *BRIEF_OPTIONS, "--json", str(path)]
    assert features.main(arguments) == 0, capsys.readouterr().err
    printed = capsys.readouterr().out
    document = json.loads(path.read_text())
    assert (document["schema"], document["benchmark"]) == (1, name)
    assert document["command"].startswith(f"python -m benchmarks.suites.features {name}")
    assert {"device", "torch", "commit", "cuda", "driver"} <= document["environment"].keys()
    assert (document["protocol"]["version"], document["protocol"]["turn_ms"]) == (4, 0.2)
    rows = document["results"]
    assert len({frozenset(row) for row in rows}) == 1
    assert len({row["name"] for row in rows}) == len(rows)
    for row in rows:
        assert row["sm_clock_mhz"] is None and row["watts"] is None  # of a CPU
        if row["status"] == "ok":
            assert row["samples"] == 4
            assert 0 < row["low_ms"] <= row["median_ms"] <= row["high_ms"]
        else:
            assert row["what"].startswith(("torch", "FlashAttention-3")) and row["reason"]
    assert "targets met:" in printed and rows[0]["what"] in printed

    assert report.main([str(path), "--markdown"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert len(lines) == 2 + len(rows)
    with pytest.raises(SystemExit, match="--ratios are for results of"):
        report.main([str(path), "--csv", str(tmp_path / "x.csv")])


def test_an_error_leaves_what_was_measured_before_it(tiny, monkeypatch, tmp_path):
    def lose_the_device(group, protocol):
        raise RuntimeError("lost")
        yield

    monkeypatch.setattr(decode_speed, "measure_group", lose_the_device)
    path = tmp_path / "r.json"
    with pytest.raises(RuntimeError, match="lost"):
        features.main(["decode", "--device", "cpu", *BRIEF_OPTIONS, "--json", str(path)])
    assert [row["what"] for row in json.loads(path.read_text())["results"]] == ["1000 bytes"]


def test_a_failing_subject_fails_the_run(tiny, monkeypatch, capsys):
    def broken(case):
        raise ValueError("a defect")

    monkeypatch.setattr(varlen_speed, "ours_packed", broken)
    assert features.main(["varlen", "--device", "cpu", *BRIEF_OPTIONS]) == 1
    captured = capsys.readouterr()
    assert "failed: a defect" in captured.out
    assert f"failed: {TINY_VARLEN} forward packed" in captured.err


def test_tables_do_not_need_rich(tiny, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "rich.console", None)
    assert features.main(["varlen", "--device", "cpu", *BRIEF_OPTIONS]) == 0
    assert capsys.readouterr().out.startswith("| D | mean | sequences |")


def test_figures_below_their_target_stand_out():
    row = {"what": "x", "rate": 0.5, "status": "ok", "reason": None, "name": "x", "group": "g"}
    row["targets"] = [Target("rate", 0.8).judge(row)]
    columns = (
        feature_tables.Column("what", "what"),
        feature_tables.Column("rate", "rate", feature_tables.ratio),
    )
    document = {
        "benchmark": "b",
        "command": "c",
        "environment": {"device": "d", "torch": "t", "commit": None},
        "results": [row],
    }
    text = feature_tables.markdown(document, columns)
    assert "| x | **0.50 (>= 0.80)** |" in text
    assert "targets met: 0 of 1\n  x: rate 0.5, target at least 0.8" in text
