"""Layers of complementary depth intervals, composed front to back, are the image of the whole."""

from __future__ import annotations

import pytest
import torch
from backends import Backend
from cases import ball, look
from torch import Tensor

from bytesplat_ns.ops.layout import Gaussians, Image, RenderSettings, StopRule


def layers(backend: Backend, gaussians: Gaussians, stop: StopRule) -> tuple[Image, Image]:
    """The image of a scene as a whole, and as three layers composed."""
    cameras, settings = look((40, 24)), RenderSettings(stop=stop)
    records = backend.project(gaussians, cameras, settings)
    tiles = backend.bin(records, cameras)
    whole = backend.rasterize(records, tiles, cameras, settings)

    bounds = torch.tensor([-float("inf"), 3.6, 4.3, float("inf")]).repeat(1, 24, 40, 1)
    bounds[..., 1:3] += 0.2 * torch.rand(1, 24, 40, 1, generator=torch.Generator().manual_seed(0))
    rgb, depth = torch.zeros_like(whole.rgb), torch.zeros_like(whole.depth)
    transmittance = torch.ones_like(whole.depth)
    for layer in range(3):
        interval = bounds[..., layer : layer + 2].contiguous()
        part = backend.rasterize(records, tiles, cameras, settings, interval=interval)
        rgb += transmittance[..., None] * part.rgb
        depth += transmittance * part.depth
        transmittance = transmittance * part.transmittance
    return whole, Image(rgb, depth, transmittance)


@pytest.mark.parametrize("stop", ["drop", "add"])
def test_layers_compose(backend: Backend, stop: StopRule) -> None:
    whole, composed = layers(backend, ball(120, 50, logit=-1.5, logit_spread=0.5), stop)
    # No pixel is saturated, so the stop rule does not matter: one that drops an alpha of a half keeps T < 2e-4.
    assert whole.transmittance.min() > 1e-3
    close(whole, composed, 2e-6)


def test_saturated_layers_compose_where_the_last_gaussian_is_added(backend: Backend) -> None:
    """Behind a saturated layer at most 1e-4 of what lies there shows, which the whole leaves out."""
    whole, composed = layers(backend, ball(400, 51, scale=0.4, logit=3.0), "add")
    assert (whole.transmittance <= 1e-4).float().mean() > 0.5
    close(whole, composed, 1e-4 * float(whole.rgb.max()))


def close(whole: Image, composed: Image, tolerance: float) -> None:
    def error(name: str) -> Tensor:
        return (getattr(whole, name) - getattr(composed, name)).abs().max()

    assert error("rgb") <= tolerance
    assert error("depth") <= 10 * tolerance  # depths are up to 10 world units
    assert error("transmittance") <= tolerance


def test_an_empty_interval_shows_nothing(backend: Backend) -> None:
    cameras, settings = look((40, 24)), RenderSettings()
    records = backend.project(ball(50, 52), cameras, settings)
    tiles = backend.bin(records, cameras)
    image = backend.rasterize(records, tiles, cameras, settings, interval=torch.full((1, 24, 40, 2), 4.0))
    assert not image.rgb.any() and not image.depth.any() and (image.transmittance == 1).all()
