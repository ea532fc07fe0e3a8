"""The folder for Hugging Face's hub, loaded by their kernels package beside this one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from build_tools.compile import archs, torch_versions
from build_tools.release import hub
from flash_attn_cuda import __version__
from tests.building.project_tree import REPO


def test_kernels_and_transformers_load_it(tmp_path: Path) -> None:
    """In a process of its own, as both keep what they loaded."""
    pytest.importorskip("kernels")
    pytest.importorskip("transformers")
    version = f"{__version__}+{torch_versions.present_torch().local_version}"
    code = archs.parse_archs(archs.WITHOUT_A_GPU)
    variant = hub.add(REPO / "flash_attn_cuda", version, code, tmp_path)
    command = [sys.executable, "-m", "tests.surfaces.hub_loading", str(tmp_path)]
    result = subprocess.run(command, cwd=REPO, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout.splitlines()[-1])
    assert found.pop("name") == json.loads((variant / "metadata.json").read_text())["id"]
    assert "no CUDA device" in found.pop("reason")
    assert found.pop("model", 0.0) < 1e-5
    assert set(found.values()) == {0.0}
