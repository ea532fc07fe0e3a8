"""The example of native sparse attention: it is causal, learns beside full attention, and a wrong
branch shows.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

import sparse
from model import GPTConfig

SMALL = ["--device=cpu", "--seqlen=64", "--batch-size=2", "--steps=4"]


def test_it_learns_beside_full_attention(capsys: pytest.CaptureFixture[str]) -> None:
    assert sparse.main(SMALL) == 0
    told = capsys.readouterr().out
    assert "a query attends to 80 of 64 keys" in told and "full 4." in told
    assert sparse.main([*SMALL, "--tolerance=-9"]) == 1


def test_later_tokens_change_nothing() -> None:
    torch.manual_seed(0)
    model = sparse.sparse_gpt(GPTConfig(layers=2, width=64, heads=4, seqlen=160))
    tokens = torch.randint(256, (2, 160))
    changed = tokens.clone()
    changed[:, 90:] = 7
    before, after = model(tokens), model(changed)
    assert torch.allclose(before[:, :90], after[:, :90], atol=1e-5)
    assert not torch.allclose(before[:, 90:], after[:, 90:], atol=1e-2)


def test_a_wrong_branch_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = sparse._plain
    monkeypatch.setattr(sparse, "_plain", lambda q, k, v, visible: exact(1.01 * q, k, v, visible))
    assert sparse.main(SMALL) == 1
