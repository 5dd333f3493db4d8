"""Random Gaussians and cameras, seeded by a number."""

from __future__ import annotations

import torch
from torch import Tensor

from bytesplat_ns.ops.layout import Cameras, Gaussians


def gaussians(n: int, seed: int, spread: float = 2.0, degree: int = 1) -> Gaussians:
    """Of all sizes, shapes and opacities around the origin; some are huge, or needles, or nearly transparent."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(n, *shape, generator=generator)

    return Gaussians(
        means=draw(3) * spread,
        quats=draw(4),
        scales=draw(3) * 1.5 - 3.0,
        opacities=draw(1) * 4.0,
        features_dc=draw(3),
        features_rest=draw((degree + 1) ** 2 - 1, 3),
        ids=torch.randperm(3 * n, generator=generator)[:n],
    )


def cameras(views: int, seed: int, spread: float = 2.0) -> Cameras:
    """Anywhere, looking anywhere, with principal points far from the middle."""
    generator = torch.Generator().manual_seed(seed)
    turn = torch.linalg.qr(torch.randn(views, 3, 3, generator=generator)).Q
    turn[:, 0] *= torch.linalg.det(turn)[:, None]
    viewmats = torch.eye(4).repeat(views, 1, 1)
    viewmats[:, :3, :3] = turn
    viewmats[:, :3, 3:] = -turn @ (torch.randn(views, 3, 1, generator=generator) * spread)
    draws = torch.rand(views, 6, generator=generator)
    sizes = (8 + 56 * draws[:, :2]).int()
    focal = sizes * (0.3 + 2 * draws[:, 2:4])
    return Cameras(
        viewmats=viewmats,
        intrinsics=torch.cat([focal, sizes * (1.4 * draws[:, 4:] - 0.2)], dim=1),
        sizes=sizes,
        width=int(sizes[:, 0].max()),
        height=int(sizes[:, 1].max()),
    )
