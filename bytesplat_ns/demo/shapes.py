"""Signed distances of the still life's shapes, after Inigo Quilez: points [3, N] in the shape's frame -> [N].

A distance may be underestimated (then a ray takes more steps), never overestimated.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy import ndarray as Array

Distance = Callable[[Array], Array]


def length(*components: Array) -> Array:
    """Euclidean norm of components [N]."""
    return np.sqrt(sum(c * c for c in components))


def ball(radius: float) -> Distance:
    return lambda p: length(*p) - radius


def box(half: tuple[float, float, float], bevel: float) -> Distance:
    """A box of half extents `half` with rounded edges."""
    core = np.array(half, np.float32)[:, None] - np.float32(bevel)

    def distance(p: Array) -> Array:
        q = np.abs(p) - core
        return length(*np.maximum(q, 0.0)) + np.minimum(q.max(0), 0.0) - bevel

    return distance


def disc(radius: float, half_height: float, bevel: float) -> Distance:
    """A cylinder about z with rounded rims."""

    def distance(p: Array) -> Array:
        r, h = length(p[0], p[1]) - (radius - bevel), np.abs(p[2]) - (half_height - bevel)
        return length(np.maximum(r, 0.0), np.maximum(h, 0.0)) + np.minimum(np.maximum(r, h), 0.0) - bevel

    return distance


def ring(major: float, minor: float) -> Distance:
    """A torus about z."""
    return lambda p: length(length(p[0], p[1]) - major, p[2]) - minor


def mug() -> Distance:
    """A cup of radius 0.22 and height 0.5 with a handle towards +x."""
    body, handle, hollow = disc(0.22, 0.25, 0.03), ring(0.135, 0.03), disc(0.185, 0.25, 0.05)

    def distance(p: Array) -> Array:
        x, y, z = p
        outside = np.minimum(body(p), handle(np.stack([x - 0.23, z, y])))
        return np.maximum(outside, -hollow(np.stack([x, y, z - 0.06])))

    return distance


def vase() -> Distance:
    """A vase of height 1 about z, open at the top: foot, belly, neck, lip."""
    heights, radii = (-0.5, -0.35, -0.1, 0.15, 0.32, 0.42, 0.5), (0.12, 0.19, 0.25, 0.18, 0.105, 0.1, 0.14)
    profile = np.polyfit(heights, radii, 5).astype(np.float32)

    def distance(p: Array) -> Array:
        x, y, z = p
        side = length(x, y) - np.polyval(profile, np.clip(z, -0.5, 0.5))
        hollow = np.maximum(side + 0.03, 0.2 - z)
        return 0.75 * np.maximum(np.maximum(side, np.abs(z) - 0.5), -hollow)  # the profile slopes by up to 0.87

    return distance


def pedestal() -> Distance:
    """A table leg 0.82 high about z that widens towards the floor."""

    def distance(p: Array) -> Array:
        radius = 0.16 + 0.2 * np.exp(-9 * (np.clip(p[2], -0.41, 0.41) + 0.41))
        return 0.48 * np.maximum(length(p[0], p[1]) - radius, np.abs(p[2]) - 0.41)  # the foot slopes by up to 1.8

    return distance


def pencil() -> Distance:
    """A hexagonal pencil along x, 0.9 long, sharpened at +x."""

    def distance(p: Array) -> Array:
        x, y, z = p
        sides = np.maximum(np.abs(y) * 0.75**0.5 + np.abs(z) * 0.5, np.abs(z)) - 0.032
        point = (length(y, z) - 0.24 * (0.45 - x)) * 0.972  # the cone's cosine
        return np.maximum(np.maximum(sides, point), np.abs(x) - 0.45)

    return distance
