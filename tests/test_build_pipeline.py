"""The build at work: compiles, what ptxas says of them, tools and headers, and what is refused."""

from __future__ import annotations

import json
import re
import sys
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("ninja")  # build_tools writes ninja files with the ninja package

from kernel_rows import ROW

from build_tools import (
    build_extension,
    build_kernels,
    ninja_build,
    resource_report,
    run_job,
    toolchain,
)
from build_tools.build_extension import Backend
from build_tools.toolchain import Nvcc, ToolchainError
from third_party.cutlass import fetch

REPO = Path(__file__).resolve().parents[1]

# ptxas's report

PTXAS = """\
ptxas info    : 11 bytes gmem
ptxas info    : Compiling entry function '_ZN4sm8014forward_kernelI\
28fwd_sm80_bf16_hd128_windowedEEvv' for 'sm_90'
ptxas info    : Function properties for _ZN4sm8014forward_kernelI28fwd_sm80_bf16_hd128_windowedEEvv
    32 bytes stack frame, 28 bytes spill stores, 36 bytes spill loads
ptxas info    : Function properties for _Z6helperv
    64 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 32 bytes cumulative stack size
ptxas info    : Compile time = 604.861 ms
ptxas info    : Compiling entry function '_Z17preprocess_kernelv' for 'sm_80'
ptxas info    : Function properties for _Z17preprocess_kernelv
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 30 registers, used 0 barriers, 4096+16 bytes smem, 400 bytes cmem[0]
"""


def test_ptxas_report_is_read() -> None:
    main, helper = resource_report.parse_ptxas(PTXAS)
    assert (main.arch, main.registers, main.stack, main.spill) == ("sm_90", 255, 32, 36)
    assert main.static_smem == 0
    assert main.is_main_kernel
    assert main.instance(["fwd_sm80_bf16_hd128_full", ROW.name]) == ROW.name
    assert (helper.arch, helper.registers, helper.spill) == ("sm_80", 30, 0)
    assert helper.static_smem == 4096
    assert helper.instance([ROW.name]) is None


def test_a_report_that_cannot_be_read_is_an_error() -> None:
    with pytest.raises(ValueError, match="cannot read ptxas"):
        resource_report.parse_ptxas(PTXAS.replace("Used 30 registers", "Used many registers"))


@pytest.mark.parametrize(("allowed", "status"), [(0, 1), (35, 1), (36, 0)])
def test_a_spill_beyond_the_rows_allowance_fails(
    tmp_path, monkeypatch, capsys, allowed, status
) -> None:
    monkeypatch.setattr(resource_report, "dynamic_smem", lambda build_dir: {ROW.name: 1000})
    log = tmp_path / "unit.o.log"
    log.write_text(PTXAS)
    manifest = {"logs": [str(log)], "allowed_spill_bytes": {ROW.name: allowed}}
    (tmp_path / build_kernels.MANIFEST_NAME).write_text(json.dumps(manifest))
    assert resource_report.main(["--build-dir", str(tmp_path)]) == status
    output = capsys.readouterr()
    assert re.search(r"forward_kernel.*sm_90\s+255\s+36\s+32\s+1000$", output.out, re.MULTILINE)
    assert (f"{ROW.name} (sm_90) spills 36 bytes; {allowed} allowed" in output.err) == bool(status)


def test_wgmma_that_ptxas_serialized_fails_the_report(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(resource_report, "dynamic_smem", lambda build_dir: {})
    remark = "(C7512) Potential Performance Loss: wgmma.mma_async instructions are serialized"
    (tmp_path / "unit.log").write_text(f"ptxas info    : {remark}\n{PTXAS}")
    manifest = {"logs": [str(tmp_path / "unit.log")], "allowed_spill_bytes": {ROW.name: 36}}
    (tmp_path / "kernels.json").write_text(json.dumps(manifest))
    assert resource_report.report(tmp_path) == 1
    assert f"error: {remark}" in capsys.readouterr().err


def test_a_row_without_a_kernel_fails_the_report(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(resource_report, "dynamic_smem", lambda build_dir: {})
    manifest = {"logs": [], "allowed_spill_bytes": {ROW.name: 0}}
    (tmp_path / build_kernels.MANIFEST_NAME).write_text(json.dumps(manifest))
    assert resource_report.main(["--build-dir", str(tmp_path)]) == 1
    assert f"{ROW.name}: ptxas reported no kernel" in capsys.readouterr().err


def test_an_auxiliary_kernel_may_not_spill() -> None:
    _, helper = resource_report.parse_ptxas(PTXAS)
    spilling = replace(helper, spill_stores=8)
    assert resource_report.excess_spills([spilling], {ROW.name: 100}) == [
        "_Z17preprocess_kernelv (sm_80) spills 8 bytes; 0 allowed"
    ]


# Running compiles


def test_a_job_keeps_its_log_and_its_cost(tmp_path, capsys) -> None:
    target = tmp_path / "unit.o"
    script = "print('ptxas info : x'); print('a warning'); sum(range(3_000_000))"
    assert run_job.main(target, [sys.executable, "-c", script]) == 0
    assert capsys.readouterr().out == "a warning\n"
    assert (tmp_path / "unit.o.log").read_text() == "ptxas info : x\na warning\n"
    figures = json.loads((tmp_path / "unit.o.json").read_text())
    assert figures["peak_bytes"] > 1 << 20
    assert figures["cpu_seconds"] > 0
    assert figures["cached"] is False


def test_a_job_answered_by_ccache_keeps_the_figures_of_the_real_one(tmp_path) -> None:
    target = tmp_path / "unit.o"
    record = tmp_path / "unit.o.json"
    hit = "import os; open(os.environ['CCACHE_STATSLOG'], 'w').write('direct_cache_hit')"
    assert run_job.main(target, [sys.executable, "-c", hit]) == 0
    assert json.loads(record.read_text())["cached"] is True
    assert run_job.main(target, [sys.executable, "-c", "pass"]) == 0
    real = record.read_text()
    assert json.loads(real)["cached"] is False
    assert run_job.main(target, [sys.executable, "-c", hit]) == 0
    assert record.read_text() == real


def test_a_failed_job_fails_and_shows_everything(tmp_path, capsys) -> None:
    target = tmp_path / "unit.o"
    script = "import sys; print('error: no'); sys.exit(3)"
    assert run_job.main(target, [sys.executable, "-c", script]) == 3
    assert "error: no" in capsys.readouterr().out
    assert not (tmp_path / "unit.o.json").exists()


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
        link = ninja_build.Link(folder / "out/lib.a", "rm -f $out && ar rcsD $out $in")
        ninja_build.build(folder / "out", [job], link, jobs=1)
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


def test_a_build_that_fails_raises(host_build) -> None:
    archive = host_build()
    (archive.parent.parent / "value.h").write_text("#error no\n")
    with pytest.raises(ninja_build.BuildError, match="status"):
        host_build()


# Tools


@pytest.mark.skipif(toolchain.find_nvcc() is None, reason="needs nvcc")
def test_kernels_build_from_table_to_archive(tmp_path, capfd, monkeypatch) -> None:
    """The whole pipeline over a source tree of two files, for two archs."""
    cutlass = tmp_path / "cutlass_include"
    (cutlass / "cutlass").mkdir(parents=True)
    version = zip(("MAJOR", "MINOR", "PATCH"), (4, 2, 0), strict=True)
    text = "".join(f"#define CUTLASS_{part} {number}\n" for part, number in version)
    (cutlass / "cutlass/version.h").write_text(text)
    monkeypatch.setenv("CUTLASS_PATH", str(cutlass))
    sources = tmp_path / "csrc"
    for folder in ("flash_attn", "host", "auxiliary", "sm80"):
        (sources / folder).mkdir(parents=True)
    for header in (REPO / "csrc/flash_attn").glob("*.h"):
        (sources / "flash_attn" / header.name).write_text(header.read_text())
    (sources / "host/build_record.h").write_text(
        "namespace flash_attn_cuda { const char* build_record_json(); }\n"
    )
    (sources / "auxiliary/fill.cu").write_text("__global__ void fill(float* p) { *p = 0; }\n")
    (sources / "sm80/forward_launch.h").write_text(
        """
        #include "flash_attn/instance.h"
        namespace flash_attn_cuda::sm80 {
        template <class Tag> __global__ void forward_kernel(int* p) { *p = Tag::config.head_dim; }
        template <class Tag> void launch(const ForwardPlan&, const ForwardParams&, Stream stream) {
          forward_kernel<Tag><<<1, 1, 0, stream>>>(nullptr);
        }
        template <class Tag> constexpr ForwardInstance make_forward_instance(const char* name) {
          return {.name = name, .config = Tag::config, .smem_bytes = 77, .launch = &launch<Tag>};
        }
        }
        """
    )
    options = build_kernels.BuildOptions(
        archs="80;90a", rows="", jobs=1, build_dir=tmp_path / "build", source_dir=sources
    )
    archive = build_kernels.build(options, table=[ROW])
    assert archive.stat().st_size > 0
    assert re.search(
        r"1 kernels for 80;90a, .* CPU-minutes.*, at most .* GiB a job, archive 0\.\d MiB",
        capfd.readouterr().out,
    )
    assert resource_report.report(options.build_dir) == 0
    report = capfd.readouterr().out
    for arch in ("sm_80", "sm_90"):
        line = rf"forward_kernel<{ROW.name}>\s+{arch}\s+\d+\s+0\s+0\s+77"
        assert re.search(line, report), report


def test_torch_and_nvcc_of_different_majors_are_refused_with_both_names() -> None:
    nvcc = Nvcc(Path("/toolkit/bin/nvcc"), "13.0.88", ())
    toolchain.check_torch_matches("13.2", nvcc)
    with pytest.raises(ToolchainError, match=r"CUDA 12\.8 .*/toolkit/bin/nvcc is CUDA 13\.0\.88"):
        toolchain.check_torch_matches("12.8", nvcc)


def test_without_nvcc_there_is_the_cpu_backend_in_one_line(monkeypatch) -> None:
    monkeypatch.delenv(build_extension.BACKEND_VARIABLE, raising=False)
    monkeypatch.setattr(toolchain, "find_nvcc", lambda: None)
    choice = build_extension.choose_backend()
    assert choice.backend is Backend.cpu
    line = build_extension.announcement(choice)
    assert "CPU backend only" in line
    assert "nvcc" in line
    assert "\n" not in line


def test_a_torch_without_cuda_means_the_cpu_backend(monkeypatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.delenv(build_extension.BACKEND_VARIABLE, raising=False)
    monkeypatch.setattr(toolchain, "find_nvcc", lambda: Nvcc(Path("nvcc"), "13.0.88", ()))
    monkeypatch.setattr(torch.version, "cuda", None)
    choice = build_extension.choose_backend()
    assert choice.backend is Backend.cpu
    assert "without CUDA" in choice.reason


def test_the_backend_variable(monkeypatch) -> None:
    monkeypatch.setenv(build_extension.BACKEND_VARIABLE, "cpu")
    assert build_extension.choose_backend().backend is Backend.cpu
    monkeypatch.setenv(build_extension.BACKEND_VARIABLE, "gpu")
    with pytest.raises(ValueError, match="expected auto or cpu, got 'gpu'"):
        build_extension.choose_backend()


def test_kernels_without_nvcc_are_an_error_that_says_where_it_looked(monkeypatch, capsys) -> None:
    monkeypatch.setattr(toolchain, "find_nvcc", lambda: None)
    assert build_kernels.main([]) == 1
    assert re.search("error: .*CUDA_HOME.*PATH.*pip", capsys.readouterr().err)


def test_nvcc_of_pips_packages_is_found_with_their_headers(tmp_path, monkeypatch) -> None:
    root = tmp_path / "nvidia/cu13"
    (root / "bin").mkdir(parents=True)
    (root / "include").mkdir()
    (root / "include/cuda_runtime.h").touch()
    nvcc = root / "bin/nvcc"
    nvcc.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 13.0, V13.0.88'\n")
    nvcc.chmod(0o755)
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(toolchain, "target_site_packages", lambda: [tmp_path])
    monkeypatch.setattr(toolchain, "SYSTEM_NVCC", tmp_path / "absent")
    monkeypatch.setattr(toolchain.shutil, "which", lambda name: None)
    found = toolchain.find_nvcc.__wrapped__()
    assert found == Nvcc(nvcc, "13.0.88", (root / "include",))
    assert found.major == 13


def test_every_package_is_installed() -> None:
    """Setuptools takes the list as it is: a folder that is not on it is missing from a wheel."""
    listed = re.search(r"^packages = \[(.*?)\]", (REPO / "pyproject.toml").read_text(), re.M | re.S)
    assert listed is not None
    packages = (REPO / "flash_attn_cuda").rglob("__init__.py")
    names = [".".join(path.parent.relative_to(REPO).parts) for path in packages]
    assert sorted(re.findall(r'"([\w.]+)"', listed[1])) == sorted(names)


# CUTLASS


@pytest.fixture
def wheel(tmp_path) -> Path:
    path = tmp_path / "nvidia_cutlass.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(fetch.HEADERS_IN_WHEEL + "cutlass/version.h", "#define X\n")
        archive.writestr("cutlass_library/generator.py", "import os\n")
    return path


def test_a_tampered_wheel_is_refused_and_nothing_is_unpacked(wheel, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(fetch, "download", lambda folder: wheel)
    include = tmp_path / "include"
    with pytest.raises(
        fetch.FetchError, match=f"expected sha256 {fetch.SHA256}, got [0-9a-f]{{64}}"
    ):
        fetch.fetch(include)
    assert not include.exists()


def test_the_pinned_wheel_is_unpacked_once(wheel, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(fetch, "SHA256", fetch.hashlib.sha256(wheel.read_bytes()).hexdigest())
    downloads = []
    monkeypatch.setattr(fetch, "download", lambda folder: downloads.append(folder) or wheel)
    include = tmp_path / "third_party/include"
    assert fetch.fetch(include) == include
    assert fetch.fetch(include) == include
    assert len(downloads) == 1
    names = [path.relative_to(include).as_posix() for path in include.rglob("*") if path.is_file()]
    assert names == ["cutlass/version.h"]
    assert list(include.parent.iterdir()) == [include]


def test_unpacking_after_another_build_did_is_no_error(wheel, tmp_path) -> None:
    fetch.unpack(wheel, tmp_path / "include")
    fetch.unpack(wheel, tmp_path / "include")


def test_cutlass_path_must_hold_the_headers(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("CUTLASS_PATH", str(tmp_path))
    with pytest.raises(ToolchainError, match="CUTLASS_PATH"):
        toolchain.find_cutlass()
