"""setup.py and the Makefile: what an sdist and a wheel hold, what an editable install leaves."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

from build_tools.build_extension import BACKEND_VARIABLE, CHOICE_NAME
from tests.building import project_tree
from tests.building.project_tree import EXTENSION, REPO, setup


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of the project as it is checked out."""
    return project_tree.copy_tree(tmp_path)


def test_an_sdist_asks_for_no_backend_and_has_what_tests_need(tree: Path) -> None:
    result = setup(tree, "sdist", backend="never asked for")
    assert result.returncode == 0, result.stderr
    (path,) = tree.glob("dist/*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    left_out = ("benchmarks/results/", "tests/gpu_results/")
    assert not [name for name in names if name.startswith(left_out)]
    code = {
        path.relative_to(tree).as_posix()
        for folder in ("benchmarks", "build_tools", "csrc", "docs", "examples", "tests")
        for path in tree.glob(f"{folder}/**/*.*")
        if path.suffix in (".cpp", ".cu", ".h", ".json", ".md", ".py", ".sh", ".txt")
    }
    assert "tests/conftest.py" in code and "tests/host/main.cpp" in code
    assert [name for name in code - names if not name.startswith(left_out)] == []
    assert {"Makefile", "README.md", "third_party/cutlass/fetch.py"} <= names


def test_a_wheel_without_extension_says_why(tree: Path) -> None:
    """Also after a build with one: its file is still in the build folder."""
    platform = f"lib.{sysconfig.get_platform()}-{sys.implementation.cache_tag}"
    stale = tree / "build" / platform / "flash_attn_cuda" / EXTENSION
    stale.parent.mkdir(parents=True)
    stale.touch()
    result = setup(tree, "bdist_wheel", backend="cpu")
    assert result.returncode == 0, result.stderr
    assert "CPU backend only" in result.stderr
    (path,) = tree.glob("dist/*.whl")
    assert path.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(path) as wheel:
        names = wheel.namelist()
        record = json.loads(wheel.read(f"flash_attn_cuda/{CHOICE_NAME}"))
    assert record == {"backend": "cpu", "reason": f"{BACKEND_VARIABLE}=cpu"}
    assert "flash_attn_cuda/cpu/dense.py" in names
    assert not any(name.endswith(".so") for name in names)


def test_an_editable_install_without_extension_removes_an_old_one(tree: Path) -> None:
    package = tree / "flash_attn_cuda"
    (package / EXTENSION).touch()
    (package / "_C.another-python.so").touch()
    result = setup(tree, "build_ext", "--inplace", backend="cpu")
    assert result.returncode == 0, result.stderr
    assert [path.name for path in package.glob("_C.*.so")] == ["_C.another-python.so"]
    assert json.loads((package / CHOICE_NAME).read_text())["backend"] == "cpu"


def test_what_is_wrong_is_said_in_a_line(tree: Path) -> None:
    result = setup(tree, "bdist_wheel", backend="gpu")
    assert result.returncode == 1
    assert "Traceback" not in result.stderr
    assert (
        result.stderr.splitlines()[-1]
        == f"error: {BACKEND_VARIABLE}: expected one of auto, cuda, cpu, binding, got 'gpu'"
    )


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
@pytest.mark.parametrize(
    "goal",
    [
        *("demo", "test", "gpu-test", "sanitize", "kernels", "resource-report", "wheel"),
        *("lint", "format"),
    ],
)
def test_make_takes_a_python_whose_path_has_a_space(goal: str) -> None:
    command = ["make", "--dry-run", "PYTHON=/with a space/python", goal]
    result = subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=True)
    lines = [line for line in result.stdout.splitlines() if "python" in line]
    assert lines and all("/with a space/python" in shlex.split(line) for line in lines)


@pytest.mark.parametrize("version", ["69.5.1", "77.0.2"])
def test_an_old_setuptools_is_refused_with_what_to_install(version: str) -> None:
    script = (
        "import runpy, sys\n"
        "import setuptools\n"
        f"setuptools.__version__ = {version!r}\n"
        "sys.modules['setuptools.command.bdist_wheel'] = None\n"  # an import of it fails
        "sys.argv = ['setup.py', 'egg_info']\n"
        "runpy.run_path('setup.py')\n"
    )
    result = project_tree.python(REPO, "-c", script)
    assert result.returncode == 1
    assert (
        f"error: flash_attn_cuda builds with setuptools 77.0.3 or newer, not {version}: "
        "pip install 'setuptools>=77.0.3' 'ninja>=1.11'"
    ) in result.stderr
