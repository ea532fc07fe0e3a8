"""What fp8_cache.py measures and prints, on the CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks.core import report
from benchmarks.peers.backends import Unsupported
from benchmarks.suites import decode, fp8_cache
from benchmarks.suites.fp8_cache import COPY, FA3, FA3_WIDE, HEAD, TOKEN, WIDE, Shape
from tests.benchmarks.cases import BRIEF_OPTIONS
from tests.cases.cpu_harness import one_thread  # noqa: F401

pytestmark = pytest.mark.usefixtures("one_thread")

TINY = Shape(2, 40, 4, 2, 16)
OPTIONS = ["--device", "cpu", "--shape", "2,40,4,2,16", "--queries", "8", *BRIEF_OPTIONS]


def test_rows_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "fp8_cache.json"
    assert fp8_cache.main([*OPTIONS, "--json", str(path)]) == 0
    rows = {(row["part"], row["what"]): row for row in json.loads(path.read_text())["results"]}
    ours = (WIDE, HEAD, TOKEN)
    assert list(rows) == [
        *(("decode", what) for what in (*ours, FA3_WIDE, FA3)),
        *(("prefill", what) for what in ours),
        *(("append", what) for what in (*ours, COPY)),
    ]
    numbers, scales = 2 * 2 * 40 * 2 * 16, {HEAD: 2 * 2 * 2 * 4, TOKEN: 2 * 2 * 2 * 40 * 4}
    for (part, what), row in rows.items():
        if what in (FA3, FA3_WIDE):
            assert row["status"] == "unsupported" and "CUDA devices only" in row["reason"]
            continue
        assert row["status"] == "ok", row["reason"]
        assert (row["over_16_bits"] is not None) == (what in scales)
        assert (row["over_per_head"] is not None) == (what == TOKEN)
        assert (row["over_copy"] is not None) == (part == "append" and what != COPY)
        assert (row["tflops"] is not None) == (part == "prefill")
        size = {"decode": numbers, "append": 3 * numbers + 40 * 16 * 2, "prefill": None}[part]
        if size is not None and what in scales:
            assert row["bytes"] == size + scales[what]
            speed = row["bytes"] / row["microseconds"] / 1e3
            assert row["gigabytes_per_second"] == pytest.approx(speed)
    assert rows["append", COPY]["bytes"] == rows["append", HEAD]["bytes"]
    pairs = 8 * 33 + 8 * 7 // 2
    prefill = rows["prefill", WIDE]
    flops = 4 * 2 * 4 * 16 * pairs
    assert prefill["tflops"] == pytest.approx(flops / prefill["microseconds"] / 1e6)
    capsys.readouterr()
    report.main([str(path), "--markdown"])
    assert f"| B2 S40 4/2 d16 | append | {TOKEN} |" in capsys.readouterr().out


def test_what_is_compared_attends_alike() -> None:
    caches = decode.Caches(TINY.group("cpu"))
    calls = [decode.ours_dense(caches)]
    for what in fp8_cache.MODES:
        quantized = fp8_cache.Quantized.of(caches.k, caches.v, what)
        calls.append(fp8_cache.ours_e4m3(caches, quantized))
    expected, *others = (call(0) for call in calls)
    assert torch.is_tensor(expected)
    for out in others:
        torch.testing.assert_close(out, expected, rtol=0.0, atol=0.1)
        assert not torch.equal(out, expected)


@pytest.mark.parametrize("what", fp8_cache.MODES)
def test_what_is_appended_can_be_read(what: str) -> None:
    caches = decode.Caches(TINY.group("cpu"))
    tables = fp8_cache.RotaryGroup(40, 16, False, "cpu").tables()
    (expected,), (target,) = (fp8_cache.append_targets(caches, x) for x in (WIDE, what))
    for one in (expected, target):
        fp8_cache.appending(caches, [one], tables)(0)
    torch.testing.assert_close(expected["v_cache"][:, :40], caches.v[0, :, :40])
    for name in "kv":
        scale = target[f"{name}_descale"]
        scale = scale[..., None] if what == HEAD else scale[:, :40, :, None]
        found = target[f"{name}_cache"][:, :40].float() * scale
        torch.testing.assert_close(
            found, expected[f"{name}_cache"][:, :40].float(), rtol=0.07, atol=0.01
        )


def test_fa3_gets_scales_of_queries_and_of_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    caches = decode.Caches(TINY.group("cpu"))
    quantized = fp8_cache.Quantized.of(caches.k, caches.v, HEAD)
    with pytest.raises(Unsupported, match="CUDA devices only"):
        fp8_cache.fa3_e4m3(caches, quantized)
    given = {}

    def attend(q: torch.Tensor, *_: torch.Tensor, **descales: torch.Tensor) -> None:
        given.update(descales, q=q)

    monkeypatch.setattr(fp8_cache, "fa3_attend", lambda group: attend)
    fp8_cache.fa3_e4m3(caches, quantized)(0)
    q = given.pop("q").float() * given["q_descale"][0, 0]
    torch.testing.assert_close(q, caches.q[0].float(), rtol=0.07, atol=0.01)
    assert {x.shape for x in given.values()} == {(2, 2)} and len(given) == 3


def test_shapes_of_the_parts() -> None:
    options = fp8_cache.parse_arguments(["--device", "cpu"])
    assert [str(shape) for shape in fp8_cache.shapes("decode", options)] == [
        *("B32 S4k 32/8 d128", "B128 S8k 32/8 d128", "B1 S8k 32/8 d128", "B1 S64k 32/8 d128"),
        *("B32 S8k 16/2 d256", "B32 S8k 32/8 d64", "B8 S8k 32/4 d512"),
    ]
    options = fp8_cache.parse_arguments(["--device", "cpu", "--quick"])
    assert [len(fp8_cache.shapes(part, options)) for part in fp8_cache.PARTS] == [1, 1, 1]
    with pytest.raises(SystemExit):
        fp8_cache.parse_arguments(["--shape", "1,2,3"])
