"""What views say about each Gaussian, and how long their tile lists are, asked without training on them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from bytesplat_ns import ops
from bytesplat_ns.density import philox
from bytesplat_ns.ops.layout import MAX_CONTRIBUTION, OPACITY, Cameras, Gaussians, ImageGradients, RenderSettings

PROBES = 2
"""Random images by which the harm of a removal is estimated in each view."""

HARM_UNIT = 2.0**-32
"""Unit of the summed harm. In fixed point, so that the sum does not depend on its order."""

HARM_MAX = 2.0**16
"""Largest harm in one view that counts: leaves room for 2^15 views in an int64."""


@dataclass
class Survey:
    """Of N Gaussians, over all views.

    The harm of a Gaussian is the squared change of the views' colours, summed over pixels and channels, if it alone
    were removed. A pixel's colour is affine in the opacity o of each Gaussian, so the change is exactly -o dC/do. Its
    square is estimated without a Jacobian: for an image g of independent random signs, o dL/do of L = sum(g C) has
    it as the mean of its own square (Hutchinson 1990).
    """

    harm: Tensor  # [N] int64, in HARM_UNIT
    contribution: Tensor  # [N] float32, largest alpha T at any pixel
    tiles: Tensor  # [N] int64, tiles that list it
    beyond: Tensor  # [N] int64, of these, tiles where it comes behind the budget
    crowded: Tensor  # [N] int64, of these, tiles over budget


@torch.no_grad()
def survey(
    gaussians: Gaussians, views: Iterable[tuple[int, Cameras]], settings: RenderSettings, budget: int, seed: int
) -> Survey:
    """Renders views with statistics.

    Args:
        views: number of each view, by which its random signs are drawn, and its camera (one at a time).
        settings: with ``statistics``.
        budget: entries of a tile's list that are within it.
    """
    assert settings.statistics, "contributions are what is asked"
    harm, tiles, beyond, crowded = torch.zeros(4, len(gaussians), dtype=torch.int64, device=gaussians.device)
    contribution = torch.zeros(len(gaussians), device=gaussians.device)
    for number, cameras in views:
        records = ops.project(gaussians, cameras, settings)
        lists = ops.bin(records, cameras)
        image = ops.rasterize(records, lists, cameras, settings)
        gaussian, seen = records.gaussian.long(), torch.zeros(len(records), device=gaussians.device)
        for probe in range(PROBES):
            signs = ImageGradients(_signs(image.rgb, seed, number * PROBES + probe))
            rows = ops.rasterize_backward(records, lists, cameras, settings, image, signs)
            seen += (records.table[:, OPACITY] * rows[:, OPACITY]).square() / PROBES
        seen = seen.nan_to_num(0.0).clamp(max=HARM_MAX).double()
        harm.index_add_(0, gaussian, (seen / HARM_UNIT).round().long())
        contribution.scatter_reduce_(0, gaussian, rows[:, MAX_CONTRIBUTION], "amax")
        lengths = ops.effective_lengths(records, lists, cameras, settings)
        costs = ops.tile_costs(records, lists, lengths, budget).long()
        for total, column in zip((tiles, beyond, crowded), costs.unbind(1), strict=True):
            total.index_add_(0, gaussian, column)
    return Survey(harm, contribution, tiles, beyond, crowded)


def _signs(like: Tensor, seed: int, step: int) -> Tensor:
    """Independent random signs, shaped like an image [1, H, W, 3]."""
    pixels = torch.arange(like.shape[1] * like.shape[2], device=like.device)
    draws = philox.uniform(pixels, 3, seed=seed, step=step)
    return torch.where(draws < 0.5, -1.0, 1.0).view_as(like)


@torch.no_grad()
def effective_lengths(gaussians: Gaussians, views: Iterable[tuple[int, Cameras]], settings: RenderSettings) -> Tensor:
    """[T] int32, effective length of the list of each tile of each view."""
    lengths = [torch.empty(0, dtype=torch.int32, device=gaussians.device)]
    for _, cameras in views:
        records = ops.project(gaussians, cameras, settings)
        lengths.append(ops.effective_lengths(records, ops.bin(records, cameras), cameras, settings))
    return torch.cat(lengths)
