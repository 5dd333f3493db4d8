"""The Gaussians a run starts from: a coloured point cloud, or a cube of random points."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from bytesplat_ns.density.philox import uniform

SH_C0 = 0.28209479177387814
"""The constant spherical harmonic, 1 / (2 sqrt(pi))."""

INITIAL_OPACITY = 0.1

Parameters = dict[str, Tensor]
"""Raw parameters by name, rows are Gaussians; shapes as in ``ops.layout.Gaussians``."""


def from_points(points: Tensor, colors: Tensor | None, sh_degree: int, max_gaussians: int, seed: int) -> Parameters:
    """One isotropic Gaussian a point, as wide as the mean distance to its three nearest neighbours.

    Args:
        points: [P, 3] world units.
        colors: [P, 3] in 0..255, or None for mid grey.
        sh_degree: highest degree of the spherical harmonics to make room for.
        max_gaussians: if there are more points, a uniformly random subset of this size is kept.
        seed: of the subset and of the orientations.

    Raises:
        ValueError: when no finite point is left, or colours do not match the points.
    """
    points = points.to(torch.float32)
    if points.ndim != 2 or points.shape[1] != 3:
        raise ValueError(f"A point cloud has shape [P, 3], found {list(points.shape)}.")
    if colors is not None and colors.shape != points.shape:
        raise ValueError(f"The point cloud has {len(points)} points but colours of shape {list(colors.shape)}.")
    finite = torch.isfinite(points).all(dim=1)
    if not finite.any():
        raise ValueError(
            f"The point cloud has no finite point ({len(points)} found). "
            "Give another one, or start from random points with --pipeline.model.random-init True."
        )
    points, colors = points[finite], None if colors is None else colors[finite]
    if len(points) > max_gaussians:
        lottery = uniform(torch.arange(len(points)), 1, seed=seed, step=0)[:, 0]
        kept = lottery.argsort(stable=True)[:max_gaussians].sort().values
        points, colors = points[kept], None if colors is None else colors[kept]
    rgb = torch.full_like(points, 0.5) if colors is None else colors.to(torch.float32) / 255.0
    return _isotropic(points, neighbour_distance(points), (rgb - 0.5) / SH_C0, sh_degree, seed)


def random_cube(count: int, side: float, sh_degree: int, seed: int) -> Parameters:
    """``count`` Gaussians of random position and colour in a cube around the origin, ``side`` world units wide."""
    draws = uniform(torch.arange(count), 6, seed=seed, step=0)
    points = (draws[:, :3] - 0.5) * side
    return _isotropic(points, neighbour_distance(points), draws[:, 3:], sh_degree, seed)


def neighbour_distance(points: Tensor) -> Tensor:
    """[P] mean distance of each point to its three nearest neighbours, never zero (duplicates have distance zero)."""
    from scipy.spatial import cKDTree

    neighbours = min(3, len(points) - 1)
    if neighbours == 0:
        return torch.ones(1)
    distances, _ = cKDTree(points.numpy()).query(points.numpy(), k=neighbours + 1, workers=-1)
    mean = torch.from_numpy(distances[:, 1:].mean(axis=1)).to(torch.float32)
    positive = mean[mean > 0]
    floor = 1e-3 * positive.median() if len(positive) else torch.tensor(1e-3)
    return mean.clamp_min(float(floor))


def _isotropic(points: Tensor, sizes: Tensor, features_dc: Tensor, sh_degree: int, seed: int) -> Parameters:
    n = len(points)
    return {
        "means": points.clone(),
        "scales": sizes.log()[:, None].repeat(1, 3),
        "quats": _random_rotations(n, seed),
        "features_dc": features_dc.clone(),
        "features_rest": torch.zeros(n, (sh_degree + 1) ** 2 - 1, 3),
        "opacities": torch.full((n, 1), math.log(INITIAL_OPACITY / (1 - INITIAL_OPACITY))),
    }


def _random_rotations(n: int, seed: int) -> Tensor:
    """[n, 4] uniformly distributed unit quaternions (Shoemake 1992)."""
    u, v, w = uniform(torch.arange(n), 3, seed=seed, step=1).unbind(dim=1)
    v, w = 2 * math.pi * v, 2 * math.pi * w
    a, b = (1 - u).sqrt(), u.sqrt()
    return torch.stack([a * v.sin(), a * v.cos(), b * w.sin(), b * w.cos()], dim=1)
