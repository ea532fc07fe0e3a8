"""What the build takes from its environment: architectures, their flags, jobs."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("ninja")  # build_tools writes ninja files with the ninja package

from build_tools import build_extension, build_kernels
from build_tools.build_extension import Backend
from build_tools.compile import archs, jobs, toolchain
from build_tools.compile.archs import Arch, ArchError
from kernel_table import row_filter
from kernel_table.row import Family

BUILD_DIR_VARIABLE = "FLASH_ATTN_CUDA_BUILD_DIR"
VARIABLES = (archs.VARIABLE, row_filter.VARIABLE, jobs.VARIABLE, BUILD_DIR_VARIABLE)


def flags_of(*codes: str) -> list[str]:
    """nvcc's, of codes such as ``sm_80``, or ``compute_80`` for PTX."""
    return [f"-gencode=arch=compute_{code.partition('_')[2]},code={code}" for code in codes]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("80;90a", [Arch(80), Arch(90, "a")]),
        ("80;90;100;120", [Arch(80), Arch(90, "a"), Arch(100), Arch(120)]),  # flash-attention's
        ("90;90a", [Arch(90, "a")]),
        ("9.0+PTX", [Arch(90, "a", ptx=True)]),
        ("9.0a 8.0", [Arch(80), Arch(90, "a")]),
        ("80+PTX", [Arch(80, ptx=True)]),
        ("100f,120", [Arch(100, "f"), Arch(120)]),
        ("80;", [Arch(80)]),
    ],
)
def test_arch_lists(text, expected) -> None:
    assert archs.parse_archs(text) == expected


@pytest.mark.parametrize(
    "text", ["", ";", "sm_80", "90b", "75", "1000", "80.5", "80.", "80a", "90f"]
)
def test_arch_lists_that_are_refused(text) -> None:
    with pytest.raises(ArchError, match=archs.VARIABLE):
        archs.parse_archs(text)


def test_archs_that_the_compiler_does_not_know_are_refused() -> None:
    wanted = archs.parse_archs("80;85;800")
    with pytest.raises(ArchError, match=r"ARCHS: nvcc 13\.0 compiles for 80, 90, got '85'"):
        archs.check_compilable(wanted, {75, 80, 90}, "nvcc 13.0")
    archs.check_compilable(wanted, {80, 85, 800}, "nvcc 13.0")
    archs.check_compilable(wanted, set(), "a compiler that does not tell")


@pytest.mark.skipif(toolchain.find_nvcc() is None, reason="needs nvcc")
def test_nvcc_says_what_it_compiles_for() -> None:
    nvcc = toolchain.find_nvcc()
    assert nvcc is not None and {80, 90} <= toolchain.nvcc_capabilities(nvcc)
    options = build_kernels.BuildOptions(archs="80;85", jobs=1)
    with pytest.raises(ArchError, match=r"ARCHS: nvcc .* compiles for 80, .*, got '85'"):
        build_kernels.make_plan(options)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("8.0 9.0+PTX", "80;90a+PTX"),
        ("7.5;8.6;9.0a", "86;90a"),  # images list GPUs that the kernels do not run on
        ("5.2 6.0 7.0 8.0 8.6 9.0 10.0 12.0+PTX", "80;86;90a;100;120+PTX"),
        ("Ampere;Hopper", "80;86+PTX;90a+PTX"),
        ("Ada", "89+PTX"),
        *((text, None) for text in ("7.5", "Volta", "sm_90")),
    ],
)
def test_torchs_arch_list_is_taken_where_ours_is_unset(monkeypatch, text, expected) -> None:
    """And refused where it has no GPU for the kernels."""
    monkeypatch.delenv(archs.VARIABLE, raising=False)
    monkeypatch.setenv(archs.TORCH_VARIABLE, text)
    if expected is None:
        with pytest.raises(ArchError, match=f"^{archs.TORCH_VARIABLE}: .*got '{text}'"):
            archs.wanted_archs()
        return
    assert archs.wanted_archs() == expected
    assert archs.as_text(archs.parse_archs(expected)) == expected
    monkeypatch.setenv(archs.VARIABLE, "89")
    assert archs.wanted_archs() == "89"


@pytest.mark.parametrize(
    ("present", "expected"), [([], "80+PTX;90a"), ([90, 90], "90a"), ([75, 120, 80], "80;120")]
)
def test_archs_are_those_of_the_gpus_present(monkeypatch, present, expected) -> None:
    monkeypatch.setattr(archs, "_capabilities_from_torch", lambda: [])
    monkeypatch.setattr(archs, "_capabilities_from_driver", lambda: present)
    assert archs.default_archs() == expected


@pytest.mark.parametrize(
    ("text", "codes"),
    [
        # PTX of the highest alone: of each it would make the archive larger and serve no other GPU.
        ("86;80;89", ["sm_80", "sm_86", "sm_89", "compute_89"]),
        ("80;90a", ["sm_80", "sm_90", "compute_90"]),
        ("80+PTX;90a", ["sm_80", "sm_90", "compute_80"]),
    ],
)
def test_sm80_units_are_plain_code_with_ptx_of_the_highest(text, codes) -> None:
    wanted = archs.parse_archs(text)
    assert archs.plain_gencode(wanted) == flags_of(*codes)
    assert archs.family_gencode(Family.sm80, wanted) == flags_of(*codes)


def test_sm90_units_are_for_hopper_alone() -> None:
    assert archs.family_gencode(Family.sm90, archs.parse_archs("80;100")) == []
    for text in ("80;90a", "80;90"):
        assert archs.family_gencode(Family.sm90, archs.parse_archs(text)) == flags_of("sm_90a")


@pytest.mark.parametrize(
    ("text", "codes"),
    [("80+PTX;90a", ["sm_80", "compute_80"]), ("90a", []), ("90a+PTX", ["compute_90"])],
)
def test_units_of_rows_of_other_gpus_have_no_code_for_hopper(text, codes) -> None:
    wanted = archs.parse_archs(text)
    assert archs.family_gencode(Family.sm80, wanted, for_hopper=False) == flags_of(*codes)


# Jobs and options


@pytest.mark.parametrize(
    ("cores", "gib", "expected"), [(16, 128, 16), (16, 20, 5), (2, 3, 1), (64, 255, 63)]
)
def test_jobs_fit_cores_and_memory(cores, gib, expected) -> None:
    assert jobs.job_count(cores, gib << 30) == expected


def test_a_container_limits_cores_and_memory(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(jobs, "CGROUP", tmp_path)
    cores, memory = jobs.available_cores(), jobs.free_memory()
    (tmp_path / "cpu.max").write_text("100000 100000\n")
    (tmp_path / "memory.max").write_text(str(3 << 20))
    (tmp_path / "memory.current").write_text(str(1 << 20))
    assert (jobs.available_cores(), jobs.free_memory()) == (1, 2 << 20)
    (tmp_path / "cpu.max").write_text("max 100000\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert jobs.available_cores() == cores
    assert jobs.free_memory() == pytest.approx(memory, rel=0.5)


def test_the_job_count_can_be_set(monkeypatch) -> None:
    """By our own variable, else by the one that other builds read."""
    monkeypatch.setenv(jobs.VARIABLE, "3")
    monkeypatch.setenv(jobs.COMMON_VARIABLE, "5")
    assert jobs.default_jobs() == 3
    monkeypatch.setenv(jobs.VARIABLE, "")
    assert jobs.default_jobs() == 5
    for variable in (jobs.VARIABLE, jobs.COMMON_VARIABLE):
        monkeypatch.setenv(variable, "none")
        with pytest.raises(ValueError, match=f"^{variable}: .*'none'"):
            jobs.default_jobs()
        monkeypatch.delenv(variable)


@pytest.mark.parametrize("text", ["0", "-3", "two"])
def test_the_job_count_of_the_command_line_is_checked(monkeypatch, capsys, text) -> None:
    monkeypatch.setattr(build_kernels, "build", lambda options: None)
    assert build_kernels.main([f"--jobs={text}"]) == 1
    assert f"--jobs: expected a whole number of at least 1, got '{text}'" in capsys.readouterr().err


def test_options_are_those_of_the_environment(monkeypatch, tmp_path: Path) -> None:
    given = ("89", "head_dim=64", "3", str(tmp_path / "kernels"))
    for variable, value in zip(VARIABLES, given, strict=True):
        monkeypatch.setenv(variable, value)
    options = build_kernels.BuildOptions()
    assert (options.archs, options.rows, options.jobs) == ("89", "head_dim=64", 3)
    assert options.build_dir == tmp_path / "kernels"
    monkeypatch.setenv(jobs.VARIABLE, "0")
    with pytest.raises(ValueError, match=rf"^{jobs.VARIABLE}: .*got '0'"):
        build_kernels.BuildOptions()


@pytest.mark.parametrize("value", [None, ""], ids=["unset", "empty"])
def test_settings_that_are_empty_are_as_good_as_unset(monkeypatch, value: str | None) -> None:
    """No archs are those of the GPUs present."""
    for name in (*VARIABLES, build_extension.BACKEND_VARIABLE, "CXX"):
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    monkeypatch.setattr(archs, "default_archs", lambda: "86")
    options = build_kernels.BuildOptions()
    assert options.archs == "86" and options.rows == ""
    assert options.jobs >= 1 and options.build_dir == toolchain.REPO / "build/kernels"
    assert toolchain.host_compiler() == "g++"
    assert toolchain.nvcc_host_compiler_flags() == []
    monkeypatch.setattr(toolchain, "find_nvcc", lambda: None)
    assert build_extension.choose_backend().backend is Backend.cpu
