"""A synthetic city for benchmarks: lots with a building, streets around them and trees, and cameras in it.

A Gaussian is a pure function of (seed, its number): any part of a city can be made anywhere, a hundred million
Gaussians where they are used, and a thinned copy without the original. The same seed gives the same city on every
device, up to the last bits of sines and logarithms.

World frame: z up. One unit is half a side of the city, as nerfstudio scales a capture; heights and widths in the code
below are metres.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from bytesplat_ns.density import philox
from bytesplat_ns.ops.layout import Cameras, Gaussians
from bytesplat_ns.splats.initialization import SH_C0, Parameters
from bytesplat_ns.views import world_to_camera

PITCH = 32.0
"""From one lot to the next, metres; the middle of a street is the border of two lots."""

STREET = 4.0
"""Half the width of a carriageway, metres."""

SPACING = 0.15
"""Gaussians are about so far apart, metres, unless the city would be smaller than two by two lots."""

SURFACE = 2500.0
"""Of an average lot: ground, roof, walls, trees; square metres."""

TREES, CROWN = 4, 2.0
"""Trees of a lot, and the radius of their crowns in metres."""

HARMONICS = 15
"""Rows of ``features_rest``: degree 3."""

FOCAL = 0.7
"""Focal length in image widths."""

CHUNK = 1 << 20
"""Gaussians that are made at a time: their random numbers take some 3 kB each."""

LOT, PLACE, LOOK, NOISE, CAMERA = range(1, 6)
"""Streams of random numbers."""


@dataclass(frozen=True)
class City:
    """A city of ``count`` Gaussians; larger counts are larger cities of the same fineness."""

    count: int
    seed: int = 0

    @property
    def lots(self) -> int:
        """Lots along a side."""
        return max(2, round(math.sqrt(self.count * SPACING**2 / SURFACE)))

    @property
    def unit(self) -> float:
        """World units of a metre."""
        return 2.0 / (self.lots * PITCH)

    @property
    def spacing(self) -> float:
        """From one Gaussian to its neighbours on average, world units."""
        return self.unit * math.sqrt(SURFACE * self.lots**2 / self.count)

    @cached_property
    def _plan(self) -> Tensor:
        """[lots^2, 6] on the CPU: width and height of each lot's building in metres, its colour, lit windows."""
        draw = philox.uniform(torch.arange(self.lots**2), 6, seed=self.seed, step=LOT)
        draw[:, 0] = 15 + 7 * draw[:, 0]
        draw[:, 1] = 6 + 34 * draw[:, 1] ** 2
        return draw

    def parameters(self, rows: Tensor) -> Parameters:
        """The Gaussians of these numbers [n] int64, on their device, as a trainer holds them."""
        device, n = rows.device, len(rows)
        lot = rows * self.lots**2 // self.count
        width, height, *colour, lit = self._plan.to(device)[lot].unbind(1)
        draw = philox.uniform(rows, 8, seed=self.seed, step=PLACE).unbind(1)
        side = (4 * draw[1]).floor().clamp(max=3)  # everything comes four times around the building

        # 1. Which surface, in proportion to area. Axes of a quarter: along the wall, away from the building, up.
        areas = torch.stack([PITCH**2 - width**2, width**2, 4 * width * height])
        trees = TREES * 4 * math.pi * CROWN**2
        edges = areas.cumsum(0)
        pick = draw[0] * (edges[2] + trees)
        ground, roof, wall = pick < edges[0], pick < edges[1], pick < edges[2]
        roof, wall, tree = roof & ~ground, wall & ~roof & ~ground, ~wall
        a, b = draw[2], draw[3]
        inner, outer = width / 2, PITCH / 2
        upward = 2 * b - 1
        around = 2 * math.pi * a
        flat = (1 - upward.square()).sqrt() * CROWN
        along = torch.where(ground, -outer + a * (inner + outer), (2 * a - 1) * inner)
        away = torch.where(ground, inner + b * (outer - inner), torch.where(roof, (2 * b - 1) * inner, inner))
        up = torch.where(ground, 0.0, torch.where(roof, height, b * height))
        stem = outer - STREET - 0.8 + 0 * a
        along = torch.where(tree, stem + flat * around.cos(), along)
        away = torch.where(tree, stem + flat * around.sin(), away)
        up = torch.where(tree, 3.5 + upward * CROWN, up)
        along, away = (torch.where(tree & (draw[4] < 0.1), stem, value) for value in (along, away))  # the trunk ...
        up = torch.where(tree & (draw[4] < 0.1), 2 * b, up)

        # 2. Into the world.
        cos, sin = (torch.tensor(turn, device=device)[side.long()] for turn in ([1.0, 0, -1, 0], [0.0, 1, 0, -1]))
        x, y = along * cos + away * sin, away * cos - along * sin
        corner = (self.lots - 1) / 2
        centre_x, centre_y = ((index - corner) * PITCH for index in (lot % self.lots, lot // self.lots))
        means = torch.stack([x + centre_x, y + centre_y, up], dim=1) * self.unit

        # 3. Discs that face along the normal, about as large as their distance from each other, spun about it.
        spacing = self.unit * ((edges[2] + trees) * self.lots**2 / self.count).sqrt()
        facing = torch.where(wall, 1 + side.long() % 2, torch.where(tree, (3 * draw[5]).long(), 0))  # z, y, x
        half = math.sqrt(0.5)
        w, i, j = torch.tensor([[1.0, 0, 0], [half, half, 0], [half, 0, half]], device=device)[facing].unbind(1)
        spin = math.pi * draw[6]
        c, s = spin.cos(), spin.sin()
        quats = torch.stack([w * c, i * c + j * s, j * c - i * s, w * s], dim=1)
        look = philox.uniform(rows, 8, seed=self.seed, step=LOOK)
        scales = (0.8 * spacing).log()[:, None] + 0.8 * (look[:, :3] - 0.5)
        scales[:, 2] += math.log(0.1)
        opacity = torch.where(tree, 0.4, 0.7) + 0.28 * look[:, 3]

        # 4. What it looks like.
        rgb, gloss = self._paint(ground, roof, wall, along, up, torch.maximum(x.abs(), y.abs()), torch.stack(colour, 1))
        bright = wall & ((3 * along.floor() + 5 * up.floor() + 97 * lit).long() % 7 == 0) & (gloss > 0)
        rgb = torch.where(bright[:, None], torch.tensor([1.0, 0.85, 0.5], device=device), rgb)
        rgb = rgb * (0.8 + 0.4 * look[:, 4:5]) + 0.1 * (look[:, 5:] - 0.5)
        rest = philox.uniform(rows, 3 * HARMONICS, seed=self.seed, step=NOISE).view(n, HARMONICS, 3) - 0.5
        return {
            "means": means,
            "scales": scales,
            "quats": quats,
            "opacities": opacity.logit()[:, None],
            "features_dc": (rgb - 0.5) / SH_C0,
            "features_rest": rest * (0.05 + 0.15 * gloss)[:, None, None],
        }

    @staticmethod
    def _paint(
        ground: Tensor, roof: Tensor, wall: Tensor, along: Tensor, up: Tensor, border: Tensor, colour: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Colours [n, 3] and how much they change with direction [n]. ``border``: distance from the lot's middle."""

        def mix(where: Tensor, one: tuple[float, float, float], other: Tensor) -> Tensor:
            return torch.where(where[:, None], torch.tensor(one, device=other.device), other)

        rgb = torch.tensor([0.2, 0.45, 0.15], device=up.device).expand(len(up), 3)  # trees and lawns
        rgb = mix(ground & (border > PITCH / 2 - STREET - 2.5), (0.65, 0.63, 0.6), rgb)
        rgb = mix(ground & (border > PITCH / 2 - STREET), (0.3, 0.3, 0.32), rgb)
        rgb = mix(ground & (border > PITCH / 2 - 0.15) & (along % 6 < 3), (0.95, 0.95, 0.9), rgb)
        rgb = torch.where((wall | roof)[:, None], 0.25 + 0.6 * colour, rgb)
        window = wall & (along % 3 > 1.2) & (up % 3.2 > 1)
        rgb = mix(window, (0.15, 0.2, 0.28), rgb)
        return mix(roof & (along % 2 < 0.2), (0.2, 0.2, 0.2), rgb), window.float()

    def gaussians(self, device: torch.device | str) -> Gaussians:
        """The whole city."""
        ids = torch.arange(self.count, device=device)
        return Gaussians(**_collect(self.count, device, self.parameters), ids=ids)

    def poses(self, views: int, aerial: float) -> Tensor:
        """Camera-to-world poses [views, 3, 4] on the CPU, OpenGL axes: from the streets, a share of them from the air.

        Cameras in a street look along it, give or take 30 degrees; those in the air stand 50 to 110 m high and look 35
        to 60 degrees down.
        """
        draw = philox.uniform(torch.arange(views), 6, seed=self.seed, step=CAMERA)
        above = ((torch.arange(views) + 1) * aerial).floor() > (torch.arange(views) * aerial).floor()
        half = self.lots * PITCH / 2
        free = (2 * draw[:, :2] - 1) * half
        street = (draw[:, 2] * (self.lots - 1)).floor().clamp(max=self.lots - 2) * PITCH + PITCH - half
        across = draw[:, 3] < 0.5
        x = torch.where(above | across, free[:, 0], street + 1.5)
        y = torch.where(above | ~across, free[:, 1], street - 1.5)
        z = torch.where(above, 50 + 60 * draw[:, 3], 1.7)
        turn = (2 * draw[:, 5] - 1) * math.pi / 6
        down_the_street = torch.where(across, 0.0, math.pi / 2) + math.pi * (draw[:, 4] < 0.5)
        heading = turn + torch.where(above, torch.atan2(-y, -x), down_the_street)
        pitch = torch.where(above, -(35 + 25 * draw[:, 4]), 4.0).deg2rad()
        forward = torch.stack([heading.cos() * pitch.cos(), heading.sin() * pitch.cos(), pitch.sin()], dim=1)
        right = torch.stack([heading.sin(), -heading.cos(), torch.zeros(views)], dim=1)
        columns = [right, torch.linalg.cross(right, forward), -forward, torch.stack([x, y, z], dim=1) * self.unit]
        return torch.stack(columns, dim=2)


@dataclass(frozen=True)
class Disorder:
    """What training has to put right: only a share of the city's Gaussians is there, and none is where it belongs."""

    kept: float = 0.8
    """share of the Gaussians that are there, each larger for it"""
    noise: float = 0.3
    """standard deviation of means in spacings, of log scales, and ten times that of colours in 0..1"""


def start(city: City, count: int, disorder: Disorder, device: torch.device | str, order: str) -> Parameters:
    """A perturbed, thinned copy of a city: ``count`` of its Gaussians, evenly taken, opacities nearer to 0.5, colours
    that do not change with direction.

    Args:
        order: "lots", one lot after another, or "mixed": neighbours in memory are far apart in the city.
    """
    stride = 1
    if order == "mixed":  # a step that shares no factor with the count reaches everything once
        stride = int(count * 0.6180339887)
        while math.gcd(stride, count) != 1:
            stride += 1

    def make(rows: Tensor) -> Parameters:
        rows = (rows * stride % count) * city.count // count
        parameters = city.parameters(rows)
        noise = disorder.noise * philox.normal(rows, 9, seed=city.seed, step=CAMERA + 1)
        parameters["means"] += city.spacing * noise[:, :3]
        parameters["scales"] += noise[:, 3:6] - 0.5 * math.log(disorder.kept)
        parameters["features_dc"] += 0.1 / SH_C0 * noise[:, 6:]
        parameters["opacities"] *= 0.5
        parameters["features_rest"].zero_()
        return parameters

    return _collect(count, device, make)


def _collect(count: int, device: torch.device | str, make: Callable[[Tensor], Parameters]) -> Parameters:
    """What ``make`` gives for the numbers below ``count``, a few at a time."""
    whole: Parameters = {}
    for first in range(0, count, CHUNK):
        rows = torch.arange(first, min(first + CHUNK, count), device=device)
        for name, part in make(rows).items():
            if name not in whole:
                whole[name] = torch.empty(count, *part.shape[1:], device=device)
            whole[name][first : first + len(part)] = part
    return whole


def look(poses: Tensor, width: int, height: int, device: torch.device | str) -> Cameras:
    """Cameras at these poses [V, 3, 4] as the stages take them: 71 degrees across."""
    views = len(poses)
    intrinsics = torch.tensor([[FOCAL * width, FOCAL * width, width / 2, height / 2]], device=device)
    sizes = torch.tensor([[width, height]], dtype=torch.int32, device=device)
    return Cameras(
        world_to_camera(poses).to(device), intrinsics.repeat(views, 1), sizes.repeat(views, 1), width, height
    )
