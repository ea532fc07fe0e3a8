"""Lists of compiles, written as a ninja file and as compile_commands.json, and run."""

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
from itertools import chain
from pathlib import Path

from build_tools.compile import toolchain
from build_tools.compile.jobs import LAUNCHER_VARIABLE, write_if_changed

REPO = Path(__file__).resolve().parents[2]
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
class Product:
    """The compiles of a folder, which others must be kept out of (``locked``), and their link."""

    folder: Path
    compiles: Sequence[Compile]
    link: Link

    @property
    def objects(self) -> list[Path]:
        return [job.object for job in self.compiles]

    def is_compiled(self) -> bool:
        """After a build: a compile that fails leaves no object."""
        return all(path.exists() for path in self.objects)


@dataclass(frozen=True)
class Cost:
    """What the compiles of a build cost: their own figures when they last ran for real."""

    cpu_seconds: float
    peak_bytes: int
    never_measured: int  # compiles that ccache answered and that never ran here


def write_ninja_file(path: Path, products: Sequence[Product]) -> None:
    """Writes ``path``; every compile goes through jobs.py.

    ninja begins with what most steps wait for (1.12 and newer), of those with what comes first in
    the file. So that the compiles of all products begin in their order, links of later products
    wait for the objects of earlier ones.
    """
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
        for job in chain.from_iterable(product.compiles for product in products):
            variables = {"compiler": shlex.join(job.full_command()).replace("$", "$$")}
            writer.build([str(job.object)], "compile", [str(job.source)], variables=variables)
        earlier: list[str] = []
        for place, product in enumerate(products):
            link, objects = product.link, list(map(str, product.objects))
            command = f"{link.command} && mv $out.new $out"
            writer.rule(f"link{place}", command, description="link $out")
            inputs = list(map(str, link.inputs))
            writer.build([str(link.target)], f"link{place}", objects, inputs, order_only=earlier)
            earlier += objects
        write_if_changed(path, text.getvalue())


def write_compile_commands(path: Path, compiles: Iterable[Compile], directory: Path) -> None:
    """The database that editors and clang tools read: the compilers' own commands, no wrapper."""
    shared = {"directory": str(directory)}
    entries = [
        {**shared, "file": str(job.source), "arguments": job.full_command()} for job in compiles
    ]
    write_if_changed(path, json.dumps(entries, indent=1))


def run_ninja(path: Path, jobs: int, directory: Path) -> None:
    """Runs the build from ``directory``, which ninja's log is in; BuildError where one fails."""
    command = [toolchain.find_ninja(), "-f", str(path), "-j", str(jobs)]
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


def build(products: Sequence[Product], jobs: int) -> None:
    """Brings products up to date in one run of ninja, with ccache where it is present: those that
    read others before those, whose compiles begin in this order.

    ninja's log is in the last one's folder, which builds of others may share.
    """
    toolchain.find_ninja()  # before a file is written
    for product in products:
        discard_damaged([*product.objects, product.link.target])
        database = product.folder / "compile_commands.json"
        write_compile_commands(database, product.compiles, product.folder)
    ninja_file = products[0].folder / "build.ninja"
    write_ninja_file(ninja_file, products)
    run_ninja(ninja_file, jobs, products[-1].folder)
    for target in (product.link.target for product in products):
        write_if_changed(_record_of(target), json.dumps({"bytes": target.stat().st_size}))


def total_cost(compiles: Iterable[Compile]) -> Cost:
    records = [json.loads(_record_of(job.object).read_text()) for job in compiles]
    return Cost(
        cpu_seconds=sum(record["cpu_seconds"] for record in records),
        peak_bytes=max((record["peak_bytes"] for record in records), default=0),
        never_measured=sum(record["cached"] for record in records),
    )
