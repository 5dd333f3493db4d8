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

CHUNK = 1 << 22
"""Pairs of a view and a block that are looked at together."""


@dataclass(frozen=True)
class Blocks:
    """Bounds of Gaussians near each other. Gaussians that can make no record, whatever the view, are in no block."""

    low: Tensor  # [B, 3] float64, of the means, world units
    high: Tensor  # [B, 3] float64
    reach: Tensor  # [B] float64, largest rho, world units
    count: Tensor  # [B] int64, Gaussians

    def __len__(self) -> int:
        return len(self.count)

    def features(self) -> Tensor:
        """[B, 11], of which the largest value of a linear function over the block is a linear function in turn: centre,
        half extent, magnitude of the coordinates, one, reach."""
        centre, half = (self.low + self.high) / 2, (self.high - self.low) / 2
        magnitude = self.low.abs().maximum(self.high.abs())
        one = torch.ones_like(self.reach)
        return torch.cat([centre, half, magnitude, one[:, None], self.reach[:, None]], dim=1)


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
    planes, features = _half_spaces(cameras, settings), bounds.features()
    at_once = max(CHUNK // max(len(bounds), 1), 1)
    counts = [(_within(features, some) * bounds.count).sum(dim=1) for some in planes.split(at_once)]
    return torch.cat(counts) if counts else bounds.count.new_zeros(0)


def seen(bounds: Blocks, cameras: Cameras, settings: RenderSettings) -> Tensor:
    """[V, B] bool, the blocks that may hold a Gaussian with a record in each view."""
    return _within(bounds.features(), _half_spaces(cameras, settings))


def _within(features: Tensor, planes: Tensor) -> Tensor:
    """[V, B] bool, which blocks of features [B, 11] reach into all half-spaces [V, 6, 11] of a view."""
    return ((planes.to(features) @ features.T) >= 0).all(dim=1)


def _half_spaces(cameras: Cameras, settings: RenderSettings) -> Tensor:
    """[V, 6, 11] float64 on the CPU: near, far, and the four sides, as factors of a block's features."""
    matrices, intrinsics = cameras.viewmats.cpu().double(), cameras.intrinsics.cpu().double()
    rotation, translation = matrices[:, :3, :3], matrices[:, :3, 3]
    forward, none = torch.tensor([0.0, 0.0, 1.0], dtype=torch.float64), torch.zeros(len(cameras), dtype=torch.float64)
    forward = forward.expand(len(cameras), 3)
    normals, offsets, reaches = [forward, -forward], [none - settings.near, none + settings.far], [none, none]
    dilation = math.sqrt(2 * math.log(1 / ALPHA_MIN) * settings.dilation) + SLACK
    for axis in range(2):
        focal, principal = intrinsics[:, axis], intrinsics[:, 2 + axis]
        size = cameras.sizes[:, axis].cpu().double()
        margin = 0.15 * size / focal
        slopes = torch.stack([-(principal / focal + margin), (size - principal) / focal + margin])
        tau = (rotation[:, axis] - slopes[..., None] * rotation[:, 2]).norm(dim=-1).amax(dim=0)
        normal = torch.zeros(len(cameras), 3, dtype=torch.float64)
        normal[:, axis] = focal
        normals += [
            normal + (principal - 0.5 + dilation)[:, None] * forward,  # f x + (c - 0.5) z >= - extent z
            -normal + (size - 0.5 - principal + dilation)[:, None] * forward,
        ]
        offsets += [none, none]
        reaches += [focal * tau * (1 + ROUNDING)] * 2

    normal, offset, reach = (torch.stack(parts, dim=1) for parts in (normals, offsets, reaches))  # camera axes
    in_world = normal @ rotation
    length = ROUNDING * normal.abs().sum(dim=2)  # times the sum of what cancels: the error
    cancelling = length[..., None] * rotation.abs().sum(dim=1)[:, None]
    offset = offset + (normal * translation[:, None]).sum(dim=2) + length * translation.abs().sum(dim=1)[:, None]
    return torch.cat([in_world, in_world.abs(), cancelling, offset[..., None], reach[..., None]], dim=2)


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
