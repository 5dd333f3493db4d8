"""Which views may see a shard, from bounds of its Gaussians alone: no visible record is ever missed.

A Gaussian makes a record where the box around its ellipse {alpha >= 1/255} holds a pixel centre (``ops.reference``,
``project``). With rho its largest standard deviation times sqrt(2 ln(255 opacity)), the box reaches at most
(f / z) tau rho + sqrt(2 ln(255) dilation) pixels from the projected mean: row i of the Jacobian times the camera's
rotation is (f / z)(W_i - t W_2) with a clamped slope t, so its length is at most (f / z) tau, with tau the largest
length of W_i - t W_2, which is at one end of the clamped interval. Times z > 0, "the box begins left of the last pixel
centre" and so on become half-spaces that are linear in the mean and in rho. Each is tested at the corner of a block's
bounds where it is largest.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from bytesplat_ns.ops.layout import ALPHA_MIN, Cameras, Gaussians, RenderSettings

BLOCK = 256
"""Gaussians that share bounds."""

SLACK = 1.0
"""Pixels of slack at the image's sides, for rounding in the projection."""

ROUNDING = 1e-5
"""Slack relative to the size of the coordinates that cancel, for the same."""


@dataclass(frozen=True)
class Blocks:
    """Bounds of Gaussians near each other. Gaussians that can make no record, whatever the view, are in no block."""

    low: Tensor  # [B, 3] float64, of the means, world units
    high: Tensor  # [B, 3] float64
    reach: Tensor  # [B] float64, largest rho, world units
    count: Tensor  # [B] int64, Gaussians

    def __len__(self) -> int:
        return len(self.count)


def blocks(gaussians: Gaussians) -> Blocks:
    """Bounds of blocks of ``BLOCK`` Gaussians, neighbours along a Z-order curve."""
    means = gaussians.means.detach().double()
    opacity = gaussians.opacities.detach()[:, 0].double().sigmoid()
    reach = gaussians.scales.detach().double().amax(dim=1).exp()
    reach = reach * (2 * (opacity / ALPHA_MIN * (1 + ROUNDING)).log().clamp(min=0)).sqrt()
    drawn = (opacity >= ALPHA_MIN * (1 - ROUNDING)) & means.isfinite().all(dim=1) & reach.isfinite()
    means, reach = means[drawn], reach[drawn]
    order = _z_order(means).argsort()
    means, reach = means[order], reach[order]
    number = -(-len(means) // BLOCK)
    block = torch.arange(len(means), device=means.device) // BLOCK
    inside = block[:, None].expand(-1, 3)
    count = torch.zeros(number, dtype=torch.int64, device=means.device).index_add_(0, block, torch.ones_like(block))
    return Blocks(
        low=means.new_full((number, 3), math.inf).scatter_reduce_(0, inside, means, "amin"),
        high=means.new_full((number, 3), -math.inf).scatter_reduce_(0, inside, means, "amax"),
        reach=means.new_zeros(number).scatter_reduce_(0, block, reach, "amax"),
        count=count,
    )


def footprints(bounds: Blocks, cameras: Cameras, settings: RenderSettings) -> Tensor:
    """[V] int64, Gaussians in the blocks that may make a record in each view; zero where none is visible."""
    return torch.stack([bounds.count[seen(bounds, cameras, v, settings)].sum() for v in range(len(cameras))])


def seen(bounds: Blocks, cameras: Cameras, view: int, settings: RenderSettings) -> Tensor:
    """[B] bool, the blocks that may hold a Gaussian with a record in this view."""
    matrix = cameras.viewmats[view].to(bounds.low)
    rotation, translation = matrix[:3, :3], matrix[:3, 3]
    fx, fy, cx, cy = cameras.intrinsics[view].tolist()
    width, height = cameras.sizes[view].tolist()

    centre = (bounds.low + bounds.high) / 2 @ rotation.T + translation  # camera axes
    half = (bounds.high - bounds.low) / 2
    magnitude = bounds.low.abs().maximum(bounds.high.abs()) @ rotation.abs().T + translation.abs()
    error = ROUNDING * magnitude.sum(dim=1)

    def largest(normal: Tensor) -> Tensor:
        """Of normal . x over the means x of each block, camera axes."""
        return centre @ normal + half @ (normal @ rotation).abs() + error * normal.abs().sum()

    forward = rotation.new_tensor([0.0, 0.0, 1.0])
    visible = (largest(forward) > settings.near) & (-largest(-forward) < settings.far)
    dilation = math.sqrt(2 * math.log(1 / ALPHA_MIN) * settings.dilation) + SLACK
    for axis, (focal, principal, size) in enumerate(((fx, cx, width), (fy, cy, height))):
        margin = 0.15 * size / focal
        slopes = (-(principal / focal + margin), (size - principal) / focal + margin)
        tau = max(float((rotation[axis] - slope * rotation[2]).norm()) for slope in slopes)
        reach = focal * tau * (1 + ROUNDING) * bounds.reach
        normal = torch.zeros_like(forward)
        normal[axis] = focal
        right = normal + (principal - 0.5 + dilation) * forward  # f x + (c - 0.5) z >= - extent z
        left = -normal + (size - 0.5 - principal + dilation) * forward
        visible &= (largest(right) + reach >= 0) & (largest(left) + reach >= 0)
    return visible


def _z_order(means: Tensor) -> Tensor:
    """[N] int64, the place of points [N, 3] along a Z-order curve (Morton 1966), by the middle 90 % of each axis."""
    if not len(means):
        return means.new_zeros(0, dtype=torch.int64)
    sample = means[:: max(len(means) // 65536, 1)]
    low, high = (sample.quantile(part, dim=0) for part in (0.05, 0.95))
    steps = ((means - low) / (high - low).clamp(min=1e-12)).clamp(0, 1).mul((1 << 20) - 1).long()
    code = torch.zeros(len(means), dtype=torch.int64, device=means.device)
    for bit in range(20):
        for axis in range(3):
            code |= (steps[:, axis] >> bit & 1) << (3 * bit + axis)
    return code
