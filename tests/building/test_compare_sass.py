"""What counts as a difference between two builds' machine code."""

from __future__ import annotations

from pathlib import Path

import pytest

from build_tools.report import compare_sass
from build_tools.report.compare_sass import Code

LISTING = """
	code for sm_90a
		Function : _Zfirst
	.headerflags	@"EF_CUDA_SM90"
        /*0000*/                   LDC R1, c[0x0][0x28] ;      /* 0x00000a00ff017b82 */
                                                               /* 0x000fe20000000800 */
        /*0010*/              @!P0 STL [R1], R2 ;              /* 0x0000000201007387 */
        /*0020*/               @P1 LDL.64 R2, [R1+0x8] ;       /* 0x0000080001027983 */
        /*0030*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR4], R24 ;
		Function : _Zsecond
        /*0000*/             @!UP0 UMOV UR4, URZ ;             /* 0x0000003f00047c82 */
        /*0010*/                   EXIT ;                      /* 0x000000000000794d */
"""


def test_functions_are_read_with_their_predicates() -> None:
    first, second = compare_sass.functions(iter(LISTING.splitlines())).values()
    assert first.opcodes == ("LDC", "STL", "LDL.64", "HGMMA.64x128x16.F32.BF16")
    assert first.local == 2
    assert second.opcodes == ("UMOV", "EXIT")


def test_functions_of_one_file_are_paired_whatever_its_number() -> None:
    old, new = (
        compare_sass.functions(
            iter([f"Function : _ZN2fa45_GLOBAL__N__{n}_9_append_cu_7ba410e43addEv"])
        )
        for n in ("0aa8c342", "b1ba5bfa")
    )
    assert old.keys() == new.keys() and len(old) == 1


@pytest.mark.parametrize(
    ("after", "lines", "worse"),
    [
        (("MOV", "EXIT"), 0, False),
        (("EXIT",), 1, False),  # shorter
        (("IMAD", "EXIT"), 1, False),  # another instruction for one
        (("MOV", "NOP", "EXIT"), 1, True),
        (("STL", "EXIT"), 1, True),
    ],
)
def test_longer_code_and_spills_are_worse(after, lines, worse) -> None:
    old, new = {"_Z": Code(("MOV", "EXIT"))}, {"_Z": Code(after)}
    found, is_worse = compare_sass.compare(old, new)
    assert (len(found), is_worse) == (lines, worse)


def test_a_function_that_is_gone_is_worse() -> None:
    lines, worse = compare_sass.compare({"_Za": Code(()), "_Zb": Code(())}, {"_Zb": Code(())})
    assert lines == ["only in the old build: _Za"] and worse


def test_what_cannot_be_read_is_an_error(tmp_path: Path, monkeypatch, capsys) -> None:
    tool = tmp_path / "cuobjdump"
    tool.write_text("#!/bin/sh\necho 'cuobjdump info : no code'\n")
    tool.chmod(0o755)
    monkeypatch.setattr(compare_sass, "find_cuobjdump", lambda: str(tool))
    assert compare_sass.main(["old.a", "new.a"]) == 2
    assert "read no code in old.a" in capsys.readouterr().err
