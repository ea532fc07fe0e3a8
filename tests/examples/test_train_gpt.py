"""The training example: it learns, leaves what it promises, and finds a wrong attention."""

from __future__ import annotations

import contextlib
import csv
import math
import os
import socket
import subprocess
import sys
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

import agreement
import model as gpt
import train_gpt
from agreement import compare_curves, compare_step
from model import GPT, GPTConfig
from training import PRESETS, Corpus, Curve, Preset, learning_rate_factor, manual_text, train

from tests.context_parallel.ranks import forking_context

CPU = torch.device("cpu")
TINY = Preset(GPTConfig(layers=2, width=64, heads=2, seqlen=32), 4, 30, 1e-2)


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def corpus() -> Corpus:
    return Corpus(manual_text(), TINY.model.seqlen, TINY.batch_size, CPU)


def tiny_model(attention: gpt.Attention = gpt.ours) -> GPT:
    torch.manual_seed(0)
    return GPT(TINY.model, attention)


# The whole program


@pytest.fixture(scope="module")
def demo(tmp_path_factory) -> tuple[Path, str]:
    """The output folder and what was printed by a short run on the CPU."""
    folder = tmp_path_factory.mktemp("demo")
    capture = pytest.MonkeyPatch()
    lines: list[str] = []
    capture.setattr("builtins.print", lambda *parts, **_: lines.append(" ".join(map(str, parts))))
    try:
        options = "--device cpu --steps 40 --seqlen 64 --seconds 600 --out"
        status = train_gpt.main([*options.split(), str(folder)])
    finally:
        capture.undo()
    assert status == 0, lines
    return folder, "\n".join(lines)


def test_the_loss_falls(demo):
    with (demo[0] / "losses.csv").open() as file:
        losses = [float(row["ours"]) for row in csv.DictReader(file)]
    assert len(losses) == 40
    assert losses[0] == pytest.approx(math.log(256), abs=0.3)  # a new model knows nothing
    assert sum(losses[-5:]) / 5 < losses[0] - 2.0


def test_sample_is_written(demo):
    assert len((demo[0] / "sample.txt").read_text()) >= 300


def test_picture_is_written(demo):
    pytest.importorskip("matplotlib")
    assert (demo[0] / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_what_it_says(demo):
    text = demo[1]
    assert "CPU backend" in text.splitlines()[0]
    assert "tokens/s" in text
    assert "step 40/40" in text
    assert "validation" in text
    assert "one step, ours and torch SDPA agree: loss" in text


def test_a_wrong_attention_fails_the_program(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(agreement, "ours", not_causal)
    arguments = ["--device", "cpu", "--steps", "2", "--seqlen", "16", "--out", str(tmp_path)]
    assert train_gpt.main(arguments) == 1
    assert "DISAGREE" in capsys.readouterr().out


def test_compare_curves_trains_all_three(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # pip install . brings none
    text = tmp_path / "text.txt"
    text.write_bytes(b"the quick brown fox jumps over the lazy dog\n" * 40)
    arguments = ["--device", "cpu", "--steps", "4", "--seqlen", "16", "--compare-curves"]
    assert train_gpt.main([*arguments, "--text", str(text), "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "loss curves of ours and torch SDPA agree" in printed
    assert "no loss.png: matplotlib is not installed" in printed
    assert (
        f"loss curve: {tmp_path / 'losses.csv'}" in printed and (tmp_path / "sample.txt").exists()
    )
    with (tmp_path / "losses.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 4 and set(rows[0]) == {"step", "ours", "sdpa", "sdpa-math"}


@pytest.mark.parametrize("option", ["--steps", "--seqlen", "--batch-size"])
def test_sizes_must_be_positive(option, capsys):
    with pytest.raises(SystemExit):
        train_gpt.parse_arguments([option, "0"])
    assert "must be at least 1, got 0" in capsys.readouterr().err


# Sequences over several processes


def run_program(folder: Path, options: str) -> str:
    """What train_gpt.py prints in a process of its own, which starts others itself."""
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, str(root / "examples/train_gpt.py")]
    command += ["--out", str(folder), *options.split()]
    environment = {
        **os.environ,
        "PYTHONPATH": str(root),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def run_rank(folder: Path, options: str, rank: int, variables: dict[str, str]) -> None:
    """train_gpt.py as torchrun would start it; what it prints goes to a file of its own."""
    os.environ |= {**variables, "RANK": str(rank), "LOCAL_RANK": str(rank)}
    torch.set_num_threads(1)
    train_gpt.SAMPLE_BYTES = 20  # the demo's test reads a whole sample
    with (folder / f"printed-{rank}").open("w") as out, contextlib.redirect_stdout(out):
        sys.exit(train_gpt.main(["--out", str(folder), *options.split()]))


def run_forked(folder: Path, options: str, processes: int = 4) -> str:
    """What all ranks printed; they are forked where torch has been imported already."""
    context = forking_context()
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    variables = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    variables |= {"WORLD_SIZE": str(processes), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        context.Process(target=run_rank, args=(folder, options, rank, variables))
        for rank in range(processes)
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(300)
    printed = [(folder / f"printed-{rank}").read_text() for rank in range(processes)]
    assert [rank.exitcode for rank in ranks] == [0] * processes, printed
    return "".join(printed)


def losses_in(folder: Path) -> list[float]:
    with (folder / "losses.csv").open() as file:
        return [float(row["ours"]) for row in csv.DictReader(file)]


SHORT = "--device cpu --steps 6 --seqlen 48 --seconds inf"


@pytest.fixture(scope="module")
def losses_of_one_process(tmp_path_factory) -> list[float]:
    folder = tmp_path_factory.mktemp("one")
    assert train_gpt.main([*SHORT.split(), "--out", str(folder)]) == 0
    return losses_in(folder)


@pytest.mark.parametrize(
    ("options", "run"),
    [
        ("--context-parallel 2", run_program),  # it starts two itself
        ("--context-parallel 2 --cp-scheme ring", run_forked),  # and two share the data
    ],
)
def test_several_processes_train_alike(tmp_path, losses_of_one_process, options, run):
    printed = run(tmp_path, f"{SHORT} {options}")
    assert printed.count("step 6/6") == 1  # rank 0 alone speaks
    assert "one step, ours and torch SDPA agree: loss" in printed
    assert losses_in(tmp_path) == pytest.approx(losses_of_one_process, abs=1e-4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--context-parallel 3", "--seqlen: must be a multiple of 6, .* got 128"),
        ("--context-parallel 8 --cp-scheme ulysses", "--cp-scheme: ulysses takes .* got 8"),
        ("--context-parallel 2 --attention sdpa", "--attention: must be ours .* got sdpa"),
        ("--context-parallel 2 --compare-curves", "--compare-curves: must not be given"),
    ],
)
def test_what_processes_cannot_share_is_refused(options, message):
    with pytest.raises(SystemExit, match=message):
        train_gpt.main(["--device", "cpu", *options.split()])


def test_context_ranks_divide_the_processes():
    options = train_gpt.parse_arguments(["--context-parallel", "3"])
    with pytest.raises(SystemExit, match=r"--context-parallel: must divide the 4 .* got 3"):
        train_gpt.check_ranks(options, TINY, 4)
    options = train_gpt.parse_arguments(["--context-parallel", "1"])
    with pytest.raises(SystemExit, match=r"--batch-size: must be a multiple of the 8 .* got 4"):
        train_gpt.check_ranks(options, TINY, 8)


@pytest.mark.parametrize(
    ("seqlen", "context", "tokens"),
    [(3072, 3, 2046), (4096, 4, 2048), (48, 3, 48), (33, 1, 33), (6144, 1536, 3072)],
)
def test_context_ranks_share_the_compared_tokens(seqlen, context, tokens):
    assert train_gpt.compared_tokens(seqlen, context) == tokens


# Agreement of one step and of curves


def not_causal(q, k, v):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)


def wrong_scale(q, k, v):
    return gpt.sdpa(q * 1.001, k, v)


class HalvedKeyGradient(torch.autograd.Function):
    """Right forward, wrong backward."""

    @staticmethod
    def forward(ctx, k):
        return k.clone()

    @staticmethod
    def backward(ctx, dk):
        return dk / 2


def wrong_gradient(q, k, v):
    return gpt.sdpa(q, HalvedKeyGradient.apply(k), v)


def test_one_step_agrees(corpus):
    result = compare_step(tiny_model(), *next(corpus.batches("train", 0)))
    assert result.agrees, result
    assert result.loss_difference < 1e-6 and result.gradient_difference < 1e-4
    assert result.reference == "float64"


@pytest.mark.parametrize("wrong", [not_causal, wrong_scale, wrong_gradient])
def test_one_step_finds_what_is_wrong(monkeypatch, corpus, wrong):
    monkeypatch.setattr(agreement, "ours", wrong)
    result = compare_step(tiny_model(), *next(corpus.batches("train", 0)))
    assert not result.agrees
    assert "DISAGREE" in str(result)


def test_comparing_leaves_the_model_as_it_was(corpus):
    model = tiny_model(gpt.sdpa)
    before = [weight.detach().clone() for weight in model.parameters()]
    compare_step(model, *next(corpus.batches("train", 0)))
    assert all(block.attention.attention is gpt.sdpa for block in model.blocks)
    assert all(weight.grad is None for weight in model.parameters())
    assert all(map(torch.equal, before, model.parameters()))


def curve(*losses: float) -> Curve:
    return Curve(train=list(losses), validation=[(len(losses), losses[-1])])


def test_curves_agree_within_the_drift_of_rounding():
    base = curve(5.0, 4.0, 3.0)
    control = curve(5.0, 4.0, 3.03)
    assert compare_curves(base, base, base).agrees
    near = compare_curves(curve(5.0, 4.0, 3.05), base, control)
    assert near.agrees and near.step == 3 and near.difference == pytest.approx(0.05)
    far = compare_curves(curve(5.0, 4.2, 3.0), base, control)
    assert not far.agrees and far.step == 2
    assert not compare_curves(curve(5.0, 4.0, math.nan), base, control).agrees


# Training


def test_training_is_a_function_of_the_seed(corpus):
    short = replace(TINY, steps=5)
    runs = [train(tiny_model(), corpus, short, title="t", seed=seed).train for seed in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]


def test_the_time_limit_stops_training(corpus, capsys):
    stopped = train(tiny_model(), corpus, TINY, title="t", seed=1, seconds=1e-3)
    assert 1 <= len(stopped.train) < TINY.steps
    assert stopped.validation[-1][0] == len(stopped.train)
    assert "0.001 s are over" in capsys.readouterr().out


def test_batches_are_windows_of_their_split():
    text = bytes(range(200)) * 5
    corpus = Corpus(text, seqlen=8, batch_size=4, device=CPU)
    assert len(corpus.splits["train"]) == 900 and len(corpus.splits["validation"]) == 100
    for tokens, targets in islice(corpus.batches("train", 3), 20):
        assert tokens.shape == targets.shape == (4, 8)
        assert torch.equal(tokens[:, 1:], targets[:, :-1])
        assert torch.equal((tokens[:, :1] + 1) % 200, targets[:, :1])


def test_a_short_text_is_refused():
    with pytest.raises(ValueError, match="at least 180 bytes for seqlen 8, got 100"):
        Corpus(bytes(100), seqlen=8, batch_size=1, device=CPU)


def test_learning_rate_rises_then_falls_by_steps_or_time():
    factors = [learning_rate_factor(step, 1000, 0.0) for step in range(1000)]
    top = factors.index(max(factors))
    assert 0 < top < 60 and factors[0] < 0.1 and factors[-1] == pytest.approx(0.1, abs=0.01)
    assert factors[top:] == sorted(factors[top:], reverse=True)
    assert learning_rate_factor(500, 1000, 1.0) == pytest.approx(0.1)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_fit_the_kernels(name):
    config = PRESETS[name].model
    assert config.width == config.heads * config.head_dim
    assert config.head_dim % 8 == 0 and config.head_dim <= 256


# Model


def test_no_token_sees_the_future():
    model, tokens = tiny_model(), torch.randint(256, (1, 16))
    changed = tokens.clone()
    changed[0, 10] += 1
    with torch.no_grad():
        difference = (model(tokens) - model(changed)).abs().amax(-1)[0]
    assert difference[:10].max() == 0 and difference[10:].min() > 0


def test_rotary_scores_depend_on_distance_alone():
    cos, sin = gpt.rotary_tables(32, 16)
    q, k = torch.randn(2, 16)
    rotated_q = gpt.rotate(q.expand(1, 32, 1, 16), cos, sin)[0, :, 0]
    rotated_k = gpt.rotate(k.expand(1, 32, 1, 16), cos, sin)[0, :, 0]
    scores = rotated_q @ rotated_k.T
    for distance in (0, 3, -7):
        diagonal = scores.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=1e-4, atol=1e-5)


def test_generation_repeats_for_a_seed_and_keeps_the_prompt():
    model = tiny_model()
    first, again, other = (model.generate(b"abc", 40, seed=seed) for seed in (1, 1, 2))
    assert first == again != other
    assert first.startswith(b"abc") and len(first) == 43


def test_a_width_that_heads_do_not_divide_is_refused():
    with pytest.raises(ValueError, match="width 64 and heads 3"):
        GPT(GPTConfig(layers=1, width=64, heads=3, seqlen=8))
