"""The reference's backward stages against central differences of its forward stages, in float64.

With a step of 1e-6 a central difference is right to 1e-9 or so, but for an element whose step crosses one of the
discontinuities (alpha at 1/255, the stop rule): the seeds are such that none does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from cases import ball, look
from oracle import cast
from torch import Tensor

from bytesplat_ns.ops import reference
from bytesplat_ns.ops.layout import Gaussians, Image, ImageGradients, RenderSettings, StopRule

STEP, TOLERANCE = 1e-6, 1e-6


def slope(function: Callable[[], Tensor], variable: Tensor) -> Tensor:
    """Derivative of a scalar in each element of a tensor that it reads, by central differences."""
    result = torch.empty_like(variable)
    for index in torch.cartesian_prod(*(torch.arange(n) for n in variable.shape)).reshape(-1, variable.dim()):
        element = tuple(index.tolist())
        here = variable[element].item()
        variable[element] = here + STEP
        above = function()
        variable[element] = here - STEP
        below = function()
        variable[element] = here
        result[element] = (above - below) / (2 * STEP)
    return result


def check(gradient: Tensor, function: Callable[[], Tensor], variable: Tensor) -> None:
    expected = slope(function, variable)
    assert expected.abs().max() > 0
    torch.testing.assert_close(gradient, expected, rtol=TOLERANCE, atol=TOLERANCE * float(expected.abs().max()))


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("antialiased", [False, True])
@pytest.mark.parametrize("parameter", [*Gaussians.PARAMETERS, "viewmats"])
def test_project(parameter: str, antialiased: bool) -> None:
    # Two views, wide enough apart that some Gaussians are beyond the clamp of the Jacobian in one of them.
    gaussians = cast(ball(8, 30, degree=3, spread=1.5, scale=0.6), torch.float64)
    cameras = cast(look((20, 14), (14, 20), distance=3.0, focal=0.5), torch.float64)
    settings = RenderSettings(antialiased=antialiased)
    records = reference.project(gaussians, cameras, settings)
    rows = normal(len(records), 10)

    def value() -> Tensor:
        now = reference.project(gaussians, cameras, settings)
        assert torch.equal(now.gaussian, records.gaussian)
        return (now.table * rows).sum()

    gradients = reference.project_backward(gaussians, cameras, settings, records, rows)
    if parameter == "viewmats":
        top = cameras.viewmats[:, :3]  # a view: the last row is no variable
        check(gradients.viewmats[:, :3], value, top)
    else:
        check(getattr(gradients, parameter), value, getattr(gaussians, parameter))


def test_projection_case_covers_the_clamps() -> None:
    gaussians = ball(8, 30, degree=3, spread=1.5, scale=0.6)
    cameras = look((20, 14), (14, 20), distance=3.0, focal=0.5)
    records = reference.project(gaussians, cameras, RenderSettings())
    beyond = (records.table[:, 0] < -0.15 * 20) | (records.table[:, 0] > 1.15 * 20)
    black = (records.table[:, 6:9] == 0).any(-1)
    assert beyond.any() and black.any()


@pytest.mark.parametrize("stop", ["drop", "add"])
@pytest.mark.parametrize("with_interval", [False, True])
def test_rasterize(stop: StopRule, with_interval: bool) -> None:
    gaussians = cast(ball(12, 31, degree=0, spread=0.4, scale=0.5, logit=3.0), torch.float64)
    cameras = cast(look((18, 6)), torch.float64)
    settings = RenderSettings(sh_degree=0, stop=stop)
    records = reference.project(gaussians, cameras, settings)
    tiles = reference.bin(records, cameras)
    interval = torch.tensor([3.8, 4.4]).expand(1, 6, 18, 2) if with_interval else None
    d_image = ImageGradients(normal(1, 6, 18, 3), normal(1, 6, 18, seed=1), normal(1, 6, 18, seed=2))

    def value() -> Tensor:
        now = reference.rasterize(records, tiles, cameras, settings, interval)
        return (
            (now.rgb * d_image.rgb).sum()
            + (now.depth * d_image.depth).sum()
            + (now.transmittance * d_image.transmittance).sum()
        )

    image = reference.rasterize(records, tiles, cameras, settings, interval)
    rows = reference.rasterize_backward(records, tiles, cameras, settings, image, d_image, interval)
    check(rows[:, :10], value, records.table)


def test_absgrad_sums_the_absolute_derivative_of_each_pixel() -> None:
    gaussians = cast(ball(5, 32, degree=0, spread=0.3, scale=0.4), torch.float64)
    cameras = cast(look((9, 5)), torch.float64)
    settings = RenderSettings(sh_degree=0)
    records = reference.project(gaussians, cameras, settings)
    tiles = reference.bin(records, cameras)
    upstream = normal(1, 5, 9, 3)
    image = reference.rasterize(records, tiles, cameras, settings)

    total = torch.zeros(len(records), 2, dtype=torch.float64)
    for pixel in range(5 * 9):
        only = torch.zeros(5 * 9, 1, dtype=torch.float64)
        only[pixel] = 1
        one = ImageGradients(upstream * only.view(1, 5, 9, 1))
        total += reference.rasterize_backward(records, tiles, cameras, settings, image, one)[:, :2].abs()
    rows = reference.rasterize_backward(records, tiles, cameras, settings, image, ImageGradients(upstream))
    torch.testing.assert_close(rows[:, 10:12], total)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("size", [(13, 11), (12, 7)])  # with and without SSIM
def test_loss(size: tuple[int, int], masked: bool) -> None:
    width, height = size
    cameras = look(size)
    generator = torch.Generator().manual_seed(3)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, dtype=torch.float64)

    image = Image(uniform(1, height, width, 3) * 1.4 - 0.3, torch.empty(0), uniform(1, height, width))
    target, background = uniform(1, height, width, 4), uniform(1, 3)
    mask = uniform(1, height, width) > 0.2 if masked else None

    def value() -> Tensor:
        return reference.loss(image, target, background, cameras, 0.4, mask)[0].sum()

    gradients = reference.loss(image, target, background, cameras, 0.4, mask)[1]
    check(gradients.rgb, value, image.rgb)
    check(gradients.transmittance, value, image.transmittance)


def test_the_whole_chain_is_the_derivative_of_the_image() -> None:
    """Moving every parameter and pose at once along a random direction."""
    gaussians = cast(ball(20, 33, degree=2), torch.float64)
    cameras = cast(look((24, 18), (18, 24)), torch.float64)
    settings = RenderSettings(sh_degree=2, antialiased=True)
    records = reference.project(gaussians, cameras, settings)
    tiles = reference.bin(records, cameras)
    image = reference.rasterize(records, tiles, cameras, settings)
    d_image = ImageGradients(normal(2, 24, 24, 3))
    rows = reference.rasterize_backward(records, tiles, cameras, settings, image, d_image)
    gradients = reference.project_backward(gaussians, cameras, settings, records, rows)
    of_all = gradients.parameters() | {"viewmats": gradients.viewmats}
    directions = {name: normal(*g.shape, seed=4) for name, g in of_all.items()}
    directions["viewmats"][:, 3] = 0

    def value(step: float) -> Tensor:
        moved = {name: getattr(gaussians, name) + step * directions[name] for name in Gaussians.PARAMETERS}
        turned = replace(cameras, viewmats=cameras.viewmats + step * directions["viewmats"])
        records = reference.project(replace(gaussians, **moved), turned, settings)
        image = reference.rasterize(records, reference.bin(records, turned), turned, settings)
        return (image.rgb * d_image.rgb).sum()

    expected = (value(STEP) - value(-STEP)) / (2 * STEP)
    derivative = sum((of_all[name] * direction).sum() for name, direction in directions.items())
    torch.testing.assert_close(derivative, expected, rtol=1e-5, atol=0)
