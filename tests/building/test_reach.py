"""The counts of how far an argument reaches."""

from __future__ import annotations

from pathlib import Path

import pytest

from build_tools.report import reach


def test_words_count_by_themselves(tmp_path: Path) -> None:
    first, second = tmp_path / "a.py", tmp_path / "b.h"
    first.write_text("sink = 1\nsinks = 2\nd_sink = 3\n")
    second.write_text("// The Sink.\nint sink = sink_of(sink);\n")
    assert reach.naming("sink", [first, second]) == (2, 3)
    assert reach.naming("bias", [first, second]) == (0, 0)


def test_headers_are_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "csrc"
    folder.mkdir()
    (folder / "a.h").write_text('#include "b.h"\n#include <cute/tensor.hpp>\n')
    (folder / "b.h").write_text('#include "c.h"\n')
    (folder / "c.h").write_text('#include "b.h"\n#include "outside.h"\n')
    monkeypatch.setattr(reach, "REPO", tmp_path)
    assert reach.headers_behind(folder / "a.h") == {folder / "b.h", folder / "c.h"}


def test_parameters_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "a.py"
    path.write_text("def f(a, /, b, *c, d, **e): ...\nclass A:\n    def g(self): ...\n")
    assert reach.parameters(path) == [3, 1]


def test_the_interface_is_there() -> None:
    assert all(path.is_file() for path in reach.interface())
    assert len(reach.interface()) > len(reach.INTERFACE)


def test_the_report_is_of_the_sources(capsys: pytest.CaptureFixture[str]) -> None:
    assert reach.main(["block_table"]) == 0
    first, *rest = capsys.readouterr().out.splitlines()
    files, lines = reach.naming("block_table", reach.sources(*reach.FOLDERS))
    assert first.startswith(f"block_table: {files} files, {lines} lines; ") and files > 5
    inside = int(first.split("; ")[1].split()[0])
    assert 5 < inside < files
    assert any(line.startswith("operators of torch: ") for line in rest)
    assert reach.operators() > 5
    assert min(reach.entries()) > 3
