"""The metadata of wheels and sdists: versions, the torch they require, licences, the command."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
import tarfile
import zipfile
from configparser import ConfigParser
from email.message import Message
from email.parser import Parser
from importlib.metadata import EntryPoint, distributions
from pathlib import Path

import pytest
import torch

from build_tools import torch_versions
from build_tools.build_extension import BACKEND_VARIABLE
from build_tools.torch_versions import TorchBuild
from flash_attn_cuda import __version__
from tests.building import project_tree

LICENCES = ("LICENSE", "THIRD_PARTY_NOTICES.md")
# Not importlib.util.find_spec: to be asked for pip, setuptools gives up its distutils for good, and
# the compiler behind torch.compile then cannot import setuptools.
needs_pip = pytest.mark.skipif(not list(distributions(name="pip")), reason="needs pip")
PLAIN_TORCH = torch_versions.requirement()
# A front end calls each in a process of its own; the last line printed is the name of the result.
HOOK = """
import sys
from pathlib import Path
from setuptools import build_meta

out = Path(sys.argv[1])
out.mkdir()
match sys.argv[2:]:
    case ["prepare"]:
        print(build_meta.prepare_metadata_for_build_wheel(str(out)))
    case ["build", *metadata]:
        print(build_meta.build_wheel(str(out), None, *metadata))
    case ["build editable"]:
        print(build_meta.build_editable(str(out)))
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    return project_tree.copy_tree(tmp_path)


@pytest.fixture
def compiled_tree(tree: Path) -> Path:
    """A tree whose builds have an extension."""
    project_tree.pretend_to_compile(tree)
    return tree


def build_wheel(tree: Path, **options) -> Path:
    result = project_tree.setup(tree, "bdist_wheel", **options)
    assert result.returncode == 0, result.stderr
    (path,) = tree.glob("dist/*.whl")
    return path


def call_hook(tree: Path, out: Path, *arguments: str, **options) -> Path:
    """What the hook of a front end leaves in ``out``."""
    result = project_tree.python(tree, "-c", HOOK, str(out), *arguments, **options)
    assert result.returncode == 0, result.stderr
    return out / result.stdout.splitlines()[-1]


def read_from_wheel(wheel: Path, name: str) -> str:
    """A file of the wheel's one .dist-info folder."""
    with zipfile.ZipFile(wheel) as archive:
        (path,) = (p for p in archive.namelist() if p.endswith(f".dist-info/{name}"))
        return archive.read(path).decode()


def metadata_of(wheel: Path) -> Message:
    return Parser().parsestr(read_from_wheel(wheel, "METADATA"))


def required_torch(metadata: Message) -> list[str]:
    """Its requirements without those of extras."""
    return [text for text in metadata.get_all("Requires-Dist", []) if "extra ==" not in text]


# What the versions of a torch say


@pytest.mark.parametrize(
    ("version", "cuda", "local", "requirement"),
    [
        ("2.14.1+cu130", "13.0", "torch2.14.cu130", "torch==2.14.*"),
        ("2.6.0+cu124", "12.4", "torch2.6.cu124", "torch==2.6.*"),
        ("2.14.1", "13.0", "torch2.14.cu130", "torch==2.14.*"),
        ("2.14.1.post1", "13.0", "torch2.14.cu130", "torch==2.14.*"),
        ("2.14.1+cpu", None, "torch2.14", "torch==2.14.*"),
        ("2.14.0+rocm7.1", None, "torch2.14", "torch==2.14.*"),
        ("2.15.0.dev20261101+cu130", "13.0", "torch2.15.cu130", "torch>=2.15.dev0,<2.16"),
        ("2.15.0rc3", "13.2", "torch2.15.cu132", "torch>=2.15.dev0,<2.16"),
        ("2.9.0a0+145a3a7.nv25.10", "13.0", "torch2.9.cu130", "torch>=2.9.dev0,<2.10"),
        ("3.0.0", "13.0", "torch3.0.cu130", "torch==3.0.*"),
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
        ("2.15.0a0+1234567", ["2.15.0a0+1234567"], ["2.14.1"]),
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
    minor = ".".join(torch.__version__.split(".")[:2])
    assert present.local_version.startswith(f"torch{minor}")


def test_supported_torch_is_a_range() -> None:
    assert torch_versions.OLDEST < torch_versions.NEWEST_TRIED
    major, minor = torch_versions.OLDEST
    assert torch_versions.requirement() == f"torch>={major}.{minor}"


# Wheels


def test_a_wheel_with_extension_names_and_requires_its_torch(
    compiled_tree: Path, tmp_path: Path
) -> None:
    """Of a development version, which is required by a range."""
    version, cuda = "2.15.0.dev20261101+cu130", "13.0"
    stub = project_tree.pretend_torch(tmp_path, version, cuda)
    wheel = build_wheel(compiled_tree, path=[stub])
    build = TorchBuild(version, cuda)
    metadata = metadata_of(wheel)
    assert metadata["Version"] == f"{__version__}+{build.local_version}"
    assert wheel.name.startswith(f"flash_attn_cuda-{__version__}+{build.local_version}-cp")
    (required,) = required_torch(metadata)
    assert sorted(required.removeprefix("torch").split(",")) == sorted(
        build.requirement.removeprefix("torch").split(",")
    )
    with zipfile.ZipFile(wheel) as archive:
        assert f"flash_attn_cuda/{project_tree.EXTENSION}" in archive.namelist()


def test_a_wheel_without_extension_takes_every_supported_torch(tree: Path, tmp_path: Path) -> None:
    stub = project_tree.pretend_torch(tmp_path, "2.14.1+cu130", "13.0")
    wheel = build_wheel(tree, backend="cpu", path=[stub])
    assert wheel.name == f"flash_attn_cuda-{__version__}-py3-none-any.whl"
    metadata = metadata_of(wheel)
    assert metadata["Version"] == __version__
    assert required_torch(metadata) == [PLAIN_TORCH]
    check_licences_and_command(wheel)


def check_licences_and_command(wheel: Path) -> None:
    """Which every wheel has."""
    metadata = metadata_of(wheel)
    assert metadata["License-Expression"] == "BSD-3-Clause"
    assert metadata.get_all("License-File") == list(LICENCES)
    for name in LICENCES:
        assert read_from_wheel(wheel, f"licenses/{name}") == (project_tree.REPO / name).read_text()
    entry_points = ConfigParser()
    entry_points.read_string(read_from_wheel(wheel, "entry_points.txt"))
    assert dict(entry_points["console_scripts"]) == {
        "flash-attn-cuda": "flash_attn_cuda.__main__:run"
    }


@pytest.mark.parametrize("compiled", [True, False])
def test_prepared_metadata_is_that_of_the_wheel(tree: Path, tmp_path: Path, compiled: bool) -> None:
    """Both as pip builds, which hands the metadata back, and of a wheel built from nothing."""
    if compiled:
        project_tree.pretend_to_compile(tree)
    stub = project_tree.pretend_torch(tmp_path, "2.14.1+cu130", "13.0")
    options = {"backend": "auto" if compiled else "cpu", "path": [stub]}
    prepared = call_hook(tree, tmp_path / "prepared", "prepare", **options)
    whole = call_hook(tree, tmp_path / "whole", "build", **options)
    continued = call_hook(tree, tmp_path / "continued", "build", str(prepared), **options)
    assert whole.name == continued.name
    assert whole.name.startswith(f"{prepared.name.removesuffix('.dist-info')}-")
    assert ("+torch2.14.cu130" in whole.name) == compiled
    for wheel in (whole, continued):
        assert read_from_wheel(wheel, "METADATA") == (prepared / "METADATA").read_text()


def test_an_editable_install_has_the_metadata_of_the_wheel(
    compiled_tree: Path, tmp_path: Path
) -> None:
    stub = project_tree.pretend_torch(tmp_path, "2.14.1+cu130", "13.0")
    wheel = call_hook(compiled_tree, tmp_path / "out", "build editable", path=[stub])
    metadata = metadata_of(wheel)
    assert metadata["Version"] == f"{__version__}+torch2.14.cu130"
    assert required_torch(metadata) == ["torch==2.14.*"]


def test_sdist_and_wheel_of_one_run_each_have_their_own(
    compiled_tree: Path, tmp_path: Path
) -> None:
    stub = project_tree.pretend_torch(tmp_path, "2.14.1+cu130", "13.0")
    result = project_tree.setup(compiled_tree, "sdist", "bdist_wheel", path=[stub])
    assert result.returncode == 0, result.stderr
    (sdist,) = compiled_tree.glob("dist/*.tar.gz")
    (wheel,) = compiled_tree.glob("dist/*.whl")
    assert sdist.name == f"flash_attn_cuda-{__version__}.tar.gz"
    assert metadata_of(wheel)["Version"] == f"{__version__}+torch2.14.cu130"
    assert required_torch(metadata_of(wheel)) == ["torch==2.14.*"]


def test_a_torch_that_cannot_be_read_is_said_in_a_line(compiled_tree: Path, tmp_path: Path) -> None:
    stub = project_tree.pretend_torch(tmp_path, "main", "13.0")
    result = project_tree.setup(compiled_tree, "bdist_wheel", path=[stub])
    assert result.returncode == 1
    assert "Traceback" not in result.stderr
    assert result.stderr.splitlines()[-1].startswith("error: torch: expected")


# Sdists


@pytest.fixture
def sdist(compiled_tree: Path, tmp_path: Path) -> Path:
    """Made where neither torch nor a backend can be had."""
    no_torch = tmp_path / "no_torch"
    no_torch.mkdir()
    path = [project_tree.hide_torch(no_torch)]
    result = project_tree.setup(compiled_tree, "sdist", backend="never asked for", path=path)
    assert result.returncode == 0, result.stderr
    (archive,) = compiled_tree.glob("dist/*.tar.gz")
    return archive


def unpack(sdist: Path, folder: Path) -> Path:
    with tarfile.open(sdist) as archive:
        archive.extractall(folder)
    return folder / sdist.name.removesuffix(".tar.gz")


def test_an_sdist_has_the_plain_version_and_all_texts(sdist: Path, tmp_path: Path) -> None:
    assert sdist.name == f"flash_attn_cuda-{__version__}.tar.gz"
    root = unpack(sdist, tmp_path)
    metadata = Parser().parsestr((root / "PKG-INFO").read_text())
    assert metadata["Version"] == __version__
    assert required_torch(metadata) == [PLAIN_TORCH]
    # Else a resolver may hold the sdist's requirement to be that of every wheel made of it.
    assert "requires-dist" in {field.lower() for field in metadata.get_all("Dynamic", [])}
    for name in (*LICENCES, "CHANGELOG.md", "CONTRIBUTING.md", "pyproject.toml", "setup.py"):
        assert (root / name).is_file(), name


def test_a_wheel_of_an_sdist_keeps_its_version(sdist: Path, tmp_path: Path) -> None:
    """pip turns down one that has another than the sdist's file name says."""
    stub = project_tree.pretend_torch(tmp_path, "2.14.1+cu130", "13.0")
    wheel = build_wheel(unpack(sdist, tmp_path), path=[stub])
    assert wheel.name.startswith(f"flash_attn_cuda-{__version__}-cp")
    assert metadata_of(wheel)["Version"] == __version__
    assert required_torch(metadata_of(wheel)) == ["torch==2.14.*"]


# What is in every wheel


def test_the_notices_have_what_is_compiled_in() -> None:
    notices = (project_tree.REPO / "THIRD_PARTY_NOTICES.md").read_text()
    for holder in ("NVIDIA CORPORATION & AFFILIATES", "Duane Merrill", "Wenzel Jakob", "Facebook"):
        assert holder in notices
    assert notices.count("Redistributions in binary form must reproduce") == 4


def test_the_command_runs(monkeypatch, capsys) -> None:
    command = EntryPoint("flash-attn-cuda", "flash_attn_cuda.__main__:run", "console_scripts")
    monkeypatch.setattr(sys, "argv", ["/somewhere/flash-attn-cuda", "--help"])
    monkeypatch.setattr("signal.signal", lambda *_: None)  # not of these tests
    with pytest.raises(SystemExit) as stop:
        command.load()()
    assert stop.value.code == 0
    assert capsys.readouterr().out.startswith("usage: flash-attn-cuda ")


@pytest.mark.filterwarnings("ignore:.*found in sys.modules")
def test_the_module_names_itself(monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", ["flash_attn_cuda", "--help"])
    monkeypatch.setattr("signal.signal", lambda *_: None)
    with pytest.raises(SystemExit):
        runpy.run_module("flash_attn_cuda", run_name="__main__")
    assert capsys.readouterr().out.startswith("usage: python -m flash_attn_cuda ")


# What pip makes of it


def pip_would_install(folder: Path, *arguments: str) -> dict[str, str] | None:
    """Versions by name; None where pip refuses. Without network, whatever settings pip has."""
    report = folder / "report.json"
    options = ("--dry-run", "--no-index", "--no-build-isolation", "--report", str(report))
    command = [sys.executable, "-m", "pip", "--isolated", "install", *options, *arguments]
    settings = {"PIP_CONFIG_FILE": os.devnull, BACKEND_VARIABLE: "auto"}
    done = subprocess.run(command, cwd=folder, env={**os.environ, **settings}, capture_output=True)
    if done.returncode:
        return None
    packages = (item["metadata"] for item in json.loads(report.read_text())["install"])
    return {package["name"]: package["version"] for package in packages}


@needs_pip
def test_pip_takes_a_wheel_for_the_torch_that_is_there(tree: Path, tmp_path: Path) -> None:
    present = torch_versions.present_torch()
    project_tree.pretend_to_compile(tree)
    made = pip_would_install(tmp_path, str(build_wheel(tree)))
    assert made == {"flash-attn-cuda": f"{__version__}+{present.local_version}"}


@needs_pip
def test_pip_refuses_a_wheel_for_another_torch(compiled_tree: Path, tmp_path: Path) -> None:
    """It takes the same wheel where it is not to look at requirements."""
    stub = project_tree.pretend_torch(tmp_path, "1.0.0+cu130", "13.0")
    wheel = str(build_wheel(compiled_tree, path=[stub]))
    assert pip_would_install(tmp_path, wheel) is None
    taken = pip_would_install(tmp_path, "--no-deps", wheel)
    assert taken == {"flash-attn-cuda": f"{__version__}+torch1.0.cu130"}


@needs_pip
def test_pip_takes_an_sdist_that_it_finds_by_name(sdist: Path, tmp_path: Path) -> None:
    """Its wheel has the version of its file name, or pip would turn it down."""
    options = ("--no-deps", "--ignore-installed")  # the package may be installed here
    options += ("--find-links", str(sdist.parent))
    assert pip_would_install(tmp_path, *options, "flash-attn-cuda") == {
        "flash-attn-cuda": __version__
    }
