"""What the build takes from the environment, and which tools go together."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("ninja")  # build_tools writes ninja files with the ninja package

from build_tools import archs, build_extension, build_kernels, jobs, row_filter, toolchain
from build_tools.build_extension import Backend
from build_tools.toolchain import Nvcc, ToolchainError

BUILD_DIR_VARIABLE = "FLASH_ATTN_CUDA_BUILD_DIR"
VARIABLES = (archs.VARIABLE, row_filter.VARIABLE, jobs.VARIABLE, BUILD_DIR_VARIABLE)


def test_options_are_those_of_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    given = ("89", "head_dim=64", "3", str(tmp_path / "kernels"))
    for variable, value in zip(VARIABLES, given, strict=True):
        monkeypatch.setenv(variable, value)
    options = build_kernels.BuildOptions()
    assert (options.archs, options.rows, options.jobs) == ("89", "head_dim=64", 3)
    assert options.build_dir == tmp_path / "kernels"
    monkeypatch.setenv(jobs.VARIABLE, "0")
    with pytest.raises(ValueError, match=rf"^{jobs.VARIABLE}: .*got '0'"):
        build_kernels.BuildOptions()


@pytest.mark.parametrize("empty", [False, True], ids=["unset", "empty"])
def test_options_without_them(monkeypatch: pytest.MonkeyPatch, empty: bool) -> None:
    """No archs are those of the GPUs present."""
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    if empty:
        monkeypatch.setenv(archs.VARIABLE, "")
    monkeypatch.setattr(archs, "default_archs", lambda: "86")
    options = build_kernels.BuildOptions()
    assert options.archs == "86" and options.rows == ""
    assert options.jobs >= 1 and options.build_dir == toolchain.REPO / "build/kernels"


def test_ptx_is_of_the_highest_arch_alone() -> None:
    """Not of each, which would make the archive larger and serve no further GPU."""
    flags = archs.plain_gencode(archs.parse_archs("86;80;89"))
    assert flags == [
        *(f"-gencode=arch=compute_{c},code=sm_{c}" for c in (80, 86, 89)),
        "-gencode=arch=compute_89,code=compute_89",
    ]


def test_the_backend_is_chosen_for_a_torch_of_the_same_cuda(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.delenv(build_extension.BACKEND_VARIABLE, raising=False)
    nvcc = Nvcc(Path("/toolkit/bin/nvcc"), "13.0.88", ())
    monkeypatch.setattr(toolchain, "find_nvcc", lambda: nvcc)
    monkeypatch.setattr(torch.version, "cuda", "13.1")
    choice = build_extension.choose_backend()
    assert choice.backend is Backend.cuda and "nvcc 13.0.88" in choice.reason
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    with pytest.raises(ToolchainError, match=r"^torch was built for CUDA 12\.8 but /toolkit/bin/"):
        build_extension.choose_backend()
