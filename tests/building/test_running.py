"""Running compiles: what a job leaves, what is made again, and who waits for whom."""

from __future__ import annotations

import fcntl
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

pytest.importorskip("ninja")  # build_tools writes ninja files with the ninja package

from build_tools import build_kernels
from build_tools.compile import jobs, ninja_build, toolchain
from tests.building.kernel_rows import ROW
from tests.building.project_tree import cutlass_headers

REPO = Path(__file__).resolve().parents[2]


def compiler_of(script: str, target: Path) -> list[str]:
    """A command that runs a script and then writes four bytes to its last argument, the target."""
    write = "; import sys; open(sys.argv[-1], 'w').write('unit')"
    return [sys.executable, "-c", script + write, "-o", str(target)]


def test_a_job_keeps_its_log_and_its_cost(tmp_path, capsys) -> None:
    target = tmp_path / "unit.o"
    script = "print('ptxas info : x'); print('a warning'); sum(range(3_000_000))"
    assert jobs.run_job(target, compiler_of(script, target)) == 0
    assert capsys.readouterr().out == "a warning\n"
    assert (tmp_path / "unit.o.log").read_text() == "ptxas info : x\na warning\n"
    figures = json.loads((tmp_path / "unit.o.json").read_text())
    assert figures["peak_bytes"] > 1 << 20
    assert figures["cpu_seconds"] > 0
    assert figures["cached"] is False
    assert figures["bytes"] == target.stat().st_size == 4


def test_a_job_answered_by_ccache_keeps_the_figures_of_the_real_one(tmp_path) -> None:
    target = tmp_path / "unit.o"
    record = tmp_path / "unit.o.json"
    hit = "import os; open(os.environ['CCACHE_STATSLOG'], 'w').write('direct_cache_hit')"
    assert jobs.run_job(target, compiler_of(hit, target)) == 0
    assert json.loads(record.read_text())["cached"] is True
    assert jobs.run_job(target, compiler_of("pass", target)) == 0
    real = record.read_text()
    assert json.loads(real)["cached"] is False
    assert jobs.run_job(target, compiler_of(hit, target)) == 0
    assert record.read_text() == real


def test_a_failed_job_fails_and_shows_everything(tmp_path, capsys) -> None:
    target = tmp_path / "unit.o"
    script = "import sys; print('error: no'); open(sys.argv[-1], 'w').write('u'); sys.exit(3)"
    assert jobs.run_job(target, compiler_of(script, target)) == 3
    assert "error: no" in capsys.readouterr().out
    assert not (tmp_path / "unit.o.json").exists()
    assert not target.exists()  # of a compiler that leaves what it has
    target.write_text("of an earlier compile")
    assert jobs.run_job(target, compiler_of(script, target)) == 3
    assert not target.exists()


def test_a_job_that_cannot_write_says_so_in_a_line(tmp_path) -> None:
    """As on a full disk."""
    target = tmp_path / "absent" / "unit.o"
    command = [
        sys.executable,
        REPO / "build_tools/compile/jobs.py",
        target,
        "--",
        sys.executable,
        "-c",
        "",
    ]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 1
    assert re.fullmatch(r"error: .*unit\.o\.log.*\n", result.stderr)


@pytest.fixture
def host_build(tmp_path) -> Callable[[], Path]:
    """Builds an archive of one .cpp with one header, in a folder whose name has a space."""
    folder = tmp_path / "with space"
    folder.mkdir()
    (folder / "value.h").write_text("inline int value() { return 1; }\n")
    (folder / "unit.cpp").write_text('#include "value.h"\nint unit() { return value(); }\n')

    def build() -> Path:
        compiler = (toolchain.host_compiler(), "-O0")
        job = ninja_build.Compile(folder / "unit.cpp", folder / "out/unit.o", compiler)
        link = ninja_build.Link(folder / "out/lib.a", "rm -f $out.new && ar rcsD $out.new $in")
        (folder / "out").mkdir(exist_ok=True)
        ninja_build.build([ninja_build.Product(folder / "out", [job], link)], jobs=1)
        return link.target

    return build


def test_a_build_follows_headers_and_does_nothing_twice(host_build) -> None:
    archive = host_build()
    first = archive.stat().st_mtime_ns
    assert host_build().stat().st_mtime_ns == first
    (archive.parent.parent / "value.h").write_text("inline int value() { return 22; }\n")
    assert host_build().stat().st_mtime_ns > first
    (entry,) = json.loads((archive.parent / "compile_commands.json").read_text())
    assert entry["file"].endswith("unit.cpp")
    assert entry["arguments"][0] == toolchain.host_compiler()


def edges_to_run(build_folder: Path) -> list[str]:
    """What ninja would run now: a line for each compile and link."""
    command = [toolchain.find_ninja(), "-n", "-f", "build.ninja"]
    result = subprocess.run(command, cwd=build_folder, capture_output=True, text=True, check=True)
    return re.findall(r"^\[\d+/\d+\] (.*)$", result.stdout, flags=re.MULTILINE)


def test_another_environment_compiles_nothing(host_build, tmp_path, monkeypatch) -> None:
    """Another Python, with another ccache, has the same commands."""
    archive = host_build()
    python = tmp_path / "environment/bin/python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    ccache = python.with_name("ccache")
    ccache.write_text('#!/bin/sh\nexec "$@"\n')
    ccache.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    path = os.pathsep.join([str(python.parent), "/usr/bin", "/bin"])
    monkeypatch.setenv("PATH", path)
    made = archive.stat().st_mtime_ns
    assert host_build().stat().st_mtime_ns == made
    assert edges_to_run(archive.parent) == []
    (archive.parent.parent / "unit.cpp").touch()  # the count is not always none
    assert len(edges_to_run(archive.parent)) == 2


def test_a_build_that_was_interrupted_goes_on(host_build) -> None:
    """A compiler that was killed leaves part of an object behind, under no name that is linked."""
    archive = host_build()
    whole = archive.read_bytes()
    (archive.parent / "unit.o.new").write_bytes(b"half")
    (archive.parent / "unit.o").unlink()
    (archive.parent / "lib.a.new").write_bytes(b"half")
    assert host_build().read_bytes() == whole


def test_a_build_waits_for_another_one_in_its_folder(tmp_path, capsys) -> None:
    entered = threading.Event()

    def other_build() -> None:
        with ninja_build.locked(tmp_path / "build"):
            entered.set()

    other = threading.Thread(target=other_build)
    with ninja_build.locked(tmp_path / "build"):
        other.start()
        assert not entered.wait(0.3)
    assert entered.wait(10)
    other.join()
    assert f"waiting for another build in {tmp_path / 'build'}" in capsys.readouterr().err


def test_what_a_link_replaces_stays_whole_until_then(host_build) -> None:
    archive = host_build()
    with archive.open("rb") as reader:
        before = reader.read()
        (archive.parent.parent / "value.h").write_text("inline int value() { return 333; }\n")
        host_build()
        reader.seek(0)
        assert reader.read() == before
    assert archive.read_bytes() != before
    assert [path.name for path in archive.parent.glob("lib.a*.new")] == []


# Products of products: the extension and the kernels that it is linked with


@dataclass(frozen=True)
class TwoProducts:
    """Two libraries in folders of their own, of which the first is linked with the second. What
    compiles them says so in a file.
    """

    folder: Path

    @property
    def begun(self) -> list[str]:
        """The units whose compiles began since it was last asked, in their order."""
        file = self.folder / "begun"
        names = file.read_text().split() if file.exists() else []
        file.unlink(missing_ok=True)
        return names

    def product(self, name: str, units: Sequence[str], *inputs: Path) -> ninja_build.Product:
        folder = self.folder / name
        folder.mkdir(exist_ok=True)
        script = f"exec >> {self.folder}/begun; echo $(basename $5 .cpp)"
        compiler = ("sh", "-c", f'{script}; exec cc "$@"', "cc")
        compiles = []
        for unit in units:
            if not (source := folder / f"{unit}.cpp").exists():
                source.write_text(f"int {unit}() {{ return 1; }}\n")
            compiles.append(ninja_build.Compile(source, folder / f"{unit}.o", compiler))
        link = ninja_build.Link(folder / "lib.a", "rm -f $out.new && ar rcsD $out.new $in", inputs)
        return ninja_build.Product(folder, compiles, link)

    def build(self, name: str = "first", jobs: int = 1) -> ninja_build.Product:
        """The first product under this name; the second has more units than there are jobs."""
        second = self.product("second", ["c", "d", "e", "f"])
        first = self.product(name, ["a", "b"], second.link.target)
        ninja_build.build([first, second], jobs)
        return first


@pytest.fixture
def two_products(tmp_path) -> TwoProducts:
    return TwoProducts(tmp_path)


def test_compiles_of_several_products_begin_in_their_order(two_products) -> None:
    """Those of the first stand before those of what it is linked with."""
    first = two_products.build()
    assert two_products.begun == ["a", "b", "c", "d", "e", "f"]
    assert first.is_compiled() and first.link.target.is_file()
    two_products.build()
    assert two_products.begun == []


def test_another_first_product_leaves_the_second_alone(two_products) -> None:
    """As another torch does, which has an extension of its own; or a build of the second alone."""
    two_products.build()
    two_products.build("other")
    assert two_products.begun[6:] == ["a", "b"]
    two_products.build()
    ninja_build.build([two_products.product("second", ["c", "d", "e", "f"])], 1)
    assert two_products.begun == []
    (two_products.folder / "second/d.cpp").write_text("int d() { return 22; }\n")
    ninja_build.build([two_products.product("second", ["c", "d", "e", "f"])], 1)
    made = (two_products.folder / "first/lib.a").stat().st_mtime_ns
    assert two_products.build().link.target.stat().st_mtime_ns > made
    assert two_products.begun == ["d"]


def test_what_was_cut_short_of_any_product_is_made_again(two_products) -> None:
    two_products.build()
    for cut in ("first/a.o", "first/lib.a", "second/c.o", "second/lib.a"):
        damaged = two_products.folder / cut
        whole = damaged.read_bytes()
        damaged.write_bytes(whole[: len(whole) // 2])
        two_products.build()
        assert damaged.read_bytes() == whole, cut


@pytest.mark.parametrize(("product", "is_compiled"), [("first", False), ("second", True)])
def test_what_does_not_compile_ends_the_build(two_products, product, is_compiled) -> None:
    """Before what stands behind it begins; and one sees whose it was, though it compiled before."""
    first = two_products.build()
    assert len(two_products.begun) == 6
    for unit in [*first.compiles, *two_products.product("second", ["c", "d", "e", "f"]).compiles]:
        unit.source.write_text(f"{unit.source.read_text()}// changed\n")
    broken = two_products.folder / product / ("b.cpp" if product == "first" else "c.cpp")
    broken.write_text("#error no\n")
    with pytest.raises(ninja_build.BuildError, match="status"):
        two_products.build()
    assert two_products.begun == (["a", "b"] if product == "first" else ["a", "b", "c"])
    assert first.is_compiled() is is_compiled


@pytest.mark.skipif(toolchain.find_nvcc() is None, reason="needs nvcc")
def test_the_kernels_are_built_under_the_lock(tmp_path, monkeypatch) -> None:
    class Built(Exception):
        pass

    def build(products: Sequence[ninja_build.Product], jobs: int) -> None:
        (product,) = products
        with (product.folder / "lock").open("w") as file, pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        raise Built

    monkeypatch.setattr(ninja_build, "build", build)
    monkeypatch.setattr(toolchain, "find_cutlass", lambda: cutlass_headers(tmp_path / "include"))
    options = build_kernels.BuildOptions(archs="80", rows="", jobs=1, build_dir=tmp_path / "build")
    with pytest.raises(Built):
        build_kernels.build(options, table=[ROW])
