"""The folder that Hugging Face's kernels package loads, of the wheels in dist/simple/.

``make hub`` writes dist/hub/: build/<variant>/ for each torch and CUDA, with the extensions of all
Pythons, torch-cpu without any, metadata.json in each, and the card.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import sys
import tempfile
import zipfile
from pathlib import Path

from build_tools.build_extension import BACKEND_VARIABLE
from build_tools.compile import archs, torch_versions
from build_tools.compile.toolchain import REPO
from build_tools.install import pip_install
from build_tools.release import index, wheels

HUB = index.DIST / "hub"
PACKAGE = "flash_attn_cuda"
MAJOR = 1  # of the hub's versions, which are whole numbers
LOCAL_VERSION = re.compile(r"\+torch(\d+)\.(\d+)\.(cu\d+)")
CARD = Path(__file__).with_name("hub_card.md")
SPEED = re.compile(r"<!-- generated: speed h200 -->\n(.*?)<!-- end -->", re.DOTALL)
# The self-check of what kernels loads, as python -m flash_attn_cuda has it.
CHECK = """
import importlib, kernels, pathlib, sys
kernel = kernels.get_local_kernel(pathlib.Path(sys.argv[1]), backend=sys.argv[2])
sys.exit(importlib.import_module(f"{kernel.__name__}.__main__").main([], kernel.__name__))
"""
LICENCES = ("LICENSE", "THIRD_PARTY_NOTICES.md")


def variant_of(version: str) -> str:
    """Such as torch214-cxx11-cu130-x86_64-linux of 0.1.0+torch2.14.cu130, torch-cpu of 0.1.0."""
    found = LOCAL_VERSION.search(version)
    if not found:
        return "torch-cpu"
    return f"torch{found[1]}{found[2]}-cxx11-{found[3]}-{os.uname().machine}-linux"


def _metadata(variant: Path, code: list[archs.Arch]) -> dict[str, object]:
    """What kernels reads. The id becomes the package's name in sys.modules and its operators'."""
    backend = "cuda" if code else "cpu"
    digest = hashlib.sha256()
    for path in sorted(variant.rglob("*.*")):
        digest.update(path.read_bytes())
    entry: dict[str, object] = {"type": backend}
    if code:
        entry["archs"] = [
            f"{arch.capability / 10}{str(arch).lstrip('0123456789')}" for arch in code
        ]
    return {
        "id": f"_{PACKAGE}_{backend}_{digest.hexdigest()[:12]}",
        "name": index.PROJECT,
        "version": MAJOR,
        "license": "BSD-3-Clause",
        "python-depends": [],
        "backend": entry,
    }


def add(package: Path, version: str, code: list[archs.Arch], hub: Path = HUB) -> Path:
    """Adds a package's folder to its variant, beside the extensions of other Pythons."""
    variant = hub / "build" / variant_of(version)
    skipped = shutil.ignore_patterns("__pycache__")
    shutil.copytree(package, variant, dirs_exist_ok=True, ignore=skipped)
    for name in LICENCES:
        shutil.copy2(REPO / name, variant)
    (variant / "metadata.json").unlink(missing_ok=True)
    metadata = json.dumps(_metadata(variant, code), indent=2)
    (variant / "metadata.json").write_text(metadata)
    return variant


def write_card(hub: Path = HUB) -> None:
    """The card, with the README's figures."""
    speed = SPEED.search((REPO / "README.md").read_text())
    assert speed is not None
    (hub / "README.md").write_text(CARD.read_text().replace("{speed}", speed[1].strip()))


def check(hub: Path = HUB) -> None:
    """Has kernels load the variants of this environment. Raises StepError where one fails."""
    own = variant_of(f"+{torch_versions.present_torch().local_version}")
    backends = ("cpu", "cuda") if (hub / "build" / own).is_dir() else ("cpu",)
    for backend in backends:
        wheels.run([sys.executable, "-c", CHECK, str(hub), backend], index.DIST)


def _pure_wheel(folder: Path) -> Path:
    command = [*pip_install(sys.executable)[:3], "wheel", "--quiet", "--no-deps"]
    options = ["--no-build-isolation", "--wheel-dir", str(folder), "."]
    wheels.run([*command, *options], REPO, {BACKEND_VARIABLE: "cpu"})
    return next(folder.glob("*.whl"))


def write(hub: Path = HUB) -> None:
    """The whole folder, checked. Raises RuntimeError where there is no wheel to take it from."""
    found = index.wheels_of()
    if not found:
        raise RuntimeError(f"{index.DIST}/simple has no wheels: make wheels")
    shutil.rmtree(hub, ignore_errors=True)
    code = archs.parse_archs(wheels.wanted_archs())
    with tempfile.TemporaryDirectory() as folder:
        for wheel in (*found, _pure_wheel(Path(folder))):
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(Path(folder, wheel.stem))
            package = Path(folder, wheel.stem, PACKAGE)
            has_code = any(package.glob("_C.*.so"))
            print(add(package, wheel.name.split("-")[1], code if has_code else [], hub))
            shutil.rmtree(package)
    write_card(hub)
    check(hub)
