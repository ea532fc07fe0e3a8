"""What an installation says of itself: its extension or the lack of it, the command line."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import torch

import flash_attn_cuda
from build_tools.build_extension import CHOICE_NAME, Backend, Choice, record_choice
from build_tools.generate.kernel_units import row_record
from build_tools.report.print_table import table_text
from flash_attn_cuda import flash_attn_func
from flash_attn_cuda.__main__ import main, run
from flash_attn_cuda.call.fields import AttentionCall
from flash_attn_cuda.installed import build_info
from flash_attn_cuda.report import self_check
from kernel_table.all_rows import ALL_ROWS

BROKEN_EXTENSION = "flash_attn_cuda built with torch 1.2.3\0 but no shared object"
IMPORT_SCRIPT = """
import warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import torch, flash_attn_cuda
ours = [str(w.message) for w in caught if "flash_attn_cuda" in str(w.message)]
print(len(ours), ours)
print(flash_attn_cuda.cuda_unavailable_reason())
print(flash_attn_cuda.flash_attn_func(*torch.ones(3, 1, 2, 1, 8)).sum().item())
"""


def test_an_extension_that_does_not_load(tmp_path: Path) -> None:
    """One warning that names both torch versions, and a package that works on the CPU."""
    package = tmp_path / "flash_attn_cuda"
    package.mkdir()
    for source in Path(flash_attn_cuda.__file__).parent.iterdir():
        if source.suffix == ".py" or (source / "__init__.py").is_file():
            (package / source.name).symlink_to(source)
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    (package / f"_C{suffix}").write_text(BROKEN_EXTENSION)
    result = subprocess.run(
        [sys.executable, "-c", IMPORT_SCRIPT],
        cwd=tmp_path, capture_output=True, text=True, check=True,
    )  # fmt: skip
    warning, reason, total = result.stdout.splitlines()
    assert warning.startswith("1 ")
    for text in (warning, reason):
        assert "built with torch 1.2.3" in text and torch.__version__ in text
    assert float(total) == 16.0


def test_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    printed = capsys.readouterr().out
    assert flash_attn_cuda.__version__ in printed and torch.__version__ in printed
    assert "self-check passed" in printed


def test_a_reader_that_leaves_early_ends_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """As any program of a pipe, without a word of Python's."""
    handlers: list[tuple[Any, Any]] = []
    monkeypatch.setattr(signal, "signal", lambda *given: handlers.append(given))
    monkeypatch.setattr("sys.argv", ["flash-attn-cuda", "--help"])
    with pytest.raises(SystemExit):
        run()
    assert handlers == [(signal.SIGPIPE, signal.SIG_DFL)]


@pytest.fixture
def one_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of those that a self-check makes, the first."""
    first = next(self_check.checks("cpu"))
    monkeypatch.setattr(self_check, "checks", lambda device: iter([first]))


def test_self_check_can_fail(monkeypatch: pytest.MonkeyPatch, one_check: None) -> None:
    def off_by_a_little(*args: Any, **options: Any) -> Any:
        out, lse, s_dmask = flash_attn_func(*args, **options)
        return out * 1.05, lse, s_dmask

    monkeypatch.setattr(self_check, "flash_attn_func", off_by_a_little)
    assert main([]) == 1


def test_an_extension_that_does_not_load_fails_the_check(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], one_check: None
) -> None:
    """Without any there is nothing to fail: the CPU backend was asked for."""
    monkeypatch.setattr(build_info, "extension", None)
    monkeypatch.setattr(build_info, "_extension_error", "undefined symbol")
    for spec, status in ((object(), 1), (None, 0)):
        monkeypatch.setattr(build_info, "find_spec", lambda name, found=spec: found)
        assert main([]) == status
        assert ("undefined symbol\nself-check FAILED" in capsys.readouterr().out) == bool(status)


@pytest.mark.parametrize(
    ("arguments", "extension", "devices", "complaint"),
    [
        ("--explain", False, 0, "nothing to explain: there is none\n"),
        ("--table", False, 0, "no kernels: there is none\n"),
        # What the package says elsewhere; the extension, which would fail, is not asked.
        ("--explain", True, 0, "nothing to explain: torch sees no CUDA device\n"),
        ("--explain --device 2", True, 2, "nothing to explain: --device: must be from 0 to 1, "),
    ],
)
def test_what_there_is_nothing_to_say_of(
    monkeypatch, capsys, arguments: str, extension: bool, devices: int, complaint: str
) -> None:
    monkeypatch.setattr(build_info, "extension", object() if extension else None)
    monkeypatch.setattr(build_info, "_extension_error", "there is none")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: devices > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    for cached in (build_info.build_record, build_info.compiled_rows):
        monkeypatch.setattr(build_info, cached.__name__, cached.__wrapped__)
    assert main(arguments.split()) == 1
    assert capsys.readouterr().err.startswith(complaint)


@pytest.mark.parametrize("text", ["99999999999999", "64.5"])
def test_numbers_that_the_extension_cannot_take(
    capsys: pytest.CaptureFixture[str], text: str
) -> None:
    with pytest.raises(SystemExit):
        main(["--explain", "--head-dim", text])
    complaint = f"argument --head-dim: must be a whole number of 32 bits, got '{text}'"
    assert complaint in capsys.readouterr().err


def test_why_there_is_no_extension(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason that setup.py recorded, and what to do."""
    assert Path(flash_attn_cuda.__file__).with_name(CHOICE_NAME) == build_info.INSTALL_RECORD
    monkeypatch.setattr(build_info, "INSTALL_RECORD", tmp_path / CHOICE_NAME)
    record_choice(Choice(Backend.cpu, "there is no nvcc"), tmp_path)
    reason = build_info._missing_reason()
    assert "(CPU backend only), because there is no nvcc. " in reason
    assert "pip install --force-reinstall --no-deps --no-cache-dir" in reason
    record_choice(Choice(Backend.cuda, "nvcc"), tmp_path)
    assert "because" not in build_info._missing_reason()


def test_compiled_rows_and_explain(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The build record of the whole table, read as an extension would hand it out."""
    calls: list[AttentionCall] = []
    backward_calls: list[AttentionCall] = []

    class Extension:
        def build_record(self) -> str:
            instances = [row_record(row) for row in ALL_ROWS]
            return json.dumps({"archs": ["80", "90a"], "nvcc": "13.0", "instances": instances})

        def explain_forward(
            self, call: AttentionCall, device: int | None, tangents: bool
        ) -> dict[str, Any]:
            calls.append(call)
            return {"instance": ALL_ROWS[0].name, "grid": 12}

        def explain_backward(
            self, call: AttentionCall, device: int | None, tangents: bool
        ) -> dict[str, Any]:
            backward_calls.append(call)
            raise RuntimeError("no compiled kernel")

    monkeypatch.setattr(build_info, "extension", Extension())
    monkeypatch.setattr(build_info, "cuda_unavailable_reason", lambda device=None: None)
    for cached in (build_info.build_record, build_info.compiled_rows):
        monkeypatch.setattr(build_info, cached.__name__, cached.__wrapped__)
    rows = build_info.compiled_rows()
    assert [row.name for row in rows] == [row.name for row in ALL_ROWS]
    assert {row.pass_name for row in rows} <= {"forward", "backward"}
    assert {row.dtype for row in rows} <= {"fp16", "bf16"}
    assert {row.mask for row in rows} <= {"full", "windowed"}
    assert all("block_m" in row.config for row in rows)
    assert "compiled for     80, 90a" in build_info.describe()
    assert [row.head_dim_v for row in rows] == [row.value_dim for row in ALL_ROWS]
    assert "128, 192/128, 192, 256" in build_info.describe()
    assert main(["--table"]) == 0
    assert capsys.readouterr().out == f"{table_text()}\n"

    assert main(["--explain", "--heads-q", "8", "--seqlen-q", "512", "--causal"]) == 1
    printed = capsys.readouterr().out
    assert f"instance: {ALL_ROWS[0].name}" in printed and "'block_m': " in printed
    assert "none: no compiled kernel" in printed
    assert calls[0].q.shape == calls[0].k.shape == calls[0].v.shape == (1, 512, 8, 128)
    assert calls[0].causal and calls[0].num_splits == 0
    assert not any(call.has_masks() for call in (calls[0], backward_calls[0]))

    decode = ["--cache", "--page-size", "16", "--window", "7", "0", "--num-splits", "3"]
    assert main(["--explain", *decode]) == 0
    assert calls[1].k.shape == (256, 16, 16, 128) and calls[1].block_table.shape == (1, 256)
    assert calls[1].seqused_k is not None and calls[1].over_cache
    assert (calls[1].window_size_left, calls[1].num_splits) == (7, 3)
    assert "backward" not in capsys.readouterr().out
    assert main(["--explain", "--cache", "--e4m3"]) == 0
    assert {calls[-1].k.dtype, calls[-1].v.dtype} == {torch.float8_e4m3fn}
    latent = ["--explain", "--packed", "--qv", "--head-dim-v", "512"]
    assert main([*latent, "--keys-per-list", "9"]) == 0
    assert calls[-1].qv.shape == (*calls[-1].q.shape[:2], 512)
    assert calls[-1].key_lists.shape == (len(calls[-1].q), calls[-1].k.shape[1], 9)
    assert "backward" not in capsys.readouterr().out
    for over_cache in (["--cache"], ["--page-size", "64"]):
        main(["--explain", *over_cache])
        assert calls[-1].num_splits == 0

    for option in ("--block-sparse", "--bias"):
        main(["--explain", option])
        for call in (calls[-1], backward_calls[-1]):
            assert (call.block_rows is not None) == (option == "--block-sparse")
            assert (call.bias is not None) == (option == "--bias")


def test_self_check_covers_every_kind_of_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    def row(name: str, **fields: Any) -> build_info.CompiledRow:
        common = {"family": "sm80", "dtype": "fp16", "mask": "windowed"}
        common |= {"head_dim": 64, "head_dim_v": 64}
        config = {key: fields.pop(key) for key in ("kind", "features") if key in fields}
        return build_info.CompiledRow(**{**common, "name": name, "config": config, **fields})

    rows = (
        row("plain", pass_name="forward"),
        row("features", pass_name="forward", features=["softcap", "alibi"]),
        row("decode", pass_name="forward", kind="decode", features=["softcap"]),
        row("backward", pass_name="backward", features=["deterministic"]),
    )
    monkeypatch.setattr(self_check, "compiled_rows", lambda: rows)
    kinds = {check.kind.name: check.backward for check in self_check.checks("cuda")}
    assert kinds == {"plain": True, "features": False, "decode": False}


def test_cuda_without_a_device_says_why() -> None:
    reason = build_info.cuda_unavailable_reason()
    if reason is None:
        pytest.skip("this machine can run CUDA tensors")
    with pytest.raises(RuntimeError, match="cannot run on cuda"):
        build_info.require_cuda(torch.device("cuda"))


@pytest.mark.parametrize(
    ("archs", "capability", "runs"),
    [
        (("80",), (8, 0), True),
        (("80",), (8, 9), True),
        (("86",), (8, 0), False),
        (("80",), (7, 5), False),
        (("80",), (9, 0), True),  # the PTX of the highest arch
        (("80", "90a"), (9, 0), True),
        (("80", "90a"), (12, 0), True),
        (("90a",), (8, 9), False),
        (("80+PTX", "90a"), (10, 0), True),
        ((), (9, 0), False),
    ],
)
def test_archs_run_on(archs: tuple[str, ...], capability: tuple[int, int], runs: bool) -> None:
    assert build_info.archs_run_on(archs, capability) is runs


@pytest.mark.parametrize(
    ("archs", "text"),
    [
        (
            ("80+PTX", "90a"),
            "8.0, 8.6, 8.9: binary of 80; 9.0: binary of 90a; 10.0, 12.0: PTX of 80",
        ),
        (("90a",), "8.0, 8.6, 8.9: none; 9.0: binary of 90a; 10.0, 12.0: PTX of 90"),
        (("80", "86", "90a"), "8.0: binary of 80; 8.6, 8.9: binary of 86; 9.0: binary of 90a; "
         "10.0, 12.0: PTX of 90"),
        (("80+PTX",), "8.0, 8.6, 8.9: binary of 80; 9.0, 10.0, 12.0: PTX of 80"),
        ((), "8.0, 8.6, 8.9, 9.0, 10.0, 12.0: none"),
    ],
)  # fmt: skip
def test_which_code_gpus_run(monkeypatch, archs: tuple[str, ...], text: str) -> None:
    record = {"archs": list(archs), "nvcc": "13.0"}
    monkeypatch.setattr(build_info, "build_record", lambda: record)
    monkeypatch.setattr(build_info, "compiled_rows", lambda: ())
    assert f"\ncode for GPUs    {text}\n" in build_info.describe()


def test_which_code_a_device_runs(monkeypatch) -> None:
    monkeypatch.setattr(build_info, "build_record", lambda: {"archs": ["80+PTX", "90a"]})
    monkeypatch.setattr(build_info, "cuda_unavailable_reason", lambda device=None: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"GPU {device}")
    capabilities = [(9, 0), (10, 0)]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capabilities[device])
    assert [line.split(": ")[1] for line in build_info._describe_devices()] == [
        "ready, runs binary of 90a",
        "ready, runs PTX of 80",
    ]
