"""What the still life is made of: albedo (linear RGB [3, N]) at points [3, N] with normals [3, N], in the body's frame.

Nothing is stored: every pattern is a formula, with edges about as soft as a pixel of the demo's photos.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy import ndarray as Array

from bytesplat_ns.demo.raytracer import mix
from bytesplat_ns.demo.shapes import length

Texture = Callable[[Array, Array], Array]
TURN = 2 * np.pi


def rgb(code: str) -> Array:
    """A linear colour [3, 1] from sRGB hexadecimal."""
    return (np.array([int(code[i : i + 2], 16) for i in (0, 2, 4)], np.float32) / 255)[:, None] ** 2.2


def step(edge: float | Array, x: Array, blur: float = 0.01) -> Array:
    """0 below the edge, 1 above it."""
    t = np.clip((x - edge) / blur + 0.5, 0.0, 1.0)
    return t * t * (3 - 2 * t)


def band(x: Array, start: float | Array, width: float, blur: float = 0.01) -> Array:
    """1 from `start` over `width`, else 0."""
    return step(start, x, blur) * (1 - step(start + width, x, blur))


def stripes(x: Array, period: float, width: float, blur: float = 0.01) -> Array:
    """1 in the first `width` of every period, else 0."""
    x = np.abs(np.mod(x, period) - 0.5 * width)
    return 1 - step(0.5 * width, np.minimum(x, period - x), blur)


def scatter(*cells: Array) -> Array:
    """Numbers in [0, 1) that look random, one for each cell of a grid."""
    x = sum(c * k for c, k in zip(cells, (12.9898, 78.233, 37.719), strict=False))
    return np.mod(np.sin(x) * 43758.547, 1.0).astype(np.float32)


def clouds(p: Array, frequency: float, seed: int, waves: int = 7) -> Array:
    """Smooth noise in about [-1, 1]: plane waves of one frequency in many directions, hence band-limited."""
    draw = np.random.default_rng(seed)
    k = draw.normal(size=(waves, 3))
    k *= frequency * draw.uniform(0.6, 1.4, (waves, 1)) / np.linalg.norm(k, axis=1, keepdims=True)
    phase = draw.uniform(0, TURN, (waves, 1)).astype(np.float32)
    return np.sin(np.einsum("wk,kn->wn", k.astype(np.float32), p) + phase).sum(0) * np.float32((2 / waves) ** 0.5)


def plain(code: str) -> Texture:
    return lambda p, normal: np.broadcast_to(rgb(code), p.shape)


def oak(p: Array, normal: Array) -> Array:
    """Planks along x with rings, streaks and joints."""
    x, y, z = p
    plank = np.floor(y / 0.36)
    x = x + 7 * scatter(plank)
    grain = np.stack([0.7 * x, 0.9 * y, z]) + 3 * scatter(plank + 0.5)
    rings = np.sin(34 * (y + 3 * scatter(plank + 0.5) + 0.22 * clouds(grain, 3.2, seed=1)))
    streaks = clouds(np.stack([3 * x, 40 * y, 40 * z]), 1.0, seed=2)
    wood = mix(rgb("7d4d29"), rgb("b47e48"), 0.5 + 0.35 * rings + 0.15 * streaks)
    return wood * (0.8 + 0.35 * scatter(plank + 0.25)) * (0.35 + 0.65 * stripes(y - 0.006, 0.36, 0.348, 0.012))


def walnut(p: Array, normal: Array) -> Array:
    rings = np.sin(25 * length(p[0], p[1]) + 2 * clouds(p, 4.0, seed=3))
    return mix(rgb("3c2415"), rgb("6b4226"), 0.5 + 0.5 * rings)


def porcelain(p: Array, normal: Array) -> Array:
    """White with a rim of blue petals: the plate."""
    r, u = length(p[0], p[1]), np.arctan2(p[1], p[0])
    petals = band(r, 0.46, 0.0425 * (1 + np.cos(24 * u)))
    return mix(rgb("f2efe6"), rgb("2b4f9e"), petals + step(0.6, r))


def delft(p: Array, normal: Array) -> Array:
    """White with blue bands, waves and six blossoms: the vase."""
    u, z = np.arctan2(p[1], p[0]), p[2]
    bands = band(z, -0.47, 0.03) + band(z, 0.2, 0.02) + band(z, 0.44, 0.035)
    waves = band(z, -0.33 - 0.03 * np.sin(9 * u), 0.025) + band(z, 0.26 + 0.018 * np.sin(8 * u), 0.03)
    x, y = 0.25 * (np.mod(6 * u / TURN, 1.0) - 0.5), z + 0.06
    r = length(x, y)
    blossom = 1 - step(0.065 + 0.035 * np.cos(6 * np.arctan2(y, x)), r, 0.012) - band(r, 0.014, 0.014)
    return mix(rgb("eeece4"), rgb("1f3f94"), bands + waves + blossom)


def doughnut(p: Array, normal: Array) -> Array:
    """Dough, pink icing with a wavy edge, sprinkles; for a ring of major radius 0.27."""
    u, v = np.arctan2(p[1], p[0]), np.arctan2(p[2], length(p[0], p[1]) - 0.27)
    dough = mix(rgb("b9783a"), rgb("dca45f"), 0.5 + 0.5 * clouds(p, 14.0, seed=4))
    icing = step(0.012 * np.sin(7 * u) + 0.01 * np.sin(17 * u + 1), p[2], 0.015)
    # One sprinkle in each cell of a grid around the ring, shifted and turned at random.
    row, column = np.floor(v / 0.45), np.floor(u / 0.21)
    turn = TURN * scatter(row, column)
    x = (u / 0.21 - column - 0.5) * 0.06 + 0.012 * np.cos(5 * turn)
    y = (v / 0.45 - row - 0.5) * 0.06 + 0.012 * np.sin(7 * turn)
    x, y = x * np.cos(turn) + y * np.sin(turn), y * np.cos(turn) - x * np.sin(turn)
    sprinkle = (1 - step(0.022, np.abs(x), 0.008)) * (1 - step(0.008, np.abs(y), 0.008))
    pick = np.floor(4 * scatter(column, row + 0.5))
    candy = sum((pick == i) * rgb(code) for i, code in enumerate(("fff3b0", "7fd6ff", "ffffff", "9be28f")))
    return mix(dough, mix(rgb("e8709a"), candy, sprinkle), icing)


def marble(p: Array, normal: Array) -> Array:
    """Green stone with pale veins."""
    warped = p + 0.09 * np.stack([clouds(p, 7.0, seed) for seed in (5, 6, 7)])
    vein = 1 - np.abs(np.sin(9 * warped[0] + 5 * warped[2] + 1.2 * clouds(warped, 6.0, seed=8)))
    stone = mix(rgb("2f6b5e"), rgb("1c4a47"), 0.5 + 0.5 * clouds(p, 9.0, seed=9))
    return mix(stone, rgb("e9e2cf"), vein**5)


def glaze(p: Array, normal: Array) -> Array:
    """Cream with two red bands and a row of dots, white inside: the mug."""
    r, u, z = length(p[0], p[1]), np.arctan2(p[1], p[0]), p[2]
    dots = 1 - step(0.034, length(0.115 * (np.mod(12 * u / TURN, 1.0) - 0.5), z), 0.012)
    bands = band(z, -0.17, 0.07) + band(z, 0.1, 0.07)
    outside = mix(mix(rgb("f3e3c0"), rgb("d6552d"), bands), rgb("1f6f78"), dots)
    return mix(rgb("fff6e6"), outside, step(0.205, r))


def coffee(p: Array, normal: Array) -> Array:
    return mix(rgb("2a1608"), rgb("5a3418"), step(0.15, length(p[0], p[1]), 0.05))


def book(cover: str, ink: str, half: tuple[float, float, float]) -> Texture:
    """A closed book: a cover with a frame, a title and lines of text; page edges on three sides, the spine at -x."""
    hx, hy, hz = half

    def albedo(p: Array, normal: Array) -> Array:
        x, y, z = p
        frame = band(np.maximum(np.abs(x) / hx, np.abs(y) / hy), 0.84, 0.035, 0.02)
        title = stripes(x, 0.08, 0.055, 0.015) * (np.abs(x) < 0.2) * (np.abs(y - 0.22) < 0.06)
        line = np.floor(y / 0.1)
        words = step(0.25, scatter(np.floor(x / 0.05), line), 0.1) * (np.abs(x) < 0.14 + 0.1 * scatter(line + 0.5))
        text = words * stripes(y, 0.1, 0.05, 0.015) * (y > -0.3) * (y < 0.05)
        spine = stripes(y + 0.3, 0.2, 0.02) * (normal[0] < -0.7)
        printed = mix(rgb(cover), rgb(ink), (frame + title + text) * (normal[2] > 0.7) + spine)
        paper = mix(rgb("c9bd9c"), rgb("f0e7cd"), 0.5 + 0.4 * np.sin(160 * z))
        pages = (np.abs(z) < hz - 0.02) & (x > 0.02 - hx) & (np.abs(normal[2]) < 0.7)
        return np.where(pages, paper, printed)

    return albedo


def puzzle(p: Array, normal: Array) -> Array:
    """Three by three coloured stickers on each side of a cube of half extent 0.16."""
    x, y, z = 1.5 + p / np.float32(0.1067)
    axis = np.abs(normal).argmax(0)
    u, v = np.choose(axis, [y, z, x]), np.choose(axis, [z, x, y])
    side = 2 * axis + (np.take_along_axis(normal, axis[None], 0)[0] > 0)
    pick = np.floor(6 * scatter(np.floor(u), np.floor(v), side.astype(np.float32)))
    colors = ("c62828", "1565c0", "f9c80e", "2e7d32", "f5f5f5", "ef6c00")
    sticker = sum((pick == i) * rgb(code) for i, code in enumerate(colors))
    edge = np.minimum(0.5 - np.abs(u % 1 - 0.5), 0.5 - np.abs(v % 1 - 0.5))
    return mix(rgb("161616"), sticker, step(0.09, edge, 0.06))


def pencil(p: Array, normal: Array) -> Array:
    """From -x to +x: eraser, ferrule, paint, wood, lead."""
    x, y, z = p
    wood = 0.31 - 0.02 * np.sin(6 * np.arctan2(z, y))  # scalloped where the hexagon meets the cone
    color = mix(rgb("e07a7a"), rgb("b8bcc2"), step(-0.4, x))
    for start, code in ((-0.35, "f2b705"), (wood, "d9a066"), (0.4, "222222")):
        color = mix(color, rgb(code), step(start, x))
    return color


def tiles(x: Array, y: Array) -> Array:
    """A floor of square tiles in two colours with a small diamond at each corner."""
    u, v = x / np.float32(0.62), y / np.float32(0.62)
    column, row = np.floor(u), np.floor(v)
    tile = mix(rgb("bba888"), rgb("9a5a40"), np.mod(column + row, 2)) * (0.88 + 0.24 * scatter(column, row))
    tile = tile * (1 + 0.06 * clouds(np.stack([x, y, 0 * x]), 8.0, seed=10))
    du, dv = np.abs(np.mod(u + 0.5, 1) - 0.5), np.abs(np.mod(v + 0.5, 1) - 0.5)  # from the nearest joint
    tile = mix(rgb("a89a84"), tile, step(0.022, np.minimum(du, dv), 0.02))
    return mix(rgb("3f6478"), tile, step(0.2, du + dv, 0.03))


def windowed_wall(u: Array, z: Array, period: float) -> tuple[Array, Array]:
    """Albedo and emitted light of a wall at azimuth u, height z: eight arched windows, `period` apart, over panelling.

    Behind the glass are hills and an evening sky.
    """
    x = period * (np.mod(8 * u / TURN, 1.0) - 0.5)  # from the window's axis
    arch = np.where(z < 1.9, np.abs(x), length(x, z - 1.9))
    frame = (1 - step(1.14, arch, 0.04)) * step(0.03, z, 0.03)
    bars = np.maximum(stripes(x + 0.035, 0.5, 0.07), stripes(z - 0.88, 0.75, 0.06) * (z < 2.2))
    glass = (1 - step(1.0, arch, 0.04)) * step(0.15, z, 0.03) * (1 - bars)

    plaster = rgb("d8b48a") * (1 + 0.05 * clouds(np.stack([3 * u, z, 0 * z]), 5.0, seed=11))
    panels = mix(rgb("5b6f66"), rgb("465850"), stripes(u, TURN / 48, 0.02))
    wall = mix(mix(panels, plaster, step(-0.15, z, 0.03)), rgb("f1ead8"), frame + band(z, -0.17, 0.08))

    crest = 0.75 + 0.18 * np.sin(3 * u) + 0.1 * np.sin(7 * u + 2)
    hills = mix(rgb("5f7f5a"), rgb("8fa98a"), step(crest - 0.3, z, 0.05))
    sky = mix(rgb("ffd9a0"), rgb("86b6e8"), (z - 0.6) / 2.2)
    return wall * (1 - glass), 1.15 * glass * mix(hills, sky, step(crest, z, 0.05))
