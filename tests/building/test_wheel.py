"""setup.py and the Makefile: what sdists, wheels and editable installs hold and say."""

from __future__ import annotations

import json
import runpy
import shlex
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Sequence
from configparser import ConfigParser
from email.message import Message
from email.parser import Parser
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch

from build_tools.build_extension import BACKEND_VARIABLE, CHOICE_NAME
from build_tools.compile import torch_versions
from build_tools.compile.torch_versions import TorchBuild
from flash_attn_cuda import __version__
from tests.building import project_tree
from tests.building.project_tree import EXTENSION, REPO

LICENCES = ("LICENSE", "THIRD_PARTY_NOTICES.md")
PLAIN_TORCH = torch_versions.requirement()
# A development version, which is required by a range.
TORCH = TorchBuild("2.15.0.dev20261101+cu130", "13.0")
# A front end calls it in a process of its own; the last line printed is the name of the result.
BUILD_EDITABLE = """
import sys
from setuptools import build_meta
print(build_meta.build_editable(sys.argv[1]))
"""


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return project_tree.copy_tree(tmp_path_factory.mktemp("project"))


@pytest.fixture(scope="module")
def with_torch(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return [project_tree.pretend_torch(tmp_path_factory.mktemp("torch"), TORCH.version, TORCH.cuda)]


def built(tree: Path, out: Path, *commands: str, **options) -> list[Path]:
    """What the commands of setup.py leave in a folder, by name."""
    asked = [part for name in commands for part in (name, f"--dist-dir={out}")]
    result = project_tree.python(tree, "setup.py", "--quiet", *asked, **options)
    assert result.returncode == 0, result.stderr
    return sorted(out.iterdir())


@pytest.fixture(scope="module")
def sdist(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made where neither torch nor a backend can be had."""
    no_torch = project_tree.hide_torch(tmp_path_factory.mktemp("no_torch"))
    out = tmp_path_factory.mktemp("sdist")
    (archive,) = built(tree, out, "sdist", backend="never asked for", path=[no_torch])
    return archive


@pytest.fixture(scope="module")
def compiled(tree: Path, with_torch: list[Path], tmp_path_factory) -> list[Path]:
    """Wheel and sdist of one run."""
    return built(tree, tmp_path_factory.mktemp("compiled"), "sdist", "bdist_wheel", path=with_torch)


@pytest.fixture(scope="module")
def pure(tree: Path, compiled: list[Path], with_torch: list[Path], tmp_path_factory) -> Path:
    """A wheel without extension, after a build with one, whose file is in the build folder."""
    out = tmp_path_factory.mktemp("pure")
    (wheel,) = built(tree, out, "bdist_wheel", backend="cpu", path=with_torch)
    return wheel


def read_from_wheel(wheel: Path, name: str) -> str:
    """A file of the wheel's one .dist-info folder."""
    with zipfile.ZipFile(wheel) as archive:
        (path,) = (p for p in archive.namelist() if p.endswith(f".dist-info/{name}"))
        return archive.read(path).decode()


def metadata_of(wheel: Path) -> Message:
    return Parser().parsestr(read_from_wheel(wheel, "METADATA"))


def required_torch(metadata: Message) -> set[str]:
    """What its one requirement without those of extras says."""
    (required,) = (x for x in metadata.get_all("Requires-Dist", []) if "extra ==" not in x)
    return set(required.removeprefix("torch").split(","))


def bounds(requirement: str) -> set[str]:
    return set(requirement.removeprefix("torch").split(","))


# What the versions of a torch say


@pytest.mark.parametrize(
    ("version", "cuda", "local", "requirement"),
    [
        ("2.14.1+cu130", "13.0", "torch2.14.cu130", "torch==2.14.*"),
        ("2.14.1.post1", "13.0", "torch2.14.cu130", "torch==2.14.*"),
        ("2.14.1+cpu", None, "torch2.14", "torch==2.14.*"),
        ("2.15.0.dev20261101+cu130", "13.0", "torch2.15.cu130", "torch>=2.15.dev0,<2.16"),
        ("2.15.0rc3", "13.2", "torch2.15.cu132", "torch>=2.15.dev0,<2.16"),
        ("2.9.0a0+145a3a7.nv25.10", "13.0", "torch2.9.cu130", "torch>=2.9.dev0,<2.10"),
    ],
)
def test_a_torch_build_gives_local_version_and_requirement(
    version, cuda, local, requirement
) -> None:
    build = TorchBuild(version, cuda)
    assert (build.local_version, build.requirement) == (local, requirement)


@pytest.mark.parametrize("version", ["", "2", "two.one"])
def test_a_version_that_cannot_be_read_is_named(version: str) -> None:
    with pytest.raises(ValueError, match=r"torch: expected .* got ") as error:
        _ = TorchBuild(version, "13.0").requirement
    assert repr(version) in str(error.value)


@pytest.mark.parametrize(
    ("built_for", "runs", "does_not_run"),
    [
        ("2.14.1+cu130", ["2.14.0", "2.14.3+cu126"], ["2.13.2", "2.15.0", "2.140.0", "3.14.0"]),
        (
            "2.15.0.dev20261101+cu130",
            ["2.15.0.dev20261101+cu130", "2.15.0rc1", "2.15.0a0+1234567", "2.15.0", "2.15.2+cu130"],
            ["2.14.9", "2.16.0.dev20261224", "2.16.0"],
        ),
    ],
)
def test_the_requirement_is_met_by_one_minor(built_for, runs, does_not_run) -> None:
    packaging = pytest.importorskip("packaging.requirements")
    required = packaging.Requirement(TorchBuild(built_for, "13.0").requirement).specifier
    assert [version for version in runs if version not in required] == []
    assert [version for version in does_not_run if version in required] == []


def test_the_present_torch_is_read() -> None:
    present = torch_versions.present_torch()
    assert (present.version, present.cuda) == (torch.__version__, torch.version.cuda)


# What is built


def test_a_wheel_with_extension_names_and_requires_its_torch(compiled: list[Path]) -> None:
    wheel, sdist = compiled
    assert sdist.name == f"flash_attn_cuda-{__version__}.tar.gz"
    metadata = metadata_of(wheel)
    assert metadata["Version"] == f"{__version__}+{TORCH.local_version}"
    assert wheel.name.startswith(f"flash_attn_cuda-{__version__}+{TORCH.local_version}-cp")
    assert required_torch(metadata) == bounds(TORCH.requirement)
    with zipfile.ZipFile(wheel) as archive:
        assert f"flash_attn_cuda/{EXTENSION}" in archive.namelist()


def test_a_wheel_without_extension_says_why_and_takes_every_supported_torch(pure: Path) -> None:
    assert pure.name == f"flash_attn_cuda-{__version__}-py3-none-any.whl"
    metadata = metadata_of(pure)
    assert metadata["Version"] == __version__
    assert required_torch(metadata) == bounds(PLAIN_TORCH)
    with zipfile.ZipFile(pure) as wheel:
        names = wheel.namelist()
        record = json.loads(wheel.read(f"flash_attn_cuda/{CHOICE_NAME}"))
    assert record == {"backend": "cpu", "reason": f"{BACKEND_VARIABLE}=cpu"}
    packages = (REPO / "flash_attn_cuda").rglob("__init__.py")
    assert {path.relative_to(REPO).as_posix() for path in packages} <= set(names)
    assert not any(name.endswith(".so") for name in names)
    # What every wheel has:
    assert metadata["License-Expression"] == "BSD-3-Clause"
    assert metadata.get_all("License-File") == list(LICENCES)
    for name in LICENCES:
        assert read_from_wheel(pure, f"licenses/{name}") == (REPO / name).read_text()
    entry_points = ConfigParser()
    entry_points.read_string(read_from_wheel(pure, "entry_points.txt"))
    assert dict(entry_points["console_scripts"]) == {
        "flash-attn-cuda": "flash_attn_cuda.__main__:run"
    }


def test_an_editable_install_has_the_metadata_of_the_wheel(
    tree: Path, compiled: list[Path], with_torch: list[Path], tmp_path: Path
) -> None:
    result = project_tree.python(tree, "-c", BUILD_EDITABLE, str(tmp_path), path=with_torch)
    assert result.returncode == 0, result.stderr
    wheel = tmp_path / result.stdout.splitlines()[-1]
    assert metadata_of(wheel).items() == metadata_of(compiled[0]).items()


def test_an_editable_install_without_extension_removes_an_old_one(tree: Path) -> None:
    package = tree / "flash_attn_cuda"
    (package / EXTENSION).touch()
    (package / "_C.another-python.so").touch()
    command = ("setup.py", "--quiet", "build_ext", "--inplace")
    result = project_tree.python(tree, *command, backend="cpu")
    assert result.returncode == 0, result.stderr
    assert "CPU backend only" in result.stderr
    assert [path.name for path in package.glob("_C.*.so")] == ["_C.another-python.so"]
    assert json.loads((package / CHOICE_NAME).read_text())["backend"] == "cpu"


def test_an_sdist_has_the_plain_version_and_what_tests_need(tree: Path, sdist: Path) -> None:
    assert sdist.name == f"flash_attn_cuda-{__version__}.tar.gz"
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
        file = archive.extractfile(f"flash_attn_cuda-{__version__}/PKG-INFO")
        assert file is not None
        metadata = Parser().parsestr(file.read().decode())
    assert metadata["Version"] == __version__
    assert required_torch(metadata) == bounds(PLAIN_TORCH)
    # Else a resolver may hold the sdist's requirement to be that of every wheel made of it.
    assert "requires-dist" in {field.lower() for field in metadata.get_all("Dynamic", [])}
    left_out = ("benchmarks/results/", "tests/gpu_results/")
    assert not [name for name in names if name.startswith(left_out)]
    code = {
        path.relative_to(tree).as_posix()
        for folder in (
            "benchmarks",
            "build_tools",
            "csrc",
            "docs",
            "examples",
            "kernel_table",
            "tests",
        )
        for path in tree.glob(f"{folder}/**/*.*")
        if path.suffix in (".cpp", ".cu", ".h", ".json", ".md", ".py", ".sh", ".txt")
    }
    assert "tests/conftest.py" in code and "tests/host/main.cpp" in code
    assert [name for name in code - names if not name.startswith(left_out)] == []
    texts = {*LICENCES, "CHANGELOG.md", "CONTRIBUTING.md", "README.md", "Makefile"}
    assert texts | {"pyproject.toml", "setup.py", "third_party/cutlass/fetch.py"} <= names


def test_what_is_wrong_is_said_in_a_line(tree: Path, tmp_path: Path) -> None:
    unreadable = project_tree.pretend_torch(tmp_path, "main", "13.0")
    wrong: list[tuple[str, Sequence[Path], str]] = [
        ("gpu", (), f"{BACKEND_VARIABLE}: expected one of auto, cuda, cpu, binding, got 'gpu'"),
        ("auto", [unreadable], "torch: expected"),
    ]
    for backend, path, message in wrong:
        result = project_tree.python(tree, "setup.py", "bdist_wheel", backend=backend, path=path)
        assert result.returncode == 1
        assert "Traceback" not in result.stderr
        assert result.stderr.splitlines()[-1].startswith(f"error: {message}")


def test_an_old_setuptools_is_refused_with_what_to_install() -> None:
    script = (
        "import runpy, sys\n"
        "import setuptools\n"
        "setuptools.__version__ = '77.0.2'\n"
        "sys.modules['setuptools.command.bdist_wheel'] = None\n"  # an import of it fails
        "sys.argv = ['setup.py', 'egg_info']\n"
        "runpy.run_path('setup.py')\n"
    )
    result = project_tree.python(REPO, "-c", script)
    assert result.returncode == 1
    assert (
        "error: flash_attn_cuda builds with setuptools 77.0.3 or newer, not 77.0.2: "
        "pip install 'setuptools>=77.0.3' 'ninja>=1.11'"
    ) in result.stderr


# What they are made of


def test_the_notices_have_what_is_compiled_in() -> None:
    notices = (REPO / "THIRD_PARTY_NOTICES.md").read_text()
    for holder in ("NVIDIA CORPORATION & AFFILIATES", "Duane Merrill", "Wenzel Jakob", "Facebook"):
        assert holder in notices
    assert notices.count("Redistributions in binary form must reproduce") == 4


@pytest.mark.filterwarnings("ignore:.*found in sys.modules")
@pytest.mark.parametrize("name", ["flash-attn-cuda", "python -m flash_attn_cuda"])
def test_the_command_names_itself(monkeypatch, capsys, name: str) -> None:
    monkeypatch.setattr(sys, "argv", ["/somewhere/flash-attn-cuda", "--help"])
    monkeypatch.setattr("signal.signal", lambda *_: None)  # not of these tests
    command = EntryPoint("flash-attn-cuda", "flash_attn_cuda.__main__:run", "console_scripts")
    with pytest.raises(SystemExit) as stop:
        if name == command.name:
            command.load()()
        else:
            runpy.run_module("flash_attn_cuda", run_name="__main__")
    assert stop.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: {name} ")


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_make_takes_a_python_whose_path_has_a_space() -> None:
    goals = (REPO / "Makefile").read_text().partition(".PHONY: ")[2].split("\n")[0].split()
    for goal in set(goals) - {"clean"}:
        command = ["make", "--dry-run", "PYTHON=/with a space/python", goal]
        result = subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=True)
        lines = [line for line in result.stdout.splitlines() if "python" in line]
        assert lines and all("/with a space/python" in shlex.split(line) for line in lines), goal
