"""What a suite compares is the same problem, and its ratios are the right way up."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.nn.attention.bias import CausalBias

import flash_attn_cuda
from benchmarks.core.metrics import Pass, operations
from benchmarks.core.refcheck import ReferenceCheck
from benchmarks.core.runner import make_input_sets
from benchmarks.peers import backends
from benchmarks.peers.backends import BACKENDS, Unsupported, features_of
from benchmarks.suites import (
    decode,
    feature_cost,
    fp8_cache,
    limits,
    mask_entrants,
    mask_tables,
    masks,
    prefill,
    rotary,
    rounding_cost,
    second_order,
    trees,
    varlen,
)
from benchmarks.suites.mask_blocks import BLOCK, flex_block_mask, random_blocks, window_blocks
from flash_attn_cuda import BlockSparsity
from tests.benchmarks.cases import BRIEF, SMALL, fake_measure, sdpa_like
from tests.cases.attention import AttentionCase
from tests.reference import attention

TINY_VARLEN = varlen.VarlenGroup(mean=16, head_dim=16, tokens=64, hidden=32, device="cpu")
TINY_PREFILL = prefill.PrefillGroup(
    2, 5, 256, head_dim=16, num_heads_q=4, num_heads_k=2, dtype=torch.float32, device="cpu"
)
TINY_CACHE = fp8_cache.Shape(2, 40, 4, 2, 16)


def by_what(rows: Any, which: str | None = None) -> dict[str, dict[str, Any]]:
    return {row["what"]: row for row in rows if which in (None, row.get("pass"))}


def met(row: dict[str, Any]) -> list[bool | None]:
    return [target["met"] for target in row["targets"]]


# -- backends of the grid --------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["ours", "sdpa_flash", "sdpa_math", "sdpa"])
@pytest.mark.parametrize("causal", [False, True])
def test_backends_compute_the_same_attention(name: str, causal: bool) -> None:
    heads_k = 2 if name == "ours" else 4  # torch's CPU kernels differ in what they do with groups
    case = replace(SMALL, seqlen_q=8, seqlen_k=24, num_heads_k=heads_k, causal=causal)
    checker = ReferenceCheck(case, make_input_sets(case)[0])
    for which, names in ((Pass.forward, {"out"}), (Pass.backward, {"dq", "dk", "dv"})):
        verdict = checker.check(BACKENDS[name], which)
        assert verdict.keys() == {"passes", *names} and verdict["passes"], verdict


def test_the_check_finds_a_wrong_result() -> None:
    checker = ReferenceCheck(SMALL, make_input_sets(SMALL)[0])
    sdpa = BACKENDS["sdpa_math"].prepare(SMALL)
    wrong = sdpa_like("wrong", lambda q, k, v: sdpa(q * 1.01, k, v))
    for which in Pass:
        assert not checker.check(wrong, which)["passes"]


@pytest.mark.parametrize("name", ["sdpa_math", "sdpa_cudnn"])
def test_masks_are_made_before_the_clock_starts(name: str, monkeypatch) -> None:
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


# -- features --------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
def test_a_variant_has_one_feature_and_passes_no_other(causal: bool, monkeypatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(
        flash_attn_cuda, "flash_attn_func", lambda *tensors, **options: seen.append(options)
    )
    plain, variants = replace(SMALL, causal=causal), feature_cost.variants(causal)
    names = [variant.name for variant in variants]
    assert len(set(names)) == len(names)
    for variant in variants:
        case = replace(plain, **variant.changes)
        assert len(features_of(case)) == (variant.name != variant.plain)
        assert variant.plain in names and (variant.peer is None or variant.peer in names)
        if variant.backend == "ours":
            BACKENDS["ours"].prepare(case)(None, None, None)
            assert set(seen.pop()) == {"softmax_scale", "causal", *features_of(case)}


def test_costs_are_relative_to_the_work(monkeypatch) -> None:
    plain = AttentionCase(1, 4096, 4096, 2, 2, 16, causal=True, device="cpu")
    group = feature_cost.FeatureGroup(plain, feature_cost.variants(True))
    times = dict.fromkeys((variant.name for variant in group.variants), 1.0)
    times |= {"dropout 0.1": 1.2, "softcap 50": 1.2, "torch": 2.0}
    monkeypatch.setattr(feature_cost, "measure", fake_measure(times))
    monkeypatch.setattr(feature_cost, "make_input_sets", lambda case: [])
    rows = list(feature_cost.measure_group(group, BRIEF))
    forward, backward = (by_what(rows, which.value) for which in Pass)
    dropout, softcap, window = (forward[x] for x in ("dropout 0.1", "softcap 50", "window 1024,0"))
    assert dropout["over_plain"] == dropout["over_torch"] == pytest.approx(1 / 1.2)
    assert dropout["more_time_percent"] == pytest.approx(20.0)
    assert (met(dropout), met(softcap)) == ([True], [False])
    assert forward["plain"]["over_torch"] == 2.0 and forward["plain"]["over_plain"] is None
    assert window["over_plain"] < 0.5 and met(window) == [False]  # as long for less work
    assert backward.keys() - forward.keys() == {"deterministic"}


def test_what_keeping_the_rounding_costs(monkeypatch) -> None:
    kept, lost = rounding_cost.KEPT, rounding_cost.LOST
    monkeypatch.setattr(rounding_cost, "measure", fake_measure({kept: 1.02, lost: 1.0}))
    for which in Pass:
        rows = by_what(
            rounding_cost.measure_group(rounding_cost.RoundingGroup(SMALL), BRIEF), which.value
        )
        assert rows[kept]["over_lost"] == pytest.approx(1.02) and met(rows[kept]) == [False]
        assert rows[lost]["over_lost"] is None and met(rows[lost]) == []
    seen: list[Any] = []
    monkeypatch.setattr(
        flash_attn_cuda, "flash_attn_func", lambda *tensors, **options: seen.append(options)
    )
    for keeps in (True, False):
        rounding_cost.calls(SMALL, Pass.forward, keeps, [SMALL.make_inputs()])[0]()
        assert seen.pop() == {"causal": False, "keep_rounding": keeps}


# -- packed sequences, caches ----------------------------------------------------------------------


def test_packed_sequences_are_compared_by_speed(monkeypatch) -> None:
    group = TINY_VARLEN
    for which in Pass:
        assert operations(group.equal, which) == operations(group.dense, which)
    more = operations(group.packed, Pass.forward) / operations(group.dense, Pass.forward)
    assert more > 1
    times = {varlen.PACKED: 2.0, varlen.EQUAL: 1.25, varlen.DENSE: 1.0, varlen.FA3: 2.5}
    monkeypatch.setattr(varlen, "measure", fake_measure(times))
    rows = by_what(varlen.measure_group(group, BRIEF), "forward")
    packed, equal, absent = (rows[x] for x in (varlen.PACKED, varlen.EQUAL, varlen.TORCH))
    assert packed["over_dense"] == pytest.approx(more / 2)
    assert (packed["over_fa3"], packed["over_torch"]) == (pytest.approx(1.25), None)
    assert met(packed) == [more / 2 >= 0.95, None] and not equal["targets"]
    assert equal["over_dense"] == pytest.approx(0.8)
    assert (absent["status"], absent["reason"]) == ("unsupported", "no such thing")


def test_torchs_packed_attention_takes_these_arguments(monkeypatch) -> None:
    """On meta tensors, which check the signature and record the backward."""
    monkeypatch.setattr(varlen, "offsets", lambda case: torch.empty(5, device="meta").int())
    attend = varlen.torch_packed(replace(TINY_VARLEN, device="cuda").packed)
    q, k, v = torch.empty(3, 64, 2, 16, dtype=torch.bfloat16, device="meta").requires_grad_()
    out = attend(q, k, v)
    gradients = torch.autograd.grad(out, (q, k, v), torch.empty_like(out))
    assert all(x.shape == q.shape for x in (out, *gradients))


def test_decoding_counts_keys_and_values(monkeypatch) -> None:
    group = replace(decode.groups("cpu", quick=True)[0], lengths=(512,))
    times = {"dense": 1.0, "paged 16": 1.25, decode.COPY: 1.0}
    monkeypatch.setattr(decode, "measure", fake_measure(times))
    every = [decode.measure_copy("cpu", BRIEF, 1000), *decode.measure_group(group, BRIEF)]
    decode.add_copy_shares(every)
    copy, rows = every[0], by_what(every[1:])
    rate = 512 * 8 * 128 * 2 * 2 / 1e-3 / 1e12
    assert rows["dense"]["terabytes_per_second"] == pytest.approx(rate)
    assert (rows["dense"]["microseconds"], met(rows["dense"])) == (pytest.approx(1e3), [False])
    assert rows["dense"]["over_copy"] == pytest.approx(rate / copy["terabytes_per_second"])
    assert copy["terabytes_per_second"] == pytest.approx(2e-6) and copy["over_copy"] is None
    assert rows["paged 16"]["over_dense"] == pytest.approx(0.8)
    assert met(rows["paged 256"]) == [None] and rows["paged 256"]["over_copy"] is None


def test_caches_are_larger_than_the_l2_cache_and_pages_are_shuffled(monkeypatch) -> None:
    properties = type("Properties", (), {"L2_cache_size": 60 << 20})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    for group in decode.groups():
        assert group.copies * group.kv_bytes >= 3 * properties.L2_cache_size
        assert group.calls % group.copies == 0 and group.calls * group.kv_bytes / 4e9 < 10
        assert all(group.capacity % size == 0 for size in decode.PAGE_SIZES)
    caches = decode.Caches(decode.DecodeGroup("tiny", (5, 300), None, 4, 2, 16, device="cpu"))
    k, v, tables = caches.pages(16)
    assert k.shape == v.shape == (2 * 512 // 16, 16, 2, 16) and tables.shape == (1, 2, 512 // 16)
    assert sorted(tables.flatten().tolist()) == list(range(len(k))) != tables.flatten().tolist()
    assert k.data_ptr() == caches.k.data_ptr()


def test_trees(monkeypatch) -> None:
    times = {
        f"{x} {what}": n for x in trees.PLACES for what, n in (("causal", 1.0), ("tree", 1.25))
    }
    monkeypatch.setattr(trees, "measure", fake_measure(times))
    rows = list(trees.measure_group(TINY_PREFILL, BRIEF))
    assert [row["over_causal"] for row in rows] == [None, pytest.approx(0.8)] * 2
    assert [met(row) for row in rows] == [[], [False]] * 2


def test_prefill(monkeypatch) -> None:
    for group in prefill.groups():
        first = group.seqlen_k - group.seqlen_q
        pairs = sum(first + query + 1 for query in range(group.seqlen_q))
        assert group.flops == 4 * group.batch * group.num_heads_q * group.head_dim * pairs
        assert all(group.seqlen_k % size == 0 for size in prefill.PAGE_SIZES)
    subjects = prefill.Prefill(TINY_PREFILL)
    dense = subjects.ours(None)[0]()
    assert all(torch.equal(subjects.ours(size)[0](), dense) for size in prefill.PAGE_SIZES)
    torch.testing.assert_close(subjects.torch_flash()[0]().transpose(1, 2), dense)
    times = {"dense": 1.0, "paged 16": 1.25, "paged 64": 1.0, "torch flash": 2.0}
    monkeypatch.setattr(prefill, "measure", fake_measure(times))
    rows = by_what(prefill.measure_group(TINY_PREFILL, BRIEF))
    assert rows["dense"]["tflops"] == pytest.approx(TINY_PREFILL.flops * 1e-9)
    assert rows["dense"]["over_dense"] is None and rows["dense"]["over_torch"] == 2.0
    assert rows["paged 16"]["over_dense"] == pytest.approx(0.8)
    names = ("paged 16", "paged 64", "paged 256", "torch flash")
    assert [met(rows[x]) for x in names] == [[False, True], [True, True], [None, None], []]


# -- caches of FP8 ---------------------------------------------------------------------------------


def test_caches_of_fp8_attend_alike() -> None:
    caches = decode.Caches(TINY_CACHE.group("cpu"))
    expected = decode.ours_dense(caches)(0)
    assert torch.is_tensor(expected)
    for what in fp8_cache.MODES:
        quantized = fp8_cache.Quantized.of(caches.k, caches.v, what)
        out = fp8_cache.ours_e4m3(caches, quantized)(0)
        torch.testing.assert_close(out, expected, rtol=0.0, atol=0.1)
        assert not torch.equal(out, expected)


@pytest.mark.parametrize("what", fp8_cache.MODES)
def test_what_is_appended_can_be_read(what: str) -> None:
    caches = decode.Caches(TINY_CACHE.group("cpu"))
    tables = rotary.RotaryGroup(40, 16, False, "cpu").tables()
    (expected,), (target,) = (fp8_cache.append_targets(caches, x) for x in (fp8_cache.WIDE, what))
    for one in (expected, target):
        fp8_cache.appending(caches, [one], tables)(0)
    torch.testing.assert_close(expected["v_cache"][:, :40], caches.v[0, :, :40])
    for name in "kv":
        scale = target[f"{name}_descale"]
        scale = scale[..., None] if what == fp8_cache.HEAD else scale[:, :40, :, None]
        found = target[f"{name}_cache"][:, :40].float() * scale
        wanted = expected[f"{name}_cache"][:, :40].float()
        torch.testing.assert_close(found, wanted, rtol=0.07, atol=0.01)


def test_rows_of_fp8_caches(monkeypatch) -> None:
    head, token, wide = fp8_cache.HEAD, fp8_cache.TOKEN, fp8_cache.WIDE
    times = {wide: 2.0, head: 1.0, token: 1.25, fp8_cache.COPY: 0.5}
    monkeypatch.setattr(fp8_cache, "measure", fake_measure(times))
    options = fp8_cache.parse_arguments(["--device", "cpu", "--queries", "8"])
    rows = {
        part: by_what(measure(TINY_CACHE, options, BRIEF))
        for part, measure in fp8_cache.PARTS.items()
    }
    numbers, scales = 2 * 2 * 40 * 2 * 16, {head: 2 * 2 * 2 * 4, token: 2 * 2 * 2 * 40 * 4}
    for what, size in scales.items():
        assert rows["decode"][what]["bytes"] == numbers + size
        assert rows["append"][what]["bytes"] == 3 * numbers + 40 * 16 * 2 + size
        assert rows["decode"][what]["over_16_bits"] == pytest.approx(2.0 / times[what])
    assert rows["decode"][token]["over_per_head"] == pytest.approx(0.8)
    assert rows["append"][head]["over_copy"] == pytest.approx(0.5)
    pairs = 8 * 33 + 8 * 7 // 2
    assert rows["prefill"][wide]["tflops"] == pytest.approx(4 * 2 * 4 * 16 * pairs / 2.0 / 1e9)
    assert [len(fp8_cache.shapes(part, options)) for part in fp8_cache.PARTS] == [7, 3, 2]


def test_fa3_gets_scales_of_queries_and_of_the_cache(monkeypatch) -> None:
    caches = decode.Caches(TINY_CACHE.group("cpu"))
    quantized = fp8_cache.Quantized.of(caches.k, caches.v, fp8_cache.HEAD)
    given: dict[str, torch.Tensor] = {}

    def attend(q: torch.Tensor, *_: torch.Tensor, **descales: torch.Tensor) -> None:
        given.update(descales, q=q)

    monkeypatch.setattr(fp8_cache, "fa3_attend", lambda group: attend)
    fp8_cache.fa3_e4m3(caches, quantized)(0)
    q = given.pop("q").float() * given["q_descale"][0, 0]
    torch.testing.assert_close(q, caches.q[0].float(), rtol=0.07, atol=0.01)
    assert {x.shape for x in given.values()} == {(2, 2)} and len(given) == 3


# -- rotary embedding, second derivatives, limits --------------------------------------------------


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotations_are_the_same(interleaved: bool, monkeypatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    group = rotary.RotaryGroup(16, 8, interleaved, "cpu")
    (x,) = group.input_sets()
    for which in rotary.PASSES:
        results = []
        for rotate in rotary.rotations(group, which == "in place").values():
            inputs = [x.clone()]
            (call,) = rotary.calls_of(rotate, which, inputs, False)
            made = call()
            results.append(made[0] if which == "backward" else made)
            assert torch.equal(inputs[0], results[-1]) == (which == "in place")
        assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


def test_rotations_are_shares_of_a_copy(monkeypatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    times = {rotary.OURS: 1.25, rotary.COPY: 1.0}
    monkeypatch.setattr(rotary, "measure", fake_measure(times))
    group = rotary.RotaryGroup(16, 8, False, "cpu")
    rows = by_what(rotary.measure_pass(group, "forward", BRIEF))
    x_bytes, table_bytes = 16 * 32 * 8 * 2, 16 * 8 * 2
    assert rows[rotary.COPY]["bytes"] == 2 * x_bytes
    assert rows[rotary.OURS]["bytes"] == 2 * x_bytes + table_bytes
    share = (1 + table_bytes / (2 * x_bytes)) / 1.25
    assert rows[rotary.OURS]["over_copy"] == pytest.approx(share)
    assert (met(rows[rotary.OURS]), met(rows[rotary.COPY])) == ([share >= 0.85], [])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("which", ["jvp", "hvp"])
def test_second_derivatives_are_the_same(which: str, causal: bool) -> None:
    group = second_order.Group(32, 8, causal, "cpu", tokens=64, width=16, dtype=torch.float64)
    inputs, made = group.input_sets(), []
    for what in second_order.ENTRANTS[which]:
        if what == second_order.TRITON:
            with pytest.raises(Unsupported, match="jvp_flash_attention is not installed"):
                second_order.calls_of(group, which, what, inputs)
            continue
        (call,) = second_order.calls_of(group, which, what, inputs)
        found = call()
        made.append([found] if torch.is_tensor(found) else list(found)[:3])
    for others in made[1:]:
        for x, y in zip(made[0], others, strict=True):
            torch.testing.assert_close(x, y if x.shape == y.shape else y.transpose(1, 2))
    assert group.product_flops == 2 * 8 * 2 * 2 * (32 * 33 / 2 if causal else 32**2)


def test_limits_are_shares_of_a_product(monkeypatch) -> None:
    monkeypatch.setattr(limits, "measure", fake_measure({limits.OURS: 1.0, limits.PRODUCT: 4.0}))
    options = limits.parse_arguments(["--device", "cpu", "--tokens", "16"])
    assert len(limits.problems(options)) == 8
    case, which, target = limits.problems(options)[-1]
    ours, product = limits.measure_problem(case, which, target, 32, BRIEF)
    assert product["tflops"] == pytest.approx(2 * 32**3 / 4e9) and product["targets"] == []
    assert ours["tflops"] == pytest.approx(operations(case, which) / 1e9)
    assert ours["over_matmul"] == pytest.approx(ours["tflops"] / product["tflops"])
    assert ours["targets"][0]["limit"] == 0.82 and met(ours) == [ours["over_matmul"] >= 0.82]


# -- masks -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [random_blocks, window_blocks])
@pytest.mark.parametrize("density", [1.0, 0.3, 0.25])
def test_masks_have_the_density_asked_for(make: Any, density: float) -> None:
    blocks = make(32, 3, density)
    assert (blocks.shape, blocks.dtype) == ((1, 3, 32, 32), torch.bool)
    assert blocks.sum((0, 2, 3)).tolist() == [round(density * 32 * 32)] * 3
    assert blocks.diagonal(dim1=2, dim2=3).all() and torch.equal(blocks, make(32, 3, density))
    assert torch.equal(blocks[0, 0], blocks[0, 1]) == (make is window_blocks or density == 1.0)
    if make is window_blocks:  # the first block, and those nearest to the diagonal
        window, inner = blocks[0, 0], torch.arange(1, 32)
        distance = (inner[:, None] - inner).abs()
        reach = distance[window[1:, 1:]].max()
        assert window[0].all() and window[:, 0].all()
        assert window[1:, 1:][distance < reach].all()
    sparsity = BlockSparsity.from_blocks(blocks, BLOCK, 32 * BLOCK, 32 * BLOCK)
    torchs = BlockSparsity.from_block_mask(flex_block_mask(blocks))
    assert torch.equal(torchs.rows, sparsity.rows) and torch.equal(torchs.columns, sparsity.columns)
    assert torchs.bits is None  # full blocks alone, in which no mask_mod is evaluated
    for bad in (0.01, 1.01):
        with pytest.raises(ValueError, match=r"^density: must be from 0\.\d+ to 1 .*, got [01]"):
            make(32, 2, bad)


def test_flex_takes_the_block_mask(monkeypatch) -> None:
    case, blocks = mask_entrants.one_sequence(4 * BLOCK, 16, "cpu"), random_blocks(4, 2, 0.5)
    with pytest.raises(Unsupported, match="CUDA devices only"):
        mask_entrants.flex_in_blocks(case, blocks)
    monkeypatch.setattr(mask_entrants, "require_cuda", lambda case: None)
    monkeypatch.setattr(mask_entrants, "compiled_flex_attention", lambda: dict)
    monkeypatch.setitem(sys.modules, "triton", ModuleType("triton"))
    (block_mask,) = mask_entrants.flex_in_blocks(case, blocks)().values()
    assert torch.equal(block_mask.to_dense().bool(), blocks)
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(Unsupported, match=r"^triton is not importable"):
        mask_entrants.flex_in_blocks(case, blocks)


def rows_of_masks(group: Any, times: dict[str, float], monkeypatch) -> dict[str, dict[str, Any]]:
    monkeypatch.setattr(masks, "measure_in_turns", fake_measure(times))
    entrants = mask_entrants.PARTS[group.part][1](group)
    return masks.measure_pass(group, Pass.backward, entrants, BRIEF)


def test_masks_are_compared_by_time(monkeypatch) -> None:
    monkeypatch.setattr(mask_entrants, "HEADS", 2)
    case = mask_entrants.one_sequence(2 * BLOCK, 16, "cpu")
    group = mask_entrants.MaskGroup("density", case, "window", 1.0)
    times = {"block mask": 3.0, "dense": 10.0, "FlexAttention": 3.3}
    rows = rows_of_masks(group, times, monkeypatch)
    assert rows["block mask"]["time_ratio"] == pytest.approx(0.3)
    assert rows["block mask"]["speedup"] == pytest.approx(1.1)
    work = operations(case, Pass.backward) / 1e9
    assert rows["dense"]["tflops"] == pytest.approx(work / 10.0) and not rows["dense"]["targets"]
    of_half = replace(group, mask="random", density=0.75)
    half = rows_of_masks(of_half, times, monkeypatch)["block mask"]
    assert half["tflops"] == pytest.approx(work * 0.75 / 3.0)


def test_the_sink_is_in_the_call(monkeypatch) -> None:
    monkeypatch.setattr(feature_cost, "TOKENS", 32)
    monkeypatch.setattr(feature_cost, "HIDDEN", 32)
    monkeypatch.setattr(mask_entrants, "SINK_SEQLENS", (32,))
    make_groups, make_entrants = mask_entrants.PARTS["sink"]
    group = make_groups("cpu", False, (16,))[0]
    entrants = {e.name: e for e in make_entrants(group)}
    out = {name: e.prepare()(*e.inputs) for name, e in entrants.items()}
    assert torch.equal(out["sink"], out["sink with gradient"])
    assert not torch.allclose(out["sink"], out["plain"])
    learned = entrants["sink with gradient"]
    (dsink,) = torch.autograd.grad(out[learned.name], learned.inputs[3], learned.dout)
    assert dsink.shape == (2,) and dsink.any()
    for x, first in zip(learned.inputs[:3], entrants["plain"].inputs, strict=True):
        assert x.data_ptr() == first.data_ptr() and x.is_leaf  # the same memory


def test_the_worst_tile_counts() -> None:
    expected = torch.randn(300, 2, 16)
    assert mask_tables.worst_tile(expected, expected) == 0.0
    actual = expected.clone()
    actual[256:, 1] *= 1.5
    assert mask_tables.worst_tile(actual, expected) == pytest.approx(0.5)
    actual[0, 0, 0] = torch.nan
    assert mask_tables.worst_tile(actual, expected) == torch.inf
