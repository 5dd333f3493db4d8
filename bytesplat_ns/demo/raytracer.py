"""A small ray tracer in vectorised numpy: solids given by signed distances, one closed room, one area light.

Vectors are stored as rows of components, so N points are an array [3, N] and ``x, y, z = points`` unpacks them.
Lengths are world units, colours are linear RGB.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Protocol

import numpy as np
from numpy import ndarray as Array

SURFACE = 2e-3
"""A ray has arrived when the solid is nearer than this."""

LIFT = 6e-3
"""Secondary rays start this far above the surface, so that they do not meet it again."""

MAX_STEPS = 40
"""Sphere-tracing steps; a ray that needs more is grazing the solid and counts as passing it."""


def dot(a: Array, b: Array) -> Array:
    """Inner products of the columns: [3, N], [3, N] -> [N]."""
    return np.einsum("in,in->n", a, b)


def normalize(a: Array) -> Array:
    """Unit columns of [3, N]."""
    return a / np.sqrt(np.maximum(dot(a, a), 1e-12))


def mix(a: Array, b: Array, t: Array) -> Array:
    """From a to b as t goes from 0 to 1 (colours [3, 1] or [3, N], t [N])."""
    return a + (b - a) * np.clip(t, 0.0, 1.0)


@dataclass
class Surface:
    """What light meets at N points."""

    normal: Array  # [3, N] unit, out of the matter, world frame
    albedo: Array  # [3, N] diffuse reflectance
    emission: Array  # [3, N] light of its own
    mirror: Array  # [3, N] reflectance at normal incidence
    roughness: Array  # [N] of the GGX distribution of the highlight
    glossy: Array  # [N] bool, shows a mirror image of its surroundings


@dataclass
class Solid:
    """A body bounded by the zero set of a signed distance, in a frame of its own."""

    distance: Callable[[Array], Array]  # local points [3, N] -> signed distances [N], never overestimated
    albedo: Callable[[Array, Array], Array]  # local points and normals [3, N] -> [3, N]
    half_extent: tuple[float, float, float]  # of the box around the body, local frame
    position: tuple[float, float, float]  # of the local origin
    rotation: Array = field(default_factory=lambda: np.eye(3, dtype=np.float32))  # local to world
    roughness: float = 0.4
    mirror: tuple[float, float, float] = (0.04, 0.04, 0.04)
    glossy: bool = False

    def __post_init__(self) -> None:
        self.center = np.array(self.position, np.float32)[:, None]
        self.extent = np.array(self.half_extent, np.float32)[:, None]
        self.radius = float(np.linalg.norm(self.extent))

    def intersect(self, origin: Array, direction: Array) -> Array:
        """Distances [N] at which rays [3, N] (world frame, unit directions) first meet the body, or inf."""
        origin = self.rotation.T @ (origin - self.center)
        direction = self.rotation.T @ direction
        with np.errstate(divide="ignore", invalid="ignore"):
            one, other = (-self.extent - origin) / direction, (self.extent - origin) / direction
        enter = np.maximum(np.minimum(one, other).max(0), 0.0)
        leave = np.maximum(one, other).min(0)

        hit = np.full(origin.shape[1], np.inf, np.float32)
        rays = np.flatnonzero(enter < leave)
        origin, direction, t, leave = origin[:, rays], direction[:, rays], enter[rays], leave[rays]
        for _ in range(MAX_STEPS):
            step = self.distance(origin + t * direction)
            t = t + step
            arrived = step < SURFACE
            hit[rays[arrived]] = t[arrived]
            going = np.flatnonzero(~arrived & (t < leave))
            if not going.size:
                break
            rays, t, leave = rays[going], t[going], leave[going]
            origin, direction = origin[:, going], direction[:, going]
        return hit

    def surface(self, points: Array) -> Surface:
        """The surface at world points [3, N] on the body. Normals: tetrahedral differences (Quilez)."""
        local = self.rotation.T @ (points - self.center)
        corners = np.array([[1, -1, -1], [-1, -1, 1], [-1, 1, -1], [1, 1, 1]], np.float32)[:, :, None]
        normal = normalize(sum(c * self.distance(local + 2e-3 * c) for c in corners))
        count = points.shape[1]
        return Surface(
            normal=self.rotation @ normal,
            albedo=self.albedo(local, normal),
            emission=np.zeros((3, count), np.float32),
            mirror=np.broadcast_to(np.array(self.mirror, np.float32)[:, None], (3, count)),
            roughness=np.full(count, self.roughness, np.float32),
            glossy=np.full(count, self.glossy),
        )


class Room(Protocol):
    """What encloses the scene: every ray that starts inside meets it."""

    def intersect(self, origin: Array, direction: Array) -> Array: ...

    def surface(self, points: Array) -> Surface: ...


@dataclass
class Light:
    """A bright disc."""

    position: tuple[float, float, float]
    radius: float
    color: tuple[float, float, float]  # irradiance of a surface that faces the light, over pi

    def points(self, count: int) -> Array:
        """Points [3, count] spread evenly over the disc, which faces the origin (Vogel's spiral)."""
        center = np.array(self.position)
        axis = center / np.linalg.norm(center)
        side = np.cross(axis, [0.0, 0.0, 1.0])
        side /= np.linalg.norm(side)
        k = np.arange(count)
        r, phi = self.radius * np.sqrt((k + 0.5) / count), k * np.pi * (3 - 5**0.5)
        disc = np.outer(side, r * np.cos(phi)) + np.outer(np.cross(axis, side), r * np.sin(phi))
        return (center[:, None] + disc).astype(np.float32)


@dataclass
class Scene:
    """Solids in a room under one area light and a soft sky."""

    solids: list[Solid]
    room: Room
    light: Light
    zenith: tuple[float, float, float]  # ambient light from above
    nadir: tuple[float, float, float]  # and from below

    def __post_init__(self) -> None:
        self.centers = np.concatenate([s.center for s in self.solids], 1).T  # [S, 3]
        self.radii = np.array([s.radius for s in self.solids], np.float32)[:, None]  # [S, 1]
        volumes = np.array([np.prod(s.half_extent) for s in self.solids], np.float32)
        self.balls = np.cbrt(volumes)[:, None] ** 2  # [S, 1], squared radius of a ball about as big as the solid

    def _square_distance(self, points: Array) -> Array:
        """Squared distances [S, N] of points [3, N] from the solids' centres."""
        return (
            (self.centers**2).sum(1)[:, None] + dot(points, points) - 2 * np.einsum("sk,kn->sn", self.centers, points)
        )

    def candidates(self, origin: Array, direction: Array, reach: Array | float) -> list[Array]:
        """For each solid the indices of the rays that meet its bounding sphere before `reach` (a scalar or [N])."""
        to_center = np.einsum("sk,kn->sn", self.centers, direction) - dot(origin, direction)  # [S, N], along the ray
        square = self._square_distance(origin) - to_center**2  # of the centre from the line
        near = (square < self.radii**2) & (to_center > -self.radii) & (to_center - self.radii < reach)
        return [np.flatnonzero(row) for row in near]

    def cast(self, origin: Array, direction: Array) -> tuple[Array, Array]:
        """Distances [N] to what rays [3, N] meet first, and which solid that is [N] (-1: the room)."""
        distance = self.room.intersect(origin, direction)
        which = np.full(distance.shape, -1, np.int32)
        for s, rays in enumerate(self.candidates(origin, direction, distance)):
            hit = self.solids[s].intersect(origin[:, rays], direction[:, rays])
            nearer = hit < distance[rays]
            distance[rays[nearer]], which[rays[nearer]] = hit[nearer], s
        return distance, which

    def visible(self, origin: Array, direction: Array, reach: Array) -> Array:
        """Whether rays [3, N] travel the distance `reach` [N] without meeting a solid: bool [N]."""
        free = np.ones(origin.shape[1], bool)
        for s, rays in enumerate(self.candidates(origin, direction, reach)):
            rays = rays[free[rays]]
            free[rays] = self.solids[s].intersect(origin[:, rays], direction[:, rays]) >= reach[rays]
        return free

    def openness(self, points: Array, normals: Array, which: Array) -> Array:
        """How much of the sky above [N] surface points the solids leave free, each taken for a ball (Quilez)."""
        facing = np.einsum("sk,kn->sn", self.centers, normals) - dot(points, normals)  # [S, N], above the horizon
        square = self._square_distance(points)
        hidden = 0.8 * np.maximum(facing, 0) / np.sqrt(square) * np.minimum(self.balls / square, 1)
        solid = np.flatnonzero(which >= 0)
        hidden[which[solid], solid] = 0  # nothing shades itself
        return np.prod(1 - hidden, 0)

    def surface(self, points: Array, which: Array) -> Surface:
        """The surface at points [3, N] of the solids `which` [N] (-1: the room)."""
        order = np.argsort(which, kind="stable")
        bounds = np.searchsorted(which[order], np.arange(-1, len(self.solids) + 1))
        parts = [
            matter.surface(points[:, order[start:stop]])
            for matter, start, stop in zip([self.room, *self.solids], bounds[:-1], bounds[1:], strict=True)
            if start < stop
        ]
        back = np.argsort(order, kind="stable")
        whole = {f.name: np.concatenate([getattr(part, f.name) for part in parts], -1) for f in fields(Surface)}
        return Surface(**{name: value[..., back] for name, value in whole.items()})

    def radiance(self, origin: Array, direction: Array, lamp: Array, bounces: int = 1) -> Array:
        """Light [3, N] that comes back along rays [3, N], each lit from a point `lamp` [3, N] of the light.

        Lambert, GGX highlights (Walter et al. 2007), Schlick's Fresnel term, and `bounces` mirror images.
        """
        distance, which = self.cast(origin, direction)
        points = origin + distance * direction
        surface = self.surface(points, which)
        normal = surface.normal
        lifted = points + LIFT * normal

        to_lamp = lamp - lifted
        reach = np.sqrt(dot(to_lamp, to_lamp))
        to_lamp = to_lamp / reach
        n_l, n_v = np.maximum(dot(normal, to_lamp), 0.0), np.maximum(-dot(normal, direction), 1e-3)
        lit = np.flatnonzero(n_l > 0)
        n_l[lit] *= self.visible(lifted[:, lit], to_lamp[:, lit], reach[lit])
        key = np.array(self.light.color, np.float32)[:, None] * n_l

        half = normalize(to_lamp - direction)
        fresnel = surface.mirror + (1 - surface.mirror) * (1 - np.maximum(dot(half, to_lamp), 0.0)) ** 5
        a2, k = surface.roughness**4, (surface.roughness + 1) ** 2 / 8
        spread = dot(normal, half) ** 2 * (a2 - 1) + 1
        highlight = a2 / (4 * spread * spread * (n_l * (1 - k) + k) * (n_v * (1 - k) + k))

        zenith, nadir = (np.array(color, np.float32)[:, None] for color in (self.zenith, self.nadir))
        sky = mix(nadir, zenith, 0.5 + 0.5 * normal[2]) * self.openness(points, normal, which)
        light = surface.albedo * (sky + key) + fresnel * np.minimum(highlight, 12.0) * key + surface.emission

        seen = np.flatnonzero(surface.glossy)
        if bounces and seen.size:
            away = normalize(direction[:, seen] + 2 * n_v[seen] * normal[:, seen])
            f0 = surface.mirror[:, seen]
            image = self.radiance(lifted[:, seen], away, lamp[:, seen], bounces - 1)
            light[:, seen] += (f0 + (1 - f0) * (1 - n_v[seen]) ** 5) * image
        return light
