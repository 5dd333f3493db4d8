"""The still life that the demo photographs: a breakfast table in a round room, all shapes and textures procedural.

World frame: z up, the table top at z = 0, about one unit to half a metre. Vectors are [3, N], see ``raytracer``.
"""

from __future__ import annotations

from functools import cache

import numpy as np
from numpy import ndarray as Array

from bytesplat_ns.demo.raytracer import Light, Room, Scene, Solid, Surface, mix

FLOOR, CEILING, WALL = -0.9, 5.0, 5.5  # heights of floor and ceiling, radius of the wall

# Patterns


def rgb(code: str) -> Array:
    """A linear colour [3, 1] from sRGB hexadecimal."""
    return (np.array([int(code[i : i + 2], 16) for i in (0, 2, 4)], np.float32) / 255)[:, None] ** 2.2


def step(edge: float | Array, x: Array, width: float = 0.01) -> Array:
    """0 below the edge, 1 above it, smooth over `width`."""
    t = np.clip((x - edge) / width + 0.5, 0.0, 1.0)
    return t * t * (3 - 2 * t)


def stripe(x: Array, period: float, duty: float, width: float = 0.01) -> Array:
    """1 in the first `duty` of every period, 0 in the rest."""
    x = np.abs(np.mod(x, period) - 0.5 * duty)
    return 1 - step(0.5 * duty, np.minimum(x, period - x), width)


def hashed(*cells: Array) -> Array:
    """Numbers in [0, 1) that look random, one for each integer cell."""
    x = sum(c * k for c, k in zip(cells, (12.9898, 78.233, 37.719), strict=False))
    return np.mod(np.sin(x) * 43758.547, 1.0).astype(np.float32)


def clouds(p: Array, frequency: float, seed: int, waves: int = 7) -> Array:
    """Smooth noise in about [-1, 1]: plane waves of one frequency in many directions, hence band-limited."""
    draw = np.random.default_rng(seed)
    k = draw.normal(size=(waves, 3))
    k *= frequency * draw.uniform(0.6, 1.4, (waves, 1)) / np.linalg.norm(k, axis=1, keepdims=True)
    phase = draw.uniform(0, 2 * np.pi, (waves, 1)).astype(np.float32)
    return np.sin(np.einsum("wk,kn->wn", k.astype(np.float32), p) + phase).sum(0) * np.float32((2 / waves) ** 0.5)


# Shapes (signed distances after Inigo Quilez)


def length(*components: Array) -> Array:
    return np.sqrt(sum(c * c for c in components))


def rounded_box(half: tuple[float, float, float], bevel: float):
    size = np.array(half, np.float32)[:, None] - np.float32(bevel)

    def distance(p: Array) -> Array:
        q = np.abs(p) - size
        return length(*np.maximum(q, 0.0)) + np.minimum(q.max(0), 0.0) - bevel

    return distance


def disc_distance(p: Array, radius: float, half_height: float, bevel: float) -> Array:
    """A cylinder about z with rounded rims."""
    r, h = length(p[0], p[1]) - (radius - bevel), np.abs(p[2]) - (half_height - bevel)
    return length(np.maximum(r, 0.0), np.maximum(h, 0.0)) + np.minimum(np.maximum(r, h), 0.0) - bevel


def torus_distance(axial: Array, u: Array, v: Array, major: float, minor: float) -> Array:
    return length(length(u, v) - major, axial) - minor


def mug_distance(p: Array) -> Array:
    """A cup of radius 0.22 and height 0.5 with a handle towards +x."""
    body = disc_distance(p, 0.22, 0.25, 0.03)
    handle = torus_distance(p[1], p[0] - 0.23, p[2], 0.135, 0.03)
    hollow = disc_distance(p - np.array([[0], [0], [0.06]], np.float32), 0.185, 0.25, 0.05)
    return np.maximum(np.minimum(body, handle), -hollow)


VASE = np.polyfit(  # radius of the vase against height: foot, belly, neck, lip
    [-0.5, -0.35, -0.1, 0.15, 0.32, 0.42, 0.5], [0.12, 0.19, 0.25, 0.18, 0.105, 0.1, 0.14], 5
).astype(np.float32)


def vase_distance(p: Array) -> Array:
    r, z = length(p[0], p[1]), p[2]
    side = r - np.polyval(VASE, np.clip(z, -0.5, 0.5))
    inside = np.maximum(side + 0.03, 0.2 - z)
    return 0.8 * np.maximum(np.maximum(side, np.abs(z) - 0.5), -inside)  # 0.8: the profile slopes by up to 3/4


def pencil_distance(p: Array) -> Array:
    """A hexagonal pencil along x, 0.9 long, sharpened at +x."""
    side = np.maximum(np.abs(p[1]) * 0.8660254 + np.abs(p[2]) * 0.5, np.abs(p[2])) - 0.032
    cone = (length(p[1], p[2]) - 0.24 * (0.45 - p[0])) * 0.972
    return np.maximum(np.maximum(side, cone), np.abs(p[0]) - 0.45)


# Matter: albedo at local points with local normals


def oak(p: Array, normal: Array) -> Array:
    """Planks along x with rings, streaks and joints."""
    plank = np.floor(p[1] / 0.36)
    along = p[0] + 7 * hashed(plank)
    q = np.stack([along * 0.5, p[1], p[2]]) + 3.0 * hashed(plank + 0.5)
    ring = np.sin(34 * (q[1] + 0.22 * clouds(q * np.array([[1.4], [0.9], [1]], np.float32), 3.2, 1)))
    streak = clouds(np.stack([along * 3, p[1] * 40, p[2] * 40]), 1.0, 2)
    color = mix(rgb("7d4d29"), rgb("b47e48"), 0.5 + 0.35 * ring + 0.15 * streak) * (0.8 + 0.35 * hashed(plank + 0.25))
    return color * (0.35 + 0.65 * stripe(p[1] - 0.006, 0.36, 0.348, 0.012))


def walnut(p: Array, normal: Array) -> Array:
    return mix(rgb("3c2415"), rgb("6b4226"), 0.5 + 0.5 * np.sin(25 * length(p[0], p[1]) + 2 * clouds(p, 4.0, 3)))


def porcelain(p: Array, normal: Array) -> Array:
    """White with a blue rim: the plate."""
    r = length(p[0], p[1])
    petals = 0.5 + 0.5 * np.cos(24 * np.arctan2(p[1], p[0]))
    blue = stripe(r - 0.6, 10.0, 0.02) + step(0.46, r) * (1 - step(0.46 + 0.085 * petals, r))
    return mix(rgb("f2efe6"), rgb("2b4f9e"), np.clip(blue, 0, 1))


def delft(p: Array, normal: Array) -> Array:
    """White with blue bands, waves and blossoms: the vase."""
    u, z = np.arctan2(p[1], p[0]), p[2]
    bands = stripe(z + 0.47, 10.0, 0.03) + stripe(z - 0.2, 10.0, 0.02) + stripe(z - 0.44, 10.0, 0.035)
    wave = stripe(z + 0.33 + 0.03 * np.sin(9 * u), 10.0, 0.025) + stripe(z - 0.26 - 0.018 * np.sin(8 * u), 10.0, 0.03)
    sector = np.mod(u * 6 / (2 * np.pi), 1.0) - 0.5
    x, y = sector * 0.25, z + 0.06
    r, angle = length(x, y), np.arctan2(y, x)
    blossom = 1 - step(0.065 + 0.035 * np.cos(6 * angle), r, 0.012)
    blossom *= 1 - (1 - step(0.028, r)) * step(0.014, r)
    return mix(rgb("eeece4"), rgb("1f3f94"), np.clip(bands + wave + blossom, 0, 1))


def glazed(p: Array, normal: Array) -> Array:
    """Dough, pink icing with a wavy edge, sprinkles: the doughnut."""
    u = np.arctan2(p[1], p[0])
    v = np.arctan2(p[2], length(p[0], p[1]) - 0.27)
    dough = mix(rgb("b9783a"), rgb("dca45f"), 0.5 + 0.5 * clouds(p, 14.0, 4))
    icing = step(0.012 * np.sin(7 * u) + 0.01 * np.sin(17 * u + 1), p[2], 0.015)
    row, column = np.floor(v / 0.45), np.floor(u / 0.21)
    turn = 2 * np.pi * hashed(row, column)
    x = (u / 0.21 - column - 0.5) * 0.06 + 0.012 * np.cos(5 * turn)
    y = (v / 0.45 - row - 0.5) * 0.06 + 0.012 * np.sin(7 * turn)
    x, y = x * np.cos(turn) + y * np.sin(turn), y * np.cos(turn) - x * np.sin(turn)
    sprinkle = (1 - step(0.022, np.abs(x), 0.008)) * (1 - step(0.008, np.abs(y), 0.008))
    hue = np.floor(hashed(column, row + 0.5) * 4)
    candy = sum((hue == i) * rgb(c) for i, c in enumerate(("fff3b0", "7fd6ff", "ffffff", "9be28f")))
    return mix(dough, mix(rgb("e8709a"), candy, sprinkle), icing)


def marble(p: Array, normal: Array) -> Array:
    warped = p + 0.09 * np.stack([clouds(p, 7.0, 5), clouds(p, 7.0, 6), clouds(p, 7.0, 7)])
    vein = 1 - np.abs(np.sin(9 * warped[0] + 5 * warped[2] + 1.2 * clouds(warped, 6.0, 8)))
    return mix(
        mix(rgb("2f6b5e"), rgb("1c4a47"), 0.5 + 0.5 * clouds(p, 9.0, 9)), rgb("e9e2cf"), np.clip(vein, 0, 1) ** 5
    )


def striped(p: Array, normal: Array) -> Array:
    """Cream with two bands and a dotted line, dark inside: the mug."""
    r, z = length(p[0], p[1]), p[2]
    bands = stripe(z + 0.17, 10.0, 0.07) + stripe(z - 0.1, 10.0, 0.07)
    u = np.arctan2(p[1], p[0])
    dots = 1 - step(0.034, length((np.mod(u * 12 / (2 * np.pi), 1.0) - 0.5) * 0.115, z + 0.0), 0.012)
    outside = step(0.205, r, 0.01)
    body = mix(mix(rgb("f3e3c0"), rgb("d6552d"), bands * outside), rgb("1f6f78"), dots * outside)
    return mix(rgb("fff6e6"), body, np.maximum(outside, step(0.243, z, 0.01)))


def coffee(p: Array, normal: Array) -> Array:
    return mix(rgb("2a1608"), rgb("5a3418"), step(0.15, length(p[0], p[1]), 0.05))


def book(cover: str, ink: str, half: tuple[float, float, float]):
    """A closed book: cover with a frame, a title and lines of text; page edges on three sides."""
    hx, hy, hz = half

    def albedo(p: Array, normal: Array) -> Array:
        x, y, z = p
        frame = np.maximum(np.abs(x) / hx, np.abs(y) / hy)
        frame = stripe(frame - 0.84, 10.0, 0.035, 0.02)
        line = np.floor(y / 0.1)
        text = stripe(y, 0.1, 0.05, 0.015) * (np.abs(x) < 0.14 + 0.1 * hashed(line + 0.5)) * (y < 0.05) * (y > -0.3)
        text *= step(0.25, hashed(np.floor(x / 0.05), line), 0.1)
        title = (np.abs(y - 0.22) < 0.06) * (np.abs(x) < 0.2) * stripe(x, 0.08, 0.055, 0.015)
        paper = mix(rgb("c9bd9c"), rgb("f0e7cd"), 0.5 + 0.4 * np.sin(z * 160))
        printed = mix(rgb(cover), rgb(ink), np.clip((frame + text + title) * (normal[2] > 0.7), 0, 1))
        spine = stripe(y + 0.3, 0.2, 0.02) * (normal[0] < -0.7)
        printed = mix(printed, rgb(ink), np.clip(spine, 0, 1))
        pages = (np.abs(z) < hz - 0.02) & (x > -hx + 0.02) & (np.abs(normal[2]) < 0.7)
        return np.where(pages, paper, printed)

    return albedo


def puzzle(p: Array, normal: Array) -> Array:
    """A cube of 3 x 3 coloured stickers a side."""
    axis = np.abs(normal).argmax(0)
    u = np.choose(axis, [p[1], p[2], p[0]]) / 0.1067 + 1.5
    v = np.choose(axis, [p[2], p[0], p[1]]) / 0.1067 + 1.5
    side = 2 * axis + (np.take_along_axis(normal, axis[None], 0)[0] > 0)
    pick = np.floor(6 * hashed(np.floor(u), np.floor(v), side.astype(np.float32)))
    colors = ("c62828", "1565c0", "f9c80e", "2e7d32", "f5f5f5", "ef6c00")
    sticker = sum((pick == i) * rgb(c) for i, c in enumerate(colors))
    gap = np.minimum(np.minimum(u % 1, 1 - u % 1), np.minimum(v % 1, 1 - v % 1))
    return mix(rgb("161616"), sticker, step(0.09, gap, 0.06))


def pencil(p: Array, normal: Array) -> Array:
    r = length(p[1], p[2])
    wood = step(0.31, p[0] + 0.02 * np.sin(6 * np.arctan2(p[2], p[1])))
    color = mix(rgb("f2b705"), rgb("d9a066"), wood)
    color = mix(color, rgb("222222"), step(0.40, p[0]))
    color = mix(rgb("b8bcc2"), color, step(-0.35, p[0]))
    return mix(rgb("e07a7a"), color, step(-0.40, p[0])) + 0 * r


def plain(code: str):
    return lambda p, normal: rgb(code) + 0 * p


class Rotunda(Room):
    """A tiled floor, a plastered round wall with arched windows, a pale ceiling."""

    def intersect(self, origin: Array, direction: Array) -> Array:
        a = np.maximum(direction[0] ** 2 + direction[1] ** 2, 1e-9)
        b = origin[0] * direction[0] + origin[1] * direction[1]
        c = origin[0] ** 2 + origin[1] ** 2 - WALL**2
        wall = (np.sqrt(np.maximum(b * b - a * c, 0.0)) - b) / a
        level = np.where(direction[2] < 0, FLOOR, CEILING)
        with np.errstate(divide="ignore", invalid="ignore"):
            flat = np.where(direction[2] == 0, np.inf, (level - origin[2]) / direction[2])
        return np.minimum(wall, flat).astype(np.float32)

    def surface(self, points: Array) -> Surface:
        x, y, z = points
        on_floor, on_ceiling = z < FLOOR + 1e-3, z > CEILING - 1e-3
        r = np.maximum(length(x, y), 1e-6)
        normal = np.where(on_floor | on_ceiling, 0.0, np.stack([-x / r, -y / r, 0 * z]))
        normal[2] = np.where(on_floor, 1.0, np.where(on_ceiling, -1.0, normal[2]))
        wall, emission = self._wall(np.arctan2(y, x), z)
        albedo = np.where(on_floor, self._tiles(x, y, r), np.where(on_ceiling, rgb("efe6d8"), wall))
        return Surface(
            normal=normal,
            albedo=albedo,
            emission=np.where(on_floor | on_ceiling, 0.0, emission),
            mirror=np.full_like(points, 0.04),
            roughness=np.full_like(x, 0.5),
            glossy=np.zeros_like(x, bool),
        )

    @staticmethod
    def _tiles(x: Array, y: Array, r: Array) -> Array:
        """Square tiles in two colours with a small diamond at each corner; a dark border near the wall."""
        size = 0.62
        u, v = x / size, y / size
        check = np.mod(np.floor(u) + np.floor(v), 2)
        shade = 0.88 + 0.24 * hashed(np.floor(u), np.floor(v))
        tile = mix(rgb("c9b99a"), rgb("96492f"), check) * shade
        tile = tile * (1 + 0.06 * clouds(np.stack([x, y, 0 * x]), 8.0, 10))
        du, dv = np.abs(np.mod(u + 0.5, 1) - 0.5), np.abs(np.mod(v + 0.5, 1) - 0.5)
        grout = 1 - step(0.022, np.minimum(du, dv), 0.02)
        diamond = 1 - step(0.2, du + dv, 0.03)
        tile = mix(mix(tile, rgb("b8ad9a"), grout), rgb("28506b"), diamond)
        return mix(tile, rgb("3a2a22"), step(WALL - 0.5, r, 0.05))

    @staticmethod
    def _wall(u: Array, z: Array) -> tuple[Array, Array]:
        """Albedo and emission: eight arched windows with hills and an evening sky, panelling below."""
        x = (np.mod(u * 8 / (2 * np.pi), 1.0) - 0.5) * (2 * np.pi * WALL / 8)  # metres from the window's axis
        arch = np.where(z < 1.9, np.abs(x), length(x, z - 1.9))
        above = step(0.15, z, 0.03)
        inside = (1 - step(1.0, arch, 0.04)) * above
        frame = (1 - step(1.14, arch, 0.04)) * step(0.03, z, 0.03)
        bars = np.maximum(stripe(x + 0.035, 0.5, 0.07), stripe(z - 0.88, 0.75, 0.06) * (z < 2.2))
        glass = inside * (1 - bars)
        plaster = rgb("d8b48a") * (1 + 0.05 * clouds(np.stack([3 * u, z, 0 * z]), 5.0, 11))
        panel = mix(rgb("5b6f66"), rgb("465850"), stripe(u, 2 * np.pi / 48, 0.02))
        wall = mix(
            mix(panel, plaster, step(-0.15, z, 0.03)), rgb("f1ead8"), np.maximum(frame, stripe(z + 0.17, 10, 0.08))
        )
        hills = 0.75 + 0.18 * np.sin(3 * u) + 0.1 * np.sin(7 * u + 2)
        sky = mix(rgb("ffd9a0"), rgb("86b6e8"), np.clip((z - 0.6) / 2.2, 0, 1))
        view = mix(mix(rgb("5f7f5a"), rgb("8fa98a"), step(hills - 0.3, z, 0.05)), sky, step(hills, z, 0.05))
        return wall * (1 - glass), 1.15 * view * glass


def turned(degrees: float) -> Array:
    """Rotation about z."""
    c, s = np.cos(np.radians(degrees)), np.sin(np.radians(degrees))
    return np.array([[c, -s, 0], [s, c, 0], [0, 0, 1]], np.float32)


@cache
def still_life() -> Scene:
    """The demo's scene."""
    atlas, novel = (0.42, 0.52, 0.075), (0.34, 0.44, 0.06)
    copper = (0.93, 0.55, 0.38)
    solids = [
        Solid(lambda p: disc_distance(p, 1.55, 0.04, 0.02), oak, (1.55, 1.55, 0.04), (0, 0, -0.04),
              roughness=0.25, glossy=True),
        Solid(lambda p: disc_distance(p, 0.16 + 0.2 * np.exp(-9 * (p[2] + 0.41)), 0.41, 0.01) * 0.5, walnut,
              (0.4, 0.4, 0.41), (0, 0, -0.49)),
        Solid(lambda p: disc_distance(p, 0.62, 0.022, 0.02), porcelain, (0.62, 0.62, 0.022), (-0.45, -0.62, 0.022),
              roughness=0.2, glossy=True),
        Solid(lambda p: torus_distance(p[2], p[0], p[1], 0.27, 0.135), glazed, (0.41, 0.41, 0.14),
              (-0.45, -0.62, 0.175), roughness=0.3),
        Solid(rounded_box(atlas, 0.012), book("23395b", "e0c58a", atlas), atlas, (0.5, 0.67, 0.075), turned(20)),
        Solid(rounded_box(novel, 0.012), book("8c2f39", "f0e0c0", novel), novel, (0.46, 0.65, 0.21), turned(-14)),
        Solid(lambda p: length(*p) - 0.2, marble, (0.2, 0.2, 0.2), (0.30, 0.73, 0.47), roughness=0.15, glossy=True),
        Solid(vase_distance, delft, (0.26, 0.26, 0.5), (-0.6, 0.55, 0.5), turned(10), roughness=0.2, glossy=True),
        Solid(mug_distance, striped, (0.4, 0.22, 0.25), (0.72, -0.45, 0.25), turned(-50), roughness=0.25, glossy=True),
        Solid(lambda p: disc_distance(p, 0.19, 0.01, 0.005), coffee, (0.19, 0.19, 0.01), (0.72, -0.45, 0.4),
              roughness=0.15, glossy=True),
        Solid(lambda p: length(*p) - 0.15, plain("000000"), (0.15, 0.15, 0.15), (0.2, -1.06, 0.15),
              roughness=0.2, mirror=copper, glossy=True),
        Solid(rounded_box((0.16, 0.16, 0.16), 0.02), puzzle, (0.16, 0.16, 0.16), (-1.08, 0.05, 0.16), turned(33)),
        Solid(pencil_distance, pencil, (0.45, 0.037, 0.032), (0.16, -0.07, 0.032), turned(-14)),
    ]  # fmt: skip
    light = Light(position=(2.3, -1.6, 4.4), radius=0.55, color=(1.75, 1.5, 1.2))
    return Scene(solids, Rotunda(), light, zenith=(0.3, 0.34, 0.4), nadir=(0.17, 0.13, 0.1))
