"""Random Gaussians, a file of them, and a view of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from bytesplat_ns.ops import reference
from bytesplat_ns.ops.layout import Cameras, Gaussians, RenderSettings
from bytesplat_ns.splats import ply


def random_gaussians(n: int, degree: int, seed: int = 0) -> dict[str, Tensor]:
    """Raw parameters of ``n`` Gaussians within about a unit of the origin, float32."""
    generator = torch.Generator().manual_seed(seed)
    normal = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    return {
        "means": 0.4 * normal(n, 3),
        "quats": normal(n, 4),
        "scales": 0.7 * normal(n, 3) - 2.5,
        "opacities": normal(n, 1),
        "features_dc": 0.5 * normal(n, 3),
        "features_rest": 0.3 * normal(n, (degree + 1) ** 2 - 1, 3),
    }


def write_ply(path: Path, parameters: dict[str, Tensor], rgb: bool = False, comments: Sequence[str] = ()) -> None:
    """A PLY of Gaussians in one block."""
    ply.write_gaussian_blocks(path, len(parameters["means"]), [parameters], rgb, comments)


def render(parameters: dict[str, Tensor], viewmat: Tensor) -> Tensor:
    """[32, 40, 4] colour and depth from a camera [4, 4] (world to camera), float64 in the reference."""
    gaussians = Gaussians(**{k: v.double() for k, v in parameters.items()}, ids=torch.arange(len(parameters["means"])))
    cameras = Cameras(
        viewmats=viewmat.double()[None],
        intrinsics=torch.tensor([[35.0, 36.0, 20.5, 15.0]], dtype=torch.float64),
        sizes=torch.tensor([[40, 32]], dtype=torch.int32),
        width=40,
        height=32,
    )
    settings = RenderSettings(statistics=False)
    records = reference.project(gaussians, cameras, settings)
    image = reference.rasterize(records, reference.bin(records, cameras), cameras, settings)
    return torch.cat([image.rgb[0], image.depth[0, ..., None]], dim=-1)
