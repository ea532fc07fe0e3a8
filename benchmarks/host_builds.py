"""Host time of one small call in several builds of this package, as host_overhead.py measures it.

    python benchmarks/host_builds.py fa64286=../before now=. --json host_builds.json

A build is a name, such as its commit, and the folder that has its flash_attn_cuda. Every turn is a
process of its own, as one cannot hold two builds; turns go A B B A. What else the machine does
makes whole processes slower: builds are compared by the least of their turns, and the median is
told beside it.
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

from documents import COMMIT_VARIABLE, command_output

BENCHMARK = Path(__file__).with_name("host_overhead.py")
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
    commit = command_output("git", "-C", str(folder), "rev-parse", "HEAD") or name
    path = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))
    with tempfile.TemporaryDirectory() as directory:
        result = Path(directory) / "result.json"
        subprocess.run(
            [sys.executable, str(BENCHMARK), *options, "--json", str(result)],
            env={**os.environ, "PYTHONPATH": path, COMMIT_VARIABLE: commit},
            stdout=subprocess.DEVNULL,
            check=True,
        )
        document: dict[str, Any] = json.loads(result.read_text())
    return document


def take_turns(
    builds: dict[str, Path], rounds: int, options: Sequence[str]
) -> Iterator[tuple[str, dict[str, Any]]]:
    for number in range(rounds):
        names = list(builds) if number % 2 == 0 else list(reversed(builds))
        for name in names:
            yield name, run(name, builds[name], options)


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


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("builds", nargs="+", type=build, metavar="NAME=FOLDER")
    parser.add_argument("--backends", nargs="+", default=["ours", "ours_varlen", "ours_cache"])
    parser.add_argument("--rounds", type=int, default=4, help="default: %(default)s")
    parser.add_argument("--device", help="as host_overhead.py's")
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
    documents: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    for name, document in take_turns(builds, options.rounds, passed_on):
        documents[name].append(document)
    results = [entry for name in builds for entry in summary(name, documents[name])]
    for entry in sorted(results, key=lambda x: (x["mode"], x["backend"])):
        print(
            f"{entry['mode']:10} {entry['backend']:12} {entry['build']:10} "
            f"least {entry['least_us']:.1f} us, median {entry['median_us']:.1f} us"
        )
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        command = ["python", "benchmarks/host_builds.py", *(arguments or sys.argv[1:])]
        first = documents[next(iter(builds))][0]
        document = {
            "schema": SCHEMA,
            "command": shlex.join(command),
            "case": first["case"],
            "environments": {name: documents[name][0]["environment"] for name in builds},
            "results": results,
        }
        options.json.write_text(json.dumps(document, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
