"""Images that an example draws itself: a coloured shape in any place, size and direction."""

from __future__ import annotations

import math

import torch
from torch import Tensor

KINDS = ("disk", "ring", "square", "triangle")
NUMBERS = 8  # of an image: hue, x, y, size, direction, thickness, brightness and background


def draw(kinds: Tensor, numbers: Tensor, size: int) -> Tensor:
    """Images of shapes, antialiased over one pixel.

    Args:
        kinds: (count,) int64, places in KINDS.
        numbers: (count, NUMBERS) in [0, 1), what each image is drawn by.
        size: pixels of a side.

    Returns:
        (count, 3, size, size), red, green and blue in [-1, 1], of numbers' dtype and device.
    """
    hue, x, y, extent, direction, thickness, brightness, background = numbers[
        ..., None, None
    ].unbind(1)
    radius = 0.35 + 0.3 * extent  # the image reaches from -1 to 1
    axis = (torch.arange(size, device=numbers.device, dtype=numbers.dtype) + 0.5) * (2 / size) - 1
    across, down = axis - (x - 0.5) * 0.6, axis[:, None] - (y - 0.5) * 0.6
    angle = 2 * math.pi * direction
    along = angle.cos() * across + angle.sin() * down
    beside = angle.cos() * down - angle.sin() * across
    distances = torch.stack(
        (
            from_disk(along, beside, radius),
            from_ring(along, beside, radius, 0.08 + 0.12 * thickness),
            torch.maximum(along.abs(), beside.abs()) - 0.8 * radius,
            from_triangle(along, beside, radius),
        ),
        dim=1,
    )
    distance = distances[torch.arange(len(kinds), device=kinds.device), kinds]
    covered = (0.5 - distance * (size / 2)).clamp(0.0, 1.0)[:, None]
    thirds = torch.arange(3, device=numbers.device, dtype=numbers.dtype)[:, None, None] / 3
    colour = (2 * math.pi * (hue[:, None] + thirds)).cos() * 0.5 + 0.5
    colour = colour * (0.7 + 0.3 * brightness[:, None])
    return 2 * torch.lerp(0.25 * background[:, None], colour, covered) - 1


# Signed distances from outlines, negative inside.


def from_disk(x: Tensor, y: Tensor, radius: Tensor) -> Tensor:
    return torch.hypot(x, y) - radius


def from_ring(x: Tensor, y: Tensor, radius: Tensor, thickness: Tensor) -> Tensor:
    return from_disk(x, y, radius).abs() - thickness


def from_triangle(x: Tensor, y: Tensor, radius: Tensor) -> Tensor:
    """Of an equilateral triangle, whose corners are at `radius`, to the lines of its sides."""
    directions = [2 * math.pi * side / 3 for side in range(3)]
    sides = [x * math.cos(angle) + y * math.sin(angle) for angle in directions]
    return torch.stack(sides).amax(0) - radius / 2
