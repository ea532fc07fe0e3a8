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
from build_tools.jobs import LAUNCHER_VARIABLE

REPO = Path(__file__).resolve().parent.parent
RUN_JOB = Path(__file__).with_name("jobs.py")
# The Python that starts compiles. By a variable, as ninja runs again what has another command: a
# second environment is to compile nothing.
PYTHON_VARIABLE = "FLASH_ATTN_CUDA_BUILD_PYTHON"


class BuildError(RuntimeError):
    """A compile or link failed; the compiler's messages are on the terminal."""

    def __init__(self, ninja_file: Path, status: int) -> None:
        super().__init__(f"ninja -f {ninja_file}: status {status}, the errors are above")


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


def write_ninja_file(path: Path, compiles: Sequence[Compile], link: Link) -> None:
    """Writes ``path``; every compile goes through jobs.py."""
    from ninja import ninja_syntax  # not above: an install without extension needs no ninja

    with io.StringIO() as text:
        writer = ninja_syntax.Writer(text, width=10_000)  # type: ignore[arg-type]  # any text file
        writer.variable("ninja_required_version", "1.5")
        writer.rule(
            "compile",
            command=f'"$${PYTHON_VARIABLE}" {shlex.quote(str(RUN_JOB))} $out -- $compiler',
            depfile="$out.d",
            deps="gcc",
            description="compile $in",
        )
        writer.rule("link", command=f"{link.command} && mv $out.new $out", description="link $out")
        for job in compiles:
            obj, source = [str(job.object)], [str(job.source)]
            command = shlex.join(job.full_command()).replace("$", "$$")
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


def run_ninja(path: Path, jobs: int, directory: Path, targets: Iterable[Path] = ()) -> None:
    """Runs the build from ``directory``, of all or of ``targets``; BuildError where one fails."""
    command = [toolchain.find_ninja(), "-f", str(path), "-j", str(jobs), *map(str, targets)]
    launcher = [ccache] if (ccache := shutil.which("ccache")) else []
    environment = {
        "CCACHE_BASEDIR": str(REPO),  # so that ccache knows the same sources in another checkout
        **os.environ,
        PYTHON_VARIABLE: sys.executable,
        LAUNCHER_VARIABLE: shlex.join(launcher),
    }
    result = subprocess.run(command, cwd=directory, env=environment)
    if result.returncode:
        raise BuildError(path, result.returncode)


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


def _record_of(product: Path) -> Path:
    return product.with_name(f"{product.name}.json")


def discard_damaged(products: Iterable[Path]) -> None:
    """Removes objects, archives and extensions that are not of the size that they were made with,
    after a disk that was full or a machine that went down, so that ninja makes them again.
    """
    for product in products:
        if not product.is_file():
            continue
        try:
            is_whole = (
                json.loads(_record_of(product).read_text())["bytes"] == product.stat().st_size
            )
        except (OSError, ValueError, KeyError):
            is_whole = False
        if not is_whole:
            product.unlink()


@dataclass(frozen=True)
class Build:
    """The compiles and the link of one folder, which others must be kept out of (``locked``)."""

    folder: Path
    compiles: Sequence[Compile]
    link: Link
    jobs: int

    @property
    def _ninja_file(self) -> Path:
        return self.folder / "build.ninja"

    @property
    def _objects(self) -> list[Path]:
        return [job.object for job in self.compiles]

    def _prepare(self) -> None:
        toolchain.find_ninja()  # before a file is written
        discard_damaged([*self._objects, self.link.target])
        write_ninja_file(self._ninja_file, self.compiles, self.link)
        write_compile_commands(self.folder / "compile_commands.json", self.compiles, self.folder)

    def compile(self) -> None:
        """Brings the objects up to date, with ccache where it is present."""
        self._prepare()
        run_ninja(self._ninja_file, self.jobs, self.folder, self._objects)

    def finish(self) -> None:
        """Brings objects and link up to date."""
        self._prepare()
        run_ninja(self._ninja_file, self.jobs, self.folder)
        target = self.link.target
        write_if_changed(_record_of(target), json.dumps({"bytes": target.stat().st_size}))


def total_cost(compiles: Iterable[Compile]) -> Cost:
    records = [json.loads(_record_of(job.object).read_text()) for job in compiles]
    return Cost(
        cpu_seconds=sum(record["cpu_seconds"] for record in records),
        peak_bytes=max((record["peak_bytes"] for record in records), default=0),
        never_measured=sum(record["cached"] for record in records),
    )
