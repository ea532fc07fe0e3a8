"""Folders that tests of the build make: a copy of the project to build, with setup.py or as a front
end does, without a compiler, and headers of CUTLASS.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

from build_tools.build_extension import BACKEND_VARIABLE, CHOICE_NAME

REPO = Path(__file__).resolve().parents[2]
EXTENSION = f"_C{sysconfig.get_config_var('EXT_SUFFIX')}"
BUILT_ELSEWHERE = ("build", "dist", "include", "__pycache__", ".*", "*.egg-info", "_C.*.so")

# Put behind the definitions that it replaces.
BUILD_WITHOUT_COMPILER = """

_chosen = choose_backend


def choose_backend() -> Choice:
    return Choice(Backend.cuda, "a test") if os.environ[BACKEND_VARIABLE] == "auto" else _chosen()


def build(*options: object) -> Path:
    path = REPO / "not_an_extension.so"
    path.touch()
    return path
"""


def _has_setuptools() -> bool:
    """Asked without an import, which this late may fail: something else imported distutils."""
    try:
        numbers = re.findall(r"\d+", version("setuptools"))
    except PackageNotFoundError:
        return False
    return list(map(int, numbers)) >= [77, 0, 3]


def copy_tree(folder: Path) -> Path:
    """The project as it is checked out, whose builds have an empty file for an extension; skips the
    test where nothing can be built.
    """
    if not _has_setuptools():
        pytest.skip("needs setuptools 77.0.3")
    ignored = shutil.ignore_patterns(*BUILT_ELSEWHERE, CHOICE_NAME)
    tree = Path(shutil.copytree(REPO, folder / "tree", ignore=ignored))
    with (tree / "build_tools/build_extension.py").open("a") as file:
        file.write(BUILD_WITHOUT_COMPILER)
    return tree


def pretend_torch(folder: Path, release: str, cuda: str | None) -> Path:
    """A folder for PYTHONPATH, with a torch that has nothing but versions."""
    package = folder / f"torch_{release}" / "torch"
    package.mkdir(parents=True)
    (package / "version.py").write_text(f"cuda = {cuda!r}\n")
    (package / "__init__.py").write_text(f"from . import version\n__version__ = {release!r}\n")
    return package.parent


def hide_torch(folder: Path) -> Path:
    """A folder for PYTHONPATH, with a torch that cannot be imported."""
    (folder / "torch.py").write_text("raise ImportError('no torch is needed here')\n")
    return folder


def python(
    tree: Path, *arguments: str, backend: str = "auto", path: Sequence[Path] = ()
) -> subprocess.CompletedProcess[str]:
    """This Python in ``tree``, with ``path`` before its own packages."""
    variables = {BACKEND_VARIABLE: backend}
    if path:
        variables["PYTHONPATH"] = os.pathsep.join(map(str, path))
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=tree,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
    )


def cutlass_headers(folder: Path, version: str = "4.2.0") -> Path:
    """A folder that says that it has the headers of this version of CUTLASS."""
    (folder / "cutlass").mkdir(parents=True, exist_ok=True)
    parts = zip(("MAJOR", "MINOR", "PATCH"), version.split("."), strict=True)
    text = "".join(f"#define CUTLASS_{part} {number}\n" for part, number in parts)
    (folder / "cutlass/version.h").write_text(text)
    return folder


def empty_wheel(folder: Path, name: str) -> Path:
    """A wheel of this name and version that has metadata alone."""
    path = folder / f"{name}-py3-none-any.whl"
    distribution, version = name.split("-")
    files = {
        "METADATA": f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n",
        "WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "RECORD": "",
    }
    with zipfile.ZipFile(path, "w") as archive:
        for file, text in files.items():
            archive.writestr(f"{name}.dist-info/{file}", text)
    return path
