"""The example of latent attention: steps over a cache are the whole sequence; a wrong one shows."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

import latent

SIZES = {"heads": 2, "layers": 2, "width": 32, "batch": 2, "steps": 3, "prompt-length": 63}
SMALL = ["--device=cpu", *(f"--{name}={value}" for name, value in SIZES.items())]


def test_steps_are_the_whole_sequence(capsys: pytest.CaptureFixture[str]) -> None:
    assert latent.main(SMALL) == 0
    assert "3 tokens of 2 sequences" in capsys.readouterr().out


def test_a_wrong_step_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scale that the columns of q would have by default."""
    exact = latent.plain
    monkeypatch.setattr(latent, "plain", lambda q, k, v: exact(1.1 * q, k, v))
    assert latent.main(SMALL) == 1
