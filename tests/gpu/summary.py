"""Writes what a GPU test run showed: device, versions, commit, counts, duration, worst errors.

    pytest tests -m gpu --gpu-summary=tests/gpu_results

makes <device>.json and <device>.md there. Works under pytest-xdist: errors travel as user
properties of the reports. sanitize_all.py adds what compute-sanitizer found at the same commit.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.reference.tolerance import Closeness

_PROPERTY = "closeness"
_COMMIT_VARIABLE = "FLASH_ATTN_CUDA_COMMIT"  # for a copy of the sources without their repository
_DRIVER_VERSION = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "-i", "0"]


def add_option(parser: pytest.Parser) -> None:
    parser.addoption(
        "--gpu-summary",
        metavar="DIRECTORY",
        type=Path,
        help="write the summary of the gpu tests of this run to this directory",
    )


def register(config: pytest.Config) -> None:
    """Collect reports where the option is given, in the process that sees all of them."""
    directory = config.getoption("--gpu-summary")
    if directory is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(SummaryPlugin(directory, config.rootpath), "gpu-summary")


def record(item: pytest.Item, case: str, report: Iterable[Closeness]) -> None:
    """Attach the errors of one comparison to the test that made it."""
    item.user_properties.append((_PROPERTY, [{"case": case, **each.as_dict()} for each in report]))


@dataclass
class SummaryPlugin:
    """Gathers the reports of tests with the `gpu` marker and writes them out at the end."""

    directory: Path
    root: Path
    started: float = field(default_factory=time.monotonic)
    outcomes: Counter[str] = field(default_factory=Counter)
    skip_reasons: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    comparisons: int = 0
    worst: dict[str, dict[str, Any]] = field(default_factory=dict)  # by "<tensor> <statistic>"

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if "gpu" not in report.keywords:
            return
        if report.when == "call" or not report.passed:
            # What fails around a test is an error, as pytest says: a bad length that its kernels
            # met is found behind it.
            is_error = report.failed and report.when != "call"
            self.outcomes["error" if is_error else report.outcome] += 1
            if report.failed:
                at = f" ({report.when})" if is_error else ""
                self.failures.append(report.nodeid + at)
            if report.skipped:
                self.skip_reasons[skip_reason(report)] += 1
        if report.when == "call":
            for name, comparison in report.user_properties:
                if name == _PROPERTY:
                    self._add(comparison)

    def pytest_sessionfinish(self) -> None:
        if not self.outcomes:
            return
        write(self.directory, self.summary())

    def _add(self, comparison: list[dict[str, Any]]) -> None:
        self.comparisons += 1
        for entry in comparison:
            for statistic in ("max", "mean"):
                key, ratio = f"{entry['name']} {statistic}", entry[f"{statistic}_ratio"]
                if key not in self.worst or ratio > self.worst[key]["ratio"]:
                    error = entry[f"{statistic}_error"]
                    self.worst[key] = {"ratio": ratio, "error": error, "case": entry["case"]}

    def summary(self) -> dict[str, Any]:
        return {
            **environment(self.root),
            "outcomes": dict(self.outcomes),
            "skip_reasons": dict(self.skip_reasons),
            "failures": self.failures,
            "seconds": round(time.monotonic() - self.started, 1),
            "comparisons": self.comparisons,
            "worst": dict(sorted(self.worst.items())),
        }


def _path(directory: Path, device: str) -> Path:
    return directory / f"{device.lower().replace(' ', '-')}.json"


def write(directory: Path, summary: dict[str, Any]) -> None:
    """As JSON and, for people, as Markdown beside it."""
    path = _path(directory, summary["device"])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(summary, indent=2) + "\n")
    path.with_suffix(".md").write_text(as_markdown(summary))


def add_sanitizer(directory: Path, verdicts: list[dict[str, Any]]) -> None:
    """Puts compute-sanitizer's verdicts into the summary of this device's tests, which must be of
    the same commit: two of different ones would not belong together. What is there of other tools
    and families stays.
    """
    here = environment(Path(__file__).resolve().parents[2])
    path = _path(directory, here["device"])
    summary = json.loads(path.read_text()) if path.is_file() else {**here, "outcomes": {}}
    if summary["commit"] != here["commit"]:
        raise ValueError(f"{path}: expected a summary of {here['commit']}, got {summary['commit']}")
    by_run = {
        (verdict["tool"], verdict["family"]): verdict
        for verdict in (*summary.get("sanitizer", ()), *verdicts)
    }
    write(directory, {**summary, "sanitizer": list(by_run.values())})


def _device() -> str:
    """The GPU's name, and how many of them there are where tests could use more than one."""
    name, count = torch.cuda.get_device_name(), torch.cuda.device_count()
    return name if count == 1 else f"{count} x {name}"


def environment(root: Path) -> dict[str, Any]:
    """What the figures were measured with."""
    cuda = torch.cuda.is_available()
    return {
        "device": _device() if cuda else f"CPU backend {platform.machine()}",
        "driver": _output(_DRIVER_VERSION) if cuda else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "build": _build(),
        "commit": os.environ.get(_COMMIT_VARIABLE)
        or _output(["git", "-C", str(root), "rev-parse", "HEAD"]),
        "uncommitted_changes": _COMMIT_VARIABLE not in os.environ
        and bool(_output(["git", "-C", str(root), "status", "--porcelain"])),
        "date": time.strftime("%Y-%m-%d"),
    }


def _build() -> dict[str, Any]:
    from flash_attn_cuda.installed import build_info

    record = build_info.build_record()
    facts = {key: value for key, value in record.items() if key != "instances"}
    return {**facts, "kernels": len(build_info.compiled_rows())}


def _output(command: list[str]) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def skip_reason(report: pytest.TestReport) -> str:
    is_location = isinstance(report.longrepr, tuple | list)  # (file, line, reason)
    text = report.longrepr[2] if is_location else str(report.longrepr)
    return text.removeprefix("Skipped: ")


def as_markdown(summary: dict[str, Any]) -> str:
    """The summary for people."""
    versions = ", ".join(
        f"{name} {summary[name]}" for name in ("python", "torch", "cuda", "driver")
    )
    changes = " with uncommitted changes" if summary["uncommitted_changes"] else ""
    lines = [
        f"# GPU tests on {summary['device']}",
        "",
        f"- commit {summary['commit']}{changes}, {summary['date']}",
        f"- {versions}",
        f"- build: {', '.join(f'{key} {value}' for key, value in summary['build'].items())}",
    ]
    if summary["outcomes"]:
        lines += _tests_as_markdown(summary)
    if "sanitizer" in summary:
        lines += _sanitizer_as_markdown(summary["sanitizer"])
    return "\n".join(lines) + "\n"


def _tests_as_markdown(summary: dict[str, Any]) -> list[str]:
    outcomes = ", ".join(f"{count} {outcome}" for outcome, count in summary["outcomes"].items())
    lines = [
        "",
        f"{outcomes} in {summary['seconds']} s, "
        f"{summary['comparisons']} comparisons with the fp64 reference.",
        "",
        "Worst errors, as a share of what is allowed (tests/reference/tolerance.py):",
        "",
        "| tensor | share | error | case |",
        "| --- | --- | --- | --- |",
    ]
    for key, entry in summary["worst"].items():
        lines.append(f"| {key} | {entry['ratio']:.2f} | {entry['error']:.3g} | {entry['case']} |")
    skips = [f"{count} x {reason}" for reason, count in summary["skip_reasons"].items()]
    for title, entries in (("Failures", summary["failures"]), ("Skipped", skips)):
        if entries:
            lines += ["", f"{title}:", "", *(f"- {entry}" for entry in entries)]
    return lines


def _sanitizer_as_markdown(verdicts: list[dict[str, Any]]) -> list[str]:
    lines = [
        "",
        "compute-sanitizer over the calls of tests/sanitizer/sanitize.py (sanitize_all.py says "
        "which tool can judge what):",
        "",
        "| tool | kernels | calls | wrong results | findings | seconds |",
        "| --- | --- | ---: | ---: | ---: | ---: |",
    ]
    for verdict in verdicts:
        shares = verdict["unfinished_shares"]
        calls = f"{verdict['calls']}{f', {shares} shares stopped' if shares else ''}"
        cells = (verdict["tool"], verdict["family"], calls, verdict["wrong_results"])
        cells += (verdict["findings"], verdict["seconds"])
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return lines
