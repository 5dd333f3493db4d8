"""A synthetic scene for benchmarks: a room with spheres and floating noise, seen from its middle."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from bytesplat_ns.ops.layout import Cameras, Gaussians

FLOATERS = 0.15
SPHERES = 24


def room(count: int, width: int, height: int, device: str = "cuda", seed: int = 0) -> tuple[Gaussians, Cameras]:
    """``count`` Gaussians, flat on surfaces but for 15 % that float freely, in random order; and one view of them."""
    generator = torch.Generator().manual_seed(seed)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    # 1. Surfaces: floor, back wall, side walls, spheres, with points in proportion to their areas.
    on_surfaces = int(count * (1 - FLOATERS))
    floating = count - on_surfaces
    centres = torch.stack([(uniform(SPHERES) - 0.5) * 12, uniform(SPHERES) * 2 - 1, 4 + uniform(SPHERES) * 10], -1)
    radii = 0.4 + uniform(SPHERES)
    areas = [16 * 16, 16 * 6, 16 * 6, 16 * 6, *(4 * math.pi * float(radius) ** 2 for radius in radii)]
    counts = [int(on_surfaces * area / sum(areas)) for area in areas]
    counts[0] += on_surfaces - sum(counts)
    floor, back, left, right = counts[:4]
    points = [
        torch.stack([(uniform(floor) - 0.5) * 16, torch.full((floor,), 2.0), uniform(floor) * 16], -1),
        torch.stack([(uniform(back) - 0.5) * 16, -4 + uniform(back) * 6, torch.full((back,), 16.0)], -1),
    ]
    normals = [torch.tensor([0.0, 1, 0]).expand(floor, 3), torch.tensor([0.0, 0, 1]).expand(back, 3)]
    for n, x in ((left, -8.0), (right, 8.0)):
        points.append(torch.stack([torch.full((n,), x), -4 + uniform(n) * 6, uniform(n) * 16], -1))
        normals.append(torch.tensor([1.0, 0, 0]).expand(n, 3))
    for n, centre, radius in zip(counts[4:], centres, radii, strict=True):
        direction = torch.nn.functional.normalize(normal(n, 3))
        points.append(centre + radius * direction)
        normals.append(direction)

    # 2. Floaters.
    x, y, z = (uniform(floating) for _ in range(3))
    points.append(torch.stack([(x - 0.5) * 16, -4 + y * 6, 0.5 + z * 15.5], -1))
    normals.append(torch.nn.functional.normalize(normal(floating, 3)))

    # 3. Discs that face along the normals, about as large as their distance from each other.
    axis = torch.cat(normals)
    z = torch.tensor([0.0, 0, 1]).expand_as(axis)
    quats = torch.cat([1 + (z * axis).sum(-1, keepdim=True), torch.linalg.cross(z, axis)], -1) + 1e-6
    spacing = math.sqrt(sum(areas) / on_surfaces)
    scales = normal(count, 3) * 0.6 + math.log(0.9 * spacing)
    scales[:, 2] += math.log(0.1)
    scales[on_surfaces:] += math.log(1.5)
    opacity = torch.sigmoid(normal(count) * 2 + 0.3)
    opacity[on_surfaces:] *= 0.2
    harmonics = normal(count, 16, 3) * 0.05
    harmonics[:, 0] += normal(count, 3) * 0.8

    order = torch.randperm(count, generator=generator)
    parameters = (torch.cat(points), torch.nn.functional.normalize(quats), scales, opacity.logit()[:, None])
    parameters = (*parameters, harmonics[:, 0], harmonics[:, 1:])
    ids = torch.arange(count, device=device)
    gaussians = Gaussians(*(p[order].contiguous().to(device) for p in parameters), ids=ids)
    intrinsics = torch.tensor([[0.8 * width, 0.8 * width, width / 2, height / 2]], device=device)
    sizes = torch.tensor([[width, height]], dtype=torch.int32, device=device)
    return gaussians, Cameras(torch.eye(4, device=device)[None], intrinsics, sizes, width, height)
