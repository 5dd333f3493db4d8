"""Stage observe: statistics of density control."""

from __future__ import annotations

import torch
from torch import Tensor

from bytesplat_ns.ops.layout import (
    ABSGRAD,
    GRADIENT_MAX,
    GRADIENT_UNIT,
    MEAN2D,
    Cameras,
    Observations,
    Records,
)


@torch.no_grad()
def observe(records: Records, rows: Tensor, cameras: Cameras, observations: Observations, absgrad: bool) -> None:
    """Adds a round to the statistics, in place.

    Every backend gives the same bits: the norm is formed in float64, step by step, rounded to the float32 that ranks
    send each other, and then to an integer.

    Args:
        records: the M visible pairs of the round.
        rows: [M, 14] gradient rows with statistics, of a loss that is a sum over views.
        absgrad: take the sum over pixels of absolute gradients (AbsGS, Ye et al. 2024) instead of the gradient.
    """
    gaussian, sizes = records.gaussian.long(), cameras.sizes[records.view.long()]
    gradient = along_x(rows[:, ABSGRAD if absgrad else MEAN2D], sizes).double() * (sizes[:, 0].double() / 2)
    gradient = gradient.nan_to_num(0.0).clamp(max=GRADIENT_MAX)  # a NaN is a view without gradient
    observations.gradient.index_add_(0, gaussian, (gradient / GRADIENT_UNIT).round().long())
    observations.views.index_add_(0, gaussian, torch.ones_like(records.gaussian))
    radius = records.radius.float() / sizes.amax(dim=1).float()
    observations.radius.scatter_reduce_(0, gaussian, radius, "amax")


def along_x(gradients: Tensor, sizes: Tensor) -> Tensor:
    """Screen gradients [M] float32 in direction x alone, of the same norms: all that ``observe`` makes of both.

    Of a gradient that has this direction already it is the magnitude, to the last bit.

    Args:
        gradients: [M, 2] float32, per pixel in x and y.
        sizes: [M, 2] width and height of their views, pixels. Norms are taken in half image sides.
    """
    half = sizes.double() / 2
    x, y = (gradients.double() * half).unbind(dim=1)
    return ((x * x + y * y).sqrt() / half[:, 0]).float()
