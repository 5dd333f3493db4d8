"""Photographs of the still life as a nerfstudio folder: images, transforms.json and a sparse coloured point cloud.

Cameras are pinholes on three rings around the table. Poses are camera to world in OpenGL axes (x right, y up, z
backward), world z up; intrinsics are pixels, with the centre of the first pixel at (0.5, 0.5).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from numpy import ndarray as Array
from PIL import Image

from bytesplat_ns.demo.raytracer import Scene
from bytesplat_ns.demo.scene import still_life

RINGS = ((18.0, 2.9, 18), (30.0, 3.1, 16), (43.0, 3.2, 14))
"""Elevation in degrees, distance and share of the photos: higher rings are shorter."""

EXPOSURE = 1.3
CLOUD_NOISE = 0.5
"""Standard deviation of a triangulated point in pixels of the photo that sees it."""


@dataclass(frozen=True)
class Capture:
    """How the scene is photographed."""

    views: int = 48
    """Number of photos."""
    width: int = 240
    """Pixels."""
    height: int = 180
    """Pixels."""
    supersample: int = 3
    """Rays along each side of a pixel, each lit from another point of the lamp."""
    points: int = 9000
    """Size of the sparse point cloud."""
    seed: int = 0
    """Of the hand-held camera positions and of the point cloud."""
    workers: int = os.cpu_count() or 1
    """Processes that render."""

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if name != "seed" and value < 1:
                raise ValueError(f"capture: {name} is {value}; it must be at least 1.")
        if self.points > self.views * self.width * self.height:
            raise ValueError(f"capture: {self.points} points are more than the photos have pixels; lower points.")

    @property
    def focal(self) -> float:
        """Focal length in pixels: 58 degrees across."""
        return 0.9 * self.width


def poses(capture: Capture) -> Array:
    """Camera-to-world matrices [V, 4, 4] around the table, OpenGL axes, world units."""
    draw = np.random.default_rng(capture.seed)
    shares = np.cumsum([share for _, _, share in RINGS])
    ring = np.searchsorted(shares * capture.views / shares[-1], np.arange(capture.views), side="right")
    matrices = np.tile(np.eye(4), (capture.views, 1, 1))
    for v, matrix in enumerate(matrices):
        elevation, distance, _ = RINGS[ring[v]]
        mates = np.flatnonzero(ring == ring[v])
        # Held by hand: every camera is a little off its ring and off its aim.
        azimuth = 2 * np.pi * ((v - mates[0]) / len(mates) + 0.31 * ring[v]) + draw.normal(0, 0.03)
        height = np.radians(elevation + draw.normal(0, 1.5))
        target = np.array([0.0, 0.0, 0.24]) + draw.normal(0, 0.05, 3)
        backward = np.array([np.cos(azimuth), np.sin(azimuth), np.tan(height)]) * np.cos(height)
        right = np.array([-np.sin(azimuth), np.cos(azimuth), 0.0])
        matrix[:3, :3] = np.stack([right, np.cross(backward, right), backward], axis=1)
        matrix[:3, 3] = target + (distance + draw.normal(0, 0.1)) * backward
    return matrices


def rays(capture: Capture, pose: Array, x: Array, y: Array) -> tuple[Array, Array]:
    """Origins and unit directions, both float32 [3, N], of the rays through pixel positions x, y [N]."""
    local = np.stack([x - 0.5 * capture.width, 0.5 * capture.height - y, np.full(x.shape, -capture.focal)])
    direction = pose[:3, :3] @ (local / np.linalg.norm(local, axis=0))
    origin = np.broadcast_to(pose[:3, 3:], direction.shape)
    return origin.astype(np.float32), direction.astype(np.float32)


def photograph(scene: Scene, capture: Capture, pose: Array) -> Array:
    """The sRGB photo uint8 [H, W, 3] that a camera takes from `pose` [4, 4]."""
    y, x = (axis.ravel() for axis in np.mgrid[: capture.height, : capture.width])
    side = capture.supersample
    steps = (np.arange(side) + 0.5) / side
    lamps = scene.light.points(side * side).reshape(3, side, side)
    light = np.zeros((3, x.size), np.float32)
    for row, v in enumerate(steps):
        # One row of subpixels at a time is many enough rays for numpy and few enough for the cache.
        subpixels = [rays(capture, pose, x + u, y + v) for u in steps]
        origin, direction = (np.concatenate(parts, axis=1) for parts in zip(*subpixels, strict=True))
        radiance = scene.radiance(origin, direction, lamp=np.repeat(lamps[:, row], x.size, axis=1))
        light += (1 - np.exp(-EXPOSURE * radiance)).reshape(3, side, -1).sum(1)  # a soft shoulder keeps highlights' hue
    srgb = (light / side**2) ** (1 / 2.2)
    return (255 * srgb + 0.5).astype(np.uint8).T.reshape(capture.height, capture.width, 3)


def triangulate(
    scene: Scene, capture: Capture, pose: Array, photo: Array, count: int, seed: int
) -> tuple[Array, Array]:
    """Noisy surface points float32 [count, 3] that a photo sees, with its colours uint8 [count, 3].

    Like structure from motion it finds points where the photo has texture, hence few on smooth surfaces.
    """
    draw = np.random.default_rng(seed)
    gradient = np.hypot(*np.gradient(photo.mean(-1))).ravel() + 1.0
    pixel = draw.choice(gradient.size, count, replace=False, p=gradient / gradient.sum())
    y, x = np.divmod(pixel, capture.width)
    origin, direction = rays(capture, pose, x + 0.5, y + 0.5)
    distance, _ = scene.cast(origin, direction)
    noise = draw.normal(0, CLOUD_NOISE / capture.focal, (3, count)) * distance
    return (origin + distance * direction + noise).T.astype(np.float32), photo[y, x]


def take(capture: Capture, job: tuple[int, Array]) -> tuple[Array, Array, Array]:
    """Photo `job` = (number, pose) with the points and colours it gives to the cloud."""
    number, pose = job
    scene = still_life()
    photo = photograph(scene, capture, pose)
    count = capture.points * (number + 1) // capture.views - capture.points * number // capture.views
    return photo, *triangulate(scene, capture, pose, photo, count, seed=capture.seed + 1000 * (number + 1))


def take_all(capture: Capture, cameras: Array) -> Iterator[tuple[Array, Array, Array]]:
    """`take` for every pose, in order, spread over the workers."""
    jobs, work = list(enumerate(cameras)), partial(take, capture)
    workers = min(capture.workers, len(jobs))
    if workers == 1:
        yield from map(work, jobs)
        return
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        yield from pool.map(work, jobs)


def write_capture(output: Path, capture: Capture) -> None:
    """Photograph the scene into the folder `output`, which nerfstudio's default dataparser reads."""
    from bytesplat_ns.splats.ply import write_vertices  # not at the top: it brings torch, which the workers do not need

    (output / "images").mkdir(parents=True, exist_ok=True)
    cameras = poses(capture)
    frames, clouds, colors = [], [], []
    for number, (photo, points, shades) in enumerate(take_all(capture, cameras)):
        name = f"images/frame_{number + 1:05d}.png"
        Image.fromarray(photo).save(output / name)
        frames.append({"file_path": name, "transform_matrix": cameras[number].tolist()})
        clouds.append(points)
        colors.append(shades)
    columns = [*np.concatenate(clouds).T, *np.concatenate(colors).T]
    cloud = dict(zip(("x", "y", "z", "red", "green", "blue"), columns, strict=True))
    write_vertices(output / "sparse_pc.ply", len(columns[0]), cloud)
    intrinsics = {
        "camera_model": "PINHOLE",
        "fl_x": capture.focal,
        "fl_y": capture.focal,
        "cx": capture.width / 2,
        "cy": capture.height / 2,
        "w": capture.width,
        "h": capture.height,
    }
    transforms = {**intrinsics, "ply_file_path": "sparse_pc.ply", "frames": frames}
    (output / "transforms.json").write_text(json.dumps(transforms, indent=1))
