"""What views say about each Gaussian, and how long their tile lists are, asked without training on them.

Several ranks ask together, turn by turn: each looks at one view (or, when its views are over, at none) with everybody's
Gaussians, and says to the owners of these what it has seen of them. No rank needs the whole model, and sums are in
fixed point, so that the answers are those of one rank, to the last bit on a CPU.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from bytesplat_ns import ops
from bytesplat_ns.density import philox
from bytesplat_ns.ops.layout import (
    MAX_CONTRIBUTION,
    OPACITY,
    Cameras,
    Gaussians,
    ImageGradients,
    Records,
    RenderSettings,
)
from bytesplat_ns.parallel.ranks import ALONE, Ranks
from bytesplat_ns.parallel.rendering import give_back, look_together

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


View = tuple[int, Cameras] | None
"""Number of a view, by which its random signs are drawn, and its camera; None in a turn without a view."""


@torch.no_grad()
def survey(
    gaussians: Gaussians, views: Iterable[View], settings: RenderSettings, budget: int, seed: int, ranks: Ranks = ALONE
) -> Survey:
    """Renders views with statistics. All ranks must call together.

    Args:
        gaussians: those of this rank.
        views: what this rank looks at in each turn; all ranks have equally many turns.
        settings: with ``statistics``.
        budget: entries of a tile's list that are within it.
    """
    assert settings.statistics, "contributions are what is asked"
    harm, tiles, beyond, crowded = torch.zeros(4, len(gaussians), dtype=torch.int64, device=gaussians.device)
    contribution = torch.zeros(len(gaussians), device=gaussians.device)
    for view in views:
        sight = look_together(gaussians, None if view is None else view[1], settings, ranks, "pruning")
        found = torch.zeros(0, 5, dtype=torch.int32, device=gaussians.device)
        if view is not None:
            found = _ask(sight.seen, *view, settings, budget, seed)
        rows = give_back(sight, found, ranks, "pruning")
        floats, gaussian = rows[:, :2].contiguous().view(torch.float32), sight.records.gaussian.long()
        harm.index_add_(0, gaussian, (floats[:, 0].double() / HARM_UNIT).round().long())
        contribution.scatter_reduce_(0, gaussian, floats[:, 1], "amax")
        for total, column in zip((tiles, beyond, crowded), rows[:, 2:].long().unbind(1), strict=True):
            total.index_add_(0, gaussian, column)
    return Survey(harm, contribution, tiles, beyond, crowded)


def _ask(records: Records, number: int, cameras: Cameras, settings: RenderSettings, budget: int, seed: int) -> Tensor:
    """What a view says of its records: [M, 5] int32, bits of harm and contribution (float32), ``ops.tile_costs``."""
    lists = ops.bin(records, cameras)
    image = ops.rasterize(records, lists, cameras, settings)
    harm = torch.zeros(len(records), device=records.table.device)
    for probe in range(PROBES):
        signs = ImageGradients(_signs(image.rgb, seed, number * PROBES + probe))
        rows = ops.rasterize_backward(records, lists, cameras, settings, image, signs)
        harm += (records.table[:, OPACITY] * rows[:, OPACITY]).square() / PROBES
    floats = torch.stack([harm.nan_to_num(0.0).clamp(max=HARM_MAX), rows[:, MAX_CONTRIBUTION]], dim=1)
    lengths = ops.effective_lengths(records, lists, cameras, settings)
    costs = ops.tile_costs(records, lists, lengths, budget)
    return torch.cat([floats.view(torch.int32), costs], dim=1)


def _signs(like: Tensor, seed: int, step: int) -> Tensor:
    """Independent random signs, shaped like an image [1, H, W, 3]."""
    pixels = torch.arange(like.shape[1] * like.shape[2], device=like.device)
    draws = philox.uniform(pixels, 3, seed=seed, step=step)
    return torch.where(draws < 0.5, -1.0, 1.0).view_as(like)


@torch.no_grad()
def effective_lengths(
    gaussians: Gaussians, views: Iterable[View], settings: RenderSettings, ranks: Ranks = ALONE
) -> Tensor:
    """[T] int32, effective length of the list of each tile of this rank's views. All ranks must call together."""
    lengths = [torch.empty(0, dtype=torch.int32, device=gaussians.device)]
    for view in views:
        cameras = None if view is None else view[1]
        records = look_together(gaussians, cameras, settings, ranks, "pruning").seen
        if records is not None:
            lengths.append(ops.effective_lengths(records, ops.bin(records, cameras), cameras, settings))
    return torch.cat(lengths)
