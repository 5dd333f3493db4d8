"""What the stages should return for the scenes of ``cases``: the reference in float64, computed once a scene."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cache
from typing import TypeVar

import torch
from cases import SCENES, Photo, Scene
from torch import Tensor

from bytesplat_ns.ops import reference
from bytesplat_ns.ops.layout import (
    ALPHA_MAX,
    ALPHA_MIN,
    CONIC,
    OPACITY,
    ROW_WIDTH,
    TRANSMITTANCE_MIN,
    GaussianGradients,
    Image,
    ImageGradients,
    Records,
    TileLists,
)
from bytesplat_ns.ops.reference.raster import _occupied, _offset, _power

D = TypeVar("D")

EPSILON = torch.finfo(torch.float32).eps


def cast(value: D, dtype: torch.dtype) -> D:
    """A dataclass with its floating-point tensors in another precision."""
    items = {f.name: getattr(value, f.name) for f in fields(value)}
    return replace(
        value, **{k: v.to(dtype) for k, v in items.items() if isinstance(v, Tensor) and v.is_floating_point()}
    )


@dataclass
class Truth:
    """Each stage's result in float64. Stages after the projection start from ``records``, rounded to float32."""

    projected: Records  # float64
    records: Records  # float32
    tiles: TileLists
    image: Image  # float64
    fragile: Tensor  # [V, H, W] bool, see below
    d_image: ImageGradients  # float32, random, zero at fragile pixels
    rows: Tensor  # [M, 10 or 14] float64
    d_rows: Tensor  # [M, 10] float32, random
    gradients: GaussianGradients  # float64


@cache
def truth(name: str) -> Truth:
    """The oracle of the scene of that name."""
    scene = SCENES[name]
    generator = torch.Generator().manual_seed(0)
    gaussians, cameras = cast(scene.gaussians, torch.float64), cast(scene.cameras, torch.float64)
    projected = reference.project(gaussians, cameras, scene.settings)
    records = cast(projected, torch.float32)
    same = cast(records, torch.float64)
    tiles = reference.bin(same, cameras)
    image = reference.rasterize(same, tiles, cameras, scene.settings, scene.interval)
    fragile = _fragile(scene, same, tiles, image)

    def random(like: Tensor) -> Tensor:
        values = torch.randn(like.shape, generator=generator)
        return values.masked_fill(fragile.view(*fragile.shape, *[1] * (like.dim() - 3)), 0)

    d_image = ImageGradients(random(image.rgb), random(image.depth), random(image.transmittance))
    rows = reference.rasterize_backward(
        same, tiles, cameras, scene.settings, image, cast(d_image, torch.float64), scene.interval
    )
    d_rows = torch.randn(len(records), ROW_WIDTH, generator=generator)
    gradients = reference.project_backward(gaussians, cameras, scene.settings, projected, d_rows.double(), squares=True)
    return Truth(projected, records, tiles, image, fragile, d_image, rows, d_rows, gradients)


def _fragile(scene: Scene, records: Records, tiles: TileLists, image: Image) -> Tensor:
    """Pixels where some Gaussian is so close to a threshold that float32 may decide it the other way.

    Such a decision moves a pixel by up to 1/255 (a Gaussian counts or not) or by a whole contribution (it is the last
    one or not), which no tolerance for rounding should cover.
    """
    fragile = torch.zeros_like(image.depth, dtype=torch.bool)
    for listed, pixels, centres in _occupied(tiles, scene.cameras):
        table = records.table[listed]
        dx, dy = _offset(table, centres.double())
        a, b, c = table[:, CONIC, None].unbind(1)
        # Relative error of alpha: that of sigma's terms, which cancel for needles.
        error = 1e-5 + 4 * EPSILON * (a * dx * dx / 2 + c * dy * dy / 2 + (b * dx * dy).abs())
        alpha = table[:, OPACITY, None] * torch.exp(-_power(table, centres.double()))
        close = ((alpha / ALPHA_MIN - 1).abs() < error) | ((alpha / ALPHA_MAX - 1).abs() < error)
        alpha = alpha.clamp(max=ALPHA_MAX)
        transmittance = torch.cumprod(torch.where(alpha >= ALPHA_MIN, 1 - alpha, 1), 0)
        drift = 1e-5 + torch.cumsum(error * alpha / (1 - alpha), 0)
        close |= (transmittance / TRANSMITTANCE_MIN - 1).abs() < drift
        fragile[pixels] = close.any(0).view_as(fragile[pixels])
    return fragile


def photo_inputs(photo: Photo) -> dict[str, Tensor | Image | float | None]:
    """Arguments of the loss but for the cameras: a random image, target, background and mask."""
    generator = torch.Generator().manual_seed(1)
    width, height = (max(side) for side in zip(*photo.sizes, strict=True))
    shape = (len(photo.sizes), height, width)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator)

    rgb = uniform(*shape, 3) * 1.4 - 0.3  # beyond [0, 1], so that the composition is clamped at some pixels
    target = uniform(*shape, photo.channels)
    mask = {
        "none": None,
        "some": uniform(*shape) > 0.2,
        "all": torch.zeros(shape, dtype=torch.bool),
        "centre": torch.ones(shape, dtype=torch.bool),
    }[photo.masked]
    if photo.masked == "centre":
        mask[:, 5:-5, 5:-5] = False
    return {
        "image": Image(rgb, torch.zeros(shape), uniform(*shape)),
        "target": (target * 255).round().to(torch.uint8) if photo.uint8 else target,
        "background": uniform(len(photo.sizes), 3),
        "ssim_lambda": photo.ssim_lambda,
        "mask": mask,
    }
