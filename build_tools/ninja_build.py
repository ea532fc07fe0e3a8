"""A list of compiles, written as a ninja file and as compile_commands.json, and run."""

from __future__ import annotations

import fcntl
import io
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from build_tools import toolchain
from build_tools.generate_units import write_if_changed

REPO = Path(__file__).resolve().parent.parent
RUN_JOB = Path(__file__).with_name("run_job.py")


class BuildError(RuntimeError):
    """A compile or link failed; the compiler's messages are on the terminal."""


@dataclass(frozen=True)
class Compile:
    """One source to one object, by ``command`` with those two and a dependency file added."""

    source: Path
    object: Path
    command: tuple[str, ...]

    def full_command(self) -> list[str]:
        depfile = ["-MD", "-MF", f"{self.object}.d"]
        return [*self.command, *depfile, "-c", str(self.source), "-o", str(self.object)]


@dataclass(frozen=True)
class Link:
    """All objects to one file: a shell command of ``$in`` and ``$out.new``, reading ``inputs`` too.

    The file gets its name when it is whole: another build may read the one that was there.
    """

    target: Path
    command: str
    inputs: tuple[Path, ...] = ()


@dataclass(frozen=True)
class Cost:
    """What the compiles of a build cost: their own figures when they last ran for real."""

    cpu_seconds: float
    peak_bytes: int
    never_measured: int  # compiles that ccache answered and that never ran here


def write_ninja_file(
    path: Path, compiles: Sequence[Compile], link: Link, launcher: Sequence[str]
) -> None:
    """Writes ``path``; every compile goes through run_job and ``launcher`` (ccache or nothing)."""
    from ninja import ninja_syntax  # not above: an install without extension needs no ninja

    with io.StringIO() as text:
        writer = ninja_syntax.Writer(text, width=10_000)  # type: ignore[arg-type]  # any text file
        writer.variable("ninja_required_version", "1.5")
        wrapped = shlex.join([sys.executable, str(RUN_JOB)])
        writer.rule(
            "compile",
            command=f"{wrapped} $out -- $compiler",
            depfile="$out.d",
            deps="gcc",
            description="compile $in",
        )
        writer.rule("link", command=f"{link.command} && mv $out.new $out", description="link $out")
        for job in compiles:
            obj, source = [str(job.object)], [str(job.source)]
            command = shlex.join([*launcher, *job.full_command()]).replace("$", "$$")
            writer.build(obj, "compile", source, variables={"compiler": command})
        objects = [str(job.object) for job in compiles]
        writer.build([str(link.target)], "link", objects, implicit=list(map(str, link.inputs)))
        write_if_changed(path, text.getvalue())


def write_compile_commands(path: Path, compiles: Iterable[Compile], directory: Path) -> None:
    """The database that editors and clang tools read: the compilers' own commands, no wrapper."""
    shared = {"directory": str(directory)}
    entries = [
        {**shared, "file": str(job.source), "arguments": job.full_command()} for job in compiles
    ]
    write_if_changed(path, json.dumps(entries, indent=1))


def run_ninja(path: Path, jobs: int, directory: Path) -> None:
    """Runs the build from ``directory``; BuildError when a command fails."""
    command = [toolchain.find_ninja(), "-f", str(path), "-j", str(jobs)]
    # So that ccache knows the same sources in another checkout.
    environment = {"CCACHE_BASEDIR": str(REPO), **os.environ}
    result = subprocess.run(command, cwd=directory, env=environment)
    if result.returncode:
        raise BuildError(f"ninja -f {path}: status {result.returncode}, the errors are above")


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keeps other builds out of ``folder``; waits, and says so, while there is one."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waiting = f"flash_attn_cuda: waiting for another build in {folder}"
            print(waiting, file=sys.stderr, flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def build(folder: Path, compiles: Sequence[Compile], link: Link, jobs: int) -> None:
    """Brings ``link.target`` up to date, working in ``folder``, with ccache where it is present."""
    toolchain.find_ninja()  # before a file is written
    launcher = [ccache] if (ccache := shutil.which("ccache")) else []
    ninja_file = folder / "build.ninja"
    write_ninja_file(ninja_file, compiles, link, launcher)
    write_compile_commands(folder / "compile_commands.json", compiles, folder)
    run_ninja(ninja_file, jobs, folder)


def total_cost(compiles: Iterable[Compile]) -> Cost:
    records = [json.loads(Path(f"{job.object}.json").read_text()) for job in compiles]
    return Cost(
        cpu_seconds=sum(record["cpu_seconds"] for record in records),
        peak_bytes=max((record["peak_bytes"] for record in records), default=0),
        never_measured=sum(record["cached"] for record in records),
    )
