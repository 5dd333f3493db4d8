"""Rasterization: alpha blending of the tile lists, front to back, and its derivative."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

from ..layout import (
    ABSGRAD,
    ALPHA_MAX,
    ALPHA_MIN,
    CONIC,
    DEPTH,
    IMPORTANCE,
    MAX_CONTRIBUTION,
    MEAN2D,
    OPACITY,
    RECORD_WIDTH,
    RGB,
    ROW_WIDTH,
    ROW_WIDTH_WITH_STATISTICS,
    TILE,
    TRANSMITTANCE_MIN,
    Cameras,
    Image,
    ImageGradients,
    Records,
    RenderSettings,
    StopRule,
    TileLists,
)
from .stage import stage


@stage
def rasterize(
    records: Records,
    tiles: TileLists,
    cameras: Cameras,
    settings: RenderSettings,
    interval: Tensor | None = None,
) -> Image:
    """Blends each tile's list front to back (Kerbl et al., 3DGS, 2023, equation 3).

    Args:
        interval: [V, H, W, 2] z_in, z_out in world units: at each pixel only records with z_in <= z < z_out
            count. Intervals that share their bounds split an image into layers that compose front to back.
    """
    shape = (len(cameras), cameras.height, cameras.width)
    image = Image(
        rgb=records.table.new_zeros(*shape, 3),
        depth=records.table.new_zeros(shape),
        transmittance=records.table.new_ones(shape),
    )
    for listed, pixels, centres in _occupied(tiles, cameras):
        table = records.table[listed]
        bounds = None if interval is None else interval[pixels].flatten(0, 1)
        weight, transmittance = _blend(_power(table, centres), table, settings.stop, bounds)
        image.rgb[pixels] = (weight.T @ table[:, RGB]).view_as(image.rgb[pixels])
        image.depth[pixels] = (weight.T @ table[:, DEPTH]).view_as(image.depth[pixels])
        image.transmittance[pixels] = transmittance.view_as(image.depth[pixels])
    return image


@stage
def rasterize_backward(
    records: Records,
    tiles: TileLists,
    cameras: Cameras,
    settings: RenderSettings,
    image: Image,
    gradients: ImageGradients,
    interval: Tensor | None = None,
) -> Tensor:
    """Gradient rows of the records, summed over the pixels of all their tiles.

    Args:
        image: what ``rasterize`` returned for the same arguments.

    Returns:
        [M, 10], or [M, 14] with statistics: absgrad sums |dL/d mean2d| over pixels, where signed terms would
        cancel (Ye et al., AbsGS, 2024); importance sums alpha T, and the largest alpha T is kept beside it.
    """
    width = ROW_WIDTH_WITH_STATISTICS if settings.statistics else ROW_WIDTH
    rows = records.table.new_zeros(len(records), width)
    for listed, pixels, centres in _occupied(tiles, cameras):
        bounds = None if interval is None else interval[pixels].flatten(0, 1)
        table = records.table[listed].requires_grad_()
        with torch.enable_grad():
            power = _power(table, centres)
            weight, transmittance = _blend(power, table, settings.stop, bounds)
            outputs = [weight.T @ table[:, RGB], weight.T @ table[:, DEPTH], transmittance]
        upstream = [gradients.rgb, gradients.depth, gradients.transmittance]
        upstream = [
            torch.zeros_like(output) if gradient is None else gradient[pixels].reshape(output.shape)
            for output, gradient in zip(outputs, upstream, strict=True)
        ]
        d_table, d_power = torch.autograd.grad(outputs, (table, power), upstream)
        rows[:, :RECORD_WIDTH].index_add_(0, listed, d_table)
        if settings.statistics:
            dx, dy = _offset(table, centres)
            a, b, c = table[:, CONIC, None].unbind(1)
            absgrad = [(d_power * (a * dx + b * dy)).abs().sum(1), (d_power * (b * dx + c * dy)).abs().sum(1)]
            rows[:, ABSGRAD].index_add_(0, listed, torch.stack(absgrad, -1))
            rows[:, IMPORTANCE].index_add_(0, listed, weight.sum(1))
            rows[listed, MAX_CONTRIBUTION] = torch.maximum(rows[listed, MAX_CONTRIBUTION], weight.amax(1))
    return rows


def _occupied(tiles: TileLists, cameras: Cameras) -> Iterator[tuple[Tensor, tuple[int, slice, slice], Tensor]]:
    """Of each tile with a list: the list [L], its pixels as an index of images, their centres [Q, 2]."""
    device = tiles.records.device
    offsets, sizes = tiles.offsets.tolist(), cameras.sizes.tolist()
    for tile, (start, end) in enumerate(pairwise(offsets)):
        if start == end:
            continue
        row, column = divmod(tile, cameras.tiles_x)
        view, row = divmod(row, cameras.tiles_y)
        x = slice(column * TILE, min(column * TILE + TILE, sizes[view][0]))
        y = slice(row * TILE, min(row * TILE + TILE, sizes[view][1]))
        across, down = (torch.arange(side.start, side.stop, device=device) + 0.5 for side in (x, y))
        centres = torch.stack(torch.meshgrid(across, down, indexing="xy"), -1).flatten(0, 1)
        yield tiles.records[start:end].long(), (view, y, x), centres


def _offset(table: Tensor, centres: Tensor) -> tuple[Tensor, Tensor]:
    """dx, dy [L, Q] from each record's mean to each pixel centre [Q, 2], pixels."""
    return (centres[None] - table[:, None, MEAN2D]).unbind(-1)


def _power(table: Tensor, centres: Tensor) -> Tensor:
    """sigma [L, Q] of the Gaussian falloff exp(-sigma) of each record at each pixel."""
    dx, dy = _offset(table, centres)
    a, b, c = table[:, CONIC, None].unbind(1)
    return 0.5 * (a * dx * dx + c * dy * dy) + b * dx * dy


def _blend(power: Tensor, table: Tensor, stop: StopRule, bounds: Tensor | None) -> tuple[Tensor, Tensor]:
    """Weights alpha T [L, Q] of the records of a list at its pixels, and what is left of the light, T [Q].

    Args:
        bounds: [Q, 2] depth interval of each pixel.
    """
    alpha = (table[:, OPACITY, None] * torch.exp(-power)).clamp(max=ALPHA_MAX)
    counts = alpha >= ALPHA_MIN
    if bounds is not None:
        depth = table[:, DEPTH, None]
        counts = counts & (bounds[:, 0] <= depth) & (depth < bounds[:, 1])
    alpha = torch.where(counts, alpha, 0)
    behind = torch.cumprod(1 - alpha, 0)  # T behind each record, if the pixel never stopped
    before = torch.cat([torch.ones_like(behind[:1]), behind[:-1]])
    # T never grows along a list, so the records that count are those before the one that fails.
    alive = (behind if stop == "drop" else before) > TRANSMITTANCE_MIN
    alpha = torch.where(alive, alpha, 0)
    return alpha * before, (1 - alpha).prod(0)
