"""The example of latent attention: steps over a cache are the whole sequence; a wrong one shows."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

import latent

SIZES = {"heads": 2, "layers": 2, "width": 32, "batch": 2, "steps": 3, "prompt-length": 63}
SIZES["keys"] = 9
SMALL = ["--device=cpu", *(f"--{name}={value}" for name, value in SIZES.items())]


def test_steps_are_the_whole_sequence(capsys: pytest.CaptureFixture[str]) -> None:
    assert latent.main(SMALL) == 0
    told = capsys.readouterr().out
    assert "2 sequences, over all keys" in told and "2 sequences, over lists of 9 keys" in told
    assert latent.main([*SMALL, "--prompt-length=2", "--keys=16"]) == 0


def test_a_wrong_step_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scale that the columns of q would have by default."""
    exact = latent.plain
    monkeypatch.setattr(latent, "plain", lambda q, k, v, **of: exact(1.1 * q, k, v, **of))
    assert latent.main(SMALL) == 1


def test_a_key_that_no_list_names_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latent, "listed_keys", lambda position, keys: None)
    assert latent.main(SMALL) == 1
