"""Host time of one small call in several builds of this package, as host_overhead measures it.

    python -m benchmarks.suites.host_builds fa64286=../before now=. --json host_builds.json

A build is its commit, or another name, and the folder that has its flash_attn_cuda. Every turn is a
process of its own, as one cannot hold two builds; turns go A B B A. What else the machine does
makes whole processes slower: builds are compared by the least of their turns, and the median is
told beside it. The JSON is written anew after every round.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.core.documents import COMMIT_VARIABLE, json_text

ROOT = Path(__file__).resolve().parents[2]
BENCHMARK = "benchmarks.suites.host_overhead"
SCHEMA = 1
Key = tuple[str, str]  # mode, backend


def build(text: str) -> tuple[str, Path]:
    name, equals, folder = text.partition("=")
    path = Path(folder).resolve()
    if not name or not equals or not (path / "flash_attn_cuda").is_dir():
        raise argparse.ArgumentTypeError(
            f"NAME=FOLDER with a FOLDER that has flash_attn_cuda, got {text!r}"
        )
    return name, path


def run(name: str, folder: Path, options: Sequence[str]) -> dict[str, Any]:
    """The document of host_overhead.py with the folder's build."""
    path = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))
    with tempfile.TemporaryDirectory() as directory:
        result = Path(directory) / "result.json"
        subprocess.run(
            [sys.executable, "-m", BENCHMARK, *options, "--json", str(result)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": path, COMMIT_VARIABLE: name},
            stdout=subprocess.DEVNULL,
            check=True,
        )
        document: dict[str, Any] = json.loads(result.read_text())
    return document


def summary(name: str, documents: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Of a build, an entry for each mode and backend that it measured."""
    turns: defaultdict[Key, list[float]] = defaultdict(list)
    for document in documents:
        for entry in document["results"]:
            if entry["status"] == "ok":
                turns[entry["mode"], entry["backend"]].append(entry["median_us"])
    for (mode, backend), medians in turns.items():
        yield {
            "build": name,
            "mode": mode,
            "backend": backend,
            "least_us": min(medians),
            "median_us": median(medians),
            "turns_us": medians,
        }


def as_document(
    command: str, documents: dict[str, list[dict[str, Any]]], results: list[dict[str, Any]]
) -> dict[str, Any]:
    environments = {name: made[0]["environment"] for name, made in documents.items()}
    for facts in environments.values():
        facts.pop("uncommitted_changes", None)  # of the folder of this program, not the build's
    case = next(iter(documents.values()))[0]["case"]
    return {
        "schema": SCHEMA,
        "command": command,
        "case": case,
        "environments": environments,
        "results": results,
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("builds", nargs="+", type=build, metavar="NAME=FOLDER")
    parser.add_argument("--backends", nargs="+", default=["ours", "ours_varlen", "ours_cache"])
    parser.add_argument("--rounds", type=int, default=4, help="default: %(default)s")
    parser.add_argument("--device", help="as host_overhead's")
    parser.add_argument("--batches", type=int, default=50, help="of a turn, at least")
    parser.add_argument("--calls", type=int, default=100, help="of a batch")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    builds = dict(options.builds)
    if len(builds) < len(options.builds):
        parser.error("builds: names must differ")

    passed_on = ["--backends", *options.backends]
    passed_on += ["--batches", str(options.batches), "--calls", str(options.calls)]
    passed_on += ["--device", options.device] if options.device else []
    command = ["python", "-m", "benchmarks.suites.host_builds", *(arguments or sys.argv[1:])]
    documents: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    results: list[dict[str, Any]] = []
    for number in range(options.rounds):
        for name in list(builds) if number % 2 == 0 else list(reversed(builds)):
            documents[name].append(run(name, builds[name], passed_on))
        results = [entry for name in builds for entry in summary(name, documents[name])]
        if options.json:
            options.json.parent.mkdir(parents=True, exist_ok=True)
            document = as_document(shlex.join(command), documents, results)
            options.json.write_text(json_text(document))
    for entry in sorted(results, key=lambda x: (x["mode"], x["backend"])):
        print(
            f"{entry['mode']:10} {entry['backend']:12} {entry['build']:10} "
            f"least {entry['least_us']:.1f} us, median {entry['median_us']:.1f} us"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
