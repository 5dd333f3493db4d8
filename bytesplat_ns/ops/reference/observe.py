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

    Every backend gives the same bits: the norm is formed in float64, step by step, and rounded to an integer.

    Args:
        records: the M visible pairs of the round.
        rows: [M, 14] gradient rows with statistics, of a loss that is a sum over views.
        absgrad: take the sum over pixels of absolute gradients (AbsGS, Ye et al. 2024) instead of the gradient.
    """
    gaussian, sizes = records.gaussian.long(), cameras.sizes[records.view.long()]
    x, y = (rows[:, ABSGRAD if absgrad else MEAN2D].double() * (sizes.double() / 2)).unbind(dim=1)
    gradient = (x * x + y * y).sqrt().nan_to_num(0.0).clamp(max=GRADIENT_MAX)  # a NaN is a view without gradient
    observations.gradient.index_add_(0, gaussian, (gradient / GRADIENT_UNIT).round().long())
    observations.views.index_add_(0, gaussian, torch.ones_like(records.gaussian))
    radius = records.radius.float() / sizes.amax(dim=1).float()
    observations.radius.scatter_reduce_(0, gaussian, radius, "amax")
