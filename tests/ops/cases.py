"""The table of scenes and of photos that every backend is run on; each row is there for a trap of its own."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from bytesplat_ns.ops.layout import Cameras, Gaussians, RenderSettings, StopRule


@dataclass(frozen=True)
class Scene:
    name: str
    gaussians: Gaussians  # float32
    cameras: Cameras
    settings: RenderSettings = field(default_factory=RenderSettings)
    interval: Tensor | None = None  # [V, H, W, 2] depth interval of each pixel, world units
    slack: float = 1.0  # how many times larger than usual the rounding errors of float32 are here


@dataclass(frozen=True)
class Photo:
    """Input of the loss: random images and a random target of the given kind."""

    name: str
    sizes: tuple[tuple[int, int], ...]  # width, height of each view
    channels: int = 3
    uint8: bool = True
    masked: str = "none"  # or "some", "all", "centre" (kept pixels only within 5 px of the border)
    ssim_lambda: float = 0.2


def ball(
    count: int,
    seed: int,
    degree: int = 3,
    spread: float = 0.8,
    scale: float = 0.12,
    logit: float = 0.0,
    logit_spread: float = 1.5,
) -> Gaussians:
    """Gaussians around the origin; ids are unique, large and in no order."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    return Gaussians(
        means=normal(count, 3) * spread,
        quats=normal(count, 4),
        scales=normal(count, 3) * 0.5 + torch.tensor(scale).log(),
        opacities=normal(count, 1) * logit_spread + logit,
        features_dc=normal(count, 3),
        features_rest=normal(count, (degree + 1) ** 2 - 1, 3) * 0.2,
        ids=torch.randperm(count, generator=generator) * 7 + 2**40,
    )


def look(*sizes: tuple[int, int], distance: float = 4.0, focal: float = 0.9) -> Cameras:
    """One view a size (width, height), from different sides towards the origin; focal lengths in widths."""
    viewmats, intrinsics = [], []
    for view, (width, height) in enumerate(sizes):
        direction = torch.tensor([0.1 + 0.7 * view, -0.08, -1.0], dtype=torch.float64)
        eye = distance * direction / direction.norm()
        z = -eye / eye.norm()
        x = torch.linalg.cross(torch.tensor([0.0, 1.0, 0.0], dtype=torch.float64), z)
        x = x / x.norm()
        rotation = torch.stack([x, torch.linalg.cross(z, x), z])
        viewmat = torch.eye(4, dtype=torch.float64)
        viewmat[:3, :3], viewmat[:3, 3] = rotation, -rotation @ eye
        viewmats.append(viewmat.float())
        intrinsics.append([focal * width, 1.03 * focal * width, 0.5 * width - 0.3, 0.5 * height + 0.4])
    return Cameras(
        viewmats=torch.stack(viewmats),
        intrinsics=torch.tensor(intrinsics),
        sizes=torch.tensor(sizes, dtype=torch.int32),
        width=max(width for width, _ in sizes),
        height=max(height for _, height in sizes),
    )


def at_origin(width: int, height: int) -> Cameras:
    """A camera at the origin that looks along +z: world depth is camera depth, to the last bit."""
    return replace(look((width, height)), viewmats=torch.eye(4)[None])


def _shifted(gaussians: Gaussians, x: float = 0.0, z: float = 0.0) -> Gaussians:
    return replace(gaussians, means=gaussians.means + torch.tensor([x, 0.0, z]))


def _around_the_camera() -> Gaussians:
    gaussians = ball(200, 11, degree=2, spread=1.5, scale=0.15)
    gaussians.means[:6, :2] = 0
    gaussians.means[:6, 2] = torch.tensor([0.01, 0.0101, 0.0, -0.5, 1e10, 0.02])  # near and far are excluded
    gaussians.scales[:6] = torch.tensor([-6.0, -6, -6, -6, 20, -6])[:, None]
    return gaussians


def _needles() -> Gaussians:
    gaussians = ball(60, 12, degree=1)
    gaussians.scales[:, 0] = 0.5
    gaussians.scales[:, 1:] = -5.0
    return gaussians


def _not_finite() -> Gaussians:
    gaussians = ball(40, 13, degree=1)
    nan, inf = float("nan"), float("inf")
    gaussians.means[0, 1], gaussians.means[1, 2], gaussians.means[2, 0] = nan, inf, -inf
    gaussians.quats[3, 2], gaussians.quats[4], gaussians.quats[5, 0] = nan, 0.0, inf
    gaussians.scales[6, 0], gaussians.scales[7, 1], gaussians.scales[8] = nan, inf, 500.0
    gaussians.opacities[9], gaussians.opacities[10] = nan, -inf
    gaussians.features_dc[11, 2], gaussians.features_dc[12, 0] = nan, inf
    gaussians.features_rest[13, 0, 1], gaussians.features_rest[14, 2, 0] = nan, -inf
    return gaussians


NOT_FINITE = 15
"""The first so many Gaussians of the scene "not_finite" are to be culled."""


def _equal_depths() -> Gaussians:
    gaussians = ball(40, 14, degree=0, spread=0.3, scale=0.2, logit=1.0)
    gaussians.means[:, 2] = torch.tensor([2.0, 3.0]).repeat(20)
    return gaussians


def _layers() -> Tensor:
    """Intervals that cut through the ball, empty at some pixels and bounded by infinity at others."""
    column = torch.arange(40).float()
    z_in = 3.0 + column / 40
    z_out = z_in + torch.where(column % 3 == 0, float("inf"), 0.0) + torch.where(column % 5 == 0, 0.0, 0.9)
    return torch.stack([z_in, z_out], -1).expand(1, 24, 40, 2).contiguous()


def _opaque(stop: StopRule) -> Scene:
    gaussians = ball(500, 15, degree=0, scale=0.4, logit=4.0)
    settings = RenderSettings(sh_degree=0, stop=stop)
    return Scene(f"saturated_{stop}", gaussians, look((32, 20)), settings)


_SCENES = [
    Scene("smaller_than_a_tile", ball(40, 1, degree=0), look((13, 9)), RenderSettings(sh_degree=0)),
    Scene("one_pixel", ball(40, 2, degree=0, scale=0.4), look((1, 1)), RenderSettings(sh_degree=0)),
    Scene("odd_size", ball(150, 3, degree=1), look((61, 47)), RenderSettings(sh_degree=1)),
    Scene("whole_tiles", ball(100, 4, degree=2), look((48, 32)), RenderSettings(sh_degree=2)),
    Scene("no_gaussians", ball(0, 5), look((20, 10))),
    Scene("one_gaussian", ball(1, 6, spread=0), look((20, 10))),
    Scene("beside_the_view", _shifted(ball(30, 7), x=90.0), look((20, 10))),
    Scene("behind", _shifted(ball(30, 8), z=-20.0), look((20, 10))),
    Scene("around_the_camera", _around_the_camera(), at_origin(40, 30), RenderSettings(sh_degree=2)),
    Scene("huge", ball(25, 9, degree=1, scale=6.0), look((50, 34)), RenderSettings(sh_degree=1)),
    # sigma is a sum of terms up to a hundred times larger than itself.
    Scene("needles", _needles(), look((48, 40)), RenderSettings(sh_degree=1), slack=20),
    Scene("wide_field_of_view", ball(100, 16, spread=2.0), look((64, 40), distance=2.0, focal=0.3)),
    # 1 - alpha and 1 - opacity, by which derivatives are divided or multiplied, have lost three digits.
    Scene("at_the_clamp", ball(12, 17, scale=2.0, logit=9.0, logit_spread=1.0), look((40, 24)), slack=20),
    Scene("faint", ball(200, 18, logit=-5.4, logit_spread=0.4, scale=0.3), look((40, 24))),
    Scene("not_finite", _not_finite(), look((40, 24)), RenderSettings(sh_degree=1)),
    Scene("equal_depths", _equal_depths(), at_origin(40, 24), RenderSettings(sh_degree=0)),
    _opaque("drop"),
    _opaque("add"),
    Scene("two_views", ball(80, 19), look((40, 24), (40, 24))),
    Scene("views_of_different_sizes", ball(80, 20), look((40, 24), (17, 33), (5, 3))),
    Scene("antialiased", ball(80, 21, scale=0.03), look((40, 24)), RenderSettings(antialiased=True)),
    Scene("antialiased_tiny", ball(200, 22, scale=0.004), look((40, 24)), RenderSettings(antialiased=True)),
    Scene("lower_degree_than_stored", ball(80, 23), look((40, 24)), RenderSettings(sh_degree=1)),
    Scene("higher_degree_than_stored", ball(80, 24, degree=1), look((40, 24)), RenderSettings(sh_degree=3)),
    Scene("without_statistics", ball(80, 25), look((40, 24)), RenderSettings(statistics=False)),
    Scene("depth_interval", ball(120, 26), look((40, 24)), interval=_layers()),
]  # fmt: skip

_PHOTOS = [
    Photo("photo", ((37, 29),)),
    Photo("float", ((37, 29),), uint8=False),
    Photo("rgba", ((37, 29),), channels=4),
    Photo("float_rgba", ((37, 29),), channels=4, uint8=False),
    Photo("masked", ((37, 29),), masked="some"),
    Photo("masked_rgba", ((37, 29),), channels=4, masked="some"),
    Photo("all_masked", ((37, 29),), masked="all"),
    Photo("centre_masked", ((37, 29),), masked="centre"),
    Photo("one_window", ((11, 11),)),
    Photo("under_11_high", ((40, 10),)),
    Photo("under_11_wide", ((10, 40),), masked="some"),
    Photo("one_pixel", ((1, 1),)),
    Photo("views_of_different_sizes", ((40, 24), (17, 33), (5, 3)), masked="some"),
    Photo("l1_only", ((37, 29),), ssim_lambda=0.0),
    Photo("ssim_only", ((37, 29),), ssim_lambda=1.0),
]

SCENES = {scene.name: scene for scene in _SCENES}
PHOTOS = {photo.name: photo for photo in _PHOTOS}
