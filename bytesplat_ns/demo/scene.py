"""The still life that the demo photographs: a laid table in a round room.

World frame: z up, the table top at z = 0, one unit about half a metre. Vectors are [3, N], see ``raytracer``.
"""

from __future__ import annotations

from functools import cache

import numpy as np
from numpy import ndarray as Array

from bytesplat_ns.demo import shapes, textures
from bytesplat_ns.demo.raytracer import Light, Room, Scene, Solid, Surface, mix

FLOOR, CEILING = -0.9, 5.0
"""Heights."""

WALL = 5.5
"""Radius of the room."""


class Rotunda(Room):
    """A tiled floor, a plastered round wall with arched windows, a pale ceiling."""

    def intersect(self, origin: Array, direction: Array) -> Array:
        a = np.maximum(direction[0] ** 2 + direction[1] ** 2, 1e-9)
        b = origin[0] * direction[0] + origin[1] * direction[1]
        c = origin[0] ** 2 + origin[1] ** 2 - WALL**2
        wall = (np.sqrt(np.maximum(b * b - a * c, 0.0)) - b) / a
        rise = np.where(np.abs(direction[2]) < 1e-9, 1e-9, direction[2])
        level = np.where(rise < 0, FLOOR, CEILING)
        return np.minimum(wall, (level - origin[2]) / rise).astype(np.float32)

    def surface(self, points: Array) -> Surface:
        x, y, z = points
        on_floor, on_ceiling = z < FLOOR + 1e-3, z > CEILING - 1e-3
        r = np.maximum(shapes.length(x, y), 1e-6)
        normal = np.where(on_floor | on_ceiling, 0.0, np.stack([-x / r, -y / r, 0 * z]))
        normal[2] = on_floor.astype(np.float32) - on_ceiling
        floor = mix(textures.tiles(x, y), textures.rgb("3a2a22"), textures.step(WALL - 0.5, r, 0.05))
        wall, windows = textures.windowed_wall(np.arctan2(y, x), z, period=2 * np.pi * WALL / 8)
        return Surface(
            normal=normal,
            albedo=np.where(on_floor, floor, np.where(on_ceiling, textures.rgb("efe6d8"), wall)),
            emission=np.where(on_floor | on_ceiling, 0.0, windows),
            mirror=np.full_like(points, 0.04),
            roughness=np.full_like(x, 0.5),
            glossy=np.zeros_like(x, bool),
        )


def turned(degrees: float) -> Array:
    """Rotation about z."""
    c, s = np.cos(np.radians(degrees)), np.sin(np.radians(degrees))
    return np.array([[c, -s, 0], [s, c, 0], [0, 0, 1]], np.float32)


@cache
def still_life() -> Scene:
    """The demo's scene."""
    atlas, novel, cube = (0.42, 0.52, 0.075), (0.34, 0.44, 0.06), (0.16, 0.16, 0.16)
    navy, red = textures.book("23395b", "e0c58a", atlas), textures.book("8c2f39", "f0e0c0", novel)
    satin, shiny = {"roughness": 0.25, "glossy": True}, {"roughness": 0.17, "glossy": True}
    waxed = {"roughness": 0.42, "glossy": True, "mirror": (0.02, 0.02, 0.02)}
    copper = {"roughness": 0.2, "glossy": True, "mirror": (0.93, 0.55, 0.38)}
    # distance, albedo, half extent, position, rotation
    solids = [
        Solid(shapes.disc(1.55, 0.04, 0.02), textures.oak, (1.55, 1.55, 0.04), (0, 0, -0.04), **waxed),
        Solid(shapes.pedestal(), textures.walnut, (0.4, 0.4, 0.41), (0, 0, -0.49)),
        Solid(shapes.disc(0.62, 0.022, 0.02), textures.porcelain, (0.62, 0.62, 0.022), (-0.45, -0.62, 0.022), **shiny),
        Solid(shapes.ring(0.27, 0.135), textures.doughnut, (0.41, 0.41, 0.14), (-0.45, -0.62, 0.175), roughness=0.3),
        Solid(shapes.box(atlas, 0.012), navy, atlas, (0.5, 0.67, 0.075), turned(20)),
        Solid(shapes.box(novel, 0.012), red, novel, (0.46, 0.65, 0.21), turned(-14)),
        Solid(shapes.ball(0.2), textures.marble, (0.2, 0.2, 0.2), (0.3, 0.73, 0.47), **shiny),
        Solid(shapes.vase(), textures.delft, (0.26, 0.26, 0.5), (-0.6, 0.55, 0.5), turned(10), **shiny),
        Solid(shapes.mug(), textures.glaze, (0.4, 0.22, 0.25), (0.72, -0.45, 0.25), turned(-50), **satin),
        Solid(shapes.disc(0.19, 0.01, 0.005), textures.coffee, (0.19, 0.19, 0.01), (0.72, -0.45, 0.4), **shiny),
        Solid(shapes.ball(0.15), textures.plain("000000"), (0.15, 0.15, 0.15), (0.2, -1.06, 0.15), **copper),
        Solid(shapes.box(cube, 0.02), textures.puzzle, cube, (-1.08, 0.05, 0.16), turned(33)),
        Solid(shapes.pencil(), textures.pencil, (0.45, 0.037, 0.032), (0.16, -0.07, 0.032), turned(-14)),
    ]  # fmt: skip
    lamp = Light(position=(2.3, -1.6, 4.4), radius=0.55, color=(1.75, 1.5, 1.2))
    return Scene(solids, Rotunda(), lamp, zenith=(0.3, 0.34, 0.4), nadir=(0.17, 0.13, 0.1))
