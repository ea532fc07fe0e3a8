"""What is counted of compute-sanitizer's runs, with a stand-in for it and for the calls."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from tests.cases.attention import AttentionCase
from tests.gpu import summary as gpu_summary
from tests.sanitizer import sanitize_all
from tests.sanitizer.cases import derivative_cases, of_one_head, with_most_heads
from tests.sanitizer.sanitize_all import Run

CALLS = """
import sys
share = sys.argv[sys.argv.index("--share") + 1]
print("a warning: of torch")
print(f"case {share}: right")
wrong = "--wrong" in sys.argv
print("case 2: out is off" if wrong else "case 2: right")
if "--sleep" in sys.argv:
    import time
    sys.stdout.flush()
    time.sleep(60)
print(f"sanitize: 2 calls on cuda, 7 compiled rows, {int(wrong)} wrong, 1 s")
sys.exit(1 if wrong else 0)
"""
SANITIZER = """#!/bin/sh
echo "options: $*"
tool=$2
while case $1 in --*) true;; *) false;; esac; do shift 2; done
"$@"
status=$?
case $tool in
  racecheck) echo "========= RACECHECK SUMMARY: 3 hazards displayed"; exit 99;;
  silent) exit 99;;
  *) echo "========= ERROR SUMMARY: 0 errors"; exit $status;;
esac
"""


@pytest.fixture
def stand_ins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    sanitizer = tmp_path / "bin/compute-sanitizer"
    sanitizer.parent.mkdir()
    sanitizer.write_text(SANITIZER)
    sanitizer.chmod(0o755)
    monkeypatch.setenv("PATH", str(sanitizer.parent), prepend=":")
    script = tmp_path / "calls.py"
    script.write_text(CALLS)
    monkeypatch.setattr(sanitize_all, "SANITIZE", (str(script),))
    return tmp_path


@pytest.mark.parametrize(
    ("tool", "options", "expected"),
    [
        ("memcheck", (), (6, 0, 0, True)),
        ("memcheck", ("--wrong",), (6, 3, 0, False)),
        ("racecheck", (), (6, 0, 9, False)),
        ("silent", (), (6, 0, 3, False)),  # of a sanitizer that died
    ],
)
def test_shares_are_added_up(stand_ins: Path, tool, options, expected) -> None:
    verdict = sanitize_all.judge(Run(tool, "sm80", {}, options), 3, stand_ins, seconds=60)
    found = (verdict.calls, verdict.wrong_results, verdict.findings, verdict.passed)
    assert found == expected
    assert verdict.unfinished_shares == 0


def test_a_tool_may_look_at_some_kernels_alone(stand_ins: Path) -> None:
    run = Run("memcheck", "sm80", {}, kernels_with="attention", kernels_without="decode")
    text, ended = sanitize_all.run_share(run, 1, 1, stand_ins, seconds=60)
    assert ended
    assert "--kernel-name kernel_substring=attention" in text
    assert "--kernel-name-exclude kernel_substring=decode" in text
    assert (
        "kernel-name"
        not in sanitize_all.run_share(Run("memcheck", "sm80", {}), 1, 1, stand_ins, seconds=60)[0]
    )


def test_what_did_not_end_has_not_passed(stand_ins: Path) -> None:
    run = Run("memcheck", "sm80", {}, ("--sleep",))
    verdict = sanitize_all.judge(run, 2, stand_ins, seconds=2)
    assert (verdict.calls, verdict.unfinished_shares, verdict.passed) == (4, 2, False)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_run_that_is_told_to_end_leaves_nothing_behind(
    stand_ins: Path, monkeypatch: pytest.MonkeyPatch, signum: signal.Signals
) -> None:
    monkeypatch.setattr(sanitize_all, "RUNS", (Run("memcheck", "sm80", {}, ("--sleep",)),))
    handler = signal.getsignal(signum)
    logs = stand_ins / "logs"
    timer = threading.Timer(2, os.kill, (os.getpid(), signum))
    timer.start()
    begun = time.monotonic()
    try:
        with pytest.raises(SystemExit) as ended:
            sanitize_all.main(
                ["--summary", str(stand_ins), "--logs", str(logs), "--processes", "2"]
            )
    finally:
        timer.cancel()
    assert ended.value.code == 128 + signum
    assert time.monotonic() - begun < 30  # not the minute that the calls sleep
    assert not sanitize_all.running
    assert signal.getsignal(signum) == handler
    assert len(list(logs.glob("*.log"))) == 2  # both had begun


def test_verdicts_join_the_summary_of_the_same_commit(
    stand_ins: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASH_ATTN_CUDA_COMMIT", "abc")
    monkeypatch.setattr(sanitize_all, "RUNS", (Run("memcheck", "as planned", {}),))
    arguments = ["--summary", str(tmp_path / "results"), "--logs", str(tmp_path / "logs")]
    assert sanitize_all.main([*arguments, "--processes", "2"]) == 0
    (file,) = (tmp_path / "results").glob("*.json")
    (verdict,) = json.loads(file.read_text())["sanitizer"]
    assert (verdict["tool"], verdict["calls"], verdict["findings"]) == ("memcheck", 4, 0)
    assert "| memcheck | as planned | 4 | 0 | 0 |" in file.with_suffix(".md").read_text()
    gpu_summary.add_sanitizer(tmp_path / "results", [verdict | {"tool": "racecheck"}])
    gpu_summary.add_sanitizer(tmp_path / "results", [verdict | {"calls": 5}])
    known = json.loads(file.read_text())["sanitizer"]
    assert [(each["tool"], each["calls"]) for each in known] == [("memcheck", 5), ("racecheck", 4)]
    monkeypatch.setenv("FLASH_ATTN_CUDA_COMMIT", "another")
    with pytest.raises(ValueError, match="expected a summary of another, got abc"):
        gpu_summary.add_sanitizer(tmp_path / "results", [verdict])


def test_fewer_heads_in_the_same_groups() -> None:
    many = AttentionCase(num_heads_q=280, num_heads_k=140)
    few = with_most_heads(many, 12)
    assert (few.num_heads_q, few.num_heads_k) == (12, 6)
    shared = with_most_heads(AttentionCase(num_heads_q=40, num_heads_k=2), 12)
    assert (shared.num_heads_q, shared.num_heads_k) == (20, 1)
    assert with_most_heads(many, None) is with_most_heads(many, 280) is many


def test_derivatives_of_one_head() -> None:
    for case in derivative_cases("cpu"):
        of = of_one_head(case).of
        assert (of.of.num_heads_q, of.of.num_heads_k) == (1, 1)
        assert not isinstance(of.of, AttentionCase) or of.of.batch == 1
        assert (of.mask, of.bias, of.sink) == (case.of.mask, case.of.bias, case.of.sink)
