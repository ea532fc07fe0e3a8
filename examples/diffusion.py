"""A small diffusion transformer, and the MeanFlow objective that trains it to sample in one step.

Peebles and Xie, "Scalable Diffusion Models with Transformers", 2023: tokens are patches of an
image. Time and the image's kind shift, scale and gate every layer.

Geng et al., "Mean Flows for One-step Generative Modeling", 2025: a path leads from the image, at
time 0, to noise, at time 1. The network u(z, r, t) is the average velocity between times r and t.
Its objective has the network's derivative along the path, which forward mode gives.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from model import MLP, Attention, AttentionModel, GPTConfig, SelfAttention, normalise, rotary_tables
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

CHANNELS = 3
TIME_FREQUENCIES = 32
LEAST_TIME = 0.05  # that a difference from noise is divided by
HIGHEST_FREQUENCY = 64.0  # radians over the whole path: du/dt has it as a factor
# As in table 1 of MeanFlow: both times are sigmoids of normal numbers, and APART is the share of
# images whose times are two.
TIME_MEAN, TIME_STD, APART = -0.4, 1.0, 0.25
ADAPTIVE_FLOOR = 1e-3


def flash(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """This package's attention: CUDA kernels for CUDA tensors, the CPU backend for CPU tensors."""
    from flash_attn_cuda import flash_attn_func

    return flash_attn_func(q, k, v)


def sdpa_math(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """torch's attention as separate matrix products, which have forward mode. In fp32 at least, as
    torch computes it on CUDA too: of 16 bits there, a derivative of its softmax has no gradient.
    """
    dtype = torch.promote_types(q.dtype, torch.float32)
    heads_first = (x.transpose(1, 2).to(dtype) for x in (q, k, v))
    with torch.autocast(q.device.type, enabled=False), sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(*heads_first).transpose(1, 2).to(q.dtype)


ATTENTIONS: dict[str, Attention] = {"flash": flash, "math": sdpa_math}


@dataclass(frozen=True)
class DiffusionConfig:
    """image_size and patch_size: pixels of a side; kinds: how many of images there are."""

    layers: int
    width: int
    heads: int
    image_size: int
    patch_size: int
    kinds: int

    @property
    def patches(self) -> int:
        """Of a side."""
        return self.image_size // self.patch_size

    @property
    def seqlen(self) -> int:
        return self.patches**2

    @property
    def head_dim(self) -> int:
        return self.width // self.heads

    @property
    def pixels(self) -> int:
        """Numbers of a patch."""
        return CHANNELS * self.patch_size**2

    def check(self) -> None:
        """ValueError names what does not fit."""
        if self.image_size % self.patch_size:
            raise ValueError(
                f"image_size: must be a multiple of patch_size {self.patch_size}, "
                f"got {self.image_size}"
            )
        if self.width % (4 * self.heads):
            raise ValueError(
                f"width: must be a multiple of 4 * heads, for positions in two directions, got "
                f"{self.width} and {self.heads} heads"
            )


class Condition(nn.Module):
    """(B, width) of times r and t, (B,) each, and kinds (B,) int64. It is never of lower precision
    than the weights: rounding would jump where du/dt is a slope.
    """

    frequencies: Tensor

    def __init__(self, config: DiffusionConfig) -> None:
        super().__init__()
        frequencies = torch.logspace(0, 1, TIME_FREQUENCIES, base=HIGHEST_FREQUENCY)
        self.register_buffer("frequencies", frequencies, persistent=False)
        self.expand = nn.Linear(4 * TIME_FREQUENCIES, config.width)
        self.project = nn.Linear(config.width, config.width)
        self.kind = nn.Embedding(config.kinds, config.width)

    def forward(self, r: Tensor, t: Tensor, kinds: Tensor) -> Tensor:
        with torch.autocast(t.device.type, enabled=False):
            angles = torch.cat([x[:, None] * self.frequencies for x in (t, t - r)], 1)
            features = torch.cat((angles.cos(), angles.sin()), 1)
            return F.silu(self.project(F.silu(self.expand(features))) + self.kind(kinds))


class ConditionedBlock(nn.Module):
    def __init__(self, config: DiffusionConfig, attention: Attention) -> None:
        super().__init__()
        of_layers = GPTConfig(config.layers, config.width, config.heads, config.seqlen)
        self.attention = SelfAttention(of_layers, attention)
        self.mlp = MLP(of_layers)
        self.modulation = nn.Linear(config.width, 6 * config.width)

    def forward(self, x: Tensor, condition: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        parts = self.modulation(condition)[:, None].chunk(6, -1)
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = parts
        x = x + (1 + gate) * self.attention(modulated(x, shift, scale), cos, sin)
        return x + (1 + mlp_gate) * self.mlp(modulated(x, mlp_shift, mlp_scale))


class DiffusionTransformer(AttentionModel):
    """u(z, r, t) of z (B, 3, image_size, image_size), times (B,) and kinds (B,); as z.

    The layers give the image that u leads to, z - t * u, so that no noise has to pass through them
    (Li and He, "Back to Basics: Let Denoising Generative Models Denoise", 2025).
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, config: DiffusionConfig, attention: Attention = flash) -> None:
        super().__init__()
        config.check()
        self.config = config
        self.embed = nn.Linear(config.pixels, config.width)
        self.condition = Condition(config)
        self.blocks = nn.ModuleList(
            ConditionedBlock(config, attention) for _ in range(config.layers)
        )
        self.modulation = nn.Linear(config.width, 2 * config.width)
        self.output = nn.Linear(config.width, config.pixels)
        cos, sin = tables_of_patches(config.patches, config.head_dim)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self.initialise()

    def initialise(self) -> None:
        """As GPT's: normal weights, smaller for layers that add to the residual stream. A new model
        has images of nearly 0, and not of 0, so that its loss depends on every layer.
        """
        config = self.config
        small = 0.5 * (2 * config.layers * config.width) ** -0.5
        for name, weight in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(weight)
            elif name.endswith(("modulation.weight", "output.weight")):
                nn.init.normal_(weight, std=0.1 * config.width**-0.5)
            elif name.startswith("blocks") and name.endswith("project.weight"):
                nn.init.normal_(weight, std=small)
            else:
                nn.init.normal_(weight, std=weight.shape[-1] ** -0.5)

    def forward(self, z: Tensor, r: Tensor, t: Tensor, kinds: Tensor) -> Tensor:
        condition = self.condition(r, t, kinds)
        # The sum of all layers stays in the precision of z.
        x = self.embed(patches_of(z, self.config.patch_size)).to(z.dtype)
        for block in self.blocks:
            x = block(x, condition, self.cos, self.sin)
        shift, scale = self.modulation(condition)[:, None].chunk(2, -1)
        rows = self.output(modulated(x, shift, scale)).to(z.dtype)
        image = image_of(rows, self.config.patch_size)
        return (z - image) / t[:, None, None, None].clamp(min=LEAST_TIME)

    @torch.no_grad()
    def sample(self, noise: Tensor, kinds: Tensor) -> Tensor:
        """Images as `noise` (B, 3, image_size, image_size), of kinds (B,), in one step of the whole
        path: algorithm 2 of MeanFlow.
        """
        start, end = noise.new_zeros(len(noise)), noise.new_ones(len(noise))
        return noise - self(noise, start, end, kinds)


def modulated(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    return normalise(x) * (1 + scale) + shift


def patches_of(x: Tensor, size: int) -> Tensor:
    """(B, C, H, W) -> (B, H / size * W / size, C * size * size), patches by rows."""
    return F.pixel_unshuffle(x, size).flatten(2).transpose(1, 2)


def image_of(rows: Tensor, size: int) -> Tensor:
    """The way back, of a square image."""
    side = round(rows.shape[1] ** 0.5)
    return F.pixel_shuffle(rows.transpose(1, 2).unflatten(2, (side, side)), size)


def tables_of_patches(patches: int, head_dim: int) -> tuple[Tensor, Tensor]:
    """cos and sin as rotate takes them, (patches * patches, 1, head_dim / 2): the first half of the
    angles is by a patch's row and the other by its column.
    """
    tables = rotary_tables(patches, head_dim // 2, base=100.0)
    down, across = torch.meshgrid(torch.arange(patches), torch.arange(patches), indexing="ij")
    cos, sin = (torch.cat((x[down.flatten()], x[across.flatten()]), -1) for x in tables)
    return cos, sin


# -- the objective -------------------------------------------------------------------------------


class Batch(NamedTuple):
    """What a step is computed from: images and noise (B, 3, H, W), kinds (B,), r <= t (B,)."""

    images: Tensor
    kinds: Tensor
    noise: Tensor
    r: Tensor
    t: Tensor

    def part(self, count: int) -> Batch:
        """Of the first images."""
        return Batch(*(x[:count] for x in self))

    def to(self, dtype: torch.dtype) -> Batch:
        return Batch(*(x.to(dtype) if x.is_floating_point() else x for x in self))


def draw_times(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """r <= t, (count,) fp32 each, on the generator's device."""

    def uniform() -> Tensor:
        return torch.rand(count, generator=generator, device=generator.device)

    normal = torch.randn(2, count, generator=generator, device=generator.device)
    r, t = (TIME_MEAN + TIME_STD * normal).sigmoid().sort(0).values
    return torch.where(uniform() < APART, r, t), t


def velocity_and_target(
    u: Callable[[Tensor, Tensor, Tensor], Tensor], batch: Batch
) -> tuple[Tensor, Tensor]:
    """u(z, r, t) at the batch's points of the paths, and what it should be there, without gradient:
    v - (t - r) * du/dt, (B, 3, H, W) each: algorithm 1 of MeanFlow.
    """
    images, _, noise, r, t = batch
    at = t[:, None, None, None]
    z, v = torch.lerp(images, noise, at), noise - images
    point, direction = (z, r, t), (v, torch.zeros_like(r), torch.ones_like(t))
    found, derivative = torch.func.jvp(u, point, direction)
    target = v - (t - r)[:, None, None, None] * derivative
    return found, target.detach()


def squared_errors(model: DiffusionTransformer, batch: Batch) -> Tensor:
    """Of each image the mean over its numbers, (B,)."""
    found, target = velocity_and_target(lambda z, r, t: model(z, r, t, batch.kinds), batch)
    return (found - target).square().flatten(1).mean(1)


def adaptive_loss(errors: Tensor) -> Tensor:
    """What is minimised, of errors (B,): each over itself and a floor, without that one's gradient.
    So every image counts alike (MeanFlow's adaptive weights of power 1).
    """
    return (errors / (errors.detach() + ADAPTIVE_FLOOR)).mean()
