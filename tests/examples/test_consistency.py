"""The example with derivatives in forward mode: it learns, draws, and finds a wrong attention or a
wrong tangent.
"""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

import consistency
import diffusion
from consistency import DiffusionPreset, Trainer, batches, new_model, train
from diffusion import ATTENTIONS, Batch, DiffusionConfig, DiffusionTransformer
from model import rotate
from shapes import KINDS, NUMBERS, draw

CPU = torch.device("cpu")
TINY = DiffusionPreset(DiffusionConfig(2, 32, 2, 8, 2, len(KINDS)), 8, 40, 5e-3)
OPTIONS = "--device cpu --steps 3 --image-size 8 --batch-size 4 --compare --picture"


pytestmark = pytest.mark.usefixtures("one_thread")


def trained(attention: str, steps: int, seed: int = 1) -> list[float]:
    preset = replace(TINY, steps=steps)
    trainer = Trainer(new_model(preset, attention, CPU, 0), preset, torch.float32)
    return train(trainer, batches(preset, CPU, seed), title="t", tokens_per_step=128).losses


# The whole program


def test_the_whole_program(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # pip install . brings none
    picture = tmp_path / "folder" / "samples.png"
    assert consistency.main([*OPTIONS.split(), str(picture)]) == 0
    printed = capsys.readouterr().out
    assert "CPU backend" in printed.splitlines()[0]
    assert "4 x 16 tokens a step, float32" in printed
    assert printed.count("relative difference") == 5
    assert "5 steps of flash and math agree" in printed
    assert "flash: 3 steps, " in printed and "ms per step" in printed and "tokens/s" in printed
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_picture_holds_its_pixels(tmp_path):
    image = pytest.importorskip("matplotlib.image")
    pixels = torch.randint(256, (3, 5, 3), dtype=torch.uint8)
    (tmp_path / "x.png").write_bytes(consistency.png(pixels))
    read = image.imread(tmp_path / "x.png")
    assert torch.equal(torch.tensor(read * 255).round().to(torch.uint8), pixels)


def test_a_picture_of_another_type_is_refused(capsys):
    with pytest.raises(SystemExit):
        consistency.parse_arguments(["--picture", "samples.jpg"])
    assert "--picture: must end in .png, got samples.jpg" in capsys.readouterr().err


def test_the_help_names_every_option(capsys):
    with pytest.raises(SystemExit) as ended:
        consistency.parse_arguments(["--help"])
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    for option in vars(consistency.parse_arguments([])):
        assert f"--{option.replace('_', '-')}" in printed


def test_tokens_are_patches():
    options = consistency.parse_arguments(["--image-size", "128"])
    assert consistency.choose_preset(options, CPU).model.seqlen == 4096
    options = consistency.parse_arguments(["--image-size", "64", "--patch-size", "1"])
    assert consistency.choose_preset(options, CPU).model.seqlen == 4096


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--image-size 9", "--image-size: must be a multiple of --patch-size 2, got 9"),
        ("--dtype fp32", "--dtype: must be bf16 for attention by flash on CUDA, got fp32"),
        ("--cuda-graph", "--cuda-graph: must be with --device cuda, got cpu"),
    ],
)
def test_what_does_not_fit_is_refused(options, message):
    found = consistency.parse_arguments(options.split())
    with pytest.raises(SystemExit, match=message):
        consistency.choose_preset(found, CPU)
        consistency.choose_dtype(found, torch.device("cuda"))
        consistency.trainer_class(found, CPU)


def test_a_width_that_positions_do_not_fit_is_refused():
    with pytest.raises(ValueError, match=r"width: must be a multiple of 4 \* heads, .* got 36"):
        DiffusionTransformer(replace(TINY.model, width=36))
    with pytest.raises(ValueError, match="image_size: must be a multiple of patch_size 2, got 7"):
        DiffusionTransformer(replace(TINY.model, image_size=7))


# Both attentions


class HalvedTangent(torch.autograd.Function):
    """Right forward and backward, wrong in forward mode."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        pass

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return gradient

    @staticmethod
    def jvp(ctx, tangent: Tensor) -> Tensor:
        return tangent / 2


def wrong_tangent(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return HalvedTangent.apply(diffusion.sdpa_math(q, k, v))


def wrong_scale(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return diffusion.sdpa_math(q * 1.001, k, v)


@pytest.mark.parametrize("wrong", [wrong_tangent, wrong_scale])
def test_comparing_finds_what_is_wrong(monkeypatch, tmp_path, capsys, wrong):
    monkeypatch.setitem(ATTENTIONS, "flash", wrong)
    assert consistency.main([*OPTIONS.split(), str(tmp_path / "samples.png")]) == 1
    assert "5 steps of flash and math DISAGREE beyond rounding" in capsys.readouterr().out


def test_curves_of_both_attentions_are_one():
    flash, math_ = trained("flash", 8), trained("math", 8)
    assert flash == pytest.approx(math_, rel=1e-4)
    assert len(set(flash)) == 8


def test_the_loss_falls():
    losses = trained("flash", TINY.steps)
    assert losses[0] == pytest.approx(loss_of_black_images(1), rel=0.1)
    assert sum(losses[-5:]) / 5 < 0.5 * losses[0]


def loss_of_black_images(seed: int) -> float:
    """Of the first batch, for a model whose images are 0: u is z / t, which misses its target by
    image * r / t^2.
    """
    images, _, _, r, t = next(batches(TINY, CPU, seed))
    assert t.min() > diffusion.LEAST_TIME
    return (images * (r / t.square())[:, None, None, None]).square().mean().item()


def test_training_is_a_function_of_the_seed():
    first, again, other = (trained("flash", 3, seed) for seed in (1, 1, 2))
    assert first == again != other


def test_the_first_steps_are_not_timed(monkeypatch):
    seconds = [0.0]
    monkeypatch.setattr(consistency.time, "perf_counter", lambda: seconds[0])
    preset = replace(TINY, steps=6)
    trainer = Trainer(new_model(preset, "flash", CPU, 0), preset, torch.float32)
    step = trainer.step

    def timed(batch: Batch) -> Tensor:
        seconds[0] += 10.0 if trainer.step_number < consistency.WARM_UP_STEPS else 2.0
        return step(batch)

    monkeypatch.setattr(trainer, "step", timed)
    curve = train(trainer, batches(preset, CPU, 1), title="t", tokens_per_step=128)
    assert curve.step_seconds == 2.0 and len(curve.losses) == 6


@pytest.mark.gpu
def test_both_attentions_agree_on_the_gpu(device):
    preset = consistency.PRESETS["tiny"]
    model = new_model(preset, "flash", torch.device(device), 0)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    trainer = Trainer(model, preset, dtype)
    found = consistency.compare(trainer, batches(preset, torch.device(device), 1), 2)
    assert all(x.agrees for x in found)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_a_captured_step_is_the_step(attention):
    device = torch.device("cuda")
    preset = replace(consistency.PRESETS["tiny"], steps=8)
    eager, captured = (
        train(
            trainer(new_model(preset, attention, device, 0), preset, torch.bfloat16),
            batches(preset, device, 1),
            title="t",
            tokens_per_step=1,
        ).losses
        for trainer in (consistency.Trainer, consistency.CapturedTrainer)
    )
    assert captured == pytest.approx(eager, rel=1e-3)
    assert len(set(captured)) == preset.steps


# The objective


def batch_of(count: int) -> Batch:
    return next(batches(replace(TINY, batch_size=count), CPU, 3)).to(torch.float64)


def test_the_target_has_the_derivative_along_the_path():
    """Of u = z * r + t * t: du/dt = v * r + 2 * t."""
    batch = batch_of(16)
    r, t = (x[:, None, None, None] for x in (batch.r, batch.t))
    found, target = diffusion.velocity_and_target(
        lambda z, r, t: z * r[:, None, None, None] + t.square()[:, None, None, None], batch
    )
    v = batch.noise - batch.images
    torch.testing.assert_close(found, (batch.images + t * v) * r + t.square())
    torch.testing.assert_close(target, v - (t - r) * (v * r + 2 * t))
    assert (t - r).count_nonzero() > 0


def test_the_average_velocity_is_what_the_objective_wants():
    """Where all images are one, paths are straight lines to it: u = (z - image) / t everywhere."""
    batch = batch_of(16)
    batch = batch._replace(images=batch.images[:1].expand_as(batch.images))

    def exact(z: Tensor, r: Tensor, t: Tensor) -> Tensor:
        return (z - batch.images) / t[:, None, None, None]

    found, target = diffusion.velocity_and_target(exact, batch)
    torch.testing.assert_close(found, target)


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_the_derivative_of_the_model_is_that_of_differences(attention):
    batch = batch_of(3)
    model = new_model(TINY, attention, CPU, 0).double()
    batch = batch._replace(r=batch.t * 0.5)
    v, step = batch.noise - batch.images, 1e-5

    def at(t: Tensor) -> Tensor:
        z = torch.lerp(batch.images, batch.noise, t[:, None, None, None])
        return model(z, batch.r, t, batch.kinds)

    with torch.no_grad():
        wanted = (at(batch.t + step) - at(batch.t - step)) / (2 * step)
        _, target = diffusion.velocity_and_target(
            lambda z, r, t: model(z, r, t, batch.kinds), batch
        )
    derivative = (v - target) / (batch.t - batch.r)[:, None, None, None]
    torch.testing.assert_close(derivative, wanted, rtol=1e-5, atol=1e-7)


def test_every_image_counts_alike():
    errors = torch.tensor([1.0, 100.0], requires_grad=True)
    diffusion.adaptive_loss(errors).backward()
    assert (errors.grad * errors).tolist() == pytest.approx([0.5, 0.5], rel=1e-2)


def test_times():
    r, t = diffusion.draw_times(4000, torch.Generator().manual_seed(0))
    assert (r <= t).all() and r.min() > 0 and t.max() < 1
    assert (r < t).float().mean().item() == pytest.approx(diffusion.APART, abs=0.03)


# The model and its images


def test_one_step_leads_from_noise_to_the_image():
    class Straight(DiffusionTransformer):
        def forward(self, z, r, t, kinds):
            assert (r == 0).all() and (t == 1).all()
            return z - kinds[:, None, None, None]

    noise, kinds = torch.randn(4, 3, 8, 8), torch.arange(4)
    drawn = Straight(TINY.model).sample(noise, kinds)
    torch.testing.assert_close(drawn, kinds[:, None, None, None].float().expand_as(noise))


def test_the_velocity_leads_to_the_image_of_the_last_layer():
    model = new_model(TINY, "flash", CPU, 0)
    torch.nn.init.zeros_(model.output.weight)
    torch.nn.init.constant_(model.output.bias, 0.25)
    z, t = torch.randn(3, 3, 8, 8), torch.tensor([0.5, 1.0, 0.01])
    velocity = model(z, t / 2, t, torch.arange(3))
    length = torch.tensor([0.5, 1.0, diffusion.LEAST_TIME])[:, None, None, None]
    torch.testing.assert_close(z - length * velocity, torch.full_like(z, 0.25))


def test_patches_lie_by_rows():
    x = torch.arange(3 * 4 * 6.0).view(1, 3, 4, 6)
    rows = diffusion.patches_of(x, 2)
    assert rows.shape == (1, 6, 12)
    assert torch.equal(rows[0, 1].view(3, 2, 2), x[0, :, :2, 2:4])
    square = torch.randn(2, 3, 8, 8)
    assert torch.equal(diffusion.image_of(diffusion.patches_of(square, 2), 2), square)


def test_scores_depend_on_the_distance_in_both_directions():
    patches = 4
    cos, sin = diffusion.tables_of_patches(patches, 8)
    q, k = torch.randn(2, 8)
    rows = [rotate(x.expand(1, len(cos), 1, 8), cos, sin)[0, :, 0] for x in (q, k)]
    scores = (rows[0] @ rows[1].T).view(patches, patches, patches, patches)
    for down, across in ((0, 0), (1, 0), (0, 1), (2, -1)):
        found = [
            scores[y, x, y + down, x + across].item()
            for y in range(patches - down)
            for x in range(max(0, -across), patches - max(0, across))
        ]
        assert found == pytest.approx([found[0]] * len(found), rel=1e-4, abs=1e-5)
    assert scores[0, 0, 1, 0].item() != pytest.approx(scores[0, 0, 0, 1].item(), rel=1e-3)


def test_shapes_have_their_areas():
    """A red shape over black, in the middle: the red of the image is what it covers."""
    numbers = torch.zeros(len(KINDS), NUMBERS, dtype=torch.float64)
    numbers[:, 1:3], numbers[:, 6] = 0.5, 1.0
    radius, thickness = 0.35, 0.08
    for direction in (0.0, 0.1):
        numbers[:, 4] = direction
        images = draw(torch.arange(len(KINDS)), numbers, 128)
        covered = (images[:, 0] + 1).mean((1, 2)) * 2  # of an area of 4
        wanted = {
            "disk": math.pi * radius**2,
            "ring": math.pi * ((radius + thickness) ** 2 - (radius - thickness) ** 2),
            "square": (1.6 * radius) ** 2,
            "triangle": 3 * math.sqrt(3) / 4 * radius**2,
        }
        assert covered.tolist() == pytest.approx([wanted[x] for x in KINDS], rel=0.01)


def test_images_are_in_range_and_of_many_colours():
    images = batch_of(64).images
    assert images.min() >= -1 and images.max() <= 1
    assert images.flatten(2).amax(2).std(0).min() > 0.2
