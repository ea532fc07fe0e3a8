"""The generating example: a cache changes the speed and nothing else, and a wrong one is found."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

import generate
import train_gpt
from generate import Generated, first_difference, with_cache, without_cache
from model import GPT, GPTConfig, load_model, save_model

PROMPTS = [b"The with statement", b"A", b"class Operator:\n"]
TINY = GPTConfig(layers=2, width=64, heads=2, seqlen=48)


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def model() -> GPT:
    """Not trained, but with layers that have their say: a new model mostly repeats a byte."""
    torch.manual_seed(0)
    model = GPT(TINY)
    for block in model.blocks:
        block.attention.project.weight.data *= 16
        block.mlp.project.weight.data *= 16
    return model


@pytest.mark.parametrize("page_size", [None, 1, 5, 16, 100])
@torch.no_grad()
def test_a_cache_gives_the_same_logits(model, page_size):
    expected = without_cache(model, PROMPTS, 12)
    actual = with_cache(model, PROMPTS, 12, page_size=page_size)
    assert torch.equal(actual.argmax(-1), expected.argmax(-1))
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("scales", ["token", "head"])
@torch.no_grad()
def test_a_cache_of_e4m3_changes_little_and_pages_nothing(model, scales):
    exact = without_cache(model, PROMPTS, 12)
    forced = partial(with_cache, model, PROMPTS, 12, forced=exact.argmax(-1))
    torch.testing.assert_close(forced(), exact, rtol=1e-4, atol=1e-4)
    dense = forced(scales=scales)
    assert 0.0 < (dense - exact).abs().mean() < 0.05 * exact.abs().mean()
    torch.testing.assert_close(forced(scales=scales, page_size=5), dense, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_scales_per_head_are_those_of_the_prompts(model):
    cache = generate.Cache.empty(model, 1, 8, None, "head")
    cache.add(model, torch.tensor(list(b"some")), torch.tensor([0, 4], dtype=torch.int32))
    of_prompts = [descale.clone() for of_layer in cache.descales for descale in of_layer]
    cache.add(model, torch.tensor([[7]]))
    assert len(cache.descales) == TINY.layers and cache.keys[0].dtype == generate.E4M3
    for descale, before in zip(sum(cache.descales, ()), of_prompts, strict=True):
        assert descale.shape == (TINY.heads,) and torch.equal(descale, before)


@pytest.mark.gpu
@pytest.mark.parametrize("scales", ["token", "head"])
def test_a_cache_of_e4m3_on_the_gpu(device, model, scales):
    model = model.to(device)
    tokens = generate.generate(without_cache, model, PROMPTS, 12).tokens
    forced = partial(with_cache, forced=tokens)
    dense = generate.generate(forced, model, PROMPTS, 12).logits
    small = generate.generate(partial(forced, scales=scales), model, PROMPTS, 12).logits
    assert 0.0 < (small - dense).abs().mean() < 0.08 * dense.abs().mean()


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", [None, 1, 16])
def test_on_the_gpu(device, model, page_size):
    model = model.to(device)
    expected = generate.generate(without_cache, model, PROMPTS, 12)
    actual = generate.generate(partial(with_cache, page_size=page_size), model, PROMPTS, 12)
    assert first_difference(expected, actual, generate.TIES[model.cos.device.type]) is None


def test_the_whole_program_after_training(tmp_path, capsys):
    options = "--device cpu --steps 20 --seqlen 40 --seconds 600 --out"
    assert train_gpt.main([*options.split(), str(tmp_path)]) == 0
    capsys.readouterr()
    assert generate.main(["--device", "cpu", "--model", str(tmp_path / "model.pt")]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("generating on the CPU backend")
    assert "tokens/s" in printed and printed.count("the same") == 2
    for words in (*generate.PROMPTS, "without a cache", "dense cache", "pages of 16"):
        assert words in printed


@pytest.mark.parametrize("scales", ["token", "head"])
def test_the_program_with_a_cache_of_e4m3(model, tmp_path, capsys, scales):
    save_model(model, tmp_path / "model.pt")
    arguments = ["--device", "cpu", "--model", str(tmp_path / "model.pt"), "--length", "8"]
    assert generate.main([*arguments, "--cache-dtype", "e4m3", "--scales", scales]) == 0
    printed = capsys.readouterr().out
    assert f"e4m3 cache, scales per {scales}" in printed and "logits within" in printed
    assert "tokens/s" in printed


def test_a_wrong_cache_fails_the_program(model, monkeypatch, tmp_path, capsys):
    save_model(model, tmp_path / "model.pt")
    right = generate.flash_attn_with_kvcache
    forgetful = partial(right, softmax_scale=0.0)
    monkeypatch.setattr(generate, "flash_attn_with_kvcache", forgetful)
    arguments = ["--device", "cpu", "--model", str(tmp_path / "model.pt"), "--length", "12"]
    assert generate.main(arguments) == 1
    assert capsys.readouterr().out.count("DIFFER in prompt 0 from byte") == 2


def test_equally_likely_bytes_are_no_difference():
    one = Generated(torch.tensor([[[1.0, 2.0], [3.0, 3.01]]]), 1.0)
    other = Generated(torch.tensor([[[1.0, 2.0], [3.02, 3.0]]]), 1.0)
    assert first_difference(one, other, tie=1e-2) is None
    assert first_difference(one, other, tie=1e-4) == (0, 1)
    assert one.tokens_per_second == 2.0


def test_a_saved_model_is_the_same(model, tmp_path):
    save_model(model, tmp_path / "model.pt")
    loaded = load_model(tmp_path / "model.pt", torch.device("cpu"))
    assert loaded.config == TINY
    tokens = torch.randint(256, (1, 9))
    assert torch.equal(loaded(tokens), model(tokens))


def test_a_model_of_another_order_of_columns_is_refused(model, tmp_path):
    path = tmp_path / "model.pt"
    save_model(model, path)
    saved = torch.load(path, weights_only=True)
    assert saved.pop("columns") == "heads, qkv, head_dim"
    torch.save(saved, path)
    with pytest.raises(ValueError, match=r"model\.pt: the columns of qkv .* got None: train it"):
        load_model(path, torch.device("cpu"))


@pytest.mark.parametrize(
    "arguments", [["--length", "48"], ["--prompt", "x" * 48], ["--prompt", ""], ["--length", "0"]]
)
def test_what_does_not_fit_is_refused(model, tmp_path, capsys, arguments):
    save_model(model, tmp_path / "model.pt")
    with pytest.raises(SystemExit) as error:
        generate.main(["--device", "cpu", "--model", str(tmp_path / "model.pt"), *arguments])
    words = f"{error.value} {capsys.readouterr().err}"
    assert "must fit the model's context of 48 bytes" in words or "must be at least 1" in words


def test_a_missing_model_is_named(tmp_path):
    with pytest.raises(SystemExit, match=r"no file .*model\.pt; examples/train_gpt\.py writes one"):
        generate.main(["--device", "cpu", "--model", str(tmp_path / "model.pt")])
