"""Another build of the extension as a contender: where it is looked for, what it is called with."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.core.metrics import Pass
from benchmarks.core.refcheck import ReferenceCheck
from benchmarks.core.runner import Status, make_input_sets, run_case
from benchmarks.peers import backends, other_build
from benchmarks.peers.backends import BACKENDS, Unsupported
from flash_attn_cuda import build_info
from tests.benchmarks.cases import BRIEF, SMALL

LIBRARY = """
from flash_attn_cuda import flash_attn_func

def attention(q, k, v, softmax_scale, causal):
    options = {"softmax_scale": softmax_scale, "causal": causal, "return_attn_probs": True}
    return flash_attn_func(q, k, v, **options)[:2]
"""


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    other_build.other_attention.cache_clear()
    yield
    other_build.other_attention.cache_clear()


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One in Python, for CPU tensors."""
    path = tmp_path / "_C.py"
    path.write_text(LIBRARY)
    monkeypatch.setenv(other_build.LIBRARY_VARIABLE, str(path))
    monkeypatch.setattr(backends, "require_cuda", lambda case: None)
    return path


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("causal", [False, True])
def test_its_results_are_checked_like_others(causal: bool) -> None:
    case = replace(SMALL, causal=causal)
    checker = ReferenceCheck(case, make_input_sets(case)[0])
    for which in Pass:
        verdict = checker.check(BACKENDS["other_build"], which)
        assert verdict["passes"], verdict


@pytest.mark.usefixtures("library")
def test_it_takes_turns_with_ours() -> None:
    both = [BACKENDS["ours"], BACKENDS["other_build"]]
    results = run_case(SMALL, Pass.forward, both, make_input_sets(SMALL), BRIEF)
    assert all(result.status is Status.ok for result in results)


def test_it_has_to_be_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(other_build.LIBRARY_VARIABLE, raising=False)
    with pytest.raises(ImportError, match="FLASH_ATTN_CUDA_OTHER_BUILD is not set"):
        other_build.other_attention()
    monkeypatch.setenv(other_build.LIBRARY_VARIABLE, str(tmp_path / "_C.so"))
    with pytest.raises(ImportError, match=r"_C\.so is no module of Python"):
        other_build.other_attention()


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("changes", [{"softcap": 3.0}, {"head_dim": 12}])
def test_what_it_is_not_called_for(changes: dict) -> None:
    with pytest.raises(Unsupported, match=r"softcap|multiples of 8"):
        BACKENDS["other_build"].prepare(replace(SMALL, **changes))


@pytest.mark.skipif(build_info.extension is None, reason="flash_attn_cuda._C is not built here")
def test_a_library_is_loaded_beside_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    assert build_info.extension is not None
    monkeypatch.setenv(other_build.LIBRARY_VARIABLE, str(build_info.extension.__file__))
    with pytest.raises(ValueError, match="q: must be a CUDA tensor"):
        other_build.other_attention()(*[torch.zeros(1, 8, 1, 8)] * 3, None, False)
